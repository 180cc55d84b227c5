"""Whether an optimizer can run in a situation, and if not why and what comes closest.

One function per reason, tried in order; the first that objects decides. The facts were measured
with DeepSpeed 0.19.8 on its CPU accelerator or read in its code; ``verified`` tells which.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

import attrs

from zerotune.optim.catalogue import DEFAULT_OPTIMIZER, TORCH_NAMES
from zerotune.optim.entries import OptimizerEntry
from zerotune.optim.situation import Situation

Status = Literal["works", "works with", "cannot"]

_HAS_CPU_KERNEL: Final[Mapping[str, frozenset[str]]] = {
    # `op_builder/{mps,xpu}` of DeepSpeed 0.19.8; CUDA and ROCm share the CPU accelerator's ops.
    "Adagrad": frozenset({"cuda", "cpu", "xpu"}),
    "Lion": frozenset({"cuda", "cpu"}),
}

_DOES_NOT_SUIT: Final[Mapping[str, tuple[str, str]]] = {
    "LBFGS": ("it needs a closure that recomputes the loss, which no engine here gives it", "SGD"),
    "SparseAdam": ("it takes sparse gradients only, which diffusion models do not have", "Adam"),
}

_LATER: Final[Mapping[str, str]] = {
    "Muon": (
        "it needs use_muon set on every parameter and convolutions flattened, which zerotune "
        "sets up in a later release"
    ),
    **dict.fromkeys(
        ("MuAdam", "MuAdamW", "MuSGD"),
        "it needs the mup package and base shapes set on the model before the engine starts, "
        "which zerotune sets up in a later release",
    ),
}

_MEASURED: Final = frozenset({"AdamW", "Adam", "Adagrad", "Lion", "SGD", "RMSprop", "NAdam"})
"""Ran on the CPU accelerator at stages 0 to 3, without and with CPU offload, in fp32 and bf16: the
class is the promised one and the loss falls."""

_ONE_BIT: Final = frozenset({"OneBitAdam", "OneBitLamb", "ZeroOneAdam"})


@attrs.frozen(kw_only=True)
class Capability:
    """The answer for one optimizer in one situation."""

    status: Status
    """``"works"``, ``"works with"`` (it changes something) or ``"cannot"``."""
    reason: str = ""
    """What it changes, or why it cannot run."""
    alternative: str | None = None
    """Nearest thing that runs, when it cannot."""
    config: Mapping[str, Any] = attrs.field(factory=dict)
    """Top-level keys the configuration must hold for it (what it changes)."""
    verified: bool = False
    """Whether the real engine was run for it, and not only its code read."""

    @property
    def runs(self) -> bool:
        """Whether it can be used."""
        return self.status != "cannot"


def capability_of(entry: OptimizerEntry, situation: Situation) -> Capability:
    """Whether the optimizer of ``entry`` can run in ``situation``."""
    for rule in _RULES:
        answer = rule(entry, situation)
        if answer is not None:
            return answer
    return Capability(status="works", verified=_measured(entry, situation))


Rule = Callable[[OptimizerEntry, Situation], Capability | None]


def _cannot(reason: str, alternative: str = DEFAULT_OPTIMIZER, **kwargs: Any) -> Capability:
    return Capability(status="cannot", reason=reason, alternative=alternative, **kwargs)


def _measured(entry: OptimizerEntry, situation: Situation) -> bool:
    return (
        entry.name in _MEASURED
        and situation.uses_deepspeed
        and situation.accelerator == "cpu"
        and situation.offload != "nvme"
        and situation.precision != "fp16"
    )


def _not_for_diffusion(entry: OptimizerEntry, situation: Situation) -> Capability | None:  # noqa: ARG001
    if entry.name not in _DOES_NOT_SUIT:
        return None
    return _cannot(*_DOES_NOT_SUIT[entry.name])


def _removed_one_bit(entry: OptimizerEntry, situation: Situation) -> Capability | None:
    if entry.name not in _ONE_BIT:
        return None
    if not situation.uses_deepspeed:
        return _cannot("its compression is DeepSpeed's, and DeepSpeed is off")
    if situation.before("deepspeed", 0, 19):
        return _cannot(
            f"DeepSpeed {situation.versions['deepspeed']} runs it at stage 0 only and with a "
            "communication backend that zerotune sets up in a later release"
        )
    return _cannot(
        "DeepSpeed removed it in the 0.19 series (PR #8490); the last releases with it are 0.18.x, "
        "at stage 0"
    )


def _not_set_up_yet(entry: OptimizerEntry, situation: Situation) -> Capability | None:
    if entry.name not in _LATER:
        return None
    reason = _LATER[entry.name]
    if entry.name == "Muon" and situation.stage == 3:
        reason = (
            f"DeepSpeed's Muon refuses stage 3 (it cannot use reduce_scatter); besides, {reason}"
        )
    return _cannot(reason)


def _only_deepspeed_has_it(entry: OptimizerEntry, situation: Situation) -> Capability | None:
    if situation.uses_deepspeed or entry.name in TORCH_NAMES:
        return None
    return _cannot("DeepSpeed is off, and torch.optim has no optimizer of this name")


def _lamb_needs_cuda(entry: OptimizerEntry, situation: Situation) -> Capability | None:
    if entry.name != "Lamb":
        return None
    if situation.accelerator != "cuda":
        return _cannot(
            "DeepSpeed has it as a CUDA kernel only, with or without CPU offload",
            verified=situation.accelerator == "cpu",
        )
    if situation.sharded:
        return _cannot(
            "its trust ratio is per layer, and ZeRO hands it flat partitions without layers"
        )
    return _cannot(
        "it requires fp16 with dynamic loss scaling and a CUDA kernel this release has not tested"
    )


def _lion_needs_a_kernel(entry: OptimizerEntry, situation: Situation) -> Capability | None:
    if entry.name != "Lion" or situation.offloaded or situation.accelerator == "cuda":
        return None
    return _cannot(
        "without CPU offload DeepSpeed has it as a CUDA kernel only",
        'Lion with zero_optimization.offload_optimizer.device "cpu"'
        if situation.accelerator == "cpu"
        else DEFAULT_OPTIMIZER,
        verified=situation.accelerator == "cpu",
    )


def _no_cpu_kernel(entry: OptimizerEntry, situation: Situation) -> Capability | None:
    kernels = _HAS_CPU_KERNEL.get(entry.name)
    if kernels is None or not situation.offloaded or situation.accelerator in kernels:
        return None
    return _cannot(f"DeepSpeed has no CPU kernel of it for the {situation.accelerator} accelerator")


def _factored_moments_need_matrices(
    entry: OptimizerEntry, situation: Situation
) -> Capability | None:
    if entry.name != "Adafactor" or not situation.sharded:
        return None
    return _cannot(
        "it factors the second moment of matrices, and ZeRO hands it flat partitions, on which "
        "it would be another algorithm without the saving"
    )


def _untested_under_zero(entry: OptimizerEntry, situation: Situation) -> Capability | None:
    """torch.optim classes outside DeepSpeed's list go in as a client optimizer."""
    if entry.family != "torch" or not situation.sharded:
        return None
    if situation.allow_untested is False:
        return _cannot(
            "it is not on DeepSpeed's list of optimizers tested with ZeRO, and the configuration "
            "says zero_allow_untested_optimizer: false"
        )
    config: dict[str, Any] = {"zero_allow_untested_optimizer": True}
    reason = "it is not on DeepSpeed's list of optimizers tested with ZeRO"
    if situation.offloaded:
        config["zero_force_ds_cpu_optimizer"] = False
        reason += "; offloaded, torch updates it on the CPU without a vectorised kernel"
    return Capability(
        status="works with",
        reason=reason,
        config=config,
        verified=_measured(entry, situation),
    )


_RULES: Final[tuple[Rule, ...]] = (
    _not_for_diffusion,
    _removed_one_bit,
    _not_set_up_yet,
    _only_deepspeed_has_it,
    _lamb_needs_cuda,
    _lion_needs_a_kernel,
    _no_cpu_kernel,
    _factored_moments_need_matrices,
    _untested_under_zero,
)
