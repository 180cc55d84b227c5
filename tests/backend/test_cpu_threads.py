"""Threads and cores of ranks whose optimizer runs on the CPU."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from tests.support.ranks import run_ranks
from zerotune.backend.cpu_threads import ThreadFacts, cpu_threads, share_cores
from zerotune.plan import DeepSpeedPlan
from zerotune.platform import Platform
from zerotune.platform.detect import Cores

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}


def facts(threads, **environ):
    return ThreadFacts(threads=threads, defaults=frozenset({8, 16}), environ=environ)


@pytest.mark.parametrize(
    ("own", "affinities", "quota", "workers", "threads", "reason"),
    [
        (range(16), [range(16)], None, 0, 8, "8 physical core(s) for this rank"),
        (range(16), [range(16)] * 2, None, 0, 4, "8 physical core(s) shared by 2 ranks"),
        (range(16), [range(16)] * 9, None, 0, 1, "shared by 9 ranks"),
        (range(8, 16), [range(8), range(8, 16)], None, 0, 4, "4 physical core(s) for this rank"),
        (range(16), [range(16)], None, 2, 6, "2 reserved for 2 data worker(s)"),
        (range(16), [range(16)], None, 32, 4, "4 reserved for 32 data worker(s)"),
        (range(16), [range(16)] * 2, 6.9, 0, 3, "a container's limit of 6.9 cores"),
        (range(16), [range(16)] * 2, 0.5, 0, 1, "a container's limit of 0.5 cores"),
    ],
)  # fmt: skip
def test_ranks_divide_the_physical_cores_that_they_may_use(
    own, affinities, quota, workers, threads, reason
):
    cores = Cores(physical=8, logical=16, affinity=16)
    found, why = share_cores(own, affinities, cores=cores, quota=quota, workers=workers)
    assert found == threads
    assert reason in why


def test_torchs_default_thread_count_is_not_the_users_choice():
    assert facts(8).chosen_by is None
    assert facts(16).chosen_by is None


def test_a_thread_count_from_the_environment_or_a_call_is_the_users_choice():
    assert facts(4, OMP_NUM_THREADS="4").chosen_by == "OMP_NUM_THREADS=4 in the environment"
    assert facts(1, OMP_NUM_THREADS="1").chosen_by == "OMP_NUM_THREADS=1 in the environment"
    assert facts(3).chosen_by == "torch.set_num_threads(3)"


def test_the_single_thread_that_launchers_set_is_not_the_users_choice():
    assert facts(1, **TORCHRUN).launcher == "torchrun"
    assert facts(1, **TORCHRUN).chosen_by is None
    accelerate = {"ACCELERATE_MIXED_PRECISION": "no", "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    assert facts(1, **accelerate).launcher == "accelerate"
    # torchrun keeps the user's exported value, and sets no default for a single process.
    assert facts(4, **TORCHRUN | {"OMP_NUM_THREADS": "4"}).chosen_by is not None
    assert facts(1, **TORCHRUN | {"LOCAL_WORLD_SIZE": "1"}).chosen_by is not None
    assert facts(5, **TORCHRUN).chosen_by == "torch.set_num_threads(5)"


def _plan(accelerator="cpu", offload="none"):
    plan = DeepSpeedPlan.build(stage=2, offload=offload)
    return plan.resolve(platform=Platform.synthetic(accelerator))


def _rank(environ):
    """Run as one of two ranks that share this machine's cores."""
    from zerotune.backend.distributed import ProcessGroup

    os.environ.update(environ)
    whole = os.sched_getaffinity(0)
    torch.set_num_threads(1 if environ else len(whole))
    group = ProcessGroup(backend="gloo")
    with cpu_threads(_plan(), group) as decisions:
        inside = torch.get_num_threads()
    group.barrier("leaving")
    after = torch.get_num_threads()
    group.close()
    return {"decisions": decisions, "inside": inside, "after": after, "whole": whole}


@pytest.mark.parametrize("environ", [{}, TORCHRUN])
def test_two_ranks_share_the_cores_and_restore_their_threads(environ):
    for found in run_ranks(_rank, environ, world_size=2):
        if len(found["whole"]) < 2:
            pytest.skip("one core cannot be divided")
        assert 1 <= found["inside"] <= len(found["whole"]) // 2
        assert {decision.key for decision in found["decisions"]} == {"threads"}
        assert ("only torchrun's default" in found["decisions"][0].reason) == bool(environ)
        assert found["after"] == (1 if environ else len(found["whole"]))


def test_a_thread_count_chosen_by_the_user_stays_and_is_recorded():
    before = torch.get_num_threads()
    alone = SimpleNamespace(rank=0, gather=lambda value: [value])
    torch.set_num_threads(7)
    try:
        with cpu_threads(_plan(), alone) as (decision,):
            assert torch.get_num_threads() == 7
        assert "torch.set_num_threads(7)" in decision.reason
        with cpu_threads(_plan(), alone, wanted=3) as (decision,):
            assert torch.get_num_threads() == 3
        assert (decision.before, decision.after, decision.reason) == (7, 3, "set by threads=")
        assert torch.get_num_threads() == 7
        # An optimizer on the GPU does no work on the CPU.
        with cpu_threads(_plan("cuda"), alone) as nothing:
            assert nothing == ()
        with cpu_threads(_plan("cuda", "cpu"), alone) as kept:
            assert len(kept) == 1
    finally:
        torch.set_num_threads(before)
