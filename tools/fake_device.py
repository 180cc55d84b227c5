"""A device without memory: count every byte of a pass, for real models at their real sizes.

``python -m tools.fake_device`` counts passes of every family and compares them with the memory
model, for docs/memory-proof.md. Passes run on torch's fake tensors, with the attention and norm
operators of CUDA and their workspaces. Allocations and frees are recorded in order, so that a model
of torch's caching allocator can compute the reserved memory.
"""

from __future__ import annotations

import contextlib
import json
import weakref
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal, get_args
from unittest import mock

import attrs
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from tools.families import CONFIGURATIONS, FRAMES
from zerotune.diffusion.activations import ActivationOffload, Loading, Stored, stored_strides
from zerotune.diffusion.facts import example_inputs
from zerotune.diffusion.passes import fuses_norm
from zerotune.plan.facts import ModelFacts
from zerotune.plan.families import family_names, model_family

Keeping = Literal["everything", "block inputs", "block inputs in RAM"]
"""Activations that a forward pass keeps for the backward pass."""
_ALIGNMENT: Final = 512
"""CUDA's allocator rounds every size up to a multiple of this, in bytes."""


@attrs.frozen(kw_only=True)
class Event:
    """An allocation or a free."""

    block: int
    nbytes: int
    """Rounded as on the device; negative for a free."""


