"""Speeds of a machine: measured, or expected from a card's published figures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import attrs

from zerotune._util.files import write_atomically
from zerotune._util.text import is_number, json_of, positive
from zerotune.errors import InvalidValueError
from zerotune.platform.facts import CUDA, Accelerator, Platform, user_cache

_GIGA: Final = 1e9


_TERA: Final = 1e12


def _check_rate(_instance: object, attribute: Any, value: Any) -> None:
    fix = "measure the rate with the recipe measure_rates.py"
    positive(value, key=f"rates.{attribute.name}", fix=fix)


def _rate_field() -> Any:
    return attrs.field(validator=_check_rate)


@attrs.frozen(kw_only=True)
class Rates:
    """Speeds that a single process reaches on an idle machine; every rate is per second."""

    products: float = _rate_field()
    """FLOP/s of matrix products in bf16 or fp16, forward and backward; a multiply-add counts as
    two."""
    products_fp32: float = _rate_field()
    """The same in fp32."""
    device_memory: float = _rate_field()
    """Bytes per second that norms, activations and sums in bf16 or fp16 read and write on the
    device. On processors that compute bf16 or fp16 element by element, the rate is lower than in
    fp32."""
    device_memory_fp32: float = _rate_field()
    """The same in fp32."""
    to_host: float = _rate_field()
    """Bytes per second copied from the device to page-locked memory."""
    to_device: float = _rate_field()
    """Bytes per second copied from page-locked memory to the device."""
    host_memory: float = _rate_field()
    """Bytes per second that a copy in host memory reads and writes."""
    operators: float = _rate_field()
    """Operators that are launched per second, one by one."""
    host_step: float = _rate_field()
    """Bytes per second that an optimizer in host memory reads and writes."""
    disk_read: float = _rate_field()
    """Bytes per second read from swap files."""
    disk_write: float = _rate_field()
    """Bytes per second written to swap files."""
    measured: frozenset[str] = frozenset()
    """Names of the rates that were measured on this machine; others are catalogued."""
    origin: str = "given"
    """Where the rates come from, in words."""

    def source(self, name: str) -> str:
        """Return whether the rate ``name`` is ``"measured"`` or ``"catalogued"``."""
        return "measured" if name in self.measured else "catalogued"

    def with_measured(self, found: Mapping[str, float], *, origin: str) -> Rates:
        """Return the rates, with catalogued values replaced by measured values.

        Args:
            found: Measured rates by name.
            origin: Where the measured rates come from, in words.
        """
        names = self.measured | frozenset(found)
        return attrs.evolve(self, **dict[str, Any](found), measured=names, origin=origin)


RATE_NAMES: Final = tuple(
    one.name for one in attrs.fields(Rates) if one.name not in ("measured", "origin")
)


# -- Catalogue of cards.


@attrs.frozen(kw_only=True)
class Card:
    """Published figures for a card: TFLOP/s of dense matrix products, and bandwidths in GB/s."""

    name: str
    memory: int
    """GiB."""
    low: float
    fp32: float
    bandwidth: float
    bus: float
    bf16: bool = True
    """Whether the card computes in bf16."""
    accelerator: Accelerator = CUDA

    @property
    def label(self) -> str:
        """Name and memory, which together are unique."""
        return f"{self.name}, {self.memory} GiB"


CARDS: Final = tuple(
    Card(
        name=name,
        memory=memory,
        low=low,
        fp32=fp32,
        bandwidth=bandwidth,
        bus=bus,
        bf16=name not in ("V100", "T4"),
        accelerator="rocm" if name == "MI300X" else CUDA,
    )
    for name, memory, low, fp32, bandwidth, bus in (
        # An unlisted card counts as the first card with the nearest memory size.
        ("B200", 180, 2250, 75, 8000, 64),
        ("MI300X", 192, 1307, 163, 5300, 64),
        ("H200", 141, 989, 67, 4800, 64),
        ("RTX PRO 6000", 96, 504, 126, 1792, 64),
        ("H100 NVL", 94, 835, 60, 3900, 64),
        ("H100 PCIe", 80, 756, 51, 2000, 64),
        ("H100", 80, 989, 67, 3350, 64),
        ("A100", 80, 312, 19.5, 2000, 32),
        ("L40", 48, 181, 90, 864, 32),
        ("RTX 6000 Ada", 48, 182, 91, 960, 32),
        ("RTX A6000", 48, 155, 38, 768, 32),
        ("A100", 40, 312, 19.5, 1555, 32),
        ("RTX 5090", 32, 209, 105, 1792, 64),
        ("V100", 32, 112, 14, 900, 16),
        ("RTX 4090", 24, 165, 83, 1008, 32),
        ("RTX 3090", 24, 71, 36, 936, 32),
        ("L4", 24, 60, 30, 300, 16),
        ("A10", 24, 70, 31, 600, 32),
        ("RTX 4080", 16, 97, 49, 717, 32),
        ("RTX 5080", 16, 113, 56, 960, 64),
        ("RTX 5070 Ti", 16, 88, 44, 896, 64),
        ("RTX 5060 Ti", 16, 47, 24, 448, 32),
        ("T4", 16, 65, 8, 320, 16),
        ("RTX 4070", 12, 58, 29, 504, 32),
        ("RTX 3060", 12, 25, 13, 360, 32),
        ("RTX 3080", 10, 60, 30, 760, 32),
        ("RTX 4060", 8, 30, 15, 272, 16),
        ("RTX 3050", 6, 14, 7, 168, 16),
    )
)
"""Cards with published figures. The figures for matrix products assume bf16 (fp16 on cards without
bf16), fp32 accumulation and no sparsity."""


_REACHED: Final = {"products": 0.6, "memory": 0.8, "bus": 0.8}
"""Shares of the published figures that real models reach."""


_HOST: Final[Mapping[str, Any]] = {
    "host_memory": 40 * _GIGA,
    "host_step": 30 * _GIGA,
    "operators": 2e5,
}
"""Rates of a desktop with two channels of DDR5."""


_DISK: Final[Mapping[str, Any]] = {"disk_read": 3 * _GIGA, "disk_write": 1.5 * _GIGA}
"""Rates of a mid-range NVMe disk."""


PUBLISHED_SPREAD: Final = (-0.4, 0.35)
"""Smallest and largest published step time relative to a prediction with catalogued rates, minus 1,
each after a refit to the other runs in docs/predictions.md."""


_CORE: Final = 30 * _GIGA
"""fp32 floating-point operations per second of a core with AVX2."""


def listed_card(name: str, memory: int) -> Card:
    """Return the card whose published figures are used for a device.

    Args:
        name: Name that the driver gives to the device. If it contains no listed name, only the
            memory size is compared.
        memory: Memory of the device in GiB.
    """
    named = [card for card in CARDS if card.name in name]
    return min(named or CARDS, key=lambda one: abs(one.memory - memory))


def card_named(text: str, *, key: str) -> Card:
    """Return the listed card that a user names.

    Args:
        text: The card's name, or a part of it, such as ``"4090"``; upper and lower case are alike.
        key: What the user wrote the name for, for errors.

    Raises:
        InvalidValueError: No listed card has this name, or several have it as a part of theirs.
    """
    wanted = text.casefold()
    exact = [card for card in CARDS if card.name.casefold() == wanted]
    found = exact or [card for card in CARDS if wanted and wanted in card.name.casefold()]
    names = list(dict.fromkeys(card.name for card in found or CARDS))
    if not found or len(names) > 1:
        why = "names several listed cards" if found else "is not a listed card"
        fix = f"write one of {', '.join(names)}"
        raise InvalidValueError(why, fix, key, text)
    return found[0]


def card_platform(card: Card, **described: Any) -> Platform:
    """Return a machine with this card.

    Args:
        card: The card.
        described: What else ``Platform.synthetic`` takes; ``vram`` is the card's by default.
    """
    described.setdefault("vram", card.memory * 2**30)
    return Platform.synthetic(card.accelerator, device_name=card.name, bf16=card.bf16, **described)


def catalogued_rates(platform: Platform) -> Rates:
    """Return the rates expected from the published figures for the machine's card.

    An unlisted card gets the rates of the listed card with the nearest memory size.
    """
    if platform.accelerator == "cpu":
        return _of_processor(platform)
    device = min(platform.devices, key=lambda one: one.total_memory, default=None)
    name = "" if device is None else device.name
    memory = 24 if device is None else round(device.total_memory / 2**30)
    card = listed_card(name, memory)
    origin = f"catalogued for {card.name} ({card.memory} GiB)"
    if card.name not in name:
        # Only the memory size of an unlisted card is known.
        origin += ", the listed card with the closest memory size"
    return Rates(
        products=card.low * _REACHED["products"] * _TERA,
        products_fp32=card.fp32 * _REACHED["products"] * _TERA,
        device_memory=card.bandwidth * _REACHED["memory"] * _GIGA,
        device_memory_fp32=card.bandwidth * _REACHED["memory"] * _GIGA,
        to_host=card.bus * _REACHED["bus"] * _GIGA,
        to_device=card.bus * _REACHED["bus"] * _GIGA,
        **_HOST,
        **_DISK,
        origin=origin,
    )


def _of_processor(platform: Platform) -> Rates:
    fp32 = _CORE * platform.usable_cores
    low = fp32 * (2 if platform.native_bf16 else 0.2)
    return Rates(
        products=low, products_fp32=fp32,
        device_memory=_HOST["host_memory"] / 2, device_memory_fp32=_HOST["host_memory"],
        to_host=_HOST["host_memory"], to_device=_HOST["host_memory"], **_HOST, **_DISK,
        origin=f"catalogued for {platform.usable_cores} cores",
    )  # fmt: skip


# -- Measured rates, stored by hardware.


def rates_file() -> Path:
    """Return the file that stores measured rates: ``zerotune/rates.json`` in the user's cache."""
    return user_cache() / "rates.json"


