"""Read plans from dicts, JSON, trainers' files and accelerate's settings; apply overrides."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import attrs

from zerotune._util.text import is_integer
from zerotune.decisions import Decision, Log
from zerotune.errors import InvalidValueError, PlanConflictError, ZeroTuneError
from zerotune.plan import accelerate
from zerotune.plan.keys import PLACES
from zerotune.plan.launch_settings import FILE, IN_BLOCK, INIT_FLAG
from zerotune.plan.section import Nested, Section, join, modelled, put_setting, read_section
from zerotune.plan.sections import PRECISION_SYNONYMS, PRECISIONS, LaunchSection, ZeroSection
from zerotune.plan.settings import Settings, SettingsT, passed_paths, read_launch, with_launch
from zerotune.plan.source import (
    MICRO_KEYS,
    TRAINER_KEYS,
    WRAPPERS,
    YAML_SUFFIXES,
    is_off,
    parse_file,
    parse_json,
    parse_yaml,
    read_named,
    read_text,
    tolerated,
    undashed,
    wrapper_of,
)
from zerotune.plan.spelled import normalise_top_level
from zerotune.plan.trainer import TrainerSettings, flagged_precision, precision_flags
from zerotune.plan.values import AUTO, Choice, Integer, is_auto

_ENOUGH_KEYS = 3
_TRAINERS_OWN: Final = frozenset(
    {
        "base_model_precision",
        "caption_dropout_probability",
        "checkpointing_steps",
        "data_backend_config",
        "gradient_checkpointing",
        "learning_rate",
        "lora_rank",
        "lr_scheduler",
        "max_grad_norm",
        "max_train_steps",
        "mixed_precision",
        "model_family",
        "model_type",
        "num_train_epochs",
        "output_dir",
        "pretrained_model_name_or_path",
        "report_to",
        "resolution",
        "seed",
        "validation_prompt",
    }
)
"""Keys of trainers' files (mainly SimpleTuner's) that no DeepSpeed configuration has."""
_DEEPSPEEDS_OWN: Final = frozenset({"zero_optimization", "bf16", "fp16"})
_ACCELERATES_OWN = ("distributed_type", "compute_environment")

_JSON_KINDS: Final = {type(None): "null", bool: "a boolean", str: "a string", list: "a list"}
"""JSON's terms for values that are not objects; all other values are numbers."""


def read_whole(
    read: Callable[[Log], SettingsT],
    *,
    also_known: Collection[str] = (),
    decisions: Iterable[Decision] = (),
) -> SettingsT:
    """Read a plan and its decisions; raise all mistakes as one error.

    Args:
        read: Function that takes a log and returns the plan.
        also_known: Paths of additional keys to accept.
        decisions: Earlier decisions.
    """
    log = Log(also_known=frozenset(also_known), decisions=[*decisions])
    return _signed(log.whole(read, log), log)


def read_partly(
    read: Callable[[Log], SettingsT], *, also_known: Collection[str] = ()
) -> tuple[SettingsT | None, tuple[ZeroTuneError, ...]]:
    """Return the valid part of a plan (``None`` if nothing is valid), and all mistakes.

    Args:
        read: Function that takes a log and returns the plan.
        also_known: Paths of additional keys to accept.
    """
    log = Log(also_known=frozenset(also_known))
    plan = log.outcome(read, log)
    return plan and _signed(plan, log), tuple(log.mistakes)


def _signed(plan: SettingsT, log: Log) -> SettingsT:
    return attrs.evolve(plan, decisions=log.decisions, names=dict(log.names))


def load_plan(path: str | os.PathLike[str], log: Log) -> Settings:
    """Read a file as ``DeepSpeedPlan.load`` does; its suffix determines the format."""
    yaml = Path(path).suffix.lower() in YAML_SUFFIXES
    return plan_from_yaml(path, log) if yaml else plan_from_json(Path(path), log)


