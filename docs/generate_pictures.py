"""Draws every picture that shows what the code answers: ``python docs/generate_pictures.py``.

README's picture of memory, and the charts of docs/results with the page made of them. What a
picture shows is written into the file, so that a test can tell when the code's answer has become
another one. The digits are drawn by ``nox -s demo``, the builder by docs/generate_builder.py.
"""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo

DOCS = Path(__file__).resolve().parent
# As a script it is started from anywhere.
sys.path.insert(0, str(DOCS.parent))

from bench.runner import compact, load, refreshed  # noqa: E402
from bench.show import draw  # noqa: E402
from zerotune import cli  # noqa: E402
from zerotune.plan import DeepSpeedPlan  # noqa: E402

PICTURE = DOCS / "images" / "memory.png"
COMMAND = "plan advise --family sdxl --vram 12 --ram 128 --ema host"
ANSWER = "zerotune-answer"
RESULTS = DOCS / "results"


def answer() -> dict[str, dict[str, int]]:
    """Bytes of each component at the peak of device and host, as the picture shows them."""
    advice = DeepSpeedPlan.advise("sdxl", vram="12GiB", ram="128GiB", ema="host")
    found: dict[str, dict[str, int]] = {}
    for place in ("device", "host"):
        parts = found.setdefault(place, {})
        for item in advice.estimate.peak(place).items:
            parts[item.component] = parts.get(item.component, 0) + item.nbytes
    return found


def results() -> Iterator[tuple[Path, dict[str, Any], dict[str, Any]]]:
    """Each stored result that has a chart: its file, what is in it, and what should be."""
    for path in sorted(RESULTS.glob("*.json")):
        stored = json.loads(path.read_text(encoding="utf-8"))
        if path.with_suffix(".png").exists():
            yield path, stored, refreshed(stored, load(path.stem))


def draw_results() -> None:
    """Charts and the page, with the words and goals that the benchmarks have today."""
    for path, _, today in results():
        path.write_text(compact(today), encoding="utf-8")
        draw(today, path.with_suffix(".png"))
    runpy.run_path(str(DOCS / "generate_performance.py"), run_name="__main__")


def draw_memory() -> None:
    """Draw README's picture with the command that README gives."""
    cli.main([*COMMAND.split(), "--chart", str(PICTURE)])
    words = PngInfo()
    words.add_text(ANSWER, json.dumps(answer(), sort_keys=True))
    with Image.open(PICTURE) as drawn:
        drawn.load()
        drawn.save(PICTURE, pnginfo=words, optimize=True)


if __name__ == "__main__":
    draw_memory()
    draw_results()
