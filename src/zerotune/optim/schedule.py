"""Learning-rate schedules, DeepSpeed's five and diffusers' six: names, arguments, and settling.

Steps are optimizer steps everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import attrs

from zerotune._util.text import did_you_mean, squash
from zerotune.decisions import Decision, Severity
from zerotune.errors import InvalidValueError, OptimizerError
from zerotune.optim.parameters import (
    Entry,
    Filled,
    Parameter,
    Sources,
    Suggestion,
    fill,
    flag,
    integer,
    number,
    reject_unknown,
)
from zerotune.plan.model import (
    OptimizerChoice,
    RunFacts,
    SchedulerChoice,
    SchedulerSource,
    is_auto,
)
from zerotune.plan.schedules import ONE_CYCLE_BETA2

DEFAULT_SCHEDULER: Final = "WarmupLR"

SECTION: Final = "scheduler.params"
TYPE_KEY: Final = "scheduler.type"

DEFAULT_WARMUP: Final = 500
"""Warm-up steps when nothing says how long the run is, and the most otherwise."""
WARMUP_SHARE: Final = 20
"""The default warm-up is at most one step in this many."""


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


def normalise_scheduler_name(name: Any, *, key: str = TYPE_KEY) -> str:
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
    word = squash(name.rpartition(".")[2])
    if word in _BY_WORD:
        return _BY_WORD[word]
    if word in _FOREIGN:
        raise OptimizerError(
            "it is a schedule of torch, whose classes DeepSpeed's engine does not step under ZeRO",
            key=key,
            value=name,
            fix=f"write {_FOREIGN[word]}",
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


# -- From a ``scheduler`` section to one ``SchedulerChoice``.


@attrs.frozen(kw_only=True)
class ScheduleRequest:
    """What is asked for."""

    name: str
    """Canonical name."""
    params: Mapping[str, Any]
    """Arguments as written; may hold ``"auto"``."""
    written: str | None = None
    """The name as written; ``None`` when nothing is configured."""
    overrides: Mapping[str, Any] = attrs.field(factory=dict)
    """Arguments that beat the written ones."""
    lr_overridden: bool = False
    """Whether the optimizer's learning rate was given to the resolver."""

    @property
    def entry(self) -> SchedulerEntry:
        """The schedule's entry."""
        return SCHEDULERS[self.name]


def settle_schedule(
    request: ScheduleRequest, optimizer: OptimizerChoice, run: RunFacts
) -> tuple[SchedulerChoice, tuple[Decision, ...]]:
    """Settle on a schedule.

    Args:
        request: What is asked for.
        optimizer: The optimizer it drives.
        run: What the run knows: ``total_steps`` and ``warmup_steps`` are used.

    Returns:
        The choice, every argument explicit, and why.

    Raises:
        OptimizerError: An argument is needed that neither the configuration nor the run says.
        UnknownKeyError: An argument the schedule does not have.
        InvalidValueError: An argument of the wrong type or out of range.
    """
    entry = request.entry
    filled = _complete(request, optimizer, run)
    _record_name(request, filled)
    _no_warmup(entry, filled, asked=request.written is not None)
    _compare_peak(entry, optimizer, filled)
    _compare_lengths(filled)
    if entry.name == "OneCycle":
        _one_cycle(optimizer, filled)
    filled.record_defaults(SECTION, entry.name, filled.defaulted)
    if entry.source == "zerotune":
        filled.record(
            TYPE_KEY,
            entry.name,
            entry.name,
            "DeepSpeed has no such class; zerotune steps diffusers' curve, once for each "
            "optimizer step",
        )
    choice = SchedulerChoice(name=entry.name, params=filled.values, source=entry.source)
    return choice, tuple(filled.decisions)


def per_group_schedule(
    choice: SchedulerChoice, optimizer: OptimizerChoice
) -> tuple[SchedulerChoice, tuple[Decision, ...]]:
    """Let zerotune step the curve where DeepSpeed's class would give all groups one rate.

    Args:
        choice: The schedule settled on.
        optimizer: The optimizer with its groups.
    """
    rates = {float(group.params.get("lr", optimizer.lr)) for group in optimizer.groups}
    if choice.source != "deepspeed" or not rates - {optimizer.lr}:
        return choice, ()
    decision = Decision(
        key=TYPE_KEY,
        before=choice.name,
        after=choice.name,
        reason=f"the groups' learning rates differ, and DeepSpeed's {choice.name} would set one "
        "for all of them; zerotune steps the same curve, scaled for each group",
    )
    return attrs.evolve(choice, source="zerotune"), (decision,)


