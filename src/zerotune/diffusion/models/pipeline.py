"""Diffusers pipelines for trained models, and their frozen parts.

``FrozenParts`` are the frozen VAE, text encoders and tokenizers. A ``PipelineModel`` replaces the
trained model in the pipeline and calls the engine.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import attrs
import torch

from zerotune._util.text import json_of
from zerotune.backend.accelerator import current_accelerator
from zerotune.backend.trained_parts import primary_of
from zerotune.backend.upstream import check_whole, unpartitioned
from zerotune.diffusion.data.batches import row_of, stack_named
from zerotune.diffusion.data.cache import hash_key, hash_weights
from zerotune.diffusion.models.family import Denoiser
from zerotune.diffusion.models.latents import LatentSpace
from zerotune.errors import DataError, MissingDependencyError

_KEPT_EXACT: Final = (
    "timestep",
    "timesteps",
    "time_ids",
    "guidance",
    "img_ids",
    "txt_ids",
    "position_ids",
)
"""Names of arguments whose integers bf16 cannot represent."""

Embeddings = Mapping[str, torch.Tensor]
"""Text tensors by name, batch first."""


class FrozenParts:
    """Frozen models of a diffusers pipeline, such as the VAE; every rank holds them unpartitioned.

    ``on`` moves some parts to a device temporarily, and ``release`` moves all parts to the host.

    Args:
        pipeline: A pipeline such as ``StableDiffusionXLPipeline``; its trained component is
            ``None`` or a ``PipelineModel``.

    Raises:
        EngineError: ZeRO-3 partitioned a part while the pipeline was loaded.
    """

    def __init__(self, pipeline: Any) -> None:
        self.pipeline = pipeline
        self._remembered: dict[str, dict[str, dict[str, torch.Tensor]]] = {}
        for name, module in self.modules.items():
            check_whole(module, name=name)
            module.requires_grad_(False).eval()

    @property
    def modules(self) -> dict[str, torch.nn.Module]:
        """Return the parts that have weights, keyed by their names in the pipeline."""
        return {
            name: part
            for name, part in self.pipeline.components.items()
            if isinstance(part, torch.nn.Module) and next(part.parameters(), None) is not None
        }

    @property
    def vae(self) -> Any:
        """Return the VAE.

        Raises:
            DataError: The pipeline was loaded without its VAE.
        """
        if self.pipeline.vae is None:
            raise DataError(
                "the pipeline was loaded without its VAE, which encodes and decodes images",
                'remove "vae" from leave_out',
                "parts.vae",
                None,
            )
        return self.pipeline.vae

    @property
    def trained_encoders(self) -> dict[str, TrainedEncoder]:
        """Return the stand-ins for trained text encoders, keyed by their names in the pipeline."""
        components = self.pipeline.components.items()
        return {name: part for name, part in components if isinstance(part, TrainedEncoder)}

    @contextmanager
    def calling(self, model: Denoiser) -> Iterator[None]:
        """Inside the ``with`` block, route calls to trained text encoders through ``model``.

        Args:
            model: Engine or model that contains the trained text encoders.
        """
        encoders = self.trained_encoders.values()
        for encoder in encoders:
            encoder.call_in(model)
        try:
            yield
        finally:
            for encoder in encoders:
                encoder.call_in(None)

    @property
    def text_encoders(self) -> dict[str, torch.nn.Module]:
        """Return the frozen text encoders, keyed by their names in the pipeline.

        Raises:
            DataError: The pipeline was loaded without text encoders.
        """
        found = {n: module for n, module in self.modules.items() if n.startswith("text_encoder")}
        if not found and not self.trained_encoders:
            raise DataError(
                "the pipeline was loaded without text encoders, so texts cannot be encoded",
                "remove the names of the text encoders from leave_out",
                "parts.text_encoders",
                None,
            )
        return found

    @property
    def latents(self) -> LatentSpace:
        """Return the latent space of the VAE.

        Raises:
            DataError: The pipeline was loaded without its VAE.
        """
        return LatentSpace(self.vae)

    @property
    def scale(self) -> int:
        """Return the number of image pixels per latent pixel along one side."""
        return self.latents.scale

    def to(self, device: torch.device | str, names: Sequence[str] | None = None) -> FrozenParts:
        """Move parts to a device.

        Args:
            device: Target device.
            names: Names of the parts to move; by default all parts.
        """
        for name, module in self.modules.items():
            if names is None or name in names:
                module.to(device)
        return self

    def release(self) -> None:
        """Move all parts to the host and free device memory."""
        self.to("cpu")
        current_accelerator().empty_cache()

    @contextmanager
    def on(self, device: torch.device, names: Sequence[str]) -> Iterator[None]:
        """Move parts to a device inside the ``with`` block, and back afterwards.

        Args:
            device: Target device.
            names: Names of the parts to move.
        """
        modules = self.modules
        moved = [
            (modules[name], next(modules[name].parameters()).device)
            for name in names
            if name in modules
        ]
        for module, _ in moved:
            module.to(device)
        try:
            yield
        finally:
            for module, before in moved:
                module.to(before)

    def remember(
        self,
        texts: Sequence[str],
        encode: Callable[[Sequence[str]], Embeddings],
        *,
        device: torch.device,
        kind: str = "",
    ) -> dict[str, torch.Tensor]:
        """Return embeddings of texts; each text is encoded once and cached on the host.

        Embeddings of trained text encoders are not cached.

        Args:
            texts: Texts to encode.
            encode: Function that encodes texts.
            device: Device of the encoders.
            kind: Kind of texts, such as negative prompts; each kind has a separate cache.
        """
        if self.trained_encoders:
            with self.on(device, list(self.text_encoders)), torch.no_grad():
                return dict(encode(texts))
        known = self._remembered.setdefault(kind, {})
        new = [text for text in dict.fromkeys(texts) if text not in known]
        if new:
            with self.on(device, list(self.text_encoders)), torch.no_grad():
                for text in new:
                    row = row_of(encode([text]), 0)
                    known[text] = {name: value.cpu() for name, value in row.items()}
        return stack_named([known[text] for text in texts])

    def encode_images(self, images: torch.Tensor) -> torch.Tensor:
        """Encode images or clips; see ``LatentSpace.encode``.

        Args:
            images: Images (b, 3, h, w) or clips (b, 3, frames, h, w) in [-1, 1].
        """
        return self.latents.encode(images)

    def decode_latents(self, latents: torch.Tensor) -> torch.Tensor:
        """Decode latents; see ``LatentSpace.decode``.

        Args:
            latents: Latents, normalised as in training.
        """
        return self.latents.decode(latents)

    def hash(self, names: Sequence[str]) -> str:
        """Return a hash of the weights and configurations of the parts ``names``."""
        modules = [self.modules[name] for name in names]
        return "+".join(
            hash_key(hash_weights(module), json.dumps(_configuration(module), sort_keys=True))
            for module in modules
        )

    def hash_tokenizers(self) -> str:
        """Return a hash of all that determines how the pipeline splits texts into tokens."""
        components = self.pipeline.components.items()
        found = {
            name: _tokenizer_settings(getattr(part, "tokenizer", part))
            for name, part in components
            if part is not None and name.startswith(("tokenizer", "processor"))
        }
        return hash_key(json.dumps(found, sort_keys=True, default=str))


def _configuration(module: Any) -> dict[str, Any]:
    """Return the settings of a module that affect its output, without paths and versions."""
    config = getattr(module, "config", {})
    settings = config.to_diff_dict() if hasattr(config, "to_diff_dict") else config
    others = {"transformers_version", "dtype", "torch_dtype", "architectures"}
    written = {key: each for key, each in settings.items() if key not in others}
    plain = json.loads(json.dumps(written, default=str))
    return {key: each for key, each in plain.items() if not key.startswith("_")}


def _tokenizer_settings(tokenizer: Any) -> dict[str, Any]:
    rules: Any = {}
    if getattr(tokenizer, "is_fast", False):
        rules = json.loads(tokenizer.backend_tokenizer.to_str())
        # Each call changes these two.
        rules = {key: each for key, each in rules.items() if key not in ("truncation", "padding")}
    names = ("model_max_length", "padding_side", "truncation_side", "special_tokens_map")
    settings = {name: getattr(tokenizer, name, None) for name in (*names, "chat_template")}
    words = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else None
    return {"class": type(tokenizer).__name__, "rules": rules, "words": words, **settings}


def pipeline_class(pipeline: str | type[Any]) -> Any:
    """Return the diffusers pipeline class with this name; return a class unchanged."""
    import diffusers

    if isinstance(pipeline, type):
        return pipeline
    if not diffusers.utils.is_transformers_available():
        raise MissingDependencyError(
            f"diffusers' {pipeline} needs transformers, which is not installed",
            "pip install transformers",
        )
    return getattr(diffusers, pipeline)


def pipeline_name(pipeline: str | type[Any]) -> str:
    """Return the name of a pipeline's class."""
    return pipeline.__name__ if isinstance(pipeline, type) else pipeline


