"""``zerotune plan``: commands that work on a plan without training.

``plan check`` is here; the others are in ``reports``, which is imported when one of them runs.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, cast

from zerotune._util.table import Line, Page
from zerotune._util.text import counted
from zerotune.cli import Command, add_commands, print_json, print_text
from zerotune.decisions import SEVERITIES, Decision, Rejected, raise_all, worst_first
from zerotune.errors import InvalidValueError, PlanFileError, PlanSyntaxError, UnknownKeyError
from zerotune.plan import read
from zerotune.plan.context import UPDATES, Context, DeviceUpdate
from zerotune.plan.optimizer.choose import BY_CHOICE
from zerotune.plan.resolution import inspect
from zerotune.plan.rules.table import all_rules
from zerotune.plan.settings import Settings
from zerotune.plan.source import key_lines, read_text
from zerotune.plan.values import Integer, Kind
from zerotune.platform.facts import CUDA, Platform

_COMMANDS: Final = {
    "check": "Check a configuration for mistakes; needs neither torch nor DeepSpeed.",
    "convert": "Convert a configuration to another format without changing the training.",
    "explain": "Describe a plan; with a model, also its memory and time.",
    "advise": "Find the fastest plan that fits a model into the given memory.",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands of ``plan``."""
    add_commands(parser, _COMMANDS, _command)


def _command(name: str) -> Command:
    if name == "check":
        return Command(_configure_check, _check)
    reports = importlib.import_module("zerotune.cli.reports")
    return cast("Command", getattr(reports, name.upper()))


# -- What the commands share.


FILE_HELP: Final = "DeepSpeed JSON, a trainer's config.json, or accelerate's YAML"
_MOST_PROCESSES: Final = 1_000_000


def option_of(kind: Kind) -> Callable[[str], Any]:
    """Return a function that parses an option's value for ``argparse``.

    Args:
        kind: Type of the value.
    """

    def parsed(text: str) -> Any:
        try:
            return kind.read(text, "")[0]
        except InvalidValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} {error.reason}; {error.fix}") from None

    return parsed


at_least_one: Final = option_of(Integer(minimum=1, auto=False))
number_of_processes: Final = option_of(Integer(minimum=1, maximum=_MOST_PROCESSES, auto=False))


def add_reading(parser: argparse.ArgumentParser) -> None:
    """Add the options for reading a file."""
    parser.add_argument(
        "--also-known",
        metavar="KEY",
        action="append",
        default=[],
        help="accept this key of a newer DeepSpeed, given by its path; may be repeated",
    )


def add_file(parser: argparse.ArgumentParser) -> None:
    """Add the file to read, and the options for reading it."""
    parser.add_argument("file", metavar="FILE", help=FILE_HELP)
    add_reading(parser)


