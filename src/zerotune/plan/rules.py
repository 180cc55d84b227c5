"""The rules a plan is checked against: one function each, with an id, a severity and a fix.

A condition is written once and yields findings. ``DeepSpeedPlan.check`` collects them; resolving
raises an *error*, does what a *warning* says and records it, and passes over a *note*. ``RULES`` is
the table the documentation is made from.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final

import attrs

from zerotune._util.text import as_number, as_sentence, format_size, is_integer, is_number
from zerotune.decisions import Decision, Log, Severity, name_of, raise_all, worst_first
from zerotune.errors import UNSET, PlanConflictError, PlanError, ZeroTuneError
from zerotune.optimizers.catalogue import ONE_BIT, clipping_in_optimizer, entry_of
from zerotune.optimizers.schedules import canonical_schedule
from zerotune.plan import model as known_keys
from zerotune.plan.model import (
    AUTO,
    Context,
    DeepSpeedPlan,
    OffloadSection,
    ResolvedPlan,
    Section,
    SectionT,
    evolved,
    join,
    modelled,
    unknown_key,
)
from zerotune.plan.resolve import (
    ACCUMULATION,
    CLIPPING,
    MICRO,
    NO_PREFETCH,
    OPTIMIZER_BUFFERS,
    SUB_GROUP_NVME,
    Case,
    clipping,
    clipping_sources,
    filled,
    largest_sub_group,
    optimizer_buffers,
    pins_exactly,
    pins_natively,
    prepared,
    rehearses_in_bf16,
    without_inactive_offload,
)
from zerotune.plan.schema import faults, passed_schema

Finding = Decision
"""What one rule found in a plan: a record with the rule's id and a fix."""
RuleContext = Context
"""The name under which rules and their callers know it."""
RuleSeverity = Severity
Findings = Iterator[Decision]


class _Names(dict[str, str]):
    """Stands in for the words of a finding where there is none."""

    def __missing__(self, name: str) -> str:
        return f"``{name}``"


@attrs.frozen(kw_only=True)
class Rule:
    """One thing that can be wrong with a plan."""

    id: str
    severity: Severity
    summary: str
    """What is wrong, in one sentence for the documentation."""
    reason: str
    """Why; ``{name}`` is a word of the finding. Empty: each finding has a reason of its own."""
    fix: str
    """What to write instead; likewise."""
    remark: str
    """What the documentation adds."""
    check: Callable[[Case, Rule], Findings] = attrs.field(repr=False)
    only_deepspeed: bool
    """Whether it concerns only runs that DeepSpeed trains."""
    left_to: str
    """Who does or refuses what it says, where resolving does not."""
    stages: tuple[int, ...] = ()
    """The ZeRO stages it concerns; empty: every one."""

    @property
    def advice(self) -> str:
        """Why, and what to do about it, for the documentation."""
        first, _, last = ", ".join(map(str, self.stages)).rpartition(", ")
        words = _Names(stage=f"{first} or {last}" if first else last)
        fix, reason = (as_sentence(each.format_map(words)) for each in (self.fix, self.reason))
        # A reason with words of a finding says more than the summary only beside its value.
        reason = "" if "``" in reason else reason
        return " ".join(filter(None, (fix, reason, self.remark)))

    def __call__(self, plan: DeepSpeedPlan, context: Context) -> list[Decision]:
        """What this rule finds."""
        return self.find(Case(plan=plan, context=context))

    def find(self, case: Case) -> list[Decision]:
        """What this rule finds in a plan that other rules look at too."""
        if self.only_deepspeed and not case.context.uses_deepspeed:
            return []
        return list(self.check(case, self))

    def finding(self, key: str, value: Any, /, *, after: Any = UNSET, **words: Any) -> Decision:
        """What is wrong with one setting.

        Args:
            key: Path of the setting.
            value: The value found.
            after: What resolution makes of it; ``None``: left out; unset: it stays.
            **words: Of ``reason`` and ``fix``; these two themselves where they are its own.
        """
        return Decision(
            key=key,
            before=value,
            after=value if after is UNSET else after,
            reason=words.get("reason") or self.reason.format(**words),
            fix=words.get("fix") or self.fix.format(**words),
            severity=self.severity,
            rule=self.id,
        )

    def refused(self, error: PlanError) -> Decision:
        """A finding made from an error."""
        return Decision.of(error, rule=self.id, severity=self.severity)


def rule(
    rule_id: str,
    severity: Severity,
    *,
    reason: str = "",
    fix: str = "",
    only_deepspeed: bool = True,
    left_to: str = "",
) -> Callable[[Callable[[Case, Rule], Findings]], Rule]:
    """Make a rule of a function; ``RULES`` lists it.

    The first line of the function's docstring says what is wrong, the rest is what the
    documentation adds to fix and reason.

    Args:
        rule_id: The rule's name.
        severity: What a finding means; see the module.
        reason: Why, with the words of a finding in braces.
        fix: What to write instead, likewise.
        only_deepspeed: Whether it concerns only runs that DeepSpeed trains.
        left_to: Who does or refuses what it says, where that takes more than the plan: the
            precision asked for, or the optimizer.
    """

    def made(function: Callable[[Case, Rule], Findings]) -> Rule:
        summary, _, remark = (function.__doc__ or "").strip().partition("\n")
        return Rule(
            id=rule_id,
            severity=severity,
            summary=summary,
            reason=reason,
            fix=fix,
            remark=" ".join(remark.split()),
            check=function,
            only_deepspeed=only_deepspeed,
            left_to=left_to,
        )

    return made


# -- What several subjects ask a plan.


def offload_section(plan: DeepSpeedPlan, part: str) -> OffloadSection | None:
    """``offload_optimizer`` or ``offload_param`` as written."""
    section: OffloadSection | None = getattr(plan.zero_optimization, f"offload_{part}", None)
    return section


def active(section: OffloadSection | None) -> bool:
    """Whether the section names a device to offload to."""
    return section is not None and section.device not in (None, "none", AUTO)


def zero_extra(plan: DeepSpeedPlan, key: str) -> Any:
    """A key of ``zero_optimization`` that zerotune passes through; ``None``: not written."""
    zero = plan.zero_optimization
    return zero.extra.get(key) if zero else None


