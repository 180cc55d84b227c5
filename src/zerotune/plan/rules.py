"""The rules that check a plan, each with an id, a severity and a fix.

A rule yields findings. ``DeepSpeedPlan.check`` returns all of them. Resolution raises findings of
severity *error*, applies and records each *warning*, and ignores each *note*. The documentation is
generated from ``RULES``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final

import attrs

from zerotune._util.text import as_number, as_sentence, format_size, is_integer, is_number
from zerotune.decisions import Decision, Log, Severity, name_of, raise_all, worst_first
from zerotune.errors import (
    REMOVAL,
    UNSET,
    Edits,
    PlanConflictError,
    PlanError,
    ZeroTuneError,
    fix_of,
    writes,
)
from zerotune.plan import keys as known_keys
from zerotune.plan.accelerate import device_list
from zerotune.plan.context import Context, DeviceUpdate, EngineName, Streaming
from zerotune.plan.optimizer.capability import Situation
from zerotune.plan.optimizer.catalogue import ONE_BIT
from zerotune.plan.optimizer.choose import BY_CHOICE, DEFAULTS, ChoiceOptions, choose
from zerotune.plan.optimizer.names import clipping_in_optimizer, entry_of
from zerotune.plan.optimizer.schedules import canonical_schedule
from zerotune.plan.resolve import (
    ACCUMULATION,
    CLIPPING,
    MICRO,
    NO_PREFETCH,
    OPTIMIZER_BUFFERS,
    REDUCE_BUCKET,
    SUB_GROUP_NVME,
    Case,
    clipping,
    clipping_sources,
    filled,
    largest_sub_group,
    optimizer_buffers,
    pins_exactly,
    prepared,
    rehearses_in_bf16,
    with_engine,
    without_inactive_offload,
)
from zerotune.plan.resolved import Resolved, chosen_for
from zerotune.plan.schema import faults, passed_schema
from zerotune.plan.section import (
    Section,
    SectionT,
    evolved,
    join,
    misplaced_key,
    modelled,
    unknown_key,
)
from zerotune.plan.sections import OffloadSection, only_precision
from zerotune.plan.settings import Settings
from zerotune.plan.values import AUTO
from zerotune.platform.facts import CUDA_ALLOCATORS

Finding = Decision
"""One finding of a rule: a record with the rule's id and a fix."""
RuleContext = Context
"""Alias of ``Context`` for rules and their callers."""
Findings = Iterator[Decision]


class _Names(dict[str, str]):
    """Placeholders for the values of a finding, for the documentation."""

    def __missing__(self, name: str) -> str:
        return f"``{name}``"


@attrs.frozen(kw_only=True)
class Rule:
    """A check of plans for one kind of mistake."""

    id: str
    severity: Severity
    summary: str
    """The mistake, in one sentence for the documentation."""
    reason: str
    """Reason for a finding, with placeholders such as ``{name}`` for its values; empty if each
    finding states its own reason."""
    fix: str
    """What to write instead, with the same placeholders as ``reason``."""
    edits: tuple[Edits, ...]
    """Alternative changes that do what ``fix`` says, if they are the same for each finding."""
    remark: str
    """Additional sentences for the documentation."""
    check: Callable[[Case, Rule], Findings] = attrs.field(repr=False)
    only_deepspeed: bool
    """Whether the rule applies only to runs with DeepSpeed."""
    resolved_elsewhere: bool
    """Whether a later step of resolution decides what the rule reports; see ``rule``."""
    stages: tuple[int, ...] = ()
    """ZeRO stages to which the rule applies; empty for all stages."""
    when: Callable[[Settings], Any] | None = attrs.field(default=None, repr=False)
    """Additional condition on the plan for the rule to apply."""
    refused_elsewhere: bool = False
    """Whether DeepSpeed or accelerate refuses what zerotune accepts; ``plan check`` reports such
    findings as errors."""

    @property
    def advice(self) -> str:
        """Fix, reason and remark, for the documentation."""
        first, _, last = ", ".join(map(str, self.stages)).rpartition(", ")
        words = _Names(stage=f"{first} or {last}" if first else last)
        fix, reason = (as_sentence(each.format_map(words)) for each in (self.fix, self.reason))
        # Without the values of a finding, a reason with placeholders only repeats the summary.
        reason = "" if "``" in reason else reason
        told = "`zerotune plan check` reports an error." if self.refused_elsewhere else ""
        return " ".join(filter(None, (fix, reason, self.remark, told)))

    def __call__(self, plan: Settings, context: Context) -> list[Decision]:
        """Return the findings of this rule for ``plan``."""
        return self.find(Case(plan=plan, context=context))

    def find(self, case: Case) -> list[Decision]:
        """Return the findings of this rule for the plan and context in ``case``."""
        if self.only_deepspeed and not case.context.uses_deepspeed:
            return []
        plan = case.plan
        if self.stages and plan.stage not in self.stages:
            return []
        if self.when is not None and not self.when(plan):
            return []
        return list(self.check(case, self))

    def finding(
        self,
        key: str,
        value: Any,
        /,
        *,
        after: Any = UNSET,
        edits: Sequence[Edits] = (),
        **words: Any,
    ) -> Decision:
        """Return a finding about one setting.

        Args:
            key: Path of the setting.
            value: Value of the setting in the plan.
            after: Value after resolution; ``None`` removes the setting, and the default is
                ``value``.
            edits: Alternative changes that mend the plan; by default those of the rule.
            **words: Values for the placeholders in ``reason`` and ``fix``, or texts that replace
                ``reason`` and ``fix``.
        """
        return Decision(
            key,
            value,
            value if after is UNSET else after,
            words.get("reason") or self.reason.format(**words),
            self.severity,
            fix=words.get("fix") or self.fix.format(**words) or fix_of(edits),
            edits=tuple(edits) or self.edits,
            rule=self.id,
        )

    def refused(self, error: PlanError) -> Decision:
        """Return the finding that corresponds to ``error``."""
        return Decision.of(error, rule=self.id, severity=self.severity)


def rule(
    rule_id: str,
    severity: Severity,
    *,
    reason: str = "",
    fix: str = "",
    edits: tuple[Edits, ...] = (),
    only_deepspeed: bool = True,
    resolved_elsewhere: bool = False,
    refused_elsewhere: bool = False,
    when: Callable[[Settings], Any] | None = None,
) -> Callable[[Callable[[Case, Rule], Findings]], Rule]:
    """Turn a function into a rule.

    The first line of the function's docstring describes the mistake. The other lines are additional
    sentences for the documentation.

    Args:
        rule_id: The rule's name.
        severity: Severity of the findings; resolution raises errors, corrects what warnings report,
            and ignores notes.
        reason: Reason for a finding, with placeholders in braces for the values of the finding.
        fix: What to write instead, with the same placeholders; by default what ``edits`` do.
        edits: Alternative changes that mend the plan.
        only_deepspeed: Whether the rule applies only to runs with DeepSpeed.
        resolved_elsewhere: Whether the choice of the optimizer, that of the precision or the
            launcher decides what the rule reports, so that resolution does not act on it.
        refused_elsewhere: Whether DeepSpeed or accelerate refuses what zerotune accepts.
        when: Condition on the plan for the rule to apply.
    """

    def made(function: Callable[[Case, Rule], Findings]) -> Rule:
        summary, _, remark = (function.__doc__ or "").strip().partition("\n")
        return Rule(
            id=rule_id,
            severity=severity,
            summary=summary,
            reason=reason,
            fix=fix or fix_of(edits),
            edits=edits,
            remark=" ".join(remark.split()),
            check=function,
            only_deepspeed=only_deepspeed,
            resolved_elsewhere=resolved_elsewhere,
            refused_elsewhere=refused_elsewhere,
            when=when,
        )

    return made


# -- Questions about a plan that several groups of rules ask.


def offload_section(plan: Settings, part: str) -> OffloadSection | None:
    """Return the section ``offload_optimizer`` or ``offload_param`` as written."""
    section: OffloadSection | None = getattr(plan.zero_optimization, f"offload_{part}", None)
    return section


def active(section: OffloadSection | None) -> bool:
    """Whether the section names a device to offload to."""
    return section is not None and section.device not in (None, "none", AUTO)


def zero_extra(plan: Settings, key: str) -> Any:
    """Return an unmodelled key of ``zero_optimization``, or ``None`` if it is not set."""
    zero = plan.zero_optimization
    return zero.extra.get(key) if zero else None


def number(value: Any) -> float | None:
    """Return ``value`` as a float if it is a finite number, otherwise ``None``."""
    return float(value) if is_number(value) else None


def integer(value: Any) -> int | None:
    """Return ``value`` as an int if it is a whole number, otherwise ``None``."""
    return int(value) if is_integer(value) else None


def clips(case: Case) -> bool:
    """Whether gradients are clipped; without a setting they are clipped to a norm of 1.0."""
    return clipping(case.plan, case.context.run).norm != 0


