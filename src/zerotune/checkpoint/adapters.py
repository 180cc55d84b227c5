"""From an engine that trains adapters to the LoRA file that diffusers loads."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
import torch

from zerotune._util.files import draft_of, sync
from zerotune.backend.adapters import (
    AdapterParameter,
    adapter_config,
    fingerprint,
    peft_config,
    recall,
    trained_adapter,
)
from zerotune.backend.dtypes import checked_dtype
from zerotune.backend.stored import read_header
from zerotune.backend.trained_parts import components
from zerotune.checkpoint.collective import Attempts, together
from zerotune.checkpoint.export import Gatherable
from zerotune.checkpoint.exported import Mark, check_replaceable
from zerotune.checkpoint.folders import check_space
from zerotune.checkpoint.tensors import (
    TensorFileWriter,
    TensorSpec,
    file_size,
    hash_of,
)
from zerotune.decisions import Decision, announce
from zerotune.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    InvalidValueError,
)

if TYPE_CHECKING:
    from zerotune.backend.engine import Engine


# -- A LoRA file in diffusers' format: written under another name, read back, then renamed.


LORA_FILE: Final = "pytorch_lora_weights.safetensors"
"""What diffusers looks for in a folder."""
SETTINGS: Final = "lora_adapter_metadata"
"""Where diffusers keeps rank, alpha and the like in the header."""


class AdapterFileWriter:
    """Writes a LoRA file tensor by tensor.

    Args:
        path: The file; one that an earlier export wrote is replaced.
        specs: The tensors, in the order they will come.
        settings: JSON text of the adapters' settings.

    Raises:
        CheckpointError: The file is somebody else's, or the disk is too small.
    """

    def __init__(self, path: Path, *, specs: Sequence[TensorSpec], settings: str) -> None:
        check_replaceable(path)
        self.path = path
        self._specs = tuple(specs)
        mark = Mark(files={path.name: None})
        self._metadata = {"format": "pt", SETTINGS: settings, **mark.metadata}
        path.parent.mkdir(parents=True, exist_ok=True)
        check_space(path.parent, file_size(specs, self._metadata))
        self._draft = draft_of(path)
        try:
            self._writer = TensorFileWriter(self._draft, specs=specs, metadata=self._metadata)
        except BaseException:
            self._draft.unlink(missing_ok=True)
            raise

    def append(self, key: str, tensor: torch.Tensor) -> None:
        """Write the next tensor."""
        self._writer.append(key, tensor)

    def publish(self) -> tuple[int, str]:
        """Read the file back and give it its name.

        Returns:
            Its bytes and SHA-256 (hex).

        Raises:
            CheckpointCorruptError: The disk does not hold what was written.
        """
        nbytes, sha256 = self._writer.finish()
        _check(self._draft, self._specs, self._metadata, nbytes=nbytes, sha256=sha256)
        self._draft.replace(self.path)
        sync(self.path.parent)
        return nbytes, sha256

    def abandon(self) -> None:
        """Close, and remove what has not got its name."""
        self._writer.close()
        self._draft.unlink(missing_ok=True)


def find_adapters(path: str | os.PathLike[str]) -> Path:
    """The LoRA file that a path means.

    Raises:
        CheckpointError: There is none.
    """
    given = Path(path)
    file = given / LORA_FILE if given.is_dir() else given
    if not file.is_file():
        raise CheckpointError(
            "there is no LoRA file",
            key=str(file),
            fix=f"give the file, or a folder with {LORA_FILE}",
        )
    return file


def adapter_settings(metadata: Mapping[str, str], component: str) -> dict[str, Any] | None:
    """What a file's header says of a component's adapters; ``None`` when it says nothing.

    Raises:
        CheckpointCorruptError: It is not JSON.
    """
    try:
        every = json.loads(metadata.get(SETTINGS, "{}"))
    except ValueError as error:
        raise CheckpointCorruptError(f"is not JSON ({error})", key=SETTINGS) from error
    prefix = f"{component}."
    return {
        key.removeprefix(prefix): value for key, value in every.items() if key.startswith(prefix)
    } or None


def _check(
    path: Path,
    specs: Sequence[TensorSpec],
    metadata: Mapping[str, str],
    *,
    nbytes: int,
    sha256: str,
) -> None:
    stored, header = read_header(path)
    wanted = {spec.key: (spec.dtype, spec.shape) for spec in specs}
    there = {name: (tensor.dtype, tensor.shape) for name, tensor in stored.items()}
    if wanted != there or header != metadata or path.stat().st_size != nbytes:
        raise CheckpointCorruptError(
            f"holds {len(there)} tensors, not the {len(wanted)} that were written",
            key=str(path),
            fix="look at the disk, or export elsewhere",
        )
    if hash_of(path) != sha256:
        raise CheckpointCorruptError(
            "does not hold the bytes that were written",
            key=str(path),
            fix="look at the disk, or export elsewhere",
        )


# -- Have adapters learned anything? A LoRA file that does nothing looks like one that works.


_SHOWN: Final = 4


@attrs.frozen(kw_only=True)
class _Layer:
    """An adapted layer of a component."""

    component: str
    name: str


class Judgement:
    """Looks at each tensor that is exported, and at the end says whether the whole is sound.

    A layer has learned nothing when none of its tensors differs from what it was before training,
    or when the factor that begins at zero is still zero. That may be right for a layer outside
    the loss, such as the last of CLIP, so it is only told; of a whole component it is an error.

    Args:
        initial: For each trained parameter the fingerprints of its first values, if known.
        layers: For each trained parameter the layer it adapts.
        steps: Optimizer steps that were applied.
    """

    def __init__(
        self, *, initial: Mapping[str, frozenset[str]], layers: Mapping[str, _Layer], steps: int
    ) -> None:
        self._initial = initial
        self._layers = layers
        self._steps = steps
        self._moved: dict[_Layer, bool] = {}
        self._zero: set[_Layer] = set()

    @classmethod
    def of(
        cls, engine: Engine, adapters: Mapping[str, tuple[str, torch.nn.Module, str]]
    ) -> Judgement:
        """For the adapters of an engine, by component."""
        initial: dict[str, frozenset[str]] = {}
        layers = {}
        for component, (prefix, module, adapter) in adapters.items():
            facts = recall(module, adapter)
            if facts is not None:
                initial |= {f"{prefix}{name}": prints for name, prints in facts.initial.items()}
            for name, _ in module.named_parameters():
                parsed = AdapterParameter.parse(name)
                if parsed is not None and parsed.adapter == adapter:
                    layers[f"{prefix}{name}"] = _Layer(component=component, name=parsed.layer)
        state = engine.state
        return cls(initial=initial, layers=layers, steps=state.global_step - state.skipped_steps)

    def see(self, name: str, tensor: torch.Tensor, written: torch.Tensor) -> None:
        """Look at a parameter.

        Args:
            name: Its name in the engine.
            tensor: In fp32.
            written: As it goes into the file.

        Raises:
            CheckpointCorruptError: It is empty, or not finite.
        """
        if not written.numel():
            raise CheckpointCorruptError("is empty", key=name, value=tuple(written.shape))
        if not bool(torch.isfinite(written).all()):
            raise CheckpointCorruptError(
                f"is not finite in {written.dtype}",
                key=name,
                fix="look at the losses; in fp16, export in fp32 or bf16",
            )
        layer = self._layers[name]
        parsed = AdapterParameter.parse(name)
        if parsed is not None and parsed.starts_at_zero and not bool(written.any()):
            self._zero.add(layer)
        moved = fingerprint(tensor) not in self._initial.get(name, frozenset())
        self._moved[layer] = self._moved.get(layer, False) or moved

    def conclude(self) -> tuple[Decision, ...]:
        """What is remarkable.

        Raises:
            CheckpointCorruptError: All adapters of a component have learned nothing, after
                steps that should have taught them.
        """
        still = [layer for layer, moved in self._moved.items() if not moved or layer in self._zero]
        if not still:
            return ()
        if self._steps == 0:
            return (self._decision(still, "no optimizer step was taken: the file does nothing"),)
        for component in {layer.component for layer in still}:
            every = [layer for layer in self._moved if layer.component == component]
            idle = [layer for layer in still if layer.component == component]
            if len(idle) == len(every):
                raise CheckpointCorruptError(
                    f"none of the {len(every)} adapters has learned anything in {self._steps} "
                    f"steps ({self._why(idle)})",
                    key=component,
                    fix="look at the learning rate, and whether the loss depends on the adapters",
                )
        return (self._decision(still, "have learned nothing: outside the loss, perhaps"),)

    def _why(self, layers: list[_Layer]) -> str:
        zero = all(layer in self._zero for layer in layers)
        return "every lora_B is zero" if zero else "all are as they were initialized"

    def _decision(self, still: list[_Layer], reason: str) -> Decision:
        names = [f"{layer.component}.{layer.name}" for layer in still]
        shown = ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
        return Decision(
            key="adapters",
            before=len(self._moved),
            after=len(self._moved) - len(still),
            reason=f"{len(still)} of {len(self._moved)} layers {reason} ({shown})"
            if self._steps
            else reason,
            severity="warning",
        )


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
            itself, ending with ``.safetensors``. A file of an earlier export is replaced.
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
        CheckpointError: The file is somebody else's, or cannot be written.
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
