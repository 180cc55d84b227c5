"""Advice, and predicted times of steps, as data, and as reports of these data."""

from __future__ import annotations

from collections.abc import Sequence
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
)
from zerotune.plan.text.plan import Data, describe

_FOREMOST: Final = 5
"""Number of candidates in a report."""
_GIB: Final = 1024**3


# -- Data.


def advice_data(advice: Advised) -> dict[str, Any]:
    """Return the advice as a JSON-serialisable dict; sizes are in bytes."""
    chosen, budget = advice.chosen, places_of(advice.budget)
    return {
        "fits": True,
        "plan": chosen.plan.to_dict(),
        "title": describe(chosen.estimate.resolved),
        "streamed": advice.streamed and attrs.asdict(advice.streamed),
        "update": chosen.update_name,
        "reason": chosen.reason,
        "budget": {**budget, "reserve": advice.budget.reserve},
        "headroom": advice.headroom,
        "time": None if chosen.time is None else time_data(chosen.time),
        "estimate": estimate_data(chosen.estimate, rank_budget(budget, chosen.estimate)),
        "candidates": candidates_data(advice),
    }


def candidates_data(advice: Advised) -> list[dict[str, Any]]:
    """Return the candidates as JSON-serialisable dicts.

    ``foremost`` marks five of them: the choice, others that fit, and the one that lacks least.

    Args:
        advice: The advice.
    """
    shown = _foremost(advice)
    return [
        {
            "chosen": one is advice.chosen,
            "foremost": any(one is each for each in shown),
            **candidate_data(one),
        }
        for one in advice.candidates
    ]


def _foremost(advice: Advised) -> list[Candidate]:
    others = [one for one in advice.candidates if one is not advice.chosen]
    fitting = [one for one in others if one.fits]
    short = [one for one in others if one.shortfalls]
    short.sort(key=lambda one: sum(one.shortfalls.values()))
    # One row is reserved for the candidate that lacks least, which is as informative as a fit.
    return [advice.chosen, *fitting[: _FOREMOST - 1 - bool(short)], *short][:_FOREMOST]


def candidate_data(candidate: Candidate) -> dict[str, Any]:
    """Return ``candidate`` as a JSON-serialisable dict; sizes are in bytes."""
    short = candidate.shortfalls
    return {
        "title": candidate.title,
        "fits": candidate.fits,
        "gradient_checkpointing": candidate.gradient_checkpointing,
        "activation_offload": candidate.activation_offload,
        "streamed": candidate.streamed and attrs.asdict(candidate.streamed),
        "update": candidate.update_name,
        "needs": places_of(candidate.estimate),
        "shortfalls": {place: short[place] for place in PLACES if place in short},
        "reason": candidate.reason,
        "reasons": list(candidate.reasons),
        "time": None if candidate.time is None else time_data(candidate.time),
        "plan": candidate.plan.to_dict(),
    }


def nearest_data(candidate: Candidate, reason: str, *, budget: Sizes) -> dict[str, Any]:
    """Return why no plan fits, and the plan that lacks least, as a JSON-serialisable dict.

    Args:
        candidate: The candidate in ``NothingFitsError.nearest``.
        reason: Why no plan fits.
        budget: Available bytes, as a mapping with the keys ``"device"``, ``"host"`` and ``"nvme"``;
            all ranks of a machine share host and NVMe memory.
    """
    return {
        "fits": False,
        "reason": reason,
        "nearest": candidate_data(candidate),
        "estimate": estimate_data(candidate.estimate, nearest_budget(candidate, budget=budget)),
    }


def time_data(time: StepTime) -> dict[str, Any]:
    """Return a predicted step as a JSON-serialisable dict; times are in seconds."""
    return {
        "seconds": time.seconds,
        "expected_seconds": time.expected,
        "schedule": time.schedule,
        "phases": time.phases,
        "bound": time.bound.what,
        "bound_seconds": time.bound.seconds,
        "origin": time.origin,
        "sources": time.sources,
        "notes": list(time.notes),
        "published_spread": time.published_spread,
    }


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


def places_of(sizes: Budget | Estimate) -> dict[Place, int]:
    """Bytes by place."""
    return {"device": sizes.device, "host": sizes.host, "nvme": sizes.nvme}


# -- Reports of the data.


