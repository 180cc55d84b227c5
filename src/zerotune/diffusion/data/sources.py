"""Image source protocol, combined sources, and an index of image sizes."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import logging
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Literal,
    Protocol,
    TypeVar,
    get_args,
    runtime_checkable,
)

import attrs

from zerotune._util.text import whole
from zerotune.decisions import Decision, announce
from zerotune.diffusion.data.buckets import Size
from zerotune.diffusion.data.images import (
    BrokenImage,
    Check,
    OnBroken,
    bytes_of,
    check_choice,
    decode,
    image_size,
    readable_errors,
    why,
)
from zerotune.errors import DataError
from zerotune.plan.values import check_letters
from zerotune.platform.facts import user_cache

if TYPE_CHECKING:
    from PIL.Image import Image

Numbers = tuple[int, ...]
"""Size of an image (width, height) or clip (width, height, frames), as stored in ``SizeIndex``."""
Stamp = list[list[int]]
"""Modification time in nanoseconds and size in bytes, for each file of an image or clip."""

_INDEX_VERSION: Final = 2
_INDEX_TABLE: Final = (
    "CREATE TABLE IF NOT EXISTS sizes (name TEXT PRIMARY KEY, stamp TEXT, width INT, height INT, "
    "frames INT)"
)
_logger: Final = logging.getLogger("zerotune")


class SizeIndex:
    """A database of image sizes; an entry is valid as long as its image file is unchanged.

    On each machine, one process reads the missing sizes while the others wait, so each image is
    decoded only once. If the cache folder is not writable, every process reads all sizes.

    Args:
        parts: Other values that determine the sizes, such as the folder. Nothing is cached if
            ``parts`` is empty.
    """

    def __init__(self, *parts: object) -> None:
        self._path = _index_place((_INDEX_VERSION, *parts)) if parts else None
        self._database: sqlite3.Connection | None = None
        self._stamps: Mapping[str, str | None] = {}
        self._stored: dict[str, tuple[str, Numbers]] = {}
        self._new: list[tuple[Any, ...]] = []
        self._reused = 0
        self._refusal: Exception | None = None

    @contextmanager
    def open(self, stamps: Mapping[str, Stamp | None]) -> Iterator[SizeIndex]:
        """Load the index for a ``with`` block, and save new entries at the end of the block.

        Args:
            stamps: Result of ``stamp_of`` for each image or clip name; ``None`` if its file must be
                read every time.
        """
        self._stamps = {
            name: None if stamp is None else str(stamp) for name, stamp in stamps.items()
        }
        try:
            if self._path is not None:
                self._begin(self._path)
        except (OSError, sqlite3.Error) as error:
            self._refusal = error
        try:
            yield self
        finally:
            self._save()

    def get(self, name: str, read: Callable[[], Numbers]) -> Numbers:
        """Return the size of an image or clip from the cache, or from ``read``, and cache it.

        Args:
            name: Name among ``stamps``.
            read: Function that reads the size from the file.
        """
        if self._known(name):
            self._reused += 1
            return self._stored[name][1]
        numbers, stamp = read(), self._stamps.get(name)
        if stamp is not None:
            self._new.append((name, stamp, *numbers, *[None] * (3 - len(numbers))))
        return numbers

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Decisions about reused sizes and failed writes."""
        found = []
        if self._reused:
            found.append(
                Decision(
                    "data.sizes",
                    "read from each file",
                    f"{self._reused} from an earlier start",
                    "unchanged files are not read again; to read all files again, delete "
                    f"{self._path}",
                )
            )
        if self._refusal is not None:
            why = getattr(self._refusal, "strerror", None) or self._refusal
            found.append(
                Decision(
                    "data.sizes",
                    "cached for the next start",
                    "read by every rank at each start",
                    f"{self._path} cannot be written ({why}); set "
                    "XDG_CACHE_HOME to a writable folder",
                )
            )
        return tuple(found)

    def _known(self, name: str) -> bool:
        return name in self._stored and self._stored[name][0] == self._stamps[name]

    def _begin(self, path: Path) -> None:
        """Load the sizes; if some are missing, hold the index, so that others wait."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._database = sqlite3.connect(path, timeout=60, isolation_level=None)
        try:
            self._database.execute(_INDEX_TABLE)
            self._load(self._database)
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError:  # Damaged.
            self._database.close()
            path.unlink()
            self._begin(path)
            return
        if not all(map(self._known, self._stamps)):
            try:
                self._database.execute("PRAGMA busy_timeout = 0")
                self._database.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError:
                _logger.info("waiting for another process to read the image or clip sizes")
                self._database.execute(f"PRAGMA busy_timeout = {2**31 - 1}")
                self._database.execute("BEGIN IMMEDIATE")
            self._load(self._database)

    def _load(self, database: sqlite3.Connection) -> None:
        self._stored = {
            name: (stamp, tuple(number for number in numbers if number is not None))
            for name, stamp, *numbers in database.execute("SELECT * FROM sizes")
        }

    def _save(self) -> None:
        """Store the new entries, without those of files that no longer exist."""
        if self._database is None:
            return
        gone = [(name,) for name in self._stored.keys() - self._stamps.keys()]
        try:
            if self._database.in_transaction:
                self._database.executemany("DELETE FROM sizes WHERE name = ?", gone)
                self._database.executemany("REPLACE INTO sizes VALUES (?, ?, ?, ?, ?)", self._new)
                self._database.execute("COMMIT")
        except sqlite3.Error as error:
            self._refusal = error
        self._database.close()


def stamp_of(files: Iterable[str | Path]) -> Stamp | None:
    """Return each file's modification time and size; ``None`` if a file is not accessible."""
    try:
        known = [os.stat(file) for file in files]  # noqa: PTH116  (as in ``ImageFolder``)
    except (OSError, ValueError):
        return None
    return [[each.st_mtime_ns, each.st_size] for each in known]


