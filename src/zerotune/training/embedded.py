"""zerotune's plan, swap folder and checks inside a trainer that is somebody else's."""

from __future__ import annotations

import atexit
import os
from contextlib import ExitStack
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import torch

from zerotune._util.closing import Closing
from zerotune._util.proc import held
from zerotune.backend.deepspeed.external import (
    AttachedEngine,
    accelerate_optimizer,
    accelerator_arguments,
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
    read_weights,
)
from zerotune.backend.distributed import Launch, deepspeed_groups, together
from zerotune.backend.stored import require_read
from zerotune.checkpoint import load_checkpoint, save_checkpoint
from zerotune.checkpoint.contents import tied_names
from zerotune.checkpoint.export.model import untrained
from zerotune.checkpoint.folders import find_checkpoint
from zerotune.decisions import Decision, announce
from zerotune.ema import EMAModel, EMAShadow
from zerotune.errors import EngineError
from zerotune.offload import OffloadManager
from zerotune.plan.model import ModelFacts, RunFacts
from zerotune.platform import detect_platform
from zerotune.training.save import SHADOW_BEGINS, begun_anew, gone_on
from zerotune.training.setup import PlanSource, as_plan, leased, settled

if TYPE_CHECKING:
    from argparse import Namespace
    from pathlib import Path

    from zerotune.optim import OptimizerResolver
    from zerotune.plan.model import ParameterFacts, ResolvedPlan
    from zerotune.platform import Platform


_TRUE: Final = ("y", "yes", "t", "true", "on", "1")
"""What accelerate takes for a yes in its environment variables."""


