"""DeepSpeed's compiled ops: which are built, which can be, and the root cause when one cannot.

DeepSpeed compiles its kernels on first use and keeps them in torch's extension folder
(``TORCH_EXTENSIONS_DIR``, by default below ``~/.cache``). When that fails, its own message is
often ``… due to hardware/software issue. None``; the functions here look for the cause instead.
"""

from __future__ import annotations

import importlib
import logging
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final, Literal

import attrs

from zerotune._util.environment import environment
from zerotune._util.text import did_you_mean
from zerotune.backend.ops.diagnose import (
    BuildLock,
    Diagnosis,
    build_folder,
    built_library,
    diagnose_build,
    doubt,
    missing_for_building,
    missing_for_loading,
    summary,
    why_stale,
)
from zerotune.backend.ops.locks import living_locks, remove_if_dead
from zerotune.errors import InvalidValueError, MissingDependencyError, PlatformError
from zerotune.platform.toolchain import Toolchain, detect_toolchain

OpState = Literal["installed", "built", "buildable", "stale", "locked", "blocked", "absent"]


@attrs.frozen(kw_only=True)
class OpStatus:
    """Whether one op can be used here."""

    name: str
    purpose: str
    """What zerotune uses it for."""
    state: OpState
    """``"installed"``: compiled into the deepspeed package. ``"built"``: compiled before and up
    to date. ``"stale"``: compiled before, will be compiled again. ``"buildable"``: will be
    compiled on first use. ``"locked"``: being compiled by another process, or left so by one that
    died. ``"blocked"``: something is missing on this machine. ``"absent"``: DeepSpeed has no
    implementation for this accelerator."""
    cause: str | None = None
    """Why it is stale, locked, blocked or absent, or why building it may fail."""
    fix: str | None = None
    """What to do about it."""
    path: str | None = None
    """The compiled library, when there is one."""

    @property
    def usable(self) -> bool:
        """Whether the op can be loaded, now or after compiling it."""
        return self.state in {"installed", "built", "buildable", "stale"}


@attrs.frozen(kw_only=True)
class _Op:
    name: str
    builder: str
    purpose: str
    instead: str | None = None
    """What to do where DeepSpeed has no implementation."""
    companion: str | None = None
    """Builder of another op that DeepSpeed loads first."""


_OPS: Final = (
    _Op(
        name="cpu_adam",
        builder="CPUAdamBuilder",
        purpose="Adam and AdamW with the optimizer offloaded to CPU or NVMe",
    ),
    _Op(
        name="cpu_adagrad",
        builder="CPUAdagradBuilder",
        purpose="Adagrad with the optimizer offloaded to CPU",
    ),
    _Op(
        name="cpu_lion",
        builder="CPULionBuilder",
        purpose="Lion with the optimizer offloaded to CPU",
    ),
    _Op(
        name="async_io",
        builder="AsyncIOBuilder",
        purpose="offload of parameters and optimizer to NVMe",
        instead="offload to CPU",
        companion="PinMemoryBuilder",
    ),
    _Op(
        name="fused_adam",
        builder="FusedAdamBuilder",
        purpose="Adam and AdamW without offload",
    ),
    _Op(
        name="fused_lion",
        builder="FusedLionBuilder",
        purpose="Lion without offload",
        instead="nothing is missing: zerotune's own Lion runs here, or cpu_lion when offloaded",
    ),
    _Op(
        name="fused_lamb",
        builder="FusedLambBuilder",
        purpose="Lamb",
        instead="nothing is missing: zerotune's own Lamb runs at every stage and offload",
    ),
)

OP_NAMES: Final = tuple(op.name for op in _OPS)


def op_report(*, toolchain: Toolchain | None = None) -> tuple[OpStatus, ...]:
    """Say for every op zerotune uses whether it is built, can be built, or why not.

    Nothing is compiled but a probe for libaio. Imports deepspeed, which settles the process's
    DeepSpeed accelerator.

    Args:
        toolchain: Compilers and libraries; those of this machine by default.

    Raises:
        MissingDependencyError: deepspeed is not installed.
        PlatformError: deepspeed cannot be imported.
    """
    accelerator = _accelerator()
    with same_ninja():
        found = toolchain or detect_toolchain()
        return tuple(_status(op, accelerator, found) for op in _OPS)


def build_op(name: str) -> OpStatus:
    """Load one op, compiling it when needed, and return its status afterwards.

    Args:
        name: One of ``OP_NAMES``.

    Raises:
        InvalidValueError: There is no such op.
        MissingDependencyError: deepspeed is not installed.
        PlatformError: The op cannot be used here, or compiling or loading it failed; the reason
            is the root cause, not the compiler's whole output.
    """
    with building():
        return _build(_find(name))


@contextmanager
def building() -> Iterator[None]:
    """Inside the block ops are compiled by one ninja, and nobody waits for a dead process."""
    with same_ninja(), living_locks():
        yield


def same_ninja() -> AbstractContextManager[None]:
    """Put this Python environment's own ninja first on ``PATH`` inside the block.

    ninja releases record their commands differently, and each throws the other's record away.
    With two of them, a script started as ``.venv/bin/python`` and one started in the activated
    environment would compile the same op anew, minutes each, forever.
    """
    folder = Path(sys.executable).parent
    own = shutil.which("ninja", path=str(folder))
    if own is None or own == shutil.which("ninja"):
        return nullcontext()
    return environment(PATH=f"{folder}{os.pathsep}{os.environ.get('PATH', '')}")


