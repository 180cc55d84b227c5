"""``zerotune plan advise``: which plan fits a model into a machine."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from zerotune.cli.planning import (
    add_output,
    add_workload,
    positive,
    print_json,
    print_text,
    size_argument,
    tell,
)
from zerotune.errors import InvalidValueError

if TYPE_CHECKING:
    from zerotune.errors import NothingFitsError
    from zerotune.plan import DeepSpeedPlan
    from zerotune.plan.advising.values import Advice
    from zerotune.plan.memory.bars import Budget
    from zerotune.plan.memory.values import MemoryEstimate, Place

NAME: Final = "advise"
SUMMARY: Final = "Find the simplest plan that fits a model into this much memory."


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--family", metavar="NAME", required=True, help="the model (sdxl)")
    machine = parser.add_argument_group("machine", "memory that is not given is this machine's")
    machine.add_argument("--vram", metavar="SIZE", help="memory of each device (12GiB)")
    machine.add_argument("--ram", metavar="SIZE", help="memory of the host (64GiB)")
    machine.add_argument(
        "--nvme", metavar="SIZE", default="0", help="disk space for swap files (500GB); none"
    )
    training = parser.add_argument_group("training")
    training.add_argument(
        "--batch", type=positive, default=1, metavar="N", help="samples per rank and pass"
    )
    training.add_argument(
        "--resolution", type=positive, default=1024, metavar="N", help="pixels of a side"
    )
    training.add_argument("--optimizer", default="AdamW", metavar="NAME", help="AdamW by default")
    training.add_argument("--precision", choices=("auto", "bf16", "fp16", "fp32"), default="auto")
    add_workload(parser)
    add_output(parser)
    parser.add_argument("-o", "--output", metavar="FILE", help="save the plan; .json or .yaml")


def run(arguments: argparse.Namespace) -> int:
    """Advise; 0 when something fits, else 1."""
    from zerotune.errors import NothingFitsError
    from zerotune.plan import DeepSpeedPlan

    sizes = _sizes(arguments)
    try:
        advice = DeepSpeedPlan.advise(
            arguments.family,
            **sizes,
            batch=arguments.batch,
            resolution=arguments.resolution,
            world_size=arguments.world_size,
            precision=arguments.precision,
            ema=arguments.ema,
            optimizer=arguments.optimizer,
        )
    except NothingFitsError as error:
        _report_nothing(error, sizes, arguments)
        return 1
    _report(advice, arguments)
    return 0


def _sizes(arguments: argparse.Namespace) -> dict[str, int]:
    """Bytes of each kind of memory; those not given are this machine's, which is said."""
    given = {
        "vram": size_argument(arguments.vram, "--vram"),
        "ram": size_argument(arguments.ram, "--ram"),
        "nvme": size_argument(arguments.nvme, "--nvme"),
    }
    if None in given.values():
        from zerotune.plan.memory.sizes import format_size
        from zerotune.platform import detect_platform

        platform = detect_platform(log=False)
        detected = {"vram": platform.vram, "ram": platform.host_memory.limit}
        for name, size in detected.items():
            if given[name] is None and size is None:
                raise InvalidValueError(
                    "this machine has no accelerator whose memory could be taken",
                    key=f"--{name}",
                    fix=f"say for how much to plan: --{name} 12GiB",
                )
            if given[name] is None and size is not None:
                given[name] = size
                tell(f"--{name} not given: planning with this machine's {format_size(size)}")
    return {name: size for name, size in given.items() if size is not None}


def _report(advice: Advice, arguments: argparse.Namespace) -> None:
    from zerotune.plan.advising.reporting import explain_advice, markdown_advice, rank_budget

    budget = advice.budget
    sizes: Mapping[Place, int] = {
        "device": budget.device,
        "host": budget.host,
        "nvme": budget.nvme,
    }
    _draw(advice.estimate, rank_budget(sizes, advice.estimate), arguments)
    if arguments.json:
        print_json(advice.to_dict())
    else:
        print_text(markdown_advice(advice) if arguments.markdown else explain_advice(advice))
    if arguments.output:
        _save(advice.plan, arguments.output)


def _save(plan: DeepSpeedPlan, path: str) -> None:
    saved = plan.save(path)
    for decision in saved.decisions:
        tell(str(decision))
    kept = "".join(f", what it replaced in {backup}" for backup in saved.backups)
    tell(f"the plan is in {path}{kept}")


def _report_nothing(
    error: NothingFitsError, sizes: dict[str, int], arguments: argparse.Namespace
) -> None:
    from zerotune.plan.advising.reporting import candidate_data, explain_nearest, rank_budget

    nearest = error.nearest
    budget: Mapping[Place, int] = {
        "device": sizes["vram"],
        "host": sizes["ram"],
        "nvme": sizes["nvme"],
    }
    _draw(nearest.estimate, rank_budget(budget, nearest.estimate), arguments)
    if arguments.json:
        print_json({"fits": False, "reason": str(error), "nearest": candidate_data(nearest)})
    else:
        print_text(f"{error}\n\n{explain_nearest(nearest, budget=budget)}")


def _draw(estimate: MemoryEstimate, budget: Budget, arguments: argparse.Namespace) -> None:
    if arguments.chart:
        from zerotune.plan.memory.chart import plot_memory

        plot_memory(estimate, arguments.chart, budget=budget)