def component_class(library: str, name: str) -> Any:
    """Return a component's class from its entry in ``model_index.json``, or ``None`` if unknown."""
    import diffusers

    found = getattr(diffusers, name, None)
    if found is not None or library == "diffusers":
        return found
    try:
        return getattr(importlib.import_module(library), name, None)
    except ImportError:
        return None


class Described:
    """A stand-in that provides a model's configuration but cannot be called.

    The stand-in is not a ``torch.nn.Module``, so that it does not affect the pipeline's device.

    Args:
        module: A module on any device, such as ``meta``.
    """

    dtype = torch.float32

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._module, name)


@attrs.frozen(kw_only=True, eq=False)
class Blueprint:
    """A diffusers pipeline without weights, used to build a pipeline that calls an engine."""

    kind: type[Any]
    """Class of the pipeline."""
    settings: Mapping[str, Any]
    """Constructor arguments that are not components."""
    components: tuple[str, ...]
    """Names of the components."""
    scheduler: Any
    """Scheduler for sampling."""
    vae: Described | None
    """Stand-in for the VAE; the pipeline reads sizes from it."""

    @classmethod
    def of(cls, pipeline: Any) -> Blueprint:
        """Create the blueprint of a loaded diffusers pipeline."""
        names = tuple(pipeline.components)
        settings = {
            name: value
            for name, value in pipeline.config.items()
            if name not in names and not name.startswith("_")
        }
        return cls(
            kind=type(pipeline),
            settings=settings,
            components=names,
            scheduler=pipeline.scheduler,
            vae=None if pipeline.vae is None else Described(pipeline.vae),
        )

    @classmethod
    def read(cls, folder: Path, kind: type[Any]) -> Blueprint:
        """Read the blueprint of a pipeline from its folder, without weights.

        Args:
            folder: Folder with ``model_index.json``.
            kind: Class of the pipeline.
        """
        index = json_of((folder / "model_index.json").read_text())
        known = {name: entry for name, entry in index.items() if isinstance(entry, list)}
        # A setting may be a list of numbers; a component is a list of library and class.
        parts = {
            name: entry
            for name, entry in known.items()
            if len(entry) == 2 and all(one is None or isinstance(one, str) for one in entry)
        }
        settings = {
            name: value
            for name, value in index.items()
            if name not in parts and not name.startswith("_")
        }
        scheduler = component_class(*parts["scheduler"])
        vae = parts.get("vae", [None, None])
        if vae[1] and not (folder / "vae" / "config.json").is_file():
            raise DataError(
                "does not exist, and the pipeline reads sizes from it even without the VAE",
                "copy this file from the pipeline; parts=False needs none of its weights",
                "source",
                folder / "vae" / "config.json",
            )
        kept = component_class(*vae) if vae[1] else None
        with unpartitioned(), torch.device("meta"):
            described = kept and kept.from_config(kept.load_config(folder, subfolder="vae"))
        return cls(
            kind=kind,
            settings=settings,
            components=tuple(parts),
            scheduler=scheduler.from_pretrained(folder, subfolder="scheduler"),
            vae=Described(described) if described else None,
        )

    @classmethod
    @functools.cache
    def usual(cls, kind: type[Any]) -> Blueprint:
        """Create a blueprint from the pipeline class ``kind``, with default settings."""
        from diffusers import FlowMatchEulerDiscreteScheduler

        return cls(
            kind=kind,
            settings={},
            components=tuple(
                name
                for name, taken in inspect.signature(kind.__init__).parameters.items()
                if name != "self" and taken.default is inspect.Parameter.empty
            ),
            scheduler=FlowMatchEulerDiscreteScheduler(),
            vae=None,
        )

    def around(self, **components: Any) -> Any:
        """Build a pipeline from components.

        Args:
            **components: Components by name. Missing components are ``None``, except the VAE, which
                is a stand-in.
        """
        settings: dict[str, Any] = dict.fromkeys(self.components) | dict(self.settings)
        if "safety_checker" in settings:
            settings["requires_safety_checker"] = False  # Otherwise diffusers warns at every step.
        pipe = self.kind(**settings | {"vae": self.vae} | components)
        pipe.set_progress_bar_config(disable=True)
        return pipe


