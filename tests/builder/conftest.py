"""Clients of a builder with a root and templates of its own, without a browser."""

from __future__ import annotations

import pytest

from tests.support.needs import needs


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "root"
    folder.mkdir()
    return folder


@pytest.fixture
def client_of(root, tmp_path):
    """Return a function that makes a client of a builder with the given settings."""
    needs("httpx")  # starlette's TestClient needs it.
    client = needs("starlette.testclient").TestClient
    create_app = needs("zerotune.builder.app").create_app

    def make(**settings):
        app = create_app(**{"root": root, **settings})
        return client(app, base_url="http://127.0.0.1:8265")

    return make


@pytest.fixture
def client(client_of):
    return client_of()
