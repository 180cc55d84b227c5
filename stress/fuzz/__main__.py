"""``python -m stress.fuzz --minutes 1 [--seed 7]``: print failures, and store them as cases."""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
import tempfile
import time
from pathlib import Path

from stress.fuzz.attack import Attacker, Failure
from stress.fuzz.cases import Case, make_case

CORPUS = Path(__file__).parent / "corpus"


def main() -> int:
    """Attack until the time is up; return 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--keep", type=Path, default=CORPUS, help="folder for what fails")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        attack = Attacker(Path(folder).resolve() / "root")
        attack(Case(text='{"train_batch_size": 1}', seed="warm-up"))
        attack.slowest = 0.0
        seen = _attacked(attack, arguments)
    print(
        f"{attack.operations:,} operations, the slowest {attack.slowest:.2f} s, {len(seen)} "
        "different failures",
        flush=True,
    )
    return 1 if seen else 0


def _attacked(attack: Attacker, arguments: argparse.Namespace) -> set[tuple[str, str, str]]:
    seen: set[tuple[str, str, str]] = set()
    end = time.monotonic() + 60 * arguments.minutes
    number = arguments.first
    while time.monotonic() < end:
        case = make_case(arguments.seed, number)
        for failure in attack(case):
            if failure.signature not in seen:
                seen.add(failure.signature)
                print(f"case {number}: {failure.operation}: {failure.what} {failure.place}")
                _keep(case, failure, arguments.keep)
        number += 1
    print(f"{number - arguments.first:,} cases", flush=True)
    return seen


def _keep(case: Case, failure: Failure, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256(case.content()).hexdigest()[:12]
    kept = {"operation": failure.operation, "found": failure.what, **case.to_json()}
    path = folder / f"{name}.json"
    path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    print(f"kept {path}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
