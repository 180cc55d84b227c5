"""Why an op of DeepSpeed cannot be had: what is missing here, or went wrong while it was built."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import attrs
from packaging.version import Version

from zerotune.platform.toolchain import Toolchain

_ABANDONED_AFTER: Final = 600.0
"""Seconds after which a lock that no visible process holds is taken for abandoned; one op compiles
in about a minute."""


@attrs.frozen(kw_only=True)
class Diagnosis:
    """Why an op cannot be had, and what to do."""

    cause: str
    fix: str | None = None


def missing_module(name: str) -> Diagnosis:
    """Diagnosis of a Python module that building needs and that is not installed."""
    # Python 3.12 dropped distutils; setuptools brings it back.
    package = "setuptools" if name.partition(".")[0] in {"distutils", "setuptools"} else name
    return Diagnosis(cause=f"the Python module {name} is missing", fix=f"pip install {package}")


def summary(error: BaseException) -> str:
    """An error as one line: its type and the first line of its text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


# -- What ninja, a compiler, a linker or the loader printed.


def diagnose_build(output: str) -> Diagnosis | None:
    """Find the root cause in the output of a failed build; ``None`` when nothing is recognised.

    Args:
        output: Text of the exception torch raised, which holds ninja's and the compiler's output.
    """
    for pattern, make in _CAUSES:
        match = re.search(pattern, output, re.MULTILINE)
        if match is not None:
            return make(match)
    return None


def _out_of_memory(_match: re.Match[str]) -> Diagnosis:
    return Diagnosis(
        cause="the compiler was killed, most likely for want of memory",
        fix="set MAX_JOBS=1, or free some memory",
    )


def _missing_header(match: re.Match[str]) -> Diagnosis:
    header = match.group(1)
    fixes = {
        "Python.h": "install the Python headers (python3-dev)",
        "libaio.h": "install libaio-dev",
        "cuda_runtime.h": "install the CUDA toolkit torch was built for and set CUDA_HOME",
    }
    return Diagnosis(
        cause=f"the header {header} is missing",
        fix=fixes.get(header.rsplit("/", 1)[-1], f"install the package that holds {header}"),
    )


def _missing_library(match: re.Match[str]) -> Diagnosis:
    library = match.group(1)
    fixes = {
        "aio": "install libaio-dev",
        "cuda": "install the NVIDIA driver, or name its stub library's folder in LIBRARY_PATH",
        "cudart": "install the CUDA toolkit torch was built for and set CUDA_HOME",
        "gomp": "install the OpenMP library of your compiler",
    }
    return Diagnosis(
        cause=f"the linker cannot find the library {library}",
        fix=fixes.get(library, f"install the package that holds lib{library}"),
    )


def _missing_program(match: re.Match[str]) -> Diagnosis:
    program = match.group(1)
    fixes = {"nvcc": "install the CUDA toolkit torch was built for and set CUDA_HOME"}
    return Diagnosis(
        cause=f"the program {program} is missing",
        fix=fixes.get(program.rsplit("/", 1)[-1], f"install {program}, or name another in CXX"),
    )


def _old_standard(match: re.Match[str]) -> Diagnosis:
    return Diagnosis(
        cause=f"the compiler is too old for {match.group(1)}",
        fix="install a newer g++, or name one in CXX",
    )


def _old_runtime(match: re.Match[str]) -> Diagnosis:
    return Diagnosis(
        cause=f"the C++ runtime that Python loaded lacks {match.group(1)}, which the compiler used",
        fix="use the compiler of the same environment as Python (in conda: gxx_linux-64)",
    )


def _undefined_symbol(match: re.Match[str]) -> Diagnosis:
    return Diagnosis(
        cause=f"the compiled library misses the symbol {match.group(1)}: it was built for "
        "another torch",
        fix="delete its folder in the torch extensions directory and build again",
    )


def _undefined_reference(match: re.Match[str]) -> Diagnosis:
    return Diagnosis(cause=f"no library given to the linker defines {match.group(1)}")


def _missing_shared(match: re.Match[str]) -> Diagnosis:
    library = match.group(1)
    return Diagnosis(
        cause=f"the shared library {library} is missing",
        fix=f"install the package that holds {library}, or name its folder in LD_LIBRARY_PATH",
    )


def _module(match: re.Match[str]) -> Diagnosis:
    return missing_module(match.group(1))


def _no_space(_match: re.Match[str]) -> Diagnosis:
    return Diagnosis(
        cause="the disk is full",
        fix="free some space, or set TORCH_EXTENSIONS_DIR or TMPDIR to another disk",
    )


def _compiler_says(match: re.Match[str]) -> Diagnosis:
    return Diagnosis(cause=f"the compiler says: {match.group(1).strip()}")


