"""Whether the methods of DeepSpeed that are replaced or done again here are those that were read.

A later release may do more in one of them. Names alone would not tell, so the source of each is
hashed, per release that was tested, in ``backend/data/sources.json``; ``python -m
tools.deepspeed_sources`` adds the installed release to it.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.resources
import inspect
import json
from collections.abc import Iterable
from functools import cache
from typing import Any, Final

import attrs

STAGES_1_AND_2: Final = "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer"
STAGE_3: Final = "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3"


@attrs.frozen(kw_only=True)
class Replaced:
    """Methods of one class of DeepSpeed of which zerotune does the work, or a part of it."""

    owner: str
    """Dotted name of the class."""
    methods: tuple[str, ...]

    def changed(self) -> str | None:
        """Why what was read is not what is installed; ``None``: it is."""
        for method in self.methods:
            name = f"{self.owner}.{method}"
            digest = source_digest(self.owner, method)
            if digest is None:
                return f"the source of DeepSpeed's {method} cannot be read, so it may do more"
            if digest not in _tested().get(name, {}):
                return f"DeepSpeed's {method} is not that of a release that was tested"
        return None


PARTITIONED_STEP: Final = Replaced(
    owner=STAGES_1_AND_2,
    methods=(
        "step",
        "_optimizer_step",
        "async_inplace_copy_grad_to_fp32_buffer_from_gpu",
        "set_norm_for_param_grad_in_gpu",
        "unscale_and_clip_grads",
        "update_offload_overflow_tracker_for_param_grad",
    ),
)
SHARDED_STEP: Final = Replaced(
    owner=STAGE_3,
    methods=(
        "step",
        "_optimizer_step",
        "_post_step",
        "_get_norm_groups",
        "_offload_grad_partition_at_boundary",
        "_reassign_or_swap_out_partitioned_parameters",
        "unscale_and_clip_grads",
        "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads",
    ),
)
OVERFLOW_FLAGS: Final = Replaced(
    owner=STAGES_1_AND_2,
    methods=(
        "has_overflow",
        "reset_cpu_buffers",
        "scaled_global_norm",
        "update_offload_overflow_tracker",
    ),
)
OVERFLOW_AT_STAGE_0: Final = Replaced(
    owner="deepspeed.runtime.utils.CheckOverflow", methods=("has_overflow_serial",)
)
SWAPPED_GRADIENTS: Final = Replaced(
    owner="deepspeed.runtime.swap_tensor.optimizer_utils.OptimizerSwapper",
    methods=("_adjust_for_misaligned_lengths",),
)
ALL: Final = (
    PARTITIONED_STEP,
    SHARDED_STEP,
    OVERFLOW_FLAGS,
    OVERFLOW_AT_STAGE_0,
    SWAPPED_GRADIENTS,
)


def source_digest(owner: str, method: str) -> str | None:
    """SHA-256 of a method's source, without indentation; ``None`` where there is none to read."""
    module, _, name = owner.rpartition(".")
    kind: Any = getattr(importlib.import_module(module), name, None)
    try:
        source = inspect.getsource(getattr(kind, method))
    except (AttributeError, OSError, TypeError):
        return None
    lines = (line.strip() for line in source.splitlines())
    return hashlib.sha256("\n".join(line for line in lines if line).encode()).hexdigest()


def digests(replaced: Iterable[Replaced] = ALL) -> dict[str, str | None]:
    """Of the installed DeepSpeed, by dotted name."""
    return {
        f"{each.owner}.{method}": source_digest(each.owner, method)
        for each in replaced
        for method in each.methods
    }


@cache
def _tested() -> dict[str, dict[str, list[str]]]:
    """By dotted name and digest: the releases that have it."""
    file = importlib.resources.files("zerotune") / "backend" / "data" / "sources.json"
    content: dict[str, dict[str, list[str]]] = json.loads(file.read_text(encoding="utf-8"))
    return content
