"""One forward and backward pass without data: what lives after each operator, and its arithmetic.

The model runs on the ``meta`` device, every storage is counted from its birth to its death, and
operators that a GPU has fused ones for keep what those keep.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, cast
from unittest import mock

import attrs
import torch
from torch.fx.experimental import _config as symbolic
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from zerotune.backend.rates import moves_memory

KINDS: Final = ("products", "convolutions", "attention", "moved")
"""Floating-point operations of matrix products, of convolutions and of attention (a product and a
sum are two), and bytes that all other operators read and write."""
CALLS: Final = {"products": "product_calls", "attention": "attention_calls"}
"""What is counted besides: how many operators of a kind run."""
_META: Final = torch.device("meta")


@attrs.frozen(kw_only=True)
class Pass:
    """What one forward and backward pass took; parameters are not counted."""

    live: tuple[int, ...]
    """Bytes alive after each operator."""
    operators: tuple[str, ...]
    """Their names, in the same order."""
    forward: Mapping[str, int]
    """What the forward pass computes, by ``KINDS`` and names in ``CALLS``."""
    backward: Mapping[str, int]
    """The same of the backward pass, with what it computes again."""
    first: int
    """Operators of the forward pass; those that follow are the backward pass's."""

    @property
    def peak(self) -> int:
        """Most bytes alive at a time."""
        return max(self.live, default=0)


def activation_peak(module: torch.nn.Module, arguments: Mapping[str, Any]) -> int:
    """Most bytes alive at a time in one forward and backward pass, parameters not counted.

    Args:
        module: A module on the ``meta`` device, whose gradients are dropped as they appear.
        arguments: Arguments of ``forward``.
    """
    return counted_pass(module, arguments).peak


def counted_passes(
    module: torch.nn.Module, arguments: Sequence[Mapping[str, Any]], *, checkpointed: bool = True
) -> tuple[list[Pass], list[Pass] | None]:
    """A pass for each of these arguments, without and with recomputed blocks.

    Args:
        module: As in ``activation_peak``; left without checkpointing.
        arguments: Likewise.
        checkpointed: ``False`` leaves the second list out, as a model that cannot recompute does.
    """
    with dropped_gradients(module):
        full, switch = [counted_pass(module, each) for each in arguments], cast("Any", module)
        if not checkpointed or not hasattr(module, "enable_gradient_checkpointing"):
            return full, None
        switch.enable_gradient_checkpointing()
        recomputed = [counted_pass(module, each) for each in arguments]
        switch.disable_gradient_checkpointing()
    return full, recomputed


