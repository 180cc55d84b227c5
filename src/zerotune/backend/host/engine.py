"""``HostEngine``: weights, gradients and an Adam in host memory, updated unit by unit.

The engine runs a DeepSpeed plan, and its results equal those of ZeRO-2 with the optimizer in host
memory. Weights stay on the device, or are there only while they are used (streamed).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, ClassVar

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from typing_extensions import override

from zerotune._util.proc import keep_freed_memory, return_large_blocks
from zerotune._util.text import format_size
from zerotune.backend.accelerator import accelerator_of
from zerotune.backend.checks import (
    DTYPES,
    Checks,
    RunningGroup,
    expected_groups,
    share_buffers,
)
from zerotune.backend.deepspeed.engine import SCALER_FIELDS, replay_adam_steps
from zerotune.backend.deepspeed.start import join_checked, pin_exactly, read_weights
from zerotune.backend.engine import CountingEngine, EngineState, StepOutcome
from zerotune.backend.host.gradients import (
    GradientPool,
    Gradients,
    GradientsOfAll,
    GradientsOnDevice,
)
from zerotune.backend.host.lanes import Lane
from zerotune.backend.host.layout import HostLayout
from zerotune.backend.host.optimizer import (
    cpu_adam,
    loss_scaler,
    members,
    other_optimizer,
    schedule_of,
    vector_of,
)
from zerotune.backend.host.passes import Passes
from zerotune.backend.host.residency import HostCounts, Residency
from zerotune.backend.host.steps import StreamedSteps
from zerotune.backend.host.units import (
    STORED_OTHERWISE,
    FlatOrder,
    HostMemory,
    Member,
    Unit,
    find_units,
    follow_inner_tensors,
    make_units,
)
from zerotune.backend.host.updates import AdamOnHost, OptimizerOnDevice, Update
from zerotune.backend.host.weights import is_in_place, release_weight, stream_weight
from zerotune.backend.master_weights import MasterWeights, Named
from zerotune.backend.op_builds import folder_decisions
from zerotune.backend.optimizers.classes import AdamW8BitStates, AdamWBF16States
from zerotune.backend.optimizers.client import (
    chosen_optimizer,
    continue_schedule,
    scheduler_class,
)
from zerotune.backend.proof import prove_offload
from zerotune.backend.step.kernel import HostStepOp, load_host_step
from zerotune.backend.step.uses import ForeignUses
from zerotune.backend.step_state import Stage
from zerotune.decisions import Decision, announce
from zerotune.errors import EngineError
from zerotune.plan.context import Streaming
from zerotune.plan.facts import resident_units
from zerotune.plan.memory.hosted import GRADIENTS_UNDER_WAY, gradient_buffers, gradients_stay
from zerotune.plan.plan import ResolvedPlan
from zerotune.plan.sections import pins

KEY = "streamed"

_CASTABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class HostEngine(CountingEngine):
    """An ``Engine`` whose master weights are in host memory; weights are resident or streamed.

    Args:
        model: The model, in fp32, on any device.
        plan: A resolved DeepSpeed plan whose optimizer is in host memory.
        timeout_s: Seconds after which a collective raises an error.

    Raises:
        EngineError: The plan's optimizer is not resolved, or no parameter is trainable.
        VerificationError: The engine differs from the plan.
    """

    _orders: ClassVar[type[FlatOrder]] = FlatOrder
    _scaler_fields: ClassVar[tuple[str, ...]] = SCALER_FIELDS
    _unscales_first: ClassVar[bool] = False
    """Whether gradients are unscaled by the scale of their loss, as torch does it."""

    @override
    def _start(self, model: torch.nn.Module, plan: ResolvedPlan, timeout_s: float) -> None:
        self._plan, self._module, self._timeout_s = plan, model, timeout_s
        named = self._join(model, plan)
        pinned = pin_exactly(plan)
        read = self._read(model, plan)
        shared = share_buffers(model, self._group)
        self._cast(model)
        self._scaler: Any = self._make_scaler()
        self._order = self._orders(
            members(plan, named),
            sizes={name: parameter.numel() for name, parameter in named},
            world_size=self._group.world_size,
            vector=vector_of(plan),
        )
        needs = self._lay_out(model)
        if plan.update is not None and accelerator_of(self._device).is_host:
            return_large_blocks()
        elif self._computes_on_host:
            keep_freed_memory()
        self._build_optimizer(plan, named)
        self._stream(needs)
        self._decisions = (*read, *shared, *folder_decisions(), *pinned, *self._describe())
        self._checks().raise_if_failed(engine="zerotune")
        announce(self.decisions, rank=self._group.rank)

    def _join(self, model: torch.nn.Module, plan: ResolvedPlan) -> Named:
        """Join the process group, select the device, and check plan and model. Collective."""
        deepspeed, self._group, named = join_checked(
            plan, model, self.resources, timeout_s=self._timeout_s
        )
        self._device = torch.device(deepspeed.accelerator.get_accelerator().current_device_name())
        return named

    def _read(self, model: torch.nn.Module, plan: ResolvedPlan) -> tuple[Decision, ...]:
        """Load weights that are still in files. Collective."""
        proven = prove_offload(plan, self._group)
        return (*read_weights(plan, model, device="cpu"), *proven)

    def _make_scaler(self) -> Any:
        return loss_scaler(self._plan)

    def _lay_out(self, model: torch.nn.Module) -> Any:
        """Divide the parameters into units; return the units that each module needs."""
        zero = self._plan.plan.zero_optimization
        page_locks = zero is not None and pins(zero.offload_optimizer)
        self._page_locks = page_locks and self._can_lock
        self._memory = self._make_memory(pin=self._page_locks)
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self._units, needs = make_units(
            model,
            [] if self._plan.is_resident else find_units(model, self._streaming.units),
            order=self._order,
            device=self._device,
            memory=self._memory,
            masters=self._plan.masters,
            by_parameter=self._plan.update is not None,
            resident=resident_units(trained) if self._plan.is_resident else 1,
            in_place=self._plan.is_resident and self._computes_on_host,
        )
        return needs

    @property
    def _computes_on_host(self) -> bool:
        """Whether the model can compute with the weights in host memory."""
        return accelerator_of(self._device).is_host

    @property
    def _can_lock(self) -> bool:
        """Whether this engine's host memory can be page-locked for the device."""
        return not accelerator_of(self._device).is_host

    def _make_memory(self, *, pin: bool) -> HostMemory:
        return HostMemory(pin=pin)

    def _cast(self, model: torch.nn.Module) -> None:
        """Cast parameters, but not buffers, to the plan's precision, as DeepSpeed does."""
        if self._plan.precision == "fp32":
            return
        for parameter in model.parameters():
            if parameter.dtype in _CASTABLE:
                parameter.data = parameter.data.to(self.dtype)

    def _build_optimizer(self, plan: ResolvedPlan, named: Named) -> None:
        choice = chosen_optimizer(plan)
        slabs = [slab for unit in self._units for slab in unit.slabs]
        groups: list[dict[str, Any]] = []
        for index, given in enumerate(choice.groups or (None,)):
            own = {} if given is None else {"name": given.name, **given.params}
            masters = [slab.key for slab in slabs if slab.group == index]
            groups.append({"params": masters, **own})
        self._expected_groups = expected_groups(choice, named)
        make = cpu_adam if choice.source == "deepspeed" else other_optimizer
        self._optimizer = make(plan, groups)
        self._scheduler = schedule_of(plan, self._optimizer)

    def _make_update(self, op: HostStepOp) -> Update:
        if self._plan.update is None:
            return AdamOnHost(op=op, adam=self._optimizer, order=self._order)
        return OptimizerOnDevice(
            optimizer=self._optimizer,
            make=partial(other_optimizer, self._plan),
            order=self._order,
            memory=self._memory,
            device=self._device,
        )

    def _stream(self, needs: Any) -> None:
        """Create the lanes, steps and residency that move weights and gradients."""
        streams = accelerator_of(self._device).streams
        op = load_host_step()
        self._lanes = [
            Lane("in", device=self._device, streams=streams),
            Lane("out", device=self._device, streams=streams, in_caller=self._computes_on_host),
        ]
        trained = [unit for unit in self._units if unit.slabs]
        stays = self._plan.is_resident
        foreign = ForeignUses(self._parts, compiling=self._found_compiling) if stays else None
        self._steps = self._make_steps(
            units=trained,
            order=self._order,
            update=self._make_update(op),
            op=op,
            gradients=self._make_gradients(trained),
            lane=self._lanes[1],
            clipping=self._plan.gradient_clipping,
            factor=self._factor,
            # An overflow in fp16 must leave all weights as they are.
            in_backward=not stays and self._scaler is None,
            foreign=foreign,
            spare=streams is not None,
        )
        self._capacity = _capacity(self._streaming, self._units)
        self._residency = self._steps.residency = Residency(
            model=self._module,
            units=self._units,
            needs=needs,
            capacity=self._capacity,
            lane=self._lanes[0],
            hurry=self._steps.passes.hurry,
            # Of weights that stay on the device, each use waits by itself.
            before=(lambda: None) if stays else self._steps.wait_for_all,
        )
        for unit in self._units:
            for member in unit.members if not unit.resident else ():
                stream_weight(unit, member, self._residency.inside)
        for module in needs:
            self._residency.inside.know(module)
        self._versions = {
            m.name: m.parameter._version for unit in self._units for m in unit.members
        }
        if foreign is not None:
            foreign.wait_before_kernels({id(m.parameter) for unit in trained for m in unit.members})
        self._steps.refresh()
        self._steps.know_views()
        layout = HostLayout(
            units=trained, optimizer=self._optimizer, steps=self._steps, state=self._step_state
        )
        self._master_weights = MasterWeights(layout=layout, group=self._group, device=self.device)

    @staticmethod
    def _factor(norm: float, scale: float, clipping: float) -> float:
        """Factor that unscales and clips gradients, rounded as in ZeRO-2."""
        if not clipping:
            return float(torch.ones(1).mul_(1.0 / scale))
        clip = ((torch.tensor(norm) / scale) + 1e-6) / clipping
        return float(torch.ones(1).mul_(1.0 / (torch.clamp(clip, min=1.0) * scale)))

    def _found_compiling(self) -> None:
        self._steps.compiling()

    def _make_steps(self, *, spare: bool, **steps: Any) -> StreamedSteps:
        return StreamedSteps(passes=Passes(op=steps["op"], spare=spare), **steps)

    def _make_gradients(self, trained: list[Unit]) -> Gradients:
        if gradients_stay(self._plan):
            self._kept_gradients = Decision(
                f"{KEY}.gradients",
                None,
                f"on the device, of {GRADIENTS_UNDER_WAY} units at a time",
                "without clipping and accumulation, each unit is updated as soon as its "
                "gradients are computed",
            )
            return GradientsOnDevice(GRADIENTS_UNDER_WAY)
        sizes = [unit.nbytes for unit in trained if not unit.resident]
        buffers, reason = gradient_buffers(self._plan, sizes)
        size = buffers * max(sizes, default=0) or sum(unit.nbytes for unit in trained)
        self._kept_gradients = Decision(
            f"{KEY}.gradients",
            None,
            f"{buffers or 'all'} units at a time, {format_size(size)} of host memory",
            reason,
        )
        if not buffers:
            return GradientsOfAll(trained, memory=self._memory)
        return GradientPool(trained, count=buffers, memory=self._memory)

    @property
    def _streaming(self) -> Streaming:
        return self._plan.streaming or Streaming()

    @property
    def _torchdynamo_orig_callable(self) -> Any:
        """What ``torch.compile`` asks for first; an engine whose weights move has none."""
        if self._plan.is_resident:
            raise AttributeError("_torchdynamo_orig_callable")
        raise EngineError(
            "torch.compile cannot trace the uploads of streamed weights",
            "pass compile=True to the trainer or to prepare, or compile engine.module",
            "torch.compile",
            type(self).__name__,
        )

    @property
    @override
    def dtype(self) -> torch.dtype:
        return DTYPES[self._plan.precision]

    @property
    def counts(self) -> HostCounts:
        """Upload and eviction counts since the engine started."""
        return self._residency.counts

    @property
    @override
    def _without_grad(self) -> Sequence[torch.Tensor]:
        return [slab.key for unit in self._units for slab in unit.slabs]

    @property
    @override
    def steps_in_backward(self) -> bool:
        return self._steps.is_eager

    @property
    @override
    def _scaler_state(self) -> dict[str, Any]:
        names = (name for name in self._scaler_fields if hasattr(self._scaler, name))
        return {name: getattr(self._scaler, name) for name in names}

    @override
    def _load_state(self, state: EngineState) -> None:
        self._steps.forget_all()
        self._count_from(state)
        for name in self._scaler_fields:
            if name in state.loss_scaler and hasattr(self._scaler, name):
                setattr(self._scaler, name, state.loss_scaler[name])
        continue_schedule(self._scheduler, state.scheduler)
        taken = state.global_step - state.skipped_steps
        # DeepSpeed's op updates the last elements of a group and counts its own steps.
        replay_adam_steps(self._optimizer, taken)
        self._steps.replay(taken)

    @override
    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._module(*args, **kwargs)

    @override
    def _check_before_backward(self) -> None:
        if self._at_boundary and self._steps.is_eager:
            self._check_before_step(self._global_step)
            self._call_hooks(_global_optimizer_pre_hooks, self._optimizer._optimizer_step_pre_hooks)
        self._steps.begin_backward(is_last=self._at_boundary)

    @override
    def _backward(self, loss: torch.Tensor) -> None:
        scaled: Any = loss / self._plan.gradient_accumulation_steps * self._scale
        scaled.backward()
        # Not autograd's callback, which also runs at the end of a reentrant checkpoint's pass.
        self._steps.end_backward()
        self._updated = self._writes_by_torch()

    def _writes_by_torch(self) -> list[int]:
        """Counts of writes to weights in host memory, in which updates do not count."""
        return [unit.host._version for unit in self._units if unit.slabs]

    @override
    def _after_failure(self) -> Stage:
        return self._steps.break_off()

    @override
    def _step(self) -> StepOutcome:
        boundary = self._at_boundary
        self._micro_step += 1
        if not boundary:
            return StepOutcome(applied=False, boundary=False)
        if not self._steps.is_eager:
            self._check_before_step(self._global_step)
        elif self._updated != self._writes_by_torch() or self._find_replaced() is not None:
            self._step_state.fail(Stage.SPOILED)
            raise EngineError(
                "other code wrote weights between engine.backward, which had updated them, and "
                "engine.step, so the update would be lost",
                "write weights after engine.step, or enable gradient_clipping; now resume from "
                "the last checkpoint",
                "engine.step",
                "gradient_clipping=0",
            )
        scale = self._scale
        norm = self._steps.norm()
        self._global_step += 1
        if self._scaler is not None:
            self._scaler.update_scale(not math.isfinite(norm))
        if not math.isfinite(norm):
            dropped = self._steps.take_back()
            if not dropped:
                self._steps.forget_all()
                self._step_state.fail(Stage.SPOILED)
            self._skipped_steps += dropped
            return StepOutcome(applied=not dropped, boundary=True, grad_norm=norm)
        # DeepSpeed unscales by the scale of the next step, even where it has just grown.
        self._run_step(norm, scale if self._unscales_first else self._scale)
        if self._scheduler is not None:
            self._scheduler.step()
        # In fp32, as DeepSpeed divides it.
        unscaled = float(torch.tensor(norm) / scale)
        return StepOutcome(applied=True, boundary=True, grad_norm=unscaled)

    @property
    def _scale(self) -> float:
        """Factor of the losses, and thereby of the gradients."""
        return 1.0 if self._scaler is None else float(self._scaler.loss_scale)

    def _run_step(self, norm: float, scale: float) -> None:
        """Begin the step, and call the hooks registered on the optimizer."""
        if not self._steps.is_eager:
            self._call_hooks(_global_optimizer_pre_hooks, self._optimizer._optimizer_step_pre_hooks)
        with self._step_state.updating():
            self._steps.step(norm, scale)
        after = _global_optimizer_post_hooks, self._optimizer._optimizer_step_post_hooks
        if any(after):
            self._steps.settle()
        self._call_hooks(*reversed(after))

    def _call_hooks(self, *hooks: Mapping[Any, Callable[..., Any]]) -> None:
        """Call hooks as ``Optimizer.profile_hook_step`` does around a step."""
        for hook in [each for some in hooks for each in some.values()]:
            hook(self._optimizer, (), {})

    @override
    def _check_before_forward(self) -> None:
        super()._check_before_forward()
        self._check_not_replaced()

    @override
    def _check_before_step(self, step: int) -> None:
        self._check_not_replaced()
        super()._check_before_step(step)

    def _check_not_replaced(self) -> None:
        if (member := self._find_replaced()) is not None:
            raise _replaced(member)

    def _find_replaced(self) -> Member | None:
        """A parameter that does not use its unit's memory any more, or wrote its device copy."""
        with torch._C.DisableTorchFunctionSubclass():
            for unit in self._units:
                for member in unit.members:
                    is_written = (
                        not unit.resident
                        and member.parameter._version != self._versions[member.name]
                    )
                    if is_written or not is_in_place(unit, member):
                        return member
        return None

    @override
    def _discard(self) -> None:
        self._steps.forget()
        self._count_discarded()

    @override
    def _release(self) -> None:
        with ExitStack() as ending:
            ending.callback(self._give_back)
            for end in (*(lane.close for lane in self._lanes), self._steps.close):
                ending.callback(end)
            ending.callback(self._residency.close)
            ending.callback(self._steps.passes.close)
            ending.callback(self._leave_ranks)
            self._steps.forget_all()
            self._steps.wait_for_all()
            self._steps.settle()

    def _leave_ranks(self) -> None:
        """Leave the synchronisation with all ranks."""

    def _give_back(self) -> None:
        for unit in self._units:
            for member in unit.members if not unit.resident else ():
                release_weight(member)
            unit.give_back(self._memory)
        follow_inner_tensors(self._module)

    @property
    def _bits(self) -> str:
        return "results are bit-identical to ZeRO-2 with CPU offload"

    def _describe(self) -> tuple[Decision, ...]:
        streamed = [unit for unit in self._units if not unit.resident]
        total = sum(unit.nbytes for unit in streamed)
        eager = "in the backward pass" if self._steps.is_eager else "after the gradient norm"
        masters, bits = self._plan.masters, self._bits
        if self._plan.update is not None:
            bits = f"on the device, by the code of {type(self._optimizer).__name__}"
        elif isinstance(self._optimizer, AdamW8BitStates):
            bits = "only this engine supports these 8-bit moments"
        elif isinstance(self._optimizer, AdamWBF16States) and self._group.world_size > 1:
            bits += ", except for the stochastic rounding of bf16 moments"
        if masters == "split":
            bits += ", except for master weights halfway between two bf16 numbers"
        kept = () if masters == "fp32" else (STORED_OTHERWISE[masters],)
        if self._plan.is_resident:
            step = Decision(
                "optimizer.step",
                chosen_optimizer(self._plan).implementation,
                f"one pass over each of {len(self._units)} units, in a thread",
                "a unit is uploaded as soon as it is updated, and the next forward pass waits "
                f"for a unit only when it uses the unit; {bits}",
            )
            return step, *kept
        where = Decision(
            KEY,
            self._plan.streamed,
            f"{len(streamed)} units, {format_size(self._capacity)} of "
            f"{format_size(total)} on the device",
            f"each unit is uploaded before use and updated {eager}; {bits}",
        )
        return where, self._kept_gradients, *kept

    @property
    @override
    def _engine_decisions(self) -> tuple[Decision, ...]:
        uploads = (
            Decision(
                "optimizer.step.uploads",
                "during the next forward pass",
                "before step() returns",
                reason,
            )
            for reason in self._steps.at_once
        )
        return (*super()._engine_decisions, *uploads)

    @override
    def _checks(self) -> Checks:
        plan, checks = self._plan, Checks()
        choice = chosen_optimizer(plan)
        checks.optimizer(
            choice,
            self._optimizer,
            scheduler=plan.scheduler,
            steps_taken=self._global_step - self._skipped_steps,
            groups=self._expected_groups,
        )
        names = {id(slab.key): slab for unit in self._units for slab in unit.slabs}
        checks.group_members(
            self._expected_groups,
            [
                RunningGroup(
                    params={},
                    members=frozenset(
                        m.name for p in group["params"] for m in names[id(p)].members
                    ),
                )
                for group in self._optimizer.param_groups
            ],
        )
        running = None if self._scheduler is None else type(self._scheduler).__name__
        checks.equal("scheduler.type", scheduler_class(plan), running)
        dtypes = {str(unit.host.dtype) for unit in self._units if unit.slabs}
        checks.equal("precision", str(self.dtype), ", ".join(sorted(dtypes)))
        places = {slab.key.device.type for unit in self._units for slab in unit.slabs}
        checks.equal("offload_optimizer.device", "cpu", ", ".join(sorted(places)))
        checks.equal("world_size", plan.world_size, self._group.world_size)
        place = "host" if isinstance(self._steps.update, AdamOnHost) else "device"
        checks.equal("update", "host" if plan.update is None else "device", place)
        return checks


def _replaced(member: Member) -> EngineError:
    return EngineError(
        "this parameter was replaced, or its device copy was written during a call of its block; "
        "the next step would undo or ignore the change",
        "write weights through engine.master_weights.editing(), and restore swapped weights "
        "before the next step",
        f"model.{member.name}",
    )


def _capacity(streaming: Streaming, units: list[Unit]) -> int:
    """Bytes of device memory for streamed units."""
    return streaming.capacity([unit.nbytes for unit in units if not unit.resident])
