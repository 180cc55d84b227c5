"""What a model's adapters are called, and what they were before training.

Adapters are peft's: a layer ``X`` becomes ``X.base_layer`` beside ``X.lora_A.<adapter>``,
``X.lokr_w1.<adapter>`` and the like. Only names are read here; peft itself is not needed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import attrs
import torch

from zerotune._util.text import counted
from zerotune.decisions import Decision
from zerotune.errors import CheckpointMismatchError

_RECORD: Final = "_zerotune_adapters"
_PARAMETER: Final = re.compile(
    r"(?P<layer>.+)\.(?P<kind>lora_A|lora_B|lora_embedding_A|lora_embedding_B"
    r"|lora_magnitude_vector|lokr_w[12](?:_[ab])?|lokr_t2|hada_w[12]_[ab]|hada_t[12]"
    r"|oft_R|oft_embedding_R)\.(?P<adapter>[^.]+)(?P<rest>\.weight|\.bias|)"
)
_EMPTYING: Final = re.compile(r"lora_B|lora_embedding_A|lokr_\w+|hada_\w+|oft_R|oft_embedding_R")
"""Factors of which one that is zero leaves the base as it is."""
BASE: Final = "base_layer"
"""What peft calls the layer that an adapter wraps."""


@attrs.frozen(kw_only=True)
class AdapterParameter:
    """A parameter that belongs to an adapter, told by its name."""

    layer: str
    """Dotted name of the adapted layer, without any prefix of its own."""
    kind: str
    """``lora_A``, ``lora_magnitude_vector``, ``lokr_w1``, ``hada_w1_a``, ``oft_R``, …"""
    adapter: str
    """Name of the adapter."""
    rest: str
    """``.weight``, ``.bias`` or nothing."""

    @classmethod
    def parse(cls, name: str) -> AdapterParameter | None:
        """Read a parameter's name; ``None`` when it belongs to no adapter."""
        match = _PARAMETER.fullmatch(name)
        return None if match is None else cls(**match.groupdict())

    @property
    def key(self) -> str:
        """Its name in a file, as peft writes it: without the adapter's."""
        rest = "" if self.kind == "lora_magnitude_vector" else self.rest
        return f"{self.layer}.{self.kind}{rest}"

    @property
    def empties(self) -> bool:
        """Whether the adapter does nothing while this factor is zero; some begin so."""
        return _EMPTYING.fullmatch(self.kind) is not None and self.rest != ".bias"


@attrs.frozen(kw_only=True)
class AdapterFacts:
    """What was added to a model."""

    name: str
    """The adapter's name in the model."""
    layers: tuple[str, ...]
    """Dotted names of the adapted layers."""
    tensors: int
    """Trained tensors."""
    trained: int
    """Elements of the trained tensors."""
    total: int
    """Elements of the whole model, adapters included."""
    decisions: tuple[Decision, ...] = ()
    """Automatic choices."""
    initial: Mapping[str, frozenset[str]] = attrs.field(factory=dict, repr=False)
    """Fingerprints of each trained tensor before training, also after rounding to 16 bits."""

    @property
    def share(self) -> float:
        """Part of the model that is trained."""
        return self.trained / self.total

    def __str__(self) -> str:
        return (
            f"adapter {self.name!r}: {counted(len(self.layers), 'layer')}, "
            f"{counted(self.tensors, 'tensor')}, "
            f"{self.trained:,} of {self.total:,} elements trained ({self.share:.2%})"
        )


def remember(model: torch.nn.Module, facts: AdapterFacts) -> None:
    """Keep on a model what was added to it."""
    setattr(model, _RECORD, {**getattr(model, _RECORD, {}), facts.name: facts})


def recall(model: torch.nn.Module, adapter: str) -> AdapterFacts | None:
    """What was added to a model; ``None`` when somebody else added the adapter."""
    record: AdapterFacts | None = getattr(model, _RECORD, {}).get(adapter)
    return record


def adapter_config(model: torch.nn.Module, adapter: str) -> dict[str, Any]:
    """Peft's configuration of an adapter, as plain data."""
    config: dict[str, Any] = peft_config(model, adapter).to_dict()
    return config


def peft_config(model: Any, adapter: str) -> Any:
    """Peft's configuration object of an adapter."""
    return model.peft_config[adapter]


def trained_adapter(model: torch.nn.Module) -> str | None:
    """The adapter that a model trains; ``None`` when it trains none.

    Raises:
        CheckpointMismatchError: It trains several.
    """
    found = {
        parsed.adapter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and (parsed := AdapterParameter.parse(name))
    }
    if len(found) > 1:
        raise CheckpointMismatchError(
            "several adapters are trained at once",
            key="adapter",
            value=sorted(found),
            fix="train one; freeze the others",
        )
    return next(iter(found), None)


def starting_points(tensor: torch.Tensor) -> frozenset[str]:
    """Fingerprints of a tensor as it is, and as engines of lower precision round it."""
    rounded = (tensor, tensor.to(torch.bfloat16), tensor.to(torch.float16))
    return frozenset(fingerprint(each) for each in rounded)


def fingerprint(tensor: torch.Tensor) -> str:
    """SHA-256 (hex) of a tensor's elements in fp32."""
    flat = tensor.detach().float().cpu().contiguous().view(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()


def adapter_layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Names and modules of the layers that an adapter wraps."""
    for name, module in model.named_modules():
        if hasattr(module, BASE) and hasattr(module, "adapter_layer_names"):
            yield name, module
