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
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, NoReturn

from zerotune._util.proc import installed_version
from zerotune._util.table import Line, Page
from zerotune.errors import ZeroTuneError

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
"""Summary of each command; the module of its name is a ``Command``."""


def print_text(text: str) -> None:
    """Print a report, with one line break at its end."""
    sys.stdout.write(text.rstrip("\n") + "\n")


def print_json(data: Any) -> None:
    """Print data as JSON."""
    sys.stdout.write(json.dumps(data, indent=2, allow_nan=False) + "\n")


def tell(text: str) -> None:
    """Print a message to standard error, separate from the report."""
    _to_stderr("zerotune:", text)


def complain(text: str) -> None:
    """Print an error to standard error."""
    _to_stderr("error:", text)


def _to_stderr(mark: str, text: str) -> None:
    Page(blocks=(Line(text, mark=mark),)).print(sys.stderr)


class Command(NamedTuple):
    """A command; a module with functions of these names is one too."""

    configure: Callable[[argparse.ArgumentParser], None]
    """Adds the command's arguments."""
    run: Callable[[argparse.Namespace], int]
    """Runs the command, and returns the exit status."""


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


def add_commands(
    parser: argparse.ArgumentParser, summaries: Mapping[str, str], find: Callable[[str], Any]
) -> None:
    """Add commands below a command, or below the program.

    Args:
        parser: The parser of the commands above.
        summaries: Summary of each command by name.
        find: Function that returns a ``Command`` by name; it is called when the command is used.
    """
    below = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=LazyParser
    )
    for name, summary in summaries.items():
        command = below.add_parser(name, help=summary, description=summary)
        command.configure = partial(_configure, find, name)


def _configure(find: Callable[[str], Any], name: str, parser: argparse.ArgumentParser) -> None:
    command = find(name)
    command.configure(parser)
    # A module with commands below has nothing to run itself.
    parser.set_defaults(run=getattr(command, "run", None))


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
            option = f"--{each.key}".removesuffix(".type").replace("_", "-")
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
    add_commands(parser, _COMMANDS, lambda name: importlib.import_module(f"{__name__}.{name}"))
    return parser


class _ShowVersion(argparse.Action):
    """Looks the version up only when asked, because importing the look-up is slow."""

    def __call__(self, parser: argparse.ArgumentParser, *_args: Any, **_kwargs: Any) -> None:
        sys.stdout.write(f"zerotune {installed_version('zerotune') or '(not installed)'}\n")
        parser.exit()
