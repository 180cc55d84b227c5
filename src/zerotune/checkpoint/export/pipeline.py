"""Export a whole diffusers pipeline with the trained model."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zerotune._util.files import sync
from zerotune._util.text import json_of
from zerotune.backend.checks import checked_dtype
from zerotune.backend.single_file import INDEX, SUFFIX, SingleFile
from zerotune.backend.trained_parts import TrainedParts, components
from zerotune.checkpoint.drafting import model_config
from zerotune.checkpoint.export.driver import (
    SHARD_SIZE,
    ExportWriter,
    Gatherable,
    Whole,
    export_together,
    meet,
)
from zerotune.checkpoint.export.model import engine_writer, refuse_adapters, untrained
from zerotune.checkpoint.folders import checked_path
from zerotune.checkpoint.marks import check_apart
from zerotune.checkpoint.staging import ExportStaging
from zerotune.checkpoint.tensors import hash_of
from zerotune.errors import CheckpointMismatchError

if TYPE_CHECKING:
    from zerotune.backend.engine import Engine


def export_pipeline(
    path: str | os.PathLike[str],
    *,
    engine: Engine,
    base: str | os.PathLike[str],
    config: str | os.PathLike[str] | None = None,
    component: str | None = None,
    weights: Gatherable | str | None = None,
    dtype: str | torch.dtype = "fp32",
    shard_size: int = SHARD_SIZE,
    timeout_s: float | None = None,
) -> Path:
    """Write a copy of the pipeline ``base`` that contains the engine's model. Collective.

    Each part of ``TrainedParts`` replaces the pipeline's part of the same name. The other parts
    (VAE, text encoders, tokenizers, scheduler) are copied unchanged. An earlier export is replaced
    when the new export is complete.

    A recipe writes the folder as a single file.

    Args:
        path: Path of the folder.
        engine: Engine of the model.
        base: Pipeline folder or single file that training started from.
        config: Pipeline folder with the configuration, tokenizers and scheduler. Required only if
            ``base`` is a single file.
        component: Part to replace (``"unet"``, ``"transformer"``); by default derived from the
            model's class. For ``TrainedParts``, the names of the parts are used.
        weights: As in ``export_model``.
        dtype: Dtype of the replaced part.
        shard_size: Maximum bytes of tensor data per file.
        timeout_s: As in ``export_model``.

    Returns:
        The absolute path.

    Raises:
        CheckpointMismatchError: ``base`` is not a pipeline or lacks the part, or ``path`` is that
            of a file.
        InvalidValueError: ``weights`` names an EMA that is not attached to the engine.
        CheckpointError: The path exists and is not an export, or writing fails.
        CollectiveError: A rank did not call ``export_pipeline``, or the arguments differ.
    """
    target, origin, chosen = Path(path).absolute(), Path(base), checked_dtype(dtype)
    settings = None if config is None else Path(config)
    exported = meet(
        engine,
        target,
        "export_pipeline",
        origin,
        settings,
        component,
        chosen,
        shard_size,
        weights=weights,
        timeout_s=timeout_s,
    )
    refuse_adapters(engine)
    return export_together(
        engine,
        "the pipeline",
        begin=lambda: _draft(
            target,
            engine,
            base=origin,
            config=settings,
            component=component,
            dtype=chosen,
            shard_size=shard_size,
        ),
        weights=exported,
        others=untrained(engine),
    )


def _draft(
    target: Path,
    engine: Engine,
    *,
    base: Path,
    config: Path | None,
    component: str | None,
    dtype: torch.dtype,
    shard_size: int,
) -> _PipelineDraft:
    """Return a draft of the folder, whose frozen parts come from a folder or a single file."""
    if target.suffix == SUFFIX:
        raise CheckpointMismatchError(
            "is the path of a file, but a pipeline is exported to a folder",
            "export to a folder, and convert the folder with examples/recipes/one_file.py",
            "path",
            str(target),
        )
    if base.is_file() and config is None:
        raise CheckpointMismatchError(
            "is a single file, which contains neither tokenizers nor a scheduler",
            "set config= to the folder of the pipeline that the file belongs to",
            "base",
            str(base),
        )
    folder = base if config is None else config
    return _PipelineDraft(
        target,
        engine,
        base=folder,
        file=SingleFile.open(base, config=folder) if base.is_file() else None,
        parts=_components(folder, component, engine.module),
        dtype=dtype,
        shard_size=shard_size,
    )


class _PipelineDraft:
    """Writes the folder on rank 0; untrained parts are copied first."""

    def __init__(
        self,
        target: Path,
        engine: Engine,
        *,
        base: Path,
        file: SingleFile | None,
        parts: Mapping[str, tuple[str, torch.nn.Module]],
        dtype: torch.dtype,
        shard_size: int,
    ) -> None:
        check_apart(target, base)
        self._target, top = target, str(base)
        elsewhere = [*parts] if file is None else [*parts, *file.parts]
        self._staging = ExportStaging(checked_path(target))
        folder = self._staging.path
        self._models: dict[str, ExportWriter] = {}
        with ExitStack() as undo:
            undo.callback(self.abandon)
            shutil.copytree(
                base,
                folder,
                ignore=lambda where, _names: elsewhere if where == top else [],
                dirs_exist_ok=True,
            )
            if file is not None:
                file.save_parts(folder)
            others = {
                path.relative_to(folder).as_posix(): hash_of(path)
                for path in _component_files(folder)
            }
            for name, part in parts.items():
                self._models[part[0]] = engine_writer(
                    folder / name,
                    engine,
                    dtype=dtype,
                    shard_size=shard_size,
                    whole=Whole(part=name, others=others),
                    part=part,
                    texts=_texts_beside(base / name) if model_config(part[1]) is None else None,
                )
            undo.pop_all()

    def append(self, name: str, tensor: torch.Tensor, *, trained: bool) -> None:
        """Write a tensor of a trained part."""
        prefix = next(prefix for prefix in self._models if name.startswith(prefix))
        self._models[prefix].append(name.removeprefix(prefix), tensor, trained=trained)

    def publish(self) -> Path:
        """Flush all files to disk, and rename the folder."""
        for model in self._models.values():
            model.publish()
        for path in _component_files(self._staging.path):
            sync(path)
        self._staging.publish()
        return self._target

    def abandon(self) -> None:
        """Delete the files that have not been renamed yet."""
        for model in self._models.values():
            model.abandon()
        self._staging.abandon()


def _texts_beside(folder: Path) -> dict[str, bytes]:
    """Read the JSON files beside the weights of a text encoder, which is no diffusers model."""
    return {
        path.name: path.read_bytes()
        for path in sorted(folder.glob("*.json"))
        if not path.name.endswith(".index.json")
    }


def _component_files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def _components(
    base: Path, asked: str | None, model: torch.nn.Module
) -> Mapping[str, tuple[str, torch.nn.Module]]:
    """Return, for each replaced part, the prefix of its names in the engine, and the module."""
    if not isinstance(model, TrainedParts):
        return {_component_of(base, asked, type(model).__name__): ("", model)}
    for name in model.names:
        _component_of(base, name, type(model).__name__)
    return components(model)


def _component_of(base: Path, asked: str | None, model: str) -> str:
    """Return a model's name in a pipeline, by default the one with the model's class."""
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
    return fitting[0]