class EmbeddedPlan(Closing):
    """A plan that another trainer runs: settled, with its swap folder leased, and verified.

    Made before that trainer looks at the processes or at DeepSpeed, under any launcher. The
    model joins it where the trainer gets the model::

        run = EmbeddedPlan(plan="ds_config.json", run=args)
        accelerator = run.accelerator()
        unet, optimizer, loader, lr_scheduler = accelerator.prepare(
            unet, optimizer, loader, lr_scheduler
        )
        engine = run.engine  # EMAShadow, save_checkpoint and load_checkpoint take this
        ...
        run.close()

    Args:
        plan: What is wanted: a plan, a DeepSpeed configuration as a dict, or the path of one; a
            ``ResolvedPlan`` is taken as it is.
        model: For a trainer that reads the whole configuration before it gets the model, as
            Fabric does: what is trained, in fp32; only its shapes and names are read.
        resolver: Settles optimizer and schedule; ``OptimizerResolver()`` when not given.
        offload: Leases swap folders; ``OffloadManager()`` when not given.
        run: What the script knows and the plan may leave ``"auto"``: facts, or the script's own
            flags, which are read by the names that diffusers' scripts give them when the model
            joins.
        platform: The machine; detected when not given.
        timeout_s: Seconds after which a collective gives up.

    Raises:
        PlanError: The plan cannot run like this.
        OptimizerError: The optimizer cannot be had.
        OffloadError: A swap folder cannot be leased, or the plan needs more host memory than
            there is.
        EngineError: ``accelerate launch --cpu`` on a machine whose accelerator the plan uses.
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
        timeout_s: float = 600.0,
    ) -> None:
        super().__init__()
        self._timeout_s = timeout_s
        self._engine: AttachedEngine | None = None
        self._decided: list[Decision] = []
        self._shadows: dict[str, EMAShadow] = {}
        self._settled: ResolvedPlan | None = None
        self._plugin: Any = None
        self._wanted, self._run = as_plan(plan), run
        self._resolver, self._offload = resolver, offload or OffloadManager()
        with self._starting():
            self._platform = platform or detect_platform()
            self._leave_cpu_to_the_plan()
            # Where the model is not known yet, a plan that cannot run is refused all the same.
            self._outline = self._resolved(model)
            platform = self._outline.platform
            self._deepspeed, _ = join(platform, self.resources, timeout_s=timeout_s)
            if model is not None:
                self._fit(self._outline, model)
        atexit.register(self._abandon)

    def _leave_cpu_to_the_plan(self) -> None:
        """Let accelerate take DeepSpeed for ``accelerate launch --cpu``, which switches it off."""
        if os.environ.get("ACCELERATE_USE_CPU", "").lower() not in _TRUE:
            return
        if self._platform.accelerator != "cpu":
            raise EngineError(
                f"accelerate launch --cpu, on a machine where DeepSpeed takes "
                f"{self._platform.accelerator}",
                key="ACCELERATE_USE_CPU",
                value=os.environ["ACCELERATE_USE_CPU"],
                fix="leave --cpu out, or set DS_ACCELERATOR=cpu in the environment as well",
            )
        self.resources.enter_context(held("ACCELERATE_USE_CPU", "false"))
        # accelerate's launcher sets an address where several processes were asked for.
        if "MASTER_ADDR" in os.environ and not Launch.from_environment().launched:
            self.decide(
                Decision(
                    key="num_processes",
                    before="several",
                    after=1,
                    reason="accelerate launch --cpu starts one process, whatever --num_processes "
                    "says",
                    fix="start several with torchrun --nproc-per-node",
                    severity="warning",
                )
            )

    def _resolved(self, model: torch.nn.Module | None) -> ResolvedPlan:
        run = self._run
        return settled(
            self._wanted,
            model=model,
            resolver=self._resolver,
            run=run if run is None or isinstance(run, RunFacts) else RunFacts.from_arguments(run),
            platform=self._platform,
        )

    def settle(self, model: torch.nn.Module) -> None:
        """Fit the plan to the model that is trained. Collective; the first call only.

        What gets the model calls it: ``accelerator.prepare``, ``initialize_arguments``, ``shard``.

        Args:
            model: What is trained, in fp32; only its shapes and names are read.

        Raises:
            PlanError: The plan cannot run like this.
            OptimizerError: The optimizer cannot be had.
            OffloadError: A swap folder cannot be leased, or the plan needs more host memory than
                there is.
            EngineError: The script's flags have changed since its ``Accelerator`` was made.
        """
        if self._settled is not None:
            return
        resolved = self._resolved(model)
        for key in ("precision", "gradient_accumulation_steps"):
            before, after = getattr(self._outline, key), getattr(resolved, key)
            if before != after and self._plugin is not None:
                raise EngineError(
                    f"was {before} when the Accelerator was made",
                    key=key,
                    value=after,
                    fix="let the script change its flags before it makes the Accelerator",
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
        """The resolved plan, its NVMe paths inside the lease.

        Raises:
            EngineError: The model has not joined yet.
        """
        if self._settled is None:
            raise EngineError(
                "the plan does not know the model yet",
                key="EmbeddedPlan.plan",
                fix="prepare the model first, or give it: EmbeddedPlan(plan=..., model=...)",
            )
        return self._settled

    @property
    def config(self) -> dict[str, Any]:
        """A fresh copy of what DeepSpeed receives: ``DeepSpeedStrategy(config=run.config)``."""
        return self.plan.to_deepspeed()

    def shard(self, model: torch.nn.Module) -> None:
        """Partition the model from host memory, one parameter at a time; nothing below stage 3.

        Optional, before the trainer gets the model. Without it the trainer moves the whole model
        to the device before DeepSpeed partitions it. Needed where the weights wait in their files
        (``load_pretrained(..., plan=...)``): they are read here, at every stage.
        """
        self.settle(model)
        self.decide(*read_weights(self._deepspeed, self.plan, model))
        if self.plan.stage == 3:
            accelerator = self._deepspeed.accelerator.get_accelerator()
            device = torch.device(accelerator.current_device_name())
            shard_from_host(self._deepspeed, model, self.plan, device=device)

    def initialize_arguments(self, model: torch.nn.Module) -> dict[str, Any]:
        """For ``deepspeed.initialize(**run.initialize_arguments(model))``."""
        require_read(model)
        self.settle(model)
        return initialize_arguments(self.plan, model)

    def accelerator_arguments(self) -> dict[str, Any]:
        """For ``Accelerator(**run.accelerator_arguments())``: plugin, precision, accumulation."""
        outline = self._settled or self._outline
        self.decide(*loads_whole(outline))
        arguments = accelerator_arguments(outline)
        self._plugin = arguments["deepspeed_plugin"]
        return arguments

    def accelerate_optimizer(self, model: torch.nn.Module) -> tuple[Any, EngineSchedule]:
        """Optimizer and schedule for ``accelerator.prepare``, in place of the script's own."""
        self.settle(model)
        return accelerate_optimizer(self.plan, model), EngineSchedule(self)

    def accelerator(self, **arguments: Any) -> Any:
        """An ``accelerate.Accelerator`` for a script that stays as it is.

        Its ``prepare`` puts the plan's optimizer and schedule where the script has its own, as
        recorded decisions, and attaches. Its ``save_state`` and ``load_state`` write and read
        portable checkpoints, with each average that ``register_for_checkpointing`` was given;
        hooks of the script are not called. Its ``get_state_dict`` gives the whole model on rank
        0, at every stage. They are collective, and ``end_training`` closes.

        Args:
            arguments: Those of the script's own ``Accelerator``; where the plan settles one, the
                plan's value is taken, as a recorded decision.

        Raises:
            MissingDependencyError: accelerate is not installed.
        """
        return embedded_accelerator(self, arguments)

    def schedule(self) -> EngineSchedule:
        """What stands where a script keeps its ``lr_scheduler``."""
        return EngineSchedule(self)

    def decide(self, *decisions: Decision) -> None:
        """Record what was chosen for the script, and say it once."""
        self._decided.extend(decisions)
        announce(decisions)

    def register(self, *averages: Any) -> None:
        """Let averages follow the engine, and save and load them with it. Collective.

        Args:
            averages: ``zerotune.ema.EMAModel``, also one made of the model's parameters before
                there was an engine, or an attached ``EMAShadow``.

        Raises:
            EngineError: It is neither, or no engine is attached yet.
            EMAError: An average of parameters has taken steps, or is of another model.
        """
        for each in averages:
            if not isinstance(each, EMAModel | EMAShadow):
                raise EngineError(
                    "cannot be saved with the engine",
                    key="accelerator.register_for_checkpointing",
                    value=type(each).__name__,
                    fix="give a zerotune.ema.EMAModel in place of diffusers', or save it yourself",
                )
            if isinstance(each, EMAModel):
                each.follow(self.engine)
            number = len(self._shadows) + 1
            shadow = each.shadow if isinstance(each, EMAModel) else each
            self._shadows["ema" if number == 1 else f"ema{number}"] = shadow

    def save(self, directory: str | os.PathLike[str]) -> Path:
        """``save_checkpoint`` of the engine and what is registered. Collective."""
        return save_checkpoint(directory, engine=self.engine, shadows=self._shadows)

    def load(self, directory: str | os.PathLike[str]) -> None:
        """``load_checkpoint`` into the engine and what is registered. Collective.

        An average that the checkpoint does not have begins with the loaded weights.
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
        """Every tensor of the model whole, in its own dtype, on rank 0. Collective.

        As much host memory as the model takes; the exports hold one tensor at a time.

        Returns:
            CPU tensors by name; nothing on other ranks.
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

    def attach(self, engine: Any) -> AttachedEngine:
        """Verify what the trainer initialized. Collective.

        Args:
            engine: What ``deepspeed.initialize``, ``accelerator.prepare`` or Fabric's ``setup``
                returned for the model.

        Returns:
            The engine that EMA and checkpoints take; the loop may go on as it was.

        Raises:
            EngineError: No DeepSpeed engine, another one is attached, it trains another model
                than the plan's, or the trainer started other processes.
            VerificationError: What runs is not what the plan says.
        """
        if self._engine is not None:
            raise EngineError(
                "an engine is attached already; a plan is for one model",
                key="EmbeddedPlan.attach",
                fix="make an EmbeddedPlan for each model that has an engine of its own",
            )
        launched = Launch.from_environment()
        if launched.launched and launched.world_size != self.plan.world_size:
            raise EngineError(
                f"the trainer started {launched.world_size} processes by itself after the plan "
                f"was resolved for {self.plan.world_size}",
                key="world_size",
                value=launched.world_size,
                fix="start the script with torchrun",
            )
        self._check_model(deepspeed_engine_of(engine).module)
        self._engine = AttachedEngine(
            engine=engine,
            plan=self.plan,
            timeout_s=self._timeout_s,
            decided=tuple(self._decided),
        )
        self.resources.callback(self._engine.close)
        self._preparing.close()
        return self._engine

    def _check_model(self, module: torch.nn.Module) -> None:
        planned = {each.name: each for each in self._parameters}
        trained = {each.name: each for each in ModelFacts.from_module(module).parameters}
        differing = [
            name for name in {**planned, **trained} if planned.get(name) != trained.get(name)
        ]
        if not differing:
            return
        name = differing[0]
        raise EngineError(
            f"the trainer prepared another model than the plan's: {len(differing)} parameters "
            f"differ, as {name}, which is {_parameter_words(planned.get(name))} in the plan's and "
            f"{_parameter_words(trained.get(name))} in this one",
            key="EmbeddedPlan.attach",
            value=type(module).__name__,
            fix="make the EmbeddedPlan of a model like the one that is trained: the same "
            "configuration, adapters and frozen parts",
        )

    @property
    def engine(self) -> AttachedEngine:
        """What ``attach`` returned.

        Raises:
            EngineError: It has not been called.
        """
        if self._engine is None:
            raise EngineError(
                "no engine is attached yet",
                key="EmbeddedPlan.engine",
                fix="call run.attach(model) once the trainer has initialized DeepSpeed",
            )
        return self._engine

    def _release(self) -> None:
        atexit.unregister(self._abandon)

    def _abandon(self) -> None:
        # The script ended without close(), by an error perhaps: nobody may wait for other ranks.
        self.__exit__(SystemExit, SystemExit("the script ended without close()"), None)


def _parameter_words(parameter: ParameterFacts | None) -> str:
    if parameter is None:
        return "missing"
    return f"{'trained' if parameter.trainable else 'frozen'}, of shape {parameter.shape}"


class EngineSchedule:
    """Stands where a script keeps its ``lr_scheduler``; the engine steps the real one.

    Args:
        run: Whose engine it is.
    """

    def __init__(self, run: EmbeddedPlan) -> None:
        self._run = run

    def step(self, *_args: Any, **_kwargs: Any) -> None:
        """Nothing: DeepSpeed's ``step`` has moved the schedule on already."""

    def get_last_lr(self) -> list[float]:
        """Learning rate of the first group for the next optimizer step."""
        return [self._run.engine.lr]

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the position is in the engine's own state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing: the position is in the engine's own state."""
