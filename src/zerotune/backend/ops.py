"""State of DeepSpeed's compiled ops: whether each is built or can be built, and if not, why.

DeepSpeed compiles its kernels on first use. zerotune compiles into the folder
``TORCH_EXTENSIONS_DIR``, by default into one folder per Python environment below ``~/.cache``. If
compiling fails, DeepSpeed often reports only ``… due to hardware/software issue. None``; this
module finds the cause.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

import attrs
import psutil
from packaging.version import Version

from zerotune._util.proc import (
    LOCAL_FILESYSTEMS,
    environment,
    filesystem_kind,
    held,
    installed_version,
)
from zerotune._util.text import did_you_mean
from zerotune.decisions import Decision
from zerotune.errors import InvalidValueError, MissingDependencyError, PlatformError
from zerotune.platform.facts import CUDA
from zerotune.platform.toolchain import Toolchain, detect_toolchain

_ABANDONED_AFTER: Final = 600.0
"""Seconds after which a lock without a visible holder counts as abandoned. One op compiles in about
a minute."""


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
    """Return an exception's type and the first line of its message, as one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


# -- Output of ninja, compilers, linkers and the loader.


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


# -- The folder of compiled extensions.

FOLDER: Final = "TORCH_EXTENSIONS_DIR"
"""Environment variable that torch reads when it loads an extension."""


def extensions_folder() -> Path:
    """Return the folder of all compiled ops: ``$TORCH_EXTENSIONS_DIR``, or the environment's own.

    Nothing is created.
    """
    stated = os.environ.get(FOLDER)
    return _environments_folder() if stated is None else Path(stated)


@cache
def _environments_folder() -> Path:
    """Folder named after everything that makes ninja compile an op again.

    Torch's default folder is named after versions of Python and CUDA only. Two environments would
    then invalidate each other's ops, because a command line contains the paths of all headers.
    """
    import torch
    from torch.utils import cpp_extension

    python = f"{sys.implementation.cache_tag}{getattr(sys, 'abiflags', '')}"
    versions = f"torch-{torch.__version__}_deepspeed-{installed_version('deepspeed')}"
    more = repr((sys.prefix, torch.__file__, torch.version.cuda, torch.version.hip))
    name = f"zerotune_{python}_{versions}_{hashlib.sha256(more.encode()).hexdigest()[:8]}"
    return Path(cpp_extension.get_default_build_root(), name)


def folder_decisions() -> tuple[Decision, ...]:
    """Return the decision for this environment's own folder; none if the user chose a folder."""
    folder = extensions_folder()
    if folder != _environments_folder():
        return ()
    return (
        Decision(
            FOLDER,
            None,
            str(folder),
            "each Python environment compiles its ops once, into its own folder",
        ),
    )


def build_folder(name: str) -> Path:
    """Return the folder in which torch builds an extension, without creating it.

    Args:
        name: Name of the extension.
    """
    return extensions_folder() / name


def built_library(folder: Path) -> Path | None:
    """Return the path to the compiled library in a build folder; ``None`` if there is none."""
    library = folder / f"{folder.name}.so"
    return library if library.is_file() else None


def why_stale(folder: Path) -> str | None:
    """Return why ninja would compile an op again; ``None`` if the library is up to date.

    A library becomes stale when torch, deepspeed, their paths, the compiler flags or the version of
    ninja change. The version of ninja matters because the format of ninja's build log depends on
    it.

    Args:
        folder: Build folder of the op.
    """
    import torch

    try:
        # Torch will rewrite this file before ninja reads it.
        written = (folder / "build.ninja").read_text(encoding="utf-8")
        other = re.search(r"-isystem (\S+)/torch/include", written)
        if other is not None and other[1] != str(Path(torch.__file__).parents[1]):
            return f"the Python environment with {other[1]} compiled it last"
        command = ["ninja", "-n", "-d", "explain"]
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"ninja cannot check whether the library is up to date: {error}"
    if "no work to do" in done.stdout:
        return None
    explained = re.search(r"ninja explain: (.+)", done.stderr + done.stdout)
    if explained is None:
        return "ninja would compile the library again"
    return f"ninja reports: {explained.group(1)}"


