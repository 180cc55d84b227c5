"""Readers: a dict, JSON text, a JSON file, a trainer's file that holds a DeepSpeed config."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import attrs

from zerotune._util.text import did_you_mean
from zerotune.decisions import Decision
from zerotune.errors import InvalidValueError, PlanConflictError, PlanFileError
from zerotune.plan.api import DeepSpeedPlan
from zerotune.plan.json_text import parse_json
from zerotune.plan.model import (
    AUTO,
    OFFLOAD_DEVICES,
    PRECISION_SYNONYMS,
    PRECISIONS,
    Choice,
    LaunchSection,
    Nested,
    Section,
    ZeroSection,
    join,
    modelled,
    normalise_top_level,
    passed_paths,
    read_section,
)

if TYPE_CHECKING:
    from zerotune.plan.api import DeepSpeedPlan


WRAPPERS = ("deepspeed_config", "deepspeed_config_file", "deepspeed")
TRAINER_KEYS = {
    "mixed_precision": "mixed_precision",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "max_grad_norm": "gradient_clipping",
    "gradient_clipping": "gradient_clipping",
    "offload_param_path": "offload_param_path",
    "offload_optimizer_path": "offload_optimizer_path",
}
"""Key of a trainer's own file to the launch setting it is."""
_ENOUGH_KEYS = 3
_ENOUGH_TO_JUDGE = 20


def plan_from_mapping(
    config: Any, *, source: str, also_known: Collection[str] = (), folder: Path | None = None
) -> DeepSpeedPlan:
    """Read a configuration; see ``DeepSpeedPlan.from_dict``.

    Args:
        config: The configuration, or an object that holds one.
        source: Name used in messages.
        also_known: Paths of further keys to pass through.
        folder: Where a relative path inside the configuration is looked up first.
    """
    if not isinstance(config, Mapping):
        raise InvalidValueError(
            f"{source} must hold an object", value=config, fix='write {"train_batch_size": …}'
        )
    wrapper = wrapper_of(config)
    if wrapper is not None:
        from zerotune.plan.accelerate import is_accelerate, plan_from_settings

        if is_accelerate(config) and isinstance(config[wrapper], Mapping):
            return plan_from_settings(config, source=source, folder=folder)
        return _unwrapped(config, wrapper, source=source, also_known=also_known, folder=folder)
    _refuse_something_else(config, source, also_known)
    decisions: list[Decision] = []
    raw = normalise_top_level(config, decisions)
    plan = read_section(DeepSpeedPlan, raw, key="", decisions=decisions, also_known=also_known)
    return attrs.evolve(plan, decisions=decisions, source=source)


def wrapper_of(config: Mapping[Any, Any]) -> str | None:
    """The key under which a trainer's file holds its DeepSpeed configuration, as written."""
    return next((key for key in config if undashed(key) in WRAPPERS), None)


def _refuse_something_else(
    config: Mapping[Any, Any], source: str, also_known: Collection[str]
) -> None:
    """Refuse a file of another kind as a whole, and not by its first key."""
    names = [key for key in config if isinstance(key, str) and not key.startswith("_")]
    known = {attribute.name for attribute in modelled(DeepSpeedPlan)}
    known |= {*DeepSpeedPlan.passed_through, *DeepSpeedPlan.aliases, *also_known}
    if len(names) < _ENOUGH_KEYS or not known.isdisjoint(names):
        return
    looked_at = names[:_ENOUGH_TO_JUDGE]
    close = [name for name in looked_at if did_you_mean(name, known, count=1, by=str.lower)]
    if len(close) * 2 >= len(looked_at):
        return
    raise InvalidValueError(
        f"{source} holds no DeepSpeed configuration: none of its keys is one of DeepSpeed's",
        value=", ".join(names[:5]),
        fix="give the file that holds zero_optimization or train_batch_size",
    )


def plan_from_json(path_or_text: str | os.PathLike[str]) -> DeepSpeedPlan:
    """Read JSON; see ``DeepSpeedPlan.from_json``."""
    if isinstance(path_or_text, str) and path_or_text.lstrip("\ufeff \t\r\n").startswith(
        ("{", "//", "/*", "#", "[")
    ):
        return _plan_from_text(path_or_text, source="<string>", folder=None)
    path = Path(path_or_text)
    return _plan_from_text(read_text(path), source=str(path), folder=path.parent)


