"""Keep frozen models whole, also where stage 3 partitions everything else."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from zerotune.errors import EngineError


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
                fix="load it within zerotune.backend.unpartitioned.unpartitioned()",
            )
