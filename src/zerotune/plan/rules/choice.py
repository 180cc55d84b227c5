"""Rules on the optimizer and the learning-rate schedule."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any, Final

from zerotune._util.text import as_number, is_integer
from zerotune.errors import (
    writes,
)
from zerotune.plan.optimizer.catalogue import ONE_BIT
from zerotune.plan.optimizer.names import entry_of
from zerotune.plan.optimizer.schedules import canonical_schedule
from zerotune.plan.resolve.case import Case
from zerotune.plan.rules.rule import (
    Findings,
    Rule,
    is_from_file,
    number,
    rule,
)
from zerotune.plan.section import value_at
from zerotune.plan.settings import Settings
from zerotune.plan.values import AUTO


@rule(
    "optimizer-spelling",
    "warning",
    reason="DeepSpeed rejects this spelling, which zerotune reads as {name}",
    fix='write "{name}"',
    resolved_elsewhere=True,
    refused_elsewhere=True,
)
def optimizer_spelling(case: Case, this: Rule) -> Findings:
    """DeepSpeed does not know a spelling such as ``adamw_torch`` of an optimizer that it has.

    It knows its own optimizers in any case, and the class names of ``torch.optim``.
    """
    plan = case.plan
    written, name = plan.optimizer.type if plan.optimizer else None, plan.optimizer_name
    if written is None or name is None or name in ONE_BIT:
        return
    family = entry_of(name).family
    same = written.lower() == name.lower() if family == "deepspeed" else written == name
    if family in ("deepspeed", "torch") and not same:
        yield this.finding("optimizer.type", written, edits=writes(name), name=name)


@rule(
    "optimizer-lr-unset",
    "warning",
    reason="DeepSpeed's default learning rate for {name} is 0.001, but zerotune's is {lr}{decay}",
    fix="write {lr}, or 0.001 to train as DeepSpeed does",
    resolved_elsewhere=True,
)
def optimizer_lr_unset(case: Case, this: Rule) -> Findings:
    """Without ``lr``, Adam and AdamW train with another learning rate than in DeepSpeed.

    Without any argument, the weight decay of AdamW differs too. Plans made in code have no finding.
    """
    params = value_at(case.plan, "optimizer.params", None) or {}
    name = case.plan.optimizer_name if is_from_file(case.plan) and case.plan.optimizer else None
    if name in ("Adam", "AdamW") and "lr" not in params and case.context.run.lr is None:
        defaults = {each.name: each.default for each in entry_of(name).parameters}
        lr, decay = defaults["lr"], defaults["weight_decay"]
        more = "" if params or not decay else f", with a weight decay of {decay:g} instead of 0"
        words = {"name": name, "lr": f"{lr:g}", "decay": more}
        yield this.finding("optimizer.params.lr", None, edits=writes(lr, 1e-3), **words)


# -- Rules on the learning-rate schedule and the length of the run.


def schedule_params(plan: Settings) -> Mapping[str, Any]:
    """Return the arguments of the schedule as written."""
    return (plan.scheduler.params if plan.scheduler else None) or {}


def schedule_name(plan: Settings) -> str | None:
    """Return the canonical name of the schedule; ``None`` if it is unset or unknown."""
    name = plan.scheduler.type if plan.scheduler else None
    return canonical_schedule(name) if name else None


@rule(
    "scheduler-warmup-too-long",
    "warning",
    reason="the warm-up is not shorter than {what} ({end}), so the learning rate never reaches its "
    "peak",
    fix="write fewer warm-up steps, such as {tenth}; count optimizer steps, not micro batches",
    only_deepspeed=False,
    when=attrgetter("plan.scheduler"),
)
def warmup_too_long(case: Case, this: Rule) -> Findings:
    """The warm-up is at least as long as the schedule or the run."""
    params = schedule_params(case.plan)
    warmup = number(params.get("warmup_num_steps"))
    ends = {
        "total_num_steps": number(params.get("total_num_steps")),
        "the run's steps": case.context.run.total_steps,
    }
    for what, end in ends.items():
        if warmup is not None and warmup >= 1 and end is not None and warmup >= end:
            key, written = "scheduler.params.warmup_num_steps", params["warmup_num_steps"]
            tenth = max(1, int(end // 10))
            edits, end_text = writes(tenth), f"{end:g}"
            yield this.finding(key, written, edits=edits, what=what, end=end_text, tenth=tenth)
            return


@rule(
    "scheduler-total",
    "warning",
    reason="the run has {run_steps} optimizer steps, so {effect}",
    fix='write {run_steps}, or "auto"',
    only_deepspeed=False,
    when=attrgetter("plan.scheduler"),
)
def scheduler_total(case: Case, this: Rule) -> Findings:
    """``total_num_steps`` differs from the number of optimizer steps in the run.

    A shorter schedule continues with its final learning rate (0 for ``WarmupDecayLR``). A longer
    schedule never reaches its final learning rate.
    """
    params, run = schedule_params(case.plan), case.context.run.total_steps
    total = number(params.get("total_num_steps"))
    if total is None or run is None or total == run:
        return
    end = "0" if schedule_name(case.plan) == "WarmupDecayLR" else "its smallest value"
    effect = (
        f"the learning rate stays at {end} for the last {run - total:g} steps"
        if total < run
        else f"the run ends {total - run:g} steps before the learning rate reaches its final value"
    )
    key = "scheduler.params.total_num_steps"
    edits = writes(run, AUTO)
    yield this.finding(key, params["total_num_steps"], edits=edits, run_steps=run, effect=effect)


_DECAY_PEAK: Final = 1e-3
"""Default ``warmup_max_lr`` of DeepSpeed's ``WarmupDecayLR``."""


