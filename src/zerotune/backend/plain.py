"""Training without DeepSpeed, on accelerate alone."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, Final

import torch
from typing_extensions import override

from zerotune._util.environment import environment
from zerotune.backend.checks import Checks, check_alike, expected_groups
from zerotune.backend.deepspeed.given_back import check_not_gone
from zerotune.backend.deepspeed.layouts import ParameterLayout, require_trainable
from zerotune.backend.distributed import Launch, ProcessGroup, communication_backend, meeting
from zerotune.backend.dtypes import DTYPES, check_model_dtype
from zerotune.backend.engine import EngineState, StepOutcome
from zerotune.backend.master_weights import MasterWeights
from zerotune.backend.optimizers.client import build_client_optimizer, chosen_optimizer, curve
from zerotune.backend.running import StartedEngine, gradient_norm
from zerotune.backend.stored import bring_weights, check_has_weights
from zerotune.backend.upstream import require_accelerate
from zerotune.decisions import announce
from zerotune.errors import EngineError
from zerotune.plan.api import ResolvedPlan

# `accelerate launch` passes its own configuration through these; the resolved plan has already
# taken what it wants from it, and a second reader would decide behind its back.
_ACCELERATE_CONFIGURATION = (
    "ACCELERATE_USE_DEEPSPEED",
    "ACCELERATE_USE_FSDP",
    "ACCELERATE_USE_MEGATRON_LM",
    "ACCELERATE_MIXED_PRECISION",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "ACCELERATE_DYNAMO_BACKEND",
)

_SCALE: Final = ("scale", "_growth_tracker")
"""What of a ``GradScaler``'s state changes while it runs."""


