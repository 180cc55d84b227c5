"""Tensors computed once and kept on a disk, under a key of what they were computed from."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import attrs
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from zerotune.decisions import Decision, announce
from zerotune.errors import DataError, InvalidValueError
from zerotune.files import write_atomically

FORMAT: Final = "1"
"""Part of every key: a change of what is stored makes older caches invisible."""

_MOST_OPEN = 128


@attrs.frozen(kw_only=True)
class CacheSettings:
    """All that decides what an encoder makes of an input. Another value is another cache."""

    kind: str
    """``"latents"``, ``"text"``, …; part of the folder's name."""
    model: str
    """Which weights: a hub id with its revision, or ``hash_weights`` of a module."""
    dtype: str
    """Of the encoder's arithmetic, such as ``"bfloat16"``."""
    settings: Mapping[str, Any] = attrs.field(factory=dict)
    """Everything else, JSON types: token length, scaling factor, clip skip, …"""

    def __attrs_post_init__(self) -> None:
        if not self.kind.isidentifier():
            raise InvalidValueError(
                "is part of a folder's name", key="kind", value=self.kind, fix="write one word"
            )
        self.digest()  # Refuses what is not JSON here and not after the first shard.

    def digest(self) -> str:
        """A hash of all settings, 32 hexadecimal digits.

        Raises:
            InvalidValueError: A setting is not of a JSON type.
        """
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:32]

    def to_json(self) -> str:
        """All settings as canonical JSON.

        Raises:
            InvalidValueError: A setting is not of a JSON type.
        """
        try:
            return json.dumps({"format": FORMAT, **attrs.asdict(self)}, sort_keys=True)
        except TypeError as error:
            raise InvalidValueError(
                f"holds more than JSON types ({error})",
                key="settings",
                fix="write classes as their names and dtypes as strings",
            ) from None


def hash_weights(module: torch.nn.Module) -> str:
    """A hash of a module's parameters and buffers: names, shapes, types and values.

    Reads all weights once; give a hub id and a revision instead where you know them.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}\n".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        if flat.numel():
            digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]


def hash_key(*parts: object) -> str:
    """A key for one input: a hash of what it consists of."""
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:40]


class TensorCache:
    """Named tensors by key, in safetensors files that are each written whole or not at all.

    The files of one group of settings lie in ``root/<kind>-<digest>/``, and each names that
    digest again, so neither a changed setting nor a moved file gives tensors of other settings.
    Any number of ranks may write at once: files are named by the keys they hold.

    Args:
        root: Folder of all caches; it may lie on a shared disk.
        settings: What the tensors depend on beside their keys.

    Attributes:
        decisions: Damaged files that were set aside, and will be computed again.
    """

    def __init__(self, root: str | os.PathLike[str], *, settings: CacheSettings) -> None:
        self.settings = settings
        self.folder = Path(root) / f"{settings.kind}-{settings.digest()}"
        self.decisions: tuple[Decision, ...] = ()
        self._places: dict[str, tuple[Path, tuple[str, ...]]] = {}
        self._seen: set[Path] = set()
        self._open: dict[Path, Any] = {}
        self.refresh()

    def __contains__(self, key: str) -> bool:
        return key in self._places

    def __len__(self) -> int:
        return len(self._places)

    def __getstate__(self) -> dict[str, Any]:
        # Mapped files cannot go to another process; it maps them itself.
        return self.__dict__ | {"_open": {}}

    def refresh(self) -> None:
        """Look for files that other processes wrote."""
        if not self.folder.is_dir():
            return
        for path in sorted(self.folder.glob("*.safetensors")):
            if path not in self._seen:
                self._index(path)

    def write(self, entries: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Write the tensors of several keys as one file, atomically.

        Args:
            entries: Tensors by name by key; each key has the same names.
        """
        self._describe()
        tensors = {
            f"{key}/{name}": tensor.detach().cpu().contiguous()
            for key, named in entries.items()
            for name, tensor in named.items()
        }
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                raise DataError(
                    "the encoder gave values that are not finite",
                    key=name,
                    fix="run it in float32 or bfloat16; SDXL's VAE overflows in float16",
                )
        path = self.folder / f"{hash_key(*sorted(entries))}.safetensors"
        write_atomically(path, save(tensors, metadata={"settings": self.settings.digest()}))
        self._index(path)

    def read(self, key: str) -> dict[str, torch.Tensor]:
        """The tensors of a key.

        Raises:
            DataError: They were not computed with these settings.
        """
        if key not in self._places:
            raise DataError(
                f"is not in the cache {self.folder.name}",
                key=key,
                fix="fill the cache with these data and settings first",
            )
        path, names = self._places[key]
        if path not in self._open:
            if len(self._open) >= _MOST_OPEN:
                del self._open[next(iter(self._open))]
            self._open[path] = safe_open(path, framework="pt")
        file = self._open[path]
        return {name: file.get_tensor(f"{key}/{name}") for name in names}

    def _describe(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        note = self.folder / "settings.json"
        if not note.exists():
            write_atomically(note, self.settings.to_json().encode())

    def _index(self, path: Path) -> None:
        try:
            with safe_open(path, framework="pt") as file:
                owner = (file.metadata() or {}).get("settings")
                names = list(file.keys())
        except (SafetensorError, OSError) as error:
            self._set_aside(path, f"is damaged ({error})")
            return
        if owner != self.settings.digest():
            self._set_aside(path, "belongs to other settings")
            return
        self._seen.add(path)
        by_key: dict[str, list[str]] = {}
        for name in names:
            key, _, inner = name.partition("/")
            by_key.setdefault(key, []).append(inner)
        self._places |= {key: (path, tuple(inner)) for key, inner in by_key.items()}

    def _set_aside(self, path: Path, reason: str) -> None:
        self._seen.add(path)
        decision = Decision(
            key="cache",
            before=path.name,
            after=None,
            reason=f"the file in {self.folder.name} {reason}; what it held is computed again",
            severity="warning",
        )
        self.decisions += (decision,)
        announce((decision,))


def cache_names(caches: Iterable[TensorCache]) -> str:
    """Settings of several caches in one word, for a dataset's identity."""
    return "+".join(cache.settings.digest() for cache in caches)
