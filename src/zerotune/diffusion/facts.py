"""Facts of a model: what it weighs and what a training step keeps, on the ``meta`` device.

Nothing is computed and no memory is taken: the model runs on tensors without data, and every
storage is counted from its birth to its death.
"""

from __future__ import annotations

import contextlib
import json
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from unittest import mock

import attrs
import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from zerotune.diffusion.activations import ActivationOffload, Loading, Stored
from zerotune.errors import InvalidValueError
from zerotune.plan.model import ActivationCost, ActivationFacts, ModelFacts

_CLIP_TOKENS: Final = 77
_T5_TOKENS: Final = 256
_FLUX_TOKENS: Final = 512
_LATENT: Final = 8
"""Pixels of the image per pixel of the latent, along each side."""


# -- Arguments of ``forward`` for diffusers' models.


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


# -- Parameters and activations, counted.


MakeInputs = Callable[[int, int, int], Mapping[str, Any]]
"""From batch, height and width in pixels to the keyword arguments of ``forward``."""

_POINTS: Final = ((1, 256), (1, 1024), (4, 256), (2, 1024), (8, 512))
"""Batch and side in pixels of the passes the costs are fitted to."""


def model_facts(
    source: torch.nn.Module | Mapping[str, Any] | str | os.PathLike[str],
    *,
    inputs: MakeInputs | None = None,
    activations: bool = True,
    name: str | None = None,
) -> ModelFacts:
    """Names and shapes of a model's parameters, and the memory its activations take.

    Args:
        source: A module on any device; a diffusers configuration (a mapping with
            ``_class_name``), a ``config.json`` or a folder that holds one. A configuration is
            built on the ``meta`` device, so a 12-billion-parameter model takes a second.
        inputs: Makes the arguments of ``forward`` on the ``meta`` device; known for diffusers'
            U-Nets, SD3 and Flux transformers.
        activations: ``False`` leaves them out, which saves some seconds.
        name: Name in reports; the class by default.

    Raises:
        InvalidValueError: No such class or file, or a model whose inputs are not known.
    """
    if isinstance(source, torch.nn.Module):
        module = source
        if activations and any(p.device.type != "meta" for p in module.parameters()):
            raise InvalidValueError(
                "activations are counted on the meta device",
                key="source",
                value=type(source).__name__,
                fix="pass its configuration (model.config), or activations=False",
            )
    else:
        module = _from_config(_configuration(source))
    facts = attrs.evolve(ModelFacts.from_module(module), name=name or type(module).__name__)
    if not activations:
        return facts
    return attrs.evolve(facts, activations=measure_activations(module, inputs=inputs))


def measure_activations(
    module: torch.nn.Module, *, inputs: MakeInputs | None = None
) -> ActivationFacts:
    """Fit the memory of a training step to passes of several sizes.

    Args:
        module: A module on the ``meta`` device; left in bf16 and without checkpointing.
        inputs: As in ``model_facts``.

    Raises:
        InvalidValueError: The model's inputs are not known.
    """
    make = inputs or example_inputs(module)
    module.to(torch.bfloat16)
    handles = [
        parameter.register_post_accumulate_grad_hook(_drop_gradient)  # type: ignore[no-untyped-call]
        for parameter in module.parameters()
        if parameter.requires_grad
    ]
    try:
        full = _fitted(module, make)
        checkpointed = offloaded = host = None
        if hasattr(module, "enable_gradient_checkpointing"):
            switch: Any = module
            switch.enable_gradient_checkpointing()
            checkpointed = _fitted(module, make)
            switch.disable_gradient_checkpointing()
            offloaded, host = _offloaded(module, make)
    finally:
        for handle in handles:
            handle.remove()
    return ActivationFacts(
        full=full, checkpointed=checkpointed, offloaded=offloaded, offloaded_host=host
    )


def activation_peak(module: torch.nn.Module, arguments: Mapping[str, Any]) -> int:
    """Most bytes alive at a time in one forward and backward pass, parameters not counted.

    Args:
        module: A module on the ``meta`` device, whose gradients are dropped as they appear.
        arguments: Arguments of ``forward``.
    """
    module.train()
    known = [*module.parameters(), *module.buffers()]
    with _flash_attention(), _LiveBytes(known) as live:
        output = module(**arguments)
        sample = output[0] if isinstance(output, tuple) else output.sample
        sample.float().pow(2).mean().backward()
    return int(live.peak)


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages that live, those of ``known`` tensors left out."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = {_key(tensor) for tensor in known}
        self._sizes: dict[int, int] = {}
        self._live = 0
        self.peak = 0

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf)
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        key = _key(tensor)
        if key in self._known or key in self._sizes:
            return
        storage = tensor.untyped_storage()
        self._sizes[key] = storage.nbytes()
        self._live += storage.nbytes()
        self.peak = max(self.peak, self._live)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self._live -= self._sizes.pop(key, 0)


