"""Forgetting gradients that DeepSpeed has accumulated and must never apply."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from zerotune._util.closing import Closing
from zerotune._util.environment import held
from zerotune.backend.deepspeed.fixes import (
    align_swapped_gradients,
    replay_adam_steps,
    undo_dummy_step,
)
from zerotune.backend.deepspeed.layouts import full_shape, layout_of_deepspeed, trainable_parameters
from zerotune.backend.deepspeed.placement import (
    doubtful_leaf_modules,
    flat_through_host,
    leaf_modules,
    named_leaf_modules,
    pin_exactly,
    shard_from_host,
)
from zerotune.backend.deepspeed.start import (
    check_plan,
    check_shapes,
    check_world,
    quiet_deepspeed,
    require_deepspeed,
)
from zerotune.backend.distributed import Launch, ProcessGroup
from zerotune.backend.engine import EngineState, StepOutcome
from zerotune.backend.master_weights import MasterWeights
from zerotune.backend.ops.build import same_ninja
from zerotune.backend.optimizers import ShardAware
from zerotune.backend.optimizers.client import (
    build_client_optimizer,
    own_scheduler,
    parameter_groups,
    scheduler_class,
)
from zerotune.backend.verify import Checks, RunningGroup, expected_groups, running_groups
from zerotune.decisions import Decision, announce
from zerotune.errors import EngineError
from zerotune.plan.api import ResolvedPlan

_BEFORE_THE_FIRST: Final = -1
"""``micro_step_id`` between two windows, where DeepSpeed's module does not name it."""


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


# -- Training under ZeRO, on DeepSpeed directly.
#
# Why not through accelerate: its DeepSpeed plugin fills ``"auto"`` in two directions, replaces an
# optimizer it does not recognise by DeepSpeedCPUAdam when offload is on, sizes buckets from a
# ``hidden_size`` that diffusion models lack, and divides schedules by the number of processes. A
# plan that is already resolved needs none of that. See docs/engines.md for the measurements.


