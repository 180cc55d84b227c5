"""Build a running engine from a model and a plan in one call."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import attrs
import torch
import torch.distributed as dist
from typing_extensions import Never

from zerotune.backend.accelerator import accelerator_for
from zerotune.backend.checks import check_same_plan
from zerotune.backend.compilation import Compilation, Compiled
from zerotune.backend.deepspeed.engine import DeepSpeedEngine
from zerotune.backend.distributed import ProcessGroup
from zerotune.backend.host.engine import HostEngine
from zerotune.backend.host.obstacles import require_other_engine, why_not_hosted
from zerotune.backend.host.plain import PlainHostEngine, SharedPlainHostEngine
from zerotune.backend.host.ranks import SharedHostEngine, why_not_together
from zerotune.backend.launch import rank_and_world_size
from zerotune.backend.plain import PlainEngine
from zerotune.decisions import Decision, announce
from zerotune.diffusion.pretrained import Pretrained
from zerotune.errors import EngineError
from zerotune.offload import OffloadManager
from zerotune.offload.manager import local_ranks
from zerotune.offload.space import check_host_memory
from zerotune.optim import OptimizerResolver
from zerotune.plan.context import DeviceUpdate, EngineName, RunFacts, Streaming, UpdateName
from zerotune.plan.facts import ModelFacts
from zerotune.plan.plan import Advice, DeepSpeedPlan, ResolvedPlan
from zerotune.plan.resolved import host_obstacle
from zerotune.platform import Platform, detect_platform
from zerotune.training.arguments import (
    as_plan,
    check_kind,
    check_model,
    check_resolver,
    refuse_unknown,
)
from zerotune.training.memory import Situation, advising

if TYPE_CHECKING:
    import os

    from zerotune.backend.engine import Engine


PlanSource: TypeAlias = (
    "DeepSpeedPlan | ResolvedPlan | Advice | Mapping[str, Any] | str | os.PathLike[str]"
)
"""Accepted types of ``plan``: a plan, advice, a configuration, or the path to one."""


def prepare(
    model: torch.nn.Module | Pretrained,
    plan: PlanSource | None = None,
    *,
    resolver: OptimizerResolver | None = None,
    offload: OffloadManager | None = None,
    run: RunFacts | None = None,
    platform: Platform | None = None,
    deepspeed: bool = True,
    engine: EngineName | None = None,
    streamed: bool | Streaming | None = None,
    update: UpdateName | DeviceUpdate | None = None,
    compile: bool | Mapping[str, Any] | Compilation = False,  # noqa: A002
    timeout_s: float = 600.0,
    **unknown: Never,
) -> Engine:
    """Resolve a plan for this machine and start its engine.

    Closing the engine deletes its swap folder, and ends the process group if ``prepare`` started
    it::

        with zerotune.prepare(model=model, plan=plan) as engine:
            loss = objective(engine, batch, generator)
            engine.backward(loss)
            engine.step()

    Under a launcher (``torchrun``, ``accelerate launch``, ``deepspeed``) every process calls
    ``prepare``. A single process started with ``python`` needs no environment variables.

    Args:
        model: The model in fp32, or the object returned by ``load_pretrained``.
        plan: A plan, a DeepSpeed configuration as a dict, or the path to a configuration file; a
            ``ResolvedPlan`` is used unchanged. Default: the plan passed to ``load_pretrained``.
        resolver: Chooses optimizer and schedule, also for a ``ResolvedPlan``; default
            ``OptimizerResolver()``.
        offload: Creates the swap folders; default ``OffloadManager()``.
        run: Values for the fields that are ``"auto"`` in the plan.
        platform: The machine to run on; detected by default.
        deepspeed: ``False`` trains without DeepSpeed, with a ``PlainEngine``.
        engine: ``"host"`` or ``"deepspeed"``, as in ``DeepSpeedPlan.resolve``; ignored if ``plan``
            is resolved.
        streamed: Whether to stream weights, as in ``DeepSpeedPlan.resolve``; by default as advised,
            and ignored if ``plan`` is resolved.
        update: Where the host engine updates weights, as in ``DeepSpeedPlan.resolve``; by default
            as advised, and ignored if ``plan`` is resolved.
        compile: Whether to compile the forward pass, or ``Compilation`` options for it.
        timeout_s: Timeout of collectives in seconds.
        **unknown: Rejected with an error; the optimizer belongs in the plan, not in ``optimizer=``.

    Returns:
        The engine; its behaviour is verified against ``engine.plan``.

    Raises:
        PlanError: The plan cannot run on this machine.
        OptimizerError: The optimizer is not available.
        OffloadError: A swap folder cannot be created, or host memory is too small for the plan.
        EngineError: The engine could not be started, or differs from the plan.
        OutOfMemoryError: Memory ran out; the message names a plan that fits.
    """
    refuse_unknown(unknown, "prepare")
    wanted = None if compile is False else Compilation.of(compile)
    if isinstance(model, Pretrained):
        plan = model.plan if plan is None else plan
        model = model.model
    check_model(model)
    check_resolver(resolver)
    check_kind(
        offload,
        OffloadManager,
        key="offload",
        write="OffloadManager(), and set what to offload in the plan: "
        'DeepSpeedPlan.build(offload="cpu")',
    )
    check_kind(run, RunFacts, key="run", write="RunFacts(…), or omit run")
    check_kind(platform, Platform, key="platform", write="zerotune.detect_platform()")
    plan = as_plan(plan)
    plan = settled(
        plan,
        model=model,
        resolver=resolver,
        run=run,
        platform=platform,
        deepspeed=deepspeed,
        engine=engine,
        streamed=streamed,
        update=update,
    )
    plan = _in_training_mode(model, plan)
    with ExitStack() as resources:
        compiled = None if wanted is None else Compiled(wanted, model=model, plan=plan)
        if compiled is not None:
            resources.callback(compiled.undo)
        plan = leased(plan, offload or OffloadManager(), resources, timeout_s)
        starting = Situation(plan=plan, doing="starting the engine")
        with advising(lambda: starting):
            started = build_engine(model=model, plan=plan, timeout_s=timeout_s)
        if compiled is not None:
            compiled.apply(started)
        started.resources.push(resources.pop_all())
    return started


def _in_training_mode(model: torch.nn.Module, plan: ResolvedPlan) -> ResolvedPlan:
    """Put a model in training mode; a decision records it if the model was not."""
    if model.training:
        return plan
    model.train()
    reason = "from_pretrained and eval() turn dropout off; call eval() after prepare to keep that"
    switched = Decision("model", "eval mode", "training mode", reason)
    announce([switched])
    return plan.decided(switched)


def settled(
    plan: DeepSpeedPlan | ResolvedPlan | Advice,
    *,
    model: torch.nn.Module | ModelFacts | None,
    resolver: OptimizerResolver | None = None,
    run: RunFacts | None = None,
    platform: Platform | None = None,
    deepspeed: bool = True,
    engine: EngineName | None = None,
    streamed: bool | Streaming | None = None,
    update: UpdateName | DeviceUpdate | None = None,
) -> ResolvedPlan:
    """Resolve a plan for a model, a machine and the number of processes.

    Without a model, values that depend on it are preliminary, and parameter groups are missing.
    """
    if model is None and resolver is not None:
        # Groups are rules for a model's parameters.
        resolver = attrs.evolve(resolver, groups=None)
    if isinstance(plan, ResolvedPlan):
        plan = plan if resolver is None else resolver.resolve(plan)
    else:
        if isinstance(plan, Advice):
            streamed = plan.streamed if streamed is None else streamed
            update = plan.update if update is None else update
            plan = plan.plan
        facts = ModelFacts.from_module(model) if isinstance(model, torch.nn.Module) else model
        plan = plan.resolve(
            platform=platform or detect_platform(),
            model=facts,
            world_size=rank_and_world_size()[1],
            run=run,
            deepspeed=deepspeed,
            streamed=streamed,
            engine=engine,
            update=update,
            resolver=resolver,
        )
    return plan if model is None else plan.for_run(run)


def leased(
    plan: ResolvedPlan, offload: OffloadManager, resources: ExitStack, timeout_s: float
) -> ResolvedPlan:
    """Create this run's swap folders, and return the plan with their paths.

    Closing ``resources`` deletes the folders.
    """
    if not plan.nvme_paths:
        # This lease only checks host memory: no folder to create, no rank to ask.
        return resources.enter_context(offload.lease(plan, rank=rank_and_world_size()[0])).plan
    if plan.world_size == 1:
        return resources.enter_context(offload.lease(plan)).plan
    # The ranks must share the folder's name before there is an engine. The engine joins this group,
    # which stays open for the barrier before the folder is deleted.
    backend = accelerator_for(plan.platform.accelerator).communication_backend
    group = ProcessGroup(backend=backend, timeout_s=timeout_s)
    resources.callback(group.close)
    # The lease would raise an error on ranks that differ from rank 0, but not on rank 0.
    check_same_plan(plan, group)
    lease = offload.lease(
        plan,
        rank=group.rank,
        # A foreign trainer may have destroyed the group; then only the folder's locks count.
        barrier=lambda: group.barrier("release the swap folder") if dist.is_initialized() else None,
        share=group.broadcast,
    )
    return resources.enter_context(lease).plan


# -- From a resolved plan to its engine.


def build_engine(*, model: torch.nn.Module, plan: ResolvedPlan, timeout_s: float = 600.0) -> Engine:
    """Start the training engine and verify that it matches the plan.

    Args:
        model: The model in fp32.
        plan: A resolved plan with an optimizer.
        timeout_s: Timeout of collectives in seconds.

    Returns:
        A ``HostEngine`` if it can run the plan (on several ranks a ``SharedHostEngine``, and
        without DeepSpeed a ``PlainHostEngine``); otherwise a ``DeepSpeedEngine``, or a
        ``PlainEngine`` if the plan was resolved without DeepSpeed.

    Raises:
        EngineError: The engine cannot run the plan.
        VerificationError: The running engine differs from the plan.
    """
    started = start_hosted(model=model, plan=plan, timeout_s=timeout_s)
    if not isinstance(started, ResolvedPlan):
        return started
    require_other_engine(started)
    kind = DeepSpeedEngine if plan.uses_deepspeed else PlainEngine
    return kind(model=model, plan=started, timeout_s=timeout_s)


def start_hosted(
    *, model: torch.nn.Module, plan: ResolvedPlan, timeout_s: float
) -> HostEngine | ResolvedPlan:
    """Start the host engine, or return the plan that another engine runs instead. Collective."""
    obstacle = why_not_hosted(plan, model)
    if host_obstacle(plan) is None and plan.world_size > 1:
        obstacle = why_not_together(plan, model, obstacle=obstacle, timeout_s=timeout_s)
    if obstacle is not None:
        if plan.update is not None:
            raise EngineError(
                f"only the host engine updates weights on the device, and {obstacle}",
                'remove the obstacle, or resolve the plan with update="host"',
                "update",
                "device",
            )
        return _without_host(plan, obstacle)
    if plan.engine is None:
        plan = plan.with_engine("host", _BY_DEFAULT if plan.uses_deepspeed else _WITHOUT)
    hosts = _HOSTS[plan.uses_deepspeed, plan.world_size > 1]
    return hosts(model=model, plan=plan, timeout_s=timeout_s)


_HOSTS: Final[Mapping[tuple[bool, bool], type[HostEngine]]] = {
    (True, False): HostEngine,
    (True, True): SharedHostEngine,
    (False, False): PlainHostEngine,
    (False, True): SharedPlainHostEngine,
}
"""By whether DeepSpeed is used, and whether there are several ranks."""

_WITHOUT: Final = "the optimizer is an Adam in host memory, and DeepSpeed is off"

_BY_DEFAULT: Final = (
    'the optimizer is an Adam in host memory; plan.resolve(engine="deepspeed") selects the other'
)


def _without_host(plan: ResolvedPlan, obstacle: str) -> ResolvedPlan:
    """The plan for another engine, with the reason where the host engine was wanted."""
    if not plan.uses_deepspeed:
        return _on_the_device(plan, obstacle) if plan.offload_optimizer == "cpu" else plan
    asked = plan.streamed or plan.engine == "host"
    if not asked and (plan.engine is not None or plan.offload_optimizer != "cpu"):
        return plan
    was_hosted = plan.is_hosted
    if plan.streamed:
        plan = attrs.evolve(plan.without_streaming(obstacle), engine="deepspeed")
    else:
        plan = plan.with_engine("deepspeed", obstacle)
    announce(plan.decisions[-1:])
    return _checked_again(plan) if was_hosted else plan


def _checked_again(plan: ResolvedPlan) -> ResolvedPlan:
    """Check host memory for DeepSpeed, which needs more than the host engine that was checked."""
    found = check_host_memory(plan, ranks=local_ranks(plan))
    announce(found)
    keys = {each.key for each in found}
    former = (each for each in plan.decisions if each.key not in keys)
    return attrs.evolve(plan, decisions=(*former, *found))


def _on_the_device(plan: ResolvedPlan, obstacle: str) -> ResolvedPlan:
    decision = Decision(
        "zero_optimization.offload_optimizer",
        "cpu",
        None,
        f"{obstacle}; the optimizer stays on the device",
        "warning",
    )
    announce((decision,))
    return plan.decided(decision, plan=attrs.evolve(plan.plan, zero_optimization=None))
