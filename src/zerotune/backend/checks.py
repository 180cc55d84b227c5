"""Can the engine hold these weights, and once it is initialized: is it what the plan asked for?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs
import torch

from zerotune.errors import EngineError, InvalidValueError, VerificationError
from zerotune.optimizers.catalogue import OptimizerChoice, SchedulerChoice
from zerotune.optimizers.schedules import betas_at, lr_at
from zerotune.plan.model import ModelFacts, ResolvedPlan

if TYPE_CHECKING:
    from zerotune.backend.distributed import ProcessGroup


# -- Before the start: precisions by the names that plans give them, and weights as they come.


DTYPES: Final[Mapping[str, torch.dtype]] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def checked_dtype(dtype: str | torch.dtype, *, key: str = "dtype") -> torch.dtype:
    """A dtype of weights by zerotune's name or torch's.

    Args:
        dtype: ``"fp32"``, ``"bf16"``, ``"fp16"`` or a floating-point torch dtype.
        key: What the argument is called, for the message.
    """
    chosen = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if chosen is None or not chosen.is_floating_point:
        raise InvalidValueError(
            "is not a precision of weights", key=key, value=dtype, fix=f"one of {list(DTYPES)}"
        )
    return chosen


def check_quantized(model: torch.nn.Module, plan: ResolvedPlan) -> None:
    """Whether DeepSpeed can hold a model's quantized weights as the plan asks."""
    if not plan.uses_deepspeed:
        return
    quantized = [each for each in ModelFacts.from_module(model).parameters if each.storage]
    if not quantized:
        return
    key, storage = f"model.{quantized[0].name}", quantized[0].storage
    if any(is_torchao(parameter) for parameter in model.parameters()):
        raise EngineError(
            "DeepSpeed casts, sends and cuts weights in ways that torchao's tensors do not know "
            "('Couldn't swap Linear.weight' below stage 3, bytes of them at stage 3)",
            key=key,
            value=storage,
            fix="quantize with bitsandbytes (diffusers.BitsAndBytesConfig), which trains at every "
            "stage",
        )
    if plan.stage == 3 and plan.offload_param == "nvme":
        raise EngineError(
            "swap files hold weights in the plan's precision, and this one is quantized",
            key="zero_optimization.offload_param.device",
            value=f"nvme, and {key} is {storage}",
            fix='write "cpu": a quantized base is small',
        )


def is_torchao(parameter: torch.Tensor) -> bool:
    """Whether a weight is a tensor of torchao's, which says it is of the dtype it stands for."""
    return type(parameter).__module__.partition(".")[0] == "torchao"


def check_model_dtype(model: torch.nn.Module, plan: ResolvedPlan) -> None:
    """Whether the forward pass can run at the plan's precision with the weights as they are.

    DeepSpeed casts a model to bf16 or fp16, and at stage 3 to fp32; elsewhere an fp32 plan leaves
    weights as they come, and fp32 inputs meet them in a layer that says "mat1 and mat2 must have
    the same dtype".
    """
    if plan.precision != "fp32" or (plan.uses_deepspeed and plan.stage == 3):
        return
    half = {dtype: name for name, dtype in DTYPES.items() if name != "fp32"}
    halves = [(name, p.dtype) for name, p in model.named_parameters() if p.dtype in half]
    if not halves:
        return
    name, dtype = halves[0]
    frozen = all(not p.requires_grad for p in model.parameters() if p.dtype in half)
    train = "" if half[dtype] == "fp16" else f', or train in it: precision="{half[dtype]}"'
    raise EngineError(
        f"{len(halves)} of the model's weights are in {half[dtype]}, the plan trains in fp32"
        + (", and frozen weights are not cast" if frozen else ": master weights are fp32"),
        key=f"model.{name}",
        value=dtype,
        fix=f"load the model in float32 (torch_dtype=torch.float32, or model.float()){train}",
    )


# -- After it: what runs, compared with the plan.


COMPARED_ARGUMENTS = ("lr", "betas", "eps", "weight_decay", "momentum", "use_muon")


