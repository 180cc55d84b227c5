"""The optimizer's step in host memory, in one pass, inside DeepSpeed's stages 1, 2 and 3.

DeepSpeed itself widens every gradient to fp32 in a buffer of its own, takes its norm through a copy
in fp64, and then goes over host memory for each of clipping, Adam and cast. Here a gradient stays
in the dtype it arrives in, its norm is taken on the way, and the rest is one pass. Weights, moments
and counters stay where DeepSpeed has them, so nothing that reads or writes them knows of it.

A step may return before the pass is taken (``PendingStep``): a thread of its own takes it behind
the next forward, or averages join it. Whatever reads or writes weights or states settles it first.
"""

from __future__ import annotations

import functools
import math
import sys
import weakref
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, cast

import torch
from typing_extensions import override

from zerotune.backend.deepspeed.layouts import layout_of_deepspeed
from zerotune.backend.deepspeed.reads import read_at_once
from zerotune.backend.deepspeed.sources import PARTITIONED_STEP, SHARDED_STEP, Replaced
from zerotune.backend.distributed import ProcessGroup
from zerotune.backend.layouts import UNDER_WAY
from zerotune.backend.master_weights import MasterLayout
from zerotune.backend.optimizers.adamw_bf16_states import AdamWBF16States
from zerotune.backend.step.adams import (
    HostAdam,
    HostBF16Adam,
    SlabStep,
    Stepper,
    torch_rounds_alike,
)
from zerotune.backend.step.deferred import (
    KEY,
    DeferredSteps,
    choose_when,
    op_or_reason,
    shares_cores,
)
from zerotune.backend.step.kernel import HostStepOp
from zerotune.backend.step.pending import (
    Exchange,
    Part,
    PendingStep,
    Piece,
    SharedStep,
    Span,
    Upload,
    divide_alike,
)
from zerotune.decisions import Decision
from zerotune.plan.model import ResolvedPlan

GRADIENTS_KEY: Final = "optimizer.step.gradients"
_REASON: Final = (
    "clipping, Adam and the cast of the weights go over host memory once, not once each, and "
    "gradients stay in the dtype they arrive in; the same bits"
)
_OTHER_STEPS: Final = (
    "has_moe_layers",
    "zenflow",
    "torch_autocast_gradscaler",
    "low_precision_master_weights_and_grads",
    "use_muon",
)
"""What makes more of DeepSpeed's own step than this one is."""
_SCATTER: Final = "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads"
"""A private method of stage 3, under the name Python gives it."""


def take_over_step(
    engine: Any, plan: ResolvedPlan, group: ProcessGroup
) -> tuple[HostStep | None, tuple[Decision, ...]]:
    """Have an Adam in host memory stepped in one pass, where that is possible. Collective.

    Adam is a DeepSpeedCPUAdam, or an AdamWBF16States.

    Args:
        engine: A ``deepspeed.DeepSpeedEngine``, before its first step.
        plan: Whether that is wanted.
        group: The processes that train together.

    Returns:
        What takes the steps now, ``None`` where DeepSpeed does, and what was decided: nothing
        where the optimizer is another one.
    """
    wrapper = engine.optimizer
    adam = getattr(wrapper, "optimizer", None)
    kind = _STEPS.get(type(wrapper).__name__)
    ours = isinstance(adam, AdamWBF16States)
    if kind is None or not (ours or type(adam).__name__ == "DeepSpeedCPUAdam"):
        return None, ()
    usual = "AdamWBF16States' own" if ours else "DeepSpeed's"
    op = op_or_reason(
        plan,
        group,
        obstacle=_obstacle(wrapper, kind),
        rounds_alike=torch_rounds_alike if ours else None,
    )
    if isinstance(op, str):
        return None, (_decision(usual, usual, op),)
    layout = layout_of_deepspeed(engine, rank=engine.global_rank)
    step = kind(wrapper=wrapper, op=op, module=engine.module, layout=layout, group=group)
    step.install()
    step.know_views()
    step.settle_for_states()
    decided = (
        _decision(usual, "one pass", _REASON),
        choose_when(step, plan),
        shares_cores(step),
        *_accumulates(step, plan),
    )
    return step, decided


