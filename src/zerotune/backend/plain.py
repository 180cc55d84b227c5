"""Train with torch alone: DDP, autocast and a loss scale, without DeepSpeed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, Final, cast

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from zerotune.backend.accelerator import accelerator_for, accelerator_of
from zerotune.backend.checks import DTYPES, Checks, check_alike, check_model_dtype, expected_groups
from zerotune.backend.distributed import Launch, ProcessGroup
from zerotune.backend.engine import (
    CountingEngine,
    EngineState,
    StepOutcome,
    check_not_gone,
)
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
from zerotune.plan.model import ResolvedPlan, pins

_TORCH_ADAMS: Final = (torch.optim.Adam, torch.optim.AdamW)
_ELEMENT_BY_ELEMENT: Final = (
    *_TORCH_ADAMS,
    AdamWBF16States,
    torch.optim.Adagrad,
    torch.optim.NAdam,
    torch.optim.RMSprop,
    torch.optim.SGD,
)
"""Optimizers whose result does not depend on the memory order of the weights."""
_ALIGNED: Final = 16
"""Alignment in elements (64 bytes) of a parameter in a block of host memory."""


class PlainEngine(CountingEngine):
    """An ``Engine`` without ZeRO: the parameters are the fp32 master weights.

    For bf16 and fp16, the forward pass runs under autocast and returns fp32, and the weights stay
    in fp32. With several processes, the engine uses ``DistributedDataParallel``. With optimizer
    offload, the model's fp32 weights are on the device; a second fp32 copy and the moments are in
    host memory, where torch's optimizer updates them.

    Args:
        model: The model, in fp32; moved to the device in place.
        plan: The resolved plan, which must contain an optimizer.
        timeout_s: Seconds after which a collective raises an error.

    Raises:
        EngineError: The plan's optimizer is not resolved, or no parameter is trainable.
        VerificationError: The engine differs from the plan.
    """

    _host: HostWeights | None = None
    _scaler: torch.amp.GradScaler | None = None

    @override
    def _start(self, model: torch.nn.Module, plan: ResolvedPlan, timeout_s: float) -> None:
        choice = chosen_optimizer(plan)
        check_not_gone(model)
        check_has_weights(model)
        self._plan, self._module = plan, model
        self._device = _device(plan)
        backend = accelerator_of(self._device).communication_backend
        self._group = ProcessGroup(backend=backend, timeout_s=timeout_s)
        self.resources.callback(self._group.close)
        check_model_dtype(model, plan)
        check_alike(plan, model, self._group)
        bring_weights(model, device=self._device)
        model.to(self._device)
        named = require_trainable(model)
        self._wrapped: Any = model
        if self._group.world_size > 1:
            self._wrapped = DistributedDataParallel(model)
        if plan.precision == "fp16":
            self._scaler = torch.amp.GradScaler(self._device.type)
        named = self._place(named, plan)
        self._parameters = [master for _, master in named]
        self._torch_optimizer = build_client_optimizer(choice, named)
        if plan.offload_optimizer != "none":
            _fuse(self._torch_optimizer)
        is_any_order_right = isinstance(self._torch_optimizer, _ELEMENT_BY_ELEMENT)
        prepare = _lay_alike if is_any_order_right else partial(_check_contiguous, named)
        prepare(self._torch_optimizer)
        self._torch_optimizer.register_step_pre_hook(prepare)
        self._expected_groups = expected_groups(choice, named, self._torch_optimizer)
        layout = ParameterLayout(
            module=model,
            optimizer=self._torch_optimizer,
            masters=None if self._host is None else self._parameters,
        )
        schedule = curve(plan)
        self._scheduler = None if schedule is None else schedule(self._torch_optimizer)
        self._master_weights = MasterWeights(layout=layout, group=self._group, device=self.device)
        self._checks().raise_if_failed(engine="torch")
        announce(self.decisions, rank=self._group.rank)

    def _place(self, named: Named, plan: ResolvedPlan) -> Named:
        """Return the master weights by name, in host memory if the plan offloads the optimizer."""
        if plan.offload_optimizer != "cpu" or not _has_memory_of_its_own(self.device):
            return named
        zero = plan.plan.zero_optimization
        self._host = HostWeights(
            named,
            pin=zero is not None and pins(zero.offload_optimizer),
            # With several ranks, gradients are complete only after the all-reduce.
            early=lambda: self._at_boundary and self._group.world_size == 1,
        )
        self.resources.callback(self._host.close)
        return self._host.named

    @property
    @override
    def device(self) -> torch.device:
        return self._device

    @property
    @override
    def _sums_in_place(self) -> bool:
        return True

    @property
    @override
    def dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def autocast_dtype(self) -> torch.dtype:
        """Dtype of matrix products in the forward pass."""
        return DTYPES[self._plan.precision]

    @property
    @override
    def lr(self) -> float:
        return float(self._torch_optimizer.param_groups[0]["lr"])

    @property
    @override
    def state(self) -> EngineState:
        return EngineState(
            global_step=self._global_step,
            micro_step=self._micro_step,
            skipped_steps=self._skipped_steps,
            scheduler={} if self._scheduler is None else self._scheduler.state_dict(),
            loss_scaler={} if self._scaler is None else dict(self._scaler.state_dict()),
        )

    @override
    def _load_state(self, state: EngineState) -> None:
        self._zero_grad()
        self._count_from(state)
        if self._scheduler is not None:
            self._scheduler.load_state_dict(state.scheduler)
        if (scaler := self._scaler) is not None:
            scaler.load_state_dict(carried_scale(state.loss_scaler, fresh=scaler.state_dict()))

    @override
    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._cast(self._module, *args, **kwargs)
        # Ranks sum their gradients in the backward pass of the last micro batch.
        whole = self._at_boundary or self._group.world_size == 1
        with nullcontext() if whole else self._wrapped.no_sync():
            return self._cast(self._wrapped, *args, **kwargs)

    def _cast(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
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
            self._device.type, dtype=self.autocast_dtype if enabled else None, enabled=enabled
        )

    @override
    def _backward(self, loss: torch.Tensor) -> None:
        loss = loss / self._plan.gradient_accumulation_steps
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
        loss.backward()  # type: ignore[no-untyped-call]

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
        self._zero_grad()
        self._count_discarded()

    @override
    def _release(self) -> None:
        """Do nothing: ``resources`` holds all that must be closed."""

    def _update(self) -> float:
        """Clip gradients and, if they are finite, update the weights; return the norm."""
        if self._scaler is not None:
            self._scaler.unscale_(self._torch_optimizer)
        total = self._host.collect() if self._host is not None else gradient_norm(self._parameters)
        norm, limit = float(total), self._plan.gradient_clipping
        if math.isfinite(norm):
            if limit > 0:
                torch.nn.utils.clip_grads_with_norm_(self._parameters, limit, total)
            self._torch_optimizer.step()
            if self._host is not None:
                self._host.upload()
        if self._scaler is not None:
            self._scaler.update()
        return norm

    def _zero_grad(self) -> None:
        self._torch_optimizer.zero_grad()
        if self._host is not None:
            self._host.forget()

    @override
    def _checks(self) -> Checks:
        choice, checks = chosen_optimizer(self._plan), Checks()
        checks.optimizer(
            choice,
            self._torch_optimizer,
            scheduler=self._plan.scheduler,
            steps_taken=self._global_step - self._skipped_steps,
            groups=self._expected_groups,
        )
        with self._autocast():
            running = torch.float32
            if torch.is_autocast_enabled(self._device.type):
                running = torch.get_autocast_dtype(self._device.type)
        checks.equal("precision", str(self.autocast_dtype), str(running))
        if self._plan.offload_optimizer == "cpu":
            places = {
                p.device.type for g in self._torch_optimizer.param_groups for p in g["params"]
            }
            checks.equal("offload_optimizer.device", "cpu", ", ".join(sorted(places)))
        checks.equal("world_size", self._plan.world_size, self._group.world_size)
        return checks


class HostWeights:
    """fp32 master weights in host memory for a model on a device.

    Gradients are copied to the host during the backward pass. All gradient norms are read from the
    device with one synchronisation per step.

    Args:
        named: Names and parameters, fp32.
        pin: Whether to page-lock the memory.
        early: Function that returns whether a gradient may be copied as soon as it is accumulated.
    """

    def __init__(self, named: Named, *, pin: bool, early: Callable[[], bool]) -> None:
        sizes = [-(-p.numel() // _ALIGNED) * _ALIGNED for _, p in named]
        weights, gradients = (torch.zeros(sum(sizes), pin_memory=pin) for _ in range(2))
        self._parameters = [parameter for _, parameter in named]
        self._early = early
        self._gradients: list[torch.Tensor] = []
        self._norms: dict[int, torch.Tensor] = {}
        self.named: Named = []
        """The master weights, which the optimizer updates, with the parameters' names."""
        at = 0
        for (name, parameter), size in zip(named, sizes, strict=True):
            part = slice(at, at + parameter.numel())
            # In the same memory order, such as channels_last, but without gaps.
            strides = torch.empty_like(parameter, device="meta").stride()
            master = torch.nn.Parameter(weights[part].as_strided(parameter.shape, strides))
            master.data.copy_(parameter.data)
            # mup's optimizers read the widths that mup has stored on parameters.
            vars(master).update(vars(parameter))
            self.named.append((name, master))
            self._gradients.append(gradients[part].as_strided(parameter.shape, strides))
            at += size
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(self._added_up, index)
            )
            for index, parameter in enumerate(self._parameters)
        ]

    def collect(self) -> torch.Tensor:
        """Copy all remaining gradients to the host, and return the fp32 norm of all gradients."""
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is not None:
                self._take(index)
        for index, (_, master) in enumerate(self.named):
            master.grad = self._gradients[index] if index in self._norms else None
        norms = [self._norms[index] for index in sorted(self._norms)]
        if not norms:
            return torch.zeros(())
        # Reading the norm also waits for the gradients' copies, which run on the same stream.
        norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms)).cpu()
        return norm

    def forget(self) -> None:
        """Drop all gradients, including those still on the device."""
        self._norms.clear()
        for parameter in self._parameters:
            parameter.grad = None

    def upload(self) -> None:
        """Copy the master weights to the device."""
        for (_, master), parameter in zip(self.named, self._parameters, strict=True):
            parameter.data.copy_(master.data)

    def close(self) -> None:
        """Stop copying gradients."""
        for hook in self._hooks:
            hook.remove()

    def _added_up(self, index: int, _parameter: torch.Tensor) -> None:
        if self._early():
            self._take(index)

    @torch.no_grad()
    def _take(self, index: int) -> None:
        parameter, room = self._parameters[index], self._gradients[index]
        gradient = cast(torch.Tensor, parameter.grad)
        if index in self._norms:
            # A second backward pass within one window.
            gradient = gradient + room.to(gradient.device)
        self._norms[index] = torch.linalg.vector_norm(gradient)
        room.copy_(gradient, non_blocking=room.is_pinned())
        parameter.grad = None


