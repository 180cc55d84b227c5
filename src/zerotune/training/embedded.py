"""Use zerotune's plan, swap folder and checks inside another training framework."""

from __future__ import annotations

import atexit
import os
from contextlib import ExitStack
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, TypeVar

import attrs
import torch

from zerotune._util.closing import Closing
from zerotune.backend.deepspeed.external import (
    AttachedEngine,
    accelerate_optimizer,
    accelerator_arguments,
    check_accelerate,
    deepspeed_engine_of,
    embedded_accelerator,
    loads_whole,
    refill_plugin,
)
from zerotune.backend.deepspeed.sharded import shard_from_host
from zerotune.backend.deepspeed.start import (
    compiling,
    initialize_arguments,
    join,
    place_of_weights,
    read_weights,
)
from zerotune.backend.distributed import together
from zerotune.backend.engine import Engine
from zerotune.backend.host.engine import HostEngine
from zerotune.backend.launch import Launch
from zerotune.backend.op_builds import folder_decisions
from zerotune.backend.process_groups import deepspeed_groups
from zerotune.backend.stored import require_read
from zerotune.checkpoint import load_checkpoint, save_checkpoint
from zerotune.checkpoint.drafting import tied_names
from zerotune.checkpoint.export.model import untrained
from zerotune.checkpoint.folders import find_checkpoint
from zerotune.decisions import Decision, announce
from zerotune.ema import EMAModel, EMAShadow
from zerotune.errors import EngineError
from zerotune.offload import OffloadManager
from zerotune.plan.context import RunFacts
from zerotune.plan.facts import ModelFacts
from zerotune.platform import detect_platform
from zerotune.training.arguments import as_plan
from zerotune.training.save import SHADOW_BEGINS, begun_anew, gone_on
from zerotune.training.setup import PlanSource, leased, settled, start_hosted

if TYPE_CHECKING:
    from argparse import Namespace
    from pathlib import Path

    from zerotune.optim import OptimizerResolver
    from zerotune.plan.context import EngineName
    from zerotune.plan.facts import ParameterFacts
    from zerotune.plan.plan import ResolvedPlan
    from zerotune.platform import Platform


E = TypeVar("E", bound=Engine)

_TRUE: Final = ("y", "yes", "t", "true", "on", "1")
"""Values of accelerate's environment variables that mean true."""


