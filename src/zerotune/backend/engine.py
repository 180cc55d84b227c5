"""What trains: one protocol, whatever does the work behind it."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import attrs

if TYPE_CHECKING:
    from types import TracebackType

    import torch

    from zerotune.backend.distributed import ProcessGroup
    from zerotune.backend.master_weights import MasterWeights
    from zerotune.decisions import Decision
    from zerotune.plan.model import ResolvedPlan


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


@runtime_checkable
class Engine(Protocol):
    """A model with its optimizer, running under a resolved plan.

    The loop is the user's::

        loss = objective(engine, batch)
        engine.backward(loss)
        outcome = engine.step()

    ``backward`` divides by the accumulation steps; ``step`` is called once per micro batch and
    acts on the boundary.
    """

    @property
    def plan(self) -> ResolvedPlan:
        """The plan this engine was verified against."""
        ...

    @property
    def module(self) -> torch.nn.Module:
        """The user's model, without wrappers. Its parameters may be partitioned."""
        ...

    @property
    def group(self) -> ProcessGroup:
        """The processes that train together."""
        ...

    @property
    def device(self) -> torch.device:
        """Where batches must lie."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the forward pass; floating-point inputs should have it."""
        ...

    @property
    def master_weights(self) -> MasterWeights:
        """The fp32 weights the optimizer updates, and its states."""
        ...

    @property
    def lr(self) -> float:
        """Learning rate of the first group for the next optimizer step."""
        ...

    @property
    def state(self) -> EngineState:
        """Counters, scheduler and loss scale, to be saved."""
        ...

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Automatic choices of the plan and of this engine."""
        ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward pass."""
        ...

    def backward(self, loss: torch.Tensor) -> None:
        """Back-propagate a scalar loss of one micro batch."""
        ...

    def step(self) -> StepOutcome:
        """Close a micro batch; update the weights when it is the last of its group."""
        ...

    def discard(self) -> None:
        """Drop the accumulation window under way, in place of its last ``step``.

        Its gradients are forgotten; weights, optimizer, schedule and loss scale stay. It counts
        as a skipped step. Collective: every rank must drop the same window.
        """
        ...

    def load_state(self, state: EngineState) -> None:
        """Restore what ``state`` gave."""
        ...

    def evaluating(self) -> AbstractContextManager[None]:
        """A context without gradients and with the model in evaluation mode."""
        ...

    def explain(self) -> str:
        """What runs, verified, with every automatic choice."""
        ...

    @property
    def resources(self) -> ExitStack:
        """What the engine depends on and what ends after it."""
        ...

    def close(self) -> None:
        """Release buffers and, if this engine started it, the process group. May be repeated."""
        ...

    def __enter__(self) -> Engine:
        """The engine itself."""
        ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the engine."""
        ...
