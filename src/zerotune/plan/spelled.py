"""Old and short spellings of a configuration, translated before it is read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import attrs

from zerotune.decisions import Log, Rejected
from zerotune.errors import REMOVAL, PlanConflictError
from zerotune.plan.keys import PLACES, REMOVED, REMOVED_ZERO, ZERO_ALIASES
from zerotune.plan.section import join
from zerotune.plan.values import LARGEST_INTEGER, Boolean

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
_GATHER: Final = PLACES[_SAVED_WHOLE].rpartition(".")[2]
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
        self.log.attempt(self._saved_whole)
        if section.get("steps_per_print") == math.inf:
            section["steps_per_print"] = LARGEST_INTEGER
            self.log.decide(
                "steps_per_print",
                "inf",
                LARGEST_INTEGER,
                'accelerate writes "inf" for "never", but DeepSpeed requires an integer',
            )
        for key, member in _SHORTHANDS.items():
            value = section.get(key)
            if isinstance(value, bool | str):
                section[key] = {member: value}
                self.log.decide(
                    key, value, {member: value}, Rejected("DeepSpeed requires an object here")
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
                self.log.decide(path, self.section.pop(key), None, Rejected(why), "warning")

    def _saved_whole(self) -> None:
        """Translate accelerate's name of a ZeRO key, as in SimpleTuner's documentation."""
        value = self.section.get(_SAVED_WHOLE)
        zero = self.section.get("zero_optimization", {})
        if _SAVED_WHOLE not in self.section or not isinstance(zero, Mapping):
            return
        del self.section[_SAVED_WHOLE]
        if any(zero.get(name, value) != value for name in (_GATHER, *_GATHER_ALIASES)):
            raise PlanConflictError(
                "is also set in zero_optimization, to a different value",
                key=_SAVED_WHOLE,
                value=value,
                edits=[REMOVAL],
            )
        if zero.keys().isdisjoint(_GATHER_ALIASES):
            self.section["zero_optimization"] = {**zero, _GATHER: value}
        self.log.decide(
            _SAVED_WHOLE,
            value,
            f"zero_optimization.{_GATHER} = {value}",
            f"DeepSpeed does not know {_SAVED_WHOLE}, which is accelerate's name for {_GATHER}",
        )

    def _offload_shorthand(self, key: str) -> None:
        value = self.section.get(key)
        if not isinstance(value, bool | str):
            return
        device = value if isinstance(value, str) else ("cpu" if value else "none")
        self.section[key] = {"device": device}
        self.log.decide(
            f"{self.path}.{key}",
            value,
            {"device": device},
            Rejected("DeepSpeed requires an object with a device here"),
        )

    def _legacy_offload(self, key: str, modern: str) -> None:
        value = self.section.pop(key)
        enabled = value is not None and Boolean(auto=False).read(value, f"{self.path}.{key}")[0]
        if modern in self.section:
            raise PlanConflictError(
                f"is the deprecated form of {modern}, and DeepSpeed rejects a file with both",
                f"remove {key}",
                f"{self.path}.{key}",
                value,
                edits=[REMOVAL],
            )
        if enabled:
            self.section[modern] = {"device": "cpu"}
        self.log.decide(
            f"{self.path}.{key}",
            value,
            f'{modern} = {{"device": "cpu"}}' if enabled else None,
            f"the key is deprecated; DeepSpeed replaced it with {modern}",
            "warning",
        )