def _device(plan: ResolvedPlan) -> torch.device:
    """Return this process's device, which becomes torch's current one."""
    device = accelerator_for(plan.platform.accelerator).device
    launch = Launch.from_environment()
    if not launch.launched or accelerator_of(device).is_host:
        return device
    device = torch.device(device.type, launch.local_rank % torch.accelerator.device_count())
    torch.accelerator.set_device_index(device.index)
    return device


def _has_memory_of_its_own(device: torch.device) -> bool:
    return not accelerator_of(device).is_host


def _check_contiguous(named: Named, optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for name, parameter in named:
        if not parameter.is_contiguous():
            raise EngineError(
                f"{type(optimizer).__name__} cannot update a parameter that is not contiguous",
                key=name,
                value=tuple(parameter.stride()),
                fix="call model.to(memory_format=torch.contiguous_format) before building the "
                "engine and before each step, or train with AdamW",
            )


def _lay_alike(adam: torch.optim.Optimizer, *_: Any) -> None:
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


def _fuse(adam: torch.optim.Optimizer) -> None:
    """Enable torch's fused Adam step unless the user chose a different implementation."""
    if type(adam) not in _TORCH_ADAMS:
        return
    for group in adam.param_groups:
        others = ("fused", "foreach", "capturable", "differentiable")
        if all(not group.get(name) for name in others):
            group["fused"] = True


def carried_scale(saved: Mapping[str, Any], *, fresh: Mapping[str, Any]) -> dict[str, Any]:
    """Return a ``GradScaler`` state with a checkpoint's scale and this run's growth settings.

    Args:
        saved: State from a checkpoint; may be incomplete.
        fresh: ``state_dict()`` of the running scaler.
    """
    changing = ("scale", "_growth_tracker")
    return {**fresh, **{name: saved[name] for name in changing if name in saved}}
