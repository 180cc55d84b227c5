"""From an engine that trains adapters to the file that diffusers, peft or ComfyUI loads."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
import torch

from zerotune._util.files import draft_of, sync, write_synced
from zerotune.backend.adapter_layouts import (
    LAYOUTS,
    LORA_FILE,
    PEFT_CONFIG,
    PEFT_FILE,
    SETTINGS,
    Factors,
    Layout,
    compare,
    published,
    read_others,
    write_lora,
    write_lycoris,
)
from zerotune.backend.adapters import (
    AdapterParameter,
    adapter_config,
    adapter_layers,
    fingerprint,
    peft_config,
    recall,
    trained_adapter,
)
from zerotune.backend.dtypes import checked_dtype
from zerotune.backend.stored import read_header
from zerotune.backend.trained_parts import components
from zerotune.checkpoint.collective import Attempts, together
from zerotune.checkpoint.export import Gatherable, label_of, weights_of
from zerotune.checkpoint.exported import Mark, check_replaceable
from zerotune.checkpoint.folders import ExportStaging, check_space
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


class AdapterFileWriter:
    """Writes a LoRA file tensor by tensor.

    Args:
        path: The file; one that an earlier export wrote is replaced.
        specs: The tensors, in the order they will come.
        metadata: What the header says besides the tensors.

    Raises:
        CheckpointError: The file is somebody else's, or the disk is too small.
    """

    def __init__(
        self, path: Path, *, specs: Sequence[TensorSpec], metadata: Mapping[str, str]
    ) -> None:
        check_replaceable(path)
        self.path = path
        self._specs = tuple(specs)
        mark = Mark(files={path.name: None})
        self._metadata = {"format": "pt", **metadata, **mark.metadata}
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


class AdapterFolderWriter:
    """The same as a folder of peft's: the tensors, and beside them what they mean.

    Args:
        path: The folder; one that an earlier export wrote is replaced.
        specs: The tensors, in the order they will come.
        config: peft's configuration of the adapters.

    Raises:
        CheckpointError: The folder is somebody else's, or the disk is too small.
    """

    def __init__(
        self, path: Path, *, specs: Sequence[TensorSpec], config: Mapping[str, Any]
    ) -> None:
        self.path = path
        self._specs = tuple(specs)
        self._config = (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()
        digest = hashlib.sha256(self._config).hexdigest()
        mark = Mark(files={PEFT_FILE: None, PEFT_CONFIG: digest})
        self._metadata = {"format": "pt", **mark.metadata}
        self._staging = ExportStaging(path)
        try:
            check_space(self._staging.path, file_size(specs, self._metadata))
            self._writer = TensorFileWriter(
                self._staging.path / PEFT_FILE, specs=specs, metadata=self._metadata
            )
        except BaseException:
            self._staging.abandon()
            raise

    def append(self, key: str, tensor: torch.Tensor) -> None:
        """Write the next tensor."""
        self._writer.append(key, tensor)

    def publish(self) -> tuple[int, str]:
        """Read the tensors back and give the folder its name.

        Returns:
            Bytes and SHA-256 (hex) of the tensors' file.

        Raises:
            CheckpointCorruptError: The disk does not hold what was written.
        """
        nbytes, sha256 = self._writer.finish()
        draft = self._staging.path / PEFT_FILE
        _check(draft, self._specs, self._metadata, nbytes=nbytes, sha256=sha256)
        write_synced(self._staging.path / PEFT_CONFIG, self._config)
        self._staging.publish()
        return nbytes, sha256

    def abandon(self) -> None:
        """Close, and remove what has not got its name."""
        self._writer.close()
        self._staging.abandon()


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
        self._zero: dict[_Layer, str] = {}

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
        if parsed is not None and parsed.empties and not bool(written.any()):
            self._zero[layer] = parsed.kind
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
        kinds = " or ".join(sorted({self._zero[layer] for layer in layers})) if zero else ""
        return f"every {kinds} is zero" if zero else "all are as they were initialized"

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
    "alpha",
    "target_modules",
    "rank_pattern",
    "alpha_pattern",
    "use_dora",
)
"""What a file always says; the rest only where it is not peft's default, so that an older peft,
which refuses settings it does not know, still loads it."""
_OF_THE_RUN: Final = frozenset(
    {
        "inference_mode",
        "base_model_name_or_path",
        "init_lora_weights",
        "init_weights",
        "lora_dropout",
    }
)
"""Settings that mean nothing to who loads the file."""


@attrs.frozen(kw_only=True)
class ExportedAdapters(os.PathLike[str]):
    """A file of adapters, written and read back. May be used as its path."""

    path: Path
    """Absolute path of the file, or of peft's folder."""
    components: tuple[str, ...]
    """Components of the pipeline it has adapters for."""
    tensors: int
    elements: int
    nbytes: int
    """Bytes of the file."""
    sha256: str
    """Of the file, hex."""
    decisions: tuple[Decision, ...] = ()
    """What is remarkable about the adapters: such as layers that have learned nothing, or a scale
    that the format holds rounded."""

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
    """Write the adapters an engine trains as ``pipeline.load_lora_weights`` wants them. Collective.

    Only adapters are gathered, one tensor at a time, from the fp32 master weights. The header
    holds rank, alpha and kind of the adapters, as diffusers writes them. Before the file gets its
    name it is read back and compared, and the adapters must have learned something.

    Args:
        path: A folder, in which the file is ``pytorch_lora_weights.safetensors``, or the file
            itself, ending with ``.safetensors``. An earlier export is replaced.
        engine: What trains a model with adapters, or ``TrainedParts`` with some.
        weights: As in ``export_model``.
        dtype: Of the tensors in the file: ``"fp32"``, ``"bf16"``, ``"fp16"`` or a torch dtype.
        layout: ``"diffusers"``; ``"peft"``, a folder for ``PeftModel.from_pretrained``;
            ``"comfyui"``, a file of ``diffusion_model.*`` tensors; ``"kohya"``, a file as kohya's
            trainers write it. The last two are read back through diffusers' own converters, and
            hold the adapters in memory while they are written.
        component: What the pipeline calls a single model: told from its class when not given.
            The parts of ``TrainedParts`` have their names.
        pipeline: The pipeline or its class, to check that it loads adapters for these components.
        timeout_s: Seconds to wait for all ranks to come; the group's timeout when not given.

    Returns:
        What was written, on every rank.

    Raises:
        CheckpointMismatchError: The model trains no adapters, or trains something besides them,
            or layers and kinds that the format has no names for.
        CheckpointCorruptError: Adapters are not finite or have learned nothing, or the disk does
            not hold what was written.
        CheckpointError: The file is somebody else's, or cannot be written.
        InvalidValueError: There is no such format, or not for this model.
        CollectiveError: A rank did not come, or the arguments differ.
    """
    group, chosen = engine.group, checked_dtype(dtype)
    target = _file(path, layout)
    group.barrier(f"exporting adapters to {target}", timeout_s=timeout_s)
    group.agree((str(target), str(chosen), label_of(weights), component, layout), "export_adapters")
    exported = weights_of(engine, weights)
    outline = AdapterOutline.of(engine, component=component)
    _check_loadable(pipeline, tuple(outline.metadata))
    outline.check_layout(layout)
    output = _Output(Judgement.of(engine, outline.adapters))
    if group.is_main:
        output.attempt(lambda: output.open(target, outline, chosen, layout))
    together(group, "begin the export of adapters", output.reraise)
    try:
        for name, tensor in exported.gather():
            output.add(name, tensor)
        results = together(group, "finish the export of adapters", output.publish)
    finally:
        output.abandon()
    written = results[0]
    if written is None:
        raise CheckpointError("rank 0 wrote nothing", key=str(target))
    announce(written.decisions, rank=group.rank)
    return written


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

    def check_layout(self, form: Layout) -> None:
        """Check that the format can hold adapters of this kind.

        Raises:
            CheckpointMismatchError: It cannot.
            InvalidValueError: It names no layers of such a model.
        """
        if form == "peft" and len(self.adapters) > 1:
            raise CheckpointMismatchError(
                "a folder of peft's holds the adapters of one model",
                key="layout",
                value=form,
                fix='layout="diffusers" holds all of them',
            )
        for component, (_, module, adapter) in self.adapters.items():
            kind = adapter_config(module, adapter)
            allowed = _HOLDS[form]
            if _kind(kind) not in allowed:
                raise CheckpointMismatchError(
                    f"has no place for {_kind(kind)}: nobody could read it",
                    key="layout",
                    value=form,
                    fix='layout="peft", for PeftModel.from_pretrained',
                )
            if form in ("comfyui", "kohya"):
                published(module, form, component)


