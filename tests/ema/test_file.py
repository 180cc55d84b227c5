"""An EMA on disk has the same bits as one in memory, and a failed transfer loses nothing."""

from __future__ import annotations

import errno
import gc
import os
import random
import sys
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.backend.host import streaming
from tests.backend.host.streaming import Run, loss_of, make_model
from tests.ema.engines import fingerprint, train
from tests.ema.test_shadow import move, weights
from tests.support.models import HostileNet, WideNet
from tests.support.ranks import run_ranks
from tests.support.runs import PLAIN, Case, start
from tests.support.sampling import nightly
from zerotune.checkpoint import load_checkpoint, save_checkpoint
from zerotune.ema import EMAShadow, EMAShadows, FileStore
from zerotune.ema import file as module
from zerotune.ema.file import FileTensors
from zerotune.errors import EMAError
from zerotune.plan.context import Streaming

CHUNK = 2**14
"""Bytes; less than most weights of the test models, so that they are divided."""
SIZES = {"a": 1, "b": 4095, "c": 4096, "d": 4097, "e": 3, "f": 20_001, "g": 1024, "h": 9_999}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(module, "EMA_CHUNK", CHUNK)
    yield
    # An error of a transfer holds the file, and so its thread, until it is collected.
    gc.collect()


class Twin:
    """The same changes to a file and to tensors in memory."""

    def __init__(self, folder: Path) -> None:
        self.file = FileTensors(SIZES, folder=folder)
        self.memory = {key: torch.zeros(numel) for key, numel in SIZES.items()}

    def write(self, keys: Any, value: float) -> None:
        for key in keys:
            for part, opened in self.file.ranges(key):
                opened.fill_(value + part.start)
                self.memory[key][part].fill_(value + part.start)

    def check(self) -> None:
        for key, expected in self.memory.items():
            assert torch.equal(self.file[key], expected), key


def failing(call: Callable[..., int], times: int, number: int) -> Callable[..., int]:
    """Return a system call that fails for the first ``times`` calls."""
    left = [times]

    def act(*arguments: Any) -> int:
        if left[0]:
            left[0] -= 1
            raise OSError(number, os.strerror(number))
        return call(*arguments)

    return act


@pytest.mark.parametrize("direct", [True, False])
def test_a_file_holds_the_bits_that_were_written_in_any_order(direct, tmp_path, monkeypatch):
    if not direct:

        def refuse(*_: object) -> None:
            raise OSError(errno.EINVAL, "no direct transfers, as on tmpfs")

        monkeypatch.setattr(module.fcntl, "fcntl", refuse)
    chance, twin = random.Random(0), Twin(tmp_path)
    for step in range(12):
        keys = list(SIZES)
        if step % 4 == 3:
            chance.shuffle(keys)
        if step % 3 == 2:
            keys = keys[: chance.randrange(len(keys))]
        twin.write(keys, step)
        assert len(twin.file._pages) <= module.EMA_CHUNKS
        if step % 5 == 4:
            twin.check()
    twin.check()


def test_chunks_are_read_ahead_in_the_order_of_the_previous_update(tmp_path, monkeypatch):
    twin, order = Twin(tmp_path), ["f", "g", "h", "c", "d", "a", "b", "e"]
    waited: list[int] = []
    real = FileTensors._room

    def room(self: FileTensors, wanted: Any, *, waits: bool) -> Any:
        if waits:
            waited.append(wanted[0])
        return real(self, wanted, waits=waits)

    monkeypatch.setattr(FileTensors, "_room", room)
    for _ in range(3):
        before = len(waited)
        for key in order:
            for _, opened in twin.file.ranges(key):
                opened.fill_(1.0)
                # All transfers have ended once a task that was put last has run.
                twin.file._transfers.submit(int).result(60)
    assert before
    assert len(waited) == before, "a chunk was read only when it was needed"


