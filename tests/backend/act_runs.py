"""Run an act on the model between training steps and judge the outcome.

The oracle is the same run in DeepSpeed's engine, under the same act.
Losses, recorded values, weights, moments and the EMA must be equal at the end, or one of our errors
must be raised before training deviates.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch

import zerotune
from tests.backend.acts import (
    ACTS,
    BACKWARD,
    PENDING,
    STEP,
    Act,
    Kind,
    Net,
)
from tests.support.ranks import RanksFailed, run_ranks
from tests.support.runs import build
from zerotune.errors import ZeroTuneError

State = dict[str, np.ndarray[Any, Any]]
OURS = str(Path(zerotune.__file__).parent)
AFTER = 20
"""Steps after the last time the act is done."""
TIMEOUT_S = 120.0
UNITS = ("conv", "mix", "twin", "later", "out")
"""Names of the streamed modules."""
NAP_S = 1.5e-3
"""Sleep per part of a step in the thread, around the steps at which the act is done."""


@attrs.frozen(kw_only=True)
class Mode:
    """How steps are taken, and whether an EMA follows them."""

    name: str
    ema: bool = False
    is_oracle: bool = False
    """Whether DeepSpeed's engine trains."""


ORACLE = Mode(name="oracle", ema=True, is_oracle=True)
MODES = {mode.name: mode for mode in (Mode(name="default"), Mode(name="average", ema=True))}


@attrs.frozen(kw_only=True)
class Played:
    """Result of a run."""

    losses: list[float]
    seen: list[Any]
    states: list[State]
    """The oracle's state before each step and at the end; other runs only have the last."""
    ema: State
    error: tuple[str, bool, str] | None
    """Type, whether it is a ``ZeroTuneError``, and message."""
    steps: int
    """Steps begun when the run ended."""
    hidden: int
    """Number of parts done in the thread."""


class Context:
    """What an act may read and change besides the engine and the model."""

    def __init__(self, kind: Kind, mode: Mode) -> None:
        self.kind, self._mode = kind, mode
        self.step = self.times = 0
        self.moment = BACKWARD
        self.seen: list[Any] = []
        self.kept: dict[str, Any] = {}
        self.resources = ExitStack()
        """Closed before the engine is."""
        self.predict: Callable[[Any, torch.Tensor], torch.Tensor] = lambda engine, x: engine(x)
        self.engine: Any = None
        self.ema: Any = None
        self.losses: list[float] = []

    def begin(self, model: torch.nn.Module) -> None:
        """Start an engine on a model and use it from now on."""
        from zerotune.ema import EMAShadow

        self.engine = begin(self.kind, self._mode, model)
        self.ema = EMAShadow(decay=0.9).attach(self.engine) if self._mode.ema else None

    def batch(self, step: int) -> torch.Tensor:
        """Return the images of a step in the engine's dtype."""
        generator = torch.Generator().manual_seed(17 * step + self.engine.group.rank)
        return torch.randn(2, Net.CHANNELS, 4, 4, generator=generator).to(self.engine.dtype)

    def loss(self) -> torch.Tensor:
        """Compute the loss of the current step."""
        torch.manual_seed(self.step)
        x = self.batch(self.step)
        return (self.predict(self.engine, x).float() - x.float().roll(1, 1)).square().mean()

    def look(self, value: Any) -> None:
        """Record a value for comparison."""
        if isinstance(value, torch.Tensor):
            value = (str(value.dtype), tuple(value.shape), value.detach().double().sum().item())
        self.seen.append((self.step, value))


def begin(kind: Kind, mode: Mode, model: torch.nn.Module) -> Any:
    """Build an engine of this kind."""
    from zerotune.plan.context import Streaming
    from zerotune.plan.plan import DeepSpeedPlan

    plan = DeepSpeedPlan.build(
        stage=kind.stage or 0, offload=kind.offload, micro_batch_size=2, gradient_clipping=0.5,
        precision="fp32" if kind.stage is None else "bf16",
        optimizer={"type": "AdamW", "params": {"lr": 4e-3, "weight_decay": 0.01}},
        scheduler={"type": "WarmupLR", "params": {
            "warmup_min_lr": 1e-4, "warmup_max_lr": 4e-3, "warmup_num_steps": 9}},
        **({"stage3_param_persistence_threshold": 20} if kind.stage == 3 else {}),
    )  # fmt: skip
    context: dict[str, Any] = {"deepspeed": kind.stage is not None}
    if kind.streamed and not mode.is_oracle and isinstance(model, Net):
        context["streamed"] = Streaming(units=UNITS, window=2)
    elif kind.stage is not None:
        context["engine"] = "host" if kind.hosted and not mode.is_oracle else "deepspeed"
    return build(model, plan, **context)


