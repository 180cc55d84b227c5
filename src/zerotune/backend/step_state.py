"""``StepState``: where an engine is between two steps, and which calls may come next.

::

    IDLE ── backward ──> BACKWARD ── step, discard ──> IDLE
              │                │
              │ fails          │ fails
              ▼                ▼
            BROKEN ── discard ──> IDLE      no weight has moved
            SPOILED ── replace ──> IDLE     some weights have moved
            REPLACED ── replace ──> IDLE    some weights have been loaded
            LOST                            DeepSpeed or other ranks cannot go on

Forward passes leave the state as it is. An accumulation window is open from its first backward pass
to its last step. The state also knows which graphs are older than the newest weights, and notices
backward passes that did not go through the engine.
"""

from __future__ import annotations

import enum
import functools
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, cast

from zerotune.errors import StepOrderError

if TYPE_CHECKING:
    import torch

_MARK: Final = "zerotune"
"""Key under which a graph's node stores the state and version of the weights that it used."""


class Stage(enum.Enum):
    """What has happened since the last step."""

    IDLE = "no backward pass has been run since the last step"
    BACKWARD = "engine.backward was called, but engine.step was not called after it"
    BROKEN = "a backward pass or a step failed, so the accumulation window's gradients are partial"
    SPOILED = (
        "only some weights have been updated: after updates had begun, the step or the backward "
        "pass failed, or computed a gradient that is not finite"
    )
    REPLACED = "a checkpoint was loaded only in part"
    LOST = "a backward pass failed and left partially reduced gradients, which cannot be dropped"


_LEGAL: Final = {
    Stage.IDLE: {"forward", "backward", "discard", "load_state", "replace", "read"},
    Stage.BACKWARD: {"forward", "step", "discard", "load_state", "replace", "read"},
    Stage.BROKEN: {"discard", "load_state", "replace", "read"},
    Stage.SPOILED: {"replace"},
    Stage.REPLACED: {"load_state", "replace"},
    Stage.LOST: {"read"},
}
_NEXT: Final = {
    Stage.IDLE: "for every micro batch, call engine.backward(loss) and then engine.step()",
    Stage.BACKWARD: "call engine.step() after every engine.backward(loss), also within an "
    "accumulation window; add several losses of one micro batch before engine.backward; to drop "
    "the gradients, call engine.discard()",
    Stage.BROKEN: "call engine.discard(), which drops the window's gradients, and go on with the "
    "next batch",
    Stage.SPOILED: "resume from the last checkpoint; to avoid this, enable gradient_clipping, so "
    "that no weight is updated before all gradients are known",
    Stage.REPLACED: "load a checkpoint",
    Stage.LOST: "create a new engine, and resume from the last checkpoint",
}


