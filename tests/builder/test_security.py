"""Which requests are answered and which are refused."""

from __future__ import annotations

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

from zerotune.builder import create_app
from zerotune.builder.serving import host_names, is_loopback, page_address

JSON = {"content-type": "application/json"}


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8265", "[::1]:8265", "LOCALHOST:1"])
def test_requests_to_loopback_names_are_answered(client, host):
    assert client.get("/", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:8265", "", "[::2]"]
)
def test_requests_to_other_host_names_are_refused_to_prevent_dns_rebinding(client, host):
    assert client.get("/", headers={"host": host}).status_code == 421
    assert client.get("/api/start", headers={"host": host}).status_code == 421


@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "null", "http://127.0.0.1:9999", "http://localhost:8265", "file://", "http://["],
)  # fmt: skip
def test_requests_from_other_origins_are_refused(client, origin):
    answer = client.post("/api/preview", json={}, headers={"origin": origin})
    assert answer.status_code == 403


def test_requests_from_our_own_origin_are_answered(client):
    headers = {"origin": "http://127.0.0.1:8265", "sec-fetch-site": "same-origin"}
    assert client.post("/api/preview", json={}, headers=headers).status_code == 200


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""]
)
def test_content_types_that_a_form_of_another_site_can_send_are_refused(client, kind):
    answer = client.post("/api/apply", content=b"{}", headers={"content-type": kind})
    assert answer.status_code == 415


def test_the_page_loads_nothing_from_other_hosts(client):
    page = client.get("/").text
    assert "default-src 'none'; script-src 'self'" in page
    addresses = page.replace("http://www.w3.org/2000/svg", "")
    assert "http://" not in addresses
    assert "https://" not in addresses
    assert "<script>" not in page
    assert " style=" not in page
    assert " onclick=" not in page


class TestToken:
    def test_every_request_without_the_token_is_refused(self, client_of):
        client = client_of(token="s3cret")
        for path in ("/", "/api/start", "/static/main.js"):
            assert client.get(path).status_code == 401
        assert client.post("/api/preview", json={}).status_code == 401
        assert client.get("/?token=s3cre").status_code == 401
        assert client.get("/", headers={"cookie": "zerotune_builder=other"}).status_code == 401

    def test_a_token_in_the_address_becomes_a_cookie(self, client_of):
        client = client_of(token="s3cret")
        answer = client.get("/?token=s3cret", follow_redirects=False)
        assert answer.status_code == 303
        assert answer.headers["location"] == "/"
        cookie = answer.headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=strict" in cookie
        assert client.get("/api/start").status_code == 200

    def test_the_redirect_stays_on_this_host(self, client_of):
        client = client_of(token="s3cret")
        answer = client.get(
            "http://127.0.0.1:8265//evil.example/?token=s3cret", follow_redirects=False
        )
        assert not answer.headers.get("location", "/").startswith("//")

    def test_a_bearer_token_is_accepted(self, client_of):
        client = client_of(token="s3cret")
        headers = {"authorization": "Bearer s3cret"}
        assert client.post("/api/preview", json={}, headers=headers).status_code == 200


class TestSize:
    def test_a_large_body_is_refused(self, client_of):
        client = client_of()
        answer = client.post("/api/preview", content=b" " * (2**20 + 1), headers=JSON)
        assert answer.status_code == 413

    def test_a_large_body_without_a_declared_size_is_refused(self, client_of):
        client = client_of()
        parts = (b" " * 2**18 for _ in range(5))
        assert client.post("/api/preview", content=parts, headers=JSON).status_code == 413

    @pytest.mark.parametrize("depth", [30, 2000, 100_000])
    def test_deep_nesting_is_refused(self, client, depth):
        body = b"[" * depth + b"]" * depth
        assert client.post("/api/preview", content=body, headers=JSON).status_code == 400

    @pytest.mark.parametrize(
        "body",
        [b"\xff", b"{", b"[]", b"1", b'{"state": NaN}', b'{"a": 1e999}', b'{"a": "\\ud800"}'],
    )
    def test_a_request_that_is_not_an_object_is_refused(self, client, body):
        answer = client.post("/api/preview", content=body, headers=JSON)
        assert answer.status_code == 400
        assert "request" in answer.json()["error"]

    def test_a_yaml_with_exponentially_nested_aliases_is_refused(self, client):
        lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
        lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
        answer = client.post("/api/open", json={"text": "\n".join(lines), "name": "a.yaml"})
        assert answer.status_code == 422
        assert "too large" in answer.json()["error"]


class TestPaths:
    OUTSIDE = ("/etc/passwd", "../secret", "a/../../secret", "~/secret", "\0", "", "link/secret")

    @pytest.fixture(autouse=True)
    def link(self, root, tmp_path):
        (tmp_path / "secret").mkdir()
        (tmp_path / "secret" / "secret").write_text("{}")
        (root / "link").symlink_to(tmp_path / "secret")

    @pytest.mark.parametrize("path", OUTSIDE)
    def test_no_path_outside_the_root_is_opened_or_written(self, client, path, tmp_path):
        assert client.post("/api/open", json={"path": path}).status_code == 422
        state = {"config": {"train_batch_size": 1}}
        answer = client.post("/api/save", json={"path": path, "state": state})
        assert answer.status_code == 422
        assert (tmp_path / "secret" / "secret").read_text() == "{}"

    @pytest.mark.parametrize(
        "text",
        [
            '{"deepspeed_config": "/etc/hostname"}',
            '{"--deepspeed_config": "../secret/secret"}',
            '{"deepspeed_config": {"deepspeed_config": "/etc/hostname"}}',
            "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: /etc/hostname}",
        ],
    )
    def test_a_configuration_cannot_name_a_file_outside_the_root(self, client, text):
        answer = client.post("/api/open", json={"text": text})
        assert answer.status_code == 422
        assert "outside" in answer.json()["error"]

    def test_a_form_cannot_name_a_file_at_all(self, client, root):
        (root / "inner.json").write_text('{"train_batch_size": 8}')
        state = {"config": {"deepspeed_config": str(root / "inner.json")}}
        found = client.post("/api/preview", json={"state": state}).json()
        assert found["valid"] is False


def test_static_paths_cannot_leave_their_folder(client):
    for path in ("/static/../app.py", "/static/%2e%2e/app.py", "/static/..%2fapp.py"):
        assert client.get(path).status_code == 404


def test_a_builder_mounted_under_a_prefix_finds_its_own_files(root):
    inner = create_app(root=root, hosts={"trainer.example"})
    client = TestClient(
        Starlette(routes=[Mount("/tools/builder", inner)]), base_url="http://trainer.example"
    )
    page = client.get("/tools/builder/").text
    assert 'src="/tools/builder/static/main.js"' in page
    assert client.get("/tools/builder/static/main.js").status_code == 200
    assert client.get("/tools/builder/api/start").json()["can_apply"] is False


def test_only_loopback_needs_no_token():
    assert all(map(is_loopback, ("127.0.0.1", "localhost", "::1", "127.8.8.8")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.168.1.4", "example.com")))
    assert page_address("::1", 80, None) == "http://[::1]:80/"
    assert page_address("0.0.0.0", 80, "t") == "http://127.0.0.1:80/?token=t"
    assert host_names("192.168.1.4") == {"192.168.1.4"}
