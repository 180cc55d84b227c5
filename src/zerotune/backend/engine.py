"""``Engine``: the common interface of all training engines."""

from __future__ import annotations

import gc
import weakref
from abc import abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Final

import attrs
from typing_extensions import override

from zerotune._util.closing import Closing
from zerotune._util.modules import ModelParts
from zerotune._util.proc import return_freed_memory
from zerotune.backend.step_state import Stage, StepState, fault_of, surely, uninterrupted
from zerotune.errors import EngineError, StepOrderError, ZeroTuneError
from zerotune.plan.text.plan import resolved_data, resolved_page

if TYPE_CHECKING:
    import torch

    from zerotune.backend.checks import Checks
    from zerotune.backend.distributed import ProcessGroup
    from zerotune.backend.master_weights import MasterWeights
    from zerotune.decisions import Decision
    from zerotune.plan.plan import ResolvedPlan

GONE: Final = "_zerotune_gone"
"""Name of the attribute that stores why a module lost its weights when its engine closed."""


@attrs.frozen(kw_only=True)
class StepOutcome:
    """Result of one call of ``Engine.step``."""

    applied: bool
    """Whether the weights changed; true at a boundary unless the step was skipped."""
    boundary: bool
    """Whether the call ended an accumulation window of ``gradient_accumulation_steps`` calls."""
    grad_norm: float | None = None
    """Global L2 norm of the unclipped gradient; ``None`` if the engine does not compute it."""


@attrs.frozen(kw_only=True)
class EngineState:
    """State of an engine, without weights and optimizer states."""

    global_step: int
    """Number of optimizer steps, including skipped ones."""
    micro_step: int
    """Number of micro batches."""
    skipped_steps: int
    """Number of steps skipped because of loss scale overflow, non-finite gradients or
    ``discard``."""
    scheduler: dict[str, Any]
    loss_scaler: dict[str, Any]


