"""``zerotune plan convert``, ``explain``, ``diff`` and ``advise``, and options that they share."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, get_args

from zerotune._util.table import Line, Page
from zerotune._util.text import format_size, parse_memory
from zerotune.cli import Below, print_json, print_page, print_text, tell
from zerotune.cli.plan import (
    FILE_HELP,
    WORLD_SIZE_HELP,
    add_file,
    add_reading,
    add_update,
    at_least_one,
    number_of_processes,
    option_of,
    set_world_size,
)
from zerotune.decisions import Decision
from zerotune.errors import (
    InvalidValueError,
    NothingFitsError,
    ZeroTuneError,
)
from zerotune.plan.candidates import PREFERENCES
from zerotune.plan.charts import plot_memory
from zerotune.plan.context import EngineName, Streaming
from zerotune.plan.facts import STORAGES
from zerotune.plan.families import ModelFamily, family_names, model_family
from zerotune.plan.memory.items import EMAPlace, Place
from zerotune.plan.memory.rates import card_named, card_platform
from zerotune.plan.optimizer.names import parse_optimizer_name
from zerotune.plan.plan import Advice, DeepSpeedPlan, MemoryEstimate
from zerotune.plan.sections import PRECISIONS
from zerotune.plan.text.advice import (
    FOREMOST,
    advice_page,
    candidate_data,
    foremost,
    nearest_budget,
    nearest_page,
    places_of,
    rank_budget,
    time_data,
    time_words,
)
from zerotune.plan.text.memory import WIDTH, RankBudget, estimate_page, fits
from zerotune.plan.text.plan import plan_page, resolved_page
from zerotune.plan.values import AUTO, Number
from zerotune.plan.write import FORMATS, launchable, plan_document
from zerotune.platform import CUDA, Platform, detect_platform
from zerotune.platform.facts import ACCELERATORS

# -- What the commands share.


FROM_HERE: Final = "sizes that are not given are taken from this machine"
LORA_HELP: Final = "train LoRA adapters of this rank instead of the full model"


def _add_workload(
    parser: argparse.ArgumentParser, world_size: int | None = 1, about: str = "processes; default 1"
) -> None:
    group = parser.add_argument_group("workload")
    group.add_argument(
        "--world-size", type=number_of_processes, default=world_size, metavar="N", help=about
    )
    group.add_argument(
        "--ema",
        choices=get_args(EMAPlace),
        default="none",
        help="where to keep an EMA of the weights",
    )
    group.add_argument("--lora", type=at_least_one, metavar="RANK", help=LORA_HELP)
    group.add_argument(
        "--base-dtype",
        metavar="DTYPE",
        help=f"quantization of the base model under adapters: {', '.join(STORAGES)}",
    )


def _add_training(parser: argparse.ArgumentParser) -> None:
    """Add the training options of ``advise``."""
    training = parser.add_argument_group("training")
    _add_sample(training)
    training.add_argument("--optimizer", default="AdamW", metavar="NAME", help="default AdamW")
    training.add_argument(
        "--precision",
        choices=(AUTO, *PRECISIONS),
        default=AUTO,
        help="default auto: chosen for the device",
    )
    training.add_argument(
        "--gradient-clipping",
        type=option_of(Number(auto=False)),
        default=1.0,
        metavar="NORM",
        help="maximum gradient norm; default 1, 0 disables clipping",
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print JSON; sizes are in bytes")
    group.add_argument(
        "--chart",
        metavar="FILE",
        help="write a chart of the memory per rank to this .png, .pdf or .svg file",
    )


def _add_sample(group: argparse._ArgumentGroup) -> None:
    """Add the options for the samples of a batch."""
    for name, what in (
        ("batch", "samples per rank and forward pass; default 1"),
        ("resolution", "image side in pixels; default the model's native size"),
        ("frames", "frames per clip; default the model's native length"),
    ):
        group.add_argument(f"--{name}", type=at_least_one, metavar="N", help=what)


def add_machine(parser: argparse.ArgumentParser, about: str = FROM_HERE) -> Any:
    """Add the options for the machine's memory, which ``sizes_of`` and ``machine_of`` read."""
    machine = parser.add_argument_group("machine", about)
    machine.add_argument(
        "--card",
        metavar="NAME",
        help="GPU whose published rates and memory are used, such as 4090 or H100 PCIe",
    )
    machine.add_argument(
        "--vram", metavar="SIZE", help="memory of each device, such as 12 or 12GiB"
    )
    machine.add_argument("--ram", metavar="SIZE", help="memory of the host, such as 64 or 64GiB")
    machine.add_argument("--nvme", metavar="SIZE", help="disk space for swap files, such as 500GB")
    return machine


