"""Memory estimates as data, text and Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, Final

import attrs

from zerotune.plan.explaining import describe
from zerotune.plan.markdown import table
from zerotune.plan.memory.bars import (
    Budget,
    component_letters,
    estimate_unit,
    fits,
    memory_bars,
)
from zerotune.plan.memory.sizes import format_size
from zerotune.plan.memory.values import (
    PHASES,
    PLACES,
    MemoryEstimate,
    MemoryItem,
    Phase,
    Place,
)
from zerotune.plan.memory.workload import Workload

_WIDTH: Final = 100
_EMA: Final = {"host": "in host memory", "device": "on the device", "nvme": "in files (NVMe)"}
DURING: Final[Mapping[Phase, str]] = {
    "initialization": "during set-up",
    "forward and backward": "in the forward and backward pass",
    "optimizer step": "in the optimizer step",
    "checkpoint": "while a checkpoint is written",
}
"""Each phase as an end of a sentence."""
PLACE_NAMES: Final[Mapping[Place, str]] = {
    "device": "device",
    "host": "host",
    "nvme": "NVMe",
}
"""Each place as it is written in a sentence."""


def estimate_data(estimate: MemoryEstimate) -> dict[str, Any]:
    """The estimate as plain data that JSON can hold; every size in bytes per rank."""
    resolved, model = estimate.resolved, estimate.resolved.model
    return {
        "plan": {
            "title": describe(resolved),
            "stage": resolved.stage,
            "uses_deepspeed": resolved.uses_deepspeed,
            "offload_optimizer": resolved.offload_optimizer,
            "offload_param": resolved.offload_param,
            "precision": resolved.precision,
            "world_size": resolved.world_size,
        },
        "model": model
        and {
            "name": model.name,
            "elements": model.numel,
            "trainable_elements": model.trainable_numel,
        },
        "workload": attrs.asdict(estimate.workload),
        "places": {place: _place_data(estimate, place) for place in PLACES},
        "pinned": estimate.pinned,
        "swap_traffic": attrs.asdict(estimate.swap_traffic),
        "notes": list(estimate.notes),
    }


def explain_estimate(estimate: MemoryEstimate, *, budget: Budget | None = None) -> str:
    """The estimate as text: one bar per place, then what each place holds.

    Args:
        estimate: What is needed.
        budget: Bytes per rank there are at each place; the bars are scaled to it.
    """
    lines = [
        *_wrapped(f"Memory per rank: {describe(estimate.resolved)}", indent="  "),
        *_wrapped(f"  {subject(estimate)}", indent="  "),
        "",
        memory_bars(estimate, budget=budget, width=_WIDTH),
    ]
    for place in PLACES:
        if any(item.place == place for item in estimate.items):
            lines.extend(["", *_place_lines(estimate, place)])
    lines.extend(_traffic_lines(estimate))
    lines.extend(line for note in estimate.notes for line in _wrapped(f"note: {note}", indent="  "))
    return "\n".join(lines)


def _traffic_lines(estimate: MemoryEstimate) -> list[str]:
    traffic = estimate.swap_traffic
    if not traffic.written:
        return []
    read, written = format_size(traffic.read), format_size(traffic.written)
    return _wrapped(
        f"  each optimizer step reads {read} from swap files and writes {written}", indent="  "
    )


def markdown_estimate(estimate: MemoryEstimate, *, budget: Budget | None = None) -> str:
    """The estimate as Markdown: a table of the places, and one of what each holds.

    Args:
        estimate: What is needed.
        budget: Bytes per rank there are at each place.
    """
    unit, size = estimate_unit(estimate)
    places = [
        (
            PLACE_NAMES[fit.place],
            f"{fit.needed / size:.2f}",
            "" if fit.available is None else f"{fit.available / size:.2f}",
            "" if fit.available is None else f"{(fit.available - fit.needed) / size:.2f}",
            estimate.peak(fit.place).phase,
        )
        for fit in fits(estimate, budget)
    ]
    header = ("place", f"peak, {unit}", f"budget, {unit}", f"left, {unit}", "when")
    parts = [
        f"## Memory per rank: {describe(estimate.resolved)}",
        f"For {subject(estimate)}.",
        table(header, places, numbers="lrrrl"),
        table(
            ("place", "component", f"size, {unit}", "held", "note"),
            [_component_row(item, size) for place in PLACES for item in _all_at(estimate, place)],
            numbers="llrll",
        ),
    ]
    return "\n\n".join(parts) + "\n"


def subject(estimate: MemoryEstimate) -> str:
    """The model and the workload in one line."""
    model = estimate.resolved.model
    named = f"{model.name} ({_millions(model.numel)} parameters), " if model else ""
    return named + describe_workload(estimate.workload)


def peak_words(estimate: MemoryEstimate, place: Place) -> str:
    """When a place holds most, as an end of a sentence."""
    if len(set(_totals(estimate, place).values())) == 1:
        return "at any time"
    return f"at the peak, {DURING[estimate.peak(place).phase]}"


def describe_workload(workload: Workload) -> str:
    """The workload in one line."""
    parts = [f"batch {workload.batch}"]
    if workload.width is None or workload.height is None:
        parts.append("activations not estimated")
    else:
        parts.append(f"{workload.width} x {workload.height} pixels")
        checkpointing = "with" if workload.gradient_checkpointing else "without"
        parts.append(f"{checkpointing} gradient checkpointing")
        if workload.gradient_checkpointing and workload.activation_offload:
            parts.append("block inputs on the host")
    if workload.ema != "none":
        parts.append(f"EMA {_EMA[workload.ema]}")
    return ", ".join(parts)


def _millions(count: int) -> str:
    return f"{count / 1e9:.2f} billion" if count >= 10**9 else f"{count / 1e6:.1f} million"


def _place_data(estimate: MemoryEstimate, place: Place) -> dict[str, Any]:
    peak = estimate.peak(place)
    return {
        "peak": peak.nbytes,
        "phase": peak.phase,
        "phases": _totals(estimate, place),
        "components": [
            {
                "component": item.component,
                "nbytes": item.nbytes,
                "pinned": item.pinned,
                "at_peak": peak.phase in item.phases,
                "phases": [phase for phase in PHASES if phase in item.phases],
                "note": item.note,
            }
            for item in _all_at(estimate, place)
        ],
    }


def _totals(estimate: MemoryEstimate, place: Place) -> dict[Phase, int]:
    return {phase: sum(item.nbytes for item in estimate.at(place, phase)) for phase in PHASES}


def _all_at(estimate: MemoryEstimate, place: Place) -> list[MemoryItem]:
    items = [item for item in estimate.items if item.place == place]
    return sorted(items, key=lambda item: -item.nbytes)


def _place_lines(estimate: MemoryEstimate, place: Place) -> Iterator[str]:
    unit, size = estimate_unit(estimate)
    peak = estimate.peak(place)
    letters = component_letters(estimate)
    name = PLACE_NAMES[place]
    yield f"{name}: {peak.nbytes / size:.2f} {unit} {peak_words(estimate, place)}"
    for item in peak.items:
        yield from _item_lines(letters[item.component], item, size, _remarks(item))
    others = [item for item in _all_at(estimate, place) if peak.phase not in item.phases]
    for item in others:
        yield from _item_lines(
            " ", item, size, f"only {_when(item)}; {_remarks(item)}".rstrip("; ")
        )
    totals = _totals(estimate, place)
    if len(set(totals.values())) == 1:
        return
    by_phase = ", ".join(f"{phase} {nbytes / size:.2f}" for phase, nbytes in totals.items())
    yield from _wrapped(f"    by phase, {unit}: {by_phase}", indent="      ")


def _item_lines(letter: str, item: MemoryItem, size: int, remarks: str) -> list[str]:
    start = f"  {letter} {item.nbytes / size:>9.2f}  {item.component:<18} "
    return _wrapped(start + remarks, indent=" " * len(start))


def _wrapped(line: str, *, indent: str) -> list[str]:
    # Blanks inside a line are columns; only what does not fit is broken.
    return textwrap.wrap(
        line, _WIDTH, subsequent_indent=indent, drop_whitespace=True, replace_whitespace=False
    )


def _remarks(item: MemoryItem) -> str:
    return ", ".join(part for part in (item.note, "pinned" if item.pinned else "") if part)


def _when(item: MemoryItem) -> str:
    held = [DURING[phase] for phase in PHASES if phase in item.phases]
    return " and ".join(held) or "never"


def _component_row(item: MemoryItem, size: int) -> tuple[str, ...]:
    held = [phase for phase in PHASES if phase in item.phases]
    return (
        PLACE_NAMES[item.place],
        item.component,
        f"{item.nbytes / size:.2f}",
        "always" if len(held) == len(PHASES) else ", ".join(held),
        _remarks(item),
    )