def _accumulates(step: HostStep, plan: ResolvedPlan) -> tuple[Decision, ...]:
    """Say in what dtype micro batches are added up, where there are several."""
    dtype = step.gradient_dtype
    if (plan.gradient_accumulation_steps or 1) == 1:
        return ()
    asked = dtype == torch.float32
    return (
        Decision(
            key=GRADIENTS_KEY,
            before=None,
            after=str(dtype).removeprefix("torch."),
            reason="micro batches are added up in it"
            + ("" if asked else '; {"data_types": {"grad_accum_dtype": "fp32"}} adds up in fp32'),
        ),
    )


def _decision(before: str, after: str, reason: str) -> Decision:
    return Decision(key=KEY, before=before, after=after, reason=reason)


def _obstacle(wrapper: Any, kind: type[HostStep]) -> str | None:
    """Why DeepSpeed's own step stays."""
    missing = [name for name in kind.relied_on if not hasattr(wrapper, name)]
    if missing:
        return f"this DeepSpeed has no {missing[0]}, which a step in one pass needs"
    others = [name for name in _OTHER_STEPS if getattr(wrapper, name, None)]
    if others:
        return f"with {others[0]} DeepSpeed's step does more"
    if not getattr(wrapper.optimizer, "fp32_optimizer_states", True):
        return "the moments are not fp32"
    return kind.replaced.changed() or kind.obstacle(wrapper)


