"""What gives images and captions: the protocol, sources made of others, sizes read once."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, runtime_checkable

import attrs

from zerotune._util.files import write_atomically
from zerotune._util.ownership import has_locks, try_lock
from zerotune._util.text import is_reproducible, json_of, whole
from zerotune.decisions import Decision, announce
from zerotune.diffusion.data.buckets import Size
from zerotune.diffusion.data.images import (
    BrokenImage,
    BrokenPolicy,
    ImageCheck,
    bytes_of,
    decode,
    named_policy,
    readable_errors,
    why,
)
from zerotune.errors import DataError
from zerotune.plan.model import check_letters
from zerotune.platform.facts import user_cache

if TYPE_CHECKING:
    from PIL.Image import Image

Numbers = tuple[int, ...]
"""What is kept of a file: width and height, of a clip also its frames."""
Stamp = list[list[int]]
"""Of each file that belongs to a name: when it changed, in nanoseconds, and its bytes."""

_INDEX_VERSION: Final = 1
_BETWEEN_WRITES_S: Final = 60.0
_logger: Final = logging.getLogger("zerotune")


class SizeIndex:
    """A cache file with the sizes of images that have not changed since they were read.

    One process at a time reads what is missing, and the others of the machine wait for what it
    writes: each file is decoded once, by one rank. A place that cannot be written does no harm.

    Args:
        parts: What the sizes depend on beside their files: the folder, how closely the files are
            looked at, … Nothing is kept without any, and where the ``repr`` of one differs
            between processes.
        count: Numbers of each.
    """

    def __init__(self, *parts: object, count: int = 2) -> None:
        self._path = _index_place(parts) if parts else None
        self._count = count
        self._stored: dict[str, Any] = {}
        self._stamps: Mapping[str, Stamp | None] = {}
        self._new = self._reused = 0
        self._written = time.monotonic()
        self._refusal: OSError | None = None

    @contextmanager
    def open(self, stamps: Mapping[str, Stamp | None]) -> Iterator[SizeIndex]:
        """Look names up inside the block, and keep what is new at its end.

        Args:
            stamps: Of every name (``stamp_of``); what has none is read each time.
        """
        self._stamps, self._stored = stamps, self._read()
        if self._path is None or all(self._known(name) for name in stamps):
            yield self
            return
        with self._alone(self._path):
            self._stored = self._read()
            try:
                yield self
            finally:
                self._write(self._path)

    def get(self, name: str, read: Callable[[], Numbers]) -> Numbers:
        """What is known of a name, or else what ``read`` finds."""
        known = self._known(name)
        if known is not None:
            self._reused += 1
            return known
        numbers, stamp = read(), self._stamps.get(name)
        if stamp is not None:
            self._stored[name] = [stamp, list(numbers)]
            self._new += 1
            if self._path is not None and time.monotonic() - self._written > _BETWEEN_WRITES_S:
                self._write(self._path)
        return numbers

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """What was not read anew, or could not be kept."""
        found = []
        if self._reused:
            found.append(
                Decision(
                    key="data.sizes",
                    before="read from each file",
                    after=f"{self._reused} of an earlier start",
                    reason=f"these files have not changed since; delete {self._path} to read all",
                )
            )
        if self._refusal is not None:
            found.append(
                Decision(
                    key="data.sizes",
                    before="kept for the next start",
                    after="read again by every rank and at the next start",
                    reason=f"{self._path} cannot be written ({self._refusal.strerror}); "
                    "XDG_CACHE_HOME names another place",
                )
            )
        return tuple(found)

    def _known(self, name: str) -> Numbers | None:
        entry = self._stored.get(name)
        if not isinstance(entry, list) or len(entry) != 2 or entry[0] != self._stamps[name]:
            return None
        numbers = entry[1]
        if not isinstance(numbers, list) or len(numbers) != self._count:
            return None
        return tuple(numbers) if all(type(n) is int and n > 0 for n in numbers) else None

    def _read(self) -> dict[str, Any]:
        try:
            found = json_of(self._path.read_bytes()) if self._path is not None else {}
        except (OSError, ValueError):
            return {}
        known = isinstance(found, dict) and found.get("version") == _INDEX_VERSION
        sizes = found.get("sizes") if known else None
        return sizes if isinstance(sizes, dict) else {}

    def _write(self, path: Path) -> None:
        self._written = time.monotonic()
        if not self._new:
            return
        # Files that are gone are left out.
        sizes = {name: self._stored[name] for name in self._stamps if name in self._stored}
        content = json.dumps({"version": _INDEX_VERSION, "sizes": sizes}, separators=(",", ":"))
        try:
            write_atomically(path, content.encode())
        except OSError as error:
            self._refusal = error
        else:
            self._new = 0

    @contextmanager
    def _alone(self, path: Path) -> Iterator[None]:
        """Hold the lock of the index, where the place and the system have locks."""
        descriptor = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if has_locks():
                descriptor = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
                if not try_lock(descriptor, exclusive=True):
                    _logger.info("another process reads the sizes of these files; waiting for it")
                    try_lock(descriptor, exclusive=True, patience=math.inf)
        except OSError as error:
            self._refusal = error
        try:
            yield
        finally:
            if descriptor is not None:
                os.close(descriptor)


def stamp_of(files: Iterable[Path]) -> Stamp | None:
    """When files were changed and how long they are; ``None`` where one cannot be asked."""
    try:
        known = [file.stat() for file in files]
    except (OSError, ValueError):
        return None
    return [[each.st_mtime_ns, each.st_size] for each in known]


def _index_place(parts: Iterable[object]) -> Path | None:
    written = [repr(part) for part in parts]
    if not all(map(is_reproducible, written)):
        return None
    digest = hashlib.sha256("\0".join(written).encode(errors="surrogateescape")).hexdigest()
    try:
        return user_cache() / "sizes" / f"{digest[:32]}.json"
    except RuntimeError:  # There is no home.
        return None


T = TypeVar("T")


@attrs.frozen(kw_only=True)
class ImageItem:
    """What is known of an image without its pixels."""

    name: str
    """Unique within its source; the same on every machine."""
    size: Size
    """Width and height of the upright image."""
    caption: str = ""
    further: tuple[str, ...] = ()
    """More captions of the same; one of all is drawn for each use."""
    references: int = 0
    """Images that are edited together to become it."""

    def __attrs_post_init__(self) -> None:
        for text in self.captions:
            check_letters(text, f"the caption of {self.name}")

    @property
    def captions(self) -> tuple[str, ...]:
        """All captions; none where there is no word."""
        return (self.caption, *self.further) if self.caption else ()


Item = TypeVar("Item", bound=ImageItem)

Words = str | Sequence[str]
"""One caption, or several."""


def all_of(found: Words) -> tuple[str, ...]:
    """All captions that are not empty."""
    return tuple(text for text in ((found,) if isinstance(found, str) else found) if text)


def worded(found: Words) -> dict[str, Any]:
    """The fields of an item that hold its captions."""
    texts = all_of(found)
    return {"caption": texts[0] if texts else "", "further": texts[1:]}


class CaptionText(Protocol):
    """What a text file says of an image."""

    def captions(self, text: str) -> Words:
        """The caption, or several."""
        ...


@attrs.frozen(kw_only=True)
class WholeText:
    """A file is a caption, of however many lines."""

    def captions(self, text: str) -> Words:
        """The text, without spaces around it."""
        return text.strip()


@attrs.frozen(kw_only=True)
class TextLines:
    """Each line that is not blank is a caption of its own."""

    def captions(self, text: str) -> Words:
        """The lines, without spaces around them."""
        return tuple(line.strip() for line in text.splitlines() if line.strip())


def caption_text(words: Any) -> CaptionText:
    """How a text is read, also by its name."""
    kinds = {"whole": WholeText, "lines": TextLines}
    found: CaptionText = named_policy(words, kinds, key="words", method="captions")
    return found


MASK: Final = "mask"
"""Name of an image's loss mask: white counts, black does not."""
REFERENCE: Final = "reference"
"""Name of the image that is edited to become the sample."""
REFERENCES: Final = (REFERENCE, *(f"{REFERENCE}{number}" for number in range(2, 11)))
"""Names of all images that are edited together to become the sample, in their order."""


