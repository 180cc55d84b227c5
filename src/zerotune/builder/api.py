"""What the page asks the server: JSON in, JSON out, nothing but the plan's own answers."""

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
from zerotune.builder.fields import catalogue, schema_data
from zerotune.builder.forms import (
    FormState,
    as_choice,
    as_mapping,
    as_text,
    parse_request,
    read_plan,
    to_wire,
)
from zerotune.builder.preview import (
    Machines,
    advise,
    capabilities,
    message_data,
    preview_data,
    read_setup,
    understand,
)
from zerotune.builder.repairs import repairs, with_repairs
from zerotune.builder.session import Opened, Session, open_file, open_text
from zerotune.builder.templates import (
    BUILTIN,
    Template,
    TemplateStore,
    builtin_template,
    read_template,
    starting_state,
)
from zerotune.errors import (
    InvalidValueError,
    PlanConflictError,
    PlanFileError,
    PlanSyntaxError,
    ZeroTuneError,
)
from zerotune.plan.model import OFFLOAD_DEVICES, PRECISIONS

logger = logging.getLogger("zerotune")

Data = dict[str, Any]
_STATUSES = ((PlanConflictError, 409), (PlanFileError, 404))


@attrs.frozen(kw_only=True)
class Api:
    """The endpoints under ``/api``."""

    session: Session
    templates: TemplateStore
    machines: Machines = attrs.field(factory=Machines)

    def routes(self) -> list[Route]:
        """The routes, to be mounted under ``/api``."""
        return [
            _reading("/start", self._start),
            _reading("/catalogue", lambda _: catalogue()),
            _reading("/schema", lambda _: schema_data()),
            _reading("/machine", self._machine),
            _reading("/optimizers", self._optimizers),
            _reading("/path", self._path),
            _writing("/preview", self._preview),
            _writing("/advise", lambda sent: advise(_state(sent), self.machines)),
            _writing("/open", self._open),
            _writing("/apply", self._apply),
            _writing("/save", self._save),
            _reading("/templates", self._list_templates),
            _writing("/templates/use", self._use_template),
            _writing("/templates/save", self._save_template),
            _writing("/templates/rename", self._rename_template),
            _writing("/templates/delete", self._delete_template),
            _writing("/templates/import", self._import_template),
        ]

    def _start(self, _: Data) -> Data:
        return self.session.opening()

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

    def _optimizers(self, asked: Data) -> Data:
        setup, _ = read_setup({"this_machine": asked.get("machine") == "this"})

        def choice(name: str, default: str, choices: tuple[str, ...]) -> str:
            return as_choice(asked.get(name, default), name, choices=choices)

        found = capabilities(
            self.machines.of(setup),
            stage=int(choice("stage", "2", ("0", "1", "2", "3"))),
            offload=choice("offload", "none", OFFLOAD_DEVICES),
            precision=choice("precision", "bf16", PRECISIONS),
        )
        return {"optimizers": found}

    def _path(self, asked: Data) -> Data:
        return attrs.asdict(self.session.root.facts(asked.get("path")))

    def _preview(self, sent: Data) -> Data:
        state = _state(sent)
        preview = understand(state, self.machines)
        data = preview_data(preview, applied=self.session.applied)
        found = repairs(preview, state, self.machines)
        return {**data, "messages": with_repairs(data["messages"], found)}

    def _open(self, sent: Data) -> Data:
        if "path" in sent:
            return _opened_data(open_file(sent["path"], self.session.root))
        text = as_text(sent.get("text"), "text", longest=1 << 20)
        name = as_text(sent.get("name") or "the text", "name", longest=255)
        return _opened_data(open_text(text, name=name, root=self.session.root))

    def _apply(self, sent: Data) -> Data:
        preview = understand(_state(sent), self.machines)
        if preview.plan is None or not preview.verdict.runs:
            worst = preview.messages[0]
            raise PlanConflictError(
                f"the plan cannot run: {worst.reason}",
                key=worst.key or "plan",
                fix=worst.fix or None,
            )
        try:
            return self.session.apply(
                preview.plan,
                like=preview.written,
                version=_version(sent),
                processes=preview.setup.world_size,
            )
        except ZeroTuneError:
            raise
        except Exception as error:
            # The callback is the host's; its failure must reach the page, whatever it is.
            logger.exception("the trainer's apply callback failed")
            raise _CallbackError(error) from error

    def _save(self, sent: Data) -> Data:
        state = _state(sent)
        reading = read_plan(state)
        if reading.plan is None:
            raise reading.errors[0]
        path = self.session.root.inside(sent.get("path"), key="path")
        format_ = sent.get("format")
        return self.session.save(
            reading.plan,
            path,
            like=state.config,
            format_=None if format_ is None else as_text(format_, "format", longest=20),
            version=_version(sent),
            processes=read_setup(state.setup)[0].world_size,
        )

    def _list_templates(self, _: Data) -> Data:
        return {
            "builtin": [
                {name: getattr(one, name) for name in ("id", "name", "description", "group")}
                for one in BUILTIN
            ],
            "own": [_template_data(one) for one in self.templates.all()],
            "folder": str(self.templates.folder),
        }

    def _use_template(self, sent: Data) -> Data:
        if "name" in sent:
            template = self.templates.get(sent["name"])
            return {"state": template.state.data(), "template": _template_data(template)}
        found = builtin_template(as_text(sent.get("id"), "id", longest=60))
        around = as_mapping(sent.get("setup"), "setup")
        advice = advise(starting_state(found, around), self.machines)
        if not advice["fits"]:
            return {"state": None, **advice}
        chosen = advice["chosen"]
        return {"state": chosen["state"], "title": chosen["title"], "reason": chosen["reason"]}

    def _save_template(self, sent: Data) -> Data:
        template = Template(
            name=as_text(sent.get("name"), "name", longest=255),
            description=as_text(sent.get("description") or "", "description", longest=500),
            state=_state(sent),
        )
        return _template_data(self.templates.put(template, version=_version(sent)))

    def _rename_template(self, sent: Data) -> Data:
        return _template_data(
            self.templates.rename(sent.get("name"), sent.get("to"), version=_version(sent))
        )

    def _delete_template(self, sent: Data) -> Data:
        self.templates.delete(sent.get("name"), version=_version(sent))
        return {"deleted": sent.get("name")}

    def _import_template(self, sent: Data) -> Data:
        text = as_text(sent.get("text"), "text", longest=1 << 20)
        template = read_template(text, name="the file")
        return _template_data(self.templates.put(template, version=None))


