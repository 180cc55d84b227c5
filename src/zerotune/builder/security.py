"""ASGI middleware that decides which requests reach the builder.

Any site that the user visits can send requests to a page on ``localhost``: through DNS rebinding
(the ``Host`` is then the attacker's), through forms and ``fetch``, or by framing the page. The
middleware refuses such requests before the application runs.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Collection
from contextlib import suppress
from http.cookies import CookieError, SimpleCookie
from typing import Final
from urllib.parse import parse_qs

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})
LARGEST_BODY: Final = 1 << 20
"""Maximum size of a request in bytes; the largest public configurations are about 10,000 bytes."""
COOKIE: Final = "zerotune_builder"
_PORT: Final = re.compile(r"(?<=.):[0-9]+\Z")

_SAFE_METHODS: Final = frozenset({"GET", "HEAD"})


class Guard:
    """Check the host, origin, token and size of each request."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        hosts: Collection[str] = LOOPBACK,
        token: str | None = None,
    ) -> None:
        self._app = app
        self._hosts = frozenset(host.lower() for host in hosts)
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request, or pass it to the application."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # Web sockets are not supported; returning without an answer refuses them.
        answer = self._refusal(scope) or self._token_answer(scope)
        await (answer or self._app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "").lower()
        name = _PORT.sub("", host)
        if len(headers.getlist("host")) != 1 or name not in self._hosts:
            return _refuse(421, "the builder does not accept this host name")
        origin = headers.get("origin")
        if origin is not None and origin.lower() not in (f"http://{host}", f"https://{host}"):
            return _refuse(403, "requests from other sites are refused")
        if scope["method"] not in _SAFE_METHODS:
            kind = headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                # Another site's form cannot send this type without a CORS preflight.
                return _refuse(415, "send application/json")
            # The server that receives the request enforces the declared size.
            size = headers.get("content-length", "")
            if not size.isdecimal() or int(size[:18]) > LARGEST_BODY:
                return _refuse(413, f"a request may contain {LARGEST_BODY} bytes at most")
        return None

    def _token_answer(self, scope: Scope) -> Response | None:
        """Return a refusal, or a redirect that moves the token from the address into a cookie."""
        if self._token is None:
            return None
        headers = Headers(scope=scope)
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._is_token(given.strip()):
            return None
        with suppress(CookieError):
            cookie = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
            if cookie is not None and self._is_token(cookie.value):
                return None
        asked = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        if scope["method"] in _SAFE_METHODS and self._is_token(*asked.get("token", [])[:1]):
            # The redirect removes the token from the address bar, the history and the logs.
            # Keep one leading slash, because two would name another host.
            here = "/" + scope["path"].lstrip("/")
            answer = RedirectResponse(here, status_code=303)
            answer.set_cookie(
                COOKIE,
                self._token,
                httponly=True,
                samesite="strict",
                secure=scope.get("scheme") == "https",
                path=scope.get("root_path") or "/",
            )
            return answer
        return _refuse(
            401, "open the complete address that the command printed, including the token"
        )

    def _is_token(self, given: str = "") -> bool:
        token = self._token or ""
        return bool(given) and hmac.compare_digest(given.encode(), token.encode())


def _refuse(status: int, reason: str) -> Response:
    return JSONResponse({"error": reason}, status_code=status)
