"""Load a model with its family and scheduler from a folder or a hub id."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import attrs
import torch

from zerotune.backend.single_file import INDEX, SUFFIX, SingleFile
from zerotune.backend.stored import bring_weights
from zerotune.backend.trained_parts import TrainedParts
from zerotune.backend.upstream import unpartitioned
from zerotune.decisions import Decision, announce
from zerotune.diffusion.models.declared import DECLARED
from zerotune.diffusion.models.family import ClassConditional, Family, Unconditional
from zerotune.diffusion.models.pipeline import Blueprint, FrozenParts, pipeline_class
from zerotune.diffusion.models.pipeline_family import PipelineFamily
from zerotune.diffusion.models.probe import probe, probe_texts
from zerotune.diffusion.objective import DenoisingObjective, FlowMatchingObjective
from zerotune.diffusion.stored_pipeline import StoredPipeline
from zerotune.diffusion.trained_weights import Loading, dtype_named, dtype_option, read_json
from zerotune.errors import InvalidValueError
from zerotune.plan.plan import DeepSpeedPlan, ResolvedPlan
from zerotune.platform.detect import first_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_CONFIGURATION: Final = ("**/*.json", "*.json", "*.txt", "**/*.txt", "**/*.model")
"""Files of a hub pipeline except weights."""

_PARTS: Final = ("vae", "text_encoder", "text_encoder_2", "text_encoder_3")
"""Frozen parts that a single file may omit."""


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
        bring_weights(
            self.model, dtype=None if dtype is None else dtype_named(dtype), device=device
        )
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
    loading = Loading(
        folder=folder,
        plan=plan,
        dtype=dtype,
        variant=variant,
        quantization=quantization,
        single=single,
    )
    if not (folder / INDEX).is_file():
        return _bare_model(loading, settings)
    index = read_json(folder / INDEX)
    stored = StoredPipeline(folder=folder, index=index, single=single)
    kind = stored.chosen_family(family)
    stored.check_left_out(leave_out, kind.component)
    trained = stored.encoders_to_train(text_encoders, leave_out, parts=parts)
    scheduler, replaced = stored.training_scheduler(flow_matching=kind.flow_matching)
    with unpartitioned():
        model, read = loading.model(stored.class_of(kind.component), kind.component)
        loaded = None
        encoders = stored.encoders(trained, dtype_named(dtype or "fp32"), variant)
        if parts:
            options: dict[str, Any] = {"variant": variant, "local_files_only": True}
            options |= stored.left_out(leave_out, kind.also_needed)
            options |= dtype_option(dtype_named(frozen_dtype))
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


def _bare_model(loading: Loading, settings: dict[str, Any]) -> Pretrained:
    """Load an unconditional U-Net that belongs to no pipeline."""
    from diffusers import DDPMScheduler, UNet2DModel

    config = read_json(loading.folder / "config.json")
    if config.get("_class_name") != "UNet2DModel":
        raise InvalidValueError(
            f"the folder contains neither {INDEX} nor the config.json of a UNet2DModel",
            "pass the folder of a complete pipeline, or of a UNet2DModel",
            "source",
            str(loading.folder),
        )
    with unpartitioned():
        model, decisions = loading.model(UNet2DModel)
    announce(decisions)
    family = ClassConditional(**settings) if config.get("num_class_embeds") else Unconditional()
    return Pretrained(
        model=model.train(),
        family=family,
        scheduler=DDPMScheduler(),
        folder=loading.folder,
        plan=loading.plan,
        decisions=decisions,
    )
