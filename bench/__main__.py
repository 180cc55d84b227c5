"""Run benchmarks by name; ``python -m bench`` lists them, ``python -m bench.gpu`` runs on a GPU.

Each writes ``NAME.json``: medians, quartiles and ratios, with the machine and versions.
docs/performance.md and its charts are generated from the results in docs/results.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

ALL = (
    "ema", "data", "memory", "checkpoint", "step", "overhead", "models", "prediction", "stream",
)  # fmt: skip
"""From the shortest to the longest."""
NAMES = (*ALL, "large")
"""With the benchmark that takes hours, 24 GiB of RAM and 60 GB of disk."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the named benchmarks; a missed goal is recorded in the result and is no failure."""
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    names = f"all (without large), or {', '.join(NAMES)}"
    parser.add_argument("names", nargs="*", metavar="NAME", help=names)
    parser.add_argument("--quick", action="store_true", help="seconds; shows only that it works")
    parser.add_argument("--output", type=Path, help="folder of the results")
    parser.add_argument("--fresh", action="store_true", help="measure again what is there")
    parser.add_argument(
        "--case", action="append", default=[], metavar="NAME",
        help="only cases with this in their name, again if measured; may be repeated",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - {*NAMES, "all"}:
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    output = options.output or Path("outputs", "bench-quick" if options.quick else "bench")
    # Torch reads this on import. Without it, spinning threads would slow the next contestant.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from bench.runner import load, run
    from bench.show import markdown

    benchmarks = [load(name) for name in (ALL if "all" in options.names else options.names)]
    known = [case.name for benchmark in benchmarks for case in benchmark.cases(options.quick)]
    for part in options.case:
        if not any(part in name for name in known):
            parser.error(f"no case has {part!r} in its name; there are {'; '.join(known)}")
    for benchmark in benchmarks:
        result = run(
            benchmark,
            output=output,
            quick=options.quick,
            fresh=options.fresh,
            only=options.case,
        )
        sys.stdout.write(markdown(result))
    if not options.names:
        sys.stdout.writelines(f"{name:12}{load(name).title}\n" for name in NAMES)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
