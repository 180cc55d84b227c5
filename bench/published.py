"""Compare predicted step times with runs that users of other trainers published.

``published.json`` has a row per run. ``alike`` says whether the run did the work that the
prediction is for: the same placement of weights and states, and the same update. Other rows, such
as runs with another trainer's block swap, are listed for comparison only. A new row needs nothing
else: the test of ``PUBLISHED_SPREAD`` names the new value.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from zerotune.plan import DeepSpeedPlan
from zerotune.plan.families import as_facts
from zerotune.plan.memory.estimate import sample_size
from zerotune.plan.memory.items import Workload
from zerotune.plan.memory.rates import card_named, card_platform

LEDGER: Final = Path(__file__).with_name("published.json")


@attrs.frozen(kw_only=True)
class Published:
    """A published run beside zerotune's prediction for the same model, card and placement."""

    setting: str
    source: str
    card: str
    alike: bool
    seconds: float | None
    """Published seconds per optimizer step."""
    memory: float | None
    """Published device memory in GiB."""
    predicted: float
    """Predicted seconds per optimizer step."""
    device: float
    """Predicted device memory in GiB."""
    host: float
    """Predicted host memory in GiB."""

    @property
    def residual(self) -> float | None:
        """Published time relative to the prediction, minus 1; ``None`` if no time is published."""
        return None if self.seconds is None else self.seconds / self.predicted - 1


def published(file: Path = LEDGER) -> list[Published]:
    """Return every published run of the ledger, with zerotune's prediction.

    Args:
        file: The ledger.
    """
    return [_predicted(row) for row in json.loads(file.read_text(encoding="utf-8"))]


def _predicted(row: Mapping[str, Any]) -> Published:
    card = card_named(row["card"], key="card")
    limit = row.get("memory_limit", card.memory)
    platform = card_platform(card, vram=limit * 2**30, ram=row.get("ram", 128) * 2**30)
    resolution = row.get("resolution")
    facts = as_facts(row["model"], lora=row.get("lora"), base_dtype=row.get("base_dtype"))
    plan = DeepSpeedPlan.build(
        precision="bf16", gradient_accumulation_steps=row.get("accumulation", 1), **row["plan"]
    )
    resolved = plan.resolve(
        platform=platform, model=facts, streamed=row.get("streamed"),
        engine=row.get("engine"), update=row.get("update"),
    )  # fmt: skip
    size = tuple(resolution) if isinstance(resolution, list) else resolution
    workload = Workload(
        batch=row.get("batch", 1),
        gradient_checkpointing=True,
        **sample_size(row["model"], facts, resolution=size, frames=row.get("frames")),
    )
    if row.get("streamed"):
        resolved = resolved.with_units_kept(workload)
    estimate = resolved.estimate(workload)
    time = estimate.step_time()
    if time is None:
        raise AssertionError(f"the arithmetic of {row['model']} is not known")
    return Published(
        **{name: row[name] for name in ("setting", "source", "card", "alike", "seconds", "memory")},
        predicted=time.expected,
        device=estimate.device / 2**30,
        host=estimate.host / 2**30,
    )


def residuals(runs: Sequence[Published]) -> list[float]:
    """Return the residuals of the runs that did the work that the prediction is for.

    Args:
        runs: Published runs.
    """
    return [one.residual for one in runs if one.alike and one.residual is not None]


def left_out(found: Sequence[float]) -> list[float]:
    """Return each residual after a refit to the other runs.

    The refit multiplies every prediction by the median ratio of published to predicted time.

    Args:
        found: Residuals.
    """
    ratios = [1 + one for one in found]
    others = [statistics.median(ratios[:i] + ratios[i + 1 :]) for i in range(len(ratios))]
    return [ratio / fitted - 1 for ratio, fitted in zip(ratios, others, strict=True)]


def spread(found: Sequence[float]) -> tuple[float, float]:
    """Return the smallest and the largest residual, rounded to a percent.

    Args:
        found: Residuals.
    """
    return round(min(found), 2), round(max(found), 2)
