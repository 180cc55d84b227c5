"""``zerotune plan convert``, ``explain`` and ``advise``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

import attrs

from zerotune._util.table import Line
from zerotune.cli import Command, print_json, print_text, tell
from zerotune.cli.options import (
    add_configuration,
    add_engine,
    add_family,
    add_machine,
    add_output,
    add_sample,
    add_training,
    add_workload,
    by_place,
    described_machine,
    engine_of,
    estimated_model,
    machine_of,
    sizes_of,
)
from zerotune.cli.plan import (
    WORLD_SIZE_HELP,
    add_file,
    add_update,
    number_of_processes,
    set_world_size,
)
from zerotune.decisions import Decision
from zerotune.errors import InvalidValueError, NothingFitsError
from zerotune.plan.charts import plot_memory
from zerotune.plan.optimizer.names import parse_optimizer_name
from zerotune.plan.plan import Advice, DeepSpeedPlan, MemoryEstimate
from zerotune.plan.text.advice import (
    advice_page,
    nearest_budget,
    nearest_data,
    nearest_page,
    places_of,
    rank_budget,
    time_data,
    time_words,
)
from zerotune.plan.text.memory import WIDTH, RankBudget, estimate_data, estimate_page
from zerotune.plan.text.plan import plan_page, resolved_page
from zerotune.plan.write import FORMATS, launchable, plan_document
from zerotune.platform import detect_platform
from zerotune.platform.facts import ACCELERATORS


def _draw_chart(
    estimate: MemoryEstimate, budget: RankBudget, arguments: argparse.Namespace
) -> None:
    if arguments.chart:
        try:
            plot_memory(estimate, arguments.chart, budget=budget)
        except InvalidValueError as error:
            raise InvalidValueError(error.reason, error.fix, "--chart", arguments.chart) from error


# -- convert


def _configure_convert(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_file(parser)
    parser.add_argument("--to", choices=FORMATS, required=True, help="target format")
    parser.add_argument(
        "-o",
        "--output",
        metavar="OUT",
        help="file to write (default: print the result); an existing file is kept as OUT.bak",
    )
    parser.add_argument(
        "--num-processes",
        type=number_of_processes,
        default=1,
        metavar="N",
        help="number of processes for an accelerate YAML if FILE does not set it; default 1",
    )
    parser.add_argument(
        "--lossy",
        metavar="KEYS",
        default="",
        help="launch settings that may be dropped if the format does not support them "
        "(num_processes,gpu_ids)",
    )


def _convert(arguments: argparse.Namespace) -> int:
    """Convert a file; settings dropped by ``--lossy`` are listed on stderr."""
    plan = DeepSpeedPlan.load(arguments.file, also_known=arguments.also_known)
    if arguments.to == "accelerate":
        plan = launchable(plan, processes=arguments.num_processes)
    lossy = [name for name in arguments.lossy.split(",") if name.strip()]
    if arguments.output is None:
        document = plan_document(plan, arguments.to, lossy=lossy)
        _tell_decisions((*plan.decisions, *document.decisions))
        print_text(document.text)
        return 0
    saved = plan.save(arguments.output, format=arguments.to, lossy=lossy)
    _tell_decisions((*plan.decisions, *saved.decisions))
    for path in saved.paths:
        tell(f"wrote {path}")
    for backup in saved.backups:
        tell(f"kept {backup}")
    return 0


def _tell_decisions(decisions: Iterable[Decision]) -> None:
    for decision in decisions:
        tell(f"[{decision.severity}] {decision}")


# -- explain


_NEED_A_MODEL: Final = (
    "batch",
    "resolution",
    "frames",
    "no_gradient_checkpointing",
    "activation_offload",
    "lora",
    "base_dtype",
    "model",
    "chart",
    "engine",
    "streamed",
    "keep",
    "update",
)


def _configure_explain(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_file(parser)
    model = parser.add_argument_group("model")
    add_family(model, what="estimate the plan for this model")
    add_configuration(model)
    add_sample(model)
    model.add_argument(
        "--no-gradient-checkpointing", action="store_true", help="keep all activations"
    )
    model.add_argument(
        "--activation-offload",
        action="store_true",
        help="store the inputs of recomputed blocks in host memory",
    )
    add_engine(parser)
    machine = add_machine(
        parser,
        "to plan for a different machine, describe it; the default is this machine",
    )
    machine.add_argument("--accelerator", choices=ACCELERATORS, help="accelerator for training")
    add_workload(parser, None, WORLD_SIZE_HELP)
    add_output(parser)


def _explain(arguments: argparse.Namespace) -> int:
    """Explain a plan; return 1 if a rule finds an error or memory is insufficient, else 0."""
    plan = DeepSpeedPlan.load(arguments.file, also_known=arguments.also_known)
    set_world_size(arguments, plan)
    if arguments.family is None:
        for name in _NEED_A_MODEL:
            if getattr(arguments, name) not in (None, False):
                raise InvalidValueError(
                    "has no effect without --family NAME",
                    "add --family NAME, or remove this option",
                    f"--{name.replace('_', '-')}",
                )
        platform = described_machine(arguments)
        summary = plan.summary(world_size=arguments.world_size, platform=platform)
        if arguments.json:
            print_json(summary)
        else:
            plan_page(summary).print()
        return int(any(finding["severity"] == "error" for finding in summary["findings"]))
    return _explain_cost(arguments, plan)


def _explain_cost(arguments: argparse.Namespace, plan: DeepSpeedPlan) -> int:
    sizes: dict[str, int | None] = {**sizes_of(arguments)}
    platform = described_machine(arguments)
    if platform is None:
        platform = detect_platform(log=False)
        sizes = {"vram": platform.vram, "ram": platform.host_memory.limit, **sizes}
    elif arguments.card is not None:
        sizes = {"vram": platform.vram, **sizes}
    given = {name: getattr(arguments, name) for name in ("batch", "resolution", "frames")}
    estimate = plan.estimate(
        estimated_model(arguments),
        platform=platform,
        world_size=arguments.world_size,
        ema=arguments.ema,
        lora=arguments.lora,
        base_dtype=arguments.base_dtype,
        gradient_checkpointing=not arguments.no_gradient_checkpointing,
        activation_offload=arguments.activation_offload,
        **engine_of(arguments),
        **{name: value for name, value in given.items() if value is not None},
    )
    budget = rank_budget(by_place(sizes), estimate)
    _draw_chart(estimate, budget, arguments)
    time = estimate.step_time()
    data: dict[str, Any] = {
        "resolved": estimate.resolved.summary(),
        "estimate": estimate_data(estimate, budget),
        "time": None if time is None else time_data(time),
    }
    if arguments.json:
        print_json(data)
    else:
        resolved_page(data["resolved"]).print()
        print_text("")
        page = estimate_page(data["estimate"])
        more = (Line(""), Line(time_words(data["time"]), indent=2)) if data["time"] else ()
        attrs.evolve(page, blocks=(*page.blocks, *more)).print(width=WIDTH)
    return 0 if all(fit["fits"] for fit in data["estimate"]["fits"]) else 1


# -- advise


def _configure_advise(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_family(parser, what="the model", required=True)
    add_configuration(parser)
    add_machine(parser)
    add_training(parser)
    parser.add_argument(
        "--streamed",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether a plan with streamed weights may be chosen; such plans are always listed",
    )
    add_update(parser)
    add_workload(parser)
    add_output(parser)
    parser.add_argument("--all", action="store_true", help="show all candidates instead of five")
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="save the plan in this .json or .yaml file"
    )


def _advise(arguments: argparse.Namespace) -> int:
    """Find the best plan; return 0 if a plan fits, else 1."""
    optimizer = parse_optimizer_name(arguments.optimizer, key="--optimizer").canonical
    model = estimated_model(arguments)
    machine = machine_of(arguments)
    try:
        advice = DeepSpeedPlan.advise(
            model,
            **machine,
            batch=arguments.batch or 1,
            resolution=arguments.resolution,
            frames=arguments.frames,
            world_size=arguments.world_size,
            precision=arguments.precision,
            ema=arguments.ema,
            lora=arguments.lora,
            base_dtype=arguments.base_dtype,
            gradient_clipping=arguments.gradient_clipping,
            optimizer=optimizer,
            streamed=arguments.streamed,
            update=arguments.update,
        )
    except NothingFitsError as error:
        _report_nothing(arguments, error, machine)
        return 1
    _report(arguments, advice)
    return 0


def _report(arguments: argparse.Namespace, advice: Advice) -> None:
    _draw_chart(advice.estimate, rank_budget(places_of(advice.budget), advice.estimate), arguments)
    data = advice.to_dict()
    if arguments.json:
        print_json(data)
    else:
        advice_page(data, every=arguments.all).print(width=WIDTH)
        hidden = sum(not one["foremost"] for one in data["candidates"])
        if hidden and not arguments.all:
            print_text(f"  --all shows {hidden} more")
    if arguments.output:
        saved = advice.plan.save(arguments.output)
        for decision in saved.decisions:
            tell(str(decision))
        kept = "".join(f"; the replaced file is kept as {backup}" for backup in saved.backups)
        tell(f"the plan is saved in {arguments.output}{kept}")
        beside = {
            "streamed": advice.streamed and (advice.streamed.to_dict() or True),
            "update": advice.update and advice.update.name,
            "activation_offload": advice.activation_offload,
        }
        for key, value in beside.items():
            if value:
                what, shown = key.replace("_", " "), value if key == "update" else json.dumps(value)
                tell(
                    f"the file cannot express {what}: write {key}: {shown} for zerotune train, or "
                    "pass the advice itself to Trainer"
                )


def _report_nothing(
    arguments: argparse.Namespace, error: NothingFitsError, machine: Mapping[str, Any]
) -> None:
    nearest = error.nearest
    budget = by_place({**machine, "vram": machine["vram"] or 0})
    _draw_chart(nearest.estimate, nearest_budget(nearest, budget=budget), arguments)
    data = nearest_data(nearest, str(error.in_shell()), budget=budget)
    if arguments.json:
        print_json(data)
    else:
        nearest_page(data).print(width=WIDTH)


CONVERT: Final = Command(_configure_convert, _convert)
EXPLAIN: Final = Command(_configure_explain, _explain)
ADVISE: Final = Command(_configure_advise, _advise)
