"""Assign optimizer arguments to parameters by name and shape; the first matching pattern wins.

Users write ``ParameterGroups``. ``group_parameters`` applies them to a ``ModelFacts``; later, the
engine applies the resulting groups to the parameters.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import attrs

from zerotune._util.text import as_texts, did_you_mean, positive, whole
from zerotune.decisions import Log, raise_all
from zerotune.errors import InvalidValueError, OptimizerError
from zerotune.plan.facts import ModelFacts, ParameterFacts
from zerotune.plan.optimizer.arguments import check, reject_unknown
from zerotune.plan.optimizer.choices import GroupChoice, OptimizerChoice
from zerotune.plan.optimizer.entries import OptimizerEntry

REGEX: Final = "re:"
"""Prefix of regular expressions; every other pattern is a glob or a subtree."""

_GLOB: Final = frozenset("*?[")


def check_pattern(pattern: Any, *, key: str) -> str:
    """Check a pattern of parameter names, and return it."""
    if not isinstance(pattern, str) or not pattern.strip():
        raise InvalidValueError(
            "a pattern must be text", 'write for example "unet.*.bias"', key, pattern
        )
    if pattern.startswith(REGEX):
        try:
            re.compile(pattern.removeprefix(REGEX))
        except re.error as error:
            raise InvalidValueError(
                f"is not a valid regular expression ({error})",
                "correct the expression, or write a glob without the re: prefix",
                key,
                pattern,
            ) from error
    return pattern


def matches(pattern: str, name: str) -> bool:
    """Return whether ``pattern`` matches the parameter ``name``.

    Args:
        pattern: ``"re:…"`` is a regular expression that may match any part of the name. With ``*``,
            ``?`` or ``[`` the pattern is a glob over the whole name (``*`` also matches dots).
            Anything else is the name of a parameter, or of a module (``"unet.conv_in"``), which
            matches all its parameters.
        name: Dotted name as in ``named_parameters()``.
    """
    if pattern.startswith(REGEX):
        return re.search(pattern.removeprefix(REGEX), name) is not None
    if _GLOB & set(pattern):
        return fnmatch.fnmatchcase(name, pattern)
    return name == pattern or name.startswith(f"{pattern}.")


def closest_names(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names of modules and parameters that resemble ``pattern``, closest first."""
    candidates: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        candidates |= dict.fromkeys(".".join(parts[:end]) for end in range(1, len(parts) + 1))
    plain = pattern.removeprefix(REGEX).strip("*.^$").replace("\\.", ".")
    return did_you_mean(plain, candidates)


_RULES_KEY: Final = "groups"

REST: Final = "rest"
"""Name of the group for parameters that no rule matches."""


@attrs.frozen(kw_only=True)
class ParameterGroup:
    """Patterns for parameter names, and the optimizer arguments for matching parameters."""

    name: str
    """Name of the group in reports."""
    patterns: tuple[str, ...] = attrs.field(default=("*",), converter=as_texts)
    """Globs, module names or ``"re:…"``; one match suffices. By default, all parameters match."""
    max_ndim: int | None = None
    """Maximum number of dimensions of matching parameters; 1 matches biases and norm weights."""
    params: Mapping[str, Any] = attrs.field(factory=dict)
    """The group's own arguments (``{"lr": 1e-5, "weight_decay": 0.0}``); others come from the
    optimizer."""
    lr_scale: float | None = None
    """Multiplier for the optimizer's learning rate, as an alternative to ``lr``."""
    until: int | None = None
    """Number of optimizer steps after which the learning rate is 0; a trainer then freezes the
    group."""
    use_muon: bool | None = None
    """Whether the optimizer ``Muon`` updates the group's matrices by Muon or by its auxiliary Adam;
    by default, hidden matrices by Muon. Vectors are always Adam's."""
    optional: bool = False
    """Whether the group may be empty because earlier rules match all its parameters; if ``False``,
    an empty group is an error. A pattern that matches no parameter at all is always an error."""

    def __attrs_post_init__(self) -> None:
        name: Any = self.name
        if not isinstance(name, str) or not name.strip():
            raise InvalidValueError("a group needs a name", key=f"{_RULES_KEY}.name", value=name)
        here = f"{_RULES_KEY}.{self.name}"
        for pattern in self.patterns:
            check_pattern(pattern, key=f"{here}.patterns")
        if not self.patterns:
            fix = 'write "*" for all remaining parameters'
            raise InvalidValueError(
                "a group without patterns matches no parameter", fix, f"{here}.patterns"
            )
        if self.lr_scale is not None:
            fix = "to exclude parameters from training, freeze them with requires_grad_(False)"
            positive(self.lr_scale, key=f"{here}.lr_scale", fix=fix)
        if self.lr_scale is not None and "lr" in self.params:
            reason = "lr and lr_scale are both set, but a group accepts only one of them"
            raise InvalidValueError(reason, "omit one of them", f"{here}.lr_scale", self.lr_scale)
        if self.until is not None:
            fix = "write the number of optimizer steps after which the group stops, such as 500"
            whole(self.until, key=f"{here}.until", fix=fix)
        by_muon: Any = self.use_muon
        if by_muon is not None and not isinstance(by_muon, bool):
            fix = "write True or False"
            raise InvalidValueError("is not a boolean", fix, f"{here}.use_muon", by_muon)

    def picks(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return whether a pattern of this rule matches the parameter.

        Args:
            name: Dotted name of the parameter.
            shape: Shape of the parameter.
        """
        if self.max_ndim is not None and len(shape) > self.max_ndim:
            return False
        return any(matches(pattern, name) for pattern in self.patterns)

    def _group_of(
        self, parameters: Sequence[ParameterFacts], choice: OptimizerChoice, entry: OptimizerEntry
    ) -> GroupChoice:
        section = f"{KEY}.{self.name}"
        accepted = [name for name in entry.parameter_names if name in choice.params]
        log = Log()
        reject_unknown(self.params, accepted, log, section=section, owner=entry.name)
        raise_all(log.mistakes)
        arguments: dict[str, Any] = {}
        for key, value in self.params.items():
            parameter = entry.parameter(key)
            if parameter is None or key not in _PER_GROUP:
                raise InvalidValueError(
                    "the optimizer uses one value of this argument for all groups",
                    "write it under optimizer.params",
                    f"{section}.{key}",
                    value,
                )
            arguments[key] = check(parameter, value, section=section)
        if self.lr_scale is not None:
            arguments["lr"] = choice.lr * self.lr_scale
        if self.use_muon is not None:
            if entry.name != "Muon":
                raise InvalidValueError(
                    "only the optimizer Muon reads this",
                    "omit it",
                    f"{section}.use_muon",
                    self.use_muon,
                )
            arguments["use_muon"] = self.use_muon
        shown = {key: choice.params[key] for key in ("lr", "weight_decay") if key in choice.params}
        group = same_group(parameters, self.name, {**shown, **arguments})
        return attrs.evolve(group, until=self.until)


@attrs.frozen(kw_only=True)
class ParameterGroups:
    """Ordered rules; the first rule that matches a parameter applies.

    Unmatched parameters form a last group, ``"rest"``, with the optimizer's own arguments::

        ParameterGroups.per_part(
            {"unet": {"lr": 1e-5}, "text_encoder": {"lr": 1e-6}}
        ).without_decay_on_norms_and_biases()
    """

    rules: tuple[ParameterGroup, ...] = attrs.field(converter=tuple[ParameterGroup, ...])
    """Rules, in the order in which they are tried."""

    @rules.validator
    def _check_rules(self, _attribute: Any, value: tuple[ParameterGroup, ...]) -> None:
        names = [rule.name for rule in value]
        for name in names:
            if names.count(name) > 1 or name == REST:
                raise InvalidValueError(
                    "two groups have the same name"
                    if name != REST
                    else "this name is reserved for the group of unmatched parameters",
                    "rename one of them",
                    f"{_RULES_KEY}.name",
                    name,
                )

    @classmethod
    def no_decay(cls) -> ParameterGroups:
        """Create a rule for norms and biases (parameters with one dimension), without weight decay.

        The rule tests the number of dimensions instead of the name, because diffusion models name
        norms ``norm1``, ``group_norm``, ``conv_norm_out``, ``ln_1`` …
        """
        return cls(rules=[_NO_DECAY])

    @classmethod
    def per_part(cls, parts: Mapping[str, Mapping[str, Any]]) -> ParameterGroups:
        """Create one group for each trained module, such as the U-Net and the text encoder.

        Args:
            parts: Arguments by module name or pattern:
                ``{"unet": {"lr": 1e-5}, "text_encoder": {"lr": 1e-6, "until": 500}}``.
        """
        rules = []
        for part, given in parts.items():
            params = dict(given)
            until = params.pop("until", None)
            rules.append(ParameterGroup(name=part, patterns=part, params=params, until=until))
        return cls(rules=rules)

    def without_decay_on_norms_and_biases(self) -> ParameterGroups:
        """Split each group in two: one without weight decay for norms and biases, one for the rest.

        The group without weight decay is named ``"<name>, no decay"`` and is matched first.
        """
        split: list[ParameterGroup] = []
        for rule in self.rules:
            split.append(
                attrs.evolve(
                    rule,
                    name=f"{rule.name}, no decay",
                    max_ndim=1,
                    params={**rule.params, "weight_decay": 0.0},
                    optional=True,
                )
            )
            split.append(attrs.evolve(rule, optional=True))
        return ParameterGroups(rules=[*split, _NO_DECAY])

    def _check_matches(self, model: ModelFacts) -> None:
        trainable = [parameter.name for parameter in model.trainable]
        for rule in self.rules:
            for pattern in rule.patterns:
                if not any(matches(pattern, name) for name in trainable):
                    close = closest_names(pattern, trainable)
                    parts = dict.fromkeys(name.partition(".")[0] for name in trainable)
                    raise OptimizerError(
                        "it matches no parameter of the model that is trained",
                        f"did you mean {' or '.join(close)}?"
                        if close
                        else f"the model's parts are {', '.join(parts)}",
                        f"{KEY}.{rule.name}.patterns",
                        pattern,
                    )


_NO_DECAY = ParameterGroup(name="no decay", max_ndim=1, params={"weight_decay": 0.0}, optional=True)


KEY: Final = "optimizer.groups"

_PER_GROUP: Final = frozenset(
    {"lr", "weight_decay", "betas", "eps", "momentum", "dampening", "nesterov", "alpha", "rho"}
)
"""Arguments that every class reads per group at each step."""


def group_parameters(
    groups: ParameterGroups,
    model: ModelFacts | None,
    choice: OptimizerChoice,
    entry: OptimizerEntry,
) -> tuple[GroupChoice, ...]:
    """Assign every trainable parameter to the first matching group."""
    if model is None:
        raise OptimizerError(
            "parameter groups need the names of the parameters",
            "pass them: plan.resolve(model=ModelFacts.from_module(model))",
            KEY,
        )
    if entry.name == "Prodigy":
        raise OptimizerError(
            "the optimizer derives one rate from all weights, but ZeRO updates groups one "
            "after another",
            "omit the groups, or use a different optimizer",
            KEY,
            entry.name,
        )
    groups._check_matches(model)
    taken: dict[str, list[ParameterFacts]] = {rule.name: [] for rule in groups.rules}
    taken[REST] = []
    for each in model.trainable:
        first = next((rule for rule in groups.rules if rule.picks(each.name, each.shape)), None)
        taken[REST if first is None else first.name].append(each)
    for rule in groups.rules:
        if not taken[rule.name] and not rule.optional:
            raise OptimizerError(
                "earlier groups match all of its parameters, or max_ndim excludes them",
                "move this group before them, since the first match wins, or omit max_ndim",
                f"{KEY}.{rule.name}",
                rule.patterns,
            )
    rest = ParameterGroup(name=REST)
    return tuple(
        rule._group_of(taken[rule.name], choice, entry)
        for rule in (*groups.rules, rest)
        if taken[rule.name]
    )


def same_group(
    parameters: Sequence[ParameterFacts], name: str, params: Mapping[str, Any]
) -> GroupChoice:
    """Create a group from its parameters and all its optimizer arguments."""
    return GroupChoice(
        name=name,
        params=dict(params),
        parameters=tuple(parameter.name for parameter in parameters),
        numel=sum(parameter.numel for parameter in parameters),
    )


def describe(group: GroupChoice) -> str:
    """Describe a group in one line: its size and its optimizer arguments."""
    arguments = ", ".join(
        f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in group.params.items()
    )
    noun = "parameter" if len(group.parameters) == 1 else "parameters"
    end = "" if group.until is None else f", until step {group.until}"
    return (
        f"{group.name}: {len(group.parameters)} {noun}, {group.numel:,} elements, {arguments}{end}"
    )


def record_groups(chosen: Sequence[GroupChoice], log: Log) -> None:
    """Record the chosen groups in one decision."""
    described = "; ".join(map(describe, chosen))
    log.decide(KEY, None, tuple(group.name for group in chosen), described)