def add_update(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add ``--update``, the place where weights in host memory are updated."""
    parser.add_argument(
        "--update",
        choices=UPDATES,
        help="where the host engine updates weights: in host memory, or on the device with fp32 "
        "or split master weights, or rounded at random",
    )


WORLD_SIZE_HELP: Final = "number of processes; default FILE's num_processes, or 1"


def set_world_size(arguments: argparse.Namespace, plan: Settings | None) -> int:
    """Return ``--world-size``; the default is the launcher file's number of processes."""
    if arguments.world_size is None:
        launch = plan.launch if plan is not None else None
        asked = launch.num_processes if launch is not None else None
        known = isinstance(asked, int) and 1 <= asked <= _MOST_PROCESSES
        arguments.world_size = asked if known else 1
    return int(arguments.world_size)


# -- check


def _configure_check(parser: argparse.ArgumentParser) -> None:
    add_file(parser)
    parser.add_argument("--world-size", type=number_of_processes, metavar="N", help=WORLD_SIZE_HELP)
    add_update(parser)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument(
        "--strict", action="store_true", help="exit with an error if there are warnings"
    )


def _check(arguments: argparse.Namespace) -> int:
    """Check a file; return 0 without findings, 1 with findings, 2 if it cannot be read."""
    status = 1
    try:
        problems, plan = _problems(arguments)
    except (PlanFileError, PlanSyntaxError) as error:
        if not arguments.json:
            raise
        problems, status = [Decision.of(each, rule="file") for each in error.each()], 2
        plan = None
    problems = worst_first(map(_as_refused, problems))
    counts = {name: sum(p.severity == name for p in problems) for name in SEVERITIES}
    # Read the file again for line numbers only if there is something to report.
    lines = _key_lines(arguments, plan) if problems and status == 1 else {}
    if arguments.json:
        print_json(
            {
                "file": arguments.file,
                "world_size": arguments.world_size,
                **{f"{name}s": count for name, count in counts.items()},
                "findings": [_problem_data(problem, lines) for problem in problems],
            }
        )
    else:
        summary = ", ".join(counted(count, name) for name, count in counts.items() if count)
        ranks = counted(arguments.world_size, "process", "processes")
        blocks = []
        for one in problems:
            file, line = _line_of(one, lines)
            place = "" if line is None else f"{file and f'{file} '}line {line}, "
            text = f"{place}{one.rule}: {_problem_text(one)}"
            blocks.append(Line(text, mark=f"[{one.severity}]", style=one.severity))
        title = f"{arguments.file}: {summary or 'nothing to report'} at {ranks}"
        Page(title=title, blocks=tuple(blocks)).print()
        # Arguments of optimizers and schedules are not keys of DeepSpeed.
        if any(isinstance(one.error, UnknownKeyError) and one.rule == "read" for one in problems):
            print_text("for a key of a newer DeepSpeed, pass --also-known KEY")
    failed = counts["error"] or (arguments.strict and counts["warning"])
    return status if failed else 0


def _problems(arguments: argparse.Namespace) -> tuple[list[Decision], Settings | None]:
    """Return the problems, and the part of the plan that can be read."""
    import attrs

    plan, mistakes = read.read_partly(
        lambda log: read.load_plan(arguments.file, log),
        also_known=arguments.also_known,
    )
    if any(isinstance(error, PlanFileError | PlanSyntaxError) for error in mistakes):
        raise_all(mistakes)
    refused = [Decision.of(error, rule="read") for error in mistakes]
    world_size = set_world_size(arguments, plan)
    if plan is None:
        return refused, None
    inspection = inspect(
        plan,
        Context(world_size=world_size),
        # Rules need only the file; resolving needs a machine, so assume one that supports
        # everything.
        resolve_in=Context(
            world_size=world_size,
            platform=Platform.synthetic(CUDA, device_count=world_size),
        ),
        mistakes=mistakes,
        update=DeviceUpdate.of(arguments.update),
    )
    read_as = (attrs.evolve(one, rule="read") for one in plan.decisions)
    problems = [*refused, *read_as, *inspection.findings]
    keys = {problem.key for problem in problems}
    chosen = inspection.resolved.decisions if inspection.resolved else ()
    warnings = (
        one
        for one in chosen
        if one.severity == "warning" and (one.rule == BY_CHOICE or one.key == "update")
    )
    later = [*inspection.refusals, *warnings]
    return [*problems, *(each for each in later if each.key not in keys)], plan


def _key_lines(arguments: argparse.Namespace, plan: Settings | None) -> Mapping[str, _Place]:
    """Return the place of each key, and of each setting that the file names differently.

    The configuration may be a part of the file, or a file that the file names.
    """
    path = Path(arguments.file)
    lines = {key: ("", line) for key, line in key_lines(read_text(path), path).items()}
    source = plan.source if plan is not None else str(path)
    inside: dict[str, _Place] = {}
    for key, place in lines.items():
        wrapper, _, below = key.partition(".")
        if source == f"{path} ({wrapper})":
            inside[below] = place
    if source != str(path) and Path(source).is_file():
        found = key_lines(read_text(Path(source)), Path(source))
        inside = {key: (source, line) for key, line in found.items()}
    named = {**lines, **inside}
    for setting, name in (plan.names if plan is not None else {}).items():
        if name in lines:
            named[setting] = lines[name]
            # accelerate has a single setting for some sections; its line stands for both.
            named.setdefault(setting.rpartition(".")[0], lines[name])
    return named


def _as_refused(one: Decision) -> Decision:
    """Return a record as an error if DeepSpeed or accelerate refuses what zerotune accepts."""
    import attrs

    refused = {each.id for each in all_rules() if each.refused_elsewhere}
    is_refused = one.rule in refused or isinstance(one.reason, Rejected)
    return attrs.evolve(one, severity="error") if is_refused else one


_Place = tuple[str, "int | None"]
"""A file, or ``""`` for the checked file, and a line counted from 1."""


def _line_of(one: Decision, lines: Mapping[str, _Place]) -> _Place:
    """Return the place of the syntax error or else of the key."""
    of_error = getattr(one.error, "line", None)
    if of_error is not None:
        return "", of_error
    return lines.get(one.key) or lines.get(one.written or "") or ("", None)


def _problem_text(one: Decision) -> str:
    return str(one if one.is_choice else one.as_error())


def _problem_data(one: Decision, lines: Mapping[str, _Place]) -> dict[str, Any]:
    file, line = _line_of(one, lines)
    return {
        "severity": one.severity,
        "rule": one.rule,
        "key": one.key or None,
        "text": _problem_text(one),
        "file": file or None,
        "line": line,
        # Only syntax errors have a column.
        "column": getattr(one.error, "column", None),
    }
