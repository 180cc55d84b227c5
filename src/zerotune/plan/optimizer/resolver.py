"""``OptimizerResolver`` chooses the optimizer and the schedule before anything is loaded.

The resolver replaces an optimizer that cannot run, fills in the arguments, and then chooses the
class that performs the update. Every change is recorded with its reason. The schedule depends on
the optimizer and counts optimizer steps.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import attrs

from zerotune._util.table import Block, Line, Page, Table
from zerotune.decisions import announce, render_decisions
from zerotune.plan.optimizer.capability import Capability, Situation, capability_of
from zerotune.plan.optimizer.catalogue import OPTIMIZERS
from zerotune.plan.optimizer.choices import SchedulerChoice
from zerotune.plan.optimizer.choose import ChoiceOptions, Chosen, require_startable
from zerotune.plan.optimizer.curves import ScheduleCurve, lr_at, plot_curve, schedule_curve
from zerotune.plan.optimizer.groups import describe
from zerotune.plan.optimizer.names import normalise_optimizer_name
from zerotune.plan.optimizer.schedules import SCHEDULERS
from zerotune.plan.resolved import Resolved, chosen_for
from zerotune.platform.facts import Platform

ResolvedT = TypeVar("ResolvedT", bound=Resolved)


@attrs.frozen(kw_only=True)
class OptimizerResolution(Chosen):
    """Result of ``OptimizerResolver``, with the reason for each choice."""

    def explain(self) -> str:
        """Describe the optimizer, the schedule at a few steps, and every decision, as text."""
        optimizer, scheduler = self.optimizer, self.scheduler
        builder = _BUILDER.get(optimizer.source, f"of the package {optimizer.package}")
        decay = optimizer.weight_decay_mode
        blocks: list[Block] = [
            Line(f"optimizer: {optimizer.name}, runs as {optimizer.implementation} ({builder})"),
            Line(f"on {self.situation}", indent=2),
            *([] if decay is None else [Line(f"weight decay: {_DECAY[decay]}", indent=2)]),
            Line(f"states per parameter: {', '.join(self.states) or 'none'}", indent=2),
            _arguments(optimizer.params),
        ]
        if optimizer.groups:
            blocks.append(Line("parameter groups, first match wins:"))
            blocks += [Line(describe(group), indent=2) for group in optimizer.groups]
        if scheduler is None:
            blocks.append(Line("scheduler: none, the learning rate stays constant"))
        else:
            summary = SCHEDULERS[scheduler.name].summary.lower()
            blocks.append(Line(f"scheduler: {scheduler.name}, {summary}"))
            blocks += [_arguments(scheduler.params), *_curve(scheduler, optimizer.lr)]
        if self.decisions:
            blocks += [Line("decisions:"), Line(render_decisions(self.decisions))]
        return Page(blocks=tuple(blocks)).text()


@attrs.frozen(kw_only=True)
class OptimizerResolver(ChoiceOptions):
    """Chooses the optimizer and the schedule for a resolved plan anew, with other options.

    ``DeepSpeedPlan.resolve`` chooses both by default, and accepts a resolver. Every automatic
    choice is recorded as a ``Decision``. Unknown optimizer names raise an error and never fall back
    to AdamW.
    """

    platform: Platform | None = None
    """Machine that ``capability`` assumes; ``resolve`` uses the plan's machine instead."""
    deepspeed_version: str | None = None
    """DeepSpeed release that ``capability`` assumes; by default the release in ``platform``."""

    def resolve(self, resolved: Resolved) -> OptimizerResolution:
        """Choose the optimizer and the schedule with all that a start needs.

        Args:
            resolved: The plan; its ``optimizer`` and ``scheduler`` sections, run facts, platform,
                stage, offload and precision are read.

        Raises:
            OptimizerError: The name is unknown, or the optimizer cannot run here and has no
                fallback, or the model or the run's length is needed but unknown.
            MissingDependencyError: The optimizer's package is not installed.
            UnknownKeyError: An argument is unknown.
            InvalidValueError: An argument has the wrong type or is out of range.
        """
        chosen = chosen_for(resolved, self)
        require_startable(chosen.optimizer, chosen.scheduler)
        return OptimizerResolution(**attrs.asdict(chosen, recurse=False))

    def apply(self, resolved: ResolvedT) -> ResolvedT:
        """Return the plan ``resolved`` with these choices, and log their decisions.

        Raises:
            OptimizerError: As in ``resolve``.
        """
        chosen = self.resolve(resolved)
        announce(chosen.decisions)
        return resolved.with_choice(chosen)

    def explain(self, resolved: Resolved) -> str:
        """Describe the optimizer and schedule for the plan ``resolved``, with reasons."""
        return self.resolve(resolved).explain()

    def schedule_curve(self, resolved: Resolved, *, steps: int | None = None) -> ScheduleCurve:
        """Return the learning rate of every optimizer step, without training.

        Args:
            resolved: The plan.
            steps: Number of steps; by default the run's ``total_steps``, or 1000 if it is unknown.

        Raises:
            OptimizerError: As in ``resolve``.
        """
        resolution = self.resolve(resolved)
        count = steps or resolved.run.total_steps or 1000
        return schedule_curve(resolution.optimizer, resolution.scheduler, count)

    def plot_schedule(
        self, resolved: Resolved, path: str | os.PathLike[str], *, steps: int | None = None
    ) -> Path:
        """Save a plot of ``schedule_curve`` as a PNG file. Requires the extra ``zerotune[plot]``.

        Args:
            resolved: The resolved plan.
            path: Path of the PNG file.
            steps: Number of steps; by default the run's ``total_steps``, or 1000 if it is unknown.

        Raises:
            MissingDependencyError: matplotlib is not installed.
            OptimizerError: As in ``resolve``.
        """
        return plot_curve(self.schedule_curve(resolved, steps=steps), path)

    def capability(
        self,
        name: str,
        *,
        stage: int = 0,
        offload: str = "none",
        precision: str = "fp32",
        uses_deepspeed: bool = True,
    ) -> Capability:
        """Return whether an optimizer can run with the given stage, offload and precision.

        Args:
            name: Any spelling accepted by ``normalise_optimizer_name``.
            stage: ZeRO stage.
            offload: Location of the optimizer states: ``"none"``, ``"cpu"``, ``"nvme"``.
            precision: ``"bf16"``, ``"fp16"`` or ``"fp32"``.
            uses_deepspeed: ``False`` selects the plain engine.

        Raises:
            OptimizerError: The name is unknown.
        """
        versions = dict(self.platform.versions) if self.platform is not None else {}
        if self.deepspeed_version is not None:
            versions["deepspeed"] = self.deepspeed_version
        accelerator = "cpu"
        if self.platform is not None:
            accelerator = self.platform.deepspeed.accelerator or self.platform.accelerator
        situation = Situation(
            uses_deepspeed=uses_deepspeed,
            stage=stage,
            offload=offload,
            precision=precision,
            accelerator=accelerator,
            versions=versions,
        )
        return capability_of(OPTIMIZERS[normalise_optimizer_name(name)], situation)


