"""Stage 3: every parameter is split over all ranks, and its part or its states may lie on NVMe.

DeepSpeed moves a model to the device as a whole before it partitions it; ``shard_from_host`` does
so through ``zero.Init``, and no more than one whole parameter is ever on the device. An engine
leaves a module behind whose weights are empty, and whose hooks ask for a process group that has
ended. One rank alone holds all weights, so it can put them back without copying any. Several ranks
would have to gather them, which nobody may ask of a rank that closes because it failed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, cast

import torch
from torch.nn import functional
from typing_extensions import override

from zerotune._util.text import format_size
from zerotune.backend.checks import DTYPES
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
"""A private method of stage 3, under the name Python gives it."""
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
    relied_on=("is_swappable_tensor",),
    replaced=("_adjust_for_misaligned_lengths",),
)
LEAF_KEY: Final = f"zero_optimization.{LEAF_MODULE}"
_WRITTEN_BEHIND: Final = "async_swap_out"
"""What DeepSpeed's pipelined swapper calls a sub-group that it is still writing."""
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
"""What stage 3 of DeepSpeed 0.19.8 adds, beside names that begin with ``ds_``."""
_SHARE: Final = 0.9
"""Of the free host memory, what weights from NVMe may take."""


class ShardedLayout(SteppedLayout):
    """Stage 3: every parameter is split over all ranks; sub-groups may lie on NVMe."""

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

    @property
    @override
    def optimizer(self) -> torch.optim.Optimizer | None:
        return cast(torch.optim.Optimizer, self._wrapper.optimizer)

    @override
    def in_model(self, address: FragmentAddress) -> torch.Tensor | None:
        parameter = self._model[address.name]
        shard: Any = parameter.ds_tensor  # type: ignore[attr-defined]
        swapped = self._wrapper._swappable_optimizer_subgroup(address.slab)
        if swapped or shard.status.name != "AVAILABLE":
            return None
        if parameter.data.numel() == address.full_numel:
            # Small enough to be whole on every rank.
            return parameter.data.reshape(-1)[address.start : address.stop]
        return cast(torch.Tensor, shard.data).view(-1)[: address.numel]

    @property
    @override
    def swapped_out(self) -> bool:
        swappable = self._wrapper._swappable_optimizer_subgroup
        return any(swappable(slab) for slab in range(len(self.tensors)))

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
                # While the sub-group is in memory, its low-precision part can follow without
                # bringing it in a second time; also where the caller has stopped after a part.
                self._wrapper._reassign_or_swap_out_partitioned_parameters(slab)

    def _leave_written(self, slab: int) -> None:
        self._wrapper._optimizer_states_and_gradient_swap_out(slab)
        # With pipeline_write DeepSpeed waits for it at the next sub-group that it writes. Here any
        # may be read next, or gradients written, which waits for nothing but themselves.
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
        # Whole copies must follow the shards: those of small parameters, which every rank keeps,
        # and those that a forward pass in evaluation mode leaves behind.
        persistent = self._wrapper.persistent_parameters
        if persistent:
            persistent[0].partition(persistent)
        self._wrapper.empty_partition_cache()
        if persistent:
            persistent[0].all_gather(persistent)


