"""``ResolvedPlan``: nothing automatic left, tied to a platform, a world size and a model."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import attrs

from zerotune.decisions import Decision
from zerotune.errors import InvalidValueError, UnresolvedPlanError
from zerotune.plan.choices import OptimizerChoice, SchedulerChoice
from zerotune.plan.deepspeed_plan import DeepSpeedPlan
from zerotune.plan.facts import ModelFacts, RunFacts
from zerotune.plan.kinds import AUTO
from zerotune.plan.section import as_tuple, evolved
from zerotune.plan.sections import OffloadSection

if TYPE_CHECKING:
    from zerotune.plan.comparing import PlanDifference
    from zerotune.platform import Platform


@attrs.frozen(kw_only=True)
class ResolvedPlan:
    """What will run. Made by ``DeepSpeedPlan.resolve``; completed by ``with_choices``."""

    requested: DeepSpeedPlan
    """The plan as the user wrote it."""
    plan: DeepSpeedPlan
    """The same with every behaviour key explicit. Only the parameters of ``optimizer`` and
    ``scheduler`` may still be ``"auto"``: ``zerotune.optim`` reads them from here and calls
    ``with_choices``."""
    platform: Platform
    """The machine the plan was resolved for."""
    world_size: int
    """Number of ranks."""
    model: ModelFacts | None
    """The model whose shapes sized the buffers."""
    run: RunFacts
    """What the training script knew."""
    uses_deepspeed: bool
    """Whether DeepSpeed trains, or the plain engine."""
    precision: str
    """``"bf16"``, ``"fp16"`` or ``"fp32"``."""
    decisions: tuple[Decision, ...] = attrs.field(default=(), converter=as_tuple)
    """Every automatic choice, those of reading first."""
    optimizer: OptimizerChoice | None = None
    """What ``zerotune.optim`` settled on; ``None`` before ``with_choices``."""
    scheduler: SchedulerChoice | None = None
    """What ``zerotune.optim`` settled on; ``None``: none, or before ``with_choices``."""

    @property
    def stage(self) -> int:
        """ZeRO stage; 0 when the plain engine trains."""
        stage = self.plan.stage
        return int(stage) if self.uses_deepspeed else 0

    @property
    def offload_optimizer(self) -> str:
        """``"none"``, ``"cpu"`` or ``"nvme"``."""
        return self.plan.offload_optimizer_device

    @property
    def offload_param(self) -> str:
        """``"none"``, ``"cpu"`` or ``"nvme"``."""
        return self.plan.offload_param_device

    @property
    def micro_batch_size(self) -> int:
        """Samples per forward pass and rank."""
        return _integer(self.plan.train_micro_batch_size_per_gpu, "train_micro_batch_size_per_gpu")

    @property
    def gradient_accumulation_steps(self) -> int:
        """Forward passes per optimizer step."""
        return _integer(self.plan.gradient_accumulation_steps, "gradient_accumulation_steps")

    @property
    def train_batch_size(self) -> int:
        """Samples per optimizer step, all ranks together."""
        return _integer(self.plan.train_batch_size, "train_batch_size")

    @property
    def gradient_clipping(self) -> float:
        """Largest global L2 norm of the gradient; 0.0: off."""
        value = self.plan.gradient_clipping
        if value is None or isinstance(value, str):
            raise _unresolved("gradient_clipping", value)
        return float(value)

    @property
    def nvme_paths(self) -> dict[str, str | None]:
        """Folder of each part that swaps: keys ``"param"`` and ``"optimizer"``.

        A part that does not swap has no key; ``None`` means that no folder is set yet.
        """
        zero = self.plan.zero_optimization
        parts = {
            "param": zero.offload_param if zero else None,
            "optimizer": zero.offload_optimizer if zero else None,
        }
        return {
            part: None if section.nvme_path in (None, AUTO) else section.nvme_path
            for part, section in parts.items()
            if section is not None and section.device == "nvme"
        }

    def with_choices(
        self,
        optimizer: OptimizerChoice,
        scheduler: SchedulerChoice | None,
        decisions: Iterable[Decision] = (),
    ) -> ResolvedPlan:
        """This plan with the optimizer and scheduler settled.

        Args:
            optimizer: The optimizer that will run.
            scheduler: The schedule, ``None`` for a constant learning rate.
            decisions: Why; appended to the plan's own.
        """
        return attrs.evolve(
            self,
            optimizer=optimizer,
            scheduler=scheduler,
            decisions=(*self.decisions, *decisions),
        )

    def with_nvme_path(
        self,
        *,
        param: str | os.PathLike[str] | None = None,
        optimizer: str | os.PathLike[str] | None = None,
    ) -> ResolvedPlan:
        """This plan with the swap folders set.

        Args:
            param: Folder for parameters; ``None`` leaves it as it is.
            optimizer: Folder for optimizer states; ``None`` leaves it as it is.

        Raises:
            InvalidValueError: A folder for a part that does not swap.
        """
        given = {"param": param, "optimizer": optimizer}
        zero = self.plan.zero_optimization
        for part, folder in given.items():
            if folder is None:
                continue
            section: OffloadSection | None = getattr(zero, f"offload_{part}", None)
            if zero is None or section is None or section.device != "nvme":
                raise InvalidValueError(
                    "this part does not swap to NVMe in the resolved plan",
                    key=f"zero_optimization.offload_{part}.nvme_path",
                    value=os.fspath(folder),
                    fix=f'set offload_{part}.device to "nvme" at stage 3, or give no folder',
                )
            moved = attrs.evolve(section, nvme_path=os.fspath(folder))
            zero = evolved(zero, **{f"offload_{part}": moved})
        return attrs.evolve(self, plan=attrs.evolve(self.plan, zero_optimization=zero))

    def to_deepspeed(self) -> dict[str, Any]:
        """The configuration DeepSpeed receives; a fresh, deep copy.

        Raises:
            UnresolvedPlanError: Something is still ``"auto"``, a swap folder is missing, or the
                optimizer is not settled although DeepSpeed would build it.
        """
        from zerotune.plan.rendering import render

        return render(self)

    def digest(self) -> str:
        """SHA-256 (hex) of the rendered configuration and the world size.

        Swap folders are left out: they differ from run to run and change nothing that is
        trained.

        Raises:
            UnresolvedPlanError: As in ``to_deepspeed``, swap folders excepted.
        """
        import hashlib
        import json

        from zerotune.plan.rendering import render

        content: dict[str, Any] = {
            "config": render(self, folders=False),
            "world_size": self.world_size,
        }
        if self.optimizer is not None and self.optimizer.source != "deepspeed":
            content["optimizer"] = attrs.asdict(self.optimizer)
        elif self.optimizer is not None and self.optimizer.groups:
            content["groups"] = [attrs.asdict(group) for group in self.optimizer.groups]
        if self.scheduler is not None and self.scheduler.source != "deepspeed":
            content["scheduler"] = attrs.asdict(self.scheduler)
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()

    def explain(self) -> str:
        """What will run and why, as text."""
        from zerotune.plan.explaining import explain_resolved

        return explain_resolved(self)

    def explain_markdown(self) -> str:
        """What will run, why, and what the rules have to say about it, as Markdown tables."""
        from zerotune.plan.explaining_markdown import resolved_markdown

        return resolved_markdown(self)

    def summary(self) -> dict[str, Any]:
        """What will run, as plain data."""
        from zerotune.plan.explaining import summarise

        return summarise(self)

    def diff(self, other: ResolvedPlan) -> PlanDifference:
        """What runs otherwise in ``other``; false when the same would be trained.

        The rendered configurations are compared, with their swap folders, and the engine, the
        world size, the optimizer and the schedule; reasons are not. Neither plan need be
        complete.

        Raises:
            InvalidValueError: ``other`` is not a ``ResolvedPlan``.
        """
        from zerotune.plan.comparing import diff_resolved

        return diff_resolved(self, other)


def _integer(value: Any, key: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _unresolved(key, value)
    return value


def _unresolved(key: str, value: Any) -> UnresolvedPlanError:
    return UnresolvedPlanError(
        "is not resolved", key=key, value=value, fix="make the plan with DeepSpeedPlan.resolve"
    )
