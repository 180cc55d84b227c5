"""A pytest plugin that records every configuration the tests resolve or render.

Use: ``pytest -p tests.plan.recording`` with ``ZEROTUNE_RECORD`` naming the file.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from zerotune.errors import ZeroTuneError
from zerotune.plan import plan as facades
from zerotune.plan import resolution as resolving

_recorded: set[str] = set()
_resolve = resolving.resolve
_render = facades.ResolvedPlan.to_deepspeed


def _rendering(plan: Any) -> dict[str, Any]:
    config = _render(plan)
    if plan.uses_deepspeed:
        _recorded.add(json.dumps(config, sort_keys=True))
    return config


def _resolving(*args: Any, **kwargs: Any) -> Any:
    plan = _resolve(*args, **kwargs)
    # Some tests resolve plans on purpose that cannot be rendered.
    with contextlib.suppress(ZeroTuneError):
        _rendering(plan)
    return plan


def pytest_configure() -> None:
    resolving.resolve = _resolving
    facades.ResolvedPlan.to_deepspeed = _rendering


def pytest_unconfigure() -> None:
    Path(os.environ["ZEROTUNE_RECORD"]).write_text(
        json.dumps([json.loads(each) for each in sorted(_recorded)])
    )
