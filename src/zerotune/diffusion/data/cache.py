"""Caches of encoded tensors on disk, keyed by a hash of their inputs."""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import attrs
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from zerotune._util.files import check_regular, system_errors, write_atomically
from zerotune._util.text import json_of
from zerotune.decisions import Decision, announce
from zerotune.errors import DataError, InvalidValueError

FORMAT: Final = "1"
"""Cache format version, part of the settings digest; raising it invalidates older caches."""

_MOST_OPEN = 128


@attrs.frozen(kw_only=True)
class CacheSettings:
    """Settings that determine an encoder's output; each combination of values has its own cache."""

    kind: str
    """Kind of cached tensors, such as ``"latents"``; part of the folder name."""
    model: str
    """Identity of the weights: a hub id with its revision, or ``hash_weights`` of a module."""
    dtype: str
    """Dtype in which the encoder computes, such as ``"bfloat16"``."""
    settings: Mapping[str, Any] = attrs.field(factory=dict)
    """All other settings as JSON types: token length, scaling factor, clip skip, …"""

    def __attrs_post_init__(self) -> None:
        if not self.kind.isidentifier():
            raise InvalidValueError(
                "must be one word, because it is part of a folder name",
                'write "latents", for example',
                "kind",
                self.kind,
            )
        self.digest()  # Rejects settings that are not JSON before any shard is written.

    def digest(self) -> str:
        """Return a hash of all settings as 32 hexadecimal digits.

        Raises:
            InvalidValueError: A setting is not JSON-serialisable.
        """
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:32]

    def to_json(self) -> str:
        """Return all settings as canonical JSON.

        Raises:
            InvalidValueError: A setting is not JSON-serialisable.
        """
        try:
            return json.dumps({"format": FORMAT, **attrs.asdict(self)}, sort_keys=True)
        except TypeError as error:
            raise InvalidValueError(
                f"contains values that are not JSON-serialisable ({error})",
                "write classes and dtypes as strings",
                "settings",
            ) from None


def hash_weights(module: torch.nn.Module) -> str:
    """Return a hash of a module's parameters and buffers: names, shapes, dtypes and values.

    Hashing reads all weights; it is faster to identify a model by its hub id and revision.

    Args:
        module: Model on any device.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}\n".encode())
        digest.update(_tensor_bytes(tensor))
    return digest.hexdigest()[:32]


def _tensor_bytes(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    # An empty tensor cannot be viewed as bytes.
    content: Any = flat.view(torch.uint8).numpy() if flat.numel() else b""
    return memoryview(content)


def _checksum(name: str, tensor: torch.Tensor) -> str:
    """Return a checksum of a stored tensor's name, shape, dtype and bits."""
    # A CRC detects every single flipped bit, and is five times as fast as blake2b.
    label = f"{name}:{tuple(tensor.shape)}:{tensor.dtype}\n"
    return f"{zlib.crc32(_tensor_bytes(tensor), zlib.crc32(label.encode())):08x}"


def hash_key(*parts: object) -> str:
    """Return the cache key of one input: a hash of its parts."""
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:40]


