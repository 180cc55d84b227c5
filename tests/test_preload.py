"""Preloading in the fork servers of tests and benchmarks must not initialise CUDA."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

SCRIPT = """
    import torch

    torch.version.cuda = "13.0"
    touched = []
    for name in ("init", "_lazy_init", "is_available", "device_count", "get_device_properties"):
        setattr(torch.cuda, name, lambda *_a, name=name: touched.append(name) or 0)
    import bench.preload
    import tests.support.preload

    print("TOUCHED", touched)
"""


@pytest.mark.nightly
def test_preloading_does_not_initialise_cuda_before_the_fork():
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "TOUCHED []" in done.stdout
