"""Functions that the ranks of the LoRA tests run on real engines."""

from __future__ import annotations

import secrets
from functools import partial
from typing import Any

import attrs
import torch

from tests.support.runs import PLAIN, Case, start
from zerotune.backend.trained_parts import TrainedParts
from zerotune.checkpoint import export_adapters, load_checkpoint, save_checkpoint
from zerotune.diffusion.lora import LoRA, add_lora, load_adapters
from zerotune.ema import EMAShadow

WHOLE = ("stage3_param_persistence_threshold", 0)
"""Every parameter is partitioned, although the models are small."""
SIZE, WIDTH, TOKENS = 8, 32, 6
SAMPLES = 4
"""Samples per step, divided among the ranks."""


def tiny_sdxl(seed: int = 0, *, wide: int = 0) -> Any:
    """Return a U-Net shaped like SDXL's, with 0.35 M parameters.

    Args:
        seed: Seed of the weights.
        wide: Width of the text's hidden states; large ones make matrices that swap to NVMe.
    """
    from diffusers import UNet2DConditionModel

    torch.manual_seed(seed)
    return UNet2DConditionModel(
        sample_size=SIZE,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=4,
        attention_head_dim=(2, 4),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        transformer_layers_per_block=(1, 2),
        projection_class_embeddings_input_dim=6 * 8 + WIDTH,
        cross_attention_dim=wide or WIDTH,
    )


def tiny_sd3(seed: int = 0) -> Any:
    """Return a transformer shaped like SD3's, with 0.1 M parameters."""
    from diffusers import SD3Transformer2DModel

    torch.manual_seed(seed)
    return SD3Transformer2DModel(
        sample_size=SIZE,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=WIDTH,
        caption_projection_dim=32,
        pooled_projection_dim=WIDTH,
        out_channels=4,
        pos_embed_max_size=8,
    )


def tiny_clip(seed: int = 1, *, projection: bool = False) -> Any:
    """Return a CLIP text encoder of 20,000 parameters."""
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    torch.manual_seed(seed)
    config = CLIPTextConfig(
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=64,
        max_position_embeddings=16,
        projection_dim=WIDTH,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=1,
    )
    return (CLIPTextModelWithProjection if projection else CLIPTextModel)(config)


_LORA = LoRA(rank=4, alpha=8)


@attrs.frozen(kw_only=True)
class Adapted:
    """The trained model and its adapters."""

    kind: str = "sdxl"
    """``"sdxl"``, ``"sd3"``, or ``"text"``: SDXL with a text encoder in the same engine."""
    lora: Any = _LORA
    checkpointing: bool = False
    wide: int = 0

    @property
    def layout(self) -> str:
        """The export layout: diffusers' own if it reads such adapters, else peft's."""
        return "diffusers" if type(self.lora).__name__ in ("LoRA", "LoKrConfig") else "peft"

    def model(self) -> torch.nn.Module:
        """Build the model with its adapters, identical on every rank and in every process."""
        model = self.base()
        torch.manual_seed(5)
        if isinstance(model, TrainedParts):
            for _, part in model.items():
                add_lora(part, self.lora)
        else:
            add_lora(model, self.lora)
        if self.checkpointing:
            model.enable_gradient_checkpointing()
        return model

    def base(self) -> Any:
        """Build the published model, without adapters."""
        if self.kind == "sd3":
            return tiny_sd3()
        if self.kind == "text":
            return TrainedParts(unet=tiny_sdxl(), text_encoder=tiny_clip())
        return tiny_sdxl(wide=self.wide)


def batch(step: int, *, width: int = WIDTH) -> dict[str, torch.Tensor]:
    """Return the samples of a step for all ranks together."""
    generator = torch.Generator().manual_seed(1000 + step)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(SAMPLES, *shape, generator=generator)

    return {
        "noisy": draw(4, SIZE, SIZE),
        "target": draw(4, SIZE, SIZE),
        "times": torch.randint(0, 1000, (SAMPLES,), generator=generator),
        "text": draw(TOKENS, width),
        "pooled": draw(WIDTH),
        "sizes": torch.full((SAMPLES, 6), 64.0),
        "ids": torch.randint(3, 64, (SAMPLES, TOKENS), generator=generator),
    }


def predict(engine: Any, adapted: Adapted, data: dict[str, torch.Tensor]) -> torch.Tensor:
    """Call the engine, or a model, as a family does."""
    device, dtype = engine.device, engine.dtype

    def moved(key: str) -> torch.Tensor:
        value = data[key].to(device)
        return value.to(dtype) if value.is_floating_point() else value

    text = moved("text")
    if adapted.kind == "sd3":
        return engine(
            moved("noisy"), text, pooled_projections=moved("pooled"), timestep=moved("times")
        ).sample
    if adapted.kind == "text":
        text = engine(input_ids=moved("ids"), part="text_encoder").last_hidden_state
    added = {"text_embeds": moved("pooled"), "time_ids": moved("sizes")}
    return engine(
        moved("noisy"), moved("times"), encoder_hidden_states=text, added_cond_kwargs=added
    ).sample


def loss_of(engine: Any, adapted: Adapted, step: int) -> torch.Tensor:
    """Return the loss of this rank's samples."""
    size = SAMPLES // engine.group.world_size
    share = slice(engine.group.rank * size, (engine.group.rank + 1) * size)
    data = {name: t[share] for name, t in batch(step, width=adapted.wide or WIDTH).items()}
    prediction = predict(engine, adapted, data)
    return torch.nn.functional.mse_loss(prediction.float(), data["target"].to(engine.device))


