"""Buttons that apply the fixes that messages suggest; a button is offered only if its fix works.

A fix is an English sentence. It is parsed into changes that set, rename or remove a setting, and
each change is tried on a copy of the form. A change is offered only if it removes the message and
causes no error in a setting that it changes. If a sentence is misread, a button may therefore be
missing, but no wrong button appears.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import attrs

from zerotune.builder.fields import setup_labels
from zerotune.builder.forms import FormState, is_written, to_wire
from zerotune.builder.preview import Machines, Preview, understand
from zerotune.decisions import Decision
from zerotune.errors import UNSET
from zerotune.optimizers.catalogue import OPTIMIZERS
from zerotune.optimizers.schedules import SCHEDULERS
from zerotune.plan.model import AUTO
from zerotune.plan.read import canonical_path

MAX_BUTTONS: Final = 4
"""Maximum number of buttons per finding."""
_MAX_ATTEMPTS: Final = 8
_MAX_FINDINGS: Final = 20
"""Maximum number of findings with buttons; the worst come first."""


@attrs.frozen(kw_only=True)
class Edit:
    """One change to the form: set, rename or remove a setting."""

    store: str = "config"
    path: str
    value: Any = UNSET
    """The new value; ``UNSET`` removes the setting."""
    to: str = ""
    """The new path of a renamed setting."""

    def apply(self, state: FormState) -> None:
        """Change ``state`` in place."""
        section: dict[str, Any] = getattr(state, self.store)
        if self.to:
            value = _remove(section, self.path.split("."))
            _put(section, self.to.split("."), value)
        elif self.value is UNSET:
            _remove(section, self.path.split("."))
        else:
            _put(section, self.path.split("."), self.value)

    def data(self) -> dict[str, Any]:
        """Return the change as a JSON-serialisable dict."""
        data: dict[str, Any] = {"store": self.store, "path": self.path}
        if self.to:
            return {**data, "to": self.to}
        return data if self.value is UNSET else {**data, "value": to_wire(self.value)}


def _remove(section: dict[str, Any], names: list[str]) -> Any:
    if names[0] not in section:
        return None
    if len(names) == 1:
        return section.pop(names[0])
    below = section[names[0]]
    if not isinstance(below, dict):
        return None
    found = _remove(below, names[1:])
    if not below:
        # A section that becomes empty goes with its last key: an empty one means something else.
        del section[names[0]]
    return found


def _put(section: dict[str, Any], names: list[str], value: Any) -> None:
    for name in names[:-1]:
        if not isinstance(section.get(name), dict):
            section[name] = {}
        section = section[name]
    section[names[-1]] = value


@attrs.frozen(kw_only=True)
class Repair:
    """A button that repairs the form: its label and its changes."""

    label: str
    edits: tuple[Edit, ...]

    def data(self) -> dict[str, Any]:
        """Return the repair as a JSON-serialisable dict."""
        return {"label": self.label, "edits": [edit.data() for edit in self.edits]}


def repairs(preview: Preview, state: FormState, machines: Machines) -> list[list[Repair]]:
    """List each message's repairs, most direct first; notes without a fix have no repairs."""
    found: list[list[Repair]] = []
    for message in preview.messages:
        wanted = bool(message.fix) or message.severity == "error"
        worth = wanted and sum(map(bool, found)) < _MAX_FINDINGS
        found.append(list(_find_repairs(message, preview, state, machines)) if worth else [])
    return found


def _find_repairs(
    message: Decision, preview: Preview, state: FormState, machines: Machines
) -> Iterator[Repair]:
    seen: list[tuple[Edit, ...]] = []
    labels: set[str] = set()
    for repair in _propose(message, state):
        if repair.edits in seen or len(seen) >= _MAX_ATTEMPTS or len(labels) >= MAX_BUTTONS:
            continue
        seen.append(repair.edits)
        if repair.label not in labels and _is_effective(repair, message, preview, state, machines):
            labels.add(repair.label)
            yield repair
    if not labels:
        yield from _find_removal(message, preview, state, machines)


