"""Rules on bf16, fp16 and what the platform computes in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerotune.errors import PlanError
from zerotune.plan.precision import decide_precision
from zerotune.plan.rulebook.common import Findings, number
from zerotune.plan.rules import Report, RuleContext, rule

if TYPE_CHECKING:
    from zerotune.plan.deepspeed_plan import DeepSpeedPlan


@rule("precision-conflict", "error", only_deepspeed=False)
def precision_conflict(plan: DeepSpeedPlan, _context: RuleContext, report: Report) -> Findings:
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
def precision_unsupported(plan: DeepSpeedPlan, context: RuleContext, report: Report) -> Findings:
    """The platform cannot compute in the precision asked for.

    Ask for one it has, or write ``"auto"``. Checked where a platform is known.
    """
    if context.platform is None or _contradicts_itself(plan):
        return
    try:
        decide_precision(plan, run=context.run, platform=context.platform)
    except PlanError as error:
        yield report.error(error)


def _contradicts_itself(plan: DeepSpeedPlan) -> bool:
    launched = plan.launch.mixed_precision if plan.launch else None
    sections = (plan.bf16, plan.fp16)
    return launched == "fp8" or all(section and section.enabled is True for section in sections)


@rule("fp16-on-cpu", "warning", recorded_elsewhere=True)
def fp16_on_cpu(plan: DeepSpeedPlan, context: RuleContext, report: Report) -> Findings:
    """DeepSpeed's CPU accelerator takes fp16 only where torch has native fp16 arithmetic.

    Resolution trains in bf16 there, which takes the same memory and needs no loss scaling.
    """
    platform = context.platform
    if platform is None or platform.accelerator != "cpu" or platform.fp16 or not platform.bf16:
        return
    if plan.precision == "fp16":
        yield report(
            "fp16.enabled",
            True,
            "DeepSpeed's CPU accelerator has no fp16 on this machine, so bf16 is used",
            'write bf16, or "auto"',
        )


@rule("bf16-emulated", "note", only_deepspeed=False)
def bf16_emulated(plan: DeepSpeedPlan, context: RuleContext, report: Report) -> Findings:
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


@rule("fp16-fixed-loss-scale", "warning")
def fixed_loss_scale(plan: DeepSpeedPlan, _context: RuleContext, report: Report) -> Findings:
    """A fixed loss scale never adapts: what overflows once may overflow for ever.

    Write 0, which scales dynamically. ``LossScaler.update_scale`` only logs an overflow, and the
    step is skipped.
    """
    section = plan.fp16
    if section is None or section.enabled is not True:
        return
    scale = number(section.loss_scale)
    if scale is not None and scale > 0:
        yield report(
            "fp16.loss_scale",
            section.loss_scale,
            "DeepSpeed skips a step whose gradients overflow, and a fixed scale is never lowered"
            " after it",
            "write 0 for dynamic loss scaling, or use bf16",
        )


@rule("bf16-master-weights", "error")
def bf16_master_weights(plan: DeepSpeedPlan, _context: RuleContext, report: Report) -> Findings:
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
