"""Add the installed DeepSpeed to the releases whose replaced methods were reviewed and tested.

First review the changes in the methods that ``zerotune.backend.deepspeed.start`` names, and run the
engine tests; then run ``python -m tools.deepspeed_sources``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import zerotune
from zerotune.backend.deepspeed.start import digests
from zerotune.backend.upstream import require_deepspeed

FILE: Final = Path(zerotune.__file__).parent / "backend" / "data" / "sources.json"


def add_installed(content: dict[str, dict[str, list[str]]], version: str) -> None:
    """Add the installed release to each of its methods' digests."""
    for name, digest in digests().items():
        if digest is None:
            raise SystemExit(f"DeepSpeed {version} has no {name}")
        releases = content.setdefault(name, {}).setdefault(digest, [])
        if version not in releases:
            releases.append(version)


def main() -> None:
    version = require_deepspeed(accelerator="cpu").__version__
    content = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    add_installed(content, version)
    FILE.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
