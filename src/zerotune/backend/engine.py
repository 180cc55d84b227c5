"""``Engine``: what trains, whatever does the work behind it."""

from __future__ import annotations

import functools
import gc
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, Final, ParamSpec, TypeVar

import attrs

from zerotune._util.closing import Closing
from zerotune.errors import EngineError

if TYPE_CHECKING:
    import torch

    from zerotune.backend.checks import Checks
    from zerotune.backend.distributed import ProcessGroup
    from zerotune.backend.master_weights import MasterWeights
    from zerotune.backend.step.deferred import DeferredSteps
    from zerotune.decisions import Decision
    from zerotune.plan.model import ResolvedPlan

GONE: Final = "_zerotune_gone"
"""Attribute of a module whose weights went with its engine: why."""

E = TypeVar("E", bound="Engine")
P = ParamSpec("P")
R = TypeVar("R")


@attrs.frozen(kw_only=True)
class StepOutcome:
    """What one call of ``Engine.step`` did."""

    applied: bool
    """The weights changed: an accumulation boundary, and no overflow of the loss scale."""
    boundary: bool
    """The call closed a group of ``gradient_accumulation_steps`` micro batches."""
    grad_norm: float | None = None
    """Global L2 norm of the unclipped gradient; ``None`` where the engine does not compute it."""


@attrs.frozen(kw_only=True)
class EngineState:
    """Everything of an engine that is not a weight or an optimizer state."""

    global_step: int
    """Optimizer steps taken, skipped ones included."""
    micro_step: int
    """Micro batches seen."""
    skipped_steps: int
    """Steps not applied: the loss scale overflowed, a gradient was not finite, or discarded."""
    scheduler: dict[str, Any]
    loss_scaler: dict[str, Any]


