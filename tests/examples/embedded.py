"""Run the scripts of ``examples/embedding`` unchanged, and inspect their state."""

from __future__ import annotations

import importlib
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.errors import error_of
from zerotune.ema import EMAShadow

MICRO, ACCUMULATION = 4, 2
DECAY = 0.9
SCHEDULE = {"type": "constant_with_warmup", "params": {"num_warmup_steps": 5}}


class ReferredShadow(EMAShadow):
    """A shadow that also keeps a float64 EMA of the gathered weights."""

    def attach(self, source: Any) -> ReferredShadow:
        super().attach(source)
        self.reference = {name: full.double() for name, full in self.source.gather()}
        return self

    def step(self) -> None:
        super().step()
        for name, full in self.source.gather():
            self.reference[name].lerp_(full.double(), 1 - DECAY)

    def error(self) -> float:
        return max(
            float((full.double() - self.reference[name]).norm() / self.reference[name].norm())
            for name, full in self.gather()
        )


def run_script(name: str, steps: int, folder: str, zero: dict[str, Any], **more: Any) -> Any:
    """Run ``main`` of a script with another ``zero_optimization``; return the state it saved."""
    script = importlib.import_module(f"examples.embedding.{name}")
    script.CONFIG["zero_optimization"] |= zero
    if not name.endswith("before"):
        script.CONFIG["scheduler"] = SCHEDULE
    seen: dict[str, Any] = {}
    if hasattr(script, "EMAShadow"):
        script.EMAShadow = ReferredShadow
        script.save_checkpoint = looking(script.save_checkpoint, seen)
    if name.startswith("fabric"):
        fabric_on_the_cpu(script)
    losses = script.main(steps, folder, **more)
    windows = range(0, len(losses), ACCUMULATION)
    seen["losses"] = [sum(losses[i : i + ACCUMULATION]) / ACCUMULATION for i in windows]
    return seen


def looking(save: Any, seen: dict[str, Any]) -> Any:
    def look_and_save(path: str, *, engine: Any, shadows: dict[str, Any]) -> Path:
        deepspeed = getattr(engine, "deepspeed_engine", None)
        seen["ema_error"], seen["ema_steps"] = shadows["ema"].error(), shadows["ema"].steps
        seen["lr"], seen["steps"] = engine.lr, engine.state.global_step
        optimizer = engine.optimizer if deepspeed is None else deepspeed.basic_optimizer
        seen["optimizer"] = type(optimizer).__name__
        seen["partitioned"] = all(p.numel() == 0 for p in engine.module.parameters())
        seen["decisions"] = [str(decision) for decision in engine.decisions]
        if getattr(deepspeed, "_is_gradient_accumulation_boundary", None) is not None:
            seen["second step"] = error_of(engine.step)
            deepspeed.set_gradient_accumulation_boundary(False)
            seen["open window"] = error_of(lambda: save(path, engine=engine, shadows=shadows))
            deepspeed.set_gradient_accumulation_boundary(True)
        return save(path, engine=engine, shadows=shadows)

    return look_and_save


def fabric_on_the_cpu(script: Any) -> None:
    """Make Fabric, which refuses DeepSpeed without CUDA, run it on the CPU."""
    from lightning_fabric.strategies import DDPStrategy, DeepSpeedStrategy

    class OnTheCPU(DeepSpeedStrategy):
        setup_environment = DDPStrategy.setup_environment
        # Fabric passes the device's index to DeepSpeed as the local rank.
        root_device = torch.device("cpu", 0)

        def _setup_distributed(self) -> None:
            self._set_world_ranks()
            self._init_deepspeed_distributed()
            self._format_config()
            self._config_initialized = True

    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    script.DeepSpeedStrategy = OnTheCPU
    script.Fabric = partial(script.Fabric, accelerator="cpu", devices=world_size)


def batches(micro: int) -> list[dict[str, torch.Tensor]]:
    """Return the scripts' micro batches; each of two processes has half of one."""
    from examples.embedding.accelerate_before import digits

    torch.manual_seed(0)
    images, noise, times = digits().tensors
    parts = zip(images.split(micro), noise.split(micro), times.split(micro), strict=True)
    return [{"images": i, "noise": n, "times": t} for i, n, t in parts]


def objective(engine: Any, batch: dict[str, torch.Tensor], _generator: Any) -> torch.Tensor:
    from examples.embedding.accelerate_before import loss_of

    return loss_of(engine, (batch["images"], batch["noise"], batch["times"]))


