"""Where weights lie while DeepSpeed starts: no more on the device than will stay there.

Left to itself DeepSpeed needs far more memory to start than to train. Stages 1 and 2 flatten each
group's weights on the device, beside the weights themselves, and clone this rank's part there
before they move the clone to the host (``DeepSpeedZeroOptimizer.__init__`` of 0.19.8): twice the
weights each time, so that a card that trains a model cannot start it. ``flat_through_host`` makes
both copies in host memory, weight by weight; the values are the same, bit for bit. Stage 3 moves a
model to the device as a whole before it partitions it; ``shard_from_host`` does so through
``zero.Init``, and no more than one whole parameter is ever on the device. ``pin_exactly`` keeps
page-locked host memory at the size that is needed.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from zerotune._util.environment import held
from zerotune._util.text import format_size
from zerotune.backend.dtypes import DTYPES
from zerotune.backend.ops import building
from zerotune.backend.proof import why_unproven
from zerotune.backend.stored import make_room, stored_weight, waiting
from zerotune.decisions import Decision
from zerotune.plan.fill import ROUNDING, SETTING, THRESHOLD, pins_natively
from zerotune.plan.model import ResolvedPlan, pins
from zerotune.platform.detect import MachineProbe, first_line, host_memory

KEY: Final = "initialization.flat weights"
_KNOWN: Final = (
    ("self", "tensor_list", "alignment", "use_cpu_data", "param_padding"),
    ("self", "tensor_list", "alignment", "use_cpu_data"),
)
"""Arguments of ``flatten_dense_tensors_aligned`` in the releases that were read."""

PINNING_KEY: Final = f"torch.{SETTING}"
_BACKEND: Final = "DS_PIN_MEMORY_BACKEND"
_VARIABLES: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_PROBE: Final = 3 * 1024**2
"""Bytes; a power of two would be 4 MiB."""
_lock = threading.Lock()


# -- Stages 1 and 2.


@contextmanager
def flat_through_host(
    deepspeed: Any, plan: ResolvedPlan, *, device: torch.device
) -> Iterator[list[Decision]]:
    """Inside the block, the optimizer of stages 1 and 2 is built without copies on the device.

    Acts only where the optimizer is offloaded: elsewhere its own states are larger than the copy.

    Args:
        deepspeed: The module.
        plan: The plan that is about to start.
        device: Where the weights belong.

    Yields:
        A list that holds what was decided once the block has ended.
    """
    decisions: list[Decision] = []
    if plan.stage not in (1, 2) or plan.offload_optimizer == "none":
        yield decisions
        return
    owner = deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer
    original = owner.flatten_dense_tensors_aligned
    if tuple(inspect.signature(original).parameters) not in _KNOWN:
        decisions.append(_held_on("device", "this DeepSpeed flattens weights in an unknown way"))
        yield decisions
        return
    clones = _ClonesOnHost()

    def flatten(
        _optimizer: Any,
        tensor_list: Sequence[torch.nn.Parameter],
        alignment: int,
        use_cpu_data: bool = False,
        param_padding: Sequence[int] | None = None,
    ) -> torch.Tensor:
        flat = flatten_on_host(
            tensor_list, alignment=alignment, padding=param_padding, moved=use_cpu_data
        )
        # What the weights took lies in the allocator's cache, in pieces that cannot hold one large
        # block: without this the device would hold the weights twice all the same.
        deepspeed.accelerator.get_accelerator().empty_cache()
        flat = flat.to(device)
        clones.watch(flat)
        return flat

    owner.flatten_dense_tensors_aligned = flatten
    try:
        with clones:
            yield decisions
    finally:
        owner.flatten_dense_tensors_aligned = original
    decisions.append(clones.decision())


def flatten_on_host(
    parameters: Sequence[torch.nn.Parameter],
    *,
    alignment: int,
    padding: Sequence[int] | None = None,
    moved: bool = False,
) -> torch.Tensor:
    """One flat host tensor of all parameters, each freed as soon as it is copied.

    Args:
        parameters: At least one; left empty, to become views of the flat tensor.
        alignment: The length becomes a multiple of it, filled up with zeros.
        padding: Zeros after each parameter.
        moved: Whether DeepSpeed has put the weights into ``cpu_data`` already.

    Returns:
        1-D, on the CPU.
    """
    sizes = [(p.cpu_data if moved else p).numel() for p in parameters]  # type: ignore[attr-defined]
    gaps = list(padding) if padding is not None else [0] * len(sizes)
    used = sum(sizes) + sum(gaps)
    dtype = functools.reduce(torch.promote_types, {parameter.dtype for parameter in parameters})
    flat = torch.empty(-(-used // alignment) * alignment, dtype=dtype)
    flat[used:].zero_()
    offset = 0
    for parameter, size, gap in zip(parameters, sizes, gaps, strict=True):
        source = parameter.cpu_data if moved else parameter.data  # type: ignore[attr-defined]
        flat[offset : offset + size].copy_(source.reshape(-1))
        flat[offset + size : offset + size + gap].zero_()
        if not moved:
            parameter.data = parameter.data.new_empty(0)
        offset += size + gap
    return flat


class _ClonesOnHost(TorchFunctionMode):
    """Answers ``clone()`` of a watched tensor with a copy on the host."""

    def __init__(self) -> None:
        super().__init__()
        self._watched: set[int] = set()
        self._cloned: set[int] = set()

    def watch(self, flat: torch.Tensor) -> None:
        """Clones of ``flat`` and of its slices are made on the host from now on."""
        self._watched.add(_storage(flat))

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.clone and self._watched and _storage(args[0]) in self._watched:
            self._cloned.add(_storage(args[0]))
            if args[0].device.type != "cpu":
                return args[0].cpu()
        return func(*args, **(kwargs or {}))

    def decision(self) -> Decision:
        """What came of it."""
        if not self._watched or self._cloned != self._watched:
            return _held_on("device", "this DeepSpeed builds its master weights in an unknown way")
        return _held_on(
            "host",
            "DeepSpeed itself holds the weights twice on the device while it builds the optimizer",
        )


def _held_on(place: str, reason: str) -> Decision:
    return Decision(
        key=KEY,
        before="device",
        after=place,
        reason=reason,
        severity="note" if place == "host" else "warning",
    )


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


# -- Stage 3.


def shard_from_host(
    deepspeed: Any, model: torch.nn.Module, plan: ResolvedPlan, *, device: torch.device
) -> None:
    """Partition ``model`` in place as stage 3 wants it.

    ``zero.Init`` neither casts nor moves what it does not partition, so weights are cast before
    and buffers moved after, as DeepSpeed's engine does with other models. Of weights that wait in
    their files each rank reads its own part, and nothing is sent.

    Args:
        deepspeed: The module.
        model: On the host, in any floating-point dtype; what is partitioned already stays.
        plan: A resolved plan of stage 3 with its swap folders set.
        device: Where the buffers belong.
    """
    dtype = DTYPES[plan.precision]
    for parameter in model.parameters():
        if not hasattr(parameter, "ds_id") and parameter.dtype in DTYPES.values():
            # Those on the meta device stay on it.
            parameter.data = parameter.data.to(dtype)
    # Its configuration asks for the world size, which DeepSpeed takes for 1 before this.
    accelerator = deepspeed.accelerator.get_accelerator()
    deepspeed.comm.init_distributed(
        dist_backend=accelerator.communication_backend_name(), dist_init_required=False
    )
    config = plan.to_deepspeed()
    if waiting(model):
        _partition_as_read(deepspeed, deepspeed.zero.Init(config_dict_or_path=config), model)
    else:
        deepspeed.zero.Init(module=model, config_dict_or_path=config)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)


def _partition_as_read(deepspeed: Any, init: Any, model: torch.nn.Module) -> None:
    """What ``zero.Init`` does to a module, but this rank's part of a weight comes from its file."""
    if init.enabled and init.mem_efficient_linear:
        init._enable_mem_efficient_linear()
    for parameter in model.parameters():
        if hasattr(parameter, "ds_id"):
            continue
        if stored_weight(parameter) is None:
            parameter.data = parameter.data.to(init.local_device)
            init._zero_init_param(parameter)
            continue
        weight = make_room(parameter, dtype=parameter.dtype, device=init.local_device, passing=True)
        init._convert_to_deepspeed_param(parameter)
        ranks = deepspeed.comm.get_world_size(group=parameter.ds_process_group)  # type: ignore[attr-defined]
        part = -(-parameter.numel() // ranks)
        start = part * deepspeed.comm.get_rank(group=parameter.ds_process_group)  # type: ignore[attr-defined]
        if init.zero_param_process_group is not None:
            # A second partition among fewer ranks holds a larger part.
            start, part = 0, parameter.numel()
        mine = parameter.detach().view(-1)[start : start + part]
        weight.read_into(mine, start=start)
        parameter.partition()  # type: ignore[attr-defined]


# -- Page-locked host memory.


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

    Returns:
        What was done and found; nothing for a plan that pins nothing.
    """
    if not _pins(plan):
        return ()
    environ = os.environ if environ is None else environ
    if environ.get(_BACKEND, "").strip().lower() == "native":
        return (_pinned(None, f"{_BACKEND}=native page-locks exact sizes itself"),)
    for variable in _VARIABLES:
        written = _written(environ.get(variable, ""))
        if written is not None:
            return (_pinned(written, f"{variable} says so"),)
    why = _set_and_verify()
    if why is None:
        reason = "torch rounds page-locked blocks up to powers of two; from this size on no more"
        return (_pinned(THRESHOLD, reason),)
    return (_natively(plan, resources, why),)


def _pins(plan: ResolvedPlan) -> bool:
    if plan.platform.accelerator not in ROUNDING or not plan.uses_deepspeed:
        return False
    zero = plan.plan.zero_optimization
    sections = (zero.offload_optimizer, zero.offload_param) if zero is not None else ()
    return any(map(pins, sections))


def _written(settings: str) -> str | None:
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
        if _written(current) is None:
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
        return _rounded(f"{why}, {obstacle}")
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


def _rounded(why: str) -> Decision:
    return Decision(
        key=PINNING_KEY,
        before=None,
        after=None,
        reason=f"{why}, so page-locked blocks take up to twice their size; "
        f"{_BACKEND}=native page-locks exact sizes",
        severity="warning",
    )


def _pinned(value: Any, reason: str) -> Decision:
    return Decision(key=PINNING_KEY, before=None, after=value, reason=reason)
