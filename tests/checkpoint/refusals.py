"""Everything that can go wrong with a checkpoint, in one process with a real engine."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import torch

from tests.checkpoint.runs import everything, hostile, reseed, shadow_of, train
from tests.support.runs import PLAIN, Case
from zerotune.checkpoint import load_checkpoint, save_checkpoint
from zerotune.checkpoint import tensors as tensorfile
from zerotune.checkpoint.folders import finite_checkpoint, verify_checkpoint
from zerotune.ema import EMAShadow


def told(action: Callable[[], Any]) -> str:
    """Return class and message of the error that an action raises; empty if it succeeds."""
    try:
        action()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the result
        return f"{type(error).__name__}: {error}"
    return ""


class Tried:
    """A trained engine, a good checkpoint of it, and the outcomes of damaged copies."""

    def __init__(self, root: str, case: Case = PLAIN) -> None:
        self.root = Path(root)
        self.engine = hostile(attrs.evolve(case, accumulation=2), seed=0)
        self.ema = shadow_of(self.engine)
        reseed(0)
        train(self.engine, self.ema, 2)
        self.good = save_checkpoint(
            self.root / "good", engine=self.engine, shadows={"ema": self.ema}
        )
        train(self.engine, self.ema, 1)
        self.found: dict[str, Any] = {}

    def load(self, folder: Path, **arguments: Any) -> Any:
        arguments.setdefault("shadows", {"ema": self.ema})
        return load_checkpoint(folder, engine=self.engine, **arguments)

    def save(self, folder: Path, **arguments: Any) -> Path:
        return save_checkpoint(folder, engine=self.engine, **arguments)

    def damage(self, name: str, harm: Callable[[Path], Any]) -> None:
        """Damage a copy of the good checkpoint: it must be detected, and the engine unchanged."""
        folder = self.root / name
        shutil.copytree(self.good, folder)
        harm(folder)
        before = everything(self.engine, self.ema)
        self.found[f"load {name}"] = told(lambda: self.load(folder))
        self.found[f"verify {name}"] = told(lambda: verify_checkpoint(folder))
        after = everything(self.engine, self.ema)
        before.pop("random"), after.pop("random")
        self.found[f"unchanged {name}"] = before == after

    def refuse(self, name: str, action: Callable[[], Any]) -> None:
        self.found[name] = told(action)

    def finish(self) -> dict[str, Any]:
        self.found["left"] = sorted(path.name for path in self.root.iterdir())
        self.found["good"] = told(lambda: verify_checkpoint(self.good))
        self.engine.close()
        return self.found


def tensor_file(folder: Path) -> Path:
    (path,) = folder.glob("optimizer.exp_avg-*.safetensors")
    return path


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def damaged(root: str) -> dict[str, Any]:
    tried = Tried(root)
    tried.damage("flipped", lambda folder: flip(tensor_file(folder), -1000))
    tried.damage("header", lambda folder: flip(tensor_file(folder), 40))
    tried.damage("truncated", lambda folder: os.truncate(tensor_file(folder), 1500))
    tried.damage("missing", lambda folder: tensor_file(folder).unlink())
    tried.damage("manifest", lambda folder: flip(folder / "manifest.json", 700))
    tried.damage("beheaded", lambda folder: (folder / "manifest.json").unlink())
    return tried.finish()


def refused(root: str) -> dict[str, Any]:
    """Collect everything that save and load refuse, with the reasons."""
    tried = Tried(root)
    path, engine, ema = tried.root / "new", tried.engine, tried.ema
    for name, extra in {
        "tensor": {"a": [1, torch.zeros(1)]},
        "nan": {"a": {"b": float("nan")}},
        "key": {"a": {1: 2}},
    }.items():
        tried.refuse(f"extra {name}", lambda extra=extra: tried.save(path, extra=extra))
    tried.refuse("shadow name", lambda: tried.save(path, shadows={"a/b": ema}))
    engine.backward(engine(torch.randn(4, 7, 7)).pow(2).mean())
    engine.step()
    tried.refuse("accumulating", lambda: tried.save(path))
    tried.refuse("load accumulating", lambda: tried.load(tried.good))
    engine.backward(engine(torch.randn(4, 7, 7)).pow(2).mean())
    engine.step()
    with ema.swapped_in():
        tried.refuse("swapped in", lambda: tried.save(path, shadows={"ema": ema}))
    (tried.root / "mine").mkdir()
    (tried.root / "mine" / "thesis.txt").write_text("precious")
    tried.refuse("not ours", lambda: tried.save(tried.root / "mine"))
    tried.refuse("a file", lambda: tried.save(tried.root / "mine" / "thesis.txt"))
    (tried.root / "link").symlink_to(tried.good)
    tried.refuse("a link", lambda: tried.save(tried.root / "link"))
    full = shutil.disk_usage(tried.root)._replace(free=2**24 + 1000)
    with mock.patch("shutil.disk_usage", return_value=full):
        tried.refuse("disk too small", lambda: tried.save(path))
    with failing_write(8_000):
        tried.refuse("disk full", lambda: tried.save(tried.good))
    not_finite(tried, path)
    tried.refuse("no such folder", lambda: tried.load(tried.root / "none"))
    tried.refuse("no checkpoint", lambda: tried.load(tried.root / "mine"))
    tried.refuse("parent", lambda: tried.load(steps_root(tried)))
    other = EMAShadow(decay=0.5).attach(engine)
    tried.refuse("unknown shadow", lambda: tried.load(tried.good, shadows={"slow": other}))
    tried.found["shadow left out"] = [str(d) for d in tried.load(tried.good, shadows={}).decisions]
    return tried.finish()


def not_finite(tried: Tried, path: Path) -> None:
    """Save with a NaN among the weights and an infinite moment."""
    asked = spoiled_buffer(tried, path)
    poison(tried.engine, float("nan"))
    tried.refuse("not finite", lambda: tried.save(path))
    tried.refuse("former stays", lambda: tried.save(tried.good))
    tried.save(asked, allow_not_finite=True)
    tried.found["asked"] = verify_checkpoint(asked).not_finite
    shutil.copytree(tried.good, asked.parent / "step-00000001")
    tried.found["finite"] = str(finite_checkpoint(asked.parent))
    shutil.rmtree(asked.parent)
    tried.load(tried.good)


def spoiled_buffer(tried: Tried, path: Path) -> Path:
    """Save with a NaN in a buffer; return where to save with ``allow_not_finite``."""
    root, (average,) = tried.root / "asked", buffers_called(tried.engine, "average")
    average[0] = float("nan")
    tried.refuse("not a number in a buffer", lambda: tried.save(path))
    folder = tried.save(root / "step-00000004", allow_not_finite=True)
    tried.found["buffer asked"] = verify_checkpoint(folder).not_finite
    average[0] = -float("inf")
    tried.refuse("infinite buffer", lambda: tried.save(root / "masked" / "mask"))
    average[0] = 0.0
    return root / "step-00000009"


def buffers_called(engine: Any, name: str) -> list[torch.Tensor]:
    return [each for called, each in engine.module.named_buffers() if called.endswith(name)]


def poison(engine: Any, value: float) -> None:
    with engine.master_weights.editing() as fragments:
        for fragment in fragments:
            if fragment.address.numel:
                fragment.value[0] = value
                fragment.states["exp_avg"][-1] = -float("inf")


def steps_root(tried: Tried) -> Path:
    root = tried.root / "steps"
    shutil.copytree(tried.good, root / "step-00000002")
    return root


@contextmanager
def failing_write(after: int) -> Iterator[None]:
    """Make writing fail after this many bytes of tensors."""
    real, left = tensorfile.write_at, [after]

    def write(descriptor: int, piece: memoryview, offset: int) -> None:
        left[0] -= len(piece)
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor, piece, offset)

    with mock.patch.object(tensorfile, "write_at", write):
        yield


def other_optimizer(folder: str, case: Case) -> dict[str, Any]:
    """Load a checkpoint of AdamW into an engine that has trained with another optimizer."""
    from tests.checkpoint.runs import fingerprint
    from zerotune.checkpoint.reader import CheckpointReader
    from zerotune.checkpoint.tensors import WEIGHTS, Subject

    engine = hostile(case, seed=1)
    ema = shadow_of(engine)
    reseed(0)
    train(engine, ema, 2)
    contents = load_checkpoint(folder, engine=engine, shadows={"ema": ema})
    with CheckpointReader(Path(folder), contents.manifest) as reader:
        names = reader.of(WEIGHTS).tensors
        saved = {name: fingerprint(reader.tensor(WEIGHTS, name)) for name in names}
        shadow = Subject(kind="shadow", of="ema")
        averaged = {name: fingerprint(reader.tensor(shadow, name)) for name in names}
    found = {
        "weights": saved == {n: fingerprint(t) for n, t in engine.master_weights.gather()},
        "ema": averaged == {n: fingerprint(t) for n, t in ema.gather()},
        "states": {
            (name, bool(state.any()))
            for fragment in engine.master_weights.read()
            for name, state in fragment.states.items()
        },
        "step": engine.state.global_step,
        "decisions": [str(decision) for decision in contents.decisions],
    }
    train(engine, ema, 1)
    engine.close()
    return found


def other_plan(folder: str, case: Case) -> Any:
    """Load a plain engine's checkpoint under another plan; return the error or the decisions."""
    engine = hostile(case, seed=0)
    contents: list[Any] = []
    error = told(lambda: contents.append(load_checkpoint(folder, engine=engine)))
    engine.close()
    return error or [str(decision) for decision in contents[0].decisions]
