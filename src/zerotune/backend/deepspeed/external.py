"""Training that somebody else set up: its master weights, its arguments, an engine over it."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from typing import Any, Final

import attrs
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from typing_extensions import override

from zerotune.backend.checks import check_alike, expected_groups
from zerotune.backend.deepspeed.engine import ZeROEngine
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
from zerotune.backend.proof import prove_offload
from zerotune.backend.upstream import require_accelerate
from zerotune.decisions import Decision, announce
from zerotune.errors import EngineError, InvalidValueError
from zerotune.optimizers.schedules import lr_at
from zerotune.plan.model import ResolvedPlan

_SAMPLED: Final = (*range(20), *(round(20 * 1.1**power) for power in range(1, 90)))
"""Optimizer steps at which schedules are compared, to about 96,000."""
_SAME_RATE: Final = 0.01
"""Share of the highest rate by which two schedules may differ."""


def master_weights_of(source: Any) -> MasterWeights:
    """The fp32 weights behind an engine or a model.

    Args:
        source: A zerotune engine, a ``MasterWeights``, a ``deepspeed.DeepSpeedEngine`` of one's
            own loop (also as ``accelerate.prepare`` or Fabric's ``setup`` returns it), or a
            ``torch.nn.Module`` whose trainable parameters are fp32.
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
        key="source",
        value=type(source).__name__,
        fix="give an engine, its master_weights, a DeepSpeedEngine or a torch module",
    )


def deepspeed_engine_of(source: Any) -> Any:
    """The ``deepspeed.DeepSpeedEngine`` in what a trainer returned for a model."""
    engine = unwrapped(getattr(source, "deepspeed_engine", source))
    if is_deepspeed(engine):
        return engine
    raise EngineError(
        "is not a DeepSpeed engine",
        key="engine",
        value=type(source).__name__,
        fix="give what deepspeed.initialize, accelerator.prepare or fabric.setup returned for "
        "the model; without the trainer's DeepSpeed plugin there is no engine to attach to",
    )


def unwrapped(source: Any) -> Any:
    """What Fabric's module wrapper drives; anything else as it is."""
    return getattr(source, "_forward_module", source)


def is_deepspeed(source: Any) -> bool:
    """Whether this is an object of DeepSpeed's own, without importing DeepSpeed."""
    return type(source).__module__.startswith("deepspeed.")


def _of_module(module: torch.nn.Module) -> MasterWeights:
    if isinstance(module, torch.nn.parallel.DistributedDataParallel):
        module = module.module
    for name, parameter in module.named_parameters():
        if full_shape(parameter) != tuple(parameter.shape):
            raise EngineError(
                "ZeRO-3 has partitioned this module, so it holds no whole weights",
                key=name,
                value=tuple(parameter.shape),
                fix="give the engine that trains it instead of the module",
            )
    # Replicas hold the same weights, so nothing needs to be exchanged.
    return MasterWeights(
        layout=ParameterLayout(module=module),
        group=ProcessGroup.alone(),
        device=next((p.device for p in module.parameters()), torch.device("cpu")),
    )


def accelerator_arguments(plan: ResolvedPlan) -> dict[str, Any]:
    """Keyword arguments of ``accelerate.Accelerator``.

    Nothing in the plugin's configuration is ``"auto"``, so accelerate fills and replaces nothing.
    On a machine without an accelerator they name gloo too: accelerate takes none by itself then,
    and each of several processes believes that it is alone.

    Args:
        plan: Where its optimizer is open still, the plugin has what accelerate asks for before
            there is a model; ``refill_plugin`` completes it.
    """
    accelerate = require_accelerate()

    class WholeModelsPlugin(accelerate.DeepSpeedPlugin):  # type: ignore[misc, name-defined]
        def set_deepspeed_weakref(self) -> None:
            """Register no configuration with transformers, which partitions all it loads then."""
            self.dschf = None

    config: dict[str, Any] = {
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "zero_optimization": {"stage": plan.stage},
    }
    if plan.optimizer:
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
    """Have accelerate's plugin, made before the model was known, run this plan."""
    plugin.deepspeed_config.clear()
    # accelerate has switched DeepSpeed's own lines on the terminal off.
    plugin.deepspeed_config.update(plan.to_deepspeed(), steps_per_print=math.inf)


def loads_whole(plan: ResolvedPlan) -> tuple[Decision, ...]:
    """That models which a script loads beside the trained one are not partitioned."""
    if plan.stage != 3:
        return ()
    return (
        Decision(
            key="transformers.from_pretrained",
            before="partitioned",
            after="whole",
            reason="a frozen text encoder in pieces cannot run; DeepSpeed partitions what is "
            "trained when accelerate prepares it",
        ),
    )


