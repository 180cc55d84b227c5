"""Rank functions of the preference tests on real engines."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import DDPMScheduler
from examples.recipes.preference import PreferenceObjective

from tests.diffusion.adapting import SAMPLES, SIZE, TOKENS, WIDTH, Adapted, tiny_sdxl
from tests.support.runs import Case, start
from zerotune.checkpoint import load_checkpoint, save_checkpoint
from zerotune.diffusion import DenoisingObjective
from zerotune.diffusion.models.declared import StableDiffusionXL
from zerotune.diffusion.noise import DrawnNoise


class OfTheSample:
    """Noise seeded by the sample, so that it is the same on any number of ranks."""

    def draw(self, clean: torch.Tensor, generator: torch.Generator) -> DrawnNoise:  # noqa: ARG002
        rows = []
        for row in clean:
            seed = int(row.double().abs().sum() * 1e6)
            rows.append(torch.randn(row.shape, generator=torch.Generator().manual_seed(seed)))
        noise = torch.stack(rows).to(clean.device)
        return DrawnNoise(target=noise, added=noise)


def pairs(step: int) -> dict[str, torch.Tensor]:
    """Return the pairs of a whole step, over all ranks."""
    random = torch.Generator().manual_seed(2000 + step)
    latents = torch.randn(SAMPLES, 4, SIZE, SIZE, generator=random)
    return {
        "latents": latents,
        "rejected_latents": latents + torch.randn(latents.shape, generator=random),
        "prompt_embeds": torch.randn(SAMPLES, TOKENS, WIDTH, generator=random),
        "pooled_prompt_embeds": torch.randn(SAMPLES, WIDTH, generator=random),
    }


def prefer(case: Case, folder: str, steps: int, *, copied: bool, resume: bool) -> Any:
    """Return the losses of a fresh run that saves half way, or of one that resumes from there."""
    model: Any = tiny_sdxl() if copied else Adapted().model()
    denoising = DenoisingObjective(
        scheduler=DDPMScheduler(),
        family=StableDiffusionXL(),
        noise=OfTheSample(),
        timestep_range=(0.5, 0.501),  # Use a single time step, because each rank draws its own.
    )
    reference = tiny_sdxl() if copied else None
    objective = PreferenceObjective(objective=denoising, beta=5000.0, reference=reference)
    before = {name: value.detach().clone() for name, value in model.state_dict().items()}
    engine = start(case, model)
    first = steps // 2 if resume else 0
    if resume:
        load_checkpoint(folder, engine=engine)
    size = SAMPLES // engine.group.world_size
    share = slice(engine.group.rank * size, (engine.group.rank + 1) * size)
    losses = []
    for step in range(first, steps):
        if step == steps // 2 and not resume:
            save_checkpoint(folder, engine=engine)
        data = {name: value[share].to(engine.device) for name, value in pairs(step).items()}
        loss = objective(engine, data, torch.Generator().manual_seed(step))
        losses.append(engine.group.mean(float(loss.detach()), device=engine.device))
        engine.backward(loss)
        engine.step()
    full = dict(engine.master_weights.gather())
    found = {
        "losses": losses,
        "held": sum(each.numel() for each in engine.module.parameters()),
        "trained": set(full),
        "stuck": [name for name, value in full.items() if torch.equal(value, before[name])],
    }
    engine.close()
    return found
