"""Rules on one setting: forbidden values, at certain stages or beside other settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from zerotune._util.text import is_integer, is_number
from zerotune.decisions import Severity
from zerotune.errors import (
    REMOVAL,
    UNSET,
    writes,
)
from zerotune.plan.optimizer.catalogue import ONE_BIT
from zerotune.plan.resolve.batch import CLIPPING, MICRO, clipping, clipping_sources
from zerotune.plan.resolve.case import Case
from zerotune.plan.resolve.sizes import NO_PREFETCH
from zerotune.plan.rules.rule import (
    ON_CPU,
    OPTIMIZER,
    PARAM,
    RATIO,
    STAGE,
    ZERO_PATH,
    Findings,
    Rule,
    active,
    offload_section,
    swaps_parameters,
    wide_weight,
)
from zerotune.plan.section import (
    Section,
    value_at,
)
from zerotune.plan.sections import only_precision
from zerotune.plan.values import AUTO
from zerotune.platform.facts import CUDA_ALLOCATORS


def setting_rule(
    rule_id: str,
    severity: Severity,
    settings: Mapping[str, Callable[[Any], bool]],
    *,
    after: Any = UNSET,
    words: Callable[[Case], Mapping[str, Any]] = lambda _case: {},
    **options: Any,
) -> Rule:
    """Return a rule that checks the values of single settings.

    Args:
        rule_id: The rule's name.
        severity: Severity of the findings.
        settings: Mapping from the path of each setting to a function that returns true for values
            to report.
        after: Value of the setting after resolution.
        words: Function that returns values for placeholders in ``reason`` and ``fix``; ``{stage}``
            stands for the plan's stage.
        **options: Attributes of ``Rule``.
    """

    def check(case: Case, this: Rule) -> Findings:
        plan = case.plan
        for path, refused in settings.items():
            value = value_at(plan, path, None)
            if refused(value):
                shown = value.to_dict() if isinstance(value, Section) else value
                yield this.finding(path, shown, after=after, stage=plan.stage, **words(case))

    return Rule(id=rule_id, severity=severity, check=check, **options)


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


def _scales(case: Case) -> bool:
    return case.plan.fp16 is not None and case.plan.fp16.enabled is True


def _swaps(case: Case) -> bool:
    """Whether any parameter is actually swapped to NVMe."""
    zero = case.plan.zero_optimization
    return zero is not None and swaps_parameters(case) and case.swaps_parameters(zero)


def _super_offloads_elsewhere(case: Case) -> bool:
    platform, section = case.context.platform, offload_section(case.plan, "optimizer")
    return platform is not None and platform.accelerator not in CUDA_ALLOCATORS and active(section)


def _needed_without_norm(case: Case) -> str | None:
    """What DeepSpeed needs beside ``compute_grad_norm: false``; ``None`` if nothing is missing."""
    plan = case.plan
    missing = {
        f"stage 1 or 2, but this is stage {plan.stage}": plan.stage not in (1, 2, AUTO),
        "gradient_clipping 0, because clipping measures the norm": clipping(
            case.plan, case.context.run
        ).norm
        != 0,
        "the optimizer on the device": active(offload_section(plan, "optimizer")),
    }
    return next((needs for needs, holds in missing.items() if holds), None)


def _where_no_sum(case: Case) -> str | None:
    """Where DeepSpeed cannot sum gradients; ``None`` if it can here."""
    refusals = {
        "with DeepCompile": value_at(case.plan, "compile.deepcompile", None) is True,
        "with ZenFlow": value_at(case.plan, f"{ZERO_PATH}.zenflow", None) is not None,
        "at stage 3": case.plan.stage == 3,
    }
    return next((where for where, holds in refusals.items() if holds), None)


SETTING_RULES: Final = (
    setting_rule(
        "offload-at-stage-0",
        "warning",
        {OPTIMIZER: active, PARAM: active},
        stages=(0,),
        summary="Nothing is offloaded at stage 0.",
        reason="at stage 0 DeepSpeed leaves the weights on the device and builds an optimizer for "
        "the CPU, which rejects them, so the section is removed",
        edits=({STAGE: 2},),
        after=None,
    ),
    setting_rule(
        "offload-param-below-stage-3",
        "warning",
        {PARAM: active},
        stages=(1, 2),
        summary="Parameters can be offloaded only at stage 3, which partitions them.",
        reason="DeepSpeed ignores offload_param at stage {stage}, so the section is removed",
        edits=({STAGE: 3},),
        after=None,
    ),
    setting_rule(
        "param-offload-alone",
        "note",
        {f"{PARAM}.device": is_one("cpu", "nvme")},
        stages=(3,),
        when=lambda case: case.plan.offload_optimizer_device == "none",
        summary="Parameters are offloaded while the larger optimizer states stay on the device.",
        reason="the optimizer states stay on the device; in mixed precision they are six times "
        "as large as the parameters",
        edits=(ON_CPU,),
    ),
    setting_rule(
        "partial-offload-below-stage-3",
        "error",
        {RATIO: is_below(1)},
        stages=(1, 2),
        summary="DeepSpeed supports an offload ratio below 1 only at stage 3.",
        reason="DeepSpeed can offload a part of the optimizer only at stage 3; the plan uses "
        "stage {stage}",
        edits=({RATIO: 1.0}, {STAGE: 3}),
    ),
    setting_rule(
        "partial-offload",
        "note",
        {RATIO: is_below(1)},
        stages=(3,),
        summary="With an offload ratio below 1, torch's AdamW updates the weights on the device.",
        reason="torch's AdamW updates the part on the device, and DeepSpeed's AdamW updates the "
        "rest",
        edits=({RATIO: 1.0},),
        remark="The two implementations round differently. Without zerotune, torch's AdamW keeps "
        "its initial learning rate, and no checkpoint contains its states (``backup_optimizer``). "
        "zerotune gives both implementations the same groups and states.",
    ),
    setting_rule(
        "nvme-optimizer-below-stage-3",
        "error",
        {f"{OPTIMIZER}.device": is_one("nvme")},
        stages=(1, 2),
        summary="Below stage 3, DeepSpeed silently keeps the optimizer in host memory instead of "
        "on NVMe.",
        reason="offload of the optimizer to NVMe needs stage 3; at stage {stage} DeepSpeed "
        "silently uses host memory",
        edits=({STAGE: 3}, ON_CPU),
    ),
    setting_rule(
        "zero-plus-plus-below-stage-3",
        "warning",
        {
            f"{ZERO_PATH}.zero_hpz_partition_size": is_other(AUTO, 1),
            f"{ZERO_PATH}.zero_quantized_weights": is_other(AUTO, False),
            f"{ZERO_PATH}.zero_quantized_nontrainable_weights": is_other(AUTO, False),
            f"{ZERO_PATH}.zero_quantized_gradients": is_other(AUTO, False),
        },
        stages=(0, 1, 2),
        summary="ZeRO++ settings have no effect below stage 3.",
        reason="DeepSpeed ignores ZeRO++ at stage {stage}, so the key is removed",
        edits=({STAGE: 3}, REMOVAL),
        after=None,
    ),
    setting_rule(
        "legacy-stage-1",
        "error",
        {f"{ZERO_PATH}.legacy_stage1": is_one(True)},
        stages=(1, 2, 3),
        summary="DeepSpeed 0.5.9 removed the original implementation of stage 1.",
        reason="DeepSpeed removed this implementation of stage 1, and raises an error if the key "
        "is set",
        edits=(REMOVAL,),
    ),
    setting_rule(
        "round-robin-gradients",
        "warning",
        {f"{ZERO_PATH}.round_robin_gradients": is_one(True)},
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
        when=lambda case: value_at(case.plan, f"{ZERO_PATH}.reduce_scatter", None) is not False,
        summary="At stages 2 and 3, DeepSpeed rejects scaling gradients before the reduction.",
        reason="at stage {stage} with reduce_scatter (the default), DeepSpeed rejects scaled "
        "gradients",
        edits=(REMOVAL, {f"{ZERO_PATH}.reduce_scatter": False}),
    ),
    setting_rule(
        "muon-reduce-scatter",
        "warning",
        {f"{ZERO_PATH}.reduce_scatter": lambda value: value is not False},
        stages=(3,),
        when=lambda case: case.plan.optimizer_name == "Muon",
        summary="DeepSpeed's own Muon cannot use ``reduce_scatter``, the default, at stage 3.",
        reason="without zerotune, DeepSpeed fails at stage 3 with "
        '"Muon and reduce scatter cannot be used together"',
        edits=({f"{ZERO_PATH}.reduce_scatter": False}, {STAGE: 2}),
    ),
    setting_rule(
        "muon-convolutions",
        "warning",
        {"optimizer.type": is_other()},
        stages=(2, 3),
        when=lambda case: case.plan.optimizer_name == "Muon" and wide_weight(case),
        words=lambda case: {"wide": wide_weight(case)},
        summary="DeepSpeed's own Muon fails on convolution weights at stages 2 and 3.",
        reason="without zerotune, DeepSpeed's Muon fails on weights with more than two dimensions, "
        "such as {wide}",
        edits=writes("AdamW"),
        remark="Alternatively, let Muon's auxiliary Adam update convolutions. The rule applies "
        "only if the model is known.",
    ),
    setting_rule(
        "one-bit-optimizer",
        "error",
        {"optimizer.type": is_other()},
        when=lambda case: case.plan.optimizer_name in ONE_BIT,
        summary="DeepSpeed 0.19 removed the 1-bit optimizers, which never ran with ZeRO.",
        reason="DeepSpeed 0.19 removed the 1-bit optimizers, and older releases reject them with "
        "ZeRO",
        edits=writes("AdamW"),
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
        when=lambda case: (
            _scales(case) and value_at(case.plan, "fp16.loss_scale", None) in (None, 0, AUTO)
        ),
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
        {f"{ZERO_PATH}.zenflow": is_other()},
        stages=(1, 2),
        when=lambda case: not active(offload_section(case.plan, "optimizer")),
        summary="ZenFlow needs the optimizer in host memory.",
        reason="DeepSpeed rejects ZenFlow without offload of the optimizer",
        edits=(ON_CPU, REMOVAL),
    ),
    setting_rule(
        "gradient-norm",
        "error",
        {f"{ZERO_PATH}.compute_grad_norm": is_one(False)},
        when=lambda case: case.plan.stage != AUTO and _needed_without_norm(case),
        words=lambda case: {"needs": _needed_without_norm(case)},
        summary="``compute_grad_norm: false`` needs stage 1 or 2, no clipping and no optimizer "
        "offload.",
        reason="DeepSpeed accepts compute_grad_norm: false only with {needs}",
        edits=(REMOVAL,),
    ),
    setting_rule(
        "gradient-sum",
        "error",
        {"gradient_allreduce_op": lambda value: isinstance(value, str) and value.lower() == "sum"},
        when=_where_no_sum,
        words=lambda case: {"where": _where_no_sum(case)},
        summary="DeepSpeed cannot sum gradients over ranks at stage 3, with ZenFlow or with "
        "DeepCompile.",
        reason="DeepSpeed does not support summed gradients {where}",
        edits=(REMOVAL, *writes("mean")),
    ),
    setting_rule(
        "zenflow-convolutions",
        "error",
        {f"{ZERO_PATH}.zenflow": is_other()},
        when=wide_weight,
        words=lambda case: {"wide": wide_weight(case)},
        summary="ZenFlow fails on convolution weights, or corrupts them.",
        reason="ZenFlow corrupts weights with more than two dimensions, such as {wide}",
        fix="remove zenflow",
        edits=(REMOVAL,),
        remark="ZenFlow selects columns of matrices (``num_row, num_col``). It treats other shapes "
        "as one row, or fails to transpose them. The rule applies only if the model is known.",
    ),
    setting_rule(
        "super-offload-accelerator",
        "error",
        {f"{OPTIMIZER}.super_offload": is_one(True)},
        stages=(3,),
        when=_super_offloads_elsewhere,
        words=lambda case: {"accelerator": case.context.machine.accelerator},
        summary="SuperOffload runs only on NVIDIA CUDA devices.",
        reason="SuperOffload needs CUDA, but this platform trains on {accelerator}",
        fix="remove super_offload",
        edits=(REMOVAL,),
    ),
    setting_rule(
        "nvme-param-prefetch",
        "warning",
        {f"{ZERO_PATH}.stage3_prefetch_bucket_size": lambda size: is_integer(size) and size > 0},
        when=_swaps,
        after=0,
        summary="Prefetching parameters from NVMe fails in the second step.",
        reason=NO_PREFETCH,
        edits=writes(0, AUTO),
        remark='DeepSpeed raises "already assigned swap buffer"; zerotune therefore disables '
        "prefetching.",
    ),
    setting_rule(
        "micro-batch-unset",
        "note",
        {MICRO: lambda size: size in (None, AUTO)},
        when=lambda case: (
            case.plan.train_batch_size in (None, AUTO) and case.context.run.micro_batch_size is None
        ),
        only_deepspeed=False,
        summary="No batch size is set.",
        reason="no batch size is set, so the micro batch size is 1",
        fix="write the batch size per GPU, such as 1",
        edits=writes(1),
    ),
    setting_rule(
        "clipping-unset",
        "note",
        {CLIPPING: lambda norm: norm is None},
        when=lambda case: not clipping_sources(case.plan, case.context.run),
        only_deepspeed=False,
        summary="No gradient clipping is set, and DeepSpeed's default changed from 0 to 1.0.",
        reason="no gradient clipping is set, so gradients are clipped to a norm of 1.0; older "
        "DeepSpeed releases did not clip",
        fix="write a maximum norm, such as 1.0, or write 0 to disable clipping",
        edits=writes(1.0, 0),
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
