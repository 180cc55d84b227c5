# ruff: noqa: RUF009  (`setting` returns attrs.field, as RUF009 cannot see)
"""A training run as a file: model, data, plan, adapters, EMA, validation and export.

``zerotune train run.yaml`` reads one; every field is an argument of the objects that a script
would create, and ``examples/finetune.py`` is that script.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, cast

import attrs

import zerotune
from zerotune._util.text import parse_size
from zerotune.decisions import Decision, Log, raise_all
from zerotune.errors import UNSET, InvalidValueError, PlanFileError, ZeroTuneError
from zerotune.plan.context import UPDATES, Streaming, UpdateName
from zerotune.plan.facts import ModelFacts
from zerotune.plan.families import as_facts, family_names
from zerotune.plan.plan import Advice, DeepSpeedPlan
from zerotune.plan.section import (
    Nested,
    Section,
    modelled,
    put_setting,
    read_section,
    setting,
    value_at,
)
from zerotune.plan.source import key_lines, parse_file, parse_yaml, read_text
from zerotune.plan.values import (
    Anything,
    Boolean,
    Choice,
    Free,
    Integer,
    Kind,
    Number,
    Reading,
    Text,
)

DEFAULT_RANK: Final = 16
DEFAULT_SIDE: Final = 1024
_WHOLE = Integer(minimum=1, auto=False)
_SHARE = Number(maximum=1.0, auto=False)
_FLAG = Boolean(auto=False)


@attrs.frozen
class Texts(Kind):
    """A list of texts."""

    def _read(self, value: Any, key: str) -> Reading:
        listed = [value] if isinstance(value, str) else value
        if (
            not isinstance(listed, list)
            or not listed
            or not all(isinstance(v, str) for v in listed)
        ):
            raise self._refused(value, key, "must be a list of texts", 'write ["…", "…"]')
        return listed, None


@attrs.frozen
class Size(Kind):
    """A size of memory, in bytes or as text."""

    def _read(self, value: Any, key: str) -> Reading:
        return parse_size(value, key=key), None


@attrs.frozen(kw_only=True)
class Streamed(Section):
    """``streamed``: options for streaming weights, as in ``zerotune.plan.Streaming``."""

    units: list[str] | None = setting(Texts())
    """Classes or dotted names of the modules that are each streamed as one unit. Default: the
    model's repeated blocks."""
    window: int | None = setting(Integer(minimum=2, auto=False))
    """Device memory for units, as a multiple of the size of the largest unit. Default: 3."""
    memory: int | None = setting(Size())
    """Device memory for units, such as 6GiB; only without window."""
    split_masters: bool | None = setting(_FLAG)
    """Whether each master weight is stored as the bf16 weight and 16 bits. Default: false."""
    gradient_buffers: int | None = setting(_WHOLE)
    """Units whose gradients may be in host memory at the same time, without clipping and
    accumulation. Default: 6."""


@attrs.frozen
class SwitchOr(Kind):
    """True, false, or the options of ``Streaming``."""

    def check(self, value: Any, key: str) -> None:
        """Accept a switch or options."""
        if not isinstance(value, Streaming):
            _FLAG.check(value, key)

    def read_into(self, log: Log, value: Any, key: str) -> Any:
        """Read a switch or options, and record every change to them."""
        if not isinstance(value, Mapping):
            return _FLAG.read_into(log, value, key)
        section = Nested(Streamed).read_into(log, value, key)
        if section.window is not None and section.memory is not None:
            reason = f"has no effect beside {key}.memory"
            error = InvalidValueError(reason, "remove one of them", f"{key}.window", section.window)
            log.refuse(error)
        return Streaming(**section.to_dict())


@attrs.frozen(kw_only=True)
class Data(Section):
    """``data``: the images, and how they are cropped."""

    folder: str | None = setting(Text())
    """Folder of images with captions in text files (cat.png, cat.txt) or in metadata.jsonl."""
    resolution: int | None = setting(_WHOLE)
    """Side in pixels of a square image; others get the nearest ratio of the same area. Default:
    1024."""
    step: int | None = setting(_WHOLE)
    """Sides of images are multiples of this many pixels. Default: 64, or a quarter of the side."""
    caption_dropout: float | None = setting(_SHARE)
    """Share of captions that are dropped for classifier-free guidance. Default: 0.1."""


