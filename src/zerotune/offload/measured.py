"""What a disk was measured to do, kept beside the leases of its root."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs

from zerotune.decisions import Decision
from zerotune.errors import OffloadError
from zerotune.files import write_atomically
from zerotune.plan.kinds import AUTO
from zerotune.plan.section import evolved
from zerotune.plan.sections import AioSection

if TYPE_CHECKING:
    from zerotune.plan.memory.values import MemoryEstimate
    from zerotune.plan.resolved import ResolvedPlan

MEASURED_FILE: Final = "zerotune-aio.json"
TUNED: Final = ("block_size", "queue_depth", "intra_op_parallelism")
"""Keys of ``aio`` that a measurement chooses."""

_FORMAT: Final = 1


@attrs.frozen(kw_only=True)
class MeasuredDisk:
    """Bandwidth of one root through DeepSpeed's aio, and the settings it was reached with."""

    block_size: int
    """Bytes of one request."""
    queue_depth: int
    """Requests in flight per thread."""
    intra_op_parallelism: int
    """Threads that share one tensor."""
    read: float
    """Bytes per second."""
    write: float
    """Bytes per second."""
    size: int
    """Bytes of the file it was measured with."""
    host: str
    """Machine it was measured on."""
    device: int
    """Number of the device, as ``stat`` gives it."""
    measured: str
    """UTC time, ISO 8601."""

    @property
    def settings(self) -> dict[str, int]:
        """The keys of ``aio`` it chose."""
        return {name: getattr(self, name) for name in TUNED}

    def step_seconds(self, estimate: MemoryEstimate) -> float:
        """The least seconds one optimizer step spends on this disk, when nothing overlaps.

        Args:
            estimate: What the plan needs; its ranks share the disk.
        """
        ranks = estimate.workload.ranks_per_machine or estimate.resolved.world_size
        traffic = estimate.swap_traffic
        return ranks * traffic.seconds(read_rate=self.read, write_rate=self.write)

    def to_aio(self, written: AioSection | None = None) -> AioSection:
        """An ``aio`` section for a plan; what is ``written`` there already stands."""
        section = written or AioSection()
        chosen = {
            name: value
            for name, value in self.settings.items()
            if getattr(section, name) in (None, AUTO)
        }
        return evolved(section, **chosen)

    def save(self, root: Path) -> Path:
        """Write it into a root, where later leases find it; readers see all of it or nothing.

        Raises:
            OffloadError: It cannot be written.
        """
        path = root / MEASURED_FILE
        text = json.dumps({"format": _FORMAT, **attrs.asdict(self)}, indent=2) + "\n"
        try:
            write_atomically(path, text.encode())
        except OSError as error:
            raise OffloadError(
                f"cannot be written ({error.strerror})", key="offload.root", value=str(path)
            ) from error
        return path

    @classmethod
    def load(cls, root: Path) -> MeasuredDisk | None:
        """What was measured in a root; ``None`` when nothing was.

        Raises:
            OffloadError: The file is damaged, or of a format this version does not know.
        """
        path = root / MEASURED_FILE
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            if fields.pop("format") != _FORMAT:
                raise ValueError(f"not of format {_FORMAT}")
            found = cls(**fields)
            if not all(type(value) is int and value > 0 for value in found.settings.values()):
                raise ValueError("a setting is no positive whole number")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise OffloadError(
                f"cannot be used ({error})",
                key="offload.root",
                value=str(path),
                fix="delete it, or measure again with `zerotune offload bench`",
            ) from error
        return found


def usable_settings(root: Path) -> tuple[Mapping[str, int], tuple[Decision, ...]]:
    """The ``aio`` settings measured in a root, if they are of this machine and this disk."""
    try:
        found = MeasuredDisk.load(root)
    except OffloadError as error:
        return {}, (_decision(root, {}, error.reason, warn=True),)
    if found is None:
        return {}, ()
    if found.host != platform.node() or found.device != root.stat().st_dev:
        why = f"it was measured on {found.host}, on another disk or before it was mounted anew"
        return {}, (_decision(root, {}, why),)
    why = (
        f"measured on {found.measured}: {found.read / 1e9:.2f} GB/s read, "
        f"{found.write / 1e9:.2f} GB/s written"
    )
    return found.settings, (_decision(root, found.settings, why),)


def _decision(root: Path, after: Any, reason: str, *, warn: bool = False) -> Decision:
    return Decision(
        key="aio",
        before=str(root / MEASURED_FILE),
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
