"""Caches: tensors computed once and kept on a disk, under a key of what they were computed from.

``cache_latents`` and ``cache_texts`` fill them, each rank its share; ``CachedImages`` trains from
them.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, TypedDict, cast

import attrs
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from typing_extensions import Unpack

from zerotune._util.files import check_regular, system_errors, write_atomically
from zerotune._util.text import is_reproducible, json_of, whole
from zerotune.decisions import Decision, announce
from zerotune.diffusion.data.buckets import BucketAssignment
from zerotune.diffusion.data.order import Draw
from zerotune.diffusion.data.preparation import (
    LOSS_MASKS,
    REFERENCE_IMAGES,
    Preparation,
    PreparedImages,
    micro_conditioning,
    shrunk,
)
from zerotune.diffusion.data.sources import REFERENCE
from zerotune.diffusion.data.streams import check_rank, row_of, stack_named
from zerotune.errors import DataError, InvalidValueError

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
        digest.update(_tensor_bytes(tensor))
    return digest.hexdigest()[:32]


def _tensor_bytes(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    # An empty tensor cannot be seen as bytes.
    content: Any = flat.view(torch.uint8).numpy() if flat.numel() else b""
    return memoryview(content)


def _checksum(name: str, tensor: torch.Tensor) -> str:
    """Of a stored tensor, under its name: bits, type and shape."""
    # A CRC: it finds every single flipped bit, at five times the speed of blake2b.
    label = f"{name}:{tuple(tensor.shape)}:{tensor.dtype}\n"
    return f"{zlib.crc32(_tensor_bytes(tensor), zlib.crc32(label.encode())):08x}"


def hash_key(*parts: object) -> str:
    """A key for one input: a hash of what it consists of."""
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:40]


class TensorCache:
    """Named tensors by key, in safetensors files that are each written whole or not at all.

    The files of one group of settings lie in ``root/<kind>-<digest>/``, and each names that
    digest again, so neither a changed setting nor a moved file gives tensors of other settings.
    Any number of ranks may write at once: files are named by the keys they hold.
    Each tensor has a checksum, which is compared whenever it is read.

    Args:
        root: Folder of all caches; it may lie on a shared disk.
        settings: What the tensors depend on beside their keys.

    Attributes:
        decisions: Files that were set aside, damaged ones and those of versions without
            checksums; what they held will be computed again.
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
        # Mapped files cannot go to another process; it maps them itself.
        return self.__dict__ | {"_open": {}}

    def refresh(self) -> None:
        """Look for files that other processes wrote."""
        with system_errors(DataError, self.folder, "is no place for a cache"):
            there = self.folder.is_dir()
        if not there:
            return
        for path in sorted(self.folder.glob("*.safetensors")):
            if path not in self._seen:
                self._index(path)

    def write(self, entries: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Write the tensors of several keys as one file, atomically.

        Args:
            entries: Tensors by name by key; each key has the same names.

        Raises:
            DataError: A tensor holds values that are not finite, or the file cannot be written.
        """
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
        sums = {name: _checksum(name, tensor) for name, tensor in tensors.items()}
        metadata = {"settings": self.settings.digest(), "checksums": json.dumps(sums)}
        try:
            self._describe()
            write_atomically(path, save(tensors, metadata=metadata))
        except (OSError, ValueError) as error:
            said = getattr(error, "strerror", None) or error
            raise DataError(
                f"a file of the cache cannot be written ({said})",
                key=str(path),
                fix="free space or make the folder writable, and call again: what was written "
                "stays, the rest is computed",
            ) from error
        self._open.pop(path, None)
        self._index(path)

    def read(self, key: str) -> dict[str, torch.Tensor]:
        """The tensors of a key.

        Raises:
            DataError: They were not computed with these settings, or are not what was written.
        """
        if key not in self._places:
            raise DataError(
                f"is not in the cache {self.folder}",
                key=key,
                fix="fill the cache with these data and settings first",
            )
        path, sums = self._places[key]
        try:
            file = self._opened(path)
            tensors = {name: file.get_tensor(f"{key}/{name}") for name in sums}
        except (SafetensorError, OSError) as error:
            raise _damaged_entry(path, key, f"cannot be read ({error})") from error
        for name, tensor in tensors.items():
            if _checksum(f"{key}/{name}", tensor) != sums[name]:
                raise _damaged_entry(path, f"{key}/{name}", "is not what was written")
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
            if sums is not None and sums.keys() != set(names):
                raise ValueError("its checksums are those of other entries")
        except (SafetensorError, OSError, ValueError, AttributeError) as error:
            self._set_aside(path, f"is damaged ({error})")
            return
        if metadata.get("settings") != self.settings.digest():
            self._set_aside(path, "belongs to other settings")
            return
        if sums is None:
            self._set_aside(path, "is of a version that kept no checksums")
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
            key="cache",
            before=path.name,
            after=None,
            reason=f"the file in {self.folder.name} {reason}; what it held is computed again",
            severity="warning",
        )
        self.decisions += (decision,)
        announce((decision,))


def _open_tensors(path: Path) -> Any:
    check_regular(path)
    return safe_open(path, framework="pt")


def _damaged_entry(path: Path, entry: str, reason: str) -> DataError:
    return DataError(
        f"the entry {entry} {reason}",
        key=str(path),
        fix="delete the file and fill the cache again (`cache_latents`, `cache_texts`): only what "
        "it held is computed",
    )


def cache_names(caches: Iterable[TensorCache]) -> str:
    """Settings of several caches in one word, for a dataset's identity."""
    return "+".join(cache.settings.digest() for cache in caches)


# -- Filling caches of latents and text embeddings, and training from them.


EncodeImages = Callable[[torch.Tensor], Mapping[str, torch.Tensor]]
"""Images (b, 3, h, w) in [-1, 1] to tensors by name, batch first, such as ``{"latents": …}``."""
EncodeTexts = Callable[[Sequence[str]], Mapping[str, torch.Tensor]]
"""Captions to tensors by name, batch first, such as ``{"prompt_embeds": …}``."""
Progress = Callable[[int, int], None]
"""Called with what this rank has done and what it has to do."""

TEXTS: Final = "texts"
"""Kind of a cache of texts."""
EDITS: Final = "edits"
"""Kind of a cache of texts that were encoded together with the image they edit."""

EncodeEdits = Callable[[Sequence[str], torch.Tensor], Mapping[str, torch.Tensor]]
"""As ``EncodeTexts``, of captions and the images (b, 3, h, w) in [-1, 1] that they edit, or several
of each, (b, r, 3, h, w)."""
ReadImages = Callable[[Mapping[str, torch.Tensor]], torch.Tensor | None]
"""Of the tensors of a batch the images that texts are read with; ``None``: it has none."""

_CORNER = "crop_corner"


class CacheOptions(TypedDict, total=False):
    """How a cache is filled."""

    batch_size: int
    """Images or texts per call."""
    shard_size: int
    """Images or texts per file."""
    rank: int
    """This process; 0 when not given."""
    world_size: int
    """Processes that share the work; 1 when not given."""
    progress: Progress | None
    """Called after each batch, and once at the start."""
    release: Callable[[], None] | None
    """Called when this rank has nothing left to compute, also if it had nothing at all, with the
    encoder no longer needed: ``lambda: vae.to("cpu")``."""
    barrier: Callable[[], None] | None
    """Waits for all ranks; needed above one."""


def cache_latents(
    dataset: PreparedImages,
    *,
    cache: TensorCache,
    encode: EncodeImages,
    encode_references: EncodeImages | None = None,
    **options: Unpack[CacheOptions],
) -> None:
    """Compute the latents of all images that are not in the cache. Collective.

    An image's key is made of its stored bytes, its size, its bucket, how it is prepared and
    whether it is mirrored; what lies beside it belongs to it. Masks are kept in the latents' size
    as ``loss_masks``, and what the encoder gives for references as ``reference_latents``, (b, r, …)
    where images may have several. A file is
    written every ``shard_size`` images; what was written stays when the process is killed, and the
    next call computes the rest, on any number of ranks.

    Args:
        dataset: The images. Mirrored ones are added if its augmentation flips.
        cache: Where they go.
        encode: Runs the VAE. It gives tensors for a batch of one size; the VAE's mean, or mean
            and deviation if noise is to be drawn anew each epoch. Shapes (b, …).
        encode_references: The same for images that are edited, where that is something else.
        **options: Of ``CacheOptions``; 4 images per call and 256 per file when not given.

    Raises:
        DataError: An image is broken, or the encoder gives the wrong number or no finite values.
        InvalidValueError: A size or rank that cannot be.
    """
    images = CachedImages(dataset, latents=cache)
    shapes: dict[str, tuple[int, bool]] = {}
    for index in range(len(dataset)):
        for flipped in images.sides:
            shapes.setdefault(images.latent_key(index, flipped=flipped), (index, flipped))

    def bucket(key: str) -> Any:
        return dataset.assignment.placements[shapes[key][0]].bucket

    def compute(keys: list[str]) -> dict[str, dict[str, torch.Tensor]]:
        loaded = [dataset.tensors(shapes[key][0], flipped=shapes[key][1]) for key in keys]
        tensors = stack_named([tensors for tensors, _ in loaded])
        encoded = _encoded(tensors, encode, encode_references or encode)
        corners = torch.tensor([corner for _, corner in loaded])
        return _rows_by_key(keys, {**encoded, _CORNER: corners})

    options = {"batch_size": 4, "shard_size": 256, **options}
    _compute_missing(shapes, compute, cache=cache, bucket=bucket, **options)


def _encoded(
    loaded: Mapping[str, torch.Tensor], encode: EncodeImages, encode_references: EncodeImages
) -> dict[str, torch.Tensor]:
    """What is kept of images: their latents, and of what lies beside them latents and masks."""
    found = dict(encode(loaded["images"]))
    if REFERENCE_IMAGES in loaded:
        references = loaded[REFERENCE_IMAGES]
        several = references.ndim == 5
        edited = encode_references(references.flatten(0, 1) if several else references)
        samples = references.shape[: 2 if several else 1]
        for name, tensor in edited.items():
            found[f"reference_{name}"] = tensor.reshape(*samples, *tensor.shape[1:])
    if LOSS_MASKS in loaded:
        sides = next(iter(found.values())).shape[-2:]
        found[LOSS_MASKS] = shrunk(loaded[LOSS_MASKS], sides)
    return found


def cache_texts(
    captions: Iterable[str],
    *,
    cache: TensorCache,
    encode: EncodeTexts,
    **options: Unpack[CacheOptions],
) -> None:
    """Compute the embeddings of all captions that are not in the cache. Collective.

    The empty caption is always among them. Equal captions are computed once. Arguments and
    errors are those of ``cache_latents``; 16 captions per call and 1,024 per file when not given.
    """
    texts = {text_key(text): text for text in (*captions, "")}

    def compute(keys: list[str]) -> dict[str, dict[str, torch.Tensor]]:
        return _rows_by_key(keys, encode([texts[key] for key in keys]))

    options = {"batch_size": 16, "shard_size": 1024, **options}
    _compute_missing(texts, compute, cache=cache, **options)


def cache_edits(
    dataset: PreparedImages,
    *,
    cache: TensorCache,
    encode: EncodeEdits,
    read: ReadImages | None = None,
    **options: Unpack[CacheOptions],
) -> None:
    """Compute embeddings of captions with the image that each edits. Collective.

    As ``cache_texts``, for encoders that read both together: each caption of an image counts, on
    each of its sides if images are mirrored, and the empty one where captions are dropped.

    Args:
        dataset: Images with their captions and references.
        cache: Where they go, of the kind ``EDITS``.
        encode: Runs the encoder.
        read: What the encoder is given beside the captions; references when not given.
        **options: Of ``CacheOptions``; 4 texts per call and 64 per file when not given.

    Raises:
        DataError: There are no references; and as ``cache_latents``.
        InvalidValueError: Tags are shuffled anew at each use, so that texts cannot be counted.
    """
    if read is None:
        check_edits(dataset)
        read = itemgetter(REFERENCE_IMAGES)
    images = CachedImages(dataset, latents=cache, texts=cache)
    found = {
        images.words_key(text, index, flipped=flipped): (text, index, flipped)
        for index in range(len(dataset))
        for text in dataset.texts_of(index)
        for flipped in images.sides
    }

    def compute(keys: list[str]) -> dict[str, dict[str, torch.Tensor]]:
        wanted = [found[key] for key in keys]
        loaded = [dataset.tensors(index, flipped=flipped)[0] for _, index, flipped in wanted]
        edited = cast("torch.Tensor", read(stack_named(loaded)))
        return _rows_by_key(keys, encode([text for text, _, _ in wanted], edited))

    def bucket(key: str) -> Any:
        return dataset.assignment.placements[found[key][1]].bucket

    options = {"batch_size": 4, "shard_size": 64, **options}
    _compute_missing(found, compute, cache=cache, bucket=bucket, **options)


def check_edits(dataset: PreparedImages) -> None:
    """Refuse images without references, and captions that cannot be counted."""
    dataset.augmentation.check_countable()
    if REFERENCE not in dataset.companions:
        raise DataError(
            "texts are encoded together with the image that they edit, and no image has one",
            key="dataset.companions",
            value=sorted(dataset.companions),
            fix="put it beside the image, cat.reference.png beside cat.png (docs/data.md)",
        )


def text_key(caption: str) -> str:
    """The key of a caption."""
    return hash_key("text", caption)


class CachedImages:
    """A bucketed dataset that reads latents, and embeddings if given, instead of pixels.

    A sample holds the encoders' outputs, ``captions`` if there is no cache of texts, and sizes
    and crops as ``PreparedImages``. Its order, flips and dropped captions are those of
    ``PreparedImages``: a run may go on from pixels to latents. Images are not decoded.

    Args:
        dataset: The images the cache was filled with.
        latents: The filled cache.
        texts: The filled cache of captions.

    Raises:
        DataError: On reading: an image or caption is not in its cache.
        InvalidValueError: ``texts`` are given, and tags are in another order at each use; or the
            preparation holds an object without a ``repr`` of its own.
    """

    def __init__(
        self, dataset: PreparedImages, *, latents: TensorCache, texts: TensorCache | None = None
    ) -> None:
        if texts is not None:
            dataset.augmentation.check_countable()
        _check_reproducible(dataset.preparation)
        self._dataset, self._latents, self._texts = dataset, latents, texts
        _ = dataset.contents  # Here, once, and not in each of the loader's processes.
        flip = dataset.augmentation.flip
        self.sides = tuple(side for side, share in ((False, 1 - flip), (True, flip)) if share > 0)

    @property
    def assignment(self) -> BucketAssignment:
        """The bucket of each image."""
        return self._dataset.assignment

    @property
    def companions(self) -> frozenset[str]:
        """What lies beside the images."""
        return self._dataset.companions

    @property
    def identity(self) -> str:
        """That of the images: the order does not depend on what is cached."""
        return self._dataset.identity

    @property
    def settings(self) -> str:
        """Identifies the encoders' settings."""
        return cache_names(cache for cache in (self._latents, self._texts) if cache is not None)

    def __len__(self) -> int:
        return len(self._dataset)

    def latent_key(self, index: int, *, flipped: bool) -> str:
        """The key of an image: its stored bytes and all that happens to it before the VAE."""
        # Beside others with masks one without has a mask too, of ones.
        return hash_key(
            self._dataset.contents[index],
            self._dataset.assignment.placements[index],
            self._dataset.preparation,
            flipped,
            *sorted(self._dataset.companions),
        )

    def words_key(self, caption: str, index: int, *, flipped: bool) -> str:
        """The key of a caption of an image, or of both where they were encoded together."""
        if self._texts is None or self._texts.settings.kind != EDITS:
            return text_key(caption)
        return hash_key("edit", caption, self.latent_key(index, flipped=flipped))

    def __getitem__(self, draw: Draw | int) -> dict[str, Any]:
        use = Draw(index=draw, epoch=0) if isinstance(draw, int) else draw
        if not 0 <= use.index < len(self):
            raise IndexError(use.index)
        flipped = self._dataset.augmentation.flips(use)
        sample: dict[str, Any] = self._latents.read(self.latent_key(use.index, flipped=flipped))
        left, top = sample.pop(_CORNER).tolist()
        caption = self._dataset.caption(use)
        if self._texts is None:
            sample["captions"] = caption
        else:
            sample |= self._texts.read(self.words_key(caption, use.index, flipped=flipped))
        placement = self._dataset.assignment.placements[use.index]
        return sample | micro_conditioning(placement, (left, top))


def _check_reproducible(preparation: Preparation) -> None:
    """Refuse what differs from process to process: keys are made of its ``repr``."""
    for name, part in attrs.asdict(preparation, recurse=False).items():
        if not is_reproducible(repr(part)):
            raise InvalidValueError(
                "its repr, which is part of each image's key, holds a memory address, so that "
                "every process would compute the whole cache again",
                key=f"preparation.{name}",
                value=part,
                fix="decorate its class with attrs.frozen or dataclass(frozen=True), or give it a "
                "__repr__ that names all its settings; functions have none",
            )


def _compute_missing(
    keys: Iterable[str],
    compute: Callable[[list[str]], dict[str, dict[str, torch.Tensor]]],
    *,
    cache: TensorCache,
    batch_size: int = 1,
    shard_size: int = 1,
    bucket: Callable[[str], Any] | None = None,
    rank: int = 0,
    world_size: int = 1,
    progress: Progress | None = None,
    release: Callable[[], None] | None = None,
    barrier: Callable[[], None] | None = None,
) -> None:
    """Compute this rank's share of what the cache lacks, in batches of one bucket."""
    if barrier is None and world_size > 1:
        raise InvalidValueError(
            "ranks must wait for each other before they read",
            key="barrier",
            value=None,
            fix="pass torch.distributed.barrier",
        )
    check_rank(rank, world_size)
    cache.refresh()
    # By the key and not by what is missing: a rank that looks later finds less missing, and
    # dividing that anew would leave gaps.
    mine = [key for key in keys if int(key, 16) % world_size == rank and key not in cache]
    place = bucket or (lambda _key: 0)
    batches = [
        batch
        for _, alike in groupby(sorted(mine, key=lambda key: (place(key), key)), key=place)
        for batch in _chunked_keys(alike, batch_size)
    ]
    report = progress or (lambda _done, _total: None)
    done = 0
    report(done, len(mine))
    waiting: dict[str, dict[str, torch.Tensor]] = {}
    for batch in batches:
        with torch.no_grad():
            waiting |= compute(batch)
        done += len(batch)
        if len(waiting) >= shard_size or done == len(mine):
            cache.write(waiting)
            waiting = {}
        report(done, len(mine))
    if release is not None:
        release()
    if barrier is not None:
        barrier()
        cache.refresh()


def _chunked_keys(keys: Iterable[str], size: int) -> Iterator[list[str]]:
    whole(size, key="batch_size", fix="write 1")
    waiting = iter(keys)
    while chunk := list(islice(waiting, size)):
        yield chunk


def _rows_by_key(
    keys: list[str], encoded: Mapping[str, torch.Tensor]
) -> dict[str, dict[str, torch.Tensor]]:
    for name, tensor in encoded.items():
        if len(tensor) != len(keys):
            raise DataError(
                f"the encoder was given {len(keys)} and gave {len(tensor)}",
                key=name,
                fix="give tensors with the batch first",
            )
    # Cloned: a view would keep the whole batch alive until its file is written.
    return {
        key: {name: tensor.detach().cpu().clone() for name, tensor in row_of(encoded, row).items()}
        for row, key in enumerate(keys)
    }
