"""The rules a plan is checked against: one function each, with an id, a severity and a fix.

A condition is written once and yields findings. ``DeepSpeedPlan.check`` collects them; resolving
raises an *error*, does what a *warning* says and records it, and passes over a *note*. ``RULES`` is
the table the documentation is made from.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Literal

import attrs

from zerotune._util.text import as_number, format_size, is_integer, is_number
from zerotune.decisions import Decision, name_of
from zerotune.errors import UNSET, PlanConflictError, PlanError
from zerotune.optimizers.catalogue import ONE_BIT, entry_of
from zerotune.optimizers.schedules import canonical_schedule
from zerotune.plan import model as known_keys
from zerotune.plan.fill import (
    ACCUMULATION,
    MICRO,
    NO_PREFETCH,
    OPTIMIZER_BUFFERS,
    SUB_GROUP_NVME,
    Case,
    Filler,
    clipping,
    clipping_in_optimizer,
    clipping_sources,
    largest_sub_group,
    optimizer_buffers,
    pins_exactly,
    pins_natively,
    rehearses_in_bf16,
    swaps_parameters,
)
from zerotune.plan.model import (
    AUTO,
    Context,
    DeepSpeedPlan,
    OffloadSection,
    Section,
    join,
    modelled,
    unknown_key,
)
from zerotune.plan.schema import faults, passed_schema

RuleContext = Context
"""The name under which rules and their callers know it."""
RuleSeverity = Literal["error", "warning", "note"]

_ORDER: dict[RuleSeverity, int] = {"error": 0, "warning": 1, "note": 2}


@attrs.frozen(kw_only=True)
class Finding:
    """What one rule found in a plan."""

    rule: str
    """Id of the rule."""
    severity: RuleSeverity
    key: str
    """Path of the setting."""
    value: Any
    """The value found."""
    reason: str
    fix: str
    after: Any = UNSET
    """What resolution makes of it; ``None``: left out; unset: it stays."""
    because: str = attrs.field(default="", eq=False)
    """Why resolution makes that of it, where reason and fix do not say it."""
    error: PlanError | None = attrs.field(default=None, eq=False)
    """The error to raise when it is not the usual ``PlanConflictError``."""
    written: str | None = attrs.field(default=None, eq=False, repr=False)
    """What the user's own file calls the setting, where that is not ``key``."""

    def as_error(self) -> PlanError:
        """The finding as an exception."""
        error = self.error
        if error is None:
            error = PlanConflictError(self.reason, key=self.key, value=self.value, fix=self.fix)
        return error if self.written is None else error.called(self.written)

    def as_decision(self) -> Decision:
        """The finding as a decision of the resolved plan."""
        return Decision(
            key=self.key,
            before=self.value,
            after=self.value if self.after is UNSET else self.after,
            reason=self.because or f"{self.reason}; {self.fix}",
            severity="note" if self.severity == "note" else "warning",
            written=self.written,
        )

    def __str__(self) -> str:
        return f"[{self.severity}] {self.rule}: {self.as_error()}"


_Check = Callable[[Case], Iterator[Finding]]


@attrs.frozen(kw_only=True)
class Rule:
    """One thing that can be wrong with a plan."""

    id: str
    severity: RuleSeverity
    summary: str
    """What is wrong, in one sentence for the documentation."""
    advice: str
    """Why, and what to do about it, for the documentation."""
    check: _Check
    only_deepspeed: bool
    """Whether it concerns only runs that DeepSpeed trains."""
    left_to: str = ""
    """Who does or refuses what it says, where resolving does not."""

    def __call__(self, plan: DeepSpeedPlan, context: Context) -> list[Finding]:
        """What this rule finds."""
        return self.find(Case(plan=plan, context=context))

    def find(self, case: Case) -> list[Finding]:
        """What this rule finds in a plan that other rules look at too."""
        if self.only_deepspeed and not case.context.uses_deepspeed:
            return []
        return list(self.check(case))


class Report:
    """Makes the findings of one rule about one plan; passed to nobody but rule functions."""

    def __init__(self, rule: str, severity: RuleSeverity, case: Case) -> None:
        self._rule = rule
        self._severity: RuleSeverity = severity
        self.case = case

    def __call__(
        self,
        key: str,
        value: Any,
        reason: str,
        fix: str,
        *,
        after: Any = UNSET,
        because: str = "",
    ) -> Finding:
        """A finding of this rule."""
        return Finding(
            rule=self._rule,
            severity=self._severity,
            key=key,
            value=value,
            reason=reason,
            fix=fix,
            after=after,
            because=because,
        )

    def error(self, error: PlanError) -> Finding:
        """A finding made from an error."""
        return Finding(
            rule=self._rule,
            severity=self._severity,
            key=error.key or "",
            value=error.value,
            reason=error.reason,
            fix=error.fix or "",
            error=error,
        )


_Function = Callable[["DeepSpeedPlan", Context, Report], Iterator[Finding]]


def rule(
    rule_id: str, severity: RuleSeverity, *, only_deepspeed: bool = True, left_to: str = ""
) -> Callable[[_Function], Rule]:
    """Make a rule of a function; ``RULES`` lists it.

    The first line of the function's docstring says what is wrong, the rest what to do about it.

    Args:
        rule_id: The rule's name.
        severity: What a finding means; see the module.
        only_deepspeed: Whether it concerns only runs that DeepSpeed trains.
        left_to: Who does or refuses what it says, where that takes more than the plan: the
            precision asked for, or the optimizer.
    """

    def made(function: _Function) -> Rule:
        summary, _, advice = (function.__doc__ or "").strip().partition("\n")
        return Rule(
            id=rule_id,
            severity=severity,
            summary=summary,
            advice=" ".join(advice.split()),
            check=lambda case: function(case.plan, case.context, Report(rule_id, severity, case)),
            only_deepspeed=only_deepspeed,
            left_to=left_to,
        )

    return made


