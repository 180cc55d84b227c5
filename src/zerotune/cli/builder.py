"""``zerotune builder``: a page that builds, explains and saves a plan."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Final

from zerotune.cli.plan import option_of
from zerotune.plan.values import Integer

_HIGHEST_PORT: Final = 65535


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "--plan",
        type=Path,
        metavar="FILE",
        help="plan file to open in the page; the Apply button saves to this file",
    )
    parser.add_argument(
        "--root",
        type=Path,
        metavar="DIR",
        help="the only folder that the page may access; by default the plan's folder, or the "
        "working directory",
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; the default accepts connections from this machine only; others "
        "require the token in ZEROTUNE_BUILDER_TOKEN, or one that is created",
    )
    parser.add_argument(
        "--port",
        type=option_of(Integer(minimum=0, maximum=_HIGHEST_PORT, auto=False)),
        default=8265,
        metavar="N",
        help="port of the server; default 8265, 0 selects a free port",
    )
    parser.add_argument(
        "--no-browser",
        action="store_true",
        help="print the address without opening a browser (the default with a token)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve until interrupted."""
    # Imported by name, because the builder is an optional extra.
    importlib.import_module("zerotune.builder").serve(
        host=arguments.host,
        port=arguments.port,
        plan_file=arguments.plan,
        root=arguments.root,
        open_browser=not arguments.no_browser,
    )
    return 0
