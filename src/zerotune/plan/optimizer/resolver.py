"""``OptimizerResolver`` chooses the optimizer and the schedule before anything is loaded.

The resolver fills in the arguments, and then chooses the class that performs the update. Every
change is recorded with its reason. The schedule depends on the optimizer and counts optimizer
steps.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import attrs

from zerotune._util.table import page_of
from zerotune.decisions import announce
from zerotune.errors import UnresolvedPlanError
from zerotune.plan.context import Context
from zerotune.plan.optimizer.capability import Capability, Situation, capability_of
from zerotune.plan.optimizer.catalogue import OPTIMIZERS
from zerotune.plan.optimizer.choose import BY_CHOICE, Chosen, choose, require_startable
from zerotune.plan.optimizer.curves import ScheduleCurve, plot_curve, schedule_curve
from zerotune.plan.optimizer.groups import ParameterGroups
from zerotune.plan.optimizer.names import normalise_optimizer_name
from zerotune.plan.settings import Settings
from zerotune.platform.facts import Platform

if TYPE_CHECKING:
    from zerotune.plan.resolved import Resolved

ResolvedT = TypeVar("ResolvedT", bound="Resolved")


@attrs.frozen(kw_only=True)
class OptimizerResolver:
    """Chooses the optimizer and the schedule of a plan.

    ``DeepSpeedPlan.resolve`` accepts a resolver, and ``resolve`` chooses both anew for a resolved
    plan. Every automatic choice is recorded as a ``Decision``. An optimizer that is unknown or
    cannot run is an error that names the closest alternative.
    """

    groups: ParameterGroups | None = None
    """Parameter groups; ``None`` gives all parameters the same arguments."""

    def choose(
        self, plan: Settings, context: Context, precision: str, *, by_weight: bool
    ) -> Chosen:
        """Choose the optimizer and the schedule of a plan.

        Args:
            plan: The plan with every key set.
            context: Machine, model and run.
            precision: ``"bf16"``, ``"fp16"`` or ``"fp32"``.
            by_weight: Whether the update on the device passes one weight at a time.
        """
        return choose(
            plan,
            Situation.of(plan, context, precision, by_weight=by_weight),
            run=context.run,
            model=context.model,
            groups=self.groups,
        )

    def resolve(self, resolved: ResolvedT) -> ResolvedT:
        """Return a plan with optimizer and schedule chosen anew, and log their decisions.

        Args:
            resolved: The plan; its ``optimizer`` and ``scheduler`` sections, run facts, platform,
                stage, offload and precision are read.

        Raises:
            UnresolvedPlanError: The plan is not resolved.
            OptimizerError: The name is unknown, or the optimizer cannot run here, or the model or
                the run's length is needed but unknown.
            MissingDependencyError: The optimizer's package is not installed.
            UnknownKeyError: An argument is unknown.
            InvalidValueError: An argument has the wrong type or is out of range.
        """
        if isinstance(resolved, Settings):
            raise UnresolvedPlanError(
                "is not resolved yet", "call plan.resolve(resolver=…) instead", "resolved"
            )
        by_weight = resolved.update is not None
        chosen = self.choose(
            resolved.plan, resolved.context, resolved.precision, by_weight=by_weight
        )
        require_startable(chosen.optimizer, chosen.scheduler)
        announce(chosen.decisions)
        return resolved.with_choice(chosen)

    @staticmethod
    def explain(resolved: Resolved) -> str:
        """Describe how optimizer and schedule of a plan were chosen: classes, arguments, decisions.

        Args:
            resolved: The plan.
        """
        decisions = tuple(one for one in resolved.decisions if one.rule == BY_CHOICE)
        chosen = Chosen(
            optimizer=resolved.optimizer, scheduler=resolved.scheduler, decisions=decisions
        )
        return page_of(chosen).text()

    def schedule_curve(self, resolved: Resolved, *, steps: int | None = None) -> ScheduleCurve:
        """Return the learning rate of every optimizer step, without training.

        Args:
            resolved: The plan.
            steps: Number of steps; by default the run's ``total_steps``, or 1000 if it is unknown.

        Raises:
            OptimizerError: As in ``resolve``.
        """
        chosen = self.resolve(resolved)
        count = steps or resolved.run.total_steps or 1000
        return schedule_curve(chosen.optimizer, chosen.scheduler, count)

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

    @staticmethod
    def capability(
        name: str,
        *,
        stage: int = 0,
        offload: str = "none",
        precision: str = "fp32",
        uses_deepspeed: bool = True,
        platform: Platform | None = None,
    ) -> Capability:
        """Return whether an optimizer can run with the given stage, offload and precision.

        Args:
            name: Any spelling accepted by ``normalise_optimizer_name``.
            stage: ZeRO stage.
            offload: Location of the optimizer states: ``"none"``, ``"cpu"``, ``"nvme"``.
            precision: ``"bf16"``, ``"fp16"`` or ``"fp32"``.
            uses_deepspeed: ``False`` selects the plain engine.
            platform: The machine; by default a CPU with all optional packages.

        Raises:
            OptimizerError: The name is unknown.
        """
        situation = Situation(
            uses_deepspeed=uses_deepspeed, stage=stage, offload=offload, precision=precision
        )
        if platform is not None:
            situation = attrs.evolve(
                situation,
                accelerator=platform.deepspeed.accelerator or platform.accelerator,
            )
        return capability_of(OPTIMIZERS[normalise_optimizer_name(name)], situation)
