"""Write docs/fits.md (plans that ``advise`` finds for cards) and the tables of memory-proof.md.

Run ``python docs/generate_memory.py``; a test fails if the committed files differ from its output.
"""

from __future__ import annotations

import json
import math
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

# Make ``bench`` importable, from whatever folder the script is started.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.show import amount, machine
from zerotune._util.text import parse_size
from zerotune.builder.models import model_name
from zerotune.errors import NothingFitsError
from zerotune.plan import DeepSpeedPlan
from zerotune.plan.families import family_names, model_family
from zerotune.plan.memory.rates import listed_card
from zerotune.plan.plan import Advice
from zerotune.platform import Platform

TARGET = Path(__file__).parent / "fits.md"

INTRODUCTION = """\
For the fastest plan that fits, the tables show the predicted seconds per training step. A letter
says where the plan keeps the optimizer and the weights. The machine has one GPU, {host} of host
memory and an NVMe disk. All plans train in bf16 with AdamW, fp32 master weights and an EMA in host
memory, at batch 1 and {side} x {side} pixels (for clips, the table gives the size). No figure was
measured on a GPU: memory figures come from [the memory model](memory.md), and times from [published
figures](memory.md#how-long-a-step-takes) for {cards}.

The letters mean: {letters}. An asterisk (\\*) means that blocks are recomputed in the backward pass
(gradient checkpointing); two asterisks mean that the blocks' inputs are also kept in host memory. A
dash means that no plan fits. For your own machine, run `zerotune plan advise --family sdxl --vram
24 --ram 64`; if needed, add `--nvme 2TB`, `--lora {rank}` or `--base-dtype nf4` (QLoRA)."""

STREAMING = """\
[Streaming](streaming.md) moves weights through the GPU block by block. It has not been measured on
a GPU. The tables above list the plans without it.

The table shows the predicted seconds per step on a 24 GiB GPU for different amounts of host memory.
The plans clip gradients, and use neither NVMe nor an EMA. In each cell, the first figure is for the
fastest plan without streaming, and the second for the fastest plan with streaming. A dash means
that no plan fits."""

IN_FULL = """\
[Updates on the device](streaming.md#update-on-the-device) fit larger models into less host memory.
They have not been measured on a GPU either. The tables show the predicted seconds per step of full
fine-tuning with Adafactor, at batch 1 and the sizes above, without NVMe and without an EMA, by
memory of the GPU (rows) and of the host (columns). In each cell, the first figure is for exact
training with clipping, the second for exact training without clipping (both with split master
weights), and the third for weights that are rounded to bf16 at random, without clipping. A dash
means that no plan fits.

Other trainers publish for lean training, which rounds weights at random, does not clip and updates
in the backward pass: 7.08 s for FLUX.1 with 21.8 GB of GPU memory (kohya's sd-scripts, [issue
1764]({issue})), and presets for Qwen-Image on 16 GB and Chroma on 8 GB, both at 512² and batch 2
(OneTrainer). RamTorchRun's 35 s for Krea 2 are for four batches of 1 at 256². musubi-tuner trains
Qwen-Image in full with about 40 GB of GPU memory without offload. [Predictions](predictions.md)
lists these runs beside ours."""

