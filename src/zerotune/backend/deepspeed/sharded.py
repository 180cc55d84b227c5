"""Stage 3: parameters are partitioned over all ranks; weights and states may be on NVMe.

DeepSpeed moves a whole model to the device before partitioning. ``shard_from_host`` instead uses
``zero.Init``, so that at most one whole parameter is on the device. When DeepSpeed's engine ends,
it leaves the module with empty weights, and with hooks that use a destroyed process group. A single
rank has all weights and restores them without copies. Several ranks would have to gather them,
which is impossible if the engine closes because a rank has failed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, cast

import torch
from torch.nn import functional
from typing_extensions import override

from zerotune._util.text import format_size
from zerotune.backend.accelerator import accelerator_of
from zerotune.backend.checks import DTYPES
from zerotune.backend.deepspeed.releasing import (
    RELEASING,
    WeightReleases,
    explain_missing_buffers,
)
from zerotune.backend.deepspeed.wrapper import (
    HostStep,
    OptimizerWrapper,
    Upstream,
    clear,
    read_at_once,
)
from zerotune.backend.engine import GONE, gone
from zerotune.backend.master_weights import (
    FragmentAddress,
    MasterLayout,
    OptimizerStates,
    Slab,
    SteppedLayout,
    check_master,
    full_shape,
)
from zerotune.backend.step.adams import SlabStep
from zerotune.backend.stored import make_room, stored_weight, waiting
from zerotune.decisions import Decision
from zerotune.errors import EngineError
from zerotune.plan.model import ResolvedPlan
from zerotune.plan.resolve import LEAF_CLASSES, LEAF_MODULE
from zerotune.platform import detect_platform

_STAGE_3: Final = "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3"
_SCATTER: Final = "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads"
"""A private method of stage 3, under its mangled name."""
STEP: Final = Upstream(
    owner=_STAGE_3,
    replaced=(
        "step",
        "_optimizer_step",
        "_post_step",
        "_get_norm_groups",
        "_offload_grad_partition_at_boundary",
        "_reassign_or_swap_out_partitioned_parameters",
        "unscale_and_clip_grads",
        _SCATTER,
    ),
)
SWAPPER: Final = Upstream(
    owner="deepspeed.runtime.swap_tensor.optimizer_utils.OptimizerSwapper",
    relied_on=("_swap_out_gradients", "is_swappable_tensor"),
    replaced=("_adjust_for_misaligned_lengths",),
)
LEAF_KEY: Final = f"zero_optimization.{LEAF_MODULE}"
_WRITTEN_BEHIND: Final = "async_swap_out"
"""Key of DeepSpeed's pipelined swapper for a sub-group that is still being written."""
_OF_PARAMETERS: Final = frozenset(
    {
        "_z3_optimizer",
        "aligned_size",
        "all_gather",
        "all_gather_coalesced",
        "convert_to_zero_parameters",
        "is_external_param",
        "item",
        "nvme_swapper",
        "padding_size",
        "partition",
        "partition_gradients",
        "partition_numel",
        "reduce_gradients_at_owner",
    }
)
_OF_MODULES: Final = frozenset(
    {
        "_external_params",
        "_original_parameters",
        "_z3_leaf",
        "all_parameters",
        "applied_pre_backward_ref_cnt",
        "post_bwd_fn",
        "pre_bwd_fn",
    }
)
"""Attributes that stage 3 of DeepSpeed 0.19.8 adds, besides names that begin with ``ds_``."""
_SHARE: Final = 0.9
"""Largest fraction of free host memory for weights restored from NVMe."""


