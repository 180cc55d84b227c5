"""The state of every random number generator of this process."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch

from zerotune._util.text import json_of
from zerotune.errors import CheckpointCorruptError

PREFIX: Final = "rng/"
"""Tensors of generators are called so in a tensor file."""
TEXT: Final = "rng"
"""Metadata entry that holds what is no array of numbers."""


def capture() -> tuple[dict[str, torch.Tensor], str]:
    """The state of torch's, numpy's and Python's global generators.

    Returns:
        1-D uint8 tensors by name, and a JSON text with the few numbers around them.
    """
    tensors = {"torch_cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        tensors["torch_cuda"] = torch.cuda.get_rng_state()
    # The legacy tuple is what `np.random.seed` and `np.random.rand` use.
    kind, keys, position, has_gauss, cached = np.random.get_state()
    tensors["numpy"] = _as_bytes(np.asarray(keys, dtype="<u4"))
    version, numbers, gauss_next = random.getstate()
    tensors["python"] = _as_bytes(np.asarray(numbers, dtype="<u8"))
    text = {
        "numpy": [kind, int(position), int(has_gauss), float(cached)],
        "python": [version, gauss_next],
    }
    return {PREFIX + name: tensor for name, tensor in tensors.items()}, json.dumps(text)


def restore(tensors: Mapping[str, torch.Tensor], text: str) -> None:
    """Put the generators back to what ``capture`` saw."""
    python, numpy = check(tensors, text)
    torch.set_rng_state(tensors[PREFIX + "torch_cpu"].contiguous())
    random.setstate(python)
    np.random.set_state(numpy)
    if PREFIX + "torch_cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors[PREFIX + "torch_cuda"].contiguous())


def check(tensors: Mapping[str, torch.Tensor], text: str) -> tuple[Any, Any]:
    """The states for Python's and numpy's generators; generators of no use take all of it first."""
    try:
        numbers = json_of(text)
        kind, position, has_gauss, cached = numbers["numpy"]
        version, gauss_next = numbers["python"]
        keys = _as_numbers(tensors[PREFIX + "numpy"], "<u4")
        state = tuple(int(number) for number in _as_numbers(tensors[PREFIX + "python"], "<u8"))
        python = (version, state, None if gauss_next is None else float(gauss_next))
        numpy = (kind, keys, position, has_gauss, cached)
        if type(position) is not int or not 0 <= position <= len(keys):
            raise ValueError(f"a position of {position!r}")
        torch.Generator().set_state(tensors[PREFIX + "torch_cpu"].contiguous())
        random.Random().setstate(python)  # noqa: S311 - nothing is drawn from it
        np.random.RandomState().set_state(numpy)
    except (LookupError, TypeError, ValueError, RuntimeError, ArithmeticError) as error:
        raise CheckpointCorruptError(
            f"the state of the random number generators cannot be restored ({error})", key=TEXT
        ) from error
    return python, numpy


def _as_bytes(numbers: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(numbers.view(np.uint8).copy())


def _as_numbers(tensor: torch.Tensor, dtype: str) -> np.ndarray[Any, Any]:
    numbers: np.ndarray[Any, Any] = np.frombuffer(tensor.contiguous().numpy().tobytes(), dtype)
    return np.array(numbers)
