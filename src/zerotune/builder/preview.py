"""Check and resolve a form, estimate its memory, and collect messages by key."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cached_property, partial
from typing import Any, Final, Literal, get_args

import attrs

from zerotune._util.palette import component_colours
from zerotune._util.proc import installed_versions
from zerotune._util.text import (
    as_sentence,
    parse_memory,
)
from zerotune.builder.forms import (
    FormState,
    Reading,
    as_choice,
    droppable_settings,
    read_plan,
)
from zerotune.builder.models import model_name
from zerotune.decisions import Decision, worst_first
from zerotune.errors import REMOVAL, UNSET, InvalidValueError, NothingFitsError, ZeroTuneError
from zerotune.optim import OptimizerResolver
from zerotune.plan import DeepSpeedPlan, ModelFacts, RunFacts, Workload, plan_document
from zerotune.plan.candidates import Candidate
from zerotune.plan.context import Context
from zerotune.plan.facts import STORAGES
from zerotune.plan.families import as_facts, family_names, model_family
from zerotune.plan.memory.estimate import sample_size
from zerotune.plan.memory.items import EMAPlace
from zerotune.plan.memory.rates import CARDS, card_platform, known_rates
from zerotune.plan.memory.time import StepTime, step_time
from zerotune.plan.optimizer.capability import Situation, installed_packages, missing_package
from zerotune.plan.optimizer.catalogue import OPTIMIZERS
from zerotune.plan.plan import Advice, MemoryEstimate, ResolvedPlan, raised
from zerotune.plan.remedies import Remedy
from zerotune.plan.section import value_at
from zerotune.plan.sections import OFFLOAD_DEVICES, PRECISIONS
from zerotune.plan.text.advice import FOREMOST, candidate_data, foremost, rank_budget, seconds_words
from zerotune.plan.text.memory import DURING, Fit, estimate_data, fits, subject
from zerotune.plan.text.plan import describe, shown_and_defaults
from zerotune.plan.values import AUTO, Integer
from zerotune.plan.write import in_order, launchable
from zerotune.platform import CUDA, Platform, detect_platform


def message_data(one: Decision) -> dict[str, str]:
    """Return a choice, finding or error as a JSON-serialisable dict."""
    change = f"{_format_value(one.before)} → {_format_value(one.after)}"
    return {
        "severity": one.severity,
        "key": one.key,
        "text": as_sentence(one.reason),
        "fix": one.fix,
        "rule": one.rule,
        "change": change if one.is_choice and one.before is not UNSET else "",
    }


def notable_decisions(
    decisions: Iterable[Decision], *, findings: Collection[Decision] = ()
) -> list[Decision]:
    """Return the decisions that are neither DeepSpeed's defaults nor among ``findings``."""
    unique: list[Decision] = []
    for decision in shown_and_defaults(decisions)[0]:
        if decision not in findings and decision not in unique:
            unique.append(decision)
    return unique


def _plan_error(reason: str) -> Decision:
    return Decision("", UNSET, UNSET, reason, "error")


def _format_value(value: Any) -> str:
    if value is None:
        return "not set"
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 80 else f"{text[:79]}…"


# -- What the page plans for: a model, a workload and a machine. Not part of the plan.


_PACKAGES: Final = ("deepspeed", "torch", "accelerate", "diffusers")


