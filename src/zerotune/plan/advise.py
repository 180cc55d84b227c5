"""Search combinations of ZeRO stage and offload (layouts), and choose the fastest that fits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any, Final, Literal, get_args

import attrs

from zerotune._util.table import Readable
from zerotune._util.text import format_size, is_number, parse_size
from zerotune.decisions import Decision
from zerotune.errors import (
    InvalidValueError,
    NothingFitsError,
    OptimizerError,
    PlanConflictError,
)
from zerotune.plan.context import Context, DeviceUpdate, MastersName, Streaming, UpdateName
from zerotune.plan.facts import ModelFacts
from zerotune.plan.families import as_facts, frozen_beside
from zerotune.plan.memory.estimate import (
    PLACES,
    Costing,
    EMAPlace,
    Estimate,
    Phase,
    Place,
    Workload,
    count,
    estimate_resolved,
    sample_size,
    with_gradients_kept,
    with_units_kept,
)
from zerotune.plan.memory.time import Rates, StepTime, known_rates, step_time
from zerotune.plan.optimizer.catalogue import ADAM, OPTIMIZERS
from zerotune.plan.optimizer.entries import OptimizerEntry
from zerotune.plan.optimizer.names import DEFAULT_OPTIMIZER, entry_of
from zerotune.plan.resolved import Resolved
from zerotune.plan.rules import resolve
from zerotune.plan.sections import OffloadSection, OptimizerSection, ZeroSection
from zerotune.plan.settings import Settings
from zerotune.platform import Platform, detect_platform
from zerotune.platform.facts import CUDA, DISCRETE

Preference = Literal["fastest", "least offload"]
"""Criterion for choosing among plans that fit."""
PREFERENCES: Final[tuple[Preference, ...]] = get_args(Preference)


@attrs.frozen(kw_only=True)
class Budget:
    """Available memory in bytes."""

    device: int
    """Memory of each device."""
    host: int
    """Bytes of RAM on one machine, shared by its ranks."""
    nvme: int = 0
    """Bytes of disk space for swap files on one machine, shared by its ranks; 0: none."""
    reserve: float = 0.05
    """Fraction of device and host memory to keep free for other processes and for allocator
    fragmentation, which takes 0.6 to 3.8 % (docs/memory-proof.md)."""

    def usable(self, place: Place) -> int:
        """Return how many bytes of device memory, host memory or NVMe a plan may use.

        Args:
            place: ``"device"``, ``"host"`` or ``"nvme"``.
        """
        if place == "nvme":
            return self.nvme
        return int((self.device if place == "device" else self.host) * (1 - self.reserve))


@attrs.frozen(kw_only=True, repr=False)
class Candidate:
    """A plan that ``advise`` considered, with its estimate."""

    title: str
    """Layout in words, such as ``"ZeRO-2, optimizer in host memory"``."""
    plan: Settings
    estimate: Estimate
    gradient_checkpointing: bool
    fits: bool
    shortfalls: Mapping[Place, int]
    """Missing bytes of device memory (per rank), and of host memory and NVMe (per machine); empty
    if the plan fits."""
    reasons: tuple[str, ...]
    """Why the plan was chosen or rejected; empty for a plan that fits but was not preferred."""
    activation_offload: bool = False
    """Whether host memory stores the inputs of recomputed blocks (``ActivationOffload``)."""
    time: StepTime | None = None
    """Predicted time of a step; ``None`` if the model's operation counts are unknown."""
    streamed: Streaming | None = None
    """Options for ``plan.resolve(streamed=...)``; ``None`` if weights are not streamed."""
    update: DeviceUpdate | None = None
    """Options for ``plan.resolve(update=...)``; ``None`` for an update on the host."""
    instead_of: str | None = None
    """The requested optimizer, if another one runs."""

    @property
    def optimizer(self) -> str:
        """Name of the optimizer that runs."""
        return self.estimate.resolved.optimizer.name

    @property
    def reason(self) -> str:
        """Why the plan was chosen, not preferred, or rejected, in words."""
        return "; ".join(self.reasons) or "also fits, but offloads more or is slower"

    def __repr__(self) -> str:
        return f"<Candidate: {self.title}, {'fits' if self.fits else 'does not fit'}>"


