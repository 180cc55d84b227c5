from __future__ import annotations

import shutil
import subprocess
import sysconfig

import attrs
import pytest

from zerotune.platform.toolchain import (
    LocalMachine,
    Tool,
    detect_toolchain,
    parse_version,
)

needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")

GCC = "c++ (Debian 12.2.0-14+deb12u1) 12.2.0\nCopyright (C) 2022 Free Software Foundation\n"


@attrs.define(kw_only=True)
class FakeMachine:
    """A machine with these programs and version texts; ``has_*`` decide what compiles."""

    programs: dict[str, str] = attrs.field(factory=dict)
    environment: dict[str, str] = attrs.field(factory=dict)
    files: tuple[str, ...] = ()
    has_header: bool = True
    has_library: bool = True

    def environ(self):
        return self.environment

    def which(self, program):
        if program not in self.programs:
            return None
        return program if program.startswith("/") else f"/usr/bin/{program}"

    def exists(self, path):
        return path in self.files

    def run(self, command, source=""):  # noqa: ARG002
        if command[-1] == "--version":
            return 0, self.programs[command[0]]
        compiles = self.has_header if "-E" in command else self.has_library
        return (0, "") if compiles else (1, "fatal error")


@pytest.mark.parametrize(
    ("output", "version"),
    [
        (GCC, "12.2.0"),
        ("c++ (Ubuntu 13.3.0-6ubuntu2~24.04) 13.3.0\nCopyright", "13.3.0"),
        ("c++ (GCC) 14.2.1 20240912 (Red Hat 14.2.1-3)", "14.2.1"),
        ("x86_64-conda-linux-gnu-c++ (conda-forge gcc 13.3.0-1) 13.3.0", "13.3.0"),
        ("Debian clang version 14.0.6\nTarget: x86_64-pc-linux-gnu", "14.0.6"),
        ("Apple clang version 15.0.0 (clang-1500.3.9.4)\n", "15.0.0"),
        ("nvcc: NVIDIA (R) Cuda compiler driver\nCuda compilation, release 12.8, V12.8.93", "12.8"),
        ("1.11.1\n", "1.11.1"),
        ("1.13.0.git.kitware.jobserver-pipe-1\n", "1.13.0"),
        ("no numbers here", None),
        ("", None),
    ],
)
def test_versions_are_parsed_from_real_outputs(output, version):
    assert parse_version(output) == version


def test_an_empty_machine_has_no_tools():
    found = detect_toolchain(FakeMachine())

    assert (found.cxx, found.ninja, found.nvcc, found.cuda_home) == (None, None, None, None)
    assert not found.python_headers
    assert (found.libaio.header, found.libaio.library) == (None, None)
    assert not found.libaio.usable


def test_all_tools_of_a_complete_machine_are_found():
    machine = FakeMachine(
        programs={"c++": GCC, "ninja": "1.11.1", "nvcc": "", "/usr/bin/nvcc": "release 12.8,"},
        files=(f"{sysconfig.get_path('include')}/Python.h",),
    )

    found = detect_toolchain(machine)

    assert (found.cxx.path, found.cxx.version) == ("/usr/bin/c++", "12.2.0")
    assert found.ninja.version == "1.11.1"
    assert found.cuda_home == "/usr"
    assert found.nvcc.version == "12.8"
    assert found.python_headers
    assert found.libaio.usable


def test_the_variable_cxx_selects_the_compiler():
    machine = FakeMachine(programs={"g++-13": "g++-13 (GCC) 13.1.0"}, environment={"CXX": "g++-13"})

    assert detect_toolchain(machine).cxx.version == "13.1.0"


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_the_environment_selects_the_cuda_toolkit(variable):
    machine = FakeMachine(
        programs={"nvcc": "", "/opt/cuda/bin/nvcc": "release 12.4, V12.4.131"},
        environment={variable: "/opt/cuda"},
    )

    found = detect_toolchain(machine)

    assert found.cuda_home == "/opt/cuda"
    assert (found.nvcc.path, found.nvcc.version) == ("/opt/cuda/bin/nvcc", "12.4")


def test_in_a_cuda_folder_without_a_compiler_no_nvcc_is_found():
    found = detect_toolchain(FakeMachine(files=("/usr/local/cuda",)))

    assert found.cuda_home == "/usr/local/cuda"
    assert found.nvcc is None


@needs_compiler
class TestRealCompiler:
    def test_the_version_equals_the_compilers_own_short_output(self):
        short = subprocess.run(
            ["c++", "-dumpfullversion", "-dumpversion"], capture_output=True, text=True, check=True
        )

        assert detect_toolchain().cxx.version == short.stdout.strip()

    def test_a_missing_header_is_reported(self):
        class WithoutIncludes(LocalMachine):
            def environ(self):
                return {"CFLAGS": "-nostdinc"}

        assert detect_toolchain(WithoutIncludes()).libaio.header is False

    def test_a_library_that_does_not_link_is_reported(self):
        class WithoutLibraries(LocalMachine):
            def environ(self):
                return {"LDFLAGS": "-lthere_is_no_such_library"}

        assert detect_toolchain(WithoutLibraries()).libaio.library is False

    def test_the_check_leaves_no_files_behind(self, tmp_path, monkeypatch):
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        monkeypatch.chdir(tmp_path)

        detect_toolchain()

        assert list(tmp_path.iterdir()) == []

    def test_a_compiler_that_does_not_run_is_reported(self, tmp_path):
        broken = tmp_path / "broken-c++"
        broken.write_text("#!/bin/sh\nexit 3\n")
        broken.chmod(0o755)

        class Broken(LocalMachine):
            def environ(self):
                return {"CXX": str(broken)}

        found = detect_toolchain(Broken())

        assert found.cxx is not None
        assert found.cxx.version is None
        assert not found.libaio.usable


def test_a_ninja_beside_python_but_off_the_path_is_found(monkeypatch, tmp_path):
    ninja = tmp_path / "ninja"
    ninja.write_text("#!/bin/sh\necho 1.11.1\n")
    ninja.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")

    assert detect_toolchain().ninja == Tool(path=str(ninja), version="1.11.1")
