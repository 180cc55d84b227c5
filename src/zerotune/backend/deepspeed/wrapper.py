"""``OptimizerWrapper``: adapters for the classes in which DeepSpeed wraps an optimizer.

There is one module for each kind of wrapper: ``replicated`` (stage 0), ``partitioned`` (stages 1
and 2) and ``sharded`` (stage 3). DeepSpeed's own step runs in all of them.
"""

from __future__ import annotations

import functools
import importlib
import importlib.resources
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import attrs
import torch

from zerotune.backend.deepspeed.order import UseOrder
from zerotune.backend.master_weights import MasterLayout
from zerotune.decisions import Decision
from zerotune.errors import EngineError


@attrs.frozen(kw_only=True)
class Upstream:
    """Attributes that zerotune uses in one DeepSpeed class."""

    owner: str
    """Dotted name of the class."""
    relied_on: tuple[str, ...] = ()
    """Undocumented attributes that zerotune requires."""

    @property
    def missing(self) -> list[str]:
        """Dotted names of required attributes that DeepSpeed lacks."""
        return [f"{self.owner}.{name}" for name in self.relied_on if not hasattr(self._kind, name)]

    @property
    def _kind(self) -> Any:
        module, _, name = self.owner.rpartition(".")
        return getattr(importlib.import_module(module), name, None)


class OptimizerWrapper(ABC):
    """Adapter for the optimizer of a ``deepspeed.DeepSpeedEngine``; subclasses cover the stages."""

    upstream: ClassVar[tuple[Upstream, ...]] = ()
    """Attributes of DeepSpeed that are used."""
    scaler_name: ClassVar[str] = "loss_scaler"
    """Attribute that contains the loss scaler."""
    skips_overflow: ClassVar[bool] = True
    """Whether DeepSpeed checks that gradients are finite before the step."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.raw: Any = engine.optimizer
        """DeepSpeed's optimizer wrapper."""
        self.layout = self._find_layout()
        """Layout of the master weights."""

    @property
    def inner(self) -> Any:
        """The optimizer inside DeepSpeed's wrapper."""
        return self.raw.optimizer

    @abstractmethod
    def _find_layout(self) -> MasterLayout:
        """Layout of this kind's master weights."""

    @property
    @abstractmethod
    def members(self) -> Sequence[Sequence[torch.Tensor]]:
        """The model's parameters in each group of the inner optimizer."""

    @property
    def devices(self) -> tuple[str, str]:
        """Offload devices of optimizer and parameters: ``"none"``, ``"cpu"`` or ``"nvme"``."""
        return "none", "none"

    @property
    def scaler(self) -> Any:
        """The loss scaler; ``None`` if there is none."""
        return getattr(self.raw, self.scaler_name, None)

    @abstractmethod
    def drop_gradients(self) -> None:
        """Drop the current accumulation window's gradients, including those in persistent buffers.

        DeepSpeed drops gradients in the same way when the loss scale overflows. If the buffers were
        not cleared, a parameter without a gradient in the next window would be updated with the
        dropped gradient.
        """

    @property
    def leaves_frozen(self) -> bool:
        """Whether weights can be frozen for some steps, in which they do not move."""
        return False

    @property
    def loses_earlier_gradients(self) -> bool:
        """Whether a step uses only weights with a gradient from a window's last backward pass."""
        return False

    def begin_backward(self) -> None:  # noqa: B027
        """Prepare for the backward pass of one micro batch."""

    def begin_window(self, without: Sequence[tuple[str, torch.nn.Parameter]]) -> None:  # noqa: B027
        """Handle what got no gradient in the first backward pass of an accumulation window.

        Args:
            without: Names and parameters.
        """

    def compare_order(self, order: UseOrder) -> None:  # noqa: B027
        """Compare the ranks before DeepSpeed sums their gradients or gathers weights.

        Args:
            order: What compares them.
        """

    def correct(self) -> tuple[Decision, ...]:
        """Apply corrections that every DeepSpeed engine needs, also in other trainers."""
        return ()

    def improve(self) -> tuple[Decision, ...]:
        """Apply corrections that only zerotune's own start of DeepSpeed needs."""
        return ()

    def refused(self) -> EngineError | None:
        """Explain why a backward pass raised an ``AssertionError``; ``None`` if unknown."""
        return None

    def note_edits(self) -> None:
        """Notify the layout when master weights are written through DeepSpeed's functions.

        After ``safe_set_full_fp32_param`` and similar calls, the next step updates the model.
        """
        for owner in self._editors:
            for name in ("set_full_hp_param", "set_local_hp_param"):
                if (setter := getattr(owner, name, None)) is not None:
                    # With a bound method of this object, the parameters would keep the engine
                    # alive.
                    setattr(owner, name, functools.partial(_edit, self.layout, setter))

    @property
    def _editors(self) -> Iterable[Any]:
        """Objects with methods that write master weights."""
        return ()


def _edit(layout: MasterLayout, setter: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    layout.edited = True
    return setter(*args, **kwargs)


def clear(tensors: Iterable[Any]) -> None:
    """Zero all tensors in an iterable, ignoring other objects.

    Args:
        tensors: Tensors, ``None`` or other objects.
    """
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            tensor.zero_()
