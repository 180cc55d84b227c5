"""``DeferredSteps``: an Adam in host memory whose ``step`` may return before the update is done."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks

from zerotune.backend.accelerator import accelerator_of
from zerotune.backend.distributed import ProcessGroup
from zerotune.backend.master_weights import EMAUpdate, MasterLayout, trainable_parameters
from zerotune.backend.optimizers.classes import AdamWBF16States
from zerotune.backend.proof import why_disproven, why_unproven
from zerotune.backend.step.adams import SlabStep, stepper_of, torch_rounds_alike
from zerotune.backend.step.kernel import HostStepOp, load_host_step
from zerotune.backend.step.pending import (
    Part,
    PendingStep,
    Piece,
    StreamUpload,
    ThreadedStep,
    Upload,
    divide,
)
from zerotune.backend.step.uses import CALL_COMPILED, COMPILED, VIEWED, ForeignUses
from zerotune.decisions import Decision, announce
from zerotune.errors import PlatformError
from zerotune.plan.model import ResolvedPlan
from zerotune.platform.detect import (
    MachineProbe,
    affinity_here,
    cpu_quota,
    describe_cpus,
    read_cpus,
)

KEY: Final = "optimizer.step"
HIDDEN_KEY: Final = "optimizer.step.hidden"
THREADS_KEY: Final = "optimizer.step.threads"

S = TypeVar("S", bound="DeferredSteps")
ROUNDS_OTHERWISE: Final = "this build of torch rounds differently from the op host_step"


class DeferredSteps(ABC):
    """Run the steps of an Adam in host memory, possibly after ``step`` has returned.

    A deferred update runs in a thread during the next forward pass. Without a thread, it runs when
    the EMAs are updated or a weight is used.

    ``adam`` is a DeepSpeedCPUAdam, or an Adam of torch or zerotune.
    """

    def __init__(
        self,
        *,
        op: HostStepOp,
        adam: torch.optim.Optimizer,
        module: torch.nn.Module,
        layout: MasterLayout,
        group: ProcessGroup,
    ) -> None:
        self._op = op
        self._optimizer = adam
        self._adam = stepper_of(adam)(op=op, adam=adam)
        self._module = module
        self._layout = layout
        self._group = group
        self._parameters = dict(trainable_parameters(module))
        self._storages: dict[int, int] = {}
        self._hooks: list[Any] = []
        self._foreign = ForeignUses(module, compiling=self._found_compiling)
        self.decisions: tuple[Decision, ...] = ()
        """Decisions made during training."""
        self._parts: tuple[Part, ...] = ()
        self._order: list[int] = []
        self._pending: PendingStep | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._at_once: str | None = None
        self._averaged = False
        self._stream: Any = None

    @property
    @abstractmethod
    def _accelerator(self) -> Any:
        """Module or object with the device's streams and events."""

    def why_at_once(self) -> str | None:
        """Return why updates cannot be deferred; ``None`` if they can."""
        return None

    @property
    def op(self) -> HostStepOp:
        """The compiled kernels."""
        return self._op

    @property
    def group(self) -> ProcessGroup:
        """The process group of all ranks."""
        return self._group

    @property
    def hidden(self) -> bool:
        """Whether a thread runs updates during the next forward pass."""
        return self._thread is not None

    def replay(self, steps: int) -> None:
        """Continue as if ``steps`` optimizer steps had been taken."""
        self._adam.replay(steps)

    def take_at_once(self, reason: str) -> None:
        """From now on, complete every update before ``step`` returns.

        Args:
            reason: Why updates cannot be deferred.
        """
        self._at_once = reason

    def _record(
        self,
        reason: str,
        *,
        key: str = HIDDEN_KEY,
        before: str = "deferred",
        after: str = "completed before step() returns",
    ) -> None:
        """Record, once per reason, why an update is not deferred or not fused."""
        if any(decision.reason == reason for decision in self.decisions):
            return
        decision = Decision(key=key, before=before, after=after, reason=reason)
        self.decisions = (*self.decisions, decision)
        announce([decision], rank=self._group.rank)

    def hide(self) -> None:
        """From now on, run every update in a separate thread, during the next forward pass."""
        self._thread = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix="zerotune-step",
            initializer=self._enter_thread,
            initargs=(self._accelerator, self._accelerator.current_device()),
        )

    def _enter_thread(self, accelerator: Any, device: Any) -> None:
        # A thread starts on the first device. Returning to it from a stream on a different device
        # allocates hundreds of megabytes there for every rank.
        accelerator.set_device(device)
        self._op.spare_a_core()

    def settle(self) -> None:
        """Wait until the pending update is complete, if there is one."""
        pending = self._pending
        if pending is None:
            return
        pending.settle()
        if pending.used:
            ranks = {name: rank for rank, name in enumerate(pending.used)}
            last = len(ranks)
            # Weights that the last forward used first are updated first.
            self._order.sort(
                key=lambda index: min(
                    (ranks.get(name, last) for name in self._parts[index].names), default=last
                )
            )
        if self._pending is pending:
            self._pending = None

    def update_emas(self, updates: Sequence[EMAUpdate]) -> bool:
        """Update EMAs together with the pending update.

        Args:
            updates: The updates.

        Returns:
            Whether the pending update will include the EMAs; ``False`` if no update is pending.
        """
        self._averaged, pending = True, self._pending
        if pending is None:
            return False
        if pending.moved():
            # EMAs must read the weights that other code has put in place meanwhile.
            self.settle()
            return False
        if not pending.update_emas(updates):
            return False
        if self._thread is None:
            # The update was deferred only for these EMAs, and no thread runs it.
            self.settle()
        return True

    def close(self) -> None:
        """Wait for the pending update and stop the thread; later updates are not deferred."""
        self._at_once = "closed"
        try:
            self.settle()
        finally:
            self._pending = None
            if self._thread is not None:
                self._thread.shutdown()
            self._foreign.close()
            for hook in self._hooks:
                hook.remove()
            self._hooks.clear()

    def _may_wait(self) -> bool:
        """Whether the update that begins now may be deferred."""
        averaged, self._averaged = self._averaged, False
        if self._at_once is not None:
            return False
        if self._thread is None and not averaged:
            return False
        if (reason := self._why_not_now()) is not None:
            self._record(reason)
            return False
        return True

    def _why_not_now(self) -> str | None:
        """Why this update cannot be deferred; ``None`` if it can."""
        if self._optimizer._optimizer_step_post_hooks or _global_optimizer_post_hooks:
            return "post-step hooks of the optimizer read the updated weights"
        if not self._foreign.wait_for_compiled():
            return CALL_COMPILED
        # A view outside the model would show old values.
        uses = self._uses().items()
        return VIEWED if any(n > self._storages.get(key, 0) for key, n in uses) else None

    def _found_compiling(self) -> None:
        """Stop deferring updates, because a compilation may use the weights."""
        self.settle()
        if self._at_once is None:
            self._record(COMPILED)
        self.take_at_once(COMPILED)

    def _uses(self) -> dict[int, int]:
        """Number of additional tensors and arrays that share each updated storage."""
        shared: Counter[int] = Counter()
        counts: dict[int, int] = {}
        for tensor in self._written().values():
            storage = tensor.untyped_storage()
            shared[storage._cdata] += 1
            # One use is the object queried here.
            counts[storage._cdata] = torch._C._storage_Use_Count(storage._cdata) - 1
        return {key: count - shared[key] for key, count in counts.items()}

    def know_views(self) -> None:
        """Record that all existing views of the weights belong to the engine."""
        self._storages = self._uses()

    def settle_for_states(self) -> None:
        """Complete a pending update before the optimizer's states are saved or loaded."""
        self._hooks += [
            self._optimizer.register_state_dict_pre_hook(lambda _: self.settle()),
            self._optimizer.register_load_state_dict_pre_hook(lambda *_: self.settle()),
        ]

    def _launch(self, steps: Sequence[SlabStep], upload: Upload) -> None:
        """Defer updates that have begun; they run part by part."""
        if not self._parts:
            self._parts = self._divide([step.masters.numel for step in steps])
            self._order = list(range(len(self._parts)))
            self._foreign.wait_before_kernels({id(p) for p in self._parameters.values()})
        pending = self._begin(steps, upload)
        try:
            self._pending = pending
            for name, tensor in self._written().items():
                pending.hold(name, tensor)
            if self._thread is not None:
                self._thread.submit(pending.run_in_thread)
        except BaseException as error:
            # Otherwise a thread would wait forever for an update that never runs.
            pending.fail(error)
            raise

    def _take(
        self,
        steps: Sequence[SlabStep],
        sources: Sequence[torch.Tensor | None],
        targets: Sequence[torch.Tensor | None],
        *,
        waits: bool,
    ) -> None:
        """Defer updates that have begun, or complete them now."""
        if waits:
            self._launch(steps, self._upload(sources, targets))
            return
        upload = Upload(sources=sources, targets=targets)
        with torch.no_grad():
            for index, step in enumerate(steps):
                step.run(0, step.masters.numel)
                upload.send([Piece(slab=index, start=0, stop=step.masters.numel)])

    def _divide(self, sizes: Sequence[int]) -> tuple[Part, ...]:
        return divide(self._layout.addresses, sizes, first=self._wanted_first())

    def _begin(self, steps: Sequence[SlabStep], upload: Upload) -> PendingStep:
        kind = PendingStep if self._thread is None else ThreadedStep
        return kind(parts=self._parts, order=tuple(self._order), steps=steps, upload=upload)

    def _upload(
        self,
        sources: Sequence[torch.Tensor | None],
        targets: Sequence[torch.Tensor | None],
    ) -> Upload:
        away = [target for target in targets if target is not None]
        accelerator = self._accelerator
        if all(accelerator_of(target.device).streams is None for target in away):
            return Upload(sources=sources, targets=targets)
        if self._stream is None:
            self._stream = accelerator.Stream()
        return StreamUpload(
            sources=sources,
            targets=targets,
            stream=self._stream,
            accelerator=accelerator,
        )

    def _written(self) -> Mapping[str, torch.Tensor]:
        """The model's tensors that an update writes, by the parameters' names."""
        return self._parameters

    def _wanted_first(self) -> Collection[str]:
        """Names of parameters that are used directly after the step."""
        return ()