def _find_removal(
    message: Decision, preview: Preview, state: FormState, machines: Machines
) -> Iterator[Repair]:
    """Offer to remove the setting, if only the user knows the value that the fix needs.

    Notes get no such button, and the ZeRO section is never removed as a whole.
    """
    store, path = _locate(message.key, state)
    above = path.rpartition(".")[0]
    paths = (path, "" if above == "zero_optimization" else above)
    for one in (one for one in paths if one and message.severity != "note"):
        repair = _remove_repair(store, one)
        if is_written(getattr(state, store), one) and _is_effective(
            repair, message, preview, state, machines
        ):
            yield repair
            return


def _is_effective(
    repair: Repair, message: Decision, preview: Preview, state: FormState, machines: Machines
) -> bool:
    after = copy.deepcopy(state)
    for edit in repair.edits:
        edit.apply(after)
    remaining = understand(after, machines).messages
    if any(_is_same_message(one, message) for one in remaining):
        return False
    changed = [_message_key(edit.store, edit.to or edit.path) for edit in repair.edits]
    new = [
        one
        for one in remaining
        if not any(_is_same_message(one, before) for before in preview.messages)
    ]
    return not any(
        one.severity == "error" and (one.key.startswith(key) or key.startswith(one.key))
        for one in new
        for key in changed
    )


def _is_same_message(one: Decision, other: Decision) -> bool:
    # Reasons are not compared, because a repeated reason is replaced by a reference.
    return all(getattr(one, name) == getattr(other, name) for name in ("key", "rule", "fix"))


# -- Where a setting is.


def _locate(key: str, state: FormState) -> tuple[str, str]:
    """Return the store of a key, and its path in the user's spelling."""
    key = key.partition("[")[0]  # An item of a list is changed with its list.
    for store in ("setup", "launch"):
        if key.startswith(f"{store}."):
            return store, key.removeprefix(f"{store}.")
    path = _user_spelling(key, state.config)
    if is_written(state.launch, key) and not is_written(state.config, path):
        return "launch", key
    return "config", path


def _user_spelling(key: str, config: Any) -> str:
    """Return a setting's path as ``config`` spells it, with aliases such as ``bfloat16``."""
    spelled: list[str] = []
    here, path = config, ""
    for name in key.split("."):
        path = f"{path}.{name}" if path else name
        written = here if isinstance(here, dict) else {}
        others = (one for one in written if canonical_path(".".join([*spelled, one])) == path)
        spelled.append(name if name in written else next(others, name))
        here = written.get(spelled[-1])
    return ".".join(spelled)


def _message_key(store: str, path: str) -> str:
    return canonical_path(path) if store == "config" else f"{store}.{path}"


def _label_of(store: str, path: str) -> str:
    """Return a short label: the field's name, or the last two names of the path."""
    if store == "setup":
        return setup_labels().get(path, path)
    whole = path if store == "config" else f"{store}.{path}"
    return ".".join(whole.split(".")[-2:]).removeprefix("zero_optimization.")


_SECTIONS: Final = ("setup.", "zero_optimization.", "optimizer.", "bf16.", "fp16.")


def _paths(name: str, key: str) -> Iterator[str]:
    """Yield the paths that ``name`` may refer to in a fix for ``key``."""
    if name.startswith(_SECTIONS):
        yield name
        return
    section = key
    while section:
        section = section.rpartition(".")[0]
        yield f"{section}.{name}" if section else name
    if not key.startswith("zero_optimization"):
        yield f"zero_optimization.{name}"
    yield f"zero_optimization.offload_optimizer.{name}"


# -- What a fix asks for: verbs with their objects, joined by "and" or "or".


_NAME: Final = r"'?[a-z_][\w.]*'?"
_VERB: Final = re.compile(
    r"(?:^|(?P<both>, and | and )|, or | or |; |, |: |(?<=\d) )"
    r"(?P<verb>did you mean|set|write|use|remove|omit|move|start)\b ?"
)
_SET: Final = re.compile(
    rf"(?P<both>and )?(?:the )?(?P<names>{_NAME}(?: or {_NAME})*) to "
    r"(?P<value>\"[^\"]*\"|[-+]?\d[\d.e+-]*\d|\d|true|false)(?P<auto>(?: or|, or) \"auto\")?"
)
_EQUAL: Final = re.compile(r"([a-z_]\w*) = (\d+)")
_REMOVE: Final = re.compile(rf"(it|this key|the key|the section|{_NAME}(?: or {_NAME})*)")
_VALUE: Final = re.compile(
    r"\"([^\"]*)\"|'([^']*)'|(?<![\w.\"'-])([-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?)(?![\w.])"
    r"|\b(true|false|bf16|fp16|fp32)\b|\b(\w+)\b"
)
_UNTIL: Final = re.compile(r"; | to | for | instead| which | if | unless |, or leave|\?")


