"""Write the table of docs/families.md: deviations from the plain engine, and GPU memory.

``python docs/generate_families.py`` rewrites the page. With a file ``NOTES`` as its argument, it
first records the losses that the family tests wrote to this file (``ZEROTUNE_FAMILY_NOTES``).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from zerotune.diffusion.models.declared import (
    AuraFlow,
    Chroma,
    Flux,
    Flux2,
    Flux2Klein,
    FluxKontext,
    HiDream,
    HunyuanVideo,
    Krea2,
    LTXVideo,
    Lumina2,
    PixArtAlpha,
    PixArtSigma,
    QwenImage,
    QwenImageEdit,
    QwenImageEditPlus,
    Sana,
    Wan,
    WanLowNoise,
    ZImage,
)
from zerotune.diffusion.models.stable_diffusion import (
    StableDiffusion,
    StableDiffusion3,
    StableDiffusionXL,
)
from zerotune.errors import NothingFitsError
from zerotune.plan import DeepSpeedPlan
from zerotune.plan.families import family, family_names, model_family

DOCS: Final = Path(__file__).resolve().parent
TARGET: Final = DOCS / "families.md"
RECORDS: Final = DOCS / "families.json"
BEGIN, END = "<!-- runs: written by docs/generate_families.py -->", "<!-- end of runs -->"
CARDS: Final = (4, 6, 8, 10, 12, 16, 24, 32, 48, 80)
RANK: Final = 16
COLUMNS: Final = (
    *("family", "runs as", "all weights", "adapters", "edits", "clips"),
    *("published", "billions", "card: adapters", "card: all weights"),
)
FAMILIES: Final[Mapping[str, tuple[type, str | None]]] = {
    "sd15": (StableDiffusion, "sd15"),
    "sdxl": (StableDiffusionXL, "sdxl"),
    "sd3": (StableDiffusion3, "sd35-large"),
    "flux": (Flux, "flux"),
    "flux-kontext": (FluxKontext, "flux-kontext"),
    "flux2": (Flux2, "flux2"),
    "flux2-klein": (Flux2Klein, "flux2-klein-9b"),
    "qwen-image": (QwenImage, "qwen-image"),
    "qwen-image-edit": (QwenImageEdit, "qwen-image-edit"),
    "qwen-image-edit-plus": (QwenImageEditPlus, "qwen-image-edit-plus"),
    "z-image": (ZImage, "z-image"),
    "chroma": (Chroma, "chroma"),
    "krea2": (Krea2, "krea2"),
    "hidream": (HiDream, "hidream"),
    "sana": (Sana, "sana"),
    "lumina2": (Lumina2, "lumina2"),
    "aura-flow": (AuraFlow, "aura-flow"),
    "pixart-alpha": (PixArtAlpha, "pixart-alpha"),
    "pixart-sigma": (PixArtSigma, "pixart-sigma"),
    "wan": (Wan, "wan-1.3b"),
    "wan22": (Wan, "wan-14b"),
    "wan22-low": (WanLowNoise, "wan-14b"),
    "ltx": (LTXVideo, "ltx-video"),
    "hunyuan-video": (HunyuanVideo, "hunyuan-video"),
}
"""Family class, and published model for size and cards, by name in the recorded runs."""


def recorded(notes: Iterable[str]) -> dict[str, Any]:
    """Return the runs and the largest deviation of each family and variant, from a run's notes."""
    families: dict[str, dict[str, dict[str, Any]]] = {}
    for name, case, ranks, variant, deviation in map(json.loads, notes):
        kind = "adapters" if variant.startswith("lora") else "all weights"
        one = families.setdefault(name, {}).setdefault(kind, {"runs": [], "deviation": 0.0})
        one["runs"] = sorted({*one["runs"], f"{case}, {ranks} rank{'s' if ranks > 1 else ''}"})
        one["deviation"] = max(one["deviation"], deviation)
    found = {package: version(package) for package in ("deepspeed", "diffusers", "torch")}
    today = datetime.now(timezone.utc).date().isoformat()
    return {"date": today, "versions": found, "families": families}


