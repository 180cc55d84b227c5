"""``OptimizerWrapper``: adapters for the classes in which DeepSpeed wraps an optimizer.

There is one module for each kind of wrapper: ``replicated`` (stage 0), ``partitioned`` (stages 1
and 2) and ``sharded`` (stage 3). A later DeepSpeed release may change a method that zerotune
replaces. Therefore ``backend/data/sources.json`` contains hashes of these methods for each tested
release; ``python -m tools.deepspeed_sources`` adds those of the installed release.

DeepSpeed's step in host memory converts every gradient to fp32 in a separate buffer, computes its
norm with a copy in fp64, and then reads memory again for clipping, Adam and the cast. ``HostStep``
keeps gradients in their dtype, computes norms while copying, and fuses the rest. Weights, moments
and counters stay in DeepSpeed's tensors. A step may return before it is complete
(``PendingStep``).
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.resources
import inspect
import json
import math
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Final, cast

import attrs
import torch
from typing_extensions import override

from zerotune.backend.distributed import ProcessGroup
from zerotune.backend.master_weights import UNDER_WAY, MasterLayout
from zerotune.backend.optimizers.classes import AdamWBF16States
from zerotune.backend.step.deferred import DeferredSteps, take_over
from zerotune.decisions import Decision
from zerotune.errors import EngineError
from zerotune.plan.model import ResolvedPlan

GRADIENTS_KEY: Final = "optimizer.step.gradients"


@attrs.frozen(kw_only=True)
class Upstream:
    """Attributes that zerotune uses, and methods that it replaces, in one DeepSpeed class."""

    owner: str
    """Dotted name of the class."""
    relied_on: tuple[str, ...] = ()
    """Undocumented attributes that zerotune requires."""
    replaced: tuple[str, ...] = ()
    """Methods that zerotune replaces, wholly or partly, if their source code has been tested."""

    @property
    def missing(self) -> list[str]:
        """Dotted names of required attributes that DeepSpeed lacks."""
        return [f"{self.owner}.{name}" for name in self.relied_on if not hasattr(self._kind, name)]

    @property
    def digests(self) -> dict[str, str | None]:
        """SHA-256 of each replaced method's source without indentation, by dotted name.

        The value is ``None`` if the source cannot be read.
        """
        return {f"{self.owner}.{method}": self._digest(method) for method in self.replaced}

    def changed(self) -> str | None:
        """Return why a replaced method may be untested; ``None`` if every method is tested."""
        for name, digest in self.digests.items():
            method = name.rpartition(".")[2]
            if digest is None:
                return (
                    f"the source code of DeepSpeed's {method} cannot be read, so zerotune cannot "
                    "tell whether it was tested"
                )
            if digest not in tested_sources().get(name, {}):
                return f"DeepSpeed's {method} differs from every tested release"
        return None

    @property
    def _kind(self) -> Any:
        module, _, name = self.owner.rpartition(".")
        return getattr(importlib.import_module(module), name, None)

    def _digest(self, method: str) -> str | None:
        function = getattr(self._kind, method, None)
        if "instrument_w_nvtx" in getattr(function, "__qualname__", ""):
            # DeepSpeed's profiling decorator has the same source around every method, so digest the
            # method inside it.
            function = inspect.getclosurevars(cast(Any, function)).nonlocals["func"]
        return None if function is None else source_digest(function)


@functools.cache
def source_digest(function: Any) -> str | None:
    """Return the SHA-256 of a function's source; ``None`` if the source cannot be read."""
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        return None
    lines = (line.strip() for line in source.splitlines())
    return hashlib.sha256("\n".join(line for line in lines if line).encode()).hexdigest()


@functools.cache
def tested_sources() -> dict[str, dict[str, list[str]]]:
    """Return the releases that contain each tested method, by dotted name and source digest."""
    file = importlib.resources.files("zerotune") / "backend" / "data" / "sources.json"
    content: dict[str, dict[str, list[str]]] = json.loads(file.read_text(encoding="utf-8"))
    return content