@attrs.frozen(kw_only=True)
class Adapters(Section):
    """``adapters``: LoRA adapters instead of all weights."""

    rank: int | None = setting(_WHOLE)
    """Rank of each adapter."""
    base_dtype: str | None = setting(Choice(choices=("bf16", "nf4", "fp4", "int8")))
    """Dtype of the frozen weights, quantized with bitsandbytes unless it is bf16. Default: bf16."""
    targets: list[str] | None = setting(Texts())
    """Names of the layers to adapt. Default: the family's attention projections."""

    @property
    def storage(self) -> str | None:
        """Quantization of the frozen weights; ``None`` for bf16."""
        return None if self.base_dtype == "bf16" else self.base_dtype


@attrs.frozen(kw_only=True)
class Checkpoints(Section):
    """``checkpoints``: when the run is saved."""

    every: int | None = setting(_WHOLE)
    """Optimizer steps between checkpoints. Default: a quarter of the run."""
    keep: int | None = setting(_WHOLE)
    """Number of checkpoints to keep. Default: 2."""


@attrs.frozen(kw_only=True)
class Validation(Section):
    """``validation``: grids of images that are sampled during the run."""

    prompts: list[str] | None = setting(Texts())
    """Prompts of the images."""
    every: int | None = setting(_WHOLE)
    """Optimizer steps between grids. Default: as checkpoints."""
    steps: int | None = setting(_WHOLE)
    """Sampling steps. Default: 30."""
    guidance_scale: float | None = setting(Number(auto=False))
    """Scale of classifier-free guidance. Default: 5."""


@attrs.frozen(kw_only=True)
class Export(Section):
    """``export``: what is written at the end."""

    dtype: str | None = setting(Choice(choices=("bf16", "fp16", "fp32")))
    """Dtype of the weights. Default: fp32 for adapters, bf16 for a pipeline."""
    stopped: bool | None = setting(_FLAG)
    """Whether a run that was stopped is exported too. Default: false."""


