"""After an engine was initialized: is what runs what the plan asked for?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch

from zerotune.errors import VerificationError
from zerotune.optimizers.choices import OptimizerChoice, SchedulerChoice
from zerotune.optimizers.curves import betas_at, lr_at

if TYPE_CHECKING:
    from zerotune.backend.distributed import ProcessGroup
    from zerotune.plan.model import ResolvedPlan

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