class Engine(Closing):
    """A model with its optimizer, running under a resolved plan.

    The caller writes the training loop::

        loss = objective(engine, batch)
        engine.backward(loss)
        outcome = engine.step()

    ``backward`` divides the loss by the accumulation steps. Call ``step`` once per micro batch; it
    updates the weights at the end of an accumulation window. ``close`` releases the buffers and
    then closes ``resources``, which include the engine's process group.

    Each method asks the ``StepState`` whether it may be called now. A subclass sets the private
    attributes below when it starts, and then verifies the running engine.
    """

    _plan: ResolvedPlan
    _module: torch.nn.Module
    _group: ProcessGroup
    _master_weights: MasterWeights
    _decisions: tuple[Decision, ...] = ()
    _trained: frozenset[int] = frozenset()
    """Ids of the parameters that the optimizer updates."""
    _checked: Sequence[torch.nn.Parameter] = ()
    _others: Sequence[torch.nn.Parameter] = ()
    """All parameters of the model, and those that the optimizer does not update."""
    _guards_outputs: ClassVar[bool] = False
    """Whether other backward passes must not even reach the model's outputs."""

    def __init__(self) -> None:
        super().__init__()
        self._step_state = StepState()

    def __reduce_ex__(self, _protocol: Any) -> Any:
        raise EngineError(
            "an engine cannot be copied or pickled",
            "copy engine.module, or save a checkpoint and start another engine from it",
            "engine",
            type(self).__name__,
        )

    @cached_property
    def _parts(self) -> ModelParts:
        return ModelParts(self._module)

    @property
    def plan(self) -> ResolvedPlan:
        """The plan that this engine runs."""
        return self._plan

    @property
    def module(self) -> torch.nn.Module:
        """The user's model without wrappers; at stage 3, partitioned between forward passes."""
        return self._module

    @property
    def group(self) -> ProcessGroup:
        """The process group of all ranks."""
        return self._group

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Device that batches must be on."""

    @property
    def steps_in_backward(self) -> bool:
        """Whether weights already change during the last backward pass of a window."""
        return False

    @property
    def _sums_in_place(self) -> bool:
        """Whether the parameters' ``grad`` holds the gradients of an accumulation window."""
        return False

    @property
    def _without_grad(self) -> Sequence[torch.Tensor]:
        """The optimizer's tensors, if their ``grad`` is never used."""
        return ()

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Dtype of the weights and of floating-point inputs in the forward pass.

        The plain engine keeps the weights in fp32 and runs the forward pass under autocast.
        """

    @property
    def master_weights(self) -> MasterWeights:
        """The fp32 weights that the optimizer updates, and the optimizer's states."""
        return self._master_weights

    @property
    @abstractmethod
    def lr(self) -> float:
        """Learning rate of the first group for the next optimizer step."""

    @property
    @abstractmethod
    def state(self) -> EngineState:
        """Counters, scheduler state and loss scale, for a checkpoint."""

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Automatic choices of the plan and of this engine."""
        return (*self._plan.decisions, *self._engine_decisions)

    @property
    def _engine_decisions(self) -> tuple[Decision, ...]:
        return self._decisions

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward pass.

        At stage 3, weights are gathered layer by layer; with streamed weights, each unit is
        uploaded before its module is called. The plain engine uses autocast.
        """
        import torch

        # Checkpointing repeats a call within the backward pass.
        if torch._C._current_graph_task_id() != -1:
            return self._forward(*args, **kwargs)
        with self.group.naming("training"), uninterrupted():
            self._step_state.lift_seals()
            try:
                if not torch.is_grad_enabled():
                    return self._forward(*args, **kwargs)
                self._begin_forward()
                outputs = self._forward(*args, **kwargs)
                self._end_forward(outputs)
                return outputs
            finally:
                self._step_state.seal_gradients()

    def _begin_forward(self) -> None:
        self._step_state.ask("forward")
        self._check_before_forward()
        if self._needs_own_forward:
            self.group.note_pass(1)

    def _end_forward(self, outputs: Any) -> None:
        if self._needs_own_forward:
            self.group.note_pass(0)
        self._step_state.mark(outputs, guarded=self._guards_outputs)

    def backward(self, loss: torch.Tensor) -> None:
        """Back-propagate the loss of one micro batch, divided by the accumulation steps.

        If the host engine streams weights and does not clip gradients, the last backward pass of an
        accumulation window updates weights. If such a pass fails after some weights were updated,
        the engine raises errors until a checkpoint is loaded.

        Args:
            loss: Scalar loss.

        Raises:
            StepOrderError: ``step`` has not been called since the last backward pass, the last pass
                failed, or weights have changed since the loss was computed.
            EngineError: The loss is not a scalar tensor with a graph.
        """
        import torch

        self._step_state.ask("backward")
        if (fault := fault_of(loss)) is not None:
            reason, value, fix = fault
            raise EngineError(f"the loss {reason}", fix, "engine.backward", value)
        if not self._step_state.check_graph(loss):
            self._check_bypassed()
        self._check_not_averaged("backward")
        self._check_before_backward()
        self.group.begin_pass()
        passing = self._step_state.passing(self._after_failure)
        # As in torch, also within torch.no_grad(); states must not become inference tensors.
        normal = torch.inference_mode(mode=False)
        with self.group.naming("training"), uninterrupted(), normal, passing:
            self._backward(loss)

    def step(self) -> StepOutcome:
        """Finish a micro batch; update the weights if it is the last of its accumulation window.

        If a gradient is not finite, the step is skipped, even where DeepSpeed would not skip it. If
        some streamed weights were already updated in the backward pass, ``applied`` is true, the
        norm is infinite, and the engine raises errors until a checkpoint is loaded.

        Raises:
            StepOrderError: ``backward`` has not been called since the last step, or it failed.
        """
        import torch

        self._step_state.ask("step")
        normal = torch.inference_mode(mode=False)
        with self.group.naming("training"), uninterrupted(), normal:
            try:
                outcome = self._step()
            except ZeroTuneError:
                if self._step_state.stage is Stage.BACKWARD:
                    self._step_state.seal_gradients()
                raise
            except BaseException as error:
                if self._step_state.stage is not Stage.SPOILED:
                    self._step_state.fail(Stage.BROKEN, error)
                raise
            # Before an interrupt is delivered.
            self._step_state.end_micro_batch(boundary=outcome.boundary, applied=outcome.applied)
        return outcome

    def discard(self) -> None:
        """Drop an accumulation window's gradients; call this instead of the window's last ``step``.

        Weights, optimizer, schedule and loss scale do not change. The window counts as a skipped
        step. Collective: every rank must drop the same window.

        Raises:
            StepOrderError: A failed step or backward pass has updated weights or cannot be undone
                by DeepSpeed, or the backward pass has begun the optimizer step.
        """
        self._step_state.ask("discard")
        with uninterrupted():
            try:
                self._discard()
            except StepOrderError:
                self._step_state.seal_gradients()
                raise
            self._step_state.reset()

    def load_state(self, state: EngineState) -> None:
        """Restore counters, scheduler (including the learning rate) and loss scale from ``state``.

        Gradients of an unfinished accumulation window are dropped.

        Raises:
            StepOrderError: A failed backward pass has updated weights or cannot be undone by
                DeepSpeed.
        """
        self._step_state.ask("load_state")
        with uninterrupted():
            self._load_state(state)
            if self._step_state.stage is not Stage.REPLACED:
                self._step_state.reset(loaded=True)

    def replacing(self) -> AbstractContextManager[None]:
        """Replace weights, optimizer states and ``state`` inside the block.

        Until the block ends without an error, the engine takes no step.

        Raises:
            StepOrderError: A failed backward pass cannot be undone by DeepSpeed.
        """
        return self._step_state.replacing()

    @abstractmethod
    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward pass."""

    @abstractmethod
    def _backward(self, loss: torch.Tensor) -> None:
        """Back-propagate a loss."""

    @abstractmethod
    def _step(self) -> StepOutcome:
        """Finish a micro batch."""

    @abstractmethod
    def _discard(self) -> None:
        """Drop the window's gradients, and count a skipped step."""

    @abstractmethod
    def _load_state(self, state: EngineState) -> None:
        """Drop the window's gradients, and restore a state."""

    def _after_failure(self) -> Stage:
        """The stage after a failed backward pass."""
        return Stage.BROKEN

    def _check_before_backward(self) -> None:
        """Check what must hold before a backward pass that updates weights."""

    @property
    def _needs_own_forward(self) -> bool:
        """Whether gradients are wrong if ``module`` was called instead of this engine.

        The ranks may then wait for each other in a forward pass.
        """
        return False

    def _check_bypassed(self) -> None:
        """Check what a forward pass would have checked if it had gone through this engine."""
        if self._needs_own_forward:
            raise StepOrderError(
                "the loss does not come from a call of this engine, so gradients would not be "
                "summed over the ranks or the accumulation window",
                "call engine(...) instead of engine.module(...) or a part of the model",
                "engine.backward",
            )
        self._check_before_forward()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Inside the block, evaluate without gradients; afterwards, restore the previous mode."""
        import torch

        training = self._module.training
        try:
            with uninterrupted():
                self._train(False)
            with torch.no_grad():
                yield
        finally:
            surely(lambda: self._train(training))

    def explain(self, *further: Decision) -> str:
        """Describe the running engine, every automatic choice, and all verified settings.

        Args:
            further: Additional decisions to show, such as the trainer's.
        """
        decisions = (*self._plan.decisions, *self._engine_decisions, *further)
        page = resolved_page(resolved_data(self._plan, decisions))
        return "\n".join(part for part in (page.text(), self._checks().render()) if part)

    def _train(self, mode: bool) -> None:
        self._module.train(mode)

    def _check_before_step(self, step: int) -> None:
        """Check that no EMA is swapped in, and that a sample of weights is the optimizer's."""
        self._check_not_averaged("step")
        self._master_weights.check_model(step)

    def _check_not_averaged(self, call: str) -> None:
        if any(ema.swapped for ema in self._master_weights.emas):
            raise StepOrderError(
                "the model holds the weights of an EMA, so the step would be lost",
                "leave the block of ema.swapped_in() before training goes on",
                f"engine.{call}",
            )

    def _check_before_forward(self) -> None:
        """Check that the optimizer updates every parameter that requires a gradient."""
        self._parts.refresh()
        if self._checked is not self._parts.parameters:
            self._checked = self._parts.parameters
            self._others = [each for each in self._checked if id(each) not in self._trained]
        for parameter in self._others:
            if parameter.requires_grad:
                names = {id(each): name for name, each in self._module.named_parameters()}
                raise EngineError(
                    "this parameter requires a gradient, but was frozen or absent when the engine "
                    "started, so it would not be trained",
                    "add or unfreeze the parameter before the engine starts",
                    f"model.{names[id(parameter)]}",
                    "requires_grad=True",
                )

    @abstractmethod
    def _checks(self) -> Checks:
        """Comparison of the running engine with the plan."""