def sizes_of(arguments: argparse.Namespace) -> dict[str, int]:
    """Return each memory option's value in bytes; numbers without a unit are in GiB."""
    # Not an argparse type, because argparse would drop the error's fix.
    given = {name: getattr(arguments, name) for name in ("vram", "ram", "nvme")}
    return {
        name: parse_memory(text, key=f"--{name}")
        for name, text in given.items()
        if text is not None
    }


def add_family(group: Any, *, what: str, required: bool = False) -> None:
    """Add the option for the model to estimate, which ``model_of`` reads."""
    names = ", ".join(family_names())
    group.add_argument(
        "--family",
        metavar="NAME",
        required=required,
        help=f"{what}: {names}; or your own class, as module:Class",
    )


def add_configuration(group: Any) -> None:
    """Add ``--model``, the folder with the configuration of a user's own model."""
    group.add_argument(
        "--model",
        metavar="FOLDER",
        help="folder of the pipeline whose model is estimated; requires --family module:Class",
    )


def _estimated_model(arguments: argparse.Namespace) -> ModelFamily:
    """Return the model to estimate; refuse ``--model`` without a class."""
    if arguments.model is not None and ":" not in arguments.family:
        raise InvalidValueError(
            "has no effect without --family module:Class",
            "remove this option, or pass the family's class",
            "--model",
            arguments.model,
        )
    return model_of(arguments)


def model_of(arguments: argparse.Namespace) -> ModelFamily:
    """Return the model to estimate: a known family, or one derived from the user's class."""
    name: str = arguments.family
    if ":" not in name:
        return model_family(name)
    from zerotune.diffusion.facts import family_facts

    folder = arguments.model
    return family_facts(name, folder=folder if folder and Path(folder).is_dir() else None)


def _draw_chart(
    estimate: MemoryEstimate, budget: RankBudget, arguments: argparse.Namespace
) -> None:
    if arguments.chart:
        folder = Path(arguments.chart).resolve().parent
        new = not folder.exists()
        try:
            plot_memory(estimate, arguments.chart, budget=budget)
        except InvalidValueError as error:
            raise InvalidValueError(error.reason, error.fix, "--chart", arguments.chart) from error
        if new:
            tell(f"created the folder {folder} for the chart")


# -- convert


class Convert(Below):
    """Write a configuration in another format."""

    @staticmethod
    def configure(parser: argparse.ArgumentParser) -> None:
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

    def run(self) -> int:
        """Convert a file; settings dropped by ``--lossy`` are listed on stderr."""
        plan = DeepSpeedPlan.load(self.arguments.file, also_known=self.arguments.also_known)
        if self.arguments.to == "accelerate":
            plan = launchable(plan, processes=self.arguments.num_processes)
        lossy = [name for name in self.arguments.lossy.split(",") if name.strip()]
        if self.arguments.output is None:
            document = plan_document(plan, self.arguments.to, lossy=lossy)
            _tell_decisions((*plan.decisions, *document.decisions))
            print_text(document.text)
            return 0
        saved = plan.save(self.arguments.output, format=self.arguments.to, lossy=lossy)
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


_ON_PROCESSOR: Final = "to train on this machine's CPU"
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