@attrs.frozen(kw_only=True)
class RunningGroup:
    """One group: its own arguments and whom they concern."""

    params: Mapping[str, Any]
    """Arguments by name."""
    members: frozenset[str]
    """Dotted names of the parameters."""
    until: int | None = None
    """Optimizer steps after which the rate is 0."""

    @classmethod
    def read(
        cls, group: Mapping[str, Any], members: Sequence[torch.Tensor], names: Mapping[int, str]
    ) -> RunningGroup:
        """One of ``param_groups``, which itself holds flat shards under ZeRO.

        ``names`` are dotted names by the parameters' ``id``.
        """
        return cls(
            params={key: group[key] for key in COMPARED_ARGUMENTS if key in group},
            members=frozenset(names[id(parameter)] for parameter in members),
        )


def expected_groups(
    choice: OptimizerChoice,
    named: Sequence[tuple[str, torch.nn.Parameter]],
    client: torch.optim.Optimizer | None,
) -> tuple[RunningGroup, ...]:
    """What every group should be once the engine runs.

    mup divides groups by width when it is built, so there those of ``client``, the optimizer as it
    is handed over, are what must survive; elsewhere the plan's are.
    """
    if choice.package == "mup" and client is not None:
        names = {id(parameter): name for name, parameter in named}
        return tuple(
            RunningGroup.read(group, group["params"], names)
            for group in client.param_groups
            if group["params"]
        )
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
        """Equal; floats to the last few bits, since they pass through C++ and JSON."""
        return _equal(self.expected, self.actual)


class Checks:
    """Collects comparisons, so that one error can name every difference."""

    def __init__(self) -> None:
        self._checks: list[Check] = []

    def equal(self, key: str, expected: Any, actual: Any) -> None:
        """Add a comparison."""
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
        """Compare the class, and lr, betas, eps, weight decay and the decay mode of every group.

        Without ``groups`` all groups should have ``choice.params``.
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
                # DeepSpeed's schedules know one rate; zerotune's keep each group's multiple.
                factor = base / choice.lr if scheduler.source == "zerotune" else 1.0
                until = groups[index].until if index < len(groups) else None
                if until is not None and steps_taken >= until:
                    factor = 0.0
                expected["lr"] = lr_at(scheduler, steps_taken, choice.lr) * factor
                if expected.get("betas") is not None:
                    expected["betas"] = betas_at(scheduler, steps_taken, tuple(expected["betas"]))
            for name in COMPARED_ARGUMENTS:
                if name in expected and name in group:
                    running_value = group[name]
                    if isinstance(running_value, torch.Tensor):
                        # Optimizers that compile their update keep the rate in fp32, where 0.1 is
                        # not 0.1.
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
        """Compare which parameters each group holds."""
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
        """The comparisons that did not hold."""
        return tuple(check for check in self._checks if not check.passed)

    def render(self) -> str:
        """One line for all that hold, and one for each comparison that does not."""
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
        """Refuse to train when anything differs."""
        if not self.failed:
            return
        first = self.failed[0]
        differences = "; ".join(
            f"{check.key} should be {check.expected!r} but {check.actual!r} runs"
            for check in self.failed
        )
        raise VerificationError(
            f"what {engine} built is not what the plan says ({differences})",
            key=first.key,
            value=first.actual,
            fix="ask for what this engine builds, or report it: training was not started",
        )


def check_alike(plan: ResolvedPlan, model: torch.nn.Module, group: ProcessGroup) -> None:
    """Refuse ranks that train different models or plans; names what differs. Collective."""
    # The model first: what is sized by its shapes differs with it in the plan.
    parameters = {
        name: f"{parameter.dtype} {list(getattr(parameter, 'ds_shape', parameter.shape))}"
        + ("" if parameter.requires_grad else ", frozen")
        for name, parameter in model.named_parameters()
    }
    group.agree(parameters, "model", fix="build the same model on every rank")
    check_same_plan(plan, group)


def check_same_plan(plan: ResolvedPlan, group: ProcessGroup) -> None:
    """Refuse ranks with different plans; names the key and each rank's value. Collective."""
    content = {**plan.content(), "streamed": plan.streamed}
    group.agree(content, "resolved plan", fix="give every rank the same arguments")


def weight_decay_mode(optimizer: torch.optim.Optimizer) -> str | None:
    """``"decoupled"``, ``"l2"``, or ``None`` when the optimizer does not tell."""
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
