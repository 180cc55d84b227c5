"""Do what users do on their second day, step by step, and check the result of each step.

``python -m tests.second_day`` plays it with the installed zerotune; ``nox -s second_day`` with the
wheel in a separate environment, and a test with the source tree.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.resources
import importlib.util
import io
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs

from tests.support.ranks import free_port, run_ranks

try:
    INSTALLED = importlib.util.find_spec("zerotune.examples.finetune") is not None
except ImportError:
    INSTALLED = False
SCRIPTS = "zerotune.examples" if INSTALLED else "examples"
"""Package of the scripts: in the wheel, or next to the source tree."""
PHOTOS = {"chelsea": "a cat", "coffee": "a cup of coffee"}
SMALL = ["--draw-steps", "1", "--prompts", "a cat", "--resolution", "16"]
ALIKE = 5e-5
"""Relative difference of losses under different plans."""


@attrs.frozen
class Outcome:
    """Result of a step of the day."""

    what: str
    well: bool
    said: str


@attrs.frozen(kw_only=True)
class Day:
    """Folder of the day, and what later steps compare with."""

    folder: Path
    memory: dict[str, Any] = attrs.field(factory=dict)

    def finetune(self, output: str, steps: int, *more: str, stop: int | None = None) -> Any:
        """Run ``finetune.py`` in a separate process, with a SIGTERM during step ``stop``."""
        line = [str(self.folder / "model"), str(self.folder / "photos"), str(self.folder / output)]
        line += ["--plan", "sdxl", *SMALL]
        line += ["--every", "100", "--steps", str(steps), *more]
        return run_ranks(finetuned, line, stop)[0]

    def exported(self) -> str | None:
        """Return a hash of the exported U-Net; ``None`` if there is none."""
        file = self.folder / "run" / "pipeline" / "unet" / "diffusion_pytorch_model.safetensors"
        return hashlib.sha256(file.read_bytes()).hexdigest() if file.exists() else None


# -- The steps of the day. Each returns a description of its result, or fails.


def train(day: Day) -> str:
    """Train in one go, to compare with."""
    day.memory["whole"] = whole = day.finetune("whole", 4)
    check(len(whole) == 4, f"{len(whole)} steps instead of 4")
    return f"{len(whole)} steps, loss {whole[-1]:.4f}"


def stop(day: Day) -> str:
    """Stop with SIGTERM."""
    losses = day.finetune("run", 3, stop=1)
    check(losses == day.memory["whole"][:1], f"losses {losses}")
    check(day.exported() is None, "a stopped run has exported")
    return "after the step under way, with a checkpoint and without an export"


def go_on(day: Day) -> str:
    """Give the same command again."""
    losses = day.finetune("run", 3)
    check(losses == day.memory["whole"][1:3], f"losses {losses}")
    day.memory["export"] = day.exported()
    check(day.memory["export"] is not None, "nothing was exported")
    return "bit for bit as without the stop, and exports"


def export_twice(day: Day) -> str:
    """Give it once more, when all is done."""
    check(day.finetune("run", 3) == [], "it trained on")
    check(day.exported() == day.memory["export"], "the export is another")
    return "no step; the export takes the place of the first, with the same bytes"


def extend(day: Day) -> str:
    """Give it with more steps."""
    losses = day.finetune("run", 4)
    check(losses == day.memory["whole"][3:], f"losses {losses}")
    check(day.exported() not in (None, day.memory["export"]), "the export is the old one")
    return "bit for bit as in one go; the export is replaced"


def ask(day: Day) -> str:
    """Stop once more, and ask for an export."""
    before = day.exported()
    losses = day.finetune("run", 9, "--export-stopped", stop=5)
    check(len(losses) == 1, f"losses {losses}")
    check(day.exported() not in (None, before), "the export is the old one")
    return "the export holds what was reached"


def change_plan(day: Day) -> str:
    """Resume under another plan and with two processes."""
    one, two = day.folder / "one", {"stage": 3, "offload": "none"}
    (before,) = run_ranks(digits, 4, None, {"stage": 2, "offload": "cpu"}, str(one))
    (alone,) = run_ranks(digits, 6, str(one), {"stage": 2, "offload": "cpu"}, None)
    both = run_ranks(digits, 6, str(one), two, None, world_size=2)
    check(len(before["losses"]) == 4, f"losses {before['losses']}")
    check(len(both[0]["losses"]) == 2, f"losses {both[0]['losses']}")
    check(both[0]["losses"] == both[1]["losses"], "the ranks do not agree")
    keys = {key for found in both for key in found["decisions"]}
    check({"stage", "world_size"} <= keys, f"decisions {sorted(keys)}")
    check(alone["step"] == both[0]["step"] == 6, f"steps {alone['step']}, {both[0]['step']}")
    return f"ZeRO-2 on one process to ZeRO-3 on two; {len(keys)} decisions"


def convert(day: Day) -> str:
    """Convert a checkpoint of accelerate."""
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    state, portable = str(day.folder / "state"), str(day.folder / "portable")
    (ahead,) = run_ranks(with_accelerate, 5, None, env=env)
    (before,) = run_ranks(with_accelerate, 3, state, env=env)
    check(before == ahead[:3], "accelerate's runs differ")
    (seen,) = run_ranks(converted, state, portable)
    apart = max(abs(a - b) / a for a, b in zip(ahead[3:], seen["losses"], strict=True))
    check(apart < ALIKE, f"losses {seen['losses']} instead of {ahead[3:]}")
    check({"data", "shadows.ema"} <= set(seen["decisions"]), f"{seen['decisions']}")
    return f"save_state converted and resumed; losses within {apart:.1e} of accelerate's own"


def reuse(day: Day) -> str:
    """Use the model again after its trainer is closed."""
    (seen,) = run_ranks(used_again)
    check(seen["whole"], "the model is not whole")
    check(seen["again"] == 2, f"{seen['again']} steps of the second trainer")
    check("already trains" in seen["open"], seen["open"])
    return "whole, trained by a second trainer; two at a time are refused"


def embed(day: Day) -> str:
    """Embed in a custom script, with EMA, save and resume."""
    (losses,) = run_ranks(embedded, str(day.folder / "embedded"))
    check(len(losses) == 10, f"{len(losses)} micro batches instead of 10")
    return "stopped at stage 2, gone on at stage 3, EMA exported"


def load_and_export(day: Day) -> str:
    """Load a pipeline by its family's name, train it with an EMA, resume, export."""
    (said,) = run_ranks(loaded_and_exported, str(day.folder))
    check("step: 0 -> 1 (epoch 1, after 1 of 2 micro batches; continues from" in said, said)
    return "one number for the EMA, one callback, where it continues, a folder and a single file"