@attrs.frozen(kw_only=True)
class BuildLock:
    """The lock file of a process that compiles an extension."""

    path: Path
    age: float
    """Seconds since the lock was acquired."""
    holder: int | None
    """Id of the process that holds the lock; ``None`` if it is not visible on this host."""

    @classmethod
    def on(cls, folder: Path) -> BuildLock | None:
        """Return the lock of a build folder; ``None`` if the folder is not locked.

        Args:
            folder: Build folder of an op.
        """
        path = folder / "lock"
        try:
            age = time.time() - path.stat().st_mtime
        except OSError:
            return None
        # Torch keeps the file open as long as it holds the lock.
        holders = (
            int(process.pid)
            for process in psutil.process_iter(["open_files"])
            if str(path.resolve()) in {file.path for file in process.info["open_files"] or ()}
        )
        return cls(path=path, age=max(age, 0.0), holder=next(holders, None))

    def diagnose(self) -> Diagnosis:
        """Return why the op is locked, and a fix."""
        if self.holder is not None:
            return Diagnosis(
                cause=f"process {self.holder} has been compiling the op for {self.age:.0f} s",
                fix="wait until that process has finished",
            )
        since = f"{self.age / 60:.0f} minutes" if self.age > 120 else f"{self.age:.0f} s"
        return Diagnosis(
            cause=f"the op was locked {since} ago, but no process on this host holds the lock",
            fix=f"delete {self.path} unless a process on a different host is compiling the op",
        )


# -- Requirements of ops.


def missing_for_loading(builder: Any, toolchain: Toolchain) -> Diagnosis | None:
    """Return what prevents torch from loading even a compiled op; ``None`` if nothing does.

    Args:
        builder: DeepSpeed's builder for the op.
        toolchain: Compilers and libraries of the machine.
    """
    if ninja := missing_ninja(toolchain):
        return ninja
    # DeepSpeed probes libaio with the compiler each time it loads this op.
    if builder.name == "async_io":
        if compiler := missing_compiler(toolchain):
            return compiler
        if not toolchain.libaio.usable:
            missing = "library" if toolchain.libaio.header else "header libaio.h"
            return Diagnosis(
                cause=f"the {missing} of libaio is missing",
                fix="install libaio-dev (Debian, Ubuntu), libaio-devel (Fedora, RHEL) or "
                "libaio (Arch, conda); if it is installed elsewhere, set CPATH and LIBRARY_PATH",
            )
    return _deepspeeds_refusal(builder)


def missing_ninja(toolchain: Toolchain) -> Diagnosis | None:
    """Return why torch cannot find ninja, which it needs to load an op; ``None`` if it finds ninja.

    Args:
        toolchain: Compilers and libraries of the machine.
    """
    if toolchain.ninja is not None:
        return None
    return Diagnosis(cause="ninja is not installed", fix="pip install ninja")


def _deepspeeds_refusal(builder: Any) -> Diagnosis | None:
    """Why DeepSpeed's compatibility check refuses the op."""
    try:
        compatible = builder.is_compatible(verbose=False)
    except ModuleNotFoundError as error:
        return missing_module(error.name or str(error))
    except Exception as error:  # noqa: BLE001 - each op probes in its own way
        return Diagnosis(cause=summary(error))
    if compatible:
        return None
    detail = builder.error_log or "no reason given"
    return Diagnosis(cause=f"DeepSpeed's compatibility check refuses the op: {detail}")


def missing_compiler(toolchain: Toolchain) -> Diagnosis | None:
    """Return why no C++ compiler works; ``None`` if one does.

    Args:
        toolchain: Compilers and libraries of the machine.
    """
    if toolchain.cxx is None:
        return Diagnosis(
            cause="no C++ compiler is installed",
            fix="install g++ (build-essential on Debian, gcc-c++ on Fedora), or set CXX to the "
            "path of a compiler",
        )
    if toolchain.cxx.version is None:
        return Diagnosis(
            cause=f"the C++ compiler {toolchain.cxx.path} does not run",
            fix="install g++, or set CXX to the path of a working compiler",
        )
    return None


