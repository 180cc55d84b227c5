"""The environment that ``accelerate launch`` leaves to a script, read as a plan.

The variables are those of ``prepare_deepspeed_cmd_env`` in ``accelerate/utils/launch.py`` 1.15,
and what they do is what ``DeepSpeedPlugin.__post_init__`` does with them. accelerate itself is
not needed.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import Any, Final

import attrs

from zerotune.decisions import Decision
from zerotune.errors import UNSET, InvalidValueError, PlanConflictError
from zerotune.plan.accelerate_block import (
    DEEPSPEED_IN_BLOCK,
    GATHER,
    ZERO_IN_BLOCK,
    plan_from_settings,
    read_config_file,
)
from zerotune.plan.deepspeed_plan import DeepSpeedPlan
from zerotune.plan.kinds import AUTO
from zerotune.plan.reading import fill_from_launch, plan_from_mapping, read_launch

_USE: Final = "ACCELERATE_USE_DEEPSPEED"
_FILE: Final = "ACCELERATE_DEEPSPEED_CONFIG_FILE"
_FIELDS: Final = "ACCELERATE_CONFIG_DS_FIELDS"
_PRECISION: Final = "ACCELERATE_MIXED_PRECISION"
_SOURCE: Final = "the environment of accelerate"

_BLOCK_VARIABLES: Final = {
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "gradient_accumulation_steps",
    "ACCELERATE_GRADIENT_CLIPPING": "gradient_clipping",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "zero_stage",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "offload_optimizer_device",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH": "offload_optimizer_nvme_path",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "offload_param_device",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH": "offload_param_nvme_path",
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "zero3_save_16bit_model",
}
"""Variable to the key of accelerate's block that it carries."""
_LAUNCH_VARIABLES: Final = {
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": "zero3_init_flag",
    "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": "deepspeed_moe_layer_cls_names",
}
_PLACES: Final = {
    "gradient_accumulation_steps": ("gradient_accumulation_steps",),
    "gradient_clipping": ("gradient_clipping",),
    "zero_stage": ("zero_optimization", "stage"),
    "offload_optimizer_device": ("zero_optimization", "offload_optimizer", "device"),
    "offload_optimizer_nvme_path": ("zero_optimization", "offload_optimizer", "nvme_path"),
    "offload_param_device": ("zero_optimization", "offload_param", "device"),
    "offload_param_nvme_path": ("zero_optimization", "offload_param", "nvme_path"),
    "zero3_save_16bit_model": ("zero_optimization", GATHER),
}
"""Key of the block to its place in DeepSpeed's configuration."""


def plan_from_environment(environ: Mapping[str, str] | None = None) -> DeepSpeedPlan:
    """Read the variables; see ``DeepSpeedPlan.from_accelerate_environment``."""
    environ = os.environ if environ is None else environ
    if str(environ.get(_USE, "false")).strip().lower() != "true":
        raise InvalidValueError(
            "the environment does not ask for DeepSpeed",
            key=_USE,
            value=environ.get(_USE, UNSET),
            fix="start the script with `accelerate launch --use_deepspeed`, or read a file",
        )
    block = _present(environ, _BLOCK_VARIABLES)
    launched = _present(environ, _LAUNCH_VARIABLES)
    written = environ.get(_FILE, "none")
    if written.strip().lower() in ("", "none"):
        return _from_block(block, launched, environ)
    return _from_file(written, block, launched, environ)


def _present(environ: Mapping[str, str], variables: Mapping[str, str]) -> dict[str, str]:
    return {key: environ[name] for name, key in variables.items() if name in environ}


def _from_block(
    block: dict[str, str], launched: dict[str, str], environ: Mapping[str, str]
) -> DeepSpeedPlan:
    settings: dict[str, Any] = {
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {**block, **launched},
    }
    if _PRECISION in environ:
        settings["mixed_precision"] = environ[_PRECISION]
    plan = plan_from_settings(settings, source=_SOURCE, folder=None)
    kept = [d for d in plan.decisions if "does not pass this path on" not in d.reason]
    return attrs.evolve(plan, decisions=(*kept, *_missing_folders(plan)), source=_SOURCE)


def _missing_folders(plan: DeepSpeedPlan) -> list[Decision]:
    zero = plan.zero_optimization
    sections = {
        "optimizer": zero.offload_optimizer if zero else None,
        "param": zero.offload_param if zero else None,
    }
    return [
        Decision(
            key=f"zero_optimization.offload_{part}.nvme_path",
            before=None,
            after=None,
            reason="`accelerate launch` does not pass the YAML's path on, and accelerate would"
            ' swap into a folder called "none"; give the path to zerotune, or it leases a folder',
            severity="warning",
        )
        for part, section in sections.items()
        if section is not None and section.device == "nvme" and section.nvme_path is None
    ]


def _from_file(
    written: str, block: dict[str, str], launched: dict[str, str], environ: Mapping[str, str]
) -> DeepSpeedPlan:
    _refuse_fields_beside_file(environ, written)
    decisions: list[Decision] = []
    config, source, folder = read_config_file(written, None, _FILE, decisions)
    config = _filled(config, block, decisions)
    around: dict[str, Any] = dict(launched)
    precision = environ.get(_PRECISION)
    if precision is not None and not _is_default_precision(precision, config):
        around["mixed_precision"] = precision
    launch = read_launch(around, decisions)
    plan = plan_from_mapping(config, source=source, folder=folder)
    plan = attrs.evolve(plan, decisions=(*decisions, *plan.decisions, *_missing_folders(plan)))
    return fill_from_launch(plan, launch)


def _refuse_fields_beside_file(environ: Mapping[str, str], written: str) -> None:
    fields = {name.strip() for name in environ.get(_FIELDS, "").split(",")}
    beside = sorted(fields & (ZERO_IN_BLOCK | DEEPSPEED_IN_BLOCK | {"mixed_precision"}))
    if beside:
        raise PlanConflictError(
            "accelerate refuses other settings of its own YAML beside the file:"
            f" {', '.join(beside)}",
            key=_FILE,
            value=written,
            fix="write them in the file, and remove them from the YAML",
        )


def _filled(
    config: dict[str, Any], block: dict[str, str], decisions: list[Decision]
) -> dict[str, Any]:
    """Fill what the file leaves ``"auto"``; the file's own words stand, as in accelerate."""
    config = copy.deepcopy(config)
    for key, value in block.items():
        node: Any = config
        *parents, last = _PLACES[key]
        for parent in parents:
            node = node.get(parent) if isinstance(node, dict) else None
        before = node.get(last) if isinstance(node, dict) else None
        if isinstance(node, dict) and before == AUTO:
            node[last] = value
        path = ".".join(_PLACES[key])
        if before == AUTO:
            reason, severity = "the command line of `accelerate launch` says so", "note"
        else:
            reason = "accelerate takes this from the file alone and ignores its own command line"
            severity = "warning"
        if before == AUTO or str(before).lower() != value:
            decisions.append(
                Decision(
                    key=path,
                    before=AUTO if before == AUTO else value,
                    after=value if before == AUTO else before,
                    reason=reason,
                    severity="note" if severity == "note" else "warning",
                )
            )
    return config


def _is_default_precision(precision: str, config: Mapping[str, Any]) -> bool:
    """Whether "no" is only what accelerate sets when nobody asked, and the file has its own say."""
    if precision.strip().lower() not in ("", "no"):
        return False
    sections = [config.get(name) for name in ("bf16", "bfloat16", "fp16")]
    return not any(
        section == AUTO or (isinstance(section, Mapping) and section.get("enabled") == AUTO)
        for section in sections
    )