def number(value: Any) -> float | None:
    """``value`` when it is a finite number."""
    return float(value) if is_number(value) else None


def integer(value: Any) -> int | None:
    """``value`` when it is a whole number."""
    return int(value) if is_integer(value) else None


def clips(case: Case) -> bool:
    """Whether gradients are clipped: unless something says 0, zerotune clips."""
    return clipping(case.plan, case.context.run).norm != 0


def wide_weight(case: Case) -> str | None:
    """Name of a trained weight of more than two dimensions, where the model is known."""
    trained = case.context.model.trainable if case.context.model else ()
    return next((each.name for each in trained if len(each.shape) > 2), None)


def written_at(plan: DeepSpeedPlan, path: str) -> Any:
    """What is written at a path; ``None``: nothing."""
    value: Any = plan
    for name in path.split("."):
        if isinstance(value, Section):
            kept: Mapping[str, Any] = getattr(value, "extra", {})
            value = getattr(value, name) if hasattr(value, name) else kept.get(name)
        else:
            value = value.get(name) if isinstance(value, Mapping) else None
    return value


def set_twice(case: Case, this: Rule, key: str, places: tuple[str, ...]) -> Findings:
    """A finding for each of ``places`` that contradicts the top-level ``key``."""
    first = getattr(case.plan, key)
    for place in places:
        second = written_at(case.plan, place)
        if is_number(first) and is_number(second) and first != second:
            yield this.finding(place, second, key=key, first=first)


# -- Rules on one setting: what it may not be, at which stage or beside what.


def setting_rule(
    rule_id: str,
    severity: Severity,
    settings: Mapping[str, Callable[[Any], bool]],
    *,
    summary: str,
    reason: str,
    fix: str,
    stages: tuple[int, ...] = (),
    when: Callable[[DeepSpeedPlan], bool] | None = None,
    remark: str = "",
    after: Any = UNSET,
    only_deepspeed: bool = True,
    left_to: str = "",
) -> Rule:
    """A rule on settings, each judged by its value alone.

    Args:
        rule_id: The rule's name.
        severity: What a finding means.
        settings: Path to the test of a value that the rule reports.
        summary: What is wrong, in one sentence.
        reason: Why; ``{stage}`` is the plan's.
        fix: What to write instead.
        stages: The ZeRO stages it concerns; empty: every one.
        when: What else must hold.
        remark: What the documentation adds.
        after: What resolution makes of the setting.
        only_deepspeed: As of ``rule``.
        left_to: As of ``rule``.
    """

    def check(case: Case, this: Rule) -> Findings:
        plan = case.plan
        if (stages and plan.stage not in stages) or (when is not None and not when(plan)):
            return
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
        fix=fix,
        remark=remark,
        check=check,
        only_deepspeed=only_deepspeed,
        left_to=left_to,
        stages=stages,
    )


def is_one(*refused: Any) -> Callable[[Any], bool]:
    """A test for these values; true is not 1."""
    kinds = [(isinstance(each, bool), each) for each in refused]
    return lambda value: (isinstance(value, bool), value) in kinds


def is_other(*allowed: Any) -> Callable[[Any], bool]:
    """A test for a value that is written, and none of these."""
    return lambda value: value not in (None, *allowed)


def is_below(limit: float) -> Callable[[Any], bool]:
    """A test for a number."""
    return lambda value: is_number(value) and value < limit


def _scales(plan: DeepSpeedPlan) -> bool:
    return plan.fp16 is not None and plan.fp16.enabled is True


_ZERO_PATH: Final = "zero_optimization"
_OPTIMIZER: Final = f"{_ZERO_PATH}.offload_optimizer"
_PARAM: Final = f"{_ZERO_PATH}.offload_param"

