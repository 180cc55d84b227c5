"""The configuration behind ``DeepSpeedPlan.build``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from zerotune.errors import InvalidValueError
from zerotune.plan.kinds import AUTO
from zerotune.plan.sections import OFFLOAD_DEVICES, PRECISIONS

_BATCH_KEYS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)


def build_config(
    *,
    stage: int | str,
    offload_optimizer: str,
    offload_param: str,
    nvme_path: str | os.PathLike[str] | None,
    precision: str,
    batch: tuple[int | str | None, int | str | None, int | str | None],
    gradient_clipping: float | str,
    optimizer: str | Mapping[str, Any] | None,
    scheduler: str | Mapping[str, Any] | None,
    zero_overrides: Mapping[str, Any],
) -> dict[str, Any]:
    """Write the keyword form as a DeepSpeed configuration.

    Raises:
        InvalidValueError: An offload device or precision that does not exist.
    """
    zero: dict[str, Any] = {"stage": stage}
    for key, device in (("offload_optimizer", offload_optimizer), ("offload_param", offload_param)):
        if device != "none":
            zero[key] = _offload(key, device, nvme_path)
    zero.update(zero_overrides)
    config: dict[str, Any] = {
        **{key: value for key, value in zip(_BATCH_KEYS, batch, strict=True) if value is not None},
        "gradient_clipping": gradient_clipping,
        "zero_optimization": zero,
        **_precision(precision),
    }
    for key, section in (("optimizer", optimizer), ("scheduler", scheduler)):
        if section is not None:
            config[key] = {"type": section} if isinstance(section, str) else section
    return config


def _offload(key: str, device: Any, nvme_path: str | os.PathLike[str] | None) -> dict[str, Any]:
    if device not in OFFLOAD_DEVICES:
        raise InvalidValueError(
            "is not a place to offload to",
            key=key,
            value=device,
            fix="write one of " + ", ".join(repr(name) for name in OFFLOAD_DEVICES),
        )
    section: dict[str, Any] = {"device": device}
    if device == "nvme" and nvme_path is not None:
        section["nvme_path"] = os.fspath(nvme_path)
    return section


def _precision(precision: Any) -> dict[str, Any]:
    if precision == AUTO:
        return {"bf16": {"enabled": AUTO}}
    if precision not in PRECISIONS:
        raise InvalidValueError(
            "is not a precision",
            key="precision",
            value=precision,
            fix="write one of " + ", ".join(repr(name) for name in (*PRECISIONS, AUTO)),
        )
    return {
        "bf16": {"enabled": precision == "bf16"},
        "fp16": {"enabled": precision == "fp16"},
    }
