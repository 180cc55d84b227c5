"""Steps of a large model under zerotune's plan, the reference's plan, and an advised plan."""

from __future__ import annotations

import gc
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import attrs
import torch

from bench.gpu import GIB, in_words
from bench.memory import TINY
from bench.workers import AnonPeak, alone, anon_bytes, load_libraries
from tools.families import FLUX, SDXL
from zerotune import DeepSpeedPlan, Platform, detect_platform
from zerotune.plan.facts import ModelFacts
from zerotune.plan.families import family, family_names
from zerotune.plan.memory.items import Workload

SEED: Final = 0
RATES: Final = "rates.json"
"""File in the session's folder with the rates measured on this machine."""
MODELS: Final[dict[str, dict[str, Any]]] = {"sdxl": SDXL, "flux": FLUX, "tiny": TINY}
DOUBLE, SINGLE = 19, 38
"""Numbers of double and single blocks of the published Flux."""
_USED: Final = 0.9
"""Usable share of host memory; Python, torch and the system need the rest."""
_BLOCK: Final = re.compile(r"(single_)?transformer_blocks\.(\d+)\.")


def contestant(settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Measure memory after set-up and at its peak, seconds by phase, and device waits."""
    kinds = (Ours, Reference, Advised, Streamed, TrainStreamed)
    runner = {kind.__name__: kind for kind in kinds}[settings["made"]](settings)
    runner.load()
    with AnonPeak(os.getpid(), interval=0.01) as memory:
        began = time.perf_counter()
        about = runner.start()
        about["start_seconds"] = time.perf_counter() - began
        if torch.cuda.is_available():
            about["set_up_allocated_bytes"] = float(torch.cuda.memory_allocated())
            about["set_up_reserved_bytes"] = float(torch.cuda.memory_reserved())
        about |= runner.run(settings["steps"])
    about |= device_memory()
    # Growth of anonymous memory, plus page-locked memory if that is counted separately.
    pinned = about["pinned_bytes"] if about.pop("pinned_apart", False) else 0.0
    about["host_bytes"] = memory.peak - memory.before + pinned
    yield about
    # These come last: they take time and memory, and the driver may forbid profiling.
    looks: dict[str, Callable[[], Any]] = {"host_waits": lambda: waits(runner)}
    if settings["trace"]:
        looks["trace"] = lambda: traced(runner, settings)
    for key, look in looks.items():
        try:
            about[key] = look()
        except Exception as error:  # noqa: BLE001 - what was measured before stands all the same
            about[f"{key}_failed"] = in_words(error)
        yield about
    runner.close()


def waits(runner: Contestant) -> dict[str, int]:
    """Count device waits of a step as torch reports them, and scalars read (also without a GPU)."""
    from torch.utils._python_dispatch import TorchDispatchMode

    # By storage: scalars copied to the host together cost one wait. Storages are kept alive so that
    # no address is reused.
    asked: dict[int, Any] = {}

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, _types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.ops.aten._local_scalar_dense.default:
                asked[args[0].untyped_storage()._cdata] = args[0]
            return func(*args, **(kwargs or {}))

    cuda = torch.cuda.is_available()
    with warnings.catch_warnings(record=True) as told, Reads():
        warnings.simplefilter("always")
        if cuda:
            torch.cuda.set_sync_debug_mode("warn")
        runner.step()
        if cuda:
            torch.cuda.set_sync_debug_mode("default")
    synchronizing = sum("synchroniz" in str(one.message) for one in told)
    return {"numbers_read": len(asked), **({"synchronizations": synchronizing} if cuda else {})}


def traced(runner: Contestant, settings: Mapping[str, Any]) -> str:
    """Profile one step and return the name of the trace."""
    from torch.profiler import profile

    with profile() as profiler:
        runner.step()
    name = f"{settings['model']}-{settings['made'].lower()}-trace.json.gz"
    profiler.export_chrome_trace(str(Path(settings["folder"], name)))
    return name


class Contestant:
    """Base class of all contestants.

    Args:
        settings: ``model``, ``more`` (overrides of its configuration), ``batch``, ``side``,
            ``plan``, ``cap_gib``.
    """

    _phases: tuple[str, ...] = ("forward", "backward", "optimizer")

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._config = MODELS[settings["model"]] | settings["more"]

    def load(self) -> None:
        """Import everything, limit the device's memory, and build the model in host memory."""
        load_libraries()
        limit_memory(self._settings.get("cap_gib"))
        self._model = build(self._config)
        self._model.train()
        gc.collect()

    def start(self) -> dict[str, Any]:
        """Create the engine."""
        parameters = sum(p.numel() for p in self._model.parameters())
        about = self._begin()
        self._batch = sample_batch(self._config, self._settings, self._engine.device)
        return {"parameters": parameters, **about}

    def run(self, steps: int) -> dict[str, list[float]]:
        """Warm up, time whole steps, then time steps split into phases.

        Measuring between phases keeps them from overlapping, so only the whole steps count for
        comparisons.
        """
        self.step()
        found = {"seconds": [seconds_of(self.step) for _ in range(steps)]}
        for _ in range(min(2, steps)):
            for name in self._phases:
                seconds = seconds_of(getattr(self, f"_{name}"))
                found.setdefault(f"{name}_seconds", []).append(seconds)
        return found

    def step(self) -> None:
        for name in self._phases:
            getattr(self, f"_{name}")()

    def close(self) -> None:
        raise NotImplementedError

    def _begin(self) -> dict[str, Any]:
        raise NotImplementedError

    _engine: Any

    def _forward(self) -> None:
        output = self._engine(**self._batch["inputs"], return_dict=False)[0]
        self._loss = torch.nn.functional.mse_loss(output.float(), self._batch["target"])

    def _backward(self) -> None:
        self._engine.backward(self._loss)

    def _optimizer(self) -> None:
        self._engine.step()


class Reference(Contestant):
    """The reference's stage-2 JSON through accelerate, with DeepSpeed's default buckets."""

    def _begin(self) -> dict[str, Any]:
        os.environ.update(alone())
        from accelerate import Accelerator, DeepSpeedPlugin
        from accelerate.utils import DummyOptim

        from zerotune.backend.op_builds import building

        self._model.enable_gradient_checkpointing()
        plugin = DeepSpeedPlugin(hf_ds_config=reference_config(self._settings["batch"]))
        # Otherwise DeepSpeed would compile its ops a second time, into torch's default folder.
        with building():
            self._accelerator = Accelerator(deepspeed_plugin=plugin)
            optimizer = DummyOptim(self._model.parameters(), lr=1e-4)
            self._engine, self._wrapped = self._accelerator.prepare(self._model, optimizer)
        return {"what": "stage 2, optimizer in host memory, DeepSpeed's default buckets, no EMA"}

    def step(self) -> None:
        """Step forward, backward and optimizer: accelerate's ``backward`` also steps the engine."""
        self._forward()
        self._accelerator.backward(self._loss)
        self._wrapped.step()
        self._wrapped.zero_grad()

    def close(self) -> None:
        self._engine.destroy()


class Ours(Contestant):
    """zerotune's plan, activations and EMA in host memory."""

    _phases = ("forward", "backward", "optimizer", "ema")

    def _begin(self) -> dict[str, Any]:
        plan = DeepSpeedPlan.build(
            precision="bf16", micro_batch_size=self._settings["batch"],
            optimizer={"type": "AdamW", "params": {"lr": 1e-4}}, **self._settings["plan"],
        )  # fmt: skip
        return self._prepare(plan, recomputed=True, offloaded=True)

    def _prepare(self, plan: Any, *, recomputed: bool, offloaded: bool) -> dict[str, Any]:
        from zerotune import EMAShadow, prepare
        from zerotune.diffusion import ActivationOffload
        from zerotune.plan.text.plan import describe

        self._engine = prepare(model=self._model, plan=plan)
        self._offload = ActivationOffload()
        if offloaded:
            self._offload.attach(self._model)
        elif recomputed:
            self._model.enable_gradient_checkpointing()
        self._shadow = EMAShadow(decay=0.9999).attach(self._engine)
        activations = ", activations in host memory" if offloaded else ""
        return {
            "what": f"{describe(self._engine.plan)}, EMA in host memory{activations}",
            "estimate": self._estimate(recomputed=recomputed, offloaded=offloaded),
            "plan": self._engine.plan.to_deepspeed(),
        }

    def _estimate(self, *, recomputed: bool, offloaded: bool) -> dict[str, float | None]:
        from zerotune.plan.memory.rates import known_rates

        resolved, side = self._engine.plan, self._settings["side"]
        resolved = attrs.evolve(resolved, model=self._with_passes(resolved.model))
        estimate = resolved.estimate(
            Workload(
                batch=self._settings["batch"], height=side, width=side,
                gradient_checkpointing=recomputed, activation_offload=offloaded, ema="host",
            ),
        )  # fmt: skip
        # Use this session's measured rates if there are any, otherwise catalogued ones.
        file = Path(self._settings["folder"], RATES)
        time = estimate.step_time(known_rates(detect_platform(log=False), file=file))
        return {
            "device": estimate.device, "host": estimate.host, "pinned": estimate.pinned,
            "seconds": None if time is None else time.expected,
        }  # fmt: skip

    def _with_passes(self, facts: Any) -> Any:
        """Add the family's activations and arithmetic if the model has its full depth."""
        name = self._settings["model"]
        if self._settings["more"] or name not in family_names():
            return facts
        known = family(name)
        return attrs.evolve(facts, activations=known.activations, arithmetic=known.arithmetic)

    def _ema(self) -> None:
        self._shadow.step()

    def close(self) -> None:
        self._offload.detach()
        self._engine.close()


class Streamed(Ours):
    """zerotune with streamed weights; activations stay on the device."""

    def _begin(self) -> dict[str, Any]:
        plan = DeepSpeedPlan.build(
            precision="bf16", micro_batch_size=self._settings["batch"],
            gradient_clipping=self._settings["clipping"],
            optimizer={"type": "AdamW", "params": {"lr": 1e-4}}, **self._settings["plan"],
        )  # fmt: skip
        resolved = plan.resolve(
            platform=detect_platform(log=False),
            model=ModelFacts.from_module(self._model),
            streamed=True,
        )
        return self._prepare(resolved, recomputed=True, offloaded=False)

    def run(self, steps: int) -> dict[str, Any]:
        return {**super().run(steps), "counts": attrs.asdict(self._engine.counts)}


class TrainStreamed(Contestant):
    """TrainStream, if it is installed and compiles, with the same clipping; it has no EMA."""

    def _begin(self) -> dict[str, Any]:
        import trainstream

        self._model.enable_gradient_checkpointing()
        self._model.to(torch.bfloat16)
        adam = torch.optim.AdamW(self._model.parameters(), lr=1e-4)
        clipping = self._settings["clipping"] or None
        self._module, self._adam = trainstream.wrap(
            self._model, adam, device="cuda", max_grad_norm=clipping
        )
        self._engine = _Placed(self._module)
        return {"what": f"TrainStream {trainstream.__version__}, no EMA"}

    def _backward(self) -> None:
        self._loss.backward()  # type: ignore[no-untyped-call]

    def _optimizer(self) -> None:
        self._adam.step()
        self._adam.zero_grad()

    def close(self) -> None:
        """Do nothing: the process ends."""


class _Placed:
    """A module with a ``device`` attribute, as an engine has."""

    device = torch.device("cuda")

    def __init__(self, module: Any) -> None:
        self._module = module

    def __call__(self, **inputs: Any) -> Any:
        return self._module(**inputs)


class Advised(Ours):
    """The plan that ``advise`` chooses for a card of ``cap_gib`` and this machine's RAM."""

    def _begin(self) -> dict[str, Any]:
        ram = detect_platform(log=False).host_memory.available
        advice = DeepSpeedPlan.advise(
            self._with_passes(ModelFacts.from_module(self._model)),
            batch=self._settings["batch"],
            resolution=self._settings["side"],
            precision="bf16",
            ema="host",
            optimizer={"type": "AdamW", "params": {"lr": 1e-4}},
            platform=Platform.synthetic("cuda", vram=self._settings["cap_gib"] * GIB, ram=ram),
            streamed=False,
        )
        about = self._prepare(
            advice.plan,
            recomputed=advice.gradient_checkpointing,
            offloaded=advice.activation_offload,
        )
        more = {"advised": advice.chosen.title, "estimate_of_advice": advice.estimate.device}
        return {**about, **more}


def reference_config(batch: int) -> dict[str, Any]:
    """Return the reference's configuration, for one batch per step."""
    adam = {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}
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
        "optimizer": {"type": "AdamW", "params": adam},
    }


