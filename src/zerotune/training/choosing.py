"""What a trainer takes when it was not told."""

from __future__ import annotations

from typing import Any

from zerotune.errors import InvalidValueError


def scheduler_of(objective: Any) -> Any:
    """The diffusers scheduler an objective draws with.

    Raises:
        InvalidValueError: It has none, as a loss of one's own.
    """
    scheduler = getattr(objective, "scheduler", None)
    if scheduler is None:
        raise InvalidValueError(
            f"{type(objective).__name__} has no scheduler to sample with",
            key="scheduler",
            value=None,
            fix="pass a diffusers scheduler",
        )
    return scheduler