def wide_weight(case: Case) -> str | None:
    """Return the name of a trained weight with more than two dimensions, if there is one."""
    trained = case.context.model.trainable if case.context.model else ()
    return next((each.name for each in trained if len(each.shape) > 2), None)


def written_at(plan: Settings, path: str) -> Any:
    """Return the value at a path, or ``None`` if it is not set."""
    value: Any = plan
    for name in path.split("."):
        if isinstance(value, Section):
            kept: Mapping[str, Any] = getattr(value, "extra", {})
            value = getattr(value, name) if hasattr(value, name) else kept.get(name)
        else:
            value = value.get(name) if isinstance(value, Mapping) else None
    return value


def swaps_optimizer(plan: Settings) -> bool:
    """Whether the optimizer is offloaded to NVMe."""
    return plan.stage == 3 and plan.offload_optimizer_device == "nvme"


def swaps_parameters(plan: Settings) -> bool:
    """Whether parameters are offloaded to NVMe."""
    return plan.stage == 3 and plan.offload_param_device == "nvme"


def is_from_file(plan: Settings) -> bool:
    """Whether the plan was read from a configuration that may have trained with DeepSpeed."""
    return plan.source not in ("code", "form")


def set_twice(case: Case, this: Rule, key: str, places: tuple[str, ...]) -> Findings:
    """Yield a finding for each of ``places`` that contradicts the top-level ``key``."""
    first = getattr(case.plan, key)
    for place in places:
        second = written_at(case.plan, place)
        if is_number(first) and is_number(second) and first != second:
            yield this.finding(place, second, key=key, first=first)


# -- Rules on one setting: forbidden values, at certain stages or beside other settings.


def setting_rule(
    rule_id: str,
    severity: Severity,
    settings: Mapping[str, Callable[[Any], bool]],
    *,
    summary: str,
    reason: str,
    edits: tuple[Edits, ...],
    fix: str = "",
    stages: tuple[int, ...] = (),
    when: Callable[[Settings], Any] | None = None,
    remark: str = "",
    after: Any = UNSET,
    only_deepspeed: bool = True,
    resolved_elsewhere: bool = False,
    refused_elsewhere: bool = False,
) -> Rule:
    """Return a rule that checks the values of single settings.

    Args:
        rule_id: The rule's name.
        severity: Severity of the findings.
        settings: Mapping from the path of each setting to a function that returns true for values
            to report.
        summary: The mistake, in one sentence.
        reason: Reason for a finding; ``{stage}`` stands for the plan's stage.
        edits: Alternative changes that mend the plan.
        fix: What to write instead; by default what ``edits`` do.
        stages: ZeRO stages to which the rule applies; empty for all stages.
        when: Additional condition on the plan.
        remark: Additional sentences for the documentation.
        after: Value of the setting after resolution.
        only_deepspeed: Whether the rule applies only to runs with DeepSpeed.
        resolved_elsewhere: As for ``rule``.
        refused_elsewhere: Whether DeepSpeed or accelerate refuses what zerotune accepts.
    """

    def check(case: Case, this: Rule) -> Findings:
        plan = case.plan
        for path, refused in settings.items():
            value = written_at(plan, path)
            if refused(value):
                shown = value.to_dict() if isinstance(value, Section) else value
                yield this.finding(path, shown, after=after, stage=plan.stage)

    return Rule(
        id=rule_id,
        severity=severity,
        summary=summary,
        reason=reason,
        fix=fix or fix_of(edits),
        edits=edits,
        remark=remark,
        check=check,
        only_deepspeed=only_deepspeed,
        resolved_elsewhere=resolved_elsewhere,
        stages=stages,
        when=when,
        refused_elsewhere=refused_elsewhere,
    )


def is_one(*refused: Any) -> Callable[[Any], bool]:
    """Return a function that returns true for ``refused`` values; ``True`` is not treated as 1."""
    kinds = [(isinstance(each, bool), each) for each in refused]
    return lambda value: (isinstance(value, bool), value) in kinds


def is_other(*allowed: Any) -> Callable[[Any], bool]:
    """Return a function that returns true for values that are set and not in ``allowed``."""
    return lambda value: value not in (None, *allowed)


def is_below(limit: float) -> Callable[[Any], bool]:
    """Return a function that returns true for numbers below ``limit``."""
    return lambda value: is_number(value) and value < limit


def _scales(plan: Settings) -> bool:
    return plan.fp16 is not None and plan.fp16.enabled is True


_ZERO_PATH: Final = "zero_optimization"
_OPTIMIZER: Final = f"{_ZERO_PATH}.offload_optimizer"
_PARAM: Final = f"{_ZERO_PATH}.offload_param"
_STAGE: Final = f"{_ZERO_PATH}.stage"
_RATIO: Final = f"{_OPTIMIZER}.ratio"
_ON_CPU: Final = {f"{_OPTIMIZER}.device": "cpu"}