@attrs.frozen(kw_only=True)
class Setup:
    """The model, the workload of one step, and the machine."""

    family: str = "sdxl"
    """Model family; ``""`` for a model without a family, whose memory is not estimated."""
    resolution: int | None = None
    """Side length of the images in pixels; by default the family's native size."""
    frames: int | None = None
    """Number of frames per clip; by default the family's usual number."""
    world_size: int = 1
    total_steps: int = 10_000
    """Number of optimizer steps, for schedules that do not set a length."""
    lora: int | None = None
    """Rank of LoRA adapters; ``None`` trains the whole model."""
    base_dtype: str | None = None
    """Quantization of the base model if adapters are trained; ``None`` uses the plan's
    precision."""
    ema: EMAPlace = "none"
    gradient_checkpointing: bool = True
    activation_offload: bool = False
    this_machine: bool = False
    """Whether to plan for this machine instead of the machine that the fields below describe."""
    card: str | None = None
    """GPU whose known rates are used, such as "RTX 4090, 24 GiB"; by default the known GPU with the
    nearest memory size."""
    vram: int = 24 * 2**30
    """GPU memory in bytes, per GPU."""
    ram: int = 64 * 2**30
    """RAM in bytes, shared by all ranks."""
    nvme: int = 0
    """Disk space for swap files in bytes, shared by all ranks."""

    def check_base(self) -> None:
        """Raise an error for a quantized base model without adapters."""
        if self.base_dtype is not None and self.lora is None:
            raise InvalidValueError(
                "a quantized model can only be trained through LoRA adapters",
                "set setup.lora to 16, or remove setup.base_dtype",
                "setup.base_dtype",
                self.base_dtype,
                edits=[{"setup.lora": 16}, REMOVAL],
            )

    @property
    def frames_of_clips(self) -> int | None:
        """Number of frames per clip; ``None`` for an image model, even if the form has a value."""
        takes_clips = bool(self.family) and model_family(self.family).frames is not None
        return self.frames if takes_clips else None


def read_setup(raw: Mapping[str, Any]) -> tuple[Setup, list[ZeroTuneError]]:
    """Read a setup from the page; return the valid values and the errors."""
    errors: list[ZeroTuneError] = []
    values: dict[str, Any] = {}
    for name, read in _SETUP_READERS.items():
        value = raw.get(name)
        if value is None or value == "":
            if name == "family" and value == "":
                values[name] = ""
            continue
        try:
            values[name] = read(value, key=f"setup.{name}")
        except ZeroTuneError as error:
            errors.append(error)
    return Setup(**values), errors


class Machines:
    """This machine, which is detected only once, and the machines that users describe."""

    def __init__(self) -> None:
        self._versions = installed_versions(_PACKAGES)

    @cached_property
    def this(self) -> Platform:
        """This machine."""
        return detect_platform(log=False)

    def of(self, setup: Setup) -> Platform:
        """Return the machine that a setup describes."""
        if setup.this_machine:
            return self.this
        described: dict[str, Any] = {
            "device_count": setup.world_size,
            "vram": setup.vram,
            "ram": setup.ram,
            "versions": self._versions,
        }
        if setup.card is None:
            return Platform.synthetic(CUDA, **described)
        return card_platform(_CARDS[setup.card], **described)

    def sizes(self, setup: Setup) -> dict[str, int | None]:
        """Return sizes in bytes: memory per GPU, and RAM and swap space shared by all ranks."""
        if not setup.this_machine:
            return {"device": setup.vram, "host": setup.ram, "nvme": setup.nvme}
        return {
            "device": self.this.vram,
            "host": self.this.host_memory.limit,
            "nvme": setup.nvme or None,
        }


def _whole_number(*, least: int = 1, most: int) -> Callable[..., Any]:
    kind, fix = Integer(minimum=least, maximum=most, auto=False), f"write {least} to {most}"

    def read(value: Any, *, key: str) -> Any:
        try:
            return kind.read(value, key)[0]
        except InvalidValueError as error:
            # The kind's edits would set the field to its smallest or largest number.
            raise InvalidValueError(error.reason, fix, key, value) from None

    return read


_CARDS: Final = {card.label: card for card in CARDS}
_SETUP_READERS: Final[Mapping[str, Callable[..., Any]]] = {
    "family": partial(as_choice, choices=family_names()),
    "resolution": _whole_number(least=8, most=16_384),
    "frames": _whole_number(most=10_000),
    "world_size": _whole_number(most=4096),
    "total_steps": _whole_number(most=10**9),
    "lora": _whole_number(most=4096),
    "base_dtype": partial(as_choice, choices=tuple(STORAGES)),
    "card": partial(as_choice, choices=tuple(_CARDS)),
    "ema": partial(as_choice, choices=get_args(EMAPlace)),
    **dict.fromkeys(
        ("gradient_checkpointing", "activation_offload", "this_machine"),
        partial(as_choice, choices=(True, False)),
    ),
    **dict.fromkeys(("vram", "ram", "nvme"), parse_memory),
}


