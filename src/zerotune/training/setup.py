"""From a model and a plan to a running engine, in one call."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from zerotune.backend.build import build_engine
from zerotune.backend.checks import check_same_plan
from zerotune.backend.compilation import Compilation, Compiled
from zerotune.backend.distributed import Launch, ProcessGroup, communication_backend
from zerotune.offload import OffloadManager
from zerotune.optim import OptimizerResolver
from zerotune.plan.model import ModelFacts, ResolvedPlan
from zerotune.platform import detect_platform
from zerotune.training.inputs import as_plan, check_model, check_resolver
from zerotune.training.out_of_memory import Situation, advising

if TYPE_CHECKING:
    import torch

    from zerotune.backend.engine import Engine
    from zerotune.plan.advise import Advice
    from zerotune.plan.model import DeepSpeedPlan, RunFacts
    from zerotune.platform import Platform


def prepare(
    *,
    model: torch.nn.Module,
    plan: DeepSpeedPlan | ResolvedPlan | Advice | Mapping[str, Any] | str | os.PathLike[str],
    optimizer: OptimizerResolver | None = None,
    offload: OffloadManager | None = None,
    run: RunFacts | None = None,
    platform: Platform | None = None,
    deepspeed: bool = True,
    compile: bool | Mapping[str, Any] | Compilation = False,  # noqa: A002
    timeout_s: float = 600.0,
) -> Engine:
    """Resolve a plan for this machine and start the engine it asks for.

    The engine owns what it needs: closing it releases its swap folder and, if it was started
    here, the process group::

        with zerotune.prepare(model=model, plan=plan) as engine:
            loss = objective(engine, batch, generator)
            engine.backward(loss)
            engine.step()

    Under a launcher (``torchrun``, ``accelerate launch``, ``deepspeed``) every process calls it;
    a bare ``python`` needs no environment.

    Args:
        model: The model, in fp32.
        plan: What is wanted: a plan, a DeepSpeed configuration as a dict, or the path of one; a
            ``ResolvedPlan`` is taken as it is.
        optimizer: Settles optimizer and schedule; ``OptimizerResolver()`` when not given. Not
            asked when a resolved plan has them settled.
        offload: Leases swap folders; ``OffloadManager()`` when not given.
        run: What the script knows and the plan may leave ``"auto"``.
        platform: The machine; detected when not given.
        deepspeed: ``False`` asks for the plain engine.
        compile: ``True``, or options of ``Compilation``, compiles the forward pass.
        timeout_s: Seconds after which a collective gives up.

    Returns:
        The engine, verified against the plan, which it holds as ``engine.plan``.

    Raises:
        PlanError: The plan cannot run like this.
        OptimizerError: The optimizer cannot be had.
        OffloadError: A swap folder cannot be leased, or the plan needs more host memory than
            there is.
        EngineError: The engine could not be started, or is not what the plan says.
        OutOfMemoryError: Memory ran out; the message names the plan that fits.
    """
    wanted = Compilation.of(compile)
    check_model(model)
    check_resolver(optimizer)
    plan = as_plan(plan)
    plan = settled(
        plan, model=model, optimizer=optimizer, run=run, platform=platform, deepspeed=deepspeed
    )
    with ExitStack() as resources:
        compiled = None if wanted is None else Compiled(wanted, model=model, plan=plan)
        if compiled is not None:
            resources.callback(compiled.undo)
        plan = leased(plan, offload or OffloadManager(), resources, timeout_s)
        starting = Situation(plan=plan, doing="starting the engine")
        with advising(lambda: starting):
            engine = build_engine(model=model, plan=plan, timeout_s=timeout_s)
        if compiled is not None:
            compiled.apply(engine)
        engine.resources.push(resources.pop_all())
    return engine


def settled(
    plan: DeepSpeedPlan | ResolvedPlan,
    *,
    model: torch.nn.Module,
    optimizer: OptimizerResolver | None = None,
    run: RunFacts | None = None,
    platform: Platform | None = None,
    deepspeed: bool = True,
) -> ResolvedPlan:
    """A plan with nothing left open, for this model, machine and number of processes."""
    if not isinstance(plan, ResolvedPlan):
        plan = plan.resolve(
            platform=platform or detect_platform(),
            model=ModelFacts.from_module(model),
            world_size=_processes()[1],
            run=run,
            deepspeed=deepspeed,
        )
    return plan if plan.optimizer else (optimizer or OptimizerResolver()).apply(plan)


def _processes() -> tuple[int, int]:
    """Rank and number of the processes, whether they have met yet or not."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    launch = Launch.from_environment()
    return launch.rank, launch.world_size


def leased(
    plan: ResolvedPlan, offload: OffloadManager, resources: ExitStack, timeout_s: float
) -> ResolvedPlan:
    """The plan inside this run's own swap folders; what holds them goes into ``resources``."""
    if not plan.nvme_paths:
        # No folder is made, and no other rank asked: only the host memory is looked at.
        return resources.enter_context(offload.lease(plan, rank=_processes()[0])).plan
    if plan.world_size == 1:
        return resources.enter_context(offload.lease(plan)).plan
    # The ranks must share the folder's name before there is an engine; the engine joins this
    # group and leaves it open for the barrier after which the folder is removed.
    group = ProcessGroup(
        backend=communication_backend(plan.platform.accelerator), timeout_s=timeout_s
    )
    resources.callback(group.close)
    # The lease would tell the ranks that differ from rank 0, but not rank 0.
    check_same_plan(plan, group)
    lease = offload.lease(
        plan,
        rank=group.rank,
        # A foreign trainer may have ended the group by now; the folder's locks then decide.
        barrier=lambda: group.barrier("leaving the swap folder") if dist.is_initialized() else None,
        share=group.broadcast,
    )
    return resources.enter_context(lease).plan
