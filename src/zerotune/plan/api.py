# ruff: noqa: RUF009  (`setting` and `extra_keys` return attrs.field, as RUF009 cannot see)
"""How a plan is read, written and changed: the methods every ``DeepSpeedPlan`` has for it."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, cast

import attrs

from zerotune.decisions import Decision
from zerotune.errors import InvalidValueError, UnresolvedPlanError
from zerotune.plan import model as known_keys
from zerotune.plan.model import (
    AUTO,
    AioSection,
    Auto,
    Bf16Section,
    Boolean,
    Fp16Section,
    Integer,
    LaunchSection,
    ModelFacts,
    Nested,
    Number,
    OffloadSection,
    OptimizerChoice,
    OptimizerSection,
    RunFacts,
    SchedulerChoice,
    SchedulerSection,
    Section,
    ZeroSection,
    as_tuple,
    evolved,
    extra_keys,
    legacy_zero,
    said,
    setting,
)

if TYPE_CHECKING:
    from zerotune.plan.advise import Advice
    from zerotune.plan.diff import PlanDifference
    from zerotune.plan.memory.model import EMAPlace, MemoryEstimate
    from zerotune.plan.rules import Finding
    from zerotune.plan.write import SavedPlan
    from zerotune.platform import Platform


class PlanFormats(Section):
    """Readers, writers and overrides of a plan; the work is done in the modules named inside."""

    __slots__ = ()

    @classmethod
    def from_dict(
        cls,
        config: Mapping[str, Any],
        *,
        source: str = "dict",
        also_known: Collection[str] = (),
    ) -> DeepSpeedPlan:
        """Read a DeepSpeed configuration, or a dict that holds one as ``deepspeed_config``.

        Args:
            config: The configuration, as ``json.load`` gives it.
            source: Name used in messages.
            also_known: Paths of further keys to pass through, for a DeepSpeed newer than the
                one zerotune knows (``"zero_optimization.new_key"``).

        Raises:
            PlanError: Unknown key, wrong type, value out of range, contradicting spellings.
        """
        from zerotune.plan.read import plan_from_mapping

        return plan_from_mapping(config, source=source, also_known=also_known)

    @classmethod
    def from_json(cls, path_or_text: str | os.PathLike[str]) -> DeepSpeedPlan:
        """Read a JSON file, or JSON text (anything that starts with ``{``).

        Comments and trailing commas are accepted with a warning; other mistakes are errors with
        line and column. A trainer's file that holds ``deepspeed_config`` is unwrapped.

        Raises:
            PlanFileError: The file is missing or cannot be read.
            PlanSyntaxError: Not JSON.
            PlanError: As in ``from_dict``.
        """
        from zerotune.plan.read import plan_from_json

        return plan_from_json(path_or_text)

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str]) -> DeepSpeedPlan:
        """Read the YAML of ``accelerate config``.

        Raises:
            PlanFileError: The file, or the ``deepspeed_config_file`` it names, is missing.
            PlanSyntaxError: Not YAML.
            PlanError: As in ``from_dict``; also a file that does not use DeepSpeed.
        """
        from zerotune.plan.accelerate import plan_from_yaml

        return plan_from_yaml(path)

    @classmethod
    def from_accelerate_environment(cls, environ: Mapping[str, str] | None = None) -> DeepSpeedPlan:
        """Read the variables that ``accelerate launch`` sets; accelerate itself is not needed.

        ``accelerate launch`` does not pass the paths of NVMe folders on: where one is missing, a
        warning is recorded.

        Args:
            environ: The variables; those of this process by default.

        Raises:
            InvalidValueError: They do not ask for DeepSpeed.
            PlanError: As in ``from_yaml``.
        """
        from zerotune.plan.accelerate import plan_from_environment

        return plan_from_environment(environ)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> DeepSpeedPlan:
        """Read a file by its suffix: ``.yaml`` and ``.yml`` as accelerate's, else JSON."""
        from pathlib import Path

        file = Path(path)
        yaml = file.suffix.lower() in (".yaml", ".yml")
        return cls.from_yaml(file) if yaml else cls.from_json(file)

    def to_deepspeed(self) -> dict[str, Any]:
        """The configuration as written; may hold ``"auto"``. A fresh, deep copy."""
        return self.to_dict()

    def to_json(self, *, indent: int = 2) -> str:
        """The configuration as written, as JSON text."""
        import json

        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    def to_yaml(self) -> str:
        """The YAML of ``accelerate config`` that says this plan.

        What had to be said in another way is logged; ``plan_document`` gives it as data.
        """
        from zerotune.decisions import announce
        from zerotune.plan.write import plan_document

        document = plan_document(self._plan, "accelerate")
        announce(document.decisions)
        return document.text

    def to_python(self) -> str:
        """A Python expression equal to this plan, given the names of ``zerotune.plan``."""
        from zerotune.plan.write import python_expression

        return python_expression(self._plan)

    def save(self, path: str | os.PathLike[str], *, format: str | None = None) -> SavedPlan:  # noqa: A002
        """Write the plan to a file, which is whole or not there; what it replaces is kept.

        Args:
            path: The file. Its predecessor is kept beside it as ``….bak``.
            format: ``"deepspeed"``, ``"accelerate"``, ``"python"`` or ``"trainer"`` (a
                ``config.json`` with a ``deepspeed_config``: everything else of an existing file
                is kept, and the form in which it holds the configuration); by default from the
                suffix and from what the file holds.

        Raises:
            PlanFileError: The file cannot be written.
            PlanError: An existing file that must be kept in part cannot be read.
        """
        from zerotune.plan.write import save_plan

        return save_plan(self._plan, path, format=format)

    def normalised(self) -> DeepSpeedPlan:
        """The plan in canonical spelling, as reading gives it; what changes is recorded.

        Names of optimizers and schedulers stay as written: only ``zerotune.optim`` knows them.
        """
        from zerotune.plan.model import normalised_plan

        return normalised_plan(self._plan)

    def with_overrides(self, overrides: Mapping[str, Any]) -> DeepSpeedPlan:
        """The plan with some settings changed, each change recorded as a decision.

        Args:
            overrides: By path (``"zero_optimization.stage"``), nested, or by the short names of
                ``zerotune.plan.read.SHORT_NAMES`` (``"zero_stage"``, ``"mixed_precision"``);
                ``None`` removes a setting.

        Raises:
            PlanError: As in ``from_dict``; also one setting given twice under two names.
        """
        from zerotune.plan.read import override_plan

        return override_plan(self._plan, overrides)

    @property
    def _plan(self) -> DeepSpeedPlan:
        # This class has one subclass, and is apart only because both together are too long.
        return cast("DeepSpeedPlan", self)


# -- ``DeepSpeedPlan``: what the user wants, as a value.


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
        from zerotune.plan.read import build_config

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
        from zerotune.plan.resolve import resolve

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
        from zerotune.plan.text import plan_page

        return plan_page(self, world_size=world_size, platform=platform).text()

    def explain_markdown(self, *, world_size: int = 1, platform: Platform | None = None) -> str:
        """The same as ``explain``, as Markdown tables."""
        from zerotune.plan.text import plan_page

        return plan_page(self, world_size=world_size, platform=platform).markdown()

    def summary(self, *, world_size: int = 1, platform: Platform | None = None) -> dict[str, Any]:
        """The same as ``explain``, as plain data that JSON can hold."""
        from zerotune.plan.text import plan_data

        return plan_data(self, world_size=world_size, platform=platform)

    def diff(self, other: DeepSpeedPlan) -> PlanDifference:
        """What ``other`` says otherwise; false when the plans are equal.

        Raises:
            InvalidValueError: ``other`` is not a ``DeepSpeedPlan``.
        """
        from zerotune.plan.diff import diff_plans

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
        from zerotune.plan.advise import advise

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
        from zerotune.plan.memory.estimate import estimate_plan

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


# -- ``ResolvedPlan``: nothing automatic left, tied to a platform, a world size and a model.


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
        from zerotune.plan.resolve import render

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

        from zerotune.plan.resolve import render

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
        from zerotune.plan.text import resolved_page

        return resolved_page(self).text()

    def explain_markdown(self) -> str:
        """What will run, why, and what the rules have to say about it, as Markdown tables."""
        from zerotune.plan.text import resolved_markdown

        return resolved_markdown(self)

    def summary(self) -> dict[str, Any]:
        """What will run, as plain data."""
        from zerotune.plan.text import resolved_data

        return resolved_data(self)

    def diff(self, other: ResolvedPlan) -> PlanDifference:
        """What runs otherwise in ``other``; false when the same would be trained.

        The rendered configurations are compared, with their swap folders, and the engine, the
        world size, the optimizer and the schedule; reasons are not. Neither plan need be
        complete.

        Raises:
            InvalidValueError: ``other`` is not a ``ResolvedPlan``.
        """
        from zerotune.plan.diff import diff_resolved

        return diff_resolved(self, other)


def _integer(value: Any, key: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _unresolved(key, value)
    return value


def _unresolved(key: str, value: Any) -> UnresolvedPlanError:
    return UnresolvedPlanError(
        "is not resolved", key=key, value=value, fix="make the plan with DeepSpeedPlan.resolve"
    )
