"""The thread that compares the order of ranks ends before Python does."""

from __future__ import annotations

import subprocess
import sys
from typing import Final

SCRIPT: Final = """
import atexit, threading, time
from zerotune.backend.deepspeed.order import UseOrder

class Group:
    explain = None
    show = staticmethod(lambda what, value: time.sleep(0.1) or [value, ""])

atexit.register(lambda: print([t.name for t in threading.enumerate() if t.daemon]))
order = UseOrder(Group())
order.begin()
order.note("conv")
order.watch()
"""


def test_the_thread_of_an_engine_that_is_never_closed_ends_before_python() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout.strip() == "[]"
