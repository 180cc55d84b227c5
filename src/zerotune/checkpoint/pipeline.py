"""From an engine to a whole diffusers pipeline, with the trained model in it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from zerotune._util.files import sync
from zerotune._util.text import json_of
from zerotune.backend.dtypes import checked_dtype
from zerotune.checkpoint.collective import together
from zerotune.checkpoint.export import SHARD_SIZE, Gatherable, Whole, export_part, weights_of
from zerotune.checkpoint.exported import check_apart
from zerotune.checkpoint.folders import ExportStaging, checked_path
from zerotune.checkpoint.tensors import hash_of
from zerotune.errors import CheckpointMismatchError

if TYPE_CHECKING:
    from zerotune.backend.engine import Engine


INDEX: Final = "model_index.json"
"""What makes a folder a pipeline of diffusers."""


def export_pipeline(
    path: str | os.PathLike[str],
    *,
    engine: Engine,
    base: str | os.PathLike[str],
    component: str | None = None,
    weights: Gatherable | str | None = None,
    dtype: str | torch.dtype = "fp32",
    shard_size: int = SHARD_SIZE,
    timeout_s: float | None = None,
) -> Path:
    """Write a pipeline: that of ``base`` with the engine's model in place of one part. Collective.

    The other parts (VAE, text encoders, tokenizers, scheduler) are copied as they are. The folder
    gets its name when all of it is on the disk, and then takes the place of an earlier export.

    Args:
        path: The folder.
        engine: The model.
        base: Folder of the pipeline training began from.
        component: Part to replace (``"unet"``, ``"transformer"``); found by the model's class
            when not given.
        weights: As in ``export_model``.
        dtype: Of the replaced part.
        shard_size: Most bytes of tensors in a file.
        timeout_s: As in ``export_model``.

    Returns:
        The absolute path.

    Raises:
        CheckpointMismatchError: ``base`` is no pipeline, or has no such part.
        InvalidValueError: No such average is attached to the engine.
        CheckpointError: The path is taken by something else than an export, or writing fails.
        CollectiveError: A rank did not come, or the arguments differ.
    """
    target, origin, group = Path(path).absolute(), Path(base), engine.group
    checked_dtype(dtype)
    group.barrier(f"exporting to {target}", timeout_s=timeout_s)
    group.agree((str(target), str(origin), component), "export_pipeline")
    weights_of(engine, weights)  # Before anything is copied.
    pipeline = _Pipeline(target, base=origin)

    def begin() -> Path | None:
        if not group.is_main:
            return None
        pipeline.begin(_component(origin, component, engine.module))
        return pipeline.part

    try:
        part = together(group, "begin the pipeline", begin)[0]
        export_part(
            Path(str(part)),
            engine=engine,
            weights=weights,
            dtype=dtype,
            shard_size=shard_size,
            whole=pipeline.whole,
        )
        together(group, "finish the pipeline", pipeline.publish)
    except BaseException:
        pipeline.abandon()
        raise
    return target


class _Pipeline:
    """The folder as rank 0 writes it; on other ranks nothing happens."""

    def __init__(self, target: Path, *, base: Path) -> None:
        self._target, self._base = target, base
        self._staging: ExportStaging | None = None
        self.whole: Whole | None = None

    @property
    def part(self) -> Path | None:
        """Where the trained model goes."""
        if self._staging is None or self.whole is None:
            return None
        return self._staging.path / self.whole.part

    def begin(self, part: str) -> None:
        """Copy what was not trained."""
        check_apart(self._target, self._base)
        self._staging = ExportStaging(checked_path(self._target))
        folder, top = self._staging.path, str(self._base)
        shutil.copytree(
            self._base,
            folder,
            ignore=lambda where, _names: [part] if where == top else [],
            dirs_exist_ok=True,
        )
        others = {path.relative_to(folder).as_posix(): hash_of(path) for path in _files(folder)}
        self.whole = Whole(part=part, others=others)

    def publish(self) -> None:
        """Bring everything to disk and give it its name."""
        if self._staging is not None:
            for path in _files(self._staging.path):
                sync(path)
            self._staging.publish()

    def abandon(self) -> None:
        """Remove what was written so far."""
        if self._staging is not None:
            self._staging.abandon()


def _files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def _component(base: Path, asked: str | None, model: torch.nn.Module) -> str:
    try:
        index: dict[str, Any] = json_of((base / INDEX).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointMismatchError(
            f"is not the folder of a diffusers pipeline: {error}",
            key="base",
            value=str(base),
            fix=f"give the folder that training began from, with its {INDEX}",
        ) from error
    parts = {
        name: entry[1]
        for name, entry in index.items()
        if isinstance(entry, list) and len(entry) == 2 and entry[1]
    }
    if asked is not None:
        found = [asked] if asked in parts else []
    else:
        found = [name for name, kind in parts.items() if kind == type(model).__name__]
    if len(found) != 1:
        raise CheckpointMismatchError(
            f"the pipeline has {len(found) or 'no'} such parts; it has {parts}",
            key="component",
            value=asked or type(model).__name__,
            fix="name the part that was trained",
        )
    return found[0]
