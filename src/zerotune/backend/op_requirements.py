"""What DeepSpeed's ops need of a machine, each with its root cause when it is missing."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from zerotune.backend.build_errors import Diagnosis, missing_module, summary
from zerotune.platform.toolchain import Toolchain


def missing_for_loading(builder: Any, toolchain: Toolchain) -> Diagnosis | None:
    """What keeps torch from loading the op even when it is compiled."""
    if toolchain.ninja is None:
        if toolchain.hidden_ninja is not None:
            folder = Path(toolchain.hidden_ninja).parent
            return Diagnosis(
                cause=f"ninja is installed in {folder}, which is not on PATH",
                fix="activate the environment, or add that folder to PATH",
            )
        return Diagnosis(cause="ninja is not installed", fix="pip install ninja")
    # DeepSpeed probes libaio with the compiler each time it loads this op.
    if builder.name == "async_io":
        return _missing_compiler(toolchain) or _missing_libaio(toolchain) or _refused(builder)
    return _refused(builder)


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


def _missing_compiler(toolchain: Toolchain) -> Diagnosis | None:
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
    if compiler := _missing_compiler(toolchain):
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
    if found.partition(".")[0] == wanted.partition(".")[0]:
        return None
    return Diagnosis(
        cause=f"nvcc is of CUDA {found}, torch was built for CUDA {wanted}: it may not build",
        fix=_install_cuda(),
    )


def _install_cuda() -> str:
    import torch

    return f"install the CUDA {torch.version.cuda} toolkit and name its folder in CUDA_HOME"
