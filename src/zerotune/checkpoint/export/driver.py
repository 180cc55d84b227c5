"""The way of every export: all ranks gather, rank 0 writes, reads back, and gives it its name."""

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
from zerotune.checkpoint.folders import ExportStaging, Mark, check_space, checked_path
from zerotune.checkpoint.manifest import FileRecord
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

SHARD_SIZE: Final = 10 * 2**30
"""Most bytes of tensors in one file, as diffusers itself splits them."""

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Named = Iterator[tuple[str, torch.Tensor]]


# -- All ranks.


class Gatherable(Protocol):
    """What gives full tensors by parameter name: master weights, or an EMA shadow."""

    def gather(self) -> Named:
        """Name and full tensor of every trained parameter. Collective."""
        ...


class Draft(Protocol[T_co]):
    """An export as rank 0 writes it."""

    def append(self, name: str, tensor: torch.Tensor, *, trained: bool) -> None:
        """Write a tensor, by its name in the model; the trained ones come first."""
        ...

    def publish(self) -> T_co:
        """Read back what was written and give it its name."""
        ...

    def abandon(self) -> None:
        """Remove what has not got its name."""
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
    """Wait for all ranks, with the same arguments. Collective.

    Args:
        engine: What is exported.
        path: What will be written.
        call: The function, for messages.
        arguments: What else ranks must agree on.
        weights: As in ``export_model``.
        timeout_s: Seconds to wait; the group's timeout when not given.
        purpose: What is begun, for messages.
    """
    if not hasattr(engine, "master_weights"):
        raise InvalidValueError(
            "is no engine: weights that ZeRO partitions are whole nowhere else",
            key="engine",
            value=type(engine).__name__,
            fix="write trainer.export(PATH), or engine=trainer.engine (what zerotune.prepare gave)",
        )
    label = weights if isinstance(weights, str) or weights is None else type(weights).__name__
    engine.group.barrier(f"{purpose} {os.fspath(path)}", timeout_s=timeout_s)
    engine.group.agree((os.fspath(path), label, *map(str, arguments)), call)
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
        value=label,
        fix=f"write one of {', '.join(map(repr, names))}, or pass an attached EMAShadow",
    )


def export_together(
    engine: Engine,
    purpose: str,
    *,
    begin: Callable[[], Draft[T]],
    weights: Gatherable,
    others: Iterable[tuple[str, torch.Tensor]] = (),
) -> T:
    """Gather tensors on all ranks and write them on rank 0. Collective."""
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
            # When the disk of rank 0 fails, the others still wait for that rank in the gathering.
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
    """A pipeline's folder that a model folder becomes a part of."""

    part: str
    """Name of the part."""
    others: Mapping[str, str]
    """SHA-256 (hex) of the files beside it, by their path from the pipeline's folder."""


class ExportWriter:
    """Writes tensors into a folder, with texts beside them, or into a single file.

    What an earlier export wrote there is replaced when all of the new one is on the disk and was
    read back; files of others in its folder stay.

    Args:
        path: The folder or file.
        stem: What the files of tensors in the folder are called; ``None``: ``path`` is the file.
        specs: Every tensor.
        texts: Further files of the folder, by name.
        metadata: What the headers say besides.
        aliases: Further names of tensors, and the first name of each.
        shard_size: Most bytes of tensors in a file; all in one when not given.
        whole: What it becomes a part of.

    Attributes:
        records: The files of tensors, once it is published.
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
        """Write a tensor under each of its names, cast to what was announced."""
        for key in all_names(name, self._aliases):
            self._writer.write(key, tensor)

    def append_part(self, name: str, part: torch.Tensor, *, start: int) -> None:
        """Write a part of a tensor, from an element of the flattened tensor on."""
        self._writer.write(name, part, start=start)

    def publish(self, *, check: Callable[[Path], None] | None = None) -> Path:
        """Compare what is on the disk with what was written, then give it its name.

        Args:
            check: Looks at a single file before it gets its name.
        """
        self.records = self._writer.confirm(self._files, self._writer.written)
        self._writer.close()
        if check is not None:
            check(self._staging.path / self.path.name)
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
        """Remove what has not got its name."""
        self._writer.close()
        self._staging.abandon()

    def write(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Path:
        """Write all tensors and publish; nothing is left when that fails."""
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
    """A tensor's first name, and its further ones."""
    return [name, *(alias for alias, first in aliases.items() if first == name)]


def json_text(content: Mapping[str, Any]) -> bytes:
    """A file of JSON, as diffusers and peft write theirs."""
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