@attrs.frozen(kw_only=True, repr=False)
class Advised(Readable):
    """The plan chosen by ``DeepSpeedPlan.advise``, with all candidates."""

    budget: Budget
    chosen: Candidate
    candidates: tuple[Candidate, ...]
    """All plans that were considered, from least to most offload."""

    @property
    def plan(self) -> Settings:
        """The advised plan."""
        return self.chosen.plan

    @property
    def estimate(self) -> Estimate:
        """Memory estimate of the advised plan."""
        return self.chosen.estimate

    @property
    def resolved(self) -> Resolved:
        """The advised plan, resolved for the given machine."""
        return self.chosen.estimate.resolved

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
        place = "host" if self.update is None else self.update.name
        updated = Decision("update", None, place, reason)
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
        needs = machine_needs(self.estimate)
        return {
            "device": self.budget.device - needs["device"],
            "host": self.budget.host - needs["host"],
            "nvme": self.budget.nvme - needs["nvme"],
        }


def machine_needs(estimate: Estimate) -> dict[Place, int]:
    """Return the bytes that a plan needs: device memory per rank, and RAM and NVMe per machine."""
    ranks = estimate.workload.ranks_per_machine or estimate.resolved.world_size
    return {
        "device": estimate.device,
        "host": estimate.host * ranks,
        "nvme": estimate.nvme * ranks,
    }


# -- The candidates from least to most offload, and the one that is chosen.


@attrs.frozen(kw_only=True)
class Layout:
    """A ZeRO stage, and where optimizer states and parameters are stored."""

    stage: int
    optimizer: str = "none"
    parameters: str = "none"
    pinned: bool = True
    fills_device: bool = False
    """Whether as many optimizer states as fit stay on the device."""
    streams: bool = False
    """Whether weights are streamed; the device keeps as many units as fit."""
    masters: MastersName = "fp32"
    """How master weights are stored."""
    on_device: bool = False
    """Whether weights are updated on the device."""

    @property
    def title(self) -> str:
        """The layout in words."""
        places = {"cpu": "in host memory", "nvme": "on NVMe"}
        if self.streams or self.on_device:
            weights = "weights streamed" if self.streams else "weights on the device"
            updated = ", updated on the device" if self.on_device else ""
            return f"{weights}{_MASTERS[self.masters]}, optimizer in host memory{updated}"
        words = [f"ZeRO-{self.stage}" if self.stage else "no partitioning"]
        if self.optimizer == self.parameters != "none":
            words.append(f"optimizer and parameters {places[self.optimizer]}")
        else:
            parts = {"optimizer": self.optimizer, "parameters": self.parameters}
            words += [f"{part} {places[to]}" for part, to in parts.items() if to != "none"]
        if not self.pinned:
            words.append("not page-locked")
        if self.fills_device:
            words.append("as much of it on the device as fits")
        return ", ".join(words)


_MASTERS: Final[Mapping[MastersName, str]] = {
    "fp32": "",
    "split": ", split master weights",
    "stochastic": ", weights rounded at random",
}
_EXACT: Final[tuple[MastersName, ...]] = ("fp32", "split")
STREAMING: Final = tuple(
    Layout(stage=2, optimizer="cpu", streams=True, masters=masters, on_device=on_device)
    for on_device in (False, True)
    for masters in _EXACT
)
LEVELS: Final[tuple[tuple[Layout, ...], ...]] = (
    tuple(Layout(stage=stage) for stage in range(4)),
    (
        Layout(stage=2, optimizer="cpu"),
        Layout(stage=3, optimizer="cpu"),
        Layout(stage=3, optimizer="cpu", fills_device=True),
    ),
    (
        Layout(stage=2, optimizer="cpu", pinned=False),
        Layout(stage=3, optimizer="cpu", pinned=False),
    ),
    (Layout(stage=3, optimizer="cpu", parameters="cpu"),),
    (Layout(stage=3, optimizer="cpu", parameters="cpu", pinned=False),),
    STREAMING,
    (Layout(stage=3, optimizer="nvme"),),
    (Layout(stage=3, optimizer="nvme", parameters="cpu"),),
    (Layout(stage=3, optimizer="nvme", parameters="nvme"),),
)
"""Layouts from least to most offload, ordered by stage within each level. Offload costs more time
than partitioning, and recomputation costs less than either."""

