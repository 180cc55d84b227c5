"""Adam in host memory: one pass against DeepSpeed's chain, alone and in training."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks.ema import Stack
from benchmarks.framework import Benchmark, Case, Context, Goal, Measured, Worker, alternate, timed
from benchmarks.loops import alone

CHAIN, PASS, COPY = "DeepSpeed's chain", "one pass", "memory copy"
BY_HAND, THEIRS, OURS = "DeepSpeed by hand", "zerotune, host_step=False", "zerotune"
BEHIND = "zerotune, hidden=True"
BEFORE = "zerotune, hidden=False"
AVERAGES: Mapping[str, int] = {"": 0, ", one EMA": 1, ", two EMAs": 2}
PLANS: Mapping[str, Mapping[str, Any]] = {
    "ZeRO-2 with EMA": {"stage": 2, "offload": "cpu", "precision": "bf16"},
    "ZeRO-3 with EMA": {
        "stage": 3,
        "offload": "cpu",
        "precision": "bf16",
        "stage3_param_persistence_threshold": 0,
    },
}
DECAY = 0.999
SIMULATED = "ZeRO-2 with EMA, simulated device"
IN_TURN, BESIDE, DISK = "one sub-group after the other", "reading ahead, writing behind", "the disk"


def cases(quick: bool) -> Sequence[Case]:
    alone_in_memory = {"parameters": 2**20 if quick else 6 * 2**24, "rounds": 2 if quick else 15}
    size = (
        {"layers": 2, "width": 256, "rounds": 2, "steps": 1}
        if quick
        else {"layers": 24, "width": 1410, "rounds": 15, "steps": 2}
    )
    names = list(PLANS)[:1] if quick else list(PLANS)
    return (
        Case(name="step alone", settings=alone_in_memory, measure=step_alone),
        *(
            Case(name=name, settings={"plan": dict(PLANS[name]), **size}, measure=training)
            for name in names
        ),
        Case(
            name=SIMULATED,
            settings={
                "plan": dict(PLANS["ZeRO-2 with EMA"]),
                "layers": 2 if quick else 24,
                "width": 256 if quick else 2000,
                "forward_seconds": 0.01 if quick else 0.3,
                "rounds": 2 if quick else 10,
                "steps": 1,
            },
            measure=hidden,
        ),
        *(() if quick else (_swapped(),)),
    )


def _swapped() -> Case:
    plan = {**PLANS["ZeRO-3 with EMA"], "offload": "nvme", "sub_group_size": 4_000_000}
    size = {"layers": 12, "width": 1410, "rounds": 10, "steps": 1}
    return Case(name="ZeRO-3, NVMe", settings={"plan": plan, **size}, measure=swapping)


def step_alone(settings: Mapping[str, Any], context: Context) -> Measured:
    """Clip, AdamW, cast and averages of one slab whose gradient is there."""
    with Worker(Slab, dict(settings)) as worker:
        context.log("  alone")
        samples: dict[str, dict[str, list[float]]] = worker.call("measure")
        facts = worker.call("facts")
    return Measured(samples=samples, baseline=CHAIN + ", one EMA", facts=facts)


class Slab:
    """96 million weights with a bf16 gradient, twice: for the chain and for the pass."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        from zerotune.backend.deepspeed.start import require_deepspeed
        from zerotune.backend.step.adams import HostAdam
        from zerotune.backend.step.kernel import Average, load_host_step

        require_deepspeed(accelerator="cpu")
        self._settings = settings
        self._count = count = settings["parameters"]
        self._chain, self._pass = (_cpu_adam(count) for _ in range(2))
        self._host = HostAdam(op=load_host_step(), adam=self._pass)
        self._average = Average
        self._gradient = torch.randn(count).bfloat16()
        self._out = torch.empty(count, dtype=torch.bfloat16)
        self._shadows = [torch.randn(count) for _ in range(2)]
        # The chain begins where DeepSpeed has copied the gradient into its fp32 buffer.
        _only(self._chain).grad = self._gradient.float()
        self._factor = torch.tensor(0.999)

    def measure(self) -> dict[str, dict[str, list[float]]]:
        """Seconds of both, by the number of averages, and of a copy of as many fp32 numbers."""
        target = torch.empty(self._count)
        running: dict[str, Callable[[], object]] = {COPY: lambda: target.copy_(self._shadows[0])}
        for name, count in AVERAGES.items():
            running[CHAIN + name] = functools.partial(self._step_in_turns, count)
            running[PASS + name] = functools.partial(self._step_at_once, count)
        samples = alternate(
            {name: timed(act) for name, act in running.items()}, rounds=self._settings["rounds"]
        )
        moved = {COPY: 8} | {PASS + name: 28 + 8 * count for name, count in AVERAGES.items()}
        return {
            name: {
                **found,
                **(
                    {"bytes_per_second": [moved[name] * self._count / s for s in found["seconds"]]}
                    if name in moved
                    else {}
                ),
            }
            for name, found in samples.items()
        }

    def facts(self) -> dict[str, Any]:
        """What was measured."""
        return {
            "parameters": self._count,
            "threads": torch.get_num_threads(),
            "bytes moved per parameter by the pass": 28,
            "more per EMA": 8,
        }

    @torch.no_grad()
    def _step_in_turns(self, averages: int) -> None:
        weight = _only(self._chain)
        assert weight.grad is not None
        weight.grad.mul_(self._factor)
        self._chain.step()
        self._out.copy_(weight)
        for shadow in self._shadows[:averages]:
            shadow.lerp_(weight, 1 - DECAY)

    def _step_at_once(self, averages: int) -> None:
        step = self._host.begin(
            _only(self._pass),
            gradient=self._gradient,
            group=self._pass.param_groups[0],
            factor=float(self._factor),
            out=self._out,
        )
        shadows = self._shadows[:averages]
        step.run(0, self._count, [self._average(shadow=s, weight=1 - DECAY) for s in shadows])