_HOLDS: Final[Mapping[Layout, tuple[str, ...]]] = {
    "diffusers": ("LoRA", "DoRA", "LoKr"),
    "peft": ("LoRA", "DoRA", "LoKr", "LoHa", "OFT"),
    "comfyui": ("LoRA", "LoKr", "LoHa"),
    "kohya": ("LoRA", "LoKr", "LoHa"),
}


def _kind(config: Mapping[str, Any]) -> str:
    """What people call the kind of a peft configuration."""
    name = str(getattr(config["peft_type"], "value", config["peft_type"]))
    if name == "LORA" and config.get("use_dora"):
        return "DoRA"
    return {"LORA": "LoRA", "LOKR": "LoKr", "LOHA": "LoHa"}.get(name, name)


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
            return f"{component}.{published_prefix(module)}{parsed.key}"
    raise CheckpointMismatchError(
        "is trained and is no adapter, so a LoRA file cannot hold it",
        key=name,
        fix="freeze it, or export the whole model with export_merged",
    )


def published_prefix(module: torch.nn.Module) -> str:
    """What files say before the names of a model's layers."""
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


def _file(path: str | os.PathLike[str], form: Layout) -> Path:
    if form not in LAYOUTS:
        raise InvalidValueError(
            "is no layout of adapters", key="layout", value=form, fix=f"one of {list(LAYOUTS)}"
        )
    target = Path(path).absolute()
    if form == "peft":
        return target
    return target if target.suffix == ".safetensors" else target / LORA_FILE