def mistakes(day: Day) -> str:
    """Make the usual mistakes."""
    (said,) = run_ranks(mistaken, str(day.folder))
    wrong = {name: text for name, text in said.items() if not text.startswith(("taken", "told"))}
    check(not wrong, f"{wrong}")
    taken = sum(text == "taken" for text in said.values())
    return f"{taken} taken, {len(said) - taken} answered with what to write"


STEPS: tuple[Callable[[Day], str], ...] = (
    train,
    stop,
    go_on,
    export_twice,
    extend,
    ask,
    change_plan,
    convert,
    reuse,
    embed,
    load_and_export,
    mistakes,
)


# -- The recipes: each command runs two steps, and is repeated with one step more.


def recipe(day: Day, name: str, *line: str, exported: str) -> str:
    """Start a recipe, and give the same command again."""
    output = str(day.folder / f"of-{name}")
    command = [*line, "--bucket-step", "4", "--every", "2", "--output", output]
    (found,) = run_ranks(from_recipe, name, [*command, "--steps", "2"], [*command, "--steps", "3"])
    check([len(losses) for losses in found] == [2, 1], f"losses {found}")
    check((Path(output) / exported).exists(), f"{exported} was not written")
    return f"two steps, one more, {exported}"


def mix(day: Day) -> str:
    """Train on a mixture of data."""
    line = ["--base", str(day.folder / "model"), "--data", str(day.folder / "sets")]
    line += ["--areas", "256", "--batch", "1"]
    return recipe(day, "mixture", *line, exported="lora.safetensors")


def train_text_encoders(day: Day) -> str:
    """Train text encoders too."""
    line = ["--base", str(day.folder / "model"), "--data", str(day.folder / "photos")]
    line += ["--area", "256", "--batch", "1", "--text-steps", "3"]
    return recipe(day, "text_encoder", *line, exported="lora.safetensors")


def train_with_a_robust_loss(day: Day) -> str:
    """Train with a robust loss."""
    line = ["--base", str(day.folder / "model"), "--data", str(day.folder / "photos")]
    line += ["--area", "256", "--batch", "1", "--rank", "2"]
    return recipe(day, "losses", *line, exported="lora.safetensors")


