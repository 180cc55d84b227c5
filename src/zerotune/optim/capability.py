"""Whether an optimizer can run in a situation, and which class then does the work.

``Situation`` holds everything that depends on. ``implementation_of`` names the class, its decay
and who builds it. ``capability_of`` asks one rule after the other, and compares what they say
with the cells that were really run (``data/capabilities.json``), which have the last word.
``check`` and ``reject_unknown`` judge the arguments it is given.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, Literal

import attrs

from zerotune._util.proc import installed_version
from zerotune._util.text import did_you_mean, release_of
from zerotune.decisions import Log
from zerotune.errors import UnknownKeyError
from zerotune.optimizers.catalogue import (
    ADAM,
    DEFAULT_OPTIMIZER,
    OptimizerChoice,
    OptimizerEntry,
    OptimizerSource,
    Parameter,
    WeightDecay,
)
from zerotune.plan.model import (
    Anything,
    Boolean,
    Choice,
    Integer,
    Kind,
    Numbers,
    Reading,
    Real,
    Text,
    refuse_template,
)

if TYPE_CHECKING:
    from zerotune.plan.model import ResolvedPlan


@attrs.frozen(kw_only=True)
class Situation:
    """Engine, stage, offload, precision, accelerator and versions."""

    uses_deepspeed: bool = True
    """``False`` for the plain engine."""
    stage: int = 0
    """ZeRO stage; 0 without DeepSpeed."""
    offload: str = "none"
    """Where the optimizer states are: ``"none"``, ``"cpu"`` or ``"nvme"``."""
    precision: str = "fp32"
    """``"bf16"``, ``"fp16"`` or ``"fp32"``."""
    accelerator: str = "cpu"
    """Accelerator DeepSpeed runs on (``"cuda"``, ``"cpu"``, ``"xpu"``, ``"mps"``); the platform's
    own for the plain engine."""
    versions: Mapping[str, str] = attrs.field(factory=dict)
    """Installed versions by package."""
    allow_untested: bool | None = None
    """``zero_allow_untested_optimizer`` as the configuration says; ``None`` when it does not."""
    force_cpu: bool | None = None
    """``zero_force_ds_cpu_optimizer`` as the configuration says; ``None`` when it does not."""
    bf16_states: bool = False
    """Whether ``bf16.bf16_optimizer_states`` keeps the states in bf16."""
    packages: frozenset[str] | None = None
    """Optional packages that are installed; ``None``: not looked at, none is missed."""
    world_size: int = 1
    """Number of processes."""
    zenflow: bool = False
    """Whether ``zero_optimization.zenflow`` replaces the CPU optimizer."""

    @classmethod
    def of(cls, resolved: ResolvedPlan) -> Situation:
        """Read the situation off a resolved plan."""
        platform = resolved.platform
        accelerator: str = platform.accelerator
        if resolved.uses_deepspeed and platform.deepspeed.accelerator:
            accelerator = platform.deepspeed.accelerator
        if not resolved.uses_deepspeed and resolved.offload_optimizer == "cpu":
            # There the optimizer's tensors lie in host memory, whatever the model computes on.
            accelerator = "cpu"
        zero = resolved.plan.zero_optimization
        bf16 = resolved.plan.bf16
        return cls(
            uses_deepspeed=resolved.uses_deepspeed,
            stage=resolved.stage,
            offload=resolved.offload_optimizer if resolved.uses_deepspeed else "none",
            precision=resolved.precision,
            accelerator=accelerator,
            versions=platform.versions,
            # The resolved plan writes every key; only the request tells what the user wrote.
            **{
                name: value if isinstance(value, bool) else None
                for name, value in {
                    "allow_untested": resolved.requested.zero_allow_untested_optimizer,
                    "force_cpu": resolved.requested.zero_force_ds_cpu_optimizer,
                }.items()
            },
            bf16_states=resolved.precision == "bf16"
            and bf16 is not None
            and bf16.bf16_optimizer_states is True,
            packages=installed_packages(),
            world_size=resolved.world_size,
            zenflow=zero is not None and bool(zero.extra.get("zenflow")),
        )

    @property
    def offloaded(self) -> bool:
        """Whether the update runs on the CPU while the model is elsewhere."""
        return self.uses_deepspeed and self.offload != "none"

    @property
    def sharded(self) -> bool:
        """Whether ZeRO hands the optimizer flat partitions."""
        return self.uses_deepspeed and self.stage >= 1

    def before(self, package: str, *release: int) -> bool:
        """Whether the installed ``package`` is older than ``release``; ``False`` when unknown."""
        version = self.versions.get(package)
        if version is None and package in (self.packages or ()):
            version = installed_version(package)
        installed = release_of(version or "")
        return bool(installed) and installed < release

    def __str__(self) -> str:
        if not self.uses_deepspeed:
            return f"the plain engine on {self.accelerator}"
        place = f"stage {self.stage}, optimizer offload {self.offload}, {self.precision}"
        return f"DeepSpeed on {self.accelerator}, {place}"

    def _has_kernel(self, entry: OptimizerEntry) -> bool:
        """Whether DeepSpeed's own kernel of it is used: only Lion's is.

        Lamb's asks for fp16, Muon's is not the same algorithm at every stage (docs/optimizers.md).
        """
        if entry.name != "Lion" or not self.uses_deepspeed:
            return False
        if self.offloaded:
            return self.accelerator in _CPU_KERNELS["Lion"]
        return self.accelerator == "cuda"

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

    def _obstacles(self, entry: OptimizerEntry) -> Iterator[Capability]:
        """Why it cannot run, the weightiest reason first."""
        if entry.refusal is not None:
            yield _cannot(entry.refusal, entry.instead)
        if (package := missing_package(entry, self)) is not None:
            yield _cannot(
                f"the package {package} is not installed (pip install 'zerotune[{entry.extra}]')"
            )
        # CPU kernels came to bitsandbytes with 0.50 (its PR #1901).
        if entry.name == "AdamW8bit" and self.before("bitsandbytes", 0, 50):
            if self.offloaded:
                yield _cannot(
                    "the kernels of bitsandbytes before 0.50 update states on the GPU, and offload "
                    "keeps them in host memory"
                )
            elif self.accelerator != "cuda":
                yield _cannot("the kernels of bitsandbytes before 0.50 are CUDA's")
        streams = self.uses_deepspeed and self.offload == "cpu" and self.stage in (2, 3)
        if entry.name == _8BIT_STATES and not streams:
            yield _cannot(
                "it works for streamed weights only, at stage 2 or 3 with CPU offload",
                "AdamW8bit",
            )
        if self.offload == "nvme" and entry.name == _BF16_STATES:
            yield _cannot(
                "DeepSpeed swaps states in the weights' dtype, so they would be fp32 again"
            )
        if self.offload == "nvme" and entry.name in LOW_BIT:
            yield _cannot(
                "DeepSpeed swaps states as if they had the weights' size and dtype; with 8-bit "
                "states on NVMe the engine ran, and the loss did not fall",
                f"{entry.name} with offload to the CPU",
            )
        if self.sharded:
            yield from self._obstacles_in_parts(entry)
        if entry.name == "Adagrad" and self.offloaded:
            accelerator = self.accelerator
            if accelerator not in _CPU_KERNELS["Adagrad"]:
                yield _cannot(
                    f"DeepSpeed has no CPU kernel of it for the {accelerator} accelerator"
                )

    def _obstacles_in_parts(self, entry: OptimizerEntry) -> Iterator[Capability]:
        """Numbers of all weights together, or of whole matrices; ZeRO hands over parts."""
        if entry.own_schedule and self.stage == 3:
            yield _cannot(
                "it keeps values shared by all weights, but stage 3 steps one sub-group at a time",
                f"{entry.name} at stage 2",
            )
        elif entry.name == "Prodigy" and self.world_size > 1:
            yield _cannot(
                "each rank would find a learning rate of its own from its part of the weights",
                "Prodigy at stage 0",
            )
        if entry.name == "Adafactor":
            yield _cannot(
                "it factors the second moment of whole matrices, but ZeRO passes it flat partitions"
            )

    def _handed_over(self, entry: OptimizerEntry) -> Capability:
        """It works; what DeepSpeed does not build itself goes in as a client optimizer."""
        source = implementation_of(entry, {}, self).source
        if source == "deepspeed":
            return Capability(status="works")
        ours = source == "zerotune"
        reason = f"zerotune's own implementation runs: {_OWN[entry.name]}" if ours else ""
        if not self.sharded:
            return Capability(status="works with" if ours else "works", reason=reason)
        if self.allow_untested is False:
            return _cannot(
                "it is not on DeepSpeed's list of optimizers tested with ZeRO, and the "
                "configuration says zero_allow_untested_optimizer: false"
            )
        config: dict[str, Any] = {"zero_allow_untested_optimizer": True}
        parts = [reason, "it is not on DeepSpeed's list of optimizers tested with ZeRO"]
        if entry.package == "torchao.optim":
            parts.append(TORCHAO_BLOCKS)
        if self.offloaded:
            config["zero_force_ds_cpu_optimizer"] = False
            if entry.name != _BF16_STATES:
                parts.append("offloaded, torch updates it on the CPU without a vectorised kernel")
        return Capability(
            status="works with", reason="; ".join(part for part in parts if part), config=config
        )


OPTIONAL_PACKAGES: Final = ("mup", "bitsandbytes", "torchao", "prodigyopt", "schedulefree")


def installed_packages() -> frozenset[str]:
    """Which of the optional packages can be found, without importing any."""
    return frozenset(name for name in OPTIONAL_PACKAGES if find_spec(name) is not None)


# -- Which class does the update (``DeepSpeedEngine._configure_basic_optimizer`` of 0.19.8).


CONFIGURATION_ONLY: Final = frozenset({"adam_w_mode", "torch_adam"})
"""Keys of DeepSpeed's configuration that no constructor of torch has."""