class TensorCache:
    """A disk cache that maps keys to named tensors, in atomically written safetensors files.

    The files are in ``root/<kind>-<digest>/`` and contain the digest of the settings. A read
    therefore never returns tensors that were computed with different settings. Ranks may write
    concurrently, because each file is named after a hash of its keys. Each tensor has a checksum
    that is verified at every read.

    Args:
        root: Parent folder of all caches; it may be on a shared disk.
        settings: Settings of the encoder that computes the tensors.

    Attributes:
        decisions: Warnings about ignored files, such as damaged ones; their entries are recomputed.
    """

    def __init__(self, root: str | os.PathLike[str], *, settings: CacheSettings) -> None:
        self.settings = settings
        self.folder = Path(root) / f"{settings.kind}-{settings.digest()}"
        self.decisions: tuple[Decision, ...] = ()
        self._places: dict[str, tuple[Path, Mapping[str, str]]] = {}
        self._seen: set[Path] = set()
        self._open: dict[Path, Any] = {}
        self.refresh()

    def __contains__(self, key: str) -> bool:
        return key in self._places

    def __len__(self) -> int:
        return len(self._places)

    def __getstate__(self) -> dict[str, Any]:
        # Mapped files cannot be pickled; the other process maps them again.
        return self.__dict__ | {"_open": {}}

    def refresh(self) -> None:
        """Find files that other processes have written."""
        with system_errors(DataError, self.folder, "cannot be used as a cache"):
            there = self.folder.is_dir()
        if not there:
            return
        for path in sorted(self.folder.glob("*.safetensors")):
            if path not in self._seen:
                self._index(path)

    def write(self, entries: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Write the tensors of several keys to one file, atomically.

        Args:
            entries: Named tensors for each key; the names are the same for all keys.

        Raises:
            DataError: A tensor is not finite, or the file cannot be written.
        """
        tensors = {
            f"{key}/{name}": tensor.detach().cpu().contiguous()
            for key, named in entries.items()
            for name, tensor in named.items()
        }
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                raise DataError(
                    "the encoder returned non-finite values",
                    "run the encoder in float32 or bfloat16; SDXL's VAE overflows in float16",
                    name,
                )
        path = self.folder / f"{hash_key(*sorted(entries))}.safetensors"
        sums = {name: _checksum(name, tensor) for name, tensor in tensors.items()}
        metadata = {"settings": self.settings.digest(), "checksums": json.dumps(sums)}
        try:
            self._describe()
            write_atomically(path, save(tensors, metadata=metadata))
        except (OSError, ValueError) as error:
            said = getattr(error, "strerror", None) or error
            raise DataError(
                f"this cache file cannot be written ({said})",
                "free disk space or make the folder writable, then fill the cache again; only "
                "missing entries are computed",
                str(path),
            ) from error
        self._open.pop(path, None)
        self._index(path)

    def read(self, key: str) -> dict[str, torch.Tensor]:
        """Return the tensors of a key, by tensor name.

        Args:
            key: Key that was passed to ``write``.

        Raises:
            DataError: The key is missing, or its tensors are damaged.
        """
        if key not in self._places:
            raise DataError(
                f"is not in the cache {self.folder}",
                "first fill the cache (`cache_latents`, `cache_texts`) with the same data and "
                "settings",
                key,
            )
        path, sums = self._places[key]
        try:
            file = self._opened(path)
            tensors = {name: file.get_tensor(f"{key}/{name}") for name in sums}
        except (SafetensorError, OSError) as error:
            raise _damaged_entry(path, key, f"cannot be read ({error})") from error
        for name, tensor in tensors.items():
            if _checksum(f"{key}/{name}", tensor) != sums[name]:
                raise _damaged_entry(path, f"{key}/{name}", "does not match its checksum")
        return tensors

    def _opened(self, path: Path) -> Any:
        if path not in self._open:
            if len(self._open) >= _MOST_OPEN:
                del self._open[next(iter(self._open))]
            self._open[path] = _open_tensors(path)
        return self._open[path]

    def _describe(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        note = self.folder / "settings.json"
        if not note.exists():
            write_atomically(note, self.settings.to_json().encode())

    def _index(self, path: Path) -> None:
        try:
            with _open_tensors(path) as file:
                metadata = file.metadata() or {}
                names = list(file.keys())
            sums = json_of(metadata.get("checksums", "null"))
            if sums.keys() != set(names):
                raise ValueError("the checksums do not match the tensors in the file")
        except (SafetensorError, OSError, ValueError, AttributeError) as error:
            self._set_aside(path, f"is damaged ({error})")
            return
        if metadata.get("settings") != self.settings.digest():
            self._set_aside(path, "was written with different settings")
            return
        self._seen.add(path)
        by_key: dict[str, dict[str, str]] = {}
        for name in names:
            key, _, inner = name.partition("/")
            by_key.setdefault(key, {})[inner] = sums[name]
        self._places |= {key: (path, inner) for key, inner in by_key.items()}

    def _set_aside(self, path: Path, reason: str) -> None:
        self._seen.add(path)
        decision = Decision(
            "cache",
            path.name,
            None,
            f"the file in {self.folder.name} {reason}; its entries are recomputed",
            "warning",
        )
        self.decisions += (decision,)
        announce((decision,))


def _open_tensors(path: Path) -> Any:
    check_regular(path)
    return safe_open(path, framework="pt")


def _damaged_entry(path: Path, entry: str, reason: str) -> DataError:
    return DataError(
        f"the entry {entry} {reason}",
        "delete the file and fill the cache again (`cache_latents`, `cache_texts`); only the "
        "entries of this file are recomputed",
        str(path),
    )


def cache_names(caches: Iterable[TensorCache]) -> str:
    """Return one string that identifies the settings of several caches."""
    return "+".join(cache.settings.digest() for cache in caches)
