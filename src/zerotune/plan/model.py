# ruff: noqa: RUF009  (`setting` and `extra_keys` return attrs.field, as RUF009 cannot see)
"""Classes for settings, sections, facts about models and runs, choices, and complete plans.

The module first defines the types of settings (*kinds*), the base class of sections, the DeepSpeed
keys that zerotune passes through, and the old spellings of keys. It then defines the sections,
facts about the model and the run, ``DeepSpeedPlan`` (what the user wants) and ``ResolvedPlan``
(what will run). Other modules read, write, check and resolve plans. Both plan classes have methods
for these actions, which import the other modules when called.
"""

from __future__ import annotations

import copy
import json
import math
import os
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, TypeVar

import attrs
from typing_extensions import override

from zerotune._util.table import Page, Readable
from zerotune._util.text import (
    as_number,
    as_texts,
    did_you_mean,
    is_integer,
    is_number,
    parse_size,
    whole,
)
from zerotune.decisions import Decision, Log, Names, announce
from zerotune.errors import (
    REMOVAL,
    UNSET,
    Edits,
    InvalidValueError,
    PlanConflictError,
    UnknownKeyError,
    UnresolvedPlanError,
    ZeroTuneError,
    writes,
)
from zerotune.optimizers.catalogue import (
    DEFAULT_OPTIMIZER,
    OptimizerChoice,
    SchedulerChoice,
    canonical,
    parse_optimizer_name,
)
from zerotune.platform.facts import CUDA

if TYPE_CHECKING:
    from typing_extensions import Self

    from zerotune.plan.advise import Advice, Preference
    from zerotune.plan.diff import PlanDifference
    from zerotune.plan.memory.estimate import EMAPlace, MemoryEstimate, Workload
    from zerotune.plan.memory.time import Rates
    from zerotune.plan.rules import Inspection
    from zerotune.plan.write import SavedPlan
    from zerotune.platform import Platform


# -- What a setting may hold: strict checks for values, lenient reading for files.
#
# Every modelled setting has a *kind*, and so has every argument of an optimizer or a schedule
# (``zerotune.optim``). ``check`` is what an attrs validator runs: it accepts only the canonical
# form. ``read`` accepts what people write (``2e8`` for an integer, ``"CPU"`` for a device) and
# returns the canonical form with the reason of the change.

Auto = Literal["auto"]
EngineName = Literal["host", "deepspeed"]
"""Engine of an Adam in host memory: zerotune's host engine, or DeepSpeed's."""
AUTO: Final[Auto] = "auto"
"""Placeholder for a value that ``resolve`` chooses."""

_LARGEST_INTEGER = 2**63 - 1

Reading = tuple[Any, "str | None"]
"""The canonical value, and why it differs from the written value (``None`` if it does not)."""


class Kind(ABC):
    """Type of a setting: checks values, and converts written values to canonical form."""

    __slots__ = ()

    @property
    def suggestions(self) -> tuple[Any, ...]:
        """Values to offer instead of an invalid one."""
        return ()

    @abstractmethod
    def check(self, value: Any, key: str) -> None:
        """Raise ``InvalidValueError`` unless ``value`` is in canonical form.

        Args:
            value: Value of the setting.
            key: Path of the setting, for messages.
        """

    @abstractmethod
    def read(self, value: Any, key: str) -> Reading:
        """Convert a written value to canonical form.

        Args:
            value: Value as written in the configuration.
            key: Path of the setting, for messages.
        """

    def read_into(self, log: Log, value: Any, key: str) -> Any:
        """Convert ``value`` as ``read`` does, and log a decision if the result differs.

        Args:
            log: Log that receives decisions.
            value: Value as written in the configuration.
            key: Path of the setting.
        """
        refuse_template(self, value, key)
        if value is None and getattr(self, "null", None) is None:
            log.decide(key=key, before="null", after=None, reason="null is read as an unset key")
            return None
        result, reason = self.read(value, key)
        if reason is not None:
            log.decide(key=key, before=value, after=result, reason=reason)
        return result


def is_auto(value: object) -> bool:
    """Whether ``value`` requests an automatic choice."""
    return isinstance(value, str) and value.strip().lower() == AUTO


@attrs.frozen(kw_only=True)
class _OrAuto(Kind):
    """A kind that may accept ``"auto"``, which leaves the value to zerotune."""

    auto: bool = True
    """Whether ``"auto"`` is a value."""

    def _read_auto(self, value: Any) -> Reading | None:
        if not self.auto or not is_auto(value):
            return None
        return AUTO, None if value == AUTO else "written as DeepSpeed spells it"

    def _refused(self, why: str, key: str, value: Any, words: str) -> InvalidValueError:
        fix = f'write {words}, or "{AUTO}"' if self.auto else f"write {words}"
        edits = writes(*self.suggestions, *([AUTO] if self.auto else []))
        return InvalidValueError(why, key=key, value=value, fix=fix, edits=edits)


@attrs.frozen(kw_only=True)
class Number(_OrAuto):
    """A finite real number, or ``"auto"``."""

    minimum: float = 0.0
    maximum: float = math.inf
    above: float | None = None
    """Exclusive lower bound."""
    below: float | None = None
    """Exclusive upper bound."""
    remark: str = ""
    """Explanation of a value with a special meaning."""

    def check(self, value: Any, key: str) -> None:
        """Accept a finite number in range, or ``"auto"`` if the setting allows it."""
        if self.auto and value == AUTO:
            return
        if not is_number(value):
            raise self._refused("must be a finite number", key, value, self.words)
        self._check_range(value, key)

    def read(self, value: Any, key: str) -> Reading:
        """Accept numbers in strings."""
        automatic = self._read_auto(value)
        if automatic is not None:
            return automatic
        number = as_number(value)
        self.check(value if number is None else number, key)
        return number, "a number written as text" if isinstance(value, str) else None

    @property
    def suggestions(self) -> tuple[Any, ...]:
        """The bounds; a negative bound has a special meaning."""
        bounds = (self.minimum if self.above is None else -1, self.maximum)
        return tuple(
            int(each) if each == int(each) else each
            for each in bounds
            if 0 <= each < _LARGEST_INTEGER
        )

    @property
    def words(self) -> str:
        """The allowed values in words, as in "a number of at least 0 and less than 1"."""
        remark = f" ({self.remark})" if self.remark else ""
        return f"a number{self._bounds()}{remark}"

    def _check_range(self, value: float, key: str) -> None:
        if (
            not self.minimum <= value <= self.maximum
            or (self.above is not None and value <= self.above)
            or (self.below is not None and value >= self.below)
        ):
            raise self._refused("is out of range", key, value, self.words)

    def _bounds(self) -> str:
        low = _bound("more than", self.above) or _bound("at least", self.minimum)
        high = _bound("less than", self.below) or _bound("at most", self.maximum)
        text = " and ".join(bound for bound in (low, high) if bound)
        return f" of {text}" if text else ""


def _bound(words: str, bound: float | None) -> str:
    if bound is None or abs(bound) >= _LARGEST_INTEGER:
        return ""
    return f"{words} {bound:.15g}"


@attrs.frozen(kw_only=True)
class Real(Number):
    """A number that is always read as a ``float``."""

    def read(self, value: Any, key: str) -> Reading:
        """Accept whole numbers and numbers in strings."""
        number, reason = Number.read(self, value, key)
        return number if number == AUTO else float(number), reason


@attrs.frozen(kw_only=True)
class Integer(Number):
    """A whole number in a range, or ``"auto"``."""

    minimum: int = 0
    maximum: int = _LARGEST_INTEGER

    def check(self, value: Any, key: str) -> None:
        """Accept an ``int`` in range, or ``"auto"`` if the setting allows it."""
        if self.auto and value == AUTO:
            return
        if not is_integer(value):
            raise self._refused("must be a whole number", key, value, self.words)
        self._check_range(value, key)

    def read(self, value: Any, key: str) -> Reading:
        """Accept integral floats and numbers in strings; refuse fractions."""
        automatic = self._read_auto(value)
        if automatic is not None:
            return automatic
        number = as_number(value)
        reason = "a number written as text" if isinstance(value, str) else None
        if isinstance(number, float) and number.is_integer():
            number, reason = int(number), "DeepSpeed wants a whole number here"
        self.check(number if is_integer(number) else value, key)
        return number, reason

    @property
    def words(self) -> str:
        """The allowed values in words, as in "an integer of at least 1"."""
        return f"an integer{self._bounds()}"


@attrs.frozen(kw_only=True)
class Numbers(Kind):
    """A fixed-length tuple of numbers."""

    each: Number
    length: int

    def check(self, value: Any, key: str) -> None:
        """Accept a tuple of valid numbers if its length is right."""
        if not isinstance(value, tuple) or self._elements(value, key) != value:
            raise self._refused(value, key)

    def read(self, value: Any, key: str) -> Reading:
        """Accept any sequence of readable numbers if its length is right."""
        return self._elements(value, key), None

    def _elements(self, value: Any, key: str) -> tuple[Any, ...]:
        if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != self.length:
            raise self._refused(value, key)
        try:
            return tuple(self.each.read(item, key)[0] for item in value)
        except InvalidValueError as error:
            raise self._refused(value, key) from error

    def _refused(self, value: Any, key: str) -> InvalidValueError:
        words = f"{self.length} numbers{self.each._bounds()}"
        return InvalidValueError(f"must be {words}", key=key, value=value, fix=f"write {words}")


_WORDS: Final[Mapping[str, bool]] = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}


@attrs.frozen(kw_only=True)
class Boolean(_OrAuto):
    """``true``, ``false`` or ``"auto"``."""

    words: Mapping[str, bool] = _WORDS
    """Other spellings of booleans, and the value of each."""

    @property
    def suggestions(self) -> tuple[Any, ...]:
        """Both values."""
        return True, False

    def check(self, value: Any, key: str) -> None:
        """Accept a ``bool``, or ``"auto"`` if the setting allows it."""
        if isinstance(value, bool) or (self.auto and value == AUTO):
            return
        raise self._refused(
            "must be true or false",
            key,
            value,
            "true or false, without quotes",
        )

    def read(self, value: Any, key: str) -> Reading:
        """Accept other spellings, such as ``"yes"``, ``"off"`` or ``1``."""
        if isinstance(value, bool):
            return value, None
        automatic = self._read_auto(value)
        if automatic is not None:
            return automatic
        word = str(value).strip().lower() if isinstance(value, str) or value in (0, 1) else ""
        if word in self.words:
            return self.words[word], "a different spelling of true or false"
        raise self._refused(
            "must be true or false",
            key,
            value,
            "true or false, without quotes",
        )


@attrs.frozen(kw_only=True)
class Choice(Kind):
    """One word from a fixed list."""

    choices: tuple[str, ...]
    synonyms: Mapping[str, str] = attrs.field(factory=dict)
    """Choice that each synonym stands for; synonyms are in lower case."""
    respelt: str = "a different spelling"
    """Reason to report if the value is not spelt like the choice."""
    null: str | None = None
    """Choice that ``null`` stands for; if ``None``, ``null`` leaves the key unset."""
    unoffered: tuple[str, ...] = ()
    """Choices that are never suggested: they can be read, but are rejected later."""

    @property
    def suggestions(self) -> tuple[Any, ...]:
        """The choices, unless they are to be suggested never."""
        return tuple(choice for choice in self.choices if choice not in self.unoffered)

    def check(self, value: Any, key: str) -> None:
        """Accept a choice in its exact spelling."""
        if not isinstance(value, str) or value not in self.choices:
            offered = self.suggestions
            fix = f"write one of {', '.join(map(repr, offered))}"
            edits = writes(*offered) if len(offered) <= _MOST_SUGGESTED else ()
            raise InvalidValueError(
                "is not an allowed value", key=key, value=value, fix=fix, edits=edits
            )

    def read(self, value: Any, key: str) -> Reading:
        """Accept upper and lower case, and synonyms."""
        if value is None and self.null is not None:
            return self.null, f"null means {self.null!r} here"
        word = value.strip().lower() if isinstance(value, str) else value
        if isinstance(value, bool):  # YAML reads the word `no` as false
            word = "yes" if value else "no"
        if isinstance(word, str):
            word = self.synonyms.get(word, word)
        self.check(word, key)
        return word, None if word == value else self.respelt


_MOST_SUGGESTED: Final = 4
"""Maximum number of choices that edits offer; only the user can choose among more."""


@attrs.frozen(kw_only=True)
class Text(Kind):
    """A word or a name."""

    empty: bool = False

    def check(self, value: Any, key: str) -> None:
        """Accept a string; accept an empty string only if ``empty`` is set."""
        if not isinstance(value, str):
            raise InvalidValueError("must be text", key=key, value=value, fix="write a string")
        if not self.empty and not value.strip():
            raise InvalidValueError("is empty", key=key, value=value, fix="write a name")
        check_letters(value, key)

    def read(self, value: Any, key: str) -> Reading:
        """Strip surrounding blanks."""
        self.check(value, key)
        text = value.strip()
        return text, None if text == value else "surrounding blanks are removed"


@attrs.frozen(kw_only=True)
class Folder(Kind):
    """A path on this machine; ``"auto"`` leaves the choice to ``zerotune.offload``."""

    def check(self, value: Any, key: str) -> None:
        """Accept a non-empty string."""
        if not isinstance(value, str) or not value.strip():
            raise InvalidValueError(
                "must be the path of a folder",
                key=key,
                value=value,
                fix="write a path, or omit the key to let zerotune choose the folder",
            )
        check_letters(value, key)

    def read(self, value: Any, key: str) -> Reading:
        """Accept path objects; read an empty path or ``"none"`` as an unset key."""
        if isinstance(value, os.PathLike):
            return str(os.fspath(value)), None
        if isinstance(value, str) and value.strip().lower() in {"", "none", "null"}:
            return None, "no folder given; zerotune will choose one"
        self.check(value, key)
        return value, None


@attrs.frozen(kw_only=True)
class Free(Kind):
    """A JSON object whose keys zerotune does not check."""

    def check(self, value: Any, key: str) -> None:
        """Accept a mapping that JSON can represent."""
        if not isinstance(value, Mapping):
            raise InvalidValueError(
                "must be an object", key=key, value=value, fix='write {"name": value, …}'
            )
        check_json(value, key)

    def read(self, value: Any, key: str) -> Reading:
        """Same as ``check``."""
        self.check(value, key)
        return dict(value), None


@attrs.frozen
class Anything(Kind):
    """Any value, passed on unchanged."""

    def check(self, value: Any, key: str) -> None:
        """Accept everything."""

    def read(self, value: Any, key: str) -> Reading:  # noqa: ARG002
        """Change nothing."""
        return value, None


def check_json(value: Any, key: str) -> None:
    """Raise ``InvalidValueError`` unless ``value`` survives a round trip through JSON."""
    left = [_MOST_VALUES]
    _check_json(value, key, (), left)


def _check_json(value: Any, key: str, path: tuple[str | int, ...], left: list[int]) -> None:
    if isinstance(value, Mapping):
        items: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    else:
        _check_scalar(value, _place_of(key, path))
        return
    if len(path) > _DEEPEST_NESTING:
        raise InvalidValueError(
            "is nested too deeply",
            key=_place_of(key, path),
            fix=f"use at most {_DEEPEST_NESTING} levels",
        )
    left[0] -= len(value)
    if left[0] < 0:
        raise InvalidValueError(
            "contains too many values for a configuration", key=key, fix="shorten the configuration"
        )
    mapping = isinstance(value, Mapping)
    for name, item in items:
        if mapping:
            if not isinstance(name, str):
                raise InvalidValueError(
                    "has a key that is not text",
                    key=_place_of(key, path),
                    value=name,
                    fix="put it in quotes",
                )
            if not name.isascii():
                check_letters(name, _place_of(key, path))
        if not _is_json_scalar(item):
            _check_json(item, key, (*path, name), left)