class _Output(Attempts):
    """What rank 0 writes and judges; on other ranks nothing happens."""

    def __init__(self, judgement: Judgement) -> None:
        super().__init__()
        self._judgement = judgement
        self._writer: AdapterFileWriter | AdapterFolderWriter | None = None
        self._foreign: _Foreign | None = None
        self._outline: AdapterOutline | None = None
        self._dtype = torch.float32

    def open(self, path: Path, outline: AdapterOutline, dtype: torch.dtype, form: Layout) -> None:
        """Begin the file."""
        self._outline, self._dtype = outline, dtype
        if form in ("comfyui", "kohya"):
            check_replaceable(path)
            self._foreign = _Foreign(path, outline, dtype, form)
            return
        specs = tuple(attrs.evolve(spec, dtype=dtype) for spec in outline.specs)
        if form == "peft":
            ((component, config),) = outline.metadata.items()
            named = [attrs.evolve(s, key=_peft_key(s.key, component)) for s in specs]
            self._writer = AdapterFolderWriter(path, specs=named, config=config)
            return
        flat = {
            f"{component}.{key}": value
            for component, config in outline.metadata.items()
            for key, value in config.items()
        }
        text = json.dumps(flat, indent=2, sort_keys=True)
        self._writer = AdapterFileWriter(path, specs=specs, metadata={SETTINGS: text})

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Judge and write a tensor."""
        self.attempt(lambda: self._add(name, tensor))

    def _add(self, name: str, tensor: torch.Tensor) -> None:
        if self._outline is None:
            return
        written = tensor.to(self._dtype)
        self._judgement.see(name, tensor, written)
        key = self._outline.keys[name]
        if self._foreign is not None:
            self._foreign.keep(name, tensor)
        elif isinstance(self._writer, AdapterFolderWriter):
            self._writer.append(_peft_key(key, next(iter(self._outline.metadata))), written)
        elif self._writer is not None:
            self._writer.append(key, written)

    def publish(self) -> ExportedAdapters | None:
        """Judge the whole, read the file back and give it its name."""
        self.reraise()
        if self._outline is None:
            return None
        decisions = self._judgement.conclude()
        if self._foreign is not None:
            self._writer, told = self._foreign.write()
            decisions += told
        if self._writer is None:
            return None
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


def _peft_key(key: str, component: str) -> str:
    return f"base_model.model.{key.removeprefix(f'{component}.')}"


# -- The formats of others, whose tensors are not ours one by one.


class _Foreign:
    """Trained tensors until all are there, then a file in ComfyUI's or kohya's names."""

    def __init__(
        self, path: Path, outline: AdapterOutline, dtype: torch.dtype, form: Layout
    ) -> None:
        self._path, self._outline, self._dtype, self._form = path, outline, dtype, form
        self._kept: dict[str, dict[str, dict[str, torch.Tensor]]] = {}

    def keep(self, name: str, tensor: torch.Tensor) -> None:
        """Keep a tensor, by component, layer and kind."""
        for component, (prefix, module, _) in self._outline.adapters.items():
            parsed = AdapterParameter.parse(name.removeprefix(prefix))
            if name.startswith(prefix) and parsed is not None:
                layer = f"{published_prefix(module)}{parsed.layer}"
                layers = self._kept.setdefault(component, {})
                layers.setdefault(layer, {})[f"{parsed.kind}{parsed.rest}"] = tensor.clone()
                return

    def write(self) -> tuple[AdapterFileWriter, tuple[Decision, ...]]:
        """Write what was kept; not yet under its name.

        Raises:
            CheckpointMismatchError: A layer or tensor has no place in the format.
            CheckpointCorruptError: diffusers reads something else than was trained.
        """
        tensors: dict[str, torch.Tensor] = {}
        exact = True
        for component, layers in self._kept.items():
            _, module, adapter = self._outline.adapters[component]
            found, same = self._of(component, module, adapter, layers)
            tensors |= found
            exact = exact and same
        specs = [TensorSpec.of(key, tensor) for key, tensor in tensors.items()]
        writer = AdapterFileWriter(self._path, specs=specs, metadata=self._header())
        try:
            for key, tensor in tensors.items():
                writer.append(key, tensor)
        except BaseException:
            writer.abandon()
            raise
        return writer, () if exact else (self._rounded(),)

    def _of(
        self,
        component: str,
        module: torch.nn.Module,
        adapter: str,
        layers: Mapping[str, Mapping[str, torch.Tensor]],
    ) -> tuple[dict[str, torch.Tensor], bool]:
        """A component's tensors, and whether diffusers reads the same bits."""
        prefix = published_prefix(module)
        wrapped = {f"{prefix}{name}": layer for name, layer in adapter_layers(module)}
        scales = {name: float(wrapped[name].scaling[adapter]) for name in layers}
        if any("lora_A.weight" not in tensors for tensors in layers.values()):
            _refuse_factors(layers)
            found = write_lycoris(
                layers,
                model=module,
                form=self._form,
                component=component,
                scales=scales,
                dtype=self._dtype,
            )
            return found, True
        _refuse_extras(layers)
        factors = {
            name: Factors(
                down=tensors["lora_A.weight"], up=tensors["lora_B.weight"], scale=scales[name]
            )
            for name, tensors in layers.items()
        }
        found = write_lora(
            factors,
            model=module,
            form=self._form,
            component=component,
            outputs=partial(_outputs, module),
            dtype=self._dtype,
        )
        read = read_others(found, model=module, component=component)
        return found, compare(read, factors, component=component, dtype=self._dtype)

    def _header(self) -> dict[str, str]:
        if self._form != "kohya":
            return {}
        config = next(iter(self._outline.metadata.values()))
        alpha = config.get("lora_alpha", config.get("alpha"))
        return {
            "ss_network_module": "networks.lora" if "lora_alpha" in config else "lycoris.kohya",
            "ss_network_dim": str(config["r"]),
            "ss_network_alpha": str(alpha),
        }

    def _rounded(self) -> Decision:
        return Decision(
            key="adapters.alpha",
            before="beside the factors",
            after="in the factors",
            reason=f"{self._form} files are read with alpha / rank multiplied into the factors, "
            f"which rounds in {str(self._dtype).removeprefix('torch.')}",
            severity="warning",
        )


def _outputs(model: torch.nn.Module, layer: str) -> int:
    found: Any = model.get_submodule(layer)
    return int(found.out_features)


def _refuse_extras(layers: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    for layer, tensors in layers.items():
        extra = sorted(tensors.keys() - {"lora_A.weight", "lora_B.weight"})
        if extra:
            raise CheckpointMismatchError(
                f"has {', '.join(extra)}, for which the format has no place",
                key=layer,
                fix='layout="diffusers"',
            )


def _refuse_factors(layers: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    for layer, tensors in layers.items():
        if any(name.startswith("lora_") for name in tensors):
            raise CheckpointMismatchError(
                "adapts an embedding, for which the format has no place",
                key=layer,
                fix='layout="diffusers"',
            )
