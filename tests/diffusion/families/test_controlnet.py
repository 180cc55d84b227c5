"""ControlNets: losses of diffusers' scripts, images of its pipelines, and runs under ZeRO."""

from __future__ import annotations

import copy

import attrs
import diffusers
import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler, FluxPipeline
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.training_utils import compute_density_for_timestep_sampling
from PIL import Image

from tests.diffusion.families.parity import WHOLE, worst
from tests.diffusion.families.training import example
from tests.support.needs import needs
from tests.support.ranks import ranks, run_ranks
from tests.support.runs import PLAIN, Case, start
from zerotune.checkpoint import export_model
from zerotune.diffusion import encode_dataset, load_pretrained, sample
from zerotune.diffusion.data import AspectBuckets, Augmentation, ImageFolder, PreparedImages
from zerotune.diffusion.data.order import Draw
from zerotune.diffusion.models.controlnet import CONTROLNETS
from zerotune.diffusion.pretrained import FAMILIES
from zerotune.errors import DataError, InvalidValueError
from zerotune.plan import DeepSpeedPlan, ModelFacts

NAMES = ["sdxl", "sd3", "flux", "qwen-image"]
TIMES = torch.tensor([700.0, 20.0])


def load(folder, **options):
    """Load a ControlNet with its zero layers randomised: a new one has no effect."""
    loaded = load_pretrained(folder, family="controlnet", frozen_dtype="fp32", **options)
    torch.manual_seed(6)
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            if parameter.abs().max() == 0:
                parameter.normal_(0, 0.02)
    return loaded


@pytest.fixture(scope="module")
def bare(folders):
    known = {}

    def get(name):
        if name not in known:
            known[name] = load(folders[name], parts=False)
        return known[name]

    return get


def batch(loaded, *, step=0, share=0):
    data = example(loaded.family, loaded.model, step, share)
    if loaded.family.base_component == "unet":
        shades = torch.randint(256, data.pop("reference_latents").shape, dtype=torch.uint8)
        data["reference_images"] = shades
    return data


# -- diffusers' training scripts, examples/controlnet/train_controlnet_*.py, written out.


def sdxl_script(controlnet, unet, data, random):
    scheduler = DDPMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", steps_offset=1
    )
    latents = data["latents"]
    noise = torch.randn(latents.shape, generator=random)
    timesteps = torch.randint(0, 1000, (len(latents),), generator=random)
    noisy = scheduler.add_noise(latents, noise, timesteps)
    sizes = torch.tensor([[16.0, 16.0, 0, 0, 16, 16]]).repeat(len(latents), 1)
    added = {"text_embeds": data["pooled_prompt_embeds"], "time_ids": sizes}
    down, mid = controlnet(
        noisy, timesteps, encoder_hidden_states=data["prompt_embeds"], added_cond_kwargs=added,
        controlnet_cond=data["reference_images"].float() / 255, return_dict=False,
    )  # fmt: skip
    predicted = unet(
        noisy, timesteps, encoder_hidden_states=data["prompt_embeds"], added_cond_kwargs=added,
        down_block_additional_residuals=list(down), mid_block_additional_residual=mid,
        return_dict=False,
    )[0]  # fmt: skip
    return torch.nn.functional.mse_loss(predicted.float(), noise.float(), reduction="mean")


def flow_script(predict):
    def loss(controlnet, transformer, data, random):
        scheduler = FlowMatchEulerDiscreteScheduler()
        latents = data["latents"]
        noise = torch.randn(latents.shape, generator=random)
        u = compute_density_for_timestep_sampling(
            "logit_normal", len(latents), logit_mean=0.0, logit_std=1.0, generator=random
        )
        indices = (u * 1000).long()
        timesteps = scheduler.timesteps[indices]
        sigmas = scheduler.sigmas[indices].view(-1, 1, 1, 1)
        noisy = (1.0 - sigmas) * latents + sigmas * noise
        predicted = predict(controlnet, transformer, noisy, timesteps, data)
        error = (predicted.float() - (noise - latents).float()) ** 2
        return torch.mean(error.reshape(len(latents), -1), 1).mean()

    return loss


