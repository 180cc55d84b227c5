"""Adapters in one or several models: trained parameters and refused settings."""

from __future__ import annotations

import sys

import pytest
import torch

from tests.diffusion.adapting import tiny_clip, tiny_sd3, tiny_sdxl
from tests.support.needs import needs
from zerotune.backend.adapters import AdapterParameter
from zerotune.backend.trained_parts import TrainedParts, components
from zerotune.diffusion import LoRA, add_lora, load_adapters
from zerotune.errors import (
    CheckpointError,
    CheckpointMismatchError,
    InvalidValueError,
    MissingDependencyError,
)

needs("peft")


def trained(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def test_only_adapters_are_trained_and_they_are_counted():
    model = tiny_sd3()
    base = sum(p.numel() for p in model.parameters())
    facts = add_lora(model, LoRA(rank=4, alpha=8))
    found = trained(model)
    assert facts.tensors == len(found) == 2 * len(facts.layers) == 30
    assert facts.trained == sum(p.numel() for p in found.values())
    assert facts.total == base + facts.trained
    assert facts.share == facts.trained / facts.total
    assert all(AdapterParameter.parse(name).adapter == "default" for name in found)
    (told,) = facts.decisions
    assert told.key == "LoRA.targets"
    assert set(told.after) >= {"to_q", "to_out.0", "add_k_proj", "to_add_out"}
    assert "4.71%" in str(facts)


def test_peft_gets_the_requested_settings():
    model = tiny_sdxl()
    lora = LoRA(
        rank=4,
        alpha=6,
        dropout=0.1,
        targets=("to_q", "conv1"),
        exclude=("mid_block.attentions.0.transformer_blocks.0.attn1.to_q",),
        dora=True,
        rank_pattern={"conv1": 2},
        alpha_pattern={"conv1": 3},
        init="gaussian",
    )
    facts = add_lora(model, lora, name="style")
    config = model.peft_config["style"]
    assert (config.r, config.lora_alpha, config.lora_dropout) == (4, 6, 0.1)
    assert (config.use_dora, config.init_lora_weights) == (True, "gaussian")
    assert facts.name == "style"
    excluded = model.get_submodule(lora.exclude[0])
    assert not hasattr(excluded, "lora_A")
    layer = model.get_submodule("mid_block.resnets.0.conv1")
    assert (layer.r["style"], layer.scaling["style"]) == (2, 1.5)
    assert (
        model.get_submodule("mid_block.attentions.0.transformer_blocks.0.attn2.to_q").scaling[
            "style"
        ]
        == 1.5
    )
    assert {name.rpartition(".lora_")[2].split(".")[0] for name in trained(model)} == {
        "A",
        "B",
        "magnitude_vector",
    }


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("LoraConfig", {"r": 4, "lora_alpha": 6, "lora_dropout": 0.1, "use_rslora": True,
                        "init_lora_weights": "gaussian", "rank_pattern": {"attn.to_q": 2}}),
        ("LoKrConfig", {"r": 3, "alpha": 5, "decompose_factor": 4, "decompose_both": True}),
        ("LoHaConfig", {"r": 3, "alpha": 5}),
        ("OFTConfig", {"oft_block_size": 4}),
    ],
)  # fmt: skip
def test_a_peft_configuration_is_used_unchanged(kind, settings):
    import peft

    given = getattr(peft, kind)(
        target_modules=["to_q", "to_k"], exclude_modules=["add_q_proj"], **settings
    )
    mine, theirs = tiny_sd3(), tiny_sd3()
    theirs.add_adapter(given)
    add_lora(mine, given)
    config = mine.peft_config["default"]
    assert config.target_modules == {"to_q", "to_k"}
    assert {name: getattr(config, name) for name in settings} == settings
    assert {n: p.shape for n, p in mine.named_parameters()} == {
        n: p.shape for n, p in theirs.named_parameters()
    }
    assert set(trained(mine)) == set(trained(theirs))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"bias": "all"},
            r"LoraConfig\.bias = 'all': is not supported.*leave bias at 'none'",
        ),
        ({"modules_to_save": ["conv_in"]}, r"LoraConfig\.modules_to_save"),
        ({"init_lora_weights": "pissa"}, r"LoraConfig\.init_lora_weights = 'pissa'"),
        ({"lora_alpha": 0}, r"LoraConfig\.lora_alpha = 0"),
    ],
)
def test_a_peft_setting_that_exports_would_lose_is_refused_by_name(settings, message):
    import peft

    with pytest.raises(InvalidValueError, match=message):
        add_lora(tiny_sd3(), peft.LoraConfig(target_modules=["to_q"], **settings))


def test_an_untrainable_kind_of_peft_configuration_is_refused_by_name():
    import peft

    with pytest.raises(InvalidValueError, match=r"lora = 'IA3Config'.*LoraConfig"):
        add_lora(tiny_sd3(), peft.IA3Config())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_adapters_are_fp32_whatever_the_precision_of_the_base(dtype):
    model = tiny_sd3().to(dtype)
    add_lora(model)
    assert {p.dtype for p in trained(model).values()} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {dtype}


def test_the_base_is_cast_when_requested():
    model = tiny_sd3()
    facts = add_lora(model, LoRA(rank=2, targets="transformer_blocks.*to_q"), base_dtype="bf16")
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
    assert {p.dtype for p in trained(model).values()} == {torch.float32}
    (told,) = facts.decisions
    assert (told.key, told.before, told.after) == ("model.base.dtype", "float32", "bfloat16")
    with pytest.raises(InvalidValueError, match="not a dtype for weights"):
        add_lora(tiny_sd3(), base_dtype="int8")


