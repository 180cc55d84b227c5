"""What runs in a contestant's process: a large model, its engine, its steps."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.framework import anon_bytes
from benchmarks.loops import alone

SEED: Final = 0
RATES: Final = "rates.json"
"""Where a session keeps what it measured of its machine, in its folder."""


class Contestant:
    """What all have in common.

    Args:
        settings: ``config``, ``family``, ``batch``, ``side``, ``steps``, ``plan``, ``cap_gib``.
    """

    _averages = False

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._clock: dict[str, list[float]] = {}

    def load(self) -> None:
        """Import everything, limit the device's memory, and build the model in host memory."""
        import accelerate
        import diffusers

        import zerotune.training

        _ = accelerate.Accelerator, diffusers.UNet2DConditionModel, zerotune.training.Trainer
        limit_memory(self._settings.get("cap_gib"))
        self._model = build(self._settings["config"])
        self._model.train()
        self._parameters = sum(p.numel() for p in self._model.parameters())
        gc.collect()

    def start(self) -> dict[str, Any]:
        """Make the engine."""
        about = self._begin()
        self._batch = sample_batch(self._settings, self._device)
        peak = device_peak()
        return {"parameters": self._parameters, **about, "set_up_peak": peak}

    def run(self, steps: int) -> dict[str, list[float]]:
        """Warm up, take steps as they come, then steps split into phases.

        Looking at the clock between phases keeps one from overlapping the next, so the split
        steps are not those that count.
        """
        self._step(split=False)
        whole = []
        for _ in range(steps):
            synchronize()
            begun = time.perf_counter()
            self._step(split=False)
            synchronize()
            whole.append(time.perf_counter() - begun)
        for _ in range(min(2, steps)):
            self._step(split=True)
        return {"seconds": whole, **{f"{name}_seconds": self._clock[name] for name in self._clock}}

    def memory(self) -> dict[str, Any]:
        """Peaks since the process began; the whole device's use, the context included."""
        return device_memory()

    def _step(self, *, split: bool) -> None:
        loss = self._timed("forward", split, self._forward)
        self._timed("backward", split, lambda: self._backward(loss))
        self._timed("optimizer", split, self._optimize)
        if self._averages:
            self._timed("ema", split, self._average)

    def _timed(self, name: str, split: bool, act: Callable[[], Any]) -> Any:
        if not split:
            return act()
        synchronize()
        begun = time.perf_counter()
        result = act()
        synchronize()
        self._clock.setdefault(name, []).append(time.perf_counter() - begun)
        return result

    @property
    def _device(self) -> Any:
        return self._engine.device

    def _begin(self) -> dict[str, Any]:
        raise NotImplementedError

    def _forward(self) -> Any:
        output = self._engine(**self._batch["inputs"], return_dict=False)[0]
        return torch.nn.functional.mse_loss(output.float(), self._batch["target"])

    def _backward(self, loss: Any) -> None:
        self._engine.backward(loss)

    def _optimize(self) -> None:
        self._engine.step()

    def _average(self) -> None:
        raise NotImplementedError


class Reference(Contestant):
    """The reference's stage-2 JSON through accelerate; buckets and all else as they come."""

    def _begin(self) -> dict[str, Any]:
        os.environ.update(alone())
        from accelerate import Accelerator, DeepSpeedPlugin
        from accelerate.utils import DummyOptim

        self._model.enable_gradient_checkpointing()
        plugin = DeepSpeedPlugin(hf_ds_config=reference_config(self._settings["batch"]))
        accelerator = Accelerator(deepspeed_plugin=plugin)
        self._accelerator = accelerator
        optimizer = DummyOptim(self._model.parameters(), lr=1e-4)
        self._engine, self._optimizer = accelerator.prepare(self._model, optimizer)
        return {"what": "stage 2, optimizer in host memory, DeepSpeed's default buckets, no EMA"}

    def _step(self, *, split: bool) -> None:
        # accelerate's `backward` takes the engine's step too; the split needs the two apart.
        if split:
            super()._step(split=True)
        else:
            self._accelerator.backward(self._forward())
            self._optimizer.step()
            self._optimizer.zero_grad()

    def close(self) -> None:
        """End the engine."""
        self._engine.destroy()


