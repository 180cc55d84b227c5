"""Start training under DeepSpeed: its preconditions, its process group and its configuration.

Shared by the engine that initializes DeepSpeed itself and by the plan inside another trainer.
"""

from __future__ import annotations

import importlib
import math
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any, Final

import torch

from zerotune._util.proc import held
from zerotune._util.text import format_size
from zerotune.backend.checks import DTYPES, check_alike, check_model_dtype
from zerotune.backend.deepspeed.partitioned import PartitionedWrapper, flat_through_host
from zerotune.backend.deepspeed.replicated import Fp32Wrapper, HalfWrapper
from zerotune.backend.deepspeed.sharded import ShardedWrapper, lending_linear, shard_from_host
from zerotune.backend.deepspeed.wrapper import OptimizerWrapper, Upstream
from zerotune.backend.distributed import (
    Launch,
    ProcessGroup,
    communication_backend,
    deepspeed_groups,
)
from zerotune.backend.engine import check_not_gone
from zerotune.backend.master_weights import (
    Named,
    full_shape,
    require_trainable,
    trainable_parameters,
)
from zerotune.backend.ops import building
from zerotune.backend.optimizers.client import (
    build_client_optimizer,
    chosen_optimizer,
    own_scheduler,
    parameter_groups,
)
from zerotune.backend.proof import why_unproven
from zerotune.backend.stored import bring_weights, check_has_weights, waiting
from zerotune.backend.upstream import quiet_deepspeed, require_deepspeed
from zerotune.decisions import Decision
from zerotune.errors import EngineError, PlatformError, UnsupportedEngineError
from zerotune.plan.model import ResolvedPlan, pins
from zerotune.plan.resolve import ROUNDING, SETTING, THRESHOLD, pins_natively
from zerotune.platform import Platform
from zerotune.platform.detect import MachineProbe, first_line, host_memory

# -- The installed DeepSpeed: its classes, and whether they are as they were.


_WRAPPERS: Final[dict[str, type[OptimizerWrapper]]] = {
    "DeepSpeedZeroOptimizer": PartitionedWrapper,
    "DeepSpeedZeroOptimizer_Stage3": ShardedWrapper,
    "FP16_Optimizer": HalfWrapper,
    "FP16_UnfusedOptimizer": HalfWrapper,
}
"""By the name of DeepSpeed's class: a subclass may keep its weights elsewhere."""
UPSTREAM: Final = (
    Upstream(
        owner="deepspeed.runtime.engine.DeepSpeedEngine",
        relied_on=(
            "bfloat16_enabled",
            "destroy",
            "fp16_enabled",
            "get_global_grad_norm",
            "gradient_accumulation_steps",
            "gradient_clipping",
            "is_gradient_accumulation_boundary",
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "was_step_applied",
            "zero_optimization_stage",
        ),
    ),
    *(each for kind in (PartitionedWrapper, ShardedWrapper, HalfWrapper) for each in kind.upstream),
)


def wrapper_of(engine: Any) -> OptimizerWrapper:
    """What is known of the optimizer of a ``deepspeed.DeepSpeedEngine``."""
    name = type(engine.optimizer).__name__
    if name in _WRAPPERS:
        return _WRAPPERS[name](engine)
    if isinstance(engine.optimizer, torch.optim.Optimizer):
        return Fp32Wrapper(engine)
    raise UnsupportedEngineError(
        f"master weights inside DeepSpeed's {name} cannot be reached",
        key="engine.optimizer",
        value=name,
        fix="with bf16 at stage 1, leave data_types.grad_accum_dtype unset",
    )


def check_upstream(deepspeed: ModuleType) -> None:
    """Refuse a DeepSpeed that lacks something that zerotune relies on."""
    missing = [name for upstream in UPSTREAM for name in upstream.missing]
    if missing:
        raise UnsupportedEngineError(
            f"DeepSpeed {deepspeed.__version__} no longer has {', '.join(missing)}",
            key="deepspeed",
            value=deepspeed.__version__,
            fix="install the newest DeepSpeed that zerotune's documentation lists as tested",
        )


def digests() -> dict[str, str | None]:
    """Of the replaced methods of the installed DeepSpeed, by dotted name."""
    return {name: each for upstream in UPSTREAM for name, each in upstream.digests.items()}


# -- The start.