# -- What several subjects ask a plan.


Findings = Iterator[Finding]


def offload_section(plan: DeepSpeedPlan, part: str) -> OffloadSection | None:
    """``offload_optimizer`` or ``offload_param`` as written."""
    zero = plan.zero_optimization
    section: OffloadSection | None = getattr(zero, f"offload_{part}") if zero else None
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


def clips(plan: DeepSpeedPlan, context: Context) -> bool:
    """Whether gradients are clipped: unless something says 0, zerotune clips."""
    return clipping(plan, context.run).norm != 0


def set_twice(plan: DeepSpeedPlan, report: Report, key: str, places: dict[str, Any]) -> Findings:
    """A finding for each of ``places`` that contradicts the top-level ``key``."""
    first = getattr(plan, key)
    for place, second in places.items():
        if is_number(first) and is_number(second) and first != second:
            yield report(
                place,
                second,
                f"{key} is set to {first} as well, and that one is used",
                f"keep only {key}",
            )


def older_than_removal(context: Context) -> bool:
    """Whether the installed DeepSpeed is older than 0.19, which removed much."""
    version = context.platform.versions.get("deepspeed", "") if context.platform else ""
    numbers = re.match(r"(\d{1,9})\.(\d{1,9})", version)
    return numbers is not None and (int(numbers[1]), int(numbers[2])) < (0, 19)


# -- Rules on one setting: what it may not be, at which stage or beside what.


