"""zerotune's own optimizers against their papers, written out for one parameter."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.ranks import ranks
from zerotune.backend.optimizers.classes import Lamb, Lion, Muon, orthogonalise


def steps(optimizer_class, gradients, start, **arguments):
    weight = torch.nn.Parameter(start.clone())
    optimizer = optimizer_class([weight], **arguments)
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    return weight.detach(), optimizer.state[weight]


@pytest.fixture
def problem():
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(3, 5, generator=generator)
    return start, [torch.randn(3, 5, generator=generator) for _ in range(4)]


def test_lion_matches_algorithm_2_of_its_paper(problem):
    start, gradients = problem
    lr, (b1, b2), decay = 0.01, (0.9, 0.99), 0.1
    weight, momentum = start.clone(), torch.zeros_like(start)
    for gradient in gradients:
        update = torch.sign(b1 * momentum + (1 - b1) * gradient)
        weight = weight - lr * (update + decay * weight)
        momentum = b2 * momentum + (1 - b2) * gradient
    found, state = steps(Lion, gradients, start, lr=lr, betas=(b1, b2), weight_decay=decay)
    torch.testing.assert_close(found, weight)
    torch.testing.assert_close(state["exp_avg"], momentum)


def test_lamb_matches_algorithm_2_of_its_paper(problem):
    start, gradients = problem
    lr, (b1, b2), eps, decay = 0.05, (0.9, 0.99), 1e-6, 0.1
    weight, first, second = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    for number, gradient in enumerate(gradients, 1):
        first = b1 * first + (1 - b1) * gradient
        second = b2 * second + (1 - b2) * gradient**2
        ratio = (first / (1 - b1**number)) / ((second / (1 - b2**number)).sqrt() + eps)
        update = ratio + decay * weight
        weight = weight - lr * (weight.norm() / update.norm()) * update
    found, _ = steps(Lamb, gradients, start, lr=lr, betas=(b1, b2), eps=eps, weight_decay=decay)
    torch.testing.assert_close(found, weight)


@pytest.mark.parametrize(("scale", "ratio"), [(1e-9, 0.01), (1e9, 10.0)])
def test_lamb_keeps_the_trust_ratio_in_bounds(scale, ratio):
    start = torch.full((4,), scale)
    found, _ = steps(Lamb, [torch.ones(4)], start, lr=1.0)
    # Every element of Adam's first step has magnitude 1.
    assert found.tolist() == pytest.approx((start - ratio).tolist(), rel=1e-5)


def test_lamb_can_train_weights_that_start_at_zero():
    found, _ = steps(Lamb, [torch.ones(4)], torch.zeros(4), lr=0.5)
    assert found.tolist() == pytest.approx([-0.5] * 4, rel=1e-5)


@pytest.mark.parametrize("shape", [(6, 6), (4, 32), (32, 4)])
def test_orthogonalise_brings_singular_values_near_one(shape):
    matrix = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
    scale = math.sqrt(max(1.0, shape[0] / shape[1]))
    values = torch.linalg.svdvals(orthogonalise(matrix) / scale)
    assert values.min() > 0.3
    assert values.max() < 1.3
    u, _, vt = torch.linalg.svd(matrix, full_matrices=False)
    cosine = torch.nn.functional.cosine_similarity(
        orthogonalise(matrix).flatten(), (u @ vt).flatten(), dim=0
    )
    assert cosine > 0.95


def test_muon_treats_a_convolution_as_a_matrix():
    generator = torch.Generator().manual_seed(2)
    start, gradient = (torch.randn(4, 3, 3, 3, generator=generator) for _ in range(2))
    whole, _ = steps(Muon, [gradient], start, lr=0.1)
    flat, _ = steps(Muon, [gradient.flatten(1)], start.flatten(1), lr=0.1)
    torch.testing.assert_close(whole.flatten(1), flat)


def test_the_adam_in_muon_equals_adamw(problem):
    start, gradients = problem
    ours = torch.nn.Parameter(start.clone())
    theirs = torch.nn.Parameter(start.clone())
    arguments = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    pairs = [
        (ours, Muon([{"params": [ours], "use_muon": False, **arguments}])),
        (theirs, torch.optim.AdamW([theirs], **arguments)),
    ]
    for gradient in gradients:
        for weight, optimizer in pairs:
            weight.grad = gradient.clone()
            optimizer.step()
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("optimizer_class", [Lion, Lamb, Muon])
def test_parameters_without_a_gradient_do_not_change(optimizer_class):
    weight = torch.nn.Parameter(torch.ones(2, 2))
    optimizer_class([weight], lr=1.0).step()
    assert torch.equal(weight, torch.ones(2, 2))


@pytest.mark.deepspeed
@ranks(1)
def test_deepspeeds_lion_moves_weights_without_a_gradient_and_ours_does_not() -> None:
    from deepspeed.ops.lion import DeepSpeedCPULion

    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = DeepSpeedCPULion([weight], lr=0.25)
    weight.grad = torch.zeros(3)
    optimizer.step()
    assert weight.tolist() == [0.75] * 3, "its sign of 0 is 1; docs/optimizers.md says so"
    ours, _ = steps(Lion, [torch.zeros(3)], torch.ones(3), lr=0.25)
    assert ours.tolist() == [1.0] * 3
