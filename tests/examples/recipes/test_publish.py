"""The publish recipe, with a stand-in for the Hub."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support.needs import needs
from zerotune.backend.adapters import LORA_FILE
from zerotune.checkpoint.export.driver import ExportWriter
from zerotune.checkpoint.export.model import model_writer
from zerotune.checkpoint.tensors import TensorSpec

needs("huggingface_hub")

SHARD = 4096


class Hub:
    """Stand in for ``HfApi``: keep the files of one repository."""

    def __init__(self):
        self.files, self.commits = {}, []

    def create_repo(self, *_, **__):
        """Do nothing: the repository is here."""

    def repo_info(self, _):
        siblings = [SimpleNamespace(rfilename=name) for name in self.files]
        return SimpleNamespace(sha=f"commit {len(self.commits)}", siblings=siblings)

    def create_commit(self, _, operations, *, commit_message, parent_commit):
        self.commits.append((commit_message, parent_commit))
        for each in operations:
            source = getattr(each, "path_or_fileobj", None)
            if source is None:
                del self.files[each.path_in_repo]
            else:
                read = source if isinstance(source, bytes) else Path(source).read_bytes()
                self.files[each.path_in_repo] = read


@pytest.fixture
def hub():
    return Hub()


def model_folder(path, *, count=4, shard=SHARD, value=1.0):
    """Write a folder as export_model does."""
    specs = [TensorSpec(key=f"w{i}", dtype=torch.float32, shape=(512,)) for i in range(count)]
    config = {"_class_name": "UNet2DModel"}
    writer = model_writer(path, config=config, specs=specs, shard_size=shard)
    return writer.write(
        (spec.key, torch.full(spec.shape, value + index)) for index, spec in enumerate(specs)
    )


def adapter_file(folder):
    """Write a file as export_adapters does."""
    spec = TensorSpec(key="unet.to_q.lora_A.weight", dtype=torch.float32, shape=(4, 8))
    writer = ExportWriter(folder / LORA_FILE, stem=None, specs=[spec])
    return writer.write([(spec.key, torch.ones(4, 8))])


def send(hub, folder, *, samples=None):
    from examples.recipes.publish import card_of, exported, publish

    samples = samples or {}
    card = card_of(
        "owner/name",
        exported(folder),
        base="owner/base",
        license="apache-2.0",
        text="Draws cats.",
        samples=samples,
    )
    return publish(folder, "owner/name", api=hub, card=card, samples=samples)


def test_the_files_of_an_export_are_uploaded_in_one_commit(hub, tmp_path):
    folder = model_folder(tmp_path / "unet")
    (folder / "notes.txt").write_text("mine")
    send(hub, folder)
    # The Hub refuses a commit whose parent is no longer the last commit.
    assert hub.commits == [("Upload unet", "commit 0")]
    local = {each.name: each.read_bytes() for each in folder.iterdir() if each.name != "notes.txt"}
    assert len(local) == 4
    assert {**local, "README.md": hub.files["README.md"]} == hub.files


def test_weights_of_an_earlier_upload_are_deleted(hub, tmp_path):
    send(hub, model_folder(tmp_path / "unet"))
    assert "diffusion_pytorch_model.safetensors.index.json" in hub.files
    hub.files["mine.safetensors"] = b""
    send(hub, model_folder(tmp_path / "whole", shard=10**6))
    assert set(hub.files) == {
        "README.md",
        "config.json",
        "diffusion_pytorch_model.safetensors",
        "mine.safetensors",
    }


def test_the_card_says_how_to_load_the_adapters(hub, tmp_path):
    file = adapter_file(tmp_path)
    picture = tmp_path / "cat.png"
    picture.write_bytes(b"\x89PNG")
    send(hub, file, samples={"a cat": picture})
    header, _, body = hub.files["README.md"].decode().removeprefix("---\n").partition("\n---\n")
    assert "base_model: owner/base" in header
    assert "license: apache-2.0" in header
    assert all(f"- {tag}" in header for tag in ("zerotune", "lora"))
    assert f'load_lora_weights("owner/name", weight_name="{file.name}")' in body
    assert "Draws cats." in body
    assert "![a cat](samples/cat.png)" in body
    assert set(hub.files) == {LORA_FILE, "README.md", "samples/cat.png"}


def test_incomplete_or_foreign_exports_are_not_uploaded(hub, tmp_path):
    folder = model_folder(tmp_path / "unet")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "sample_size": 3}))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x.bin").write_bytes(b"x")
    removed = model_folder(tmp_path / "removed")
    (removed / "diffusion_pytorch_model-00002-of-00002.safetensors").unlink()
    for wrong in (folder, tmp_path / "other", tmp_path / "nowhere", removed):
        with pytest.raises(SystemExit, match="is no complete export"):
            send(hub, wrong)
    assert hub.commits == []
