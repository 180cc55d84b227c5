"""``zerotune builder``: its output, its refusals, and that it really serves."""

from __future__ import annotations

import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.support.needs import needs
from zerotune.cli import main


def test_a_port_in_use_is_reported(capsys):
    needs("uvicorn")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["builder", "--no-browser", "--port", port]) == 2
    assert "--port" in capsys.readouterr().err


def test_a_plan_outside_the_root_is_refused(tmp_path, capsys):
    needs("uvicorn")
    (tmp_path / "root").mkdir()
    plan = str(tmp_path / "plan.json")
    arguments = ["--plan", plan, "--root", str(tmp_path / "root"), "--port", "0", "--no-browser"]
    assert main(["builder", *arguments]) == 2
    assert "outside" in capsys.readouterr().err


SERVERS = tuple(
    f"zerotune.builder.{name}" for name in ("api", "app", "pages", "security", "serving")
)


@pytest.mark.parametrize("missing", ["starlette", "jinja2", "uvicorn"])
def test_a_missing_extra_is_named(missing, monkeypatch, capsys):
    for name in list(sys.modules):
        if name == missing or name.startswith(f"{missing}.") or name in SERVERS:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    # Without the error, the builder would serve for ever.
    monkeypatch.setattr("socket.socket.listen", None)
    assert main(["builder", "--no-browser", "--port", "0"]) == 2
    assert "zerotune[builder]" in capsys.readouterr().err


def test_the_builder_serves_and_a_public_host_requires_a_token(tmp_path):
    httpx = needs("httpx")
    command = [sys.executable, "-m", "zerotune", "builder", "--no-browser", "--port", "0"]
    process = subprocess.Popen(
        [*command, "--host", "0.0.0.0"], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    try:
        address = process.stdout.readline().split()[-1]
        assert "?token=" in address
        bare = address.partition("?")[0]
        with httpx.Client(timeout=120) as client:
            assert client.get(bare).status_code == 401
            assert client.get(address, follow_redirects=True).status_code == 200
            assert client.get(f"{bare}api/start").json()["can_apply"] is False
    finally:
        process.terminate()
        process.wait(20)
        process.stdout.close()


@pytest.mark.parametrize("token", ["", "s3cret"])
def test_no_token_appears_on_a_command_line(token, tmp_path, monkeypatch, capsys):
    uvicorn = needs("uvicorn")
    from zerotune.builder import serving

    opened, served = [], []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(serving.webbrowser, "open", opened.append)
    # The timer waits in a thread that would outlive the test.
    monkeypatch.setattr(
        serving.threading,
        "Timer",
        lambda _, call, given: SimpleNamespace(start=lambda: call(*given)),
    )
    monkeypatch.setattr(uvicorn.Server, "run", lambda server, **_: served.append(server.config))
    monkeypatch.setenv("ZEROTUNE_BUILDER_TOKEN", token)
    assert main(["builder", "--port", "0"]) == 0
    address = capsys.readouterr().out.split()[4]
    assert address.endswith("?token=s3cret" if token else "/")
    assert opened == ([] if token else [address])
    assert len(served) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--host", "999.1.1.1"), "error: --host = '999.1.1.1': is not an address of this machine"),
        (("--plan", "{folder}"), "error: --plan = '{folder}': is a folder."),
        (("--root", "{folder}/none"), "error: --root = '{folder}/none': is not a folder."),
    ],
)
def test_an_invalid_option_is_named_before_serving_starts(tmp_path, capsys, options, message):
    given = [each.format(folder=tmp_path) for each in options]
    assert main(["builder", "--no-browser", "--port", "0", *given]) == 2
    assert capsys.readouterr().err.startswith(message.format(folder=tmp_path))