def train_a_controlnet(day: Day) -> str:
    """Train a ControlNet."""
    run_ranks(edges_drawn, str(day.folder))
    line = ["--base", str(day.folder / "sdxl" / "wide"), "--data", str(day.folder / "photos")]
    line += ["--conditions", str(day.folder / "edges"), "--area", "256", "--batch", "1"]
    line += ["--draw-steps", "1"]
    return recipe(day, "controlnet", *line, exported="controlnet/config.json")


def train_on_preferences(day: Day) -> str:
    """Train on pairs of preferred and rejected images."""
    run_ranks(pairs_made, str(day.folder))
    line = ["--base", str(day.folder / "sdxl" / "wide"), "--data", str(day.folder / "pairs")]
    line += ["--area", "256", "--accumulation", "1", "--rank", "2"]
    return recipe(day, "preference", *line, exported="lora.safetensors")


def train_one_file(day: Day) -> str:
    """Train the single file that was exported before."""
    line = ["--base", str(day.folder / "trained.safetensors")]
    line += ["--config", str(day.folder / "sdxl" / "wide"), "--data", str(day.folder / "photos")]
    line += ["--area", "256", "--batch", "1"]
    return recipe(day, "single_file", *line, exported="model.safetensors")


def train_on_clips(day: Day) -> str:
    """Train on clips that continue an image."""
    run_ranks(clips_cut, str(day.folder))
    line = ["--base", str(day.folder / "wan"), "--data", str(day.folder / "clips")]
    line += ["--area", "256", "--frames", "5", "--fps", "24", "--rank", "2", "--draw-steps", "1"]
    return recipe(day, "image_to_video", *line, exported="adapters")


RECIPES: tuple[Callable[[Day], str], ...] = (
    mix,
    train_text_encoders,
    train_with_a_robust_loss,
    train_a_controlnet,
    train_on_preferences,
    train_one_file,
    train_on_clips,
)
"""Steps with a wheel only: in the source tree each recipe has its own tests."""


def play(folder: Path, steps: tuple[Callable[[Day], str], ...] = STEPS) -> Iterator[Outcome]:
    """Play the whole day in an existing, empty folder."""
    day = Day(folder=folder)
    (ready,) = run_ranks(prepared, str(folder))
    assert ready
    for step in steps:
        what = (step.__doc__ or "").strip().rstrip(".").lower()
        try:
            yield Outcome(what, True, step(day))
        except (AssertionError, OSError) as error:
            yield Outcome(what, False, str(error).strip())


def check(well: bool, otherwise: str) -> None:
    """Fail with ``otherwise``, which describes the observed result."""
    if not well:
        raise AssertionError(otherwise)


# -- Functions that run in other processes.


def prepared(folder: str) -> bool:
    """Write a tiny Stable Diffusion and two photographs."""
    from tests.support import pipelines

    pipelines.MAKERS["sd15"](Path(folder) / "model")
    photos = Path(folder) / "photos"
    photos.mkdir()
    data = importlib.resources.files("skimage") / "data"
    for number, (name, caption) in enumerate(PHOTOS.items(), start=1):
        part = Path(folder) / "sets" / f"{number}_{name}"
        part.mkdir(parents=True)
        (part / f"{name}.png").write_bytes((data / f"{name}.png").read_bytes())
        (part / f"{name}.txt").write_text(caption)
        (photos / f"{name}.png").write_bytes((data / f"{name}.png").read_bytes())
        (photos / f"{name}.txt").write_text(caption)
    return True


def edges_drawn(folder: str) -> None:
    """Write the photographs' edges under the same names in another folder."""
    import numpy as np
    from PIL import Image
    from skimage.feature import canny

    (Path(folder) / "edges").mkdir()
    for file in (Path(folder) / "photos").glob("*.png"):
        with Image.open(file) as photo:
            found = canny(np.asarray(photo.convert("L")) / 255, sigma=2)
        Image.fromarray(found.astype(np.uint8) * 255).save(Path(folder) / "edges" / file.name)


def pairs_made(folder: str) -> None:
    """Write the photographs, and upside-down copies as the rejected ones."""
    from PIL import Image

    pairs = Path(folder) / "pairs"
    shutil.copytree(Path(folder) / "photos", pairs / "preferred")
    (pairs / "rejected").mkdir()
    for file in (pairs / "preferred").glob("*.png"):
        with Image.open(file) as photo:
            photo.rotate(180).save(pairs / "rejected" / file.name)


