"""Diffusers model folders, from an engine or a checkpoint: checked before they get their name."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import attrs
import torch

from zerotune._util.files import sync, system_errors, write_synced
from zerotune._util.text import json_of
from zerotune.backend import stored as weights_in_files
from zerotune.backend.adapters import AdapterParameter
from zerotune.backend.dtypes import checked_dtype
from zerotune.backend.stored import (
    STEMS,
    OpensFiles,
    StoredTensor,
    read_header,
    weight_files,
)
from zerotune.backend.unpartitioned import whole_parameter
from zerotune.checkpoint.collective import Attempts, together
from zerotune.checkpoint.contents import persistent_buffers
from zerotune.checkpoint.exported import Mark, check_apart
from zerotune.checkpoint.folders import (
    ExportStaging,
    check_files,
    check_space,
    checked_path,
    find_checkpoint,
)
from zerotune.checkpoint.load import CheckpointReader
from zerotune.checkpoint.manifest import Manifest, ParameterRecord, TensorRecord
from zerotune.checkpoint.records import model_config
from zerotune.checkpoint.tensors import (
    WEIGHTS,
    Subject,
    TensorFileWriter,
    TensorSpec,
    file_size,
)
from zerotune.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    InvalidValueError,
)

if TYPE_CHECKING:
    from zerotune.backend.engine import Engine


CONFIG: Final = "config.json"
SHARD_SIZE: Final = 10 * 2**30
"""Most bytes of tensors in one file, as diffusers itself splits them."""


@attrs.frozen(kw_only=True)
class Whole:
    """A pipeline's folder that a model folder becomes a part of."""

    part: str
    """Name of the part."""
    others: Mapping[str, str]
    """SHA-256 (hex) of the files beside it, by their path from the pipeline's folder."""