def _is_json_scalar(value: Any) -> bool:
    """Whether ``value`` is a scalar that JSON can represent; fast for long lists."""
    kind = type(value)
    if kind is str:
        return bool(value.isascii())
    if kind is float:
        return math.isfinite(value)
    if kind is int:
        return bool(-_LARGEST_INTEGER <= value <= _LARGEST_INTEGER)
    return kind is bool or value is None


def copied(value: Any) -> Any:
    """Return a deep copy of a JSON value."""
    if type(value) is list:
        return [each if type(each) in _SCALARS else copied(each) for each in value]
    if isinstance(value, dict):
        return {
            name: each if type(each) in _SCALARS else copied(each) for name, each in value.items()
        }
    return value if type(value) in _SCALARS else copy.deepcopy(value)


def check_letters(text: str, key: str) -> None:
    """Raise ``InvalidValueError`` if ``text`` contains an unpaired surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidValueError(
            "contains an unpaired surrogate (\\ud800-\\udfff), which is not valid Unicode",
            key=key,
            value=text,
            fix="write the character itself",
        ) from None


def _check_scalar(value: Any, key: str) -> None:
    if isinstance(value, str):
        check_letters(value, key)
    elif value is not None and not isinstance(value, bool) and not is_number(value):
        raise InvalidValueError(
            "cannot be written as JSON",
            key=key,
            value=value,
            fix="use only objects, lists, text, finite numbers, true, false and null",
        )


def _place_of(key: str, path: tuple[str | int, ...]) -> str:
    return key + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)


_SCALARS: Final = frozenset({str, int, float, bool, type(None)})
_MOST_VALUES: Final = 2**22
"""Values in 10 MB of JSON. Only nested YAML references expand to more."""
_DEEPEST_NESTING = 50


# -- How sections are declared, read and written: one mechanism for all of them.


SectionT = TypeVar("SectionT", bound="Section")


class Section:
    """Base class of the frozen sections of a plan.

    Attribute names are DeepSpeed's key names; ``None`` means that a key is not set.
    """

    __slots__ = ()

    aliases: ClassVar[Mapping[str, str]] = {}
    """Other spellings of modelled keys."""
    unread: ClassVar[frozenset[str]] = frozenset()
    """Spellings among ``aliases`` that DeepSpeed ignores or rejects."""
    passed_through: ClassVar[frozenset[str]] = frozenset()
    """Keys that DeepSpeed knows and zerotune keeps unchecked in ``extra``."""

    def to_dict(self) -> dict[str, Any]:
        """Return a new dict of all keys that are set, in DeepSpeed's spelling."""
        written: dict[str, Any] = {}
        for attribute in modelled(type(self)):
            value = getattr(self, attribute.name)
            if value is None:
                continue
            written[attribute.name] = (
                value.to_dict() if isinstance(value, Section) else copied(value)
            )
        extra = getattr(self, "extra", {})
        written.update(extra if isinstance(extra, _Kept) else copied(dict(extra)))
        return written


