"""Stages 1 and 2: every rank has all weights in low precision, and updates a part of each group.

DeepSpeed needs far more device memory to start than to train (see
``DeepSpeedZeroOptimizer.__init__`` in DeepSpeed 0.19.8). DeepSpeed first copies each group's
weights to a flat tensor on the device, and then clones this rank's part on the device before moving
the clone to the host. During each copy, the device holds the weights twice, so starting may run out
of memory on a GPU that could train the model. ``flat_through_host`` makes both copies in host
memory, weight by weight, with bit-identical results.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, cast

import torch
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from zerotune.backend.deepspeed.wrapper import (
    HostStep,
    OptimizerWrapper,
    Upstream,
    clear,
    read_at_once,
)
from zerotune.backend.master_weights import (
    FragmentAddress,
    MasterLayout,
    ResidentLayout,
    SteppedLayout,
    trainable_parameters,
)
from zerotune.backend.step.adams import SlabStep
from zerotune.backend.step.pending import Upload
from zerotune.decisions import Decision
from zerotune.errors import EngineError
from zerotune.plan.model import ResolvedPlan

_STAGES_1_AND_2: Final = "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer"
KEY: Final = "initialization.flat weights"
READS_KEY: Final = "zero_optimization.offload_optimizer.reads"
FLATTENING: Final = ("self", "tensor_list", "alignment", "use_cpu_data", "param_padding")
"""Arguments of ``flatten_dense_tensors_aligned`` in supported DeepSpeed releases."""
FLAGS: Final = Upstream(
    owner=_STAGES_1_AND_2,
    replaced=(
        "has_overflow",
        "reset_cpu_buffers",
        "scaled_global_norm",
        "update_offload_overflow_tracker",
    ),
)
STEP: Final = Upstream(
    owner=_STAGES_1_AND_2,
    replaced=(
        "step",
        "_get_offload_gradient_dict",
        "_optimizer_step",
        "async_inplace_copy_grad_to_fp32_buffer_from_gpu",
        "set_norm_for_param_grad_in_gpu",
        "unscale_and_clip_grads",
        "update_offload_overflow_tracker_for_param_grad",
    ),
)


class PartitionedLayout(SteppedLayout, ResidentLayout):
    """Layout of stages 1 and 2: each rank owns a contiguous part of every flat group."""

    def __init__(self, *, module: torch.nn.Module, wrapper: Any) -> None:
        if wrapper.round_robin_gradients and max(wrapper.partition_count) > 1:
            raise EngineError(
                "DeepSpeed stores the master weights in another order than its record of their "
                "places says, so they cannot be read",
                key="zero_optimization.round_robin_gradients",
                value=True,
                fix="remove this key; training results are the same",
            )
        self._wrapper = wrapper
        named = trainable_parameters(module)
        addresses = []
        for name, parameter in named:
            mapping = parameter._hp_mapping  # type: ignore[attr-defined]
            if mapping is None:
                continue
            addresses.append(
                FragmentAddress(
                    name=name,
                    shape=tuple(parameter.shape),
                    start=mapping.lp_fragment_address.start,
                    numel=mapping.lp_fragment_address.numel,
                    slab=mapping.param_group_index,
                    offset=mapping.hp_fragment_address.start,
                )
            )
        # Parameters of several groups may interleave in named_parameters(), but not in the shared
        # order.
        group_of = {
            id(parameter): index
            for index, group in enumerate(wrapper.bit16_groups)
            for parameter in group
        }
        self._model = dict(named)
        named.sort(key=lambda pair: group_of[id(pair[1])])
        addresses.sort(key=lambda address: address.slab)
        super().__init__(
            optimizer=wrapper.optimizer,
            slabs=list(wrapper.single_partition_of_fp32_groups),
            addresses=tuple(addresses),
            order=tuple((name, tuple(parameter.shape)) for name, parameter in named),
        )

    @override
    def in_model(self, address: FragmentAddress) -> torch.Tensor | None:
        return self._model[address.name].data.reshape(-1)[address.start : address.stop]

    @override
    def refresh(self) -> None:
        self._wrapper.update_lp_params()


class AskedOnce:
    """Read overflow flags and gradient norms with one device synchronisation per step.

    Args:
        wrapper: DeepSpeed's ZeRO optimizer with offload; its methods are replaced.
    """

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        self._flags: list[torch.Tensor] = []
        self._original_overflow = wrapper.has_overflow
        self._original_reset = wrapper.reset_cpu_buffers
        self._original_norm = wrapper.scaled_global_norm
        wrapper.update_offload_overflow_tracker = self._note
        wrapper.has_overflow = self._has_overflow
        wrapper.reset_cpu_buffers = self._reset
        wrapper.scaled_global_norm = self._scaled_norm

    def _note(self, gradient: torch.Tensor | None) -> None:
        # DeepSpeed computes the flag even if overflow is not checked.
        if gradient is None or not self._wrapper.check_grad_overflow:
            return
        flag = self._wrapper._has_inf_or_nan(gradient.data)
        self._flags.append(torch.as_tensor(flag, device=gradient.device).reshape(()))

    def _has_overflow(self, *arguments: Any, **named: Any) -> bool:
        if self._flags:
            self._wrapper.local_overflow |= bool(torch.stack(self._flags).any())
            self._flags.clear()
        return bool(self._original_overflow(*arguments, **named))

    def _reset(self) -> None:
        self._flags.clear()
        self._original_reset()

    def _scaled_norm(self, *arguments: Any, **named: Any) -> Any:
        read_at_once(self._wrapper.norm_for_param_grads)
        return self._original_norm(*arguments, **named)


def _skip(_param: torch.nn.Parameter) -> None:
    """Do nothing: norm and overflow are computed while the gradient is copied."""


class PartitionedStep(HostStep):
    """Fused step of stages 1 and 2, with one slab (flat tensor) per parameter group."""

    upstream = STEP

    settles_first = (
        "load_state_dict",
        "offload_states",
        "refresh_fp32_params",
        "reload_states",
        "state_dict",
        "update_lp_params",
    )

    @override
    def why_at_once(self) -> str | None:
        if self._group.world_size > 1:
            return "the ranks exchange weights when a step ends; the host engine hides such steps"
        return super().why_at_once()

    @override
    def install(self) -> None:
        super().install()
        wrapper = self._wrapper
        for parameters in wrapper.bit16_groups:
            for parameter in parameters:
                for name in ("get_full_hp_param", "set_full_hp_param"):
                    setattr(parameter, name, self._settling(getattr(parameter, name)))
        self._shrink_gradients()
        wrapper._get_offload_gradient_dict()
        # Run the hooks before and after an optimizer's step, which announce that weights change.
        self._stepped = torch.optim.Optimizer.profile_hook_step(self._step_slabs)
        wrapper.set_norm_for_param_grad_in_gpu = _skip
        wrapper.update_offload_overflow_tracker_for_param_grad = _skip
        wrapper.async_inplace_copy_grad_to_fp32_buffer_from_gpu = self._take_gradient
        wrapper.step = self._step

    @property
    @override
    def _slabs(self) -> Sequence[Any]:
        return cast(Sequence[Any], self._wrapper.single_partition_of_fp32_groups)

    @override
    def _members(self) -> Iterator[tuple[Any, torch.Tensor]]:
        for parameters in self._wrapper.params_in_partition:
            for parameter in parameters:
                yield parameter, self._place(parameter)[1]

    def _place(self, parameter: torch.nn.Parameter) -> tuple[slice, torch.Tensor]:
        """The part of a parameter that this rank updates, and the buffer of its gradient."""
        wrapper = self._wrapper
        group, start, offset, numel = wrapper.grad_position[wrapper.get_param_id(parameter)]
        into = self._slabs[group].grad.view(-1).narrow(0, offset, numel)
        return slice(start, start + numel), into

    def _take_gradient(self, param: torch.nn.Parameter) -> None:
        """Copy a gradient to its buffer and compute its norm."""
        self.settle()
        wrapper = self._wrapper
        part, into = self._place(param)
        source = wrapper.get_param_gradient_attribute(param).view(-1)[part]
        together = source.device.type == "cpu" and source.dtype == into.dtype
        norm = self._norm_of(source, into=into if together else None)
        wrapper.norm_for_param_grads[wrapper.get_param_id(param)] = norm
        if together:
            wrapper.clear_grad_attribute(param)
            return
        # DeepSpeed's method waits for the right streams; only the dtype must differ.
        fp32 = wrapper.master_weights_and_grads_dtype
        wrapper.master_weights_and_grads_dtype = into.dtype
        try:
            type(wrapper).async_inplace_copy_grad_to_fp32_buffer_from_gpu(wrapper, param)
        finally:
            wrapper.master_weights_and_grads_dtype = fp32

    def _step(self, closure: None = None) -> None:  # noqa: ARG002 - DeepSpeed's signature
        """Replacement of ``DeepSpeedZeroOptimizer.step`` for an optimizer in host memory."""
        self.settle()
        wrapper = self._wrapper
        wrapper.micro_step_id = self._home.INITIAL_MICRO_STEP_ID
        wrapper._wait_for_offload_copies()
        wrapper._offload_accumulated_param_ids = set()
        read_at_once(wrapper.norm_for_param_grads)
        if self._overflows():
            wrapper.zero_grad(set_to_none=True)
            wrapper._release_preflattened_grad_buffers()
            wrapper.reset_cpu_buffers()
            for timer in self._home.OPTIMIZER_TIMERS:
                with self._timing(timer):
                    pass
            return
        with self._timing(self._home.OPTIMIZER_GRADIENTS_TIMER):
            self._forget_unused()
        with self._timing(self._home.OPTIMIZER_STEP_TIMER):
            self._stepped(wrapper.optimizer)
        wrapper._lazy_init_hp_params_optimizer_state()
        wrapper._release_preflattened_grad_buffers()
        for index in range(len(wrapper.bit16_groups)):
            wrapper.averaged_gradients[index] = None
        wrapper.reset_cpu_buffers()
        with self._timing(self._home.OPTIMIZER_ALLGATHER_TIMER):
            if self._pending is None:
                self._exchange_all()
        wrapper.timers.log(self._home.OPTIMIZER_TIMERS)

    @contextmanager
    def _timing(self, name: str) -> Iterator[None]:
        """One of DeepSpeed's timers, which do nothing without ``wall_clock_breakdown``."""
        timer = self._wrapper.timers(name)
        timer.start()
        yield
        timer.stop()

    def _exchange_all(self) -> None:
        wrapper = self._wrapper
        self._home.all_gather_dp_groups(
            groups_flat=wrapper.bit16_groups_flat,
            partitioned_param_groups=wrapper.parallel_partitioned_bit16_groups,
            dp_process_group=wrapper.real_dp_process_group,
            start_alignment_factor=wrapper.nccl_start_alignment_factor,
            allgather_bucket_size=wrapper.allgather_bucket_size,
        )
        self._bind()

    def _overflows(self) -> bool:
        """Compute the global norm and update the loss scale; return whether to skip the step."""
        wrapper = self._wrapper
        norms = wrapper.norm_for_param_grads.values()
        wrapper.local_overflow |= not all(math.isfinite(float(norm)) for norm in norms)
        wrapper.overflow, self._scaled_norm = False, cast(Any, None)
        if wrapper.check_grad_overflow:
            wrapper.check_overflow(partition_gradients=wrapper.partition_gradients)
        if wrapper.compute_grad_norm and not wrapper.overflow:
            self._scaled_norm = wrapper.scaled_global_norm()
            checked = wrapper.dtype != torch.bfloat16 or wrapper.check_grad_overflow
            wrapper.overflow = checked and self._home.is_invalid_grad_norm(self._scaled_norm)
        scale = wrapper.loss_scale
        wrapper._update_scale(wrapper.overflow)
        wrapper._global_grad_norm = None
        if wrapper.compute_grad_norm:
            norm = float("inf") if wrapper.overflow else self._scaled_norm / scale
            wrapper._global_grad_norm = norm
        return bool(wrapper.overflow)

    def _step_slabs(self, adam: torch.optim.Optimizer) -> None:
        wrapper, factor = self._wrapper, self._factor()
        begun: list[SlabStep] = []
        sources: list[torch.Tensor | None] = []
        targets: list[torch.Tensor | None] = []
        # Check this before the code below creates views of the weights, which would count as uses.
        may_wait = self._may_wait()
        self._adam.rewind()
        for index, (slab, group) in enumerate(zip(self._slabs, adam.param_groups, strict=True)):
            rank = self._home.dist.get_rank(group=wrapper.real_dp_process_group[index])
            target = wrapper.parallel_partitioned_bit16_groups[index][rank]
            here = self._is_here(target)
            out = target if here else wrapper.param_buffer_of_bit16_for_cpu_offload_groups[index]
            begun.append(
                self._adam.begin(slab, gradient=slab.grad, group=group, factor=factor, out=out.data)
            )
            sources.append(None if here else out.data.view(-1))
            targets.append(None if here else target.data.view(-1))
        self._take(begun, sources, targets, waits=may_wait)

    @override
    def _launch(self, steps: Sequence[SlabStep], upload: Upload) -> None:
        self._bind()
        super()._launch(steps, upload)

    def _bind(self) -> None:
        """Point parameters to the flat weights again, as DeepSpeed does after each step."""
        for index in range(len(self._wrapper.bit16_groups)):
            self._wrapper._update_model_bit16_weights(index)

    def _factor(self) -> float:
        """Unscaling and clipping factor, rounded as in DeepSpeed."""
        probe = torch.ones(1)
        self._wrapper.unscale_and_clip_grads([probe], self._scaled_norm)
        return float(probe)