_COMMUNICATION = {"cpu": "gloo", "cuda": "nccl"}
_SCALER_FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class DeepSpeedEngine(Closing):
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

    def __init__(
        self, *, model: torch.nn.Module, plan: ResolvedPlan, timeout_s: float = 600.0
    ) -> None:
        super().__init__()
        with self._starting():
            self._start(model, plan, timeout_s)

    def _start(self, model: torch.nn.Module, plan: ResolvedPlan, timeout_s: float) -> None:
        check_plan(plan)
        accelerator = plan.platform.deepspeed.accelerator or plan.platform.accelerator
        deepspeed = require_deepspeed(accelerator=accelerator)
        quiet_deepspeed()
        launch = Launch.from_environment()
        self._plan = plan
        self._group = ProcessGroup(
            backend=_COMMUNICATION.get(accelerator, "gloo"), launch=launch, timeout_s=timeout_s
        )
        self.resources.callback(self._group.close)
        check_world(plan, self._group)
        named = trainable_parameters(model)
        if not named:
            raise EngineError("no parameter requires a gradient", key="model", fix="unfreeze some")
        check_shapes(model)
        rounded = plan.precision != "fp32" and any(p.dtype == torch.float32 for _, p in named)
        # DeepSpeed reads LOCAL_RANK in many places, also where no launcher has set it.
        self.resources.enter_context(held("LOCAL_RANK", str(launch.local_rank)))
        pinned = pin_exactly(plan)
        self._engine, self._expected_groups, built = _initialize(deepspeed, model, named, plan)
        self._module = model
        self._decisions = (
            *_rounding(plan, rounded),
            *pinned,
            *built,
            *doubtful_leaf_modules(plan, model),
            *undo_dummy_step(self._engine),
            *align_swapped_gradients(self._engine),
        )
        self._find_master_weights()
        self._checks().raise_if_failed(engine="DeepSpeed")
        announce(self.decisions, rank=self._group.rank)

    def _find_master_weights(self) -> None:
        """See where DeepSpeed put them, and tell an optimizer that has to know."""
        layout = layout_of_deepspeed(self._engine, rank=self._group.rank)
        self._master_weights = MasterWeights(layout=layout, group=self._group, device=self.device)
        inner = getattr(self._engine.optimizer, "optimizer", self._engine.optimizer)
        if isinstance(inner, ShardAware):
            inner.attach(layout=layout, group=self._group, device=self.device)

    @property
    def plan(self) -> ResolvedPlan:
        """The plan this engine was verified against."""
        return self._plan

    @property
    def module(self) -> torch.nn.Module:
        """The user's model; at stage 3 its parameters are partitioned outside a forward."""
        return self._module

    @property
    def group(self) -> ProcessGroup:
        """The processes that train together."""
        return self._group

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
    def master_weights(self) -> MasterWeights:
        """The fp32 weights the optimizer updates, and its states."""
        return self._master_weights

    @property
    def lr(self) -> float:
        """Learning rate of the first group for the next optimizer step."""
        return float(self._engine.optimizer.param_groups[0]["lr"])

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Automatic choices of the plan and of this engine."""
        return (*self._plan.decisions, *self._decisions)

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
        """Restore counters, scheduler (with the learning rate it implies) and loss scale."""
        engine = self._engine
        engine.global_steps = state.global_step
        engine.micro_steps = state.micro_step
        engine.skipped_steps = state.skipped_steps
        engine.global_samples = state.global_step * engine.train_batch_size()
        position = state.scheduler.get("last_batch_iteration", -1)
        if engine.lr_scheduler is not None and position >= 0:
            # Loading only the position would leave the learning rate at its first value.
            engine.lr_scheduler.step(position)
        _write_scaler(engine.optimizer, state.loss_scaler)
        replay_adam_steps(engine, state.global_step - state.skipped_steps)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward pass; at stage 3, weights are gathered layer by layer."""
        return self._engine(*args, **kwargs)

    def backward(self, loss: torch.Tensor) -> None:
        """Back-propagate a scalar loss; DeepSpeed divides by the accumulation steps."""
        self._engine.backward(loss)

    def step(self) -> StepOutcome:
        """Close a micro batch; update the weights when it is the last of its group."""
        boundary = bool(self._engine.is_gradient_accumulation_boundary())
        self._engine.step()
        norm = self._engine.get_global_grad_norm() if boundary else None
        return StepOutcome(
            applied=boundary and bool(self._engine.was_step_applied()),
            boundary=boundary,
            grad_norm=None if norm is None else float(norm),
        )

    def discard(self) -> None:
        """Drop the accumulation window under way; it counts as a skipped step."""
        discard_gradients(self._engine)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluation mode without gradients; the earlier mode comes back after."""
        training = self._module.training
        self._engine.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self._engine.train(training)

    def explain(self) -> str:
        """What runs, verified, with every automatic choice."""
        extra = "\n".join(f"  [{d.severity}] {d}" for d in self._decisions)
        return "\n".join(
            part for part in (self._checks().render(), self._plan.explain(), extra) if part
        )

    def _release(self) -> None:
        self._engine.destroy()

    def _checks(self) -> Checks:
        engine, plan, checks = self._engine, self._plan, Checks()
        inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
        checks.equal("zero_optimization.stage", plan.stage, engine.zero_optimization_stage())
        if plan.optimizer is not None:
            checks.equal("optimizer.type", plan.optimizer.implementation, type(inner).__name__)
            checks.optimizer_arguments(
                plan.optimizer,
                inner,
                scheduler=plan.scheduler,
                steps_taken=engine.global_steps - engine.skipped_steps,
                groups=self._expected_groups,
            )
            checks.group_members(self._expected_groups, running_groups(engine, self._module))
        checks.equal(
            "scheduler.type",
            scheduler_class(plan),
            None if engine.lr_scheduler is None else type(engine.lr_scheduler).__name__,
        )
        checks.equal("precision", plan.precision, _precision(engine))
        checks.equal(
            "gradient_accumulation_steps",
            plan.gradient_accumulation_steps,
            engine.gradient_accumulation_steps(),
        )
        checks.equal(
            "gradient_clipping", float(plan.gradient_clipping), float(engine.gradient_clipping())
        )
        checks.equal(
            "train_micro_batch_size_per_gpu",
            plan.micro_batch_size,
            engine.train_micro_batch_size_per_gpu(),
        )
        checks.equal("train_batch_size", plan.train_batch_size, engine.train_batch_size())
        optimizer_device, parameter_device = _offload_devices(engine)
        checks.equal("offload_optimizer.device", plan.offload_optimizer, optimizer_device)
        checks.equal("offload_param.device", plan.offload_param, parameter_device)
        if plan.stage == 3:
            checks.equal("stage 3 partitions", True, _partitions(self._module))
            named = named_leaf_modules(plan, self._module)
            checks.equal("leaf modules", len(named), len(leaf_modules(self._module)))
        return checks


def _initialize(
    deepspeed: Any,
    model: torch.nn.Module,
    named: list[tuple[str, torch.nn.Parameter]],
    plan: ResolvedPlan,
) -> tuple[Any, tuple[RunningGroup, ...], tuple[Decision, ...]]:
    choice = plan.optimizer
    if choice is None:
        raise EngineError("the plan has no optimizer choice", key="plan.optimizer")
    client = None if choice.source == "deepspeed" else build_client_optimizer(choice, named)
    expected = expected_groups(choice, named, client)
    device = _device(deepspeed)
    try:
        with same_ninja(), flat_through_host(deepspeed, plan, device=device) as built:
            if plan.stage == 3:
                shard_from_host(deepspeed, model, plan, device=device)
            engine, *_ = deepspeed.initialize(
                model=model,
                model_parameters=parameter_groups(choice, named),
                optimizer=client,
                lr_scheduler=own_scheduler(plan),
                config=plan.to_deepspeed(),
                dist_init_required=False,
            )
    except (AssertionError, ValueError, RuntimeError, TypeError, AttributeError) as error:
        raise EngineError(
            f"DeepSpeed {deepspeed.__version__} refused the plan "
            f"({type(error).__name__}: {str(error).strip() or 'no message'})",
            key="deepspeed.initialize",
            fix="run `zerotune doctor` when an op could not be built, else change what it names",
        ) from error
    return engine, expected, tuple(built)


def _device(deepspeed: Any) -> torch.device:
    return torch.device(deepspeed.accelerator.get_accelerator().current_device_name())


def _rounding(plan: ResolvedPlan, rounded: bool) -> tuple[Decision, ...]:
    if not rounded:
        return ()
    return (
        Decision(
            key="model.dtype",
            before="fp32",
            after=plan.precision,
            reason=f"DeepSpeed rounds the weights to {plan.precision} before it makes the fp32 "
            "master copy, so training starts from the rounded weights",
        ),
    )


def _precision(engine: Any) -> str:
    if engine.bfloat16_enabled():
        return "bf16"
    return "fp16" if engine.fp16_enabled() else "fp32"


def _offload_devices(engine: Any) -> tuple[str, str]:
    """What the running optimizer really does, not what its configuration says."""
    wrapper = engine.optimizer
    optimizer = parameter = "none"
    if getattr(wrapper, "swap_optimizer", False):
        optimizer = "nvme"
    elif getattr(wrapper, "offload_optimizer", False) or getattr(wrapper, "cpu_offload", False):
        optimizer = "cpu"
    if getattr(wrapper, "params_in_nvme_and_cpu", False):
        parameter = "nvme"
    elif getattr(wrapper, "offload_param", False):
        parameter = "cpu"
    return optimizer, parameter


def _partitions(module: torch.nn.Module) -> bool:
    """Whether stage 3 really partitions: a high persistence threshold keeps all whole.

    Frozen parameters count too: beside a large frozen base all adapters are small enough to stay.
    """
    parameters = list(module.parameters())
    whole = sum(p.numel() for p in parameters)
    return whole < sum(torch.Size(full_shape(p)).numel() for p in parameters)


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
