"""Root causes found in the output of real build tools."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from zerotune.backend.op_causes import diagnose_build, missing_module


def torch_error(output):
    """Wrap build output as torch's error does."""
    return (
        "Error building extension 'cpu_adam': [1/3] c++ -MMD -MF cpu_adam.o.d -c cpu_adam.cpp\n"
        f"FAILED: [code=1] cpu_adam.o \n{output}\nninja: build stopped: subcommand failed.\n"
    )


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("source", "flags", "cause", "fix"),
    [
        ("#include <libaio_x.h>", (), "the header libaio_x.h is missing", "libaio_x.h"),
        (
            "int main() {}",
            ("-lno_such_library",),
            "the linker cannot find the library no_such_library",
            "libno_such_library",
        ),
        ("int f(); int main() { return f(); }", (), "defines f()", None),
        ("int main() { return nowhere; }", (), "the compiler reports: ", None),
        ("int main() {}", ("-std=c++99",), "the compiler is too old for -std=c++99", "newer g++"),
    ],
)
def test_errors_of_the_local_compiler_are_diagnosed(tmp_path, source, flags, cause, fix):
    done = subprocess.run(
        ["c++", "-x", "c++", "-", "-o", str(tmp_path / "out"), *flags],
        input=source,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0

    found = diagnose_build(torch_error(done.stderr))

    assert cause in found.cause
    assert "\n" not in found.cause
    assert (fix is None) == (found.fix is None)
    assert fix is None or fix in found.fix


@pytest.mark.parametrize(
    ("output", "cause", "fix"),
    [
        (
            "/x/Python.h_user.h:5:10: fatal error: Python.h: No such file or directory",
            "the header Python.h is missing",
            "python3-dev",
        ),
        ("cpu_adam.h:9:10: fatal error: 'omp.h' file not found", "omp.h is missing", "omp.h"),
        ("/usr/bin/ld: cannot find -laio: No such file or directory", "library aio", "libaio-dev"),
        ("/usr/bin/ld: cannot find -lcuda", "library cuda", "NVIDIA driver"),
        ("ld: library not found for -lgomp", "library gomp", "OpenMP"),
        (
            "c++: fatal error: Killed signal terminated program cc1plus\ncompilation terminated.",
            "because memory ran out",
            "MAX_JOBS=1",
        ),
        ("/bin/sh: 1: /usr/local/cuda/bin/nvcc: not found", "nvcc is missing", "CUDA toolkit"),
        ("/bin/sh: line 1: c++: command not found", "the program c++ is missing", "CXX"),
        ("[Errno 2] No such file or directory: 'ninja'", "program ninja is missing", "ninja"),
        (
            "/lib/libstdc++.so.6: version `GLIBCXX_3.4.32' not found (required by /c/cpu_adam.so)",
            "GLIBCXX_3.4.32",
            "Python's environment",
        ),
        (
            "/c/cpu_adam.so: undefined symbol: _ZN3c1017RegisterOperatorsD1Ev",
            "different torch",
            "delete the op's folder",
        ),
        (
            "libcurand.so.10: cannot open shared object file: No such file or directory",
            "shared library libcurand.so.10 is missing",
            "LD_LIBRARY_PATH",
        ),
        ("No module named 'distutils'", "module distutils is missing", "pip install setuptools"),
        ("OSError: [Errno 28] No space left on device", "disk is full", "TORCH_EXTENSIONS_DIR"),
    ],
)
def test_recorded_build_errors_are_diagnosed(output, cause, fix):
    found = diagnose_build(torch_error(output))

    assert cause in found.cause
    assert fix in found.fix


def test_the_cause_wins_over_its_symptoms():
    output = (
        "a.cpp:1:10: error: 'x' was not declared\n"
        "b.cpp:1:10: fatal error: Python.h: No such file or directory\n"
    )

    assert diagnose_build(output).cause == "the header Python.h is missing"


@pytest.mark.parametrize("output", ["", "Timeout", "ninja: build stopped: subcommand failed."])
def test_output_without_a_known_cause_gets_no_diagnosis(output):
    assert diagnose_build(output) is None


def test_the_fix_for_a_missing_module_names_its_package():
    assert missing_module("distutils.log").fix == "pip install setuptools"
    assert missing_module("cpuinfo").fix == "pip install cpuinfo"