class ShardedLayout(SteppedLayout):
    """Layout of stage 3: parameters are split over all ranks, and sub-groups may be on NVMe."""

    def __init__(self, *, module: torch.nn.Module, wrapper: Any, rank: int) -> None:
        self._wrapper = wrapper
        addresses, order = [], []
        self._model = dict(module.named_parameters())
        names = {id(parameter): name for name, parameter in self._model.items()}
        for sub_group, parameters in enumerate(wrapper.fp16_groups):
            for parameter in parameters:
                name, shape = names[id(parameter)], full_shape(parameter)
                order.append((name, shape))
                _, offset, count = wrapper.grad_position[wrapper.get_param_id(parameter)]
                start = min(count * rank, math.prod(shape))
                # The last rank's part is padded up to equal size.
                numel = min(count, math.prod(shape) - start)
                if numel > 0:
                    addresses.append(
                        FragmentAddress(
                            name=name,
                            shape=shape,
                            start=start,
                            numel=numel,
                            slab=sub_group,
                            offset=offset,
                        )
                    )
        super().__init__(addresses=tuple(addresses), order=tuple(order))

    @override
    def in_model(self, address: FragmentAddress) -> torch.Tensor | None:
        parameter = self._model[address.name]
        shard: Any = parameter.ds_tensor  # type: ignore[attr-defined]
        swapped = self._wrapper._swappable_optimizer_subgroup(address.slab)
        if swapped or shard.status.name != "AVAILABLE":
            return None
        if parameter.data.numel() == address.full_numel:
            # A persistent parameter is small and whole on every rank.
            return parameter.data.reshape(-1)[address.start : address.stop]
        return cast(torch.Tensor, shard.data).view(-1)[: address.numel]

    @property
    @override
    def tensors(self) -> Sequence[torch.Tensor]:
        return cast(Sequence[torch.Tensor], self._wrapper.fp32_partitioned_groups_flat)

    @override
    def states_at_rest(self, slab: int) -> OptimizerStates | None:
        states = OptimizerStates(self._wrapper.optimizer, self.tensors[slab])
        swapped = self._wrapper._swappable_optimizer_subgroup(slab)
        return None if swapped and not states.described_on_nvme else states

    @override
    @contextmanager
    def reading(self, slab: int) -> Iterator[Slab]:
        with self._resident(slab, leave=self._wrapper._release_swap_buffers) as resident:
            yield resident

    @override
    @contextmanager
    def writing(self, slab: int) -> Iterator[Slab]:
        with self._resident(slab, leave=self._leave_written) as resident:
            try:
                yield resident
            finally:
                # While the sub-group is in memory, its low-precision weights can be updated
                # without a second swap-in, even if the caller has stopped early.
                self._wrapper._reassign_or_swap_out_partitioned_parameters(slab)

    def _leave_written(self, slab: int) -> None:
        self._wrapper._optimizer_states_and_gradient_swap_out(slab)
        # With pipeline_write, DeepSpeed waits for this write only when it writes the next
        # sub-group. Here any sub-group may be read next, or gradients written without waiting.
        swapper = self._wrapper.optimizer_swapper
        if getattr(swapper, "swap_ops", {}).get(_WRITTEN_BEHIND) is not None:
            swapper._complete_swap_out(_WRITTEN_BEHIND)

    @contextmanager
    def _resident(self, slab: int, *, leave: Any) -> Iterator[Slab]:
        wrapper = self._wrapper
        key = wrapper.fp32_partitioned_groups_flat[slab]
        swapped = wrapper._swappable_optimizer_subgroup(slab)
        if swapped:
            wrapper._optimizer_states_and_gradient_swap_in(slab)
        try:
            check_master(key, f"sub-group {slab}")
            yield Slab(value=key.data, states=OptimizerStates(wrapper.optimizer, key))
        finally:
            if swapped:
                leave(slab)

    @override
    def refresh(self) -> None:
        # Whole copies must be updated as well: those of small parameters on every rank, and those
        # left over from a forward pass in evaluation mode.
        persistent = self._wrapper.persistent_parameters
        if persistent:
            persistent[0].partition(persistent)
        self._wrapper.empty_partition_cache()
        if persistent:
            persistent[0].all_gather(persistent)


