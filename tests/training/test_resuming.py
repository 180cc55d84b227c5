"""Any bad trainer state in a checkpoint raises our error before anything changes."""

from __future__ import annotations

import json

import pytest

from stress.faults.resuming import Resumed
from tests.checkpoint.crafted import sign
from tests.support.errors import error_of
from tests.support.ranks import run_ranks
from zerotune.checkpoint.manifest import MANIFEST

STRANGE = {
    "no seed": ("dataset", lambda part: part.pop("seed")),
    "no data": ("dataset", lambda part: part.pop("data")),
    "a list": ("dataset", lambda part: part.update(data=[1])),
    "a place without a seed": ("dataset", lambda part: part["data"].pop("seed")),
    "a place before the first": ("dataset", lambda part: part["data"].update(position=-1)),
    "a length that is text": ("dataset", lambda part: part["data"].update(length="\ud800")),
    "other data": ("dataset", lambda part: part["data"].update(length=13)),
    "too many batches": ("batches", lambda part: part["data"].update(batches=10**400)),
    "no batches": ("batches", lambda part: part["data"].update(batches=[[]])),
    "a generator of a few bytes": ("batches", lambda part: part.update(generators=["oHyR"])),
    "no generator": ("batches", lambda part: part.update(generators=[])),
    "a generator that is a number": ("batches", lambda part: part.update(generators=[-1])),
}


def strange(root):
    """Return the error for each state, and whether the trainer is unchanged."""
    resumed, found = Resumed(root), {}
    for name, (kind, change) in STRANGE.items():
        trainer, folder = resumed.trainers[kind], resumed.root / kind
        content = json.loads((folder / MANIFEST).read_text())
        good = json.dumps(content)
        change(content["extra"]["trainer"])
        sign(folder, content)
        found[name] = error_of(lambda t=trainer, f=folder: t.resume(f)), resumed.unchanged(kind)
        sign(folder, json.loads(good))
        trainer.resume(folder)
        trainer.fit(steps=3)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_ranks(strange, str(tmp_path_factory.mktemp("strange")))[0]


@pytest.mark.parametrize("name", list(STRANGE))
def test_a_malformed_state_is_refused_and_changes_nothing(found, name):
    said, unchanged = found[name]
    assert said.startswith(("CheckpointCorruptError: extra.trainer", "DataError: ")), said
    assert said.isascii() or "…" in said
    assert unchanged
