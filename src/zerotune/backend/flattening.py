"""Stages 1 and 2 without a second copy of the weights on the device.

``DeepSpeedZeroOptimizer.__init__`` of 0.19.8 flattens each group's weights on the device, beside
the weights themselves, and then clones this rank's part there before it moves the clone to the
host: twice the weights each time, so that a card that trains a model cannot start it. Here both
copies are made in host memory, weight by weight; the values are the same, bit for bit.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from zerotune.decisions import Decision
from zerotune.plan.resolved import ResolvedPlan

KEY: Final = "initialization.flat weights"
_KNOWN: Final = (
    ("self", "tensor_list", "alignment", "use_cpu_data", "param_padding"),
    ("self", "tensor_list", "alignment", "use_cpu_data"),
)
"""Arguments of ``flatten_dense_tensors_aligned`` in the releases that were read."""


@contextmanager
def flat_through_host(
    deepspeed: Any, plan: ResolvedPlan, *, device: torch.device
) -> Iterator[list[Decision]]:
    """Inside the block, the optimizer of stages 1 and 2 is built without copies on the device.

    Acts only where the optimizer is offloaded: elsewhere its own states are larger than the copy.

    Args:
        deepspeed: The module.
        plan: The plan that is about to start.
        device: Where the weights belong.

    Yields:
        A list that holds what was decided once the block has ended.
    """
    decisions: list[Decision] = []
    if plan.stage not in (1, 2) or plan.offload_optimizer == "none":
        yield decisions
        return
    owner = deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer
    original = owner.flatten_dense_tensors_aligned
    if tuple(inspect.signature(original).parameters) not in _KNOWN:
        decisions.append(_decision("device", "this DeepSpeed flattens weights in an unknown way"))
        yield decisions
        return
    clones = _ClonesOnHost()

    def flatten(
        _optimizer: Any,
        tensor_list: Sequence[torch.nn.Parameter],
        alignment: int,
        use_cpu_data: bool = False,
        param_padding: Sequence[int] | None = None,
    ) -> torch.Tensor:
        flat = flatten_on_host(
            tensor_list, alignment=alignment, padding=param_padding, moved=use_cpu_data
        ).to(device)
        clones.watch(flat)
        return flat

    owner.flatten_dense_tensors_aligned = flatten
    try:
        with clones:
            yield decisions
    finally:
        owner.flatten_dense_tensors_aligned = original
    decisions.append(clones.decision())


def flatten_on_host(
    parameters: Sequence[torch.nn.Parameter],
    *,
    alignment: int,
    padding: Sequence[int] | None = None,
    moved: bool = False,
) -> torch.Tensor:
    """One flat host tensor of all parameters, each freed as soon as it is copied.

    Args:
        parameters: At least one; left empty, to become views of the flat tensor.
        alignment: The length becomes a multiple of it, filled up with zeros.
        padding: Zeros after each parameter.
        moved: Whether DeepSpeed has put the weights into ``cpu_data`` already.

    Returns:
        1-D, on the CPU.
    """
    sizes = [(p.cpu_data if moved else p).numel() for p in parameters]  # type: ignore[attr-defined]
    gaps = list(padding) if padding is not None else [0] * len(sizes)
    used = sum(sizes) + sum(gaps)
    dtype = functools.reduce(torch.promote_types, {parameter.dtype for parameter in parameters})
    flat = torch.empty(-(-used // alignment) * alignment, dtype=dtype)
    flat[used:].zero_()
    offset = 0
    for parameter, size, gap in zip(parameters, sizes, gaps, strict=True):
        source = parameter.cpu_data if moved else parameter.data  # type: ignore[attr-defined]
        flat[offset : offset + size].copy_(source.reshape(-1))
        flat[offset + size : offset + size + gap].zero_()
        if not moved:
            parameter.data = parameter.data.new_empty(0)
        offset += size + gap
    return flat


class _ClonesOnHost(TorchFunctionMode):
    """Answers ``clone()`` of a watched tensor with a copy on the host."""

    def __init__(self) -> None:
        super().__init__()
        self._watched: set[int] = set()
        self._cloned: set[int] = set()

    def watch(self, flat: torch.Tensor) -> None:
        """Clones of ``flat`` and of its slices are made on the host from now on."""
        self._watched.add(_storage(flat))

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.clone and self._watched and _storage(args[0]) in self._watched:
            self._cloned.add(_storage(args[0]))
            if args[0].device.type != "cpu":
                return args[0].cpu()
        return func(*args, **(kwargs or {}))

    def decision(self) -> Decision:
        """What came of it."""
        if not self._watched or self._cloned != self._watched:
            return _decision("device", "this DeepSpeed builds its master weights in an unknown way")
        return _decision(
            "host",
            "DeepSpeed itself holds the weights twice on the device while it builds the optimizer",
        )


def _decision(place: str, reason: str) -> Decision:
    return Decision(
        key=KEY,
        before="device",
        after=place,
        reason=reason,
        severity="note" if place == "host" else "warning",
    )


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