# -- What the page shows of a form: files, messages, memory, optimizers, changes.


LEASE_PLACEHOLDER: Final = "(a temporary folder for each run)"
"""Placeholder for a swap folder that is not set."""

_DECISIVE: Final = frozenset(
    {"zero_optimization", "zero_optimization.stage", "zero_optimization.offload_optimizer.device"}
)
"""Settings that decide which optimizers can run."""

_TOO_LARGE: Final = "The form contains a number that is too large to calculate with."
_TEXT_FORMATS: Final = (("deepspeed", "json"), ("accelerate", "yaml"), ("python", "python"))
_PLACE_LABELS: Final = {"device": "GPU", "host": "RAM", "nvme": "NVMe"}


@attrs.frozen(kw_only=True)
class Verdict:
    """Whether a plan runs and fits in memory; every part of the page shows this verdict."""

    kind: Literal["fits", "unknown", "short", "stopped"]
    brief: str
    """Short text for a label."""
    text: str
    """Full text."""

    @property
    def runs(self) -> bool:
        """Whether the plan runs if there is enough memory."""
        return self.kind != "stopped"

    @classmethod
    def of(
        cls, messages: Iterable[Decision], resolved: ResolvedPlan | None, fit: Iterable[Fit]
    ) -> Verdict:
        """Judge a plan.

        Args:
            messages: All messages about the plan and the setup.
            resolved: The resolved plan; ``None`` if the plan cannot run.
            fit: Required and available bytes of GPU memory, RAM and NVMe; empty if there is no
                estimate.
        """
        stopped = resolved is None or any(one.severity == "error" for one in messages)
        if stopped:
            return cls(kind="stopped", brief="cannot run", text="cannot run")
        places = list(fit)
        full = [_PLACE_LABELS[one.place] for one in places if not one.fits]
        if full:
            text = f"runs, but does not fit: {', '.join(full)}"
            return cls(kind="short", brief="does not fit", text=text)
        if places:
            return cls(kind="fits", brief="runs and fits", text="runs and fits")
        return cls(kind="unknown", brief="runs", text="runs, memory not estimated")