SETTING_RULES: Final = (
    setting_rule(
        "offload-at-stage-0",
        "warning",
        {_OPTIMIZER: active, _PARAM: active},
        stages=(0,),
        summary="Nothing is offloaded at stage 0.",
        reason="DeepSpeed ignores offload at stage 0, so it is left out",
        fix="set zero_optimization.stage to 2 to offload",
        after=None,
    ),
    setting_rule(
        "offload-param-below-stage-3",
        "warning",
        {_PARAM: active},
        stages=(1, 2),
        summary="Parameters can be offloaded only where they are partitioned, at stage 3.",
        reason="DeepSpeed ignores offload_param below stage 3, here {stage}, so it is left out",
        fix="set zero_optimization.stage to 3 to offload parameters",
        after=None,
    ),
    setting_rule(
        "param-offload-alone",
        "note",
        {f"{_PARAM}.device": is_one("cpu", "nvme")},
        stages=(3,),
        when=lambda plan: plan.offload_optimizer_device == "none",
        summary="Parameters are offloaded while the larger optimizer states stay on the device.",
        reason="the optimizer states, six times larger in mixed precision, stay on the device",
        fix='set offload_optimizer.device to "cpu" to free more memory',
    ),
    setting_rule(
        "partial-offload-below-stage-3",
        "error",
        {f"{_OPTIMIZER}.ratio": is_below(1)},
        stages=(1, 2),
        summary="An offload ratio below 1 is refused by DeepSpeed below stage 3.",
        reason="DeepSpeed offloads a part of the optimizer only at stage 3, not at {stage}",
        fix="set the ratio to 1.0, or zero_optimization.stage to 3",
    ),
    setting_rule(
        "partial-offload",
        "note",
        {f"{_OPTIMIZER}.ratio": is_below(1)},
        stages=(3,),
        summary="An offload ratio below 1 leaves part of the optimizer on the device, with another"
        " AdamW.",
        reason="what stays on the device is stepped by torch's AdamW, the rest by DeepSpeed's",
        fix="set the ratio to 1.0 for one implementation",
        remark="torch's AdamW would keep its first learning rate there, and its states would be in"
        " no checkpoint (``backup_optimizer``); zerotune lets both share groups and states. The"
        " two implementations round differently.",
    ),
    setting_rule(
        "nvme-optimizer-below-stage-3",
        "error",
        {f"{_OPTIMIZER}.device": is_one("nvme")},
        stages=(1, 2),
        summary="DeepSpeed silently keeps the optimizer in host memory instead of NVMe below stage"
        " 3.",
        reason="needs stage 3; at stage {stage} DeepSpeed silently uses host memory",
        fix='set zero_optimization.stage to 3, or device to "cpu"',
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
        reason="DeepSpeed ignores ZeRO++ below stage 3, here {stage}, so it is left out",
        fix="set zero_optimization.stage to 3, or remove the key",
        after=None,
    ),
    setting_rule(
        "stage-3-launch-flag",
        "note",
        {"launch.zero3_init_flag": is_one(True)},
        stages=(0, 1, 2),
        summary="The launcher's ``zero3_init_flag`` has no effect below stage 3.",
        reason="it builds partitioned parameters, and at stage {stage} none are",
        fix="remove it, or set zero_optimization.stage to 3",
        remark="accelerate sets it to false with a warning.",
    ),
    setting_rule(
        "legacy-stage-1",
        "error",
        {f"{_ZERO_PATH}.legacy_stage1": is_one(True)},
        stages=(1, 2, 3),
        summary="The first implementation of stage 1 left DeepSpeed in release 0.5.9; the engine"
        " raises.",
        reason="DeepSpeed removed that implementation and stops at the key",
        fix="remove this key",
    ),
    setting_rule(
        "gradient-scaling",
        "error",
        {"prescale_gradients": is_other(False), "gradient_predivide_factor": is_other(1)},
        stages=(2, 3),
        when=lambda plan: written_at(plan, f"{_ZERO_PATH}.reduce_scatter") is not False,
        summary="Scaling gradients before they are reduced is refused by stages 2 and 3.",
        reason="DeepSpeed refuses it at stage {stage} with reduce_scatter, its default",
        fix="remove this key, or set zero_optimization.reduce_scatter to false",
    ),
    setting_rule(
        "muon-reduce-scatter",
        "warning",
        {f"{_ZERO_PATH}.reduce_scatter": lambda value: value is not False},
        stages=(3,),
        when=lambda plan: plan.optimizer_name == "Muon",
        summary="Muon at stage 3 cannot use ``reduce_scatter``, which is on by default; DeepSpeed"
        " raises.",
        reason='DeepSpeed stops at stage 3 with "Muon and reduce scatter cannot be used together"',
        fix="set reduce_scatter to false, or use stage 1 or 2",
    ),
    setting_rule(
        "one-bit-optimizer",
        "warning",
        {"optimizer.type": is_other()},
        when=lambda plan: plan.optimizer_name in ONE_BIT,
        summary="1-bit optimizers were removed from DeepSpeed 0.19 and never ran under ZeRO.",
        reason="DeepSpeed 0.19 removed the 1-bit optimizers, and older releases refuse them with"
        " ZeRO",
        fix='write "AdamW" (or "Lamb")',
        remark="``OptimizerResolver`` replaces them, or refuses, as its policy says.",
    ),
    setting_rule(
        "fp16-fixed-loss-scale",
        "warning",
        {"fp16.loss_scale": lambda value: is_number(value) and value > 0},
        when=_scales,
        summary="A fixed loss scale never adapts: what overflows once may overflow for ever.",
        reason="DeepSpeed skips a step whose gradients overflow, and a fixed scale is never lowered"
        " after it",
        fix="write 0 for dynamic loss scaling, or use bf16",
    ),
    setting_rule(
        "dynamic-loss-scale",
        "error",
        {"fp16.loss_scale_window": is_one(0), "fp16.min_loss_scale": is_one(0)},
        when=lambda plan: _scales(plan) and written_at(plan, "fp16.loss_scale") in (None, 0, AUTO),
        summary="A dynamic loss scale needs a window and a floor above 0.",
        reason="DeepSpeed refuses 0 with a dynamic loss scale",
        fix="write 1",
        remark="With fp16 off, or a fixed ``loss_scale``, DeepSpeed does not look at them.",
    ),
    setting_rule(
        "scheduler-no-warmup",
        "warning",
        {"scheduler.params.warmup_num_steps": is_below(1)},
        only_deepspeed=False,
        left_to="the optimizer",
        summary='DeepSpeed refuses a warm-up of 0 steps ("must be a positive integer").',
        reason="DeepSpeed's warm-up must be a positive number of steps",
        fix="write 1, which is its shortest",
        remark="``OptimizerResolver`` writes 1 and starts at the peak.",
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
        summary="``LRRangeTest`` raises the learning rate without end, to find one; it trains"
        " nothing.",
        reason="it raises the learning rate until training diverges, which shows the largest usable"
        " one",
        fix='write "WarmupLR", "WarmupDecayLR" or "WarmupCosineLR" to train',
    ),
    setting_rule(
        "activation-checkpointing",
        "note",
        {"activation_checkpointing": bool},
        summary="``activation_checkpointing`` configures DeepSpeed's own checkpoint function only.",
        reason="it has an effect only on models that call deepspeed.checkpointing, and those of"
        " diffusers call torch's",
        fix="remove it and call the model's enable_gradient_checkpointing()",
    ),
)
"""Rules that need no function of their own, in the order they are checked."""


# -- Rules on batch sizes, accumulation and the number of ranks.


@rule("batch-triple", "error", only_deepspeed=False)
def batch_triple(case: Case, this: Rule) -> Findings:
    """Train batch = micro batch x accumulation x world size must hold.

    Write two of the three, or change one so that the product holds at this world size.
    """
    try:
        _ = case.batch
    except PlanConflictError as error:
        yield this.refused(error)


@rule(
    "accumulation-set-twice",
    "warning",
    reason="{key} is set to {first} as well, and that one is used",
    fix=f"keep only {ACCUMULATION}",
    only_deepspeed=False,
)
def accumulation_twice(case: Case, this: Rule) -> Findings:
    """Accumulation is written both in the DeepSpeed block and outside of it."""
    return set_twice(case, this, ACCUMULATION, (f"launch.{ACCUMULATION}",))


@rule(
    "world-size",
    "warning",
    reason="the launcher's file asks for {asked} processes, and this is world size {world_size},"
    " for which the batch sizes hold",
    fix="start {asked} processes, or write {world_size}",
    only_deepspeed=False,
)
def world_size(case: Case, this: Rule) -> Findings:
    """The launcher's file asks for another number of processes than train."""
    asked = written_at(case.plan, "launch.num_processes")
    ranks = case.context.world_size
    # accelerate writes -1 for "as many as there are devices".
    if asked is not None and asked > 0 and asked != ranks:
        yield this.finding("launch.num_processes", asked, asked=asked, world_size=ranks)