class HostStep(DeferredSteps):
    """Takes the steps of a ZeRO optimizer whose inner one is an Adam in host memory.

    Args:
        wrapper: DeepSpeed's ZeRO optimizer.
        op: The compiled functions.
        module: The model.
        layout: Where the wrapper has its weights.
        group: The processes that train together.
    """

    relied_on: tuple[str, ...] = ("norm_for_param_grads", "reset_cpu_buffers", "loss_scale")
    """What is called or read of the wrapper; another DeepSpeed may lack some of it."""

    replaced: Replaced
    """Methods of the wrapper whose work is done here."""

    settles_first: tuple[str, ...] = ()
    """Methods of the wrapper that read or write weights or states."""

    def __init__(
        self,
        *,
        wrapper: Any,
        op: HostStepOp,
        module: torch.nn.Module,
        layout: MasterLayout,
        group: ProcessGroup,
    ) -> None:
        super().__init__(op=op, module=module, layout=layout, group=group)
        self._wrapper = wrapper
        adam = wrapper.optimizer
        self._adam: Stepper = (
            HostBF16Adam(op=op, adam=adam)
            if isinstance(adam, AdamWBF16States)
            else HostAdam(op=op, adam=adam)
        )
        self._home = sys.modules[type(wrapper).__module__]

    @property
    @override
    def _stepped_by(self) -> torch.optim.Optimizer:
        return cast(torch.optim.Optimizer, self._wrapper.optimizer)

    @property
    @override
    def _accelerator(self) -> Any:
        return self._home.get_accelerator()

    @override
    def why_at_once(self) -> str | None:
        betas = {tuple(group["betas"]) for group in self._stepped_by.param_groups}
        return "groups with betas of their own are stepped in order" if len(betas) > 1 else None

    @classmethod
    @abstractmethod
    def obstacle(cls, wrapper: Any) -> str | None:
        """Why this wrapper's step cannot be taken, if so."""

    def install(self) -> None:
        """Replace gradient copy, norm and step of this wrapper alone."""
        setattr(self._wrapper, UNDER_WAY, self)
        for name in self.settles_first:
            if hasattr(self._wrapper, name):
                setattr(self._wrapper, name, self._settling(getattr(self._wrapper, name)))

    @property
    def gradient_dtype(self) -> torch.dtype:
        """In which gradients are kept and added up."""
        dtype: torch.dtype = self._wrapper.gradient_accumulation_dtype
        return dtype

    def _settling(self, method: Callable[..., Any]) -> Callable[..., Any]:
        stepping = weakref.ref(self)

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            if (step := stepping()) is not None:
                step.settle()
            return method(*args, **kwargs)

        return call

    def _is_here(self, target: torch.Tensor) -> bool:
        """Whether the pass itself can write the weights where the model has them."""
        return target.device.type == "cpu" and self._op.knows(target.dtype)

    @property
    @abstractmethod
    def _slabs(self) -> Sequence[Any]:
        """The fp32 weights, as the optimizer's groups hold them."""

    def _swaps(self, index: int) -> bool:  # noqa: ARG002 - of the slab
        """Whether DeepSpeed moves that slab and its gradient to NVMe and back."""
        return False

    def _steps(self, index: int) -> bool:  # noqa: ARG002 - of the slab
        """Whether that slab is in host memory, or comes there, and is stepped here."""
        return True

    @abstractmethod
    def _members(self) -> Iterator[tuple[Any, torch.Tensor]]:
        """Parameters with their parts of the gradient buffers."""

    def replay(self, steps: int) -> None:
        """Continue as a run that has taken ``steps`` optimizer steps."""
        self._adam.replay(steps)

    def _shrink_gradients(self) -> None:
        """Buffers for gradients in the dtype they arrive in, where torch lets them differ."""
        dtype = self.gradient_dtype
        for index, slab in enumerate(self._slabs):
            same = dtype == slab.dtype or not self._op.knows(dtype)
            # torch has that since 2.10.
            elsewhere = self._swaps(index) or not self._steps(index)
            if same or elsewhere or not hasattr(slab, "grad_dtype"):
                continue
            wide, shape = slab.grad, slab.grad.shape
            accelerator = self._home.get_accelerator()
            pinned, natively = accelerator.is_pinned(wide), getattr(wide, "ds_pinned", False)
            slab.grad = None
            slab.grad_dtype = dtype
            if pinned and not natively:
                # torch keeps page-locked blocks, so another one would come on top of this one.
                slab.grad = wide.zero_().view(-1).view(dtype)[: wide.numel()].view(shape)
                continue
            del wide
            empty = torch.zeros(shape, dtype=dtype)
            # As DeepSpeed does it: torch may round the block up to twice its size.
            slab.grad = accelerator.pin_memory(empty) if pinned else empty

    def _norm_of(self, gradient: torch.Tensor, *, into: torch.Tensor | None = None) -> torch.Tensor:
        """L2 norm of a flat gradient, which is copied on the way where it is in host memory."""
        if gradient.device.type != "cpu" or not self._op.knows(gradient.dtype):
            # Kept on the device: all norms are read at once when the step begins.
            norm: torch.Tensor = torch.linalg.vector_norm(gradient, dtype=torch.float32)
            return norm
        total = self._op.take(gradient, into=into)
        return torch.tensor(math.sqrt(total), dtype=torch.float64)

    def _read_norms(self) -> None:
        """Bring all norms to the host at once."""
        read_at_once(self._wrapper.norm_for_param_grads)

    def _forget_unused(self) -> None:
        """A parameter without a gradient in this window is not stepped with an earlier one."""
        for parameter, gradient in self._members():
            if self._wrapper.get_param_id(parameter) not in self._wrapper.norm_for_param_grads:
                gradient.zero_()