def _propose(message: Decision, state: FormState) -> Iterator[Repair]:
    """Yield the repairs that a fix may mean; changes joined by "and" form one repair."""
    yield from _join(
        (both, _READERS[verb](message, objects, state))
        for both, verb, objects in _commands(message.fix)
    )
    if "did you mean" in message.fix and not message.key.endswith(".type"):
        yield from _read_remove(message, "it", state)


def _commands(fix: str) -> Iterator[tuple[bool, str, str]]:
    """Yield for each verb of a fix: whether "and" precedes it, the verb, and its objects."""
    starts = list(_VERB.finditer(fix))
    ends = [*(one.start() for one in starts[1:]), len(fix)]
    for start, end in zip(starts, ends, strict=False):
        yield bool(start["both"]), start["verb"], fix[start.end() : end]


def _join(groups: Iterable[tuple[bool, Iterable[Repair]]]) -> Iterator[Repair]:
    """Yield the repairs of each group, combined with those before it where "and" precedes it."""
    before: list[Repair] = []
    for both, found in groups:
        if both:
            now = list(found)
            before = [_combine(first, then) for first in before for then in now]
        else:
            yield from before
            before = list(found)
    yield from before


def _combine(first: Repair, then: Repair) -> Repair:
    label = f"{first.label}, {then.label[0].lower()}{then.label[1:]}"
    return Repair(label=label, edits=(*first.edits, *then.edits))


def _set_repair(store: str, path: str, value: Any, *, bare: bool = False) -> Repair:
    shown = value if isinstance(value, str) else json.dumps(value)
    label = f"Write {shown}" if bare else f"Set {_label_of(store, path)} to {shown}"
    return Repair(label=label, edits=(Edit(store=store, path=path, value=value),))


def _remove_repair(store: str, path: str) -> Repair:
    word = "Clear" if store == "setup" else "Remove"
    edit = Edit(store=store, path=path)
    return Repair(label=f"{word} {_label_of(store, path)}", edits=(edit,))


def _read_set(message: Decision, objects: str, state: FormState) -> Iterator[Repair]:
    """Parse ``A or B to VALUE``, once or several times."""

    def repairs_of(one: re.Match[str]) -> Iterator[Repair]:
        values = [json.loads(one["value"]), *([AUTO] if one["auto"] else [])]
        for name in one["names"].split(" or "):
            for value in values:
                for path in _paths(name, message.key):
                    yield _set_repair(*_locate(path, state), value)

    yield from _join((bool(one["both"]), repairs_of(one)) for one in _SET.finditer(objects))


def _read_rename(message: Decision, objects: str, state: FormState) -> Iterator[Repair]:
    """Parse ``'a', 'b' or 'c'``: other names of a key, or values of a ``type``."""
    store, path = _locate(message.key, state)
    names = [one.strip("'") for one in re.findall(r"'[^']*'|[\w.]+", objects.partition("?")[0])]
    section = path.rpartition(".")[0]
    for name in names:
        if path.endswith(".type"):
            yield _set_repair(store, path, name, bare=True)
            continue
        for target in dict.fromkeys((f"{section}.{name}" if section else name, name)):
            yield from _move_repair(target, store, path, state)


def _move_repair(target: str, store: str, path: str, state: FormState) -> Iterator[Repair]:
    """Move a setting to ``target``, unless that path is already set."""
    if is_written(getattr(state, store), target):
        return
    beside = target.rpartition(".")[0] == path.rpartition(".")[0]
    label = f"Rename to {_label_of(store, target)}" if beside else f"Move to {target}"
    yield Repair(label=label, edits=(Edit(store=store, path=path, to=target),))