class _CallbackError(Exception):
    """The trainer that mounted the builder could not apply a plan."""


def _state(sent: Data) -> FormState:
    return FormState.of_request(sent.get("state"))


def _version(sent: Data) -> str | None:
    version = sent.get("version")
    return None if version is None else as_text(version, "version", longest=64)


def _opened_data(opened: Opened) -> Data:
    return {
        "state": opened.state.data(),
        "messages": [message_data(one) for one in opened.messages],
        "source": opened.source,
    }


def _template_data(template: Template) -> Data:
    return {**template.data(), "version": template.version}


def _reading(path: str, answer: Callable[[Data], Any]) -> Route:
    async def endpoint(request: Request) -> Response:
        return await _answered(answer, dict(request.query_params))

    return Route(path, endpoint, methods=["GET"])


def _writing(path: str, answer: Callable[[Data], Any]) -> Route:
    async def endpoint(request: Request) -> Response:
        body = await request.body()
        try:
            sent = as_mapping(parse_request(body.decode("utf-8")), "request")
        except UnicodeDecodeError:
            return _error(400, InvalidValueError("is not UTF-8", key="request"))
        except ZeroTuneError as error:
            return _error(400, error)
        return await _answered(answer, sent)

    return Route(path, endpoint, methods=["POST"])


async def _answered(answer: Callable[[Data], Any], sent: Data) -> Response:
    """Run an endpoint in a worker thread: detecting, importing and fsync all take their time."""
    try:
        data = await run_in_threadpool(answer, sent)
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
