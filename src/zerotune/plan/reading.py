"""Readers: a dict, JSON text, a JSON file, a trainer's file that holds a DeepSpeed config."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import attrs

from zerotune.decisions import Decision
from zerotune.errors import InvalidValueError, PlanFileError
from zerotune.plan.deepspeed_plan import DeepSpeedPlan
from zerotune.plan.json_text import parse_json
from zerotune.plan.kinds import AUTO
from zerotune.plan.normalising import normalise_top_level
from zerotune.plan.section import modelled, read_section
from zerotune.plan.sections import LaunchSection

_WRAPPERS = ("deepspeed_config", "deepspeed_config_file", "deepspeed")
_TRAINER_KEYS = {
    "mixed_precision": "mixed_precision",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "max_grad_norm": "gradient_clipping",
    "gradient_clipping": "gradient_clipping",
}
"""Key of a trainer's own file to the launch setting it is."""


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
    wrapper = next((key for key in config if _undashed(key) in _WRAPPERS), None)
    if wrapper is not None:
        return _unwrapped(config, wrapper, source=source, also_known=also_known, folder=folder)
    decisions: list[Decision] = []
    raw = normalise_top_level(config, decisions)
    plan = read_section(DeepSpeedPlan, raw, key="", decisions=decisions, also_known=also_known)
    return attrs.evolve(plan, decisions=decisions, source=source)


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
    places = [Path(written)] if folder is None else [folder / written, Path(written)]
    for place in places:
        if _is_file(place):
            return place
    read_text(places[-1], key=key, tried=list(dict.fromkeys(places)))
    return places[-1]


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


def read_launch(raw: Mapping[str, Any], decisions: list[Decision]) -> LaunchSection:
    """The launch section from the settings around a DeepSpeed configuration."""
    return read_section(LaunchSection, raw, key="launch", decisions=decisions)


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
    if isinstance(inner, str) and not inner.lstrip().startswith("{"):
        path = find_file(inner, folder, key=wrapper)
        text: str | None = read_text(path, key=wrapper)
        source, folder = str(path), path.parent
    else:
        text = inner if isinstance(inner, str) else None
        source = f"{source} ({wrapper})"
    sentences: list[str] = []
    if text is not None:
        inner, sentences = parse_json(text, source=source)
    if not isinstance(inner, Mapping):
        raise InvalidValueError(
            "must hold a DeepSpeed configuration",
            key=wrapper,
            value=inner,
            fix="write an object, JSON text, or the path of a JSON file",
        )
    if any(_undashed(key) in _WRAPPERS for key in inner):
        raise InvalidValueError(
            "holds another wrapped configuration", key=wrapper, fix="unwrap it once"
        )
    plan = plan_from_mapping(inner, source=source, also_known=also_known, folder=folder)
    decisions: list[Decision] = []
    around = {
        _TRAINER_KEYS[_undashed(key)]: _plain_auto(value)
        for key, value in config.items()
        if _undashed(key) in _TRAINER_KEYS and value is not None
    }
    launch = read_launch(around, decisions)
    found = (*tolerated(sentences, source), *decisions, *plan.decisions)
    return attrs.evolve(fill_from_launch(plan, launch), decisions=found)


def _undashed(key: Any) -> str:
    return key.lstrip("-") if isinstance(key, str) else ""


def _plain_auto(value: Any) -> Any:
    return AUTO if isinstance(value, str) and value.strip().lower() == AUTO else value