class PartitionedStep(HostStep):
    """Stages 1 and 2: one slab per parameter group."""

    replaced = PARTITIONED_STEP

    relied_on = (
        *HostStep.relied_on,
        "_get_offload_gradient_dict",
        "_lazy_init_hp_params_optimizer_state",
        "_offload_accumulated_param_ids",
        "_release_preflattened_grad_buffers",
        "_update_model_bit16_weights",
        "_update_scale",
        "_wait_for_offload_copies",
        "allgather_bucket_size",
        "async_inplace_copy_grad_to_fp32_buffer_from_gpu",
        "averaged_gradients",
        "bit16_groups_flat",
        "check_grad_overflow",
        "check_overflow",
        "clear_grad_attribute",
        "compute_grad_norm",
        "get_param_gradient_attribute",
        "grad_position",
        "gradient_accumulation_dtype",
        "local_overflow",
        "master_weights_and_grads_dtype",
        "param_buffer_of_bit16_for_cpu_offload_groups",
        "parallel_partitioned_bit16_groups",
        "params_in_partition",
        "real_dp_process_group",
        "scaled_global_norm",
        "set_norm_for_param_grad_in_gpu",
        "unscale_and_clip_grads",
        "update_offload_overflow_tracker_for_param_grad",
    )

    @classmethod
    @override
    def obstacle(cls, wrapper: Any) -> str | None:
        if not wrapper.cpu_offload:
            return "the optimizer is not in host memory"
        home = sys.modules[type(wrapper).__module__]
        needed = (
            "INITIAL_MICRO_STEP_ID",
            "OPTIMIZER_TIMERS",
            "all_gather_dp_groups",
            "dist",
            "is_invalid_grad_norm",
        )
        missing = [name for name in needed if not hasattr(home, name)]
        return f"this DeepSpeed has no {missing[0]}" if missing else None

    settles_first = (
        "load_state_dict",
        "offload_states",
        "refresh_fp32_params",
        "reload_states",
        "state_dict",
        "update_lp_params",
    )

    _beside: tuple[ProcessGroup, Any] | None = None
    """What the weights of several ranks are exchanged through, behind other collectives."""

    @override
    def why_at_once(self) -> str | None:
        sizes = {len(each) for each in self._wrapper.parallel_partitioned_bit16_groups}
        if sizes != {self._group.world_size}:
            return "not all ranks share all of the weights"
        return super().why_at_once()

    @override
    def hide(self) -> None:
        super().hide()
        if self._group.world_size > 1:
            with self._group.naming("the start of the exchange of weights"):
                beside = self._group.another()
                self._beside = beside, beside.for_tensors()

    @override
    def close(self) -> None:
        try:
            super().close()
        finally:
            if self._beside is not None:
                self._beside[0].close()
                self._beside = None

    @property
    @override
    def needs_a_thread(self) -> bool:
        # Else nobody could exchange weights that only one rank asks for.
        return self._group.world_size > 1

    @override
    def _may_wait(self) -> bool:
        may = super()._may_wait()
        if self._beside is None:
            return may
        return not self._group.any(not may, purpose="begin a step")

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
        # So hooks before and after an optimizer's step run, which is what tells of a change.
        self._stepped = torch.optim.Optimizer.profile_hook_step(self._step_slabs)
        wrapper.set_norm_for_param_grad_in_gpu = _taken_with_the_copy
        wrapper.update_offload_overflow_tracker_for_param_grad = _taken_with_the_copy
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
        """The part of a parameter that this rank steps, and where its gradient goes."""
        wrapper = self._wrapper
        group, start, offset, numel = wrapper.grad_position[wrapper.get_param_id(parameter)]
        into = self._slabs[group].grad.view(-1).narrow(0, offset, numel)
        return slice(start, start + numel), into

    def _take_gradient(self, param: torch.nn.Parameter) -> None:
        """Copy a gradient to its buffer and take its norm."""
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
        # DeepSpeed's own copy waits for the right streams; only its dtype is to be another one.
        fp32 = wrapper.master_weights_and_grads_dtype
        wrapper.master_weights_and_grads_dtype = into.dtype
        try:
            type(wrapper).async_inplace_copy_grad_to_fp32_buffer_from_gpu(wrapper, param)
        finally:
            wrapper.master_weights_and_grads_dtype = fp32

    def _step(self, closure: None = None) -> None:  # noqa: ARG002 - DeepSpeed's signature
        """As ``DeepSpeedZeroOptimizer.step`` with the optimizer in host memory."""
        self.settle()
        wrapper = self._wrapper
        wrapper.micro_step_id = self._home.INITIAL_MICRO_STEP_ID
        wrapper._wait_for_offload_copies()
        wrapper._offload_accumulated_param_ids = set()
        self._read_norms()
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
        """Take the global norm and move the loss scale; whether the step is to be skipped."""
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
        wrapper._global_grad_norm = self._unscaled(scale)
        return bool(wrapper.overflow)

    def _unscaled(self, scale: float) -> Any:
        if not self._wrapper.compute_grad_norm:
            return None
        return float("inf") if self._wrapper.overflow else self._scaled_norm / scale

    def _step_slabs(self, adam: torch.optim.Optimizer) -> None:
        wrapper, factor = self._wrapper, self._factor()
        begun: list[SlabStep] = []
        sources: list[torch.Tensor | None] = []
        targets: list[torch.Tensor | None] = []
        # Before there are views of the weights here.
        may_wait = self._may_wait()
        self._adam.rewind([slab.numel() for slab in self._slabs])
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
        if may_wait:
            self._launch(begun, self._upload(sources, targets, self._exchange()))
            return
        upload = Upload(sources=sources, targets=targets)
        for index, step in enumerate(begun):
            step.run(0, step.weight.numel())
            upload.send([Piece(slab=index, start=0, stop=step.weight.numel())])

    def _exchange(self) -> Exchange | None:
        if self._beside is None:
            return None
        group, data = self._beside
        partitions = [
            [each.data.view(-1) for each in of_all]
            for of_all in self._wrapper.parallel_partitioned_bit16_groups
        ]
        return Exchange(group=group, data=data, partitions=partitions)

    @override
    def _divide(self, sizes: Sequence[int]) -> tuple[Part, ...]:
        if self._beside is None:
            return super()._divide(sizes)
        return divide_alike(self._layout.addresses, sizes, spans=self._spans())

    def _spans(self) -> Iterator[Span]:
        wrapper = self._wrapper
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        for slab, flat in enumerate(wrapper.bit16_groups_flat):
            for parameter in wrapper.bit16_groups[slab]:
                start = (parameter.data_ptr() - flat.data_ptr()) // flat.element_size()
                stop = start + parameter.numel()
                yield Span(name=names[id(parameter)], slab=slab, start=start, stop=stop)

    @override
    def _begin(self, steps: Sequence[SlabStep], upload: Upload) -> PendingStep:
        if upload.exchange is None:
            return super()._begin(steps, upload)
        return SharedStep(
            parts=self._parts,
            order=tuple(self._order),
            steps=steps,
            upload=upload,
        )

    @override
    def _launch(self, steps: Sequence[SlabStep], upload: Upload) -> None:
        self._bind()
        super()._launch(steps, upload)

    def _bind(self) -> None:
        """As DeepSpeed after each step: ``module.to(...)`` has given parameters other memory."""
        for index in range(len(self._wrapper.bit16_groups)):
            self._wrapper._update_model_bit16_weights(index)

    def _factor(self) -> float:
        """What DeepSpeed multiplies gradients by, with its roundings."""
        probe = torch.ones(1)
        self._wrapper.unscale_and_clip_grads([probe], self._scaled_norm)
        return float(probe)


