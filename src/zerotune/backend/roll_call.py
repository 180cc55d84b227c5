"""``RollCall``: which collective each rank has reached, and which ranks are missing."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch.distributed as dist

from zerotune._util.proc import ENDED, ProcessIdentity
from zerotune.errors import CollectiveError, ZeroTuneError

T = TypeVar("T")

SETTLING_S: Final = 2.0
"""Seconds that a process may take to end after its connections are closed."""

ANSWER_S: Final = 3.0
"""Seconds that the store may take to answer when a rank is missing."""

_STORE_S: Final = 10.0
"""Seconds that a separate store connection waits for a missing key."""

_SILENCE_S: Final = 5.0
"""Seconds after a failed collective in which every remaining rank notices the failure too."""

LOOK_S: Final = 0.5
"""Seconds between checks that the processes of missing ranks are still alive."""

_PAUSE_S: Final = 1e-4
_LONGEST_PAUSE_S: Final = 5e-3
"""Shortest and longest pause between two looks into the store."""

NO_START: Final = "all ranks arrived, but the process group could not start"

_LONGEST_LINE: Final = 200

_COLLECTIVE: Final = re.compile(
    r"gloo|NCCL|Connection (closed by peer|reset)|Broken pipe|Socket Timeout|"
    r"Timed out waiting|pair closure|c10d|ProcessGroup"
)


class RollCall:
    """Each rank's last collective, recorded in the store, and whether its process lives.

    ``name`` is the group's name, equal on all ranks; ``before`` is the roll call to continue.
    """

    def __init__(
        self, name: str, *, rank: int, store: Any = None, before: RollCall | None = None
    ) -> None:
        self._prefix, self._rank = f"zerotune/{name}", rank
        self._store = dist.distributed_c10d._get_default_store() if store is None else store
        # A read waits for an answer, and a connection lets nobody else write in the meantime: notes
        # would wait for a store whose process is stopped.
        self._reader = own_store(self._store)
        self.members: list[ProcessIdentity] = [] if before is None else before.members
        """Process of each rank."""
        self._exchanges = 0
        self.count = self.passes = 0
        """Numbers of collectives of this group, and of backward passes, so far."""

    def lost(
        self, what: str, error: RuntimeError, *, patience: float = SETTLING_S
    ) -> CollectiveError:
        """Wait until the missing ranks are known, and return an error that names them.

        ``error`` is torch's error.
        """
        return naming_the_absent(what, self.absent(patience=patience), error, rank=self._rank)

    def here(self, purpose: str) -> None:
        """Record in the store which collective this rank has reached."""
        self.count += 1
        self.note("", f"{self.count} {purpose}")

    def leave(self) -> None:
        """Record in the store that this rank takes part in nothing more."""
        self.note("", f"-1 has closed its engine after {self.passes} backward passes")
        # Closes the other connection.
        self._reader = self._store

    def note(self, what: str, value: str) -> None:
        """Record a value in the store."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"{self._prefix}/{self._rank}{what}", value)

    def exchange(self, value: str, deadline: float) -> list[str]:
        """Return the strings that all ranks pass in this call, in rank order."""
        self._exchanges += 1
        number, looked, pause = f"{self._exchanges} ", time.monotonic(), _PAUSE_S
        # A rank is at most one exchange ahead of another.
        what = f"/exchange/{self._exchanges % 2}"
        keys = [f"{self._prefix}/{rank}{what}" for rank in range(len(self.members))]
        self._store.set(keys[self._rank], number + value)
        while True:
            values = self._reader.multi_get(keys) if self._reader.check(keys) else [b""]
            texts = [each.decode() for each in values]
            if all(text.startswith(number) for text in texts):
                return [text.removeprefix(number) for text in texts]
            if (now := time.monotonic()) > deadline:
                raise RuntimeError("Timed out waiting for the other ranks")
            if now > looked + LOOK_S:
                looked = now
                if self.dead():
                    raise RuntimeError("Timed out waiting for a rank that has ended")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def show(self, what: str, value: str) -> list[str]:
        """Record a value in the store, and return those of all ranks, empty where there is none."""
        self.note(what, value)
        keys = [f"{self._prefix}/{rank}{what}" for rank in range(len(self.members))]
        check, get = self._reader.check, self._reader.get
        return [get(key).decode() if check([key]) else "" for key in keys]

    def ahead(self) -> dict[int, str]:
        """Return ranks that wait for this one in a backward pass, while it waits elsewhere."""
        own, ahead = self.passes, {}
        with contextlib.suppress(RuntimeError):
            for rank in self._elsewhere():
                key = f"{self._prefix}/{rank}/passes"
                begun = int(self._reader.get(key)) if self._reader.check([key]) else 0
                if begun > own:
                    ahead[rank] = (
                        f"has begun pass {begun}, but the data of rank {self._rank} ended "
                        f"after {own}"
                    )
        return ahead

    def absent(self, *, patience: float) -> dict[int, str]:
        """Return the ranks that have not reached this rank's collective, each with its state.

        A process that has just lost its connections has ``patience`` seconds to end.
        """
        deadline = time.monotonic() + patience
        while not (absent := self.ended()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return absent or Asking().ask(self.ahead, seconds=ANSWER_S) or self._behind(patience)

    def dead(self) -> bool:
        """Return whether any visible rank's process has ended; stopped processes do not count."""
        return any(state.startswith(ENDED) for state in self.ended().values())

    def ended(self) -> dict[int, str]:
        """Return the state of each rank on this machine whose process has ended or is stopped."""
        conditions = {rank: process.condition() for rank, process in enumerate(self.members)}
        return {
            rank: f"{condition} (process {self.members[rank].pid})"
            for rank, condition in conditions.items()
            if condition is not None
        }

    def _behind(self, patience: float) -> dict[int, str]:
        """The ranks that have not come as far as this one, each with its state.

        Every remaining rank notices a lost one, and records that in the store. Processes on other
        machines cannot be inspected, so a rank that records nothing counts as lost.
        """
        # A store whose host process is stopped never answers.
        asking = Asking()
        waits = patience > 0 and not all(member.visible() for member in self.members)
        if waits:
            asking.ask(lambda: self.here("a lost rank"), seconds=ANSWER_S)
        deadline = time.monotonic() + _SILENCE_S * waits
        while absent := asking.ask(self._elsewhere, seconds=ANSWER_S):
            if time.monotonic() >= deadline:
                return absent
            time.sleep(LOOK_S)
        if absent is None and self.members and not self.members[0].visible():
            # Its process or its launcher hosts the store.
            return {0: f"cannot be reached, and neither can its store{self._place(0)}"}
        return {}

    def _place(self, rank: int) -> str:
        """The process of a rank on another machine; empty on this one."""
        member = self.members[rank]
        return "" if member.visible() else f" (process {member.pid} on {member.host})"

    def _elsewhere(self) -> dict[int, str]:
        absent = {}
        for rank in range(len(self.members)):
            key = f"{self._prefix}/{rank}"
            note = self._reader.get(key).decode() if self._reader.check([key]) else "0 nothing"
            count, _, purpose = note.partition(" ")
            if int(count) < self.count:
                state = f"last reached {purpose!r}" if int(count) else "never arrived"
                state = purpose if int(count) < 0 else state
                absent[rank] = f"{state}{self._place(rank)}"
        return absent


def own_store(store: Any = None) -> Any:
    """Open a separate connection to a store.

    Args:
        store: torch's store; default: the store of the default process group.
    """
    store = dist.distributed_c10d._get_default_store() if store is None else store
    with contextlib.suppress(RuntimeError, AttributeError, NotImplementedError):
        store = store.clone()
    with contextlib.suppress(RuntimeError, NotImplementedError):
        store.set_timeout(timedelta(seconds=_STORE_S))
    return store


class Asking:
    """Run functions with a timeout, because a function may call a store that no longer responds."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    @property
    def waits(self) -> bool:
        """Whether the last function is still running."""
        return self._thread is not None and self._thread.is_alive()

    def ask(self, question: Callable[[], T], *, seconds: float) -> T | None:
        """Run a function in a thread and return its result; ``None`` if it fails or times out.

        After a timeout the thread keeps running; no further function starts before it ends.

        Args:
            question: The function.
            seconds: Seconds to wait for the result.
        """
        answers: list[T] = []

        def run() -> None:
            with contextlib.suppress(RuntimeError, OSError):
                answers.append(question())

        if self._thread is not None:
            self._thread.join(seconds)
            if self._thread.is_alive():
                return None
        self._thread = threading.Thread(target=run, name="zerotune-asking", daemon=True)
        self._thread.start()
        self._thread.join(seconds)
        return answers[0] if answers else None


def naming_the_absent(
    what: str, absent: Mapping[int, str], error: Exception | None, *, rank: int
) -> CollectiveError:
    """Return an error that names the missing ranks.

    Args:
        what: What failed.
        absent: State of each missing rank.
        error: torch's error; ``None`` if there is none.
        rank: This process's rank.
    """
    ranks = f"Rank{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent))}"
    states = "; ".join(f"rank {each} {state}" for each, state in absent.items())
    who = f"{ranks} {'are' if len(absent) > 1 else 'is'} missing: {states}"
    if not absent:
        who = "no rank is missing now, so a rank timed out or failed earlier"
        if error is not None:
            # torch's message begins with the C++ source line that raised the error.
            line = re.sub(r"^\[[^\]]*\] *", "", (str(error).splitlines() or [""])[0])
            who += f": {line[:_LONGEST_LINE] or type(error).__name__}"
    return CollectiveError(
        f"{what} ({who})",
        "make this call on every rank, not inside `if rank == 0`, and give every rank the same "
        "number of batches; if a rank has ended, look for its error in its log",
        f"rank {rank}",
    )


def is_collective(error: BaseException) -> bool:
    """Return whether torch raised an error because communication between processes failed.

    Args:
        error: The exception.
    """
    if isinstance(error, ZeroTuneError):
        return False
    return isinstance(error, getattr(dist, "DistError", ())) or bool(_COLLECTIVE.search(str(error)))
