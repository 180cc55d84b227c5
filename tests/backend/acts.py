"""A table of what users do to a model between steps.

Unless it says otherwise, an act is done at the end of the third, fourth and eighth step, while the
step may still be pending. It may look at values (``context.look``), which must then equal those of
a run with the optimizer's own step.
"""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import attrs
import torch
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

FORWARD, BACKWARD, PENDING, STEP = "before forward", "after backward", "after step", "after average"


@attrs.frozen(kw_only=True)
class Kind:
    """A kind of engine."""

    stage: int | None
    """``None``: the plain engine."""
    offload: str = "cpu"
    streamed: bool = False
    """Weights pass through a window; the optimizer's own step is that of the plan without it."""
    hosted: bool = False
    """The host engine trains, with the weights on the device."""


KINDS: Final = {
    "plain": Kind(stage=None, offload="none"),
    "z0": Kind(stage=0, offload="none"),
    "z1": Kind(stage=1, offload="none"),
    "z2": Kind(stage=2, offload="none"),
    "z3": Kind(stage=3, offload="none"),
    "z1 cpu": Kind(stage=1),
    "z2 cpu": Kind(stage=2),
    "z3 cpu": Kind(stage=3),
    "host": Kind(stage=2, hosted=True),
    "streamed": Kind(stage=2, streamed=True),
}
HOST: Final = frozenset({"host"})
HOSTED: Final = frozenset({"host", "streamed"})


class Oops(Exception):
    """An error that the user's script catches and continues after."""


class Net(torch.nn.Module):
    """Layers of a few hundred weights each, one of them frozen, and a weight outside any layer."""

    CHANNELS = 16

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        side = self.CHANNELS
        self.conv = torch.nn.Conv2d(side, side, 3, padding=1)
        self.norm = torch.nn.GroupNorm(4, side)
        self.mix = torch.nn.Linear(side, side)
        self.twin = torch.nn.Linear(side, side)
        self.later = torch.nn.Linear(side, side).requires_grad_(False)
        self.scale = torch.nn.Parameter(torch.ones(side))
        self.out = torch.nn.Conv2d(side, side, 3, padding=1)
        self.register_buffer("shift", torch.zeros(side))
        self.checkpointing: bool | None = None
        """Use reentrant autograd if ``True``; no checkpointing if ``None``."""
        self.leaves_out = False
        """Whether ``twin`` is left out."""

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        mixed = x + self.mix(x)
        return torch.tanh(mixed if self.leaves_out else self.twin(mixed)) + self.later(x)

    def forward(self, x_bchw: torch.Tensor) -> torch.Tensor:
        x = F.silu(self.norm(self.conv(x_bchw))).permute(0, 2, 3, 1)
        if self.checkpointing is None:
            x = self.inner(x)
        else:
            x = torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=self.checkpointing)
        x = F.dropout(x * self.scale + self.shift.to(x.dtype), 0.1, self.training)
        return self.out(x.permute(0, 3, 1, 2))


Do = Callable[[Any, Any, Any], None]


@attrs.frozen(kw_only=True)
class Act:
    """Something that users do to a model, and when."""

    do: Do
    """Called with engine, model and context."""
    at: tuple[int, ...]
    """Steps at which it is done."""
    moments: tuple[str, ...]
    """Moments within each of these steps."""
    kinds: frozenset[str]
    """Kinds of engines to which it can be done."""
    before: Callable[[Any, Any], None] | None
    """Called with model and context before the engine starts."""
    needs_ema: bool
    """Without an EMA there is nothing to do."""
    leaves: tuple[str, ...] = ()
    """Weights without a gradient from then on: the host engine leaves them as they are, as torch
    does, and DeepSpeed's own step takes zeros."""


ACTS: dict[str, Act] = {}


