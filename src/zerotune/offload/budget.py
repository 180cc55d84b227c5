"""Whether a plan's host memory fits this machine, asked before anything is allocated."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import attrs

from zerotune._util.text import format_size
from zerotune.decisions import Decision
from zerotune.errors import OffloadError, PlanError
from zerotune.plan.memory.estimate import PHASES, Workload
from zerotune.plan.model import AUTO, evolved
from zerotune.plan.resolve import pins_natively

if TYPE_CHECKING:
    from zerotune.plan.model import ResolvedPlan

KEY: Final = "offload.host_memory"
BACKEND_VARIABLE: Final = "DS_PIN_MEMORY_BACKEND"

_PINNED_SECTIONS: Final = ("offload_optimizer", "offload_param")


@attrs.frozen(kw_only=True)
class HostBudget:
    """The host memory a plan takes on one machine, beside what there is."""

    per_rank: int
    """Peak bytes of one rank, page-locked memory included."""
    pinned: int
    """Bytes of it that are page-locked, with what torch's allocator rounds them up by."""
    locked: int
    """Bytes of it that DeepSpeed locks itself (``mlock``), which ``ulimit -l`` limits."""
    ranks: int
    """Ranks of this machine."""
    held: int
    """Bytes one rank holds already: Python, torch, the model as it was loaded."""
    available: int
    """Bytes that can be allocated now, the container's limit respected."""
    lockable: int | None
    """Bytes one rank may lock; ``None``: no limit."""

    @property
    def needed(self) -> int:
        """Bytes all ranks of this machine will still allocate."""
        return max(0, self.per_rank - self.held) * self.ranks

    @property
    def fits(self) -> bool:
        """Whether the machine has that much."""
        return self.needed <= self.available

    @property
    def lock_fits(self) -> bool:
        """Whether each rank may lock what it will lock."""
        return self.lockable is None or self.locked <= self.lockable

    def __str__(self) -> str:
        return (
            f"{self.ranks} rank(s) x {format_size(self.per_rank)} at the peak, "
            f"{format_size(self.pinned)} of it page-locked, {format_size(self.held)} held "
            f"already; {format_size(self.available)} available"
        )

    def _pinning_given_up(self, after: HostBudget, resolved: ResolvedPlan) -> tuple[Decision, ...]:
        zero = resolved.plan.zero_optimization
        return tuple(
            Decision(
                key=f"zero_optimization.{name}.pin_memory",
                before=True,
                after=False,
                reason=f"page-locked it takes more host memory than there is ({self}); unpinned: "
                f"{format_size(after.per_rank)}; copies to the device become slower",
                severity="warning",
            )
            for name in _PINNED_SECTIONS
            if getattr(getattr(zero, name), "pin_memory", None) is True
        )

    def _alternatives(self, resolved: ResolvedPlan) -> Iterator[tuple[str, int]]:
        """What could be changed to save something, and the bytes per rank it then takes."""
        ways: dict[str, Callable[[], HostBudget]] = {
            "pin_memory: false": lambda: _budget_like(
                _unpinned(resolved, only_automatic=False), self
            ),
            f"{BACKEND_VARIABLE}=native": lambda: _budget_like(
                resolved, self, {BACKEND_VARIABLE: "native"}
            ),
            "stage 3 with the optimizer on NVMe": lambda: _budget_like(_on_nvme(resolved), self),
        }
        for what, count in ways.items():
            try:
                other = count()
            except PlanError:
                continue
            if other.per_rank < self.per_rank:
                enough = "" if other.fits and other.lock_fits else " (not enough alone)"
                yield what + enough, other.per_rank