def companion_endings(masks: str | None, references: str | None) -> dict[str, str]:
    """What the names of masks and references have before their endings, by what lies there.

    Args:
        masks: Of a mask; ``None``: there are none.
        references: Of the first reference; the second has a 2 behind it, and so on.
    """
    found = {} if masks is None else {MASK: masks}
    if references is not None:
        found |= {kind: kind.replace(REFERENCE, references, 1) for kind in REFERENCES}
    return found


@runtime_checkable
class ImageSource(Protocol):
    """Images with captions, in a fixed order that is the same on all ranks."""

    def __len__(self) -> int: ...

    def item(self, index: int) -> ImageItem:
        """Name, size and caption."""
        ...

    def image(self, index: int) -> Image:
        """The upright image, RGB or RGBA."""
        ...

    def content(self, index: int) -> str:
        """A hash of the stored image."""
        ...


class EncodedSource:
    """A source over encoded images; subclasses say where the bytes are.

    Attributes:
        broken: What was left out, and why.
        decisions: What was chosen and skipped.
    """

    broken: tuple[BrokenImage, ...] = ()
    decisions: tuple[Decision, ...] = ()
    companions: frozenset[str] = frozenset()
    """What lies beside the images: ``MASK``, of some of them, ``REFERENCE``, of all, and the others
    of ``REFERENCES``, of some."""

    _items: Sequence[ImageItem] = ()

    def encoded(self, index: int) -> Path | bytes:
        """The file, or what is in it."""
        raise NotImplementedError

    def beside(self, index: int) -> Mapping[str, Path | bytes]:  # noqa: ARG002 - for subclasses
        """The files, or what is in them, that lie beside an image, by ``companions``."""
        return {}

    def __len__(self) -> int:
        return len(self._items)

    def item(self, index: int) -> ImageItem:
        """Name, size and caption."""
        return self._items[index]

    def image(self, index: int) -> Image:
        """The upright image, RGB or RGBA."""
        return self._decoded(index, self.encoded(index))

    def companion(self, index: int, kind: str) -> Image | None:
        """What lies beside an image, upright; ``None`` where nothing does."""
        file = self.beside(index).get(kind)
        return None if file is None else self._decoded(index, file)

    def content(self, index: int) -> str:
        """A hash of the encoded image, and of what lies beside it."""
        own = hashlib.sha256(bytes_of(self.encoded(index)))
        for kind, file in sorted(self.beside(index).items()):
            own.update(kind.encode() + hashlib.sha256(bytes_of(file)).digest())
        return own.hexdigest()

    def _scan(
        self,
        names: Iterable[str],
        encoded: Callable[[str], Path | bytes],
        words: Callable[[str], Words],
        *,
        check: ImageCheck,
        on_broken: BrokenPolicy,
        index: SizeIndex | None = None,
        stamp: Callable[[str], Stamp | None] = lambda _name: None,
        beside: Callable[[str], Mapping[str, Path | bytes]] = lambda _name: {},
        companions: Mapping[str, int] | None = None,
        missing: Iterable[BrokenImage] = (),
        decisions: Iterable[Decision] = (),
    ) -> None:
        """Fill the source with all images that can be read, and announce its decisions.

        Args:
            names: In order.
            encoded: The file of a name, or what is in it.
            words: The captions of a name; called after its image was read.
            check: How closely images are looked at.
            on_broken: What becomes of those that cannot be read.
            index: What earlier starts read.
            stamp: Of a name and what lies beside it: changes when they do.
            beside: What lies beside an image; an image is broken with it, and where a mask is of
                another shape.
            companions: Images that have each kind; with one of ``REFERENCES`` an image without the
                first of them is broken.
            missing: What is broken beside ``names``.
            decisions: Made before.
        """
        counts = companions or {}
        self.companions = frozenset(counts)
        edits, several = not self.companions.isdisjoint(REFERENCES), has_several_references(self)
        sizes = SizeIndex() if index is None else index

        def read(name: str) -> Size:
            size = check.size(encoded(name))
            for kind, file in beside(name).items():
                _check_companion(kind, file, size, check)
            return size

        def look(name: str) -> Size:
            width, height = sizes.get(name, lambda: read(name))
            if edits and REFERENCE not in beside(name):
                raise ValueError("there is no reference beside it, and there is beside others")
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
                key=self._items[index].name,
                fix='open the source with check="whole", which finds such files at the start',
            ) from error


