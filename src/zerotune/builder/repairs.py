"""Buttons that apply the edits of messages; a button is offered only if its edits work.

The rule or reader that finds a fault states as edits what to write instead. Each alternative is
tried once on a copy of the form. It is offered only if it removes the message and causes no error
in a setting that it changes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import reduce
from itertools import islice
from typing import Any, Final

import attrs

from zerotune.builder.fields import setup_labels
from zerotune.builder.forms import FormState, to_wire
from zerotune.builder.preview import Preview, understand
from zerotune.builder.setup import Machines
from zerotune.decisions import Decision
from zerotune.errors import REMOVAL, UNSET, Edits
from zerotune.plan.read import canonical_path
from zerotune.plan.section import value_at
from zerotune.plan.sections import PRECISIONS, only_precision

MAX_BUTTONS: Final = 4
"""Maximum number of buttons per finding."""
_MAX_FINDINGS: Final = 20
"""Maximum number of findings with buttons; the worst come first."""


@attrs.frozen(kw_only=True)
class Edit:
    """One change to the form: set or remove a setting."""

    store: str = "config"
    path: str
    value: Any = UNSET
    """The new value; ``UNSET`` removes the setting."""

    def applied(self, state: FormState) -> FormState:
        """Return the form with the change."""
        section = _with_setting(getattr(state, self.store), self.path.split("."), self.value)
        return attrs.evolve(state, **{self.store: section})

    def data(self) -> dict[str, Any]:
        """Return the change as a JSON-serialisable dict."""
        data: dict[str, Any] = {"store": self.store, "path": self.path}
        return data if self.value is UNSET else {**data, "value": to_wire(self.value)}

    @property
    def key(self) -> str:
        """The setting's key in messages."""
        return canonical_path(self.path) if self.store == "config" else f"{self.store}.{self.path}"

    @property
    def label(self) -> str:
        """The field's name, or the last two names of the path."""
        if self.store == "setup":
            return setup_labels().get(self.path, self.path)
        whole = self.path if self.store == "config" else f"{self.store}.{self.path}"
        return ".".join(whole.split(".")[-2:]).removeprefix("zero_optimization.")


def _with_setting(section: dict[str, Any], names: list[str], value: Any) -> dict[str, Any]:
    """Return a section with one setting changed; with ``UNSET``, the setting is removed."""
    first, *rest = names
    if rest:
        below = section.get(first)
        # A section that becomes empty goes too, because an empty one means something else.
        value = _with_setting(below if isinstance(below, dict) else {}, rest, value) or UNSET
    changed = {**section, first: value}
    return {key: each for key, each in changed.items() if each is not UNSET}


@attrs.frozen(kw_only=True)
class Repair:
    """A button that repairs the form: its label and its changes."""

    label: str
    edits: tuple[Edit, ...]
    moves: bool
    """Whether the second edit writes the value that the first removes, so the page may keep its
    place."""

    def data(self) -> dict[str, Any]:
        """Return the repair as a JSON-serialisable dict."""
        edits = [edit.data() for edit in self.edits]
        return {"label": self.label, "edits": edits, "moves": self.moves}


def repairs(preview: Preview, state: FormState, machines: Machines) -> list[list[Repair]]:
    """List each message's repairs, most direct first; choices and notes without edits have none."""
    found: list[list[Repair]] = []
    for message in preview.messages:
        worth = sum(map(bool, found)) < _MAX_FINDINGS
        found.append(_find_repairs(message, preview, state, machines) if worth else [])
    return found


def _find_repairs(
    message: Decision, preview: Preview, state: FormState, machines: Machines
) -> list[Repair]:
    def effective(alternatives: tuple[Edits, ...]) -> list[Repair]:
        proposed = _propose(alternatives, message, state)
        working = (one for one in proposed if _is_effective(one, message, preview, state, machines))
        return list(islice(working, MAX_BUTTONS))

    found = effective(message.edits)
    if found or message.severity == "note" or (message.is_choice and message.severity != "error"):
        return found
    # Only the user knows the value that the fix needs.
    return [] if REMOVAL in message.edits else effective((REMOVAL,))


def _propose(
    alternatives: tuple[Edits, ...], message: Decision, state: FormState
) -> Iterator[Repair]:
    for edits in alternatives:
        located = tuple(
            Edit(store=store, path=path, value=value)
            for key, value in edits.items()
            if key or message.key
            for store, path in [_locate(key or message.key, state)]
        )
        there = [value_at(getattr(state, one.store), one.path) is not UNSET for one in located]
        removes = [one.value is UNSET for one in located]
        moves = removes == [True, False] and located[1].value is message.before
        moves = moves and located[0].store == located[1].store
        absent = any(gone and not written for gone, written in zip(removes, there, strict=True))
        # A move must not overwrite a value.
        if located and not absent and not (moves and there[1]):
            label = _move_label(*located) if moves else _label(edits, located)
            yield Repair(label=label, edits=located, moves=moves)


def _is_effective(
    repair: Repair, message: Decision, preview: Preview, state: FormState, machines: Machines
) -> bool:
    after = reduce(lambda form, edit: edit.applied(form), repair.edits, state)
    remaining = understand(after, machines).messages
    known = [_about(one) for one in preview.messages]
    new = [one for one in remaining if one.severity == "error" and _about(one) not in known]
    return _about(message) not in map(_about, remaining) and not any(
        one.key.startswith(edit.key) or edit.key.startswith(one.key)
        for one in new
        for edit in repair.edits
    )


def _about(one: Decision) -> tuple[Any, ...]:
    """Return what makes two messages the same."""
    return one.key, one.rule, one.before, one.edits


# -- Where a setting is, and what a button is called.


def _locate(key: str, state: FormState) -> tuple[str, str]:
    """Return the store of a key, and its path in the user's spelling."""
    key = key.partition("[")[0]  # An item of a list is changed with its list.
    if key == "world_size":
        return "setup", key
    for store in ("setup", "launch"):
        if key.startswith(f"{store}."):
            return store, key.removeprefix(f"{store}.")
    path = _user_spelling(key, state.config)
    launched = value_at(state.launch, key) is not UNSET
    only_launched = launched and value_at(state.config, path) is UNSET
    return ("launch", key) if only_launched else ("config", path)


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


def _move_label(source: Edit, target: Edit) -> str:
    beside = target.path.rpartition(".")[0] == source.path.rpartition(".")[0]
    return f"Rename to {target.label}" if beside else f"Move to {target.path}"


def _label(edits: Edits, located: tuple[Edit, ...]) -> str:
    """Return the label of a button, such as ``Set stage to 3, remove nvme_path``."""
    for name in PRECISIONS:
        if edits == only_precision(name):
            return f"Use {name}"
    words = []
    for key, edit in zip(edits, located, strict=True):
        shown = edit.value if isinstance(edit.value, str) else json.dumps(edit.value, default=str)
        if edit.value is UNSET:
            words.append(f"{'Clear' if edit.store == 'setup' else 'Remove'} {edit.label}")
        else:
            words.append(f"Set {edit.label} to {shown}" if key else f"Write {shown}")
    first, *others = words
    return ", ".join([first, *(f"{each[0].lower()}{each[1:]}" for each in others)])


def with_repairs(data: list[dict[str, Any]], found: list[list[Repair]]) -> list[Mapping[str, Any]]:
    """Add its buttons to each message's JSON-serialisable dict, and return the dicts."""
    return [
        {**message, "repairs": [repair.data() for repair in each]}
        for message, each in zip(data, found, strict=True)
    ]