def check_plan(plan: ResolvedPlan) -> None:
    """Refuse a plan that is not for DeepSpeed, not complete, or without fp32 master weights."""
    if not plan.uses_deepspeed:
        raise EngineError(
            "this plan was resolved without DeepSpeed",
            key="plan",
            value=plan.platform.deepspeed.reason,
            fix="use PlainEngine, or build_engine, which picks the right one",
        )
    chosen_optimizer(plan)
    for precision, section in (("bf16", plan.plan.bf16), ("fp16", plan.plan.fp16)):
        key = f"{precision}_master_weights_and_grads"
        if section is not None and section.enabled is True and getattr(section, key) is True:
            # DeepSpeed runs it; but every update below a weight's last bit is lost, without
            # stochastic rounding, and in an EMA and a resumed run as well.
            raise EngineError(
                "EMA, checkpoints and exports are made of fp32 master weights",
                key=f"{precision}.{key}",
                value=True,
                fix="remove it, and bf16_optimizer_states with it; where host memory is short, "
                "use the optimizer AdamWBF16States, whose moments alone are bf16, or put the "
                'optimizer on NVMe (offload="nvme")',
            )


def check_shapes(plan: ResolvedPlan, model: torch.nn.Module) -> None:
    """Refuse a parameter that DeepSpeed cannot hold: no dimensions, no elements, or strided."""
    for name, parameter in model.named_parameters():
        value = full_shape(parameter)
        # DeepSpeed broadcasts parameters as bytes, and torch cannot view all tensors so.
        if not value:
            what = "broadcast a parameter without dimensions"
            fix = "give it one element, torch.nn.Parameter(torch.tensor([x])), or train with the "
            fix += "plain engine"
        elif plan.stage != 3 and parameter.stride(-1) != 1:
            value, what = parameter.stride(), "broadcast a parameter with a strided layout"
            fix = "call model.to(memory_format=torch.contiguous_format) before building the "
            fix += "engine, or train with the plain engine"
        # Stages 0 to 2 leave it as it is; gathering it fails, also where it is frozen.
        elif plan.stage == 3 and math.prod(value) == 0:
            what = "partition a parameter without elements"
            fix = "remove it, register it as a buffer, or train at stage 2"
        else:
            continue
        raise EngineError(f"DeepSpeed cannot {what}", key=f"model.{name}", value=value, fix=fix)


def check_world(plan: ResolvedPlan, group: ProcessGroup) -> None:
    """Refuse another number of processes than the plan was resolved for."""
    if plan.world_size != group.world_size:
        raise EngineError(
            f"the plan was resolved for {plan.world_size} process(es), {group.world_size} run",
            key="world_size",
            value=plan.world_size,
            fix=f"plan.resolve(world_size={group.world_size})",
        )


def join(
    platform: Platform, resources: ExitStack, *, timeout_s: float
) -> tuple[ModuleType, ProcessGroup]:
    """Import DeepSpeed for the platform's accelerator, take this rank's device, meet the others.

    Args:
        platform: The machine, as the plan sees it.
        resources: Receives what has to end with the training.
        timeout_s: Seconds after which a collective gives up.
    """
    accelerator = platform.deepspeed.accelerator or platform.accelerator
    deepspeed = require_deepspeed(accelerator=accelerator)
    check_upstream(deepspeed)
    quiet_deepspeed()
    launch = Launch.from_environment()
    # DeepSpeed reads LOCAL_RANK in many places, also where no launcher has set it; without it
    # accelerate leaves DeepSpeed's communication out, and without a group DeepSpeed looks for MPI.
    resources.enter_context(held("LOCAL_RANK", str(launch.local_rank)))
    # DeepSpeed's engine does the same, but weights are flattened and memory is page-locked before
    # that, and every rank would do so on the first device.
    deepspeed.accelerator.get_accelerator().set_device(launch.local_rank)
    group = ProcessGroup(
        backend=communication_backend(accelerator), launch=launch, timeout_s=timeout_s
    )
    resources.callback(group.close)
    return deepspeed, group


def join_checked(
    plan: ResolvedPlan, model: torch.nn.Module, resources: ExitStack, *, timeout_s: float
) -> tuple[ModuleType, ProcessGroup, Named]:
    """``join``, and check plan and model before anything is made of them. Collective.

    Returns:
        DeepSpeed, the group, and the trainable parameters by name.
    """
    check_plan(plan)
    check_not_gone(model)
    check_has_weights(model)
    deepspeed, group = join(plan.platform, resources, timeout_s=timeout_s)
    check_world(plan, group)
    check_alike(plan, model, group)
    named = require_trainable(model)
    check_shapes(plan, model)
    check_model_dtype(model, plan)
    return deepspeed, group, named


