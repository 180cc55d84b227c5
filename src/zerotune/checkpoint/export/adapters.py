"""Export an engine's adapters to a file for diffusers or peft."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
import torch

from zerotune._util.text import listing
from zerotune.backend.adapters import (
    LAYOUTS,
    LORA_FILE,
    PEFT_CONFIG,
    PEFT_FILE,
    SETTINGS,
    AdapterParameter,
    Layout,
    peft_config,
    trained_adapter,
)
from zerotune.backend.checks import checked_dtype
from zerotune.backend.trained_parts import components
from zerotune.checkpoint.export.driver import (
    ExportWriter,
    Gatherable,
    export_together,
    json_text,
    meet,
)
from zerotune.checkpoint.tensors import TensorSpec
from zerotune.decisions import Decision, announce
from zerotune.errors import CheckpointCorruptError, CheckpointMismatchError, InvalidValueError

if TYPE_CHECKING:
    from zerotune.backend.engine import Engine


# -- Have adapters learned anything? A LoRA file that does nothing looks like one that works.


_NAMES_SHOWN: Final = 4


_Layer = tuple[str, str]
"""A component and the name of an adapted layer in it."""


class Judgement:
    """Inspects each exported tensor, and decides at the end whether the export is valid.

    A layer is untrained if the factor that starts at zero is still zero. An untrained layer causes
    only a warning, because some layers, such as the last layer of CLIP, do not affect the loss. If
    all layers of a component are untrained, the export fails.
    """

    def __init__(self, *, layers: Mapping[str, _Layer], steps: int) -> None:
        self._layers = layers
        self._steps = steps
        self._zero: dict[_Layer, str] = {}

    @classmethod
    def of(
        cls, engine: Engine, adapters: Mapping[str, tuple[str, torch.nn.Module, str]]
    ) -> Judgement:
        """Create the export check for the adapters of an engine.

        Args:
            engine: Engine that trains the adapters.
            adapters: For each component, its prefix in the model, its module and the adapter's
                name.
        """
        layers = {}
        for component, (prefix, module, adapter) in adapters.items():
            for name, _ in module.named_parameters():
                parsed = AdapterParameter.parse(name)
                if parsed is not None and parsed.adapter == adapter:
                    layers[f"{prefix}{name}"] = component, parsed.layer
        state = engine.state
        return cls(layers=layers, steps=state.global_step - state.skipped_steps)

    def see(self, name: str, written: torch.Tensor) -> None:
        """Inspect a parameter.

        Args:
            name: Name of the parameter in the engine.
            written: The parameter in the dtype of the file.
        """
        if not written.numel():
            raise CheckpointCorruptError("is empty", key=name, value=tuple(written.shape))
        if not bool(torch.isfinite(written).all()):
            raise CheckpointCorruptError(
                f"is not finite in {written.dtype}",
                "check the losses; if the export is in fp16, export in fp32 or bf16",
                name,
            )
        parsed = AdapterParameter.parse(name)
        if parsed is not None and parsed.empties and not bool(written.any()):
            self._zero[self._layers[name]] = parsed.kind

    def conclude(self) -> tuple[Decision, ...]:
        """Return decisions about untrained layers."""
        every = list(dict.fromkeys(self._layers.values()))
        if self._steps == 0:
            return (self._decision(every, every, "no optimizer step was taken"),)
        for component in {of for of, _ in self._zero}:
            own = [layer for layer in every if layer[0] == component]
            if all(layer in self._zero for layer in own):
                kinds = " or ".join(sorted({self._zero[layer] for layer in own}))
                raise CheckpointCorruptError(
                    f"none of the {len(own)} adapters has changed in {self._steps} steps "
                    f"(every {kinds} is zero)",
                    "check the learning rate, and whether the loss depends on the adapters",
                    component,
                )
        if not self._zero:
            return ()
        idle = f"{len(self._zero)} of {len(every)} layers have not changed"
        reason = f"{idle}; perhaps they do not affect the loss"
        return (self._decision(list(self._zero), every, reason),)

    def _decision(self, still: list[_Layer], every: list[_Layer], reason: str) -> Decision:
        names = listing([".".join(layer) for layer in still], most=_NAMES_SHOWN)
        left = len(every) - len(still)
        return Decision("adapters", len(every), left, f"{reason} ({names})", "warning")


_ALWAYS: Final = (
    "peft_type",
    "r",
    "lora_alpha",
    "alpha",
    "target_modules",
    "rank_pattern",
    "alpha_pattern",
    "use_dora",
)
"""Settings that are always written. Other settings are written only if they differ from peft's
defaults, because older peft versions reject unknown settings."""
_OF_THE_RUN: Final = frozenset(
    {
        "inference_mode",
        "base_model_name_or_path",
        "init_lora_weights",
        "init_weights",
        "lora_dropout",
    }
)
"""Settings that are meaningless when loading the file."""


@attrs.frozen(kw_only=True)
class ExportedAdapters(os.PathLike[str]):
    """An exported adapter file; the object can be used as the file's path."""

    path: Path
    """Absolute path of the file, or of peft's folder."""
    components: tuple[str, ...]
    """Components of the pipeline that have adapters in the file."""
    tensors: int
    elements: int
    nbytes: int
    """Size of the file in bytes."""
    sha256: str
    """SHA-256 (hex) of the file."""
    decisions: tuple[Decision, ...] = ()
    """Decisions about untrained layers."""

    def __fspath__(self) -> str:
        return str(self.path)


