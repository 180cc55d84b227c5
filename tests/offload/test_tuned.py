"""Results of DeepSpeed's disk tuner, and their use by later leases."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests.offload.plans import swapping_plan
from zerotune.offload import OffloadManager
from zerotune.offload.root import MEASURED_FILE, TUNED

SETTINGS = {"block_size": 262_144, "queue_depth": 64, "intra_op_parallelism": 2}
PRINTED = """Running DeepNVMe performance tuning on ['/nvme']
Best performance (GB/sec): read =  2.00, write =  1.00
{
   "aio": {
      "single_submit": "false",
      "overlap_events": "true",
      "num_threads": 2,
      "queue_depth": 64,
      "block_size": 262144
   }
}
"""


def measured(root, **change):
    """Return the text that ``offload bench --save`` of an earlier release wrote."""
    found = {"format": 1, **SETTINGS, "read": 2e9, "write": 1e9, "host": platform.node(),
             "device": root.stat().st_dev, "measured": "2025-01-01T00:00:00+00:00"}  # fmt: skip
    return json.dumps({**found, **change}, indent=2)


def leased(root, text, **plan):
    """Return the settings of a lease beside a file with this text, and the decision about them."""
    (root / MEASURED_FILE).write_text(text)
    with OffloadManager(root=root).lease(swapping_plan(**plan)) as lease:
        aio = lease.plan.to_deepspeed()["aio"]
        (decision,) = (one for one in lease.decisions if one.key == "aio")
        return {name: aio[name] for name in TUNED}, decision


def test_a_lease_uses_the_settings_printed_by_deepspeeds_tuner(tmp_path):
    for text in (PRINTED, PRINTED[PRINTED.index("{") :], measured(tmp_path)):
        settings, decision = leased(tmp_path, text)
        assert settings == decision.after == SETTINGS


def test_the_installed_tuner_prints_a_readable_format(tmp_path):
    """The test runs only the tuner's last step, on made-up results of its sweep."""
    code = (
        "import sys; from deepspeed.nvme import perf_generate_param as p\n"
        "key = ('read', 'block', 'overlap', 'sequential', 64, 262144, 2)\n"
        "p.get_sorted_results = lambda folder, _kind: (None, {key[:0] + (folder, *found): 2.0})\n"
        "p.generate_aio_param('read', 'write')\n"
    ).replace("*found", "'block', 'overlap', 'x', 64, 262144, 2")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    printed = done.stdout[done.stdout.index("Best performance") :]
    settings, _ = leased(tmp_path, printed)
    assert settings == SETTINGS


def test_without_a_tuning_file_aio_is_not_set(tmp_path):
    with OffloadManager(root=tmp_path).lease(swapping_plan()) as lease:
        assert not [one for one in lease.decisions if one.key == "aio"]


def test_settings_of_the_user_override_the_tuned_ones(tmp_path):
    settings, _ = leased(tmp_path, PRINTED, aio={"queue_depth": 16, "thread_count": 1})
    assert settings == {**SETTINGS, "queue_depth": 16, "intra_op_parallelism": 1}


@pytest.mark.parametrize("change", [{"host": "elsewhere"}, {"device": -1}])
def test_settings_tuned_on_another_machine_or_disk_are_ignored(tmp_path, change):
    settings, decision = leased(tmp_path, measured(tmp_path, **change))
    assert settings["queue_depth"] == 8
    assert decision.after is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"aio": 3}', '{"format": 1, "queue_depth": 4}'])
def test_a_damaged_tuning_file_gives_a_warning(tmp_path, text):
    _, decision = leased(tmp_path, text)
    assert (decision.severity, decision.after) == ("warning", None)


@pytest.mark.parametrize("value", [0, -1, "8", 1.5, True, None])
def test_impossible_tuned_settings_give_a_warning(tmp_path, value):
    _, decision = leased(tmp_path, json.dumps({"aio": {**SETTINGS, "queue_depth": value}}))
    assert "positive integer" in decision.reason
    assert decision.severity == "warning"


def test_a_named_pipe_as_tuning_file_does_not_block(tmp_path):
    os.mkfifo(tmp_path / MEASURED_FILE)
    with OffloadManager(root=tmp_path).lease(swapping_plan()) as lease:
        assert "is not a regular file" in next(o.reason for o in lease.decisions if o.key == "aio")


def test_all_ranks_use_the_settings_of_rank_0(tmp_path):
    roots: tuple[Path, Path] = tmp_path / "node0", tmp_path / "node1"
    for root, depth in zip(roots, (64, 16), strict=True):
        root.mkdir()
        (root / MEASURED_FILE).write_text(measured(root, queue_depth=depth))
    said = []

    def share(text):
        said.append(text)
        return said[0]

    plan = swapping_plan(world_size=2)
    with (
        OffloadManager(root=roots[0], share=share).lease(plan) as first,
        OffloadManager(root=roots[1], share=share).lease(plan, rank=1) as second,
    ):
        for lease in (first, second):
            aio = lease.plan.to_deepspeed()["aio"]
            assert {name: aio[name] for name in TUNED} == SETTINGS
        assert first.plan.digest() == second.plan.digest()
