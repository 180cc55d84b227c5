# ruff: noqa: RUF009  (`setting` and `extra_keys` return attrs.field, as RUF009 cannot see)
"""The requested plan as a value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import attrs

from zerotune._util.table import Readable
from zerotune.decisions import Decision, Log, Names
from zerotune.plan.keys import REMOVED, TOP_LEVEL
from zerotune.plan.optimizer.names import DEFAULT_OPTIMIZER, canonical
from zerotune.plan.section import (
    Nested,
    Section,
    comparable,
    extra_keys,
    join,
    modelled,
    read_section,
    setting,
)
from zerotune.plan.sections import (
    AioSection,
    Bf16Section,
    Fp16Section,
    LaunchSection,
    OptimizerSection,
    SchedulerSection,
    ZeroSection,
)
from zerotune.plan.spelled import legacy_zero
from zerotune.plan.values import (
    AUTO,
    NULL,
    TEXT,
    Auto,
    Boolean,
    Integer,
    Number,
    as_tuple,
    is_auto,
)


def passed_paths(plan: Settings) -> frozenset[str]:
    """Return the paths of all keys that zerotune does not model (``extra``).

    Code that reads the written plan back must accept these keys.
    """
    sections: list[tuple[Section, str]] = [(plan, "")]
    sections += [(plan.launch, "launch")] if plan.launch else []
    found: set[str] = set()
    for section, prefix in sections:
        found.update(join(prefix, name) for name in getattr(section, "extra", {}))
        for attribute in modelled(type(section)):
            value = getattr(section, attribute.name)
            if isinstance(value, Section):
                sections.append((value, join(prefix, attribute.name)))
    return frozenset(found)


def _launch_said(launch: LaunchSection | None) -> Section | None:
    """Return the launch section for comparison of plans: without type and file name."""
    if launch is not None:
        launch = attrs.evolve(launch, distributed_type=None, deepspeed_config_file=None)
    return comparable(launch)


SettingsT = TypeVar("SettingsT", bound="Settings")


@attrs.frozen(kw_only=True, repr=False)
class Settings(Readable, Section):
    """A DeepSpeed configuration, which may contain ``"auto"``; ``DeepSpeedPlan`` adds the verbs."""

    resolved_as: ClassVar[type[Any] | None] = None
    """Class of the resolved plan, if not ``Resolved``."""
    passed_through: ClassVar[frozenset[str]] = TOP_LEVEL | REMOVED.keys()
    aliases: ClassVar[Mapping[str, str]] = {"bfloat16": "bf16"}

    train_batch_size: int | Auto | None = setting(Integer(minimum=1, rejected=TEXT))
    """Samples per optimizer step across all ranks."""
    train_micro_batch_size_per_gpu: int | Auto | None = setting(Integer(minimum=1, rejected=TEXT))
    """Samples per forward pass and rank."""
    gradient_accumulation_steps: int | Auto | None = setting(Integer(minimum=1, rejected=TEXT))
    """Forward passes per optimizer step."""
    gradient_clipping: float | Auto | None = setting(Number())
    """Maximum global L2 norm of the gradient; 0 disables clipping."""
    zero_optimization: ZeroSection | None = setting(
        Nested(ZeroSection, before=legacy_zero, rejected=NULL)
    )
    bf16: Bf16Section | None = setting(Nested(Bf16Section))
    fp16: Fp16Section | None = setting(Nested(Fp16Section, rejected=NULL))
    optimizer: OptimizerSection | None = setting(Nested(OptimizerSection, rejected=NULL))
    scheduler: SchedulerSection | None = setting(Nested(SchedulerSection, rejected=NULL))
    aio: AioSection | None = setting(Nested(AioSection))
    zero_allow_untested_optimizer: bool | Auto | None = setting(Boolean())
    """Allow ZeRO with an optimizer that DeepSpeed has not tested."""
    zero_force_ds_cpu_optimizer: bool | Auto | None = setting(Boolean())
    """With offload, reject optimizers that are not DeepSpeed's own."""
    steps_per_print: int | Auto | None = setting(Integer(minimum=1))
    """Steps between DeepSpeed's progress lines."""
    wall_clock_breakdown: bool | Auto | None = setting(Boolean(rejected=NULL | TEXT))
    """Log the times of the forward pass, backward pass and optimizer step."""
    extra: Mapping[str, Any] = extra_keys()

    launch: LaunchSection | None = attrs.field(default=None, eq=_launch_said)
    """Additional settings from a launcher's or trainer's file; never passed to DeepSpeed."""
    decisions: tuple[Decision, ...] = attrs.field(default=(), converter=as_tuple, eq=False)
    """Decisions made while reading."""
    source: str = attrs.field(default="code", eq=False)
    """Source of the plan: a file name, ``"dict"`` or ``"code"``."""
    names: Names = attrs.field(factory=dict, eq=False, repr=False)
    """Names of settings in the source file, by path, for messages."""

    @launch.validator
    def _check_launch(self, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value is not None:
            Nested(LaunchSection).check(value, attribute.name)

    @classmethod
    def meant(cls, name: str) -> tuple[str, ...]:
        """Return the paths that a user often means, such as ``"zero_optimization.stage"``."""
        of_zero = {each.name for each in modelled(ZeroSection)} | ZeroSection.aliases.keys()
        return (f"zero_optimization.{name}",) if name in of_zero else super().meant(name)

    @property
    def stage(self) -> int | Auto:
        """ZeRO stage as written; 0 if it is not set."""
        zero = self.zero_optimization
        return 0 if zero is None or zero.stage is None else zero.stage

    @property
    def optimizer_name(self) -> str | None:
        """Canonical name of the requested optimizer; AdamW by default, ``None`` if unknown."""
        section = self.optimizer
        if section is None or section.type is None or is_auto(section.type):
            return DEFAULT_OPTIMIZER
        return canonical(section.type, section.params)

    @property
    def precision(self) -> str:
        """Precision as written, one of ``"bf16"``, ``"fp16"``, ``"fp32"`` and ``"auto"``."""
        bf16 = self.bf16.enabled if self.bf16 else None
        fp16 = self.fp16.enabled if self.fp16 else None
        if bf16 is True:
            return "bf16"
        if fp16 is True:
            return "fp16"
        launched = self.launch.mixed_precision if self.launch else None
        if AUTO in (bf16, fp16) or launched is not None:
            return launched or AUTO
        return "fp32"

    @property
    def offload_optimizer_device(self) -> str:
        """Device of ``offload_optimizer`` as written: ``"none"``, ``"cpu"`` or ``"nvme"``."""
        zero = self.zero_optimization
        section = zero.offload_optimizer if zero else None
        return (section.device if section else None) or "none"

    @property
    def offload_param_device(self) -> str:
        """Device of ``offload_param`` as written: ``"none"``, ``"cpu"`` or ``"nvme"``."""
        zero = self.zero_optimization
        section = zero.offload_param if zero else None
        return (section.device if section else None) or "none"

    def to_deepspeed(self) -> dict[str, Any]:
        """Return a deep copy of the configuration as written, including any ``"auto"``."""
        return self.to_dict()

    def to_json(self, *, indent: int = 2) -> str:
        """Return the written configuration as JSON text with ``indent`` spaces per level."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)


def read_launch(raw: Mapping[str, Any], log: Log) -> LaunchSection:
    """Read launch settings from ``raw``; decisions and errors go to ``log``."""
    return read_section(LaunchSection, raw, key="launch", log=log)


def with_launch(plan: SettingsT, launch: LaunchSection) -> SettingsT:
    """Return ``plan`` with the settings of ``launch`` added to its launch settings."""
    before = plan.launch.to_dict() if plan.launch else {}
    around = {**before, **launch.to_dict()}
    names = {attribute.name for attribute in modelled(LaunchSection)}
    extra = {key: value for key, value in around.items() if key not in names}
    said_here = {key: value for key, value in around.items() if key in names}
    return attrs.evolve(plan, launch=LaunchSection(**said_here, extra=extra)) if around else plan