FOREMOST = (
    *("sd15", "sdxl", "sd35-medium", "sd35-large", "flux", "flux2", "qwen-image", "z-image"),
    *("wan-1.3b", "wan-14b", "ltx-video", "hunyuan-video"),
)
OTHERS = (
    *("sd21", "sd3-medium", "flux2-klein-4b", "flux2-klein-9b", "chroma", "krea2", "hidream"),
    *("aura-flow", "lumina2", "pixart-sigma", "sana"),
)
"""Families in the folded tables; editing models and ControlNets are only in the last table."""
DETAILED = ("sdxl", "flux")
"""Families for which the page lists the memory of each plan."""
TRAINED_IN_FULL = ("flux", "qwen-image", "wan-14b", "krea2", "z-image", "chroma")
SMALL_CARDS = ("12GiB", "16GiB", "24GiB", "32GiB")
SMALL_HOSTS = ("32GiB", "64GiB", "96GiB", "128GiB")
WAYS: tuple[dict[str, Any], ...] = (
    {"update": "device:split"},
    {"update": "device:split", "gradient_clipping": 0.0},
    {"update": "device:stochastic", "gradient_clipping": 0.0},
)
"""Exact with clipping, exact without clipping, and lean."""
CARDS = ("80GiB", "48GiB", "24GiB", "16GiB", "12GiB", "8GiB")
HOST, NVME = "128GiB", "2TB"
STREAMED_HOSTS = ("64GiB", "128GiB", "192GiB", "256GiB")
RANK = 16
SIDE = 1024
KOHYA = "https://github.com/kohya-ss/sd-scripts/issues/1764"
UNBROKEN = "\N{NO-BREAK SPACE}"
LETTERS = {
    "A": "everything on the GPU",
    "B": "as much of the optimizer as fits on the GPU, the rest in host memory",
    "C": "optimizer in host memory",
    "D": "optimizer and weights in host memory",
    "E": "optimizer on NVMe",
    "F": "optimizer on NVMe, weights in host memory",
    "G": "optimizer and weights on NVMe",
}
"""Where a plan keeps optimizer and weights, from least to most offload."""
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
    """Return docs/fits.md."""
    letters = "; ".join(f"**{letter}** {meaning}" for letter, meaning in LETTERS.items())
    parts = [
        "<!-- Written by docs/generate_memory.py; edit that. -->",
        "# What fits where",
        INTRODUCTION.format(host=_gib(HOST), side=SIDE, rank=RANK, cards=_cards(), letters=letters),
    ]
    for title, lora in (("All weights", None), (f"Adapters of rank {RANK}", RANK)):
        parts += [f"## {title}", _table(FOREMOST, lora)]
        parts.append(_folded("More models", _table(OTHERS, lora)))
        parts += [] if lora else map(_costs, DETAILED)
    parts += ["## Full fine-tuning on small machines", IN_FULL.format(issue=KOHYA)]
    parts.append("\n".join(_in_full()))
    parts.append("## Streamed weights")
    title = "Seconds of every family on 24 GiB, with and without streamed weights"
    parts.append(_folded(title, STREAMING, _streamed()))
    return "\n\n".join(parts) + "\n"


def _folded(title: str, *blocks: str) -> str:
    return "\n\n".join(["<details>", f"<summary>{title}</summary>", *blocks, "</details>"])


def _cards() -> str:
    # The tables give no names of cards, so only the memory size counts.
    names = [listed_card("", int(size.removesuffix("GiB"))).name for size in CARDS]
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _gib(size: str) -> str:
    return size.replace("GiB", f"{UNBROKEN}GiB")


def _named(name: str) -> str:
    """Return a family's title, with the frames and resolution of a clip."""
    known = model_family(name)
    clip = "" if known.frames is None else f", {known.frames} x {known.resolution}²"
    return f"{model_name(name).partition(' (')[0]}{clip}"


def _table(families: Sequence[str], lora: int | None) -> str:
    """Return a table with a row for each family and a column for each card."""
    rows = [
        "| model | billions | " + " | ".join(map(_gib, CARDS)) + " |",
        "|---|--:|" + "--:|" * len(CARDS),
    ]
    return "\n".join([*rows, *(row(name, lora) for name in families)])


def row(name: str, lora: int | None) -> str:
    """Return a family's seconds on each card."""
    cells = [_named(name), f"{model_family(name).facts.numel / 1e9:.1f}"]
    cells += [_cell(name, card, lora) for card in CARDS]
    return f"| {' | '.join(cells)} |"


def _in_full() -> Iterator[str]:
    yield f"| model | GPU | {' | '.join(map(_gib, SMALL_HOSTS))} |"
    yield "|---|--:|" + "--:|" * len(SMALL_HOSTS)
    for name in TRAINED_IN_FULL:
        for card in SMALL_CARDS:
            yield in_full_row(name, card)