def _index_place(parts: Iterable[object]) -> Path | None:
    written = map(repr, parts)
    digest = hashlib.sha256("\0".join(written).encode(errors="surrogateescape")).hexdigest()
    try:
        return user_cache() / "sizes" / f"{digest[:32]}.sqlite"
    except RuntimeError:  # No home directory.
        return None


T = TypeVar("T")


@attrs.frozen(kw_only=True)
class ImageItem:
    """Metadata of an image."""

    name: str
    """Name, unique within the source and the same on every machine."""
    size: Size
    """Width and height of the upright image."""
    caption: str = ""
    further: tuple[str, ...] = ()
    """Additional captions; each use of the image selects one of ``captions``."""
    references: int = 0
    """Number of reference images."""

    def __attrs_post_init__(self) -> None:
        for text in self.captions:
            check_letters(text, f"the caption of {self.name}")

    @property
    def captions(self) -> tuple[str, ...]:
        """All captions; empty if the image has no caption."""
        return (self.caption, *self.further) if self.caption else ()


Item = TypeVar("Item", bound=ImageItem)

Words = str | Sequence[str]
"""One or several captions."""


def worded(found: Words) -> dict[str, Any]:
    """Convert one or several captions to keyword arguments of ``ImageItem``."""
    texts = tuple(text for text in ((found,) if isinstance(found, str) else found) if text)
    return {"caption": texts[0] if texts else "", "further": texts[1:]}


CaptionText = Literal["whole", "lines"]
"""Whether a text file is one caption, or each of its non-blank lines is."""


def captions_in(text: str, words: CaptionText) -> Words:
    """Return the captions in a text file, without surrounding whitespace."""
    if words == "whole":
        return text.strip()
    return tuple(line.strip() for line in text.splitlines() if line.strip())


MASK: Final = "mask"
"""Companion kind for loss masks; white pixels have full weight in the loss, black pixels none."""
REFERENCE: Final = "reference"
"""Companion kind for the first reference, such as the image before an edit."""
REFERENCES: Final = (REFERENCE, *(f"{REFERENCE}{number}" for number in range(2, 11)))
"""Companion kinds for all references of a sample, in order."""


def companion_endings(masks: str | None, references: str | None) -> dict[str, str]:
    """Return the suffixes of companion files by kind, such as ``"mask"`` in ``cat.mask.png``.

    Args:
        masks: Suffix of mask files; ``None`` for no masks.
        references: Suffix of the first reference; further references append 2, 3, … to it.
    """
    found = {} if masks is None else {MASK: masks}
    if references is not None:
        found |= {kind: kind.replace(REFERENCE, references, 1) for kind in REFERENCES}
    return found


@runtime_checkable
class ImageSource(Protocol):
    """Protocol: images with captions, in a fixed order that is the same on all ranks."""

    def __len__(self) -> int: ...

    def item(self, index: int) -> ImageItem:
        """Return the name, size and caption of an image.

        Args:
            index: Index of the image.
        """
        ...

    def image(self, index: int) -> Image:
        """Return an upright image, RGB or RGBA.

        Args:
            index: Index of the image.
        """
        ...

    def content(self, index: int) -> str:
        """Return a hash of the stored image.

        Args:
            index: Index of the image.
        """
        ...


