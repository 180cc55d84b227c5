from __future__ import annotations

import pytest

from tests.plan.rulebook.findings import find, read


@pytest.mark.parametrize(
    ("asked", "world_size", "found"), [(8, 8, 0), (8, 1, 1), (-1, 4, 0), (1, 2, 1)]
)
def test_world_size(asked, world_size, found):
    plan = read({}, num_processes=asked)
    assert len(find("world-size", plan, world_size=world_size)) == found
    assert find("world-size", {}, world_size=world_size) == []
