"""The ``aio`` settings that DeepSpeed's tuner found for a disk, from a file in the swap root."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs

from zerotune._util.files import read_record
from zerotune._util.text import json_of
from zerotune.decisions import Decision
from zerotune.plan.model import AUTO, evolved

if TYPE_CHECKING:
    from zerotune.plan.model import ResolvedPlan

MEASURED_FILE: Final = "zerotune-aio.json"
"""What ``ds_nvme_tune`` printed, or what ``offload bench --save`` of an earlier release wrote."""
TUNED: Final = ("block_size", "queue_depth", "intra_op_parallelism")
"""Keys of ``aio`` that a measurement chooses."""

_LONGEST: Final = 2**20


def usable_settings(root: Path) -> tuple[Mapping[str, int], tuple[Decision, ...]]:
    """The ``aio`` settings measured for a root, if they are of this machine and this disk."""
    path = root / MEASURED_FILE
    try:
        found = _measured(path)
        settings = _settings(found)
    except FileNotFoundError:
        return {}, ()
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return {}, (_decision(path, {}, f"cannot be used ({error})", warn=True),)
    # The tuner does not say where it ran; an earlier release did.
    host, device = platform.node(), root.stat().st_dev
    if (found.get("host", host), found.get("device", device)) != (host, device):
        why = f"it was measured on {found['host']}, on another disk or before it was mounted anew"
        return {}, (_decision(path, {}, why),)
    return settings, (_decision(path, settings, "measured for this disk"),)


def _measured(path: Path) -> dict[str, Any]:
    """The JSON, after the lines that the tuner prints before it."""
    text = read_record(path, most=_LONGEST)
    found: dict[str, Any] = json_of(text[max(text.rfind("\n{"), 0) :])
    return found


def _settings(measured: Mapping[str, Any]) -> dict[str, int]:
    section = measured.get("aio", measured)
    if "num_threads" in section:
        section = {**section, "intra_op_parallelism": section["num_threads"]}
    settings = {name: section[name] for name in TUNED}
    if not all(type(value) is int and value > 0 for value in settings.values()):
        raise ValueError("a setting is no positive whole number")
    return settings


def _decision(path: Path, after: Any, reason: str, *, warn: bool = False) -> Decision:
    return Decision(
        key="aio",
        before=str(path),
        after=dict(after) or None,
        reason=reason,
        severity="warning" if warn else "note",
    )


def with_settings(resolved: ResolvedPlan, settings: Mapping[str, Any]) -> ResolvedPlan:
    """``resolved`` with measured ``aio`` settings where the user wrote none."""
    written = resolved.requested.aio
    chosen = {
        name: settings[name]
        for name in TUNED
        if name in settings and getattr(written, name, None) in (None, AUTO)
    }
    aio = resolved.plan.aio
    if not chosen or aio is None:
        return resolved
    plan = attrs.evolve(resolved.plan, aio=evolved(aio, **chosen))
    return attrs.evolve(resolved, plan=plan)