def take_over(
    plan: ResolvedPlan,
    group: ProcessGroup,
    *,
    adam: Any,
    usual: str,
    obstacle: str | None,
    rounds_alike: Callable[[HostStepOp], bool] | None,
    make: Callable[..., S],
    reason: str,
) -> tuple[S | None, tuple[Decision, ...]]:
    """Replace an Adam's step with zerotune's fused step, if possible. Collective.

    Args:
        plan: The resolved plan, with ``host_step`` and ``hidden_step``.
        group: The process group of all ranks.
        adam: The optimizer.
        usual: Name of the replaced step; not used if the optimizer is zerotune's.
        obstacle: Why this rank cannot replace the step; ``None`` if it can.
        rounds_alike: Function that checks whether this build of torch rounds like the compiled
            kernels; ``None`` if torch's arithmetic is not involved.
        make: Function that creates the replacement from ``op``.
        reason: Reason to record in the decision if the step is replaced.

    Returns:
        The replacement (``None`` if the step is not replaced) and the decisions.
    """
    if isinstance(adam, AdamWBF16States):
        usual, rounds_alike = "AdamWBF16States' own", torch_rounds_alike
    op: HostStepOp | None = None
    if not plan.host_step:
        obstacle = "the plan was resolved with host_step=False"
    obstacle = obstacle or why_disproven("one pass", accelerator=plan.platform.accelerator)
    if obstacle is None:
        try:
            op = load_host_step()
        except PlatformError as error:
            obstacle = f"the op host_step cannot be built: {error.reason}"
        else:
            alike = rounds_alike is None or rounds_alike(op)
            obstacle = None if alike else ROUNDS_OTHERWISE
    elsewhere = group.any(obstacle is not None, purpose="choose the optimizer step")
    if op is None or elsewhere:
        obstacle = obstacle or "another rank cannot use zerotune's fused step"
        return None, (Decision(key=KEY, before=usual, after=usual, reason=obstacle),)
    step = make(op=op)
    step.settle_for_states()
    who = Decision(key=KEY, before=usual, after="one pass", reason=reason)
    return step, (who, choose_when(step, plan), _shares_cores(step))


