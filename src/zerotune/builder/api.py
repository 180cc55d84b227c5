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

from zerotune.builder.advice import advise
from zerotune.builder.forms import (
    FormState,
    as_choice,
    as_mapping,
    as_text,
    from_wire,
    parse_request,
    read_plan,
    to_wire,
)
from zerotune.builder.pages import Pages
from zerotune.builder.preview import message_data, preview_data, understand
from zerotune.builder.repairs import repairs, with_repairs
from zerotune.builder.session import OpenedConfig, Session, open_file, open_text
from zerotune.builder.setup import Machines, describe_machine, read_setup
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
_SEVERITIES = ("error", "warning", "note")
_TEXTS = ("key", "text", "fix", "change")
_STATUSES = ((PlanConflictError, 409), (PlanFileError, 404))


@attrs.frozen(kw_only=True)
class Api:
    """The endpoints under ``/api``."""

    session: Session
    machines: Machines = attrs.field(factory=Machines)
    pages: Pages = attrs.field(factory=Pages)

    def routes(self) -> list[Route]:
        """Return the routes to mount under ``/api``."""
        return [
            _get_route("/start", self._start),
            _post_route("/preview", self._preview),
            _post_route("/advise", self._advise),
            _post_route("/open", self._open),
            _post_route("/apply", self._apply),
            _post_route("/save", self._save),
            _post_route("/templates/use", self._use_template),
        ]

    def _start(self, _: Data) -> Data:
        return self.session.start_data()

    def page(self, prefix: str) -> str:
        """Render the page with the plan that a newly opened page shows."""
        start = self.session.start_data()
        state = FormState.of_request(from_wire(start["state"]))
        state = attrs.evolve(state, setup={**start["setup"], **state.setup})
        data = self._data(state, _messages(start["messages"]))
        return self.pages.page(data, state, prefix=prefix, apply=self.session.can_apply)

    def _data(self, state: FormState, opened: list[Data]) -> Data:
        """Return what the page says of a form; ``opened`` are messages from reading a file."""
        preview = understand(state, self.machines)
        data = preview_data(preview)
        found = repairs(preview, state, self.machines)
        messages = with_repairs(data["messages"], found)
        known = {(one["key"], one["text"]) for one in messages}
        reading = [one for one in opened if (one["key"], one["text"]) not in known]
        machine = describe_machine(self.machines.this) if preview.setup.this_machine else ""
        return {**data, "messages": [*messages, *reading], "machine": machine}

    def _preview(self, payload: Data) -> Data:
        state = _state(payload)
        data = self._data(state, _messages(payload.get("opened")))
        return {**data, "html": self.pages.parts(data, state)}

    def _advise(self, payload: Data) -> Data:
        advice = advise(_state(payload), self.machines)
        return {**advice, "html": self.pages.advice(advice)}

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
        return self.session.save(
            reading.plan,
            path,
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


def _messages(sent: Any) -> list[Data]:
    """Read messages from reading a file, which the page keeps and sends back."""
    every = [as_mapping(one, "opened") for one in (sent if isinstance(sent, list) else ())]
    return [
        {
            "severity": as_choice(one.get("severity"), "severity", choices=_SEVERITIES),
            **{name: as_text(one.get(name, ""), name, longest=1 << 16) for name in _TEXTS},
            "repairs": [],
        }
        for one in every
    ]


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
