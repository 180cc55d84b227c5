"""Draws the README's picture of memory: ``python docs/generate_pictures.py``.

What the picture shows is written into the file, so that a test can tell when the code's answer has
become another one.
"""

from __future__ import annotations

import json
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from zerotune import cli
from zerotune.plan import DeepSpeedPlan

PICTURE = Path(__file__).parent / "images" / "memory.png"
COMMAND = "plan advise --family sdxl --vram 12 --ram 128 --ema host"
ANSWER = "zerotune-answer"


def answer() -> dict[str, dict[str, int]]:
    """Bytes of each component at the peak of device and host, as the picture shows them."""
    advice = DeepSpeedPlan.advise("sdxl", vram="12GiB", ram="128GiB", ema="host")
    shown: dict[str, dict[str, int]] = {}
    for place in ("device", "host"):
        parts = shown.setdefault(place, {})
        for item in advice.estimate.peak(place).items:
            parts[item.component] = parts.get(item.component, 0) + item.nbytes
    return shown


def main() -> None:
    """Draw it with the command that README gives."""
    cli.main([*COMMAND.split(), "--chart", str(PICTURE)])
    words = PngInfo()
    words.add_text(ANSWER, json.dumps(answer(), sort_keys=True))
    with Image.open(PICTURE) as drawn:
        drawn.load()
        drawn.save(PICTURE, pnginfo=words, optimize=True)


if __name__ == "__main__":
    main()
