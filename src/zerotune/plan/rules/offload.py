"""Rules on offload of the optimizer and the parameters, to host memory and to NVMe."""

from __future__ import annotations

from typing import Final

from zerotune._util.text import format_size, is_number
from zerotune.errors import (
    REMOVAL,
    UNSET,
    writes,
)
from zerotune.plan.optimizer.names import entry_of
from zerotune.plan.resolve.batch import CLIPPING, clipping
from zerotune.plan.resolve.case import Case
from zerotune.plan.resolve.sizes import (
    OPTIMIZER_BUFFERS,
    SUB_GROUP_NVME,
    largest_sub_group,
    optimizer_buffers,
)
from zerotune.plan.rules.rule import (
    ON_CPU,
    OPTIMIZER,
    RATIO,
    STAGE,
    Findings,
    Rule,
    active,
    integer,
    offload_section,
    rule,
    swaps_optimizer,
    swaps_parameters,
)
from zerotune.plan.settings import Settings
from zerotune.plan.values import AUTO


@rule(
    "offload-without-device",
    "warning",
    reason='DeepSpeed reads a section without a device as "none", so nothing is offloaded',
    fix='write "cpu" (or "nvme" at stage 3), or remove the section',
)
def offload_without_device(case: Case, this: Rule) -> Findings:
    """An offload section without a device offloads nothing."""
    for part in ("optimizer", "param"):
        section = offload_section(case.plan, part)
        if section is not None and section.device in (None, AUTO):
            place = f"zero_optimization.offload_{part}"
            devices = ("cpu", "nvme") if case.plan.stage == 3 else ("cpu",)
            edits = (*writes(*devices), {place: UNSET})
            yield this.finding(f"{place}.device", section.device, after="none", edits=edits)


@rule(
    "partial-offload-optimizer",
    "error",
    reason="DeepSpeed supports a ratio below 1 only for AdamW in host memory, not {what}",
    edits=({RATIO: 1.0}, {"optimizer.type": "AdamW", **ON_CPU}),
)
def partial_offload_optimizer(case: Case, this: Rule) -> Findings:
    """An offload ratio below 1 works only with AdamW in host memory.

    torch's AdamW updates the part that stays on the device, and supports neither L2 regularisation
    nor states in bf16.
    """
    plan, section = case.plan, offload_section(case.plan, "optimizer")
    ratio = section.ratio if section is not None else None
    if section is None or plan.stage != 3 or not is_number(ratio) or float(ratio or 0) == 1:
        return
    name = plan.optimizer_name or (plan.optimizer and plan.optimizer.type)
    if section.device == "nvme" or name != "AdamW":
        what = "on NVMe" if section.device == "nvme" else f"for {name}"
        yield this.finding(RATIO, ratio, what=what)


_SUPER_OFFLOAD: Final = f"{OPTIMIZER}.super_offload"


@rule("super-offload", "warning")
def super_offload(case: Case, this: Rule) -> Findings:
    """SuperOffload needs stage 3, and runs without overlap if gradients are clipped.

    Remove ``super_offload``, or set ``gradient_clipping`` to 0 if training is stable without
    clipping.
    """
    stage = case.plan.stage
    if not _super_offloads(case.plan) or not isinstance(stage, int):
        return
    if stage != 3:
        yield this.finding(
            _SUPER_OFFLOAD,
            True,
            reason=f"SuperOffload needs stage 3; DeepSpeed ignores it at stage {stage}",
            edits=({STAGE: 3}, REMOVAL),
        )
    elif clipping(case.plan, case.context.run).norm != 0:
        yield this.finding(
            _SUPER_OFFLOAD,
            True,
            reason="SuperOffload overlaps CPU updates with the backward pass only without gradient "
            "clipping; with clipping, sub-groups are updated one by one after the backward pass",
            edits=(REMOVAL, {CLIPPING: 0}),
        )


def _super_offloads(plan: Settings) -> bool:
    section = offload_section(plan, "optimizer")
    return section is not None and active(section) and section.extra.get("super_offload") is True


# -- Rules on NVMe.

_LARGE_POOL: Final = 4 * 1024**3
"""Minimum bytes of pinned swap buffers for a warning."""


_BUFFER_COUNT: Final = "zero_optimization.offload_optimizer.buffer_count"


def swap_buffers(plan: Settings) -> int | None:
    """Return ``buffer_count`` if it is set and an optimizer with two moments is swapped."""
    section = offload_section(plan, "optimizer")
    if section is None:
        return None
    two = entry_of(plan.optimizer_name).states_per_weight() >= 2
    return integer(section.buffer_count) if two else None


