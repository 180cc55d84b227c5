"""The page and the command line give the same answers."""

from __future__ import annotations

import itertools
import json

import pytest

from tests.builder.states import PLAN, state
from zerotune import cli

FAMILIES = ("sdxl", "sd15", "sd3-medium", "qwen-image", "wan-1.3b")
MACHINES = (
    {"vram": "24", "ram": "64"},
    {"vram": "12", "ram": "32"},
    {"vram": "8", "ram": "16", "nvme": "200 GB"},
)
WORK = (
    {},
    {"lora": "16", "base_dtype": "nf4"},
    {"ema": "host", "world_size": "2", "resolution": "512"},
)
ADVISED = [
    {"family": family, **machine, **work}
    for family, machine, work in itertools.product(FAMILIES, MACHINES, WORK)
]
PRECISIONS = ("bf16", "fp16", "fp32")
EXPLAINED = [
    {"family": "sdxl", "vram": "12", "ram": "32"},
    {"family": "sdxl", "vram": "24", "ram": "64", "ema": "device", "resolution": "768"},
    {"family": "qwen-image", "vram": "24", "ram": "64", "lora": "8", "base_dtype": "int8"},
    {"family": "flux", "vram": "80", "ram": "256", "world_size": "2"},
    {"family": "sdxl-controlnet", "vram": "12", "ram": "64"},
    {"family": "wan-1.3b", "vram": "24", "ram": "64", "frames": "17", "resolution": "512"},
]
"""Fifty questions, with those above."""


def options(question):
    return [
        part for name, value in question.items() for part in (f"--{name.replace('_', '-')}", value)
    ]


def asked(capsys, *arguments):
    status = cli.main([*arguments, "--json"])
    return status, json.loads(capsys.readouterr().out)


def brief(candidate):
    """Reduce a candidate to the values that must agree."""
    return {
        "title": candidate["title"],
        "needs": candidate["needs"],
        "shortfalls": candidate["shortfalls"],
        "checkpointing": candidate["gradient_checkpointing"],
        "seconds": (candidate["time"] or {}).get("expected_seconds"),
        "origin": (candidate["time"] or {}).get("origin"),
    }


@pytest.mark.parametrize(
    "number",
    [
        # 5 is coprime to the number of machines and of kinds of work, so each is covered.
        number if number % 5 == 0 else pytest.param(number, marks=pytest.mark.nightly)
        for number in range(len(ADVISED))
    ],
)
def test_page_and_command_line_give_the_same_advice(client, capsys, number):
    question, precision = ADVISED[number], PRECISIONS[sum(divmod(number, 3)) % 3]
    status, said = asked(
        capsys, "plan", "advise", *options(question), "--precision", precision, "--no-streamed"
    )
    config = {key: value for key, value in PLAN.items() if key != "bf16"}
    enabled = {name: {"enabled": name == precision} for name in ("bf16", "fp16")}
    setup = {"nvme": "0", **question}
    page = client.post(
        "/api/advise", json={"state": state({**config, **enabled}, setup=setup)}
    ).json()
    assert page["fits"] == (status == 0)
    if not page["fits"]:
        assert brief(page["nearest"]) == brief(said["nearest"])
        assert page["reason"] in said["reason"]
        return
    (chosen,) = (one for one in said["candidates"] if one["chosen"])
    assert brief(page["chosen"]) == brief(chosen)
    told = [one for one in said["candidates"] if one["streamed"] is None]
    every = [page["chosen"], *page["runners_up"], *page["rejected"]]

    def in_order(candidates):
        return sorted(map(brief, candidates), key=str)

    assert in_order(every) == in_order(told)


@pytest.mark.parametrize("question", EXPLAINED)
def test_page_and_command_line_agree_on_the_memory_a_plan_needs(client, capsys, tmp_path, question):
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(PLAN))
    _, said = asked(capsys, "plan", "explain", str(file), *options(question))
    setup = {"nvme": "0", **question}
    page = client.post("/api/preview", json={"state": state(setup=setup)}).json()
    needs = {one["place"]: (one["needed"], one["fits"]) for one in said["estimate"]["fits"]}
    shown = {one["place"]: (one["needed"], one["fits"]) for one in page["memory"]["bars"]}
    assert shown == needs
    assert page["runs"]
    assert (page["verdict"]["kind"] == "fits") == all(
        one["fits"] for one in said["estimate"]["fits"]
    )
