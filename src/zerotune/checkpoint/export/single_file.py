"""Export a model to a single file, in the layout of its original release."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch

from zerotune._util.files import system_errors
from zerotune._util.text import json_of
from zerotune.backend.checks import checked_dtype
from zerotune.backend.single_file import (
    INDEX,
    Places,
    Shapes,
    SingleFile,
    place_rows,
)
from zerotune.backend.stored import StoredTensor, StoredWeight
from zerotune.checkpoint.drafting import model_config
from zerotune.checkpoint.export.driver import ExportWriter, Named
from zerotune.checkpoint.export.model import (
    checked_checkpoint,
    engine_specs,
    records_of,
    specs_of,
    stored_tensors,
)
from zerotune.checkpoint.manifest import Manifest
from zerotune.checkpoint.marks import check_apart
from zerotune.checkpoint.reader import CheckpointReader
from zerotune.checkpoint.tensors import TensorReader, TensorSpec
from zerotune.errors import CheckpointError, CheckpointMismatchError

if TYPE_CHECKING:
    from zerotune.backend.engine import Engine


@attrs.frozen(kw_only=True)
class Trained:
    """Class, configuration and tensors of a trained model to export."""

    kind: type[Any]
    """Class of the model."""
    config: Mapping[str, Any]
    specs: Mapping[str, TensorSpec]
    """Descriptions of the tensors to write, by their names in the model."""

    @classmethod
    def by(cls, engine: Engine, dtype: torch.dtype) -> Trained:
        """Describe the model of an engine.

        Args:
            engine: Engine of the model.
            dtype: Dtype of floating-point tensors.
        """
        return cls(
            kind=type(engine.module),
            config=model_config(engine.module) or {},
            specs={spec.key: spec for spec in engine_specs(engine, {}, dtype)},
        )

    @classmethod
    def stored(cls, manifest: Manifest, dtype: torch.dtype) -> Trained:
        """Describe the model of a checkpoint.

        Args:
            manifest: Manifest of the checkpoint.
            dtype: Dtype of floating-point tensors.
        """
        import diffusers

        config = manifest.model or {}
        kind = getattr(diffusers, str(config.get("_class_name")), None)
        if kind is None:
            raise CheckpointMismatchError(
                "the model is not from diffusers, so its single-file layout is unknown",
                key="model",
                value=config.get("_class_name"),
            )
        specs = specs_of(records_of(manifest), {}, dtype)
        return cls(kind=kind, config=config, specs={spec.key: spec for spec in specs})

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor."""
        return {name: spec.shape for name, spec in self.specs.items()}


@attrs.frozen(kw_only=True)
class Layout:
    """Tensors of a single file, their positions, and a final check."""

    specs: Sequence[TensorSpec]
    """Descriptions of all tensors in the file."""
    places: Places
    """Positions of the trained model's tensors in the file."""
    others: Callable[[], Named]
    """Function that yields the names and tensors of the untrained parts."""


class SingleFileDraft:
    """An unfinished single-file export on rank 0; the trained model is written first.

    Args:
        target: Path of the file.
        base: File or folder that training started from.
        layout: Tensors of the file and their positions.
    """

    def __init__(self, target: Path, *, base: Path, layout: Layout) -> None:
        check_apart(target, base)
        self._layout = layout
        self._writer = ExportWriter(target, stem=None, specs=layout.specs)

    def append(self, name: str, tensor: torch.Tensor, *, trained: bool) -> None:  # noqa: ARG002
        """Write the rows of a trained tensor to their positions in the file."""
        rows = tensor.reshape(math.prod(tensor.shape[:1]), -1)
        for run in self._layout.places[name]:
            part = rows[run.here : run.here + run.count]
            self._writer.append_part(run.key, part, start=run.there * rows.shape[1])

    def publish(self) -> Path:
        """Write the untrained parts, verify the file and give it its final name."""
        for key, tensor in self._layout.others():
            self._writer.append(key, tensor)
        return self._writer.publish()

    def abandon(self) -> None:
        """Delete the temporary file if it does not have its final name yet."""
        self._writer.abandon()


