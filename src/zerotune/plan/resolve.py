"""From a plan to what will run, and from there to the dict DeepSpeed receives.

Resolving drops what the engine has no use for, lets the rules refuse or repair the rest
(``zerotune.plan.rules``), and fills in every key that has an effect (``zerotune.plan.fill``).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from zerotune.decisions import Log, raise_all
from zerotune.errors import UNSET, UnresolvedPlanError
from zerotune.plan.fill import (
    ACCUMULATION,
    MICRO,
    TRAIN,
    Case,
    Filler,
    clipping,
    fill_aio,
    fill_precision,
    fill_zero,
    overruled,
)
from zerotune.plan.model import (
    AUTO,
    Context,
    DeepSpeedPlan,
    OffloadSection,
    ResolvedPlan,
    RunFacts,
    SectionT,
    ZeroSection,
    evolved,
)
from zerotune.plan.rules import FIRST, REPAIRS, Finding, check_case

if TYPE_CHECKING:
    from zerotune.platform import Platform


def resolve(requested: DeepSpeedPlan, context: Context) -> ResolvedPlan:
    """See ``DeepSpeedPlan.resolve``.

    Args:
        requested: The plan.
        context: Where it is to run; a platform that is not given is detected.
    """
    platform = context.platform or _this_machine()
    asked = not context.uses_deepspeed
    uses_deepspeed = platform.deepspeed.available and not asked
    context = attrs.evolve(context, platform=platform, uses_deepspeed=uses_deepspeed)
    log = Log(decisions=[*requested.decisions])
    plan = requested
    if not uses_deepspeed:
        plan = _without_deepspeed(plan, platform, asked=asked, log=log)
    for each in FIRST:
        plan = _repaired(plan, each(plan, context), log)
    case = Case(plan=_without_inactive_offload(plan), context=context)
    plan = _repaired(case.plan, check_case(case, rules=REPAIRS), log)
    # Repairs concern neither batch nor precision.
    precision, why = case.precision
    filler = Filler(stage=int(plan.stage), context=context, precision=precision, decisions=[*why])
    if not uses_deepspeed and precision == "fp16":
        plan = _without_host_optimizer(plan, log)
    plan = _filled(plan, filler, case)
    return ResolvedPlan(
        requested=requested,
        plan=plan,
        platform=platform,
        world_size=context.world_size,
        model=context.model,
        run=context.run,
        uses_deepspeed=uses_deepspeed,
        precision=filler.precision,
        decisions=(*log.decisions, *filler.decisions),
    )


def with_streaming(resolved: ResolvedPlan) -> ResolvedPlan:
    """The plan with ``streamed`` switched off, and why, where it is asked for and cannot be."""
    if not resolved.streamed or (obstacle := _streaming_obstacle(resolved)) is None:
        return resolved
    return resolved.without_streaming(obstacle)


def _streaming_obstacle(resolved: ResolvedPlan) -> str | None:
    """Why a plan's weights cannot be streamed, as far as the plan tells."""
    accumulated = resolved.plan.to_dict().get("data_types", {}).get("grad_accum_dtype")
    obstacles = {
        "the plan was resolved without DeepSpeed": not resolved.uses_deepspeed,
        "one process streams; several are DeepSpeed's": resolved.world_size > 1,
        "the plan is not one of stage 2 or 3": resolved.stage not in (2, 3),
        "the optimizer is not in host memory": resolved.offload_optimizer != "cpu",
        "weights on NVMe are DeepSpeed's": resolved.offload_param == "nvme",
        "a loss scale is undone by DeepSpeed": resolved.precision == "fp16",
        "the plan was resolved with host_step=False": not resolved.host_step,
        "micro batches are added up in the gradients' dtype": accumulated not in (
            None, resolved.precision,
        ),
    }  # fmt: skip
    return next((reason for reason, holds in obstacles.items() if holds), None)


def _this_machine() -> Platform:
    from zerotune.platform import detect_platform  # which imports torch, and takes seconds

    return detect_platform()


def _without_deepspeed(
    plan: DeepSpeedPlan, platform: Platform, *, asked: bool, log: Log
) -> DeepSpeedPlan:
    support = platform.deepspeed
    reasons = ("DeepSpeed was switched off",) if asked else (support.reason, support.fix)
    why = "; ".join(filter(None, reasons))
    zero = plan.zero_optimization
    host = _host_optimizer(zero, platform)
    dropped: dict[str, Any] = {}
    if zero is not None:
        for name in ("offload_optimizer", "offload_param"):
            section: OffloadSection | None = getattr(zero, name)
            if host is not None and name == "offload_optimizer":
                continue
            if section is not None and section.device not in (None, "none"):
                dropped[f"zero_optimization.{name}"] = section.to_dict()
        left = zero if host is None else attrs.evolve(zero, offload_optimizer=None)
        if host is None or left.to_dict() not in ({}, {"stage": 0}):
            dropped["zero_optimization"] = left.to_dict()
    if plan.aio is not None:
        dropped["aio"] = plan.aio.to_dict()
    if not dropped and not asked:
        dropped["engine"] = "deepspeed"
    for key, value in dropped.items():
        log.decide(key, value, "plain" if key == "engine" else None, why, "warning")
    if host is not None:
        log.decide(
            key=_HOST_OPTIMIZER,
            before=host.device,
            after=host.device,
            reason="the plain engine too keeps the optimizer in host memory and steps there; "
            "every process all of it, since nothing is partitioned",
        )
    return attrs.evolve(
        plan,
        zero_optimization=None if host is None else ZeroSection(offload_optimizer=host),
        aio=None,
        zero_allow_untested_optimizer=None,
        zero_force_ds_cpu_optimizer=None,
    )