def act(
    name: str,
    *,
    at: tuple[int, ...] = (2, 3, 7),
    moments: tuple[str, ...] = (STEP,),
    kinds: frozenset[str] = HOSTED,
    before: Callable[[Any, Any], None] | None = None,
    needs_ema: bool = False,
    leaves: tuple[str, ...] = (),
) -> Callable[[Do], Do]:
    """Add a function to the table."""

    def enter(do: Do) -> Do:
        assert name not in ACTS
        ACTS[name] = Act(
            do=do, at=at, moments=moments, kinds=kinds, before=before, needs_ema=needs_ema,
            leaves=leaves,
        )  # fmt: skip
        return do

    return enter


def trained(model: Any) -> list[torch.nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


@act("nothing")
def _(engine, model, context): ...


# -- Moving and casting.


@act("to another dtype and back")
def _(engine, model, context):
    model.to(torch.float64).to(engine.dtype)


@act("to another dtype and back, twice", moments=(PENDING, STEP))
def _(engine, model, context):
    model.to(torch.float16)
    model.to(engine.dtype)


@act("cpu and back")
def _(engine, model, context):
    # On a device the weights come back in new storage; ``_apply`` with clones imitates that.
    model.cpu()
    model._apply(lambda tensor: tensor.clone())


@act("half, then bfloat16", at=(2,))
def _(engine, model, context):
    model.half().bfloat16().to(engine.dtype)


@act("one layer to another dtype and back")
def _(engine, model, context):
    model.mix.double().to(engine.dtype)


@act("data = data.clone()")
def _(engine, model, context):
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


@act("data of one weight set to another tensor")
def _(engine, model, context):
    model.mix.weight.data = model.mix.weight.data * 0.5


@act("vector_to_parameters")
def _(engine, model, context):
    vector_to_parameters(parameters_to_vector(model.parameters()), model.parameters())


@act("parameters_to_vector")
def _(engine, model, context):
    context.look(parameters_to_vector(trained(model)))


@act("channels_last")
def _(engine, model, context):
    model.to(memory_format=torch.channels_last)


@act(
    "channels_last from the start",
    before=lambda model, _: model.to(memory_format=torch.channels_last),
)
def _(engine, model, context): ...


@act("share_memory", at=(2,))
def _(engine, model, context):
    model.share_memory()


@act("torch.swap_tensors by to()", at=(2,))
def _(engine, model, context):
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to(torch.float64).to(engine.dtype)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


# -- Freezing.


@act("unfreeze what was frozen at the start", at=(3,))
def _(engine, model, context):
    model.later.requires_grad_(True)


@act("requires_grad_ twice")
def _(engine, model, context):
    model.mix.requires_grad_(False).requires_grad_(True)


# -- Replacing parameters.


@act("tie two weights", at=(3,), leaves=("twin.weight",))
def _(engine, model, context):
    model.twin.weight = model.mix.weight


def _tie(model: Any, _context: Any) -> None:
    model.twin.weight = model.mix.weight


@act("untie two weights", at=(3,), before=_tie)
def _(engine, model, context):
    model.twin.weight = torch.nn.Parameter(model.mix.weight.detach().clone())


@act("tied from the start", before=_tie)
def _(engine, model, context):
    context.look(model.twin.weight is model.mix.weight)


@act("replace a layer", at=(3,))
def _(engine, model, context):
    torch.manual_seed(5)
    model.mix = torch.nn.Linear(Net.CHANNELS, Net.CHANNELS).to(engine.dtype)


@act("replace a weight by another Parameter", at=(3,))
def _(engine, model, context):
    model.scale = torch.nn.Parameter(torch.full((Net.CHANNELS,), 0.7).to(engine.dtype))


@act("delete a layer's weight and put it back", at=(3,))
def _(engine, model, context):
    weight = model.mix.weight
    del model.mix.weight
    model.mix.weight = weight


@act("register_parameter", at=(3,))
def _(engine, model, context):
    more = torch.nn.Parameter(torch.zeros(Net.CHANNELS).to(engine.dtype))
    model.register_parameter("more", more)
    context.predict = lambda engine, x: engine(x) + more[:, None, None]


@act("add a linear adapter", at=(3,))
def _(engine, model, context):
    torch.manual_seed(5)
    down = torch.nn.Linear(Net.CHANNELS, 2).to(engine.dtype)
    model.mix.add_module("adapter", down)
    handle = model.mix.register_forward_hook(
        lambda _m, x, out: out + down(x[0]).mean(-1, keepdim=True)
    )
    context.resources.callback(handle.remove)


@act("add adapters with peft", at=(3,))
def _(engine, model, context):
    from peft import LoraConfig, inject_adapter_in_model

    torch.manual_seed(5)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["mix"]), model)


