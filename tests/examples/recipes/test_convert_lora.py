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
    read_published,
    write_lora,
)
from peft.tuners.tuners_utils import BaseTunerLayer

from tests.diffusion.adapting import PLAIN_RUN
from tests.support import declared_pipelines
from tests.support.runs import start
from zerotune.checkpoint import export_adapters
from zerotune.diffusion import add_lora, load_adapters
from zerotune.errors import (
    CheckpointCorruptError,
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
