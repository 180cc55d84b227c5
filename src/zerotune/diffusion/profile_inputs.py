"""Arguments of ``forward`` for diffusers' models, on the ``meta`` device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from zerotune.errors import InvalidValueError

_CLIP_TOKENS: Final = 77
_T5_TOKENS: Final = 256
_FLUX_TOKENS: Final = 512
_LATENT: Final = 8
"""Pixels of the image per pixel of the latent, along each side."""


def example_inputs(module: torch.nn.Module) -> Callable[[int, int, int], Mapping[str, Any]]:
    """A function from batch, height and width in pixels to the arguments of ``forward``.

    Text takes as many tokens as the family's pipelines use at most: 77 for CLIP, 333 for SD3,
    512 for Flux.

    Raises:
        InvalidValueError: A class whose arguments are not known.
    """
    name = type(module).__name__
    if name not in _MAKERS:
        raise InvalidValueError(
            "the arguments of this model's forward are not known",
            key="module",
            value=name,
            fix="pass inputs=, a function from batch, height and width to keyword arguments",
        )
    make, config = _MAKERS[name], module.config
    return lambda batch, height, width: make(config, batch, height, width)


def _empty(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def _times(batch: int) -> torch.Tensor:
    return torch.empty(batch, device="meta")


def _unet(config: Any, batch: int, height: int, width: int) -> dict[str, Any]:
    # An unconditional model of three channels works on pixels, others on latents.
    factor = 1 if config.in_channels == 3 else _LATENT
    arguments: dict[str, Any] = {
        "sample": _empty(batch, config.in_channels, height // factor, width // factor),
        "timestep": _times(batch),
    }
    if config.num_class_embeds:
        arguments["class_labels"] = torch.empty(batch, dtype=torch.long, device="meta")
    return arguments


def _conditional_unet(config: Any, batch: int, height: int, width: int) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "sample": _empty(batch, config.in_channels, height // _LATENT, width // _LATENT),
        "timestep": _times(batch),
        "encoder_hidden_states": _empty(batch, _CLIP_TOKENS, config.cross_attention_dim),
    }
    if config.addition_embed_type == "text_time":
        pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        arguments["added_cond_kwargs"] = {
            "text_embeds": _empty(batch, pooled),
            "time_ids": _empty(batch, 6),
        }
    return arguments


def _sd3(config: Any, batch: int, height: int, width: int) -> dict[str, Any]:
    tokens = _CLIP_TOKENS + _T5_TOKENS
    return {
        "hidden_states": _empty(batch, config.in_channels, height // _LATENT, width // _LATENT),
        "encoder_hidden_states": _empty(batch, tokens, config.joint_attention_dim),
        "pooled_projections": _empty(batch, config.pooled_projection_dim),
        "timestep": _times(batch),
    }


def _flux(config: Any, batch: int, height: int, width: int) -> dict[str, Any]:
    patches = (height // (2 * _LATENT)) * (width // (2 * _LATENT))
    arguments = {
        "hidden_states": _empty(batch, patches, config.in_channels),
        "encoder_hidden_states": _empty(batch, _FLUX_TOKENS, config.joint_attention_dim),
        "pooled_projections": _empty(batch, config.pooled_projection_dim),
        "timestep": _times(batch),
        "img_ids": _empty(patches, 3),
        "txt_ids": _empty(_FLUX_TOKENS, 3),
    }
    if config.guidance_embeds:
        arguments["guidance"] = _times(batch)
    return arguments


_MAKERS: Final[dict[str, Callable[[Any, int, int, int], dict[str, Any]]]] = {
    "UNet2DModel": _unet,
    "UNet2DConditionModel": _conditional_unet,
    "SD3Transformer2DModel": _sd3,
    "FluxTransformer2DModel": _flux,
}