class PipelineModel(torch.nn.Module):
    """A stand-in that replaces the model in a pipeline and calls the engine.

    Floating-point inputs, except time steps and sizes, are cast to the engine's dtype. Outputs are
    cast to fp32, so that the scheduler does not compute in bf16. Moving or casting the pipeline
    does not affect the engine, because the stand-in has no parameters.

    Args:
        config: Configuration of the model.
        model: Model to call; if ``None``, only the configuration is available.
    """

    def __init__(self, *, config: Any, model: Denoiser | None = None) -> None:
        super().__init__()
        # Plain attributes: torch would otherwise register the model as a child.
        self.__dict__["config"] = config
        self.__dict__["_model"] = model

    @property
    def device(self) -> torch.device:
        """Return the device of the engine."""
        return torch.device("cpu") if self._model is None else self._model.device

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the pipeline's latents and embeddings."""
        return torch.float32

    @contextmanager
    def cache_context(self, name: str, **_: Any) -> Iterator[None]:  # noqa: ARG002 - diffusers'
        """Do nothing, because nothing is cached between training steps."""
        yield

    @property
    def forward(self) -> Callable[..., Any]:  # type: ignore[override]
        """The call of the engine; it has the signature of the model, which modular blocks read."""
        if self._model is None:
            return self._called
        return functools.wraps(primary_of(self._model).forward)(functools.partial(self._called))

    def _called(self, *args: Any, **kwargs: Any) -> Any:
        output = call_cast(self._model, args, kwargs)
        prediction, *others = output if isinstance(output, tuple) else (output.sample,)
        if isinstance(prediction, list):
            return ([one.float() for one in prediction], *others)
        return (prediction.float(), *others)

    def __getattr__(self, name: str) -> Any:
        model = self.__dict__.get("_model")
        if name.startswith("_") or model is None:
            return super().__getattr__(name)
        return getattr(primary_of(model), name)


