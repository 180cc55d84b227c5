"""A sample in the suite, and the rest of a matrix nightly."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def nightly(*cases: Any) -> list[Any]:
    """Mark cases of a parametrized test; a tuple holds the values of several parameters."""
    values = (case if isinstance(case, tuple) else (case,) for case in cases)
    return [pytest.param(*each, marks=pytest.mark.nightly) for each in values]


def sampled(cases: Iterable[Any], suite: Iterable[Any]) -> list[Any]:
    """Mark as nightly the cases that are not of the suite."""
    kept = list(suite)
    return [case if case in kept else nightly(case)[0] for case in cases]
