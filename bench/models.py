"""Steps of small copies of real models: zerotune, DeepSpeed, torch and FSDP2, all with an EMA.

Each contestant trains in a process of its own with one thread, and the processes take turns. CPU
time is compared, which other load on the machine hardly changes; with two ranks, the sum of both.
"The passes alone" are forward and backward of the bf16 model: no implementation can take less.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.contestants import build, sample_batch
from bench.runner import Benchmark, Case, Goal, Measured, alternate
from bench.workers import Worker, launched, resolved, together

OURS, SAME = "zerotune", "DeepSpeed, same configuration"
DEFAULTS, TORCH = "DeepSpeed, its defaults", "torch, fused AdamW"
FSDP, PASSES = "FSDP2 with CPU offload", "the passes alone"
DECAY, RATE = 0.999, 1e-4
SIDE, BATCH, TOKENS = 128, 2, 20
"""Pixels of a side, samples, and tokens of a text: few, so that the optimizer's share is large."""

UNET = {
    "_class_name": "UNet2DConditionModel", "sample_size": 16, "in_channels": 4,
    "out_channels": 4, "layers_per_block": 1, "block_out_channels": (96, 192, 384),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 1, 2), "attention_head_dim": 8,
    "use_linear_projection": True, "cross_attention_dim": 128,
}  # fmt: skip
SD3 = {
    "_class_name": "SD3Transformer2DModel", "sample_size": 16, "patch_size": 2, "in_channels": 4,
    "out_channels": 4, "num_layers": 6, "attention_head_dim": 32, "num_attention_heads": 12,
    "joint_attention_dim": 256, "caption_projection_dim": 384, "pooled_projection_dim": 256,
    "pos_embed_max_size": 32,
}  # fmt: skip
FLUX = {
    "_class_name": "FluxTransformer2DModel", "patch_size": 1, "in_channels": 16, "num_layers": 3,
    "num_single_layers": 6, "attention_head_dim": 32, "num_attention_heads": 10,
    "joint_attention_dim": 256, "pooled_projection_dim": 128, "axes_dims_rope": (8, 12, 12),
}  # fmt: skip
MODELS: Mapping[str, tuple[Mapping[str, Any], int]] = {
    "U-Net like SDXL's": (UNET, 0),
    "transformer like SD3's": (SD3, 0),
    "transformer like Flux's": (FLUX, 0),
    "adapters on a transformer like SD3's": (SD3, 16),
}
"""Configuration, and rank of the adapters (0: all weights are trained)."""
ON_TWO = ("transformer like SD3's", "adapters on a transformer like SD3's")
"""Models that two ranks train as well."""


def cases(quick: bool) -> Sequence[Case]:
    rounds = {"rounds": 2, "steps": 1} if quick else {"rounds": 7, "steps": 3}
    found = []

    def add(name: str, config: Mapping[str, Any], rank: int, clipping: float, ranks: int) -> None:
        settings = {"config": dict(config), "rank": rank, "clipping": clipping, "ranks": ranks}
        found.append(Case(name, training, {**settings, **rounds}))

    for name, (config, rank) in list(MODELS.items())[: 1 if quick else None]:
        for clipping in (1.0,) if quick or rank else (1.0, 0.0):
            ending = "" if clipping else ", not clipped"
            add(name + ending, config, rank, clipping, 1)
    for name in () if quick else ON_TWO:
        add(f"{name}, two ranks", *MODELS[name], 1.0, 2)
    return tuple(found)


