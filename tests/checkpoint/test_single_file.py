"""Whole models in one file with the names of their first publication: import, and the recipe."""

from __future__ import annotations

import shutil
from typing import Any

import diffusers
import pytest
import torch
from examples.recipes.one_file import ORIGINALS, place_rows
from examples.recipes.one_file import main as one_file
from safetensors.torch import save_file

from tests.checkpoint.refusals import told
from tests.support import declared_pipelines, single_files
from tests.support.ranks import ranks
from tests.support.runs import PLAIN, Case, start
from zerotune import DeepSpeedPlan
from zerotune.backend.single_file import SingleFile
from zerotune.backend.stored import StoredTensor
from zerotune.checkpoint import export_pipeline
from zerotune.diffusion import load_pretrained
from zerotune.errors import CheckpointMismatchError, InvalidValueError

PLAN = DeepSpeedPlan.build(stage=3)
MODEL = "model.diffusion_model."


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    top = tmp_path_factory.mktemp("single")
    return {kind: make(top / kind) for kind, make in single_files.MAKERS.items()}


def trained(folder: Any) -> Any:
    """Load a model and change its weights."""
    model = load_pretrained(folder, parts=False).model
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    return model


def no_weights(folder: Any, target: Any) -> Any:
    """Copy only configurations, tokenizers and scheduler."""
    return shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.safetensors"))


def same(state: Any, other: Any) -> bool:
    return state.keys() == other.keys() and all(
        state[name].dtype == other[name].dtype and torch.equal(state[name], other[name])
        for name in state
    )


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.nightly) if kind == "sd15" else kind
        for kind in single_files.COMPONENTS
    ],
)
@ranks(1)
def test_plain_diffusers_reads_the_file_bit_for_bit(kind, folders, tmp_path, monkeypatch):
    if kind == "flux":
        single_files.narrow_flux(monkeypatch)
    folder, component = folders[kind], single_files.COMPONENTS[kind]
    engine = start(PLAIN, trained(folder))
    file = single_files.in_one_file(engine, folder, tmp_path / "one.safetensors")
    expected = {name: t.clone() for name, t in engine.module.state_dict().items()}
    engine.close()
    read = single_files.reloaded(kind, file, folder)
    assert same(getattr(read, component).state_dict(), expected)
    whole = single_files.original(kind, folder)
    for name, part in whole.components.items():
        if name != component and isinstance(part, torch.nn.Module):
            assert same(getattr(read, name).state_dict(), part.state_dict()), name
    loaded = load_pretrained(file, config=folder, frozen_dtype="fp32")
    assert same(loaded.model.state_dict(), expected)
    for name, part in loaded.family.parts.modules.items():
        assert same(part.state_dict(), getattr(whole, name).state_dict()), name


@ranks(2)
def test_a_single_file_can_be_trained_at_stage_3_and_exported_to_a_folder(folders, tmp_path):
    folder, base = folders["sd3"], tmp_path / "base.safetensors"
    engine = start(PLAIN, trained(folder))
    single_files.in_one_file(engine, folder, base)
    expected = {name: tensor.clone() for name, tensor in engine.module.state_dict().items()}
    engine.close()
    loaded = load_pretrained(base, config=folder, plan=PLAN, parts=False)
    engine = start(Case(stage=3), loaded.model)
    target = export_pipeline(
        tmp_path / "next", engine=engine, base=loaded.base, config=loaded.folder, dtype="bf16"
    )
    engine.close()
    written = single_files.original("sd3", target)
    rounded = {name: tensor.bfloat16().float() for name, tensor in expected.items()}
    assert same(written.transformer.state_dict(), rounded)
    assert [each.severity for each in loaded.decisions] == ["warning"]


@ranks(1)
def test_a_folder_can_be_exported_from_a_single_file_and_configurations(folders, tmp_path):
    folder, bare = folders["sdxl"], no_weights(folders["sdxl"], tmp_path / "bare")
    engine = start(PLAIN, trained(folder))
    file = single_files.in_one_file(engine, folder, tmp_path / "one.safetensors")
    target = export_pipeline(tmp_path / "out", engine=engine, base=file, config=bare)
    error = told(lambda: export_pipeline(tmp_path / "x", engine=engine, base=file))
    own = told(lambda: export_pipeline(file, engine=engine, base=file, config=bare))
    engine.close()
    read, expected = (single_files.original("sdxl", each) for each in (target, folder))
    for name in ("vae", "text_encoder", "text_encoder_2"):
        assert same(getattr(read, name).state_dict(), getattr(expected, name).state_dict()), name
    assert same(read.unet.state_dict(), load_pretrained(file, config=bare).model.state_dict())
    assert "set config= to the folder" in error
    assert "recipes/one_file" in own


