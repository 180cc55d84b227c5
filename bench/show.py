"""A result as Markdown, and figures with their units; the standard library only."""

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
    """The whole result: where it was measured, a table per case, the goals."""
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
    """Hardware, versions and command."""
    packages = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    return f"{machine(result)}. {packages}. `{result['command']}`"


def machine(result: Mapping[str, Any]) -> str:
    """The hardware it was measured on."""
    found = result["hardware"]
    devices = [f"{device['name']} ({device['gib']:g} GiB)" for device in found["devices"]]
    cores = f"{found['usable_cores']} {found['processor']} cores"
    return ", ".join([*devices, f"{cores} with {found['host_gib']:g} GiB of RAM"])


def case_table(case: Mapping[str, Any]) -> str:
    """Medians, quartiles and the ratio to the baseline."""
    rows = [f"| | quantity | median | quartiles | to {case['baseline']} |", "|---|---|--:|--:|--:|"]
    for name, quantities in case["contestants"].items():
        for quantity, found in quantities.items():
            spread = span(found["q1"], found["q3"], quantity)
            median = amount(found["median"], quantity)
            cells = [name, title(quantity), median, spread, times(found.get("ratio"))]
            rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def more_is_better(quantity: str) -> bool:
    """Whether a quantity is a rate."""
    return quantity.endswith("_per_second")


def title(quantity: str) -> str:
    """``"save_seconds"`` → ``"save"``; the unit stands beside the number."""
    if quantity in _TITLES:
        return _TITLES[quantity]
    for suffix in ("_seconds", "_bytes", "_bytes_per_second", "_per_second"):
        quantity = quantity.removesuffix(suffix)
    return quantity.replace("_", " ")


def amount(value: float, quantity: str) -> str:
    """A value with the unit that its quantity's name tells."""
    size, unit = unit_of(value, quantity)
    digits = 3 if unit in _SECONDS.values() else 4
    number = f"{value / size:.0f}" if unit == "B" else f"{value / size:.{digits}g}"
    return f"{number}{unit}" if unit == "/s" else f"{number} {unit}".rstrip()


def unit_of(value: float, quantity: str) -> tuple[float, str]:
    """The unit that suits a value, and how much of the quantity it is."""
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
    """From … to, the unit once where both have the same."""
    first, last = amount(low, quantity), amount(high, quantity)
    number, _, unit = first.partition(" ")
    return f"{number} to {last}" if unit and last.endswith(f" {unit}") else f"{first} to {last}"


def times(ratio: Sequence[float] | None) -> str:
    """``"1.003 (0.998 to 1.010)"``, of quartiles."""
    if ratio is None:
        return ""
    low, middle, high = ratio
    return f"{middle:.3f}" if low == high else f"{middle:.3f} ({low:.3f} to {high:.3f})"