def case_for(case: Case, world_size: int) -> Case:
    """Return the case with a rank's share as its micro batch."""
    return attrs.evolve(case, micro_batch=SAMPLES // world_size, lr=5e-3)


PLAIN_RUN = case_for(PLAIN, 1)
"""One process without DeepSpeed."""


def step(engine: Any, adapted: Adapted, index: int) -> float:
    """Take a training step; return the loss over all ranks."""
    loss = loss_of(engine, adapted, index)
    engine.backward(loss)
    assert engine.step().applied
    mean = loss.detach().reshape(1)
    if engine.group.world_size > 1:
        engine.group.sum_(mean)
    return float(mean) / engine.group.world_size


class Bare:
    """A model without an engine, called like one."""

    device = torch.device("cpu")

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype
        # DeepSpeed casts all weights; diffusers' own ``to`` would keep some in fp32.
        self._model = torch.nn.Module.to(model, dtype).eval()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, **kwargs)


def output_of(engine: Any, adapted: Adapted) -> torch.Tensor:
    """Return an engine's output for unseen samples."""
    with engine.evaluating():
        return predict(engine, adapted, batch(99, width=adapted.wide or WIDTH)).float().cpu()


def output_without_engine(model: Any, adapted: Adapted, dtype: torch.dtype) -> torch.Tensor:
    """Return the output of a model without an engine for the same samples."""
    with torch.no_grad():
        data = batch(99, width=adapted.wide or WIDTH)
        return predict(Bare(model, dtype), adapted, data).float()


def loaded(adapted: Adapted, file: Any) -> Any:
    """Build the published model with a file's adapters."""
    model = adapted.base()
    parts = dict(model.items()) if adapted.kind == "text" else {None: model}
    for name, part in parts.items():
        load_adapters(part, file, component=name)
    return model


def follow(
    case: Case, adapted: Adapted, folder: str, steps: int, half: int, *, resumed: bool = False
) -> dict[str, Any]:
    """Train, saving half way, or resume there with other initial adapters; export all adapters."""
    model = adapted.model()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    for parameter in trained.values() if resumed else ():
        parameter.data.normal_()
    before = {name: parameter.detach().clone() for name, parameter in trained.items()}
    engine = start(case, model)
    ema = EMAShadow(decay=0.9).attach(engine)
    if resumed:
        load_checkpoint(f"{folder}/half", engine=engine, shadows={"ema": ema})
    losses = []
    for index in range(half if resumed else 0, steps):
        losses.append(step(engine, adapted, index))
        ema.step()
        if index + 1 == half:
            save_checkpoint(f"{folder}/half", engine=engine, shadows={"ema": ema})
    found = {"losses": losses, **state_of(engine, before), **exported(engine, adapted, ema, folder)}
    found["swapped"] = swapped(engine)
    engine.close()
    return found


def state_of(engine: Any, before: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return sizes on this rank, dtypes, trained weights, and weights that have not moved."""
    return {
        "held": {n: p.numel() for n, p in engine.module.named_parameters()},
        "dtypes": {str(p.dtype) for p in engine.module.parameters()},
        "trained": set(engine.master_weights.parameters),
        "stuck": [n for n, full in engine.master_weights.gather() if torch.equal(full, before[n])],
    }


def swapped(engine: Any) -> dict[str, bool]:
    """Report whether frozen weights and optimizer states are on NVMe."""
    wrapper = getattr(getattr(engine, "deepspeed_engine", None), "optimizer", None)
    groups = getattr(wrapper, "fp32_partitioned_groups_flat", ())
    frozen = [p for p in engine.module.parameters() if not p.requires_grad]
    return {
        "frozen": any(_away(p) for p in frozen),
        "optimizer": any(group.numel() == 0 for group in groups),
    }


def _away(parameter: torch.nn.Parameter) -> bool:
    part = getattr(parameter, "ds_tensor", None)
    return part is not None and part.numel() < part.ds_numel


def exported(engine: Any, adapted: Adapted, ema: Any, folder: str) -> dict[str, Any]:
    """Compare exports, loaded without an engine, with the engine's output."""
    place = f"{folder}/{secrets.token_hex(4)}" if engine.group.is_main else ""
    place = engine.group.broadcast(place)
    output = output_of(engine, adapted)
    trained = export_adapters(f"{place}/trained", engine=engine, layout=adapted.layout)
    averaged = export_adapters(f"{place}/ema", engine=engine, weights=ema, layout=adapted.layout)
    with ema.swapped_in():
        output_of_average = output_of(engine, adapted)
    if not engine.group.is_main:
        return {}
    alone = partial(output_without_engine, adapted=adapted, dtype=engine.dtype)
    model = loaded(adapted, trained)
    return {
        "same": torch.equal(alone(model), output),
        "same_average": torch.equal(alone(loaded(adapted, averaged)), output_of_average),
        "average_differs": not torch.equal(output, output_of_average),
        "learned": float((alone(adapted.base()) - output).abs().max() / output.abs().max()),
        "warnings": [str(decision) for decision in trained.decisions],
        "file": (trained.tensors, trained.elements, trained.components),
    }
