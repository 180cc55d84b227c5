"""Functions that the ranks of the export tests run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors.torch import load_file

from tests.checkpoint.anywhere import held
from tests.checkpoint.refusals import failing_write, told
from tests.checkpoint.runs import shadow_of
from tests.support.models import tiny_unet
from tests.support.runs import Case, start, unet_loss
from zerotune.checkpoint import export_model, save_checkpoint
from zerotune.checkpoint.export.model import export_checkpoint

SHARD = 2**20


def unet(seed: int = 0) -> Any:
    """Build a U-Net of about 800,000 parameters with a frozen part, large enough to swap."""
    model = tiny_unet(seed, (32, 64))
    model.conv_in.requires_grad_(False)
    return model


def output_of(model: Any) -> torch.Tensor:
    """Return the model's output for fixed inputs."""
    generator = torch.Generator().manual_seed(5)
    images = torch.randn(2, 1, 8, 8, generator=generator)
    with torch.no_grad():
        answer = model(images, torch.tensor([10, 700]), class_labels=torch.tensor([1, 10]))
    return answer.sample


def exported(case: Case, root: str) -> dict[str, Any]:
    """Train, export in every way, and compare with plain diffusers."""
    folder = Path(root)
    swap = folder / "swap"
    swap.mkdir(exist_ok=True)
    if case.offload == "nvme":
        case = attrs.evolve(case, nvme_path=str(swap))
    engine = start(case, unet())
    ema = shadow_of(engine)
    for step in range(3):
        engine.backward(unet_loss(engine, step))
        engine.step()
        ema.step()
    for size in (2 * SHARD, SHARD):  # The second export replaces the first.
        export_model(folder / "trained", engine=engine, shard_size=size)
    export_model(folder / "ema", engine=engine, weights=ema)
    export_model(folder / "small.safetensors", engine=engine, dtype="bf16")
    save_checkpoint(folder / "step", engine=engine, shadows={"ema": ema})
    found = {"held": held(engine), "errors": failures(engine, folder)}
    with engine.evaluating():
        outputs = {"trained": output_of(engine)}
    with ema.swapped_in(), engine.evaluating():
        outputs["ema"] = output_of(engine)
    main = engine.group.is_main
    engine.close()
    return {**found, **(compared(folder, outputs) if main else {})}


def failures(engine: Any, folder: Path) -> dict[str, str]:
    """Return the errors of each rank when rank 0 cannot write."""
    mine = folder / "mine"
    if engine.group.is_main:
        mine.mkdir()
        (mine / "diffusion_pytorch_model.safetensors").write_bytes(b"mine")
    errors = {"taken": told(lambda: export_model(mine, engine=engine))}
    if engine.group.is_main:
        shutil.rmtree(mine)
    with failing_write(200_000):
        errors["full"] = told(lambda: export_model(folder / "full", engine=engine))
    errors["dtype"] = told(lambda: export_model(folder / "x", engine=engine, dtype="int8"))
    return errors


def compared(folder: Path, outputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Compare the outputs of exports in plain diffusers with the engine's."""
    from diffusers import UNet2DModel

    unet(0).save_pretrained(folder / "base")
    export_checkpoint(folder / "step", folder / "from-disk", base=folder / "base")
    export_checkpoint(folder / "step", folder / "ema-disk", shadow="ema", base=folder / "base")
    refused = told(lambda: export_checkpoint(folder / "step", folder / "none"))
    same = {}
    for name in ("trained", "ema", "from-disk", "ema-disk"):
        model, info = UNet2DModel.from_pretrained(folder / name, output_loading_info=True)
        assert not any(info.values()), info
        wanted = outputs["ema" if name.startswith("ema") else "trained"]
        same[name] = torch.equal(output_of(model.eval()), wanted)
    whole = load_file(folder / "ema" / "diffusion_pytorch_model.safetensors")
    small = load_file(folder / "small.safetensors")
    trained = UNet2DModel.from_pretrained(folder / "trained").state_dict()
    return {
        "same": same,
        "differ": not torch.equal(outputs["trained"], outputs["ema"]),
        "rounded": all(torch.equal(small[n], t.bfloat16()) for n, t in trained.items()),
        "complete": set(whole) == set(small) == set(trained),
        "shards": sorted(path.name for path in (folder / "trained").iterdir()),
        "refused": refused,
        "left": sorted(path.name for path in folder.iterdir()),
    }
