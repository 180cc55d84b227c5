"""``manifest.json``: what a checkpoint holds and how to tell that it is whole."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import attrs

from zerotune.backend.engine import EngineState
from zerotune.errors import CheckpointCorruptError, CheckpointError

MANIFEST: Final = "manifest.json"
FORMAT: Final = "zerotune-checkpoint"
VERSION: Final = 1


def _tuple(values: Iterable[Any]) -> tuple[Any, ...]:
    # JSON has only lists; mypy's attrs plugin cannot see through the type `tuple` as a converter.
    return tuple(values)


@attrs.frozen(kw_only=True)
class FileRecord:
    """A file of the checkpoint."""

    name: str
    """Its name inside the folder."""
    nbytes: int
    sha256: str


@attrs.frozen(kw_only=True)
class FragmentRecord:
    """A part of a parameter, with what the optimizer knows of it."""

    name: str
    """Dotted name of the parameter."""
    start: int
    """First element in the flattened parameter."""
    numel: int
    step: int | None
    """Updates it has seen; ``None`` where the optimizer does not count."""
    states: tuple[str, ...] = attrs.field(converter=_tuple)
    """Optimizer states saved beside its value."""
    scalars: Mapping[str, float] = attrs.field(factory=dict)
    """Single numbers the optimizer keeps for it."""

    @property
    def stop(self) -> int:
        """One past the last element in the flattened parameter."""
        return self.start + self.numel

    @property
    def key(self) -> str:
        """``name[start:stop]``, as in the tensor files."""
        return f"{self.name}[{self.start}:{self.stop}]"


@attrs.frozen(kw_only=True)
class RankRecord:
    """What one rank wrote."""

    rank: int
    file: FileRecord
    fragments: tuple[FragmentRecord, ...] = attrs.field(converter=_tuple)


@attrs.frozen(kw_only=True)
class ParameterRecord:
    """A parameter of the model."""

    name: str
    shape: tuple[int, ...] = attrs.field(converter=_tuple)
    """Full, unpartitioned shape."""
    dtype: str = "float32"
    """Dtype of the saved master weights."""


@attrs.frozen(kw_only=True)
class PlanRecord:
    """The plan a checkpoint was saved under, as far as loading must know it."""

    engine: str
    """``"deepspeed"`` or ``"plain"``."""
    stage: int
    precision: str
    offload_optimizer: str
    offload_param: str
    gradient_accumulation_steps: int
    digest: str
    """``ResolvedPlan.digest()``."""
    config: Mapping[str, Any]
    """The rendered DeepSpeed configuration."""
    optimizer: Mapping[str, Any]
    """The ``OptimizerChoice``."""
    scheduler: Mapping[str, Any] | None
    """The ``SchedulerChoice``."""

    @property
    def sharding(self) -> dict[str, Any]:
        """What decides which rank holds which part, in which form; by name of the setting."""
        return {
            "engine": self.engine,
            "stage": self.stage,
            "precision": self.precision,
            "offload_optimizer": self.offload_optimizer,
            "offload_param": self.offload_param,
            "optimizer": self.optimizer["name"],
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
        }


@attrs.frozen(kw_only=True)
class Manifest:
    """Everything about a checkpoint but the tensors."""

    created: str
    """UTC time, ISO 8601."""
    versions: Mapping[str, str]
    """Versions of zerotune, torch, deepspeed, …"""
    world_size: int
    replicated: bool
    """Every rank held all weights, and rank 0 wrote them."""
    plan: PlanRecord
    state: EngineState
    parameters: tuple[ParameterRecord, ...] = attrs.field(converter=_tuple)
    """The trainable parameters, in the order of the master weights."""
    buffers: tuple[ParameterRecord, ...] = attrs.field(converter=_tuple)
    """The model's persistent buffers; every rank wrote its own."""
    ranks: tuple[RankRecord, ...] = attrs.field(converter=_tuple)
    shadows: tuple[str, ...] = attrs.field(converter=_tuple)
    """Names of the saved shadows."""
    rng: bool
    """Whether the state of the random number generators was saved."""
    extra: Mapping[str, Any]
    """What the caller wanted to keep."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensor files."""
        return sum(record.file.nbytes for record in self.ranks)

    def to_json(self) -> str:
        """One JSON object, indented for a human reader, that carries its own hash."""
        content = {"format": FORMAT, "version": VERSION, **attrs.asdict(self)}
        return json.dumps({**content, "sha256": _digest(content)}, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str, *, source: str = MANIFEST) -> Manifest:
        """Read what ``to_json`` wrote.

        Args:
            text: The manifest.
            source: Its file, for messages.

        Raises:
            CheckpointCorruptError: It is not a manifest, or was altered.
            CheckpointError: A newer zerotune wrote it.
        """
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _corrupt(source, f"is not JSON ({error})") from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise _corrupt(source, "is not the manifest of a zerotune checkpoint")
        if content.get("version") != VERSION:
            raise CheckpointError(
                f"is of format version {content.get('version')!r}; this zerotune reads {VERSION}",
                key=source,
                fix="install the zerotune that wrote it, or a newer one",
            )
        saved = content.pop("sha256", None)
        if saved != _digest(content):
            raise _corrupt(source, "was altered after it was written (its hash differs)")
        try:
            return _build(content)
        except (KeyError, TypeError, ValueError) as error:
            raise _corrupt(source, f"lacks something ({type(error).__name__}: {error})") from None

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a checkpoint folder.

        Raises:
            CheckpointCorruptError: It is missing, unreadable or altered.
            CheckpointError: A newer zerotune wrote it.
        """
        path = folder / MANIFEST
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise _corrupt(str(path), f"cannot be read ({error})") from error
        return cls.from_json(text, source=str(path))


def _digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _corrupt(source: str, reason: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(reason, key=source, fix="use another checkpoint")


def _build(content: dict[str, Any]) -> Manifest:
    del content["format"], content["version"]
    return Manifest(
        **{
            **content,
            "plan": PlanRecord(**content["plan"]),
            "state": EngineState(**content["state"]),
            "parameters": [ParameterRecord(**record) for record in content["parameters"]],
            "buffers": [ParameterRecord(**record) for record in content["buffers"]],
            "ranks": [_rank(record) for record in content["ranks"]],
        }
    )


def _rank(record: Mapping[str, Any]) -> RankRecord:
    file = FileRecord(**record["file"])
    if Path(file.name).name != file.name or file.name in ("", ".", ".."):
        raise ValueError(f"{file.name!r} is not a plain file name")
    return RankRecord(
        rank=record["rank"],
        file=file,
        fragments=[FragmentRecord(**fragment) for fragment in record["fragments"]],
    )
