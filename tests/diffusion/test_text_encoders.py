"""Text encoders trained with the model: on engines, stopped, resumed and exported."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler, DiffusionPipeline, UNet2DConditionModel
from peft import LoraConfig
from PIL import Image
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from tests.support import pipelines
from tests.support.ranks import run_ranks
from tests.support.sampling import sampled
from zerotune import DeepSpeedPlan, ModelFacts, OptimizerResolver, Trainer
from zerotune.diffusion import LoRA, TrainedParts, add_lora, encode_dataset, load_pretrained
from zerotune.diffusion.data import AspectBuckets, ImageFolder, PreparedImages
from zerotune.diffusion.data.batches import Captions
from zerotune.errors import DataError, InvalidValueError, OptimizerError
from zerotune.optim import ParameterGroups

LAST = 2
"""Last step that trains the text encoders."""
ENCODERS = {
    "sd15": ["text_encoder"],
    "sdxl": ["text_encoder", "text_encoder_2"],
    "sd3": ["text_encoder", "text_encoder_2"],
    "flux": ["text_encoder"],
}


def batches(count: int = 4) -> list[Any]:
    generator = torch.Generator().manual_seed(6)
    texts = ["a cat", "the dog", "a red hat", "snow", "a mat"]
    return [
        {
            "latents": torch.randn(2, 4, 8, 8, generator=generator),
            "captions": Captions((texts[number], texts[number + 1])),
        }
        for number in range(count)
    ]


@pytest.mark.parametrize("name", sampled(ENCODERS, ("sd15", "sdxl")))
def test_the_loss_equals_that_of_frozen_encoders_and_its_gradient_reaches_them(name, tmp_path):
    folder = pipelines.MAKERS[name](tmp_path / name)
    loaded = load_pretrained(folder, frozen_dtype="fp32", text_encoders=True)
    frozen = load_pretrained(folder, frozen_dtype="fp32")
    assert isinstance(loaded.model, TrainedParts)
    assert loaded.model.names == (loaded.component, *ENCODERS[name])
    (batch,) = batches(1)
    losses = [
        each.objective()(each.model, batch, torch.Generator().manual_seed(0))
        for each in (loaded, frozen)
    ]
    assert torch.equal(*losses)
    losses[0].backward()
    parts = {n: p for n, p in loaded.model.named_parameters() if n.startswith("text_encoder")}
    assert {n for n, p in parts.items() if p.requires_grad} == {
        n for n, p in parts.items() if p.grad is not None
    }
    unread = [n for n, p in parts.items() if not p.requires_grad]
    assert bool(unread) == (name == "sdxl")
    recorded = [d for d in loaded.decisions if d.key.endswith("requires_grad")]
    assert len(recorded) == (name == "sdxl")
    embedded = {**batch, "prompt_embeds": torch.zeros(2, 16, 32)}
    with pytest.raises(DataError, match="text encoders are trained"):
        loaded.objective()(loaded.model, embedded, torch.Generator())
    dropping = load_pretrained(folder, frozen_dtype="fp32", text_encoders=True, dropout=1.0)
    texts = dropping.family.conditioning(batch, torch.Generator())["captions"]
    assert texts == ("", "")


def test_the_names_of_trained_encoders_are_checked(tmp_path):
    folder = pipelines.flux(tmp_path / "flux")
    with pytest.raises(InvalidValueError, match="one of text_encoder, text_encoder_2"):
        load_pretrained(folder, text_encoders=["text_encoder_3"])
    with pytest.raises(InvalidValueError, match="is not a text encoder of the pipeline"):
        load_pretrained(folder, text_encoders=["text_encoder"], leave_out=["text_encoder"])
    with pytest.raises(InvalidValueError, match="omit parts=False"):
        load_pretrained(folder, text_encoders=True, parts=False)
    both = load_pretrained(folder, text_encoders=["text_encoder", "text_encoder_2"])
    assert both.model.names == ("transformer", "text_encoder", "text_encoder_2")


def test_captions_are_not_cached_while_encoders_are_trained(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    pipelines_folder = pipelines.sd15(tmp_path / "sd15")
    Image.new("RGB", (16, 16), "red").save(folder / "a.png")
    (folder / "a.txt").write_text("a red square")
    images = PreparedImages(ImageFolder(folder), buckets=AspectBuckets(area=256, step=8))
    family = load_pretrained(pipelines_folder, text_encoders=True).family
    cached = encode_dataset(images, family=family, folder=tmp_path / "cache", progress=False)
    assert cached[0]["captions"] == "a red square"
    assert "latents" in cached[0]
    assert [path.name.partition("-")[0] for path in (tmp_path / "cache").iterdir()] == ["latents"]


# -- In engines.


def digest(engine: Any, prefix: str) -> str:
    found = hashlib.sha256()
    for name, tensor in engine.master_weights.gather():
        if name.startswith(prefix):
            found.update(name.encode() + tensor.float().contiguous().numpy().tobytes())
    return found.hexdigest()


def moments(engine: Any) -> str:
    """Return a digest of this rank's optimizer states of the text encoders."""
    found = hashlib.sha256()
    for fragment in engine.master_weights.read():
        if fragment.address.name.startswith("text_encoder"):
            for name, state in sorted(fragment.states.items()):
                found.update(name.encode() + state.float().contiguous().numpy().tobytes())
    return found.hexdigest()