def _shares_cores(step: DeferredSteps) -> Decision:
    """The decision about the number of cores for updates."""
    threads, read = torch.get_num_threads(), MachineProbe().read_text
    cores = describe_cpus(read_cpus(read, affinity_here()), quota=cpu_quota(read))
    taken = step.op.beside(threads) if step.hidden else threads
    if not step.hidden:
        reason = "nothing else runs during the optimizer step"
    elif taken < threads:
        reason = "one thread remains for host work in the next forward pass"
    else:
        reason = "using all threads is faster than leaving a core free for the next forward pass"
    return Decision(
        key=THREADS_KEY,
        before=threads,
        after=taken,
        reason=f"{reason}; {cores} for this process; the default is torch's number of threads, "
        "which the trainer sets to leave cores for data workers and other ranks (see `threads`)",
    )


def choose_when(step: DeferredSteps, plan: ResolvedPlan) -> Decision:
    """Choose whether updates are deferred and whether a thread runs them. Collective.

    On an accelerator, updates are deferred only if zerotune's proof has passed on this device, or
    if the plan requests deferral.

    Args:
        step: The optimizer's step.
        plan: The resolved plan.
    """
    at_once = step.why_at_once()
    on_cpu = plan.platform.accelerator == "cpu"
    unproven = None
    if not on_cpu:
        unproven = why_unproven("hidden step", accelerator=plan.platform.accelerator)
        # All ranks must make the same choice.
        elsewhere = step.group.any(unproven is not None, purpose="choose when a step completes")
        other = "deferred steps are not proven on another rank's device"
        unproven = unproven or (other if elsewhere else None)
    after = "completed before step() returns"
    if at_once is not None:
        reason = at_once
        step.take_at_once(at_once)
    elif plan.hidden_step or (plan.hidden_step is None and not on_cpu and unproven is None):
        after = "completed in a thread, during the next forward pass"
        reason = "CPU cores are idle during the forward pass, and the proof passed on this device"
        if plan.hidden_step:
            reason = "set in the plan"
            reason += "" if unproven is None else f", although unproven: {unproven}"
        step.hide()
    else:
        if unproven is not None:
            step.take_at_once(unproven)
        else:
            after += ", or together with the EMAs"
        if plan.hidden_step is False:
            reason = "the plan was resolved with hidden=False"
        elif unproven is None:
            reason = "model and optimizer use the same cores, so deferring would save no time"
        else:
            reason = f"{unproven}; plan.resolve(hidden=True) defers steps nevertheless"
    return Decision(key=HIDDEN_KEY, before=None, after=after, reason=reason)