@rule(
    "micro-batch-unset",
    "note",
    reason="no batch size is written, so the micro batch is 1",
    fix=f"write {MICRO}",
    only_deepspeed=False,
)
def micro_batch_unset(case: Case, this: Rule) -> Findings:
    """Nothing says how many samples one pass takes."""
    train, micro = case.plan.train_batch_size, case.plan.train_micro_batch_size_per_gpu
    if {train, micro} <= {None, AUTO} and case.context.run.micro_batch_size is None:
        yield this.finding(MICRO, micro)


# -- Rules on where the optimizer and the parameters wait.


_NOTEWORTHY: Final = 1024**3
"""Bytes of host memory below which rounding is not worth a word."""


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
            key = f"zero_optimization.offload_{part}.device"
            yield this.finding(key, section.device, after="none")


@rule(
    "partial-offload-optimizer",
    "error",
    reason="DeepSpeed offloads a part of AdamW to host memory only, not {what}",
    fix="set the ratio to 1.0, or use AdamW with offload_optimizer.device cpu",
)
def partial_offload_optimizer(case: Case, this: Rule) -> Findings:
    """An offload ratio below 1 works with AdamW in host memory alone; DeepSpeed asserts it.

    What stays on the device is stepped by torch's AdamW: of Adam with L2 it would make another
    optimizer, and it has no states in bf16.
    """
    plan, section = case.plan, offload_section(case.plan, "optimizer")
    ratio = section.ratio if section is not None else None
    if section is None or plan.stage != 3 or not is_number(ratio) or float(ratio or 0) == 1:
        return
    name = plan.optimizer_name or (plan.optimizer and plan.optimizer.type)
    if section.device == "nvme" or name != "AdamW":
        what = "to NVMe" if section.device == "nvme" else f"of {name}"
        yield this.finding("zero_optimization.offload_optimizer.ratio", ratio, what=what)


_SUPER_OFFLOAD: Final = "zero_optimization.offload_optimizer.super_offload"


@rule(
    "super-offload-accelerator",
    "error",
    reason="SuperOffload needs CUDA, and this platform trains on {accelerator}",
    fix="remove super_offload",
)
def super_offload_accelerator(case: Case, this: Rule) -> Findings:
    """SuperOffload runs on NVIDIA CUDA devices only; DeepSpeed asserts it."""
    platform = case.context.platform
    if not _super_offloads(case.plan) or case.plan.stage != 3 or platform is None:
        return
    if platform.accelerator not in ("cuda", "rocm"):
        yield this.finding(_SUPER_OFFLOAD, True, accelerator=platform.accelerator)


@rule("super-offload", "warning")
def super_offload(case: Case, this: Rule) -> Findings:
    """SuperOffload works at stage 3 only, and overlaps nothing while gradients are clipped.

    Leave it out, or set ``gradient_clipping`` to 0 if training stays stable without.
    """
    stage = case.plan.stage
    if not _super_offloads(case.plan) or not isinstance(stage, int):
        return
    if stage != 3:
        yield this.finding(
            _SUPER_OFFLOAD,
            True,
            reason=f"DeepSpeed ignores SuperOffload below stage 3, here {stage}",
            fix="set zero_optimization.stage to 3, or remove super_offload",
        )
    elif clips(case):
        yield this.finding(
            _SUPER_OFFLOAD,
            True,
            reason="its CPU steps overlap the backward pass only without clipping; with it each"
            " sub-group is stepped afterwards, one by one",
            fix="remove super_offload, or set gradient_clipping to 0",
        )


def _super_offloads(plan: DeepSpeedPlan) -> bool:
    section = offload_section(plan, "optimizer")
    return section is not None and active(section) and section.extra.get("super_offload") is True


@rule(
    "pinned-memory-rounding",
    "note",
    reason="torch rounds each pinned block up to a power of two, which adds {lost} to the {blocks}"
    " of each rank's flat buffers",
    fix="install torch 2.13, set DS_PIN_MEMORY_BACKEND=native, or pin_memory to false if host"
    " memory is short",
)
def pinned_memory(case: Case, this: Rule) -> Findings:
    """An older torch rounds each pinned block up to a power of two: 16 GiB for SDXL at stage 2.

    With torch 2.13 zerotune switches that off; DeepSpeed 0.19.8 page-locks to the byte itself where
    locked memory is not limited. Checked where model and torch are known.
    """
    plan, context, section = case.plan, case.context, offload_section(case.plan, "optimizer")
    here = context.platform
    if section is None or not active(section) or section.pin_memory is False:
        return
    if plan.stage not in (1, 2) or context.model is None or here is None:
        return
    if pins_exactly(here) or pins_natively(here):
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
    "muon-convolutions",
    "warning",
    reason="Muon's update is of matrices and fails on weights of more than two dimensions, such as"
    " {wide}",
    fix='write "AdamW"',
)
def muon_convolutions(case: Case, this: Rule) -> Findings:
    """Muon fails on the weights of convolutions at stages 2 and 3.

    Or leave convolutions to Muon's auxiliary Adam. Checked where the model is known.
    """
    plan, wide = case.plan, wide_weight(case)
    if plan.optimizer_name == "Muon" and wide is not None and plan.stage in (2, 3):
        yield this.finding("optimizer.type", written_at(plan, "optimizer.type"), wide=wide)


@rule(
    "clipping-set-twice",
    "warning",
    reason="{key} is set to {first} as well, and that one is used",
    fix=f"keep only {CLIPPING}",
    only_deepspeed=False,
)
def clipping_twice(case: Case, this: Rule) -> Findings:
    """Clipping is written both at the top level and elsewhere."""
    places = ("launch.gradient_clipping", "optimizer.params.max_grad_norm")
    return set_twice(case, this, CLIPPING, places)


@rule("clipping-in-optimizer", "error", only_deepspeed=False, left_to="the optimizer")
def clipping_in_the_optimizer(case: Case, this: Rule) -> Findings:
    """``max_grad_norm`` stands among the arguments of the optimizer, where DeepSpeed refuses it.

    Write ``gradient_clipping`` at the top level.
    """
    error = clipping_in_optimizer(written_at(case.plan, "optimizer.params") or {})
    if error is not None:
        yield this.refused(error)