def export_adapters(
    path: str | os.PathLike[str],
    *,
    engine: Engine,
    weights: Gatherable | str | None = None,
    dtype: str | torch.dtype = "fp32",
    layout: Layout = "diffusers",
    component: str | None = None,
    pipeline: Any = None,
    timeout_s: float | None = None,
) -> ExportedAdapters:
    """Write an engine's adapters for ``pipeline.load_lora_weights``. Collective.

    Only the adapters are gathered from the fp32 master weights, one tensor at a time. The file's
    header contains the adapters' rank, alpha and kind, in diffusers' format. The file gets its
    final name only after it is read back and verified. An error is raised if training has not
    changed the adapters.

    Args:
        path: A folder for the file ``pytorch_lora_weights.safetensors``, or the path of a
            ``.safetensors`` file. An earlier export is replaced.
        engine: Engine of a model or ``TrainedParts`` with adapters.
        weights: As in ``export_model``.
        dtype: Dtype of the tensors in the file: ``"fp32"``, ``"bf16"``, ``"fp16"`` or a torch
            dtype.
        layout: ``"diffusers"``, or ``"peft"`` for a folder that ``PeftModel.from_pretrained``
            reads. A recipe converts diffusers' file for ComfyUI and kohya's trainers.
        component: Name of the model in the pipeline; by default derived from the model's class.
            For ``TrainedParts``, the names of the parts are used.
        pipeline: A pipeline or its class; the export fails if the pipeline cannot load adapters
            for the trained components.
        timeout_s: Seconds to wait for the other ranks; defaults to the group's timeout.

    Returns:
        The exported adapters, returned on every rank.

    Raises:
        CheckpointMismatchError: The model trains no adapters, trains other parameters as well, or
            has layers or adapter kinds that the format does not support.
        CheckpointCorruptError: An adapter is not finite, training has not changed the adapters, or
            the data on disk differ from the written data.
        CheckpointError: An existing file was not written by zerotune, or writing fails.
        InvalidValueError: The layout is unknown, or not available for this model.
        CollectiveError: A rank did not call ``export_adapters``, or the arguments differ.
    """
    if layout not in LAYOUTS:
        raise InvalidValueError(
            "is not an adapter layout", f"write one of {list(LAYOUTS)}", "layout", layout
        )
    target, chosen = Path(path).absolute(), checked_dtype(dtype)
    if layout != "peft" and target.suffix != ".safetensors":
        target /= LORA_FILE
    exported = meet(
        engine,
        target,
        "export_adapters",
        chosen,
        component,
        layout,
        weights=weights,
        timeout_s=timeout_s,
        purpose="exporting adapters to",
    )
    outline = AdapterOutline.of(engine, component=component)
    _check_loadable(pipeline, tuple(outline.metadata))
    outline.check_layout(layout)
    written = export_together(
        engine,
        "the export of adapters",
        begin=lambda: _Draft(
            target, outline, Judgement.of(engine, outline.adapters), dtype=chosen, layout=layout
        ),
        weights=exported,
    )
    announce(written.decisions, rank=engine.group.rank)
    return written


@attrs.frozen(kw_only=True)
class AdapterOutline:
    """Engine parameters that an adapter file contains, with their names in the file."""

    keys: Mapping[str, str]
    """Maps each trained parameter to its name in the file."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of the trained parameters, in the order in which they are gathered."""
    metadata: Mapping[str, Mapping[str, Any]]
    """Adapter settings of each component."""
    adapters: Mapping[str, tuple[str, torch.nn.Module, str]]
    """For each component, its prefix in the model, its module and the adapter's name."""

    @classmethod
    def of(cls, engine: Engine, *, component: str | None = None) -> AdapterOutline:
        """Create the outline of an engine's adapters.

        Args:
            engine: Engine of a model with adapters.
            component: As in ``export_adapters``.
        """
        shapes = engine.master_weights.parameters
        adapters = {
            name: (prefix, module, adapter)
            for name, (prefix, module) in components(engine.module, component).items()
            if (adapter := trained_adapter(shapes, prefix=prefix)) is not None
        }
        if not adapters:
            raise CheckpointMismatchError(
                "trains no adapters", key="engine.module", value=type(engine.module).__name__
            )
        return cls(
            keys={name: _adapter_key(name, adapters) for name in shapes},
            shapes=shapes,
            metadata={n: portable_config(m, adapter) for n, (_, m, adapter) in adapters.items()},
            adapters=adapters,
        )

    def check_layout(self, layout: Layout) -> None:
        """Check that the file format supports these adapters."""
        if layout == "peft" and len(self.adapters) > 1:
            raise CheckpointMismatchError(
                "a peft folder can contain the adapters of only one model",
                'pass layout="diffusers" to export the adapters of several models',
                "layout",
                layout,
            )
        for _, module, adapter in self.adapters.values():
            config = peft_config(module, adapter).to_dict()
            kind = str(getattr(config["peft_type"], "value", config["peft_type"]))
            kind = {"LORA": "LoRA", "LOKR": "LoKr", "LOHA": "LoHa"}.get(kind, kind)
            kind = "DoRA" if kind == "LoRA" and config.get("use_dora") else kind
            if kind not in _HOLDS[layout]:
                raise CheckpointMismatchError(
                    f"does not support {kind} adapters",
                    'pass layout="peft", and load the folder with PeftModel.from_pretrained',
                    "layout",
                    layout,
                )


