"""Image sources for Hugging Face datasets and other map-style datasets."""

from __future__ import annotations

import hashlib
import io
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from zerotune.diffusion.data.images import (
    Check,
    OnBroken,
    need,
)
from zerotune.diffusion.data.sources import (
    EncodedSource,
    SizeIndex,
    Stamp,
    Words,
    by_reference,
    stamp_of,
)
from zerotune.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image


class HuggingFaceImages(EncodedSource):
    """Images from a dataset of the ``datasets`` library, loaded from disk or the hub.

    The images stay encoded in the dataset's files. EXIF orientation and transparency are handled by
    zerotune, not by ``datasets``. A recipe trains on streaming datasets.

    Args:
        dataset: A dataset from ``datasets.load_dataset(..., split="train")``.
        image: Name of the image column.
        caption: Name of the caption column; ``None`` for no captions. A row may contain a
            list of captions.
        reference: Name of the column with reference images: images before an edit, or conditions of
            a ControlNet. With several reference columns, every row needs an image in the first
            column; the others may be empty.
        check: ``"complete"``, the default, finds truncated files; ``"whole"`` decodes every image
            at the start; ``"header"`` reads only the size of each image.
        on_broken: ``"skip"``, the default, skips broken images; ``"error"`` raises an error.

    Raises:
        DataError: A column is missing, or no image can be read.
        MissingDependencyError: ``datasets`` is not installed.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        image: str = "image",
        caption: str | None = "text",
        reference: str | Sequence[str] | None = None,
        check: Check = "complete",
        on_broken: OnBroken = "skip",
    ) -> None:
        library = need("datasets", package="datasets")
        edited = (reference,) if isinstance(reference, str) else tuple(reference or ())
        for key, column in (
            ("image", image),
            ("caption", caption),
            *(("reference", one) for one in edited),
        ):
            if column is not None and column not in dataset.column_names:
                raise DataError(
                    "is not a column of the dataset",
                    f"write one of {', '.join(dataset.column_names)}",
                    key,
                    column,
                )
        plain = dataset.with_format(None)
        self._images = plain.select_columns([image, *edited])
        for each in self._images.column_names:
            self._images = self._images.cast_column(each, library.Image(decode=False))
        self._column, self._references = image, by_reference(edited, key="reference")
        words = plain[caption] if caption is not None else None
        fingerprint = getattr(dataset, "_fingerprint", None)
        self._scan(
            map(str, range(len(plain))),
            lambda name: self._encoded(int(name)),
            lambda name: "" if words is None else words[int(name)] or "",
            check=check,
            on_broken=on_broken,
            index=SizeIndex("rows", fingerprint, image, *edited, check) if fingerprint else None,
            stamp=lambda name: self._stamp(int(name)),
            beside=lambda name: self._beside_row(int(name)),
            companions=Counter(
                kind for row in range(len(plain)) for kind in self._references_of(row)
            ),
        )

    def encoded(self, index: int) -> Path | bytes:
        """Return an encoded image as a path or bytes."""
        return self._encoded(int(self._items[index].name))

    def beside(self, index: int) -> Mapping[str, Path | bytes]:
        """Return the reference images of a row."""
        return self._beside_row(int(self._items[index].name))

    def _beside_row(self, row: int) -> Mapping[str, Path | bytes]:
        names = self._references_of(row)
        return {kind: self._encoded(row, self._references[kind]) for kind in names}

    def _references_of(self, row: int) -> list[str]:
        # Keep the first reference even if it is missing, so that its image counts as broken.
        others = list(self._references)[1:]
        columns = self._images[row] if others else {}
        there = [kind for kind in others if columns[self._references[kind]] is not None]
        return [*list(self._references)[:1], *there]

    def _stamp(self, row: int) -> Stamp | None:
        try:
            stored = [self._encoded(row), *self._beside_row(row).values()]
        except ValueError:
            return None
        files = [each for each in stored if isinstance(each, Path)]
        if len(files) == len(stored):
            return stamp_of(files)
        return [[zlib.crc32(each), len(each)] for each in stored if isinstance(each, bytes)]

    def _encoded(self, row: int, column: str | None = None) -> Path | bytes:
        value = self._images[row][column or self._column]
        if value is None:
            raise ValueError("the row is empty")
        if value["bytes"] is not None:
            return bytes(value["bytes"])
        return Path(value["path"])


class DatasetImages(EncodedSource):
    """Images of a map-style dataset whose samples contain a ``PIL.Image``.

    Every sample is read once at the start to determine its size.

    Args:
        dataset: A dataset with ``__len__`` and ``__getitem__``.
        image: Key, index or function that selects a sample's image.
        caption: Key, index or function that selects one or several captions of a sample.
        on_broken: ``"skip"``, the default, skips unreadable samples; ``"error"`` raises an error.

    Raises:
        DataError: There are no images, or an image is broken and ``on_broken`` is ``"error"``.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        image: Callable[[Any], Image] | str | int,
        caption: Callable[[Any], Words] | str | int,
        on_broken: OnBroken = "skip",
    ) -> None:
        first = dataset[0] if len(dataset) else None
        picture, words = _taker("image", image, first), _taker("caption", caption, first)
        self._dataset, self._image = dataset, picture
        captions: dict[str, Words] = {}

        def encoded(name: str) -> bytes:
            sample = dataset[int(name)]
            captions[name] = words(sample)
            return _png(picture(sample))

        self._scan(
            map(str, range(len(dataset))),
            encoded,
            captions.__getitem__,
            check="whole",
            on_broken=on_broken,
        )

    def encoded(self, index: int) -> bytes:
        """Return the image of a sample as PNG bytes."""
        return _png(self._image(self._dataset[int(self._items[index].name)]))

    def content(self, index: int) -> str:
        """Return a hash of an image's pixels."""
        image = self.image(index)
        return hashlib.sha256(f"{image.mode}{image.size}".encode() + image.tobytes()).hexdigest()


def _taker(key: str, how: Any, sample: Any) -> Callable[[Any], Any]:
    """Return a function that extracts a value from samples like this one."""
    if callable(how):
        return cast("Callable[[Any], Any]", how)
    places: Any = list(sample) if isinstance(sample, Mapping) else ()
    if isinstance(sample, list | tuple):
        places = range(len(sample))
    if isinstance(how, str | int) and (sample is None or how in places):
        return itemgetter(how)
    raise DataError(
        f"is not a key or index of the samples, whose type is {type(sample).__name__}",
        f"write one of {', '.join(map(repr, places))}, or pass a function of the sample"
        if len(places) > 0
        else f"pass a function of the sample: {key}=lambda sample: …",
        key,
        how,
    )


def _png(image: Image) -> bytes:
    # Encoded as PNG, decoded images are handled like files: orientation, 16 bits, transparency.
    buffer = io.BytesIO()
    if image.mode in ("CMYK", "YCbCr", "HSV", "LAB"):  # PNG has none of these.
        image = image.convert("RGB")
    image.save(buffer, format="PNG", compress_level=0, exif=image.getexif())
    return buffer.getvalue()