def build(config: Mapping[str, Any]) -> Any:
    """Build a diffusers model with random weights in fp32 host memory."""
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
                # Draw weights on the GPU: one CPU core would take a minute.
                value.normal_(std=0.02, generator=generator)
            else:
                value.fill_(1.0 if name == "weight" else 0.0)
            setattr(module, name, torch.nn.Parameter(value.cpu()))
    if where == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return model


def sample_batch(
    config: Mapping[str, Any], settings: Mapping[str, Any], device: Any
) -> dict[str, Any]:
    """Return synthetic latents and conditions in bf16, and the target."""
    import diffusers
    from torch.utils._pytree import tree_map

    from zerotune.diffusion.facts import example_inputs

    with torch.device("meta"):
        model = getattr(diffusers, config["_class_name"]).from_config(dict(config))
    generator = torch.Generator().manual_seed(SEED)

    def drawn(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if not value.is_floating_point():
            return torch.ones(value.shape, dtype=value.dtype, device=device)
        return torch.randn(value.shape, generator=generator).to(device, value.dtype)

    side = settings["side"]
    make = example_inputs(model.to(torch.bfloat16))
    inputs = tree_map(drawn, make(settings["batch"], side, side))
    first = next(iter(inputs.values()))
    return {"inputs": inputs, "target": torch.randn(first.shape, generator=generator).to(device)}


def limit_memory(cap_gib: float | None) -> None:
    """Limit this process to as much GPU memory as a card of that size has.

    Raises:
        RuntimeError: The card is smaller than that.
    """
    if not torch.cuda.is_available() or cap_gib is None:
        return
    # cuBLAS and cuDNN allocate their workspaces at first use.
    ones = torch.ones(1, 64, 64, 64, device="cuda", dtype=torch.bfloat16)
    convolved = torch.nn.functional.conv2d(ones, ones.new_ones(64, 64, 3, 3)).flatten(2)
    convolved.matmul(ones.new_ones(62 * 62, 64))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    # On an idle card, only the context and the libraries use memory now.
    left = int(cap_gib * GIB) - (total - free - torch.cuda.memory_reserved())
    if left > free:
        raise RuntimeError(f"this GPU has less than {cap_gib:g} GiB left")
    torch.cuda.set_per_process_memory_fraction(left / total)


def seconds_of(act: Callable[[], object]) -> float:
    """Time a call, including the GPU work it starts."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.synchronize()
    began = time.perf_counter()
    act()
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def device_memory() -> dict[str, Any]:
    """Return the peaks of GPU memory, set-up included, and page-locked host memory.

    Call it at the end: only then does the driver's figure include all libraries.
    """
    from zerotune.backend.accelerator import current_accelerator

    figures = current_accelerator().memory()
    if figures is None:
        return {}
    from zerotune.training.memory import counted_apart, locked_peak

    return {
        "allocated_bytes": float(figures.allocated_peak),
        "reserved_bytes": float(figures.reserved_peak),
        "device_bytes": float(figures.peak),
        "beside_bytes": float(figures.context),
        "pinned_bytes": float(locked_peak()),
        "pinned_apart": counted_apart(anon_bytes),
    }


# -- How many Flux blocks fit into a machine's memory.


def flux_depth(platform: Platform) -> tuple[int, int]:
    """Return the numbers of double and single blocks that fit into host memory, in the ratio 1:2.

    They must fit with the reference too, under which torch rounds page-locked memory up.
    """
    room = _USED * platform.host_memory.limit
    for double in range(DOUBLE, 1, -1):
        if flux_need(double, platform) <= room:
            return double, 2 * double
    return 1, 2


def flux_need(double: int, platform: Platform) -> int:
    """Return the largest host memory of any contestant with this many double blocks, in bytes."""
    facts = family("flux")
    kept = tuple(one for one in facts.parameters if _within(one.name, double))
    facts = attrs.evolve(facts, parameters=kept)
    plan = DeepSpeedPlan.build(stage=2, offload="cpu", precision="bf16", micro_batch_size=1)
    on: dict[str, Any] = {"platform": platform, "model": facts}
    ours = plan.resolve(**on).estimate(Workload(ema="host")).host
    raw = plan.resolve(**on, engine="deepspeed")
    reference = raw.estimate(Workload(exact_pinning=False)).host
    # Add the loaded fp32 weights.
    return max(ours, reference) + 4 * facts.numel


def _within(name: str, double: int) -> bool:
    found = _BLOCK.match(name)
    return found is None or int(found[2]) < (2 * double if found[1] else double)
