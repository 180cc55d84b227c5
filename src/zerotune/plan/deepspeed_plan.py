# ruff: noqa: RUF009  (`setting` and `extra_keys` return attrs.field, as RUF009 cannot see)
"""``DeepSpeedPlan``: what the user wants, as a value."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import attrs

from zerotune.decisions import Decision
from zerotune.plan import known_keys
from zerotune.plan.facts import ModelFacts, RunFacts
from zerotune.plan.formats import PlanFormats
from zerotune.plan.kinds import AUTO, Auto, Boolean, Integer, Number
from zerotune.plan.normalising import legacy_zero
from zerotune.plan.section import Nested, Section, as_tuple, extra_keys, said, setting
from zerotune.plan.sections import (
    AioSection,
    Bf16Section,
    Fp16Section,
    LaunchSection,
    OptimizerSection,
    SchedulerSection,
    ZeroSection,
)

if TYPE_CHECKING:
    from zerotune.plan.advising.values import Advice
    from zerotune.plan.comparing import PlanDifference
    from zerotune.plan.memory.values import MemoryEstimate
    from zerotune.plan.memory.workload import EMAPlace
    from zerotune.plan.resolved import ResolvedPlan
    from zerotune.plan.rules import Finding
    from zerotune.platform import Platform


def _check_launch(_instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if value is not None:
        Nested(LaunchSection).check(value, attribute.name)


def _launch_said(launch: LaunchSection | None) -> Section | None:
    """What of a launch section matters for "says the same": not the name of a file."""
    if launch is not None:
        launch = attrs.evolve(launch, distributed_type=None, deepspeed_config_file=None)
    return said(launch)


@attrs.frozen(kw_only=True)
class DeepSpeedPlan(PlanFormats):
    """A DeepSpeed configuration as a frozen value; may hold ``"auto"``.

    Attribute names are DeepSpeed's own top-level keys; ``None`` means "not written". Two plans
    are equal when they say the same, wherever they were read from.
    """

    passed_through: ClassVar[frozenset[str]] = known_keys.TOP_LEVEL | known_keys.REMOVED.keys()
    aliases: ClassVar[Mapping[str, str]] = {"bfloat16": "bf16"}

    train_batch_size: int | Auto | None = setting(Integer(minimum=1))
    """Samples per optimizer step, all ranks together."""
    train_micro_batch_size_per_gpu: int | Auto | None = setting(Integer(minimum=1))
    """Samples per forward pass and rank."""
    gradient_accumulation_steps: int | Auto | None = setting(Integer(minimum=1))
    """Forward passes per optimizer step."""
    gradient_clipping: float | Auto | None = setting(Number())
    """Largest global L2 norm of the gradient; 0: off."""
    zero_optimization: ZeroSection | None = setting(Nested(ZeroSection, before=legacy_zero))
    bf16: Bf16Section | None = setting(Nested(Bf16Section))
    fp16: Fp16Section | None = setting(Nested(Fp16Section))
    optimizer: OptimizerSection | None = setting(Nested(OptimizerSection))
    scheduler: SchedulerSection | None = setting(Nested(SchedulerSection))
    aio: AioSection | None = setting(Nested(AioSection))
    zero_allow_untested_optimizer: bool | Auto | None = setting(Boolean())
    """Let ZeRO run an optimizer DeepSpeed has not tested."""
    zero_force_ds_cpu_optimizer: bool | Auto | None = setting(Boolean())
    """Refuse other optimizers than DeepSpeed's own when offloading."""
    steps_per_print: int | Auto | None = setting(Integer(minimum=1))
    """Steps between DeepSpeed's own progress lines."""
    wall_clock_breakdown: bool | Auto | None = setting(Boolean())
    """Log the time of forward, backward and step."""
    extra: Mapping[str, Any] = extra_keys()

    launch: LaunchSection | None = attrs.field(
        default=None, validator=_check_launch, eq=_launch_said
    )
    """What a launcher's or trainer's file adds; never sent to DeepSpeed."""
    decisions: tuple[Decision, ...] = attrs.field(default=(), converter=as_tuple, eq=False)
    """What reading changed, and why."""
    source: str = attrs.field(default="code", eq=False)
    """Where the plan came from: a file name, ``"dict"`` or ``"code"``."""

    @classmethod
    def build(
        cls,
        *,
        stage: int | Auto = 2,
        offload: str = "none",
        offload_param: str = "none",
        nvme_path: str | os.PathLike[str] | None = None,
        precision: str = AUTO,
        train_batch_size: int | Auto | None = None,
        micro_batch_size: int | Auto | None = 1,
        gradient_accumulation_steps: int | Auto | None = 1,
        gradient_clipping: float | Auto = 1.0,
        optimizer: str | Mapping[str, Any] | None = "AdamW",
        scheduler: str | Mapping[str, Any] | None = None,
        **zero_overrides: Any,
    ) -> DeepSpeedPlan:
        """Build a plan from the few things that matter.

        Args:
            stage: ZeRO stage, 0 to 3.
            offload: Where the optimizer lives: ``"none"``, ``"cpu"`` or ``"nvme"``.
            offload_param: Where parameters wait, stage 3 only.
            nvme_path: Folder for swap files; ``None``: a leased folder.
            precision: ``"bf16"``, ``"fp16"``, ``"fp32"`` or ``"auto"``.
            train_batch_size: Samples per optimizer step, all ranks.
            micro_batch_size: Samples per forward pass and rank.
            gradient_accumulation_steps: Forward passes per optimizer step.
            gradient_clipping: Largest gradient norm; 0 switches clipping off.
            optimizer: Name, or ``{"type": …, "params": {…}}``.
            scheduler: Name, or ``{"type": …, "params": {…}}``.
            **zero_overrides: Keys of ``zero_optimization``.

        Raises:
            PlanError: As in ``from_dict``.
        """
        from zerotune.plan.building import build_config

        config = build_config(
            stage=stage,
            offload_optimizer=offload,
            offload_param=offload_param,
            nvme_path=nvme_path,
            precision=precision,
            batch=(train_batch_size, micro_batch_size, gradient_accumulation_steps),
            gradient_clipping=gradient_clipping,
            optimizer=optimizer,
            scheduler=scheduler,
            zero_overrides=zero_overrides,
        )
        return cls.from_dict(config, source="code")

    @property
    def stage(self) -> int | Auto:
        """ZeRO stage as written; 0 when nothing is written."""
        zero = self.zero_optimization
        return 0 if zero is None or zero.stage is None else zero.stage

    @property
    def precision(self) -> str:
        """``"bf16"``, ``"fp16"``, ``"fp32"`` or ``"auto"``, as written."""
        bf16 = self.bf16.enabled if self.bf16 else None
        fp16 = self.fp16.enabled if self.fp16 else None
        if bf16 is True:
            return "bf16"
        if fp16 is True:
            return "fp16"
        launched = self.launch.mixed_precision if self.launch else None
        if AUTO in (bf16, fp16) or launched is not None:
            return launched or AUTO
        return "fp32"

    @property
    def offload_optimizer_device(self) -> str:
        """``"none"``, ``"cpu"`` or ``"nvme"``, as written."""
        zero = self.zero_optimization
        section = zero.offload_optimizer if zero else None
        return (section.device if section else None) or "none"

    @property
    def offload_param_device(self) -> str:
        """``"none"``, ``"cpu"`` or ``"nvme"``, as written."""
        zero = self.zero_optimization
        section = zero.offload_param if zero else None
        return (section.device if section else None) or "none"

    def check(
        self, *, world_size: int = 1, platform: Platform | None = None
    ) -> tuple[Finding, ...]:
        """Everything the rules have to say about this plan, errors first; raises nothing.

        Args:
            world_size: Number of ranks.
            platform: The machine; rules that need one are skipped without it.
        """
        from zerotune.plan.rules import RuleContext, check_plan

        return check_plan(self, RuleContext(world_size=world_size, platform=platform))

    def resolve(
        self,
        *,
        platform: Platform | None = None,
        model: ModelFacts | None = None,
        world_size: int = 1,
        run: RunFacts | None = None,
        deepspeed: bool = True,
    ) -> ResolvedPlan:
        """Fill in everything automatic for one machine, model and world size.

        Args:
            platform: The machine; detected when not given.
            model: Shapes of the parameters; buffers are sized from them.
            world_size: Number of ranks.
            run: What the training script knows; fills ``"auto"`` and missing keys.
            deepspeed: ``False`` asks for the plain engine.

        Raises:
            PlanError: The plan cannot run like this; the message names key, reason and fix.
        """
        from zerotune.plan.resolving import resolve

        return resolve(
            self,
            platform=platform,
            model=model,
            world_size=world_size,
            run=run,
            deepspeed=deepspeed,
        )

    def explain(self, *, world_size: int = 1, platform: Platform | None = None) -> str:
        """What this plan means and what the rules have to say about it, as text.

        Args:
            world_size: Number of ranks the rules are to think of.
            platform: The machine; rules that need one are skipped without it.
        """
        from zerotune.plan.explaining import explain_plan

        return explain_plan(self, world_size=world_size, platform=platform)

    def explain_markdown(self, *, world_size: int = 1, platform: Platform | None = None) -> str:
        """The same as ``explain``, as Markdown tables."""
        from zerotune.plan.explaining_markdown import plan_markdown

        return plan_markdown(self, world_size=world_size, platform=platform)

    def summary(self, *, world_size: int = 1, platform: Platform | None = None) -> dict[str, Any]:
        """The same as ``explain``, as plain data that JSON can hold."""
        from zerotune.plan.explaining import summarise_plan

        return summarise_plan(self, world_size=world_size, platform=platform)

    def diff(self, other: DeepSpeedPlan) -> PlanDifference:
        """What ``other`` says otherwise; false when the plans are equal.

        Raises:
            InvalidValueError: ``other`` is not a ``DeepSpeedPlan``.
        """
        from zerotune.plan.comparing import diff_plans

        return diff_plans(self, other)

    @classmethod
    def advise(
        cls,
        model: ModelFacts | str | Any,
        *,
        vram: int | str | None = None,
        ram: int | str | None = None,
        nvme: int | str = 0,
        batch: int = 1,
        resolution: int | tuple[int, int] | None = None,
        world_size: int = 1,
        precision: str = AUTO,
        gradient_accumulation_steps: int = 1,
        optimizer: str | Mapping[str, Any] = "AdamW",
        ema: EMAPlace = "none",
        frozen_bytes: int = 0,
        reserve: float = 0.05,
        platform: Platform | None = None,
    ) -> Advice:
        """The plan with the least offload and the lowest stage that fits.

        Args:
            model: ``ModelFacts``, a module, or the name of a family (``"sdxl"``).
            vram: Memory of each device, in bytes or as ``"12GiB"``; this machine's by default.
            ram: RAM of each machine; this machine's by default.
            nvme: Disk space for swap files of each machine; none by default.
            batch: Samples per forward pass and rank.
            resolution: Side in pixels, or height and width; a family's own by default.
            world_size: Number of ranks, all on one machine.
            precision: ``"bf16"``, ``"fp16"``, ``"fp32"`` or ``"auto"``.
            gradient_accumulation_steps: Forward passes per optimizer step.
            optimizer: Name, or ``{"type": …, "params": {…}}``.
            ema: Where an ``EMAShadow`` lives.
            frozen_bytes: Bytes of frozen parts that stay on the device.
            reserve: Share of device and host memory to keep free.
            platform: The machine; CUDA when ``vram`` and ``ram`` are given, else this one.

        Raises:
            NothingFitsError: No plan fits; holds the nearest.
            PlanError: A size, family or option that does not exist.
        """
        from zerotune.plan.advising.choosing import advise

        return advise(
            model,
            vram=vram,
            ram=ram,
            nvme=nvme,
            batch=batch,
            resolution=resolution,
            world_size=world_size,
            ema=ema,
            frozen_bytes=frozen_bytes,
            reserve=reserve,
            platform=platform,
            options={
                "precision": precision,
                "gradient_accumulation_steps": gradient_accumulation_steps,
                "optimizer": optimizer,
            },
        )

    def estimate(
        self,
        model: ModelFacts | str | Any,
        *,
        platform: Platform | None = None,
        world_size: int = 1,
        run: RunFacts | None = None,
        batch: int | None = None,
        resolution: int | tuple[int, int] | None = None,
        ema: EMAPlace = "none",
        gradient_checkpointing: bool = True,
        activation_offload: bool = False,
        frozen_bytes: int = 0,
    ) -> MemoryEstimate:
        """What training needs of the device, of host RAM and of NVMe, by component.

        Args:
            model: ``ModelFacts``, a module, or the name of a family (``"sdxl"``).
            platform: The machine; detected when not given.
            world_size: Number of ranks.
            run: What the training script knows.
            batch: Samples per forward pass and rank, instead of the plan's.
            resolution: Side in pixels, or height and width; a family's own by default.
            ema: Where an ``EMAShadow`` lives: ``"none"``, ``"host"``, ``"device"``, ``"nvme"``.
            gradient_checkpointing: Whether blocks are recomputed in the backward pass.
            activation_offload: Whether their inputs wait in host memory (``ActivationOffload``).
            frozen_bytes: Bytes of frozen parts that stay on the device.

        Raises:
            PlanError: As ``resolve``; also an unknown family or an impossible size.
        """
        from zerotune.plan.memory.estimating import estimate_plan

        return estimate_plan(
            self,
            model,
            platform=platform,
            world_size=world_size,
            run=run,
            batch=batch,
            resolution=resolution,
            ema=ema,
            gradient_checkpointing=gradient_checkpointing,
            activation_offload=activation_offload,
            frozen_bytes=frozen_bytes,
        )
