"""From an engine that trains adapters to the LoRA file that diffusers loads."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
import torch

from zerotune.backend.adapters import (
    AdapterParameter,
    adapter_config,
    peft_config,
    trained_adapter,
)
from zerotune.backend.dtypes import checked_dtype
from zerotune.backend.trained_parts import components
from zerotune.checkpoint.adapters_file import LORA_FILE, AdapterFileWriter
from zerotune.checkpoint.adapters_judging import Judgement
from zerotune.checkpoint.collective import Attempts, together
from zerotune.checkpoint.export import Gatherable
from zerotune.checkpoint.tensorfile import TensorSpec
from zerotune.decisions import Decision, announce
from zerotune.errors import CheckpointError, CheckpointMismatchError, InvalidValueError

if TYPE_CHECKING:
    from zerotune.backend.engine import Engine

_KEPT: Final = (
    "peft_type",
    "r",
    "lora_alpha",
    "target_modules",
    "rank_pattern",
    "alpha_pattern",
    "use_dora",
)
"""What a file always says; the rest only where it is not peft's default, so that an older peft,
which refuses settings it does not know, still loads it."""
_OF_THE_RUN: Final = frozenset(
    {"inference_mode", "base_model_name_or_path", "init_lora_weights", "lora_dropout"}
)
"""Settings that mean nothing to who loads the file."""


@attrs.frozen(kw_only=True)
class ExportedAdapters(os.PathLike[str]):
    """A LoRA file, written and read back. May be used as its path."""

    path: Path
    """Absolute path of the file."""
    components: tuple[str, ...]
    """Components of the pipeline it has adapters for."""
    tensors: int
    elements: int
    nbytes: int
    """Bytes of the file."""
    sha256: str
    """Of the file, hex."""
    decisions: tuple[Decision, ...] = ()
    """What is remarkable about the adapters: such as layers that have learned nothing."""

    def __fspath__(self) -> str:
        return str(self.path)


def export_adapters(
    path: str | os.PathLike[str],
    *,
    engine: Engine,
    weights: Gatherable | None = None,
    dtype: str | torch.dtype = "fp32",
    component: str | None = None,
    pipeline: Any = None,
    timeout_s: float | None = None,
) -> ExportedAdapters:
    """Write the adapters an engine trains as ``pipeline.load_lora_weights`` wants them. Collective.

    Only adapters are gathered, one tensor at a time, from the fp32 master weights. The header
    holds rank, alpha and kind of the adapters, as diffusers writes them. Before the file gets its
    name it is read back and compared, and the adapters must have learned something.

    Args:
        path: A folder, in which the file is ``pytorch_lora_weights.safetensors``, or the file
            itself, ending with ``.safetensors``. The file must not exist.
        engine: What trains a model with adapters, or ``TrainedParts`` with some.
        weights: An attached EMA shadow; the trained master weights when not given.
        dtype: Of the tensors in the file: ``"fp32"``, ``"bf16"``, ``"fp16"`` or a torch dtype.
        component: What the pipeline calls a single model: told from its class when not given.
            The parts of ``TrainedParts`` have their names.
        pipeline: The pipeline or its class, to check that it loads adapters for these components.
        timeout_s: Seconds to wait for all ranks to come; the group's timeout when not given.

    Returns:
        What was written, on every rank.

    Raises:
        CheckpointMismatchError: The model trains no adapters, or trains something besides them.
        CheckpointCorruptError: Adapters are not finite or have learned nothing, or the disk does
            not hold what was written.
        CheckpointError: The file exists, or cannot be written.
        CollectiveError: A rank did not come, or the arguments differ.
    """
    group, chosen, target = engine.group, checked_dtype(dtype), _file(path)
    group.barrier(f"exporting adapters to {target}", timeout_s=timeout_s)
    group.agree((str(target), str(chosen), weights is None, component), "export_adapters")
    outline = AdapterOutline.of(engine, component=component)
    _check_loadable(pipeline, tuple(outline.metadata))
    output = _Output(Judgement.of(engine, outline.adapters))
    if group.is_main:
        output.attempt(lambda: output.open(target, outline, chosen))
    together(group, "begin the export of adapters", output.reraise)
    try:
        for name, tensor in (weights or engine.master_weights).gather():
            output.add(name, tensor)
        results = together(group, "finish the export of adapters", output.publish)
    finally:
        output.abandon()
    exported = results[0]
    if exported is None:
        raise CheckpointError("rank 0 wrote nothing", key=str(target))
    announce(exported.decisions, rank=group.rank)
    return exported


@attrs.frozen(kw_only=True)
class AdapterOutline:
    """Which of an engine's parameters go into a LoRA file, and under which names."""

    keys: Mapping[str, str]
    """For each trained parameter its name in the file."""
    specs: tuple[TensorSpec, ...]
    """The tensors in the order they are gathered, in fp32."""
    metadata: Mapping[str, Mapping[str, Any]]
    """For each component its adapters' settings."""
    adapters: Mapping[str, tuple[str, torch.nn.Module, str]]
    """For each component its prefix in the model, the module, and its adapter's name."""

    @classmethod
    def of(cls, engine: Engine, *, component: str | None = None) -> AdapterOutline:
        """Look at an engine.

        Raises:
            CheckpointMismatchError: It trains no adapters, or something besides them.
            InvalidValueError: A component's name is wrong, or cannot be told.
        """
        adapters = {
            name: (prefix, module, adapter)
            for name, (prefix, module) in components(engine.module, component).items()
            if (adapter := trained_adapter(module)) is not None
        }
        if not adapters:
            raise CheckpointMismatchError(
                "trains no adapters", key="engine.module", value=type(engine.module).__name__
            )
        shapes = engine.master_weights.parameters
        keys = {name: _key(name, adapters) for name in shapes}
        return cls(
            keys=keys,
            specs=tuple(
                TensorSpec(key=keys[name], dtype=torch.float32, shape=shape)
                for name, shape in shapes.items()
            ),
            metadata={n: portable_config(m, adapter) for n, (_, m, adapter) in adapters.items()},
            adapters=adapters,
        )