def in_full_row(name: str, card: str) -> str:
    """Return the seconds of a family's full fine-tuning for each amount of host memory."""
    cells = (
        " / ".join(_seconds_in_full(name, card, host, way) for way in WAYS) for host in SMALL_HOSTS
    )
    return f"| {_named(name)} | {_gib(card)} | {' | '.join(cells)} |"


def _seconds_in_full(name: str, card: str, host: str, way: Mapping[str, Any]) -> str:
    asked = {"vram": card, "ram": host, "precision": "bf16", "optimizer": "Adafactor", **way}
    try:
        time = DeepSpeedPlan.advise(name, **asked).chosen.time
    except NothingFitsError:
        return "-"
    return "" if time is None else _amount(time.expected)


def _cell(name: str, card: str, lora: int | None) -> str:
    try:
        advice = DeepSpeedPlan.advise(
            name,
            vram=card,
            ram=HOST,
            nvme=NVME,
            ema="host",
            precision="bf16",
            lora=lora,
            streamed=False,
        )
    except NothingFitsError:
        return "-"
    if advice.chosen.time is None:
        raise AssertionError(f"the arithmetic of {name} is not known")
    marks = "\\*" * (advice.gradient_checkpointing + advice.activation_offload)
    return f"{_amount(advice.chosen.time.expected)}{UNBROKEN}{_letter(advice)}{marks}"


def _letter(advice: Advice) -> str:
    """Return the key of ``LETTERS`` for the advised plan."""
    optimizer = advice.plan.offload_optimizer_device
    parameters = advice.plan.offload_param_device
    if optimizer == "nvme":
        return {"none": "E", "cpu": "F", "nvme": "G"}[parameters]
    if parameters == "cpu":
        return "D"
    if optimizer == "none":
        return "A"
    section = advice.plan.zero_optimization.offload_optimizer
    return "C" if section is None or section.ratio is None else "B"


def _amount(seconds: float) -> str:
    """Format seconds with two significant digits."""
    return f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.{1 if seconds >= 1 else 2}f}"


def _costs(family: str) -> str:
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
                resolution=SIDE,
                gradient_checkpointing=checkpointing,
            )
            cells.append(f"{estimate.device / 2**30:.1f}")
        cells += [f"{estimate.host / 2**30:.1f}", f"{estimate.nvme / 2**30:.1f}"]
        rows.append(f"| {title} | " + " | ".join(cells) + " |")
    return _folded(f"GiB that each plan needs for {_named(family)}", "\n".join(rows))


def _streamed() -> str:
    """Return a table of every family, for all weights and adapters, with and without streaming."""
    rows = [
        "| model | trained | " + " | ".join(map(_gib, STREAMED_HOSTS)) + " |",
        "|---|---|" + "--:|" * len(STREAMED_HOSTS),
    ]
    trained = [(name, lora) for name in family_names() for lora in (None, RANK)]
    return "\n".join([*rows, *(streamed_row(name, lora) for name, lora in trained)])


def streamed_row(name: str, lora: int | None) -> str:
    """Return a family's seconds for each amount of host memory, with and without streaming."""
    trained = "all weights" if lora is None else "adapters"
    return f"| {_named(name)} | {trained} | {' | '.join(_streamed_cells(name, lora))} |"


def _streamed_cells(name: str, lora: int | None) -> list[str]:
    try:
        advice = DeepSpeedPlan.advise(
            name, vram="24GiB", ram="4TiB", precision="bf16", lora=lora, update="host"
        )
    except NothingFitsError:
        return ["- / -"] * len(STREAMED_HOSTS)
    return [_seconds(advice, host) for host in STREAMED_HOSTS]


def _seconds(advice: Advice, host: str) -> str:
    """Return the seconds of the fastest plans that fit in ``host``, without and with streaming."""
    budget = attrs.evolve(advice.budget, host=parse_size(host, key="ram"))
    seconds: dict[bool, float] = {}
    for one in (advice.chosen, *advice.runners_up):
        if one.time is not None and one.estimate.host <= budget.usable("host"):
            is_streamed = one.streamed is not None
            seconds[is_streamed] = min(seconds.get(is_streamed, math.inf), one.time.expected)
    return " / ".join(f"{seconds[key]:.2f}" if key in seconds else "-" for key in (False, True))


