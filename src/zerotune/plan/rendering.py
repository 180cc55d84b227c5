"""From a resolved plan to the dict DeepSpeed receives."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from zerotune.errors import UnresolvedPlanError
from zerotune.plan.kinds import AUTO

if TYPE_CHECKING:
    from zerotune.plan.resolved import ResolvedPlan

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
"""Beginnings of pass-through keys for which ``"auto"`` is a value DeepSpeed understands."""


def render(resolved: ResolvedPlan, *, folders: bool = True) -> dict[str, Any]:
    """The configuration DeepSpeed receives.

    Args:
        resolved: The plan.
        folders: ``False`` leaves the swap folders out and does not ask for them.

    Raises:
        UnresolvedPlanError: Something is still ``"auto"`` or missing.
    """
    config = written(resolved)
    _render_folders(resolved, config, folders=folders)
    for path in automatic_paths(config):
        raise UnresolvedPlanError(
            "is still automatic in the rendered configuration",
            key=path,
            value=AUTO,
            fix=_fix_for(path),
        )
    return config


def written(resolved: ResolvedPlan) -> dict[str, Any]:
    """The configuration as far as it is known; unlike ``render``, it asks for nothing."""
    config = resolved.plan.to_deepspeed()
    _render_choices(resolved, config)
    return {key: value for key, value in config.items() if not key.startswith("_")}


def automatic_paths(value: Any, path: str = "") -> list[str]:
    """Paths of every ``"auto"`` inside ``value``, in order."""
    if value == AUTO and isinstance(value, str):
        return [] if path.startswith(_KEEPS_AUTO) else [path]
    if isinstance(value, Mapping):
        return [
            found
            for key, item in value.items()
            for found in automatic_paths(item, f"{path}.{key}" if path else str(key))
        ]
    if isinstance(value, list | tuple):
        return [
            found
            for index, item in enumerate(value)
            for found in automatic_paths(item, f"{path}[{index}]")
        ]
    return []


def _render_choices(resolved: ResolvedPlan, config: dict[str, Any]) -> None:
    optimizer = resolved.optimizer
    if optimizer is None:
        return
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
    # With the default DeepSpeed refuses, under offload, any optimizer that is not its own.
    config["zero_force_ds_cpu_optimizer"] = (
        False if client else config.get("zero_force_ds_cpu_optimizer", True)
    )


def _render_folders(resolved: ResolvedPlan, config: dict[str, Any], *, folders: bool) -> None:
    for part, folder in resolved.nvme_paths.items():
        section = config["zero_optimization"][f"offload_{part}"]
        if not folders:
            section.pop("nvme_path", None)
        elif folder is None:
            raise UnresolvedPlanError(
                "NVMe offload needs a folder for its swap files",
                key=f"zero_optimization.offload_{part}.nvme_path",
                fix="write a path, or use zerotune.offload.OffloadManager, which leases one",
            )


def _fix_for(path: str) -> str:
    if path.startswith(("optimizer", "scheduler")):
        return "settle it with zerotune.optim.OptimizerResolver().apply(resolved_plan)"
    return "write a value; zerotune does not fill in this key"
