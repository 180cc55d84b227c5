"""Take the screenshots of ``builder.md``: ``python docs/generate_builder.py``.

Requires Chromium, playwright and pillow.
"""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
VIEWS = (
    ("light", "light", 1360, 940),
    ("dark", "dark", 1360, 940),
    ("phone", "light", 390, 844),
)


def main() -> None:
    """Open the page as a user would, plan an NVMe run, and take each screenshot."""
    sys.path.insert(0, str(ROOT))
    from tests.builder.pages import Page, browser, served
    from zerotune.builder import create_app

    with tempfile.TemporaryDirectory() as folder, browser() as chromium:
        root = Path(folder)
        app = create_app(root=root, plan_file=root / "plan.json")
        with served(app) as address:
            for name, scheme, width, height in VIEWS:
                context = chromium.new_context(
                    color_scheme=scheme, viewport={"width": width, "height": height}
                )
                page = Page(context, address)
                plan_nvme(page)
                keep(page.tab.screenshot(), f"builder-{name}.png")
                if name == "light":
                    fit(page.tab)
                    keep(page.tab.screenshot(), "builder-fit.png")
                context.close()


def plan_nvme(page: Any) -> None:
    """Enter a plan at stage 3 with swap files, for a card that is just large enough."""
    page.use_builtin("SDXL on 12 GB")
    page.tab.locator("#config-zero-optimization-stage-3").check()
    page.tab.locator("#config-zero-optimization-offload-optimizer-device-2").check()
    page.tab.fill("#setup-vram", "12")
    page.tab.fill("#setup-nvme", "200")
    page.settle()
    page.tab.click("#status-close")
    page.tab.evaluate("document.querySelector('#stage-3-card').open = false; scrollTo(0, 0)")
    page.tab.wait_for_timeout(500)


def fit(tab: Any) -> None:
    """Open the *Fit my card* dialog and wait for its answer."""
    tab.click("#fit-button")
    tab.wait_for_selector(".candidate")


def keep(picture: bytes, name: str) -> None:
    """Store a screenshot with few colours, which include the colours of the components."""
    from zerotune._util.palette import COMPONENTS

    image = Image.open(io.BytesIO(picture)).convert("RGB")
    meant = [int(colour[at : at + 2], 16) for colour in COMPONENTS.values() for at in (1, 3, 5)]
    usual = image.quantize(96, dither=Image.Dither.NONE).getpalette() or []
    few = Image.new("P", (1, 1))
    few.putpalette([*meant, *usual])
    image.quantize(palette=few, dither=Image.Dither.NONE).save(IMAGES / name, optimize=True)


if __name__ == "__main__":
    if shutil.which("chromium") is None:
        sys.exit("Chromium is not installed")
    main()