def hardware_key(platform: Platform) -> str:
    """Return the key for stored rates: accelerator, devices, processor, cores and torch version."""
    devices = ", ".join(one.name for one in platform.devices)
    torch = platform.versions.get("torch", "none")
    parts = (platform.accelerator, devices, platform.processor, str(platform.usable_cores), torch)
    return " | ".join(parts)


def known_rates(platform: Platform, *, file: Path | None = None) -> Rates:
    """Return the measured rates for this hardware, or catalogued rates if there are none.

    Args:
        platform: The machine.
        file: File with measured rates; by default ``rates_file()``.
    """
    rates, key = catalogued_rates(platform), hardware_key(platform)
    found = _stored_rates(file or rates_file()).get(key)
    if not isinstance(found, Mapping):
        return rates
    usable = {
        name: found[name] for name in RATE_NAMES if is_number(found.get(name)) and found[name] > 0
    }
    return rates.with_measured(usable, origin="measured on this machine") if usable else rates


def store_rates(
    platform: Platform, found: Mapping[str, float], *, file: Path | None = None
) -> Path:
    """Store measured rates, and keep the stored rates for other hardware.

    Args:
        platform: The machine on which the rates were measured.
        found: Measured rates by name.
        file: File with measured rates; by default ``rates_file()``.

    Returns:
        The file.
    """
    path = file or rates_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    stored = dict(_stored_rates(path)) | {hardware_key(platform): dict(found)}
    write_atomically(path, json.dumps(stored, indent=1, sort_keys=True).encode())
    return path


def _stored_rates(path: Path) -> Mapping[str, Any]:
    try:
        found = json_of(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, Mapping) else {}