@rule(
    "scheduler-peak-unset",
    "warning",
    reason=f"DeepSpeed's WarmupDecayLR peaks at {_DECAY_PEAK:g} if this key is missing, but "
    "zerotune's peaks at the optimizer's learning rate",
    fix=f"write {{lr}}, or {_DECAY_PEAK:g} to train as DeepSpeed does",
    resolved_elsewhere=True,
    when=attrgetter("plan.scheduler"),
)
def scheduler_peak_unset(case: Case, this: Rule) -> Findings:
    """Without ``warmup_max_lr``, ``WarmupDecayLR`` has another peak than in DeepSpeed.

    Plans made in code have no finding.
    """
    missing = is_from_file(case.plan) and "warmup_max_lr" not in schedule_params(case.plan)
    lr = number(value_at(case.plan, "optimizer.params.lr", None))
    if schedule_name(case.plan) == "WarmupDecayLR" and missing and lr != _DECAY_PEAK:
        shown = f'"{AUTO}"' if lr is None else f"{lr:g}"
        edits = writes(AUTO if lr is None else lr, _DECAY_PEAK)
        yield this.finding("scheduler.params.warmup_max_lr", None, edits=edits, lr=shown)


@rule(
    "scheduler-warmup-number",
    "warning",
    reason="DeepSpeed rejects a number of warm-up steps with a point, an exponent or quotes",
    fix="write {steps}",
    only_deepspeed=False,
    resolved_elsewhere=True,
    refused_elsewhere=True,
    when=attrgetter("plan.scheduler"),
)
def scheduler_warmup_number(case: Case, this: Rule) -> Findings:
    """DeepSpeed rejects a warm-up such as 1e3 or "100" ("must be a positive integer")."""
    written = schedule_params(case.plan).get("warmup_num_steps")
    steps = as_number(written)
    if steps is not None and not is_integer(written) and steps == int(steps):
        key = "scheduler.params.warmup_num_steps"
        yield this.finding(key, written, edits=writes(int(steps)), steps=int(steps))


@rule(
    "number-as-text",
    "note",
    reason="the value is a number in quotes, and is read as a number",
    fix="write {number}",
    only_deepspeed=False,
)
def number_as_text(case: Case, this: Rule) -> Findings:
    """An argument of the optimizer or the schedule is a number in quotes.

    Without zerotune, DeepSpeed treats the argument as text.
    """
    for name in ("optimizer", "scheduler"):
        for key, value in (value_at(case.plan, f"{name}.params", None) or {}).items():
            if isinstance(value, str) and as_number(value) is not None:
                edits = writes(as_number(value))
                path = f"{name}.params.{key}"
                yield this.finding(path, value, edits=edits, number=value.strip())
