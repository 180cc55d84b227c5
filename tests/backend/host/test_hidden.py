"""Steps taken while the next forward runs give the bits of DeepSpeed's own, which are not."""

from __future__ import annotations

import copy
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.support.ranks import RanksFailed, ranks, run_ranks
from tests.support.runs import build, digest, weights_of
from zerotune.backend.host import lanes
from zerotune.backend.host.passes import UnitPass
from zerotune.backend.step.adams import SlabStep

pytestmark = pytest.mark.deepspeed

SIDE = 6
STEPS = int(os.environ.get("ZEROTUNE_HIDDEN_STEPS", "45"))
"""Steps of the runs with delays; 200 for a long run."""
LEARNED = 0.5 if STEPS >= 200 else 0.7
"""Upper bound of the last loss, as a fraction of the first."""


class Web(torch.nn.Module):
    """A model that uses weights in many ways, mostly outside their own module's call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = torch.nn.Linear(SIDE, SIDE).requires_grad_(False)
        self.attention = torch.nn.MultiheadAttention(SIDE, 2, batch_first=True)
        self.recurrent = torch.nn.GRU(SIDE, SIDE, batch_first=True)
        self.twice = torch.nn.Linear(SIDE, SIDE)
        self.tied = torch.nn.Linear(SIDE, SIDE, bias=False)
        self.tied.weight = self.twice.weight
        self.sometimes = torch.nn.Linear(SIDE, SIDE)
        self.never = torch.nn.Linear(SIDE, 2)
        self.again = torch.nn.Sequential(torch.nn.Linear(SIDE, 17), torch.nn.Linear(17, SIDE))
        self.scale = torch.nn.Parameter(torch.ones(3))
        self.large = torch.nn.Linear(SIDE, 301)

    def forward(self, x_bts: torch.Tensor, both: bool) -> torch.Tensor:
        x = self.frozen(x_bts)
        x = x + self.attention(x, x, x, need_weights=False)[0] + self.recurrent(x)[0]
        x = self.tied(torch.tanh(self.twice(self.twice(x))))
        # Not left out, since the host engine would leave these weights as they are.
        x = x + self.sometimes(x) * both + self.never(x).sum() * 0
        x = x + checkpoint(self.again, x, use_reentrant=False)
        return self.large(x) * self.scale.sum() + torch.nn.functional.linear(
            x, self.large.weight, self.large.bias
        )


def begin(
    stage: int | None, model: torch.nn.Module, *, precision: str = "bf16", hidden: bool,
    clipping: float = 0.5, accumulation: int = 1, groups: bool = False, persistent: int = 0,
    optimizer: str = "AdamW",
) -> Any:  # fmt: skip
    """Start the host engine, whose steps are hidden, or DeepSpeed's."""
    from zerotune.optim import ParameterGroups
    from zerotune.plan.optimizer.resolver import OptimizerResolver
    from zerotune.plan.plan import DeepSpeedPlan

    plan = DeepSpeedPlan.build(
        stage=stage or 0, offload="cpu", precision=precision, micro_batch_size=2,
        gradient_clipping=clipping, gradient_accumulation_steps=accumulation,
        optimizer={"type": optimizer, "params": {"lr": 2e-3, "weight_decay": 0.01}},
        scheduler={"type": "WarmupLR", "params": {
            "warmup_min_lr": 1e-4, "warmup_max_lr": 2e-3, "warmup_num_steps": 9}},
        **({"stage3_param_persistence_threshold": persistent} if stage == 3 else {}),
    )  # fmt: skip
    context = {"engine": "host" if hidden else "deepspeed", "deepspeed": stage is not None}
    resolver = OptimizerResolver(groups=ParameterGroups.no_decay() if groups else None)
    return build(model, plan, resolver=resolver, **context)


def optimizer_of(engine: Any) -> Any:
    """Return the optimizer whose groups a schedule sets."""
    return engine._adam if hasattr(engine, "_adam") else engine.deepspeed_engine.optimizer


