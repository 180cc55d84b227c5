"""How sections are declared, read and written: one mechanism for all of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

import attrs

from zerotune.decisions import Decision
from zerotune.errors import InvalidValueError, PlanConflictError, UnknownKeyError, ZeroTuneError
from zerotune.plan.kinds import Kind, Reading, check_json

SectionT = TypeVar("SectionT", bound="Section")


class Section:
    """Base of the frozen sections of a plan.

    Attribute names are DeepSpeed's own key names; ``None`` means "not written".
    """

    __slots__ = ()

    aliases: ClassVar[Mapping[str, str]] = {}
    """Other spellings of modelled keys."""
    passed_through: ClassVar[frozenset[str]] = frozenset()
    """Keys that DeepSpeed knows and zerotune keeps in ``extra`` without looking at them."""

    def to_dict(self) -> dict[str, Any]:
        """What is written, as DeepSpeed's JSON spells it; a fresh, deep copy."""
        written: dict[str, Any] = {}
        for attribute in modelled(type(self)):
            value = getattr(self, attribute.name)
            if value is None:
                continue
            written[attribute.name] = (
                value.to_dict() if isinstance(value, Section) else copy.deepcopy(value)
            )
        written.update(copy.deepcopy(dict(getattr(self, "extra", {}))))
        return written


def setting(kind: Kind) -> Any:
    """Declare a modelled key of a section; unset by default."""
    eq = said if isinstance(kind, Nested) else True
    return attrs.field(default=None, validator=_check, eq=eq, metadata={"kind": kind})


def said(section: Section | None) -> Section | None:
    """A section as comparisons see it: an empty one says as little as none at all."""
    return None if section is None or section == type(section)() else section


def extra_keys() -> Any:
    """Declare the field that keeps the keys zerotune does not model."""
    return attrs.field(factory=dict, converter=_own_copy, validator=_check_extra)


def modelled(cls: type[Section]) -> list[attrs.Attribute[Any]]:
    """The modelled keys of a section class, in writing order."""
    fields: tuple[attrs.Attribute[Any], ...] = attrs.fields(cls)  # type: ignore[arg-type]
    return [attribute for attribute in fields if "kind" in attribute.metadata]


def evolved(section: SectionT, **changes: Any) -> SectionT:
    """``attrs.evolve`` for any section class; every check runs again."""
    return attrs.evolve(section, **changes)  # type: ignore[misc]


def as_tuple(decisions: Iterable[Decision]) -> tuple[Decision, ...]:
    """Converter of the fields that hold decisions."""
    return tuple(decisions)


def _own_copy(value: Any) -> Any:
    return copy.deepcopy(dict(value)) if isinstance(value, Mapping) else value


