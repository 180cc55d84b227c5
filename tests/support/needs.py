"""Optional modules of a test: skip where a developer lacks one, fail in CI."""

from __future__ import annotations

import os
from typing import Any

import pytest


def needs(module: str, *, may_lack: str = "") -> Any:
    """Import ``module``, or skip.

    In CI (``CI`` is set) a missing module fails instead: skipped tests prove nothing.

    Args:
        module: Dotted name of the module.
        may_lack: Why CI may do without it; it skips there too, with this reason.
    """
    if not os.environ.get("CI") or may_lack:
        return pytest.importorskip(module, reason=may_lack or None)
    try:
        return __import__(module, fromlist=["_"])
    except ImportError as error:
        package = module.partition(".")[0]
        pytest.fail(
            f"CI is set and {module} cannot be imported ({error}): install {package} into the "
            "test environment, or say with may_lack why this test may be skipped there",
            pytrace=False,
        )
