"""How each family calls its model: packing, scaling, casts, and the values that must stay exact."""

from __future__ import annotations

import pytest
import torch

from tests.support import pipelines
from zerotune.diffusion.models.declared import Flux
from zerotune.diffusion.models.stable_diffusion import StableDiffusionXL
from zerotune.errors import DataError


class Recording:
    """A model that records its arguments and can return a given answer."""

    device = torch.device("cpu")

    def __init__(self, module, answer=None, dtype=torch.bfloat16):
        self.module, self.dtype = module.to(dtype), dtype
        self.answer, self.called = answer or module, None

    def __call__(self, *arguments, **named):
        self.called = (arguments, named)
        output = self.answer(*arguments, **named)
        return output if isinstance(output, tuple) else (output,)


def texts(count=2, width=32):
    generator = torch.Generator().manual_seed(1)
    return {
        "prompt_embeds": torch.randn(count, 5, width, generator=generator),
        "pooled_prompt_embeds": torch.randn(count, 32, generator=generator),
    }


def test_bf16_models_get_exact_timesteps_and_sizes():
    sizes = torch.tensor([[1023.0, 767.0, 5.0, 3.0, 1025.0, 513.0]]).repeat(2, 1)
    model = Recording(pipelines.sdxl_unet())
    noisy, times = torch.randn(2, 4, 8, 8), torch.tensor([999, 997])
    conditioning = texts(width=64) | {"time_ids": sizes}
    output = StableDiffusionXL().predict(model, noisy, times, conditioning)
    (given, time), named = model.called
    assert given.dtype == named["encoder_hidden_states"].dtype == torch.bfloat16
    assert output.dtype == torch.float32
    assert time.tolist() == [999, 997]
    added = named["added_cond_kwargs"]
    assert torch.equal(added["time_ids"], sizes)
    assert not torch.equal(sizes, sizes.bfloat16().float())
    assert added["text_embeds"].dtype == torch.bfloat16


def test_flux_in_bf16_keeps_timesteps_and_positions_exact():
    model = Recording(pipelines.flux_transformer())
    Flux().predict(model, torch.zeros(1, 4, 8, 8), torch.tensor([997.0]), texts(1))
    _, named = model.called
    assert named["hidden_states"].dtype == torch.bfloat16
    exact = (named["timestep"], named["guidance"], named["img_ids"], named["txt_ids"])
    assert {tensor.dtype for tensor in exact} == {torch.float32}


def test_flux_refuses_sides_that_its_patches_do_not_divide():
    model = Recording(pipelines.flux_transformer())
    with pytest.raises(DataError, match="divisible by 16"):
        Flux().predict(model, torch.zeros(1, 4, 7, 8), torch.tensor([997.0]), texts(1))
