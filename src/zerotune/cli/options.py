"""Options that several commands share: the model, the machine, the workload and the engine."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, get_args

from zerotune._util.text import format_size, parse_memory
from zerotune.cli import tell
from zerotune.cli.plan import add_update, at_least_one, number_of_processes, option_of
from zerotune.errors import InvalidValueError
from zerotune.plan.context import EngineName, Streaming
from zerotune.plan.facts import STORAGES
from zerotune.plan.families import ModelFamily, family_names, model_family
from zerotune.plan.memory.items import EMAPlace, Place
from zerotune.plan.memory.rates import card_named, card_platform
from zerotune.plan.sections import PRECISIONS
from zerotune.plan.values import AUTO, Number
from zerotune.platform import CUDA, Platform, detect_platform

FROM_HERE: Final = "sizes that are not given are taken from this machine"

_ON_PROCESSOR: Final = "to train on this machine's CPU"

LORA_HELP: Final = "train LoRA adapters of this rank instead of the full model"


def add_workload(
    parser: argparse.ArgumentParser, world_size: int | None = 1, about: str = "processes; default 1"
) -> None:
    """Add the options for processes, EMA and adapters.

    Args:
        parser: The command's parser.
        world_size: Default number of processes.
        about: Help on the number of processes.
    """
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


def add_training(parser: argparse.ArgumentParser) -> None:
    """Add the training options of ``advise``."""
    training = parser.add_argument_group("training")
    add_sample(training)
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


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add the options for JSON and charts."""
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print JSON; sizes are in bytes")
    group.add_argument(
        "--chart",
        metavar="FILE",
        help="write a chart of the memory per rank to this .png, .pdf or .svg file",
    )


def add_sample(group: argparse._ArgumentGroup) -> None:
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


def estimated_model(arguments: argparse.Namespace) -> ModelFamily:
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


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Add the options that ``engine_of`` reads."""
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


def engine_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of the engine, as in ``DeepSpeedPlan.estimate``."""
    memory = arguments.keep and parse_memory(arguments.keep, key="--keep")
    streamed = Streaming(memory=memory) if memory else arguments.streamed or None
    return {"engine": arguments.engine, "streamed": streamed, "update": arguments.update}


def by_place(sizes: Mapping[str, int | None]) -> dict[Place, int]:
    """Return the memory limits in bytes by place, without unlimited places."""
    places: dict[Place, str] = {"device": "vram", "host": "ram", "nvme": "nvme"}
    limits = {place: sizes.get(name) for place, name in places.items()}
    return {place: size for place, size in limits.items() if size is not None}


def described_machine(arguments: argparse.Namespace) -> Platform | None:
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
