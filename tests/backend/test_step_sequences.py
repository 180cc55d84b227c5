"""Random sequences of calls: every engine does what torch does, or refuses a call beforehand."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any, Final

import attrs
import deepspeed
import pytest
import torch
from hypothesis import HealthCheck, example, given, seed, settings
from hypothesis import strategies as st

from tests.backend.act_runs import UNITS
from tests.backend.acts import Net, Oops
from tests.support.ranks import ranks
from tests.support.runs import build
from tests.support.sampling import nightly
from zerotune import EmbeddedPlan
from zerotune.ema import EMAShadow
from zerotune.errors import EngineError, StepOrderError
from zerotune.plan.context import Streaming
from zerotune.plan.plan import DeepSpeedPlan

# Each test needs its own process: DeepSpeed keeps state of its first engine until the end.
pytestmark = [pytest.mark.deepspeed, ranks(1, timeout_s=6000)]

SEED: Final = int(os.environ.get("ZEROTUNE_SEQUENCES_SEED", "40"))
ADAM: Final = {"lr": 4e-3, "weight_decay": 0.01, "eps": 1e-5}
NEAR: Final = 1e-4
"""Largest difference of two weights; a lost or foreign gradient moves weights by up to 4e-3."""


@attrs.frozen(kw_only=True)
class Kind:
    """A kind of engine, and in what it differs from the others."""

    stage: int | None = None
    offload: str = "cpu"
    options: dict[str, Any] = attrs.field(factory=dict)
    clipping: float = 0.5
    is_lost: bool = False
    """A failed backward pass ends the engine."""
    is_eager: bool = False
    """The last backward pass of a window moves weights."""
    sums_in_place: bool = False
    """The window's gradients are in ``parameter.grad``."""
    moves_sums: bool = False
    """A window's last backward pass moves them elsewhere."""
    is_guarded: bool = False
    """Refuses other backward passes before they begin."""
    freezes: bool = True
    takes_zeros: bool = False
    """Takes zeros where a weight got no gradient."""
    needs_last: bool = False
    """Refuses a window in whose last micro batch alone a weight got no gradient."""
    is_attached: bool = False
    """A script initialised DeepSpeed's engine, and calls it."""
    streams: bool = False
    """Weights are in host memory between their uses, where other code may write them."""
    needs_own_forward: bool = False
    """Refuses losses that come from the module, but not from the engine."""


STREAMING: Final = {"streamed": Streaming(units=UNITS, window=2)}
DEEPSPEED: Final = {"is_guarded": True, "takes_zeros": True}
KINDS: Final = {
    "plain": Kind(offload="none", sums_in_place=True),
    "host": Kind(stage=2, options={"engine": "host"}),
    "streamed": Kind(stage=2, options=STREAMING, streams=True),
    "eager": Kind(stage=2, options=STREAMING, clipping=0.0, is_eager=True, streams=True),
    "z0": Kind(stage=0, offload="none", **DEEPSPEED, freezes=False, sums_in_place=True),
    "z1": Kind(
        stage=1, offload="none", **DEEPSPEED, freezes=False, sums_in_place=True, moves_sums=True
    ),
    "z2 cpu": Kind(
        stage=2,
        options={"engine": "deepspeed"},
        **DEEPSPEED,
        is_lost=True,
        freezes=False,
        needs_last=True,
    ),
    "z3": Kind(
        stage=3,
        offload="none",
        **DEEPSPEED,
        is_lost=True,
        freezes=False,
        needs_own_forward=True,
    ),
    "z3 cpu": Kind(
        stage=3,
        options={"engine": "deepspeed"},
        **DEEPSPEED,
        is_lost=True,
        freezes=False,
        needs_last=True,
        needs_own_forward=True,
    ),
    "attached z2": Kind(
        stage=2,
        **DEEPSPEED,
        is_lost=True,
        freezes=False,
        needs_last=True,
        is_attached=True,
    ),
    "attached z3": Kind(
        stage=3,
        offload="none",
        **DEEPSPEED,
        is_lost=True,
        freezes=False,
        needs_own_forward=True,
        is_attached=True,
    ),
}