@rule(
    "clipping-unset",
    "note",
    reason="no clipping is written, so gradients are clipped to a norm of 1.0; older DeepSpeed did"
    " not clip",
    fix="write gradient_clipping, 0 to switch it off",
    only_deepspeed=False,
)
def clipping_unset(case: Case, this: Rule) -> Findings:
    """Nothing says how gradients are clipped, and DeepSpeed's default moved from 0 to 1.0."""
    if not clipping_sources(case.plan, case.context.run):
        yield this.finding(CLIPPING, None)


# -- Rules on bf16, fp16 and what the platform computes in.


@rule("precision-conflict", "error", only_deepspeed=False)
def precision_conflict(case: Case, this: Rule) -> Findings:
    """At most one of bf16 and fp16 may be on, and the launcher must agree.

    Switch one off, and let the launcher's ``mixed_precision`` say the same.
    """
    plan = case.plan
    written = {name: written_at(plan, f"{name}.enabled") for name in ("bf16", "fp16")}
    if all(enabled is True for enabled in written.values()):
        yield this.finding(
            "fp16.enabled",
            True,
            reason="bf16.enabled is true too, and DeepSpeed refuses both",
            fix="switch one of them off; bf16 needs no loss scaling",
        )
        return
    key, launched = "launch.mixed_precision", written_at(plan, "launch.mixed_precision")
    if launched == "fp8":
        reason = "zerotune does not train in fp8"
        yield this.finding(key, launched, reason=reason, fix='write "bf16", "fp16" or "no"')
    asked = [name for name, enabled in written.items() if enabled is True]
    refused = launched in written and written[launched] is False
    if launched in ("bf16", "fp16", "fp32") and (refused or (asked and asked != [launched])):
        says = f"{asked[0]}.enabled = true" if asked else f"{launched}.enabled = false"
        yield this.finding(
            key,
            launched,
            reason=f"the DeepSpeed configuration says {says}",
            fix="make them agree, or leave mixed_precision out of the launcher's file",
        )


@rule("precision-unsupported", "error", only_deepspeed=False)
def precision_unsupported(case: Case, this: Rule) -> Findings:
    """The platform cannot compute in the precision asked for.

    Ask for one it has, or write ``"auto"``. Checked where a platform is known.
    """
    plan = case.plan
    both = all(section and section.enabled is True for section in (plan.bf16, plan.fp16))
    # What contradicts itself is another rule's.
    if case.context.platform is None or both or written_at(plan, "launch.mixed_precision") == "fp8":
        return
    try:
        _ = case.precision
    except PlanError as error:
        yield this.refused(error)


@rule(
    "fp16-on-cpu",
    "warning",
    reason="DeepSpeed's CPU accelerator has no fp16 on this machine, so bf16 is used",
    fix='write bf16, or "auto"',
    left_to="the choice of precision",
)
def fp16_on_cpu(case: Case, this: Rule) -> Findings:
    """DeepSpeed's CPU accelerator takes fp16 only where torch has native fp16 arithmetic.

    bf16 takes the same memory and needs no loss scaling.
    """
    here = case.context.platform
    if case.plan.precision == "fp16" and here and rehearses_in_bf16(here):
        yield this.finding("fp16.enabled", True)


@rule(
    "bf16-emulated",
    "note",
    reason="this CPU has no bf16 arithmetic (AVX512_BF16, AMX) and emulates it, many times slower"
    " than fp32",
    fix='set bf16.enabled to false or "auto", unless you rehearse a bf16 run',
    only_deepspeed=False,
)
def bf16_emulated(case: Case, this: Rule) -> Findings:
    """A CPU without bf16 arithmetic emulates it."""
    here = case.context.platform
    if here is not None and here.bf16 and not here.native_bf16 and case.plan.precision == "bf16":
        yield this.finding("bf16.enabled", True)


@rule("bf16-master-weights", "error")
def bf16_master_weights(case: Case, this: Rule) -> Findings:
    """Low-precision master weights need ZeRO with the optimizer offloaded to the CPU.

    Offload the optimizer, or remove the key. In bf16 they may stay on the device when
    ``bf16_optimizer_states`` is on too.
    """
    plan = case.plan
    states = written_at(plan, "bf16.bf16_optimizer_states") is True
    keys = [f"{name}.{name}_master_weights_and_grads" for name in ("bf16", "fp16")]
    asked = [written_at(plan, key) is True for key in keys]
    for key in (key for key, value in zip(keys, asked, strict=True) if value):
        stays = plan.offload_optimizer_device == "none" and not (states and key.startswith("bf16"))
        if plan.stage == 0 or (stays and isinstance(plan.stage, int)):
            yield this.finding(
                key,
                True,
                reason="DeepSpeed keeps low-precision master weights only with ZeRO stage 1 to 3"
                " and the optimizer offloaded",
                fix='set offload_optimizer.device to "cpu", or remove this key',
            )
    if states and not written_at(plan, keys[0]):
        yield this.finding(
            "bf16.bf16_optimizer_states",
            True,
            reason="needs bf16_master_weights_and_grads too",
            fix="remove this key; the optimizer AdamWBF16States keeps its moments in bf16 beside"
            " fp32 master weights",
        )
    if all(asked):
        yield this.finding(
            keys[1],
            True,
            reason=f"{keys[0]} is true too, and DeepSpeed refuses both",
            fix="keep the one of the precision that trains",
        )


# -- Rules on the learning-rate schedule and the length of the run.


_CYCLE_DEFAULT: Final = 2000
"""``cycle_first_step_size`` of DeepSpeed's ``OneCycle``."""


def schedule_params(plan: DeepSpeedPlan) -> Mapping[str, Any]:
    """Arguments of the schedule as written."""
    return (plan.scheduler.params if plan.scheduler else None) or {}


def schedule_name(plan: DeepSpeedPlan) -> str | None:
    """Canonical name of the schedule; ``None`` without a schedule or for an unknown one."""
    name = plan.scheduler.type if plan.scheduler else None
    return canonical_schedule(name) if name else None


