"""``Fit my card``: what is advised for a form, and the form each candidate leads to."""

from __future__ import annotations

from typing import Any, Final

import attrs

from zerotune.builder.forms import FormState, read_plan
from zerotune.builder.preview import Machines, Setup, read_setup
from zerotune.errors import InvalidValueError, NothingFitsError
from zerotune.plan import Candidate, DeepSpeedPlan
from zerotune.plan.model import PRECISIONS
from zerotune.plan.text import FOREMOST, candidate_data, foremost, seconds_words

_FROM_ADVICE: Final = ("zero_optimization", "aio")


def advise(state: FormState, machines: Machines) -> dict[str, Any]:
    """What fits the setup of a form, best first, each with the form it would lead to."""
    setup, wrong = read_setup(state.setup)
    if wrong:
        raise wrong[0]
    if not setup.family:
        raise InvalidValueError(
            "is needed to know what fits", key="setup.family", fix="choose a model family"
        )
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
            ema=setup.ema,
            platform=machines.this() if setup.this_machine else None,
            **_wishes(state),
        )
    except NothingFitsError as error:
        nearest = _offered(error.nearest, state, setup)
        return {"fits": False, "reason": error.reason, "fix": error.fix, "nearest": nearest}
    shown = foremost(advice, FOREMOST)

    def offered(candidate: Candidate) -> dict[str, Any]:
        # By identity: two candidates may be equal in all that they hold.
        first = any(candidate is one for one in shown)
        return {**_offered(candidate, state, setup), "foremost": first}

    return {
        "fits": True,
        "chosen": offered(advice.chosen),
        "runners_up": [offered(one) for one in advice.runners_up],
        "rejected": [offered(one) for one in advice.rejected],
    }


def _wishes(state: FormState) -> dict[str, Any]:
    """What of the form advice has to respect: batch, accumulation, precision, optimizer."""
    plan = read_plan(state).plan
    if plan is None:
        return {}
    wishes: dict[str, Any] = {}
    for name, value in (
        ("batch", plan.train_micro_batch_size_per_gpu),
        ("gradient_accumulation_steps", plan.gradient_accumulation_steps),
    ):
        if isinstance(value, int):
            wishes[name] = value
    if plan.precision in PRECISIONS:
        wishes["precision"] = plan.precision
    if plan.optimizer_name is not None:
        wishes["optimizer"] = plan.optimizer_name
    return wishes


def _offered(candidate: Candidate, state: FormState, setup: Setup) -> dict[str, Any]:
    data = candidate_data(candidate)
    del data["plan"]
    seconds = "" if candidate.time is None else seconds_words(candidate.time.expected)
    return {
        **data,
        "seconds": seconds,
        "state": _merged(candidate, state, setup).data(),
    }


def _merged(candidate: Candidate, state: FormState, setup: Setup) -> FormState:
    """The form with the candidate's stage, offload and batch; all else stays as it is.

    The ZeRO section is replaced as a whole: a bucket size of before would undo what was counted.
    """
    advised = candidate.plan.to_dict()
    config = {key: value for key, value in state.config.items() if key not in _FROM_ADVICE}
    for key, value in advised.items():
        if key in _FROM_ADVICE or key not in config:
            config[key] = value
    folder = _swap_folder(state)
    if folder is not None:
        for section in config["zero_optimization"].values():
            if isinstance(section, dict) and section.get("device") == "nvme":
                section.setdefault("nvme_path", folder)
    around = {
        **state.setup,
        "gradient_checkpointing": candidate.gradient_checkpointing,
        "activation_offload": candidate.activation_offload,
    }
    around.setdefault("world_size", setup.world_size)
    return attrs.evolve(state, config=config, setup=around)


def _swap_folder(state: FormState) -> str | None:
    """A folder for swap files that the form names already."""
    zero = state.config.get("zero_optimization")
    for name in ("offload_optimizer", "offload_param"):
        section = zero.get(name) if isinstance(zero, dict) else None
        folder = section.get("nvme_path") if isinstance(section, dict) else None
        if isinstance(folder, str):
            return folder
    return None
