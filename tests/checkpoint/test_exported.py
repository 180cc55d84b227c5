"""Exports replace earlier exports and nothing else; these tests need no engine."""

from __future__ import annotations

import errno
import json
import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.killing import comes_to_its_end
from zerotune.checkpoint import staging as staged
from zerotune.checkpoint import tensors as tensorfile
from zerotune.checkpoint.export.driver import Whole
from zerotune.checkpoint.export.model import ModelFolderReader, model_writer
from zerotune.checkpoint.folders import prune
from zerotune.checkpoint.tensors import TensorSpec
from zerotune.errors import CheckpointError

NAMES = ("a", "b", "c")
CONFIG = {"_class_name": "UNet2DModel"}


def export(path: Path, value: float, *, whole: Whole | None = None) -> Path:
    """Write three tensors of 4 KiB into three files."""
    tensors = {name: torch.full((1024,), value) for name in NAMES}
    specs = [TensorSpec.of(name, tensor) for name, tensor in tensors.items()]
    writer = model_writer(path, config=CONFIG, specs=specs, shard_size=4096, whole=whole)
    return writer.write(tensors.items())


def values(path: Path) -> set[float]:
    """Return the values in an export, reading every tensor."""
    with ModelFolderReader(path) as reader:
        return {float(v) for name in NAMES for v in reader.tensor(name)}


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def test_a_later_export_replaces_the_earlier_one(tmp_path):
    before = names(export(tmp_path / "unet", 1.0))
    assert names(export(tmp_path / "unet", 2.0)) == before
    assert values(tmp_path / "unet") == {2.0}
    assert [path.name for path in tmp_path.iterdir()] == ["unet"]


def test_equal_exports_have_equal_bytes(tmp_path):
    first, second = export(tmp_path / "1", 3.0), export(tmp_path / "2", 3.0)
    assert {p.name: p.read_bytes() for p in first.iterdir()} == {
        p.name: p.read_bytes() for p in second.iterdir()
    }


def test_an_exported_single_file_is_replaced_too(tmp_path):
    export(tmp_path / "unet.safetensors", 1.0)
    export(tmp_path / "unet.safetensors", 2.0)
    assert values(tmp_path / "unet.safetensors") == {2.0}
    save_file(load_file(tmp_path / "unet.safetensors"), tmp_path / "unet.safetensors")
    with pytest.raises(CheckpointError, match=r"unet\.safetensors: exists and is not replaced"):
        export(tmp_path / "unet.safetensors", 3.0)


def test_foreign_files_in_an_export_are_kept(tmp_path):
    folder = export(tmp_path / "unet", 1.0)
    (folder / "README.md").write_text("a card")
    (folder / "samples").mkdir()
    (folder / "samples" / "cat.png").write_bytes(b"cat")
    # This file is named like one of a checkpoint.
    (folder / "weights-00001-of-00002.safetensors").write_bytes(b"mine")
    export(folder, 2.0)
    assert values(folder) == {2.0}
    assert (folder / "README.md").read_text() == "a card"
    assert (folder / "samples" / "cat.png").read_bytes() == b"cat"
    assert (folder / "weights-00001-of-00002.safetensors").read_bytes() == b"mine"


def test_an_export_joins_checkpoints_and_logs_in_a_scripts_output_folder(tmp_path):
    """diffusers' scripts write all three into ``--output_dir``."""
    folder = tmp_path / "output"
    (folder / "logs" / "run").mkdir(parents=True)
    (folder / "logs" / "run" / "events").write_bytes(b"log")
    (folder / "checkpoint-5").mkdir()
    (folder / "checkpoint-5" / "manifest.json").write_text("{}")
    before = names(folder)
    for value in (1.0, 2.0):
        export(folder, value)
        assert values(folder) == {value}
        assert [name for name in names(folder) if name in before] == before
    assert (folder / "logs" / "run" / "events").read_bytes() == b"log"
    assert [path.name for path in tmp_path.iterdir()] == ["output"]


def edited_config(folder: Path) -> str:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "mine": 1}))
    return "config.json has changed"


def resaved_weights(folder: Path) -> str:
    file = min(folder.glob("*.safetensors"))
    save_file(load_file(file), file, metadata={"format": "pt"})
    return f"{file.name} has changed"


def another_export(folder: Path) -> str:
    other = export(folder.parent / "other.safetensors", 5.0)
    file = max(folder.glob("*.safetensors"))
    other.replace(file)
    return f"{file.name} has changed"


def replaced_by_a_link(folder: Path) -> str:
    file = folder / "config.json"
    file.rename(folder.parent / "config.json")
    file.symlink_to(folder.parent / "config.json")
    return "config.json has changed"


