"""``zerotune plan check``: everything that is wrong with a configuration, without a GPU."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, Final, Literal

import attrs

from zerotune.cli.planning import positive, print_json, print_text
from zerotune.errors import PlanFileError, PlanSyntaxError, ZeroTuneError

if TYPE_CHECKING:
    from zerotune.decisions import Decision
    from zerotune.plan import DeepSpeedPlan, Finding

NAME: Final = "check"
SUMMARY: Final = "Say what is wrong with a configuration; needs neither torch nor DeepSpeed."

_ORDER: Final = ("error", "warning", "note")
_ASSUMED_LR: Final = 1e-4
_ASSUMED_STEPS: Final = 10_000


@attrs.frozen(kw_only=True)
class Problem:
    """One line of the report."""

    severity: Literal["error", "warning", "note"]
    rule: str
    """Id of the rule, or ``"read"``, ``"resolve"``, ``"optimizer"``."""
    key: str | None
    text: str
    """Key, value, reason and fix in one sentence or two."""

    def __str__(self) -> str:
        return f"[{self.severity}] {self.rule}: {self.text}"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "file", metavar="FILE", help="DeepSpeed JSON, a trainer's config.json, or accelerate's YAML"
    )
    parser.add_argument(
        "--world-size", type=positive, default=1, metavar="N", help="processes that train together"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--strict", action="store_true", help="fail on warnings too")


def run(arguments: argparse.Namespace) -> int:
    """Check; 0 when nothing is wrong, 1 when something is, 2 for a file that cannot be read."""
    problems = sorted(
        problems_of(arguments.file, world_size=arguments.world_size),
        key=lambda problem: _ORDER.index(problem.severity),
    )
    counts = {name: sum(p.severity == name for p in problems) for name in _ORDER}
    if arguments.json:
        print_json(
            {
                "file": arguments.file,
                "world_size": arguments.world_size,
                **{f"{name}s": count for name, count in counts.items()},
                "findings": [attrs.asdict(problem) for problem in problems],
            }
        )
    else:
        summary = ", ".join(_counted(count, name) for name, count in counts.items() if count)
        head = f"{arguments.file}: {summary or 'nothing to report'}"
        ranks = _counted(arguments.world_size, "process", "processes")
        print_text("\n".join([f"{head} at {ranks}", *map(str, problems)]))
    failed = counts["error"] or (arguments.strict and counts["warning"])
    return 1 if failed else 0


def problems_of(file: str, *, world_size: int) -> list[Problem]:
    """Everything that is wrong with the plan in ``file``.

    Raises:
        PlanFileError: The file is missing or cannot be read.
        PlanSyntaxError: It is neither JSON nor YAML.
    """
    from zerotune.plan import DeepSpeedPlan

    try:
        plan = DeepSpeedPlan.load(file)
    except (PlanFileError, PlanSyntaxError):
        raise
    except ZeroTuneError as error:
        return [_from_error("read", error)]
    found = [_from_decision("read", decision) for decision in plan.decisions]
    findings = plan.check(world_size=world_size)
    found += [_from_finding(finding) for finding in findings]
    if not any(finding.severity == "error" for finding in findings):
        told = {problem.key for problem in found}
        found += [each for each in _resolved(plan, world_size) if each.key not in told]
    return found


def _resolved(plan: DeepSpeedPlan, world_size: int) -> list[Problem]:
    """What only resolution finds, on a machine that can do everything."""
    from zerotune.platform import Platform

    machine = Platform.synthetic("cuda", device_count=world_size)
    try:
        resolved = plan.resolve(platform=machine, world_size=world_size, run=_run(plan))
    except ZeroTuneError as error:
        return [_from_error("resolve", error)]
    if plan.optimizer is None and plan.scheduler is None:
        return []
    # A quarter of the command's time, so only where there is something to look at.
    from zerotune.optim.resolver import OptimizerResolver

    try:
        resolution = OptimizerResolver().resolve(resolved)
    except ZeroTuneError as error:
        return [_from_error("optimizer", error)]
    return [
        _from_decision("optimizer", decision)
        for decision in resolution.decisions
        if decision.severity == "warning"
    ]


def _run(plan: DeepSpeedPlan) -> Any:
    """A run that knows what the plan leaves to it, and says nothing else."""
    from zerotune.plan import AUTO, RunFacts

    optimizer = (plan.optimizer.params if plan.optimizer else None) or {}
    scheduler = (plan.scheduler.params if plan.scheduler else None) or {}
    automatic = AUTO in scheduler.values()
    return RunFacts(
        lr=_ASSUMED_LR if optimizer.get("lr", AUTO) == AUTO else None,
        total_steps=_ASSUMED_STEPS if automatic else None,
        warmup_steps=0 if automatic else None,
    )


def _from_finding(finding: Finding) -> Problem:
    return Problem(
        severity=finding.severity,
        rule=finding.rule,
        key=finding.key,
        text=str(finding.as_error()),
    )


def _from_error(rule: str, error: ZeroTuneError) -> Problem:
    return Problem(severity="error", rule=rule, key=error.key, text=str(error))


def _from_decision(rule: str, decision: Decision) -> Problem:
    return Problem(severity=decision.severity, rule=rule, key=decision.key, text=str(decision))


def _counted(count: int, name: str, plural: str | None = None) -> str:
    return f"{count} {name if count == 1 else plural or name + 's'}"