class StartedEngine(Engine):
    """An engine whose constructor starts it, and releases everything if the start fails."""

    _open: ClassVar[weakref.WeakSet[StartedEngine]] = weakref.WeakSet()
    """All started engines that are still referenced."""

    def __init__(
        self, *, model: torch.nn.Module, plan: ResolvedPlan, timeout_s: float = 600.0
    ) -> None:
        super().__init__()
        with self._starting():
            self._claim(model)
            for layer in model.modules():
                # When a CPU evaluates, bitsandbytes would repack 4-bit weights, and it cannot train
                # with repacked weights.
                if "support_avx512bf16_for_cpu" in vars(layer):
                    vars(layer)["support_avx512bf16_for_cpu"] = False
            self._start(model, plan, timeout_s)
            trained = [p for p in model.parameters() if p.requires_grad]
            self._step_state.watch(
                trained, masters=self._without_grad, sums_in_place=self._sums_in_place
            )
        self.resources.callback(self._step_state.unwatch)
        self._master_weights.watch()
        self.resources.callback(self._master_weights.close)
        # The weights have been copied to their final place; at stage 3, copies one by one, in
        # blocks that training would not reuse.
        return_freed_memory()

    @abstractmethod
    def _start(self, model: torch.nn.Module, plan: ResolvedPlan, timeout_s: float) -> None:
        """Start the engine, and verify that it matches the plan."""

    def _claim(self, model: torch.nn.Module) -> None:
        """Reserve a model's parameters for this engine while it is open."""
        named = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
        if self.trains(named):
            gc.collect()  # Collect engines that were dropped without being closed.
        if others := self.trains(named):
            raise EngineError(
                "another open engine already trains this parameter",
                "close the first trainer or engine (call trainer.close(), or use a with "
                "block), or train a copy made before the first engine started",
                "model",
                f"{type(model).__name__}.{named[next(iter(others))]}",
            )
        self._trained = frozenset(named)
        self._open.add(self)

    @classmethod
    def trains(cls, parameters: Collection[int]) -> set[int]:
        """Return the ids of those ``parameters`` that an open engine trains."""
        claims = [each._trained for each in cls._open if not each._closed]
        return set().union(*claims).intersection(parameters)


