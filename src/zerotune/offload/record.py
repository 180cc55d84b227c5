"""``LeaseRecord``: which process owns a lease, and how much it may write there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import attrs
from typing_extensions import Self

from zerotune._util.files import read_record, write_atomically
from zerotune._util.proc import LOCAL_FILESYSTEMS, ProcessIdentity
from zerotune._util.text import json_of
from zerotune.errors import OffloadError

_FORMAT: Final = 1
_LONGEST: Final = 65536
_ValueT = TypeVar("_ValueT", bound=attrs.AttrsInstance)


@attrs.frozen(kw_only=True)
class LeaseRecord:
    """One rank's record in a lease: owning process, start time and plan.

    The lock of the lease shows whether the process is alive. The record identifies the process and
    contains the maximum swap size. On file systems with unreliable locks, it also helps to detect a
    dead process.
    """

    run_id: str
    """Run id, shared by all ranks."""
    rank: int
    """Global rank of the process, from 0."""
    world_size: int
    """Number of ranks in the run."""
    plan_digest: str
    """``ResolvedPlan.digest()`` of the run's plan."""
    created: str
    """Time of creation in UTC, ISO 8601."""
    owner: ProcessIdentity
    """The owning process."""
    filesystem: str | None = None
    """Kind of the file system, as the owner saw it; ``None`` outside Linux."""
    reserved: int = 0
    """Maximum bytes that this rank writes to the lease; 0 if unknown."""

    @classmethod
    def for_this_process(cls, **fields: Any) -> Self:
        """Create a record of the calling process, with the current time.

        Args:
            fields: Remaining fields of the record.
        """
        created = datetime.now(timezone.utc).isoformat(timespec="seconds")
        return cls(created=created, owner=ProcessIdentity.current(), **fields)

    def to_json(self) -> str:
        """Return the record as a JSON object, indented for human readers."""
        return json.dumps({"format": _FORMAT, **attrs.asdict(self)}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse the output of :meth:`to_json`.

        Args:
            text: Content of the record's file.

        Raises:
            OffloadError: The text is not a record.
        """
        try:
            fields = dict(json_of(text))
            if fields.pop("format", None) != _FORMAT:
                raise ValueError(f"not of format {_FORMAT}")
            return _typed(cls, {**fields, "owner": _typed(ProcessIdentity, fields["owner"])})
        except (ValueError, TypeError, KeyError) as error:
            raise _damaged(f"is no record ({error})", text) from None

    @classmethod
    def read(cls, path: str | Path, *, within: int | None = None) -> Self:
        """Read the record in a file.

        Args:
            path: Path, or file name if ``within`` is given.
            within: Descriptor of the folder that contains the file.
        """
        try:
            text = read_record(path, most=_LONGEST, within=within)
        except FileNotFoundError:
            raise
        except OSError as error:
            reason = f"{Path(path).name} cannot be read ({error.strerror or error})"
            raise _damaged(reason, "") from error
        return cls.from_json(text)

    def write(self, folder: Path) -> None:
        """Write the record atomically to ``rank<N>.json`` in the lease's ``folder``.

        Raises:
            OSError: The file cannot be written.
        """
        write_atomically(folder / f"rank{self.rank}.json", self.to_json().encode())

    def doubt(self, kind: str | None) -> str | None:
        """Return why a free lock does not prove that the owner has ended; ``None`` if it does.

        Args:
            kind: Kind of the file system, as this process sees it.
        """
        if self.owner.visible() and self.owner.alive():
            return f"process {self.owner.pid} of rank {self.rank} is alive without its lock"
        if kind in LOCAL_FILESYSTEMS and self.filesystem in LOCAL_FILESYSTEMS:
            # Only one kernel at a time mounts such a disk, so all its users see the same locks.
            return None
        if not self.owner.visible():
            seen = f" (which the owner saw as {self.filesystem})" if self.filesystem else ""
            return (
                f"the owner took the lock on host {self.owner.host} (in a different container, or "
                f"before a restart), and on {kind or 'this file system'}{seen} an unlocked "
                "folder does not prove that the owner has ended"
            )
        return None


def _typed(of: type[_ValueT], fields: Mapping[str, Any]) -> _ValueT:
    """Return a value from fields of a file.

    Raises:
        TypeError: A field is missing, unknown, or of another type than the class states.
    """
    found = of(**fields)
    for field in attrs.fields(attrs.resolve_types(of)):
        value = getattr(found, field.name)
        # To Python, a bool is an int.
        if isinstance(value, bool) or not isinstance(value, cast("type", field.type)):
            raise TypeError(f"{field.name} has the wrong type ({type(value).__name__})")
    return found


def _damaged(reason: str, text: str) -> OffloadError:
    return OffloadError(
        reason,
        "delete the folder only if you know that its run has ended",
        "lease record",
        text,
    )