def training(settings: Mapping[str, Any], _scratch: Path) -> Measured:
    """Measure CPU time and time per step, and the CPU time besides the passes."""
    ranks = settings["ranks"]
    names = [name for name in CONTESTANTS if ranks == 1 or name not in _OTHERS]
    made = {f"{name} {rank}": (Rank, settings) for name in names for rank in range(ranks)}
    with together(made) as workers:
        teams = {name: [workers[f"{name} {rank}"] for rank in range(ranks)] for name in names}
        for name, team in teams.items():
            variables = launched(ranks)
            for worker, own in zip(team, variables, strict=True):
                worker.call("set", name, own)
            Worker.call_all(team, "begin")
        samples = alternate(
            {
                name: functools.partial(_steps, team, settings["steps"])
                for name, team in teams.items()
            },
            rounds=settings["rounds"],
            # The EMA is moved in the optimizer's pass after three updates have been checked.
            warm_up=max(2, 6 // settings["steps"]),
        )
        facts = {"trained weights": teams[OURS][0].call("trained")}
    passes = samples[PASSES]["cpu_seconds"]
    for name, found in samples.items():
        if name != PASSES:
            pairs = zip(found["cpu_seconds"], passes, strict=True)
            found["besides_passes_cpu_seconds"] = [whole - alone for whole, alone in pairs]
    return Measured(samples=samples, baseline=SAME, facts=facts)


def _steps(team: Sequence[Worker], count: int) -> dict[str, float]:
    """Seconds per step, and the sum of all ranks' CPU seconds."""
    measured = Worker.call_all(team, "steps", count)
    return {
        "cpu_seconds": sum(each["cpu_seconds"] for each in measured),
        "seconds": max(each["seconds"] for each in measured),
    }


class Rank:
    """One rank of a contestant, which begins when all ranks have started."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings

    def set(self, name: str, variables: Mapping[str, str]) -> None:
        self._name = name
        os.environ.update(variables)

    def begin(self) -> None:
        self._loop = CONTESTANTS[self._name](self._settings)

    def steps(self, count: int) -> dict[str, float]:
        return self._loop.steps(count)

    def trained(self) -> int:
        return self._loop.trained()


class _Loop:
    """A model, its batch, and a step that subclasses define."""

    precision = torch.bfloat16

    def __init__(self, settings: Mapping[str, Any]) -> None:
        torch.set_num_threads(1)
        self._settings = settings
        self._model = build(settings["config"]).train()
        if settings["rank"]:
            from zerotune.diffusion.lora import LoRA, add_lora

            add_lora(self._model, LoRA(rank=settings["rank"], init="gaussian"))
        batch = sample_batch(settings["config"], {"side": SIDE, "batch": BATCH}, "cpu")
        self._inputs = {name: _shortened(name, one) for name, one in batch["inputs"].items()}
        self._target = batch["target"].float()

    def steps(self, count: int) -> dict[str, float]:
        """Return seconds and this process's CPU seconds per step."""
        began, cpu = time.perf_counter(), time.process_time()
        for _ in range(count):
            self.step()
        return {
            "cpu_seconds": (time.process_time() - cpu) / count,
            "seconds": (time.perf_counter() - began) / count,
        }

    def trained(self) -> int:
        return sum(weight.numel() for weight in self._weights())

    def step(self) -> None:
        raise NotImplementedError

    def _weights(self) -> list[torch.nn.Parameter]:
        return [one for one in self._model.parameters() if one.requires_grad]

    def _loss(self, model: Callable[..., Any]) -> torch.Tensor:
        loss: torch.Tensor = (model(**self._inputs).sample.float() - self._target).square().mean()
        return loss

    def _plan(self) -> Any:
        plan = {"stage": 2, "offload": "cpu", "precision": "bf16"}
        clipped = {**plan, "gradient_clipping": self._settings["clipping"]}
        return resolved(self._model, clipped, batch=BATCH, world_size=self._settings["ranks"])


def _shortened(name: str, tensor: Any) -> Any:
    if name == "encoder_hidden_states":
        return tensor[:, :TOKENS]
    return tensor[:TOKENS] if name == "txt_ids" else tensor


class Passes(_Loop):
    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        self._model.to(torch.bfloat16)

    def step(self) -> None:
        torch.autograd.backward(self._loss(self._model))
        for weight in self._weights():
            weight.grad = None


class Ours(_Loop):
    def __init__(self, settings: Mapping[str, Any]) -> None:
        from zerotune.ema import EMAShadow
        from zerotune.training.setup import build_engine

        super().__init__(settings)
        self._engine = build_engine(model=self._model, plan=self._plan())
        self._ema = EMAShadow(decay=DECAY).attach(self._engine)

    def step(self) -> None:
        self._engine.backward(self._loss(self._engine))
        self._engine.step()
        self._ema.step()


class Same(_Loop):
    """DeepSpeed's own engine, and an EMA of its flat master weights."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        from zerotune.backend.op_builds import same_ninja
        from zerotune.backend.upstream import quiet_deepspeed, require_deepspeed

        super().__init__(settings)
        deepspeed = require_deepspeed(accelerator="cpu")
        quiet_deepspeed()
        with same_ninja():
            self._engine, *_ = deepspeed.initialize(
                model=self._model, model_parameters=self._weights(), config=self._config()
            )
        self._masters = self._engine.optimizer.single_partition_of_fp32_groups
        self._averages = [one.detach().clone() for one in self._masters]

    def step(self) -> None:
        self._engine.backward(self._loss(self._engine))
        self._engine.step()
        with torch.no_grad():
            torch._foreach_lerp_(self._averages, list(self._masters), 1 - DECAY)

    def _config(self) -> dict[str, Any]:
        config: dict[str, Any] = self._plan().to_deepspeed()
        return config


class Defaults(Same):
    def _config(self) -> dict[str, Any]:
        adam = {"lr": RATE, "weight_decay": 0.01}
        return {
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_clipping": self._settings["clipping"],
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            "optimizer": {"type": "AdamW", "params": adam},
        }


class Torch(_Loop):
    """fp32 weights, autocast, and the fused optimizer."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        self._adam = torch.optim.AdamW(self._weights(), lr=RATE, weight_decay=0.01, fused=True)
        self._averages = [one.detach().clone() for one in self._weights()]

    def step(self) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = self._loss(self._model)
        torch.autograd.backward(loss)
        self._update()

    def _update(self) -> None:
        if self._settings["clipping"]:
            torch.nn.utils.clip_grad_norm_(self._weights(), self._settings["clipping"])
        self._adam.step()
        self._adam.zero_grad()
        with torch.no_grad():
            torch._foreach_lerp_(self._averages, [*self._weights()], 1 - DECAY)


class Sharded(Torch):
    """FSDP2 on one rank, each repeated block apart, with weights and optimizer in host memory."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        from torch.distributed import fsdp
        from torch.distributed.device_mesh import init_device_mesh

        _Loop.__init__(self, settings)
        torch.distributed.init_process_group("gloo", rank=0, world_size=1)
        how: dict[str, Any] = {
            "mesh": init_device_mesh("cpu", (1,)),
            "mp_policy": fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16),
            "offload_policy": fsdp.CPUOffloadPolicy(pin_memory=False),
        }
        for module in list(self._model.children()):
            if isinstance(module, torch.nn.ModuleList):
                for block in module:
                    fsdp.fully_shard(block, **how)
        fsdp.fully_shard(self._model, **how)
        self._adam = torch.optim.AdamW(self._weights(), lr=RATE, weight_decay=0.01, fused=True)
        self._averages = [one.detach().clone() for one in self._weights()]

    def step(self) -> None:
        torch.autograd.backward(self._loss(self._model))
        self._update()


CONTESTANTS: Mapping[str, type[_Loop]] = {
    OURS: Ours, SAME: Same, DEFAULTS: Defaults, TORCH: Torch, FSDP: Sharded, PASSES: Passes,
}  # fmt: skip

_WHOLE = {"U-Net like SDXL's": 0.94, "transformer like SD3's": 0.75}
"""Highest share of DeepSpeed's CPU time; the passes alone are 0.88 and 0.61 of it."""
_BESIDES = "besides the passes, a step takes at most 0.4 times the CPU time of DeepSpeed"
_OTHERS = {TORCH: 0.95, FSDP: 0.8}


def _no_slower(case: str) -> Goal:
    text = f"a step takes at most 1.0 times the CPU time of {SAME}"
    return Goal(text, case=case, contestant=OURS, quantity="cpu_seconds", limit=1.0, against=SAME)


def _goals() -> Sequence[Goal]:
    found = []
    for case in cases(quick=False):
        if case.settings["ranks"] > 1:
            found.append(_no_slower(case.name))
            continue
        goal = functools.partial(Goal, case=case.name, contestant=OURS)
        besides = "besides_passes_cpu_seconds"
        found.append(goal(_BESIDES, quantity=besides, limit=0.4, against=SAME))
        limit = _WHOLE.get(case.name, 1.0)
        for other in (SAME, DEFAULTS):
            text = f"a step takes at most {limit} times the CPU time of {other}"
            found.append(goal(text, quantity="cpu_seconds", limit=limit, against=other))
        for other, limit in _OTHERS.items():
            text = f"a step takes at most {limit} times the CPU time of {other}"
            found.append(goal(text, quantity="cpu_seconds", limit=limit, against=other))
    return found


BENCHMARK = Benchmark(
    name="models",
    title="training steps of small copies of real models with an EMA, in CPU time",
    cases=cases,
    ours=(OURS,),
    goals=_goals(),
)