def _complete(request: ScheduleRequest, optimizer: OptimizerChoice, run: RunFacts) -> Filled:
    entry = request.entry
    log = Filled()
    params = _scalars(_without_resume(request.params), optimizer)
    for given in (params, request.overrides):
        reject_unknown(given, entry.parameter_names, section=SECTION, owner=entry.name)
    sources = Sources(
        owner=entry.name,
        section=SECTION,
        written=_follow_override(request, params, optimizer, log),
        overrides=request.overrides,
        suggestions=_suggestions(entry, optimizer, run),
    )
    filled = fill(entry.parameters, sources)
    filled.decisions[:0] = log.decisions
    if request.written is None:
        _default_warmup(filled, run)
    return filled


def _record_name(request: ScheduleRequest, filled: Filled) -> None:
    name = request.name
    if request.written is None:
        filled.record(TYPE_KEY, None, name, f"no scheduler is configured; {name} is the default")
    elif request.written != name:
        filled.record(TYPE_KEY, request.written, name, "another spelling")


def _without_resume(params: Mapping[str, Any]) -> dict[str, Any]:
    """``last_batch_iteration`` continues a schedule in DeepSpeed; a checkpoint does it here."""
    kept = dict(params)
    start = kept.pop("last_batch_iteration", -1)
    if start != -1:
        raise InvalidValueError(
            "a schedule is continued by resuming from a checkpoint, which knows the step",
            key=f"{SECTION}.last_batch_iteration",
            value=start,
            fix="leave it out",
        )
    return kept


def _scalars(params: Mapping[str, Any], optimizer: OptimizerChoice) -> dict[str, Any]:
    """Unpack lists of one value per parameter group: there is one group."""
    plain: dict[str, Any] = {}
    for key, value in params.items():
        if isinstance(value, (list, tuple)):
            if len(value) != 1:
                raise InvalidValueError(
                    f"one value per parameter group, and {optimizer.name} has one group",
                    key=f"{SECTION}.{key}",
                    value=value,
                    fix="write one number",
                )
            plain[key] = value[0]
        else:
            plain[key] = value
    return plain


def _follow_override(
    request: ScheduleRequest, params: dict[str, Any], optimizer: OptimizerChoice, log: Filled
) -> dict[str, Any]:
    """An overridden learning rate would be in vain if the schedule kept its own peak."""
    peak = request.entry.peak
    if not request.lr_overridden or peak != "warmup_max_lr" or peak in request.overrides:
        return params
    written = params.get(peak)
    if written is None or is_auto(written) or written == optimizer.lr:
        return params
    log.record(
        f"{SECTION}.{peak}",
        written,
        optimizer.lr,
        "follows the learning rate given to OptimizerResolver(overrides=…)",
        "warning",
    )
    return {**params, peak: optimizer.lr}


def _suggestions(
    entry: SchedulerEntry, optimizer: OptimizerChoice, run: RunFacts
) -> dict[str, Suggestion]:
    found: dict[str, Suggestion] = {}
    if entry.peak is not None:
        # A peak that differs from the optimizer's lr gets a decision of its own.
        found[entry.peak] = Suggestion(value=optimizer.lr, source="the optimizer's lr", yields=True)
    if run.warmup_steps is not None:
        warmup = Suggestion(value=run.warmup_steps, source="the run (warmup_steps)")
        found |= dict.fromkeys(("warmup_num_steps", "num_warmup_steps"), warmup)
    if run.total_steps is not None:
        total = Suggestion(value=run.total_steps, source="the run (total_steps)")
        found |= dict.fromkeys(("total_num_steps", "num_training_steps"), total)
    return {key: value for key, value in found.items() if key in entry.parameter_names}


