"""Training under ZeRO, on DeepSpeed directly.

Why not through accelerate: its DeepSpeed plugin fills ``"auto"`` in two directions, replaces an
optimizer it does not recognise by DeepSpeedCPUAdam when offload is on, sizes buckets from a
``hidden_size`` that diffusion models lack, and divides schedules by the number of processes. A
plan that is already resolved needs none of that. See docs/engines.md for the measurements.
"""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from typing_extensions import override

from zerotune.backend.checks import Checks, RunningGroup, check_alike, expected_groups
from zerotune.backend.deepspeed.fixes import (
    align_swapped_gradients,
    join_adam_on_device,
    look_at_gradients,
    replay_adam_steps,
    undo_dummy_step,
)
from zerotune.backend.deepspeed.given_back import GivenBack, end_threads, remove_hooks
from zerotune.backend.deepspeed.host_step import HostStep, take_over_step
from zerotune.backend.deepspeed.layouts import inner_optimizer, layout_of_deepspeed, note_edits
from zerotune.backend.deepspeed.leaf_modules import (
    called_twice,
    doubtful_leaf_modules,
    reduce_by_parameter,
)
from zerotune.backend.deepspeed.placement import pin_exactly
from zerotune.backend.deepspeed.reads import ask_once
from zerotune.backend.deepspeed.start import (
    check_plan,
    check_shapes,
    check_world,
    initialize,
    initialize_arguments,
    join,
    read_weights,
)
from zerotune.backend.deepspeed.verify import compare
from zerotune.backend.dtypes import check_model_dtype, check_quantized
from zerotune.backend.engine import EngineState, StepOutcome
from zerotune.backend.layouts import require_trainable
from zerotune.backend.master_weights import MasterWeights
from zerotune.backend.optimizers.classes import ShardAware
from zerotune.backend.optimizers.client import chosen_optimizer
from zerotune.backend.proof import prove_offload
from zerotune.backend.running import (
    RunningEngine,
    StartedEngine,
    check_not_gone,
    gradient_norm,
    naming_the_lost,
)
from zerotune.backend.stored import check_has_weights, dtype_at_rest
from zerotune.decisions import Decision, announce
from zerotune.errors import EngineError
from zerotune.plan.model import ResolvedPlan

