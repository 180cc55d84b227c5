"""Load a model with its family and scheduler from a folder or a hub id."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import attrs
import torch
from packaging.version import Version

from zerotune._util.text import did_you_mean, json_of, listing
from zerotune.backend.checks import DTYPES
from zerotune.backend.single_file import INDEX, SUFFIX, SingleFile, place_rows
from zerotune.backend.stored import (
    StoredWeight,
    bring_weights,
    leave_in_file,
    read_header,
    stamp_of,
    stored_weight,
    weight_files,
    without_weights,
)
from zerotune.backend.trained_parts import TrainedParts
from zerotune.backend.upstream import unpartitioned
from zerotune.decisions import Decision, announce
from zerotune.diffusion.models.declared import (
    DECLARED,
    AuraFlow,
    Chroma,
    Flux,
    Flux2,
    Flux2Klein,
    FluxKontext,
    HiDream,
    HunyuanVideo,
    Krea2,
    LTXVideo,
    Lumina2,
    PixArtAlpha,
    PixArtSigma,
    QwenImage,
    QwenImageEdit,
    QwenImageEditPlus,
    Sana,
    StableDiffusion,
    StableDiffusion3,
    StableDiffusionXL,
    Wan,
    WanLowNoise,
    ZImage,
)
from zerotune.diffusion.models.family import ClassConditional, Family, Unconditional
from zerotune.diffusion.models.pipeline import (
    Blueprint,
    FrozenParts,
    PipelineModel,
    TrainedEncoder,
    component_class,
    pipeline_class,
)
from zerotune.diffusion.models.pipeline_family import PipelineFamily
from zerotune.diffusion.models.probe import probe, probe_texts
from zerotune.diffusion.noise_schedule import adds_noise, ddpm_of, preconditions
from zerotune.diffusion.objective import (
    DenoisingObjective,
    FlowMatchingObjective,
)
from zerotune.errors import CheckpointCorruptError, InvalidValueError, MissingDependencyError
from zerotune.plan.plan import DeepSpeedPlan, ResolvedPlan
from zerotune.platform.detect import first_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


FAMILIES: Final[dict[str, type[PipelineFamily]]] = {family.pipeline: family for family in DECLARED}
"""Families, keyed by the class name of their diffusers pipeline."""

FAMILY_NAMES: Final[dict[str, type[PipelineFamily]]] = {
    "aura-flow": AuraFlow,
    "chroma": Chroma,
    "flux": Flux,
    "flux-kontext": FluxKontext,
    "flux2": Flux2,
    "flux2-klein-4b": Flux2Klein,
    "flux2-klein-9b": Flux2Klein,
    "hidream": HiDream,
    "hunyuan-video": HunyuanVideo,
    "krea2": Krea2,
    "ltx-video": LTXVideo,
    "lumina2": Lumina2,
    "pixart-alpha": PixArtAlpha,
    "pixart-sigma": PixArtSigma,
    "qwen-image": QwenImage,
    "qwen-image-edit": QwenImageEdit,
    "qwen-image-edit-plus": QwenImageEditPlus,
    "sana": Sana,
    "sd15": StableDiffusion,
    "sd21": StableDiffusion,
    "sd3-medium": StableDiffusion3,
    "sd35-large": StableDiffusion3,
    "sd35-medium": StableDiffusion3,
    "sdxl": StableDiffusionXL,
    "wan-1.3b": Wan,
    "wan-14b": Wan,
    "z-image": ZImage,
}
"""Families, keyed by their names in plans."""

_CONFIGURATION: Final = ("**/*.json", "*.json", "*.txt", "**/*.txt", "**/*.model")
"""Files of a hub pipeline except weights."""
_PARTS: Final = ("vae", "text_encoder", "text_encoder_2", "text_encoder_3")
"""Frozen parts that a single file may omit."""
_UNUSED: Final = ("safety_checker", "feature_extractor", "image_encoder")
"""Files not needed for latents, embeddings or sampling; exports copy them from the folder."""


@attrs.frozen(kw_only=True, eq=False)
class Pretrained:
    """Result of ``load_pretrained``."""

    model: torch.nn.Module
    """The model to train: unpartitioned, on the host and in training mode. With a plan, the weights
    are not read yet; the engine reads them."""
    family: Family
    """Family that calls the model; contains the frozen parts if they were loaded."""
    scheduler: Any
    """Training scheduler: DDPM's forward process, flow matching or EDM."""
    folder: Path
    """Folder that contains the pipeline; for a single file, the folder with its configuration."""
    file: Path | None = None
    """Path to the single file from which the model was loaded; ``None`` for a folder or hub id."""
    plan: DeepSpeedPlan | ResolvedPlan | None = None
    """Plan passed to ``load_pretrained``; ``Trainer(model=loaded)`` uses it."""
    decisions: tuple[Decision, ...] = ()
    """Decisions made while loading."""

    @property
    def component(self) -> str | None:
        """Name of the model in its pipeline; ``None`` if it has no pipeline."""
        return self.family.component if isinstance(self.family, PipelineFamily) else None

    @property
    def base(self) -> Path:
        """Folder or single file to pass to ``export_pipeline(base=...)`` for the frozen parts."""
        return self.file or self.folder

    def read_weights(
        self, *, dtype: str | None = None, device: torch.device | str = "cpu"
    ) -> torch.nn.Module:
        """Read all weights that are not loaded yet, to use the model without an engine.

        Args:
            dtype: Dtype of the weights: ``"fp32"``, ``"bf16"`` or ``"fp16"``; by default the dtype
                passed to ``load_pretrained``.
            device: Target device.

        Returns:
            The model with its weights.

        Raises:
            CheckpointCorruptError: A weight file cannot be read, or was changed after
                ``load_pretrained``.
        """
        bring_weights(self.model, dtype=None if dtype is None else _dtype(dtype), device=device)
        return self.model

    def objective(self, **settings: Any) -> DenoisingObjective | FlowMatchingObjective:
        """Return the objective with which models of this family were trained.

        Families with ``flow_matching`` get a ``FlowMatchingObjective`` with logit-normal density;
        all others get a ``DenoisingObjective``. A recipe has the objective for EDM schedulers.

        Args:
            **settings: Options of the objective; ``scheduler`` replaces the loaded scheduler.
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
    config: str | os.PathLike[str] | None = None,
    plan: DeepSpeedPlan | ResolvedPlan | None = None,
    dtype: str | None = None,
    quantization: Any = None,
    frozen_dtype: str = "bf16",
    family: type[PipelineFamily] | str | None = None,
    parts: bool = True,
    text_encoders: bool | Sequence[str] = False,
    leave_out: Sequence[str] = (),
    revision: str | None = None,
    variant: str | None = None,
    local_files_only: bool = False,
    **settings: Any,
) -> Pretrained:
    """Load a diffusers pipeline, a single file, or an unconditional U-Net for training.

    Every rank loads the whole VAE and the whole text encoders, even inside ``deepspeed.zero.Init``,
    where transformers would partition them. A VAE that overflows in half precision, such as SDXL's
    (``force_upcast``), stays in fp32.

    With ``plan``, the trained model's weights are checked but stay in their safetensors files. The
    plan's engine later reads the weights one at a time, in the plan's precision. At stage 3 each
    rank reads only its own partition of each weight. To read all weights without an engine, call
    ``Pretrained.read_weights``.

    Args:
        source: A folder with ``model_index.json``, the folder of an unconditional U-Net (with
            ``config.json``), a pipeline's hub id, or a safetensors file. The file may hold the
            whole pipeline or only its U-Net or transformer, in ComfyUI's or the original layout.
        config: Folder or hub id of a pipeline whose models have the same sizes as those in the
            single file. A single file contains no configuration. Models that the single file lacks,
            such as text encoders, are also read from ``config``. By default, diffusers infers the
            pipeline from the keys of the single file.
        plan: Plan for training. Without a plan all weights are read immediately.
        dtype: Dtype in which the trained model is loaded; by default ``"fp32"``. Use ``"bf16"`` for
            a base model with adapters. DeepSpeed trains in the plan's precision, not in ``dtype``.
        quantization: A diffusers quantization configuration (``BitsAndBytesConfig``,
            ``TorchAoConfig``) for a base model with adapters. Every rank reads and quantizes the
            whole model.
        frozen_dtype: Dtype of the VAE and the text encoders.
        family: A custom family for an unsupported pipeline, or a name. A name selects a known
            family of the pipeline (``"sdxl"``) or a class (``"module:Class"``).
        parts: ``False`` omits VAE and text encoders, which training from caches does not need.
        text_encoders: Text encoders to train with the model, by their names in the pipeline;
            ``True`` selects all CLIP text encoders. With trained text encoders,
            ``Pretrained.model`` is a ``TrainedParts``, and captions are encoded in each step.
        leave_out: Components to omit, such as ``("text_encoder_3", "tokenizer_3")`` for SD3.
        revision: Revision of the hub repository.
        variant: Variant of the weight files, such as ``"fp16"``.
        local_files_only: Whether to use only local files, without access to the hub.
        **settings: Settings of the family, such as ``dropout`` or ``max_sequence_length``.

    Returns:
        Model, family, training scheduler and the local folder.

    Raises:
        InvalidValueError: ``source`` cannot be loaded, or its weights' names or shapes do not match
            the model. The family is unknown or fails the test of ``probe``. The scheduler cannot
            add noise as in the model's original training. The quantization is not available.
        MissingDependencyError: A package that the text encoders or the quantization require is not
            installed.
    """
    folder, single, found = _located(
        source,
        config,
        skip=leave_out if parts else _PARTS,
        variant=variant,
        options={"revision": revision, "local_files_only": local_files_only},
    )
    loading = _Loading(
        folder=folder,
        plan=plan,
        dtype=dtype,
        variant=variant,
        quantization=quantization,
        single=single,
    )
    if not (folder / INDEX).is_file():
        return loading.bare_model(settings)
    index = _read_json(folder / INDEX)
    stored = _StoredPipeline(folder=folder, index=index, single=single)
    kind = stored.chosen_family(family)
    stored.check_left_out(leave_out, kind.component)
    trained = stored.encoders_to_train(text_encoders, leave_out, parts=parts)
    scheduler, replaced = stored.training_scheduler(flow_matching=kind.flow_matching)
    with unpartitioned():
        model, read = loading.model(stored.class_of(kind.component), kind.component)
        loaded = None
        encoders = stored.encoders(trained, _dtype(dtype or "fp32"), variant)
        if parts:
            options: dict[str, Any] = {"variant": variant, "local_files_only": True}
            options |= stored.left_out(leave_out, kind.also_needed)
            options |= _dtype_option(_dtype(frozen_dtype))
            loaded = stored.frozen(kind, model.config, options, encoders)
        settings["blueprint"] = Blueprint.read(folder, pipeline_class(kind.pipeline))
    chosen = kind(parts=loaded, **settings)
    decisions = found + read + replaced + (() if loaded is None else _spare_the_vae(loaded))
    decisions += probe(chosen, model)
    if kind not in DECLARED:  # zerotune's own are tested, and encoders are slow on a host.
        chosen, found = probe_texts(chosen)
        decisions += found
    if encoders:
        decisions += _freeze_unread(chosen, encoders)
        model = TrainedParts(**{kind.component: model, **encoders})
    announce(decisions)
    return Pretrained(
        model=model.train(),
        family=chosen,
        scheduler=scheduler,
        folder=folder,
        file=None if single is None else single.path,
        plan=plan,
        decisions=decisions,
    )


def _located(
    source: str | os.PathLike[str],
    config: str | os.PathLike[str] | None,
    *,
    skip: Sequence[str],
    variant: str | None,
    options: dict[str, Any],
) -> tuple[Path, SingleFile | None, tuple[Decision, ...]]:
    """Return the folder of a pipeline, and the single file that contains its weights, if any."""
    path = Path(source)
    if config is None and path.suffix != SUFFIX and not path.is_file():
        return _local_folder(source, variant=variant, **options), None, ()
    if path.suffix != SUFFIX or not path.is_file():
        raise InvalidValueError(
            "does not exist" if path.suffix == SUFFIX else f"is not a {SUFFIX} file",
            f"pass an existing {SUFFIX} file as source; without such a file, omit config=",
            "source",
            os.fspath(source),
        )
    file, found = _single_file(path, config, skip=skip, variant=variant, options=options)
    return file.config, file, found


def _local_folder(source: str | os.PathLike[str], **options: Any) -> Path:
    path = Path(source)
    if path.is_dir():
        return path
    from diffusers import DiffusionPipeline

    try:
        return Path(DiffusionPipeline.download(str(source), **options))
    except (OSError, ValueError) as error:
        raise InvalidValueError(
            "is neither a local folder nor a pipeline that can be downloaded from the hub "
            f"({first_line(error)})",
            f"pass a folder that contains {INDEX}, or a hub id such as "
            "stabilityai/stable-diffusion-xl-base-1.0",
            "source",
            os.fspath(source),
        ) from error


def _single_file(
    path: Path,
    config: str | os.PathLike[str] | None,
    *,
    skip: Sequence[str],
    variant: str | None,
    options: dict[str, Any],
) -> tuple[SingleFile, tuple[Decision, ...]]:
    """Return a single file with its configuration, by default the one that its keys imply.

    Parts that the file lacks, except those in ``skip``, are downloaded from the hub.
    """
    if config is not None and Path(config).is_dir():
        return SingleFile.open(path, config=Path(config)), ()
    from diffusers import DiffusionPipeline
    from huggingface_hub import snapshot_download

    file = SingleFile.open(path, config=path.parent)
    wanted = os.fspath(config) if config is not None else file.published
    try:
        folder = Path(snapshot_download(wanted, allow_patterns=list(_CONFIGURATION), **options))
        file = attrs.evolve(file, config=folder)
        lacking = (set(_PARTS) & file.components.keys()) - file.parts - set(skip)
        if lacking:
            others = dict.fromkeys(file.components.keys() - lacking)
            DiffusionPipeline.download(wanted, variant=variant, **others, **options)
    except (OSError, ValueError) as error:
        raise InvalidValueError(
            f"the file contains no model configuration, and the configuration of {wanted} "
            f"cannot be downloaded from the hub ({first_line(error)})",
            f"pass a local copy of {wanted} that contains all .json and .txt files, and "
            "the weights of the parts that the file lacks",
            "config",
            config,
        ) from error
    if config is not None:
        return file, ()
    return file, (
        Decision(
            "config", None, wanted, f"diffusers infers this pipeline from the keys of {path.name}"
        ),
    )


def named_family(name: str) -> type[PipelineFamily]:
    """Find a family class by its command-line name, class name, pipeline, or ``module:Class``.

    Raises:
        InvalidValueError: No family has this name.
    """
    if ":" in name:
        return _imported_family(name)
    names: dict[str, type[PipelineFamily]] = {**FAMILY_NAMES, **FAMILIES}
    names |= {family.__name__: family for family in DECLARED} | {"WanLowNoise": WanLowNoise}
    if name in names:
        return names[name]
    close = did_you_mean(name, names)
    raise InvalidValueError(
        "is not a known family",
        f"did you mean {' or '.join(close)}?" if close else f"one of {', '.join(FAMILY_NAMES)}",
        "family",
        name,
    )


def _imported_family(name: str) -> type[PipelineFamily]:
    """Import a custom family from a module in the working directory or an installed module."""
    module, _, attribute = name.partition(":")
    here = str(Path.cwd())
    with contextlib.ExitStack() as undo:
        if "" not in sys.path and here not in sys.path:
            sys.path.insert(0, here)
            undo.callback(sys.path.remove, here)
        try:
            found = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise InvalidValueError(
                f"cannot be imported ({first_line(error)})",
                "write the module's import name, a colon and the class name, such as "
                "my_family:OvisImage",
                "family",
                name,
            ) from error
    if not (isinstance(found, type) and issubclass(found, PipelineFamily)):
        raise InvalidValueError(
            "is not a family",
            "name a subclass of zerotune.diffusion.PipelineFamily (docs/families.md)",
            "family",
            name,
        )
    return found


@attrs.frozen(kw_only=True)
class _StoredPipeline:
    """A pipeline's folder."""

    folder: Path
    index: dict[str, Any]
    """Content of ``model_index.json``."""
    single: SingleFile | None = None
    """Single file with the trained model, and possibly other parts of the pipeline."""

    def family(self) -> type[PipelineFamily]:
        name = str(self.index.get("_class_name"))
        if name not in FAMILIES:
            raise InvalidValueError(
                f"this pipeline has no known family; supported pipelines are {', '.join(FAMILIES)}",
                "declare a family for this pipeline (docs/families.md) and pass it as family=; "
                "recipes have families for ControlNets and image-to-video pipelines",
                f"{self.folder / INDEX}: _class_name",
                name,
            )
        return FAMILIES[name]

    def chosen_family(self, told: type[PipelineFamily] | str | None) -> type[PipelineFamily]:
        """Return the requested family; by default the family of the pipeline."""
        if told is None or not isinstance(told, str):
            return told or self.family()
        return named_family(told)

    def check_left_out(self, names: Sequence[str], component: str) -> None:
        known = [n for n, entry in self.index.items() if isinstance(entry, list) and n != component]
        for name in names:
            if name not in known:
                raise InvalidValueError(
                    "is not a frozen part of this pipeline",
                    f"its parts are {', '.join(known)}",
                    "leave_out",
                    name,
                )

    def left_out(self, names: Sequence[str], needed: Sequence[str]) -> dict[str, Any]:
        # Components that the pipeline was saved without must be omitted explicitly.
        absent = [name for name, entry in self.index.items() if entry == [None, None]]
        unused = [name for name in _UNUSED if name in self.index and name not in needed]
        quiet = (
            {"requires_safety_checker": False} if "requires_safety_checker" in self.index else {}
        )
        return dict.fromkeys((*absent, *unused, *names)) | quiet

    def encoders_to_train(
        self, wanted: bool | Sequence[str], leave_out: Sequence[str], *, parts: bool
    ) -> tuple[str, ...]:
        """Return the names of the text encoders to train."""
        there = {
            name: str(entry[1])
            for name, entry in self.index.items()
            if name.startswith("text_encoder") and isinstance(entry, list) and entry[1]
        }
        named = [name for name, kind in there.items() if kind.startswith("CLIPText")]
        chosen = named if wanted is True else [wanted] if isinstance(wanted, str) else wanted or []
        for name in chosen:
            if name not in there or name in leave_out:
                raise InvalidValueError(
                    "is not a text encoder of the pipeline, or is omitted by leave_out",
                    f"one of {', '.join(n for n in there if n not in leave_out) or 'none'}",
                    "text_encoders",
                    name,
                )
        if (wanted and not chosen) or (chosen and not parts):
            raise InvalidValueError(
                "can be trained only with the pipeline's tokenizers and VAE"
                if chosen
                else "the pipeline has no CLIP",
                "omit parts=False" if chosen else f"name one of {', '.join(there)}",
                "text_encoders",
                wanted,
            )
        return tuple(chosen)

    def encoders(
        self, names: Sequence[str], dtype: torch.dtype, variant: str | None
    ) -> dict[str, torch.nn.Module]:
        """Load the text encoders to train, unpartitioned, on the host."""
        if not names:
            return {}
        self.refuse_file("text_encoders", names)
        import transformers

        found = {}
        for name in names:
            kind = getattr(transformers, self.index[name][1])
            try:
                found[name] = kind.from_pretrained(
                    self.folder / name, dtype=dtype, variant=variant, local_files_only=True
                )
            except (OSError, ValueError, RuntimeError) as error:
                raise _not_loaded(self.folder / name, error) from error
        return found

    def refuse_file(self, key: str, value: Any) -> None:
        """Reject the option ``key`` if the model is loaded from a single file."""
        if self.single is not None:
            raise InvalidValueError(
                "needs the folder of a pipeline; source is a single file",
                "convert the file to a folder: load it with the pipeline's from_single_file, "
                "then call save_pretrained",
                key,
                value,
            )

    def class_of(self, name: str) -> Any:
        entry = self.index.get(name)
        kind = None
        if isinstance(entry, list) and None not in entry:
            kind = component_class(*entry)
        if kind is None:
            raise InvalidValueError(
                "the pipeline does not contain this model",
                "download the whole pipeline",
                f"{self.folder / INDEX}: {name}",
                entry,
            )
        return kind

    def frozen(
        self,
        kind: type[PipelineFamily],
        config: Any,
        options: dict[str, Any],
        encoders: Mapping[str, torch.nn.Module],
    ) -> FrozenParts:
        """Load the pipeline, with stand-ins for the models that are trained."""
        made, single = pipeline_class(kind.pipeline), self.single
        apart = dict.fromkeys((kind.component, *encoders))
        try:
            if single is None:
                pipeline = made.from_pretrained(self.folder, **apart, **options)
            else:
                pipeline = single.pipeline(made, {**options, **apart})
        except (ImportError, AttributeError, OSError, ValueError) as error:
            if kind.reads_references and find_spec("torchvision") is None:
                raise MissingDependencyError(
                    f"the image processor of {made.__name__} needs torchvision, which is not "
                    "installed",
                    "run pip install torchvision, or pass parts=False to train from caches",
                    "torchvision",
                ) from error
            if single is not None and isinstance(error, OSError):
                raise InvalidValueError(
                    "the folder does not contain the frozen parts that the file lacks "
                    f"({first_line(error)}); frozen parts in the file: "
                    f"{listing(sorted(single.parts))}",
                    "pass the folder of a complete pipeline, or pass parts=False to train "
                    "from caches",
                    "config",
                    str(self.folder),
                ) from error
            if isinstance(error, ImportError):
                raise MissingDependencyError(
                    "text encoders require it", "pip install transformers", "transformers"
                ) from error
            raise _not_loaded(self.folder, error) from error
        # The pipeline asks its model for sizes while it encodes texts.
        setattr(pipeline, kind.component, PipelineModel(config=config))
        for name, module in encoders.items():
            setattr(pipeline, name, TrainedEncoder(name=name, module=module))
        return FrozenParts(pipeline)

    def training_scheduler(self, *, flow_matching: bool) -> tuple[Any, tuple[Decision, ...]]:
        from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler

        kind = FlowMatchEulerDiscreteScheduler if flow_matching else DDPMScheduler
        # The stored scheduler may be for sampling, such as Euler's; its settings are the model's.
        try:
            config = kind.load_config(self.folder, subfolder="scheduler", local_files_only=True)
        except OSError as error:
            raise _not_loaded(self.folder / "scheduler", error) from error
        stored = config.get("_class_name", kind.__name__)
        if stored == kind.__name__:
            return kind.from_config(config), ()
        if not flow_matching:
            return self._same_noise(config, stored)
        taken = inspect.signature(kind.__init__).parameters
        known = {name: value for name, value in config.items() if name in taken}
        shift = config.get("flow_shift", known.get("shift"))
        if shift is None:
            return kind.from_config(known), ()
        decision = Decision(
            "scheduler",
            f"{stored}, flow_shift={shift:g}",
            f"{kind.__name__}, shift={shift:g}",
            f"{stored} supports only sampling; training uses {kind.__name__} with the same shift",
        )
        return kind.from_config(known | {"shift": float(shift)}), (decision,)

    def _same_noise(self, config: dict[str, Any], stored: str) -> tuple[Any, tuple[Decision, ...]]:
        """Return a scheduler that adds noise with the schedule of the folder's scheduler.

        Schedulers for EDM remain unchanged.
        """
        import diffusers

        kind = getattr(diffusers, stored, None)
        own: Any = None if kind is None else kind.from_config(config)
        if preconditions(own):
            return own, ()
        ddpm = ddpm_of(own) if hasattr(own, "alphas_cumprod") else None
        why = ""
        if kind is None:
            why = "diffusers does not contain this scheduler"
        elif not hasattr(own, "alphas_cumprod"):
            why = "the scheduler has no alphas_cumprod, which denoising diffusion needs"
        elif ddpm is None and not adds_noise(own):
            why = "the scheduler supports only sampling, and DDPM has a different noise schedule"
        if why:
            raise InvalidValueError(
                f"{why}; training cannot add the noise with which the model was trained",
                "train a model with a DDPM noise schedule; if this model has such a schedule, "
                "write DDPMScheduler and its betas into scheduler_config.json",
                f"{self.folder / 'scheduler' / 'scheduler_config.json'}: _class_name",
                stored,
            )
        before, after = stored, "DDPMScheduler"
        reason = (
            f"DDPMScheduler has the same noise schedule as {stored}, and also "
            "implements the forward process"
        )
        if ddpm is None:
            before, after, middle = after, before, len(own.alphas_cumprod) // 2
            share = float(own.alphas_cumprod[middle])
            reason = (
                "DDPM with the same settings has a different noise schedule, so training uses the "
                f"folder's scheduler, whose alphas_cumprod[{middle}] is {share:.4g}"
            )
        decision = Decision("scheduler", before, after, reason)
        return own if ddpm is None else ddpm, (decision,)


