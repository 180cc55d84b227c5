"""ZeRO-offloaded diffusion training that tells what it does.

Every object works alone in your own loop; ``Trainer`` is their wiring. Names are loaded on first
use: importing zerotune loads neither torch nor deepspeed and changes nothing in the process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from zerotune._util.lazy import lazy_attribute

if TYPE_CHECKING:
    from zerotune.backend.build import build_engine
    from zerotune.backend.engine import Engine
    from zerotune.backend.schema import plan_schema
    from zerotune.checkpoint import (
        export_adapters,
        export_model,
        export_pipeline,
        latest_checkpoint,
        load_checkpoint,
        save_checkpoint,
    )
    from zerotune.diffusion import (
        ClassConditional,
        DataStream,
        DenoisingObjective,
        FlowMatchingObjective,
        ImageTensors,
        LoRA,
        Unconditional,
        add_lora,
        encode_dataset,
        images_to_grid,
        load_pretrained,
        sample,
    )
    from zerotune.diffusion.data import AspectBuckets, ImageFolder, PreparedImages
    from zerotune.diffusion.facts import model_facts
    from zerotune.ema import EMAShadow
    from zerotune.errors import ZeroTuneError
    from zerotune.offload import OffloadManager, cleanup_stale_swap
    from zerotune.optim import OptimizerResolver
    from zerotune.plan import DeepSpeedPlan, ModelFacts, ResolvedPlan, RunFacts
    from zerotune.platform import Platform, detect_platform
    from zerotune.training import (
        Callback,
        EmbeddedPlan,
        MetricsFile,
        Profile,
        ProgressBar,
        SaveEvery,
        Trackers,
        Trainer,
        ValidationImages,
        ValidationLoss,
        prepare,
    )

__version__ = "0.1.0"

_HOMES: Final = {
    "DeepSpeedPlan": "plan",
    "ResolvedPlan": "plan",
    "ModelFacts": "plan",
    "RunFacts": "plan",
    "model_facts": "diffusion.facts",
    "OptimizerResolver": "optim",
    "OffloadManager": "offload",
    "cleanup_stale_swap": "offload",
    "Platform": "platform",
    "detect_platform": "platform",
    "prepare": "training",
    "Engine": "backend.engine",
    "build_engine": "backend.build",
    "plan_schema": "backend.schema",
    "EMAShadow": "ema",
    "save_checkpoint": "checkpoint",
    "load_checkpoint": "checkpoint",
    "latest_checkpoint": "checkpoint",
    "FlowMatchingObjective": "diffusion",
    "DenoisingObjective": "diffusion",
    "ClassConditional": "diffusion",
    "Unconditional": "diffusion",
    "DataStream": "diffusion",
    "ImageTensors": "diffusion",
    "sample": "diffusion",
    "images_to_grid": "diffusion",
    "Trainer": "training",
    "Callback": "training",
    "ProgressBar": "training",
    "MetricsFile": "training",
    "SaveEvery": "training",
    "load_pretrained": "diffusion",
    "encode_dataset": "diffusion",
    "LoRA": "diffusion",
    "add_lora": "diffusion",
    "ImageFolder": "diffusion.data",
    "PreparedImages": "diffusion.data",
    "AspectBuckets": "diffusion.data",
    "export_model": "checkpoint",
    "export_pipeline": "checkpoint",
    "export_adapters": "checkpoint",
    "EmbeddedPlan": "training",
    "ValidationImages": "training",
    "ValidationLoss": "training",
    "Trackers": "training",
    "Profile": "training",
    "ZeroTuneError": "errors",
}

__all__ = [
    "DeepSpeedPlan",
    "ResolvedPlan",
    "ModelFacts",
    "RunFacts",
    "model_facts",
    "OptimizerResolver",
    "OffloadManager",
    "cleanup_stale_swap",
    "Platform",
    "detect_platform",
    "prepare",
    "Engine",
    "build_engine",
    "plan_schema",
    "EMAShadow",
    "save_checkpoint",
    "load_checkpoint",
    "latest_checkpoint",
    "FlowMatchingObjective",
    "DenoisingObjective",
    "ClassConditional",
    "Unconditional",
    "DataStream",
    "ImageTensors",
    "sample",
    "images_to_grid",
    "Trainer",
    "Callback",
    "ProgressBar",
    "MetricsFile",
    "SaveEvery",
    "load_pretrained",
    "encode_dataset",
    "LoRA",
    "add_lora",
    "ImageFolder",
    "PreparedImages",
    "AspectBuckets",
    "export_model",
    "export_pipeline",
    "export_adapters",
    "EmbeddedPlan",
    "ValidationImages",
    "ValidationLoss",
    "Trackers",
    "Profile",
    "ZeroTuneError",
    "__version__",
]

__getattr__ = lazy_attribute(globals(), _HOMES)


def __dir__() -> list[str]:
    return sorted(__all__)
