"""Convert between the form's state and a plan without loss.

The state is a plain DeepSpeed configuration plus launch settings, so the form neither drops keys
nor changes values such as ``"auto"`` or stage 0. The page and the server exchange the state as
JSON, including integers that JavaScript cannot represent.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Final, TypeVar

import attrs

from zerotune._util.text import json_of
from zerotune.decisions import Log
from zerotune.errors import InvalidValueError, ZeroTuneError
from zerotune.plan import DeepSpeedPlan
from zerotune.plan.plan import raised
from zerotune.plan.read import plan_from_mapping, read_partly
from zerotune.plan.settings import read_launch, with_launch
from zerotune.plan.source import wrapper_of

_ChoiceT = TypeVar("_ChoiceT")

DEEPEST: Final = 24
"""Maximum nesting depth of a request; a DeepSpeed configuration has about five levels."""
MOST_VALUES: Final = 20_000
"""Maximum number of values in a request; each use of a YAML alias counts."""
INTEGER: Final = "$int"
"""Key of a JSON object that represents an integer too large for JavaScript's exact range."""

_INTEGER: Final = re.compile(r"-?[0-9]{1,40}")
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_SAFE: Final = 2**53 - 1


# -- Data on the wire.


def parse_request(text: str) -> Any:
    """Parse a request's JSON body."""
    try:
        value = json_of(text)
    except ValueError as error:
        raise _request_error(f"is not JSON ({error})") from None
    check_content(value)
    return from_wire(value)


def check_content(value: Any) -> None:
    """Raise an error for data that is too large or too deeply nested for a configuration."""
    pending, seen = [(value, 0)], 0
    while pending:
        item, depth = pending.pop()
        seen += 1
        if depth > DEEPEST or seen > MOST_VALUES:
            raise _request_error("is too large or too deeply nested for a configuration")
        if isinstance(item, Mapping):
            pending.extend((part, depth + 1) for pair in item.items() for part in pair)
        elif isinstance(item, list | tuple):
            pending.extend((part, depth + 1) for part in item)
        elif isinstance(item, str) and _SURROGATE.search(item):
            raise _request_error("contains text that is not Unicode")
        elif isinstance(item, float) and not math.isfinite(item):
            raise _request_error("contains a number that is not finite")


def from_wire(value: Any) -> Any:
    """Convert JSON data from the page to Python values."""
    if isinstance(value, dict):
        if value.keys() == {INTEGER}:
            written = value[INTEGER]
            if not isinstance(written, str) or not _INTEGER.fullmatch(written):
                raise _request_error(f"contains {written!r} instead of an integer")
            return int(written)
        return {key: from_wire(item) for key, item in value.items()}
    if isinstance(value, list):
        return [from_wire(item) for item in value]
    return value


def to_wire(value: Any) -> Any:
    """Convert a value to JSON data that JavaScript reads exactly; other objects become strings."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return value if abs(value) <= _SAFE else {INTEGER: str(value)}
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): to_wire(item) for key, item in value.items()}
    return [to_wire(item) for item in value] if isinstance(value, list | tuple) else str(value)


def as_mapping(value: Any, key: str) -> dict[str, Any]:
    """Return ``value``, which must be an object; ``None`` becomes an empty object."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidValueError("must be an object", "send an object", key, value)
    return value


def as_text(value: Any, key: str, *, longest: int = 4096) -> str:
    """Return ``value``, which must be text of at most ``longest`` characters."""
    if not isinstance(value, str) or len(value) > longest or "\0" in value:
        raise InvalidValueError("must be text", f"send at most {longest} characters", key, value)
    return value


def as_choice(value: Any, key: str, *, choices: tuple[_ChoiceT, ...]) -> _ChoiceT:
    """Return ``value``, which must be one of ``choices``."""
    if value not in choices:
        raise InvalidValueError(
            "is not a valid choice", f"write one of {', '.join(map(repr, choices))}", key, value
        )
    return choices[choices.index(value)]


def _request_error(reason: str) -> InvalidValueError:
    return InvalidValueError(reason, "send a configuration", "request")


# -- The state of the form, and its plan.


@attrs.frozen(kw_only=True)
class FormState:
    """The content of the form."""

    config: dict[str, Any] = attrs.field(factory=dict)
    """The DeepSpeed configuration; it may be incomplete."""
    launch: dict[str, Any] = attrs.field(factory=dict)
    """Settings of a launcher or trainer."""
    setup: dict[str, Any] = attrs.field(factory=dict)
    """Model, workload and machine; see ``preview.Setup``."""

    @classmethod
    def of_request(cls, data: Any) -> FormState:
        """Read the state that the page sent."""
        whole = as_mapping(data, "state")
        return cls(
            **{name: as_mapping(whole.get(name), name) for name in ("config", "launch", "setup")}
        )

    @classmethod
    def of_plan(cls, plan: DeepSpeedPlan, *, setup: Mapping[str, Any] | None = None) -> FormState:
        """Return the form state of a plan."""
        launch = plan.launch.to_dict() if plan.launch else {}
        around = dict(setup or {})
        if isinstance(launch.get("num_processes"), int) and launch["num_processes"] > 0:
            around["world_size"] = launch["num_processes"]
        return cls(config=plan.to_dict(), launch=launch, setup=around)

    def data(self) -> dict[str, Any]:
        """Return the state as a JSON-serialisable dict."""
        return {name: to_wire(getattr(self, name)) for name in ("config", "launch", "setup")}


def droppable_settings(plan: DeepSpeedPlan) -> tuple[str, ...]:
    """Return the launch settings that DeepSpeed's JSON cannot contain, except the precision."""
    launch = plan.launch.to_dict() if plan.launch else {}
    return tuple(key for key in launch if key != "mixed_precision")


@attrs.frozen(kw_only=True)
class Reading:
    """Result of reading a form: the plan and the errors."""

    plan: DeepSpeedPlan | None
    """The plan; ``None`` if the form has errors."""
    partial_plan: DeepSpeedPlan | None = None
    """The plan without the invalid settings; it is checked for further errors."""
    errors: tuple[ZeroTuneError, ...] = ()
    """All errors that were found."""


def read_plan(state: FormState) -> Reading:
    """Read the plan from a form; errors are returned, not raised."""

    def read(log: Log) -> DeepSpeedPlan:
        wrapper = wrapper_of(state.config)
        if wrapper is not None:
            # Following the reference could open any file; only `open_text` does, inside the root.
            raise InvalidValueError(
                "contains another configuration", "open this configuration as a file", wrapper
            )
        plan = plan_from_mapping(state.config, log, source="form")
        return raised(DeepSpeedPlan, with_launch(plan, read_launch(state.launch, log)))

    plan, errors = read_partly(read)
    return Reading(plan=None if errors else plan, partial_plan=plan, errors=errors)