_OPT_IN: Final = "not chosen, because streaming is off"
_PROVE: Final = "`zerotune doctor --prove` verifies streaming on this machine"
_SUGGESTED_BASE: Final = "nf4"
_SUGGESTED_RANK: Final = 16

_PLACE_WORDS: Final[Mapping[Place, str]] = {
    "device": "device memory",
    "host": "host memory",
    "nvme": "NVMe",
}
_PHASE_WORDS: Final[Mapping[Phase, str]] = {
    "initialization": "during set-up",
    "forward and backward": "in the backward pass",
    "optimizer step": "in the optimizer step",
    "checkpoint": "while a checkpoint is written",
}


@attrs.frozen(kw_only=True)
class Request:
    """A request for advice: model, machine, budget and preferences."""

    model: ModelFacts
    platform: Platform
    budget: Budget
    world_size: int
    workload: Workload
    plan: Settings
    """Settings other than the layout: precision, optimizer, accumulation …"""
    rates: Rates
    """Speeds of the machine."""
    prefer: Preference
    """Criterion for choosing among plans that fit."""
    streamed: bool
    """Whether a plan with streamed weights may be chosen."""
    asked: str
    """Name of the requested optimizer."""
    update: UpdateName | DeviceUpdate | None
    """Where weights are updated; ``None``: wherever a step is faster, but never rounded at
    random."""

    @property
    def levels(self) -> tuple[tuple[Layout, ...], ...]:
        """Layouts that may run, as in ``LEVELS``."""
        if not isinstance(self.update, DeviceUpdate):
            return LEVELS
        resident = Layout(stage=2, optimizer="cpu", masters=self.update.masters, on_device=True)
        return ((resident, attrs.evolve(resident, streams=True)),)

    @property
    def context(self) -> Context:
        """Context in which every candidate is resolved."""
        return Context(world_size=self.world_size, platform=self.platform, model=self.model)


