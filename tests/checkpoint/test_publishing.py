"""Exports on the Hub, against a fake of its HTTP interface, without a network."""

from __future__ import annotations

import json

import pytest
import torch

from tests.support.hub import stand_in
from tests.support.needs import needs
from zerotune.backend.adapters import LORA_FILE
from zerotune.backend.stored import read_header
from zerotune.checkpoint.export.driver import ExportWriter
from zerotune.checkpoint.export.model import model_writer
from zerotune.checkpoint.publishing import Card, publish
from zerotune.checkpoint.tensors import TensorSpec
from zerotune.decisions import Decision
from zerotune.errors import CheckpointError, InvalidValueError
from zerotune.plan import DeepSpeedPlan
from zerotune.platform import Platform

needs("huggingface_hub")

# huggingface_hub itself raises this warning when it uploads a file.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

SHARD = 4096


@pytest.fixture
def hub(monkeypatch):
    import huggingface_hub._commit_api as commits

    # The xet upload protocol has servers of its own, which the fake lacks.
    monkeypatch.setattr(commits, "is_xet_available", lambda: False)
    with stand_in() as found:
        yield found


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


def send(hub, folder, **settings):
    return publish(folder, "owner/name", endpoint=hub.url, token="hf_test", **settings)


def plan():
    config = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 2}
    plan = DeepSpeedPlan.from_dict(config)
    return plan.resolve(platform=Platform.synthetic("cuda"), world_size=2)


def test_all_files_are_uploaded_in_one_commit(hub, tmp_path):
    folder = model_folder(tmp_path / "unet")
    (folder / "notes.txt").write_text("mine")
    done = send(hub, folder, private=True)
    assert len(hub.commits) == 1
    local = {each.name: each.read_bytes() for each in folder.iterdir() if each.name != "notes.txt"}
    assert len(local) == 4
    assert {**local, "README.md": hub.files["README.md"]} == hub.files
    assert set(done.files) == set(hub.files)
    assert done.commit == hub.head
    assert done.url.endswith(hub.head)
    assert hub.token == "Bearer hf_test"
    assert hub.made.get("private") is True or hub.made.get("visibility") == "private"


def test_an_upload_that_fails_midway_leaves_the_repository_unchanged(hub, tmp_path):
    folder = model_folder(tmp_path / "unet")
    send(hub, folder)
    before = hub.files
    changed = model_folder(tmp_path / "unet", value=7.0)
    for step in ("/blob/", "/preupload/", "/objects/batch", "/commit/"):
        hub.refuse = step
        with pytest.raises(CheckpointError, match="the upload failed; the repository is unchanged"):
            send(hub, changed)
        assert hub.files == before
        assert len(hub.commits) == 1
    hub.refuse, hub.requests[:] = None, []
    send(hub, changed)
    assert (
        hub.files["diffusion_pytorch_model-00001-of-00002.safetensors"]
        != before["diffusion_pytorch_model-00001-of-00002.safetensors"]
    )
    # The files had arrived before the commit was refused, so they are not sent again.
    assert not [each for each in hub.requests if each.startswith("PUT")]


def test_an_upload_is_refused_if_the_branch_has_moved(hub, tmp_path):
    folder = model_folder(tmp_path / "unet")
    hub.moved = True
    with pytest.raises(CheckpointError, match="the branch has moved"):
        send(hub, folder)
    assert hub.files == {}


def test_weights_of_an_earlier_upload_are_deleted(hub, tmp_path):
    send(hub, model_folder(tmp_path / "unet"))
    assert "diffusion_pytorch_model.safetensors.index.json" in hub.files
    hub.commits[-1]["mine.safetensors"] = next(iter(hub.blobs))
    send(hub, model_folder(tmp_path / "whole", shard=10**6))
    assert set(hub.files) == {
        "README.md",
        "config.json",
        "diffusion_pytorch_model.safetensors",
        "mine.safetensors",
    }


def test_the_card_has_the_known_facts_and_no_local_paths(hub, tmp_path):
    file = adapter_file(tmp_path)
    picture = tmp_path / "a cat.PNG"
    picture.write_bytes(b"\x89PNG")
    chosen = (
        Decision(key="LoRA.targets", before=None, after=["to_q"], reason="attention projections"),
        Decision(key="nvme_path", before=None, after="/home/me/swap/run", reason="the swap root"),
        Decision(key="same", before=1, after=1, reason="stays"),
    )
    card = Card(
        base_model="owner/base",
        license="apache-2.0",
        tags=("anime",),
        plan=plan(),
        decisions=chosen,
        data={"images": 1200, "kinds": "a|b"},
        samples={"a cat": picture},
        text="Draws cats.",
    )
    send(hub, tmp_path, card=card)
    text = hub.files["README.md"].decode()
    header, _, body = text.removeprefix("---\n").partition("\n---\n")
    assert "base_model: owner/base" in header
    assert "license: apache-2.0" in header
    assert all(f"- {tag}" in header for tag in ("zerotune", "lora", "anime"))
    assert f'load_lora_weights("owner/name", weight_name="{file.name}")' in body
    assert "Draws cats." in body
    assert "| engine | ZeRO-2 |" in body
    assert "| samples per step | 4 |" in body
    assert "| images | 1200 |" in body
    assert r"a\|b" in body
    assert "LoRA.targets: unset -> " in body
    assert "- same" not in body
    assert "/home" not in text
    assert str(tmp_path) not in text
    assert "![a cat](samples/000.png)" in body
    assert hub.files["samples/000.png"] == b"\x89PNG"
    assert set(hub.files) == {LORA_FILE, "README.md", "samples/000.png"}


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (["model_index.json", "unet/config.json"], "DiffusionPipeline.from_pretrained"),
        (["config.json", "diffusion_pytorch_model.safetensors"], "AutoModel.from_pretrained"),
        (["adapter_config.json", "adapter_model.safetensors"], "PeftModel.from_pretrained"),
        (["style.safetensors"], 'weight_name="style.safetensors"'),
    ],
)
def test_the_card_says_how_to_load_the_files(files, words):
    text = Card().markdown("owner/name", files)
    assert words in text
    assert '"owner/name"' in text
    assert text.count("# name") == 1


def test_incomplete_or_foreign_exports_are_not_uploaded(hub, tmp_path):
    folder = model_folder(tmp_path / "unet")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "sample_size": 3}))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x.bin").write_bytes(b"x")
    removed = model_folder(tmp_path / "removed")
    (removed / "diffusion_pytorch_model-00002-of-00002.safetensors").unlink()
    for wrong in (folder, tmp_path / "other", tmp_path / "nowhere", removed):
        with pytest.raises(CheckpointError):
            send(hub, wrong)
    picture = tmp_path / "x.txt"
    picture.write_text("x")
    with pytest.raises(InvalidValueError, match="not an image or clip that the Hub can display"):
        send(hub, adapter_file(tmp_path), card=Card(samples={"a": picture}))
    assert hub.requests == []
    with pytest.raises(InvalidValueError, match="repo_id"):
        publish(adapter_file(tmp_path), "a/b/c", endpoint=hub.url, token="x")
    assert read_header(adapter_file(tmp_path))


def test_an_unreachable_hub_is_reported(tmp_path, monkeypatch):
    import httpx
    from huggingface_hub import HfApi

    def gone(*_args, **_kwargs):
        raise httpx.ConnectError("no route")

    monkeypatch.setattr(HfApi, "create_repo", gone)
    with pytest.raises(CheckpointError, match=r"the upload failed.*no route"):
        publish(adapter_file(tmp_path), "owner/name", endpoint="http://127.0.0.1:9", token="x")