@attrs.frozen(kw_only=True)
class RunFile(Section):
    """A training run; ``RunFile.load`` reads one, and ``train`` runs it."""

    model: str | None = setting(Text())
    """Folder of a pipeline (beside the file), or its id on the hub."""
    family: str | None = setting(Text())
    """Family of the model, if the pipeline's class does not imply it: a name, or module:Class."""
    data: Data | None = setting(Nested(Data))
    plan: Any = setting(Anything())
    """DeepSpeed configuration: a path, the configuration itself, or "advise" for the fastest plan
    that fits this machine. Default: advise."""
    overrides: dict[str, Any] | None = setting(Free())
    """Settings of the plan to replace, such as optimizer.params.lr."""
    adapters: Adapters | None = setting(Nested(Adapters))
    ema: float | None = setting(Number(below=1.0, auto=False))
    """Decay of an EMA, which validation and export then use. Default: no EMA."""
    steps: int | None = setting(_WHOLE)
    """Total number of optimizer steps, including those before a resume."""
    seed: int | None = setting(Integer(auto=False))
    """Seed of data order, noise and time steps. Default: 0."""
    output: str | None = setting(Text())
    """Folder for cache, checkpoints, validation and export. Default: the file's own folder."""
    gradient_checkpointing: bool | str | None = setting(Boolean())
    """Whether blocks are recomputed in the backward pass. Default: as advised, or if needed."""
    activation_offload: bool | None = setting(_FLAG)
    """Whether host memory stores the inputs of recomputed blocks. Default: as advised."""
    streamed: bool | Streaming | None = setting(SwitchOr())
    """Whether weights stay in host memory and are copied to the device while they are used: true,
    false, or options. Default: as advised, or if they do not stay on the device otherwise."""
    update: str | None = setting(Choice(choices=UPDATES))
    """Where weights in host memory are updated: host, or device with fp32 master weights, with
    split ones (device:split) or with weights rounded at random (device:stochastic). Default: as
    advised, else host."""
    checkpoints: Checkpoints | None = setting(Nested(Checkpoints))
    validation: Validation | None = setting(Nested(Validation))
    export: Export | None = setting(Nested(Export))
    folder: Path = attrs.field(factory=Path)
    """Folder of the file, from which its paths start."""
    decisions: tuple[Decision, ...] = ()
    """How values were read that are written otherwise."""
    written: Mapping[str, str] = attrs.field(factory=dict, eq=False, repr=False)
    """Settings by their path, each as errors name it: with the file and the line."""

    required: ClassVar[tuple[str, ...]] = ("model", "data.folder", "steps")

    @classmethod
    def meant(cls, name: str) -> tuple[str, ...]:
        """Return the paths that a user who writes the unknown key ``name`` often means."""
        return {
            "lr": ("overrides",),
            "learning_rate": ("overrides",),
            "batch_size": ("overrides",),
            "lora": ("adapters.rank",),
            "rank": ("adapters.rank",),
            "resolution": ("data.resolution",),
            "prompts": ("validation.prompts",),
        }.get(name, ())

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, overrides: Sequence[str] = ()) -> RunFile:
        """Read a run from a YAML, JSON or TOML file.

        Args:
            path: The file. Paths in it start from its folder.
            overrides: Replaced settings, each ``"key.path=value"`` with a YAML value.

        Raises:
            PlanFileError: The file cannot be read.
            ZeroTuneError: Some settings are wrong; the error contains every mistake, with its line.
        """
        file = Path(path)
        text = read_text(file)
        content = _parsed(text, file)
        log = Log()
        for each in overrides:
            log.attempt(_override, content, each)
        run = log.outcome(lambda: read_section(cls, content, key="", log=log))
        for key in cls.required:
            inside = any(key.startswith(f"{each.key}.") for each in log.mistakes)
            if not inside and value_at(content, key) in (UNSET, None):
                log.refuse(InvalidValueError("is missing", "add it to the file", key))
        if run is not None and run.is_advised:
            _check_advised(run, log)
        written = {key: f"{file}, line {line}: {key}" for key, line in _lines(text, file).items()}
        for replaced in (each.partition("=")[0].strip() for each in overrides):
            kept = {k: v for k, v in written.items() if not f"{k}.".startswith(f"{replaced}.")}
            written = {**kept, replaced: f"--set {replaced}"}
        if run is None or log.mistakes:
            _raise_called(log.mistakes, [each.key or "" for each in log.mistakes], written)
            raise PlanFileError("contains no settings", key="file", value=str(file))
        told, folder = tuple(log.decisions), file.absolute().parent
        return attrs.evolve(run, folder=folder, decisions=told, written=written)

    @contextlib.contextmanager
    def naming(self, key: str, argument: str) -> Iterator[None]:
        """Let errors about an argument name the setting that it comes from, with its line.

        Args:
            key: Path of the setting.
            argument: Key of the errors.
        """
        try:
            yield
        except ZeroTuneError as error:
            if error.key != argument:
                raise
            raise error.called(self.written.get(key, key)) from error

    @contextlib.contextmanager
    def below(self, section: str) -> Iterator[None]:
        """Let errors about settings of a section name these as the file does, with their lines.

        Args:
            section: Name of the section.
        """
        try:
            yield
        except ZeroTuneError as error:
            names = [f"{section}.{each.written or each.key}" for each in error.each()]
            _raise_called(error.each(), names, self.written)

    @property
    def place(self) -> Path:
        """Folder for everything that the run writes."""
        return self.folder / (self.output or ".")

    def source(self) -> str:
        """Return the model's folder, or its id on the hub."""
        beside = self.folder / str(self.model)
        return str(beside) if beside.exists() else str(self.model)

    @property
    def is_advised(self) -> bool:
        """Whether the plan is chosen for the machine."""
        return self.plan is None or self.plan == "advise"

    def chosen_plan(self) -> DeepSpeedPlan | Advice:
        """Return the plan that is written, named or advised for this machine."""
        if self.is_advised:
            return self._advice()
        if isinstance(self.plan, Mapping):
            with self.below("plan"):
                plan = DeepSpeedPlan.from_dict(self.plan, source="plan")
        else:
            with self.naming("plan", "file"):
                plan = DeepSpeedPlan.load(self.folder / str(self.plan))
        with self.below("overrides"):
            return plan.with_overrides(self.overrides) if self.overrides else plan

    def _advice(self) -> Advice:
        model = self.facts()
        if model is None:
            raise InvalidValueError(
                "is needed to advise a plan for a model that is not in a folder here",
                f"write one of {', '.join(family_names())}, or name a plan",
                "family",
                self.family,
            )
        rate = 1e-5 if self.adapters is None else 1e-4
        return DeepSpeedPlan.advise(
            model,
            resolution=(self.data and self.data.resolution) or DEFAULT_SIDE,
            optimizer={"type": "AdamW", "params": {"lr": rate, "weight_decay": 0.01}},
            ema="none" if self.ema is None else "host",
            streamed=self.streamed is None,
            update=cast(UpdateName | None, self.update),
        )

    def facts(self) -> ModelFacts | None:
        """Return facts about the model and its adapters; ``None`` if it is not in a folder here."""
        folder, adapters = self.model_folder(), self.adapters
        if folder is None and self.family not in family_names():
            return None
        found = as_facts(self.family) if folder is None else zerotune.model_facts(folder)
        if adapters is None:
            return found
        with self.naming("adapters.targets", "lora_targets"):
            return found.with_adapters(
                adapters.rank or DEFAULT_RANK,
                targets=adapters.targets,
                base_dtype=adapters.storage,
            )

    def model_folder(self) -> Path | None:
        """Return the folder of the trained model; ``None`` if the pipeline is not a folder here."""
        parts = (Path(self.source(), part) for part in ("unet", "transformer"))
        return next((part for part in parts if (part / "config.json").is_file()), None)


