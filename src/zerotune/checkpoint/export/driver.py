"""Steps common to all exports: all ranks gather tensors, and rank 0 writes and verifies files."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import attrs
import torch

from zerotune._util.files import sync, write_synced
from zerotune.backend.distributed import together
from zerotune.checkpoint.folders import checked_path
from zerotune.checkpoint.manifest import FileRecord
from zerotune.checkpoint.marks import Mark
from zerotune.checkpoint.staging import ExportStaging, check_space
from zerotune.checkpoint.tensors import (
    EXPORT,
    TensorFile,
    TensorSpec,
    TensorWriter,
    shard_name,
    split,
)
from zerotune.errors import InvalidValueError

if TYPE_CHECKING:
    from zerotune.backend.engine import Engine
    from zerotune.backend.fragments import Fragment
    from zerotune.backend.master_weights import MasterWeights

SHARD_SIZE: Final = 10 * 2**30
"""Maximum bytes of tensor data per file, as in diffusers."""

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Named = Iterator[tuple[str, torch.Tensor]]


# -- All ranks.


class Gatherable(Protocol):
    """Protocol for sources of full tensors, such as master weights or an EMA shadow."""

    def gather(self) -> Named:
        """Yield the name and the full tensor of every trained parameter. Collective."""
        ...


class Draft(Protocol[T_co]):
    """Protocol for an unfinished export on rank 0."""

    def append(self, name: str, tensor: torch.Tensor, *, trained: bool) -> None:
        """Write a tensor; trained tensors must come before all others.

        Args:
            name: Name of the tensor in the model.
            tensor: The full tensor.
            trained: Whether the tensor is a trained parameter.
        """
        ...

    def publish(self) -> T_co:
        """Verify the written files, then rename them to their final names."""
        ...

    def abandon(self) -> None:
        """Delete the temporary files that do not have their final names yet."""
        ...


def meet(
    engine: Engine,
    path: str | os.PathLike[str],
    call: str,
    *arguments: object,
    weights: Gatherable | str | None,
    timeout_s: float | None,
    purpose: str = "exporting to",
) -> Gatherable:
    """Check that all ranks pass the same arguments, and return the weights to export.

    Collective.

    Args:
        engine: Engine to export.
        path: Path of the export.
        call: Name of the calling function, for error messages.
        arguments: Other arguments that must be equal on all ranks.
        weights: As in ``export_model``.
        timeout_s: Timeout in seconds; defaults to the group's timeout.
        purpose: Description of the operation, such as ``"exporting to"``, for error messages.
    """
    if not hasattr(engine, "master_weights"):
        raise InvalidValueError(
            "is not an engine, but under ZeRO only the engine can provide the full weights",
            "call trainer.export(PATH), or pass engine=trainer.engine or the result of "
            "zerotune.prepare",
            "engine",
            type(engine).__name__,
        )
    label = weights if isinstance(weights, str) or weights is None else type(weights).__name__
    engine.group.barrier(f"{purpose} {os.fspath(path)}", timeout_s=timeout_s)
    engine.group.agree((os.fspath(path), label, *map(str, arguments)), call)
    if weights is None or weights == "trained":
        return _trained(engine)
    emas = list(engine.master_weights.emas)
    named = [ema for ema in emas if ema.name == weights]
    if len(named) == 1:
        weights = named[0]
    if not isinstance(weights, str) and hasattr(weights, "gather"):
        if hasattr(weights, "check_stepped"):
            weights.check_stepped()
        return weights
    names = ("trained", *sorted({ema.name for ema in emas}))
    raise InvalidValueError(
        f"{len(named)} EMAs with this name are attached to the engine"
        if named
        else "no EMA with this name is attached to the engine",
        f"use one of {', '.join(map(repr, names))}, or pass an attached EMAShadow",
        "weights",
        label,
    )


def _trained(engine: Engine) -> Gatherable:
    """Return an engine's weights, or the average that a schedule-free optimizer makes of them."""
    choice = engine.plan.optimizer
    if choice.name != "AdamWScheduleFree":
        return engine.master_weights
    weights = engine.master_weights
    betas = dict.fromkeys(weights.parameters, choice.params["betas"])
    for group in choice.groups:
        betas |= dict.fromkeys(group.parameters, group.params.get("betas", choice.params["betas"]))
    return _Averaged(weights=weights, betas=betas)


@attrs.frozen(kw_only=True)
class _Averaged:
    """The weights of ``AdamWScheduleFree.eval()``, computed without changing those in training."""

    _weights: MasterWeights = attrs.field(alias="weights")
    _betas: Mapping[str, Sequence[float]] = attrs.field(alias="betas")

    def gather(self) -> Named:
        return self._weights.gather(self._average)

    def _average(self, fragment: Fragment) -> torch.Tensor:
        latest = fragment.states.get("z", fragment.value)
        return fragment.value.lerp(latest, 1 - 1 / self._betas[fragment.address.name][0])


