"""Test which optimizer runs where: every name, stage, offload and precision on the real engine.

Each cell trains a small network (a convolution, a norm, linear layers) to recognise scikit-learn's
digits. A cell works when its engine starts, verifies itself, moves the weights and lowers the loss;
every other cell is recorded as "cannot", with the engine's message. The table goes into
``docs/results/capabilities.json``; ``python docs/generate_optimizers.py`` writes it into
the page.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import logging
import platform
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from tools.capability_table import TABLE, CapabilityTable, Cell
from zerotune.errors import ZeroTuneError
from zerotune.optim import OptimizerResolver
from zerotune.plan.context import Streaming
from zerotune.plan.facts import ModelFacts
from zerotune.plan.optimizer.catalogue import OPTIMIZERS
from zerotune.plan.plan import DeepSpeedPlan
from zerotune.platform import detect_platform
from zerotune.training.setup import build_engine

PACKAGES = ("torch", "deepspeed", "prodigyopt", "schedulefree", "torchao", "bitsandbytes")

STREAMED = frozenset({"AdamW8BitStates"})
"""Optimizers that exist only for streamed weights."""
STEPS = 30
BATCH = 64
PARAMS: dict[str, dict[str, Any]] = {
    # Learning rates at which each optimizer learns this problem within ``STEPS`` steps.
    "AdamW": {"lr": 5e-3}, "Adam": {"lr": 5e-3}, "Adagrad": {"lr": 2e-2}, "Lion": {"lr": 2e-3},
    "Lamb": {"lr": 5e-2}, "Muon": {"lr": 2e-2, "adam_lr": 5e-3},
    "SGD": {"lr": 5e-2, "momentum": 0.9}, "Adamax": {"lr": 5e-3}, "NAdam": {"lr": 5e-3},
    "RAdam": {"lr": 5e-2}, "RMSprop": {"lr": 1e-3}, "Adadelta": {"lr": 1.0}, "ASGD": {"lr": 0.3},
    "Rprop": {"lr": 1e-3}, "Adafactor": {"lr": 2e-2}, "Prodigy": {"lr": 1.0, "d0": 1e-3},
    "AdamWScheduleFree": {"lr": 1e-2}, "AdamW8bit": {"lr": 5e-3},
    "TorchAOAdamW8bit": {"lr": 5e-3}, "TorchAOAdamW4bit": {"lr": 5e-3},
    "AdamWBF16States": {"lr": 5e-3}, "AdamW8BitStates": {"lr": 5e-3},
}  # fmt: skip


_RESOLVER = OptimizerResolver()


class DigitsNet(torch.nn.Module):
    """Two convolutions, a norm and two linear layers: about 11,000 weights."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.conv_in = torch.nn.Conv2d(1, width, 3, padding=1)
        self.norm = torch.nn.GroupNorm(4, width)
        self.hidden = torch.nn.Conv2d(width, width, 3, padding=1, stride=2)
        self.middle = torch.nn.Linear(16 * width, 2 * width)
        self.out = torch.nn.Linear(2 * width, 10)

    def forward(self, images_b188: torch.Tensor) -> torch.Tensor:
        """Return the scores of ten classes, (b, 10)."""
        features = torch.relu(self.norm(self.conv_in(images_b188)))
        features = torch.relu(self.hidden(features)).flatten(1)
        return self.out(torch.relu(self.middle(features)))


def model_for(offload: str = "none", seed: int = 0) -> torch.nn.Module:
    """Return the network; DeepSpeed swaps nothing below 1 MiB, so NVMe cells train a wider one."""
    torch.manual_seed(seed)
    return DigitsNet(width=80 if offload == "nvme" else 16)


def plan_for(name: str, stage: int, offload: str, precision: str, swap: Path) -> DeepSpeedPlan:
    """Return a plan under which every stage partitions and NVMe swaps."""
    zero: dict[str, Any] = {}
    if stage == 3:
        zero = {"stage3_param_persistence_threshold": 0, "sub_group_size": 10_000_000}
    return DeepSpeedPlan.build(
        stage=stage,
        offload=offload,
        nvme_path=str(swap) if offload == "nvme" else None,
        precision=precision,
        micro_batch_size=BATCH,
        optimizer={"type": name, "params": PARAMS.get(name, {"lr": 1e-3})},
        **zero,
    )