@rule(
    "nvme-path-unset",
    "note",
    reason="no folder is set, so each run creates a temporary folder below the swap root",
    fix="write the path to a folder on a fast disk",
)
def nvme_path_unset(case: Case, this: Rule) -> Findings:
    """No folder is set for NVMe offload; without zerotune, DeepSpeed fails at startup."""
    for part in ("optimizer", "param"):
        section = offload_section(case.plan, part)
        launched = getattr(case.plan.launch, f"offload_{part}_path", None)
        if section is None or section.device != "nvme" or case.plan.stage != 3 or launched:
            continue
        if section.nvme_path in (None, AUTO):
            yield this.finding(f"zero_optimization.offload_{part}.nvme_path", section.nvme_path)


@rule(
    "nvme-optimizer-buffers",
    "error",
    reason="DeepSpeed requires one buffer each for the weight, the gradient and the two moments",
    fix=f'write at least {OPTIMIZER_BUFFERS}, or "{AUTO}"',
    edits=writes(OPTIMIZER_BUFFERS, AUTO),
    when=swaps_optimizer,
)
def nvme_optimizer_buffers(case: Case, this: Rule) -> Findings:
    """The swap pool of an optimizer with two moments needs at least four buffers."""
    written = swap_buffers(case.plan)
    if written is not None and written < OPTIMIZER_BUFFERS:
        yield this.finding(_BUFFER_COUNT, written)


@rule(
    "nvme-pipeline-buffers",
    "warning",
    reason="DeepSpeed runs out of swap buffers if there is more than one sub-group",
    fix=f'write at least {{need}}, or "{AUTO}"',
    when=swaps_optimizer,
)
def nvme_pipeline_buffers(case: Case, this: Rule) -> Findings:
    """Pipelined swapping needs four extra buffers to read ahead, and another four to write back.

    The pool needs 8 buffers with either ``pipeline_read`` or ``pipeline_write``, and 12 with both.
    """
    section, written = offload_section(case.plan, "optimizer"), swap_buffers(case.plan)
    if section is None or written is None:
        return
    need = optimizer_buffers(section)
    if OPTIMIZER_BUFFERS <= written < need:
        yield this.finding(_BUFFER_COUNT, written, need=need, edits=writes(need, AUTO))


@rule(
    "nvme-sub-group-size",
    "warning",
    reason="the swap pool has {buffers} buffers, each as large as the largest sub-group in fp32, "
    "and uses {pool} of host memory on each rank",
    edits=writes(SUB_GROUP_NVME, AUTO),
    when=swaps_optimizer,
)
def nvme_sub_group_size(case: Case, this: Rule) -> Findings:
    """NVMe swap buffers use host memory: 4 bytes x buffers x elements of the largest sub-group.

    With DeepSpeed's default of 1e9 elements and four buffers, a model of 1e9 parameters needs 15
    GiB.
    """
    plan, model = case.plan, case.context.model
    zero, section = plan.zero_optimization, offload_section(plan, "optimizer")
    if zero is None or section is None:
        return
    size = integer(zero.sub_group_size)
    if size is None:
        return
    buffers = integer(section.buffer_count) or optimizer_buffers(section)
    largest = largest_sub_group(model, max(1, case.context.world_size), size) if model else size
    pool = buffers * largest * 4
    if pool >= _LARGE_POOL:
        key = "zero_optimization.sub_group_size"
        yield this.finding(key, size, buffers=buffers, pool=format_size(pool))


@rule(
    "nvme-param-buffers",
    "warning",
    reason="with gradient checkpointing, {gathered} weights of a recomputed block are gathered at "
    "once, and each needs a swap buffer",
    fix=f'write at least {{need}}, or "{AUTO}"',
    when=swaps_parameters,
)
def nvme_param_buffers(case: Case, this: Rule) -> Findings:
    """A recomputed block needs one swap buffer for each of its parameters on NVMe.

    With fewer buffers, the first backward pass with gradient checkpointing fails.
    """
    section, swapping = offload_section(case.plan, "param"), case.swapping
    zero = case.plan.zero_optimization
    if zero is None or section is None or swapping is None:
        return
    written, gathered = integer(section.buffer_count), swapping.gathered(recomputed=True)
    if written and written < gathered and case.swaps_parameters(zero):
        key = "zero_optimization.offload_param.buffer_count"
        need = swapping.buffers
        edits = writes(need, AUTO)
        yield this.finding(key, written, edits=edits, gathered=gathered, need=need)
