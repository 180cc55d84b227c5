"""Create the builder as an ASGI application, standalone or mounted in a trainer."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from zerotune.builder.api import Api
from zerotune.builder.security import LOOPBACK, Guard
from zerotune.builder.session import Root, Session
from zerotune.plan import DeepSpeedPlan

_STATIC: Final = Path(__file__).parent / "static"


def create_app(
    *,
    plan: DeepSpeedPlan | None = None,
    plan_file: str | os.PathLike[str] | None = None,
    root: str | os.PathLike[str] | None = None,
    on_apply: Callable[[DeepSpeedPlan], object] | None = None,
    token: str | None = None,
    hosts: Collection[str] = LOOPBACK,
) -> ASGIApp:
    """Create the config builder, an ASGI application.

    Another application can mount the builder under a prefix:
    ``Mount("/builder", create_app(on_apply=use_plan))``.

    Args:
        plan: Plan that the form shows at first; by default ZeRO-2 with CPU offload, bf16 and AdamW.
        plan_file: File that *Apply* writes and that every newly opened page reads.
        root: The only folder that the page may access; by default the working directory.
        on_apply: Function that is called with the plan, in a worker thread, when the user clicks
            *Apply*. If it returns a string, the page shows that string.
        token: Secret that every request must send as a bearer token or as a cookie. Opening the
            page with ``?token=`` sets the cookie.
        hosts: Host names, without ports, that the builder accepts in ``Host`` headers. Add the name
            of your server.

    Raises:
        InvalidValueError: ``plan_file`` lies outside ``root``.
    """
    session = Session(
        root=Root(folder=Path(root or ".").resolve()),
        plan=plan,
        plan_file=None if plan_file is None else Path(plan_file),
        on_apply=on_apply,
    )
    api = Api(session=session)

    async def index(request: Request) -> Response:
        prefix = request.scope.get("root_path", "").rstrip("/")
        return HTMLResponse(await run_in_threadpool(api.page, prefix))

    app = Starlette(
        routes=[
            Route("/", index, methods=["GET"]),
            Mount("/api", routes=api.routes()),
            Mount("/static", StaticFiles(directory=_STATIC)),
        ]
    )
    return Guard(app, hosts=hosts, token=token)
