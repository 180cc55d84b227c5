"""What advice consists of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from zerotune.decisions import Decision
from zerotune.plan.deepspeed_plan import DeepSpeedPlan
from zerotune.plan.memory.values import MemoryEstimate, Place
from zerotune.plan.resolved import ResolvedPlan


@attrs.frozen(kw_only=True)
class Budget:
    """What there is, in bytes."""

    device: int
    """Of each device."""
    host: int
    """RAM of one machine, for all its ranks."""
    nvme: int = 0
    """Disk space for swap files of one machine, for all its ranks; 0: none."""
    reserve: float = 0.05
    """Share of device and host memory that is kept free, for fragmentation and others."""

    def usable(self, place: Place) -> int:
        """Bytes a plan may need at most."""
        if place == "nvme":
            return self.nvme
        return int((self.device if place == "device" else self.host) * (1 - self.reserve))


@attrs.frozen(kw_only=True)
class Candidate:
    """One plan that was considered."""

    title: str
    """``"ZeRO-2, optimizer in host memory"``."""
    plan: DeepSpeedPlan
    estimate: MemoryEstimate
    gradient_checkpointing: bool
    fits: bool
    shortfalls: Mapping[Place, int]
    """Bytes over the budget, of the machine for host and NVMe; empty when it fits."""
    reason: str
    """Why it was chosen, comes later, or was rejected."""
    activation_offload: bool = False
    """Whether the inputs of recomputed blocks wait in host memory (``ActivationOffload``)."""


@attrs.frozen(kw_only=True)
class Advice:
    """The lowest stage and least offload that fits. Made by ``DeepSpeedPlan.advise``."""

    budget: Budget
    chosen: Candidate
    candidates: tuple[Candidate, ...]
    """Everything considered, in order of preference."""

    @property
    def plan(self) -> DeepSpeedPlan:
        """The advised plan."""
        return self.chosen.plan

    @property
    def estimate(self) -> MemoryEstimate:
        """What the advised plan needs."""
        return self.chosen.estimate

    @property
    def resolved(self) -> ResolvedPlan:
        """The advised plan, resolved for the machine that was described."""
        return self.chosen.estimate.resolved

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether blocks are to be recomputed in the backward pass."""
        return self.chosen.gradient_checkpointing

    @property
    def activation_offload(self) -> bool:
        """Whether the inputs of recomputed blocks are to wait in host memory."""
        return self.chosen.activation_offload

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """What the advice says beside the plan itself."""
        reason = f"{self.chosen.title}: {self.chosen.reason}"
        return (
            Decision(
                key="gradient checkpointing",
                before=None,
                after=self.gradient_checkpointing,
                reason=reason,
            ),
            Decision(
                key="activation offload", before=None, after=self.activation_offload, reason=reason
            ),
        )

    @property
    def runners_up(self) -> tuple[Candidate, ...]:
        """The others that fit, in order of preference."""
        return tuple(one for one in self.candidates if one.fits and one is not self.chosen)

    @property
    def rejected(self) -> tuple[Candidate, ...]:
        """Those that do not fit, in order of preference."""
        return tuple(one for one in self.candidates if not one.fits)

    @property
    def headroom(self) -> dict[Place, int]:
        """Bytes left of the budget, of each device and of the machine."""
        needs = machine_needs(self.estimate)
        return {
            "device": self.budget.device - needs["device"],
            "host": self.budget.host - needs["host"],
            "nvme": self.budget.nvme - needs["nvme"],
        }

    def explain(self) -> str:
        """What was chosen and why, what is left, and why the others were not."""
        from zerotune.plan.advising.reporting import explain_advice

        return explain_advice(self)

    def explain_markdown(self) -> str:
        """The same as ``explain``, as Markdown."""
        from zerotune.plan.advising.reporting import markdown_advice

        return markdown_advice(self)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data that JSON can hold; sizes in bytes."""
        from zerotune.plan.advising.reporting import advice_data

        return advice_data(self)


def machine_needs(estimate: MemoryEstimate) -> dict[Place, int]:
    """Bytes of one device, and of host RAM and NVMe for all ranks of one machine."""
    ranks = estimate.workload.ranks_per_machine or estimate.resolved.world_size
    return {
        "device": estimate.device,
        "host": estimate.host * ranks,
        "nvme": estimate.nvme * ranks,
    }
