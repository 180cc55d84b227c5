"""What gives images and captions: the protocol, and sources made of other sources."""

from __future__ import annotations

import bisect
import hashlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import attrs

from zerotune._util.numbers import whole
from zerotune.decisions import Decision
from zerotune.diffusion.data.buckets import Size
from zerotune.diffusion.data.images import (
    BrokenImage,
    BrokenPolicy,
    ImageCheck,
    decode,
    readable_errors,
    why,
)
from zerotune.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

T = TypeVar("T")


@attrs.frozen(kw_only=True)
class ImageItem:
    """What is known of an image without its pixels."""

    name: str
    """Unique within its source; the same on every machine."""
    size: Size
    """Width and height of the upright image."""
    caption: str = ""


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

    _items: Sequence[ImageItem] = ()

    def encoded(self, index: int) -> Path | bytes:
        """The file, or what is in it."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self._items)

    def item(self, index: int) -> ImageItem:
        """Name, size and caption."""
        return self._items[index]

    def image(self, index: int) -> Image:
        """The upright image, RGB or RGBA.

        Raises:
            DataError: It is broken, and was not looked at as a whole when the source was opened.
        """
        try:
            return decode(self.encoded(index))
        except readable_errors() as error:
            raise DataError(
                why(error),
                key=self._items[index].name,
                fix="open the source with check=WholeImage(), which finds such files at the start",
            ) from error

    def content(self, index: int) -> str:
        """A hash of the encoded image."""
        data = self.encoded(index)
        content = data if isinstance(data, bytes) else data.read_bytes()
        return hashlib.sha256(content).hexdigest()


def measure(
    names: Iterable[str],
    encoded: Callable[[str], Path | bytes],
    *,
    check: ImageCheck,
    on_broken: BrokenPolicy,
) -> tuple[dict[str, Size], tuple[BrokenImage, ...]]:
    """Sizes of all images that can be read, and a list of the others.

    Raises:
        DataError: By ``on_broken``, or because no image can be read.
    """
    return looked_at(names, lambda name: check.size(encoded(name)), on_broken=on_broken)


def looked_at(
    names: Iterable[str],
    look: Callable[[str], T],
    *,
    on_broken: BrokenPolicy,
    errors: tuple[type[Exception], ...] = (),
) -> tuple[dict[str, T], tuple[BrokenImage, ...]]:
    """What is found at all names that can be read, and a list of the others.

    Args:
        names: In order.
        look: What is wanted of one.
        on_broken: What becomes of those that cannot be read.
        errors: What ``look`` raises for them beside what Pillow raises.

    Raises:
        DataError: By ``on_broken``, or because nothing can be read.
    """
    found: dict[str, T] = {}
    broken: list[BrokenImage] = []
    for name in names:
        try:
            found[name] = look(name)
        except (*readable_errors(), *errors) as error:
            broken.append(BrokenImage(name=name, reason=why(error)))
            on_broken.broken(broken[-1])
    if not found:
        raise DataError(
            f"holds no image that can be read ({len(broken)} broken)",
            key="data",
            value=[image.name for image in broken[:3]],
            fix="look at the paths and the formats",
        )
    return found, tuple(broken)


def scan_decisions(
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
    return tuple(found)


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
    """

    def __init__(self, sources: Sequence[ImageSource]) -> None:
        if not sources:
            raise DataError("is empty", key="sources", value=0, fix="give at least one")
        self._sources = tuple(sources)
        self._ends = list(itertools.accumulate(map(len, sources)))

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

    def frames(self, index: int, numbers: Sequence[int]) -> list[Image]:
        """Frames of a clip, where the sources have clips."""
        _, found, inner = self._find(index)
        source: Any = found
        return source.frames(inner, numbers)  # type: ignore[no-any-return]

    def content(self, index: int) -> str:
        """A hash of the stored image."""
        _, source, inner = self._find(index)
        return source.content(inner)
