"""The rules themselves. Importing this module registers them with ``zerotune.plan.rules``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from zerotune.errors import PlanConflictError
from zerotune.plan import known_keys
from zerotune.plan.batching import ACCUMULATION, MICRO, solve_batch
from zerotune.plan.kinds import AUTO, is_number
from zerotune.plan.rules import Finding, Report, RuleContext, registered, rule
from zerotune.plan.section import modelled, unknown_key
from zerotune.plan.sections import OffloadSection
from zerotune.plan.swapping import OPTIMIZER_BUFFERS, optimizer_buffers

if TYPE_CHECKING:
    from zerotune.plan.deepspeed_plan import DeepSpeedPlan

Findings = Iterator[Finding]

_ONE_BIT = frozenset({"onebitadam", "onebitlamb", "zerooneadam"})
_ZERO_PLUS_PLUS = {
    "zero_hpz_partition_size": 1,
    "zero_quantized_weights": False,
    "zero_quantized_nontrainable_weights": False,
    "zero_quantized_gradients": False,
}


def _offload(plan: DeepSpeedPlan, part: str) -> OffloadSection | None:
    zero = plan.zero_optimization
    section: OffloadSection | None = getattr(zero, f"offload_{part}") if zero else None
    return section


def _adam_swap_buffers(plan: DeepSpeedPlan) -> int | None:
    """``buffer_count`` where an optimizer with two moments is swapped and the user wrote one."""
    section = _offload(plan, "optimizer")
    name = (plan.optimizer.type if plan.optimizer else None) or "AdamW"
    if plan.stage != 3 or section is None or section.device != "nvme" or "adam" not in name.lower():
        return None
    return section.buffer_count if isinstance(section.buffer_count, int) else None


def _active(section: OffloadSection | None) -> bool:
    return section is not None and section.device not in (None, "none", AUTO)


@rule("batch-triple", "error", only_deepspeed=False)
def batch_triple(plan: DeepSpeedPlan, context: RuleContext, report: Report) -> Findings:
    """Train batch = micro batch x accumulation x world size must hold."""
    try:
        solve_batch(plan, run=context.run, world_size=context.world_size)
    except PlanConflictError as error:
        yield report.error(error)


@rule("precision-conflict", "error", only_deepspeed=False)
def precision_conflict(plan: DeepSpeedPlan, _context: RuleContext, report: Report) -> Findings:
    """At most one of bf16 and fp16 may be on, and the launcher must agree."""
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


@rule("nvme-optimizer-below-stage-3", "error")
def nvme_optimizer(plan: DeepSpeedPlan, _context: RuleContext, report: Report) -> Findings:
    """DeepSpeed silently keeps the optimizer in host memory instead of NVMe below stage 3."""
    if plan.stage in (1, 2) and plan.offload_optimizer_device == "nvme":
        yield report(
            "zero_optimization.offload_optimizer.device",
            "nvme",
            f"needs stage 3; at stage {plan.stage} DeepSpeed silently uses host memory",
            'set zero_optimization.stage to 3, or device to "cpu"',
        )


@rule("nvme-optimizer-buffers", "error")
def nvme_optimizer_buffers(plan: DeepSpeedPlan, _context: RuleContext, report: Report) -> Findings:
    """The swap pool of an Adam optimizer needs four buffers."""
    written = _adam_swap_buffers(plan)
    if written is not None and written < OPTIMIZER_BUFFERS:
        yield report(
            "zero_optimization.offload_optimizer.buffer_count",
            written,
            "weight, gradient and two moments are resident together, and DeepSpeed asserts that"
            " there is a buffer for each",
            f'write at least {OPTIMIZER_BUFFERS}, or "{AUTO}"',
        )


@rule("nvme-pipeline-buffers", "warning")
def nvme_pipeline_buffers(plan: DeepSpeedPlan, _context: RuleContext, report: Report) -> Findings:
    """Pipelined swapping needs four more buffers for reading ahead and four for writing back."""
    section = _offload(plan, "optimizer")
    written = _adam_swap_buffers(plan)
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


@rule("partial-offload-below-stage-3", "error")
def partial_offload(plan: DeepSpeedPlan, _context: RuleContext, report: Report) -> Findings:
    """An offload ratio below 1 is refused by DeepSpeed below stage 3."""
    section = _offload(plan, "optimizer")
    ratio = section.ratio if section is not None else None
    if plan.stage in (1, 2) and is_number(ratio) and float(ratio or 0) < 1:
        yield report(
            "zero_optimization.offload_optimizer.ratio",
            ratio,
            f"DeepSpeed offloads a part of the optimizer only at stage 3, not at {plan.stage}",
            "set the ratio to 1.0, or zero_optimization.stage to 3",
        )


@rule("bf16-master-weights", "error")
def bf16_master_weights(plan: DeepSpeedPlan, _context: RuleContext, report: Report) -> Findings:
    """Low-precision master weights need ZeRO with the optimizer offloaded to the CPU."""
    names = (
        ("bf16", "bf16_master_weights_and_grads"),
        ("fp16", "fp16_master_weights_and_grads"),
    )
    for precision, name in names:
        section = getattr(plan, precision)
        if section is None or getattr(section, name) is not True or plan.stage == AUTO:
            continue
        if plan.stage == 0 or plan.offload_optimizer_device == "none":
            yield report(
                f"{precision}.{name}",
                True,
                "DeepSpeed keeps low-precision master weights only with ZeRO stage 1 to 3 and"
                " the optimizer offloaded",
                'set offload_optimizer.device to "cpu", or remove this key',
            )
    bf16 = plan.bf16
    if bf16 and bf16.bf16_optimizer_states is True and not bf16.bf16_master_weights_and_grads:
        yield report(
            "bf16.bf16_optimizer_states",
            True,
            "needs bf16_master_weights_and_grads too",
            "set bf16.bf16_master_weights_and_grads to true, or remove this key",
        )


@rule("removed-section", "error")
def removed_section(plan: DeepSpeedPlan, context: RuleContext, report: Report) -> Findings:
    """Sections DeepSpeed 0.19 removed are refused, unless an older DeepSpeed is installed."""
    if _older_than_removal(context):
        return
    zero = plan.zero_optimization
    places = (
        ("", plan.extra, known_keys.REMOVED),
        ("zero_optimization.", zero.extra if zero else {}, known_keys.REMOVED_ZERO),
    )
    for prefix, extra, removed in places:
        for key in extra.keys() & removed.keys():
            yield report(
                f"{prefix}{key}",
                extra[key],
                f"DeepSpeed 0.19 removed {removed[key]}",
                "remove this key, or install deepspeed<0.19",
            )


@rule("unknown-key", "error", only_deepspeed=False)
def unknown_keys(plan: DeepSpeedPlan, _context: RuleContext, report: Report) -> Findings:
    """DeepSpeed ignores unknown top-level keys in silence; reading a plan refuses them."""
    known = {attribute.name for attribute in modelled(type(plan))} | plan.passed_through
    for key, value in plan.extra.items():
        if key not in plan.passed_through and not key.startswith("_") and plan.source == "code":
            yield report.error(unknown_key(key, value, key, known))


@rule("zenflow-convolutions", "error")
def zenflow(plan: DeepSpeedPlan, context: RuleContext, report: Report) -> Findings:
    """ZenFlow raises on, or scrambles, the weights of convolutions."""
    zero = plan.zero_optimization
    section = zero.extra.get("zenflow") if zero else None
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


@rule("offload-at-stage-0", "warning")
def offload_at_stage_0(plan: DeepSpeedPlan, _context: RuleContext, report: Report) -> Findings:
    """Offload sections have no effect without ZeRO."""
    for part in ("optimizer", "param"):
        section = _offload(plan, part)
        if plan.stage == 0 and section is not None and _active(section):
            yield report(
                f"zero_optimization.offload_{part}",
                section.to_dict(),
                "DeepSpeed ignores offload at stage 0, so it is left out",
                "set zero_optimization.stage to 2 to offload",
                after=None,
            )


@rule("offload-param-below-stage-3", "warning")
def offload_param(plan: DeepSpeedPlan, _context: RuleContext, report: Report) -> Findings:
    """Parameters can be offloaded only where they are partitioned, at stage 3."""
    section = _offload(plan, "param")
    if plan.stage in (1, 2) and section is not None and _active(section):
        yield report(
            "zero_optimization.offload_param",
            section.to_dict(),
            f"DeepSpeed ignores offload_param below stage 3, here {plan.stage}, so it is left out",
            "set zero_optimization.stage to 3 to offload parameters",
            after=None,
        )


@rule("zero-plus-plus-below-stage-3", "warning")
def zero_plus_plus(plan: DeepSpeedPlan, _context: RuleContext, report: Report) -> Findings:
    """ZeRO++ settings have no effect below stage 3."""
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


@rule("partial-offload", "warning")
def partial_offload_untested(
    plan: DeepSpeedPlan, _context: RuleContext, report: Report
) -> Findings:
    """An offload ratio below 1 leaves part of the optimizer with its first learning rate."""
    section = _offload(plan, "optimizer")
    ratio = section.ratio if section is not None else None
    if plan.stage == 3 and is_number(ratio) and float(ratio or 0) < 1:
        yield report(
            "zero_optimization.offload_optimizer.ratio",
            ratio,
            "DeepSpeed's code gives the part on the device its own optimizer, whose learning"
            " rate does not seem to follow the schedule",
            "set the ratio to 1.0 unless you have checked it",
        )


@rule("one-bit-optimizer", "warning")
def one_bit(plan: DeepSpeedPlan, _context: RuleContext, report: Report) -> Findings:
    """1-bit optimizers were removed from DeepSpeed 0.19 and never ran under ZeRO."""
    name = plan.optimizer.type if plan.optimizer else None
    if name is not None and re.sub(r"[^a-z]", "", name.lower()) in _ONE_BIT:
        yield report(
            "optimizer.type",
            name,
            "DeepSpeed 0.19 removed the 1-bit optimizers, and older releases refuse them with ZeRO",
            'write "AdamW" (or "Lamb")',
        )


def _set_twice(plan: DeepSpeedPlan, report: Report, key: str, places: dict[str, Any]) -> Findings:
    first = getattr(plan, key)
    for place, second in places.items():
        if is_number(first) and is_number(second) and first != second:
            yield report(
                place,
                second,
                f"{key} is set to {first} as well, and that one is used",
                f"keep only {key}",
            )


@rule("accumulation-set-twice", "warning", only_deepspeed=False)
def accumulation_twice(plan: DeepSpeedPlan, _context: RuleContext, report: Report) -> Findings:
    """Accumulation written both in the DeepSpeed block and outside of it."""
    launched = plan.launch.gradient_accumulation_steps if plan.launch else None
    yield from _set_twice(plan, report, ACCUMULATION, {f"launch.{ACCUMULATION}": launched})


@rule("clipping-set-twice", "warning", only_deepspeed=False)
def clipping_twice(plan: DeepSpeedPlan, _context: RuleContext, report: Report) -> Findings:
    """Clipping written both at the top level and elsewhere."""
    launched = plan.launch.gradient_clipping if plan.launch else None
    params = (plan.optimizer.params if plan.optimizer else None) or {}
    places = {
        "launch.gradient_clipping": launched,
        "optimizer.params.max_grad_norm": params.get("max_grad_norm"),
    }
    yield from _set_twice(plan, report, "gradient_clipping", places)


@rule("param-offload-alone", "note")
def param_offload_alone(plan: DeepSpeedPlan, _context: RuleContext, report: Report) -> Findings:
    """Parameters are offloaded while the larger optimizer states stay on the device."""
    section = _offload(plan, "param")
    if plan.stage == 3 and _active(section) and plan.offload_optimizer_device == "none":
        yield report(
            "zero_optimization.offload_param.device",
            plan.offload_param_device,
            "the optimizer states, six times larger in mixed precision, stay on the device",
            'set offload_optimizer.device to "cpu" to free more memory',
        )


@rule("micro-batch-unset", "note", only_deepspeed=False)
def micro_batch_unset(plan: DeepSpeedPlan, context: RuleContext, report: Report) -> Findings:
    """Nothing says how many samples one pass takes."""
    written = (plan.train_batch_size, plan.train_micro_batch_size_per_gpu)
    if all(value in (None, AUTO) for value in written) and context.run.micro_batch_size is None:
        yield report(
            MICRO, written[1], "no batch size is written, so the micro batch is 1", f"write {MICRO}"
        )


def _older_than_removal(context: RuleContext) -> bool:
    version = context.platform.versions.get("deepspeed", "") if context.platform else ""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return numbers is not None and (int(numbers[1]), int(numbers[2])) < (0, 19)


RULES = registered()
"""Every rule, in the order they are checked."""
