"""Why an op cannot be built or loaded, from the output of ninja, compilers and linkers.

If compiling fails, DeepSpeed often reports only ``… due to hardware/software issue. None``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import attrs

from zerotune.errors import PlatformError
from zerotune.platform.facts import CUDA


@attrs.frozen(kw_only=True)
class Diagnosis:
    """Why an op is unavailable, and a fix."""

    cause: str
    fix: str | None = None

    def as_error(self, op: str) -> PlatformError:
        """Return the diagnosis as an exception.

        Args:
            op: Name of the op.
        """
        return PlatformError(self.cause, self.fix, f"op {op}")


def missing_module(name: str) -> Diagnosis:
    """Return the diagnosis for a build that needs a missing Python module.

    Args:
        name: Name of the module.
    """
    # Python 3.12 dropped distutils; setuptools brings it back.
    package = "setuptools" if name.partition(".")[0] in {"distutils", "setuptools"} else name
    return Diagnosis(cause=_MODULE.format(name), fix=f"pip install {package}")


def summary(error: BaseException) -> str:
    """Return an exception's type and the first line of its message, at most 300 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ": ".join([type(error).__name__, *lines[:1]])[:300]


def diagnose_build(output: str) -> Diagnosis | None:
    """Find the root cause of a failed build in its output; ``None`` if no known pattern matches.

    Args:
        output: Message of torch's exception, with the output of ninja and the compiler.
    """
    for pattern, cause, fixes in _CAUSES:
        match = re.search(pattern, output, re.MULTILINE)
        if match is None:
            continue
        thing = (match[1] if match.re.groups else "").strip()
        if cause == _MODULE:
            return missing_module(thing)
        by_name = fixes if isinstance(fixes, Mapping) else {"": fixes}
        fix = by_name.get(thing.rsplit("/", 1)[-1], by_name[""])
        return Diagnosis(cause=cause.format(thing), fix=fix and fix.format(thing))
    return None


_MODULE: Final = "the Python module {} is missing"

_TOOLKIT: Final = "install the CUDA toolkit that torch was built for, and set CUDA_HOME"

_LIBRARY_FIXES: Final = {
    "aio": "install libaio-dev",
    CUDA: "install the NVIDIA driver, or add the folder of its stub library to LIBRARY_PATH",
    "cudart": _TOOLKIT,
    "gomp": "install the OpenMP library of your compiler",
    "": "install the package that contains lib{}",
}

_PROGRAM_FIXES: Final = {"nvcc": _TOOLKIT, "": "install {}, or set CXX to a different compiler"}

_HEADER_FIXES: Final = {
    "Python.h": "install the Python headers (python3-dev)",
    "libaio.h": "install libaio-dev",
    "cuda_runtime.h": _TOOLKIT,
    "": "install the package that contains {}",
}

_CAUSES: Final[tuple[tuple[str, str, str | Mapping[str, str] | None], ...]] = (
    (
        r"No space left on device",
        "the disk is full",
        "free disk space, or set TORCH_EXTENSIONS_DIR and TMPDIR to folders on a different disk",
    ),
    (
        r"Killed signal terminated program|SIGKILL|^Killed\s*$",
        "the compiler was killed, most likely because memory ran out",
        "set MAX_JOBS=1, or free memory",
    ),
    (
        r"fatal error: '?([^\s':]+)'?(?::| file) [Nn]o(?:t found| such file)",
        "the header {} is missing",
        _HEADER_FIXES,
    ),
    (r"cannot find -l(\S+?)(?::|\s|$)", "the linker cannot find the library {}", _LIBRARY_FIXES),
    (r"library not found for -l(\S+)", "the linker cannot find the library {}", _LIBRARY_FIXES),
    (
        r"(?:^|\s)([^\s:]+): (?:command )?not found\s*$",
        "the program {} is missing",
        _PROGRAM_FIXES,
    ),
    (
        r"No such file or directory: '((?:[^']*/)?(?:ninja|nvcc|hipcc|c\+\+|g\+\+))'",
        "the program {} is missing",
        _PROGRAM_FIXES,
    ),
    (
        r"unrecognized command[- ]line option .?(-std=[\w+]+)",
        "the compiler is too old for {}",
        "install a newer g++, or set CXX to the path of a newer compiler",
    ),
    (
        r"version [`'](GLIBCXX_[\d.]+|CXXABI_[\d.]+)' not found",
        "the C++ runtime that Python loaded lacks {}, which the compiled library needs",
        "use a compiler installed in Python's environment (with conda, install gxx_linux-64)",
    ),
    (
        r"undefined symbol: (\S+)",
        "the compiled library lacks the symbol {}: it was built for a different torch version",
        "delete the op's folder in the torch extensions directory, and build the op again",
    ),
    (
        r"undefined reference to [`']([^']+)'",
        "none of the linked libraries defines {}",
        None,
    ),
    (
        r"(\S+\.so[.\d]*): cannot open shared object file",
        "the shared library {} is missing",
        "install the package that contains {}, or add its folder to LD_LIBRARY_PATH",
    ),
    (r"No module named '([^']+)'", _MODULE, None),
    (r"(?:^|\s)(?:fatal )?error: (.+)$", "the compiler reports: {}", None),
)
"""Pattern, cause, and fix or fixes by the matched name. Causes precede symptoms, because a missing
header also makes ninja report a failed command."""


@contextmanager
def naming_the_cause(op: str) -> Iterator[None]:
    """Turn a compiler, linker or loader error inside the block into a ``PlatformError``.

    Args:
        op: Name of the op.
    """
    try:
        yield
    except PlatformError:
        raise
    except Exception as error:
        found = diagnose_build(str(error)) or Diagnosis(cause=summary(error))
        raise found.as_error(op) from error
