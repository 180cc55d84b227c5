"""What a torch-style optimizer keeps for one of the tensors it updates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from zerotune.errors import EngineError

_OF_ADAM: Final = frozenset({"step", "exp_avg", "exp_avg_sq"})
_BEGIN_AT: Final[Mapping[str, float]] = {"mu_product": 1.0}
"""NAdam's product of momenta (``torch/optim/nadam.py``); whatever else is kept begins at zero."""


class OptimizerStates:
    """States, counters and other things an optimizer keeps for one tensor.

    Everything is looked up when it is asked for: an EMA, which asks for nothing, pays nothing.

    Args:
        optimizer: A ``torch.optim.Optimizer``, DeepSpeed's included; ``None`` for weights that
            nothing optimizes.
        key: The tensor, as the optimizer's groups hold it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None, key: torch.Tensor) -> None:
        self._optimizer = optimizer
        self._key = key
        self._copies: dict[str, torch.Tensor] = {}

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """States with one element per weight, by name; empty before the first step.

        fp32, unless the optimizer keeps them in fewer bits (``AdamWBF16States``). Of a tensor that
        is not contiguous they are copies, which ``write_back`` brings to the optimizer.
        """
        return {
            name: value if value.is_contiguous() else self._copy(name, value)
            for name, value in self._state.items()
            if _is_numbers(name, value) and value.numel() == self._key.numel()
        }

    def write_back(self) -> None:
        """Have the optimizer's states be what was written to their copies."""
        for name, copy in self._copies.items():
            self._state[name].copy_(copy)

    def _copy(self, name: str, value: torch.Tensor) -> torch.Tensor:
        if name not in self._copies:
            self._copies[name] = value.contiguous()
        return self._copies[name]

    @property
    def scalars(self) -> dict[str, float]:
        """Single numbers that accompany the weights, such as NAdam's ``mu_product``."""
        return {
            name: float(value)
            for name, value in self._state.items()
            if _is_tensor(name, value) and value.numel() == 1 != self._key.numel()
        }

    @property
    def others(self) -> tuple[str, ...]:
        """Names of what cannot be divided like the weights, such as Adafactor's row sums."""
        known = {"step", *self.tensors, *self.scalars}
        return tuple(
            name for name, value in self._state.items() if name not in known and value is not None
        )

    @property
    def described_on_nvme(self) -> bool:
        """Whether the other properties hold while DeepSpeed has emptied all tensors.

        It empties counters that are tensors too, and then nothing tells one from a state.
        """
        counted = not isinstance(self._state.get("step"), torch.Tensor)
        return counted and self._state.keys() <= _OF_ADAM and len(self.tensors) in (0, 2)

    @property
    def step(self) -> int | None:
        """Updates counted; ``None`` where the optimizer does not count.

        FusedAdam keeps one counter per group, on the last tensor of the group that had a
        gradient, while all of them are updated together; the largest is the true one.
        """
        if self._optimizer is None:
            return None
        peers: list[torch.Tensor] = [self._key]
        if not self._counts_each:
            for group in self._optimizer.param_groups:
                if any(self._key is other for other in group["params"]):
                    peers = group["params"]
        states = (self._optimizer.state.get(peer, {}) for peer in peers)
        steps = [int(state["step"]) for state in states if "step" in state]
        return max(steps, default=None)

    def create(self, names: tuple[str, ...]) -> None:
        """Make zero-filled states, as the optimizer itself would at its first step."""
        state, dtype = self._writable, getattr(self._optimizer, "state_dtype", None)
        for name in names:
            state.setdefault(name, torch.zeros_like(self._key.data, dtype=dtype))
        state.setdefault("step", self._counter(0))

    def set_step(self, step: int) -> None:
        """Set the counter."""
        state = self._writable
        if isinstance(state.get("step"), torch.Tensor):
            state["step"].fill_(step)
        else:
            state["step"] = self._counter(step)

    def set_scalars(self, scalars: Mapping[str, float]) -> None:
        """Set the single numbers that accompany the weights."""
        state = self._writable
        for name, value in scalars.items():
            if isinstance(state.get(name), torch.Tensor):
                state[name].fill_(value)
            else:
                state[name] = _scalar(value)

    def begin_scalars_anew(self) -> None:
        """Set single numbers to what they are before the first update, where that is not zero."""
        for name in _BEGIN_AT.keys() & self._state.keys():
            self._state[name].fill_(_BEGIN_AT[name])

    @property
    def _state(self) -> Mapping[str, Any]:
        return {} if self._optimizer is None else self._optimizer.state.get(self._key, {})

    @property
    def _writable(self) -> dict[str, Any]:
        if self._optimizer is None:
            raise EngineError(
                "a plain module has no optimizer whose states could be set",
                key="master_weights",
                fix="use the engine's master weights",
            )
        state: dict[str, Any] = self._optimizer.state[self._key]
        return state

    @property
    def _counts_each(self) -> bool:
        return type(self._optimizer).__module__.startswith("torch.optim")

    def _counter(self, step: int) -> Any:
        return _scalar(step) if self._counts_each else step


def _is_tensor(name: str, value: Any) -> bool:
    return isinstance(value, torch.Tensor) and name != "step"


def _is_numbers(name: str, value: Any) -> bool:
    # Codes of low-bit optimizers (uint8, or a class that hides them) have the weights' size too,
    # and mean nothing without the scales of their blocks.
    plain = type(value) in (torch.Tensor, torch.nn.Parameter)
    return _is_tensor(name, value) and plain and value.is_floating_point()


def _scalar(value: float) -> torch.Tensor:
    return torch.tensor(float(value), dtype=torch.float32)