def _check_companion(kind: str, file: Path | bytes, size: Size, check: ImageCheck) -> None:
    try:
        found = check.size(file)
    except readable_errors() as error:
        raise ValueError(f"the {kind} beside it {why(error)}") from error
    if kind == MASK and not same_shape(found, size):
        raise ValueError(
            f"the mask beside it is {found[0]}x{found[1]}, which is not its shape, "
            f"{size[0]}x{size[1]}"
        )


def same_shape(one: Size, other: Size) -> bool:
    """Whether two sizes are of one shape, but for rounding to whole pixels."""
    off = abs(one[0] * other[1] - one[1] * other[0])
    return off <= max(*one, *other)


def scan(
    stamps: Mapping[str, Stamp | None],
    look: Callable[[str], T],
    item: Callable[[str, T], Item],
    *,
    index: SizeIndex,
    on_broken: BrokenPolicy,
    strays: Iterable[BrokenImage] = (),
    missing: Iterable[BrokenImage] = (),
    errors: tuple[type[Exception], ...] = (),
) -> tuple[list[Item], tuple[BrokenImage, ...], tuple[Decision, ...]]:
    """Look at everything that a source may hold.

    Args:
        stamps: Names in order, each with what changes when its files do.
        look: Size, or size and length, of one; by way of ``index``.
        item: The item of a name and what ``look`` returned.
        index: What earlier starts read.
        on_broken: What becomes of those that cannot be read.
        strays: What is broken without a look, in front of the others.
        missing: The same, behind them.
        errors: What ``look`` raises for unreadable files beside what Pillow raises.

    Returns:
        The items, all that is broken, and the decisions about both.
    """
    broken: list[BrokenImage] = []

    def leave_out(image: BrokenImage) -> None:
        broken.append(image)
        on_broken.broken(image)

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
            f"holds no image that can be read ({len(broken)} broken)",
            key="data",
            value=[image.name for image in broken[:3]],
            fix="look at the paths and the formats",
        )
    for image in missing:
        leave_out(image)
    return items, tuple(broken), (*index.decisions, *_scan_decisions(broken, items))