GROUP_RATES: Final = frozenset({"muon_lr", "adam_lr"})
"""Keys that become the learning rates of Muon's two kinds of groups."""


def implementation_of(
    entry: OptimizerEntry, params: Mapping[str, Any], situation: Situation
) -> OptimizerChoice:
    """The class that ``entry`` with ``params`` becomes in ``situation``; ``params`` are left out.

    Args:
        entry: An optimizer that can run there.
        params: Its arguments; of these ``adam_w_mode``, ``torch_adam`` and
            ``decoupled_weight_decay`` matter.
        situation: Where it runs.
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
    _8BIT_STATES: "nobody else has a pass over 8-bit moments in host memory unit by unit",
    _BF16_STATES: "DeepSpeed keeps states in bf16 only when the master weights are bf16 too",
    "Lion": "DeepSpeed has it without CPU offload as a CUDA kernel only",
    "Lamb": "DeepSpeed has it as a CUDA kernel for fp16 only, and ZeRO hands that kernel flat "
    "partitions without the layers its trust ratio is about; this one sums the norms of whole "
    "parameters over their shards",
    "Muon": "DeepSpeed's own reads use_muon from names it chooses itself, leaves out "
    "convolutions, and refuses stage 3 as it is configured by default; this one puts split "
    "matrices together and is the same at every stage",
}
"""Those of which zerotune has a torch implementation, and why."""

_CPU_KERNELS: Final[Mapping[str, frozenset[str]]] = {
    # `op_builder/{mps,xpu}` of DeepSpeed 0.19.8; CUDA's and ROCm's are those beside them.
    "Adagrad": frozenset({"cuda", "cpu", "xpu"}),
    "Lion": frozenset({"cuda", "cpu"}),
}
"""Accelerators on which DeepSpeed updates their states in host memory."""


def decay_mode(entry: OptimizerEntry, params: Mapping[str, Any]) -> WeightDecay | None:
    """How ``entry`` with ``params`` decays weights; ``None`` when it is not Adam-like."""
    # The classes of packages do not tell, so it could not be verified.
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
    "MuAdamW": "decoupled",
    "MuAdam": "l2",
}
"""Those that no argument makes decay in the other way."""


def _torch_class(entry: OptimizerEntry, decay: WeightDecay | None) -> str:
    if entry.name in ADAM:
        return "AdamW" if decay == "decoupled" else "Adam"
    return entry.name


_OFFLOADED_CLASS: Final = {"Adagrad": "DeepSpeedCPUAdagrad", "Lion": "DeepSpeedCPULion"}
_RESIDENT_CLASS: Final = {"Adagrad": "Adagrad", "Lion": "FusedLion"}


# -- What was really run, cell by cell. ``python -m tools.capabilities`` starts the real engine
# for every name, stage, offload and precision, and trains a small network.


Status = Literal["works", "works with", "cannot"]


@attrs.frozen(kw_only=True)
class Cell:
    """One optimizer at one stage, offload and precision."""

    name: str
    """Canonical name."""
    stage: int
    offload: str
    precision: str
    outcome: Status
    """``"cannot"`` also where it ran, but the weights did not move or the loss did not fall."""
    reason: str = ""
    """Why it cannot, in the words of the engine; else empty."""
    implementation: str = ""
    """Class that did the update."""
    first_loss: float | None = None
    """Mean of the first losses."""
    last_loss: float | None = None
    """Mean of the last losses."""

    @property
    def key(self) -> tuple[str, int, str, str]:
        """Name, stage, offload, precision."""
        return self.name, self.stage, self.offload, self.precision


def _cells_by_key(cells: Any) -> Mapping[tuple[str, int, str, str], Cell]:
    return {cell.key: cell for cell in cells}


@attrs.frozen(kw_only=True)
class CapabilityTable:
    """Cells with the machine and the versions they were run on."""

    accelerator: str = "cpu"
    """DeepSpeed's accelerator."""
    versions: Mapping[str, str] = attrs.field(factory=dict)
    """Versions by package."""
    platform: str = ""
    """Operating system and processor."""
    cells: Mapping[tuple[str, int, str, str], Cell] = attrs.field(
        factory=dict, converter=_cells_by_key
    )

    @classmethod
    def stored(cls) -> CapabilityTable:
        """The table that comes with zerotune."""
        return _stored_table()

    @classmethod
    def from_json(cls, text: str) -> CapabilityTable:
        """Read what ``to_json`` wrote."""
        content = json.loads(text)
        cells = [Cell(**cell) for cell in content.pop("cells")]
        return cls(**content, cells=cells)

    def to_json(self) -> str:
        """The table as text, one cell a line, so that a change is a readable difference."""
        head = {
            "accelerator": self.accelerator,
            "platform": self.platform,
            "versions": dict(self.versions),
        }
        lines = [json.dumps(attrs.asdict(cell)) for _, cell in sorted(self.cells.items())]
        body = ",\n  ".join(lines)
        return f'{json.dumps(head, indent=1)[:-2]},\n "cells": [\n  {body}\n ]\n}}\n'

    def find(self, name: str, situation: Situation) -> Cell | None:
        """The cell for ``name`` in ``situation``; ``None`` when that was not run.

        A cell speaks for other patch releases of its DeepSpeed, not for another minor one.
        """
        if not situation.uses_deepspeed or situation.accelerator != self.accelerator:
            return None
        if not self._same_release(situation.versions.get("deepspeed")):
            return None
        return self.cells.get((name, situation.stage, situation.offload, situation.precision))

    def _same_release(self, version: str | None) -> bool:
        if version is None:
            return True
        return release_of(version)[:2] == release_of(self.versions.get("deepspeed", ""))[:2]


