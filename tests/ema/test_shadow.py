"""EMAShadow on plain modules: arithmetic, swapping, misuse. Engines: test_shadow_on_engines."""

from __future__ import annotations

import pytest
import torch

from tests.support.models import HostileNet, tiny_unet
from zerotune.ema import EMAShadow, WarmupDecay
from zerotune.ema.decay import ConstantDecay
from zerotune.errors import EMAError, EngineError, InvalidValueError


def move(model: torch.nn.Module, seed: int, size: float = 0.01) -> None:
    """Change every trainable weight a little, as an optimizer step does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=size)


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: parameter.detach().clone()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def test_the_shadow_equals_a_float64_reference_with_an_interval():
    model = HostileNet()
    ema = EMAShadow(decay=0.9, update_every=3).attach(model)
    expected = {name: value.double() for name, value in weights(model).items()}
    for step in range(1, 20):
        move(model, seed=step)
        ema.step()
        if step % 3 == 0:
            for name, value in weights(model).items():
                expected[name] = 0.9**3 * expected[name] + (1 - 0.9**3) * value.double()
        for name, full in ema.gather():
            assert full.shape == expected[name].shape
            assert (full.double() - expected[name]).norm() <= 1e-6 * expected[name].norm()


def test_frozen_parameters_are_excluded_and_tied_ones_counted_once():
    model = HostileNet()
    ema = EMAShadow(decay=0.9).attach(model)
    names = [name for name, _ in ema.gather()]
    assert names == list(weights(model))
    assert not any(name.startswith(("frozen", "tied")) for name in names)
    assert ema.nbytes == 4 * sum(value.numel() for value in weights(model).values())


def test_a_swap_that_fails_half_way_is_undone(monkeypatch):
    from zerotune.ema import shadow as module

    model = HostileNet()
    ema = EMAShadow(decay=0.9).attach(model)
    move(model, seed=1)
    ema.step()
    trained, averaged = weights(model), dict(ema.gather())
    calls = []

    def failing(left, right, real=module.exchange):
        calls.append(1)
        if len(calls) == 4:
            raise OSError("the disk is gone")
        real(left, right)

    monkeypatch.setattr(module, "exchange", failing)
    with pytest.raises(OSError, match="the disk is gone"), ema.swapped_in():
        pytest.fail("the block must not run on half exchanged weights")
    assert len(calls) == 4 + 3
    assert all(torch.equal(value, trained[name]) for name, value in weights(model).items())
    assert all(torch.equal(full, averaged[name]) for name, full in ema.gather())


def test_calls_that_would_mix_shadow_and_weights_are_refused_while_swapped_in():
    ema = EMAShadow(decay=0.9).attach(HostileNet())
    with ema.swapped_in():
        for refused in (ema.step, ema.state_dict, ema.distance, lambda: ema.load_state_dict({})):
            with pytest.raises(EMAError, match="swapped in"):
                refused()
        with pytest.raises(EMAError, match="swapped in"), ema.swapped_in():
            pytest.fail("nested use must be refused")
    ema.step()


def test_a_state_round_trip_continues_exactly():
    model, twin = HostileNet(), HostileNet()
    ema = EMAShadow(decay=WarmupDecay(), update_every=2).attach(model)
    for step in range(5):
        move(model, seed=step)
        ema.step()
    twin.load_state_dict(model.state_dict())
    other = EMAShadow(decay=WarmupDecay(), update_every=2).attach(twin)
    other.load_state_dict({key: value.clone() for key, value in ema.state_dict().items()})
    assert other.steps == 5
    for step in range(5, 9):
        move(model, seed=step)
        move(twin, seed=step)
        ema.step()
        other.step()
    theirs = dict(other.gather())
    assert all(torch.equal(full, theirs[name]) for name, full in ema.gather())


def test_begin_anew_resets_the_shadow_to_the_current_weights():
    model = torch.nn.Linear(3, 2)
    shadow = EMAShadow(decay=0.5).attach(model)
    for _ in range(2):
        with torch.no_grad():
            model.weight.add_(1.0)
        shadow.step()
    assert shadow.distance() > 0
    shadow.begin_anew()
    assert (shadow.distance(), shadow.steps) == (0, 0)
    with shadow.swapped_in(), pytest.raises(EMAError):
        shadow.begin_anew()


def test_a_state_of_other_weights_is_refused_and_changes_nothing():
    ema = EMAShadow(decay=0.9).attach(HostileNet())
    before = dict(ema.gather())
    state = EMAShadow(decay=0.9).attach(tiny_unet()).state_dict()
    with pytest.raises(EMAError, match=r"missing .*convolution\.bias\[0:3\].*unexpected"):
        ema.load_state_dict(state)
    assert all(torch.equal(full, before[name]) for name, full in ema.gather())
    short = {**ema.state_dict(), "first.weight[0:91]": torch.zeros(90)}
    with pytest.raises(EMAError, match="90 elements instead of 91"):
        ema.load_state_dict(short)


def test_the_distance_shrinks_as_the_shadow_follows():
    model = HostileNet()
    ema = EMAShadow(decay=0.5).attach(model)
    assert ema.distance() == 0.0
    before = weights(model)
    move(model, seed=0, size=0.1)
    after = weights(model)
    apart = sum(float((after[n] - before[n]).double().square().sum()) for n in after) ** 0.5
    norm = sum(float(after[n].double().square().sum()) for n in after) ** 0.5
    assert ema.distance() == pytest.approx(apart / norm, rel=1e-6)
    ema.step()
    assert ema.distance() == pytest.approx(apart / norm / 2, rel=1e-5)


def test_a_shadow_that_does_not_move_is_detected(monkeypatch):
    model = HostileNet()
    ema = EMAShadow(decay=0.9).attach(model)
    move(model, seed=0)
    monkeypatch.setattr(torch, "_foreach_lerp_", lambda *_: None)
    with pytest.raises(EMAError, match=r"decay 0\.9 changed the shadow's distance to the weights"):
        ema.step()


def test_weights_that_have_not_moved_yet_pass_the_check():
    model = HostileNet()
    ema = EMAShadow(decay=0.9999).attach(model)
    for _ in range(5):
        ema.step()
    with torch.no_grad():
        # The change is far too small for an fp32 EMA, as in the first steps of a warm-up.
        model.first.weight.mul_(1 + 2**-22)
    ema.step()


def test_non_finite_weights_are_detected():
    model = HostileNet()
    ema = EMAShadow(decay=0.9).attach(model)
    with torch.no_grad():
        model.scale.fill_(float("nan"))
    with pytest.raises(EMAError, match="not finite"):
        ema.step()


def test_attach_refuses_parameters_it_cannot_average():
    frozen = HostileNet().requires_grad_(False)
    with pytest.raises(EMAError, match="no trainable parameter"):
        EMAShadow(decay=0.9).attach(frozen)
    with pytest.raises(EngineError, match="master weights must be fp32"):
        EMAShadow(decay=0.9).attach(torch.nn.Linear(2, 2).bfloat16())
    with pytest.raises(EngineError, match="has no master weights"):
        EMAShadow(decay=0.9).attach("model")
    ema = EMAShadow(decay=0.9).attach(HostileNet())
    with pytest.raises(EMAError, match="already attached"):
        ema.attach(HostileNet())


def test_attach_refuses_missing_elements():
    from zerotune.backend.deepspeed.external import master_weights_of

    master = master_weights_of(HostileNet())
    master._layout.addresses = master._layout.addresses[:-1]
    with pytest.raises(EMAError, match="elements of the trainable parameters"):
        EMAShadow(decay=0.9).attach(master)


def test_use_before_attach_asks_for_attach():
    ema = EMAShadow(decay=0.9)
    assert not ema.attached
    with pytest.raises(EMAError, match="attach"):
        ema.step()
    with pytest.raises(EMAError, match="attach"):
        ema.state_dict()


@pytest.mark.parametrize(
    "arguments",
    [{"update_every": 0}, {"update_every": 2.5}, {"start_after": -1}, {"update_every": True}],
)
def test_invalid_arguments_are_named(arguments):
    with pytest.raises(InvalidValueError) as caught:
        EMAShadow(decay=0.9, **arguments)
    assert caught.value.key == next(iter(arguments))


def test_explain_names_schedule_size_and_progress():
    model = HostileNet()
    ema = EMAShadow(decay=ConstantDecay(decay=0.9), update_every=2, start_after=10)
    assert "ConstantDecay(decay=0.9), every 2 steps, after 10 steps" in ema.explain()
    text = ema.attach(model).explain()
    assert f"{ema.nbytes // 4:,} fp32 elements" in text
    assert "0 steps counted" in text


def test_a_distributed_wrapper_is_unwrapped():
    model = HostileNet()
    wrapped = torch.nn.parallel.DistributedDataParallel.__new__(
        torch.nn.parallel.DistributedDataParallel
    )
    torch.nn.Module.__init__(wrapped)
    wrapped.module = model
    ema = EMAShadow(decay=0.9).attach(wrapped)
    assert [name for name, _ in ema.gather()] == list(weights(model))