def export_together(
    engine: Engine,
    purpose: str,
    *,
    begin: Callable[[], Draft[T]],
    weights: Gatherable,
    others: Iterable[tuple[str, torch.Tensor]] = (),
) -> T:
    """Gather tensors on all ranks and write them on rank 0. Collective.

    Args:
        engine: Engine to export.
        purpose: Description of the operation, for error messages.
        begin: Called on rank 0 to start the export.
        weights: Source of the trained parameters.
        others: Untrained tensors by name: frozen parameters and buffers, or the base weights of a
            merge.

    Returns:
        The result of rank 0's export, returned on every rank.
    """
    drafts: list[Draft[T]] = []
    failures: list[Exception] = []

    def open_draft() -> None:
        if engine.group.is_main:
            drafts.append(begin())

    def publish() -> list[T]:
        if failures:
            raise failures[0]
        return [draft.publish() for draft in drafts]

    together(engine.group, f"begin {purpose}", open_draft)
    try:
        trained = ((*named, True) for named in weights.gather())
        for name, tensor, is_trained in chain(trained, ((*named, False) for named in others)):
            # After rank 0's disk fails, keep gathering, because the other ranks wait for rank 0.
            for draft in drafts if not failures else ():
                try:
                    draft.append(name, tensor, trained=is_trained)
                except Exception as error:  # noqa: BLE001 - raised by publish, on every rank
                    failures.append(error)
        return together(engine.group, f"finish {purpose}", publish)[0][0]
    finally:
        for draft in drafts:
            draft.abandon()


# -- Rank 0.


@attrs.frozen(kw_only=True)
class Whole:
    """A pipeline folder that will contain an exported model folder."""

    part: str
    """Name of the part."""
    others: Mapping[str, str]
    """Maps the relative path of each other file in the pipeline folder to its SHA-256 (hex)."""


class ExportWriter:
    """Writes tensors and text files into a folder, or tensors into a single file.

    An earlier export is replaced only when the new one is on disk and verified. Files in the folder
    that do not belong to the earlier export are kept.

    Args:
        path: Path of the folder or of the single file.
        stem: Base name of the tensor files in the folder; ``None`` for a single file.
        specs: All tensors to write.
        texts: Contents of additional files in the folder, by file name.
        metadata: Additional metadata for the file headers.
        aliases: Maps each alias of a tied tensor to the tensor's first name.
        shard_size: Maximum bytes of tensor data per file; by default all tensors are in one file.
        whole: Pipeline folder that will contain the export.

    Attributes:
        records: Records of the tensor files; empty before ``publish``.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        stem: str | None,
        specs: Iterable[TensorSpec],
        texts: Mapping[str, bytes] | None = None,
        metadata: Mapping[str, str] | None = None,
        aliases: Mapping[str, str] | None = None,
        shard_size: int | None = None,
        whole: Whole | None = None,
    ) -> None:
        self.path, self.records = checked_path(path), tuple[FileRecord, ...]()
        self._aliases = aliases or {}
        self._single, self._texts = stem is None, dict(texts or {})
        shards = split(specs, shard_size) if stem else [list(specs)]
        count = max(1, len(shards))
        names = [shard_name(stem or "", i, count) for i in range(1, count + 1)]
        if count == 1:
            names = [f"{stem}.safetensors" if stem else self.path.name]
        else:
            weights = {
                spec.key: name for name, shard in zip(names, shards, strict=True) for spec in shard
            }
            total = sum(spec.nbytes for shard in shards for spec in shard)
            self._texts[f"{stem}.safetensors.index.json"] = json_text(
                {"metadata": {"total_size": total}, "weight_map": weights}
            )
        header = {"format": "pt", **(metadata or {}), **self._mark(names, whole).metadata}
        self._files = [
            TensorFile.of(name, EXPORT, shard, metadata=header)
            for name, shard in zip(names, shards or [[]], strict=True)
        ]
        self._staging = ExportStaging(self.path)
        self._writer = TensorWriter(self._staging.path, self._files)
        with ExitStack() as undo:
            undo.callback(self.abandon)
            check_space(self._staging.path, sum(file.nbytes for file in self._files))
            for file in self._files:
                file.create(self._staging.path)
            undo.pop_all()

    def append(self, name: str, tensor: torch.Tensor, *, trained: bool = False) -> None:  # noqa: ARG002
        """Cast a tensor to the export's dtype, and write it under each of its names."""
        for key in all_names(name, self._aliases):
            self._writer.write(key, tensor)

    def publish(self) -> Path:
        """Compare the files on disk with the written data, then give them their final names."""
        self.records = self._writer.confirm(self._files, self._writer.written)
        self._writer.close()
        if self._single:
            (self._staging.path / self.path.name).rename(self.path)
            sync(self.path.parent)
            self._staging.abandon()
        else:
            for name, content in self._texts.items():
                write_synced(self._staging.path / name, content)
            self._staging.publish()
        return self.path

    def abandon(self) -> None:
        """Delete the temporary files that do not have their final names yet."""
        self._writer.close()
        self._staging.abandon()

    def write(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Path:
        """Write all tensors and publish the files; a failure leaves no files behind.

        Args:
            tensors: Full tensors by name.
        """
        try:
            for name, tensor in tensors:
                self.append(name, tensor)
            return self.publish()
        finally:
            self.abandon()

    def _mark(self, names: Sequence[str], whole: Whole | None) -> Mark:
        part = "" if whole is None else f"{whole.part}/"
        texts = {n: hashlib.sha256(content).hexdigest() for n, content in self._texts.items()}
        files = {**dict.fromkeys(names), **texts}
        others = {} if whole is None else whole.others
        return Mark(files={**{f"{part}{name}": files[name] for name in files}, **others})


def all_names(name: str, aliases: Mapping[str, str]) -> list[str]:
    """Return all names of a tensor: its first name, then its aliases."""
    return [name, *(alias for alias, first in aliases.items() if first == name)]


def json_text(content: Mapping[str, Any]) -> bytes:
    """Format data as indented JSON with sorted keys, as diffusers and peft do."""
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