def read_text(path: Path, *, key: str | None = None, tried: Collection[Path] = ()) -> str:
    """The text of a plan file.

    Args:
        path: The file.
        key: The setting that names it, if one does.
        tried: Other places that were looked at, for the message.

    Raises:
        PlanFileError: The file is missing, a folder, unreadable or not UTF-8.
    """
    name = key or "file"
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        places = f" (looked at {', '.join(str(place) for place in tried)})" if tried else ""
        raise PlanFileError(
            f"there is no such file{places}",
            key=name,
            value=str(path),
            fix="check the path; a relative one is taken from the working directory",
        ) from None
    except IsADirectoryError:
        raise PlanFileError(
            "is a folder", key=name, value=str(path), fix="give the path of a file"
        ) from None
    except UnicodeDecodeError:
        raise PlanFileError(
            "is not UTF-8 text", key=name, value=str(path), fix="save it as UTF-8"
        ) from None
    except (OSError, ValueError) as error:
        raise PlanFileError(
            f"cannot be read: {error}", key=name, value=str(path), fix="check path and permissions"
        ) from None


def find_file(written: str, folder: Path | None, *, key: str) -> Path:
    """A file named inside a configuration: beside that configuration, else where we are.

    Raises:
        PlanFileError: Neither place has it; the message lists both.
    """
    places = _places(written, folder)
    for place in places:
        if _is_file(place):
            return place
    read_text(places[-1], key=key, tried=list(dict.fromkeys(places)))
    return places[-1]


class Named(NamedTuple):
    """What a setting that names a configuration leads to."""

    value: Any
    sentences: list[str]
    """Liberties that were tolerated."""
    source: str
    """Name for messages."""
    folder: Path | None
    """Folder of the file; ``None`` when the setting is the configuration itself."""


def read_named(written: str, folder: Path | None, *, key: str) -> Named:
    """The configuration that a setting names: JSON text, the path of a file, or base64 of JSON.

    accelerate and transformers accept all three (``HfDeepSpeedConfig``).

    Raises:
        PlanFileError: It is neither JSON, nor base64 of it, nor a file in any of the places.
        PlanSyntaxError: Not JSON.
    """
    encoded = None if written.lstrip().startswith("{") else _decoded(written, folder)
    text = written if written.lstrip().startswith("{") else encoded
    if text is not None:
        return Named(*parse_json(text, source=key), source=f"the text of {key}", folder=None)
    path = find_file(written, folder, key=key)
    value, sentences = parse_json(read_text(path, key=key), source=str(path))
    return Named(value, sentences, source=str(path), folder=path.parent)


def _decoded(written: str, folder: Path | None) -> str | None:
    import base64
    import binascii

    if any(_is_file(place) for place in _places(written, folder)):
        return None
    try:
        text = base64.urlsafe_b64decode(written).decode("utf-8")
    except (binascii.Error, ValueError):
        return None
    return text if text.lstrip().startswith("{") else None


def _places(written: str, folder: Path | None) -> list[Path]:
    return [Path(written)] if folder is None else [folder / written, Path(written)]


def _is_file(place: Path) -> bool:
    try:
        return place.is_file()
    except (OSError, ValueError):  # a name too long, or with a null character
        return False


def tolerated(sentences: Collection[str], source: str) -> list[Decision]:
    """One warning for everything a file has that JSON does not allow."""
    if not sentences:
        return []
    return [
        Decision(
            key=source,
            before="; ".join(sentences),
            after=None,
            reason="strict JSON allows no comments and no trailing commas, and accelerate"
            " refuses them",
            severity="warning",
        )
    ]


def read_launch(
    raw: Mapping[str, Any], decisions: list[Decision], also_known: Collection[str] = ()
) -> LaunchSection:
    """The launch section from the settings around a DeepSpeed configuration."""
    return read_section(
        LaunchSection, raw, key="launch", decisions=decisions, also_known=also_known
    )


