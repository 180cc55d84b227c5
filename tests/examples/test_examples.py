"""The examples run unchanged at every stage, offload and launcher."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.support.ranks import ranks, run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
SMOKE = ["--steps", "4", "--batch-size", "8", "--per-class", "2"]
EASY = ["--require", "0"]
CASES = [
    pytest.param(EASY, id="stage-2-cpu"),
    *(
        pytest.param(arguments, id=name, marks=[pytest.mark.nightly, *more])
        for name, arguments, *more in (
            ("plain", ["--no-deepspeed"]),
            ("stage-0", ["--stage", "0", *EASY]),
            ("stage-1", ["--stage", "1", "--offload", "none", "--accumulation", "2", *EASY]),
            ("stage-3-nvme", ["--stage", "3", "--offload", "nvme", *EASY], pytest.mark.nvme),
        )
    ),
]
_losses: dict[str, list[float]] = {}


def digits(arguments: list[str]) -> int:
    from examples.digits import main

    return main(arguments)


def losses_of(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]
    return [json.loads(line)["loss"] for line in lines]


def check_results(folder: Path) -> None:
    for name in ("learning.png", "digits.png"):
        with Image.open(folder / name) as image:
            image.load()
            assert len(image.convert("L").getcolors(256)) > 10, f"{name} is blank"
    assert (folder / "checkpoint" / "manifest.json").is_file()
    swap = folder / "swap"
    assert not swap.exists() or list(swap.iterdir()) == []


@pytest.mark.deepspeed
@pytest.mark.parametrize("arguments", CASES)
def test_the_demo_saves_resumes_and_samples_under_every_plan(arguments, tmp_path):
    (code,) = run_ranks(digits, [*SMOKE, *arguments, "--output", str(tmp_path)])
    # Four steps teach nothing, so that the script exits with 1 unless --require is lowered.
    assert code == (0 if "--require" in arguments else 1)
    check_results(tmp_path)
    if "--accumulation" not in arguments:
        # With accumulation the same random numbers are drawn in another order.
        losses = losses_of(tmp_path)
        assert losses == pytest.approx(_losses.setdefault("first", losses), rel=5e-5)


def on_two_ranks(arguments: list[str]) -> str:
    results = run_ranks(saying, digits, arguments, world_size=2)
    assert [code for code, _ in results] == [0, 0]
    return "".join(said for _, said in results)


def under_torchrun(arguments: list[str]) -> str:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    return launch([*launcher, str(EXAMPLES / "digits.py"), *arguments])


@pytest.mark.deepspeed
@pytest.mark.nightly
@pytest.mark.parametrize("start", [on_two_ranks, under_torchrun])
def test_the_demo_saves_and_resumes_on_two_processes(start, tmp_path):
    output = start([*SMOKE, *EASY, "--stage", "3", "--output", str(tmp_path)])
    check_results(tmp_path)
    assert losses_of(tmp_path)
    assert "host engine, 2 processes" in output
    assert output.count("resumed at step 2") == 1, "rank 0 alone speaks"
    assert "recognised" in output


@pytest.mark.gpu
@pytest.mark.deepspeed
@pytest.mark.parametrize(
    "arguments", [[], ["--stage", "3"], ["--stage", "1", "--offload", "none"], ["--no-deepspeed"]]
)
def test_the_demo_trains_in_bf16_on_a_gpu(arguments, tmp_path):
    output = launch(
        [str(EXAMPLES / "digits.py"), *SMOKE, *EASY, *arguments, "--output", str(tmp_path)]
    )
    check_results(tmp_path)
    assert "precision       bf16" in output
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    for metrics in map(json.loads, lines):
        assert metrics["device_peak"] > 2**20
        assert 0 < metrics["phases"]["forward"] < metrics["seconds"]


SCREEN = 24
"""Lines of a terminal."""


def saying(function: Any, *arguments: Any) -> tuple[Any, str]:
    """Return a call's result and all output on stdout and stderr, from any library or process."""
    with tempfile.TemporaryFile("w+") as said:
        sys.stdout.flush()
        kept = [(stream, os.dup(stream)) for stream in (1, 2)]
        for stream, _ in kept:
            os.dup2(said.fileno(), stream)
        try:
            result = function(*arguments)
            sys.stdout.flush()
        finally:
            for stream, former in kept:
                os.dup2(former, stream)
        said.seek(0)
        return result, said.read()


def fits_a_screen(said: str, *, first: str) -> None:
    """Check that the output before the first step fits a screen."""
    before, found, _ = f"\n{said}".partition(f"\n{first}")
    assert found, said
    # A second start prints no compiler output and no warnings of other libraries.
    lines = [line for line in before.splitlines() if not OTHERS.match(line)]
    assert len(lines) <= SCREEN, before


OTHERS = re.compile(r"op \w+: |DeepSpeed deepspeed\.ops|\[\d{4}-|.*Warning: |  return func\(")


@ranks(1)
def test_an_impossible_plan_prints_a_one_line_error(tmp_path):
    arguments = ["--stage", "2", "--offload", "nvme", "--output", str(tmp_path)]
    text = io.StringIO()
    with contextlib.redirect_stderr(text):
        code = digits(arguments)
        said = text.getvalue()
        assert code == 2
        assert said.startswith("PlanConflictError: zero_optimization.offload_optimizer.device")
        assert said.count("\n") == 1


def example(name: str, steps: int) -> Any:
    return importlib.import_module(f"examples.{name}").main(steps)


@pytest.mark.deepspeed
@pytest.mark.parametrize(
    ("name", "first"), [("own_loop", "loss "), ("minimal_trainer", "step 1/3")]
)
def test_a_short_example_trains_and_its_output_fits_a_screen(name, first):
    ((_, said),) = run_ranks(saying, example, name, 3)
    assert "sampled (4, 1, 8, 8)" in said
    fits_a_screen(said, first=first)


def launch(arguments: list[str]) -> str:
    paths = [str(EXAMPLES.parent / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    result = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout
