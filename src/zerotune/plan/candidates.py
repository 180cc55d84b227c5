"""Combinations of ZeRO stage and offload (layouts), each as a plan with its estimate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import attrs

from zerotune._util.text import format_size
from zerotune.errors import OptimizerError
from zerotune.plan.context import Context, DeviceUpdate, MastersName, Streaming, UpdateName
from zerotune.plan.facts import STORAGES, ModelFacts
from zerotune.plan.memory.costing import Costing
from zerotune.plan.memory.estimate import estimate_resolved
from zerotune.plan.memory.hosted import with_gradients_kept, with_units_kept
from zerotune.plan.memory.items import DURING, PLACES, Estimate, Place, Workload
from zerotune.plan.memory.rates import Rates
from zerotune.plan.memory.time import StepTime, step_time
from zerotune.plan.optimizer.catalogue import OPTIMIZERS
from zerotune.plan.optimizer.entries import OptimizerEntry
from zerotune.plan.optimizer.names import DEFAULT_OPTIMIZER, entry_of
from zerotune.plan.resolution import resolve
from zerotune.plan.resolved import Resolved
from zerotune.plan.sections import OffloadSection, OptimizerSection, ZeroSection
from zerotune.plan.settings import Settings
from zerotune.platform import Platform
from zerotune.platform.facts import DISCRETE


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
    def update_name(self) -> UpdateName:
        """Where the update runs, as the argument ``update`` of ``plan.resolve`` names it."""
        return "host" if self.update is None else self.update.name

    @property
    def reason(self) -> str:
        """Why the plan was chosen, not preferred, or rejected, in words."""
        return "; ".join(self.reasons) or "also fits, but offloads more or is slower"

    def __repr__(self) -> str:
        return f"<Candidate: {self.title}, {'fits' if self.fits else 'does not fit'}>"


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


PLACE_WORDS: Final[Mapping[Place, str]] = {
    "device": "device memory",
    "host": "host memory",
    "nvme": "NVMe",
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


def search(
    request: Request, *, only_streamed: bool = False
) -> tuple[list[Candidate], list[Candidate]]:
    """Return all candidates, and those that may be chosen; leaner ones only if no other fits."""
    candidates = list(considered(request, only_streamed=only_streamed))
    fitting = eligible(request, candidates)
    for name in _lean_optimizers(request) if request.streamed else ():
        if fitting:
            break
        candidates += considered(with_optimizer(request, name), only_streamed=True)
        fitting = eligible(request, candidates)
    return candidates, fitting


def eligible(request: Request, candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return the candidates that may be chosen.

    Those with another optimizer and inexact ones are returned only if nothing else fits.
    """
    fitting = [one for one in candidates if one.fits and (request.streamed or one.streamed is None)]
    fitting = [one for one in fitting if one.instead_of is None] or fitting
    exact = [one for one in fitting if one.estimate.resolved.masters == "fp32"]
    return exact or fitting


_ALIKE: Final = 1.05
"""Predictions within this factor count as equal, and the least offload is preferred. In half of the
cases of `bench prediction`, the error of the prediction was larger."""


def preferred(fitting: Sequence[Candidate]) -> Candidate:
    """Return the fastest candidate, or the one with the least offload if a time is unknown."""
    timed = [one.time.expected for one in fitting if one.time is not None]
    if len(timed) < len(fitting):
        return fitting[0]
    limit = _ALIKE * min(timed)
    return next(one for one in fitting if one.time is not None and one.time.expected <= limit)


def considered(request: Request, *, only_streamed: bool = False) -> Iterator[Candidate]:
    """Yield the candidates of the layouts, from least to most offload."""
    workloads = tuple(_workloads(request))
    for level in request.levels:
        layouts = (each for each in level if each.streams or not only_streamed)
        every = ((each, _resolved(request, each)) for each in layouts if _sensible(request, each))
        resolved = {layout: found for layout, found in every if found is not None}
        for work in workloads:
            lacks_host = True
            for layout, plan in resolved.items():
                exacter = attrs.evolve(layout, masters="fp32")
                if layout.masters != "fp32" and exacter in resolved and not lacks_host:
                    continue
                estimate = estimate_resolved(plan, work)
                if layout.fills_device:
                    estimate = _fill_device(request, layout, estimate)
                elif layout.streams:
                    estimate = _fill_both(request, estimate)
                candidate = _judged(request, layout, estimate)
                lacks_host = "host" in candidate.shortfalls
                yield candidate


def _fill_both(request: Request, estimate: Estimate) -> Estimate:
    """Estimate streamed weights with as many units and gradient buffers as fit."""
    work = estimate.workload
    kept = with_units_kept(estimate, request.budget.usable("device"))
    ranks = work.ranks_per_machine or request.world_size
    usable = request.budget.usable("host") // ranks
    return estimate_resolved(with_gradients_kept(estimate_resolved(kept, work), usable), work)


