"""The public plan: ``DeepSpeedPlan`` and what comes of it, the values with their verbs.

``zerotune.plan.model`` and its like hold the values; the modules between say what is done with
them. Here each verb becomes a method, and every method is one call. Whoever makes a value below
is told the class to make, so that nothing below knows these classes. What not every caller needs is
imported by its verb, so that ``zerotune plan check`` starts without it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
from typing_extensions import override

from zerotune._util.table import Page, Readable
from zerotune.decisions import announce
from zerotune.plan import advise, inspection, read, resolve
from zerotune.plan.memory.model import EMAPlace, EstimateValue, Workload
from zerotune.plan.model import (
    AUTO,
    Auto,
    Context,
    ModelFacts,
    PlanValue,
    ResolvedValue,
    RunFacts,
)
from zerotune.plan.rules import Finding, check_plan

if TYPE_CHECKING:
    from zerotune.errors import ZeroTuneError
    from zerotune.plan.advise import Preference
    from zerotune.plan.diff import PlanDifference
    from zerotune.plan.memory.rates import Rates
    from zerotune.plan.memory.time import StepTime
    from zerotune.plan.memory.traffic import SwapTraffic
    from zerotune.plan.write import SavedPlan
    from zerotune.platform import Platform


# -- What will run, and what it costs.


@attrs.frozen(kw_only=True, repr=False)
class ResolvedPlan(Readable, ResolvedValue):
    """What will run. Made by ``DeepSpeedPlan.resolve``; completed by ``with_choices``."""

    if TYPE_CHECKING:
        requested: DeepSpeedPlan
        plan: DeepSpeedPlan

    def estimate(self, workload: Workload) -> MemoryEstimate:
        """What training needs of the device, of host RAM and of NVMe, by component.

        Args:
            workload: Batch, resolution and what runs beside the optimizer.

        Raises:
            UnresolvedPlanError: The plan was resolved without a model.
        """
        from zerotune.plan.memory import estimate

        return estimate.estimate_resolved(self, workload, into=MemoryEstimate)

    def to_deepspeed(self) -> dict[str, Any]:
        """The configuration DeepSpeed receives; a fresh, deep copy.

        Raises:
            UnresolvedPlanError: Something is still ``"auto"``, a swap folder is missing, or the
                optimizer is not settled although DeepSpeed would build it.
        """
        return resolve.render(self)

    def digest(self) -> str:
        """SHA-256 (hex) of the rendered configuration and the world size.

        Swap folders are left out: they differ from run to run and change nothing that is
        trained.

        Raises:
            UnresolvedPlanError: As in ``to_deepspeed``, swap folders excepted.
        """
        import hashlib

        text = json.dumps(self.content(), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()

    def content(self) -> dict[str, Any]:
        """What is trained with: the rendered configuration, and what is settled outside of it.

        Raises:
            UnresolvedPlanError: As in ``digest``.
        """
        content: dict[str, Any] = {
            "config": resolve.render(self, folders=False),
            "world_size": self.world_size,
        }
        if self.optimizer is not None and self.optimizer.source != "deepspeed":
            content["optimizer"] = attrs.asdict(self.optimizer)
        elif self.optimizer is not None and self.optimizer.groups:
            content["groups"] = [attrs.asdict(group) for group in self.optimizer.groups]
        if self.scheduler is not None and self.scheduler.source != "deepspeed":
            content["scheduler"] = attrs.asdict(self.scheduler)
        return content

    @override
    def brief(self) -> str:
        """What will run, in one line."""
        from zerotune.plan import text

        return f"{text.describe(self)}; {len(self.decisions)} decisions"

    @override
    def page(self) -> Page:
        """What will run and why, as a report."""
        from zerotune.plan import text

        return text.resolved_page(self)

    def explain(self) -> str:
        """What will run and why, as text."""
        from zerotune.plan import text

        return text.resolved_page(self).text()

    def explain_markdown(self) -> str:
        """What will run, why, and what the rules have to say about it, as Markdown tables."""
        from zerotune.plan import text

        return text.resolved_markdown(self)

    def summary(self) -> dict[str, Any]:
        """What will run, as plain data."""
        from zerotune.plan import text

        return text.resolved_data(self)

    def diff(self, other: ResolvedPlan) -> PlanDifference:
        """What runs otherwise in ``other``; false when the same would be trained.

        The rendered configurations are compared, with their swap folders, and the engine, the
        world size, the optimizer and the schedule; reasons are not. Neither plan need be
        complete.

        Raises:
            InvalidValueError: ``other`` is not a ``ResolvedPlan``.
        """
        from zerotune.plan import diff

        return diff.diff_resolved(self, other)


@attrs.frozen(kw_only=True, repr=False)
class MemoryEstimate(Readable, EstimateValue):
    """What a resolved plan needs, per rank, by component. Made by ``DeepSpeedPlan.estimate``."""

    resolved_class: ClassVar[type[ResolvedValue]] = ResolvedPlan
    if TYPE_CHECKING:
        resolved: ResolvedPlan

    @property
    def swap_traffic(self) -> SwapTraffic:
        """What one optimizer step of one rank reads from and writes to swap files."""
        from zerotune.plan.memory import traffic

        return traffic.swap_traffic(self)

    def to_dict(self) -> dict[str, Any]:
        """The estimate as plain data that JSON can hold; every number in bytes per rank."""
        from zerotune.plan import text

        return text.estimate_data(self)

    @override
    def brief(self) -> str:
        """The peak of each place, in one line."""
        from zerotune.plan import text

        return text.describe_estimate(self)

    @override
    def page(self) -> Page:
        """One bar per place, then its components, as a report."""
        from zerotune.plan import text

        return text.estimate_page(self)

    def explain(self) -> str:
        """The estimate as text: one bar per place, then its components."""
        from zerotune.plan import text

        return text.estimate_page(self).text(text.WIDTH)

    def step_time(self, rates: Rates | None = None) -> StepTime | None:
        """What an optimizer step is predicted to take.

        Args:
            rates: How fast the machine is; as measured by ``zerotune doctor --rates``, or
                catalogued.

        Returns:
            ``None`` where the arithmetic of the model or the size of images is not known.
        """
        from zerotune.plan.memory.rates import known_rates
        from zerotune.plan.memory.time import step_time

        return step_time(self, rates or known_rates(self.resolved.platform))


# -- What is advised.


@attrs.frozen(kw_only=True, repr=False)
class Candidate(advise.CandidateValue):
    """One plan that was considered."""

    def __repr__(self) -> str:
        return f"<Candidate: {self.title}, {'fits' if self.fits else 'does not fit'}>"

    estimate_class: ClassVar[type[EstimateValue]] = MemoryEstimate
    if TYPE_CHECKING:
        plan: DeepSpeedPlan
        estimate: MemoryEstimate


@attrs.frozen(kw_only=True, repr=False)
class Advice(Readable, advise.AdviceValue):
    """The fastest plan that fits, by prediction. Made by ``DeepSpeedPlan.advise``."""

    candidate_class: ClassVar[type[advise.CandidateValue]] = Candidate
    if TYPE_CHECKING:
        chosen: Candidate
        candidates: tuple[Candidate, ...]
        plan: DeepSpeedPlan
        estimate: MemoryEstimate
        resolved: ResolvedPlan
        runners_up: tuple[Candidate, ...]
        rejected: tuple[Candidate, ...]

    @override
    def brief(self) -> str:
        """The choice, in one line."""
        from zerotune.plan import text

        return f"{text.describe(self.resolved)}; of {len(self.candidates)} candidates"

    @override
    def page(self) -> Page:
        """What was chosen and why, and the five candidates that tell most, as a report."""
        from zerotune.plan import text

        return text.advice_page(self, most=text.FOREMOST)

    def explain(self) -> str:
        """What was chosen and why, what is left, and why the others were not."""
        from zerotune.plan import text

        return text.advice_page(self).text(text.WIDTH)

    def explain_markdown(self) -> str:
        """The same as ``explain``, as Markdown."""
        from zerotune.plan import text

        return text.advice_page(self).markdown()

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data that JSON can hold; sizes in bytes."""
        from zerotune.plan import text

        return text.advice_data(self)


