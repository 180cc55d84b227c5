"""Facts about a model: its weights, and the activation memory and arithmetic of a training step.

The model runs on the ``meta`` device, where nothing is computed or allocated.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
import numpy as np
import torch

from zerotune.diffusion.activations import ActivationOffload
from zerotune.diffusion.configuration import Configuration
from zerotune.diffusion.known_families import named_family
from zerotune.diffusion.models.declared import family_of_model
from zerotune.diffusion.models.family import parameters_of
from zerotune.diffusion.models.pipeline import Blueprint, pipeline_class, pipeline_name
from zerotune.diffusion.passes import (
    KINDS,
    CountedTransfers,
    Pass,
    both_passes,
    counting,
    sizes_only,
)
from zerotune.errors import InvalidValueError, MissingDependencyError
from zerotune.plan.facts import ModelFacts, latent_frames
from zerotune.plan.families import ModelFamily
from zerotune.plan.work import (
    SMALLEST_OFFLOADED,
    ActivationCost,
    ActivationFacts,
    Amount,
    ArithmeticFacts,
    PassWork,
)

if TYPE_CHECKING:
    from zerotune.diffusion.models.pipeline_family import PipelineFamily

_CLIP_TOKENS: Final = 77
_T5_TOKENS: Final = 256
_FLUX_TOKENS: Final = 512
_USUAL_SIDE: Final = 1024
_LATENT: Final = 8
"""Image pixels per latent pixel along one side."""


# -- Arguments of ``forward`` for diffusers' models.


def example_inputs(module: torch.nn.Module) -> Callable[..., Mapping[str, Any]]:
    """Return a function that maps batch size, height and width in pixels to ``forward`` arguments.

    Texts have the pipeline's default maximum length: 77 tokens for CLIP, 333 for SD3, 512 for Flux.
    For a declared family, the function returns the arguments that the pipeline passes to its model.
    For a video family, the function also accepts ``frames``, by default 1.

    Args:
        module: Model on the ``meta`` device.
    """
    name = type(module).__name__
    if (family := family_of_model(module)) is not None:
        return _captured_inputs(family, module)
    if name not in _MAKERS:
        raise InvalidValueError(
            "zerotune does not know the arguments of this model's forward",
            "pass inputs=, a function that maps batch size, height and width in pixels to "
            "keyword arguments of forward",
            "module",
            name,
        )
    make, config = _MAKERS[name], module.config
    return lambda batch, height, width: make(_ForwardInputs(config, batch, height, width))


def latent_scale(module: torch.nn.Module) -> int:
    """Return how many image pixels correspond to one latent pixel along each side."""
    family = family_of_model(module)
    return _LATENT if family is None else family.usual_scale


def frames_per_latent(module: torch.nn.Module) -> int | None:
    """Return the number of video frames per latent frame; ``None`` for image models."""
    family = family_of_model(module)
    return family.usual_frames if family is not None and family.clips else None


class _Seen(Exception):  # noqa: N818 - not an error: ends the pipeline's call
    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__("the model's arguments")
        self.arguments = arguments


@attrs.frozen(kw_only=True)
class _Asking:
    """A stand-in for a model, which ends the pipeline's call by raising the model's arguments."""

    module: torch.nn.Module

    device = torch.device("cpu")
    dtype = torch.bfloat16

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        names = list(inspect.signature(self.module.forward).parameters)
        raise _Seen({**dict(zip(names, args, strict=False)), **kwargs})


def _captured_inputs(
    kind: type[PipelineFamily], module: torch.nn.Module, blueprint: Blueprint | None = None
) -> Callable[..., Mapping[str, Any]]:
    import diffusers

    if not diffusers.utils.is_transformers_available():
        raise MissingDependencyError(
            f"the inputs of {type(module).__name__} come from {pipeline_name(kind.pipeline)}, "
            "which needs transformers",
            "run pip install transformers, or pass inputs= or activations=False",
        )
    family = kind(blueprint=blueprint or Blueprint.usual(pipeline_class(kind.pipeline)))
    space = family.latent_space()

    def make(batch: int, height: int, width: int, frames: int = 1) -> Mapping[str, Any]:
        latents, known = family.example(
            module,
            batch=batch,
            side=(height // space.scale, width // space.scale),
            frames=latent_frames(frames, per_latent=space.frames),
        )
        # All samples in one call, even if the pipeline runs one by one, because graphs add up.
        steps = torch.tensor([500.0])
        if not family.calls_one_by_one():
            steps = steps.expand(1, batch)
        try:
            with sizes_only():
                family.in_one_call(_Asking(module=module), latents, steps, known)
        except _Seen as seen:
            return seen.arguments
        raise AssertionError("the pipeline did not call its model")

    return make


@attrs.frozen
class _ForwardInputs:
    """Arguments, without data, of models whose pipelines are not needed."""

    config: Any
    batch: int
    height: int
    width: int
    """Width of the image in pixels."""

    def unet(self) -> dict[str, Any]:
        # An unconditional model with one or three channels predicts pixels, others latents.
        in_pixels = self.config.in_channels in (1, 3)
        arguments = {"sample": self._image(1 if in_pixels else _LATENT), "timestep": self._times}
        if self.config.num_class_embeds:
            labels = torch.empty(self.batch, dtype=torch.long, device="meta")
            arguments["class_labels"] = labels
        return arguments

    def conditional_unet(self) -> dict[str, Any]:
        config = self.config
        arguments: dict[str, Any] = {
            "sample": self._image(),
            "timestep": self._times,
            "encoder_hidden_states": self._each(_CLIP_TOKENS, config.cross_attention_dim),
        }
        if config.addition_embed_type == "text_time":
            sizes = 6 * config.addition_time_embed_dim
            arguments["added_cond_kwargs"] = {
                "text_embeds": self._each(config.projection_class_embeddings_input_dim - sizes),
                "time_ids": self._each(6),
            }
        return arguments

    def sd3(self) -> dict[str, Any]:
        return {"hidden_states": self._image(), **self._texts(_CLIP_TOKENS + _T5_TOKENS)}

    def flux(self) -> dict[str, Any]:
        patches = (self.height // (2 * _LATENT)) * (self.width // (2 * _LATENT))
        arguments = {
            "hidden_states": self._each(patches, self.config.in_channels),
            **self._texts(_FLUX_TOKENS),
            "img_ids": torch.empty(patches, 3, dtype=torch.bfloat16, device="meta"),
            "txt_ids": torch.empty(_FLUX_TOKENS, 3, dtype=torch.bfloat16, device="meta"),
        }
        if self.config.guidance_embeds:
            arguments["guidance"] = self._times
        return arguments

    def _texts(self, tokens: int) -> dict[str, torch.Tensor]:
        return {
            "encoder_hidden_states": self._each(tokens, self.config.joint_attention_dim),
            "pooled_projections": self._each(self.config.pooled_projection_dim),
            "timestep": self._times,
        }

    def _image(self, factor: int = _LATENT) -> torch.Tensor:
        return self._each(self.config.in_channels, self.height // factor, self.width // factor)

    def _each(self, *shape: int) -> torch.Tensor:
        return torch.empty((self.batch, *shape), dtype=torch.bfloat16, device="meta")

    @property
    def _times(self) -> torch.Tensor:
        return torch.empty(self.batch, device="meta")


_MAKERS: Final[dict[str, Callable[[_ForwardInputs], dict[str, Any]]]] = {
    "UNet2DModel": _ForwardInputs.unet,
    "UNet2DConditionModel": _ForwardInputs.conditional_unet,
    "SD3Transformer2DModel": _ForwardInputs.sd3,
    "FluxTransformer2DModel": _ForwardInputs.flux,
}


# -- Counting parameters and activations.


MakeInputs = Callable[[int, int, int], Mapping[str, Any]]
"""Function that maps batch size, height and width in pixels to keyword arguments of ``forward``."""

_POINTS: Final = ((2, 256), (2, 1024), (8, 512))
"""Batch and side in pixels of the measured passes, as many as a fit has unknowns. A batch of one
would use different reduction operators."""


def count_facts(
    config: Mapping[str, Any],
    *,
    family: type[PipelineFamily] | None = None,
    blueprint: Blueprint | None = None,
) -> ModelFacts:
    """Measure facts about a model from its configuration, even if they are built in or cached.

    Args:
        config: Configuration of a diffusers model.
        family: Family that calls the model; by default the family of the model's class.
        blueprint: Components of the family's pipeline; by default the usual ones.
    """
    module = Configuration(config).build()
    if family is None:
        return facts_of_module(module, inputs=None, activations=True)
    known = blueprint or Blueprint.usual(pipeline_class(family.pipeline))
    make = _captured_inputs(family, module, known)
    frames = family(blueprint=known).latent_space().frames if family.clips else None
    facts = facts_of_module(module, inputs=_of_clips(make, frames), activations=True)
    return attrs.evolve(facts, frames_per_latent=frames)


def family_facts(
    kind: type[PipelineFamily] | str, *, folder: str | os.PathLike[str] | None = None
) -> ModelFamily:
    """Return the facts that planning needs about a custom family.

    Args:
        kind: The family, or its name: ``module:Class``.
        folder: Pipeline folder that contains the model's configuration; without a folder, the
            default configuration of the class ``kind.model`` is used.

    Raises:
        InvalidValueError: No family has this name; or its ``model`` is empty, and ``folder`` is
            ``None``.
        MissingDependencyError: The pipeline needs transformers, which is not installed.
    """
    kind = named_family(kind) if isinstance(kind, str) else kind
    if folder is None and not kind.model:
        raise InvalidValueError(
            "does not name the model's class",
            "set the family's model attribute to the name of a diffusers class, or pass a "
            "pipeline folder (--model FOLDER)",
            f"{kind.__name__}.model",
            kind.model,
        )
    pipeline = pipeline_class(kind.pipeline)
    blueprint, config = Blueprint.usual(pipeline), Configuration({"_class_name": kind.model})
    if folder is not None:
        blueprint = Blueprint.read(Path(folder), pipeline)
        config = Configuration.read(Path(folder) / kind.component)
    space, model = kind(blueprint=blueprint).latent_space(), config.build()
    side = None if kind.clips else model.config.get("sample_size")
    frames = parameters_of(pipeline.__call__).get("num_frames")
    facts = count_facts(config.content, family=kind, blueprint=blueprint)
    return ModelFamily(
        name=kind.__name__,
        class_name=config.name,
        resolution=side * space.scale if isinstance(side, int) else _USUAL_SIDE,
        facts=attrs.evolve(facts, name=kind.__name__),
        configuration=config.digest,
        frames=int(frames.default) if kind.clips and frames is not None else None,
    )


def facts_of_module(
    module: torch.nn.Module, *, inputs: MakeInputs | None, activations: bool
) -> ModelFacts:
    """Return facts about a module, as ``model_facts`` does."""
    if activations and any(p.device.type != "meta" for p in module.parameters()):
        raise InvalidValueError(
            "activations can be measured only for a model on the meta device",
            "pass the model's configuration (model.config), or activations=False",
            "source",
            type(module).__name__,
        )
    facts = attrs.evolve(
        ModelFacts.from_module(module),
        frames_per_latent=frames_per_latent(module) if inputs is None else None,
    )
    if not activations:
        return facts
    logging.getLogger("zerotune").info("measuring the activations of %s", type(module).__name__)
    kept, computed = measure_step(module, inputs=inputs)
    return attrs.evolve(facts, activations=kept, arithmetic=computed)


def measure_step(
    module: torch.nn.Module, *, inputs: MakeInputs | None = None
) -> tuple[ActivationFacts, ArithmeticFacts]:
    """Measure the memory and arithmetic of a training step with inputs of several sizes.

    Args:
        module: A module on the ``meta`` device; it is cast to bf16, and its gradient checkpointing
            is disabled.
        inputs: Function that creates the arguments of ``forward``, as in ``model_facts``.
    """
    make = inputs or _of_clips(example_inputs(module), frames_per_latent(module))
    # diffusers' own `to` warns about modules in fp32, even if there are none.
    torch.nn.Module.to(module, torch.bfloat16)
    arguments = [make(batch, side, side) for batch, side in _POINTS]
    offloads = getattr(module, "_supports_gradient_checkpointing", False)
    offloaded = host = None
    with counting(module) as count:
        full, again = both_passes(module, arguments, count, checkpointed=not offloads)
        if offloads:
            again, offloaded, host = _measure_offload(module, arguments, count)
    kept = ActivationFacts(
        full=_moments(full),
        checkpointed=None if again is None else _moments(again),
        offloaded=offloaded,
        offloaded_host=host,
    )
    return kept, _fit_arithmetic(full, again)


_LATENTS: Final = 4
"""Number of latent frames of measured clips; each has a quarter of an image's pixels."""


