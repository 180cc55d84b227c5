"""Write docs/fits.md, which plan ``advise`` gives for cards people have, and a table of memory.md.

``python docs/generate_memory.py``; a test fails when the committed files are not what this prints.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from zerotune._util.text import parse_size
from zerotune.errors import NothingFitsError
from zerotune.plan import DeepSpeedPlan
from zerotune.plan.advise import Advice
from zerotune.plan.families import family_names, model_family

TARGET = Path(__file__).parent / "fits.md"

INTRODUCTION = """\
Full fine-tuning with AdamW in bf16 with fp32 master weights, one GPU, 1024 x 1024 pixels, batch 1,
EMA in host memory; clips in the size that is named. Estimates of zerotune's memory model, not
measurements; [the memory page](memory.md) says what they are checked against."""

STREAMING = """\
Predicted seconds of a step on 24 GiB with more and more host memory, no EMA: of the fastest plan
that fits without [streaming weights](engines.md#streamed-weights), then of the fastest that
streams them; a dash where none fits. Gradients are clipped. Streaming has to be asked for
(`streamed=True`), and has not been measured on a GPU."""

FAMILIES = {
    "sdxl": "SDXL U-Net, 2.6 billion parameters",
    "sd3-medium": "SD3 medium, 2.0 billion parameters",
    "flux": "Flux.1, 11.9 billion parameters",
}
ADAPTED = {
    "chroma": "Chroma, 8.9 billion parameters",
    "qwen-image": "Qwen-Image, 20.4 billion parameters",
    "z-image": "Z-Image, 6.2 billion parameters",
}
"""Those of which adapters alone are listed."""
OTHERS = (
    *("flux2", "flux2-klein-9b", "flux2-klein-4b", "krea2"),
    *("hunyuan-video", "wan-14b", "wan-1.3b", "ltx-video"),
)
"""Those that share a table."""
LARGER = ("80GiB", "48GiB", "24GiB", "16GiB")
CARDS = ("80GiB", "48GiB", "24GiB", "16GiB", "12GiB", "10GiB", "8GiB", "6GiB")
STREAMED_HOSTS = ("64GiB", "128GiB", "192GiB", "256GiB")
RANK = 16
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
        parts += [f"## {title}", _costs(family), _advice(family), _advice(family, lora=RANK)]
    for family, title in ADAPTED.items():
        parts += [f"## {title}", _advice(family, lora=RANK, cards=CARDS[1::2])]
    parts += ["## Flux.2, Krea 2, and models of clips", _others()]
    parts += ["## Streamed weights", STREAMING, _streamed()]
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


def _advice(family: str, *, lora: int | None = None, cards: Sequence[str] = CARDS) -> str:
    rows = [
        "| card | " + " | ".join(f"host {host}" for host in HOSTS) + " |",
        "|---|" + "---|" * len(HOSTS),
    ]
    for card in cards:
        cells = []
        for host, nvme in HOSTS.items():
            try:
                cells.append(_cell(_advise(family, card, host.split()[0], nvme, lora)))
            except NothingFitsError:
                cells.append("nothing fits")
        rows.append(f"| {card} | " + " | ".join(cells) + " |")
    subject = "" if lora is None else f" for adapters of rank {lora} (`lora={lora}`)"
    return f"What `advise` chooses{subject}:\n\n" + "\n".join(rows)


def _advise(family: str, card: str, host: str, nvme: str, lora: int | None) -> Advice:
    return DeepSpeedPlan.advise(
        family,
        vram=card,
        ram=host,
        nvme=nvme,
        ema="host",
        precision="bf16",
        lora=lora,
    )


def _others() -> str:
    """Adapters of more families, each at its own size, beside 128 GiB of host memory."""
    rows = [
        "| model | billions | sample | " + " | ".join(LARGER) + " |",
        "|---|--:|---|" + "---|" * len(LARGER),
    ]
    for name in OTHERS:
        known = model_family(name)
        frames = "" if known.frames is None else f"{known.frames} frames of "
        cells = [name, f"{known.facts.numel / 1e9:.1f}"]
        cells.append(f"{frames}{known.resolution} x {known.resolution}")
        for card in LARGER:
            try:
                cells.append(_cell(_advise(name, card, "128GiB", "0", RANK)))
            except NothingFitsError:
                cells.append("nothing fits")
        rows.append(f"| {' | '.join(cells)} |")
    subject = f"adapters of rank {RANK} with 128 GiB of host memory"
    return f"What `advise` chooses for {subject}:\n\n" + "\n".join(rows)


def _streamed() -> str:
    """Every family, all of its weights and adapters, with and without streaming."""
    rows = [
        "| model | trained | " + " | ".join(f"host {host}" for host in STREAMED_HOSTS) + " |",
        "|---|---|" + "--:|" * len(STREAMED_HOSTS),
    ]
    for name in family_names():
        for lora in (None, RANK):
            cells = _streamed_cells(name, lora)
            trained = "all weights" if lora is None else "adapters"
            rows.append(f"| {name} | {trained} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _streamed_cells(name: str, lora: int | None) -> list[str]:
    try:
        advice = DeepSpeedPlan.advise(
            name, vram="24GiB", ram="4TiB", precision="bf16", lora=lora, streamed=True
        )
    except NothingFitsError:
        return ["- / -"] * len(STREAMED_HOSTS)
    return [_seconds(advice, host) for host in STREAMED_HOSTS]


def _seconds(advice: Advice, host: str) -> str:
    """Of the fastest that fit in less host memory than was advised for."""
    budget = attrs.evolve(advice.budget, host=parse_size(host, key="ram"))
    seconds: dict[bool, float] = {}
    for one in (advice.chosen, *advice.runners_up):
        if one.time is not None and one.estimate.host <= budget.usable("host"):
            is_streamed = one.streamed is not None
            seconds[is_streamed] = min(seconds.get(is_streamed, math.inf), one.time.expected)
    return " / ".join(f"{seconds[key]:.2f}" if key in seconds else "-" for key in (False, True))


def _cell(advice: Advice) -> str:
    recompute = ", recomputing" if advice.gradient_checkpointing else ""
    return f"{advice.chosen.title}{recompute} ({advice.estimate.device / 2**30:.1f} GiB)"


# -- The memory model against passes of real models on a device without memory.

MEMORY = TARGET.with_name("memory.md")
RESULT = TARGET.parent / "results" / "fake_device.json"
BEGIN, END = "<!-- passes: written by docs/generate_memory.py -->", "<!-- end of passes -->"


def memory_page() -> str:
    """docs/memory.md with its table made anew."""
    text = MEMORY.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{_passes()}\n\n{END}{rest.split(END)[1]}"


def _passes() -> str:
    passes = json.loads(RESULT.read_text(encoding="utf-8"))
    rows = [
        "| pass | counted | estimated | error | on the host | error | reserved |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    return "\n".join([*rows, *map(_pass, passes)])


def _pass(one: Mapping[str, Any]) -> str:
    counted, host = one["counted"], one["host"]
    cells = [_mib(counted), _mib(one["estimated"]), _error(one["estimated"], counted)]
    cells += [_mib(host), _error(one["estimated_host"], host)] if host else ["", ""]
    cells.append(_error(one["reserved"], counted))
    return f"| {one['pass']} | " + " | ".join(cells) + " |"


def _mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:,.0f} MiB"


def _error(value: float, against: float) -> str:
    return f"{100 * (value / against - 1):+.1f} %"


if __name__ == "__main__":
    text = page()
    MEMORY.write_text(memory_page(), encoding="utf-8")
    TARGET.write_text(text, encoding="utf-8")
    sys.stdout.write(f"{TARGET.name}: {len(text.splitlines())} lines\n")
