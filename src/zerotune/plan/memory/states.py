"""How many fp32 numbers each optimizer keeps per parameter element, for the memory model.

``zerotune.optim`` describes optimizers in full; a test holds the two together.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

_Params = Mapping[str, Any]


def _sgd(params: _Params) -> float:
    return 1.0 if params.get("momentum") else 0.0


def _adam(params: _Params) -> float:
    return 3.0 if params.get("amsgrad") else 2.0


def _rmsprop(params: _Params) -> float:
    return 1.0 + bool(params.get("momentum")) + bool(params.get("centered"))


_STATES: Final[dict[str, float | Callable[[_Params], float]]] = {
    "adam": _adam,
    "adamw": _adam,
    "adamax": 2.0,
    "nadam": 2.0,
    "radam": 2.0,
    "sparseadam": 2.0,
    "adadelta": 2.0,
    "adagrad": 1.0,
    "adafactor": 0.01,
    "asgd": 1.0,
    "rmsprop": _rmsprop,
    "rprop": 2.0,
    "sgd": _sgd,
    "lion": 1.0,
    "lamb": 2.0,
    "muadam": 2.0,
    "muadamw": 2.0,
    "musgd": _sgd,
    # One moment for matrices, two for what Muon leaves to Adam; the larger stands for both.
    "muon": 2.0,
    # Two moments and the error of what was sent compressed, to the worker and to the server.
    "onebitadam": 4.0,
    "onebitlamb": 4.0,
    "zerooneadam": 4.0,
    "prodigy": 4.0,
    "adamwbf16states": 1.0,
    "adamw8bit": 0.52,
    # Only tensors of whole blocks are stored in few bits; a ZeRO partition rarely is one.
    "torchaoadamw8bit": 2.0,
    "torchaoadamw4bit": 2.0,
    "torchaoadamwfp8": 2.0,
    "adamwschedulefree": 2.0,
    "sgdschedulefree": 1.0,
}
UNKNOWN: Final = 2.0
"""What an optimizer is taken to keep that is not in the table, as Adam does."""


def states_per_element(name: str | None, params: Mapping[str, Any] | None = None) -> float:
    """fp32 numbers per parameter element (4 bytes each) that an optimizer keeps.

    Args:
        name: Optimizer as written; case, blanks and underscores do not matter.
        params: Its arguments; momentum and AMSGrad need more.
    """
    entry = _STATES.get(re.sub(r"[^a-z0-9]", "", (name or "adamw").lower()), UNKNOWN)
    return entry(params or {}) if callable(entry) else entry


def is_known(name: str) -> bool:
    """Whether the table has the optimizer."""
    return re.sub(r"[^a-z0-9]", "", name.lower()) in _STATES