_BEFORE_THE_FIRST: Final = -1
"""``micro_step_id`` between two windows, where DeepSpeed's module does not name it."""
_SCALER_FIELDS: Final = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class ZeROEngine(RunningEngine):
    """An ``Engine`` over a ``deepspeed.DeepSpeedEngine``, whoever initialized that.

    Whoever inherits it sets plan, group, module, ``_engine`` and ``_expected_groups``, and then
    calls ``_verify``.
    """

    _engine: Any
    _expected_groups: tuple[RunningGroup, ...]
    _host_step: HostStep | None = None
    """What takes the optimizer's steps in place of DeepSpeed, if anything does."""
    _broken_by: str | None = None
    """What ended a backward pass from which DeepSpeed does not recover."""
    _unfinished = False
    """Whether there are gradients of a micro batch that was never closed by ``step``."""

    def _verify(self, *, builder: str) -> None:
        """See where DeepSpeed put the master weights, and whether what runs is the plan.

        An optimizer that has to know the layout is told.

        Args:
            builder: Who initialized DeepSpeed, for the message.

        Raises:
            UnsupportedEngineError: An optimizer wrapper that zerotune does not know.
            VerificationError: What runs is not what the plan says; names every difference.
        """
        layout = layout_of_deepspeed(self._engine, rank=self._group.rank)
        note_edits(self._engine.optimizer, layout)
        self._master_weights = MasterWeights(layout=layout, group=self._group, device=self.device)
        inner = inner_optimizer(self._engine)
        if isinstance(inner, ShardAware):
            inner.attach(layout=layout, group=self._group, device=self.device)
        self._checks().raise_if_failed(engine=builder)

    @property
    def device(self) -> torch.device:
        """Where batches must lie."""
        return torch.device(self._engine.device)

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the weights in the forward pass."""
        dtype: torch.dtype = self._engine.get_data_types()[0]
        return dtype

    @property
    def deepspeed_engine(self) -> Any:
        """The ``deepspeed.DeepSpeedEngine``, for what this class does not offer."""
        return self._engine

    @property
    def lr(self) -> float:
        """Learning rate of the first group for the next optimizer step."""
        return float(self._engine.optimizer.param_groups[0]["lr"])

    @property
    def state(self) -> EngineState:
        """Counters, scheduler and loss scale, to be saved."""
        scheduler = self._engine.lr_scheduler
        return EngineState(
            global_step=self._engine.global_steps,
            micro_step=self._engine.micro_steps,
            skipped_steps=self._engine.skipped_steps,
            scheduler={} if scheduler is None else dict(scheduler.state_dict()),
            loss_scaler=_read_scaler(self._engine.optimizer),
        )

    def load_state(self, state: EngineState) -> None:
        """Restore counters, scheduler (with the learning rate it implies) and loss scale.

        Gradients of a micro batch that was never closed, because of an error perhaps, are dropped.
        """
        self._master_weights.settle()
        engine = self._engine
        if self._unfinished:
            self.discard()
        engine.global_steps = state.global_step
        engine.micro_steps = state.micro_step
        engine.skipped_steps = state.skipped_steps
        engine.global_samples = state.global_step * engine.train_batch_size()
        schedule, position = engine.lr_scheduler, _position(state.scheduler)
        # Before a first step there is nothing to set, unless this engine has taken some.
        if schedule is not None and max(position, _position(schedule.state_dict())) >= 0:
            # Loading only the position would leave the learning rate as it is.
            schedule.step(position)
        _write_scaler(engine.optimizer, state.loss_scaler)
        taken = state.global_step - state.skipped_steps
        replay_adam_steps(engine, taken)
        if self._host_step is not None:
            self._host_step.replay(taken)

    @naming_the_lost
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward pass; at stage 3, weights are gathered layer by layer."""
        if torch.is_grad_enabled():
            self._check_goes_on()
            self._check_before_forward()
        return self._engine(*args, **kwargs)

    @naming_the_lost
    def backward(self, loss: torch.Tensor) -> None:
        """Back-propagate a scalar loss; DeepSpeed divides by the accumulation steps."""
        self._check_goes_on()
        self._unfinished = True
        self._master_weights.settle()
        try:
            self._engine.backward(loss)
        except BaseException as error:
            self._broken_by = type(error).__name__ if self._plan.stage >= 2 else None
            if (clear := self._clearer(error)) is not None:
                raise clear from error
            raise

    def _clearer(self, error: BaseException) -> EngineError | None:
        """An error that says what DeepSpeed's means, where that is known."""
        if isinstance(error, AssertionError):
            return called_twice(self._engine)
        return self._strided() if isinstance(error, RuntimeError) else None

    def _check_goes_on(self) -> None:
        """Can another pass begin?

        Raises:
            EngineError: A backward pass has not ended.
        """
        if self._broken_by is not None:
            raise EngineError(
                f"the last backward pass ended in {self._broken_by}, and DeepSpeed keeps the "
                "gradients that it had begun to reduce",
                key="engine.backward",
                fix="resume from the last checkpoint with a new engine; an error in the forward "
                "pass would have left nothing behind",
            )

    def _strided(self) -> EngineError | None:
        """Weights in a memory order of which DeepSpeed cannot take flat gradients."""
        for name, parameter in self._module.named_parameters():
            if parameter.requires_grad and not parameter.is_contiguous():
                return EngineError(
                    "its memory order changed while the engine trains it, and DeepSpeed cannot "
                    "take such gradients",
                    key=f"model.{name}",
                    value=f"strides {parameter.stride()}",
                    fix="give the model and its inputs another memory format before the engine "
                    "starts, or call model.to(memory_format=torch.contiguous_format)",
                )
        return None

    @property
    @override
    def _later_decisions(self) -> tuple[Decision, ...]:
        return () if self._host_step is None else self._host_step.decisions

    @naming_the_lost
    def step(self) -> StepOutcome:
        """Close a micro batch; update the weights when it is the last of its group.

        A gradient that is not finite is not applied, also where DeepSpeed would.
        """
        boundary = bool(self._engine.is_gradient_accumulation_boundary())
        if boundary:
            self._check_before_step(self._engine.global_steps)
        norm = self._unchecked_norm() if boundary else None
        if norm is not None and not math.isfinite(norm):
            self.discard()
            return StepOutcome(applied=False, boundary=True, grad_norm=norm)
        self._engine.step()
        self._unfinished = False
        applied = boundary and bool(self._engine.was_step_applied())
        if boundary and norm is None:
            norm = self._engine.get_global_grad_norm()
        if boundary and norm is None and not applied and self._plan.precision != "fp16":
            norm = math.nan
        return StepOutcome(
            applied=applied,
            boundary=boundary,
            grad_norm=None if norm is None else float(norm),
        )

    def discard(self) -> None:
        """Drop the accumulation window under way; it counts as a skipped step.

        Raises:
            EngineError: A backward pass has not ended.
        """
        self._check_goes_on()
        self._master_weights.settle()
        discard_gradients(self._engine)
        self._unfinished = False

    def _unchecked_norm(self) -> float | None:
        """Norm of the gradients where DeepSpeed steps whatever they are: at stage 0 in fp32."""
        engine = self._engine
        if hasattr(engine.optimizer, "overflow") or engine.torch_autocast_z0_gradscaler:
            return None
        norm = gradient_norm(self._module.parameters())
        if not engine.enable_backward_allreduce:
            # 1-bit optimizers: each rank has gradients of its own, and all must do the same.
            bad = self._group.any(not math.isfinite(norm))
            norm = math.nan if bad else norm
        return norm

    def _train(self, mode: bool) -> None:
        self._engine.train(mode)

    def _checks(self) -> Checks:
        return compare(self._engine, self._plan, module=self._module, groups=self._expected_groups)