class EmbeddedPlan(Closing):
    """A resolved and verified plan, with a swap folder, for training with another framework.

    Create an ``EmbeddedPlan`` before the framework initialises process groups or DeepSpeed. Any
    launcher works. The plan receives the model when the script passes it to the framework::

        run = EmbeddedPlan(plan="ds_config.json", run=args)
        accelerator = run.accelerator()
        unet, optimizer, loader, lr_scheduler = accelerator.prepare(
            unet, optimizer, loader, lr_scheduler
        )
        engine = run.engine  # EMAShadow, save_checkpoint and load_checkpoint take this
        ...
        run.close()

    Args:
        plan: A plan, a DeepSpeed configuration as a dict, or the path to a configuration file; a
            ``ResolvedPlan`` is used unchanged.
        model: The model to train, in fp32; only its shapes and names are read. Required only for
            frameworks, such as Fabric, that read the whole configuration before they receive the
            model.
        resolver: Chooses optimizer and schedule; default ``OptimizerResolver()``.
        offload: Creates the swap folders; default ``OffloadManager()``.
        run: Values for the fields that are ``"auto"`` in the plan, as ``RunFacts`` or as the
            script's parsed flags. The script's flags must have the same names as in diffusers'
            scripts.
        platform: The machine to run on; detected by default.
        engine: ``"host"`` or ``"deepspeed"``, as in ``DeepSpeedPlan.resolve``, for the engine that
            ``accelerator().prepare`` starts; ignored if ``plan`` is resolved.
        timeout_s: Timeout of collectives in seconds.

    Raises:
        PlanError: The plan cannot run on this machine.
        OptimizerError: The optimizer is not available.
        OffloadError: A swap folder cannot be created, or host memory is too small for the plan.
        EngineError: The script runs under ``accelerate launch --cpu``, which turns DeepSpeed off.
        MissingDependencyError: DeepSpeed is not installed.
    """

    def __init__(
        self,
        *,
        plan: PlanSource,
        model: torch.nn.Module | None = None,
        resolver: OptimizerResolver | None = None,
        offload: OffloadManager | None = None,
        run: RunFacts | Namespace | None = None,
        platform: Platform | None = None,
        engine: EngineName | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        super().__init__()
        self._timeout_s = timeout_s
        self._engine: Engine | None = None
        self._decided: list[Decision] = []
        self._shadows: dict[str, EMAShadow] = {}
        self._settled: ResolvedPlan | None = None
        self._plugin: Any = None
        self._wanted, self._run, self._engine_name = as_plan(plan), run, engine
        self._resolver, self._offload = resolver, offload or OffloadManager()
        with self._starting():
            _refuse_cpu_flag()
            self._platform = platform or detect_platform()
            # Rejects a plan that cannot run, even if the model is not known yet.
            self._outline = self._resolved(model)
            platform = self._outline.platform
            self._deepspeed, _ = join(platform, self.resources, timeout_s=timeout_s)
            self.decide(*folder_decisions())
            # The framework would start DeepSpeed's communication, which may compile an op.
            with compiling(self._outline):
                self._deepspeed.init_distributed(dist_init_required=False)
            if model is not None:
                self._fit(self._outline, model)
        atexit.register(self._abandon)

    def _resolved(self, model: torch.nn.Module | None) -> ResolvedPlan:
        run = self._run
        return settled(
            self._wanted,
            model=model,
            resolver=self._resolver,
            run=run if run is None or isinstance(run, RunFacts) else RunFacts.from_arguments(run),
            platform=self._platform,
            engine=self._engine_name,
        )

    def settle(self, model: torch.nn.Module) -> None:
        """Resolve the plan for the model to train. Collective.

        Only the first call has an effect. Methods that receive the model, such as
        ``accelerator.prepare``, ``initialize_arguments`` and ``shard``, call ``settle``.

        Args:
            model: The model to train, in fp32; only its shapes and names are read.

        Raises:
            PlanError: The plan cannot run on this machine.
            OptimizerError: The optimizer is not available.
            OffloadError: A swap folder cannot be created, or host memory is too small for the plan.
            EngineError: The script changed its flags after it created its ``Accelerator``.
        """
        if self._settled is not None:
            return
        resolved = self._resolved(model)
        for key in ("precision", "gradient_accumulation_steps"):
            before, after = getattr(self._outline, key), getattr(resolved, key)
            if before != after and self._plugin is not None:
                raise EngineError(
                    f"was {before} when the Accelerator was created",
                    "change the script's flags before it creates the Accelerator",
                    key,
                    after,
                )
        self._fit(resolved, model)
        if self._plugin is not None:
            refill_plugin(self._plugin, self.plan)

    def _fit(self, resolved: ResolvedPlan, model: torch.nn.Module) -> None:
        self._parameters = ModelFacts.from_module(model).parameters
        self._settled = leased(resolved, self._offload, self.resources, self._timeout_s)
        deepspeed_groups.join()
        self.resources.callback(deepspeed_groups.leave)
        self._preparing = self.resources.enter_context(ExitStack())
        self._preparing.enter_context(deepspeed_groups.making())
        self._preparing.enter_context(compiling(self._settled))

    @property
    def plan(self) -> ResolvedPlan:
        """The resolved plan, with NVMe paths inside this run's swap folder.

        Raises:
            EngineError: No model has been passed to the plan yet.
        """
        if self._settled is None:
            raise EngineError(
                "the plan has no model yet",
                "prepare the model first, or create EmbeddedPlan(plan=..., model=...)",
                "EmbeddedPlan.plan",
            )
        return self._settled

    @property
    def config(self) -> dict[str, Any]:
        """A copy of DeepSpeed's configuration, for ``DeepSpeedStrategy(config=run.config)``."""
        return self.plan.to_deepspeed()

    def shard(self, model: torch.nn.Module) -> None:
        """At stage 3, partition a model in host memory, one parameter at a time.

        Call ``shard`` before the framework receives the model. Without ``shard``, the framework
        moves the whole model to the device before DeepSpeed partitions it. If the weights have not
        been read yet (``load_pretrained(..., plan=...)``), ``shard`` is required at every stage and
        reads them.

        Args:
            model: The model to train, in fp32.
        """
        self.settle(model)
        where = place_of_weights(self._deepspeed, self.plan)
        self.decide(*read_weights(self.plan, model, device=where))
        if self.plan.stage == 3:
            accelerator = self._deepspeed.accelerator.get_accelerator()
            device = torch.device(accelerator.current_device_name())
            shard_from_host(self._deepspeed, model, self.plan, device=device)

    def initialize_arguments(self, model: torch.nn.Module) -> dict[str, Any]:
        """Return arguments for ``deepspeed.initialize(**run.initialize_arguments(model))``.

        Args:
            model: The model to train, in fp32.
        """
        require_read(model)
        self.settle(model)
        return initialize_arguments(self.plan, model)

    def accelerator_arguments(self) -> dict[str, Any]:
        """Return arguments for ``Accelerator(**run.accelerator_arguments())``."""
        outline = self._settled or self._outline
        self.decide(*loads_whole(outline))
        arguments = accelerator_arguments(outline)
        self._plugin = arguments["deepspeed_plugin"]
        return arguments

    def accelerate_optimizer(self, model: torch.nn.Module) -> tuple[Any, EngineSchedule]:
        """Return the plan's optimizer and schedule for ``accelerator.prepare``.

        Args:
            model: The model to train, in fp32.
        """
        self.settle(model)
        return accelerate_optimizer(self.plan, model), EngineSchedule(self)

    def accelerator(self, **arguments: Any) -> Any:
        """Return an ``accelerate.Accelerator`` that applies the plan to the script.

        The accelerator's ``prepare`` replaces the script's optimizer and schedule with those of the
        plan, and records these replacements as decisions. It starts the host engine if this engine
        runs the plan, and returns the model itself; otherwise it attaches DeepSpeed's engine.
        ``accelerator.backward`` takes the optimizer steps of both. ``save_state`` and
        ``load_state`` write and read portable checkpoints, which contain each EMA passed to
        ``register_for_checkpointing``. Save and load hooks that the script registers are not
        called. ``get_state_dict`` returns the whole model on rank 0 at every stage. ``save_state``,
        ``load_state`` and ``get_state_dict`` are collective. ``end_training`` closes the run.

        Args:
            arguments: The script's arguments for ``Accelerator``. The plan's values override these
                arguments; each override is recorded as a decision.

        Raises:
            MissingDependencyError: accelerate is not installed.
        """
        return embedded_accelerator(self, arguments)

    def schedule(self) -> EngineSchedule:
        """Return a replacement for the script's ``lr_scheduler``."""
        return EngineSchedule(self)

    def decide(self, *decisions: Decision) -> None:
        """Record and log ``decisions`` made for the script."""
        self._decided.extend(decisions)
        announce(decisions)

    def register(self, *emas: Any) -> None:
        """Attach EMAs to the engine, and include them in its checkpoints. Collective.

        Args:
            emas: ``zerotune.ema.EMAModel`` objects, which may have been created before the
                engine, or attached ``EMAShadow`` objects.

        Raises:
            EngineError: An object has an unsupported class, or no engine is attached yet.
            EMAError: An EMA belongs to a different model.
        """
        for each in emas:
            if not isinstance(each, EMAModel | EMAShadow):
                raise EngineError(
                    "cannot be saved with the engine",
                    "use zerotune.ema.EMAModel instead of diffusers' EMAModel, or save the "
                    "object yourself",
                    "accelerator.register_for_checkpointing",
                    type(each).__name__,
                )
            if isinstance(each, EMAModel):
                each.follow(self.engine)
            number = len(self._shadows) + 1
            shadow = each.shadow if isinstance(each, EMAModel) else each
            self._shadows["ema" if number == 1 else f"ema{number}"] = shadow

    def save(self, directory: str | os.PathLike[str]) -> Path:
        """Save the engine and all EMAs to ``directory`` with ``save_checkpoint``. Collective."""
        return save_checkpoint(directory, engine=self.engine, shadows=self._shadows)

    def load(self, directory: str | os.PathLike[str]) -> None:
        """Load the engine and all EMAs from ``directory`` with ``load_checkpoint``. Collective.

        An EMA missing from the checkpoint starts from the loaded weights.
        """
        engine, before = self.engine, self.engine.state.global_step
        there = together(engine.group, "find the checkpoint", lambda: find_checkpoint(directory))
        names = there[engine.group.rank][1].shadows
        saved = {name: each for name, each in self._shadows.items() if name in names}
        load_checkpoint(directory, engine=engine, shadows=saved)
        for name, shadow in self._shadows.items():
            if name not in saved:
                shadow.begin_anew()
                self.decide(begun_anew(f"shadows.{name}", SHADOW_BEGINS))
        gone_on(before, engine, directory)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Gather the model's full tensors on rank 0, each in its own dtype. Collective.

        The tensors need as much host memory as the model. The export functions need less: memory
        for one tensor at a time.

        Returns:
            CPU tensors by name on rank 0; an empty dict on other ranks.
        """
        engine = self.engine
        dtypes = {name: p.dtype for name, p in engine.module.named_parameters()}
        whole: dict[str, torch.Tensor] = {}
        for name, tensor in chain(engine.master_weights.gather(), untrained(engine)):
            if engine.group.is_main:
                whole[name] = tensor.to("cpu", dtypes.get(name, tensor.dtype), copy=True)
        if whole:
            whole |= {alias: whole[name] for alias, name in tied_names(engine.module).items()}
        return whole

    def begin(self, model: torch.nn.Module) -> HostEngine | None:
        """Start the host engine, if it can run the plan, instead of DeepSpeed's. Collective.

        ``accelerator.prepare`` calls ``begin``.

        Args:
            model: The model to train, in fp32.

        Returns:
            The engine; ``None`` if DeepSpeed runs the plan, for a reason recorded as a decision.

        Raises:
            EngineError: An engine is already attached, the model differs from the plan's model, or
                the framework started a different number of processes.
            VerificationError: The running engine differs from the plan.
        """
        if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
            return None  # shard() has given the weights to DeepSpeed.
        self._check_new(model)
        check_accelerate(self.plan.world_size)
        plan = attrs.evolve(self.plan, decisions=(*self.plan.decisions, *self._decided))
        self._decided.clear()
        started = start_hosted(model=model, plan=plan, timeout_s=self._timeout_s)
        if isinstance(started, HostEngine):
            return self._adopt(started)
        self._settled = started
        refill_plugin(self._plugin, started)
        return None

    def attach(self, engine: Any) -> AttachedEngine:
        """Verify and attach the engine that the framework initialised. Collective.

        Args:
            engine: The object returned by ``deepspeed.initialize``, ``accelerator.prepare`` or
                Fabric's ``setup`` for the model.

        Returns:
            The engine for EMA and checkpoint functions; the training loop needs no change.

        Raises:
            EngineError: The object is not a DeepSpeed engine, an engine is already attached, the
                engine's model differs from the plan's model, or the framework started a different
                number of processes.
            VerificationError: The running engine differs from the plan.
        """
        self._check_first()
        self._check_new(deepspeed_engine_of(engine).module)
        return self._adopt(
            AttachedEngine(
                engine=engine,
                plan=self.plan,
                timeout_s=self._timeout_s,
                decided=tuple(self._decided),
            )
        )

    def _adopt(self, engine: E) -> E:
        self._engine = engine
        self.resources.callback(engine.close)
        self._preparing.close()
        return engine

    def _check_first(self) -> None:
        if self._engine is not None:
            raise EngineError(
                "the plan already has an engine, and a plan can train only one model",
                "create one EmbeddedPlan per trained model",
                "EmbeddedPlan.attach",
            )

    def _check_new(self, module: torch.nn.Module) -> None:
        """Check that no engine is attached, and that a model may be trained under the plan."""
        self._check_first()
        launched = Launch.from_environment()
        if launched.launched and launched.world_size != self.plan.world_size:
            raise EngineError(
                f"the plan was resolved for {self.plan.world_size} processes, but the "
                f"framework then started {launched.world_size} processes",
                "start the script with torchrun, so that the number of processes is known "
                "before the plan is resolved",
                "world_size",
                launched.world_size,
            )
        planned = {each.name: each for each in self._parameters}
        trained = {each.name: each for each in ModelFacts.from_module(module).parameters}
        differing = [
            name for name in {**planned, **trained} if planned.get(name) != trained.get(name)
        ]
        if not differing:
            return
        name = differing[0]
        raise EngineError(
            f"the trained model differs from the plan's model in {len(differing)} parameters. "
            f"For example, {name} is "
            f"{_parameter_words(planned.get(name))} in the plan and "
            f"{_parameter_words(trained.get(name))} in the trained model",
            "create the EmbeddedPlan with a model that has the trained model's "
            "configuration, adapters and frozen parameters",
            "EmbeddedPlan.attach",
            type(module).__name__,
        )

    @property
    def engine(self) -> Engine:
        """The engine returned by ``attach``, or started by ``accelerator.prepare``.

        Raises:
            EngineError: There is no engine yet.
        """
        if self._engine is None:
            raise EngineError(
                "no engine is attached yet",
                "call run.attach(engine) after the framework has initialised DeepSpeed",
                "EmbeddedPlan.engine",
            )
        return self._engine

    def _release(self) -> None:
        atexit.unregister(self._abandon)

    def _abandon(self) -> None:
        # The script ended without close(), perhaps with an error: do not wait for other ranks.
        self.__exit__(SystemExit, SystemExit("the script ended without close()"), None)


def _parameter_words(parameter: ParameterFacts | None) -> str:
    if parameter is None:
        return "missing"
    return f"{'trained' if parameter.trainable else 'frozen'}, of shape {parameter.shape}"


def _refuse_cpu_flag() -> None:
    if (given := os.environ.get("ACCELERATE_USE_CPU", "")).lower() in _TRUE:
        raise EngineError(
            "accelerate launch --cpu turns DeepSpeed off",
            "omit --cpu; to train on the CPU, set DS_ACCELERATOR=cpu and start the script with "
            "torchrun",
            "ACCELERATE_USE_CPU",
            given,
        )


class EngineSchedule:
    """Replacement for a script's ``lr_scheduler``; the engine advances the plan's schedule."""

    def __init__(self, run: EmbeddedPlan) -> None:
        self._run = run

    def step(self, *_args: Any, **_kwargs: Any) -> None:
        """Do nothing: the engine's ``step`` already advances the schedule."""

    def get_last_lr(self) -> list[float]:
        """Return the first parameter group's learning rate for the next optimizer step."""
        return [self._run.engine.lr]

    def state_dict(self) -> dict[str, Any]:
        """Return an empty dict: the engine's checkpoint contains the schedule's position."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: the engine's checkpoint contains the schedule's position."""