def test_adapters_can_be_added_to_text_encoders():
    for projection in (False, True):
        facts = add_lora(tiny_clip(projection=projection), LoRA(rank=2))
        assert len(facts.layers) == 8


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (
            {"targets": ("to_q", "to_qq")},
            r"LoraConfig.target_modules = 'to_qq'.*did you mean 'to_q'",
        ),
        ({"targets": "conv.*z"}, r"LoraConfig.target_modules = 'conv.\*z'"),
        ({"targets": "("}, "not a valid regular expression"),
        ({"exclude": ("nothing",)}, "LoraConfig.exclude_modules = 'nothing'"),
        ({"rank_pattern": {"to_x": 2}}, "LoraConfig.rank_pattern = 'to_x'.*did you mean"),
        ({"alpha_pattern": {"mid.*zz": 2}}, "LoraConfig.alpha_pattern = 'mid.*zz'"),
    ],
)
def test_targets_without_a_match_are_refused(lora, message):
    model = tiny_sdxl()
    with pytest.raises(InvalidValueError, match=message):
        add_lora(model, LoRA(**lora))
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    ("lora", "key"),
    [
        ({"rank": 0}, "LoRA.rank"),
        ({"rank": True}, "LoRA.rank"),
        ({"alpha": -1}, "LoRA.alpha"),
        ({"dropout": 1.0}, "LoraConfig.lora_dropout"),
        ({"init": "pissa"}, "LoraConfig.init_lora_weights"),
    ],
)
def test_values_out_of_range_are_refused(lora, key):
    with pytest.raises(InvalidValueError) as caught:
        add_lora(tiny_sd3(), LoRA(**lora))
    assert caught.value.key == key


def test_adding_adapters_leaves_earlier_ones_active(tmp_path):
    model = tiny_sd3()
    add_lora(model)
    for again in (lambda: add_lora(model, name="other"), lambda: load_adapters(model, ".")):
        with pytest.raises(InvalidValueError, match="already has adapters"):
            again()
    assert {AdapterParameter.parse(name).adapter for name in trained(model)} == {"default"}


def test_a_model_without_attention_requires_explicit_targets():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
    with pytest.raises(InvalidValueError, match="no known attention projections"):
        add_lora(model)
    assert add_lora(model, LoRA(rank=2, targets=("0", "2"))).tensors == 4


def test_a_missing_peft_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingDependencyError, match=r"^peft: is required.*zerotune\[lora\]"):
        add_lora(tiny_sd3())


def test_names_in_files_equal_those_of_peft():
    from peft import get_peft_model_state_dict

    model = tiny_clip()
    add_lora(model, LoRA(rank=2, targets=("token_embedding", "fc1")), name="x")
    ours = {AdapterParameter.parse(name).key for name in trained(model)}
    theirs = get_peft_model_state_dict(model, adapter_name="x", save_embedding_layers=False)
    assert ours == set(theirs)


def test_trained_parts_are_called_by_name():
    parts = TrainedParts(unet=torch.nn.Linear(3, 2), text_encoder=torch.nn.Linear(5, 3))
    x = torch.ones(1, 5)
    hidden = parts(x, part="text_encoder")
    assert torch.equal(parts(hidden), parts["unet"](parts["text_encoder"](x)))
    assert parts.names == ("unet", "text_encoder")
    assert parts.primary is parts["unet"]
    assert set(dict(parts.named_parameters())) == {
        "unet.weight",
        "unet.bias",
        "text_encoder.weight",
        "text_encoder.bias",
    }
    assert components(parts) == {
        "unet": ("unet.", parts["unet"]),
        "text_encoder": ("text_encoder.", parts["text_encoder"]),
    }
    for wrong in ("vae", "weight"):
        with pytest.raises(InvalidValueError, match="use one of unet, text_encoder"):
            parts(x, part=wrong)


def test_invalid_trained_parts_are_refused():
    layer = torch.nn.Linear(1, 1)
    for parts in ({}, {"forward": layer}, {"part": layer}, {"a": layer, "b": layer}):
        with pytest.raises(InvalidValueError):
            TrainedParts(**parts)
    with pytest.raises(InvalidValueError, match="to a single model"):
        add_lora(TrainedParts(unet=layer))


def test_trained_parts_forward_the_attributes_of_the_first():
    parts = TrainedParts(unet=tiny_sdxl(), text_encoder=tiny_clip())
    assert parts.config.in_channels == 4
    assert parts.dtype == torch.float32
    parts.enable_gradient_checkpointing()
    assert parts["unet"].is_gradient_checkpointing
    assert any(getattr(m, "gradient_checkpointing", False) for m in parts["text_encoder"].modules())


def test_the_component_follows_from_the_class_or_must_be_named():
    assert list(components(tiny_sd3())) == ["transformer"]
    assert list(components(tiny_sdxl())) == ["unet"]
    assert list(components(tiny_clip(), "text_encoder_2")) == ["text_encoder_2"]
    with pytest.raises(InvalidValueError, match="text_encoder"):
        components(tiny_clip())


def test_mismatched_files_are_refused(tmp_path):
    from diffusers import StableDiffusionXLPipeline
    from peft import get_peft_model_state_dict

    model = tiny_sdxl()
    add_lora(model, LoRA(rank=2))
    StableDiffusionXLPipeline.save_lora_weights(
        tmp_path, unet_lora_layers=get_peft_model_state_dict(model)
    )
    with pytest.raises(CheckpointMismatchError, match=r"no adapters for 'transformer', only.*unet"):
        load_adapters(tiny_sd3(), tmp_path)
    with pytest.raises(CheckpointMismatchError):
        load_adapters(tiny_sdxl(wide=64), tmp_path)
    with pytest.raises(CheckpointError, match="LoRA file does not exist"):
        load_adapters(tiny_sdxl(), tmp_path / "nowhere")
