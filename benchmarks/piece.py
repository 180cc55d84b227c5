"""The process of one piece of a session: ``python -m benchmarks.piece MODULE:FUNCTION ANSWER``.

Its settings are a line of JSON on standard input; that it ends says that whoever asked has died.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from zerotune._util.files import write_atomically


def main(made: str, answer: Path) -> None:
    """Call the function and leave what it gives."""
    settings = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_the_other, daemon=True).start()
    module, _, function = made.partition(":")
    code = 1
    try:
        found = getattr(import_module(module), function)(settings)
        for so_far in found if isinstance(found, Iterator) else (found,):
            write_atomically(answer, json.dumps(so_far).encode())
        code = 0
    except BaseException:  # noqa: BLE001 - told to whoever asked, whatever it is
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # Skips atexit handlers of libraries that expect their own launcher.
    os._exit(code)


def _end_with_the_other() -> None:
    while os.read(0, 1):
        pass
    # With all that it has started itself: the group is its own.
    os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
