from __future__ import annotations

import json

import attrs
import pytest

from zerotune.plan import DeepSpeedPlan, ModelFacts
from zerotune.plan.candidates import Budget, Candidate
from zerotune.plan.memory.items import MemoryItem, Workload
from zerotune.plan.plan import Advice, MemoryEstimate
from zerotune.plan.text.advice import (
    advice_data,
    advice_page,
    nearest_data,
    nearest_page,
    rank_budget,
)
from zerotune.plan.text.memory import subject
from zerotune.platform import Platform
from zerotune.platform.facts import GIB

MODEL = ModelFacts.from_shapes([("weight", (2000, 1000))], name="UNet")


def candidate(title, *, stage, offload, device, host, fits=True, checkpointing=True, **more):
    plan = DeepSpeedPlan.build(stage=stage, offload=offload, precision="bf16")
    resolved = plan.resolve(platform=Platform.synthetic("cuda"), model=MODEL)
    estimate = MemoryEstimate(
        resolved=resolved,
        workload=Workload(height=1024, width=1024, gradient_checkpointing=checkpointing),
        items=(
            MemoryItem(component="weights", place="device", nbytes=int(device * GIB)),
            MemoryItem(component="optimizer states", place="host", nbytes=int(host * GIB)),
        ),
    )
    return Candidate(
        title=title,
        plan=plan,
        estimate=estimate,
        fits=fits,
        gradient_checkpointing=checkpointing,
        **{"shortfalls": {}, "reasons": (), **more},
    )


@pytest.fixture
def advice():
    resident = candidate(
        "ZeRO-0", stage=0, offload="none", device=42, host=0, fits=False,
        shortfalls={"device": 30 * GIB}, reasons=("optimizer states stay on the device",),
    )  # fmt: skip
    muon = candidate(
        "ZeRO-1", stage=1, offload="none", device=10, host=0, fits=False,
        reasons=("this optimizer is not known to work at this stage",),
    )  # fmt: skip
    chosen = candidate(
        "ZeRO-2, optimizer in host memory", stage=2, offload="cpu", device=9.25, host=43,
        reasons=("the lowest stage that fits | *really*",),
    )  # fmt: skip
    slower = candidate(
        "ZeRO-3, optimizer in host memory", stage=3,
        offload="cpu", device=8, host=43, checkpointing=False, reasons=("slower " * 20,),
    )  # fmt: skip
    return Advice(
        budget=Budget(device=12 * GIB, host=64 * GIB),
        chosen=chosen,
        candidates=(resident, muon, chosen, slower),
    )


def page(advice):
    return advice_page(advice_data(advice), every=True).text(100)


class TestText:
    def test_the_text_begins_with_the_choice(self, advice):
        lines = page(advice).splitlines()
        assert " ".join(" ".join(lines[:2]).split()) == (
            "Advice for 12.00 GiB of device memory, 64.00 GiB of host memory, no NVMe,"
            " 5% of device and host kept free"
        )
        assert lines[2:7] == [
            f"  {subject(advice.estimate)}",
            "",
            "Chosen: ZeRO-2, optimizer in host memory, bf16, 1 process",
            "  the lowest stage that fits | *really*",
            "  headroom: device 2.75 GiB, host 21.00 GiB",
        ]

    def test_every_candidate_shows_its_needs_and_shortfalls(self, advice):
        lines = page(advice).splitlines()
        start = next(at for at, line in enumerate(lines) if line.startswith("Candidates "))

        assert [line[:10].strip() for line in lines[start + 2 :] if line[:10].strip()] == [
            "chosen", "fits", "too big", "refused",
        ]  # fmt: skip
        too_big = lines.index("  too big   42.00   0.00  0.00          ZeRO-0, with checkpointing:")
        assert lines[too_big + 1].strip().startswith("missing device 30.00 GiB; optimizer states")

    def test_the_text_fits_any_terminal_width(self, advice):
        text = page(advice)
        assert text.isascii()
        assert max(map(len, text.splitlines())) <= 100

    def test_the_nearest_candidate_shows_what_is_missing(self, advice):
        budget = {"device": 12 * GIB, "host": 64 * GIB, "nvme": 0}
        text = nearest_page(nearest_data(advice.candidates[0], "none", budget=budget)).text(100)

        assert text.startswith(
            "error: none\n\nNearest: ZeRO-0, with checkpointing\n  missing: device 30.00 GiB\n"
        )
        assert "42.00 of 12.00 GiB, over by 30.00" in text


class TestData:
    def test_the_data_can_be_serialised_to_json(self, advice):
        data = advice_data(advice)

        assert json.loads(json.dumps(data)) == data
        assert data["fits"] is True
        assert DeepSpeedPlan.from_dict(data["plan"]) == advice.plan
        assert data["budget"] == {
            "device": 12 * GIB, "host": 64 * GIB, "nvme": 0, "reserve": 0.05,
        }  # fmt: skip
        assert data["headroom"]["host"] == 21 * GIB
        assert [one["chosen"] for one in data["candidates"]] == [False, False, True, False]
        assert data["candidates"][0]["shortfalls"] == {"device": 30 * GIB}
        assert data["candidates"][0]["needs"] == {"device": 42 * GIB, "host": 0, "nvme": 0}
        assert data["estimate"]["places"]["device"]["peak"] == int(9.25 * GIB)


def test_each_rank_gets_its_share_of_the_machines_memory(advice):
    budget = {"device": 12, "host": 64, "nvme": 100}
    resolved = attrs.evolve(advice.resolved, world_size=4)
    estimate = attrs.evolve(advice.estimate, resolved=resolved)

    assert rank_budget(budget, estimate) == {"device": 12, "host": 16, "nvme": 25}
    two = attrs.evolve(estimate, workload=Workload(ranks_per_machine=2))
    assert rank_budget(budget, two) == {"device": 12, "host": 32, "nvme": 50}
