"""``manifest.json``: contents and integrity of a checkpoint."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Final, Union, get_args, get_origin, get_type_hints

import attrs

from zerotune._util.files import reading_regular
from zerotune._util.text import json_of
from zerotune.backend.engine import EngineState
from zerotune.backend.fragments import StateFormat
from zerotune.backend.optimizers.classes import CODEBOOKS, AdamW8BitStates
from zerotune.errors import CheckpointCorruptError, CheckpointError, shorten

MANIFEST: Final = "manifest.json"
FORMAT: Final = "zerotune-checkpoint"
VERSION: Final = 3
_READABLE: Final = (2, VERSION)
"""Version 2 has no ``formats``: it stores all states in fp32."""
STATE_DTYPES: Final = ("float32", "bfloat16", "uint8")
"""Dtypes of optimizer states that can be saved."""
_PLAIN: Final = (StateFormat(), StateFormat(dtype="bfloat16"))


@attrs.frozen(kw_only=True)
class FileRecord:
    """Name, kind, size and hash of a file in a checkpoint."""

    name: str
    """Name of the file in the checkpoint's folder."""
    kind: str
    """``"weights"``, ``"optimizer"`` or ``"shadow"`` for full tensors named after parameters;
    ``"rank"`` for the data of one rank."""
    of: str
    """Name of the optimizer state or shadow, or the rank; empty for weights."""
    nbytes: int
    sha256: str


@attrs.frozen(kw_only=True)
class TensorRecord:
    """A frozen parameter or a buffer of the model."""

    name: str
    shape: tuple[int, ...] = attrs.field(converter=tuple[Any, ...])
    dtype: str = "float32"


@attrs.frozen(kw_only=True)
class ParameterRecord:
    """A trained parameter with its optimizer data."""

    name: str
    """Dotted name."""
    shape: tuple[int, ...] = attrs.field(converter=tuple[Any, ...])
    """Full, unpartitioned shape."""
    dtype: str = "float32"
    """Dtype of the saved master weights."""
    step: int | None = None
    """Number of updates of this parameter; ``None`` if the optimizer does not count updates."""
    states: tuple[str, ...] = attrs.field(converter=tuple[Any, ...], default=())
    """Names of the parameter's saved optimizer states."""
    scalars: Mapping[str, float] = attrs.field(factory=dict)
    """Scalar values that the optimizer stores for this parameter."""


@attrs.frozen(kw_only=True)
class PlanRecord:
    """Settings of a saved plan, which are compared with the current plan on loading."""

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
        """Settings that determine how weights and optimizer states are partitioned over ranks."""
        names = ("engine", "stage", "precision", "offload_optimizer", "offload_param")
        return {name: getattr(self, name) for name in (*names, "gradient_accumulation_steps")}


