"""Write the shapes and activation costs of known model families into the package.

``python -m tools.families [NAME …]``; takes about two minutes per family. ``families.json``
contains the published configurations, the side of their images in pixels (for clips: of a square of
the same area), and the number of frames that their pipelines generate.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

import attrs
import diffusers

from zerotune.diffusion.configuration import ARGUMENTS, Configuration
from zerotune.diffusion.facts import count_facts
from zerotune.diffusion.models import declared
from zerotune.plan.families import facts_to_json

TARGET: Final = Path("src/zerotune/plan/families")
_PUBLISHED: Final[dict[str, Any]] = json.loads(
    Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
)
CONFIGURATIONS: Final[dict[str, tuple[dict[str, Any], int]]] = {
    name: (one["config"], one["resolution"]) for name, one in _PUBLISHED.items()
}
FRAMES: Final[dict[str, int]] = {
    name: one["frames"] for name, one in _PUBLISHED.items() if "frames" in one
}
EDITING: Final[dict[str, str]] = {
    name: one["family"] for name, one in _PUBLISHED.items() if "family" in one
}
"""Families of published models whose class name implies a different family."""
SDXL, SD3, FLUX = (CONFIGURATIONS[name][0] for name in ("sdxl", "sd3-medium", "flux"))


def _rounded(value: Any) -> Any:
    """Round floats to eight digits, to keep the file small."""
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(one) for one in value]
    return float(f"{value:.8g}") if isinstance(value, float) else value


def write_arguments() -> None:
    """Write the default arguments of all model classes, which digests of configurations need."""
    configurations = [Configuration(config) for config, _ in CONFIGURATIONS.values()]
    classes = {each.name: each.default_arguments() for each in configurations}
    known = {"diffusers": diffusers.__version__, "classes": classes}
    ARGUMENTS.write_text(json.dumps(known, sort_keys=True, default=repr) + "\n")


def main() -> None:
    write_arguments()
    for name in sys.argv[1:] or CONFIGURATIONS:
        config, resolution = CONFIGURATIONS[name]
        kind = getattr(declared, EDITING[name]) if name in EDITING else None
        facts = attrs.evolve(count_facts(config, family=kind), name=name)
        data = _rounded(facts_to_json(facts)) | {
            "class": config["_class_name"],
            "configuration": Configuration(config).digest,
            "resolution": resolution,
        }
        if name in FRAMES:
            data["frames"] = FRAMES[name]
        TARGET.mkdir(parents=True, exist_ok=True)
        (TARGET / f"{name}.json").write_text(json.dumps(data, separators=(",", ":")) + "\n")
        print(name, f"{facts.numel:,}", data["activations"], flush=True)


if __name__ == "__main__":
    main()
