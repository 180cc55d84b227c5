"""Diffusion-DPO against diffusers' script, and with pairs of files."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler
from examples.recipes.preference import PreferenceObjective, PreferencePairs
from PIL import Image

from tests.diffusion.adapting import SAMPLES, SIZE, TOKENS, WIDTH, Adapted, tiny_sdxl
from tests.support.needs import needs
from zerotune.diffusion import (
    DenoisingObjective,
)
from zerotune.diffusion.data import (
    AspectBuckets,
    Augmentation,
    BucketStream,
    ImageFolder,
)
from zerotune.diffusion.data.order import Draw
from zerotune.diffusion.models.stable_diffusion import StableDiffusionXL
from zerotune.errors import DataError, InvalidValueError

needs("peft")

pytestmark = pytest.mark.nightly

BUCKETS = AspectBuckets(area=16 * 16, step=4)


def generator(seed=7):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def adapted():
    """Return a U-Net with non-zero adapters."""
    model = Adapted().model()
    torch.manual_seed(9)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1)
    return model


def pairs():
    random = generator(2000)
    latents = torch.randn(SAMPLES, 4, SIZE, SIZE, generator=random)
    return {
        "latents": latents,
        "rejected_latents": latents + torch.randn(latents.shape, generator=random),
        "prompt_embeds": torch.randn(SAMPLES, TOKENS, WIDTH, generator=random),
        "pooled_prompt_embeds": torch.randn(SAMPLES, WIDTH, generator=random),
    }


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def dpo_script(unet, data, *, prediction, beta_dpo):
    """Compute the loss of research_projects/diffusion_dpo/train_diffusion_dpo_sdxl.py."""
    scheduler = DDPMScheduler(prediction_type=prediction)
    random = generator()
    latents = torch.cat([data["latents"], data["rejected_latents"]])
    bsz = latents.shape[0] // 2
    noise = torch.randn(data["latents"].shape, generator=random).repeat(2, 1, 1, 1)
    timesteps = torch.randint(0, 1000, (bsz,), generator=random).repeat(2)
    noisy_model_input = scheduler.add_noise(latents, noise, timesteps)
    side = SIZE * 8
    add_time_ids = torch.tensor([[side, side, 0, 0, side, side]] * bsz).repeat(2, 1)
    prompt_embeds = data["prompt_embeds"].repeat(2, 1, 1)
    added = {
        "time_ids": add_time_ids,
        "text_embeds": data["pooled_prompt_embeds"].repeat(2, 1),
    }
    target = noise
    if prediction == "v_prediction":
        target = scheduler.get_velocity(latents, noise, timesteps)

    def errors():
        model_pred = unet(
            noisy_model_input, timesteps, prompt_embeds, added_cond_kwargs=added
        ).sample
        losses = torch.nn.functional.mse_loss(model_pred, target, reduction="none")
        return losses.mean(dim=[1, 2, 3]).chunk(2)

    model_losses_w, model_losses_l = errors()
    model_diff = model_losses_w - model_losses_l
    unet.disable_adapters()
    with torch.no_grad():
        ref_losses_w, ref_losses_l = errors()
        ref_diff = ref_losses_w - ref_losses_l
    unet.enable_adapters()
    scale_term = -0.5 * beta_dpo
    inside_term = scale_term * (model_diff - ref_diff)
    return -1 * torch.nn.functional.logsigmoid(inside_term).mean()


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_the_loss_equals_that_of_the_diffusers_dpo_script(adapted, prediction, copied):
    theirs = dpo_script(adapted, pairs(), prediction=prediction, beta_dpo=300)
    wanted = gradients(adapted, theirs)
    objective = PreferenceObjective(
        objective=DenoisingObjective(
            scheduler=DDPMScheduler(prediction_type=prediction), family=StableDiffusionXL()
        ),
        beta=300,
        reference=tiny_sdxl() if copied else None,
    )
    trained = [name for name, each in adapted.named_parameters() if each.requires_grad]
    ours = objective(adapted, pairs(), generator())
    assert abs(float(theirs.detach()) - 0.6931) > 1e-3, "the model differs from the reference"
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    found = gradients(adapted, ours)
    assert wanted.abs().max() > 0
    torch.testing.assert_close(found / wanted.abs().max(), wanted / wanted.abs().max())
    assert [name for name, each in adapted.named_parameters() if each.requires_grad] == trained
    assert not any(getattr(each, "_disable_adapters", False) for each in adapted.modules())


class Model(torch.nn.Module):
    """Predict some function of the input and its time."""

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.convolution = torch.nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, noisy, timesteps):
        self.noisy, self.timesteps = noisy, timesteps
        return (self.convolution(noisy) + timesteps.view(-1, 1, 1, 1) / 1000,)


def images(count=3):
    random = generator(1)
    shape = (count, 4, 8, 8)
    return {
        "images": torch.randn(shape, generator=random),
        "rejected_images": torch.randn(shape, generator=random),
    }


def test_invalid_objectives_references_and_batches_are_refused():
    inner = DenoisingObjective()
    for make, key, fix in (
        (lambda: PreferenceObjective(objective=lambda *_: 0), "objective", "loaded.objective"),
        (lambda: PreferenceObjective(objective=inner, beta=0), "PreferenceObjective.beta", ""),
        (lambda: PreferenceObjective(objective=inner, reference="sdxl"), "reference", "parts"),
    ):
        with pytest.raises(InvalidValueError) as caught:
            make()
        assert caught.value.key == key
        assert fix in (caught.value.fix or "")
    model, data = Model(1), images()
    with pytest.raises(InvalidValueError, match="no adapters"):
        PreferenceObjective(objective=inner)(model, data, generator())
    with pytest.raises(InvalidValueError, match="never differ"):
        PreferenceObjective(objective=inner, reference=model)(model, data, generator())
    objective = PreferenceObjective(objective=inner, reference=Model(2))
    with pytest.raises(DataError, match="no rejected images"):
        objective(model, {"images": data["images"]}, generator())
    smaller = {**data, "rejected_images": data["rejected_images"][..., :4]}
    with pytest.raises(DataError, match="PreferencePairs"):
        objective(model, smaller, generator())


# -- Pairs of files.


@pytest.fixture
def folders(tmp_path):
    """Write two folders of images; rejected ones differ in shape and suffix from their partners."""
    random = np.random.default_rng(0)
    sizes = {"a": (20, 20), "b": (30, 15), "c/d": (40, 40)}
    for kind, ending in (("liked", "png"), ("rejected", "jpg")):
        for name, (width, height) in sizes.items():
            path = tmp_path / kind / f"{name}.{ending}"
            path.parent.mkdir(parents=True, exist_ok=True)
            side = (width, height) if kind == "liked" else (height + 3, width)
            pixels = random.integers(0, 255, (*side[::-1], 3), dtype=np.uint8)
            Image.fromarray(pixels).save(path)
            if kind == "liked":
                path.with_suffix(".txt").write_text(f"a picture of {name}")
    return tmp_path


def of_files(folders, **settings):
    return PreferencePairs(
        ImageFolder(folders / "liked"),
        ImageFolder(folders / "rejected"),
        buckets=BUCKETS,
        **settings,
    )


def test_both_images_of_a_pair_share_size_caption_and_flip(folders):
    found = of_files(folders, augmentation=Augmentation(flip=0.5, seed=3))
    assert len(found) == 3
    flips = []
    for index in range(3):
        for epoch in range(8):
            draw = Draw(index=index, epoch=epoch)
            sample = found[draw]
            assert sample["images"].shape == sample["rejected_images"].shape
            assert sample["captions"].startswith("a picture of")
            for half, name in zip(found.sets.values(), ("images", "rejected_images"), strict=True):
                flip = half.augmentation.flips(draw)
                assert torch.equal(sample[name], half.tensors(index, flipped=flip)["images"])
                flips.append(flip)
    assert 0.2 < sum(flips) / len(flips) < 0.8
    for half in found.sets.values():  # Each image keeps its shape.
        for index, placed in enumerate(half.assignment.placements):
            assert placed.original == half.source.item(index).size
            ratios = [one / of for one, of in zip(placed.resized, placed.original, strict=True)]
            assert ratios[0] == pytest.approx(ratios[1], rel=0.1)
    stream = BucketStream(found, micro_batch_size=1)
    assert {"images", "rejected_images", "captions"} <= next(stream).keys()


def test_images_without_a_partner_are_named(folders):
    (folders / "rejected" / "b.jpg").unlink()
    with pytest.raises(DataError, match=r"no partner of the same name: b\."):
        of_files(folders)
