"""Forgetting gradients that DeepSpeed has accumulated and must never apply."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, Final

import torch

_BEFORE_THE_FIRST: Final = -1
"""``micro_step_id`` between two windows, where DeepSpeed's module does not name it."""


def discard_gradients(engine: Any) -> None:
    """Drop the accumulation window of a ``deepspeed.DeepSpeedEngine``, as a skipped step.

    Does what the wrappers do themselves when a loss scale overflows, which is their only way to
    drop a step, and clears the buffers that outlive it: a parameter without a gradient in the
    next window would otherwise be stepped with that of the dropped one. Weights, states, loss
    scale and scheduler stay as they are.

    Args:
        engine: DeepSpeed's engine at stage 0 to 3, on any device.
    """
    wrapper = engine.optimizer
    kind = type(wrapper).__name__
    if kind == "DeepSpeedZeroOptimizer_Stage3":
        _discard_at_stage_3(wrapper)
    elif kind == "DeepSpeedZeroOptimizer":
        _discard_at_stages_1_and_2(wrapper)
    else:
        wrapper.zero_grad()
        for flat in _tensors(getattr(wrapper, "fp32_groups_flat", ())):
            flat.grad = None
    engine.zero_grad()
    _count_as_skipped(engine)


def _count_as_skipped(engine: Any) -> None:
    window = engine.gradient_accumulation_steps()
    engine.micro_steps = (engine.micro_steps // window + 1) * window
    engine.global_steps += 1
    engine.skipped_steps += 1
    engine.global_samples += engine.train_batch_size()
    engine._step_applied = False


def _discard_at_stages_1_and_2(wrapper: Any) -> None:
    # The copies of offloaded gradients may still be under way; absent before DeepSpeed 0.19.
    wait = getattr(wrapper, "_wait_for_offload_copies", None)
    if wait is not None:
        wait()
    home = sys.modules[type(wrapper).__module__]
    wrapper.micro_step_id = getattr(home, "INITIAL_MICRO_STEP_ID", _BEFORE_THE_FIRST)
    wrapper.zero_grad(set_to_none=True)
    if hasattr(wrapper, "_release_preflattened_grad_buffers"):
        wrapper._release_preflattened_grad_buffers()
    if wrapper.cpu_offload:
        if hasattr(wrapper, "_offload_accumulated_param_ids"):
            wrapper._offload_accumulated_param_ids = set()
        wrapper.reset_cpu_buffers()
        _clear(getattr(wrapper, "accumulated_grads_in_cpu", {}).values())
        _clear_gradients(wrapper.single_partition_of_fp32_groups)
        return
    for group in wrapper.averaged_gradients:
        wrapper.averaged_gradients[group] = None
        wrapper.all_grad_tensors[group] = None


def _discard_at_stage_3(wrapper: Any) -> None:
    wrapper._pre_step()
    wrapper._partition_all_parameters()
    wrapper._overflow_clean_up(None)
    wrapper.inf_or_nan_tracker.zero_()
    _clear([wrapper.grad_partitions_flat_buffer])
    _clear_gradients(wrapper.fp32_partitioned_groups_flat)


def _clear_gradients(flats: Iterable[Any]) -> None:
    _clear(flat.grad for flat in _tensors(flats))


def _clear(tensors: Iterable[torch.Tensor | None]) -> None:
    for tensor in tensors:
        if tensor is not None:
            tensor.zero_()


def _tensors(found: Iterable[Any]) -> list[torch.Tensor]:
    return [each for each in found if isinstance(each, torch.Tensor)]