def sd3_predict(controlnet, transformer, noisy, timesteps, data):
    common = {
        "hidden_states": noisy, "timestep": timesteps, "return_dict": False,
        "encoder_hidden_states": data["prompt_embeds"],
        "pooled_projections": data["pooled_prompt_embeds"],
    }  # fmt: skip
    samples = controlnet(controlnet_cond=data["reference_latents"], **common)[0]
    return transformer(block_controlnet_hidden_states=list(samples), **common)[0]


def _packed(latents):
    return FluxPipeline._pack_latents(latents, *latents.shape)


def flux_predict(controlnet, transformer, noisy, timesteps, data):
    places = FluxPipeline._prepare_latent_image_ids(
        len(noisy), noisy.shape[2] // 2, noisy.shape[3] // 2, "cpu", torch.float32
    )
    common = {
        "hidden_states": _packed(noisy), "timestep": timesteps / 1000, "return_dict": False,
        "guidance": torch.ones(len(noisy)), "pooled_projections": data["pooled_prompt_embeds"],
        "encoder_hidden_states": data["prompt_embeds"], "img_ids": places,
        "txt_ids": torch.zeros(data["prompt_embeds"].shape[1], 3),
    }  # fmt: skip
    double, single = controlnet(controlnet_cond=_packed(data["reference_latents"]), **common)
    predicted = transformer(
        controlnet_block_samples=double, controlnet_single_block_samples=single, **common
    )[0]
    return FluxPipeline._unpack_latents(predicted, noisy.shape[2], noisy.shape[3], 1)


