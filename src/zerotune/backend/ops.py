"""State of DeepSpeed's compiled ops: whether each is built or can be built, and if not, why."""

from __future__ import annotations

import importlib
import logging
import sys
from pathlib import Path
from typing import Any, Final, Literal

import attrs

from zerotune._util.text import did_you_mean
from zerotune.backend.op_builds import (
    FOLDER,
    BuildLock,
    build_folder,
    building,
    built_library,
    folder_decisions,
    same_ninja,
    why_stale,
)
from zerotune.backend.op_causes import Diagnosis, missing_module, naming_the_cause, summary
from zerotune.errors import InvalidValueError, MissingDependencyError, PlatformError
from zerotune.platform.facts import CUDA
from zerotune.platform.toolchain import Toolchain, detect_toolchain

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


def _install_cuda() -> str:
    import torch

    return f"install the CUDA {torch.version.cuda} toolkit, and set CUDA_HOME to its folder"


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
    """Why the op is stale, locked, blocked or absent."""
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
    return "buildable", None
