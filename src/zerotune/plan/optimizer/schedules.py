"""Learning-rate schedules by name, with their arguments."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import attrs

from zerotune._util.text import did_you_mean, squash
from zerotune.errors import InvalidValueError, OptimizerError, writes
from zerotune.plan.optimizer.entries import Entry, Parameter, SchedulerSource, integer, number
from zerotune.plan.values import Choice

DEFAULT_SCHEDULER: Final = "WarmupLR"

SCHEDULER_TYPE: Final = "scheduler.type"


@attrs.frozen(kw_only=True)
class SchedulerEntry(Entry):
    """One schedule and its arguments; ``name`` is DeepSpeed's class or diffusers' name."""

    source: SchedulerSource = "deepspeed"
    """``"deepspeed"`` if DeepSpeed's class sets the learning rate, ``"zerotune"`` if zerotune
    does."""
    peak: str | None = None
    """Argument that sets the peak learning rate; ``None`` if the schedule scales the optimizer's
    rate."""


_WARMUP_STEPS: Final = integer("warmup_num_steps", 1000, low=0)
_TOTAL_STEPS: Final = integer("total_num_steps")
_WARMUP_TYPE: Final = Parameter(
    name="warmup_type", kind=Choice(choices=("log", "linear")), default="log"
)
_WARMUP: Final = (
    number("warmup_min_lr", 0.0),
    # No default: it is the optimizer's learning rate.
    number("warmup_max_lr", above=0),
    _WARMUP_STEPS,
    _WARMUP_TYPE,
)

_DEEPSPEED: Final = (
    SchedulerEntry(
        name="WarmupLR",
        summary="The learning rate rises to the peak and stays there",
        parameters=_WARMUP,
        peak="warmup_max_lr",
    ),
    SchedulerEntry(
        name="WarmupDecayLR",
        summary="The learning rate rises to the peak, then falls linearly",
        parameters=(_TOTAL_STEPS, *_WARMUP),
        peak="warmup_max_lr",
    ),
    SchedulerEntry(
        name="WarmupCosineLR",
        summary="The learning rate rises to the optimizer's rate, then falls along a cosine",
        parameters=(
            _TOTAL_STEPS,
            number("warmup_min_ratio", 0.0, high=1),
            _WARMUP_STEPS,
            number("cos_min_ratio", 1e-4, high=1),
            _WARMUP_TYPE,
        ),
    ),
)

_WARMUP_0: Final = integer("num_warmup_steps", 0, low=0)
_TRAINING_STEPS: Final = integer("num_training_steps")

_DIFFUSERS: Final = (
    SchedulerEntry(
        name="constant", summary="Constant learning rate", parameters=(), source="zerotune"
    ),
    SchedulerEntry(
        name="constant_with_warmup",
        summary="The learning rate rises to the optimizer's rate and stays there",
        parameters=(_WARMUP_0,),
        source="zerotune",
    ),
    SchedulerEntry(
        name="linear",
        summary="The learning rate rises to the optimizer's rate, then falls linearly to zero",
        parameters=(_WARMUP_0, _TRAINING_STEPS),
        source="zerotune",
    ),
    SchedulerEntry(
        name="cosine",
        summary="The learning rate rises to the optimizer's rate, then falls along a cosine",
        parameters=(_WARMUP_0, _TRAINING_STEPS, number("num_cycles", 0.5, above=0)),
        source="zerotune",
    ),
    SchedulerEntry(
        name="cosine_with_restarts",
        summary="The learning rate rises to the optimizer's rate, then falls along several cosines",
        parameters=(
            _WARMUP_0,
            _TRAINING_STEPS,
            integer("num_cycles", 1),
        ),
        source="zerotune",
    ),
    SchedulerEntry(
        name="polynomial",
        summary="The learning rate rises to the optimizer's rate, then falls to lr_end along a "
        "polynomial",
        parameters=(
            _WARMUP_0,
            _TRAINING_STEPS,
            number("lr_end", 1e-7),
            number("power", 1.0, above=0),
        ),
        source="zerotune",
    ),
)

SCHEDULERS: Final[Mapping[str, SchedulerEntry]] = MappingProxyType(
    {entry.name: entry for entry in (*_DEEPSPEED, *_DIFFUSERS)}
)
"""All schedules by name."""

_BY_WORD: Final = {squash(name): name for name in SCHEDULERS}

_Closest = tuple[tuple[str, ...], str]
"""Names of schedules, and a remark."""
_CONSTANT: Final = ("WarmupLR",), " with warmup_num_steps 0, which keeps the learning rate constant"
_COSINES: Final = ("cosine", "WarmupCosineLR")
_DECAY: Final = ("WarmupDecayLR",)

_FOREIGN: Final[Mapping[str, _Closest]] = {
    "constantlr": _CONSTANT,
    "none": _CONSTANT,
    "linearlr": (("WarmupLR",), ' with warmup_type "linear"'),
    "linearwithwarmup": (_DECAY, ' with warmup_type "linear"'),
    "polynomiallr": (_DECAY, " (power 1)"),
    "cosinewithwarmup": (_COSINES, ""),
    "cosineannealing": (_COSINES, ""),
    "cosineannealinglr": (_COSINES, ""),
    "cosineannealingwarmrestarts": (_COSINES, " (one cycle, no restart)"),
    "onecycle": (_COSINES, ""),
    "onecyclelr": (_COSINES, ""),
    "cycliclr": (_COSINES, ""),
    "lrrangetest": (("WarmupLR",), ' with warmup_type "linear" and as many steps as the test'),
    "steplr": (_DECAY, ""),
    "multisteplr": (_DECAY, ""),
    "exponentiallr": (_DECAY, ""),
    "piecewiseconstant": (_DECAY, ""),
    "reducelronplateau": (_DECAY, " (no schedule here depends on the loss)"),
    "lambdalr": ((), "one of DeepSpeed's schedules"),
    "sequentiallr": ((), "one of DeepSpeed's schedules"),
}
"""Names of schedules that zerotune lacks, with the closest schedule."""


def canonical_schedule(name: str) -> str | None:
    """Return the canonical name of a schedule in any spelling; ``None`` if unknown."""
    return _BY_WORD.get(_word(name))


def _word(name: str) -> str:
    return squash(name.rpartition(".")[2])


def normalise_scheduler_name(name: Any, *, key: str = SCHEDULER_TYPE) -> str:
    """Return the canonical name of a schedule, ignoring case and punctuation.

    Args:
        name: Name as written (``"warmup_lr"``, ``"WarmupLR"``).
        key: Path of the setting that contains the name, for messages.

    Raises:
        OptimizerError: The name is unknown; the message suggests the closest name.
        InvalidValueError: ``name`` is not text.
    """
    if not isinstance(name, str) or not name.strip():
        raise InvalidValueError(
            "a schedule name must be text", 'write for example "WarmupLR"', key, name
        )
    canonical = canonical_schedule(name)
    if canonical is not None:
        return canonical
    if _word(name) in _FOREIGN:
        names, remark = _FOREIGN[_word(name)]
        raise OptimizerError(
            "zerotune has no such schedule",
            f"write {' or '.join(names)}{remark}",
            key,
            name,
            edits=writes(*names),
        )
    close = did_you_mean(name, SCHEDULERS)
    known = ", ".join(SCHEDULERS)
    raise OptimizerError(
        "no schedule has this name",
        f"did you mean {' or '.join(close)}? Known names: {known}"
        if close
        else f"use one of {known}",
        key,
        name,
        edits=writes(*close),
    )
