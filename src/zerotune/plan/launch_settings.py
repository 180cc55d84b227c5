"""Settings of launchers: which format of a plan can say each of them.

DeepSpeed's configuration has no place for most of them. accelerate's YAML has two: its top level,
and its ``deepspeed_config`` block. The names are those of accelerate 1.15; a test compares them
with the installed one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import attrs

from zerotune.errors import UNSET

FILE: Final = "deepspeed_config_file"
INIT_FLAG: Final = "zero3_init_flag"
STEPS: Final = "gradient_accumulation_steps"


@attrs.frozen
class LaunchSetting:
    """How formats of plans say one setting of a launcher."""

    place: Literal["top", "block"] | None = None
    """Where accelerate's YAML says the setting; ``None`` if nowhere."""
    path: str = attrs.field(default="", kw_only=True)
    """Where DeepSpeed's JSON says the setting; empty if nowhere."""
    default: Any = attrs.field(default=UNSET, kw_only=True)
    """Value that ``accelerate config`` writes by default; ``False`` also stands for an unquoted
    "no" in YAML."""
    starts: bool = attrs.field(default=False, kw_only=True)
    """Whether the setting only affects how processes start, not how a plan is resolved."""
    is_origin: bool = attrs.field(default=False, kw_only=True)
    """Whether the setting only describes where the plan comes from, so that it is not written."""

    def says_nothing(self, value: Any) -> bool:
        """Whether the value has the same effect as a missing setting."""
        if value is None or value in ({}, []):
            return True
        if isinstance(value, str) and value.strip().lower() == "no":
            value = False
        return self.default == value and type(self.default) is type(value)


LAUNCH_SETTINGS: Final[Mapping[str, LaunchSetting]] = {
    "command_file": LaunchSetting("top", starts=True),
    "commands": LaunchSetting("top", starts=True),
    "compute_environment": LaunchSetting("top", starts=True, default="LOCAL_MACHINE"),
    "debug": LaunchSetting("top", starts=True, default=False),
    FILE: LaunchSetting("block", is_origin=True),
    "deepspeed_exclusion_filter": LaunchSetting("block", starts=True),
    "deepspeed_hostfile": LaunchSetting("block", starts=True),
    "deepspeed_inclusion_filter": LaunchSetting("block", starts=True),
    "deepspeed_moe_layer_cls_names": LaunchSetting("block"),
    "deepspeed_multinode_launcher": LaunchSetting("block", starts=True, default="standard"),
    "distributed_type": LaunchSetting("top", is_origin=True),
    "downcast_bf16": LaunchSetting("top", default=False),
    "dynamo_backend": LaunchSetting("top", default=False),
    "dynamo_config": LaunchSetting("top"),
    "enable_cpu_affinity": LaunchSetting("top", starts=True, default=False),
    "fp16": LaunchSetting("top", default=False),
    "fp8_config": LaunchSetting("top"),
    "fsdp_config": LaunchSetting("top"),
    "gpu_ids": LaunchSetting("top", starts=True),
    STEPS: LaunchSetting(path=STEPS),
    "gradient_clipping": LaunchSetting(path="gradient_clipping"),
    "machine_rank": LaunchSetting("top", starts=True, default=0),
    "main_process_ip": LaunchSetting("top", starts=True, default=""),
    "main_process_port": LaunchSetting("top", starts=True),
    "main_training_function": LaunchSetting("top", starts=True, default="main"),
    "megatron_lm_config": LaunchSetting("top"),
    "mixed_precision": LaunchSetting("top"),
    "mpirun_config": LaunchSetting("top", starts=True),
    "num_machines": LaunchSetting("top", starts=True, default=1),
    "num_processes": LaunchSetting("top", starts=True),
    "offload_optimizer_path": LaunchSetting(path="zero_optimization.offload_optimizer.nvme_path"),
    "offload_param_path": LaunchSetting(path="zero_optimization.offload_param.nvme_path"),
    "parallelism_config": LaunchSetting("top"),
    "rdzv_backend": LaunchSetting("top", starts=True, default="static"),
    "same_network": LaunchSetting("top", starts=True, default=True),
    "tpu_env": LaunchSetting("top"),
    "tpu_name": LaunchSetting("top"),
    "tpu_use_cluster": LaunchSetting("top", default=False),
    "tpu_use_sudo": LaunchSetting("top", default=False),
    "tpu_vm": LaunchSetting("top"),
    "tpu_zone": LaunchSetting("top"),
    "use_cpu": LaunchSetting("top", default=False),
    INIT_FLAG: LaunchSetting("block", path=INIT_FLAG),
}
"""All known settings, by name. DeepSpeed's JSON says the precision in ``bf16`` and ``fp16``."""
IN_BLOCK: Final = frozenset(
    name for name, setting in LAUNCH_SETTINGS.items() if setting.place == "block"
)


def launch_setting(name: str) -> LaunchSetting:
    """Return the row of a setting; no format can say an unknown one."""
    return LAUNCH_SETTINGS.get(name, LaunchSetting())
