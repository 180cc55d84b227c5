"""Usual names of the model families, and their groups in the page's list."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

MODEL_NAMES: Final[Mapping[str, tuple[str, str]]] = {
    "sdxl": ("SDXL", "SDXL"),
    "sd15": ("Stable Diffusion 1.5", "Stable Diffusion 1.5 and 2.1"),
    "sd21": ("Stable Diffusion 2.1", "Stable Diffusion 1.5 and 2.1"),
    "sd3-medium": ("SD3 Medium", "Stable Diffusion 3 and 3.5"),
    "sd35-medium": ("SD3.5 Medium", "Stable Diffusion 3 and 3.5"),
    "sd35-large": ("SD3.5 Large", "Stable Diffusion 3 and 3.5"),
    "flux": ("FLUX.1", "FLUX"),
    "flux-kontext": ("FLUX.1 Kontext", "FLUX"),
    "chroma": ("Chroma", "FLUX"),
    "qwen-image": ("Qwen-Image", "Qwen-Image and Z-Image"),
    "qwen-image-edit": ("Qwen-Image-Edit", "Qwen-Image and Z-Image"),
    "qwen-image-edit-plus": ("Qwen-Image-Edit 2509", "Qwen-Image and Z-Image"),
    "z-image": ("Z-Image", "Qwen-Image and Z-Image"),
    "flux2": ("FLUX.2 dev", "FLUX.2 and Krea 2"),
    "flux2-klein-4b": ("FLUX.2 klein 4B", "FLUX.2 and Krea 2"),
    "flux2-klein-9b": ("FLUX.2 klein 9B", "FLUX.2 and Krea 2"),
    "krea2": ("Krea 2", "FLUX.2 and Krea 2"),
    "aura-flow": ("AuraFlow", "Other image models"),
    "hidream": ("HiDream-I1", "Other image models"),
    "lumina2": ("Lumina Image 2.0", "Other image models"),
    "pixart-alpha": ("PixArt-alpha", "Other image models"),
    "pixart-sigma": ("PixArt-Sigma", "Other image models"),
    "sana": ("Sana 1.6B", "Other image models"),
    "wan-1.3b": ("Wan 2.1 1.3B", "Wan, LTX-Video and HunyuanVideo"),
    "wan-14b": ("Wan 2.1 or 2.2 14B", "Wan, LTX-Video and HunyuanVideo"),
    "wan-14b-i2v": ("Wan I2V 14B", "Wan, LTX-Video and HunyuanVideo"),
    "ltx-video": ("LTX-Video", "Wan, LTX-Video and HunyuanVideo"),
    "hunyuan-video": ("HunyuanVideo", "Wan, LTX-Video and HunyuanVideo"),
    "hunyuan-video-i2v": ("HunyuanVideo I2V", "Wan, LTX-Video and HunyuanVideo"),
    "sdxl-controlnet": ("SDXL ControlNet", "ControlNets"),
    "sd3-controlnet": ("SD3.5 Medium ControlNet", "ControlNets"),
    "flux-controlnet": ("FLUX.1 ControlNet", "ControlNets"),
    "qwen-image-controlnet": ("Qwen-Image ControlNet", "ControlNets"),
}
"""Usual name and group of each family, in the order of the page's list."""


def model_name(family: str) -> str:
    """Return the usual name of a family."""
    return MODEL_NAMES.get(family, (family,))[0]
