"""A training of a U-Net of full size: what it needs, and its actions, each phase in its process."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs


@attrs.frozen(kw_only=True)
class Training:
    """What is trained, and how."""

    model: str
    """``"sd15"`` or ``"sdxl"``."""
    plan: Mapping[str, Any]
    """Stage and offload."""
    optimizer: str = "AdamW"
    streamed: bool = False
    """Whether weights are streamed, with split masters."""
    on_device: bool = False
    """Whether split masters are updated on the device, here the CPU, by the optimizer."""
    lora: int | None = None
    """Rank of adapters; ``None`` trains all weights."""
    ema: str = "nvme"
    """``"host"``, ``"nvme"`` or ``"none"``."""
    scale: float = 1.0
    """Share of the published widths and depths."""
    side: int = 128
    """Side of the image in pixels."""
    steps: int = 2

    def deepspeed_plan(self, scratch: Path) -> Any:
        from zerotune import DeepSpeedPlan

        swap = scratch / "swap"
        swap.mkdir(exist_ok=True)
        adam = {"lr": 1e-5, "weight_decay": 0.01}
        on_nvme = "nvme" in self.plan.values()
        return DeepSpeedPlan.build(
            precision="bf16",
            optimizer={"type": self.optimizer, "params": adam},
            nvme_path=swap if on_nvme else None,
            **self.plan,
        )

    def resolved(self, plan: Any, facts: Any) -> Any:
        """Return the plan for a model of these facts on this machine."""
        from zerotune import OptimizerResolver, detect_platform
        from zerotune.plan.context import DeviceUpdate, Streaming

        found = plan.resolve(
            platform=detect_platform(log=False),
            model=facts,
            streamed=Streaming(split_masters=True) if self.streamed else None,
            update=DeviceUpdate(masters="split") if self.on_device else None,
        )
        return OptimizerResolver().resolve(found)


@attrs.frozen(kw_only=True)
class Needs:
    """Bytes that a training needs according to the plan's estimate."""

    memory: int
    memory_free: int
    swap: int
    """Swap files and an EMA on disk."""
    pipeline: int
    """Weights in fp16. They or the checkpoint are removed before an export, which is smaller."""
    checkpoint: int
    """Saved master weights and EMA in fp32, and moments as the optimizer stores them."""

    @property
    def disk(self) -> int:
        """Disk space without saving."""
        return self.swap + self.pipeline


class Preparation:
    """Estimates a training's needs, and writes its pipeline."""

    def __init__(self, training: Training, scratch: Path) -> None:
        from bench.random_pipeline import configuration

        self._training, self._scratch = training, scratch
        self._config = configuration(training.model, training.scale)

    def needs(self) -> Needs:
        from zerotune import detect_platform
        from zerotune.plan.memory.items import Workload
        from zerotune.plan.optimizer.names import entry_of

        training, whole = self._training, self._facts()
        facts = whole if training.lora is None else whole.with_adapters(training.lora)
        trained = sum(one.numel for one in facts.trainable)
        plan = training.resolved(training.deepspeed_plan(self._scratch), facts)
        moments = entry_of(plan.optimizer.name).states_per_weight(plan.optimizer.params)
        ema: Any = training.ema
        estimate = plan.estimate(
            Workload(batch=1, height=training.side, width=training.side, ema=ema)
        )
        return Needs(
            memory=estimate.host,
            memory_free=detect_platform(log=False).host_memory.available,
            swap=estimate.nvme,
            pipeline=2 * whole.numel,
            checkpoint=int(4 * trained * (1 + moments + (training.ema != "none"))),
        )

    def _facts(self) -> Any:
        """Return shapes and activations; activations of a scaled model are negligible."""
        from bench.random_pipeline import empty_model
        from zerotune.plan.facts import ModelFacts
        from zerotune.plan.families import family

        if self._training.scale == 1:
            return family(self._training.model)
        return ModelFacts.from_module(empty_model(self._config))

    def write(self) -> None:
        from bench.random_pipeline import write_pipeline

        folder = self._scratch / "pipeline"
        for written in write_pipeline(folder, self._training.model, self._config):
            print(f"    {written / 2**30:.1f} GiB written", file=sys.stderr, flush=True)