def plan_from_mapping(
    config: Any, log: Log, *, source: str, folder: Path | None = None
) -> Settings:
    """Read a configuration as ``DeepSpeedPlan.from_dict`` does.

    Args:
        config: The configuration, or a mapping that contains it.
        log: Log that receives decisions and mistakes.
        source: Origin of the plan, for messages.
        folder: Folder in which relative paths in the configuration are looked up first.
    """
    if not isinstance(config, Mapping):
        raise InvalidValueError(
            f"{source} must contain an object, not {_JSON_KINDS.get(type(config), 'a number')}",
            'write {"train_batch_size": …}',
        )
    wrapper = wrapper_of(config)
    if wrapper is not None:
        if accelerate.is_accelerate(config) and isinstance(config[wrapper], Mapping):
            return plan_from_settings(config, log, source=source, folder=folder)
        return _Wrapped(config=config, wrapper=wrapper, log=log).plan(source, folder)
    _refuse_something_else(config, source, log)
    raw = normalise_top_level(config, log)
    launch = LaunchSection()
    if INIT_FLAG in raw:
        # The only launch setting that SimpleTuner's documentation puts among DeepSpeed's keys.
        value = raw.pop(INIT_FLAG)
        log.decide(
            INIT_FLAG,
            value,
            f"launch.{INIT_FLAG}",
            "DeepSpeed does not know this key, which is a setting for the launcher",
        )
        launch = read_launch({INIT_FLAG: value}, log)
    plan = read_section(Settings, raw, key="", log=log)
    return with_launch(attrs.evolve(plan, source=source), launch)


def _refuse_something_else(config: Mapping[Any, Any], source: str, log: Log) -> None:
    """Raise one error for a file without a DeepSpeed configuration, not one per key."""
    sections = {key for key, value in config.items() if isinstance(value, Mapping)}
    trainers = _TRAINERS_OWN & {*map(undashed, config)}
    if len(trainers) >= _ENOUGH_KEYS and not _DEEPSPEEDS_OWN & sections:
        raise InvalidValueError(
            f"{source} is a trainer's file without deepspeed_config, so it configures training "
            "without DeepSpeed",
            'add "deepspeed_config": {"zero_optimization": {"stage": 2}} to the file,'
            " or set that key to the path of a DeepSpeed JSON",
            value=", ".join(sorted(map(str, config))[:5]),
        )
    names = [key for key in config if isinstance(key, str) and not key.startswith("_")]
    known = {*accelerate.plan_keys(), *log.also_known}
    if len(names) < _ENOUGH_KEYS or not known.isdisjoint(names):
        return
    raise InvalidValueError(
        f"{source} contains no DeepSpeed configuration: none of its keys belongs to DeepSpeed",
        "use the file that contains zero_optimization or train_batch_size",
        value=", ".join(names[:5]),
    )


def plan_from_json(path_or_text: str | os.PathLike[str], log: Log) -> Settings:
    """Read JSON as ``DeepSpeedPlan.from_json`` does."""
    if isinstance(path_or_text, str) and path_or_text.lstrip("\ufeff \t\r\n").startswith(
        ("{", "//", "/*", "#", "[")
    ):
        value, sentences = parse_json(path_or_text, source="<string>")
        source, folder = "<string>", None
    else:
        path = Path(path_or_text)
        value, sentences = parse_file(read_text(path), path)
        source, folder = str(path), path.parent
    tolerated(sentences, source, log)
    return plan_from_mapping(value, log, source=source, folder=folder)


