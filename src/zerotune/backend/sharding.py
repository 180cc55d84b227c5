"""Partition a model straight from host memory, one parameter at a time.

``deepspeed.initialize`` moves a model that is not partitioned yet to the device as a whole before
it partitions it, so that stage 3 could not start where it would have run. Through ``zero.Init``
no more than one whole parameter is ever on the device.
"""

from __future__ import annotations

from typing import Any

import torch

from zerotune.backend.dtypes import DTYPES
from zerotune.plan.resolved import ResolvedPlan


def shard_from_host(
    deepspeed: Any, model: torch.nn.Module, plan: ResolvedPlan, *, device: torch.device
) -> None:
    """Partition ``model`` in place as stage 3 wants it.

    ``zero.Init`` neither casts nor moves what it does not partition, so weights are cast before
    and buffers moved after, as DeepSpeed's engine does with other models.

    Args:
        deepspeed: The module.
        model: On the host, in any floating-point dtype; what is partitioned already stays.
        plan: A resolved plan of stage 3 with its swap folders set.
        device: Where the buffers belong.
    """
    dtype = DTYPES[plan.precision]
    for parameter in model.parameters():
        if not hasattr(parameter, "ds_id") and parameter.dtype in DTYPES.values():
            parameter.data = parameter.data.to(dtype)
    # Its configuration asks for the world size, which DeepSpeed takes for 1 before this.
    accelerator = deepspeed.accelerator.get_accelerator()
    deepspeed.comm.init_distributed(
        dist_backend=accelerator.communication_backend_name(), dist_init_required=False
    )
    deepspeed.zero.Init(module=model, config_dict_or_path=plan.to_deepspeed())
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)
