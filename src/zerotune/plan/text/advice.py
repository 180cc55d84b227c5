"""Advice, and predicted times of steps, as reports and as data."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import attrs

from zerotune._util.table import Line, Page, Table, brief_of, page_of
from zerotune._util.text import format_size
from zerotune.plan.advise import Advised
from zerotune.plan.candidates import Budget, Candidate, machine_needs
from zerotune.plan.memory.items import PLACES, Estimate, Place
from zerotune.plan.memory.time import StepTime
from zerotune.plan.text.memory import (
    PLACE_NAMES,
    RankBudget,
    Sizes,
    estimate_data,
    memory_table,
    sizes,
    subject,
)
from zerotune.plan.text.plan import describe

FOREMOST: Final = 5
"""Default number of candidates in a report."""


_GIB: Final = 1024**3


def advice_data(advice: Advised) -> dict[str, Any]:
    """Return the advice as a JSON-serialisable dict; sizes are in bytes."""
    return {
        "fits": True,
        "plan": advice.chosen.plan.to_dict(),
        "title": describe(advice.chosen.estimate.resolved),
        "streamed": advice.streamed and attrs.asdict(advice.streamed),
        "update": advice.chosen.update_name,
        "budget": {**places_of(advice.budget), "reserve": advice.budget.reserve},
        "headroom": advice.headroom,
        "estimate": estimate_data(advice.chosen.estimate),
        "candidates": [
            {"chosen": one is advice.chosen, **candidate_data(one)} for one in advice.candidates
        ],
    }


def candidate_data(candidate: Candidate) -> dict[str, Any]:
    """Return ``candidate`` as a JSON-serialisable dict; sizes are in bytes."""
    return {
        "title": candidate.title,
        "fits": candidate.fits,
        "gradient_checkpointing": candidate.gradient_checkpointing,
        "activation_offload": candidate.activation_offload,
        "streamed": candidate.streamed and attrs.asdict(candidate.streamed),
        "update": candidate.update_name,
        "needs": places_of(candidate.estimate),
        "shortfalls": dict(_shortfalls(candidate)),
        "reason": candidate.reason,
        "time": None if candidate.time is None else time_data(candidate.time),
        "plan": candidate.plan.to_dict(),
    }


def time_data(time: StepTime) -> dict[str, Any]:
    """Return a predicted step as a JSON-serialisable dict; times are in seconds."""
    return {
        "seconds": time.seconds,
        "hidden_seconds": time.hidden_seconds,
        "eager_seconds": time.eager_seconds,
        "expected_seconds": time.expected,
        "schedule": time.schedule,
        "phases": time.phases,
        "bound": time.bound.what,
        "origin": time.origin,
        "sources": time.sources,
        "notes": list(time.notes),
        "published_spread": time.published_spread,
    }


def time_words(time: StepTime) -> str:
    """Describe a predicted step: its time, its slowest part, and the origin of hardware rates."""
    bound = f"longest part: {time.bound.what}, {seconds_words(time.bound.seconds)}"
    expected, plain = seconds_words(time.expected), seconds_words(time.seconds)
    overlaps = time.schedule != "in turn"
    hidden = f" ({plain} without overlapping the optimizer step)" if overlaps else ""
    published = ""
    if time.published_spread is not None:
        low, high = (f"{100 * one:+.0f}" for one in time.published_spread)
        published = f", published runs lie {low} to {high} % beside predictions"
    return f"{expected} per step predicted{hidden}{published}; {bound}; rates: {time.origin}"


def seconds_words(seconds: float) -> str:
    """Format a duration of ``seconds`` in seconds or milliseconds."""
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1000 * seconds:.1f} ms"


def advice_page(advice: Advised, *, most: int | None = None) -> Page:
    """Return a report of advice: the choice with its reason, free memory, and other candidates.

    Args:
        advice: The advice.
        most: Maximum number of candidates; ``None`` shows all.
    """
    chosen, reserve = advice.chosen, advice.budget.reserve
    budget, time, estimate = places_of(advice.budget), chosen.time, chosen.estimate
    device = f"{format_size(budget['device'])} of device memory" if budget["device"] else "no GPU"
    host = format_size(budget["host"])
    nvme = f"{format_size(budget['nvme'])} of NVMe" if budget["nvme"] else "no NVMe"
    kept = f", {reserve:.0%} of device and host kept free" if reserve else ""
    headroom = [(place, advice.headroom[place]) for place in PLACES if budget[place]]
    every = advice.candidates if most is None else foremost(advice, most)
    count = len(advice.candidates)
    counted = "Candidates" if len(every) == count else f"{len(every)} of {count} candidates"
    return Page(
        blocks=(
            Line(f"Advice for {device}, {host} of host memory, {nvme}{kept}", style="title"),
            Line(subject(estimate), indent=2),
            Line(""),
            Line(describe(estimate.resolved), mark="Chosen:", style="good"),
            Line(chosen.reason, indent=2),
            Line(f"headroom: {sizes(headroom)}", indent=2),
            *([] if time is None else [Line(time_words(time), indent=2)]),
            Line(""),
            memory_table(estimate, rank_budget(budget, estimate)),
            Line(""),
            Line(
                f"{counted} in order of preference, those that fit first; GiB per rank:",
                style="title",
            ),
            _candidates_table(every, chosen=chosen),
        )
    )


def nearest_page(candidate: Candidate, *, budget: Sizes) -> Page:
    """Return a report of the plan that comes closest to fitting, and of the memory it lacks.

    Args:
        candidate: The candidate in ``NothingFitsError.nearest``.
        budget: Available bytes, as a mapping with the keys ``"device"``, ``"host"`` and ``"nvme"``;
            all ranks of a machine share host and NVMe memory.
    """
    return Page(
        blocks=(
            Line(_title(candidate), mark="Nearest:", style="warning"),
            Line(f"missing: {sizes(_shortfalls(candidate))}", indent=2),
            Line(candidate.reason, indent=2),
            Line(""),
            memory_table(candidate.estimate, nearest_budget(candidate, budget=budget)),
        )
    )


def nearest_budget(candidate: Candidate, *, budget: Sizes) -> RankBudget:
    """Return the bytes that each rank may use if it trains with the candidate's plan.

    Args:
        candidate: The candidate in ``NothingFitsError.nearest``.
        budget: Available bytes, as a mapping with the keys ``"device"``, ``"host"`` and ``"nvme"``;
            all ranks of a machine share host and NVMe memory.
    """
    needs = machine_needs(candidate.estimate)
    # A reserve is kept free, so less memory is usable than there is.
    usable = {place: needs[place] - missing for place, missing in candidate.shortfalls.items()}
    return rank_budget({**budget, **usable}, candidate.estimate)


def rank_budget(budget: Sizes, estimate: Estimate) -> RankBudget:
    """Return the bytes that one rank may use; ranks of a machine share its RAM and NVMe.

    Args:
        budget: Available bytes, as a mapping with the keys ``"device"``, ``"host"`` and ``"nvme"``;
            all ranks of a machine share host and NVMe memory.
        estimate: Estimate whose workload states the number of ranks per machine.
    """
    ranks = estimate.workload.ranks_per_machine or estimate.resolved.world_size
    return {place: size if place == "device" else size // ranks for place, size in budget.items()}


def _candidates_table(candidates: Sequence[Candidate], *, chosen: Candidate) -> Table:
    """Return a table of candidates: the choice, others that fit, then those that lack memory.

    Sentences that the report already contains are omitted.
    """
    said = set(chosen.reasons)

    def row(one: Candidate) -> tuple[str, ...]:
        state = "chosen" if one is chosen else "fits" if one.fits else "refused"
        missing = _shortfalls(one)
        lacks = [f"missing {sizes(missing)}"] if missing else []
        new = [each for each in one.reasons if each not in said]
        said.update(new)
        why = "; ".join(lacks + new)
        return (
            "too big" if state == "refused" and missing else state,
            *(f"{size / _GIB:.2f}" for size in places_of(one.estimate).values()),
            f"{one.time.expected:.2f}" if one.time else "",
            f"{_title(one)}:\n{why}" if why else _title(one),
        )

    styles = {"chosen": "passed", "fits": "good"}
    first = sorted(candidates, key=lambda one: (one is not chosen, not one.fits))
    return Table(
        rows=tuple(map(row, first)),
        head=("", *PLACE_NAMES.values(), "s/step", "plan"),
        align="lrrrr",
        style=lambda row: styles.get(row[0], ""),
    )


def foremost(advice: Advised, most: int) -> tuple[Candidate, ...]:
    """Select at most ``most`` candidates of ``advice``, in order of preference.

    The selection contains the chosen candidate, other candidates that fit, and the candidate that
    lacks the least memory.
    """

    def lacking(candidate: Candidate) -> int:
        return sum(candidate.shortfalls.values())

    others = [one for one in advice.candidates if one is not advice.chosen]
    fitting = [one for one in others if one.fits]
    short = sorted((one for one in others if _shortfalls(one)), key=lacking)
    # One row is reserved for the candidate that lacks least, which is as informative as a fit.
    fitting = fitting[: most - 1 - bool(short)]
    kept = [advice.chosen, *fitting, *short][:most]
    return tuple(one for one in advice.candidates if any(one is other for other in kept))


def _title(candidate: Candidate) -> str:
    kind = "with" if candidate.gradient_checkpointing else "without"
    offload = " and activation offload" if candidate.activation_offload else ""
    return f"{candidate.title}, {kind} checkpointing{offload}"


def places_of(sizes: Budget | Estimate) -> dict[Place, int]:
    """Bytes by place."""
    return {"device": sizes.device, "host": sizes.host, "nvme": sizes.nvme}


def _shortfalls(candidate: Candidate) -> list[tuple[Place, int]]:
    short = candidate.shortfalls
    return [(place, short[place]) for place in PLACES if place in short]


def _brief(advice: Advised) -> str:
    plan = describe(advice.chosen.estimate.resolved)
    return f"{plan}; of {len(advice.candidates)} candidates"


brief_of.register(Advised, _brief)


page_of.register(Advised, partial(advice_page, most=FOREMOST))