@cache
def _stored_table() -> CapabilityTable:
    source = files("zerotune.optim") / "data" / "capabilities.json"
    return CapabilityTable.from_json(source.read_text(encoding="utf-8"))


# -- Whether it can run, and if not why and what comes closest.


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
    """Whether the optimizer of ``entry`` can run in ``situation``."""
    answer = next(situation._obstacles(entry), None) or situation._handed_over(entry)
    if answer.runs:
        name = implementation_of(entry, {}, situation).implementation
        answer = attrs.evolve(answer, implementation=name)
    cell = (CapabilityTable.stored() if table is None else table).find(entry.name, situation)
    if cell is None:
        return answer
    if answer.runs and cell.outcome == "cannot":
        return _cannot(f"it was tried: {cell.reason}", verified=True)
    # What a rule refuses was not started, so nothing was seen of it.
    return attrs.evolve(answer, verified=answer.runs)


def missing_package(entry: OptimizerEntry, situation: Situation) -> str | None:
    """The optional package that ``entry`` needs and ``situation`` lacks; ``None`` for none."""
    if entry.package is None or situation.packages is None:
        return None
    package = entry.package.partition(".")[0]
    return None if package in situation.packages else package


# -- The reasons, in order: the first decides.


LOW_BIT: Final = frozenset({"AdamW8bit", "TorchAOAdamW8bit", "TorchAOAdamW4bit"})