@attrs.frozen(kw_only=True)
class FakePass:
    """Memory use of one forward and backward pass on the fake device."""

    events: tuple[Event, ...]
    host: int
    """Peak of activations offloaded to host memory, in bytes."""

    @property
    def peak(self) -> int:
        """Peak bytes alive at the same time, without weights."""
        live = most = 0
        for event in self.events:
            live += event.nbytes
            most = max(most, live)
        return most

    def reserved(self, *, before: tuple[int, ...] = ()) -> int:
        """Return the bytes that torch's caching allocator finally holds, ``before`` included."""
        return self._on(CachingAllocator(), before)

    def least(self, *, before: tuple[int, ...] = ()) -> int:
        """Return the bytes of the smallest device that can run the pass, to within 2 MiB."""
        step = 2 * _MIB
        enough, short = -(-self.reserved(before=before) // step), 0
        while enough - short > 1:
            middle = (enough + short) // 2
            try:
                self._on(CachingAllocator(limit=middle * step), before)
            except MemoryError:
                short = middle
            else:
                enough = middle
        return enough * step

    def _on(self, allocator: CachingAllocator, before: tuple[int, ...]) -> int:
        for index, nbytes in enumerate(before):
            allocator.take(-1 - index, rounded(nbytes))
        for event in self.events:
            if event.nbytes > 0:
                allocator.take(event.block, event.nbytes)
            else:
                allocator.give(event.block)
        return allocator.reserved


def rounded(nbytes: int) -> int:
    """Return the bytes that CUDA allocates for a request."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class FakeDevice:
    """A device on which a model can be trained without memory.

    Args:
        config: A diffusers configuration with ``_class_name``; built at its real size, in bf16.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        import diffusers

        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        with torch.device("meta"):
            model = getattr(diffusers, config["_class_name"]).from_config(dict(config))
        # Do not call ``model.to``: diffusers warns about layers that a real run keeps in fp32.
        self.model: Any = torch.nn.Module.to(model, torch.bfloat16).train()
        self._arguments = example_inputs(self.model)
        with self._mode:
            for module in self.model.modules():
                _replace(module._parameters, lambda one: torch.nn.Parameter(_like(one)))
                _replace(module._buffers, _like)
        for parameter in self.model.parameters():
            # Free gradients at once, as at stage 2, where they go to a bucket or to the host.
            parameter.register_post_accumulate_grad_hook(_drop_gradient)

    def step(
        self, *, batch: int, height: int, width: int, keeping: Keeping, frames: int | None = None
    ) -> FakePass:
        """Run one forward and backward pass in bf16; ``height`` and ``width`` in pixels."""
        clip = {} if frames is None else {"frames": frames}
        given = self._arguments(batch, height, width, **clip)
        transfers = FakeTransfers()
        allocations = _Allocations([*self.model.parameters(), *self.model.buffers()])
        with self._kept(keeping, transfers), self._mode, _cuda_operators():
            arguments = tree_map(_like, given)
            with allocations:
                output = self.model(**{**arguments, "return_dict": False})[0]
                # Z-Image returns one tensor per sample.
                samples = torch.stack(output) if isinstance(output, list) else output
                samples.float().pow(2).mean().backward()
                del output, samples, arguments
        return FakePass(events=tuple(allocations.events), host=transfers.peak)

    @contextlib.contextmanager
    def _kept(self, keeping: Keeping, transfers: FakeTransfers) -> Iterator[None]:
        if keeping == "block inputs in RAM":
            with ActivationOffload(transfers=transfers).attach(self.model):
                yield
            return
        if keeping == "block inputs":
            self.model.enable_gradient_checkpointing()
        try:
            yield
        finally:
            if keeping == "block inputs":
                self.model.disable_gradient_checkpointing()


class FakeTransfers:
    """Copies between a fake device and host memory, of which only the bytes are counted."""

    def __init__(self) -> None:
        self._held = 0
        self.peak = 0
        """Peak bytes of host memory."""

    def store(self, tensor: torch.Tensor) -> Stored:
        """Count a block of host memory."""
        with _disable_current_modes():
            shape, strides = tensor.shape, stored_strides(tensor)
            host = torch.empty_strided(shape, strides, dtype=tensor.dtype, device="meta")
        self._held += host.nbytes
        self.peak = max(self.peak, self._held)
        return Stored(tensor=host, device=tensor.device)

    def settle(self, stored: Stored) -> None:
        """Do nothing: copies complete at once."""

    def load(self, stored: Stored) -> Loading:
        """Allocate the tensor on the device."""
        source = stored.tensor
        return Loading(
            tensor=torch.empty_strided(source.shape, source.stride(), dtype=source.dtype)
        )

    def finish(self, loading: Loading) -> torch.Tensor:
        """Return the tensor that ``load`` allocated."""
        return loading.tensor

    def release(self, stored: Stored) -> None:
        """Free the host block."""
        self._held -= stored.tensor.nbytes


class _Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records when storages are created and freed."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = {_key(tensor) for tensor in known}
        self._blocks: dict[int, Event] = {}
        self._count = 0
        self.events: list[Event] = []

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf)
        for nbytes in _workspace(func, args):
            self._end(self._begin(nbytes))
        return result

    def _note(self, tensor: torch.Tensor) -> None:
        key = _key(tensor)
        if key in self._known or key in self._blocks:
            return
        storage = tensor.untyped_storage()
        self._blocks[key] = self._begin(storage.nbytes())
        weakref.finalize(storage, self._forget, key)

    def _begin(self, nbytes: int) -> Event:
        self._count += 1
        event = Event(block=self._count, nbytes=rounded(nbytes))
        if event.nbytes:
            self.events.append(event)
        return event

    def _end(self, event: Event) -> None:
        if event.nbytes:
            self.events.append(Event(block=event.block, nbytes=-event.nbytes))

    def _forget(self, key: int) -> None:
        event = self._blocks.pop(key, None)
        if event is not None:
            self._end(event)