def table(records: Mapping[str, Any]) -> str:
    """Return the table of all families and their runs."""
    *others, last = (f"{name} {one}" for name, one in records["versions"].items())
    introduction = (
        f"The runs in this table trained a tiny model of each class on {records['date']}, with "
        f"{', '.join(others)} and {last}. The columns *all weights* and *adapters* compare the "
        "losses of ZeRO runs with those of the plain engine, in fp32. Each value is the largest "
        "relative difference over all runs and steps. Plain diffusers loaded each exported model "
        "and reproduced the engine's predictions bit for bit. The last two columns give the "
        "smallest GPU on which the row's published model should fit in bf16 at batch size 1, "
        "according to `advise`, without streamed weights. Plans for image models assume "
        "1024 x 1024 pixels; plans for "
        "video models assume the clip size in "
        f"[what fits](fits.md). Plans for adapters assume rank {RANK} and 64 GiB of host memory; "
        "plans for all weights assume 128 GiB of host memory and 2 TB of NVMe."
    )
    lines = [introduction, "", f"| {' | '.join(COLUMNS)} |", f"|{'---|' * 7}{'--:|' * 3}"]
    for name, (kind, published) in FAMILIES.items():
        runs = records["families"].get(name, {})
        cells = [f"`{kind.__name__}`", name, _ran(runs, "all weights"), _ran(runs, "adapters")]
        cells += [_yes(getattr(kind, "reference", None)), _yes(getattr(kind, "clips", False))]
        lines.append(f"| {' | '.join([*cells, *_published(published)])} |")
    return "\n".join(lines)


def _ran(runs: Mapping[str, Mapping[str, Any]], kind: str) -> str:
    if kind not in runs:
        return "not run"
    count, deviation = len(runs[kind]["runs"]), runs[kind]["deviation"]
    exact = "the same" if deviation == 0 else f"{deviation:.0e}"
    return f"{exact} ({count} run{'s' if count > 1 else ''})"


def _yes(value: Any) -> str:
    return "yes" if value else ""


def _published(name: str | None) -> list[str]:
    if name is None or name not in family_names():
        return ["", "", "", ""]
    size = f"{family(name).numel / 1e9:.1f}"
    adapters = _smallest(name, lora=RANK, ram="64GiB", nvme="0")
    return [name, size, adapters, _smallest(name, lora=None, ram="128GiB", nvme="2TB")]


def _smallest(name: str, *, lora: int | None, ram: str, nvme: str) -> str:
    """Return the smallest card with a plan; larger cards have a plan too."""
    few, many = 0, len(CARDS)
    clips = model_family(name).frames is not None
    while few < many:
        middle = (few + many) // 2
        try:
            DeepSpeedPlan.advise(
                name,
                vram=f"{CARDS[middle]}GiB",
                ram=ram,
                nvme=nvme,
                resolution=None if clips else 1024,
                precision="bf16",
                lora=lora,
                streamed=False,
            )
        except NothingFitsError:
            few = middle + 1
        else:
            many = middle
    return f"{CARDS[few]} GB" if few < len(CARDS) else "none"


def page(text: str, records: Mapping[str, Any]) -> str:
    """Return the page with the table of ``records``."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table(records)}\n\n{END}{after}"


def stored() -> dict[str, Any]:
    """Return the recorded runs."""
    found: dict[str, Any] = json.loads(RECORDS.read_text(encoding="utf-8"))
    return found


def main(arguments: list[str]) -> None:
    """Record a run if ``arguments`` name its notes, and write the page."""
    if arguments:
        notes = Path(arguments[0]).read_text(encoding="utf-8").splitlines()
        RECORDS.write_text(json.dumps(recorded(notes), indent=1) + "\n", encoding="utf-8")
    TARGET.write_text(page(TARGET.read_text(encoding="utf-8"), stored()), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