def clips_cut(folder: str) -> None:
    """Write clips that pan over the photographs, and a tiny image-to-video Wan."""
    from PIL import Image

    from tests.support.declared_pipelines import wan_i2v

    wan_i2v(Path(folder) / "wan")
    for name, caption in PHOTOS.items():
        frames = Path(folder) / "clips" / name
        frames.mkdir(parents=True)
        frames.with_suffix(".txt").write_text(caption)
        with Image.open(Path(folder) / "photos" / f"{name}.png") as photo:
            for number in range(5):
                left = 30 * number
                photo.convert("RGB").crop((left, 0, left + 240, 240)).save(frames / f"{number}.png")


def finetuned(line: list[str], stop: int | None) -> list[float]:
    """Return the losses of ``finetune.py``."""
    import torch

    from zerotune.training import Callback

    torch.set_num_threads(1)
    script = importlib.import_module(f"{SCRIPTS}.finetune")

    class Terminate(Callback):
        def on_step_end(self, trainer: Any, metrics: Any) -> None:  # noqa: ARG002
            if metrics.step == stop:
                os.kill(os.getpid(), signal.SIGTERM)

    others = script.callbacks
    script.callbacks = lambda options: [*others(options), Terminate()]
    with contextlib.redirect_stdout(io.StringIO()):
        return script.main(line)


