"""Training under ZeRO through DeepSpeed's own API.

accelerate is not used, because a resolved plan needs none of the changes that accelerate's
DeepSpeed plugin makes. The plugin fills in ``"auto"`` values, replaces unknown optimizers with
DeepSpeedCPUAdam if the optimizer is offloaded, derives bucket sizes from a ``hidden_size`` that
diffusion models lack, and divides schedules by the number of processes. See docs/engines.md for
measurements.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.distributed as dist
from typing_extensions import override

from zerotune.backend.checks import (
    Checks,
    RunningGroup,
    check_quantized,
    expected_groups,
    share_buffers,
)
from zerotune.backend.deepspeed.given_back import restored
from zerotune.backend.deepspeed.leaf_modules import (
    doubtful_leaf_modules,
    leaf_modules,
    named_leaf_modules,
)
from zerotune.backend.deepspeed.order import UseOrder
from zerotune.backend.deepspeed.sharded import refuse_empty_tensors
from zerotune.backend.deepspeed.start import (
    initialize,
    initialize_arguments,
    join_checked,
    pin_exactly,
    place_of_weights,
    read_weights,
    wrapper_of,
)
from zerotune.backend.deepspeed.wrapper import OptimizerWrapper
from zerotune.backend.engine import (
    Engine,
    EngineState,
    StartedEngine,
    StepOutcome,
)
from zerotune.backend.master_weights import MasterWeights, full_shape, gradient_norm
from zerotune.backend.optimizers.classes import Muon
from zerotune.backend.optimizers.client import (
    chosen_optimizer,
    continue_schedule,
    scheduler_class,
)
from zerotune.backend.proof import prove_offload
from zerotune.backend.step.adams import taken_steps
from zerotune.backend.step_state import Stage
from zerotune.backend.stored import dtype_at_rest
from zerotune.decisions import Decision, announce
from zerotune.errors import EngineError
from zerotune.plan.plan import ResolvedPlan

SCALER_FIELDS: Final = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class ZeROEngine(Engine):
    """An ``Engine`` around a ``deepspeed.DeepSpeedEngine``.

    A subclass sets ``_plan``, ``_group``, ``_module``, ``_engine``, ``_wrapper`` and
    ``_expected_groups``, and then calls ``_verify``.
    """

    _engine: Any
    _wrapper: OptimizerWrapper
    _expected_groups: tuple[RunningGroup, ...]
    _guards_outputs = True
    _raw_backward: Callable[[torch.Tensor], object]
    _raw_step: Callable[[], object]
    _took_zeros = False
    _strides: Mapping[int, tuple[int, ...]] = MappingProxyType({})
    """Strides of each parameter when the engine started, by its id, at stage 0."""
    _homes: frozenset[tuple[torch.nn.Module, int]] = frozenset()
    """Modules, each with the id of a weight that DeepSpeed gathers for it, at stage 3."""
    _housed: Sequence[torch.nn.Parameter] = ()
    """The parameters when all were last found in modules that DeepSpeed gathers them for."""

    def _verify(self, *, builder: str) -> None:
        """Find DeepSpeed's master weights, attach the optimizer, and compare engine and plan.

        ``builder`` is the name of the component that initialized DeepSpeed.
        """
        layout, inner = self._wrapper.layout, self._wrapper.inner
        self._wrapper.note_edits()
        if self._group.world_size > 1:
            order = UseOrder(self._group)
            self.resources.callback(order.close)
            self._wrapper.compare_order(order)
        self._raw_backward, self._raw_step = self._engine.backward, self._engine.step
        self._master_weights = MasterWeights(layout=layout, group=self._group, device=self.device)
        if self._plan.stage == 0:
            self._parts.refresh()
            self._strides = self._current_strides()
        elif self._plan.stage == 3:
            self._homes = frozenset((module, id(each)) for _, module, each in self._weights())
        if isinstance(inner, Muon):
            inner.attach(layout=layout, group=self._group, device=self.device)
        self._checks().raise_if_failed(engine=builder)

    @property
    @override
    def device(self) -> torch.device:
        return torch.device(self._engine.device)

    @property
    @override
    def _sums_in_place(self) -> bool:
        return self._plan.stage < 2

    @property
    @override
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self._engine.get_data_types()[0]
        return dtype

    @property
    def deepspeed_engine(self) -> Any:
        """The ``deepspeed.DeepSpeedEngine``, for features that this class lacks."""
        return self._engine

    @property
    @override
    def lr(self) -> float:
        return float(self._engine.optimizer.param_groups[0]["lr"])

    @property
    @override
    def state(self) -> EngineState:
        scheduler, scaler = self._engine.lr_scheduler, self._wrapper.scaler
        fields = {name: getattr(scaler, name, None) for name in SCALER_FIELDS}
        return EngineState(
            global_step=self._engine.global_steps,
            micro_step=self._engine.micro_steps,
            skipped_steps=self._engine.skipped_steps,
            scheduler={} if scheduler is None else dict(scheduler.state_dict()),
            loss_scaler={
                name: value for name, value in fields.items() if isinstance(value, (int, float))
            },
        )

    @override
    def _load_state(self, state: EngineState) -> None:
        self._master_weights.settle()
        engine = self._engine
        if self._step_state.is_open:
            self._discard()
        engine.global_steps = state.global_step
        engine.micro_steps = state.micro_step
        engine.skipped_steps = state.skipped_steps
        engine.global_samples = state.global_step * engine.train_batch_size()
        continue_schedule(engine.lr_scheduler, state.scheduler)
        for name, value in state.loss_scaler.items():
            if hasattr(self._wrapper.scaler, name):
                setattr(self._wrapper.scaler, name, value)
        taken = state.global_step - state.skipped_steps
        replay_adam_steps(self._wrapper.inner, taken)

    @override
    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._engine(*args, **kwargs)

    @override
    def _backward(self, loss: torch.Tensor) -> None:
        self._master_weights.settle()
        self._wrapper.begin_backward()
        try:
            self._raw_backward(loss)
        except (AssertionError, RuntimeError) as error:
            is_refused = isinstance(error, AssertionError)
            clear = self._wrapper.refused() if is_refused else self._strided()
            if clear is not None:
                raise clear from error
            raise
        if not self._step_state.came_before:
            self._wrapper.begin_window(self._without_gradient)

    @property
    def _without_gradient(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Names and parameters that are trained, but got no gradient in the last backward pass."""
        came = self._step_state.came
        if self._trained <= came:
            return []
        expected = self._trained - came
        named = self._module.named_parameters()
        return [(n, p) for n, p in named if id(p) in expected and p.requires_grad]

    def _check_gradients(self) -> None:
        """Say once that DeepSpeed takes zeros for weights without a gradient; refuse lost ones."""
        before = self._step_state.came_before
        without = self._without_gradient
        lost = [name for name, parameter in without if id(parameter) in before]
        if lost and self._wrapper.loses_earlier_gradients:
            raise EngineError(
                "this parameter has a gradient from an earlier micro batch of the accumulation "
                "window, but none from the last one, and DeepSpeed would drop the first",
                "call engine.discard(), and use every weight in the last micro batch of a "
                'window, or train with engine="host"',
                f"model.{lost[0]}",
            )
        never = [name for name, parameter in without if id(parameter) not in before]
        if never and not self._took_zeros:
            self._took_zeros = True
            decision = Decision(
                "optimizer.step.gradients",
                None,
                "zeros",
                f"{never[0]} and {len(never) - 1} other parameters got no gradient in step "
                f"{self._engine.global_steps + 1}; DeepSpeed takes zeros for them, so their "
                "moments and weight decay still move them, while torch leaves them as they are",
                "warning",
            )
            self._decisions = (*self._decisions, decision)
            announce([decision], rank=self._group.rank)

    @property
    @override
    def _needs_own_forward(self) -> bool:
        return self._plan.stage == 3

    def _current_strides(self) -> dict[int, tuple[int, ...]]:
        return {id(parameter): parameter.stride() for parameter in self._parts.parameters}

    def _weights(self) -> Iterator[tuple[str, torch.nn.Module, torch.nn.Parameter]]:
        """Dotted name, module and parameter of every weight, tied ones once for each module."""
        for path, module in self._module.named_modules():
            for name, parameter in module.named_parameters(path, recurse=False):
                yield name, module, parameter

    def _check_homes(self) -> None:
        """At stage 3, check that DeepSpeed gathers every weight for the module that holds it."""
        if self._plan.stage < 3 or self._housed is self._parts.parameters:
            return
        for name, module, parameter in self._weights():
            if (module, id(parameter)) not in self._homes:
                raise EngineError(
                    "this parameter was added to its module after the engine started, and "
                    "DeepSpeed gathers the weights of each module as it was then",
                    "replace modules and tie weights before the engine starts; write new values "
                    "through engine.master_weights.editing()",
                    f"model.{name}",
                )
        self._housed = self._parts.parameters

    @override
    def _check_before_forward(self) -> None:
        super()._check_before_forward()
        self._check_layout()

    @override
    def _check_before_backward(self) -> None:
        self._parts.refresh()
        self._check_layout()

    def _check_layout(self) -> None:
        """Check that the model's weights are where DeepSpeed expects them."""
        self._check_homes()
        if self._plan.stage:
            try:
                self._master_weights.check_replaced()
            except EngineError as error:
                # A new memory format has a mend of its own.
                raise (self._strided() or error) from None
        elif (now := self._current_strides()) != self._strides:
            for name, parameter in self._module.named_parameters():
                strides = now[id(parameter)]
                if self._strides.get(id(parameter), strides) != strides:
                    raise _strided(name, strides)

    @override
    def _after_failure(self) -> Stage:
        return Stage.LOST if self._plan.stage >= 2 else Stage.BROKEN

    def _strided(self) -> EngineError | None:
        """The error for weights whose memory order DeepSpeed does not support, if any."""
        for name, parameter in self._module.named_parameters():
            if parameter.requires_grad and not parameter.is_contiguous():
                return _strided(name, parameter.stride())
        return None

    @override
    def _step(self) -> StepOutcome:
        boundary = bool(self._engine.is_gradient_accumulation_boundary())
        if boundary:
            self._check_before_step(self._engine.global_steps)
            self._check_gradients()
        norm = self._unchecked_norm() if boundary else None
        if norm is not None and not math.isfinite(norm):
            self._discard()
            return StepOutcome(applied=False, boundary=True, grad_norm=norm)
        with self._step_state.updating():
            self._raw_step()
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

    @override
    def _discard(self) -> None:
        self._master_weights.settle()
        engine = self._engine
        self._wrapper.drop_gradients()
        engine.zero_grad()
        window = engine.gradient_accumulation_steps()
        engine.micro_steps = (engine.micro_steps // window + 1) * window
        engine.global_steps += 1
        engine.skipped_steps += 1
        engine.global_samples += engine.train_batch_size()
        engine._step_applied = False

    def _unchecked_norm(self) -> float | None:
        """Gradient norm if DeepSpeed does not check gradients itself (stage 0 in fp32)."""
        engine = self._engine
        if self._wrapper.skips_overflow or engine.torch_autocast_z0_gradscaler:
            return None
        return float(gradient_norm(self._module.parameters()))

    @override
    def _check_before_step(self, step: int) -> None:
        trained, moved = self._trained, set[str]()
        self._parts.refresh()
        self._check_layout()
        if not self._wrapper.leaves_frozen and any(
            not each.requires_grad and id(each) in trained for each in self._parts.parameters
        ):
            named = self._module.named_parameters()
            moved = {name for name, p in named if not p.requires_grad and id(p) in trained}
            moved -= self._names_at_rest()
        if moved:
            raise EngineError(
                "this parameter was frozen after the engine started, but DeepSpeed would still "
                "update it or, at stage 0 in fp32, count the steps of other weights wrongly",
                "freeze the parameter before the engine starts, or set the learning rate of "
                "its parameter group to 0",
                f"model.{min(moved)}",
                "requires_grad=False",
            )
        super()._check_before_step(step)

    def _names_at_rest(self) -> frozenset[str]:
        """Names of the parameters that steps leave as they are, since their learning rate is 0."""
        running = self._engine.optimizer.param_groups
        groups = zip(self._expected_groups, running, strict=False)
        return frozenset().union(*(group.members for group, now in groups if not now["lr"]))

    @override
    def _train(self, mode: bool) -> None:
        self._engine.train(mode)

    @override
    def _checks(self) -> Checks:
        """Compare the plan with the engine, its optimizer and the model, not the configuration."""
        engine, plan, checks = self._engine, self._plan, Checks()
        checks.equal("zero_optimization.stage", plan.stage, engine.zero_optimization_stage())
        self._compare_optimizer(checks)
        precision = "bf16" if engine.bfloat16_enabled() else "fp32"
        checks.equal("precision", plan.precision, "fp16" if engine.fp16_enabled() else precision)
        steps, limit = plan.gradient_accumulation_steps, float(plan.gradient_clipping)
        checks.equal("gradient_accumulation_steps", steps, engine.gradient_accumulation_steps())
        checks.equal("gradient_clipping", limit, float(engine.gradient_clipping()))
        micro = engine.train_micro_batch_size_per_gpu()
        checks.equal("train_micro_batch_size_per_gpu", plan.micro_batch_size, micro)
        checks.equal("train_batch_size", plan.train_batch_size, engine.train_batch_size())
        optimizer, parameter = self._wrapper.devices
        checks.equal("offload_optimizer.device", plan.offload_optimizer, optimizer)
        checks.equal("offload_param.device", plan.offload_param, parameter)
        if plan.stage == 3:
            # A high persistence threshold keeps all parameters whole. Frozen parameters count too:
            # next to a large frozen base, all adapters are small enough to stay whole.
            parameters = list(self._module.parameters())
            whole = sum(math.prod(full_shape(p)) for p in parameters)
            checks.equal("stage 3 partitions", True, sum(p.numel() for p in parameters) < whole)
            named = named_leaf_modules(plan, self._module)
            checks.equal("leaf modules", len(named), len(leaf_modules(self._module)))
        return checks

    def _compare_optimizer(self, checks: Checks) -> None:
        engine, plan, inner = self._engine, self._plan, self._wrapper.inner
        choice = chosen_optimizer(plan)
        checks.optimizer(
            choice,
            inner,
            scheduler=plan.scheduler,
            steps_taken=engine.global_steps - engine.skipped_steps,
            groups=self._expected_groups,
        )
        names = {id(parameter): name for name, parameter in self._module.named_parameters()}
        members = zip(inner.param_groups, self._wrapper.members, strict=True)
        checks.group_members(
            self._expected_groups,
            [RunningGroup.read(group, parameters, names) for group, parameters in members],
        )
        running = None if engine.lr_scheduler is None else type(engine.lr_scheduler).__name__
        checks.equal("scheduler.type", scheduler_class(plan), running)


def _strided(name: str, strides: tuple[int, ...]) -> EngineError:
    return EngineError(
        "the parameter's memory format changed after the engine started, and DeepSpeed "
        "does not support gradients in the new format",
        "set the memory format of model and inputs before the engine starts, or "
        "call model.to(memory_format=torch.contiguous_format)",
        f"model.{name}",
        f"strides {strides}",
    )


class DeepSpeedEngine(StartedEngine, ZeROEngine):
    """An ``Engine`` whose weights, gradients and states DeepSpeed partitions and offloads.

    Args:
        model: The model, in fp32, on any device.
        plan: The resolved plan, which must contain an optimizer and may contain a schedule.
        timeout_s: Seconds after which a collective raises an error.

    Raises:
        EngineError: The plan does not use DeepSpeed, its optimizer is not resolved, the number of
            processes differs from the plan's, or DeepSpeed rejects the plan.
        MissingDependencyError: DeepSpeed is not installed.
        VerificationError: The engine that DeepSpeed built differs from the plan.
    """

    @override
    def _start(self, model: torch.nn.Module, plan: ResolvedPlan, timeout_s: float) -> None:
        self._plan, self._module = plan, model
        deepspeed, self._group, named = join_checked(
            plan, model, self.resources, timeout_s=timeout_s
        )
        check_quantized(model, plan)
        rounds = Decision(
            "model.dtype",
            "fp32",
            plan.precision,
            f"DeepSpeed rounds the weights to {plan.precision} before copying them to fp32 "
            "master weights, so training starts from rounded weights",
        )
        wide = any(dtype_at_rest(parameter) == torch.float32 for _, parameter in named)
        # The proof must run before this process allocates device memory.
        proven = prove_offload(plan, self._group)
        read = read_weights(plan, model, device=place_of_weights(deepspeed, plan))
        shared = share_buffers(model, self._group)
        pinned = pin_exactly(plan)
        arguments = initialize_arguments(plan, model)
        self._expected_groups = expected_groups(chosen_optimizer(plan), named)
        self._engine, built = initialize(deepspeed, plan, arguments, self.resources)
        if "timers" not in plan.to_deepspeed():
            # Otherwise, DeepSpeed waits for the device before each forward pass and after each step
            # to measure a throughput that nobody reads.
            self._engine.tput_timer.config.synchronized = False
        self._wrapper = wrapper_of(self._engine)
        self._decisions = (
            *read,
            *shared,
            *((rounds,) if wide and plan.precision != "fp32" else ()),
            *proven,
            *pinned,
            *built,
            *(doubtful_leaf_modules(plan, model) if plan.stage == 3 else ()),
            *self._wrapper.correct(),
            *self._wrapper.improve(),
        )
        self._verify(builder="DeepSpeed")
        if plan.stage == 3:
            for check in refuse_empty_tensors(self._engine):
                self.resources.callback(check.remove)
        announce(self.decisions, rank=self._group.rank)

    @override
    def _release(self) -> None:
        if self._plan.stage != 3:
            self._destroy()
            return
        with restored(self._module, self._wrapper.raw, world_size=self._group.world_size):
            self._destroy()
        # Stage 3's attributes of parameters form reference cycles with a process group.
        gc.collect()

    def _destroy(self) -> None:
        self._engine.destroy()
        end_threads(self._engine)
        # DeepSpeed's remaining hooks on the module keep the whole engine alive.
        for hooks in (self._module._forward_hooks, self._module._forward_pre_hooks):
            for key, hook in list(hooks.items()):
                if (getattr(hook, "__module__", None) or "").startswith("deepspeed."):
                    del hooks[key]


def end_threads(engine: Any) -> None:
    """Release the process groups and I/O queues of a destroyed DeepSpeed engine.

    Without this call, references from the engine's module would keep threads alive and file
    descriptors open.

    Args:
        engine: DeepSpeed's engine.
    """
    wrapper, parameters = engine.optimizer, list(engine.module.parameters())
    for holder in (engine, wrapper, getattr(wrapper, "parameter_offload", None), *parameters):
        attributes = getattr(holder, "__dict__", {})
        for name, value in attributes.items():
            if isinstance(value, dist.ProcessGroup):
                attributes[name] = None
            elif isinstance(value, list) and any(isinstance(e, dist.ProcessGroup) for e in value):
                attributes[name] = [None] * len(value)
    if getattr(wrapper, "optimizer_swapper", None) is not None:
        wrapper.optimizer_swapper = None
    for each in parameters:
        if (swapper := getattr(each, "nvme_swapper", None)) is not None:
            swapper.aio_read_handle = swapper.aio_write_handle = None


def replay_adam_steps(adam: Any, steps: int) -> None:
    """After a resume, restore the powers of the betas in DeepSpeed's CPU Adam.

    DeepSpeedCPUAdam, like FusedAdam on a CPU, computes powers of the betas as running fp32
    products. Powers that are computed directly are rounded differently (for 0.999, the first
    difference is at step 3). Without ``replay_adam_steps``, the losses of a resumed run would
    differ by about 1e-6 from those of an uninterrupted run.

    Args:
        adam: DeepSpeed's optimizer; only DeepSpeedCPUAdam and FusedAdam on a CPU are changed.
        steps: Number of optimizer steps before the resume.
    """
    update = _cpu_adam_update(adam)
    if update is not None:
        for taken in taken_steps(adam, steps):
            update(*taken)


def _cpu_adam_update(adam: Any) -> Callable[[int, float, float], object] | None:
    """A function that runs the op on one dummy element; ``None`` for all other optimizers."""
    kind = type(adam).__name__
    dummies = [torch.zeros(1) for _ in range(4)]
    if kind == "DeepSpeedCPUAdam":
        return lambda step, beta1, beta2: adam.ds_opt_adam.adam_update(
            adam.opt_id, step, 0.0, beta1, beta2, 1.0, 0.0, True, *dummies
        )
    if kind != "FusedAdam" or adam._dummy_overflow_buf.device.type != "cpu":
        return None
    lists = [[dummy] for dummy in dummies]
    return lambda step, beta1, beta2: adam.multi_tensor_adam(
        1, adam._dummy_overflow_buf, lists, 0.0, beta1, beta2, 1.0, step, adam.adam_w_mode, 1, 0.0
    )
