"""Run cells of a notebook in turn, in one process and one namespace."""

from __future__ import annotations

import builtins
import contextlib
import importlib.machinery
import io
import signal
import sys
from types import ModuleType
from typing import Any


class ZMQInteractiveShell:
    """The class name by which rich detects a kernel."""


class Output:
    """ipywidgets' ``Output``, which keeps its last output."""

    shown: list[Output] = []
    """All open outputs of the page."""

    def __init__(self) -> None:
        self.holds: list[str] = []

    def __enter__(self) -> Output:
        Output.shown.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        Output.shown.pop()

    def clear_output(self, *, wait: bool = False) -> None:  # noqa: ARG002
        self.holds.clear()


displayed: list[Any] = []


def display(*objects: Any) -> None:
    """Display like IPython: in the open output, else in the cell."""
    for each in objects:
        if Output.shown:
            Output.shown[-1].holds.append(_plain(each))
        else:
            displayed.append(each)


def page() -> str:
    """Return everything shown at the moment, as text."""
    return "\n".join(
        "\n".join(each.holds) if isinstance(each, Output) else _plain(each) for each in displayed
    )


def _plain(shown: Any) -> str:
    return shown._repr_mimebundle_(None, None)["text/plain"]


@contextlib.contextmanager
def kernel(*, widgets: bool):
    """Emulate a kernel, with or without ipywidgets."""
    parts = {"IPython": {}, "IPython.display": {"display": display}}
    if widgets:
        parts["ipywidgets"] = {"Output": Output}
    before = {name: sys.modules.get(name) for name in (*parts, "ipywidgets")}
    displayed.clear()
    builtins.get_ipython = ZMQInteractiveShell
    for name, holds in parts.items():
        module = ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        vars(module).update(holds)
        sys.modules[name] = module
    if not widgets:
        sys.modules["ipywidgets"] = None
    # Background processes of a shell start with SIGINT ignored.
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, interrupt)
        del builtins.get_ipython
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


CELLS = (
    """
from tests.support.models import tiny_unet
from tests.training.workers import trainer as new_trainer
from zerotune import EMAShadow, ProgressBar
from zerotune.training import Callback
import os, signal


class Interrupt(Callback):
    times = {3: 1, 5: 2}

    def on_step_end(self, trainer, metrics):
        for _ in range(self.times.get(metrics.step, 0)):
            os.kill(os.getpid(), signal.SIGINT)


model = tiny_unet()
callbacks = [ProgressBar(every=1), Interrupt()]
trainer = new_trainer(model=model, ema=EMAShadow(decay=0.9), callbacks=callbacks)
trainer
""",
    "trainer.fit(steps=2)",
    "trainer.fit(steps=6)  # the stop button is pressed once",
    "trainer.fit(steps=6)  # twice",
    "trainer.fit(steps=6)",
    "new_trainer(model=model)  # the cell above is run again",
    "trainer.close()",
    "again = new_trainer(model=model, callbacks=[ProgressBar(every=1)])\nagain.fit(steps=2)",
    "again.close()",
)


def run_cells() -> list[dict[str, Any]]:
    """Run the cells; return what each shows, returns and raises."""
    scope: dict[str, Any] = {}
    found = []
    with kernel(widgets=False):
        for cell in CELLS:
            found.append(_cell(cell, scope))
    return found


def _cell(cell: str, scope: dict[str, Any]) -> dict[str, Any]:
    *lines, last = cell.strip().splitlines()
    said, error, value = io.StringIO(), "", None
    with contextlib.redirect_stdout(said):
        try:
            exec("\n".join(lines), scope)
            try:
                code = compile(last, "<cell>", "eval")
            except SyntaxError:
                exec(last, scope)
            else:
                value = eval(code, scope)
        except BaseException as failure:  # noqa: BLE001 - a kernel shows whatever it is
            error = f"{type(failure).__name__}: {failure}"
    as_html = getattr(value, "_repr_html_", str)
    return {
        "said": said.getvalue(),
        "error": error,
        "html": "" if value is None else as_html(),
        "losses": list(getattr(value, "losses", ())),
        "stopped": getattr(value, "stopped", None),
    }


def whole_run() -> list[float]:
    """Return the losses of the same run without an interruption."""
    from tests.training.workers import trainer
    from zerotune import EMAShadow

    with trainer(ema=EMAShadow(decay=0.9)) as run:
        return list(run.fit(steps=6).losses)
