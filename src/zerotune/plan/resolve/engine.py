"""The steps of resolution: remove unused sections, fill in every key, and record the engine."""

from __future__ import annotations

import attrs

from zerotune import platform as machines
from zerotune.decisions import Decision, Log
from zerotune.plan.context import Context, Streaming
from zerotune.plan.optimizer.names import entry_of
from zerotune.plan.optimizer.resolver import OptimizerResolver
from zerotune.plan.resolve.case import Case
from zerotune.plan.resolve.fill import filled_in
from zerotune.plan.resolved import (
    NO_DEEPSPEED,
    PLAIN_NEEDS,
    STEPPED_PLAINLY,
    Resolved,
    host_obstacle,
)
from zerotune.plan.section import evolved
from zerotune.plan.sections import (
    OffloadSection,
    ZeroSection,
)
from zerotune.plan.settings import Settings
from zerotune.platform.facts import Platform


def prepared(requested: Settings, context: Context, log: Log) -> Case:
    """Return the context, and the plan without the sections that the engine does not use.

    Args:
        requested: The plan.
        context: Context of the run; a missing platform is detected.
        log: Log that receives decisions.
    """
    platform = context.platform
    if platform is None:
        platform = machines.detect_platform()
    uses_deepspeed = platform.deepspeed.available and context.uses_deepspeed
    if not uses_deepspeed:
        asked = not context.uses_deepspeed
        requested = _for_plain_engine(requested, platform, asked=asked, log=log)
    context = attrs.evolve(context, platform=platform, uses_deepspeed=uses_deepspeed)
    return Case(plan=requested, context=context)


def filled(
    requested: Settings,
    plan: Settings,
    case: Case,
    log: Log,
    resolver: OptimizerResolver,
    *,
    by_weight: bool,
) -> Resolved:
    """Return the resolved plan with every key set, and its optimizer and schedule.

    Args:
        requested: The plan as the user wrote it.
        plan: The plan after ``prepared`` and corrections.
        case: The plan and context before the rules' corrections; no correction changes batch sizes
            or precision.
        log: Earlier decisions.
        resolver: How to choose the optimizer.
        by_weight: Whether the optimizer updates one weight at a time, on the device.
    """
    context = case.context
    precision, why = case.precision
    log.decisions.extend(why)
    plan = filled_in(plan, case, log)
    chosen = resolver.choose(plan, context, precision, by_weight=by_weight)
    return (requested.resolved_as or Resolved)(
        requested=requested,
        plan=plan,
        platform=context.machine,
        world_size=context.world_size,
        model=context.model,
        run=context.run,
        uses_deepspeed=context.uses_deepspeed,
        precision=precision,
        optimizer=chosen.optimizer,
        scheduler=chosen.scheduler,
        decisions=[*log.decisions, *chosen.decisions],
    )


def with_engine(resolved: Resolved) -> Resolved:
    """Record the requested engine; if it cannot run the plan, choose another with the reason."""
    if resolved.update is not None:
        resolved = _with_update(resolved)
    obstacle, asked = host_obstacle(resolved), resolved.streamed
    if not asked:
        if resolved.engine is None:
            return resolved
        if not resolved.uses_deepspeed:
            reason = "requested" if resolved.engine == "host" else NO_DEEPSPEED
            return resolved.with_engine(None if obstacle else "host", obstacle or reason)
        if resolved.engine == "host" and obstacle is not None:
            return resolved.with_engine("deepspeed", obstacle)
        return resolved.with_engine(resolved.engine, "requested")
    if obstacle is not None:
        return attrs.evolve(resolved.without_streaming(obstacle), engine=None)
    resolved = attrs.evolve(resolved, engine="host")
    if not isinstance(asked, Streaming) or not asked.split_masters or resolved.precision == "bf16":
        return resolved
    decision = Decision(
        "streamed.split_masters",
        True,
        False,
        f"master weights can be split only with bf16 weights, not with {resolved.precision}",
    )
    return resolved.decided(decision, streamed=attrs.evolve(asked, split_masters=False))


def _with_update(resolved: Resolved) -> Resolved:
    """Record the update on the device; if the host engine cannot run it, the update on the host."""
    hosted = attrs.evolve(resolved, engine=resolved.engine or "host")
    obstacle = host_obstacle(hosted)
    if not resolved.uses_deepspeed:
        obstacle = NO_DEEPSPEED
    elif obstacle is None and resolved.precision != "bf16":
        obstacle = f"the plan trains in {resolved.precision}, and not in bf16"
    if obstacle is not None:
        decision = Decision("update", "device", "host", obstacle, "warning")
        return resolved.decided(decision, update=None)
    decision = Decision(
        "update",
        "host",
        "device",
        f"requested, with {hosted.masters} master weights; the optimizer's own code updates "
        "one weight at a time, and its states stay in host memory",
    )
    return hosted.decided(decision)


def _for_plain_engine(plan: Settings, platform: Platform, *, asked: bool, log: Log) -> Settings:
    """Return a plan without ZeRO, except for an optimizer that the host engine keeps in RAM."""
    support, zero = platform.deepspeed, plan.zero_optimization
    reasons = ["DeepSpeed is disabled"] if asked else [support.reason, support.fix or ""]
    host, left = _host_optimizer(zero, platform), {} if zero is None else zero.to_dict()
    name = entry_of(plan.optimizer_name).name
    if host is not None and name not in STEPPED_PLAINLY:
        host = None
        reasons.append(f"{PLAIN_NEEDS}, so the states of {name} stay on the device")
    if host is not None:
        left = attrs.evolve(zero or ZeroSection(), offload_optimizer=None).to_dict()
        left = {} if left == {"stage": 0} else left
        log.decide(
            "zero_optimization.offload_optimizer",
            host.device,
            host.device,
            "the host engine needs no DeepSpeed; the ranks of a machine share one copy of "
            "the master weights and moments",
        )
    why = "; ".join(filter(None, reasons))
    dropped = {"zero_optimization": left, "aio": plan.aio.to_dict() if plan.aio else {}}
    for key, value in dropped.items():
        if value:
            log.decide(key, value, None, why, "warning")
    if not any(dropped.values()) and not asked:
        log.decide("engine", "deepspeed", "plain", why, "warning")
    return attrs.evolve(
        plan,
        zero_optimization=None if host is None else ZeroSection(offload_optimizer=host),
        aio=None,
        zero_allow_untested_optimizer=None,
        zero_force_ds_cpu_optimizer=None,
    )


def _host_optimizer(zero: ZeroSection | None, platform: Platform) -> OffloadSection | None:
    """Return the offload section for the plain engine, if the optimizer is in host memory."""
    section = None if zero is None else zero.offload_optimizer
    # On macOS host and device share one memory.
    if section is None or section.device != "cpu" or platform.accelerator == "mps":
        return None
    on_device = platform.accelerator != "cpu"
    pin = section.pin_memory if isinstance(section.pin_memory, bool) else on_device
    return OffloadSection(device="cpu", pin_memory=pin and on_device)


def without_inactive_offload(plan: Settings) -> Settings:
    """Return ``plan`` without the sections that offload nothing."""
    zero = plan.zero_optimization
    if zero is None:
        return plan
    for name in ("offload_optimizer", "offload_param"):
        section: OffloadSection | None = getattr(zero, name)
        if section is not None and section.device == "none":
            zero = evolved(zero, **{name: None})
    return attrs.evolve(plan, zero_optimization=zero)