class _CountedTransfers:
    """Copies that exist as shapes only: what is on the host is not seen by ``_LiveBytes``."""

    def __init__(self) -> None:
        self._held = 0
        self.peak = 0

    def store(self, tensor: torch.Tensor) -> Stored:
        with _disable_current_modes():
            host = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"
            )
        self._held += host.nbytes
        self.peak = max(self.peak, self._held)
        return Stored(tensor=host, device=tensor.device)

    def settle(self, stored: Stored) -> None:
        """Nothing is under way."""

    def load(self, stored: Stored) -> Loading:
        source = stored.tensor
        target = torch.empty_strided(
            source.shape, source.stride(), dtype=source.dtype, device="meta"
        )
        return Loading(tensor=target)

    def finish(self, loading: Loading) -> torch.Tensor:
        return loading.tensor

    def release(self, stored: Stored) -> None:
        self._held -= stored.tensor.nbytes


def _offloaded(
    module: torch.nn.Module, make: MakeInputs
) -> tuple[ActivationCost, ActivationCost] | tuple[None, None]:
    """What is left on the device, and what the host takes, when block inputs are offloaded."""
    if not getattr(module, "_supports_gradient_checkpointing", False):
        return None, None
    device, host = [], []
    for batch, side in _POINTS:
        transfers = _CountedTransfers()
        with ActivationOffload(transfers=transfers).attach(module):
            device.append(activation_peak(module, make(batch, side, side)))
        host.append(transfers.peak)
    return _fit(device), _fit(host)


class _FlashAttention(torch.autograd.Function):
    """Attention as fused kernels account for it: the matrix itself is never stored."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        output = torch.empty_like(query)
        log_sum = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)
        ctx.save_for_backward(query, key, value, output, log_sum)
        return output

    @staticmethod
    def backward(ctx: Any, *_gradients: torch.Tensor) -> Any:
        query, key, value, _output, _log_sum = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


@contextlib.contextmanager
def _flash_attention() -> Iterator[None]:
    # On the meta device torch falls back to attention that stores its matrix.
    def attention(query: Any, key: Any, value: Any, *_args: Any, **_kwargs: Any) -> Any:
        return _FlashAttention.apply(query, key, value)  # type: ignore[no-untyped-call]

    with mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", attention):
        yield


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None


def _fitted(module: torch.nn.Module, make: MakeInputs) -> ActivationCost:
    return _fit([activation_peak(module, make(batch, side, side)) for batch, side in _POINTS])


def _fit(peaks: list[int]) -> ActivationCost:
    rows = [[1.0, batch, batch * side * side] for batch, side in _POINTS]
    # Relative errors count, and a linear fit may fall below what was measured; the offset that
    # lifts it above every point is small because the peaks are linear but for block boundaries.
    weights = 1.0 / np.maximum(np.asarray(peaks, dtype=float), 1.0)
    solution, *_ = np.linalg.lstsq(
        np.asarray(rows) * weights[:, None], np.asarray(peaks) * weights, rcond=None
    )
    base, per_sample, per_pixel = (max(0.0, float(value)) for value in solution)
    return ActivationCost(base=base, per_sample=per_sample, per_pixel=per_pixel)


def _configuration(source: Mapping[str, Any] | str | os.PathLike[str]) -> Mapping[str, Any]:
    if isinstance(source, Mapping):
        return source
    path = Path(source)
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise InvalidValueError(
            f"cannot be read as a diffusers configuration: {error}",
            key="source",
            value=str(source),
            fix="pass the folder of a model, its config.json, or a mapping",
        ) from error
    return config if isinstance(config, Mapping) else {}


def _from_config(config: Mapping[str, Any]) -> torch.nn.Module:
    import diffusers

    name = config.get("_class_name")
    kind = getattr(diffusers, name, None) if isinstance(name, str) else None
    if kind is None or not hasattr(kind, "from_config"):
        raise InvalidValueError(
            "is not a model class of diffusers",
            key="_class_name",
            value=name,
            fix='write the class, such as "UNet2DConditionModel"',
        )
    with torch.device("meta"):
        module: torch.nn.Module = kind.from_config(dict(config))
    return module