def qwen_predict(controlnet, transformer, noisy, timesteps, data):
    common = {
        "hidden_states": _packed(noisy), "timestep": timesteps / 1000, "return_dict": False,
        "encoder_hidden_states": data["prompt_embeds"],
        "encoder_hidden_states_mask": data["prompt_embeds_mask"],
        "img_shapes": [(1, noisy.shape[2] // 2, noisy.shape[3] // 2)] * len(noisy),
    }  # fmt: skip
    samples = controlnet(controlnet_cond=_packed(data["reference_latents"]), **common)
    predicted = transformer(controlnet_block_samples=samples, **common)[0]
    return FluxPipeline._unpack_latents(predicted, noisy.shape[2], noisy.shape[3], 1)


SCRIPTS = {
    "sdxl": sdxl_script,
    "sd3": flow_script(sd3_predict),
    "flux": flow_script(flux_predict),
    "qwen-image": flow_script(qwen_predict),
}


def compare_with_script(name, loaded):
    """Compare the loss and its gradients with the script's; return the loss."""
    flows = loaded.family.flow_matching
    objective = loaded.objective(
        **({"scheduler": FlowMatchEulerDiscreteScheduler()} if flows else {})
    )
    base = loaded.family.base
    assert not any(each.requires_grad for each in base.parameters())
    losses, gradients = [], []
    data = batch(loaded)
    for loss in (
        objective(loaded.model, data, torch.Generator().manual_seed(7)),
        SCRIPTS[name](loaded.model, base, data, torch.Generator().manual_seed(7)),
    ):
        losses.append(float(loss.detach()))
        trained = list(loaded.model.parameters())
        gradients.append(torch.autograd.grad(loss, trained, allow_unused=True))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    for ours, theirs in zip(*gradients, strict=True):
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-8)
    assert sum(float(each.abs().sum()) for each in gradients[1] if each is not None) > 0
    return losses[0]


@pytest.mark.parametrize("name", NAMES)
def test_losses_and_gradients_equal_those_of_the_diffusers_scripts(bare, name):
    compare_with_script(name, bare(name))


@pytest.mark.parametrize("name", NAMES)
def test_the_condition_changes_the_prediction(bare, name):
    loaded = bare(name)
    data = batch(loaded)
    (key,) = (each for each in data if each.startswith("reference_"))
    with torch.no_grad():
        ours, others = (
            loaded.family.predict(
                loaded.model, data["latents"], TIMES,
                loaded.family.conditioning({**data, key: condition}, torch.Generator()),
            )
            for condition in (data[key], data[key].flip(0))
        )  # fmt: skip
    assert (ours - others).abs().max() > 1e-4


# -- Sampling.


@pytest.mark.parametrize("name", NAMES)
def test_images_equal_those_of_the_diffusers_pipeline(folders, name, monkeypatch):
    """The pipeline samples the condition's latents from the VAE; here it takes their mode."""
    monkeypatch.setattr(DiagonalGaussianDistribution, "sample", lambda self, *_, **__: self.mode())
    loaded = load(folders[name])
    shades = torch.randint(256, (2, 3, 16, 16), generator=torch.Generator().manual_seed(3))
    images = sample(
        loaded.model, family=loaded.family, prompts=["a cat", "the dog"], size=(16, 16), steps=3,
        negative_prompt="ugly", guidance_scale=3.0, references=shades.float() / 127.5 - 1,
        generator=torch.Generator().manual_seed(11),
    )  # fmt: skip
    pictures = [Image.fromarray(each.permute(1, 2, 0).byte().numpy()) for each in shades]
    kind = getattr(diffusers, loaded.family.pipeline)
    without = {"text_encoder_3": None, "tokenizer_3": None} if name == "sd3" else {}
    pipe = kind.from_pretrained(folders[name], controlnet=loaded.model.eval(), **without)
    pipe.set_progress_bar_config(disable=True)
    seeds = torch.randint(2**63 - 1, (2,), generator=torch.Generator().manual_seed(11)).tolist()
    guided = {"guidance_scale": 3.0}
    if name in ("flux", "qwen-image"):
        guided = {"guidance_scale": 1.0, "true_cfg_scale": 3.0}
    if name == "qwen-image":
        del guided["guidance_scale"]
    wanted = pipe(
        prompt=["a cat", "the dog"], negative_prompt=["ugly"] * 2, num_inference_steps=3,
        height=16, width=16, output_type="pt", **guided, **{loaded.family.reference: pictures},
        generator=[torch.Generator().manual_seed(seed) for seed in seeds],
    ).images  # fmt: skip
    torch.testing.assert_close(images.clamp(-1, 1), wanted * 2 - 1, rtol=0, atol=1e-5)
    assert (images[0] - images[1]).abs().max() > 0.1


# -- Under ZeRO.


def train(folder, case, exported):
    """Take three steps; return the losses, and whether plain diffusers predicts the same."""
    loaded = load(folder, parts=False)
    model, objective = copy.deepcopy(loaded.model), loaded.objective()
    engine = start(attrs.evolve(case, micro_batch=2, lr=1e-3), model)
    losses = []
    for step in range(3):
        torch.manual_seed(step)
        loss = objective(engine, batch(loaded, step=step), torch.Generator().manual_seed(step))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    export_model(exported, engine=engine)
    plain = type(model).from_pretrained(exported).eval()
    for parameter in plain.parameters():
        parameter.data = parameter.data.clone()
    torch.manual_seed(9)
    data = batch(loaded)
    known = loaded.family.conditioning(data, torch.Generator())
    with engine.evaluating():
        ours = loaded.family.predict(engine, data["latents"], TIMES, known)
    with torch.no_grad():
        same = torch.equal(ours, loaded.family.predict(plain, data["latents"], TIMES, known))
    engine.close()
    return losses, same


def train_all(folders, case, exported):
    return [train(folder, case, f"{exported}-{n}") for n, folder in enumerate(folders)]


@pytest.mark.deepspeed
@pytest.mark.parametrize(
    ("stage", "world_size"),
    [
        (2, 2),
        pytest.param(2, 1, marks=pytest.mark.nightly),
        pytest.param(3, 1, marks=pytest.mark.nightly),
        pytest.param(3, 2, marks=pytest.mark.nightly),
    ],
)
def test_losses_equal_those_of_the_plain_engine(folders, tmp_path, stage, world_size):
    paths = [str(folders[name]) for name in NAMES]
    # All ranks see the same batches, so their mean gradient is that of one rank.
    expected = run_ranks(train_all, paths, PLAIN, str(tmp_path / "plain"))[0]
    case = Case(stage=stage, offload="cpu", overrides=WHOLE if stage == 3 else ())
    runs = run_ranks(train_all, paths, case, str(tmp_path / "zero"), world_size=world_size)[0]
    for (losses, same), (wanted, _) in zip(runs, expected, strict=True):
        assert worst(losses, wanted) < 1e-6
        assert len(set(losses)) == 3
        assert same, "plain diffusers predicts something else from the export"


# -- A quantized base, which is not part of the engine's model.


def quantization(kind):
    """Return a diffusers configuration that quantizes on a CPU too."""
    if kind == "int8":
        needs("torchao", may_lack="it is an extra")
        from torchao.quantization import Int8WeightOnlyConfig

        return diffusers.TorchAoConfig(Int8WeightOnlyConfig())
    needs("bitsandbytes", may_lack="it is an extra")
    from diffusers.quantizers.bitsandbytes.bnb_quantizer import BnB4BitDiffusersQuantizer

    # bitsandbytes can compute on CPUs, but diffusers refuses it there: skip that check.
    BnB4BitDiffusersQuantizer.validate_environment = lambda *_, **__: None
    BnB4BitDiffusersQuantizer.update_device_map = lambda *_: {"": "cpu"}
    return diffusers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )


def quantized(folder, kind, **options):
    loaded = load(folder, parts=False, dtype="fp32", quantization=quantization(kind), **options)
    for module in loaded.family.base.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            # Packing for CPUs needs whole blocks, but tiny layers are narrower than one: switch it
            # off.
            module.support_avx512bf16_for_cpu = False
    return loaded


@ranks(1)
@pytest.mark.parametrize("kind", ["int8", "nf4"])
@pytest.mark.parametrize("name", ["sdxl", "flux"])
def test_losses_on_a_quantized_base_equal_those_of_the_diffusers_scripts(folders, name, kind):
    loaded, plain = quantized(folders[name], kind), load(folders[name], parts=False)
    facts = [ModelFacts.from_module(each.family.base) for each in (loaded, plain)]
    assert facts[0].storages == (kind,)
    assert facts[0].weight_bytes(2) < 0.9 * facts[1].weight_bytes(2)
    # The ControlNet is copied from the exact weights, not from the quantized ones.
    pairs = zip(loaded.model.parameters(), plain.model.parameters(), strict=True)
    assert all(torch.equal(ours, exact) for ours, exact in pairs)
    losses = [compare_with_script(name, each) for each in (loaded, plain)]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)


def bits_of(module):
    """Return the stored bytes of all weights."""
    found = {}
    for name, parameter in module.named_parameters():
        stored = getattr(parameter, "qdata", parameter).detach().contiguous()
        found[name] = stored.view(torch.uint8).clone()
    return found


@pytest.mark.deepspeed
@ranks(1)
@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_training_leaves_a_quantized_base_unchanged_at_each_stage(folders, kind):
    found = []
    # DeepSpeed's own linear layer does not support torchao's tensors.
    whole = (*WHOLE, *([("memory_efficient_linear", False)] if kind == "int8" else []))
    for case in (PLAIN, Case(stage=2, offload="cpu"), Case(stage=3, overrides=whole)):
        loaded = quantized(folders["sd3"], kind)
        before, objective = bits_of(loaded.family.base), loaded.objective()
        engine = start(attrs.evolve(case, micro_batch=2, lr=1e-3), loaded.model)
        losses = []
        for step in range(3):
            torch.manual_seed(step)
            loss = objective(engine, batch(loaded, step=step), torch.Generator().manual_seed(step))
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        after = bits_of(loaded.family.base)
        assert all(torch.equal(after[name], bits) for name, bits in before.items())
        engine.close()
        found.append(losses)
    assert len(set(found[0])) == 3
    assert worst(found[1], found[0]) < 1e-6
    assert worst(found[2], found[0]) < 1e-6


def test_stage_3_with_torchao_requires_memory_efficient_linear_off(folders):
    given = {"family": "controlnet", "parts": False, "quantization": quantization("int8")}
    plan = DeepSpeedPlan.build(stage=3)
    with pytest.raises(InvalidValueError, match=r"TorchAoConfig.*memory_efficient_linear to false"):
        load_pretrained(folders["sd3"], plan=plan, **given)
    kept = DeepSpeedPlan.build(stage=3, memory_efficient_linear=False)
    for plan in (kept, DeepSpeedPlan.build(stage=2)):
        load_pretrained(folders["sd3"], plan=plan, **given)