SETTING_RULES: Final = (
    setting_rule(
        "offload-at-stage-0",
        "warning",
        {_OPTIMIZER: active, _PARAM: active},
        stages=(0,),
        summary="Nothing is offloaded at stage 0.",
        reason="at stage 0 DeepSpeed leaves the weights on the device and builds an optimizer for "
        "the CPU, which rejects them, so the section is removed",
        edits=({_STAGE: 2},),
        after=None,
    ),
    setting_rule(
        "offload-param-below-stage-3",
        "warning",
        {_PARAM: active},
        stages=(1, 2),
        summary="Parameters can be offloaded only at stage 3, which partitions them.",
        reason="DeepSpeed ignores offload_param at stage {stage}, so the section is removed",
        edits=({_STAGE: 3},),
        after=None,
    ),
    setting_rule(
        "param-offload-alone",
        "note",
        {f"{_PARAM}.device": is_one("cpu", "nvme")},
        stages=(3,),
        when=lambda plan: plan.offload_optimizer_device == "none",
        summary="Parameters are offloaded while the larger optimizer states stay on the device.",
        reason="the optimizer states stay on the device; in mixed precision they are six times "
        "as large as the parameters",
        edits=(_ON_CPU,),
    ),
    setting_rule(
        "partial-offload-below-stage-3",
        "error",
        {_RATIO: is_below(1)},
        stages=(1, 2),
        summary="DeepSpeed supports an offload ratio below 1 only at stage 3.",
        reason="DeepSpeed can offload a part of the optimizer only at stage 3; the plan uses "
        "stage {stage}",
        edits=({_RATIO: 1.0}, {_STAGE: 3}),
    ),
    setting_rule(
        "partial-offload",
        "note",
        {_RATIO: is_below(1)},
        stages=(3,),
        summary="With an offload ratio below 1, torch's AdamW updates the weights on the device.",
        reason="torch's AdamW updates the part on the device, and DeepSpeed's AdamW updates the "
        "rest",
        edits=({_RATIO: 1.0},),
        remark="The two implementations round differently. Without zerotune, torch's AdamW keeps "
        "its initial learning rate, and no checkpoint contains its states (``backup_optimizer``). "
        "zerotune gives both implementations the same groups and states.",
    ),
    setting_rule(
        "nvme-optimizer-below-stage-3",
        "error",
        {f"{_OPTIMIZER}.device": is_one("nvme")},
        stages=(1, 2),
        summary="Below stage 3, DeepSpeed silently keeps the optimizer in host memory instead of "
        "on NVMe.",
        reason="offload of the optimizer to NVMe needs stage 3; at stage {stage} DeepSpeed "
        "silently uses host memory",
        edits=({_STAGE: 3}, _ON_CPU),
    ),
    setting_rule(
        "zero-plus-plus-below-stage-3",
        "warning",
        {
            f"{_ZERO_PATH}.zero_hpz_partition_size": is_other(AUTO, 1),
            f"{_ZERO_PATH}.zero_quantized_weights": is_other(AUTO, False),
            f"{_ZERO_PATH}.zero_quantized_nontrainable_weights": is_other(AUTO, False),
            f"{_ZERO_PATH}.zero_quantized_gradients": is_other(AUTO, False),
        },
        stages=(0, 1, 2),
        summary="ZeRO++ settings have no effect below stage 3.",
        reason="DeepSpeed ignores ZeRO++ at stage {stage}, so the key is removed",
        edits=({_STAGE: 3}, REMOVAL),
        after=None,
    ),
    setting_rule(
        "stage-3-launch-flag",
        "note",
        {"launch.zero3_init_flag": is_one(True)},
        stages=(0, 1, 2),
        summary="The launcher's ``zero3_init_flag`` has no effect below stage 3.",
        reason="the flag requests partitioned parameters, which stage {stage} does not support",
        edits=(REMOVAL, {_STAGE: 3}),
        remark="accelerate sets the flag to false with a warning.",
    ),
    setting_rule(
        "legacy-stage-1",
        "error",
        {f"{_ZERO_PATH}.legacy_stage1": is_one(True)},
        stages=(1, 2, 3),
        summary="DeepSpeed 0.5.9 removed the original implementation of stage 1.",
        reason="DeepSpeed removed this implementation of stage 1, and raises an error if the key "
        "is set",
        edits=(REMOVAL,),
    ),
    setting_rule(
        "round-robin-gradients",
        "warning",
        {f"{_ZERO_PATH}.round_robin_gradients": is_one(True)},
        stages=(1, 2),
        summary="With ``round_robin_gradients`` and several ranks, DeepSpeed confuses the master "
        "weights of parameters.",
        reason="with several ranks DeepSpeed stores the master weights in another order than its "
        "own record of their places says, so EMAs, checkpoints and exports would read wrong values",
        fix="remove this key; training results are the same",
        edits=(REMOVAL,),
        after=False,
    ),
    setting_rule(
        "gradient-scaling",
        "error",
        {"prescale_gradients": is_other(False), "gradient_predivide_factor": is_other(1)},
        stages=(2, 3),
        when=lambda plan: written_at(plan, f"{_ZERO_PATH}.reduce_scatter") is not False,
        summary="At stages 2 and 3, DeepSpeed rejects scaling gradients before the reduction.",
        reason="at stage {stage} with reduce_scatter (the default), DeepSpeed rejects scaled "
        "gradients",
        edits=(REMOVAL, {f"{_ZERO_PATH}.reduce_scatter": False}),
    ),
    setting_rule(
        "muon-reduce-scatter",
        "warning",
        {f"{_ZERO_PATH}.reduce_scatter": lambda value: value is not False},
        stages=(3,),
        when=lambda plan: plan.optimizer_name == "Muon",
        summary="DeepSpeed's own Muon cannot use ``reduce_scatter``, the default, at stage 3.",
        reason="without zerotune, DeepSpeed fails at stage 3 with "
        '"Muon and reduce scatter cannot be used together"',
        edits=({f"{_ZERO_PATH}.reduce_scatter": False}, {_STAGE: 2}),
    ),
    setting_rule(
        "one-bit-optimizer",
        "warning",
        {"optimizer.type": is_other()},
        when=lambda plan: plan.optimizer_name in ONE_BIT,
        summary="DeepSpeed 0.19 removed the 1-bit optimizers, which never ran with ZeRO.",
        reason="DeepSpeed 0.19 removed the 1-bit optimizers, and older releases reject them with "
        "ZeRO",
        edits=writes("AdamW"),
        remark="``OptimizerResolver`` replaces a 1-bit optimizer or raises an error, depending on "
        "its policy.",
    ),
    setting_rule(
        "fp16-fixed-loss-scale",
        "warning",
        {"fp16.loss_scale": lambda value: is_number(value) and value > 0},
        when=_scales,
        summary="A fixed loss scale never adapts, so gradients may overflow in every step.",
        reason="DeepSpeed skips a step whose gradients overflow, and never lowers a fixed scale "
        "afterwards",
        fix="write 0 for dynamic loss scaling, or use bf16",
        edits=(*writes(0), only_precision("bf16")),
    ),
    setting_rule(
        "dynamic-loss-scale",
        "error",
        {"fp16.loss_scale_window": is_one(0), "fp16.min_loss_scale": is_one(0)},
        when=lambda plan: _scales(plan) and written_at(plan, "fp16.loss_scale") in (None, 0, AUTO),
        summary="A dynamic loss scale needs ``loss_scale_window`` and ``min_loss_scale`` above 0.",
        reason="DeepSpeed rejects the value 0 with a dynamic loss scale",
        edits=writes(1),
        remark="It ignores both keys if fp16 is off or ``loss_scale`` is fixed.",
    ),
    setting_rule(
        "bf16-master-weights",
        "error",
        {
            "bf16.bf16_master_weights_and_grads": is_one(True),
            "bf16.bf16_optimizer_states": is_one(True),
            "fp16.fp16_master_weights_and_grads": is_one(True),
        },
        summary="Master weights must be fp32.",
        reason="EMA, checkpoints and exports need fp32 master weights",
        fix="remove this key; to save host memory, use NVMe offload or the optimizer "
        "AdamWBF16States, whose moments are bf16",
        edits=(REMOVAL,),
        remark="DeepSpeed rounds without stochastic rounding, so it loses every update that is "
        "smaller than a weight's last bit. Its bf16 states need bf16 master weights.",
    ),
    setting_rule(
        "scheduler-no-warmup",
        "warning",
        {"scheduler.params.warmup_num_steps": is_below(1)},
        only_deepspeed=False,
        resolved_elsewhere=True,
        refused_elsewhere=True,
        summary='DeepSpeed rejects a warm-up of 0 steps ("must be a positive integer").',
        reason="DeepSpeed's warm-up must be a positive number of steps",
        fix="write 1, the shortest warm-up",
        edits=writes(1),
        remark="``OptimizerResolver`` writes 1, and the learning rate starts at its peak.",
    ),
    setting_rule(
        "zenflow-without-offload",
        "error",
        {f"{_ZERO_PATH}.zenflow": is_other()},
        stages=(1, 2),
        when=lambda plan: not active(offload_section(plan, "optimizer")),
        summary="ZenFlow needs the optimizer in host memory.",
        reason="DeepSpeed rejects ZenFlow without offload of the optimizer",
        edits=(_ON_CPU, REMOVAL),
    ),
    setting_rule(
        "scheduler-range-test",
        "note",
        {
            "scheduler.type": lambda name: (
                name is not None and canonical_schedule(name) == "LRRangeTest"
            )
        },
        only_deepspeed=False,
        summary="``LRRangeTest`` searches for a learning rate and does not train a usable model.",
        reason="LRRangeTest raises the learning rate until training diverges, to find the largest "
        "usable one",
        edits=writes("WarmupLR", "WarmupDecayLR", "WarmupCosineLR"),
    ),
    setting_rule(
        "activation-checkpointing",
        "note",
        {"activation_checkpointing": bool},
        summary="``activation_checkpointing`` configures only DeepSpeed's own checkpoint function.",
        reason="the section affects only models that call deepspeed.checkpointing; "
        "diffusers models call torch's checkpoint function",
        fix="remove activation_checkpointing, and call the model's enable_gradient_checkpointing()",
        edits=(REMOVAL,),
    ),
)
"""Rules without a function, in the order they are checked."""


# -- Rules on batch sizes, accumulation and the number of ranks.


@rule("batch-triple", "error", only_deepspeed=False)
def batch_triple(case: Case, this: Rule) -> Findings:
    """The train batch size must equal micro batch size x accumulation steps x world size.

    Set only two of the three numbers, or change one so that the product is correct for the world
    size.
    """
    try:
        _ = case.batch
    except PlanConflictError as error:
        yield this.refused(error)


@rule(
    "accumulation-set-twice",
    "warning",
    reason="{key} is also set, to {first}, and takes precedence",
    edits=(REMOVAL,),
    only_deepspeed=False,
    when=attrgetter("launch"),
)
def accumulation_twice(case: Case, this: Rule) -> Findings:
    """Gradient accumulation is set both inside and outside the DeepSpeed block."""
    return set_twice(case, this, ACCUMULATION, (f"launch.{ACCUMULATION}",))


@rule(
    "world-size",
    "warning",
    reason="the launcher's file requests {asked} processes, but the plan and its batch sizes are "
    "for {world_size}",
    fix="start {asked} processes, or write {world_size} for num_processes",
    only_deepspeed=False,
    when=attrgetter("launch"),
)
def world_size(case: Case, this: Rule) -> Findings:
    """The number of processes in the launcher's file differs from the world size of the plan."""
    asked = written_at(case.plan, "launch.num_processes")
    ranks = case.context.world_size
    # accelerate writes -1 for "as many as there are devices".
    if asked is not None and asked > 0 and asked != ranks:
        edits = ({"world_size": asked}, *writes(ranks))
        key = "launch.num_processes"
        yield this.finding(key, asked, edits=edits, asked=asked, world_size=ranks)


@rule(
    "micro-batch-unset",
    "note",
    reason="no batch size is set, so the micro batch size is 1",
    fix="write the batch size per GPU, such as 1",
    edits=writes(1),
    only_deepspeed=False,
)
def micro_batch_unset(case: Case, this: Rule) -> Findings:
    """No batch size is set."""
    train, micro = case.plan.train_batch_size, case.plan.train_micro_batch_size_per_gpu
    if {train, micro} <= {None, AUTO} and case.context.run.micro_batch_size is None:
        yield this.finding(MICRO, micro)


# -- Rules on offload of the optimizer and the parameters.


_NOTEWORTHY: Final = 1024**3
"""Bytes of host memory below which rounding is not reported."""


