"""The door to deepspeed and accelerate: import them, or say why that cannot be.

And keep models whole that are not trained, where stage 3 partitions everything else.
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
        accelerator: DeepSpeed's name of it (``"cuda"``, ``"cpu"``, …).
    """
    with environment(DS_ACCELERATOR=accelerator):
        deepspeed = require(
            "deepspeed",
            name="DeepSpeed",
            fix="pip install deepspeed, or ask for the plain engine with deepspeed=False",
        )
    running = deepspeed.accelerator.get_accelerator()._name
    if running != accelerator:
        raise UnsupportedEngineError(
            f"DeepSpeed was already imported in this process for {running!r}",
            key="DS_ACCELERATOR",
            value=accelerator,
            fix=f"set DS_ACCELERATOR={accelerator} before anything imports deepspeed",
        )
    if Version(deepspeed.__version__).release < Version(OLDEST_DEEPSPEED).release:
        raise UnsupportedEngineError(
            f"zerotune needs DeepSpeed {OLDEST_DEEPSPEED} or newer",
            key="deepspeed",
            value=deepspeed.__version__,
            fix=f"pip install 'deepspeed>={OLDEST_DEEPSPEED}'",
        )
    return deepspeed


def require_accelerate() -> ModuleType:
    """Import accelerate."""
    return require("accelerate", fix="pip install accelerate")


def require(
    module: str, *, fix: str, name: str | None = None, key: str | None = None
) -> ModuleType:
    """Import a package that somebody may not have.

    Args:
        module: What to import.
        fix: How to get it.
        name: What people call it; ``module`` when not given.
        key: The setting that asks for it; ``module`` when not given.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependencyError(
            f"{name or module} could not be imported ({error})", key=key or module, fix=fix
        ) from error


def quiet_deepspeed() -> None:
    """Keep DeepSpeed's own logger to warnings; zerotune reports what it decided itself."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)


# -- Frozen models stay whole, also where stage 3 partitions everything else.


def whole_parameter(parameter: torch.nn.Parameter) -> torch.Tensor:
    """A parameter in full, on the CPU, in the dtype the engine holds it in.

    Collective under ZeRO-3: every rank must call it, in the same order.
    """
    if not hasattr(parameter, "ds_id"):
        return parameter.detach().cpu()
    # Whoever partitioned it has imported DeepSpeed; a second import could choose otherwise.
    zero = sys.modules["deepspeed"].zero
    with zero.GatheredParameters([parameter]):
        return parameter.detach().to("cpu", copy=True)


@contextmanager
def unpartitioned() -> Iterator[None]:
    """Models made inside are whole on every rank, whatever is going on outside.

    Two things partition models behind their maker's back: an active ``deepspeed.zero.Init``, and
    a DeepSpeed configuration registered with transformers, which partitions each
    ``from_pretrained``. Both are as before afterwards.
    """
    with ExitStack() as stack:
        partitioning = sys.modules.get("deepspeed.runtime.zero.partition_parameters")
        active = getattr(partitioning, "top_level_context", None)
        # Inside another of these it is not patched, and restoring would patch twice.
        if partitioning is not None and active is not None and active.patched:
            partitioning.shutdown_init_context()
            stack.callback(partitioning.restore_init_context)
        integration: Any = sys.modules.get("transformers.integrations.deepspeed")
        reference = getattr(integration, "_hf_deepspeed_config_weak_ref", None)
        # A strong one: the registration itself is weak, and must outlive this.
        registered = None if reference is None else reference()
        if registered is not None:
            integration.unset_hf_deepspeed_config()
            stack.callback(integration.set_hf_deepspeed_config, registered)
        yield


def check_whole(module: torch.nn.Module, *, name: str) -> None:
    """Refuse a partitioned module: its forward would fail with ``'weight' must be 2-D``."""
    for key, parameter in module.named_parameters():
        if hasattr(parameter, "ds_id") or parameter.numel() == 0:
            raise EngineError(
                "ZeRO-3 has partitioned a model that is not trained",
                key=f"{name}.{key}",
                value=tuple(parameter.shape),
                fix="load it within zerotune.backend.upstream.unpartitioned()",
            )
