"""Rules on batch sizes, accumulation and the number of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerotune.errors import PlanConflictError
from zerotune.plan.batching import ACCUMULATION, MICRO, solve_batch
from zerotune.plan.kinds import AUTO
from zerotune.plan.rulebook.common import Findings, set_twice
from zerotune.plan.rules import Report, RuleContext, rule

if TYPE_CHECKING:
    from zerotune.plan.deepspeed_plan import DeepSpeedPlan


@rule("batch-triple", "error", only_deepspeed=False)
def batch_triple(plan: DeepSpeedPlan, context: RuleContext, report: Report) -> Findings:
    """Train batch = micro batch x accumulation x world size must hold.

    Write two of the three, or change one so that the product holds at this world size.
    """
    try:
        solve_batch(plan, run=context.run, world_size=context.world_size)
    except PlanConflictError as error:
        yield report.error(error)


@rule("accumulation-set-twice", "warning", only_deepspeed=False)
def accumulation_twice(plan: DeepSpeedPlan, _context: RuleContext, report: Report) -> Findings:
    """Accumulation is written both in the DeepSpeed block and outside of it.

    Keep the one in the DeepSpeed block, which is used.
    """
    launched = plan.launch.gradient_accumulation_steps if plan.launch else None
    yield from set_twice(plan, report, ACCUMULATION, {f"launch.{ACCUMULATION}": launched})


@rule("world-size", "warning", only_deepspeed=False)
def world_size(plan: DeepSpeedPlan, context: RuleContext, report: Report) -> Findings:
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
def micro_batch_unset(plan: DeepSpeedPlan, context: RuleContext, report: Report) -> Findings:
    """Nothing says how many samples one pass takes.

    Write ``train_micro_batch_size_per_gpu``; without it the micro batch is 1.
    """
    written = (plan.train_batch_size, plan.train_micro_batch_size_per_gpu)
    if all(value in (None, AUTO) for value in written) and context.run.micro_batch_size is None:
        yield report(
            MICRO, written[1], "no batch size is written, so the micro batch is 1", f"write {MICRO}"
        )
