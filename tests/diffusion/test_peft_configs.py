"""peft's own configurations train, stop, resume, and load in peft and diffusers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.diffusion.adapting import (
    Adapted,
    case_for,
    output_of,
    output_without_engine,
    step,
    tiny_sd3,
)
from tests.support.needs import needs
from tests.support.ranks import ranks
from tests.support.runs import Case, start
from tests.support.sampling import sampled
from zerotune.checkpoint import export_adapters, load_checkpoint, save_checkpoint
from zerotune.diffusion import add_lora

needs("peft")

SETTINGS: dict[str, dict[str, Any]] = {
    "LoraConfig": {"r": 4, "lora_alpha": 6, "use_rslora": True, "rank_pattern": {"to_k": 2}},
    "LoKrConfig": {"r": 2, "alpha": 5, "decompose_factor": 4, "decompose_both": True},
    "LoHaConfig": {"r": 3, "alpha": 5, "alpha_pattern": {"to_k": 2}},
    "OFTConfig": {"oft_block_size": 4},
}
WITHOUT = [
    f"{part}{number}" for part in ("tokenizer", "text_encoder") for number in ("", "_2", "_3")
]
WITHOUT += ["vae"]
TRAINED = Adapted(kind="sd3")
"""Selects the model inputs in ``step``."""
CASE = case_for(Case(stage=2, offload="cpu"), 1)


def engine_of(kind: str, seed: int) -> Any:
    import peft

    model = tiny_sd3()
    config = getattr(peft, kind)(target_modules=["to_q", "to_k"], **SETTINGS[kind])
    torch.manual_seed(seed)
    add_lora(model, config)
    return start(CASE, model)


def read_by_diffusers(kind: str, file: str) -> Any:
    from diffusers import DDPMScheduler, StableDiffusion3Pipeline

    model = tiny_sd3()
    if kind == "LoKrConfig":
        # diffusers' pipelines load only LoRA. Without use_safetensors they skip the header, which
        # has alpha.
        model.load_lora_adapter(file, prefix="transformer", use_safetensors=True)
        return model
    pipeline = StableDiffusion3Pipeline(
        **dict.fromkeys(WITHOUT), transformer=model, scheduler=DDPMScheduler()
    )
    pipeline.load_lora_weights(file)
    return pipeline.transformer


@pytest.mark.deepspeed
@pytest.mark.parametrize("kind", sampled(SETTINGS, ["LoKrConfig"]))
@ranks(1)
def test_peft_configurations_resume_and_load_in_peft_and_diffusers(kind, tmp_path):
    from peft import PeftModel

    engine = engine_of(kind, seed=5)
    losses = []
    for index in range(4):
        losses.append(step(engine, TRAINED, index))
        if index == 1:
            save_checkpoint(tmp_path / "half", engine=engine)
    engine.close()
    # Start from different values, which the checkpoint must replace.
    engine = engine_of(kind, seed=77)
    load_checkpoint(tmp_path / "half", engine=engine)
    assert [step(engine, TRAINED, index) for index in (2, 3)] == losses[2:]
    assert len(set(losses)) == 4
    trained = output_of(engine, TRAINED)
    export_adapters(tmp_path / "peft", engine=engine, layout="peft")
    read = [PeftModel.from_pretrained(tiny_sd3(), tmp_path / "peft")]
    if kind in ("LoraConfig", "LoKrConfig"):
        file = export_adapters(tmp_path / "diffusers", engine=engine).path
        read.append(read_by_diffusers(kind, str(file)))
    engine.close()
    before = output_without_engine(tiny_sd3(), TRAINED, torch.float32)
    for model in read:
        assert torch.equal(output_without_engine(model, TRAINED, torch.float32), trained)
    assert not torch.allclose(before, trained, rtol=1e-3)
