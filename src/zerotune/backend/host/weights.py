"""``StreamedWeight``: a parameter whose values are on the device only during calls of its unit.

Inside a call of its unit, the parameter behaves normally. Outside such calls, for example in
another unit's hook or in another thread, every use gets the newest weights from host memory.
``detach``, ``data`` and ``state_dict`` return views of the weights in host memory; all other uses
get a copy on the device, through which gradients flow back. No use can read stale values or another
unit's memory.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, cast

import attrs
import torch

from zerotune.backend.host.units import wrap_again
from zerotune.backend.step.awaited import BESIDE_THE_CONTENT, OF_THE_SHAPE, Awaited
from zerotune.errors import EngineError
from zerotune.plan.facts import inner_tensors, is_wrapper

if TYPE_CHECKING:
    from zerotune.backend.host.units import Member, Unit


@attrs.frozen(kw_only=True, eq=False)
class Home:
    """Unit and original class of a streamed parameter."""

    unit: Unit
    member: Member
    kind: Any
    """The parameter's original class."""
    inside: Inside
    """Registry of the unit calls in progress in each thread."""

    def weights(self) -> torch.Tensor:
        """Wait for the unit's last update, and return the weights in host memory.

        Raises:
            BaseException: The update has failed.
        """
        self.unit.wait_until_written()
        return self.member.within(self.unit.host)


