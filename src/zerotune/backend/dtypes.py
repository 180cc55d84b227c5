"""Precisions by the names that plans give them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from zerotune.errors import EngineError, InvalidValueError
from zerotune.plan.model import ModelFacts, ResolvedPlan

DTYPES: Final[Mapping[str, torch.dtype]] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def checked_dtype(dtype: str | torch.dtype, *, key: str = "dtype") -> torch.dtype:
    """A dtype of weights by zerotune's name or torch's.

    Args:
        dtype: ``"fp32"``, ``"bf16"``, ``"fp16"`` or a floating-point torch dtype.
        key: What the argument is called, for the message.
    """
    chosen = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if chosen is None or not chosen.is_floating_point:
        raise InvalidValueError(
            "is not a precision of weights", key=key, value=dtype, fix=f"one of {list(DTYPES)}"
        )
    return chosen


def check_quantized(model: torch.nn.Module, plan: ResolvedPlan) -> None:
    """Whether DeepSpeed can hold a model's quantized weights as the plan asks."""
    if not plan.uses_deepspeed:
        return
    quantized = [each for each in ModelFacts.from_module(model).parameters if each.storage]
    if not quantized:
        return
    key, storage = f"model.{quantized[0].name}", quantized[0].storage
    if any(is_torchao(parameter) for parameter in model.parameters()):
        raise EngineError(
            "DeepSpeed casts, sends and cuts weights in ways that torchao's tensors do not know "
            "('Couldn't swap Linear.weight' below stage 3, bytes of them at stage 3)",
            key=key,
            value=storage,
            fix="quantize with bitsandbytes (diffusers.BitsAndBytesConfig), which trains at every "
            "stage",
        )
    if plan.stage == 3 and plan.offload_param == "nvme":
        raise EngineError(
            "swap files hold weights in the plan's precision, and this one is quantized",
            key="zero_optimization.offload_param.device",
            value=f"nvme, and {key} is {storage}",
            fix='write "cpu": a quantized base is small',
        )


def is_torchao(parameter: torch.Tensor) -> bool:
    """Whether a weight is a tensor of torchao's, which says it is of the dtype it stands for."""
    return type(parameter).__module__.partition(".")[0] == "torchao"


def check_model_dtype(model: torch.nn.Module, plan: ResolvedPlan) -> None:
    """Whether the forward pass can run at the plan's precision with the weights as they are.

    DeepSpeed casts a model to bf16 or fp16, and at stage 3 to fp32; elsewhere an fp32 plan leaves
    weights as they come, and fp32 inputs meet them in a layer that says "mat1 and mat2 must have
    the same dtype".
    """
    if plan.precision != "fp32" or (plan.uses_deepspeed and plan.stage == 3):
        return
    half = {dtype: name for name, dtype in DTYPES.items() if name != "fp32"}
    halves = [(name, p.dtype) for name, p in model.named_parameters() if p.dtype in half]
    if not halves:
        return
    name, dtype = halves[0]
    frozen = all(not p.requires_grad for p in model.parameters() if p.dtype in half)
    train = "" if half[dtype] == "fp16" else f', or train in it: precision="{half[dtype]}"'
    raise EngineError(
        f"{len(halves)} of the model's weights are in {half[dtype]}, the plan trains in fp32"
        + (", and frozen weights are not cast" if frozen else ": master weights are fp32"),
        key=f"model.{name}",
        value=dtype,
        fix=f"load the model in float32 (torch_dtype=torch.float32, or model.float()){train}",
    )
