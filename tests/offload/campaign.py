"""Damage what runs read, by classes: ``python -m tests.offload.campaign --seed 1 --minutes 1``.

Each class prints how often it did damage, how often the answer was right or an error of ours
(survived), how often wrong data or a wrong verdict was served (lost), and foreign exceptions.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

from zerotune.diffusion.data import CacheSettings, TensorCache
from zerotune.errors import ZeroTuneError
from zerotune.offload import LeaseRecord, cleanup_stale_swap
from zerotune.offload.lease import LOCK_FILE, lease_name, new_run_id


def cache_bits(work: Path, chance: random.Random) -> bool:
    """A flipped bit anywhere in a cache: the right tensors, or an error."""
    settings = CacheSettings(kind="latents", model="none", dtype="float32")
    tensors = {f"{key:040x}": {"latents": torch.randn(4, 4, 4)} for key in range(6)}
    cache = TensorCache(work, settings=settings)
    cache.write(tensors)
    (path,) = cache.folder.glob("*.safetensors")
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)
    again = TensorCache(work, settings=settings)
    for key, named in tensors.items():
        try:
            read = again.read(key)
        except ZeroTuneError:
            continue
        if not torch.equal(read["latents"], named["latents"]):
            return False
    return True


def lease_records(work: Path, chance: random.Random) -> bool:
    """A damaged record beside a dead lease: the dead one goes, nothing fails or waits."""
    folders = [work / lease_name(new_run_id()) for _ in range(2)]
    for folder in folders:
        folder.mkdir()
        (folder / LOCK_FILE).touch()
        record = LeaseRecord.for_this_process(
            run_id=folder.name, rank=0, world_size=1, plan_digest="0" * 64, filesystem="ext4"
        )
        # A process number that no system gives.
        text = record.to_json().replace(f'"pid": {os.getpid()}', '"pid": 99999999')
        (folder / "rank0.json").write_text(text)
    damaged = folders[0] / "rank0.json"
    damaged.unlink()
    way = chance.randrange(4)
    if way == 0:
        os.mkfifo(damaged)
    elif way == 1:
        damaged.symlink_to(folders[1] / "rank0.json")
    elif way == 2:
        damaged.mkdir()
    else:
        damaged.write_bytes(chance.randbytes(chance.randrange(200)))
    report = cleanup_stale_swap(work)
    return folders[0].exists() and not folders[1].exists() and not report.failures


CLASSES = {"cache bits": cache_bits, "lease records": lease_records}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--minutes", type=float, default=0.2)
    arguments = parser.parse_args()
    chance, bad = random.Random(arguments.seed), 0
    print(f"seed {arguments.seed}", flush=True)
    for name, attack in CLASSES.items():
        counts: Counter[str] = Counter()
        end = time.monotonic() + 60 * arguments.minutes / len(CLASSES)
        while time.monotonic() < end:
            with tempfile.TemporaryDirectory() as folder:
                counts["injected"] += 1
                try:
                    counts["survived" if attack(Path(folder), chance) else "lost"] += 1
                except Exception as error:  # noqa: BLE001 - what is counted.
                    counts["foreign"] += 1
                    print(f"{name}: {type(error).__name__}: {error}", flush=True)
        said = ", ".join(
            f"{counts[key]} {key}" for key in ("injected", "survived", "lost", "foreign")
        )
        print(f"{name}: {said} exceptions", flush=True)
        bad += counts["lost"] + counts["foreign"]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