class EncodedSource:
    """Base class for sources of encoded images; subclasses return each image's path or bytes.

    Attributes:
        broken: Skipped images with reasons.
        decisions: Records of automatic choices and skipped images.
    """

    broken: tuple[BrokenImage, ...] = ()
    decisions: tuple[Decision, ...] = ()
    companions: frozenset[str] = frozenset()
    """Kinds of companion files. If ``REFERENCE`` is among them, every image has a first reference;
    files of other kinds may be missing."""

    _items: Sequence[ImageItem] = ()

    def encoded(self, index: int) -> Path | bytes:
        """Return the path of an encoded image, or its bytes.

        Args:
            index: Index of the image.
        """
        raise NotImplementedError

    def beside(self, index: int) -> Mapping[str, Path | bytes]:  # noqa: ARG002 - for subclasses
        """Return the paths or bytes of an image's mask and references, keyed by kind.

        Args:
            index: Index of the image.
        """
        return {}

    def __len__(self) -> int:
        return len(self._items)

    def item(self, index: int) -> ImageItem:
        """Return the name, size and caption of an image."""
        return self._items[index]

    def image(self, index: int) -> Image:
        """Return an upright image, RGB or RGBA."""
        return self._decoded(index, self.encoded(index))

    def companion(self, index: int, kind: str) -> Image | None:
        """Return the mask or a reference of an image, upright; ``None`` if it does not exist.

        Args:
            index: Index of the image.
            kind: ``MASK`` or one of ``REFERENCES``.
        """
        file = self.beside(index).get(kind)
        return None if file is None else self._decoded(index, file)

    def content(self, index: int) -> str:
        """Return a hash of an encoded image, its mask and its references."""
        own = hashlib.sha256(bytes_of(self.encoded(index)))
        for kind, file in sorted(self.beside(index).items()):
            own.update(kind.encode() + hashlib.sha256(bytes_of(file)).digest())
        return own.hexdigest()

    def _scan(
        self,
        names: Iterable[str],
        encoded: Callable[[str], Path | str | bytes],
        words: Callable[[str], Words],
        *,
        check: Check,
        on_broken: OnBroken,
        index: SizeIndex | None = None,
        stamp: Callable[[str], Stamp | None] = lambda _name: None,
        beside: Callable[[str], Mapping[str, Path | bytes]] = lambda _name: {},
        companions: Mapping[str, int] | None = None,
        missing: Iterable[BrokenImage] = (),
        decisions: Iterable[Decision] = (),
    ) -> None:
        """Fill the source with all readable images, and announce the decisions.

        Args:
            names: Names of the images, in order.
            encoded: Function that returns the file of an image, or its content.
            words: Function that returns the captions of an image; called after the image was read.
            check: How thoroughly images are checked.
            on_broken: What to do about unreadable images.
            index: Cache of sizes that earlier runs have read.
            stamp: Function that returns a value that changes with the image or its companions.
            beside: Function that returns an image's companions. The image is broken if a companion
                is, or if a mask has another aspect ratio.
            companions: Number of images with each kind of companion. If a kind is in
                ``REFERENCES``, images without the first reference are broken.
            missing: Broken images that are not in ``names``.
            decisions: Earlier decisions.
        """
        check_choice(check, get_args(Check), key="check")
        counts = companions or {}
        self.companions = frozenset(counts)
        edits, several = not self.companions.isdisjoint(REFERENCES), has_several_references(self)
        sizes = SizeIndex() if index is None else index

        def read(name: str) -> Size:
            size = image_size(encoded(name), check)
            for kind, file in beside(name).items():
                _check_companion(kind, file, size, check)
            return size

        def look(name: str) -> Size:
            width, height = sizes.get(name, lambda: read(name))
            if edits and REFERENCE not in beside(name):
                raise ValueError("the image has no reference, but other images do")
            return width, height

        def item(name: str, size: Size) -> ImageItem:
            edited = sum(kind in REFERENCES for kind in beside(name)) if several else int(edits)
            return ImageItem(name=name, size=size, references=edited, **worded(words(name)))

        stamps = {name: stamp(name) for name in names}
        self._items, self.broken, found = scan(
            stamps, look, item, index=sizes, on_broken=on_broken, missing=missing
        )
        self.decisions = (*decisions, *found, *_companion_decisions(counts, len(stamps)))
        announce(self.decisions)

    def _decoded(self, index: int, file: Path | bytes) -> Image:
        try:
            return decode(file)
        except readable_errors() as error:
            raise DataError(
                why(error),
                'open the source with check="whole", which detects broken files at the start',
                self._items[index].name,
            ) from error


