"""Weights that stay in their files until the engine reads them."""

from __future__ import annotations

import json
import os
import shutil
from types import SimpleNamespace
from typing import Any
from unittest import mock

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support import declared_pipelines, pipelines
from tests.support.memory import Peak, needs_mallinfo
from tests.support.models import tiny_unet
from tests.support.needs import needs
from tests.support.ranks import ranks, run_ranks
from tests.support.runs import PLAIN, Case, start, unet_loss
from tests.support.sampling import nightly
from zerotune import DeepSpeedPlan
from zerotune.backend.checks import check_quantized
from zerotune.diffusion import LoRA, add_lora, load_pretrained
from zerotune.errors import (
    CheckpointCorruptError,
    DataError,
    EngineError,
    InvalidValueError,
    MissingDependencyError,
)
from zerotune.plan import ModelFacts

PLAN = DeepSpeedPlan.build(stage=3, precision="bf16")
FILE = "diffusion_pytorch_model.safetensors"
SHARDS = "70KB"


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    folder = tmp_path_factory.mktemp("single")
    tiny_unet().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    tiny_unet().save_pretrained(folder, max_shard_size=SHARDS)
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.fixture
def copied(single, tmp_path):
    return shutil.copytree(single, tmp_path / "copied")


def is_waiting(model):
    return all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("kind", ["single", "sharded", "variant"])
def test_meta_weights_load_later_with_the_values_of_the_files(kind, request, tmp_path):
    if kind == "variant":
        folder, variant = tmp_path, "fp16"
        tiny_unet().half().save_pretrained(folder, variant=variant, max_shard_size="50KB")
    else:
        folder, variant = request.getfixturevalue(kind), None
    whole = load_pretrained(folder, variant=variant)
    loaded = load_pretrained(folder, variant=variant, plan=PLAN)
    assert is_waiting(loaded.model)
    assert loaded.model.training
    assert str(dict(loaded.model.config)) == str(
        dict(whole.model.config) | {"_name_or_path": str(folder)}
    )
    (decision,) = loaded.decisions
    assert (decision.key, decision.before) == ("model.weights", "read whole on every rank")
    read = loaded.read_weights()
    assert read is loaded.model
    state = read.state_dict()
    assert state.keys() == whole.model.state_dict().keys()
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    again = load_pretrained(folder, variant=variant, plan=PLAN).read_weights(dtype="bf16")
    assert {parameter.dtype for parameter in again.parameters()} == {torch.bfloat16}
    assert torch.equal(again.conv_in.weight, whole.model.conv_in.weight.bfloat16())
    assert again.conv_in.weight.requires_grad


def test_the_configuration_of_the_vae_is_needed_without_the_vae(tmp_path):
    folder = pipelines.sd15(tmp_path / "sd15")
    (folder / "vae" / "config.json").unlink()
    with pytest.raises(DataError, match=r"vae/config\.json.*reads sizes from it"):
        load_pretrained(folder, parts=False)


def test_the_name_of_a_family_whose_parts_the_folder_lacks_is_refused(tmp_path):
    folder = pipelines.sd15(tmp_path / "sd15")
    expected = (
        "family = 'sdxl': is for pipelines with text_encoder_2, tokenizer_2, which this "
        "StableDiffusionPipeline lacks"
    )
    with pytest.raises(InvalidValueError, match=expected):
        load_pretrained(folder, family="sdxl")
    assert load_pretrained(folder, family="sd21").component == "unet"


def test_buffers_have_their_values_immediately(tmp_path):
    folder = declared_pipelines.pixart_sigma(tmp_path / "pixart")
    loaded = load_pretrained(folder, plan=PLAN, parts=False)
    whole = dict(load_pretrained(folder, parts=False).model.named_buffers())
    buffers = dict(loaded.model.named_buffers())
    assert buffers
    assert all(torch.equal(buffers[name], whole[name]) for name in whole)
    assert is_waiting(loaded.model)


def edit(folder, change):
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file(tensors, folder / FILE)


@pytest.mark.parametrize("plan", [None, PLAN])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("conv_in.bias"), r"lacks weights of the model: conv_in\.bias"),
        (lambda t: t.update({"more": torch.zeros(2)}), "that the model does not have: more"),
        (lambda t: t.update({"conv_in.bias": torch.zeros(5)}), r"conv_in\.bias"),
    ],
)
def test_files_with_missing_or_misshapen_weights_are_refused(copied, plan, change, message):
    edit(copied, change)
    with pytest.raises(InvalidValueError, match=message) as caught:
        load_pretrained(copied, plan=plan)
    assert str(copied) in str(caught.value)
    assert "Fix: download the" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not a valid index"),
        ('{"weight_map": {}}', "names no shards"),
        ('{"weight_map": {"a": "../b.safetensors"}}', "missing shard"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "missing shard"),
        ('{"weight_map": {"a": 3}}', "is not a valid index"),
    ],
)
def test_an_inconsistent_shard_index_is_refused(copied, content, message):
    (copied / f"{FILE}.index.json").write_text(content)
    with pytest.raises(InvalidValueError, match=message):
        load_pretrained(copied, plan=PLAN)


