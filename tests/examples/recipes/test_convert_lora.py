"""The recipe's files in ComfyUI's and kohya's names, read back by diffusers' own converters."""

from __future__ import annotations

import attrs
import diffusers
import peft
import pytest
import torch
from examples.recipes.convert_lora import (
    PUBLISHED,
    Factors,
    compare,
    main,
    published,
    read_published,
    write_lora,
    write_lycoris,
)
from peft.tuners.tuners_utils import BaseTunerLayer

from tests.diffusion.adapting import PLAIN_RUN
from tests.support import declared_pipelines
from tests.support.runs import start
from zerotune.checkpoint import export_adapters
from zerotune.diffusion import add_lora, load_adapters
from zerotune.errors import (
    CheckpointCorruptError,
    CheckpointMismatchError,
    InvalidValueError,
)

pytestmark = pytest.mark.nightly

ONE = {"num_layers": 1}
DEPTHS = {
    "FluxTransformer2DModel": {**ONE, "num_single_layers": 1},
    "Flux2Transformer2DModel": {**ONE, "num_single_layers": 1},
    "HunyuanVideoTransformer3DModel": {**ONE, "num_single_layers": 1, "num_refiner_layers": 1},
    "ChromaTransformer2DModel": {**ONE, "num_single_layers": 1},
    "ZImageTransformer2DModel": {"n_layers": 1, "n_refiner_layers": 1},
    "QwenImageTransformer2DModel": ONE,
    "WanTransformer3DModel": ONE,
    "LTXVideoTransformer3DModel": ONE,
    "Krea2Transformer2DModel": ONE,
}
"""Numbers of layers; widths are the real ones, which diffusers' converters rely on."""
CASES = [(name, form) for name in DEPTHS for form in PUBLISHED[name].layouts]
TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "to_qkv_mlp_proj", "add_q_proj", "to_add_out")
_models: dict[str, torch.nn.Module] = {}


def model_of(name):
    if name not in _models:
        with torch.device("meta"):
            _models[name] = getattr(diffusers, name)(**DEPTHS[name])
    return _models[name]


def linears(model):
    return {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}


def factors_for(model, *, scale=1.0, rank=2):
    known = PUBLISHED[type(model).__name__]
    found = {}
    generator = torch.Generator().manual_seed(3)
    for name, layer in linears(model).items():
        if name.endswith(TARGETS) and "refiner" not in name:
            assert known.theirs(name)
            down = torch.randn(rank, layer.in_features, generator=generator)
            up = torch.randn(layer.out_features, rank, generator=generator)
            found[name] = Factors(down=down, up=up, scale=scale)
    return found


def written(model, form, layers, dtype=torch.float32):
    widths = {name: layer.out_features for name, layer in linears(model).items()}
    return write_lora(
        layers,
        model=model,
        form=form,
        component="transformer",
        outputs=widths.__getitem__,
        dtype=dtype,
    )


@pytest.mark.parametrize(("name", "form"), CASES)
def test_diffusers_reads_the_factors_back_bit_for_bit(name, form):
    model = model_of(name)
    layers = factors_for(model)
    tensors = written(model, form, layers)
    begin = {"comfyui": "diffusion_model.", "kohya": "lora_unet_"}[form]
    assert all(key.startswith(begin) for key in tensors)
    read = read_published(tensors, model=model, component="transformer")
    assert read.reader == f"{PUBLISHED[name].pipeline}.lora_state_dict"
    assert len(layers) > 3
    assert compare(read, layers, component="transformer", dtype=torch.float32)


@pytest.mark.parametrize("form", ["comfyui", "kohya"])
@pytest.mark.parametrize(("scale", "exact"), [(0.5, True), (0.3, False)])
def test_only_scales_that_are_powers_of_two_keep_the_bits(form, scale, exact):
    model = model_of("Flux2Transformer2DModel")
    layers = factors_for(model, scale=scale)
    tensors = written(model, form, layers, torch.bfloat16)
    assert any(key.endswith(".alpha") for key in tensors) == (form == "kohya")
    read = read_published(tensors, model=model, component="transformer")
    same = compare(read, layers, component="transformer", dtype=torch.bfloat16)
    assert same == exact


