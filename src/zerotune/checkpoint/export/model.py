"""Read diffusers model folders, and write them from an engine or a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from zerotune._util.files import system_errors
from zerotune._util.text import json_of
from zerotune.backend.adapters import AdapterParameter
from zerotune.backend.checks import checked_dtype
from zerotune.backend.stored import STEMS, weight_files
from zerotune.backend.upstream import whole_parameter
from zerotune.checkpoint.contents import persistent_buffers
from zerotune.checkpoint.drafting import (
    buffer_records,
    model_config,
    tensor_record,
    tied_names,
    untrained_parameters,
)
from zerotune.checkpoint.export.driver import (
    SHARD_SIZE,
    ExportWriter,
    Gatherable,
    Named,
    Whole,
    all_names,
    export_together,
    json_text,
    meet,
)
from zerotune.checkpoint.files import check_files
from zerotune.checkpoint.folders import find_checkpoint
from zerotune.checkpoint.manifest import Manifest, ParameterRecord, TensorRecord
from zerotune.checkpoint.marks import check_apart
from zerotune.checkpoint.reader import CheckpointReader
from zerotune.checkpoint.tensors import WEIGHTS, Subject, TensorReader, TensorSpec
from zerotune.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
)

if TYPE_CHECKING:
    from zerotune.backend.engine import Engine


CONFIG: Final = "config.json"


class ModelFolderReader(TensorReader):
    """Reads a diffusers model folder, or a single safetensors file, tensor by tensor."""

    def __init__(self, path: Path) -> None:
        self.path = path
        files = [path] if path.is_file() else weight_files(path)
        if not files:
            raise CheckpointError(
                "contains no model weights in safetensors format",
                "use the folder of a model saved as safetensors, such as <pipeline>/unet",
                str(path),
            )
        super().__init__(files)

    @property
    def config(self) -> Mapping[str, Any] | None:
        """Content of ``config.json``; ``None`` if the file does not exist."""
        path = self.path / CONFIG
        if not path.is_file():
            return None
        try:
            config: Mapping[str, Any] = json_of(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise CheckpointCorruptError(f"is not JSON ({error})", key=str(path)) from error
        return config


def model_writer(
    path: str | os.PathLike[str],
    *,
    config: Mapping[str, Any] | None,
    specs: Iterable[TensorSpec],
    aliases: Mapping[str, str] | None = None,
    shard_size: int = SHARD_SIZE,
    whole: Whole | None = None,
    texts: Mapping[str, bytes] | None = None,
) -> ExportWriter:
    """Return a writer for a model folder that ``from_pretrained`` reads.

    Args:
        path: Path of the folder, or of a single file if it ends in ``.safetensors``.
        config: Content of ``config.json``; ``None`` for models that are not from diffusers.
        specs: All tensors to write.
        aliases: Maps each alias of a tied tensor to the tensor's first name.
        shard_size: Maximum bytes of tensor data per file.
        whole: Pipeline folder that will contain the model.
        texts: Contents of additional files, by file name; used if ``config`` is ``None``.
    """
    single = Path(path).suffix == ".safetensors"
    return ExportWriter(
        path,
        stem=None if single else STEMS[config is None],
        specs=specs,
        texts=texts if single or config is None else {CONFIG: json_text(config)},
        aliases=aliases,
        shard_size=shard_size,
        whole=whole,
    )


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

    Parameters are gathered one at a time and written by rank 0, even at stage 3 and with NVMe
    offload. The export therefore needs additional memory for only one parameter. The folder gets
    its final name only after its files are read back and verified.

    Args:
        path: Path of the folder; an earlier export is replaced when the new export is complete. If
            the path ends in ``.safetensors``, a single file is written.
        engine: Engine of the model; frozen parameters and buffers are exported as well.
        weights: Source of the trained parameters: ``"trained"``, an attached EMA shadow, or the
            name of an attached EMA, such as ``"ema"``. By default and with ``"trained"``, the fp32
            master weights are exported.
        dtype: Dtype of all floating-point tensors in the file: ``"fp32"``, ``"bf16"``, ``"fp16"``
            or a torch dtype.
        shard_size: Maximum bytes of tensor data per file.
        timeout_s: Seconds to wait for the other ranks; defaults to the group's timeout.

    Returns:
        The absolute path.

    Raises:
        CheckpointError: The path exists and is not an export, the disk has too little free space,
            or writing fails.
        CheckpointCorruptError: The data on disk differ from the written data.
        CheckpointMismatchError: The model trains adapters; use ``export_adapters``.
        InvalidValueError: ``weights`` names an EMA that is not attached to the engine.
        CollectiveError: A rank did not call ``export_model``, or the arguments differ.
    """
    chosen = checked_dtype(dtype)
    exported = meet(
        engine, path, "export_model", chosen, shard_size, weights=weights, timeout_s=timeout_s
    )
    refuse_adapters(engine)
    return export_together(
        engine,
        "the export",
        begin=lambda: engine_writer(path, engine, dtype=chosen, shard_size=shard_size),
        weights=exported,
        others=untrained(engine),
    )


