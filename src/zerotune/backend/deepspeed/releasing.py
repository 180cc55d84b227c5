"""Release gathered weights of stage 3 when their last use in the backward pass is over.

DeepSpeed 0.19.8 releases a module's weights when the gradients of the module's positional inputs
have come. For some modules it never sees them, and their weights stay gathered until the backward
pass ends: modules whose inputs need no gradient (projections of a text embedding), and modules that
are called twice. With parameters on NVMe, each such weight holds a swap buffer, until DeepSpeed has
none left.

In a recomputed block, DeepSpeed releases each trained weight after its use and gathers it again for
its gradient, while autograd keeps the first copy. If the accelerator is the CPU, this copy is the
swap buffer itself, which by then contains a different weight, and the gradients are silently wrong.
Frozen weights of a recomputed block stay until the backward pass of some other module is over; with
reentrant checkpointing, this module is the whole model.

``WeightReleases`` releases a weight when its own gradient has come, or when its module's only
operation is over. Until then, the weights of a recomputed block stay gathered.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import torch

from zerotune.backend.deepspeed.order import UseOrder
from zerotune.backend.deepspeed.wrapper import Upstream
from zerotune.errors import EngineError

_ORDER_EVERY: Final = 100
"""Forward passes between two in which the ranks compare the order of modules."""
_RELEASE: Final = "_PartitionedParameterCoordinator__release_param"
_HOOKS: Final = (
    "pre_sub_module_forward_function",
    "post_sub_module_forward_function",
    "pre_sub_module_backward_function",
    "post_sub_module_backward_function",
)
RELEASING: Final = (
    Upstream(
        owner="deepspeed.runtime.zero.partitioned_param_coordinator."
        "PartitionedParameterCoordinator",
        relied_on=(_RELEASE,),
    ),
    Upstream(
        owner="deepspeed.runtime.zero.parameter_offload.DeepSpeedZeRoOffload",
        relied_on=(*_HOOKS, "get_param_coordinator"),
    ),
    Upstream(
        owner="deepspeed.runtime.swap_tensor.partitioned_param_swapper."
        "AsyncPartitionedParameterSwapper",
        relied_on=("available_swap_in_buffers", "swap_in", "swappable_tensor"),
    ),
)
_Hook = Callable[[Any], None]
_BUFFERS: Final = "swap_in_buffers"
_ONE_OPERATION: Final = frozenset(
    {torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d}
)
"""Modules whose backward pass is a single operation. Autograd runs it before the backward pass of
any other module begins, since it runs the newest operation first."""
_UNTIL_GRADIENT: Final = ("recomputed", None)
"""Entry of ``ds_active_sub_modules`` that keeps a recomputed weight until its gradient has come."""


class WeightReleases:
    """Hooks that release the gathered weights of a stage-3 engine.

    Args:
        optimizer: DeepSpeed's stage-3 optimizer, which removes the hooks when it is destroyed.
    """

    def __init__(self, optimizer: Any) -> None:
        offload = optimizer.parameter_offload
        self._release: Callable[[Any], None] = getattr(offload.get_param_coordinator(), _RELEASE)
        self._weights: dict[int, list[Any]] = {}
        self._owners: defaultdict[Any, list[Any]] = defaultdict(list)
        self._root: Any = offload.module
        self._parameters: list[Any] = list(offload.module.parameters())
        self._modules = {each.ds_id: each for each in _hooked_modules(offload.module)}
        for module in self._modules.values():
            every = module.parameters(recurse=_is_leaf(module))
            weights = [each for each in every if not each.ds_persist]
            self._weights[module.ds_id] = weights
            for weight in weights:
                self._owners[weight].append(module)
        self._running: Any = None
        """Module of one operation whose backward pass has begun."""
        self._calls: Counter[int] = Counter()
        """Recomputed calls whose backward pass is not over, by module."""
        self._kept: defaultdict[int, list[Any]] = defaultdict(list)
        """Recomputed modules whose weights are kept, by backward pass."""
        self._recomputing = False
        self._shared: UseOrder | None = None
        self._names: dict[int, str] = {}
        self._count = itertools.count()
        self._order: dict[int, int] = {}
        """When each module was last called in a forward pass."""
        for name, hook in zip(
            _HOOKS,
            (self._begin_forward, self._end_forward, self._begin_backward, self._end_backward),
            strict=True,
        ):
            setattr(offload, name, partial(hook, getattr(offload, name)))
        for weight in self._owners:
            if weight.requires_grad:
                came = weight.register_post_accumulate_grad_hook(self._take_gradient)
                optimizer._grad_acc_hooks.append(came)

    def compare_order(self, order: UseOrder) -> None:
        """Compare the ranks' modules, in some passes before weights are gathered.

        Args:
            order: What compares them.
        """
        self._shared = order
        # DeepSpeed gives modules inside a leaf module no id: it calls only the leaf's hooks.
        modules = self._root.named_modules()
        self._names = {each.ds_id: name for name, each in modules if hasattr(each, "ds_id")}
        order.watch()

    def _use(self, module: Any, where: str = "") -> None:
        if self._shared is not None and self._weights.get(module.ds_id):
            name = self._names[module.ds_id] + where
            self._shared.note(name)
            if self._shared.passes % _ORDER_EVERY == 1:
                self._shared.check([name])

    def _begin_forward(self, original: _Hook, module: Any) -> None:
        backward = torch._C._current_graph_task_id()
        if backward == -1:
            if module is self._root:
                self._give_up_interrupted()
            self._order[module.ds_id] = next(self._count)
            if torch.is_grad_enabled():
                if module is self._root and self._shared is not None:
                    self._shared.begin()
                self._use(module)
        elif self._weights.get(module.ds_id):
            if backward not in self._kept:
                engine: Any = torch.autograd.Variable._execution_engine
                engine.queue_callback(partial(self._end, backward))
            if not self._recomputing:
                self._recomputing = True
                self._give_up_after(module, backward)
            self._kept[backward].append(module)
        original(module)

    def _give_up_interrupted(self) -> None:
        """Release the weights of modules whose forward pass has ended in an error."""
        for weight in self._parameters:
            status = weight.ds_status
            if status is type(status).INFLIGHT:
                # DeepSpeed has just waited for all weights under way. Gathering this one failed,
                # for example for lack of memory, and DeepSpeed would wait for it without end.
                weight.ds_status = type(status).NOT_AVAILABLE
        for weight in self._owners:
            if weight.ds_active_sub_modules:
                weight.ds_active_sub_modules.clear()
                self._release(weight)

    def _end_forward(self, original: _Hook, module: Any) -> None:
        weights = self._weights.get(module.ds_id)
        if weights and torch._C._current_graph_task_id() != -1:
            self._keep(module, weights)
        original(module)

    def _give_up_after(self, module: Any, backward: int) -> None:
        """Release what is still kept of the blocks after one whose recomputation has begun.

        Autograd runs the newest operations first, so their backward passes are over, and no
        gradient has reached these weights: nothing uses their modules' outputs.
        """
        begun = self._order.get(module.ds_id, 0)
        over = [one for one in self._kept[backward] if self._order.get(one.ds_id, 0) > begun]
        self._kept[backward] = [one for one in self._kept[backward] if one not in over]
        for one in over:
            self._give_up(one)

    def _keep(self, module: Any, weights: list[Any]) -> None:
        """Keep the weights of a recomputed module gathered for its backward pass."""
        single, awaited = type(module) in _ONE_OPERATION, module.ds_grads_remaining > 0
        takes_part = awaited or any(weight.requires_grad for weight in weights)
        self._calls[module.ds_id] += 1
        for weight in weights:
            active = weight.ds_active_sub_modules
            if weight.requires_grad and not single:
                active.add(_UNTIL_GRADIENT)
            elif single or awaited:
                # DeepSpeed keeps a frozen weight until the backward pass of another module is over.
                active -= {one for one in active if not self._uses(weight, one)}
                if takes_part:
                    active.add(_until_call(module))

    def _uses(self, weight: Any, active: int | tuple[str, int | None]) -> bool:
        if isinstance(active, tuple):
            return True
        module = self._modules[active]
        return module in self._owners[weight] or id(weight) in module._external_params

    def _begin_backward(self, original: _Hook, module: Any) -> None:
        self._recomputing = False
        self._use(module, " in backward")
        self._end_running()
        original(module)
        if type(module) in _ONE_OPERATION:
            self._running = module

    def _end_backward(self, original: _Hook, module: Any) -> None:
        if module is self._running:
            self._end_running()
        elif type(module) not in _ONE_OPERATION:
            self._end_call(module)
        original(module)

    def _end_running(self) -> None:
        if self._running is not None:
            module, self._running = self._running, None
            self._end_call(module)

    def _end_call(self, module: Any) -> None:
        """Release the weights of a call whose backward pass is over, unless another needs them."""
        self._calls[module.ds_id] -= 1
        if self._calls[module.ds_id] > 0:
            return
        del self._calls[module.ds_id]
        for weight in self._weights.get(module.ds_id, ()):
            weight.ds_active_sub_modules -= {module.ds_id, _until_call(module)}
            self._release(weight)

    def _take_gradient(self, weight: Any) -> None:
        active = weight.ds_active_sub_modules
        active.discard(_UNTIL_GRADIENT)
        for module in self._owners[weight]:
            # Otherwise, DeepSpeed releases the module's weights soon.
            if getattr(module, "ds_grads_remaining", 0) <= 0:
                active -= {module.ds_id, _until_call(module)}
        self._release(weight)

    def _end(self, backward: int) -> None:
        for module in self._kept.pop(backward):
            self._give_up(module)

    def _give_up(self, module: Any) -> None:
        """Release recomputed weights for which no backward pass will come."""
        self._calls.pop(module.ds_id, None)
        for weight in self._weights[module.ds_id]:
            # Its forward pass may have been interrupted when all that was needed was recomputed.
            weight.ds_active_sub_modules -= {_UNTIL_GRADIENT, _until_call(module), module.ds_id}
            self._release(weight)


def _until_call(module: Any) -> tuple[str, int]:
    """Return the entry that keeps a recomputed weight until one call of its module is over."""
    return "recomputed", module.ds_id


def _hooked_modules(module: Any) -> Iterator[Any]:
    """Yield the modules at which DeepSpeed gathers and releases weights."""
    yield module
    if not _is_leaf(module):
        for child in module.children():
            yield from _hooked_modules(child)


def _is_leaf(module: Any) -> bool:
    return getattr(module, "_z3_leaf", False) is True


def explain_missing_buffers(module: torch.nn.Module) -> None:
    """Replace DeepSpeed's assertion about swap buffers by an error that names the weights.

    Args:
        module: The module that DeepSpeed has partitioned; without parameters on NVMe, nothing is
            replaced.
    """
    named: dict[str, Any] = dict(module.named_parameters())
    swapper = next((each.nvme_swapper for each in named.values()), None)
    if swapper is None:
        return
    names = {each.ds_id: name for name, each in named.items()}
    swapper.swap_in = partial(_swap_in, swapper, names)


def _swap_in(
    swapper: Any, names: dict[int, str], params: list[Any], *args: Any, **kwargs: Any
) -> None:
    if len(params) > swapper.available_swap_in_buffers() and not (args[1:] or kwargs.get(_BUFFERS)):
        wanted = {*swapper.param_id_to_buffer_id, *(each.ds_id for each in params)}
        raise EngineError(
            f"{len(wanted)} weights are gathered at once, and each needs a swap buffer: "
            f"{', '.join(sorted(names[each] for each in wanted))}",
            'write "auto", or at least the number of weights on NVMe in the largest such block',
            "zero_optimization.offload_param.buffer_count",
            swapper.param_buffer_count,
        )
    type(swapper).swap_in(swapper, params, *args, **kwargs)
