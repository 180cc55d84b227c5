"""Plans for scripts that use ``argparse``: the arguments, and the plan they ask for."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any, Final

import attrs

from zerotune._util.text import json_of
from zerotune.decisions import Decision
from zerotune.errors import InvalidValueError
from zerotune.plan.model import OFFLOAD_DEVICES, DeepSpeedPlan
from zerotune.plan.read import override_plan

_FILE: Final = "deepspeed_config"
_SETTINGS: Final = "plan_settings"
_ARGUMENTS: Final = {
    "zero_stage": ("N", "ZeRO stage: 0, 1, 2 or 3"),
    "offload_optimizer_device": (
        "DEVICE",
        f"where the optimizer lives: {'|'.join(OFFLOAD_DEVICES)}",
    ),
    "offload_optimizer_path": ("FOLDER", "where the optimizer's swap files go"),
    "offload_param_device": ("DEVICE", f"where parameters wait: {'|'.join(OFFLOAD_DEVICES)}"),
    "offload_param_path": ("FOLDER", "where the parameters' swap files go"),
    "micro_batch_size": ("N", "samples per forward pass and rank"),
    "train_batch_size": ("N", "samples per optimizer step, all ranks together"),
    "gradient_accumulation_steps": ("N", "forward passes per optimizer step"),
    "gradient_clipping": ("NORM", "largest gradient norm; 0 switches clipping off"),
    "mixed_precision": ("PRECISION", "bf16, fp16, no or auto"),
}
"""Argument to its placeholder and help; the names are those of ``read.SHORT_NAMES``."""


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--deepspeed_config FILE`` and the settings people change from the command line.

    Every argument may be written with dashes for underscores. None has a default, so that only
    what is really given stands above the file.

    Args:
        parser: Receives a group of arguments.
    """
    group = parser.add_argument_group("DeepSpeed plan")
    _add(
        group, _FILE, metavar="FILE", help="DeepSpeed JSON, trainer's config.json, accelerate YAML"
    )
    for name, (metavar, text) in _ARGUMENTS.items():
        _add(group, name, metavar=metavar, help=text, type=_value)
    group.add_argument(
        "--set",
        dest=_SETTINGS,
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="any other setting, such as zero_optimization.overlap_comm=false; may be repeated",
    )


def plan_from_arguments(namespace: argparse.Namespace) -> DeepSpeedPlan:
    """The plan that parsed arguments ask for: the file's, or ``DeepSpeedPlan.build()``.

    Arguments stand above the file; each that changes something is a recorded decision.

    Args:
        namespace: From a parser that ``add_plan_arguments`` has prepared.

    Raises:
        PlanError: As in ``DeepSpeedPlan.load`` and ``DeepSpeedPlan.with_overrides``.
    """
    given = getattr(namespace, _FILE, None)
    plan = DeepSpeedPlan.load(given) if given is not None else _without_file()
    overrides = {
        name: getattr(namespace, name)
        for name in _ARGUMENTS
        if getattr(namespace, name, None) is not None
    }
    overrides.update(_settings(getattr(namespace, _SETTINGS, ())))
    return override_plan(plan, overrides, reason="given on the command line")


def _without_file() -> DeepSpeedPlan:
    decision = Decision(
        key=_FILE,
        before=None,
        after="DeepSpeedPlan.build()",
        reason="no file was given, so the plan starts from the common case",
    )
    return attrs.evolve(DeepSpeedPlan.build(), decisions=(decision,))


def _add(group: argparse._ArgumentGroup, name: str, **details: Any) -> None:
    dashed = name.replace("_", "-")
    group.add_argument(f"--{name}", f"--{dashed}", dest=name, default=None, **details)


def _settings(written: Iterable[str]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for each in written:
        key, equals, value = each.partition("=")
        if not equals or not key.strip():
            raise InvalidValueError(
                "must be a key and a value", key="--set", value=each, fix="write --set KEY=VALUE"
            )
        settings[key.strip()] = _value(value)
    return settings


def _value(text: str) -> Any:
    """A number, a list or true where the text is JSON, else the text itself."""
    try:
        return json_of(text)
    except ValueError:
        return text
