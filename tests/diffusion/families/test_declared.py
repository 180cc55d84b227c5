"""Declared families against hand-written calls and plain diffusers, and their refusals."""

from __future__ import annotations

import copy
import sys

import diffusers
import pytest
import torch
from diffusers import QwenImagePipeline
from PIL import Image

from tests.diffusion.families.training import example
from tests.support.declared_pipelines import MAKERS
from tests.support.sampling import sampled
from zerotune.diffusion import PipelineFamily, load_pretrained, sample
from zerotune.diffusion.models.declared import QwenImage, Wan, WanLowNoise, ZImage
from zerotune.diffusion.models.probe import probe
from zerotune.errors import DataError, InvalidValueError

TIMES = torch.tensor([731.25, 12.5])
PROMPTS = ["a cat", "the dog ran"]
SUITE = ("qwen-image", "wan22", "hidream", "aura-flow")
"""The others run nightly: packed, two experts, several texts, one sample at a time."""


@pytest.fixture(scope="module")
def bare(folders):
    """Return a function that loads a model and its family by name, without frozen parts."""
    known = {}

    def load(name, **options):
        key = (name, *options.values())
        if key not in known:
            known[key] = load_pretrained(folders[name], parts=False, **options)
        return known[key]

    return load


def tokens(latents):
    return QwenImagePipeline._pack_latents(latents, *latents.shape)


def untokens(prediction, like):
    return QwenImagePipeline._unpack_latents(prediction, like.shape[2], like.shape[3], 1)[:, :, 0]