def of_diffusers(folder: Path) -> str:
    shutil.rmtree(folder)
    folder.mkdir()
    save_file({"a": torch.ones(3)}, folder / "diffusion_pytorch_model.safetensors")
    return "zerotune did not write it"


def no_model(folder: Path) -> str:
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "thesis.tex").write_text("years of work")
    return "zerotune did not write it"


def a_damaged_file(folder: Path) -> str:
    shutil.rmtree(folder)
    folder.write_bytes(b"\xff" * 64)
    return "zerotune did not write it"


@pytest.mark.parametrize(
    "change",
    [
        edited_config,
        resaved_weights,
        another_export,
        replaced_by_a_link,
        of_diffusers,
        no_model,
        a_damaged_file,
    ],
)
def test_files_that_zerotune_did_not_write_are_not_replaced(change, tmp_path):
    folder = export(tmp_path / "unet", 1.0)
    reason = change(folder)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError, match=f"exists and is not replaced: {reason}"):
        export(folder, 2.0)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("content", ['"text"', "[]", "{}", '{"files": 3}', "[" * 3000])
def test_a_forged_export_mark_is_not_accepted(content, tmp_path):
    file = tmp_path / "unet.safetensors"
    save_file({"a": torch.ones(3)}, file, metadata={"zerotune": content})
    with pytest.raises(CheckpointError, match="zerotune did not write it"):
        export(file, 2.0)


def test_a_pipeline_is_replaced_only_if_its_other_parts_are_unchanged(tmp_path):
    pipeline = tmp_path / "sdxl"

    def write(part: str, value: float, others: Path) -> None:
        """Write as ``export_pipeline`` does: untrained parts are copied from another pipeline."""
        staging = staged.ExportStaging(pipeline)
        kept = shutil.ignore_patterns(part)
        shutil.copytree(others, staging.path, ignore=kept, dirs_exist_ok=True)
        files = [path for path in staging.path.rglob("*") if path.is_file()]
        digests = {p.relative_to(staging.path).as_posix(): tensorfile.hash_of(p) for p in files}
        export(staging.path / part, value, whole=Whole(part=part, others=digests))
        staging.publish()

    base = tmp_path / "base"
    export(base / "unet", 0.0)
    export(base / "text_encoder", 0.0)
    write("unet", 1.0, base)
    write("unet", 2.0, base)
    assert values(pipeline / "unet") == {2.0}
    pipeline.rename(tmp_path / "unet-trained")
    write("text_encoder", 3.0, tmp_path / "unet-trained")
    # That pipeline's U-Net still has its export mark.
    write("text_encoder", 4.0, tmp_path / "unet-trained")
    assert values(pipeline / "unet") == {2.0}
    assert values(pipeline / "text_encoder") == {4.0}
    assert [path.name for path in pipeline.rglob("*former*")] == []
    (pipeline / "unet" / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"is not replaced: .* has changed"):
        write("text_encoder", 5.0, base)


def cannot_exchange(one: Path, other: Path) -> None:
    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def test_a_complete_export_exists_after_every_kill(tmp_path):
    path, moment, complete, seen = tmp_path / "unet", 0, False, [0.0]
    export(path, 0.0)
    (path / "README.md").write_text("a card")
    while not complete:
        complete = comes_to_its_end(partial(export, path, moment + 1.0), moment=moment)
        (value,) = values(path)
        assert value in (moment + 1.0, seen[-1])
        cards = [found.read_text() for found in tmp_path.rglob("README.md")]
        assert cards == ["a card"]
        seen.append(value)
        moment += 1
    assert moment > 15, "the kills did not come in the midst of the export"
    assert len(set(seen)) > 2, "no kill came behind the swap"
    assert [found.name for found in tmp_path.iterdir()] == ["unet"]
    assert (path / "README.md").read_text() == "a card"


def test_an_export_is_replaced_in_two_steps_where_names_cannot_be_exchanged(tmp_path, monkeypatch):
    monkeypatch.setattr(staged, "exchange", cannot_exchange)
    export(tmp_path / "unet", 1.0)
    export(tmp_path / "unet", 2.0)
    assert values(tmp_path / "unet") == {2.0}
    assert [path.name for path in tmp_path.iterdir()] == ["unet"]


def test_pruning_keeps_an_export_that_lost_its_name(tmp_path):
    export(tmp_path / "unet", 1.0).rename(tmp_path / "unet.old-0123456789ab")
    prune(tmp_path, keep=1)
    assert values(tmp_path / "unet.old-0123456789ab") == {1.0}
    export(tmp_path / "unet", 2.0)
    assert [path.name for path in tmp_path.iterdir()] == ["unet"]
