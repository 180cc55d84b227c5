"""Where DeepSpeed starts from something else than was asked, and how that is put right."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from zerotune.backend.deepspeed.layouts import inner_optimizer
from zerotune.backend.deepspeed.sources import SWAPPED_GRADIENTS
from zerotune.decisions import Decision


def undo_dummy_step(engine: Any) -> tuple[Decision, ...]:
    """Take back the step that DeepSpeed's stage-0 half-precision wrappers begin with.

    To allocate its states, ``FP16_Optimizer`` runs one optimizer step on zero gradients. That
    applies weight decay once and leaves Adam's counter at 1, so the first real step is corrected
    for bias as if it were the second (a loss difference of up to 5e-2 against stages 1-3).
    """
    wrapper = engine.optimizer
    if type(wrapper).__name__ not in ("FP16_Optimizer", "FP16_UnfusedOptimizer"):
        return ()
    wrapper.refresh_fp32_params()
    if hasattr(wrapper, "fp32_groups_flat"):
        for flat, parameters in zip(wrapper.fp32_groups_flat, wrapper.fp16_groups, strict=True):
            _copy_into(flat, parameters)
    wrapper.optimizer.state.clear()
    return (
        Decision(
            key="optimizer.step",
            before=1,
            after=0,
            reason="DeepSpeed takes one step on zero gradients to allocate its states at stage 0 "
            "in half precision; it was undone, so that training starts at step 0",
        ),
    )


def look_at_gradients(engine: Any) -> tuple[Decision, ...]:
    """Let no step be taken on NaN where no norm tells of it.

    With ``compute_grad_norm: false`` DeepSpeed looks at fp32 gradients in no way at all: weights
    and moments are spoiled without a word. Its own look for an overflow costs one pass.
    """
    wrapper = engine.optimizer
    unseen = not getattr(wrapper, "compute_grad_norm", True) and not wrapper.check_grad_overflow
    if not unseen or wrapper.dtype != torch.float32:
        return ()
    wrapper.check_grad_overflow = True
    return (
        Decision(
            key="zero_optimization.compute_grad_norm",
            before="gradients are not looked at",
            after="a step on NaN or infinity is skipped",
            reason="without a norm DeepSpeed steps on fp32 gradients whatever they are",
        ),
    )


def align_swapped_gradients(engine: Any) -> tuple[Decision, ...]:
    """Let every gradient on NVMe begin where direct I/O can read it back.

    DeepSpeed 0.19.8 reads a swapped gradient straight to its place in the sub-group's buffer.
    Where that is no multiple of the sector size the kernel refuses, nobody looks at the refusal,
    and the optimizer steps on what the buffer held before: every gradient of 1 MiB or more is
    wrong, in silence, unless it happens to lie at an aligned offset.
    """
    swapper = getattr(engine.optimizer, "optimizer_swapper", None)
    if swapper is None:
        return ()
    if (changed := SWAPPED_GRADIENTS.changed()) is not None:
        return (
            Decision(
                key="zero_optimization.offload_optimizer.device",
                before="nvme",
                after="nvme",
                reason=f"{changed}, so gradients are swapped in DeepSpeed's way, which read "
                "unaligned ones back wrong in 0.19.8",
                severity="warning",
            ),
        )
    swapper._adjust_for_misaligned_lengths = partial(split_aligned, swapper)
    return (
        Decision(
            key="zero_optimization.offload_optimizer.device",
            before="nvme",
            after="nvme",
            reason="gradients are swapped from aligned offsets on; DeepSpeed itself reads others "
            "back wrong, and their few unaligned elements stay in host memory",
        ),
    )


def split_aligned(
    swapper: Any, tensors: list[torch.Tensor], offsets: list[int]
) -> tuple[list[torch.Tensor], list[int]]:
    """Cut gradients into parts that swap and parts that stay in memory.

    Replaces ``OptimizerSwapper._adjust_for_misaligned_lengths``, which aligns only the end.

    Args:
        swapper: DeepSpeed's swapper, for its alignment and its smallest size.
        tensors: 1-D gradients.
        offsets: Where each begins in the sub-group.

    Returns:
        The parts and their offsets.
    """
    unit = swapper.numel_alignment
    parts: list[torch.Tensor] = []
    places: list[int] = []
    for tensor, offset in zip(tensors, offsets, strict=True):
        length = tensor.numel()
        head = min(-offset % unit, length) if swapper.is_swappable_tensor(tensor=tensor) else length
        body = (length - head) // unit * unit
        cuts = ((0, head), (head, body), (head + body, length - head - body))
        for start, size in cuts:
            if size:
                parts.append(tensor.narrow(0, start, size))
                places.append(offset + start)
    return parts, places


def join_adam_on_device(engine: Any) -> tuple[Decision, ...]:
    """Let the Adam of the part that is not offloaded follow the schedule, and be seen.

    With ``offload_optimizer.ratio`` below 1 DeepSpeed steps the first sub-groups with an AdamW of
    its own. That keeps the first group's learning rate of the moment it was made, so that no
    schedule reaches it, and its states are in no checkpoint.
    """
    beside = getattr(engine.optimizer, "backup_optimizer", None)
    if beside is None:
        return ()
    adam = engine.optimizer.optimizer
    for group, its_own in zip(adam.param_groups, beside.param_groups, strict=True):
        for name, value in its_own.items():
            group.setdefault(name, value)
        # One kernel and no temporaries, where torch has that for the device.
        group["fused"] = engine.device.type == "cuda" or None
    beside.param_groups = adam.param_groups
    beside.state = adam.state
    beside.register_step_pre_hook(_count_as_torch)
    return (
        Decision(
            key="zero_optimization.offload_optimizer.ratio",
            before="the schedule reaches the offloaded part",
            after="the schedule reaches all of it",
            reason="DeepSpeed steps what stays on the device with an optimizer that keeps its "
            "first learning rate and whose states are not saved; both share groups and states now",
        ),
    )


def _count_as_torch(adam: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    """Steps that were counted as a number, by DeepSpeed or a checkpoint, become tensors."""
    for group in adam.param_groups:
        for parameter in group["params"]:
            state = adam.state.get(parameter)
            if state:
                device = parameter.device if group.get("fused") else torch.device("cpu")
                state["step"] = torch.as_tensor(float(state["step"]), device=device)


def replay_adam_steps(engine: Any, steps: int) -> None:
    """Bring the powers of beta that DeepSpeed's CPU Adam keeps to where an uninterrupted run is.

    The op behind DeepSpeedCPUAdam, and behind FusedAdam on the CPU accelerator, keeps beta to the
    power of the step as a running fp32 product. In a process that starts at a later step it
    computes the power anew, which rounds differently (first at step 3 of 0.999), so that a resumed
    run would drift from an uninterrupted one by about 1e-6 of a loss.

    Args:
        engine: DeepSpeed's engine, of any optimizer; only these are touched.
        steps: Optimizer steps taken before.
    """
    adam = inner_optimizer(engine)
    update = _cpu_adam_update(adam)
    if update is None or steps < 1:
        return
    betas = list(dict.fromkeys(tuple(group["betas"]) for group in adam.param_groups))
    # Where the groups differ, the op computes the powers anew at each change from one to the next.
    first = 1 if len(betas) == 1 else steps
    for step in range(first, steps + 1):
        for beta1, beta2 in betas:
            update(step, beta1, beta2)


def _cpu_adam_update(adam: Any) -> Callable[[int, float, float], object] | None:
    """One step of the op on a number that nobody has; ``None`` for every other optimizer."""
    kind = type(adam).__name__
    dummies = [torch.zeros(1) for _ in range(4)]
    if kind == "DeepSpeedCPUAdam":
        return lambda step, beta1, beta2: adam.ds_opt_adam.adam_update(
            adam.opt_id, step, 0.0, beta1, beta2, 1.0, 0.0, True, *dummies
        )
    if kind != "FusedAdam" or adam._dummy_overflow_buf.device.type != "cpu":
        return None
    lists = [[dummy] for dummy in dummies]
    return lambda step, beta1, beta2: adam.multi_tensor_adam(
        1, adam._dummy_overflow_buf, lists, 0.0, beta1, beta2, 1.0, step, adam.adam_w_mode, 1, 0.0
    )


def _copy_into(flat: torch.Tensor, parameters: list[torch.nn.Parameter]) -> None:
    offset = 0
    for parameter in parameters:
        target = flat.detach().narrow(0, offset, parameter.numel())
        target.copy_(parameter.detach().view(-1))
        offset += parameter.numel()