def fill_from_launch(plan: DeepSpeedPlan, launch: LaunchSection) -> DeepSpeedPlan:
    """Attach ``launch``, or nothing when it says nothing."""
    says_something = launch.extra or any(
        getattr(launch, attribute.name) is not None for attribute in modelled(LaunchSection)
    )
    return attrs.evolve(plan, launch=launch) if says_something else plan


def _plan_from_text(text: str, *, source: str, folder: Path | None) -> DeepSpeedPlan:
    value, sentences = parse_json(text, source=source)
    plan = plan_from_mapping(value, source=source, folder=folder)
    return attrs.evolve(plan, decisions=(*tolerated(sentences, source), *plan.decisions))


def _unwrapped(
    config: Mapping[Any, Any],
    wrapper: str,
    *,
    source: str,
    also_known: Collection[str],
    folder: Path | None,
) -> DeepSpeedPlan:
    inner = config[wrapper]
    sentences: list[str] = []
    if isinstance(inner, str):
        inner, sentences, named, inside = read_named(inner, folder, key=wrapper)
        source = f"{source} ({wrapper})" if inside is None else named
        folder = inside or folder
    else:
        source = f"{source} ({wrapper})"
    if not isinstance(inner, Mapping):
        raise InvalidValueError(
            "must hold a DeepSpeed configuration",
            key=wrapper,
            value=inner,
            fix="write an object, JSON text, or the path of a JSON file",
        )
    if any(undashed(key) in WRAPPERS for key in inner):
        raise InvalidValueError(
            "holds another wrapped configuration", key=wrapper, fix="unwrap it once"
        )
    plan = plan_from_mapping(inner, source=source, also_known=also_known, folder=folder)
    decisions: list[Decision] = []
    around = {
        TRAINER_KEYS[undashed(key)]: _plain_auto(value)
        for key, value in config.items()
        if undashed(key) in TRAINER_KEYS and value is not None
    }
    launch = read_launch(around, decisions)
    found = (*tolerated(sentences, source), *decisions, *plan.decisions)
    return attrs.evolve(fill_from_launch(plan, launch), decisions=found)


def undashed(key: Any) -> str:
    """A key of a trainer's file without leading dashes; ``""`` for what is no text."""
    return key.lstrip("-") if isinstance(key, str) else ""


def _plain_auto(value: Any) -> Any:
    return AUTO if isinstance(value, str) and value.strip().lower() == AUTO else value


# -- The configuration behind ``DeepSpeedPlan.build``.


_BATCH_KEYS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)


def build_config(
    *,
    stage: int | str,
    offload_optimizer: str,
    offload_param: str,
    nvme_path: str | os.PathLike[str] | None,
    precision: str,
    batch: tuple[int | str | None, int | str | None, int | str | None],
    gradient_clipping: float | str,
    optimizer: str | Mapping[str, Any] | None,
    scheduler: str | Mapping[str, Any] | None,
    zero_overrides: Mapping[str, Any],
) -> dict[str, Any]:
    """Write the keyword form as a DeepSpeed configuration.

    Raises:
        InvalidValueError: An offload device or precision that does not exist.
    """
    zero: dict[str, Any] = {"stage": stage}
    for key, device in (("offload_optimizer", offload_optimizer), ("offload_param", offload_param)):
        if device != "none":
            zero[key] = _offload(key, device, nvme_path)
    zero.update(zero_overrides)
    config: dict[str, Any] = {
        **{key: value for key, value in zip(_BATCH_KEYS, batch, strict=True) if value is not None},
        "gradient_clipping": gradient_clipping,
        "zero_optimization": zero,
        **_precision(precision),
    }
    for key, section in (("optimizer", optimizer), ("scheduler", scheduler)):
        if section is not None:
            config[key] = {"type": section} if isinstance(section, str) else section
    return config


def _offload(key: str, device: Any, nvme_path: str | os.PathLike[str] | None) -> dict[str, Any]:
    if device not in OFFLOAD_DEVICES:
        raise InvalidValueError(
            "is not a place to offload to",
            key=key,
            value=device,
            fix="write one of " + ", ".join(repr(name) for name in OFFLOAD_DEVICES),
        )
    section: dict[str, Any] = {"device": device}
    if device == "nvme" and nvme_path is not None:
        section["nvme_path"] = os.fspath(nvme_path)
    return section


