"""Parameter groups before and after an engine has taken them over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

from zerotune.plan.choices import OptimizerChoice

_COMPARED = ("lr", "betas", "eps", "weight_decay", "momentum", "use_muon")


@attrs.frozen(kw_only=True)
class RunningGroup:
    """One group: its own arguments and whom they concern."""

    params: Mapping[str, Any]
    """Arguments by name."""
    members: frozenset[str]
    """Dotted names of the parameters."""


def expected_groups(
    choice: OptimizerChoice,
    named: Sequence[tuple[str, torch.nn.Parameter]],
    client: torch.optim.Optimizer | None,
) -> tuple[RunningGroup, ...]:
    """What every group should be once the engine runs.

    Args:
        choice: The plan's optimizer.
        named: Names and parameters of all that is trained.
        client: The optimizer as it is handed over. mup divides groups by width when it is built,
            so there its groups are what must survive; elsewhere the plan's are.
    """
    if choice.package == "mup" and client is not None:
        names = {id(parameter): name for name, parameter in named}
        return tuple(
            _read(group, group["params"], names) for group in client.param_groups if group["params"]
        )
    if choice.groups:
        return tuple(
            RunningGroup(params=group.params, members=frozenset(group.parameters))
            for group in choice.groups
        )
    return (RunningGroup(params={}, members=frozenset(name for name, _ in named)),)


def running_groups(engine: Any, module: torch.nn.Module) -> tuple[RunningGroup, ...]:
    """The groups inside a ``deepspeed.DeepSpeedEngine``, whatever its stage made of them."""
    wrapper = engine.optimizer
    inner = getattr(wrapper, "optimizer", wrapper)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    members: list[list[torch.Tensor]] = [[] for _ in inner.param_groups]
    if hasattr(wrapper, "sub_group_to_group_id"):
        for sub_group, parameters in enumerate(wrapper.fp16_groups):
            members[wrapper.sub_group_to_group_id[sub_group]].extend(parameters)
    else:
        held = getattr(wrapper, "bit16_groups", None) or getattr(wrapper, "fp16_groups", None)
        members = held or [group["params"] for group in inner.param_groups]
    return tuple(
        _read(group, parameters, names)
        for group, parameters in zip(inner.param_groups, members, strict=True)
    )


def _read(
    group: Mapping[str, Any], parameters: Sequence[torch.Tensor], names: Mapping[int, str]
) -> RunningGroup:
    return RunningGroup(
        params={key: group[key] for key in _COMPARED if key in group},
        members=frozenset(names[id(parameter)] for parameter in parameters),
    )