def portable_config(module: torch.nn.Module, adapter: str) -> dict[str, Any]:
    """The settings of an adapter that a file must hold, as JSON has them."""
    usual = type(peft_config(module, adapter))().to_dict()
    found = {}
    for key, value in adapter_config(module, adapter).items():
        if key in _KEPT or (key not in _OF_THE_RUN and value != usual.get(key)):
            found[key] = sorted(value) if isinstance(value, (set, frozenset)) else value
    return found


def _key(name: str, adapters: Mapping[str, tuple[str, torch.nn.Module, str]]) -> str:
    for component, (prefix, module, _) in adapters.items():
        parsed = AdapterParameter.parse(name.removeprefix(prefix))
        if name.startswith(prefix) and parsed is not None:
            return f"{component}.{_published(module)}{parsed.key}"
    raise CheckpointMismatchError(
        "is trained and is no adapter, so a LoRA file cannot hold it",
        key=name,
        fix="freeze it, or export the whole model with export_merged",
    )


def _published(module: torch.nn.Module) -> str:
    # transformers 5 dropped this level of CLIP; files keep it, and diffusers takes it away again.
    flat = type(module).__name__.startswith("CLIPText") and not hasattr(module, "text_model")
    return "text_model." if flat else ""


def _check_loadable(pipeline: Any, names: tuple[str, ...]) -> None:
    loadable = getattr(pipeline, "_lora_loadable_modules", None)
    if pipeline is None:
        return
    kind = pipeline.__name__ if isinstance(pipeline, type) else type(pipeline).__name__
    if loadable is None or not set(names) <= set(loadable):
        raise InvalidValueError(
            f"{kind} loads adapters for {', '.join(loadable or ()) or 'nothing'}",
            key="component",
            value=names,
            fix="name components as the pipeline does",
        )


def _file(path: str | os.PathLike[str]) -> Path:
    target = Path(path).absolute()
    return target if target.suffix == ".safetensors" else target / LORA_FILE


class _Output(Attempts):
    """What rank 0 writes and judges; on other ranks nothing happens."""

    def __init__(self, judgement: Judgement) -> None:
        super().__init__()
        self._judgement = judgement
        self._writer: AdapterFileWriter | None = None
        self._outline: AdapterOutline | None = None
        self._dtype = torch.float32

    def open(self, path: Path, outline: AdapterOutline, dtype: torch.dtype) -> None:
        """Begin the file."""
        specs = tuple(attrs.evolve(spec, dtype=dtype) for spec in outline.specs)
        flat = {
            f"{component}.{key}": value
            for component, config in outline.metadata.items()
            for key, value in config.items()
        }
        text = json.dumps(flat, indent=2, sort_keys=True)
        self._writer = AdapterFileWriter(path, specs=specs, settings=text)
        self._outline, self._dtype = outline, dtype

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Judge and write a tensor."""
        self.attempt(lambda: self._add(name, tensor))

    def _add(self, name: str, tensor: torch.Tensor) -> None:
        if self._writer is not None and self._outline is not None:
            written = tensor.to(self._dtype)
            self._judgement.see(name, tensor, written)
            self._writer.append(self._outline.keys[name], written)

    def publish(self) -> ExportedAdapters | None:
        """Judge the whole, read the file back and give it its name."""
        self.reraise()
        if self._writer is None or self._outline is None:
            return None
        decisions = self._judgement.conclude()
        nbytes, sha256 = self._writer.publish()
        return ExportedAdapters(
            path=self._writer.path,
            components=tuple(self._outline.metadata),
            tensors=len(self._outline.specs),
            elements=sum(torch.Size(spec.shape).numel() for spec in self._outline.specs),
            nbytes=nbytes,
            sha256=sha256,
            decisions=decisions,
        )

    def abandon(self) -> None:
        """Remove what is unfinished."""
        if self._writer is not None:
            self._writer.abandon()