def _read_move(message: Decision, objects: str, state: FormState) -> Iterator[Repair]:
    """Parse ``it to SECTION or SECTION``, or ``it to NAME``."""
    store, path = _locate(message.key, state)
    section, _, name = path.rpartition(".")
    for word in re.findall(r"[a-z_][\w.]*", objects.removeprefix("it to ")):
        beside = f"{section.rpartition('.')[0]}.{word}".removeprefix(".")
        for target in (f"{beside}.{name}", word):
            yield from _move_repair(target, store, path, state)


def _read_write(message: Decision, objects: str, state: FormState) -> Iterator[Repair]:
    """Parse ``VALUE, VALUE or VALUE``, ``KEY = VALUE or KEY = VALUE``, or an object."""
    store, path = _locate(message.key, state)
    for name, value in _EQUAL.findall(objects):
        yield _set_repair("config", name, int(value))
    whole = re.search(r"[{\[].*", objects)
    if whole:
        yield from _object_repair(store, path, whole[0])
        return
    if objects.startswith("one of ") and objects.count(", ") >= MAX_BUTTONS:
        return  # Only the user can choose among so many.
    if store != "setup":
        yield from _value_repairs(store, path, _UNTIL.split(_inclusive_bound(objects))[0])
    stage = re.search(r"\b(?:at|use) stage (\d)", message.fix)
    if stage:
        yield _set_repair("config", "zero_optimization.stage", int(stage[1]))


def _inclusive_bound(objects: str) -> str:
    """Replace "more than N" in ``objects`` with "at least N + 1"."""
    above = r"integer of more than (\d+)"
    return re.sub(above, lambda one: f"integer of at least {int(one[1]) + 1}", objects)


def _object_repair(store: str, path: str, text: str) -> Iterator[Repair]:
    try:
        yield _set_repair(store, path, json.loads(text), bare=True)
    except ValueError:
        return  # Only the user knows what the object holds.


def _value_repairs(store: str, path: str, objects: str) -> Iterator[Repair]:
    for quoted, single, number, word, name in _VALUE.findall(objects):
        if number.startswith("-"):
            continue  # A negative bound stands for a special value.
        if number or word in ("true", "false"):
            yield _set_repair(store, path, json.loads(number or word), bare=True)
        elif word:
            yield _precision_repair(word)
        elif quoted or single:
            yield _set_repair(store, path, quoted or single, bare=True)
        elif path.endswith(".type") and (name in OPTIMIZERS or name in SCHEDULERS):
            yield _set_repair(store, path, name, bare=True)


def _precision_repair(name: str) -> Repair:
    edits = tuple(Edit(path=f"{one}.enabled", value=one == name) for one in ("bf16", "fp16"))
    return Repair(label=f"Use {name}", edits=edits)


def _read_remove(message: Decision, objects: str, state: FormState) -> Iterator[Repair]:
    """Parse ``it``, ``the section``, or the name of another setting."""
    what = _REMOVE.match(objects)
    if what is None:
        return
    if what[1] in ("it", "this key", "the key"):
        keys = [message.key]
    elif what[1] == "the section":
        keys = [message.key.rpartition(".")[0], message.key]
    else:
        names = (name.strip("'") for name in what[1].split(" or "))
        keys = [path for name in names for path in _paths(name, message.key)]
    for key in filter(None, keys):
        store, path = _locate(key, state)
        for one in dict.fromkeys((key, path) if store == "config" else (path,)):
            if is_written(getattr(state, store), one):
                yield _remove_repair(store, one)


def _read_start(_: Decision, objects: str, __: FormState) -> Iterator[Repair]:
    """Parse ``N processes``."""
    count = re.match(r"(\d+) processes", objects)
    if count:
        yield _set_repair("setup", "world_size", int(count[1]))


_READERS: Final[Mapping[str, Callable[[Decision, str, FormState], Iterator[Repair]]]] = {
    "did you mean": _read_rename,
    "set": _read_set,
    **dict.fromkeys(("write", "use"), _read_write),
    **dict.fromkeys(("remove", "omit"), _read_remove),
    "move": _read_move,
    "start": _read_start,
}


def with_repairs(data: list[dict[str, Any]], found: list[list[Repair]]) -> list[Mapping[str, Any]]:
    """Add its buttons to each message's JSON-serialisable dict, and return the dicts."""
    return [
        {**message, "repairs": [repair.data() for repair in each]}
        for message, each in zip(data, found, strict=True)
    ]
