from __future__ import annotations

import pytest

from tests.plan.rulebook.findings import find, one, read


@pytest.mark.parametrize(
    ("asked", "world_size", "found"), [(8, 8, 0), (8, 1, 1), (-1, 4, 0), (1, 2, 1)]
)
def test_world_size(asked, world_size, found):
    plan = read({}, num_processes=asked)
    assert len(find("world-size", plan, world_size=world_size)) == found
    assert find("world-size", {}, world_size=world_size) == []


def test_world_size_names_both_numbers():
    finding = one("world-size", read({}, num_processes=8), world_size=2)
    assert (finding.key, finding.value) == ("launch.num_processes", 8)
    assert "8 processes" in finding.reason
    assert finding.reason.endswith("are for 2")
    assert finding.fix == "start 8 processes, or write 2 for num_processes"
