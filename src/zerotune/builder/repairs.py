"""Buttons for what is wrong: each does what a fix says, and is offered only if that mends it.

A fix is a sentence for people. What it asks for (a value, another name, no such key) is read from
its words and tried on a copy of the form: what leaves the finding standing, or makes another one
where it wrote, is not offered. So a sentence that is misread costs a button, never a wrong one.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import attrs

from zerotune.builder.forms import FormState, is_written, to_wire
from zerotune.builder.preview import Machines, Preview, understand
from zerotune.decisions import Decision
from zerotune.errors import UNSET
from zerotune.optimizers.catalogue import OPTIMIZERS
from zerotune.optimizers.schedules import SCHEDULERS
from zerotune.plan.model import ZERO_ALIASES

MOST_BUTTONS: Final = 4
"""Maximum number of buttons of one finding."""
_MOST_TRIED: Final = 8
_MOST_FINDINGS: Final = 20
"""Maximum number of findings with buttons; the worst come first."""


@attrs.frozen(kw_only=True)
class Edit:
    """One change of the form: set, rename or remove a setting."""

    store: str = "config"
    path: str
    value: Any = UNSET
    """The new value; ``UNSET`` removes the setting."""
    to: str = ""
    """The new path of a renamed setting."""

    def apply(self, state: FormState) -> None:
        """Change ``state`` in place."""
        held: dict[str, Any] = getattr(state, self.store)
        if self.to:
            value = _taken_out(held, self.path.split("."))
            _put(held, self.to.split("."), value)
        elif self.value is UNSET:
            _taken_out(held, self.path.split("."))
        else:
            _put(held, self.path.split("."), self.value)

    def data(self) -> dict[str, Any]:
        """Return the data for the page."""
        data: dict[str, Any] = {"store": self.store, "path": self.path}
        if self.to:
            return {**data, "to": self.to}
        return data if self.value is UNSET else {**data, "value": to_wire(self.value)}


def _taken_out(held: dict[str, Any], names: list[str]) -> Any:
    if names[0] not in held:
        return None
    if len(names) == 1:
        return held.pop(names[0])
    below = held[names[0]]
    if not isinstance(below, dict):
        return None
    found = _taken_out(below, names[1:])
    if not below:
        # A section that becomes empty goes with its last key: an empty one means something else.
        del held[names[0]]
    return found


def _put(held: dict[str, Any], names: list[str], value: Any) -> None:
    for name in names[:-1]:
        if not isinstance(held.get(name), dict):
            held[name] = {}
        held = held[name]
    held[names[-1]] = value


@attrs.frozen(kw_only=True)
class Repair:
    """A button that repairs the form: its label and its changes."""

    label: str
    edits: tuple[Edit, ...]

    def data(self) -> dict[str, Any]:
        """Return the data for the page."""
        return {"label": self.label, "edits": [edit.data() for edit in self.edits]}


def repairs(preview: Preview, state: FormState, machines: Machines) -> list[list[Repair]]:
    """List each message's repairs, most direct first; notes without a fix have no repairs."""
    found: list[list[Repair]] = []
    for message in preview.messages:
        wanted = bool(message.fix) or message.severity == "error"
        worth = wanted and sum(map(bool, found)) < _MOST_FINDINGS
        found.append(list(_that_mend(message, preview, state, machines)) if worth else [])
    return found


def _that_mend(
    message: Decision, preview: Preview, state: FormState, machines: Machines
) -> Iterator[Repair]:
    seen: list[tuple[Edit, ...]] = []
    labels: set[str] = set()
    for repair in _proposed(message, state):
        if repair.edits in seen or len(seen) >= _MOST_TRIED or len(labels) >= MOST_BUTTONS:
            continue
        seen.append(repair.edits)
        if repair.label not in labels and _mends(repair, message, preview, state, machines):
            labels.add(repair.label)
            yield repair
    if not labels:
        yield from _taking_away(message, preview, state, machines)


