"""The step in one pass gives the same bits as DeepSpeed's own, in the real engine."""

from __future__ import annotations

import hashlib
import itertools
from typing import Any

import attrs
import pytest
import torch

from tests.support.ranks import ranks, run_ranks
from tests.support.runs import Case, start, unet_loss

pytestmark = pytest.mark.deepspeed

STEPS = 6
WHOLE_WEIGHTS = (("stage3_param_persistence_threshold", 0),)


def train(
    case: Case, host_step: bool, drop: tuple[int, ...] = (), added_up: str | None = None
) -> dict[str, Any]:
    """Return the results of a run by name; weights, moments and EMA as digests."""
    from tests.support.models import tiny_unet
    from zerotune.ema import EMAShadow

    engine = begin(case, tiny_unet(), host_step, added_up)
    ema = EMAShadow(decay=0.9).attach(engine)
    losses, norms = [], []
    for step in range(STEPS):
        loss = unet_loss(engine, step)
        losses.append(float(loss.detach()))
        engine.backward(loss)
        if step in drop:
            engine.discard()
            continue
        outcome = engine.step()
        norms.append(outcome.grad_norm)
        if outcome.applied:
            ema.step()
    kept = {
        "losses": losses,
        "norms": norms,
        "master": digest(engine),
        "ema": hashlib.sha256(
            b"".join(value.numpy().tobytes() for value in ema.state_dict().values())
        ).hexdigest(),
        "model": weights_of(engine),
        "decisions": [d.after for d in engine.decisions if d.key == "optimizer.step"],
        "added up": [d.after for d in engine.decisions if d.key == "optimizer.step.gradients"],
        "gradients": {
            str(slab.grad.dtype)
            for slab in engine.master_weights._layout.tensors
            if slab.grad is not None
        },
        "explained": "optimizer.step: " in engine.explain(),
    }
    engine.close()
    return kept


def begin(case: Case, model: Any, host_step: bool, added_up: str | None = None) -> Any:
    from zerotune.plan.model import DeepSpeedPlan

    original = DeepSpeedPlan.resolve

    def resolve(self: Any, **arguments: Any) -> Any:
        if added_up is not None:
            config = {**self.to_dict(), "data_types": {"grad_accum_dtype": added_up}}
            self = DeepSpeedPlan.from_dict(config)
        return original(self, **arguments, host_step=host_step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeepSpeedPlan, "resolve", resolve)
        return start(case, model)


def digest(engine: Any) -> str:
    found = hashlib.sha256()
    for fragment in engine.master_weights.read():
        found.update(fragment.address.key.encode())
        found.update(fragment.value.numpy().tobytes())
        for name, state in sorted(fragment.states.items()):
            found.update(name.encode() + state.view(torch.uint8).numpy().tobytes())
        found.update(str(fragment.step).encode())
    return found.hexdigest()


def weights_of(engine: Any) -> str:
    found = hashlib.sha256()
    # At stage 3, what is at rest; state_dict() refuses empty tensors.
    named = itertools.chain(engine.module.named_parameters(), engine.module.named_buffers())
    for name, value in named:
        found.update(name.encode() + value.detach().float().numpy().tobytes())
    return found.hexdigest()


CASES = [
    Case(stage=1, offload="cpu", precision="bf16"),
    Case(stage=2, offload="cpu", precision="bf16"),
    Case(stage=2, offload="cpu"),
    Case(stage=3, offload="cpu", precision="bf16", overrides=WHOLE_WEIGHTS),
    Case(stage=3, offload="cpu", offload_param="cpu", overrides=WHOLE_WEIGHTS),
]


def both(
    case: Case, drop: tuple[int, ...] = (), added_up: str | None = None
) -> list[dict[str, Any]]:
    return [train(case, host_step, drop, added_up) for host_step in (True, False)]


def same(
    case: Case,
    *,
    world_size: int = 1,
    drop: tuple[int, ...] = (),
    added_up: str | None = None,
) -> list[dict[str, Any]]:
    """Assert that both steps give the same results; return those of the one pass, by rank."""
    found = run_ranks(both, case, drop, added_up, world_size=world_size)
    for one, other in found:
        assert one["decisions"] == ["one pass"]
        assert other["decisions"] == [
            "AdamWBF16States' own" if case.optimizer == "AdamWBF16States" else "DeepSpeed's"
        ]
        assert one["explained"]
        for name in ("losses", "norms", "master", "ema", "model"):
            assert one[name] == other[name], name
    return [one for one, _ in found]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_step_in_one_pass_equals_deepspeeds_own(case):
    (kept,) = same(case)
    wanted = torch.bfloat16 if case.precision == "bf16" else torch.float32
    assert kept["gradients"] == {str(wanted)}, "gradients arrive in their own dtype"


@pytest.mark.parametrize("case", [CASES[1], CASES[3]], ids=str)
def test_the_step_in_one_pass_equals_deepspeeds_own_on_two_ranks(case):
    same(case, world_size=2)


L2 = {"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.1, "lr": 1e-3}}
OTHER = {
    "accumulated": attrs.evolve(CASES[1], accumulation=3),
    "bf16 states": attrs.evolve(CASES[1], optimizer="AdamWBF16States"),
    "bf16 states at stage 3": attrs.evolve(CASES[3], optimizer="AdamWBF16States", accumulation=3),
    "clipped at times at stage 3": attrs.evolve(CASES[3], clipping=4.1),
    "L2 decay, not clipped": attrs.evolve(CASES[2], optimizer=L2, clipping=0.0),
}
NIGHTLY = {
    "accumulated at stage 3": attrs.evolve(CASES[3], accumulation=3),
    "bf16 states, fp32": attrs.evolve(CASES[2], optimizer="AdamWBF16States", clipping=0.0),
    "not clipped": attrs.evolve(CASES[1], clipping=0.0),
    "clipped at times": attrs.evolve(CASES[1], clipping=4.1),
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=name) for name, case in OTHER.items()]
    + [pytest.param(case, id=n, marks=pytest.mark.nightly) for n, case in NIGHTLY.items()],
)
def test_the_step_in_one_pass_equals_deepspeeds_own_with_other_settings(case):
    kept = same(case)
    assert kept[0]["added up"] == (["bfloat16"] if case.accumulation == 3 else [])
    if case.clipping == 4.1:
        norms = kept[0]["norms"]
        assert min(norms) < 4.1 < max(norms), "only some steps may be clipped"


