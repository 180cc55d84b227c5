"""From a folder or a hub id to what a run needs: model, family, scheduler."""

from __future__ import annotations

import inspect
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
import torch
from packaging.version import Version

from zerotune.backend.dtypes import DTYPES
from zerotune.backend.unpartitioned import unpartitioned
from zerotune.decisions import Decision, announce
from zerotune.diffusion.families.declared import DECLARED
from zerotune.diffusion.families.flux import Flux
from zerotune.diffusion.families.pipeline_family import PipelineFamily
from zerotune.diffusion.families.probe import probe
from zerotune.diffusion.families.stable_diffusion import StableDiffusion
from zerotune.diffusion.families.stable_diffusion_3 import StableDiffusion3
from zerotune.diffusion.families.stable_diffusion_xl import StableDiffusionXL
from zerotune.diffusion.families.text_to_image import TextToImage
from zerotune.diffusion.families.unconditional import ClassConditional, Unconditional
from zerotune.diffusion.family import Family
from zerotune.diffusion.objective import DenoisingObjective, FlowMatchingObjective
from zerotune.diffusion.pipeline import Blueprint, FrozenParts, PipelineModel
from zerotune.errors import InvalidValueError, MissingDependencyError

if TYPE_CHECKING:
    from collections.abc import Sequence

FAMILIES: Final[dict[str, type[TextToImage]]] = {
    family.pipeline: family
    for family in (StableDiffusion, StableDiffusionXL, StableDiffusion3, Flux, *DECLARED)
}
"""Families by the class of their diffusers pipeline."""

_INDEX: Final = "model_index.json"
_UNUSED: Final = ("safety_checker", "feature_extractor", "image_encoder")
"""Neither latents, nor embeddings, nor images need these; exports copy them from the folder."""


@attrs.frozen(kw_only=True, eq=False)
class Pretrained:
    """What was loaded."""

    model: torch.nn.Module
    """What is trained: whole, on the host, in training mode."""
    family: Family
    """How it is called; with its frozen parts, where it has any."""
    scheduler: Any
    """The scheduler to train with: DDPM's forward process or flow matching's."""
    folder: Path
    """Where it lies; ``export_pipeline(base=folder)`` takes the frozen parts from here."""
    decisions: tuple[Decision, ...] = ()
    """What was chosen while loading."""

    @property
    def component(self) -> str | None:
        """Name of the model in its pipeline; ``None`` for a model on its own."""
        return self.family.component if isinstance(self.family, TextToImage) else None

    def objective(self, **settings: Any) -> DenoisingObjective | FlowMatchingObjective:
        """The objective these models were made with.

        Args:
            **settings: Of ``FlowMatchingObjective`` for families with ``flow_matching`` (time
                steps are drawn logit-normal if nothing else is said), of ``DenoisingObjective``
                for all others; ``scheduler`` replaces the one of the folder.
        """
        usual = {"scheduler": self.scheduler, "family": self.family}
        if isinstance(self.family, PipelineFamily):
            settings = self.family.objective_settings() | settings
        if getattr(self.family, "flow_matching", False):
            return FlowMatchingObjective(**usual | {"density": "logit_normal"} | settings)
        return DenoisingObjective(**usual | settings)


