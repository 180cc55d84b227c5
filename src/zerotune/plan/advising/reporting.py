"""Advice as data, text and Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from typing import Any, Final

from zerotune.plan.advising.values import Advice, Budget, Candidate, machine_needs
from zerotune.plan.explaining import describe
from zerotune.plan.markdown import cell, table
from zerotune.plan.memory.bars import Budget as RankBudget
from zerotune.plan.memory.bars import memory_bars
from zerotune.plan.memory.reporting import PLACE_NAMES, estimate_data, subject
from zerotune.plan.memory.sizes import format_size
from zerotune.plan.memory.values import PLACES, MemoryEstimate, Place

Sizes = Mapping[Place, int]
"""Bytes of each kind of memory."""

_WIDTH: Final = 100
_REASON: Final = 12
_GIB: Final = 1024**3


def advice_data(advice: Advice) -> dict[str, Any]:
    """The advice as plain data that JSON can hold; every size in bytes."""
    return {
        "fits": True,
        "plan": advice.plan.to_dict(),
        "title": describe(advice.resolved),
        "budget": {**_places(advice.budget), "reserve": advice.budget.reserve},
        "headroom": advice.headroom,
        "estimate": estimate_data(advice.estimate),
        "candidates": [
            {"chosen": one is advice.chosen, **candidate_data(one)} for one in advice.candidates
        ],
    }


def candidate_data(candidate: Candidate) -> dict[str, Any]:
    """One candidate as plain data that JSON can hold; every size in bytes."""
    return {
        "title": candidate.title,
        "fits": candidate.fits,
        "gradient_checkpointing": candidate.gradient_checkpointing,
        "activation_offload": candidate.activation_offload,
        "needs": _places(candidate.estimate),
        "shortfalls": dict(_missing(candidate)),
        "reason": candidate.reason,
        "plan": candidate.plan.to_dict(),
    }


def explain_advice(advice: Advice) -> str:
    """The advice as text: what was chosen and why, what is left, and the other candidates."""
    lines = [
        *_wrapped(f"Advice for {_budget_words(advice.budget)}"),
        *_wrapped(subject(advice.estimate), indent=2),
        "",
        *_wrapped(f"Chosen: {describe(advice.resolved)}"),
        *_wrapped(advice.chosen.reason, indent=2),
        *_wrapped(f"headroom: {_sizes(_headroom(advice))}", indent=2),
        "",
        memory_bars(advice.estimate, budget=rank_budget(_places(advice.budget), advice.estimate)),
        "",
        *_candidate_lines(advice),
    ]
    return "\n".join(lines)


def markdown_advice(advice: Advice) -> str:
    """The advice as Markdown: what was chosen, and a table of the candidates."""
    rows = [
        (
            _state(one, one is advice.chosen),
            _title(one),
            *[f"{size / _GIB:.2f}" for size in _places(one.estimate).values()],
            _sizes(_missing(one)),
            one.reason,
        )
        for one in advice.candidates
    ]
    header = ("", "plan", "device, GiB", "host, GiB", "NVMe, GiB", "missing", "why")
    parts = [
        f"# Advice for {cell(_budget_words(advice.budget))}",
        f"For {cell(subject(advice.estimate))}.",
        f"**Chosen:** {cell(describe(advice.resolved))}.",
        f"Why: {cell(advice.chosen.reason).rstrip('.')}.",
        f"Headroom: {cell(_sizes(_headroom(advice)))}.",
        table(header, rows, numbers="llrrrll"),
    ]
    return "\n\n".join(parts) + "\n"


def explain_nearest(candidate: Candidate, *, budget: Sizes) -> str:
    """What comes nearest when nothing fits, and what it lacks, as text.

    Args:
        candidate: What ``NothingFitsError.nearest`` holds.
        budget: Bytes there are of each kind of memory, those of the host for all ranks.
    """
    lines = [
        *_wrapped(f"Nearest: {_title(candidate)}"),
        *_wrapped(f"missing: {_sizes(_missing(candidate))}", indent=2),
        *_wrapped(candidate.reason, indent=2),
        "",
        memory_bars(candidate.estimate, budget=nearest_budget(candidate, budget=budget)),
    ]
    return "\n".join(lines)


def nearest_budget(candidate: Candidate, *, budget: Sizes) -> RankBudget:
    """What one rank of a candidate that does not fit may use.

    Args:
        candidate: What ``NothingFitsError.nearest`` holds.
        budget: Bytes there are of each kind of memory, those of the host for all ranks.
    """
    needs = machine_needs(candidate.estimate)
    # A part of the memory is kept free, so that less may be used than there is.
    usable = {place: needs[place] - missing for place, missing in candidate.shortfalls.items()}
    return rank_budget({**budget, **usable}, candidate.estimate)


def rank_budget(budget: Sizes, estimate: MemoryEstimate) -> RankBudget:
    """What one rank may use: the ranks of a machine share its RAM and its files.

    Args:
        budget: Bytes per device, and of RAM and files for all ranks of a machine.
        estimate: Knows how many ranks share them.
    """
    ranks = estimate.workload.ranks_per_machine or estimate.resolved.world_size
    return {place: size if place == "device" else size // ranks for place, size in budget.items()}


def _candidate_lines(advice: Advice) -> list[str]:
    lines = [
        "Candidates, in order of preference; GiB per rank:",
        f"  {'':<8}{'device':>9}{'host':>9}{'NVMe':>9}  plan",
    ]
    for one in advice.candidates:
        sizes = "".join(f"{size / _GIB:>9.2f}" for size in _places(one.estimate).values())
        start = f"  {_state(one, one is advice.chosen):<8}{sizes}  "
        missing = _sizes(_missing(one))
        told = [f"missing {missing}"] if missing else []
        lines += _wrapped(start + _title(one), hang=len(start))
        lines += _wrapped("; ".join([*told, one.reason]), indent=_REASON, hang=0)
    return lines


def _state(candidate: Candidate, chosen: bool) -> str:
    if chosen:
        return "chosen"
    if candidate.fits:
        return "fits"
    return "too big" if _missing(candidate) else "refused"


def _title(candidate: Candidate) -> str:
    if "checkpointing" in candidate.title:
        return candidate.title
    kind = "with" if candidate.gradient_checkpointing else "without"
    offload = " and activation offload" if candidate.activation_offload else ""
    return f"{candidate.title}, {kind} checkpointing{offload}"


def _budget_words(budget: Budget) -> str:
    device, host = format_size(budget.device), format_size(budget.host)
    nvme = f"{format_size(budget.nvme)} of NVMe" if budget.nvme else "no NVMe"
    kept = f", {budget.reserve:.0%} of device and host kept free" if budget.reserve else ""
    return f"{device} of device memory, {host} of host memory, {nvme}{kept}"


def _places(sizes: Budget | MemoryEstimate) -> dict[Place, int]:
    return {"device": sizes.device, "host": sizes.host, "nvme": sizes.nvme}


def _headroom(advice: Advice) -> list[tuple[Place, int]]:
    budget = _places(advice.budget)
    return [(place, advice.headroom[place]) for place in PLACES if budget[place]]


def _missing(candidate: Candidate) -> list[tuple[Place, int]]:
    short = candidate.shortfalls
    return [(place, short[place]) for place in PLACES if place in short]


def _sizes(sizes: Iterable[tuple[Place, int]]) -> str:
    return ", ".join(f"{PLACE_NAMES[place]} {format_size(size)}" for place, size in sizes)


def _wrapped(text: str, *, indent: int = 0, hang: int = 2) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + hang),
        replace_whitespace=False,
    )
