"""Steps of large models on catalogued cards, in virtual time.

A narrow model with the blocks of a large one trains on the simulated accelerator under the real
engine. Computation, copies and updates of each block take as long as those of the large model would
on the card; the rates are those of ``plan/memory/time.py``.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final
from unittest import mock

import attrs
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from bench.virtual import HostThreads, in_virtual_time
from tools.families import CONFIGURATIONS
from zerotune.plan.context import Streaming
from zerotune.plan.memory.items import Workload
from zerotune.plan.memory.rates import CARDS, Rates, catalogued_rates
from zerotune.plan.memory.time import ON_CARD, StepTime
from zerotune.plan.memory.traffic import step_traffic
from zerotune.plan.plan import DeepSpeedPlan
from zerotune.platform import Platform

GIB: Final = 2**30
FORWARD, BACKWARD, STEP = "forward", "backward", "step"
COMPUTE, IN, OUT, HOST = "computation", "weights to the device", "gradients off it", "host pass"
_LANES: Final = {"compute": COMPUTE, "upload": IN, "download": OUT}
PLANS: Final[Mapping[str, Mapping[str, Any]]] = {
    "streamed, clipped": {"clipping": 1.0, "streamed": Streaming()},
    "streamed, not clipped": {"clipping": 0.0, "streamed": Streaming()},
    "host engine": {"clipping": 1.0, "engine": "host"},
    "updated on the device, clipped": {
        "clipping": 1.0, "streamed": Streaming(), "update": "device",
    },
    "updated on the device, not clipped": {
        "clipping": 0.0, "streamed": Streaming(), "update": "device",
    },
    "updated on the device, split master weights": {
        "clipping": 1.0, "streamed": Streaming(), "update": "device:split",
    },
    "updated on the device, rounded at random": {
        "clipping": 0.0, "streamed": Streaming(), "update": "device:stochastic",
    },
}  # fmt: skip
_TINY_DIT: Final[Mapping[str, Any]] = {"num_attention_heads": 2, "attention_head_dim": 16}
NARROW: Final[Mapping[str, Mapping[str, Any]]] = {
    "sdxl": {
        "block_out_channels": [32, 64, 128], "cross_attention_dim": 208,
        "attention_head_dim": [1, 2, 4], "addition_time_embed_dim": 32,
        "projection_class_embeddings_input_dim": 320,
    },
    "sd3-medium": {
        **_TINY_DIT, "caption_projection_dim": 32, "joint_attention_dim": 80,
        "pooled_projection_dim": 40,
    },
    "flux": {
        **_TINY_DIT, "joint_attention_dim": 40, "pooled_projection_dim": 8,
        "axes_dims_rope": [4, 6, 6],
    },
    "qwen-image": {**_TINY_DIT, "joint_attention_dim": 40, "axes_dims_rope": [4, 6, 6]},
}  # fmt: skip
"""Configurations that differ from the published ones in their widths alone."""
_SIDE, _NARROW_SIDE = 1024, 128
_SHARES: Final = {"upload": "to_device", "download": "to_host"}
_TOUCHES: Final = 1e-4
"""Seconds between spans of a block that are drawn as one."""
_LEAST_SPEED: Final = 0.1
"""Share of host memory's rate that is left to the host beside copies in both directions."""
_FORGETS: Final = 1.0
"""Seconds after which a copy is forgotten; threads of the host are not further apart."""


def build(name: str, *, narrow: bool = False, device: str = "meta") -> torch.nn.Module:
    """Create a model in bf16, with gradient checkpointing."""
    import diffusers

    config = {**CONFIGURATIONS[name][0], **(NARROW[name] if narrow else {})}
    with torch.device(device):
        kind = getattr(diffusers, config["_class_name"])
        model: Any = kind.from_config(config).to(torch.bfloat16)
    model.enable_gradient_checkpointing()
    made: torch.nn.Module = model.train()
    return made


# -- What each block computes.