_HOST_OPTIMIZER = "zero_optimization.offload_optimizer"


def _host_optimizer(zero: ZeroSection | None, platform: Platform) -> OffloadSection | None:
    """What the plain engine keeps of a plan with its optimizer in host memory."""
    section = None if zero is None else zero.offload_optimizer
    # On macOS host and device share one memory.
    if section is None or section.device != "cpu" or platform.accelerator == "mps":
        return None
    on_device = platform.accelerator != "cpu"
    pin = section.pin_memory if isinstance(section.pin_memory, bool) else on_device
    return OffloadSection(device="cpu", pin_memory=pin and on_device)


def _without_host_optimizer(plan: DeepSpeedPlan, log: Log) -> DeepSpeedPlan:
    zero = plan.zero_optimization
    if zero is None or zero.offload_optimizer is None:
        return plan
    log.decide(
        key=_HOST_OPTIMIZER,
        before=zero.offload_optimizer.device,
        after=None,
        reason="the plain engine's loss scale is undone where the gradients are, on the "
        "device; bf16 needs none",
        severity="warning",
    )
    return attrs.evolve(plan, zero_optimization=None)


def _without_inactive_offload(plan: DeepSpeedPlan) -> DeepSpeedPlan:
    zero = plan.zero_optimization
    if zero is None:
        return plan
    for name in ("offload_optimizer", "offload_param"):
        section: OffloadSection | None = getattr(zero, name)
        if section is not None and section.device == "none":
            zero = evolved(zero, **{name: None})
    return attrs.evolve(plan, zero_optimization=zero)


def _repaired(plan: DeepSpeedPlan, findings: Iterable[Finding], log: Log) -> DeepSpeedPlan:
    """``plan`` with what the rules make of it; what they refuse is raised."""
    findings = tuple(findings)
    raise_all([finding.as_error() for finding in findings if finding.severity == "error"])
    for finding in findings:
        log.decisions.append(finding.as_decision())
        if finding.after is not UNSET:
            plan = _put(plan, finding.key.split("."), finding.after)
    return plan


def _put(section: SectionT, path: list[str], value: Any) -> SectionT:
    """``section`` with the setting at ``path`` changed."""
    name, *below = path
    new = _put(getattr(section, name), below, value) if below else value
    return evolved(section, **{name: new})


def _filled(plan: DeepSpeedPlan, filler: Filler, case: Case) -> DeepSpeedPlan:
    context = case.context
    batch, why = case.batch
    filler.decisions.extend(why)
    clipping = _clipping(plan, filler, context.run)
    bf16, fp16 = fill_precision(plan, filler.precision, filler)
    zero, aio = None if context.uses_deepspeed else plan.zero_optimization, None
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


def _refuse_automatic(plan: DeepSpeedPlan) -> None:
    left = attrs.evolve(plan, optimizer=None, scheduler=None).to_dict()
    for path in automatic_paths(left):
        raise UnresolvedPlanError(
            "zerotune does not fill in this key", key=path, value=AUTO, fix="write a value"
        )


def _clipping(plan: DeepSpeedPlan, filler: Filler, run: RunFacts) -> float:
    key = "gradient_clipping"
    written = plan.gradient_clipping
    norm, reason = clipping(plan, run)
    if written is None or isinstance(written, str):
        filler.decide(key, written, norm, reason)
    else:
        stands = "number stands before that of the run"
        overruled(filler, key, run.gradient_clipping, written, stands)
    return norm


# -- The dict DeepSpeed receives.


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


def render(resolved: ResolvedPlan, *, folders: bool = True) -> dict[str, Any]:
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


def written(resolved: ResolvedPlan) -> dict[str, Any]:
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
            if _may_be_automatic(item)
            for found in automatic_paths(item, f"{path}.{key}" if path else str(key))
        ]
    if isinstance(value, list | tuple):
        return [
            found
            for index, item in enumerate(value)
            if _may_be_automatic(item)
            for found in automatic_paths(item, f"{path}[{index}]")
        ]
    return []


def _may_be_automatic(value: Any) -> bool:
    # Most of what is long is neither, and needs no path.
    return value == AUTO if isinstance(value, str) else isinstance(value, Mapping | list | tuple)


def _render_choices(resolved: ResolvedPlan, config: dict[str, Any]) -> None:
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


def _render_folders(resolved: ResolvedPlan, config: dict[str, Any], *, folders: bool) -> None:
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