def _resolved(request: Request, layout: Layout) -> Resolved | None:
    """Return the layout's plan, resolved; ``None`` if something else would run than the layout.

    AdamW takes the place of an optimizer that cannot run in the layout, except one of a package,
    whose learning rates mean something else.
    """
    split = layout.masters == "split"
    streaming = Streaming(split_masters=split) if layout.streams else None
    update = DeviceUpdate(masters=layout.masters) if layout.on_device else None
    # A resident layout would otherwise be streamed where its weights do not fit.
    streamed = False if layout.on_device and streaming is None else streaming
    plan = laid_out(request, layout)
    try:
        found = resolve(plan, request.context, streamed=streamed, update=update)
    except OptimizerError:
        asked = entry_of(request.plan.optimizer_name)
        from_package = asked.family == "package"
        # At stage 0, every optimizer runs that runs at all.
        if layout.stage == 0 or (from_package and isinstance(request.update, DeviceUpdate)):
            raise
        if layout.on_device or from_package or asked.name == DEFAULT_OPTIMIZER:
            return None
        return _resolved(with_optimizer(request, DEFAULT_OPTIMIZER), layout)
    runs = (found.streaming is not None, found.update is not None, found.masters)
    return found if runs == (layout.streams, layout.on_device, layout.masters) else None


def _fill_device(request: Request, layout: Layout, estimate: Estimate) -> Estimate:
    """Estimate the plan with as many optimizer sub-groups on the device as fit, at least one.

    Args:
        request: The request.
        layout: Layout of the plan.
        estimate: Estimate of the plan with the whole optimizer in host memory.
    """
    work = estimate.workload
    case = Costing(resolved=estimate.resolved, model=request.model, workload=work)
    groups = case.sub_groups

    def keeping(kept: int) -> Estimate:
        # The middle of the ratios that keep this many, so that rounding cannot change the number.
        ratio = round(max(0.0, 1 - (kept + 0.5) / len(groups)), 4)
        plan = laid_out(request, layout, ratio=ratio)
        return estimate_resolved(resolve(plan, request.context), work)

    fewest, most = 1, len(groups) - 1
    while fewest < most:
        middle = (fewest + most + 1) // 2
        if keeping(middle).device <= request.budget.usable("device"):
            fewest = middle
        else:
            most = middle - 1
    return keeping(fewest)


def _workloads(request: Request) -> Iterator[Workload]:
    """Yield the workload with and without checkpointing and activation offload, cheapest first."""
    work, known = request.workload, request.model.activations
    yield attrs.evolve(work, gradient_checkpointing=False, activation_offload=False)
    if known is None or known.checkpointed is None or work.height is None:
        return
    yield attrs.evolve(work, gradient_checkpointing=True, activation_offload=False)
    if known.offloaded is not None and request.platform.accelerator in DISCRETE:
        yield attrs.evolve(work, gradient_checkpointing=True, activation_offload=True)


def _sensible(request: Request, layout: Layout) -> bool:
    if layout.fills_device and request.plan.optimizer_name != "AdamW":
        return False
    asked = entry_of(request.plan.optimizer_name)
    runs = asked.streams or layout.on_device
    streams = runs and request.model.units and STORAGES.keys() >= set(request.model.storages)
    if (layout.streams and not streams) or (layout.on_device and request.update == "host"):
        return False
    if asked.must_stream and not layout.streams:
        return False
    away = {layout.parameters, layout.optimizer}
    # On the CPU accelerator, offload to host memory saves nothing.
    saves = request.platform.accelerator != "cpu" or isinstance(request.update, DeviceUpdate)
    return not ("nvme" in away and not request.budget.nvme) and (saves or "cpu" not in away)


def laid_out(request: Request, layout: Layout, *, ratio: float | None = None) -> Settings:
    """Return the requested settings with the layout's stage and offload."""

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


def _judged(request: Request, layout: Layout, estimate: Estimate) -> Candidate:
    needs = machine_needs(estimate)
    shortfalls: dict[Place, int] = {
        place: needs[place] - request.budget.usable(place)
        for place in PLACES
        if needs[place] > request.budget.usable(place)
    }
    reasons = []
    for peak in map(estimate.peak, shortfalls):
        sizes = [f"{item.component} ({format_size(item.nbytes)})" for item in peak.items[:2]]
        when = f"{PLACE_WORDS[peak.place]} is needed most {DURING[peak.phase]}"
        reasons.append(f"{when}, for {' and '.join(sizes)}")
    candidate = Candidate(
        title=layout.title,
        plan=estimate.resolved.requested,
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
    return attrs.evolve(candidate, reasons=(_OPT_IN,))


def _lean_optimizers(request: Request) -> list[str]:
    """Return the optimizers that need less host memory than the requested one, exacter first."""
    asked = entry_of(request.asked)
    size = OptimizerEntry.states_per_weight
    streams = [entry for entry in OPTIMIZERS.values() if entry.streams and asked.streams]
    lean = [entry for entry in streams if size(entry) < size(asked)]
    return [entry.name for entry in sorted(lean, key=size, reverse=True)]


def with_optimizer(request: Request, name: str) -> Request:
    """Return the request with another optimizer, which keeps the arguments that it accepts."""
    section = request.plan.optimizer
    params = {
        k: v for k, v in ((section and section.params) or {}).items() if entry_of(name).parameter(k)
    }
    optimizer = OptimizerSection(type=name, params=params or None)
    return attrs.evolve(request, plan=attrs.evolve(request.plan, optimizer=optimizer))