class ModelFolderWriter:
    """Writes ``config.json`` and sharded safetensors that ``from_pretrained`` reads.

    A path that ends with ``.safetensors`` becomes a single file instead. What an earlier export
    wrote there is replaced when all of the new one is on the disk; files of others in its folder
    stay.

    Args:
        path: The folder or file.
        config: The model's configuration; ``None`` of a model that is not diffusers'.
        specs: Every tensor, in the order they will come.
        shard_size: Most bytes of tensors in a file.
        whole: What it becomes a part of.

    Raises:
        CheckpointError: The path is taken by something else, or the disk is too small.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        config: Mapping[str, Any] | None,
        specs: Sequence[TensorSpec],
        shard_size: int = SHARD_SIZE,
        whole: Whole | None = None,
    ) -> None:
        self._final = checked_path(path)
        self._single = self._final.suffix == ".safetensors"
        self._config = config
        self._shards = _split(specs, None if self._single else shard_size)
        self._names = self._file_names()
        self._metadata = {"format": "pt", **self._mark(whole).metadata}
        self._staging = ExportStaging(self._final)
        self._writers: list[TensorFileWriter] = []
        self._left = 0
        with ExitStack() as undo:
            undo.callback(self.abandon)
            sizes = (file_size(shard, self._metadata) for shard in self._shards)
            check_space(self._staging.path, sum(sizes))
            undo.pop_all()

    def append(self, key: str, tensor: torch.Tensor) -> None:
        """Write the next tensor, cast to what was announced."""
        if not self._left:
            self._next()
        spec = self._shards[len(self._writers) - 1][-self._left]
        self._writers[-1].append(key, tensor.to(spec.dtype))
        self._left -= 1
        if not self._left:
            self._writers[-1].finish()

    def publish(self) -> Path:
        """Compare what is on the disk with what was announced, then give it its name.

        Returns:
            The folder or file.

        Raises:
            CheckpointCorruptError: A tensor is missing, or has another name, shape or dtype.
        """
        folder = self._staging.path
        for name, specs in zip(self._names, self._shards, strict=True):
            _check_shard(folder / name, specs, self._metadata)
        if self._single:
            (folder / self._names[0]).rename(self._final)
            sync(self._final.parent)
            self._staging.abandon()
            return self._final
        for name, content in self._texts().items():
            write_synced(folder / name, content)
        self._staging.publish()
        return self._final

    def abandon(self) -> None:
        """Remove what was written so far."""
        for writer in self._writers:
            writer.close()
        self._staging.abandon()

    @property
    def _stem(self) -> str:
        return STEMS[0] if self._config is not None else STEMS[1]

    def _mark(self, whole: Whole | None) -> Mark:
        if self._single:
            return Mark(files={self._final.name: None})
        part = "" if whole is None else f"{whole.part}/"
        texts = {
            f"{part}{name}": hashlib.sha256(content).hexdigest()
            for name, content in self._texts().items()
        }
        weights = dict.fromkeys(f"{part}{name}" for name in self._names)
        return Mark(files={**weights, **texts, **({} if whole is None else whole.others)})

    def _texts(self) -> dict[str, bytes]:
        texts = {} if self._config is None else {CONFIG: _json(self._config)}
        if len(self._names) > 1:
            texts[f"{self._stem}.safetensors.index.json"] = _json(self._index())
        return texts

    def _file_names(self) -> list[str]:
        count = len(self._shards)
        if count == 1:
            return [f"{self._stem}.safetensors"]
        return [f"{self._stem}-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]

    def _next(self) -> None:
        index = len(self._writers)
        if index == len(self._shards):
            raise CheckpointError("more tensors than were announced", key=str(self._final))
        specs = self._shards[index]
        path = self._staging.path / self._names[index]
        self._writers.append(TensorFileWriter(path, specs=specs, metadata=self._metadata))
        self._left = len(specs)

    def _index(self) -> dict[str, Any]:
        named = zip(self._names, self._shards, strict=True)
        weight_map = {spec.key: name for name, specs in named for spec in specs}
        total = sum(spec.nbytes for specs in self._shards for spec in specs)
        return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}


class ModelFolderReader(OpensFiles):
    """Reads a diffusers model folder, or a single safetensors file, tensor by tensor.

    Raises:
        CheckpointError: There is no model here.
        CheckpointCorruptError: A file is missing or cannot be read.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(os.O_RDONLY)
        self.path = path
        self._places: dict[str, tuple[Path, StoredTensor]] = {}
        for file in _weight_files(path):
            tensors, _ = read_header(file)
            self._places.update({name: (file, stored) for name, stored in tensors.items()})

    @property
    def config(self) -> Mapping[str, Any] | None:
        """What ``config.json`` holds."""
        path = self.path / CONFIG
        if not path.is_file():
            return None
        try:
            config: Mapping[str, Any] = json_of(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise CheckpointCorruptError(f"is not JSON ({error})", key=str(path)) from error
        return config

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """What is there, by name."""
        return {name: stored for name, (_, stored) in self._places.items()}

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor, on the CPU."""
        file, stored = self._places[name]
        flat = torch.empty(torch.Size(stored.shape).numel(), dtype=stored.dtype)
        view = memoryview(flat.view(torch.uint8).numpy().data)
        if weights_in_files.read_at(self._descriptor(file), view, stored.offset) != flat.nbytes:
            raise CheckpointCorruptError("ends too early", key=str(file))
        return flat.view(stored.shape)


def _weight_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if found := weight_files(path):
        return found
    raise CheckpointError(
        "holds no safetensors weights of a model",
        key=str(path),
        fix="give the folder of the model itself, such as <pipeline>/unet, saved as safetensors",
    )


def _split(specs: Sequence[TensorSpec], most: int | None) -> list[list[TensorSpec]]:
    shards: list[list[TensorSpec]] = [[]]
    filled = 0
    for spec in specs:
        if most is not None and shards[-1] and filled + spec.nbytes > most:
            shards.append([])
            filled = 0
        shards[-1].append(spec)
        filled += spec.nbytes
    return shards


def _check_shard(path: Path, specs: Sequence[TensorSpec], metadata: Mapping[str, str]) -> None:
    stored, _ = read_header(path)
    wanted = {spec.key: (spec.dtype, spec.shape) for spec in specs}
    there = {name: (tensor.dtype, tensor.shape) for name, tensor in stored.items()}
    nbytes, expected = path.stat().st_size, file_size(specs, metadata)
    if wanted != there or nbytes != expected:
        raise CheckpointCorruptError(
            f"holds {len(there)} tensors in {nbytes} bytes, not the {len(wanted)} in {expected} "
            "that were to be written",
            key=str(path),
            fix="look at the disk, or export elsewhere",
        )


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


# -- From an engine, or from a checkpoint on disk, to a model that plain diffusers loads.


Named = Iterator[tuple[str, torch.Tensor]]


class Gatherable(Protocol):
    """What gives full tensors by parameter name: master weights, or an EMA shadow."""

    def gather(self) -> Named:
        """Name and full tensor of every trained parameter. Collective."""
        ...


def weights_of(engine: Engine, weights: Gatherable | str | None) -> Gatherable:
    """What is exported of the trained parameters.

    Args:
        engine: What trains them.
        weights: As in ``export_model``.

    Raises:
        InvalidValueError: No attached average has this name, or several have, or it is no average.
    """
    if weights is None or weights == "trained":
        return engine.master_weights
    if not isinstance(weights, str) and hasattr(weights, "gather"):
        return weights
    averages = list(engine.master_weights.averages)
    named = [each for each in averages if each.name == weights]
    if len(named) == 1:
        return named[0]
    names = ("trained", *sorted({each.name for each in averages}))
    raise InvalidValueError(
        f"{len(named)} averages of this name are attached to the engine"
        if named
        else "no such average is attached to the engine",
        key="weights",
        value=weights if isinstance(weights, str) else type(weights).__name__,
        fix=f"write one of {', '.join(map(repr, names))}, or pass an attached EMAShadow",
    )


def label_of(weights: Gatherable | str | None) -> str | None:
    """What ranks compare of a choice of weights."""
    return weights if isinstance(weights, str) or weights is None else type(weights).__name__


def export_model(
    path: str | os.PathLike[str],
    *,
    engine: Engine,
    weights: Gatherable | str | None = None,
    dtype: str | torch.dtype = "fp32",
    shard_size: int = SHARD_SIZE,
    timeout_s: float | None = None,
) -> Path:
    """Write the engine's model as a diffusers model folder. Collective.

    One parameter at a time is gathered and written by rank 0: nothing else is needed in memory,
    at stage 3 and with NVMe too. Names, shapes and byte totals are compared on the disk before the
    folder gets its name.

    Args:
        path: The folder; an earlier export there is replaced when the new one is whole. A name
            that ends with ``.safetensors`` becomes a single file.
        engine: The model, with its frozen parameters and buffers.
        weights: What to export of the trained parameters: ``"trained"``, an
            attached EMA shadow, or the name of one: ``"ema"``, or its name in ``EMAShadows``; the
            fp32 master weights when not given.
        dtype: Of all floating-point tensors in the file: ``"fp32"``, ``"bf16"``, ``"fp16"`` or a
            torch dtype.
        shard_size: Most bytes of tensors in a file.
        timeout_s: Seconds to wait for all ranks to come; the group's timeout when not given.

    Returns:
        The absolute path.

    Raises:
        CheckpointError: The path is taken by something else than an export, the disk is too
            small, or writing fails.
        CheckpointCorruptError: The disk does not hold what was written.
        CheckpointMismatchError: The model trains adapters.
        InvalidValueError: No such average is attached to the engine.
        CollectiveError: A rank did not come, or the arguments differ.
    """
    return export_part(
        path,
        engine=engine,
        weights=weights,
        dtype=dtype,
        shard_size=shard_size,
        timeout_s=timeout_s,
    )


def export_part(
    path: str | os.PathLike[str],
    *,
    engine: Engine,
    weights: Gatherable | str | None,
    dtype: str | torch.dtype,
    shard_size: int,
    timeout_s: float | None = None,
    whole: Whole | None = None,
) -> Path:
    """``export_model`` of what becomes part of a whole, which rank 0 alone must know. Collective.

    Raises:
        ZeroTuneError: As ``export_model``.
    """
    group, chosen = engine.group, checked_dtype(dtype)
    _refuse_adapters(engine)
    group.barrier(f"exporting to {os.fspath(path)}", timeout_s=timeout_s)
    group.agree((os.fspath(path), str(chosen), label_of(weights), shard_size), "export_model")
    exported = weights_of(engine, weights)
    outline = _outline(engine)
    output = ModelOutput()
    if group.is_main:
        specs = _cast(outline, chosen)
        config = model_config(engine.module)
        writing = partial(output.open, path, config=config, specs=specs, shard_size=shard_size)
        output.attempt(partial(writing, whole=whole))
    together(group, "begin the export", output.reraise)
    try:
        for name, tensor in _tensors(engine, exported):
            # When the disk fails, the others still wait for this rank in the gathering.
            output.attempt(partial(output.append, name, tensor))
        paths = together(group, "finish the export", output.publish)
    except BaseException:
        output.abandon()
        raise
    return paths[0]


def _refuse_adapters(engine: Engine) -> None:
    for name in engine.master_weights.parameters:
        if AdapterParameter.parse(name) is not None:
            raise CheckpointMismatchError(
                "belongs to an adapter, which a model folder cannot hold",
                key=name,
                fix="export_adapters for a LoRA file, export_merged for a whole model",
            )


def export_checkpoint(
    directory: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    shadow: str | None = None,
    dtype: str | torch.dtype = "fp32",
    base: str | os.PathLike[str] | None = None,
    shard_size: int = SHARD_SIZE,
) -> Path:
    """Write the model in a checkpoint as a diffusers model folder. Needs no engine.

    Args:
        directory: The checkpoint.
        path: As in ``export_model``.
        shadow: Export this EMA shadow; the trained weights when not given.
        dtype: As in ``export_model``.
        base: The model folder training began from: frozen parameters are read there.
        shard_size: Most bytes of tensors in a file.

    Returns:
        The absolute path.

    Raises:
        CheckpointError: There is no checkpoint, or the path is taken by something else.
        CheckpointMismatchError: It has no such shadow, or ``base`` lacks a frozen parameter.
        CheckpointCorruptError: A file is damaged.
    """
    with system_errors(CheckpointError, path, "cannot be exported to"):
        return _from_checkpoint(
            directory, path, shadow=shadow, dtype=dtype, base=base, shard_size=shard_size
        )


def _from_checkpoint(
    directory: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    shadow: str | None,
    dtype: str | torch.dtype,
    base: str | os.PathLike[str] | None,
    shard_size: int,
) -> Path:
    folder, manifest = find_checkpoint(directory)
    check_files(folder, manifest)
    chosen = checked_dtype(dtype)
    if shadow is not None and shadow not in manifest.shadows:
        raise CheckpointMismatchError(
            f"the checkpoint has no such shadow; it has {list(manifest.shadows)}",
            key="shadow",
            value=shadow,
        )
    if base is not None:
        check_apart(Path(path), Path(base))
    frozen = None if base is None else ModelFolderReader(Path(base))
    _check_frozen(manifest, frozen)
    outline = _outline_of(manifest)
    config = manifest.model or (None if frozen is None else frozen.config)
    writer = ModelFolderWriter(
        path, config=config, specs=_cast(outline, chosen), shard_size=shard_size
    )
    subject = WEIGHTS if shadow is None else Subject(kind="shadow", of=shadow)
    try:
        with CheckpointReader(folder, manifest) as reader:
            for name, tensor in _stored(reader, manifest, subject, frozen):
                writer.append(name, tensor)
        return writer.publish()
    except BaseException:
        writer.abandon()
        raise


class ModelOutput(Attempts):
    """What rank 0 writes; on other ranks nothing happens."""

    def __init__(self) -> None:
        super().__init__()
        self._writer: ModelFolderWriter | None = None

    def open(
        self,
        path: str | os.PathLike[str],
        *,
        config: Mapping[str, object] | None,
        specs: Sequence[TensorSpec],
        shard_size: int,
        whole: Whole | None = None,
    ) -> None:
        """Make the folder."""
        self._writer = ModelFolderWriter(
            path, config=config, specs=specs, shard_size=shard_size, whole=whole
        )

    def append(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor."""
        if self._writer is not None:
            self._writer.append(name, tensor)

    def publish(self) -> Path:
        """Check and rename."""
        self.reraise()
        return Path() if self._writer is None else self._writer.publish()

    def abandon(self) -> None:
        """Remove what was written."""
        if self._writer is not None:
            self._writer.abandon()


def _outline(engine: Engine) -> list[TensorSpec]:
    """Every tensor of the model, in the order ``_tensors`` gives them."""
    aliases = _aliases(engine.module)
    trained = [
        TensorSpec(key=key, dtype=torch.float32, shape=shape)
        for name, shape in engine.master_weights.parameters.items()
        for key in (name, *aliases.get(name, ()))
    ]
    frozen = [
        TensorSpec(key=key, dtype=p.dtype, shape=tuple(getattr(p, "ds_shape", p.shape)))
        for name, p in _untrained(engine)
        for key in (name, *aliases.get(name, ()))
    ]
    buffers = persistent_buffers(engine.module).items()
    return [*trained, *frozen, *(TensorSpec.of(name, buffer) for name, buffer in buffers)]


def _tensors(engine: Engine, weights: Gatherable) -> Named:
    aliases = _aliases(engine.module)
    for name, tensor in weights.gather():
        for key in (name, *aliases.get(name, ())):
            yield key, tensor
    for name, parameter in _untrained(engine):
        tensor = whole_parameter(parameter)
        for key in (name, *aliases.get(name, ())):
            yield key, tensor
    yield from persistent_buffers(engine.module).items()


def _untrained(engine: Engine) -> list[tuple[str, torch.nn.Parameter]]:
    """Parameters without master weights: frozen ones, and those without elements."""
    trained = engine.master_weights.parameters
    return [(name, p) for name, p in engine.module.named_parameters() if name not in trained]


def _aliases(module: torch.nn.Module) -> dict[str, list[str]]:
    """Further names of tied parameters, by their first."""
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    found: dict[str, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if first[id(parameter)] != name:
            found.setdefault(first[id(parameter)], []).append(name)
    return found


def _cast(specs: Sequence[TensorSpec], dtype: torch.dtype) -> list[TensorSpec]:
    return [
        TensorSpec(key=s.key, dtype=dtype if s.dtype.is_floating_point else s.dtype, shape=s.shape)
        for s in specs
    ]


def _outline_of(manifest: Manifest) -> list[TensorSpec]:
    records: list[ParameterRecord | TensorRecord] = [
        *manifest.parameters,
        *manifest.frozen,
        *manifest.buffers,
    ]
    return [
        TensorSpec(key=key, dtype=getattr(torch, record.dtype), shape=record.shape)
        for record in records
        for key in (record.name, *_named_as(manifest, record.name))
    ]


def _stored(
    reader: CheckpointReader,
    manifest: Manifest,
    subject: Subject,
    frozen: ModelFolderReader | None,
) -> Named:
    averaged = set(reader.names(subject))
    for parameter in manifest.parameters:
        name = parameter.name
        tensor = reader.tensor(subject if name in averaged else WEIGHTS, name)
        for key in (name, *_named_as(manifest, name)):
            yield key, tensor
    for record in manifest.frozen:
        if frozen is None:
            continue
        tensor = frozen.tensor(record.name)
        for key in (record.name, *_named_as(manifest, record.name)):
            yield key, tensor
    buffers = reader.buffers(0) if manifest.buffers else {}
    for record in manifest.buffers:
        yield record.name, buffers[record.name]


def _named_as(manifest: Manifest, name: str) -> list[str]:
    return [alias for alias, saved in manifest.aliases.items() if saved == name]


def _check_frozen(manifest: Manifest, base: ModelFolderReader | None) -> None:
    there = {} if base is None else base.tensors
    for record in manifest.frozen:
        found = there.get(record.name)
        if found is None or found.shape != record.shape:
            raise CheckpointMismatchError(
                "was not trained, so it is not in the checkpoint, "
                + ("and no base was given" if base is None else f"nor in {base.path}"),
                key=record.name,
                value=record.shape,
                fix="give base=, the model folder that training began from",
            )
