"""Loading model, family and scheduler from a folder, and the errors when that fails."""

from __future__ import annotations

import gc
import json
import shutil
import threading
from collections.abc import Iterator

import diffusers
import pytest
import torch
from diffusers import (
    CogVideoXDDIMScheduler,
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    EDMEulerScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    HeunDiscreteScheduler,
    LCMScheduler,
    StableDiffusion3Pipeline,
    UNet2DModel,
)

from tests.support import pipelines
from tests.support.models import tiny_unet
from zerotune.diffusion import (
    ClassConditional,
    DenoisingObjective,
    FlowMatchingObjective,
    load_pretrained,
)
from zerotune.diffusion.known_families import FAMILIES
from zerotune.diffusion.models.declared import Flux
from zerotune.diffusion.models.stable_diffusion import (
    StableDiffusion,
    StableDiffusion3,
    StableDiffusionXL,
)
from zerotune.errors import DataError, InvalidValueError, MissingDependencyError

KINDS = {"sd15": StableDiffusion, "sdxl": StableDiffusionXL, "sd3": StableDiffusion3, "flux": Flux}
NO_T5 = ("text_encoder_3", "tokenizer_3")


@pytest.fixture(autouse=True)
def loaders_end(nothing_leaks) -> Iterator[None]:
    """Wait for transformers' reader threads, which briefly outlive a failed load."""
    yield
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("ThreadPoolExecutor"):
            thread.join(timeout=120)


def edited(folder, target, **changes):
    """Copy a pipeline and edit its index; ``None`` removes an entry."""
    shutil.copytree(folder, target)
    index = json.loads((target / "model_index.json").read_text()) | changes
    kept = {name: entry for name, entry in index.items() if entry is not None}
    (target / "model_index.json").write_text(json.dumps(kept))
    return target


@pytest.mark.parametrize("name", KINDS)
def test_a_folder_provides_everything_that_training_needs(folders, name):
    loaded = load_pretrained(folders[name], dropout=0.25)
    family, parts = loaded.family, loaded.family.parts
    assert type(family) is KINDS[name] is FAMILIES[family.pipeline]
    assert family.dropout == 0.25
    assert loaded.component == family.component
    assert loaded.model.training
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float32}
    assert all(p.requires_grad for p in loaded.model.parameters())
    assert not any(p.requires_grad for m in parts.modules.values() for p in m.parameters())
    assert not any(module.training for module in parts.modules.values())
    kept = type(loaded.model).from_pretrained(folders[name], subfolder=family.component)
    assert all(map(torch.equal, kept.state_dict().values(), loaded.model.state_dict().values()))
    flow = name in ("sd3", "flux")
    assert isinstance(loaded.scheduler, FlowMatchEulerDiscreteScheduler if flow else DDPMScheduler)
    objective = loaded.objective()
    assert isinstance(objective, FlowMatchingObjective if flow else DenoisingObjective)
    assert objective.family is family
    if flow:
        assert objective.density == "logit_normal"
        assert loaded.objective(density="uniform").density == "uniform"


@pytest.mark.parametrize("name", KINDS)
def test_the_model_has_the_layers_that_its_family_names(folders, name):
    model = load_pretrained(folders[name], parts=False).model
    layers = [n for n, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    for target in KINDS[name].lora_targets:
        assert any(layer.endswith(f".{target}") for layer in layers), target
    assert hasattr(model, "enable_gradient_checkpointing")


def test_the_overflowing_vae_stays_in_fp32_and_a_decision_says_so(folders):
    loaded = load_pretrained(folders["sdxl"])
    assert loaded.family.parts.vae.dtype == torch.float32
    assert {m.dtype for m in loaded.family.parts.text_encoders.values()} == {torch.bfloat16}
    _, decision = loaded.decisions
    assert (decision.key, decision.before, decision.after) == ("vae.dtype", "bfloat16", "float32")
    assert len(load_pretrained(folders["sdxl"], frozen_dtype="fp32").decisions) == 1
    assert load_pretrained(folders["sd15"]).family.parts.vae.dtype == torch.bfloat16


def with_scheduler(folder, target, scheduler):
    """Copy a pipeline's folder with another scheduler."""
    copied = edited(folder, target)
    scheduler.save_pretrained(copied / "scheduler")
    return copied


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (EulerDiscreteScheduler, {"beta_schedule": "scaled_linear", "beta_end": 0.012}),
        (DPMSolverMultistepScheduler, {"rescale_betas_zero_snr": True}),
        # The defaults of this scheduler differ from DDPM's.
        (LCMScheduler, {}),
    ],
)
def test_ddpm_replaces_schedulers_that_add_the_same_noise(folders, tmp_path, kind, settings):
    scheduler = kind(prediction_type="v_prediction", **settings)
    loaded = load_pretrained(
        with_scheduler(folders["sd15"], tmp_path / "copied", scheduler), parts=False
    )
    assert type(loaded.scheduler) is DDPMScheduler
    assert loaded.scheduler.config.prediction_type == "v_prediction"
    (decision,) = loaded.decisions
    assert (decision.before, decision.after) == (kind.__name__, "DDPMScheduler")
    objective = loaded.objective()
    torch.testing.assert_close(
        objective._adding.alphas_cumprod, scheduler.alphas_cumprod, rtol=1e-3, atol=1e-6
    )
    direct = DenoisingObjective(scheduler=scheduler)._adding.alphas_cumprod
    torch.testing.assert_close(direct, scheduler.alphas_cumprod, rtol=1e-3, atol=1e-6)


