"""The resolved plan as a value: nothing automatic, for one platform, world size and model."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

import attrs

from zerotune._util.table import Readable
from zerotune.decisions import Decision, Log, Severity
from zerotune.errors import InvalidValueError
from zerotune.plan.context import (
    Context,
    DeviceUpdate,
    EngineName,
    MastersName,
    RunFacts,
    Streaming,
)
from zerotune.plan.facts import ModelFacts
from zerotune.plan.optimizer.catalogue import ADAM, OPTIMIZERS
from zerotune.plan.optimizer.choices import OptimizerChoice, SchedulerChoice
from zerotune.plan.optimizer.choose import BY_CHOICE, Chosen, require_startable
from zerotune.plan.optimizer.pace import with_length
from zerotune.plan.section import evolved
from zerotune.plan.sections import OffloadSection
from zerotune.plan.settings import Settings
from zerotune.plan.values import AUTO, as_tuple
from zerotune.platform.facts import Platform

if TYPE_CHECKING:
    from typing_extensions import Self


@attrs.frozen(kw_only=True, repr=False)
class Resolved(Readable):
    """A fully resolved plan; ``ResolvedPlan`` adds the verbs."""

    estimated_as: ClassVar[type[Any] | None] = None
    """Class of the memory estimate, if not ``Estimate``."""

    requested: Settings
    """The plan as the user wrote it."""
    plan: Settings
    """The requested plan with every relevant key set explicitly; ``optimizer`` and ``scheduler``
    stay as written, since the attributes of the same names hold the choices."""
    platform: Platform
    """The machine the plan was resolved for."""
    world_size: int
    """Number of ranks."""
    model: ModelFacts | None
    """Facts of the model; its shapes determine the buffer sizes."""
    run: RunFacts
    """Values from the training script."""
    uses_deepspeed: bool
    """``True`` if DeepSpeed trains, ``False`` if the plain engine does."""
    precision: str
    """``"bf16"``, ``"fp16"`` or ``"fp32"``."""
    optimizer: OptimizerChoice
    """The optimizer that runs, with every argument explicit."""
    scheduler: SchedulerChoice | None
    """The learning-rate schedule; ``None`` for a constant learning rate."""
    decisions: tuple[Decision, ...] = attrs.field(default=(), converter=as_tuple)
    """All decisions, beginning with those made while the configuration was read."""
    streamed: bool | Streaming | None = None
    """Whether weights are streamed; ``None``: only if ``zerotune doctor --prove`` has verified
    streaming."""
    engine: EngineName | None = attrs.field(default=None)
    """Engine of an Adam in host memory: ``"host"`` or ``"deepspeed"``; ``None``: ``"host"`` if it
    can run the plan, on an accelerator only if ``zerotune doctor --prove`` has verified it."""
    update: DeviceUpdate | None = None
    """Options of the host engine's update on the device; ``None`` for an update on the host."""

    @engine.validator
    def _check_engine(self, _attribute: Any, value: Any) -> None:
        if value not in (None, "host", "deepspeed"):
            raise InvalidValueError(
                "is not an engine",
                'write "host" or "deepspeed"; deepspeed=False selects the plain engine',
                "engine",
                value,
            )

    @property
    def context(self) -> Context:
        """Context for rules and estimates."""
        return Context(
            world_size=self.world_size,
            platform=self.platform,
            model=self.model,
            run=self.run,
            uses_deepspeed=self.uses_deepspeed,
        )

    @property
    def streaming(self) -> Streaming | None:
        """Streaming options; ``None`` if weights are not streamed."""
        if isinstance(self.streamed, Streaming):
            return self.streamed
        streams = self.streamed or (not self.is_resident and self.is_hosted)
        return Streaming() if streams else None

    @property
    def masters(self) -> MastersName:
        """How the host engine stores master weights."""
        if self.update is not None and self.update.masters != "fp32":
            return self.update.masters
        splits = self.streaming is not None and self.streaming.split_masters
        return "split" if splits else "fp32"

    @property
    def is_resident(self) -> bool:
        """Whether weights stay on the device if the host engine runs this plan."""
        return self.why_streamed is None

    @property
    def why_streamed(self) -> str | None:
        """Why the host engine streams the weights of this plan; ``None`` if it does not."""
        # On a CPU, weights in host memory are on the device.
        on_cpu = self.platform.accelerator == "cpu"
        reasons = {
            "requested": bool(self.streamed),
            "at stage 3, no rank keeps all weights on its device": (
                self.stage == 3 and self.world_size > 1
            ),
            "offload_param keeps weights in host memory": (
                self.offload_param == "cpu" and not on_cpu
            ),
            "the weights do not fit on the device": not on_cpu and self._outgrows_device,
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    @property
    def _outgrows_device(self) -> bool:
        memory, element = self.platform.vram, 4 if self.precision == "fp32" else 2
        if self.model is None or memory is None or not self.uses_deepspeed:
            return False
        return self.model.weight_bytes(element) > memory

    @property
    def is_hosted(self) -> bool:
        """Whether the host engine will run this plan; see also ``waits_for_proof``."""
        asked = self.streamed or self.engine == "host" or not self.uses_deepspeed
        by_default = self.is_resident or self.platform.accelerator == "cpu"
        return bool(asked or by_default) and host_obstacle(self) is None

    @property
    def waits_for_proof(self) -> bool:
        """Whether DeepSpeed runs instead of the host engine until that is proven on the device."""
        asked = self.streamed or self.engine is not None or not self.uses_deepspeed
        return not asked and self.platform.accelerator != "cpu" and self.is_hosted

    @property
    def stage(self) -> int:
        """ZeRO stage; 0 for the plain engine."""
        stage = self.plan.stage
        return int(stage) if self.uses_deepspeed else 0

    @property
    def offload_optimizer(self) -> str:
        """Device of ``offload_optimizer``: ``"none"``, ``"cpu"`` or ``"nvme"``."""
        return self.plan.offload_optimizer_device

    @property
    def offload_param(self) -> str:
        """Device of ``offload_param``: ``"none"``, ``"cpu"`` or ``"nvme"``."""
        return self.plan.offload_param_device

    @property
    def micro_batch_size(self) -> int:
        """Samples per forward pass and rank."""
        return cast(int, self.plan.train_micro_batch_size_per_gpu)

    @property
    def gradient_accumulation_steps(self) -> int:
        """Forward passes per optimizer step."""
        return cast(int, self.plan.gradient_accumulation_steps)

    @property
    def train_batch_size(self) -> int:
        """Samples per optimizer step across all ranks."""
        return cast(int, self.plan.train_batch_size)

    @property
    def gradient_clipping(self) -> float:
        """Maximum global L2 norm of the gradient; 0.0 disables clipping."""
        return float(self.plan.gradient_clipping or 0)

    @property
    def nvme_paths(self) -> dict[str, str | None]:
        """Swap folders for parameters (``"param"``) and optimizer states (``"optimizer"``).

        There is no key for data that the plan does not swap. A value is ``None`` until its folder
        is set.
        """
        zero = self.plan.zero_optimization
        parts = {
            "param": zero.offload_param if zero else None,
            "optimizer": zero.offload_optimizer if zero else None,
        }
        return {
            part: None if section.nvme_path in (None, AUTO) else section.nvme_path
            for part, section in parts.items()
            if section is not None and section.device == "nvme"
        }

    def with_choice(self, chosen: Chosen) -> Self:
        """Return this plan with another choice of optimizer and schedule."""
        others = [each for each in self.decisions if each.rule != BY_CHOICE]
        return attrs.evolve(
            self,
            optimizer=chosen.optimizer,
            scheduler=chosen.scheduler,
            decisions=(*others, *chosen.decisions),
        )

    def for_run(self, run: RunFacts | None) -> Self:
        """Return this plan with what it left to the run, ready to start.

        Args:
            run: Values from the training script; its ``total_steps`` are the schedule's length.

        Raises:
            OptimizerError: The schedule's length is unknown, or Muon's parameters are.
            MissingDependencyError: The optimizer's package is not installed.
        """
        log = Log(decisions=[*self.decisions])
        scheduler = self.scheduler
        if run is not None and run.total_steps is not None and scheduler is not None:
            scheduler = with_length(scheduler, run.total_steps, log)
        require_startable(self.optimizer, scheduler)
        return attrs.evolve(self, scheduler=scheduler, decisions=log.decisions)

    def decided(self, decision: Decision, **changes: Any) -> Self:
        """Return this plan with changed attributes, and the decision that explains them."""
        return attrs.evolve(self, **changes, decisions=(*self.decisions, decision))

    def without_streaming(self, reason: str) -> Self:
        """Return this plan without streaming; a decision records ``reason``."""
        asked = self.streamed if self.streamed is None else True
        decision = Decision("streamed", asked, False, reason, "warning" if asked else "note")
        return self.decided(decision, streamed=False)

    def with_engine(self, engine: EngineName | None, reason: str) -> Self:
        """Return this plan with the engine set; a decision records ``reason``.

        Args:
            engine: The engine that will run; ``None`` for the plain engine.
            reason: Why.
        """
        refused = self.engine == "host" and engine != "host"
        severity: Severity = "warning" if refused else "note"
        before = self.engine if refused else None
        decision = Decision("engine", before, engine or "plain", reason, severity)
        chosen = self.decided(decision, engine=engine)
        if engine != "host" or self.streamed or chosen.why_streamed is None:
            return chosen
        return chosen.decided(Decision("streamed", None, True, chosen.why_streamed))

    def with_nvme_path(
        self,
        *,
        param: str | os.PathLike[str] | None = None,
        optimizer: str | os.PathLike[str] | None = None,
    ) -> Self:
        """Return this plan with the swap folders set.

        Args:
            param: Folder for parameters; ``None`` keeps the current one.
            optimizer: Folder for optimizer states; ``None`` keeps the current one.

        Raises:
            InvalidValueError: A folder is given for parameters or optimizer states that are not
                swapped.
        """
        given = {"param": param, "optimizer": optimizer}
        zero = self.plan.zero_optimization
        for part, folder in given.items():
            if folder is None:
                continue
            section: OffloadSection | None = getattr(zero, f"offload_{part}", None)
            if zero is None or section is None or section.device != "nvme":
                raise InvalidValueError(
                    f"is given, but offload_{part} does not use NVMe in the resolved plan",
                    f'set offload_{part}.device to "nvme" at stage 3, or omit the folder',
                    f"zero_optimization.offload_{part}.nvme_path",
                    os.fspath(folder),
                )
            moved = attrs.evolve(section, nvme_path=os.fspath(folder))
            zero = evolved(zero, **{f"offload_{part}": moved})
        return attrs.evolve(self, plan=attrs.evolve(self.plan, zero_optimization=zero))


LEAF_MODULE: Final = "leaf_module"
"""Key of ``zero_optimization`` for leaf modules. Its value is ``{"classes": […]}``; with an empty
list there are no leaf modules."""


_SEVERAL_RANKS: Final = frozenset(
    {
        "communication_data_type",
        "expert_parallel",
        "gradient_allreduce_op",
        "gradient_predivide_factor",
        "pipeline",
        "prescale_gradients",
        "sequence_parallel_size",
        "tensor_parallel",
    }
)
"""Keys for which the host engine on several ranks supports only the defaults."""


def host_obstacle(resolved: Resolved) -> str | None:
    """Return why the host engine cannot run a plan; ``None`` if nothing prevents it."""
    if not resolved.uses_deepspeed:
        return _plain_obstacle(resolved)
    written, fp16, zero = (
        resolved.plan.to_dict(),
        resolved.plan.fp16,
        resolved.plan.zero_optimization,
    )
    section = zero and zero.offload_optimizer
    ratio = section.ratio if section and isinstance(section.ratio, (int, float)) else 1.0
    accumulated = written.get("data_types", {}).get("grad_accum_dtype")
    several = _SEVERAL_RANKS & written.keys() if resolved.world_size > 1 else ()
    others = _left_to_deepspeed(resolved.plan) if resolved.is_resident else ()
    obstacles = {
        'the plan was resolved with engine="deepspeed"': resolved.engine == "deepspeed",
        f"only DeepSpeed supports {', '.join(several)}": bool(several),
        f"only DeepSpeed obeys {', '.join(others)}": bool(others),
        "the optimizer is not in host memory": resolved.offload_optimizer != "cpu",
        **({} if resolved.update else _optimizer_obstacles(resolved.optimizer)),
        "DeepSpeed manages weights on NVMe": resolved.offload_param == "nvme",
        "only a part of the optimizer is in host memory": ratio < 1,
        f"{resolved.why_streamed}, and streaming is off": (
            resolved.streamed is False and not resolved.is_resident
        ),
        "only DeepSpeed casts the model's inputs to fp16": (
            resolved.precision == "fp16" and fp16 is not None and fp16.auto_cast is True
        ),
        "the host engine accumulates gradients only in their own dtype": accumulated not in (
            None, resolved.precision,
        ),
    }  # fmt: skip
    return next((reason for reason, holds in obstacles.items() if holds), None)


def _optimizer_obstacles(choice: OptimizerChoice) -> dict[str, bool]:
    known = [name for name, entry in OPTIMIZERS.items() if entry.streams]
    # torch's classes of the same names are run by DeepSpeed.
    runs = choice.name in known and choice.implementation in {"DeepSpeedCPUAdam", *known} - ADAM
    betas = {tuple(group.params.get("betas", ())) for group in choice.groups}
    return {
        f"the host engine cannot run {choice.implementation}; it runs {', '.join(known)}": not runs,
        "only DeepSpeed keeps the moments in bf16": (
            choice.params.get("fp32_optimizer_states", True) is False
        ),
        "parameter groups with different betas must be updated in order": len(betas) > 1,
    }


NO_DEEPSPEED: Final = "the plan was resolved without DeepSpeed"
_OTHER_STEPS: Final = ("amsgrad", "maximize", "capturable", "differentiable", "foreach")
"""Options of torch's Adam with which the host engine's results would not be those of torch."""


def _plain_obstacle(resolved: Resolved) -> str | None:
    """Why the host engine cannot run a plan without DeepSpeed; ``None`` if nothing prevents it."""
    choice = resolved.optimizer
    obstacles = {
        NO_DEEPSPEED: bool(resolved.streamed),
        "the optimizer is not in host memory": resolved.offload_optimizer != "cpu",
    }
    known = choice.package is None and choice.implementation in STEPPED_PLAINLY
    chosen = [name for name in _OTHER_STEPS if choice.params.get(name)]
    obstacles[f"{PLAIN_NEEDS}, not {choice.implementation}"] = not known
    obstacles[f"the host engine does not support {', '.join(chosen)}"] = bool(chosen)
    return next((reason for reason, holds in obstacles.items() if holds), None)


STEPPED_PLAINLY: Final = frozenset({*ADAM, "AdamWBF16States"})
PLAIN_NEEDS: Final = "without DeepSpeed, the host engine runs Adam, AdamW and AdamWBF16States"


def _left_to_deepspeed(plan: Settings) -> list[str]:
    """Keys that are set and that the host engine does not read."""
    zero = plan.zero_optimization
    found = [key for key in plan.extra if key not in _SEVERAL_RANKS and key != "data_types"]
    found += [
        f"zero_optimization.{key}" for key in (zero.extra if zero else ()) if key != LEAF_MODULE
    ]
    if plan.wall_clock_breakdown:
        found.append("wall_clock_breakdown")
    return [key for key in found if not key.startswith("_")]
