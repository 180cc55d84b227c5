"""Train with torch alone: DDP, autocast and a loss scale, without DeepSpeed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any, Final

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from zerotune.backend.accelerator import accelerator_for, accelerator_of
from zerotune.backend.checks import DTYPES, Checks, check_alike, check_model_dtype, expected_groups
from zerotune.backend.distributed import ProcessGroup
from zerotune.backend.engine import (
    CountingEngine,
    Engine,
    EngineState,
    StepOutcome,
    check_not_gone,
)
from zerotune.backend.launch import Launch
from zerotune.backend.master_weights import (
    MasterWeights,
    Named,
    ParameterLayout,
    gradient_norm,
    require_trainable,
)
from zerotune.backend.optimizers.classes import AdamWBF16States
from zerotune.backend.optimizers.client import build_client_optimizer, chosen_optimizer, curve
from zerotune.backend.stored import bring_weights, check_has_weights
from zerotune.decisions import announce
from zerotune.errors import EngineError
from zerotune.plan.plan import ResolvedPlan

_ELEMENT_BY_ELEMENT: Final = (
    torch.optim.Adam,
    torch.optim.AdamW,
    AdamWBF16States,
    torch.optim.Adagrad,
    torch.optim.NAdam,
    torch.optim.RMSprop,
    torch.optim.SGD,
)
"""Optimizers whose result does not depend on the memory order of the weights."""


class Autocasting(Engine):
    """An engine whose weights are in fp32, and whose forward passes run under autocast."""

    @property
    @override
    def dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def autocast_dtype(self) -> torch.dtype:
        """Dtype of matrix products in the forward pass."""
        return DTYPES[self._plan.precision]

    def _under_autocast(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run a forward pass under autocast, and return its result in fp32."""
        if self._plan.precision == "fp32":
            return module(*args, **kwargs)
        with self._autocast():
            output = module(*args, **kwargs)
        half = self.autocast_dtype
        return tree_map_only(
            torch.Tensor, lambda each: each.float() if each.dtype == half else each, output
        )

    def _autocast(self) -> torch.autocast:
        enabled = self._plan.precision != "fp32"
        return torch.autocast(
            self.device.type, dtype=self.autocast_dtype if enabled else None, enabled=enabled
        )

    def _check_autocast(self, checks: Checks) -> None:
        with self._autocast():
            running = torch.float32
            if torch.is_autocast_enabled(self.device.type):
                running = torch.get_autocast_dtype(self.device.type)
        checks.equal("precision.autocast", str(self.autocast_dtype), str(running))


class PlainEngine(Autocasting, CountingEngine):
    """An ``Engine`` without ZeRO: the parameters are the fp32 master weights.

    For bf16 and fp16, the forward pass runs under autocast and returns fp32, and the weights stay
    in fp32. With several processes, the engine uses ``DistributedDataParallel``. A plan with its
    optimizer in host memory runs in ``PlainHostEngine`` instead.

    Args:
        model: The model, in fp32; moved to the device in place.
        plan: The resolved plan, which must contain an optimizer.
        timeout_s: Seconds after which a collective raises an error.

    Raises:
        EngineError: The plan's optimizer is not resolved, or no parameter is trainable.
        VerificationError: The engine differs from the plan.
    """

    _scaler: torch.amp.GradScaler | None = None

    @override
    def _start(self, model: torch.nn.Module, plan: ResolvedPlan, timeout_s: float) -> None:
        choice = chosen_optimizer(plan)
        self._plan, self._module = plan, model
        self._device, self._group = join_plain(plan, model, self.resources, timeout_s=timeout_s)
        bring_weights(model, device=self._device)
        model.to(self._device)
        named = require_trainable(model)
        self._wrapped: Any = model
        if self._group.world_size > 1:
            self._wrapped = DistributedDataParallel(model)
        if plan.precision == "fp16":
            self._scaler = torch.amp.GradScaler(self._device.type)
        self._parameters = [parameter for _, parameter in named]
        self._optimizer = build_client_optimizer(choice, named)
        is_any_order_right = isinstance(self._optimizer, _ELEMENT_BY_ELEMENT)
        check = partial(_check_contiguous, named)
        self._lay_out: Callable[[Any], None] = _lay_alike if is_any_order_right else check
        self._lay_out(self._optimizer)
        self._expected_groups = expected_groups(choice, named)
        layout = ParameterLayout(module=model, optimizer=self._optimizer)
        schedule = curve(plan)
        self._scheduler = None if schedule is None else schedule(self._optimizer)
        self._master_weights = MasterWeights(layout=layout, group=self._group, device=self.device)
        self._checks().raise_if_failed(engine="torch")
        announce(self.decisions, rank=self._group.rank)

    @property
    @override
    def _sums_in_place(self) -> bool:
        return True

    @property
    @override
    def _scaler_state(self) -> dict[str, Any]:
        return {} if self._scaler is None else dict(self._scaler.state_dict())

    @override
    def _load_state(self, state: EngineState) -> None:
        self._drop_gradients()
        self._count_from(state)
        if self._scheduler is not None:
            self._scheduler.load_state_dict(state.scheduler)
        if (scaler := self._scaler) is not None:
            scaler.load_state_dict(carried_scale(state.loss_scaler, fresh=scaler.state_dict()))

    @property
    @override
    def _needs_own_forward(self) -> bool:
        return self._group.world_size > 1

    @override
    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._under_autocast(self._module, *args, **kwargs)
        # Ranks sum their gradients in the backward pass of the last micro batch.
        whole = self._at_boundary or self._group.world_size == 1
        with nullcontext() if whole else self._wrapped.no_sync():
            return self._under_autocast(self._wrapped, *args, **kwargs)

    @override
    def _backward(self, loss: torch.Tensor) -> None:
        loss = loss / self._plan.gradient_accumulation_steps
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
        loss.backward()  # type: ignore[no-untyped-call]
        if self._at_boundary and self._group.world_size > 1:
            self._check_all_came()
        if self._at_boundary and self._scaler is not None:
            # Here, so that other code can clip the gradients or read their norm before the step.
            self._scaler.unscale_(self._optimizer)

    def _check_all_came(self) -> None:
        """Check that this rank has a gradient of every weight, without which DDP averages none."""
        for name, parameter in self._module.named_parameters():
            if id(parameter) in self._trained - self._step_state.came:
                raise EngineError(
                    "this parameter got no gradient in the window's last backward pass, so torch "
                    "would not average gradients over the ranks",
                    "use every trained weight in every micro batch, with a factor of 0 if it "
                    "has no input, and freeze none after the start, or train with DeepSpeed",
                    f"model.{name}",
                    f"rank {self._group.rank}",
                )

    @override
    def _step(self) -> StepOutcome:
        boundary, norm, applied = self._at_boundary, None, False
        if boundary:
            self._check_before_step(self._global_step)
            norm = self._update()
            applied = math.isfinite(norm)
            self._zero_grad()
            self._global_step += 1
            self._skipped_steps += not applied
            if applied and self._scheduler is not None:
                self._scheduler.step()
        self._micro_step += 1
        return StepOutcome(applied=applied, boundary=boundary, grad_norm=norm)

    @override
    def _discard(self) -> None:
        self._drop_gradients()
        self._count_discarded()

    @override
    def _release(self) -> None:
        """Do nothing: ``resources`` holds all that must be closed."""

    def _update(self) -> float:
        """Clip gradients and, if they are finite, update the weights; return the norm."""
        total = gradient_norm(self._parameters)
        norm, limit = float(total), self._plan.gradient_clipping
        if math.isfinite(norm):
            if limit > 0:
                torch.nn.utils.clip_grads_with_norm_(self._parameters, limit, total)
            self._lay_out(self._optimizer)
            with self._step_state.updating():
                self._optimizer.step()
        if self._scaler is not None:
            self._scaler.update()
        return norm

    def _zero_grad(self) -> None:
        self._optimizer.zero_grad()

    def _drop_gradients(self) -> None:
        """Drop gradients, scaled or not, without a change of the scale."""
        self._zero_grad()
        if (before := self._scaler) is not None:
            self._scaler = torch.amp.GradScaler(self._device.type)
            self._scaler.load_state_dict(before.state_dict())

    @override
    def _checks(self) -> Checks:
        choice, checks = chosen_optimizer(self._plan), Checks()
        checks.optimizer(
            choice,
            self._optimizer,
            scheduler=self._plan.scheduler,
            steps_taken=self._global_step - self._skipped_steps,
            groups=self._expected_groups,
        )
        self._check_autocast(checks)
        checks.equal("world_size", self._plan.world_size, self._group.world_size)
        return checks


