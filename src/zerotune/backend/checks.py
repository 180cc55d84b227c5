"""Checks of a model's weights before the engine starts, and of the running engine afterwards."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs
import torch

from zerotune._util.text import counted
from zerotune.decisions import Decision
from zerotune.errors import (
    EngineError,
    InvalidValueError,
    VerificationError,
)
from zerotune.plan.facts import ModelFacts, is_wrapper
from zerotune.plan.optimizer.choices import OptimizerChoice, SchedulerChoice
from zerotune.plan.optimizer.curves import lr_at
from zerotune.plan.plan import ResolvedPlan

if TYPE_CHECKING:
    from zerotune.backend.distributed import ProcessGroup


# -- Before the start: dtypes by their names in plans, and checks of the model's weights.


DTYPES: Final[Mapping[str, torch.dtype]] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def checked_dtype(dtype: str | torch.dtype, *, key: str = "dtype") -> torch.dtype:
    """Convert zerotune's name for a dtype to the torch dtype; return a torch dtype unchanged.

    Args:
        dtype: ``"fp32"``, ``"bf16"``, ``"fp16"`` or a floating-point torch dtype.
        key: Name of the argument, for the error message.
    """
    chosen = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if chosen is None or not chosen.is_floating_point:
        raise InvalidValueError(
            "is not a dtype for weights", f"use one of {list(DTYPES)}", key, dtype
        )
    return chosen


def check_quantized(model: torch.nn.Module, plan: ResolvedPlan) -> None:
    """Raise an error if DeepSpeed cannot handle a model's quantized weights under a plan.

    Args:
        model: The model.
        plan: The resolved plan.
    """
    if not plan.uses_deepspeed:
        return
    quantized = [each for each in ModelFacts.from_module(model).parameters if each.storage]
    if not quantized:
        return
    key, storage = f"model.{quantized[0].name}", quantized[0].storage
    if any(is_wrapper(parameter) for parameter in model.parameters()):
        raise EngineError(
            "DeepSpeed casts, communicates and partitions weights in ways that the tensors of "
            "torchao and optimum-quanto do not support ('Couldn't swap Linear.weight')",
            "quantize with bitsandbytes (diffusers.BitsAndBytesConfig), which works at every "
            'stage, or train with engine="host" and the optimizer in host memory',
            key,
            storage,
        )
    if plan.stage == 3 and plan.offload_param == "nvme":
        raise EngineError(
            "parameters cannot be offloaded to NVMe, because a weight is quantized and swap files "
            "store weights in the plan's precision",
            'write "cpu"; a quantized base model needs little host memory',
            "zero_optimization.offload_param.device",
            f"nvme, and {key} is {storage}",
        )


def check_model_dtype(model: torch.nn.Module, plan: ResolvedPlan) -> None:
    """Raise an error for weights in a dtype that the engine neither trains in nor casts.

    DeepSpeed and the host engine cast a model to bf16 or fp16, but to fp32 only from bf16 and fp16
    at stage 3, which leaves float64 weights as they are. Layers whose weights stay as they are fail
    with "mat1 and mat2 must have the same dtype". Complex weights would lose their imaginary parts.

    Args:
        model: The model.
        plan: The resolved plan.
    """
    _check_wide(model, plan)
    if plan.precision != "fp32" or (plan.uses_deepspeed and plan.stage == 3):
        return
    half = {dtype: name for name, dtype in DTYPES.items() if name != "fp32"}
    halves = [(name, p.dtype) for name, p in model.named_parameters() if p.dtype in half]
    if not halves:
        return
    name, dtype = halves[0]
    frozen = all(not p.requires_grad for p in model.parameters() if p.dtype in half)
    train = "" if half[dtype] == "fp16" else f', or resolve with precision="{half[dtype]}"'
    raise EngineError(
        f"{len(halves)} of the model's weights are in {half[dtype]}, but the plan trains in fp32"
        + (" and does not cast frozen weights" if frozen else " and needs fp32 master weights"),
        f"load the model in float32 (torch_dtype=torch.float32, or model.float()){train}",
        f"model.{name}",
        dtype,
    )


def _check_wide(model: torch.nn.Module, plan: ResolvedPlan) -> None:
    casts = plan.uses_deepspeed and plan.precision != "fp32" and plan.stage != 3
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.is_complex():
            fix = "train the real view of the weight (torch.view_as_real)"
        elif parameter.dtype == torch.float64 and not casts:
            fix = "write model.float()"
        else:
            continue
        raise EngineError(
            f"the plan trains in {plan.precision} and needs fp32 master weights",
            fix,
            f"model.{name}",
            parameter.dtype,
        )


# -- After the start: the running engine, compared with the plan.


COMPARED_ARGUMENTS = ("lr", "betas", "eps", "weight_decay", "momentum", "use_muon")


@attrs.frozen(kw_only=True)
class RunningGroup:
    """Optimizer arguments and parameter names of one parameter group."""

    params: Mapping[str, Any]
    """Arguments by name."""
    members: frozenset[str]
    """Dotted names of the parameters."""
    until: int | None = None
    """Number of optimizer steps after which the learning rate is 0; ``None`` if it never is 0."""

    @classmethod
    def read(
        cls, group: Mapping[str, Any], members: Sequence[torch.Tensor], names: Mapping[int, str]
    ) -> RunningGroup:
        """Read one entry of ``param_groups``, whose tensors are flat shards under ZeRO.

        Args:
            group: The entry.
            members: The group's parameters.
            names: Dotted names, by the ``id`` of the parameter.
        """
        return cls(
            params={key: group[key] for key in COMPARED_ARGUMENTS if key in group},
            members=frozenset(names[id(parameter)] for parameter in members),
        )


def expected_groups(
    choice: OptimizerChoice, named: Sequence[tuple[str, torch.nn.Parameter]]
) -> tuple[RunningGroup, ...]:
    """Return the parameter groups that the running engine must have: those of the plan.

    Args:
        choice: The plan's optimizer.
        named: Names and parameters of all trained parameters.
    """
    if choice.groups:
        return tuple(
            RunningGroup(
                params=group.params, members=frozenset(group.parameters), until=group.until
            )
            for group in choice.groups
        )
    return (RunningGroup(params={}, members=frozenset(name for name, _ in named)),)


@attrs.frozen(kw_only=True)
class Check:
    """One comparison of the plan with the running engine."""

    key: str
    expected: Any
    actual: Any

    @property
    def passed(self) -> bool:
        """Whether both values are equal; floats may differ in the last few bits."""
        return _equal(self.expected, self.actual)


class Checks:
    """Collect comparisons, so that one error can list every difference."""

    def __init__(self) -> None:
        self._checks: list[Check] = []

    def equal(self, key: str, expected: Any, actual: Any) -> None:
        """Add a comparison.

        Args:
            key: Key of the setting.
            expected: The plan's value.
            actual: The running engine's value.
        """
        self._checks.append(Check(key=key, expected=expected, actual=actual))

    def optimizer(
        self,
        choice: OptimizerChoice,
        optimizer: torch.optim.Optimizer,
        *,
        scheduler: SchedulerChoice | None,
        steps_taken: int = 0,
        groups: Sequence[RunningGroup] = (),
    ) -> None:
        """Compare the class, the decay mode, and each group's lr, betas, eps and weight decay.

        Args:
            choice: The plan's optimizer.
            optimizer: The running optimizer.
            scheduler: The plan's schedule; ``None`` if the plan has none.
            steps_taken: Number of steps that the schedule has taken.
            groups: Expected groups; default: every group has ``choice.params``.
        """
        self.equal("optimizer.type", choice.implementation, type(optimizer).__name__)
        running = optimizer.param_groups
        if groups:
            self.equal("optimizer.param_groups", len(groups), len(running))
        for index, group in enumerate(running):
            prefix = "optimizer" if len(running) == 1 else f"optimizer.param_groups[{index}]"
            expected = {**choice.params, **(groups[index].params if index < len(groups) else {})}
            if scheduler is not None:
                base = float(expected["lr"])
                # DeepSpeed's schedules set one learning rate for all groups; zerotune's keep each
                # group's multiple.
                factor = base / choice.lr if scheduler.source == "zerotune" else 1.0
                until = groups[index].until if index < len(groups) else None
                if until is not None and steps_taken >= until:
                    factor = 0.0
                expected["lr"] = lr_at(scheduler, steps_taken, choice.lr) * factor
            for name in COMPARED_ARGUMENTS:
                if name in expected and name in group:
                    running_value = group[name]
                    if isinstance(running_value, torch.Tensor):
                        # Optimizers that compile their update store the learning rate in fp32,
                        # which rounds it.
                        running_value = float(running_value)
                        if math.isclose(running_value, expected[name], rel_tol=1e-6):
                            running_value = expected[name]
                    self.equal(f"{prefix}.{name}", expected[name], running_value)
        if choice.weight_decay_mode is not None:
            self.equal(
                "optimizer.weight_decay_mode",
                choice.weight_decay_mode,
                weight_decay_mode(optimizer) or "unknown",
            )

    def group_members(
        self, expected: Sequence[RunningGroup], running: Sequence[RunningGroup]
    ) -> None:
        """Compare which parameters each group contains.

        Args:
            expected: Groups of the plan.
            running: Groups of the running optimizer.
        """
        for index, (wanted, actual) in enumerate(zip(expected, running, strict=False)):
            lost = sorted(wanted.members ^ actual.members)
            count = len(actual.members)
            self.equal(
                f"optimizer.param_groups[{index}].parameters",
                len(wanted.members),
                f"{count}, differing in {lost[0]}" if lost else count,
            )

    @property
    def failed(self) -> tuple[Check, ...]:
        """The failed comparisons."""
        return tuple(check for check in self._checks if not check.passed)

    def render(self) -> str:
        """Return one line for all passed comparisons, and one for each failed comparison."""
        held = ", ".join(
            f"{check.key} = {check.actual!r}" for check in self._checks if check.passed
        )
        return "\n".join(
            [
                f"Verified after initialization: {held}",
                *(f"  {one.key} = {one.actual!r} [NOT {one.expected!r}]" for one in self.failed),
            ]
        )

    def raise_if_failed(self, *, engine: str) -> None:
        """Raise an error that lists every failed comparison.

        Args:
            engine: Name of the component that built the engine, for the message.
        """
        if not self.failed:
            return
        first = self.failed[0]
        differences = "; ".join(
            f"{check.key} should be {check.expected!r} but is {check.actual!r}"
            for check in self.failed
        )
        raise VerificationError(
            f"the engine that {engine} built differs from the plan ({differences})",
            "change these settings in the plan, or report a bug; training has not started",
            first.key,
            first.actual,
        )


def check_alike(plan: ResolvedPlan, model: torch.nn.Module, group: ProcessGroup) -> None:
    """Raise an error that lists any differences between the ranks' models or plans. Collective.

    Args:
        plan: The resolved plan.
        model: The model.
        group: Process group of all ranks.
    """
    # Check the model first: if its shapes differ, sizes in the plan differ only as a result.
    parameters = {
        name: f"{parameter.dtype} {list(getattr(parameter, 'ds_shape', parameter.shape))}"
        + ("" if parameter.requires_grad else ", frozen")
        for name, parameter in model.named_parameters()
    }
    group.agree(parameters, "model", fix="build the same model on every rank")
    check_same_plan(plan, group)


def share_buffers(model: torch.nn.Module, group: ProcessGroup) -> tuple[Decision, ...]:
    """Copy rank 0's buffers to ranks whose buffers differ, as torch's DDP does. Collective.

    Args:
        model: The model.
        group: Process group of all ranks.

    Returns:
        A decision that names the buffers that differed.
    """
    if group.world_size == 1:
        return ()
    mine = {name: each for name, each in model.named_buffers() if not each.is_meta}
    digests = group.gather({name: _digest(each) for name, each in mine.items()}, purpose="compare")
    differ = [
        name for name in digests[0] if any(each.get(name) != digests[0][name] for each in digests)
    ]
    if not differ:
        return ()
    theirs = group.broadcast({name: mine[name].cpu() for name in differ if group.is_main})
    for name in differ:
        mine[name].data.copy_(theirs[name])
    return (
        Decision(
            "model.buffers",
            "different on each rank",
            "rank 0's",
            f"{counted(len(differ), 'buffer')} such as {differ[0]} differed; build the "
            "model with the same seed on every rank",
            "warning",
        ),
    )


def _digest(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).digest()


def check_same_plan(plan: ResolvedPlan, group: ProcessGroup) -> None:
    """Raise an error that lists the differences if ranks have different plans. Collective.

    Args:
        plan: The resolved plan.
        group: Process group of all ranks.
    """
    content = {**plan.content(), "streamed": plan.streamed}
    group.agree(content, "resolved plan", fix="pass the same arguments on every rank")


def weight_decay_mode(optimizer: torch.optim.Optimizer) -> str | None:
    """Return an optimizer's decay mode, ``"decoupled"`` or ``"l2"``; ``None`` if it is unknown.

    Args:
        optimizer: The optimizer.
    """
    for attribute in ("adam_w_mode", "adamw_mode"):
        if hasattr(optimizer, attribute):
            return "decoupled" if getattr(optimizer, attribute) else "l2"
    name = type(optimizer).__name__
    if not type(optimizer).__module__.startswith("torch.optim"):
        return None
    group: Mapping[str, Any] = optimizer.param_groups[0] if optimizer.param_groups else {}
    if name == "AdamW" or group.get("decoupled_weight_decay") is True:
        return "decoupled"
    return "l2" if name in ("Adam", "NAdam", "RAdam", "Adamax", "SGD", "Adagrad") else None


def _equal(expected: Any, actual: Any) -> bool:
    if isinstance(expected, (list, tuple)) and isinstance(actual, (list, tuple)):
        return len(expected) == len(actual) and all(map(_equal, expected, actual))
    if isinstance(expected, float) or isinstance(actual, float):
        return math.isclose(float(expected), float(actual), rel_tol=1e-9, abs_tol=0.0)
    return bool(expected == actual)
