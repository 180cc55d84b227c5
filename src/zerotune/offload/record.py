"""The record that says whose a swap folder is."""

from __future__ import annotations

import json
import os
import re
import secrets
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

import attrs

from zerotune.errors import OffloadError
from zerotune.offload.process import ProcessIdentity

_FORMAT: Final = 1
_RUN_ID: Final = re.compile(r"\d{8}T\d{6}-[0-9a-f]{12}", re.ASCII)
_PREFIX: Final = "zerotune-"


def new_run_id() -> str:
    """A run id no other run has: UTC time for the reader, 48 random bits for uniqueness."""
    moment = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S")
    return f"{moment}-{secrets.token_hex(6)}"


def is_run_id(text: str) -> bool:
    """Whether ``text`` could come from :func:`new_run_id` (and so is safe in a path)."""
    return _RUN_ID.fullmatch(text) is not None


def lease_name(run_id: str) -> str:
    """Name of a run's folder inside a swap root."""
    return f"{_PREFIX}{run_id}"


def is_record(name: str) -> bool:
    """Whether a name inside a lease is that of a rank's record."""
    return name.startswith("rank") and name.endswith(".json")


def run_id_of(name: str) -> str | None:
    """Run id of a folder that zerotune leased, ``None`` for any other name."""
    run_id = name.removeprefix(_PREFIX)
    return run_id if name != run_id and is_run_id(run_id) else None


@attrs.frozen(kw_only=True)
class LeaseRecord:
    """Who holds a lease, since when and for which plan; one per rank.

    The lock decides who lives. The record tells a reader whose folder it is and how much it may
    grow, and guards against a file system whose locks lie.
    """

    run_id: str
    """Shared by all ranks of a run."""
    rank: int
    """Global rank of the process, from 0."""
    world_size: int
    """Number of ranks in the run."""
    plan_digest: str
    """``ResolvedPlan.digest()`` of the plan the run was started with."""
    created: str
    """UTC time, ISO 8601."""
    reserved: int
    """Bytes this rank will write here at most; 0: not known."""
    filesystem: str | None
    """Kind of the file system as this rank saw it; ``None`` outside Linux."""
    owner: ProcessIdentity
    """The process that holds it."""

    @classmethod
    def for_this_process(
        cls,
        *,
        run_id: str,
        rank: int,
        world_size: int,
        plan_digest: str,
        reserved: int = 0,
        filesystem: str | None = None,
    ) -> LeaseRecord:
        """The record of the calling process."""
        return cls(
            run_id=run_id,
            rank=rank,
            world_size=world_size,
            plan_digest=plan_digest,
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            reserved=reserved,
            filesystem=filesystem,
            owner=ProcessIdentity.current(),
        )

    def to_json(self) -> str:
        """One JSON object, indented for a human reader."""
        return json.dumps({"format": _FORMAT, **attrs.asdict(self)}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> LeaseRecord:
        """Read what :meth:`to_json` wrote.

        Raises:
            OffloadError: It is not a record of a format this version knows.
        """
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _unreadable(text, f"is not JSON ({error})") from None
        if not isinstance(fields, dict) or fields.pop("format", None) != _FORMAT:
            raise _unreadable(text, f"is not a lease record of format {_FORMAT}")
        owner = _read(ProcessIdentity, fields.pop("owner", None), _OWNER_TYPES, text)
        return cls(owner=ProcessIdentity(**owner), **_read(cls, fields, _RECORD_TYPES, text))

    def write(self, folder: Path) -> None:
        """Write ``rank<N>.json`` so that a reader sees all of it or nothing.

        Raises:
            OSError: The file system refuses.
        """
        draft = folder / f".rank{self.rank}.json.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(draft, flags, 0o600), "w", encoding="utf-8") as file:
            file.write(self.to_json())
            file.flush()
            os.fsync(file.fileno())
        draft.replace(folder / f"rank{self.rank}.json")


_OWNER_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "host": (str,),
    "boot_id": (str, type(None)),
    "pid": (int,),
    "pid_start": (int, type(None)),
    "pid_namespace": (int, type(None)),
}
_RECORD_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "run_id": (str,),
    "rank": (int,),
    "world_size": (int,),
    "plan_digest": (str,),
    "created": (str,),
    "reserved": (int,),
    "filesystem": (str, type(None)),
}


def _read(
    cls: type, fields: object, types: dict[str, tuple[type, ...]], text: str
) -> dict[str, Any]:
    if not isinstance(fields, dict) or fields.keys() != types.keys():
        raise _unreadable(text, f"does not hold exactly {sorted(types)} for {cls.__name__}")
    for name, value in fields.items():
        # bool is an int to Python, never to us.
        if not isinstance(value, types[name]) or isinstance(value, bool):
            raise _unreadable(text, f"{name} has the wrong type ({type(value).__name__})")
    return fields


def _unreadable(text: str, reason: str) -> OffloadError:
    return OffloadError(
        reason,
        key="lease record",
        value=text,
        fix="leave the folder alone unless you know that its run has ended; then delete it",
    )
