"""``zerotune checkpoint``: show, verify and convert checkpoints."""

from __future__ import annotations

import argparse
import importlib.util
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from zerotune._util.table import Page, Table
from zerotune._util.text import counted, format_size
from zerotune.cli import Command, add_commands, print_json, print_text
from zerotune.errors import MissingDependencyError
from zerotune.plan.sections import PRECISIONS

if TYPE_CHECKING:
    from zerotune.checkpoint.manifest import Manifest


def _add_path(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, metavar="PATH", help="the checkpoint's folder")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def _configure_convert(parser: argparse.ArgumentParser) -> None:
    _add_path(parser)
    parser.add_argument("target", type=Path, metavar="TARGET", help="path to write; must not exist")
    parser.add_argument(
        "--shadow", metavar="NAME", help="write this EMA shadow instead of the trained weights"
    )
    parser.add_argument(
        "--dtype",
        choices=PRECISIONS,
        default="fp32",
        help="precision of the weights in a model folder (default: %(default)s)",
    )
    parser.add_argument(
        "--base",
        type=Path,
        metavar="MODEL",
        help="model folder that training started from, which has the frozen weights",
    )


def _convert(arguments: argparse.Namespace) -> int:
    from zerotune.checkpoint.export.model import export_checkpoint

    written = export_checkpoint(
        arguments.path,
        arguments.target,
        shadow=arguments.shadow,
        dtype=arguments.dtype,
        base=arguments.base,
    )
    if arguments.json:
        print_json({"source": str(arguments.path), "written": str(written)})
    else:
        print_text(f"written to {written}")
    return 0


def _show(arguments: argparse.Namespace) -> int:
    from zerotune.checkpoint.folders import find_checkpoint

    folder, manifest = find_checkpoint(arguments.path)
    if arguments.json:
        import attrs

        content = attrs.asdict(manifest)
        # Only the run needs these values, such as generator states.
        content["extra"] = sorted(manifest.extra)
        print_json({"path": str(folder), "nbytes": manifest.nbytes, **content})
    else:
        _contents_page(manifest).print()
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from zerotune.checkpoint import files, folders

    folder, manifest = folders.find_checkpoint(arguments.path)
    damage = files.find_damage(folder, manifest)
    if arguments.json:
        bad = [{"file": each.key, "reason": each.reason} for each in damage]
        print_json({"path": str(folder), "whole": not damage, "damage": bad})
    elif damage:
        print_text("\n".join(f"{each.key}: {each.reason}" for each in damage))
    else:
        print_text(
            f"{counted(len(manifest.files), 'file')}, {format_size(manifest.nbytes)}: intact"
        )
    return 1 if damage else 0


def _contents_page(manifest: Manifest) -> Page:
    elements = sum(math.prod(record.shape) for record in manifest.parameters)
    saved = sorted({state for record in manifest.parameters for state in record.states})
    formats = {state: manifest.format_of(state) for state in saved}
    states = [f"{state} ({each.codebook or each.dtype})" for state, each in formats.items()]
    versions = ", ".join(f"{name} {number}" for name, number in sorted(manifest.versions.items()))
    plan, saved_under = manifest.plan, "no plan: weights only"
    if plan is not None:
        kind = "without DeepSpeed" if plan.engine == "plain" else f"stage {plan.stage}"
        saved_under = (
            f"{kind}, offload {plan.offload_optimizer}, {plan.precision}, "
            f"{plan.optimizer['name']}, {manifest.world_size} process(es)"
        )
    frozen = [("frozen", f"{len(manifest.frozen):,}, not included")] if manifest.frozen else []
    contents = (
        ("written by", f"{manifest.origin}, {manifest.created}"),
        ("step", f"{manifest.state.global_step:,} ({manifest.state.skipped_steps} skipped)"),
        ("model", str((manifest.model or {}).get("_class_name", "not a diffusers model"))),
        ("parameters", f"{len(manifest.parameters):,} with {elements:,} elements, fp32"),
        *frozen,
        ("states", ", ".join(states) or "none"),
        ("shadows", ", ".join(manifest.shadows) or "none"),
        ("saved under", saved_under),
        ("versions", versions),
        ("size", format_size(manifest.nbytes)),
    )
    files = tuple((file.name, format_size(file.nbytes)) for file in manifest.files)
    return Page(
        blocks=(Table(rows=contents, widths=(11,), gap=1, indent=0), Table(rows=files, align="lr"))
    )


_COMMANDS: Final = {
    "show": "Print the contents of a checkpoint, as listed in its manifest.",
    "verify": "Verify the size and hash of every file.",
    "convert": "Convert a checkpoint to a diffusers model folder.",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands of ``checkpoint``."""
    add_commands(parser, _COMMANDS, _command)


def _command(name: str) -> Command:
    act = {"show": _show, "verify": _verify, "convert": _convert}[name]
    return Command(_configure_convert if name == "convert" else _add_path, partial(_run, act))


def _run(act: Callable[[argparse.Namespace], int], arguments: argparse.Namespace) -> int:
    if importlib.util.find_spec("torch") is None:
        raise MissingDependencyError(
            "is not installed, but reading checkpoints requires it", "pip install torch", "torch"
        )
    return act(arguments)
