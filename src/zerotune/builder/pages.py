"""Render the page, and the parts of it that follow the form, as HTML."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined

from zerotune._util.text import format_size, squash
from zerotune.builder.fields import STAGES, page_fields
from zerotune.builder.forms import FormState
from zerotune.builder.templates import BUILTIN
from zerotune.errors import UNSET
from zerotune.plan.families import family_names, model_family
from zerotune.plan.optimizer.catalogue import OPTIMIZERS
from zerotune.plan.optimizer.names import BY_WORD
from zerotune.plan.optimizer.schedules import SCHEDULERS
from zerotune.plan.section import value_at

_ENDINGS: Final = ("", ".device", ".type", ".stage", ".enabled")
"""Ends of keys that stand for their section."""
_ALIASES: Final = {
    "fp16.enabled": "bf16.enabled",
    "zero_allow_untested_optimizer": "optimizer.type",
    "zero_force_ds_cpu_optimizer": "optimizer.type",
}


_SCHEDULES: Final = {squash(name): name for name in SCHEDULERS}
_LISTS: Final[tuple[tuple[str, str, str, Mapping[str, Any], Mapping[str, str]], ...]] = (
    ("optimizer", "Optimizer", "AdamW", OPTIMIZERS, BY_WORD),
    ("scheduler", "Schedule", "WarmupLR", SCHEDULERS, _SCHEDULES),
)
"""Section, title, default, entries and spellings of the lists of the page."""


def _chooser(
    what: str, title: str, default: str, entries: Mapping[str, Any], words: Mapping[str, str],
    state: FormState,
) -> dict[str, Any]:  # fmt: skip
    """Return a list, and the arguments of the entry that the form means or that is the default."""
    written, params = (value_at(state.config, f"{what}.{name}") for name in ("type", "params"))
    params = params if isinstance(params, dict) else {}
    chosen = entries.get(words.get(squash(str(written)), ""))
    known = chosen or entries[default]
    names = known.parameter_names
    return {
        "what": what,
        "title": title,
        "default": default,
        "entries": entries.values(),
        "written": written,
        "params": params,
        "chosen": chosen,
        "known": known,
        "foreign": [name for name in params if name not in names],
    }


class Pages:
    """The templates of the page."""

    def __init__(self) -> None:
        self._templates = Environment(
            loader=PackageLoader("zerotune.builder"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters |= {"size": format_size, "json": _as_json, "id": _as_id}
        clips = [name for name in family_names() if model_family(name).frames is not None]
        known = {"UNSET": UNSET, "stages": STAGES, "value_at": value_at, "clip_families": clips}
        self._templates.globals |= known

    def page(self, data: Mapping[str, Any], state: FormState, *, prefix: str, apply: bool) -> str:
        """Render the whole page of a form, which can be read without scripts."""
        about = {**self._about(data, state), "prefix": prefix, "can_apply": apply}
        return self._templates.get_template("index.html").render(about, builtin=BUILTIN)

    def parts(self, data: Mapping[str, Any], state: FormState) -> str:
        """Render the elements that follow the form; each replaces the element with its id."""
        return self._templates.get_template("parts.html").render(self._about(data, state))

    def advice(self, data: Mapping[str, Any]) -> str:
        """Render the answer of *Fit my card*."""
        return self._templates.get_template("advice.html").render(data)

    def _about(self, data: Mapping[str, Any], state: FormState) -> dict[str, Any]:
        choosers = [_chooser(*each, state) for each in _LISTS]
        places = dict(_places(choosers))
        placed: dict[str, list[Any]] = {"": [], **{key: [] for key in places}}
        for message in data["messages"]:
            placed[_place_of(message["key"], places)].append(message)
        return {
            "data": data,
            "state": state,
            "fields": page_fields(),
            "choosers": choosers,
            "places": places,
            "placed": placed,
            "capable": {one["name"]: one for one in data["optimizers"]},
        }


def _places(choosers: Iterable[dict[str, Any]]) -> Iterable[tuple[str, tuple[str, str]]]:
    """Return the id and the label of each place of messages, by the key that it is for."""
    for field in (one for group in page_fields().values() for one in group):
        yield field.key, (field.id, field.label)
    for one in choosers:
        what, title = one["what"], one["title"]
        yield f"{what}.type", (what, title)
        yield what, (f"{what}-section", title)
        for name in (*one["known"].parameter_names, *one["foreign"]):
            yield f"{what}.params.{name}", (_as_id(f"{what}.params.{name}"), name)


def _place_of(key: str, places: Mapping[str, Any]) -> str:
    """Return the place of a key, or of what stands for the nearest section above it."""
    path = _ALIASES.get(key, key)
    found = next((path + end for end in _ENDINGS if path + end in places), "")
    return found if found or not path else _place_of(path.rpartition(".")[0], places)


def _as_id(path: str) -> str:
    return re.sub("[^A-Za-z0-9]+", "-", path)


def _as_json(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)
