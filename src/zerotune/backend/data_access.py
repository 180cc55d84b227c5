"""Notice that other code uses ``parameter.data``, since torch counts no writes through it.

``DataAccess`` replaces the property of ``torch.nn.Parameter`` while an engine is open.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, cast

import torch
from typing_extensions import override

from zerotune.errors import EngineError

_DATA: Final[Any] = torch.Tensor.data
_OWN: Final = ("deepspeed.", "zerotune.")
"""Packages that may use the data of weights."""
_READS: Final = ("__iter__", "__int__", "__index__", "__invert__", "requires_grad_")
"""Functions with a name like those that write."""


class DataAccess:
    """Uses of ``parameter.data`` by other code.

    Args:
        weights: Names and weights of the model.
    """

    _open: Final[weakref.WeakSet[DataAccess]] = weakref.WeakSet()

    def __init__(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        named = ((name, each) for name, each in weights if isinstance(each, torch.nn.Parameter))
        self._weights = dict(named)
        self._names = {id(each): name for name, each in self._weights.items()}
        self._used = set[str]()
        self._before: dict[str, Any] = {}
        if self._names:
            self._open.add(self)
            torch.nn.Parameter.data = property(_get, _set)  # type: ignore[assignment]

    def close(self) -> None:
        """Notice nothing more. Repeatable."""
        self._open.discard(self)
        if not self._open and "data" in vars(torch.nn.Parameter):
            del torch.nn.Parameter.data

    @classmethod
    def of(cls, weight: torch.Tensor) -> Iterator[tuple[DataAccess, str]]:
        """Yield the open objects that know a weight, each with its name there."""
        for each in tuple(cls._open):
            if (name := each._names.get(id(weight))) is not None:
                yield each, name

    def note_use(self, name: str, *, replaced: bool = False) -> None:
        """Record that other code has a weight's data, and may write it, or is to replace it."""
        self._used.add(name)
        if replaced:
            self._before.setdefault(name, _place(self._weights[name]))

    def take_used(self) -> set[str]:
        """Return the names of weights whose data other code has used since the last call."""
        used, self._used = self._used, set()
        return used

    def replaced(self) -> str | None:
        """Return the name of a weight that has other data than before; ``None`` if none has."""
        for name in tuple(self._before):
            if not self.is_back(name):
                return name
        return None

    def is_back(self, name: str) -> bool:
        """Return whether a weight has the data that it had before, which is then forgotten."""
        same: bool = _place(self._weights[name]) == self._before[name]
        if same:
            del self._before[name]
        return same


def _place(weight: torch.Tensor) -> Any:
    data = _DATA.__get__(weight)
    return data.data_ptr(), data.dtype, data.device, data.shape, data.stride()


def _get(parameter: torch.Tensor) -> torch.Tensor:
    data: torch.Tensor = _DATA.__get__(parameter)
    user = sys._getframe(1).f_globals.get("__name__", "")
    if not user.startswith(_OWN):
        for access, name in DataAccess.of(parameter):
            if not _is_partitioned(parameter):
                access.note_use(name)
            elif not user.startswith("torch."):
                data = data.as_subclass(PartitionedData)
                cast(Any, data).weight = name
    return data


def _set(parameter: torch.Tensor, data: torch.Tensor) -> None:
    noted: list[tuple[DataAccess, str]] = []
    user = sys._getframe(1).f_globals.get("__name__", "")
    if not user.startswith(_OWN):
        for access, name in DataAccess.of(parameter):
            if _is_partitioned(parameter):
                # What ``module.to`` and the like leave as it is can be set.
                same = isinstance(data, PartitionedData) or user.startswith("torch.")
                if not same or _place(data) != _place(parameter):
                    raise _without_effect(name, "other data")
            access.note_use(name, replaced=True)
            noted.append((access, name))
    _DATA.__set__(parameter, data)
    for access, name in noted:
        # DeepSpeed may move what was put back.
        access.is_back(name)


def _is_partitioned(parameter: torch.Tensor) -> bool:
    return hasattr(parameter, "ds_numel") and not parameter.numel()


def _without_effect(name: str, value: str) -> EngineError:
    return EngineError(
        "ZeRO-3 has partitioned this weight, so its data is empty, and the write would have no "
        "effect",
        "write weights through engine.master_weights.editing(), or before the engine starts",
        f"model.{name}.data",
        value,
    )


class PartitionedData(torch.Tensor):
    """The data of a weight that is partitioned: empty, so that a write would have no effect."""

    @classmethod
    @override
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        writes = name.startswith("__i") or name == "__setitem__"
        writes |= name.endswith("_") and not name.endswith("__")
        if (writes and name not in _READS) or "out" in kwargs:
            weights = (getattr(each, "weight", None) for each in (*args, *kwargs.values()))
            raise _without_effect(next(filter(None, weights), "*"), name)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