@pytest.mark.parametrize("case", [CASES[1], CASES[3]], ids=str)
def test_the_step_in_one_pass_equals_deepspeeds_own_when_accumulating_in_fp32(case):
    (kept,) = same(attrs.evolve(case, accumulation=3), added_up="fp32")
    assert kept["gradients"] == {"torch.float32"}
    assert kept["added up"] == ["float32"]


@pytest.mark.parametrize("case", [CASES[1], CASES[3]], ids=str)
def test_the_step_in_one_pass_equals_deepspeeds_own_when_windows_are_discarded(case):
    same(case, drop=(1, 4))


@ranks(1)
def test_deepspeeds_own_step_is_used_without_a_compiler():
    from tests.support.models import tiny_unet

    with pytest.MonkeyPatch.context() as patch:
        from zerotune.backend.step import deferred
        from zerotune.errors import PlatformError

        def refuse() -> None:
            raise PlatformError("no C++ compiler is installed")

        patch.setattr(deferred, "load_host_step", refuse)
        engine = start(CASES[1], tiny_unet())
    found = [(d.after, d.reason) for d in engine.decisions if d.key == "optimizer.step"]
    engine.backward(unet_loss(engine, 0))
    assert engine.step().applied
    engine.close()
    assert found == [
        ("DeepSpeed's", "the op host_step cannot be built: no C++ compiler is installed")
    ]


class Two(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left = torch.nn.Linear(8, 8)
        self.right = torch.nn.Linear(8, 8)

    def forward(self, x_b8: torch.Tensor, both: bool) -> torch.Tensor:
        return self.left(x_b8) + self.right(x_b8) if both else self.left(x_b8)


@pytest.mark.parametrize("stage", [2, 3])
@ranks(1)
def test_a_parameter_without_a_gradient_is_not_stepped_with_an_earlier_one(stage):
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}}
    case = Case(stage=stage, offload="cpu", micro_batch=2, clipping=0.0, optimizer=optimizer)
    engine, seen = start(case, Two()), []
    for both in (True, False):
        engine.backward(engine(torch.ones(2, 8), both).square().sum())
        engine.step()
        (right,) = (
            fragment.states["exp_avg"].clone()
            for fragment in engine.master_weights.read()
            if fragment.address.name == "right.weight"
        )
        seen.append(right)
    engine.close()
    assert torch.allclose(seen[1], 0.9 * seen[0], rtol=1e-6), "as if it got zeros later"


def swapping(folder: str | None, pipelined: bool) -> dict[str, Any]:
    """Train at stage 3 with sub-groups on NVMe, editing one of them between steps."""
    from zerotune.ema import EMAShadow
    from zerotune.optim.resolver import OptimizerResolver
    from zerotune.plan.model import DeepSpeedPlan, ModelFacts
    from zerotune.training.setup import build_engine

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(601, 601) for _ in range(4)))
    place: dict[str, Any] = {"device": "cpu"}
    if folder is not None:
        place = {"device": "nvme", "nvme_path": folder}
        place |= {"pipeline_read": pipelined, "pipeline_write": pipelined}
    plan = DeepSpeedPlan.from_dict({
        "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
        "zero_optimization": {
            "stage": 3, "sub_group_size": 360_000, "stage3_param_persistence_threshold": 0,
            "offload_optimizer": place,
        },
    })  # fmt: skip
    resolved = plan.resolve(model=ModelFacts.from_module(model), world_size=1)
    engine = build_engine(model=model, plan=OptimizerResolver().apply(resolved))
    wrapper, losses, seen = engine.deepspeed_engine.optimizer, [], []
    ema = EMAShadow(decay=0.9).attach(engine)
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(2, 601, generator=generator).to(engine.dtype)
        loss = engine(x).float().square().mean()
        losses.append(float(loss.detach()))
        engine.backward(loss)
        engine.step()
        ema.step()
        with engine.master_weights.editing() as fragments:
            next(fragments).value.mul_(1.5)
        if folder is not None and pipelined:
            seen.append(dict(wrapper.optimizer_swapper.swap_ops))
    kept = {
        "losses": losses,
        "master": digest(engine),
        "ema": [float(value.double().sum()) for value in ema.state_dict().values()],
    }
    swapped = [wrapper._swappable_optimizer_subgroup(each) for each in range(4)]
    engine.close()
    return {**kept, "swapped": swapped, "seen": seen}


@pytest.mark.nvme
def test_reading_ahead_and_writing_behind_on_nvme_changes_no_bit(tmp_path):
    (host,) = run_ranks(swapping, None, False)
    (in_turn,) = run_ranks(swapping, str(tmp_path / "in turn"), False)
    (beside,) = run_ranks(swapping, str(tmp_path / "beside"), True)
    assert in_turn["swapped"] == beside["swapped"] == [True] * 4
    for name in ("losses", "master", "ema"):
        assert host[name] == in_turn[name] == beside[name], name
    assert len(beside["seen"]) == 4
    under_way = [name for each in beside["seen"] for name, op in each.items() if op is not None]
    assert not under_way, "who edits a sub-group leaves it written"