@rule(
    "scheduler-warmup-too-long",
    "warning",
    reason="the warm-up ends at or after the last of {what} ({end}), so the learning rate never"
    " reaches its peak",
    fix="write fewer warm-up steps; they are optimizer steps, not micro batches",
    only_deepspeed=False,
)
def warmup_too_long(case: Case, this: Rule) -> Findings:
    """The warm-up is as long as the schedule or the run."""
    params = schedule_params(case.plan)
    warmup = number(params.get("warmup_num_steps"))
    ends = {
        "total_num_steps": number(params.get("total_num_steps")),
        "the run's steps": case.context.run.total_steps,
    }
    for what, end in ends.items():
        if warmup is not None and warmup >= 1 and end is not None and warmup >= end:
            key, written = "scheduler.params.warmup_num_steps", params["warmup_num_steps"]
            yield this.finding(key, written, what=what, end=f"{end:g}")
            return


@rule(
    "scheduler-total",
    "warning",
    reason="the run takes {run_steps} optimizer steps, so {effect}",
    fix='write {run_steps}, or "auto"',
    only_deepspeed=False,
)
def scheduler_total(case: Case, this: Rule) -> Findings:
    """``total_num_steps`` differs from the optimizer steps of the run.

    A shorter schedule trains on at its end value (0 for ``WarmupDecayLR``), a longer one never
    comes down.
    """
    params, run = schedule_params(case.plan), case.context.run.total_steps
    total = number(params.get("total_num_steps"))
    if total is None or run is None or total == run:
        return
    end = "0" if schedule_name(case.plan) == "WarmupDecayLR" else "its smallest value"
    effect = (
        f"the learning rate stays at {end} for the last {run - total:g} steps"
        if total < run
        else f"the run ends {total - run:g} steps before the learning rate has come down"
    )
    accumulation = case.context.run.gradient_accumulation_steps or 1
    for factor, what in ((accumulation, "micro batches"), (case.context.world_size, "ranks times")):
        if factor > 1 and total == run * factor:
            effect += f" (it seems to count {what} steps: {factor} x {run})"
            break
    key = "scheduler.params.total_num_steps"
    yield this.finding(key, params["total_num_steps"], run_steps=run, effect=effect)


@rule(
    "scheduler-cycle",
    "warning",
    reason="the cycle takes {first} + {second} steps and the run {steps}, so the learning rate does"
    " not come down again",
    fix="write at most {half_the_run}",
    only_deepspeed=False,
)
def scheduler_cycle(case: Case, this: Rule) -> Findings:
    """A ``OneCycle`` longer than the run never comes down.

    The second step size is as long as the first when it is not written.
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
        )


# -- Rules on NVMe.


_LARGE_POOL: Final = 4 * 1024**3
"""Bytes of pinned swap buffers that deserve a warning."""
_BUFFER_COUNT: Final = "zero_optimization.offload_optimizer.buffer_count"


def swap_buffers(plan: DeepSpeedPlan) -> int | None:
    """``buffer_count`` where an optimizer with two moments is swapped and the user wrote one."""
    section = offload_section(plan, "optimizer")
    if plan.stage != 3 or section is None or section.device != "nvme":
        return None
    two = entry_of(plan.optimizer_name).states_per_weight() >= 2
    return integer(section.buffer_count) if two else None


@rule(
    "nvme-path-unset",
    "note",
    reason="no folder is written, so the run leases one below the swap root",
    fix="write the path of a folder on a fast disk",
)
def nvme_path_unset(case: Case, this: Rule) -> Findings:
    """Something swaps to NVMe and no folder is written; DeepSpeed alone refuses to start."""
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
    reason="weight, gradient and two moments are resident together, and DeepSpeed asserts that"
    " there is a buffer for each",
    fix=f'write at least {OPTIMIZER_BUFFERS}, or "{AUTO}"',
)
def nvme_optimizer_buffers(case: Case, this: Rule) -> Findings:
    """The swap pool of an optimizer with two moments needs four buffers."""
    written = swap_buffers(case.plan)
    if written is not None and written < OPTIMIZER_BUFFERS:
        yield this.finding(_BUFFER_COUNT, written)


@rule(
    "nvme-pipeline-buffers",
    "warning",
    reason="DeepSpeed runs out of swap buffers as soon as there is more than one sub-group",
    fix=f'write at least {{need}}, or "{AUTO}"',
)
def nvme_pipeline_buffers(case: Case, this: Rule) -> Findings:
    """Pipelined swapping needs four more buffers for reading ahead and four for writing back.

    Needed are 8 with one of ``pipeline_read`` and ``pipeline_write``, 12 with both.
    """
    section, written = offload_section(case.plan, "optimizer"), swap_buffers(case.plan)
    if section is None or written is None:
        return
    need = optimizer_buffers(section)
    if OPTIMIZER_BUFFERS <= written < need:
        yield this.finding(_BUFFER_COUNT, written, need=need)


@rule(
    "nvme-sub-group-size",
    "warning",
    reason="the swap pool holds {buffers} buffers of the largest sub-group in fp32, which is {pool}"
    " of host memory on each rank",
    fix=f'write {SUB_GROUP_NVME}, or "{AUTO}"',
)
def nvme_sub_group_size(case: Case, this: Rule) -> Findings:
    """The pool of NVMe swap buffers is host memory: buffers x largest sub-group x 4 bytes.

    DeepSpeed's default of 1e9 takes 15 GiB with four buffers where the model is as large.
    """
    plan, model = case.plan, case.context.model
    zero, section = plan.zero_optimization, offload_section(plan, "optimizer")
    if zero is None or section is None or plan.stage != 3 or section.device != "nvme":
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


@rule("nvme-param-prefetch", "warning", reason=NO_PREFETCH, fix=f'write 0, or "{AUTO}"')
def nvme_param_prefetch(case: Case, this: Rule) -> Findings:
    """Fetching parameters ahead from NVMe fails in the second step.

    The error is "already assigned swap buffer"; resolution switches it off.
    """
    plan, zero = case.plan, case.plan.zero_optimization
    written = integer(zero.stage3_prefetch_bucket_size) if zero else None
    if zero is None or not written or plan.stage != 3 or plan.offload_param_device != "nvme":
        return
    if case.swaps_parameters(zero, plan.aio):
        yield this.finding("zero_optimization.stage3_prefetch_bucket_size", written, after=0)


@rule(
    "number-as-text",
    "note",
    reason="a number in quotes is read as the number",
    fix="write {number}",
    only_deepspeed=False,
)
def number_as_text(case: Case, this: Rule) -> Findings:
    """An argument of the optimizer or the schedule is a number in quotes.

    DeepSpeed alone would hand the text on.
    """
    for name in ("optimizer", "scheduler"):
        for key, value in (written_at(case.plan, f"{name}.params") or {}).items():
            if isinstance(value, str) and as_number(value) is not None:
                yield this.finding(f"{name}.params.{key}", value, number=value.strip())


# -- Rules on ``zero_optimization``, on removed and on unknown keys.


_LARGE_BUCKET: Final = 512 * 1024**2
"""Bytes of reduce buckets that deserve a note; those sized by resolution take a tenth."""


@rule(
    "stage-auto",
    "warning",
    reason="DeepSpeed itself drops the key and trains at stage 0, in silence; resolution chooses"
    " {chosen}",
    fix="write 0, 1, 2 or 3",
)
def stage_auto(case: Case, this: Rule) -> Findings:
    """DeepSpeed reads a stage of ``"auto"`` as 0.

    Resolution chooses 2, or 3 where what is offloaded needs it.
    """
    plan = case.plan
    if plan.stage != AUTO:
        return
    away = {plan.offload_param_device, plan.offload_optimizer_device}
    three = "nvme" in away or plan.offload_param_device == "cpu"
    chosen = "3, which what is offloaded needs" if three else "2, which partitions all but weights"
    key = "zero_optimization.stage"
    yield this.finding(key, AUTO, after=3 if three else 2, chosen=chosen)


@rule("removed-section", "error", reason="DeepSpeed 0.19 removed {what}", fix="remove this key")
def removed_section(case: Case, this: Rule) -> Findings:
    """Sections DeepSpeed 0.19 removed are refused, unless an older DeepSpeed is installed."""
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
    """DeepSpeed ignores unknown top-level keys in silence; reading a plan refuses them.

    Correct the spelling. Keys that begin with an underscore are kept as remarks.
    """
    plan = case.plan
    known = {attribute.name for attribute in modelled(DeepSpeedPlan)} | plan.passed_through
    for key, value in plan.extra.items():
        if key not in plan.passed_through and not key.startswith("_") and plan.source == "code":
            yield this.refused(unknown_key(key, value, key, known))


_PARALLEL: Final = {
    "sequence_parallel_size": "ranks that share one sequence",
    "tensor_parallel.autotp_size": "ranks that share one matrix",
    "tensor_parallel.tensor_parallel.tp_size": "ranks that share one matrix",
    "tensor_parallel.tp.tp_size": "ranks that share one matrix",
    "pipeline.stages": "stages of a pipeline",
    "expert_parallel.autoep_size": "ranks that share the experts",
    "hybrid_engine.inference_tp_size": "ranks that share one matrix",
}
"""Path to what it counts; more than one of them need more than data parallelism."""
_PARALLELISM_CONFIG: Final = {
    "tp_size": "ranks that share one matrix",
    "cp_size": "ranks that share one context",
    "sp_size": "ranks that share one sequence",
}
"""The same of accelerate's ``parallelism_config``; ``accelerate config`` writes them prefixed."""


