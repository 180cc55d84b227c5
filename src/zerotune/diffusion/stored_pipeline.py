"""Parts of a diffusers pipeline in a folder or a single file."""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
import torch

from zerotune._util.text import listing
from zerotune.backend.single_file import INDEX, SingleFile
from zerotune.decisions import Decision
from zerotune.diffusion.known_families import FAMILIES, named_family
from zerotune.diffusion.models.family import parameters_of
from zerotune.diffusion.models.pipeline import (
    FrozenParts,
    PipelineModel,
    TrainedEncoder,
    component_class,
    pipeline_class,
)
from zerotune.diffusion.models.pipeline_family import PipelineFamily
from zerotune.diffusion.noise_schedule import adds_noise, ddpm_of, preconditions
from zerotune.diffusion.trained_weights import not_loaded
from zerotune.errors import InvalidValueError, MissingDependencyError
from zerotune.platform.detect import first_line

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_UNUSED: Final = ("safety_checker", "feature_extractor", "image_encoder")
"""Files not needed for latents, embeddings or sampling; exports copy them from the folder."""


@attrs.frozen(kw_only=True)
class StoredPipeline:
    """A pipeline's folder."""

    folder: Path
    index: dict[str, Any]
    """Content of ``model_index.json``."""
    single: SingleFile | None = None
    """Single file with the trained model, and possibly other parts of the pipeline."""

    def family(self) -> type[PipelineFamily]:
        """Return the family of the pipeline's class."""
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
        kind = named_family(told)
        parts = parameters_of(pipeline_class(kind.pipeline))
        lacking = [
            name
            for name, part in parts.items()
            if part.default is part.empty
            and part.kind is part.POSITIONAL_OR_KEYWORD
            and name not in self.index
        ]
        # A custom family may add parts itself.
        if lacking and ":" not in told:
            raise InvalidValueError(
                f"is for pipelines with {listing(lacking)}, which this "
                f"{self.index.get('_class_name')} lacks",
                "omit family, or pass the folder of such a pipeline",
                "family",
                told,
            )
        return kind

    def check_left_out(self, names: Sequence[str], component: str) -> None:
        """Check that the pipeline has the parts to leave out."""
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
        """Return ``None`` for each part that is not loaded."""
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
                raise not_loaded(self.folder / name, error) from error
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
        """Return the class of a part."""
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
            raise not_loaded(self.folder, error) from error
        # The pipeline asks its model for sizes while it encodes texts.
        setattr(pipeline, kind.component, PipelineModel(config=config))
        for name, module in encoders.items():
            setattr(pipeline, name, TrainedEncoder(name=name, module=module))
        return FrozenParts(pipeline)

    def training_scheduler(self, *, flow_matching: bool) -> tuple[Any, tuple[Decision, ...]]:
        """Return the scheduler to train with, and what was decided about it."""
        from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler

        kind = FlowMatchEulerDiscreteScheduler if flow_matching else DDPMScheduler
        # The stored scheduler may be for sampling, such as Euler's; its settings are the model's.
        try:
            config = kind.load_config(self.folder, subfolder="scheduler", local_files_only=True)
        except OSError as error:
            raise not_loaded(self.folder / "scheduler", error) from error
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
