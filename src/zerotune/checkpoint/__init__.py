"""Checkpoints without pickle: whole or not there, checked before they are loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from zerotune._util.lazy import lazy_attribute

if TYPE_CHECKING:
    from zerotune.checkpoint.adapters import ExportedAdapters, export_adapters
    from zerotune.checkpoint.contents import ShadowLike
    from zerotune.checkpoint.conversion import convert
    from zerotune.checkpoint.export import export_checkpoint, export_model
    from zerotune.checkpoint.folders import latest_checkpoint, prune, step_folder
    from zerotune.checkpoint.load import CheckpointContents, load_checkpoint, restore
    from zerotune.checkpoint.manifest import Manifest
    from zerotune.checkpoint.merge import export_merged, merge_adapters
    from zerotune.checkpoint.pipeline import export_pipeline
    from zerotune.checkpoint.save import BackgroundSaver, PendingCheckpoint, save_checkpoint
    from zerotune.checkpoint.verify import verify_checkpoint

_HOMES: Final = {
    "BackgroundSaver": "save",
    "CheckpointContents": "load",
    "ExportedAdapters": "adapters",
    "Manifest": "manifest",
    "PendingCheckpoint": "save",
    "ShadowLike": "contents",
    "convert": "conversion",
    "export_adapters": "adapters",
    "export_checkpoint": "export",
    "export_merged": "merge",
    "export_model": "export",
    "export_pipeline": "pipeline",
    "latest_checkpoint": "folders",
    "merge_adapters": "merge",
    "load_checkpoint": "load",
    "prune": "folders",
    "restore": "load",
    "save_checkpoint": "save",
    "step_folder": "folders",
    "verify_checkpoint": "verify",
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