def test_a_scheduler_with_another_noise_schedule_is_used_for_training(folders, tmp_path):
    settings = {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True}
    scheduler = CogVideoXDDIMScheduler(snr_shift_scale=3.0, **settings)
    folder = with_scheduler(folders["sd15"], tmp_path / "copied", scheduler)
    loaded = load_pretrained(folder, parts=False)
    assert type(loaded.scheduler) is CogVideoXDDIMScheduler
    objective = loaded.objective()
    assert torch.equal(objective._adding.alphas_cumprod, scheduler.alphas_cumprod)
    assert float(objective._adding.alphas_cumprod[500]) == pytest.approx(0.0953, rel=1e-2)
    (decision,) = loaded.decisions
    assert (decision.before, decision.after) == ("DDPMScheduler", "CogVideoXDDIMScheduler")


def test_an_edm_base_keeps_its_scheduler_for_the_recipe(folders, tmp_path):
    folder = with_scheduler(folders["sdxl"], tmp_path / "edm", EDMEulerScheduler())
    loaded = load_pretrained(folder, parts=False)
    assert type(loaded.scheduler) is EDMEulerScheduler
    with pytest.raises(InvalidValueError, match="recipes/edm"):
        loaded.objective()


def test_schedulers_that_denoising_cannot_use_are_refused(folders, tmp_path):
    folder = with_scheduler(folders["sdxl"], tmp_path / "flow", FlowMatchEulerDiscreteScheduler())
    with pytest.raises(InvalidValueError, match=r"'FlowMatchEulerDiscr.*has no alphas_cumprod"):
        load_pretrained(folder, parts=False)
    path = folder / "scheduler" / "scheduler_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"_class_name": "MyScheduler"}))
    with pytest.raises(InvalidValueError, match=r"scheduler_config\.json: _class_name = 'MySch"):
        load_pretrained(folder, parts=False)
    # This scheduler only samples, and DDPM has no such beta schedule.
    exponential = HeunDiscreteScheduler(beta_schedule="exp")
    folder = with_scheduler(folders["sdxl"], tmp_path / "heun", exponential)
    with pytest.raises(InvalidValueError, match="has a different noise schedule"):
        load_pretrained(folder, parts=False)
    with pytest.raises(InvalidValueError, match="a different noise schedule"):
        DenoisingObjective(scheduler=exponential)


def test_parts_can_be_left_out(folders):
    bare = load_pretrained(folders["flux"], parts=False)
    assert bare.family.parts is None
    with pytest.raises(DataError, match="Flux has neither a VAE nor text encoders"):
        bare.family.encode_texts(["a"])
    silent = load_pretrained(folders["flux"], leave_out=("text_encoder_2", "tokenizer_2"))
    assert list(silent.family.parts.text_encoders) == ["text_encoder"]
    blind = load_pretrained(folders["sdxl"], leave_out=("vae",))
    assert blind.family.encode_texts(["a"])["prompt_embeds"].shape == (1, 16, 64)
    with pytest.raises(DataError, match="without its VAE"):
        blind.family.encode_images(torch.zeros(1, 3, 16, 16))
    mute = load_pretrained(folders["sd15"], leave_out=("text_encoder", "tokenizer"))
    assert mute.family.encode_images(torch.zeros(1, 3, 16, 16))["latents"].shape == (1, 4, 8, 8)
    with pytest.raises(DataError, match="without text encoders"):
        mute.family.encode_texts(["a"])
    with pytest.raises(InvalidValueError, match="leave_out = 'text_encoder_9'"):
        load_pretrained(folders["sdxl"], leave_out=("text_encoder_9",))


