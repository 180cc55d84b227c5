"""Compare two plans."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal, get_args

import attrs

from zerotune._util.table import Line, Page
from zerotune.errors import InvalidValueError
from zerotune.plan.optimizer.choices import OptimizerChoice, SchedulerChoice
from zerotune.plan.render import written
from zerotune.plan.resolved import Resolved
from zerotune.plan.section import join, leaves
from zerotune.plan.settings import Settings

ChangeKind = Literal["added", "removed", "changed"]
KINDS: Final[tuple[ChangeKind, ...]] = get_args(ChangeKind)

_LONGEST: Final = 100
_SIGNS: Final[Mapping[ChangeKind, str]] = {"added": "+", "removed": "-", "changed": "~"}
_KIND_STYLES: Final[Mapping[ChangeKind, str]] = {
    "added": "good",
    "removed": "bad",
    "changed": "pending",
}


@attrs.frozen(kw_only=True)
class Change:
    """A setting that differs between two plans."""

    key: str
    """Path of the setting (``"zero_optimization.stage"``)."""
    kind: ChangeKind
    before: Any = None
    """The value in the first plan; ``None`` if only the second plan sets the key."""
    after: Any = None
    """The value in the second plan; ``None`` if only the first plan sets the key."""

    def __str__(self) -> str:
        return f"{_SIGNS[self.kind]} {self._text}"

    @property
    def line(self) -> Line:
        """The change as a line of a report."""
        return Line(self._text, indent=2, mark=_SIGNS[self.kind], style=_KIND_STYLES[self.kind])

    @property
    def _text(self) -> str:
        values = {
            "added": _short(self.after),
            "removed": _short(self.before),
            "changed": f"{_short(self.before)} -> {_short(self.after)}",
        }
        return f"{self.key}: {values[self.kind]}"

    def to_dict(self) -> dict[str, Any]:
        """Return key, kind, old and new value as a JSON-serialisable dict, without unset values."""
        sides = {
            "added": {"after": self.after},
            "removed": {"before": self.before},
            "changed": {"before": self.before, "after": self.after},
        }[self.kind]
        # Values that JSON cannot represent are written as Python text.
        return {"key": self.key, "kind": self.kind, **json.loads(_json_text(sides))}


@attrs.frozen(kw_only=True)
class PlanDifference:
    """Differences between two plans, as returned by ``diff``; falsy if there are none."""

    before: str
    """Origin of the first plan."""
    after: str
    """Origin of the second plan."""
    changes: tuple[Change, ...] = ()
    """Settings that differ, in the order of the configuration."""

    def __bool__(self) -> bool:
        return bool(self.changes)

    def explain(self) -> str:
        """Return one line per difference: ``+`` added, ``-`` removed, ``~`` changed."""
        return self.page().text()

    def page(self) -> Page:
        """Return the differences as a report."""
        count = len(self.changes)
        counted = {0: "no difference", 1: "1 difference"}.get(count, f"{count} differences")
        return Page(
            title=f"{self.before} -> {self.after}: {counted}",
            blocks=tuple(change.line for change in self.changes),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the differences as a JSON-serialisable dict."""
        changes = [change.to_dict() for change in self.changes]
        return {"before": self.before, "after": self.after, "changes": changes}


def diff_plans(before: Settings, after: Settings) -> PlanDifference:
    """Return the differences between two unresolved plans."""
    _check_kind(before, after)
    return PlanDifference(
        before=before.source,
        after=after.source,
        changes=_compare_all(_settings_of_plan(before), _settings_of_plan(after)),
    )


def diff_resolved(before: Resolved, after: Resolved) -> PlanDifference:
    """Compare configuration, engine, optimizer and schedule of two resolved plans.

    Reasons are not compared. Plans with unresolved values can be compared too.
    """
    _check_kind(before, after)
    return PlanDifference(
        before=before.requested.source,
        after=after.requested.source,
        changes=_compare_all(_settings_that_run(before), _settings_that_run(after)),
    )


def _check_kind(before: object, after: object) -> None:
    if type(before) is not type(after):
        name = type(before).__name__
        raise InvalidValueError(
            f"can only be compared with a {name}",
            f"pass a {name}; resolve() turns a plan into a resolved plan",
            "other",
            type(after).__name__,
        )


def _settings_of_plan(plan: Settings) -> dict[str, Any]:
    settings = plan.to_dict()
    if plan.launch is not None:
        settings["launch"] = plan.launch.to_dict()
    return settings


def _settings_that_run(resolved: Resolved) -> dict[str, Any]:
    settings = written(resolved)
    settings["world_size"] = resolved.world_size
    settings["uses_deepspeed"] = resolved.uses_deepspeed
    settings["precision"] = resolved.precision
    # The rendered configuration lacks objects that the engine builds itself.
    for name, choice in (("optimizer", resolved.optimizer), ("scheduler", resolved.scheduler)):
        if choice is not None:
            settings[name] = {**settings.get(name, {}), **_choice_settings(choice)}
    return settings


def _choice_settings(choice: OptimizerChoice | SchedulerChoice) -> dict[str, Any]:
    data = attrs.asdict(choice, filter=lambda _, value: value is not None)
    groups = {group.pop("name"): group for group in data.pop("groups", ())}
    return {"type": data.pop("name"), **data, **({"groups": groups} if groups else {})}


def _compare_all(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[Change, ...]:
    return tuple(_compare(before, after, ""))


def _compare(before: Mapping[str, Any], after: Mapping[str, Any], above: str) -> Iterator[Change]:
    for name in [*before, *(key for key in after if key not in before)]:
        key = join(above, str(name))
        if name not in after:
            for path, value in leaves(before[name], key):
                yield Change(key=path, kind="removed", before=value)
        elif name not in before:
            for path, value in leaves(after[name], key):
                yield Change(key=path, kind="added", after=value)
        elif isinstance(before[name], Mapping) and isinstance(after[name], Mapping):
            yield from _compare(before[name], after[name], key)
        elif before[name] != after[name]:
            yield Change(key=key, kind="changed", before=before[name], after=after[name])


def _short(value: Any) -> str:
    text = _json_text(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=repr)