class ShardedStep(HostStep):
    """Fused step of stage 3, with one slab (flat tensor) per sub-group, in memory or on NVMe."""

    upstream = STEP

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
            return "DeepSpeed reads the states from NVMe during the step"
        if any(flat is None for flat in self._wrapper.fp16_partitioned_groups_flat):
            return "DeepSpeed writes the weights to NVMe during the step"
        if not all(self._steps(index) for index in range(len(self._slabs))):
            return "DeepSpeed runs the step for the part of the optimizer on the device"
        return super().why_at_once()

    @override
    def install(self) -> None:
        super().install()
        wrapper = self._wrapper
        self._factor = 1.0
        self._cast: int | None = None
        self._waits = False
        self._begun: list[SlabStep] = []
        self._shrink_gradients()
        mine = {
            "_post_step": self._post_step,
            "_offload_grad_partition_at_boundary": self._take_gradient,
            "_get_norm_groups": self._norm_groups,
            "unscale_and_clip_grads": self._keep_factor,
            "_optimizer_step": self._step,
            "_reassign_or_swap_out_partitioned_parameters": self._reassign,
            _SCATTER: self._scatter,
        }
        self._originals = {name: getattr(wrapper, name) for name in mine}
        for name, method in mine.items():
            setattr(wrapper, name, method)

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
        """Copy a gradient to its buffer and compute its norm."""
        self.settle()
        wrapper = self._wrapper
        key = wrapper.get_param_id(param)
        index, offset, _ = wrapper.grad_position[key]
        if self._swaps(index):
            self._originals["_offload_grad_partition_at_boundary"](
                param, grad_buffer, gradients, offsets
            )
            return
        source = grad_buffer.view(-1)
        into = self._slabs[index].grad.narrow(0, offset, source.numel())
        together = source.device.type == "cpu" and source.dtype == into.dtype
        wrapper.norm_for_param_grads[key] = self._norm_of(source, into=into if together else None)
        if not together:
            into.copy_(source.to(into.dtype), non_blocking=True)

    def _scatter(self, params: list[torch.nn.Parameter], dtype: torch.dtype) -> list[torch.Tensor]:
        """On a single rank, return gradients directly; DeepSpeed would copy and exchange them."""
        wrapper = self._wrapper
        ranks = self._home.dist.get_world_size(group=wrapper._get_param_partition_group(params[0]))
        same = dtype == wrapper.dtype == wrapper.gradient_accumulation_dtype
        if ranks > 1 or not same or wrapper.gradient_predivide_factor != 1.0:
            scattered: list[torch.Tensor] = self._originals[_SCATTER](params, dtype)
            return scattered
        return [cast(torch.Tensor, param.grad).reshape(-1) for param in params]

    def _norm_groups(self) -> Any:
        read_at_once(self._wrapper.norm_for_param_grads)
        self._forget_unused()
        return self._originals["_get_norm_groups"]()

    def _keep_factor(self, sub_group: int, total_norm: torch.Tensor) -> None:
        """Store DeepSpeed's clipping factor instead of multiplying the gradients by it."""
        wrapper = self._wrapper
        if not self._steps(sub_group):
            self._originals["unscale_and_clip_grads"](sub_group, total_norm)
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
        # If the low-precision weights are on a device or on NVMe, DeepSpeed writes them.
        here = out is not None and self._is_here(out)
        if sub_group == 0:
            self._begun, self._waits = [], self._may_wait()
        if not self._steps(sub_group):
            self._cast = None
            self._originals["_optimizer_step"](sub_group)
            return

        def run(_adam: torch.optim.Optimizer) -> None:
            self._adam.rewind()
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
                sources.append(None if here else step.masters.read())
                targets.append(None if here else flat.data.view(-1))
            for index in range(len(begun)):
                self._wrapper._unflatten_partitioned_parameters(index)
            self._launch(begun, self._upload(sources, targets))
        self._originals["_post_step"](timer_names)

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
        written, self._cast = self._cast == sub_group, None
        if written:
            self._wrapper._unflatten_partitioned_parameters(sub_group)
        else:
            self._originals["_reassign_or_swap_out_partitioned_parameters"](sub_group)


