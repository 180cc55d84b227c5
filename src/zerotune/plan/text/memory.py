"""Memory estimates as data, and as reports of these data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import attrs

from zerotune._util.table import Block, Line, Page, Table, brief_of, page_of
from zerotune._util.text import common_unit, counted, format_size
from zerotune.plan.memory.items import DURING, PHASES, PLACES, Estimate, Place, Workload
from zerotune.plan.memory.traffic import swap_traffic
from zerotune.plan.text.plan import Data, describe

WIDTH: Final = 100
"""Width of estimates and advice in characters if the terminal width is unknown."""

RankBudget = Mapping[Place, int]
"""Bytes available to each rank, as a mapping with the keys ``"device"``, ``"host"`` and ``"nvme"``;
a missing key means no limit."""
Sizes = Mapping[Place, int]
"""Bytes by place."""

PLACE_NAMES: Final[Mapping[Place, str]] = {"device": "device", "host": "host", "nvme": "NVMe"}
"""Names that reports use for device, host and NVMe memory."""
_EMA: Final = {"host": "in host memory", "device": "on the device", "nvme": "in files (NVMe)"}
_PLANNED: Final = (
    *("stage", "uses_deepspeed", "offload_optimizer", "offload_param"),
    *("precision", "world_size"),
)


# -- Data.


@attrs.frozen(kw_only=True)
class Fit:
    """Peak use and available amount of device memory, host memory or NVMe."""

    place: Place
    needed: int
    """Bytes per rank."""
    available: int | None
    """Available bytes per rank; ``None`` if there is no limit."""

    @property
    def fits(self) -> bool:
        """Whether the peak fits in the available memory."""
        return self.available is None or self.needed <= self.available


def fits(estimate: Estimate, budget: RankBudget | None = None) -> tuple[Fit, ...]:
    """Compare peak device, host and NVMe memory of ``estimate`` with ``budget``.

    Memory that is neither used nor limited is left out. ``budget`` has bytes per rank; a missing
    key means no limit.
    """
    limits: RankBudget = budget or {}
    every = (
        Fit(place=place, needed=estimate.peak(place).nbytes, available=limits.get(place))
        for place in PLACES
    )
    return tuple(fit for fit in every if fit.needed or fit.available)


def estimate_data(estimate: Estimate, budget: RankBudget | None = None) -> dict[str, Any]:
    """Return ``estimate`` as a JSON-serialisable dict; sizes are in bytes per rank.

    Args:
        estimate: The estimate.
        budget: Bytes available to each rank, as a mapping with the keys ``"device"``, ``"host"``
            and ``"nvme"``.
    """
    resolved, model = estimate.resolved, estimate.resolved.model
    return {
        "plan": {
            "title": describe(resolved),
            **{name: getattr(resolved, name) for name in _PLANNED},
        },
        "subject": subject(estimate),
        "model": model
        and {
            "name": model.name,
            "elements": model.numel,
            "trainable_elements": model.trainable_numel,
        },
        "workload": attrs.asdict(estimate.workload),
        "places": {place: _place_data(estimate, place) for place in PLACES},
        "fits": [{**attrs.asdict(fit), "fits": fit.fits} for fit in fits(estimate, budget)],
        "pinned": estimate.pinned,
        "swap_traffic": attrs.asdict(swap_traffic(estimate)),
        "notes": list(estimate.notes),
    }


def _place_data(estimate: Estimate, place: Place) -> dict[str, Any]:
    peak = estimate.peak(place)
    items = [item for item in estimate.items if item.place == place]
    return {
        "peak": peak.nbytes,
        "phase": peak.phase,
        "phases": {
            phase: sum(item.nbytes for item in estimate.at(place, phase)) for phase in PHASES
        },
        "components": [
            {
                **{name: getattr(item, name) for name in ("component", "nbytes", "pinned", "note")},
                "at_peak": peak.phase in item.phases,
                "phases": [phase for phase in PHASES if phase in item.phases],
            }
            for item in sorted(items, key=lambda item: -item.nbytes)
        ],
    }


def subject(estimate: Estimate) -> str:
    """Name the model and the workload of ``estimate`` in one line."""
    model = estimate.resolved.model
    workload = describe_workload(estimate.workload)
    if model is None:
        return workload
    count = f"{model.numel / 1e6:.1f} million"
    if model.numel >= 10**9:
        count = f"{model.numel / 1e9:.2f} billion"
    return f"{model.name} ({count} parameters), {workload}"


def describe_workload(workload: Workload) -> str:
    """Summarise the workload in one line."""
    parts = [f"batch {workload.batch}"]
    if workload.width is None or workload.height is None:
        parts.append("activations not estimated")
    else:
        frames = "" if workload.frames is None else f"{counted(workload.frames, 'frame')} of "
        parts.append(f"{frames}{workload.width} x {workload.height} pixels")
        checkpointing = "with" if workload.gradient_checkpointing else "without"
        parts.append(f"{checkpointing} gradient checkpointing")
        if workload.gradient_checkpointing and workload.activation_offload:
            parts.append("block inputs on the host")
    if workload.ema != "none":
        parts.append(f"EMA {_EMA[workload.ema]}")
    return ", ".join(parts)


# -- Reports of the data.


def estimate_page(data: Data) -> Page:
    """Return a report of ``estimate_data``: peaks of memory, and their components."""
    name, size = unit = unit_of(data)
    blocks: list[Block] = [
        Line(f"Memory per rank: {data['plan']['title']}", style="title"),
        Line(data["subject"], indent=2),
        Line(""),
        memory_table(data),
    ]
    for place, held in data["places"].items():
        if held["components"]:
            title = f"{PLACE_NAMES[place]}: {held['peak'] / size:.2f} {name} {peak_words(held)}"
            blocks += [Line(""), Line(title, style="title"), *_place_blocks(held, unit)]
    traffic = data["swap_traffic"]
    if traffic["written"]:
        read, written = format_size(traffic["read"]), format_size(traffic["written"])
        text = f"each optimizer step reads {read} from swap files and writes {written}"
        blocks.append(Line(text, indent=2))
    return Page(blocks=(*blocks, *(Line(note, mark="note:") for note in data["notes"])))


def memory_table(data: Data) -> Table:
    """Return a table of the peaks of device, host and NVMe memory in ``estimate_data``."""
    unit = unit_of(data)
    over = {PLACE_NAMES[fit["place"]] for fit in data["fits"] if not fit["fits"]}
    return Table(
        rows=tuple(
            (
                PLACE_NAMES[fit["place"]],
                _fit_words(fit, unit),
                peak_words(data["places"][fit["place"]]),
            )
            for fit in data["fits"]
        ),
        head=("place", "memory per rank", "when"),
        style=lambda row: "error" if row[0] in over else "",
    )


def unit_of(data: Data) -> tuple[str, int]:
    """Return the unit for all sizes of an estimate: its name, and its size in bytes."""
    return common_unit(fit["needed"] for fit in data["fits"])


def _fit_words(fit: Data, unit: tuple[str, int]) -> str:
    """Return peak, budget, and free or missing memory in ``unit``."""
    (name, size), needed, available = unit, fit["needed"], fit["available"]
    if available is None:
        return f"{needed / size:.2f} {name}"
    rest = left_words((available - needed) / size)
    return f"{needed / size:.2f} of {available / size:.2f} {name}, {rest}"


def left_words(left: float) -> str:
    """Return what is left of a budget, or by how much it is exceeded.

    Args:
        left: Free memory, in the unit of the text; negative if the budget is exceeded.
    """
    return f"{left:.2f} free" if left >= 0 else f"over by {-left:.2f}"


def peak_words(held: Data) -> str:
    """Return a phrase, for the end of a sentence, that says when memory of a place peaks."""
    if len(set(held["phases"].values())) == 1:
        return "at any time"
    phase: Any = held["phase"]
    return f"at the peak, {DURING[phase]}"


def _place_blocks(held: Data, unit: tuple[str, int]) -> Iterator[Block]:
    """Yield the components of a place at its peak, those of other phases, and totals by phase."""
    name, size = unit
    yield Table(
        rows=tuple(
            (f"{one['nbytes'] / size:.2f}", one["component"], _remarks(one))
            for one in sorted(held["components"], key=lambda one: not one["at_peak"])
        ),
        align="r",
        widths=(8, 18),
    )
    totals = held["phases"]
    if len(set(totals.values())) > 1:
        by_phase = ", ".join(f"{phase} {nbytes / size:.2f}" for phase, nbytes in totals.items())
        yield Line(f"by phase, {name}: {by_phase}", indent=2)


def _remarks(component: Data) -> str:
    pinned = "pinned" if component["pinned"] else ""
    text = ", ".join(part for part in (component["note"], pinned) if part)
    if component["at_peak"]:
        return text
    held = " and ".join(DURING[phase] for phase in component["phases"])
    return f"only {held or 'never'}; {text}".rstrip("; ")


def sizes(sizes: Iterable[tuple[Place, int]]) -> str:
    """Format bytes by place."""
    return ", ".join(f"{PLACE_NAMES[place]} {format_size(size)}" for place, size in sizes)


def describe_estimate(estimate: Estimate) -> str:
    """Summarise peak device, host and NVMe memory in one line."""
    needs = [(fit.place, fit.needed) for fit in fits(estimate)]
    return f"{describe(estimate.resolved)}: {sizes(needs)} per rank"


brief_of.register(Estimate, describe_estimate)
page_of.register(Estimate, lambda estimate: estimate_page(estimate_data(estimate)))