def accelerate_optimizer(plan: ResolvedPlan, model: torch.nn.Module) -> Any:
    """The optimizer to hand to ``accelerator.prepare``.

    Returns:
        ``accelerate.utils.DummyOptim`` with the plan's parameter groups where DeepSpeed builds
        the optimizer; else the optimizer, which accelerate then leaves as it is.
    """
    choice, named = chosen_optimizer(plan), trainable_parameters(model)
    if choice.source != "deepspeed":
        return build_client_optimizer(choice, named)
    accelerate = require_accelerate()
    return accelerate.utils.DummyOptim(parameter_groups(choice, named), lr=choice.lr)


def embedded_accelerator(embedding: Any, given: Mapping[str, Any]) -> Any:
    """An ``accelerate.Accelerator`` that runs a plan whatever optimizer its script prepares.

    Args:
        embedding: The ``EmbeddedPlan`` that it runs, and whose methods it calls in its own place.
        given: Keyword arguments of the script's own ``Accelerator``. Those that the plan settles
            are replaced by the plan's, as recorded decisions.
    """
    arguments = embedding.accelerator_arguments()
    handlers = [*(given.get("kwargs_handlers") or ()), *arguments.pop("kwargs_handlers", ())]
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
    return Decision(key=key, before=was, after=now, reason="the plan settles it", written=key)


def _accelerator_class() -> Any:
    class EmbeddedAccelerator(require_accelerate().Accelerator):  # type: ignore[misc]
        embedding: Any

        def prepare(self, *objects: Any, **options: Any) -> Any:
            models = [each for each in objects if isinstance(each, torch.nn.Module)]
            if not models:
                return super().prepare(*objects, **options)
            if len(models) > 1:
                raise EngineError(
                    "a plan is for one model, and DeepSpeed makes one engine of it",
                    key="accelerator.prepare",
                    value=[type(model).__name__ for model in models],
                    fix="prepare what is trained, and move a frozen model with "
                    ".to(accelerator.device); models that are trained together go into one "
                    "torch.nn.Module, also that of EmbeddedPlan(model=...)",
                )
            self.embedding.settle(models[0])
            planned = _planned(self, models[0], objects)
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
                    "needs a folder: accelerate's own numbering of checkpoints is not taken over",
                    key="accelerator.save_state",
                    fix="name it, as in save_state(f'{output}/checkpoint-{step}')",
                )
            return str(self.embedding.save(output_dir))

        def load_state(self, input_dir: str | os.PathLike[str]) -> None:
            self.embedding.load(input_dir)

        def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> Any:
            """Every tensor of the model whole, in its own dtype, on rank 0. Collective."""
            if deepspeed_engine_of(model) is not self.embedding.engine.deepspeed_engine:
                return super().get_state_dict(model, unwrap=unwrap)
            return self.embedding.state_dict()

        def end_training(self) -> None:
            super().end_training()
            self.embedding.close()

    return EmbeddedAccelerator


def _planned(accelerator: Any, model: torch.nn.Module, objects: tuple[Any, ...]) -> list[Any]:
    """What the script prepares, with the plan's optimizer and schedule in its own one's place."""
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
    """The plan's schedule in the script's place, compared with it where it can be read.

    The script's is stepped ``each_step`` times for each optimizer step.
    """
    name = "a constant rate" if plan.scheduler is None else plan.scheduler.name
    decision = _settled_otherwise("accelerator.prepare.lr_scheduler", type(given).__name__, name)
    if not isinstance(given, LambdaLR):
        reason = f"{decision.reason}; the rates of the script's cannot be read and compared"
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
        reason=f"{decision.reason}, and they differ: at optimizer step {_SAMPLED[worst]} the "
        f"script's rate is {theirs[worst]:.3g} and the plan's {ours[worst]:.3g}; where the script "
        "multiplies its warm-up or total steps, give the plan the products",
        severity="warning",
    )


def _not_called(what: str) -> Decision:
    key = f"accelerator.register_{what}_state_pre_hook"
    return Decision(
        key=key,
        written=key,
        before="called",
        after="not called",
        reason=f"{what}_state takes a portable checkpoint, with the model, and with the average "
        "where it is given to register_for_checkpointing",
    )


def check_accelerate(world_size: int) -> None:
    """Refuse an accelerate that counts fewer processes: all would train on the same batches."""
    accelerate = sys.modules.get("accelerate")
    shared = {} if accelerate is None else accelerate.PartialState._shared_state
    counted = shared.get("num_processes", world_size)
    if str(shared.get("distributed_type")).endswith("DEEPSPEED") and counted != world_size:
        raise EngineError(
            f"accelerate counts {counted} of {world_size} processes and gives each the same data",
            key="Accelerator.num_processes",
            value=counted,
            fix="without a GPU: Accelerator(kwargs_handlers=[InitProcessGroupKwargs("
            'backend="gloo")]), or Accelerator(**run.accelerator_arguments())',
        )