class ShardedWrapper(OptimizerWrapper):
    """Adapter for ``DeepSpeedZeroOptimizer_Stage3``."""

    upstream = (
        Upstream(
            owner=_STAGE_3,
            relied_on=(
                "_get_norm_groups",
                "_optimizer_states_and_gradient_swap_in",
                "_optimizer_states_and_gradient_swap_out",
                "_overflow_clean_up",
                "_partition_all_parameters",
                "_pre_step",
                "_reassign_or_swap_out_partitioned_parameters",
                "_release_swap_buffers",
                "_swappable_optimizer_subgroup",
                "create_reduce_and_remove_grad_hooks",
                "empty_partition_cache",
                "get_param_id",
                "set_grad_positions",
            ),
        ),
        Upstream(
            owner="deepspeed.runtime.zero.partition_parameters.Init",
            relied_on=(
                "_convert_to_deepspeed_param",
                "_enable_mem_efficient_linear",
                "_zero_init_param",
            ),
        ),
        SWAPPER,
        STEP,
        *RELEASING,
    )
    step_kind = ShardedStep

    @override
    def _find_layout(self) -> MasterLayout:
        return ShardedLayout(
            module=self.engine.module, wrapper=self.raw, rank=self.engine.global_rank
        )

    @property
    @override
    def members(self) -> Sequence[Sequence[torch.Tensor]]:
        members: list[list[torch.Tensor]] = [[] for _ in self.inner.param_groups]
        for sub_group, parameters in enumerate(self.raw.fp16_groups):
            members[self.raw.sub_group_to_group_id[sub_group]].extend(parameters)
        return members

    @property
    @override
    def devices(self) -> tuple[str, str]:
        raw = self.raw
        optimizer = "nvme" if raw.swap_optimizer else "cpu" if raw.offload_optimizer else "none"
        parameters = "cpu" if raw.offload_param else "none"
        return optimizer, "nvme" if raw.params_in_nvme_and_cpu else parameters

    @property
    @override
    def _editors(self) -> Iterable[Any]:
        return (self.raw,)

    @override
    def drop_gradients(self) -> None:
        raw = self.raw
        raw._pre_step()
        raw._partition_all_parameters()
        raw._overflow_clean_up(None)
        raw.inf_or_nan_tracker.zero_()
        clear([raw.grad_partitions_flat_buffer])
        clear(getattr(flat, "grad", None) for flat in raw.fp32_partitioned_groups_flat)

    @override
    def correct(self) -> tuple[Decision, ...]:
        untouched = self.engine.global_steps == self.engine.micro_steps == 0
        return (
            *(self._reduce_by_parameter() if untouched else ()),
            *self._release_by_gradient(),
            *align_swapped_gradients(self.engine),
        )

    def _release_by_gradient(self) -> tuple[Decision, ...]:
        WeightReleases(self.raw)
        explain_missing_buffers(self.engine.module)
        return (
            Decision(
                key="zero_optimization.gathered_weights",
                before="until the gradients of their module's inputs have come",
                after="until their own gradients have come",
                reason="DeepSpeed keeps weights gathered until the backward pass ends if their "
                "module's inputs need no gradient, as for a text embedding, and gathers the "
                "weights of recomputed blocks twice",
            ),
        )

    def _reduce_by_parameter(self) -> tuple[Decision, ...]:
        """Reduce gradients of zerotune's leaf modules by parameter. Collective.

        DeepSpeed reduces all of a leaf module's gradients after each of its backward passes. If the
        module is called twice before the backward pass, the first reduction fills missing gradients
        with zeros, and the second fails on ``assert len(set(…)) == len(params_in_bucket)``.
        Reducing by module is meant for experts that may get no gradient. zerotune's blocks always
        get gradients; they are leaf modules only to be fetched as a whole. Leaf modules of the user
        are not changed.
        """
        leaves = self.raw.leaf_parameters
        changed = [leaf for leaf in leaves if type(leaf).__name__ in LEAF_CLASSES]
        if not changed:
            return ()
        for leaf in changed:
            for parameter in leaves[leaf]:
                del parameter.ds_z3_leaf_module
        for hooks in (self.raw._grad_acc_hooks, self.raw._leaf_module_hooks):
            while hooks:
                hooks.pop().remove()
        self.raw.create_reduce_and_remove_grad_hooks()
        names = sorted({type(leaf).__name__ for leaf in changed})
        return (
            Decision(
                key=f"{LEAF_KEY}.gradients",
                before="per module",
                after="per parameter",
                reason=f"{', '.join(names)}: weights are fetched per module, but gradients are "
                "reduced per parameter, because reducing them per module fails if a model is "
                "called twice before a backward pass",
            ),
        )

    @override
    def refused(self) -> EngineError | None:
        leaves = self.raw.leaf_parameters
        if not leaves:
            return None
        return EngineError(
            "DeepSpeed cannot reduce the gradients of a leaf module that is called several times "
            "before one backward pass",
            key=f"{LEAF_KEY}.classes",
            value=sorted({type(leaf).__name__ for leaf in leaves}),
            fix="remove the classes of modules that are called more than once (an empty list "
            "disables leaf modules), or call the model once with both batches concatenated",
        )

    @override
    def improve(self) -> tuple[Decision, ...]:
        """Apply the schedule to the part of the optimizer that is not offloaded.

        With ``offload_optimizer.ratio`` below 1, DeepSpeed updates the first sub-groups with a
        separate AdamW. The learning rate of this AdamW never changes, and no checkpoint contains
        its states.
        """
        beside = getattr(self.raw, "backup_optimizer", None)
        if beside is None:
            return ()
        for group, its_own in zip(self.inner.param_groups, beside.param_groups, strict=True):
            for name, value in its_own.items():
                group.setdefault(name, value)
            # A fused kernel without temporaries, if torch has one for the device.
            group["fused"] = accelerator_of(self.engine.device).streams is not None or None
        beside.param_groups = self.inner.param_groups
        beside.state = self.inner.state
        beside.register_step_pre_hook(_count_as_torch)
        return (
            Decision(
                key="zero_optimization.offload_optimizer.ratio",
                before="only the offloaded part follows the schedule",
                after="the whole optimizer follows the schedule",
                reason="DeepSpeed's separate optimizer for the device would keep its initial "
                "learning rate, and its states would not be saved; zerotune makes it share groups "
                "and states with the offloaded optimizer",
            ),
        )