def digits(steps: int, start: str | None, zero: dict[str, Any], save: str | None) -> dict[str, Any]:
    """Train on the digits, from a checkpoint and to one."""
    from tests.examples.embedded import new_trainer

    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    with new_trainer(micro=4 // world_size, deepspeed=True, **zero) as trainer:
        if start is not None:
            trainer.resume(start)
        report = trainer.fit(steps=steps)
        if save is not None:
            trainer.save(save)
        return {
            "losses": list(report.losses),
            "step": trainer.step,
            "decisions": [decision.key for decision in trainer.decisions],
        }


def with_accelerate(steps: int, folder: str | None) -> list[float]:
    """Return the losses per optimizer step of the script without zerotune."""
    from tests.examples.embedded import run_script

    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    with tempfile.TemporaryDirectory() as elsewhere:
        return run_script("accelerate_before", steps, folder or elsewhere, zero)["losses"]


def converted(state: str, portable: str) -> dict[str, Any]:
    """Convert accelerate's checkpoint and resume it in a trainer at stage 3."""
    from tests.examples.embedded import new_trainer

    with contextlib.redirect_stdout(io.StringIO()):
        importlib.import_module(f"{SCRIPTS}.recipes.convert").main([state, portable])
    zero = {"stage": 3, "offload": "none"}
    with new_trainer(micro=4, first=3, deepspeed=True, **zero) as trainer:
        trainer.resume(portable)
        losses = list(trainer.fit(steps=5).losses)
        return {"losses": losses, "decisions": [d.key for d in trainer.decisions]}


def used_again() -> dict[str, Any]:
    """Use a model after its trainer is closed, at stage 3."""
    import torch

    from tests.support.models import tiny_unet
    from tests.training.workers import FAMILY, dataset, plan
    from zerotune import FlowMatchingObjective, Trainer
    from zerotune.errors import ZeroTuneError

    model, found = tiny_unet(), {}
    options = {"plan": plan(stage=3, offload="none"), "data": dataset(), "callbacks": []}
    options["objective"] = FlowMatchingObjective(family=FAMILY)
    with Trainer(model=model, **options) as trainer:
        trainer.fit(steps=1)
        try:
            Trainer(model=model, **options)
            found["open"] = "not refused"
        except ZeroTuneError as error:
            found["open"] = str(error)
    found["whole"] = all(p.numel() and bool(torch.isfinite(p).all()) for p in model.parameters())
    with Trainer(model=model, **options) as trainer:
        found["again"] = trainer.fit(steps=2).steps
    return found


def embedded(folder: str) -> list[float]:
    """Run a script in diffusers' style, stopped after 3 steps and resumed under another plan."""
    from accelerate.state import AcceleratorState, GradientState

    from tests.examples.embedded import as_diffusers_writes_them

    resume = ("--max_train_steps", "5", "--resume_from_checkpoint")
    losses = as_diffusers_writes_them("after", folder, "--max_train_steps", "3")["losses"]
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    other = {"stage": 3, "offload_optimizer": {"device": "none"}}
    return losses + as_diffusers_writes_them("after", folder, *resume, zero=other)["losses"]


def loaded_and_exported(folder: str) -> str:
    """Run two trainers on a tiny SDXL, the second resuming from the first; return their results."""
    import torch
    from diffusers import StableDiffusionXLPipeline

    import zerotune
    from tests.support import single_files

    path = Path(folder)
    base = single_files.sdxl(path / "sdxl")
    plan = zerotune.DeepSpeedPlan.build(
        stage=2, offload="cpu", precision="fp32", optimizer="AdamW", lr=1e-3
    )
    sized = zerotune.AspectBuckets(area=256, step=4)
    said = io.StringIO()
    for steps in (1, 2):
        loaded = zerotune.load_pretrained(base, plan=plan, family="sdxl", frozen_dtype="fp32")
        data = zerotune.PreparedImages(zerotune.ImageFolder(path / "photos"), buckets=sized)
        with contextlib.redirect_stdout(said):
            bar = zerotune.ProgressBar()
            with zerotune.Trainer(model=loaded, data=data, ema=0.99, callbacks=bar) as trainer:
                if steps == 2:
                    trainer.resume(path / "once")
                trainer.fit(steps=steps)
                if steps == 1:
                    trainer.save(path / "once")
                else:
                    trainer.export(path / "trained")
                    trainer.export(path / "trained.safetensors")
    whole = StableDiffusionXLPipeline.from_pretrained(path / "trained")
    check(all(bool(torch.isfinite(p).all()) for p in whole.unet.parameters()), "not finite")
    return said.getvalue()


def from_recipe(name: str, *lines: list[str]) -> list[list[float]]:
    """Return the losses of a recipe for each command."""
    main = importlib.import_module(f"{SCRIPTS}.recipes.{name}").main
    with contextlib.redirect_stdout(io.StringIO()):
        return [main(line) for line in lines]


def mistaken(folder: str) -> dict[str, str]:
    """Try each of the usual inputs; return the result or the error."""
    import torch
    from torch.utils.data import TensorDataset

    from tests.support.models import tiny_unet
    from tests.training.workers import FAMILY, dataset, plan
    from zerotune import FlowMatchingObjective, ProgressBar, SaveEvery, Trainer
    from zerotune.errors import ZeroTuneError

    config = plan().to_deepspeed()
    file = Path(folder) / "plan.json"
    file.write_text(json.dumps(config))
    adam = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    images = TensorDataset(torch.zeros(8, 1, 8, 8), torch.zeros(8, dtype=torch.long))

    def attempt(words: str, **changes: Any) -> str:
        options = {"model": tiny_unet(), "plan": plan(), "data": dataset(), "callbacks": []}
        options["objective"] = FlowMatchingObjective(family=FAMILY)
        try:
            with Trainer(**{**options, **changes}) as trainer:
                trainer.fit(steps=1)
        except ZeroTuneError as error:
            return "told" if words and words in str(error) else f"said: {error}"
        except Exception as error:  # noqa: BLE001 - a raw error is what is looked for
            return f"raw {type(error).__name__}: {error}"
        return "taken" if not words else "not refused"

    return {
        "a plan as a dict": attempt("", plan=config),
        "a plan as a path": attempt("", plan=str(file)),
        "a tensor dataset": attempt("", data=images),
        "a model as a path": attempt("load_pretrained", model=str(Path(folder) / "model")),
        "an optimizer": attempt("OptimizerResolver", optimizer=adam),
        "a dataset of tuples": attempt("dict", data=[(1, 2), (3, 4)] * 8),
        "no data": attempt("data", data=None),
        "one callback": attempt("", callbacks=ProgressBar()),
        "a yes for a decay": attempt("ema=0.9999", ema=True),
        "a name for an objective": attempt("FlowMatchingObjective", objective="flow"),
        "an objective of a vector": attempt("mean", objective=lambda *_: torch.ones(2)),
        "a class for a callback": attempt("is a class", callbacks=SaveEvery),
        "a path for data": attempt("PreparedImages", data=folder),
    }


def main() -> int:
    """Play the day; return 1 if something went wrong."""
    import zerotune

    sys.stdout.write(
        f"zerotune {zerotune.__version__} of {Path(zerotune.__file__).parent}, {SCRIPTS}\n"
    )
    bad = 0
    with tempfile.TemporaryDirectory(prefix="second-day-") as folder:
        for outcome in play(Path(folder), (*STEPS, *RECIPES)):
            bad += not outcome.well
            mark = "ok  " if outcome.well else "FAIL"
            sys.stdout.write(f"{mark} {outcome.what}: {outcome.said}\n")
            sys.stdout.flush()
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
