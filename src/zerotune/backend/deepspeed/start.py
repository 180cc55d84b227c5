"""Start training under DeepSpeed: checks, process group, configuration and initialization.

Both zerotune's own engines and plans that run inside another trainer use this module.
"""

from __future__ import annotations

import importlib
import math
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any, Final

import torch

from zerotune._util.proc import held
from zerotune.backend.accelerator import accelerator_of
from zerotune.backend.checks import DTYPES, check_alike, check_model_dtype
from zerotune.backend.deepspeed.mends import lending_linear
from zerotune.backend.deepspeed.partitioned import PartitionedWrapper
from zerotune.backend.deepspeed.replicated import Fp32Wrapper, HalfWrapper
from zerotune.backend.deepspeed.sharded import ShardedWrapper, shard_from_host
from zerotune.backend.deepspeed.wrapper import OptimizerWrapper, Upstream
from zerotune.backend.distributed import ProcessGroup
from zerotune.backend.engine import check_not_gone
from zerotune.backend.launch import Launch
from zerotune.backend.master_weights import (
    Named,
    full_shape,
    require_trainable,
    trainable_parameters,
)
from zerotune.backend.op_builds import building, folder_decisions
from zerotune.backend.optimizers.client import (
    build_client_optimizer,
    chosen_optimizer,
    own_scheduler,
    parameter_groups,
)
from zerotune.backend.process_groups import deepspeed_groups
from zerotune.backend.stored import bring_weights, check_has_weights, stored_weight, waiting
from zerotune.backend.upstream import quiet_deepspeed, require_deepspeed
from zerotune.decisions import Decision
from zerotune.errors import EngineError, PlatformError, UnsupportedEngineError
from zerotune.plan.plan import ResolvedPlan
from zerotune.plan.resolve.sizes import SETTING, THRESHOLD
from zerotune.plan.sections import pins
from zerotune.platform import Platform
from zerotune.platform.facts import CUDA_ALLOCATORS

# -- The installed DeepSpeed: supported classes, and checks of its interface.


_WRAPPERS: Final[dict[str, type[OptimizerWrapper]]] = {
    "DeepSpeedZeroOptimizer": PartitionedWrapper,
    "DeepSpeedZeroOptimizer_Stage3": ShardedWrapper,
    "FP16_Optimizer": HalfWrapper,
    "FP16_UnfusedOptimizer": HalfWrapper,
}
"""By the exact name of DeepSpeed's class, since a subclass may store its weights elsewhere."""
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
    """Return zerotune's adapter for the optimizer of a ``deepspeed.DeepSpeedEngine``.

    Args:
        engine: DeepSpeed's engine.
    """
    name = type(engine.optimizer).__name__
    if name in _WRAPPERS:
        return _WRAPPERS[name](engine)
    if isinstance(engine.optimizer, torch.optim.Optimizer):
        return Fp32Wrapper(engine)
    raise UnsupportedEngineError(
        f"zerotune cannot access the master weights of DeepSpeed's {name}",
        "at stage 1 in bf16, remove data_types.grad_accum_dtype; otherwise use a different "
        "ZeRO stage",
        "engine.optimizer",
        name,
    )


def check_upstream(deepspeed: ModuleType) -> None:
    """Raise an error if DeepSpeed lacks a method or attribute that zerotune uses.

    Args:
        deepspeed: The module.
    """
    missing = [name for upstream in UPSTREAM for name in upstream.missing]
    if missing:
        raise UnsupportedEngineError(
            f"DeepSpeed {deepspeed.__version__} no longer has {', '.join(missing)}",
            "install the newest DeepSpeed that zerotune's documentation lists as tested",
            "deepspeed",
            deepspeed.__version__,
        )


# -- The start.


def check_plan(plan: ResolvedPlan) -> None:
    """Raise an error if a plan is incomplete or is not for DeepSpeed.

    Args:
        plan: The resolved plan.
    """
    if not plan.uses_deepspeed:
        raise EngineError(
            "this plan was resolved without DeepSpeed",
            "use PlainEngine, or build_engine, which selects the engine class",
            "plan",
            plan.platform.deepspeed.reason,
        )
    chosen_optimizer(plan)