class OptimizerWrapper(ABC):
    """Adapter for the optimizer of a ``deepspeed.DeepSpeedEngine``; subclasses cover the stages."""

    upstream: ClassVar[tuple[Upstream, ...]] = ()
    """Attributes and methods of DeepSpeed that are used or replaced."""
    step_kind: ClassVar[type[HostStep] | None] = None
    """Class of the fused step; ``None`` if the adapter has none."""
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

    def correct(self) -> tuple[Decision, ...]:
        """Apply corrections that every DeepSpeed engine needs, also in other trainers."""
        return ()

    def improve(self) -> tuple[Decision, ...]:
        """Before the step is replaced, apply corrections that only zerotune's engine needs."""
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

    def take_over_step(
        self, plan: ResolvedPlan, group: ProcessGroup
    ) -> tuple[HostStep | None, tuple[Decision, ...]]:
        """Replace the step of an Adam in host memory with a fused step, if possible. Collective.

        Args:
            plan: The resolved plan.
            group: The process group of all ranks.

        Returns:
            The fused step (``None`` if DeepSpeed's step is not replaced) and the decisions. For
            optimizers other than DeepSpeedCPUAdam and AdamWBF16States, there are no decisions.
        """
        adam, kind = self.inner, self.step_kind
        ours = isinstance(adam, AdamWBF16States)
        if kind is None or not (ours or type(adam).__name__ == "DeepSpeedCPUAdam"):
            return None, ()
        step, decided = take_over(
            plan,
            group,
            adam=adam,
            usual="DeepSpeed's",
            obstacle=self._obstacle(kind),
            rounds_alike=None,
            make=functools.partial(
                kind, wrapper=self.raw, module=self.engine.module, layout=self.layout, group=group
            ),
            reason="clipping, Adam and the cast of the weights share a single pass over host "
            "memory, and gradients keep their dtype; results are bit-identical",
        )
        if step is None:
            return None, decided
        dtype = step.gradient_dtype
        if (plan.gradient_accumulation_steps or 1) > 1:
            wide = '; for fp32, set {"data_types": {"grad_accum_dtype": "fp32"}}'
            decided += (
                Decision(
                    key=GRADIENTS_KEY,
                    before=None,
                    after=str(dtype).removeprefix("torch."),
                    reason="gradients of micro batches are summed in this dtype"
                    + ("" if dtype == torch.float32 else wide),
                ),
            )
        return step, decided

    def _obstacle(self, kind: type[HostStep]) -> str | None:
        """Why DeepSpeed's step cannot be replaced; ``None`` if it can."""
        for name in (
            "has_moe_layers",
            "zenflow",
            "torch_autocast_gradscaler",
            "use_muon",
        ):
            if getattr(self.raw, name, None):
                return f"the fused step does not support {name}"
        if not getattr(self.inner, "fp32_optimizer_states", True):
            return "the moments are not fp32"
        if (changed := kind.upstream.changed()) is not None:
            return changed
        return None if self.devices[0] != "none" else "the optimizer is not in host memory"