def _build(op: _Op) -> OpStatus:
    accelerator = _accelerator()
    toolchain = detect_toolchain()
    for folder in _folders(op, accelerator):
        remove_if_dead(folder / "lock")
    before = _status(op, accelerator, toolchain)
    is_waiting = before.state == "locked" and _is_being_built(op, accelerator)
    if not before.usable and not is_waiting:
        raise PlatformError(
            before.cause or "it cannot be used here", key=f"op {op.name}", fix=before.fix
        )
    try:
        accelerator.create_op_builder(op.builder).load(verbose=False)
    except PlatformError:
        raise
    except Exception as error:
        # Whatever a compiler, a linker or the loader does ends here, under many types.
        diagnosis = diagnose_build(str(error)) or Diagnosis(cause=summary(error), fix=None)
        raise PlatformError(diagnosis.cause, key=f"op {op.name}", fix=diagnosis.fix) from error
    return _status(op, accelerator, toolchain)


def _is_being_built(op: _Op, accelerator: Any) -> bool:
    """Whether another process is building it, for whose end torch waits."""
    locks = [BuildLock.on(folder) for folder in _folders(op, accelerator)]
    return not any(lock is not None and lock.abandoned for lock in locks)


def _find(name: str) -> _Op:
    for op in _OPS:
        if op.name == name:
            return op
    close = did_you_mean(name, OP_NAMES, count=1)
    raise InvalidValueError(
        "no such op",
        key="op",
        value=name,
        fix=f"did you mean {close[0]}" if close else f"use one of {', '.join(OP_NAMES)}",
    )


def _accelerator() -> Any:
    """DeepSpeed's accelerator, with the log line of its import kept back."""
    try:
        with _quiet_deepspeed():
            return importlib.import_module("deepspeed.accelerator").get_accelerator()
    except ModuleNotFoundError as error:
        if error.name != "deepspeed":
            raise PlatformError(f"deepspeed cannot be imported: {error}") from error
        raise MissingDependencyError(
            "deepspeed is not installed", fix="pip install deepspeed"
        ) from error
    except Exception as error:
        # deepspeed inspects the machine while it is imported, so anything can go wrong here.
        raise PlatformError(f"deepspeed cannot be imported: {summary(error)}") from error


@contextmanager
def _quiet_deepspeed() -> Iterator[None]:
    """Keep back what DeepSpeed logs while imported: zerotune reports the accelerator itself.

    DeepSpeed sets its logger's level during the import, so only a filter outlasts it.
    """
    logger = logging.getLogger("DeepSpeed")

    def drop(_record: logging.LogRecord) -> bool:
        return False

    logger.addFilter(drop)
    try:
        yield
    finally:
        logger.removeFilter(drop)


def _status(op: _Op, accelerator: Any, toolchain: Toolchain) -> OpStatus:
    builder = _builder(op.builder, accelerator)
    if builder is None:
        return OpStatus(
            name=op.name,
            purpose=op.purpose,
            state="absent",
            cause=f"DeepSpeed has no implementation for its {accelerator._name} accelerator",
            fix=op.instead,
        )
    if _is_installed(op.name, accelerator):
        return OpStatus(name=op.name, purpose=op.purpose, state="installed")
    blocked = missing_for_loading(builder, toolchain)
    if blocked is not None:
        return OpStatus(
            name=op.name,
            purpose=op.purpose,
            state="blocked",
            cause=blocked.cause,
            fix=blocked.fix,
        )
    return _jit_status(op, builder, _folders(op, accelerator), toolchain)


def _builder(name: str, accelerator: Any) -> Any | None:
    """DeepSpeed's builder of that class, or ``None`` where it has no implementation."""
    builder = accelerator.create_op_builder(name)
    # Some accelerators answer None, others hand out a builder whose load() raises.
    return None if type(builder).__name__ in {"NoneType", "NotImplementedBuilder"} else builder


def _folders(op: _Op, accelerator: Any) -> list[Path]:
    """Build folders of everything that loading the op loads, its own first."""
    companion = None if op.companion is None else _builder(op.companion, accelerator)
    names = [op.name] if companion is None else [op.name, companion.name]
    return [build_folder(name) for name in names]


def _jit_status(op: _Op, builder: Any, folders: list[Path], toolchain: Toolchain) -> OpStatus:
    """Status of an op that torch compiles on first use."""
    is_complete = all(built_library(folder) for folder in folders)
    stale = next(filter(None, map(why_stale, folders)), None) if is_complete else None
    state: OpState = "stale" if is_complete else "buildable"
    found = None if stale is None else Diagnosis(cause=stale)
    if lock := next(filter(None, map(BuildLock.on, folders)), None):
        state, found = "locked", lock.diagnose()
    elif is_complete and stale is None:
        state = "built"
    elif blocked := missing_for_building(builder, toolchain):
        state, found = "blocked", blocked
    elif found is None:
        found = doubt(builder, toolchain)
    library = built_library(folders[0])
    return OpStatus(
        name=op.name,
        purpose=op.purpose,
        state=state,
        cause=found.cause if found else None,
        fix=found.fix if found else None,
        path=None if library is None else str(library),
    )


def _is_installed(name: str, accelerator: Any) -> bool:
    info = importlib.import_module("deepspeed.git_version_info")
    return bool(info.installed_ops.get(name)) and info.accelerator_name == accelerator._name