def missing_for_building(builder: Any, toolchain: Toolchain) -> Diagnosis | None:
    """Return what prevents torch from compiling an op; ``None`` if nothing does.

    Args:
        builder: DeepSpeed's builder for the op.
        toolchain: Compilers and libraries of the machine.
    """
    if compiler := missing_compiler(toolchain):
        return compiler
    if not toolchain.python_headers:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        return Diagnosis(
            cause=f"the headers of Python {version} (Python.h) are missing",
            fix=f"install python{version}-dev (Debian, Ubuntu) or python3-devel (Fedora)",
        )
    # DeepSpeed asks nvcc for its version even for ops that have no CUDA source.
    if toolchain.nvcc is not None or not _builds_for_cuda(builder):
        return None
    where = "" if toolchain.cuda_home is None else f" in {toolchain.cuda_home}"
    return Diagnosis(cause=f"CUDA's compiler nvcc is missing{where}", fix=_install_cuda())


def _builds_for_cuda(builder: Any) -> bool:
    import torch

    from zerotune.backend.accelerator import accelerator_of

    base = importlib.import_module("deepspeed.ops.op_builder.builder").CUDAOpBuilder
    return isinstance(builder, base) and accelerator_of(torch.device(CUDA)).is_nvidia


def doubt(builder: Any, toolchain: Toolchain) -> Diagnosis | None:
    """Return a diagnosis if nvcc's and torch's major CUDA versions differ; builds may then fail.

    Args:
        builder: DeepSpeed's builder for the op.
        toolchain: Compilers and libraries of the machine.
    """
    found = None if toolchain.nvcc is None else toolchain.nvcc.version
    if found is None or not _builds_for_cuda(builder):
        return None
    import torch

    wanted = str(torch.version.cuda)
    if Version(found).major == Version(wanted).major:
        return None
    return Diagnosis(
        cause=f"nvcc belongs to CUDA {found}, but torch was built for CUDA {wanted}: "
        "compiling may fail",
        fix=_install_cuda(),
    )


def _install_cuda() -> str:
    import torch

    return f"install the CUDA {torch.version.cuda} toolkit, and set CUDA_HOME to its folder"


SAID_EVERY: Final = 15.0
"""Seconds between messages while an op is compiled."""
SILENT_FOR: Final = 5.0
"""Seconds to wait for a lock before a warning is logged."""
_AGAIN_AFTER: Final = 60.0
_BEFORE_REMOVAL: Final = 0.2
"""Seconds between two checks of torch's lock, which torch closes shortly before deleting it."""
_OPENING: Final = 1.0
"""Seconds after its creation for which a lock is kept even if no process has it open."""
logger = logging.getLogger("zerotune")


class LivingLock:
    """Replacement for torch's ``FileBaton``; its lock is released if the holding process ends."""

    def __init__(self, lock_file_path: str, wait_seconds: float = 0.1, **_: Any) -> None:
        self._path = Path(lock_file_path)
        self._wait_seconds = wait_seconds
        self._held: int | None = None
        self._compiled = threading.Event()

    def try_acquire(self) -> bool:
        """Wait until the lock's holder has finished compiling or exited, and acquire the lock.

        If the holder has finished, ninja has nothing left to compile.
        """
        began = time.monotonic()
        announced = began + SILENT_FOR
        folder = self._path.parent
        while not self._take():
            remove_if_dead(self._path)
            lock = BuildLock.on(folder)
            if lock is not None and time.monotonic() >= announced:
                announced = time.monotonic() + _AGAIN_AFTER
                found = lock.diagnose()
                abandoned = lock.holder is None and lock.age > _ABANDONED_AFTER
                if abandoned and not _host_and_process(self._path):
                    raise found.as_error(folder.name)
                logger.warning(
                    "op %s: still waiting for its lock after %.0f s: %s (%s). Fix: %s.",
                    folder.name, time.monotonic() - began, found.cause, lock.path, found.fix,
                )  # fmt: skip
            time.sleep(self._wait_seconds)
        if built_library(folder) is None or why_stale(folder) is not None:
            # Ninja then runs for minutes without any output.
            logger.warning(
                "op %s: compiling it once, into %s; this takes one to three minutes on a few cores",
                folder.name, folder,
            )  # fmt: skip
            threading.Thread(target=self._say_progress, daemon=True).start()
        return True

    def _say_progress(self) -> None:
        began = time.monotonic()
        while not self._compiled.wait(SAID_EVERY):
            seconds = time.monotonic() - began
            logger.warning("op %s: compiling for %.0f s now", self._path.parent.name, seconds)

    def wait(self) -> None:
        """Do nothing: torch calls this method to wait, but ``try_acquire`` has already waited."""

    def release(self) -> None:
        """Release the lock."""
        self._compiled.set()
        if self._held is not None:
            # Delete the file before unlocking it, so that no other process mistakes it for the lock
            # of a dead process.
            self._path.unlink(missing_ok=True)
            os.close(self._held)
            self._held = None

    def _take(self) -> bool:
        try:
            held = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR)
        except FileExistsError:
            return False
        fcntl.flock(held, fcntl.LOCK_EX)
        os.write(held, f"{socket.gethostname()} {os.getpid()}\n".encode())
        self._held = held
        return True


