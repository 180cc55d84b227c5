"""Run benchmarks by name; results are JSON, a table and a plot each."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.carry import paths

if TYPE_CHECKING:
    from benchmarks.framework import Benchmark

SESSION: Final = "gpu"
_BEGAN: Final = time.monotonic()
"""Minutes that a machine is lent for pass while modules are loaded too."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was named.

    Returns:
        0; goals that are missed are in the result.
    """
    # A checkout runs as it is, on a machine that has neither zerotune nor all that it needs.
    sys.path[:0] = [path for path in paths() if path not in sys.path]
    from benchmarks.registry import CPU, available, load

    known = available()
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "name",
        choices=[*known, "all", SESSION],
        help=f"all: {', '.join(CPU)}, one after the other; {SESSION}: what a GPU is lent for, "
        "piece by piece",
    )
    parser.add_argument(
        "--minutes", type=float, default=10.0, help=f"how long {SESSION} may take; 10 by default"
    )
    parser.add_argument(
        "--quick", action="store_true", help="sizes that show within seconds that it works"
    )
    parser.add_argument("--output", type=Path, help="folder of the results")
    parser.add_argument("--fresh", action="store_true", help="measure again what is there")
    parser.add_argument(
        "--piece", action="append", default=[], metavar="NAME",
        help=f"of {SESSION}, only what has this in its name, again if it is done; may be repeated",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    output = options.output or Path(
        "outputs", "benchmarks-quick" if options.quick else "benchmarks"
    )
    # Read when torch is loaded: threads that spin while they wait starve the next contestant.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if options.name == SESSION:
        from benchmarks.session import run_session

        return run_session(
            output=output,
            minutes=options.minutes,
            quick=options.quick,
            began=_BEGAN if arguments is None else None,
            only=[""] if options.fresh and not options.piece else options.piece,
        )
    for name in CPU if options.name == "all" else (options.name,):
        _run(load(name), output, quick=options.quick, fresh=options.fresh)
    return 0


def _run(benchmark: Benchmark, output: Path, *, quick: bool, fresh: bool) -> None:
    from benchmarks.framework import run
    from benchmarks.framework.tables import goals_table

    result = run(benchmark, output=output, quick=quick, fresh=fresh)
    sys.stdout.write(f"{benchmark.name}: {output / benchmark.name}.json, .md, .png\n")
    if result["goals"]:
        sys.stdout.write(goals_table(result["goals"]) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
