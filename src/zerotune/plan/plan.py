"""Plans and their verbs: what the user wants, what will run, and the memory that it needs.

The values are in the modules below. The classes here have no fields of their own.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import attrs

from zerotune._util.text import whole
from zerotune.decisions import Decision, Log, announce
from zerotune.errors import InvalidValueError, UnknownKeyError, ZeroTuneError
from zerotune.plan import advise, read, render, resolution, write
from zerotune.plan.advise import Advised
from zerotune.plan.context import (
    Context,
    DeviceUpdate,
    EngineName,
    RunFacts,
    Streaming,
    UpdateName,
)
from zerotune.plan.facts import ModelFacts
from zerotune.plan.families import as_facts
from zerotune.plan.memory import estimate
from zerotune.plan.memory.hosted import with_units_kept
from zerotune.plan.memory.items import EMAPlace, Estimate, Workload
from zerotune.plan.memory.rates import Rates, known_rates
from zerotune.plan.memory.time import StepTime, step_time
from zerotune.plan.memory.traffic import SwapTraffic, swap_traffic
from zerotune.plan.optimizer.names import parse_optimizer_name
from zerotune.plan.optimizer.resolver import OptimizerResolver
from zerotune.plan.resolution import Inspection
from zerotune.plan.resolved import Resolved
from zerotune.plan.rules.table import check_plan
from zerotune.plan.section import read_section
from zerotune.plan.sections import OFFLOAD_DEVICES, PRECISIONS
from zerotune.plan.settings import Settings
from zerotune.plan.text import advice as advice_text
from zerotune.plan.text import memory as memory_text
from zerotune.plan.text import plan as plan_text
from zerotune.plan.values import AUTO, Auto, Choice
from zerotune.plan.write import SavedPlan
from zerotune.platform.facts import Platform

_FacadeT = TypeVar("_FacadeT")


def raised(cls: type[_FacadeT], value: Any) -> _FacadeT:
    """Return ``value`` as an instance of ``cls``, its subclass with verbs and the same fields."""
    if isinstance(value, cls):
        return value
    return cls(**{field.name: getattr(value, field.name) for field in attrs.fields(type(value))})


@attrs.frozen(kw_only=True, repr=False)
class MemoryEstimate(Estimate):
    """Memory that a resolved plan needs per rank, by component; see ``DeepSpeedPlan.estimate``."""

    if TYPE_CHECKING:
        resolved: ResolvedPlan

    @property
    def swap_traffic(self) -> SwapTraffic:
        """Bytes that one rank reads from and writes to swap files in one optimizer step."""
        return swap_traffic(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the estimate as a JSON-serialisable dict, in bytes per rank."""
        return memory_text.estimate_data(self)

    def explain(self) -> str:
        """Describe peak device, host and NVMe memory and their components as text."""
        return self.page().text(memory_text.WIDTH)

    def step_time(self, rates: Rates | None = None) -> StepTime | None:
        """Predict the time of an optimizer step.

        Args:
            rates: Speeds of the machine; by default those that the recipe ``measure_rates.py``
                has stored, or else catalogued speeds.

        Returns:
            The time; ``None`` if the model's operation counts (``ModelFacts.arithmetic``) or the
            image size are unknown.
        """
        return step_time(self, rates or known_rates(self.resolved.platform))