class Explain(Below):
    """Describe a plan and, with a model, its memory and time."""

    @staticmethod
    def configure(parser: argparse.ArgumentParser) -> None:
        """Add the arguments."""
        add_file(parser)
        model = parser.add_argument_group("model")
        add_family(model, what="estimate the plan for this model")
        add_configuration(model)
        _add_sample(model)
        model.add_argument(
            "--no-gradient-checkpointing", action="store_true", help="keep all activations"
        )
        model.add_argument(
            "--activation-offload",
            action="store_true",
            help="store the inputs of recomputed blocks in host memory",
        )
        _add_engine(parser)
        machine = add_machine(
            parser,
            "to plan for a different machine, describe it; the default is this machine",
        )
        machine.add_argument("--accelerator", choices=ACCELERATORS, help="accelerator for training")
        _add_workload(parser, None, WORLD_SIZE_HELP)
        _add_output(parser)

    def run(self) -> int:
        """Explain a plan; return 1 if a rule finds an error or memory is insufficient, else 0."""
        plan = DeepSpeedPlan.load(self.arguments.file, also_known=self.arguments.also_known)
        set_world_size(self.arguments, plan)
        if self.arguments.family is None:
            for name in _NEED_A_MODEL:
                if getattr(self.arguments, name) not in (None, False):
                    raise InvalidValueError(
                        "has no effect without --family NAME",
                        "add --family NAME, or remove this option",
                        f"--{name.replace('_', '-')}",
                    )
            platform = _described_machine(self.arguments)
            summary = plan.summary(world_size=self.arguments.world_size, platform=platform)
            if self.arguments.json:
                print_json(summary)
            else:
                print_page(plan_page(plan, world_size=self.arguments.world_size, platform=platform))
            return int(any(finding["severity"] == "error" for finding in summary["findings"]))
        return self._explain_cost(plan)

    def _explain_cost(self, plan: DeepSpeedPlan) -> int:
        sizes: dict[str, int | None] = {**sizes_of(self.arguments)}
        platform = _described_machine(self.arguments)
        if platform is None:
            platform = detect_platform(log=False)
            sizes = {"vram": platform.vram, "ram": platform.host_memory.limit, **sizes}
        elif self.arguments.card is not None:
            sizes = {"vram": platform.vram, **sizes}
        given = {name: getattr(self.arguments, name) for name in ("batch", "resolution", "frames")}
        estimate = plan.estimate(
            _estimated_model(self.arguments),
            platform=platform,
            world_size=self.arguments.world_size,
            ema=self.arguments.ema,
            lora=self.arguments.lora,
            base_dtype=self.arguments.base_dtype,
            gradient_checkpointing=not self.arguments.no_gradient_checkpointing,
            activation_offload=self.arguments.activation_offload,
            **_engine_of(self.arguments),
            **{name: value for name, value in given.items() if value is not None},
        )
        budget = rank_budget(_by_place(sizes), estimate)
        _draw_chart(estimate, budget, self.arguments)
        self._show_cost(estimate, budget)
        return 0 if all(fit.fits for fit in fits(estimate, budget)) else 1

    def _show_cost(self, estimate: MemoryEstimate, budget: RankBudget) -> None:
        import attrs

        time = estimate.step_time()
        if self.arguments.json:
            every = fits(estimate, budget)
            print_json(
                {
                    "resolved": estimate.resolved.summary(),
                    "estimate": estimate.to_dict(),
                    "fits": [{**attrs.asdict(fit), "fits": fit.fits} for fit in every],
                    "time": None if time is None else time_data(time),
                }
            )
            return
        page = estimate_page(estimate, budget=budget)
        if time is not None:
            page = Page(blocks=(*page.blocks, Line(""), Line(time_words(time), indent=2)))
        print_page(resolved_page(estimate.resolved))
        print_text("")
        print_page(page, width=WIDTH)


def _add_engine(parser: argparse.ArgumentParser) -> None:
    """Add the options that ``_engine_of`` reads."""
    group = parser.add_argument_group("engine", "for an Adam in host memory, as in plan.resolve")
    group.add_argument(
        "--engine",
        choices=get_args(EngineName),
        help="default: host where it is verified, else deepspeed",
    )
    group.add_argument(
        "--streamed", action="store_true", help="copy weights to the device while they are used"
    )
    group.add_argument(
        "--keep",
        metavar="SIZE",
        help="memory of each device for streamed weights, such as 6GiB; weights that fit stay "
        "there; default: room for three units",
    )
    add_update(group)


