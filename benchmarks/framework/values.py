"""What a benchmark is, and what a case gives; plain values."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs

Samples = Mapping[str, Mapping[str, Sequence[float]]]
"""Raw samples by contestant and quantity.

A quantity's name tells its unit: ``…seconds``, ``…bytes``, ``…_per_second``. Of what ends with
``_per_second`` more is better, of all else less.
"""


def more_is_better(quantity: str) -> bool:
    """Whether a quantity is a rate."""
    return quantity.endswith("_per_second")


class CaseRefused(Exception):  # noqa: N818 - it is a finding, not an error
    """A case cannot run here: out of memory under a cap, a tool that is missing.

    It is written into the result as such and not tried again; any other exception ends the run.
    """


class TimeIsUp(Exception):  # noqa: N818 - an end, not an error
    """A benchmark has had its time: what was measured is kept, the next run goes on from there.

    Others that were asked for with it still run.
    """


@attrs.frozen(kw_only=True)
class Context:
    """What a case runs in."""

    scratch: Path
    """An empty folder on the disk of the results, removed afterwards."""
    log: Callable[[str], None]
    """Says what is going on."""
    began: float = attrs.field(factory=time.monotonic)
    """When the run began that the case is part of, by ``time.monotonic``."""


@attrs.frozen(kw_only=True)
class Measured:
    """What a case gave."""

    samples: Samples
    baseline: str
    """The contestant that the others are compared with, sample by sample: the n-th samples of
    all contestants should come from one round."""
    facts: Mapping[str, Any] = attrs.field(factory=dict)
    """Anything else worth keeping, as JSON-able data: plans, parameter counts.

    ``"limits"``, where given, is a list of dicts with ``what``, ``unit``, ``per_step``,
    ``reached_per_second``, ``limit_per_second`` and ``limit``: the documentation has them.
    """
    notes: tuple[str, ...] = ()
    """What a reader must know."""


@attrs.frozen(kw_only=True)
class Case:
    """One comparison. It is measured again when ``settings`` are others than those stored."""

    name: str
    settings: Mapping[str, Any]
    """All that decides what is measured, as JSON-able data."""
    measure: Callable[[Mapping[str, Any], Context], Measured]
    """Called with the settings."""


@attrs.frozen(kw_only=True)
class Goal:
    """What the ratio of a contestant to another, or its median itself, should come to.

    ``limit`` is the most; of quantities of which more is better, the least.
    """

    text: str
    case: str
    contestant: str
    quantity: str
    limit: float
    """The ratio, or with no ``against`` the quantity itself."""
    against: str | None = None
    """A contestant; ``None`` compares with a number."""


@attrs.frozen(kw_only=True)
class Benchmark:
    """A named set of cases."""

    name: str
    title: str
    """One line: what is compared."""
    cases: Callable[[bool], Sequence[Case]]
    """All cases; given whether they must be quick: seconds, at sizes that say nothing."""
    goals: tuple[Goal, ...] = ()
    ours: frozenset[str] = frozenset()
    """Contestants that are zerotune's."""
    better: str | None = None
    """What is better in a picture; ``None``: more of a rate, less of anything else."""
    device: Literal["cpu", "gpu"] = "cpu"
    """``"gpu"``: sizes are chosen for one; without one only the quick form is run."""