# torch refuses to replace a streamed weight by another Parameter, and the run continues.
@act("parametrize with weight_norm", at=(3,), kinds=HOST)
def _(engine, model, context):
    torch.nn.utils.parametrizations.weight_norm(model.mix)


def _normed(model: Any, _context: Any) -> None:
    torch.nn.utils.parametrizations.weight_norm(model.mix)


@act("weight_norm from the start", before=_normed)
def _(engine, model, context):
    context.look(model.mix.weight)


def _empty(model: Any, _context: Any) -> None:
    model.empty = torch.nn.Parameter(torch.empty(0))


@act("a parameter without elements", before=_empty)
def _(engine, model, context): ...


# -- Writing weights.


def averaged(context: Any, model: Any) -> dict[str, torch.Tensor]:
    """Update a user's own EMA of the model's weights and return it."""
    with torch.no_grad():
        mine = context.kept.setdefault("mine", {n: p.clone() for n, p in model.named_parameters()})
        for name, parameter in model.named_parameters():
            if name in mine:
                mine[name].lerp_(parameter, 0.5)
    return mine


@act("swap in an average of one's own with copy_", at=(2, 3, 5, 7))
def _(engine, model, context):
    mine = averaged(context, model)
    with torch.no_grad():
        kept = {name: p.clone() for name, p in model.named_parameters()}
        for name, parameter in model.named_parameters():
            parameter.copy_(mine[name])
        model.eval()
        context.look(engine(context.batch(99)))
        model.train()
        for name, parameter in model.named_parameters():
            parameter.copy_(kept[name])


@act("swap in an average of one's own with data", at=(2, 3, 5, 7))
def _(engine, model, context):
    mine = averaged(context, model)
    kept = {name: p.data for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.data = mine[name].clone()
    with torch.no_grad():
        context.look(model(context.batch(99)))
    for name, parameter in model.named_parameters():
        parameter.data = kept[name]


@act("swap in the average", needs_ema=True)
def _(engine, model, context):
    with context.ema.swapped_in(), engine.evaluating():
        context.look(engine(context.batch(99)), averaged=True)


@act("swap by load_state_dict")
def _(engine, model, context):
    kept = copy.deepcopy(model.state_dict())
    model.load_state_dict({name: value * 0.9 for name, value in kept.items()})
    with torch.no_grad():
        context.look(model(context.batch(99)))
    model.load_state_dict(kept)


@act("load_state_dict with assign", at=(3,))
def _(engine, model, context):
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(kept, assign=True)


@act("no_grad mul_")
def _(engine, model, context):
    with torch.no_grad():
        model.mix.weight.mul_(0.5)


@act("no_grad mul_ before the step", moments=(BACKWARD,))
def _(engine, model, context):
    with torch.no_grad():
        model.mix.weight.mul_(0.5)


@act("data.clamp_")
def _(engine, model, context):
    for parameter in trained(model):
        parameter.data.clamp_(-0.05, 0.05)


@act("torch.nn.init of a layer")
def _(engine, model, context):
    torch.manual_seed(3)
    torch.nn.init.normal_(model.mix.weight, std=0.02)


@act("functional_call with other weights")
def _(engine, model, context):
    with torch.no_grad():
        other = {name: p.detach() * 0.5 for name, p in model.named_parameters()}
        context.look(torch.func.functional_call(model, other, (context.batch(99),)))


@act("torch.func.grad")
def _(engine, model, context):
    def loss(weights):
        return torch.func.functional_call(model, weights, (context.batch(99),)).square().mean()

    model.eval()
    weights = {name: p.detach() for name, p in model.named_parameters()}
    for value in torch.func.grad(loss)(weights).values():
        context.look(value)
    model.train()


# -- Gradients.


@act("clip gradients by hand", moments=(BACKWARD,))
def _(engine, model, context):
    context.look(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))


