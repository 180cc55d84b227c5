"""Which parameters Muon updates, and which its auxiliary Adam."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import attrs

from zerotune.decisions import Decision
from zerotune.errors import InvalidValueError, OptimizerError
from zerotune.optim.grouping import KEY, describe, same_group
from zerotune.optim.patterns import check_pattern, matches
from zerotune.plan.choices import GroupChoice, OptimizerChoice
from zerotune.plan.facts import ModelFacts, ParameterFacts

ADAM_LR: Final = 3e-4
"""Learning rate of the auxiliary Adam, where Muon's own is larger and nobody wrote another."""

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
"""Hidden matrices yes; norms, biases, embeddings, the first and last layers no."""


def _rules(value: Iterable[Any]) -> tuple[tuple[str, bool], ...]:
    return tuple((pattern, use) for pattern, use in value)


@attrs.frozen(kw_only=True)
class MuonPatterns:
    """Ordered patterns; the first that picks a parameter says whether Muon updates it.

    To change one thing, put it first::

        MuonPatterns(rules=[("unet.down_blocks.0", False), *MUON_DEFAULTS])
    """

    rules: tuple[tuple[str, bool], ...] = attrs.field(default=MUON_DEFAULTS, converter=_rules)
    """Pairs of a pattern (as in ``ParameterGroup``) and whether it means Muon. Three patterns go
    by shape and place: ``"@vectors"`` (fewer than two dimensions), ``"@first"`` and ``"@last"``
    (the model's first and last matrix). What no pattern picks is Adam's."""

    @rules.validator
    def _check_rules(self, _attribute: Any, value: tuple[tuple[str, bool], ...]) -> None:
        for pattern, use in value:
            check_pattern(pattern, key="use_muon")
            if pattern.startswith("@") and pattern not in _POSITIONS:
                raise InvalidValueError(
                    "no such place", key="use_muon", value=pattern,
                    fix=f"use one of {', '.join(_POSITIONS)}",
                )  # fmt: skip
            if not isinstance(use, bool):
                raise InvalidValueError(
                    "Muon or not: true or false", key=f"use_muon.{pattern}", value=use
                )

    def select(self, parameters: Sequence[ParameterFacts]) -> frozenset[str]:
        """Names of those parameters that Muon updates.

        Args:
            parameters: All trainable parameters, in the model's order.

        Raises:
            InvalidValueError: A rule gives Muon a parameter that is no matrix.
        """
        matrices = [parameter.name for parameter in parameters if len(parameter.shape) > 1]
        ends = {"@first": matrices[:1], "@last": matrices[-1:]}
        chosen = frozenset(p.name for p in parameters if self._means_muon(p, ends))
        for parameter in parameters:
            if parameter.name in chosen and len(parameter.shape) < 2:
                raise InvalidValueError(
                    "Muon orthogonalises matrices, and this is none",
                    key=f"use_muon.{parameter.name}",
                    value=parameter.shape,
                    fix='put ("@vectors", False) before the pattern that picks it',
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
    model: ModelFacts | None,
    patterns: MuonPatterns,
    rates: Mapping[str, float],
) -> tuple[OptimizerChoice, tuple[Decision, ...]]:
    """Split every group of ``choice`` into what Muon updates and what Adam does.

    Args:
        choice: Muon, with its arguments and perhaps groups.
        model: Names and shapes.
        patterns: Who belongs to Muon.
        rates: ``muon_lr`` and ``adam_lr``, where they are written.

    Raises:
        OptimizerError: There is no model to look at, or nothing in it is for Muon.
    """
    if model is None:
        raise OptimizerError(
            "Muon needs the names and shapes of the parameters",
            key="optimizer.type",
            value=choice.name,
            fix="give them: plan.resolve(model=ModelFacts.from_module(model))",
        )
    selected = patterns.select(model.trainable)
    if not selected:
        raise OptimizerError(
            "no parameter of this model is for Muon",
            key="use_muon",
            fix="choose them with OptimizerResolver(muon=MuonPatterns(rules=…)), or use AdamW",
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
            own = {**group.params, "lr": lr * scale, "use_muon": kind == "muon"}
            name = ", ".join(part for part in (group.name, kind) if part)
            if members:
                groups.append(same_group(members, name, own))
    split = Decision(
        key=KEY,
        before=None,
        after=tuple(group.name for group in groups),
        reason="; ".join(describe(group) for group in groups),
    )
    settled = attrs.evolve(choice, params=params, groups=tuple(groups))
    return settled, (*decisions, *_convolutions(facts, selected), split)


def _adam_rate(
    choice: OptimizerChoice, rates: Mapping[str, float]
) -> tuple[float, tuple[Decision, ...]]:
    if "adam_lr" in rates:
        return rates["adam_lr"], ()
    lr = min(choice.lr, ADAM_LR)
    if lr == choice.lr:
        return lr, ()
    decision = Decision(
        key="optimizer.params.adam_lr",
        before=None,
        after=lr,
        reason=f"Muon's learning rate of {choice.lr:g} is far too large for the Adam that updates "
        "the rest; write adam_lr to choose another",
        severity="warning",
    )
    return lr, (decision,)


def _convolutions(
    facts: Mapping[str, ParameterFacts], selected: frozenset[str]
) -> tuple[Decision, ...]:
    count = sum(len(facts[name].shape) > 2 for name in selected)
    if not count:
        return ()
    decision = Decision(
        key="use_muon",
        before=None,
        after=f"{count} convolutions",
        reason="Muon sees a convolution as a matrix of (out, in x height x width), as its authors "
        'do; put ("re:pattern", False) first to leave one to Adam',
    )
    return (decision,)
