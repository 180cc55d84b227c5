"""The cores of each rank, on synthetic machines."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerotune.errors import InvalidValueError
from zerotune.platform.detect import (
    LogicalCpu,
    describe_cpus,
    parse_list,
    read_cpus,
    share_cores,
)


def machine(*, nodes=1, cores=8, threads=2):
    """Return a machine with ``cores`` per node, numbered as on x86: all first threads first."""
    whole = nodes * cores
    return tuple(
        sorted(
            LogicalCpu(node=core // cores, package=core // cores, core=core, number=number)
            for thread in range(threads)
            for core in range(whole)
            for number in [thread * whole + core]
        )
    )


def everyone(cpus, ranks):
    return [{cpu.number for cpu in cpus}] * ranks


def test_hyperthreads_count_as_one_core():
    cpus = machine()
    share = share_cores(cpus, affinities=everyone(cpus, 1), rank=0)
    assert share.threads == 8
    assert share.reason == "8 physical core(s) for this rank"


def test_each_of_two_ranks_gets_half_of_the_cores():
    cpus = machine(nodes=2, cores=4)
    shares = [share_cores(cpus, affinities=everyone(cpus, 2), rank=rank) for rank in (0, 1)]
    assert [share.threads for share in shares] == [4, 4]


def test_data_workers_get_at_most_half_of_the_cores():
    cpus = machine()
    few = share_cores(cpus, affinities=everyone(cpus, 1), rank=0, workers=2)
    many = share_cores(cpus, affinities=everyone(cpus, 1), rank=0, workers=32)
    assert (few.threads, many.threads) == (6, 4)
    assert "2 reserved for 2 data worker(s)" in few.reason
    assert "4 reserved for 32 data worker(s)" in many.reason


def test_ranks_share_a_containers_quota_rounded_down():
    cpus = machine(cores=32)
    one = share_cores(cpus, affinities=everyone(cpus, 1), rank=0, quota=6.9)
    two = share_cores(cpus, affinities=everyone(cpus, 2), rank=1, quota=6.9)
    none = share_cores(cpus, affinities=everyone(cpus, 2), rank=1, quota=0.5)
    assert (one.threads, two.threads, none.threads) == (6, 3, 1)


def test_an_affinity_set_by_the_launcher_is_kept():
    cpus = machine(cores=4, threads=1)
    share = share_cores(cpus[2:], affinities=[{0, 1}, {2, 3}], rank=1)
    assert share.threads == 2


def test_with_more_ranks_than_cores_each_gets_one_thread():
    cpus = machine(cores=2, threads=1)
    shares = [share_cores(cpus, affinities=everyone(cpus, 3), rank=rank) for rank in range(3)]
    assert [share.threads for share in shares] == [1] * 3


def test_usable_cpus_are_described_with_hyperthreads_and_limit():
    cpus = read_cpus(lambda _: None, range(3))
    assert describe_cpus(cpus) == "3 physical core(s), 3 hardware thread(s)"
    eight = describe_cpus(machine(), quota=2.5)
    assert eight == "8 physical core(s), 16 hardware thread(s), a container's limit of 2.5 cores"


def test_missing_or_mismatched_affinities_are_refused():
    with pytest.raises(InvalidValueError):
        share_cores((), affinities=[set()], rank=0)
    with pytest.raises(InvalidValueError):
        share_cores(machine(), affinities=[{0}], rank=1)


@given(
    nodes=st.integers(1, 4),
    cores=st.integers(1, 16),
    threads=st.integers(1, 2),
    ranks=st.integers(1, 8),
    workers=st.integers(0, 8),
)
def test_ranks_have_no_more_threads_than_cores(nodes, cores, threads, ranks, workers):
    cpus = machine(nodes=nodes, cores=cores, threads=threads)
    shares = [
        share_cores(cpus, affinities=everyone(cpus, ranks), rank=rank, workers=workers)
        for rank in range(ranks)
    ]
    assert all(share.threads >= 1 for share in shares)
    if ranks > 1 and nodes * cores >= ranks:
        assert sum(share.threads for share in shares) <= nodes * cores


def test_the_topology_is_read_from_the_kernels_files():
    files = {
        "/sys/devices/system/node/online": "0-1\n",
        "/sys/devices/system/node/node0/cpulist": "0,2\n",
        "/sys/devices/system/node/node1/cpulist": "1,3\n",
    }
    for number in range(4):
        topology = f"/sys/devices/system/cpu/cpu{number}/topology"
        files[f"{topology}/core_id"] = f"{number // 2}\n"
        files[f"{topology}/physical_package_id"] = f"{number % 2}\n"
    found = read_cpus(files.get, [0, 1, 2, 3])
    assert [(cpu.number, cpu.node, cpu.package, cpu.core) for cpu in found] == [
        (0, 0, 0, 0),
        (2, 0, 0, 1),
        (1, 1, 1, 0),
        (3, 1, 1, 1),
    ]
    assert len(read_cpus({}.get, [4, 7])) == 2
    assert share_cores(read_cpus({}.get, [4, 7]), affinities=[{4, 7}], rank=0).threads == 2


@given(st.sets(st.integers(0, 300), max_size=20))
def test_cpu_lists_of_the_kernel_are_parsed(numbers):
    assert parse_list(",".join(map(str, sorted(numbers)))) == tuple(sorted(numbers))


@given(st.text(alphabet="0123456789-, \nx", max_size=12))
def test_no_text_crashes_the_parser(text):
    assert all(number >= 0 for number in parse_list(text[:8]))
