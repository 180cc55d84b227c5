"""DeepSpeed's real hooks on a model without data: which weights are gathered at the same time."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from tests.support.ranks import free_port
from zerotune.backend.deepspeed.releasing import WeightReleases
from zerotune.plan.model import ModelFacts
from zerotune.plan.resolve import AIO_BLOCK, Swapping


class Gathered:
    """Stands for the parameters of ``deepspeed.zero.Init``, which are gathered without data.

    Args:
        model: Model on the ``meta`` device.
        persistent: Names of parameters that are never released.
    """

    def __init__(self, model: torch.nn.Module, persistent: set[str]) -> None:
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        self._status = ZeroParamStatus
        self.swapped: set[Any] = set()
        self.now: set[Any] = set()
        self.most: set[Any] = set()
        self.reads = 0
        for number, (name, weight) in enumerate(model.named_parameters()):
            held: Any = weight
            held.ds_id, held.ds_numel, held.ds_shape = number, weight.numel(), weight.shape
            held.ds_status = self._status.NOT_AVAILABLE
            held.ds_persist = held.is_external_param = name in persistent
            held.is_external_param = False
            held.ds_active_sub_modules = set()
            held.ds_tensor = SimpleNamespace(final_location=None)
            held.ds_secondary_tensor = held.nvme_swapper = None
            held.partition_numel = weight.numel
            held.all_gather_coalesced = self._gather
            held.all_gather = partial(self._gather, [weight])
            held.partition = partial(self._release, weight)
            held.ds_summary = lambda name=name: name
            if name not in persistent:
                self.swapped.add(weight)

    def _gather(self, weights: Any, **_: Any) -> Any:
        for weight in weights:
            weight.ds_status = self._status.INFLIGHT
        self.now |= self.swapped & {*weights}
        self.reads += len(self.swapped & {*weights})
        if len(self.now) > len(self.most):
            self.most = {*self.now}
        return SimpleNamespace(wait=partial(self._wait, weights))

    def _wait(self, weights: Any, **_: Any) -> None:
        for weight in weights:
            weight.ds_status = self._status.AVAILABLE

    def _release(self, weight: Any, **_: Any) -> None:
        assert not weight.ds_active_sub_modules
        weight.ds_status = self._status.NOT_AVAILABLE
        self.now.discard(weight)


def gathered_at_once(
    model: torch.nn.Module, inputs: Callable[[], Any], *, mended: bool = True
) -> tuple[list[str], int, int, list[str]]:
    """Run both passes of a model under DeepSpeed's hooks.

    Args:
        model: Model on the ``meta`` device.
        inputs: Function that returns the keyword arguments of ``forward``.
        mended: Whether zerotune's hooks are installed too.

    Returns:
        The most swapped weights that were gathered at once, their number according to the plan,
        how often a weight was read, and the weights that are gathered at the end.
    """
    import deepspeed
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT=str(free_port()), DS_ACCELERATOR="cpu")
    deepspeed.init_distributed("gloo", verbose=False)
    swapping = Swapping(
        model=ModelFacts.from_module(model), world_size=1, element_bytes=2, block_bytes=AIO_BLOCK
    )
    swapped = {each.name for each in swapping.swapped}
    named = dict(model.named_parameters())
    gathered = Gathered(model, set(named) - swapped)
    offload = DeepSpeedZeRoOffload(
        model, None, None, param_persistence_threshold=0, prefetch_bucket_size=0,
        max_reuse_distance=0,
    )  # fmt: skip
    for name, weight in named.items():
        weight.ds_persist = name not in swapped  # type: ignore[attr-defined]
    if mended:
        WeightReleases(SimpleNamespace(parameter_offload=offload, _grad_acc_hooks=[]))
    # The second pass follows the recorded order of modules.
    for _ in range(2):
        output = model(**inputs(), return_dict=False)
        first = output[0] if isinstance(output, tuple) else output
        first = first[0] if isinstance(first, list) else first
        first.float().pow(2).mean().backward()
        offload.release_backward_leftovers()
        left = [name for name, weight in named.items() if weight in gathered.now]
    names = [name for name, weight in named.items() if weight in gathered.most]
    checkpointed = bool(getattr(model, "is_gradient_checkpointing", False))
    return names, swapping.gathered(recomputed=checkpointed), gathered.reads, left