def start(kind: Kind, accumulation: int) -> Any:
    plan = DeepSpeedPlan.build(
        stage=kind.stage or 0, offload=kind.offload, micro_batch_size=2, precision="fp32",
        gradient_clipping=kind.clipping, gradient_accumulation_steps=accumulation,
        optimizer={"type": "AdamW", "params": ADAM},
    )  # fmt: skip
    if kind.is_attached:
        return attach(Net(), plan)
    return build(Net(), plan, deepspeed=kind.stage is not None, **kind.options)


def attach(model: torch.nn.Module, plan: DeepSpeedPlan) -> Any:
    """Start DeepSpeed as a script does, and attach to its engine."""
    run = EmbeddedPlan(plan=plan)
    theirs, *_ = deepspeed.initialize(**run.initialize_arguments(model))
    engine = run.attach(theirs)
    # What closes the engine closes the rest.
    engine.resources.callback(theirs.destroy)
    return engine


def batch(number: int) -> torch.Tensor:
    torch.manual_seed(number)
    return torch.randn(2, Net.CHANNELS, 4, 4)


class Reference:
    """Plain torch, and the states that an engine may be in."""

    def __init__(self, kind: Kind, accumulation: int) -> None:
        self.kind, self.accumulation = kind, accumulation
        self.model = Net()
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.adam = torch.optim.AdamW(trained, **ADAM)
        self.at = "idle"
        self.is_open = False
        self.micro = self.version = 0
        self.came = self.came_before = False
        """Whether ``twin`` got gradients in the last micro batch and in those before it."""

    @property
    def is_last(self) -> bool:
        return self.micro % self.accumulation == self.accumulation - 1

    @property
    def has_moved(self) -> bool:
        return self.kind.is_eager and self.is_last and self.at == "backward"

    @property
    def is_frozen(self) -> bool:
        return not self.model.mix.weight.requires_grad

    def backward(self, number: int) -> None:
        loss = self.model(batch(number)).square().mean()
        (loss / self.accumulation).backward()
        self.came_before = self.is_open and (self.came or self.came_before)
        self.came = not self.model.leaves_out
        self.at, self.is_open = "backward", True

    def step(self) -> None:
        if self.is_last:
            self.is_open = False
            if self.kind.clipping:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.kind.clipping)
            for p in self.adam.param_groups[0]["params"] if self.kind.takes_zeros else ():
                if p.grad is None and p.requires_grad:
                    p.grad = torch.zeros_like(p)
            self.adam.step()
            self.adam.zero_grad()
            self.came_before = False
            self.version += 1
        self.micro += 1
        self.at = "idle"

    def discard(self) -> None:
        self.adam.zero_grad()
        self.is_open = False
        self.micro = (self.micro // self.accumulation + 1) * self.accumulation
        self.at = "idle"

    @property
    def is_in_place(self) -> bool:
        """Whether the window's gradients are in ``parameter.grad`` now."""
        moved = self.kind.moves_sums and self.is_last and self.at == "backward"
        return self.kind.sums_in_place and not moved

    def lose_gradients(self) -> None:
        if self.is_in_place and self.is_open:
            self.at = "broken"

    def fail(self) -> None:
        self.is_open = True
        self.at = "lost" if self.kind.is_lost else "broken"
        if self.kind.is_eager and self.is_last:
            self.at = "spoiled"


class Pair:
    """An engine and its reference, which take the same calls."""

    def __init__(self, name: str, accumulation: int) -> None:
        self.name, self.kind = name, KINDS[name]
        self.engine, self.torch = (make(self.kind, accumulation) for make in (start, Reference))
        self.loop = self.engine.deepspeed_engine if self.kind.is_attached else self.engine
        """What the script calls."""
        self.ema = EMAShadow(decay=0.5).attach(self.engine)
        self.losses: list[tuple[Any, int, int, bool]] = []
        self.number = 0

    def do(self, legal: bool, call: Callable[[], Any], *, raises: type[BaseException]) -> bool:
        """Make a call that must succeed if it is legal; return whether it is."""
        if legal:
            call()
        else:
            with pytest.raises(raises):
                call()
        return legal

    @property
    def may_begin(self) -> bool:
        return self.torch.at in ("idle", "backward")

    def loss(self) -> Any:
        self.number += 1
        return self.loop(batch(self.number)).square().mean()

    def forward(self) -> None:
        def call() -> None:
            self.losses.append((self.loss(), self.number, self.torch.version, True))

        self.do(self.may_begin, call, raises=StepOrderError)

    def forward_past_the_engine(self) -> None:
        self.number += 1
        loss = self.engine.module(batch(self.number)).square().mean()
        self.losses.append((loss, self.number, self.torch.version, False))

    def backward(self, which: int = -1) -> None:
        if self.losses:
            loss, number, version, is_own = self.losses.pop(which)
            legal = self.torch.at == "idle" and version == self.torch.version
            legal &= is_own or not self.kind.needs_own_forward
            if self.do(legal, lambda: self.loop.backward(loss), raises=StepOrderError):
                self.torch.backward(number)

    def backward_of_the_oldest(self) -> None:
        self.backward(0)

    def step(self) -> None:
        legal = self.torch.at == "backward"
        refused = self.torch.is_frozen and not self.kind.freezes
        refused |= self.kind.needs_last and self.torch.came_before and not self.torch.came
        if legal and self.torch.is_last and refused:
            self.do(False, self.loop.step, raises=EngineError)
        elif self.do(legal, self.loop.step, raises=StepOrderError):
            self.torch.step()

    def train(self) -> None:
        for call in (self.forward, self.backward, self.step):
            call()

    def discard(self) -> None:
        legal = self.torch.at in ("idle", "backward", "broken") and not self.torch.has_moved
        if self.do(legal, self.engine.discard, raises=StepOrderError):
            self.torch.discard()

    def foreign_backward(self) -> None:
        if self.losses:
            loss, _, _, is_own = self.losses.pop()
            self.do(False, loss.backward, raises=StepOrderError)
            if not self.kind.is_guarded or not is_own:
                self.torch.lose_gradients()

    def backward_of_a_part(self) -> None:
        if self.kind.stage != 3:
            self.do(False, self.engine.module.scale.sum().backward, raises=StepOrderError)
            self.torch.lose_gradients()

    def clear_gradients(self) -> None:
        if self.torch.is_open and self.may_begin:
            self.engine.module.zero_grad()
            if self.torch.is_in_place:
                self.torch.model.zero_grad()
            elif self.torch.at == "backward":
                self.do(False, self.loop.step, raises=StepOrderError)
            else:
                loss = self.loss()
                self.do(False, lambda: self.loop.backward(loss), raises=StepOrderError)

    def scale_a_gradient(self) -> None:
        if self.torch.is_open and self.may_begin and self.torch.model.out.weight.grad is not None:
            legal = self.torch.is_in_place
            self.do(legal, self.engine.module.out.weight.grad.zero_, raises=StepOrderError)
            if legal:
                self.torch.model.out.weight.grad.zero_()

    def gradient_of_an_input(self) -> None:
        x = batch(0).requires_grad_()
        legal = self.may_begin and not self.kind.is_guarded
        self.do(
            legal,
            lambda: torch.autograd.grad(self.loop(x).sum(), x),
            raises=StepOrderError,
        )

    def bad_loss(self) -> None:
        for loss in (1.0, torch.ones(2, requires_grad=True), torch.ones(())):
            self.do(False, lambda loss=loss: self.loop.backward(loss), raises=EngineError)

    def evaluate(self) -> None:
        with self.engine.evaluating():
            self.engine(batch(0))

    @contextlib.contextmanager
    def hooked(self, act: Callable[..., None], *, backward: bool) -> Iterator[None]:
        def watch(_module: Any, _inputs: Any, out: torch.Tensor) -> None:
            if out.requires_grad and backward:
                out.register_hook(act)
            elif not backward:
                act()

        hook = self.engine.module.norm.register_forward_hook(watch)
        try:
            yield
        finally:
            hook.remove()

    def failed_forward(self) -> None:
        with self.hooked(oops, backward=False), pytest.raises((Oops, StepOrderError)):
            self.loss()

    def failed_backward(self) -> None:
        if self.torch.at == "idle":
            with self.hooked(oops, backward=True):
                loss = self.loss()
            with pytest.raises(Oops):
                self.loop.backward(loss)
            self.torch.fail()

    def interrupted_forward(self) -> None:
        raised = pytest.raises((KeyboardInterrupt, StepOrderError))
        with self.hooked(interrupt, backward=False), raised:
            self.loss()

    def interrupted_backward(self) -> None:
        if self.torch.at == "idle":
            with self.hooked(interrupt, backward=True):
                loss = self.loss()
            with pytest.raises(KeyboardInterrupt):
                self.loop.backward(loss)
            self.torch.backward(self.number)

    def freeze(self) -> None:
        if self.torch.at == "idle":
            self.losses.clear()
            frozen = self.torch.is_frozen
            for model in (self.torch.model, self.engine.module):
                model.mix.requires_grad_(frozen)

    def leave_out(self) -> None:
        """From now on, leave a layer out, or do so no longer."""
        if self.torch.at == "idle":
            self.losses.clear()
            for model in (self.torch.model, self.engine.module):
                model.leaves_out = not model.leaves_out

    def write(self) -> None:
        if self.torch.at == "idle":
            self.losses.clear()
            with torch.no_grad(), self.engine.master_weights.editing() as fragments:
                for fragment in fragments:
                    fragment.value.mul_(0.9)
            with torch.no_grad():
                for p in self.torch.adam.param_groups[0]["params"]:
                    p.mul_(0.9)

    def write_data(self) -> None:
        """Write a weight past torch's counters, and put it back if that is refused."""
        if self.torch.at not in ("idle", "backward") or self.kind.streams:
            return
        self.losses.clear()
        weight = self.engine.module.out.weight
        if not weight.numel():
            self.do(False, lambda: weight.data.mul_(0.9), raises=EngineError)
            self.do(False, lambda: setattr(weight, "data", torch.ones(2)), raises=EngineError)
        elif not self.kind.stage:
            for model in (self.engine.module, self.torch.model):
                model.out.weight.data.mul_(0.9)
        else:
            before = weight.data
            weight.data = before * 0.9
            self.do(False, self.loss, raises=EngineError)
            weight.data = before
            weight.data.mul_(0.9)
            if self.torch.is_last and self.torch.at == "backward":
                self.do(False, self.loop.step, raises=EngineError)
            # Division would round again.
            weight.data.copy_(self.master_of("out.weight"))

    def master_of(self, name: str) -> torch.Tensor:
        return dict(self.engine.master_weights.gather())[name]

    def replace_a_module(self) -> None:
        if self.may_begin:
            twin, self.engine.module.twin = self.engine.module.twin, torch.nn.Linear(16, 16)
            self.do(False, self.loss, raises=EngineError)
            if self.kind.stage == 3 and self.losses and self.torch.at == "idle":
                loss = self.losses[-1][0]
                self.do(False, lambda: self.loop.backward(loss), raises=EngineError)
            self.engine.module.twin = twin

    def train_with_the_average(self) -> None:
        if self.torch.at == "idle":
            with self.ema.swapped_in():
                loss = self.loss()
                self.do(False, lambda: self.loop.backward(loss), raises=StepOrderError)

    def check(self) -> None:
        """Compare the weights, which are whole in every state but two."""
        if self.torch.at == "spoiled" or self.torch.has_moved:
            with pytest.raises(EngineError):
                list(self.engine.master_weights.read())
            return
        own = dict(self.torch.model.named_parameters())
        for name, value in self.engine.master_weights.gather():
            far = float((value - own[name]).abs().max())
            assert far < NEAR, (name, far, self.torch.at)


def oops(*_: Any) -> None:
    raise Oops


def interrupt(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGINT)


CALLS: Final = (
    Pair.train, Pair.train, Pair.train, Pair.train, Pair.freeze, Pair.freeze, Pair.leave_out,
    Pair.forward, Pair.forward_past_the_engine,
    Pair.backward, Pair.backward_of_the_oldest, Pair.step,
    Pair.discard, Pair.foreign_backward, Pair.backward_of_a_part, Pair.gradient_of_an_input,
    Pair.clear_gradients, Pair.scale_a_gradient, Pair.bad_loss, Pair.evaluate,
    Pair.failed_forward, Pair.failed_backward,
    Pair.interrupted_forward, Pair.interrupted_backward, Pair.write,
    Pair.train_with_the_average, Pair.write_data, Pair.replace_a_module,
)  # fmt: skip


def play(name: str, accumulation: int, calls: list[str]) -> None:
    """Make the calls, and compare the weights after each."""
    pair = Pair(name, accumulation)
    with contextlib.closing(pair.engine):
        for call in calls:
            getattr(pair, call)()
            pair.check()
            if pair.torch.at in ("lost", "spoiled"):
                for refused in (pair.forward, pair.step, pair.discard):
                    refused()
                break


def run(count: int) -> None:
    print(f"ZEROTUNE_SEQUENCES_SEED={SEED}")
    logging.disable(logging.WARNING)
    # A shell without job control ignores SIGINT in background jobs, and so in this process.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    # One after the other, since hypothesis would draw some kinds often and others never.
    for name in KINDS:
        run_kind(name, -(-count // len(KINDS)))


def run_kind(name: str, count: int) -> None:
    @seed(SEED)
    @settings(
        max_examples=count, deadline=None, database=None, print_blob=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(
        accumulation=st.sampled_from([1, 2]),
        calls=st.lists(st.sampled_from([c.__name__ for c in CALLS]), min_size=5, max_size=30),
    )
    @example(accumulation=1, calls=["train", "leave_out", "train", "train"])
    @example(
        accumulation=1,
        calls=[
            "step", "forward", "forward", "backward", "forward", "backward", "evaluate", "step",
            "step", "backward", "forward", "foreign_backward", "bad_loss", "train",
            "forward_past_the_engine", "backward", "step", "train",
        ],
    )  # fmt: skip
    @example(
        accumulation=2,
        calls=[
            "train", "interrupted_forward", "interrupted_backward", "step", "forward", "backward",
            "clear_gradients", "scale_a_gradient", "discard", "train", "failed_backward", "step",
            "discard", "train",
        ],
    )  # fmt: skip
    @example(accumulation=1, calls=["train", "forward", "backward", "backward_of_a_part", "train"])
    @example(accumulation=1, calls=["forward", "backward", "clear_gradients", "clear_gradients"])
    @example(accumulation=2, calls=["train", "train", "leave_out", "train", "leave_out", "train"])
    @example(accumulation=2, calls=["train", "freeze", "leave_out", "clear_gradients", "train"])
    @example(accumulation=2, calls=[*["train"] * 3, "leave_out", "train"])
    @example(accumulation=1, calls=[*["train"] * 3, "evaluate", "write_data", "train"])
    @example(
        accumulation=1,
        calls=["failed_forward", "write_data", "forward_past_the_engine", "train", "train"],
    )
    def sequences(accumulation: int, calls: list[str]) -> None:
        play(name, accumulation, calls)

    sequences()


def test_graphs_of_a_whole_window_may_exist_before_its_first_backward_pass():
    for name in KINDS:
        for backward in ("backward", "backward_of_the_oldest"):
            play(name, 2, ["train", "train", "forward", "forward", *(backward, "step") * 2])


def test_autocast_around_a_call_computes_as_in_torch():
    for name in KINDS:
        pair = Pair(name, 1)
        with contextlib.closing(pair.engine):
            with torch.autocast("cpu", torch.bfloat16):
                loss = pair.loss()
                expected = pair.torch.model(batch(pair.number)).square().mean()
            exact = pair.torch.model(batch(pair.number)).square().mean()
            assert float(loss) == float(expected) != float(exact), name
            pair.loop.backward(loss)
            pair.loop.step()
            expected.backward()
            pair.torch.step()
            pair.check()


@pytest.mark.parametrize("count", [40, *nightly(2000)])
def test_sequences_of_calls_do_what_torch_does_or_are_refused(count):
    run(count)
