"""Families by the names of their pipelines, and by their names in plans."""

from __future__ import annotations

import contextlib
import importlib
import sys
from pathlib import Path
from typing import Final

from zerotune._util.text import did_you_mean
from zerotune.diffusion.models.declared import (
    DECLARED,
    AuraFlow,
    Chroma,
    Flux,
    Flux2,
    Flux2Klein,
    FluxKontext,
    HiDream,
    HunyuanVideo,
    Krea2,
    LTXVideo,
    Lumina2,
    PixArtAlpha,
    PixArtSigma,
    QwenImage,
    QwenImageEdit,
    QwenImageEditPlus,
    Sana,
    Wan,
    WanLowNoise,
    ZImage,
)
from zerotune.diffusion.models.pipeline_family import PipelineFamily
from zerotune.diffusion.models.stable_diffusion import (
    StableDiffusion,
    StableDiffusion3,
    StableDiffusionXL,
)
from zerotune.errors import InvalidValueError
from zerotune.platform.detect import first_line

FAMILIES: Final[dict[str, type[PipelineFamily]]] = {family.pipeline: family for family in DECLARED}
"""Families, keyed by the class name of their diffusers pipeline."""

FAMILY_NAMES: Final[dict[str, type[PipelineFamily]]] = {
    "aura-flow": AuraFlow,
    "chroma": Chroma,
    "flux": Flux,
    "flux-kontext": FluxKontext,
    "flux2": Flux2,
    "flux2-klein-4b": Flux2Klein,
    "flux2-klein-9b": Flux2Klein,
    "hidream": HiDream,
    "hunyuan-video": HunyuanVideo,
    "krea2": Krea2,
    "ltx-video": LTXVideo,
    "lumina2": Lumina2,
    "pixart-alpha": PixArtAlpha,
    "pixart-sigma": PixArtSigma,
    "qwen-image": QwenImage,
    "qwen-image-edit": QwenImageEdit,
    "qwen-image-edit-plus": QwenImageEditPlus,
    "sana": Sana,
    "sd15": StableDiffusion,
    "sd21": StableDiffusion,
    "sd3-medium": StableDiffusion3,
    "sd35-large": StableDiffusion3,
    "sd35-medium": StableDiffusion3,
    "sdxl": StableDiffusionXL,
    "wan-1.3b": Wan,
    "wan-14b": Wan,
    "z-image": ZImage,
}
"""Families, keyed by their names in plans."""


def named_family(name: str) -> type[PipelineFamily]:
    """Find a family class by its command-line name, class name, pipeline, or ``module:Class``.

    Raises:
        InvalidValueError: No family has this name.
    """
    if ":" in name:
        return _imported_family(name)
    names: dict[str, type[PipelineFamily]] = {**FAMILY_NAMES, **FAMILIES}
    names |= {family.__name__: family for family in DECLARED} | {"WanLowNoise": WanLowNoise}
    if name in names:
        return names[name]
    close = did_you_mean(name, names)
    raise InvalidValueError(
        "is not a known family",
        f"did you mean {' or '.join(close)}?" if close else f"one of {', '.join(FAMILY_NAMES)}",
        "family",
        name,
    )


def _imported_family(name: str) -> type[PipelineFamily]:
    """Import a custom family from a module in the working directory or an installed module."""
    module, _, attribute = name.partition(":")
    here = str(Path.cwd())
    with contextlib.ExitStack() as undo:
        if "" not in sys.path and here not in sys.path:
            sys.path.insert(0, here)
            undo.callback(sys.path.remove, here)
        try:
            found = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise InvalidValueError(
                f"cannot be imported ({first_line(error)})",
                "write the module's import name, a colon and the class name, such as "
                "my_family:OvisImage",
                "family",
                name,
            ) from error
    if not (isinstance(found, type) and issubclass(found, PipelineFamily)):
        raise InvalidValueError(
            "is not a family",
            "name a subclass of zerotune.diffusion.PipelineFamily (docs/families.md)",
            "family",
            name,
        )
    return found
