"""Train as a run file says."""

from __future__ import annotations

from typing import Any, cast

from zerotune.backend.host.units import find_units
from zerotune.checkpoint import check_replaceable, latest_checkpoint
from zerotune.diffusion import LoRA, add_lora, encode_dataset
from zerotune.diffusion.activations import ActivationOffload
from zerotune.diffusion.configuration import Configuration
from zerotune.diffusion.data import AspectBuckets, Augmentation, ImageFolder, PreparedImages
from zerotune.diffusion.known_families import named_family
from zerotune.diffusion.pretrained import Pretrained, load_pretrained
from zerotune.errors import MissingDependencyError
from zerotune.plan.context import Streaming, UpdateName
from zerotune.plan.plan import Advice, DeepSpeedPlan, ResolvedPlan
from zerotune.training.progress import ProgressBar
from zerotune.training.report import Report
from zerotune.training.run_file import (
    DEFAULT_RANK,
    DEFAULT_SIDE,
    Checkpoints,
    Data,
    Export,
    RunFile,
)
from zerotune.training.save import SaveEvery
from zerotune.training.setup import settled
from zerotune.training.trainer import Trainer
from zerotune.training.validate import ValidationImages


def train(run: RunFile) -> Report:
    """Train as a file says: load, encode, resume, fit, save, validate, export. Collective.

    A run that was stopped continues from its newest checkpoint.

    Args:
        run: The run.

    Returns:
        The report of the run.
    """
    # What can be wrong is read before the model.
    export = run.export or Export()
    name, dtype = ("adapters", "fp32") if run.adapters else ("pipeline", "bf16")
    check_replaceable(run.place / name)
    plan, images = run.chosen_plan(), _images(run)
    with run.naming("model", "source"):
        loaded = load_pretrained(
            run.source(),
            plan=plan.plan if isinstance(plan, Advice) else plan,
            family=run.family,
            quantization=_quantization(run),
        )
    data = _encoded(run, loaded, images)
    recompute = "auto" if run.gradient_checkpointing is None else run.gradient_checkpointing
    with (
        run.naming("streamed.units", "streamed.units"),
        Trainer(
            model=loaded,
            plan=plan,
            data=data,
            ema=run.ema,
            seed=run.seed or 0,
            activations=ActivationOffload() if run.activation_offload else None,
            gradient_checkpointing=recompute,  # type: ignore[arg-type]
            streamed=run.streamed,
            update=cast(UpdateName | None, run.update),
            callbacks=_callbacks(run),
        ) as trainer,
    ):
        if checkpoint := latest_checkpoint(run.place / "checkpoints"):
            trainer.resume(checkpoint)
        report = trainer.fit(steps=int(run.steps or 0))
        if report.stopped is None or export.stopped:
            trainer.export(run.place / name, dtype=export.dtype or dtype)
    return report


def resolved(run: RunFile, plan: DeepSpeedPlan | Advice) -> ResolvedPlan:
    """Return a run's plan as its start resolves it, without the model's weights; find its images.

    Args:
        run: The run.
        plan: Its plan.
    """
    _images(run)
    with (
        run.naming("family", "family"),
        run.naming("streamed.units", "streamed.units"),
        run.below("plan"),
    ):
        if run.family is not None:
            named_family(run.family)
        folder = run.model_folder()
        if isinstance(run.streamed, Streaming) and folder is not None:
            find_units(Configuration.read(folder).build(), run.streamed.units)
        update = cast(UpdateName | None, run.update)
        return settled(plan, model=run.facts(), streamed=run.streamed, update=update)


def _quantization(run: RunFile) -> Any:
    """Return diffusers' configuration that quantizes the frozen weights, if the run asks for it."""
    kind = None if run.adapters is None else run.adapters.storage
    if kind is None:
        return None
    import diffusers

    try:
        if kind == "int8":
            return diffusers.BitsAndBytesConfig(load_in_8bit=True)
        return diffusers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=kind)
    except ImportError as error:
        raise MissingDependencyError(
            "this quantization needs bitsandbytes, which is not installed",
            "run pip install 'zerotune[optimizers]'",
            "adapters.base_dtype",
            kind,
        ) from error


def _images(run: RunFile) -> PreparedImages:
    data = run.data or Data()
    side = data.resolution or DEFAULT_SIDE
    dropout = 0.1 if data.caption_dropout is None else data.caption_dropout
    with run.naming("data.folder", "root"):
        images = ImageFolder(run.folder / str(data.folder))
    return PreparedImages(
        images,
        buckets=AspectBuckets(area=side**2, step=data.step or min(64, max(1, side // 4))),
        augmentation=Augmentation(caption_dropout=dropout),
    )


def _encoded(run: RunFile, loaded: Pretrained, images: PreparedImages) -> Any:
    """Add the adapters, and compute latents and embeddings once."""
    family: Any = loaded.family
    if run.adapters is not None:
        targets = run.adapters.targets or family.lora_targets
        adapters = LoRA(rank=run.adapters.rank or DEFAULT_RANK, targets=targets)
        add_lora(loaded.model, adapters, base_dtype=None if run.adapters.storage else "bf16")
    return encode_dataset(images, family=family, folder=run.place / "cache")


def _callbacks(run: RunFile) -> list[Any]:
    saved = run.checkpoints or Checkpoints()
    every = saved.every or max(1, int(run.steps or 0) // 4)
    found: list[Any] = [
        ProgressBar(),
        SaveEvery(steps=every, root=run.place / "checkpoints", keep=saved.keep or 2),
    ]
    if (wanted := run.validation) is not None:
        found.append(
            ValidationImages(
                every=wanted.every or every,
                prompts=wanted.prompts or [""],
                steps=wanted.steps or 30,
                guidance_scale=5.0 if wanted.guidance_scale is None else wanted.guidance_scale,
                folder=run.place / "validation",
            )
        )
    return found