class StreamedWeight:
    """Mixin for the class of a streamed parameter."""

    _home: Home

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Outside the unit's calls, use the weights in host memory."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _WITHOUT_VALUES or (_are_here(args) and _are_here(kwargs.values())):
                if func == _SET_DATA and isinstance(args[0], StreamedWeight):
                    args = args[0], _assigned(*args)
                return func(*args, **kwargs)
            if func == _SET_DATA:
                return _refuse_other(args[0], args[1])
            if func in _MOVES and (kept := _stays(func, args, kwargs)) is not None:
                return kept
            if func is _REPR:
                return func(_copied(args[0]), *args[1:], **kwargs)
            if func == _DATA:
                # A write through the result must count as a write to the host's weights.
                return _home(args[0]).weights().detach()
            if func in _VIEWS:
                return func(_home(args[0]).weights(), *args[1:], **kwargs)
            return _use(func, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            # Register the copy before its attributes are copied: a quantized weight refers to its
            # module.
            copied = memo[id(self)] = _copied(self)
            vars(copied).update(copy.deepcopy(_beside(self), memo))
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        copied = _copied(self)
        vars(copied).update(_beside(self))
        return copied.__reduce_ex__(protocol)


def stream_weight(unit: Unit, member: Member, inside: Inside) -> None:
    """Make a parameter use the weights in host memory, except inside calls of its unit.

    Args:
        unit: The parameter's unit.
        member: The parameter.
        inside: Registry of the unit calls in progress in each thread.
    """
    parameter: Any = member.parameter
    parameter._home = Home(unit=unit, member=member, kind=type(parameter), inside=inside)
    parameter.__class__ = _streamed(parameter._home.kind)


def release_weight(member: Member) -> None:
    """Restore the original class of a streamed parameter.

    Args:
        member: The parameter.
    """
    parameter: Any = member.parameter
    parameter.__class__ = parameter._home.kind
    del parameter._home


def is_in_place(unit: Unit, member: Member) -> bool:
    """Return whether a parameter still belongs to its unit; one that waits for an upload does.

    Args:
        unit: The unit.
        member: The parameter.
    """
    parameter: Any = member.parameter
    if not unit.resident:
        return isinstance(parameter, StreamedWeight)
    if isinstance(parameter, Awaited):
        return True
    storage = parameter.untyped_storage()._cdata, unit.flat.untyped_storage()._cdata
    is_there = storage[0] == storage[1] and parameter.storage_offset() == member.span.start
    # A transposed weight has gradients in another order than its master weights.
    return bool(is_there and parameter.is_contiguous())


@cache
def _streamed(kind: type) -> type:
    return type(f"Streamed{kind.__name__}", (StreamedWeight, kind), {})


def _home(parameter: Any) -> Home:
    return cast(Home, vars(parameter)["_home"])


def _copied(parameter: Any) -> Any:
    home = _home(parameter)
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        values = home.weights().to(parameter.device, copy=True)
        return cast(Any, torch.Tensor)._make_subclass(home.kind, values, parameter.requires_grad)


def _beside(parameter: Any) -> dict[str, Any]:
    """Attributes besides the values, such as the quantization state."""
    return {name: value for name, value in vars(parameter).items() if name != "_home"}


class _Use(torch.autograd.Function):
    """Copy a streamed parameter's weights to its device, with gradients for the parameter."""

    @staticmethod
    def forward(_ctx: Any, parameter: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return weights.to(parameter.device, copy=True)

    @staticmethod
    def backward(_ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


def _use(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    used: dict[int, tuple[Home, torch.Tensor, int]] = {}

    def stand_in(parameter: Any) -> Any:
        if _is_here(parameter):
            return parameter
        if id(parameter) not in used:
            home = _home(parameter)
            weights = home.weights()
            if torch.is_grad_enabled() and parameter.requires_grad:
                weights = cast(Any, _Use).apply(parameter, weights)
            elif weights.device != parameter.device:
                weights = weights.to(parameter.device, copy=True)
            used[id(parameter)] = home, weights, weights._version
        return used[id(parameter)][1]

    result = func(*_replaced(args, stand_in), **_replaced(kwargs, stand_in))
    for home, weights, version in used.values():
        if weights._version != version:
            _write_back(home, weights)
            if result is weights:
                return home.member.parameter
    return result


def _write_back(home: Home, weights: torch.Tensor) -> None:
    """Copy weights that were changed in place back to host memory, unless they are a view."""
    own = home.member.within(home.unit.host)
    if weights.data_ptr() != own.data_ptr():
        with torch.no_grad():
            own.copy_(weights)


def _is_here(parameter: Any) -> bool:
    """Whether the current thread is in a call of the parameter's unit."""
    home = _home(parameter)
    return home.inside.has(home.unit)


def _are_here(values: Iterable[Any]) -> bool:
    """Whether ``_is_here`` holds for all streamed weights. Runs for every operator of a call."""
    for value in values:
        if isinstance(value, StreamedWeight):
            if not _is_here(value):
                return False
        elif isinstance(value, (tuple, list)):
            if not _are_here(value):
                return False
        elif isinstance(value, dict) and not _are_here(value.values()):
            return False
    return True


def _replaced(value: Any, stand_in: Callable[[Any], torch.Tensor]) -> Any:
    if isinstance(value, StreamedWeight):
        return stand_in(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_replaced(each, stand_in) for each in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_replaced(each, stand_in) for each in value)
    if isinstance(value, Mapping):
        return {name: _replaced(each, stand_in) for name, each in value.items()}
    return value


def _stays(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The parameter itself if a move to a device and dtype would not change it, else ``None``."""
    parameter = args[0]
    probe = torch.empty([2] * parameter.dim(), dtype=parameter.dtype, device=parameter.device)
    moved = func(probe, *args[1:], **kwargs)
    same = (moved.dtype, moved.device) == (probe.dtype, probe.device)
    same = same and moved.is_contiguous() and not kwargs.get("copy")
    return parameter if same else None


def _assigned(parameter: Any, values: torch.Tensor) -> torch.Tensor:
    """The values that a call of the unit assigns, or the unit's memory if they end a cast.

    diffusers' layerwise casting makes a weight wider for its layer's forward pass and narrow again
    afterwards, which does not change the weight.
    """
    unit, member = _home(parameter).unit, _home(parameter).member
    is_cast_back = values.dtype == member.dtype != parameter.dtype
    return member.within(unit.flat) if is_cast_back else values


def _refuse_other(parameter: Any, values: torch.Tensor) -> None:
    own = _home(parameter).weights()
    if values is parameter or (
        values.data_ptr() == own.data_ptr()
        and (values.dtype, values.shape, values.stride()) == (own.dtype, own.shape, own.stride())
    ):
        return
    raise EngineError(
        "this parameter is streamed from host memory, so it cannot be replaced or moved",
        "write weights through engine.master_weights.editing(); close the engine to move the model",
        f"model.{_home(parameter).member.name}",
        f"{values.dtype} on {values.device}",
    )


# -- Calls of units, in which their parameters behave normally.


class Inside(threading.local):
    """Registry of the unit calls in progress in each thread.

    Args:
        wrapped: The parameters of each module that wrap streamed tensors; filled by ``know``.
    """

    def __init__(self, wrapped: dict[torch.nn.Module, Sequence[_Wrapped]]) -> None:
        self._entered: list[tuple[torch.nn.Module, Sequence[Unit], ExitStack]] = []
        self._wrapped = wrapped

    def know(self, module: torch.nn.Module) -> None:
        """Let parameters that wrap streamed tensors use these only inside calls of ``module``.

        Operators reach wrapped tensors without ``__torch_function__``.

        Args:
            module: A streamed module; it gets parameters that wrap the weights in host memory.
        """
        self._wrapped[module] = [
            _Wrapped(place=part._parameters, name=name, inside=parameter)
            for part in module.modules()
            for name, parameter in part._parameters.items()
            if is_wrapper(parameter)
            and all(isinstance(inner, StreamedWeight) for _, inner in inner_tensors(parameter))
        ]
        for each in self._wrapped[module]:
            each.leave()

    def has(self, unit: Unit) -> bool:
        """Return whether the current thread is in a call of ``unit``."""
        for _, units, _ in self._entered:  # noqa: SIM110 - a generator takes twice as long
            if unit in units:
                return True
        return False

    def enter(self, module: torch.nn.Module, units: Sequence[Unit]) -> None:
        """Record that a call begins.

        Args:
            module: The called module.
            units: The units that are on the device for the call.
        """
        around = ExitStack()
        if _is_compiled(module):
            around.callback(_stream_again, _released(units))
        for each in self._wrapped.get(module, ()):
            each.enter()
            around.callback(each.leave)
        self._entered.append((module, units, around))

    def leave(self, module: torch.nn.Module) -> None:
        """Record that a call has ended, and with it all nested calls that an error interrupted.

        Args:
            module: The called module.
        """
        if any(module is each for each, _, _ in self._entered):
            while True:
                entered, _, around = self._entered.pop()
                around.close()
                if entered is module:
                    return

    def leave_all(self) -> None:
        """Forget all calls, including calls that an error interrupted."""
        while self._entered:
            self._entered.pop()[2].close()

    def close(self) -> None:
        """Let modules use their parameters themselves again, also outside calls."""
        self.leave_all()
        for each in chain.from_iterable(self._wrapped.values()):
            each.enter()


@attrs.frozen(kw_only=True, eq=False)
class _Wrapped:
    """A parameter that wraps streamed tensors."""

    place: Any
    """The parameters of its module."""
    name: str
    inside: Any
    """The parameter inside calls of its unit."""
    outside: Any = attrs.field(init=False)
    """The same weights in host memory."""

    @outside.default
    def _outside(self) -> Any:
        return wrap_again(self.inside, lambda inner: _home(inner).weights().detach())

    def enter(self) -> None:
        """Let the module use the parameter, whose values are on the device."""
        self.place[self.name] = self.inside

    def leave(self) -> None:
        """Let the module use the weights in host memory."""
        self.place[self.name] = self.outside


def _is_compiled(module: torch.nn.Module) -> bool:
    # Do not import the compiler, which takes seconds; if code is compiled, it is imported already.
    return "torch._dynamo" in sys.modules and any(
        hasattr(vars(part).get("forward"), "_torchdynamo_orig_callable")
        for part in module.modules()
    )


def _released(units: Sequence[Unit]) -> list[Any]:
    """Give streamed parameters their original class, and return them.

    Compilers check the class, even with torch functions disabled in this thread.
    """
    found: list[Any] = [
        member.parameter
        for unit in units
        for member in unit.members
        if isinstance(member.parameter, StreamedWeight)
    ]
    for parameter in found:
        parameter.__class__ = parameter._home.kind
    return found


def _stream_again(parameters: list[Any]) -> None:
    for parameter in parameters:
        parameter.__class__ = _streamed(parameter._home.kind)


def _attributes(*names: str) -> Iterator[Any]:
    for name in names:
        attribute: Any = getattr(torch.Tensor, name)
        yield attribute
        for method in ("__get__", "__set__"):
            if hasattr(attribute, method):
                yield getattr(attribute, method)


_DATA: Final[Any] = cast(Any, torch.Tensor.data).__get__
_REPR: Final[Any] = torch.Tensor.__repr__
_SET_DATA: Final[Any] = cast(Any, torch.Tensor.data).__set__
_VIEWS: Final = frozenset(
    (
        torch.Tensor.detach,
        torch.detach,
        torch.Tensor.data_ptr,
        torch.Tensor.untyped_storage,
    )
)
_MOVES: Final = frozenset(
    (
        torch.Tensor.to,
        torch.Tensor.cpu,
        torch.Tensor.cuda,
        torch.Tensor.float,
        torch.Tensor.half,
        torch.Tensor.bfloat16,
        torch.Tensor.double,
    )
)
_WITHOUT_VALUES: Final = (
    OF_THE_SHAPE
    | BESIDE_THE_CONTENT
    # Reads the gradients of parameters, not their values.
    | {torch.autograd.grad}
    | frozenset(
        _attributes(
            "requires_grad",
            "requires_grad_",
            "_backward_hooks",
            "_post_accumulate_grad_hooks",
            "register_hook",
            "register_post_accumulate_grad_hook",
            "retain_grad",
            "storage_offset",
            "output_nr",
            "_version",
        )
    )
)
