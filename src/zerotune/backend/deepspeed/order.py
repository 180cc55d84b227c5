"""``UseOrder``: the order in which ranks use a model's weights, compared before they are mixed.

DeepSpeed sums gradients over the ranks, and gathers weights, in the order of their use. If ranks
use them in different orders, it mixes different weights, or a rank waits for ever.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, Final

from zerotune.backend.distributed import ProcessGroup
from zerotune.backend.roll_call import ANSWER_S, LOOK_S
from zerotune.errors import CollectiveError

_STILL: Final = 2
"""Number of looks without progress after which a rank may be waiting for another."""


class UseOrder:
    """This rank's order, and the other ranks'.

    Args:
        group: Process group of all ranks.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._used: list[str] = []
        self.passes = 0
        """Number of forward passes that this rank has begun, so that failed ones count too."""
        self._over = threading.Event()
        self._thread: Any = None

    def check(self, names: Sequence[str]) -> None:
        """Raise an error if other ranks pass other names. Collective, but uses only the store.

        Args:
            names: Names of what this rank uses next, before a collective.
        """
        text = json.dumps(names)
        digests = self._group.exchange(hashlib.sha256(text.encode()).hexdigest())
        if len(set(digests)) > 1:
            lists = [json.loads(each) for each in self._group.exchange(text)]
            raise _disagreement(next(_differences(lists)))

    def note(self, name: str) -> None:
        """Record that this rank uses something next.

        Args:
            name: Its name.
        """
        self._used.append(name)

    def begin(self) -> None:
        """Record that a forward pass begins, which every rank runs."""
        self.passes, self._used = self.passes + 1, []

    def watch(self) -> None:
        """Until ``close``, look for differences whenever this rank makes no progress in a pass."""
        self._group.explain = self.find
        self._thread = threading.Thread(target=self._watch, name="zerotune-order", daemon=True)
        self._thread.start()
        # A thread that comes back from the store while Python ends would abort the process.
        atexit.register(self.close)

    def close(self) -> None:
        """Stop watching. Repeatable."""
        atexit.unregister(self.close)
        self._over.set()
        if self._thread is not None:
            self._thread.join(ANSWER_S)
            self._group.explain = None

    def _watch(self) -> None:
        before, still = (0, 0), 0
        while not self._over.wait(LOOK_S):
            now = self.passes, len(self._used)
            still, before = still + 1 if now == before else 0, now
            if still >= _STILL and now[1] and self.find() is not None:
                self._group.abort()
                return

    def find(self, patience: float = 0.0) -> CollectiveError | None:
        """Return the error that names the first difference in this pass so far, if there is one.

        Args:
            patience: Seconds to wait for ranks that have not shown what they used.
        """
        own, deadline = [self.passes, self._used], time.monotonic() + patience
        while True:
            with contextlib.suppress(RuntimeError):
                shown = self._group.show("/used", json.dumps(own))
                passes, lists = zip(
                    *(json.loads(each or "[-1, []]") for each in shown), strict=True
                )
                if len(set(passes)) == 1:
                    shortest = min(map(len, lists))
                    for names in _differences([each[:shortest] for each in lists]):
                        return _disagreement(names)
            if time.monotonic() >= deadline:
                return None
            time.sleep(LOOK_S)


def _differences(lists: Sequence[Sequence[str]]) -> Any:
    places = zip_longest(*lists, fillvalue="nothing more")
    return (names for names in places if len(set(names)) > 1)


def _disagreement(names: Sequence[str]) -> CollectiveError:
    by_rank = ", ".join(f"rank {rank}: {name!r}" for rank, name in enumerate(names))
    return CollectiveError(
        f"the ranks disagree ({by_rank})",
        "call the same modules in the same order on every rank, with a factor of 0 if one has no "
        "input on a rank",
        "order of the model's weights",
    )