@attrs.frozen(kw_only=True)
class _Wrapped:
    """A trainer's file that contains a DeepSpeed configuration and other settings."""

    config: Mapping[Any, Any]
    wrapper: str
    """Key of the configuration in the file."""
    log: Log

    def plan(self, source: str, folder: Path | None) -> Settings:
        file, wrapper, written = source, self.wrapper, self.config[self.wrapper]
        beside: Mapping[Any, Any] = {}
        if isinstance(written, Mapping) and wrapper_of(written) == FILE:
            written, beside = self._named_in_block(written)
        if is_off(written):
            self.log.decide(
                wrapper,
                "null" if written is None else written,
                "stage 0",
                f"the setting is empty; {accelerate.WITHOUT_DEEPSPEED}",
                "warning",
            )
            written = {}
        inside, source = None, f"{source} ({wrapper})"
        if isinstance(written, str):
            written, sentences, named, inside = read_named(written, folder, key=wrapper)
            source = source if inside is None else named
            tolerated(sentences, source, self.log)
        if not isinstance(written, Mapping):
            raise InvalidValueError(
                "must contain a DeepSpeed configuration",
                "write an object, JSON text, or the path of a JSON file",
                wrapper,
                written,
            )
        if any(undashed(key) in WRAPPERS for key in written):
            raise InvalidValueError(
                "contains another wrapped configuration", "unwrap it once", wrapper
            )
        plan = plan_from_mapping(written, self.log, source=source, folder=inside or folder)
        plan = self.log.attempt(self._with_micro_batch, plan) or plan
        settings = TrainerSettings(config=self.config, wrapper=wrapper, log=self.log)
        plan = self.log.attempt(settings.fill, plan, file) or plan
        return with_launch(plan, read_launch({**beside, **self._launch_beside()}, self.log))

    def _launch_beside(self) -> dict[str, Any]:
        """Return the launch settings that a trainer's file has under different names."""
        settings = [
            key
            for key in self.config
            if undashed(key) in TRAINER_KEYS and self.config[key] is not None
        ]
        names = {TRAINER_KEYS[undashed(key)]: key for key in settings}
        values = {name: self.config[key] for name, key in names.items()}
        precision = self.log.attempt(flagged_precision, self.config)
        if precision is not None and "mixed_precision" not in values:
            flags = precision_flags(self.config)
            names["mixed_precision"] = flags.get(precision) or next(iter(flags.values()))
            values["mixed_precision"] = precision
        self.log.names.update({f"launch.{name}": key for name, key in names.items()})
        automatic = {name for name, value in values.items() if str(value).strip().lower() == AUTO}
        return {name: AUTO if name in automatic else value for name, value in values.items()}

    def _named_in_block(self, block: Mapping[Any, Any]) -> tuple[Any, Mapping[Any, Any]]:
        """Return the configuration file that a block names, and its launch settings."""
        beside = {key: value for key, value in block.items() if key != FILE}
        others = sorted(str(key) for key in beside if key not in IN_BLOCK)
        if others:
            raise PlanConflictError(
                f"names a file, so the block may not contain other keys: {', '.join(others)}",
                "move the other keys to the file",
                f"{self.wrapper}.{FILE}",
                block[FILE],
            )
        self.log.decide(
            self.wrapper,
            f"an object with {FILE}",
            block[FILE],
            "this is how SimpleTuner names a configuration file",
        )
        return block[FILE], beside

    def _with_micro_batch(self, plan: Settings) -> Settings:
        """Read a trainer's batch size as samples per pass and rank."""
        written = next(
            (
                key
                for key in self.config
                if undashed(key) in MICRO_KEYS and self.config[key] is not None
            ),
            None,
        )
        if written is None or is_auto(self.config[written]):
            return plan
        asked, _ = Integer(minimum=1).read(self.config[written], str(written))
        name = "train_micro_batch_size_per_gpu"
        own = plan.train_micro_batch_size_per_gpu
        both = (plan.train_batch_size, plan.gradient_accumulation_steps)
        if own == asked:
            return plan
        if is_integer(own) or all(map(is_integer, both)):
            self.log.decide(
                name,
                asked,
                own,
                f"numbers in the configuration take precedence over {written}",
                "warning",
            )
            return plan
        self.log.decide(
            name,
            own,
            asked,
            f"a trainer's {written} is the number of samples per forward pass and rank",
        )
        return attrs.evolve(plan, **{name: asked})


# -- Files of `accelerate`: its YAML, and the same settings in JSON.


def plan_from_settings(
    content: Mapping[Any, Any], log: Log, *, source: str, folder: Path | None = None
) -> Settings:
    """Read settings from ``accelerate config``.

    Args:
        content: The settings as a mapping.
        log: Log that receives decisions and mistakes.
        source: Origin of the plan, for messages.
        folder: Folder in which a relative ``deepspeed_config_file`` is looked up first.
    """
    found = accelerate.translate(content, log, source=source, folder=folder)
    plan = plan_from_mapping(found.config, log, source=found.source, folder=found.folder)
    return with_launch(plan, found.launch)