class ShardedStep(HostStep):
    """Stage 3: one slab per sub-group, in memory or brought in from NVMe by DeepSpeed."""

    replaced = SHARDED_STEP

    relied_on = (
        *HostStep.relied_on,
        _SCATTER,
        "_get_norm_groups",
        "_get_param_partition_group",
        "_offload_grad_partition_at_boundary",
        "_optimizer_step",
        "_post_step",
        "_reassign_or_swap_out_partitioned_parameters",
        "_swappable_optimizer_subgroup",
        "_unflatten_partitioned_parameters",
        "clip_grad",
        "fp16_groups",
        "fp16_partitioned_groups_flat",
        "fp32_partitioned_groups_flat",
        "grad_position",
        "gradient_accumulation_dtype",
        "gradient_predivide_factor",
        "persistent_parameters",
        "sub_group_to_group_id",
        "subgroup_to_device",
        "unscale_and_clip_grads",
    )

    @classmethod
    @override
    def obstacle(cls, wrapper: Any) -> str | None:
        if not wrapper.offload_optimizer:
            return "the optimizer is not in host memory"
        return None

    settles_first = (
        "get_full_hp_param",
        "get_local_fp32_param",
        "load_state_dict",
        "offload_states",
        "reload_states",
        "set_full_hp_param",
        "set_local_hp_param",
        "state_dict",
        "step",
    )

    @override
    def why_at_once(self) -> str | None:
        if any(self._swaps(index) for index in range(len(self._slabs))):
            return "DeepSpeed brings the states in from NVMe while it steps"
        if any(flat is None for flat in self._wrapper.fp16_partitioned_groups_flat):
            return "DeepSpeed writes the weights to NVMe while it steps"
        if not all(self._steps(index) for index in range(len(self._slabs))):
            return "a part of the optimizer stays on the device, where DeepSpeed steps it"
        return super().why_at_once()

    @override
    def install(self) -> None:
        super().install()
        wrapper = self._wrapper
        self._factor = 1.0
        self._cast: int | None = None
        self._waits = False
        self._begun: list[SlabStep] = []
        self._original_post_step = wrapper._post_step
        wrapper._post_step = self._post_step
        self._shrink_gradients()
        self._original_copy = wrapper._offload_grad_partition_at_boundary
        self._original_norms = wrapper._get_norm_groups
        self._original_cast = wrapper._reassign_or_swap_out_partitioned_parameters
        wrapper._offload_grad_partition_at_boundary = self._take_gradient
        wrapper._get_norm_groups = self._norm_groups
        self._original_unscale = wrapper.unscale_and_clip_grads
        self._original_step = wrapper._optimizer_step
        wrapper.unscale_and_clip_grads = self._keep_factor
        wrapper._optimizer_step = self._step
        wrapper._reassign_or_swap_out_partitioned_parameters = self._reassign
        self._original_scatter = getattr(wrapper, _SCATTER)
        setattr(wrapper, _SCATTER, self._scatter)

    @property
    @override
    def _slabs(self) -> Sequence[Any]:
        return cast(Sequence[Any], self._wrapper.fp32_partitioned_groups_flat)

    @override
    def _swaps(self, index: int) -> bool:
        return bool(self._wrapper._swappable_optimizer_subgroup(index))

    @override
    def _steps(self, index: int) -> bool:
        return bool(self._wrapper.subgroup_to_device[index] == "cpu")

    @override
    def _members(self) -> Iterator[tuple[Any, torch.Tensor]]:
        wrapper = self._wrapper
        for index, parameters in enumerate(wrapper.fp16_groups):
            if self._swaps(index):
                continue
            for parameter in parameters:
                _, offset, numel = wrapper.grad_position[wrapper.get_param_id(parameter)]
                yield parameter, self._slabs[index].grad.narrow(0, offset, numel)

    def _take_gradient(
        self, param: torch.nn.Parameter, grad_buffer: torch.Tensor, gradients: Any, offsets: Any
    ) -> None:
        """Copy a gradient to its buffer and take its norm."""
        self.settle()
        wrapper = self._wrapper
        key = wrapper.get_param_id(param)
        index, offset, _ = wrapper.grad_position[key]
        if self._swaps(index):
            self._original_copy(param, grad_buffer, gradients, offsets)
            return
        source = grad_buffer.view(-1)
        into = self._slabs[index].grad.narrow(0, offset, source.numel())
        together = source.device.type == "cpu" and source.dtype == into.dtype
        wrapper.norm_for_param_grads[key] = self._norm_of(source, into=into if together else None)
        if not together:
            into.copy_(source.to(into.dtype), non_blocking=True)

    def _scatter(self, params: list[torch.nn.Parameter], dtype: torch.dtype) -> list[torch.Tensor]:
        """Of one rank alone, all gradients are its own: what DeepSpeed joins, divides and sends."""
        wrapper = self._wrapper
        ranks = self._home.dist.get_world_size(group=wrapper._get_param_partition_group(params[0]))
        same = dtype == wrapper.dtype == wrapper.gradient_accumulation_dtype
        if ranks > 1 or not same or wrapper.gradient_predivide_factor != 1.0:
            found: list[torch.Tensor] = self._original_scatter(params, dtype)
            return found
        return [cast(torch.Tensor, param.grad).reshape(-1) for param in params]

    def _norm_groups(self) -> Any:
        self._read_norms()
        self._forget_unused()
        return self._original_norms()

    def _keep_factor(self, sub_group: int, total_norm: torch.Tensor) -> None:
        """As DeepSpeed's clipping, but for the multiplication."""
        wrapper = self._wrapper
        if not self._steps(sub_group):
            self._original_unscale(sub_group, total_norm)
            return
        scale = wrapper.loss_scale
        if wrapper.clip_grad > 0.0:
            clip = ((total_norm / wrapper.loss_scale) + 1e-6) / wrapper.clip_grad
            scale = torch.clamp(clip, min=1.0) * wrapper.loss_scale
        self._factor = float(1.0 / scale)

    def _step(self, sub_group: int) -> None:
        wrapper = self._wrapper
        slab, adam = self._slabs[sub_group], wrapper.optimizer
        group = adam.param_groups[wrapper.sub_group_to_group_id[sub_group]]
        out = wrapper.fp16_partitioned_groups_flat[sub_group]
        # Low-precision weights on a device or on NVMe are written by DeepSpeed.
        here = out is not None and self._is_here(out)
        if sub_group == 0:
            self._begun, self._waits = [], self._may_wait()
        if not self._steps(sub_group):
            self._cast = None
            self._original_step(sub_group)
            return

        def run(_adam: torch.optim.Optimizer) -> None:
            self._adam.rewind([slab.numel()])
            step = self._adam.begin(
                slab,
                gradient=slab.grad,
                group=group,
                factor=self._factor,
                out=out.data if here else None,
            )
            if self._waits:
                self._begun.append(step)
            else:
                step.run(0, slab.numel())

        group["params"] = [slab]
        try:
            torch.optim.Optimizer.profile_hook_step(run)(adam)
        finally:
            group["params"] = []
        self._cast = sub_group if here and not self._waits else None

    def _post_step(self, timer_names: Any) -> None:
        if self._waits:
            begun, self._begun, self._waits = self._begun, [], False
            sources: list[torch.Tensor | None] = []
            targets: list[torch.Tensor | None] = []
            for step, flat in zip(begun, self._wrapper.fp16_partitioned_groups_flat, strict=True):
                here = step.out is not None
                sources.append(None if here else step.weight)
                targets.append(None if here else flat.data.view(-1))
            for index in range(len(begun)):
                self._wrapper._unflatten_partitioned_parameters(index)
            self._launch(begun, self._upload(sources, targets))
        self._original_post_step(timer_names)

    @override
    def _written(self) -> Mapping[str, torch.Tensor]:
        return {
            name: parameter.ds_tensor  # type: ignore[attr-defined]
            for name, parameter in self._parameters.items()
        }

    @override
    def _wanted_first(self) -> Collection[str]:
        whole = {id(parameter) for parameter in self._wrapper.persistent_parameters}
        return {name for name, parameter in self._parameters.items() if id(parameter) in whole}

    def _reassign(self, sub_group: int) -> None:
        if self._waits:
            return
        cast_already, self._cast = self._cast == sub_group, None
        if cast_already:
            self._wrapper._unflatten_partitioned_parameters(sub_group)
        else:
            self._original_cast(sub_group)


_STEPS: Final[dict[str, type[HostStep]]] = {
    "DeepSpeedZeroOptimizer": PartitionedStep,
    "DeepSpeedZeroOptimizer_Stage3": ShardedStep,
}


def _taken_with_the_copy(_param: torch.nn.Parameter) -> None:
    """Norm and overflow are known once the gradient has been copied."""