@rule(
    "offload-without-device",
    "warning",
    reason='DeepSpeed reads a section without a device as "none", so nothing is offloaded',
    fix='write "cpu" (or "nvme" at stage 3), or remove the section',
)
def offload_without_device(case: Case, this: Rule) -> Findings:
    """An offload section without a device offloads nothing."""
    for part in ("optimizer", "param"):
        section = offload_section(case.plan, part)
        if section is not None and section.device in (None, AUTO):
            place = f"zero_optimization.offload_{part}"
            devices = ("cpu", "nvme") if case.plan.stage == 3 else ("cpu",)
            edits = (*writes(*devices), {place: UNSET})
            yield this.finding(f"{place}.device", section.device, after="none", edits=edits)


@rule(
    "partial-offload-optimizer",
    "error",
    reason="DeepSpeed supports a ratio below 1 only for AdamW in host memory, not {what}",
    edits=({_RATIO: 1.0}, {"optimizer.type": "AdamW", **_ON_CPU}),
)
def partial_offload_optimizer(case: Case, this: Rule) -> Findings:
    """An offload ratio below 1 works only with AdamW in host memory.

    torch's AdamW updates the part that stays on the device, and supports neither L2 regularisation
    nor states in bf16.
    """
    plan, section = case.plan, offload_section(case.plan, "optimizer")
    ratio = section.ratio if section is not None else None
    if section is None or plan.stage != 3 or not is_number(ratio) or float(ratio or 0) == 1:
        return
    name = plan.optimizer_name or (plan.optimizer and plan.optimizer.type)
    if section.device == "nvme" or name != "AdamW":
        what = "on NVMe" if section.device == "nvme" else f"for {name}"
        yield this.finding(_RATIO, ratio, what=what)


_SUPER_OFFLOAD: Final = f"{_OPTIMIZER}.super_offload"


@rule(
    "super-offload-accelerator",
    "error",
    reason="SuperOffload needs CUDA, but this platform trains on {accelerator}",
    fix="remove super_offload",
    edits=(REMOVAL,),
)
def super_offload_accelerator(case: Case, this: Rule) -> Findings:
    """SuperOffload runs only on NVIDIA CUDA devices."""
    platform = case.context.platform
    if not _super_offloads(case.plan) or case.plan.stage != 3 or platform is None:
        return
    if platform.accelerator not in CUDA_ALLOCATORS:
        yield this.finding(_SUPER_OFFLOAD, True, accelerator=platform.accelerator)


@rule("super-offload", "warning")
def super_offload(case: Case, this: Rule) -> Findings:
    """SuperOffload needs stage 3, and runs without overlap if gradients are clipped.

    Remove ``super_offload``, or set ``gradient_clipping`` to 0 if training is stable without
    clipping.
    """
    stage = case.plan.stage
    if not _super_offloads(case.plan) or not isinstance(stage, int):
        return
    if stage != 3:
        yield this.finding(
            _SUPER_OFFLOAD,
            True,
            reason=f"SuperOffload needs stage 3; DeepSpeed ignores it at stage {stage}",
            edits=({_STAGE: 3}, REMOVAL),
        )
    elif clips(case):
        yield this.finding(
            _SUPER_OFFLOAD,
            True,
            reason="SuperOffload overlaps CPU updates with the backward pass only without gradient "
            "clipping; with clipping, sub-groups are updated one by one after the backward pass",
            edits=(REMOVAL, {CLIPPING: 0}),
        )


def _super_offloads(plan: Settings) -> bool:
    section = offload_section(plan, "optimizer")
    return section is not None and active(section) and section.extra.get("super_offload") is True


