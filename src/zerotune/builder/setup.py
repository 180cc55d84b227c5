"""What the page plans for: a model, a workload and a machine. Not part of the plan."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import cache
from importlib import metadata
from typing import Any, Final, TypeVar, cast, get_args

import attrs

from zerotune.errors import InvalidValueError, ZeroTuneError
from zerotune.plan.families import family_names
from zerotune.plan.memory.sizes import parse_size
from zerotune.plan.memory.workload import EMAPlace
from zerotune.platform import Platform, detect_platform

MOST_RANKS: Final = 4096
MOST_STEPS: Final = 10**9
LARGEST_SIDE: Final = 16_384
_PACKAGES: Final = ("deepspeed", "torch", "accelerate", "diffusers")
_ValueT = TypeVar("_ValueT")


@attrs.frozen(kw_only=True)
class Setup:
    """A model, what one step works on, and the machine."""

    family: str = "sdxl"
    """A model family; ``""``: another model, whose memory is not estimated."""
    resolution: int | None = None
    """Pixels of a side; the family's own when not given."""
    world_size: int = 1
    total_steps: int = 10_000
    """Optimizer steps of the run, for what a schedule leaves to it."""
    ema: EMAPlace = "none"
    gradient_checkpointing: bool = True
    activation_offload: bool = False
    this_machine: bool = False
    """Whether the machine is this one, and not the one described below."""
    vram: int = 24 * 2**30
    """Bytes of each GPU."""
    ram: int = 64 * 2**30
    """Bytes of RAM, for all ranks."""
    nvme: int = 0
    """Bytes of disk for swap files, for all ranks."""


def read_setup(raw: Mapping[str, Any]) -> tuple[Setup, list[ZeroTuneError]]:
    """A setup as the page sends it, and what is wrong with it; wrong values are left out."""
    errors: list[ZeroTuneError] = []
    given: dict[str, Any] = {}
    for name, read in _READERS.items():
        value = raw.get(name)
        if value is None or value == "":
            if name == "family" and value == "":
                given[name] = ""
            continue
        try:
            given[name] = read(value, f"setup.{name}")
        except ZeroTuneError as error:
            errors.append(error)
    return Setup(**given), errors


class Machines:
    """This machine, looked at once; detecting imports torch, which takes seconds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: Platform | None = None

    def this(self) -> Platform:
        """This machine."""
        with self._lock:
            if self._found is None:
                self._found = detect_platform(log=False)
            return self._found

    def of(self, setup: Setup) -> Platform:
        """The machine a setup speaks of."""
        if setup.this_machine:
            return self.this()
        return Platform.synthetic(
            "cuda",
            device_count=setup.world_size,
            vram=setup.vram,
            ram=setup.ram,
            versions=installed_versions(),
        )

    def sizes(self, setup: Setup) -> dict[str, int | None]:
        """Bytes of one device, and of RAM and swap files for all ranks."""
        if not setup.this_machine:
            return {"device": setup.vram, "host": setup.ram, "nvme": setup.nvme}
        machine = self.this()
        return {
            "device": machine.vram,
            "host": machine.host_memory.limit,
            "nvme": setup.nvme or None,
        }


@cache
def installed_versions() -> dict[str, str]:
    """Versions of the packages that decide what can run."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _whole(least: int, most: int) -> Callable[[Any, str], int]:
    def read(value: Any, key: str) -> int:
        try:
            number = int(value) if isinstance(value, str) else value
        except ValueError:
            number = value
        if isinstance(number, float) and number.is_integer():
            number = int(number)
        if not isinstance(number, int) or isinstance(number, bool) or not least <= number <= most:
            raise InvalidValueError(
                "must be a whole number", key=key, value=value, fix=f"write {least} to {most}"
            )
        return number

    return read


def _size(value: Any, key: str) -> int:
    """An amount of memory; a bare number means GiB, as the field's label says."""
    bare = value.strip() if isinstance(value, str) else value
    if isinstance(bare, int | float) and not isinstance(bare, bool):
        bare = f"{bare:f}" if isinstance(bare, float) else str(bare)
    if isinstance(bare, str) and bare.replace(".", "", 1).isdecimal():
        bare = f"{bare} GiB"
    return parse_size(bare, key=key)


def _one_of(choices: tuple[_ValueT, ...]) -> Callable[[Any, str], _ValueT]:
    def read(value: Any, key: str) -> _ValueT:
        if value not in choices:
            raise InvalidValueError(
                "is not one of the choices",
                key=key,
                value=value,
                fix=f"write one of {', '.join(map(repr, choices))}",
            )
        return cast(_ValueT, value)

    return read


_READERS: Final[Mapping[str, Callable[[Any, str], Any]]] = {
    "family": _one_of(family_names()),
    "resolution": _whole(8, LARGEST_SIDE),
    "world_size": _whole(1, MOST_RANKS),
    "total_steps": _whole(1, MOST_STEPS),
    "ema": _one_of(get_args(EMAPlace)),
    "gradient_checkpointing": _one_of((True, False)),
    "activation_offload": _one_of((True, False)),
    "this_machine": _one_of((True, False)),
    "vram": _size,
    "ram": _size,
    "nvme": _size,
}