@attrs.frozen(kw_only=True)
class Preview:
    """Result of checking, resolving and estimating a form."""

    plan: DeepSpeedPlan | None
    resolved: ResolvedPlan | None
    """The resolved plan with its optimizer; ``None`` if the plan cannot run."""
    messages: tuple[Decision, ...]
    setup: Setup
    platform: Platform
    estimate: MemoryEstimate | None = None
    """Memory that the plan needs; ``None`` if it cannot be estimated."""
    fit: tuple[Fit, ...] = ()
    """Required and available bytes of each kind of memory."""
    running_config: dict[str, Any] = attrs.field(factory=dict)
    """Configuration that DeepSpeed receives; empty if the plan cannot run."""
    form_config: Mapping[str, Any] = attrs.field(factory=dict)
    """The configuration in the form, including invalid settings."""
    partial_plan: DeepSpeedPlan | None = None
    """The plan without the invalid settings."""

    @property
    def verdict(self) -> Verdict:
        """Whether the plan runs and fits in memory."""
        return Verdict.of(self.messages, self.resolved, self.fit)

    def _outputs(self) -> dict[str, Any]:
        # Even an invalid configuration can be read and corrected as text.
        outputs: dict[str, Any] = {"json": {"text": _as_json(self.form_config), "messages": []}}
        leased = [
            Decision(
                f"zero_optimization.offload_{part}.nvme_path",
                UNSET,
                UNSET,
                "zerotune uses a temporary folder for each run; to train without zerotune, "
                "set a folder",
            )
            for part, folder in (self.resolved.nvme_paths if self.resolved else {}).items()
            if folder is None
        ]
        if self.plan is not None:
            for format_, name in _TEXT_FORMATS:
                plan = self.plan
                if format_ == "accelerate":
                    plan = launchable(plan, processes=self.setup.world_size)
                try:
                    document = plan_document(plan, format_, lossy=droppable_settings(plan))
                except ZeroTuneError as error:
                    outputs[name] = {"text": None, "messages": [message_data(Decision.of(error))]}
                    continue
                notes = [*map(message_data, document.decisions), *map(message_data, leased)]
                outputs[name] = {"text": document.text, "messages": notes}
        if self.running_config and self.verdict.runs:
            text = _as_json(self.running_config)
            outputs["running"] = {"text": text, "messages": list(map(message_data, leased))}
        return outputs

    def _effective(self) -> dict[str, Any]:
        """Return the values that apply where the form sets none, by path."""
        found = dict(_leaf_values(self.running_config, "")) if self.verdict.runs else {}
        if self.setup.family:
            known = model_family(self.setup.family)
            found["setup.resolution"] = known.resolution
            found["setup.frames"] = known.frames
        return found

    def _memory(self) -> dict[str, Any]:
        estimate = self.estimate
        if estimate is not None:
            return {
                "subject": subject(estimate).replace(
                    self.setup.family, model_name(self.setup.family), 1
                ),
                **_memory_bars(estimate, self.fit),
            }
        if self.resolved is not None and self.resolved.model is None:
            return {"reason": "Choose a model family to estimate the memory."}
        return {"reason": "The memory can be estimated once the plan can run."}

    def _time(self) -> dict[str, str] | None:
        """Return the predicted time of a step, and the rates behind it."""
        if self.estimate is None or not self.verdict.runs:
            return None
        time = step_time(self.estimate, known_rates(self.platform))
        return None if time is None else time_texts(time)

    def _optimizers(self) -> list[dict[str, Any]]:
        resolved, plan = self.resolved, self.plan or self.partial_plan
        if resolved is not None:
            stage, precision = resolved.stage, resolved.precision
        elif plan is None or any(
            message.severity == "error" and message.key in _DECISIVE for message in self.messages
        ):
            return []
        else:
            stage = plan.stage if isinstance(plan.stage, int) else 2
            precision = "bf16" if plan.precision == AUTO else plan.precision
        offload = plan.offload_optimizer_device if plan else "none"
        found = capabilities(
            self.platform,
            stage=stage,
            offload=offload if offload in OFFLOAD_DEVICES and stage > 0 else "none",
            precision=precision,
        )
        if not self.verdict.runs:
            # Nothing will run, so no class does the update.
            return [{**each, "implementation": None} for each in found]
        return found


def understand(state: FormState, machines: Machines) -> Preview:
    """Read, check and resolve a form; errors are returned, not raised."""
    setup, wrong = read_setup(state.setup)
    reading = read_plan(state)
    form = _Form(state=state, setup=setup, platform=machines.of(setup), reading=reading)
    messages = [Decision.of(error) for error in (*wrong, *reading.errors)]
    resolved: ResolvedPlan | None = None
    running_config: dict[str, Any] = {}
    if reading.plan is not None:
        try:
            resolved, more = form.resolve(reading.plan)
            running_config = {} if resolved is None else _running_config(resolved)
        except ZeroTuneError as error:
            resolved, more = None, [Decision.of(error)]
        except (OverflowError, RecursionError):
            more = [_plan_error(_TOO_LARGE)]
        messages += more
    elif reading.partial_plan is not None:
        messages += form.remaining_errors(reading.partial_plan)
    estimate, problems = _estimate_memory(None if wrong else resolved, setup)
    messages += problems
    limits: dict[Any, int] = {
        place: size for place, size in machines.sizes(setup).items() if size is not None
    }
    return Preview(
        plan=reading.plan,
        resolved=resolved,
        messages=tuple(worst_first(messages)),
        setup=setup,
        platform=form.platform,
        running_config=running_config,
        form_config=state.config,
        partial_plan=reading.partial_plan,
        estimate=estimate,
        fit=() if estimate is None else fits(estimate, rank_budget(limits, estimate)),
    )


