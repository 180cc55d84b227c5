"""Train with accelerate, without DeepSpeed."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from types import MethodType
from typing import Any, Final, cast

import torch
from typing_extensions import override

from zerotune._util.proc import environment
from zerotune.backend.accelerator import accelerator_of
from zerotune.backend.checks import DTYPES, Checks, check_alike, check_model_dtype, expected_groups
from zerotune.backend.distributed import Launch, ProcessGroup, meeting
from zerotune.backend.engine import (
    CountingEngine,
    EngineState,
    StepOutcome,
    check_not_gone,
    naming_the_lost,
)
from zerotune.backend.master_weights import (
    UNDER_WAY,
    MasterLayout,
    MasterWeights,
    Named,
    ParameterLayout,
    gradient_norm,
    require_trainable,
)
from zerotune.backend.ops import folder_decisions
from zerotune.backend.optimizers.classes import AdamWBF16States
from zerotune.backend.optimizers.client import build_client_optimizer, chosen_optimizer, curve
from zerotune.backend.proof import prove_offload
from zerotune.backend.step.adams import (
    TORCH_ADAMS,
    HostTorchAdam,
    WholeMasters,
    no_step,
    torch_rounds_alike_in_fp32,
)
from zerotune.backend.step.deferred import KEY, DeferredSteps, take_over
from zerotune.backend.stored import bring_weights, check_has_weights
from zerotune.backend.upstream import require_accelerate
from zerotune.decisions import Decision, announce
from zerotune.errors import EngineError
from zerotune.plan.model import ResolvedPlan, pins

# `accelerate launch` passes its configuration in these variables. The resolved plan has already
# read them; accelerate must not apply them again.
_ACCELERATE_CONFIGURATION = (
    "ACCELERATE_USE_DEEPSPEED",
    "ACCELERATE_USE_FSDP",
    "ACCELERATE_USE_MEGATRON_LM",
    "ACCELERATE_MIXED_PRECISION",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "ACCELERATE_DYNAMO_BACKEND",
)

_ADAMS: Final = (*TORCH_ADAMS, AdamWBF16States)
_ELEMENT_BY_ELEMENT: Final = (
    *_ADAMS,
    torch.optim.Adagrad,
    torch.optim.NAdam,
    torch.optim.RMSprop,
    torch.optim.SGD,
)
"""Optimizers whose result does not depend on the memory order of the weights."""
_CLIPPING_EPS: Final = 1e-6
"""Constant that ``torch.nn.utils.clip_grad_norm_`` adds to the norm."""
_ALIGNED: Final = 16
"""Alignment in elements (64 bytes) of a parameter in a block of host memory."""


class PlainEngine(CountingEngine):
    """An ``Engine`` without ZeRO: the parameters are the fp32 master weights.

    For bf16 and fp16, the forward pass runs under autocast, and the weights stay in fp32. With
    several processes, the engine uses ``DistributedDataParallel``. With optimizer offload, the
    model's fp32 weights are on the device; a second fp32 copy and the moments are in host memory.
    Adam and AdamW then use a fused step.

    Args:
        model: The model, in fp32; moved to the device in place.
        plan: The resolved plan, which must contain an optimizer.
        timeout_s: Seconds after which a collective raises an error.

    Raises:
        EngineError: The plan's optimizer is not resolved, or no parameter is trainable.
        VerificationError: The engine that accelerate built differs from the plan.
    """

    _pass: PlainStep | None = None

    @override
    def _start(self, model: torch.nn.Module, plan: ResolvedPlan, timeout_s: float) -> None:
        choice = chosen_optimizer(plan)
        check_not_gone(model)
        check_has_weights(model)
        self._plan = plan
        self._module = model
        self._accelerator = _accelerator(plan, timeout_s)
        running = accelerator_of(self._accelerator.device)
        self._group = ProcessGroup(backend=running.communication_backend, timeout_s=timeout_s)
        self.resources.callback(self._group.close)
        check_model_dtype(model, plan)
        check_alike(plan, model, self._group)
        proven = prove_offload(plan, self._group)
        bring_weights(model, device=self._accelerator.device)
        model.to(self._accelerator.device)
        named = require_trainable(model)
        self._parameters = [parameter for _, parameter in named]
        self._wrapped = self._accelerator.prepare_model(model)
        named = self._place(named, plan)
        self._torch_optimizer = build_client_optimizer(choice, named)
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
        self._decisions = (*proven, *self._take_over_step(plan, layout))
        self._optimizer = self._accelerator.prepare_optimizer(self._torch_optimizer)
        schedule = curve(plan)
        self._scheduler = None if schedule is None else schedule(self._torch_optimizer)
        self._master_weights = MasterWeights(layout=layout, group=self._group, device=self.device)
        self._micro_batch: AbstractContextManager[Any] | None = None
        self._checks().raise_if_failed(engine="accelerate")
        announce(self.decisions, rank=self._group.rank)

    def _place(self, named: Named, plan: ResolvedPlan) -> Named:
        """Return the master weights by name, in host memory if the plan offloads the optimizer."""
        self._host = None
        if plan.offload_optimizer == "cpu" and _has_memory_of_its_own(self.device):
            zero = plan.plan.zero_optimization
            self._host = HostWeights(
                named,
                pin=zero is not None and pins(zero.offload_optimizer),
                # With several ranks, gradients are complete only after the all-reduce.
                early=lambda: self._at_boundary and self._group.world_size == 1,
            )
            self.resources.callback(self._host.close)
            named = self._host.named
            self._parameters = [master for _, master in named]
        return named

    def _take_over_step(self, plan: ResolvedPlan, layout: MasterLayout) -> tuple[Decision, ...]:
        """Use zerotune's fused step for an Adam in host memory, if possible."""
        adam = self._torch_optimizer
        if plan.offload_optimizer == "none" or not isinstance(adam, _ADAMS):
            return ()
        obstacle = _strided(self._parameters)
        if obstacle is None and not isinstance(adam, AdamWBF16States):
            obstacle = HostTorchAdam.obstacle(adam)
        self._pass, decided = take_over(
            plan,
            self._group,
            adam=adam,
            usual="torch's fused",
            obstacle=obstacle,
            rounds_alike=torch_rounds_alike_in_fp32,
            make=partial(
                PlainStep,
                adam=adam,
                module=self._module,
                layout=layout,
                group=self._group,
                host=self._host,
            ),
            reason="clipping, Adam and EMAs share a single pass over host memory; results are "
            "bit-identical to torch's fused Adam, whereas torch's for-loop Adam may differ in the "
            "last bit",
        )
        self._host_step = self._pass
        if self._pass is None:
            _fuse(adam)
        return (*folder_decisions(), *decided)

    @property
    @override
    def device(self) -> torch.device:
        return torch.device(self._accelerator.device)

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
        scaler = self._accelerator.scaler
        return EngineState(
            global_step=self._global_step,
            micro_step=self._micro_step,
            skipped_steps=self._skipped_steps,
            scheduler={} if self._scheduler is None else self._scheduler.state_dict(),
            loss_scaler={} if scaler is None else dict(scaler.state_dict()),
        )

    @override
    def load_state(self, state: EngineState) -> None:
        self._master_weights.settle()
        self._close_micro_batch()
        self._zero_grad()
        self._count_from(state)
        if self._scheduler is not None:
            self._scheduler.load_state_dict(state.scheduler)
        if (scaler := self._accelerator.scaler) is not None:
            scaler.load_state_dict(carried_scale(state.loss_scaler, fresh=scaler.state_dict()))

    @override
    @naming_the_lost
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            self._check_before_forward()
            self._open_micro_batch()
            return self._wrapped(*args, **kwargs)
        with self._accelerator.autocast():
            return self._module(*args, **kwargs)

    @override
    @naming_the_lost
    def backward(self, loss: torch.Tensor) -> None:
        self._unfinished = True
        self._master_weights.settle()
        self._open_micro_batch()
        self._accelerator.backward(loss / self._plan.gradient_accumulation_steps)

    @override
    @naming_the_lost
    def step(self) -> StepOutcome:
        self._check_backward()
        boundary, grad_norm, applied = self._at_boundary, None, False
        if boundary:
            self._check_before_step(self._global_step)
        self._close_micro_batch()
        if boundary:
            grad_norm = self._gradient_norm()
            applied = self._update(grad_norm)
            self._zero_grad()
            self._global_step += 1
            self._skipped_steps += not applied
            if applied and self._scheduler is not None:
                self._scheduler.step()
        self._micro_step += 1
        self._unfinished = False
        return StepOutcome(applied=applied, boundary=boundary, grad_norm=grad_norm)

    @override
    def discard(self) -> None:
        self._master_weights.settle()
        self._close_micro_batch()
        self._zero_grad()
        self._unfinished = False
        self._count_discarded()

    @override
    def _release(self) -> None:
        self._close_micro_batch()
        try:
            if self._pass is not None:
                self._pass.close()
        finally:
            self._accelerator.free_memory()

    def _open_micro_batch(self) -> None:
        # Not accelerate's accumulation: its counters belong to the whole process, so two engines
        # of a run would count each other's micro batches.
        if self._micro_batch is None:
            whole = self._at_boundary or self._group.world_size == 1
            self._micro_batch = nullcontext() if whole else self._wrapped.no_sync()
            self._micro_batch.__enter__()

    def _close_micro_batch(self) -> None:
        if self._micro_batch is not None:
            self._micro_batch.__exit__(None, None, None)
            self._micro_batch = None

    def _update(self, grad_norm: float | None) -> bool:
        """Run the optimizer's step; return whether the weights changed."""
        finite = grad_norm is None or math.isfinite(grad_norm)
        # With a loss scale, the scaler skips the step and lowers the scale.
        if not finite and self._accelerator.scaler is None:
            return False
        self._optimizer.step()
        if self._host is not None and self._pass is None:
            self._host.upload()
        return not self._optimizer.step_was_skipped

    def _zero_grad(self) -> None:
        self._optimizer.zero_grad()
        if self._host is not None:
            self._host.forget()

    def _gradient_norm(self) -> float | None:
        """Clip the gradients and return their norm; ``None`` if the loss scaler checks them."""
        limit = self._plan.gradient_clipping
        if self._plan.offload_optimizer != "none":
            return self._norm_in_host_memory(limit)
        if limit > 0:
            return float(self._accelerator.clip_grad_norm_(self._parameters, limit))
        if self._accelerator.scaler is not None:
            return None
        return float(gradient_norm(self._parameters))

    def _norm_in_host_memory(self, limit: float) -> float:
        """``_gradient_norm`` for offloaded optimizers; a fused step clips the gradients itself."""
        norm = self._host.collect() if self._host is not None else gradient_norm(self._parameters)
        coefficient = torch.clamp(limit / (norm + _CLIPPING_EPS), max=1.0) if limit > 0 else None
        if self._pass is not None:
            self._pass.factor = 1.0 if coefficient is None else float(coefficient)
        elif coefficient is not None:
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(float(coefficient))
        return float(norm)

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
        running = self._accelerator.mixed_precision
        checks.equal("precision", self._plan.precision, "fp32" if running == "no" else running)
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

    @property
    def flat(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each master weight with its parameter on the device, both 1-D."""
        for (_, master), parameter in zip(self.named, self._parameters, strict=True):
            yield master.data.view(-1), parameter.data.view(-1)

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


class PlainStep(DeferredSteps):
    """Fused optimizer step in host memory for the plain engine's Adam.

    Args:
        adam: The optimizer; its ``step`` is replaced.
        host: Master weights in host memory; ``None`` if the parameters are the master weights.
        base: See ``DeferredSteps``.
    """

    def __init__(
        self, *, adam: torch.optim.Optimizer, host: HostWeights | None, **base: Any
    ) -> None:
        super().__init__(adam=adam, **base)
        self._host = host
        self.factor = 1.0
        """Clipping factor of the gradients."""
        setattr(adam, UNDER_WAY, self)
        # Run the hooks before and after an optimizer's step, which announce that weights change.
        step = torch.optim.Optimizer.profile_hook_step(self._step)
        # A method, since torch's schedules access its __func__.
        adam.step = MethodType(step, adam)  # type: ignore[method-assign]

    @override
    def why_at_once(self) -> str | None:
        if self._group.world_size > 1:
            return "DistributedDataParallel reads all weights before a forward pass"
        return None

    @property
    @override
    def _accelerator(self) -> Any:
        return torch.get_device_module(next(self._module.parameters()).device)

    def _step(self, _adam: torch.optim.Optimizer, _closure: None = None) -> None:
        self.settle()
        slabs = self._layout.tensors
        if (reason := _strided([*slabs, *self._parameters.values()])) is not None:
            self._record(reason, key=KEY, before="one pass", after="the optimizer's step")
            self._step_as_upstream(slabs)
            return
        # Check this before the code below creates views of the weights, which would count as uses.
        may_wait = self._may_wait()
        self._adam.rewind()
        # Look groups up in every step: loading a state, as accelerate does too, replaces them.
        groups = {id(p): group for group in self._optimizer.param_groups for p in group["params"]}
        begun = [
            no_step(WholeMasters(slab.data.view(-1)))
            if slab.grad is None
            else self._adam.begin(
                slab,
                gradient=slab.grad.contiguous(),
                group=groups[id(slab)],
                factor=self.factor,
                out=None,
            )
            for slab in slabs
        ]
        sources: list[torch.Tensor | None] = [None] * len(begun)
        targets = list(sources)
        if self._host is not None:
            sources, targets = map(list, zip(*self._host.flat, strict=True))
        self._take(begun, sources, targets, waits=may_wait)

    def _step_as_upstream(self, slabs: Sequence[torch.Tensor]) -> None:
        _fuse(self._optimizer)
        for slab in slabs:
            if slab.grad is not None:
                slab.grad.mul_(self.factor)
        # The hooks already run around this step.
        type(self._optimizer).step.__wrapped__(self._optimizer)  # type: ignore[attr-defined]
        if self._host is not None:
            self._host.upload()


def _has_memory_of_its_own(device: torch.device) -> bool:
    return not accelerator_of(device).is_host


def _strided(parameters: Iterable[torch.Tensor]) -> str | None:
    """Why the fused step does not support these weights; ``None`` if it does."""
    if all(parameter.is_contiguous() for parameter in parameters):
        return None
    return "the fused step needs contiguous weights, but some are not (channels_last)"


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
    for parameter, state in adam.state.items():
        strides = parameter.stride()
        for name, value in state.items():
            if getattr(value, "shape", None) == parameter.shape and value.stride() != strides:
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
        if parameter.grad is not None and parameter.grad.stride() != strides:
            parameter.grad = torch.empty_like(parameter).copy_(parameter.grad)


def _fuse(adam: torch.optim.Optimizer) -> None:
    """Enable torch's fused Adam step unless the user chose a different implementation."""
    if type(adam) not in TORCH_ADAMS:
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


def _accelerator(plan: ResolvedPlan, timeout_s: float) -> Any:
    accelerate = require_accelerate()
    launch = Launch.from_environment()
    hidden: dict[str, str | None] = dict.fromkeys(_ACCELERATE_CONFIGURATION)
    # Without this variable, accelerate gives each CPU process a share of the machine's cores,
    # ignoring torch's number of threads and the process's allowed cores.
    hidden["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(torch.get_num_threads()))
    timeout = accelerate.InitProcessGroupKwargs(timeout=timedelta(seconds=timeout_s))
    with environment(**hidden), meeting(launch, timeout_s=timeout_s):
        try:
            return accelerate.Accelerator(
                mixed_precision="no" if plan.precision == "fp32" else plan.precision,
                cpu=plan.platform.accelerator == "cpu",
                step_scheduler_with_optimizer=False,
                kwargs_handlers=[timeout] if launch.launched else [],
            )
        except ValueError as error:
            # accelerate's precision belongs to the process, so simultaneous engines must share it.
            raise EngineError(
                f"accelerate rejected the plan ({error})",
                key="precision",
                value=plan.precision,
                fix="use the same precision for all plain engines in a process, or use DeepSpeed",
            ) from error
