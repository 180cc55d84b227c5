"""The ``zerotune`` command and its printing functions.

Exit status: 0 on success, 1 if a command reports a problem, 2 for an error or wrong usage, 130 if
interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, NoReturn

from zerotune._util.proc import installed_version
from zerotune.errors import ZeroTuneError

if TYPE_CHECKING:
    from zerotune._util.table import Page

_COMMANDS: Final = {
    "init": "Write a training run and its plan, for a model, a GPU and a folder of images.",
    "train": "Train a model as a file says; under torchrun, on several GPUs.",
    "doctor": "Show what this machine supports, and why other features are unavailable.",
    "plan": "Check, convert and explain DeepSpeed configurations.",
    "schema": "Print all parameters of DeepSpeed as JSON Schema for editors.",
    "offload": "Show or clean up a swap root.",
    "checkpoint": "Show, verify or convert checkpoints.",
    "builder": "Open a page that builds, explains and saves a plan.",
}
"""Summary of each command; the module of its name has ``configure`` and ``run``."""


_ERROR: Final = "error: "
_NARROWEST: Final = 20


def print_page(page: Page, *, width: int | None = None) -> None:
    """Print a report, with wrapped lines and colours if the output is a terminal.

    Args:
        page: The report.
        width: Columns per line if the output is not a terminal; ``None`` does not wrap lines.
    """
    page.print(sys.stdout, width=width)


def print_text(text: str) -> None:
    """Print a report, with one line break at its end."""
    sys.stdout.write(text.rstrip("\n") + "\n")


def print_json(data: Any) -> None:
    """Print data as JSON."""
    sys.stdout.write(json.dumps(data, indent=2, allow_nan=False) + "\n")


def tell(text: str) -> None:
    """Print a message to standard error, separate from the report."""
    _to_stderr("zerotune: ", text)


def complain(text: str) -> None:
    """Print an error to standard error."""
    _to_stderr(_ERROR, text)


def _to_stderr(mark: str, text: str) -> None:
    """Write a message to standard error, wrapped only at a terminal."""
    if sys.stderr.isatty():
        import shutil
        import textwrap

        text = textwrap.fill(
            text,
            max(_NARROWEST, shutil.get_terminal_size().columns),
            initial_indent=mark,
            subsequent_indent=" " * len(mark),
            break_long_words=False,
            break_on_hyphens=False,
        ).removeprefix(mark)
    sys.stderr.write(f"{mark}{text}\n")


class Below(ABC):
    """A subcommand."""

    summary: ClassVar[str]

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments

    @staticmethod
    @abstractmethod
    def configure(parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments."""

    @abstractmethod
    def run(self) -> int:
        """Run the command and return the exit status."""


class Later(NamedTuple):
    """A subcommand whose module is imported when the command is used."""

    summary: str
    module: str
    name: str
    """Name of the class in the module."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Import the command, and add its arguments."""
        kind = getattr(importlib.import_module(self.module), self.name)
        kind.configure(parser)
        parser.set_defaults(command=kind)


class _WholeNames(argparse.HelpFormatter):
    """Breaks no line at a hyphen, so that a family's name can be copied from the help."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        import textwrap

        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class LazyParser(argparse.ArgumentParser):
    """Parser that adds its arguments when it parses, so that unused commands import nothing."""

    configure: Callable[[argparse.ArgumentParser], None] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"formatter_class": _WholeNames, **kwargs})

    def error(self, message: str) -> NoReturn:
        """Print the error and the usage, and exit."""
        complain(message)
        self.print_usage(sys.stderr)
        self.exit(2)

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        """Add the arguments before the first parse."""
        configure, self.configure = self.configure, None
        if configure is not None:
            configure(self)
        return super().parse_known_args(*args, **kwargs)


def add_commands(parser: argparse.ArgumentParser, **commands: type[Below] | Later) -> None:
    """Add subcommands, by name."""
    below = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=LazyParser
    )
    for name, kind in commands.items():
        command = below.add_parser(name, help=kind.summary, description=kind.summary)
        command.configure = kind.configure
        command.set_defaults(command=kind)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status.

    Args:
        argv: Arguments without the program's name; by default ``sys.argv[1:]``.
    """
    for stream in (sys.stdout, sys.stderr):
        # Characters that the terminal cannot encode are escaped, so no report fails on them.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    argv = sys.argv[1:] if argv is None else argv
    if any("\0" in argument for argument in argv):
        complain("an argument contains a NUL character, which no path or name can contain")
        return 2
    arguments = _parser().parse_args(argv)
    try:
        status = int(arguments.run(arguments))
        sys.stdout.flush()
    except ZeroTuneError as error:
        for each in error.each():
            option = f"--{each.key}".replace("_", "-")
            given = any(argument.partition("=")[0] == option for argument in argv)
            shown = (each.called(option) if given else each).in_shell()
            complain(" ".join(str(shown).split()))
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("zerotune: interrupted\n")
        return 130
    except BrokenPipeError:
        # The reader of our output has exited (`| head`); Python would print an error at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


def _parser() -> argparse.ArgumentParser:
    parser = LazyParser(
        prog="zerotune", description="ZeRO-offloaded diffusion training around DeepSpeed."
    )
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="show the version")
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=LazyParser
    )
    for name, summary in _COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        command.configure = partial(_configure, name)
    return parser


def _configure(name: str, parser: argparse.ArgumentParser) -> None:
    """Import a command's module, and add the command's arguments."""
    module = importlib.import_module(f"{__name__}.{name}")
    module.configure(parser)
    parser.set_defaults(run=module.run)


class _ShowVersion(argparse.Action):
    """Looks the version up only when asked, because importing the look-up is slow."""

    def __call__(self, parser: argparse.ArgumentParser, *_args: Any, **_kwargs: Any) -> None:
        sys.stdout.write(f"zerotune {installed_version('zerotune') or '(not installed)'}\n")
        parser.exit()
