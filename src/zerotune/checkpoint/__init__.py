"""Checkpoints without pickle: whole or not there, checked before they are loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from zerotune.lazy import lazy_attribute

if TYPE_CHECKING:
    from zerotune.checkpoint.adapters import ExportedAdapters, export_adapters
    from zerotune.checkpoint.adapters_merging import export_merged, merge_adapters
    from zerotune.checkpoint.background import BackgroundSaver, PendingCheckpoint
    from zerotune.checkpoint.contents import ShadowLike
    from zerotune.checkpoint.converting import convert
    from zerotune.checkpoint.export import export_checkpoint, export_model
    from zerotune.checkpoint.folders import latest_checkpoint, prune, step_folder
    from zerotune.checkpoint.loading import (
        CheckpointContents,
        load_checkpoint,
        restore,
    )
    from zerotune.checkpoint.manifest import Manifest
    from zerotune.checkpoint.pipelines import export_pipeline
    from zerotune.checkpoint.saving import save_checkpoint
    from zerotune.checkpoint.verifying import verify_checkpoint

_HOMES: Final = {
    "BackgroundSaver": "background",
    "CheckpointContents": "loading",
    "ExportedAdapters": "adapters",
    "Manifest": "manifest",
    "PendingCheckpoint": "background",
    "ShadowLike": "contents",
    "convert": "converting",
    "export_adapters": "adapters",
    "export_checkpoint": "export",
    "export_merged": "adapters_merging",
    "export_model": "export",
    "export_pipeline": "pipelines",
    "latest_checkpoint": "folders",
    "merge_adapters": "adapters_merging",
    "load_checkpoint": "loading",
    "prune": "folders",
    "restore": "loading",
    "save_checkpoint": "saving",
    "step_folder": "folders",
    "verify_checkpoint": "verifying",
}

__all__ = [
    "save_checkpoint",
    "load_checkpoint",
    "restore",
    "verify_checkpoint",
    "export_model",
    "export_pipeline",
    "export_checkpoint",
    "export_adapters",
    "export_merged",
    "merge_adapters",
    "convert",
    "latest_checkpoint",
    "prune",
    "step_folder",
    "BackgroundSaver",
    "PendingCheckpoint",
    "CheckpointContents",
    "ExportedAdapters",
    "Manifest",
    "ShadowLike",
]

__getattr__ = lazy_attribute(globals(), _HOMES)


def __dir__() -> list[str]:
    return sorted(__all__)
