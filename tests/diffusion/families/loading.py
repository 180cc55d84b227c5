"""Check on each rank whether frozen parts stay unpartitioned."""

from __future__ import annotations

import gc
from typing import Any

import torch

from tests.support.runs import Case, start
from zerotune.backend.upstream import check_whole, unpartitioned
from zerotune.diffusion import load_pretrained

STAGE_3 = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def answers(family: Any) -> dict[str, torch.Tensor]:
    """Return the outputs of VAE and text encoders for fixed inputs."""
    images = torch.linspace(-1, 1, 3 * 16 * 16).view(1, 3, 16, 16)
    latents = family.encode_images(images)
    decoded = family.parts.decode_latents(latents["latents"])
    return family.encode_texts(["a cat"]) | latents | {"decoded": decoded}


def under_stage_3(folders: dict[str, str], expected: dict[str, Any]) -> Any:
    """Load while transformers, and zero.Init, partition every new module."""
    import deepspeed
    from transformers import CLIPTextModel
    from transformers.integrations import HfDeepSpeedConfig
    from transformers.integrations import deepspeed as integration

    # Start an engine for its process group and global state.
    engine = start(Case(stage=3), torch.nn.Linear(4, 4))
    registered = HfDeepSpeedConfig(STAGE_3)
    found: dict[str, Any] = {"same": {}, "parts": {}}
    with deepspeed.zero.Init(config_dict_or_path=STAGE_3):
        found["naive"] = _naive(CLIPTextModel, folders["sdxl"])
        for name, folder in folders.items():
            loaded = load_pretrained(folder, frozen_dtype="fp32")
            check_whole(loaded.model, name=name)
            found["parts"][name] = sorted(loaded.family.parts.modules)
            given = answers(loaded.family)
            found["same"][name] = all(torch.equal(given[n], t) for n, t in expected[name].items())
        with unpartitioned(), unpartitioned():
            nested = torch.nn.Linear(3, 3)
        found["nested"] = nested.weight.shape
        del loaded
        gc.collect()
        found["registered"] = integration._hf_deepspeed_config_weak_ref() is registered
        found["made_after"] = hasattr(torch.nn.Linear(3, 3).weight, "ds_id")
    found["outside"] = hasattr(torch.nn.Linear(3, 3).weight, "ds_id")
    with unpartitioned():
        found["unknown_inside"] = not integration.is_deepspeed_zero3_enabled()
    found["known_after"] = integration.is_deepspeed_zero3_enabled()
    found["after_an_error"] = _registered_after_an_error(integration, registered)
    engine.close()
    return found


def _naive(kind: Any, folder: str) -> dict[str, str]:
    """Load a text encoder without our precautions; return the errors."""
    encoder = kind.from_pretrained(folder, subfolder="text_encoder")
    said = {}
    for what, action in (
        ("forward", lambda: encoder(torch.ones(1, 4, dtype=torch.long))),
        ("check", lambda: check_whole(encoder, name="text_encoder")),
    ):
        try:
            action()
            said[what] = "no error"
        except Exception as error:  # noqa: BLE001 - the test reads it
            said[what] = f"{type(error).__name__}: {error}"
    return said


def _registered_after_an_error(integration: Any, registered: Any) -> bool:
    try:
        with unpartitioned():
            raise RuntimeError("no such file")
    except RuntimeError:
        return integration._hf_deepspeed_config_weak_ref() is registered
    return False