def _edit(layout: MasterLayout, setter: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    layout.edited = True
    return setter(*args, **kwargs)


class HostStep(DeferredSteps):
    """Fused step of a ZeRO optimizer that wraps an Adam in host memory.

    Args:
        wrapper: DeepSpeed's ZeRO optimizer.
        base: See ``DeferredSteps``.
    """

    upstream: ClassVar[Upstream]
    """Methods of the wrapper that are replaced."""

    settles_first: ClassVar[tuple[str, ...]] = ()
    """Methods of the wrapper that must first wait for a pending step."""

    def __init__(self, *, wrapper: Any, **base: Any) -> None:
        super().__init__(adam=wrapper.optimizer, **base)
        self._wrapper = wrapper
        self._home = sys.modules[type(wrapper).__module__]
        self.install()
        self.know_views()

    @property
    @override
    def _accelerator(self) -> Any:
        return self._home.get_accelerator()

    @override
    def why_at_once(self) -> str | None:
        betas = {tuple(group["betas"]) for group in self._optimizer.param_groups}
        why = "parameter groups with different betas must be updated in order"
        return why if len(betas) > 1 else None

    def install(self) -> None:
        """For this wrapper object only, replace the gradient copy, the norm and the step."""
        setattr(self._wrapper, UNDER_WAY, self)
        for name in self.settles_first:
            setattr(self._wrapper, name, self._settling(getattr(self._wrapper, name)))

    @property
    def gradient_dtype(self) -> torch.dtype:
        """Dtype in which gradients are stored and accumulated."""
        dtype: torch.dtype = self._wrapper.gradient_accumulation_dtype
        return dtype

    def _settling(self, method: Callable[..., Any]) -> Callable[..., Any]:
        stepping = weakref.ref(self)

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            if (step := stepping()) is not None:
                step.settle()
            return method(*args, **kwargs)

        return call

    def _is_here(self, target: torch.Tensor) -> bool:
        """Whether the fused step can write a model's tensor directly."""
        return target.device.type == "cpu" and self._op.knows(target.dtype)

    @property
    @abstractmethod
    def _slabs(self) -> Sequence[Any]:
        """The fp32 weights in the optimizer's groups."""

    def _steps(self, index: int) -> bool:  # noqa: ARG002 - of the slab
        """Whether the fused step updates this slab in host memory."""
        return True

    def _swaps(self, index: int) -> bool:  # noqa: ARG002 - of the slab
        """Whether DeepSpeed swaps this slab and its gradient to NVMe."""
        return False

    @abstractmethod
    def _members(self) -> Iterator[tuple[Any, torch.Tensor]]:
        """Yield parameters with their parts of the gradient buffers."""

    def _shrink_gradients(self) -> None:
        """Replace fp32 gradient buffers by buffers in the gradients' dtype."""
        dtype = self.gradient_dtype
        for index, slab in enumerate(self._slabs):
            same = dtype == slab.dtype or not self._op.knows(dtype)
            if same or self._swaps(index) or not self._steps(index):
                continue
            wide, shape = slab.grad, slab.grad.shape
            pinned, natively = self._accelerator.is_pinned(wide), getattr(wide, "ds_pinned", False)
            slab.grad = None
            slab.grad_dtype = dtype
            if pinned and not natively:
                # torch caches page-locked blocks, so a new one would use additional memory.
                slab.grad = wide.zero_().view(-1).view(dtype)[: wide.numel()].view(shape)
                continue
            del wide
            empty = torch.zeros(shape, dtype=dtype)
            # Page-lock the block like DeepSpeed; torch may round it up to twice its size.
            slab.grad = self._accelerator.pin_memory(empty) if pinned else empty

    def _norm_of(self, gradient: torch.Tensor, *, into: torch.Tensor | None = None) -> torch.Tensor:
        """L2 norm of a flat gradient; a gradient in host memory is also copied to ``into``."""
        if gradient.device.type != "cpu" or not self._op.knows(gradient.dtype):
            # In DeepSpeed's dtype, or clipping would differ in the last bit. The norm stays on the
            # device: all norms are read at once when the step begins.
            norm: torch.Tensor = gradient.to(self._home.get_norm_dtype()).norm(2)
            return norm
        total = self._op.take(gradient, into=into)
        return torch.tensor(math.sqrt(total), dtype=torch.float64)

    def _forget_unused(self) -> None:
        """Zero gradients left from an earlier window."""
        for parameter, gradient in self._members():
            if self._wrapper.get_param_id(parameter) not in self._wrapper.norm_for_param_grads:
                gradient.zero_()


def read_at_once(norms: dict[Any, torch.Tensor]) -> None:
    """Copy scalar tensors to the host, with a single synchronisation per device.

    Args:
        norms: Scalar tensors by key; each is replaced by an fp64 tensor on the CPU.
    """
    for device in {norm.device for norm in norms.values()}:
        there = [key for key, norm in norms.items() if norm.device == device]
        read = torch.stack([norms[key].double().reshape(()) for key in there]).cpu()
        norms.update(zip(there, read.unbind(), strict=True))


def clear(tensors: Iterable[Any]) -> None:
    """Zero all tensors in an iterable, ignoring other objects.

    Args:
        tensors: Tensors, ``None`` or other objects.
    """
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            tensor.zero_()