def load_pretrained(
    source: str | os.PathLike[str],
    *,
    dtype: str = "fp32",
    frozen_dtype: str = "bf16",
    family: type[TextToImage] | None = None,
    parts: bool = True,
    leave_out: Sequence[str] = (),
    revision: str | None = None,
    variant: str | None = None,
    local_files_only: bool = False,
    **settings: Any,
) -> Pretrained:
    """Load a diffusers pipeline, or a U-Net on its own, to train it.

    VAE and text encoders are loaded whole on every rank, also inside ``deepspeed.zero.Init`` and
    where transformers would partition them. A VAE that overflows in half precision
    (``force_upcast``, as SDXL's) stays in fp32.

    Args:
        source: A folder with ``model_index.json``, the folder of an unconditional U-Net
            (``config.json``), or the id of a pipeline on the hub.
        dtype: Of the trained model: ``"fp32"``; ``"bf16"`` for a base under adapters.
        frozen_dtype: Of VAE and text encoders.
        family: A family of yours, for pipelines zerotune does not know.
        parts: ``False`` leaves VAE and text encoders out: training from caches needs none.
        leave_out: Components to leave out, such as ``("text_encoder_3", "tokenizer_3")`` of SD3.
        revision: Of the hub's repository.
        variant: Of the weight files, such as ``"fp16"``.
        local_files_only: Do not ask the hub.
        **settings: Of the family: ``dropout``, ``max_sequence_length``, …

    Returns:
        Model, family, training scheduler and the local folder.

    Raises:
        InvalidValueError: There is nothing to load, the pipeline's family is not known, or the
            pipeline of a declared family cannot be trained through (``probe``).
        MissingDependencyError: Text encoders without transformers installed.
    """
    folder = _folder(source, revision=revision, variant=variant, local_files_only=local_files_only)
    if not (folder / _INDEX).is_file():
        return _bare_model(folder, dtype=_dtype(dtype), variant=variant, settings=settings)
    index = _read(folder / _INDEX)
    kind = family or _family(index, folder)
    options: dict[str, Any] = {"variant": variant, "local_files_only": True}
    _check_left_out(leave_out, index, kind.component)
    scheduler, replaced = _training_scheduler(folder, flow_matching=kind.flow_matching)
    with unpartitioned():
        model = _component(folder, index, kind.component, _dtype(dtype), options)
        loaded = None
        if parts:
            options |= _left_out(index, leave_out) | _precision(_dtype(frozen_dtype))
            loaded = _frozen(folder, kind, model.config, options)
        if issubclass(kind, PipelineFamily):
            settings["blueprint"] = Blueprint.read(folder, _pipeline_class(kind))
    chosen = kind(parts=loaded, **settings)
    decisions = replaced + (() if loaded is None else _spare_the_vae(loaded))
    if isinstance(chosen, PipelineFamily):
        decisions += probe(chosen, model)
    announce(decisions)
    return Pretrained(
        model=model.train(),
        family=chosen,
        scheduler=scheduler,
        folder=folder,
        decisions=decisions,
    )


def _folder(source: str | os.PathLike[str], **options: Any) -> Path:
    path = Path(source)
    if path.is_dir():
        return path
    from diffusers import DiffusionPipeline

    try:
        return Path(DiffusionPipeline.download(str(source), **options))
    except (OSError, ValueError) as error:
        raise InvalidValueError(
            f"is neither a folder nor a pipeline that could be had from the hub ({_first(error)})",
            key="source",
            value=os.fspath(source),
            fix=f"give a folder that holds {_INDEX}, or a hub id such as "
            "stabilityai/stable-diffusion-xl-base-1.0",
        ) from error


def _family(index: dict[str, Any], folder: Path) -> type[TextToImage]:
    name = str(index.get("_class_name"))
    if name not in FAMILIES:
        raise InvalidValueError(
            f"no family is known for this pipeline; known are {', '.join(FAMILIES)}",
            key=f"{folder / _INDEX}: _class_name",
            value=name,
            fix="write a family (a page, see docs/families.md) and pass family=",
        )
    return FAMILIES[name]


def _check_left_out(names: Sequence[str], index: dict[str, Any], component: str) -> None:
    known = [n for n, entry in index.items() if isinstance(entry, list) and n != component]
    for name in names:
        if name not in known:
            raise InvalidValueError(
                "is not a frozen part of this pipeline",
                key="leave_out",
                value=name,
                fix=f"its parts are {', '.join(known)}",
            )