_CAUSES: Final[tuple[tuple[str, Callable[[re.Match[str]], Diagnosis]], ...]] = (
    # From causes to symptoms: a missing header also makes ninja report a failed command.
    (r"No space left on device", _no_space),
    (r"Killed signal terminated program|SIGKILL|^Killed\s*$", _out_of_memory),
    (r"fatal error: '?([^\s':]+)'?(?::| file) [Nn]o(?:t found| such file)", _missing_header),
    (r"cannot find -l(\S+?)(?::|\s|$)", _missing_library),
    (r"library not found for -l(\S+)", _missing_library),
    (r"(?:^|\s)([^\s:]+): (?:command )?not found\s*$", _missing_program),
    (
        r"No such file or directory: '((?:[^']*/)?(?:ninja|nvcc|hipcc|c\+\+|g\+\+))'",
        _missing_program,
    ),
    (r"unrecognized command[- ]line option .?(-std=[\w+]+)", _old_standard),
    (r"version [`'](GLIBCXX_[\d.]+|CXXABI_[\d.]+)' not found", _old_runtime),
    (r"undefined symbol: (\S+)", _undefined_symbol),
    (r"undefined reference to [`']([^']+)'", _undefined_reference),
    (r"(\S+\.so[.\d]*): cannot open shared object file", _missing_shared),
    (r"No module named '([^']+)'", _module),
    (r"(?:^|\s)(?:fatal )?error: (.+)$", _compiler_says),
)


# -- Torch's folder of compiled extensions, looked at without touching it.


def build_folder(name: str) -> Path:
    """Where torch compiles the extension ``name``; asking torch itself would create the folder."""
    import torch
    from torch.utils import cpp_extension

    stated = os.environ.get("TORCH_EXTENSIONS_DIR")
    if stated is not None:
        return Path(stated) / name
    if torch.version.hip is not None:
        target = f"rocm{torch.version.hip.replace('.', '')}"
    elif torch.version.cuda is not None:
        target = f"cu{torch.version.cuda.replace('.', '')}"
    else:
        target = "cpu"
    version = sys.version_info
    tag = f"py{version.major}{version.minor}{getattr(sys, 'abiflags', '')}_{target}"
    return Path(cpp_extension.get_default_build_root()) / tag / name


def built_library(folder: Path) -> Path | None:
    """The compiled library in a build folder, or ``None``."""
    library = folder / f"{folder.name}.so"
    return library if library.is_file() else None


