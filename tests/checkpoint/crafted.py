"""Random manifests and headers with valid hashes, loaded into a real engine."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.checkpoint.refusals import Tried
from tests.checkpoint.runs import everything
from tests.support.runs import PLAIN, Case
from zerotune.checkpoint import latest_checkpoint
from zerotune.checkpoint import manifest as manifests
from zerotune.checkpoint.folders import verify_checkpoint
from zerotune.errors import ZeroTuneError

ODD: tuple[Any, ...] = (
    None,
    True,
    "",
    "../x",
    "a\0b",
    "\ud800",
    "x" * 400,
    -1,
    0,
    7,
    2**31,
    2**63,
    10**400,
    0.5,
    1e308,
    [],
    [[]],
    [-1],
    [2**62, 2**62],
    {},
    {"": 1},
    {"name": {}},
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """List every container and key inside a JSON value."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, item in list(pairs):
        found.append((value, key))
        if isinstance(item, (dict, list)):
            found += places(item)
    return found


def mutate(content: Any, chance: random.Random) -> None:
    """Change one random place."""
    holder, key = chance.choice(places(content))
    what = chance.randrange(4)
    if what == 0:
        del holder[key]
    elif what == 1 and isinstance(holder, list):
        holder.append(json.loads(json.dumps(holder[key])))
    elif what == 2 and isinstance(holder, dict):
        holder[chance.choice(["extra", "x" * 300, "\0"])] = holder.pop(key)
    else:
        holder[key] = chance.choice(ODD)


def sign(folder: Path, content: dict[str, Any]) -> None:
    content.pop("sha256", None)
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    (folder / manifests.MANIFEST).write_text(json.dumps({**content, "sha256": digest}))


def craft_manifest(folder: Path, chance: random.Random) -> None:
    content = json.loads((folder / manifests.MANIFEST).read_text())
    # Drop the rendered configuration, which is not parsed key by key.
    content["plan"]["config"] = {}
    mutate(content, chance)
    sign(folder, content)


def craft_header(folder: Path, chance: random.Random) -> None:
    content = json.loads((folder / manifests.MANIFEST).read_text())
    record = chance.choice(content["files"])
    path = folder / record["name"]
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    mutate(header, chance)
    text = json.dumps(header).encode()
    damaged = len(text).to_bytes(8, "little") + text + raw[8 + size :]
    if chance.randrange(5) == 0:
        damaged = chance.choice([b"", b"[1]", b"\xff" * 8, (20000).to_bytes(8, "little")]) + raw
    path.write_bytes(damaged)
    record["nbytes"], record["sha256"] = len(damaged), hashlib.sha256(damaged).hexdigest()
    sign(folder, content)


def damage_file(folder: Path, chance: random.Random) -> None:
    """Flip bits, cut, lengthen, empty, remove or replace any file, so that its hash is wrong."""
    path = chance.choice(sorted(folder.iterdir()))
    content = bytearray(path.read_bytes())
    way = chance.choice(["bit", "bits", "cut", "longer", "empty", "remove", "pipe", "link", "dir"])
    if way in ("bit", "bits"):
        for _ in range(1 if way == "bit" else 50):
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        path.write_bytes(content)
    elif way == "cut":
        os.truncate(path, chance.randrange(len(content)))
    elif way == "longer":
        path.write_bytes(content + chance.randbytes(chance.randrange(1, 100)))
    elif way == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()
        if way == "pipe":
            os.mkfifo(path)
        elif way == "link":
            path.symlink_to("nowhere")
        elif way == "dir":
            path.mkdir()


SAME_WIDTH = {"F32": "I32", "I64": "F64", "U8": "I8"}
"""Another dtype of the same width, so that every size stays valid."""