def read_weights(
    deepspeed: ModuleType, plan: ResolvedPlan, model: torch.nn.Module
) -> tuple[Decision, ...]:
    """Read weights that wait in files to where they will stay; stage 3 does so as it partitions.

    DeepSpeed rounds weights to the plan's precision before it makes the fp32 master copy; reading
    them in it gives the same bits and takes half the memory.
    """
    count = len(waiting(model))
    if not count:
        return ()
    how = "each rank its own part of each"
    if plan.stage != 3:
        how = "one at a time, to the device"
        device = deepspeed.accelerator.get_accelerator().current_device_name()
        bring_weights(model, dtype=DTYPES[plan.precision], device=device)
    return (
        Decision(
            key="model.weights",
            before="in their files",
            after=f"{count} tensors read in {plan.precision}, {how}",
            reason=f"{plan.precision} is what DeepSpeed makes of them, whatever they are read in",
        ),
    )


def initialize_arguments(plan: ResolvedPlan, model: torch.nn.Module) -> dict[str, Any]:
    """Keyword arguments of ``deepspeed.initialize``."""
    choice, named = chosen_optimizer(plan), trainable_parameters(model)
    client = None if choice.source == "deepspeed" else build_client_optimizer(choice, named)
    return {
        "model": model,
        "model_parameters": parameter_groups(choice, named),
        "optimizer": client,
        "lr_scheduler": own_scheduler(plan),
        "config": plan.to_deepspeed(),
        "dist_init_required": False,
    }


@contextmanager
def compiling(plan: ResolvedPlan) -> Iterator[None]:
    """Inside the block DeepSpeed compiles what the plan needs, and waits for no dead build."""
    communication: Any = importlib.import_module("deepspeed.comm.torch")
    build = communication.build_shm_op
    with building():
        if plan.world_size > 1:
            yield
            return
        # One process exchanges nothing through shared memory, and the op takes minutes to compile.
        communication.build_shm_op = lambda: None
        try:
            yield
        finally:
            communication.build_shm_op = build


def initialize(
    deepspeed: ModuleType, plan: ResolvedPlan, arguments: dict[str, Any], resources: ExitStack
) -> tuple[Any, tuple[Decision, ...]]:
    """Let DeepSpeed build its engine, with the weights placed where the plan has room for them.

    Args:
        deepspeed: The module.
        plan: A resolved plan.
        arguments: As ``initialize_arguments`` made them.
        resources: Receives what DeepSpeed's engine itself leaves behind when it ends.
    """
    accelerator = deepspeed.accelerator.get_accelerator()
    device = torch.device(accelerator.current_device_name())
    deepspeed_groups.join()
    resources.callback(deepspeed_groups.leave)
    if plan.stage == 3:
        resources.enter_context(lending_linear())
    try:
        with (
            compiling(plan),
            deepspeed_groups.making(),
            flat_through_host(deepspeed, plan, device=device) as built,
        ):
            if plan.stage == 3:
                shard_from_host(deepspeed, arguments["model"], plan, device=device)
            engine, *_ = deepspeed.initialize(**arguments)
    except PlatformError:
        raise  # An op that cannot be had, with its cure.
    except (AssertionError, ValueError, RuntimeError, TypeError, AttributeError) as error:
        # An optimizer of DeepSpeed hides it behind "failed to build/load".
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, PlatformError):
            cause = cause.__cause__ or cause.__context__
        if cause is not None:
            raise cause from error
        raise EngineError(
            f"DeepSpeed {deepspeed.__version__} refused the plan "
            f"({type(error).__name__}: {str(error).strip() or 'no message'})",
            key="deepspeed.initialize",
            fix="run `zerotune doctor` when an op could not be built, else change what it names",
        ) from error
    return engine, tuple(built)


# -- Page-locked host memory, kept at the size that is needed.


PINNING_KEY: Final = f"torch.{SETTING}"
_BACKEND: Final = "DS_PIN_MEMORY_BACKEND"
_VARIABLES: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_PROBE: Final = 3 * 1024**2
"""Bytes; a power of two would be 4 MiB."""
_lock = threading.Lock()


def pin_exactly(
    plan: ResolvedPlan, *, resources: ExitStack, environ: Mapping[str, str] | None = None
) -> tuple[Decision, ...]:
    """Keep page-locked blocks from being rounded up to powers of two.

    torch is told so for this process; where it cannot be, DeepSpeed page-locks memory itself. What
    the user wrote into ``PYTORCH_ALLOC_CONF`` stands, and so does
    ``DS_PIN_MEMORY_BACKEND=native``, which does not round either.

    Args:
        plan: The plan about to start.
        resources: Receives what has to end with the engine.
        environ: Environment variables; this process's by default.
    """
    zero = plan.plan.zero_optimization
    sections = (zero.offload_optimizer, zero.offload_param) if zero is not None else ()
    rounds = plan.platform.accelerator in ROUNDING and plan.uses_deepspeed
    if not rounds or not any(map(pins, sections)):
        return ()
    environ = os.environ if environ is None else environ
    if environ.get(_BACKEND, "").strip().lower() == "native":
        return (_pinned(None, f"{_BACKEND}=native page-locks exact sizes itself"),)
    for variable in _VARIABLES:
        written = _setting_in(environ.get(variable, ""))
        if written is not None:
            return (_pinned(written, f"{variable} says so"),)
    why = _set_and_verify()
    if why is None:
        reason = "torch rounds page-locked blocks up to powers of two; from this size on no more"
        return (_pinned(THRESHOLD, reason),)
    return (_natively(plan, resources, why),)