@rule(
    "parallelism",
    "error",
    reason="it asks for {value} {counted}, and zerotune trains with data parallelism alone: the"
    " batch sizes would not hold",
    fix="remove this key, or write 1",
    only_deepspeed=False,
)
def parallelism(case: Case, this: Rule) -> Findings:
    """Every rank is a data-parallel one: sequences, matrices and layers are not split over ranks.

    With ``sequence_parallel_size: 2`` DeepSpeed counts half as many ranks into the train batch, and
    the model would have to split its sequences itself.
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
    """Sections that are passed through must be what DeepSpeed's own models take.

    Write what the fix says. Names, types and ranges are those of the schema that was given to
    ``check``, else of DeepSpeed 0.19.8.
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
                reason, fix = "DeepSpeed refuses this key here", "it belongs to offload_optimizer"
                yield this.finding(path, value, reason=reason, fix=fix)
            elif key in keys:
                for each in faults(value, keys[key], path):
                    yield attrs.evolve(each, rule=this.id)


@rule(
    "gradient-norm", "error", reason="DeepSpeed accepts it only with {needs}", fix="remove this key"
)
def gradient_norm(case: Case, this: Rule) -> Findings:
    """``compute_grad_norm: false`` needs stage 1 or 2, no clipping and no optimizer offload."""
    plan = case.plan
    if zero_extra(plan, "compute_grad_norm") is not False or plan.stage == AUTO:
        return
    problems = {
        f"stage 1 or 2, and this is stage {plan.stage}": plan.stage not in (1, 2),
        "gradient_clipping 0, because clipping measures the norm": clips(case),
        "the optimizer on the device": active(offload_section(plan, "optimizer")),
    }
    needs = next((needs for needs, broken in problems.items() if broken), None)
    if needs is not None:
        yield this.finding("zero_optimization.compute_grad_norm", False, needs=needs)


@rule(
    "gradient-sum",
    "error",
    reason="DeepSpeed refuses it {where}",
    fix='remove this key, or write "mean"',
)
def gradient_sum(case: Case, this: Rule) -> Findings:
    """Summing gradients over ranks is refused at stage 3, with ZenFlow and with DeepCompile."""
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
    reason="ZenFlow scrambles weights of more than two dimensions, such as {wide}",
    fix="remove zenflow",
)
def zenflow(case: Case, this: Rule) -> Findings:
    """ZenFlow raises on, or scrambles, the weights of convolutions.

    It selects columns of matrices (``num_row, num_col``) and treats every other shape as one row,
    or fails to transpose it. Checked where the model is known.
    """
    section, wide = zero_extra(case.plan, "zenflow"), wide_weight(case)
    if section is not None and wide is not None:
        yield this.finding("zero_optimization.zenflow", section, wide=wide)