def _check(_instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if value is not None:
        attribute.metadata["kind"].check(value, attribute.name)


def _check_extra(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, Mapping):
        raise InvalidValueError("must be a mapping", key=attribute.name, value=value)
    for key in value:
        if key in {field.name for field in modelled(type(instance))}:
            raise InvalidValueError(
                "is a modelled key", key=str(key), fix=f"pass it as {key}=… instead of in extra"
            )
    check_json(value, attribute.name)


@attrs.frozen
class Nested:
    """A kind whose values are sections of ``cls``."""

    cls: type[Section]
    before: Callable[[dict[str, Any], str, list[Decision]], dict[str, Any]] | None = None
    """Rewrites the raw section before it is read."""
    without: Mapping[str, str] = attrs.field(factory=dict)
    """Keys of the section class that do not exist at this place, and where they do."""

    def check(self, value: Any, key: str) -> None:
        """Accept an instance of the section class."""
        if not isinstance(value, self.cls):
            raise InvalidValueError(
                f"must be a {self.cls.__name__}",
                key=key,
                value=value,
                fix=f"pass {self.cls.__name__}(…), or read the plan with DeepSpeedPlan.from_dict",
            )
        for name, place in self.without.items():
            if getattr(value, name) is not None:
                raise misplaced_key(f"{key}.{name}", getattr(value, name), place)

    def read(self, value: Any, key: str) -> Reading:
        """Read a section without recording decisions."""
        return read_section(self.cls, value, key=key, decisions=[]), None


def read_section(
    cls: type[SectionT],
    raw: Any,
    *,
    key: str,
    decisions: list[Decision],
    also_known: Collection[str] = (),
) -> SectionT:
    """Build a section from what was written, recording every change to it.

    Args:
        cls: The section class.
        raw: What was written; must be a mapping.
        key: Path of the section (``"zero_optimization"``); ``""`` for the whole plan.
        decisions: Receives one decision per normalised value.
        also_known: Full paths of further keys to pass through.

    Raises:
        InvalidValueError: A value of the wrong type or out of range.
        UnknownKeyError: A key that nobody knows.
        PlanConflictError: A key written twice, once under an alias.
    """
    _require_object(raw, key)
    kinds = {attribute.name: attribute.metadata["kind"] for attribute in modelled(cls)}
    values: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    for written, value in raw.items():
        name = _canonical_key(cls, written, raw, key, decisions)
        path = join(key, name)
        if name in kinds:
            result = _read_value(kinds[name], value, path, decisions, also_known)
            if result is not None:
                values[name] = result
        elif _passes(cls, name, path, also_known):
            check_json(value, path)
            extra[name] = value
        else:
            raise unknown_key(name, value, path, {*kinds, *cls.passed_through, *cls.aliases})
    with located(key):
        return cls(**values, **({"extra": extra} if extra else {}))


def _require_object(raw: Any, key: str) -> None:
    if not isinstance(raw, Mapping):
        raise InvalidValueError(
            "must be an object", key=key or None, value=raw, fix='write {"name": value, …}'
        )


def join(prefix: str, name: str) -> str:
    """The path of ``name`` inside ``prefix``."""
    return f"{prefix}.{name}" if prefix else name


@contextmanager
def located(prefix: str) -> Iterator[None]:
    """Put ``prefix`` before the key of any zerotune error raised inside."""
    try:
        yield
    except ZeroTuneError as error:
        if prefix and error.key is not None:
            error.key = join(prefix, error.key)
            error.args = (error._message(),)
        raise


def unknown_key(name: str, value: Any, path: str, known: Collection[str]) -> UnknownKeyError:
    """The error for a key nobody knows, with the nearest known ones."""
    import difflib

    guesses = difflib.get_close_matches(name.lower(), sorted(known), n=2, cutoff=0.6)
    meant = _COMMON_MISTAKES.get(name) or " or ".join(repr(guess) for guess in guesses)
    fix = f"did you mean {meant}?" if meant else "remove it, or check its spelling and its place"
    return UnknownKeyError(
        "neither DeepSpeed nor zerotune knows this key", key=path, value=value, fix=fix
    )


def misplaced_key(path: str, value: Any, place: str) -> UnknownKeyError:
    """The error for a key that belongs to another section."""
    return UnknownKeyError(
        "DeepSpeed refuses this key here", key=path, value=value, fix=f"it belongs to {place}"
    )


_COMMON_MISTAKES = {
    "max_grad_norm": "'gradient_clipping'",
    "train_batch": "'train_batch_size'",
    "monitor_config": "'tensorboard', 'wandb' or 'csv_monitor' at the top level",
    "sequence_parallel": "'sequence_parallel_size'",
    "learning_rate": "'optimizer.params.lr'",
    "lr": "'optimizer.params.lr'",
}


def _canonical_key(
    cls: type[Section],
    written: Any,
    raw: Mapping[Any, Any],
    key: str,
    decisions: list[Decision],
) -> str:
    if not isinstance(written, str):
        raise InvalidValueError(
            "has a key that is not text", key=key or None, value=written, fix="write it in quotes"
        )
    name = cls.aliases.get(written, written)
    if name == written:
        return written
    if name in raw:
        raise PlanConflictError(
            f"is written twice, as {written!r} and as {name!r}",
            key=join(key, name),
            value=raw[written],
            fix=f"keep only {name!r}",
        )
    decisions.append(
        Decision(
            key=join(key, written),
            before=written,
            after=name,
            reason=f"DeepSpeed's documented spelling of this key is {name!r}",
        )
    )
    return name


def _read_value(
    kind: Any, value: Any, path: str, decisions: list[Decision], also_known: Collection[str]
) -> Any:
    if value is None and getattr(kind, "null", None) is None:
        decisions.append(
            Decision(key=path, before="null", after=None, reason="null means not written")
        )
        return None
    if isinstance(kind, Nested):
        if isinstance(value, Mapping) and kind.before is not None:
            value = kind.before(dict(value), path, decisions)
        for name, place in kind.without.items():
            if isinstance(value, Mapping) and value.get(name) is not None:
                raise misplaced_key(join(path, name), value[name], place)
        return read_section(kind.cls, value, key=path, decisions=decisions, also_known=also_known)
    result, reason = kind.read(value, path)
    if reason is not None:
        decisions.append(Decision(key=path, before=value, after=result, reason=reason))
    return result


def _passes(cls: type[Section], name: str, path: str, also_known: Collection[str]) -> bool:
    private = name.startswith("_") and path == name
    return private or name in cls.passed_through or path in also_known
