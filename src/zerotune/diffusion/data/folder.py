# ruff: noqa: PTH118, PTH122, PTH123  (``Path`` takes most of the time that opening a
# folder of many thousands of images may take)
"""A folder of images with captions in text files, ``metadata.jsonl`` or ``metadata.csv``."""

from __future__ import annotations

import csv
import io
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import attrs

from zerotune._util.files import of_system, system_errors
from zerotune._util.text import json_of
from zerotune.decisions import Decision
from zerotune.diffusion.data.images import (
    SUFFIXES,
    BrokenImage,
    Check,
    OnBroken,
    check_choice,
)
from zerotune.diffusion.data.sources import (
    MASK,
    REFERENCE,
    CaptionText,
    EncodedSource,
    SizeIndex,
    Words,
    by_reference,
    captions_in,
    companion_endings,
    stamp_of,
)
from zerotune.errors import DataError

# -- Captions by file name, as Hugging Face's image folders have them.


def json_rows(text: str, source: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the line number and content of each JSON Lines row; blank lines are skipped.

    Args:
        text: JSON Lines text.
        source: Name of the metadata file, for error messages.
    """
    # Not splitlines(), which splits at U+2028 and others that JSON strings may contain.
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json_of(line)
        except ValueError as error:
            raise _bad_line(source, number, f"is not JSON ({error})") from None
        if not isinstance(row, dict):
            raise _bad_line(source, number, "is not a JSON object")
        yield number, row


def csv_rows(text: str, source: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the line number and columns of each row of CSV text with a header row.

    The arguments are the same as those of ``json_rows``.
    """
    reader = csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline=""), strict=True)
    try:
        header = next(reader, [])
        for row in reader:
            if not row:
                continue
            if len(row) != len(header):
                raise _bad_line(source, reader.line_num, f"has {len(row)} of {len(header)} columns")
            yield reader.line_num, dict(zip(header, row, strict=True))
    except csv.Error as error:
        raise _bad_line(source, reader.line_num, f"is not CSV ({error})") from None


def captions_by_file(
    rows: Iterable[tuple[int, dict[str, Any]]], *, source: str, file: str, caption: str
) -> dict[str, Words]:
    """Return the captions of rows, keyed by file name.

    Args:
        rows: Line number and content of each row.
        source: Name of the metadata file, for error messages.
        file: Key of the image path, which is relative to the metadata file.
        caption: Key of the caption, or of a list of captions.
    """
    captions: dict[str, Words] = {}
    for number, row in rows:
        for column in (file, caption):
            value = row.get(column)
            several = value if column == caption and isinstance(value, list) else [value]
            if not all(isinstance(each, str) for each in several):
                raise _bad_line(
                    source, number, f"has no text in column {column!r} (columns: {sorted(row)})"
                )
        name = _path_beside(row[file], source, number)
        if captions.get(name, row[caption]) != row[caption]:
            raise _bad_line(source, number, f"has a second caption for {name!r}")
        captions[name] = row[caption]
    return captions


def _path_beside(name: str, source: str, number: int) -> str:
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
        raise _bad_line(source, number, f"refers to {name!r}, which is outside this file's folder")
    return str(path)


def _bad_line(source: str, number: int, reason: str) -> DataError:
    return DataError(
        f"line {number} {reason}",
        'write "file_name" and "text" as keys (JSON) or columns (CSV), or pass your '
        "own names: captions=MetadataFile(file=..., caption=...)",
        source,
    )


# -- The folder, and where its captions are.


class CaptionFiles(Protocol):
    """Protocol for finding the captions of the images in a folder."""

    def read(self, root: Path, names: Iterable[str]) -> Mapping[str, Words]:
        """Return one or several captions for each image, keyed by image name.

        Args:
            root: Folder that contains the images.
            names: Names of the images, as paths relative to ``root``.
        """
        ...


