"""Shapes and activation costs of published models, to estimate memory without loading a model.

``python -m tools.families`` generates the files in this folder from diffusers' model classes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import attrs

from zerotune._util.text import did_you_mean
from zerotune.errors import InvalidValueError
from zerotune.plan.facts import BlockFacts, ModelFacts, ParameterFacts
from zerotune.plan.work import ActivationCost, ActivationFacts, ArithmeticFacts, PassWork

_FOLDER: Final = Path(__file__).parent
_SUFFIX: Final = ".json"


@attrs.frozen(kw_only=True)
class ModelFamily:
    """A published model whose parameters are known by name and shape."""

    name: str
    """``"sdxl"``, ``"sd3-medium"``, ``"flux"`` …"""
    class_name: str
    """Name of the model's class in diffusers."""
    resolution: int
    """Side length of the training images in pixels; for video clips, the side of a square with the
    same area as a frame."""
    facts: ModelFacts
    """Parameters (all trainable) and activation costs."""
    configuration: str
    """Digest of the diffusers configuration, including the defaults of its class."""
    frames: int | None = None
    """Number of frames in each training clip; ``None`` for an image model."""
    frozen_bytes: int = 0
    """Bytes that a ControlNet's frozen base model takes on the device; 0 for other models."""


_STEERED: Final[Mapping[str, str]] = {
    "flux-controlnet": "flux",
    "qwen-image-controlnet": "qwen-image",
    "sd3-controlnet": "sd35-medium",
    "sdxl-controlnet": "sdxl",
}
"""ControlNets and their base models. An estimate counts the base model twice: trained, and frozen
in bf16 on the device."""
_SHARED: Final[Mapping[str, str]] = {
    "hunyuan-video-i2v": "hunyuan-video",
    "qwen-image-edit-plus": "qwen-image-edit",
    "wan-14b-i2v": "wan-14b",
    **_STEERED,
}
"""Families that share the estimate of a different family."""
_HALF: Final = 2


def family_names() -> tuple[str, ...]:
    """Return the names of all families in alphabetical order."""
    names = (entry.name for entry in _FOLDER.iterdir())
    counted = (name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX))
    return tuple(sorted({*counted, *_SHARED}))


@cache
def model_family(name: str) -> ModelFamily:
    """Return the model family called ``name``."""
    entry = _FOLDER / f"{_SHARED.get(name, name)}{_SUFFIX}"
    if name not in family_names():
        close = " or ".join(map(repr, did_you_mean(name, family_names())))
        raise InvalidValueError(
            "is not a known model family",
            f"did you mean {close}?" if close else f"use one of {', '.join(family_names())}",
            "family",
            name,
        )
    data = json.loads(entry.read_text(encoding="utf-8"))
    facts = attrs.evolve(facts_from_json(data), name=name)
    return ModelFamily(
        name=name,
        class_name=data["class"],
        resolution=data["resolution"],
        facts=facts,
        frozen_bytes=_HALF * facts.numel if name in _STEERED else 0,
        configuration=data["configuration"],
        frames=data.get("frames"),
    )


def family_of(configuration: str) -> ModelFamily | None:
    """Return the family whose configuration has this digest, or ``None``."""
    families = (model_family(name) for name in family_names() if name not in _SHARED)
    return next((each for each in families if each.configuration == configuration), None)


def facts_to_json(facts: ModelFacts) -> dict[str, Any]:
    """Return the facts of a fully trainable model as a JSON-serialisable dict."""
    data: dict[str, Any] = {"name": facts.name, "frames_per_latent": facts.frames_per_latent}
    for part in ("activations", "arithmetic"):
        value = getattr(facts, part)
        data[part] = None if value is None else attrs.asdict(value)
    data["blocks"] = [attrs.asdict(block) for block in facts.blocks]
    data["units"] = list(facts.units)
    data["buffers"] = facts.buffers
    data["parameters"] = [[each.name, list(each.shape)] for each in facts.parameters]
    return data


def facts_from_json(data: Mapping[str, Any]) -> ModelFacts:
    """Restore the facts of a model from the output of ``facts_to_json``."""
    costs, work = data["activations"], data["arithmetic"]
    return ModelFacts(
        name=data["name"],
        parameters=[
            ParameterFacts(name=key, shape=tuple(size)) for key, size in data["parameters"]
        ],
        activations=ActivationFacts(
            **{kind: ActivationCost(**cost) for kind, cost in costs.items() if cost is not None}
        ),
        arithmetic=ArithmeticFacts(
            **{kind: PassWork(**one) for kind, one in work.items() if one is not None}
        ),
        blocks=tuple(BlockFacts(**block) for block in data["blocks"]),
        units=tuple(data["units"]),
        frames_per_latent=data.get("frames_per_latent"),
        buffers=data["buffers"],
    )


def frozen_beside(model: object) -> int:
    """Return the bytes of a ControlNet's frozen base model on the device; 0 for other models."""
    known = model_family(model) if isinstance(model, str) else model
    return known.frozen_bytes if isinstance(known, ModelFamily) else 0


def family(name: str) -> ModelFacts:
    """Return the facts of a family's model; all its parameters are trainable.

    Args:
        name: Name of the family, such as ``"sdxl"``.

    Raises:
        InvalidValueError: The family is unknown.
    """
    return model_family(name).facts


def as_facts(
    model: ModelFacts | ModelFamily | str | object,
    *,
    lora: int | None = None,
    base_dtype: str | None = None,
) -> ModelFacts:
    """Convert a model, a family, or the name of a family to ``ModelFacts``.

    Args:
        model: ``ModelFacts``, a module, a family, or the name of a family.
        lora: Rank of LoRA adapters to train instead of the model; ``None`` trains the model.
        base_dtype: Dtype to which the frozen model under the adapters is quantized, such as
            ``"nf4"``.
    """
    facts = _facts_of(model)
    if lora is not None:
        return facts.with_adapters(lora, base_dtype=base_dtype)
    if base_dtype is None:
        return facts
    raise InvalidValueError(
        "a quantized model cannot be trained; only adapters on it can",
        "add adapters, such as lora=16, or omit base_dtype",
        "base_dtype",
        base_dtype,
        shell_fix="add adapters, such as --lora 16, or omit --base-dtype",
    )


def _facts_of(model: ModelFacts | str | object) -> ModelFacts:
    if isinstance(model, ModelFacts):
        return model
    if isinstance(model, ModelFamily):
        return model.facts
    if isinstance(model, str):
        return family(model)
    if hasattr(model, "named_parameters"):
        return ModelFacts.from_module(model)
    raise InvalidValueError(
        "is neither a model nor model facts",
        "pass ModelFacts, a module, or the name of a family such as 'sdxl'; for a diffusers"
        " configuration use zerotune.model_facts",
        "model",
        type(model).__name__,
    )
