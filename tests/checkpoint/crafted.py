"""Manifests and headers made up by chance, whose hashes are right: into one real engine."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from pathlib import Path
from typing import Any

from tests.checkpoint.refusals import Tried
from tests.checkpoint.runs import everything
from zerotune.checkpoint import latest_checkpoint, verify_checkpoint
from zerotune.checkpoint import manifest as manifests
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
    """Every container and key inside a JSON value."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, item in list(pairs):
        found.append((value, key))
        if isinstance(item, (dict, list)):
            found += places(item)
    return found


def mutate(content: Any, chance: random.Random) -> None:
    """Change one thing somewhere."""
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
    # The parts that are read one by one; the rendered configuration is only looked up in.
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


def campaign(root: str, *, seed: int, count: int) -> dict[str, Any]:
    """Load crafted checkpoints; what was no error of ours, and what changed the engine."""
    tried, chance = Tried(root), random.Random(seed)
    tried.load(tried.good, rng=False)
    before = everything(tried.engine, tried.ema)
    before.pop("random")
    found: dict[str, Any] = {"foreign": [], "changed": [], "refused": 0, "loaded": 0}
    for number in range(count):
        folder = tried.root / "crafted" / "step-00000001"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tried.good, folder)
        craft = chance.choice([craft_manifest, craft_header])
        craft(folder, chance)
        name = f"{seed}/{number} {craft.__name__}"
        for work in (
            lambda folder=folder: latest_checkpoint(folder.parent),
            lambda folder=folder: verify_checkpoint(folder),
        ):
            try:
                work()
            except ZeroTuneError:
                pass
            except Exception as error:  # noqa: BLE001 - what the campaign looks for
                found["foreign"].append(f"{name}: {type(error).__name__}: {error}"[:300])
        try:
            tried.load(folder)
        except ZeroTuneError as error:
            found["refused"] += 1
            cause = error.__cause__
            if cause is not None and "Error: " in error.reason and error.fix is None:
                found["foreign"].append(f"{name}: {error} <- {type(cause).__name__}"[:300])
        except Exception as error:  # noqa: BLE001 - what the campaign looks for
            found["foreign"].append(f"{name}: {type(error).__name__}: {error}"[:300])
        else:
            found["loaded"] += 1
            tried.load(tried.good, rng=False)
            continue
        after = everything(tried.engine, tried.ema)
        after.pop("random")
        if after != before:
            found["changed"].append(name)
            tried.load(tried.good, rng=False)
    tried.finish()
    return found
