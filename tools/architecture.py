"""How many files and calls a reader follows from a question to its answer.

Prints, for the package as it is installed, the size of its source and, for each journey, the files
of the package that are entered, the calls of its functions, how often a call goes to another file,
and all Python calls, those of libraries included::

    python -m benchmarks.journeys
    python -m benchmarks.journeys --files    # and which files they are
"""

from __future__ import annotations

import argparse
import ast
import io
import os
import sys
import tempfile
import threading
import tokenize
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from types import FrameType
from typing import Any, Final

import attrs

import zerotune

PACKAGE: Final = Path(zerotune.__file__).parent
GIB: Final = 1 << 30


@attrs.frozen(kw_only=True)
class Size:
    """How much source there is."""

    files: int
    lines: int
    """Lines that hold anything at all."""
    code: int
    docstrings: int
    comments: int


@attrs.define(kw_only=True)
class Journey:
    """What was entered between a question and its answer."""

    files: list[str] = attrs.field(factory=list)
    """Files of the package, in the order they were first entered."""
    calls: int = 0
    """Calls of the package's functions."""
    crossings: int = 0
    """Calls into another file of the package than the last one."""
    python_calls: int = 0
    """Calls of any Python function."""
    _last: str = attrs.field(default="", alias="last")

    def record(self, frame: FrameType, event: str, _argument: object) -> None:
        """A profile function: counts calls, and leaves module bodies out."""
        if event != "call":
            return
        self.python_calls += 1
        code = frame.f_code
        if not code.co_filename.startswith(str(PACKAGE)) or code.co_name == "<module>":
            return
        name = code.co_filename[len(str(PACKAGE)) + 1 :]
        self.calls += 1
        self.crossings += name != self._last
        self._last = name
        if name not in self.files:
            self.files.append(name)


def size_of(package: Path) -> Size:
    """Count the package's source."""
    counted = [_lines(path.read_text()) for path in sorted(package.rglob("*.py"))]
    lines, code, docstrings, comments = map(sum, zip(*counted, strict=True))
    return Size(
        files=len(counted), lines=lines, code=code, docstrings=docstrings, comments=comments
    )


def _lines(text: str) -> tuple[int, int, int, int]:
    filled = {number for number, line in enumerate(text.splitlines(), 1) if line.strip()}
    strings = {
        number
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    } & filled
    comments = {
        token.start[0]
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#")
    } - strings
    code = len(filled) - len(strings) - len(comments)
    return len(filled), code, len(strings), len(comments)


@contextmanager
def traced() -> Iterator[Journey]:
    """Count what is called inside the block, in threads that it starts too."""
    journey = Journey()
    threading.setprofile(journey.record)
    sys.setprofile(journey.record)
    try:
        yield journey
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]  # None ends it


@contextmanager
def _quiet() -> Iterator[None]:
    with (
        open(os.devnull, "w") as nothing,  # noqa: PTH123
        redirect_stdout(nothing),
        redirect_stderr(nothing),
    ):
        yield


def _plan() -> zerotune.DeepSpeedPlan:
    return zerotune.DeepSpeedPlan.build(
        stage=2,
        offload="cpu",
        precision="bf16",
        micro_batch_size=1,
        optimizer={"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
    )


def _platform() -> zerotune.Platform:
    return zerotune.Platform.synthetic("cuda", vram=24 * GIB)


def _resolve() -> zerotune.ResolvedPlan:
    from zerotune.plan import family

    return _plan().resolve(platform=_platform(), model=family("sdxl"))


def planning() -> dict[str, Callable[[], Any]]:
    """The journeys that need neither torch nor DeepSpeed."""
    resolved, plan, platform = _resolve(), _plan(), _platform()
    facts = resolved.model
    return {
        "settle AdamW": lambda: zerotune.OptimizerResolver().resolve(resolved),
        "resolve": lambda: plan.resolve(platform=platform, model=facts),
        "advise": lambda: zerotune.DeepSpeedPlan.advise("sdxl", vram="12GiB", ram="64GiB"),
    }


def training(folder: Path) -> dict[str, Journey]:
    """Starting an engine, saving and resuming, on a small model and the real DeepSpeed."""
    import torch
    from torch import nn

    journeys = {}
    for name in ("start an engine", "again"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8))
        plan = zerotune.DeepSpeedPlan.build(stage=2, offload="cpu", precision="fp32")
        # The first time is for what is loaded and built but once.
        with traced() as journey:
            engine = zerotune.prepare(model=model, plan=plan)
        with engine:
            for _ in range(2):
                engine.backward(engine.module(torch.randn(4, 8)).square().mean())
                engine.step()
            with traced() as saving:
                zerotune.save_checkpoint(folder / name, engine=engine)
            with traced() as resuming:
                zerotune.load_checkpoint(folder / name, engine=engine)
        journeys = {"start an engine": journey, "save": saving, "resume": resuming}
    return journeys


def main(arguments: Sequence[str] | None = None) -> int:
    """Print sizes and journeys."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.journeys", description=__doc__)
    parser.add_argument("--files", action="store_true", help="name the files of each journey")
    parser.add_argument(
        "--planning", action="store_true", help="only what needs neither torch nor DeepSpeed"
    )
    options = parser.parse_args(arguments)
    journeys = {}
    for name, act in planning().items():
        act()
        with traced() as journey:
            act()
        journeys[name] = journey
    if not options.planning:
        with tempfile.TemporaryDirectory() as folder, _quiet():
            journeys |= training(Path(folder))
    size = size_of(PACKAGE)
    print(
        f"{size.files} files, {size.lines:,} lines that are not blank: {size.code:,} of code, "
        f"{size.docstrings:,} of docstrings, {size.comments:,} of comments\n"
    )
    print("| journey | files | calls | to another file | Python calls |")
    print("|---|--:|--:|--:|--:|")
    for name, journey in journeys.items():
        print(
            f"| {name} | {len(journey.files)} | {journey.calls:,} | {journey.crossings:,} "
            f"| {journey.python_calls:,} |"
        )
    if options.files:
        for name, journey in journeys.items():
            print(f"\n{name}: {', '.join(journey.files)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
