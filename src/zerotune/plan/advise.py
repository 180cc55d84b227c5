"""Search combinations of ZeRO stage and offload (layouts), and choose the fastest that fits."""

from __future__ import annotations

from typing import Any, Final

import attrs

from zerotune._util.table import Readable
from zerotune._util.text import is_number, parse_size
from zerotune.decisions import Decision
from zerotune.errors import InvalidValueError, OptimizerError, PlanConflictError
from zerotune.plan.candidates import (
    Budget,
    Candidate,
    Request,
    laid_out,
    machine_needs,
    preferred,
    search,
)
from zerotune.plan.context import Context, DeviceUpdate, Streaming, UpdateName
from zerotune.plan.facts import ModelFacts
from zerotune.plan.memory.items import Place, Workload
from zerotune.plan.memory.rates import Rates, known_rates
from zerotune.plan.optimizer.catalogue import ADAM
from zerotune.plan.optimizer.names import DEFAULT_OPTIMIZER, entry_of
from zerotune.plan.remedies import nothing_fits
from zerotune.plan.resolution import resolve
from zerotune.plan.settings import Settings
from zerotune.platform import Platform, detect_platform
from zerotune.platform.facts import CUDA


@attrs.frozen(kw_only=True, repr=False)
class Advised(Readable):
    """The plan chosen by ``DeepSpeedPlan.advise``, with all candidates."""

    budget: Budget
    chosen: Candidate
    candidates: tuple[Candidate, ...]
    """All plans that were considered, from least to most offload."""

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether to recompute blocks in the backward pass."""
        return self.chosen.gradient_checkpointing

    @property
    def activation_offload(self) -> bool:
        """Whether to store the inputs of recomputed blocks in host memory."""
        return self.chosen.activation_offload

    @property
    def streamed(self) -> Streaming | None:
        """Options for ``plan.resolve(streamed=...)``; ``None`` if weights are not streamed."""
        return self.chosen.streamed

    @property
    def update(self) -> DeviceUpdate | None:
        """Options for ``plan.resolve(update=...)``; ``None`` for an update on the host."""
        return self.chosen.update

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Decisions about streaming, the update, checkpointing, offload and another optimizer."""
        chosen = self.chosen
        reason = f"{chosen.title}: {chosen.reason}"
        replaced = Decision(
            "optimizer.type", chosen.instead_of, chosen.optimizer, reason, "warning"
        )
        updated = Decision("update", None, chosen.update_name, reason)
        return (
            *((replaced,) if chosen.instead_of else ()),
            Decision("streamed", None, self.streamed or False, reason),
            *((updated,) if self.update else ()),
            Decision("gradient checkpointing", None, self.gradient_checkpointing, reason),
            Decision("activation offload", None, self.activation_offload, reason),
        )

    @property
    def runners_up(self) -> tuple[Candidate, ...]:
        """Other candidates that fit, from least to most offload."""
        return tuple(one for one in self.candidates if one.fits and one is not self.chosen)

    @property
    def rejected(self) -> tuple[Candidate, ...]:
        """Candidates that do not fit, from least to most offload."""
        return tuple(one for one in self.candidates if not one.fits)

    @property
    def headroom(self) -> dict[Place, int]:
        """Unused bytes of the budget, per rank for device memory, per machine for RAM and NVMe."""
        needs = machine_needs(self.chosen.estimate)
        return {
            "device": self.budget.device - needs["device"],
            "host": self.budget.host - needs["host"],
            "nvme": self.budget.nvme - needs["nvme"],
        }


_PROVE: Final = "`zerotune doctor --prove` verifies streaming on this machine"


def advise(
    plan: Settings,
    model: ModelFacts,
    context: Context,
    workload: Workload,
    *,
    vram: int | str | None,
    ram: int | str | None,
    nvme: int | str,
    reserve: float,
    rates: Rates | None,
    streamed: bool,
    update: UpdateName | DeviceUpdate | None,
) -> Advised:
    """Choose a plan as ``DeepSpeedPlan.advise`` does."""
    device = None if vram is None else parse_size(vram, key="vram")
    host = None if ram is None else parse_size(ram, key="ram")
    platform = _machine(context, device, host)
    disk = parse_size(nvme, key="nvme")
    request = Request(
        model=model,
        platform=platform,
        budget=_memory_budget(platform, device, host, nvme=disk, reserve=reserve),
        world_size=context.world_size,
        workload=workload,
        plan=plan,
        rates=known_rates(platform) if rates is None else rates,
        # Such an optimizer is a request for streamed weights.
        streamed=streamed or entry_of(plan.optimizer_name).must_stream,
        asked=plan.optimizer_name or DEFAULT_OPTIMIZER,
        update=update if update in (None, "host") else DeviceUpdate.of(update),
    )
    return _choose(request)


def _machine(context: Context, device: int | None, host: int | None) -> Platform:
    if context.platform is not None:
        return context.platform
    if device is not None and host is not None:
        return Platform.synthetic(CUDA, vram=device, ram=host, device_count=context.world_size)
    return detect_platform(log=False)


def _memory_budget(
    platform: Platform, device: int | None, host: int | None, *, nvme: int, reserve: float
) -> Budget:
    if not is_number(reserve) or not 0 <= reserve < 1:
        raise InvalidValueError(
            "is not a fraction of the memory",
            "write a fraction, such as 0.05 for 5 %",
            "reserve",
            reserve,
        )
    if device is None:
        device = min((one.total_memory for one in platform.devices), default=0)
    if host is None:
        host = platform.host_memory.limit
    return Budget(device=device, host=host, nvme=nvme, reserve=float(reserve))


def _choose(request: Request) -> Advised:
    candidates, fitting = search(request)
    if not candidates:
        raise _not_on_device(request)
    if not fitting:
        raise nothing_fits(request, candidates)
    first, reason = preferred(fitting), "the least offload and the lowest stage that fits"
    if first is not fitting[0]:
        reason = "predicted to be the fastest that fits"
    reasons = (reason, *_another_optimizer(first))
    if first.streamed is not None and request.platform.accelerator != "cpu":
        reasons = (*reasons, _PROVE)
    chosen = attrs.evolve(first, reasons=reasons)
    listed = tuple(chosen if one is first else one for one in candidates)
    return Advised(budget=request.budget, chosen=chosen, candidates=listed)


def _another_optimizer(candidate: Candidate) -> tuple[str, ...]:
    """Return in words why another optimizer runs than the requested one."""
    if candidate.instead_of is None:
        return ()
    name, entry = candidate.instead_of, entry_of(candidate.optimizer)
    if entry.streams and entry.name not in ADAM:
        return (f"nothing fits with {name}; {entry.name} is {entry.summary}",)
    return (f"{entry.name} runs instead of {name}, which cannot run or does not fit",)


def _not_on_device(request: Request) -> PlanConflictError:
    """Return the error for a requested update on the device that no layout can run."""
    plan = laid_out(request, request.levels[0][0])
    update: Any = request.update
    streamed = bool(request.model.units)
    try:
        resolved = resolve(plan, request.context, streamed=streamed, update=update)
        why = next(one.reason for one in reversed(resolved.decisions) if one.key == "update")
    except OptimizerError as error:
        why = error.reason
    return PlanConflictError(
        f"is not possible: {why}", 'remove it, or write "host"', "update", update.name
    )