class Run:
    """An engine with an EMA, and what a user does with it."""

    def __init__(self, training: Training, scratch: Path) -> None:
        from bench.workers import load_libraries

        self._training, self._scratch = training, scratch
        load_libraries()

    def start(self) -> dict[str, Any]:
        """Load the pipeline, start the engine and attach the EMA; return facts about them."""
        import torch

        import zerotune
        from bench.contestants import sample_batch
        from bench.random_pipeline import configuration
        from zerotune.diffusion import LoRA, add_lora
        from zerotune.plan.facts import ModelFacts

        torch.manual_seed(0)
        training = self._training
        plan = training.deepspeed_plan(self._scratch)
        loaded = zerotune.load_pretrained(self._scratch / "pipeline", plan=plan, parts=False)
        model = loaded.model
        if training.lora:
            add_lora(model, LoRA(rank=training.lora), base_dtype="bf16")
        model.enable_gradient_checkpointing()
        facts = ModelFacts.from_module(model)
        self._engine = zerotune.prepare(model=model, plan=training.resolved(plan, facts))
        self._shadows = self._attach_ema()
        config = configuration(training.model, training.scale)
        size = {"side": training.side, "batch": 1}
        self._batch = sample_batch(config, size, self._engine.device)
        gc.collect()
        return {
            "parameters": facts.numel,
            "trained": sum(one.numel for one in facts.trainable),
            "engine": type(self._engine).__name__,
            "threads": torch.get_num_threads(),
        }

    def _attach_ema(self) -> dict[str, Any]:
        from zerotune import EMAShadow
        from zerotune.ema.stores import FileStore

        if self._training.ema == "none":
            return {}
        folder = self._scratch / "ema"
        folder.mkdir(exist_ok=True)
        store = FileStore(folder=folder) if self._training.ema == "nvme" else None
        return {"ema": EMAShadow(decay=0.999, store=store).attach(self._engine)}

    def step(self) -> dict[str, float]:
        """Train one step; return the loss and the seconds of its parts."""
        from torch.nn.functional import mse_loss

        engine, began = self._engine, time.perf_counter()
        found: dict[str, float] = {}

        def lap(name: str) -> None:
            nonlocal began
            now = time.perf_counter()
            found[f"{name}_seconds"], began = now - began, now
            print(f"    {name}: {found[f'{name}_seconds']:.1f} s", file=sys.stderr, flush=True)

        output = engine(**self._batch["inputs"], return_dict=False)[0]
        loss = mse_loss(output.float(), self._batch["target"])
        lap("forward")
        engine.backward(loss)
        lap("backward")
        engine.step()
        lap("optimizer")
        for shadow in self._shadows.values():
            shadow.step()
        # Hidden updates, and those that wait for a clipped norm, end here or in the next forward
        # pass.
        engine.master_weights.settle()
        lap("settling")
        return {**found, "loss": float(loss.detach())}

    def save(self) -> int:
        """Save a checkpoint; return its bytes."""
        from zerotune import save_checkpoint

        folder = save_checkpoint(
            self._scratch / "checkpoint", engine=self._engine, shadows=self._shadows
        )
        return sum(path.stat().st_size for path in folder.rglob("*"))

    def resume(self) -> None:
        from zerotune import load_checkpoint

        load_checkpoint(self._scratch / "checkpoint", engine=self._engine, shadows=self._shadows)

    def export(self, what: str) -> None:
        """Export trained or EMA weights in bf16, or adapters."""
        from zerotune import export_model
        from zerotune.checkpoint import export_adapters

        path = self._scratch / f"export-{what}"
        weights = self._shadows.get(what, what)
        if self._training.lora:
            export_adapters(path, engine=self._engine, weights=weights)
        else:
            export_model(path, engine=self._engine, weights=weights, dtype="bf16")

    def read_back(self, what: str) -> str:
        """Read an export; return a sentence about it.

        Raises:
            ValueError: Names or shapes differ from the model's, or a value is not finite.
        """
        from bench.random_pipeline import Tensors, configuration, empty_model

        found = Tensors.read(self._scratch / f"export-{what}")
        if self._training.lora:
            trained = self._engine.master_weights.parameters
            same = sorted(found.shapes.values()) == sorted(trained.values())
        else:
            config = configuration(self._training.model, self._training.scale)
            state = empty_model(config).state_dict()
            same = found.shapes == {name: tuple(value.shape) for name, value in state.items()}
        if not same or found.not_finite:
            raise ValueError(
                f"the export of {what} weights has {len(found.shapes)} tensors with other names or "
                f"shapes, or not finite: {found.not_finite[:3]}"
            )
        return f"{len(found.shapes)} tensors, all finite"

    def finish(self) -> None:
        self._engine.close()

    def close(self) -> None:
        """Do nothing: ``finish`` has closed the engine, or an error ended it."""