class StepState:
    """State of an engine between two steps; refuses calls that are out of order."""

    def __init__(self) -> None:
        self.stage = Stage.IDLE
        self.is_open = False
        """Whether the current accumulation window has gradients."""
        self.came: set[int] = set()
        """Ids of the watched parameters with a gradient from the last backward pass."""
        self.came_before: set[int] = set()
        """Ids of those with a gradient from earlier passes of the window."""
        self._version = 0
        self._node = 0
        """Number that torch gave to the last node of a graph before the newest weights."""
        self._watched: frozenset[int] = frozenset()
        self._is_passing = False
        self._why = ""
        self._hooks: list[Any] = []
        self._sums_in_place = True
        self._parameters: Sequence[torch.Tensor] = ()
        self._masters: Sequence[torch.Tensor] = ()
        self._elsewhere: Sequence[torch.Tensor] = ()
        """Tensors whose ``grad`` must not be used until the window ends."""
        self._is_sealed = False
        self._is_touched = False
        """Whether other code has changed a gradient that is elsewhere."""
        self._stand_ins: dict[Any, Any] = {}
        """What is in ``grad`` for gradients that are elsewhere, by shape, dtype and device."""

    def ask(self, call: str) -> None:
        """Check that a call may come next.

        Args:
            call: ``"forward"``, ``"backward"``, ``"step"``, ``"discard"``, ``"load_state"``,
                ``"replace"`` (of weights and states) or ``"read"``.

        Raises:
            StepOrderError: Another call must come first.
        """
        if call not in _LEGAL[self.stage]:
            raise StepOrderError(self.stage.value + self._why, _NEXT[self.stage], f"engine.{call}")
        if call not in ("forward", "backward", "read"):
            self._unseal(check=call == "step")

    @contextmanager
    def passing(self, after_failure: Callable[[], Stage]) -> Iterator[None]:
        """Run the engine's backward pass inside the block.

        Args:
            after_failure: Function that returns the stage to enter if the pass fails.
        """
        self._unseal(check=True)
        self.came_before |= self.came
        self.came, self._elsewhere = set(), ()
        self._is_passing = self.is_open = True
        try:
            yield
        except BaseException as error:
            self.fail(after_failure(), error)
            raise
        finally:
            self._is_passing = False
        self.stage = Stage.BACKWARD
        self._elsewhere = self._find_elsewhere()
        self.seal_gradients()

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Update weights inside the block; after an error, some of them may be updated."""
        try:
            yield
        except BaseException as error:
            self.fail(Stage.SPOILED, error)
            raise

    def fail(self, stage: Stage, error: BaseException | None = None) -> None:
        """Enter a stage in which no further step may be taken.

        Args:
            stage: The stage.
            error: The cause.
        """
        self.stage = stage
        self._why = "" if error is None else f" ({type(error).__name__}: {str(error)[:300]})"

    def end_micro_batch(self, *, boundary: bool, applied: bool) -> None:
        """Record that ``step`` has returned.

        Args:
            boundary: Whether the accumulation window has ended.
            applied: Whether the weights have changed.
        """
        self._unseal(check=False)
        if applied:
            self._renew()
        self.is_open = self.is_open and not boundary
        if boundary:
            self._forget()
        elif self.is_open:
            self.seal_gradients()
        if self.stage is Stage.BACKWARD:
            self.stage = Stage.IDLE

    def reset(self, *, loaded: bool = False) -> None:
        """Record that the window's gradients have been dropped.

        Args:
            loaded: Whether the weights have been replaced too.
        """
        self.stage, self.is_open, self._why = Stage.IDLE, False, ""
        if loaded:
            self._renew()
        self._forget()

    def _renew(self) -> None:
        """Make all graphs that exist too old for a backward pass."""
        import torch

        self._version += 1
        with torch.inference_mode(mode=False):
            newest: Any = torch.zeros((), requires_grad=True).neg().grad_fn
        self._node = newest._sequence_nr()

    def _forget(self) -> None:
        self.came, self.came_before, self._elsewhere = set(), set(), ()

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """Replace weights and states inside the block; without its end, no step can be taken."""
        self.ask("replace")
        with uninterrupted():
            self.fail(Stage.REPLACED)
            yield
            self.reset(loaded=True)

    # -- Graphs.

    def mark(self, outputs: Any, *, guarded: bool) -> None:
        """Record which weights a forward pass has used.

        Args:
            outputs: The outputs of the pass, in any nested structure.
            guarded: Whether to refuse every backward pass through the outputs that does not go
                through the engine.
        """
        import torch
        from torch.utils._pytree import tree_leaves

        # Models may return objects that torch does not take apart.
        leaves = [x for leaf in tree_leaves(outputs) for x in (leaf, *tree_leaves(_fields(leaf)))]
        for tensor in (cast(Any, leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)):
            if tensor.grad_fn is not None:
                tensor.grad_fn.metadata[_MARK] = self, self._version
                if guarded:
                    hook = tensor.register_hook(self._check_passing)
                    # Before DeepSpeed's hook, which prepares its optimizer for the pass.
                    _call_first(hook, tensor._backward_hooks)

    def check_graph(self, loss: torch.Tensor) -> bool:
        """Check that no weight has changed since the forward passes that a loss comes from.

        Args:
            loss: The loss.

        Returns:
            Whether the loss comes from an output of the engine.

        Raises:
            StepOrderError: The graph is older than the last step.
        """
        seen, ahead, is_own = set(), [loss.grad_fn], False
        while ahead:
            node: Any = ahead.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            state, version = node.metadata.get(_MARK, (None, 0))
            old = state is not None and version != state._version
            if state is self:
                is_own = True
            else:
                # A part of the model was called, or a weight is used outside the model.
                before = [next_node for next_node, _ in node.next_functions]
                ahead.extend(before)
                old |= node._sequence_nr() < self._node and any(map(self._adds_to_weight, before))
            if old:
                raise StepOrderError(
                    "the loss was computed before the last engine.step(), with weights that have "
                    "changed since",
                    "call the engine again on this batch, and pass the new loss; run forward "
                    "pass, engine.backward and engine.step of a micro batch before the next one",
                    "engine.backward",
                )
        return is_own

    def _adds_to_weight(self, node: Any) -> bool:
        return id(getattr(node, "variable", None)) in self._watched

    def watch(
        self,
        parameters: Sequence[torch.Tensor],
        *,
        masters: Sequence[torch.Tensor] = (),
        sums_in_place: bool,
    ) -> None:
        """Drop gradients of parameters that come from other backward passes, with an error.

        Args:
            parameters: The trained parameters.
            masters: Tensors of the optimizer whose ``grad`` is never used.
            sums_in_place: Whether ``grad`` holds the gradients of the accumulation window, which
                are then dropped too.
        """
        self._sums_in_place, self._masters = sums_in_place, masters
        self._parameters, self._watched = parameters, frozenset(map(id, parameters))
        for each in parameters:
            hook = each.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]
            # Before the engine's own hooks, which take the gradient.
            _call_first(hook, cast(Any, each)._post_accumulate_grad_hooks)
            self._hooks.append(hook)

    def unwatch(self) -> None:
        """Remove the hooks that ``watch`` has registered."""
        self._unseal(check=False)
        for hook in self._hooks:
            hook.remove()

    def _find_elsewhere(self) -> Sequence[torch.Tensor]:
        """Tensors whose ``grad`` must not be used, after a backward pass."""
        import torch

        # Sums in place are moved, if at all, by the pass itself; other code may clear older ones.
        came = self.came if self._sums_in_place else self.came | self.came_before
        with torch._C.DisableTorchFunctionSubclass():
            elsewhere = [
                p
                for p in self._parameters
                # DeepSpeed leaves gradients without elements where autograd puts them.
                if p.grad is None and id(p) in came and (getattr(p, "ds_numel", None) or p.numel())
            ]
        return [*elsewhere, *self._masters] if elsewhere else ()

    def seal_gradients(self) -> None:
        """Let other code notice that the gradients are not in ``parameter.grad``."""
        import torch

        if self._is_sealed:
            return
        self._is_sealed = bool(self._elsewhere)
        with torch._C.DisableTorchFunctionSubclass():
            for each in self._elsewhere:
                like = each.shape, each.dtype, each.device
                if like not in self._stand_ins:
                    self._stand_ins[like] = _stand_in(*like)
                each.grad = self._stand_ins[like]

    def lift_seals(self) -> None:
        """Empty ``parameter.grad``, which a compiler would look at, until ``seal_gradients``."""
        import torch

        if not self._is_sealed:
            return
        self._is_sealed = False
        kind = _gradient_elsewhere()
        with torch._C.DisableTorchFunctionSubclass():
            for each in self._elsewhere:
                self._is_touched |= type(each.grad) is not kind
                each.grad = None
            grads = (each.grad for each in self._parameters)
            self._is_touched |= any(grad is not None and grad.numel() for grad in grads)

    def _unseal(self, *, check: bool) -> None:
        self.lift_seals()
        is_touched, self._is_touched = self._is_touched, False
        if check and is_touched:
            # The next change is refused too.
            self.seal_gradients()
            raise _elsewhere()

    def _accumulated(self, parameter: torch.Tensor) -> None:
        if self._is_passing:
            self.came.add(id(parameter))
        else:
            import torch

            with torch._C.DisableTorchFunctionSubclass():
                parameter.grad = None
            error = _foreign()
            if self._sums_in_place and self.is_open and self.stage is not Stage.LOST:
                self.fail(Stage.BROKEN, error)
            raise error

    def _check_passing(self, _gradient: torch.Tensor) -> None:
        if not self._is_passing:
            raise _foreign()


def _fields(value: Any) -> dict[str, Any]:
    return {} if hasattr(value, "grad_fn") else getattr(value, "__dict__", {})


def _foreign() -> StepOrderError:
    return StepOrderError(
        "a backward pass that did not go through this engine computes gradients of its weights",
        "call engine.backward(loss) instead of loss.backward() or torch.autograd.grad, once "
        "per micro batch, with the sum of all losses; while another model is trained through this "
        "one, freeze this one with engine.module.requires_grad_(False)",
        "engine.backward",
    )


def _elsewhere() -> StepOrderError:
    return StepOrderError(
        "other code read or cleared parameter.grad between engine.backward and the window's last "
        "engine.step, but this engine keeps its gradients elsewhere, so that would have no effect",
        "write gradient_clipping into the plan instead of calling clip_grad_norm_, leave "
        "zero_grad and the optimizer's step to the engine, and call engine.discard() to drop "
        "gradients; read or change a gradient in parameter.register_hook",
        "parameter.grad",
    )


@functools.cache
def _gradient_elsewhere() -> type[torch.Tensor]:
    import torch

    class GradientElsewhere(torch.Tensor):
        """Stands in ``parameter.grad`` for a gradient that the engine keeps elsewhere."""

        @classmethod
        def __torch_function__(cls, *_: Any) -> Any:
            raise _elsewhere()

        @classmethod
        def __torch_dispatch__(cls, *_: Any) -> Any:
            in_backward = torch._C._current_graph_task_id() != -1
            raise _foreign() if in_backward else _elsewhere()

    return GradientElsewhere


def _stand_in(shape: Any, dtype: torch.dtype, device: torch.device) -> Any:
    # Without memory.
    kind: Any = _gradient_elsewhere()
    return kind._make_wrapper_subclass(kind, shape, dtype=dtype, device=device)


def _call_first(hook: Any, hooks: dict[int, Any]) -> None:
    """Move a hook to the front; torch ignores the order of ``OrderedDict.move_to_end``."""
    others = dict(hooks)
    own = others.pop(hook.id)
    hooks.clear()
    hooks.update({hook.id: own, **others})


def fault_of(loss: Any) -> tuple[str, Any, str] | None:
    """Return why a value cannot be back-propagated, the value to show and the remedy.

    Args:
        loss: What was passed as the loss.

    Returns:
        ``None`` if the loss is a real scalar tensor with a graph.
    """
    import torch

    if not isinstance(loss, torch.Tensor):
        fix = "pass the loss as a scalar tensor"
        if isinstance(loss, float | int):
            fix += ", not loss.item() or float(loss)"
        return "is not a tensor", type(loss).__name__, fix
    if loss.numel() != 1:
        shape = f"a tensor of shape {tuple(loss.shape)}"
        return "is more than one number", shape, "reduce it with loss.mean()"
    if loss.is_complex():
        return "is complex", str(loss.dtype), "pass loss.abs() or loss.real"
    if not loss.requires_grad:
        fix = "compute the loss from the output of model(...), without torch.no_grad() or "
        fix += "detach(), and train at least one weight"
        return "does not depend on any weight", "a tensor without gradient", fix
    return None


def surely(call: Callable[[], object]) -> None:
    """Call a function that may be called twice, without or after an interrupt."""
    try:
        with uninterrupted():
            call()
    except KeyboardInterrupt:
        with uninterrupted():
            call()
        raise


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Deliver Ctrl-C after the block instead of inside it; a second one interrupts at once."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    came: list[Any] = []

    def keep(number: int, frame: Any) -> None:
        came.append(frame)
        if len(came) > 1:
            before(number, frame)

    signal.signal(signal.SIGINT, keep)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if len(came) == 1:
            before(signal.SIGINT, came[0])