@act("read gradients", moments=(BACKWARD, STEP))
def _(engine, model, context):
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        context.look((name, None if gradient is None else float(gradient.float().norm())))


@act("scale gradients by hand", moments=(BACKWARD,))
def _(engine, model, context):
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


@act("zero_grad by hand before the step", moments=(BACKWARD,))
def _(engine, model, context):
    model.zero_grad()


@act("zero_grad by hand")
def _(engine, model, context):
    model.zero_grad()


@act("zero_grad(set_to_none=False)")
def _(engine, model, context):
    model.zero_grad(set_to_none=False)


@act("grad = None before the step", moments=(BACKWARD,))
def _(engine, model, context):
    for parameter in model.parameters():
        parameter.grad = None


@act("edit the masters")
def _(engine, model, context):
    with torch.no_grad(), engine.master_weights.editing() as fragments:
        for fragment in fragments:
            fragment.value.mul_(0.99)


@act("read the masters")
def _(engine, model, context):
    # Sorted, since each engine has its own order.
    fragments = engine.master_weights.read()
    context.look(sorted((f.address.key, float(f.value.double().sum())) for f in fragments))


# -- Copies.


@act("deepcopy")
def _(engine, model, context):
    other = copy.deepcopy(model)
    for value in other.state_dict().values():
        context.look(value)


@act("deepcopy of a layer, trained beside")
def _(engine, model, context):
    other = copy.deepcopy(model.mix).float()
    sgd = torch.optim.SGD(other.parameters(), lr=0.1)
    other(torch.ones(3, Net.CHANNELS)).square().mean().backward()
    sgd.step()
    context.look(other.weight)


# Partitioned models refuse state_dict().
@act("state_dict out")
def _(engine, model, context):
    for value in model.state_dict().values():
        context.look(value)


@act("state_dict kept over a step", moments=(BACKWARD, STEP))
def _(engine, model, context):
    if context.moment == BACKWARD:
        context.kept["state"] = model.state_dict()
        return
    for value in context.kept["state"].values():
        context.look(value)


@act("torch.save and torch.load")
def _(engine, model, context):
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    for value in torch.load(file, weights_only=True).values():
        context.look(value)


@act("pickle a layer")
def _(engine, model, context):
    other = pickle.loads(pickle.dumps(model.later)), pickle.loads(pickle.dumps(model.state_dict()))
    for value in (*other[0].state_dict().values(), *other[1].values()):
        context.look(value)


@act("pickle the model")
def _(engine, model, context):
    for value in pickle.loads(pickle.dumps(model)).state_dict().values():
        context.look(value)


@act("iterate buffers and parameters")
def _(engine, model, context):
    for name, value in [*model.named_buffers(), *model.named_parameters()]:
        context.look((name, str(value.dtype), value.requires_grad, value.is_leaf))
        context.look(value)
    context.look(sum(p.numel() for p in model.parameters()))


VIEWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "detach": lambda w: w.detach(),
    "view(-1)": lambda w: w.view(-1),
    "data": lambda w: w.data,
    "T": lambda w: w.T,
    "numpy": lambda w: w.detach().view(torch.uint8).numpy(),
}


def _view(make: Callable[[torch.Tensor], Any]) -> Do:
    def look(engine: Any, model: Any, context: Any) -> None:
        if context.moment == BACKWARD:
            context.kept["view"] = make(model.twin.weight)
        else:
            view = context.kept["view"]
            context.look(torch.from_numpy(view) if not isinstance(view, torch.Tensor) else view)

    return look


for name, make in VIEWS.items():
    # A differentiable view of a streamed weight is a view of a copy.
    where = HOST if name in ("view(-1)", "T") else HOSTED
    act(f"read through {name} made before the step", moments=(BACKWARD, STEP), kinds=where)(
        _view(make)
    )


@act("write through a view made before the step", moments=(BACKWARD, STEP))
def _(engine, model, context):
    if context.moment == BACKWARD:
        context.kept["view"] = model.twin.weight.data
    else:
        context.kept["view"].mul_(0.5)


