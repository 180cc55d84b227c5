"""A pipeline and a transformer that diffusers lacks, in a module of the tests."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from diffusers import OvisImagePipeline, OvisImageTransformer2DModel
from diffusers.models.modeling_outputs import Transformer2DModelOutput

from tests.support.declared_pipelines import ovis_image
from zerotune.diffusion import PipelineFamily
from zerotune.diffusion.models.latents import Tokens


class ReversedTransformer(OvisImageTransformer2DModel):
    """Negates the output."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        return Transformer2DModelOutput(sample=-output[0]) if len(output) > 0 else output


class BackwardsPipeline(OvisImagePipeline):
    """Reverses its prompts."""

    @functools.wraps(OvisImagePipeline.encode_prompt)
    def encode_prompt(self, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        texts = [prompt] if isinstance(prompt, str) else prompt
        told = None if texts is None else [text[::-1] for text in texts]
        return super().encode_prompt(told, *args, **kwargs)


class Backwards(PipelineFamily):
    pipeline = BackwardsPipeline
    encoded = ("prompt_embeds", "negative_prompt_embeds", "text_ids")
    packing = Tokens(2)


def written(folder: Path) -> Path:
    """Write a ``BackwardsPipeline`` with random weights, and return its folder."""
    known = OvisImagePipeline.from_pretrained(ovis_image(folder / "known"))
    model = ReversedTransformer.from_config(known.transformer.config)
    model.load_state_dict(known.transformer.state_dict())
    components = {**known.components, "transformer": model}
    BackwardsPipeline(**components).save_pretrained(folder / "own")
    return folder / "own"