def _taking_away(
    message: Decision, preview: Preview, state: FormState, machines: Machines
) -> Iterator[Repair]:
    """What is left where a fix asks for something only the user knows: to write nothing."""
    store, path = _stored_at(message.key)
    for edit in (Edit(store=store, path=path), Edit(store=store, path=path.rpartition(".")[0])):
        if not edit.path or not is_written(getattr(state, store), edit.path):
            continue
        word = "Clear" if store == "setup" else "Remove"
        repair = Repair(label=f"{word} {_label_of_path(edit.path)}", edits=(edit,))
        if _mends(repair, message, preview, state, machines):
            yield repair
            return


def _mends(
    repair: Repair, message: Decision, preview: Preview, state: FormState, machines: Machines
) -> bool:
    after = copy.deepcopy(state)
    for edit in repair.edits:
        edit.apply(after)
    left = understand(after, machines).messages
    if any(_same(one, message) for one in left):
        return False
    touched = [_key(edit.store, edit.to or edit.path) for edit in repair.edits]
    new = [one for one in left if not any(_same(one, before) for before in preview.messages)]
    return not any(
        one.severity == "error" and (one.key.startswith(key) or key.startswith(one.key))
        for one in new
        for key in touched
    )


def _same(one: Decision, other: Decision) -> bool:
    # Not the reason: where another message gives it already, it only points there.
    return all(getattr(one, name) == getattr(other, name) for name in ("key", "rule", "fix"))


# -- Where a setting is.


def _stored_at(key: str) -> tuple[str, str]:
    """The part of the form a key is in, and its path there."""
    for store in ("setup", "launch"):
        if key.startswith(f"{store}."):
            return store, key.removeprefix(f"{store}.")
    return "config", key


def _key(store: str, path: str) -> str:
    return path if store == "config" else f"{store}.{path}"


def _label_of_path(path: str) -> str:
    """A path as a button has room for it: its last two names."""
    return ".".join(path.split(".")[-2:]).removeprefix("zero_optimization.")


def _paths(name: str, key: str) -> Iterator[str]:
    """Where a fix may mean a setting that it calls ``name``, beside or around ``key``."""
    if name.startswith(("setup.", "zero_optimization.")):
        yield name
        return
    section = key
    while section:
        section = section.rpartition(".")[0]
        yield f"{section}.{name}" if section else name
    if not key.startswith("zero_optimization"):
        yield f"zero_optimization.{name}"
    yield f"zero_optimization.offload_optimizer.{name}"


# -- What a fix asks for, by its words.


_IN_QUOTES: Final = re.compile(r"\"([^\"]*)\"|'([^']*)'")
_SET: Final = re.compile(
    r"(?:\b(?:set|or|and)|,) (?:the )?([A-Za-z_][\w.]*) to "
    r"(\"[^\"]*\"|[-+]?\d[\d.e+-]*\d|\d|true|false)"
)
_EQUAL: Final = re.compile(r"([a-z_]\w*) = (\d+)")
_REMOVE: Final = re.compile(r"\b(?:remove|leave) (it|this key|the key|the section|[a-z_][\w.]*)")
_VALUE: Final = re.compile(
    r"\"([^\"]*)\"|'([^']*)'|(?<![\w.\"'-])([-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?)(?![\w.])"
    r"|\b(true|false|bf16|fp16|fp32)\b|\b(\w+)\b"
)
_UNTIL: Final = re.compile(r";| to | for | instead| which | if | unless |, or remove|, or leave|\?")
_WRITE: Final = re.compile(r"\b(?:write|use|one of) ((?!for example).+)")


def _proposed(message: Decision, state: FormState) -> Iterator[Repair]:
    """What the words of a fix may ask for, most specific first."""
    fix = message.fix
    meant = re.search(r"did you mean (.+?)\?", fix)
    if meant:
        yield from _other_names(message, meant[1], state)
    belongs = re.search(r"it belongs to (.+)", fix)
    if belongs:
        yield from _moved_to(message, belongs[1])
    for name, value in _SET.findall(fix):
        yield from _written(message, name, json.loads(value))
    for name, value in _EQUAL.findall(fix):
        yield _setting("config", name, int(value))
    yield from _kept_alone(message, state)
    store, path = _stored_at(message.key)
    if store != "setup" and not meant:
        yield from _values(message)
    unknown = ["it"] if meant and not path.endswith(".type") else []
    for what in (*unknown, *_REMOVE.findall(fix)):
        yield from _without(message, what, state)
    if "switch one of them off" in fix:
        for name in ("fp16", "bf16"):
            yield _setting("config", f"{name}.enabled", False)