def why_stale(folder: Path) -> str | None:
    """Why ninja would compile again, or ``None`` when the library is up to date.

    A new torch or deepspeed, other flags and even another ninja (its record of commands differs
    between releases) make a library stale.
    """
    try:
        done = subprocess.run(
            ["ninja", "-n", "-d", "explain"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"ninja cannot tell whether it is up to date: {error}"
    if "no work to do" in done.stdout:
        return None
    explained = re.search(r"ninja explain: (.+)", done.stderr + done.stdout)
    if explained is None:
        return "ninja would compile it again"
    hint = "; another ninja or other flags do that" if "command line" in explained.group(1) else ""
    return f"ninja says: {explained.group(1)}{hint}"


@attrs.frozen(kw_only=True)
class BuildLock:
    """The lock that a process compiling an extension holds on its folder."""

    path: Path
    age: float
    """Seconds since it was taken."""
    holder: int | None
    """Process that holds it; ``None`` when none can be seen, on another host for example."""

    @classmethod
    def on(cls, folder: Path) -> BuildLock | None:
        """The lock on a build folder, or ``None``."""
        path = folder / "lock"
        try:
            age = time.time() - path.stat().st_mtime
        except OSError:
            return None
        return cls(path=path, age=max(age, 0.0), holder=_holder(path))

    @property
    def abandoned(self) -> bool:
        """Whether whoever took it is gone, so that waiting for it would last for ever."""
        return self.holder is None and self.age > _ABANDONED_AFTER

    def diagnose(self) -> Diagnosis:
        """What the lock means, and what to do."""
        if self.holder is not None:
            return Diagnosis(
                cause=f"process {self.holder} has been compiling it for {self.age:.0f} s",
                fix="wait until it is done",
            )
        since = f"{self.age / 60:.0f} minutes" if self.age > 120 else f"{self.age:.0f} s"
        return Diagnosis(
            cause=f"a build that began {since} ago holds its lock, and no process here has it open",
            fix=f"if nothing on another host is compiling, delete {self.path}",
        )


def _holder(lock: Path) -> int | None:
    # Torch keeps the file open as long as it holds the lock.
    import psutil

    wanted = str(lock.resolve())
    for process in psutil.process_iter(["open_files"]):
        if any(file.path == wanted for file in process.info["open_files"] or ()):
            return int(process.pid)
    return None


# -- What an op needs of a machine.


def missing_for_loading(builder: Any, toolchain: Toolchain) -> Diagnosis | None:
    """What keeps torch from loading the op even when it is compiled."""
    if ninja := missing_ninja(toolchain):
        return ninja
    # DeepSpeed probes libaio with the compiler each time it loads this op.
    if builder.name == "async_io":
        return missing_compiler(toolchain) or _missing_libaio(toolchain) or _refused(builder)
    return _refused(builder)


def missing_ninja(toolchain: Toolchain) -> Diagnosis | None:
    """Why torch, which looks for it even where nothing is to be compiled, finds no ninja."""
    if toolchain.ninja is not None:
        return None
    if toolchain.hidden_ninja is not None:
        folder = Path(toolchain.hidden_ninja).parent
        return Diagnosis(
            cause=f"ninja is installed in {folder}, which is not on PATH",
            fix="activate the environment, or add that folder to PATH",
        )
    return Diagnosis(cause="ninja is not installed", fix="pip install ninja")


def _missing_libaio(toolchain: Toolchain) -> Diagnosis | None:
    if toolchain.libaio.usable:
        return None
    missing = "library" if toolchain.libaio.header else "header libaio.h"
    return Diagnosis(
        cause=f"the {missing} of libaio is missing",
        fix="install libaio-dev (Debian, Ubuntu), libaio-devel (Fedora, RHEL) or "
        "libaio (Arch, conda); if it is elsewhere, name it in CPATH and LIBRARY_PATH",
    )


def _refused(builder: Any) -> Diagnosis | None:
    """What DeepSpeed's own probe has against the op."""
    try:
        compatible = builder.is_compatible(verbose=False)
    except ModuleNotFoundError as error:
        return missing_module(error.name or str(error))
    except Exception as error:  # noqa: BLE001 - each op probes in its own way
        return Diagnosis(cause=summary(error), fix=None)
    if compatible:
        return None
    detail = builder.error_log or "it gives no reason"
    return Diagnosis(cause=f"DeepSpeed's own check refuses it: {detail}", fix=None)


def missing_compiler(toolchain: Toolchain) -> Diagnosis | None:
    """Why there is no C++ compiler."""
    if toolchain.cxx is None:
        return Diagnosis(
            cause="there is no C++ compiler",
            fix="install g++ (build-essential on Debian, gcc-c++ on Fedora), or name one in CXX",
        )
    if toolchain.cxx.version is None:
        return Diagnosis(
            cause=f"the C++ compiler {toolchain.cxx.path} does not run",
            fix="install g++, or name a working compiler in CXX",
        )
    return None


def missing_for_building(builder: Any, toolchain: Toolchain) -> Diagnosis | None:
    """What keeps torch from compiling the op."""
    if compiler := missing_compiler(toolchain):
        return compiler
    if not toolchain.python_headers:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        return Diagnosis(
            cause=f"the headers of Python {version} (Python.h) are missing",
            fix=f"install python{version}-dev (Debian, Ubuntu) or python3-devel (Fedora)",
        )
    return _missing_cuda_toolkit(toolchain) if _builds_for_cuda(builder) else None


def _builds_for_cuda(builder: Any) -> bool:
    import torch

    base = importlib.import_module("deepspeed.ops.op_builder.builder").CUDAOpBuilder
    return isinstance(builder, base) and torch.version.hip is None and torch.cuda.is_available()


def _missing_cuda_toolkit(toolchain: Toolchain) -> Diagnosis | None:
    # DeepSpeed asks nvcc for its version even for ops that have no CUDA source.
    if toolchain.nvcc is not None:
        return None
    where = "" if toolchain.cuda_home is None else f" in {toolchain.cuda_home}"
    return Diagnosis(cause=f"CUDA's compiler nvcc is missing{where}", fix=_install_cuda())


def doubt(builder: Any, toolchain: Toolchain) -> Diagnosis | None:
    """What may keep an op from being built, when only trying can tell."""
    found = None if toolchain.nvcc is None else toolchain.nvcc.version
    if found is None or not _builds_for_cuda(builder):
        return None
    import torch

    wanted = str(torch.version.cuda)
    if Version(found).major == Version(wanted).major:
        return None
    return Diagnosis(
        cause=f"nvcc is of CUDA {found}, torch was built for CUDA {wanted}: it may not build",
        fix=_install_cuda(),
    )


def _install_cuda() -> str:
    import torch

    return f"install the CUDA {torch.version.cuda} toolkit and name its folder in CUDA_HOME"