class Ours(Contestant):
    """zerotune's plan, activations and EMA in host memory."""

    _averages = True

    def _begin(self) -> dict[str, Any]:
        from zerotune import DeepSpeedPlan

        plan = DeepSpeedPlan.build(
            precision="bf16", micro_batch_size=self._settings["batch"],
            optimizer={"type": "AdamW", "params": {"lr": 1e-4}}, **self._settings["plan"],
        )  # fmt: skip
        return self._prepare(plan, recomputed=True, offloaded=True)

    def _prepare(self, plan: Any, *, recomputed: bool, offloaded: bool) -> dict[str, Any]:
        from zerotune import EMAShadow, prepare
        from zerotune.diffusion import ActivationOffload

        self._engine = prepare(model=self._model, plan=plan)
        self._offload = ActivationOffload()
        if offloaded:
            self._offload.attach(self._model)
        elif recomputed:
            self._model.enable_gradient_checkpointing()
        self._ema = EMAShadow(decay=0.9999)
        self._ema.attach(self._engine)
        return {
            "what": f"{what(self._engine.plan)}, EMA in host memory"
            + (", activations in host memory" if offloaded else ""),
            "estimate": self._estimate(recomputed=recomputed, offloaded=offloaded),
            "plan": self._engine.plan.to_deepspeed(),
        }

    def _estimate(self, *, recomputed: bool, offloaded: bool) -> dict[str, float | None]:
        import attrs

        from zerotune.plan.memory.model import Workload

        resolved = self._engine.plan
        resolved = attrs.evolve(resolved, model=self._with_passes(resolved.model))
        side = self._settings["side"]
        estimate = resolved.estimate(
            Workload(
                batch=self._settings["batch"], height=side, width=side,
                gradient_checkpointing=recomputed, activation_offload=offloaded, ema="host",
            ),
        )  # fmt: skip
        time = estimate.step_time(self._rates())
        return {
            "device": estimate.device, "host": estimate.host, "pinned": estimate.pinned,
            "seconds": None if time is None else time.expected,
        }  # fmt: skip

    def _with_passes(self, facts: Any) -> Any:
        """With what is known of the passes of a family."""
        import attrs

        from zerotune.plan.families import family, family_names

        name = self._settings["family"]
        if name not in family_names():
            return facts
        known = family(name)
        return attrs.evolve(facts, activations=known.activations, arithmetic=known.arithmetic)

    def _rates(self) -> Any:
        """Those that the session measured, where there are any; catalogued ones elsewhere."""
        from zerotune import detect_platform
        from zerotune.plan.memory.rates import known_rates

        folder = self._settings.get("folder")
        return known_rates(
            detect_platform(log=False), file=None if folder is None else Path(folder) / RATES
        )

    def _average(self) -> None:
        self._ema.step()

    def close(self) -> None:
        """End the engine."""
        self._offload.detach()
        self._engine.close()


class Advised(Ours):
    """Whatever ``advise`` chooses for a card of ``cap_gib`` and this machine's RAM."""

    def _begin(self) -> dict[str, Any]:
        from zerotune import DeepSpeedPlan, Platform, detect_platform

        here = detect_platform(log=False)
        cap = int(self._settings["cap_gib"] * 2**30)
        advice = DeepSpeedPlan.advise(
            self._facts(),
            batch=self._settings["batch"],
            resolution=self._settings["side"],
            precision="bf16",
            ema="host",
            optimizer={"type": "AdamW", "params": {"lr": 1e-4}},
            platform=Platform.synthetic("cuda", vram=cap, ram=here.host_memory.available),
        )
        about = self._prepare(
            advice.plan,
            recomputed=advice.gradient_checkpointing,
            offloaded=advice.activation_offload,
        )
        return {
            **about,
            "advised": advice.chosen.title,
            "estimate_of_advice": advice.estimate.device,
        }

    def _facts(self) -> Any:
        from zerotune.plan.model import ModelFacts

        return self._with_passes(ModelFacts.from_module(self._model))


