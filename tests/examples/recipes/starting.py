"""Helpers of the recipe tests: captioned photographs, and several starts of one recipe."""

from __future__ import annotations

import contextlib
import importlib
import importlib.resources
import io
from collections.abc import Mapping
from pathlib import Path

import torch


def photographs(folder: Path, captions: Mapping[str, str]) -> Path:
    """Write photographs from scikit-image, each with a caption file."""
    folder.mkdir(parents=True)
    shipped = importlib.resources.files("skimage") / "data"
    for name, caption in captions.items():
        (folder / f"{name}.png").write_bytes((shipped / f"{name}.png").read_bytes())
        (folder / f"{name}.txt").write_text(caption)
    return folder


def started(recipe: str, starts: list[list[str]]) -> tuple[list[list[float]], str]:
    """Run a recipe once per list of arguments, on each rank; return losses and the last output."""
    torch.set_num_threads(1)
    main = importlib.import_module(f"examples.recipes.{recipe}").main
    found = []
    for arguments in starts:
        torch.manual_seed(0)  # Seed new adapters as in a fresh process.
        with contextlib.redirect_stdout(io.StringIO()) as said:
            found.append(main(arguments))
    return found, said.getvalue()