@rule(
    "pinned-memory-rounding",
    "note",
    reason="torch rounds each pinned block up to a power of two, which adds {lost} of host memory "
    "to each rank's {blocks} of buffers",
    fix="install torch 2.13, set DS_PIN_MEMORY_BACKEND=native, or set pin_memory to false if "
    "host memory is scarce",
    edits=({f"{_OPTIMIZER}.pin_memory": False},),
)
def pinned_memory(case: Case, this: Rule) -> Findings:
    """Before torch 2.13, rounding of pinned memory wastes 16 GiB for SDXL at stage 2.

    torch rounds each pinned block up to a power of two. With torch 2.13, zerotune disables this
    rounding. The rule applies only if the model and the torch version are known.
    """
    plan, context, section = case.plan, case.context, offload_section(case.plan, "optimizer")
    here = context.platform
    if section is None or not active(section) or section.pin_memory is False:
        return
    if plan.stage not in (1, 2) or context.model is None or here is None:
        return
    if pins_exactly(here):
        return
    elements = -(-context.model.trainable_numel // max(1, context.world_size))
    staging = 2 if plan.precision in ("bf16", "fp16") else 4
    # Master weights, their gradients and the copy in the model's precision: one block each.
    blocks = [elements * width for width in (4, 4, staging)]
    lost = sum((1 << max(0, block - 1).bit_length()) - block for block in blocks)
    if lost >= _NOTEWORTHY:
        yield this.finding(
            "zero_optimization.offload_optimizer.pin_memory",
            section.pin_memory,
            lost=format_size(lost),
            blocks=format_size(sum(blocks)),
        )


# -- Rules on the optimizer and on clipping.


@rule(
    "optimizer-spelling",
    "warning",
    reason="DeepSpeed rejects this spelling, which zerotune reads as {name}",
    fix='write "{name}"',
    resolved_elsewhere=True,
    refused_elsewhere=True,
)
def optimizer_spelling(case: Case, this: Rule) -> Findings:
    """DeepSpeed does not know a spelling such as ``adamw_torch`` of an optimizer that it has.

    It knows its own optimizers in any case, and the class names of ``torch.optim``.
    """
    plan = case.plan
    written, name = plan.optimizer.type if plan.optimizer else None, plan.optimizer_name
    if written is None or name is None or name in ONE_BIT:
        return
    family = entry_of(name).family
    same = written.lower() == name.lower() if family == "deepspeed" else written == name
    if family in ("deepspeed", "torch") and not same:
        yield this.finding("optimizer.type", written, edits=writes(name), name=name)


@rule(
    "optimizer-lr-unset",
    "warning",
    reason="DeepSpeed's default learning rate for {name} is 0.001, but zerotune's is {lr}{decay}",
    fix="write {lr}, or 0.001 to train as DeepSpeed does",
    resolved_elsewhere=True,
)
def optimizer_lr_unset(case: Case, this: Rule) -> Findings:
    """Without ``lr``, Adam and AdamW train with another learning rate than in DeepSpeed.

    Without any argument, the weight decay of AdamW differs too. Plans made in code have no finding.
    """
    params = written_at(case.plan, "optimizer.params") or {}
    name = case.plan.optimizer_name if is_from_file(case.plan) and case.plan.optimizer else None
    if name in ("Adam", "AdamW") and "lr" not in params and case.context.run.lr is None:
        defaults = {each.name: each.default for each in entry_of(name).parameters}
        lr, decay = defaults["lr"], defaults["weight_decay"]
        more = "" if params or not decay else f", with a weight decay of {decay:g} instead of 0"
        words = {"name": name, "lr": f"{lr:g}", "decay": more}
        yield this.finding("optimizer.params.lr", None, edits=writes(lr, 1e-3), **words)


@rule(
    "muon-convolutions",
    "warning",
    reason="without zerotune, DeepSpeed's Muon fails on weights with more than two dimensions, "
    "such as {wide}",
    edits=writes("AdamW"),
)
def muon_convolutions(case: Case, this: Rule) -> Findings:
    """DeepSpeed's own Muon fails on convolution weights at stages 2 and 3.

    Alternatively, let Muon's auxiliary Adam update convolutions. The rule applies only if
    the model is known.
    """
    plan, wide = case.plan, wide_weight(case)
    if plan.optimizer_name == "Muon" and wide is not None and plan.stage in (2, 3):
        yield this.finding("optimizer.type", written_at(plan, "optimizer.type"), wide=wide)


@rule(
    "clipping-set-twice",
    "warning",
    reason="{key} is also set, to {first}, and takes precedence",
    edits=(REMOVAL,),
    only_deepspeed=False,
)
def clipping_twice(case: Case, this: Rule) -> Findings:
    """Gradient clipping is set both at the top level and elsewhere."""
    places = ("launch.gradient_clipping", "optimizer.params.max_grad_norm")
    return set_twice(case, this, CLIPPING, places)


@rule("clipping-in-optimizer", "error", only_deepspeed=False, resolved_elsewhere=True)
def clipping_in_the_optimizer(case: Case, this: Rule) -> Findings:
    """DeepSpeed rejects ``max_grad_norm`` among the arguments of the optimizer.

    Write ``gradient_clipping`` at the top level instead.
    """
    error = clipping_in_optimizer(written_at(case.plan, "optimizer.params") or {})
    if error is not None:
        yield this.refused(error)


@rule(
    "clipping-unset",
    "note",
    reason="no gradient clipping is set, so gradients are clipped to a norm of 1.0; older "
    "DeepSpeed releases did not clip",
    fix="write a maximum norm, such as 1.0, or write 0 to disable clipping",
    edits=writes(1.0, 0),
    only_deepspeed=False,
)
def clipping_unset(case: Case, this: Rule) -> Findings:
    """No gradient clipping is set, and DeepSpeed's default changed from 0 to 1.0."""
    if not clipping_sources(case.plan, case.context.run):
        yield this.finding(CLIPPING, None)


# -- Rules on bf16, fp16 and the precisions of the platform.


@rule("precision-conflict", "error", only_deepspeed=False)
def precision_conflict(case: Case, this: Rule) -> Findings:
    """Only one of bf16 and fp16 may be enabled, and the launcher's file must not contradict it.

    Disable one of the two precisions, and set the launcher's ``mixed_precision`` to the other.
    """
    plan = case.plan
    written = {name: written_at(plan, f"{name}.enabled") for name in ("bf16", "fp16")}
    if all(enabled is True for enabled in written.values()):
        yield this.finding(
            "fp16.enabled",
            True,
            reason="bf16.enabled is true too, but DeepSpeed accepts only one precision",
            fix="set fp16.enabled or bf16.enabled to false; bf16 needs no loss scaling",
            edits=({"fp16.enabled": False}, {"bf16.enabled": False}),
        )
        return
    asked = [name for name, enabled in written.items() if enabled is True]
    key, launched = "launch.mixed_precision", written_at(plan, "launch.mixed_precision")
    if launched == "fp8":
        reason = "zerotune does not train in fp8"
        edits = writes(*asked) or writes("bf16", "fp16", "no")
        yield this.finding(key, launched, reason=reason, edits=edits)
    refused = launched in written and written[launched] is False
    if launched in ("bf16", "fp16", "fp32") and (refused or (asked and asked != [launched])):
        says = f"{asked[0]}.enabled = true" if asked else f"{launched}.enabled = false"
        yield this.finding(
            key,
            launched,
            reason=f"contradicts {says} in the DeepSpeed configuration",
            fix="set both to the same precision, or remove mixed_precision from the launcher's "
            "file",
            edits=(REMOVAL,),
        )


@rule("precision-unsupported", "error", only_deepspeed=False)
def precision_unsupported(case: Case, this: Rule) -> Findings:
    """The platform does not support the requested precision.

    Request a supported precision, or write ``"auto"``. The rule applies only if the
    platform is known.
    """
    plan = case.plan
    both = all(section and section.enabled is True for section in (plan.bf16, plan.fp16))
    # Another rule reports contradictory settings.
    if case.context.platform is None or both or written_at(plan, "launch.mixed_precision") == "fp8":
        return
    try:
        _ = case.precision
    except PlanError as error:
        yield this.refused(error)


@rule(
    "fp16-on-cpu",
    "warning",
    reason="DeepSpeed's CPU accelerator does not support fp16 on this machine, so bf16 is used",
    fix='write bf16, or "auto"',
    edits=(only_precision("bf16"), *writes(AUTO)),
    resolved_elsewhere=True,
)
def fp16_on_cpu(case: Case, this: Rule) -> Findings:
    """DeepSpeed's CPU accelerator supports fp16 only if torch has native fp16 arithmetic.

    bf16 uses the same memory as fp16 and needs no loss scaling.
    """
    here = case.context.platform
    if case.plan.precision == "fp16" and here and rehearses_in_bf16(here):
        yield this.finding("fp16.enabled", True)


@rule(
    "bf16-emulated",
    "note",
    reason="this CPU has no bf16 arithmetic (AVX512_BF16, AMX), and emulated bf16 is many times "
    "slower than fp32",
    fix='set bf16.enabled to false or "auto", unless this run tests a bf16 configuration',
    edits=({"bf16.enabled": False}, {"bf16.enabled": AUTO}),
    only_deepspeed=False,
)
def bf16_emulated(case: Case, this: Rule) -> Findings:
    """A CPU without bf16 arithmetic emulates bf16, which is slow."""
    here = case.context.platform
    if here is not None and here.bf16 and not here.native_bf16 and case.plan.precision == "bf16":
        yield this.finding("bf16.enabled", True)


# -- Rules on the learning-rate schedule and the length of the run.


_CYCLE_DEFAULT: Final = 2000
"""``cycle_first_step_size`` of DeepSpeed's ``OneCycle``."""


def schedule_params(plan: Settings) -> Mapping[str, Any]:
    """Return the arguments of the schedule as written."""
    return (plan.scheduler.params if plan.scheduler else None) or {}


def schedule_name(plan: Settings) -> str | None:
    """Return the canonical name of the schedule; ``None`` if it is unset or unknown."""
    name = plan.scheduler.type if plan.scheduler else None
    return canonical_schedule(name) if name else None


@rule(
    "scheduler-warmup-too-long",
    "warning",
    reason="the warm-up is not shorter than {what} ({end}), so the learning rate never reaches its "
    "peak",
    fix="write fewer warm-up steps, such as {tenth}; count optimizer steps, not micro batches",
    only_deepspeed=False,
    when=attrgetter("scheduler"),
)
def warmup_too_long(case: Case, this: Rule) -> Findings:
    """The warm-up is at least as long as the schedule or the run."""
    params = schedule_params(case.plan)
    warmup = number(params.get("warmup_num_steps"))
    ends = {
        "total_num_steps": number(params.get("total_num_steps")),
        "the run's steps": case.context.run.total_steps,
    }
    for what, end in ends.items():
        if warmup is not None and warmup >= 1 and end is not None and warmup >= end:
            key, written = "scheduler.params.warmup_num_steps", params["warmup_num_steps"]
            tenth = max(1, int(end // 10))
            edits, end_text = writes(tenth), f"{end:g}"
            yield this.finding(key, written, edits=edits, what=what, end=end_text, tenth=tenth)
            return


@rule(
    "scheduler-total",
    "warning",
    reason="the run has {run_steps} optimizer steps, so {effect}",
    fix='write {run_steps}, or "auto"',
    only_deepspeed=False,
    when=attrgetter("scheduler"),
)
def scheduler_total(case: Case, this: Rule) -> Findings:
    """``total_num_steps`` differs from the number of optimizer steps in the run.

    A shorter schedule continues with its final learning rate (0 for ``WarmupDecayLR``). A longer
    schedule never reaches its final learning rate.
    """
    params, run = schedule_params(case.plan), case.context.run.total_steps
    total = number(params.get("total_num_steps"))
    if total is None or run is None or total == run:
        return
    end = "0" if schedule_name(case.plan) == "WarmupDecayLR" else "its smallest value"
    effect = (
        f"the learning rate stays at {end} for the last {run - total:g} steps"
        if total < run
        else f"the run ends {total - run:g} steps before the learning rate reaches its final value"
    )
    accumulation = case.context.run.gradient_accumulation_steps or 1
    for factor, what in (
        (accumulation, "micro batches"),
        (case.context.world_size, "steps of each rank"),
    ):
        if factor > 1 and total == run * factor:
            effect += f" (total_num_steps seems to count {what}: {factor} x {run})"
            break
    key = "scheduler.params.total_num_steps"
    edits = writes(run, AUTO)
    yield this.finding(key, params["total_num_steps"], edits=edits, run_steps=run, effect=effect)


@rule(
    "scheduler-cycle",
    "warning",
    reason="the cycle has {first} + {second} steps, but the run has only {steps}, so the learning "
    "rate never returns to its minimum",
    fix="write at most {half_the_run}",
    only_deepspeed=False,
    when=attrgetter("scheduler"),
)
def scheduler_cycle(case: Case, this: Rule) -> Findings:
    """A ``OneCycle`` that is longer than the run never returns to its minimum learning rate.

    ``cycle_second_step_size`` defaults to ``cycle_first_step_size``.
    """
    params, run = schedule_params(case.plan), case.context.run.total_steps
    if schedule_name(case.plan) != "OneCycle" or run is None:
        return
    written = params.get("cycle_first_step_size")
    first = _CYCLE_DEFAULT if written is None else number(written)
    second = params.get("cycle_second_step_size")
    down = first if second is None else number(second)
    if first is not None and down is not None and first + down > run:
        yield this.finding(
            "scheduler.params.cycle_first_step_size",
            written,
            first=f"{first:g}",
            second=f"{down:g}",
            steps=run,
            half_the_run=max(1, run // 2),
            edits=writes(max(1, run // 2)),
        )


_DECAY_PEAK: Final = 1e-3
"""Default ``warmup_max_lr`` of DeepSpeed's ``WarmupDecayLR``."""


@rule(
    "scheduler-peak-unset",
    "warning",
    reason=f"DeepSpeed's WarmupDecayLR peaks at {_DECAY_PEAK:g} if this key is missing, but "
    "zerotune's peaks at the optimizer's learning rate",
    fix=f"write {{lr}}, or {_DECAY_PEAK:g} to train as DeepSpeed does",
    resolved_elsewhere=True,
    when=attrgetter("scheduler"),
)
def scheduler_peak_unset(case: Case, this: Rule) -> Findings:
    """Without ``warmup_max_lr``, ``WarmupDecayLR`` has another peak than in DeepSpeed.

    Plans made in code have no finding.
    """
    missing = is_from_file(case.plan) and "warmup_max_lr" not in schedule_params(case.plan)
    lr = number(written_at(case.plan, "optimizer.params.lr"))
    if schedule_name(case.plan) == "WarmupDecayLR" and missing and lr != _DECAY_PEAK:
        shown = f'"{AUTO}"' if lr is None else f"{lr:g}"
        edits = writes(AUTO if lr is None else lr, _DECAY_PEAK)
        yield this.finding("scheduler.params.warmup_max_lr", None, edits=edits, lr=shown)


@rule(
    "scheduler-warmup-number",
    "warning",
    reason="DeepSpeed rejects a number of warm-up steps with a point, an exponent or quotes",
    fix="write {steps}",
    only_deepspeed=False,
    resolved_elsewhere=True,
    refused_elsewhere=True,
    when=attrgetter("scheduler"),
)
def scheduler_warmup_number(case: Case, this: Rule) -> Findings:
    """DeepSpeed rejects a warm-up such as 1e3 or "100" ("must be a positive integer")."""
    written = schedule_params(case.plan).get("warmup_num_steps")
    steps = as_number(written)
    if steps is not None and not is_integer(written) and steps == int(steps):
        key = "scheduler.params.warmup_num_steps"
        yield this.finding(key, written, edits=writes(int(steps)), steps=int(steps))


# -- Rules on NVMe.


_LARGE_POOL: Final = 4 * 1024**3
"""Minimum bytes of pinned swap buffers for a warning."""
_BUFFER_COUNT: Final = "zero_optimization.offload_optimizer.buffer_count"


def swap_buffers(plan: Settings) -> int | None:
    """Return ``buffer_count`` if it is set and an optimizer with two moments is swapped."""
    section = offload_section(plan, "optimizer")
    if section is None:
        return None
    two = entry_of(plan.optimizer_name).states_per_weight() >= 2
    return integer(section.buffer_count) if two else None


@rule(
    "nvme-path-unset",
    "note",
    reason="no folder is set, so each run creates a temporary folder below the swap root",
    fix="write the path to a folder on a fast disk",
)
def nvme_path_unset(case: Case, this: Rule) -> Findings:
    """No folder is set for NVMe offload; without zerotune, DeepSpeed fails at startup."""
    for part in ("optimizer", "param"):
        section = offload_section(case.plan, part)
        launched = getattr(case.plan.launch, f"offload_{part}_path", None)
        if section is None or section.device != "nvme" or case.plan.stage != 3 or launched:
            continue
        if section.nvme_path in (None, AUTO):
            yield this.finding(f"zero_optimization.offload_{part}.nvme_path", section.nvme_path)


@rule(
    "nvme-optimizer-buffers",
    "error",
    reason="DeepSpeed requires one buffer each for the weight, the gradient and the two moments",
    fix=f'write at least {OPTIMIZER_BUFFERS}, or "{AUTO}"',
    edits=writes(OPTIMIZER_BUFFERS, AUTO),
    when=swaps_optimizer,
)
def nvme_optimizer_buffers(case: Case, this: Rule) -> Findings:
    """The swap pool of an optimizer with two moments needs at least four buffers."""
    written = swap_buffers(case.plan)
    if written is not None and written < OPTIMIZER_BUFFERS:
        yield this.finding(_BUFFER_COUNT, written)


@rule(
    "nvme-pipeline-buffers",
    "warning",
    reason="DeepSpeed runs out of swap buffers if there is more than one sub-group",
    fix=f'write at least {{need}}, or "{AUTO}"',
    when=swaps_optimizer,
)
def nvme_pipeline_buffers(case: Case, this: Rule) -> Findings:
    """Pipelined swapping needs four extra buffers to read ahead, and another four to write back.

    The pool needs 8 buffers with either ``pipeline_read`` or ``pipeline_write``, and 12 with both.
    """
    section, written = offload_section(case.plan, "optimizer"), swap_buffers(case.plan)
    if section is None or written is None:
        return
    need = optimizer_buffers(section)
    if OPTIMIZER_BUFFERS <= written < need:
        yield this.finding(_BUFFER_COUNT, written, need=need, edits=writes(need, AUTO))


@rule(
    "nvme-sub-group-size",
    "warning",
    reason="the swap pool has {buffers} buffers, each as large as the largest sub-group in fp32, "
    "and uses {pool} of host memory on each rank",
    edits=writes(SUB_GROUP_NVME, AUTO),
    when=swaps_optimizer,
)
def nvme_sub_group_size(case: Case, this: Rule) -> Findings:
    """NVMe swap buffers use host memory: 4 bytes x buffers x elements of the largest sub-group.

    With DeepSpeed's default of 1e9 elements and four buffers, a model of 1e9 parameters needs 15
    GiB.
    """
    plan, model = case.plan, case.context.model
    zero, section = plan.zero_optimization, offload_section(plan, "optimizer")
    if zero is None or section is None:
        return
    size = integer(zero.sub_group_size)
    if size is None:
        return
    buffers = integer(section.buffer_count) or optimizer_buffers(section)
    largest = largest_sub_group(model, max(1, case.context.world_size), size) if model else size
    pool = buffers * largest * 4
    if pool >= _LARGE_POOL:
        key = "zero_optimization.sub_group_size"
        yield this.finding(key, size, buffers=buffers, pool=format_size(pool))


@rule(
    "nvme-param-buffers",
    "warning",
    reason="with gradient checkpointing, {gathered} weights of a recomputed block are gathered at "
    "once, and each needs a swap buffer",
    fix=f'write at least {{need}}, or "{AUTO}"',
    when=swaps_parameters,
)
def nvme_param_buffers(case: Case, this: Rule) -> Findings:
    """A recomputed block needs one swap buffer for each of its parameters on NVMe.

    With fewer buffers, the first backward pass with gradient checkpointing fails.
    """
    section, swapping = offload_section(case.plan, "param"), case.swapping(case.plan.aio)
    zero = case.plan.zero_optimization
    if zero is None or section is None or swapping is None:
        return
    written, gathered = integer(section.buffer_count), swapping.gathered(recomputed=True)
    if written and written < gathered and case.swaps_parameters(zero, case.plan.aio):
        key = "zero_optimization.offload_param.buffer_count"
        need = swapping.buffers
        edits = writes(need, AUTO)
        yield this.finding(key, written, edits=edits, gathered=gathered, need=need)


@rule(
    "nvme-param-prefetch",
    "warning",
    reason=NO_PREFETCH,
    edits=writes(0, AUTO),
    when=swaps_parameters,
)
def nvme_param_prefetch(case: Case, this: Rule) -> Findings:
    """Prefetching parameters from NVMe fails in the second step.

    DeepSpeed raises "already assigned swap buffer"; zerotune therefore disables prefetching.
    """
    plan, zero = case.plan, case.plan.zero_optimization
    written = integer(zero.stage3_prefetch_bucket_size) if zero else None
    if zero is not None and written and case.swaps_parameters(zero, plan.aio):
        yield this.finding("zero_optimization.stage3_prefetch_bucket_size", written, after=0)


@rule(
    "number-as-text",
    "note",
    reason="the value is a number in quotes, and is read as a number",
    fix="write {number}",
    only_deepspeed=False,
)
def number_as_text(case: Case, this: Rule) -> Findings:
    """An argument of the optimizer or the schedule is a number in quotes.

    Without zerotune, DeepSpeed treats the argument as text.
    """
    for name in ("optimizer", "scheduler"):
        for key, value in (written_at(case.plan, f"{name}.params") or {}).items():
            if isinstance(value, str) and as_number(value) is not None:
                edits = writes(as_number(value))
                path = f"{name}.params.{key}"
                yield this.finding(path, value, edits=edits, number=value.strip())


@rule(
    "launcher-file",
    "warning",
    reason="`accelerate launch` rejects {what}",
    fix="{write}",
    only_deepspeed=False,
    resolved_elsewhere=True,
    refused_elsewhere=True,
    when=attrgetter("launch"),
)
def launcher_file(case: Case, this: Rule) -> Findings:
    """``accelerate launch`` rejects settings that zerotune reads.

    It needs ``distributed_type`` in capitals, ``num_processes``, and ``gpu_ids`` as text.
    """
    launch = case.plan.launch
    kind = launch.distributed_type if launch else None
    if launch is None or kind is None or kind.upper() != "DEEPSPEED":
        return
    ids, ranks = launch.extra.get("gpu_ids"), case.context.world_size
    if kind != "DEEPSPEED":
        key, words = (
            "launch.distributed_type",
            {"what": "this spelling", "write": "write DEEPSPEED"},
        )
        yield this.finding(key, kind, edits=writes("DEEPSPEED"), **words)
    if launch.num_processes in (None, -1):
        words = {
            "what": "a file that does not set the number of processes",
            "write": f"write the number of processes, such as {ranks}, or pass --num_processes",
        }
        key = "launch.num_processes"
        yield this.finding(key, launch.num_processes, edits=writes(ranks), **words)
    if ids is not None and not isinstance(ids, str):
        text = device_list(ids)
        words = {"what": "device numbers that are not text", "write": f'write "{text}"'}
        yield this.finding("launch.gpu_ids", ids, edits=writes(text), **words)


# -- Rules on ``zero_optimization``, on removed and on unknown keys.


@rule(
    "hpz-partition-size",
    "error",
    reason="DeepSpeed rejects partitions of {size} ranks, because {world_size} ranks cannot be "
    "divided into them",
    fix="write {divisor}",
)
def hpz_partition_size(case: Case, this: Rule) -> Findings:
    """At stage 3, ``zero_hpz_partition_size`` must divide the number of ranks."""
    zero, ranks = case.plan.zero_optimization, case.context.world_size
    size = integer(zero.zero_hpz_partition_size) if zero else None
    if case.plan.stage == 3 and size and ranks % min(size, ranks):
        key = f"{_ZERO_PATH}.zero_hpz_partition_size"
        divisor = next(each for each in range(size, 0, -1) if ranks % each == 0)
        words = {"size": size, "world_size": ranks, "divisor": divisor}
        yield this.finding(key, size, edits=writes(divisor), **words)


_LARGE_BUCKET: Final = 512 * 1024**2
"""Minimum bytes of reduce buckets for a note; ``"auto"`` uses a tenth."""


_TWO_BUCKETS: Final = {
    True: ", because overlap_comm needs two buckets",
    False: ", because zerotune turns overlap_comm on for offload, which needs two buckets",
}


@rule(
    "stage-auto",
    "warning",
    reason="without zerotune, DeepSpeed silently trains at stage 0; zerotune chooses stage "
    "{chosen}",
    edits=writes(0, 1, 2, 3),
)
def stage_auto(case: Case, this: Rule) -> Findings:
    """DeepSpeed reads a stage of ``"auto"`` as 0.

    Resolution chooses stage 2, or stage 3 if the offload needs it.
    """
    plan = case.plan
    if plan.stage != AUTO:
        return
    away = {plan.offload_param_device, plan.offload_optimizer_device}
    three = "nvme" in away or plan.offload_param_device == "cpu"
    chosen = "3, which the offload needs" if three else "2, which partitions all but weights"
    key = "zero_optimization.stage"
    yield this.finding(key, AUTO, after=3 if three else 2, chosen=chosen)


@rule("removed-section", "error", reason="DeepSpeed 0.19 removed {what}", edits=(REMOVAL,))
def removed_section(case: Case, this: Rule) -> Findings:
    """A section that DeepSpeed 0.19 removed is an error unless an older DeepSpeed is installed."""
    here = case.context.platform
    release = re.match(r"(\d{1,9})\.(\d{1,9})", here.versions.get("deepspeed", "") if here else "")
    if release is not None and (int(release[1]), int(release[2])) < (0, 19):
        return
    zero = case.plan.zero_optimization
    places = (
        ("", case.plan.extra, known_keys.REMOVED),
        ("zero_optimization.", zero.extra if zero else {}, known_keys.REMOVED_ZERO),
    )
    for prefix, extra, removed in places:
        for key in sorted(extra.keys() & removed.keys()):
            yield this.finding(f"{prefix}{key}", extra[key], what=removed[key])


@rule("unknown-key", "error", only_deepspeed=False)
def unknown_keys(case: Case, this: Rule) -> Findings:
    """DeepSpeed silently ignores unknown top-level keys; zerotune rejects them.

    Correct the spelling. Keys that begin with an underscore are kept as comments.
    """
    plan = case.plan
    known = {attribute.name for attribute in modelled(Settings)} | plan.passed_through
    for key, value in plan.extra.items():
        if key not in plan.passed_through and not key.startswith("_") and plan.source == "code":
            yield this.refused(unknown_key(Settings, key, value, key, known))


_PARALLEL: Final = {
    "sequence_parallel_size": "ranks that share one sequence",
    "tensor_parallel.autotp_size": "ranks that share one matrix",
    "tensor_parallel.tensor_parallel.tp_size": "ranks that share one matrix",
    "tensor_parallel.tp.tp_size": "ranks that share one matrix",
    "pipeline.stages": "stages of a pipeline",
    "expert_parallel.autoep_size": "ranks that share the experts",
    "hybrid_engine.inference_tp_size": "ranks that share one matrix",
}
"""Description of what each key counts, by path; a count above 1 is not data parallelism."""
_PARALLELISM_CONFIG: Final = {
    "tp_size": "ranks that share one matrix",
    "cp_size": "ranks that share one context",
    "sp_size": "ranks that share one sequence",
}
"""Keys of accelerate's ``parallelism_config``; ``accelerate config`` adds a prefix to each."""


@rule(
    "parallelism",
    "error",
    reason="the key requests {value} {counted}, but zerotune supports only data parallelism, "
    "which its batch sizes assume",
    edits=(REMOVAL, *writes(1)),
    only_deepspeed=False,
)
def parallelism(case: Case, this: Rule) -> Findings:
    """Only data parallelism is supported: sequences, matrices and layers are not split.

    With ``sequence_parallel_size: 2`` DeepSpeed counts only half of the ranks for the train batch
    size, but the model itself must split the sequences.
    """
    section = "parallelism_config"
    places = {path: (path, counted) for path, counted in _PARALLEL.items()}
    for name, counted in _PARALLELISM_CONFIG.items():
        for path in (f"{section}.{name}", f"{section}.{section}_{name}"):
            places[path] = f"launch.{path}", counted
    for path, (written, counted) in places.items():
        value = written_at(case.plan, written)
        asked = as_number(value)
        if asked is not None and asked > 1:
            yield this.finding(path, value, value=value, counted=counted)


@rule("passed-through", "error")
def passed_through(case: Case, this: Rule) -> Findings:
    """Sections that zerotune passes through must be valid for DeepSpeed.

    Correct the value as the finding says. Names, types and ranges come from the schema passed to
    ``check``, by default the schema of DeepSpeed 0.19.8.
    """
    plan, schema = case.plan, passed_schema()
    if case.context.schema is not None:
        schema = case.context.schema.get("properties", {})
    zero = plan.zero_optimization
    known = schema.get("zero_optimization", {}).get("properties", {})
    places: list[tuple[str, Section | None, Mapping[str, Any]]] = [
        ("", plan, schema),
        ("zero_optimization", zero, known),
    ]
    for part in ("offload_optimizer", "offload_param"):
        inside = known.get(part, {})
        branches = [inside, *inside.get("anyOf", ())]
        keys: Any = next((each["properties"] for each in branches if "properties" in each), {})
        places.append((f"zero_optimization.{part}", getattr(zero, part, None), keys))
    for prefix, section, keys in places:
        extra: Mapping[str, Any] = getattr(section, "extra", {})
        for key, value in extra.items():
            path = join(prefix, key)
            if prefix.endswith("offload_param") and key not in keys:
                yield this.refused(misplaced_key(path, value, "offload_optimizer"))
            elif key in keys:
                for each in faults(value, keys[key], path):
                    yield attrs.evolve(each, rule=this.id)


@rule(
    "gradient-norm",
    "error",
    reason="DeepSpeed accepts compute_grad_norm: false only with {needs}",
    edits=(REMOVAL,),
)
def gradient_norm(case: Case, this: Rule) -> Findings:
    """``compute_grad_norm: false`` needs stage 1 or 2, no clipping and no optimizer offload."""
    plan = case.plan
    if zero_extra(plan, "compute_grad_norm") is not False or plan.stage == AUTO:
        return
    problems = {
        f"stage 1 or 2, but this is stage {plan.stage}": plan.stage not in (1, 2),
        "gradient_clipping 0, because clipping measures the norm": clips(case),
        "the optimizer on the device": active(offload_section(plan, "optimizer")),
    }
    needs = next((needs for needs, broken in problems.items() if broken), None)
    if needs is not None:
        yield this.finding("zero_optimization.compute_grad_norm", False, needs=needs)


@rule(
    "gradient-sum",
    "error",
    reason="DeepSpeed does not support summed gradients {where}",
    edits=(REMOVAL, *writes("mean")),
)
def gradient_sum(case: Case, this: Rule) -> Findings:
    """DeepSpeed cannot sum gradients over ranks at stage 3, with ZenFlow or with DeepCompile."""
    plan, value = case.plan, case.plan.extra.get("gradient_allreduce_op")
    if not isinstance(value, str) or value.lower() != "sum":
        return
    refusals = {
        "with DeepCompile": written_at(plan, "compile.deepcompile") is True,
        "with ZenFlow": zero_extra(plan, "zenflow") is not None,
        "at stage 3": plan.stage == 3,
    }
    where = next((where for where, holds in refusals.items() if holds), None)
    if where is not None:
        yield this.finding("gradient_allreduce_op", value, where=where)


@rule(
    "zenflow-convolutions",
    "error",
    reason="ZenFlow corrupts weights with more than two dimensions, such as {wide}",
    fix="remove zenflow",
    edits=(REMOVAL,),
)
def zenflow(case: Case, this: Rule) -> Findings:
    """ZenFlow fails on convolution weights, or corrupts them.

    ZenFlow selects columns of matrices (``num_row, num_col``). It treats other shapes as one row,
    or fails to transpose them. The rule applies only if the model is known.
    """
    section, wide = zero_extra(case.plan, "zenflow"), wide_weight(case)
    if section is not None and wide is not None:
        yield this.finding("zero_optimization.zenflow", section, wide=wide)


@rule(
    "large-reduce-bucket",
    "note",
    reason="the bucket uses {cost} of device memory{doubled}",
    edits=writes(REDUCE_BUCKET, AUTO),
)
def large_bucket(case: Case, this: Rule) -> Findings:
    """A reduce bucket uses device memory; below stage 3, ``overlap_comm`` doubles the amount.

    DeepSpeed's default of 5e8 elements uses 0.93 GiB in 16 bits, and 1.86 GiB with ``overlap_comm``
    at stages 1 and 2. With ``"auto"`` the bucket is as large as the largest tensor.
    """
    plan, zero = case.plan, case.plan.zero_optimization
    size = integer(zero.reduce_bucket_size) if zero else None
    if zero is None or size is None or plan.stage not in (1, 2, 3):
        return
    offloads = active(offload_section(plan, "optimizer"))
    if zero.contiguous_gradients is False and not offloads:
        return
    # As resolution chooses if overlap_comm is not set.
    overlaps = zero.overlap_comm is True or (zero.overlap_comm is not False and offloads)
    buckets = 2 if overlaps and plan.stage != 3 else 1
    cost = buckets * size * (4 if plan.precision == "fp32" else 2)
    if cost >= _LARGE_BUCKET:
        yield this.finding(
            "zero_optimization.reduce_bucket_size",
            size,
            cost=format_size(cost),
            doubled=_TWO_BUCKETS[zero.overlap_comm is True] if buckets == 2 else "",
        )


# -- The rules, in the order they are checked.
#
# Their statements about DeepSpeed come from the code of 0.19.8, or from runs with it.


RULES: Final = (
    batch_triple,
    accumulation_twice,
    world_size,
    micro_batch_unset,
    offload_without_device,
    partial_offload_optimizer,
    super_offload_accelerator,
    super_offload,
    pinned_memory,
    optimizer_spelling,
    optimizer_lr_unset,
    muon_convolutions,
    clipping_twice,
    clipping_in_the_optimizer,
    clipping_unset,
    precision_conflict,
    precision_unsupported,
    fp16_on_cpu,
    bf16_emulated,
    warmup_too_long,
    scheduler_total,
    scheduler_cycle,
    scheduler_peak_unset,
    scheduler_warmup_number,
    nvme_path_unset,
    nvme_optimizer_buffers,
    nvme_pipeline_buffers,
    nvme_sub_group_size,
    nvme_param_buffers,
    nvme_param_prefetch,
    number_as_text,
    launcher_file,
    hpz_partition_size,
    stage_auto,
    removed_section,
    unknown_keys,
    parallelism,
    passed_through,
    gradient_norm,
    gradient_sum,
    zenflow,
    large_bucket,
    *SETTING_RULES,
)
"""Every rule, in the order they are checked."""

FIRST: Final = (stage_auto, offload_without_device)
"""Rules whose corrections other rules depend on, applied first."""

REPAIRS: Final = tuple(
    each
    for each in RULES
    if each.severity != "note" and not each.resolved_elsewhere and each not in FIRST
)
"""Other rules that reject a plan or change it during resolution."""


def all_rules() -> tuple[Rule, ...]:
    """Return all rules in the order of checking."""
    return RULES


def check_plan(plan: Settings, context: Context) -> tuple[Decision, ...]:
    """Return all findings of the rules: errors first, then in the order of the rules."""
    return _findings(Case(plan=plan, context=context), RULES)


def _findings(case: Case, rules: tuple[Rule, ...]) -> tuple[Decision, ...]:
    findings = [finding for each in rules for finding in each.find(case)]
    names = case.plan.names
    if names:
        findings = [attrs.evolve(each, written=name_of(each.key, names)) for each in findings]
    return tuple(worst_first(findings))


def resolve(
    requested: Settings,
    context: Context,
    *,
    streamed: bool | Streaming | None = None,
    engine: EngineName | None = None,
    update: DeviceUpdate | None = None,
    options: ChoiceOptions = DEFAULTS,
) -> Resolved:
    """Resolve a plan: apply every rule once, fill in all values, choose optimizer and engine."""
    log = Log(decisions=[*requested.decisions])
    case = prepared(requested, context, log)
    for each in FIRST:
        case = attrs.evolve(case, plan=_repaired(case, (each,), log))
    case = attrs.evolve(case, plan=without_inactive_offload(case.plan))
    plan, by_weight = _repaired(case, REPAIRS, log), update is not None
    resolved = filled(requested, plan, case, log, options, by_weight=by_weight)
    if streamed is None and engine is None and update is None:
        return resolved
    resolved = with_engine(attrs.evolve(resolved, streamed=streamed, engine=engine, update=update))
    if by_weight and resolved.update is None:
        return resolved.with_choice(chosen_for(resolved, options))
    return resolved


def _repaired(case: Case, rules: tuple[Rule, ...], log: Log) -> Settings:
    """Return the plan with the corrections of the rules; raise their errors."""
    plan, findings = case.plan, _findings(case, rules)
    raise_all([finding.as_error() for finding in findings if finding.severity == "error"])
    for finding in findings:
        log.decisions.append(finding)
        if finding.after is not finding.before:
            plan = _with_setting(plan, finding.key.split("."), finding.after)
    return plan


def _with_setting(section: SectionT, path: list[str], value: Any) -> SectionT:
    name, *below = path
    new = _with_setting(getattr(section, name), below, value) if below else value
    return evolved(section, **{name: new})


# -- All errors of a plan: from the rules, from resolution, and from the optimizer's choice.


@attrs.frozen(kw_only=True)
class Inspection:
    """Findings about a plan, returned by ``DeepSpeedPlan.inspect``."""

    findings: tuple[Decision, ...]
    """Findings of the rules, errors first."""
    refusals: tuple[Decision, ...] = ()
    """Errors of later steps; ``rule`` names the step, ``"resolve"`` or ``"optimizer"``."""
    resolved: Resolved | None = None
    """The resolved plan; ``None`` if there is an error."""

    def _besides(self, mistakes: Collection[ZeroTuneError]) -> Inspection:
        """Return the errors that ``mistakes`` neither contain nor cause."""
        keys = [error.key for error in mistakes if error.key]
        sections = {key.partition(".")[0] for key in keys}
        findings = [
            finding
            for finding in self.findings
            if finding.severity == "error"
            and not any(f"{finding.key}.".startswith(f"{key}.") for key in keys)
            and not any(f"{key}.".startswith(f"{finding.key}.") for key in keys)
        ]
        refusals = [
            refusal for refusal in self.refusals if refusal.key.partition(".")[0] not in sections
        ]
        return Inspection(findings=tuple(findings), refusals=tuple(refusals))


def inspect(
    plan: Settings,
    context: Context,
    *,
    resolve_in: Context | None,
    mistakes: Collection[ZeroTuneError] = (),
    update: DeviceUpdate | None = None,
) -> Inspection:
    """Return all findings about a plan, as ``DeepSpeedPlan.inspect`` does."""
    findings = check_plan(plan, context)
    where = resolve_in or context
    told = {finding.key for finding in findings if finding.severity == "error"}
    refusals: dict[str, Decision] = {}
    if not mistakes and not told:
        try:
            return Inspection(findings=findings, resolved=resolve(plan, where, update=update))
        except ZeroTuneError as error:
            for each in error.each():
                step = BY_CHOICE if (each.key or "").startswith(_CHOSEN) else "resolve"
                refusals[each.key or ""] = Decision.of(each, rule=step)
    # Errors that hold in any plan: those of resolution may have hidden them.
    try:
        choose(plan, Situation(), run=where.run, model=where.model)
    except ZeroTuneError as error:
        for each in error.each():
            if each.key not in told:
                refusals.setdefault(each.key or "", Decision.of(each, rule=BY_CHOICE))
    found = Inspection(findings=findings, refusals=tuple(refusals.values()))
    return found._besides(mistakes) if mistakes else found


_CHOSEN: Final = ("optimizer", "scheduler")