def header(shapes: Any, **dtypes: Any) -> dict[str, StoredTensor]:
    return {
        key: StoredTensor(dtype=dtypes.get(key, torch.bfloat16), shape=shape, offset=0)
        for key, shape in shapes.items()
    }


def published_flux() -> tuple[Any, dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Return Flux at its real size, its shapes, and the shapes in its published file."""
    with torch.device("meta"):
        model = diffusers.FluxTransformer2DModel(guidance_embeds=True)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    keys = ORIGINALS["FluxPipeline"]["transformer"].keys(list(shapes), model.config)
    file = {
        key: (sum(shapes[name][0] for name in names), *shapes[names[0]][1:])
        for key, names in keys.items()
    }
    return model, shapes, file


def test_flux_gets_its_published_names_and_each_row_its_place(tmp_path):
    model, shapes, file = published_flux()
    assert len(file) == 780
    assert file["single_blocks.37.linear1.weight"] == (21504, 3072)
    places = place_rows(type(model), model.config, model=shapes, file=file)
    ours = places["single_transformer_blocks.37.attn.to_v.weight"]
    assert [(run.key, run.there, run.count) for run in ours] == [
        ("single_blocks.37.linear1.weight", 6144, 3072)
    ]
    # The published file has shift before scale, diffusers scale before shift.
    assert [run.there for run in places["norm_out.linear.weight"]] == [3072, 0]
    rows = [row for run in sum(places.values(), ()) for row in [(run.key, run.there, run.count)]]
    assert len(set(rows)) == len(rows)
    assert sum(count for *_, count in rows) == sum(shape[0] for shape in file.values())
    single = SingleFile(path=tmp_path / "x.safetensors", config=tmp_path, tensors=header(file))
    assert single.published == "black-forest-labs/FLUX.1-dev"


def test_unreadable_files_are_refused_with_what_to_pass_instead(folders, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    base = tmp_path / "x.safetensors"
    keys = ORIGINALS["StableDiffusion3Pipeline"]["transformer"]
    model = load_pretrained(folders["sd3"], parts=False).model
    names = keys.keys(list(model.state_dict()), model.config)
    tensors = {
        key: torch.cat([model.state_dict()[name] for name in each]) for key, each in names.items()
    }

    def refusal(change: dict[str, Any] | None = None, path: Any = base, **options: Any) -> str:
        save_file(tensors | (change or {}), base)
        return told(
            lambda: load_pretrained(path, **{"parts": False, "config": folders["sd3"]} | options)
        )

    assert refusal() == ""
    eighths = {key: tensor.to(torch.float8_e4m3fn) for key, tensor in tensors.items()}
    assert refusal(eighths) == ""
    read = load_pretrained(base, config=folders["sd3"], parts=False).model.state_dict()
    rounded = {
        key: tensor.to(torch.float8_e4m3fn).float() for key, tensor in (model.state_dict().items())
    }
    assert torch.equal(read["context_embedder.weight"], rounded["context_embedder.weight"])
    assert torch.equal(read["proj_out.bias"], rounded["proj_out.bias"])
    assert "does not recognise this file's model" in refusal(config=None)
    assert "stored with scales" in refusal({"scaled_fp8": torch.ones(2)})
    assert "diffusers cannot read FluxTransformer2DModel" in refusal(config=folders["flux"])
    assert "without such a file, omit config=" in refusal(path=folders["sd3"])
    assert "does not exist" in refusal(path=tmp_path / "none.safetensors")
    bare = no_weights(folders["sd3"], tmp_path / "bare")
    message = refusal(parts=True, config=bare)
    assert "does not contain the frozen parts that the file lacks" in message
    big = {f"{MODEL}joint_blocks.37.x_block.mlp.fc1.weight": torch.ones(2, 2)}
    message = refusal(big, config=None)
    assert "stabilityai/stable-diffusion-3.5-large cannot be downloaded" in message
    assert "pass a local copy of stabilityai/stable-diffusion-3.5-large" in message


@ranks(1)
def test_a_folder_is_no_base_of_a_single_file_and_models_need_a_converter(tmp_path):
    folder = declared_pipelines.pixart_sigma(tmp_path / "pixart")
    model = load_pretrained(folder, parts=False).model
    engine = start(PLAIN, model)
    message = told(lambda: export_pipeline(tmp_path / "x.safetensors", engine=engine, base=folder))
    engine.close()
    with pytest.raises(InvalidValueError, match="cannot convert a single file to PixArt"):
        place_rows(type(model), model.config, model={}, file={"x": (1,)})
    assert "examples/recipes/one_file.py" in message
    with pytest.raises(CheckpointMismatchError, match="layout of PixArtSigmaPipeline is unknown"):
        one_file([str(folder), str(tmp_path / "x.safetensors")])
    assert sorted(each.name for each in tmp_path.iterdir()) == ["pixart"]
