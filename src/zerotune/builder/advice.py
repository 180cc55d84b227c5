"""``Fit my card``: the advice for a form, and the form of each candidate."""

from __future__ import annotations

from typing import Any, Final

import attrs

from zerotune.builder.forms import FormState, read_plan
from zerotune.builder.preview import time_texts
from zerotune.builder.setup import Machines, Setup, read_setup, setup_error
from zerotune.errors import InvalidValueError, NothingFitsError, ZeroTuneError
from zerotune.plan import DeepSpeedPlan
from zerotune.plan.candidates import Candidate
from zerotune.plan.memory.rates import known_rates
from zerotune.plan.plan import Advice
from zerotune.plan.remedies import Remedy
from zerotune.plan.sections import PRECISIONS
from zerotune.plan.text.advice import candidate_data, candidates_data

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
        raise setup_error(error) from None
    return _advice_data(advice, state, setup)


def _no_fit_data(error: NothingFitsError, state: FormState, setup: Setup) -> dict[str, Any]:
    """Return the nearest plan and the remedies; remedies that fit come first."""
    remedies = [_remedy_data(one, state) for one in error.remedies]
    return {
        "fits": False,
        "reason": error.reason,
        "fix": error.more,
        "nearest": _candidate_form(error.nearest, candidate_data(error.nearest), state, setup),
        "remedies": sorted(remedies, key=lambda one: not one["fits"]),
    }


def _advice_data(advice: Advice, state: FormState, setup: Setup) -> dict[str, Any]:
    """Return the plans that a configuration file can express, each with its form."""
    # An optimizer that runs only with streamed weights leaves no other plan to choose.
    kept = tuple(one for one in advice.candidates if one.streamed is None or one is advice.chosen)
    advice = attrs.evolve(advice, candidates=kept)
    every = [
        _candidate_form(one, data, state, setup)
        for one, data in zip(kept, candidates_data(advice), strict=True)
    ]
    others = [one for one in every if not one["chosen"]]
    return {
        "fits": True,
        "chosen": next(one for one in every if one["chosen"]),
        "runners_up": [one for one in others if one["fits"]],
        "rejected": [one for one in others if not one["fits"]],
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
    if settings.pop("streamed", False):
        about = ", ".join(f"{name}={value!r}" for name, value in remedy.settings.items())
        label = f"{remedy.what} ({about}), only possible in a training script: {remedy.gain}"
        return {"label": label, "fits": False, "state": None}
    config, optimizer = state.config, settings.pop("optimizer", None)
    if optimizer is not None:
        section = config.get("optimizer")
        kept = section if isinstance(section, dict) else {}
        config = {**config, "optimizer": {**kept, "type": optimizer}}
        label = f"Use the optimizer {optimizer}"
    else:
        base = settings.get("base_dtype")
        beside = f", with the base model in {base}" if base else ""
        label = f"Train LoRA adapters of rank {settings['lora']} instead{beside}"
    remedy_form = attrs.evolve(state, config=config, setup={**state.setup, **settings})
    gain = f"fits: {remedy.gain}"
    return {"label": label, "gain": gain, "fits": True, "state": remedy_form.data()}


def _candidate_form(
    candidate: Candidate, data: dict[str, Any], state: FormState, setup: Setup
) -> dict[str, Any]:
    """Return a candidate and a form with its stage, offload and batch; other settings are kept.

    The ZeRO section is replaced as a whole, because an old bucket size would invalidate the
    estimate.
    """
    advised = data.pop("plan")
    kept = {key: value for key, value in state.config.items() if key not in _ADVISED_SECTIONS}
    config = {**advised, **kept}
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
