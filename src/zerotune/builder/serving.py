"""Serving the builder to one user's browser."""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
import sys
import threading
import webbrowser
from pathlib import Path
from typing import Final

from zerotune.errors import InvalidValueError, MissingDependencyError

TOKEN_VARIABLE: Final = "ZEROTUNE_BUILDER_TOKEN"  # noqa: S105 - the name of a variable
_LOOPBACK_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1"})


def serve(
    *,
    host: str,
    port: int,
    plan_file: Path | None,
    root: Path | None,
    token: str | None,
    open_browser: bool,
) -> None:
    """Serve the builder until interrupted.

    Another host than loopback always gets a token; one is made when none is given. An address
    with a token is only printed: every user of the machine can read a browser's command line.
    """
    try:
        import uvicorn
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            "the builder needs the package uvicorn",
            key="zerotune.builder",
            fix="pip install 'zerotune[builder]'",
        ) from error
    import zerotune.builder as package
    from zerotune.builder.connections import PatientProtocol
    from zerotune.builder.security import LOOPBACK

    if not is_loopback(host) and not token:
        token = secrets.token_urlsafe(24)
    if plan_file is not None and root is None:
        root = plan_file.resolve().parent
    app = package.create_app(
        plan_file=plan_file, root=root, token=token, hosts={*LOOPBACK, *host_names(host)}
    )
    listening = _bound(host, port)
    address = page_address(host, listening.getsockname()[1], token)
    sys.stdout.write(f"The builder is at {address}\nStop it with Ctrl-C.\n")
    sys.stdout.flush()
    if open_browser and not token:
        threading.Timer(0.5, webbrowser.open, (address,)).start()
    config = uvicorn.Config(
        app, http=PatientProtocol, log_level="warning", access_log=False, server_header=False
    )
    try:
        uvicorn.Server(config).run(sockets=[listening])
    finally:
        listening.close()


def read_token(*, given: str | None, file: Path | None) -> str | None:
    """The token: the one given, that in a file, else ``ZEROTUNE_BUILDER_TOKEN``."""
    if given is not None:
        return given
    if file is None:
        return os.environ.get(TOKEN_VARIABLE) or None
    try:
        token = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidValueError(
            f"the token cannot be read from it ({reason})",
            key="--token-file",
            value=str(file),
            fix="name a file that holds the token and nothing else",
        ) from error
    if not token:
        raise InvalidValueError(
            "holds no token", key="--token-file", value=str(file), fix="write one into it"
        )
    return token


def is_loopback(host: str) -> bool:
    """Whether an address can only be reached from this machine."""
    if host.lower() in _LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def host_names(host: str) -> set[str]:
    """Names under which a browser may ask for an address we listen on."""
    names = {f"[{host}]" if ":" in host else host}
    if host in {"0.0.0.0", "::"}:  # noqa: S104 - only compared with
        own = socket.gethostname()
        names |= {own, socket.getfqdn(), *_own_addresses(own)}
    return {name.lower() for name in names}


def page_address(host: str, port: int, token: str | None) -> str:
    """What to open in a browser."""
    shown = "127.0.0.1" if host in {"0.0.0.0", "::"} else host  # noqa: S104 - only compared with
    shown = f"[{shown}]" if ":" in shown else shown
    return f"http://{shown}:{port}/" + (f"?token={token}" if token else "")


def _own_addresses(name: str) -> set[str]:
    try:
        found = socket.getaddrinfo(name, None)
    except OSError:
        return set()
    addresses = {str(entry[4][0]) for entry in found}
    return {f"[{address}]" if ":" in address else address for address in addresses}


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen()  # Who reads the address may come before the server accepts.
    except (OSError, OverflowError) as error:
        listening.close()
        raise InvalidValueError(
            f"cannot be listened on ({error})",
            key="--port",
            value=f"{host}:{port}",
            fix="give another --port; 0 takes a free one",
        ) from error
    return listening
