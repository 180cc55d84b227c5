"""Detect the compilers and libraries that build DeepSpeed's kernels on first use."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import attrs

_USES_LIBAIO: Final = 'extern "C" int io_submit(); int main() { return io_submit(); }\n'


@attrs.frozen(kw_only=True)
class Tool:
    """An installed program."""

    path: str
    version: str | None
    """Version of the program; ``None`` if unknown."""


@attrs.frozen(kw_only=True)
class LibAio:
    """Whether programs can be compiled and linked against libaio; ``None`` if unknown."""

    header: bool | None
    library: bool | None

    @property
    def usable(self) -> bool:
        """Whether libaio's header and library both exist."""
        return bool(self.header and self.library)


@attrs.frozen(kw_only=True)
class Toolchain:
    """Compilers and libraries with which DeepSpeed builds its kernels."""

    cxx: Tool | None
    """The C++ compiler that torch calls: ``$CXX``, or ``c++``."""
    nvcc: Tool | None
    """CUDA's compiler; required only for kernels on an NVIDIA GPU."""
    cuda_home: str | None
    ninja: Tool | None
    """This Python environment's ninja, or the one on ``PATH``."""
    python_headers: bool
    """Whether ``Python.h`` of the running Python is installed."""
    libaio: LibAio


class LocalMachine:
    """Access to this machine's programs and files; tests override its methods."""

    def environ(self) -> Mapping[str, str]:
        """Return the environment variables."""
        return os.environ

    def which(self, program: str) -> str | None:
        """Return the path of a program, or ``None``."""
        return shutil.which(program)

    def exists(self, path: str) -> bool:
        """Return whether a file or directory exists."""
        return Path(path).exists()

    def run(self, command: Sequence[str], source: str = "") -> tuple[int, str]:
        """Run a command, and return its exit status and output.

        Args:
            command: Program and arguments.
            source: Standard input of the command.
        """
        try:
            done = subprocess.run(
                list(command),
                input=source,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=30,
                check=False,
            )
        except (OSError, subprocess.SubprocessError) as error:
            return 127, str(error)
        return done.returncode, done.stdout


def detect_toolchain(machine: LocalMachine | None = None) -> Toolchain:
    """Detect the compilers and libraries that build DeepSpeed's kernels.

    Args:
        machine: Access to a machine; by default this machine.
    """
    machine = machine or LocalMachine()
    compilers = detect_compilers(machine)
    if compilers.cxx is None:
        return compilers
    return attrs.evolve(compilers, libaio=_libaio(machine, _cxx(machine)))


def detect_compilers(machine: LocalMachine | None = None) -> Toolchain:
    """Detect only the compilers, without compiling anything; libaio stays unknown.

    Args:
        machine: Access to a machine; by default this machine.
    """
    machine = machine or LocalMachine()
    environ, nvcc = machine.environ(), machine.which("nvcc")
    # torch's search order: the environment, nvcc's folder, the default place.
    home = (
        environ.get("CUDA_HOME")
        or environ.get("CUDA_PATH")
        or (nvcc and str(Path(nvcc).parent.parent))
        or ("/usr/local/cuda" if machine.exists("/usr/local/cuda") else None)
    )
    return Toolchain(
        cxx=_tool(machine, _cxx(machine)),
        nvcc=None if home is None else _tool(machine, [f"{home}/bin/nvcc"]),
        cuda_home=home,
        ninja=_tool(machine, [str(Path(sys.executable).with_name("ninja"))])
        or _tool(machine, ["ninja"]),
        python_headers=machine.exists(f"{sysconfig.get_path('include')}/Python.h"),
        libaio=LibAio(header=None, library=None),
    )


def _cxx(machine: LocalMachine) -> list[str]:
    return shlex.split(machine.environ().get("CXX", "c++")) or ["c++"]


def _tool(machine: LocalMachine, command: Sequence[str]) -> Tool | None:
    path = machine.which(command[0])
    if path is None:
        return None
    status, output = machine.run([*command, "--version"])
    return Tool(path=path, version=parse_version(output) if status == 0 else None)


def parse_version(output: str) -> str | None:
    """Parse the version in a compiler's ``--version`` output, or return ``None``."""
    release = re.search(r"\brelease (\d+(?:\.\d+)+)", output)
    if release:
        return release.group(1)
    first = output.strip().splitlines()[0] if output.strip() else ""
    named = re.search(r"\bversion (\d+(?:\.\d+)*)", first)
    # GCC puts its packager's version in brackets before its own.
    numbers = re.findall(r"\d+(?:\.\d+)+", re.sub(r"\([^)]*\)", " ", first))
    return named.group(1) if named else (numbers[0] if numbers else None)


def _libaio(machine: LocalMachine, compiler: Sequence[str]) -> LibAio:
    environ = machine.environ()
    # DeepSpeed's own check honours these two as well.
    compile_flags = shlex.split(environ.get("CFLAGS", ""))
    link_flags = shlex.split(environ.get("LDFLAGS", ""))
    with tempfile.TemporaryDirectory() as folder:
        # Never /dev/null: a linker run by root may replace it with a file.
        target = ["-o", f"{folder}/probe"]
        header, _ = machine.run(
            [*compiler, *compile_flags, "-x", "c++", "-E", *target, "-"], "#include <libaio.h>\n"
        )
        library, _ = machine.run(
            [*compiler, "-x", "c++", "-", *link_flags, *target, "-laio"], _USES_LIBAIO
        )
    return LibAio(header=header == 0, library=library == 0)