# -- What the user wants.


@attrs.frozen(kw_only=True, repr=False)
class DeepSpeedPlan(Readable, PlanValue):
    """A DeepSpeed configuration as a frozen value; may hold ``"auto"``.

    Attribute names are DeepSpeed's own top-level keys; ``None`` means "not written". Two plans
    are equal when they say the same, wherever they were read from.
    """

    @classmethod
    def from_dict(
        cls,
        config: Mapping[str, Any],
        *,
        source: str = "dict",
        also_known: Collection[str] = (),
        folder: Path | None = None,
    ) -> DeepSpeedPlan:
        """Read a DeepSpeed configuration, or a dict that holds one as ``deepspeed_config``.

        Args:
            config: The configuration, as ``json.load`` gives it.
            source: Name used in messages.
            also_known: Paths of further keys to pass through, for a DeepSpeed newer than the
                one zerotune knows (``"zero_optimization.new_key"``).
            folder: Where a relative path inside the configuration is looked up first.

        Raises:
            PlanError: Unknown key, wrong type, value out of range, contradicting spellings.
        """
        return read.plan_from_mapping(
            cls, config, source=source, also_known=also_known, folder=folder
        )

    @classmethod
    def from_json(
        cls, path_or_text: str | os.PathLike[str], *, also_known: Collection[str] = ()
    ) -> DeepSpeedPlan:
        """Read a JSON file, or JSON text (anything that starts with ``{``).

        Comments and trailing commas are accepted with a warning; other mistakes are errors with
        line and column. A trainer's file that holds ``deepspeed_config`` is unwrapped.

        Args:
            path_or_text: The file, or the text.
            also_known: As in ``from_dict``.

        Raises:
            PlanFileError: The file is missing or cannot be read.
            PlanSyntaxError: Not JSON.
            PlanError: As in ``from_dict``.
        """
        return read.plan_from_json(cls, path_or_text, also_known=also_known)

    @classmethod
    def from_yaml(
        cls, path: str | os.PathLike[str], *, also_known: Collection[str] = ()
    ) -> DeepSpeedPlan:
        """Read the YAML of ``accelerate config``, or one with DeepSpeed's own keys.

        Args:
            path: The file.
            also_known: As in ``from_dict``; ``"launch.new_key"`` for one of accelerate's.

        Raises:
            PlanFileError: The file, or the ``deepspeed_config_file`` it names, is missing.
            PlanSyntaxError: Not YAML.
            PlanError: As in ``from_dict``; also a file that does not use DeepSpeed.
        """
        return read.plan_from_yaml(cls, path, also_known=also_known)

    @classmethod
    def from_accelerate(
        cls,
        settings: Mapping[Any, Any],
        *,
        source: str = "dict",
        also_known: Collection[str] = (),
        folder: Path | None = None,
    ) -> DeepSpeedPlan:
        """Read the settings of ``accelerate config``, as its YAML file holds them.

        Args:
            settings: The settings.
            source: Name used in messages.
            also_known: As in ``from_yaml``.
            folder: Where a relative ``deepspeed_config_file`` is looked up first.

        Raises:
            PlanError: As in ``from_yaml``.
        """
        return read.plan_from_settings(
            cls, settings, source=source, also_known=also_known, folder=folder
        )

    @classmethod
    def from_accelerate_environment(
        cls, environ: Mapping[str, str] | None = None, *, also_known: Collection[str] = ()
    ) -> DeepSpeedPlan:
        """Read the variables that ``accelerate launch`` sets; accelerate itself is not needed.

        ``accelerate launch`` does not pass the paths of NVMe folders on: where one is missing, a
        warning is recorded.

        Args:
            environ: The variables; those of this process by default.
            also_known: As in ``from_dict``, for a file that they name.

        Raises:
            InvalidValueError: They do not ask for DeepSpeed.
            PlanError: As in ``from_yaml``.
        """
        return read.plan_from_environment(cls, environ, also_known=also_known)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, also_known: Collection[str] = ()
    ) -> DeepSpeedPlan:
        """Read a file by its suffix: YAML, ``.hjson`` with DeepSpeed's parser, else JSON.

        Args:
            path: The file.
            also_known: As in ``from_yaml``.

        Raises:
            PlanError: As in ``from_yaml`` and ``from_json``.
        """
        file = Path(path)
        yaml = file.suffix.lower() in (".yaml", ".yml")
        return (cls.from_yaml if yaml else cls.from_json)(file, also_known=also_known)

    def to_deepspeed(self) -> dict[str, Any]:
        """The configuration as written; may hold ``"auto"``. A fresh, deep copy."""
        return self.to_dict()

    def to_json(self, *, indent: int = 2) -> str:
        """The configuration as written, as JSON text."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    def to_yaml(self, *, lossy: Collection[str] = ()) -> str:
        """The YAML of ``accelerate config`` that says this plan.

        What had to be said in another way is logged; ``plan_document`` gives it as data.

        Args:
            lossy: Launch settings that may be lost where accelerate has no place for them.

        Raises:
            InvalidValueError: accelerate has no place for another one.
        """
        from zerotune.plan import write

        document = write.plan_document(self, "accelerate", lossy=lossy)
        announce(document.decisions)
        return document.text

    def to_python(self) -> str:
        """A Python expression equal to this plan, where ``DeepSpeedPlan`` is imported."""
        from zerotune.plan import write

        return write.python_expression(self)

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        format: str | None = None,  # noqa: A002
        lossy: Collection[str] = (),
    ) -> SavedPlan:
        """Write the plan to a file, which is whole or not there; what it replaces is kept.

        Args:
            path: The file. Its predecessor is kept beside it as ``….bak``.
            format: ``"deepspeed"``, ``"accelerate"``, ``"python"`` or ``"trainer"`` (a
                ``config.json`` with a ``deepspeed_config``: everything else of an existing file
                is kept, and the form in which it holds the configuration); by default from the
                suffix and from what the file holds.
            lossy: Launch settings that may be lost where the format has no place for them.

        Raises:
            InvalidValueError: The format has no place for a launch setting that ``lossy`` does
                not name; nothing is written.
            PlanFileError: The file cannot be written.
            PlanError: An existing file that must be kept in part cannot be read.
        """
        from zerotune.plan import write

        return write.save_plan(self, path, format=format, lossy=lossy)

    def normalised(self) -> DeepSpeedPlan:
        """The plan in canonical spelling, as reading gives it; what changes is recorded.

        Names of optimizers and schedulers stay as written, until ``zerotune.optim`` settles.
        """
        return read.normalised_plan(self)

    def with_overrides(
        self, overrides: Mapping[str, Any], *, also_known: Collection[str] = ()
    ) -> DeepSpeedPlan:
        """The plan with some settings changed, each change recorded as a decision.

        Args:
            overrides: By path (``"zero_optimization.stage"``), nested, or by the short names of
                ``zerotune.plan.read.SHORT_NAMES`` (``"zero_stage"``, ``"mixed_precision"``);
                ``None`` removes a setting.
            also_known: As in ``from_dict``.

        Raises:
            PlanError: As in ``from_dict``; also one setting given twice under two names.
        """
        return read.override_plan(self, overrides, also_known=also_known)

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
            scheduler: Name, or ``{"type": …, "params": {…}}``; ``None``: a constant rate, as in
                DeepSpeed; ``"auto"``: WarmupLR, as long as fits the run.
            **zero_overrides: Keys of ``zero_optimization``.

        Raises:
            PlanError: As in ``from_dict``.
        """
        config = read.build_config(
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

    def check(
        self,
        *,
        world_size: int = 1,
        platform: Platform | None = None,
        schema: Mapping[str, Any] | None = None,
    ) -> tuple[Finding, ...]:
        """Everything the rules have to say about this plan, errors first; raises nothing.

        Args:
            world_size: Number of ranks.
            platform: The machine; rules that need one are skipped without it.
            schema: What ``zerotune.plan_schema()`` says of the installed DeepSpeed, by which the
                sections that are passed through are judged; by default a copy on file.
        """
        context = Context(world_size=world_size, platform=platform, schema=schema)
        return check_plan(self, context)

    def resolve(
        self,
        *,
        platform: Platform | None = None,
        model: ModelFacts | None = None,
        world_size: int = 1,
        run: RunFacts | None = None,
        deepspeed: bool = True,
        host_step: bool = True,
        hidden: bool | None = None,
    ) -> ResolvedPlan:
        """Fill in everything automatic for one machine, model and world size.

        Args:
            platform: The machine; detected when not given.
            model: Shapes of the parameters; buffers are sized from them.
            world_size: Number of ranks.
            run: What the training script knows; fills ``"auto"`` and missing keys.
            deepspeed: ``False`` asks for the plain engine.
            host_step: ``False`` leaves Adam in host memory to DeepSpeed's own step.
            hidden: Whether Adam in host memory steps in a thread of its own, behind the next
                forward; where that gains something when not given. The bits are the same.

        Raises:
            PlanError: The plan cannot run like this; the message names key, reason and fix.
        """
        context = Context(
            world_size=world_size,
            platform=platform,
            model=model,
            run=run or RunFacts(),
            uses_deepspeed=deepspeed,
        )
        resolved = resolve.resolve(self, context, into=ResolvedPlan)
        return attrs.evolve(resolved, host_step=host_step, hidden_step=hidden)

    def inspect(
        self,
        context: Context,
        *,
        settle: Callable[[ResolvedPlan], ResolvedPlan],
        resolve_in: Context | None = None,
        mistakes: Collection[ZeroTuneError] = (),
    ) -> inspection.Inspection[ResolvedPlan]:
        """Everything that stops this plan or deserves a word, and what it becomes.

        ``check`` asks the rules alone. Here the plan is resolved as well, and its optimizer and
        schedule are settled; they are looked at also where a rule refuses something else.

        Args:
            context: Where the plan is to run, as the rules are to see it.
            settle: Settles optimizer and schedule, as ``OptimizerResolver().settled`` does.
            resolve_in: Where it is resolved, instead of ``context``: with a machine and a run
                that the rules are not to speak of.
            mistakes: What reading refused, where this plan is what is left without it: then
                only what is refused besides is told.
        """
        return inspection.inspect(
            self,
            context,
            settle=settle,
            resolve_in=resolve_in,
            into=ResolvedPlan,
            mistakes=mistakes,
        )

    @override
    def brief(self) -> str:
        """What is asked for, in one line."""
        from zerotune.plan import text

        return text.describe_plan(self)

    @override
    def page(self) -> Page:
        """What is asked for, and what the rules find, as a report."""
        from zerotune.plan import text

        return text.plan_page(self)

    def explain(self, *, world_size: int = 1, platform: Platform | None = None) -> str:
        """What this plan means and what the rules have to say about it, as text.

        Args:
            world_size: Number of ranks the rules are to think of.
            platform: The machine; rules that need one are skipped without it.
        """
        from zerotune.plan import text

        return text.plan_page(self, world_size=world_size, platform=platform).text()

    def explain_markdown(self, *, world_size: int = 1, platform: Platform | None = None) -> str:
        """The same as ``explain``, as Markdown tables."""
        from zerotune.plan import text

        return text.plan_page(self, world_size=world_size, platform=platform).markdown()

    def summary(self, *, world_size: int = 1, platform: Platform | None = None) -> dict[str, Any]:
        """The same as ``explain``, as plain data that JSON can hold."""
        from zerotune.plan import text

        return text.plan_data(self, world_size=world_size, platform=platform)

    def diff(self, other: DeepSpeedPlan) -> PlanDifference:
        """What ``other`` says otherwise; false when the plans are equal.

        Raises:
            InvalidValueError: ``other`` is not a ``DeepSpeedPlan``.
        """
        from zerotune.plan import diff

        return diff.diff_plans(self, other)

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
        frames: int | None = None,
        world_size: int = 1,
        precision: str = AUTO,
        gradient_accumulation_steps: int = 1,
        optimizer: str | Mapping[str, Any] = "AdamW",
        ema: EMAPlace = "none",
        frozen_bytes: int = 0,
        model_in_memory: bool = False,
        reserve: float = 0.05,
        platform: Platform | None = None,
        lora: int | None = None,
        base_dtype: str | None = None,
        rates: Rates | None = None,
        prefer: Preference = "fastest",
    ) -> Advice:
        """The fastest plan that fits, by prediction.

        Args:
            model: ``ModelFacts``, a module, or the name of a family (``"sdxl"``).
            vram: Memory of each device, in bytes or as ``"12GiB"``; this machine's by default.
            ram: RAM of each machine; this machine's by default.
            nvme: Disk space for swap files of each machine; none by default.
            batch: Samples per forward pass and rank.
            resolution: Side in pixels, or height and width; a family's own by default.
            frames: Of a clip, where the model takes clips; a family's own by default.
            world_size: Number of ranks, all on one machine.
            precision: ``"bf16"``, ``"fp16"``, ``"fp32"`` or ``"auto"``.
            gradient_accumulation_steps: Forward passes per optimizer step.
            optimizer: Name, or ``{"type": …, "params": {…}}``.
            ema: Where an ``EMAShadow`` lives.
            frozen_bytes: Bytes of frozen parts that stay on the device; each rank loads them whole.
            model_in_memory: Whether each rank holds the whole model in fp32 before it starts, and
                not in files (``load_pretrained(folder, plan=plan)``).
            reserve: Share of device and host memory to keep free.
            platform: The machine; CUDA when ``vram`` and ``ram`` are given, else this one.
            lora: Rank of adapters on the attention projections, trained in place of the model;
                for other layers pass ``facts.with_adapters(rank, targets=...)`` as the model.
            base_dtype: What the model beside the adapters is quantized to (``"nf4"``, ``"fp4"``,
                ``"int8"``, ``"fp8"``); the plan's precision when not given.
            rates: How fast it is; as measured by ``zerotune doctor --rates``, or catalogued.
            prefer: ``"least offload"``: with the lowest stage, whatever it takes; so it is also
                where the arithmetic of the model is not known.

        Raises:
            NothingFitsError: No plan fits; holds the nearest.
            PlanError: A size, family or option that does not exist.
        """
        plan = cls.build(
            precision=precision,
            gradient_accumulation_steps=gradient_accumulation_steps,
            optimizer=optimizer,
        )
        return advise.advise(
            plan,
            model,
            Context(world_size=world_size, platform=platform),
            vram=vram,
            ram=ram,
            nvme=nvme,
            batch=batch,
            resolution=resolution,
            frames=frames,
            ema=ema,
            frozen_bytes=frozen_bytes,
            model_in_memory=model_in_memory,
            reserve=reserve,
            lora=lora,
            base_dtype=base_dtype,
            rates=rates,
            prefer=prefer,
            into=Advice,
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
        frames: int | None = None,
        ema: EMAPlace = "none",
        gradient_checkpointing: bool = True,
        activation_offload: bool = False,
        frozen_bytes: int = 0,
        model_in_memory: bool = False,
        lora: int | None = None,
        base_dtype: str | None = None,
    ) -> MemoryEstimate:
        """What training needs of the device, of host RAM and of NVMe, by component.

        Args:
            model: ``ModelFacts``, a module, or the name of a family (``"sdxl"``).
            platform: The machine; detected when not given.
            world_size: Number of ranks.
            run: What the training script knows.
            batch: Samples per forward pass and rank, instead of the plan's.
            resolution: Side in pixels, or height and width; a family's own by default.
            frames: Of a clip, where the model takes clips; a family's own by default.
            ema: Where an ``EMAShadow`` lives: ``"none"``, ``"host"``, ``"device"``, ``"nvme"``.
            gradient_checkpointing: Whether blocks are recomputed in the backward pass.
            activation_offload: Whether their inputs wait in host memory (``ActivationOffload``).
            frozen_bytes: Bytes of frozen parts that stay on the device; each rank loads them whole.
            model_in_memory: Whether each rank holds the whole model in fp32 before it starts, and
                not in files (``load_pretrained(folder, plan=plan)``).
            lora: Rank of adapters, as in ``advise``.
            base_dtype: What the model beside them is quantized to, as in ``advise``.

        Raises:
            PlanError: As ``resolve``; also an unknown family or an impossible size.
        """
        from zerotune.plan.memory import estimate

        return estimate.estimate_plan(
            self,
            model,
            Context(world_size=world_size, platform=platform, run=run or RunFacts()),
            batch=batch,
            resolution=resolution,
            frames=frames,
            ema=ema,
            gradient_checkpointing=gradient_checkpointing,
            activation_offload=activation_offload,
            frozen_bytes=frozen_bytes,
            model_in_memory=model_in_memory,
            lora=lora,
            base_dtype=base_dtype,
            into=MemoryEstimate,
        )