def _setting_in(settings: str) -> str | None:
    pairs = (pair.partition(":") for pair in settings.split(","))
    return next((value.strip() for name, _, value in pairs if name.strip() == SETTING), None)


def _set_and_verify() -> str | None:
    """Change torch's setting; why it rounds all the same, if it does."""
    private: Any = torch._C
    read = getattr(private, "_accelerator_getAllocatorSettings", None)
    write = getattr(private, "_accelerator_setAllocatorSettings", None)
    if read is None or write is None:
        return "this torch has no such setting"
    with _lock:
        current = read() or ""
        if _setting_in(current) is None:
            try:
                # Setting one key alone would put the others back to their defaults.
                write(",".join(filter(None, (current, f"{SETTING}:{THRESHOLD}"))))
            except (RuntimeError, ValueError) as error:
                return f"torch refused the setting: {str(error).splitlines()[0]}"
    taken = _pinned_bytes_of(_PROBE)
    if taken is not None and taken >= 4 * 1024**2:
        return "torch took the setting and rounds all the same"
    return None


def _natively(plan: ResolvedPlan, resources: ExitStack, why: str) -> Decision:
    """Have DeepSpeed page-lock its buffers itself while the engine lives, where it can."""
    obstacle = _native_obstacle(plan)
    if obstacle is not None:
        return Decision(
            key=PINNING_KEY,
            before=None,
            after=None,
            reason=f"{why}, {obstacle}, so page-locked blocks take up to twice their size; "
            f"{_BACKEND}=native page-locks exact sizes",
            severity="warning",
        )
    resources.enter_context(held(_BACKEND, "native"))
    _refuse_in_time(resources)
    return _pinned(
        "native",
        f"{why}, so DeepSpeed page-locks its buffers to the byte itself, {_BACKEND}=native",
    )


def _native_obstacle(plan: ResolvedPlan) -> str | None:
    if not pins_natively(plan.platform):
        return "DeepSpeed itself needs no limit on locked memory (ulimit -l)"
    unproven = why_unproven("native page-locking", accelerator=plan.platform.accelerator)
    if unproven is not None:
        return f"DeepSpeed's own page-locking is not proven here ({unproven})"
    try:
        with building():
            importlib.import_module("deepspeed.utils.pin_memory").get_native_pinned_memory()
    except (ImportError, AttributeError, RuntimeError, OSError) as error:
        cause = error.__cause__ or error
        return f"DeepSpeed's op pin_memory cannot be built ({first_line(cause)})"
    return None


def _refuse_in_time(resources: ExitStack) -> None:
    """Raise where too little memory is left: there DeepSpeed's op ends the process (assertion)."""
    manager = importlib.import_module("deepspeed.utils.pin_memory").get_native_pinned_memory()
    lock = getattr(manager, "_new_locked", None)
    if lock is None:
        return

    def locked(example: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        wanted = math.prod(map(int, shape)) * example.element_size()
        # What others would be swapped out for may be taken too.
        free = host_memory(MachineProbe(), with_swap=True).available
        if wanted > free:
            raise MemoryError(
                f"not enough memory: {format_size(wanted)} are to be page-locked, "
                f"{format_size(free)} are free"
            )
        taken: torch.Tensor = lock(example, shape)
        return taken

    manager._new_locked = locked
    resources.callback(vars(manager).pop, "_new_locked", None)


def _pinned_bytes_of(nbytes: int) -> int | None:
    """What page-locking ``nbytes`` takes; ``None`` where torch does not tell."""
    statistics = getattr(torch.cuda, "host_memory_stats", None)
    if statistics is None or not torch.cuda.is_available():
        return None
    # A block of that size may be in the cache, which would look as if none were taken.
    before = int(statistics().get("allocated_bytes.allocated", 0))
    block = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    taken = int(statistics().get("allocated_bytes.allocated", 0)) - before
    del block
    return taken


def _pinned(value: Any, reason: str) -> Decision:
    return Decision(key=PINNING_KEY, before=None, after=value, reason=reason)
