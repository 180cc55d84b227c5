"""Serve the builder to one user's browser."""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
import sys
import threading
import webbrowser
from contextlib import suppress
from pathlib import Path
from typing import Final

import uvicorn

from zerotune.builder.app import create_app
from zerotune.builder.security import LOOPBACK
from zerotune.errors import InvalidValueError

TOKEN_VARIABLE: Final = "ZEROTUNE_BUILDER_TOKEN"  # noqa: S105 - the name of a variable


def serve(
    *,
    host: str,
    port: int,
    plan_file: Path | None,
    root: Path | None,
    open_browser: bool,
) -> None:
    """Serve the builder until interrupted.

    A host other than loopback requires a token; if the environment variable
    ``ZEROTUNE_BUILDER_TOKEN`` has none, one is created. An address with a token is printed but not
    opened, because every user of the machine can read the browser's command line.
    """
    token = os.environ.get(TOKEN_VARIABLE)
    _check_paths(plan_file, root)
    if not is_loopback(host) and not token:
        token = secrets.token_urlsafe(24)
    if plan_file is not None and root is None:
        root = plan_file.resolve().parent
    app = create_app(
        plan_file=plan_file, root=root, token=token, hosts={*LOOPBACK, *host_names(host)}
    )
    listening = open_socket(host, port)
    address = page_address(host, listening.getsockname()[1], token)
    sys.stdout.write(f"The builder is at {address}\nStop it with Ctrl-C.\n")
    sys.stdout.flush()
    if open_browser and not token:
        threading.Timer(0.5, webbrowser.open, (address,)).start()
    config = uvicorn.Config(app, log_level="warning", access_log=False, server_header=False)
    try:
        uvicorn.Server(config).run(sockets=[listening])
    finally:
        listening.close()


def _check_paths(plan_file: Path | None, root: Path | None) -> None:
    """Raise an error if the plan is a folder or the root is not a folder."""
    if plan_file is not None and plan_file.is_dir():
        raise InvalidValueError("is a folder", "pass the path of a file", "--plan", str(plan_file))
    if root is not None and not root.is_dir():
        raise InvalidValueError("is not a folder", "pass an existing folder", "--root", str(root))


def is_loopback(host: str) -> bool:
    """Return whether an address can be reached only from this machine."""
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def host_names(host: str) -> set[str]:
    """Return the names by which a browser may address the server."""
    names = {f"[{host}]" if ":" in host else host}
    if host in {"0.0.0.0", "::"}:  # noqa: S104 - only compared with
        own = socket.gethostname()
        names |= {own, socket.getfqdn()}
        with suppress(OSError):
            addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(own, None)}
            names |= {f"[{one}]" if ":" in one else one for one in addresses}
    return {name.lower() for name in names}


def page_address(host: str, port: int, token: str | None) -> str:
    """Return the address at which a browser can open the page."""
    shown = "127.0.0.1" if host in {"0.0.0.0", "::"} else host  # noqa: S104 - only compared with
    shown = f"[{shown}]" if ":" in shown else shown
    return f"http://{shown}:{port}/" + (f"?token={token}" if token else "")


def open_socket(host: str, port: int) -> socket.socket:
    """Open a listening socket, so that the printed address accepts connections at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen()
    except socket.gaierror as error:
        listening.close()
        raise InvalidValueError(
            f"is not an address of this machine ({error.strerror})",
            "pass an address of this machine, such as 127.0.0.1 or 0.0.0.0",
            "--host",
            host,
        ) from error
    except (OSError, OverflowError) as error:
        listening.close()
        raise InvalidValueError(
            f"is an address that the server cannot listen on ({error})",
            "choose another --port; 0 selects a free one",
            "--port",
            f"{host}:{port}",
        ) from error
    return listening
