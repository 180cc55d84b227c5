"""The state of every random number generator of this process."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch

from zerotune._util.text import json_of
from zerotune.backend.accelerator import current_accelerator
from zerotune.errors import CheckpointCorruptError

GENERATOR: Final = "rng/"
"""Name prefix of generator states in a rank's file."""

GENERATOR_TEXT: Final = "rng"
"""Metadata key for generator values that are not tensors."""


def capture_generators() -> tuple[dict[str, torch.Tensor], str]:
    """Capture the state of torch's, numpy's and Python's global generators.

    Returns:
        1-D uint8 tensors by name, and the remaining values as JSON text.
    """
    tensors = {"torch_cpu": torch.get_rng_state()}
    accelerator = current_accelerator()
    if (state := accelerator.random_state()) is not None:
        tensors[f"torch_{accelerator.device.type}"] = state
    # The legacy tuple is what `np.random.seed` and `np.random.rand` use.
    kind, keys, position, has_gauss, cached = np.random.get_state()
    tensors["numpy"] = _generator_bytes(np.asarray(keys, dtype="<u4"))
    version, numbers, gauss_next = random.getstate()
    tensors["python"] = _generator_bytes(np.asarray(numbers, dtype="<u8"))
    text = {
        "numpy": [kind, int(position), int(has_gauss), float(cached)],
        "python": [version, gauss_next],
    }
    return {GENERATOR + name: tensor for name, tensor in tensors.items()}, json.dumps(text)


def restore_generators(tensors: Mapping[str, torch.Tensor], text: str) -> None:
    """Restore a state captured by ``capture_generators``."""
    python, numpy = check_generators(tensors, text)
    torch.set_rng_state(tensors[GENERATOR + "torch_cpu"].contiguous())
    random.setstate(python)
    np.random.set_state(numpy)
    accelerator = current_accelerator()
    state = tensors.get(f"{GENERATOR}torch_{accelerator.device.type}")
    if state is not None and not accelerator.is_host:
        accelerator.restore_random_state(state.contiguous())


def check_generators(tensors: Mapping[str, torch.Tensor], text: str) -> tuple[Any, Any]:
    """Parse the saved states of Python's and numpy's generators, and try them on new generators."""
    try:
        numbers = json_of(text)
        kind, position, has_gauss, cached = numbers["numpy"]
        version, gauss_next = numbers["python"]
        keys = _as_numbers(tensors[GENERATOR + "numpy"], "<u4")
        state = tuple(int(number) for number in _as_numbers(tensors[GENERATOR + "python"], "<u8"))
        python = (version, state, None if gauss_next is None else float(gauss_next))
        numpy = (kind, keys, position, has_gauss, cached)
        if type(position) is not int or not 0 <= position <= len(keys):
            raise ValueError(f"a position of {position!r}")
        torch.Generator().set_state(tensors[GENERATOR + "torch_cpu"].contiguous())
        random.Random().setstate(python)  # noqa: S311 - nothing is drawn from it
        np.random.RandomState().set_state(numpy)
    except (LookupError, TypeError, ValueError, RuntimeError, ArithmeticError) as error:
        raise CheckpointCorruptError(
            f"the state of the random number generators cannot be restored ({error})",
            key=GENERATOR_TEXT,
        ) from error
    return python, numpy


def _generator_bytes(numbers: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(numbers.view(np.uint8).copy())


def _as_numbers(tensor: torch.Tensor, dtype: str) -> np.ndarray[Any, Any]:
    numbers: np.ndarray[Any, Any] = np.frombuffer(tensor.contiguous().numpy().tobytes(), dtype)
    return np.array(numbers)
