"""The scheduler images are drawn with, which must suit what the model has learned."""

from __future__ import annotations

import inspect
from typing import Any, Final

from zerotune.decisions import Decision, announce

_FROM_TRAINING: Final = (
    "prediction_type",
    "rescale_betas_zero_snr",
    "shift",
    "use_dynamic_shifting",
)


def drawing_scheduler(scheduler: Any, trained_with: Any = None) -> Any:
    """A copy of a scheduler, changed to what a model trained with another one predicts.

    A model trained down to pure noise is also drawn from it: time steps end at the last one
    (``timestep_spacing="trailing"``), and a scheduler that knows no such schedule is replaced by
    DDIM's, with a decision announced.

    Args:
        scheduler: A diffusers scheduler; not changed.
        trained_with: The objective's scheduler.

    Source: Lin et al., "Common Diffusion Noise Schedules and Sample Steps are Flawed", 3.3.
    """
    changed = {} if trained_with is None else trained_with.config
    kept = {name: changed[name] for name in _FROM_TRAINING if name in changed}
    kind = type(scheduler)
    if kept.get("rescale_betas_zero_snr"):
        kept["timestep_spacing"] = "trailing"
        if "rescale_betas_zero_snr" not in inspect.signature(kind.__init__).parameters:
            kind = _replaced(kind)
            kept["clip_sample"] = False  # DDIM's default is for pixels; these are latents.
    # As keywords: diffusers drops settings that the configuration holds as defaults.
    return kind.from_config(scheduler.config, **kept)


def _replaced(kind: type[Any]) -> type[Any]:
    from diffusers import DDIMScheduler

    announce(
        (
            Decision(
                key="sampling.scheduler",
                before=kind.__name__,
                after=DDIMScheduler.__name__,
                reason="the model was trained with rescale_betas_zero_snr, which the pipeline's "
                "own scheduler does not know",
                severity="warning",
            ),
        )
    )
    chosen: type[Any] = DDIMScheduler
    return chosen
