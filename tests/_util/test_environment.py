from __future__ import annotations

import pytest

from zerotune._util.proc import installed_version, installed_versions
from zerotune._util.text import release_of


@pytest.mark.parametrize(
    ("version", "release"),
    [("0.19.8+cpu", (0, 19, 8)), ("2.6.0rc1", (2, 6, 0)), ("", ()), ("unknown", ())],
)
def test_a_release_is_parsed_from_a_version(version, release):
    assert release_of(version) == release


def test_a_package_that_is_not_installed_has_no_version():
    assert installed_version("no-such-distribution") is None
    assert set(installed_versions(["attrs", "no-such-distribution"])) == {"attrs"}
