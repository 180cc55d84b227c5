"""Effects of noise, weights, masks, ranges and shifts."""

from __future__ import annotations

import attrs
import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    EDMEulerScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    PNDMScheduler,
)
from diffusers.training_utils import compute_snr
from hypothesis import example, given
from hypothesis import strategies as st

from zerotune.diffusion import (
    DenoisingObjective,
    FlowMatchingObjective,
    InputPerturbation,
    OffsetNoise,
    Unconditional,
)
from zerotune.diffusion.noise import GaussianNoise
from zerotune.diffusion.noise_schedule import ResolutionShift
from zerotune.diffusion.objective import min_snr_weights
from zerotune.errors import DataError, InvalidValueError

FLUX = {"use_dynamic_shifting": True, "shift": 3.0}


def generator(seed=7):
    return torch.Generator().manual_seed(seed)


class Constant(torch.nn.Module):
    """Predict the same value everywhere and record the arguments."""

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, value=0.0):
        super().__init__()
        self.value = value

    def forward(self, noisy, timesteps):
        self.noisy, self.timesteps = noisy, timesteps
        return (torch.full_like(noisy, self.value),)


def zeros(count, *shape):
    return {"images": torch.zeros(count, *(shape or (1, 1, 1)))}


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction", "sample"])
def test_min_snr_gives_the_same_clean_image_loss_for_every_prediction_type(prediction):
    scheduler = DDPMScheduler(prediction_type=prediction)
    steps = torch.arange(0, 1000, 37)
    snr = compute_snr(scheduler, steps)
    weights = min_snr_weights(scheduler, steps, gamma=5.0)
    # Squared error of noise, velocity or image that a squared error of 1 in the clean image causes.
    alpha = scheduler.alphas_cumprod[steps]
    of_image = {
        "epsilon": alpha / (1 - alpha),
        "v_prediction": 1 / (1 - alpha),
        "sample": torch.ones_like(alpha),
    }[prediction]
    torch.testing.assert_close(weights * of_image, snr.clamp(max=5.0), rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("prediction", ["v_prediction", "sample"])
def test_min_snr_keeps_the_weight_of_pure_noise(prediction):
    scheduler = DDPMScheduler(prediction_type=prediction, rescale_betas_zero_snr=True)
    weights = min_snr_weights(scheduler, torch.arange(1000), gamma=5.0)
    assert torch.isfinite(weights).all()
    assert weights[-1] == 1.0
    assert weights[-2] < 1e-3
    objective = DenoisingObjective(scheduler=scheduler, snr_gamma=5.0, timestep_range=(0.999, 1.0))
    model = Constant()
    loss = objective(model, {"images": torch.full((4, 1, 8, 8), 0.5)}, generator())
    assert model.timesteps.tolist() == [999] * 4
    # The input is pure noise, so that the targets for velocity and image are -0.5 and 0.5.
    assert torch.equal(model.noisy, GaussianNoise().draw(model.noisy, generator()).added)
    assert loss == pytest.approx(0.25, rel=1e-5)


@pytest.mark.parametrize("scheduler", [DDPMScheduler, DDIMScheduler, EulerDiscreteScheduler])
def test_predicting_noise_from_pure_noise_is_refused(scheduler):
    with pytest.raises(InvalidValueError, match="v_prediction") as caught:
        DenoisingObjective(scheduler=scheduler(rescale_betas_zero_snr=True))
    assert caught.value.key == "scheduler.prediction_type"
    scheduler = scheduler(rescale_betas_zero_snr=True, prediction_type="v_prediction")
    assert DenoisingObjective(scheduler=scheduler).scheduler.config.rescale_betas_zero_snr


@pytest.mark.parametrize("sampling", [EulerDiscreteScheduler, PNDMScheduler])
def test_sampling_only_schedulers_train_as_ddpm(sampling):
    settings = {"beta_end": 0.012, "prediction_type": "v_prediction"}
    batch = {"images": torch.full((8, 1, 4, 4), 0.5)}
    ours = DenoisingObjective(scheduler=sampling(**settings))
    expected = DenoisingObjective(scheduler=DDPMScheduler(**settings))
    assert torch.equal(
        ours(Constant(), batch, generator()), expected(Constant(), batch, generator())
    )
    assert expected.decisions == ()
    assert "only sample" in ours.decisions[0].reason


@given(low=st.floats(0, 0.9), width=st.floats(0.01, 1), flow=st.booleans(), shift=st.floats(0.5, 4))
@example(low=0.0, width=1.0, flow=True, shift=2.3608247504637805)
@example(low=0.5, width=1.0, flow=True, shift=2.3608247504637805)
def test_exactly_the_given_timestep_range_is_trained(low, width, flow, shift):
    high = min(1.0, low + width)
    if flow:
        scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
        objective = FlowMatchingObjective(scheduler=scheduler, timestep_range=(low, high))
        levels = objective.levels((1, 1, 1, 1)).sigmas
        every = scheduler.sigmas.clamp(max=1.0)
        inside = every[(every > low) & (every <= high)]
        assert torch.equal(levels, inside)
    else:
        objective = DenoisingObjective(timestep_range=(low, high))
    model = Constant()
    objective(model, zeros(300), generator())
    times = model.timesteps / 1000
    assert flow or times.max() - times.min() > 0.8 * (high - low) - 0.01
    assert times.min() >= low - 5.1e-4
    assert times.max() <= high + 1e-6


@pytest.mark.parametrize("objective", [DenoisingObjective, FlowMatchingObjective])
@pytest.mark.parametrize("share", [(0.5, 0.5), (0.6, 0.2), (-0.1, 1.0), (0.0, 1.1)])
def test_an_invalid_timestep_range_is_refused(objective, share):
    with pytest.raises(InvalidValueError, match=r"0\.0, 0\.2") as caught:
        objective(timestep_range=share)
    assert caught.value.key == "timestep_range"


def test_a_timestep_range_without_any_step_is_refused():
    with pytest.raises(InvalidValueError, match="a wider range"):
        DenoisingObjective(timestep_range=(0.5, 0.5001))
    flow = FlowMatchingObjective(timestep_range=(0.0, 0.0005))
    with pytest.raises(InvalidValueError, match="a wider range"):
        flow.levels((1, 1, 1, 1))


@given(
    height=st.integers(8, 256),
    width=st.integers(8, 256),
    base=st.sampled_from([64, 256]),
    most=st.sampled_from([1024, 4096, 8192]),
    shifts=st.sampled_from([(0.5, 1.15), (0.5, 0.9), (0.95, 2.05)]),
)
def test_the_resolution_shift_equals_that_of_the_pipelines(height, width, base, most, shifts):
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift
    from diffusers.pipelines.stable_diffusion_3 import pipeline_stable_diffusion_3

    config = FlowMatchEulerDiscreteScheduler(
        base_image_seq_len=base,
        max_image_seq_len=most,
        base_shift=shifts[0],
        max_shift=shifts[1],
    ).config
    tokens = (height // 2) * (width // 2)
    ours = ResolutionShift().mu((2, 16, height, width), config)
    assert ours == calculate_shift(tokens, base, most, *shifts)
    assert ours == pipeline_stable_diffusion_3.calculate_shift(tokens, base, most, *shifts)


@pytest.mark.parametrize("kind", ["exponential", "linear"])
def test_each_bucket_is_trained_on_the_sigmas_that_sampling_uses(kind):
    objective = FlowMatchingObjective(
        scheduler=FlowMatchEulerDiscreteScheduler(**FLUX, time_shift_type=kind)
    )
    medians = []
    for side in (32, 64, 128):
        shape = (1, 16, side, side)
        sampling = FlowMatchEulerDiscreteScheduler(**FLUX, time_shift_type=kind)
        sampling.set_timesteps(1000, mu=ResolutionShift().mu(shape, sampling.config))
        levels = objective.levels(shape)
        torch.testing.assert_close(levels.sigmas, sampling.sigmas[:-1], rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(levels.timesteps, sampling.timesteps, rtol=1e-6, atol=1e-4)
        model = Constant()
        objective(model, zeros(300, 1, side, side), generator())
        medians.append(float(model.timesteps.median()))
    assert medians == sorted(medians)
    assert medians[2] - medians[0] > 50


def test_a_custom_resolution_shift_is_applied():
    @attrs.frozen
    class Fixed:
        value: float

        def mu(self, shape, config):  # noqa: ARG002 - the protocol's
            return self.value

    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    plain = FlowMatchingObjective(scheduler=scheduler, resolution_shift=Fixed(0.0))
    sigmas = FlowMatchEulerDiscreteScheduler().sigmas
    torch.testing.assert_close(plain.levels((1, 4, 8, 8)).sigmas, sigmas, rtol=1e-6, atol=0)
    with pytest.raises(InvalidValueError, match="use_dynamic_shifting=True"):
        FlowMatchingObjective(resolution_shift=Fixed(1.0))


def test_a_shift_set_after_construction_is_used():
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_shift(3.0)
    objective = FlowMatchingObjective(scheduler=scheduler)
    assert objective.scheduler.config.shift == 3.0
    assert torch.equal(
        objective.levels((1, 1, 1, 1)).sigmas, FlowMatchEulerDiscreteScheduler(shift=3.0).sigmas
    )


def test_masked_positions_do_not_contribute_to_the_loss():
    images, mask = torch.zeros(2, 3, 4, 4), torch.ones(2, 1, 4, 4)
    mask[0, :, :2] = 0.0
    noise = torch.randn(images.shape, generator=generator())
    objective = DenoisingObjective()
    loss = objective(Constant(), {"images": images, "loss_masks": mask}, generator())
    assert float(loss) == pytest.approx(float((noise**2 * mask).mean()), rel=1e-6)
    per_channel = mask.expand(-1, 3, -1, -1)
    assert objective(
        Constant(), {"images": images, "loss_masks": per_channel}, generator()
    ) == pytest.approx(float(loss), rel=1e-6)


@attrs.frozen(kw_only=True, eq=False)
class Halved(Unconditional):
    """A family whose latents are images at half size, repeated to clips if ``frames`` is set."""

    frames: int = 0

    def clean(self, batch):
        small = torch.nn.functional.avg_pool2d(batch["images"], 2)
        return small[:, :, None].expand(-1, -1, self.frames, -1, -1) if self.frames else small


@pytest.mark.parametrize("frames", [0, 1, 3])
def test_image_masks_are_resized_to_the_latents(frames):
    images, mask = torch.zeros(2, 3, 8, 8), torch.ones(2, 1, 8, 8)
    mask[0, :, :, :3] = 0.0
    small = torch.nn.functional.avg_pool2d(mask, 2)
    assert small[0, 0, 0].tolist() == [0.0, 0.5, 1.0, 1.0]
    objective = DenoisingObjective(family=Halved(frames=frames))
    noise = torch.randn((2, 3, *(frames,) * bool(frames), 4, 4), generator=generator())
    loss = objective(Constant(), {"images": images, "loss_masks": mask}, generator())
    weights = small[:, :, None] if frames else small
    assert float(loss) == pytest.approx(float((noise**2 * weights).mean()), rel=1e-6)


def test_weights_and_masks_of_the_wrong_shape_are_data_errors():
    for key, value, hint in (
        ("loss_weights", torch.ones(2, 1), "one weight per sample"),
        ("loss_weights", torch.ones(3), "one weight per sample"),
        ("loss_masks", torch.ones(2, 1, 32, 32), "interpolate"),
        ("loss_masks", torch.ones(2, 4, 4), "interpolate"),
    ):
        with pytest.raises(DataError, match=hint) as caught:
            DenoisingObjective()(Constant(), zeros(2, 1, 4, 4) | {key: value}, generator())
        assert key in caught.value.key


@pytest.mark.parametrize(
    ("objective", "levels"),
    [
        (FlowMatchingObjective(), [1, 251, 501, 1000]),
        (FlowMatchingObjective(timestep_range=(0.5, 1.0)), [501, 626, 751, 1000]),
        (DenoisingObjective(), [0, 250, 500, 999]),
        (DenoisingObjective(timestep_range=(0.0, 0.2)), [0, 50, 100, 199]),
    ],
)
def test_quantiles_run_from_little_noise_to_much(objective, levels):
    seen = []
    model = Constant()
    model.register_forward_hook(lambda *_: seen.append(model.timesteps.float().mean().item()))
    objective.losses_at(
        model,
        zeros(2),
        quantiles=(0.0, 0.25, 0.5, 1.0),
        noise=GaussianNoise(),
        generator=generator(),
    )
    assert seen == pytest.approx(levels, abs=1.01)
    assert seen == sorted(seen)


def test_invalid_settings_are_refused_with_a_fix():
    for make, key, fix in (
        (lambda: DenoisingObjective(snr_gamma=0.0), "snr_gamma", "5.0"),
        (lambda: DenoisingObjective(snr_gamma="5"), "snr_gamma", "5.0"),
        (lambda: DenoisingObjective(snr_gamma=float("inf")), "snr_gamma", "5.0"),
        (lambda: OffsetNoise(strength=-0.1), "strength", "0.1"),
        (lambda: OffsetNoise(strength="weak"), "strength", "0.1"),
        (lambda: InputPerturbation(strength=float("nan")), "strength", "0.1"),
        (lambda: ResolutionShift(patch_size=0), "patch_size", "2"),
        (lambda: ResolutionShift(patch_size="2"), "patch_size", "2"),
        (lambda: FlowMatchingObjective(density="cosmap"), "density", "of weighting"),
        (lambda: FlowMatchingObjective(weighting="snr"), "weighting", '"none"'),
        (
            lambda: FlowMatchingObjective(scheduler=EDMEulerScheduler()),
            "scheduler",
            "FlowMatchEulerDiscreteScheduler",
        ),
        (
            lambda: FlowMatchingObjective(scheduler=EulerDiscreteScheduler()),
            "scheduler",
            "DenoisingObjective",
        ),
        (
            lambda: DenoisingObjective(scheduler=FlowMatchEulerDiscreteScheduler()),
            "scheduler",
            "FlowMatchingObjective",
        ),
        (
            lambda: FlowMatchingObjective(
                scheduler=FlowMatchEulerDiscreteScheduler(invert_sigmas=True)
            ),
            "scheduler.invert_sigmas",
            "predict",
        ),
    ):
        with pytest.raises(InvalidValueError) as caught:
            make()
        assert caught.value.key == key
        assert fix in caught.value.fix
