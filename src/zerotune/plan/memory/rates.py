"""How fast a machine computes and moves bytes: measured on it, or catalogued for its card."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs

from zerotune._util.environment import user_cache
from zerotune._util.text import is_number, json_of
from zerotune.errors import InvalidValueError

if TYPE_CHECKING:
    from zerotune.platform import Platform

_GIGA: Final = 1e9
_TERA: Final = 1e12


def _positive(_instance: object, attribute: Any, value: Any) -> None:
    if not is_number(value) or value <= 0:
        raise InvalidValueError(
            "must be a positive number", key=f"rates.{attribute.name}", value=value,
            fix="measure it with `zerotune doctor --rates`",
        )  # fmt: skip


def _as_names(names: Iterable[str]) -> frozenset[str]:
    return frozenset(names)


def _rate() -> Any:
    return attrs.field(validator=_positive)


@attrs.frozen(kw_only=True)
class Rates:
    """What a machine reaches, per second; of one process that has the machine for itself."""

    products: float = _rate()
    """Floating-point operations of matrix products in bf16 or fp16, forward and backward; a product
    and a sum are two."""
    products_fp32: float = _rate()
    """The same in fp32."""
    convolutions: float = _rate()
    """Floating-point operations of convolutions in bf16 or fp16."""
    convolutions_fp32: float = _rate()
    """The same in fp32."""
    attention: float = _rate()
    """Floating-point operations of attention in bf16 or fp16."""
    attention_fp32: float = _rate()
    """The same in fp32."""
    product_calls: float = _rate()
    """Matrix products of next to no size in bf16 or fp16, one after another."""
    product_calls_fp32: float = _rate()
    """The same in fp32."""
    attention_calls: float = _rate()
    """Attention of next to no size in bf16 or fp16, passes of both ways together."""
    attention_calls_fp32: float = _rate()
    """The same in fp32."""
    device_memory: float = _rate()
    """Bytes that norms, activations and sums in bf16 or fp16 read and write on the device. Less
    than in fp32 where a processor works element by element."""
    device_memory_fp32: float = _rate()
    """The same in fp32."""
    to_host: float = _rate()
    """Bytes from the device to page-locked memory."""
    to_device: float = _rate()
    """Bytes the other way."""
    host_memory: float = _rate()
    """Bytes that a copy in host memory reads and writes."""
    new_memory: float = _rate()
    """Bytes of host memory written for the first time since it was allocated."""
    operators: float = _rate()
    """Operators that are begun, one after another; products and attention are not among them."""
    host_step: float = _rate()
    """Bytes that an optimizer in host memory reads and writes."""
    disk_read: float = _rate()
    """Bytes from swap files."""
    disk_write: float = _rate()
    """Bytes to swap files."""
    measured: frozenset[str] = attrs.field(default=frozenset(), converter=_as_names)
    """Names of those that were measured on this machine; the others are catalogued."""
    origin: str = "given"
    """Where they come from, in words."""

    def source(self, name: str) -> str:
        """``"measured"`` or ``"catalogued"``."""
        return "measured" if name in self.measured else "catalogued"

    def with_measured(self, found: Mapping[str, float], *, origin: str) -> Rates:
        """These, with what was measured in their place."""
        names = self.measured | frozenset(found)
        return attrs.evolve(self, **dict[str, Any](found), measured=names, origin=origin)


RATE_NAMES: Final = tuple(
    one.name for one in attrs.fields(Rates) if one.name not in ("measured", "origin")
)


# -- Cards that one does not have.


@attrs.frozen(kw_only=True)
class _Card:
    """Published figures: TFLOP/s of dense matrix products and GB/s."""

    name: str
    memory: int
    """GiB."""
    low: float
    fp32: float
    bandwidth: float
    bus: float


_CARDS: Final = tuple(
    _Card(name=name, memory=memory, low=low, fp32=fp32, bandwidth=bandwidth, bus=bus)
    for name, memory, low, fp32, bandwidth, bus in (
        # The first of those with as much memory stands for a card whose name is not known.
        ("H200", 141, 989, 67, 4800, 64),
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
        ("T4", 16, 65, 8, 320, 16),
        ("RTX 4070", 12, 58, 29, 504, 32),
        ("RTX 3060", 12, 25, 13, 360, 32),
        ("RTX 3080", 10, 60, 30, 760, 32),
        ("RTX 4060", 8, 30, 15, 272, 16),
        ("RTX 3050", 6, 14, 7, 168, 16),
    )
)
"""Matrix products in bf16 (fp16 where there is no bf16) with sums in fp32, without sparsity."""
_REACHED: Final = {"products": 0.6, "convolutions": 0.45, "attention": 0.45, "memory": 0.8}
"""Shares of the published figures that real models reach."""
_BUS_REACHED: Final = 0.8
_HOST: Final[Mapping[str, Any]] = {
    "host_memory": 40 * _GIGA,
    "new_memory": 3 * _GIGA,
    "host_step": 30 * _GIGA,
    "operators": 2e5,
}
"""Of a desktop with two channels of DDR5."""
_DISK: Final[Mapping[str, Any]] = {"disk_read": 3 * _GIGA, "disk_write": 1.5 * _GIGA}
"""Of an NVMe disk of the middle class."""
_CORE: Final = 30 * _GIGA
"""Floating-point operations a core with AVX2 reaches in fp32."""


_CALLS: Final = (
    "product_calls", "product_calls_fp32", "attention_calls", "attention_calls_fp32",
)  # fmt: skip
_CALLS_ON_CARD: Final[Mapping[str, Any]] = dict.fromkeys(_CALLS, 2e5)
"""A kernel takes some microseconds, however little there is to do."""
_CALLS_ON_CORE: Final[Mapping[str, Any]] = dict.fromkeys(_CALLS, 2e4)


def catalogued_rates(platform: Platform) -> Rates:
    """What the published figures of a machine's card let one expect.

    A card that is not listed counts as the listed one nearest in memory.
    """
    if platform.accelerator == "cpu":
        return _of_processor(platform)
    device = min(platform.devices, key=lambda one: one.total_memory, default=None)
    name = "" if device is None else device.name
    memory = 24 if device is None else round(device.total_memory / 2**30)
    named = [card for card in _CARDS if card.name in name]
    card = min(named or _CARDS, key=lambda one: abs(one.memory - memory))
    like = f"{card.name} ({card.memory} GiB)"
    origin = f"catalogued, {like}"
    if not named:
        # Of cards with as much memory, since that is all one knows of a card without a name.
        origin = f"catalogued, of {like}, the listed card nearest in memory"
    return Rates(
        products=card.low * _REACHED["products"] * _TERA,
        products_fp32=card.fp32 * _REACHED["products"] * _TERA,
        convolutions=card.low * _REACHED["convolutions"] * _TERA,
        convolutions_fp32=card.fp32 * _REACHED["convolutions"] * _TERA,
        attention=card.low * _REACHED["attention"] * _TERA,
        attention_fp32=card.fp32 * _REACHED["attention"] * _TERA,
        **_CALLS_ON_CARD,
        device_memory=card.bandwidth * _REACHED["memory"] * _GIGA,
        device_memory_fp32=card.bandwidth * _REACHED["memory"] * _GIGA,
        to_host=card.bus * _BUS_REACHED * _GIGA,
        to_device=card.bus * _BUS_REACHED * _GIGA,
        **_HOST,
        **_DISK,
        origin=origin,
    )


def _of_processor(platform: Platform) -> Rates:
    fp32 = _CORE * platform.usable_cores
    low = fp32 * (2 if platform.native_bf16 else 0.2)
    return Rates(
        products=low, products_fp32=fp32, convolutions=low, convolutions_fp32=fp32,
        attention=low / 2, attention_fp32=fp32 / 2,
        **_CALLS_ON_CORE,
        device_memory=_HOST["host_memory"] / 2, device_memory_fp32=_HOST["host_memory"],
        to_host=_HOST["host_memory"], to_device=_HOST["host_memory"], **_HOST, **_DISK,
        origin=f"catalogued, {platform.usable_cores} cores",
    )  # fmt: skip


# -- Rates that were measured, kept with the hardware they belong to.


def rates_file() -> Path:
    """Where measured rates are kept: ``zerotune/rates.json`` in the user's cache."""
    return user_cache() / "rates.json"