def qwen_by_hand(model, noisy, known):
    rows = [(1, noisy.shape[2] // 2, noisy.shape[3] // 2)]
    output = model(
        hidden_states=tokens(noisy), timestep=TIMES / 1000, return_dict=False,
        encoder_hidden_states=known["prompt_embeds"],
        encoder_hidden_states_mask=known["prompt_embeds_mask"], img_shapes=[rows] * len(noisy),
    )[0]  # fmt: skip
    return untokens(output, noisy)


def z_image_by_hand(model, noisy, known):
    lengths = known["prompt_embeds_mask"].sum(1).tolist()
    texts = [text[:length] for text, length in zip(known["prompt_embeds"], lengths, strict=True)]
    output = model([x[:, None] for x in noisy], (1000 - TIMES) / 1000, texts, return_dict=False)[0]
    return -torch.stack([x[:, 0] for x in output])


def flux2_by_hand(model, noisy, known):
    pipe = diffusers.Flux2Pipeline
    output = model(
        hidden_states=pipe._pack_latents(noisy), timestep=TIMES / 1000, return_dict=False,
        guidance=torch.ones(1).expand(2), encoder_hidden_states=known["prompt_embeds"],
        txt_ids=pipe._prepare_text_ids(known["prompt_embeds"]),
        img_ids=pipe._prepare_latent_ids(noisy),
    )[0]  # fmt: skip
    return output.permute(0, 2, 1).reshape(noisy.shape)


def wan_by_hand(model, noisy, known):
    return model(noisy, TIMES, known["prompt_embeds"], return_dict=False)[0]


def sana_by_hand(model, noisy, known):
    return model(
        noisy, encoder_hidden_states=known["prompt_embeds"], timestep=TIMES,
        encoder_attention_mask=known["prompt_attention_mask"], return_dict=False,
    )[0]  # fmt: skip


def lumina2_by_hand(model, noisy, known):
    return -model(
        noisy, timestep=1 - TIMES / 1000, encoder_hidden_states=known["prompt_embeds"],
        encoder_attention_mask=known["prompt_attention_mask"], return_dict=False,
    )[0]  # fmt: skip


BY_HAND = {
    "qwen-image": qwen_by_hand,
    "z-image": z_image_by_hand,
    "flux2": flux2_by_hand,
    "wan": wan_by_hand,
    "sana": sana_by_hand,
    "lumina2": lumina2_by_hand,
}


@pytest.mark.parametrize("name", BY_HAND)
def test_predictions_equal_those_of_the_hand_written_call(bare, name):
    loaded = bare(name)
    model = loaded.model.eval()
    data = example(loaded.family, model, step=0, share=0)
    known = loaded.family.conditioning(data, torch.Generator())
    ours = loaded.family.predict(model, data["latents"], TIMES, known)
    theirs = BY_HAND[name](model, data["latents"], known)
    assert torch.equal(ours, theirs)
    gradients = [
        torch.autograd.grad(each.square().sum(), list(model.parameters()), allow_unused=True)
        for each in (ours, theirs)
    ]
    for one, other in zip(*gradients, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)
    assert ours.std() > 0.01
    assert (ours[0] - ours[1]).abs().max() > 1e-3


@pytest.mark.parametrize("shape", [(2, 4, 8, 8), (2, 4, 8, 12)])
def test_hidream_predicts_in_training_what_it_samples_with(bare, shape):
    loaded = bare("hidream")
    model, family = copy.deepcopy(loaded.model), loaded.family
    known = example(family, model, step=0, share=0)
    noisy = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        trained = family.predict(model.train(), noisy, TIMES, known)
        drawn = family.predict(model.eval(), noisy, TIMES, known)
    # HiDream runs experts token by token in training, on sorted tokens in evaluation.
    torch.testing.assert_close(trained, drawn, rtol=0, atol=1e-5)
    assert trained.std() > 0.01


# -- Sampling.


def plain_images(folder, name, *, steps, guidance, size, told):
    pipe = diffusers.DiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    if name == "hidream":
        # HiDream's pipeline scales every size to the area given by default_sample_size.
        pipe.default_sample_size = size[0] / pipe.vae_scale_factor
    drawn = torch.Generator().manual_seed(11)
    seeds = torch.randint(2**63 - 1, (2,), generator=drawn).tolist()
    negative = {"negative_prompt": ["ugly"] * 2} if guidance != told["unguided"] else {}
    given = {"num_frames": 5} if told["clips"] else {}
    told["guidance"] = {told["guided_by"]: guidance}
    if told["embedded_guidance_arg"]:
        told["guidance"][told["embedded_guidance_arg"]] = 1.0
    if told["references"] is not None:
        given |= {"image": told["references"] / 2 + 0.5, "max_area": size[0] * size[1]}
    output = pipe(
        prompt=list(PROMPTS), num_inference_steps=steps, height=size[0], width=size[1],
        generator=[torch.Generator().manual_seed(seed) for seed in seeds], output_type="pt",
        return_dict=False, **told["guidance"], **told["arguments"], **negative, **given,
    )[0]  # fmt: skip
    return (output.transpose(1, 2) if told["clips"] else output) * 2 - 1


@pytest.mark.parametrize(
    "name",
    sampled((name for name in MAKERS if "flux2" not in name and "edit" not in name), SUITE),
)
def test_images_equal_those_of_plain_diffusers(folders, name):
    loaded = load_pretrained(folders[name], frozen_dtype="fp32")
    family = loaded.family
    side = 8 * family.parts.scale
    references = None
    if family.reference is not None:
        references = torch.randn(
            2, 3, side, side, generator=torch.Generator().manual_seed(5)
        ).tanh()
    told = {
        "references": references, "embedded_guidance_arg": family.embedded_guidance_arg,
        "clips": family.clips, "guided_by": family.guided_by,
        "unguided": family.unguided,
        "arguments": family.arguments,
    }  # fmt: skip
    images = sample(
        loaded.model, family=family, prompts=PROMPTS, steps=2, guidance_scale=3.0,
        negative_prompt="ugly", size=(side, side), frames=5 if family.clips else None,
        references=references, generator=torch.Generator().manual_seed(11),
    )  # fmt: skip
    wanted = plain_images(folders[name], name, steps=2, guidance=3.0, size=(side, side), told=told)
    assert images.shape == wanted.shape
    # The pipeline encodes and decodes a whole batch, zerotune one sample at a time: rounding
    # differs.
    torch.testing.assert_close(images.clamp(-1, 1), wanted, rtol=0, atol=2e-5)
    assert (images[0] - images[1]).abs().max() > 0.01


def test_edited_images_equal_those_of_plain_diffusers(folders, monkeypatch):
    name, area = "qwen-image-edit", 64 * 64
    family = load_pretrained(folders[name], frozen_dtype="fp32", reference_area=area).family
    pipe = diffusers.DiffusionPipeline.from_pretrained(folders[name])
    pipe.set_progress_bar_config(disable=True)
    module = sys.modules[type(pipe).__module__]
    usual = module.calculate_dimensions
    # The pipeline's default is a megapixel, which would take too long.
    monkeypatch.setattr(module, "calculate_dimensions", lambda a, ratio: usual(min(a, area), ratio))
    drawn = torch.Generator().manual_seed(11)
    edited = torch.randint(0, 256, (2, 3, 24, 36), generator=drawn) / 127.5 - 1
    images = sample(
        pipe.transformer, family=family, prompts=PROMPTS, negative_prompt="ugly", steps=2,
        guidance_scale=3.0, size=(32, 48), references=edited,
        generator=torch.Generator().manual_seed(11),
    )  # fmt: skip
    seeds = torch.randint(2**63 - 1, (2,), generator=torch.Generator().manual_seed(11)).tolist()
    wanted = [
        pipe(
            image=to_pil_image(one), prompt=prompt, negative_prompt="ugly", true_cfg_scale=3.0,
            height=32, width=48, num_inference_steps=2, output_type="pt",
            generator=torch.Generator().manual_seed(seed),
        ).images
        for one, prompt, seed in zip(edited, PROMPTS, seeds, strict=True)
    ]  # fmt: skip
    torch.testing.assert_close(images.clamp(-1, 1), torch.cat(wanted) * 2 - 1, rtol=0, atol=2e-5)
    other = sample(
        pipe.transformer, family=family, prompts=PROMPTS, negative_prompt="ugly", steps=2,
        guidance_scale=3.0, size=(32, 48), references=-edited,
        generator=torch.Generator().manual_seed(11),
    )  # fmt: skip
    assert (images - other).abs().max() > 2e-4


def to_pil_image(image):
    return Image.fromarray(((image + 1) * 127.5).round().byte().permute(1, 2, 0).numpy())


# -- Declarations that loading refuses.


class Guided(QwenImage):
    """A pipeline that leaves guidance out although it is on by default."""

    pipeline = "SanaPipeline"
    text_tensors = ("prompt_embeds", "prompt_attention_mask")
    packing = PipelineFamily.packing
    guided_by = None
    arguments = {"use_resolution_binning": False, "negative_prompt": "", "guidance_scale": 4.5}


class NotPacked(QwenImage):
    packing = PipelineFamily.packing


class WrongArgument(QwenImage):
    arguments = {"no_such": 1}


class WithoutMask(ZImage):
    text_tensors = ("prompt_embeds",)


@pytest.mark.parametrize(
    ("name", "family", "reason"),
    [
        ("qwen-image", NotPacked, "cannot be trained through its pipeline"),
        ("qwen-image", WrongArgument, "no_such"),
        ("sana", Guided, "cannot be trained through its pipeline"),
        ("z-image", WithoutMask, r'set text_tensors = \("prompt_embeds", "prompt_embeds_mask"\)'),
    ],
)
def test_an_invalid_declaration_is_refused_with_the_reason(folders, name, family, reason):
    with pytest.raises(InvalidValueError, match=reason):
        load_pretrained(folders[name], parts=False, family=family)


def altered(monkeypatch, kind, change):
    """Replace the pipeline's ``__call__``."""

    def call(self, *args, **kwargs):
        return change(self, *args, **kwargs)

    call.__wrapped__ = change
    monkeypatch.setattr(kind, "__call__", call)


def test_a_pipeline_that_calls_the_model_twice_doubled_or_without_gradient_is_refused(
    bare, monkeypatch
):
    loaded = bare("wan")
    plain = diffusers.WanPipeline.__call__.__wrapped__

    def once_more(pipe, *, latents, prompt_embeds, **told):
        pipe.transformer(latents, pipe.scheduler.timesteps[0], prompt_embeds)
        return plain(pipe, latents=latents, prompt_embeds=prompt_embeds, **told)

    def doubled(pipe, *, latents, prompt_embeds, **_):
        both = (torch.cat([each, each]) for each in (latents, prompt_embeds))
        one, texts = both
        times = torch.cat([pipe.scheduler.timesteps[0]] * 2)
        pipe.scheduler.step(pipe.transformer(one, times, texts)[0].chunk(2)[0])

    def same_time(pipe, *, latents, prompt_embeds, **_):
        times = torch.full((2,), 5.0)
        pipe.scheduler.step(pipe.transformer(latents, times, prompt_embeds)[0])

    def without_gradient(pipe, *, latents, prompt_embeds, **_):
        with torch.no_grad():
            found = pipe.transformer(latents, pipe.scheduler.timesteps[0], prompt_embeds)[0]
        pipe.scheduler.step(found + torch.zeros((), requires_grad=True))

    def no_step(pipe, **_):
        return None

    for change, reason in (
        (once_more, "called 2 times"),
        (doubled, "receives 4 samples instead of 2"),
        (same_time, "does not receive a time step for each sample"),
        (without_gradient, "no gradient reaches the first block"),
        (no_step, "ended without calling scheduler.step"),
    ):
        altered(monkeypatch, diffusers.WanPipeline, change)
        with pytest.raises(InvalidValueError, match=reason):
            probe(loaded.family, loaded.model)
    altered(monkeypatch, diffusers.WanPipeline, plain)
    assert probe(loaded.family, loaded.model) == ()


def test_a_pipeline_that_reads_weights_gives_a_warning(bare, monkeypatch):
    loaded = bare("wan")
    plain = diffusers.WanPipeline.__call__.__wrapped__

    def looking(pipe, **told):
        float(pipe.transformer.proj_out.weight.sum())
        return plain(pipe, **told)

    altered(monkeypatch, diffusers.WanPipeline, looking)
    (decision,) = probe(loaded.family, loaded.model)
    assert decision.severity == "warning"
    assert "WanPipeline" in decision.reason


def test_a_family_without_its_pipeline_asks_for_load_pretrained():
    with pytest.raises(DataError, match="load_pretrained"):
        QwenImage().predict(torch.nn.Linear(1, 1), torch.zeros(1, 4, 8, 8), TIMES[:1], {})


# -- Properties of declarations.


def test_the_shift_of_a_sampling_only_scheduler_is_kept(folders):
    loaded = load_pretrained(folders["wan"], parts=False)
    assert loaded.scheduler.config.shift == 3.0
    (decision,) = [each for each in loaded.decisions if each.key == "scheduler"]
    assert "flow_shift=3" in decision.before
    trained = type(loaded.scheduler).from_config(loaded.scheduler.config, shift=7.0)
    from zerotune.diffusion.noise_schedule import drawing_scheduler

    drawn = drawing_scheduler(loaded.family.blueprint.scheduler, trained)
    assert isinstance(drawn, diffusers.UniPCMultistepScheduler)
    assert drawn.config.flow_shift == 7.0


def test_each_expert_is_trained_on_its_own_noise(bare):
    high, low = bare("wan22"), bare("wan22", family=WanLowNoise)
    assert isinstance(high.family, Wan)
    assert high.objective().timestep_range == (0.875, 1.0)
    assert low.objective().timestep_range == (0.0, 0.875)
    assert low.objective(timestep_range=(0.0, 0.5)).timestep_range == (0.0, 0.5)
    assert (high.component, low.component) == ("transformer", "transformer_2")
    one, other = (each.model.state_dict() for each in (high, low))
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_both_experts_sample_clips(folders):
    low = load_pretrained(folders["wan22"], frozen_dtype="fp32", family=WanLowNoise)
    assert "transformer" in low.family.parts.modules
    alone = load_pretrained(folders["wan22"], frozen_dtype="fp32", leave_out=("transformer_2",))
    with pytest.raises(DataError, match="sampling needs both"):
        sample(alone.model, family=alone.family, prompts=["a"], steps=2, size=(16, 16), frames=3)


def test_texts_of_different_lengths_are_cached_padded_and_dropped(folders):
    loaded = load_pretrained(folders["z-image"], frozen_dtype="fp32")
    family = loaded.family
    assert isinstance(family, ZImage)
    both = family.encode_texts(PROMPTS)
    alone = [family.encode_texts([text]) for text in PROMPTS]
    lengths = [each["prompt_embeds"].shape[1] for each in alone]
    assert len(set(lengths)) == 2
    assert both["prompt_embeds_mask"].sum(1).tolist() == lengths
    remembered = family.remembered(PROMPTS[::-1], device=torch.device("cpu"))
    assert remembered["prompt_embeds_mask"].sum(1).tolist() == lengths[::-1]
    torch.testing.assert_close(
        remembered["prompt_embeds"][1, : lengths[0]], alone[0]["prompt_embeds"][0]
    )
    dropping = type(family)(parts=family.parts, dropout=1.0)
    batch = {"latents": torch.zeros(2, 4, 8, 8), **both}
    empty = family.encode_texts([""])["prompt_embeds"].shape[1]
    dropped = dropping.conditioning(batch, torch.Generator())
    assert dropped["prompt_embeds_mask"].sum(1).tolist() == [empty, empty]
    # Padding does not change the prediction.
    model, noisy = loaded.model.eval(), torch.randn(2, 4, 8, 8)
    with torch.no_grad():
        together = family.predict(model, noisy, TIMES, both)
        single = family.predict(model, noisy[:1], TIMES[:1], alone[0])
    torch.testing.assert_close(together[:1], single, rtol=0, atol=1e-5)


def test_latents_equal_those_of_the_pipelines(folders):
    flux2 = load_pretrained(folders["flux2"], frozen_dtype="fp32").family
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1)).tanh()
    latents = flux2.clean({"images": images})
    with torch.no_grad():
        theirs = flux2.parts.pipeline._encode_vae_image(images, None)
    torch.testing.assert_close(latents, theirs, rtol=0, atol=1e-6)
    wan = load_pretrained(folders["wan"], frozen_dtype="fp32").family
    clip = torch.randn(1, 3, 5, 16, 16, generator=torch.Generator().manual_seed(2)).tanh()
    given = wan.clean({"images": clip})
    vae = wan.parts.vae
    mean, deviation = (
        torch.tensor(vae.config[name]).view(1, 4, 1, 1, 1)
        for name in ("latents_mean", "latents_std")
    )
    with torch.no_grad():
        encoded = vae.encode(clip).latent_dist.mode()
        decoded = vae.decode(encoded).sample
    torch.testing.assert_close(given, (encoded - mean) / deviation)
    torch.testing.assert_close(wan.parts.decode_latents(given), decoded, rtol=0, atol=1e-5)
    assert wan.clean({"images": clip[:, :, 0]}).shape == (1, 4, 1, 8, 8)