def _precision(precision: Any) -> dict[str, Any]:
    if precision == AUTO:
        return {"bf16": {"enabled": AUTO}}
    if precision not in PRECISIONS:
        raise InvalidValueError(
            "is not a precision",
            key="precision",
            value=precision,
            fix="write one of " + ", ".join(repr(name) for name in (*PRECISIONS, AUTO)),
        )
    return {
        "bf16": {"enabled": precision == "bf16"},
        "fp16": {"enabled": precision == "fp16"},
    }


# -- Overrides: single settings put above what a plan says, under the names people use for them.


_ZERO: Final = "zero_optimization"
SHORT_NAMES: Final = {
    "zero_stage": f"{_ZERO}.stage",
    "stage": f"{_ZERO}.stage",
    "offload_optimizer": f"{_ZERO}.offload_optimizer.device",
    "offload_optimizer_device": f"{_ZERO}.offload_optimizer.device",
    "offload_optimizer_nvme_path": f"{_ZERO}.offload_optimizer.nvme_path",
    "offload_param": f"{_ZERO}.offload_param.device",
    "offload_param_device": f"{_ZERO}.offload_param.device",
    "offload_param_nvme_path": f"{_ZERO}.offload_param.nvme_path",
    "zero3_save_16bit_model": f"{_ZERO}.stage3_gather_16bit_weights_on_model_save",
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
"""Name accelerate, trainers and scripts use, to the path of the setting. Every key of
``zero_optimization`` may be written without its section too, and ``mixed_precision`` (or
``precision``) sets ``bf16.enabled`` and ``fp16.enabled`` together."""

_PRECISION_NAMES: Final = ("mixed_precision", "precision")
_NVME_PATH: Final = "nvme_path"
_PRECISION: Final = Choice(choices=(*PRECISIONS, AUTO), synonyms=PRECISION_SYNONYMS)
_REASON: Final = "overridden by the caller"
_LAUNCH: Final = "launch"
_DEEPEST: Final = 50


def override_plan(
    plan: DeepSpeedPlan, overrides: Mapping[str, Any], *, reason: str = _REASON
) -> DeepSpeedPlan:
    """Put settings above those of ``plan``; see ``DeepSpeedPlan.with_overrides``.

    Args:
        plan: What they are put above.
        overrides: Settings by path, nested or by a short name; ``None`` removes one.
        reason: Why, for the decisions.

    Raises:
        PlanError: As in ``DeepSpeedPlan.from_dict``.
    """
    config = plan.to_deepspeed()
    config[_LAUNCH] = plan.launch.to_dict() if plan.launch else {}
    decisions: list[Decision] = []
    for path, value in _settings(plan, overrides).items():
        before = _put(config, path.split("."), value, path)
        if before != value or type(before) is not type(value):
            decisions.append(Decision(key=path, before=before, after=value, reason=reason))
    read: list[Decision] = []
    known = passed_paths(plan)
    section = read_launch(config.pop(_LAUNCH, {}), read, known)
    new = plan_from_mapping(config, source=plan.source, also_known=known)
    found = (*plan.decisions, *decisions, *read, *new.decisions)
    return fill_from_launch(attrs.evolve(new, decisions=found), section)


def _settings(plan: DeepSpeedPlan, overrides: Any) -> dict[str, Any]:
    """Path to value, every short name written out; two names for one path are refused."""
    if not isinstance(overrides, Mapping):
        raise InvalidValueError(
            "must be a mapping", key="overrides", value=overrides, fix='write {"zero_stage": 2}'
        )
    settings: dict[str, Any] = {}
    for written, value in _flattened(overrides, "", 0):
        for path, each in _written_out(plan, written, value):
            if path in settings and settings[path] != each:
                raise PlanConflictError(
                    "is overridden twice, with different values",
                    key=path,
                    value=each,
                    fix="keep one of the two",
                )
            settings[path] = each
    return settings


def _flattened(overrides: Mapping[Any, Any], prefix: str, depth: int) -> Iterator[tuple[str, Any]]:
    if depth > _DEEPEST:
        raise InvalidValueError("is nested too deeply", key="overrides", fix="nest less")
    for name, value in overrides.items():
        if not isinstance(name, str) or not all(name.split(".")):
            raise InvalidValueError(
                "is not the path of a setting",
                key=prefix or "overrides",
                value=name,
                fix='write "section.key"',
            )
        path = join(prefix, name)
        if isinstance(value, Mapping) and value:
            yield from _flattened(value, path, depth + 1)
        else:
            yield path, value


def _written_out(plan: DeepSpeedPlan, name: str, value: Any) -> list[tuple[str, Any]]:
    if name in _PRECISION_NAMES:
        return _overrides_precision(plan, name, value)
    if name == _NVME_PATH:
        return _swap_folders(plan, value)
    stage = name == _ZERO and isinstance(value, bool)  # DeepSpeed's old form: true is stage 1
    return [(_canonical(_place(name, value)), int(value) if stage else value)]


def _place(name: str, value: Any) -> str:
    """The path of a setting under the name given; a lone value means a section's main key."""
    alone = isinstance(value, str | bool)
    if name == _ZERO and isinstance(value, bool):
        return f"{_ZERO}.stage"
    if name in SHORT_NAMES and not isinstance(value, Mapping):
        # null on the short name of a section means the section and not its main key.
        whole = value is None and SHORT_NAMES[name].startswith(f"{name}.")
        return name if whole else SHORT_NAMES[name]
    if name in (f"{_ZERO}.offload_optimizer", f"{_ZERO}.offload_param") and alone:
        return f"{name}.device"
    return f"{_ZERO}.{name}" if name.partition(".")[0] in _zero_keys() else name


def _canonical(path: str) -> str:
    """A path with every part in the spelling of its section."""
    from zerotune.plan.api import DeepSpeedPlan

    first, _, rest = path.partition(".")
    cls: type[Section] | None = LaunchSection if first == _LAUNCH and rest else DeepSpeedPlan
    parts = path.split(".")
    done = [parts.pop(0)] if cls is LaunchSection else []
    for part in parts:
        name = part if cls is None else cls.aliases.get(part, part)
        done.append(name)
        kinds = {each.name: each.metadata["kind"] for each in modelled(cls)} if cls else {}
        kind = kinds.get(name)
        cls = kind.cls if isinstance(kind, Nested) else None
    return ".".join(done)


def _zero_keys() -> frozenset[str]:
    names = {attribute.name for attribute in modelled(ZeroSection)}
    return frozenset({*names, *ZeroSection.aliases, *ZeroSection.passed_through})


def _overrides_precision(plan: DeepSpeedPlan, name: str, value: Any) -> list[tuple[str, Any]]:
    settings: list[tuple[str, Any]] = []
    if plan.launch is not None and plan.launch.mixed_precision is not None:
        settings.append(("launch.mixed_precision", None))
    if value is None:
        return [*settings, ("bf16.enabled", None), ("fp16.enabled", None)]
    precision, _ = _PRECISION.read(value, name)
    if precision == AUTO:
        return [*settings, ("bf16.enabled", AUTO), ("fp16.enabled", None)]
    return [
        *settings,
        ("bf16.enabled", precision == "bf16"),
        ("fp16.enabled", precision == "fp16"),
    ]


def _swap_folders(plan: DeepSpeedPlan, value: Any) -> list[tuple[str, Any]]:
    devices = {"optimizer": plan.offload_optimizer_device, "param": plan.offload_param_device}
    swapped = [part for part, device in devices.items() if device == "nvme"]
    if not swapped:
        raise PlanConflictError(
            "nothing is offloaded to NVMe",
            key=_NVME_PATH,
            value=value,
            fix='offload first, or write "offload_optimizer_device"',
        )
    return [(f"{_ZERO}.offload_{part}.nvme_path", value) for part in swapped]


def _put(node: dict[str, Any], path: list[str], value: Any, key: str) -> Any:
    """Write one setting, ``None`` for none, and return the one before."""
    *parents, last = path
    for parent in parents:
        below = node.get(parent)
        if below is None:
            if value is None:
                return None
            below = node[parent] = {}
        if not isinstance(below, dict):
            raise InvalidValueError(
                f"{parent!r} is no section", key=key, value=below, fix="override it as a whole"
            )
        node = below
    before = node.pop(last, None)
    if value is not None:
        node[last] = value
    return before


# -- Plans for scripts that use ``argparse``: the arguments, and the plan they ask for.


_FILE: Final = "deepspeed_config"
_SETTINGS: Final = "plan_settings"
_ARGUMENTS: Final = {
    "zero_stage": ("N", "ZeRO stage: 0, 1, 2 or 3"),
    "offload_optimizer_device": (
        "DEVICE",
        f"where the optimizer lives: {'|'.join(OFFLOAD_DEVICES)}",
    ),
    "offload_optimizer_path": ("FOLDER", "where the optimizer's swap files go"),
    "offload_param_device": ("DEVICE", f"where parameters wait: {'|'.join(OFFLOAD_DEVICES)}"),
    "offload_param_path": ("FOLDER", "where the parameters' swap files go"),
    "micro_batch_size": ("N", "samples per forward pass and rank"),
    "train_batch_size": ("N", "samples per optimizer step, all ranks together"),
    "gradient_accumulation_steps": ("N", "forward passes per optimizer step"),
    "gradient_clipping": ("NORM", "largest gradient norm; 0 switches clipping off"),
    "mixed_precision": ("PRECISION", "bf16, fp16, no or auto"),
}
"""Argument to its placeholder and help; the names are those of ``overrides.SHORT_NAMES``."""


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--deepspeed_config FILE`` and the settings people change from the command line.

    Every argument may be written with dashes for underscores. None has a default, so that only
    what is really given stands above the file.

    Args:
        parser: Receives a group of arguments.
    """
    group = parser.add_argument_group("DeepSpeed plan")
    _add(
        group, _FILE, metavar="FILE", help="DeepSpeed JSON, trainer's config.json, accelerate YAML"
    )
    for name, (metavar, text) in _ARGUMENTS.items():
        _add(group, name, metavar=metavar, help=text, type=_value)
    group.add_argument(
        "--set",
        dest=_SETTINGS,
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="any other setting, such as zero_optimization.overlap_comm=false; may be repeated",
    )


def plan_from_arguments(namespace: argparse.Namespace) -> DeepSpeedPlan:
    """The plan that parsed arguments ask for: the file's, or ``DeepSpeedPlan.build()``.

    Arguments stand above the file; each that changes something is a recorded decision.

    Args:
        namespace: From a parser that ``add_plan_arguments`` has prepared.

    Raises:
        PlanError: As in ``DeepSpeedPlan.load`` and ``DeepSpeedPlan.with_overrides``.
    """
    given = getattr(namespace, _FILE, None)
    plan = DeepSpeedPlan.load(given) if given is not None else _without_file()
    overrides = {
        name: getattr(namespace, name)
        for name in _ARGUMENTS
        if getattr(namespace, name, None) is not None
    }
    overrides.update(_arguments_settings(getattr(namespace, _SETTINGS, ())))
    return override_plan(plan, overrides, reason="given on the command line")


def _without_file() -> DeepSpeedPlan:
    decision = Decision(
        key=_FILE,
        before=None,
        after="DeepSpeedPlan.build()",
        reason="no file was given, so the plan starts from the common case",
    )
    return attrs.evolve(DeepSpeedPlan.build(), decisions=(decision,))


def _add(group: argparse._ArgumentGroup, name: str, **details: Any) -> None:
    dashed = name.replace("_", "-")
    group.add_argument(f"--{name}", f"--{dashed}", dest=name, default=None, **details)


def _arguments_settings(written: Iterable[str]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for each in written:
        key, equals, value = each.partition("=")
        if not equals or not key.strip():
            raise InvalidValueError(
                "must be a key and a value", key="--set", value=each, fix="write --set KEY=VALUE"
            )
        settings[key.strip()] = _value(value)
    return settings


def _value(text: str) -> Any:
    """A number, a list or true where the text is JSON, else the text itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
