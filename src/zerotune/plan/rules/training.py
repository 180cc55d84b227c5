"""Rules on batch sizes, clipping and precision."""

from __future__ import annotations

from operator import attrgetter

from zerotune.errors import (
    REMOVAL,
    UNSET,
    PlanConflictError,
    PlanError,
    writes,
)
from zerotune.plan.resolve.batch import ACCUMULATION, CLIPPING
from zerotune.plan.resolve.case import Case
from zerotune.plan.rules.rule import Findings, Rule, rule, set_twice
from zerotune.plan.section import value_at
from zerotune.plan.values import AUTO


@rule("batch-triple", "error", only_deepspeed=False)
def batch_triple(case: Case, this: Rule) -> Findings:
    """The train batch size must equal micro batch size x accumulation steps x world size.

    Set only two of the three numbers, or change one so that the product is correct for the world
    size.
    """
    try:
        _ = case.batch
    except PlanConflictError as error:
        yield this.refused(error)


@rule(
    "accumulation-set-twice",
    "warning",
    reason="{key} is also set, to {first}, and takes precedence",
    edits=(REMOVAL,),
    only_deepspeed=False,
    when=attrgetter("plan.launch"),
)
def accumulation_twice(case: Case, this: Rule) -> Findings:
    """Gradient accumulation is set both inside and outside the DeepSpeed block."""
    return set_twice(case, this, ACCUMULATION, (f"launch.{ACCUMULATION}",))


@rule(
    "world-size",
    "warning",
    reason="the launcher's file requests {asked} processes, but the plan and its batch sizes are "
    "for {world_size}",
    fix="start {asked} processes, or write {world_size} for num_processes",
    only_deepspeed=False,
    when=attrgetter("plan.launch"),
)
def world_size(case: Case, this: Rule) -> Findings:
    """The number of processes in the launcher's file differs from the world size of the plan."""
    asked = value_at(case.plan, "launch.num_processes", None)
    ranks = case.context.world_size
    # accelerate writes -1 for "as many as there are devices".
    if asked is not None and asked > 0 and asked != ranks:
        edits = ({"world_size": asked}, *writes(ranks))
        key = "launch.num_processes"
        yield this.finding(key, asked, edits=edits, asked=asked, world_size=ranks)


@rule(
    "clipping-set-twice",
    "warning",
    reason="{key} is also set, to {first}, and takes precedence",
    edits=(REMOVAL,),
    only_deepspeed=False,
)
def clipping_twice(case: Case, this: Rule) -> Findings:
    """Gradient clipping is set both inside and outside the DeepSpeed block."""
    return set_twice(case, this, CLIPPING, ("launch.gradient_clipping",))


@rule(
    "clipping-in-optimizer",
    "error",
    reason="clipping is not an argument of the optimizer in DeepSpeed",
    fix="move it to gradient_clipping at the top level",
    only_deepspeed=False,
)
def clipping_in_the_optimizer(case: Case, this: Rule) -> Findings:
    """DeepSpeed rejects ``max_grad_norm`` among the arguments of the optimizer."""
    key = "optimizer.params.max_grad_norm"
    written = value_at(case.plan, key)
    if written is not UNSET:
        edits = ({"": UNSET, "gradient_clipping": written},)
        yield this.finding(key, written, edits=edits)


# -- Rules on bf16, fp16 and the precisions of the platform.


@rule("precision-conflict", "error", only_deepspeed=False)
def precision_conflict(case: Case, this: Rule) -> Findings:
    """Only one of bf16 and fp16 may be enabled, and the launcher's file must not contradict it.

    Disable one of the two precisions, and set the launcher's ``mixed_precision`` to the other.
    """
    plan = case.plan
    written = {name: value_at(plan, f"{name}.enabled", None) for name in ("bf16", "fp16")}
    if all(enabled is True for enabled in written.values()):
        yield this.finding(
            "fp16.enabled",
            True,
            reason="bf16.enabled is true too, but DeepSpeed accepts only one precision",
            fix="set fp16.enabled or bf16.enabled to false; bf16 needs no loss scaling",
            edits=({"fp16.enabled": False}, {"bf16.enabled": False}),
        )
        return
    asked = [name for name, enabled in written.items() if enabled is True]
    key, launched = "launch.mixed_precision", value_at(plan, "launch.mixed_precision", None)
    if launched == "fp8":
        reason = "zerotune does not train in fp8"
        edits = writes(*asked) or writes("bf16", "fp16", "no")
        yield this.finding(key, launched, reason=reason, edits=edits)
    refused = launched in written and written[launched] is False
    if launched in ("bf16", "fp16", "fp32") and (refused or (asked and asked != [launched])):
        says = f"{asked[0]}.enabled = true" if asked else f"{launched}.enabled = false"
        yield this.finding(
            key,
            launched,
            reason=f"contradicts {says} in the DeepSpeed configuration",
            fix="set both to the same precision, or remove mixed_precision from the launcher's "
            "file",
            edits=(REMOVAL,),
        )


@rule("precision-unsupported", "error", only_deepspeed=False)
def precision_unsupported(case: Case, this: Rule) -> Findings:
    """The platform does not support the requested precision.

    Request a supported precision, or write ``"auto"``. The rule applies only if the
    platform is known.
    """
    plan = case.plan
    both = all(section and section.enabled is True for section in (plan.bf16, plan.fp16))
    # Another rule reports contradictory settings.
    if (
        case.context.platform is None
        or both
        or value_at(plan, "launch.mixed_precision", None) == "fp8"
    ):
        return
    try:
        _ = case.precision
    except PlanError as error:
        yield this.refused(error)


@rule(
    "bf16-emulated",
    "note",
    reason="this CPU has no bf16 arithmetic (AVX512_BF16, AMX), and emulated bf16 is many times "
    "slower than fp32",
    fix='set bf16.enabled to false or "auto", unless this run tests a bf16 configuration',
    edits=({"bf16.enabled": False}, {"bf16.enabled": AUTO}),
    only_deepspeed=False,
)
def bf16_emulated(case: Case, this: Rule) -> Findings:
    """A CPU without bf16 arithmetic emulates bf16, which is slow."""
    here = case.context.platform
    if here is not None and here.bf16 and not here.native_bf16 and case.plan.precision == "bf16":
        yield this.finding("bf16.enabled", True)
