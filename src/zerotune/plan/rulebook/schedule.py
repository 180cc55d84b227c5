"""Rules on the learning-rate schedule and the length of the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from zerotune.plan.rulebook.common import Findings, number
from zerotune.plan.rules import Report, RuleContext, rule

if TYPE_CHECKING:
    from zerotune.plan.deepspeed_plan import DeepSpeedPlan

_PARAMS: Final = "scheduler.params"
_CYCLE_DEFAULT: Final = 2000
"""``cycle_first_step_size`` of DeepSpeed's ``OneCycle``."""


def _params(plan: DeepSpeedPlan) -> Mapping[str, Any]:
    return (plan.scheduler.params if plan.scheduler else None) or {}


def _name(plan: DeepSpeedPlan) -> str:
    name = plan.scheduler.type if plan.scheduler else None
    return (name or "").lower()


@rule("scheduler-no-warmup", "warning", only_deepspeed=False, recorded_elsewhere=True)
def no_warmup(plan: DeepSpeedPlan, _context: RuleContext, report: Report) -> Findings:
    """DeepSpeed refuses a warm-up of 0 steps ("must be a positive integer").

    Leave ``warmup_num_steps`` out, or write 1. ``OptimizerResolver`` writes 1 and starts at the
    peak.
    """
    steps = number(_params(plan).get("warmup_num_steps"))
    if steps is not None and steps < 1:
        yield report(
            f"{_PARAMS}.warmup_num_steps",
            _params(plan)["warmup_num_steps"],
            "DeepSpeed's warm-up must be a positive number of steps",
            "write 1, which is its shortest",
        )


@rule("scheduler-warmup-too-long", "warning", only_deepspeed=False)
def warmup_too_long(plan: DeepSpeedPlan, context: RuleContext, report: Report) -> Findings:
    """The warm-up is as long as the schedule or the run, so the peak is never reached.

    Shorten the warm-up; steps are optimizer steps, not micro batches.
    """
    warmup = number(_params(plan).get("warmup_num_steps"))
    total = number(_params(plan).get("total_num_steps"))
    if warmup is None or warmup < 1:
        return
    for end, what in ((total, "total_num_steps"), (context.run.total_steps, "the run's steps")):
        if end is not None and warmup >= end:
            yield report(
                f"{_PARAMS}.warmup_num_steps",
                _params(plan)["warmup_num_steps"],
                f"the warm-up ends at or after the last of {what} ({end:g}), so the learning rate"
                " never reaches its peak",
                "write fewer warm-up steps; they are optimizer steps, not micro batches",
            )
            return


@rule("scheduler-total", "warning", only_deepspeed=False)
def scheduler_total(plan: DeepSpeedPlan, context: RuleContext, report: Report) -> Findings:
    """``total_num_steps`` differs from the optimizer steps of the run.

    Write the number of optimizer steps, or ``"auto"``: a shorter schedule trains on at its end
    value (0 for ``WarmupDecayLR``), a longer one never comes down.
    """
    total, run = number(_params(plan).get("total_num_steps")), context.run.total_steps
    if total is None or run is None or total == run:
        return
    end = "0" if _name(plan) == "warmupdecaylr" else "its smallest value"
    effect = (
        f"the learning rate stays at {end} for the last {run - total:g} steps"
        if total < run
        else f"the run ends {total - run:g} steps before the learning rate has come down"
    )
    yield report(
        f"{_PARAMS}.total_num_steps",
        _params(plan)["total_num_steps"],
        f"the run takes {run} optimizer steps, so {effect}{_confused_with(total, run, context)}",
        f'write {run}, or "auto"',
    )


def _confused_with(total: float, run: int, context: RuleContext) -> str:
    accumulation = context.run.gradient_accumulation_steps or 1
    for factor, what in ((accumulation, "micro batches"), (context.world_size, "ranks times")):
        if factor > 1 and total == run * factor:
            return f" (it seems to count {what} steps: {factor} x {run})"
    return ""


@rule("scheduler-cycle", "warning", only_deepspeed=False)
def scheduler_cycle(plan: DeepSpeedPlan, context: RuleContext, report: Report) -> Findings:
    """A ``OneCycle`` longer than the run never comes down.

    Make ``cycle_first_step_size`` plus ``cycle_second_step_size`` (as long as the first when it
    is not written) at most the optimizer steps of the run.
    """
    run = context.run.total_steps
    if _name(plan) != "onecycle" or run is None:
        return
    written = _params(plan).get("cycle_first_step_size")
    first = _CYCLE_DEFAULT if written is None else number(written)
    second = _params(plan).get("cycle_second_step_size")
    down = first if second is None else number(second)
    if first is not None and down is not None and first + down > run:
        yield report(
            f"{_PARAMS}.cycle_first_step_size",
            written,
            f"the cycle takes {first:g} + {down:g} steps and the run {run}, so the learning rate"
            " does not come down again",
            f"write at most {max(1, run // 2)}",
        )


@rule("scheduler-range-test", "note", only_deepspeed=False)
def range_test(plan: DeepSpeedPlan, _context: RuleContext, report: Report) -> Findings:
    """``LRRangeTest`` raises the learning rate without end, to find one; it trains nothing.

    Read a learning rate off its losses, and train with another schedule.
    """
    if _name(plan) == "lrrangetest":
        yield report(
            "scheduler.type",
            plan.scheduler.type if plan.scheduler else None,
            "it raises the learning rate until training diverges, which shows the largest usable"
            " one",
            'write "WarmupLR", "WarmupDecayLR" or "WarmupCosineLR" to train',
        )
