"""The error of a call, as text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zerotune.errors import ZeroTuneError


def error_of(call: Callable[[], Any]) -> str:
    """Return class and message of the zerotune error that a call raises, or an empty text."""
    try:
        call()
    except ZeroTuneError as error:
        return f"{type(error).__name__}: {error}"
    return ""
