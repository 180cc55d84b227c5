"""``ParameterGroups``: which parameters get which arguments, by ordered patterns.

Values only: patterns over names and shapes. ``grouping.py`` applies them to a model's facts, and
the engine to the parameters themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from zerotune.errors import InvalidValueError
from zerotune.optim.patterns import check_pattern, matches

_KEY = "groups"


def _patterns(value: str | Iterable[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


@attrs.frozen(kw_only=True)
class ParameterGroup:
    """One rule: what it picks, and what the picked parameters get."""

    name: str = attrs.field()
    """What the group is called in reports."""
    patterns: tuple[str, ...] = attrs.field(default=("*",), converter=_patterns)
    """Globs, module names or ``"re:…"``; one that matches is enough. All, when not given."""
    max_ndim: int | None = None
    """Only parameters of at most so many dimensions: 1 picks biases and the weights of norms."""
    params: Mapping[str, Any] = attrs.field(factory=dict)
    """The group's own arguments (``{"lr": 1e-5, "weight_decay": 0.0}``); the optimizer's apply
    to the rest."""
    lr_scale: float | None = attrs.field(default=None)
    """Multiple of the optimizer's learning rate, instead of an ``lr`` of its own."""
    optional: bool = False
    """Whether earlier rules may leave it nothing; otherwise that is an error. A pattern that
    matches no parameter at all is one in any case."""

    @name.validator
    def _check_name(self, _attribute: Any, value: Any) -> None:
        if not isinstance(value, str) or not value.strip():
            raise InvalidValueError("a group needs a name", key=f"{_KEY}.name", value=value)

    @patterns.validator
    def _check_patterns(self, _attribute: Any, value: tuple[str, ...]) -> None:
        for pattern in value:
            check_pattern(pattern, key=f"{_KEY}.{self.name}.patterns")
        if not value:
            raise InvalidValueError(
                "a group without patterns picks nothing",
                key=f"{_KEY}.{self.name}.patterns",
                fix='write "*" for all that is left',
            )

    @lr_scale.validator
    def _check_scale(self, _attribute: Any, value: Any) -> None:
        if value is None:
            return
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise InvalidValueError(
                "must be a number > 0",
                key=f"{_KEY}.{self.name}.lr_scale",
                value=value,
                fix="freeze parameters (requires_grad_(False)) that must not be trained",
            )
        if "lr" in self.params:
            raise InvalidValueError(
                "a group has a learning rate of its own or a multiple of the optimizer's, not both",
                key=f"{_KEY}.{self.name}.lr_scale",
                value=value,
                fix="leave one of them out",
            )

    def picks(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether the parameter belongs here, if no earlier rule has taken it."""
        if self.max_ndim is not None and len(shape) > self.max_ndim:
            return False
        return any(matches(pattern, name) for pattern in self.patterns)


def _rules(value: Iterable[ParameterGroup]) -> tuple[ParameterGroup, ...]:
    return tuple(value)


@attrs.frozen(kw_only=True)
class ParameterGroups:
    """Ordered rules; the first that picks a parameter has it.

    What no rule picks forms a last group, ``"rest"``, with the optimizer's own arguments::

        ParameterGroups.per_part(
            {"unet": {"lr": 1e-5}, "text_encoder": {"lr": 1e-6}}
        ).without_decay_on_norms_and_biases()
    """

    rules: tuple[ParameterGroup, ...] = attrs.field(converter=_rules)
    """In the order in which they are tried."""

    @rules.validator
    def _check_rules(self, _attribute: Any, value: tuple[ParameterGroup, ...]) -> None:
        names = [rule.name for rule in value]
        for name in names:
            if names.count(name) > 1 or name == REST:
                raise InvalidValueError(
                    "two groups of one name"
                    if name != REST
                    else "this is the name of the group of all that is left",
                    key=f"{_KEY}.name",
                    value=name,
                    fix="call one of them differently",
                )

    @classmethod
    def no_decay(cls) -> ParameterGroups:
        """No weight decay on norms and biases: on parameters of one dimension.

        By dimensions and not by names, because diffusion models call their norms ``norm1``,
        ``group_norm``, ``conv_norm_out``, ``ln_1`` …
        """
        return cls(rules=[_NO_DECAY])

    @classmethod
    def per_part(cls, parts: Mapping[str, Mapping[str, Any]]) -> ParameterGroups:
        """One group for each part of what is trained.

        Args:
            parts: Arguments by module name or pattern:
                ``{"unet": {"lr": 1e-5}, "text_encoder": {"lr": 1e-6, "weight_decay": 0.0}}``.
        """
        return cls(
            rules=[
                ParameterGroup(name=part, patterns=part, params=dict(params))
                for part, params in parts.items()
            ]
        )

    @classmethod
    def lora(cls, *, b_ratio: float = 1.0) -> ParameterGroups:
        """Groups for LoRA adapters, without weight decay.

        Args:
            b_ratio: Learning rate of the up projections (``lora_B``, which start from zero) as a
                multiple of the optimizer's; 16 is what LoRA+ recommends
                (https://arxiv.org/abs/2402.12354).
        """
        # peft's names, and those of diffusers' older attention processors.
        up, down = r"re:lora_B|lora\.up\.", r"re:lora_A|lora\.down\."
        plain = {"weight_decay": 0.0}
        return cls(
            rules=[
                ParameterGroup(name="lora_B", patterns=up, params=plain, lr_scale=b_ratio),
                ParameterGroup(name="lora_A", patterns=down, params=plain),
            ]
        )

    def without_decay_on_norms_and_biases(self) -> ParameterGroups:
        """These groups, each split in two: its norms and biases are not decayed.

        The part without decay is called ``"<name>, no decay"`` and is tried first.
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


REST = "rest"
"""Name of the group of all that no rule picks."""

_NO_DECAY = ParameterGroup(name="no decay", max_ndim=1, params={"weight_decay": 0.0}, optional=True)