@rule(
    "large-reduce-bucket",
    "note",
    reason="the bucket takes {cost} of device memory{doubled}",
    fix=f'write 30000000, or "{AUTO}"',
)
def large_bucket(case: Case, this: Rule) -> Findings:
    """A reduce bucket is device memory: its elements, twice with ``overlap_comm`` below stage 3.

    DeepSpeed's 5e8 takes 0.93 GiB in 16 bits, and 1.86 GiB with ``overlap_comm`` at stages 1 and 2;
    ``"auto"`` holds the largest tensor.
    """
    plan, zero = case.plan, case.plan.zero_optimization
    size = integer(zero.reduce_bucket_size) if zero else None
    if zero is None or size is None or plan.stage not in (1, 2, 3):
        return
    offloads = active(offload_section(plan, "optimizer"))
    if zero.contiguous_gradients is False and not offloads:
        return
    # What resolution will choose where nothing is written.
    overlaps = zero.overlap_comm is True or (zero.overlap_comm is not False and offloads)
    buckets = 2 if overlaps and plan.stage != 3 else 1
    cost = buckets * size * (4 if plan.precision == "fp32" else 2)
    if cost >= _LARGE_BUCKET:
        yield this.finding(
            "zero_optimization.reduce_bucket_size",
            size,
            cost=format_size(cost),
            doubled=", two of them because of overlap_comm" if buckets == 2 else "",
        )


# -- The rules, in the order they are checked.
#
# What a rule says of DeepSpeed was read in the code of 0.19.8, or seen when it ran.


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
    muon_convolutions,
    clipping_twice,
    clipping_in_the_optimizer,
    clipping_unset,
    precision_conflict,
    precision_unsupported,
    fp16_on_cpu,
    bf16_emulated,
    bf16_master_weights,
    warmup_too_long,
    scheduler_total,
    scheduler_cycle,
    nvme_path_unset,
    nvme_optimizer_buffers,
    nvme_pipeline_buffers,
    nvme_sub_group_size,
    nvme_param_prefetch,
    number_as_text,
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
"""Those whose repair the others build on."""

REPAIRS: Final = tuple(
    each for each in RULES if each.severity != "note" and not each.left_to and each not in FIRST
)
"""The others that stop a plan or change it while it is resolved."""


def all_rules() -> tuple[Rule, ...]:
    """Every rule, in the order they are checked."""
    return RULES


def check_plan(plan: DeepSpeedPlan, context: Context) -> tuple[Decision, ...]:
    """Everything the rules find, errors first, otherwise in the order of the rules."""
    return _findings(Case(plan=plan, context=context), RULES)


def _findings(case: Case, rules: tuple[Rule, ...]) -> tuple[Decision, ...]:
    findings = [finding for each in rules for finding in each.find(case)]
    names = case.plan.names
    if names:
        findings = [attrs.evolve(each, written=name_of(each.key, names)) for each in findings]
    return tuple(worst_first(findings))


def resolve(requested: DeepSpeedPlan, context: Context) -> ResolvedPlan:
    """See ``DeepSpeedPlan.resolve``: every rule is asked once, then all is filled in."""
    log = Log(decisions=[*requested.decisions])
    case = prepared(requested, context, log)
    for each in FIRST:
        case = attrs.evolve(case, plan=_repaired(case, (each,), log))
    case = attrs.evolve(case, plan=without_inactive_offload(case.plan))
    return filled(requested, _repaired(case, REPAIRS, log), case, log)


def _repaired(case: Case, rules: tuple[Rule, ...], log: Log) -> DeepSpeedPlan:
    """The plan with what the rules make of it; what they refuse is raised."""
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


# -- Everything that is wrong with a plan: what rules find, what resolving and settling refuse.
#
# What optimizer and schedule will run is settled by ``zerotune.optim``, which lies above. So
# whoever asks hands over how they are settled, and whatever the rules refuse, both are looked at
# as well.


@attrs.frozen(kw_only=True)
class Inspection:
    """What was found in a plan. Made by ``DeepSpeedPlan.inspect``."""

    findings: tuple[Decision, ...]
    """Of the rules, errors first."""
    refusals: tuple[Decision, ...] = ()
    """What else stops it; ``rule`` is the step, ``"resolve"`` or ``"optimizer"``."""
    resolved: ResolvedPlan | None = None
    """What will run; ``None`` when something stops it."""
    settled: tuple[Decision, ...] = ()
    """What settling the optimizer and the schedule decided."""

    def _besides(self, mistakes: Collection[ZeroTuneError]) -> Inspection:
        """What is refused besides ``mistakes``, and not because of what they took away."""
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
    plan: DeepSpeedPlan,
    context: Context,
    *,
    resolve_in: Context | None,
    settle: Callable[[ResolvedPlan], ResolvedPlan],
    mistakes: Collection[ZeroTuneError] = (),
) -> Inspection:
    """See ``DeepSpeedPlan.inspect``."""
    findings = check_plan(plan, context)
    where = resolve_in or context
    refusals: list[Decision] = []
    if not mistakes and not any(finding.severity == "error" for finding in findings):
        step = "resolve"
        try:
            resolved = resolve(plan, where)
            step = "optimizer"
            settled = settle(resolved)
        except ZeroTuneError as error:
            refusals += [Decision.of(each, rule=step) for each in error.each()]
        else:
            decided = settled.decisions[len(resolved.decisions) :]
            return Inspection(findings=findings, resolved=settled, settled=decided)
    told = {finding.key for finding in findings if finding.severity == "error"}
    for refusal in _settled_apart(plan, where, settle):
        if refusal.key not in {*told, *(one.key for one in refusals)}:
            refusals.append(refusal)
    found = Inspection(findings=findings, refusals=tuple(refusals))
    return found._besides(mistakes) if mistakes else found


def _settled_apart(
    plan: DeepSpeedPlan, context: Context, settle: Callable[[ResolvedPlan], ResolvedPlan]
) -> Iterator[Decision]:
    """What is wrong with the optimizer, and with the schedule, wherever they would run."""
    both = DeepSpeedPlan(optimizer=plan.optimizer, scheduler=plan.scheduler)
    for alone in (both, DeepSpeedPlan(scheduler=plan.scheduler)):
        try:
            settle(resolve(alone, context))
        except ZeroTuneError as error:
            yield from (Decision.of(each, rule="optimizer") for each in error.each())
        else:
            return
