"""From an engine to one file with the whole model, in the layout of its first publication."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch

from zerotune._util.text import listing
from zerotune.backend.original_names import ORIGINALS, Original, as_published
from zerotune.backend.single_file import Places, Shapes, SingleFile, place_rows
from zerotune.checkpoint.export.driver import ExportWriter, Named
from zerotune.checkpoint.export.model import ModelFolderReader, engine_specs
from zerotune.checkpoint.folders import check_apart
from zerotune.checkpoint.tensors import TensorReader, TensorSpec
from zerotune.errors import CheckpointCorruptError, CheckpointMismatchError

if TYPE_CHECKING:
    from zerotune.backend.engine import Engine


@attrs.frozen(kw_only=True)
class Layout:
    """What will be in the file."""

    specs: Sequence[TensorSpec]
    """Every tensor."""
    places: Places
    """Where the trained model's tensors go."""
    others: Callable[[], Named]
    """The tensors of the parts that were not trained."""
    check: Callable[[Path], None] | None = None
    """Looks at the file before it gets its name."""


class SingleFileDraft:
    """The file as rank 0 writes it: tensors of the trained model, then those of the other parts.

    Args:
        target: The file.
        base: What training began from.
        layout: What will be in the file.
    """

    def __init__(self, target: Path, *, base: Path, layout: Layout) -> None:
        check_apart(target, base)
        self._layout = layout
        self._writer = ExportWriter(target, stem=None, specs=layout.specs)

    def append(self, name: str, tensor: torch.Tensor, *, trained: bool) -> None:  # noqa: ARG002
        """Write a tensor of the trained model, each run of its rows at its place."""
        rows = tensor.reshape(math.prod(tensor.shape[:1]), -1)
        for run in self._layout.places[name]:
            part = rows[run.here : run.here + run.count]
            self._writer.append_part(run.key, part, start=run.there * rows.shape[1])

    def publish(self) -> Path:
        """Write the other parts, read all back, and give it its name."""
        for key, tensor in self._layout.others():
            self._writer.append(key, tensor)
        return self._writer.publish(check=self._layout.check)

    def abandon(self) -> None:
        """Remove what has not got its name."""
        self._writer.abandon()


def layout_of_file(engine: Engine, path: Path, *, dtype: torch.dtype) -> Layout:
    """The layout of the single file that training began from: its names, and its other parts.

    Args:
        engine: The model.
        path: The file.
        dtype: Of the trained model's tensors; the others stay as they are.
    """
    file = SingleFile.open(path, config=path.parent)
    model = {spec.key: spec.shape for spec in engine_specs(engine, {}, dtype)}
    places = _places(engine, model, file.shapes)
    trained = {run.key for runs in places.values() for run in runs}
    specs = [
        TensorSpec(key=key, dtype=stored.dtype, shape=stored.shape)
        for key, stored in file.tensors.items()
        if not file.is_stale(key)
    ]

    def others() -> Named:
        with TensorReader([path]) as reader:
            for spec in specs:
                if spec.key not in trained:
                    yield spec.key, reader.tensor(spec.key)

    return Layout(
        specs=[spec.cast(dtype) if spec.key in trained else spec for spec in specs],
        places=places,
        others=others,
    )


def layout_of_folder(
    engine: Engine, folder: Path, *, part: str, pipeline: str, dtype: torch.dtype
) -> Layout:
    """The layout in which models of a pipeline's class were first published.

    Args:
        engine: The model.
        folder: The pipeline training began from; its other parts go into the file as well.
        part: What the model is called there.
        pipeline: The pipeline's class.
        dtype: As in ``layout_of_file``.
    """
    originals = ORIGINALS.get(pipeline, {})
    if part not in originals:
        raise CheckpointMismatchError(
            f"zerotune does not know how {pipeline} is written into a single file",
            key="base",
            value=str(folder),
            fix=f"export to a folder, or begin from a single file, whose layout is kept; known are "
            f"{listing(list(ORIGINALS))}",
        )
    model = {spec.key: spec for spec in engine_specs(engine, {}, dtype)}
    config: Any = engine.module.config
    specs = []
    for key, names in originals[part].keys(list(model), config).items():
        first = model[names[0]]
        rows = sum(math.prod(model[name].shape[:1]) for name in names)
        specs.append(attrs.evolve(first, key=key, shape=(rows, *first.shape[1:])))
    places = _places(
        engine,
        {name: spec.shape for name, spec in model.items()},
        {spec.key: spec.shape for spec in specs},
    )
    parts = {
        name: original
        for name, original in originals.items()
        if name != part and (folder / name).is_dir()
    }
    specs += [TensorSpec.of(*each) for each in _published(folder, parts, read=False)]
    return Layout(
        specs=specs,
        places=places,
        others=lambda: _published(folder, parts, read=True),
        check=lambda file: _compare(file, folder, pipeline=pipeline, parts=list(parts)),
    )


def _places(engine: Engine, model: Shapes, file: Shapes) -> Places:
    """Where the model's tensors go: each row once, and no row of theirs is left over."""
    config: Any = getattr(engine.module, "config", {})
    places = place_rows(type(engine.module), config, model=model, file=file)
    taken: dict[str, list[tuple[int, int]]] = {}
    for runs in places.values():
        for run in runs:
            taken.setdefault(run.key, []).append((run.there, run.count))
    for key, pieces in taken.items():
        position = 0
        for there, count in sorted(pieces):
            position = position + count if there == position else -1
        if position != math.prod(file[key][:1]):
            raise CheckpointMismatchError(
                "is not made of whole rows of the model, as diffusers' converter reads it",
                key=key,
                fix="export to a folder",
            )
    return places


def _published(folder: Path, parts: Mapping[str, Original], *, read: bool) -> Named:
    """Tensors of frozen parts by their names in the file; without values if not read."""
    for part, original in parts.items():
        with ModelFolderReader(folder / part) as reader:
            for key, names in original.keys(list(reader.tensors), reader.config or {}).items():
                tensors = [
                    reader.tensor(name) if read else _without_values(reader, name) for name in names
                ]
                yield key, as_published(key, tensors)


def _without_values(reader: ModelFolderReader, name: str) -> torch.Tensor:
    stored = reader.tensors[name]
    return torch.empty(stored.shape, dtype=stored.dtype, device="meta")


def _compare(file: Path, folder: Path, *, pipeline: str, parts: Sequence[str]) -> None:
    """Compare frozen parts as diffusers reads them from the file with those of the folder."""
    import diffusers

    if not parts:
        return
    single = SingleFile.open(file, config=folder)
    options = {"local_files_only": True, **single.without(parts)}
    kind = getattr(diffusers, pipeline)
    read, meant = single.pipeline(kind, options), kind.from_pretrained(folder, **options)
    for name in parts:
        theirs = getattr(read, name).state_dict()
        for key, tensor in getattr(meant, name).state_dict().items():
            other = theirs.get(key)
            if other is None or other.is_meta or not torch.equal(other.float(), tensor.float()):
                raise CheckpointCorruptError(
                    f"diffusers reads another tensor from the file ({key})",
                    key=name,
                    value=str(folder / name),
                    fix="export to a folder",
                )