def what(plan: Any) -> str:
    """A resolved plan in words."""
    from zerotune.plan.text import describe

    return str(describe(plan))


def reference_config(batch: int) -> dict[str, Any]:
    """The reference's file, for one batch per step."""
    return {
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 2,
            "offload_param": {"device": "cpu", "pin_memory": True},
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
        },
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01},
        },
    }


def build(config: Mapping[str, Any]) -> Any:
    """A diffusers model in fp32 host memory, its weights drawn anew."""
    import diffusers
    from accelerate import init_empty_weights

    kind = getattr(diffusers, config["_class_name"])
    with init_empty_weights(include_buffers=False):
        model = kind.from_config(dict(config))
    where = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(where).manual_seed(SEED)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            value = torch.empty(parameter.shape, device=where)
            if parameter.ndim > 1:
                # Drawn on the GPU: one core would take a minute.
                value.normal_(std=0.02, generator=generator)
            else:
                value.fill_(1.0 if name == "weight" else 0.0)
            setattr(module, name, torch.nn.Parameter(value.cpu()))
    if where == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return model


def sample_batch(settings: Mapping[str, Any], device: Any) -> dict[str, Any]:
    """Synthetic latents and conditions in bf16, and what is to be predicted."""
    from zerotune.diffusion.facts import example_inputs

    batch, side = settings["batch"], settings["side"]
    model = _on_meta(settings["config"])
    generator = torch.Generator().manual_seed(SEED)

    def drawn(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: drawn(one) for key, one in value.items()}
        if not isinstance(value, torch.Tensor):
            return value
        if not value.is_floating_point():
            return torch.ones(value.shape, dtype=value.dtype, device=device)
        return torch.randn(value.shape, generator=generator).to(device, value.dtype)

    inputs = drawn(example_inputs(model)(batch, side, side))
    first = next(iter(inputs.values()))
    return {"inputs": inputs, "target": torch.randn(first.shape, generator=generator).to(device)}


def _on_meta(config: Mapping[str, Any]) -> Any:
    import diffusers

    with torch.device("meta"):
        model = getattr(diffusers, config["_class_name"]).from_config(dict(config))
    return model.to(torch.bfloat16)


def limit_memory(cap_gib: float | None) -> None:
    """Let this process take no more of the GPU than a card of that size has.

    Raises:
        RuntimeError: The card is smaller than that.
    """
    if not torch.cuda.is_available() or cap_gib is None:
        return
    _load_libraries()
    free, total = torch.cuda.mem_get_info()
    # Nothing but the context and the libraries is held yet, on an idle card.
    left = int(cap_gib * 2**30) - (total - free - torch.cuda.memory_reserved())
    if left > free:
        raise RuntimeError(f"this GPU has less than {cap_gib:g} GiB left")
    torch.cuda.set_per_process_memory_fraction(left / total)


def _load_libraries() -> None:
    """What cuBLAS and cuDNN take, they take when they are first used."""
    ones = torch.ones(1, 64, 64, 64, device="cuda", dtype=torch.bfloat16)
    torch.nn.functional.conv2d(ones, ones.new_ones(64, 64, 3, 3)).flatten(2).matmul(
        ones.new_ones(62 * 62, 64)
    )
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def synchronize() -> None:
    """Wait for the GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def device_peak() -> int:
    """Most bytes of tensors so far; 0 without a GPU."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def device_memory() -> dict[str, Any]:
    """Peaks of the GPU's memory, set-up included, and page-locked host memory.

    To be asked at the end: the driver's figure has all libraries in it only then.
    """
    if not torch.cuda.is_available():
        return {}
    from zerotune.training.memory import DeviceFigures, counted_apart, locked_peak

    figures = DeviceFigures.now(torch.device("cuda", torch.cuda.current_device()))
    return {
        "allocated_bytes": float(torch.cuda.max_memory_allocated()),
        "reserved_bytes": float(figures.most_reserved),
        "device_bytes": float(figures.peak),
        "beside_bytes": float(figures.beside),
        "pinned_bytes": float(locked_peak()),
        "pinned_apart": counted_apart(anon_bytes),
    }