def plan_from_yaml(path: str | os.PathLike[str], log: Log) -> Settings:
    """Read an accelerate YAML as ``DeepSpeedPlan.from_yaml`` does."""
    file = Path(path)
    content = parse_yaml(read_text(file), source=str(file))
    if not isinstance(content, Mapping):
        raise InvalidValueError(
            f"{file} must contain settings that `accelerate config` writes",
            "create one with `accelerate config`",
            value=content,
        )
    wrapper = wrapper_of(content)
    # With DeepSpeed's own keys, or a trainer's file, and without accelerate's keys.
    plain = not accelerate.plan_keys().isdisjoint(key for key in content if isinstance(key, str))
    if wrapper is not None:
        plain = isinstance(content[wrapper], str) or wrapper != accelerate.BLOCK
    if any(key in content for key in _ACCELERATES_OWN):
        plain = False
    read = plan_from_mapping if plain else plan_from_settings
    return read(content, log, source=str(file), folder=file.parent)


# -- Overrides: single settings that replace those of a plan, under common names.


_ZERO_KEY: Final = "zero_optimization"
SHORT_NAMES: Final = {
    **PLACES,
    "stage": f"{_ZERO_KEY}.stage",
    "offload_optimizer": f"{_ZERO_KEY}.offload_optimizer.device",
    "offload_param": f"{_ZERO_KEY}.offload_param.device",
    "offload_optimizer_path": "launch.offload_optimizer_path",
    "offload_param_path": "launch.offload_param_path",
    "zero3_init_flag": "launch.zero3_init_flag",
    "deepspeed_moe_layer_cls_names": "launch.deepspeed_moe_layer_cls_names",
    "num_processes": "launch.num_processes",
    "num_machines": "launch.num_machines",
    "max_grad_norm": "gradient_clipping",
    "batch_size": "train_micro_batch_size_per_gpu",
    "micro_batch_size": "train_micro_batch_size_per_gpu",
    "per_device_train_batch_size": "train_micro_batch_size_per_gpu",
    "lr": "optimizer.params.lr",
    "learning_rate": "optimizer.params.lr",
    "optimizer": "optimizer.type",
    "scheduler": "scheduler.type",
    "lr_scheduler": "scheduler.type",
    "bf16": "bf16.enabled",
    "fp16": "fp16.enabled",
}
"""Names that accelerate, trainers and scripts use, and the path of the setting that each name
stands for. Keys of ``zero_optimization`` may also be written without the section, and
``mixed_precision`` (or ``precision``) sets both ``bf16.enabled`` and ``fp16.enabled``."""

_BOTH_PRECISIONS: Final = ("mixed_precision", "precision")
_NVME_PATH: Final = "nvme_path"
_PRECISION_KIND: Final = Choice(choices=(*PRECISIONS, AUTO), synonyms=PRECISION_SYNONYMS)
_OVERRIDDEN: Final = "overridden by the caller"
_LAUNCH: Final = "launch"
_MOST_NESTED: Final = 50


Places = Callable[[str, Any], Iterable[tuple[str, Any]]]


def override_plan(
    plan: Settings, overrides: Mapping[str, Any], *, also_known: Collection[str] = ()
) -> Settings:
    """Change settings of a plan as ``DeepSpeedPlan.with_overrides`` does.

    Args:
        plan: The plan to change.
        overrides: Settings by path, as nested mappings, or by short names; ``None`` removes a
            setting.
        also_known: Paths of additional keys to accept.
    """
    config = plan.to_dict()
    config[_LAUNCH] = plan.launch.to_dict() if plan.launch else {}
    decisions: list[Decision] = []
    for path, value in settings_by_path(overrides, partial(_places_of, plan)).items():
        before = put_setting(config, path, value)
        if before != value or type(before) is not type(value):
            decisions.append(Decision(path, before, value, _OVERRIDDEN))
    launched = config.pop(_LAUNCH, {})

    def read(log: Log) -> Settings:
        launch = read_launch(launched, log)
        return with_launch(plan_from_mapping(config, log, source=plan.source), launch)

    known = passed_paths(plan).union(also_known)
    return read_whole(read, also_known=known, decisions=(*plan.decisions, *decisions))