class PartitionedWrapper(OptimizerWrapper):
    """Adapter for ``DeepSpeedZeroOptimizer``, stages 1 and 2."""

    upstream = (
        Upstream(
            owner=_STAGES_1_AND_2,
            relied_on=(
                "_link_all_hp_params",
                "_release_preflattened_grad_buffers",
                "_wait_for_offload_copies",
                "reset_cpu_buffers",
                "update_lp_params",
                "zero_grad",
            ),
        ),
        FLAGS,
        STEP,
    )
    step_kind = PartitionedStep

    @override
    def _find_layout(self) -> MasterLayout:
        return PartitionedLayout(module=self.engine.module, wrapper=self.raw)

    @property
    @override
    def members(self) -> Sequence[Sequence[torch.Tensor]]:
        groups: Sequence[Sequence[torch.Tensor]] = self.raw.bit16_groups
        return groups

    @property
    @override
    def devices(self) -> tuple[str, str]:
        return ("cpu" if self.raw.cpu_offload else "none"), "none"

    @property
    @override
    def _editors(self) -> Iterable[Any]:
        return (parameter for group in self.raw.bit16_groups for parameter in group)

    @override
    def drop_gradients(self) -> None:
        raw = self.raw
        # Copies of offloaded gradients may still be running.
        raw._wait_for_offload_copies()
        raw.micro_step_id = sys.modules[type(raw).__module__].INITIAL_MICRO_STEP_ID
        raw.zero_grad(set_to_none=True)
        raw._release_preflattened_grad_buffers()
        if raw.cpu_offload:
            raw._offload_accumulated_param_ids = set()
            raw.reset_cpu_buffers()
            clear(raw.accumulated_grads_in_cpu.values())
            clear(slab.grad for slab in raw.single_partition_of_fp32_groups)
            return
        for group in raw.averaged_gradients:
            raw.averaged_gradients[group] = None
            raw.all_grad_tensors[group] = None

    @override
    def improve(self) -> tuple[Decision, ...]:
        return (*self._look_at_gradients(), *self._ask_once())

    def _look_at_gradients(self) -> tuple[Decision, ...]:
        """Enable DeepSpeed's overflow check if the gradient norm is not computed.

        With ``compute_grad_norm: false``, DeepSpeed does not check fp32 gradients, and a NaN would
        silently corrupt weights and moments. The overflow check reads each gradient once.
        """
        raw = self.raw
        if raw.compute_grad_norm or raw.check_grad_overflow or raw.dtype != torch.float32:
            return ()
        raw.check_grad_overflow = True
        return (
            Decision(
                key="zero_optimization.compute_grad_norm",
                before="gradients are not checked",
                after="steps with NaN or infinite gradients are skipped",
                reason="without a gradient norm, DeepSpeed would apply non-finite fp32 gradients",
            ),
        )

    def _ask_once(self) -> tuple[Decision, ...]:
        """Read flags and norms of gradients once per step.

        With an offloaded optimizer, DeepSpeed 0.19.8 reads two numbers per parameter from the
        device: an overflow flag in the backward pass and a norm in the step. Each read waits for
        all queued work, so copies and reductions cannot overlap with computation.
        """
        if not self.raw.cpu_offload:
            return ()
        before = after = "per parameter"
        reason = "ZenFlow reads flags and norms itself" if self.raw.zenflow else FLAGS.changed()
        if reason is None:
            AskedOnce(self.raw)
            after = "once per step"
            reason = (
                "the step reads all overflow flags and gradient norms from the device in one "
                "transfer, whereas DeepSpeed would wait for the device twice per parameter; "
                "results are identical"
            )
        return (Decision(key=READS_KEY, before=before, after=after, reason=reason),)