def setting(kind: Kind) -> Any:
    """Declare a modelled key of a section; it is unset by default."""
    eq = comparable if isinstance(kind, Nested) else True

    def check(_section: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value is not None:
            kind.check(value, attribute.name)

    return attrs.field(default=None, validator=check, eq=eq, metadata={"kind": kind})


def comparable(section: Section | None) -> Section | None:
    """Return a section, or ``None`` if it is empty, so that empty equals unset in comparisons."""
    return None if section is None or section == type(section)() else section


def extra_keys() -> Any:
    """Declare the field for keys that zerotune does not model."""
    return attrs.field(factory=dict, converter=_own_copy, validator=_check_extra)


def modelled(cls: type[Section]) -> list[attrs.Attribute[Any]]:
    """Return the fields of ``cls`` that are configuration keys, in their order of definition."""
    fields: tuple[attrs.Attribute[Any], ...] = attrs.fields(cls)  # type: ignore[arg-type]
    return [attribute for attribute in fields if "kind" in attribute.metadata]


def evolved(section: SectionT, **changes: Any) -> SectionT:
    """Return a copy of a section with changed attributes; all checks run again."""
    return attrs.evolve(section, **changes)  # type: ignore[misc]


def as_tuple(values: Iterable[Any]) -> tuple[Any, ...]:
    """Convert the values of a field to a tuple."""
    return tuple(values)


class _Kept(Mapping[str, Any]):
    """Unmodelled keys of a section: checked and copied once, however often the section is evolved.

    Several sections share one instance, so access returns copies of containers.
    """

    __slots__ = ("_own",)

    def __init__(self, own: dict[str, Any]) -> None:
        self._own = own

    def __getitem__(self, key: str) -> Any:
        return copied(self._own[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)

    def __repr__(self) -> str:
        return repr(self._own)

    def __eq__(self, other: object) -> bool:
        own = other._own if isinstance(other, _Kept) else other
        return self._own == own

    __hash__ = None  # type: ignore[assignment]


def _own_copy(value: Any) -> Any:
    if isinstance(value, _Kept) or not isinstance(value, Mapping):
        return value
    check_json(value, "extra")
    return _Kept(copied(dict(value)))


def _check_extra(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, Mapping):
        raise InvalidValueError("must be a mapping", key=attribute.name, value=value)
    for field in modelled(type(instance)) if value else ():
        if field.name in value:
            key = field.name
            raise InvalidValueError(
                "is a regular field", key=key, fix=f"pass {key}=… as an argument, not in extra"
            )


@attrs.frozen
class Nested(Kind):
    """A nested section of class ``cls``."""

    cls: type[Section]
    before: Callable[[dict[str, Any], str, Log], dict[str, Any]] | None = None
    """Function that rewrites the raw section before it is read."""
    without: Mapping[str, str] = attrs.field(factory=dict)
    """Keys of ``cls`` that are invalid here, and the section to which each belongs."""

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
        log = Log()
        return log.whole(lambda: read_section(self.cls, value, key=key, log=log)), None

    def read_into(self, log: Log, value: Any, key: str) -> Any:
        """Read a section, and record every change to it."""
        if not isinstance(value, Mapping):
            return super().read_into(log, value, key)
        if self.before is not None:
            value = self.before(dict(value), key, log)
        for name, place in self.without.items():
            if value.get(name) is not None:
                log.refuse(misplaced_key(join(key, name), value[name], place))
                value = {each: value[each] for each in value if each != name}
        return read_section(self.cls, value, key=key, log=log)


def read_section(cls: type[SectionT], raw: Any, *, key: str, log: Log) -> SectionT:
    """Build a section from a raw mapping, and record every normalised value.

    Mistakes are recorded in ``log``, and an invalid value becomes ``"auto"`` or unset.

    Args:
        cls: The section class.
        raw: The section as parsed from a file; must be a mapping.
        key: Path of the section (``"zero_optimization"``); ``""`` for the whole plan.
        log: Log that receives mistakes, and one decision per normalised value.
    """
    _require_object(raw, key)
    kinds = {attribute.name: attribute.metadata["kind"] for attribute in modelled(cls)}
    values: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    for written, value in raw.items():
        try:
            name = _canonical_key(cls, written, raw, key, log)
            path = join(key, name)
            if name in kinds:
                values[name] = AUTO if getattr(kinds[name], "auto", False) else None
                values[name] = kinds[name].read_into(log, value, path)
            elif _passes_through(cls, name, path, log.also_known):
                check_json(value, path)
                extra[name] = value
            else:
                raise unknown_key(name, value, path, {*kinds, *cls.passed_through, *cls.aliases})
        except ZeroTuneError as error:
            log.refuse(error)
    try:
        return cls(**values, **({"extra": extra} if extra else {}))
    except ZeroTuneError as error:
        log.refuse(error.below(key))
    return cls()


def _require_object(raw: Any, key: str) -> None:
    if not isinstance(raw, Mapping):
        stage = as_number(raw[0] if isinstance(raw, list) and len(raw) == 1 else raw)
        meant = key == "zero_optimization" and stage is not None and stage in (0, 1, 2, 3)
        raise InvalidValueError(
            "must be an object",
            key=key or None,
            value=raw,
            fix=None if meant else 'write {"name": value, …}',
            edits=writes({"stage": int(stage or 0)}) if meant else (),
        )


def join(prefix: str, name: str) -> str:
    """Return the path of the key ``name`` inside the section ``prefix``."""
    return f"{prefix}.{name}" if prefix else name


def passed_paths(plan: DeepSpeedPlan, *, unknown: bool = False) -> frozenset[str]:
    """Return the paths of all keys that zerotune does not model (``extra``).

    Code that reads the written plan back must accept these keys.

    Args:
        plan: The plan.
        unknown: Whether to omit keys that are accepted even if ``also_known`` does not name them.
    """
    sections: list[tuple[Section, str]] = [(plan, "")]
    sections += [(plan.launch, "launch")] if plan.launch else []
    found: set[str] = set()
    for section, prefix in sections:
        for name in getattr(section, "extra", {}):
            path = join(prefix, name)
            if not (unknown and _passes_through(type(section), name, path, ())):
                found.add(path)
        for attribute in modelled(type(section)):
            value = getattr(section, attribute.name)
            if isinstance(value, Section):
                sections.append((value, join(prefix, attribute.name)))
    return frozenset(found)


def unknown_key(name: str, value: Any, path: str, known: Collection[str]) -> UnknownKeyError:
    """Return the error for an unknown key; it suggests the most similar known keys."""
    meant = _COMMON_MISTAKES.get(name, ())
    of_zero = {each.name for each in modelled(ZeroSection)} | ZeroSection.aliases.keys()
    if path == name and name in of_zero:
        meant = (f"zero_optimization.{name}",)
    near = did_you_mean(name, sorted(known), count=2, by=str.lower)
    words = " or ".join(map(repr, meant or near))
    fix = f"did you mean {words}?" if words else "remove it, or check its spelling and its section"
    section = path.removesuffix(name)
    targets = meant or [f"{section}{each}" for each in near]
    edits: list[Edits] = [*({"": UNSET, each: value} for each in targets), REMOVAL]
    if path == "mixed_precision":
        precisions = [value] if value in ("bf16", "fp16") else ["bf16", "fp16"]
        fix = f"remove it, and set {' or '.join(f'{one}.enabled' for one in precisions)} to true"
        edits = [{"": UNSET, f"{one}.enabled": True} for one in precisions]
    return UnknownKeyError(
        "the key is unknown to DeepSpeed and zerotune", key=path, value=value, fix=fix, edits=edits
    )


def only_precision(name: str) -> Edits:
    """Return the edits that train in one precision.

    Args:
        name: ``"bf16"``, ``"fp16"`` or ``"fp32"``.
    """
    return {f"{one}.enabled": one == name for one in ("bf16", "fp16")}


def misplaced_key(path: str, value: Any, place: str) -> UnknownKeyError:
    """Return the error for a key that belongs to a different section."""
    section, _, name = path.rpartition(".")
    target = ".".join([*section.split(".")[:-1], place, name])
    return UnknownKeyError(
        "DeepSpeed rejects this key here",
        key=path,
        value=value,
        fix=f"move it to {place}",
        edits=[{"": UNSET, target: value}],
    )


_COMMON_MISTAKES: Final[Mapping[str, tuple[str, ...]]] = {
    "max_grad_norm": ("gradient_clipping",),
    "train_batch": ("train_batch_size",),
    "monitor_config": ("tensorboard", "wandb", "csv_monitor"),
    "sequence_parallel": ("sequence_parallel_size",),
    "learning_rate": ("optimizer.params.lr",),
    "lr": ("optimizer.params.lr",),
    "zero_stage": ("zero_optimization.stage",),
}


def _canonical_key(
    cls: type[Section], written: Any, raw: Mapping[Any, Any], key: str, log: Log
) -> str:
    if not isinstance(written, str):
        raise InvalidValueError(
            "contains a key that is not text",
            key=key or None,
            value=written,
            fix="put it in quotes",
        )
    name = cls.aliases.get(written, written)
    if name == written:
        return written
    if name in raw:
        raise PlanConflictError(
            f"is set under two names, {written!r} and {name!r}",
            key=join(key, name),
            value=raw[written],
            edits=[{join(key, written): UNSET}],
        )
    if written in cls.unread:
        why = f"DeepSpeed does not read this key; zerotune reads it as {name!r}"
        log.decide(join(key, written), written, name, why, "warning")
    else:
        why = f"DeepSpeed's documented spelling of this key is {name!r}"
        log.decide(join(key, written), written, name, why)
    return name


def refuse_template(kind: Kind, value: Any, key: str) -> None:
    """Raise ``InvalidValueError`` if ``value`` is an unfilled template placeholder."""
    if not isinstance(value, str) or len(value) > _LONGEST_TEMPLATE:
        return
    inside = _IN_A_PATH.search(value) if isinstance(kind, Folder) else None
    if inside or _TEMPLATE.fullmatch(value.strip()):
        words = getattr(kind, "words", "")
        meant = words if isinstance(words, str) and words else "the value itself"
        raise InvalidValueError(
            "is a template placeholder without a value",
            key=key,
            value=value,
            fix=f"write {meant}",
            edits=writes(*kind.suggestions),
        )


_LONGEST_TEMPLATE: Final = 4096
_TEMPLATE: Final = re.compile(
    r"\{\{.*\}\}|\{%.*%\}|\$\{.*\}|\$\(.*\)|\$[A-Za-z_]\w*|\{[A-Za-z_]\w*\}|<[A-Za-z_][^<>]*>"
    r"|%[A-Za-z_]\w*%|%\(\w+\)[sdf]|@[A-Za-z_]\w*@|YOUR_\w+|TODO|FIXME|\.\.\.|\u2026",
    re.DOTALL,
)
_IN_A_PATH: Final = re.compile(r"\{\{|\$\{|\$[A-Za-z_]|%[A-Za-z_]\w*%|<[A-Za-z_][^<>/]*>")
"""No shell expands variables in a path: a folder with that literal name would be created."""


def _passes_through(cls: type[Section], name: str, path: str, also_known: Collection[str]) -> bool:
    private = name.startswith("_") and path == name
    return private or name in cls.passed_through or path in also_known


# -- Keys DeepSpeed 0.18.9 to 0.19.8 and accelerate 1.15 know beyond those zerotune models.
#
# The plan layer cannot import either, so the lists are written down here; a test compares them
# with the installed DeepSpeed's own models.


TOP_LEVEL: Final = frozenset(
    {
        "activation_checkpointing",
        "allgather_size",
        "autotuning",
        "checkpoint",
        "comet",
        "comms_logger",
        "communication_data_type",
        "compile",
        "csv_monitor",
        "data_efficiency",
        "data_parallel_size",
        "data_types",
        "dataloader_drop_last",
        "datastates_ckpt",
        "disable_allgather",
        "disable_python_gc",
        "dump_state",
        "expert_parallel",
        "flops_profiler",
        "gradient_allreduce_op",
        "gradient_predivide_factor",
        "hybrid_engine",
        "log_level",
        "managed_gradient_accumulation",
        "memory_breakdown",
        "pipeline",
        "prescale_gradients",
        "seq_parallel_communication_data_type",
        "sequence_parallel_size",
        "tensor_parallel",
        "tensorboard",
        "timers",
        "torch_autocast",
        "use_data_before_expert_parallelism",
        "vocabulary_size",
        "wandb",
        "weight_quantization",
    }
)

REMOVED: Final = {
    "nebula": "Nebula checkpointing",
    "compression_training": "the compression library",
    "amp": "NVIDIA Apex AMP; use bf16 or fp16",
    "quantize_training": "mixture of quantization",
    "sparse_gradients": "sparse embedding gradients",
    "eigenvalue": "eigenvalue-based quantization",
    "sparse_attention": "sparse attention",
    "elasticity": "elastic training; set the batch keys directly",
    "graph_harvesting": "graph harvesting",
    "curriculum_learning": (
        "the top-level curriculum; use data_efficiency.data_sampling.curriculum_learning"
    ),
    "progressive_layer_drop": "progressive layer dropping",
}
"""Features that DeepSpeed 0.19 removed, by top-level key (``_REMOVED_TOP_LEVEL_CONFIG_KEYS``)."""

REMOVED_ZERO: Final = {
    "mics_shard_size": "MiCS sharding",
    "mics_hierarchical_params_gather": "MiCS sharding",
    "zeropp_loco_param": "LoCo-ZeRO++",
}
"""Features that DeepSpeed 0.19 removed, by key of ``zero_optimization``."""

ZERO: Final = frozenset(
    {
        "compute_grad_norm",
        "enable_sanity_checks",
        "leaf_module",
        "legacy_stage1",
        "log_trace_cache_warnings",
        "override_module_apply",
        "parameter_alignment",
        "pipeline_loading_checkpoint",
        "save_muon_momentum_buffer_in_memory",
        "stage3_allgather_sequential",
        "stage3_use_all_reduce_for_fetch_params",
        "zenflow",
        *REMOVED_ZERO,
    }
)

ZERO_ALIASES: Final = {
    "prefetch_bucket_size": "stage3_prefetch_bucket_size",
    "param_persistence_threshold": "stage3_param_persistence_threshold",
    "model_persistence_threshold": "stage3_model_persistence_threshold",
    "max_live_parameters": "stage3_max_live_parameters",
    "max_reuse_distance": "stage3_max_reuse_distance",
    "gather_16bit_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
    "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
    "module_granularity_threshold": "stage3_module_granularity_threshold",
    "use_all_reduce_for_fetch_params": "stage3_use_all_reduce_for_fetch_params",
    "allgather_sequential": "stage3_allgather_sequential",
    "stage3_param_persitance_threshold": "stage3_param_persistence_threshold",
    "stage3_param_persistance_threshold": "stage3_param_persistence_threshold",
    "stage3_param_persitence_threshold": "stage3_param_persistence_threshold",
}
"""Other names that DeepSpeed accepts for a setting, and misspellings found in public files."""
MISSPELT_ZERO: Final = frozenset(
    {
        "stage3_param_persitance_threshold",
        "stage3_param_persistance_threshold",
        "stage3_param_persitence_threshold",
    }
)
"""Keys of ``ZERO_ALIASES`` that DeepSpeed rejects."""

OFFLOAD: Final = frozenset({"super_offload", "cpuadam_cores_perc"})
BF16: Final[frozenset[str]] = frozenset()
FP16: Final[frozenset[str]] = frozenset()
OPTIMIZER: Final = frozenset({"legacy_fusion"})
AIO: Final[frozenset[str]] = frozenset()

ACCELERATE_BLOCK: Final = frozenset(
    {
        "deepspeed_config_file",
        "deepspeed_exclusion_filter",
        "deepspeed_hostfile",
        "deepspeed_inclusion_filter",
        "deepspeed_moe_layer_cls_names",
        "deepspeed_multinode_launcher",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "offload_optimizer_device",
        "offload_optimizer_nvme_path",
        "offload_param_device",
        "offload_param_nvme_path",
        "zero3_init_flag",
        "zero3_save_16bit_model",
        "zero_stage",
    }
)
"""Keys that accelerate reads inside ``deepspeed_config``."""

STARTING: Final = frozenset(
    {
        "command_file",
        "commands",
        "compute_environment",
        "debug",
        "deepspeed_exclusion_filter",
        "deepspeed_hostfile",
        "deepspeed_inclusion_filter",
        "deepspeed_multinode_launcher",
        "enable_cpu_affinity",
        "gpu_ids",
        "main_training_function",
        "mpirun_config",
        "rdzv_backend",
        "same_network",
    }
)
"""Keys that determine how and where accelerate starts processes, and that ``LaunchSection`` does
not model."""
LAUNCH: Final = STARTING | frozenset(
    {
        "downcast_bf16",
        "dynamo_backend",
        "dynamo_config",
        "fp16",
        "fp8_config",
        "fsdp_config",
        "megatron_lm_config",
        "parallelism_config",
        "tpu_env",
        "tpu_name",
        "tpu_use_cluster",
        "tpu_use_sudo",
        "tpu_vm",
        "tpu_zone",
        "use_cpu",
    }
)
"""Keys of accelerate's YAML file that ``LaunchSection.extra`` keeps."""


# -- Old and short spellings of a configuration, translated before it is read.


_SHORTHANDS = {
    "bf16": "enabled",
    "bfloat16": "enabled",
    "fp16": "enabled",
    "optimizer": "type",
    "scheduler": "type",
}

_LEGACY_OFFLOAD = {
    "cpu_offload": "offload_optimizer",
    "cpu_offload_param": "offload_param",
    "cpu_offload_params": "offload_param",
}


_SAVED_WHOLE: Final = "zero3_save_16bit_model"
_GATHER: Final = "stage3_gather_16bit_weights_on_model_save"
_GATHER_ALIASES: Final = tuple(name for name, key in ZERO_ALIASES.items() if key == _GATHER)


def normalise_top_level(raw: Mapping[str, Any], log: Log) -> dict[str, Any]:
    """Translate old keys and short forms at the top level, but not inside sections."""
    return _Translating(section=dict(raw), path="", log=log).top_level()


def legacy_zero(section: dict[str, Any], path: str, log: Log) -> dict[str, Any]:
    """Translate deprecated keys and short forms inside ``zero_optimization``."""
    return _Translating(section=section, path=path, log=log).zero()


@attrs.define(kw_only=True)
class _Translating:
    """Translation of old keys and short forms in one section."""

    section: dict[str, Any]
    path: str
    log: Log

    def top_level(self) -> dict[str, Any]:
        section = self.section
        self._boolean_zero()
        self.log.attempt(self._saved_whole)
        if section.get("steps_per_print") == math.inf:
            section["steps_per_print"] = _LARGEST_INTEGER
            self.log.decide(
                key="steps_per_print",
                before="inf",
                after=_LARGEST_INTEGER,
                reason='accelerate writes "inf" for "never", but DeepSpeed requires an integer',
            )
        for key, member in _SHORTHANDS.items():
            value = section.get(key)
            if isinstance(value, bool | str):
                section[key] = {member: value}
                self.log.decide(
                    key=key,
                    before=value,
                    after={member: value},
                    reason="DeepSpeed requires an object here",
                )
        self._drop_disabled(REMOVED)
        return section

    def zero(self) -> dict[str, Any]:
        section = self.section
        for key in ("offload_param", "offload_optimizer"):
            self._offload_shorthand(key)
        for key, modern in _LEGACY_OFFLOAD.items():
            if key in section:
                self.log.attempt(self._legacy_offload, key, modern)
        self._legacy_pinning()
        self._drop_disabled(REMOVED_ZERO)
        return section

    def _drop_disabled(self, removed: Mapping[str, str]) -> None:
        """Drop settings that DeepSpeed no longer has and that are switched off."""
        for key, what in removed.items():
            value = self.section.get(key, True)
            off = value is None or value is False or (self.path != "" and value == -1)
            if isinstance(value, Mapping):
                off = value.get("enabled", bool(value)) is False
            if off:
                why = f"dropped; DeepSpeed 0.19 rejects the key even if disabled: it removed {what}"
                path = join(self.path, key)
                self.log.decide(path, self.section.pop(key), None, why, "warning")

    def _boolean_zero(self) -> None:
        value = self.section.get("zero_optimization")
        if not isinstance(value, bool):
            return
        inner: dict[str, Any] = {"stage": int(value)}
        if "allgather_size" in self.section and value:
            inner["allgather_bucket_size"] = self.section.pop("allgather_size")
        self.section["zero_optimization"] = inner
        self.log.decide(
            key="zero_optimization",
            before=value,
            after=inner,
            reason="zero_optimization is a boolean; in this old form, true means stage 1",
            severity="warning",
        )

    def _saved_whole(self) -> None:
        """Translate accelerate's name of a ZeRO key, as in SimpleTuner's documentation."""
        value = self.section.get(_SAVED_WHOLE)
        zero = self.section.get("zero_optimization", {})
        if _SAVED_WHOLE not in self.section or not isinstance(zero, Mapping):
            return
        written = {name: zero[name] for name in (_GATHER, *_GATHER_ALIASES) if name in zero}
        del self.section[_SAVED_WHOLE]
        if any(each != value for each in written.values()):
            raise PlanConflictError(
                f"is also set as {next(iter(written))!r} in zero_optimization, to a "
                "different value",
                key=_SAVED_WHOLE,
                value=value,
                edits=[REMOVAL],
            )
        self.section["zero_optimization"] = dict(zero) if written else {**zero, _GATHER: value}
        self.log.decide(
            key=_SAVED_WHOLE,
            before=value,
            after=f"zero_optimization.{_GATHER} = {value}",
            reason=f"DeepSpeed does not know {_SAVED_WHOLE}, which is accelerate's name for "
            f"{_GATHER}",
        )

    def _offload_shorthand(self, key: str) -> None:
        value = self.section.get(key)
        if not isinstance(value, bool | str):
            return
        device = value if isinstance(value, str) else ("cpu" if value else "none")
        self.section[key] = {"device": device}
        self.log.decide(
            key=f"{self.path}.{key}",
            before=value,
            after={"device": device},
            reason="DeepSpeed requires an object with a device here",
        )

    def _legacy_offload(self, key: str, modern: str) -> None:
        value = self.section.pop(key)
        enabled = value is not None and Boolean(auto=False).read(value, f"{self.path}.{key}")[0]
        if modern in self.section:
            raise PlanConflictError(
                f"is the deprecated form of {modern}, and DeepSpeed rejects a file with both",
                key=f"{self.path}.{key}",
                value=value,
                fix=f"remove {key}",
                edits=[REMOVAL],
            )
        if enabled:
            self.section[modern] = {"device": "cpu"}
        self.log.decide(
            key=f"{self.path}.{key}",
            before=value,
            after=f'{modern} = {{"device": "cpu"}}' if enabled else None,
            reason=f"the key is deprecated; DeepSpeed replaced it with {modern}",
            severity="warning",
        )

    def _legacy_pinning(self) -> None:
        key = "cpu_offload_use_pin_memory"
        if key not in self.section:
            return
        value = self.section.pop(key)
        for modern in ("offload_param", "offload_optimizer"):
            if isinstance(self.section.get(modern), Mapping) and value is not None:
                self.section[modern] = {"pin_memory": value, **self.section[modern]}
        self.log.decide(
            key=f"{self.path}.{key}",
            before=value,
            after="pin_memory in the offload sections",
            reason="the key is deprecated; DeepSpeed reads pin_memory instead",
            severity="warning",
        )


# -- The sections of a DeepSpeed configuration as frozen values.
#
# Attribute names are DeepSpeed's own key names; ``None`` means "not written"; ``extra`` keeps the
# keys that DeepSpeed knows and zerotune does not model. The settings and their ranges are those
# of ``deepspeed/runtime/{config,zero/config,zero/offload_config,precision_config}.py`` 0.19.8.


OFFLOAD_DEVICES = ("none", "cpu", "nvme")
PRECISIONS = ("bf16", "fp16", "fp32")

_PARAM_ONLY = ("buffer_size", "max_in_cpu")
_OPTIMIZER_ONLY = ("ratio", "fast_init", "pipeline_read", "pipeline_write")

_DEVICE_SYNONYMS = {
    "no": "none",
    "off": "none",
    "false": "none",
    "gpu": "none",
    CUDA: "none",
    "disk": "nvme",
    "ssd": "nvme",
}
PRECISION_SYNONYMS = {
    "no": "fp32",
    "none": "fp32",
    "float32": "fp32",
    "full": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
}


@attrs.frozen(kw_only=True)
class OffloadSection(Section):
    """``offload_param`` or ``offload_optimizer``: where a partition is stored between uses."""

    passed_through: ClassVar[frozenset[str]] = OFFLOAD

    device: str | None = setting(
        Choice(
            choices=(*OFFLOAD_DEVICES, "auto"),
            synonyms=_DEVICE_SYNONYMS,
            respelt="DeepSpeed rejects this spelling",
            null="none",
        )
    )
    """``"none"``, ``"cpu"`` (host memory) or ``"nvme"`` (files; stage 3 only)."""
    nvme_path: str | None = setting(Folder())
    """Folder for the swap files; if unset or ``"auto"``, each run creates a temporary folder."""
    buffer_count: int | Auto | None = setting(Integer(minimum=1))
    """Number of buffers in the swap pool."""
    buffer_size: int | Auto | None = setting(Integer(minimum=1))
    """Size of each buffer in the parameter swap pool, in elements (not bytes)."""
    pin_memory: bool | Auto | None = setting(Boolean())
    """Page-lock the host buffers, as asynchronous copies to a GPU require."""
    ratio: float | Auto | None = setting(Number(maximum=1.0))
    """Fraction of the optimizer states to offload; stage 3 only."""
    fast_init: bool | Auto | None = setting(Boolean())
    """Create the optimizer's NVMe files from the parameters' files."""
    pipeline_read: bool | Auto | None = setting(Boolean())
    """Read the next sub-group from NVMe while the current one is updated."""
    pipeline_write: bool | Auto | None = setting(Boolean())
    """Write the previous sub-group to NVMe while the current one is updated."""
    max_in_cpu: int | Auto | None = setting(Integer())
    """Number of parameter elements that stay in host memory despite NVMe offload."""
    extra: Mapping[str, Any] = extra_keys()


def pins(section: OffloadSection | None) -> bool:
    """Whether an offload section uses page-locked buffers; ``"auto"`` counts as false."""
    return section is not None and section.pin_memory is True


@attrs.frozen(kw_only=True)
class ZeroSection(Section):
    """``zero_optimization``: what is partitioned over the ranks, and how the ranks communicate."""

    passed_through: ClassVar[frozenset[str]] = ZERO
    aliases: ClassVar[Mapping[str, str]] = ZERO_ALIASES
    unread: ClassVar[frozenset[str]] = MISSPELT_ZERO

    stage: int | Auto | None = setting(Integer(maximum=3))
    """What is partitioned: 0 nothing, 1 optimizer states, 2 also gradients, 3 also parameters."""
    offload_param: OffloadSection | None = setting(
        Nested(OffloadSection, without=dict.fromkeys(_OPTIMIZER_ONLY, "offload_optimizer"))
    )
    """Where parameters are stored between uses; stage 3 only."""
    offload_optimizer: OffloadSection | None = setting(
        Nested(OffloadSection, without=dict.fromkeys(_PARAM_ONLY, "offload_param"))
    )
    """Where optimizer states and master weights are stored and updated."""
    overlap_comm: bool | Auto | None = setting(Boolean())
    """Reduce gradients on a second stream during the backward pass; doubles the bucket memory."""
    contiguous_gradients: bool | Auto | None = setting(Boolean())
    """Copy gradients into one buffer as they are produced."""
    reduce_scatter: bool | Auto | None = setting(Boolean())
    """Reduce each gradient only to the rank that owns it."""
    reduce_bucket_size: int | Auto | None = setting(Integer(minimum=1))
    """Elements reduced at a time."""
    allgather_partitions: bool | Auto | None = setting(Boolean())
    """Gather updated parameters with all-gather instead of broadcasts."""
    allgather_bucket_size: int | Auto | None = setting(Integer())
    """Maximum number of elements gathered at a time (stages 1 and 2)."""
    use_multi_rank_bucket_allreduce: bool | Auto | None = setting(Boolean())
    """Combine the buckets of several owners in one reduction (stages 1 and 2)."""
    round_robin_gradients: bool | Auto | None = setting(Boolean())
    """Distribute the copying of gradients to host memory over the ranks (stages 1 and 2)."""
    ignore_unused_parameters: bool | Auto | None = setting(Boolean())
    """Accept parameters that receive no gradient (stage 2)."""
    load_from_fp32_weights: bool | Auto | None = setting(Boolean())
    """Initialise the master weights from a checkpoint's fp32 copy."""
    elastic_checkpoint: bool | Auto | None = setting(Boolean())
    """Use the legacy format of DeepSpeed's own checkpoints."""
    sub_group_size: int | Auto | None = setting(Integer())
    """Elements that the optimizer updates at a time (stage 3); 0: one parameter at a time."""
    stage3_prefetch_bucket_size: int | Auto | None = setting(Integer())
    """Maximum number of elements to prefetch."""
    stage3_param_persistence_threshold: int | Auto | None = setting(Integer())
    """Parameters of at most this many elements are never partitioned."""
    stage3_model_persistence_threshold: int | Auto | None = setting(Integer())
    """Maximum total number of elements in unpartitioned parameters."""
    stage3_max_live_parameters: int | Auto | None = setting(Integer())
    """Maximum number of elements that are gathered at a time."""
    stage3_max_reuse_distance: int | Auto | None = setting(Integer())
    """Keep a gathered parameter that is used again within this many elements."""
    stage3_gather_16bit_weights_on_model_save: bool | Auto | None = setting(Boolean())
    """Gather the weights for DeepSpeed's ``save_16bit_model``."""
    stage3_module_granularity_threshold: int | Auto | None = setting(Integer())
    """Fetch a module as a whole if it has fewer parameters per submodule than this; 0: never."""
    memory_efficient_linear: bool | Auto | None = setting(Boolean())
    """Use DeepSpeed's memory-efficient version of ``torch.nn.functional.linear`` (stage 3)."""
    zero_hpz_partition_size: int | Auto | None = setting(Integer())
    """Number of ranks in ZeRO++'s secondary partition; 1: off."""
    zero_quantized_weights: bool | Auto | None = setting(Boolean())
    """ZeRO++: gather quantized weights."""
    zero_quantized_nontrainable_weights: bool | Auto | None = setting(Boolean())
    """ZeRO++: store frozen weights in quantized form."""
    zero_quantized_gradients: bool | Auto | None = setting(Boolean())
    """ZeRO++: reduce quantized gradients."""
    extra: Mapping[str, Any] = extra_keys()


@attrs.frozen(kw_only=True)
class Bf16Section(Section):
    """``bf16``: bfloat16 weights with fp32 master weights."""

    passed_through: ClassVar[frozenset[str]] = BF16

    enabled: bool | Auto | None = setting(Boolean())
    immediate_grad_update: bool | Auto | None = setting(Boolean())
    """Add gradients to the master gradients as they are produced."""
    check_grad_overflow: bool | Auto | None = setting(Boolean())
    """Skip a step whose gradients are not finite."""
    bf16_master_weights_and_grads: bool | Auto | None = setting(Boolean())
    """Keep master weights and gradients in bf16 too."""
    bf16_optimizer_states: bool | Auto | None = setting(Boolean())
    """Keep optimizer states in bf16 too."""
    extra: Mapping[str, Any] = extra_keys()


@attrs.frozen(kw_only=True)
class Fp16Section(Section):
    """``fp16``: float16 weights with fp32 master weights and loss scaling."""

    passed_through: ClassVar[frozenset[str]] = FP16

    enabled: bool | Auto | None = setting(Boolean())
    auto_cast: bool | Auto | None = setting(Boolean())
    """Cast the model's inputs to fp16."""
    loss_scale: float | Auto | None = setting(Number(remark="0 means dynamic"))
    """Fixed loss scale; 0: dynamic."""
    initial_scale_power: int | Auto | None = setting(Integer())
    """Base-2 exponent of the initial dynamic loss scale."""
    loss_scale_window: int | Auto | None = setting(Integer())
    """Number of steps without overflow after which the dynamic loss scale doubles."""
    hysteresis: int | Auto | None = setting(Integer())
    """Number of overflows tolerated before the loss scale is halved."""
    consecutive_hysteresis: bool | Auto | None = setting(Boolean())
    """Restore the full hysteresis after each step without overflow."""
    min_loss_scale: int | Auto | None = setting(Integer())
    """Minimum of the dynamic loss scale."""
    fp16_master_weights_and_grads: bool | Auto | None = setting(Boolean())
    """Keep master weights and gradients in fp16 too."""
    extra: Mapping[str, Any] = extra_keys()


FP16_BESIDE: Final = Fp16Section(auto_cast=True)
"""``fp16`` section that accelerate adds for ``mixed_precision`` if the configuration has none."""


@attrs.frozen(kw_only=True)
class OptimizerSection(Section):
    """``optimizer`` as written; ``zerotune.optim`` resolves it."""

    passed_through: ClassVar[frozenset[str]] = OPTIMIZER
    aliases: ClassVar[Mapping[str, str]] = {"name": "type", "parameters": "params"}
    unread: ClassVar[frozenset[str]] = frozenset(aliases)

    type: str | None = setting(Text())
    params: Mapping[str, Any] | None = setting(Free())
    """Arguments by name; values may be ``"auto"``."""
    extra: Mapping[str, Any] = extra_keys()


@attrs.frozen(kw_only=True)
class SchedulerSection(Section):
    """``scheduler`` as written; ``zerotune.optim`` resolves it."""

    aliases: ClassVar[Mapping[str, str]] = {"name": "type", "parameters": "params"}
    unread: ClassVar[frozenset[str]] = frozenset(aliases)

    type: str | None = setting(Text())
    params: Mapping[str, Any] | None = setting(Free())
    """Arguments by name; values may be ``"auto"``."""
    extra: Mapping[str, Any] = extra_keys()


@attrs.frozen(kw_only=True)
class AioSection(Section):
    """``aio``: how swap files are read and written."""

    passed_through: ClassVar[frozenset[str]] = AIO
    aliases: ClassVar[Mapping[str, str]] = {"thread_count": "intra_op_parallelism"}
    unread: ClassVar[frozenset[str]] = frozenset(aliases)

    block_size: int | Auto | None = setting(Integer(minimum=1))
    """Bytes of one request."""
    queue_depth: int | Auto | None = setting(Integer(minimum=1))
    """Number of I/O requests in flight per thread."""
    intra_op_parallelism: int | Auto | None = setting(Integer(minimum=1))
    """Number of threads that read or write one tensor in parallel."""
    single_submit: bool | Auto | None = setting(Boolean())
    """Submit requests one by one."""
    overlap_events: bool | Auto | None = setting(Boolean())
    """Submit the next requests while others complete."""
    use_gds: bool | Auto | None = setting(Boolean())
    """GPUDirect storage; CUDA only."""
    extra: Mapping[str, Any] = extra_keys()


@attrs.frozen(kw_only=True)
class LaunchSection(Section):
    """Launch settings from an accelerate YAML or a trainer's file; never passed to DeepSpeed."""

    passed_through: ClassVar[frozenset[str]] = LAUNCH
    aliases: ClassVar[Mapping[str, str]] = {"max_grad_norm": "gradient_clipping"}

    distributed_type: str | None = setting(Text())
    mixed_precision: str | None = setting(
        Choice(
            choices=(*PRECISIONS, "fp8", "auto"), synonyms=PRECISION_SYNONYMS, unoffered=("fp8",)
        )
    )
    """Precision that the launcher's file requests; used if the configuration does not set one."""
    num_processes: int | None = setting(Integer(minimum=-1, auto=False))
    """World size that the launcher's file requests."""
    num_machines: int | None = setting(Integer(minimum=1, auto=False))
    machine_rank: int | None = setting(Integer(auto=False))
    main_process_ip: str | None = setting(Text(empty=True))
    main_process_port: int | None = setting(Integer(maximum=65535, auto=False))
    gradient_accumulation_steps: int | Auto | None = setting(Integer(minimum=1))
    """Micro batches per optimizer step, set outside the DeepSpeed configuration."""
    gradient_clipping: float | Auto | None = setting(Number())
    """Maximum gradient norm, set outside the DeepSpeed configuration."""
    zero3_init_flag: bool | None = setting(Boolean(auto=False))
    """Build the model inside ``deepspeed.zero.Init``; stage 3 only."""
    deepspeed_config_file: str | None = setting(Text())
    """File that contains the DeepSpeed configuration."""
    offload_param_path: str | None = setting(Folder())
    """Swap folder for parameters; takes precedence over DeepSpeed's ``nvme_path``."""
    offload_optimizer_path: str | None = setting(Folder())
    """Swap folder for optimizer states, if it differs from that for parameters."""
    deepspeed_moe_layer_cls_names: str | None = setting(Text(empty=True))
    extra: Mapping[str, Any] = extra_keys()


# -- Facts about the model and the run that a plan needs, without loading either.


@attrs.frozen(kw_only=True)
class ParameterFacts:
    """Name, shape and storage of one parameter of a model."""

    name: str
    """Dotted name, as in ``named_parameters()``."""
    shape: tuple[int, ...]
    """Full, unpartitioned shape."""
    trainable: bool = True
    """Whether it requires a gradient."""
    storage: str | None = None
    """Storage dtype of a quantized weight, such as ``"nf4"`` or ``"int8"``; ``None`` for a weight
    in the plan's precision."""
    stored_bytes: int | None = None
    """Bytes of a quantized weight, including its scales."""

    @cached_property
    def numel(self) -> int:
        """Number of elements of the unquantized weight; 1 for a 0-d parameter."""
        return math.prod(self.shape)

    def nbytes(self, element_bytes: int) -> int:
        """Return the size of the parameter in bytes.

        Args:
            element_bytes: Bytes per element of an unquantized parameter.
        """
        return element_bytes * self.numel if self.stored_bytes is None else self.stored_bytes

    def quantized(self, storage: str) -> ParameterFacts:
        """Return the same weight, frozen and quantized to one of ``STORAGES``.

        Args:
            storage: Storage dtype, such as ``"nf4"``.
        """
        per_element, per_row = STORAGES[storage]
        taken = math.ceil(per_element * self.numel + per_row * (self.shape[0] if self.shape else 1))
        return attrs.evolve(self, trainable=False, storage=storage, stored_bytes=taken)

    def adapter(self, *, rank: int, ends: tuple[str, ...]) -> Iterator[ParameterFacts]:
        """Yield this weight's two LoRA matrices, named as in peft; nothing if no suffix matches.

        Args:
            rank: Rank of the adapter.
            ends: Suffixes of the dotted names of layers to adapt.
        """
        layer, _, kind = self.name.rpartition(".")
        named = any(layer == end or layer.endswith(f".{end}") for end in ends)
        if kind != "weight" or not named or len(self.shape) < 2:
            return
        outputs, inputs, *kernel = self.shape
        down, up = (rank, inputs, *kernel), (outputs, rank, *(1 for _ in kernel))
        yield ParameterFacts(name=f"{layer}.lora_A.weight", shape=down)
        yield ParameterFacts(name=f"{layer}.lora_B.weight", shape=up)

    @classmethod
    def of(cls, name: str, parameter: Any) -> ParameterFacts:
        """Read the name, shape and storage of a plain, partitioned or quantized parameter.

        Args:
            name: Dotted name of the parameter.
            parameter: A plain, partitioned or quantized parameter.
        """
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        facts = cls(name=name, shape=shape, trainable=bool(parameter.requires_grad))
        kind = type(parameter)
        if kind.__name__ == "Params4bit" and getattr(parameter, "quant_state", None) is not None:
            state = parameter.quant_state
            constants = [state.absmax, *([state.state2.absmax] if state.nested else [])]
            return facts._kept(str(state.quant_type), state.shape, constants, parameter)
        if kind.__name__ == "Int8Params" and getattr(parameter, "SCB", None) is not None:
            return facts._kept("int8", shape, [parameter.SCB], parameter)
        if kind.__name__ == "GGUFParameter":
            return facts._kept(
                f"gguf-{parameter.quant_type.name.lower()}", parameter.quant_shape, [], parameter
            )
        if kind.__module__.partition(".")[0] == "torchao":
            inner = [getattr(parameter, each) for each in parameter.__tensor_flatten__()[0]]
            inner = [each for each in inner if hasattr(each, "nbytes")]
            names = [str(each.dtype).removeprefix("torch.") for each in inner]
            storage = next(
                (name for name in names if name == "int8" or name.startswith("float8")), "int4"
            )
            storage = "fp8" if storage.startswith("float8") else storage
            return facts._kept(storage, shape, inner, None)
        return facts

    def _kept(
        self, storage: str, shape: Iterable[int], beside: Iterable[Any], packed: Any
    ) -> ParameterFacts:
        """Return facts of a quantized weight, with the bytes of its elements and scales."""
        taken = sum(int(each.nbytes) for each in beside)
        if packed is not None:
            taken += int(getattr(packed, "ds_numel", packed.numel())) * packed.element_size()
        return attrs.evolve(self, shape=tuple(shape), storage=storage, stored_bytes=taken)


STORAGES: Final[Mapping[str, tuple[float, float]]] = {
    # Half a byte, and an fp32 scale for every 64 elements.
    "nf4": (0.5 + 4 / 64, 0),
    "fp4": (0.5 + 4 / 64, 0),
    # A byte, and an fp32 scale for every row.
    "int8": (1, 4),
    "fp8": (1, 4),
}
"""Bytes per element and bytes per output row of weights quantized by bitsandbytes or torchao, by
storage dtype."""


def _as_triples(triples: Iterable[Any]) -> tuple[tuple[int, float, float], ...]:
    return tuple((int(count), float(first), float(second)) for count, first, second in triples)


def _as_costs(costs: Iterable[Any]) -> tuple[ActivationCost, ...]:
    return tuple(one if isinstance(one, ActivationCost) else ActivationCost(**one) for one in costs)


SMALLEST_OFFLOADED: Final = 2**20
"""Minimum size in bytes of tensors that ``ActivationOffload`` moves."""


@attrs.frozen(kw_only=True)
class ActivationCost:
    """Peak bytes of activations and temporary tensors in one forward and backward pass.

    At each moment of a pass, activation memory is linear in batch size and pixels. This holds for
    convolutions, and for attention that never stores the attention matrix
    (``scaled_dot_product_attention``). Batch size and resolution determine at which moment the peak
    occurs.
    """

    base: float
    """Bytes that do not depend on the batch: gradients of the backward pass."""
    per_sample: float
    """Bytes per sample at any resolution: text tokens and embeddings."""
    per_pixel: float
    """Bytes per sample and image pixel (not latent pixel); for clips, see
    ``ModelFacts.positions``."""
    small: tuple[tuple[int, float, float], ...] = attrs.field(default=(), converter=_as_triples)
    """Groups of small tensors of equal size, each as (number of tensors, bytes per sample, bytes
    per pixel). A group is included only if each tensor has fewer than ``SMALLEST_OFFLOADED`` bytes;
    a negative count subtracts the group."""
    moments: tuple[ActivationCost, ...] = attrs.field(default=(), converter=_as_costs)
    """Costs at other moments of the pass, which may be the peak at other batch sizes or
    resolutions."""

    def nbytes(self, *, batch: int, pixels: int, element_bytes: int = 2) -> int:
        """Return the peak in bytes for ``batch`` samples of ``pixels`` pixels each.

        Args:
            batch: Samples per forward pass and rank.
            pixels: Size of a sample, from ``ModelFacts.positions``.
            element_bytes: Bytes per element of the precision.
        """
        elements = element_bytes / 2
        in_half = self.base + batch * (self.per_sample + self.per_pixel * pixels)
        for count, per_sample, per_pixel in self.small:
            each = batch * (per_sample + per_pixel * pixels)
            if each * elements < SMALLEST_OFFLOADED:
                in_half += count * each
        size = {"batch": batch, "pixels": pixels, "element_bytes": element_bytes}
        return max(math.ceil(in_half * elements), *(one.nbytes(**size) for one in self.moments), 0)


@attrs.frozen(kw_only=True)
class Amount:
    """A quantity of a pass, such as FLOPs, as a function of batch size and pixels."""

    per_sample: float
    per_pixel: float
    """Amount per sample and image pixel; for clips, see ``ModelFacts.positions``."""
    per_pixel_squared: float = 0.0
    """Amount per sample and squared number of pixels, for attention."""

    def of(self, *, batch: int, pixels: int) -> float:
        """Return the amount for ``batch`` samples of ``pixels`` pixels each.

        Args:
            batch: Samples per forward pass and rank.
            pixels: Size of a sample, from ``ModelFacts.positions``.
        """
        each = self.per_sample + pixels * (self.per_pixel + pixels * self.per_pixel_squared)
        return batch * each

    def times(self, factor: float) -> Amount:
        """Return the amount multiplied by ``factor``."""
        return Amount(
            per_sample=factor * self.per_sample,
            per_pixel=factor * self.per_pixel,
            per_pixel_squared=factor * self.per_pixel_squared,
        )


def _as_amount(value: Any) -> Amount:
    return value if isinstance(value, Amount) else Amount(**value)


@attrs.frozen(kw_only=True)
class PassWork:
    """Work and memory traffic of one pass with 2-byte elements."""

    products: Amount = attrs.field(converter=_as_amount)
    """Floating-point operations of matrix products; a multiply-add counts as two."""
    convolutions: Amount = attrs.field(converter=_as_amount)
    """Floating-point operations of convolutions."""
    attention: Amount = attrs.field(converter=_as_amount)
    """Floating-point operations of attention, which is recomputed in the backward pass."""
    moved: Amount = attrs.field(converter=_as_amount)
    """Bytes read and written by operators that are not matrix products, convolutions or
    attention."""
    operators: int = 0
    """Number of operators, including views; 0 if not counted."""
    product_calls: int = 0
    """Number of matrix products among ``operators``."""
    attention_calls: int = 0
    """Number of attention operators among ``operators``."""


@attrs.frozen(kw_only=True)
class ArithmeticFacts:
    """Arithmetic of the forward and backward passes of a training step."""

    forward: PassWork
    backward: PassWork
    recomputed: PassWork | None = None
    """Work that gradient checkpointing recomputes; ``None`` if the model does not support it."""

    @property
    def of_frozen_weights(self) -> ArithmeticFacts:
        """Return the work with frozen weights, which halve the backward pass's matrix products."""
        halved = attrs.evolve(
            self.backward,
            products=self.backward.products.times(0.5),
            convolutions=self.backward.convolutions.times(0.5),
        )
        return attrs.evolve(self, backward=halved)


@attrs.frozen(kw_only=True)
class ActivationFacts:
    """Activation bytes of a forward and backward pass with 2-byte elements."""

    full: ActivationCost
    """Cost without recomputation."""
    checkpointed: ActivationCost | None = None
    """Cost with gradient checkpointing; ``None`` if the model does not support it."""
    offloaded: ActivationCost | None = None
    """Device memory with ``ActivationOffload``, which recomputes blocks and keeps their inputs in
    host memory; ``None`` if unknown."""
    offloaded_host: ActivationCost | None = None
    """Host memory for the offloaded block inputs."""


@attrs.frozen(kw_only=True)
class BlockFacts:
    """A module class with several instances in a model."""

    class_name: str
    """Class name, such as ``"BasicTransformerBlock"``."""
    count: int
    """Number of modules of this class."""
    numel: int
    """Number of elements in the largest module of this class."""

    @classmethod
    def of(cls, module: Any) -> tuple[BlockFacts, ...]:
        """Find the innermost modules of block classes, and count them by class.

        Block classes are those in ``_repeated_blocks`` or ``_no_split_modules`` of the model, and
        ``ResnetBlock2D``.

        Args:
            module: The model.
        """
        names = {"ResnetBlock2D"}
        for attribute in ("_no_split_modules", "_repeated_blocks"):
            names.update(getattr(module, attribute, None) or ())
        found: dict[str, list[int]] = {}
        for part in module.modules():
            inner = (type(child).__name__ in names for child in part.modules() if child is not part)
            if type(part).__name__ in names and not any(inner):
                sizes = (math.prod(getattr(p, "ds_shape", p.shape)) for p in part.parameters())
                found.setdefault(type(part).__name__, []).append(sum(sizes))
        return tuple(
            cls(class_name=name, count=len(sizes), numel=max(sizes))
            for name, sizes in sorted(found.items())
        )


ATTENTION_PROJECTIONS: Final = (
    "to_q",
    "to_k",
    "to_v",
    "to_out.0",
    "add_q_proj",
    "add_k_proj",
    "add_v_proj",
    "to_add_out",
    "q_proj",
    "k_proj",
    "v_proj",
    "out_proj",
    "SelfAttention.q",
    "SelfAttention.k",
    "SelfAttention.v",
    "SelfAttention.o",
)
"""Names of attention projections in diffusers' models, CLIP and T5."""


def check_storage(storage: str | None) -> None:
    """Raise ``InvalidValueError`` unless ``storage`` is ``None`` or in ``STORAGES``."""
    if storage is None or storage in STORAGES:
        return
    raise InvalidValueError(
        "is not a supported dtype for a quantized base model",
        key="base_dtype",
        value=storage,
        fix=f"use one of {', '.join(STORAGES)}, or none",
    )


def latent_frames(frames: int, *, per_latent: int) -> int:
    """Return the number of latent frames of a clip.

    Args:
        frames: Number of frames in the clip; the first frame has its own latent.
        per_latent: Number of frames in each latent after the first.
    """
    return (frames - 1) // per_latent + 1


@attrs.frozen(kw_only=True)
class ModelFacts:
    """Names and shapes of a model's parameters, from which every buffer size follows."""

    parameters: tuple[ParameterFacts, ...] = attrs.field(converter=as_tuple)
    name: str = "model"
    activations: ActivationFacts | None = None
    """Activation memory of a training step; ``None`` if unknown."""
    arithmetic: ArithmeticFacts | None = None
    """Arithmetic of a training step; ``None`` if unknown."""
    blocks: tuple[BlockFacts, ...] = ()
    """Innermost repeated modules; empty if unknown."""
    units: tuple[str, ...] = ()
    """Dotted names of modules that are each streamed as one unit."""
    frames_per_latent: int | None = None
    """Number of frames in each latent frame after the first; ``None`` for an image model."""
    buffers: int = 0
    """Bytes of buffers, such as tables of positions, which keep their dtype on the device."""

    def positions(self, *, height: int, width: int, frames: int | None = None) -> int:
        """Return the size that activations scale with: image pixels times latent frames.

        Args:
            height: Pixels.
            width: Pixels.
            frames: Number of frames of a clip; by default one.
        """
        return height * width * latent_frames(frames or 1, per_latent=self.frames_per_latent or 1)

    @classmethod
    def from_module(cls, module: Any) -> ModelFacts:
        """Read the facts of a ``torch.nn.Module`` on any device, including ``meta``.

        The facts contain the full shape of parameters that ``deepspeed.zero.Init`` partitions, and
        the original shape of quantized parameters.

        Args:
            module: The module; its weights are not read.
        """
        return cls(
            name=type(module).__name__,
            parameters=[
                ParameterFacts.of(name, parameter) for name, parameter in module.named_parameters()
            ],
            blocks=BlockFacts.of(module),
            units=repeated_modules(module),
            buffers=sum(buffer.nbytes for buffer in module.buffers()),
        )

    @classmethod
    def from_shapes(
        cls, shapes: Iterable[tuple[str, tuple[int, ...]]], *, name: str = "model"
    ) -> ModelFacts:
        """Build the facts of a fully trainable model from ``(name, shape)`` pairs.

        Args:
            shapes: Name and shape of each parameter.
            name: Name of the model, for reports.
        """
        return cls(
            name=name,
            parameters=[ParameterFacts(name=key, shape=tuple(shape)) for key, shape in shapes],
        )

    def with_adapters(
        self, rank: int, *, targets: Iterable[str] | None = None, base_dtype: str | None = None
    ) -> ModelFacts:
        """Return the facts of the frozen model with trainable LoRA adapters.

        Args:
            rank: Rank of the adapters.
            targets: Suffixes of the adapted layers' dotted names, as in ``add_lora``; by default
                the attention projections.
            base_dtype: Storage dtype of the frozen matrices, one of ``STORAGES``; by default the
                plan's precision.

        Raises:
            InvalidValueError: The rank is not a positive integer, no layer matches ``targets``, or
                the dtype is unknown.
        """
        check_storage(base_dtype)
        if not is_integer(rank) or rank < 1:
            raise InvalidValueError(
                "must be a whole number", key="lora", value=rank, fix="write the rank, such as 16"
            )
        ends = tuple(ATTENTION_PROJECTIONS if targets is None else targets)
        adapters = [
            factor for each in self.parameters for factor in each.adapter(rank=rank, ends=ends)
        ]
        if not adapters:
            raise InvalidValueError(
                f"no layer of {self.name} has a name with one of these endings",
                key="lora_targets",
                value=ends,
                fix="write the suffixes of layer names, such as to_q",
            )
        frozen = [
            each.quantized(base_dtype)
            # Quantization packages convert only the weights of linear layers.
            if base_dtype is not None and len(each.shape) == 2 and each.name.endswith(".weight")
            else attrs.evolve(each, trainable=False)
            for each in self.parameters
        ]
        name = f"{self.name} with adapters of rank {rank}"
        if base_dtype is not None:
            name += f" on {base_dtype}"
        work = None if self.arithmetic is None else self.arithmetic.of_frozen_weights
        return attrs.evolve(self, parameters=[*frozen, *adapters], name=name, arithmetic=work)

    @cached_property
    def trainable(self) -> tuple[ParameterFacts, ...]:
        """The parameters that the optimizer updates."""
        return tuple(parameter for parameter in self.parameters if parameter.trainable)

    @cached_property
    def numel(self) -> int:
        """Number of elements of all parameters."""
        return sum(parameter.numel for parameter in self.parameters)

    @cached_property
    def trainable_numel(self) -> int:
        """Number of elements of the trainable parameters."""
        return sum(parameter.numel for parameter in self.trainable)

    @cached_property
    def largest(self) -> int:
        """Number of elements of the largest parameter; 0 for a model without parameters."""
        return max((parameter.numel for parameter in self.parameters), default=0)

    @cached_property
    def largest_trainable(self) -> int:
        """Number of elements of the largest trainable parameter; 0 if there is none."""
        return max((parameter.numel for parameter in self.trainable), default=0)

    @cached_property
    def storages(self) -> tuple[str, ...]:
        """Storage dtypes of the quantized weights; empty if no weight is quantized."""
        return tuple(sorted({each.storage for each in self.parameters if each.storage}))

    @cached_property
    def largest_quantized(self) -> int:
        """Number of elements of the largest quantized weight, which is dequantized for use."""
        return max((each.numel for each in self.parameters if each.storage), default=0)

    @cached_property
    def quantized_numel(self) -> int:
        """Number of elements of all quantized weights."""
        return sum(each.numel for each in self.parameters if each.storage)

    def weight_bytes(self, element_bytes: int, *, ranks: int = 1) -> int:
        """Return the bytes of all weights on one rank if each weight is split over ``ranks`` ranks.

        Args:
            element_bytes: Bytes per element of unquantized weights.
            ranks: Number of ranks over which each weight is split.
        """
        if not self.storages:
            return element_bytes * (self.numel if ranks == 1 else sum(self.parts(ranks)))
        return sum([-(-each.nbytes(element_bytes) // ranks) for each in self.parameters])

    def parts(self, ranks: int) -> tuple[int, ...]:
        """Return each parameter's partition size in elements, with padding, for ``ranks`` ranks."""
        # Cached, because every candidate of an advice sums the same thousands of parts.
        if ranks not in self._parts:
            self._parts[ranks] = tuple([-(-each.numel // ranks) for each in self.parameters])
        return self._parts[ranks]

    def trainable_parts(self, ranks: int) -> tuple[int, ...]:
        """Return ``parts`` for the trainable parameters only.

        Args:
            ranks: Number of ranks that share each parameter.
        """
        if self.trainable == self.parameters:
            return self.parts(ranks)
        return tuple([-(-each.numel // ranks) for each in self.trainable])

    @cached_property
    def streamed(self) -> StreamedFacts:
        """Size of each streamed unit, and of the weights that stay on the device, in elements."""
        units, elements = set(self.units), {name: [0, 0] for name in self.units}
        rest = [0, 0]
        for each in self.parameters:
            aligned = -(-each.numel // UNIT_ALIGNED) * UNIT_ALIGNED if each.numel else 0
            name = each.name
            while name and name not in units:
                name = name.rpartition(".")[0]
            if name:
                elements[name][each.trainable] += aligned
            else:
                rest[each.trainable] += aligned if each.trainable else each.numel
        # Each unit streams the larger of its two kinds, frozen or trained.
        kinds = [(frozen, trained) for frozen, trained in elements.values() if frozen or trained]
        beside = sum(trained for frozen, trained in kinds if frozen >= trained)
        return StreamedFacts(
            trained=tuple(trained for frozen, trained in kinds if trained > frozen),
            frozen=tuple(frozen for frozen, trained in kinds if frozen >= trained),
            resident_trained=rest[1] + beside,
            resident_frozen=rest[0] + sum(frozen for frozen, trained in kinds if trained > frozen),
        )

    def streamed_by(self, named: Iterable[str]) -> StreamedFacts:
        """Return ``streamed`` with the named modules as units.

        Args:
            named: Dotted names of modules; if none matches, ``units`` are streamed.
        """
        names = tuple(parameter.name for parameter in self.parameters)
        found = [unit for unit in named if any(name.startswith(f"{unit}.") for name in names)]
        outermost = [
            unit for unit in found if not any(unit.startswith(f"{other}.") for other in found)
        ]
        return attrs.evolve(self, units=tuple(outermost)).streamed if outermost else self.streamed

    @cached_property
    def _parts(self) -> dict[int, tuple[int, ...]]:
        return {}


RESIDENT_UNITS: Final = 32
"""Largest number of units of weights that stay on the device in the host engine. With more units,
which are each updated and uploaded as a whole, the next forward pass begins earlier."""
UNIT_ALIGNED: Final = 256
"""Alignment of each parameter in a streamed unit, in elements: one block of 8-bit moments."""


@attrs.frozen(kw_only=True)
class StreamedFacts:
    """Numbers of streamed and resident elements, rounded up to multiples of ``UNIT_ALIGNED``."""

    trained: tuple[int, ...]
    """Number of elements of each streamed unit with trained weights."""
    frozen: tuple[int, ...]
    """Number of elements of each streamed unit with frozen weights."""
    resident_trained: int
    """Number of trained elements that stay on the device."""
    resident_frozen: int
    """Number of frozen elements that stay on the device, without padding."""

    @cached_property
    def units(self) -> tuple[int, ...]:
        """Number of elements of each streamed unit."""
        return (*self.trained, *self.frozen)

    @cached_property
    def total(self) -> int:
        """Number of elements of all streamed units."""
        return sum(self.units)

    @property
    def trained_total(self) -> int:
        """Number of all trained elements."""
        return sum(self.trained) + self.resident_trained


UNET_BLOCKS: Final = frozenset({"BasicTransformerBlock", "ResnetBlock2D"})
"""Blocks of diffusers' U-Nets."""


def repeated_modules(module: Any) -> tuple[str, ...]:
    """Return the dotted names of repeated modules, except those inside another repeated module.

    Repeated modules are the blocks that diffusers marks as repeated, and the blocks of U-Nets. In a
    model without such blocks, modules of the same class in one list count as repeated.
    """
    classes = set(UNET_BLOCKS)
    for part in module.modules():
        classes.update(getattr(part, "_repeated_blocks", None) or ())
    return outermost_modules(module, classes) or outermost_modules(module, _in_a_row(module))


def outermost_modules(module: Any, wanted: Collection[str]) -> tuple[str, ...]:
    """Return the dotted names of modules in ``wanted`` that have weights, without nested ones.

    Args:
        module: A ``torch.nn.Module``; only modules inside it are returned.
        wanted: Dotted names of modules, or names of their classes.
    """
    found: list[str] = []
    inside: set[int] = {id(module)}
    for name, part in module.named_modules():
        if id(part) in inside or not (name in wanted or type(part).__name__ in wanted):
            continue
        if any(math.prod(getattr(p, "ds_shape", p.shape)) for p in part.parameters()):
            found.append(name)
            inside.update(id(each) for each in part.modules())
    return tuple(found)


def _in_a_row(module: Any) -> set[str]:
    """Return names of classes outside ``torch.nn`` with several instances in one list."""
    classes: set[str] = set()
    for part in module.modules():
        if type(part).__name__ in ("ModuleList", "Sequential"):
            counts = Counter(type(child) for child in part.children())
            classes.update(
                kind.__name__
                for kind, count in counts.items()
                if count > 1 and not kind.__module__.startswith("torch.nn.")
            )
    return classes


@attrs.frozen(kw_only=True)
class RunFacts:
    """Values from a training script for configuration keys that are ``"auto"``."""

    lr: float | None = None
    """Peak learning rate, dimensionless."""
    weight_decay: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    micro_batch_size: int | None = None
    """Samples per forward pass and rank."""
    gradient_accumulation_steps: int | None = None
    gradient_clipping: float | None = None
    """Maximum global L2 norm of the gradient; 0 disables clipping."""
    mixed_precision: str | None = None
    """``"bf16"``, ``"fp16"`` or ``"fp32"``."""
    total_steps: int | None = None
    """Number of optimizer steps in the whole run."""
    warmup_steps: int | None = None
    """Length of the warm-up in optimizer steps."""

    @classmethod
    def from_arguments(cls, arguments: Any) -> RunFacts:
        """Read the flags that a training script shares with diffusers' scripts.

        For example, ``--learning_rate`` replaces an ``lr`` of ``"auto"``. A fact stays ``None`` if
        its flag is missing or ``None``.

        Args:
            arguments: An ``argparse.Namespace``, or an object with the same attributes.

        Raises:
            InvalidValueError: A value does not have the type that its flag has in diffusers'
                scripts.
        """
        given = {
            fact: _flag(arguments, name, kind)
            for fact, (name, kind) in _SCRIPT_FLAGS.items()
            if getattr(arguments, name, None) is not None
        }
        ends = [_flag(arguments, f"adam_beta{number}", float) for number in (1, 2)]
        if None not in ends:
            given["betas"] = tuple(ends)
        if given.get("mixed_precision") == "no":
            given["mixed_precision"] = "fp32"
        return cls(**given)


_SCRIPT_FLAGS: Final[Mapping[str, tuple[str, type]]] = {
    "lr": ("learning_rate", float),
    "weight_decay": ("adam_weight_decay", float),
    "eps": ("adam_epsilon", float),
    "micro_batch_size": ("train_batch_size", int),
    "gradient_accumulation_steps": ("gradient_accumulation_steps", int),
    "gradient_clipping": ("max_grad_norm", float),
    "mixed_precision": ("mixed_precision", str),
    "total_steps": ("max_train_steps", int),
    "warmup_steps": ("lr_warmup_steps", int),
}
"""For each fact, the flag of diffusers' scripts that sets it, and its type."""


def _flag(arguments: Any, name: str, kind: type) -> Any:
    value = getattr(arguments, name, None)
    fits = is_number(value) if kind is float else isinstance(value, kind)
    if value is None or (fits and not isinstance(value, bool)):
        return value
    raise InvalidValueError(
        f"is not of type {kind.__name__}",
        key=f"arguments.{name}",
        value=value,
        fix="pass RunFacts(...) instead if this flag of the script has a different meaning",
    )


# -- The requested plan.


def _launch_said(launch: LaunchSection | None) -> Section | None:
    """Return the launch section for comparison of plans: without type and file name."""
    if launch is not None:
        launch = attrs.evolve(launch, distributed_type=None, deepspeed_config_file=None)
    return comparable(launch)


@attrs.frozen(kw_only=True, repr=False)
class DeepSpeedPlan(Readable, Section):
    """A DeepSpeed configuration as an immutable value; may contain ``"auto"``.

    Attribute names are DeepSpeed's top-level keys; ``None`` means that a key is not set. Two plans
    with the same settings are equal, even if they come from different files.
    """

    passed_through: ClassVar[frozenset[str]] = TOP_LEVEL | REMOVED.keys()
    aliases: ClassVar[Mapping[str, str]] = {"bfloat16": "bf16"}

    train_batch_size: int | Auto | None = setting(Integer(minimum=1))
    """Samples per optimizer step across all ranks."""
    train_micro_batch_size_per_gpu: int | Auto | None = setting(Integer(minimum=1))
    """Samples per forward pass and rank."""
    gradient_accumulation_steps: int | Auto | None = setting(Integer(minimum=1))
    """Forward passes per optimizer step."""
    gradient_clipping: float | Auto | None = setting(Number())
    """Maximum global L2 norm of the gradient; 0 disables clipping."""
    zero_optimization: ZeroSection | None = setting(Nested(ZeroSection, before=legacy_zero))
    bf16: Bf16Section | None = setting(Nested(Bf16Section))
    fp16: Fp16Section | None = setting(Nested(Fp16Section))
    optimizer: OptimizerSection | None = setting(Nested(OptimizerSection))
    scheduler: SchedulerSection | None = setting(Nested(SchedulerSection))
    aio: AioSection | None = setting(Nested(AioSection))
    zero_allow_untested_optimizer: bool | Auto | None = setting(Boolean())
    """Allow ZeRO with an optimizer that DeepSpeed has not tested."""
    zero_force_ds_cpu_optimizer: bool | Auto | None = setting(Boolean())
    """With offload, reject optimizers that are not DeepSpeed's own."""
    steps_per_print: int | Auto | None = setting(Integer(minimum=1))
    """Steps between DeepSpeed's progress lines."""
    wall_clock_breakdown: bool | Auto | None = setting(Boolean())
    """Log the times of the forward pass, backward pass and optimizer step."""
    extra: Mapping[str, Any] = extra_keys()

    launch: LaunchSection | None = attrs.field(default=None, eq=_launch_said)
    """Additional settings from a launcher's or trainer's file; never passed to DeepSpeed."""
    decisions: tuple[Decision, ...] = attrs.field(default=(), converter=as_tuple, eq=False)
    """Decisions made while reading."""
    source: str = attrs.field(default="code", eq=False)
    """Source of the plan: a file name, ``"dict"`` or ``"code"``."""
    names: Names = attrs.field(factory=dict, eq=False, repr=False)
    """Names of settings in the source file, by path, for messages."""

    @launch.validator
    def _check_launch(self, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value is not None:
            Nested(LaunchSection).check(value, attribute.name)

    @property
    def stage(self) -> int | Auto:
        """ZeRO stage as written; 0 if it is not set."""
        zero = self.zero_optimization
        return 0 if zero is None or zero.stage is None else zero.stage

    @property
    def optimizer_name(self) -> str | None:
        """Canonical name of the requested optimizer; AdamW by default, ``None`` if unknown."""
        section = self.optimizer
        if section is None or section.type is None or is_auto(section.type):
            return DEFAULT_OPTIMIZER
        return canonical(section.type, section.params)

    @property
    def precision(self) -> str:
        """Precision as written, one of ``"bf16"``, ``"fp16"``, ``"fp32"`` and ``"auto"``."""
        bf16 = self.bf16.enabled if self.bf16 else None
        fp16 = self.fp16.enabled if self.fp16 else None
        if bf16 is True:
            return "bf16"
        if fp16 is True:
            return "fp16"
        launched = self.launch.mixed_precision if self.launch else None
        if AUTO in (bf16, fp16) or launched is not None:
            return launched or AUTO
        return "fp32"

    @property
    def offload_optimizer_device(self) -> str:
        """Device of ``offload_optimizer`` as written: ``"none"``, ``"cpu"`` or ``"nvme"``."""
        zero = self.zero_optimization
        section = zero.offload_optimizer if zero else None
        return (section.device if section else None) or "none"

    @property
    def offload_param_device(self) -> str:
        """Device of ``offload_param`` as written: ``"none"``, ``"cpu"`` or ``"nvme"``."""
        zero = self.zero_optimization
        section = zero.offload_param if zero else None
        return (section.device if section else None) or "none"

    @classmethod
    def from_dict(
        cls,
        config: Mapping[str, Any],
        *,
        source: str = "dict",
        also_known: Collection[str] = (),
        folder: Path | None = None,
    ) -> DeepSpeedPlan:
        """Read a DeepSpeed configuration, or a dict that contains it under ``deepspeed_config``.

        Args:
            config: The configuration, as returned by ``json.load``.
            source: Origin of the plan, for messages.
            also_known: Paths of additional keys to accept, such as
                ``"zero_optimization.new_key"`` of a newer DeepSpeed.
            folder: Base folder for relative paths in the configuration.

        Raises:
            PlanError: A key is unknown or set twice with different values, or a value has the wrong
                type or is out of range.
        """
        from zerotune.plan import read

        return read.read_whole(
            lambda log: read.plan_from_mapping(config, log, source=source, folder=folder),
            also_known=also_known,
        )

    @classmethod
    def from_json(
        cls, path_or_text: str | os.PathLike[str], *, also_known: Collection[str] = ()
    ) -> DeepSpeedPlan:
        """Read a JSON file, or JSON text that starts with ``{``.

        Comments and trailing commas are accepted with a warning; other syntax errors are reported
        with line and column. In a trainer's file, the value of ``deepspeed_config`` is read.

        Args:
            path_or_text: The file, or the text.
            also_known: As in ``from_dict``.

        Raises:
            PlanFileError: The file is missing or cannot be read.
            PlanSyntaxError: The file or text is not JSON.
            PlanError: As in ``from_dict``.
        """
        from zerotune.plan import read

        return read.read_whole(
            lambda log: read.plan_from_json(path_or_text, log), also_known=also_known
        )

    @classmethod
    def from_yaml(
        cls, path: str | os.PathLike[str], *, also_known: Collection[str] = ()
    ) -> DeepSpeedPlan:
        """Read a YAML file from ``accelerate config``, or a YAML file with DeepSpeed's keys.

        Args:
            path: The file.
            also_known: As in ``from_dict``; write a key of accelerate as ``"launch.new_key"``.

        Raises:
            PlanFileError: The file, or the ``deepspeed_config_file`` it names, is missing.
            PlanSyntaxError: The file is not YAML.
            PlanError: As in ``from_dict``, or the file does not configure DeepSpeed.
        """
        from zerotune.plan import read

        return read.read_whole(lambda log: read.plan_from_yaml(path, log), also_known=also_known)

    @classmethod
    def from_accelerate(
        cls,
        settings: Mapping[Any, Any],
        *,
        source: str = "dict",
        also_known: Collection[str] = (),
        folder: Path | None = None,
    ) -> DeepSpeedPlan:
        """Read settings that have the structure of a YAML file from ``accelerate config``.

        Args:
            settings: The content of the YAML file as a mapping.
            source: Origin of the plan, for messages.
            also_known: As in ``from_yaml``.
            folder: Folder in which a relative ``deepspeed_config_file`` is looked up first.

        Raises:
            PlanError: As in ``from_yaml``.
        """
        from zerotune.plan import read

        return read.read_whole(
            lambda log: read.plan_from_settings(settings, log, source=source, folder=folder),
            also_known=also_known,
        )

    @classmethod
    def from_accelerate_environment(
        cls, environ: Mapping[str, str] | None = None, *, also_known: Collection[str] = ()
    ) -> DeepSpeedPlan:
        """Read the environment variables that ``accelerate launch`` sets.

        ``accelerate launch`` does not pass on the folders for NVMe offload, so a missing folder
        causes only a warning. The accelerate package is not required.

        Args:
            environ: Environment variables; by default those of this process.
            also_known: As in ``from_dict``, for the configuration file that the variables name.

        Raises:
            InvalidValueError: The variables do not request DeepSpeed.
            PlanError: As in ``from_yaml``.
        """
        from zerotune.plan import read

        return read.read_whole(
            lambda log: read.plan_from_environment(environ, log), also_known=also_known
        )

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, also_known: Collection[str] = ()
    ) -> DeepSpeedPlan:
        """Read a file as YAML or JSON, depending on its suffix.

        Args:
            path: The file.
            also_known: As in ``from_yaml``.

        Raises:
            PlanError: As in ``from_yaml`` and ``from_json``.
        """
        from zerotune.plan import read

        return read.read_whole(lambda log: read.load_plan(path, log), also_known=also_known)

    def to_deepspeed(self) -> dict[str, Any]:
        """Return a deep copy of the configuration as written, including any ``"auto"``."""
        return self.to_dict()

    def to_json(self, *, indent: int = 2) -> str:
        """Return the written configuration as JSON text with ``indent`` spaces per level."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    def to_yaml(self, *, lossy: Collection[str] = ()) -> str:
        """Return the plan as YAML text in the format of ``accelerate config``.

        Each changed spelling is logged; ``plan_document`` returns the changes as data.

        Args:
            lossy: Launch settings that may be dropped if accelerate does not support them.

        Raises:
            InvalidValueError: A launch setting is neither supported by accelerate nor named in
                ``lossy``.
        """
        from zerotune.plan import write

        document = write.plan_document(self, "accelerate", lossy=lossy)
        announce(document.decisions)
        return document.text

    def to_python(self) -> str:
        """Return a Python expression that recreates this plan."""
        from zerotune.plan import write

        return write.python_expression(self)

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        format: str | None = None,  # noqa: A002
        lossy: Collection[str] = (),
        like: Mapping[str, Any] | None = None,
    ) -> SavedPlan:
        """Write the plan to a file atomically.

        Args:
            path: The file. An existing file is kept as ``….bak``.
            format: ``"deepspeed"``, ``"accelerate"``, ``"python"`` or ``"trainer"`` (a
                ``config.json`` that contains ``deepspeed_config``; its other content is preserved).
                By default, the suffix and the existing file determine the format.
            lossy: Launch settings that may be dropped if the format does not support them.
            like: A configuration that determines the order of keys in JSON output.

        Raises:
            InvalidValueError: A launch setting is neither supported by the format nor named in
                ``lossy``; nothing is written.
            PlanFileError: The file cannot be written.
            PlanError: The existing file cannot be read, so its other content cannot be preserved.
        """
        from zerotune.plan import write

        return write.save_plan(self, path, format=format, lossy=lossy, like=like)

    def normalised(self) -> DeepSpeedPlan:
        """Return the plan in canonical spelling, with a decision for each change.

        Optimizer and scheduler names are unchanged; ``zerotune.optim`` translates them.
        """
        from zerotune.plan import read

        return read.normalised_plan(self)

    def with_overrides(
        self, overrides: Mapping[str, Any], *, also_known: Collection[str] = ()
    ) -> DeepSpeedPlan:
        """Return the plan with changed settings, each recorded as a decision.

        Args:
            overrides: Settings by path (``"zero_optimization.stage"``), as nested mappings, or by
                short names such as ``"zero_stage"`` (``zerotune.plan.read.SHORT_NAMES``). ``None``
                removes a setting.
            also_known: As in ``from_dict``.

        Raises:
            PlanError: As in ``from_dict``, or a setting has different values under two names.
        """
        from zerotune.plan import read

        return read.override_plan(self, overrides, also_known=also_known)

    @classmethod
    def build(
        cls,
        *,
        stage: int | Auto = 2,
        offload: str = "none",
        offload_param: str = "none",
        nvme_path: str | os.PathLike[str] | None = None,
        precision: str = AUTO,
        train_batch_size: int | Auto | None = None,
        micro_batch_size: int | Auto | None = 1,
        gradient_accumulation_steps: int | Auto | None = 1,
        gradient_clipping: float | Auto = 1.0,
        optimizer: str | Mapping[str, Any] | None = "AdamW",
        lr: float | Auto | None = None,
        scheduler: str | Mapping[str, Any] | None = None,
        **zero_overrides: Any,
    ) -> DeepSpeedPlan:
        """Build a plan from its main settings.

        Args:
            stage: ZeRO stage, 0 to 3.
            offload: Location of optimizer states and master weights: ``"none"``, ``"cpu"`` or
                ``"nvme"``.
            offload_param: Location of parameters: ``"none"``, ``"cpu"`` or ``"nvme"``; stage 3
                only.
            nvme_path: Folder for swap files; ``None`` creates a temporary folder for each run.
            precision: ``"bf16"``, ``"fp16"``, ``"fp32"`` or ``"auto"``.
            train_batch_size: Samples per optimizer step across all ranks.
            micro_batch_size: Samples per forward pass and rank.
            gradient_accumulation_steps: Forward passes per optimizer step.
            gradient_clipping: Maximum gradient norm; 0 disables clipping.
            optimizer: Optimizer as a name, or as ``{"type": …, "params": {…}}``.
            lr: Learning rate; by default the optimizer's default, which is recorded as a decision.
            scheduler: Schedule as a name, or as ``{"type": …, "params": {…}}``. ``None`` keeps the
                learning rate constant, as in DeepSpeed; ``"auto"`` uses WarmupLR with a warm-up
                length that suits the run.
            **zero_overrides: Additional keys of ``zero_optimization``.

        Raises:
            PlanError: As in ``from_dict``.
            OptimizerError: The name of the optimizer is unknown.
        """
        if "batch_size" in zero_overrides:
            raise UnknownKeyError(
                "is not an argument of build, which has one for each of two batch sizes",
                key="batch_size",
                value=zero_overrides["batch_size"],
                fix="write micro_batch_size for samples per forward pass and rank, or "
                "train_batch_size for samples per optimizer step",
            )
        zero: dict[str, Any] = {"stage": stage}
        for key, device in (("offload_optimizer", offload), ("offload_param", offload_param)):
            Choice(choices=OFFLOAD_DEVICES).check(device, key)
            if device != "none":
                folder = os.fspath(nvme_path) if device == "nvme" and nvme_path else None
                zero[key] = {"device": device, **({"nvme_path": folder} if folder else {})}
        Choice(choices=(*PRECISIONS, AUTO)).check(precision, "precision")
        config = {
            "train_batch_size": train_batch_size,
            "train_micro_batch_size_per_gpu": micro_batch_size,
            "gradient_accumulation_steps": gradient_accumulation_steps,
            "gradient_clipping": gradient_clipping,
            "zero_optimization": {**zero, **zero_overrides},
            "bf16": {"enabled": AUTO if precision == AUTO else precision == "bf16"},
            "fp16": None if precision == AUTO else {"enabled": precision == "fp16"},
            "optimizer": _optimizer_config(optimizer, lr),
            "scheduler": {"type": scheduler} if isinstance(scheduler, str) else scheduler,
        }
        given = {key: value for key, value in config.items() if value is not None}
        log = Log()
        plan = log.whole(lambda: read_section(cls, given, key="", log=log))
        return attrs.evolve(plan, decisions=log.decisions)

    def check(
        self,
        *,
        world_size: int = 1,
        platform: Platform | None = None,
        schema: Mapping[str, Any] | None = None,
    ) -> tuple[Decision, ...]:
        """Return the findings of all rules about this plan, errors first, without raising them.

        Args:
            world_size: Number of ranks.
            platform: The machine; without it, rules that depend on the machine are skipped.
            schema: Schema of the sections that zerotune passes through; by default a stored copy.
                ``zerotune.backend.schema.plan_schema()`` reads the schema of the installed
                DeepSpeed.
        """
        context = Context(world_size=world_size, platform=platform, schema=schema)
        from zerotune.plan.rules import check_plan

        return check_plan(self, context)

    def resolve(
        self,
        *,
        platform: Platform | None = None,
        model: ModelFacts | None = None,
        world_size: int = 1,
        run: RunFacts | None = None,
        deepspeed: bool = True,
        streamed: bool | Streaming | None = None,
        engine: EngineName | None = None,
    ) -> ResolvedPlan:
        """Resolve all automatic values for one machine, model and world size.

        Args:
            platform: The machine; detected by default.
            model: Shapes of the parameters, which determine buffer sizes.
            world_size: Number of ranks.
            run: Values from the training script, for ``"auto"`` and missing keys.
            deepspeed: ``False`` selects the plain engine.
            streamed: Whether to stream weights, that is, to keep them on the device only while they
                are used; ``True``, or ``Streaming`` options. Results are bitwise equal to those of
                ZeRO-2 with CPU offload. If streaming is not possible, DeepSpeed trains without it,
                and a decision gives the reason.
            engine: ``"host"`` runs an Adam in host memory in zerotune's host engine, with weights
                on the device or streamed, and ``"deepspeed"`` in DeepSpeed's. By default, the
                host engine runs where it can, on an accelerator only if ``zerotune doctor
                --prove`` has verified it. Results are bitwise equal to those of DeepSpeed's
                ZeRO-2. If the host engine cannot run the plan, DeepSpeed trains, and a decision
                gives the reason.

        Raises:
            PlanError: The plan cannot run here; the message names key, reason and fix.
        """
        context = Context(
            world_size=world_size,
            platform=platform,
            model=model,
            run=run or RunFacts(),
            uses_deepspeed=deepspeed,
        )
        from zerotune.plan.resolve import with_engine
        from zerotune.plan.rules import resolve

        resolved = attrs.evolve(
            resolve(self, context),
            streamed=streamed,
            engine=engine,
        )
        return with_engine(resolved)

    def inspect(
        self,
        context: Context,
        *,
        settle: Callable[[ResolvedPlan], ResolvedPlan],
        resolve_in: Context | None = None,
        mistakes: Collection[ZeroTuneError] = (),
    ) -> Inspection:
        """Return all findings about this plan, and the resolved plan.

        Unlike ``check``, ``inspect`` also resolves the plan with its optimizer and schedule, even
        if a rule rejects another setting.

        Args:
            context: Context for the rules.
            settle: Function that resolves optimizer and schedule, such as
                ``OptimizerResolver().settled``.
            resolve_in: Context for resolving the plan, if it contains a machine or run that the
                rules must ignore; by default ``context``.
            mistakes: Errors from reading the plan, which are not reported again.
        """
        from zerotune.plan import rules

        return rules.inspect(self, context, settle=settle, resolve_in=resolve_in, mistakes=mistakes)

    @override
    def brief(self) -> str:
        """Summarise the requested settings in one line."""
        from zerotune.plan import text

        return text.describe_plan(self)

    @override
    def page(self) -> Page:
        """Return the requested settings and the findings of the rules as a report."""
        from zerotune.plan import text

        return text.plan_page(self)

    def explain(self, *, world_size: int = 1, platform: Platform | None = None) -> str:
        """Describe this plan and the findings of the rules as text.

        Args:
            world_size: Number of ranks for the rules.
            platform: The machine; without it, rules that depend on the machine are skipped.
        """
        from zerotune.plan import text

        return text.plan_page(self, world_size=world_size, platform=platform).text()

    def explain_markdown(self, *, world_size: int = 1, platform: Platform | None = None) -> str:
        """Return the content of ``explain`` as Markdown tables.

        Args:
            world_size: Number of ranks for the rules.
            platform: The machine, as in ``explain``.
        """
        from zerotune.plan import text

        return text.plan_page(self, world_size=world_size, platform=platform).markdown()

    def summary(self, *, world_size: int = 1, platform: Platform | None = None) -> dict[str, Any]:
        """Return the content of ``explain`` as a JSON-serialisable dict.

        Args:
            world_size: Number of ranks for the rules.
            platform: The machine, as in ``explain``.
        """
        from zerotune.plan import text

        return text.plan_data(self, world_size=world_size, platform=platform)

    def diff(self, other: DeepSpeedPlan) -> PlanDifference:
        """Return the differences from ``other``; the result is falsy if the plans are equal.

        Raises:
            InvalidValueError: ``other`` is not a ``DeepSpeedPlan``.
        """
        from zerotune.plan import diff

        return diff.diff_plans(self, other)

    @classmethod
    def advise(
        cls,
        model: ModelFacts | str | Any,
        *,
        vram: int | str | None = None,
        ram: int | str | None = None,
        nvme: int | str = 0,
        batch: int = 1,
        resolution: int | tuple[int, int] | None = None,
        frames: int | None = None,
        world_size: int = 1,
        precision: str = AUTO,
        gradient_accumulation_steps: int = 1,
        gradient_clipping: float = 1.0,
        optimizer: str | Mapping[str, Any] = "AdamW",
        ema: EMAPlace = "none",
        frozen_bytes: int = 0,
        model_in_memory: bool = False,
        reserve: float = 0.05,
        platform: Platform | None = None,
        lora: int | None = None,
        base_dtype: str | None = None,
        rates: Rates | None = None,
        prefer: Preference = "fastest",
        streamed: bool = False,
    ) -> Advice:
        """Return the plan with the shortest predicted step time among those that fit the machine.

        Args:
            model: ``ModelFacts``, a module, or the name of a family (``"sdxl"``).
            vram: Memory of each device, in bytes or as ``"12GiB"``; by default this machine's.
            ram: RAM of each machine, in bytes or as ``"64GiB"``; by default this machine's.
            nvme: Disk space for swap files on each machine, in bytes or as ``"1TiB"``.
            batch: Samples per forward pass and rank.
            resolution: Side length in pixels, or height and width; by default the family's.
            frames: Frames per clip for a video model; by default the family's clip length.
            world_size: Number of ranks, all on one machine.
            precision: ``"bf16"``, ``"fp16"``, ``"fp32"`` or ``"auto"``.
            gradient_accumulation_steps: Forward passes per optimizer step.
            gradient_clipping: Maximum gradient norm; 0 disables clipping. Without clipping,
                streamed weights are updated in the backward pass.
            optimizer: Optimizer as a name, or as ``{"type": …, "params": {…}}``.
            ema: Location of an ``EMAShadow``: ``"none"``, ``"host"``, ``"device"``, ``"nvme"``.
            frozen_bytes: Bytes of frozen models, which stay unpartitioned on each rank's device.
            model_in_memory: Whether each rank starts with the whole fp32 model in memory, instead
                of loading it from files with ``load_pretrained(folder, plan=plan)``.
            reserve: Fraction of device and host memory to keep free.
            platform: The machine; by default this machine, or a CUDA machine if ``vram`` and
                ``ram`` are given.
            lora: Rank of LoRA adapters on the attention projections; only the adapters are trained.
                To adapt other layers, pass ``facts.with_adapters(rank, targets=...)`` as the model.
            base_dtype: Quantization of the base model under adapters (``"nf4"``, ``"fp4"``,
                ``"int8"``, ``"fp8"``); by default the plan's precision.
            rates: Speeds of the machine; by default the speeds that ``zerotune doctor --rates``
                measured, or catalogue values if it has not been run.
            prefer: ``"fastest"``, or ``"least offload"`` for the least offload and the lowest stage
                regardless of time. If the model's operation counts are unknown, the least offload
                is chosen.
            streamed: Whether a plan with streamed weights may be chosen; such plans are always
                listed. To enable streaming, call ``plan.resolve(streamed=advice.streamed)``.

        Raises:
            NothingFitsError: No plan fits; the error contains the closest plan.
            PlanError: A size, family or option is invalid.
        """
        plan = cls.build(
            precision=precision,
            gradient_accumulation_steps=gradient_accumulation_steps,
            gradient_clipping=gradient_clipping,
            optimizer=optimizer,
        )
        from zerotune.plan import advise

        return advise.advise(
            plan,
            model,
            Context(world_size=world_size, platform=platform),
            vram=vram,
            ram=ram,
            nvme=nvme,
            batch=batch,
            resolution=resolution,
            frames=frames,
            ema=ema,
            frozen_bytes=frozen_bytes,
            model_in_memory=model_in_memory,
            reserve=reserve,
            lora=lora,
            base_dtype=base_dtype,
            rates=rates,
            prefer=prefer,
            streamed=streamed,
        )

    def estimate(
        self,
        model: ModelFacts | str | Any,
        *,
        platform: Platform | None = None,
        world_size: int = 1,
        run: RunFacts | None = None,
        batch: int | None = None,
        resolution: int | tuple[int, int] | None = None,
        frames: int | None = None,
        ema: EMAPlace = "none",
        gradient_checkpointing: bool = True,
        activation_offload: bool = False,
        frozen_bytes: int = 0,
        model_in_memory: bool = False,
        lora: int | None = None,
        base_dtype: str | None = None,
    ) -> MemoryEstimate:
        """Estimate device memory, host RAM and NVMe by component.

        Args:
            model: ``ModelFacts``, a module, or the name of a family (``"sdxl"``).
            platform: The machine; detected by default.
            world_size: Number of ranks.
            run: Values from the training script.
            batch: Samples per forward pass and rank; by default the plan's micro batch size.
            resolution: Side length in pixels, or height and width; by default the family's.
            frames: Frames per clip for a video model; by default the family's clip length.
            ema: Location of an ``EMAShadow``: ``"none"``, ``"host"``, ``"device"``, ``"nvme"``.
            gradient_checkpointing: Whether blocks are recomputed in the backward pass.
            activation_offload: Whether inputs of recomputed blocks are kept in host memory
                (``ActivationOffload``).
            frozen_bytes: Bytes of frozen models, which stay unpartitioned on each rank's device.
            model_in_memory: Whether each rank starts with the whole fp32 model in memory, instead
                of loading it from files with ``load_pretrained(folder, plan=plan)``.
            lora: Rank of LoRA adapters, as in ``advise``.
            base_dtype: Quantization of the base model, as in ``advise``.

        Raises:
            PlanError: As in ``resolve``, or a family is unknown, or a size is invalid.
        """
        from zerotune.plan.memory import estimate

        return estimate.estimate_plan(
            self,
            model,
            Context(world_size=world_size, platform=platform, run=run or RunFacts()),
            batch=batch,
            resolution=resolution,
            frames=frames,
            ema=ema,
            gradient_checkpointing=gradient_checkpointing,
            activation_offload=activation_offload,
            frozen_bytes=frozen_bytes,
            model_in_memory=model_in_memory,
            lora=lora,
            base_dtype=base_dtype,
        )


def _optimizer_config(optimizer: Any, lr: float | Auto | None) -> Any:
    """Return the section of an optimizer, given by name or as a mapping, with learning rate."""
    if optimizer is not None and not isinstance(optimizer, str | Mapping):
        kind = optimizer if isinstance(optimizer, type) else type(optimizer)
        raise InvalidValueError(
            "an optimizer object cannot be used, because the engine builds its own optimizer "
            "for the weights that ZeRO partitions",
            key="optimizer",
            value=kind.__name__,
            fix=f'write optimizer="{kind.__name__}", lr=…, or '
            f'optimizer={{"type": "{kind.__name__}", "params": {{…}}}}',
        )
    config: Any = {"type": optimizer} if isinstance(optimizer, str) else optimizer
    name = None if config is None else config.get("type")
    if isinstance(name, str) and name != AUTO:
        parse_optimizer_name(name)
    if lr is None:
        return config
    if config is None or "lr" in config.get("params", {}):
        raise InvalidValueError(
            "no optimizer is set" if config is None else "is also set in the optimizer's params",
            key="lr",
            value=lr,
            fix='add optimizer="AdamW"' if config is None else "set it once",
        )
    return {**config, "params": {**config.get("params", {}), "lr": lr}}


def read_launch(raw: Mapping[str, Any], log: Log) -> LaunchSection:
    """Read launch settings from ``raw``; decisions and errors go to ``log``."""
    return read_section(LaunchSection, raw, key="launch", log=log)


def with_launch(plan: DeepSpeedPlan, launch: LaunchSection) -> DeepSpeedPlan:
    """Return ``plan`` with the settings of ``launch`` added to its launch settings."""
    before = plan.launch.to_dict() if plan.launch else {}
    around = {**before, **launch.to_dict()}
    names = {attribute.name for attribute in modelled(LaunchSection)}
    extra = {key: value for key, value in around.items() if key not in names}
    said_here = {key: value for key, value in around.items() if key in names}
    return attrs.evolve(plan, launch=LaunchSection(**said_here, extra=extra)) if around else plan


# -- The context in which a plan runs.


def check_world_size(world_size: Any) -> None:
    """Raise ``InvalidValueError`` unless ``world_size`` is a positive integer."""
    if not is_integer(world_size) or world_size < 1:
        raise InvalidValueError(
            "must be a whole number of at least 1",
            key="world_size",
            value=world_size,
            fix="pass the number of processes that train together",
        )


@attrs.frozen(kw_only=True)
class Context:
    """Machine, model and run for which a plan is checked."""

    world_size: int = attrs.field(default=1, validator=lambda _, __, value: check_world_size(value))
    platform: Platform | None = None
    model: ModelFacts | None = None
    run: RunFacts = attrs.field(factory=RunFacts)
    uses_deepspeed: bool = True
    """``False`` for the plain engine; ZeRO settings are then ignored."""
    schema: Mapping[str, Any] | None = None
    """Schema of the installed DeepSpeed, from ``plan_schema()``; ``None`` uses the stored copy."""

    @property
    def machine(self) -> Platform:
        """The platform; raises an error if it is unknown."""
        if self.platform is None:
            raise UnresolvedPlanError(
                "the machine is unknown",
                key="platform",
                fix="pass zerotune.platform.detect_platform(), or a Platform.synthetic(…)",
            )
        return self.platform


# -- The resolved plan: without automatic values, for one platform, world size and model.


def _check_switch(_instance: object, attribute: Any, value: Any) -> None:
    if not isinstance(value, bool):
        raise InvalidValueError(
            "must be true or false", key=f"streamed.{attribute.name}", value=value, fix="write True"
        )


def _as_memory(size: int | float | str | None) -> int | None:
    return None if size is None else parse_size(size, key="streamed.memory")


@attrs.frozen(kw_only=True)
class Streaming:
    """Options for streaming weights: units, device memory, master weights and gradient buffers."""

    units: tuple[str, ...] = attrs.field(default=(), converter=as_texts)
    """Class names or dotted names of modules that are each streamed as one unit; by default the
    model's repeated blocks."""
    window: int = attrs.field(default=3)
    """Device memory for units, as a multiple of the size of the largest unit."""
    memory: int | None = attrs.field(default=None, converter=_as_memory)
    """Device memory for units, such as ``"6GiB"``, instead of ``window``; at least twice the
    largest unit."""
    split_masters: bool = attrs.field(default=False, kw_only=True, validator=_check_switch)
    """Whether each master weight is stored as the bf16 weight and the remaining 16 bits. This saves
    2 bytes of host memory per trained weight, like ``store_param_remainders`` in Apex and
    Transformer Engine. Weights exactly halfway between two bf16 numbers (one in 131,072) may change
    by one unit in the last place."""
    gradient_buffers: int = attrs.field(default=6)
    """Number of units whose gradients may be in host memory at the same time. The limit applies if
    updates run during the backward pass, that is, without clipping and accumulation. One buffer
    receives gradients, and one is used by an update. The others keep gradients for updates during
    the next forward pass, so more buffers let more work overlap."""

    @gradient_buffers.validator
    def _check_buffers(self, _attribute: Any, value: Any) -> None:
        fix = "write 6: one being filled, one being read, and four kept for the next forward pass"
        whole(value, key="streamed.gradient_buffers", least=1, fix=fix)

    @window.validator
    def _check_window(self, _attribute: Any, value: Any) -> None:
        fix = "write 3: one in use, one being loaded, and one being released"
        whole(value, key="streamed.window", least=2, fix=fix)

    def capacity(self, sizes: Collection[int]) -> int:
        """Return the bytes of device memory that units may use at the same time.

        Args:
            sizes: Size of each unit in bytes.
        """
        largest = max(sizes, default=0)
        wanted = self.window * largest
        if self.memory is not None:
            # The backward pass enters a unit before it has left the previous one.
            wanted = max(self.memory, 2 * largest)
        if len(set(sizes)) == 1:
            wanted -= wanted % largest
        return min(wanted, sum(sizes))


@attrs.frozen(kw_only=True, repr=False)
class ResolvedPlan(Readable):
    """A fully resolved plan, created by ``DeepSpeedPlan.resolve``."""

    requested: DeepSpeedPlan
    """The plan as the user wrote it."""
    plan: DeepSpeedPlan
    """The requested plan with every relevant key set explicitly. Only the parameters of
    ``optimizer`` and ``scheduler`` may still be ``"auto"``; ``zerotune.optim`` resolves them and
    calls ``with_choices``."""
    platform: Platform
    """The machine the plan was resolved for."""
    world_size: int
    """Number of ranks."""
    model: ModelFacts | None
    """Facts of the model; its shapes determine the buffer sizes."""
    run: RunFacts
    """Values from the training script."""
    uses_deepspeed: bool
    """``True`` if DeepSpeed trains, ``False`` if the plain engine does."""
    precision: str
    """``"bf16"``, ``"fp16"`` or ``"fp32"``."""
    decisions: tuple[Decision, ...] = attrs.field(default=(), converter=as_tuple)
    """All decisions, beginning with those made while the configuration was read."""
    optimizer: OptimizerChoice | None = None
    """Optimizer chosen by ``zerotune.optim``; ``None`` before ``with_choices``."""
    scheduler: SchedulerChoice | None = None
    """Schedule chosen by ``zerotune.optim``; ``None`` without a schedule, or before
    ``with_choices``."""
    streamed: bool | Streaming | None = None
    """Whether weights are streamed; ``None``: only if ``zerotune doctor --prove`` has verified
    streaming."""
    engine: EngineName | None = attrs.field(default=None)
    """Engine of an Adam in host memory: ``"host"`` or ``"deepspeed"``; ``None``: ``"host"`` if it
    can run the plan, on an accelerator only if ``zerotune doctor --prove`` has verified it."""

    @engine.validator
    def _check_engine(self, _attribute: Any, value: Any) -> None:
        if value not in (None, "host", "deepspeed"):
            raise InvalidValueError(
                "is not an engine",
                key="engine",
                value=value,
                fix='write "host" or "deepspeed"; deepspeed=False selects the plain engine',
            )

    @property
    def context(self) -> Context:
        """Context for rules and estimates."""
        return Context(
            world_size=self.world_size,
            platform=self.platform,
            model=self.model,
            run=self.run,
            uses_deepspeed=self.uses_deepspeed,
        )

    @property
    def streaming(self) -> Streaming | None:
        """Streaming options; ``None`` if weights are not streamed."""
        if isinstance(self.streamed, Streaming):
            return self.streamed
        return Streaming() if self.streamed else None

    @property
    def is_resident(self) -> bool:
        """Whether weights stay on the device if the host engine runs this plan."""
        # On a CPU, weights in host memory are on the device.
        on_cpu = self.platform.accelerator == "cpu"
        return not self.streamed and (on_cpu or self.offload_param != "cpu")

    @property
    def is_hosted(self) -> bool:
        """Whether the host engine will run this plan; on an accelerator, if it was asked for."""
        from zerotune.plan.resolve import host_obstacle

        asked = self.streamed or self.engine == "host" or self.platform.accelerator == "cpu"
        return bool(asked or not self.uses_deepspeed) and host_obstacle(self) is None

    @property
    def stage(self) -> int:
        """ZeRO stage; 0 for the plain engine."""
        stage = self.plan.stage
        return int(stage) if self.uses_deepspeed else 0

    @property
    def offload_optimizer(self) -> str:
        """Device of ``offload_optimizer``: ``"none"``, ``"cpu"`` or ``"nvme"``."""
        return self.plan.offload_optimizer_device

    @property
    def offload_param(self) -> str:
        """Device of ``offload_param``: ``"none"``, ``"cpu"`` or ``"nvme"``."""
        return self.plan.offload_param_device

    @property
    def micro_batch_size(self) -> int:
        """Samples per forward pass and rank."""
        return _integer(self.plan.train_micro_batch_size_per_gpu, "train_micro_batch_size_per_gpu")

    @property
    def gradient_accumulation_steps(self) -> int:
        """Forward passes per optimizer step."""
        return _integer(self.plan.gradient_accumulation_steps, "gradient_accumulation_steps")

    @property
    def train_batch_size(self) -> int:
        """Samples per optimizer step across all ranks."""
        return _integer(self.plan.train_batch_size, "train_batch_size")

    @property
    def gradient_clipping(self) -> float:
        """Maximum global L2 norm of the gradient; 0.0 disables clipping."""
        value = self.plan.gradient_clipping
        if value is None or isinstance(value, str):
            raise _unresolved("gradient_clipping", value)
        return float(value)

    @property
    def nvme_paths(self) -> dict[str, str | None]:
        """Swap folders for parameters (``"param"``) and optimizer states (``"optimizer"``).

        There is no key for data that the plan does not swap. A value is ``None`` until its folder
        is set.
        """
        zero = self.plan.zero_optimization
        parts = {
            "param": zero.offload_param if zero else None,
            "optimizer": zero.offload_optimizer if zero else None,
        }
        return {
            part: None if section.nvme_path in (None, AUTO) else section.nvme_path
            for part, section in parts.items()
            if section is not None and section.device == "nvme"
        }

    def with_choices(
        self,
        optimizer: OptimizerChoice,
        scheduler: SchedulerChoice | None,
        decisions: Iterable[Decision] = (),
    ) -> Self:
        """Return this plan with optimizer and scheduler set.

        Args:
            optimizer: The optimizer that will run.
            scheduler: The schedule; ``None`` keeps the learning rate constant.
            decisions: Decisions to append to those of this plan.
        """
        return attrs.evolve(
            self, optimizer=optimizer, scheduler=scheduler, decisions=(*self.decisions, *decisions)
        )

    def without_streaming(self, reason: str) -> Self:
        """Return this plan without streaming; a decision records ``reason``."""
        asked = self.streamed if self.streamed is None else True
        decision = Decision(
            key="streamed",
            before=asked,
            after=False,
            reason=reason,
            severity="warning" if asked else "note",
        )
        return attrs.evolve(self, streamed=False, decisions=(*self.decisions, decision))

    def with_engine(self, engine: EngineName | None, reason: str) -> Self:
        """Return this plan with the engine set; a decision records ``reason``.

        Args:
            engine: The engine that will run; ``None`` for the plain engine.
            reason: Why.
        """
        refused = self.engine == "host" and engine != "host"
        decision = Decision(
            key="engine",
            before=self.engine if refused else None,
            after=engine or "plain",
            reason=reason,
            severity="warning" if refused else "note",
        )
        return attrs.evolve(self, engine=engine, decisions=(*self.decisions, decision))

    def with_units_kept(self, workload: Workload, *, reserve: float = 0.05) -> ResolvedPlan:
        """Return this plan with as many streamed units kept on the device as fit.

        Args:
            workload: Batch size, resolution, and options that affect memory.
            reserve: Fraction of the device's memory to keep free.

        Raises:
            UnresolvedPlanError: The plan was resolved without a model.
        """
        from zerotune.plan.memory import estimate

        vram = min((device.total_memory for device in self.platform.devices), default=0)
        usable = int(vram * (1 - reserve))
        return estimate.with_units_kept(self.estimate(workload), usable)

    def with_nvme_path(
        self,
        *,
        param: str | os.PathLike[str] | None = None,
        optimizer: str | os.PathLike[str] | None = None,
    ) -> Self:
        """Return this plan with the swap folders set.

        Args:
            param: Folder for parameters; ``None`` keeps the current one.
            optimizer: Folder for optimizer states; ``None`` keeps the current one.

        Raises:
            InvalidValueError: A folder is given for parameters or optimizer states that are not
                swapped.
        """
        given = {"param": param, "optimizer": optimizer}
        zero = self.plan.zero_optimization
        for part, folder in given.items():
            if folder is None:
                continue
            section: OffloadSection | None = getattr(zero, f"offload_{part}", None)
            if zero is None or section is None or section.device != "nvme":
                raise InvalidValueError(
                    f"is given, but offload_{part} does not use NVMe in the resolved plan",
                    key=f"zero_optimization.offload_{part}.nvme_path",
                    value=os.fspath(folder),
                    fix=f'set offload_{part}.device to "nvme" at stage 3, or omit the folder',
                )
            moved = attrs.evolve(section, nvme_path=os.fspath(folder))
            zero = evolved(zero, **{f"offload_{part}": moved})
        return attrs.evolve(self, plan=attrs.evolve(self.plan, zero_optimization=zero))

    def estimate(self, workload: Workload) -> MemoryEstimate:
        """Estimate device memory, host RAM and NVMe by component.

        Args:
            workload: Batch size, resolution, and options that affect memory.

        Raises:
            UnresolvedPlanError: The plan was resolved without a model.
        """
        from zerotune.plan.memory import estimate

        return estimate.estimate_resolved(self, workload)

    def to_deepspeed(self) -> dict[str, Any]:
        """Return a deep copy of the configuration for DeepSpeed.

        Raises:
            UnresolvedPlanError: A value is still ``"auto"``, a swap folder is missing, or the
                optimizer is not resolved although DeepSpeed would build it.
        """
        from zerotune.plan import resolve

        return resolve.render(self)

    def digest(self) -> str:
        """Return the SHA-256 (hex) of the rendered configuration and the world size.

        Swap folders are excluded, because they do not affect training.

        Raises:
            UnresolvedPlanError: As in ``to_deepspeed``, except for swap folders.
        """
        import hashlib

        text = json.dumps(self.content(), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()

    def content(self) -> dict[str, Any]:
        """Return the rendered configuration, and all settings outside it, as a dict.

        Raises:
            UnresolvedPlanError: As in ``digest``.
        """
        from zerotune.plan import resolve

        content: dict[str, Any] = {
            "config": resolve.render(self, folders=False),
            "world_size": self.world_size,
        }
        if self.optimizer is not None and self.optimizer.source != "deepspeed":
            content["optimizer"] = attrs.asdict(self.optimizer)
        elif self.optimizer is not None and self.optimizer.groups:
            content["groups"] = [attrs.asdict(group) for group in self.optimizer.groups]
        if self.scheduler is not None and self.scheduler.source != "deepspeed":
            content["scheduler"] = attrs.asdict(self.scheduler)
        return content

    @override
    def brief(self) -> str:
        """Summarise what will run in one line."""
        from zerotune.plan import text

        return f"{text.describe(self)}; {len(self.decisions)} decisions"

    @override
    def page(self) -> Page:
        """Return a report of what will run and why."""
        from zerotune.plan import text

        return text.resolved_page(self)

    def explain(self) -> str:
        """Describe what will run and why, as text."""
        from zerotune.plan import text

        return text.resolved_page(self).text()

    def explain_markdown(self) -> str:
        """Return Markdown tables of what will run, the reasons, and the findings of the rules."""
        from zerotune.plan import text

        return text.resolved_markdown(self)

    def summary(self) -> dict[str, Any]:
        """Return what will run as a JSON-serialisable dict."""
        from zerotune.plan import text

        return text.resolved_data(self)

    def diff(self, other: ResolvedPlan) -> PlanDifference:
        """Return the differences from ``other``; the result is falsy if both train in the same way.

        Rendered configurations (with swap folders), engines, world sizes, optimizers and schedules
        are compared, but not the reasons for them. Plans with unresolved values can be compared
        too.

        Args:
            other: The resolved plan to compare with.

        Raises:
            InvalidValueError: ``other`` is not a ``ResolvedPlan``.
        """
        from zerotune.plan import diff

        return diff.diff_resolved(self, other)


def _integer(value: Any, key: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _unresolved(key, value)
    return value


def _unresolved(key: str, value: Any) -> UnresolvedPlanError:
    return UnresolvedPlanError(
        "is not resolved", key=key, value=value, fix="call DeepSpeedPlan.resolve to create the plan"
    )