def as_arrays(tensors: Any) -> dict[str, Any]:
    """Copy tensors to arrays that can be sent to another process."""
    return {name: tensor.detach().float().numpy().copy() for name, tensor in tensors}


def trained(
    folder: str, out: str, *, stage: int, lora: bool, until: int, resume: bool = False, to: int = 4
) -> dict[str, Any]:
    """Train to a step, save there and export."""
    plan = DeepSpeedPlan.build(
        stage=stage, offload="cpu", precision="fp32", micro_batch_size=2, optimizer="AdamW",
        lr=1e-2, gradient_clipping=1.0,
    )  # fmt: skip
    loaded = load_pretrained(folder, plan=plan, frozen_dtype="fp32", text_encoders=True)
    model: Any = loaded.model
    torch.manual_seed(0)
    for _, part in model.items() if lora else ():
        add_lora(part, LoRA(rank=4))
    rates = {name: {"lr": 3e-3, "until": until} for name in model.names if "text" in name}
    groups = ParameterGroups.per_part({loaded.component or "": {"lr": 1e-2}, **rates})
    with Trainer(
        model=loaded, data=batches(), resolver=OptimizerResolver(groups=groups), ema=0.9,
        callbacks=[],
    ) as trainer:  # fmt: skip
        if resume:
            trainer.resume(Path(out) / "checkpoint")
        seen, remembered = {}, {}
        for step in range(trainer.step + 1, to + 1):
            trainer.fit(steps=step)
            seen[step] = digest(trainer.engine, "text_encoder")
            remembered[step] = moments(trainer.engine)
        losses = list(trainer.report().losses)
        trainer.save(Path(out) / "checkpoint")
        file = "lora.safetensors" if lora else "pipeline"
        trainer.export(Path(out) / file, weights="trained")
        trainer.export(Path(out) / f"ema-{file}")
        with trainer.engine.evaluating(), loaded.family.parts.calling(trainer.engine):
            texts = loaded.family.embed(
                loaded.family.parts, ["a cat"], torch.device(trainer.engine.device)
            )
        wanted = [n for n, p in trainer.engine.module.named_parameters() if p.requires_grad]
        return {
            "losses": losses,
            "encoders": seen,
            "moments": remembered,
            "whole": digest(trainer.engine, ""),
            "texts": as_arrays(texts.items()),
            "explained": trainer.explain(),
            "training": sorted({name.partition(".")[0] for name in wanted}),
            "image": trainer.sample(prompts=["a cat"], steps=1, size=(16, 16), ema=False).numpy(),
            "weights": {} if lora else as_arrays(trainer.engine.master_weights.gather()),
        }


def three_runs(folder: str, out: str, **options: Any) -> list[Any]:
    """Return results of an uninterrupted run, and of a run before its stop and after resuming."""
    torch.set_num_threads(1)
    first = trained(folder, f"{out}/whole", **options)
    before = trained(folder, f"{out}/stopped", to=3, **options)
    return [first, before, trained(folder, f"{out}/stopped", resume=True, **options)]


NIGHTLY = pytest.mark.nightly


