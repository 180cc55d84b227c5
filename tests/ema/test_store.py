"""Every store holds the same numbers and takes only the memory it should."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.ema.test_shadow import move, weights
from tests.support.memory import in_use, needs_mallinfo, resident
from tests.support.models import HostileNet
from zerotune.ema import DeviceStore, EMAModel, EMAShadow, FileStore
from zerotune.ema.stores import HostStore
from zerotune.errors import EMAError, InvalidValueError
from zerotune.plan.memory.costing import EMA_CHUNK, EMA_CHUNKS


def stores(folder: Path) -> list[object]:
    return [HostStore(), DeviceStore(), DeviceStore(device="cpu"), FileStore(folder=folder)]


def test_every_store_holds_the_same_ema(tmp_path):
    model = HostileNet()
    emas = [EMAShadow(decay=0.9, store=store).attach(model) for store in stores(tmp_path)]
    for step in range(5):
        move(model, seed=step)
        for ema in emas:
            ema.step()
    expected = dict(emas[0].gather())
    trained = weights(model)
    for ema in emas[1:]:
        assert all(torch.equal(full, expected[name]) for name, full in ema.gather())
        with ema.swapped_in():
            assert all(torch.equal(v, expected[n]) for n, v in weights(model).items())
        assert all(torch.equal(v, trained[n]) for n, v in weights(model).items())
        assert ema.nbytes == emas[0].nbytes


@needs_mallinfo
def test_a_file_takes_only_the_memory_of_its_chunks(tmp_path):
    model = torch.nn.Linear(8192, 4096)
    before, mapped = in_use(), resident()
    ema = EMAShadow(decay=0.9, store=FileStore(folder=tmp_path)).attach(model)
    ema.step()
    assert ema.nbytes == 4 * (8192 * 4096 + 4096) > 2 * EMA_CHUNK * EMA_CHUNKS - 1
    # A tolerance of a quarter for small objects of other threads; a copy would be 100 %.
    assert in_use() - before < 0.25 * ema.nbytes
    assert resident() - mapped < EMA_CHUNK * EMA_CHUNKS + 0.25 * ema.nbytes


@needs_mallinfo
def test_the_memory_store_takes_four_bytes_per_element():
    model = torch.nn.Linear(4096, 4096)
    before = in_use()
    ema = EMAShadow(decay=0.9, store=HostStore()).attach(model)
    grown = in_use() - before
    # A tolerance of a tenth: a bf16 shadow would take half, a second copy double.
    assert abs(grown - ema.nbytes) < 0.1 * ema.nbytes


def test_a_full_disk_is_named_and_nothing_is_left(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    ema = EMAShadow(decay=0.9, store=FileStore(folder=tmp_path))
    with pytest.raises(EMAError, match="No space left") as caught:
        ema.attach(HostileNet())
    assert caught.value.key == "FileStore.folder"
    assert str(tmp_path) in str(caught.value)
    assert not list(tmp_path.iterdir())
    assert not ema.attached
    with pytest.raises(EMAError, match="No such file"):
        EMAShadow(store=FileStore(folder=tmp_path / "absent")).attach(HostileNet())


def test_a_rank_that_owns_no_weights_needs_no_file(tmp_path):
    for store in stores(tmp_path):
        assert dict(store.allocate({}, device=torch.device("cpu"))) == {}


def test_move_preserves_every_bit_and_reports_its_place(tmp_path):
    model = HostileNet()
    ema = EMAShadow(decay=0.9).attach(model)
    move(model, seed=1)
    ema.step()
    before = dict(ema.gather())
    assert "on the CPU" in ema.explain()
    ema.move(FileStore(folder=tmp_path))
    assert f"in a file in {tmp_path}" in ema.explain()
    assert all(torch.equal(full, before[name]) for name, full in ema.gather())
    with pytest.raises(EMAError):
        ema.move(FileStore(folder=tmp_path / "absent"))
    assert all(torch.equal(full, before[name]) for name, full in ema.gather())


@pytest.mark.parametrize("place", ["nvme", HostStore, 3])
def test_an_invalid_store_is_refused(place):
    with pytest.raises(InvalidValueError, match="not a valid store for a shadow"):
        EMAShadow(store=place)


def test_follow_leaves_the_shadow_in_its_store(tmp_path):
    model = torch.nn.Linear(3, 2)
    ema = EMAModel(model.parameters(), store=FileStore(folder=tmp_path))
    ema.follow(model)
    assert isinstance(ema.shadow.store, FileStore)
    assert "file" in ema.shadow.explain()