def losses_of(engine: Any, steps: int) -> list[float]:
    """Train and return the losses; all cells use the same batches in the same order."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    labels = torch.tensor(data.target).long()
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        chosen = torch.randint(len(images), (BATCH,), generator=generator)
        batch = images[chosen].to(engine.device, engine.dtype)
        target = labels[chosen].to(engine.device)
        loss = torch.nn.functional.cross_entropy(engine(batch).float(), target)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def run_cell(name: str, stage: int, offload: str, precision: str, steps: int = STEPS) -> Cell:
    """Start the real engine for one cell and train."""
    place = {"name": name, "stage": stage, "offload": offload, "precision": precision}
    where = {key: place[key] for key in ("stage", "offload", "precision")}
    rule = _RESOLVER.capability(name, **where)
    if not rule.runs:
        return Cell(**place, outcome="cannot", reason=rule.reason)
    try:
        return _train(place, steps)
    except ZeroTuneError as error:
        return Cell(**place, outcome="cannot", reason=error.reason)
    except Exception as error:  # noqa: BLE001 - whatever the engine raises is the finding
        first = (str(error).strip().splitlines() or ["no message"])[0]
        return Cell(**place, outcome="cannot", reason=f"{type(error).__name__}: {first}"[:200])


def _train(place: dict[str, Any], steps: int) -> Cell:
    name = place["name"]
    model = model_for(place["offload"])
    with tempfile.TemporaryDirectory() as swap:
        plan = plan_for(**place, swap=Path(swap)).resolve(
            platform=detect_platform(),
            model=ModelFacts.from_module(model),
            world_size=1,
            streamed=Streaming(units=("hidden", "middle")) if name in STREAMED else None,
        )
        with build_engine(model=model, plan=_RESOLVER.resolve(plan)) as engine:
            if place["offload"] == "nvme":
                _check_swaps(engine)
            before = {key: value.clone() for key, value in engine.master_weights.gather()}
            losses = losses_of(engine, steps)
            after = dict(engine.master_weights.gather())
    still = [key for key, value in before.items() if torch.equal(value, after[key])]
    where = {key: place[key] for key in ("stage", "offload", "precision")}
    own = _RESOLVER.capability(name, **where)
    return _judge(place, losses, still, own)


def _check_swaps(engine: Any) -> None:
    wrapper = engine.deepspeed_engine.optimizer
    if not wrapper._swappable_optimizer_subgroup(0):
        raise RuntimeError("nothing was swapped: the cell would say nothing of NVMe")


def _judge(place: dict[str, Any], losses: Sequence[float], still: Sequence[str], own: Any) -> Cell:
    first, last = sum(losses[:3]) / 3, sum(losses[-3:]) / 3
    reason = ""
    if still:
        reason = f"it ran, but {len(still)} parameters did not move, {still[0]} among them"
    elif not last < 0.9 * first:
        reason = f"the optimizer ran, but the loss went from {first:.3f} to {last:.3f}"
    return Cell(
        **place,
        outcome="cannot" if reason else own.status,
        reason=reason,
        implementation=own.implementation or "",
        first_loss=round(first, 4),
        last_loss=round(last, 4),
    )


def places() -> Iterable[tuple[int, str, str]]:
    """Yield stage, offload and precision of every cell; NVMe requires stage 3."""
    for stage, offload, precision in itertools.product(
        range(4), ("none", "cpu", "nvme"), ("fp32", "bf16")
    ):
        if offload != "none" and (stage == 0 or (offload == "nvme" and stage < 3)):
            continue
        yield stage, offload, precision


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _quiet() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run cells and store the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="only these; the others' cells are kept")
    parser.add_argument("--offload", choices=("none", "cpu", "nvme"), help="only these cells")
    chosen = parser.parse_args(arguments)
    _quiet()
    torch.set_num_threads(1)
    names = chosen.names or list(OPTIMIZERS)
    table = CapabilityTable.stored()
    # A cell that was not run is not "cannot": optimizers whose package is missing stay unverified.
    cells = {
        key: cell
        for key, cell in table.cells.items()
        if key[0] in OPTIMIZERS and "not installed" not in cell.reason
    }
    for name in names:
        package = (OPTIMIZERS[name].package or "").partition(".")[0]
        if package and not find_spec(package):
            print(name, f"left out: {package} is not installed", flush=True)
            continue
        for place in places():
            if chosen.offload not in (None, place[1]):
                continue
            # DeepSpeed prints during startup.
            with contextlib.redirect_stdout(io.StringIO()):
                cell = run_cell(name, *place)
            cells[cell.key] = cell
            print(name, *place, cell.outcome, cell.last_loss or "", cell.reason, flush=True)
        table = CapabilityTable(
            versions=_versions(),
            platform=f"{platform.system()} {platform.machine()}",
            cells=cells.values(),
        )
        partial = TABLE.with_suffix(".partial")
        partial.write_text(table.to_json(), encoding="utf-8")
        partial.replace(TABLE)


if __name__ == "__main__":
    main()