@contextmanager
def flat_through_host(
    deepspeed: Any, plan: ResolvedPlan, *, device: torch.device
) -> Iterator[list[Decision]]:
    """Inside the block, DeepSpeed builds the optimizer of stages 1 and 2 without device copies.

    Without optimizer offload the function has no effect: the optimizer states on the device then
    need more memory than the copies would.

    Args:
        deepspeed: The module.
        plan: The resolved plan.
        device: Device of the weights.

    Yields:
        A list that contains the decisions once the block has ended.
    """
    decisions: list[Decision] = []
    if plan.stage not in (1, 2) or plan.offload_optimizer == "none":
        yield decisions
        return
    owner = deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer
    original = owner.flatten_dense_tensors_aligned
    if tuple(inspect.signature(original).parameters) != FLATTENING:
        why = "zerotune does not know how this DeepSpeed release flattens weights"
        decisions.append(_held_on("device", why))
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
        # The allocator's cache contains the freed weights in pieces too small for one large block.
        # Without this call, the device would still hold the weights twice.
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
    """Copy parameters into one flat host tensor, and free each parameter as soon as it is copied.

    Args:
        parameters: Parameters to copy, at least one; the call empties them.
        alignment: The length is padded with zeros to a multiple of this number of elements.
        padding: Number of zeros after each parameter.
        moved: Whether DeepSpeed has already moved the weights to ``cpu_data``.

    Returns:
        The flat tensor, 1-D, on the CPU.
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
    """Make ``clone()`` of a watched tensor return a copy on the host."""

    def __init__(self) -> None:
        super().__init__()
        self._watched: set[int] = set()
        self._cloned: set[int] = set()

    def watch(self, flat: torch.Tensor) -> None:
        """From now on, clone a tensor and its slices on the host.

        Args:
            flat: The tensor.
        """
        self._watched.add(_storage(flat))

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.clone and self._watched and _storage(args[0]) in self._watched:
            self._cloned.add(_storage(args[0]))
            if args[0].device.type != "cpu":
                return args[0].cpu()
        return func(*args, **(kwargs or {}))

    def decision(self) -> Decision:
        """Return the decision on where the copies were made."""
        if not self._watched or self._cloned != self._watched:
            return _held_on(
                "device", "zerotune does not know how this DeepSpeed release creates master weights"
            )
        return _held_on(
            "host",
            "DeepSpeed would hold the weights twice on the device while creating the optimizer",
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