@pytest.mark.deepspeed
@pytest.mark.parametrize(
    ("name", "stage", "lora", "world_size"),
    [
        ("sd15", 2, False, 1),
        pytest.param("sdxl", 2, False, 1, marks=NIGHTLY),
        *(
            pytest.param(name, *how, marks=NIGHTLY)
            for name in ENCODERS
            for how in ((2, False, 2), (2, True, 1), (3, False, 1), (3, True, 2))
        ),
    ],
)
def test_trained_encoders_stop_resume_and_are_exported(name, stage, lora, world_size, tmp_path):
    folder = pipelines.MAKERS[name](tmp_path / name)
    found = run_ranks(
        run_case, str(folder), str(tmp_path), stage, lora, world_size=world_size
    )[0]  # fmt: skip
    whole, before, after = found
    assert before["losses"] + after["losses"] == whole["losses"]
    assert after["whole"] == whole["whole"]
    # The encoders train for two steps, then stay fixed, also after a resume.
    assert whole["encoders"][1] != whole["encoders"][2]
    assert len({whole["encoders"][step] for step in (2, 3, 4)}) == 1
    assert before["encoders"][3] == after["encoders"][4] == whole["encoders"][4]
    assert whole["moments"][1] != whole["moments"][2]
    if stage == 2 or world_size == 1:
        # The host engine no longer updates their states. DeepSpeed's step lets moments decay, which
        # at a learning rate of 0 changes no weight.
        assert len({whole["moments"][step] for step in (2, 3, 4)}) == 1
    assert after["moments"][4] == whole["moments"][4]
    component = "unet" if "sd1" in name or "xl" in name else "transformer"
    assert whole["training"] == after["training"] == [component]
    assert "trains until step 2" in whole["explained"]
    assert "trains until step 2" in after["explained"]

    absent = {"text_encoder_3": None, "tokenizer_3": None} if name == "sd3" else {}
    if lora:
        pipeline = DiffusionPipeline.from_pretrained(folder, **absent)
        pipeline.load_lora_weights(tmp_path / "whole" / "lora.safetensors")
        assert set(pipeline.get_list_adapters()) == {component, *ENCODERS[name]}
    else:
        pipeline = DiffusionPipeline.from_pretrained(tmp_path / "whole" / "pipeline", **absent)
        for part in (component, *ENCODERS[name]):
            stored = getattr(pipeline, part).state_dict()
            ours = {n.removeprefix(f"{part}."): t for n, t in whole["weights"].items()
                    if n.startswith(f"{part}.")}  # fmt: skip
            assert ours
            assert all(np.array_equal(stored[n].numpy(), tensor) for n, tensor in ours.items())
    pipeline.set_progress_bar_config(disable=True)
    family = load_pretrained(folder, frozen_dtype="fp32").family
    with torch.no_grad():
        texts = family.encode_with(
            pipeline, torch.device("cpu"),
            {"prompt": ["a cat"], "do_classifier_free_guidance": False},
        )  # fmt: skip
    for key, value in whole["texts"].items():
        np.testing.assert_allclose(texts[key].numpy(), value, rtol=1e-5, atol=1e-6)
    assert np.isfinite(whole["image"]).all()
    assert (tmp_path / "whole" / ("ema-lora.safetensors" if lora else "ema-pipeline")).exists()


def run_case(folder: str, out: str, stage: int, lora: bool) -> list[Any]:
    return three_runs(folder, out, stage=stage, lora=lora, until=LAST)


def test_a_group_cannot_stop_early_with_an_optimizer_that_sets_its_own_learning_rate(tmp_path):
    folder = pipelines.sd15(tmp_path / "sd15")
    groups = ParameterGroups.per_part({"unet": {"lr": 1e-2}, "text_encoder": {"until": 3}})
    plan = DeepSpeedPlan.build(stage=0, micro_batch_size=2, optimizer="AdamWScheduleFree", lr=1e-3)
    loaded = load_pretrained(folder, text_encoders=True)
    facts = ModelFacts.from_module(loaded.model)
    with pytest.raises(OptimizerError, match="adapts its own learning rate"):
        plan.resolve(model=facts, world_size=1, resolver=OptimizerResolver(groups=groups))


# -- The reference: diffusers' train_dreambooth_lora_sdxl.py with --train_text_encoder.

RATE, TEXT_RATE, DECAY = 1e-3, 5e-4, 1e-2
TEXT_LAYERS = ("q_proj", "k_proj", "v_proj", "out_proj")
UNET_LAYERS = ("to_k", "to_q", "to_v", "to_out.0")


def lora_of(part: str) -> tuple[str, ...]:
    return UNET_LAYERS if part == "unet" else TEXT_LAYERS


