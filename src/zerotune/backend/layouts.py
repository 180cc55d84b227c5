"""Where engines that partition nothing keep their master weights, and what all layouts share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from typing_extensions import override

from zerotune.backend.master_weights import (
    Follower,
    FragmentAddress,
    MasterLayout,
    OptimizerStates,
    Slab,
)
from zerotune.errors import EngineError

Named = list[tuple[str, torch.nn.Parameter]]


def trainable_parameters(module: torch.nn.Module) -> Named:
    """Names and parameters that require a gradient and have elements; a tied one counts once."""
    return [
        (name, p)
        for name, p in module.named_parameters()
        # DeepSpeed leaves one without elements out of its groups: there is nothing to train.
        if p.requires_grad and math.prod(full_shape(p)) > 0
    ]


def require_trainable(module: torch.nn.Module) -> Named:
    """The trainable parameters of a model; there must be some."""
    named = trainable_parameters(module)
    if not named:
        raise EngineError("no parameter requires a gradient", key="model", fix="unfreeze some")
    return named


def gradient_norm(parameters: Iterable[torch.nn.Parameter]) -> torch.Tensor:
    """L2 norm of the gradients of whole parameters; as clipping computes it, which alters them."""
    return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


def full_shape(parameter: torch.nn.Parameter) -> tuple[int, ...]:
    """Shape before ZeRO-3 partitioned it."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


class ResidentLayout(MasterLayout):
    """Slabs that always lie in memory: all engines but ZeRO-3 with NVMe.

    Args:
        optimizer: What steps them.
        slabs: fp32. One that is not contiguous, as in channels_last, is read and written through
            copies, since its fragments are numbered as if it were.
        addresses: As for ``MasterLayout``.
        order: As for ``MasterLayout``.
    """

    def __init__(
        self,
        *,
        optimizer: torch.optim.Optimizer | None,
        slabs: list[torch.Tensor],
        addresses: tuple[FragmentAddress, ...],
        order: tuple[tuple[str, tuple[int, ...]], ...],
    ) -> None:
        super().__init__(addresses=addresses, order=order)
        self._optimizer = optimizer
        self._slabs = slabs
        for address in addresses:
            check_master(slabs[address.slab], address.name)

    @property
    @override
    def optimizer(self) -> torch.optim.Optimizer | None:
        return self._optimizer

    @property
    @override
    def tensors(self) -> Sequence[torch.Tensor]:
        return self._slabs

    @override
    @contextmanager
    def reading(self, slab: int) -> Iterator[Slab]:
        key = self._slabs[slab]
        states = OptimizerStates(self._optimizer, key)
        yield Slab(value=key.data.contiguous(), states=states)

    @override
    @contextmanager
    def writing(self, slab: int) -> Iterator[Slab]:
        key = self._slabs[slab]
        with self.reading(slab) as resident:
            try:
                yield resident
            finally:
                if not key.is_contiguous():
                    key.data.copy_(resident.value)
                    resident.states.write_back()

    @override
    def refresh(self) -> None:
        """The parameters are the master weights."""


UNDER_WAY: Final = "zerotune_step"
"""Attribute of a ZeRO wrapper or an optimizer: what may leave a step under way, with ``settle`` and
``follow``."""


class SteppedLayout(MasterLayout):
    """Of a ZeRO wrapper, or an optimizer, whose steps may be under way when they return."""

    _wrapper: Any

    @override
    def settle(self) -> None:
        stepping = getattr(self._wrapper, UNDER_WAY, None)
        if stepping is not None:
            stepping.settle()

    @override
    def follow(self, followers: Sequence[Follower]) -> bool:
        stepping = getattr(self._wrapper, UNDER_WAY, None)
        return stepping is not None and bool(stepping.follow(followers))


class ParameterLayout(SteppedLayout, ResidentLayout):
    """The parameters are the master weights: the plain engine, and stage 0 in fp32.

    Without an optimizer: a module nobody trains through an engine.

    Args:
        module: The model.
        optimizer: What steps the master weights.
        masters: Where these are not the parameters themselves: one for each of them.
    """

    replicated = True

    def __init__(
        self,
        *,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        masters: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self._wrapper = optimizer
        named = trainable_parameters(module)
        self._pairs = list(zip(masters or (), (p for _, p in named), strict=masters is not None))
        super().__init__(
            optimizer=optimizer,
            slabs=[parameter for _, parameter in named] if masters is None else list(masters),
            addresses=tuple(
                whole(name, parameter, slab=index, offset=0)
                for index, (name, parameter) in enumerate(named)
            ),
            order=tuple((name, tuple(parameter.shape)) for name, parameter in named),
        )

    @override
    def in_model(self, address: FragmentAddress) -> torch.Tensor | None:
        return self._pairs[address.slab][1].data.reshape(-1) if self._pairs else None

    @override
    def refresh(self) -> None:
        for master, parameter in self._pairs:
            parameter.data.copy_(master.data)


def whole(name: str, parameter: torch.nn.Parameter, *, slab: int, offset: int) -> FragmentAddress:
    """The address of a parameter that one rank holds whole."""
    return FragmentAddress(
        name=name,
        shape=tuple(parameter.shape),
        start=0,
        numel=parameter.numel(),
        slab=slab,
        offset=offset,
    )


def check_master(tensor: torch.Tensor, name: str) -> None:
    """Refuse a slab that is not fp32."""
    if tensor.dtype != torch.float32:
        raise EngineError(
            "master weights are fp32",
            key=name,
            value=str(tensor.dtype),
            fix="load the model in float32; the plan's precision decides what the forward uses",
        )
