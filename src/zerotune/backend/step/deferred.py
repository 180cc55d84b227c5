"""``DeferredSteps``: an Adam in host memory whose steps may return before their pass is taken."""

from __future__ import annotations

import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks

from zerotune.backend.distributed import ProcessGroup
from zerotune.backend.master_weights import Follower, MasterLayout, trainable_parameters
from zerotune.backend.optimizers.classes import AdamWBF16States
from zerotune.backend.proof import FastPath, why_disproven, why_unproven
from zerotune.backend.step.adams import SlabStep, stepper_of, torch_rounds_alike
from zerotune.backend.step.kernel import HostStepOp, load_host_step
from zerotune.backend.step.pending import (
    Exchange,
    Part,
    PendingStep,
    Piece,
    StreamUpload,
    ThreadedStep,
    Upload,
    divide,
    land,
)
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
ROUNDS_OTHERWISE: Final = "this build of torch rounds otherwise than the op host_step"


class DeferredSteps(ABC):
    """Steps of an Adam in host memory that may return before their pass is taken.

    A thread of its own takes it behind the next forward, averages join it, or whoever uses a
    weight first takes what it needs.

    ``adam`` is the optimizer whose steps these are: a DeepSpeedCPUAdam, torch's, or our own.
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
        self._watch: CompilerWatch | None = None
        self.decisions: tuple[Decision, ...] = ()
        """What was decided while it runs."""
        self._parts: tuple[Part, ...] = ()
        self._order: list[int] = []
        self._pending: PendingStep | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._at_once: str | None = None
        self._averaged = False
        self._stream: Any = None
        self._compiled: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    @property
    @abstractmethod
    def _accelerator(self) -> Any:
        """What has the device's streams and events."""

    def why_at_once(self) -> str | None:
        """Why a step must not return before its pass is taken, if so."""
        return None

    @property
    def op(self) -> HostStepOp:
        """The compiled functions."""
        return self._op

    @property
    def group(self) -> ProcessGroup:
        """The processes that train together."""
        return self._group

    @property
    def hidden(self) -> bool:
        """Whether passes are taken behind what comes after their steps."""
        return self._thread is not None

    @property
    def needs_a_thread(self) -> bool:
        """Whether a pass that is taken later can only be taken by a thread of its own."""
        return False

    def replay(self, steps: int) -> None:
        """Continue as a run that has taken ``steps`` optimizer steps."""
        self._adam.replay(steps)

    def take_at_once(self, reason: str) -> None:
        """Take every pass before its step returns."""
        self._at_once = reason

    def _record(
        self,
        reason: str,
        *,
        key: str = HIDDEN_KEY,
        before: str = "taken later",
        after: str = "taken before the step returns",
    ) -> None:
        """Note once why a pass is not taken later, or not at all."""
        if any(decision.reason == reason for decision in self.decisions):
            return
        decision = Decision(key=key, before=before, after=after, reason=reason)
        self.decisions = (*self.decisions, decision)
        announce([decision], rank=self._group.rank)

    def hide(self) -> None:
        """Take every pass in a thread of its own, behind what comes after its step."""
        self._thread = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix="zerotune-step",
            initializer=self._enter_thread,
            initargs=(self._accelerator, self._accelerator.current_device()),
        )

    def _enter_thread(self, accelerator: Any, device: Any) -> None:
        # A thread begins on the first device, and going back to it from a stream of another takes
        # hundreds of megabytes there, from every rank.
        accelerator.set_device(device)
        self._op.spare_a_core()

    def settle(self) -> None:
        """Return once the pass under way is taken, if there is one."""
        pending = self._pending
        if pending is None:
            return
        pending.settle()
        if pending.used:
            ranks = {name: rank for rank, name in enumerate(pending.used)}
            last = len(ranks)
            # What the last forward used first is written first.
            self._order.sort(
                key=lambda index: min(
                    (ranks.get(name, last) for name in self._parts[index].names), default=last
                )
            )
        if self._pending is pending:
            self._pending = None

    def follow(self, followers: Sequence[Follower]) -> bool:
        """Have averages move with the pass under way; whether there is one they can move with."""
        self._averaged, pending = True, self._pending
        if pending is None:
            return False
        if pending.moved():
            # Weights that were replaced meanwhile are what an average reads.
            self.settle()
            return False
        if not pending.follow(followers):
            return False
        if self._thread is None:
            # It has waited for them, and nobody else takes it.
            self.settle()
        return True

    def close(self) -> None:
        """Settle, and let the thread go; steps that come all the same are taken at once."""
        self._at_once = "closed"
        try:
            self.settle()
        finally:
            self._pending = None
            if self._thread is not None:
                self._thread.shutdown()
            if self._watch is not None:
                self._watch.end()
            for hook in self._hooks:
                hook.remove()
            self._hooks.clear()

    def _may_wait(self) -> bool:
        """Whether the step that begins now may return before its pass is taken."""
        averaged, self._averaged = self._averaged, False
        if self._at_once is not None:
            return False
        if self._thread is None and (not averaged or self.needs_a_thread):
            return False
        if (reason := self._why_not_now()) is not None:
            self._record(reason)
            return False
        return True

    def _why_not_now(self) -> str | None:
        """Why this step cannot be left for later."""
        if self._optimizer._optimizer_step_post_hooks or _global_optimizer_post_hooks:
            return "hooks after the optimizer's step read the weights that it has written"
        # Importing the compiler takes seconds, and nobody compiles without.
        if self._watch is None and "torch._dynamo" in sys.modules:
            self._watch = CompilerWatch(self._found_compiling)
        if not self._waits_for_compiled():
            return _CALL_COMPILED
        # Somebody else's view of the weights would show old values.
        uses = self._uses().items()
        return _VIEWED if any(n > self._storages.get(key, 0) for key, n in uses) else None

    def _found_compiling(self) -> None:
        """React to a compilation that may use the weights."""
        self.settle()
        if self._at_once is None:
            self._record(_COMPILED)
        self.take_at_once(_COMPILED)

    def _uses(self) -> dict[int, int]:
        """By storage of the written tensors: how many other tensors and arrays share it."""
        shared: Counter[int] = Counter()
        counts: dict[int, int] = {}
        for tensor in self._written().values():
            storage = tensor.untyped_storage()
            shared[storage._cdata] += 1
            # One use is the object that is asked here.
            counts[storage._cdata] = torch._C._storage_Use_Count(storage._cdata) - 1
        return {key: count - shared[key] for key, count in counts.items()}

    def know_views(self) -> None:
        """Take all views that there are now for the engine's own."""
        self._storages = self._uses()

    def settle_for_states(self) -> None:
        """Have the optimizer's states saved and loaded only when they are written."""
        self._hooks += [
            self._optimizer.register_state_dict_pre_hook(lambda _: self.settle()),
            self._optimizer.register_load_state_dict_pre_hook(lambda *_: self.settle()),
        ]

    def _waits_for_compiled(self) -> bool:
        """Have compiled forwards wait before they are entered; whether all can."""
        for module in self._module.modules():
            attributes = vars(module)
            if (
                attributes.get("_compiled_call_impl") is not None
                or "_orig_mod" in attributes["_modules"]
            ):
                # The call itself is compiled: nothing runs before its guards look at the weights.
                return False
            if hasattr(attributes.get("forward"), "_torchdynamo_orig_callable"):
                if module not in self._compiled:
                    self._hooks += [
                        module.register_forward_pre_hook(_enter_compiled, prepend=True),
                        module.register_forward_hook(_leave_compiled, always_call=True),
                    ]
                self._compiled.add(module)
        return True

    def _launch(self, steps: Sequence[SlabStep], upload: Upload) -> None:
        """Queue the steps that have begun, to be executed part by part."""
        if not self._parts:
            self._parts = self._divide([step.masters.numel for step in steps])
            self._order = list(range(len(self._parts)))
            self._wait_before_kernels()
        pending = self._begin(steps, upload)
        try:
            self._pending = pending
            for name, tensor in self._written().items():
                pending.hold(name, tensor)
            if self._thread is not None:
                self._thread.submit(pending.run_in_thread)
        except BaseException as error:
            # Whoever waits for a pass that nobody takes would wait for ever.
            pending.fail(error)
            raise

    def _take(
        self,
        steps: Sequence[SlabStep],
        sources: Sequence[torch.Tensor | None],
        targets: Sequence[torch.Tensor | None],
        *,
        waits: bool,
        exchange: Exchange | None = None,
    ) -> None:
        """Leave begun steps for later, or take all of each now."""
        if waits:
            self._launch(steps, self._upload(sources, targets, exchange))
            return
        upload = Upload(sources=sources, targets=targets)
        with torch.no_grad():
            for index, step in enumerate(steps):
                step.run(0, step.masters.numel)
                upload.send([Piece(slab=index, start=0, stop=step.masters.numel)])

    def _wait_before_kernels(self) -> None:
        """Have modules that are not torch's wait for their weights before their forward.

        Kernels that are no functions of torch may be called there, which ask for an address.
        """
        written = {id(parameter) for parameter in self._parameters.values()}
        for module in self._module.modules():
            if type(module).__module__.startswith("torch."):
                continue
            if any(id(each) in written for each in module.parameters(recurse=False)):
                self._hooks.append(module.register_forward_pre_hook(_land_direct, prepend=True))

    def _divide(self, sizes: Sequence[int]) -> tuple[Part, ...]:
        return divide(self._layout.addresses, sizes, first=self._wanted_first())

    def _begin(self, steps: Sequence[SlabStep], upload: Upload) -> PendingStep:
        kind = PendingStep if self._thread is None else ThreadedStep
        return kind(parts=self._parts, order=tuple(self._order), steps=steps, upload=upload)

    def _upload(
        self,
        sources: Sequence[torch.Tensor | None],
        targets: Sequence[torch.Tensor | None],
        exchange: Exchange | None = None,
    ) -> Upload:
        away = [target for target in targets if target is not None]
        accelerator = self._accelerator
        if all(target.device.type == "cpu" for target in away):
            return Upload(sources=sources, targets=targets, exchange=exchange)
        if self._stream is None:
            self._stream = accelerator.Stream()
        return StreamUpload(
            sources=sources,
            targets=targets,
            exchange=exchange,
            stream=self._stream,
            accelerator=accelerator,
        )

    def _written(self) -> Mapping[str, torch.Tensor]:
        """The tensors that the pass writes for the model, by the parameters' names."""
        return self._parameters

    def _wanted_first(self) -> Collection[str]:
        """Names of parameters that are used as soon as the step ends."""
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
    """Have an Adam's steps taken in one pass, and say by whom, when and on what. Collective.

    Args:
        plan: Whether that is wanted, and whether steps may return before their pass is taken.
        group: The processes that train together.
        adam: The optimizer.
        usual: What takes its steps otherwise, unless it is our own.
        obstacle: What stands in the way on this rank.
        rounds_alike: Whether this build of torch rounds as the compiled functions do; ``None``:
            none of its own arithmetic is met.
        make: Installs what takes the steps, given ``op``.
        reason: Why that is better.
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
    elsewhere = group.any(obstacle is not None, purpose="choose who takes the steps")
    if op is None or elsewhere:
        obstacle = obstacle or "another rank cannot take it so"
        return None, (Decision(key=KEY, before=usual, after=usual, reason=obstacle),)
    step = make(op=op)
    step.settle_for_states()
    who = Decision(key=KEY, before=usual, after="one pass", reason=reason)
    return step, (who, choose_when(step, plan), _shares_cores(step))


def _shares_cores(step: DeferredSteps) -> Decision:
    """Say what a pass computes on, and what is left to the forward beside it."""
    threads, read = torch.get_num_threads(), MachineProbe().read_text
    cores = describe_cpus(read_cpus(read, affinity_here()), quota=cpu_quota(read))
    taken = step.op.beside(threads) if step.hidden else threads
    if not step.hidden:
        reason = "nothing else computes while the pass is taken"
    elif taken < threads:
        reason = "one is left to what the next forward does on the host"
    else:
        reason = "shared with the next forward: a pass on one of two takes longer than both on two"
    return Decision(
        key=THREADS_KEY,
        before=threads,
        after=taken,
        reason=f"{reason}; {cores} for this process; it follows torch's threads, which a trainer "
        "sets to what data workers and other ranks leave (threads)",
    )


def choose_when(step: DeferredSteps, plan: ResolvedPlan) -> Decision:
    """Choose who takes the pass, and when. Collective.

    On a device nothing is taken later unless that is proven there, or asked for.
    """
    at_once = step.why_at_once()
    on_cpu = plan.platform.accelerator == "cpu"
    unproven = None
    if not on_cpu:
        path: FastPath = "exchange" if step.needs_a_thread else "hidden step"
        unproven = why_unproven(path, accelerator=plan.platform.accelerator)
        # The ranks must do the same.
        elsewhere = step.group.any(unproven is not None, purpose="choose when a pass is taken")
        unproven = unproven or ("it is not proven on another rank's device" if elsewhere else None)
    after = "taken before the step returns"
    if at_once is not None:
        reason = at_once
        step.take_at_once(at_once)
    elif plan.hidden_step or (plan.hidden_step is None and not on_cpu and unproven is None):
        after = "taken in a thread, behind the next forward"
        reason = "the cores have nothing else to do meanwhile, and it is proven on this device"
        if plan.hidden_step:
            reason = "asked for" if unproven is None else f"asked for, unproven: {unproven}"
        step.hide()
    else:
        if unproven is not None:
            step.take_at_once(unproven)
        elif not step.needs_a_thread:
            after += ", or together with the averages"
        if plan.hidden_step is False:
            reason = "the plan was resolved with hidden=False"
        elif unproven is None:
            reason = "model and optimizer share these cores, so nothing is gained beside each other"
        else:
            reason = f"{unproven}; plan.resolve(hidden=True) asks for it all the same"
    return Decision(key=HIDDEN_KEY, before=None, after=after, reason=reason)


# -- What is compiled.

_CALL_COMPILED: Final = (
    "a module's call is compiled, whose guards look at the weights before anything can wait; "
    "compile=True of the trainer, or module.forward = torch.compile(module.forward), can be waited "
    "for"
)
_COMPILED: Final = (
    "a function was compiled that may use the weights, and its guards look at them before anything "
    "can wait"
)
_VIEWED: Final = (
    "views of the weights are held outside of the model (parameter.detach(), .data, an array), "
    "which would show the values from before the step"
)


class CompilerWatch:
    """Tells when torch begins to compile something that ``_enter_compiled`` has not announced.

    ``call`` is called before what is compiled is looked at.
    """

    _inside = threading.local()

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._handler = sys.modules["torch._dynamo"].callback.callback_handler
        self._handler.register_start_callback(self._begins)

    def end(self) -> None:
        """Listen no more."""
        self._handler.remove_start_callback(self._begins)

    @classmethod
    def enter(cls, by: int) -> None:
        """What this thread compiles from now on waits for its weights by itself."""
        cls._inside.depth = getattr(cls._inside, "depth", 0) + by

    def _begins(self, _arguments: Any) -> None:
        if not getattr(self._inside, "depth", 0):
            self._call()


def _enter_compiled(module: torch.nn.Module, _inputs: Any) -> None:
    """Wait for the weights of a module whose forward is compiled."""
    if not torch.compiler.is_compiling():
        for parameter in module.parameters():
            land(parameter)
        CompilerWatch.enter(1)


def _leave_compiled(_module: torch.nn.Module, _inputs: Any, _output: Any) -> None:
    if not torch.compiler.is_compiling():
        CompilerWatch.enter(-1)


def _land_direct(module: torch.nn.Module, _inputs: Any) -> None:
    # What compiles from outside has settled the step before it looks at this.
    if not torch.compiler.is_compiling():
        for parameter in module.parameters(recurse=False):
            land(parameter)
