"""``zerotune plan advise``: which plan fits a model into a machine."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from zerotune.cli.planning import (
    add_output,
    add_workload,
    positive,
    print_json,
    print_text,
    size_argument,
    tell,
)

if TYPE_CHECKING:
    from zerotune.errors import NothingFitsError
    from zerotune.plan import DeepSpeedPlan
    from zerotune.plan.advise import Advice
    from zerotune.plan.memory.model import MemoryEstimate, Place
    from zerotune.plan.text import RankBudget

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
        "--resolution",
        type=positive,
        metavar="N",
        help="pixels of a side; the model's own by default",
    )
    training.add_argument("--optimizer", default="AdamW", metavar="NAME", help="AdamW by default")
    training.add_argument("--precision", choices=("auto", "bf16", "fp16", "fp32"), default="auto")
    add_workload(parser)
    add_output(parser)
    parser.add_argument("-o", "--output", metavar="FILE", help="save the plan; .json or .yaml")


def run(arguments: argparse.Namespace) -> int:
    """Advise; 0 when something fits, else 1."""
    from zerotune.errors import NothingFitsError
    from zerotune.optim.naming import parse_optimizer_name
    from zerotune.plan import DeepSpeedPlan

    optimizer = parse_optimizer_name(arguments.optimizer, key="--optimizer").canonical
    machine = _machine(arguments)
    try:
        advice = DeepSpeedPlan.advise(
            arguments.family,
            **machine,
            batch=arguments.batch,
            resolution=arguments.resolution,
            world_size=arguments.world_size,
            precision=arguments.precision,
            ema=arguments.ema,
            optimizer=optimizer,
        )
    except NothingFitsError as error:
        _report_nothing(error, machine, arguments)
        return 1
    _report(advice, arguments)
    return 0


def _machine(arguments: argparse.Namespace) -> dict[str, Any]:
    """The machine to plan for; memory that is not given is this one's, which is said."""
    vram = size_argument(arguments.vram, "--vram")
    ram = size_argument(arguments.ram, "--ram")
    nvme = size_argument(arguments.nvme, "--nvme")
    if vram is not None and ram is not None:
        return {"vram": vram, "ram": ram, "nvme": nvme}
    from zerotune._util.text import format_size
    from zerotune.platform import detect_platform

    platform = detect_platform(log=False)
    if ram is None:
        ram = platform.host_memory.limit
        tell(f"--ram not given: planning with this machine's {format_size(ram)}")
    if vram is None and platform.vram is not None:
        vram = platform.vram
        tell(f"--vram not given: planning with this machine's {format_size(vram)}")
    elif vram is None:
        tell("--vram not given: planning to train on this machine's processor")
    return {"vram": vram, "ram": ram, "nvme": nvme, "platform": platform}


def _report(advice: Advice, arguments: argparse.Namespace) -> None:
    from zerotune.plan.text import explain_advice, markdown_advice, rank_budget

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
    error: NothingFitsError, machine: Mapping[str, Any], arguments: argparse.Namespace
) -> None:
    from zerotune.plan.text import candidate_data, explain_nearest, nearest_budget

    nearest = error.nearest
    budget: Mapping[Place, int] = {
        "device": machine["vram"] or 0,
        "host": machine["ram"],
        "nvme": machine["nvme"],
    }
    _draw(nearest.estimate, nearest_budget(nearest, budget=budget), arguments)
    if arguments.json:
        print_json({"fits": False, "reason": str(error), "nearest": candidate_data(nearest)})
    else:
        print_text(f"{error}\n\n{explain_nearest(nearest, budget=budget)}")


def _draw(estimate: MemoryEstimate, budget: RankBudget, arguments: argparse.Namespace) -> None:
    if arguments.chart:
        from zerotune.plan.charts import plot_memory

        plot_memory(estimate, arguments.chart, budget=budget)