def _workspace(func: Any, args: Any) -> Iterator[int]:
    """Yield the bytes that a CUDA operator needs while it runs, besides its results."""
    if func._overloadpacket is torch.ops.aten._scaled_dot_product_flash_attention_backward:
        batch, heads, length, width = args[1].shape
        padded, whole = -(-length // 128) * 128, -(-width // 32) * 32
        # FlashAttention-2 accumulates the query's gradient in fp32.
        yield 4 * batch * heads * padded * (whole + 1)


class _RMSNorm(torch.autograd.Function):
    """The memory use of CUDA's ``_fused_rms_norm``, which torch has for CUDA only."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(given, weight, given.new_empty(given.shape[:-1], dtype=torch.float32))
        return torch.empty_like(given)

    @staticmethod
    def backward(ctx: Any, *_gradients: torch.Tensor) -> Any:
        given, weight, _scale = ctx.saved_tensors
        return torch.empty_like(given), None if weight is None else torch.empty_like(weight)


@contextlib.contextmanager
def _cuda_operators() -> Iterator[None]:
    def attention(query: Any, key: Any, value: Any, *_args: Any, **named: Any) -> Any:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, scale=named.get("scale"))[0]

    composite = torch.nn.functional.rms_norm

    def norm(given: Any, shape: Any, weight: Any = None, eps: Any = None) -> Any:
        if fuses_norm(given, shape, weight):
            return _RMSNorm.apply(given, weight)  # type: ignore[no-untyped-call]
        return composite(given, shape, weight, eps)

    functions = torch.nn.functional
    with (
        mock.patch.object(functions, "scaled_dot_product_attention", attention),
        mock.patch.object(functions, "rms_norm", norm),
    ):
        yield


def _like(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)


def _replace(tensors: dict[str, Any], make: Any) -> None:
    for name, tensor in tensors.items():
        if tensor is not None:
            tensors[name] = make(tensor)


def _drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


# -- Memory that torch's caching allocator reserves.

_MIB: Final = 2**20


@attrs.define(eq=False)
class _Block:
    segment: int
    start: int
    size: int
    before: _Block | None = None
    after: _Block | None = None
    free: bool = True


class CachingAllocator:
    """The bookkeeping of ``c10/cuda/CUDACachingAllocator.cpp``, for one stream.

    Blocks of up to 1 MiB come from segments of 2 MiB, up to 10 MiB from segments of 20 MiB, larger
    ones from segments of their own, rounded up to 2 MiB. The smallest free block that is large
    enough is split if at least 512 bytes (small blocks) or more than 1 MiB (large blocks) would be
    left over, and free neighbours are joined. When the driver has no memory left, entirely free
    segments are returned to it.

    Args:
        limit: Bytes the driver has; ``MemoryError`` if they do not suffice.
    """

    def __init__(self, *, limit: int | None = None) -> None:
        self._limit = limit
        self._idle: dict[bool, list[tuple[int, int, int]]] = {True: [], False: []}
        self._blocks: dict[tuple[int, int], _Block] = {}
        self._taken: dict[int, tuple[_Block, bool]] = {}
        self._segments = 0
        self.reserved = 0
        """Bytes of all segments."""

    def take(self, key: int, nbytes: int) -> None:
        """Allocate a block under the name ``key``; ``nbytes`` is a multiple of 512."""
        small = nbytes <= _MIB
        block = self._found(nbytes, small) or self._grown(nbytes, small)
        left = block.size - nbytes
        if left >= _ALIGNMENT if small else left > _MIB:
            self._split(block, nbytes, small)
        block.free = False
        self._taken[key] = (block, small)

    def give(self, key: int) -> None:
        """Free the block for reuse."""
        block, small = self._taken.pop(key)
        if block.before is not None and block.before.free:
            block = self._joined(block.before, block, small)
        if block.after is not None and block.after.free:
            block = self._joined(block, block.after, small, second=True)
        self._offer(block, small)

    def _found(self, nbytes: int, small: bool) -> _Block | None:
        idle = self._idle[small]
        position = bisect_left(idle, (nbytes, 0, 0))
        if position == len(idle):
            return None
        _, segment, start = idle.pop(position)
        return self._blocks[segment, start]

    def _grown(self, nbytes: int, small: bool) -> _Block:
        if small:
            size = 2 * _MIB
        elif nbytes < 10 * _MIB:
            size = 20 * _MIB
        else:
            size = -(-nbytes // (2 * _MIB)) * 2 * _MIB
        if self._limit is not None and self.reserved + size > self._limit:
            self._give_back()
            if self.reserved + size > self._limit:
                raise MemoryError
        self._segments += 1
        self.reserved += size
        block = _Block(segment=self._segments, start=0, size=size)
        self._blocks[block.segment, 0] = block
        return block

    def _give_back(self) -> None:
        for idle in self._idle.values():
            for size, segment, start in tuple(idle):
                block = self._blocks[segment, start]
                if block.before is None and block.after is None:
                    idle.remove((size, segment, start))
                    del self._blocks[segment, start]
                    self.reserved -= size

    def _split(self, block: _Block, nbytes: int, small: bool) -> None:
        rest = _Block(
            segment=block.segment, start=block.start + nbytes, size=block.size - nbytes,
            before=block, after=block.after,
        )  # fmt: skip
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, nbytes
        self._offer(rest, small)

    def _joined(
        self, first: _Block, second_: _Block, small: bool, *, second: bool = False
    ) -> _Block:
        gone = second_ if second else first
        self._idle[small].remove((gone.size, gone.segment, gone.start))
        del self._blocks[second_.segment, second_.start]
        first.size += second_.size
        first.after = second_.after
        if second_.after is not None:
            second_.after.before = first
        return first

    def _offer(self, block: _Block, small: bool) -> None:
        block.free = True
        self._blocks[block.segment, block.start] = block
        insort(self._idle[small], (block.size, block.segment, block.start))


# -- Comparison with the memory model.

FILE: Final = Path(__file__).resolve().parents[1] / "docs" / "results" / "fake_device.json"
KINDS: Final[tuple[Keeping, ...]] = get_args(Keeping)
SIZES: Final = ((None, None, 1), (None, None, 8), (128, None, 8))
"""Side in pixels, frames and batch; ``None``: the family's native value."""
CLIPS: Final = ((None, None, 1), (None, 1, 8), (256, 17, 4))


def rows(name: str) -> Iterator[dict[str, Any]]:
    """Yield a family's bytes with everything kept, recomputed and offloaded, at three sizes."""
    config, native = CONFIGURATIONS[name]
    device, facts = FakeDevice(config), model_family(name).facts
    weights = 2 * facts.numel
    for keeping in KINDS:
        for small, some, batch in CLIPS if name in FRAMES else SIZES:
            side, frames = small or native, some or FRAMES.get(name)
            taken = device.step(
                batch=batch, height=side, width=side, keeping=keeping, frames=frames
            )
            pixels = facts.positions(height=side, width=side, frames=frames)
            on_device, on_host = estimate(facts, batch=batch, pixels=pixels, keeping=keeping)
            size = f"{side}²{'' if frames is None else f' x {frames}'}, batch {batch}"
            yield {
                "pass": f"{name}, {keeping}, {size}", "weights": weights,
                "counted": taken.peak, "estimated": on_device,
                "host": taken.host, "estimated_host": on_host,
                "reserved": taken.reserved(before=(weights,)) - weights,
            }  # fmt: skip


def estimate(
    facts: ModelFacts, *, batch: int, pixels: int, keeping: Keeping
) -> tuple[float, float]:
    """Return the memory model's bytes of activations on the device and on the host."""
    known = facts.activations
    assert known is not None
    costs = dict(zip(KINDS, (known.full, known.checkpointed, known.offloaded), strict=True))
    cost, host = costs[keeping], known.offloaded_host
    assert cost is not None
    assert host is not None
    waiting = host.nbytes(batch=batch, pixels=pixels) if keeping == KINDS[2] else 0
    return cost.nbytes(batch=batch, pixels=pixels), waiting


def render(passes: Iterable[Mapping[str, Any]]) -> str:
    """Return JSON with one line per pass."""
    lines = ",\n".join(json.dumps(one, ensure_ascii=False) for one in passes)
    return f"[\n{lines}\n]\n"


if __name__ == "__main__":
    FILE.write_text(
        render(row for name in CONFIGURATIONS if name in family_names() for row in rows(name)),
        encoding="utf-8",
    )