def settings_by_path(overrides: Any, places: Places) -> dict[str, Any]:
    """Return the overrides as a flat mapping from path to value.

    Args:
        overrides: Settings by path, as nested mappings, or by names that ``places`` translates.
        places: Function that maps a name and a value to the settings that the name stands for.
    """
    if not isinstance(overrides, Mapping):
        raise InvalidValueError(
            "must be a mapping", 'write {"zero_stage": 2}', "overrides", overrides
        )
    settings: dict[str, Any] = {}
    for written, value in _flattened(overrides, "", 0):
        for path, each in places(written, value):
            if path in settings and settings[path] != each:
                raise PlanConflictError(
                    "is overridden twice, with different values", "keep one of the two", path, each
                )
            settings[path] = each
    return settings


def _flattened(overrides: Mapping[Any, Any], prefix: str, depth: int) -> Iterator[tuple[str, Any]]:
    if depth > _MOST_NESTED:
        raise InvalidValueError("is nested too deeply", "use fewer levels", "overrides")
    for name, value in overrides.items():
        if not isinstance(name, str) or not all(name.split(".")):
            raise InvalidValueError(
                "is not a path to a setting", 'write "section.key"', prefix or "overrides", name
            )
        path = join(prefix, name)
        if isinstance(value, Mapping) and value:
            yield from _flattened(value, path, depth + 1)
        else:
            yield path, value


def _places_of(plan: Settings, name: str, value: Any) -> list[tuple[str, Any]]:
    """Return the settings that a name stands for, for ``settings_by_path``."""
    if name == _NVME_PATH:
        devices = {"optimizer": plan.offload_optimizer_device, "param": plan.offload_param_device}
        swapped = [part for part, device in devices.items() if device == "nvme"]
        if not swapped:
            raise PlanConflictError(
                "the plan offloads nothing to NVMe",
                'also set offload_optimizer_device or offload_param_device to "nvme"',
                _NVME_PATH,
                value,
            )
        return [(f"{_ZERO_KEY}.offload_{part}.nvme_path", value) for part in swapped]
    if name not in _BOTH_PRECISIONS:
        return [(canonical_path(_path_of(name, value)), value)]
    settings: list[tuple[str, Any]] = []
    if plan.launch is not None and plan.launch.mixed_precision is not None:
        settings.append(("launch.mixed_precision", None))
    if value is None:
        return [*settings, ("bf16.enabled", None), ("fp16.enabled", None)]
    precision, _ = _PRECISION_KIND.read(value, name)
    bf16, fp16 = (AUTO, None) if precision == AUTO else (precision == "bf16", precision == "fp16")
    return [*settings, ("bf16.enabled", bf16), ("fp16.enabled", fp16)]


def _path_of(name: str, value: Any) -> str:
    """Return the path of a named setting; a scalar sets the main key of a section."""
    alone = isinstance(value, str | bool)
    if name in SHORT_NAMES and not isinstance(value, Mapping):
        # null on the short name of a section means the section and not its main key.
        whole = value is None and SHORT_NAMES[name].startswith(f"{name}.")
        return name if whole else SHORT_NAMES[name]
    if name in (f"{_ZERO_KEY}.offload_optimizer", f"{_ZERO_KEY}.offload_param") and alone:
        return f"{name}.device"
    of_zero = name.partition(".")[0] in ZeroSection.known_names()
    return f"{_ZERO_KEY}.{name}" if of_zero else name


def canonical_path(path: str) -> str:
    """Return ``path`` with every name in canonical spelling, as in ``bf16`` for ``bfloat16``."""
    first, _, rest = path.partition(".")
    cls: type[Section] | None = LaunchSection if first == _LAUNCH and rest else Settings
    parts = path.split(".")
    done = [parts.pop(0)] if cls is LaunchSection else []
    for part in parts:
        name = part if cls is None else cls.aliases.get(part, part)
        done.append(name)
        kinds = {each.name: each.metadata["kind"] for each in modelled(cls)} if cls else {}
        kind = kinds.get(name)
        cls = kind.cls if isinstance(kind, Nested) else None
    return ".".join(done)
