"""The streaming writer, read back with the safetensors library itself."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from zerotune.checkpoint.tensors import TensorFileWriter, TensorSpec, file_size, hash_of
from zerotune.errors import CheckpointError

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)


def write(path, tensors, metadata=None):
    specs = [TensorSpec.of(key, tensor) for key, tensor in tensors.items()]
    with TensorFileWriter(path, specs=specs, metadata=metadata or {}) as writer:
        for key, tensor in tensors.items():
            writer.append(key, tensor)
        nbytes, sha256 = writer.finish()
    assert nbytes == path.stat().st_size == file_size(specs, metadata or {})
    assert sha256 == hashlib.sha256(path.read_bytes()).hexdigest() == hash_of(path)


def same(left, right):
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and torch.equal(
            left.reshape(-1).contiguous().view(torch.uint8),
            right.reshape(-1).contiguous().view(torch.uint8),
        )
    )


def test_hostile_tensors_survive(tmp_path):
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "master/a.b[0:7]": torch.randn(7, generator=generator),
        "0-d": torch.tensor(3),
        "empty": torch.zeros(0, 5),
        "strided": torch.randn(6, 4, generator=generator).t()[1:],
        "nan and infinity": torch.tensor([float("nan"), float("inf"), -0.0]),
        'quote " and ünïcode': torch.tensor([True, False, True]),
        "channels last": torch.randn(2, 3, 4, 5, generator=generator).to(
            memory_format=torch.channels_last
        ),
    }
    path = tmp_path / "x.safetensors"
    write(path, tensors, {"rank": "3", "text": '{"a": "ü"}'})
    loaded = load_file(path)
    assert set(loaded) == set(tensors)
    assert all(same(loaded[key], tensor) for key, tensor in tensors.items())
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"rank": "3", "text": '{"a": "ü"}'}


def test_tensors_longer_than_a_piece_survive(tmp_path, monkeypatch):
    monkeypatch.setattr("zerotune.checkpoint.tensors._PIECE", 10)
    tensors = {"a": torch.arange(95), "b": torch.arange(20).float()}
    write(tmp_path / "x.safetensors", tensors)
    loaded = load_file(tmp_path / "x.safetensors")
    assert all(same(loaded[key], tensor) for key, tensor in tensors.items())


@settings(max_examples=60, deadline=None)
@given(
    entries=st.dictionaries(
        st.text(min_size=1, max_size=12).filter(lambda key: key != "__metadata__"),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)),
        max_size=5,
    )
)
def test_any_names_dtypes_and_shapes_survive(entries, tmp_path_factory):
    tensors = {
        key: torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
        for key, (dtype, shape) in entries.items()
    }
    path = tmp_path_factory.mktemp("any") / "x.safetensors"
    write(path, tensors)
    loaded = load_file(path)
    assert set(loaded) == set(tensors)
    assert all(same(loaded[key], tensor) for key, tensor in tensors.items())


def test_only_what_was_announced_is_written(tmp_path):
    specs = [TensorSpec.of("a", torch.zeros(3)), TensorSpec.of("b", torch.zeros(2))]

    def writer(name):
        return TensorFileWriter(tmp_path / name, specs=specs, metadata={})

    with writer("order") as file, pytest.raises(CheckpointError, match="expected"):
        file.append("b", torch.zeros(2))
    with writer("shape") as file, pytest.raises(CheckpointError, match="expected"):
        file.append("a", torch.zeros(4))
    with writer("dtype") as file, pytest.raises(CheckpointError, match="expected"):
        file.append("a", torch.zeros(3).half())
    with writer("short") as file:
        file.append("a", torch.zeros(3))
        with pytest.raises(CheckpointError, match="1 tensors were not written"):
            file.finish()
    with writer("long") as file:
        file.append("a", torch.zeros(3))
        file.append("b", torch.zeros(2))
        with pytest.raises(CheckpointError, match="expected None"):
            file.append("c", torch.zeros(1))


def test_what_the_format_cannot_hold_is_named(tmp_path):
    twice = [TensorSpec.of("a", torch.zeros(1))] * 2
    with pytest.raises(CheckpointError, match=r"^a: two tensors"):
        TensorFileWriter(tmp_path / "x", specs=twice, metadata={})
    rotary = [TensorSpec.of("rope", torch.zeros(1, dtype=torch.complex64))]
    with pytest.raises(CheckpointError, match=r"^rope: safetensors cannot hold torch\.complex64"):
        TensorFileWriter(tmp_path / "x", specs=rotary, metadata={})
    assert not (tmp_path / "x").exists()


def test_an_existing_file_is_never_overwritten(tmp_path):
    (tmp_path / "x").write_text("precious")
    with pytest.raises(FileExistsError):
        TensorFileWriter(tmp_path / "x", specs=[], metadata={})
    assert (tmp_path / "x").read_text() == "precious"