def test_no_range_is_shorter_than_the_vectors_of_a_kernel(tmp_path, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(FileTensors, "_create", lambda *_: os.open(os.devnull, os.O_RDONLY))
    most = module.EMA_CHUNK // 4
    sizes = {str(n): n for k in (1, 2, 300) for n in range(k * most - 2, k * most + 3)}
    tensors = FileTensors(sizes, folder=tmp_path)
    for key, numel in sizes.items():
        edges = tensors.edges(key)
        lengths = [stop - start for start, stop in pairwise(edges)]
        assert sum(lengths) == numel
        assert all(most // 4 < length <= most for length in lengths)
        assert all(edge % 1024 == 0 for edge in edges[:-1]), "blocks of 8-bit moments"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_failed_write_is_named_and_loses_nothing(number, tmp_path, monkeypatch):
    twin = Twin(tmp_path)
    twin.write(SIZES, 1.0)
    monkeypatch.setattr(module.os, "pwritev", failing(os.pwritev, 1, number))
    with pytest.raises(EMAError, match="cannot be written to its file") as caught:
        twin.write([*SIZES, *SIZES], 2.0)
    assert str(tmp_path) in str(caught.value)
    assert caught.value.fix
    twin.check()
    twin.write(SIZES, 9.0)
    twin.check()


def test_a_failed_read_is_named_and_can_be_repeated(tmp_path, monkeypatch):
    twin = Twin(tmp_path)
    twin.write(SIZES, 1.0)
    monkeypatch.setattr(module.os, "preadv", failing(os.preadv, 1, errno.EIO))
    with pytest.raises(EMAError, match="cannot be read from its file"):
        twin.check()
    twin.check()
    twin.write(SIZES, 2.0)
    twin.check()


def test_an_interrupt_at_any_line_loses_nothing(tmp_path):
    twin, line = Twin(tmp_path), 0
    source = module.__file__

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal line
        if frame.f_code.co_filename != source or frame.f_code.co_name == "_transfer":
            return None
        if event == "line":
            line -= 1
            if line == 0:
                raise KeyboardInterrupt
        return trace

    for index in range(1, 400, 7):
        line = index
        keys = random.Random(index).sample(list(SIZES), 4)
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            twin.write(keys, index)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        twin.check()


def test_swapping_in_restores_every_bit_after_a_failed_write(tmp_path, monkeypatch):
    model = WideNet()
    ema = EMAShadow(decay=0.9, store=FileStore(folder=tmp_path)).attach(model)
    move(model, seed=1)
    ema.step()
    trained, averaged = weights(model), dict(ema.gather())
    real = os.pwritev

    def broken(descriptor: int, buffers: Any, offset: int) -> int:
        if offset == ema._tensors._offsets[20]:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor, buffers, offset)

    with monkeypatch.context() as patched:
        patched.setattr(module.os, "pwritev", broken)
        with pytest.raises(EMAError, match="cannot be written"), ema.swapped_in():
            pytest.fail("the block must not run on half exchanged weights")
        assert all(torch.equal(value, trained[name]) for name, value in weights(model).items())
        assert all(torch.equal(full, averaged[name]) for name, full in ema.gather())
    with ema.swapped_in():
        assert all(torch.equal(value, averaged[name]) for name, value in weights(model).items())


def open_files(folder: Path) -> list[str]:
    links = (link for link in Path("/proc/self/fd").iterdir() if link.is_symlink())
    return [name for link in links if str(folder) in (name := str(link.readlink()))]


def test_the_file_has_no_name_and_is_closed_with_its_thread(tmp_path):
    others = set(threading.enumerate())
    ema = EMAShadow(decay=0.9, store=FileStore(folder=tmp_path)).attach(HostileNet())
    assert not list(tmp_path.iterdir()), "a killed run must leave nothing behind"
    assert len(open_files(tmp_path)) == 1
    (thread,) = set(threading.enumerate()) - others
    del ema
    assert not open_files(tmp_path)
    thread.join(60)
    assert not thread.is_alive()


# -- On engines: an EMA on disk equals one in memory, and changes no weight.


def shadows(folder: str | None) -> EMAShadows:
    """Return an EMA in memory, and two that are on disk if there is a folder."""
    module.EMA_CHUNK = CHUNK
    store = None if folder is None else FileStore(folder=folder)
    return EMAShadows(
        shadows={
            "memory": EMAShadow(decay=0.9),
            "file": EMAShadow(decay=0.9, store=store),
            "slow": EMAShadow(decay=0.4, update_every=2, store=store),
        }
    )


def fingerprints(source: Any) -> dict[str, str]:
    return {name: fingerprint(full) for name, full in source.gather()}


def divided(emas: EMAShadows) -> bool:
    """Return whether some fragments are divided between chunks."""
    tensors = emas["file"]._tensors
    return any(len(tensors.edges(key)) > 2 for key in tensors)


def on_wrapper(case: Case, folder: str | None) -> dict[str, dict[str, str]]:
    engine = start(case, WideNet())
    emas = shadows(folder).attach(engine)
    for step in range(7):
        train(engine, step)
        emas.step()
    found = {name: fingerprints(ema) for name, ema in emas.items()}
    found["trained"] = fingerprints(engine.master_weights)
    if folder is not None:
        assert divided(emas)
        with emas["file"].swapped_in():
            found["swapped in"] = fingerprints(engine.master_weights)
        assert fingerprints(engine.master_weights) == found["trained"]
    engine.close()
    return found


def both_on_wrapper(case: Case, folder: str) -> None:
    found, expected = on_wrapper(case, folder), on_wrapper(case, None)
    assert found["trained"] == expected["trained"]
    assert found["memory"] == found["file"] == found["swapped in"] == expected["memory"]
    assert found["slow"] == expected["slow"] != expected["memory"]


BF16 = Case(stage=2, offload="cpu", precision="bf16", engine="deepspeed")
HIDDEN = Case(stage=2, offload="cpu", precision="bf16", engine="host")
STAGE_3 = Case(stage=3, offload="cpu", overrides=(("sub_group_size", 100_000),))


@pytest.mark.deepspeed
@pytest.mark.parametrize(
    ("case", "world_size"),
    [
        (STAGE_3, 2),
        *nightly((HIDDEN, 1), (PLAIN, 1), (BF16, 1)),
    ],
)
def test_an_ema_on_disk_equals_one_in_memory_on_deepspeeds_engines(case, world_size, tmp_path):
    run_ranks(both_on_wrapper, case, str(tmp_path), world_size=world_size)


def on_stream(run: Run, folder: str | None) -> dict[str, dict[str, str]]:
    lean = run.optimizer != "AdamW"
    streamed = Streaming(window=2, split_masters=lean, gradient_buffers=2)
    with streaming.start(run, make_model(run), streamed=streamed) as engine:
        emas = shadows(folder).attach(engine)
        for step in range(run.steps):
            engine.backward(loss_of(run, engine, step + 1000 * engine.group.rank))
            engine.step()
            emas.step()
        found = {name: fingerprints(ema) for name, ema in emas.items()}
        found["trained"] = fingerprints(engine.master_weights)
        if folder is not None:
            assert divided(emas)
            ema = {"ema": emas["file"]}
            saved = save_checkpoint(Path(folder) / "saved", engine=engine, shadows=ema)
            emas["file"].begin_anew()
            assert emas["file"].distance() == 0
            load_checkpoint(saved, engine=engine, shadows=ema)
            found["loaded"] = fingerprints(emas["file"])
        del emas
    return found


def both_on_stream(run: Run, folder: str) -> None:
    found, expected = on_stream(run, folder), on_stream(run, None)
    assert found["trained"] == expected["trained"]
    assert found["memory"] == found["file"] == found["loaded"] == expected["memory"]
    assert found["slow"] == expected["slow"]


@pytest.mark.deepspeed
@pytest.mark.parametrize(
    ("optimizer", "clipping", "world_size"),
    [
        ("AdamW8BitStates", 0.0, 2),
        *nightly(
            ("AdamW", 1.0, 1),
            ("AdamWBF16States", 0.0, 1),
            ("AdamW8BitStates", 1.0, 1),
            ("AdamW", 0.0, 2),
        ),
    ],
)
def test_an_ema_on_disk_equals_one_in_memory_on_the_streamed_engine(
    optimizer, clipping, world_size, tmp_path
):
    run = Run(optimizer=optimizer, clipping=clipping, steps=8)
    run_ranks(both_on_stream, run, str(tmp_path), world_size=world_size)