def advise(
    plan: Settings,
    model: ModelFacts | str | Any,
    context: Context,
    *,
    vram: int | str | None,
    ram: int | str | None,
    nvme: int | str,
    batch: int,
    resolution: int | tuple[int, int] | None,
    frames: int | None,
    ema: EMAPlace,
    frozen_bytes: int,
    model_in_memory: bool,
    reserve: float,
    lora: int | None,
    base_dtype: str | None,
    rates: Rates | None,
    prefer: Preference,
    streamed: bool,
    update: UpdateName | DeviceUpdate | None,
) -> Advised:
    """Choose a plan as ``DeepSpeedPlan.advise`` does."""
    if prefer not in PREFERENCES:
        raise InvalidValueError(
            "is not a known preference", 'write "fastest" or "least offload"', "prefer", prefer
        )
    facts = as_facts(model, lora=lora, base_dtype=base_dtype)
    device = None if vram is None else parse_size(vram, key="vram")
    host = None if ram is None else parse_size(ram, key="ram")
    platform = _machine(context, device, host)
    budget = _memory_budget(
        platform, device, host, nvme=parse_size(nvme, key="nvme"), reserve=reserve
    )
    request = Request(
        model=facts,
        platform=platform,
        budget=budget,
        world_size=context.world_size,
        workload=Workload(
            batch=count(batch, "batch"),
            **sample_size(model, facts, resolution=resolution, frames=frames),
            ema=ema,
            frozen_bytes=count(frozen_bytes, "frozen_bytes", least=0) + frozen_beside(model),
            model_in_memory=model_in_memory,
        ),
        plan=plan,
        rates=known_rates(platform) if rates is None else rates,
        prefer=prefer,
        # Such an optimizer is a request for streamed weights.
        streamed=streamed or "streamed weights" in entry_of(plan.optimizer_name).requires,
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


_ALIKE: Final = 1.05
"""Predictions within this factor count as equal, and the least offload is preferred. In half of the
cases of `bench prediction`, the error of the prediction was larger."""


def _choose(request: Request) -> Advised:
    candidates, fitting = _search(request)
    if not candidates:
        raise _not_on_device(request)
    if not fitting:
        raise _nothing_fits(request, candidates)
    timed = [one.time.expected for one in fitting if one.time is not None]
    first, reason = fitting[0], "the least offload and the lowest stage that fits"
    if request.prefer == "fastest" and len(timed) == len(fitting):
        limit = _ALIKE * min(timed)
        first = next(one for one in fitting if one.time is not None and one.time.expected <= limit)
        if first is not fitting[0]:
            reason = "predicted to be the fastest that fits"
    reasons = (reason, *_another_optimizer(first), *_without_clipping(first))
    if first.streamed is not None and request.platform.accelerator != "cpu":
        reasons = (*reasons, _PROVE)
    chosen = attrs.evolve(first, reasons=reasons)
    listed = tuple(chosen if one is first else one for one in candidates)
    return Advised(budget=request.budget, chosen=chosen, candidates=listed)


def _search(
    request: Request, *, only_streamed: bool = False
) -> tuple[list[Candidate], list[Candidate]]:
    """Return all candidates, and those that may be chosen; leaner ones only if no other fits."""
    candidates = list(_candidates(request, only_streamed=only_streamed))
    fitting = _eligible(request, candidates)
    for name in _lean_optimizers(request) if request.streamed else ():
        if fitting:
            break
        candidates += _candidates(_with_optimizer(request, name), only_streamed=True)
        fitting = _eligible(request, candidates)
    return candidates, fitting


def _eligible(request: Request, candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return the candidates that may be chosen.

    Those with another optimizer and inexact ones are returned only if nothing else fits.
    """
    fitting = [one for one in candidates if one.fits and (request.streamed or one.streamed is None)]
    fitting = [one for one in fitting if one.instead_of is None] or fitting
    exact = [one for one in fitting if one.estimate.resolved.masters == "fp32"]
    return exact or fitting


def _another_optimizer(candidate: Candidate) -> tuple[str, ...]:
    """Return in words why another optimizer runs than the requested one."""
    if candidate.instead_of is None:
        return ()
    name, entry = candidate.instead_of, entry_of(candidate.optimizer)
    if entry.streams and entry.name not in ADAM:
        return (f"nothing fits with {name}; {entry.name} is {entry.summary}",)
    return (f"{entry.name} runs instead of {name}, which cannot run or does not fit",)


def _without_clipping(candidate: Candidate) -> tuple[str, ...]:
    """Return the step time without clipping in words, for streamed weights."""
    time = candidate.time
    if candidate.streamed is None or time is None or time.schedule not in ("hidden", "in turn"):
        return ()
    return (f"{time.eager_seconds:.2f} s with gradient_clipping 0",)


def _candidates(request: Request, *, only_streamed: bool = False) -> Iterator[Candidate]:
    choices = [
        attrs.evolve(request.workload, gradient_checkpointing=recomputed, activation_offload=away)
        for recomputed, away in _activations(request)
    ]
    for level in request.levels:
        layouts = (each for each in level if each.streams or not only_streamed)
        plans = {each: _laid_out(request, each) for each in layouts if _sensible(request, each)}
        resolved = dict(_resolved_layouts(request, plans))
        plans = {each: plan for each, plan in plans.items() if _as_laid_out(each, resolved)}
        for work in choices:
            lacks_host = True
            for layout, plan in plans.items():
                if layout.masters == "split" and not lacks_host:
                    continue
                found = plan, estimate_resolved(resolved[layout], work)
                if layout.fills_device:
                    found = _fill_device(request, layout, found[1])
                elif layout.streams:
                    found = plan, _fill_both(request, found[1])
                candidate = _judged(request, layout, *found)
                lacks_host = "host" in candidate.shortfalls
                yield candidate


def _fill_both(request: Request, estimate: Estimate) -> Estimate:
    """Estimate streamed weights with as many units and gradient buffers as fit."""
    work = estimate.workload
    kept = with_units_kept(estimate, request.budget.usable("device"))
    ranks = work.ranks_per_machine or request.world_size
    usable = request.budget.usable("host") // ranks
    return estimate_resolved(with_gradients_kept(estimate_resolved(kept, work), usable), work)


def _as_laid_out(layout: Layout, resolved: Mapping[Layout, Resolved]) -> bool:
    """Whether the optimizer runs in ``layout`` and resolution has kept its streaming options."""
    if layout not in resolved:
        return False
    found = resolved[layout]
    if layout.on_device and found.optimizer.name != found.plan.optimizer_name:
        return False
    streams, on_device = found.streaming is not None, found.update is not None
    return (streams, on_device, found.masters) == (layout.streams, layout.on_device, layout.masters)


def _resolved_layouts(
    request: Request, plans: Mapping[Layout, Settings]
) -> Iterator[tuple[Layout, Resolved]]:
    """Yield the plans in whose layouts the optimizer, or AdamW in its place, can run."""
    for layout, plan in plans.items():
        split = layout.masters == "split"
        streaming = Streaming(split_masters=split) if layout.streams else None
        update = DeviceUpdate(masters=layout.masters) if layout.on_device else None
        # A resident layout would otherwise be streamed where its weights do not fit.
        streamed = False if layout.on_device and streaming is None else streaming
        try:
            yield layout, resolve(plan, request.context, streamed=streamed, update=update)
        except OptimizerError:
            # At stage 0, every optimizer runs that runs at all.
            if layout.stage == 0 or isinstance(request.update, DeviceUpdate):
                raise


def _fill_device(request: Request, layout: Layout, estimate: Estimate) -> tuple[Settings, Estimate]:
    """Return the plan with as many optimizer sub-groups on the device as fit, at least one.

    Args:
        request: The request.
        layout: Layout of the plan.
        estimate: Estimate of the plan with the whole optimizer in host memory.
    """
    work = estimate.workload
    case = Costing(resolved=estimate.resolved, model=request.model, workload=work)
    groups = case.sub_groups
    each = 4 * (2 + case.states)
    usable = request.budget.usable("device")

    def keeping(kept: int) -> tuple[Settings, Estimate]:
        # The middle of the ratios that keep this many, so that rounding cannot change the number.
        ratio = round(max(0.0, 1 - (kept + 0.5) / len(groups)), 4)
        plan = _laid_out(request, layout, ratio=ratio)
        resolved = resolve(plan, request.context)
        return plan, estimate_resolved(resolved, work)

    # A first guess from the memory that is free at the peak; other phases may have more.
    kept = max(1, sum(each * held <= usable - estimate.device for held in accumulate(groups[:-1])))
    best = keeping(kept)
    while kept > 1 and best[1].device > usable:
        kept -= 1
        best = keeping(kept)
    while kept + 1 < len(groups):
        more = keeping(kept + 1)
        if more[1].device > usable:
            break
        kept, best = kept + 1, more
    return best


def _activations(request: Request) -> Iterator[tuple[bool, bool]]:
    """Yield gradient checkpointing and activation offload settings, cheapest first."""
    yield False, False
    known = request.model.activations
    if known is None or known.checkpointed is None or request.workload.height is None:
        return
    yield True, False
    if known.offloaded is not None and request.platform.accelerator in DISCRETE:
        yield True, True


def _sensible(request: Request, layout: Layout) -> bool:
    if layout.fills_device and request.plan.optimizer_name != "AdamW":
        return False
    asked = entry_of(request.plan.optimizer_name)
    runs = asked.streams or layout.on_device
    streams = runs and request.model.units and not request.model.storages
    if (layout.streams and not streams) or (layout.on_device and request.update == "host"):
        return False
    if not layout.streams and "streamed weights" in asked.requires:
        return False
    # On the CPU accelerator, offload to host memory saves nothing, and nothing is page-locked.
    if request.platform.accelerator == "cpu" and not isinstance(request.update, DeviceUpdate):
        return layout.pinned and "cpu" not in (layout.parameters, layout.optimizer)
    return True


def _laid_out(request: Request, layout: Layout, *, ratio: float | None = None) -> Settings:
    def section(device: str, ratio: float | None = None) -> OffloadSection | None:
        if device == "none":
            return None
        pinned = None if layout.pinned else False
        return OffloadSection(device=device, pin_memory=pinned, ratio=ratio)

    return attrs.evolve(
        request.plan,
        train_micro_batch_size_per_gpu=request.workload.batch,
        zero_optimization=ZeroSection(
            stage=layout.stage,
            offload_optimizer=section(layout.optimizer, ratio),
            offload_param=section(layout.parameters),
        ),
    )


def _judged(
    request: Request,
    layout: Layout,
    plan: Settings,
    estimate: Estimate,
) -> Candidate:
    needs = machine_needs(estimate)
    shortfalls: dict[Place, int] = {
        place: needs[place] - request.budget.usable(place)
        for place in PLACES
        if needs[place] > request.budget.usable(place)
    }
    reasons = []
    for peak in map(estimate.peak, shortfalls):
        sizes = [f"{item.component} ({format_size(item.nbytes)})" for item in peak.items[:2]]
        when = f"{_PLACE_WORDS[peak.place]} is needed most {_PHASE_WORDS[peak.phase]}"
        reasons.append(f"{when}, for {' and '.join(sizes)}")
    candidate = Candidate(
        title=layout.title,
        plan=plan,
        estimate=estimate,
        gradient_checkpointing=estimate.workload.gradient_checkpointing,
        activation_offload=estimate.workload.activation_offload,
        fits=not shortfalls,
        shortfalls=shortfalls,
        reasons=tuple(reasons),
        time=step_time(estimate, request.rates),
        streamed=estimate.resolved.streaming,
        update=estimate.resolved.update,
        instead_of=None if estimate.resolved.optimizer.name == request.asked else request.asked,
    )
    if candidate.instead_of is not None:
        title = f"{candidate.title}, {candidate.optimizer}"
        candidate = attrs.evolve(candidate, title=title)
    if shortfalls or candidate.streamed is None or request.streamed:
        return candidate
    return attrs.evolve(candidate, reasons=(_OPT_IN, *_without_clipping(candidate)))


def _not_on_device(request: Request) -> PlanConflictError:
    """Return the error for a requested update on the device that no layout can run."""
    plan = _laid_out(request, request.levels[0][0])
    update: Any = request.update
    resolved = resolve(plan, request.context, streamed=False, update=update)
    why = next(one.reason for one in reversed(resolved.decisions) if one.key == "update")
    return PlanConflictError(
        f"is not possible: {why}", 'remove it, or write "host"', "update", update.name
    )


def _nothing_fits(request: Request, candidates: list[Candidate]) -> NothingFitsError:
    def distance(one: Candidate) -> float:
        return sum(
            over / max(request.budget.usable(place), 2**30)
            for place, over in one.shortfalls.items()
        )

    plain = [one for one in candidates if request.streamed or one.streamed is None]
    nearest = min(plain or candidates, key=distance)
    needs = machine_needs(nearest.estimate)
    missing = " and ".join(
        f"{format_size(over)} of {_PLACE_WORDS[place]}"
        for place, over in nearest.shortfalls.items()
    )
    enough = " and ".join(
        f"{format_size(int(needs[place] / (1 - request.budget.reserve)))} of {_PLACE_WORDS[place]}"
        for place in nearest.shortfalls
    )
    smaller = " a smaller batch or resolution," if request.workload.batch > 1 else ""
    return NothingFitsError(
        f"no plan fits; the closest ({nearest.title}) lacks {missing}",
        nearest=nearest,
        remedies=tuple(
            remedy
            for remedy in (
                _streamed_weights(request),
                _smaller_states(request, nearest),
                _adapters(request),
            )
            if remedy is not None
        ),
        key="memory",
        value=f"{format_size(request.budget.device)} device,"
        f" {format_size(request.budget.host)} host, {format_size(request.budget.nvme)} nvme",
        fix=f"provide {enough}, or reduce the need with{smaller} more ranks or NVMe for swap files",
    )


@attrs.frozen(kw_only=True)
class Remedy:
    """Settings to change so that a model fits or comes closer to fitting."""

    what: str
    """Effect of the settings in words (``"adapters fit"``)."""
    settings: Mapping[str, Any]
    """Arguments of ``DeepSpeedPlan.advise`` by name; ``zerotune plan advise`` has options of the
    same names."""
    gain: str = ""
    """Gain in words."""

    def in_python(self) -> str:
        """Return the settings as Python arguments."""
        return self._sentence(", ".join(f"{k}={value!r}" for k, value in self.settings.items()))

    def in_shell(self) -> str:
        """Return the settings as command-line options."""
        options = (
            f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
            for name, value in self.settings.items()
        )
        return self._sentence(" ".join(options))

    def _sentence(self, settings: str) -> str:
        return f"{self.what}: {settings}" + (f", {self.gain}" if self.gain else "")


def _lean_optimizers(request: Request) -> list[str]:
    """Return the optimizers that need less host memory than the requested one, exacter first."""
    asked = entry_of(request.asked)
    size = OptimizerEntry.states_per_weight
    streams = [entry for entry in OPTIMIZERS.values() if entry.streams and asked.streams]
    lean = [entry for entry in streams if size(entry) < size(asked)]
    return [entry.name for entry in sorted(lean, key=size, reverse=True)]


def _with_optimizer(request: Request, name: str) -> Request:
    """Return the request with another optimizer, which keeps the arguments that it accepts."""
    section = request.plan.optimizer
    params = {
        k: v for k, v in ((section and section.params) or {}).items() if entry_of(name).parameter(k)
    }
    optimizer = OptimizerSection(type=name, params=params or None)
    return attrs.evolve(request, plan=attrs.evolve(request.plan, optimizer=optimizer))


_UNCLIPPED: Final = {"gradient_clipping": 0}
_FACTORED: Final = {"optimizer": "Adafactor"}
_LEANER: Final[tuple[Mapping[str, Any], ...]] = (
    {}, _UNCLIPPED, _FACTORED, _UNCLIPPED | _FACTORED,
    _UNCLIPPED | _FACTORED | {"update": "device:stochastic"},
)  # fmt: skip
"""Arguments of ``advise`` with which streamed weights need less memory, the exacter first."""


def _streamed_weights(request: Request) -> Remedy | None:
    """Return a remedy with streamed weights, and with what they need beside, if one fits."""
    for leaner in _LEANER:
        if "update" in leaner and request.update is not None:
            continue
        found = _with_settings(attrs.evolve(request, streamed=True), leaner)
        _, fitting = _search(found, only_streamed=True)
        if not fitting:
            continue
        own = {"gradient_clipping": request.plan.gradient_clipping, "optimizer": request.asked}
        settings: dict[str, Any] = {} if request.streamed else {"streamed": True}
        settings |= {name: value for name, value in leaner.items() if value != own.get(name)}
        settings |= {} if fitting[0].instead_of is None else {"optimizer": fitting[0].optimizer}
        seconds = min((one.time.expected for one in fitting if one.time), default=None)
        gain = "" if seconds is None else f"{seconds:.2f} s per step"
        return Remedy(what="streamed weights fit", settings=settings, gain=gain)
    return None


def _with_settings(request: Request, settings: Mapping[str, Any]) -> Request:
    plan, name = request.plan, settings.get("optimizer", request.asked)
    if name != request.asked:
        plan = attrs.evolve(plan, optimizer=OptimizerSection(type=name))
    plan = attrs.evolve(
        plan, gradient_clipping=settings.get("gradient_clipping", plan.gradient_clipping)
    )
    update = DeviceUpdate.of(settings["update"]) if "update" in settings else request.update
    return attrs.evolve(request, plan=plan, asked=name, update=update)


def _smaller_states(request: Request, nearest: Candidate) -> Remedy | None:
    resolved = nearest.estimate.resolved
    adamw = resolved.plan.optimizer_name == "AdamW"
    if "host" not in nearest.shortfalls or resolved.offload_optimizer != "cpu" or not adamw:
        return None
    saved = format_size(4 * request.model.trainable_numel)
    return Remedy(
        what="smaller optimizer states",
        settings={"optimizer": "AdamWBF16States"},
        gain=f"{saved} less of host memory",
    )


def _adapters(request: Request) -> Remedy | None:
    """Return a remedy that trains adapters instead of the whole model, if one fits."""
    if request.model.trainable_numel < request.model.numel:
        return None
    for base_dtype in (None, _SUGGESTED_BASE):
        try:
            model = request.model.with_adapters(_SUGGESTED_RANK, base_dtype=base_dtype)
        except InvalidValueError:  # No layer has a name that adapters target.
            return None
        adapted = attrs.evolve(request, model=model)
        fitting = next(iter(_eligible(adapted, _candidates(adapted))), None)
        if fitting is not None:
            base = {} if base_dtype is None else {"base_dtype": base_dtype}
            return Remedy(
                what="adapters fit",
                settings={"lora": _SUGGESTED_RANK, **base},
                gain=fitting.title,
            )
    return None
