"""``OptimizerWrapper``: what is known and replaced of a class that DeepSpeed wraps an optimizer in.

Each kind has a file: ``replicated`` (stage 0), ``partitioned`` (stages 1 and 2), ``sharded``
(stage 3). A later release may do more in a method that is replaced. Names alone would not tell, so
its source is hashed, per release that was tested, in ``backend/data/sources.json``; ``python -m
tools.deepspeed_sources`` adds the installed release to it.

DeepSpeed's own step in host memory widens every gradient to fp32 in a buffer of its own, takes its
norm through a copy in fp64, and then goes over host memory for each of clipping, Adam and cast. In
``HostStep`` a gradient stays in the dtype it arrives in, its norm is taken on the way, and the rest
is one pass. Weights, moments and counters stay where DeepSpeed has them, so nothing that reads or
writes them knows of it. A step may return before the pass is taken (``PendingStep``).
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
    """What zerotune relies on, and replaces, of one class of DeepSpeed."""

    owner: str
    """Dotted name of the class."""
    relied_on: tuple[str, ...] = ()
    """Attributes beyond the documented interface, without which nothing trains."""
    replaced: tuple[str, ...] = ()
    """Methods of which zerotune does the work, or a part of it, if they are those it knows."""

    @property
    def missing(self) -> list[str]:
        """What is relied on and not there, by dotted name."""
        return [f"{self.owner}.{name}" for name in self.relied_on if not hasattr(self._kind, name)]

    @property
    def digests(self) -> dict[str, str | None]:
        """By dotted name of each replaced method: SHA-256 of its source, without indentation.

        ``None`` where there is none to read.
        """
        return {f"{self.owner}.{method}": self._digest(method) for method in self.replaced}

    def changed(self) -> str | None:
        """Why what was read is not what is installed; ``None``: it is."""
        for name, digest in self.digests.items():
            method = name.rpartition(".")[2]
            if digest is None:
                return f"the source of DeepSpeed's {method} cannot be read, so it may do more"
            if digest not in tested_sources().get(name, {}):
                return f"DeepSpeed's {method} is not that of a release that was tested"
        return None

    @property
    def _kind(self) -> Any:
        module, _, name = self.owner.rpartition(".")
        return getattr(importlib.import_module(module), name, None)

    def _digest(self, method: str) -> str | None:
        function = getattr(self._kind, method, None)
        if "instrument_w_nvtx" in getattr(function, "__qualname__", ""):
            # DeepSpeed's decorator for profilers, the same source around every method.
            function = inspect.getclosurevars(cast(Any, function)).nonlocals["func"]
        return None if function is None else source_digest(function)


@functools.cache
def source_digest(function: Any) -> str | None:
    """SHA-256 of a function's source, read once; ``None`` where there is none to read."""
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        return None
    lines = (line.strip() for line in source.splitlines())
    return hashlib.sha256("\n".join(line for line in lines if line).encode()).hexdigest()


@functools.cache
def tested_sources() -> dict[str, dict[str, list[str]]]:
    """By dotted name and digest: the releases that have it."""
    file = importlib.resources.files("zerotune") / "backend" / "data" / "sources.json"
    content: dict[str, dict[str, list[str]]] = json.loads(file.read_text(encoding="utf-8"))
    return content


class OptimizerWrapper(ABC):
    """The optimizer of a ``deepspeed.DeepSpeedEngine``, with all that its kind is asked."""

    upstream: ClassVar[tuple[Upstream, ...]] = ()
    """What is relied on and replaced."""
    step_kind: ClassVar[type[HostStep] | None] = None
    """What can take the steps in one pass, if anything does."""
    scaler_name: ClassVar[str] = "loss_scaler"
    """Attribute that has the loss scale."""
    skips_overflow: ClassVar[bool] = True
    """Whether DeepSpeed looks at the gradients before it steps."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.raw: Any = engine.optimizer
        """DeepSpeed's own object."""
        self.layout = self._find_layout()
        """Where the master weights are."""

    @property
    def inner(self) -> Any:
        """The optimizer that steps, out of its wrapper."""
        return self.raw.optimizer

    @abstractmethod
    def _find_layout(self) -> MasterLayout:
        """Where this kind keeps the master weights."""

    @property
    @abstractmethod
    def members(self) -> Sequence[Sequence[torch.Tensor]]:
        """The model's parameters, by group of the inner optimizer."""

    @property
    def devices(self) -> tuple[str, str]:
        """Where optimizer and parameters are offloaded to, as a plan says it."""
        return "none", "none"

    @property
    def scaler(self) -> Any:
        """What has the loss scale, if anything does."""
        return getattr(self.raw, self.scaler_name, None)

    @abstractmethod
    def drop_gradients(self) -> None:
        """Forget the gradients of the window under way, also in buffers that outlive it.

        It is what the wrapper does itself when a loss scale overflows, its only way to drop a
        step. A parameter without a gradient in the next window would otherwise be stepped with
        that of the dropped one.
        """

    def correct(self) -> tuple[Decision, ...]:
        """Correct what starts or runs wrong in an engine that anybody has initialized."""
        return ()

    def improve(self) -> tuple[Decision, ...]:
        """Correct what only an engine of ours needs, before anything replaces its step."""
        return ()

    def refused(self) -> EngineError | None:
        """What a bare ``AssertionError`` of a backward pass means, if that is known."""
        return None

    def note_edits(self) -> None:
        """Have the layout know of master weights that are written through DeepSpeed itself.

        ``safe_set_full_fp32_param`` and the like write them; the model follows with the next step.
        """
        for owner in self._editors:
            for name in ("set_full_hp_param", "set_local_hp_param"):
                if (setter := getattr(owner, name, None)) is not None:
                    # Not through this object: parameters would keep the engine.
                    setattr(owner, name, functools.partial(_edit, self.layout, setter))

    @property
    def _editors(self) -> Iterable[Any]:
        """What has methods that write master weights."""
        return ()

    def take_over_step(
        self, plan: ResolvedPlan, group: ProcessGroup
    ) -> tuple[HostStep | None, tuple[Decision, ...]]:
        """Have an Adam in host memory stepped in one pass, where that is possible. Collective.

        Returns:
            What takes the steps now, ``None`` where DeepSpeed does, and what was decided: nothing
            where the optimizer is neither a DeepSpeedCPUAdam nor an AdamWBF16States.
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
            reason="clipping, Adam and the cast of the weights go over host memory once, not once "
            "each, and gradients stay in the dtype they arrive in; the same bits",
        )
        if step is None:
            return None, decided
        dtype = step.gradient_dtype
        if (plan.gradient_accumulation_steps or 1) > 1:
            wide = '; {"data_types": {"grad_accum_dtype": "fp32"}} adds up in fp32'
            decided += (
                Decision(
                    key=GRADIENTS_KEY,
                    before=None,
                    after=str(dtype).removeprefix("torch."),
                    reason="micro batches are added up in it"
                    + ("" if dtype == torch.float32 else wide),
                ),
            )
        return step, decided

    def _obstacle(self, kind: type[HostStep]) -> str | None:
        """Why DeepSpeed's own step stays, if so."""
        for name in (
            "has_moe_layers",
            "zenflow",
            "torch_autocast_gradscaler",
            "low_precision_master_weights_and_grads",
            "use_muon",
        ):
            if getattr(self.raw, name, None):
                return f"with {name} DeepSpeed's step does more"
        if not getattr(self.inner, "fp32_optimizer_states", True):
            return "the moments are not fp32"
        if (changed := kind.upstream.changed()) is not None:
            return changed
        return None if self.devices[0] != "none" else "the optimizer is not in host memory"


