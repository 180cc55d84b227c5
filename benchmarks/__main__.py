"""Run a benchmark by name and write its result as JSON."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks import ema, memory
from zerotune import detect_platform

BENCHMARKS = {"ema": ema.measure, "memory": memory.measure}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", choices=sorted(BENCHMARKS))
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmarks"))
    parser.add_argument("--layers", type=int, help="ema only: size, 2 million parameters each")
    options = parser.parse_args()
    if options.layers is not None and options.name != "ema":
        parser.error("--layers belongs to ema")
    settings = {} if options.layers is None else {"layers": options.layers}
    platform = detect_platform(log=False)
    result = {
        "benchmark": options.name,
        "processor": platform.processor,
        "cores": platform.usable_cores,
        "devices": [device.name for device in platform.devices],
        "versions": dict(platform.versions),
    } | BENCHMARKS[options.name](**settings)
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / f"{options.name}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result["medians"], indent=2))
    print(f"samples and settings in {path}")


if __name__ == "__main__":
    main()