TORCHAO_BLOCKS: Final = (
    "torchao keeps a partition's states in fp32 unless its size is a multiple of block_size, which "
    "ZeRO does not see to, so that the saving may not come about"
)


def _cannot(reason: str, alternative: str | None = DEFAULT_OPTIMIZER, **kwargs: Any) -> Capability:
    return Capability(status="cannot", reason=reason, alternative=alternative, **kwargs)


# -- What its arguments may hold, and those of a schedule.


_SWITCH: Final = {"true": True, "false": False}


@cache
def kind_of(parameter: Parameter) -> Kind:
    """What an argument may hold; ``"auto"`` is never handed to it."""
    if parameter.type == "any":
        return Anything()
    if parameter.type == "bool":
        return Boolean(auto=False, words=_SWITCH)
    if parameter.type == "str":
        return Choice(choices=parameter.choices) if parameter.choices else Text()
    low, high = parameter.low, parameter.high
    bounds: dict[str, Any] = {
        "minimum": -math.inf if low is None else low,
        "maximum": math.inf if high is None else high,
        "above": low if parameter.low_open else None,
        "below": high if parameter.high_open else None,
    }
    if parameter.type == "int":
        return Integer(auto=False, **bounds)
    real = Real(auto=False, **bounds)
    return real if parameter.type == "float" else Numbers(each=real, length=parameter.length or 1)


