"""Decide whether an optimizer can run in a given situation, and which class implements it.

``Situation`` contains everything that the decision depends on. ``implementation_of`` returns the
class, the library that provides it and the decay mode. ``capability_of`` applies the rules, which a
test compares with runs of the real engine (``docs/results/capabilities.json``). ``check`` and
``reject_unknown`` validate arguments.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from importlib.util import find_spec
from typing import Any, Final, Literal

import attrs

from zerotune.errors import Edits, writes
from zerotune.plan.context import Context
from zerotune.plan.optimizer.catalogue import ADAM, OPTIMIZERS
from zerotune.plan.optimizer.choices import OptimizerChoice
from zerotune.plan.optimizer.entries import OptimizerEntry, OptimizerSource, WeightDecay
from zerotune.plan.optimizer.names import DEFAULT_OPTIMIZER
from zerotune.plan.settings import Settings
from zerotune.platform.facts import CUDA


@attrs.frozen(kw_only=True)
class Situation:
    """Engine, stage, offload, precision, accelerator and versions with which an optimizer runs."""

    uses_deepspeed: bool = True
    """Whether DeepSpeed runs the training; ``False`` for the plain engine."""
    stage: int = 0
    """ZeRO stage; 0 without DeepSpeed."""
    offload: str = "none"
    """Location of the optimizer states: ``"none"``, ``"cpu"`` or ``"nvme"``."""
    precision: str = "fp32"
    """``"bf16"``, ``"fp16"`` or ``"fp32"``."""
    accelerator: str = "cpu"
    """DeepSpeed's name for the accelerator (``"cuda"``, ``"cpu"``, ``"xpu"``, ``"mps"``), or, with
    the plain engine, the platform's name."""
    allow_untested: bool | None = None
    """``zero_allow_untested_optimizer`` in the configuration; ``None`` if not set."""
    force_cpu: bool | None = None
    """``zero_force_ds_cpu_optimizer`` in the configuration; ``None`` if not set."""
    packages: frozenset[str] | None = None
    """Installed optional packages; ``None`` means that all are assumed to be installed."""
    world_size: int = 1
    """Number of processes."""
    zenflow: bool = False
    """Whether ``zero_optimization.zenflow`` replaces the CPU optimizer."""
    by_weight: bool = False
    """Whether the host engine's update on the device passes one weight at a time."""

    @classmethod
    def of(cls, plan: Settings, context: Context, precision: str, *, by_weight: bool) -> Situation:
        """Derive the situation in which a plan's optimizer runs.

        Args:
            plan: The plan with every key set.
            context: Machine and number of ranks.
            precision: ``"bf16"``, ``"fp16"`` or ``"fp32"``.
            by_weight: As in ``Situation``.
        """
        platform, on_engine = context.machine, context.uses_deepspeed
        accelerator = (on_engine and platform.deepspeed.accelerator) or platform.accelerator
        if not on_engine and plan.offload_optimizer_device == "cpu":
            # The optimizer's tensors are in host memory, wherever the model computes.
            accelerator = "cpu"
        zero = plan.zero_optimization
        sharded = on_engine and not by_weight
        return cls(
            by_weight=by_weight,
            uses_deepspeed=sharded,
            stage=int(plan.stage) if sharded else 0,
            offload=plan.offload_optimizer_device if sharded else "none",
            precision=precision,
            accelerator=accelerator,
            allow_untested=_switch(plan.zero_allow_untested_optimizer),
            force_cpu=_switch(plan.zero_force_ds_cpu_optimizer),
            packages=installed_packages(),
            world_size=context.world_size,
            zenflow=zero is not None and bool(zero.extra.get("zenflow")),
        )

    @property
    def offloaded(self) -> bool:
        """Whether the update runs on the CPU while the model is on a device."""
        return self.uses_deepspeed and self.offload != "none"

    @property
    def sharded(self) -> bool:
        """Whether ZeRO passes flat partitions to the optimizer."""
        return self.uses_deepspeed and self.stage >= 1

    def __str__(self) -> str:
        if self.by_weight:
            return f"the host engine with its update on {self.accelerator}"
        if not self.uses_deepspeed:
            return f"the plain engine on {self.accelerator}"
        place = f"stage {self.stage}, optimizer offload {self.offload}, {self.precision}"
        return f"DeepSpeed on {self.accelerator}, {place}"

    def _has_kernel(self, entry: OptimizerEntry) -> bool:
        """Return whether DeepSpeed's own kernel is used, which is true only for Lion.

        DeepSpeed's Lamb requires fp16 and CUDA, and its Muon is not the same algorithm at every
        stage (docs/optimizers.md).
        """
        if entry.name != "Lion" or not self.uses_deepspeed:
            return False
        if self.offloaded:
            return self.accelerator in _CPU_KERNELS["Lion"]
        return self.accelerator == CUDA

    def _deepspeed_class(
        self, entry: OptimizerEntry, params: Mapping[str, Any], decay: WeightDecay | None
    ) -> str:
        if entry.name in ADAM:
            if params.get("torch_adam"):
                return _torch_class(entry, decay)
            if self.offloaded:
                return "ZenFlowCPUAdam" if self.zenflow else "DeepSpeedCPUAdam"
            return "FusedAdam"
        return (_OFFLOADED_CLASS if self.offloaded else _RESIDENT_CLASS)[entry.name]

    @property
    def _circumstances(self) -> set[str]:
        """The circumstances in ``_REFUSALS`` that hold."""
        streams = self.uses_deepspeed and self.offload == "cpu" and self.stage in (2, 3)
        adagrad = self.offloaded and self.accelerator not in _CPU_KERNELS["Adagrad"]
        every = {
            "nvme": self.offload == "nvme",
            "not streamed": not streams,
            "parts": self.sharded,
            "sub-groups": self.sharded and self.stage == 3,
            "ranks": self.sharded and self.world_size > 1,
            "by weight": self.by_weight,
            "no kernel": adagrad,
        }
        return {name for name, holds in every.items() if holds}

    def _refusal(self, entry: OptimizerEntry) -> Capability | None:
        """Return the most important reason why the optimizer cannot run; ``None`` if it can."""
        if entry.refusal is not None:
            return _cannot(entry.refusal, entry.instead)
        if (package := missing_package(entry, self.packages)) is not None:
            return _cannot(
                f"the package {package} is not installed (pip install 'zerotune[optimizers]')"
            )
        here = self._circumstances
        for each in _REFUSALS:
            if entry.name in each.names and each.where <= here:
                reason = each.reason.format(accelerator=self.accelerator)
                return _cannot(reason, each.instead.format(name=entry.name), each.edits)
        if (
            self.sharded
            and self.allow_untested is False
            and implementation_of(entry, {}, self).source != "deepspeed"
        ):
            return _cannot(
                "DeepSpeed has not tested the optimizer with ZeRO, and the configuration "
                "sets zero_allow_untested_optimizer: false"
            )
        return None

    def _handed_over(self, entry: OptimizerEntry) -> Capability:
        """Return how the optimizer is passed to DeepSpeed if DeepSpeed does not build it."""
        source = implementation_of(entry, {}, self).source
        if source == "deepspeed":
            return Capability(status="works")
        ours = source == "zerotune"
        reason = f"zerotune's own implementation runs: {_OWN[entry.name]}" if ours else ""
        if not self.sharded:
            return Capability(status="works with" if ours else "works", reason=reason)
        config: dict[str, Any] = {"zero_allow_untested_optimizer": True}
        parts = [reason, "DeepSpeed does not list the optimizer as tested with ZeRO"]
        if entry.package == "torchao.optim":
            parts.append(_TORCHAO_BLOCKS)
        if self.offloaded:
            config["zero_force_ds_cpu_optimizer"] = False
            if entry.name != _BF16_STATES:
                parts.append(
                    "with offload, torch runs the optimizer on the CPU without a vectorised kernel"
                )
        return Capability(
            status="works with", reason="; ".join(part for part in parts if part), config=config
        )


