from __future__ import annotations

import json

import attrs

from zerotune.plan.text.memory import estimate_data, estimate_page, fits
from zerotune.platform.facts import GIB


def test_the_data_is_complete_and_serialisable(estimate):
    data = estimate.to_dict()

    assert json.loads(json.dumps(data)) == data
    device = data["places"]["device"]
    assert device["peak"] == estimate.device == 7.5 * GIB
    assert device["phase"] == "initialization"
    assert device["phases"] == {
        "initialization": 7.5 * GIB,
        "forward and backward": 6.5 * GIB,
        "optimizer step": 4.5 * GIB,
        "checkpoint": 4 * GIB,
    }
    assert [part["component"] for part in device["components"]] == [
        "weights", "flat copy", "activations", "buckets",
    ]  # fmt: skip
    assert [part["at_peak"] for part in device["components"]] == [True, True, False, False]
    assert data["places"]["host"]["components"][1] == {
        "component": "master weights",
        "nbytes": 8 * GIB,
        "pinned": True,
        "at_peak": True,
        "phases": ["initialization", "forward and backward", "optimizer step", "checkpoint"],
        "note": "",
    }
    assert data["places"]["nvme"] == {
        "peak": 0,
        "phase": "initialization",
        "phases": dict.fromkeys(device["phases"], 0),
        "components": [],
    }
    assert data["pinned"] == 8 * GIB
    assert data["model"] == {"name": "UNet", "elements": 2_000_000, "trainable_elements": 2_000_000}
    assert data["plan"]["title"] == "ZeRO-2, optimizer in host memory, bf16, 1 process"
    assert data["workload"]["width"] == 768


def test_the_text_says_what_is_allocated_when(estimate):
    text = estimate.explain()

    assert text.splitlines()[:3] == [
        "Memory per rank: ZeRO-2, optimizer in host memory, bf16, 1 process",
        "  UNet (2.0 million parameters), batch 2, 768 x 512 pixels, with gradient checkpointing",
        "",
    ]
    assert "device: 7.50 GiB at the peak, during set-up" in text
    assert "\n      4.00  weights             bf16\n" in text
    assert (
        "\n      2.00  activations         only in the forward and backward pass; blocks recomputed"
        in text
    )
    assert "\n      0.50  buckets             only in the forward and backward pass and" in text
    assert "by phase, GiB: initialization 7.50, forward and backward 6.50" in text
    assert "host: 24.00 GiB at any time" in text
    assert "\n      8.00  master weights      pinned" in text
    assert "NVMe" not in text


def test_the_text_fits_any_terminal_width(estimate, make_item):
    long = make_item("activations", "device", 1, note="a note that goes on and on " * 12)
    text = attrs.evolve(estimate, items=(*estimate.items, long)).explain()

    assert text.isascii()
    assert max(len(line) for line in text.splitlines()) <= 100
    assert "\n\n\n" not in text
    assert not any(line != line.rstrip() for line in text.splitlines())


def test_memory_over_its_budget_is_reported_and_marked(estimate):
    page = estimate_page(estimate_data(estimate, {"device": 5 * GIB, "nvme": GIB}))

    table = page.blocks[3]
    assert [row[:2] for row in table.rows] == [
        ("device", "7.50 of 5.00 GiB, over by 2.50"),
        ("host", "24.00 GiB"),
        ("NVMe", "0.00 of 1.00 GiB, 1.00 free"),
    ]
    assert [table.style(row) for row in table.rows] == ["error", "", ""]


def test_places_without_need_or_budget_are_hidden(make_estimate, make_item):
    assert fits(make_estimate()) == ()
    limited = fits(make_estimate(make_item("swap", "nvme", 2)), {"nvme": 0})
    assert [(fit.place, fit.fits) for fit in limited] == [("nvme", False)]
