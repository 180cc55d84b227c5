"""Train and sample with the family that the documentation writes."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

import torch

from tests.support.runs import Case, start
from zerotune.checkpoint import export_pipeline
from zerotune.diffusion import load_pretrained, sample

PAGE = Path(__file__).parents[3] / "docs" / "families.md"
PROMPTS = ["a cat", "the dog"]
LINES = 10
WHOLE = (("stage3_param_persistence_threshold", 0),)


def family_of_the_page() -> Any:
    """Run the documentation page's code and return its class."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (code,) = [block for block in blocks if "class OvisImage" in block]
    assert len([line for line in code.splitlines() if line.strip()]) <= LINES
    module = types.ModuleType("families_page")
    sys.modules[module.__name__] = module
    exec(compile(code, str(PAGE), "exec"), module.__dict__)
    return module.OvisImage


def train_and_draw(folder: str, target: str) -> dict[str, Any]:
    """Take two steps at stage 3 on latents and captions; sample and export."""
    kind = family_of_the_page()
    loaded = load_pretrained(
        folder, family=kind, frozen_dtype="fp32", dropout=0.5, max_sequence_length=12
    )
    before = {name: p.detach().clone() for name, p in loaded.model.named_parameters()}
    engine = start(Case(stage=3, micro_batch=2, overrides=WHOLE, lr=1e-2), loaded.model)
    objective = loaded.objective()
    found: dict[str, Any] = {"losses": []}
    for step in range(2):
        generator = torch.Generator().manual_seed(10 * step + engine.group.rank)
        batch = {"latents": torch.randn(2, 4, 8, 8, generator=generator), "captions": PROMPTS}
        loss = objective(engine, batch, generator)
        found["losses"].append(float(loss.detach()))
        engine.backward(loss)
        engine.step()
    found["held"] = sum(p.numel() for p in engine.module.parameters())
    found["images"] = sample(
        engine, family=loaded.family, prompts=PROMPTS, steps=3, guidance_scale=2.0, size=(16, 16),
        generator=torch.Generator().manual_seed(1),
    ).numpy()  # fmt: skip
    export_pipeline(Path(target), engine=engine, base=loaded.folder)
    trained = dict(engine.master_weights.gather())
    found["moved"] = sum(not torch.equal(trained[name], before[name]) for name in before)
    found["of"] = len(before)
    engine.close()
    return found
