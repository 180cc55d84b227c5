"""Rules on ``zero_optimization``, on removed and on unknown keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from zerotune.plan import known_keys
from zerotune.plan.kinds import AUTO
from zerotune.plan.memory.sizes import format_size
from zerotune.plan.rulebook.common import (
    Findings,
    active,
    clips,
    integer,
    offload_section,
    older_than_removal,
    zero_extra,
)
from zerotune.plan.rules import Report, RuleContext, rule
from zerotune.plan.section import modelled, unknown_key

if TYPE_CHECKING:
    from zerotune.plan.deepspeed_plan import DeepSpeedPlan

_ZERO_PLUS_PLUS: Final = {
    "zero_hpz_partition_size": 1,
    "zero_quantized_weights": False,
    "zero_quantized_nontrainable_weights": False,
    "zero_quantized_gradients": False,
}
_LARGE_BUCKET: Final = 512 * 1024**2
"""Bytes of reduce buckets that deserve a note; those sized by resolution take a tenth."""


@rule("stage-auto", "warning", recorded_elsewhere=True)
def stage_auto(plan: DeepSpeedPlan, _context: RuleContext, report: Report) -> Findings:
    """DeepSpeed reads a stage of ``"auto"`` as 0, in silence.

    Write a number. Resolution chooses 2, or 3 where what is offloaded needs it.
    """
    if plan.stage == AUTO:
        yield report(
            "zero_optimization.stage",
            AUTO,
            "DeepSpeed itself drops the key and trains at stage 0",
            "write 0, 1, 2 or 3",
        )


@rule("removed-section", "error")
def removed_section(plan: DeepSpeedPlan, context: RuleContext, report: Report) -> Findings:
    """Sections DeepSpeed 0.19 removed are refused, unless an older DeepSpeed is installed.

    Remove the key, or install ``deepspeed<0.19``.
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
                "remove this key, or install deepspeed<0.19",
            )


@rule("unknown-key", "error", only_deepspeed=False)
def unknown_keys(plan: DeepSpeedPlan, _context: RuleContext, report: Report) -> Findings:
    """DeepSpeed ignores unknown top-level keys in silence; reading a plan refuses them.

    Correct the spelling. Keys that begin with an underscore are kept as remarks.
    """
    known = {attribute.name for attribute in modelled(type(plan))} | plan.passed_through
    for key, value in plan.extra.items():
        if key not in plan.passed_through and not key.startswith("_") and plan.source == "code":
            yield report.error(unknown_key(key, value, key, known))


@rule("legacy-stage-1", "error")
def legacy_stage_1(plan: DeepSpeedPlan, _context: RuleContext, report: Report) -> Findings:
    """The first implementation of stage 1 left DeepSpeed in release 0.5.9; the engine raises.

    Remove ``legacy_stage1``.
    """
    if zero_extra(plan, "legacy_stage1") is True and plan.stage in (1, 2, 3):
        yield report(
            "zero_optimization.legacy_stage1",
            True,
            "DeepSpeed removed that implementation and stops at the key",
            "remove this key",
        )


@rule("gradient-norm", "error")
def gradient_norm(plan: DeepSpeedPlan, context: RuleContext, report: Report) -> Findings:
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
def gradient_sum(plan: DeepSpeedPlan, _context: RuleContext, report: Report) -> Findings:
    """Summing gradients over ranks is refused at stage 3 and with ZenFlow.

    Remove ``gradient_allreduce_op``; the mean is the default.
    """
    value = plan.extra.get("gradient_allreduce_op")
    if not isinstance(value, str) or value.lower() != "sum":
        return
    zenflow = zero_extra(plan, "zenflow") is not None
    if plan.stage == 3 or zenflow:
        yield report(
            "gradient_allreduce_op",
            value,
            f"DeepSpeed refuses it {'with ZenFlow' if zenflow else 'at stage 3'}",
            'remove this key, or write "mean"',
        )


@rule("zenflow-convolutions", "error")
def zenflow(plan: DeepSpeedPlan, context: RuleContext, report: Report) -> Findings:
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


@rule("zero-plus-plus-below-stage-3", "warning")
def zero_plus_plus(plan: DeepSpeedPlan, _context: RuleContext, report: Report) -> Findings:
    """ZeRO++ settings have no effect below stage 3.

    Use stage 3, or remove them; they are left out.
    """
    zero = plan.zero_optimization
    if zero is None or plan.stage not in (0, 1, 2):
        return
    for name, off in _ZERO_PLUS_PLUS.items():
        value = getattr(zero, name)
        if value not in (None, AUTO, off):
            yield report(
                f"zero_optimization.{name}",
                value,
                f"DeepSpeed ignores ZeRO++ below stage 3, here {plan.stage}, so it is left out",
                "set zero_optimization.stage to 3, or remove the key",
                after=None,
            )


@rule("stage-3-launch-flag", "note")
def stage_3_flag(plan: DeepSpeedPlan, _context: RuleContext, report: Report) -> Findings:
    """The launcher's ``zero3_init_flag`` has no effect below stage 3.

    Remove it, or use stage 3; accelerate sets it to false with a warning.
    """
    if plan.launch is None or plan.stage not in (0, 1, 2):
        return
    if plan.launch.zero3_init_flag is True:
        yield report(
            "launch.zero3_init_flag",
            True,
            f"it builds partitioned parameters, and at stage {plan.stage} none are",
            "remove it, or set zero_optimization.stage to 3",
        )


@rule("large-reduce-bucket", "note")
def large_bucket(plan: DeepSpeedPlan, _context: RuleContext, report: Report) -> Findings:
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
    cost = buckets * size * (2 if plan.precision in ("bf16", "fp16") else 4)
    if cost >= _LARGE_BUCKET:
        doubled = ", two of them because of overlap_comm" if buckets == 2 else ""
        yield report(
            "zero_optimization.reduce_bucket_size",
            size,
            f"the bucket takes {format_size(cost)} of device memory{doubled}",
            f'write 30000000, or "{AUTO}"',
        )


@rule("activation-checkpointing", "note")
def activation_checkpointing(
    plan: DeepSpeedPlan, _context: RuleContext, report: Report
) -> Findings:
    """``activation_checkpointing`` configures DeepSpeed's own checkpoint function only.

    Call the model's ``enable_gradient_checkpointing()``: diffusers uses torch's function, which
    the section does not reach.
    """
    section = plan.extra.get("activation_checkpointing")
    if section:
        yield report(
            "activation_checkpointing",
            section,
            "it has an effect only on models that call deepspeed.checkpointing, and those of"
            " diffusers call torch's",
            "remove it and call the model's enable_gradient_checkpointing()",
        )
