"""What a call ends with, as text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zerotune.errors import ZeroTuneError


def error_of(call: Callable[[], Any]) -> str:
    """Class and message of zerotune's error that a call ends with; empty where it works."""
    try:
        call()
    except ZeroTuneError as error:
        return f"{type(error).__name__}: {error}"
    return ""
