"""``zerotune plan explain``: what a plan means, what runs, and what it needs."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, Final

import attrs

from zerotune.cli.planning import (
    add_output,
    add_workload,
    positive,
    print_json,
    print_text,
    refuse_unused,
    size_argument,
)

if TYPE_CHECKING:
    from zerotune.plan import DeepSpeedPlan
    from zerotune.plan.memory.model import MemoryEstimate
    from zerotune.plan.text import RankBudget
    from zerotune.platform import Platform

NAME: Final = "explain"
SUMMARY: Final = "Show what a plan means and, for a model, what will run and what it needs."

_ACCELERATORS: Final = ("cuda", "rocm", "mps", "xpu", "cpu")
_NEED_A_MODEL: Final = ("batch", "resolution", "no_gradient_checkpointing", "chart")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("file", metavar="FILE", help="DeepSpeed JSON, or accelerate's YAML")
    model = parser.add_argument_group("model")
    model.add_argument("--family", metavar="NAME", help="cost the plan for this model (sdxl)")
    model.add_argument("--batch", type=positive, metavar="N", help="samples per rank and pass")
    model.add_argument("--resolution", type=positive, metavar="N", help="pixels of a side")
    model.add_argument(
        "--no-gradient-checkpointing", action="store_true", help="keep every activation"
    )
    machine = parser.add_argument_group("machine", "this one, unless something of it is given")
    machine.add_argument("--accelerator", choices=_ACCELERATORS, help="what it trains on")
    machine.add_argument("--vram", metavar="SIZE", help="memory of each device (12GiB)")
    machine.add_argument("--ram", metavar="SIZE", help="memory of the host (64GiB)")
    machine.add_argument("--nvme", metavar="SIZE", help="disk space for swap files (500GB)")
    add_workload(parser)
    add_output(parser)


def run(arguments: argparse.Namespace) -> int:
    """Explain; 1 when the rules find an error or memory does not suffice, else 0."""
    from zerotune.plan import DeepSpeedPlan

    plan = DeepSpeedPlan.load(arguments.file)
    if arguments.family is None:
        refuse_unused(arguments, _NEED_A_MODEL, "--family NAME")
        return _explain_plan(plan, arguments)
    return _explain_cost(plan, arguments)


def _explain_plan(plan: DeepSpeedPlan, arguments: argparse.Namespace) -> int:
    platform = _described(arguments)
    summary = plan.summary(world_size=arguments.world_size, platform=platform)
    if arguments.json:
        print_json(summary)
    elif arguments.markdown:
        print_text(plan.explain_markdown(world_size=arguments.world_size, platform=platform))
    else:
        print_text(plan.explain(world_size=arguments.world_size, platform=platform))
    errors = [finding for finding in summary["findings"] if finding["severity"] == "error"]
    return 1 if errors else 0


def _explain_cost(plan: DeepSpeedPlan, arguments: argparse.Namespace) -> int:
    from zerotune.plan.text import explain_estimate, fits, markdown_estimate

    platform = _described(arguments) or _detected()
    estimate = _estimate(plan, platform, arguments)
    budget = _budget(platform, estimate, arguments)
    every = fits(estimate, budget)
    if arguments.chart:
        from zerotune.plan.charts import plot_memory

        plot_memory(estimate, arguments.chart, budget=budget)
    if arguments.json:
        print_json(
            {
                "resolved": estimate.resolved.summary(),
                "estimate": estimate.to_dict(),
                "fits": [{**attrs.asdict(fit), "fits": fit.fits} for fit in every],
            }
        )
    elif arguments.markdown:
        print_text(estimate.resolved.explain_markdown())
        print_text("\n" + markdown_estimate(estimate, budget=budget))
    else:
        print_text(estimate.resolved.explain())
        print_text("\n" + explain_estimate(estimate, budget=budget))
    return 0 if all(fit.fits for fit in every) else 1


def _estimate(
    plan: DeepSpeedPlan, platform: Platform, arguments: argparse.Namespace
) -> MemoryEstimate:
    given: dict[str, Any] = {"batch": arguments.batch, "resolution": arguments.resolution}
    return plan.estimate(
        arguments.family,
        platform=platform,
        world_size=arguments.world_size,
        ema=arguments.ema,
        gradient_checkpointing=not arguments.no_gradient_checkpointing,
        **{name: value for name, value in given.items() if value is not None},
    )


def _described(arguments: argparse.Namespace) -> Platform | None:
    """The machine the arguments speak of; ``None`` when they do not."""
    from zerotune.platform import Platform

    vram = size_argument(arguments.vram, "--vram")
    ram = size_argument(arguments.ram, "--ram")
    if (arguments.accelerator, vram, ram) == (None, None, None):
        return None
    given: dict[str, Any] = {"vram": vram, "ram": ram}
    return Platform.synthetic(
        arguments.accelerator or "cuda",
        device_count=arguments.world_size,
        **{name: size for name, size in given.items() if size is not None},
    )


def _detected() -> Platform:
    from zerotune.platform import detect_platform

    return detect_platform(log=False)


def _budget(
    platform: Platform, estimate: MemoryEstimate, arguments: argparse.Namespace
) -> RankBudget:
    """What one rank may use, as far as it was given or, of this machine, detected."""
    described = _described(arguments) is not None
    ranks = estimate.workload.ranks_per_machine or estimate.resolved.world_size
    vram = size_argument(arguments.vram, "--vram") if described else platform.vram
    ram = size_argument(arguments.ram, "--ram") if described else platform.host_memory.limit
    nvme = size_argument(arguments.nvme, "--nvme")
    sizes: dict[Any, int | None] = {
        "device": vram,
        "host": None if ram is None else ram // ranks,
        "nvme": None if nvme is None else nvme // ranks,
    }
    return {place: size for place, size in sizes.items() if size is not None}
