"""How sections of a plan are declared, read and written: one mechanism for all of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, ClassVar, Final, TypeVar

import attrs

from zerotune._util.text import as_number, did_you_mean
from zerotune.decisions import Log
from zerotune.errors import (
    REMOVAL,
    UNSET,
    Edits,
    InvalidValueError,
    PlanConflictError,
    UnknownKeyError,
    ZeroTuneError,
    writes,
)
from zerotune.plan.values import AUTO, Kind, Reading, check_json, copied

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

    @classmethod
    def known_names(cls) -> frozenset[str]:
        """Return the keys that are accepted here, including aliases."""
        names = {attribute.name for attribute in modelled(cls)}
        return frozenset(names | cls.passed_through | cls.aliases.keys())

    @classmethod
    def meant(cls, name: str) -> tuple[str, ...]:
        """Return the paths that a user who writes the unknown key ``name`` often means."""
        return _COMMON_MISTAKES.get(name, ())

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
                "is a regular field", f"pass {key}=… as an argument, not in extra", key
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
                f"pass {self.cls.__name__}(…), or read the plan with DeepSpeedPlan.from_dict",
                key,
                value,
            )
        for name, place in self.without.items():
            if getattr(value, name) is not None:
                raise misplaced_key(f"{key}.{name}", getattr(value, name), place)

    def _read(self, value: Any, key: str) -> Reading:
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
                values[name] = AUTO if kinds[name].auto else None
                values[name] = kinds[name].read_into(log, value, path)
            elif passes_through(cls, name, path, log.also_known):
                check_json(value, path)
                extra[name] = value
            else:
                raise unknown_key(
                    cls, name, value, path, {*kinds, *cls.passed_through, *cls.aliases}
                )
        except ZeroTuneError as error:
            log.refuse(error)
    try:
        return cls(**values, **({"extra": extra} if extra else {}))
    except ZeroTuneError as error:
        log.refuse(error.below(key))
    return cls()


def _require_object(raw: Any, key: str) -> None:
    if not isinstance(raw, Mapping):
        written = raw[0] if isinstance(raw, list) and len(raw) == 1 else raw
        # DeepSpeed's first releases wrote true for stage 1.
        stage = int(written) if isinstance(written, bool) else as_number(written)
        meant = key == "zero_optimization" and stage is not None and stage in (0, 1, 2, 3)
        raise InvalidValueError(
            "must be an object",
            None if meant else 'write {"name": value, …}',
            key or None,
            raw,
            edits=writes({"stage": int(stage or 0)}) if meant else (),
        )


def join(prefix: str, name: str) -> str:
    """Return the path of the key ``name`` inside the section ``prefix``."""
    return f"{prefix}.{name}" if prefix else name


def value_at(config: Any, path: str, unset: Any = UNSET) -> Any:
    """Return the value at a path in nested sections or mappings.

    Args:
        config: The section or the mapping.
        path: Keys, joined with dots.
        unset: Result for a key that a mapping lacks; in a section, such a key is ``None``.
    """
    for name in path.split("."):
        if isinstance(config, Section):
            kept: Mapping[str, Any] = getattr(config, "extra", {})
            config = getattr(config, name) if hasattr(config, name) else kept.get(name)
        elif isinstance(config, Mapping) and name in config:
            config = config[name]
        else:
            return unset
    return config


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and value of each setting in nested mappings; an empty mapping is one too.

    Args:
        value: The mappings, or a single setting.
        path: Path of ``value``.
    """
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from leaves(item, join(path, str(name)))
    else:
        yield path, value


def put_setting(node: dict[str, Any], path: str, value: Any) -> Any:
    """Set or (with ``None``) remove a setting, and return its previous value.

    Args:
        node: The settings, as nested dicts.
        path: Path of the setting.
        value: The new value.
    """
    *parents, last = path.split(".")
    for parent in parents:
        below = node.get(parent)
        if below is None:
            if value is None:
                return None
            below = node[parent] = {}
        if not isinstance(below, dict):
            reason = f"{parent!r} is not a section"
            raise InvalidValueError(reason, "override the whole setting", path, below)
        node = below
    before = node.pop(last, None)
    if value is not None:
        node[last] = value
    return before


def unknown_key(
    cls: type[Section], name: str, value: Any, path: str, known: Collection[str]
) -> UnknownKeyError:
    """Return the error for a key unknown to ``cls``; it suggests the most similar known keys."""
    meant = cls.meant(name)
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
        "the key is unknown to DeepSpeed and zerotune", fix, path, value, edits=edits
    )


def misplaced_key(path: str, value: Any, place: str) -> UnknownKeyError:
    """Return the error for a key that belongs to a different section."""
    section, _, name = path.rpartition(".")
    target = ".".join([*section.split(".")[:-1], place, name])
    return UnknownKeyError(
        "DeepSpeed rejects this key here",
        f"move it to {place}",
        path,
        value,
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
            "contains a key that is not text", "put it in quotes", key or None, written
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


def passes_through(cls: type[Section], name: str, path: str, also_known: Collection[str]) -> bool:
    """Whether a key that ``cls`` does not model is kept unchecked."""
    private = name.startswith("_") and path == name
    return private or name in cls.passed_through or path in also_known
