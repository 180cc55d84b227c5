"""Where each kind of engine keeps its master weights.

What is relied on is named in ``zerotune.backend.upstream.RELIED_ON`` too, and checked at start.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, cast

import torch
from typing_extensions import override

from zerotune.backend.master_weights import Follower, FragmentAddress, MasterLayout, Slab
from zerotune.backend.states import OptimizerStates
from zerotune.errors import EngineError, UnsupportedEngineError

Named = list[tuple[str, torch.nn.Parameter]]


def trainable_parameters(module: torch.nn.Module) -> Named:
    """Names and parameters that require a gradient and have elements; a tied one counts once."""
    return [
        (name, p)
        for name, p in module.named_parameters()
        # DeepSpeed leaves one without elements out of its groups: there is nothing to train.
        if p.requires_grad and math.prod(full_shape(p)) > 0
    ]


def require_trainable(module: torch.nn.Module) -> Named:
    """The trainable parameters of a model that an engine takes.

    Raises:
        EngineError: There are none.
    """
    named = trainable_parameters(module)
    if not named:
        raise EngineError("no parameter requires a gradient", key="model", fix="unfreeze some")
    return named


def full_shape(parameter: torch.nn.Parameter) -> tuple[int, ...]:
    """Shape before ZeRO-3 partitioned it."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def inner_optimizer(engine: Any) -> Any:
    """The optimizer that a ``deepspeed.DeepSpeedEngine`` steps, out of its ZeRO wrapper."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


class ResidentLayout(MasterLayout):
    """Slabs that always lie in memory: all engines but ZeRO-3 with NVMe.

    Args:
        optimizer: What steps them.
        slabs: fp32. One that is not contiguous, as in channels_last, is read and written through
            copies, since its fragments are numbered as if it were.
        addresses: As for ``MasterLayout``.
        order: As for ``MasterLayout``.
    """

    def __init__(
        self,
        *,
        optimizer: torch.optim.Optimizer | None,
        slabs: list[torch.Tensor],
        addresses: tuple[FragmentAddress, ...],
        order: tuple[tuple[str, tuple[int, ...]], ...],
    ) -> None:
        super().__init__(addresses=addresses, order=order)
        self._optimizer = optimizer
        self._slabs = slabs
        for address in addresses:
            _check_master(slabs[address.slab], address.name)

    @property
    @override
    def optimizer(self) -> torch.optim.Optimizer | None:
        return self._optimizer

    @property
    @override
    def tensors(self) -> Sequence[torch.Tensor]:
        return self._slabs

    @override
    @contextmanager
    def reading(self, slab: int) -> Iterator[Slab]:
        key = self._slabs[slab]
        states = OptimizerStates(self._optimizer, key)
        yield Slab(value=key.data.contiguous(), states=states)

    @override
    @contextmanager
    def writing(self, slab: int) -> Iterator[Slab]:
        key = self._slabs[slab]
        with self.reading(slab) as resident:
            try:
                yield resident
            finally:
                if not key.is_contiguous():
                    key.data.copy_(resident.value)
                    resident.states.write_back()

    @override
    def refresh(self) -> None:
        """The parameters are the master weights."""


UNDER_WAY: Final = "zerotune_step"
"""Attribute of a ZeRO wrapper or an optimizer: what may leave a step under way, with ``settle`` and
``follow``."""


class _SteppedLayout(MasterLayout):
    """Of a ZeRO wrapper, or an optimizer, whose steps may be under way when they return."""

    _wrapper: Any

    @override
    def settle(self) -> None:
        stepping = getattr(self._wrapper, UNDER_WAY, None)
        if stepping is not None:
            stepping.settle()

    @override
    def follow(self, followers: Sequence[Follower]) -> bool:
        stepping = getattr(self._wrapper, UNDER_WAY, None)
        return stepping is not None and bool(stepping.follow(followers))


class ParameterLayout(_SteppedLayout, ResidentLayout):
    """The parameters are the master weights: the plain engine, and stage 0 in fp32.

    Without an optimizer: a module nobody trains through an engine.

    Args:
        module: The model.
        optimizer: What steps the master weights.
        masters: Where these are not the parameters themselves: one for each of them.
    """

    replicated = True

    def __init__(
        self,
        *,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        masters: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self._wrapper = optimizer
        named = trainable_parameters(module)
        self._pairs = list(zip(masters or (), (p for _, p in named), strict=masters is not None))
        super().__init__(
            optimizer=optimizer,
            slabs=[parameter for _, parameter in named] if masters is None else list(masters),
            addresses=tuple(
                _whole(name, parameter, slab=index, offset=0)
                for index, (name, parameter) in enumerate(named)
            ),
            order=tuple((name, tuple(parameter.shape)) for name, parameter in named),
        )

    @override
    def refresh(self) -> None:
        for master, parameter in self._pairs:
            parameter.data.copy_(master.data)


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
                    _whole(names[id(parameter)], parameter, slab=len(slabs) - 1, offset=offset)
                )
                self._pairs.append((parameter, addresses[-1]))
                offset += parameter.numel()
        super().__init__(
            optimizer=wrapper.optimizer,
            slabs=slabs,
            addresses=tuple(addresses),
            order=tuple((address.name, address.shape) for address in addresses),
        )

    @override
    def refresh(self) -> None:
        for parameter, address in self._pairs:
            flat = self._slabs[address.slab].detach().view(-1)
            master = flat.narrow(0, address.offset, address.numel)
            parameter.data.copy_(master.view_as(parameter))


_WRITTEN_BEHIND: Final = "async_swap_out"
"""What DeepSpeed's pipelined swapper calls a sub-group that it is still writing."""


class PartitionedLayout(_SteppedLayout, ResidentLayout):
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
        named.sort(key=lambda pair: group_of[id(pair[1])])
        addresses.sort(key=lambda address: address.slab)
        super().__init__(
            optimizer=wrapper.optimizer,
            slabs=list(wrapper.single_partition_of_fp32_groups),
            addresses=tuple(addresses),
            order=tuple((name, tuple(parameter.shape)) for name, parameter in named),
        )

    @override
    def refresh(self) -> None:
        self._wrapper.update_lp_params()


class ShardedLayout(_SteppedLayout):
    """Stage 3: every parameter is split over all ranks; sub-groups may lie on NVMe."""

    def __init__(self, *, module: torch.nn.Module, wrapper: Any, rank: int) -> None:
        self._wrapper = wrapper
        addresses, order = [], []
        names = _names(module)
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
            yield resident
            # While the sub-group is in memory, its low-precision part can follow without
            # bringing it in a second time.
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
            _check_master(key, f"sub-group {slab}")
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


def _whole(name: str, parameter: torch.nn.Parameter, *, slab: int, offset: int) -> FragmentAddress:
    return FragmentAddress(
        name=name,
        shape=tuple(parameter.shape),
        start=0,
        numel=parameter.numel(),
        slab=slab,
        offset=offset,
    )


def _check_master(tensor: torch.Tensor, name: str) -> None:
    if tensor.dtype != torch.float32:
        raise EngineError(
            "master weights are fp32",
            key=name,
            value=str(tensor.dtype),
            fix="load the model in float32; the plan's precision decides what the forward uses",
        )