def _check_companion(kind: str, file: Path | bytes, size: Size, check: Check) -> None:
    try:
        found = image_size(file, check)
    except readable_errors() as error:
        raise ValueError(f"its {kind} {why(error)}") from error
    if kind == MASK and not same_shape(found, size):
        raise ValueError(
            f"the mask ({found[0]}x{found[1]}) and the image ({size[0]}x{size[1]}) differ in "
            "aspect ratio"
        )


def same_shape(one: Size, other: Size) -> bool:
    """Return whether two sizes have the same aspect ratio, apart from rounding to whole pixels."""
    off = abs(one[0] * other[1] - one[1] * other[0])
    return off <= max(*one, *other)


def scan(
    stamps: Mapping[str, Stamp | None],
    look: Callable[[str], T],
    item: Callable[[str, T], Item],
    *,
    index: SizeIndex,
    on_broken: OnBroken,
    strays: Iterable[BrokenImage] = (),
    missing: Iterable[BrokenImage] = (),
    errors: tuple[type[Exception], ...] = (),
) -> tuple[list[Item], tuple[BrokenImage, ...], tuple[Decision, ...]]:
    """Check every image or clip of a source, and separate the broken ones.

    Args:
        stamps: Names of the images or clips in order, each with the result of ``stamp_of``.
        look: Function that takes a name, and returns an image's size, or a clip's size and length.
        item: Function that creates an item from a name and the result of ``look``.
        index: Cache of sizes that earlier runs have read.
        on_broken: What to do about unreadable images.
        strays: Images already known to be broken; these are reported first.
        missing: Images that do not exist; these are reported last.
        errors: Exceptions that ``look`` raises for unreadable files, in addition to Pillow's.

    Returns:
        Items, broken images, and decisions about both.
    """
    broken: list[BrokenImage] = []

    def leave_out(image: BrokenImage) -> None:
        broken.append(image)
        if on_broken == "error":
            raise DataError(
                image.reason, 'repair or remove the file, or pass on_broken="skip"', image.name
            )

    check_choice(on_broken, ("skip", "error"), key="on_broken")
    for image in strays:
        leave_out(image)
    items: list[Item] = []
    with index.open(stamps):
        for name in stamps:
            try:
                seen = look(name)
            except (*readable_errors(), *errors) as error:
                leave_out(BrokenImage(name=name, reason=why(error)))
            else:
                items.append(item(name, seen))
    if not items:
        raise DataError(
            f"contains no readable image ({len(broken)} broken)",
            "check the paths and the file formats",
            "data",
            [image.name for image in broken[:3]],
        )
    for image in missing:
        leave_out(image)
    return items, tuple(broken), (*index.decisions, *_scan_decisions(broken, items))


def _scan_decisions(
    broken: Sequence[BrokenImage], items: Sequence[ImageItem]
) -> tuple[Decision, ...]:
    """Return decisions about broken images and about captions."""
    found = []
    if broken:
        named = "; ".join(f"{image.name} {image.reason}" for image in broken[:5])
        found.append(
            Decision(
                "data.broken",
                len(items) + len(broken),
                len(items),
                f"{len(broken)} images are skipped: {named}" + ("; …" if len(broken) > 5 else ""),
                "warning",
            )
        )
    bare = [item.name for item in items if not item.caption]
    if bare:
        found.append(
            Decision(
                "data.captions",
                None,
                "",
                f"{len(bare)} of {len(items)} images have no caption ({bare[0]}, …)",
                "warning",
            )
        )
    several = sum(len(item.captions) > 1 for item in items)
    if several:
        found.append(
            Decision(
                "data.captions",
                "several",
                "one caption per use",
                f"{several} of {len(items)} images have several captions; no caption "
                "is repeated until all captions of its image have been used",
            )
        )
    return tuple(found)