def _host_and_process(path: Path) -> list[str]:
    """Host and process in a lock of zerotune; empty for torch's own locks."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").split()
    except OSError:
        return []


def remove_if_dead(path: Path) -> None:
    """Remove a lock file if the process that created it ran on this host and has ended.

    Args:
        path: Lock file created by torch or by a ``LivingLock``.
    """
    record = _host_and_process(path)
    # Another host's lock may be invisible from here on a shared file system.
    if record and (len(record) != 2 or record[0] != socket.gethostname()):
        return
    with suppress(OSError):
        if not record and filesystem_kind(path.parent.resolve()) not in LOCAL_FILESYSTEMS:
            return
        descriptor = os.open(path, os.O_RDWR if record else os.O_RDONLY | os.O_NONBLOCK)
        try:
            if record:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _take_over(path, descriptor, f"process {record[1]}")
            # Torch's own lock, which its creator keeps open.
            elif time.time() - os.fstat(descriptor).st_mtime > _OPENING and _is_alone(descriptor):
                time.sleep(_BEFORE_REMOVAL)
                if _is_alone(descriptor):
                    _take_over(path, descriptor, "a process")
        finally:
            os.close(descriptor)


def _is_alone(descriptor: int) -> bool:
    """Whether no other descriptor of the file is open, in any process of this machine.

    The kernel grants a write lease only then. The result is ``False`` without lease support.
    """
    if not hasattr(fcntl, "F_SETLEASE"):
        return False
    # If another process opens the file meanwhile, the kernel sends this process a signal; the
    # default signal would kill it.
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError:
        return False
    fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return True


def _take_over(path: Path, descriptor: int, who: str) -> None:
    if os.path.samestat(os.fstat(descriptor), path.stat()):
        path.unlink()
        logger.warning(
            "op %s: %s ended while compiling the op; its lock has been removed",
            path.parent.name,
            who,
        )


OpState = Literal["installed", "built", "buildable", "stale", "locked", "blocked", "absent"]


@attrs.frozen(kw_only=True)
class OpStatus:
    """Whether an op can be used on this machine."""

    name: str
    purpose: str
    """What zerotune uses the op for."""
    state: OpState
    """``"installed"``: compiled into the deepspeed package. ``"built"``: already compiled and up to
    date. ``"stale"``: already compiled, but will be compiled again. ``"buildable"``: will be
    compiled on first use. ``"locked"``: another process is compiling the op, or ended while
    compiling it. ``"blocked"``: this machine lacks a requirement, such as a compiler. ``"absent"``:
    DeepSpeed has no implementation for this accelerator."""
    cause: str | None = None
    """Why the op is stale, locked, blocked or absent, or why building it may fail."""
    fix: str | None = None
    """How to make the op usable."""
    path: str | None = None
    """Path to the compiled library; ``None`` if there is none."""

    @classmethod
    def of(
        cls,
        name: str,
        purpose: str,
        state: OpState,
        found: Diagnosis | None = None,
        *,
        library: Path | None = None,
    ) -> OpStatus:
        """Create a status, with the cause and fix from a diagnosis.

        Args:
            name: Name of the op.
            purpose: What zerotune uses the op for.
            state: Availability of the op, such as ``"built"`` or ``"stale"``.
            found: The diagnosis; ``None`` for a status without cause and fix.
            library: Path to the compiled library; ``None`` if there is none.
        """
        return cls(
            name=name,
            purpose=purpose,
            state=state,
            cause=None if found is None else found.cause,
            fix=None if found is None else found.fix,
            path=None if library is None else str(library),
        )

    @property
    def usable(self) -> bool:
        """Whether the op can be loaded, either now or after being compiled."""
        return self.state in {"installed", "built", "buildable", "stale"}

    def check_usable(self) -> None:
        """Raise an error with cause and fix unless the op can be loaded."""
        if not self.usable:
            cause = self.cause or "the op cannot be used on this machine"
            raise Diagnosis(cause=cause, fix=self.fix).as_error(self.name)


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


@attrs.frozen
class _Op:
    name: str
    builder: str
    purpose: str
    instead: str | None = None
    """Fix if DeepSpeed has no implementation for the accelerator."""
    companion: str | None = None
    """Builder of another op that DeepSpeed loads first."""


_OPS: Final = (
    _Op("cpu_adam", "CPUAdamBuilder", "Adam and AdamW with CPU or NVMe offload"),
    _Op("cpu_adagrad", "CPUAdagradBuilder", "Adagrad with CPU offload"),
    _Op("cpu_lion", "CPULionBuilder", "Lion with CPU offload"),
    _Op(
        "async_io",
        "AsyncIOBuilder",
        "offload of parameters and optimizer to NVMe",
        instead="offload to CPU",
        companion="PinMemoryBuilder",
    ),
    _Op("fused_adam", "FusedAdamBuilder", "Adam and AdamW without offload"),
    _Op(
        "fused_lion",
        "FusedLionBuilder",
        "Lion without offload",
        instead="no action needed: zerotune's Lion is used, or cpu_lion with offload",
    ),
    _Op(
        "fused_lamb",
        "FusedLambBuilder",
        "Lamb",
        instead="no action needed: zerotune's Lamb is used, at stage 0",
    ),
)

OP_NAMES: Final = tuple(op.name for op in _OPS)


def op_report(*, toolchain: Toolchain | None = None) -> tuple[OpStatus, ...]:
    """Report whether each op that zerotune uses is built or can be built, and if not, why.

    Nothing is compiled except a test program for libaio. The call imports deepspeed, which selects
    DeepSpeed's accelerator for the whole process.

    Args:
        toolchain: Compilers and libraries; default: those of this machine.
    """
    accelerator = _deepspeeds_accelerator()
    with same_ninja():
        found = toolchain or detect_toolchain()
        return tuple(_op_status(op, accelerator, found) for op in _OPS)


def check_op_name(name: str) -> None:
    """Raise an error that suggests names if DeepSpeed has no op ``name``."""
    if name not in OP_NAMES:
        close = did_you_mean(name, OP_NAMES, count=1)
        raise InvalidValueError(
            "no such op",
            f"did you mean {close[0]}" if close else f"use one of {', '.join(OP_NAMES)}",
            "op",
            name,
        )


def build_op(name: str) -> OpStatus:
    """Load one op, compile it if needed, and return its new status.

    Args:
        name: Name of the op, one of ``OP_NAMES``.
    """
    check_op_name(name)
    op = next(op for op in _OPS if op.name == name)
    with building():
        accelerator, toolchain = _deepspeeds_accelerator(), detect_toolchain()
        before = _op_status(op, accelerator, toolchain)
        # If another process is building the op, torch waits for that process.
        if before.state != "locked":
            before.check_usable()
        with naming_the_cause(op.name):
            accelerator.create_op_builder(op.builder).load(verbose=False)
        return _op_status(op, accelerator, toolchain)


@contextmanager
def building() -> Iterator[None]:
    """Inside the block, compile into ``extensions_folder()`` with this environment's ninja.

    Torch compiles under a ``LivingLock``. Locks of dead processes on any op are removed, since code
    outside the block would wait for them.
    """
    compiling: Any = importlib.import_module("torch.utils.cpp_extension")
    for lock in extensions_folder().glob("*/lock"):
        remove_if_dead(lock)
    before = compiling.FileBaton
    compiling.FileBaton = LivingLock
    try:
        with held(FOLDER, str(extensions_folder())), same_ninja():
            yield
    finally:
        compiling.FileBaton = before


def same_ninja() -> AbstractContextManager[None]:
    """Put the ninja of this Python environment first on ``PATH`` inside the block.

    A build log written by one ninja version is invalid for a different one. A script started as
    ``.venv/bin/python`` may find a different ninja than the same script in the activated
    environment. Alternating between the two would then recompile an op in every run.
    """
    folder = Path(sys.executable).parent
    own = shutil.which("ninja", path=str(folder))
    if own is None or own == shutil.which("ninja"):
        return nullcontext()
    return environment(PATH=f"{folder}{os.pathsep}{os.environ.get('PATH', '')}")


def _deepspeeds_accelerator() -> Any:
    """DeepSpeed's accelerator; its import logs nothing, since zerotune reports the same facts."""
    logger = logging.getLogger("DeepSpeed")

    # DeepSpeed sets its logger's level during the import.
    logger.disabled = True
    try:
        return importlib.import_module("deepspeed.accelerator").get_accelerator()
    except ModuleNotFoundError as error:
        if error.name != "deepspeed":
            raise PlatformError(f"deepspeed cannot be imported: {error}") from error
        raise MissingDependencyError(
            "deepspeed is not installed", "pip install deepspeed"
        ) from error
    except Exception as error:
        # deepspeed inspects the machine while it is imported, so anything can go wrong here.
        raise PlatformError(f"deepspeed cannot be imported: {summary(error)}") from error
    finally:
        logger.disabled = False