def host_budget(
    resolved: ResolvedPlan,
    *,
    ranks: int,
    held: int | None = None,
    environ: Mapping[str, str] | None = None,
) -> HostBudget:
    """Count the host memory of a plan whose model is known.

    Activations are not in it; on a GPU they take none.
    """
    import psutil

    environ = os.environ if environ is None else environ
    asked = environ.get(BACKEND_VARIABLE, "torch").strip().lower() == "native"
    workload = Workload(ranks_per_machine=ranks, exact_pinning=asked or None)
    estimate = resolved.estimate(workload)
    native = asked or pins_natively(resolved.platform)
    # DeepSpeed's aio locks its buffers in any case.
    swap_buffers = (
        [one.nbytes for one in estimate.at("host", phase) if one.component == "swap buffers"]
        for phase in PHASES
    )
    return HostBudget(
        per_rank=estimate.host,
        pinned=estimate.pinned,
        locked=estimate.pinned if native else max(map(sum, swap_buffers)),
        ranks=ranks,
        held=psutil.Process().memory_info().rss if held is None else held,
        available=resolved.platform.host_memory.available,
        lockable=resolved.platform.memlock_limit,
    )


def fit_host_memory(
    resolved: ResolvedPlan, *, ranks: int, held: int | None = None
) -> tuple[ResolvedPlan, tuple[Decision, ...]]:
    """Refuse a plan that this machine's host memory cannot hold, or stop pinning if that helps.

    Pinning is given up only for a single rank, and where the user did not write ``pin_memory``:
    several ranks would each decide by what they happen to see.
    """
    if resolved.model is None:
        why = "the plan was resolved without a model, so the host memory it needs is not known"
        return resolved, (Decision(key=KEY, before=None, after=None, reason=why),)
    budget = host_budget(resolved, ranks=ranks, held=held)
    if not budget.lock_fits:
        raise OffloadError(
            f"DeepSpeed locks {format_size(budget.locked)} of swap buffers per rank, this process "
            f"may lock {format_size(budget.lockable or 0)}, and DeepSpeed's op aborts when it "
            "cannot",
            key=KEY,
            value=budget.locked,
            fix="raise the limit (ulimit -l unlimited), or lower sub_group_size and buffer_count",
        )
    if budget.fits:
        needed = format_size(budget.needed)
        return resolved, (Decision(key=KEY, before=None, after=needed, reason=str(budget)),)
    unpinned = _unpinned(resolved, only_automatic=True)
    if resolved.world_size == 1 and unpinned != resolved:
        fitting = host_budget(unpinned, ranks=ranks, held=held)
        if fitting.fits:
            return unpinned, budget._pinning_given_up(fitting, resolved)
    others = [f"{what}: {format_size(size)}" for what, size in budget._alternatives(resolved)]
    raise OffloadError(
        f"the plan needs more host memory than there is: {budget}",
        key=KEY,
        value=budget.needed,
        fix=f"per rank it would be - {'; '.join(others)}"
        if others
        else "offload less, or see DeepSpeedPlan.advise",
    )


def _unpinned(resolved: ResolvedPlan, *, only_automatic: bool) -> ResolvedPlan:
    zero, written = resolved.plan.zero_optimization, resolved.requested.zero_optimization
    if zero is None:
        return resolved
    for name in _PINNED_SECTIONS:
        section = getattr(zero, name)
        asked = getattr(getattr(written, name, None), "pin_memory", None)
        if section is not None and section.pin_memory is True:
            if only_automatic and asked not in (None, AUTO):
                continue
            zero = evolved(zero, **{name: evolved(section, pin_memory=False)})
    plan = attrs.evolve(resolved.plan, zero_optimization=zero)
    return attrs.evolve(resolved, plan=plan)


def _budget_like(
    resolved: ResolvedPlan, budget: HostBudget, environ: Mapping[str, str] | None = None
) -> HostBudget:
    return host_budget(resolved, ranks=budget.ranks, held=budget.held, environ=environ)


def _on_nvme(resolved: ResolvedPlan) -> ResolvedPlan:
    """The same with stage 3 and the optimizer in files; what else was written stays."""
    written = resolved.requested.to_deepspeed()
    zero = dict(written.get("zero_optimization") or {})
    zero |= {"stage": 3, "offload_optimizer": {"device": "nvme"}}
    plan: Any = type(resolved.requested).from_dict({**written, "zero_optimization": zero})
    other: ResolvedPlan = plan.resolve(
        platform=resolved.platform,
        model=resolved.model,
        world_size=resolved.world_size,
        run=resolved.run,
    )
    return attrs.evolve(other, optimizer=resolved.optimizer)