def read(parameter: Parameter, value: Any, *, section: str) -> Reading:
    """``check`` that also says why the value differs from what was written, if it does."""
    if value is None and parameter.nullable:
        return None, None
    kind, key = kind_of(parameter), f"{section}.{parameter.name}"
    refuse_template(kind, value, key)
    return kind.read(value, key)


def check(parameter: Parameter, value: Any, *, section: str) -> Any:
    """Return ``value`` in its proper type.

    Args:
        parameter: The argument.
        value: As written; numbers may be text (YAML reads ``1e-4`` as text).
        section: ``"optimizer.params"`` or ``"scheduler.params"``, for the message.

    Returns:
        A float, int, bool, str, or a tuple of floats.
    """
    return read(parameter, value, section=section)[0]


def reject_unknown(
    written: Mapping[str, Any], accepted: Collection[str], log: Log, *, section: str, owner: str
) -> None:
    """Refuse arguments that ``owner`` does not have, with the closest names, and all that exist."""
    for key, value in written.items():
        if key in accepted:
            continue
        close = did_you_mean(str(key), accepted)
        there_are = (
            f"write one of {', '.join(accepted)}" if accepted else "remove it: there are none"
        )
        log.refuse(
            UnknownKeyError(
                f"{owner} has no argument of this name",
                key=f"{section}.{key}",
                value=value,
                fix=f"did you mean {' or '.join(close)}?" if close else there_are,
            )
        )