def trains_adapters(engine: Engine) -> bool:
    """Return whether any trained parameter belongs to an adapter."""
    return any(AdapterParameter.parse(name) for name in engine.master_weights.parameters)


def refuse_adapters(engine: Engine) -> None:
    """Check that an engine trains no adapters."""
    for name in engine.master_weights.parameters:
        if AdapterParameter.parse(name) is not None:
            raise CheckpointMismatchError(
                "belongs to an adapter, which a model folder cannot contain",
                "use export_adapters, and merge its file with diffusers' fuse_lora",
                name,
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
    """Write a checkpoint's model as a diffusers model folder, without an engine.

    Args:
        directory: Folder of the checkpoint.
        path: As in ``export_model``.
        shadow: Name of the EMA shadow to export; by default the trained weights are exported.
        dtype: As in ``export_model``.
        base: Model folder that training started from, which provides the frozen parameters.
        shard_size: Maximum bytes of tensor data per file.

    Returns:
        The absolute path.

    Raises:
        CheckpointError: ``directory`` is not a checkpoint, or ``path`` exists and is not an export.
        CheckpointMismatchError: The checkpoint lacks the shadow, or ``base`` lacks a frozen
            parameter.
        CheckpointCorruptError: A file is damaged.
    """
    with system_errors(CheckpointError, path, "cannot be exported to"), ExitStack() as opened:
        folder, manifest = checked_checkpoint(directory, shadow=shadow)
        chosen = checked_dtype(dtype)
        frozen = None
        if base is not None:
            check_apart(Path(path), Path(base))
            frozen = opened.enter_context(ModelFolderReader(Path(base)))
        writer = model_writer(
            path,
            config=manifest.model or (None if frozen is None else frozen.config),
            specs=specs_of(records_of(manifest), manifest.aliases, chosen),
            aliases=manifest.aliases,
            shard_size=shard_size,
        )
        reader = opened.enter_context(CheckpointReader(folder, manifest))
        return writer.write(stored_tensors(reader, manifest, shadow, frozen))


def checked_checkpoint(
    directory: str | os.PathLike[str], *, shadow: str | None
) -> tuple[Path, Manifest]:
    """Check that a checkpoint has all files and ``shadow``; return its folder and manifest."""
    folder, manifest = find_checkpoint(directory)
    check_files(folder, manifest)
    if shadow is not None and shadow not in manifest.shadows:
        raise CheckpointMismatchError(
            f"the checkpoint has no such shadow; its shadows are {list(manifest.shadows)}",
            key="shadow",
            value=shadow,
        )
    return folder, manifest


def records_of(manifest: Manifest) -> tuple[ParameterRecord | TensorRecord, ...]:
    """Return the records of all parameters and buffers in a manifest."""
    return (*manifest.parameters, *manifest.frozen, *manifest.buffers)


def engine_writer(
    path: str | os.PathLike[str],
    engine: Engine,
    *,
    dtype: torch.dtype,
    shard_size: int,
    whole: Whole | None = None,
    part: tuple[str, torch.nn.Module] | None = None,
    texts: Mapping[str, bytes] | None = None,
) -> ExportWriter:
    """Return a writer for an engine's model, or for one part of ``TrainedParts``.

    Args:
        path: As in ``export_model``.
        engine: Engine of the model.
        dtype: As in ``export_model``.
        shard_size: As in ``export_model``.
        whole: Pipeline folder that will contain the export.
        part: Prefix of the part's parameter names in the engine, and the part's module; by default
            the whole model is written.
        texts: Contents of additional files for a model that is not from diffusers, by file name.
    """
    prefix, module = part or ("", engine.module)
    aliases = tied_names(module)
    return model_writer(
        path,
        config=model_config(module),
        specs=engine_specs(engine, aliases, dtype, part=(prefix, module)),
        aliases=aliases,
        shard_size=shard_size,
        whole=whole,
        texts=texts,
    )


def engine_specs(
    engine: Engine,
    aliases: Mapping[str, str],
    dtype: torch.dtype,
    *,
    part: tuple[str, torch.nn.Module] | None = None,
) -> list[TensorSpec]:
    """Describe the tensors of an engine's model, or of one part of ``TrainedParts``.

    Args:
        engine: Engine of the model.
        aliases: Maps each alias of a tied tensor to the tensor's first name.
        dtype: Dtype of floating-point tensors.
        part: As in ``engine_writer``.
    """
    prefix, module = part or ("", engine.module)
    records: list[ParameterRecord | TensorRecord] = [
        ParameterRecord(name=name.removeprefix(prefix), shape=shape)
        for name, shape in engine.master_weights.parameters.items()
        if name.startswith(prefix)
    ]
    records += [
        tensor_record(name.removeprefix(prefix), p)
        for name, p in untrained_parameters(engine).items()
        if name.startswith(prefix)
    ]
    records += buffer_records(module)
    return specs_of(records, aliases, dtype)


def specs_of(
    records: Iterable[ParameterRecord | TensorRecord],
    aliases: Mapping[str, str],
    dtype: torch.dtype,
) -> list[TensorSpec]:
    """Return a ``TensorSpec`` for each of a model's tensors, and for each alias.

    Args:
        records: The manifest's records of the tensors.
        aliases: Maps each alias of a tied tensor to the tensor's first name.
        dtype: Dtype of floating-point tensors.
    """
    return [
        TensorSpec(key=key, dtype=getattr(torch, record.dtype), shape=record.shape).cast(dtype)
        for record in records
        for key in all_names(record.name, aliases)
    ]


def untrained(engine: Engine) -> Named:
    """Yield frozen parameters and buffers one at a time. Collective at stage 3."""
    for name, parameter in untrained_parameters(engine).items():
        yield name, whole_parameter(parameter)
    yield from persistent_buffers(engine.module).items()


def stored_tensors(
    reader: CheckpointReader,
    manifest: Manifest,
    shadow: str | None,
    frozen: ModelFolderReader | None,
) -> Named:
    """Yield the tensors of a checkpoint's model.

    Args:
        reader: Reader of the checkpoint.
        manifest: Manifest of the checkpoint.
        shadow: Name of the EMA shadow to yield instead of the trained weights; ``None`` yields the
            trained weights.
        frozen: Source of the frozen parameters.

    Raises:
        CheckpointMismatchError: Some parameters were not trained, and ``frozen`` lacks them.
    """
    _check_frozen(manifest, frozen)
    subject = WEIGHTS if shadow is None else Subject(kind="shadow", of=shadow)
    for parameter in manifest.parameters:
        averaged = parameter.name in reader.of(subject).tensors
        yield parameter.name, reader.tensor(subject if averaged else WEIGHTS, parameter.name)
    if frozen is not None:
        for record in manifest.frozen:
            yield record.name, frozen.tensor(record.name)
    buffers = reader.buffers(0) if manifest.buffers else {}
    for record in manifest.buffers:
        yield record.name, buffers[record.name]


def _check_frozen(manifest: Manifest, base: ModelFolderReader | None) -> None:
    for record in manifest.frozen:
        stored = None if base is None else base.tensors.get(record.name)
        if stored is None or stored.shape != record.shape:
            raise CheckpointMismatchError(
                "was not trained, so it is not in the checkpoint"
                + (", and no base was given" if base is None else f", and not in {base.path}"),
                "set base= to the model folder that training started from",
                record.name,
                record.shape,
            )
