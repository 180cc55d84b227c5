"""Learning-rate schedules by name: DeepSpeed's five and diffusers' six, in optimizer steps."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import attrs

from zerotune._util.text import did_you_mean, squash
from zerotune.errors import InvalidValueError, OptimizerError
from zerotune.optimizers.catalogue import Entry, Parameter, flag, integer, number
from zerotune.optimizers.choices import SchedulerSource

DEFAULT_SCHEDULER: Final = "WarmupLR"

SCHEDULER_TYPE: Final = "scheduler.type"


@attrs.frozen(kw_only=True)
class SchedulerEntry(Entry):
    """One schedule and its arguments; ``name`` is DeepSpeed's class or diffusers' name."""

    source: SchedulerSource = "deepspeed"
    """Who steps it: DeepSpeed's class, or zerotune's curve."""
    peak: str | None = None
    """Argument that holds the peak learning rate; ``None`` when the schedule scales the
    optimizer's own."""


_WARMUP_STEPS: Final = integer("warmup_num_steps", 1000, low=0)
_TOTAL_STEPS: Final = integer("total_num_steps")
_WARMUP_TYPE: Final = Parameter(
    name="warmup_type", type="str", default="log", choices=("log", "linear")
)
_WARMUP: Final = (
    number("warmup_min_lr", 0.0),
    # No default: it is the optimizer's learning rate.
    Parameter(name="warmup_max_lr", low=0, low_open=True),
    _WARMUP_STEPS,
    _WARMUP_TYPE,
)

_DEEPSPEED: Final = (
    SchedulerEntry(
        name="WarmupLR",
        summary="Rise to the peak, then stay there",
        parameters=_WARMUP,
        peak="warmup_max_lr",
    ),
    SchedulerEntry(
        name="WarmupDecayLR",
        summary="Rise to the peak, then fall in a straight line",
        parameters=(_TOTAL_STEPS, *_WARMUP),
        peak="warmup_max_lr",
    ),
    SchedulerEntry(
        name="WarmupCosineLR",
        summary="Rise to the optimizer's learning rate, then fall along a cosine",
        parameters=(
            _TOTAL_STEPS,
            number("warmup_min_ratio", 0.0, high=1),
            _WARMUP_STEPS,
            number("cos_min_ratio", 1e-4, high=1),
            _WARMUP_TYPE,
        ),
    ),
    SchedulerEntry(
        name="OneCycle",
        summary="One rise and fall, momentum the other way round, then a decay",
        parameters=(
            Parameter(name="cycle_min_lr", low=0, low_open=True),
            Parameter(name="cycle_max_lr", low=0, low_open=True),
            number("decay_lr_rate", 0.0),
            number("cycle_first_step_size", 2000.0, low_open=True),
            Parameter(name="cycle_second_step_size", default=None, low=0, nullable=True),
            integer("cycle_first_stair_count", 0, low=0),
            integer("cycle_second_stair_count", None, low=0, nullable=True),
            number("decay_step_size", 0.0),
            flag("cycle_momentum", default=True),
            number("cycle_min_mom", 0.8, high=1, high_open=True),
            number("cycle_max_mom", 0.9, high=1, high_open=True),
            number("decay_mom_rate", 0.0),
        ),
        peak="cycle_max_lr",
    ),
    SchedulerEntry(
        name="LRRangeTest",
        summary="Rise without end, to find the largest stable learning rate",
        parameters=(
            number("lr_range_test_min_lr", 1e-3, low_open=True),
            integer("lr_range_test_step_size", 2000),
            number("lr_range_test_step_rate", 1.0),
            flag("lr_range_test_staircase"),
        ),
    ),
)

_WARMUP_0: Final = integer("num_warmup_steps", 0, low=0)
_TRAINING_STEPS: Final = integer("num_training_steps")