def layout_of_file(model: Trained, path: Path, *, dtype: torch.dtype) -> Layout:
    """Return the layout of the single file that training started from.

    Args:
        model: The trained model.
        path: Path of the file.
        dtype: Dtype of the trained model's tensors; the other tensors keep their dtypes.
    """
    file = SingleFile.open(path, config=path.parent)
    places = _places(model, file.shapes)
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


def _places(model: Trained, file: Shapes) -> Places:
    """Return the places of the model's rows in the file, which must be covered exactly once."""
    places = place_rows(model.kind, model.config, model=model.shapes, file=file)
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
                "cannot be assembled from whole rows of the model's tensors, according to "
                "diffusers' converter",
                "export to a folder",
                key,
            )
    return places


def export_checkpoint_as_file(
    directory: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str],
    shadow: str | None = None,
    dtype: str | torch.dtype = "fp32",
) -> Path:
    """Write a checkpoint's model as a single file, without an engine.

    Args:
        directory: Folder of the checkpoint.
        path: Path of the file.
        base: Single file that training started from.
        shadow: As in ``export_checkpoint``.
        dtype: Dtype of the trained model's tensors.

    Raises:
        CheckpointError: As in ``export_checkpoint`` and ``export_pipeline``.
    """
    with system_errors(CheckpointError, path, "cannot be exported to"), ExitStack() as opened:
        folder, manifest = checked_checkpoint(directory, shadow=shadow)
        origin, chosen = Path(base), checked_dtype(dtype)
        model = Trained.stored(manifest, chosen)
        layout = layout_of_file(model, origin, dtype=chosen)
        frozen = _ModelOfFile.at(origin, layout.places, model.shapes)
        draft = SingleFileDraft(Path(path).absolute(), base=origin, layout=layout)
        opened.callback(draft.abandon)
        reader = opened.enter_context(CheckpointReader(folder, manifest))
        for name, tensor in stored_tensors(reader, manifest, shadow, frozen):
            draft.append(name, tensor, trained=True)
        return draft.publish()


@attrs.frozen(kw_only=True)
class _ModelOfFile:
    """The model's former weights in a single file."""

    path: Path
    weights: Mapping[str, StoredWeight]

    @classmethod
    def at(cls, path: Path, places: Places, shapes: Shapes) -> _ModelOfFile:
        file = SingleFile.open(path, config=path.parent)
        return cls(path=path, weights=file.weights(places, shapes))

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Tensors by their names in the model."""
        return {name: weight.tensor for name, weight in self.weights.items()}

    def tensor(self, name: str) -> torch.Tensor:
        """Return one tensor on the CPU."""
        stored = self.weights[name].tensor
        values = torch.empty(stored.shape, dtype=stored.dtype)
        self.weights[name].read_into(values.view(-1))
        return values


def component_of(base: Path, asked: str | None, model: str) -> tuple[str, str]:
    """Return a model's name in a pipeline, and the name of the pipeline's class.

    Args:
        base: Folder of the pipeline.
        asked: Name of the model; ``None`` to find it by the model's class.
        model: Name of the model's class.
    """
    try:
        index: dict[str, Any] = json_of((base / INDEX).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointMismatchError(
            f"is not the folder of a diffusers pipeline: {error}",
            f"use the pipeline folder that training started from; it contains {INDEX}",
            "base",
            str(base),
        ) from error
    parts = {
        name: entry[1]
        for name, entry in index.items()
        if isinstance(entry, list) and len(entry) == 2 and entry[1]
    }
    if asked is not None:
        fitting = [asked] if asked in parts else []
    else:
        fitting = [name for name, kind in parts.items() if kind == model]
    if len(fitting) != 1:
        raise CheckpointMismatchError(
            f"matches {len(fitting) or 'no'} parts of the pipeline, which contains {parts}",
            "set component= to the name of the trained part",
            "component",
            asked or model,
        )
    return fitting[0], str(index.get("_class_name"))