def _left_out(index: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    # What the pipeline was saved without must be left out in so many words.
    absent = [name for name, entry in index.items() if entry == [None, None]]
    unused = [name for name in _UNUSED if name in index]
    quiet = {"requires_safety_checker": False} if "requires_safety_checker" in index else {}
    return dict.fromkeys((*absent, *unused, *names)) | quiet


def _component(
    folder: Path,
    index: dict[str, Any],
    name: str,
    dtype: torch.dtype,
    options: dict[str, Any],
) -> Any:
    import diffusers

    entry = index.get(name)
    kind = getattr(diffusers, entry[1], None) if isinstance(entry, list) else None
    if kind is None:
        raise InvalidValueError(
            "the pipeline has no such model",
            key=f"{folder / _INDEX}: {name}",
            value=entry,
            fix="download the whole pipeline",
        )
    try:
        return kind.from_pretrained(folder, subfolder=name, **_precision(dtype), **options)
    except OSError as error:
        raise _unreadable(folder / name, error) from error


def _frozen(
    folder: Path,
    kind: type[TextToImage],
    config: Any,
    options: dict[str, Any],
) -> FrozenParts:
    try:
        pipeline = _pipeline_class(kind).from_pretrained(
            folder, **{kind.component: None}, **options
        )
    except ImportError as error:
        raise MissingDependencyError(
            "text encoders come with transformers", fix="pip install transformers"
        ) from error
    except (OSError, ValueError) as error:
        raise _unreadable(folder, error) from error
    # The pipeline asks its model for sizes while it encodes texts.
    setattr(pipeline, kind.component, PipelineModel(config=config))
    return FrozenParts(pipeline)


def _pipeline_class(kind: type[TextToImage]) -> Any:
    import diffusers

    return getattr(diffusers, kind.pipeline)


def _spare_the_vae(parts: FrozenParts) -> tuple[Decision, ...]:
    if "vae" not in parts.modules:
        return ()
    if parts.vae.dtype == torch.float32 or not parts.vae.config.get("force_upcast"):
        return ()
    before = str(parts.vae.dtype).removeprefix("torch.")
    parts.vae.to(torch.float32)
    return (
        Decision(
            key="vae.dtype",
            before=before,
            after="float32",
            reason="its configuration says force_upcast: half precision is not enough for it",
        ),
    )


def _training_scheduler(folder: Path, *, flow_matching: bool) -> tuple[Any, tuple[Decision, ...]]:
    from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler

    kind = FlowMatchEulerDiscreteScheduler if flow_matching else DDPMScheduler
    # The stored scheduler may be one for drawing, such as Euler's; its settings are the model's.
    try:
        config = kind.load_config(folder, subfolder="scheduler", local_files_only=True)
    except OSError as error:
        raise _unreadable(folder / "scheduler", error) from error
    stored = config.get("_class_name", kind.__name__)
    if not flow_matching or stored == kind.__name__:
        return kind.from_config(config), ()
    taken = inspect.signature(kind.__init__).parameters
    known = {name: value for name, value in config.items() if name in taken}
    shift = config.get("flow_shift", known.get("shift"))
    if shift is None:
        return kind.from_config(known), ()
    decision = Decision(
        key="scheduler",
        before=f"{stored}, flow_shift={shift:g}",
        after=f"{kind.__name__}, shift={shift:g}",
        reason="the former only samples; training draws its noise levels with the same shift",
    )
    return kind.from_config(known | {"shift": float(shift)}), (decision,)


def _bare_model(
    folder: Path, *, dtype: torch.dtype, variant: str | None, settings: dict[str, Any]
) -> Pretrained:
    from diffusers import DDPMScheduler, UNet2DModel

    config = _read(folder / "config.json")
    if config.get("_class_name") != "UNet2DModel":
        raise InvalidValueError(
            f"there is neither {_INDEX} nor the config.json of a UNet2DModel",
            key="source",
            value=str(folder),
            fix="give the folder of a whole pipeline",
        )
    with unpartitioned():
        model: Any = UNet2DModel.from_pretrained(folder, variant=variant, **_precision(dtype))
    family = ClassConditional(**settings) if config.get("num_class_embeds") else Unconditional()
    return Pretrained(model=model.train(), family=family, scheduler=DDPMScheduler(), folder=folder)


def _read(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    return content


def _unreadable(path: Path, error: Exception) -> InvalidValueError:
    return InvalidValueError(
        f"cannot be loaded ({_first(error)})",
        key="source",
        value=str(path),
        fix="download the pipeline again, or name the variant whose files are there",
    )


def _first(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _precision(dtype: torch.dtype) -> dict[str, torch.dtype]:
    import diffusers

    renamed = Version(diffusers.__version__) >= Version("0.42")
    return {"dtype" if renamed else "torch_dtype": dtype}


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise InvalidValueError(
            "is not a precision", key="dtype", value=name, fix=f"one of {', '.join(DTYPES)}"
        )
    return DTYPES[name]
