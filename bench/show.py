"""Format a result as Markdown, and figures with their units; uses only the standard library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

_TITLES: Final = {
    "seconds": "time", "bytes_per_second": "rate", "images_per_second": "images",
    "host_bytes": "host memory", "memory_bytes": "memory growth",
}  # fmt: skip
_SECONDS: Final = {1.0: "s", 1e-3: "ms", 1e-6: "µs"}
_BYTES: Final = {2.0**30: "GiB", 2.0**20: "MiB", 2.0**10: "KiB", 1.0: "B"}


def markdown(result: Mapping[str, Any]) -> str:
    """Return the whole result: machine, a table per case, goals."""
    parts = [f"# {result['benchmark']}: {result['title']}", provenance(result)]
    for case in result["cases"]:
        parts += [f"## {case['name']}", case_table(case), *case["notes"]]
    if result["goals"]:
        rows = ["| goal | limit | reached |", "|---|--:|--:|"]
        rows += [
            f"| {goal['text']} | {goal['limit'] or ''} | {goal['reached']:.4g} |"
            for goal in result["goals"]
        ]
        parts += ["## Goals", "\n".join(rows)]
    return "\n\n".join(parts) + "\n"


def provenance(result: Mapping[str, Any]) -> str:
    """Return hardware, versions and command."""
    packages = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    return f"{machine(result)}. {packages}. `{result['command']}`"


def machine(result: Mapping[str, Any]) -> str:
    """Return the hardware of a result."""
    found = result["hardware"]
    devices = [f"{device['name']} ({device['gib']:g} GiB)" for device in found["devices"]]
    cores = f"{found['usable_cores']} {found['processor']} cores"
    return ", ".join([*devices, f"{cores} with {found['host_gib']:g} GiB of RAM"])


def case_table(case: Mapping[str, Any]) -> str:
    """Return a table of medians, quartiles and ratios to the baseline."""
    rows = [f"| | quantity | median | quartiles | to {case['baseline']} |", "|---|---|--:|--:|--:|"]
    for name, quantities in case["contestants"].items():
        for quantity, found in quantities.items():
            spread = span(found["q1"], found["q3"], quantity)
            median = amount(found["median"], quantity)
            cells = [name, title(quantity), median, spread, times(found.get("ratio"))]
            rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def more_is_better(quantity: str) -> bool:
    return quantity.endswith("_per_second")


def title(quantity: str) -> str:
    """Map ``"save_seconds"`` to ``"save"``: the unit is shown with the number."""
    if quantity in _TITLES:
        return _TITLES[quantity]
    for suffix in ("_seconds", "_bytes", "_bytes_per_second", "_per_second"):
        quantity = quantity.removesuffix(suffix)
    return quantity.replace("_", " ")


def amount(value: float, quantity: str) -> str:
    """Format a value with the unit that its quantity's name implies."""
    size, unit = unit_of(value, quantity)
    digits = 3 if unit in _SECONDS.values() else 4
    number = f"{value / size:.0f}" if unit == "B" else f"{value / size:.{digits}g}"
    return f"{number}{unit}" if unit == "/s" else f"{number} {unit}".rstrip()


def unit_of(value: float, quantity: str) -> tuple[float, str]:
    """Return the size and name of the unit that suits a value."""
    if quantity.endswith("_per_second"):
        rate = quantity.endswith("bytes_per_second")
        size, unit = _suited(value, _BYTES) if rate else (1.0, "")
        return size, f"{unit}/s"
    if quantity.endswith("seconds"):
        return _suited(value, _SECONDS)
    return _suited(value, _BYTES) if quantity.endswith("bytes") else (1.0, "")


def _suited(value: float, units: Mapping[float, str]) -> tuple[float, str]:
    *larger, smallest = units.items()
    return next((one for one in larger if abs(value) >= one[0]), smallest)


def span(low: float, high: float, quantity: str) -> str:
    """Format an interval; a common unit appears once."""
    first, last = amount(low, quantity), amount(high, quantity)
    number, _, unit = first.partition(" ")
    return f"{number} to {last}" if unit and last.endswith(f" {unit}") else f"{first} to {last}"


def times(ratio: Sequence[float] | None) -> str:
    """Format quartiles as ``"1.003 (0.998 to 1.010)"``."""
    if ratio is None:
        return ""
    low, middle, high = ratio
    return f"{middle:.3f}" if low == high else f"{middle:.3f} ({low:.3f} to {high:.3f})"