def _switch(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


OPTIONAL_PACKAGES: Final = ("bitsandbytes", "torchao", "prodigyopt", "schedulefree")


def installed_packages() -> frozenset[str]:
    """Return the optional packages that are installed, without importing any."""
    return frozenset(name for name in OPTIONAL_PACKAGES if find_spec(name) is not None)


CONFIGURATION_ONLY: Final = frozenset({"adam_w_mode", "torch_adam"})
"""Keys of DeepSpeed's configuration that no torch constructor accepts."""

GROUP_RATES: Final = frozenset({"muon_lr", "adam_lr"})
"""Keys that set separate learning rates for Muon and for its auxiliary Adam."""


def implementation_of(
    entry: OptimizerEntry, params: Mapping[str, Any], situation: Situation
) -> OptimizerChoice:
    """Return the class that implements the optimizer in ``situation``, as an ``OptimizerChoice``.

    Args:
        entry: Catalogue entry of an optimizer that can run in ``situation``.
        params: Arguments of the optimizer; only ``adam_w_mode``, ``torch_adam`` and
            ``decoupled_weight_decay`` affect the choice.
        situation: Situation in which the optimizer runs.
    """
    decay = decay_mode(entry, params)
    source: OptimizerSource
    if entry.package is not None:
        source, name = "package", entry.implementation or entry.name
    elif entry.name in _OWN and not situation._has_kernel(entry):
        source, name = "zerotune", entry.name
    elif entry.family == "torch" or not situation.uses_deepspeed:
        source, name = "torch", _torch_class(entry, decay)
    else:
        source, name = "deepspeed", situation._deepspeed_class(entry, params, decay)
    return OptimizerChoice(
        name=entry.name,
        params={},
        implementation=name,
        source=source,
        package=entry.package,
        weight_decay_mode=decay,
    )


_BF16_STATES: Final = "AdamWBF16States"
_8BIT_STATES: Final = "AdamW8BitStates"

_OWN: Final[Mapping[str, str]] = {
    _8BIT_STATES: "no other library updates 8-bit moments in host memory unit by unit",
    _BF16_STATES: "DeepSpeed stores states in bf16 only if the master weights are bf16 too",
    "Lion": "without CPU offload, DeepSpeed has only a CUDA kernel for it",
    "Lamb": "DeepSpeed's only kernel needs CUDA and fp16",
    "Muon": "DeepSpeed's own version chooses parameters by name, omits convolutions, and does "
    "not support stage 3 in its default configuration; zerotune's version joins sharded "
    "matrices and works the same at every stage",
}
"""Optimizers for which zerotune has a torch implementation, and why."""

_CPU_KERNELS: Final[Mapping[str, frozenset[str]]] = {
    # From `op_builder/{cpu,mps,xpu}` of DeepSpeed 0.19.8; CUDA and ROCm use the builders of `cpu`.
    "Adagrad": frozenset({CUDA, "cpu", "xpu"}),
    "Lion": frozenset({CUDA, "cpu"}),
}
"""Accelerators on which DeepSpeed can update their states in host memory."""


def decay_mode(entry: OptimizerEntry, params: Mapping[str, Any]) -> WeightDecay | None:
    """Return how an Adam-like optimizer applies weight decay; ``None`` for other optimizers."""
    # Classes of packages do not expose their decay mode, so it could not be verified.
    if not entry.adam_like or entry.family == "package":
        return None
    if entry.name in _ONE_DECAY:
        return _ONE_DECAY[entry.name]
    if entry.name == "Adam":
        return "decoupled" if params.get("adam_w_mode", True) else "l2"
    return "decoupled" if params.get("decoupled_weight_decay", False) else "l2"


_ONE_DECAY: Final[Mapping[str, WeightDecay]] = {
    "AdamW": "decoupled",
    "AdamWBF16States": "decoupled",
    "AdamW8BitStates": "decoupled",
}
"""Optimizers whose decay mode no argument changes."""


def _torch_class(entry: OptimizerEntry, decay: WeightDecay | None) -> str:
    if entry.name in ADAM:
        return "AdamW" if decay == "decoupled" else "Adam"
    return entry.name


_OFFLOADED_CLASS: Final = {"Adagrad": "DeepSpeedCPUAdagrad", "Lion": "DeepSpeedCPULion"}
_RESIDENT_CLASS: Final = {"Adagrad": "Adagrad", "Lion": "FusedLion"}


Status = Literal["works", "works with", "cannot"]


@attrs.frozen(kw_only=True)
class Capability:
    """Whether one optimizer can run in one situation."""

    status: Status
    """``"works"``, ``"works with"`` (``reason`` states the change) or ``"cannot"``."""
    reason: str = ""
    """The required change, or why the optimizer cannot run."""
    alternative: str | None = None
    """The closest optimizer that can run, if this one cannot."""
    edits: tuple[Edits, ...] = ()
    """Changes that choose the alternative."""
    config: Mapping[str, Any] = attrs.field(factory=dict)
    """Top-level configuration keys that the optimizer requires, with their values."""
    implementation: str | None = None
    """Class that performs the update with default arguments; ``None`` for status ``"cannot"``."""

    @property
    def runs(self) -> bool:
        """Whether the optimizer can run."""
        return self.status != "cannot"


def capability_of(entry: OptimizerEntry, situation: Situation) -> Capability:
    """Return whether and how the optimizer that ``entry`` describes can run in ``situation``."""
    answer = situation._refusal(entry) or situation._handed_over(entry)
    if not answer.runs:
        return answer
    name = implementation_of(entry, {}, situation).implementation
    return attrs.evolve(answer, implementation=name)


def missing_package(entry: OptimizerEntry, packages: Collection[str] | None) -> str | None:
    """Return the optional package that ``entry`` needs and that is not among ``packages``."""
    package = (entry.package or "").partition(".")[0]
    return package if package and packages is not None and package not in packages else None


_TORCHAO_BLOCKS: Final = (
    "torchao keeps states in fp32 unless the size of the partition is a multiple of block_size; "
    "ZeRO does not ensure that, so the optimizer may save no memory"
)


def _cannot(
    reason: str, alternative: str | None = DEFAULT_OPTIMIZER, edits: Edits | None = None
) -> Capability:
    """Return the answer that an optimizer cannot run.

    Args:
        reason: Why.
        alternative: What can run instead.
        edits: Settings that choose the alternative; by default its name as the optimizer.
    """
    mends = writes(*filter(None, [alternative])) if edits is None else (edits,)
    return Capability(status="cannot", reason=reason, alternative=alternative, edits=mends)


@attrs.frozen(kw_only=True)
class _Refusal:
    """Circumstances in which some optimizers cannot run."""

    names: Collection[str]
    where: Set[str]
    """Names of ``Situation._circumstances`` that must all hold."""
    reason: str
    instead: str = DEFAULT_OPTIMIZER
    edits: Edits | None = None


_STAGE: Final = "zero_optimization.stage"
_TO_CPU: Final[Edits] = {"zero_optimization.offload_optimizer.device": "cpu"}
_OF_ALL_WEIGHTS: Final = "the optimizer keeps global values that depend on all weights, but "
_BY_WEIGHT: Final = "but the update on the device passes one weight at a time"
_IN_PARTS: Final = "but ZeRO passes flat partitions"
_GLOBAL: Final = [name for name, entry in OPTIMIZERS.items() if entry.own_schedule]

_REFUSALS: Final = (
    _Refusal(
        names=[_8BIT_STATES],
        where={"not streamed", "nvme"},
        reason="the optimizer works only with streamed weights, at stage 2 or 3 with CPU offload",
    ),
    _Refusal(
        names=[_8BIT_STATES],
        where={"not streamed"},
        reason="the optimizer works only with streamed weights, at stage 2 or 3 with CPU offload",
        instead="AdamW8bit",
    ),
    _Refusal(
        names=[_BF16_STATES],
        where={"nvme"},
        reason="DeepSpeed swaps states in the dtype of the fp32 master weights, so the bf16 "
        "states would become fp32",
    ),
    _Refusal(
        names=["AdamW8bit", "TorchAOAdamW8bit", "TorchAOAdamW4bit"],
        where={"nvme"},
        reason="DeepSpeed swaps states as if they had the weights' size and dtype; with "
        "8-bit states on NVMe the engine ran, but the loss did not decrease",
        instead="{name} with offload to the CPU",
        edits=_TO_CPU,
    ),
    _Refusal(
        names=["Prodigy"],
        where={"ranks"},
        reason="each rank would derive a different learning rate from its part of the weights",
        instead="Prodigy at stage 0",
        edits={_STAGE: 0},
    ),
    _Refusal(
        names=_GLOBAL,
        where={"sub-groups", "nvme"},
        reason=f"{_OF_ALL_WEIGHTS}stage 3 updates one sub-group at a time",
        instead="{name} at stage 2 with offload to the CPU",
        edits={_STAGE: 2, **_TO_CPU},
    ),
    _Refusal(
        names=_GLOBAL,
        where={"sub-groups"},
        reason=f"{_OF_ALL_WEIGHTS}stage 3 updates one sub-group at a time",
        instead="{name} at stage 2",
        edits={_STAGE: 2},
    ),
    _Refusal(
        names=["Adafactor"],
        where={"parts"},
        reason=f"the optimizer needs whole matrices to factor the second moment, {_IN_PARTS}",
    ),
    _Refusal(
        names=["Lamb"],
        where={"parts"},
        reason=f"the optimizer's trust ratio needs the norms of whole parameters, {_IN_PARTS}",
    ),
    _Refusal(
        names=_GLOBAL,
        where={"by weight"},
        reason=f"{_OF_ALL_WEIGHTS}the update on the device passes one weight at a time",
    ),
    _Refusal(
        names=[_BF16_STATES],
        where={"by weight"},
        reason=f"the rounding of the states depends on the order of all weights, {_BY_WEIGHT}",
    ),
    _Refusal(
        names=["Adagrad"],
        where={"no kernel"},
        reason="DeepSpeed has no CPU kernel for Adagrad on the {accelerator} accelerator",
    ),
)
"""Where optimizers cannot run, the most important reason first."""