def check_shapes(plan: ResolvedPlan, model: torch.nn.Module) -> None:
    """Raise an error for parameters that DeepSpeed cannot handle.

    A parameter must not be 0-dimensional, the elements of its last dimension must be contiguous,
    and at stage 3 it must not be empty.

    Args:
        plan: The resolved plan.
        model: The model.
    """
    for name, parameter in model.named_parameters():
        value = full_shape(parameter)
        # DeepSpeed broadcasts parameters as bytes, and torch cannot view every tensor as bytes.
        if not value:
            what = "broadcast a parameter without dimensions"
            fix = "use a parameter with one element (torch.nn.Parameter(torch.tensor([x]))), or "
            fix += "train with the plain engine"
        # At stage 0 in fp32, FusedAdam pairs weights and gradients of different memory orders.
        # Weights that are still in files will be contiguous.
        elif stored_weight(parameter) is None and (
            parameter.stride(-1) != 1 or (plan.stage == 0 and not parameter.is_contiguous())
        ):
            value, what = parameter.stride(), "train a parameter with a strided layout"
            fix = "before building the engine, call "
            fix += (
                "model.to(memory_format=torch.contiguous_format) if the weight is channels_last, "
            )
            fix += "or write parameter.data = parameter.data.contiguous() if it is transposed; or "
            fix += "train with the plain engine"
        # Stages 0 to 2 leave an empty parameter as it is; at stage 3, gathering it fails, even if
        # it is frozen.
        elif plan.stage == 3 and math.prod(value) == 0:
            what = "partition a parameter without elements"
            fix = "remove the parameter, register it as a buffer, or train at stage 2"
        else:
            continue
        raise EngineError(f"DeepSpeed cannot {what}", fix, f"model.{name}", value)


def check_world(plan: ResolvedPlan, group: ProcessGroup) -> None:
    """Raise an error if the number of processes differs from the plan's.

    Args:
        plan: The resolved plan.
        group: Process group of all ranks.
    """
    if plan.world_size != group.world_size:
        raise EngineError(
            f"the plan was resolved for {plan.world_size} process(es), but {group.world_size} are "
            "running",
            f"resolve the plan with world_size={group.world_size}",
            "world_size",
            plan.world_size,
        )


def join(
    platform: Platform, resources: ExitStack, *, timeout_s: float
) -> tuple[ModuleType, ProcessGroup]:
    """Import DeepSpeed, select this rank's device, and join the process group.

    Args:
        platform: The plan's machine.
        resources: Exit stack for everything that must be closed when training ends.
        timeout_s: Seconds after which a collective raises an error.
    """
    accelerator = platform.deepspeed.accelerator or platform.accelerator
    deepspeed = require_deepspeed(accelerator=accelerator)
    check_upstream(deepspeed)
    quiet_deepspeed()
    launch = Launch.from_environment()
    # DeepSpeed reads LOCAL_RANK in many places, even without a launcher. Without this variable,
    # accelerate skips DeepSpeed's communication; without a group, DeepSpeed looks for MPI.
    resources.enter_context(held("LOCAL_RANK", str(launch.local_rank)))
    # DeepSpeed's engine also selects the device, but only after weights are flattened and memory
    # is page-locked, which every rank would then do on the first device.
    selected = deepspeed.accelerator.get_accelerator()
    selected.set_device(launch.local_rank)
    running = accelerator_of(torch.device(selected.current_device_name()))
    group = ProcessGroup(backend=running.communication_backend, launch=launch, timeout_s=timeout_s)
    resources.callback(group.close)
    return deepspeed, group


def join_checked(
    plan: ResolvedPlan, model: torch.nn.Module, resources: ExitStack, *, timeout_s: float
) -> tuple[ModuleType, ProcessGroup, Named]:
    """Call ``join``, and then check the plan and the model. Collective.

    Args:
        plan: The resolved plan.
        model: The model.
        resources: Exit stack for everything that must be closed when training ends.
        timeout_s: Seconds after which a collective raises an error.

    Returns:
        DeepSpeed, the process group, and all trainable parameters with their names.
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


def place_of_weights(deepspeed: ModuleType, plan: ResolvedPlan) -> str | None:
    """Return DeepSpeed's device; ``None`` at stage 3, which reads weights as it partitions them.

    Args:
        deepspeed: The module.
        plan: The resolved plan.
    """
    if plan.stage == 3:
        return None
    return str(deepspeed.accelerator.get_accelerator().current_device_name())


def read_weights(
    plan: ResolvedPlan, model: torch.nn.Module, *, device: str | None
) -> tuple[Decision, ...]:
    """Load weights that are still in files.

    The weights are read in the plan's precision; bf16 and fp16 need half the memory of fp32.
    Training results do not change, because engines round weights to the plan's precision in any
    case.

    Args:
        plan: The resolved plan.
        model: The model.
        device: Device for the weights; ``None`` if they are read later.
    """
    count = len(waiting(model))
    if not count:
        return ()
    how = "each rank reads only its part of every tensor"
    if device is not None:
        how = f"one tensor at a time, to {torch.device(device).type}"
        bring_weights(model, dtype=DTYPES[plan.precision], device=device)
    return (
        Decision(
            "model.weights",
            "in their files",
            f"{count} tensors read in {plan.precision}; {how}",
            f"the engine converts weights to {plan.precision} in any case",
        ),
    )


def initialize_arguments(plan: ResolvedPlan, model: torch.nn.Module) -> dict[str, Any]:
    """Return the keyword arguments of ``deepspeed.initialize``.

    Args:
        plan: The resolved plan.
        model: The model.
    """
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
    """Inside the block, let DeepSpeed compile the plan's ops, and ignore stale build locks.

    Raises:
        PlatformError: An op is unavailable.
    """
    communication: Any = importlib.import_module("deepspeed.comm.torch")
    build = communication.build_shm_op
    if plan.world_size == 1:
        # One process exchanges nothing through shared memory, and the op takes minutes to compile.
        communication.build_shm_op = lambda: None
    try:
        with building():
            yield
    except Exception as error:
        # DeepSpeed's optimizers hide a PlatformError behind "failed to build/load".
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, PlatformError):
            cause = cause.__cause__ or cause.__context__
        if cause is None or cause is error:
            raise
        raise cause from error
    finally:
        communication.build_shm_op = build


def initialize(
    deepspeed: ModuleType, plan: ResolvedPlan, arguments: dict[str, Any], resources: ExitStack
) -> tuple[Any, tuple[Decision, ...]]:
    """Initialize DeepSpeed's engine without using more memory than training under the plan.

    Args:
        deepspeed: The module.
        plan: The resolved plan.
        arguments: Result of ``initialize_arguments``.
        resources: Exit stack for the cleanup that DeepSpeed's engine does not do itself.

    Returns:
        DeepSpeed's engine, and decisions about where ops are compiled.
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
        ):
            if plan.stage == 3:
                shard_from_host(deepspeed, arguments["model"], plan, device=device)
            engine, *_ = deepspeed.initialize(**arguments)
    except PlatformError:
        raise  # An op is unavailable; the error names the fix.
    except (AssertionError, ValueError, RuntimeError, TypeError, AttributeError) as error:
        raise EngineError(
            f"DeepSpeed {deepspeed.__version__} rejected the plan "
            f"({type(error).__name__}: {str(error).strip() or 'no message'})",
            "change the setting that the message names; if an op could not be built, run "
            "`zerotune doctor`",
            "deepspeed.initialize",
        ) from error
    return engine, folder_decisions()