class PlainEngine(StartedEngine):
    """An ``Engine`` without ZeRO: the parameters are the fp32 master weights.

    bf16 and fp16 run as autocast over fp32 weights. Several processes run as
    ``DistributedDataParallel``.

    Args:
        model: The model, in fp32; moved to the device in place.
        plan: A resolved plan whose optimizer has been chosen.
        timeout_s: Seconds after which a collective gives up.

    Raises:
        EngineError: The plan has no optimizer choice, or nothing is trainable.
        VerificationError: What accelerate built is not what the plan says.
    """

    @override
    def _start(self, model: torch.nn.Module, plan: ResolvedPlan, timeout_s: float) -> None:
        choice = chosen_optimizer(plan)
        check_not_gone(model)
        check_has_weights(model)
        self._plan = plan
        self._module = model
        self._accelerator = _accelerator(plan, timeout_s)
        self._group = ProcessGroup(
            backend=communication_backend(self._accelerator.device.type), timeout_s=timeout_s
        )
        self.resources.callback(self._group.close)
        check_model_dtype(model, plan)
        check_alike(plan, model, self._group)
        bring_weights(model, device=self._accelerator.device)
        model.to(self._accelerator.device)
        named = require_trainable(model)
        self._parameters = [parameter for _, parameter in named]
        self._wrapped = self._accelerator.prepare_model(model)
        self._torch_optimizer = build_client_optimizer(choice, named)
        self._expected_groups = expected_groups(choice, named, self._torch_optimizer)
        self._optimizer = self._accelerator.prepare_optimizer(self._torch_optimizer)
        schedule = curve(plan)
        self._scheduler = None if schedule is None else schedule(self._torch_optimizer)
        layout = ParameterLayout(module=model, optimizer=self._torch_optimizer)
        self._master_weights = MasterWeights(layout=layout, group=self._group, device=self.device)
        self._global_step = self._micro_step = self._skipped_steps = 0
        self._micro_batch: AbstractContextManager[Any] | None = None
        self._checks().raise_if_failed(engine="accelerate")
        announce(self.decisions, rank=self._group.rank)

    @property
    def device(self) -> torch.device:
        """Where batches must lie."""
        return torch.device(self._accelerator.device)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights: fp32; autocast does the rest."""
        return torch.float32

    @property
    def autocast_dtype(self) -> torch.dtype:
        """Precision of matrix products in the forward pass."""
        return DTYPES[self._plan.precision]

    @property
    def lr(self) -> float:
        """Learning rate of the first group for the next optimizer step."""
        return float(self._torch_optimizer.param_groups[0]["lr"])

    @property
    def state(self) -> EngineState:
        """Counters, scheduler and loss scale, to be saved."""
        scaler = self._accelerator.scaler
        return EngineState(
            global_step=self._global_step,
            micro_step=self._micro_step,
            skipped_steps=self._skipped_steps,
            scheduler={} if self._scheduler is None else self._scheduler.state_dict(),
            loss_scaler={} if scaler is None else dict(scaler.state_dict()),
        )

    def load_state(self, state: EngineState) -> None:
        """Restore counters, scheduler and loss scale.

        Gradients of a micro batch that was never closed, because of an error perhaps, are dropped.
        """
        self._close_micro_batch()
        self._optimizer.zero_grad()
        self._global_step = state.global_step
        self._micro_step = state.micro_step
        self._skipped_steps = state.skipped_steps
        if self._scheduler is not None:
            self._scheduler.load_state_dict(state.scheduler)
        if (scaler := self._accelerator.scaler) is not None:
            scaler.load_state_dict(carried_scale(state.loss_scaler, fresh=scaler.state_dict()))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward pass under autocast."""
        if torch.is_grad_enabled():
            self._open_micro_batch()
            return self._wrapped(*args, **kwargs)
        with self._accelerator.autocast():
            return self._module(*args, **kwargs)

    def backward(self, loss: torch.Tensor) -> None:
        """Back-propagate a scalar loss, divided by the accumulation steps."""
        self._open_micro_batch()
        self._accelerator.backward(loss / self._plan.gradient_accumulation_steps)

    def step(self) -> StepOutcome:
        """Close a micro batch; update the weights when it is the last of its group.

        A gradient that is not finite is not applied, as under DeepSpeed.
        """
        boundary, grad_norm, applied = self._at_boundary, None, False
        self._close_micro_batch()
        if boundary:
            grad_norm = self._gradient_norm()
            applied = self._update(grad_norm)
            self._optimizer.zero_grad()
            self._global_step += 1
            self._skipped_steps += not applied
            if applied and self._scheduler is not None:
                self._scheduler.step()
        self._micro_step += 1
        return StepOutcome(applied=applied, boundary=boundary, grad_norm=grad_norm)

    def discard(self) -> None:
        """Drop the accumulation window under way; it counts as a skipped step."""
        self._close_micro_batch()
        self._optimizer.zero_grad()
        count = self._plan.gradient_accumulation_steps
        self._micro_step = (self._micro_step // count + 1) * count
        self._global_step += 1
        self._skipped_steps += 1

    def _release(self) -> None:
        self._close_micro_batch()
        self._accelerator.free_memory()

    @property
    def _at_boundary(self) -> bool:
        return (self._micro_step + 1) % self._plan.gradient_accumulation_steps == 0

    def _open_micro_batch(self) -> None:
        # Not accelerate's own accumulation: its counters are shared by the whole process, and
        # two engines of one run would count each other's micro batches.
        if self._micro_batch is None:
            whole = self._at_boundary or self._group.world_size == 1
            self._micro_batch = nullcontext() if whole else self._wrapped.no_sync()
            self._micro_batch.__enter__()

    def _close_micro_batch(self) -> None:
        if self._micro_batch is not None:
            self._micro_batch.__exit__(None, None, None)
            self._micro_batch = None

    def _update(self, grad_norm: float | None) -> bool:
        """Step the optimizer; whether the weights changed."""
        finite = grad_norm is None or math.isfinite(grad_norm)
        # With a loss scale it is the scaler that skips, and lowers the scale.
        if not finite and self._accelerator.scaler is None:
            return False
        self._optimizer.step()
        return not self._optimizer.step_was_skipped

    def _gradient_norm(self) -> float | None:
        """Norm of the gradients, which are clipped to it; ``None``: the loss scaler looks at it."""
        limit = self._plan.gradient_clipping
        if limit > 0:
            return float(self._accelerator.clip_grad_norm_(self._parameters, limit))
        if self._accelerator.scaler is not None:
            return None
        return gradient_norm(self._parameters)

    def _checks(self) -> Checks:
        choice = self._plan.optimizer
        checks = Checks()
        if choice is None:
            return checks
        checks.equal("optimizer.type", choice.implementation, type(self._torch_optimizer).__name__)
        checks.optimizer_arguments(
            choice,
            self._torch_optimizer,
            scheduler=self._plan.scheduler,
            steps_taken=self._global_step - self._skipped_steps,
            groups=self._expected_groups,
        )
        precision = {"no": "fp32"}.get(
            self._accelerator.mixed_precision, self._accelerator.mixed_precision
        )
        checks.equal("precision", self._plan.precision, precision)
        checks.equal("world_size", self._plan.world_size, self._group.world_size)
        return checks


def carried_scale(saved: Mapping[str, Any], *, fresh: Mapping[str, Any]) -> dict[str, Any]:
    """What a ``GradScaler`` continues with: where a run was from it, how it grows from this one.

    Args:
        saved: Of a checkpoint; may lack anything.
        fresh: ``state_dict()`` of the scaler that runs.
    """
    return {**fresh, **{name: saved[name] for name in _SCALE if name in saved}}


def _accelerator(plan: ResolvedPlan, timeout_s: float) -> Any:
    accelerate = require_accelerate()
    launch = Launch.from_environment()
    hidden: dict[str, str | None] = dict.fromkeys(_ACCELERATE_CONFIGURATION)
    # Without this variable accelerate gives each CPU process a share of the machine's cores,
    # whatever number of threads torch was told to use and whatever cores the process may use.
    hidden["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(torch.get_num_threads()))
    handlers = (
        [accelerate.InitProcessGroupKwargs(timeout=timedelta(seconds=timeout_s))]
        if launch.launched
        else []
    )
    with environment(**hidden), meeting(launch, timeout_s=timeout_s):
        try:
            return accelerate.Accelerator(
                mixed_precision={"fp32": "no"}.get(plan.precision, plan.precision),
                cpu=plan.platform.accelerator == "cpu",
                step_scheduler_with_optimizer=False,
                kwargs_handlers=handlers,
            )
        except ValueError as error:
            # Its precision belongs to the process, so two engines at once must share it.
            raise EngineError(
                f"accelerate refused the plan ({error})",
                key="precision",
                value=plan.precision,
                fix="give all plain engines of one process the same precision, or use DeepSpeed",
            ) from error