def _of_clips(make: Callable[..., Mapping[str, Any]], each: int | None) -> MakeInputs:
    """Return inputs of clips with as many latent pixels as an image; unchanged for image models."""
    if each is None:
        return make
    frames = (_LATENTS - 1) * each + 1
    return lambda batch, height, width: make(batch, height // 2, width // 2, frames=frames)


def _fit_arithmetic(full: Sequence[Pass], again: Sequence[Pass] | None) -> ArithmeticFacts:
    recomputed = None
    if again is not None:
        pairs = list(zip(again, full, strict=True))
        recomputed = _fit_work(
            [{k: more.backward[k] - less.backward[k] for k in KINDS} for more, less in pairs]
        )
    return ArithmeticFacts(
        forward=_fit_work([one.forward for one in full]),
        backward=_fit_work([one.backward for one in full]),
        recomputed=recomputed,
    )


def _fit_work(counts: Sequence[Mapping[str, int]]) -> PassWork:
    amounts = {kind: _amount([one[kind] for one in counts]) for kind in KINDS}
    return PassWork(**dict[str, Any](amounts))


def _measure_offload(
    module: torch.nn.Module, arguments: Sequence[Mapping[str, Any]], count: Callable[..., Pass]
) -> tuple[list[Pass], ActivationCost, ActivationCost]:
    """Return checkpointed passes, and bytes on device and host if block inputs are offloaded."""
    passes, stays, transfers = [], [], CountedTransfers()
    # Inputs of all sizes are offloaded, so that every pass has the same operators.
    offload = ActivationOffload(smallest=0, transfers=transfers)
    with offload.attach(module):
        for each in arguments:
            passes.append(count(each, transfers))
            stays.append(transfers.away)
    again = [attrs.evolve(one, live=one.kept) for one in passes]
    sizes = [[one.nbytes for one in away] for away in stays]
    if len({len(one) for one in sizes}) > 1:
        return again, _fit([one.peak for one in passes]), _fit([sum(one) for one in sizes])
    tensors = _planes(np.asarray(sizes, dtype=float).T)
    spans = [(one.begins, one.ends) for one in stays[0]]
    host = _fit([sum(one) for one in sizes])
    small = _grouped(tensors, np.full(len(tensors), -1))
    return again, _moments(passes, tensors, spans), attrs.evolve(host, small=small)


_SIDES: Final = (64, 128, 256, 512, 768, 1024, 1536, 2048, 4096)
_NEARLY: Final = 0.995
"""Minimum share of the peak, at every size, that the chosen moments must reach."""


def _moments(
    passes: Sequence[Pass],
    tensors: np.ndarray | None = None,
    spans: Sequence[tuple[int | None, int | None]] = (),
) -> ActivationCost:
    """Return the bytes of a pass as the maximum of a few moments, each linear in the size."""
    if len({one.operators for one in passes}) > 1:
        # Operators depend on the size, so that moments cannot be compared.
        return _fit([one.peak for one in passes])
    live = _planes(np.asarray([one.live for one in passes], dtype=float).T)
    # Batches and pixels at which the largest moment is searched.
    grid = [(batch, side * side) for batch in (1, 2, 4, 8, 16, 32, 64) for side in _SIDES]
    batches, pixels = np.asarray(grid, dtype=float).T
    positions = batches * pixels
    sizes = np.stack([np.ones_like(batches), batches, positions])
    totals = live @ sizes
    if tensors is not None:
        each = tensors @ sizes
        kept = np.where(each < SMALLEST_OFFLOADED, each, 0.0)
        for (begins, ends), counted in zip(spans, kept, strict=True):
            if begins is not None:
                totals[begins:ends] += counted
    chosen = _cover(totals)
    costs = []
    for moment in chosen:
        away = [b is not None and b <= moment < (len(live) if e is None else e) for b, e in spans]
        small = () if tensors is None else _grouped(tensors, np.asarray(away, dtype=int))
        base, per_sample, per_pixel = (float(value) for value in live[moment])
        costs.append(
            ActivationCost(base=base, per_sample=per_sample, per_pixel=per_pixel, small=small)
        )
    return attrs.evolve(costs[0], moments=tuple(costs[1:]))


def _cover(totals: np.ndarray) -> list[int]:
    """Return few rows whose maximum comes near the largest row in every column."""
    peaks, chosen = totals.max(axis=0), [int(totals[:, -1].argmax())]
    while True:
        missing = totals[chosen].max(axis=0) / peaks
        worst = int(missing.argmin())
        if missing[worst] >= _NEARLY:
            return chosen
        chosen.append(int(totals[:, worst].argmax()))


def _grouped(tensors: np.ndarray, counts: np.ndarray) -> tuple[tuple[int, float, float], ...]:
    """Return equal tensors with their count, without tensors that are always offloaded."""
    groups: dict[tuple[float, float], int] = {}
    for (_, per_sample, per_pixel), count in zip(tensors, counts, strict=True):
        key = (max(0.0, round(float(per_sample), 2)), max(0.0, round(float(per_pixel), 6)))
        if count and key[0] + key[1] * _SIDES[0] ** 2 < SMALLEST_OFFLOADED:
            groups[key] = groups.get(key, 0) + int(count)
    return tuple((count, *key) for key, count in groups.items())


def _planes(values: np.ndarray) -> np.ndarray:
    """Fit base, per-sample and per-pixel bytes to each row of values at the measured points."""
    rows = np.asarray([[1.0, batch, batch * side * side] for batch, side in _POINTS])
    solution, *_ = np.linalg.lstsq(rows, values.T, rcond=None)
    planes: np.ndarray = solution.T
    # The fit is exact except for rounding, which becomes 0 here.
    rounding = 1e-9 * np.abs(values).max(axis=1, keepdims=True)
    return np.where(np.abs(planes) * rows.max(axis=0) < rounding, 0.0, planes)


def _amount(counts: Sequence[int]) -> Amount:
    rows = [[batch, batch * side**2, batch * side**4] for batch, side in _POINTS]
    matrix = np.asarray(rows, dtype=float)
    scale = matrix.max(axis=0)
    solution, *_ = np.linalg.lstsq(matrix / scale, np.asarray(counts, dtype=float), rcond=None)
    per_sample, per_pixel, squared = (max(0.0, float(one)) for one in solution / scale)
    return Amount(per_sample=per_sample, per_pixel=per_pixel, per_pixel_squared=squared)


def _fit(peaks: Sequence[float]) -> ActivationCost:
    (solution,) = _planes(np.asarray([peaks], dtype=float))
    base, per_sample, per_pixel = (max(0.0, float(value)) for value in solution)
    return ActivationCost(base=base, per_sample=per_sample, per_pixel=per_pixel)