@act("read everything of a weight")
def _(engine, model, context):
    weight = model.twin.weight
    context.look((str(weight), repr(weight.shape), weight.tolist(), weight[0, 0].item()))
    context.look(weight.norm())
    context.look([float(each.float().sum()) for each in weight])
    context.look(torch._foreach_norm([weight, model.mix.weight])[0])


# -- Compiling.


def counting(context: Any) -> Callable[..., Any]:
    """Return a compiler backend that counts calls of its graphs."""

    def compile_(graph: Any, _inputs: Any) -> Any:
        def call(*args: Any) -> Any:
            context.kept["compiled"] = context.kept.get("compiled", 0) + 1
            return graph.forward(*args)

        return call

    return compile_


def looking_at_graphs(context: Any, predict: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a prediction and record for each call whether any compiled graph ran."""

    def call(engine: Any, x: torch.Tensor) -> torch.Tensor:
        before = context.kept.get("compiled", 0)
        out = predict(engine, x)
        context.look(("compiled", context.kept.get("compiled", 0) > before))
        return out

    return call


# A model whose weights are streamed is compiled block by block (docs/streaming.md).
@act("compile the module", at=(2,), kinds=HOST)
def _(engine, model, context):
    model.compile(backend=counting(context))
    context.predict = looking_at_graphs(context, context.predict)


@act("compile a layer", at=(2,))
def _(engine, model, context):
    # For torch's own layers dynamo makes a graph only if they have hooks.
    model.mix.compile(backend=counting(context))


@act("compile a layer's forward", at=(2,))
def _(engine, model, context):
    model.mix.forward = torch.compile(model.mix.forward, backend=counting(context))
    context.predict = looking_at_graphs(context, context.predict)


@act("compile a function that calls it", at=(2,), kinds=HOST)
def _(engine, model, context):
    def function(x):
        return engine.module(x) * 1.0

    called = torch.compile(function, backend=counting(context))
    context.predict = looking_at_graphs(context, lambda _engine, x: called(x))


@act("compile a function that uses a weight", at=(2,), kinds=HOST)
def _(engine, model, context):
    called = torch.compile(
        lambda y: F.linear(y.permute(0, 2, 3, 1), model.mix.weight).permute(0, 3, 1, 2),
        backend=counting(context),
    )
    context.predict = looking_at_graphs(context, lambda engine, x: called(engine(x)))


@act("torch.jit.trace of a layer")
def _(engine, model, context):
    x = torch.ones(2, Net.CHANNELS).to(engine.dtype)
    context.look(torch.jit.trace(model.mix, x, check_trace=False)(x))


# -- Hooks.


@act("forward hooks that read weights", at=(2,))
def _(engine, model, context):
    def look(module, *_):
        context.look([float(p.detach().float().sum()) for p in module.parameters(recurse=False)])

    for module in (model.mix, model.conv):
        context.resources.callback(module.register_forward_pre_hook(look).remove)
        context.resources.callback(module.register_forward_hook(look).remove)


@act("a forward hook that reads another layer", at=(2,))
def _(engine, model, context):
    handle = model.conv.register_forward_pre_hook(lambda *_: context.look(model.out.weight))
    context.resources.callback(handle.remove)


@act("a forward hook that writes a weight", at=(2,))
def _(engine, model, context):
    def clamp(module, _inputs):
        with torch.no_grad():
            module.weight.clamp_(-0.1, 0.1)

    context.resources.callback(model.twin.register_forward_pre_hook(clamp).remove)


@act("backward hooks that read weights", at=(2,))
def _(engine, model, context):
    def look(module, _inputs, _outputs):
        context.look([float(p.detach().float().sum()) for p in module.parameters(recurse=False)])

    context.resources.callback(model.mix.register_full_backward_hook(look).remove)


@act("gradient hooks that read weights", at=(2,))
def _(engine, model, context):
    weight = model.twin.weight

    def look(gradient):
        context.look(weight.detach())
        return gradient * 0.5

    context.resources.callback(weight.register_hook(look).remove)


@act("post-accumulate hooks that read weights", at=(2,))
def _(engine, model, context):
    def look(parameter):
        context.look(parameter.detach())

    handle = model.twin.weight.register_post_accumulate_grad_hook(look)
    context.resources.callback(handle.remove)


def inner_of(engine: Any) -> torch.optim.Optimizer:
    """Return the innermost optimizer, of the host engine or of its oracle."""
    if hasattr(engine, "optimizer"):
        return engine.optimizer
    wrapper = engine.deepspeed_engine.optimizer
    return getattr(wrapper, "optimizer", wrapper)


def masters(engine: Any) -> float:
    """Sum the master weights as they are in memory, without waiting for a pending step."""
    return sum(
        float(slab.detach().double().sum()) for slab in engine.master_weights._layout.tensors
    )


@act("optimizer step hooks", at=(2,))
def _(engine, model, context):
    inner = inner_of(engine)
    before = inner.register_step_pre_hook(lambda *_: context.look(masters(engine)))
    after = inner.register_step_post_hook(lambda *_: context.look(masters(engine)))
    context.resources.callback(before.remove)
    context.resources.callback(after.remove)


@act("global optimizer step hooks", at=(2,))
def _(engine, model, context):
    from torch.optim import optimizer

    def look(*_):
        context.look(masters(engine))

    context.resources.callback(optimizer.register_optimizer_step_pre_hook(look).remove)
    context.resources.callback(optimizer.register_optimizer_step_post_hook(look).remove)


# -- Parameter groups and learning rates.


CHANGES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "another rate": lambda group: {"lr": group["lr"] * 0.3},
    "other betas": lambda _: {"betas": (0.8, 0.95)},
    "another weight decay": lambda _: {"weight_decay": 0.5},
    "another eps": lambda _: {"eps": 1e-3},
}


def _change(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Do:
    def in_all_groups(engine: Any, model: Any, context: Any) -> None:
        groups = getattr(engine, "optimizer", None) or engine.deepspeed_engine.optimizer
        for group in groups.param_groups:
            group.update(change(group))

    return in_all_groups


for name, change in CHANGES.items():
    act(name)(_change(change))
act("another rate before the step", moments=(BACKWARD,))(_change(CHANGES["another rate"]))


@act("a new schedule", at=(3,))
def _(engine, model, context):
    inner = inner_of(engine)
    for group in inner.param_groups:
        group.setdefault("initial_lr", group["lr"])
    schedule = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 0.9**step)
    handle = inner.register_step_post_hook(lambda *_: schedule.step())
    context.resources.callback(handle.remove)


@act("a schedule of one's own, called beside", at=tuple(range(2, 8)))
def _(engine, model, context):
    if not context.times:
        context.kept["schedule"] = torch.optim.lr_scheduler.StepLR(
            inner_of(engine), step_size=2, gamma=0.5
        )
    context.kept["schedule"].step()


@act("engine state out and in")
def _(engine, model, context):
    engine.load_state(engine.state)


# -- Errors.


def once(context: Any, error: BaseException) -> Callable[..., None]:
    """Return a function that raises the error on its first call only."""
    left = [error]

    def fail(*_args: Any) -> None:
        if left:
            raise left.pop()

    return fail


@act("an exception in forward")
def _(engine, model, context):
    fail = once(context, Oops("forward"))
    handle = model.twin.register_forward_pre_hook(fail)
    context.resources.callback(handle.remove)


@act("an exception in forward, without a word to the engine")
def _(engine, model, context):
    handle = model.twin.register_forward_pre_hook(once(context, Oops("forward")))
    with contextlib.suppress(Oops):
        engine(context.batch(98))
    handle.remove()


@act("an exception in an optimizer hook", moments=(BACKWARD,))
def _(engine, model, context):
    handle = inner_of(engine).register_step_pre_hook(once(context, Oops("hook")))
    context.resources.callback(handle.remove)


@act("an exception in the data")
def _(engine, model, context):
    original, fail = context.predict, once(context, Oops("data"))
    context.predict = lambda engine, x: (fail(), original(engine, x))[1]


@act("an exception between forward and backward")
def _(engine, model, context):
    engine(context.batch(98))  # Its loss is never used.


def interrupted(seconds: float, do: Callable[[], Any]) -> None:
    """Run ``do`` and raise KeyboardInterrupt after that time, wherever the interpreter is."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        do()
        time.sleep(1.0)
    except KeyboardInterrupt:
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@act("KeyboardInterrupt while a step is under way", at=(2, 3, 5, 7))
def _(engine, model, context):
    interrupted(0.004 + 0.003 * context.times, engine.master_weights.settle)


@act("KeyboardInterrupt while a weight is read", at=(2, 3, 5, 7))
def _(engine, model, context):
    interrupted(0.003 + 0.003 * context.times, lambda: [p.sum() for p in model.parameters()])


# Stage 3 itself does not survive an interrupt while it gathers weights.
@act("KeyboardInterrupt in a forward without gradients", at=(2, 3, 5, 7))
def _(engine, model, context):
    def forward():
        with torch.no_grad():
            for _ in range(200):
                model(context.batch(98))

    interrupted(0.003 + 0.003 * context.times, forward)


# -- Other engines, functions and threads.


def other_model() -> torch.nn.Module:
    torch.manual_seed(4)
    return torch.nn.Sequential(torch.nn.Linear(16, 40), torch.nn.GELU(), torch.nn.Linear(40, 16))


def train_beside(engine: Any, context: Any) -> None:
    x = torch.ones(2, 16).to(engine.dtype)
    loss = engine(x).float().square().mean()
    context.look(loss)
    engine.backward(loss)
    engine.step()


@act("a second engine on another model", at=(2, 3, 4, 5))
def _(engine, model, context):
    if not context.times:
        context.kept["other"] = context.another(other_model())
    train_beside(context.kept["other"], context)
    if context.times == 3:
        context.kept["other"].close()


@act("a second engine, closed at the end", at=(2, 3))
def _(engine, model, context):
    if not context.times:
        context.kept["other"] = context.another(other_model())
        context.resources.callback(context.kept["other"].close)
    train_beside(context.kept["other"], context)


@act("close the engine and start another", at=(3, 6))
def _(engine, model, context):
    engine.close()
    other = Net()
    other.load_state_dict({name: value.float() for name, value in model.state_dict().items()})
    context.begin(other)


@act("close the engine and go on with its model", at=(3, 6))
def _(engine, model, context):
    engine.close()
    context.begin(model.float())


class Fused(torch.autograd.Function):
    """A product with its weight as an argument, as in apex, Liger and Transformer Engine."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
        ctx.save_for_backward(x, weight)
        return x @ weight.t() + bias

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        flat = gradients[0].flatten(0, -2)
        return gradients[0] @ weight, flat.t() @ x.flatten(0, -2), flat.sum(0)


def _fused(model: Any, _context: Any) -> None:
    model.mix.forward = lambda x: Fused.apply(x, model.mix.weight, model.mix.bias)


@act("a custom autograd function takes a weight", before=_fused)
def _(engine, model, context): ...


@act("a custom autograd function, later", at=(2,))
def _(engine, model, context):
    _fused(model, context)


@act("threads that read weights", at=(2,))
def _(engine, model, context):
    stop, errors = threading.Event(), []

    def read():
        while not stop.is_set():
            try:
                for parameter in model.parameters():
                    parameter.detach().float().sum()
                    time.sleep(1e-4)
            except Exception as error:  # noqa: BLE001 - compared
                errors.append(type(error).__name__)

    threads = [threading.Thread(target=read, daemon=True) for _ in range(3)]

    def end():
        stop.set()
        for thread in threads:
            thread.join(10)
        context.look(sorted(set(errors)))

    context.resources.callback(end)
    for thread in threads:
        thread.start()


@act("a thread that validates", at=(2, 3, 5))
def _(engine, model, context):
    outs: list[torch.Tensor] = []

    def validate():
        with torch.no_grad():
            outs.append(model(context.batch(97)))

    model.eval()
    thread = threading.Thread(target=validate)
    thread.start()
    thread.join(30)
    model.train()
    context.look(outs[0])


# -- Evaluation and modes.


@act("evaluate under no_grad")
def _(engine, model, context):
    with engine.evaluating():
        context.look(engine(context.batch(99)))


@act("evaluate under inference_mode")
def _(engine, model, context):
    model.eval()
    with torch.inference_mode():
        context.look(engine(context.batch(99)))
    model.train()


@act("evaluate the module itself")
def _(engine, model, context):
    model.eval()
    with torch.no_grad():
        context.look(model(context.batch(99)))
    model.train()


@act("evaluation mode from here on", at=(3,))
def _(engine, model, context):
    model.eval()


@act("gradient checkpointing switched on and off")
def _(engine, model, context):
    model.checkpointing = None if context.times == 1 else False


@act("reentrant gradient checkpointing", at=(2,))
def _(engine, model, context):
    model.checkpointing = True


@act("a second forward before backward", at=(2, 3), moments=(FORWARD,))
def _(engine, model, context):
    def twice(engine, x):
        return engine(x) + engine(x.flip(0)) * 0.5

    context.predict = twice


@act("torch.autograd.grad beside", moments=(STEP,))
def _(engine, model, context):
    model.eval()
    loss = model(context.batch(96)).float().square().mean()
    for value in torch.autograd.grad(loss, [model.mix.weight, model.scale]):
        context.look(value)
    model.train()


@act("weights in a loss of one's own", at=(2,))
def _(engine, model, context):
    original = context.predict
    context.predict = lambda engine, x: (
        original(engine, x) + sum(p.square().mean() for p in trained(model))
    )


@act("discard a step", moments=(BACKWARD,), at=(2, 3))
def _(engine, model, context):
    raise Oops("discarded")


@act("save and load a checkpoint")
def _(engine, model, context):
    import tempfile

    from zerotune.checkpoint import load_checkpoint, save_checkpoint

    shadows = {} if context.ema is None else {"ema": context.ema}
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(f"{folder}/here", engine=engine, shadows=shadows)
        load_checkpoint(f"{folder}/here", engine=engine, shadows=shadows)


# -- All acts in one run.

REVERSIBLE: Final = (
    "to another dtype and back",
    "cpu and back",
    "data = data.clone()",
    "vector_to_parameters",
    "swap in an average of one's own with copy_",
    "swap in the average",
    "edit the masters",
    "zero_grad by hand",
    "deepcopy",
    "state_dict out",
    "another rate before the step",
    "an exception in forward",
    "an exception in forward, without a word to the engine",
    "an exception in an optimizer hook",
    "discard a step",
    "evaluate under no_grad",
    "evaluate the module itself",
    "gradient checkpointing switched on and off",
    "a custom autograd function, later",
)
"""Acts that can be repeated in any order."""
LONG: Final = 200
"""Steps of a run in which all of these are done."""
NEW_ENGINES: Final = (70, 140)
"""Steps after which the engine is closed and a new one continues."""


def everything(engine: Any, model: Any, context: Any) -> None:
    """Do a random act at each step while threads read the weights."""
    chance = random.Random(f"{context.kind}/{context.step}")
    done = context.kept.setdefault("done", Counter())
    name = chance.choice(REVERSIBLE)
    if context.step in NEW_ENGINES:
        name = "close the engine and start another"
    if context.step - 1 in (0, *NEW_ENGINES):
        name = "threads that read weights"
    chosen = ACTS[name]
    needless = chosen.needs_ema and context.ema is None
    if (
        context.moment in chosen.moments
        and context.kind in map(KINDS.get, chosen.kinds)
        and not needless
    ):
        context.times = done[name]
        chosen.do(engine, model, context)
        done[name] += context.moment == chosen.moments[-1]


LONG_ACTS: Final = {
    "everything": Act(
        do=everything, at=tuple(range(1, LONG)), moments=(FORWARD, BACKWARD, PENDING, STEP),
        kinds=HOSTED, before=None, needs_ema=False,
    )
}  # fmt: skip