def batch(engine: Any, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(17 * step + engine.group.rank)
    return torch.randn(2, 3, SIDE, generator=generator).to(engine.dtype)


def loss_of(engine: Any, step: int) -> torch.Tensor:
    out: torch.Tensor = engine(batch(engine, step), step % 3 != 1)
    return out.float().square().mean()


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count updates of units by thread name."""
    taken: Counter[str] = Counter()
    original = UnitPass.take

    def take(self: Any) -> None:
        taken[threading.current_thread().name.split("_")[0]] += 1
        original(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UnitPass, "take", take)
        yield taken


@contextmanager
def delayed(seed: int, model: torch.nn.Module) -> Iterator[None]:
    """Add random delays in the pass, before and after its uploads, and in the modules' hooks."""
    chance = random.Random(seed)

    def nap() -> None:
        if chance.random() < 0.2:
            time.sleep(chance.random() * 2e-3)

    def slow(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nap()
            found = method(*args, **kwargs)
            nap()
            return found

        return call

    handles = [module.register_forward_pre_hook(lambda *_: nap()) for module in model.modules()] + [
        module.register_forward_hook(lambda *_: nap()) for module in model.modules()
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SlabStep, "run", slow(SlabStep.run))
        patch.setattr(lanes.Lane, "_queue", slow(lanes.Lane._queue))
        yield
    for handle in handles:
        handle.remove()


def long_run(stage: int, hidden: bool, steps: int) -> dict[str, Any]:
    """Train while weights are read now and then; return losses, reads and final weights."""
    from zerotune.ema import EMAShadow, EMAShadows

    model = Web()
    engine = begin(stage, model, hidden=hidden, persistent=20)
    seed = 10 * engine.group.rank + stage
    emas = EMAShadows(
        shadows={"a": EMAShadow(decay=0.9), "b": EMAShadow(decay=0.5, update_every=3)}
    ).attach(engine)
    losses, looks = [], []
    with counted() as taken, delayed(seed, model) if hidden else counted():
        for step in range(steps):
            loss = loss_of(engine, step)
            losses.append(float(loss.detach()))
            engine.backward(loss)
            if step % 37 == 36:
                engine.discard()
                continue
            if step % 41 == 40:
                for group in optimizer_of(engine).param_groups:
                    group["lr"] *= 0.5
            assert engine.step().applied
            emas.step()
            looks.append(look(engine, emas, step))
    kept = {
        "losses": losses,
        "looks": looks,
        "master": digest(engine),
        "ema": sums(emas["a"]),
    }
    engine.close()
    return {**kept, "taken": dict(taken)}


def sums(ema: Any) -> dict[str, float]:
    return {name: float(full.double().sum()) for name, full in ema.gather()}


def look(engine: Any, emas: Any, step: int) -> Any:
    """Read weights in one of several ways right after a step; after most steps, read nothing."""
    match step % 29:
        case 3:
            return digest(engine)
        case 7 if engine.plan.stage < 3:
            return weights_of(engine)
        case 11:
            with emas["a"].swapped_in(), engine.evaluating():
                return float(loss_of(engine, step))
        case 13 if engine.plan.stage < 3 and engine.group.is_main:
            # Only the main rank reads; the others continue.
            return weights_of(engine)
        case 17:
            return sums(emas["b"])
        case 23 if engine.plan.stage < 3:
            return [float(p.detach().double().sum()) for p in engine.module.parameters()]
    return None


@pytest.mark.parametrize(
    ("stage", "ranks"),
    [(2, 1), pytest.param(1, 1, marks=pytest.mark.nightly), (2, 2)],
)
def test_random_delays_do_not_change_losses_or_weights(stage, ranks):
    mine = run_ranks(long_run, stage, True, STEPS, world_size=ranks)
    theirs = run_ranks(long_run, stage, False, STEPS, world_size=ranks)
    for one, other in zip(mine, theirs, strict=True):
        for name in ("losses", "looks", "master", "ema"):
            assert one[name] == other[name], name
        assert one["taken"]["zerotune-passes"] > 5 * STEPS, "nothing was taken in the thread"
        assert one["losses"][-1] < LEARNED * one["losses"][0], "nothing was learned"


def short_run(hidden: bool, averages: int, arguments: dict[str, Any]) -> dict[str, Any]:
    from zerotune.ema import EMAShadow

    model = Web()
    engine = begin(hidden=hidden, model=model, **arguments)
    emas = [EMAShadow(decay=0.9 - 0.3 * index).attach(engine) for index in range(averages)]
    losses, norms = [], []
    with counted() as taken:
        for step in range(8 * arguments.get("accumulation", 1)):
            loss = loss_of(engine, step)
            losses.append(float(loss.detach()))
            engine.backward(loss)
            outcome = engine.step()
            norms.append(outcome.grad_norm)
            if outcome.applied:
                for ema in emas:
                    ema.step()
    kept = {
        "losses": losses,
        "norms": norms,
        "master": digest(engine),
        "ema": [sums(ema) for ema in emas],
    }
    engine.close()
    return {**kept, "taken": dict(taken)}


def both(averages: int, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    # On one rank at stage 3, the host engine has ZeRO-2's bits, whose norms are summed otherwise.
    return [
        short_run(True, averages, arguments),
        short_run(False, averages, {**arguments, "stage": min(arguments["stage"], 2)}),
    ]


# test_parity compares further settings at stages 1 and 2.
@pytest.mark.parametrize(
    ("averages", "arguments"),
    [
        (0, {"stage": 1, "precision": "fp32", "clipping": 0.0}),
        (1, {"stage": 3, "precision": "fp32", "accumulation": 3}),
        (2, {"stage": 3, "groups": True, "clipping": 0.0}),
    ],
    ids=["z1 fp32", "z3 accumulated", "z3 groups"],
)
def test_a_hidden_step_changes_no_bit_under_any_setting(averages, arguments):
    ((mine, theirs),) = run_ranks(both, averages, arguments)
    for name in ("losses", "norms", "master", "ema"):
        assert mine[name] == theirs[name], name
    assert mine["taken"]["zerotune-passes"]
    assert not theirs["taken"]


def two_at_once(hidden: bool) -> list[Any]:
    """Train two engines of one process alternately."""
    first, second = Web(), torch.nn.Sequential(torch.nn.Linear(SIDE, 40), torch.nn.Linear(40, 1))
    engines = [begin(stage, model, hidden=hidden) for stage, model in ((2, first), (1, second))]
    losses = []
    with counted() as taken:
        for step in range(6):
            x = batch(engines[1], step)
            taught = (engines[1](x) - engines[0](x, True).mean().detach()).float().square().mean()
            loss = loss_of(engines[0], step)
            losses += [float(taught.detach()), float(loss.detach())]
            for engine, each in zip(engines, (loss, taught), strict=True):
                engine.backward(each)
                engine.step()
    assert bool(taken["zerotune-passes"]) == hidden
    losses += [digest(engine) for engine in engines]
    for engine in engines:
        engine.close()
    return losses


def test_hidden_steps_of_two_engines_in_one_process_change_no_bit():
    assert run_ranks(two_at_once, True) == run_ranks(two_at_once, False)


@pytest.mark.parametrize("stage", [2])
@ranks(1)
def test_every_call_after_a_failed_step_raises_its_error(stage):
    import traceback

    engine = begin(stage, Web(), hidden=True)

    def fail(*_: Any) -> None:
        raise MemoryError("no room for that")

    seen = []
    with counted():
        engine.backward(loss_of(engine, 0))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SlabStep, "run", fail)
            engine.step()
            with pytest.raises(MemoryError):
                engine._steps.passes.settle()
        for call in (
            lambda: loss_of(engine, 1),
            engine.master_weights.settle,
            lambda: list(engine.master_weights.read()),
            engine.close,
        ):
            try:
                call()
            except MemoryError as error:
                frames = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
                seen.append("its own" if "fail" in frames else "another")
            else:
                seen.append("nothing")
    assert seen == ["its own"] * 4


def resumed(folder: Path, part: str) -> list[float]:
    """Return the last losses and the EMA of a run; ``part``: whole, killed or resumed."""
    from zerotune.checkpoint import load_checkpoint, save_checkpoint
    from zerotune.ema import EMAShadow

    engine = begin(2, Web(), hidden=True)
    ema = EMAShadow(decay=0.9).attach(engine)
    saved = {"ema": ema}
    if part == "resumed":
        load_checkpoint(folder / "whole", engine=engine, shadows=saved)
    losses = []
    with counted() as taken, pytest.MonkeyPatch.context() as patch:
        for step in range(engine.state.global_step, 8):
            loss = loss_of(engine, step)
            losses.append(float(loss.detach()))
            engine.backward(loss)
            if part == "killed" and step == 6:
                patch.setattr(SlabStep, "run", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            assert engine.step().applied
            ema.step()
            if step == 4 and part != "resumed":
                save_checkpoint(folder / part, engine=engine, shadows=saved)
    assert taken["zerotune-passes"]
    losses = losses[-3:] + [float(value.double().sum()) for value in ema.state_dict().values()]
    engine.close()
    return losses


def test_a_run_killed_during_a_pass_resumes_bit_for_bit(tmp_path):
    (whole,) = run_ranks(resumed, tmp_path, "whole")
    with pytest.raises(RanksFailed, match="exit code -9"):
        run_ranks(resumed, tmp_path, "killed")
    # Both runs saved at the same step; resume from the killed run's checkpoint.
    (tmp_path / "whole").rename(tmp_path / "other")
    (tmp_path / "killed").rename(tmp_path / "whole")
    assert run_ranks(resumed, tmp_path, "resumed") == [whole]


def compiled(how: str) -> dict[str, Any]:
    engine = begin(2, Web(), hidden=True)
    module = engine.module
    if how == "forward":
        module.again.forward = torch.compile(module.again.forward, backend="eager")
        module.large.forward = torch.compile(module.large.forward, backend="eager")
    elif how == "call":
        module.large.compile(backend="eager")
    losses = []
    with counted():
        for step in range(4):
            loss = loss_of(engine, step)
            losses.append(float(loss.detach()))
            engine.backward(loss)
            engine.step()
    uploads = [d.reason for d in engine.decisions if d.key == "optimizer.step.uploads"]
    engine.close()
    return {"losses": losses, "uploads": uploads}


def test_compiled_modules_use_the_updated_weights():
    (plain,) = run_ranks(compiled, "not")
    (forward,) = run_ranks(compiled, "forward")
    (call,) = run_ranks(compiled, "call")
    assert plain["losses"] == forward["losses"] == call["losses"]
    assert [plain["uploads"], forward["uploads"]] == [[], []]
    assert "__call__ is compiled" in call["uploads"][0], "before it nothing can wait"


def looks(hidden: bool) -> list[Any]:
    """Read a weight in every possible way right after a step."""
    engine = begin(2, Web(), hidden=hidden, precision="fp32")
    weight, ways = engine.module.large.weight, engine.module
    found: list[Any] = []

    seen: list[Callable[[], Any]] = [
        lambda: weight.detach() + 0,
        lambda: copy.deepcopy(weight),
        lambda: torch.from_numpy(weight.numpy(force=True).copy()),
        lambda: ways.state_dict()["large.weight"] + 0,
        lambda: torch.nn.utils.parameters_to_vector(ways.parameters()),
        lambda: weight.data + 0,
        weight.tolist,
        partial(str, weight),
        lambda: torch.func.functional_call(ways.large, {}, (torch.ones(SIDE),)),
        lambda: [each.clone() for each in torch._foreach_mul([weight], 2.0)],
    ]
    slow = SlabStep.run
    with counted(), pytest.MonkeyPatch.context() as patch:
        if hidden:
            patch.setattr(SlabStep, "run", lambda *a: (time.sleep(1e-3), slow(*a))[1])
        for step, look in enumerate(seen):
            engine.backward(loss_of(engine, step))
            engine.step()
            if hidden:
                assert type(weight) is not torch.nn.Parameter
                assert isinstance(weight, torch.nn.Parameter)
                assert (tuple(weight.shape), weight.numel()) == ((301, SIDE), 301 * SIDE)
                assert weight.requires_grad
                assert weight.grad is None
                assert type(weight) is not torch.nn.Parameter, "its shape waits for nothing"
            value = look()
            plain = value.tolist() if isinstance(value, torch.Tensor) else str(value)
            found.append((type(value).__name__, plain))
    engine.close()
    assert type(weight) is torch.nn.Parameter
    return found


def test_any_access_to_a_weight_waits_for_its_update():
    assert run_ranks(looks, True) == run_ranks(looks, False)


@ranks(1)
def test_access_that_bypasses_torch_functions_fails_instead_of_reading_old_values(monkeypatch):
    engine = begin(2, Web(), hidden=True)
    opened, run = threading.Event(), SlabStep.run
    engine.backward(loss_of(engine, 0))
    monkeypatch.setattr(SlabStep, "run", lambda *a: (opened.wait(30), run(*a))[1])
    engine.step()
    with pytest.raises(RuntimeError, match=r"shape|size"), torch._C.DisableTorchFunctionSubclass():
        torch.nn.functional.linear(torch.ones(SIDE).bfloat16(), engine.module.large.weight)
    opened.set()
    engine.close()


class Small(torch.nn.Module):
    """Two products, one by a function that receives its whole weight, as in fused kernels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(SIDE, 40)
        self.second = torch.nn.Linear(40, SIDE)

    def forward(self, x_bts: torch.Tensor, _both: bool = True) -> torch.Tensor:
        return Product.apply(self.first(x_bts), self.second.weight) + self.second.bias


class Product(torch.autograd.Function):
    """``linear`` with hand-written gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        rows, columns = gradient.flatten(0, -2), x.flatten(0, -2)
        return gradient @ weight, rows.t() @ columns


def watched(how: str) -> dict[str, Any]:
    """Train while something (a view, an array, a global hook) forbids deferring a step."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    engine = begin(2, Web(), hidden=True)
    flat = engine.master_weights._layout.tensors[0]
    seen: list[bool] = []
    kept: list[Any] = []
    if how == "global hook":
        kept.append(register_optimizer_step_post_hook(lambda *_: seen.append(float(flat.sum()))))
    weight = engine.module.large.weight
    with counted() as taken:
        for step in range(3):
            engine.backward(loss_of(engine, step))
            if how == "view":
                kept = [weight.detach()]
            if how == "array":
                kept = [weight.detach().view(torch.int16).numpy()]
            engine.step()
            if how == "global hook":
                seen[-1] = seen[-1] == float(flat.sum())
            elif kept:
                there = torch.as_tensor(kept[0]).view(torch.bfloat16)
                seen.append(torch.equal(there, weight.detach()))
    reasons = [d.reason for d in engine.decisions if d.key == "optimizer.step.uploads"]
    for each in kept:
        if hasattr(each, "remove"):
            each.remove()
    shown = all(reason in engine.explain() for reason in reasons)
    engine.close()
    return {"seen": seen, "reasons": reasons, "taken": dict(taken), "shown": shown}


@pytest.mark.parametrize(
    ("how", "reason"),
    [("view", "views of"), ("array", "views of"), ("global hook", "")],
)
def test_a_view_or_a_global_hook_prevents_deferring_the_step(how, reason):
    (found,) = run_ranks(watched, how)
    assert found["seen"] == [True] * 3
    assert [each.startswith(reason) for each in found["reasons"]] == [True] * bool(reason)
    assert found["shown"]
    if how == "view":
        (usual,) = run_ranks(watched, "nothing")
        assert not usual["reasons"]


def compiled_outside(hidden: bool, how: str) -> dict[str, Any]:
    """Train with a model that the user compiled without telling the engine."""
    engine = begin(2, Small(), hidden=hidden, precision="fp32")
    module = engine.module
    call = {
        "module": torch.compile(module, backend="eager"),
        "function": torch.compile(lambda x: module(x) * 1.0, backend="eager"),
    }[how]
    losses = []
    with counted():
        for step in range(6):
            predict = call if step else module
            loss = predict(batch(engine, step)).float().square().mean()
            losses.append(float(loss.detach()))
            engine.backward(loss)
            engine.step()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    reasons = [d.reason for d in engine.decisions if d.key == "optimizer.step.uploads"]
    engine.close()
    return {"losses": losses, "graphs": graphs, "reasons": reasons}


@pytest.mark.parametrize("how", ["module", "function"])
def test_a_model_compiled_by_the_user_is_compiled_only_once_and_a_decision_says_so(how):
    (mine,) = run_ranks(compiled_outside, True, how)
    (theirs,) = run_ranks(compiled_outside, False, how)
    assert mine["losses"] == theirs["losses"]
    assert mine["graphs"] <= theirs["graphs"]
    assert len(mine["reasons"]) == 1
    assert "compiled" in mine["reasons"][0]
