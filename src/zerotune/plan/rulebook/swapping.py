"""Rules on NVMe."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerotune.plan import sizing
from zerotune.plan.kinds import AUTO
from zerotune.plan.memory.sizes import format_size
from zerotune.plan.rulebook.common import Findings, integer, offload_section
from zerotune.plan.rules import Report, RuleContext, rule
from zerotune.plan.swapping import OPTIMIZER_BUFFERS, optimizer_buffers

if TYPE_CHECKING:
    from zerotune.plan.deepspeed_plan import DeepSpeedPlan

_LARGE_POOL = 4 * 1024**3
"""Bytes of pinned swap buffers that deserve a warning."""


def _adam_swap_buffers(plan: DeepSpeedPlan) -> int | None:
    """``buffer_count`` where an optimizer with two moments is swapped and the user wrote one."""
    section = offload_section(plan, "optimizer")
    name = (plan.optimizer.type if plan.optimizer else None) or "AdamW"
    if plan.stage != 3 or section is None or section.device != "nvme" or "adam" not in name.lower():
        return None
    return integer(section.buffer_count)


@rule("nvme-optimizer-below-stage-3", "error")
def nvme_optimizer(plan: DeepSpeedPlan, _context: RuleContext, report: Report) -> Findings:
    """DeepSpeed silently keeps the optimizer in host memory instead of NVMe below stage 3.

    Use stage 3, or device ``"cpu"``.
    """
    if plan.stage in (1, 2) and plan.offload_optimizer_device == "nvme":
        yield report(
            "zero_optimization.offload_optimizer.device",
            "nvme",
            f"needs stage 3; at stage {plan.stage} DeepSpeed silently uses host memory",
            'set zero_optimization.stage to 3, or device to "cpu"',
        )


@rule("nvme-optimizer-buffers", "error")
def nvme_optimizer_buffers(plan: DeepSpeedPlan, _context: RuleContext, report: Report) -> Findings:
    """The swap pool of an Adam optimizer needs four buffers.

    Write at least 4, or ``"auto"``.
    """
    written = _adam_swap_buffers(plan)
    if written is not None and written < OPTIMIZER_BUFFERS:
        yield report(
            "zero_optimization.offload_optimizer.buffer_count",
            written,
            "weight, gradient and two moments are resident together, and DeepSpeed asserts that"
            " there is a buffer for each",
            f'write at least {OPTIMIZER_BUFFERS}, or "{AUTO}"',
        )


@rule("nvme-pipeline-buffers", "warning")
def nvme_pipeline_buffers(plan: DeepSpeedPlan, _context: RuleContext, report: Report) -> Findings:
    """Pipelined swapping needs four more buffers for reading ahead and four for writing back.

    Write 8 with one of ``pipeline_read`` and ``pipeline_write``, 12 with both, or ``"auto"``.
    """
    section = offload_section(plan, "optimizer")
    written = _adam_swap_buffers(plan)
    if section is None or written is None:
        return
    need = optimizer_buffers(section)
    if OPTIMIZER_BUFFERS <= written < need:
        yield report(
            "zero_optimization.offload_optimizer.buffer_count",
            written,
            "DeepSpeed runs out of swap buffers as soon as there is more than one sub-group",
            f'write at least {need}, or "{AUTO}"',
        )


@rule("nvme-sub-group-size", "warning")
def nvme_sub_group_size(plan: DeepSpeedPlan, context: RuleContext, report: Report) -> Findings:
    """The pool of NVMe swap buffers is host memory: buffers x largest sub-group x 4 bytes.

    Write 5e7 to 1e8, or ``"auto"``. DeepSpeed's default of 1e9 takes 15 GiB with four buffers
    where the model is as large.
    """
    zero, section = plan.zero_optimization, offload_section(plan, "optimizer")
    if zero is None or section is None or plan.stage != 3 or section.device != "nvme":
        return
    size = integer(zero.sub_group_size)
    if size is None:
        return
    buffers = integer(section.buffer_count) or optimizer_buffers(section)
    model = context.model
    world_size = max(1, context.world_size)
    largest = sizing.largest_sub_group(model, world_size, size) if model else size
    pool = buffers * largest * 4
    if pool >= _LARGE_POOL:
        yield report(
            "zero_optimization.sub_group_size",
            size,
            f"the swap pool holds {buffers} buffers of the largest sub-group in fp32, which is"
            f" {format_size(pool)} of host memory on each rank",
            f'write {sizing.SUB_GROUP_NVME}, or "{AUTO}"',
        )


@rule("nvme-param-prefetch", "warning", recorded_elsewhere=True)
def nvme_param_prefetch(plan: DeepSpeedPlan, _context: RuleContext, report: Report) -> Findings:
    """Fetching parameters ahead from NVMe fails in the second step.

    Write 0 or ``"auto"``. Where the forward pass turns into the backward pass DeepSpeed 0.19.8
    queues a layer twice ("already assigned swap buffer"); resolution switches it off.
    """
    zero = plan.zero_optimization
    if zero is None or plan.stage != 3 or plan.offload_param_device != "nvme":
        return
    written = integer(zero.stage3_prefetch_bucket_size)
    if written:
        yield report(
            "zero_optimization.stage3_prefetch_bucket_size",
            written,
            "DeepSpeed 0.19.8 fails when it fetches parameters ahead from NVMe",
            f'write 0, or "{AUTO}"',
        )