class DeepSpeedEngine(StartedEngine, ZeROEngine):
    """An ``Engine`` whose weights, gradients and states DeepSpeed partitions and offloads.

    Args:
        model: The model, in fp32, on any device.
        plan: A resolved plan with optimizer and scheduler chosen and nothing ``"auto"``.
        timeout_s: Seconds after which a collective gives up.

    Raises:
        EngineError: The plan does not use DeepSpeed, has no optimizer choice, was resolved for
            another world size, or DeepSpeed refused it.
        MissingDependencyError: DeepSpeed is not installed.
        VerificationError: What DeepSpeed built is not what the plan says.
    """

    @override
    def _start(self, model: torch.nn.Module, plan: ResolvedPlan, timeout_s: float) -> None:
        check_plan(plan)
        check_not_gone(model)
        check_has_weights(model)
        self._plan, self._module = plan, model
        deepspeed, self._group = join(plan, self.resources, timeout_s=timeout_s)
        check_world(plan, self._group)
        check_alike(plan, model, self._group)
        named = require_trainable(model)
        check_shapes(plan, model)
        check_model_dtype(model, plan)
        check_quantized(model, plan)
        rounded = plan.precision != "fp32" and any(
            dtype_at_rest(p) == torch.float32 for _, p in named
        )
        # Before anything takes memory of the device.
        proven = prove_offload(plan, self._group)
        read = read_weights(deepspeed, plan, model)
        pinned = pin_exactly(plan, resources=self.resources)
        arguments = initialize_arguments(plan, model)
        self._expected_groups = expected_groups(
            chosen_optimizer(plan), named, arguments["optimizer"]
        )
        self._engine, built = initialize(deepspeed, plan, arguments, self.resources)
        asking = ask_once(self._engine)
        self._host_step, stepping = take_over_step(self._engine, plan, self._group)
        self._decisions = (
            *read,
            *(_rounding(plan) if rounded else ()),
            *proven,
            *pinned,
            *built,
            *doubtful_leaf_modules(plan, model),
            *reduce_by_parameter(self._engine),
            *undo_dummy_step(self._engine),
            *look_at_gradients(self._engine),
            *align_swapped_gradients(self._engine),
            *join_adam_on_device(self._engine),
            *asking,
            *stepping,
        )
        self._verify(builder="DeepSpeed")
        announce(self.decisions, rank=self._group.rank)

    def _release(self) -> None:
        try:
            if self._host_step is not None:
                self._host_step.close()
        finally:
            self._give_back()

    def _give_back(self) -> None:
        back = None
        if self._plan.stage == 3:
            back = GivenBack(module=self._module, world_size=self._group.world_size)
        self._engine.destroy()
        end_threads(self._engine)
        remove_hooks(self._module)
        if back is not None:
            back.finish()
            # What stage 3 has made of each parameter holds itself, and a process group.
            gc.collect()


