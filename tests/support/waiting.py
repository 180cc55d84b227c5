"""Wait for something that another process or thread does."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds; fail after two minutes."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "it did not happen within two minutes"
        time.sleep(0.02)