def _companion_decisions(counts: Mapping[str, int], of: int) -> tuple[Decision, ...]:
    """Return decisions about the companions of images.

    Args:
        counts: Number of images with a companion, by ``MASK`` and ``REFERENCES``.
        of: Number of all images.
    """
    effect = {
        MASK: "the loss ignores black pixels; images without a mask contribute all their pixels",
        REFERENCE: "references are the images before an edit, or a ControlNet's condition images",
        **dict.fromkeys(REFERENCES[1:], "each edit uses all references of its image"),
    }
    return tuple(
        Decision(
            f"data.{kind}s", None, count, f"{count} of {of} images have a {kind}: {effect[kind]}"
        )
        for kind, count in sorted(counts.items())
        if count
    )


def companions_of(source: Any) -> frozenset[str]:
    """Return the kinds of companion files (masks, references) in a source."""
    return frozenset(getattr(source, "companions", ()))


def by_reference(each: Sequence[T], *, key: str) -> dict[str, T]:
    """Return the values in ``each``, keyed by ``reference``, ``reference2``, ….

    Args:
        each: One value per reference, in order.
        key: Name of the argument, for the error message.
    """
    if len(each) > len(REFERENCES):
        raise DataError(
            f"an image has at most {len(REFERENCES)} references",
            "remove the last references",
            key,
            len(each),
        )
    return dict(zip(REFERENCES, each, strict=False))


def has_several_references(source: Any) -> bool:
    """Return whether some images of a source have several references."""
    return not companions_of(source).isdisjoint(REFERENCES[1:])


class JoinedSources:
    """A concatenation of sources; to give a source more weight, use ``RepeatedSource``.

    Args:
        sources: Sources to concatenate; at least one.

    Raises:
        DataError: There is no source, or only some sources have references.
    """

    def __init__(self, sources: Sequence[ImageSource]) -> None:
        if not sources:
            raise DataError("is empty", "pass at least one", "sources", 0)
        self._sources = self._reporting = tuple(sources)
        self._ends = list(itertools.accumulate(map(len, sources)))
        beside = [companions_of(source) for source in sources]
        self.companions = frozenset[str]().union(*beside)
        without = [number for number, found in enumerate(beside) if REFERENCE not in found]
        if REFERENCE in self.companions and without:
            raise DataError(
                "these sources have no references, but the other sources do",
                "join only sources with references, or pass references=None to every source",
                "sources",
                without,
            )

    @property
    def broken(self) -> tuple[BrokenImage, ...]:
        """Skipped images of all sources."""
        return sum((tuple(getattr(s, "broken", ())) for s in self._reporting), ())

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Decisions of all sources."""
        return sum((tuple(getattr(s, "decisions", ())) for s in self._reporting), ())

    def __len__(self) -> int:
        return self._ends[-1]

    def _find(self, index: int) -> tuple[int, ImageSource, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = bisect.bisect_right(self._ends, index)
        before = self._ends[number - 1] if number else 0
        return number, self._sources[number], index - before

    def item(self, index: int) -> ImageItem:
        """Return an image's name, size and caption; the name begins with its source's index."""
        number, source, inner = self._find(index)
        item = source.item(inner)
        return attrs.evolve(item, name=f"{number}/{item.name}")

    def image(self, index: int) -> Image:
        """Return an upright image."""
        _, source, inner = self._find(index)
        return source.image(inner)

    def companion(self, index: int, kind: str) -> Image | None:
        """Return the mask or a reference of an image."""
        _, found, inner = self._find(index)
        source: Any = found
        if kind not in companions_of(found):
            return None
        return source.companion(inner, kind)  # type: ignore[no-any-return]

    def frames(self, index: int, numbers: Sequence[int]) -> list[Image]:
        """Return frames of a clip; the source must contain clips.

        Args:
            index: Index of the clip.
            numbers: Indices of the frames.
        """
        _, found, inner = self._find(index)
        source: Any = found
        return source.frames(inner, numbers)  # type: ignore[no-any-return]

    def content(self, index: int) -> str:
        """Return a hash of the stored image."""
        _, source, inner = self._find(index)
        return source.content(inner)


class RepeatedSource(JoinedSources):
    """A source whose images are used several times per epoch; each use may be flipped differently.

    Args:
        source: Source to repeat.
        times: Number of uses of each image per epoch.
    """

    def __init__(self, source: ImageSource, *, times: int) -> None:
        super().__init__([source] * whole(times, key="times", fix="write 1"))
        self._reporting = (source,)

    def item(self, index: int) -> ImageItem:
        """Return the name, size and caption of an image."""
        _, source, inner = self._find(index)
        return source.item(inner)
