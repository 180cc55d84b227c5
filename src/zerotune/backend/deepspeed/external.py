"""Attach zerotune to training that accelerate, Fabric or plain DeepSpeed has set up."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import attrs
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import DataLoader
from typing_extensions import override

from zerotune.backend.checks import check_alike, expected_groups, share_buffers
from zerotune.backend.deepspeed.engine import ZeROEngine
from zerotune.backend.deepspeed.sharded import refuse_empty_tensors
from zerotune.backend.deepspeed.start import check_plan, check_world, wrapper_of
from zerotune.backend.distributed import ProcessGroup
from zerotune.backend.engine import EngineState, StepOutcome
from zerotune.backend.master_weights import (
    MasterWeights,
    ParameterLayout,
    full_shape,
    trainable_parameters,
)
from zerotune.backend.optimizers.client import (
    build_client_optimizer,
    chosen_optimizer,
    own_scheduler,
    parameter_groups,
)
from zerotune.backend.upstream import require_accelerate
from zerotune.decisions import Decision, announce
from zerotune.errors import EngineError, InvalidValueError
from zerotune.plan.optimizer.curves import lr_at
from zerotune.plan.plan import ResolvedPlan

_SAMPLED: Final = (*range(20), *(round(20 * 1.1**power) for power in range(1, 90)))
"""Optimizer steps at which two schedules are compared, up to about 96,000."""
_SAME_RATE: Final = 0.01
"""Largest accepted difference of two schedules, as a fraction of the highest rate."""


def master_weights_of(source: Any) -> MasterWeights:
    """Return the fp32 master weights of an engine or a model.

    Args:
        source: A zerotune engine, a ``MasterWeights``, a ``deepspeed.DeepSpeedEngine`` (including
            one returned by ``accelerate.prepare`` or Fabric's ``setup``), or a ``torch.nn.Module``
            whose trainable parameters are fp32.
    """
    if isinstance(source, MasterWeights):
        return source
    master_weights = getattr(source, "master_weights", None)
    if isinstance(master_weights, MasterWeights):
        return master_weights
    source = unwrapped(source)
    if is_deepspeed(source):
        layout, group = wrapper_of(source).layout, ProcessGroup(backend=dist.get_backend())
        return MasterWeights(layout=layout, group=group, device=source.device)
    if isinstance(source, torch.nn.Module):
        return _of_module(source)
    raise EngineError(
        "has no master weights",
        "pass an engine, its master_weights, a DeepSpeedEngine or a torch module",
        "source",
        type(source).__name__,
    )


def deepspeed_engine_of(source: Any) -> Any:
    """Return the ``deepspeed.DeepSpeedEngine`` inside a trainer's prepared model.

    Args:
        source: Model as returned by ``deepspeed.initialize``, ``accelerator.prepare`` or
            ``fabric.setup``.
    """
    engine = unwrapped(getattr(source, "deepspeed_engine", source))
    if is_deepspeed(engine):
        return engine
    raise EngineError(
        "is not a DeepSpeed engine",
        "enable the trainer's DeepSpeed plugin, and pass the model as returned by "
        "deepspeed.initialize, accelerator.prepare or fabric.setup",
        "engine",
        type(source).__name__,
    )


def unwrapped(source: Any) -> Any:
    """Return the module inside Fabric's wrapper; return any other object unchanged."""
    return getattr(source, "_forward_module", source)


def is_deepspeed(source: Any) -> bool:
    """Return whether DeepSpeed defines an object's class, without importing DeepSpeed."""
    return type(source).__module__.startswith("deepspeed.")


def _of_module(module: torch.nn.Module) -> MasterWeights:
    if isinstance(module, torch.nn.parallel.DistributedDataParallel):
        module = module.module
    for name, parameter in module.named_parameters():
        if full_shape(parameter) != tuple(parameter.shape):
            raise EngineError(
                "ZeRO-3 has partitioned this parameter, so the module has only a part of it",
                "pass the engine that trains the module, not the module itself",
                name,
                tuple(parameter.shape),
            )
    # Replicas hold the same weights, so nothing needs to be exchanged.
    master = MasterWeights(
        layout=ParameterLayout(module=module),
        group=ProcessGroup.alone(),
        device=next((p.device for p in module.parameters()), torch.device("cpu")),
    )
    master.bare = frozenset(id(p) for p in module.parameters())
    return master


def accelerator_arguments(plan: ResolvedPlan) -> dict[str, Any]:
    """Return the keyword arguments of ``accelerate.Accelerator`` for a plan.

    The plugin's configuration contains no ``"auto"``, so accelerate changes no setting. On a
    machine without an accelerator, the arguments also select gloo; without gloo, accelerate would
    run every process as a single-process job.

    Args:
        plan: The resolved plan. If the plan's optimizer is not resolved yet, the plugin contains
            only the keys that accelerate needs, and ``refill_plugin`` adds the rest.
    """
    accelerate = require_accelerate()

    class WholeModelsPlugin(accelerate.DeepSpeedPlugin):  # type: ignore[misc, name-defined]
        def set_deepspeed_weakref(self) -> None:
            """Do nothing: transformers partitions every model if a configuration is registered."""
            self.dschf = None

    config: dict[str, Any] = {
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "zero_optimization": {"stage": plan.stage},
    }
    if plan.model is not None:
        config = plan.to_deepspeed()
    arguments = {
        "deepspeed_plugin": WholeModelsPlugin(hf_ds_config=config),
        "mixed_precision": "no" if plan.precision == "fp32" else plan.precision,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
    }
    if plan.platform.accelerator == "cpu":
        gloo = accelerate.utils.InitProcessGroupKwargs(backend="gloo")
        arguments["kwargs_handlers"] = [gloo]
    return arguments


def refill_plugin(plugin: Any, plan: ResolvedPlan) -> None:
    """Write a plan into accelerate's plugin, which was created before the model.

    Args:
        plugin: accelerate's ``DeepSpeedPlugin``.
        plan: The resolved plan.
    """
    plugin.deepspeed_config.clear()
    # Keep accelerate's setting that disables DeepSpeed's log lines about steps.
    plugin.deepspeed_config.update(plan.to_deepspeed(), steps_per_print=math.inf)


def loads_whole(plan: ResolvedPlan) -> tuple[Decision, ...]:
    """Return the decision not to partition the script's frozen models at stage 3."""
    if plan.stage != 3:
        return ()
    return (
        Decision(
            "transformers.from_pretrained",
            "partitioned",
            "whole",
            "a frozen model, such as a text encoder, could not run if it were partitioned; "
            "DeepSpeed partitions only the trained model, in accelerator.prepare",
        ),
    )


def accelerate_optimizer(plan: ResolvedPlan, model: torch.nn.Module) -> Any:
    """Return the optimizer for ``accelerator.prepare``.

    Args:
        plan: The resolved plan.
        model: The model to train.

    Returns:
        ``accelerate.utils.DummyOptim`` with the plan's parameter groups if DeepSpeed builds the
        optimizer; otherwise a torch optimizer, which accelerate does not replace.
    """
    choice, named = chosen_optimizer(plan), trainable_parameters(model)
    if choice.source != "deepspeed":
        return build_client_optimizer(choice, named)
    accelerate = require_accelerate()
    return accelerate.utils.DummyOptim(parameter_groups(choice, named), lr=choice.lr)


def embedded_accelerator(embedding: Any, given: Mapping[str, Any]) -> Any:
    """Return an ``accelerate.Accelerator`` that replaces a script's optimizer with the plan's.

    Args:
        embedding: The ``EmbeddedPlan`` to run; it saves and loads checkpoints, and registers EMAs.
        given: Keyword arguments that the script passes to ``Accelerator``. If an argument conflicts
            with the plan, the plan's value replaces it, and the replacement is recorded as a
            decision.
    """
    arguments = embedding.accelerator_arguments()
    handlers = list(given.get("kwargs_handlers") or ())
    for own in arguments.pop("kwargs_handlers", ()):
        # accelerate accepts one handler of each class.
        theirs = [each for each in handlers if isinstance(each, type(own))]
        handlers += [] if theirs else [own]
        for each in theirs:
            each.backend = own.backend
    embedding.decide(
        *(
            _settled_otherwise(f"Accelerator.{name}", given[name], value)
            for name, value in arguments.items()
            if name in given and given[name] != value
        ),
    )
    accelerator = _accelerator_class()(**{**given, **arguments, "kwargs_handlers": handlers})
    accelerator.embedding = embedding
    return accelerator


def _settled_otherwise(key: str, before: Any, after: Any) -> Decision:
    was, now = (
        each if isinstance(each, (str, int)) else type(each).__name__ for each in (before, after)
    )
    return Decision(key, was, now, "the plan sets this", written=key)


def _accelerator_class() -> Any:
    class EmbeddedAccelerator(require_accelerate().Accelerator):  # type: ignore[misc]
        embedding: Any

        def prepare(self, *objects: Any, **options: Any) -> Any:
            models = [each for each in objects if isinstance(each, torch.nn.Module)]
            if not models:
                return super().prepare(*objects, **options)
            if len(models) > 1:
                raise EngineError(
                    "several models were passed, but a plan trains only one",
                    "move frozen models with .to(accelerator.device) instead; wrap several "
                    "trained models in one torch.nn.Module, and pass this module here and as "
                    "EmbeddedPlan(model=...)",
                    "accelerator.prepare",
                    [type(model).__name__ for model in models],
                )
            self.embedding.settle(models[0])
            planned = _planned(self, models[0], objects)
            if (engine := self.embedding.begin(models[0])) is not None:
                return _beside(self, engine, objects, planned)
            prepared = super().prepare(*planned, **options)
            together = prepared if isinstance(prepared, tuple) else (prepared,)
            self.embedding.attach(together[[each is models[0] for each in objects].index(True)])
            return prepared

        def register_for_checkpointing(self, *objects: Any) -> None:
            self.embedding.register(*objects)

        def register_save_state_pre_hook(self, hook: Any) -> Any:
            self.embedding.decide(_not_called("save"))
            return super().register_save_state_pre_hook(hook)

        def register_load_state_pre_hook(self, hook: Any) -> Any:
            self.embedding.decide(_not_called("load"))
            return super().register_load_state_pre_hook(hook)

        def save_state(self, output_dir: str | os.PathLike[str] | None = None) -> str:
            if output_dir is None:
                raise InvalidValueError(
                    "output_dir is missing; automatic checkpoint names are not supported",
                    "pass a folder, as in save_state(f'{output}/checkpoint-{step}')",
                    "accelerator.save_state",
                )
            return str(self.embedding.save(output_dir))

        def load_state(self, input_dir: str | os.PathLike[str]) -> None:
            self.embedding.load(input_dir)

        def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> Any:
            """Return all full tensors of the model on rank 0, in the model's dtype. Collective."""
            if self.unwrap_model(model) is not self.embedding.engine.module:
                return super().get_state_dict(model, unwrap=unwrap)
            return self.embedding.state_dict()

        def end_training(self) -> None:
            super().end_training()
            self.embedding.close()

    return EmbeddedAccelerator


def _beside(accelerator: Any, engine: Any, objects: tuple[Any, ...], planned: list[Any]) -> Any:
    """Prepare what a script passes together with a model that the host engine trains."""
    # accelerate's backward and clip_grad_norm_ call this object.
    accelerator.deepspeed_engine_wrapped = steps = _Steps(engine)
    optimizer = require_accelerate().utils.DeepSpeedOptimizerWrapper(steps)
    accelerator._models.append(engine.module)
    accelerator._optimizers.append(optimizer)
    for index, each in enumerate(objects):
        if isinstance(each, torch.optim.Optimizer):
            planned[index] = optimizer
        elif isinstance(each, DataLoader):
            planned[index] = accelerator.prepare_data_loader(each)
    return planned[0] if len(planned) == 1 else tuple(planned)


class _Steps:
    """The host engine, for accelerate, which expects DeepSpeed's engine and its optimizer here.

    In accelerate's ``DeepSpeedEngineWrapper``, ``backward`` takes the step too.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = self
        self._engine = engine
        self._outcome: StepOutcome | None = None

    def backward(self, loss: torch.Tensor, *, sync_gradients: bool = True) -> None:
        """Back-propagate; take the optimizer step if ``sync_gradients``."""
        if sync_gradients:
            # At the end of the data, accelerate takes a step before the window is full.
            self._engine.end_window()
        self._engine.backward(loss)
        outcome = self._engine.step()
        self._outcome = outcome if outcome.boundary else self._outcome

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of the last step, before clipping."""
        return None if self._outcome is None else self._outcome.grad_norm

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped."""
        return self._outcome is not None and not self._outcome.applied

    def destroy(self) -> None:
        """Do nothing: ``EmbeddedPlan.close`` closes the engine."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine.optimizer, name)


def _planned(accelerator: Any, model: torch.nn.Module, objects: tuple[Any, ...]) -> list[Any]:
    """The script's objects, with its optimizer and schedule replaced by the plan's."""
    embedding = accelerator.embedding
    planned = list(objects)
    for index, each in enumerate(objects):
        if isinstance(each, torch.optim.Optimizer):
            choice = chosen_optimizer(embedding.plan)
            planned[index] = accelerate_optimizer(embedding.plan, model)
            before = f"{type(each).__name__}(lr={each.defaults.get('lr')})"
            after = f"{choice.name}(lr={choice.lr})"
            embedding.decide(_settled_otherwise("accelerator.prepare.optimizer", before, after))
        elif isinstance(each, LRScheduler):
            planned[index] = embedding.schedule()
            # accelerate steps a schedule once for each process that shares the data.
            each_step = 1 if accelerator.split_batches else embedding.plan.world_size
            embedding.decide(_rescheduled(embedding.plan, each, each_step=each_step))
    return planned


def _rescheduled(plan: ResolvedPlan, given: LRScheduler, *, each_step: int) -> Decision:
    """The decision to replace the script's schedule; a warning if the two schedules differ.

    accelerate steps the script's schedule ``each_step`` times per optimizer step.
    """
    name = "a constant rate" if plan.scheduler is None else plan.scheduler.name
    decision = _settled_otherwise("accelerator.prepare.lr_scheduler", type(given).__name__, name)
    if not isinstance(given, LambdaLR):
        reason = f"{decision.reason}; the schedules' learning rates cannot be compared"
        return attrs.evolve(decision, reason=reason)
    base = chosen_optimizer(plan).lr
    ours = [lr_at(plan.scheduler, step, base) for step in _SAMPLED]
    first, curve = float(given.base_lrs[0]), given.lr_lambdas[0]
    theirs = [first * float(curve(step * each_step)) for step in _SAMPLED]
    worst = max(range(len(_SAMPLED)), key=lambda at: abs(ours[at] - theirs[at]))
    if abs(ours[worst] - theirs[worst]) <= _SAME_RATE * max(ours):
        return decision
    return attrs.evolve(
        decision,
        reason=f"{decision.reason}, but the rates differ: at optimizer step {_SAMPLED[worst]} the "
        f"script's rate is {theirs[worst]:.3g} and the plan's {ours[worst]:.3g}; if the script "
        "multiplies its warm-up or total steps, write the multiplied values into the plan",
        severity="warning",
    )


def _not_called(what: str) -> Decision:
    key = f"accelerator.register_{what}_state_pre_hook"
    return Decision(
        key,
        "called",
        "not called",
        f"{what}_state uses a portable checkpoint, which contains the model and any EMA "
        "that is passed to register_for_checkpointing",
        written=key,
    )


def check_accelerate(world_size: int) -> None:
    """Raise an error if accelerate's number of processes is not ``world_size``.

    With a different number, every process would train on the same data.

    Args:
        world_size: Number of processes.
    """
    accelerate = sys.modules.get("accelerate")
    shared = {} if accelerate is None else accelerate.PartialState._shared_state
    counted = shared.get("num_processes", world_size)
    if str(shared.get("distributed_type")).endswith("DEEPSPEED") and counted != world_size:
        raise EngineError(
            f"accelerate counts {counted} instead of {world_size} processes, so every process "
            "would train on the same data",
            "use Accelerator(**run.accelerator_arguments()), or, on a CPU, "
            'Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])',
            "Accelerator.num_processes",
            counted,
        )


class AttachedEngine(ZeROEngine):
    """An ``Engine`` around a ``deepspeed.DeepSpeedEngine`` that another trainer initialized.

    The engine is compared with the plan, so an optimizer that the trainer replaced is detected
    before the first step. EMA and checkpoints work as with any other engine. ``close`` does not
    destroy DeepSpeed's engine.

    Args:
        engine: DeepSpeed's engine, or the model as returned by ``accelerator.prepare`` or
            Fabric's ``setup``.
        plan: The resolved plan that the engine is meant to run; it must contain an optimizer.
        timeout_s: Seconds after which a collective raises an error.
        decided: Earlier decisions, shown before the engine's decisions.

    Raises:
        EngineError: ``engine`` is not a DeepSpeed engine, or the number of processes differs from
            the plan's.
        UnsupportedEngineError: zerotune does not support DeepSpeed's optimizer wrapper.
        VerificationError: The engine differs from the plan; the error lists every difference.
    """

    def __init__(
        self,
        *,
        engine: Any,
        plan: ResolvedPlan,
        timeout_s: float = 600.0,
        decided: tuple[Decision, ...] = (),
    ) -> None:
        super().__init__()
        self._decided = decided
        with self._starting():
            self._attach(deepspeed_engine_of(engine), plan, timeout_s)

    def _attach(self, engine: Any, plan: ResolvedPlan, timeout_s: float) -> None:
        check_plan(plan)
        if engine.optimizer is None:
            raise EngineError(
                "DeepSpeed was initialized without an optimizer, so no weight would be trained",
                "pass an optimizer, or a configuration with an optimizer section, to the trainer",
                "engine.optimizer",
            )
        self._engine, self._plan, self._module = engine, plan, engine.module
        self._group = ProcessGroup(backend=dist.get_backend(), timeout_s=timeout_s)
        self.resources.callback(self._group.close)
        check_world(plan, self._group)
        check_alike(plan, self._module, self._group)
        check_accelerate(self._group.world_size)
        named = trainable_parameters(self._module)
        self._expected_groups = expected_groups(chosen_optimizer(plan), named)
        self._wrapper = wrapper_of(engine)
        self._decisions = (
            *self._decided,
            *share_buffers(self._module, self._group),
            *self._wrapper.correct(),
            *self._install_schedule(),
        )
        self._verify(builder="the trainer")
        self._trained = frozenset(id(parameter) for _, parameter in named)
        trained = [parameter for _, parameter in named]
        self._step_state.watch(trained, sums_in_place=self._sums_in_place)
        self.resources.callback(self._step_state.unwatch)
        self._master_weights.watch()
        self.resources.callback(self._master_weights.close)
        self._follow_trainer()
        if plan.stage == 3:
            refuse_empty_tensors(engine)
        announce(self._decisions, rank=self._group.rank)

    def _install_schedule(self) -> tuple[Decision, ...]:
        engine, plan = self._engine, self._plan
        if engine.global_steps or engine.lr_scheduler is not None or plan.scheduler is None:
            return ()
        schedule = own_scheduler(plan)
        if schedule is None:
            return ()
        engine.lr_scheduler = schedule(self._wrapper.inner)
        return (
            Decision(
                "scheduler.type",
                None,
                plan.scheduler.name,
                "the trainer cannot pass this schedule to DeepSpeed, so zerotune adds it to "
                "the engine, which steps the schedule once per optimizer step",
            ),
        )

    def _follow_trainer(self) -> None:
        """Let the trainer's calls of DeepSpeed's engine ask and change this engine's state."""
        engine, raw_backward, raw_step = self._engine, self._raw_backward, self._raw_step

        def backward(loss: torch.Tensor, *args: Any, **options: Any) -> Any:
            results = []
            self._raw_backward = lambda loss: results.append(raw_backward(loss, *args, **options))
            try:
                self.backward(loss)
            finally:
                self._raw_backward = raw_backward
            return results[0]

        def step(*args: Any, **options: Any) -> None:
            self._raw_step = partial(raw_step, *args, **options)
            try:
                self.step()
            finally:
                self._raw_step = raw_step

        engine.backward, engine.step = backward, step
        self.resources.callback(vars(engine).pop, "backward")
        self.resources.callback(vars(engine).pop, "step")
        for hook in (
            engine.register_forward_pre_hook(self._before_forward),
            engine.register_forward_hook(self._after_forward, always_call=True),
        ):
            self.resources.callback(hook.remove)

    def _before_forward(self, *_: Any) -> None:
        self._step_state.lift_seals()
        if torch.is_grad_enabled():
            self._begin_forward()

    def _after_forward(self, _module: torch.nn.Module, _inputs: Any, outputs: Any) -> None:
        self._step_state.seal_gradients()
        # A failed pass has no outputs.
        if torch.is_grad_enabled() and outputs is not None:
            self._end_forward(outputs)

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)

    @override
    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss)
        if self._trainers_boundary is False or self._engine.inside_no_sync_ctxt:
            # The trainer calls step only at the end of a window.
            self._step_state.end_micro_batch(boundary=False, applied=False)

    @property
    @override
    def state(self) -> EngineState:
        state, boundary = super().state, self._trainers_boundary
        if boundary is None:
            return state
        # A trainer that sets the boundaries calls step() only there, so DeepSpeed's own counter
        # counts steps. The number of micro batches in an open window is unknown, so it counts as
        # one.
        closed = state.global_step * self._plan.gradient_accumulation_steps
        return attrs.evolve(state, micro_step=closed if boundary else closed + 1)

    @property
    def _trainers_boundary(self) -> bool | None:
        """Whether the trainer made the last micro batch a boundary; ``None`` if it sets none."""
        boundary: bool | None = getattr(self._engine, "_is_gradient_accumulation_boundary", None)
        return boundary

    @override
    def _release(self) -> None:
        """Do nothing: the trainer destroys DeepSpeed's engine."""