def _edit(layout: MasterLayout, setter: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    layout.edited = True
    return setter(*args, **kwargs)


class HostStep(DeferredSteps):
    """Takes the steps of a ZeRO optimizer whose inner one is an Adam in host memory.

    Args:
        wrapper: DeepSpeed's ZeRO optimizer.
        base: As for ``DeferredSteps``.
    """

    upstream: ClassVar[Upstream]
    """Methods of the wrapper whose work is done here."""

    settles_first: ClassVar[tuple[str, ...]] = ()
    """Methods of the wrapper that read or write weights or states."""

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
        return "groups with betas of their own are stepped in order" if len(betas) > 1 else None

    def install(self) -> None:
        """Replace gradient copy, norm and step of this wrapper alone."""
        setattr(self._wrapper, UNDER_WAY, self)
        for name in self.settles_first:
            setattr(self._wrapper, name, self._settling(getattr(self._wrapper, name)))

    @property
    def gradient_dtype(self) -> torch.dtype:
        """In which gradients are kept and added up."""
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
        """Whether the pass itself can write the weights where the model has them."""
        return target.device.type == "cpu" and self._op.knows(target.dtype)

    @property
    @abstractmethod
    def _slabs(self) -> Sequence[Any]:
        """The fp32 weights, as the optimizer's groups hold them."""

    def _steps(self, index: int) -> bool:  # noqa: ARG002 - of the slab
        """Whether that slab is in host memory, or comes there, and is stepped here."""
        return True

    def _swaps(self, index: int) -> bool:  # noqa: ARG002 - of the slab
        """Whether DeepSpeed moves that slab and its gradient to NVMe and back."""
        return False

    @abstractmethod
    def _members(self) -> Iterator[tuple[Any, torch.Tensor]]:
        """Parameters with their parts of the gradient buffers."""

    def _shrink_gradients(self) -> None:
        """Replace buffers for gradients by ones of the dtype they arrive in."""
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
                # torch keeps page-locked blocks, so another one would come on top of this one.
                slab.grad = wide.zero_().view(-1).view(dtype)[: wide.numel()].view(shape)
                continue
            del wide
            empty = torch.zeros(shape, dtype=dtype)
            # As DeepSpeed does it: torch may round the block up to twice its size.
            slab.grad = self._accelerator.pin_memory(empty) if pinned else empty

    def _norm_of(self, gradient: torch.Tensor, *, into: torch.Tensor | None = None) -> torch.Tensor:
        """L2 norm of a flat gradient, which is copied on the way where it is in host memory."""
        if gradient.device.type != "cpu" or not self._op.knows(gradient.dtype):
            # Kept on the device: all norms are read at once when the step begins.
            norm: torch.Tensor = torch.linalg.vector_norm(gradient, dtype=torch.float32)
            return norm
        total = self._op.take(gradient, into=into)
        return torch.tensor(math.sqrt(total), dtype=torch.float64)

    def _forget_unused(self) -> None:
        """Zero gradients left from an earlier window."""
        for parameter, gradient in self._members():
            if self._wrapper.get_param_id(parameter) not in self._wrapper.norm_for_param_grads:
                gradient.zero_()


def read_at_once(norms: dict[Any, torch.Tensor]) -> None:
    """Bring tensors of one number each to the host, with one wait per device.

    Args:
        norms: Replaced in place by fp64 on the CPU, the same numbers.
    """
    for device in {norm.device for norm in norms.values()}:
        there = [key for key, norm in norms.items() if norm.device == device]
        read = torch.stack([norms[key].double().reshape(()) for key in there]).cpu()
        norms.update(zip(there, read.unbind(), strict=True))


def clear(tensors: Iterable[Any]) -> None:
    """Zero those that there are."""
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            tensor.zero_()
