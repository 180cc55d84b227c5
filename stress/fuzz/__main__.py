"""``python -m stress.fuzz --minutes 1 [--seed 7]``: print failures, and store them as cases."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from stress.fuzz.attack import Attacker, Failure
from stress.fuzz.cases import Case, make_case

CORPUS = Path(__file__).parent / "corpus"
_TRIES = 150
"""Maximum attempts to shorten a failing case."""


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
        root = Path(folder).resolve() / "root"
        attack = Attacker(root, builder_client(root))
        attack(Case(text='{"train_batch_size": 1}', seed="warm-up"))
        attack.slowest, attack.largest = 0.0, 0
        seen = _attacked(attack, arguments)
    print(
        f"{attack.operations:,} operations, the slowest {attack.slowest:.2f} s, the largest"
        f" {attack.largest / 2**20:.0f} MiB, {len(seen)} different failures",
        flush=True,
    )
    return 1 if seen else 0


def builder_client(root: Path) -> Any:
    """Return a test client for the builder in ``root``; ``None`` without the builder's extra."""
    try:
        from starlette.testclient import TestClient

        from zerotune.builder.app import create_app
    except ImportError:
        return None
    root.mkdir(parents=True, exist_ok=True)
    app = create_app(root=root, on_apply=str)
    return TestClient(app, base_url="http://127.0.0.1:8265", raise_server_exceptions=True)


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
                _keep(_shortened(attack, case, failure), failure, arguments.keep)
        number += 1
    print(f"{number - arguments.first:,} cases", flush=True)
    return seen


def _shortened(attack: Attacker, case: Case, failure: Failure) -> Case:
    """Return the case, shortened as far as the same failure remains."""
    if failure.what.startswith(("time", "memory")):
        return case
    tries = 0
    going = True
    while going:
        going = False
        for text in _shorter(case.text):
            tries += 1
            if tries > _TRIES:
                return case
            shorter = attrs.evolve(case, text=text)
            found = attack(shorter, failure.operation)
            if any(each.signature == failure.signature for each in found):
                case, going = shorter, True
                break
    return case


def _shorter(text: str) -> Iterator[str]:
    """Yield the text without one of its settings, or without one part."""
    with contextlib.suppress(ValueError, RecursionError):
        yield from (json.dumps(each) for each in _without_one(json.loads(text)))
    size = len(text) // 2
    while size:
        for at in range(0, len(text), size):
            yield text[:at] + text[at + size :]
        size //= 2


def _without_one(value: Any) -> Iterator[Any]:
    if not isinstance(value, dict):
        return
    for key in value:
        rest = {name: each for name, each in value.items() if name != key}
        yield rest
        yield from ({**value, key: inner} for inner in _without_one(value[key]))


def _keep(case: Case, failure: Failure, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256(case.content()).hexdigest()[:12]
    kept = {"operation": failure.operation, "found": failure.what, **case.to_json()}
    path = folder / f"{name}.json"
    path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    print(f"kept {path}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
