"""``zerotune offload``: what lies in a swap root, what of it is dead, and how fast its disk is."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs

from zerotune.cli import print_json, print_page, print_text

if TYPE_CHECKING:
    from zerotune.offload import CleanupReport, FoundLease
    from zerotune.offload.disk import Benchmark

NAME: Final = "offload"
SUMMARY: Final = "Show, clean up or measure a swap root."

_MEASURED_SIZE: Final = "256MiB"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, summary, act in (
        ("status", "List the leases in a root and who holds them; changes nothing.", _status),
        ("clean", "Remove what runs that are provably dead left behind.", _clean),
        ("bench", "Measure reading and writing through DeepSpeed's aio.", _bench),
    ):
        command = commands.add_parser(name, help=summary, description=summary)
        command.add_argument("root", type=Path, metavar="ROOT", help="the swap root")
        command.add_argument("--json", action="store_true", help="print everything as JSON")
        command.set_defaults(act=act)
        if name == "clean":
            _configure_clean(command)
        if name == "bench":
            _configure_bench(command)


def _configure_clean(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="only show what would be removed")
    parser.add_argument(
        "--adopt",
        action="store_true",
        help="also remove DeepSpeed's own zero_stage_* folders, where no process can be using them",
    )


def _configure_bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--size",
        default=_MEASURED_SIZE,
        help="bytes to write and read (256MiB, 1 GiB, …), locked in memory meanwhile "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--sweep",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="search for the best settings, or measure DeepSpeed's defaults alone",
    )
    parser.add_argument(
        "--family",
        metavar="NAME",
        help="also say how long a step of this model, all of it on NVMe, spends on the disk (sdxl)",
    )
    parser.add_argument(
        "--save",
        action="store_true",
        help="keep the best settings in ROOT, where later leases use them",
    )


def run(arguments: argparse.Namespace) -> int:
    """Do what was asked.

    Returns:
        0 when all is well; 1 when ``status`` sees something dead, ``clean`` could not remove
        something, or DeepSpeed's own folders lie about unowned.
    """
    return int(arguments.act(arguments))


def _status(arguments: argparse.Namespace) -> int:
    from zerotune.offload import cleanup_stale_swap, find_leases

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
        rows = [_lease_row(lease) for lease in leases]
        rows += [(one.path.name, one.kind, _size(one.nbytes), "", one.reason) for one in strays]
        _print_table(("folder", "state", "on disk", "owner", "why"), rows, empty="nothing here")
        sys.stdout.write(f"{_size(report.freed)} can be freed by `zerotune offload clean`\n")
    return 1 if report.removed or strays else 0


def _clean(arguments: argparse.Namespace) -> int:
    from zerotune.offload import cleanup_stale_swap

    report = cleanup_stale_swap(arguments.root, dry_run=arguments.dry_run, adopt=arguments.adopt)
    if arguments.json:
        print_json(report.to_dict())
    else:
        _print_report(report)
    return 1 if report.failures or any(one.kind == "bare" for one in report.kept) else 0


def _bench(arguments: argparse.Namespace) -> int:
    from zerotune._util.text import parse_size

    size = parse_size(arguments.size, key="--size")
    if arguments.family:
        from zerotune.plan import family

        family(arguments.family)  # before a minute of measuring
    # DeepSpeed and its compiler print; what we print on stdout may be read by a program.
    with redirect_stdout(sys.stderr):
        from zerotune.offload.disk import benchmark

        result = benchmark(arguments.root, size=size, sweep=arguments.sweep)
        saved = result.best.save(result.root) if arguments.save else None
    seconds = _step_seconds(result, arguments.family) if arguments.family else None
    if arguments.json:
        print_json({**_bench_data(result, saved), "step_seconds": seconds})
    else:
        _print_bench(result, saved)
        if seconds is not None:
            sys.stdout.write(
                f"a step of {arguments.family}, all of it on NVMe, spends at least {seconds:.1f} s"
                " on this disk\n"
            )
    return 0


def _step_seconds(result: Benchmark, family: str) -> float:
    from zerotune.plan import DeepSpeedPlan
    from zerotune.platform import Platform

    plan = DeepSpeedPlan.build(stage=3, offload="nvme", offload_param="nvme", precision="bf16")
    estimate = plan.estimate(family, platform=Platform.synthetic("cuda"))
    return result.best.step_seconds(estimate)


def _lease_row(lease: FoundLease) -> tuple[str, ...]:
    owners = ", ".join(
        f"{record.owner.host}:{record.owner.pid} (rank {record.rank})" for record in lease.records
    )
    return lease.path.name, lease.state, _size(lease.size), owners, lease.reason


def _print_report(report: CleanupReport) -> None:
    groups = (
        ("would go" if report.dry_run else "removed", report.removed),
        ("kept", report.kept),
        ("failed", report.failures),
    )
    rows = [
        (one.path.name, f"{what} ({one.kind})", _size(one.nbytes), one.reason)
        for what, entries in groups
        for one in entries
    ]
    _print_table(("folder", "outcome", "bytes", "why"), rows, empty="nothing here")
    verb = "would be freed" if report.dry_run else "freed"
    sys.stdout.write(f"{_size(report.freed)} {verb}\n")


def _bench_data(result: Benchmark, saved: Path | None) -> dict[str, Any]:
    return {
        "root": str(result.root),
        "aio": result.best.settings,
        "best": attrs.asdict(result.best),
        "samples": [
            {**attrs.asdict(one.settings), "read": one.read, "write": one.write}
            for one in result.samples
        ],
        "saved": None if saved is None else str(saved),
    }


def _print_bench(result: Benchmark, saved: Path | None) -> None:
    rows = []
    for one in result.samples:
        numbers = attrs.astuple(one.settings)
        best = "best" if numbers == tuple(result.best.settings.values()) else ""
        speeds = (f"{one.read / 1e9:.2f}", f"{one.write / 1e9:.2f}")
        rows.append((*map(str, numbers), *speeds, best))
    headings = ("block_size", "queue_depth", "threads", "read GB/s", "write GB/s", "")
    _print_table(headings, rows, empty="")
    aio = json.dumps(result.best.settings)
    sys.stdout.write(f'"aio": {aio}\n')
    sys.stdout.write(
        f"saved to {saved}; leases in this root use it\n"
        if saved
        else "give --save to let leases in this root use it\n"
    )


def _print_table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]], *, empty: str) -> None:
    from zerotune._util.table import Page, Table

    table = Table(head=head, rows=tuple(rows), indent=0)
    if table.rows:
        print_page(Page(blocks=(table,)))
    elif empty:
        print_text(empty)


def _size(nbytes: int) -> str:
    from zerotune._util.text import format_size

    return format_size(nbytes)
