"""``Awaited``: tensors whose uses wait until an optimizer step has updated them.

Until a tensor is updated, it is empty and has a class that intercepts every use through torch. Code
that bypasses torch finds the tensor empty and fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, Final, Protocol, cast

import attrs
import torch
from torch.autograd.graph import get_gradient_edge


class Steps(Protocol):
    """An object that updates held tensors."""

    def wait_for(self, tensor: Any) -> None:
        """Wait until a tensor is updated, and make the tensor usable.

        Args:
            tensor: A tensor that was passed to ``hold``.
        """
        ...


@attrs.frozen(kw_only=True, eq=False)
class Held:
    """Class, content and gradient edge of a held tensor, to be restored on release."""

    step: Steps
    name: str
    kind: type
    content: torch.Tensor
    edge: Any
    """Gradient edge; created before the tensor is emptied, because it records the shape."""
    empty: torch.Tensor

    @classmethod
    def of(cls, tensor: Any, *, name: str, step: Steps) -> Held:
        """Describe a tensor that is not held."""
        edge = get_gradient_edge(tensor) if tensor.requires_grad else None
        content = tensor.data
        return cls(
            step=step,
            name=name,
            kind=type(tensor),
            content=content,
            edge=edge,
            empty=content.new_empty(0),
        )

    def describes(self, tensor: Any) -> bool:
        """Return whether nobody has replaced a tensor's memory since it was described.

        Args:
            tensor: The tensor.
        """
        content = self.content
        return (
            tensor.data_ptr() == content.data_ptr()
            and tensor.shape == content.shape
            and tensor.requires_grad == (self.edge is not None)
            and type(tensor) is self.kind
        )


class Awaited:
    """Mixin for the class of a tensor whose uses must wait for its update."""

    _awaited: Held

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Wait for the tensors that are used, unless only shape, dtype or gradient are read."""
        if func in BESIDE_THE_CONTENT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func in OF_THE_SHAPE and (held := vars(args[0]).get("_awaited")) is not None:
            return func(held.content, *args[1:], **(kwargs or {}))
        for tensor in _awaited_among((args, kwargs)):
            wait_for(tensor)
        return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        wait_for(self)
        return cast(Any, self).__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        wait_for(self)
        return cast(Any, self).__reduce_ex__(protocol)


def hold(tensor: Any, *, name: str, step: Steps, before: Held | None = None) -> Held:
    """Empty a tensor, and make every use of the tensor wait until it is released.

    Args:
        tensor: The tensor; ``release`` restores its memory.
        name: Name of the parameter that the tensor belongs to.
        step: The step that updates the tensor.
        before: Result of the last call for the tensor, which saves time.
    """
    if before is None or not before.describes(tensor):
        before = Held.of(tensor, name=name, step=step)
    tensor._awaited = before
    tensor.data = before.empty
    tensor.__class__ = awaited(before.kind)
    return before


def release(tensor: Any) -> None:
    """Restore a held tensor's memory and class."""
    held = tensor._awaited
    # In this order, since other threads may use it meanwhile.
    tensor.data = held.content
    tensor.__class__ = held.kind
    del tensor._awaited


def wait_for(tensor: Any) -> None:
    """Wait until a tensor is updated; return at once if the tensor is not held."""
    held: Held | None
    # A different step may have begun by the time this step's lock is free.
    while (held := vars(tensor).get("_awaited")) is not None:
        held.step.wait_for(tensor)


@cache
def awaited(kind: type) -> type:
    """Return the subclass of the tensor class ``kind`` that is used for held tensors."""
    return type(f"Awaited{kind.__name__}", (Awaited, kind), {})


def _awaited_among(value: Any) -> Iterator[Any]:
    if isinstance(value, Awaited):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _awaited_among(each)
    elif isinstance(value, Mapping):
        yield from _awaited_among(list(value.values()))


def _getters(*names: str) -> list[Any]:
    return [getattr(torch.Tensor, name).__get__ for name in names]


_GRADIENT: Final[Any] = torch.Tensor.grad
OF_THE_SHAPE: Final = frozenset(
    (
        *_getters("shape", "ndim", "itemsize", "nbytes"),
        torch.Tensor.size,
        torch.Tensor.numel,
        torch.Tensor.nelement,
        torch.Tensor.dim,
        torch.Tensor.ndimension,
        torch.Tensor.stride,
        torch.Tensor.is_contiguous,
        torch.Tensor.__len__,
    )
)
BESIDE_THE_CONTENT: Final = frozenset(
    (
        *_getters("grad", "requires_grad", "is_leaf", "grad_fn", "dtype", "device", "layout"),
        *_getters("is_cuda", "is_cpu", "is_meta", "is_sparse"),
        _GRADIENT.__set__,
        _GRADIENT.__delete__,
        torch.Tensor.is_floating_point,
        torch.Tensor.is_complex,
        torch.Tensor.element_size,
        torch.Tensor.__hash__,
    )
)
