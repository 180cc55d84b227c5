"""The root cause in what ninja, a compiler, a linker or the loader prints."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

import attrs


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