def reference(folder: Path, start: dict[str, torch.Tensor], data: list[Any]) -> list[float]:
    """Return the losses of the script's formula, on its own models with equal first adapters."""
    parts = {
        "unet": UNet2DConditionModel.from_pretrained(folder / "unet"),
        "text_encoder": CLIPTextModel.from_pretrained(folder / "text_encoder"),
        "text_encoder_2": CLIPTextModelWithProjection.from_pretrained(folder / "text_encoder_2"),
    }
    adapters: dict[str, list[Any]] = {}
    for name, part in parts.items():
        part.requires_grad_(False)
        part.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=list(lora_of(name))))
        for key, weight in part.named_parameters():
            if weight.requires_grad:
                weight.data.copy_(start[f"{name}.{key}".replace(".default.", ".")])
        adapters[name] = [weight for weight in part.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(
        [
            {"params": adapters["unet"], "lr": RATE},
            {"params": adapters["text_encoder"], "lr": TEXT_RATE},
            {"params": adapters["text_encoder_2"], "lr": TEXT_RATE},
        ],
        weight_decay=DECAY,
    )
    tokenizers = [CLIPTokenizer.from_pretrained(folder / n) for n in ("tokenizer", "tokenizer_2")]
    scheduler = DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    losses = []
    for step, batch in enumerate(data):
        noise, times = drawn(step)
        hidden = []
        for tokenizer, name in zip(tokenizers, ("text_encoder", "text_encoder_2"), strict=True):
            ids = tokenizer(
                list(batch["captions"]), padding="max_length", truncation=True,
                max_length=tokenizer.model_max_length, return_tensors="pt",
            ).input_ids  # fmt: skip
            out = parts[name](ids, output_hidden_states=True, return_dict=False)
            pooled = out[0]
            hidden.append(out[-1][-2])
        sizes = torch.tensor([[16.0, 16, 0, 0, 16, 16]]).repeat(2, 1)
        noisy = scheduler.add_noise(batch["latents"], noise, times)
        prediction = parts["unet"](
            noisy, times, torch.cat(hidden, dim=-1),
            added_cond_kwargs={"time_ids": sizes, "text_embeds": pooled},
        ).sample  # fmt: skip
        loss = torch.nn.functional.mse_loss(prediction.float(), noise.float())
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for of in adapters.values() for p in of], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def drawn(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw noise, then time steps, in the objective's order."""
    generator = torch.Generator().manual_seed(100 + step)
    noise = torch.randn(2, 4, 8, 8, generator=generator)
    return noise, torch.randint(0, 1000, (2,), generator=generator)


def as_the_script(folder: str) -> tuple[list[float], list[float]]:
    torch.set_num_threads(1)
    plan = DeepSpeedPlan.build(
        stage=2, offload="cpu", precision="fp32", micro_batch_size=2, gradient_clipping=1.0,
        optimizer={"type": "AdamW", "params": {"lr": RATE, "weight_decay": DECAY}},
        scheduler={"type": "constant", "params": {}},
    )  # fmt: skip
    loaded = load_pretrained(folder, plan=plan, frozen_dtype="fp32", text_encoders=True)
    torch.manual_seed(0)
    for name, part in loaded.model.items():
        add_lora(part, LoRA(rank=4, alpha=4, targets=lora_of(name)))
    start = {
        name.replace(".default.", "."): weight.detach().clone()
        for name, weight in loaded.model.named_parameters()
        if weight.requires_grad
    }
    theirs = reference(Path(folder), start, batches())
    rates = {name: {"lr": RATE if name == "unet" else TEXT_RATE} for name in loaded.model.names}
    objective, numbers = loaded.objective(), iter(range(4))

    def same_noise(model: Any, batch: Any, _: torch.Generator) -> torch.Tensor:
        loss: torch.Tensor = objective(
            model, batch, torch.Generator().manual_seed(100 + next(numbers))
        )
        return loss

    with Trainer(
        model=loaded, data=batches(), objective=same_noise, callbacks=[],
        resolver=OptimizerResolver(groups=ParameterGroups.per_part(rates)),
    ) as trainer:  # fmt: skip
        return list(trainer.fit(steps=4).losses), theirs


@pytest.mark.deepspeed
def test_training_matches_the_dreambooth_script_of_diffusers(tmp_path):
    folder = pipelines.sdxl(tmp_path / "sdxl")
    ((ours, theirs),) = run_ranks(as_the_script, str(folder))
    assert ours == pytest.approx(theirs, rel=1e-6)
    assert abs(theirs[1] - theirs[0]) > 1e-3