def new_trainer(*, micro: int, first: int = 0, deepspeed: bool = False, **zero: Any) -> Any:
    """Return a ``Trainer`` on the data, model, optimizer and schedule of the accelerate script."""
    from examples.embedding.accelerate_before import new_model

    from zerotune import DeepSpeedPlan, Trainer

    plan = DeepSpeedPlan.build(
        precision="fp32",
        micro_batch_size=micro,
        gradient_accumulation_steps=ACCUMULATION,
        optimizer={"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
        scheduler=SCHEDULE,
        stage3_param_persistence_threshold=0,
        **zero,
    )
    data = batches(micro)[first * ACCUMULATION :]
    torch.manual_seed(0)
    digits_drawn_first()
    return Trainer(
        model=new_model(), plan=plan, data=data, objective=objective, callbacks=[],
        ema=EMAShadow(decay=DECAY), deepspeed=deepspeed,
    )  # fmt: skip


def digits_drawn_first() -> None:
    """Draw the digits' noise before the model's weights, as the scripts do."""
    from examples.embedding.accelerate_before import digits

    digits()


def uninterrupted(micro: int, steps: int) -> list[float]:
    """Return the losses of the plain engine, without DeepSpeed or another trainer."""
    with new_trainer(micro=micro) as trainer:
        return list(trainer.fit(steps=steps).losses)


def gone_on_in_a_trainer(checkpoint: str, steps: int, zero: dict[str, Any]) -> dict[str, Any]:
    """Call ``Trainer.resume`` on a checkpoint that no trainer wrote."""
    done = 3
    with new_trainer(micro=MICRO, first=done, deepspeed=True, **zero) as trainer:
        trainer.resume(checkpoint)
        gathered = trainer.engine.master_weights.gather()
        found = {
            "step": trainer.step,
            "lr": trainer.engine.lr,
            "weights": {name: full.clone().numpy() for name, full in gathered},
            "distance": trainer.ema.distance(),
            "decisions": {decision.key: str(decision) for decision in trainer.decisions},
        }
        report = trainer.fit(steps=steps)
        return found | {"losses": list(report.losses), "ema_steps": trainer.ema.steps}


def swapped_in_silence() -> str:
    """Prepare RMSprop with accelerate's default plugin; return the error of attaching."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from examples.embedding.accelerate_before import CONFIG, new_model

    from zerotune import DeepSpeedPlan
    from zerotune.training import EmbeddedPlan

    asked = CONFIG | {"optimizer": {"type": "RMSprop", "params": {"lr": 1e-3}}}
    model = new_model()
    with EmbeddedPlan(model=model, plan=DeepSpeedPlan.from_dict(asked)) as run:
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=CONFIG))
        optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
        model, optimizer = accelerator.prepare(model, optimizer)
        return error_of(lambda: run.attach(model))


def on_an_engine(name: Any, folder: str, flags: tuple[str, ...]) -> dict[str, Any]:
    """Run a script in diffusers' style on an engine; return its losses and the EMA it writes."""
    from diffusers import UNet2DModel

    from tests.examples import diffusers_script as script
    from zerotune.training import EmbeddedPlan

    runs: list[EmbeddedPlan] = []

    def embedded(**arguments: Any) -> EmbeddedPlan:
        runs.append(EmbeddedPlan(engine=name, **arguments))
        return runs[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "EmbeddedPlan", embedded)
        given = ["--output_dir", folder, "--checkpointing_steps", "3", *flags]
        losses = script.main(script.parse_args(given))
    engine = runs[0].engine
    average = UNet2DModel.from_pretrained(Path(folder) / "unet").state_dict()
    return {
        "losses": losses,
        "average": {name: tensor.numpy() for name, tensor in average.items()},
        "engine": type(engine).__name__,
        "steps": engine.state.global_step,
        "explained": engine.explain(),
    }


def ended_as_diffusers_do(folder: str) -> dict[str, Any]:
    """Run a script that ends like diffusers' scripts, at stage 3 with a frozen text encoder."""
    import deepspeed
    from diffusers import UNet2DModel
    from transformers import CLIPTextConfig, CLIPTextModel

    from tests.examples import diffusers_script as script
    from zerotune import export_model
    from zerotune.training import EmbeddedPlan

    path = Path(folder)
    encoder = path / f"text_{os.environ.get('RANK', '0')}"
    CLIPTextModel(
        CLIPTextConfig(
            hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            vocab_size=99, max_position_embeddings=8,
        )
    ).save_pretrained(encoder)  # fmt: skip
    whole = {"stage": 3, "stage3_param_persistence_threshold": 0}
    config = script.CONFIG | {"zero_optimization": whole}
    model = script.new_model()
    with EmbeddedPlan(plan=config, run=script.parse_args([])) as run:
        accelerator = run.accelerator()
        text = CLIPTextModel.from_pretrained(encoder)
        hidden = text(torch.ones(1, 4, dtype=torch.long)).last_hidden_state
        prepared, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        ending = accelerator.unwrap_model(prepared)
        seen: dict[str, Any] = {
            "hidden": tuple(hidden.shape),
            "sample_size": ending.config.sample_size,
            "saved": error_of(lambda: ending.save_pretrained(path / "ending")),
            "written": sorted(path.glob("ending/*.safetensors")),
            "explained": run.engine.explain(),
        }
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            seen["gathered"] = {tuple(t.shape) for t in ending.state_dict().values()}
        prepared.save_checkpoint(str(path / "deepspeeds"))
        exported = export_model(path / "exported", engine=run.engine)
        whole = accelerator.get_state_dict(prepared)
    loaded = UNet2DModel.from_pretrained(exported)
    same = whole.keys() == loaded.state_dict().keys() and all(
        torch.equal(tensor, whole[name]) for name, tensor in loaded.state_dict().items()
    )
    seen |= {"is_main": run.engine.group.is_main, "whole": bool(whole) and same and "as exported"}
    return seen | {"exported": {tuple(t.shape) for t in loaded.state_dict().values()}}
