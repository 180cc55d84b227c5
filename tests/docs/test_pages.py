"""All code on all pages runs, with every name defined on the page or in ``docs/names.md``."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from typing import Any

import pytest

from tests.docs.pages import (
    DOCS,
    README,
    _close,
    _short,
    blocks,
    checked,
    configuration,
    failures,
    names,
    sessions,
)
from tests.support.ranks import ranks
from zerotune import cli
from zerotune.plan import DeepSpeedPlan
from zerotune.plan.memory.rates import CARDS
from zerotune.plan.rules.table import all_rules

OUTCOMES = ("passed", "failed", "skipped")
EMBEDDED = (DOCS / "embedding.md").read_text()
MODEL = ("Model",)
ENGINE = ("Model", "An engine")
TRAINER = ("Model", "A trainer")

RANDOM = "generator = torch.Generator().manual_seed(0)"
ONE_PROCESS_GROUP = """
import torch.distributed as dist

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""
SCRIPT_ON_ACCELERATE = """
from accelerate import Accelerator

# Another model than the one that ``engine`` trains.
unet = type(unet).from_config(unet.config)
accelerator, config = Accelerator(cpu=True), unet.config
optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-3)
"""
EMBEDDING = """
from argparse import Namespace
from pathlib import Path

from diffusers.optimization import get_scheduler

args = Namespace(learning_rate=1e-4, max_train_steps=10)
plan = zerotune.DeepSpeedPlan.build(stage=2, offload="cpu", precision="fp32")
Path("ds_config.json").write_text(plan.to_json())
optimizer = torch.optim.AdamW(unet.parameters(), lr=args.learning_rate)
lr_scheduler = get_scheduler("constant", optimizer)
loader = torch.utils.data.DataLoader(range(4))
"""
PHOTOS = """
import shutil
import tarfile
from pathlib import Path

import datasets
import numpy as np
from PIL import Image as Picture
from diffusers import AutoencoderKL

Path("owner/name").mkdir(parents=True)
Path("photos").mkdir()
for number in range(8):
    pixels = np.full((32, 32, 3), 30 * number, np.uint8)
    Picture.fromarray(pixels).save(f"photos/{number}.png")
    Path(f"photos/{number}.txt").write_text(f"grey {number}")
for name in ("zoe", "people", "rejected"):
    shutil.copytree("photos", name)
for number in range(12):
    Path("clips/a cat").mkdir(parents=True, exist_ok=True)
    Picture.fromarray(np.full((32, 32, 3), 20 * number, np.uint8)).save(f"clips/a cat/{number}.png")
rows = datasets.Dataset.from_dict(
    {
        "image": [f"photos/{number}.png" for number in range(8)],
        "text": [f"grey {number}" for number in range(8)],
    }
)
rows.cast_column("image", datasets.Image()).to_parquet("owner/name/train.parquet")
Path("shards").mkdir()
for number in range(2):
    with tarfile.open(f"shards/{number:03}.tar", "w") as shard:
        shard.add("photos/1.png", arcname="1.png")
        shard.add("photos/1.txt", arcname="1.txt")
AutoencoderKL(block_out_channels=(32,), norm_num_groups=8).save_pretrained("sdxl/vae")
"""
OWN_LOOP = """
loader = zerotune.DataStream(dataset, micro_batch_size=4)
generator = torch.Generator().manual_seed(0)


def train(engine):
    for _ in range(2):
        engine.backward(objective(engine, next(loader), generator))
        engine.step()
"""
PARTS = """
from tests.support.pipelines import clip
from diffusers import UNet2DConditionModel

unet.save_pretrained("unet")
text_encoder = clip(projection=False)
text_encoder.save_pretrained("sd15/text_encoder")
UNet2DConditionModel(
    sample_size=8,
    layers_per_block=1,
    norm_num_groups=8,
    block_out_channels=(16, 32),
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
    up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    cross_attention_dim=32,
    attention_head_dim=8,
).save_pretrained("sd15/unet")
"""

PAGES: dict[str, tuple[tuple[str, ...], str]] = {
    "../README.md": ((), ""),
    "quickstart.md": ((), ""),
    "names.md": ((), ""),
    "from-deepspeed.md": (MODEL, RANDOM),
    "from-accelerate.md": (MODEL, ""),
    "from-simpletuner.md": (MODEL, ""),
    "own-model.md": ((), ""),
    "lean.md": (MODEL, RANDOM),
    "offload.md": (MODEL, ONE_PROCESS_GROUP + "import os\nos.mkdir('swap')"),
    "optimizers.md": (MODEL, PARTS),
    "ema.md": (ENGINE, SCRIPT_ON_ACCELERATE),
    "master-weights.md": (ENGINE, ""),
    "checkpoints.md": (TRAINER, ""),
    "objectives.md": (MODEL, ""),
    "lora.md": (MODEL, OWN_LOOP + PARTS),
    "data.md": (MODEL, PHOTOS),
    "training.md": (MODEL, ""),
    "diagnostics.md": (MODEL, ""),
    "embedding.md": (MODEL, EMBEDDING),
    "builder.md": (MODEL, ""),
}
ELSEWHERE = {
    "families.md": "tests/diffusion/families/test_own_family.py",
    "blocks.md": "tests/diffusion/families/test_modular.py",
}


