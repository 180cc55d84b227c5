"""How often DeepSpeed's step waits for the device to tell it a number: once, not per parameter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch

from zerotune.backend.deepspeed.sources import OVERFLOW_AT_STAGE_0, OVERFLOW_FLAGS
from zerotune.decisions import Decision

_ASKED: Final = (
    "check_grad_overflow",
    "has_overflow",
    "local_overflow",
    "norm_for_param_grads",
    "reset_cpu_buffers",
    "scaled_global_norm",
    "update_offload_overflow_tracker",
)
"""What ``AskedOnce`` calls, reads or replaces; another DeepSpeed may lack some of it."""


def ask_once(engine: Any) -> tuple[Decision, ...]:
    """Read flags and norms of gradients once per step.

    With an offloaded optimizer DeepSpeed 0.19.8 asks the device for one number per parameter in the
    backward pass (is this gradient finite?) and for another in the step (what is its norm?). Each
    answer waits for all work queued so far, so that copies and reductions hide behind nothing. At
    stage 0 it asks the first question in the step.
    """
    wrapper = engine.optimizer
    checker = getattr(wrapper, "overflow_checker", None)
    if hasattr(checker, "has_overflow_serial") and hasattr(checker, "_has_inf_or_nan"):
        if (changed := OVERFLOW_AT_STAGE_0.changed()) is not None:
            return (_per_parameter("optimizer.reads", changed),)
        return (_check_at_once(checker),)
    if type(wrapper).__name__ != "DeepSpeedZeroOptimizer" or not wrapper.cpu_offload:
        return ()
    key = "zero_optimization.offload_optimizer.reads"
    missing = [name for name in _ASKED if not hasattr(wrapper, name)]
    if missing or wrapper.zenflow:
        why = "ZenFlow" if not missing else f"a DeepSpeed without {missing[0]}"
        return (_per_parameter(key, f"{why} does it in its own way"),)
    if (changed := OVERFLOW_FLAGS.changed()) is not None:
        return (_per_parameter(key, changed),)
    AskedOnce(wrapper).install()
    return (
        Decision(
            key=key,
            before="per parameter",
            after="once per step",
            reason="whether gradients are finite, and their norms, stay on the device until the "
            "step, which reads them at once; DeepSpeed itself waits for the device once per "
            "parameter in the backward pass and once more in the step; the same numbers",
        ),
    )


def _per_parameter(key: str, reason: str) -> Decision:
    return Decision(key=key, before="per parameter", after="per parameter", reason=reason)


def _check_at_once(checker: Any) -> Decision:
    """Have DeepSpeed's check of whole gradients read one flag instead of one for each."""

    def has_overflow_serial(parameters: Iterable[torch.nn.Parameter]) -> bool:
        flags = [
            torch.as_tensor(
                checker._has_inf_or_nan(parameter.grad.data, index), device=parameter.grad.device
            ).reshape(())
            for index, parameter in enumerate(parameters)
            if parameter.grad is not None
        ]
        return bool(flags) and bool(torch.stack(flags).any())

    checker.has_overflow_serial = has_overflow_serial
    return Decision(
        key="optimizer.reads",
        before="per parameter",
        after="once per step",
        reason="whether gradients are finite stays on the device until all are known; DeepSpeed "
        "itself waits for the device once per parameter; the same answer",
    )


class AskedOnce:
    """Keeps the flags of gradients on the device, and brings flags and norms to the host at once.

    Args:
        wrapper: DeepSpeed's optimizer of stage 1 or 2, offloaded.
    """

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        self._flags: list[torch.Tensor] = []
        self._original_overflow = wrapper.has_overflow
        self._original_reset = wrapper.reset_cpu_buffers
        self._original_norm = wrapper.scaled_global_norm

    def install(self) -> None:
        """Replace the methods of this wrapper alone."""
        wrapper = self._wrapper
        wrapper.update_offload_overflow_tracker = self._note
        wrapper.has_overflow = self._has_overflow
        wrapper.reset_cpu_buffers = self._reset
        wrapper.scaled_global_norm = self._scaled_norm

    def _note(self, gradient: torch.Tensor | None) -> None:
        # Where nobody checks for overflow DeepSpeed computes the flag all the same.
        if gradient is None or not self._wrapper.check_grad_overflow:
            return
        flag = self._wrapper._has_inf_or_nan(gradient.data)
        self._flags.append(torch.as_tensor(flag, device=gradient.device).reshape(()))

    def _has_overflow(self, *arguments: Any, **named: Any) -> bool:
        if self._flags:
            self._wrapper.local_overflow |= bool(torch.stack(self._flags).any())
            self._flags.clear()
        return bool(self._original_overflow(*arguments, **named))

    def _reset(self) -> None:
        self._flags.clear()
        self._original_reset()

    def _scaled_norm(self, *arguments: Any, **named: Any) -> Any:
        read_at_once(self._wrapper.norm_for_param_grads)
        return self._original_norm(*arguments, **named)


def read_at_once(norms: dict[Any, torch.Tensor]) -> None:
    """Bring tensors of one number each to the host, with one wait per device.

    Args:
        norms: Replaced in place by fp64 on the CPU, the same numbers.
    """
    for device in {norm.device for norm in norms.values()}:
        there = [key for key, norm in norms.items() if norm.device == device]
        read = torch.stack([norms[key].double().reshape(()) for key in there]).cpu()
        norms.update(zip(there, read.unbind(), strict=True))
