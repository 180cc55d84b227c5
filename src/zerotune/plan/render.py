"""The configuration of a resolved plan as a dict for DeepSpeed."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from zerotune.errors import UnresolvedPlanError
from zerotune.plan.optimizer.choices import BY_RUN
from zerotune.plan.optimizer.pace import open_length
from zerotune.plan.resolved import Resolved
from zerotune.plan.values import AUTO

_ZERO_TESTED = frozenset(
    {
        "Adam",
        "AdamW",
        "FusedAdam",
        "DeepSpeedCPUAdam",
        "Adagrad",
        "DeepSpeedCPUAdagrad",
        "DeepSpeedCPULion",
        "FusedLion",
        "MuonWithAuxAdam",
    }
)
"""Class names in ``deepspeed.runtime.zero.utils.ZERO_SUPPORTED_OPTIMIZERS`` 0.19.8."""

_KEEPS_AUTO = (
    "data_types.keep_in_fp32_modules",
    "pipeline.",
    "autotuning.",
    "zero_optimization.zenflow.",
    "_",
)
"""Prefixes of pass-through keys for which DeepSpeed accepts ``"auto"`` as a value."""


def render(resolved: Resolved, *, folders: bool = True) -> dict[str, Any]:
    """Return the configuration for DeepSpeed.

    Args:
        resolved: The plan.
        folders: ``False`` omits the swap folders, which may then be missing from the plan.
    """
    config = resolved.plan.to_dict()
    _render_choices(resolved, config)
    config = {key: value for key, value in config.items() if not key.startswith("_")}
    for part, folder in resolved.nvme_paths.items():
        section = config["zero_optimization"][f"offload_{part}"]
        if not folders:
            section.pop("nvme_path", None)
        elif folder is None:
            raise UnresolvedPlanError(
                "NVMe offload needs a folder for its swap files",
                "write a path, or use zerotune.offload.OffloadManager, which creates a folder",
                f"zero_optimization.offload_{part}.nvme_path",
            )
    for path in automatic_paths(config):
        raise UnresolvedPlanError(
            'is still "auto" in the rendered configuration',
            "write a value; zerotune has no automatic value for this key",
            path,
            AUTO,
        )
    if "scheduler" in config and (length := open_length(resolved.scheduler)):
        raise UnresolvedPlanError(
            "is the length of a run that is not known yet",
            "write a number, or pass run=RunFacts(total_steps=…) to resolve",
            f"scheduler.params.{length}",
            BY_RUN,
        )
    return config


def automatic_paths(value: Any, path: str = "") -> list[str]:
    """Return the paths of all ``"auto"`` values inside ``value``, in order."""
    if value == AUTO and isinstance(value, str):
        return [] if path.startswith(_KEEPS_AUTO) else [path]
    if isinstance(value, Mapping):
        return [
            found
            for key, item in value.items()
            if _may_be_automatic(item)
            for found in automatic_paths(item, f"{path}.{key}" if path else str(key))
        ]
    if isinstance(value, list | tuple):
        return [
            found
            for index, item in enumerate(value)
            if _may_be_automatic(item)
            for found in automatic_paths(item, f"{path}[{index}]")
        ]
    return []


def _may_be_automatic(value: Any) -> bool:
    # Fast, because most values in long lists cannot be automatic and need no path.
    return value == AUTO if isinstance(value, str) else isinstance(value, Mapping | list | tuple)


def _render_choices(resolved: Resolved, config: dict[str, Any]) -> None:
    optimizer = resolved.optimizer
    config.pop("optimizer", None)
    config.pop("scheduler", None)
    if optimizer.source == "deepspeed":
        written = resolved.plan.optimizer
        kept = dict(written.extra) if written else {}
        config["optimizer"] = {
            "type": optimizer.name,
            "params": copy.deepcopy(dict(optimizer.params)),
            **kept,
        }
    if resolved.scheduler is not None and resolved.scheduler.source == "deepspeed":
        config["scheduler"] = {
            "type": resolved.scheduler.name,
            "params": copy.deepcopy(dict(resolved.scheduler.params)),
        }
    if not resolved.uses_deepspeed:
        return
    client = optimizer.source != "deepspeed"
    untested = client or optimizer.implementation not in _ZERO_TESTED
    written_untested = resolved.requested.zero_allow_untested_optimizer is True
    config["zero_allow_untested_optimizer"] = untested or written_untested
    # By default, DeepSpeed rejects any optimizer but its own under offload.
    config["zero_force_ds_cpu_optimizer"] = (
        False if client else config.get("zero_force_ds_cpu_optimizer", True)
    )