@attrs.frozen(kw_only=True)
class Manifest:
    """All data of a checkpoint except the tensors."""

    created: str
    """UTC time, ISO 8601."""
    versions: Mapping[str, str]
    """Versions of zerotune, torch, deepspeed and other packages."""
    origin: str = "save_checkpoint"
    """``save_checkpoint``, or the format from which the checkpoint was converted."""
    world_size: int
    """Number of training processes; each has a rank file."""
    plan: PlanRecord | None
    """Record of the saved plan; ``None`` if the checkpoint contains only weights."""
    state: EngineState
    model: Mapping[str, Any] | None = None
    """The model's configuration, as in diffusers' ``config.json``."""
    parameters: tuple[ParameterRecord, ...] = attrs.field(converter=tuple[Any, ...])
    """The trained parameters, in the order of the master weights."""
    formats: Mapping[str, StateFormat] = attrs.field(factory=dict)
    """Formats of the saved optimizer states, by name; states without an entry are fp32."""
    frozen: tuple[TensorRecord, ...] = attrs.field(converter=tuple[Any, ...], default=())
    """Frozen parameters; their values are not in the checkpoint."""
    aliases: Mapping[str, str] = attrs.field(factory=dict)
    """Maps each additional name of a tied parameter to its saved name."""
    buffers: tuple[TensorRecord, ...] = attrs.field(converter=tuple[Any, ...])
    """The model's persistent buffers; each rank saves its own values."""
    files: tuple[FileRecord, ...] = attrs.field(converter=tuple[Any, ...])
    shadows: tuple[str, ...] = attrs.field(converter=tuple[Any, ...])
    """Names of the saved shadows."""
    rng: bool
    """Whether the state of the random number generators was saved."""
    extra: Mapping[str, Any]
    """The caller's ``extra`` data."""
    not_finite: tuple[str, ...] = attrs.field(converter=tuple[Any, ...], default=())
    """Names of tensors with NaN or infinity, such as ``weights/conv.bias``, and of buffers with
    NaN."""

    @property
    def nbytes(self) -> int:
        """Total size of the tensor files in bytes."""
        return sum(file.nbytes for file in self.files)

    def files_of(self, kind: str, of: str = "") -> tuple[FileRecord, ...]:
        """Return the files that contain the weights, an optimizer state, a shadow or a rank's data.

        Args:
            kind: As in ``FileRecord``.
            of: As in ``FileRecord``.
        """
        return tuple(file for file in self.files if (file.kind, file.of) == (kind, of))

    def format_of(self, state: str) -> StateFormat:
        """Return the format of a saved optimizer state.

        Args:
            state: Name of the state.
        """
        return self.formats.get(state, StateFormat())

    def to_json(self) -> str:
        """Return indented JSON that includes a hash of its content."""
        content = {"format": FORMAT, "version": VERSION, **attrs.asdict(self)}
        return json.dumps(
            {**content, "sha256": _content_digest(content)}, indent=1, allow_nan=False
        )

    @classmethod
    def from_json(cls, text: str, *, source: str = MANIFEST) -> Manifest:
        """Parse the output of ``to_json``.

        Args:
            text: The manifest.
            source: Path of the manifest, for error messages.

        Raises:
            CheckpointCorruptError: The text is not a manifest, or was changed.
            CheckpointError: A newer zerotune wrote the manifest, or the states are codes that this
                version does not read.
        """
        try:
            content = json_of(text, parse_constant=_no_number)
        except ValueError as error:
            raise _damaged_manifest(source, f"is not JSON ({error})") from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise _damaged_manifest(source, "is not the manifest of a zerotune checkpoint")
        if content.get("version") not in _READABLE:
            raise CheckpointError(
                f"has format version {content.get('version')!r}, but this zerotune version reads "
                f"only {' and '.join(map(str, _READABLE))}",
                "install the zerotune version that wrote the manifest, or a newer one",
                source,
            )
        saved = content.pop("sha256", None)
        try:
            if saved != _content_digest(content):
                raise _damaged_manifest(
                    source, "was changed after it was written (its hash differs)"
                )
            del content["format"], content["version"]
            manifest: Manifest = _field_value(Manifest, content, "the manifest")
            manifest._require_known_codes(source)
            manifest._check()
        except (ValueError, RecursionError) as error:
            raise _damaged_manifest(source, f"is not a valid manifest: {error}") from None
        return manifest

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest of the checkpoint ``folder``.

        Raises:
            CheckpointCorruptError: The manifest is missing, unreadable or changed.
            CheckpointError: A newer zerotune wrote the manifest, or the states are codes that this
                version does not read.
        """
        path = folder / MANIFEST
        try:
            with reading_regular(path) as file:
                text = file.read().decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise _damaged_manifest(str(path), f"cannot be read ({error})") from error
        return cls.from_json(text, source=str(path))

    def _check(self) -> None:
        self._check_names()
        records: list[ParameterRecord | TensorRecord] = [*self.parameters, *self.frozen]
        for record in (*records, *self.buffers):
            if len(record.shape) > _MOST_DIMENSIONS or math.prod(record.shape) > _MOST_INTEGER // 8:
                raise ValueError(f"{record.name!r} has an invalid shape")
        for what in ("optimizer", "scheduler"):
            choice = getattr(self.plan, what, None)
            named = choice is None or isinstance(choice.get("name"), str)
            if not named or (choice is not None and not isinstance(choice.get("params"), dict)):
                raise ValueError(f"plan.{what} lacks its name or its params")
        self._check_formats()
        self._check_state()

    def _require_known_codes(self, source: str) -> None:
        unknown = {form.codebook for form in self.formats.values()} - {"", *CODEBOOKS}
        if unknown:
            raise CheckpointError(
                f"has 8-bit moments in codes that this version does not read; it reads "
                f"{' and '.join(CODEBOOKS)}",
                "load it with the zerotune version that wrote it, and save it with optimizer AdamW",
                f"{source}: formats.codebook",
                ", ".join(sorted(unknown)),
            )

    def _check_formats(self) -> None:
        plain = (*_PLAIN, StateFormat(whole=True))
        coded = {name: each for name, each in self.formats.items() if each not in plain}
        if coded and coded != AdamW8BitStates.formats:
            raise ValueError("formats contains an unknown format")
        for record in self.parameters:
            if coded.keys() & set(record.states) not in (set(), coded.keys()):
                raise ValueError(f"{record.name!r} has codes without scales, or scales alone")

    def _check_names(self) -> None:
        for what, names in {
            "files": [file.name for file in self.files],
            "parameters": [record.name for record in self.parameters],
            "buffers": [record.name for record in self.buffers],
            "shadows": list(self.shadows),
            **{f"states of {record.name}": list(record.states) for record in self.parameters},
        }.items():
            if len(set(names)) < len(names):
                raise ValueError(f"{what} contains a name twice")
        for record in self.parameters:
            for name in record.scalars:
                # The optimizer would keep an unknown key in its state for ever.
                if not name.isidentifier() or name in ("step", *record.states):
                    raise ValueError(f"{record.name!r} has the unknown counter {shorten(name)}")
        for file in self.files:
            name = file.name
            plain = Path(name).name == name and name not in ("", ".", "..", MANIFEST)
            if not plain or not name.isprintable():
                raise ValueError(f"{name!r} is not a plain file name")
            if file.kind not in _FILE_KINDS:
                raise ValueError(f"{name} has the unknown kind {shorten(file.kind)}")

    def _check_state(self) -> None:
        if (
            self.state.global_step > _MOST_STEPS
            or self.state.skipped_steps > self.state.global_step
        ):
            raise ValueError("state contains an impossible number of steps")
        position = self.state.scheduler.get(_SCHEDULE_POSITION, 0)
        if type(position) is not int or not -1 - _MOST_STEPS <= position <= _MOST_STEPS:
            raise ValueError(f"state.scheduler.{_SCHEDULE_POSITION} cannot be {shorten(position)}")
        for name, number in self.state.loss_scaler.items():
            _field_value(float | None, float(number) if type(number) is bool else number, name)
            if isinstance(number, (int, float)) and abs(number) > _MOST_INTEGER:
                raise ValueError(f"state.loss_scaler.{name} cannot be {shorten(number)}")
            if name in _SCALES and not (number is not None and number > 0):
                raise ValueError(f"state.loss_scaler.{name} cannot be {shorten(number)}")


def _content_digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _damaged_manifest(source: str, reason: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(reason, "use a different checkpoint", source)


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is not valid JSON")


# -- From JSON of an untrusted source to validated records.


_FILE_KINDS: Final = ("weights", "optimizer", "shadow", "rank")
_SCHEDULE_POSITION: Final = "last_batch_iteration"
_SCALES: Final = ("cur_scale", "scale")
"""Keys of loss scales, which must be above 0."""
_MOST_INTEGER: Final = 2**63 - 1
_MOST_STEPS: Final = 10**9
"""Upper limit of a valid step counter."""
_MOST_DIMENSIONS: Final = 64


def _field_value(hint: Any, value: Any, where: str) -> Any:
    """Convert a JSON value to the type of a field."""
    if hint is Any:
        return value
    if attrs.has(hint):
        return _record_of(hint, value, where)
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return None if value is None else _field_value(inner[0], value, where)
    if origin is tuple and isinstance(value, list):
        return tuple(_field_value(inner[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin in (Mapping, dict) and isinstance(value, dict):
        return {key: _field_value(inner[1], item, f"{where}.{key}") for key, item in value.items()}
    plain = type(value) is hint and hint in (str, bool)
    whole = hint is int and type(value) is int and 0 <= value <= _MOST_INTEGER
    number = hint is float and type(value) in (int, float) and abs(value) <= sys.float_info.max
    if plain or whole or number:
        return value
    raise ValueError(f"{where} cannot be {shorten(value)}")


def _record_of(kind: type[Any], value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{where} cannot be {shorten(value)}")  # noqa: TRY004 - of the file
    fields, hints = attrs.fields_dict(kind), get_type_hints(kind)
    needed = [name for name, field in fields.items() if field.default is attrs.NOTHING]
    if missing := [name for name in needed if name not in value]:
        raise ValueError(f"{where} lacks {missing[0]!r}")
    if unknown := [name for name in value if name not in fields]:
        raise ValueError(
            f"{where} contains {shorten(unknown[0])}, which this zerotune version does not know"
        )
    return kind(**{n: _field_value(hints[n], each, f"{where}.{n}") for n, each in value.items()})
