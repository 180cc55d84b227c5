"""One layer's adapter folded into its weight, by peft's own arithmetic."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Mapping
from typing import Any, Final

import attrs
import torch

from zerotune.errors import CheckpointMismatchError, MissingDependencyError

_CONVOLUTIONS: Final = {3: torch.nn.Conv1d, 4: torch.nn.Conv2d, 5: torch.nn.Conv3d}


@attrs.frozen(kw_only=True, eq=False)
class Fold:
    """The adapter of one layer.

    Called with the layer's weight, in any precision, it gives the folded weight in fp32.
    """

    layer: str
    """Dotted name of the adapted layer."""
    scaling: float = 1.0
    """What the product of the factors is multiplied by."""
    tensors: dict[str, torch.Tensor] = attrs.field(factory=dict)
    """fp32 on the CPU, by kind: ``lora_A``, ``lora_B``, ``lora_magnitude_vector``, …"""

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        """Fold.

        Raises:
            CheckpointMismatchError: The shapes do not fit, or the result is not finite.
            MissingDependencyError: peft is not installed.
        """
        plain = weight.detach().to("cpu", torch.float32)
        try:
            wrapped = self._wrapped(plain)
            wrapped.merge(safe_merge=True)
        except (RuntimeError, ValueError, KeyError) as error:
            raise CheckpointMismatchError(
                f"its adapter does not fit ({error})", key=self.layer, value=tuple(weight.shape)
            ) from error
        merged: torch.Tensor = wrapped.get_base_layer().weight.detach()
        return merged

    @property
    def rank(self) -> int:
        """Inner size of the factors."""
        embedding = "lora_embedding_A" in self.tensors
        return int(self.tensors["lora_embedding_A" if embedding else "lora_A"].shape[0])

    def scaling_of(self, settings: Mapping[str, Any]) -> float:
        """The scale that a file's settings mean for this layer; alpha is the rank without any."""
        alpha = float(settings.get("lora_alpha", self.rank))
        for pattern, value in settings.get("alpha_pattern", {}).items():
            if re.fullmatch(rf"(.*\.)?({pattern})", self.layer):
                alpha = float(value)
                break
        root = settings.get("use_rslora", False)
        return alpha / (math.sqrt(self.rank) if root else self.rank)

    def _wrapped(self, weight: torch.Tensor) -> Any:
        peft = _peft()
        holder = torch.nn.Sequential(
            _layer_like(weight, embedding="lora_embedding_A" in self.tensors)
        )
        config = peft.LoraConfig(
            r=self.rank,
            # peft divides by the rank.
            lora_alpha=self.scaling * self.rank,
            target_modules=["0"],
            use_dora="lora_magnitude_vector" in self.tensors,
            lora_bias=False,
        )
        peft.inject_adapter_in_model(config, holder, adapter_name="fold")
        parameters = dict(holder.named_parameters())
        for kind, tensor in self.tensors.items():
            names = [name for name in parameters if f".{kind}.fold" in name]
            if len(names) != 1:
                raise KeyError(kind)
            with torch.no_grad():
                parameters[names[0]].copy_(tensor.reshape(parameters[names[0]].shape))
        return holder[0]


def _layer_like(weight: torch.Tensor, *, embedding: bool) -> torch.nn.Module:
    layer: torch.nn.Module
    if embedding:
        layer = torch.nn.Embedding(weight.shape[0], weight.shape[1], device="meta")
    elif weight.ndim == 2:
        layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    else:
        kind: Any = _CONVOLUTIONS[weight.ndim]
        layer = kind(weight.shape[1], weight.shape[0], weight.shape[2:], bias=False, device="meta")
    layer.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
    return layer


def _peft() -> Any:
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        raise MissingDependencyError(
            f"is needed to fold adapters and could not be imported ({error})",
            key="peft",
            fix="pip install 'zerotune[lora]'",
        ) from error
