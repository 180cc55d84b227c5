"""Time a newcomer's first steps: from ``pip install`` to the first caught failure and trained step.

``nox -s newcomer`` builds the wheel and follows the quickstart in a fresh environment, typing what
is on that page. It prints the seconds of each stage, and the total so far. ``python -m
tests.newcomer WHEEL`` does the same with an existing wheel.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import attrs

from tests.docs.pages import DOCS, blocks, configuration

PAGE = DOCS / "quickstart.md"
CAUGHT = "nvme-optimizer-below-stage-3"
"""The rule that the page's configuration breaks."""
FIRST_STEP = r"^step +1/"
GOES_ON = r"^step: 0 -> 20 \(after 5\.00 epochs; continues from "
"""The trainer's message on resuming the checkpoint of the page's first script."""


ANSWER = r"ema = True: says no decay.*ema=0\.9999"
"""The trainer's message on an EMA without a decay."""


@attrs.frozen
class Stage:
    """One thing that a newcomer waits for."""

    what: str
    seconds: float
    since: float
    """Seconds waited since the beginning."""


@attrs.frozen(kw_only=True)
class Way:
    """A folder and wheel for the run, and the times of the awaited lines."""

    folder: Path
    wheel: str
    constraints: Path | None = None
    clock: list[float] = attrs.field(factory=list)
    """Times at which the awaited lines were printed."""

    @property
    def python(self) -> str:
        """Python of the clean environment."""
        return str(self.folder / "venv" / "bin" / "python")

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables without this checkout or ops compiled earlier."""
        kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
        return kept | {
            "TORCH_EXTENSIONS_DIR": str(self.folder / "ops"),
            "PATH": f"{self.folder / 'venv' / 'bin'}{os.pathsep}{os.environ['PATH']}",
        }


def create(way: Way) -> None:
    """make an environment"""
    shown([sys.executable, "-m", "venv", str(way.folder / "venv")], way)


def install(way: Way) -> None:
    """pip install"""
    held = ["-c", str(way.constraints)] if way.constraints else []
    shown([way.python, "-m", "pip", "install", "--quiet", *held, way.wheel], way)


def check(way: Way) -> None:
    """the first caught failure: zerotune plan check ds_config.json"""
    (way.folder / "ds_config.json").write_text(configuration())
    shown(["zerotune", "plan", "check", "ds_config.json"], way, until=CAUGHT, status=1)


def start(way: Way) -> None:
    """the first trained step: first.py, which compiles DeepSpeed's CPU optimizer before it"""
    shown(_script(way), way, until=FIRST_STEP)


def again(way: Way) -> None:
    """the first trained step of the same script once more"""
    shown(_script(way), way, until=FIRST_STEP)


def go_on(way: Way) -> None:
    """the first message of the resumed run, which exports the EMA at its end"""
    shown(_script(way, 2), way, until=GOES_ON)
    if not (way.folder / "runs" / "first" / "unet" / "config.json").is_file():
        raise AssertionError("nothing was exported")


def mistake(way: Way) -> None:
    """the answer to a mistake in that script: ema=True"""
    command = _script(way)
    script = way.folder / "first.py"
    script.write_text(script.read_text().replace("ema=0.99", "ema=True"))
    shown(command, way, until=ANSWER, status=1)


def recipes(way: Way) -> None:
    """what each recipe of the wheel takes: --help, one after the other"""
    listed = "import zerotune.examples.recipes as r; print(*r.__path__, end='')"
    folder = subprocess.check_output(
        [way.python, "-c", listed], cwd=way.folder, env=dict(way.environment), text=True
    )
    names = sorted(file.stem for file in Path(folder).glob("*.py"))
    if not names:
        raise AssertionError(f"{folder} holds no recipe")
    for name in names:
        module = f"zerotune.examples.recipes.{name}"
        shown([way.python, "-m", module, "--help"], way, until=r"--base BASE")


STAGES: tuple[Callable[[Way], None], ...] = (
    create,
    install,
    check,
    start,
    again,
    go_on,
    mistake,
    recipes,
)


def _script(way: Way, parts: int = 1) -> list[str]:
    """Write the page's first training blocks to a file; return the command that runs it."""
    codes = [one.code for one in blocks(PAGE) if "trainer.fit" in one.code][:parts]
    (way.folder / "first.py").write_text("\n".join(codes))
    return [way.python, "-u", "first.py"]


def shown(command: list[str], way: Way, *, until: str = "", status: int = 0) -> None:
    """Run a command, note the time of an awaited output line, and let the command end.

    Args:
        command: Program and arguments.
        way: Where to run it.
        until: Pattern of the awaited line; empty to wait for the end.
        status: Required exit status.

    Raises:
        AssertionError: It ended with another status, or without that line.
    """
    with subprocess.Popen(
        command, cwd=way.folder, env=dict(way.environment),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        said = []
        for line in process.stdout or ():
            said.append(line)
            if until and re.search(until, line):
                way.clock.append(time.monotonic())
                until = ""
    if process.returncode != status or until:
        raise AssertionError(
            f"{' '.join(command)} ended with {process.returncode}:\n{''.join(said)}"
        )


def walk(way: Way) -> Iterator[Stage]:
    """Run all stages, yielding each when it has ended."""
    walked = 0.0
    for stage in STAGES:
        way.clock.clear()
        began = time.monotonic()
        stage(way)
        seconds = (way.clock or [time.monotonic()])[0] - began
        walked += seconds
        yield Stage((stage.__doc__ or "").strip(), seconds, walked)


def main(arguments: list[str] | None = None) -> int:
    """Run all stages and print their times."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("wheel", help="a wheel, or what else pip installs")
    parser.add_argument("--constraints", type=lambda path: Path(path).resolve())
    options = parser.parse_args(arguments)
    wheel = Path(options.wheel)
    named = str(wheel.resolve()) if wheel.exists() else options.wheel
    with tempfile.TemporaryDirectory(prefix="newcomer-") as folder:
        for stage in walk(Way(folder=Path(folder), wheel=named, constraints=options.constraints)):
            sys.stdout.write(f"{stage.seconds:7.1f} s  {stage.since:7.1f} s  {stage.what}\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