@attrs.frozen(kw_only=True, repr=False)
class ResolvedPlan(Resolved):
    """A fully resolved plan, created by ``DeepSpeedPlan.resolve``."""

    estimated_as = MemoryEstimate

    if TYPE_CHECKING:
        requested: DeepSpeedPlan
        plan: DeepSpeedPlan

    def with_units_kept(self, workload: Workload, *, reserve: float = 0.05) -> ResolvedPlan:
        """Return this plan with as many streamed units kept on the device as fit.

        Args:
            workload: Batch size, resolution, and options that affect memory.
            reserve: Fraction of the device's memory to keep free.

        Raises:
            UnresolvedPlanError: The plan was resolved without a model.
        """
        vram = min((device.total_memory for device in self.platform.devices), default=0)
        usable = int(vram * (1 - reserve))
        return raised(ResolvedPlan, with_units_kept(self.estimate(workload), usable))

    def estimate(self, workload: Workload) -> MemoryEstimate:
        """Estimate device memory, host RAM and NVMe by component.

        Args:
            workload: Batch size, resolution, and options that affect memory.

        Raises:
            UnresolvedPlanError: The plan was resolved without a model.
        """
        return raised(MemoryEstimate, estimate.estimate_resolved(self, workload))

    def to_deepspeed(self) -> dict[str, Any]:
        """Return a deep copy of the configuration for DeepSpeed.

        Raises:
            UnresolvedPlanError: A swap folder is missing, or the schedule's length is not known.
        """
        return render.render(self)

    def digest(self) -> str:
        """Return the SHA-256 (hex) of the rendered configuration and the world size.

        Swap folders are excluded, because they do not affect training.

        Raises:
            UnresolvedPlanError: As in ``to_deepspeed``, except for swap folders.
        """
        text = json.dumps(self.content(), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()

    def content(self) -> dict[str, Any]:
        """Return the rendered configuration, and all settings outside it, as a dict.

        Raises:
            UnresolvedPlanError: As in ``digest``.
        """
        content: dict[str, Any] = {
            "config": render.render(self, folders=False),
            "world_size": self.world_size,
        }
        if self.optimizer.source != "deepspeed":
            content["optimizer"] = attrs.asdict(self.optimizer)
        elif self.optimizer.groups:
            content["groups"] = [attrs.asdict(group) for group in self.optimizer.groups]
        if self.scheduler is not None and self.scheduler.source != "deepspeed":
            content["scheduler"] = attrs.asdict(self.scheduler)
        return content

    def explain(self) -> str:
        """Describe what will run and why, as text."""
        return self.page().text()

    def summary(self) -> dict[str, Any]:
        """Return what will run as a JSON-serialisable dict."""
        return plan_text.resolved_data(self)


@attrs.frozen(kw_only=True, repr=False)
class DeepSpeedPlan(Settings):
    """A DeepSpeed configuration as an immutable value; may contain ``"auto"``.

    Attribute names are DeepSpeed's top-level keys; ``None`` means that a key is not set. Two plans
    with the same settings are equal, even if they come from different files.
    """

    resolved_as = ResolvedPlan

    @classmethod
    def from_dict(
        cls,
        config: Mapping[str, Any],
        *,
        source: str = "dict",
        also_known: Collection[str] = (),
        folder: Path | None = None,
    ) -> DeepSpeedPlan:
        """Read a DeepSpeed configuration, or a dict that contains it under ``deepspeed_config``.

        Args:
            config: The configuration, as returned by ``json.load``.
            source: Origin of the plan, for messages.
            also_known: Paths of additional keys to accept, such as
                ``"zero_optimization.new_key"`` of a newer DeepSpeed.
            folder: Base folder for relative paths in the configuration.

        Raises:
            PlanError: A key is unknown or set twice with different values, or a value has the wrong
                type or is out of range.
        """
        return raised(
            DeepSpeedPlan,
            read.read_whole(
                lambda log: read.plan_from_mapping(config, log, source=source, folder=folder),
                also_known=also_known,
            ),
        )

    @classmethod
    def from_json(
        cls, path_or_text: str | os.PathLike[str], *, also_known: Collection[str] = ()
    ) -> DeepSpeedPlan:
        """Read a JSON file, or JSON text that starts with ``{``.

        Comments and trailing commas are accepted with a warning; other syntax errors are reported
        with line and column. In a trainer's file, the value of ``deepspeed_config`` is read.

        Args:
            path_or_text: The file, or the text.
            also_known: As in ``from_dict``.

        Raises:
            PlanFileError: The file is missing or cannot be read.
            PlanSyntaxError: The file or text is not JSON.
            PlanError: As in ``from_dict``.
        """
        return raised(
            DeepSpeedPlan,
            read.read_whole(
                lambda log: read.plan_from_json(path_or_text, log), also_known=also_known
            ),
        )

    @classmethod
    def from_yaml(
        cls, path: str | os.PathLike[str], *, also_known: Collection[str] = ()
    ) -> DeepSpeedPlan:
        """Read a YAML file from ``accelerate config``, or a YAML file with DeepSpeed's keys.

        Args:
            path: The file.
            also_known: As in ``from_dict``; write a key of accelerate as ``"launch.new_key"``.

        Raises:
            PlanFileError: The file, or the ``deepspeed_config_file`` it names, is missing.
            PlanSyntaxError: The file is not YAML.
            PlanError: As in ``from_dict``, or the file does not configure DeepSpeed.
        """
        return raised(
            DeepSpeedPlan,
            read.read_whole(lambda log: read.plan_from_yaml(path, log), also_known=also_known),
        )

    @classmethod
    def from_accelerate(
        cls,
        settings: Mapping[Any, Any],
        *,
        source: str = "dict",
        also_known: Collection[str] = (),
        folder: Path | None = None,
    ) -> DeepSpeedPlan:
        """Read settings that have the structure of a YAML file from ``accelerate config``.

        Args:
            settings: The content of the YAML file as a mapping.
            source: Origin of the plan, for messages.
            also_known: As in ``from_yaml``.
            folder: Folder in which a relative ``deepspeed_config_file`` is looked up first.

        Raises:
            PlanError: As in ``from_yaml``.
        """
        return raised(
            DeepSpeedPlan,
            read.read_whole(
                lambda log: read.plan_from_settings(settings, log, source=source, folder=folder),
                also_known=also_known,
            ),
        )

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, also_known: Collection[str] = ()
    ) -> DeepSpeedPlan:
        """Read a file as YAML or JSON, depending on its suffix.

        Args:
            path: The file.
            also_known: As in ``from_yaml``.

        Raises:
            PlanError: As in ``from_yaml`` and ``from_json``.
        """
        return raised(
            DeepSpeedPlan,
            read.read_whole(lambda log: read.load_plan(path, log), also_known=also_known),
        )

    def to_yaml(self, *, lossy: Collection[str] = ()) -> str:
        """Return the plan as YAML text in the format of ``accelerate config``.

        Each changed spelling is logged; ``plan_document`` returns the changes as data.

        Args:
            lossy: Launch settings that may be dropped if accelerate does not support them.

        Raises:
            InvalidValueError: A launch setting is neither supported by accelerate nor named in
                ``lossy``.
        """
        document = write.plan_document(self, "accelerate", lossy=lossy)
        announce(document.decisions)
        return document.text

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        format: str | None = None,  # noqa: A002
        lossy: Collection[str] = (),
    ) -> SavedPlan:
        """Write the plan to a file atomically.

        Args:
            path: The file. An existing file is kept as ``….bak``.
            format: ``"deepspeed"`` or ``"accelerate"``; by default, the suffix determines the
                format.
            lossy: Launch settings that may be dropped if the format does not support them.

        Raises:
            InvalidValueError: A launch setting is neither supported by the format nor named in
                ``lossy``; nothing is written.
            PlanFileError: The file cannot be written, or contains a trainer's other settings.
        """
        return write.save_plan(self, path, format=format, lossy=lossy)

    def with_overrides(
        self, overrides: Mapping[str, Any], *, also_known: Collection[str] = ()
    ) -> DeepSpeedPlan:
        """Return the plan with changed settings, each recorded as a decision.

        Args:
            overrides: Settings by path (``"zero_optimization.stage"``), as nested mappings, or by
                short names such as ``"zero_stage"`` (``zerotune.plan.read.SHORT_NAMES``). ``None``
                removes a setting.
            also_known: As in ``from_dict``.

        Raises:
            PlanError: As in ``from_dict``, or a setting has different values under two names.
        """
        return raised(DeepSpeedPlan, read.override_plan(self, overrides, also_known=also_known))

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
        lr: float | Auto | None = None,
        scheduler: str | Mapping[str, Any] | None = None,
        **zero_overrides: Any,
    ) -> DeepSpeedPlan:
        """Build a plan from its main settings.

        Args:
            stage: ZeRO stage, 0 to 3.
            offload: Location of optimizer states and master weights: ``"none"``, ``"cpu"`` or
                ``"nvme"``.
            offload_param: Location of parameters: ``"none"``, ``"cpu"`` or ``"nvme"``; stage 3
                only.
            nvme_path: Folder for swap files; ``None`` creates a temporary folder for each run.
            precision: ``"bf16"``, ``"fp16"``, ``"fp32"`` or ``"auto"``.
            train_batch_size: Samples per optimizer step across all ranks.
            micro_batch_size: Samples per forward pass and rank.
            gradient_accumulation_steps: Forward passes per optimizer step.
            gradient_clipping: Maximum gradient norm; 0 disables clipping.
            optimizer: Optimizer as a name, or as ``{"type": …, "params": {…}}``.
            lr: Learning rate; by default the optimizer's default, which is recorded as a decision.
            scheduler: Schedule as a name, or as ``{"type": …, "params": {…}}``. ``None`` keeps the
                learning rate constant, as in DeepSpeed; ``"auto"`` uses WarmupLR with a warm-up
                length that suits the run.
            **zero_overrides: Additional keys of ``zero_optimization``.

        Raises:
            PlanError: As in ``from_dict``.
            OptimizerError: The name of the optimizer is unknown.
        """
        if "batch_size" in zero_overrides:
            raise UnknownKeyError(
                "is not an argument of build, which has one for each of two batch sizes",
                "write micro_batch_size for samples per forward pass and rank, or "
                "train_batch_size for samples per optimizer step",
                "batch_size",
                zero_overrides["batch_size"],
            )
        zero: dict[str, Any] = {"stage": stage}
        for key, device in (("offload_optimizer", offload), ("offload_param", offload_param)):
            Choice(choices=OFFLOAD_DEVICES).check(device, key)
            if device != "none":
                folder = os.fspath(nvme_path) if device == "nvme" and nvme_path else None
                zero[key] = {"device": device, **({"nvme_path": folder} if folder else {})}
        Choice(choices=(*PRECISIONS, AUTO)).check(precision, "precision")
        config = {
            "train_batch_size": train_batch_size,
            "train_micro_batch_size_per_gpu": micro_batch_size,
            "gradient_accumulation_steps": gradient_accumulation_steps,
            "gradient_clipping": gradient_clipping,
            "zero_optimization": {**zero, **zero_overrides},
            "bf16": {"enabled": AUTO if precision == AUTO else precision == "bf16"},
            "fp16": None if precision == AUTO else {"enabled": precision == "fp16"},
            "optimizer": _optimizer_config(optimizer, lr),
            "scheduler": {"type": scheduler} if isinstance(scheduler, str) else scheduler,
        }
        given = {key: value for key, value in config.items() if value is not None}
        log = Log()
        plan = log.whole(lambda: read_section(cls, given, key="", log=log))
        return attrs.evolve(plan, decisions=log.decisions)

    def check(
        self,
        *,
        world_size: int = 1,
        platform: Platform | None = None,
        schema: Mapping[str, Any] | None = None,
    ) -> tuple[Decision, ...]:
        """Return the findings of all rules about this plan, errors first, without raising them.

        Args:
            world_size: Number of ranks.
            platform: The machine; without it, rules that depend on the machine are skipped.
            schema: Schema of the sections that zerotune passes through; by default a stored copy,
                which ``zerotune schema`` prints.
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
        streamed: bool | Streaming | None = None,
        engine: EngineName | None = None,
        update: UpdateName | DeviceUpdate | None = None,
        resolver: OptimizerResolver | None = None,
    ) -> ResolvedPlan:
        """Resolve all automatic values for one machine, model and world size.

        Args:
            platform: The machine; detected by default.
            model: Shapes of the parameters, which determine buffer sizes.
            world_size: Number of ranks.
            run: Values from the training script, for ``"auto"`` and missing keys.
            deepspeed: ``False`` selects the plain engine.
            streamed: Whether to stream weights, that is, to keep them on the device only while they
                are used; ``True``, or ``Streaming`` options. Results are bitwise equal to those of
                ZeRO-2 with CPU offload. If streaming is not possible, DeepSpeed trains without it,
                and a decision gives the reason.
            engine: ``"host"`` runs an Adam in host memory in zerotune's host engine, with weights
                on the device or streamed, and ``"deepspeed"`` in DeepSpeed's. By default, the
                host engine runs where it can, on an accelerator only if ``zerotune doctor
                --prove`` has verified it. Results are bitwise equal to those of DeepSpeed's
                ZeRO-2. If the host engine cannot run the plan, DeepSpeed trains, and a decision
                gives the reason.
            update: Where the host engine updates weights: ``"host"`` (the default), or
                ``"device"``, by any optimizer whose states are per weight. ``"device:split"`` and
                ``"device:stochastic"`` name the ``masters`` of ``DeviceUpdate``, which is accepted
                too. If the host engine cannot run the plan, a decision gives the reason.
            resolver: How to choose the optimizer and the schedule.

        Raises:
            PlanError: The plan cannot run here; the message names key, reason and fix.
            OptimizerError: The optimizer or the schedule is unknown or cannot run here.
        """
        context = Context(
            world_size=world_size,
            platform=platform,
            model=model,
            run=run or RunFacts(),
            uses_deepspeed=deepspeed,
        )
        resolved = resolution.resolve(
            self,
            context,
            streamed=streamed,
            engine=engine,
            update=DeviceUpdate.of(update),
            resolver=resolver,
        )
        return raised(ResolvedPlan, resolved)

    def inspect(
        self,
        context: Context,
        *,
        resolve_in: Context | None = None,
        mistakes: Collection[ZeroTuneError] = (),
        update: UpdateName | DeviceUpdate | None = None,
    ) -> Inspection:
        """Return all findings about this plan, and the resolved plan.

        Unlike ``check``, ``inspect`` also resolves the plan; optimizer and schedule are checked
        even if a rule rejects another setting.

        Args:
            context: Context for the rules.
            resolve_in: Context for resolving the plan, if it contains a machine or run that the
                rules must ignore; by default ``context``.
            mistakes: Errors from reading the plan, which are not reported again.
            update: Where the host engine updates weights, as in ``resolve``.
        """
        return resolution.inspect(
            self, context, resolve_in=resolve_in, mistakes=mistakes, update=DeviceUpdate.of(update)
        )

    def explain(self, *, world_size: int = 1, platform: Platform | None = None) -> str:
        """Describe this plan and the findings of the rules as text.

        Args:
            world_size: Number of ranks for the rules.
            platform: The machine; without it, rules that depend on the machine are skipped.
        """
        return plan_text.plan_page(self.summary(world_size=world_size, platform=platform)).text()

    def summary(self, *, world_size: int = 1, platform: Platform | None = None) -> dict[str, Any]:
        """Return the content of ``explain`` as a JSON-serialisable dict.

        Args:
            world_size: Number of ranks for the rules.
            platform: The machine, as in ``explain``.
        """
        return plan_text.plan_data(self, world_size=world_size, platform=platform)

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
        gradient_clipping: float = 1.0,
        optimizer: str | Mapping[str, Any] = "AdamW",
        ema: EMAPlace = "none",
        frozen_bytes: int = 0,
        model_in_memory: bool = False,
        reserve: float = 0.05,
        platform: Platform | None = None,
        lora: int | None = None,
        base_dtype: str | None = None,
        rates: Rates | None = None,
        streamed: bool = True,
        update: UpdateName | DeviceUpdate | None = None,
    ) -> Advice:
        """Return the plan with the shortest predicted step time among those that fit the machine.

        If the model's operation counts are unknown, the plan with the least offload is chosen.

        Args:
            model: ``ModelFacts``, a module, or the name of a family (``"sdxl"``).
            vram: Memory of each device, in bytes or as ``"12GiB"``; by default this machine's.
            ram: RAM of each machine, in bytes or as ``"64GiB"``; by default this machine's.
            nvme: Disk space for swap files on each machine, in bytes or as ``"1TiB"``.
            batch: Samples per forward pass and rank.
            resolution: Side length in pixels, or height and width; by default the family's.
            frames: Frames per clip for a video model; by default the family's clip length.
            world_size: Number of ranks, all on one machine.
            precision: ``"bf16"``, ``"fp16"``, ``"fp32"`` or ``"auto"``.
            gradient_accumulation_steps: Forward passes per optimizer step.
            gradient_clipping: Maximum gradient norm; 0 disables clipping. Without clipping,
                streamed weights are updated in the backward pass.
            optimizer: Optimizer as a name, or as ``{"type": …, "params": {…}}``.
            ema: Location of an ``EMAShadow``: ``"none"``, ``"host"``, ``"device"``, ``"nvme"``.
            frozen_bytes: Bytes of frozen models, which stay unpartitioned on each rank's device.
            model_in_memory: Whether each rank starts with the whole fp32 model in memory, instead
                of loading it from files with ``load_pretrained(folder, plan=plan)``.
            reserve: Fraction of device and host memory to keep free.
            platform: The machine; by default this machine, or a CUDA machine if ``vram`` and
                ``ram`` are given.
            lora: Rank of LoRA adapters on the attention projections; only the adapters are trained.
                To adapt other layers, pass ``facts.with_adapters(rank, targets=...)`` as the model.
            base_dtype: Quantization of the base model under adapters (``"nf4"``, ``"fp4"``,
                ``"int8"``, ``"fp8"``); by default the plan's precision.
            rates: Speeds of the machine; by default the speeds that the recipe ``measure_rates.py``
                has stored, or catalogue values if it has not been run.
            streamed: Whether a plan with streamed weights may be chosen; such plans are always
                listed. ``plan.resolve(streamed=advice.streamed, update=advice.update)`` runs as
                advised. If nothing fits with the requested optimizer, one with smaller states is
                chosen and named.
            update: Where weights in host memory are updated, as in ``resolve``. By default,
                whichever is faster; weights that are rounded at random
                (``"device:stochastic"``) are only advised on request.

        Raises:
            NothingFitsError: No plan fits; the error contains the closest plan.
            PlanError: A size, family or option is invalid.
        """
        plan = cls.build(
            precision=precision,
            gradient_accumulation_steps=gradient_accumulation_steps,
            gradient_clipping=gradient_clipping,
            optimizer=optimizer,
        )
        facts = as_facts(model, lora=lora, base_dtype=base_dtype)
        work = estimate.workload_of(
            model,
            facts,
            batch=batch,
            resolution=resolution,
            frames=frames,
            frozen_bytes=frozen_bytes,
            ema=ema,
            model_in_memory=model_in_memory,
        )
        advised = advise.advise(
            plan,
            facts,
            Context(world_size=world_size, platform=platform),
            work,
            vram=vram,
            ram=ram,
            nvme=nvme,
            reserve=reserve,
            rates=rates,
            streamed=streamed,
            update=update,
        )
        return raised(Advice, advised)

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
        streamed: bool | Streaming | None = None,
        engine: EngineName | None = None,
        update: UpdateName | DeviceUpdate | None = None,
    ) -> MemoryEstimate:
        """Estimate device memory, host RAM and NVMe by component.

        Args:
            model: ``ModelFacts``, a module, or the name of a family (``"sdxl"``).
            platform: The machine; detected by default.
            world_size: Number of ranks.
            run: Values from the training script.
            batch: Samples per forward pass and rank; by default the plan's micro batch size.
            resolution: Side length in pixels, or height and width; by default the family's.
            frames: Frames per clip for a video model; by default the family's clip length.
            ema: Location of an ``EMAShadow``: ``"none"``, ``"host"``, ``"device"``, ``"nvme"``.
            gradient_checkpointing: Whether blocks are recomputed in the backward pass.
            activation_offload: Whether inputs of recomputed blocks are kept in host memory
                (``ActivationOffload``).
            frozen_bytes: Bytes of frozen models, which stay unpartitioned on each rank's device.
            model_in_memory: Whether each rank starts with the whole fp32 model in memory, instead
                of loading it from files with ``load_pretrained(folder, plan=plan)``.
            lora: Rank of LoRA adapters, as in ``advise``.
            base_dtype: Quantization of the base model, as in ``advise``.
            streamed: Whether to stream weights, as in ``resolve``.
            engine: Engine of an Adam in host memory, as in ``resolve``.
            update: Where the host engine updates weights, as in ``resolve``.

        Raises:
            PlanError: As in ``resolve``, or a family is unknown, or a size is invalid.
        """
        facts, plan = as_facts(model, lora=lora, base_dtype=base_dtype), self
        if batch is not None:
            micro = whole(batch, key="batch")
            plan = attrs.evolve(plan, train_micro_batch_size_per_gpu=micro, train_batch_size=None)
        resolved = plan.resolve(
            platform=platform,
            model=facts,
            world_size=world_size,
            run=run,
            streamed=streamed,
            engine=engine,
            update=update,
        )
        work = estimate.workload_of(
            model,
            facts,
            batch=resolved.micro_batch_size,
            resolution=resolution,
            frames=frames,
            frozen_bytes=frozen_bytes,
            gradient_checkpointing=gradient_checkpointing,
            activation_offload=activation_offload,
            ema=ema,
            model_in_memory=model_in_memory,
        )
        return resolved.estimate(work)


@attrs.frozen(kw_only=True, repr=False)
class Advice(Advised):
    """The plan chosen by ``DeepSpeedPlan.advise``, with all candidates."""

    @property
    def plan(self) -> DeepSpeedPlan:
        """The advised plan, without what it cannot express, such as streaming.

        ``Trainer`` and ``prepare`` accept the whole advice.
        """
        return raised(DeepSpeedPlan, self.chosen.plan)

    @property
    def estimate(self) -> MemoryEstimate:
        """Memory estimate of the advised plan."""
        return raised(MemoryEstimate, self.chosen.estimate)

    @property
    def resolved(self) -> ResolvedPlan:
        """The advised plan, resolved for the given machine."""
        return raised(ResolvedPlan, self.chosen.estimate.resolved)

    def explain(self) -> str:
        """Return the choice, its reason, the free memory and all candidates as text."""
        return advice_text.advice_page(self.to_dict(), every=True).text(memory_text.WIDTH)

    def to_dict(self) -> dict[str, Any]:
        """Return the advice as a JSON-serialisable dict; sizes are in bytes."""
        return advice_text.advice_data(self)


def _optimizer_config(optimizer: Any, lr: float | Auto | None) -> Any:
    """Return the section of an optimizer, given by name or as a mapping, with learning rate."""
    if optimizer is not None and not isinstance(optimizer, str | Mapping):
        kind = optimizer if isinstance(optimizer, type) else type(optimizer)
        raise InvalidValueError(
            "an optimizer object cannot be used, because the engine builds its own optimizer "
            "for the weights that ZeRO partitions",
            f'write optimizer="{kind.__name__}", lr=…, or '
            f'optimizer={{"type": "{kind.__name__}", "params": {{…}}}}',
            "optimizer",
            kind.__name__,
        )
    config: Any = {"type": optimizer} if isinstance(optimizer, str) else optimizer
    name = None if config is None else config.get("type")
    if isinstance(name, str) and name != AUTO:
        parse_optimizer_name(name)
    if lr is None:
        return config
    if config is None or "lr" in config.get("params", {}):
        raise InvalidValueError(
            "no optimizer is set" if config is None else "is also set in the optimizer's params",
            'add optimizer="AdamW"' if config is None else "set it once",
            "lr",
            lr,
        )
    return {**config, "params": {**config.get("params", {}), "lr": lr}}