def test_a_truncated_or_duplicated_shard_is_refused(sharded, tmp_path):
    folder = shutil.copytree(sharded, tmp_path / "model")
    index = folder / f"{FILE}.index.json"
    names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    os.truncate(folder / names[0], (folder / names[0]).stat().st_size - 1)
    with pytest.raises(InvalidValueError, match="should end at byte"):
        load_pretrained(folder, plan=PLAN)
    shutil.copy(sharded / names[1], folder / names[0])
    with pytest.raises(InvalidValueError, match=f"appears in both {names[0]} and {names[1]}"):
        load_pretrained(folder, plan=PLAN)


def test_a_file_that_changes_before_its_weights_are_read_is_noticed(copied):
    loaded = load_pretrained(copied, plan=PLAN)
    os.utime(copied / FILE, ns=(1, 1))
    with pytest.raises(CheckpointCorruptError, match="has changed since the model was loaded"):
        loaded.read_weights()


def test_other_file_formats_are_loaded_into_memory_with_a_decision(tmp_path):
    tiny_unet().save_pretrained(tmp_path, safe_serialization=False)
    loaded = load_pretrained(tmp_path, plan=PLAN)
    assert not is_waiting(loaded.model)
    (decision,) = loaded.decisions
    assert decision.severity == "warning"
    assert decision.after == "read whole on every rank, in fp32"
    resolved = PLAN.resolve(world_size=1)
    assert load_pretrained(tmp_path, plan=resolved).model.dtype == torch.bfloat16


def test_engines_refuse_a_copy_of_a_model_with_unread_weights(single):
    import copy

    model = copy.deepcopy(load_pretrained(single, plan=PLAN).model)
    with pytest.raises(EngineError, match="has neither values nor a file"):
        start(PLAIN, model)


# -- Engines.

ENGINES = {
    1: (PLAIN, Case(stage=2, offload="cpu", precision="bf16")),
    2: (
        Case(stage=3, precision="bf16", overrides=(("stage3_param_persistence_threshold", 0),)),
        Case(stage=3, offload="cpu", offload_param="cpu", engine="deepspeed"),
    ),
}


def trained(case: Case, model: Any, steps: int = 2) -> tuple[list[float], dict[str, Any], str]:
    engine = start(case, model)
    losses = []
    for step in range(steps):
        loss = unet_loss(engine, step)
        losses.append(float(loss.detach()))
        engine.backward(loss)
        engine.step()
    weights = {name: tensor.clone() for name, tensor in engine.master_weights.gather()}
    told = engine.explain()
    engine.close()
    return losses, weights, told


@pytest.mark.parametrize("world_size", [*nightly(1), 2])
@ranks()
def test_engines_train_lazily_loaded_weights_bit_for_bit_like_loaded_ones(sharded, world_size):
    cases = ENGINES[world_size]
    found = []
    for case in cases:
        plan = DeepSpeedPlan.build(stage=case.stage, precision=case.precision)
        losses, weights, _ = trained(case, load_pretrained(sharded).model)
        late, late_weights, told = trained(case, load_pretrained(sharded, plan=plan).model)
        same = weights.keys() == late_weights.keys()
        same = same and all(torch.equal(weights[n], late_weights[n]) for n in weights)
        found.append((same and losses == late, told))
    for case, (same, told) in zip(cases, found, strict=True):
        assert same, case
        if case.deepspeed:
            how = "each rank reads only its part" if case.stage == 3 else "one tensor at a time"
            assert f"tensors read in {case.precision}; {how}" in told


@ranks(2)
def test_adapters_can_be_added_before_the_base_weights_are_read(single):
    needs("peft")
    case = Case(stage=3, offload="cpu", precision="bf16")
    found = []
    for plan in (None, PLAN):
        model = load_pretrained(single, plan=plan).model
        torch.manual_seed(1)
        facts = add_lora(model, LoRA(rank=2, init="gaussian"))
        assert facts.tensors > 0
        found.append(trained(case, model))
    (losses, weights, _), (late, late_weights, _) = found
    assert losses == late
    assert weights.keys() == late_weights.keys()
    assert all(torch.equal(weights[name], late_weights[name]) for name in weights)


