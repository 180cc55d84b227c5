"""Train a small diffusion model on handwritten digits, and sample digits, in a few minutes.

The script trains a class-conditional diffusion U-Net on the 1,797 real digits of scikit-learn. It
uses ZeRO-2, an optimizer offloaded to the CPU, and an EMA of the weights::

    python examples/digits.py
    python examples/digits.py --stage 3 --offload nvme
    torchrun --nproc-per-node 2 examples/digits.py --no-deepspeed

Half way, the script saves a checkpoint and deletes the trainer. A new trainer resumes from the
checkpoint, and the script checks that the next loss is the same as without the interruption. At
the end, a classifier trained on the real digits classifies 200 generated digits. The exit code is 1
if the classifier recognises fewer than ``--require`` percent of the generated digits.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

# On a machine with few or busy cores, waiting threads should not spin. Set before the import of
# torch, because torch reads the variable when it starts its threads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from diffusers import UNet2DModel
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.svm import SVC

from zerotune import (
    ClassConditional,
    DeepSpeedPlan,
    EMAShadow,
    FlowMatchingObjective,
    ImageTensors,
    MetricsFile,
    OffloadManager,
    ProgressBar,
    Trainer,
    images_to_grid,
)
from zerotune.ema import RampDecay
from zerotune.errors import PlanError, TrainingError
from zerotune.training.events import read_metrics

CLASSES = 10
NULL_LABEL = CLASSES
PEAK_LR = 2e-3
WARMUP_STEPS = 50
SAMPLING_STEPS = 10
GUIDANCE_SCALE = 1.5


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--stage", type=int, choices=range(4), default=2, help="ZeRO stage")
    add(
        "--offload",
        choices=("none", "cpu", "nvme"),
        help="where the optimizer state is stored (default: cpu for ZeRO-1 to 3, otherwise none)",
    )
    add("--no-deepspeed", action="store_true", help="train with the plain engine, not DeepSpeed")
    add(
        "--precision",
        choices=("fp32", "bf16", "fp16"),
        default="bf16" if torch.cuda.is_available() else "fp32",
        help="default: bf16 on a GPU, fp32 on a CPU (where bf16 is several times slower)",
    )
    add("--steps", type=int, default=400, help="number of optimizer steps")
    add("--batch-size", type=int, default=64, help="samples per optimizer step in all processes")
    add("--accumulation", type=int, default=1, help="micro batches per optimizer step")
    add("--output", type=Path, default=Path("outputs/digits"), help="folder for results")
    add("--seed", type=int, default=0, help="seed of weights, training and sampling")
    add("--verbose", action="store_true", help="print every decision, not only the settings")
    add("--per-class", type=int, default=20, help="digits to sample per class")
    add("--require", type=float, default=80.0, help="minimum percentage of recognised digits")
    # The deepspeed launcher passes this option; the environment has the same value.
    add("--local_rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.offload is None:
        options.offload = "none" if options.no_deepspeed or options.stage == 0 else "cpu"
    if options.steps < 2:
        parser.error("--steps must be at least 2, because the run is interrupted half way")
    return options


def real_digits() -> ImageTensors:
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    return ImageTensors(images=images, labels=torch.tensor(data.target).long())


def new_model(seed: int) -> UNet2DModel:
    torch.manual_seed(seed)
    return UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=16,
        attention_head_dim=32,
        num_class_embeds=CLASSES + 1,
    )


def new_plan(options: argparse.Namespace) -> DeepSpeedPlan:
    return DeepSpeedPlan.build(
        stage=options.stage,
        offload=options.offload,
        precision=options.precision,
        train_batch_size=options.batch_size,
        micro_batch_size=None,
        gradient_accumulation_steps=options.accumulation,
        gradient_clipping=1.0,
        optimizer={"type": "AdamW", "params": {"lr": PEAK_LR, "weight_decay": 0.0}},
        scheduler={
            "type": "WarmupLR",
            "params": {"warmup_num_steps": WARMUP_STEPS, "warmup_type": "linear"},
        },
    )


def new_trainer(options: argparse.Namespace) -> Trainer:
    return Trainer(
        model=new_model(options.seed),
        plan=new_plan(options),
        offload=OffloadManager(root=make(options.output / "swap"))
        if options.offload == "nvme"
        else None,
        deepspeed=not options.no_deepspeed,
        ema=EMAShadow(decay=RampDecay(decay=0.98)),
        data=real_digits(),
        objective=FlowMatchingObjective(
            family=ClassConditional(null_label=NULL_LABEL, dropout=0.1)
        ),
        callbacks=[ProgressBar(), MetricsFile(options.output / "metrics.jsonl")],
        seed=options.seed,
    )


def make(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def milestones(options: argparse.Namespace) -> list[int]:
    """Steps at which a digit of each class is sampled; each step is twice the previous step."""
    return sorted({max(1, options.steps // 2**power) for power in range(5)})


def fit(
    trainer: Trainer, options: argparse.Namespace, *, steps: int, drawn: dict[int, torch.Tensor]
) -> None:
    """Train up to step ``steps``, and sample digits at each milestone."""
    for step in milestones(options):
        if trainer.step < step <= steps:
            trainer.fit(steps=step)
            drawn[step] = sample(trainer, options, labels=torch.arange(CLASSES))
    trainer.fit(steps=steps)


def sample(trainer: Trainer, options: argparse.Namespace, *, labels: torch.Tensor) -> torch.Tensor:
    """Sample digits with the EMA weights."""
    return trainer.sample(
        labels=labels, steps=SAMPLING_STEPS, guidance_scale=GUIDANCE_SCALE, seed=options.seed
    )


def first_half(options: argparse.Namespace, drawn: dict[int, torch.Tensor]) -> tuple[Path, float]:
    """Train half way, save, and take one more step, whose loss is compared after resuming."""
    half = options.steps // 2
    with new_trainer(options) as trainer:
        if trainer.is_main:
            print(trainer.explain() if options.verbose else trainer, flush=True)
        fit(trainer, options, steps=half, drawn=drawn)
        checkpoint = trainer.save(options.output / "checkpoint")
        if trainer.is_main:
            print(
                f"saved {checkpoint} at step {trainer.step}; the trainer takes one more step "
                "and is then deleted"
            )
        return checkpoint, trainer.fit(steps=half + 1).losses[-1]


def second_half(
    options: argparse.Namespace,
    drawn: dict[int, torch.Tensor],
    checkpoint: Path,
    expected: float,
) -> tuple[bool, torch.Tensor]:
    """Resume in a new trainer, finish the run, and sample digits."""
    half = options.steps // 2
    with new_trainer(options) as trainer:
        trainer.resume(checkpoint)
        if trainer.step != half:
            raise TrainingError("resumed at a different step", key="step", value=trainer.step)
        resumed = trainer.fit(steps=half + 1).losses[-1]
        # Bitwise equal on a CPU; a GPU may add in a different order.
        if not math.isclose(resumed, expected, rel_tol=1e-3):
            raise TrainingError(
                f"without the interruption, the loss of this step was {expected!r}",
                key="loss after resuming",
                value=resumed,
            )
        if trainer.is_main:
            print(
                f"resumed at step {half}; the loss of step {half + 1} is {resumed!r}; "
                f"without the interruption it was {expected!r}"
            )
        fit(trainer, options, steps=options.steps, drawn=drawn)
        trainer.save(checkpoint)
        images = sample(trainer, options, labels=wanted_labels(options))
        if trainer.is_main:
            report = trainer.report()
            print(report.render())
            report.save(options.output)
        return trainer.is_main, images


def write_pictures(
    options: argparse.Namespace, images: torch.Tensor, drawn: dict[int, torch.Tensor]
) -> None:
    grid = images_to_grid(images, columns=options.per_class, upscale=6)
    grid.save(options.output / "digits.png")
    history = read_metrics(options.output / "metrics.jsonl")
    steps, losses = zip(*((metrics.step, metrics.loss) for metrics in history), strict=True)
    draw_learning(options, steps, losses, drawn)


def draw_learning(
    options: argparse.Namespace,
    steps: Sequence[int],
    losses: Sequence[float],
    drawn: dict[int, torch.Tensor],
) -> None:
    """Plot the loss, and a row of sampled digits for each milestone."""
    figure = Figure(figsize=(9, 3 + 0.8 * len(drawn)), layout="constrained")
    curve, digits = figure.subplots(2, 1, height_ratios=(2, 0.8 * len(drawn)))
    curve.plot(steps, losses, color="#4d6b80", linewidth=1)
    for step in drawn:
        curve.axvline(step, color="#d9601a", linewidth=1, linestyle="dashed")
    curve.set(xlabel="optimizer step", ylabel="loss")
    curve.set(xlim=(0, 1.01 * options.steps), ylim=(0, None))
    curve.legend(["loss of a step", "digits sampled"], frameon=False)
    rows = images_to_grid(torch.cat(list(drawn.values())), columns=CLASSES, upscale=8)
    digits.imshow(rows, cmap="gray", interpolation="nearest", vmin=0, vmax=255)
    epochs = [step * options.batch_size / len(real_digits()) for step in drawn]
    words = [f"step {step}\nepoch {epoch:.1f}" for step, epoch in zip(drawn, epochs, strict=True)]
    height = rows.height / len(drawn)
    digits.set_yticks([(row + 0.5) * height for row in range(len(drawn))], words)
    digits.set_xticks([])
    digits.tick_params(length=0)
    digits.spines[:].set_visible(False)
    figure.savefig(options.output / "learning.png", dpi=100)


def wanted_labels(options: argparse.Namespace) -> torch.Tensor:
    return torch.arange(CLASSES).repeat_interleave(options.per_class)


def recognised(images: torch.Tensor, labels: torch.Tensor) -> float:
    """Percentage of generated digits that a classifier of real digits recognises."""
    data = load_digits()
    pixels, held_out, classes, true = train_test_split(
        data.data, data.target, test_size=0.25, random_state=0, stratify=data.target
    )
    classifier = SVC(gamma=0.001).fit(pixels, classes)
    print(
        f"the classifier recognises {100 * classifier.score(held_out, true):.1f} % of unseen "
        "real digits"
    )
    drawn = ((images + 1) * 8).clamp(0, 16).flatten(1).numpy()
    return 100 * float((classifier.predict(drawn) == labels.numpy()).mean())


def run(options: argparse.Namespace) -> int:
    started = time.perf_counter()
    make(options.output)
    drawn: dict[int, torch.Tensor] = {}
    checkpoint, expected = first_half(options, drawn)
    is_main, images = second_half(options, drawn, checkpoint, expected)
    if not is_main:
        return 0
    write_pictures(options, images, drawn)
    share = recognised(images, wanted_labels(options))
    print(
        f"recognised {share:.1f} % of {len(images)} generated digits "
        f"(required: {options.require:g} %) after {time.perf_counter() - started:.0f} s"
    )
    print(f"see learning.png, digits.png, report.json and metrics.jsonl in {options.output}")
    return 0 if share >= options.require else 1


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        return run(options)
    except PlanError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    # DeepSpeed calls functions of torch.distributed that torch has renamed.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    sys.exit(main())