_BUILDER: Final = {
    "deepspeed": "built by DeepSpeed",
    "torch": "of torch.optim",
    "zerotune": "zerotune's own",
}

_DECAY: Final = {
    "decoupled": "decoupled from the gradient, as in AdamW",
    "l2": "L2, added to the gradient as in Adam",
}


def _arguments(params: Mapping[str, Any]) -> Table:
    return Table(rows=tuple((name, _value_text(value)) for name, value in params.items()))


def _value_text(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(_value_text(item) for item in value)
    return f"{value:g}" if isinstance(value, float) else str(value).lower()


def _curve(scheduler: SchedulerChoice, base_lr: float) -> tuple[Line, Table]:
    """Return a heading and a table of learning rates at the steps where the schedule turns."""
    params = scheduler.params
    warmup = params.get("warmup_num_steps", params.get("num_warmup_steps"))
    total = params.get("total_num_steps", params.get("num_training_steps"))
    steps = {0, 1, 2, 10, 100, 1000}
    steps |= {warmup + 1} if warmup is not None else set()
    steps = {step for step in steps if total is None or step < total}
    steps |= {total - 1} if total is not None else set()
    rows = tuple((str(step), f"{lr_at(scheduler, step, base_lr):.6g}") for step in sorted(steps))
    return (
        Line("learning rate by optimizer step (from 0)", indent=2),
        Table(rows=rows, align="r", indent=4),
    )
