"""From a resolved plan to the dict DeepSpeed receives."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

from zerotune._util.numbers import is_number
from zerotune.decisions import Decision
from zerotune.errors import UNSET, UnresolvedPlanError
from zerotune.plan.fill import (
    ACCUMULATION,
    MICRO,
    TRAIN,
    Filler,
    decide_precision,
    fill_aio,
    fill_precision,
    fill_zero,
    solve_batch,
)
from zerotune.plan.model import (
    AUTO,
    Context,
    OffloadSection,
    PlanValue,
    ResolvedT,
    ResolvedValue,
    RunFacts,
    ZeroSection,
    evolved,
)
from zerotune.plan.rules import check_plan

if TYPE_CHECKING:
    from zerotune.platform import Platform


_ZERO_TESTED = frozenset(
    {
        "Adam",
        "AdamW",
        "FusedAdam",
        "DeepSpeedCPUAdam",
        "Adagrad",
        "DeepSpeedCPUAdagrad",
        "DeepSpeedCPULion",
        "FusedLion",
        "MuonWithAuxAdam",
    }
)
"""Class names in ``deepspeed.runtime.zero.utils.ZERO_SUPPORTED_OPTIMIZERS`` 0.19.8."""

_KEEPS_AUTO = (
    "data_types.keep_in_fp32_modules",
    "pipeline.",
    "autotuning.",
    "zero_optimization.zenflow.",
    "_",
)
"""Beginnings of pass-through keys for which ``"auto"`` is a value DeepSpeed understands."""


def render(resolved: ResolvedValue, *, folders: bool = True) -> dict[str, Any]:
    """The configuration DeepSpeed receives.

    Args:
        resolved: The plan.
        folders: ``False`` leaves the swap folders out and does not ask for them.

    Raises:
        UnresolvedPlanError: Something is still ``"auto"`` or missing.
    """
    config = written(resolved)
    _render_folders(resolved, config, folders=folders)
    for path in automatic_paths(config):
        raise UnresolvedPlanError(
            "is still automatic in the rendered configuration",
            key=path,
            value=AUTO,
            fix=_fix_for(path),
        )
    return config


def written(resolved: ResolvedValue) -> dict[str, Any]:
    """The configuration as far as it is known; unlike ``render``, it asks for nothing."""
    config = resolved.plan.to_dict()
    _render_choices(resolved, config)
    return {key: value for key, value in config.items() if not key.startswith("_")}


def automatic_paths(value: Any, path: str = "") -> list[str]:
    """Paths of every ``"auto"`` inside ``value``, in order."""
    if value == AUTO and isinstance(value, str):
        return [] if path.startswith(_KEEPS_AUTO) else [path]
    if isinstance(value, Mapping):
        return [
            found
            for key, item in value.items()
            for found in automatic_paths(item, f"{path}.{key}" if path else str(key))
        ]
    if isinstance(value, list | tuple):
        return [
            found
            for index, item in enumerate(value)
            for found in automatic_paths(item, f"{path}[{index}]")
        ]
    return []


def _render_choices(resolved: ResolvedValue, config: dict[str, Any]) -> None:
    optimizer = resolved.optimizer
    if optimizer is None:
        return
    config.pop("optimizer", None)
    config.pop("scheduler", None)
    if optimizer.source == "deepspeed":
        written = resolved.plan.optimizer
        kept = dict(written.extra) if written else {}
        config["optimizer"] = {
            "type": optimizer.name,
            "params": copy.deepcopy(dict(optimizer.params)),
            **kept,
        }
    if resolved.scheduler is not None and resolved.scheduler.source == "deepspeed":
        config["scheduler"] = {
            "type": resolved.scheduler.name,
            "params": copy.deepcopy(dict(resolved.scheduler.params)),
        }
    if not resolved.uses_deepspeed:
        return
    client = optimizer.source != "deepspeed"
    untested = client or optimizer.implementation not in _ZERO_TESTED
    written_untested = resolved.requested.zero_allow_untested_optimizer is True
    config["zero_allow_untested_optimizer"] = untested or written_untested
    # With the default DeepSpeed refuses, under offload, any optimizer that is not its own.
    config["zero_force_ds_cpu_optimizer"] = (
        False if client else config.get("zero_force_ds_cpu_optimizer", True)
    )


def _render_folders(resolved: ResolvedValue, config: dict[str, Any], *, folders: bool) -> None:
    for part, folder in resolved.nvme_paths.items():
        section = config["zero_optimization"][f"offload_{part}"]
        if not folders:
            section.pop("nvme_path", None)
        elif folder is None:
            raise UnresolvedPlanError(
                "NVMe offload needs a folder for its swap files",
                key=f"zero_optimization.offload_{part}.nvme_path",
                fix="write a path, or use zerotune.offload.OffloadManager, which leases one",
            )


def _fix_for(path: str) -> str:
    if path.startswith(("optimizer", "scheduler")):
        return "settle it with zerotune.optim.OptimizerResolver().apply(resolved_plan)"
    return "write a value; zerotune does not fill in this key"


# -- From a plan to a resolved plan.


DEFAULT_CLIPPING = 1.0


def resolve(requested: PlanValue, context: Context, *, into: type[ResolvedT]) -> ResolvedT:
    """See ``DeepSpeedPlan.resolve``.

    Args:
        requested: The plan.
        context: Where it is to run; a platform that is not given is detected.
        into: The class of resolved plan to make.
    """
    platform = context.platform or _this_machine()
    asked = not context.uses_deepspeed
    uses_deepspeed = platform.deepspeed.available and not asked
    context = attrs.evolve(context, platform=platform, uses_deepspeed=uses_deepspeed)
    decisions = list(requested.decisions)
    plan = requested
    if not uses_deepspeed:
        plan = _without_deepspeed(plan, platform, asked=asked, decisions=decisions)
    plan = _without_inactive_offload(_with_stage(plan, decisions), decisions)
    plan = _apply_rules(plan, context, decisions)
    filler = _filler(plan, context, platform)
    plan = _filled(plan, filler, context)
    return into(
        requested=requested,
        plan=plan,
        platform=platform,
        world_size=context.world_size,
        model=context.model,
        run=context.run,
        uses_deepspeed=uses_deepspeed,
        precision=filler.precision,
        decisions=(*decisions, *filler.decisions),
    )


def _this_machine() -> Platform:
    from zerotune.platform import detect_platform  # which imports torch, and takes seconds

    return detect_platform()


def _filler(plan: PlanValue, context: Context, platform: Platform) -> Filler:
    precision, why = decide_precision(plan, run=context.run, platform=platform)
    return Filler(
        stage=int(plan.stage),
        platform=platform,
        model=context.model,
        world_size=context.world_size,
        precision=precision,
        decisions=why,
    )


def _without_deepspeed(
    plan: PlanValue, platform: Platform, *, asked: bool, decisions: list[Decision]
) -> PlanValue:
    support = platform.deepspeed
    why = "DeepSpeed was switched off" if asked else support.reason
    if not asked and support.fix:
        why = f"{why}; {support.fix}"
    zero = plan.zero_optimization
    dropped: dict[str, Any] = {}
    if zero is not None:
        for name in ("offload_optimizer", "offload_param"):
            section: OffloadSection | None = getattr(zero, name)
            if section is not None and section.device not in (None, "none"):
                dropped[f"zero_optimization.{name}"] = section.to_dict()
        dropped["zero_optimization"] = zero.to_dict()
    if plan.aio is not None:
        dropped["aio"] = plan.aio.to_dict()
    if not dropped and not asked:
        dropped["engine"] = "deepspeed"
    decisions.extend(
        Decision(
            key=key,
            before=value,
            after="plain" if key == "engine" else None,
            reason=why,
            severity="warning",
        )
        for key, value in dropped.items()
    )
    return attrs.evolve(
        plan,
        zero_optimization=None,
        aio=None,
        zero_allow_untested_optimizer=None,
        zero_force_ds_cpu_optimizer=None,
    )


def _with_stage(plan: PlanValue, decisions: list[Decision]) -> PlanValue:
    zero = plan.zero_optimization
    if zero is None or zero.stage != AUTO:
        return plan
    needs_three = plan.offload_param_device in ("cpu", "nvme") or (
        plan.offload_optimizer_device == "nvme"
    )
    stage = 3 if needs_three else 2
    why = "what is offloaded needs stage 3" if needs_three else "partitions all but the weights"
    decisions.append(
        Decision(
            key="zero_optimization.stage",
            before=AUTO,
            after=stage,
            reason=f"{why}; DeepSpeed itself would silently use stage 0",
            severity="warning",
        )
    )
    return attrs.evolve(plan, zero_optimization=attrs.evolve(zero, stage=stage))


def _without_inactive_offload(plan: PlanValue, decisions: list[Decision]) -> PlanValue:
    zero = plan.zero_optimization
    if zero is None:
        return plan
    for name in ("offload_optimizer", "offload_param"):
        section: OffloadSection | None = getattr(zero, name)
        if section is not None and section.device in (None, "none", AUTO):
            if section.device != "none":
                decisions.append(
                    Decision(
                        key=f"zero_optimization.{name}.device",
                        before=section.device,
                        after="none",
                        reason="which is what DeepSpeed makes of it; name a device to offload",
                        severity="warning",
                    )
                )
            zero = evolved(zero, **{name: None})
    return attrs.evolve(plan, zero_optimization=zero)


def _apply_rules(plan: PlanValue, context: Context, decisions: list[Decision]) -> PlanValue:
    zero = plan.zero_optimization
    for finding in check_plan(plan, context):
        if finding.severity == "error":
            raise finding.as_error()
        if finding.severity == "note" or finding.recorded_elsewhere:
            continue
        decisions.append(finding.as_decision())
        section, _, name = finding.key.partition(".")
        if finding.after is not UNSET and section == "zero_optimization" and zero is not None:
            zero = evolved(zero, **{name: finding.after})
    return attrs.evolve(plan, zero_optimization=zero)


def _filled(plan: PlanValue, filler: Filler, context: Context) -> PlanValue:
    batch, why = solve_batch(plan, run=context.run, world_size=filler.world_size)
    filler.decisions.extend(why)
    clipping = _clipping(plan, filler, context.run)
    bf16, fp16 = fill_precision(plan, filler.precision, filler)
    zero, aio = None, None
    if context.uses_deepspeed:
        zero = fill_zero(plan.zero_optimization or ZeroSection(), filler, plan.aio)
        swaps = any(
            section is not None and section.device == "nvme"
            for section in (zero.offload_param, zero.offload_optimizer)
        )
        aio = fill_aio(plan.aio, filler) if swaps or plan.aio else None
    plan = evolved(
        plan,
        **{TRAIN: batch.train, MICRO: batch.micro, ACCUMULATION: batch.accumulation},
        gradient_clipping=clipping,
        bf16=bf16,
        fp16=fp16,
        zero_optimization=zero,
        aio=aio,
    )
    plan = filler.fill(plan, "", "wall_clock_breakdown", False)
    if plan.steps_per_print == AUTO:
        plan = filler.drop(plan, "", "steps_per_print", "zerotune reports progress itself")
    for name in ("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"):
        if getattr(plan, name) == AUTO:
            plan = filler.drop(plan, "", name, "follows from the optimizer")
    _refuse_automatic(plan)
    return plan


def _refuse_automatic(plan: PlanValue) -> None:
    left = attrs.evolve(plan, optimizer=None, scheduler=None).to_dict()
    for path in automatic_paths(left):
        raise UnresolvedPlanError(
            "zerotune does not fill in this key", key=path, value=AUTO, fix="write a value"
        )


def _clipping(plan: PlanValue, filler: Filler, run: RunFacts) -> float:
    key = "gradient_clipping"
    written = plan.gradient_clipping
    asked = run.gradient_clipping
    if written is not None and not isinstance(written, str):
        if asked is not None and asked != written:
            filler.note(
                key,
                asked,
                written,
                "the configuration's own number stands before that of the run",
                severity="warning",
            )
        return float(written)
    launched = plan.launch.gradient_clipping if plan.launch else None
    params = (plan.optimizer.params if plan.optimizer else None) or {}
    sources = (
        (asked, "the run says so"),
        (launched, "the launcher's file says so"),
        (params.get("max_grad_norm"), "optimizer.params.max_grad_norm says so"),
    )
    for value, reason in sources:
        if isinstance(value, int | float) and is_number(value):
            filler.note(key, written, float(value), reason)
            return float(value)
    filler.note(key, written, DEFAULT_CLIPPING, "the default of DeepSpeed 0.19.8 and of accelerate")
    return DEFAULT_CLIPPING