_DIFFUSERS: Final = (
    SchedulerEntry(
        name="constant", summary="Stay at the learning rate", parameters=(), source="zerotune"
    ),
    SchedulerEntry(
        name="constant_with_warmup",
        summary="Rise to the learning rate, then stay there",
        parameters=(_WARMUP_0,),
        source="zerotune",
    ),
    SchedulerEntry(
        name="linear",
        summary="Rise to the learning rate, then fall to zero in a straight line",
        parameters=(_WARMUP_0, _TRAINING_STEPS),
        source="zerotune",
    ),
    SchedulerEntry(
        name="cosine",
        summary="Rise to the learning rate, then fall along a cosine",
        parameters=(_WARMUP_0, _TRAINING_STEPS, number("num_cycles", 0.5, low_open=True)),
        source="zerotune",
    ),
    SchedulerEntry(
        name="cosine_with_restarts",
        summary="Rise to the learning rate, then fall along a cosine, several times",
        parameters=(
            _WARMUP_0,
            _TRAINING_STEPS,
            integer("num_cycles", 1),
        ),
        source="zerotune",
    ),
    SchedulerEntry(
        name="polynomial",
        summary="Rise to the learning rate, then fall to lr_end by a power",
        parameters=(
            _WARMUP_0,
            _TRAINING_STEPS,
            number("lr_end", 1e-7),
            number("power", 1.0, low_open=True),
        ),
        source="zerotune",
    ),
)

SCHEDULERS: Final[Mapping[str, SchedulerEntry]] = MappingProxyType(
    {entry.name: entry for entry in (*_DEEPSPEED, *_DIFFUSERS)}
)
"""All schedules by name."""

_BY_WORD: Final = {squash(name): name for name in SCHEDULERS}

_CONSTANT: Final = "WarmupLR with warmup_num_steps 0, which holds the learning rate"
_COSINE: Final = "cosine or WarmupCosineLR"

_FOREIGN: Final[Mapping[str, str]] = {
    "constantlr": _CONSTANT,
    "none": _CONSTANT,
    "linearlr": 'WarmupLR with warmup_type "linear"',
    "linearwithwarmup": 'WarmupDecayLR with warmup_type "linear"',
    "polynomiallr": "WarmupDecayLR (power 1)",
    "cosinewithwarmup": _COSINE,
    "cosineannealing": _COSINE,
    "cosineannealinglr": _COSINE,
    "cosineannealingwarmrestarts": f"{_COSINE} (one cycle, no restart)",
    "onecyclelr": "OneCycle",
    "cycliclr": "OneCycle",
    "steplr": "WarmupDecayLR",
    "multisteplr": "WarmupDecayLR",
    "exponentiallr": "WarmupDecayLR",
    "piecewiseconstant": "WarmupDecayLR",
    "reducelronplateau": "WarmupDecayLR (no schedule here looks at the loss)",
    "lambdalr": "one of DeepSpeed's schedules",
    "sequentiallr": "one of DeepSpeed's schedules",
}
"""torch's and transformers' names, and the schedule that comes closest."""


def canonical_schedule(name: str) -> str | None:
    """Canonical name of a schedule, whatever its spelling; ``None`` if unknown."""
    return _BY_WORD.get(_word(name))


def _word(name: str) -> str:
    return squash(name.rpartition(".")[2])


def normalise_scheduler_name(name: Any, *, key: str = SCHEDULER_TYPE) -> str:
    """Canonical name of a schedule, whatever the case and punctuation of ``name``.

    Args:
        name: As written (``"warmup_lr"``, ``"WarmupLR"``).
        key: Where it was written, for the message.

    Raises:
        OptimizerError: A name of torch's, or one that nobody knows; the message suggests the
            closest.
        InvalidValueError: ``name`` is not text.
    """
    if not isinstance(name, str) or not name.strip():
        raise InvalidValueError(
            "a schedule is named by text", key=key, value=name, fix='write for example "WarmupLR"'
        )
    canonical = canonical_schedule(name)
    if canonical is not None:
        return canonical
    if _word(name) in _FOREIGN:
        raise OptimizerError(
            "it is a schedule of torch, whose classes DeepSpeed's engine does not step under ZeRO",
            key=key,
            value=name,
            fix=f"write {_FOREIGN[_word(name)]}",
        )
    close = did_you_mean(name, SCHEDULERS)
    known = ", ".join(SCHEDULERS)
    raise OptimizerError(
        "no schedule has this name",
        key=key,
        value=name,
        fix=f"did you mean {' or '.join(close)}? There are {known}"
        if close
        else f"use one of {known}",
    )
