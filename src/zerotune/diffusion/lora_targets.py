"""Which layers of a model adapters can go to, and what was meant when a name matches none."""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Final

import torch

from zerotune.errors import InvalidValueError, MissingDependencyError

ATTENTION: Final = (
    "to_q",
    "to_k",
    "to_v",
    "to_out.0",
    "add_q_proj",
    "add_k_proj",
    "add_v_proj",
    "to_add_out",
    "q_proj",
    "k_proj",
    "v_proj",
    "out_proj",
    "SelfAttention.q",
    "SelfAttention.k",
    "SelfAttention.v",
    "SelfAttention.o",
)
"""What the attention projections of diffusers' models, CLIP and T5 are called."""
_ADAPTABLE: Final = (
    torch.nn.Linear,
    torch.nn.Conv1d,
    torch.nn.Conv2d,
    torch.nn.Conv3d,
    torch.nn.Embedding,
)
_CLOSE: Final = 3


def peft() -> ModuleType:
    """The package.

    Raises:
        MissingDependencyError: It is not installed.
    """
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        raise MissingDependencyError(
            f"is needed for LoRA and could not be imported ({error})",
            key="peft",
            fix="pip install 'zerotune[lora]'",
        ) from error


def default_targets(model: torch.nn.Module) -> tuple[str, ...]:
    """The attention projections a model has.

    Raises:
        InvalidValueError: It has none.
    """
    names = list(_layers(model))
    found = tuple(target for target in ATTENTION if _matches(target, names))
    if not found:
        raise InvalidValueError(
            f"{type(model).__name__} has no attention projections that are known",
            key="LoRA.targets",
            value=None,
            fix=f"name the layers to adapt, such as {_endings(names)[:_CLOSE]}",
        )
    return found


def require_matches(
    model: torch.nn.Module,
    targets: tuple[str, ...] | str,
    *,
    key: str,
    written: str | None = None,
) -> None:
    """Check that each of some targets matches a layer that can be adapted.

    Args:
        model: The model.
        targets: Ends of names, or one regular expression for whole names.
        key: What they are, for messages.
        written: How the user wrote the expression.

    Raises:
        InvalidValueError: One matches nothing.
    """
    names = list(_layers(model))
    if isinstance(targets, str):
        pattern = regular_expression(targets, key=key)
        if not any(pattern_matches(pattern, name) for name in names):
            raise _no_match(key, written or targets, names)
        return
    for target in targets:
        if not _matches(target, names):
            raise _no_match(key, target, names)


def regular_expression(text: str, *, key: str) -> str:
    """A regular expression that compiles.

    Raises:
        InvalidValueError: It does not.
    """
    try:
        re.compile(text)
    except re.error as error:
        raise InvalidValueError(
            f"is no regular expression ({error})", key=key, value=text
        ) from error
    return text


def pattern_matches(pattern: str, name: str) -> bool:
    """Whether a pattern matches a whole name."""
    return re.fullmatch(pattern, name) is not None


def _layers(model: torch.nn.Module) -> Iterator[str]:
    return (name for name, module in model.named_modules() if isinstance(module, _ADAPTABLE))


def _matches(target: str, names: list[str]) -> bool:
    return any(name == target or name.endswith(f".{target}") for name in names)


def _endings(names: list[str]) -> list[str]:
    """Ends of names that mean a kind of layer: the last part, or two where that is a number."""
    found: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        found[".".join(parts[-2:] if parts[-1].isdigit() else parts[-1:])] = None
    return list(found)


def _no_match(key: str, target: str, names: list[str]) -> InvalidValueError:
    endings = _endings(names)
    close = difflib.get_close_matches(target, endings, n=_CLOSE, cutoff=0.5)
    known = f"did you mean {' or '.join(map(repr, close))}?" if close else f"there are {endings}"
    return InvalidValueError(
        "matches no layer that can be adapted", key=key, value=target, fix=known
    )
