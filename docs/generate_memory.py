"""Write docs/fits.md: which plan ``advise`` gives for cards people have.

``python docs/generate_memory.py``; a test fails when the committed file is not what this prints.
"""

from __future__ import annotations

import sys
from pathlib import Path

from zerotune.errors import NothingFitsError
from zerotune.plan import DeepSpeedPlan
from zerotune.plan.api import Advice

TARGET = Path(__file__).parent / "fits.md"

INTRODUCTION = """\
Full fine-tuning with AdamW in bf16 with fp32 master weights, one GPU, 1024 x 1024 pixels, batch 1,
EMA in host memory. Estimates of zerotune's memory model, not measurements; [the memory
page](memory.md) says what they are checked against."""

FAMILIES = {
    "sdxl": "SDXL U-Net, 2.6 billion parameters",
    "sd3-medium": "SD3 medium, 2.0 billion parameters",
    "flux": "Flux.1, 11.9 billion parameters",
}
CARDS = ("80GiB", "48GiB", "24GiB", "16GiB", "12GiB", "10GiB", "8GiB", "6GiB")
HOSTS = {"64GiB": "0", "128GiB": "0", "512GiB": "0", "128GiB and NVMe": "2TB"}
STAGES = {
    "no partitioning": {"stage": 0},
    "ZeRO-2": {"stage": 2},
    "ZeRO-3": {"stage": 3},
    "ZeRO-2, optimizer in host memory": {"stage": 2, "offload": "cpu"},
    "ZeRO-3, optimizer in host memory": {"stage": 3, "offload": "cpu"},
    "ZeRO-3, optimizer and parameters in host memory": {
        "stage": 3,
        "offload": "cpu",
        "offload_param": "cpu",
    },
    "ZeRO-3, optimizer on NVMe": {"stage": 3, "offload": "nvme"},
    "ZeRO-3, optimizer and parameters on NVMe": {
        "stage": 3,
        "offload": "nvme",
        "offload_param": "nvme",
    },
}


def page() -> str:
    """The whole page."""
    parts = [
        "<!-- Written by docs/generate_memory.py; edit that. -->",
        "# What fits where",
        INTRODUCTION,
    ]
    for family, title in FAMILIES.items():
        parts += [f"## {title}", _costs(family), _advice(family)]
    return "\n\n".join(parts) + "\n"


def _costs(family: str) -> str:
    from zerotune.platform import Platform

    platform = Platform.synthetic("cuda", vram=80 * 2**30, ram=512 * 2**30)
    rows = [
        "| plan | device | device, no gradient checkpointing | host | NVMe |",
        "|---|--:|--:|--:|--:|",
    ]
    for title, plan in STAGES.items():
        cells = []
        for checkpointing in (True, False):
            estimate = DeepSpeedPlan.build(precision="bf16", **plan).estimate(
                family,
                platform=platform,
                ema="host",
                resolution=1024,
                gradient_checkpointing=checkpointing,
            )
            cells.append(f"{estimate.device / 2**30:.1f}")
        cells += [f"{estimate.host / 2**30:.1f}", f"{estimate.nvme / 2**30:.1f}"]
        rows.append(f"| {title} | " + " | ".join(cells) + " |")
    return "What each plan needs, GiB at its peak:\n\n" + "\n".join(rows)


def _advice(family: str) -> str:
    rows = [
        "| card | " + " | ".join(f"host {host}" for host in HOSTS) + " |",
        "|---|" + "---|" * len(HOSTS),
    ]
    for card in CARDS:
        cells = []
        for host, nvme in HOSTS.items():
            try:
                cells.append(_cell(_advise(family, card, host.split()[0], nvme)))
            except NothingFitsError:
                cells.append("nothing fits")
        rows.append(f"| {card} | " + " | ".join(cells) + " |")
    return "What `advise` chooses:\n\n" + "\n".join(rows)


def _advise(family: str, card: str, host: str, nvme: str) -> Advice:
    return DeepSpeedPlan.advise(
        family, vram=card, ram=host, nvme=nvme, ema="host", resolution=1024, precision="bf16"
    )


def _cell(advice: Advice) -> str:
    recompute = ", recomputing" if advice.gradient_checkpointing else ""
    return f"{advice.chosen.title}{recompute} ({advice.estimate.device / 2**30:.1f} GiB)"


if __name__ == "__main__":
    text = page()
    TARGET.write_text(text, encoding="utf-8")
    sys.stdout.write(f"{TARGET.name}: {len(text.splitlines())} lines\n")