def _default_warmup(filled: Filled, run: RunFacts) -> None:
    """Length of the warm-up nobody asked for."""
    if "warmup_num_steps" not in filled.defaulted:
        return
    filled.defaulted.discard("warmup_num_steps")
    if run.total_steps is None:
        steps, reason = DEFAULT_WARMUP, "the run does not say how long it is"
    else:
        steps = min(DEFAULT_WARMUP, run.total_steps // WARMUP_SHARE)
        # DeepSpeed's shortest warm-up keeps two updates at the minimum.
        steps = 0 if steps < 2 else steps
        reason = f"5 % of the run's {run.total_steps} steps, at most {DEFAULT_WARMUP}"
    filled.values["warmup_num_steps"] = steps
    filled.record(f"{SECTION}.warmup_num_steps", None, steps, reason)


def _no_warmup(entry: SchedulerEntry, filled: Filled, *, asked: bool) -> None:
    """DeepSpeed refuses 0 warm-up steps, and its 1 still means two updates at the minimum."""
    values = filled.values
    if values.get("warmup_num_steps") != 0:
        return
    values["warmup_num_steps"] = 1
    reason = "DeepSpeed refuses 0; 1 is its shortest"
    if entry.name == "WarmupDecayLR":
        reason += ", and holds warmup_min_lr for the first two updates"
    severity: Severity = "warning" if asked else "note"
    filled.record(f"{SECTION}.warmup_num_steps", 0, 1, reason, severity)
    floor = {"WarmupLR": "warmup_min_lr", "WarmupCosineLR": "warmup_min_ratio"}.get(entry.name)
    if floor is None:
        return
    peak = values["warmup_max_lr"] if entry.name == "WarmupLR" else 1.0
    before = None if floor in filled.defaulted else values[floor]
    filled.defaulted.discard(floor)
    values[floor] = peak
    reason = "no warm-up: the schedule starts at its peak"
    if entry.name == "WarmupCosineLR":
        reason += "; DeepSpeed still runs the very first update at 0"
    filled.record(f"{SECTION}.{floor}", before, peak, reason)


def _compare_peak(entry: SchedulerEntry, optimizer: OptimizerChoice, filled: Filled) -> None:
    if entry.peak is None or filled.values[entry.peak] == optimizer.lr:
        return
    filled.record(
        "optimizer.params.lr",
        optimizer.lr,
        filled.values[entry.peak],
        f"{entry.name} sets the learning rate from {entry.peak} and ignores the optimizer's",
        "warning",
    )


def _compare_lengths(filled: Filled) -> None:
    values = filled.values
    key = "total_num_steps" if "total_num_steps" in values else "num_training_steps"
    total, warmup = values.get(key), values.get("warmup_num_steps", values.get("num_warmup_steps"))
    if values.get("lr_end") is not None and total == warmup:
        raise InvalidValueError(
            "polynomial divides by the steps after the warm-up, and there are none",
            key=f"{SECTION}.{key}",
            value=total,
            fix="make the schedule longer than its warm-up",
        )
    if total is not None and warmup is not None and total < warmup:
        filled.record(
            f"{SECTION}.{key}",
            total,
            total,
            f"kept, but the warm-up of {warmup} steps is longer than the whole schedule",
            "warning",
        )


def _one_cycle(optimizer: OptimizerChoice, filled: Filled) -> None:
    values = filled.values
    key = f"{SECTION}.cycle_momentum"
    betas = optimizer.params.get("betas")
    if values["cycle_momentum"] and betas is None:
        explicit = "cycle_momentum" not in filled.defaulted
        filled.defaulted.discard("cycle_momentum")
        values["cycle_momentum"] = False
        reason = f"{optimizer.name} has no betas, and DeepSpeed cycles nothing else"
        filled.record(
            key, True if explicit else None, False, reason, "warning" if explicit else "note"
        )
    elif values["cycle_momentum"]:
        filled.record(
            "optimizer.params.betas",
            betas,
            (values["cycle_min_mom"], ONE_CYCLE_BETA2),
            "OneCycle cycles the first beta and sets the second to 0.99; write cycle_momentum "
            "false to keep the optimizer's",
            "warning",
        )
    if values["decay_step_size"] == 0 and values["decay_lr_rate"] > 0:
        filled.record(
            f"{SECTION}.decay_lr_rate",
            values["decay_lr_rate"],
            values["decay_lr_rate"],
            "kept, but DeepSpeed does not decay while decay_step_size is 0",
            "warning",
        )