def harm_header(folder: Path, kind: str, what: str, begins: str) -> None:
    """Change what a header says about one tensor, with valid hashes.

    Args:
        folder: A checkpoint.
        kind: Kind of the file.
        what: ``dtype``, ``offsets`` (beyond the file's end) or ``overlap``.
        begins: Prefix of the tensor's name.
    """
    content = json.loads((folder / manifests.MANIFEST).read_text())
    record = next(each for each in content["files"] if each["kind"] == kind)
    path = folder / record["name"]
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    name = next(each for each in header if each.startswith(begins) and each != "__metadata__")
    entry = header[name]
    if what == "dtype":
        entry["dtype"] = SAME_WIDTH[entry["dtype"]]
    elif what == "offsets":
        entry["data_offsets"] = [offset + len(raw) for offset in entry["data_offsets"]]
    else:
        other = next(each for each in header if each not in (name, "__metadata__"))
        header[other] = dict(entry)
    text = json.dumps(header).encode()
    text = text.ljust(size) if what == "dtype" else text
    damaged = len(text).to_bytes(8, "little") + text + raw[8 + size :]
    path.write_bytes(damaged)
    record["nbytes"], record["sha256"] = len(damaged), hashlib.sha256(damaged).hexdigest()
    sign(folder, content)


PLACES = (
    ("weights", ""),
    ("optimizer", ""),
    ("shadow", ""),
    ("rank", "buffer"),
    ("rank", "shadow"),
    ("rank", "rng"),
)
"""Kinds of files, with the prefix of the tensor to change."""


WAYS = {"manifest": craft_manifest, "header": craft_header, "damage": damage_file}


class Attacked:
    """A trained engine into which crafted or damaged checkpoints are loaded."""

    def __init__(self, root: str, case: Case = PLAIN) -> None:
        self._tried = Tried(root, case)
        self._tried.load(self._tried.good, rng=False)
        self._before = self._now()

    def attack(self, way: str, seed: Any) -> tuple[str, str]:
        """Change one thing in a copy of the good checkpoint, and read it in every way.

        Args:
            way: Key of ``WAYS``.
            seed: Decides what is changed.

        Returns:
            ``refused``, ``loaded``, ``changed`` (refused too late) or ``foreign``, and the
            message.
        """
        return self.attack_by(lambda folder: WAYS[way](folder, random.Random(seed)))

    def attack_by(self, harm: Callable[[Path], None]) -> tuple[str, str]:
        """Run ``attack`` with ``harm`` applied to a copy of the good checkpoint."""
        tried = self._tried
        folder = tried.root / "crafted" / "step-00000001"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tried.good, folder)
        harm(folder)
        for read in (lambda: latest_checkpoint(folder.parent), lambda: verify_checkpoint(folder)):
            try:
                read()
            except ZeroTuneError:
                pass
            except Exception as error:  # noqa: BLE001 - what the campaign looks for
                return "foreign", f"{type(error).__name__}: {error}"
        outcome, said = self._load(folder)
        if outcome == "loaded":
            tried.load(tried.good, rng=False)
        elif self._now() != self._before:
            tried.load(tried.good, rng=False)
            return "changed", said
        return outcome, said

    def finish(self) -> None:
        self._tried.finish()

    def _load(self, folder: Path) -> tuple[str, str]:
        try:
            self._tried.load(folder)
        except ZeroTuneError as error:
            raw = error.__cause__ is not None and "Error: " in error.reason and error.fix is None
            return "foreign" if raw else "refused", f"{type(error).__name__}: {error}"
        except Exception as error:  # noqa: BLE001 - what the campaign looks for
            return "foreign", f"{type(error).__name__}: {error}"
        return "loaded", ""

    def _now(self) -> dict[str, Any]:
        found = everything(self._tried.engine, self._tried.ema)
        found.pop("random")
        return found


def campaign(root: str, *, seed: int, count: int) -> dict[str, Any]:
    """Load crafted checkpoints; report foreign errors and those that changed the engine."""
    attacked, chance = Attacked(root), random.Random(seed)
    found: dict[str, Any] = {"foreign": [], "changed": [], "refused": 0, "loaded": 0}
    for number in range(count):
        way = chance.choice(["manifest", "header"])
        outcome, said = attacked.attack(way, f"{seed}/{number}")
        if outcome in ("foreign", "changed"):
            found[outcome].append(f"{seed}/{number} {way}: {said}"[:300])
        else:
            found[outcome] += 1
    found["headers"] = {
        f"{kind} {begins} {what}": attacked.attack_by(
            lambda folder, args=(kind, what, begins): harm_header(folder, *args)  # type: ignore[misc]
        )
        for kind, begins in PLACES
        for what in ("dtype", "offsets", "overlap")
    }
    attacked.finish()
    return found
