"""Stage 3: parameters are partitioned over all ranks; weights and states may be on NVMe.

DeepSpeed moves a whole model to the device before partitioning. ``shard_from_host`` instead uses
``zero.Init``, so that at most one whole parameter is on the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, cast

import torch
from typing_extensions import override

from zerotune.backend.accelerator import accelerator_of
from zerotune.backend.checks import DTYPES
from zerotune.backend.deepspeed.leaf_modules import LEAF_KEY
from zerotune.backend.deepspeed.mends import HOOKS, align_swapped_gradients, changed, zero_unused
from zerotune.backend.deepspeed.order import UseOrder
from zerotune.backend.deepspeed.releasing import (
    RELEASING,
    WeightReleases,
    explain_missing_buffers,
)
from zerotune.backend.deepspeed.wrapper import (
    OptimizerWrapper,
    Upstream,
    clear,
)
from zerotune.backend.fragments import FragmentAddress, OptimizerStates, Slab
from zerotune.backend.master_weights import MasterLayout, check_master, full_shape
from zerotune.backend.stored import make_room, stored_weight, waiting
from zerotune.decisions import Decision
from zerotune.errors import EngineError
from zerotune.plan.plan import ResolvedPlan
from zerotune.plan.resolve.sizes import LEAF_CLASSES

_STAGE_3: Final = "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3"
_REDUCE: Final = "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads"
GATHERED_KEY: Final = "zero_optimization.gathered_weights"
_WRITTEN_BEHIND: Final = "async_swap_out"
"""Key of DeepSpeed's pipelined swapper for a sub-group that is still being written."""


class ShardedLayout(MasterLayout):
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
        # Writes to frozen weights that stay whole are right.
        self._unwritten = {
            name: each
            for name, each in self._model.items()
            if each.requires_grad or not getattr(each, "ds_persist", False)
        }
        self._versions = self._current_versions()

    def _current_versions(self) -> list[int]:
        return [parameter._version for parameter in self._unwritten.values()]

    @property
    @override
    def watched(self) -> Iterable[tuple[str, torch.Tensor]]:
        return self._unwritten.items()

    @override
    def written(self) -> str | None:
        # Between uses, a parameter is empty, so writing it in place changes nothing.
        pairs = zip(self._unwritten, self._current_versions(), self._versions, strict=True)
        return next((name for name, now, before in pairs if now != before), None)

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
        states = OptimizerStates.of(self._wrapper.optimizer, self.tensors[slab])
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
                resident.states.write_back()
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
            yield Slab(value=key.data, states=OptimizerStates.of(wrapper.optimizer, key))
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
        self._versions = self._current_versions()


class ShardedWrapper(OptimizerWrapper):
    """Adapter for ``DeepSpeedZeroOptimizer_Stage3``."""

    _releases: WeightReleases | None = None
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
                _REDUCE,
                "_swappable_optimizer_subgroup",
                "clear_backward_seen_flag",
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
        Upstream(
            owner="deepspeed.runtime.swap_tensor.optimizer_utils.OptimizerSwapper",
            relied_on=("_swap_out_gradients", "is_swappable_tensor"),
        ),
        *RELEASING,
    )

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

    @property
    @override
    def loses_earlier_gradients(self) -> bool:
        return bool(self.raw.offload_optimizer)

    @override
    def compare_order(self, order: UseOrder) -> None:
        raw, reduce = self.raw, getattr(self.raw, _REDUCE)
        names = {each.ds_id: name for name, each in self.engine.module.named_parameters()}

        def reduce_and_partition(dtype: torch.dtype) -> None:
            weights = [names[each.ds_id] for each in raw.ipg_buckets[dtype].params]
            # Otherwise, DeepSpeed sorts them.
            order.check(sorted(weights) if raw.reduce_scatter else weights)
            reduce(dtype)

        setattr(raw, _REDUCE, reduce_and_partition)
        if self._releases is not None:
            self._releases.compare_order(order)

    @override
    def begin_backward(self) -> None:
        # DeepSpeed counts a window's passes at the next forward pass; without one in between, the
        # second backward pass would overwrite the gradients of the first.
        self.raw.clear_backward_seen_flag()

    @override
    def begin_window(self, without: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        # DeepSpeed would add to the gradients of an earlier window, or step with them.
        expected, offset = {id(parameter) for _, parameter in without}, 0
        for parameter in (p for group in self.raw.fp16_groups for p in group) if expected else ():
            numel = parameter.partition_numel()
            if id(parameter) in expected:
                self.raw.grad_partitions_flat_buffer[offset : offset + numel].zero_()
            offset += numel

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
        module = self.engine.module
        return (
            *(self._reduce_by_parameter() if untouched else ()),
            *self._release_by_gradient(),
            *align_swapped_gradients(self.engine),
            *((zero_unused(self.raw, self.layout, module),) if self.raw.offload_optimizer else ()),
        )

    def _release_by_gradient(self) -> tuple[Decision, ...]:
        explain_missing_buffers(self.engine.module)
        before = "until the gradients of their module's inputs have come"
        if (untested := changed(HOOKS)) is not None:
            return (
                Decision(
                    GATHERED_KEY,
                    before,
                    before,
                    f"{untested}, so zerotune leaves the release of weights to DeepSpeed",
                    "warning",
                ),
            )
        self._releases = WeightReleases(self.raw)
        return (
            Decision(
                GATHERED_KEY,
                before,
                "until their own gradients have come",
                "DeepSpeed keeps weights gathered until the backward pass ends if their "
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
                f"{LEAF_KEY}.gradients",
                "per module",
                "per parameter",
                f"{', '.join(names)}: weights are fetched per module, but gradients are "
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
            "remove the classes of modules that are called more than once (an empty list "
            "disables leaf modules), or call the model once with both batches concatenated",
            f"{LEAF_KEY}.classes",
            sorted({type(leaf).__name__ for leaf in leaves}),
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
                "zero_optimization.offload_optimizer.ratio",
                "only the offloaded part follows the schedule",
                "the whole optimizer follows the schedule",
                "DeepSpeed's separate optimizer for the device would keep its initial "
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
            "on every rank, call zerotune.export_model(path, engine=engine), export_pipeline "
            "or export_adapters",
            "model.state_dict",
        )

    engine.module_state_dict = module_state_dict
    return [module.register_state_dict_post_hook(check) for module in engine.module.modules()]


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