def _freeze_unread(
    family: PipelineFamily, encoders: Mapping[str, torch.nn.Module]
) -> tuple[Decision, ...]:
    """Freeze weights on which embeddings do not depend, such as CLIP's last layer in SDXL.

    An optimizer would decay such weights, although they never get a gradient.
    """
    family = attrs.evolve(family, max_sequence_length=8)  # A T5 is slow on the host.
    with torch.enable_grad():
        texts = family.embed(cast("FrozenParts", family.parts), ["a"], torch.device("cpu"))
    read = _leaves_of(texts.values())
    found = []
    for name, module in encoders.items():
        unread = [weight for weight, p in module.named_parameters() if id(p) not in read]
        for weight in unread:
            module.get_parameter(weight).requires_grad_(False)
        if unread:
            found.append(
                Decision(
                    f"{name}.requires_grad",
                    "all weights",
                    f"all but {len(unread)}, such as {unread[0]}",
                    "embeddings do not depend on the excluded weights",
                )
            )
    return tuple(found)


def _leaves_of(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Ids of the parameters that tensors were computed from."""
    nodes = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    known: set[Any] = set()
    leaves = set()
    while nodes:
        node = nodes.pop()
        if node in known:
            continue
        known.add(node)
        if hasattr(node, "variable"):
            leaves.add(id(node.variable))
        nodes += [other for other, _ in node.next_functions if other is not None]
    return leaves


def _spare_the_vae(parts: FrozenParts) -> tuple[Decision, ...]:
    if "vae" not in parts.modules:
        return ()
    if parts.vae.dtype == torch.float32 or not parts.vae.config.get("force_upcast"):
        return ()
    before = str(parts.vae.dtype).removeprefix("torch.")
    parts.vae.to(torch.float32)
    return (
        Decision(
            "vae.dtype",
            before,
            "float32",
            "the VAE overflows in half precision, as force_upcast in its configuration says",
        ),
    )


# -- Weights of the trained model, read here or later by the engine.


@attrs.frozen(kw_only=True)
class _Loading:
    """Options for loading the trained model."""

    folder: Path
    plan: DeepSpeedPlan | ResolvedPlan | None
    dtype: str | None
    variant: str | None
    quantization: Any
    single: SingleFile | None = None

    def model(self, kind: Any, name: str | None = None) -> tuple[Any, tuple[Decision, ...]]:
        """Load a model of class ``kind`` from the folder, or from its subfolder ``name``."""
        place = self.folder / (name or "")
        if self.dtype is not None:
            _dtype(self.dtype)
        if self.quantization is not None:
            return self._quantized(kind, name)
        if self.single is not None:
            return self._model_of_file(kind, place, self.single)
        if self.plan is None:
            return self._read_now(kind, name, _dtype(self.dtype or "fp32")), ()
        try:
            files = weight_files(place, variant=self.variant)
        except CheckpointCorruptError as error:
            raise _not_loaded(place, error) from error
        if not files:
            return self._read_for_plan(kind, name)
        try:
            found = _stored_weights(files)
        except CheckpointCorruptError as error:
            raise _not_loaded(place, error) from error
        model = self._without_weights(kind, place)
        self._leave_in_files(model, place, found)
        names = f"{files[0].name}" + (f" and {len(files) - 1} more" if files[1:] else "")
        return model, (_waits_in(names),)

    def _model_of_file(
        self, kind: Any, place: Path, file: SingleFile
    ) -> tuple[Any, tuple[Decision, ...]]:
        """Return the model of a single file, whose weights remain in the file."""
        file.check_plain()
        model = self._without_weights(kind, place)
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        places = place_rows(kind, model.config, model=shapes, file=file.shapes)
        self._leave_in_files(model, file.path, file.weights(places, shapes))
        decisions = [
            Decision(
                "model.weights",
                listing(dropped),
                None,
                "diffusers' converter does not use these weights",
            )
            for dropped in [file.unused(places)]
            if dropped
        ]
        if self.plan is None:
            bring_weights(model, dtype=_dtype(self.dtype or "fp32"))
        else:
            decisions.append(_waits_in(file.path.name))
        return model, tuple(decisions)

    def bare_model(self, settings: dict[str, Any]) -> Pretrained:
        """Load an unconditional U-Net that belongs to no pipeline."""
        from diffusers import DDPMScheduler, UNet2DModel

        config = _read_json(self.folder / "config.json")
        if config.get("_class_name") != "UNet2DModel":
            raise InvalidValueError(
                f"the folder contains neither {INDEX} nor the config.json of a UNet2DModel",
                "pass the folder of a complete pipeline, or of a UNet2DModel",
                "source",
                str(self.folder),
            )
        with unpartitioned():
            model, decisions = self.model(UNet2DModel)
        announce(decisions)
        family = ClassConditional(**settings) if config.get("num_class_embeds") else Unconditional()
        return Pretrained(
            model=model.train(),
            family=family,
            scheduler=DDPMScheduler(),
            folder=self.folder,
            plan=self.plan,
            decisions=decisions,
        )

    def _quantized(self, kind: Any, name: str | None) -> tuple[Any, tuple[Decision, ...]]:
        """Return the frozen model, with linear layers quantized by diffusers."""
        told = type(self.quantization).__name__
        if told == "GGUFQuantizationConfig":
            raise InvalidValueError(
                "diffusers supports GGUF only in single files, not in a pipeline's folder",
                f"write model = diffusers.{kind.__name__}.from_single_file(FILE, "
                "quantization_config=...), then call add_lora(model)",
                "quantization",
                told,
            )
        precision = "bf16" if self.plan is None else self.plan.precision
        dtype = self.dtype or (precision if precision in DTYPES else "bf16")
        try:
            model = self._read_now(kind, name, _dtype(dtype), quantization_config=self.quantization)
        except ImportError as error:
            raise MissingDependencyError(
                f"this quantization needs a package that is not installed ({first_line(error)})",
                "run pip install 'zerotune[optimizers]' to install bitsandbytes and torchao",
                "quantization",
                told,
            ) from error
        model.requires_grad_(False)
        if self.plan is None:
            return model, ()
        return model, (
            Decision(
                "model.weights",
                "read from their files by the engine",
                f"read on every rank, and quantized with {told}",
                "quantization packages need whole weights",
            ),
        )

    def _read_for_plan(self, kind: Any, name: str | None) -> tuple[Any, tuple[Decision, ...]]:
        """Return a model whose files cannot be read in parts, in the dtype DeepSpeed will use."""
        rounds = isinstance(self.plan, ResolvedPlan) and self.plan.uses_deepspeed
        chosen = self.dtype or (self.plan.precision if self.plan and rounds else "fp32")
        model = self._read_now(kind, name, _dtype(chosen))
        return model, (
            Decision(
                "model.weights",
                "read from their files by the engine",
                f"read whole on every rank, in {chosen}",
                "the model has no safetensors file, and other formats can only be read "
                "whole; convert the model with save_pretrained",
                "warning",
            ),
        )

    def _read_now(
        self, kind: Any, name: str | None, dtype: torch.dtype, **quantization: Any
    ) -> Any:
        place = self.folder / (name or "")
        options = {} if name is None else {"subfolder": name}
        try:
            if self.single is not None:
                return kind.from_single_file(
                    str(self.single.path),
                    config=str(self.folder),
                    local_files_only=True,
                    **options,
                    **_dtype_option(dtype),
                    **quantization,
                )
            model, told = kind.from_pretrained(
                self.folder,
                variant=self.variant,
                local_files_only=True,
                output_loading_info=True,
                **options,
                **_dtype_option(dtype),
                **quantization,
            )
        except (OSError, ValueError, RuntimeError) as error:
            if quantization:
                raise InvalidValueError(
                    f"the model cannot be loaded with this quantization ({first_line(error)})",
                    "without a GPU, use TorchAoConfig, because diffusers runs bitsandbytes "
                    "on GPUs only",
                    "quantization",
                    type(self.quantization).__name__,
                ) from error
            raise _not_loaded(place, error) from error
        if not quantization:
            _check_weight_names(
                place, missing=told["missing_keys"], unexpected=told["unexpected_keys"]
            )
        return model

    def _without_weights(self, kind: Any, place: Path) -> Any:
        """Return a model whose buffers have values, but whose parameters do not."""
        from diffusers.models.modeling_utils import no_init_weights

        try:
            config = kind.load_config(place, local_files_only=True)
            with no_init_weights(), without_weights():
                model = kind.from_config(config)
        except (OSError, ValueError) as error:
            raise _not_loaded(place, error) from error
        where = self.folder if self.single is None else self.single.path
        model.register_to_config(_name_or_path=str(where))
        return model

    def _leave_in_files(self, model: Any, place: Path, found: dict[str, StoredWeight]) -> None:
        """Attach to each parameter its place in the files, and read buffers."""
        kind = type(model)
        # Old files use different names for some weights; the model's class renames them in place.
        rename = getattr(model, "_fix_state_dict_keys_on_load", None)
        if rename is not None:
            rename(found)
        state = model.state_dict(keep_vars=True)
        _check_fit(place, kind, state, found)
        kept = getattr(kind, "_keep_in_fp32_modules", None) or ()
        for name, tensor in state.items():
            weight = found.get(name)
            if weight is None:
                continue
            if not isinstance(tensor, torch.nn.Parameter):
                weight.read_into(tensor.view(-1))
            elif stored_weight(tensor) is None:
                if tensor.is_floating_point() and not set(kept) & set(name.split(".")):
                    tensor.data = tensor.data.to(_dtype(self.dtype or "fp32"))
                leave_in_file(tensor, weight)


def _waits_in(names: str) -> Decision:
    return Decision(
        "model.weights",
        "read whole on every rank",
        f"read from {names} by the engine",
        "load_pretrained received a plan; without an engine, call Pretrained.read_weights()",
    )


def _stored_weights(files: Sequence[Path]) -> dict[str, StoredWeight]:
    found: dict[str, StoredWeight] = {}
    for file in files:
        stamp = stamp_of(file.stat())
        for name, tensor in read_header(file)[0].items():
            if name in found:
                raise CheckpointCorruptError(
                    f"appears in both {found[name].file.name} and {file.name}", key=name
                )
            found[name] = StoredWeight(file=file, tensor=tensor, stamp=stamp)
    return found


def _check_fit(
    place: Path, kind: Any, state: Mapping[str, torch.Tensor], found: Mapping[str, StoredWeight]
) -> None:
    there = {id(state[name]) for name in found if name in state}
    ignored = getattr(kind, "_keys_to_ignore_on_load_unexpected", None) or ()
    _check_weight_names(
        place,
        # A tied weight may be stored under one of its names.
        missing=[name for name, tensor in state.items() if id(tensor) not in there],
        unexpected=[
            name
            for name in found
            if name not in state and not any(re.search(each, name) for each in ignored)
        ],
    )
    for name, weight in found.items():
        if name in state and tuple(state[name].shape) != weight.tensor.shape:
            raise InvalidValueError(
                f"the model's configuration requires a tensor of shape {list(state[name].shape)}",
                "download the model again, because its configuration does not match its weights",
                f"{weight.file}: {name}",
                list(weight.tensor.shape),
            )


def _check_weight_names(place: Path, *, missing: Sequence[str], unexpected: Sequence[str]) -> None:
    lacks, extra = "lacks weights of the model", "contains weights that the model does not have"
    for names, what in ((missing, lacks), (unexpected, extra)):
        if names:
            raise InvalidValueError(
                f"{what}: {listing(list(names))}",
                "download the model again, because its configuration does not match its weights",
                "source",
                str(place),
            )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json_of(path.read_text())
    except (OSError, ValueError) as error:
        raise _not_loaded(path, error) from error
    return content


def _not_loaded(path: Path, error: Exception) -> InvalidValueError:
    return InvalidValueError(
        f"cannot be loaded ({first_line(error).rstrip('.')})",
        "download the pipeline again, or pass a variant= whose files exist",
        "source",
        str(path),
    )


def _dtype_option(dtype: torch.dtype) -> dict[str, torch.dtype]:
    import diffusers

    renamed = Version(diffusers.__version__) >= Version("0.42")
    return {"dtype" if renamed else "torch_dtype": dtype}


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise InvalidValueError(
            "is not a supported dtype", f"one of {', '.join(DTYPES)}", "dtype", name
        )
    return DTYPES[name]
