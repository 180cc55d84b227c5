"""Check and resolve a form, estimate its memory, and collect messages by key."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final, Literal

import attrs

from zerotune._util.palette import component_colours
from zerotune._util.text import as_sentence
from zerotune.builder.forms import FormState, Reading, droppable_settings, read_plan
from zerotune.builder.models import model_name
from zerotune.builder.setup import Machines, Setup, read_setup, setup_error
from zerotune.decisions import Decision, worst_first
from zerotune.errors import UNSET, ZeroTuneError
from zerotune.optim import OptimizerResolver
from zerotune.plan import DeepSpeedPlan, ModelFacts, RunFacts, plan_document
from zerotune.plan.context import Context
from zerotune.plan.families import as_facts, model_family
from zerotune.plan.memory.estimate import workload_of
from zerotune.plan.memory.items import DURING
from zerotune.plan.memory.rates import known_rates
from zerotune.plan.memory.time import StepTime, step_time
from zerotune.plan.optimizer.capability import installed_packages, missing_package
from zerotune.plan.optimizer.catalogue import OPTIMIZERS
from zerotune.plan.plan import MemoryEstimate, ResolvedPlan, raised
from zerotune.plan.section import leaves, value_at
from zerotune.plan.sections import OFFLOAD_DEVICES
from zerotune.plan.text.advice import rank_budget, seconds_words
from zerotune.plan.text.memory import Fit, estimate_data, fits, subject
from zerotune.plan.text.plan import describe
from zerotune.plan.values import AUTO
from zerotune.plan.write import launchable
from zerotune.platform import Platform


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
    for decision in decisions:
        known = decision in findings or decision in unique
        if decision.is_shown and not decision.is_default and not known:
            unique.append(decision)
    return worst_first(unique)


def _plan_error(reason: str) -> Decision:
    return Decision("", UNSET, UNSET, reason, "error")


def _format_value(value: Any) -> str:
    if value is None:
        return "not set"
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 80 else f"{text[:79]}…"


# -- What the page shows of a form: files, messages, memory, optimizers.


LEASE_PLACEHOLDER: Final = "(a temporary folder for each run)"
"""Placeholder for a swap folder that is not set."""

_DECISIVE: Final = frozenset(
    {"zero_optimization", "zero_optimization.stage", "zero_optimization.offload_optimizer.device"}
)
"""Settings that decide which optimizers can run."""

_TOO_LARGE: Final = "The form contains a number that is too large to calculate with."
_TEXT_FORMATS: Final = (("deepspeed", "json"), ("accelerate", "yaml"))
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
        if self.resolved is None or any(one.severity == "error" for one in self.messages):
            return Verdict(kind="stopped", brief="cannot run", text="cannot run")
        full = [_PLACE_LABELS[one.place] for one in self.fit if not one.fits]
        if full:
            text = f"runs, but does not fit: {', '.join(full)}"
            return Verdict(kind="short", brief="does not fit", text=text)
        if self.fit:
            return Verdict(kind="fits", brief="runs and fits", text="runs and fits")
        return Verdict(kind="unknown", brief="runs", text="runs, memory not estimated")

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
        running = self.running_config if self.verdict.runs else {}
        found = {path: value for path, value in leaves(running) if value != {}}
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
        known = self.resolved is None or self.resolved.model is not None
        wanted = "The memory can be estimated once the plan can run."
        return {"reason": wanted if known else "Choose a model family to estimate the memory."}

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
    reading, platform = read_plan(state), machines.of(setup)
    messages = [Decision.of(error) for error in (*wrong, *reading.errors)]
    resolved: ResolvedPlan | None = None
    running_config: dict[str, Any] = {}
    try:
        if reading.plan is not None:
            resolved, more = _resolve(reading.plan, setup, platform)
            messages += more
            running_config = {} if resolved is None else _running_config(resolved)
        elif reading.partial_plan is not None:
            messages += _remaining_errors(reading, reading.partial_plan, state, setup, platform)
    except ZeroTuneError as error:
        resolved, messages = None, [*messages, Decision.of(error)]
    except (OverflowError, RecursionError):
        messages.append(_plan_error(_TOO_LARGE))
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
        platform=platform,
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
        work = workload_of(
            setup.family,
            resolved.model,
            batch=resolved.micro_batch_size,
            resolution=setup.resolution,
            frames=setup.frames_of_clips,
            frozen_bytes=0,
            gradient_checkpointing=setup.gradient_checkpointing,
            activation_offload=setup.activation_offload,
            ema=setup.ema,
        )
        return resolved.estimate(work), []
    except ZeroTuneError as error:
        return None, [Decision.of(setup_error(error))]
    except (OverflowError, RecursionError):
        return None, [_plan_error(_TOO_LARGE)]


def _resolve(
    plan: DeepSpeedPlan, setup: Setup, platform: Platform
) -> tuple[ResolvedPlan | None, list[Decision]]:
    model = _model(setup)
    context = Context(
        world_size=setup.world_size, platform=platform, model=model, run=_run(plan, setup)
    )
    found = plan.inspect(context)
    # A plan that cannot run has no choices to report.
    decisions = plan.decisions if found.resolved is None else found.resolved.decisions
    notable = notable_decisions(decisions, findings=found.findings)
    resolved = None if found.resolved is None else raised(ResolvedPlan, found.resolved)
    return resolved, [*found.refusals, *found.findings, *notable]


def _model(setup: Setup) -> ModelFacts | None:
    if not setup.family:
        return None
    setup.check_base()
    try:
        return as_facts(setup.family, lora=setup.lora, base_dtype=setup.base_dtype)
    except ZeroTuneError as error:
        raise setup_error(error) from None


def _remaining_errors(
    reading: Reading, plan: DeepSpeedPlan, state: FormState, setup: Setup, platform: Platform
) -> list[Decision]:
    """Return the errors that remain after a plan's invalid settings are removed."""
    found = plan.inspect(
        Context(world_size=setup.world_size),
        resolve_in=Context(world_size=setup.world_size, platform=platform, run=_run(plan, setup)),
        mistakes=reading.errors,
    )
    every = (*found.findings, *found.refusals)
    return [each for each in every if value_at(state.config, each.key) is not UNSET]


def _run(plan: DeepSpeedPlan, setup: Setup) -> RunFacts:
    if plan.scheduler is None:
        return RunFacts()
    # As transformers and accelerate do, an automatic warm-up is left out.
    warmup = 0 if AUTO in (plan.scheduler.params or {}).values() else None
    return RunFacts(total_steps=setup.total_steps, warmup_steps=warmup)


def preview_data(preview: Preview) -> dict[str, Any]:
    """Return a preview as a JSON-serialisable dict."""
    resolved, verdict = preview.resolved, preview.verdict
    return {
        "valid": preview.plan is not None,
        "runs": verdict.runs,
        "verdict": attrs.asdict(verdict),
        "title": describe(resolved) if resolved is not None and verdict.runs else None,
        "messages": [message_data(message) for message in preview.messages],
        "outputs": preview._outputs(),
        "effective": preview._effective(),
        "memory": preview._memory(),
        "time": preview._time(),
        "optimizers": preview._optimizers(),
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
    here = installed_packages()
    names = ("runs", "status", "reason", "alternative", "implementation")
    found = []
    for name, entry in OPTIMIZERS.items():
        answer = OptimizerResolver.capability(
            name, stage=stage, offload=offload, precision=precision, platform=platform
        )
        about = {each: getattr(answer, each) for each in names}
        found.append({"name": name, **about, "missing": missing_package(entry, here)})
    return found