@pytest.mark.deepspeed
@pytest.mark.parametrize("page", PAGES)
@ranks(1)
def test_the_code_on_each_page_runs(page, tmp_path):
    """Run a page's blocks in one namespace.

    Args:
        page: Its name under ``docs``.
        given: Sections of ``docs/names.md`` that the page relies on.
        setup: Replacements for the reader's own files and functions.
        folder: An empty working directory.
    """
    given, setup = PAGES[page]
    os.chdir(tmp_path)
    scope: dict[str, Any] = {"__name__": "__main__"}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for code in (names(*given), setup):
            exec(compile(_short(code), "<given>", "exec"), scope)
        for block in blocks(DOCS / page):
            # Let tracebacks name the page and the line in it.
            code = "\n" * (block.line - 1) + _short(block.code)
            exec(compile(code, str(block.page), "exec"), scope)
        _close(scope)


@pytest.mark.parametrize("page", [page.name for page in DOCS.glob("*.md") if sessions(page)])
def test_interpreter_sessions_print_what_the_page_shows(page):
    assert failures(page) == ""


@pytest.mark.parametrize("page", [README, DOCS / "quickstart.md"], ids=lambda page: page.name)
def test_the_error_shown_on_the_page_equals_the_output_of_the_command(
    page, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds_config.json").write_text(configuration())
    assert cli.main(["plan", "check", "ds_config.json"]) == 1
    assert " ".join(capsys.readouterr().out.split()) == checked(page)


@pytest.mark.parametrize("page", [README, DOCS / "index.md"], ids=lambda page: page.name)
def test_the_speed_up_on_the_page_equals_the_measured_one(page):
    measured = (DOCS / "performance.md").read_text()
    row = r"^\| a step with an EMA, {} \| DeepSpeed, same configuration \| ([\d.]+) "
    transformer, unet = (
        float(re.search(row.format(model), measured, re.MULTILINE)[1])
        for model in ("transformer like SD3's", "U-Net like SDXL's")
    )
    told = " ".join(page.read_text().split())
    expected = f"{transformer:.2f} (a transformer like SD3's) and {unet:.2f} (a U-Net like SDXL's)"
    assert f"takes {expected} of the CPU time" in told


NUMBERS = {10: "Ten", 11: "Eleven", 12: "Twelve"}


def known_figures():
    """Return page, pattern with the figure, and the figure according to code or results."""
    records = json.loads((DOCS / "results" / "versions.json").read_text())
    oldest = max((one for one in records.values() if one["failed"]), key=lambda one: one["failed"])
    cells = re.findall(r"of (\d+) cells", (DOCS / "resume-matrix.md").read_text())
    candidates = DeepSpeedPlan.advise("sdxl", vram="12GiB", ram="64GiB").candidates
    trainings = json.loads((DOCS / "results" / "large.json").read_text())["cases"]
    full = {
        (one["name"], name): round(found["host_bytes"]["median"] / 2**30, 1)
        for one in trainings
        for name, found in one["contestants"].items()
    }
    lean, coded = "SDXL, Adafactor by its own code", "SDXL, streamed, 8-bit moments"
    lines = re.findall(r"^\| .*(?:SDXL|sdxl|FLUX|flux).*\| (\d+) \|", EMBEDDED, re.M)
    return [
        ("CHANGELOG.md", r"(\d+) rules check a plan", len(all_rules())),
        ("CHANGELOG.md", r"figures for (\d+) cards", len(CARDS)),
        ("README.md", r"\((\d+) of \d+ tests fail", oldest["failed"]),
        ("README.md", r"\(\d+ of (\d+) tests fail", sum(oldest[key] for key in OUTCOMES)),
        ("README.md", r"(\d+) combinations tested", sum(map(int, cells))),
        ("README.md", r"\((\d+) lines for SDXL", int(lines[0])),
        ("README.md", r"(\d+) for FLUX.1 LoRA\)", int(lines[1])),
        ("README.md", r"GPU: (\d+\.\d) GiB at most", full[lean, "measured"]),
        ("README.md", r"at most \(estimated (\d+\.\d)\)", full[lean, "estimated"]),
        ("README.md", r"weights, (\d+\.\d) GiB \(", full[coded, "measured"]),
        ("README.md", r"\d GiB \(estimated (\d+\.\d)\)", full[coded, "estimated"]),
        ("README.md", r"(\w+) \[trainings of full", NUMBERS[len(trainings)]),
        ("docs/status.md", r"under every plan, (\d+) pairs", sum(map(int, cells))),
        ("docs/status.md", r"`, (\d+) candidates", len(candidates)),
        ("docs/rules.md", r"^\| `[\w-]+` \|", len(all_rules())),
    ]


def test_figures_on_pages_equal_those_of_the_code_and_the_results():
    for page, pattern, figure in known_figures():
        text = (DOCS.parent / page).read_text()
        found = re.findall(pattern, text if "^" in pattern else " ".join(text.split()), re.M)
        told = len(found) if "^" in pattern else type(figure)(found[0])
        assert told == figure, (page, pattern)


def test_every_page_with_code_is_tested():
    written = {path.name for path in [README, *DOCS.rglob("*.md")] if any(blocks(path))}
    assert written == {name.removeprefix("../") for name in (*PAGES, *ELSEWHERE)}
