"""What the tests of recipes share: captioned photographs, and several starts of one recipe."""

from __future__ import annotations

import importlib
import importlib.resources
from collections.abc import Mapping
from pathlib import Path

import torch


def photographs(folder: Path, captions: Mapping[str, str]) -> Path:
    """Photographs that scikit-image ships, each with a file of its caption."""
    folder.mkdir(parents=True)
    shipped = importlib.resources.files("skimage") / "data"
    for name, caption in captions.items():
        (folder / f"{name}.png").write_bytes((shipped / f"{name}.png").read_bytes())
        (folder / f"{name}.txt").write_text(caption)
    return folder


def started(recipe: str, starts: list[list[str]]) -> list[list[float]]:
    """The losses of each start, for ranks."""
    torch.set_num_threads(1)
    main = importlib.import_module(f"examples.recipes.{recipe}").main
    found = []
    for arguments in starts:
        torch.manual_seed(0)  # Of new adapters, as in a process of its own.
        found.append(main(arguments))
    return found
