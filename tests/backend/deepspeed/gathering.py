"""DeepSpeed's real hooks on a model without data: which weights are gathered at the same time."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import attrs
import torch

from tests.support.ranks import free_port
from zerotune.backend.deepspeed.releasing import WeightReleases
from zerotune.diffusion.passes import sizes_only
from zerotune.plan.facts import ModelFacts
from zerotune.plan.resolve.sizes import AIO_BLOCK, Swapping, gathered_together

PASSES = 2
"""In the second pass, DeepSpeed follows the order of modules that it has recorded in the first."""


class Partitioned:
    """Stands in for ``deepspeed.zero.Init``: gathers and releases parameters without data.

    Args:
        named: Parameters on the ``meta`` device.
        counted: Names of the parameters to count; all others are never released.
    """

    def __init__(self, named: Mapping[str, Any], counted: set[str]) -> None:
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        self._status = ZeroParamStatus
        self.now: set[Any] = set()
        self.most = self.elements = self.gathers = 0
        for number, (name, weight) in enumerate(named.items()):
            weight.ds_id, weight.ds_numel, weight.ds_shape = number, weight.numel(), weight.shape
            weight.ds_status, weight.ds_persist = ZeroParamStatus.NOT_AVAILABLE, False
            weight.ds_active_sub_modules, weight.is_external_param = set(), False
            weight.ds_tensor = SimpleNamespace(final_location=None)
            weight.ds_secondary_tensor = weight.nvme_swapper = None
            weight.partition_numel, weight.ds_summary = weight.numel, partial(str, name)
            weight.all_gather_coalesced = self._gather
            weight.partition = partial(self._release, weight)
        self._counted = {weight for name, weight in named.items() if name in counted}

    def _gather(self, weights: list[Any], **_: Any) -> Any:
        for weight in weights:
            weight.ds_status = self._status.INFLIGHT
        new = self._counted & {*weights}
        self.now |= new
        self.gathers += len(new)
        self.most = max(self.most, len(self.now))
        self.elements = max(self.elements, sum(weight.numel() for weight in self.now))
        return SimpleNamespace(wait=partial(self._wait, weights))

    def _wait(self, weights: list[Any], **_: Any) -> None:
        for weight in weights:
            weight.ds_status = self._status.AVAILABLE

    def _release(self, weight: Any, **_: Any) -> None:
        assert not weight.ds_active_sub_modules
        weight.ds_status = self._status.NOT_AVAILABLE
        self.now.discard(weight)


@attrs.frozen
class Found:
    """Weights on NVMe that are gathered at once, counted and expected."""

    most: int
    expected: int
    """The plan's number."""
    elements: int
    expected_elements: int
    gathers: float
    """How often each weight is gathered in a forward and backward pass."""
    left: int
    """Weights that are gathered when the backward pass is over."""


def gathered_at_once(
    model: torch.nn.Module, inputs: Callable[[], Any], *, mended: bool = True
) -> Found:
    """Run a model's passes under DeepSpeed's hooks, in a process of its own.

    Args:
        model: Model on the ``meta`` device, in bf16.
        inputs: Function that returns the keyword arguments of ``forward``.
        mended: Whether zerotune's hooks are installed too.
    """
    import deepspeed
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()), DS_ACCELERATOR="cpu",
    )  # fmt: skip
    deepspeed.init_distributed("gloo", verbose=False)
    facts = ModelFacts.from_module(model)
    swapping = Swapping(model=facts, world_size=1, element_bytes=2, block_bytes=AIO_BLOCK)
    swapped = {each.name for each in swapping.swapped}
    named: dict[str, Any] = dict(model.named_parameters())
    partitioned = Partitioned(named, swapped)
    offload = DeepSpeedZeRoOffload(
        model, None, None, param_persistence_threshold=0, prefetch_bucket_size=0,
        max_reuse_distance=0,
    )  # fmt: skip
    for name, weight in named.items():
        weight.ds_persist = name not in swapped
    if mended:
        WeightReleases(SimpleNamespace(parameter_offload=offload, _grad_acc_hooks=[]))
    for _ in range(PASSES):
        with sizes_only():
            output = model(**inputs())
            samples = output[0] if isinstance(output, tuple) else output.sample
            first = samples[0] if isinstance(samples, list) else samples
            first.float().pow(2).mean().backward()
        left = len(partitioned.now)
        offload.release_backward_leftovers()
    recomputed = bool(model.is_gradient_checkpointing)
    groups = gathered_together(swapping.swapped, facts.units if recomputed else ())
    return Found(
        most=partitioned.most,
        expected=swapping.gathered(recomputed=recomputed),
        elements=partitioned.elements,
        expected_elements=max(sum(each.numel for each in group) for group in groups),
        gathers=partitioned.gathers / (PASSES * len(swapped)),
        left=left,
    )
