"""From an engine to a whole diffusers pipeline, with the trained model in it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from zerotune._util.files import sync
from zerotune.backend.dtypes import checked_dtype
from zerotune.checkpoint.collective import together
from zerotune.checkpoint.export import SHARD_SIZE, Gatherable, export_model
from zerotune.errors import CheckpointError, CheckpointMismatchError

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
    weights: Gatherable | None = None,
    dtype: str | torch.dtype = "fp32",
    shard_size: int = SHARD_SIZE,
    timeout_s: float | None = None,
) -> Path:
    """Write a pipeline: that of ``base`` with the engine's model in place of one part. Collective.

    The other parts (VAE, text encoders, tokenizers, scheduler) are copied as they are. The folder
    gets its name when all of it is on the disk.

    Args:
        path: The folder, which must not exist.
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
        CheckpointError: The path is taken, or writing fails.
        CollectiveError: A rank did not come, or the arguments differ.
    """
    target, origin, group = Path(path).absolute(), Path(base), engine.group
    checked_dtype(dtype)
    group.barrier(f"exporting to {target}", timeout_s=timeout_s)
    group.agree((str(target), str(origin), component), "export_pipeline")
    partial = target.with_name(f".{target.name}.partial")

    def begin() -> str | None:
        if not group.is_main:
            return None
        part = _component(origin, component, engine.module)
        _copy_others(origin, partial, target, part)
        return part

    part = together(group, "begin the pipeline", begin)[0]
    try:
        export_model(
            partial / str(part), engine=engine, weights=weights, dtype=dtype, shard_size=shard_size
        )
        together(group, "finish the pipeline", lambda: _publish(group.is_main, partial, target))
    except BaseException:
        if group.is_main:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return target


def _component(base: Path, asked: str | None, model: torch.nn.Module) -> str:
    try:
        index: dict[str, Any] = json.loads((base / INDEX).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointMismatchError(
            f"is not the folder of a diffusers pipeline: {error}", key="base", value=str(base)
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


def _copy_others(base: Path, partial: Path, target: Path, part: str) -> None:
    if target.exists():
        raise CheckpointError("exists and is not replaced", key="path", value=str(target))
    shutil.rmtree(partial, ignore_errors=True)
    top = str(base)
    shutil.copytree(base, partial, ignore=lambda folder, _names: [part] if folder == top else [])


def _publish(is_main: bool, partial: Path, target: Path) -> None:
    if is_main:
        for folder, _, names in os.walk(partial):
            for name in names:
                sync(Path(folder) / name)
        partial.rename(target)
        sync(target.parent)
