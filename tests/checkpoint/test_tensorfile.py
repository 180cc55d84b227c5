"""The streaming writer, read back with the safetensors library."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from zerotune.checkpoint.tensors import (
    EXPORT,
    TensorFile,
    TensorReader,
    TensorSpec,
    TensorWriter,
    hash_of,
)
from zerotune.errors import CheckpointCorruptError, CheckpointError

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


def laid_out(path, specs, metadata=None):
    file = TensorFile.of(path.name, EXPORT, specs, metadata=metadata or {})
    file.create(path.parent)
    return file


def write(path, tensors, metadata=None):
    specs = [TensorSpec.of(key, tensor) for key, tensor in tensors.items()]
    file = laid_out(path, specs, metadata)
    with TensorWriter(path.parent, [file]) as writer:
        for key, tensor in tensors.items():
            writer.write(key, tensor)
        (record,) = writer.confirm([file], writer.written)
    assert record.nbytes == path.stat().st_size == file.nbytes
    assert record.sha256 == hashlib.sha256(path.read_bytes()).hexdigest() == hash_of(path)
    with TensorReader([path]) as reader:
        assert all(same(reader.tensor(key), tensor) for key, tensor in tensors.items())


def same(left, right):
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and torch.equal(
            left.reshape(-1).contiguous().view(torch.uint8),
            right.reshape(-1).contiguous().view(torch.uint8),
        )
    )


def test_unusual_tensors_survive_a_round_trip(tmp_path):
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


def test_tensors_longer_than_a_piece_survive_a_round_trip(tmp_path, monkeypatch):
    monkeypatch.setattr("zerotune.checkpoint.tensors._PIECE_ELEMENTS", 10)
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
def test_any_names_dtypes_and_shapes_survive_a_round_trip(entries, tmp_path_factory):
    tensors = {
        key: torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
        for key, (dtype, shape) in entries.items()
    }
    path = tmp_path_factory.mktemp("any") / "x.safetensors"
    write(path, tensors)
    loaded = load_file(path)
    assert set(loaded) == set(tensors)
    assert all(same(loaded[key], tensor) for key, tensor in tensors.items())


def test_a_file_that_lacks_a_tensor_is_not_confirmed(tmp_path):
    file = laid_out(tmp_path / "x", [TensorSpec.of(key, torch.zeros(3)) for key in "ab"])
    with TensorWriter(tmp_path, [file]) as writer:
        writer.write("a", torch.zeros(3))
        with pytest.raises(CheckpointCorruptError, match=r"differ from the written data"):
            writer.confirm([file], writer.written)


def test_a_tensor_in_two_files_is_named(tmp_path):
    for name in ("1.safetensors", "2.safetensors"):
        write(tmp_path / name, {"a": torch.zeros(3)})
    files = [tmp_path / "1.safetensors", tmp_path / "2.safetensors"]
    with pytest.raises(CheckpointCorruptError, match=r"^2\.\w+: 'a': is also in 1\.safetensors"):
        TensorReader(files)


def test_missing_tensors_and_elements_are_named(tmp_path):
    path = tmp_path / "x.safetensors"
    write(path, {"a": torch.zeros(3)})
    with TensorReader([path]) as reader:
        with pytest.raises(CheckpointCorruptError, match=r"^export/b: is in no file"):
            reader.tensor("b")
        with pytest.raises(
            CheckpointCorruptError, match=r"has 3 elements, but elements 2 to 4 are needed"
        ):
            reader.fill(torch.zeros(2), "a", 2)
        with pytest.raises(CheckpointCorruptError, match=r"instead of torch\.float32 \(4,\)"):
            reader.check("a", torch.float32, (4,))
        path.write_bytes(path.read_bytes()[:-5])
        with pytest.raises(CheckpointCorruptError, match=r"the file ends 5 bytes too early"):
            reader.tensor("a")


def test_tensors_that_the_format_cannot_hold_are_named(tmp_path):
    twice = [TensorSpec.of("a", torch.zeros(1))] * 2
    with pytest.raises(CheckpointError, match=r"^a: two tensors"):
        laid_out(tmp_path / "x", twice)
    rotary = [TensorSpec.of("rope", torch.zeros(1, dtype=torch.complex64))]
    with pytest.raises(
        CheckpointError, match=r"^rope: safetensors does not support torch\.complex64"
    ):
        laid_out(tmp_path / "x", rotary)
    assert not (tmp_path / "x").exists()


def test_an_existing_file_is_never_overwritten(tmp_path):
    (tmp_path / "x").write_text("precious")
    with pytest.raises(FileExistsError):
        laid_out(tmp_path / "x", [])
    assert (tmp_path / "x").read_text() == "precious"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_exports_are_cast_as_torch_casts(dtype, tmp_path):
    tensor = torch.randn(5, 7).double()
    file = laid_out(tmp_path / "x.safetensors", [TensorSpec.of("a", tensor.to(dtype))])
    with TensorWriter(tmp_path, [file]) as writer:
        writer.write("a", tensor)
        writer.confirm([file], writer.written)
    assert same(load_file(tmp_path / "x.safetensors")["a"], tensor.to(dtype))
