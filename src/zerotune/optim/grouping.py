"""``ParameterGroups`` applied to a model: every trainable parameter in exactly one group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from zerotune.decisions import Decision
from zerotune.errors import InvalidValueError, OptimizerError
from zerotune.optim.arguments import reject_unknown
from zerotune.optim.entries import OptimizerEntry
from zerotune.optim.groups import REST, ParameterGroup, ParameterGroups
from zerotune.optim.patterns import closest_names, matches
from zerotune.plan.choices import GroupChoice, OptimizerChoice
from zerotune.plan.facts import ModelFacts, ParameterFacts

KEY: Final = "optimizer.groups"

_PER_GROUP: Final = frozenset(
    {"lr", "weight_decay", "betas", "eps", "momentum", "dampening", "nesterov", "alpha", "rho"}
)
"""Arguments that every class reads from the group at each step."""


def group_parameters(
    groups: ParameterGroups,
    model: ModelFacts | None,
    choice: OptimizerChoice,
    entry: OptimizerEntry,
) -> tuple[tuple[GroupChoice, ...], tuple[Decision, ...]]:
    """Put every trainable parameter into the first group that picks it.

    Args:
        groups: The rules.
        model: Names and shapes.
        choice: The optimizer; its arguments hold where a group has none of its own.
        entry: Its catalogue entry.

    Returns:
        Groups that are not empty, in the order of their rules, ``"rest"`` last; and a decision
        that names them with their sizes.

    Raises:
        OptimizerError: There is no model to look at, or a pattern matches nothing.
        UnknownKeyError: A group has an argument the optimizer lacks.
        InvalidValueError: A value of the wrong type, out of range or not per group.
    """
    if model is None:
        raise OptimizerError(
            "parameter groups need the names of the parameters",
            key=KEY,
            fix="give them: plan.resolve(model=ModelFacts.from_module(model))",
        )
    if entry.name == "Prodigy":
        raise OptimizerError(
            "it finds one rate from all weights, and ZeRO would step one group after the other",
            key=KEY,
            value=entry.name,
            fix="leave the groups out, or use another optimizer",
        )
    _check_patterns(groups, model)
    taken = _assign(groups.rules, model.trainable)
    _check_empty(groups.rules, taken, model)
    rest = ParameterGroup(name=REST)
    chosen = tuple(
        _choice(rule, taken[rule.name], choice, entry)
        for rule in (*groups.rules, rest)
        if taken[rule.name]
    )
    return chosen, (_decision(chosen),)


def same_group(
    parameters: Sequence[ParameterFacts], name: str, params: Mapping[str, Any]
) -> GroupChoice:
    """A group of ``parameters`` with explicit arguments."""
    return GroupChoice(
        name=name,
        params=dict(params),
        parameters=tuple(parameter.name for parameter in parameters),
        numel=sum(parameter.numel for parameter in parameters),
    )


def describe(group: GroupChoice) -> str:
    """One line: size and own arguments."""
    own = ", ".join(f"{key} {_show(value)}" for key, value in group.params.items())
    noun = "parameter" if len(group.parameters) == 1 else "parameters"
    return f"{group.name}: {len(group.parameters)} {noun}, {group.numel:,} elements, {own}"


def _show(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else f"{value}"


def _assign(
    rules: Sequence[ParameterGroup], parameters: Sequence[ParameterFacts]
) -> dict[str, list[ParameterFacts]]:
    taken: dict[str, list[ParameterFacts]] = {rule.name: [] for rule in rules}
    taken[REST] = []
    for parameter in parameters:
        first = next((rule for rule in rules if rule.picks(parameter.name, parameter.shape)), None)
        taken[REST if first is None else first.name].append(parameter)
    return taken


def _check_patterns(groups: ParameterGroups, model: ModelFacts) -> None:
    trainable = [parameter.name for parameter in model.trainable]
    frozen = [parameter.name for parameter in model.parameters if not parameter.trainable]
    for rule in groups.rules:
        for pattern in rule.patterns:
            if any(matches(pattern, name) for name in trainable):
                continue
            if any(matches(pattern, name) for name in frozen):
                reason, fix = "it matches frozen parameters only", "let them require gradients"
            else:
                close = closest_names(pattern, trainable)
                reason = "it matches no parameter of the model"
                fix = f"did you mean {' or '.join(close)}?" if close else _first_names(trainable)
            raise OptimizerError(reason, key=f"{KEY}.{rule.name}.patterns", value=pattern, fix=fix)


def _first_names(names: Sequence[str]) -> str:
    parts = dict.fromkeys(name.partition(".")[0] for name in names)
    return f"the model's parts are {', '.join(parts)}"


def _check_empty(
    rules: Sequence[ParameterGroup],
    taken: Mapping[str, Sequence[ParameterFacts]],
    model: ModelFacts,
) -> None:
    for index, rule in enumerate(rules):
        if rule.optional or taken[rule.name]:
            continue
        wanted = [p for p in model.trainable if rule.picks(p.name, p.shape)]
        rivals = [
            other.name
            for other in rules[:index]
            if any(other.picks(p.name, p.shape) for p in wanted)
        ]
        raise OptimizerError(
            f"earlier groups have taken all it would pick ({', '.join(rivals)})"
            if rivals
            else f"no parameter it matches has {rule.max_ndim} dimensions or fewer",
            key=f"{KEY}.{rule.name}",
            value=rule.patterns,
            fix="put it before them: the first match wins" if rivals else "leave max_ndim out",
        )


def _choice(
    rule: ParameterGroup,
    parameters: Sequence[ParameterFacts],
    choice: OptimizerChoice,
    entry: OptimizerEntry,
) -> GroupChoice:
    section = f"{KEY}.{rule.name}"
    known = [name for name in entry.parameter_names if name in choice.params]
    reject_unknown(rule.params, known, section=section, owner=entry.name)
    own: dict[str, Any] = {}
    for key, value in rule.params.items():
        parameter = entry.parameter(key)
        if parameter is None or key not in _PER_GROUP:
            raise InvalidValueError(
                "the class reads it once for all groups",
                key=f"{section}.{key}",
                value=value,
                fix="write it under optimizer.params",
            )
        own[key] = parameter.check(value, section=section)
    if rule.lr_scale is not None:
        own["lr"] = choice.lr * rule.lr_scale
    shown = {key: choice.params[key] for key in ("lr", "weight_decay") if key in choice.params}
    return same_group(parameters, rule.name, {**shown, **own})


def _decision(chosen: Sequence[GroupChoice]) -> Decision:
    return Decision(
        key=KEY,
        before=None,
        after=tuple(group.name for group in chosen),
        reason="; ".join(describe(group) for group in chosen),
    )
