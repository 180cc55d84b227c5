"""Random access to WebDataset tar shards, with a reproducible and resumable order."""

from __future__ import annotations

import os
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Literal

import attrs

from zerotune._util.files import check_regular
from zerotune._util.text import json_of
from zerotune.diffusion.data.images import (
    SUFFIXES,
    BrokenImage,
    Check,
    OnBroken,
    broken_policy,
    image_check,
    reading,
)
from zerotune.diffusion.data.sources import (
    MASK,
    REFERENCE,
    CaptionText,
    EncodedSource,
    SizeIndex,
    Stamp,
    Words,
    caption_text,
    companion_endings,
    stamp_of,
)
from zerotune.errors import DataError


@attrs.frozen(kw_only=True)
class _Member:
    shard: Path
    offset: int
    size: int

    def read(self) -> bytes:
        with reading(self.shard) as file:
            file.seek(self.offset)
            return file.read(self.size)


class TarShards(EncodedSource):
    """Images in local uncompressed tar files, as written by WebDataset and img2dataset.

    Members with the same name up to the first dot form one sample: the image ``0001.jpg``, its
    caption ``0001.txt``, its mask ``0001.mask.png`` and its reference ``0001.reference.png``. The
    shards are indexed at the start, so each rank reads only its own samples, and a resumed run does
    not read consumed samples again.

    Args:
        shards: Tar files, in order.
        caption: Extension of caption members: ``txt``, or ``json`` together with ``caption_key``.
        caption_key: Key of the caption or list of captions in a JSON member.
        words: ``"whole"``, the default, reads a text as one caption; ``"lines"`` reads each line as
            a caption.
        masks: Suffix of mask names before the extension; ``None`` for no masks.
        references: Suffix of reference names before the extension. If one image has a reference,
            every image needs a reference.
        check: ``"whole"``, the default, decodes every image at the start; ``"header"`` reads only
            the size of each image.
        on_broken: ``"skip"``, the default, skips broken images; ``"error"`` raises an error.

    Raises:
        DataError: A shard is missing, compressed or truncated, or the shards contain no image.
    """

    def __init__(
        self,
        shards: Sequence[str | os.PathLike[str]],
        *,
        caption: str = "txt",
        caption_key: str = "caption",
        words: CaptionText | Literal["whole", "lines"] | None = None,
        masks: str | None = MASK,
        references: str | None = REFERENCE,
        check: Check | None = None,
        on_broken: OnBroken | None = None,
    ) -> None:
        policy, closely, reader = broken_policy(on_broken), image_check(check), caption_text(words)
        samples: dict[str, dict[str, _Member]] = {}
        for shard in map(Path, shards):
            for key, ending, member in _index_shard(shard):
                endings = samples.setdefault(f"{shard.name}/{key}", {})
                if ending in endings:
                    raise DataError(
                        f"contains {key}.{ending} twice, or another shard has the same name",
                        key=shard.name,
                        fix="give every sample and every shard a unique name",
                    )
                endings[ending] = member
        self._images: dict[str, _Member] = {}
        self._beside: dict[str, dict[str, _Member]] = {}
        for name, endings in samples.items():
            found = _pictures(endings, "")
            if found is not None:
                self._images[name] = found
                others = companion_endings(masks, references)
                known = {kind: _pictures(endings, end) for kind, end in others.items()}
                self._beside[name] = {kind: one for kind, one in known.items() if one is not None}
        paths = sorted(os.path.realpath(shard) for shard in shards)
        changed = {shard: stamp_of([shard]) for shard in map(Path, shards)}
        self._scan(
            self._images,
            lambda name: self._images[name].read(),
            lambda name: _member_caption(name, samples, caption, caption_key, reader),
            check=closely,
            on_broken=policy,
            index=SizeIndex("shards", paths, masks, references, closely),
            stamp=lambda name: self._stamp(name, changed),
            beside=self._members_beside,
            companions=Counter(kind for others in self._beside.values() for kind in others),
            missing=[
                BrokenImage(name=name, reason="has no image member")
                for name in samples
                if name not in self._images
            ],
        )

    def encoded(self, index: int) -> bytes:
        """Return the bytes of an encoded image."""
        return self._images[self._items[index].name].read()

    def beside(self, index: int) -> Mapping[str, Path | bytes]:
        """Return the encoded mask and references of an image, keyed by kind."""
        return self._members_beside(self._items[index].name)

    def _stamp(self, name: str, changed: Mapping[Path, Stamp | None]) -> Stamp | None:
        found: Stamp = []
        for member in (self._images[name], *self._beside[name].values()):
            shard = changed[member.shard]
            if shard is None:
                return None
            found += [*shard, [member.offset, member.size]]
        return found

    def _members_beside(self, name: str) -> Mapping[str, Path | bytes]:
        return {kind: member.read() for kind, member in self._beside[name].items()}


def _pictures(endings: Mapping[str, _Member], before: str) -> _Member | None:
    """Return a sample's first image with ``before`` in front of its suffix, as in ``mask.png``."""
    for ending, member in endings.items():
        kind, _, last = ending.rpartition(".")
        if kind == before and f".{last.lower()}" in SUFFIXES:
            return member
    return None


def _index_shard(shard: Path) -> Iterator[tuple[str, str, _Member]]:
    try:
        check_regular(shard)
        # "r:" rejects compressed archives, which do not allow reading single members.
        with tarfile.open(shard, "r:") as archive:
            for info in archive:
                path = PurePosixPath(info.name)
                if not info.isfile() or path.name.startswith("."):
                    continue
                stem, _, ending = path.name.partition(".")
                if info.offset_data + info.size > shard.stat().st_size:
                    raise tarfile.ReadError(f"{info.name} is truncated")
                member = _Member(shard=shard, offset=info.offset_data, size=info.size)
                yield str(path.parent / stem), ending, member
    except (OSError, ValueError, tarfile.TarError) as error:
        raise DataError(
            f"cannot be read as an uncompressed tar file ({error})",
            key=os.fspath(shard),
            fix="unpack compressed shards (gunzip), and download incomplete shards again; to read "
            "remote shards, start from the recipe of streamed images (docs/recipes.md)",
        ) from error


def _member_caption(
    name: str,
    samples: dict[str, dict[str, _Member]],
    ending: str,
    json_key: str,
    words: CaptionText,
) -> Words:
    member = samples[name].get(ending)
    if member is None:
        return ""
    try:
        text = member.read().decode("utf-8-sig")
        if ending != "json":
            return words.captions(text)
        value = json_of(text).get(json_key)
    except (ValueError, AttributeError) as error:
        raise DataError(
            f"is not a valid caption ({error})",
            key=f"{name}.{ending}",
            fix="write UTF-8 text or JSON",
        ) from None
    if isinstance(value, list):
        return [text for text in value if isinstance(text, str)]
    return value if isinstance(value, str) else ""