class Blocks:
    """Tell which block computes, and in which pass.

    Args:
        model: The model.
        names: Names of the blocks; the rest of the model is the block ``""``.
        changed: Called with block and pass.
    """

    def __init__(
        self, model: torch.nn.Module, names: Sequence[str], changed: Callable[[str, str], None]
    ) -> None:
        self._phase, self._changed = FORWARD, changed
        for name in names:
            block = model.get_submodule(name)
            block.register_forward_pre_hook(partial(self._enter, name))
            block.register_forward_hook(partial(self._leave, name))

    def begin(self, phase: str) -> None:
        self._phase = phase
        self._changed("", phase)

    def _enter(self, name: str, *_: Any) -> None:
        if self._phase == FORWARD:
            self._changed(name, FORWARD)

    def _leave(self, name: str, _block: Any, _arguments: Any, output: Any) -> None:
        if self._phase != FORWARD:
            return
        self._changed("", FORWARD)
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(partial(self._back, name))  # type: ignore[no-untyped-call]

    def _back(self, name: str, _gradient: Any) -> None:
        self._changed(name, BACKWARD)


Seconds = Mapping[tuple[str, str], float]
"""Seconds of computation, by block and pass."""


def seconds_on_card(
    name: str, blocks: Sequence[str], *, batch: int, rates: Rates
) -> dict[tuple[str, str], float]:
    """Count the work of the large model's blocks; return how long it takes, as plans predict it."""
    from zerotune.diffusion.facts import example_inputs
    from zerotune.diffusion.passes import _counted_forward, _Counts

    model = build(name)
    arguments = example_inputs(model)(batch, _SIDE, _SIDE)
    # Twice, since models keep tables from their first call.
    with _counted_forward(model, arguments, _Counts(model)):
        pass
    counts, at = _Counts(model), ("", FORWARD)
    work: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    before: Counter[str] = Counter()

    def changed(block: str, phase: str) -> None:
        nonlocal at, before
        now = Counter(counts.work)
        work[at].update({kind: n - before[kind] for kind, n in now.items()})
        at, before = (block, phase), now

    watched = Blocks(model, blocks, changed)
    watched.begin(FORWARD)
    with _counted_forward(model, arguments, counts) as loss:
        watched.begin(BACKWARD)
        loss.backward()
    watched.begin(STEP)
    return {
        where: sum(done[kind] / speed for kind, speed in ON_CARD.items()) / rates.products
        + (done["product_calls"] + done["attention_calls"]) / rates.operators
        + done["moved"] / rates.device_memory
        for where, done in work.items()
    }


def inputs_of(model: Any, device: Any, *, side: int = _NARROW_SIDE) -> Mapping[str, Any]:
    """Return arguments of a model's ``forward`` on the device, for one sample of a size."""
    from zerotune.diffusion.facts import example_inputs

    with torch.device("meta"):
        alike = type(model).from_config(model.config).to(torch.bfloat16)

    def there(one: torch.Tensor) -> torch.Tensor:
        known = torch.ones(one.shape, dtype=one.dtype) if one.is_meta else one
        return known.to(device)

    shapes = example_inputs(alike)(1, side, side)
    found: Mapping[str, Any] = tree_map_only(torch.Tensor, there, dict(shapes))
    return found


# -- Steps in virtual time.


@attrs.frozen(kw_only=True)
class Rehearsed:
    """A step in virtual time beside the plan's prediction."""

    seconds: float
    lanes: Mapping[str, float]
    """Seconds per step in which each lane works."""
    predicted: StepTime
    late: float
    """Uploads per step that were not requested ahead of their use."""
    spans: Sequence[tuple[str, str, float, float]]
    """Lane, block, begin and end, in seconds."""


