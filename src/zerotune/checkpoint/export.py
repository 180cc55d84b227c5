"""From an engine, or from a checkpoint on disk, to a model that plain diffusers loads."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from zerotune.backend.adapters import AdapterParameter
from zerotune.backend.dtypes import checked_dtype
from zerotune.backend.whole import whole_parameter
from zerotune.checkpoint.collective import Attempts, together
from zerotune.checkpoint.contents import persistent_buffers
from zerotune.checkpoint.folders import check_files, find_checkpoint
from zerotune.checkpoint.manifest import Manifest, ParameterRecord, TensorRecord
from zerotune.checkpoint.modelfolder import SHARD_SIZE, ModelFolderReader, ModelFolderWriter
from zerotune.checkpoint.reading import CheckpointReader
from zerotune.checkpoint.records import model_config
from zerotune.checkpoint.sharedfile import WEIGHTS, Subject
from zerotune.checkpoint.tensorfile import TensorSpec
from zerotune.errors import CheckpointMismatchError

if TYPE_CHECKING:
    from zerotune.backend.engine import Engine


Named = Iterator[tuple[str, torch.Tensor]]


class Gatherable(Protocol):
    """What gives full tensors by parameter name: master weights, or an EMA shadow."""

    def gather(self) -> Named:
        """Name and full tensor of every trained parameter. Collective."""
        ...


def export_model(
    path: str | os.PathLike[str],
    *,
    engine: Engine,
    weights: Gatherable | None = None,
    dtype: str | torch.dtype = "fp32",
    shard_size: int = SHARD_SIZE,
    timeout_s: float | None = None,
) -> Path:
    """Write the engine's model as a diffusers model folder. Collective.

    One parameter at a time is gathered and written by rank 0: nothing else is needed in memory,
    at stage 3 and with NVMe too. Names, shapes and byte totals are compared on the disk before the
    folder gets its name.

    Args:
        path: The folder, which must not exist or be empty. A name that ends with
            ``.safetensors`` becomes a single file.
        engine: The model, with its frozen parameters and buffers.
        weights: What to export of the trained parameters: an attached EMA shadow; the fp32
            master weights when not given.
        dtype: Of all floating-point tensors in the file: ``"fp32"``, ``"bf16"``, ``"fp16"`` or a
            torch dtype.
        shard_size: Most bytes of tensors in a file.
        timeout_s: Seconds to wait for all ranks to come; the group's timeout when not given.

    Returns:
        The absolute path.

    Raises:
        CheckpointError: The path is taken, the disk is too small, or writing fails.
        CheckpointCorruptError: The disk does not hold what was written.
        CheckpointMismatchError: The model trains adapters.
        CollectiveError: A rank did not come, or the arguments differ.
    """
    group, chosen = engine.group, checked_dtype(dtype)
    _refuse_adapters(engine)
    group.barrier(f"exporting to {os.fspath(path)}", timeout_s=timeout_s)
    group.agree((os.fspath(path), str(chosen), weights is None, shard_size), "export_model")
    outline = _outline(engine)
    output = _Output()
    if group.is_main:
        specs = _cast(outline, chosen)
        config = model_config(engine.module)
        output.attempt(lambda: output.open(path, config=config, specs=specs, shard_size=shard_size))
    together(group, "begin the export", output.reraise)
    try:
        for name, tensor in _tensors(engine, weights or engine.master_weights):
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
        CheckpointError: There is no checkpoint, or the path is taken.
        CheckpointMismatchError: It has no such shadow, or ``base`` lacks a frozen parameter.
        CheckpointCorruptError: A file is damaged.
    """
    folder, manifest = find_checkpoint(directory)
    check_files(folder, manifest)
    chosen = checked_dtype(dtype)
    if shadow is not None and shadow not in manifest.shadows:
        raise CheckpointMismatchError(
            f"the checkpoint has no such shadow; it has {list(manifest.shadows)}",
            key="shadow",
            value=shadow,
        )
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


class _Output(Attempts):
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
    ) -> None:
        """Make the folder."""
        self._writer = ModelFolderWriter(path, config=config, specs=specs, shard_size=shard_size)

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
        for name, p in _frozen(engine.module)
        for key in (name, *aliases.get(name, ()))
    ]
    buffers = persistent_buffers(engine.module).items()
    return [*trained, *frozen, *(TensorSpec.of(name, buffer) for name, buffer in buffers)]


def _tensors(engine: Engine, weights: Gatherable) -> Named:
    aliases = _aliases(engine.module)
    for name, tensor in weights.gather():
        for key in (name, *aliases.get(name, ())):
            yield key, tensor
    for name, parameter in _frozen(engine.module):
        tensor = whole_parameter(parameter)
        for key in (name, *aliases.get(name, ())):
            yield key, tensor
    yield from persistent_buffers(engine.module).items()


def _frozen(module: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, p) for name, p in module.named_parameters() if not p.requires_grad]


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
