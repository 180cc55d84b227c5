"""Rank functions of the families' parity tests: train a loaded model on cached batches."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from tests.support.declared_pipelines import without_videos
from tests.support.runs import Case, start
from zerotune.checkpoint import export_pipeline
from zerotune.checkpoint.export.adapters import LORA_FILE, export_adapters
from zerotune.diffusion import PipelineFamily, load_pretrained, sample
from zerotune.diffusion.lora import LoRA, add_lora
from zerotune.diffusion.models.declared import WanLowNoise
from zerotune.diffusion.pretrained import Pretrained

TOKENS = 6
SHARES = 2
"""Micro batches per step, over two ranks or accumulated on one, so that one reference serves
both."""
MICRO = 2
LR = 1e-3


@attrs.frozen(kw_only=True)
class Variant:
    """Trained parameters, and whether blocks are checkpointed."""

    lora: bool = False
    checkpointing: bool = False

    def __str__(self) -> str:
        return ("lora" if self.lora else "full") + ("-checkpointed" if self.checkpointing else "")


EXPERTS = {"wan22-low": WanLowNoise}
"""Families that differ from the default of their folder, by the folder's name."""

VARIANTS = [Variant(lora=lora, checkpointing=on) for lora in (False, True) for on in (False, True)]


def example(family: PipelineFamily, model: Any, step: int, share: int) -> dict[str, torch.Tensor]:
    """Return a micro batch of a declared family; texts have six tokens, or fewer by mask."""
    generator = torch.Generator().manual_seed(1000 * step + share)
    latents, known = family.example(model, batch=MICRO, side=8)

    def drawn(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    found = {"latents": drawn(tuple(latents.shape))}
    for name, tensor in known.items():
        if name.endswith("mask"):
            found[name] = torch.ones(MICRO, TOKENS, dtype=tensor.dtype)
            found[name][1, 4:] = 0
        elif tensor.ndim == 2 or name not in family.text_tensors:
            found[name] = drawn(tuple(tensor.shape))
        elif name.endswith("llama3"):
            found[name] = drawn((*tensor.shape[:2], TOKENS, tensor.shape[3]))
        else:
            found[name] = drawn((MICRO, TOKENS, *tensor.shape[2:]))
    return found


def train(
    folder: str, case: Case, variants: Sequence[Variant], steps: int, exported: str | None = None
) -> list[dict[str, Any]]:
    """Train each variant in turn; return each one's mean losses per step, and other results."""
    loaded = load_pretrained(folder, parts=False, family=EXPERTS.get(Path(folder).name))
    return [
        _train(loaded, case, variant, steps, exported and f"{exported}-{variant}")
        for variant in variants
    ]


def _train(
    loaded: Pretrained, case: Case, variant: Variant, steps: int, exported: str | None
) -> dict[str, Any]:
    model: Any = copy.deepcopy(loaded.model)
    family = loaded.family
    assert isinstance(family, PipelineFamily)
    if variant.lora:
        torch.manual_seed(5)
        add_lora(model, LoRA(rank=4, targets=family.lora_targets))
    if variant.checkpointing:
        model.enable_gradient_checkpointing()
    objective = loaded.objective()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    engine = start(
        attrs.evolve(case, micro_batch=MICRO, accumulation=SHARES // ranks, lr=LR), model
    )
    found: dict[str, Any] = {
        "losses": [_step(engine, objective, step, family, model) for step in range(steps)],
        "partitioned": all(p.numel() == 0 for p in engine.module.parameters()),
    }
    if exported:
        plain = _reloaded(engine, exported, str(loaded.folder), variant, family)
        found["same"] = _predicts_the_same(engine, plain, family)
        if not variant.lora:
            found["drawn"] = _draws_the_same(engine, plain, loaded)
    engine.close()
    return found


def _step(engine: Any, objective: Any, step: int, family: PipelineFamily, model: Any) -> float:
    ranks = engine.group.world_size
    total = torch.zeros(1)
    for share in range(engine.group.rank, SHARES, ranks):
        generator = torch.Generator().manual_seed(7 * step + share)
        loss = objective(engine, example(family, model, step, share), generator)
        engine.backward(loss)
        engine.step()
        total += loss.detach() / SHARES
    if ranks > 1:
        engine.group.sum_(total)
    return float(total)


def _reloaded(
    engine: Any, target: str, folder: str, variant: Variant, family: PipelineFamily
) -> Any:
    """Load the exported model with plain diffusers."""
    path, kind = Path(target), type(engine.module)
    if variant.lora:
        export_adapters(path, engine=engine, component=family.component)
        plain = kind.from_pretrained(folder, subfolder=family.component)
        plain.load_lora_adapter(str(path), prefix=family.component, weight_name=LORA_FILE)
    else:
        export_pipeline(path, engine=engine, base=folder, component=family.component)
        plain = kind.from_pretrained(path, subfolder=family.component)
    for parameter in plain.parameters():
        # Tensors of a mapped file are not aligned, and kernels round differently by alignment.
        parameter.data = parameter.data.clone()
    return plain.eval()


def _predicts_the_same(engine: Any, plain: Any, family: PipelineFamily) -> bool:
    with engine.evaluating():
        wanted = _predict(family, engine)
    with torch.no_grad():
        return torch.equal(wanted, _predict(family, plain))


def _draws_the_same(engine: Any, plain: Any, loaded: Pretrained) -> bool:
    """Check that the engine, on all ranks, samples what the exported model samples alone."""
    without_videos()
    kind = type(loaded.family)
    small = {"reference_area": 32 * 32} if kind.reads_references else {}
    family: Any = load_pretrained(loaded.folder, frozen_dtype="fp32", family=kind, **small).family
    side = 8 * family.parts.scale
    wanted: dict[str, Any] = {"prompts": ["a", "b"], "steps": 2, "size": (side, side)}
    wanted["frames"] = 5 if family.clips else None
    if family.reference is not None:
        wanted["references"] = torch.linspace(-1, 1, 6 * side * side).view(2, 3, side, side)
    ours, theirs = (
        sample(model, family=family, generator=torch.Generator().manual_seed(1), **wanted)
        for model in (engine, plain)
    )
    return bool(torch.allclose(ours, theirs, rtol=0, atol=2e-5)) and float(ours.std()) > 0.01


def _predict(family: PipelineFamily, model: Any) -> torch.Tensor:
    data = example(family, getattr(model, "module", model), 99, 0)
    conditioning = family.conditioning(data, torch.Generator())
    return family.predict(model, data["latents"], torch.tensor([500.0, 20.0]), conditioning)