# -- The memory model against passes of real models on a device without memory, and against
# trainings of full size.

PROOF = TARGET.with_name("memory-proof.md")
RESULTS = TARGET.parent / "results"
WRITTEN_BY = "written by docs/generate_memory.py -->"

TRAININGS = """\
`nox -s large` trains the whole U-Nets of SD 1.5 (860 million parameters) and SDXL (2,567 million)
with random weights, without a GPU, at 128 x 128 pixels with batch 1 and recomputed blocks: two
steps, a checkpoint, a resume in a new process, and an export of the trained and the EMA weights.
The peak is that of the process's anonymous memory over all phases. Every tensor of each export was
read back; names and shapes are the model's, and all values are finite. The last column is the disk
space of swap files and of the EMA's file; full trainings keep the EMA in a file unless their name
says otherwise. {resumed} These trainings ran {when} on {machine}, with {versions}."""

ABOVE = """\
A training without a checkpoint had no room for it on the disk. Without a GPU, the peak contains
freed memory too, which glibc keeps for reuse; this is most with an optimizer on NVMe. With
`MALLOC_MMAP_THRESHOLD_=1048576` in the environment, glibc returns it: two steps of SD 1.5 with the
optimizer on NVMe then took 5.5 GiB at most."""


def proof_page() -> str:
    """Return docs/memory-proof.md with new tables."""
    text = PROOF.read_text(encoding="utf-8")
    for name, table in (("trainings", _trainings()), ("passes", _passes())):
        begin, end = f"<!-- {name}: {WRITTEN_BY}", f"<!-- end of {name} -->"
        before, rest = text.split(begin)
        text = f"{before}{begin}\n\n{table}\n\n{end}{rest.split(end)[1]}"
    return text


def _trainings() -> str:
    result = json.loads((RESULTS / "large.json").read_text(encoding="utf-8"))
    cases, versions = result["cases"], result["versions"]
    days = sorted(case["measured"][:10] for case in cases)
    resumed = [case["facts"]["resumed exactly"] for case in cases
               if "resumed exactly" in case["facts"]]  # fmt: skip
    about = TRAININGS.format(
        when=f"on {days[0]}" if days[0] == days[-1] else f"between {days[0]} and {days[-1]}",
        machine=machine(result),
        versions=", ".join(f"{name} {versions[name]}" for name in ("torch", "deepspeed")),
        resumed="After each resume, the next loss equals that of the run that went on, bit for bit."
        if all(resumed)
        else f"After {sum(resumed)} of {len(resumed)} resumes, the next loss equals that of the "
        "run that went on, bit for bit.",
    )
    rows = [
        "| training | peak | estimated | error | step | save | resume | checkpoint | on disk |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    above = textwrap.fill(ABOVE, 100)
    return "\n".join([textwrap.fill(about, 100), "", *rows, *map(_training, cases), "", above])


def _training(case: Mapping[str, Any]) -> str:
    measured = {name: one["median"] for name, one in case["contestants"]["measured"].items()}
    estimated = case["contestants"]["estimated"]["host_bytes"]["median"]
    if failed := case["facts"].get("failed"):
        return f"| {case['name']} | {failed} |" + " |" * 7
    peak = measured["host_bytes"]
    cells = [amount(peak, "bytes"), amount(estimated, "bytes"), _error(estimated, peak)]
    cells += [
        amount(measured[quantity], quantity) if measured.get(quantity) else ""
        for quantity in ("step_seconds", "save_seconds", "resume_seconds", "checkpoint_bytes",
                         "disk_bytes")
    ]  # fmt: skip
    return f"| {case['name']} | " + " | ".join(cells) + " |"


def _passes() -> str:
    passes = json.loads((RESULTS / "fake_device.json").read_text(encoding="utf-8"))
    rows = [
        "| pass | counted | estimated | error | in RAM | error | reserved |",
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
    PROOF.write_text(proof_page(), encoding="utf-8")
    TARGET.write_text(text, encoding="utf-8")
    sys.stdout.write(f"{TARGET.name}: {len(text.splitlines())} lines\n")
