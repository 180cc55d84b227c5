"""Which parameters Muon updates, and which its auxiliary Adam."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import attrs

from zerotune.decisions import Log
from zerotune.errors import OptimizerError
from zerotune.plan.facts import ModelFacts, ParameterFacts
from zerotune.plan.optimizer.choices import GroupChoice, OptimizerChoice
from zerotune.plan.optimizer.groups import matches, record_groups, same_group

AUXILIARY_LR: Final = 3e-4
"""Upper limit for the default learning rate of Muon's auxiliary Adam."""

_FOR_ADAM: Final = (
    "*embed*",
    "*lm_head*",
    r"re:(^|\.)conv_(in|out)\.",
    r"re:^(\w+\.)?proj_out\.",
)
"""Patterns of the embeddings, and of the first and last layers of diffusion models."""


def hidden_matrices(parameters: Sequence[ParameterFacts]) -> frozenset[str]:
    """Return the names of the matrices that are neither embeddings nor first or last layers.

    Args:
        parameters: All trainable parameters, in the model's order.
    """
    matrices = [each.name for each in parameters if len(each.shape) > 1]
    return frozenset(
        name for name in matrices[1:-1] if not any(matches(pattern, name) for pattern in _FOR_ADAM)
    )


def muon_groups(
    choice: OptimizerChoice, model: ModelFacts, rates: Mapping[str, Any], log: Log
) -> OptimizerChoice:
    """Split every group of ``choice`` into one group for Muon and one for Adam.

    Args:
        choice: The optimizer, with the groups that the user asked for.
        model: Names and shapes of the parameters.
        rates: The optimizer's arguments, with ``muon_lr`` and ``adam_lr`` if they are set.
        log: Log that receives the decisions.
    """
    hidden = hidden_matrices(model.trainable)
    muon_lr = rates.get("muon_lr", choice.lr)
    adam_lr = _adam_rate(choice, rates, log)
    facts = {parameter.name: parameter for parameter in model.trainable}
    groups: list[GroupChoice] = []
    for group in choice.groups or (same_group(model.trainable, "", {}),):
        scale = float(group.params.get("lr", choice.lr)) / choice.lr
        selected = _selected(group, facts, hidden)
        for kind, lr in (("muon", muon_lr), ("adam", adam_lr)):
            names = [name for name in group.parameters if (name in selected) is (kind == "muon")]
            arguments = {**group.params, "lr": lr * scale, "use_muon": kind == "muon"}
            name = ", ".join(part for part in (group.name, kind) if part)
            if names:
                groups.append(same_group([facts[each] for each in names], name, arguments))
    _record_muon([group for group in groups if group.params["use_muon"]], facts, log)
    record_groups(groups, log)
    return attrs.evolve(choice, params={**choice.params, "lr": muon_lr}, groups=tuple(groups))


def _selected(
    group: GroupChoice, facts: Mapping[str, ParameterFacts], hidden: Collection[str]
) -> Collection[str]:
    """Return the names of a group's parameters that Muon updates: matrices only."""
    use_muon = group.params.get("use_muon")
    if use_muon is None:
        return hidden
    return [name for name in group.parameters if use_muon and len(facts[name].shape) > 1]


def _adam_rate(choice: OptimizerChoice, rates: Mapping[str, Any], log: Log) -> float:
    lr: float = rates.get("adam_lr", min(choice.lr, AUXILIARY_LR))
    if "adam_lr" not in rates and lr != choice.lr:
        reason = f"Muon's learning rate of {choice.lr:g} is far too large for Adam, which updates "
        reason += "the other parameters; set adam_lr to change Adam's learning rate"
        log.decide("optimizer.params.adam_lr", None, lr, reason, "warning")
    return lr


def _record_muon(
    groups: Sequence[GroupChoice], facts: Mapping[str, ParameterFacts], log: Log
) -> None:
    if not groups:
        raise OptimizerError(
            "no parameter of this model is selected for Muon",
            "select matrices with ParameterGroup(name=…, patterns=…, use_muon=True), or use AdamW",
            "use_muon",
        )
    count = sum(len(facts[name].shape) > 2 for group in groups for name in group.parameters)
    if count:
        reason = "Muon treats a convolution as a matrix of shape (out, in x height x width), as "
        reason += "its authors do; to use Adam for convolutions, write a group with use_muon=False"
        log.decide("use_muon", None, f"{count} convolutions", reason)