def test_dora_reads_the_base_weights_to_compute_its_magnitudes(single):
    needs("peft")
    model = load_pretrained(single, plan=PLAN).model
    facts = add_lora(model, LoRA(rank=2, dora=True))
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert "DoRA" in facts.decisions[0].reason


# -- Memory.


def wide_unet() -> Any:
    from diffusers import UNet2DModel

    return UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(256, 512),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )


def partitioning(folder: str) -> tuple[int, int, int]:
    """Return stage 3's peak bytes while loading, and the elements of model and largest tensor."""
    from zerotune import EmbeddedPlan

    with Peak() as peak:
        loaded = load_pretrained(folder, plan=PLAN)
    sizes = [parameter.numel() for parameter in loaded.model.parameters()]
    before = peak.nbytes - peak.before
    with EmbeddedPlan(model=loaded.model, plan=PLAN) as run:
        with Peak() as peak:
            run.shard(loaded.model)
        held = sum(parameter.ds_tensor.nbytes for parameter in loaded.model.parameters())
        assert held == sum(-(-size // 2) for size in sizes) * 2
    return max(before, peak.nbytes - peak.before), sum(sizes), max(sizes)


@needs_mallinfo
def test_no_rank_holds_more_than_its_share_and_one_tensor(tmp_path):
    with torch.device("meta"):
        model = wide_unet()
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    model.save_pretrained(tmp_path, max_shard_size="30MB")
    for peak, elements, largest in run_ranks(partitioning, str(tmp_path), world_size=2):
        share = 2 * elements / 2
        assert elements > 20e6
        assert share / 2 < peak <= 1.15 * share + 2 * largest


# -- Quantized bases.


@pytest.fixture(scope="module")
def sd3(tmp_path_factory):
    return pipelines.sd3(tmp_path_factory.mktemp("quantized") / "sd3")


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (ImportError("Using `bitsandbytes` needs it"), MissingDependencyError, "bitsandbytes"),
        (
            RuntimeError("No GPU found. A GPU is needed for quantization."),
            InvalidValueError,
            r"quantization = 'object'.*No GPU found",
        ),
    ],
)
def test_a_quantization_that_cannot_be_made_here_is_refused(sd3, monkeypatch, error, kind, message):
    refusing = mock.Mock(side_effect=error)
    monkeypatch.setattr(diffusers.SD3Transformer2DModel, "from_pretrained", refusing)
    with pytest.raises(kind, match=message):
        load_pretrained(sd3, parts=False, quantization=object())


def test_torchao_quantizes_while_loading_and_stage_3_is_refused(sd3):
    needs("torchao", may_lack="it is an extra")
    needs("peft")
    from torchao.quantization import Int8WeightOnlyConfig

    config = diffusers.TorchAoConfig(Int8WeightOnlyConfig())
    loaded = load_pretrained(sd3, parts=False, plan=PLAN, quantization=config)
    assert "quantized with TorchAoConfig" in loaded.decisions[0].after
    facts = ModelFacts.from_module(loaded.model)
    plain = ModelFacts.from_module(load_pretrained(sd3, parts=False).model)
    assert facts.numel == plain.numel
    assert facts.storages == ("int8",)
    assert facts.weight_bytes(2) < 0.75 * plain.weight_bytes(2)
    assert add_lora(loaded.model, LoRA(rank=2)).total > facts.numel
    for stage in (2, 3):
        resolved = DeepSpeedPlan.build(stage=stage, precision="bf16").resolve(world_size=1)
        with pytest.raises(
            EngineError, match=r"torchao and optimum-quanto do not support.*BitsAndBytesConfig"
        ):
            check_quantized(loaded.model, resolved)


def test_four_bit_weights_are_not_swapped_to_nvme(tmp_path):
    told = {"quant_type": SimpleNamespace(name="Q8_0"), "quant_shape": (8, 32)}
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.zeros(8, 34), requires_grad=False)
    layer.weight.__class__ = type("GGUFParameter", (torch.nn.Parameter,), told)
    plan = DeepSpeedPlan.build(
        stage=3, precision="bf16", offload="nvme", offload_param="nvme", nvme_path=str(tmp_path)
    )
    with pytest.raises(EngineError, match=r"offload_param\.device = .*is gguf-q8_0"):
        check_quantized(layer, plan.resolve(world_size=1))
    near = DeepSpeedPlan.build(stage=3, precision="bf16", offload="cpu", offload_param="cpu")
    check_quantized(layer, near.resolve(world_size=1))
    check_quantized(torch.nn.Linear(2, 2), plan.resolve(world_size=1))