class CountingEngine(StartedEngine):
    """A started engine that counts its own steps."""

    _global_step = _micro_step = _skipped_steps = 0
    _device: torch.device
    _optimizer: Any
    _scheduler: Any

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of the master weights, whose groups hold the learning rates."""
        optimizer: torch.optim.Optimizer = self._optimizer
        return optimizer

    @property
    @override
    def device(self) -> torch.device:
        return self._device

    @property
    @override
    def lr(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])

    @property
    @override
    def state(self) -> EngineState:
        return EngineState(
            global_step=self._global_step,
            micro_step=self._micro_step,
            skipped_steps=self._skipped_steps,
            scheduler={} if self._scheduler is None else dict(self._scheduler.state_dict()),
            loss_scaler=self._scaler_state,
        )

    @property
    @abstractmethod
    def _scaler_state(self) -> dict[str, Any]:
        """State of the loss scale, without what the plan sets; empty if there is none."""

    @property
    def _at_boundary(self) -> bool:
        """Whether the current micro batch is the last of its accumulation window."""
        return (self._micro_step + 1) % self._plan.gradient_accumulation_steps == 0

    def end_window(self) -> None:
        """Make the current micro batch the last of its accumulation window.

        Call ``end_window`` before the last forward pass of data that do not fill a window.
        """
        count = self._plan.gradient_accumulation_steps
        self._micro_step += count - 1 - self._micro_step % count

    def _count_discarded(self) -> None:
        """Count the current window as a skipped step."""
        count = self._plan.gradient_accumulation_steps
        self._micro_step = (self._micro_step // count + 1) * count
        self._global_step += 1
        self._skipped_steps += 1

    def _count_from(self, state: EngineState) -> None:
        self._global_step = state.global_step
        self._micro_step = state.micro_step
        self._skipped_steps = state.skipped_steps


def check_not_gone(module: torch.nn.Module) -> None:
    """Raise an error if a closed engine could not restore the module's weights.

    Args:
        module: The model to train or use.
    """
    for each in module.modules():
        reason = vars(each).get(GONE)
        if reason is not None:
            raise gone(each, reason)


def gone(module: torch.nn.Module, reason: str) -> EngineError:
    """Return the error for using a module that has lost its weights.

    Args:
        module: The module.
        reason: Why the module's engine could not restore the weights.
    """
    return EngineError(
        f"the stage-3 engine that trained this model is closed, and {reason}",
        "call trainer.export(PATH) or trainer.save(PATH) before closing, and load the model "
        "from that path",
        "model",
        type(module).__name__,
    )