def naming_the_lost(
    method: Callable[Concatenate[E, P], R],
) -> Callable[Concatenate[E, P], R]:
    """A method of an engine in which a lost rank is named, also in a loop of one's own."""

    @functools.wraps(method)
    def named(self: E, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.group.naming("training"):
            return method(self, *args, **kwargs)

    return named


class Engine(Closing):
    """A model with its optimizer, running under a resolved plan.

    The loop is the user's::

        loss = objective(engine, batch)
        engine.backward(loss)
        outcome = engine.step()

    ``backward`` divides by the accumulation steps; ``step`` is called once per micro batch and
    acts on the boundary. ``close`` releases buffers and, if this engine started it, the process
    group; ``resources`` holds what the engine depends on and what ends after it.

    A subclass sets the private attributes below while it starts, and verifies what runs.
    """

    _plan: ResolvedPlan
    _module: torch.nn.Module
    _group: ProcessGroup
    _master_weights: MasterWeights
    _decisions: tuple[Decision, ...] = ()
    _trained: frozenset[int] = frozenset()
    """Ids of the parameters that the optimizer steps."""
    _host_step: DeferredSteps | None = None
    """What takes the steps of an Adam in host memory in one pass, if anything does."""
    _walked: tuple[tuple[str, torch.nn.Parameter], ...] = ()
    """Names and parameters at the latest forward pass: a walk over a U-Net takes 4 ms."""
    _unfinished = False
    """A backward pass began after the last step."""

    @property
    def plan(self) -> ResolvedPlan:
        """The plan this engine was verified against."""
        return self._plan

    @property
    def module(self) -> torch.nn.Module:
        """The user's model, without wrappers; at stage 3 partitioned outside a forward pass."""
        return self._module

    @property
    def group(self) -> ProcessGroup:
        """The processes that train together."""
        return self._group

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where batches must lie."""

    @property
    def steps_in_backward(self) -> bool:
        """Whether the last backward pass of a window changes weights already."""
        return False

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Precision of the weights in the forward pass; floating-point inputs should have it.

        The plain engine keeps weights in fp32, and autocast does the rest.
        """

    @property
    def master_weights(self) -> MasterWeights:
        """The fp32 weights the optimizer updates, and its states."""
        return self._master_weights

    @property
    @abstractmethod
    def lr(self) -> float:
        """Learning rate of the first group for the next optimizer step."""

    @property
    @abstractmethod
    def state(self) -> EngineState:
        """Counters, scheduler and loss scale, to be saved."""

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Automatic choices of the plan and of this engine."""
        return (*self._plan.decisions, *self._engine_decisions)

    @property
    def _engine_decisions(self) -> tuple[Decision, ...]:
        later = () if self._host_step is None else self._host_step.decisions
        return (*self._decisions, *later)

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward pass.

        At stage 3, weights are gathered layer by layer; the plain engine runs it under autocast.
        """

    @abstractmethod
    def backward(self, loss: torch.Tensor) -> None:
        """Back-propagate a scalar loss of one micro batch, divided by the accumulation steps."""

    @abstractmethod
    def step(self) -> StepOutcome:
        """Close a micro batch; update the weights when it is the last of its group.

        A gradient that is not finite is not applied, also where DeepSpeed would.

        Raises:
            EngineError: No ``backward`` came before it.
        """

    @abstractmethod
    def discard(self) -> None:
        """Drop the accumulation window under way, in place of its last ``step``.

        Its gradients are forgotten; weights, optimizer, schedule and loss scale stay. It counts
        as a skipped step. Collective: every rank must drop the same window.

        Raises:
            EngineError: A backward pass under DeepSpeed has not ended.
        """

    @abstractmethod
    def load_state(self, state: EngineState) -> None:
        """Restore counters, scheduler (with the learning rate it implies) and loss scale.

        Gradients of a micro batch that was never closed, because of an error perhaps, are dropped.
        """

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluation mode without gradients; the earlier mode comes back after."""
        import torch

        training = self._module.training
        self._train(False)
        try:
            with torch.no_grad():
                yield
        finally:
            self._train(training)

    def explain(self, *further: Decision) -> str:
        """Describe what runs, every automatic choice, and which parts were verified.

        Args:
            further: Decisions of what drives the engine, to be shown with its own.
        """
        from zerotune.plan.text import resolved_page

        page = resolved_page(self._plan, (*self._engine_decisions, *further))
        return "\n".join(part for part in (page.text(), self._checks().render()) if part)

    def _train(self, mode: bool) -> None:
        self._module.train(mode)

    def _check_before_step(self, step: int) -> None:
        """Check that the model is what the optimizer steps, and a few weights, others each step."""
        self._check_trained(self._walked or tuple(self._module.named_parameters()))
        self._walked = ()
        self._master_weights.check_model(step)

    def _check_before_forward(self) -> None:
        self._walked = tuple(self._module.named_parameters())
        self._check_trained(self._walked)

    def _check_trained(self, named: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        """Check that the optimizer steps every parameter that wants a gradient."""
        for name, parameter in named:
            if parameter.requires_grad and id(parameter) not in self._trained:
                raise EngineError(
                    "wants a gradient, but was frozen or another one when the engine started, so "
                    "that nothing would train it",
                    key=f"model.{name}",
                    value="requires_grad=True",
                    fix="unfreeze or add it before the engine starts; what was trained from the "
                    "start may be frozen and unfrozen at any time",
                )

    def _check_backward(self) -> None:
        """Check that a backward pass came before a step, or somebody else set gradients."""
        if not self._unfinished and all(p.grad is None for p in self._module.parameters()):
            raise EngineError(
                "no backward pass came before it, so there is nothing to step with",
                key="engine.step",
                fix="call engine.backward(loss) and then engine.step(), once per micro batch",
            )

    @abstractmethod
    def _checks(self) -> Checks:
        """What runs now, compared with the plan."""


class StartedEngine(Engine):
    """An engine that starts what it runs, and releases all of it when that fails."""

    _open: ClassVar[weakref.WeakSet[StartedEngine]] = weakref.WeakSet()
    """All started engines that are still referenced."""

    def __init__(
        self, *, model: torch.nn.Module, plan: ResolvedPlan, timeout_s: float = 600.0
    ) -> None:
        super().__init__()
        with self._starting():
            self._claim(model)
            self._start(model, plan, timeout_s)

    @abstractmethod
    def _start(self, model: torch.nn.Module, plan: ResolvedPlan, timeout_s: float) -> None:
        """Start it, and verify what runs."""

    def _claim(self, model: torch.nn.Module) -> None:
        """Take a model's parameters for this engine, as long as it is open."""
        named = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
        if self._claimed_elsewhere(named):
            gc.collect()  # An engine that was dropped without being closed is none.
        if others := self._claimed_elsewhere(named):
            raise EngineError(
                "is being trained by an engine that is still open",
                key="model",
                value=f"{type(model).__name__}.{named[next(iter(others))]}",
                fix="close the first trainer or engine (trainer.close(), or a with block), or give "
                "this one a copy of the model made before",
            )
        self._trained = frozenset(named)
        self._open.add(self)

    def _claimed_elsewhere(self, named: Mapping[int, str]) -> set[int]:
        claims = [each._trained for each in self._open if not each._closed]
        return named.keys() & set().union(*claims)


class CountingEngine(StartedEngine):
    """A started engine that counts its steps itself."""

    _global_step = _micro_step = _skipped_steps = 0

    @property
    def _at_boundary(self) -> bool:
        """Whether the micro batch under way is the last of its group."""
        return (self._micro_step + 1) % self._plan.gradient_accumulation_steps == 0

    def _count_discarded(self) -> None:
        """Count the window under way as a skipped step."""
        count = self._plan.gradient_accumulation_steps
        self._micro_step = (self._micro_step // count + 1) * count
        self._global_step += 1
        self._skipped_steps += 1

    def _count_from(self, state: EngineState) -> None:
        self._global_step = state.global_step
        self._micro_step = state.micro_step
        self._skipped_steps = state.skipped_steps


def check_not_gone(module: torch.nn.Module) -> None:
    """Refuse a module whose engine was closed and could not restore its weights."""
    for each in module.modules():
        reason = vars(each).get(GONE)
        if reason is not None:
            raise gone(each, reason)


def gone(module: torch.nn.Module, reason: str) -> EngineError:
    """The error for a use of a module without its weights."""
    return EngineError(
        f"the engine that trained it at stage 3 is closed, and {reason}",
        key="model",
        value=type(module).__name__,
        fix="save or export before closing (trainer.export(PATH), trainer.save(PATH)), and load "
        "from there",
    )
