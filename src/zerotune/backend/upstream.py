"""Import deepspeed and accelerate, with a clear error if they are missing or unsuitable.

The module also prevents stage 3 from partitioning models that are not trained.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from zerotune._util.proc import environment
from zerotune.errors import EngineError, MissingDependencyError, UnsupportedEngineError
from zerotune.platform.detect import OLDEST_DEEPSPEED

if TYPE_CHECKING:
    import torch


def require_deepspeed(*, accelerator: str) -> ModuleType:
    """Import DeepSpeed for an accelerator.

    Args:
        accelerator: DeepSpeed's name for the accelerator (``"cuda"``, ``"cpu"``, …).
    """
    with environment(DS_ACCELERATOR=accelerator):
        deepspeed = require(
            "deepspeed",
            name="DeepSpeed",
            fix="pip install deepspeed, or resolve the plan with deepspeed=False for the plain "
            "engine",
        )
    running = deepspeed.accelerator.get_accelerator()._name
    if running != accelerator:
        raise UnsupportedEngineError(
            f"DeepSpeed was already imported in this process for {running!r}",
            f"set DS_ACCELERATOR={accelerator} before deepspeed is first imported",
            "DS_ACCELERATOR",
            accelerator,
        )
    if Version(deepspeed.__version__).release < Version(OLDEST_DEEPSPEED).release:
        raise UnsupportedEngineError(
            f"zerotune needs DeepSpeed {OLDEST_DEEPSPEED} or newer",
            f"pip install 'deepspeed>={OLDEST_DEEPSPEED}'",
            "deepspeed",
            deepspeed.__version__,
        )
    return deepspeed


def require_accelerate() -> ModuleType:
    """Import accelerate."""
    return require("accelerate", fix="pip install accelerate")


def require(
    module: str, *, fix: str, name: str | None = None, key: str | None = None
) -> ModuleType:
    """Import an optional package.

    Args:
        module: Name of the module to import.
        fix: How to install the package.
        name: Name of the package in the error message; default: ``module``.
        key: Setting that requires the package; default: ``module``.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependencyError(
            f"{name or module} could not be imported ({error})", fix, key or module
        ) from error


def quiet_deepspeed() -> None:
    """Limit DeepSpeed's logger to warnings, since zerotune reports all decisions itself."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)


# -- Frozen models stay whole, also where stage 3 partitions everything else.


def whole_parameter(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return a full parameter on the CPU, in the engine's dtype.

    Collective under ZeRO-3: all ranks must call this function for the same parameters in the same
    order.

    Args:
        parameter: The parameter, partitioned or not.
    """
    if not hasattr(parameter, "ds_id"):
        return parameter.detach().cpu()
    # DeepSpeed is already imported; a second import could select a different accelerator.
    zero = sys.modules["deepspeed"].zero
    with zero.GatheredParameters([parameter]):
        return parameter.detach().to("cpu", copy=True)


@contextmanager
def unpartitioned() -> Iterator[None]:
    """Inside the block, models are created unpartitioned on every rank.

    An active ``deepspeed.zero.Init`` and a DeepSpeed configuration registered with transformers
    both partition new models. Both are disabled inside the block and restored at its end.
    """
    with ExitStack() as stack:
        partitioning = sys.modules.get("deepspeed.runtime.zero.partition_parameters")
        active = getattr(partitioning, "top_level_context", None)
        # In a nested block, zero.Init is already unpatched, and restoring would patch it twice.
        if partitioning is not None and active is not None and active.patched:
            partitioning.shutdown_init_context()
            stack.callback(partitioning.restore_init_context)
        integration: Any = sys.modules.get("transformers.integrations.deepspeed")
        reference = getattr(integration, "_hf_deepspeed_config_weak_ref", None)
        # A strong reference: the registration itself is weak, and must outlive the block.
        registered = None if reference is None else reference()
        if registered is not None:
            integration.unset_hf_deepspeed_config()
            stack.callback(integration.set_hf_deepspeed_config, registered)
        yield


def check_whole(module: torch.nn.Module, *, name: str) -> None:
    """Raise an error if a module is partitioned, because its forward pass would fail.

    Args:
        module: The module.
        name: Name of the module, for the error message.
    """
    for key, parameter in module.named_parameters():
        if hasattr(parameter, "ds_id") or parameter.numel() == 0:
            raise EngineError(
                "ZeRO-3 has partitioned a model that is not trained",
                "load the model inside `with zerotune.backend.upstream.unpartitioned():`",
                f"{name}.{key}",
                tuple(parameter.shape),
            )