class TrainedEncoder(torch.nn.Module):
    """A stand-in that replaces a pipeline's text encoder and calls the engine's trained encoder.

    The pipeline can neither move nor freeze the encoder, because the stand-in has no parameters.

    Args:
        name: Name of the encoder in the pipeline and in ``TrainedParts``.
        module: The encoder.
    """

    dtype = torch.float32
    """Dtype of the pipeline's embeddings."""

    def __init__(self, *, name: str, module: torch.nn.Module) -> None:
        super().__init__()
        # Plain attributes: torch would otherwise register the module as a child.
        self.__dict__.update(_name=name, _module=module, _within=None)

    def call_in(self, model: Denoiser | None) -> None:
        """Route all subsequent calls through an engine.

        Args:
            model: Engine that contains the encoder; with ``None``, the encoder is called without an
                engine.
        """
        self.__dict__["_within"] = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the encoder."""
        if self._within is None:
            return self._module(*args, **kwargs)
        return self._within(*args, part=self._name, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in ("_within", "_module", "_name"):
            return self.__dict__[name]
        return super().__getattr__(name) if name.startswith("_") else getattr(self._module, name)


def call_cast(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a model after casting floats, except time steps and sizes, to its dtype."""
    names = inspect.signature(primary_of(model).forward).parameters
    arguments = [
        value if name in _KEPT_EXACT else _cast_floats(value, model.dtype)
        for name, value in zip(names, args, strict=False)
    ]
    return model(*arguments, **_cast_floats(kwargs, model.dtype))


def _cast_floats(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {
            name: inner if name in _KEPT_EXACT else _cast_floats(inner, dtype)
            for name, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return type(value)(_cast_floats(inner, dtype) for inner in value)
    return value