_HOLDS: Final[Mapping[Layout, tuple[str, ...]]] = {
    "diffusers": ("LoRA", "DoRA", "LoKr"),
    "peft": ("LoRA", "DoRA", "LoKr", "LoHa", "OFT"),
}


def portable_config(module: torch.nn.Module, adapter: str) -> dict[str, Any]:
    """Return the adapter settings to write to the file, as JSON data.

    Args:
        module: Module with the adapter.
        adapter: Name of the adapter.
    """
    usual = type(peft_config(module, adapter))().to_dict()
    return {
        key: sorted(value) if isinstance(value, (set, frozenset)) else value
        for key, value in peft_config(module, adapter).to_dict().items()
        if key in _ALWAYS or (key not in _OF_THE_RUN and value != usual.get(key))
    }


def _adapter_key(name: str, adapters: Mapping[str, tuple[str, torch.nn.Module, str]]) -> str:
    for component, (prefix, module, _) in adapters.items():
        parsed = AdapterParameter.parse(name.removeprefix(prefix))
        if name.startswith(prefix) and parsed is not None:
            return f"{component}.{published_prefix(module)}{parsed.key}"
    raise CheckpointMismatchError(
        "is trained but is not an adapter, so an adapter file cannot contain it",
        "freeze the parameter, or adapt its layer as well",
        name,
    )


def published_prefix(module: torch.nn.Module) -> str:
    """Return the prefix that adapter files add to a module's layer names."""
    # transformers 5 dropped this level of CLIP; files keep it, and diffusers strips it on loading.
    flat = type(module).__name__.startswith("CLIPText") and not hasattr(module, "text_model")
    return "text_model." if flat else ""


def _check_loadable(pipeline: Any, names: tuple[str, ...]) -> None:
    loadable = getattr(pipeline, "_lora_loadable_modules", None)
    if pipeline is None:
        return
    kind = pipeline.__name__ if isinstance(pipeline, type) else type(pipeline).__name__
    if loadable is None or not set(names) <= set(loadable):
        raise InvalidValueError(
            f"{kind} can load adapters only for: {', '.join(loadable or ()) or 'no component'}",
            "use the pipeline's names for its components",
            "component",
            names,
        )


class _Draft:
    """Writes diffusers' file or peft's folder on rank 0, and judges it tensor by tensor."""

    def __init__(
        self,
        path: Path,
        outline: AdapterOutline,
        judgement: Judgement,
        *,
        dtype: torch.dtype,
        layout: Layout,
    ) -> None:
        self._path, self._outline, self._judgement = path, outline, judgement
        self._dtype, self._layout = dtype, layout
        self._keys = dict(outline.keys)
        self._writer = self._open()

    def append(self, name: str, tensor: torch.Tensor, *, trained: bool) -> None:  # noqa: ARG002
        """Inspect and write a tensor."""
        written = tensor.to(self._dtype)
        self._judgement.see(name, written)
        self._writer.append(self._keys[name], written)

    def publish(self) -> ExportedAdapters:
        """Check that the adapters have changed, verify the file and rename it."""
        decisions = self._judgement.conclude()
        self._writer.publish()
        (record,) = self._writer.records
        shapes = [torch.Size(shape) for shape in self._outline.shapes.values()]
        return ExportedAdapters(
            path=self._path,
            components=tuple(self._outline.metadata),
            tensors=len(shapes),
            elements=sum(shape.numel() for shape in shapes),
            nbytes=record.nbytes,
            sha256=record.sha256,
            decisions=decisions,
        )

    def abandon(self) -> None:
        """Delete the unfinished file."""
        self._writer.abandon()

    def _open(self) -> ExportWriter:
        stem, texts, metadata = None, {}, {}
        if self._layout == "peft":
            ((component, config),) = self._outline.metadata.items()
            stem, texts = PEFT_FILE.removesuffix(".safetensors"), {PEFT_CONFIG: json_text(config)}
            self._keys = {
                name: f"base_model.model.{key.removeprefix(f'{component}.')}"
                for name, key in self._keys.items()
            }
        else:
            flat = {
                f"{component}.{key}": value
                for component, config in self._outline.metadata.items()
                for key, value in config.items()
            }
            metadata = {SETTINGS: json.dumps(flat, indent=2, sort_keys=True)}
        specs = [
            TensorSpec(key=self._keys[name], dtype=self._dtype, shape=shape)
            for name, shape in self._outline.shapes.items()
        ]
        return ExportWriter(self._path, stem=stem, specs=specs, texts=texts, metadata=metadata)
