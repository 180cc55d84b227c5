"""A file written by several ranks, and the layout they share."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from zerotune.checkpoint.contents import Counters, Part, RankShare
from zerotune.checkpoint.filing import Filing
from zerotune.checkpoint.tensors import WEIGHTS, Subject, TensorWriter, confirm, hash_of
from zerotune.errors import CheckpointCorruptError, CheckpointError

MOMENT = Subject(kind="optimizer", of="exp_avg")


def share(parts, *, step=3):
    counters = {part.name: Counters(step=step, scalars={}) for part in parts}
    return RankShare(parts={WEIGHTS: tuple(parts)}, counters=counters, nbytes=10)


def part(name, start, numel):
    return Part(name=name, start=start, numel=numel)


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 6), max_size=3), min_size=1, max_size=5),
    cuts=st.lists(st.integers(0, 30), max_size=4),
    shard_size=st.integers(4, 400),
)
def test_the_file_is_complete_however_its_parts_are_cut(shapes, cuts, shard_size, tmp_path_factory):
    tensors = {f"p{i}": torch.randn(shape) for i, shape in enumerate(shapes)}
    writers = [[] for _ in range(3)]
    for name, tensor in tensors.items():
        edges = sorted({0, tensor.numel(), *(cut for cut in cuts if cut < tensor.numel())})
        for number, (start, stop) in enumerate(itertools.pairwise(edges)):
            writers[number % 3].append(part(name, start, stop - start))
    sizes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    filing = Filing.of([share(parts) for parts in writers], sizes, shard_size=shard_size)
    folder, written, loaded = tmp_path_factory.mktemp("shared"), [], {}
    for file in filing.files:
        file.create(folder)
    for parts in reversed(writers):
        with TensorWriter(folder, filing.files) as writer:
            for each in parts:
                flat = tensors[each.name].reshape(-1)[each.start : each.start + each.numel]
                writer.write(each.name, flat, subject=WEIGHTS, start=each.start)
            written += writer.written
    for file in filing.files:
        record = confirm(folder, file, written)
        path = folder / file.name
        assert (record.nbytes, record.sha256) == (path.stat().st_size, hash_of(path))
        loaded |= load_file(path)
    assert {record.name: record.shape for record in filing.parameters} == sizes
    assert set(loaded) == set(tensors)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    "parts",
    [
        [part("p", 0, 3)],
        [part("p", 1, 3)],
        [part("p", 0, 3), part("p", 2, 2)],
        [part("p", 0, 4), part("p", 0, 4)],
        [],
    ],
)
def test_elements_held_by_no_rank_or_by_two_are_refused(parts):
    with pytest.raises(
        CheckpointError, match=r"weights/p: the ranks' fragments do not cover the tensor"
    ):
        Filing.of([share(parts[:1]), share(parts[1:])], {"p": (2, 2)})


def test_a_state_that_only_some_parameters_have_is_filed_for_these_alone():
    first = share([part("p", 0, 4), part("q", 0, 1)])
    second = RankShare(parts={MOMENT: (part("q", 0, 1),)}, counters={}, nbytes=0)
    filing = Filing.of([first, second], {"p": (4,), "q": (1,)})
    assert [(file.name, set(file.offsets)) for file in filing.files] == [
        ("weights-00001-of-00001.safetensors", {"p", "q"}),
        ("optimizer.exp_avg-00001-of-00001.safetensors", {"q"}),
    ]
    assert [record.states for record in filing.parameters] == [(), ("exp_avg",)]


def test_bytes_changed_by_the_disk_are_detected(tmp_path):
    filing = Filing.of([share([part("p", 0, 4)])], {"p": (4,)})
    (file,) = filing.files
    file.create(tmp_path)
    with TensorWriter(tmp_path, filing.files) as writer:
        writer.write("p", torch.ones(4), subject=WEIGHTS)
        written = writer.written
    confirm(tmp_path, file, written)
    path = tmp_path / file.name
    whole = path.read_bytes()
    for harm in (whole[:-1] + b"\1", whole[:-1], whole + b"\0", b"\0" + whole[1:]):
        path.write_bytes(harm)
        with pytest.raises(CheckpointCorruptError, match="differ from the written data"):
            confirm(tmp_path, file, written)
    path.write_bytes(whole)
    with pytest.raises(CheckpointCorruptError, match="differ from the written data"):
        confirm(tmp_path, file, ())


@pytest.mark.parametrize(
    ("name", "start", "tensor"),
    [
        ("q", 0, torch.ones(4)),
        ("p", 0, torch.ones(5)),
        ("p", 3, torch.ones(2)),
        ("p", 0, torch.ones(4).half()),
    ],
)
def test_only_tensors_of_the_layout_are_written(name, start, tensor, tmp_path):
    filing = Filing.of([share([part("p", 0, 4)])], {"p": (4,)})
    filing.files[0].create(tmp_path)
    with TensorWriter(tmp_path, filing.files) as writer:
        with pytest.raises(CheckpointError, match=f"{name}: weights changed while it was saved"):
            writer.write(name, tensor, subject=WEIGHTS, start=start)
        assert writer.written == ()
