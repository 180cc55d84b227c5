"""The master weights of whatever somebody trains with."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from zerotune.backend.distributed import ProcessGroup
from zerotune.backend.layouts import ParameterLayout, full_shape, layout_of_deepspeed
from zerotune.backend.master_weights import MasterWeights
from zerotune.errors import EngineError


def master_weights_of(source: Any) -> MasterWeights:
    """The fp32 weights behind an engine or a model.

    Args:
        source: A zerotune engine, a ``MasterWeights``, a ``deepspeed.DeepSpeedEngine`` of one's
            own loop (also as ``accelerate.prepare`` or Fabric's ``setup`` returns it), or a
            ``torch.nn.Module`` whose trainable parameters are fp32.

    Raises:
        EngineError: It is none of these, or its parameters are no fp32 master weights.
        UnsupportedEngineError: A DeepSpeed engine with an optimizer zerotune does not know.
    """
    if isinstance(source, MasterWeights):
        return source
    owned = getattr(source, "master_weights", None)
    if isinstance(owned, MasterWeights):
        return owned
    source = unwrapped(source)
    if is_deepspeed(source):
        return _of_deepspeed(source)
    if isinstance(source, torch.nn.Module):
        return _of_module(source)
    raise EngineError(
        "has no master weights",
        key="source",
        value=type(source).__name__,
        fix="give an engine, its master_weights, a DeepSpeedEngine or a torch module",
    )


def deepspeed_engine_of(source: Any) -> Any:
    """The ``deepspeed.DeepSpeedEngine`` in what a trainer returned for a model.

    Raises:
        EngineError: There is none.
    """
    found = unwrapped(getattr(source, "deepspeed_engine", source))
    if is_deepspeed(found):
        return found
    raise EngineError(
        "is no DeepSpeed engine",
        key="engine",
        value=type(source).__name__,
        fix="give what deepspeed.initialize, accelerator.prepare or fabric.setup returned for "
        "the model; without the trainer's DeepSpeed plugin there is no engine to attach to",
    )


def unwrapped(source: Any) -> Any:
    """What Fabric's module wrapper drives; anything else as it is."""
    return getattr(source, "_forward_module", source)


def is_deepspeed(source: Any) -> bool:
    """Whether this is an object of DeepSpeed's own, without importing DeepSpeed."""
    return type(source).__module__.startswith("deepspeed.")


def _of_deepspeed(engine: Any) -> MasterWeights:
    group = ProcessGroup(backend=dist.get_backend())
    return MasterWeights(
        layout=layout_of_deepspeed(engine, rank=group.rank), group=group, device=engine.device
    )


def _of_module(module: torch.nn.Module) -> MasterWeights:
    if isinstance(module, torch.nn.parallel.DistributedDataParallel):
        module = module.module
    for name, parameter in module.named_parameters():
        if full_shape(parameter) != tuple(parameter.shape):
            raise EngineError(
                "ZeRO-3 has partitioned this module, so it holds no whole weights",
                key=name,
                value=tuple(parameter.shape),
                fix="give the engine that trains it instead of the module",
            )
    # Replicas hold the same weights, so nothing needs to be exchanged.
    return MasterWeights(
        layout=ParameterLayout(module=module),
        group=ProcessGroup.alone(),
        device=next((p.device for p in module.parameters()), torch.device("cpu")),
    )
