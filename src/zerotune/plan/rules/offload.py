"""Rules on offload of the optimizer and the parameters, to host memory and to NVMe."""

from __future__ import annotations

from typing import Final

from zerotune._util.text import is_number
from zerotune.errors import (
    UNSET,
    writes,
)
from zerotune.plan.optimizer.names import entry_of
from zerotune.plan.resolve.case import Case
from zerotune.plan.resolve.sizes import (
    OPTIMIZER_BUFFERS,
    optimizer_buffers,
)
from zerotune.plan.rules.rule import (
    ON_CPU,
    RATIO,
    Findings,
    Rule,
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


# -- Rules on NVMe.

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