@contextmanager
def slowed(near: Callable[[], float]) -> Iterator[Counter[str]]:
    """Cut steps into small parts that sleep in the thread; count parts by thread name."""
    from zerotune.backend.step.adams import SlabStep

    taken: Counter[str] = Counter()
    run = SlabStep.run

    def slow(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = threading.current_thread().name
        taken[name.split("_")[0]] += 1
        if name.startswith("zerotune-passes"):
            time.sleep(near())
        return run(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SlabStep, "run", slow)
        yield taken


def play(name: str, kind: Kind, mode: Mode, after: int = AFTER) -> Played:
    """Train and do the act at its steps. Call in a process of its own."""
    act = ACTS[name]
    context = Context(kind, mode)
    states: list[State] = []
    error: BaseException | None = None
    with slowed(lambda: nap_of(act, context.step)) as taken:
        try:
            model = Net()
            if act.before is not None:
                act.before(model, context)
            context.begin(model)
            for step in range(max(act.at) + 1 + after):
                context.step = step
                if mode.is_oracle:
                    states.append(state_of(context.engine))
                one_step(act, context)
            context.resources.close()
        except BaseException as caught:  # noqa: BLE001 - what is judged
            error = caught
        context.moment = "the end"
        states.append(state_of(context.engine))
        ema = {} if context.ema is None or error else context.ema.state_dict()
        ema = {key: array_of(value) for key, value in ema.items()}
        try:
            context.resources.close()
            context.engine.close()
        except BaseException as caught:  # noqa: BLE001 - what is judged
            error = error or caught
    return Played(
        losses=context.losses,
        seen=context.seen,
        states=states,
        ema=ema,
        error=None if error is None else described(error),
        steps=context.step,
        hidden=taken["zerotune-passes"],
    )


def nap_of(act: Act, step: int) -> float:
    """Return how many seconds each part of this step sleeps in the thread."""
    return NAP_S if step in act.at else NAP_S / 30


def one_step(act: Act, context: Context) -> None:
    """Run one iteration of a user's loop that continues with the next batch after an error."""
    try:
        loss = context.loss()
        context.losses.append(float(loss.detach()))
        context.engine.backward(loss)
        do(act, context, BACKWARD)
        context.engine.step()
        do(act, context, PENDING)
        if context.ema is not None:
            context.ema.step()
        do(act, context, STEP)
    except KeyboardInterrupt as error:
        context.look(type(error).__name__)
        context.engine.discard()


def moments_of(act: Act, step: int) -> tuple[str, ...]:
    """Return the act's moments; if either will do, alternate between before and after the EMA."""
    either = act.moments == (STEP,) and act.at.index(step) % 2
    return (PENDING,) if either else act.moments


def do(act: Act, context: Context, moment: str) -> None:
    """Do the act if this is its step and moment."""
    if context.step not in act.at or moment not in moments_of(act, context.step):
        return
    context.moment = moment
    try:
        act.do(context.engine, context.engine.module, context)
    except ZeroTuneError:
        raise
    except Exception as error:
        if any(f.filename.startswith(OURS) for f in traceback.extract_tb(error.__traceback__)):
            raise
        # Third-party code refused it: the user's script continues.
        context.look(f"{type(error).__name__} ")
    context.times += moment == moments_of(act, context.step)[-1]


def described(error: BaseException) -> tuple[str, bool, str]:
    """Return type, whether it is a ``ZeroTuneError``, and message with its origin."""
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    places = " < ".join(f"{f.filename.rsplit('/', 1)[-1]}:{f.lineno}" for f in reversed(frames))
    return type(error).__name__, isinstance(error, ZeroTuneError), f"{str(error)[:300]} ({places})"


def state_of(engine: Any) -> State:
    """Copy masters, moments and the model's weights as they are in memory."""
    found: State = {}
    try:
        for fragment in engine.master_weights.read():
            found[f"master {fragment.address.key}"] = array_of(fragment.value)
            for name, state in fragment.states.items():
                found[f"{name} {fragment.address.key}"] = array_of(state)
    except Exception as error:  # noqa: BLE001 - every reader gets the error of a failed step
        found["unreadable"] = np.zeros(0)
        logging.getLogger(__name__).info("unreadable: %s", error)
        return found
    for name, parameter in engine.module.named_parameters():
        there = getattr(parameter, "ds_tensor", parameter)
        found[f"model {name}"] = array_of(there)
    return found


def array_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    # As arrays: tensors cannot be received once the forked process that sent them is gone.
    return tensor.detach().float().contiguous().numpy().copy()


# -- Judging.


def differs(mine: State, theirs: State) -> str | None:
    """Describe how many tensors are not bit-identical, and the worst of them."""
    if mine.keys() != theirs.keys():
        return f"has other tensors: {sorted(mine.keys() ^ theirs.keys())[:4]}"
    far = {
        name: float(np.abs(value - theirs[name]).max())
        if value.shape == theirs[name].shape
        else float("inf")
        for name, value in mine.items()
        if value.shape != theirs[name].shape
        or not np.array_equal(value, theirs[name], equal_nan=True)
    }
    if not far:
        return None
    worst = max(far, key=lambda name: far[name])
    return f"{len(far)} of {len(mine)} tensors differ, {worst} by {far[worst]:.2g}"


def apart(mine: Played, theirs: Played, *, ema: bool) -> str | None:
    """Describe the first difference between two runs, bit for bit."""
    for step, (one, other) in enumerate(zip(mine.losses, theirs.losses, strict=False)):
        if one != other and not (one != one and other != other):
            return f"loss of step {step}: {one:.7g}, not {other:.7g}"
    if len(mine.losses) != len(theirs.losses):
        return f"{len(mine.losses)} losses, not {len(theirs.losses)}"
    if mine.seen != theirs.seen:
        pairs = zip([*mine.seen, "nothing more"], [*theirs.seen, "nothing more"], strict=False)
        return "saw {}, not {}".format(*next((a, b) for a, b in pairs if a != b))
    if what := differs(mine.states[-1], theirs.states[-1]):
        return f"in the end {what}"
    if ema and (what := differs(mine.ema, theirs.ema)):
        return f"average: {what}"
    return None


def judge(mine: Played, theirs: Played, *, ema: bool) -> str:
    """Return ``equal``, ``raises …`` if the oracle does too, ``refused …``, or ``FAIL …``.

    Args:
        mine: The run to be judged.
        theirs: The oracle's.
        ema: Whether EMAs are compared.
    """
    if theirs.error is not None and not theirs.error[1]:
        return f"FAIL the oracle ended with {theirs.error}"
    if mine.error is not None and mine.error[1] and theirs.error is None:
        return refused(mine, theirs)
    if mine.error is not None and theirs.error is not None and mine.error[1] and theirs.error[1]:
        return refused_by_all(mine, theirs)
    if (mine.error or [None])[0] != (theirs.error or [None])[0]:
        return f"FAIL step {mine.steps}: {mine.error}, the oracle: {theirs.error}"
    if what := apart(mine, theirs, ema=ema):
        return f"FAIL {what}"
    return "equal"


def refused_by_all(mine: Played, theirs: Played) -> str:
    """Judge a run that both refuse; the steps may differ, since each checks a sample of weights."""
    assert mine.error is not None
    count = min(len(mine.losses), len(theirs.losses))
    if mine.losses[:count] != theirs.losses[:count]:
        return f"FAIL {mine.error[0]} came after a loss that differs: {mine.error[2]}"
    if len(mine.losses) == len(theirs.losses) and (what := apart(mine, theirs, ema=False)):
        return f"FAIL {what}"
    return f"refused by all: {mine.error[0]}"


def refused(mine: Played, theirs: Played) -> str:
    """Judge one of our errors, which must be raised before training deviates."""
    assert mine.error is not None
    name, _, message = mine.error
    if mine.losses != theirs.losses[: len(mine.losses)]:
        return f"FAIL {name} came after a loss that differs: {message}"
    if "unreadable" in mine.states[-1]:
        return f"refused {name}: {message}"
    near = theirs.states[mine.steps : mine.steps + 2]
    if all(differs(mine.states[-1], state) for state in near):
        return f"FAIL {name} came after weights differ ({differs(mine.states[-1], near[0])})"
    return f"refused {name}: {message}"


def play_all(name: str, kind: Kind, modes: tuple[Mode, ...], after: int) -> list[Played]:
    """Run one mode after the other in one process."""
    return [play(name, kind, mode, after) for mode in modes]


def cell(name: str, kind: Kind, modes: tuple[str, ...], after: int = AFTER) -> dict[str, str]:
    """Return the verdict on an act under a kind of engine, by mode."""
    wanted = tuple(MODES[mode] for mode in modes)
    try:
        (found,) = run_ranks(play_all, name, kind, (ORACLE, *wanted), after, timeout_s=TIMEOUT_S)
    except RanksFailed as error:
        return {"died": f"FAIL {str(error)[-400:]}"}
    theirs, *others = found
    pairs = zip(wanted, others, strict=True)
    return {mode.name: verdict(name, mode, mine, theirs) for mode, mine in pairs}


def without(played: Played, names: tuple[str, ...]) -> Played:
    """Return a run without some weights in its states and in its EMA."""

    def kept(state: State) -> State:
        return {key: one for key, one in state.items() if not any(name in key for name in names)}

    return attrs.evolve(played, states=[*map(kept, played.states)], ema=kept(played.ema))


def verdict(name: str, mode: Mode, mine: Played, theirs: Played) -> str:
    """Judge a run without the weights that the oracle treats otherwise on purpose."""
    if name == "nothing" and not mine.hidden:
        return "FAIL nothing was hidden"
    leaves = ACTS[name].leaves
    return judge(without(mine, leaves), without(theirs, leaves), ema=mode.ema)
