"""An engine over a DeepSpeed engine that accelerate, Fabric or a loop of one's own initialized."""

from __future__ import annotations

from typing import Any

import attrs
import torch.distributed as dist

from zerotune.backend.attaching import deepspeed_engine_of
from zerotune.backend.corrections import align_swapped_gradients, undo_dummy_step
from zerotune.backend.deepspeed import DeepSpeedEngine
from zerotune.backend.distributed import ProcessGroup
from zerotune.backend.engine import EngineState, StepOutcome
from zerotune.backend.groups import expected_groups
from zerotune.backend.handover import check_accelerate
from zerotune.backend.layouts import trainable_parameters
from zerotune.backend.lifetime import Closing
from zerotune.backend.optimizers import own_scheduler
from zerotune.backend.plan_checks import check_plan, check_world
from zerotune.decisions import Decision, announce
from zerotune.errors import EngineError
from zerotune.plan.resolved import ResolvedPlan


class AttachedEngine(DeepSpeedEngine):
    """An ``Engine`` over a ``deepspeed.DeepSpeedEngine`` that another trainer initialized.

    What runs is compared with the plan, as after an initialization of our own, so that an
    optimizer swapped on the way is found before the first step. EMA and checkpoints then take it
    like any engine. Its end is the other trainer's: ``close`` leaves DeepSpeed's engine alone.

    Args:
        engine: DeepSpeed's engine, what ``accelerator.prepare`` made of the model, or the module
            that Fabric's ``setup`` returned.
        plan: The resolved plan it is meant to run, with its optimizer chosen.
        timeout_s: Seconds after which a collective gives up.

    Raises:
        EngineError: No DeepSpeed engine, or another number of processes than the plan's.
        UnsupportedEngineError: An optimizer wrapper that zerotune does not know.
        VerificationError: What runs is not what the plan says; names every difference.
    """

    def __init__(self, *, engine: Any, plan: ResolvedPlan, timeout_s: float = 600.0) -> None:
        Closing.__init__(self)
        with self._starting():
            self._attach(deepspeed_engine_of(engine), plan, timeout_s)

    def _attach(self, engine: Any, plan: ResolvedPlan, timeout_s: float) -> None:
        check_plan(plan)
        if engine.optimizer is None:
            raise EngineError(
                "DeepSpeed was initialized without an optimizer, so it trains nothing",
                key="engine.optimizer",
                fix="pass the optimizer, or a config with an optimizer section, to the trainer",
            )
        self._engine, self._plan, self._module = engine, plan, engine.module
        self._group = ProcessGroup(backend=dist.get_backend(), timeout_s=timeout_s)
        self.resources.callback(self._group.close)
        check_world(plan, self._group)
        check_accelerate(self._group.world_size)
        named = trainable_parameters(self._module)
        if plan.optimizer is not None:
            self._expected_groups = expected_groups(plan.optimizer, named, None)
        fresh = engine.global_steps == 0
        self._decisions = (
            *(undo_dummy_step(engine) if fresh else ()),
            *align_swapped_gradients(engine),
            *(_install_schedule(engine, plan) if fresh else ()),
        )
        self._find_master_weights()
        self._checks().raise_if_failed(engine="the trainer")
        announce(self._decisions, rank=self._group.rank)

    @property
    def state(self) -> EngineState:
        """Counters, scheduler and loss scale, to be saved."""
        state, boundary = super().state, self._trainers_boundary
        if boundary is None:
            return state
        # A trainer that sets the boundaries calls step() only there, so DeepSpeed's own counter
        # counts steps; of an open window nobody tells how many micro batches it has.
        closed = state.global_step * self._plan.gradient_accumulation_steps
        return attrs.evolve(state, micro_step=closed if boundary else closed + 1)

    def step(self) -> StepOutcome:
        """Close a micro batch; update the weights when it is the last of its group.

        Raises:
            EngineError: The trainer steps in its own ``backward``, so this would be a second step.
        """
        if self._trainers_boundary is not None:
            raise EngineError(
                "accelerate steps inside accelerator.backward; this would be a second step",
                key="engine.step",
                fix="call it only where engine.backward of the same object was called",
            )
        return super().step()

    @property
    def _trainers_boundary(self) -> bool | None:
        """Whether the last micro batch closed a window, as the trainer says; None: it never did."""
        boundary: bool | None = getattr(self._engine, "_is_gradient_accumulation_boundary", None)
        return boundary

    def _release(self) -> None:
        """Whoever initialized DeepSpeed's engine ends it."""


def _install_schedule(engine: Any, plan: ResolvedPlan) -> tuple[Decision, ...]:
    curve = own_scheduler(plan)
    if curve is None or plan.scheduler is None or engine.lr_scheduler is not None:
        return ()
    engine.lr_scheduler = curve(getattr(engine.optimizer, "optimizer", engine.optimizer))
    return (
        Decision(
            key="scheduler.type",
            before=None,
            after=plan.scheduler.name,
            reason="the trainer could not take this schedule to DeepSpeed; it was put into the "
            "engine, which steps it once per optimizer step",
        ),
    )
