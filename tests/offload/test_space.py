"""Check whether a plan's swap files fit on the disk."""

from __future__ import annotations

import pytest

from tests.offload.plans import swapping_plan
from zerotune.errors import OffloadError
from zerotune.offload import OffloadManager
from zerotune.offload.manager import local_ranks
from zerotune.offload.root import RootChoice, check_root
from zerotune.offload.space import (
    SwapNeeds,
    check_space,
    swap_needs,
)
from zerotune.plan import ModelFacts, Workload
from zerotune.plan.memory.swap_files import SwapFiles

MIB = 1024**2


def facts(*sizes):
    return ModelFacts.from_shapes([(f"p{n}", (size,)) for n, size in enumerate(sizes)])


def needs(**options):
    return swap_needs(swapping_plan(**options)).files


def test_small_tensors_are_not_swapped():
    # Each half a million bf16 elements take less than 1 MiB; together they form one sub-group.
    found = needs(model=facts(500_000, 500_000))
    assert found["param"] == SwapFiles(stays=2_000_000)
    master = 1_000_000 * 4
    gradients = SwapFiles(nbytes=2 * 2_000_896, count=2)
    assert found["optimizer"] == SwapFiles(nbytes=3 * 4_000_768, count=3) + gradients
    assert 0 <= 4_000_768 - master < 1024


@pytest.mark.parametrize("block", [1, 8])
def test_an_estimate_counts_the_files_that_a_lease_reserves(block):
    aio = {"block_size": block * 2**20}
    plan = swapping_plan(model=facts(3_000_001, 600_000, 5_000), aio=aio)
    reserved = swap_needs(plan).of("param", "optimizer").nbytes
    assert plan.estimate(Workload()).nvme == reserved


def test_each_ranks_share_is_rounded_up_separately():
    found = needs(model=facts(3_000_001), world_size=2)
    part = 1_500_001
    assert found["param"].nbytes == -(-part * 2 // 1024) * 1024
    assert found["optimizer"].nbytes == 4 * (-(-part * 4 // 1024) * 1024)


def test_aio_threads_share_whole_kibibytes():
    found = needs(model=facts(3_000_001), aio={"intra_op_parallelism": 4})
    assert found["param"].nbytes % 4096 == 0


def test_larger_blocks_keep_more_tensors_in_memory():
    aio = {"block_size": 16 * MIB}
    assert needs(model=facts(3_000_000), aio=aio)["param"].count == 0


def test_unswapped_parts_need_no_disk_space():
    assert set(needs(model=facts(10), swap_param=False)) == {"optimizer"}


def test_without_a_model_the_needs_are_unknown():
    assert swap_needs(swapping_plan()) is None


@pytest.mark.parametrize(
    ("written", "count"), [(None, 8), ("4", 4), ("16", 8), ("x", 8), ("0", 1), ("", 8)]
)
def test_the_launcher_tells_how_many_ranks_this_machine_has(written, count):
    plan = swapping_plan(world_size=8)
    environ = {} if written is None else {"LOCAL_WORLD_SIZE": written}
    assert local_ranks(plan, environ) == count


def roots(*paths):
    found = [check_root(RootChoice(path=str(path), key="root")) for path in paths]
    return dict(zip(("param", "optimizer"), found, strict=False))


def asking(param, optimizer=0, files=1):
    return SwapNeeds(
        files={
            "param": SwapFiles(nbytes=param, count=files),
            "optimizer": SwapFiles(nbytes=optimizer, count=files),
        }
    )


@pytest.fixture
def small(tmp_path, mounted):
    return mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=16m,nr_inodes=100", "none")


def test_the_needs_of_ranks_add_up(small):
    check_space(roots(small), asking(7 * MIB), ranks=2, run_id="")
    with pytest.raises(OffloadError) as caught:
        check_space(roots(small), asking(7 * MIB), ranks=3, run_id="")
    assert "21.21 MiB for 3 rank(s), 7.00 MiB each" in caught.value.reason
    assert "16.00 MiB" in caught.value.reason
    assert "5.21 MiB are missing" in caught.value.reason


def test_two_roots_on_one_disk_share_its_space(small):
    for name in ("a", "b"):
        (small / name).mkdir()
    both = roots(small / "a", small / "b")
    check_space(both, asking(7 * MIB, 7 * MIB), ranks=1, run_id="")
    with pytest.raises(OffloadError, match="are missing"):
        check_space(both, asking(9 * MIB, 9 * MIB), ranks=1, run_id="")


def test_a_disk_with_too_few_inodes_is_refused(small):
    with pytest.raises(
        OffloadError, match="creates 216 files and folders, but the file system has room for only 9"
    ):
        check_space(roots(small), asking(0, files=200), ranks=1, run_id="")


def test_space_reserved_by_another_run_is_not_available(small):
    plan = swapping_plan(model=facts(500_000))
    reserved = swap_needs(plan).of("param", "optimizer").nbytes
    with OffloadManager(root=small).lease(plan) as first:
        (first.path / "half.swp").write_bytes(b"x" * 3 * MIB)
        with pytest.raises(OffloadError, match="other runs have reserved"):
            OffloadManager(root=small).lease(swapping_plan(model=facts(700_000))).__enter__()
        assert reserved > 7 * MIB
        assert [path.name for path in small.iterdir()] == [first.path.name]
    with OffloadManager(root=small).lease(swapping_plan(model=facts(700_000))):
        pass