def _scan_decisions(
    broken: Sequence[BrokenImage], items: Sequence[ImageItem]
) -> tuple[Decision, ...]:
    """What a scan left out or found without words."""
    found = []
    if broken:
        named = "; ".join(f"{image.name} {image.reason}" for image in broken[:5])
        found.append(
            Decision(
                key="data.broken",
                before=len(items) + len(broken),
                after=len(items),
                reason=f"{len(broken)} images are left out: {named}"
                + ("; …" if len(broken) > 5 else ""),
                severity="warning",
            )
        )
    bare = [item.name for item in items if not item.caption]
    if bare:
        found.append(
            Decision(
                key="data.captions",
                before=None,
                after="",
                reason=f"{len(bare)} of {len(items)} images have no caption ({bare[0]}, …)",
                severity="warning",
            )
        )
    several = sum(len(item.captions) > 1 for item in items)
    if several:
        found.append(
            Decision(
                key="data.captions",
                before="several",
                after="one for each use",
                reason=f"{several} of {len(items)} images have several captions: each comes once "
                "before one comes again",
            )
        )
    return tuple(found)


def _companion_decisions(counts: Mapping[str, int], of: int) -> tuple[Decision, ...]:
    """What was found beside images.

    Args:
        counts: Images that have a companion, by ``MASK`` and ``REFERENCES``.
        of: Images.
    """
    effect = {
        MASK: "their loss counts where it is white, and everywhere without one",
        REFERENCE: "it is what they were before an edit, or what steers a ControlNet",
        **dict.fromkeys(REFERENCES[1:], "it is edited together with the others"),
    }
    return tuple(
        Decision(
            key=f"data.{kind}s",
            before=None,
            after=count,
            reason=f"{count} of {of} images have a {kind} beside them: {effect[kind]}",
        )
        for kind, count in sorted(counts.items())
        if count
    )


def companions_of(source: Any) -> frozenset[str]:
    """What lies beside the images of a source; nothing where it knows of no companions."""
    return frozenset(getattr(source, "companions", ()))


