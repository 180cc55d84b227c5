"""Whether an optimizer can run in a situation, and if not why and what comes closest.

One function per reason, tried in order; the first that objects decides. What the rules say is
then compared with the table of cells that were really run, which has the last word.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

import attrs

from zerotune.optim.capability_table import CapabilityTable
from zerotune.optim.catalogue import DEFAULT_OPTIMIZER, TORCH_NAMES
from zerotune.optim.entries import OptimizerEntry
from zerotune.optim.implementation import HAS_CPU_KERNEL, implementation_of
from zerotune.optim.situation import Situation

Status = Literal["works", "works with", "cannot"]

_DOES_NOT_SUIT: Final[Mapping[str, tuple[str, str]]] = {
    "LBFGS": ("it needs a closure that recomputes the loss, which no engine here gives it", "SGD"),
    "SparseAdam": ("it takes sparse gradients only, which diffusion models do not have", "Adam"),
}

_ONE_BIT: Final = frozenset({"OneBitAdam", "OneBitLamb", "ZeroOneAdam"})

LOW_BIT: Final = frozenset({"AdamW8bit", "TorchAOAdamW8bit", "TorchAOAdamW4bit"})

_BF16_STATES: Final = "AdamWBF16States"

TORCHAO_BLOCKS: Final = (
    "torchao keeps a partition's states in fp32 unless its size is a multiple of block_size, which "
    "ZeRO does not see to, so that the saving may not come about"
)

_WHY_OWN: Final[Mapping[str, str]] = {
    _BF16_STATES: "DeepSpeed keeps states in bf16 only when the master weights are bf16 too",
    "Lion": "DeepSpeed has it without CPU offload as a CUDA kernel only",
    "Lamb": "DeepSpeed has it as a CUDA kernel for fp16 only, and ZeRO hands that kernel flat "
    "partitions without the layers its trust ratio is about; this one sums the norms of whole "
    "parameters over their shards",
    "Muon": "DeepSpeed's own reads use_muon from names it chooses itself, leaves out "
    "convolutions, and refuses stage 3 as it is configured by default; this one puts split "
    "matrices together and is the same at every stage",
}


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
    implementation: str | None = None
    """Class that does the update with default arguments; ``None`` when it cannot run."""
    verified: bool = False
    """Whether the real engine was run for it, and not only its code read."""

    @property
    def runs(self) -> bool:
        """Whether it can be used."""
        return self.status != "cannot"


def capability_of(
    entry: OptimizerEntry, situation: Situation, table: CapabilityTable | None = None
) -> Capability:
    """Whether the optimizer of ``entry`` can run in ``situation``.

    Args:
        entry: The optimizer.
        situation: Where it is to run.
        table: Cells that were run; those that come with zerotune when not given.
    """
    answer = _by_rules(entry, situation)
    cell = (CapabilityTable.stored() if table is None else table).find(entry.name, situation)
    if cell is None:
        return answer
    if answer.runs and cell.outcome == "cannot":
        return _cannot(f"it was tried: {cell.reason}", verified=True)
    # What a rule refuses was not started, so nothing was seen of it.
    return attrs.evolve(answer, verified=answer.runs)


def _by_rules(entry: OptimizerEntry, situation: Situation) -> Capability:
    for rule in _RULES:
        answer = rule(entry, situation)
        if answer is not None:
            break
    else:
        answer = Capability(status="works")
    if not answer.runs:
        return answer
    return attrs.evolve(answer, implementation=implementation_of(entry, {}, situation).name)


Rule = Callable[[OptimizerEntry, Situation], Capability | None]


def _cannot(reason: str, alternative: str = DEFAULT_OPTIMIZER, **kwargs: Any) -> Capability:
    return Capability(status="cannot", reason=reason, alternative=alternative, **kwargs)


def _not_for_diffusion(entry: OptimizerEntry, situation: Situation) -> Capability | None:  # noqa: ARG001
    if entry.name not in _DOES_NOT_SUIT:
        return None
    return _cannot(*_DOES_NOT_SUIT[entry.name])


def _one_bit(entry: OptimizerEntry, situation: Situation) -> Capability | None:
    if entry.name not in _ONE_BIT:
        return None
    if not situation.uses_deepspeed:
        return _cannot("its compression is DeepSpeed's, and DeepSpeed is off")
    if not situation.before("deepspeed", 0, 19):
        return _cannot(
            "DeepSpeed removed it in the 0.19 series (PR #8490); the last releases with it are "
            "0.18.x, at stage 0"
        )
    version = situation.versions["deepspeed"]
    if situation.stage > 0:
        return _cannot(f"DeepSpeed {version} runs it at stage 0 only: it is no ZeRO optimizer")
    if situation.accelerator != "cuda":
        return _cannot(
            f"DeepSpeed {version} compresses with cupy on CUDA, or with an op that its "
            f"{situation.accelerator} accelerator does not have"
        )
    return Capability(
        status="works with",
        reason="the freeze step must come after the learning rate has warmed up: before it, it is "
        "plain Adam or Lamb",
    )


def _package_missing(entry: OptimizerEntry, situation: Situation) -> Capability | None:
    if entry.package is None or situation.packages is None:
        return None
    package = entry.package.partition(".")[0]
    if package in situation.packages:
        return None
    return _cannot(
        f"the package {package} is not installed (pip install 'zerotune[{entry.extra}]')"
    )


def _eight_bits_on_the_cpu(entry: OptimizerEntry, situation: Situation) -> Capability | None:
    """CPU kernels came to bitsandbytes with 0.50 (its PR #1901)."""
    if entry.name != "AdamW8bit" or not situation.before("bitsandbytes", 0, 50):
        return None
    if situation.offloaded:
        return _cannot(
            "the kernels of bitsandbytes before 0.50 update states on the GPU, and offload keeps "
            "them in host memory"
        )
    if situation.accelerator != "cuda":
        return _cannot("the kernels of bitsandbytes before 0.50 are CUDA's")
    return None


def _low_bits_are_not_swapped(entry: OptimizerEntry, situation: Situation) -> Capability | None:
    if situation.offload != "nvme":
        return None
    if entry.name == _BF16_STATES:
        return _cannot("DeepSpeed swaps states in the weights' dtype, so they would be fp32 again")
    if entry.name not in LOW_BIT:
        return None
    return _cannot(
        "DeepSpeed swaps states as if they had the weights' size and dtype; with 8-bit states on "
        "NVMe the engine ran, and the loss did not fall",
        f"{entry.name} with offload to the CPU",
    )


def _one_pace_for_all(entry: OptimizerEntry, situation: Situation) -> Capability | None:
    """Optimizers that keep numbers for all weights together, which ZeRO hands over in parts."""
    if not entry.own_schedule or not situation.sharded:
        return None
    if situation.stage == 3:
        return _cannot(
            "it keeps numbers that belong to all weights together, and stage 3 steps one "
            "sub-group at a time",
            f"{entry.name} at stage 2",
        )
    if entry.name == "Prodigy" and situation.world_size > 1:
        return _cannot(
            "each rank would find a learning rate of its own from its part of the weights",
            "Prodigy at stage 0",
        )
    return None


def _only_deepspeed_has_it(entry: OptimizerEntry, situation: Situation) -> Capability | None:
    known = entry.name in TORCH_NAMES or entry.name in _WHY_OWN or entry.package is not None
    if situation.uses_deepspeed or known:
        return None
    return _cannot("DeepSpeed is off, and torch.optim has no optimizer of this name")


def _no_cpu_kernel(entry: OptimizerEntry, situation: Situation) -> Capability | None:
    if entry.name != "Adagrad" or not situation.offloaded:
        return None
    if situation.accelerator in HAS_CPU_KERNEL["Adagrad"]:
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


def _handed_over(entry: OptimizerEntry, situation: Situation) -> Capability | None:
    """What DeepSpeed does not build itself goes in as a client optimizer."""
    source = implementation_of(entry, {}, situation).source
    if source == "deepspeed":
        return None
    own = source == "zerotune"
    reason = f"zerotune's own implementation runs: {_WHY_OWN[entry.name]}" if own else ""
    if not situation.sharded:
        return Capability(status="works with", reason=reason) if own else None
    if situation.allow_untested is False:
        return _cannot(
            "it is not on DeepSpeed's list of optimizers tested with ZeRO, and the configuration "
            "says zero_allow_untested_optimizer: false"
        )
    config: dict[str, Any] = {"zero_allow_untested_optimizer": True}
    parts = [reason, "it is not on DeepSpeed's list of optimizers tested with ZeRO"]
    if entry.package == "torchao.optim":
        parts.append(TORCHAO_BLOCKS)
    if situation.offloaded:
        config["zero_force_ds_cpu_optimizer"] = False
        if entry.name != _BF16_STATES:
            parts.append("offloaded, torch updates it on the CPU without a vectorised kernel")
    return Capability(
        status="works with", reason="; ".join(part for part in parts if part), config=config
    )


_RULES: Final[tuple[Rule, ...]] = (
    _not_for_diffusion,
    _one_bit,
    _package_missing,
    _eight_bits_on_the_cpu,
    _low_bits_are_not_swapped,
    _one_pace_for_all,
    _only_deepspeed_has_it,
    _no_cpu_kernel,
    _factored_moments_need_matrices,
    _handed_over,
)