def _timed(act: Callable[[], Any]) -> tuple[Any, float]:
    began = time.perf_counter()
    found = act()
    return found, time.perf_counter() - began


def _cpu_adam(count: int) -> Any:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    from zerotune.backend.ops.build import same_ninja

    with same_ninja():
        return DeepSpeedCPUAdam([torch.nn.Parameter(torch.randn(count))], weight_decay=0.01)


def _only(adam: Any) -> torch.nn.Parameter:
    parameter: torch.nn.Parameter = adam.param_groups[0]["params"][0]
    return parameter


def training(settings: Mapping[str, Any], context: Context) -> Measured:
    """Whole training steps with an average: a model of many weights and little arithmetic."""
    contestants: Mapping[str, tuple[Any, Mapping[str, Any]]] = {
        BY_HAND: (RawLoop, {}),
        THEIRS: (EngineLoop, {"host_step": False}),
        OURS: (EngineLoop, {}),
        BEHIND: (EngineLoop, {"hidden": True}),
    }
    samples, facts = _interleaved(contestants, settings, context)
    return Measured(samples=samples, baseline=BY_HAND, facts=facts)


def hidden(settings: Mapping[str, Any], context: Context) -> Measured:
    """How much of the step runs behind the next forward, where that is a device's."""
    contestants: Mapping[str, tuple[Any, Mapping[str, Any]]] = {
        BEFORE: (SleepingLoop, {"hidden": False}),
        BEHIND: (SleepingLoop, {"hidden": True}),
    }
    samples, facts = _interleaved(contestants, settings, context)
    # Not of the whole step: what backward takes varies more than there is to be seen.
    seen = {
        name: [
            forward + step + ema - device
            for forward, step, ema, device in zip(
                *(found[f"{part}_seconds"] for part in ("forward", "step", "ema", "device")),
                strict=True,
            )
        ]
        for name, found in samples.items()
    }
    samples[BEHIND]["visible_share"] = [
        rest / whole for rest, whole in zip(seen[BEHIND], seen[BEFORE], strict=True)
    ]
    return Measured(samples=samples, baseline=BEFORE, facts=facts)


def swapping(settings: Mapping[str, Any], context: Context) -> Measured:
    """Steps of states on NVMe, beside what the disk does with nothing else to do."""
    contestants: dict[str, tuple[Any, Mapping[str, Any]]] = {DISK: (Disk, {})}
    for name, beside in ((IN_TURN, False), (BESIDE, True)):
        place = {"pipeline_read": beside, "pipeline_write": beside}
        folder = context.scratch / str(beside)
        plan = {**settings["plan"], "nvme_path": str(folder)}
        contestants[name] = SwappingLoop, {"plan": plan, "swapped": place}
    scratch = {**settings, "scratch": str(context.scratch)}
    samples, facts = _interleaved(contestants, scratch, context)
    return Measured(samples=samples, baseline=DISK, facts=facts)


