"""The losses recipe: noise of several resolutions, and a loss that is not squared."""

from __future__ import annotations

import pytest
import torch
from examples.recipes.losses import MultiResolutionNoise

from zerotune.diffusion import OffsetNoise

pytestmark = pytest.mark.nightly


def pyramid_noise_like(noise, random, iterations, discount):
    """Make the noise of library/custom_train_functions.py with a single random generator."""
    b, c, w, h = noise.shape
    u = torch.nn.Upsample(size=(w, h), mode="bilinear")
    sizes = []
    for i in range(iterations):
        r = float(torch.rand((), generator=random)) * 2 + 2
        wn, hn = max(1, int(w / (r**i))), max(1, int(h / (r**i)))
        sizes.append((wn, hn))
        noise += u(torch.randn(b, c, wn, hn, generator=random)) * discount**i
        if wn == 1 or hn == 1:
            break
    return noise / noise.std(), sizes


@pytest.mark.parametrize("shape", [(3, 4, 24, 40), (2, 4, 2, 9)])
def test_multi_resolution_noise_with_offset_noise_equals_kohyas(shape):
    clean = torch.zeros(shape)
    noise = MultiResolutionNoise(iterations=5, discount=0.4, noise=OffsetNoise(strength=0.1))
    random = torch.Generator().manual_seed(7)
    offset = torch.randn(shape, generator=random)
    offset = offset + 0.1 * torch.randn((*shape[:2], 1, 1), generator=random)
    expected, sizes = pyramid_noise_like(offset, random, 5, 0.4)
    assert len(sizes) > 1
    drawn = noise.draw(clean, torch.Generator().manual_seed(7))
    torch.testing.assert_close(drawn.target, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(drawn.target, drawn.added)