class AttachedEngine(ZeROEngine):
    """An ``Engine`` over a ``deepspeed.DeepSpeedEngine`` that another trainer initialized.

    What runs is compared with the plan, as after an initialization of our own, so that an
    optimizer swapped on the way is found before the first step. EMA and checkpoints then take it
    like any engine. Its end is the other trainer's: ``close`` leaves DeepSpeed's engine alone.

    Args:
        engine: DeepSpeed's engine, what ``accelerator.prepare`` made of the model, or the module
            that Fabric's ``setup`` returned.
        plan: The resolved plan it is meant to run, with its optimizer chosen.
        timeout_s: Seconds after which a collective gives up.
        decided: What was decided before, to be shown with the engine's own.

    Raises:
        EngineError: No DeepSpeed engine, or another number of processes than the plan's.
        UnsupportedEngineError: An optimizer wrapper that zerotune does not know.
        VerificationError: What runs is not what the plan says; names every difference.
    """

    _checked_at = -1
    """Optimizer steps when the model was compared last."""

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
                "DeepSpeed was initialized without an optimizer, so it trains nothing",
                key="engine.optimizer",
                fix="pass the optimizer, or a config with an optimizer section, to the trainer",
            )
        self._engine, self._plan, self._module = engine, plan, engine.module
        self._group = ProcessGroup(backend=dist.get_backend(), timeout_s=timeout_s)
        self.resources.callback(self._group.close)
        check_world(plan, self._group)
        check_alike(plan, self._module, self._group)
        check_accelerate(self._group.world_size)
        named = trainable_parameters(self._module)
        self._expected_groups = expected_groups(chosen_optimizer(plan), named, None)
        self._wrapper = wrapper_of(engine)
        stepping: tuple[Decision, ...] = ()
        if engine.global_steps == engine.micro_steps == 0:
            stepping = prove_offload(plan, self._group)
            self._host_step, decided = self._wrapper.take_over_step(plan, self._group)
            stepping += decided
        self._decisions = (
            *self._decided,
            *self._wrapper.correct(),
            *self._install_schedule(),
            *stepping,
        )
        self._verify(builder="the trainer")
        self._trained = frozenset(id(p) for p in self._module.parameters() if p.requires_grad)
        checked = self._wrapper.inner.register_step_pre_hook(self._before_optimizer)
        self.resources.callback(checked.remove)
        if plan.stage == 3:
            _refuse_empty_tensors(engine)
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
                key="scheduler.type",
                before=None,
                after=plan.scheduler.name,
                reason="the trainer could not take this schedule to DeepSpeed; it was put into the "
                "engine, which steps it once per optimizer step",
            ),
        )

    def _before_optimizer(self, *_: Any) -> None:
        """The trainer steps by itself, at stage 3 once per sub-group."""
        if self._checked_at != self._engine.global_steps:
            self._checked_at = self._engine.global_steps
            self._check_before_step(self._checked_at)

    @property
    @override
    def state(self) -> EngineState:
        state, boundary = super().state, self._trainers_boundary
        if boundary is None:
            return state
        # A trainer that sets the boundaries calls step() only there, so DeepSpeed's own counter
        # counts steps; of an open window nobody tells how many micro batches it has.
        closed = state.global_step * self._plan.gradient_accumulation_steps
        return attrs.evolve(state, micro_step=closed if boundary else closed + 1)

    @override
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

    @override
    def _check_backward(self) -> None:
        """Nothing: the trainer's own backward pass is not seen here."""

    @property
    def _trainers_boundary(self) -> bool | None:
        """Whether the last micro batch closed a window, as the trainer says; None: it never did."""
        boundary: bool | None = getattr(self._engine, "_is_gradient_accumulation_boundary", None)
        return boundary

    @override
    def _release(self) -> None:
        """Whoever initialized DeepSpeed's engine ends it."""
        if self._host_step is not None:
            self._host_step.close()


def _refuse_empty_tensors(engine: Any) -> None:
    """Have ``state_dict`` of a partitioned model raise, but for DeepSpeed's own checkpoints.

    A script saves what comes from there: ``save_pretrained``, ``torch.save``, PEFT's adapters.
    """
    of_deepspeed, saving = engine.module_state_dict, False

    def module_state_dict(*args: Any, **kwargs: Any) -> Any:
        nonlocal saving
        saving = True
        try:
            return of_deepspeed(*args, **kwargs)
        finally:
            saving = False

    def check(module: torch.nn.Module, _state: Any, _prefix: str, _metadata: Any) -> None:
        parameters = list(module.parameters())
        empty = sum(p.numel() == 0 and 0 not in full_shape(p) for p in parameters)
        if empty and not saving:
            raise EngineError(
                f"ZeRO-3 holds {empty} of {len(parameters)} parameters in pieces, and a state_dict "
                "or a save_pretrained of the model would have empty tensors in their place",
                key="model.state_dict",
                fix="call zerotune.export_model(path, engine=run.engine) on every rank, or "
                "export_pipeline or export_adapters",
            )

    engine.module_state_dict = module_state_dict
    engine.module.register_state_dict_post_hook(check)
