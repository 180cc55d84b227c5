"""Run a test on the device, in processes of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from tests.device.start import install
from tests.support.ranks import ranks as in_ranks


def on_device(
    ranks: int = 1,
    *,
    seed: int = 0,
    lateness: float = 0.3,
    ahead: int = 3000,
    env: dict[str, str] | None = None,
    timeout_s: float = 400.0,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the body of the decorated test in processes that have the device.

    As for ``ranks``, parameters and fixtures are created once and sent. Parameters of the test
    named ``seed``, ``lateness`` or ``ahead`` replace those given here. No engine proves its fast
    paths first, since a proof runs in a process of its own. The test is skipped where nothing
    compiles C++, and fails there in CI.

    Args:
        ranks: How many processes.
        seed: Seed of the order in which work runs.
        lateness: Chance that a task runs after something was queued; 1.0 runs all work at once.
        ahead: Tasks that may wait before the host must work.
        env: Variables of the processes' environment.
        timeout_s: How long they may take together.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def body(*args, **kwargs):
            import torch

            install()
            order = {"seed": seed, "lateness": lateness, "ahead": ahead}
            order = {name: kwargs.get(name, value) for name, value in order.items()}
            torch.simdev.seed_order(*order.values())
            test(*args, **kwargs)

        unproven = {"ZEROTUNE_PROOF": "off", **(env or {})}
        started = in_ranks(ranks, env=unproven, timeout_s=timeout_s)
        return pytest.mark.simdev(started(body))

    return decorate
