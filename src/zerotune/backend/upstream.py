"""The door to deepspeed and accelerate: import them, or say why that cannot be."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
from types import ModuleType

from packaging.version import Version

from zerotune._util.environment import environment
from zerotune.errors import MissingDependencyError, UnsupportedEngineError
from zerotune.platform.detect import OLDEST_DEEPSPEED


def require_deepspeed(*, accelerator: str) -> ModuleType:
    """Import DeepSpeed for an accelerator.

    Args:
        accelerator: DeepSpeed's name of it (``"cuda"``, ``"cpu"``, …).
    """
    with environment(DS_ACCELERATOR=accelerator):
        deepspeed = require(
            "deepspeed",
            name="DeepSpeed",
            fix="pip install deepspeed, or ask for the plain engine with deepspeed=False",
        )
    running = deepspeed.accelerator.get_accelerator()._name
    if running != accelerator:
        raise UnsupportedEngineError(
            f"DeepSpeed was already imported in this process for {running!r}",
            key="DS_ACCELERATOR",
            value=accelerator,
            fix=f"set DS_ACCELERATOR={accelerator} before anything imports deepspeed",
        )
    if Version(deepspeed.__version__).release < Version(OLDEST_DEEPSPEED).release:
        raise UnsupportedEngineError(
            f"zerotune needs DeepSpeed {OLDEST_DEEPSPEED} or newer",
            key="deepspeed",
            value=deepspeed.__version__,
            fix=f"pip install 'deepspeed>={OLDEST_DEEPSPEED}'",
        )
    return deepspeed


def require_accelerate() -> ModuleType:
    """Import accelerate."""
    return require("accelerate", fix="pip install accelerate")


def require(
    module: str, *, fix: str, name: str | None = None, key: str | None = None
) -> ModuleType:
    """Import a package that somebody may not have.

    Args:
        module: What to import.
        fix: How to get it.
        name: What people call it; ``module`` when not given.
        key: The setting that asks for it; ``module`` when not given.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependencyError(
            f"{name or module} could not be imported ({error})", key=key or module, fix=fix
        ) from error


def quiet_deepspeed() -> None:
    """Keep DeepSpeed's own logger to warnings; zerotune reports what it decided itself."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