def hardware_key(platform: Platform) -> str:
    """What rates belong to: accelerator, devices, processor, cores and torch."""
    devices = ", ".join(one.name for one in platform.devices)
    torch = platform.versions.get("torch", "none")
    parts = (platform.accelerator, devices, platform.processor, str(platform.usable_cores), torch)
    return " | ".join(parts)


def known_rates(platform: Platform, *, file: Path | None = None) -> Rates:
    """Measured rates of this very hardware where there are any, catalogued ones elsewhere.

    Args:
        platform: The machine.
        file: Where measured rates are; ``rates_file()`` by default.
    """
    rates, key = catalogued_rates(platform), hardware_key(platform)
    found = _stored(file or rates_file()).get(key)
    if not isinstance(found, Mapping):
        return rates
    usable = {name: found[name] for name in RATE_NAMES if _is_rate(found.get(name))}
    return rates.with_measured(usable, origin="measured on this machine") if usable else rates


def store_rates(
    platform: Platform, found: Mapping[str, float], *, file: Path | None = None
) -> Path:
    """Keep what was measured; other hardware's rates stay.

    Args:
        platform: The machine it was measured on.
        found: Rates by name.
        file: As in ``known_rates``.

    Returns:
        The file.
    """
    from zerotune._util.files import write_atomically

    path = file or rates_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    stored = dict(_stored(path)) | {hardware_key(platform): dict(found)}
    write_atomically(path, json.dumps(stored, indent=1, sort_keys=True).encode())
    return path


def _stored(path: Path) -> Mapping[str, Any]:
    try:
        found = json_of(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, Mapping) else {}


def _is_rate(value: Any) -> bool:
    return is_number(value) and value > 0
