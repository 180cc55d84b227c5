"""Precisions by the names that plans give them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from zerotune.errors import InvalidValueError

DTYPES: Final[Mapping[str, torch.dtype]] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def checked_dtype(dtype: str | torch.dtype, *, key: str = "dtype") -> torch.dtype:
    """A dtype of weights by zerotune's name or torch's.

    Args:
        dtype: ``"fp32"``, ``"bf16"``, ``"fp16"`` or a floating-point torch dtype.
        key: What the argument is called, for the message.

    Raises:
        InvalidValueError: Neither.
    """
    chosen = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if chosen is None or not chosen.is_floating_point:
        raise InvalidValueError(
            "is no precision of weights", key=key, value=dtype, fix=f"one of {list(DTYPES)}"
        )
    return chosen