def quantized_by_hand(folder: str) -> Any:
    """Quantize with bitsandbytes as diffusers does, but without the GPU that diffusers requires."""
    import bitsandbytes as bnb

    model = load_pretrained(folder, parts=False).model.bfloat16().requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is torch.nn.Linear:
                packed = bnb.nn.Linear4bit(
                    child.in_features,
                    child.out_features,
                    bias=child.bias is not None,
                    compute_dtype=torch.bfloat16,
                    quant_type="nf4",
                )
                packed.weight = bnb.nn.Params4bit(
                    child.weight.data, requires_grad=False, quant_type="nf4"
                )
                packed.bias = child.bias
                setattr(module, name, packed.to("cpu"))
    return model


@pytest.mark.parametrize(
    ("told", "storage", "class_name"),
    [
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "nf4", "BnB4BitDiffusersQuantizer"),
        ({"load_in_8bit": True}, "int8", "BnB8BitDiffusersQuantizer"),
    ],
)
def test_bitsandbytes_quantizes_while_loading(sd3, monkeypatch, told, storage, class_name):
    needs("bitsandbytes", may_lack="it is an extra")
    from diffusers.quantizers.bitsandbytes import bnb_quantizer

    config = diffusers.BitsAndBytesConfig(**told)
    if not torch.cuda.is_available():
        with pytest.raises(InvalidValueError, match=r"No GPU found.*on GPUs only"):
            load_pretrained(sd3, parts=False, quantization=config)
        # bitsandbytes runs on CPUs, but diffusers refuses to use it there.
        quantizer = getattr(bnb_quantizer, class_name)
        monkeypatch.setattr(quantizer, "validate_environment", lambda *_, **__: None)
        monkeypatch.setattr(quantizer, "update_device_map", lambda *_: {"": "cpu"})
    loaded = load_pretrained(sd3, parts=False, plan=PLAN, quantization=config)
    plain = ModelFacts.from_module(load_pretrained(sd3, parts=False).model)
    facts = ModelFacts.from_module(loaded.model)
    assert "quantized with BitsAndBytesConfig" in loaded.decisions[0].after
    assert facts.numel == plain.numel
    assert facts.storages == (storage,)
    assert facts.weight_bytes(2) < 0.75 * plain.weight_bytes(2)
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    if storage == "nf4":
        by_hand = dict(quantized_by_hand(str(sd3)).named_parameters())
        read = dict(loaded.model.named_parameters())
        assert all(torch.equal(read[name].cpu(), by_hand[name]) for name in by_hand)
    for stage in (2, 3):
        resolved = DeepSpeedPlan.build(stage=stage, precision="bf16").resolve(world_size=1)
        check_quantized(loaded.model, resolved)


@pytest.mark.deepspeed
@ranks(1)
def test_training_adapters_leaves_the_four_bit_base_unchanged(sd3, tmp_path):
    needs("bitsandbytes", may_lack="it is an extra")
    needs("peft")
    from safetensors import safe_open

    from zerotune.checkpoint import export_adapters

    found = []
    for stage in (2, 3):
        model = quantized_by_hand(sd3)
        base = {n: p.detach().clone() for n, p in model.named_parameters()}
        facts = ModelFacts.from_module(model)
        torch.manual_seed(1)
        add_lora(model, LoRA(rank=2))
        engine = start(Case(stage=stage, precision="bf16", lr=1e-2), model)
        generator = torch.Generator().manual_seed(2)
        for _ in range(2):
            x = torch.randn(2, 4, 8, 8, generator=generator).bfloat16()
            width = engine.module.config.joint_attention_dim
            pooled = engine.module.config.pooled_projection_dim
            prediction = engine(
                x,
                encoder_hidden_states=torch.randn(2, 3, width, generator=generator).bfloat16(),
                pooled_projections=torch.randn(2, pooled, generator=generator).bfloat16(),
                timestep=torch.tensor([100.0, 500.0]),
                return_dict=False,
            )[0]
            engine.backward((prediction.float() - x.float()).pow(2).mean())
            engine.step()
        moved = max(
            float(t.abs().max()) for n, t in engine.master_weights.gather() if "lora_B" in n
        )
        place = export_adapters(f"{tmp_path}/{stage}", engine=engine)
        with safe_open(str(place.path), framework="pt") as file:
            keys = list(file.keys())
        engine.close()
        after = {n.replace(".base_layer", ""): p for n, p in model.named_parameters()}
        same = all(torch.equal(after[n].reshape(-1), p.reshape(-1)) for n, p in base.items())
        found.append({"storages": facts.storages, "moved": moved, "keys": len(keys), "same": same})
    for one in found:
        assert one["storages"] == ("nf4",)
        assert one["moved"] > 0
        assert one["keys"] > 0
        assert one["same"]