def _interleaved(
    contestants: Mapping[str, tuple[Any, Mapping[str, Any]]],
    settings: Mapping[str, Any],
    context: Context,
) -> tuple[dict[str, dict[str, list[float]]], dict[str, Any]]:
    """What the steps of each take, and what was measured."""
    with ExitStack() as stack:
        workers = {
            name: stack.enter_context(Worker(loop, {**settings, **own}))
            for name, (loop, own) in contestants.items()
        }
        context.log(f"  {', '.join(workers)}")
        samples = alternate(
            {
                name: functools.partial(worker.call, "steps", settings["steps"])
                for name, worker in workers.items()
            },
            rounds=settings["rounds"],
            # An average joins the step after three updates that are looked at.
            warm_up=max(3, 6 // settings["steps"]),
        )
        facts = workers[list(workers)[-1]].call("facts")
        losses = [found for worker in workers.values() if (found := worker.call("losses"))]
    same = all(found == losses[0] for found in losses)
    return samples, {**facts, "losses are equal bit for bit": same}


class _Loop:
    """Steps of ``Stack``; whoever inherits it has an engine and an average."""

    engine: Any

    def __init__(self, settings: Mapping[str, Any]) -> None:
        torch.manual_seed(0)
        self._settings = settings
        self._model = self._made()
        self._count = sum(p.numel() for p in self._model.parameters())
        self._x_bc = torch.randn(2, settings["width"]).bfloat16()
        self._losses: list[float] = []

    def steps(self, count: int) -> dict[str, float]:
        """Seconds of a step, and of its parts."""
        parts = ("forward", "backward", "step", "ema")
        found = {"seconds": 0.0, "device_seconds": 0.0} | {f"{part}_seconds": 0.0 for part in parts}
        for _ in range(count):
            loss, forward = _timed(self._loss)
            _, backward = _timed(functools.partial(self.engine.backward, loss))
            found["device_seconds"] += self.device_seconds() / count
            _, step = _timed(self.engine.step)
            _, ema = _timed(self.average)
            self._losses.append(float(loss.detach()))
            for part, seconds in zip(parts, (forward, backward, step, ema), strict=True):
                found[f"{part}_seconds"] += seconds / count
                found["seconds"] += seconds / count
        return found

    def _loss(self) -> torch.Tensor:
        loss: torch.Tensor = self.engine(self._x_bc).float().square().mean()
        return loss

    def device_seconds(self) -> float:
        """What a forward takes with no step under way, where that is measured."""
        return 0.0

    def _made(self) -> torch.nn.Module:
        return Stack(self._settings["layers"], self._settings["width"])

    def average(self) -> None:
        """Update the average."""
        raise NotImplementedError

    def losses(self) -> list[float]:
        """All so far."""
        return self._losses

    def facts(self) -> dict[str, Any]:
        """What was measured."""
        return {"parameters": self._count, "threads": torch.get_num_threads()}

    def _resolved(self) -> Any:
        from zerotune.optim.resolver import OptimizerResolver
        from zerotune.plan import DeepSpeedPlan
        from zerotune.plan.model import ModelFacts

        plan = DeepSpeedPlan.build(
            **self._settings["plan"],
            micro_batch_size=2,
            gradient_clipping=1.0,
            optimizer={"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
        )
        if swapped := self._settings.get("swapped"):
            config = plan.to_dict()
            config["zero_optimization"]["offload_optimizer"] |= swapped
            plan = DeepSpeedPlan.from_dict(config)
        resolved = plan.resolve(
            model=ModelFacts.from_module(self._model),
            host_step=self._settings.get("host_step", True),
            hidden=self._settings.get("hidden"),
        )
        return OptimizerResolver().apply(resolved)


class EngineLoop(_Loop):
    """zerotune's engine and shadow."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        from zerotune.backend.build import build_engine
        from zerotune.ema import EMAShadow

        super().__init__(settings)
        self.engine = build_engine(model=self._model, plan=self._resolved())
        self._ema = EMAShadow(decay=DECAY).attach(self.engine)

    def average(self) -> None:
        """``EMAShadow.step``."""
        self._ema.step()


class SwappingLoop(EngineLoop):
    """zerotune's engine with its states on NVMe, and no shadow, which would read them again."""

    def average(self) -> None:
        """None."""

    def steps(self, count: int) -> dict[str, float]:
        """As ``_Loop.steps``, and what goes to the disk and comes from it meanwhile."""
        before = _disk_bytes()
        found = super().steps(count)
        moved = (_disk_bytes() - before) / count
        return {**found, "bytes": moved, "bytes_per_second": moved / found["seconds"]}


class Disk:
    """One file written and read as the states are."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        from zerotune.backend.ops.aio import AioMeter, AioSettings
        from zerotune.platform import detect_platform

        size = 4 * settings["plan"]["sub_group_size"]
        path = Path(settings["scratch"]) / "disk"
        self._meter = AioMeter(path=path, size=size, platform=detect_platform())
        self._how = AioSettings(block_size=2**20, queue_depth=8, intra_op_parallelism=1)

    def steps(self, count: int) -> dict[str, float]:
        """Bytes per second of as many written as read, one after the other."""
        found = self._meter.measure(self._how, repeats=count)
        return {"bytes_per_second": 2 / (1 / found.read + 1 / found.write)}

    def losses(self) -> list[float]:
        """It learns nothing."""
        return []

    def facts(self) -> dict[str, Any]:
        """How it was asked."""
        return {"disk": repr(self._how)}


def _disk_bytes() -> int:
    """What this process has moved to and from disks."""
    lines = Path("/proc/self/io").read_text().splitlines()
    counted = dict(line.split(": ") for line in lines)
    return int(counted["read_bytes"]) + int(counted["write_bytes"])


class SleepingLoop(EngineLoop):
    """The same, with a model whose arithmetic somebody else does: this process sleeps meanwhile."""

    def device_seconds(self) -> float:
        """A forward beside which nothing else is done."""
        with self.engine.evaluating():
            return _timed(self._loss)[1]

    def _made(self) -> torch.nn.Module:
        layers, width = self._settings["layers"], self._settings["width"]
        share = self._settings["forward_seconds"] / layers
        return torch.nn.Sequential(*(_Sleeping(width * width, share) for _ in range(layers)))


class _Sleeping(torch.nn.Module):
    """A layer whose forward takes a while and its backward twice that, on no core of ours."""

    def __init__(self, numel: int, seconds: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(numel))
        self.register_buffer("gradient", torch.randn(numel).bfloat16(), persistent=False)
        self._seconds = seconds

    def forward(self, x_bc: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = _Elsewhere.apply(x_bc, self.weight, self.gradient, self._seconds)
        return found


class _Elsewhere(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x_bc: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor, seconds: float
    ) -> torch.Tensor:
        ctx.gradient, ctx.seconds = gradient, seconds
        out = x_bc + weight[:1]
        time.sleep(seconds)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        time.sleep(2 * ctx.seconds)
        return grads[0], ctx.gradient.clone(), None, None


class RawLoop(_Loop):
    """DeepSpeed with the same configuration, and ``lerp_`` on its flat master weights."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        import os

        super().__init__(settings)
        resolved = self._resolved()
        os.environ.update({**alone(), "LOCAL_RANK": "0"})
        from zerotune.backend.deepspeed.start import quiet_deepspeed, require_deepspeed
        from zerotune.backend.ops.build import same_ninja

        deepspeed = require_deepspeed(accelerator="cpu")
        quiet_deepspeed()
        with same_ninja():
            self.engine, *_ = deepspeed.initialize(
                model=self._model,
                model_parameters=list(self._model.parameters()),
                config=resolved.to_deepspeed(),
            )
        wrapper = self.engine.optimizer
        name = (
            "fp32_partitioned_groups_flat"
            if settings["plan"]["stage"] == 3
            else "single_partition_of_fp32_groups"
        )
        self._slabs = getattr(wrapper, name)
        self._shadows = [slab.detach().clone() for slab in self._slabs]

    @torch.no_grad()
    def average(self) -> None:
        """``lerp_``, slab by slab."""
        for shadow, slab in zip(self._shadows, self._slabs, strict=True):
            shadow.lerp_(slab, 1 - DECAY)


BENCHMARK = Benchmark(
    name="step",
    title="Adam's step in host memory in one pass against DeepSpeed's chain",
    cases=cases,
    ours=frozenset({OURS, BEHIND, BESIDE, *(PASS + name for name in AVERAGES)}),
    goals=(
        *(
            Goal(
                text=f"the pass takes at most 0.65 of the chain{name}",
                case="step alone",
                contestant=PASS + name,
                against=CHAIN + name,
                quantity="seconds",
                limit=0.65,
            )
            for name in list(AVERAGES)[1:]
        ),
        Goal(
            text="the pass reaches 90 % of a memory copy, one EMA",
            case="step alone",
            contestant=PASS + ", one EMA",
            against=COPY,
            quantity="bytes_per_second",
            limit=0.9,
        ),
        *(
            Goal(
                text=f"{case}: a whole training step takes at most 0.85 of the loop by hand",
                case=case,
                contestant=OURS,
                against=BY_HAND,
                quantity="seconds",
                limit=0.85,
            )
            for case in PLANS
        ),
        Goal(
            text="at least 90 % of step and average is hidden behind a device's time",
            case=SIMULATED,
            contestant=BEHIND,
            quantity="visible_share",
            limit=0.1,
        ),
    ),
)
