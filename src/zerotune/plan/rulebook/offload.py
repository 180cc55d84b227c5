"""Rules on where the optimizer and the parameters wait."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerotune.plan.kinds import AUTO, is_number
from zerotune.plan.memory.sizes import format_size
from zerotune.plan.pinning import pins_exactly
from zerotune.plan.rulebook.common import Findings, active, clips, offload_section
from zerotune.plan.rules import Report, RuleContext, rule

if TYPE_CHECKING:
    from zerotune.plan.deepspeed_plan import DeepSpeedPlan

_NOTEWORTHY = 1024**3
"""Bytes of host memory below which rounding is not worth a word."""


@rule("offload-at-stage-0", "warning")
def offload_at_stage_0(plan: DeepSpeedPlan, _context: RuleContext, report: Report) -> Findings:
    """Nothing is offloaded at stage 0.

    Set ``zero_optimization.stage`` to 2 to offload the optimizer; the section is left out.
    """
    if plan.stage != 0:
        return
    for part in ("optimizer", "param"):
        section = offload_section(plan, part)
        if section is not None and active(section):
            yield report(
                f"zero_optimization.offload_{part}",
                section.to_dict(),
                "DeepSpeed ignores offload at stage 0, so it is left out",
                "set zero_optimization.stage to 2 to offload",
                after=None,
            )


@rule("offload-param-below-stage-3", "warning")
def offload_param(plan: DeepSpeedPlan, _context: RuleContext, report: Report) -> Findings:
    """Parameters can be offloaded only where they are partitioned, at stage 3.

    Set ``zero_optimization.stage`` to 3; below it DeepSpeed ignores the section, and it is left
    out.
    """
    section = offload_section(plan, "param")
    if plan.stage in (1, 2) and section is not None and active(section):
        yield report(
            "zero_optimization.offload_param",
            section.to_dict(),
            f"DeepSpeed ignores offload_param below stage 3, here {plan.stage}, so it is left out",
            "set zero_optimization.stage to 3 to offload parameters",
            after=None,
        )


@rule("offload-without-device", "warning", recorded_elsewhere=True)
def offload_without_device(plan: DeepSpeedPlan, _context: RuleContext, report: Report) -> Findings:
    """An offload section without a device offloads nothing: DeepSpeed's default is ``"none"``.

    Name a device, or remove the section.
    """
    for part in ("optimizer", "param"):
        section = offload_section(plan, part)
        if section is not None and section.device in (None, AUTO):
            yield report(
                f"zero_optimization.offload_{part}.device",
                section.device,
                'DeepSpeed reads this as "none", so nothing is offloaded',
                'write "cpu" (or "nvme" at stage 3), or remove the section',
            )


@rule("param-offload-alone", "note")
def param_offload_alone(plan: DeepSpeedPlan, _context: RuleContext, report: Report) -> Findings:
    """Parameters are offloaded while the larger optimizer states stay on the device.

    Offload the optimizer too, or first.
    """
    section = offload_section(plan, "param")
    if plan.stage == 3 and active(section) and plan.offload_optimizer_device == "none":
        yield report(
            "zero_optimization.offload_param.device",
            plan.offload_param_device,
            "the optimizer states, six times larger in mixed precision, stay on the device",
            'set offload_optimizer.device to "cpu" to free more memory',
        )


@rule("partial-offload-below-stage-3", "error")
def partial_offload(plan: DeepSpeedPlan, _context: RuleContext, report: Report) -> Findings:
    """An offload ratio below 1 is refused by DeepSpeed below stage 3.

    Write 1.0, or use stage 3.
    """
    section = offload_section(plan, "optimizer")
    ratio = section.ratio if section is not None else None
    if plan.stage in (1, 2) and is_number(ratio) and float(ratio or 0) < 1:
        yield report(
            "zero_optimization.offload_optimizer.ratio",
            ratio,
            f"DeepSpeed offloads a part of the optimizer only at stage 3, not at {plan.stage}",
            "set the ratio to 1.0, or zero_optimization.stage to 3",
        )


@rule("partial-offload", "warning")
def partial_offload_untested(
    plan: DeepSpeedPlan, _context: RuleContext, report: Report
) -> Findings:
    """An offload ratio below 1 leaves part of the optimizer with its first learning rate.

    Write 1.0. The part on the device gets an AdamW of its own, made with the learning rate of
    the first group at that moment, and no schedule reaches that group (``backup_optimizer``).
    """
    section = offload_section(plan, "optimizer")
    ratio = section.ratio if section is not None else None
    if plan.stage == 3 and is_number(ratio) and float(ratio or 0) < 1:
        yield report(
            "zero_optimization.offload_optimizer.ratio",
            ratio,
            "DeepSpeed's code gives the part on the device its own optimizer, whose learning"
            " rate does not seem to follow the schedule",
            "set the ratio to 1.0 unless you have checked it",
        )


@rule("super-offload-accelerator", "error")
def super_offload_accelerator(
    plan: DeepSpeedPlan, context: RuleContext, report: Report
) -> Findings:
    """SuperOffload runs on NVIDIA CUDA devices only; DeepSpeed asserts it.

    Remove ``super_offload``.
    """
    platform = context.platform
    if not _super_offload(plan) or plan.stage != 3 or platform is None:
        return
    if platform.accelerator not in ("cuda", "rocm"):
        yield report(
            "zero_optimization.offload_optimizer.super_offload",
            True,
            f"SuperOffload needs CUDA, and this platform trains on {platform.accelerator}",
            "remove super_offload",
        )


@rule("super-offload", "warning")
def super_offload(plan: DeepSpeedPlan, context: RuleContext, report: Report) -> Findings:
    """SuperOffload works at stage 3 only, and overlaps nothing while gradients are clipped.

    Leave it out, or set ``gradient_clipping`` to 0 if training stays stable without.
    """
    if not _super_offload(plan) or not isinstance(plan.stage, int):
        return
    key = "zero_optimization.offload_optimizer.super_offload"
    if plan.stage != 3:
        yield report(
            key,
            True,
            f"DeepSpeed ignores SuperOffload below stage 3, here {plan.stage}",
            "set zero_optimization.stage to 3, or remove super_offload",
        )
    elif clips(plan, context):
        yield report(
            key,
            True,
            "its CPU steps overlap the backward pass only without clipping; with it each"
            " sub-group is stepped afterwards, one by one",
            "remove super_offload, or set gradient_clipping to 0",
        )


def _super_offload(plan: DeepSpeedPlan) -> bool:
    section = offload_section(plan, "optimizer")
    return section is not None and active(section) and section.extra.get("super_offload") is True


@rule("pinned-memory-rounding", "note")
def pinned_memory(plan: DeepSpeedPlan, context: RuleContext, report: Report) -> Findings:
    """An older torch rounds each pinned block up to a power of two: 16 GiB for SDXL at stage 2.

    Install torch 2.13, where zerotune switches that off; or set ``pin_memory`` to false where host
    memory is short. Checked where model and torch are known.
    """
    section = offload_section(plan, "optimizer")
    if section is None or not active(section) or section.pin_memory is False:
        return
    if plan.stage not in (1, 2) or context.model is None or not _rounds(context):
        return
    elements = -(-context.model.trainable_numel // max(1, context.world_size))
    staging = 2 if plan.precision in ("bf16", "fp16") else 4
    # Master weights, their gradients and the copy in the model's precision: one block each.
    blocks = [elements * width for width in (4, 4, staging)]
    lost = sum(_power_of_two(block) - block for block in blocks)
    if lost >= _NOTEWORTHY:
        yield report(
            "zero_optimization.offload_optimizer.pin_memory",
            section.pin_memory,
            "torch rounds each pinned block up to a power of two, which adds"
            f" {format_size(lost)} to the {format_size(sum(blocks))} of each rank's flat buffers",
            "install torch 2.13, set DS_PIN_MEMORY_BACKEND=native, or pin_memory to false if host"
            " memory is short",
        )


def _rounds(context: RuleContext) -> bool:
    return context.platform is not None and not pins_exactly(context.platform)


def _power_of_two(nbytes: int) -> int:
    return 1 << max(0, nbytes - 1).bit_length()
