"""What the page plans for: a model, a workload and a machine; none of them is part of the plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any, Final, get_args

import attrs

from zerotune._util.proc import installed_versions
from zerotune._util.text import as_sentence, format_size, parse_memory
from zerotune.builder.forms import as_choice
from zerotune.errors import REMOVAL, InvalidValueError, ZeroTuneError
from zerotune.plan.facts import STORAGES
from zerotune.plan.families import family_names, model_family
from zerotune.plan.memory.items import EMAPlace
from zerotune.plan.memory.rates import CARDS, card_platform
from zerotune.plan.values import Integer
from zerotune.platform import CUDA, Platform, detect_platform

_PACKAGES: Final = ("deepspeed", "torch", "accelerate", "diffusers")


@attrs.frozen(kw_only=True)
class Setup:
    """The model, the workload of one step, and the machine."""

    family: str = "sdxl"
    """Model family; ``""`` for a model without a family, whose memory is not estimated."""
    resolution: int | None = None
    """Side length of the images in pixels; by default the family's native size."""
    frames: int | None = None
    """Number of frames per clip; by default the family's usual number."""
    world_size: int = 1
    total_steps: int = 10_000
    """Number of optimizer steps, for schedules that do not set a length."""
    lora: int | None = None
    """Rank of LoRA adapters; ``None`` trains the whole model."""
    base_dtype: str | None = None
    """Quantization of the base model if adapters are trained; ``None`` uses the plan's
    precision."""
    ema: EMAPlace = "none"
    gradient_checkpointing: bool = True
    activation_offload: bool = False
    this_machine: bool = False
    """Whether to plan for this machine instead of the machine that the fields below describe."""
    card: str | None = None
    """GPU whose known rates are used, such as "RTX 4090, 24 GiB"; by default the known GPU with the
    nearest memory size."""
    vram: int = 24 * 2**30
    """GPU memory in bytes, per GPU."""
    ram: int = 64 * 2**30
    """RAM in bytes, shared by all ranks."""
    nvme: int = 0
    """Disk space for swap files in bytes, shared by all ranks."""

    def check_base(self) -> None:
        """Raise an error for a quantized base model without adapters."""
        if self.base_dtype is not None and self.lora is None:
            raise InvalidValueError(
                "a quantized model can only be trained through LoRA adapters",
                "set setup.lora to 16, or remove setup.base_dtype",
                "setup.base_dtype",
                self.base_dtype,
                edits=[{"setup.lora": 16}, REMOVAL],
            )

    @property
    def frames_of_clips(self) -> int | None:
        """Number of frames per clip; ``None`` for an image model, even if the form has a value."""
        takes_clips = bool(self.family) and model_family(self.family).frames is not None
        return self.frames if takes_clips else None


def read_setup(raw: Mapping[str, Any]) -> tuple[Setup, list[ZeroTuneError]]:
    """Read a setup from the page; return the valid values and the errors."""
    errors: list[ZeroTuneError] = []
    values: dict[str, Any] = {}
    for name, read in _SETUP_READERS.items():
        value = raw.get(name)
        if value is None or value == "":
            if name == "family" and value == "":
                values[name] = ""
            continue
        try:
            values[name] = read(value, key=f"setup.{name}")
        except ZeroTuneError as error:
            errors.append(error)
    return Setup(**values), errors


class Machines:
    """This machine, which is detected only once, and the machines that users describe."""

    def __init__(self) -> None:
        self._versions = installed_versions(_PACKAGES)

    @cached_property
    def this(self) -> Platform:
        """This machine."""
        return detect_platform(log=False)

    def of(self, setup: Setup) -> Platform:
        """Return the machine that a setup describes."""
        if setup.this_machine:
            return self.this
        described: dict[str, Any] = {
            "device_count": setup.world_size,
            "vram": setup.vram,
            "ram": setup.ram,
            "versions": self._versions,
        }
        if setup.card is None:
            return Platform.synthetic(CUDA, **described)
        return card_platform(_CARDS[setup.card], **described)

    def sizes(self, setup: Setup) -> dict[str, int | None]:
        """Return sizes in bytes: memory per GPU, and RAM and swap space shared by all ranks."""
        if not setup.this_machine:
            return {"device": setup.vram, "host": setup.ram, "nvme": setup.nvme}
        return {
            "device": self.this.vram,
            "host": self.this.host_memory.limit,
            "nvme": setup.nvme or None,
        }


def _whole_number(*, least: int = 1, most: int) -> Callable[..., Any]:
    kind, fix = Integer(minimum=least, maximum=most, auto=False), f"write {least} to {most}"

    def read(value: Any, *, key: str) -> Any:
        try:
            return kind.read(value, key)[0]
        except InvalidValueError as error:
            # The kind's edits would set the field to its smallest or largest number.
            raise InvalidValueError(error.reason, fix, key, value) from None

    return read


_CARDS: Final = {card.label: card for card in CARDS}
_SETUP_READERS: Final[Mapping[str, Callable[..., Any]]] = {
    "family": partial(as_choice, choices=family_names()),
    "resolution": _whole_number(least=8, most=16_384),
    "frames": _whole_number(most=10_000),
    "world_size": _whole_number(most=4096),
    "total_steps": _whole_number(most=10**9),
    "lora": _whole_number(most=4096),
    "base_dtype": partial(as_choice, choices=tuple(STORAGES)),
    "card": partial(as_choice, choices=tuple(_CARDS)),
    "ema": partial(as_choice, choices=get_args(EMAPlace)),
    **dict.fromkeys(
        ("gradient_checkpointing", "activation_offload", "this_machine"),
        partial(as_choice, choices=(True, False)),
    ),
    **dict.fromkeys(("vram", "ram", "nvme"), parse_memory),
}


STARTING_SETUP: Final = {
    "family": "sdxl",
    "world_size": 1,
    "ema": "none",
    "gradient_checkpointing": True,
    "base_dtype": "",
    "card": "",
    "this_machine": False,
    "vram": "24",
    "ram": "64",
    "nvme": "0",
    "total_steps": 10_000,
}
"""Setup of a newly opened page."""


def setup_error(error: ZeroTuneError) -> ZeroTuneError:
    """Assign an error to the field of the setup that has its key, if there is one."""
    return error.below("setup") if error.key in _SETUP_READERS else error


def describe_machine(machine: Platform) -> str:
    """Return a machine's devices and RAM, and whether DeepSpeed runs on it."""
    names = [f"{one.name}, {format_size(one.total_memory)}" for one in machine.devices]
    devices = "; ".join(names) or f"no GPU ({machine.accelerator})"
    ram = format_size(machine.host_memory.limit)
    return f"{as_sentence(f'{devices}; {ram} of RAM')} {as_sentence(machine.deepspeed.reason)}"
