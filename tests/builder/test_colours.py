"""Contrast of the page's colours with their backgrounds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from zerotune import builder
from zerotune._util.palette import COMPONENTS

STATIC = Path(builder.__file__).parent / "static"
LEAST = 3.0
"""Minimum contrast ratio of graphics (WCAG 1.4.11)."""


def luminance(colour):
    def linear(value):
        return value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4

    parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return sum(
        weight * linear(part) for weight, part in zip((0.2126, 0.7152, 0.0722), parts, strict=True)
    )


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def schemes():
    """Return the colours of the light and the dark scheme, by name."""
    text = (STATIC / "base.css").read_text()
    light, dark = (
        dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", part))
        for part in text.split("@media (prefers-color-scheme: dark)")
    )
    return {"light": light, "dark": {**light, **dark}}


def rule(selector):
    """Return the declarations of a style sheet rule."""
    text = (STATIC / "builder.css").read_text()
    (found,) = re.findall(rf"^{re.escape(selector)} {{ (.*) }}$", text, re.MULTILINE)
    return dict(re.findall(r"([a-z-]+): ([^;]+);", found))


def named(value):
    """Return the names of the colours in a value."""
    return re.findall(r"var\(--([a-z-]+)\)", value)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_parts_of_the_chart_contrast_with_free_memory(scheme):
    colours = schemes()[scheme]
    (edge,) = named(rule("svg.memory .part")["stroke"])
    ground, lines = dict.fromkeys(named(rule("svg.memory")["background"]))
    assert contrast(colours[edge], colours[ground]) >= LEAST
    # Free memory is hatched, so that it differs from any plain colour, however similar.
    assert contrast(colours[lines], colours[ground]) >= LEAST
    alike = [one for one in COMPONENTS.values() if contrast(one, colours[ground]) < 1.2]
    assert bool(alike), "without a colour this near the ground the hatching says nothing"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_limit_contrasts_with_the_parts_it_crosses(scheme):
    colours = schemes()[scheme]
    # A halo separates it from whatever part it crosses.
    (limit,) = named(rule("svg.memory .limit")["stroke"])
    (halo,) = named(rule("svg.memory .halo")["stroke"])
    assert contrast(colours[limit], colours[halo]) >= LEAST