def _rounding(plan: ResolvedPlan) -> tuple[Decision, ...]:
    return (
        Decision(
            key="model.dtype",
            before="fp32",
            after=plan.precision,
            reason=f"DeepSpeed rounds the weights to {plan.precision} before it makes the fp32 "
            "master copy, so training starts from the rounded weights",
        ),
    )


def discard_gradients(engine: Any) -> None:
    """Drop the accumulation window of a ``deepspeed.DeepSpeedEngine``, as a skipped step.

    Does what the wrappers do themselves when a loss scale overflows, which is their only way to
    drop a step, and clears the buffers that outlive it: a parameter without a gradient in the
    next window would otherwise be stepped with that of the dropped one. Weights, states, loss
    scale and scheduler stay as they are.

    Args:
        engine: DeepSpeed's engine at stage 0 to 3, on any device.
    """
    wrapper = engine.optimizer
    kind = type(wrapper).__name__
    if kind == "DeepSpeedZeroOptimizer_Stage3":
        _discard_at_stage_3(wrapper)
    elif kind == "DeepSpeedZeroOptimizer":
        _discard_at_stages_1_and_2(wrapper)
    else:
        wrapper.zero_grad()
        for flat in _tensors(getattr(wrapper, "fp32_groups_flat", ())):
            flat.grad = None
    engine.zero_grad()
    _count_as_skipped(engine)


def _count_as_skipped(engine: Any) -> None:
    window = engine.gradient_accumulation_steps()
    engine.micro_steps = (engine.micro_steps // window + 1) * window
    engine.global_steps += 1
    engine.skipped_steps += 1
    engine.global_samples += engine.train_batch_size()
    engine._step_applied = False


def _discard_at_stages_1_and_2(wrapper: Any) -> None:
    # The copies of offloaded gradients may still be under way; absent before DeepSpeed 0.19.
    wait = getattr(wrapper, "_wait_for_offload_copies", None)
    if wait is not None:
        wait()
    home = sys.modules[type(wrapper).__module__]
    wrapper.micro_step_id = getattr(home, "INITIAL_MICRO_STEP_ID", _BEFORE_THE_FIRST)
    wrapper.zero_grad(set_to_none=True)
    if hasattr(wrapper, "_release_preflattened_grad_buffers"):
        wrapper._release_preflattened_grad_buffers()
    if wrapper.cpu_offload:
        if hasattr(wrapper, "_offload_accumulated_param_ids"):
            wrapper._offload_accumulated_param_ids = set()
        wrapper.reset_cpu_buffers()
        _clear(getattr(wrapper, "accumulated_grads_in_cpu", {}).values())
        _clear_gradients(wrapper.single_partition_of_fp32_groups)
        return
    for group in wrapper.averaged_gradients:
        wrapper.averaged_gradients[group] = None
        wrapper.all_grad_tensors[group] = None


def _discard_at_stage_3(wrapper: Any) -> None:
    wrapper._pre_step()
    wrapper._partition_all_parameters()
    wrapper._overflow_clean_up(None)
    wrapper.inf_or_nan_tracker.zero_()
    _clear([wrapper.grad_partitions_flat_buffer])
    _clear_gradients(wrapper.fp32_partitioned_groups_flat)


def _clear_gradients(flats: Iterable[Any]) -> None:
    _clear(flat.grad for flat in _tensors(flats))


def _clear(tensors: Iterable[torch.Tensor | None]) -> None:
    for tensor in tensors:
        if tensor is not None:
            tensor.zero_()


def _tensors(found: Iterable[Any]) -> list[torch.Tensor]:
    return [each for each in found if isinstance(each, torch.Tensor)]


def _scaler(wrapper: Any) -> Any:
    for name in ("loss_scaler", "loss_scale_config"):
        if hasattr(wrapper, name):
            return getattr(wrapper, name)
    return None


def _read_scaler(wrapper: Any) -> dict[str, Any]:
    scaler = _scaler(wrapper)
    fields = {name: getattr(scaler, name, None) for name in _SCALER_FIELDS}
    return {name: value for name, value in fields.items() if isinstance(value, (int, float))}


def _write_scaler(wrapper: Any, fields: dict[str, Any]) -> None:
    scaler = _scaler(wrapper)
    for name, value in fields.items():
        if hasattr(scaler, name):
            setattr(scaler, name, value)


def _position(scheduler: Mapping[str, Any]) -> int:
    """The optimizer step that a saved schedule stands right after; -1 before the first."""
    return int(scheduler.get("last_batch_iteration", -1))