def test_sd3_trains_with_and_without_t5(folders, tmp_path):
    pipe = StableDiffusion3Pipeline.from_pretrained(
        folders["sd3"], text_encoder_3=None, tokenizer_3=None, image_encoder=None,
        feature_extractor=None,
    )  # fmt: skip
    without = load_pretrained(folders["sd3"], frozen_dtype="fp32").family
    assert without.encode_texts(["a cat"])["prompt_embeds"][:, 16:].abs().max() == 0
    pipe.register_modules(text_encoder_3=_widened(), tokenizer_3=pipelines.t5_tokenizer())
    pipe.save_pretrained(tmp_path / "t5")
    told = load_pretrained(tmp_path / "t5", max_sequence_length=8, frozen_dtype="fp32").family
    embeds = told.encode_texts(["a cat"])["prompt_embeds"]
    assert embeds.shape == (1, 16 + 8, 64)
    assert embeds[:, 16:].abs().max() > 0
    again = load_pretrained(tmp_path / "t5", leave_out=NO_T5, frozen_dtype="fp32").family
    assert torch.equal(
        again.encode_texts(["a cat"])["prompt_embeds"],
        without.encode_texts(["a cat"])["prompt_embeds"],
    )
    assert told.text_settings() != again.text_settings()


def _widened():
    from transformers import T5Config, T5EncoderModel

    torch.manual_seed(2)
    return T5EncoderModel(
        T5Config(vocab_size=32, d_model=64, d_ff=37, d_kv=8, num_layers=1, num_heads=4)
    )


def test_unneeded_components_are_not_loaded_but_are_exported(folders, tmp_path):
    # SD 1.5 ships a safety checker of 1.2 GB, which neither training nor sampling needs.
    checked = edited(
        folders["sd15"], tmp_path / "checked", requires_safety_checker=True,
        safety_checker=["stable_diffusion", "StableDiffusionSafetyChecker"],
        feature_extractor=["transformers", "CLIPImageProcessor"],
    )  # fmt: skip
    parts = load_pretrained(checked).family.parts
    assert set(parts.modules) == {"vae", "text_encoder"}


def test_a_variant_is_loaded_from_its_own_files(folders, tmp_path):
    pipe = diffusers.StableDiffusionPipeline.from_pretrained(folders["sd15"], safety_checker=None)
    pipe.save_pretrained(tmp_path / "half", variant="fp16")
    loaded = load_pretrained(tmp_path / "half", variant="fp16", dtype="bf16")
    assert loaded.model.dtype == torch.bfloat16
    with pytest.raises(InvalidValueError, match="pass a variant="):
        load_pretrained(tmp_path / "half")
    with pytest.raises(InvalidValueError, match="cannot be loaded"):
        load_pretrained(folders["sd15"], variant="fp16")


@pytest.mark.parametrize(
    ("missing", "parts"), [("unet", False), ("text_encoder", True), ("scheduler", False)]
)
def test_missing_components_are_named_in_the_error(folders, tmp_path, missing, parts):
    broken = edited(folders["sdxl"], tmp_path / "broken")
    shutil.rmtree(broken / missing)
    with pytest.raises(InvalidValueError, match="cannot be loaded") as error:
        load_pretrained(broken, parts=parts)
    assert str(broken) in str(error.value.value)


def test_folders_without_a_pipeline_are_refused(folders, tmp_path):
    with pytest.raises(InvalidValueError, match="neither a local folder nor a pipeline"):
        load_pretrained("nobody/nothing", local_files_only=True)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidValueError, match=r"config\.json"):
        load_pretrained(tmp_path / "empty")
    with pytest.raises(InvalidValueError, match="folder of a complete pipeline"):
        load_pretrained(folders["sdxl"] / "unet")
    unknown = edited(folders["sdxl"], tmp_path / "new", _class_name="BrandNewPipeline")
    with pytest.raises(InvalidValueError, match=r"no known family.*StableDiffusionXLPipeline"):
        load_pretrained(unknown)
    assert load_pretrained(unknown, family=StableDiffusionXL, parts=False).component == "unet"
    with pytest.raises(InvalidValueError, match="does not contain this model"):
        load_pretrained(folders["sdxl"], family=StableDiffusion3)
    (tmp_path / "new" / "model_index.json").write_text("{")
    with pytest.raises(InvalidValueError, match="cannot be loaded"):
        load_pretrained(unknown)
    with pytest.raises(InvalidValueError, match="dtype = 'int8'"):
        load_pretrained(folders["sdxl"], dtype="int8")
    with pytest.raises(InvalidValueError, match="dropout"):
        load_pretrained(folders["sdxl"], parts=False, dropout=2.0)


def test_a_single_unet_folder_is_loaded_too(tmp_path):
    model = tiny_unet()
    model.save_pretrained(tmp_path / "classes")
    loaded = load_pretrained(tmp_path / "classes", null_label=10, dropout=0.1)
    assert isinstance(loaded.model, UNet2DModel)
    assert loaded.family == ClassConditional(null_label=10, dropout=0.1)
    assert loaded.component is None


def test_a_missing_transformers_is_named(folders, monkeypatch):
    def refuse(*_, **__):
        raise ImportError("no transformers")

    monkeypatch.setattr(diffusers.StableDiffusionXLPipeline, "from_pretrained", refuse)
    with pytest.raises(MissingDependencyError, match="pip install transformers"):
        load_pretrained(folders["sdxl"])