def _estimate_memory(
    resolved: ResolvedPlan | None, setup: Setup
) -> tuple[MemoryEstimate | None, list[Decision]]:
    """Estimate a plan's memory; return the estimate and the errors."""
    if resolved is None or resolved.model is None:
        return None, []
    try:
        size = sample_size(
            setup.family,
            resolved.model,
            resolution=setup.resolution,
            frames=setup.frames_of_clips,
        )
        work = Workload(
            batch=resolved.micro_batch_size,
            **size,
            gradient_checkpointing=setup.gradient_checkpointing,
            activation_offload=setup.activation_offload,
            ema=setup.ema,
        )
        return resolved.estimate(work), []
    except ZeroTuneError as error:
        return None, [Decision.of(_setup_error(error))]
    except (OverflowError, RecursionError):
        return None, [_plan_error(_TOO_LARGE)]


def _setup_error(error: ZeroTuneError) -> ZeroTuneError:
    """Assign an error to the field of the setup that has its key, if there is one."""
    return error.below("setup") if error.key in _SETUP_READERS else error


@attrs.frozen(kw_only=True)
class _Form:
    """A form with its setup, machine and plan."""

    state: FormState
    setup: Setup
    platform: Platform
    reading: Reading

    def resolve(self, plan: DeepSpeedPlan) -> tuple[ResolvedPlan | None, list[Decision]]:
        model = self._model()
        context = Context(
            world_size=self.setup.world_size,
            platform=self.platform,
            model=model,
            run=self._run(plan),
        )
        found = plan.inspect(context)
        messages = [*found.refusals, *found.findings]
        if found.resolved is None:
            # A plan that cannot run has no choices to report.
            return None, [*messages, *notable_decisions(plan.decisions, findings=found.findings)]
        notable = notable_decisions(found.resolved.decisions, findings=found.findings)
        return raised(ResolvedPlan, found.resolved), [*messages, *notable]

    def _model(self) -> ModelFacts | None:
        setup = self.setup
        if not setup.family:
            return None
        setup.check_base()
        try:
            return as_facts(setup.family, lora=setup.lora, base_dtype=setup.base_dtype)
        except ZeroTuneError as error:
            raise _setup_error(error) from None

    def remaining_errors(self, partial_plan: DeepSpeedPlan) -> list[Decision]:
        """Return the errors that remain after a plan's invalid settings are removed."""
        try:
            found = partial_plan.inspect(
                Context(world_size=self.setup.world_size),
                resolve_in=Context(
                    world_size=self.setup.world_size,
                    platform=self.platform,
                    run=self._run(partial_plan),
                ),
                mistakes=self.reading.errors,
            )
        except (OverflowError, RecursionError):
            return [_plan_error(_TOO_LARGE)]
        every = (*found.findings, *found.refusals)
        return [each for each in every if value_at(self.state.config, each.key) is not UNSET]

    def _run(self, plan: DeepSpeedPlan) -> RunFacts:
        if plan.scheduler is None:
            return RunFacts()
        # As transformers and accelerate do, an automatic warm-up is left out.
        warmup = 0 if AUTO in (plan.scheduler.params or {}).values() else None
        return RunFacts(total_steps=self.setup.total_steps, warmup_steps=warmup)


def preview_data(preview: Preview, *, applied: DeepSpeedPlan | None) -> dict[str, Any]:
    """Return a preview as a JSON-serialisable dict."""
    plan, resolved, verdict = preview.plan, preview.resolved, preview.verdict
    return {
        "valid": plan is not None,
        "runs": verdict.runs,
        "verdict": attrs.asdict(verdict),
        "title": describe(resolved) if resolved is not None and verdict.runs else None,
        "messages": [message_data(message) for message in preview.messages],
        "outputs": preview._outputs(),
        "effective": preview._effective(),
        "memory": preview._memory(),
        "time": preview._time(),
        "optimizers": preview._optimizers(),
        "changes": None if plan is None or applied is None else applied.diff(plan).to_dict(),
    }


def _as_json(config: Mapping[str, Any]) -> str:
    return json.dumps(config, indent=2, allow_nan=False) + "\n"


