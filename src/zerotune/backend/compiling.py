"""How DeepSpeed's ops are compiled: always with the same ninja."""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from zerotune.backend.environment import environment


def same_ninja() -> AbstractContextManager[None]:
    """Put this Python environment's own ninja first on ``PATH`` inside the block.

    ninja releases record their commands differently, and each throws the other's record away.
    With two of them, a script started as ``.venv/bin/python`` and one started in the activated
    environment would compile the same op anew, minutes each, forever.
    """
    folder = Path(sys.executable).parent
    own = shutil.which("ninja", path=str(folder))
    if own is None or own == shutil.which("ninja"):
        return nullcontext()
    return environment(PATH=f"{folder}{os.pathsep}{os.environ.get('PATH', '')}")
