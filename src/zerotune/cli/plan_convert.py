"""``zerotune plan convert``: the same plan in another format."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from zerotune.cli.planning import print_text, tell

if TYPE_CHECKING:
    from zerotune.decisions import Decision

NAME: Final = "convert"
SUMMARY: Final = "Write a configuration in another format, and say what that format cannot hold."

_FORMATS: Final = ("deepspeed", "accelerate", "trainer", "python")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "file", metavar="FILE", help="DeepSpeed JSON, a trainer's config.json, or accelerate's YAML"
    )
    parser.add_argument("--to", choices=_FORMATS, required=True, help="format to write")
    parser.add_argument(
        "-o",
        "--output",
        metavar="OUT",
        help="file to write, its predecessor kept as OUT.bak; printed when left out",
    )


def run(arguments: argparse.Namespace) -> int:
    """Convert; 0 also when the format cannot hold everything, which is said on stderr."""
    from zerotune.plan import DeepSpeedPlan
    from zerotune.plan.write import plan_document

    plan = DeepSpeedPlan.load(arguments.file)
    if arguments.output is None:
        document = plan_document(plan, arguments.to)
        _report((*plan.decisions, *document.decisions))
        print_text(document.text)
        return 0
    saved = plan.save(arguments.output, format=arguments.to)
    _report((*plan.decisions, *saved.decisions))
    for path in saved.paths:
        tell(f"wrote {path}")
    for backup in saved.backups:
        tell(f"kept {backup}")
    return 0


def _report(decisions: Iterable[Decision]) -> None:
    for decision in decisions:
        tell(f"[{decision.severity}] {decision}")