def _op_status(op: _Op, accelerator: Any, toolchain: Toolchain) -> OpStatus:
    builder = _builder(op.builder, accelerator)
    if builder is None:
        cause = f"DeepSpeed does not implement this op for its {accelerator._name} accelerator"
        found = Diagnosis(cause=cause, fix=op.instead)
        return OpStatus.of(op.name, op.purpose, "absent", found)
    info = importlib.import_module("deepspeed.git_version_info")
    if info.installed_ops.get(op.name) and info.accelerator_name == accelerator._name:
        return OpStatus.of(op.name, op.purpose, "installed")
    if blocked := missing_for_loading(builder, toolchain):
        return OpStatus.of(op.name, op.purpose, "blocked", blocked)
    companion = None if op.companion is None else _builder(op.companion, accelerator)
    folders = [build_folder(each.name) for each in (op, companion) if each is not None]
    state, why = _jit_state(builder, folders, toolchain)
    return OpStatus.of(op.name, op.purpose, state, why, library=built_library(folders[0]))


def _builder(name: str, accelerator: Any) -> Any | None:
    """DeepSpeed's builder of this class; ``None`` if DeepSpeed has no implementation."""
    builder = accelerator.create_op_builder(name)
    # Some accelerators return None, others a builder whose load() raises an error.
    return None if type(builder).__name__ in {"NoneType", "NotImplementedBuilder"} else builder


def _jit_state(
    builder: Any, folders: list[Path], toolchain: Toolchain
) -> tuple[OpState, Diagnosis | None]:
    """State of an op that torch compiles on first use, and the reason."""
    if lock := next(filter(None, map(BuildLock.on, folders)), None):
        return "locked", lock.diagnose()
    complete = all(map(built_library, folders))
    stale = next(filter(None, map(why_stale, folders)), None) if complete else None
    if complete and stale is None:
        return "built", None
    if blocked := missing_for_building(builder, toolchain):
        return "blocked", blocked
    if stale is not None:
        fix = f"if several environments share {FOLDER}, unset it: each then has its own folder"
        return "stale", Diagnosis(cause=stale, fix=None if folder_decisions() else fix)
    return "buildable", doubt(builder, toolchain)