def _setting(store: str, path: str, value: Any, *, bare: bool = False) -> Repair:
    shown = value if isinstance(value, str) else json.dumps(value)
    label = f"Write {shown}" if bare else f"Set {_label_of_path(path)} to {shown}"
    return Repair(label=label, edits=(Edit(store=store, path=path, value=value),))


def _other_names(message: Decision, words: str, state: FormState) -> Iterator[Repair]:
    store, path = _stored_at(message.key)
    quoted = [one or other for one, other in _IN_QUOTES.findall(words)]
    names = quoted or re.split(r" or |, ", words)
    if path.endswith(".type"):
        for name in names:
            yield _setting(store, path, name, bare=True)
        return
    section = path.rpartition(".")[0]
    for name in names:
        beside = f"{section}.{name}" if section else name
        for target in dict.fromkeys((beside, name)):
            if is_written(getattr(state, store), target):
                continue
            edit = Edit(store=store, path=path, to=target)
            yield Repair(label=f"Rename to {_label_of_path(target)}", edits=(edit,))


def _moved_to(message: Decision, words: str) -> Iterator[Repair]:
    store, path = _stored_at(message.key)
    name = path.rpartition(".")[2]
    for section in re.findall(r"[a-z_][\w.]*", words):
        target = section if section.endswith(name) else f"{section}.{name}"
        edit = Edit(store=store, path=path, to=target)
        yield Repair(label=f"Move to {target}", edits=(edit,))


def _written(message: Decision, name: str, value: Any) -> Iterator[Repair]:
    for path in _paths(name, message.key):
        store, inside = _stored_at(path)
        yield _setting(store, inside, value)


def _kept_alone(message: Decision, state: FormState) -> Iterator[Repair]:
    """One of two spellings, or one of two settings, that say the same."""
    kept = re.search(r"keep only '?([\w.]+)'?", message.fix)
    if not kept:
        return
    store, path = _stored_at(message.key)
    section, _, name = path.rpartition(".")
    others = [old for old, new in ZERO_ALIASES.items() if new == name]
    for other in (*others, *([name] if name != kept[1] else [])):
        whole = f"{section}.{other}" if section else other
        if is_written(getattr(state, store), whole):
            edit = Edit(store=store, path=whole)
            yield Repair(label=f"Remove {_label_of_path(whole)}", edits=(edit,))


def _values(message: Decision) -> Iterator[Repair]:
    store, path = _stored_at(message.key)
    for clause in _WRITE.findall(message.fix):
        for quoted, single, number, word, name in _VALUE.findall(_UNTIL.split(clause)[0]):
            if number or word in ("true", "false"):
                yield _setting(store, path, json.loads(number or word), bare=True)
            elif word:
                yield _precision(word)
            elif quoted or single:
                yield _setting(store, path, quoted or single, bare=True)
            elif path.endswith(".type") and (name in OPTIMIZERS or name in SCHEDULERS):
                yield _setting(store, path, name, bare=True)
    stage = re.search(r"\bat stage (\d)", message.fix)
    if stage:
        yield _setting("config", "zero_optimization.stage", int(stage[1]))


def _precision(name: str) -> Repair:
    edits = tuple(Edit(path=f"{one}.enabled", value=one == name) for one in ("bf16", "fp16"))
    return Repair(label=f"Use {name}", edits=edits)


def _without(message: Decision, what: str, state: FormState) -> Iterator[Repair]:
    store, path = _stored_at(message.key)
    if what in ("it", "this key", "the key"):
        paths: Iterable[str] = (path,)
    elif what == "the section":
        paths = (path.rpartition(".")[0], path)
    else:
        paths = (_stored_at(one)[1] for one in _paths(what, message.key))
    for one in paths:
        if one and is_written(getattr(state, store), one):
            yield Repair(
                label=f"Remove {_label_of_path(one)}", edits=(Edit(store=store, path=one),)
            )


def with_repairs(data: list[dict[str, Any]], found: list[list[Repair]]) -> list[Mapping[str, Any]]:
    """Return messages as data for the page, with their buttons."""
    return [
        {**message, "repairs": [repair.data() for repair in each]}
        for message, each in zip(data, found, strict=True)
    ]
