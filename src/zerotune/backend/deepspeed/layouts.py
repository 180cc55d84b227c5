"""Where each kind of engine keeps its master weights.

What is relied on is named in ``zerotune.backend.upstream.RELIED_ON`` too, and checked at start.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, cast

import torch
from typing_extensions import override

from zerotune.backend.layouts import (
    ParameterLayout,
    ResidentLayout,
    SteppedLayout,
    check_master,
    full_shape,
    trainable_parameters,
    whole,
)
from zerotune.backend.master_weights import FragmentAddress, MasterLayout, OptimizerStates, Slab
from zerotune.errors import UnsupportedEngineError


def inner_optimizer(engine: Any) -> Any:
    """The optimizer that a ``deepspeed.DeepSpeedEngine`` steps, out of its ZeRO wrapper."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


class HalfPrecisionLayout(ResidentLayout):
    """Stage 0 in bf16 or fp16: a flat fp32 copy per group, or one copy per parameter."""

    replicated = True

    def __init__(self, *, module: torch.nn.Module, wrapper: Any) -> None:
        names = _names(module)
        slabs, addresses, self._pairs = [], [], []
        flat = hasattr(wrapper, "fp32_groups_flat")
        for index, group in enumerate(wrapper.fp16_groups):
            offset = 0
            if flat:
                slabs.append(wrapper.fp32_groups_flat[index])
            for position, parameter in enumerate(group):
                if not flat:
                    slabs.append(wrapper.fp32_groups[index][position])
                    offset = 0
                addresses.append(
                    whole(names[id(parameter)], parameter, slab=len(slabs) - 1, offset=offset)
                )
                self._pairs.append((parameter, addresses[-1]))
                offset += parameter.numel()
        self._model = {address.name: parameter for parameter, address in self._pairs}
        super().__init__(
            optimizer=wrapper.optimizer,
            slabs=slabs,
            addresses=tuple(addresses),
            order=tuple((address.name, address.shape) for address in addresses),
        )

    @override
    def in_model(self, address: FragmentAddress) -> torch.Tensor | None:
        weights: torch.Tensor = self._model[address.name].data
        return weights.reshape(-1)

    @override
    def refresh(self) -> None:
        for parameter, address in self._pairs:
            flat = self._slabs[address.slab].detach().view(-1)
            master = flat.narrow(0, address.offset, address.numel)
            parameter.data.copy_(master.view_as(parameter))


_WRITTEN_BEHIND: Final = "async_swap_out"
"""What DeepSpeed's pipelined swapper calls a sub-group that it is still writing."""


class PartitionedLayout(SteppedLayout, ResidentLayout):
    """Stages 1 and 2: each rank owns a contiguous part of every flat group."""

    def __init__(self, *, module: torch.nn.Module, wrapper: Any) -> None:
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
        # Several groups interleave in named_parameters(); the shared order must not.
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


class ShardedLayout(SteppedLayout):
    """Stage 3: every parameter is split over all ranks; sub-groups may lie on NVMe."""

    def __init__(self, *, module: torch.nn.Module, wrapper: Any, rank: int) -> None:
        self._wrapper = wrapper
        addresses, order = [], []
        names = _names(module)
        self._model = dict(module.named_parameters())
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


def note_edits(wrapper: Any, layout: MasterLayout) -> None:
    """Have a layout know of master weights that are written through DeepSpeed itself.

    ``safe_set_full_fp32_param`` and the like write them, and the model follows with the next step.

    Args:
        wrapper: DeepSpeed's optimizer, of any stage.
        layout: Of its master weights.
    """
    setters = ("set_full_hp_param", "set_local_hp_param")
    owners = [wrapper, *(p for group in getattr(wrapper, "bit16_groups", ()) for p in group)]
    for owner in owners:
        for name in setters:
            if (setter := getattr(owner, name, None)) is not None:
                setattr(owner, name, _noting(setter, layout))


def _noting(setter: Any, layout: MasterLayout) -> Any:
    @functools.wraps(setter)
    def call(*args: Any, **kwargs: Any) -> Any:
        layout.edited = True
        return setter(*args, **kwargs)

    return call


def layout_of_deepspeed(engine: Any, *, rank: int) -> MasterLayout:
    """The layout of a ``deepspeed.DeepSpeedEngine``.

    Raises:
        UnsupportedEngineError: Its optimizer wrapper is one zerotune does not know.
    """
    wrapper = engine.optimizer
    kind = type(wrapper).__name__
    if kind == "DeepSpeedZeroOptimizer":
        return PartitionedLayout(module=engine.module, wrapper=wrapper)
    if kind == "DeepSpeedZeroOptimizer_Stage3":
        return ShardedLayout(module=engine.module, wrapper=wrapper, rank=rank)
    if kind in ("FP16_Optimizer", "FP16_UnfusedOptimizer"):
        return HalfPrecisionLayout(module=engine.module, wrapper=wrapper)
    if isinstance(wrapper, torch.optim.Optimizer):
        return ParameterLayout(module=engine.module, optimizer=wrapper)
    raise UnsupportedEngineError(
        f"master weights inside DeepSpeed's {kind} cannot be reached",
        key="engine.optimizer",
        value=kind,
        fix="with bf16 at stage 1, leave data_types.grad_accum_dtype unset",
    )


def _names(module: torch.nn.Module) -> Mapping[int, str]:
    return {id(parameter): name for name, parameter in module.named_parameters()}
