"""Run every case in many orders of the device's work, and compare the results to the bit.

``python -m tests.device.matrix`` runs them all; ``--case TEXT`` those whose name contains a text,
``--output FOLDER`` writes ``device.json``, from which docs/generate_status.py makes a table.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import sys
import tempfile
import time
from datetime import datetime, timezone
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.device.build import why_missing
from tests.device.cases import CASES, Case, differences, run
from tests.support.ranks import RanksFailed, compile_device, run_ranks

SEEDS = range(5)
LATENESSES = (1.0, 0.3, 0.02)
PACKAGES = ("torch", "deepspeed", "diffusers", "bitsandbytes")


def prove(case: Case, folder: str) -> dict[str, Any]:
    """Run a case in all orders; return how many ended as the first one, which was never late."""
    from tests.device import install

    install()
    logging.disable(logging.WARNING)
    began, equal, different = time.process_time(), 0, []
    reference = run(case, SEEDS[0], LATENESSES[0], Path(folder))
    for seed in SEEDS:
        for lateness in LATENESSES:
            names = differences(reference, run(case, seed, lateness, Path(folder)))
            equal += not names
            if names:
                different.append(f"seed {seed}, lateness {lateness}: {', '.join(names[:3])}")
    return {
        "case": case.name,
        "ranks": case.ranks,
        "runs": len(SEEDS) * len(LATENESSES),
        "equal": equal,
        "compared": len(reference),
        "seconds": round(time.process_time() - began, 1),
        "different": different,
    }


def prove_apart(case: Case) -> dict[str, Any]:
    """Run a case in processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            ranks = run_ranks(
                prove, case, folder, world_size=case.ranks, timeout_s=3600,
                env={"ZEROTUNE_PROOF": "off"},
            )  # fmt: skip
        except RanksFailed as error:
            return {"case": case.name, "ranks": case.ranks, "error": str(error)}
    return min(ranks, key=lambda found: found["equal"])


def main(argv: list[str] | None = None) -> int:
    """Run the cases, print a table, and return 1 if a case failed or differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--case", default="", help="run only cases whose name contains this")
    parser.add_argument("--output", type=Path, help="folder for device.json")
    wanted = parser.parse_args(argv)
    if missing := why_missing():
        print(missing)
        return 1
    compile_device()
    found = []
    for case in CASES:
        if wanted.case.casefold() not in case.name.casefold():
            continue
        if missing := lacking(case):
            print(f"{case}: skipped, because {missing}", flush=True)
            continue
        found.append(prove_apart(case))
        show(found[-1])
    proven = [each for each in found if each.get("equal") == each.get("runs", -1)]
    runs = sum(each["runs"] for each in proven)
    print(f"{len(proven)} of {len(found)} cases give the same bits in every order ({runs} runs)")
    if wanted.output is not None:
        wanted.output.mkdir(parents=True, exist_ok=True)
        write(found, wanted.output / "device.json")
    return int(len(proven) < len(found))


def lacking(case: Case) -> str | None:
    """Return what this machine lacks for a case."""
    package = {"fp8": "diffusers", "torchao": "torchao"}.get(case.quantized, "bitsandbytes")
    if case.quantized and not find_spec(package):
        return f"{package} is not installed"
    if case.offload == "nvme" and not Path("/usr/include/libaio.h").exists():
        return "libaio's header is missing (apt install libaio-dev)"
    return None


def show(found: dict[str, Any]) -> None:
    if "error" in found:
        print(f"{found['case']}: {found['error']}", flush=True)
        return
    equal, runs, seconds = found["equal"], found["runs"], found["seconds"]
    print(f"{found['case']}: {equal} of {runs} equal, {seconds} s", flush=True)
    for line in found["different"]:
        print(f"    {line}", flush=True)


def write(found: list[dict[str, Any]], path: Path) -> None:
    kept = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "python": platform.python_version(),
        **{package: version(package) for package in PACKAGES if find_spec(package)},
        "seeds": len(SEEDS),
        "latenesses": LATENESSES,
        "cases": found,
    }
    path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