# -- Loading and conditions.


def test_a_new_controlnet_changes_no_prediction(folders):
    loaded = load_pretrained(folders["sd3"], family="controlnet", frozen_dtype="fp32", parts=False)
    base, data = loaded.family.base, batch(loaded)
    known = loaded.family.conditioning(data, torch.Generator())
    with torch.no_grad():
        ours = loaded.family.predict(loaded.model, data["latents"], TIMES, known)
        alone = base(
            data["latents"], encoder_hidden_states=data["prompt_embeds"], timestep=TIMES,
            pooled_projections=data["pooled_prompt_embeds"], return_dict=False,
        )[0]  # fmt: skip
    assert torch.equal(ours, alone)
    assert base.config.num_layers == 2, "diffusers' constructor writes into its base"
    again = load_pretrained(folders["sd3"], family="controlnet", parts=False).model
    pairs = zip(loaded.model.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs), "equal on every rank"


def test_training_resumes_from_a_folder_or_from_a_whole_pipeline(folders, tmp_path):
    loaded = load(folders["flux"])
    loaded.model.save_pretrained(tmp_path / "controlnet")
    pipe = diffusers.FluxControlNetPipeline.from_pretrained(
        folders["flux"], controlnet=loaded.model
    )
    pipe.save_pretrained(tmp_path / "whole")
    found = [
        load_pretrained(folders["flux"], family="controlnet", controlnet=tmp_path / "controlnet"),
        load_pretrained(tmp_path / "whole"),
        load_pretrained(folders["flux"], family="FluxControlNet", controlnet=loaded.model),
    ]
    for each in found:
        assert type(each.family) is type(loaded.family)
        assert each.family.base.dtype == torch.bfloat16
        for ours, theirs in zip(each.model.parameters(), loaded.model.parameters(), strict=True):
            assert torch.equal(ours, theirs)


def test_a_missing_controlnet_or_condition_is_named(folders):
    with pytest.raises(InvalidValueError, match=r"StableDiffusionP.* has no declared ControlNet"):
        load_pretrained(folders["sd15"], family="controlnet")
    assert {family.pipeline for family in CONTROLNETS} <= set(FAMILIES)
    loaded = load_pretrained(folders["sdxl"], family="controlnet", parts=False)
    data = batch(loaded)
    del data["reference_images"]
    with pytest.raises(DataError, match="reference_images"):
        loaded.family.conditioning(data, torch.Generator())


@pytest.mark.parametrize("name", ["sdxl", "sd3"])
def test_cached_conditions_equal_those_of_images(folders, tmp_path, name):
    photos, edges = tmp_path / "photos", tmp_path / "edges"
    photos.mkdir()
    edges.mkdir()
    shades = np.random.default_rng(0).integers(0, 255, (4, 20, 28, 3), dtype=np.uint8)
    for number in (0, 1):
        Image.fromarray(shades[number]).save(photos / f"{number}.png")
        Image.fromarray(shades[2 + number]).save(edges / f"{number}.webp", lossless=True)
    images = PreparedImages(
        ImageFolder(photos, reference_folder=edges),
        buckets=AspectBuckets(area=16 * 16, step=8),
        augmentation=Augmentation(flip=0.5),
    )
    family = load_pretrained(folders[name], family="controlnet", frozen_dtype="fp32").family
    cached = encode_dataset(images, family=family, folder=tmp_path / "cache", progress=False)
    for use in (Draw(index=n, epoch=epoch) for n in (0, 1) for epoch in range(3)):
        seen = []
        for data in (images, cached):
            one = {k: v[None] for k, v in data[use].items() if isinstance(v, torch.Tensor)}
            one["captions"] = [""]
            seen.append(family.conditioning(one, torch.Generator())["reference_latents"])
        torch.testing.assert_close(*seen, rtol=0, atol=0 if name == "sdxl" else 1e-5)
    assert seen[0].std() > 0.1