class ShardedStep(HostStep):
    """Stage 3: one slab per sub-group, in memory or brought in from NVMe by DeepSpeed."""

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
        """Copy a gradient to its buffer and take its norm."""
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
        """Of one rank alone, all gradients are its own: what DeepSpeed joins, divides and sends."""
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
        """As DeepSpeed's clipping, but for the multiplication."""
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
        # Low-precision weights on a device or on NVMe are written by DeepSpeed.
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
    """``DeepSpeedZeroOptimizer_Stage3``."""

    upstream = (
        Upstream(
            owner=_STAGE_3,
            relied_on=(
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
            *align_swapped_gradients(self.engine),
        )

    def _reduce_by_parameter(self) -> tuple[Decision, ...]:
        """Let the gradients of leaf modules be reduced as all others: each once it is whole.

        DeepSpeed reduces all of a leaf module's gradients after each of its backward passes. Called
        twice before one backward pass, the first reduction finds gradients that are not there yet,
        fills in zeros, and the second fails on ``assert len(set(…)) == len(params_in_bucket)``.
        That waiting is meant for experts that may go without a gradient; the blocks zerotune
        fetches as a whole have one each time, so their weights need it for fetching alone. Other
        leaf modules stay as they are. Collective.
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
                before="by module",
                after="by parameter",
                reason=f"{', '.join(names)}: fetched as a whole, but reduced one by one, since "
                "DeepSpeed's way fails where a model is called twice before one backward pass",
            ),
        )

    @override
    def refused(self) -> EngineError | None:
        leaves = self.raw.leaf_parameters
        if not leaves:
            return None
        return EngineError(
            "DeepSpeed reduces the gradients of leaf modules after each of their forward passes, "
            "and cannot where there were several before one backward pass",
            key=f"{LEAF_KEY}.classes",
            value=sorted({type(leaf).__name__ for leaf in leaves}),
            fix="take out those that are called more than once (an empty list: no leaf modules), "
            "or call the model once, with both batches joined",
        )

    @override
    def improve(self) -> tuple[Decision, ...]:
        """Let the Adam of the part that is not offloaded follow the schedule, and be seen.

        With ``offload_optimizer.ratio`` below 1 DeepSpeed steps the first sub-groups with an AdamW
        of its own. That keeps the first group's learning rate of the moment it was made, so that no
        schedule reaches it, and its states are in no checkpoint.
        """
        beside = getattr(self.raw, "backup_optimizer", None)
        if beside is None:
            return ()
        for group, its_own in zip(self.inner.param_groups, beside.param_groups, strict=True):
            for name, value in its_own.items():
                group.setdefault(name, value)
            # One kernel and no temporaries, where torch has that for the device.
            group["fused"] = self.engine.device.type == "cuda" or None
        beside.param_groups = self.inner.param_groups
        beside.state = self.inner.state
        beside.register_step_pre_hook(_count_as_torch)
        return (
            Decision(
                key="zero_optimization.offload_optimizer.ratio",
                before="the schedule reaches the offloaded part",
                after="the schedule reaches all of it",
                reason="DeepSpeed steps what stays on the device with an optimizer that keeps its "
                "first learning rate and whose states are not saved; both share groups and states "
                "now",
            ),
        )


def _count_as_torch(adam: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    """Steps that were counted as a number, by DeepSpeed or a checkpoint, become tensors."""
    for group in adam.param_groups:
        for parameter in group["params"]:
            state = adam.state.get(parameter)
            if state:
                device = parameter.device if group.get("fused") else torch.device("cpu")
                state["step"] = torch.as_tensor(float(state["step"]), device=device)


def align_swapped_gradients(engine: Any) -> tuple[Decision, ...]:
    """Let every gradient on NVMe begin where direct I/O can read it back.

    DeepSpeed 0.19.8 reads a swapped gradient straight to its place in the sub-group's buffer.
    Where that is no multiple of the sector size the kernel refuses, nobody looks at the refusal,
    and the optimizer steps on what the buffer held before: every gradient of 1 MiB or more is
    wrong, in silence, unless it happens to lie at an aligned offset.
    """
    swapper = getattr(engine.optimizer, "optimizer_swapper", None)
    if swapper is None:
        return ()
    reason = (
        "gradients are swapped from aligned offsets on; DeepSpeed itself reads others back wrong, "
        "and their few unaligned elements stay in host memory"
    )
    if (changed := SWAPPER.changed()) is None:
        swapper._adjust_for_misaligned_lengths = partial(split_aligned, swapper)
    else:
        reason = f"{changed}, so gradients are swapped in DeepSpeed's way, which read unaligned "
        reason += "ones back wrong in 0.19.8"
    return (
        Decision(
            key="zero_optimization.offload_optimizer.device",
            before="nvme",
            after="nvme",
            reason=reason,
            severity="note" if changed is None else "warning",
        ),
    )


def split_aligned(
    swapper: Any, tensors: list[torch.Tensor], offsets: list[int]
) -> tuple[list[torch.Tensor], list[int]]:
    """Cut gradients into parts that swap and parts that stay in memory.

    Replaces ``OptimizerSwapper._adjust_for_misaligned_lengths``, which aligns only the end.

    Args:
        swapper: DeepSpeed's swapper, for its alignment and its smallest size.
        tensors: 1-D gradients.
        offsets: Where each begins in the sub-group.
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
    """Those that DeepSpeed has marked."""
    return [module for module in model.modules() if getattr(module, "_z3_leaf", False) is True]


def named_leaf_modules(plan: ResolvedPlan, model: torch.nn.Module) -> list[torch.nn.Module]:
    """Those of the classes that the plan names."""
    classes = _leaf_classes(plan)
    return [
        module
        for module in model.modules()
        if type(module).__name__ in classes
        or f"{type(module).__module__}.{type(module).__qualname__}" in classes
    ]


def doubtful_leaf_modules(plan: ResolvedPlan, model: torch.nn.Module) -> tuple[Decision, ...]:
    """Warn of leaf modules that do not exist or cannot train, of which DeepSpeed says nothing.

    Called with keywords, a leaf module's weights are gone before the backward pass needs them.
    """
    named, classes = (
        _leaf_classes(plan),
        {type(m).__name__ for m in named_leaf_modules(plan, model)},
    )
    value, why = named, "the model has no such modules"
    if classes:
        value = sorted(classes - LEAF_CLASSES)
        why = "DeepSpeed cannot train leaf modules that are called with keywords"
    if not value:
        return ()
    return (Decision(key=LEAF_KEY, before=value, after=value, reason=why, severity="warning"),)


def _leaf_classes(plan: ResolvedPlan) -> list[str]:
    zero = plan.plan.zero_optimization
    written: Any = None if zero is None else zero.extra.get(LEAF_MODULE)
    classes = written.get("classes", ()) if isinstance(written, dict) else ()
    return [classes] if isinstance(classes, str) else [str(name) for name in classes]


_linear: Final[list[Any]] = []
"""What ``torch.nn.functional.linear`` was before stage 3: once for each engine that is open."""


@contextmanager
def lending_linear() -> Iterator[None]:
    """Restore ``torch.nn.functional.linear``, which DeepSpeed replaces, after the last engine."""
    _linear.append(_linear[0] if _linear else functional.linear)
    try:
        yield
    finally:
        before = _linear.pop()
        # What somebody else has put there since is not DeepSpeed's.
        if not _linear and functional.linear.__module__.startswith("deepspeed."):
            functional.linear = before


@contextmanager
def restored(module: torch.nn.Module, *, world_size: int) -> Iterator[None]:
    """Around the end of DeepSpeed's engine: put a module's weights back, and remove stage 3.

    Where they cannot be put back, each use of the module says why.
    """
    reason: str | None = f"its weights were partitioned over {world_size} ranks"
    if world_size == 1:
        reason = _too_large(module)
    weights = {} if reason is not None else dict(_whole_weights(module))
    yield
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


def _too_large(module: torch.nn.Module) -> str | None:
    """Why weights that lie on NVMe cannot be brought into host memory; ``None``: they can."""
    swapped = sum(
        held.ds_numel * held.element_size()
        for held in cast("Iterator[Any]", module.parameters())
        if hasattr(held, "ds_tensor") and not _in_memory(held)
    )
    if swapped == 0 or swapped <= _SHARE * (free := detect_platform().host_memory.available):
        return None
    return (
        f"its weights on NVMe ({format_size(swapped)}) do not fit into host memory "
        f"({format_size(free)} free)"
    )


def _in_memory(held: Any) -> bool:
    return bool(held.ds_tensor.status.name == "AVAILABLE")


def _whole_weights(module: torch.nn.Module) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    # Page-locked memory of DeepSpeed's own ends with its engine.
    borrowed = os.environ.get("DS_PIN_MEMORY_BACKEND") == "native"
    for parameter in module.parameters():
        held: Any = parameter
        if not hasattr(held, "ds_tensor"):
            continue
        if _in_memory(held):
            flat = held.ds_tensor.data.narrow(0, 0, held.ds_numel)
            yield parameter, (flat.clone() if borrowed else flat).view(held.ds_shape)
            continue
        held.all_gather()  # It lies on NVMe.
        yield parameter, parameter.data.detach().to("cpu", copy=True)
        held.partition()


def _strip(owner: torch.nn.Module | torch.nn.Parameter, names: frozenset[str]) -> None:
    for name in [name for name in vars(owner) if name in names or name.startswith("ds_")]:
        del vars(owner)[name]


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
        plan: Of stage 3, with its swap folders set.
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
        _partition_waiting(deepspeed, deepspeed.zero.Init(config_dict_or_path=config), model)
    else:
        deepspeed.zero.Init(module=model, config_dict_or_path=config)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)


def _partition_waiting(deepspeed: Any, init: Any, model: torch.nn.Module) -> None:
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
