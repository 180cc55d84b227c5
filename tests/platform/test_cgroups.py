"""Control groups of real containers, reproduced as dictionaries of files."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerotune.platform.detect import CgroupMemory, cpu_quota, memory_constraint

MIB = 1024**2
MOUNT_V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"


def v2(path, files, mount=MOUNT_V2):
    system = {"/proc/self/cgroup": f"0::{path}\n", "/proc/self/mountinfo": mount}
    return {**system, **files}.get


class TestMemory:
    def test_without_control_groups_there_is_no_limit(self):
        assert memory_constraint({}.get) == CgroupMemory(limit=None, available=None)

    def test_the_value_max_means_no_limit(self):
        read = v2("/a", {"/sys/fs/cgroup/a/memory.max": "max\n"})

        assert memory_constraint(read) == CgroupMemory(limit=None, available=None)

    def test_inactive_page_cache_counts_as_free(self):
        read = v2(
            "/a",
            {
                "/sys/fs/cgroup/a/memory.max": str(1000 * MIB),
                "/sys/fs/cgroup/a/memory.current": str(700 * MIB),
                "/sys/fs/cgroup/a/memory.stat": f"file 9\ninactive_file {300 * MIB}\n",
            },
        )

        assert memory_constraint(read) == CgroupMemory(limit=1000 * MIB, available=600 * MIB)

    def test_the_smallest_limit_on_the_path_binds(self):
        root = "/sys/fs/cgroup"
        read = v2(
            "/kubepods/pod/box",
            {
                f"{root}/kubepods/memory.max": str(64 * MIB),
                f"{root}/kubepods/pod/memory.max": str(8 * MIB),
                f"{root}/kubepods/pod/box/memory.max": "max",
                f"{root}/kubepods/other/memory.max": str(1 * MIB),
            },
        )

        assert memory_constraint(read).limit == 8 * MIB

    def test_the_least_available_memory_may_be_at_another_level_than_the_smallest_limit(self):
        root = "/sys/fs/cgroup"
        read = v2(
            "/slice/job",
            {
                f"{root}/slice/memory.max": str(100 * MIB),
                f"{root}/slice/memory.current": str(99 * MIB),
                f"{root}/slice/job/memory.max": str(50 * MIB),
                f"{root}/slice/job/memory.current": str(10 * MIB),
            },
        )

        assert memory_constraint(read) == CgroupMemory(limit=50 * MIB, available=1 * MIB)

    def test_usage_above_the_limit_leaves_nothing_available(self):
        read = v2(
            "/a",
            {"/sys/fs/cgroup/a/memory.max": "10", "/sys/fs/cgroup/a/memory.current": "20"},
        )

        assert memory_constraint(read).available == 0

    def test_a_namespaced_container_sees_its_own_group_as_the_root(self):
        read = v2("/", {"/sys/fs/cgroup/memory.max": str(4 * MIB)})

        assert memory_constraint(read).limit == 4 * MIB

    def test_a_bind_mount_of_the_containers_group_is_read(self):
        mount = MOUNT_V2.replace(" / /sys", " /docker/abc /sys")
        read = v2("/docker/abc/task", {"/sys/fs/cgroup/task/memory.max": "5"}, mount)

        assert memory_constraint(read).limit == 5

    @pytest.mark.parametrize("path", ["/../../elsewhere", "/docker/abcdef", "/other"])
    def test_a_group_outside_the_mount_falls_back_to_the_mount_point(self, path):
        mount = MOUNT_V2.replace(" / /sys", " /docker/abc /sys")
        read = v2(path, {"/sys/fs/cgroup/memory.max": "7"}, mount)

        assert memory_constraint(read).limit == 7

    def test_a_mount_point_with_a_space_is_read(self):
        mount = MOUNT_V2.replace("/sys/fs/cgroup", "/my\\040groups")
        read = v2("/a", {"/my groups/a/memory.max": "3"}, mount)

        assert memory_constraint(read).limit == 3


class TestCpuQuota:
    @pytest.mark.parametrize(
        ("text", "quota"),
        [
            ("max 100000\n", None),
            ("150000 100000\n", 1.5),
            ("50000 100000", 0.5),
            ("100000", None),
            ("", None),
            ("0 100000", None),
            ("100000 0", None),
        ],
    )
    def test_the_cores_are_quota_divided_by_period(self, text, quota):
        assert cpu_quota(v2("/a", {"/sys/fs/cgroup/a/cpu.max": text})) == quota

    def test_the_smallest_quota_on_the_path_binds(self):
        read = v2(
            "/a/b",
            {
                "/sys/fs/cgroup/a/cpu.max": "200000 100000",
                "/sys/fs/cgroup/a/b/cpu.max": "800000 100000",
            },
        )

        assert cpu_quota(read) == 2.0


limits = st.lists(st.none() | st.integers(1, 2**50), min_size=1, max_size=5)


@given(limits=limits)
def test_nesting_never_loosens_a_limit(limits):
    folder, files = "/sys/fs/cgroup", {}
    for index, limit in enumerate(limits):
        folder = f"{folder}/level{index}"
        files[f"{folder}/memory.max"] = "max\n" if limit is None else f"{limit}\n"
    path = folder.removeprefix("/sys/fs/cgroup")

    stated = [limit for limit in limits if limit is not None]
    assert memory_constraint(v2(path, files)).limit == min(stated, default=None)


junk = st.text(alphabet=st.sampled_from("0123456789max:/,- .\n\\cgroup2abc"), max_size=200)


@given(cgroup=junk, mountinfo=junk | st.just(MOUNT_V2), content=junk)
def test_no_text_crashes_the_parsers(cgroup, mountinfo, content):
    system = {"/proc/self/cgroup": cgroup, "/proc/self/mountinfo": mountinfo}

    def read(path):
        return system.get(path, content)

    found, quota = memory_constraint(read), cpu_quota(read)
    assert found.limit is None or isinstance(found.limit, int)
    assert found.available is None or found.available >= 0
    assert quota is None or quota > 0