@contextlib.contextmanager
def dropped_gradients(module: torch.nn.Module) -> Iterator[None]:
    """Inside, gradients are dropped as they appear: an estimate counts them apart."""

    def drop(parameter: torch.Tensor) -> None:
        parameter.grad = None

    handles = [
        parameter.register_post_accumulate_grad_hook(drop)  # type: ignore[no-untyped-call]
        for parameter in module.parameters()
        if parameter.requires_grad
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def counted_pass(
    module: torch.nn.Module,
    arguments: Mapping[str, Any],
    *,
    watched_by: Callable[[Callable[[], int]], None] | None = None,
) -> Pass:
    """Everything about one forward and backward pass.

    Args:
        module: As in ``activation_peak``.
        arguments: Likewise.
        watched_by: Is given a function that tells how many operators have run.
    """
    module.train()
    known = [*module.parameters(), *module.buffers()]
    counts = _Counts(known)
    if watched_by is not None:
        watched_by(lambda: len(counts.live))
    with _fused_operators(counts), counts, _beside_data(arguments):
        output = module(**arguments)
        sample = output[0] if isinstance(output, tuple) else output.sample
        # Z-Image gives one tensor for each sample.
        samples = torch.stack(sample) if isinstance(sample, list) else sample
        loss = samples.float().pow(2).mean()
        forward, first = dict(counts.work), len(counts.live)
        loss.backward()
    return Pass(
        live=tuple(counts.live),
        operators=tuple(counts.operators),
        forward=forward,
        first=first,
        backward={kind: amount - forward[kind] for kind, amount in counts.work.items()},
    )


def _beside_data(arguments: Mapping[str, Any]) -> contextlib.AbstractContextManager[None]:
    """What lets a model without data take arguments that have some, where there are any."""
    tensors = [leaf for leaf in tree_leaves(dict(arguments)) if isinstance(leaf, torch.Tensor)]
    whole = all(tensor.is_meta for tensor in tensors)
    return contextlib.nullcontext() if whole else sizes_only()


class SizesOnly(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Whatever meets a tensor without data has none either; all else is computed."""

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        leaves = tree_leaves((args, named))
        if any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in leaves):
            if "device" in named:
                named["device"] = _META
            args, named = tree_map(_without_data, (args, named))
        return func(*args, **named)


def _without_data(leaf: Any) -> Any:
    return leaf.to(_META) if isinstance(leaf, torch.Tensor) and not leaf.is_meta else leaf


@contextlib.contextmanager
def sizes_only() -> Iterator[None]:
    """Inside, tensors without data are computed with; a mask without data marks everything."""
    before = symbolic.meta_nonzero_assume_all_nonzero
    symbolic.meta_nonzero_assume_all_nonzero = True
    try:
        with SizesOnly():  # type: ignore[no-untyped-call]
            yield
    finally:
        symbolic.meta_nonzero_assume_all_nonzero = before


class _Counts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages that live, those of ``known`` tensors left out."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = {_key(tensor) for tensor in known}
        self._sizes: dict[int, int] = {}
        self._now = 0
        self.live: list[int] = []
        self.operators: list[str] = []
        self.work = dict.fromkeys((*KINDS, *CALLS.values()), 0)

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf)
        self._work(func, args, kwargs or {}, result)
        self.live.append(self._now)
        self.operators.append(func._opname)
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        key = _key(tensor)
        if key in self._known or key in self._sizes:
            return
        storage = tensor.untyped_storage()
        self._sizes[key] = storage.nbytes()
        self._now += storage.nbytes()
        weakref.finalize(storage, self._forget, key)

    def _work(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            kind = "convolutions" if "convolution" in func._opname else "products"
            self.computes(kind, formula(*args, **kwargs, out_val=result))
        elif moves_memory(func):
            self.work["moved"] += sum(_nbytes(leaf) for leaf in tree_leaves((args, kwargs, result)))

    def computes(self, kind: str, amount: int) -> None:
        """An operator of a kind has run."""
        self.work[kind] += amount
        if kind in CALLS:
            self.work[CALLS[kind]] += 1

    def _forget(self, key: int) -> None:
        self._now -= self._sizes.pop(key, 0)


class _FlashAttention(torch.autograd.Function):
    """Attention as fused kernels account for it: the matrix itself is never stored."""

    @staticmethod
    def forward(
        ctx: Any, counts: _Counts, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        output = torch.empty_like(query)
        log_sum = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)
        ctx.save_for_backward(query, key, value, output, log_sum)
        ctx.counts = counts
        counts.computes("attention", 4 * query.numel() * key.shape[-2])
        return output

    @staticmethod
    def backward(ctx: Any, *_gradients: torch.Tensor) -> Any:
        query, key, value, _output, _log_sum = ctx.saved_tensors
        # The product of query and key once more, and two for each of them and the value.
        ctx.counts.computes("attention", 10 * query.numel() * key.shape[-2])
        results = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        # The query's gradient is summed up in fp32.
        torch.empty(query.shape, dtype=torch.float32, device=query.device)
        return None, *results


class _FusedNorm(torch.autograd.Function):
    """The root-mean-square norm as CUDA has it: its input is kept, and no copy in fp32."""

    @staticmethod
    def forward(
        ctx: Any, counts: _Counts, given: torch.Tensor, weight: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.counts = counts
        counts.work["moved"] += 2 * _nbytes(given)
        scale = torch.empty(given.shape[:-1], dtype=torch.float32, device=given.device)
        ctx.save_for_backward(given, weight, scale)
        return torch.empty_like(given)

    @staticmethod
    def backward(ctx: Any, *_gradients: torch.Tensor) -> Any:
        given, weight, _scale = ctx.saved_tensors
        ctx.counts.work["moved"] += 3 * _nbytes(given)
        return None, torch.empty_like(given), None if weight is None else torch.empty_like(weight)


def fuses_norm(
    given: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None = None
) -> bool:
    """Whether CUDA has one operator for a root-mean-square norm of these.

    torch takes several where the weight is of another type than what is normed ("Cannot dispatch
    to fused implementation").
    """
    alike = weight is None or weight.dtype == given.dtype
    return alike and tuple(shape) == tuple(given.shape[-1:])


@contextlib.contextmanager
def _fused_operators(counts: _Counts) -> Iterator[None]:
    # On the meta device torch falls back to what is made of smaller operators.
    def attention(query: Any, key: Any, value: Any, *_args: Any, **_kwargs: Any) -> Any:
        return _FlashAttention.apply(counts, query, key, value)  # type: ignore[no-untyped-call]

    composite = torch.nn.functional.rms_norm

    def norm(given: Any, shape: Any, weight: Any = None, eps: float | None = None) -> Any:
        if fuses_norm(given, shape, weight):
            return _FusedNorm.apply(counts, given, weight)  # type: ignore[no-untyped-call]
        return composite(given, shape, weight, eps)

    functions = torch.nn.functional
    with (
        mock.patch.object(functions, "scaled_dot_product_attention", attention),
        mock.patch.object(functions, "rms_norm", norm),
    ):
        yield


def _nbytes(value: Any) -> int:
    return int(value.nbytes) if isinstance(value, torch.Tensor) else 0


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