# -- Page-locked host memory without rounding up.


PINNING_KEY: Final = f"torch.{SETTING}"
_BACKEND: Final = "DS_PIN_MEMORY_BACKEND"
_VARIABLES: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_lock = threading.Lock()


def pin_exactly(
    plan: ResolvedPlan, *, environ: Mapping[str, str] | None = None
) -> tuple[Decision, ...]:
    """Prevent torch from rounding page-locked blocks up to powers of two.

    zerotune changes torch's allocator setting for this process; a warning says so if torch lacks
    the setting. A user's ``PYTORCH_ALLOC_CONF`` takes precedence.
    ``DS_PIN_MEMORY_BACKEND=native``, which does not round sizes, takes precedence as well.

    Args:
        plan: The plan that is about to start.
        environ: Environment variables; default: those of this process.
    """
    zero = plan.plan.zero_optimization
    sections = (zero.offload_optimizer, zero.offload_param) if zero is not None else ()
    rounds = plan.platform.accelerator in CUDA_ALLOCATORS
    if not rounds or not any(map(pins, sections)):
        return ()
    environ = os.environ if environ is None else environ
    if environ.get(_BACKEND, "").strip().lower() == "native":
        return (_pinned(None, f"{_BACKEND}=native page-locks blocks of the exact size"),)
    for variable in _VARIABLES:
        written = _setting_in(environ.get(variable, ""))
        if written is not None:
            return (_pinned(written, f"set in {variable}"),)
    why = _set_exact()
    if why is None:
        reason = "by default torch rounds page-locked blocks up to powers of two, which wastes "
        reason += "memory; blocks above this size are no longer rounded"
        return (_pinned(THRESHOLD, reason),)
    return (
        Decision(
            PINNING_KEY,
            None,
            None,
            f"{why}, so page-locked blocks use up to twice their size; set "
            f"{_BACKEND}=native to page-lock blocks of the exact size",
            "warning",
        ),
    )


def _setting_in(settings: str) -> str | None:
    pairs = (pair.partition(":") for pair in settings.split(","))
    return next((value.strip() for name, _, value in pairs if name.strip() == SETTING), None)


def _set_exact() -> str | None:
    """Change torch's setting; return why that is impossible, or ``None`` if it is done."""
    private: Any = torch._C
    read = getattr(private, "_accelerator_getAllocatorSettings", None)
    write = getattr(private, "_accelerator_setAllocatorSettings", None)
    if read is None or write is None:
        return "this torch version has no setting for the size of page-locked blocks"
    with _lock:
        current = read() or ""
        if _setting_in(current) is None:
            try:
                # Setting only one key would reset the others to their defaults.
                write(",".join(filter(None, (current, f"{SETTING}:{THRESHOLD}"))))
            except (RuntimeError, ValueError) as error:
                return f"torch refused the setting for exact sizes: {str(error).splitlines()[0]}"
    return None


def _pinned(value: Any, reason: str) -> Decision:
    return Decision(PINNING_KEY, None, value, reason)
