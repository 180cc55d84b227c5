"""``zerotune offload``: show and clean up a swap root."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import attrs

from zerotune._util.table import Page, Table
from zerotune._util.text import format_size
from zerotune.cli import Command, add_commands, print_json, print_text
from zerotune.offload import cleanup_stale_swap
from zerotune.offload.lease import find_leases


def _add_root(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("root", type=Path, metavar="ROOT", help="the swap root")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def _clean(arguments: argparse.Namespace) -> int:
    report = cleanup_stale_swap(arguments.root)
    if arguments.json:
        print_json(report.to_dict())
    else:
        groups = (
            ("removed", report.removed),
            ("kept", report.kept),
            ("failed", report.failures),
        )
        rows = [
            (one.path.name, f"{what} ({one.kind})", format_size(one.nbytes), one.reason)
            for what, entries in groups
            for one in entries
        ]
        _print_rows(("folder", "outcome", "bytes", "why"), rows)
        print_text(f"{format_size(report.freed)} freed")
    return 1 if report.failures or any(one.kind == "bare" for one in report.kept) else 0


def _status(arguments: argparse.Namespace) -> int:
    report = cleanup_stale_swap(arguments.root, dry_run=True)
    leases = find_leases(arguments.root)
    strays = [one for one in (*report.removed, *report.kept) if one.kind != "lease"]
    if arguments.json:
        print_json(
            {
                "root": str(arguments.root),
                "leases": [
                    {**attrs.asdict(one), "path": str(one.path), "reserved": one.reserved}
                    for one in leases
                ],
                "others": [{**attrs.asdict(one), "path": str(one.path)} for one in strays],
                "reclaimable": report.freed,
            }
        )
    else:
        rows: list[tuple[str, ...]] = []
        for one in leases:
            owners = (f"{r.owner.host}:{r.owner.pid} (rank {r.rank})" for r in one.records)
            size = format_size(one.size)
            rows.append((one.path.name, one.state, size, ", ".join(owners), one.reason))
        for other in strays:
            size = format_size(other.nbytes)
            rows.append((other.path.name, other.kind, size, "", other.reason))
        _print_rows(("folder", "state", "on disk", "owner", "why"), rows)
        print_text(f"{format_size(report.freed)} can be freed by `zerotune offload clean`")
    return 1 if report.removed or strays else 0


def _print_rows(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    table = Table(head=head, rows=tuple(rows), indent=0)
    if table.rows:
        Page(blocks=(table,)).print()
    else:
        print_text("nothing here")


_COMMANDS: Final = {
    "status": "List the leases in a swap root and their owners; nothing is changed.",
    "clean": "Delete leftovers of runs that are provably dead.",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_commands(parser, _COMMANDS, _command)


def _command(name: str) -> Command:
    return Command(_add_root, {"status": _status, "clean": _clean}[name])
