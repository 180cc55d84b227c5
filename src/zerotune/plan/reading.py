"""Readers: a dict, JSON text, a JSON file, a trainer's file that holds a DeepSpeed config."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import attrs

from zerotune.decisions import Decision
from zerotune.errors import InvalidValueError, PlanFileError
from zerotune.plan.deepspeed_plan import DeepSpeedPlan
from zerotune.plan.json_text import parse_json
from zerotune.plan.kinds import AUTO
from zerotune.plan.normalising import normalise_top_level
from zerotune.plan.section import modelled, read_section
from zerotune.plan.sections import LaunchSection

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
        from zerotune.plan.accelerate_block import is_accelerate, plan_from_settings

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
    import difflib

    names = [key for key in config if isinstance(key, str) and not key.startswith("_")]
    known = {attribute.name for attribute in modelled(DeepSpeedPlan)}
    known |= {*DeepSpeedPlan.passed_through, *DeepSpeedPlan.aliases, *also_known}
    if len(names) < _ENOUGH_KEYS or not known.isdisjoint(names):
        return
    looked_at = names[:_ENOUGH_TO_JUDGE]
    close = [n for n in looked_at if difflib.get_close_matches(n.lower(), known, n=1, cutoff=0.6)]
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