def time_words(data: Data) -> str:
    """Describe a predicted step: its time, its slowest part, and the origin of hardware rates."""
    bound = f"longest part: {data['bound']}, {seconds_words(data['bound_seconds'])}"
    expected, plain = map(seconds_words, (data["expected_seconds"], data["seconds"]))
    overlaps = data["schedule"] != "in turn"
    hidden = f" ({plain} without overlapping the optimizer step)" if overlaps else ""
    published = ""
    if data["published_spread"] is not None:
        low, high = (f"{100 * one:+.0f}" for one in data["published_spread"])
        published = f", published runs lie {low} to {high} % beside predictions"
    return f"{expected} per step predicted{hidden}{published}; {bound}; rates: {data['origin']}"


def seconds_words(seconds: float) -> str:
    """Format a duration of ``seconds`` in seconds or milliseconds."""
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1000 * seconds:.1f} ms"


def advice_page(data: Data, *, every: bool = False) -> Page:
    """Return a report of ``advice_data``: the choice, its reason, free memory and candidates.

    Args:
        data: The advice.
        every: Whether to show all candidates, not only the foremost.
    """
    budget, estimate, reserve = data["budget"], data["estimate"], data["budget"]["reserve"]
    device = f"{format_size(budget['device'])} of device memory" if budget["device"] else "no GPU"
    host = format_size(budget["host"])
    nvme = f"{format_size(budget['nvme'])} of NVMe" if budget["nvme"] else "no NVMe"
    kept = f", {reserve:.0%} of device and host kept free" if reserve else ""
    headroom = [(place, data["headroom"][place]) for place in PLACES if budget[place]]
    shown = [one for one in data["candidates"] if every or one["foremost"]]
    count = len(data["candidates"])
    counted = "Candidates" if len(shown) == count else f"{len(shown)} of {count} candidates"
    return Page(
        blocks=(
            Line(f"Advice for {device}, {host} of host memory, {nvme}{kept}", style="title"),
            Line(estimate["subject"], indent=2),
            Line(""),
            Line(data["title"], mark="Chosen:", style="good"),
            Line(data["reason"], indent=2),
            Line(f"headroom: {sizes(headroom)}", indent=2),
            *([Line(time_words(data["time"]), indent=2)] if data["time"] else []),
            Line(""),
            memory_table(estimate),
            Line(""),
            Line(
                f"{counted} in order of preference, those that fit first; GiB per rank:",
                style="title",
            ),
            _candidates_table(shown),
        )
    )


def nearest_page(data: Data) -> Page:
    """Return a report of ``nearest_data``."""
    nearest = data["nearest"]
    return Page(
        blocks=(
            Line(data["reason"], mark="error:", style="error"),
            Line(""),
            Line(_title(nearest), mark="Nearest:", style="warning"),
            Line(f"missing: {sizes(nearest['shortfalls'].items())}", indent=2),
            Line(nearest["reason"], indent=2),
            Line(""),
            memory_table(data["estimate"]),
        )
    )


def _candidates_table(candidates: Sequence[Data]) -> Table:
    """Return a table of candidates: the choice, others that fit, then those that lack memory.

    Sentences that the report already contains are omitted.
    """
    said = {reason for one in candidates if one["chosen"] for reason in one["reasons"]}

    def row(one: Data) -> tuple[str, ...]:
        state = "chosen" if one["chosen"] else "fits" if one["fits"] else "refused"
        missing = one["shortfalls"]
        lacks = [f"missing {sizes(missing.items())}"] if missing else []
        new = [each for each in one["reasons"] if each not in said]
        said.update(new)
        why = "; ".join(lacks + new)
        return (
            "too big" if state == "refused" and missing else state,
            *(f"{size / _GIB:.2f}" for size in one["needs"].values()),
            f"{one['time']['expected_seconds']:.2f}" if one["time"] else "",
            f"{_title(one)}:\n{why}" if why else _title(one),
        )

    styles = {"chosen": "passed", "fits": "good"}
    first = sorted(candidates, key=lambda one: (not one["chosen"], not one["fits"]))
    return Table(
        rows=tuple(map(row, first)),
        head=("", *PLACE_NAMES.values(), "s/step", "plan"),
        align="lrrrr",
        style=lambda row: styles.get(row[0], ""),
    )


def _title(candidate: Data) -> str:
    kind = "with" if candidate["gradient_checkpointing"] else "without"
    offload = " and activation offload" if candidate["activation_offload"] else ""
    return f"{candidate['title']}, {kind} checkpointing{offload}"


def _brief(advice: Advised) -> str:
    plan = describe(advice.chosen.estimate.resolved)
    return f"{plan}; of {len(advice.candidates)} candidates"


brief_of.register(Advised, _brief)
page_of.register(Advised, lambda advice: advice_page(advice_data(advice)))