@attrs.frozen(kw_only=True)
class TextBeside:
    """Captions in text files: ``cat.txt`` describes ``cat.png`` or the folder ``cat``."""

    suffix: str = ".txt"
    words: CaptionText = attrs.field(default="whole")
    """``"whole"`` reads a file as one caption; ``"lines"`` reads each line as a caption."""

    @words.validator
    def _known(self, _: Any, value: str) -> None:
        check_choice(value, ("whole", "lines"), key="words")

    def read(self, root: Path, names: Iterable[str]) -> Mapping[str, Words]:
        """Read the captions of all images that have a text file.

        Raises:
            DataError: A text file is not UTF-8.
        """
        found, above = {}, str(root)

        @cache
        def listed(place: str) -> dict[str, bool]:
            # Names in a folder, and whether they are folders.
            with suppress(FileNotFoundError), os.scandir(root / place) as entries:
                return {e.name: e.is_dir() for e in entries if e.is_dir() or e.is_file()}
            return {}

        for name in names:
            place, last = os.path.split(name)
            there = listed(place)
            # A folder's name has no extension: "take.2" is the whole name.
            beside = (last if there.get(last) else os.path.splitext(last)[0]) + self.suffix
            if there.get(beside) is False:
                text = _read_utf8(os.path.join(above, place, beside))
                found[name] = captions_in(text, self.words)
        return found


@attrs.frozen(kw_only=True)
class MetadataFile:
    """Captions in a single ``.jsonl`` or ``.csv`` file in the folder, keyed by image name."""

    name: str = "metadata.jsonl"
    file: str = "file_name"
    """Key or column of the image path."""
    caption: str = "text"
    """Key or column of the caption; in JSON it may be a list."""

    def read(self, root: Path, names: Iterable[str]) -> Mapping[str, Words]:  # noqa: ARG002
        """Read all captions of the file, including captions of missing images.

        Args:
            root: Folder that contains the images.
            names: Paths of the images, relative to the folder.

        Raises:
            DataError: The file is missing or malformed.
        """
        path = root / self.name
        if not path.is_file():
            raise DataError("does not exist", f"add it to {root.name}", self.name)
        rows = (csv_rows if path.suffix == ".csv" else json_rows)(_read_utf8(path), self.name)
        return captions_by_file(rows, source=self.name, file=self.file, caption=self.caption)


class ImageFolder(EncodedSource):
    """All images of a folder and its subfolders, sorted by name.

    For the image ``cat.png``, the mask ``cat.mask.png`` weights the loss: white pixels have full
    weight, black pixels have none. ``cat.reference.png`` is the image before an edit, or the
    condition of a ControlNet. Further references are ``cat.reference2.png``, ``cat.reference3.png``
    and so on. References may also be in separate folders, in which each reference has the name of
    its image.

    Args:
        root: The folder. Names that begin with a dot are ignored.
        captions: Files with captions. The default is ``metadata.jsonl`` if this file exists, else
            ``metadata.csv``, else text files next to the images.
        masks: Suffix of mask names before the extension; ``None`` for no masks.
        references: Suffix of reference names before the extension. If one image has a reference,
            every image needs at least one.
        reference_folder: Folder that contains the references, or a list of folders. Each reference
            is named after its image, with any extension, such as ``conditions/cat.png`` for
            ``photos/cat.jpg``. With several folders, the first folder contains the first reference
            of each image, and so on.
        check: ``"complete"``, the default, finds truncated files; ``"whole"`` decodes every image
            at the start; ``"header"`` reads only the size of each image.
        on_broken: ``"skip"``, the default, skips broken images; ``"error"`` raises an error. An
            image also counts as broken if it is listed in the metadata but does not exist, if its
            mask has a different aspect ratio, or if its reference is missing.

    Raises:
        DataError: There are no images, or a caption file is malformed.
        MissingDependencyError: Pillow is not installed.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        captions: CaptionFiles | None = None,
        masks: str | None = MASK,
        references: str | None = REFERENCE,
        reference_folder: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
        check: Check = "complete",
        on_broken: OnBroken = "skip",
    ) -> None:
        self._root = _checked_folder(root, key="root")
        single = isinstance(reference_folder, str | os.PathLike)
        folders: Any = [reference_folder] if single else reference_folder or ()
        apart = [Path(folder).absolute() for folder in folders]
        found = _images_in(self._root)
        for folder in apart:
            _checked_folder(folder, key="reference_folder")
            found = [name for name in found if folder not in (self._root / name).absolute().parents]
        names, self._beside = _paired(found, companion_endings(masks, references))
        for kind, folder in by_reference(apart, key="reference_folder").items():
            _pair_across(names, self._beside, folder, kind)
        above = str(self._root)
        chosen, decisions = (captions, ()) if captions else caption_files(self._root)
        words = chosen.read(self._root, names)
        self._scan(
            names,
            lambda name: os.path.join(above, name),
            lambda name: words.get(name, ""),
            check=check,
            on_broken=on_broken,
            index=SizeIndex(
                "images",
                str(self._root.resolve()),
                masks,
                references,
                *apart,
                check,
            ),
            stamp=lambda name: stamp_of(
                os.path.join(above, file)
                for file in (name, *sorted(self._beside.get(name, {}).values()))
            ),
            beside=self._files_beside,
            companions=Counter(kind for others in self._beside.values() for kind in others),
            missing=[
                BrokenImage(name=name, reason="is listed in the metadata but does not exist")
                for name in sorted(set(words) - set(names))
            ],
            decisions=decisions,
        )

    def encoded(self, index: int) -> Path:
        """Return the path of an image."""
        return self._root / self._items[index].name

    def beside(self, index: int) -> Mapping[str, Path | bytes]:
        """Return the paths of an image's mask and references, keyed by kind."""
        return self._files_beside(self._items[index].name)

    def _files_beside(self, name: str) -> Mapping[str, Path | bytes]:
        return {kind: self._root / file for kind, file in self._beside.get(name, {}).items()}


