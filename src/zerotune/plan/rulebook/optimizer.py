"""Rules on the optimizer and on clipping."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from zerotune.plan.rulebook.common import Findings, optimizer_name, set_twice
from zerotune.plan.rules import Report, RuleContext, rule

if TYPE_CHECKING:
    from zerotune.plan.deepspeed_plan import DeepSpeedPlan

_ONE_BIT: Final = frozenset({"onebitadam", "onebitlamb", "zerooneadam"})
_CLIPPING: Final = "gradient_clipping"


@rule("one-bit-optimizer", "warning")
def one_bit(plan: DeepSpeedPlan, _context: RuleContext, report: Report) -> Findings:
    """1-bit optimizers were removed from DeepSpeed 0.19 and never ran under ZeRO.

    Write ``"AdamW"``. ``OptimizerResolver`` replaces them, or refuses, as its policy says.
    """
    name = plan.optimizer.type if plan.optimizer else None
    if optimizer_name(plan) in _ONE_BIT:
        yield report(
            "optimizer.type",
            name,
            "DeepSpeed 0.19 removed the 1-bit optimizers, and older releases refuse them with ZeRO",
            'write "AdamW" (or "Lamb")',
        )


@rule("muon-reduce-scatter", "warning")
def muon_reduce_scatter(plan: DeepSpeedPlan, _context: RuleContext, report: Report) -> Findings:
    """Muon at stage 3 cannot use ``reduce_scatter``, which is on by default; DeepSpeed raises.

    Set ``reduce_scatter`` to false, or use stage 1 or 2.
    """
    zero = plan.zero_optimization
    if optimizer_name(plan) != "muon" or zero is None or plan.stage != 3:
        return
    if zero.reduce_scatter is not False:
        yield report(
            "zero_optimization.reduce_scatter",
            zero.reduce_scatter,
            'DeepSpeed stops at stage 3 with "Muon and reduce scatter cannot be used together"',
            "set reduce_scatter to false, or use stage 1 or 2",
        )


@rule("muon-convolutions", "warning")
def muon_convolutions(plan: DeepSpeedPlan, context: RuleContext, report: Report) -> Findings:
    """Muon fails on the weights of convolutions at stages 2 and 3.

    Use AdamW, or leave convolutions to Muon's auxiliary Adam. Its compiled update multiplies
    matrices and cannot broadcast kernels. Checked where the model is known.
    """
    model = context.model
    if optimizer_name(plan) != "muon" or model is None or plan.stage not in (2, 3):
        return
    wide = next((p for p in model.trainable if len(p.shape) > 2), None)
    if wide is not None:
        name = plan.optimizer.type if plan.optimizer else None
        yield report(
            "optimizer.type",
            name,
            "Muon's update is of matrices and fails on weights of more than two dimensions, such"
            f" as {wide.name}",
            'write "AdamW"',
        )


@rule("clipping-set-twice", "warning", only_deepspeed=False)
def clipping_twice(plan: DeepSpeedPlan, _context: RuleContext, report: Report) -> Findings:
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


@rule("clipping-unset", "note", only_deepspeed=False)
def clipping_unset(plan: DeepSpeedPlan, context: RuleContext, report: Report) -> Findings:
    """Nothing says how gradients are clipped, and DeepSpeed's default moved from 0 to 1.0.

    Write ``gradient_clipping``; 0 switches clipping off.
    """
    launched = plan.launch.gradient_clipping if plan.launch else None
    params = (plan.optimizer.params if plan.optimizer else None) or {}
    written = (plan.gradient_clipping, launched, params.get("max_grad_norm"))
    if any(value is not None for value in (*written, context.run.gradient_clipping)):
        return
    yield report(
        _CLIPPING,
        None,
        "no clipping is written, so gradients are clipped to a norm of 1.0; older DeepSpeed did"
        " not clip",
        "write gradient_clipping, 0 to switch it off",
    )