def by_reference(each: Sequence[T], *, key: str) -> dict[str, T]:
    """Something of each reference by its name.

    Args:
        each: In the references' order.
        key: Where it was given.
    """
    if len(each) > len(REFERENCES):
        raise DataError(
            f"an image has at most {len(REFERENCES)} references",
            key=key,
            value=len(each),
            fix="leave the last ones out",
        )
    return dict(zip(REFERENCES, each, strict=False))


def has_several_references(source: Any) -> bool:
    """Whether some images of a source are made of more than one."""
    return not companions_of(source).isdisjoint(REFERENCES[1:])


class RepeatedSource:
    """A source whose images come several times per epoch, each time with its own flip.

    Args:
        source: What to repeat.
        times: How often each image comes in one epoch.
    """

    def __init__(self, source: ImageSource, *, times: int) -> None:
        self._source, self._times = source, whole(times, key="times", fix="write 1")

    def __len__(self) -> int:
        return len(self._source) * self._times

    def __getattr__(self, name: str) -> Any:
        # Decisions and lists of broken files are the inner source's own.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._source, name)

    def item(self, index: int) -> ImageItem:
        """Name, size and caption."""
        return self._source.item(index % len(self._source))

    def image(self, index: int) -> Image:
        """The upright image."""
        return self._source.image(index % len(self._source))

    def companion(self, index: int, kind: str) -> Image | None:
        """What lies beside an image."""
        source: Any = self._source
        return source.companion(index % len(source), kind)  # type: ignore[no-any-return]

    def frames(self, index: int, numbers: Sequence[int]) -> list[Image]:
        """Frames of a clip, where the source has clips."""
        source: Any = self._source
        return source.frames(index % len(source), numbers)  # type: ignore[no-any-return]

    def content(self, index: int) -> str:
        """A hash of the stored image."""
        return self._source.content(index % len(self._source))


class JoinedSources:
    """Several sources one after the other; use ``RepeatedSource`` to weigh them.

    Args:
        sources: At least one.

    Raises:
        DataError: There is none, or references lie beside the images of some only.
    """

    def __init__(self, sources: Sequence[ImageSource]) -> None:
        if not sources:
            raise DataError("is empty", key="sources", value=0, fix="give at least one")
        self._sources = tuple(sources)
        self._ends = list(itertools.accumulate(map(len, sources)))
        beside = [companions_of(source) for source in sources]
        self.companions = frozenset[str]().union(*beside)
        without = [number for number, found in enumerate(beside) if REFERENCE not in found]
        if REFERENCE in self.companions and without:
            raise DataError(
                "have no references beside their images, and the others have",
                key="sources",
                value=without,
                fix="join sources that all have them, or pass references=None to those that have",
            )

    @property
    def broken(self) -> tuple[BrokenImage, ...]:
        """What all sources left out."""
        return sum((tuple(getattr(s, "broken", ())) for s in self._sources), ())

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """What all sources chose."""
        return sum((tuple(getattr(s, "decisions", ())) for s in self._sources), ())

    def __len__(self) -> int:
        return self._ends[-1]

    def _find(self, index: int) -> tuple[int, ImageSource, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = bisect.bisect_right(self._ends, index)
        before = self._ends[number - 1] if number else 0
        return number, self._sources[number], index - before

    def item(self, index: int) -> ImageItem:
        """Name, size and caption; the name says which source."""
        number, source, inner = self._find(index)
        item = source.item(inner)
        return attrs.evolve(item, name=f"{number}/{item.name}")

    def image(self, index: int) -> Image:
        """The upright image."""
        _, source, inner = self._find(index)
        return source.image(inner)

    def companion(self, index: int, kind: str) -> Image | None:
        """What lies beside an image."""
        _, found, inner = self._find(index)
        source: Any = found
        if kind not in companions_of(found):
            return None
        return source.companion(inner, kind)  # type: ignore[no-any-return]

    def frames(self, index: int, numbers: Sequence[int]) -> list[Image]:
        """Frames of a clip, where the sources have clips."""
        _, found, inner = self._find(index)
        source: Any = found
        return source.frames(inner, numbers)  # type: ignore[no-any-return]

    def content(self, index: int) -> str:
        """A hash of the stored image."""
        _, source, inner = self._find(index)
        return source.content(inner)
