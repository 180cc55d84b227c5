"""Optimizers, schedules and DeepSpeed's parameters, as the page lists them."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable
from functools import cache
from typing import Any

from zerotune._util.text import squash
from zerotune.builder.fields import ZERO
from zerotune.builder.forms import to_wire
from zerotune.errors import UNSET, ZeroTuneError
from zerotune.optim import OPTIMIZERS, SCHEDULERS, Parameter
from zerotune.optimizers.catalogue import BY_WORD
from zerotune.plan.model import REMOVED, REMOVED_ZERO, ZERO_ALIASES, join
from zerotune.plan.schema import Parameter as SchemaParameter
from zerotune.plan.schema import known_paths, schema_parameters


@cache
def catalogue() -> dict[str, Any]:
    """Every optimizer and schedule with its parameters."""
    return {
        "optimizers": [
            {
                "name": entry.name,
                "spellings": [word for word, name in BY_WORD.items() if name == entry.name],
                "family": entry.family,
                "summary": entry.summary,
                "requires": list(entry.requires),
                "params": _parameters(entry.parameters),
            }
            for entry in OPTIMIZERS.values()
        ],
        "schedulers": [
            {
                "name": entry.name,
                "spellings": [squash(entry.name)],
                "family": entry.source,
                "summary": entry.summary,
                "requires": [],
                "params": _parameters(entry.parameters),
            }
            for entry in SCHEDULERS.values()
        ],
    }


def _parameters(parameters: Iterable[Parameter]) -> list[dict[str, Any]]:
    return [
        {
            "name": each.name,
            "type": each.type,
            "range": each.range,
            "default": None if each.default is UNSET else to_wire(each.default),
            "required": each.default is UNSET and not each.optional,
            "optional": each.optional,
            "choices": list(each.choices),
        }
        for each in parameters
    ]


class SchemaSource:
    """Every parameter of the installed DeepSpeed, looked up once.

    Importing DeepSpeed takes seconds and runs in one of the server's worker threads, so a page
    that does not open the advanced section never pays for it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[str, Any] | None = None

    def data(self) -> dict[str, Any]:
        """The parameters, or why there are none."""
        with self._lock:
            if self._found is None:
                self._found = _schema()
            return self._found


def _schema() -> dict[str, Any]:
    from zerotune.backend.schema import plan_schema

    try:
        schema = plan_schema()
    except ZeroTuneError as error:
        removed = _removed(frozenset())
        return {"available": False, "reason": str(error), "parameters": [], "removed": removed}
    known = known_paths(schema)
    parameters = [_schema_parameter(each) for each in schema_parameters(schema)]
    return {
        "available": True,
        "version": schema["x-zerotune"]["deepspeed"],
        "parameters": [each for each in parameters if each is not None],
        "removed": _removed(known),
    }


def _removed(known: Collection[str]) -> list[dict[str, str]]:
    """What older releases of DeepSpeed read, for who searches for it; not what this one knows."""
    gone = {
        **{key: f"DeepSpeed 0.19 removed {what}" for key, what in REMOVED.items()},
        **{join(ZERO, key): f"DeepSpeed 0.19 removed {what}" for key, what in REMOVED_ZERO.items()},
        **{
            join(ZERO, old): f"another spelling of {join(ZERO, new)}"
            for old, new in ZERO_ALIASES.items()
        },
    }
    return [{"path": path, "reason": gone[path]} for path in sorted(gone) if path not in known]


def _schema_parameter(each: SchemaParameter) -> dict[str, Any] | None:
    # A section is not a value to type in, and optimizers and schedules have a part of their own.
    if each.types == ("object",) or each.path.startswith(("optimizer.", "scheduler.")):
        return None
    return {
        "path": each.path,
        "types": list(each.types),
        "default": to_wire(each.default),
        "doc": each.doc,
        "deprecated": each.deprecated,
        "replaced_by": each.replaced_by,
        "stages": list(each.stages),
    }