# -- Reading the file.


def _parsed(text: str, path: Path) -> dict[str, Any]:
    if path.suffix.lower() == ".toml":
        try:
            import tomllib  # type: ignore[import-not-found,unused-ignore]
        except ImportError:
            raise PlanFileError(
                "is TOML, which needs Python 3.11", "write YAML or JSON", "file", str(path)
            ) from None
        try:
            return dict(tomllib.loads(text))
        except tomllib.TOMLDecodeError as error:
            raise PlanFileError(
                f"is not TOML: {error}", "correct that line", "file", str(path)
            ) from None
    content, _ = parse_file(text, path)
    if not isinstance(content, Mapping):
        raise PlanFileError(
            "contains no settings", "write model, data and steps", "file", str(path)
        )
    return dict(content)


def _check_advised(run: RunFile, log: Log) -> None:
    """Refuse what can only be set for a plan of the file."""
    fix = "write the plan: zerotune plan advise … -o plan.json"
    if run.overrides:
        reason = "can only replace settings of a plan that the file names or contains"
        log.refuse(InvalidValueError(reason, fix, "overrides"))
    if run.streamed:
        reason = "can only be true or options for a plan that the file names or contains"
        fix = f"remove it, which lets advise choose; or {fix}"
        log.refuse(InvalidValueError(reason, fix, "streamed"))


def _override(content: dict[str, Any], written: str) -> None:
    path, equals, value = written.partition("=")
    if not equals or not all(path.strip().split(".")):
        raise InvalidValueError(
            "is not a setting and its value",
            "write --set steps=500, or --set data.resolution=768",
            "set",
            written,
        )
    put_setting(content, path.strip(), parse_yaml(value, source=f"--set {written}"))


def _lines(text: str, path: Path) -> Mapping[str, int]:
    if path.suffix.lower() != ".toml":
        return key_lines(text, path)
    found: dict[str, int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), start=1):
        head = line.strip()
        if head.startswith("["):
            section = head.strip("[] ") + "."
            found[section[:-1]] = number
        elif "=" in head:
            found[section + head.partition("=")[0].strip()] = number
    return found


def _raise_called(
    mistakes: Iterable[ZeroTuneError], keys: Iterable[str], written: Mapping[str, str]
) -> None:
    """Raise all mistakes, each with the name that its setting has in the file, if it has one."""
    pairs = zip(mistakes, keys, strict=True)
    raise_all([each.called(written[key]) if key in written else each for each, key in pairs])


def schema(section: type[Section] = RunFile) -> dict[str, Any]:
    """Return the JSON Schema of a section, for editors that complete and check the file.

    Args:
        section: The section; by default the whole file.
    """
    properties = {each.name: _type_of(each.metadata["kind"]) for each in modelled(section)}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _type_of(kind: Kind) -> dict[str, Any]:
    if isinstance(kind, Nested):
        return schema(kind.cls)
    if isinstance(kind, SwitchOr):
        return {"anyOf": [{"type": "boolean"}, schema(Streamed)]}
    if isinstance(kind, Choice):
        return {"enum": list(kind.choices)}
    if isinstance(kind, Number):
        name = "integer" if isinstance(kind, Integer) else "number"
        return {"type": name, "minimum": kind.minimum}
    names = {Boolean: "boolean", Text: "string", Texts: "array", Free: "object"}
    if isinstance(kind, Size):
        return {"type": ["string", "number"]}
    return {"type": names[type(kind)]} if type(kind) in names else {}