def test_factors_that_diffusers_reads_back_differently_are_detected():
    model = model_of("QwenImageTransformer2DModel")
    layers = factors_for(model)
    tensors = written(model, "comfyui", layers)
    first, second = list(layers)[:2]
    read = read_published(tensors, model=model, component="transformer")
    key = f"transformer.{first}.lora_A.weight"
    swapped = {**read.tensors, key: read.tensors[f"transformer.{second}.lora_A.weight"]}
    lost = {k: t for k, t in read.tensors.items() if first not in k}
    more = {**read.tensors, **{k.replace(first, "x"): t for k, t in read.tensors.items()}}
    doubled = {**read.tensors, key: 2 * read.tensors[key]}
    for wrong in (swapped, lost, more):
        changed = attrs.evolve(read, tensors=wrong)
        with pytest.raises(CheckpointCorruptError, match=r"this layer|values that differ"):
            compare(changed, layers, component="transformer", dtype=torch.float32)
    with pytest.raises(CheckpointCorruptError, match="values that differ"):
        compare(
            attrs.evolve(read, tensors=doubled),
            layers,
            component="transformer",
            dtype=torch.float32,
        )


def test_models_and_layers_without_published_names_are_refused():
    from tests.diffusion.adapting import tiny_sd3

    with pytest.raises(InvalidValueError, match="cannot read SD3Transformer2DModel"):
        published(tiny_sd3(), "comfyui", "transformer")
    unet = diffusers.UNet2DConditionModel
    with pytest.raises(InvalidValueError, match="use one of 'kohya'"):
        published(unet.__new__(unet), "comfyui", "unet")
    with pytest.raises(CheckpointMismatchError, match=r"proj_out: diffusers cannot read"):
        PUBLISHED["WanTransformer3DModel"].theirs("proj_out")


def test_lycoris_files_keep_alpha_if_a_factor_is_a_product():
    model = model_of("WanTransformer3DModel")
    layer = "blocks.0.attn1.to_q"
    split = {
        "lokr_w1": torch.ones(2, 2),
        "lokr_w2_a": torch.ones(3, 4),
        "lokr_w2_b": torch.ones(4, 5),
    }
    whole = {"lokr_w1": torch.ones(2, 2), "lokr_w2": torch.ones(3, 5)}
    for tensors, alpha, first in ((split, 2.0, 1.0), (whole, None, 0.5)):
        found = write_lycoris(
            {layer: tensors},
            model=model,
            form="kohya",
            component="transformer",
            scales={layer: 0.5},
            dtype=torch.float32,
        )
        stem = "lora_unet_blocks_0_self_attn_q"
        assert float(found.get(f"{stem}.alpha", torch.tensor(-1))) == (alpha or -1)
        assert float(found[f"{stem}.lokr_w1"][0, 0]) == first
        back = read_published(found, model=model, component="transformer")
        assert set(back.tensors) == {
            f"transformer.{layer}.{key.rpartition('.')[2]}" for key in found
        }
    flux = model_of("FluxTransformer2DModel")
    with pytest.raises(CheckpointMismatchError, match="LoKr and LoHa cannot represent joined"):
        write_lycoris(
            {"transformer_blocks.0.attn.to_q": split},
            model=flux,
            form="comfyui",
            component="transformer",
            scales={"transformer_blocks.0.attn.to_q": 1.0},
            dtype=torch.float32,
        )


@pytest.mark.parametrize("form", ["comfyui", "kohya"])
@pytest.mark.parametrize("kind", ["LoraConfig", "LoKrConfig"])
def test_an_export_is_converted_and_read_back_into_the_same_layers(form, kind, tmp_path):
    base = declared_pipelines.wan(tmp_path / "wan")
    kept = {"r": 4, "lora_alpha": 2} if kind == "LoraConfig" else {"r": 1, "alpha": 2}
    config = getattr(peft, kind)(target_modules=["to_q", "to_k"], **kept)
    model = diffusers.WanTransformer3DModel.from_pretrained(base / "transformer")
    add_lora(model, config)
    torch.manual_seed(2)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_()
    engine = start(PLAIN_RUN, model)
    file = export_adapters(tmp_path / "ours", engine=engine)
    engine.close()
    output = tmp_path / "theirs.safetensors"
    line = [str(file.path), "--base", str(base), "--to", form, "--output", str(output)]
    assert main(line), "all scales are powers of two, so no bit is lost"
    again = tmp_path / "again.safetensors"
    assert main([str(output), "--base", str(base), "--to", "diffusers", "--output", str(again)])
    other = diffusers.WanTransformer3DModel.from_pretrained(base / "transformer")
    assert not load_adapters(other, again).decisions
    deltas, back = (
        {
            name: layer.get_delta_weight("default")
            for name, layer in each.named_modules()
            if isinstance(layer, BaseTunerLayer)
        }
        for each in (model, other)
    )
    assert deltas.keys() == back.keys()
    assert all(torch.equal(deltas[name], back[name]) for name in deltas)