def _paired(
    names: Sequence[str], endings: Mapping[str, str]
) -> tuple[list[str], dict[str, dict[str, str]]]:
    """Separate images from their companions, such as ``cat.mask.png`` beside ``cat.jpg``."""
    by_stem: dict[str, list[str]] = {}
    for name in names:
        by_stem.setdefault(name.rpartition(".")[0], []).append(name)
    kinds = {ending: kind for kind, ending in endings.items()}
    beside: dict[str, dict[str, str]] = {}
    taken = set()
    for stem, files in by_stem.items():
        image, _, suffix = stem.rpartition(".")
        owners = by_stem.get(image, []) if suffix in kinds else []
        for owner in owners:
            beside.setdefault(owner, {})[kinds[suffix]] = files[0]
        taken |= set(files) if owners else set()
    return [name for name in names if name not in taken], beside


def _pair_across(
    names: Sequence[str], beside: dict[str, dict[str, str]], folder: Path, kind: str
) -> None:
    """Add files of another folder as companions of the images with the same names."""
    stems = {PurePosixPath(name).with_suffix(""): name for name in _images_in(folder)}
    for name in names:
        other = stems.get(PurePosixPath(name).with_suffix(""))
        if other is not None:
            beside.setdefault(name, {})[kind] = str(folder / other)
    if not any(kind in found for found in beside.values()):
        raise DataError(
            "contains no file with the same name as an image of the dataset",
            "give each reference the name of its image: conditions/cat.png for photos/cat.jpg",
            "reference_folder",
            str(folder),
        )


def _checked_folder(path: str | os.PathLike[str], *, key: str) -> Path:
    folder = Path(path)
    with system_errors(DataError, folder, "the image folder cannot be read"):
        there = folder.is_dir()
    if not there:
        raise DataError("is not a folder", "pass a folder of images", key, os.fspath(path))
    return folder


def _images_in(root: Path) -> list[str]:
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        place = Path(folder).relative_to(root).as_posix()
        above = "" if place == "." else f"{place}/"
        found += [
            above + name
            for name in files
            if name[name.rfind(".") :].lower() in SUFFIXES and not name.startswith(".")
        ]
    # Sorted, because directory order differs between machines.
    return sorted(found)


def caption_files(root: Path) -> tuple[CaptionFiles, tuple[Decision, ...]]:
    """Return a folder's default caption files and the decision that explains the choice."""
    for name in ("metadata.jsonl", "metadata.csv"):
        if (root / name).is_file():
            after, reason = name, f"{name} is in the folder"
            break
    else:
        after, reason = ".txt", "there is no metadata.jsonl or metadata.csv"
    decision = Decision("data.captions", None, after, reason)
    return TextBeside() if after == ".txt" else MetadataFile(name=after), (decision,)


def _read_utf8(path: str | Path) -> str:
    try:
        with open(path, "rb", buffering=0) as file:
            text = file.read().decode("utf-8-sig")
        return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text
    except OSError as error:
        raise of_system(DataError, error, path, "this caption file cannot be read") from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"is not valid UTF-8 (byte {error.start})", "save the file as UTF-8", Path(path).name
        ) from None
