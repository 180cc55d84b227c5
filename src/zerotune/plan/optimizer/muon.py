"""``MuonPatterns``: which parameters Muon updates, and which its auxiliary Adam."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import attrs

from zerotune.decisions import Decision
from zerotune.errors import InvalidValueError, OptimizerError
from zerotune.plan.facts import ModelFacts, ParameterFacts
from zerotune.plan.optimizer.choices import GroupChoice, OptimizerChoice
from zerotune.plan.optimizer.groups import check_pattern, groups_decision, matches, same_group

AUXILIARY_LR: Final = 3e-4
"""Upper limit for the default learning rate of Muon's auxiliary Adam."""

_POSITIONS: Final = ("@vectors", "@first", "@last")

MUON_DEFAULTS: Final[tuple[tuple[str, bool], ...]] = (
    ("@vectors", False),
    ("*embed*", False),
    ("*lm_head*", False),
    (r"re:(^|\.)conv_(in|out)\.", False),
    (r"re:^(\w+\.)?proj_out\.", False),
    ("@first", False),
    ("@last", False),
    ("*", True),
)
"""Default patterns, which select Muon for hidden matrices, and Adam for norms, biases, embeddings,
and the first and last layers."""


def _muon_rules(value: Iterable[Any]) -> tuple[tuple[str, bool], ...]:
    return tuple((pattern, use) for pattern, use in value)


@attrs.frozen(kw_only=True)
class MuonPatterns:
    """Ordered patterns; the first match decides whether Muon or Adam updates a parameter.

    To change the choice for some parameters, put their pattern before the defaults::

        MuonPatterns(rules=[("unet.down_blocks.0", False), *MUON_DEFAULTS])
    """

    rules: tuple[tuple[str, bool], ...] = attrs.field(default=MUON_DEFAULTS, converter=_muon_rules)
    """Pairs of a pattern (as in ``ParameterGroup``) and a boolean: true selects Muon, false Adam.
    Three patterns select by shape and position: ``"@vectors"`` (fewer than two dimensions),
    ``"@first"`` and ``"@last"`` (the model's first and last matrix). Adam updates parameters that
    no pattern matches."""

    @rules.validator
    def _check_rules(self, _attribute: Any, value: tuple[tuple[str, bool], ...]) -> None:
        for pattern, use in value:
            check_pattern(pattern, key="use_muon")
            if pattern.startswith("@") and pattern not in _POSITIONS:
                raise InvalidValueError(
                    "is not a known position",
                    f"use one of {', '.join(_POSITIONS)}",
                    "use_muon",
                    pattern,
                )
            if not isinstance(use, bool):
                raise InvalidValueError(
                    "must be true (Muon) or false (Adam)", key=f"use_muon.{pattern}", value=use
                )

    def select(self, parameters: Sequence[ParameterFacts]) -> frozenset[str]:
        """Return the names of parameters that Muon updates.

        Args:
            parameters: All trainable parameters, in the model's order.

        Raises:
            InvalidValueError: A rule selects Muon for a parameter that is not a matrix.
        """
        matrices = [parameter.name for parameter in parameters if len(parameter.shape) > 1]
        ends = {"@first": matrices[:1], "@last": matrices[-1:]}
        chosen = frozenset(p.name for p in parameters if self._means_muon(p, ends))
        for parameter in parameters:
            if parameter.name in chosen and len(parameter.shape) < 2:
                raise InvalidValueError(
                    "Muon orthogonalises matrices, but this parameter is not a matrix",
                    'put ("@vectors", False) before the pattern that matches it',
                    f"use_muon.{parameter.name}",
                    parameter.shape,
                )
        return chosen

    def _means_muon(self, parameter: ParameterFacts, ends: Mapping[str, Sequence[str]]) -> bool:
        for pattern, use in self.rules:
            if pattern == "@vectors":
                picked = len(parameter.shape) < 2
            elif pattern in ends:
                picked = parameter.name in ends[pattern]
            else:
                picked = matches(pattern, parameter.name)
            if picked:
                return use
        return False


def muon_groups(
    choice: OptimizerChoice,
    model: ModelFacts,
    patterns: MuonPatterns,
    rates: Mapping[str, Any],
) -> tuple[OptimizerChoice, tuple[Decision, ...]]:
    """Split every group of ``choice`` into one group for Muon and one for Adam."""
    selected = patterns.select(model.trainable)
    if not selected:
        raise OptimizerError(
            "no parameter of this model is selected for Muon",
            "select parameters with OptimizerResolver(muon=MuonPatterns(rules=…)), or use AdamW",
            "use_muon",
        )
    muon_lr = rates.get("muon_lr", choice.lr)
    adam_lr, decisions = _adam_rate(choice, rates)
    params = {**choice.params, "lr": muon_lr}
    facts = {parameter.name: parameter for parameter in model.trainable}
    groups: list[GroupChoice] = []
    for group in choice.groups or (same_group(model.trainable, "", {}),):
        scale = float(group.params.get("lr", choice.lr)) / choice.lr
        for kind, lr in (("muon", muon_lr), ("adam", adam_lr)):
            members = [facts[n] for n in group.parameters if (n in selected) is (kind == "muon")]
            arguments = {**group.params, "lr": lr * scale, "use_muon": kind == "muon"}
            name = ", ".join(part for part in (group.name, kind) if part)
            if members:
                groups.append(same_group(members, name, arguments))
    settled = attrs.evolve(choice, params=params, groups=tuple(groups))
    return settled, (*decisions, *_convolutions_decision(facts, selected), groups_decision(groups))


def _adam_rate(
    choice: OptimizerChoice, rates: Mapping[str, Any]
) -> tuple[float, tuple[Decision, ...]]:
    if "adam_lr" in rates:
        return rates["adam_lr"], ()
    lr = min(choice.lr, AUXILIARY_LR)
    if lr == choice.lr:
        return lr, ()
    decision = Decision(
        "optimizer.params.adam_lr",
        None,
        lr,
        f"Muon's learning rate of {choice.lr:g} is far too large for Adam, which updates "
        "the other parameters; set adam_lr to change Adam's learning rate",
        "warning",
    )
    return lr, (decision,)


def _convolutions_decision(
    facts: Mapping[str, ParameterFacts], selected: frozenset[str]
) -> tuple[Decision, ...]:
    count = sum(len(facts[name].shape) > 2 for name in selected)
    if not count:
        return ()
    decision = Decision(
        "use_muon",
        None,
        f"{count} convolutions",
        "Muon treats a convolution as a matrix of shape (out, in x height x width), as its "
        'authors do; to use Adam for convolutions, put ("re:pattern", False) first',
    )
    return (decision,)
