"""Damage to small files that a run reads: cache entries and lease records."""

from __future__ import annotations

import os
import random
from pathlib import Path

import torch

from stress.faults.campaign import Found
from zerotune._util.ownership import new_run_id
from zerotune.diffusion.data.cache import CacheSettings, TensorCache
from zerotune.errors import ZeroTuneError
from zerotune.offload import cleanup_stale_swap
from zerotune.offload.lease import LOCK_FILE, LeaseRecord, lease_name


class CacheBits:
    """A flipped bit anywhere in a cache: reading returns the right tensors or raises an error."""

    def inject(self, work: Path, chance: random.Random) -> None:
        settings = CacheSettings(kind="latents", model="none", dtype="float32")
        tensors = {f"{key:040x}": _entry() for key in range(6)}
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
            same = [
                torch.equal(read[name], one) and read[name].dtype == one.dtype
                for name, one in named.items()
            ]
            if read.keys() != named.keys() or not all(same):
                raise Found("lost", "other tensors than were written")

    def close(self) -> None:
        """Do nothing: no process was started."""


def _entry() -> dict[str, torch.Tensor]:
    """Return all cached tensors of an edited image with a mask."""
    return {
        "latents": torch.randn(4, 4, 4),
        "reference_latents": torch.randn(4, 4, 4, dtype=torch.bfloat16),
        "loss_masks": torch.rand(1, 4, 4),
        "crop_corner": torch.randint(0, 9, (2,)),
    }


class LeaseRecords:
    """A damaged record next to a dead lease: the dead one is removed, nothing fails or hangs."""

    def inject(self, work: Path, chance: random.Random) -> None:
        folders = [work / lease_name(new_run_id()) for _ in range(2)]
        for folder in folders:
            folder.mkdir()
            (folder / LOCK_FILE).touch()
            record = LeaseRecord.for_this_process(
                run_id=folder.name, rank=0, world_size=1, plan_digest="0" * 64, filesystem="ext4"
            )
            # A PID that no system assigns.
            text = record.to_json().replace(f'"pid": {os.getpid()}', '"pid": 99999999')
            (folder / "rank0.json").write_text(text)
        harm(folders[0] / "rank0.json", chance, other=folders[1] / "rank0.json")
        report = cleanup_stale_swap(work)
        if report.failures:
            raise Found("lost", f"the cleaning failed: {report.failures}")
        if not folders[0].exists() or folders[1].exists():
            raise Found("lost", "a folder of nobody knows whom was removed, or the dead one stayed")

    def close(self) -> None:
        """Do nothing: no process was started."""


def harm(path: Path, chance: random.Random, *, other: Path) -> None:
    """Replace a file by a pipe, a link to ``other``, a folder, or random bytes."""
    path.unlink()
    way = chance.randrange(4)
    if way == 0:
        os.mkfifo(path)
    elif way == 1:
        path.symlink_to(other)
    elif way == 2:
        path.mkdir()
    else:
        path.write_bytes(chance.randbytes(chance.randrange(200)))
