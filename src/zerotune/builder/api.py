"""JSON endpoints that the page calls; every answer is computed from the plan."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import attrs
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from zerotune._util.text import format_size
from zerotune.builder.fields import catalogue
from zerotune.builder.forms import (
    FormState,
    as_mapping,
    as_text,
    parse_request,
    read_plan,
    to_wire,
)
from zerotune.builder.preview import (
    Machines,
    advise,
    message_data,
    preview_data,
    read_setup,
    understand,
)
from zerotune.builder.repairs import repairs, with_repairs
from zerotune.builder.session import OpenedConfig, Session, open_file, open_text
from zerotune.builder.templates import builtin_template, starting_state
from zerotune.errors import (
    InvalidValueError,
    PlanConflictError,
    PlanFileError,
    PlanSyntaxError,
    ZeroTuneError,
)

logger = logging.getLogger("zerotune")

Data = dict[str, Any]
_STATUSES = ((PlanConflictError, 409), (PlanFileError, 404))


@attrs.frozen(kw_only=True)
class Api:
    """The endpoints under ``/api``."""

    session: Session
    machines: Machines = attrs.field(factory=Machines)

    def routes(self) -> list[Route]:
        """Return the routes to mount under ``/api``."""
        return [
            _get_route("/start", self._start),
            _get_route("/catalogue", lambda _: catalogue()),
            _get_route("/machine", self._machine),
            _post_route("/preview", self._preview),
            _post_route("/advise", lambda payload: advise(_state(payload), self.machines)),
            _post_route("/open", self._open),
            _post_route("/apply", self._apply),
            _post_route("/save", self._save),
            _post_route("/templates/use", self._use_template),
        ]

    def _start(self, _: Data) -> Data:
        return self.session.start_data()

    def _machine(self, _: Data) -> Data:
        machine = self.machines.this
        names = [f"{device.name}, {format_size(device.total_memory)}" for device in machine.devices]
        return {
            "accelerator": machine.accelerator,
            "devices": names,
            "ram": format_size(machine.host_memory.limit),
            "deepspeed": machine.deepspeed.reason,
            "versions": dict(machine.versions),
        }

    def _preview(self, payload: Data) -> Data:
        state = _state(payload)
        preview = understand(state, self.machines)
        data = preview_data(preview, applied=self.session.applied)
        found = repairs(preview, state, self.machines)
        return {**data, "messages": with_repairs(data["messages"], found)}

    def _open(self, payload: Data) -> Data:
        if "path" in payload:
            return _config_data(open_file(payload["path"], self.session.root))
        text = as_text(payload.get("text"), "text", longest=1 << 20)
        name = as_text(payload.get("name") or "the text", "name", longest=255)
        return _config_data(open_text(text, name=name, root=self.session.root))

    def _apply(self, payload: Data) -> Data:
        preview = understand(_state(payload), self.machines)
        if preview.plan is None or not preview.verdict.runs:
            worst = preview.messages[0]
            raise PlanConflictError(
                f"the plan cannot run: {worst.reason}", worst.fix or None, worst.key or "plan"
            )
        try:
            return self.session.apply(
                preview.plan,
                like=preview.form_config,
                version=_version(payload),
                processes=preview.setup.world_size,
            )
        except ZeroTuneError:
            raise
        except Exception as error:
            # The trainer's callback may raise anything; the page must show the failure.
            logger.exception("the trainer's apply callback failed")
            raise _CallbackError(error) from error

    def _save(self, payload: Data) -> Data:
        state = _state(payload)
        reading = read_plan(state)
        if reading.plan is None:
            raise reading.errors[0]
        path = self.session.root.inside(payload.get("path"), key="path")
        format_ = payload.get("format")
        return self.session.save(
            reading.plan,
            path,
            like=state.config,
            format_=None if format_ is None else as_text(format_, "format", longest=20),
            version=_version(payload),
            processes=read_setup(state.setup)[0].world_size,
        )

    def _use_template(self, payload: Data) -> Data:
        found = builtin_template(as_text(payload.get("id"), "id", longest=60))
        around = as_mapping(payload.get("setup"), "setup")
        advice = advise(starting_state(found, around), self.machines)
        if not advice["fits"]:
            return {"state": None, **advice}
        chosen = advice["chosen"]
        return {"state": chosen["state"], "title": chosen["title"], "reason": chosen["reason"]}


class _CallbackError(Exception):
    """The trainer that mounted the builder could not apply a plan."""


def _state(payload: Data) -> FormState:
    return FormState.of_request(payload.get("state"))


def _version(payload: Data) -> str | None:
    version = payload.get("version")
    return None if version is None else as_text(version, "version", longest=64)


def _config_data(opened: OpenedConfig) -> Data:
    return {
        "state": opened.state.data(),
        "messages": [message_data(one) for one in opened.messages],
        "source": opened.source,
    }


def _get_route(path: str, answer: Callable[[Data], Any]) -> Route:
    async def endpoint(request: Request) -> Response:
        return await _respond(answer, dict(request.query_params))

    return Route(path, endpoint, methods=["GET"])


def _post_route(path: str, answer: Callable[[Data], Any]) -> Route:
    async def endpoint(request: Request) -> Response:
        body = await request.body()
        try:
            payload = as_mapping(parse_request(body.decode("utf-8")), "request")
        except UnicodeDecodeError:
            return _error(400, InvalidValueError("is not UTF-8", key="request"))
        except ZeroTuneError as error:
            return _error(400, error)
        return await _respond(answer, payload)

    return Route(path, endpoint, methods=["POST"])


async def _respond(answer: Callable[[Data], Any], payload: Data) -> Response:
    """Run an endpoint in a worker thread, because detection, imports and fsync block."""
    try:
        data = await run_in_threadpool(answer, payload)
    except ZeroTuneError as error:
        status = next((status for kind, status in _STATUSES if isinstance(error, kind)), 422)
        return _error(status, error)
    except _CallbackError as error:
        return JSONResponse(
            {"error": f"The trainer could not apply the plan: {error}"}, status_code=502
        )
    except (OverflowError, RecursionError):
        return _error(400, InvalidValueError("contains a number that is too large", key="request"))
    return JSONResponse(to_wire(data), headers={"cache-control": "no-store"})


def _error(status: int, error: ZeroTuneError) -> Response:
    data: Data = {
        "error": str(error),
        "key": error.key,
        "reason": error.reason,
        "fix": error.fix,
        "kind": type(error).__name__,
    }
    if isinstance(error, PlanSyntaxError):
        data |= {"line": error.line, "column": error.column}
    return JSONResponse(to_wire(data), status_code=status, headers={"cache-control": "no-store"})