def setting_rule(
    rule_id: str,
    severity: RuleSeverity,
    settings: Mapping[str, Callable[[Any], bool]],
    *,
    summary: str,
    reason: str,
    fix: str,
    stages: tuple[int, ...] = (),
    when: Callable[[DeepSpeedPlan], bool] | None = None,
    more: str = "",
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
        more: What the documentation adds.
        after: What resolution makes of the setting.
        only_deepspeed: As of ``rule``.
        left_to: As of ``rule``.
    """

    def check(plan: DeepSpeedPlan, _context: Context, report: Report) -> Findings:
        if (stages and plan.stage not in stages) or (when is not None and not when(plan)):
            return
        for path, refused in settings.items():
            value = written_at(plan, path)
            if refused(value):
                shown = value.to_dict() if isinstance(value, Section) else value
                yield report(path, shown, reason.format(stage=plan.stage), fix, after=after)

    several = ", ".join(map(str, stages[:-1]))
    why = reason.format(stage=f"{several} or {stages[-1]}" if several else "")
    check.__doc__ = f"{summary}\n{_sentence(fix)} {_sentence(why)} {more}"
    return rule(rule_id, severity, only_deepspeed=only_deepspeed, left_to=left_to)(check)


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


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


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


_ZERO: Final = "zero_optimization"
_OPTIMIZER: Final = f"{_ZERO}.offload_optimizer"
_PARAM: Final = f"{_ZERO}.offload_param"

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
        more="torch's AdamW would keep its first learning rate there, and its states would be in"
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
            f"{_ZERO}.zero_hpz_partition_size": is_other(AUTO, 1),
            f"{_ZERO}.zero_quantized_weights": is_other(AUTO, False),
            f"{_ZERO}.zero_quantized_nontrainable_weights": is_other(AUTO, False),
            f"{_ZERO}.zero_quantized_gradients": is_other(AUTO, False),
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
        more="accelerate sets it to false with a warning.",
    ),
    setting_rule(
        "legacy-stage-1",
        "error",
        {f"{_ZERO}.legacy_stage1": is_one(True)},
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
        when=lambda plan: written_at(plan, f"{_ZERO}.reduce_scatter") is not False,
        summary="Scaling gradients before they are reduced is refused by stages 2 and 3.",
        reason="DeepSpeed refuses it at stage {stage} with reduce_scatter, its default",
        fix="remove this key, or set zero_optimization.reduce_scatter to false",
    ),
    setting_rule(
        "muon-reduce-scatter",
        "warning",
        {f"{_ZERO}.reduce_scatter": lambda value: value is not False},
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
        more="``OptimizerResolver`` replaces them, or refuses, as its policy says.",
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
        more="With fp16 off, or a fixed ``loss_scale``, DeepSpeed does not look at them.",
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
        more="``OptimizerResolver`` writes 1 and starts at the peak.",
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
def batch_triple(_plan: DeepSpeedPlan, _context: Context, report: Report) -> Findings:
    """Train batch = micro batch x accumulation x world size must hold.

    Write two of the three, or change one so that the product holds at this world size.
    """
    try:
        _ = report.case.batch
    except PlanConflictError as error:
        yield report.error(error)


@rule("accumulation-set-twice", "warning", only_deepspeed=False)
def accumulation_twice(plan: DeepSpeedPlan, _context: Context, report: Report) -> Findings:
    """Accumulation is written both in the DeepSpeed block and outside of it.

    Keep the one in the DeepSpeed block, which is used.
    """
    launched = plan.launch.gradient_accumulation_steps if plan.launch else None
    yield from set_twice(plan, report, ACCUMULATION, {f"launch.{ACCUMULATION}": launched})


@rule("world-size", "warning", only_deepspeed=False)
def world_size(plan: DeepSpeedPlan, context: Context, report: Report) -> Findings:
    """The launcher's file asks for another number of processes than train.

    Start as many as the file says, or correct the file: every batch size depends on it.
    """
    asked = plan.launch.num_processes if plan.launch else None
    # accelerate writes -1 for "as many as there are devices".
    if asked is not None and asked > 0 and asked != context.world_size:
        yield report(
            "launch.num_processes",
            asked,
            f"the launcher's file asks for {asked} processes, and this is world size"
            f" {context.world_size}, for which the batch sizes hold",
            f"start {asked} processes, or write {context.world_size}",
        )


@rule("micro-batch-unset", "note", only_deepspeed=False)
def micro_batch_unset(plan: DeepSpeedPlan, context: Context, report: Report) -> Findings:
    """Nothing says how many samples one pass takes.

    Write ``train_micro_batch_size_per_gpu``; without it the micro batch is 1.
    """
    written = (plan.train_batch_size, plan.train_micro_batch_size_per_gpu)
    if all(value in (None, AUTO) for value in written) and context.run.micro_batch_size is None:
        yield report(
            MICRO, written[1], "no batch size is written, so the micro batch is 1", f"write {MICRO}"
        )


# -- Rules on where the optimizer and the parameters wait.


_NOTEWORTHY = 1024**3
"""Bytes of host memory below which rounding is not worth a word."""


@rule("offload-without-device", "warning")
def offload_without_device(plan: DeepSpeedPlan, _context: Context, report: Report) -> Findings:
    """An offload section without a device offloads nothing: DeepSpeed's default is ``"none"``.

    Name a device, or remove the section.
    """
    for part in ("optimizer", "param"):
        section = offload_section(plan, part)
        if section is not None and section.device in (None, AUTO):
            yield report(
                f"zero_optimization.offload_{part}.device",
                section.device,
                'DeepSpeed reads this as "none", so nothing is offloaded',
                'write "cpu" (or "nvme" at stage 3), or remove the section',
                after="none",
                because="which is what DeepSpeed makes of it; name a device to offload",
            )


@rule("partial-offload-optimizer", "error")
def partial_offload_optimizer(plan: DeepSpeedPlan, _context: Context, report: Report) -> Findings:
    """An offload ratio below 1 works with AdamW in host memory alone; DeepSpeed asserts it.

    Write 1.0, or use AdamW. What stays on the device is stepped by torch's AdamW: of Adam with L2
    it would make another optimizer, and it has no states in bf16.
    """
    section = offload_section(plan, "optimizer")
    ratio = section.ratio if section is not None else None
    if plan.stage != 3 or not is_number(ratio) or float(ratio or 0) == 1:
        return
    if section is not None and section.device == "nvme":
        told = "DeepSpeed offloads a part of the optimizer to host memory, not to NVMe"
    elif plan.optimizer_name != "AdamW":
        name = plan.optimizer_name or (plan.optimizer and plan.optimizer.type)
        told = f"DeepSpeed offloads a part of AdamW only, not of {name}"
    else:
        return
    yield report(
        "zero_optimization.offload_optimizer.ratio",
        ratio,
        told,
        "set the ratio to 1.0, or use AdamW with offload_optimizer.device cpu",
    )


@rule("super-offload-accelerator", "error")
def super_offload_accelerator(plan: DeepSpeedPlan, context: Context, report: Report) -> Findings:
    """SuperOffload runs on NVIDIA CUDA devices only; DeepSpeed asserts it.

    Remove ``super_offload``.
    """
    platform = context.platform
    if not _super_offload(plan) or plan.stage != 3 or platform is None:
        return
    if platform.accelerator not in ("cuda", "rocm"):
        yield report(
            "zero_optimization.offload_optimizer.super_offload",
            True,
            f"SuperOffload needs CUDA, and this platform trains on {platform.accelerator}",
            "remove super_offload",
        )


@rule("super-offload", "warning")
def super_offload(plan: DeepSpeedPlan, context: Context, report: Report) -> Findings:
    """SuperOffload works at stage 3 only, and overlaps nothing while gradients are clipped.

    Leave it out, or set ``gradient_clipping`` to 0 if training stays stable without.
    """
    if not _super_offload(plan) or not isinstance(plan.stage, int):
        return
    key = "zero_optimization.offload_optimizer.super_offload"
    if plan.stage != 3:
        yield report(
            key,
            True,
            f"DeepSpeed ignores SuperOffload below stage 3, here {plan.stage}",
            "set zero_optimization.stage to 3, or remove super_offload",
        )
    elif clips(plan, context):
        yield report(
            key,
            True,
            "its CPU steps overlap the backward pass only without clipping; with it each"
            " sub-group is stepped afterwards, one by one",
            "remove super_offload, or set gradient_clipping to 0",
        )


def _super_offload(plan: DeepSpeedPlan) -> bool:
    section = offload_section(plan, "optimizer")
    return section is not None and active(section) and section.extra.get("super_offload") is True


@rule("pinned-memory-rounding", "note")
def pinned_memory(plan: DeepSpeedPlan, context: Context, report: Report) -> Findings:
    """An older torch rounds each pinned block up to a power of two: 16 GiB for SDXL at stage 2.

    Install torch 2.13, where zerotune switches that off, or DeepSpeed 0.19.8, which page-locks to
    the byte itself where locked memory is not limited; or set ``pin_memory`` to false where host
    memory is short. Checked where model and torch are known.
    """
    section = offload_section(plan, "optimizer")
    if section is None or not active(section) or section.pin_memory is False:
        return
    if plan.stage not in (1, 2) or context.model is None or not _rounds(context):
        return
    elements = -(-context.model.trainable_numel // max(1, context.world_size))
    staging = 2 if plan.precision in ("bf16", "fp16") else 4
    # Master weights, their gradients and the copy in the model's precision: one block each.
    blocks = [elements * width for width in (4, 4, staging)]
    lost = sum(_power_of_two(block) - block for block in blocks)
    if lost >= _NOTEWORTHY:
        yield report(
            "zero_optimization.offload_optimizer.pin_memory",
            section.pin_memory,
            "torch rounds each pinned block up to a power of two, which adds"
            f" {format_size(lost)} to the {format_size(sum(blocks))} of each rank's flat buffers",
            "install torch 2.13, set DS_PIN_MEMORY_BACKEND=native, or pin_memory to false if host"
            " memory is short",
        )


def _rounds(context: Context) -> bool:
    here = context.platform
    return here is not None and not pins_exactly(here) and not pins_natively(here)


def _power_of_two(nbytes: int) -> int:
    return 1 << max(0, nbytes - 1).bit_length()


# -- Rules on the optimizer and on clipping.


_CLIPPING: Final = "gradient_clipping"


@rule("muon-convolutions", "warning")
def muon_convolutions(plan: DeepSpeedPlan, context: Context, report: Report) -> Findings:
    """Muon fails on the weights of convolutions at stages 2 and 3.

    Use AdamW, or leave convolutions to Muon's auxiliary Adam. Its compiled update multiplies
    matrices and cannot broadcast kernels. Checked where the model is known.
    """
    model = context.model
    if plan.optimizer_name != "Muon" or model is None or plan.stage not in (2, 3):
        return
    wide = next((p for p in model.trainable if len(p.shape) > 2), None)
    if wide is not None:
        yield report(
            "optimizer.type",
            plan.optimizer.type if plan.optimizer else None,
            "Muon's update is of matrices and fails on weights of more than two dimensions, such"
            f" as {wide.name}",
            'write "AdamW"',
        )


@rule("clipping-set-twice", "warning", only_deepspeed=False)
def clipping_twice(plan: DeepSpeedPlan, _context: Context, report: Report) -> Findings:
    """Clipping is written both at the top level and elsewhere.

    Keep ``gradient_clipping``, which is used.
    """
    launched = plan.launch.gradient_clipping if plan.launch else None
    params = (plan.optimizer.params if plan.optimizer else None) or {}
    places = {
        "launch.gradient_clipping": launched,
        "optimizer.params.max_grad_norm": params.get("max_grad_norm"),
    }
    yield from set_twice(plan, report, _CLIPPING, places)


@rule("clipping-in-optimizer", "error", only_deepspeed=False, left_to="the optimizer")
def clipping_in_the_optimizer(plan: DeepSpeedPlan, _context: Context, report: Report) -> Findings:
    """``max_grad_norm`` stands among the arguments of the optimizer, where DeepSpeed refuses it.

    Write ``gradient_clipping`` at the top level.
    """
    error = clipping_in_optimizer((plan.optimizer.params if plan.optimizer else None) or {})
    if error is not None:
        yield report.error(error)


@rule("clipping-unset", "note", only_deepspeed=False)
def clipping_unset(plan: DeepSpeedPlan, context: Context, report: Report) -> Findings:
    """Nothing says how gradients are clipped, and DeepSpeed's default moved from 0 to 1.0.

    Write ``gradient_clipping``; 0 switches clipping off.
    """
    if any(value is not None for value, _ in clipping_sources(plan, context.run)):
        return
    yield report(
        _CLIPPING,
        None,
        "no clipping is written, so gradients are clipped to a norm of 1.0; older DeepSpeed did"
        " not clip",
        "write gradient_clipping, 0 to switch it off",
    )


# -- Rules on bf16, fp16 and what the platform computes in.


@rule("precision-conflict", "error", only_deepspeed=False)
def precision_conflict(plan: DeepSpeedPlan, _context: Context, report: Report) -> Findings:
    """At most one of bf16 and fp16 may be on, and the launcher must agree.

    Switch one off, and let the launcher's ``mixed_precision`` say the same.
    """
    bf16 = plan.bf16.enabled if plan.bf16 else None
    fp16 = plan.fp16.enabled if plan.fp16 else None
    if bf16 is True and fp16 is True:
        yield report(
            "fp16.enabled",
            True,
            "bf16.enabled is true too, and DeepSpeed refuses both",
            "switch one of them off; bf16 needs no loss scaling",
        )
        return
    launched = plan.launch.mixed_precision if plan.launch else None
    if launched == "fp8":
        yield report(
            "launch.mixed_precision",
            launched,
            "zerotune does not train in fp8",
            'write "bf16", "fp16" or "no"',
        )
    written = {"bf16": bf16, "fp16": fp16}
    asked = [name for name, enabled in written.items() if enabled is True]
    refused = launched in written and written[launched] is False
    if launched in ("bf16", "fp16", "fp32") and (refused or (asked and asked != [launched])):
        says = f"{asked[0]}.enabled = true" if asked else f"{launched}.enabled = false"
        yield report(
            "launch.mixed_precision",
            launched,
            f"the DeepSpeed configuration says {says}",
            "make them agree, or leave mixed_precision out of the launcher's file",
        )


@rule("precision-unsupported", "error", only_deepspeed=False)
def precision_unsupported(plan: DeepSpeedPlan, context: Context, report: Report) -> Findings:
    """The platform cannot compute in the precision asked for.

    Ask for one it has, or write ``"auto"``. Checked where a platform is known.
    """
    if context.platform is None or _contradicts_itself(plan):
        return
    try:
        _ = report.case.precision
    except PlanError as error:
        yield report.error(error)


def _contradicts_itself(plan: DeepSpeedPlan) -> bool:
    launched = plan.launch.mixed_precision if plan.launch else None
    sections = (plan.bf16, plan.fp16)
    return launched == "fp8" or all(section and section.enabled is True for section in sections)


@rule("fp16-on-cpu", "warning", left_to="the choice of precision")
def fp16_on_cpu(plan: DeepSpeedPlan, context: Context, report: Report) -> Findings:
    """DeepSpeed's CPU accelerator takes fp16 only where torch has native fp16 arithmetic.

    Resolution trains in bf16 there, which takes the same memory and needs no loss scaling.
    """
    if plan.precision == "fp16" and context.platform and rehearses_in_bf16(context.platform):
        yield report(
            "fp16.enabled",
            True,
            "DeepSpeed's CPU accelerator has no fp16 on this machine, so bf16 is used",
            'write bf16, or "auto"',
        )


@rule("bf16-emulated", "note", only_deepspeed=False)
def bf16_emulated(plan: DeepSpeedPlan, context: Context, report: Report) -> Findings:
    """A CPU without bf16 arithmetic emulates it, many times slower than fp32.

    Train in fp32 there, unless it is a rehearsal of a bf16 run.
    """
    platform = context.platform
    if platform is None or not platform.bf16 or platform.native_bf16:
        return
    if plan.precision == "bf16":
        yield report(
            "bf16.enabled",
            True,
            "this CPU has no bf16 arithmetic (AVX512_BF16, AMX) and emulates it, many times slower"
            " than fp32",
            'set bf16.enabled to false or "auto", unless you rehearse a bf16 run',
        )


@rule("bf16-master-weights", "error")
def bf16_master_weights(plan: DeepSpeedPlan, _context: Context, report: Report) -> Findings:
    """Low-precision master weights need ZeRO with the optimizer offloaded to the CPU.

    Offload the optimizer, or remove the key. In bf16 they may stay on the device when
    ``bf16_optimizer_states`` is on too.
    """
    bf16, fp16 = plan.bf16, plan.fp16
    states = bf16 is not None and bf16.bf16_optimizer_states is True
    asked = {
        "bf16.bf16_master_weights_and_grads": bf16 and bf16.bf16_master_weights_and_grads,
        "fp16.fp16_master_weights_and_grads": fp16 and fp16.fp16_master_weights_and_grads,
    }
    for key, value in asked.items():
        stays = plan.offload_optimizer_device == "none" and not (states and key.startswith("bf16"))
        if value is True and (plan.stage == 0 or (stays and isinstance(plan.stage, int))):
            yield report(
                key,
                True,
                "DeepSpeed keeps low-precision master weights only with ZeRO stage 1 to 3 and"
                " the optimizer offloaded",
                'set offload_optimizer.device to "cpu", or remove this key',
            )
    if bf16 and states and not bf16.bf16_master_weights_and_grads:
        yield report(
            "bf16.bf16_optimizer_states",
            True,
            "needs bf16_master_weights_and_grads too",
            "remove this key; the optimizer AdamWBF16States keeps its moments in bf16 beside fp32"
            " master weights",
        )
    if all(value is True for value in asked.values()):
        yield report(
            "fp16.fp16_master_weights_and_grads",
            True,
            "bf16.bf16_master_weights_and_grads is true too, and DeepSpeed refuses both",
            "keep the one of the precision that trains",
        )


# -- Rules on the learning-rate schedule and the length of the run.


_PARAMS: Final = "scheduler.params"
_CYCLE_DEFAULT: Final = 2000
"""``cycle_first_step_size`` of DeepSpeed's ``OneCycle``."""


def _params(plan: DeepSpeedPlan) -> Mapping[str, Any]:
    return (plan.scheduler.params if plan.scheduler else None) or {}


def _schedule(plan: DeepSpeedPlan) -> str | None:
    name = plan.scheduler.type if plan.scheduler else None
    return canonical_schedule(name) if name else None


@rule("scheduler-warmup-too-long", "warning", only_deepspeed=False)
def warmup_too_long(plan: DeepSpeedPlan, context: Context, report: Report) -> Findings:
    """The warm-up is as long as the schedule or the run, so the peak is never reached.

    Shorten the warm-up; steps are optimizer steps, not micro batches.
    """
    warmup = number(_params(plan).get("warmup_num_steps"))
    total = number(_params(plan).get("total_num_steps"))
    if warmup is None or warmup < 1:
        return
    for end, what in ((total, "total_num_steps"), (context.run.total_steps, "the run's steps")):
        if end is not None and warmup >= end:
            yield report(
                f"{_PARAMS}.warmup_num_steps",
                _params(plan)["warmup_num_steps"],
                f"the warm-up ends at or after the last of {what} ({end:g}), so the learning rate"
                " never reaches its peak",
                "write fewer warm-up steps; they are optimizer steps, not micro batches",
            )
            return


@rule("scheduler-total", "warning", only_deepspeed=False)
def scheduler_total(plan: DeepSpeedPlan, context: Context, report: Report) -> Findings:
    """``total_num_steps`` differs from the optimizer steps of the run.

    Write the number of optimizer steps, or ``"auto"``: a shorter schedule trains on at its end
    value (0 for ``WarmupDecayLR``), a longer one never comes down.
    """
    total, run = number(_params(plan).get("total_num_steps")), context.run.total_steps
    if total is None or run is None or total == run:
        return
    end = "0" if _schedule(plan) == "WarmupDecayLR" else "its smallest value"
    effect = (
        f"the learning rate stays at {end} for the last {run - total:g} steps"
        if total < run
        else f"the run ends {total - run:g} steps before the learning rate has come down"
    )
    yield report(
        f"{_PARAMS}.total_num_steps",
        _params(plan)["total_num_steps"],
        f"the run takes {run} optimizer steps, so {effect}{_confused_with(total, run, context)}",
        f'write {run}, or "auto"',
    )


def _confused_with(total: float, run: int, context: Context) -> str:
    accumulation = context.run.gradient_accumulation_steps or 1
    for factor, what in ((accumulation, "micro batches"), (context.world_size, "ranks times")):
        if factor > 1 and total == run * factor:
            return f" (it seems to count {what} steps: {factor} x {run})"
    return ""


@rule("scheduler-cycle", "warning", only_deepspeed=False)
def scheduler_cycle(plan: DeepSpeedPlan, context: Context, report: Report) -> Findings:
    """A ``OneCycle`` longer than the run never comes down.

    Make ``cycle_first_step_size`` plus ``cycle_second_step_size`` (as long as the first when it
    is not written) at most the optimizer steps of the run.
    """
    run = context.run.total_steps
    if _schedule(plan) != "OneCycle" or run is None:
        return
    written = _params(plan).get("cycle_first_step_size")
    first = _CYCLE_DEFAULT if written is None else number(written)
    second = _params(plan).get("cycle_second_step_size")
    down = first if second is None else number(second)
    if first is not None and down is not None and first + down > run:
        yield report(
            f"{_PARAMS}.cycle_first_step_size",
            written,
            f"the cycle takes {first:g} + {down:g} steps and the run {run}, so the learning rate"
            " does not come down again",
            f"write at most {max(1, run // 2)}",
        )


# -- Rules on NVMe.


_LARGE_POOL = 4 * 1024**3
"""Bytes of pinned swap buffers that deserve a warning."""


def _swap_buffers(plan: DeepSpeedPlan) -> int | None:
    """``buffer_count`` where an optimizer with two moments is swapped and the user wrote one."""
    section = offload_section(plan, "optimizer")
    if plan.stage != 3 or section is None or section.device != "nvme":
        return None
    two = entry_of(plan.optimizer_name).states_per_weight() >= 2
    return integer(section.buffer_count) if two else None


@rule("nvme-path-unset", "note")
def nvme_path_unset(plan: DeepSpeedPlan, _context: Context, report: Report) -> Findings:
    """Something swaps to NVMe and no folder is written.

    Write ``nvme_path`` on a fast disk. Without it the run leases a folder of its own below the
    swap root; DeepSpeed alone refuses to start.
    """
    for part in ("optimizer", "param"):
        section = offload_section(plan, part)
        launched = getattr(plan.launch, f"offload_{part}_path", None)
        if section is None or section.device != "nvme" or plan.stage != 3 or launched:
            continue
        if section.nvme_path in (None, AUTO):
            yield report(
                f"zero_optimization.offload_{part}.nvme_path",
                section.nvme_path,
                "no folder is written, so the run leases one below the swap root",
                "write the path of a folder on a fast disk",
            )


@rule("nvme-optimizer-buffers", "error")
def nvme_optimizer_buffers(plan: DeepSpeedPlan, _context: Context, report: Report) -> Findings:
    """The swap pool of an optimizer with two moments needs four buffers.

    Write at least 4, or ``"auto"``.
    """
    written = _swap_buffers(plan)
    if written is not None and written < OPTIMIZER_BUFFERS:
        yield report(
            "zero_optimization.offload_optimizer.buffer_count",
            written,
            "weight, gradient and two moments are resident together, and DeepSpeed asserts that"
            " there is a buffer for each",
            f'write at least {OPTIMIZER_BUFFERS}, or "{AUTO}"',
        )


@rule("nvme-pipeline-buffers", "warning")
def nvme_pipeline_buffers(plan: DeepSpeedPlan, _context: Context, report: Report) -> Findings:
    """Pipelined swapping needs four more buffers for reading ahead and four for writing back.

    Write 8 with one of ``pipeline_read`` and ``pipeline_write``, 12 with both, or ``"auto"``.
    """
    section = offload_section(plan, "optimizer")
    written = _swap_buffers(plan)
    if section is None or written is None:
        return
    need = optimizer_buffers(section)
    if OPTIMIZER_BUFFERS <= written < need:
        yield report(
            "zero_optimization.offload_optimizer.buffer_count",
            written,
            "DeepSpeed runs out of swap buffers as soon as there is more than one sub-group",
            f'write at least {need}, or "{AUTO}"',
        )


@rule("nvme-sub-group-size", "warning")
def nvme_sub_group_size(plan: DeepSpeedPlan, context: Context, report: Report) -> Findings:
    """The pool of NVMe swap buffers is host memory: buffers x largest sub-group x 4 bytes.

    Write 5e7 to 1e8, or ``"auto"``. DeepSpeed's default of 1e9 takes 15 GiB with four buffers
    where the model is as large.
    """
    zero, section = plan.zero_optimization, offload_section(plan, "optimizer")
    if zero is None or section is None or plan.stage != 3 or section.device != "nvme":
        return
    size = integer(zero.sub_group_size)
    if size is None:
        return
    buffers = integer(section.buffer_count) or optimizer_buffers(section)
    model = context.model
    world_size = max(1, context.world_size)
    largest = largest_sub_group(model, world_size, size) if model else size
    pool = buffers * largest * 4
    if pool >= _LARGE_POOL:
        yield report(
            "zero_optimization.sub_group_size",
            size,
            f"the swap pool holds {buffers} buffers of the largest sub-group in fp32, which is"
            f" {format_size(pool)} of host memory on each rank",
            f'write {SUB_GROUP_NVME}, or "{AUTO}"',
        )


@rule("nvme-param-prefetch", "warning")
def nvme_param_prefetch(plan: DeepSpeedPlan, _context: Context, report: Report) -> Findings:
    """Fetching parameters ahead from NVMe fails in the second step.

    Write 0 or ``"auto"``. Where the forward pass turns into the backward pass DeepSpeed 0.19.8
    queues a layer twice ("already assigned swap buffer"); resolution switches it off.
    """
    zero = plan.zero_optimization
    written = integer(zero.stage3_prefetch_bucket_size) if zero else None
    if zero is None or not written or plan.stage != 3 or plan.offload_param_device != "nvme":
        return
    if swaps_parameters(zero, _filler(report.case), plan.aio):
        yield report(
            "zero_optimization.stage3_prefetch_bucket_size",
            written,
            "DeepSpeed 0.19.8 fails when it fetches parameters ahead from NVMe",
            f'write 0, or "{AUTO}"',
            after=0,
            because=NO_PREFETCH,
        )


def _filler(case: Case) -> Filler:
    precision = case.plan.precision
    if case.context.platform is not None:
        # What contradicts itself is refused by the rules on precision.
        with contextlib.suppress(PlanError):
            precision, _ = case.precision
    return Filler(stage=int(case.plan.stage), context=case.context, precision=precision)


@rule("number-as-text", "note", only_deepspeed=False)
def number_as_text(plan: DeepSpeedPlan, _context: Context, report: Report) -> Findings:
    """An argument of the optimizer or the schedule is a number in quotes.

    Write it without quotes. It is read as the number; DeepSpeed alone would hand the text on.
    """
    for name in ("optimizer", "scheduler"):
        section = getattr(plan, name)
        for key, value in ((section.params if section else None) or {}).items():
            if isinstance(value, str) and as_number(value) is not None:
                yield report(
                    f"{name}.params.{key}",
                    value,
                    "is a number in quotes, and is read as the number",
                    f"write {value.strip()}",
                )


# -- Rules on ``zero_optimization``, on removed and on unknown keys.


_LARGE_BUCKET: Final = 512 * 1024**2
"""Bytes of reduce buckets that deserve a note; those sized by resolution take a tenth."""


@rule("stage-auto", "warning")
def stage_auto(plan: DeepSpeedPlan, _context: Context, report: Report) -> Findings:
    """DeepSpeed reads a stage of ``"auto"`` as 0, in silence.

    Write a number. Resolution chooses 2, or 3 where what is offloaded needs it.
    """
    if plan.stage != AUTO:
        return
    needs_three = plan.offload_param_device in ("cpu", "nvme") or (
        plan.offload_optimizer_device == "nvme"
    )
    why = "what is offloaded needs stage 3" if needs_three else "partitions all but the weights"
    yield report(
        "zero_optimization.stage",
        AUTO,
        "DeepSpeed itself drops the key and trains at stage 0",
        "write 0, 1, 2 or 3",
        after=3 if needs_three else 2,
        because=f"{why}; DeepSpeed itself would silently use stage 0",
    )


@rule("removed-section", "error")
def removed_section(plan: DeepSpeedPlan, context: Context, report: Report) -> Findings:
    """Sections DeepSpeed 0.19 removed are refused, unless an older DeepSpeed is installed.

    Remove the key: zerotune needs a newer DeepSpeed than those that had it.
    """
    if older_than_removal(context):
        return
    zero = plan.zero_optimization
    places = (
        ("", plan.extra, known_keys.REMOVED),
        ("zero_optimization.", zero.extra if zero else {}, known_keys.REMOVED_ZERO),
    )
    for prefix, extra, removed in places:
        for key in sorted(extra.keys() & removed.keys()):
            yield report(
                f"{prefix}{key}",
                extra[key],
                f"DeepSpeed 0.19 removed {removed[key]}",
                "remove this key",
            )


@rule("unknown-key", "error", only_deepspeed=False)
def unknown_keys(plan: DeepSpeedPlan, _context: Context, report: Report) -> Findings:
    """DeepSpeed ignores unknown top-level keys in silence; reading a plan refuses them.

    Correct the spelling. Keys that begin with an underscore are kept as remarks.
    """
    known = {attribute.name for attribute in modelled(DeepSpeedPlan)} | plan.passed_through
    for key, value in plan.extra.items():
        if key not in plan.passed_through and not key.startswith("_") and plan.source == "code":
            yield report.error(unknown_key(key, value, key, known))


_PARALLEL: Final = {
    ("sequence_parallel_size",): "ranks that share one sequence",
    ("tensor_parallel", "autotp_size"): "ranks that share one matrix",
    ("tensor_parallel", "tensor_parallel", "tp_size"): "ranks that share one matrix",
    ("tensor_parallel", "tp", "tp_size"): "ranks that share one matrix",
    ("pipeline", "stages"): "stages of a pipeline",
    ("expert_parallel", "autoep_size"): "ranks that share the experts",
    ("hybrid_engine", "inference_tp_size"): "ranks that share one matrix",
}
"""Key to what it counts; more than one of them need more than data parallelism."""
_PARALLELISM_CONFIG: Final = {
    "tp_size": "ranks that share one matrix",
    "cp_size": "ranks that share one context",
    "sp_size": "ranks that share one sequence",
}
"""The same of accelerate's ``parallelism_config``; ``accelerate config`` writes them prefixed."""


@rule("parallelism", "error", only_deepspeed=False)
def parallelism(plan: DeepSpeedPlan, _context: Context, report: Report) -> Findings:
    """Every rank is a data-parallel one: sequences, matrices and layers are not split over ranks.

    Remove the key, or write 1. With ``sequence_parallel_size: 2`` DeepSpeed counts half as many
    ranks into the train batch, and the model would have to split its sequences itself.
    """
    launch = {} if plan.launch is None else plan.launch.extra
    section, asked = "parallelism_config", dict[tuple[str, ...], tuple[Any, str]]()
    for path, counted in _PARALLEL.items():
        asked[path] = plan.extra, counted
    for name, counted in _PARALLELISM_CONFIG.items():
        for key in (name, f"{section}_{name}"):
            asked[section, key] = launch, counted
    for path, (written, counted) in asked.items():
        value = written
        for name in path:
            value = value.get(name) if isinstance(value, Mapping) else None
        number = as_number(value)
        if number is not None and number > 1:
            yield report(
                ".".join(path),
                value,
                f"it asks for {value} {counted}, and zerotune trains with data parallelism alone:"
                " the batch sizes would not hold",
                "remove this key, or write 1",
            )


@rule("passed-through", "error")
def passed_through(plan: DeepSpeedPlan, context: Context, report: Report) -> Findings:
    """Sections that are passed through must be what DeepSpeed's own models take.

    Write what the fix says. Names, types and ranges are those of the schema that was given to
    ``check``, else of DeepSpeed 0.19.8.
    """
    schema = passed_schema() if context.schema is None else context.schema.get("properties", {})
    zero = plan.zero_optimization
    known = schema.get("zero_optimization", {}).get("properties", {})
    places: list[tuple[str, Section | None, Mapping[str, Any]]] = [
        ("", plan, schema),
        ("zero_optimization", zero, known),
    ]
    for part in ("offload_optimizer", "offload_param"):
        inside = known.get(part, {})
        branches = [inside, *inside.get("anyOf", ())]
        found: Mapping[str, Any] = next(
            (each["properties"] for each in branches if "properties" in each), {}
        )
        places.append((f"zero_optimization.{part}", getattr(zero, part, None), found))
    for prefix, section, keys in places:
        extra: Mapping[str, Any] = {} if section is None else getattr(section, "extra", {})
        for key, value in extra.items():
            if prefix.endswith("offload_param") and key not in keys:
                place = "it belongs to offload_optimizer"
                yield report(join(prefix, key), value, "DeepSpeed refuses this key here", place)
            elif key in keys:
                for fault in faults(value, keys[key], join(prefix, key)):
                    yield report(*fault)


@rule("gradient-norm", "error")
def gradient_norm(plan: DeepSpeedPlan, context: Context, report: Report) -> Findings:
    """``compute_grad_norm: false`` needs stage 1 or 2, no clipping and no optimizer offload.

    Remove the key, or set ``gradient_clipping`` to 0 and keep the optimizer on the device.
    """
    if zero_extra(plan, "compute_grad_norm") is not False or plan.stage == AUTO:
        return
    problems = {
        f"stage 1 or 2, and this is stage {plan.stage}": plan.stage not in (1, 2),
        "gradient_clipping 0, because clipping measures the norm": clips(plan, context),
        "the optimizer on the device": active(offload_section(plan, "optimizer")),
    }
    for needs, broken in problems.items():
        if broken:
            yield report(
                "zero_optimization.compute_grad_norm",
                False,
                f"DeepSpeed accepts it only with {needs}",
                "remove this key",
            )
            return


@rule("gradient-sum", "error")
def gradient_sum(plan: DeepSpeedPlan, _context: Context, report: Report) -> Findings:
    """Summing gradients over ranks is refused at stage 3, with ZenFlow and with DeepCompile.

    Remove ``gradient_allreduce_op``; the mean is the default.
    """
    value = plan.extra.get("gradient_allreduce_op")
    if not isinstance(value, str) or value.lower() != "sum":
        return
    compiled = plan.extra.get("compile")
    refusals = {
        "at stage 3": plan.stage == 3,
        "with ZenFlow": zero_extra(plan, "zenflow") is not None,
        "with DeepCompile": isinstance(compiled, Mapping) and compiled.get("deepcompile") is True,
    }
    refused = [where for where, holds in refusals.items() if holds]
    if refused:
        yield report(
            "gradient_allreduce_op",
            value,
            f"DeepSpeed refuses it {refused[-1]}",
            'remove this key, or write "mean"',
        )


@rule("zenflow-convolutions", "error")
def zenflow(plan: DeepSpeedPlan, context: Context, report: Report) -> Findings:
    """ZenFlow raises on, or scrambles, the weights of convolutions.

    Remove ``zenflow``: it selects columns of matrices (``num_row, num_col``) and treats every
    other shape as one row, or fails to transpose it. Checked where the model is known.
    """
    section = zero_extra(plan, "zenflow")
    model = context.model
    if section is None or model is None:
        return
    wide = next((p for p in model.trainable if len(p.shape) > 2), None)
    if wide is not None:
        yield report(
            "zero_optimization.zenflow",
            section,
            f"ZenFlow scrambles weights of more than two dimensions, such as {wide.name}",
            "remove zenflow",
        )


@rule("large-reduce-bucket", "note")
def large_bucket(plan: DeepSpeedPlan, _context: Context, report: Report) -> Findings:
    """A reduce bucket is device memory: its elements, twice with ``overlap_comm`` below stage 3.

    Write 3e7 or ``"auto"``, which holds the largest tensor. DeepSpeed's 5e8 takes 0.93 GiB in
    16 bits, and 1.86 GiB with ``overlap_comm`` at stages 1 and 2.
    """
    zero = plan.zero_optimization
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
        doubled = ", two of them because of overlap_comm" if buckets == 2 else ""
        yield report(
            "zero_optimization.reduce_bucket_size",
            size,
            f"the bucket takes {format_size(cost)} of device memory{doubled}",
            f'write 30000000, or "{AUTO}"',
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


def check_plan(plan: DeepSpeedPlan, context: Context) -> tuple[Finding, ...]:
    """Everything the rules find, errors first, otherwise in the order of the rules."""
    return check_case(Case(plan=plan, context=context))


def check_case(case: Case, *, rules: tuple[Rule, ...] = RULES) -> tuple[Finding, ...]:
    """The same of some rules, with what they work out kept in ``case``."""
    findings = [finding for each in rules for finding in each.find(case)]
    if case.plan.names:
        names = case.plan.names
        findings = [attrs.evolve(each, written=name_of(each.key, names)) for each in findings]
    return tuple(sorted(findings, key=lambda finding: _ORDER[finding.severity]))
