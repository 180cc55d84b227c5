"""Old and short spellings of a configuration, translated before it is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from zerotune.decisions import Decision
from zerotune.errors import PlanConflictError
from zerotune.plan import known_keys
from zerotune.plan.kinds import Boolean
from zerotune.plan.section import Section, join, modelled

if TYPE_CHECKING:
    from zerotune.plan.deepspeed_plan import DeepSpeedPlan

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


def normalise_top_level(raw: Mapping[str, Any], decisions: list[Decision]) -> dict[str, Any]:
    """Translate what can only be seen from the top level; the rest is in ``legacy_zero``."""
    config = dict(raw)
    _boolean_zero(config, decisions)
    for key, member in _SHORTHANDS.items():
        value = config.get(key)
        if isinstance(value, bool | str):
            config[key] = {member: value}
            decisions.append(
                Decision(
                    key=key,
                    before=value,
                    after={member: value},
                    reason="DeepSpeed wants an object here",
                )
            )
    for key, what in known_keys.REMOVED.items():
        if key in config and _is_disabled(config[key]):
            decisions.append(_dropped(key, config.pop(key), f"DeepSpeed 0.19 removed {what}"))
    return config


def legacy_zero(section: dict[str, Any], path: str, decisions: list[Decision]) -> dict[str, Any]:
    """Translate deprecated keys and short forms inside ``zero_optimization``."""
    for key in ("offload_param", "offload_optimizer"):
        _offload_shorthand(section, key, path, decisions)
    for key, modern in _LEGACY_OFFLOAD.items():
        if key in section:
            _legacy_offload(section, key, modern, path, decisions)
    _legacy_pinning(section, path, decisions)
    for key, what in known_keys.REMOVED_ZERO.items():
        if key in section and (_is_disabled(section[key]) or section[key] == -1):
            decisions.append(
                _dropped(f"{path}.{key}", section.pop(key), f"DeepSpeed 0.19 removed {what}")
            )
    return section


def _boolean_zero(config: dict[str, Any], decisions: list[Decision]) -> None:
    value = config.get("zero_optimization")
    if not isinstance(value, bool):
        return
    section: dict[str, Any] = {"stage": int(value)}
    if "allgather_size" in config and value:
        section["allgather_bucket_size"] = config.pop("allgather_size")
    config["zero_optimization"] = section
    decisions.append(
        Decision(
            key="zero_optimization",
            before=value,
            after=section,
            reason="the old boolean form; DeepSpeed reads true as stage 1",
            severity="warning",
        )
    )


def _offload_shorthand(
    section: dict[str, Any], key: str, path: str, decisions: list[Decision]
) -> None:
    value = section.get(key)
    if not isinstance(value, bool | str):
        return
    device = value if isinstance(value, str) else ("cpu" if value else "none")
    section[key] = {"device": device}
    decisions.append(
        Decision(
            key=f"{path}.{key}",
            before=value,
            after={"device": device},
            reason="DeepSpeed wants an object with a device here",
        )
    )


def _legacy_offload(
    section: dict[str, Any], key: str, modern: str, path: str, decisions: list[Decision]
) -> None:
    value = section.pop(key)
    enabled = value is not None and Boolean(auto=False).read(value, f"{path}.{key}")[0]
    current = section.get(modern)
    device = current.get("device") if isinstance(current, Mapping) else None
    if enabled and current is not None and device != "cpu":
        raise PlanConflictError(
            f"asks for CPU offload, but {modern} is written too and says {device!r}",
            key=f"{path}.{key}",
            value=value,
            fix=f"remove {key}; DeepSpeed reads {modern}",
        )
    if enabled and current is None:
        section[modern] = {"device": "cpu"}
    decisions.append(
        Decision(
            key=f"{path}.{key}",
            before=value,
            after=f'{modern} = {{"device": "cpu"}}' if enabled else None,
            reason=f"deprecated; DeepSpeed replaced it by {modern}",
            severity="warning",
        )
    )


def _legacy_pinning(section: dict[str, Any], path: str, decisions: list[Decision]) -> None:
    key = "cpu_offload_use_pin_memory"
    if key not in section:
        return
    value = section.pop(key)
    for modern in ("offload_param", "offload_optimizer"):
        if isinstance(section.get(modern), Mapping) and value is not None:
            section[modern] = {"pin_memory": value, **section[modern]}
    decisions.append(
        Decision(
            key=f"{path}.{key}",
            before=value,
            after="pin_memory of the offload sections",
            reason="deprecated; DeepSpeed ignores it in favour of pin_memory",
            severity="warning",
        )
    )


def _is_disabled(value: Any) -> bool:
    if isinstance(value, Mapping):
        return value.get("enabled", bool(value)) is False
    return value is None or value is False


def _dropped(key: str, value: Any, why: str) -> Decision:
    return Decision(
        key=key, before=value, after=None, reason=f"{why}; it was switched off, so it is left out"
    )


def normalised_plan(plan: DeepSpeedPlan) -> DeepSpeedPlan:
    """Read a plan's own words again; see ``DeepSpeedPlan.normalised``."""
    from zerotune.plan.reading import fill_from_launch, plan_from_mapping, read_launch

    decisions: list[Decision] = []
    known = passed_paths(plan)
    launch = read_launch(plan.launch.to_dict() if plan.launch else {}, decisions, known)
    again = plan_from_mapping(plan.to_deepspeed(), source=plan.source, also_known=known)
    found = (*plan.decisions, *decisions, *again.decisions)
    return fill_from_launch(attrs.evolve(again, decisions=found), launch)


def passed_paths(plan: DeepSpeedPlan) -> frozenset[str]:
    """Paths of all keys a plan passes through, so that reading it again lets them pass too."""
    launched = _passed(plan.launch, "launch") if plan.launch else ()
    return frozenset({*_passed(plan, ""), *launched})


def _passed(section: Section, prefix: str) -> Iterator[str]:
    for name in getattr(section, "extra", {}):
        yield join(prefix, name)
    for attribute in modelled(type(section)):
        value = getattr(section, attribute.name)
        if isinstance(value, Section):
            yield from _passed(value, join(prefix, attribute.name))