def _running_config(resolved: ResolvedPlan) -> dict[str, Any]:
    """Return what runs, including the optimizer and schedule that the engine builds."""
    missing = {
        part: LEASE_PLACEHOLDER for part, folder in resolved.nvme_paths.items() if folder is None
    }
    config = resolved.with_nvme_path(**missing).to_deepspeed()
    for name, choice in (("optimizer", resolved.optimizer), ("scheduler", resolved.scheduler)):
        if choice is not None and name not in config:
            config[name] = {"type": choice.name, "params": dict(choice.params)}
    return config


def _leaf_values(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaf_values(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def _memory_bars(estimate: MemoryEstimate, every: Iterable[Fit]) -> dict[str, Any]:
    places = estimate_data(estimate)["places"]
    colours = component_colours(
        one["component"] for place in places.values() for one in place["components"]
    )
    bars = [
        {
            "place": fit.place,
            "label": _PLACE_LABELS[fit.place],
            "needed": fit.needed,
            "available": fit.available,
            "fits": fit.fits,
            "when": DURING[estimate.peak(fit.place).phase],
            "components": [
                {**one, "colour": colours[one["component"]]}
                for one in places[fit.place]["components"]
                if one["at_peak"]
            ],
        }
        for fit in every
    ]
    return {"bars": bars, "notes": list(estimate.notes)}


def time_texts(time: StepTime) -> dict[str, str]:
    """Format the predicted step time, and the origin of the rates that it is based on."""
    return {"seconds": seconds_words(time.expected), "rates": f"rates {time.origin}"}


def capabilities(
    platform: Platform, *, stage: int, offload: str, precision: str
) -> list[dict[str, Any]]:
    """List every optimizer in the catalogue, with the reason for each one that cannot run."""
    resolver = OptimizerResolver(platform=platform)
    here = Situation(packages=installed_packages())
    found = []
    for name, entry in OPTIMIZERS.items():
        answer = resolver.capability(name, stage=stage, offload=offload, precision=precision)
        found.append(
            {
                "name": name,
                "runs": answer.runs,
                "status": answer.status,
                "reason": answer.reason,
                "alternative": answer.alternative,
                "implementation": answer.implementation,
                "missing": missing_package(entry, here),
            }
        )
    return found


# -- ``Fit my card``: the advice for a form, and the form of each candidate.


_ADVISED_SECTIONS: Final = ("zero_optimization", "aio")


def advise(state: FormState, machines: Machines) -> dict[str, Any]:
    """Return plans that fit a setup, best first, with their forms, as a JSON-serialisable dict."""
    setup, wrong = read_setup(state.setup)
    if wrong:
        raise wrong[0]
    if not setup.family:
        raise InvalidValueError(
            "is missing, so no plan can be estimated", "choose a model family", "setup.family"
        )
    setup.check_base()
    sizes = machines.sizes(setup)
    try:
        advice = DeepSpeedPlan.advise(
            setup.family,
            vram=sizes["device"],
            ram=sizes["host"],
            nvme=sizes["nvme"] or 0,
            resolution=setup.resolution,
            frames=setup.frames_of_clips,
            world_size=setup.world_size,
            lora=setup.lora,
            base_dtype=setup.base_dtype,
            ema=setup.ema,
            platform=machines.this if setup.this_machine else None,
            rates=known_rates(machines.of(setup)),
            # A configuration file cannot express streamed weights.
            streamed=False,
            **_advice_kwargs(state),
        )
    except NothingFitsError as error:
        return _no_fit_data(error, state, setup)
    except ZeroTuneError as error:
        raise _setup_error(error) from None
    return _advice_data(advice, state, setup)


def _no_fit_data(error: NothingFitsError, state: FormState, setup: Setup) -> dict[str, Any]:
    """Return the nearest plan and the remedies; remedies that fit come first."""
    remedies = [_remedy_data(one, state) for one in error.remedies]
    return {
        "fits": False,
        "reason": error.reason,
        "fix": error.more,
        "nearest": _candidate_form(error.nearest, state, setup),
        "remedies": sorted(remedies, key=lambda one: not one["fits"]),
    }


def _advice_data(advice: Advice, state: FormState, setup: Setup) -> dict[str, Any]:
    """Return the plans that a configuration file can express, each with its form."""
    kept = tuple(one for one in advice.candidates if one.streamed is None)
    advice = attrs.evolve(advice, candidates=kept)
    shown = foremost(advice, FOREMOST)

    def form_data(candidate: Candidate) -> dict[str, Any]:
        # Compare by identity, because two different candidates may be equal.
        first = any(candidate is one for one in shown)
        return {**_candidate_form(candidate, state, setup), "foremost": first}

    return {
        "fits": True,
        "chosen": form_data(advice.chosen),
        "runners_up": [form_data(one) for one in advice.runners_up],
        "rejected": [form_data(one) for one in advice.rejected],
    }


def _advice_kwargs(state: FormState) -> dict[str, Any]:
    """Return the form's batch, accumulation, precision and optimizer for ``advise``."""
    reading = read_plan(state)
    plan = reading.plan or reading.partial_plan
    if plan is None:
        return {}
    sizes = {
        "batch": plan.train_micro_batch_size_per_gpu,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
    }
    kwargs: dict[str, Any] = {name: size for name, size in sizes.items() if isinstance(size, int)}
    if plan.precision in PRECISIONS:
        kwargs["precision"] = plan.precision
    if plan.optimizer_name is not None:
        kwargs["optimizer"] = plan.optimizer_name
    return kwargs


def _remedy_data(remedy: Remedy, state: FormState) -> dict[str, Any]:
    """Return a remedy and its form; a remedy that streams weights has no form."""
    settings = dict(remedy.settings)
    label, gain = remedy.what, remedy.gain
    if settings.pop("streamed", False):
        about = ", ".join(f"{name}={value!r}" for name, value in remedy.settings.items())
        words = f"{label} ({about}), only possible in a training script"
        return {"label": f"{words}{f': {gain}' if gain else ''}", "fits": False, "state": None}
    optimizer = settings.pop("optimizer", None)
    config = state.config
    if optimizer is not None:
        section = config.get("optimizer")
        kept = section if isinstance(section, dict) else {}
        config = {**config, "optimizer": {**kept, "type": optimizer}}
        label = f"Use the optimizer {optimizer}"
    elif "lora" in settings:
        base = settings.get("base_dtype")
        beside = f", with the base model in {base}" if base else ""
        label = f"Train LoRA adapters of rank {settings['lora']} instead{beside}"
        gain = f"fits: {gain}"
    remedy_form = attrs.evolve(state, config=config, setup={**state.setup, **settings})
    fits = "lora" in remedy.settings
    return {"label": label, "gain": gain, "fits": fits, "state": remedy_form.data()}


def _candidate_form(candidate: Candidate, state: FormState, setup: Setup) -> dict[str, Any]:
    """Return a candidate and a form with its stage, offload and batch; other settings are kept.

    The ZeRO section is replaced as a whole, because an old bucket size would invalidate the
    estimate.
    """
    data = candidate_data(candidate)
    advised = data.pop("plan")
    kept = {key: value for key, value in state.config.items() if key not in _ADVISED_SECTIONS}
    config = in_order({**advised, **kept}, state.config)
    zero = state.config.get("zero_optimization")
    before = zero if isinstance(zero, dict) else {}
    sections = (before.get("offload_optimizer"), before.get("offload_param"))
    folders = [one.get("nvme_path") for one in sections if isinstance(one, dict)]
    folder = next((one for one in folders if isinstance(one, str)), None)
    for section in config["zero_optimization"].values():
        if folder is not None and isinstance(section, dict) and section.get("device") == "nvme":
            section.setdefault("nvme_path", folder)
    around = {
        "world_size": setup.world_size,
        **state.setup,
        "gradient_checkpointing": candidate.gradient_checkpointing,
        "activation_offload": candidate.activation_offload,
    }
    return {
        **data,
        "predicted": None if candidate.time is None else time_texts(candidate.time),
        "state": attrs.evolve(state, config=config, setup=around).data(),
    }