def _engine_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of the engine, as in ``DeepSpeedPlan.estimate``."""
    memory = arguments.keep and parse_memory(arguments.keep, key="--keep")
    streamed = Streaming(memory=memory) if memory else arguments.streamed or None
    return {"engine": arguments.engine, "streamed": streamed, "update": arguments.update}


def _by_place(sizes: Mapping[str, int | None]) -> dict[Place, int]:
    """Return the memory limits in bytes by place, without unlimited places."""
    places: dict[Place, str] = {"device": "vram", "host": "ram", "nvme": "nvme"}
    limits = {place: sizes.get(name) for place, name in places.items()}
    return {place: size for place, size in limits.items() if size is not None}


def _described_machine(arguments: argparse.Namespace) -> Platform | None:
    """Return the machine that the arguments describe; ``None`` if they describe none."""
    sizes: dict[str, Any] = sizes_of(arguments)
    sizes.pop("nvme", None)
    if arguments.card is not None:
        card = card_named(arguments.card, key="--card")
        if arguments.accelerator not in (None, card.accelerator):
            raise InvalidValueError(
                f"contradicts --card {arguments.card}",
                "remove one of the two options",
                "--accelerator",
                arguments.accelerator,
            )
        return card_platform(card, device_count=arguments.world_size, **sizes)
    if arguments.accelerator is None and not sizes:
        return None
    return Platform.synthetic(
        arguments.accelerator or CUDA, device_count=arguments.world_size, **sizes
    )


# -- diff


class Diff(Below):
    """Compare two configurations."""

    @staticmethod
    def configure(parser: argparse.ArgumentParser) -> None:
        """Add the arguments."""
        parser.add_argument("before", metavar="BEFORE", help=FILE_HELP)
        parser.add_argument("after", metavar="AFTER", help="the changed configuration")
        add_reading(parser)
        parser.add_argument("--json", action="store_true", help="print JSON")

    def run(self) -> int:
        """Compare two plans; return 0 if they are equal, else 1."""
        difference = self._loaded(self.arguments.before).diff(self._loaded(self.arguments.after))
        if self.arguments.json:
            print_json(difference.to_dict())
        else:
            print_page(difference.page())
        return int(bool(difference))

    def _loaded(self, path: str) -> DeepSpeedPlan:
        try:
            return DeepSpeedPlan.load(path, also_known=self.arguments.also_known)
        except ZeroTuneError:
            tell(f"{path} has errors, so the configurations cannot be compared")
            raise


# -- advise


class Advise(Below):
    """Find the fastest plan that fits."""

    @staticmethod
    def configure(parser: argparse.ArgumentParser) -> None:
        """Add the arguments."""
        add_family(parser, what="the model", required=True)
        add_configuration(parser)
        add_machine(parser)
        _add_training(parser)
        parser.add_argument(
            "--prefer",
            type=lambda text: text.replace("-", " "),
            choices=PREFERENCES,
            default=PREFERENCES[0],
            metavar=f"{{{','.join(each.replace(' ', '-') for each in PREFERENCES)}}}",
            help="how to choose among the plans that fit; default: by predicted seconds per step",
        )
        parser.add_argument(
            "--streamed",
            action=argparse.BooleanOptionalAction,
            default=True,
            help="whether a plan with streamed weights may be chosen; such plans are always listed",
        )
        add_update(parser)
        _add_workload(parser)
        _add_output(parser)
        parser.add_argument(
            "--all", action="store_true", help="show all candidates instead of five"
        )
        parser.add_argument(
            "-o", "--output", metavar="FILE", help="save the plan in this .json or .yaml file"
        )

    def run(self) -> int:
        """Find the best plan; return 0 if a plan fits, else 1."""
        optimizer = parse_optimizer_name(self.arguments.optimizer, key="--optimizer").canonical
        model = _estimated_model(self.arguments)
        machine = machine_of(self.arguments)
        try:
            advice = DeepSpeedPlan.advise(
                model,
                **machine,
                batch=self.arguments.batch or 1,
                resolution=self.arguments.resolution,
                frames=self.arguments.frames,
                world_size=self.arguments.world_size,
                precision=self.arguments.precision,
                ema=self.arguments.ema,
                lora=self.arguments.lora,
                base_dtype=self.arguments.base_dtype,
                gradient_clipping=self.arguments.gradient_clipping,
                optimizer=optimizer,
                prefer=self.arguments.prefer,
                streamed=self.arguments.streamed,
                update=self.arguments.update,
            )
        except NothingFitsError as error:
            self._report_nothing(error, machine)
            return 1
        self._report(advice)
        return 0

    def _report(self, advice: Advice) -> None:
        _draw_chart(
            advice.estimate, rank_budget(places_of(advice.budget), advice.estimate), self.arguments
        )
        if self.arguments.json:
            print_json(advice.to_dict())
        else:
            most = None if self.arguments.all else FOREMOST
            print_page(advice_page(advice, most=most), width=WIDTH)
            shown = len(advice.candidates if most is None else foremost(advice, most))
            if shown < len(advice.candidates):
                print_text(f"  --all shows {len(advice.candidates) - shown} more")
        if self.arguments.output:
            saved = advice.plan.save(self.arguments.output)
            for decision in saved.decisions:
                tell(str(decision))
            kept = "".join(f"; the replaced file is kept as {backup}" for backup in saved.backups)
            tell(f"the plan is saved in {self.arguments.output}{kept}")
            if advice.streamed is not None:
                tell(
                    "the file cannot express streaming: write streamed: "
                    f"{json.dumps(advice.streamed.to_dict() or True)} for zerotune train, or pass "
                    "it to plan.resolve"
                )
            if advice.update is not None:
                tell(
                    "the file cannot express the update on the device: write update: "
                    f"{advice.update.name} for zerotune train, or pass it to plan.resolve"
                )
            if advice.activation_offload:
                tell(
                    "the file cannot express activation offload, without which the plan needs more "
                    "device memory: pass activations=ActivationOffload() to Trainer, or "
                    "activation_offload: true to zerotune train; plan explain "
                    "--activation-offload estimates it"
                )

    def _report_nothing(self, error: NothingFitsError, machine: Mapping[str, Any]) -> None:
        nearest = error.nearest
        budget = _by_place({**machine, "vram": machine["vram"] or 0})
        _draw_chart(nearest.estimate, nearest_budget(nearest, budget=budget), self.arguments)
        said = str(error.in_shell())
        if self.arguments.json:
            print_json({"fits": False, "reason": said, "nearest": candidate_data(nearest)})
        else:
            print_page(Page(blocks=(Line(said, mark="error:", style="error"),)), width=WIDTH)
            print_text("")
            print_page(nearest_page(nearest, budget=budget), width=WIDTH)


def machine_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the machine to plan for; missing sizes are taken from this machine and printed."""
    machine: dict[str, Any] = {"nvme": 0, **sizes_of(arguments)}
    card = None if arguments.card is None else card_named(arguments.card, key="--card")
    if card is not None:
        machine.setdefault("vram", card.memory * 2**30)
    platform = None
    if not {"vram", "ram"} <= set(machine):
        platform = detect_platform(log=False)
        for name, size in (("ram", platform.host_memory.limit), ("vram", platform.vram)):
            if name not in machine:
                words = f"with this machine's {format_size(size)}" if size is not None else None
                tell(f"--{name} not given: planning {words or _ON_PROCESSOR}")
                machine[name] = size
    if card is not None:
        sizes = {"vram": machine["vram"], "ram": machine["ram"]}
        count = getattr(arguments, "world_size", None) or 1
        platform = card_platform(card, device_count=count, **sizes)
    return machine if platform is None else {**machine, "platform": platform}