def join_plain(
    plan: ResolvedPlan, model: torch.nn.Module, resources: ExitStack, *, timeout_s: float
) -> tuple[torch.device, ProcessGroup]:
    """Select this rank's device, join the process group, and check the model. Collective.

    Args:
        plan: A plan that was resolved without DeepSpeed.
        model: The model.
        resources: Exit stack for everything that must be closed when training ends.
        timeout_s: Seconds after which a collective raises an error.
    """
    check_not_gone(model)
    check_has_weights(model)
    device = _device(plan)
    backend = accelerator_of(device).communication_backend
    group = ProcessGroup(backend=backend, timeout_s=timeout_s)
    resources.callback(group.close)
    check_model_dtype(model, plan)
    check_alike(plan, model, group)
    return device, group


def _device(plan: ResolvedPlan) -> torch.device:
    """Return this process's device, which becomes torch's current one."""
    device = accelerator_for(plan.platform.accelerator).device
    launch = Launch.from_environment()
    if not launch.launched or accelerator_of(device).is_host:
        return device
    device = torch.device(device.type, launch.local_rank % torch.accelerator.device_count())
    torch.accelerator.set_device_index(device.index)
    return device


def _check_contiguous(named: Named, optimizer: torch.optim.Optimizer) -> None:
    for name, parameter in named:
        if not parameter.is_contiguous():
            raise EngineError(
                f"{type(optimizer).__name__} cannot update a parameter that is not contiguous",
                "call model.to(memory_format=torch.contiguous_format) before building the "
                "engine and before each step, or train with AdamW",
                name,
                tuple(parameter.stride()),
            )


def _lay_alike(adam: torch.optim.Optimizer) -> None:
    """Give moments and gradients the memory order of their weights.

    torch's fused step pairs elements by address. After ``model.to(memory_format=...)`` it would
    silently update each weight with the moments of a different one.
    """
    for parameter in (each for group in adam.param_groups for each in group["params"]):
        strides, state = parameter.stride(), adam.state.get(parameter, {})
        for name, value in state.items():
            if getattr(value, "shape", None) == parameter.shape and value.stride() != strides:
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
        if parameter.grad is not None and parameter.grad.stride() != strides:
            parameter.grad = torch.empty_like(parameter).copy_(parameter.grad)


def carried_scale(saved: Mapping[str, Any], *, fresh: Mapping[str, Any]) -> dict[str, Any]:
    """Return a ``GradScaler`` state with a checkpoint's scale and this run's growth settings.

    Args:
        saved: State from a checkpoint; may be incomplete.
        fresh: ``state_dict()`` of the running scaler.
    """
    changing = ("scale", "_growth_tracker")
    return {**fresh, **{name: saved[name] for name in changing if name in saved}}
