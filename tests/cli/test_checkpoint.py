"""``zerotune checkpoint``: output and exit status."""

from __future__ import annotations

import importlib.util
import json

import attrs
import pytest
import torch
from examples.recipes.convert import convert
from safetensors.torch import load_file, save_file

from tests.checkpoint.samples import sample_manifest
from zerotune.backend.optimizers.classes import AdamW8BitStates
from zerotune.cli import main


@pytest.fixture
def portable(tmp_path):
    """Convert a model folder, and return the checkpoint."""
    (tmp_path / "model").mkdir()
    tensors = {"first.weight": torch.randn(3, 5), "first.bias": torch.randn(3)}
    save_file(tensors, tmp_path / "model" / "diffusion_pytorch_model.safetensors")
    (tmp_path / "model" / "config.json").write_text('{"_class_name": "Sample"}')
    return convert(tmp_path / "model", tmp_path / "portable")


def run(capsys, *arguments):
    code = main(["checkpoint", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_show_describes_a_checkpoint(portable, capsys):
    code, out, _ = run(capsys, "show", portable)
    assert code == 0
    assert "Sample" in out
    assert "2 with 18 elements, fp32" in out
    assert "no plan: weights only" in out
    assert "weights-00001-of-00001.safetensors" in out


def test_show_names_the_format_of_every_state(tmp_path, capsys):
    manifest = sample_manifest()
    parameters = [
        attrs.evolve(each, states=AdamW8BitStates.formats) for each in manifest.parameters
    ]
    coded = attrs.evolve(manifest, parameters=parameters, formats=AdamW8BitStates.formats)
    (tmp_path / "manifest.json").write_text(coded.to_json())
    out = run(capsys, "show", tmp_path)[1]
    assert "exp_avg (e4m3), exp_avg_scale (float32)" in " ".join(out.split())


def test_show_prints_json(portable, capsys):
    content = json.loads(run(capsys, "show", portable, "--json")[1])
    assert [record["name"] for record in content["parameters"]] == ["first.bias", "first.weight"]
    assert content["nbytes"] == sum(file["nbytes"] for file in content["files"])


def test_verify_names_every_damaged_file(portable, capsys):
    assert run(capsys, "verify", portable)[0] == 0
    weights = portable / "weights-00001-of-00001.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    (portable / "rank-00000-of-00001.safetensors").unlink()
    code, out, _ = run(capsys, "verify", portable)
    assert code == 1
    assert f"{weights}: was changed after it was written" in out
    assert "rank-00000-of-00001.safetensors: is missing" in out
    found = json.loads(run(capsys, "verify", portable, "--json")[1])
    assert found["whole"] is False
    assert {each["file"] for each in found["damage"]} >= {str(weights)}


def test_convert_writes_the_weights_back_in_another_dtype(portable, tmp_path, capsys):
    target = tmp_path / "small.safetensors"
    code, out, _ = run(capsys, "convert", portable, target, "--dtype", "bf16")
    assert (code, out) == (0, f"written to {target}\n")
    original = load_file(tmp_path / "model" / "diffusion_pytorch_model.safetensors")
    small = load_file(target)
    assert set(small) == set(original)
    assert all(torch.equal(small[name], original[name].bfloat16()) for name in small)


def test_a_folder_that_is_not_a_checkpoint_is_an_error(tmp_path, capsys):
    for command in (("show",), ("verify",), ("convert", tmp_path / "new")):
        code, _, err = run(capsys, command[0], tmp_path, *command[1:])
        assert code == 2
        assert "is not a checkpoint" in err


def test_a_missing_torch_is_reported_in_one_line(tmp_path, capsys, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torch" else found(name)
    )
    code, out, err = run(capsys, "show", tmp_path)
    assert (code, out) == (2, "")
    assert "torch: is not installed" in err
    assert err.count("\n") == 1