class OnCard:
    """A narrow model under an engine, whose durations are those of a large model on a card."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        from tests.device import install

        install()
        self._name, self._how = settings["model"], PLANS[settings["plan"]]
        self._batch = settings["batch"]
        card = next(card for card in CARDS if card.name == settings["card"])
        platform = Platform.synthetic("cuda", vram=card.memory * GIB, ram=512 * GIB)
        device = attrs.evolve(platform.devices[0], name=card.name)
        self._platform = attrs.evolve(platform, devices=(device,))
        self.rates = catalogued_rates(self._platform)
        self._clock: Any = torch.simdev.clock  # type: ignore[attr-defined]
        torch.simdev.seed_order(0, 0.3, 3000)  # type: ignore[attr-defined]
        self._hosts = HostThreads(self._clock)
        self._model = build(self._name, narrow=True, device="cpu")
        self._now = (1.0, 1.0, "")
        self._seen = 0
        self._copies: list[tuple[float, float, float]] = []
        self._prepare()
        self._updated, self._label, self._there = self._whole, "", (1.0, 1.0, "")

    def _prepare(self) -> None:
        from zerotune.backend.host.units import find_units

        large = build(self._name)
        numel = {name: one.numel() for name, one in large.named_parameters()}
        self._blocks = [name for name, _ in find_units(large)]
        narrow = {name: one.numel() for name, one in self._model.named_parameters()}
        assert numel.keys() == narrow.keys()
        self._numel, self._narrow = numel, narrow
        self._whole = sum(numel.values()) / sum(narrow.values())
        self._ratio = {block: self._ratio_of(block) for block in self._blocks} | {"": self._whole}
        wanted = seconds_on_card(self._name, self._blocks, batch=self._batch, rates=self.rates)
        self._factors = self._calibrated(wanted)

    def _ratio_of(self, block: str) -> float:
        names = [name for name in self._numel if name.startswith(f"{block}.")]
        return self.ratio_of(names)

    def ratio_of(self, names: Sequence[str]) -> float:
        """Return how many times larger these weights of the large model are."""
        large = sum(self._numel[name] for name in names)
        return large / sum(self._narrow[name] for name in names)

    def _calibrated(self, wanted: Seconds) -> dict[tuple[str, str], float]:
        """Return by how much longer the blocks of the large model compute."""
        clock = self._clock
        clock.rates(self._rates_of_device(launch=0.0))
        model = build(self._name, narrow=True, device="cpu").to("simdev")
        arguments = inputs_of(model, "simdev")
        blocks = Blocks(model, self._blocks, lambda *at: clock.scale(label="|".join(at)))
        for _ in range(2):
            clock.reset()
            clock.record(True)
            blocks.begin(FORWARD)
            loss = loss_of(model(**arguments))
            blocks.begin(BACKWARD)
            loss.backward()  # type: ignore[no-untyped-call]
            for parameter in model.parameters():
                parameter.grad = None
        clock.scale()
        taken: Counter[str] = Counter()
        for span in clock.spans():
            if span.lane == "compute":
                taken[span.label] += span.end - span.start
        clock.reset()
        return {
            at: seconds / taken["|".join(at)]
            for at, seconds in wanted.items()
            if taken["|".join(at)]
        }

    def _rates_of_device(self, *, launch: float) -> dict[str, float]:
        rates = self.rates
        return {
            "memory": rates.device_memory, "half": rates.products, "single": rates.products_fp32,
            "upload": rates.to_device, "download": rates.to_host, "latency": 0.0, "launch": launch,
        }  # fmt: skip

    # -- The engine.

    def _resolved(self, model: Any, **changes: Any) -> Any:
        from zerotune import OptimizerResolver

        plan = DeepSpeedPlan.build(
            stage=2, offload="cpu", precision="bf16", micro_batch_size=self._batch,
            gradient_clipping=self._how["clipping"],
            optimizer={"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
        )  # fmt: skip
        locked = {"zero_optimization.offload_optimizer.pin_memory": True}
        resolved = plan.with_overrides(locked | changes).resolve(
            platform=self._platform, model=model, world_size=1,
            streamed=self._how.get("streamed", False),
            engine=self._how.get("engine"),
            update=self._how.get("update"),
        )  # fmt: skip
        return OptimizerResolver().resolve(resolved)

    def estimate(self) -> Any:
        """Return the large model's estimate."""
        from zerotune.plan.families import family

        resolved = self._resolved(family(self._name))
        return resolved.estimate(Workload(batch=self._batch, height=_SIDE, width=_SIDE))

    def rehearse(self, *, warm_up: int = 3, steps: int = 2) -> Rehearsed:
        """Train; return a step's seconds, and what the lanes did."""
        from zerotune.plan.facts import ModelFacts
        from zerotune.training.setup import build_engine

        clock, estimate = self._clock, self.estimate()
        trained = sum(one.numel for one in estimate.resolved.model.parameters if one.trainable)
        self._per_element = step_traffic(estimate).optimizer / trained
        if self._how.get("engine") != "deepspeed":
            # Gradients have been read for their norm when they arrived.
            self._per_element -= 2
        clock.rates(self._rates_of_device(launch=1 / self.rates.operators))
        clock.record(True)
        with in_virtual_time(self._hosts), self._timed():
            blocks = Blocks(self._model, self._blocks, self._compute)
            bucket = estimate.resolved.plan.zero_optimization.reduce_bucket_size
            resolved = self._resolved(
                ModelFacts.from_module(self._model),
                **{"zero_optimization.reduce_bucket_size": round(bucket / self._whole)},
            )
            with build_engine(model=self._model, plan=resolved) as engine:
                arguments = inputs_of(self._model, engine.device)
                for _ in range(warm_up):
                    self._step(engine, blocks, arguments)
                began, late = clock.now(), self._late(engine)
                for _ in range(steps):
                    self._step(engine, blocks, arguments)
                ended, late = clock.now(), self._late(engine) - late
        return self._rehearsed(estimate, began, ended, steps, late / steps)

    @staticmethod
    def _late(engine: Any) -> int:
        counts = getattr(engine, "counts", None)
        return 0 if counts is None else counts.late

    def _step(self, engine: Any, blocks: Blocks, arguments: Mapping[str, Any]) -> None:
        blocks.begin(FORWARD)
        loss = loss_of(engine(**arguments))
        blocks.begin(BACKWARD)
        engine.backward(loss)
        blocks.begin(STEP)
        engine.step()

    def _rehearsed(
        self, estimate: Any, began: float, ended: float, steps: int, late: float
    ) -> Rehearsed:
        spans: list[tuple[str, str, float, float]] = []
        for span in self._clock.spans():
            lane = _LANES.get(span.lane)
            if span.lane == "host" and span.name == HOST:
                lane = HOST
            if lane is not None and span.end > began and span.start < ended:
                spans.append((lane, span.label, span.start - began, span.end - began))
        busy: dict[str, float] = defaultdict(float)
        for lane, _, start, end in spans:
            busy[lane] += min(end, ended - began) - max(start, 0.0)
        return Rehearsed(
            seconds=(ended - began) / steps,
            lanes={lane: seconds / steps for lane, seconds in busy.items()},
            predicted=estimate.step_time(self.rates),
            late=late,
            spans=joined(spans),
        )

    # -- Durations.

    def _compute(self, block: str, phase: str) -> None:
        ratio = self._ratio[block] if phase != STEP else self._whole
        work = self._factors.get((block, phase), self._whole)
        self._now = (work, ratio, f"{phase}|{block}")
        self._clock.scale(*self._now)

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        """Let the engine's copies and updates take as long as those of the large model.

        What they are for is known only inside the engine.
        """
        from zerotune.backend.host import residency
        from zerotune.backend.host.passes import UnitPass
        from zerotune.backend.host.steps import StreamedSteps
        from zerotune.backend.host.updates import OptimizerOnDevice
        from zerotune.backend.step.adams import SlabStep

        told: Sequence[tuple[Any, str, Callable[..., Any]]] = (
            (residency, "_upload", self._come),
            (StreamedSteps, "_land", self._leave),
            (StreamedSteps, "_take_squares", self._read),
            (UnitPass, "take", self._take),
            (SlabStep, "run", self._update),
            (OptimizerOnDevice, "_run", self._update_there),
            (OptimizerOnDevice, "_draw", self._draw_there),
        )
        with contextlib.ExitStack() as stack:
            for owner, name, before in told:
                both = _preceded(getattr(owner, name), before)
                stack.enter_context(mock.patch.object(owner, name, both))
            yield

    def _come(self, unit: Any) -> None:
        # Without the padding between the weights of the narrow one.
        self._clock.scale(copies=self._large(unit) / unit.host.numel(), label=unit.name)

    def _ratio_of_unit(self, unit: Any) -> float:
        return self.ratio_of([member.name for member in unit.members])

    def _leave(self, _steps: Any, unit: Any, *_: Any) -> None:
        self._clock.scale(copies=self._ratio_of_unit(unit), label=unit.name)

    def _large(self, unit: Any) -> int:
        """Return the number of the unit's weights in the large model."""
        return sum(self._numel[member.name] for member in unit.members)

    def _read(self, _steps: Any, unit: Any, came: Any, *_: Any) -> None:
        nbytes = self._ratio_of_unit(unit) * sum(one.nbytes for one in came.values())
        self._work(nbytes / self.rates.host_step)

    def _take(self, taken: Any) -> None:
        padded = sum(slab.numel for slab in taken.unit.slabs)
        self._updated, self._label = self._large(taken.unit) / padded, taken.unit.name

    def _update(self, _step: Any, pieces: Sequence[Any]) -> None:
        nbytes = sum(
            (one.stop - one.start) * (self._per_element + 8 * len(one.emas)) for one in pieces
        )
        seconds = self._updated * nbytes / self.rates.host_step
        self._clock.scale(label=self._label)
        self._work(seconds)

    def _update_there(self, _update: Any, unit: Any, *_: Any) -> None:
        ratio = self._ratio_of_unit(unit)
        self._there = (ratio, ratio, unit.name)
        self._clock.scale(*self._there)

    @contextlib.contextmanager
    def _draw_there(self, *_: Any) -> Iterator[None]:
        """As many random numbers are drawn as for the large model."""
        self._clock.scale(label=self._there[-1])
        yield
        self._clock.scale(*self._there)

    def _work(self, seconds: float) -> None:
        """Let the calling thread work in host memory, which copies over the bus use too."""
        slices = 8
        for _ in range(slices):
            self._hosts.advance(self._slowed(seconds / slices), HOST)

    def _slowed(self, seconds: float) -> float:
        """Return how long some work takes from now on, beside the copies that are known by now."""
        clock, rates = self._clock, self.rates
        for span in clock.spans(self._seen):
            self._seen += 1
            if span.lane in _SHARES:
                rate = getattr(rates, _SHARES[span.lane])
                share = min(1.0, rate / rates.host_memory)
                self._copies.append((span.start, span.end, share))
        now: float = clock.now()
        at = now
        self._copies = [one for one in self._copies if one[1] > now - _FORGETS]
        edges = sorted({t for start, end, _ in self._copies for t in (start, end) if t > now})
        for edge in edges:
            taken = sum(share for start, end, share in self._copies if start <= at < end)
            speed = max(_LEAST_SPEED, 1 - taken)
            if seconds <= (edge - at) * speed:
                return at + seconds / speed - now
            seconds -= (edge - at) * speed
            at = edge
        return at + seconds - now


def _preceded(call: Callable[..., Any], before: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function begin, or run inside, something else with the same arguments."""

    def both(*args: Any, **named: Any) -> Any:
        with before(*args, **named) or contextlib.nullcontext():
            return call(*args, **named)

    return both


def joined(spans: Sequence[tuple[str, str, float, float]]) -> list[tuple[str, str, float, float]]:
    """Join spans of the same lane and block that follow each other."""
    found: list[tuple[str, str, float, float]] = []
    last: dict[str, int] = {}
    for lane, label, start, end in sorted(spans, key=lambda each: each[2]):
        at = last.get(lane)
        if at is not None and found[at][1] == label and start - found[at][3] < _TOUCHES:
            found[at] = (lane, label, found[at][2], max(end, found[at][3]))
            continue
        last[lane] = len(found)
        found.append((lane, label, start, end))
    return found


def loss_of(output: Any) -> torch.Tensor:
    sample = getattr(output, "sample", output)
    sample = sample[0] if isinstance(sample, tuple) else sample
    loss: torch.Tensor = sample.float().square().mean()
    return loss
