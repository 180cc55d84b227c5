"""Reports: arithmetic, text and images."""

from __future__ import annotations

import json

import pytest

from tests.training.fakes import drive, report
from zerotune.plan import DeepSpeedPlan
from zerotune.platform import Platform
from zerotune.training.report import Record


def test_rates_and_rows_follow_from_plain_arithmetic():
    found = report()
    assert found.steps_per_second == 2.0
    assert found.samples_per_second == 16.0
    assert found.time_rows() == [
        ("data", "25.0 ms", "5 %"),
        ("forward", "125.0 ms", "25 %"),
        ("backward", "250.0 ms", "50 %"),
        ("optimizer", "50.0 ms", "10 %"),
        ("ema", "25.0 ms", "5 %"),
        ("rest", "25.0 ms", "5 %"),
    ]
    rows = found.memory_rows()
    assert ("weights", "device", "1.00 MiB", "bf16") in rows
    assert ("master weights", "host", "1.00 MiB", "fp32, 1/2 of it; pinned") in rows
    assert [row[:3] for row in rows if row[0] == "EMA"] == [("EMA", "host", "1.00 MiB")]
    (reduced,) = [row[3] for row in rows if row[0] == "buckets"]
    assert reduced.endswith("only in the forward and backward pass")
    assert [row[:2] for row in rows[-5:]] == [
        ("expected peak", "device"),
        ("expected peak", "host"),
        ("measured peak", "device"),
        ("measured before", "host"),
        ("measured peak", "host"),
    ]
    assert rows[-3][2] == "3.00 GiB"
    assert "4 steps in 2.0 s on 2 processes: 2.00 it/s, 16 samples/s" in found.render()


def test_an_empty_report_does_not_divide_by_zero():
    empty = report(steps=0, losses=(), seconds=0.0, phases={}, estimate=None)
    assert empty.steps_per_second == 0.0
    assert empty.time_rows()[0] == ("data", "0.0 ms", "0 %")
    assert [row[0] for row in empty.memory_rows()] == [
        "measured peak",
        "measured before",
        "measured peak",
    ]


def test_the_prediction_is_shown_beside_the_measurement():
    assert report().prediction_rows() == [], "neither size nor arithmetic are known"
    known = DeepSpeedPlan.build(offload="cpu", precision="bf16").estimate(
        "sdxl", platform=Platform.synthetic("cuda"), ema="host"
    )
    found = report(estimate=known)
    rows = {name: cells for name, *cells in found.prediction_rows()}
    assert list(rows) == ["forward", "backward", "optimizer", "ema", "step"]
    assert rows["step"] == [f"{1000 * found.predicted.seconds:.1f} ms", "500.0 ms"]
    assert rows["forward"][1] == "125.0 ms"
    assert "predicted and measured time per step (rates: catalogued" in found.render()
    assert found.to_dict()["predicted"]["seconds"] == found.predicted.seconds


def test_a_report_is_saved_as_json(tmp_path):
    found = report(stopped="SIGTERM")
    found.save(tmp_path)
    read = json.loads((tmp_path / "report.json").read_text())
    assert read == json.loads(json.dumps(found.to_dict()))
    assert (read["stopped"], read["steps_per_second"]) == ("SIGTERM", 2.0)
    assert read["estimate"]["places"]["host"]["peak"] == found.estimate.host


def test_the_totals_add_up_and_restart_after_a_resume(tmp_path):
    record = Record()
    drive(record, steps=range(1, 4))
    totals = record.totals
    assert totals["steps"] == 3
    assert totals["losses"] == (0.5,) * 3
    assert totals["seconds"] == pytest.approx(0.3)
    assert totals["phases"]["backward"] == pytest.approx(0.12)

    class At:
        step = 7

    record.on_resume(At(), tmp_path)
    assert record.totals["first_step"] == 7
    assert record.totals["steps"] == 0
