"""Stages 1 and 2: every rank has all weights in low precision, and updates a part of each group."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from typing_extensions import override

from zerotune.backend.deepspeed.mends import zero_unused
from zerotune.backend.deepspeed.order import UseOrder
from zerotune.backend.deepspeed.wrapper import OptimizerWrapper, Upstream, clear
from zerotune.backend.fragments import FragmentAddress
from zerotune.backend.master_weights import MasterLayout, ResidentLayout, trainable_parameters
from zerotune.decisions import Decision
from zerotune.errors import EngineError

_STAGES_1_AND_2: Final = "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer"


class PartitionedLayout(ResidentLayout):
    """Layout of stages 1 and 2: each rank owns a contiguous part of every flat group."""

    def __init__(self, *, module: torch.nn.Module, wrapper: Any) -> None:
        if wrapper.round_robin_gradients and max(wrapper.partition_count) > 1:
            raise EngineError(
                "DeepSpeed stores the master weights in another order than its record of their "
                "places says, so they cannot be read",
                "remove this key; training results are the same",
                "zero_optimization.round_robin_gradients",
                True,
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

    @property
    @override
    def weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        return self._model.items()

    @override
    def in_model(self, address: FragmentAddress) -> torch.Tensor | None:
        return self._model[address.name].data.reshape(-1)[address.start : address.stop]

    @override
    def refresh(self) -> None:
        self._wrapper.update_lp_params()


class PartitionedWrapper(OptimizerWrapper):
    """Adapter for ``DeepSpeedZeroOptimizer``, stages 1 and 2."""

    upstream = (
        Upstream(
            owner=_STAGES_1_AND_2,
            relied_on=(
                "_link_all_hp_params",
                "_release_preflattened_grad_buffers",
                "_wait_for_offload_copies",
                "reduce_ipg_grads",
                "reset_cpu_buffers",
                "update_lp_params",
                "zero_grad",
            ),
        ),
    )

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

    @property
    @override
    def loses_earlier_gradients(self) -> bool:
        return bool(self.raw.cpu_offload and self.raw.partition_gradients)

    @override
    def compare_order(self, order: UseOrder) -> None:
        raw, reduce = self.raw, self.raw.reduce_ipg_grads
        names = {id(each): name for name, each in self.engine.module.named_parameters()}

        def reduce_ipg_grads(*args: Any, **kwargs: Any) -> None:
            ahead = [place for bucket in raw.ipg_buckets.values() for place in bucket.params]
            order.check([names[id(raw.bit16_groups[group][index])] for group, index, _ in ahead])
            reduce(*args, **kwargs)

        raw.reduce_ipg_grads = reduce_ipg_grads

    @override
    def begin_window(self, without: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        # DeepSpeed would add later gradients of the window to those of an earlier one.
        raw = self.raw
        if raw.cpu_offload and without:
            raw._wait_for_offload_copies()
            kept = raw.accumulated_grads_in_cpu
            clear(kept.get(raw.get_param_id(parameter)) for _, parameter in without)

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
    def correct(self) -> tuple[Decision, ...]:
        raw = self.raw
        return (zero_unused(raw, self.layout, self.engine.module),) if raw.cpu_offload else ()

    @override
    def improve(self) -> tuple[Decision, ...]:
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
                "zero_optimization.compute_grad_norm",
                "gradients are not checked",
                "steps with NaN or infinite gradients are skipped",
                "without a gradient norm, DeepSpeed would apply non-finite fp32 gradients",
            ),
        )