def _count_as_torch(adam: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    """Convert step counters that DeepSpeed or a checkpoint stored as numbers to tensors."""
    for group in adam.param_groups:
        for parameter in group["params"]:
            state = adam.state.get(parameter)
            if state:
                device = parameter.device if group.get("fused") else torch.device("cpu")
                state["step"] = torch.as_tensor(float(state["step"]), device=device)


def align_swapped_gradients(engine: Any) -> tuple[Decision, ...]:
    """Make steps read the right gradients from NVMe.

    DeepSpeed 0.19.8 uses direct I/O to read a swapped gradient into the sub-group's buffer, at the
    gradient's offset. If the offset is not a multiple of the sector size, the read fails, and
    DeepSpeed ignores the error. The optimizer then silently uses stale data for every unaligned
    gradient of at least 1 MiB. Likewise for a weight that got no gradient: DeepSpeed reads nothing
    or the gradient of an earlier step, and the buffer may contain another weight's gradient.

    Args:
        engine: DeepSpeed's engine.
    """
    raw = engine.optimizer
    swapper = getattr(raw, "optimizer_swapper", None)
    if swapper is None:
        return ()
    reason = (
        "only aligned parts of gradients are swapped, and the few remaining elements stay in host "
        "memory, because DeepSpeed reads unaligned gradients back incorrectly; zeros are swapped "
        "for weights without a gradient, which DeepSpeed would update with other gradients"
    )
    if (changed := SWAPPER.changed()) is None:
        swapper._adjust_for_misaligned_lengths = partial(split_aligned, swapper)
        raw._get_norm_groups = partial(_after_swapping_zeros, raw, raw._get_norm_groups)
    else:
        reason = f"{changed}, so zerotune leaves gradient swapping to DeepSpeed, which may read "
        reason += "unaligned and missing gradients back incorrectly, as release 0.19.8 does"
    return (
        Decision(
            key="zero_optimization.offload_optimizer.device",
            before="nvme",
            after="nvme",
            reason=reason,
            severity="note" if changed is None else "warning",
        ),
    )


def _after_swapping_zeros(raw: Any, get_norm_groups: Callable[[], Any]) -> Any:
    """Swap out zeros for weights that got no gradient before the step swaps gradients in."""
    for index, parameters in enumerate(raw.fp16_groups):
        for parameter in parameters if raw._swappable_optimizer_subgroup(index) else ():
            key = raw.get_param_id(parameter)
            if key not in raw.norm_for_param_grads:
                _, offset, numel = raw.grad_position[key]
                raw.optimizer_swapper.swap_out_gradients(
                    parameter=raw.fp32_partitioned_groups_flat[index],
                    gradient_offsets=[offset],
                    gradient_tensors=[torch.zeros(numel, dtype=raw.optimizer_swapper.dtype)],
                )
    return get_norm_groups()


def split_aligned(
    swapper: Any, tensors: list[torch.Tensor], offsets: list[int]
) -> tuple[list[torch.Tensor], list[int]]:
    """Divide gradients into parts that are swapped and parts that stay in memory.

    The function replaces ``OptimizerSwapper._adjust_for_misaligned_lengths``, which aligns only the
    end of a gradient.

    Args:
        swapper: DeepSpeed's swapper, which defines the alignment and the smallest size of a swapped
            gradient.
        tensors: Gradients, 1-D.
        offsets: Offset of each gradient in the sub-group.

    Returns:
        All parts, and their offsets in the sub-group.
    """
    unit = swapper.numel_alignment
    parts: list[torch.Tensor] = []
    places: list[int] = []
    for tensor, offset in zip(tensors, offsets, strict=True):
        length = tensor.numel()
        head = min(-offset % unit, length) if swapper.is_swappable_tensor(tensor=tensor) else length
        body = (length - head) // unit * unit
        cuts = ((0, head), (head, body), (head + body, length - head - body))
        for start, size in cuts:
            if size:
                parts.append(tensor.narrow(0, start, size))
                places.append(offset + start)
    return parts, places


def leaf_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules that DeepSpeed has marked as leaf modules."""
    return [module for module in model.modules() if getattr(module, "_z3_leaf", False) is True]


def named_leaf_modules(plan: ResolvedPlan, model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules of the leaf classes that the plan names.

    Args:
        plan: The resolved plan.
        model: The model.
    """
    classes = _leaf_classes(plan)
    return [
        module
        for module in model.modules()
        if type(module).__name__ in classes
        or f"{type(module).__module__}.{type(module).__qualname__}" in classes
    ]


def doubtful_leaf_modules(plan: ResolvedPlan, model: torch.nn.Module) -> tuple[Decision, ...]:
    """Return warnings about leaf modules that do not exist or cannot be trained.

    If a leaf module is called with keyword arguments, DeepSpeed releases the module's weights
    before the backward pass needs them.

    Args:
        plan: The resolved plan.
        model: The model.
    """
    named, classes = (
        _leaf_classes(plan),
        {type(m).__name__ for m in named_leaf_modules(plan, model)},
    )
    value, why = named, "the model has no modules of these classes"
    if classes:
        value = sorted(classes - LEAF_CLASSES)
        why = "DeepSpeed cannot train leaf modules that are called with keyword arguments"
    if not value:
        return ()
    return (Decision(key=LEAF_KEY, before=value, after=value, reason=why, severity="warning"),)


def _leaf_classes(plan: ResolvedPlan) -> list[str]:
    zero = plan.plan.zero_optimization
    written: Any = None if zero is None else zero.extra.get(LEAF_MODULE)
    classes = written.get("classes", ()) if isinstance(written, dict) else ()
    return [classes] if isinstance(classes, str) else [str(name) for name in classes]


_linear: Final[list[Any]] = []
"""``torch.nn.functional.linear`` from before stage 3, once per open engine."""


@contextmanager
def lending_linear() -> Iterator[None]:
    """After the last engine ends, restore torch's ``linear`` function, which DeepSpeed replaces."""
    _linear.append(_linear[0] if _linear else functional.linear)
    try:
        yield
    finally:
        before = _linear.pop()
        # Keep a later replacement by other code.
        if not _linear and functional.linear.__module__.startswith("deepspeed."):
            functional.linear = before


def refuse_empty_tensors(engine: Any) -> list[Any]:
    """Make ``state_dict`` of partitioned modules raise, except in DeepSpeed's checkpoints.

    Scripts would otherwise save empty tensors with ``save_pretrained``, ``torch.save`` or PEFT.

    Args:
        engine: DeepSpeed's engine at stage 3.

    Returns:
        Handles that remove the check from each module.
    """
    of_deepspeed, saving = engine.module_state_dict, False
    parameters = list(engine.module.parameters())

    def module_state_dict(*args: Any, **kwargs: Any) -> Any:
        nonlocal saving
        saving = True
        try:
            return of_deepspeed(*args, **kwargs)
        finally:
            saving = False

    def is_empty(parameter: torch.nn.Parameter) -> bool:
        return parameter.numel() == 0 and 0 not in full_shape(parameter)

    def check(module: torch.nn.Module, *_: Any) -> None:
        if saving or not any(map(is_empty, module.parameters(recurse=False))):
            return
        raise EngineError(
            f"ZeRO-3 has partitioned {sum(map(is_empty, parameters))} of {len(parameters)} "
            "parameters, so the model's state_dict and save_pretrained would write empty tensors",
            key="model.state_dict",
            fix="on every rank, call zerotune.export_model(path, engine=engine), export_pipeline "
            "or export_adapters",
        )

    engine.module_state_dict = module_state_dict
    return [module.register_state_dict_post_hook(check) for module in engine.module.modules()]


@contextmanager
def restored(module: torch.nn.Module, optimizer: Any, *, world_size: int) -> Iterator[None]:
    """When DeepSpeed's engine ends inside the block, restore the module's weights.

    If the weights cannot be restored, every use of the module raises an error with the reason.

    Args:
        module: The module that the engine trains.
        optimizer: DeepSpeed's stage-3 optimizer. It loses its gradients, since weights that are
            read from NVMe need their memory.
        world_size: Number of ranks.
    """
    _free_gradients(optimizer)
    reason: str | None = f"the model's weights were partitioned over {world_size} ranks"
    if world_size == 1:
        reason = _too_large(module)
    weights = {} if reason is not None else dict(_whole_weights(module))
    yield
    _forget(module)
    if reason is not None:

        def refuse(asked: torch.nn.Module, *_: Any) -> None:
            raise gone(asked, reason)

        vars(module)[GONE] = reason
        module.register_forward_pre_hook(refuse, prepend=True)
        module.register_state_dict_pre_hook(refuse)  # type: ignore[no-untyped-call]
        return
    for each in module.modules():
        each._parameters = dict(each._parameters.items())
        _strip(each, _OF_MODULES)
    for parameter, whole in weights.items():
        _strip(parameter, _OF_PARAMETERS)
        parameter.data = whole
        parameter.grad = None


def _forget(module: torch.nn.Module) -> None:
    """Remove a model from the list that DeepSpeed keeps, and reads for the next engine's model."""
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK

    ended = set(module.modules())
    FWD_MODULE_STACK[:] = [each for each in FWD_MODULE_STACK if each not in ended]


def _free_gradients(optimizer: Any) -> None:
    from deepspeed.accelerator import get_accelerator

    buffer = optimizer.grad_partitions_flat_buffer
    if buffer is not None:
        # Frees only what DeepSpeed has page-locked itself.
        get_accelerator().unpin_memory(buffer)
        optimizer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition.clear()
        optimizer.grad_partitions_flat_buffer = None


def _too_large(module: torch.nn.Module) -> str | None:
    """Why weights on NVMe cannot be restored to host memory; ``None`` if they can."""
    swapped = sum(
        held.ds_numel * held.element_size()
        for held in cast("Iterator[Any]", module.parameters())
        if hasattr(held, "ds_tensor") and not _in_memory(held)
    )
    if swapped == 0 or swapped <= _SHARE * (free := detect_platform().host_memory.available):
        return None
    return (
        f"the model's weights on NVMe ({format_size(swapped)}) do not fit in host memory "
        f"({format_size(free)} free)"
    )


def _in_memory(held: Any) -> bool:
    return bool(held.ds_tensor.status.name == "AVAILABLE")


def _whole_weights(module: torch.nn.Module) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    # Memory that DeepSpeed page-locks itself is freed with its engine.
    borrowed = os.environ.get("DS_PIN_MEMORY_BACKEND") == "native"
    for parameter in module.parameters():
        held: Any = parameter
        if not hasattr(held, "ds_tensor"):
            continue
        if _in_memory(held):
            flat = held.ds_tensor.data.narrow(0, 0, held.ds_numel)
            yield parameter, (flat.clone() if borrowed else flat).view(held.ds_shape)
            continue
        held.all_gather()  # The parameter is on NVMe.
        yield parameter, parameter.data.detach().to("cpu", copy=True)
        held.partition()


def _strip(owner: torch.nn.Module | torch.nn.Parameter, names: frozenset[str]) -> None:
    for name in [name for name in vars(owner) if name in names or name.startswith("ds_")]:
        del vars(owner)[name]


def shard_from_host(
    deepspeed: Any, model: torch.nn.Module, plan: ResolvedPlan, *, device: torch.device
) -> None:
    """Partition a model in place for stage 3.

    ``zero.Init`` neither casts weights nor moves buffers, so the weights are cast before
    partitioning, and the buffers are moved afterwards. If weights are still in files, each rank
    reads only its part of them, without communication.

    Args:
        deepspeed: The module.
        model: Model in host memory, in any floating-point dtype; may be partitioned already.
        plan: The resolved plan for stage 3, with its swap folders set.
        device: Device for the buffers.
    """
    dtype = DTYPES[plan.precision]
    for parameter in model.parameters():
        if not hasattr(parameter, "ds_id") and parameter.dtype in DTYPES.values():
            # Parameters on the meta device stay there.
            parameter.data = parameter.data.to(dtype)
    # zero.Init reads the world size, which DeepSpeed assumes to be 1 before this call.
    accelerator = deepspeed.accelerator.get_accelerator()
    deepspeed.comm.init_distributed(
        dist_backend=accelerator.communication_backend_name(), dist_init_required=False
    )
    config = plan.to_deepspeed()
    if waiting(model):
        _partition_waiting(deepspeed, deepspeed.zero.Init(config_dict_or_path=config), model)
    else:
        deepspeed.zero.Init(module=model, config_dict_or_path=config)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)


def _partition_waiting(deepspeed: Any, init: Any, model: torch.nn.Module) -> None:
    """Partition like ``zero.Init``, but read this rank's part of each weight from its file."""
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
            # A second partition over fewer ranks (hpZ) needs a larger part.
            start, part = 0, parameter.numel()
        mine = parameter.detach().view(-1)[start : start + part]
        weight.read_into(mine, start=start)
        parameter.partition()  # type: ignore[attr-defined]
