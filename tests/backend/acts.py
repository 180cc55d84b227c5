"""A table of what users do to a model between steps.

Unless it says otherwise, an act is done at the end of the third, fourth and eighth step, while the
step may still be pending. It may look at values (``context.look``), which must then equal those of
a run with the optimizer's own step.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import attrs
import torch
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

BACKWARD, PENDING, STEP = "after backward", "after step", "after average"


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
        self.checkpointing = False
        self.leaves_out = False
        """Whether ``twin`` is left out."""

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        mixed = x + self.mix(x)
        return torch.tanh(mixed if self.leaves_out else self.twin(mixed)) + self.later(x)

    def forward(self, x_bchw: torch.Tensor) -> torch.Tensor:
        x = F.silu(self.norm(self.conv(x_bchw))).permute(0, 2, 3, 1)
        if self.checkpointing:
            x = torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)
        else:
            x = self.inner(x)
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
    leaves: tuple[str, ...] = (),
) -> Callable[[Do], Do]:
    """Add a function to the table."""

    def enter(do: Do) -> Do:
        assert name not in ACTS
        ACTS[name] = Act(
            do=do, at=at, moments=moments, kinds=kinds, before=before,
            leaves=leaves,
        )  # fmt: skip
        return do

    return enter


@act("nothing")
def _(engine, model, context): ...


# -- Moving and casting.


@act("to another dtype and back")
def _(engine, model, context):
    model.to(torch.float64).to(engine.dtype)


@act("cpu and back")
def _(engine, model, context):
    # On a device the weights come back in new storage; ``_apply`` with clones imitates that.
    model.cpu()
    model._apply(lambda tensor: tensor.clone())


@act("data = data.clone()")
def _(engine, model, context):
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


@act("vector_to_parameters")
def _(engine, model, context):
    vector_to_parameters(parameters_to_vector(model.parameters()), model.parameters())


@act("channels_last")
def _(engine, model, context):
    model.to(memory_format=torch.channels_last)


@act(
    "channels_last from the start",
    before=lambda model, _: model.to(memory_format=torch.channels_last),
)
def _(engine, model, context): ...


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


# -- Replacing parameters.


@act("tie two weights", at=(3,), leaves=("twin.weight",))
def _(engine, model, context):
    model.twin.weight = model.mix.weight


@act("replace a weight by another Parameter", at=(3,))
def _(engine, model, context):
    model.scale = torch.nn.Parameter(torch.full((Net.CHANNELS,), 0.7).to(engine.dtype))


@act("add a linear adapter", at=(3,))
def _(engine, model, context):
    torch.manual_seed(5)
    down = torch.nn.Linear(Net.CHANNELS, 2).to(engine.dtype)
    model.mix.add_module("adapter", down)
    handle = model.mix.register_forward_hook(
        lambda _m, x, out: out + down(x[0]).mean(-1, keepdim=True)
    )
    context.resources.callback(handle.remove)


def _normed(model: Any, _context: Any) -> None:
    torch.nn.utils.parametrizations.weight_norm(model.mix)


@act("weight_norm from the start", before=_normed)
def _(engine, model, context):
    context.look(model.mix.weight)


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


@act("load_state_dict with assign", at=(3,))
def _(engine, model, context):
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(kept, assign=True)


@act("no_grad mul_ before the step", moments=(BACKWARD,))
def _(engine, model, context):
    with torch.no_grad():
        model.mix.weight.mul_(0.5)


@act("functional_call with other weights")
def _(engine, model, context):
    with torch.no_grad():
        other = {name: p.detach() * 0.5 for name, p in model.named_parameters()}
        context.look(torch.func.functional_call(model, other, (context.batch(99),)))


# -- Gradients.


# -- Copies.


@act("state_dict kept over a step", moments=(BACKWARD, STEP))
def _(engine, model, context):
    if context.moment == BACKWARD:
        context.kept["state"] = model.state_dict()
        return
    for value in context.kept["state"].values():
        context.look(value)


@act("read through a view made before the step", moments=(BACKWARD, STEP))
def _(engine, model, context):
    if context.moment == BACKWARD:
        context.kept["view"] = model.twin.weight.data
    else:
        context.look(context.kept["view"])


@act("write through a view made before the step", moments=(BACKWARD, STEP))
def _(engine, model, context):
    if context.moment == BACKWARD:
        context.kept["view"] = model.twin.weight.data
    else:
        context.kept["view"].mul_(0.5)


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


@act("compile a function that calls it", at=(2,), kinds=HOST)
def _(engine, model, context):
    def function(x):
        return engine.module(x) * 1.0

    called = torch.compile(function, backend=counting(context))
    context.predict = looking_at_graphs(context, lambda _engine, x: called(x))


# -- Hooks.


@act("a forward hook that writes a weight", at=(2,))
def _(engine, model, context):
    def clamp(module, _inputs):
        with torch.no_grad():
            module.weight.clamp_(-0.1, 0.1)

    context.resources.callback(model.twin.register_forward_pre_hook(clamp).remove)


@act("gradient hooks that read weights", at=(2,))
def _(engine, model, context):
    weight = model.twin.weight

    def look(gradient):
        context.look(weight.detach())
        return gradient * 0.5

    context.resources.callback(weight.register_hook(look).remove)


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


# -- Parameter groups and learning rates.


@act("other settings")
def _(engine, model, context):
    groups = getattr(engine, "optimizer", None) or engine.deepspeed_engine.optimizer
    for group in groups.param_groups:
        group.update(lr=group["lr"] * 0.3, betas=(0.8, 0.95), weight_decay=0.5, eps=1e-3)


@act("another rate before the step", moments=(BACKWARD,))
def _(engine, model, context):
    groups = getattr(engine, "optimizer", None) or engine.deepspeed_engine.optimizer
    for group in groups.param_groups:
        group["lr"] *= 0.3


@act("a new schedule", at=(3,))
def _(engine, model, context):
    inner = inner_of(engine)
    for group in inner.param_groups:
        group.setdefault("initial_lr", group["lr"])
    schedule = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 0.9**step)
    handle = inner.register_step_post_hook(lambda *_: schedule.step())
    context.resources.callback(handle.remove)


# -- Errors.


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


# -- Other engines, functions and threads.


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


# -- Evaluation and modes.


@act("gradient checkpointing switched on and off")
def _(engine, model, context):
    model.checkpointing = context.times != 1


@act("torch.autograd.grad beside", moments=(STEP,))
def _(engine, model, context):
    model.eval()
    loss = model(context.batch(96)).float().square().mean()
    for value in torch.autograd.grad(loss, [model.mix.weight, model.scale]):
        context.look(value)
    model.train()
