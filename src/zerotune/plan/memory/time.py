"""Predict the time of a training step from hardware rates, data traffic and overlap."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import attrs

from zerotune._util.files import write_atomically
from zerotune._util.text import is_number, json_of
from zerotune.errors import InvalidValueError
from zerotune.plan.memory.estimate import (
    BUFFERS_IN_BACKWARD,
    Costing,
    Estimate,
    gradient_buffers,
    gradients_stay,
    offloads_activations,
)
from zerotune.plan.work import ArithmeticFacts, PassWork
from zerotune.platform.facts import CUDA, Accelerator, Platform, user_cache

# -- Speeds of a machine: measured on the machine, or catalogued for its card.


_GIGA: Final = 1e9
_TERA: Final = 1e12


def _check_rate(_instance: object, attribute: Any, value: Any) -> None:
    if not _is_rate(value):
        raise InvalidValueError(
            "must be a positive number",
            "measure the rate with `zerotune doctor --rates`",
            f"rates.{attribute.name}",
            value,
        )


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
    usable = {name: found[name] for name in RATE_NAMES if _is_rate(found.get(name))}
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


def _is_rate(value: Any) -> bool:
    return is_number(value) and value > 0


# -- Traffic of a step to and from swap files.
#
# Counted by the kernel (``/proc/self/io``) in real runs of DeepSpeed 0.19.8: the optimizer reads
# and writes weight, gradient and states of every element once per step; parameters are read for
# the forward and for the backward pass of each micro batch and written once per step.


@attrs.frozen(kw_only=True)
class SwapTraffic:
    """Bytes that one rank reads from and writes to swap files in one optimizer step."""

    read: int
    written: int

    def seconds(self, *, read_rate: float, write_rate: float) -> float:
        """Return the minimum time of a step's disk I/O in seconds, without overlap.

        Args:
            read_rate: Bytes read per second, shared by the ranks of a machine.
            write_rate: Bytes written per second, shared by the ranks of a machine.

        Raises:
            InvalidValueError: A rate is not positive.
        """
        for key, rate in (("read_rate", read_rate), ("write_rate", write_rate)):
            if not _is_rate(rate):
                raise InvalidValueError(
                    "must be a positive number of bytes per second",
                    "measure the rate with DeepSpeed's `ds_nvme_tune --nvme_dir ROOT`",
                    key,
                    rate,
                )
        return self.read / read_rate + self.written / write_rate


def swap_traffic(estimate: Estimate) -> SwapTraffic:
    """Compute the swap traffic per step from the sizes of swap files; 0 without NVMe offload."""
    weights = optimizer = 0
    for item in estimate.items:
        if item.place == "nvme" and item.component == "weights":
            weights += item.nbytes
        elif item.place == "nvme" and item.component != "EMA":
            optimizer += item.nbytes
    passes = 2 * estimate.resolved.gradient_accumulation_steps
    return SwapTraffic(read=optimizer + passes * weights, written=optimizer + weights)


# -- Minimum bytes that a step moves over the bus and through host memory.
#
# From the code of DeepSpeed 0.19.8 (``stage_1_and_2.py``, ``stage3.py``, ``csrc/adam``). N elements
# of this rank's part, e bytes of a weight in the forward pass, m of a master weight, s of a state,
# k states, a micro batches:
#
# - gradients to the host: ``e N`` for zerotune's one pass over states in RAM, otherwise ``m N``;
# - sums of gradients, which the device forms: ``a e N`` to the host and ``(a - 1) e N`` back at
#   stages 1 and 2 with several micro batches; ``a e N`` in either direction at stage 3;
# - updated weights to the device: ``e N``, unless parameters are on the host;
# - parameters on the host: ``2 a e`` per element on this rank, once for each pass;
# - the optimizer in host memory: it reads master weight, gradient and states and writes master
#   weight, states and the weight: ``(3m + 2 s k + e) N``;
# - the share that an offload ratio below 1 leaves on the device: its gradients and weights do not
#   cross the bus in fp32, and its optimizer works in the device's memory;
# - an EMA in host memory reads master weight and shadow and writes the shadow: ``12 N``, or
#   ``8 N`` within a hidden pass; an EMA on disk is also read from and written to the disk;
# - master weights on the device cross the bus for an EMA in host memory: ``m N``.


@attrs.frozen(kw_only=True)
class StepTraffic:
    """Bytes that one rank moves in one optimizer step, by purpose."""

    gradients: int
    """Bytes of gradients that the backward pass copies to host memory."""
    parameters: int
    """Bytes of parameters on the host that the forward and backward passes copy over the bus."""
    weights: int
    """Bytes of updated weights that the optimizer step copies over the bus to the device."""
    optimizer: int
    """Host memory traffic of an optimizer that runs on the CPU."""
    ema: int
    """Host memory traffic of an ``EMAShadow`` in host memory or on disk."""
    swap: SwapTraffic
    """Swap file traffic."""
    returned: int = 0
    """Bytes of summed gradients that the backward pass copies back to the device."""
    added: int = 0
    """Host memory traffic for summing gradients, if the ranks of a machine do so in host memory."""
    chain: int = 0
    """Additional host memory traffic of DeepSpeed's optimizer step, for clipping and casts."""
    on_device: int = 0
    """Device memory traffic of an optimizer on the device."""
    new_in_backward: int = 0
    """Newly allocated host memory for gradients and copies, if the accelerator is the CPU; the C
    library returns this memory to the system after each use."""
    ema_on_disk: int = 0
    """Bytes of an ``EMAShadow`` on disk that are read, and as many written."""
    ema_from_device: int = 0
    """Bytes of master weights that an ``EMAShadow`` in host memory or on disk copies from the
    device."""
    new_in_step: int = 0
    """Newly allocated host memory in the optimizer step."""
    updated: int = 0
    """Bytes that an update on the device of weights in host memory copies back there."""

    @property
    def bus(self) -> int:
        """Total bytes copied over the bus; 0 if the accelerator is the CPU."""
        returned = self.returned + self.parameters + self.weights + self.updated
        return self.gradients + self.ema_from_device + returned


def step_traffic(estimate: Estimate) -> StepTraffic:
    """Return the bytes that one rank moves in one optimizer step.

    Args:
        estimate: Estimate of a plan that was resolved with its model.
    """
    resolved, model = estimate.resolved, estimate.resolved.model
    swap = swap_traffic(estimate)
    if model is None:
        return StepTraffic(gradients=0, parameters=0, weights=0, optimizer=0, ema=0, swap=swap)
    case = Costing(resolved=resolved, model=model, workload=estimate.workload)
    if case.hosted:
        return _hosted_traffic(case, estimate)
    owned, kept = case.owned, case.model.weight_bytes(case.element, ranks=case.ranks)
    over_bus = not case.on_cpu and resolved.offload_optimizer != "none"
    on_host = case.on_cpu or resolved.offload_optimizer != "none"
    params_away = resolved.offload_param != "none"
    # The share that an offload ratio below 1 leaves on the device never crosses the bus in fp32.
    stays = sum(case.stays)
    away = owned - stays
    passes = 2 * resolved.gradient_accumulation_steps
    averaged = _averaged_on_host(estimate)
    in_backward, in_step = _allocated(case) if case.on_cpu else (0, 0)
    sums, returned, taken = _gradients(case)
    return StepTraffic(
        gradients=sums * owned + taken * away if over_bus else 0,
        returned=returned * owned if over_bus else 0,
        parameters=passes * kept if params_away and not case.on_cpu else 0,
        weights=case.element * away if over_bus and not params_away else 0,
        optimizer=round(_update(case) * away) if on_host else 0,
        ema=12 * owned if averaged else 0,
        ema_on_disk=_ema_on_disk(estimate),
        ema_from_device=4 * (stays if on_host else owned) if averaged else 0,
        swap=swap,
        chain=round(_chain(case) * away) if on_host else 0,
        # Also, gradients are cast to fp32, read for their norm, and scaled; weights are cast.
        on_device=round((_update(case) + 16 + 2 * case.element) * (stays if on_host else owned)),
        new_in_backward=in_backward,
        new_in_step=in_step,
    )


def _averaged_on_host(estimate: Estimate) -> bool:
    # An EMA on disk has chunks in host memory.
    return any(item.component == "EMA" and item.place == "host" for item in estimate.items)


def _ema_on_disk(estimate: Estimate) -> int:
    items = estimate.items
    return sum(one.nbytes for one in items if one.component == "EMA" and one.place == "nvme")


def _hosted_traffic(case: Costing, estimate: Estimate) -> StepTraffic:
    """Return the traffic of the host engine.

    The units that the forward pass used last are still on the device when the backward pass begins.
    After a step, units on the device are outdated and are copied again.
    """
    units, element = case.streamed, case.unit_element
    accumulated = case.resolved.gradient_accumulation_steps
    trained = sum(units.trained)
    absent = element * units.total - case.streamed_capacity
    written = round(case.streamed_capacity * trained / (units.total or 1))
    stepped = units.trained_total
    # Micro batches after the first are added up on the device.
    # A split or fp32 master weight contains the weight, which is not written a second time.
    saved = 2 if case.master_bytes == 2 else 4 if element == 4 else 0
    back = (accumulated - 1) * element * stepped
    part = stepped / case.ranks
    arriving = accumulated * element * stepped
    new = accumulated * element * case.trained
    uploaded = 0 if case.in_place else element * units.resident_trained
    # Reads all ranks' gradients of this rank's share, and writes their sum.
    added = round(arriving + accumulated * element * part) if case.ranks > 1 else 0
    # On a CPU, a copy reads and writes host memory.
    copied = 2 * (arriving + uploaded) if case.on_cpu else 0
    if case.resolved.update is not None and not case.on_cpu:
        # The new weights of streamed units are copied to the device again before they are used.
        kept = case.master_bytes + 4 * case.states
        # An fp32 master weight contains the weight.
        read = 0 if case.master_bytes == 4 else 2
        stay = gradients_stay(case.resolved)
        return StepTraffic(
            gradients=0 if stay else arriving,
            parameters=2 * accumulated * absent + written,
            returned=back,
            weights=uploaded + round((2 * (not stay) + kept + read) * part),
            optimizer=0,
            ema=round(8 * part) if _averaged_on_host(estimate) else 0,
            ema_on_disk=_ema_on_disk(estimate),
            swap=swap_traffic(estimate),
            added=added,
            on_device=round((_BY_OPERATORS + 8 * case.states) * part),
            updated=round((kept + 2) * part),
        )
    return StepTraffic(
        gradients=0 if case.on_cpu else arriving,
        parameters=0 if case.on_cpu else 2 * accumulated * absent + written,
        returned=0 if case.on_cpu else back,
        weights=0 if case.on_cpu else uploaded,
        # Gradients stay in the weights' precision, and are first read for their norm.
        optimizer=round((_update(case) - 4 + 2 * element - saved) * part),
        ema=round(8 * part) if _averaged_on_host(estimate) else 0,
        ema_on_disk=_ema_on_disk(estimate),
        swap=swap_traffic(estimate),
        added=added + copied,
        new_in_backward=new if case.on_cpu and new > _KEPT_BY_C else 0,
    )


_BY_OPERATORS: Final = 64
"""Bytes of device memory per weight that an optimizer's operators read and write, beside states."""


def _chain(case: Costing) -> float:
    # On the host each of these is a separate operator; memory is read before it is written.
    if case.checks_gradients:
        # Extremes and norm were computed as gradients arrived; a product and a cast remain.
        return 16 + (2 * case.element if case.element == 2 else 0)
    # Extremes for the overflow check, a norm, a product, copies, or the operators of torch's AdamW.
    return 64 + (4 * case.element if case.element == 2 else 0)


_KEPT_BY_C: Final = 32 * 2**20
"""Maximum bytes of a freed block that glibc keeps for reuse."""


def _allocated(case: Costing) -> tuple[int, int]:
    """Return the newly allocated bytes of the backward passes and of the optimizer step.

    The formula fits page faults (``getrusage``) per phase in runs of DeepSpeed 0.19.8.
    """
    resolved, element = case.resolved, case.element
    low, owned = element == 2, case.owned
    offloads = resolved.offload_optimizer != "none"
    # Gradients are freed in the step or after the copy to the bucket, and returned to the system.
    passed = element * case.trained * resolved.gradient_accumulation_steps
    if not resolved.uses_deepspeed:
        # Gradients, and the copies of the weights that autocast makes.
        blocks = (4 * case.trained + 2 * case.all_elements * low, 0)
    elif resolved.stage == 0:
        # Backward: gradients flattened for the reduction. Step: cast to fp32, and flattened again.
        blocks = (element * owned, 8 * owned if low else 0)
    elif resolved.stage == 3:
        # Backward: a flat copy of each bucket, and this rank's part of the sum.
        blocks = (2 * element * owned, 0 if offloads else (element + 4 * low) * owned)
    else:
        # Backward: partitioned gradients. Step: flattened gradients, and their fp32 copy.
        kept = (0, 0) if offloads else (element * owned, (element + 4 * low) * owned)
        blocks = (passed + kept[0], kept[1])
    in_backward, in_step = (size if size > _KEPT_BY_C else 0 for size in blocks)
    return in_backward, in_step


def _gradients(case: Costing) -> tuple[int, int, int]:
    """Return bytes per element: of sums to the host, of sums back, and for the optimizer."""
    accumulated, element = case.resolved.gradient_accumulation_steps, case.element
    if case.resolved.stage == 3:
        return accumulated * element, accumulated * element, 4
    if accumulated == 1:
        return 0, 0, 4
    return accumulated * element, (accumulated - 1) * element, 4


def _update(case: Costing) -> float:
    wrapped = case.resolved.uses_deepspeed and (case.resolved.stage > 0 or case.element == 2)
    written = case.unit_element if case.hosted or wrapped else 0
    return 12 + 8 * case.states + written


# -- Time of a training step: computation, transfers, and their overlap.
#
# A step uses several lanes (``Lane``). Times in the same lane add up; lanes run in parallel, so a
# phase takes as long as its slowest lane. Phases follow one another, except for an optimizer in
# host memory, which engines may run at other times (``Schedule``):
#
# - gradients cross the bus while the backward pass computes, and activations in both passes;
# - copies of parameters in host memory do not overlap: DeepSpeed waits for each parameter;
# - transfers over the bus also use host memory, as the optimizer and EMAs do;
# - with NVMe, states are read before and written after they are updated.


Lane = Literal["device", "in", "out", "host", "cores", "calls", "disk"]
"""Resource that a part of a step uses: the device, one direction of the bus (to or from the
device), host memory, the host's cores, operator launches, or the disk."""
StepPhase = Literal["forward", "backward", "optimizer", "weights", "ema"]
"""Phase of a step."""
Schedule = Literal["in turn", "hidden", "eager"]
"""When an optimizer in host memory runs: ``"in turn"`` after the backward pass, ``"hidden"`` during
the next forward pass, or ``"eager"`` during the last backward pass (as gradients arrive) and the
next forward pass."""
_PASSES: Final[tuple[StepPhase, ...]] = ("forward", "backward")
_AFTER: Final[tuple[StepPhase, ...]] = ("optimizer", "weights", "ema")
_PER_GRADIENT: Final[Mapping[int, int]] = {0: 5, 1: 12, 2: 12, 3: 12}
"""Operators (including views) per parameter that DeepSpeed adds to the backward pass, by stage;
counted in runs of DeepSpeed 0.19.8 and of the plain engine."""
_PER_CHECKED: Final[Mapping[tuple[bool, int], tuple[int, int]]] = {
    (False, 2): (40, 20), (False, 4): (32, 5), (True, 2): (56, 9), (True, 4): (72, 8),
}  # fmt: skip
"""Bytes per element and operators per gradient of DeepSpeed's overflow checks and fp64 norms for an
optimizer in host memory. Keys: whether the stage is 3, and bytes of a weight."""
_PER_GATHERED: Final = 4
"""Operators per parameter that DeepSpeed adds to a forward pass at stage 3."""


@attrs.frozen(kw_only=True)
class TimePart:
    """One part of the predicted time of a step."""

    phase: StepPhase
    lane: Lane
    what: str
    """Description in words."""
    seconds: float
    """Seconds per optimizer step."""
    rate: str
    """Name of the rate in ``Rates`` that limits the part."""


@attrs.frozen(kw_only=True)
class _Stretch:
    """Successive shares of passes, and the work that overlaps with them."""

    passes: Mapping[StepPhase, float]
    """Share of each pass."""
    beside: Mapping[StepPhase, float] = attrs.field(factory=dict)
    """Share of each overlapping phase."""

    def seconds(self, lanes: Mapping[StepPhase, Mapping[Lane, float]]) -> float:
        """Return the maximum of the total time of the passes and the time of the busiest lane."""
        one_by_one = sum(share * max(lanes[one].values()) for one, share in self.passes.items())
        total: dict[Lane, float] = {}
        for phase, share in (*self.passes.items(), *self.beside.items()):
            for lane, seconds in lanes[phase].items():
                total[lane] = total.get(lane, 0.0) + share * seconds
        return max(one_by_one, *total.values())


@attrs.frozen(kw_only=True)
class StepTime:
    """Predicted time of an optimizer step by phase, from ``step_time``."""

    parts: tuple[TimePart, ...]
    rates: Rates
    """Rates that the prediction uses."""
    notes: tuple[str, ...] = ()
    """Parts of a step that the prediction does not include, with reasons."""
    schedule: Schedule = "in turn"
    """When the plan's optimizer runs."""
    published_spread: tuple[float, float] | None = None
    """``PUBLISHED_SPREAD`` for a card whose rates were not measured; otherwise ``None``."""
    micro_batches: int = 1
    """Forward passes per optimizer step; the optimizer step overlaps with one of them."""
    carried: float = 1.0
    """Share of the optimizer's work that may overlap with the next forward pass, limited by how
    many gradients host memory can buffer."""

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of each phase if phases do not overlap."""
        return {phase: max(lanes.values()) for phase, lanes in self._lanes.items() if lanes}

    @property
    def _lanes(self) -> dict[StepPhase, dict[Lane, float]]:
        found: dict[StepPhase, dict[Lane, float]] = {}
        for part in self.parts:
            lanes = found.setdefault(part.phase, {})
            lanes[part.lane] = lanes.get(part.lane, 0.0) + part.seconds
        return found

    def scheduled(self, schedule: Schedule) -> float:
        """Return the predicted seconds per step if the optimizer runs as ``schedule`` specifies.

        An optimizer on the device never overlaps with the passes.

        Args:
            schedule: ``"in turn"``, ``"hidden"`` or ``"eager"``.
        """
        lanes = self._lanes
        on_host = any(lane in ("host", "disk") for lane in lanes.get("optimizer", ()))
        if schedule == "in turn" or not on_host:
            return sum(self.phases.values())
        first, after = 1 / self.micro_batches, [phase for phase in _AFTER if phase in lanes]
        found = {phase: lanes.get(phase) or {"device": 0.0} for phase in (*_PASSES, *after)}
        if schedule == "eager" and self.carried < 1:
            stretches = self._with_little_carried(found, after)
        else:
            beside = _PASSES if schedule == "eager" else _PASSES[:1]
            hiding = _Stretch(passes=dict.fromkeys(beside, first), beside=dict.fromkeys(after, 1.0))
            rest = ((one, 1 - first if one in beside else 1.0) for one in _PASSES)
            stretches = [hiding, *(_Stretch(passes={one: share}) for one, share in rest)]
        return sum(stretch.seconds(found) for stretch in stretches)

    def _with_little_carried(
        self, lanes: Mapping[StepPhase, Mapping[Lane, float]], after: Iterable[StepPhase]
    ) -> list[_Stretch]:
        """Return stretches with optimizer work in the backward and the next forward pass."""
        works: tuple[Lane, ...] = ("host", "cores")
        taken = {each: sum(lanes[phase].get(each, 0.0) for phase in after) for each in works}
        slowest = max(works, key=lambda each: taken[each])
        forward, needed = lanes["forward"], taken[slowest]
        free = max(forward.values()) - forward.get(slowest, 0.0)
        left = min(self.carried, free / needed) if needed else 0.0
        return [
            _Stretch(passes={"forward": 1.0}, beside=dict.fromkeys(after, left)),
            _Stretch(passes={"backward": 1.0}, beside=dict.fromkeys(after, 1 - left)),
        ]

    @property
    def seconds(self) -> float:
        """Predicted seconds per step if phases do not overlap."""
        return self.scheduled("in turn")

    @property
    def hidden_seconds(self) -> float:
        """Seconds per step if the optimizer step and EMA updates run in the next forward pass."""
        return self.scheduled("hidden")

    @property
    def eager_seconds(self) -> float:
        """Seconds per step if the optimizer step and EMA updates overlap with both passes."""
        return self.scheduled("eager")

    @property
    def hides(self) -> bool:
        """Whether the plan's optimizer overlaps with a forward or backward pass."""
        return self.schedule != "in turn"

    @property
    def expected(self) -> float:
        """Predicted seconds per step if the optimizer runs as ``schedule`` specifies."""
        return self.scheduled(self.schedule)

    @property
    def bound(self) -> TimePart:
        """The part of the step that takes the longest."""
        return max(self.parts, key=lambda part: part.seconds)

    @property
    def sources(self) -> dict[str, str]:
        """Maps the name of each relevant rate to ``"measured"`` or ``"catalogued"``."""
        names = dict.fromkeys(part.rate for part in self.parts)
        return {name: self.rates.source(name) for name in names}

    @property
    def origin(self) -> str:
        """Where the relevant rates come from, in words."""
        found = self.sources
        catalogued = [name for name, source in found.items() if source == "catalogued"]
        if not catalogued or len(catalogued) == len(found):
            return self.rates.origin
        return f"{self.rates.origin}; catalogued: {', '.join(catalogued)}"


def step_time(estimate: Estimate, rates: Rates) -> StepTime | None:
    """Predict the time of one optimizer step.

    Args:
        estimate: Estimate for an image resolution; its plan must be resolved with a model.
        rates: Speeds of the machine.

    Returns:
        The time; ``None`` if the model's operation counts (``ModelFacts.arithmetic``) or the image
        size are unknown.
    """
    model, work = estimate.resolved.model, estimate.workload
    if model is None or model.arithmetic is None or work.height is None:
        return None
    case = Costing(resolved=estimate.resolved, model=model, workload=work)
    parts = [*_pass_parts(case, model.arithmetic, rates), *_moved(case, estimate, rates)]
    sends = case.ranks > 1 and not case.hosted
    is_catalogued = not case.on_cpu and rates.source("products") == "catalogued"
    notes = ("communication between ranks is not included",) if sends else ()
    kept = tuple(part for part in parts if part.seconds > 0)
    return StepTime(
        parts=kept,
        rates=rates,
        notes=notes,
        schedule=_schedule(case),
        published_spread=PUBLISHED_SPREAD if is_catalogued else None,
        micro_batches=case.resolved.gradient_accumulation_steps,
        carried=_carried(case),
    )


def _carried(case: Costing) -> float:
    """Return ``StepTime.carried`` for the plan without clipping."""
    plan = attrs.evolve(case.resolved.plan, gradient_clipping=0.0)
    unclipped, units = attrs.evolve(case.resolved, plan=plan), case.streamed.trained
    buffers, _ = gradient_buffers(unclipped, units)
    if not buffers or case.streaming is None:
        return 1.0
    return max(0, buffers - BUFFERS_IN_BACKWARD) / len(units)


def _schedule(case: Costing) -> Schedule:
    """Return when Adam in host memory runs."""
    resolved = case.resolved
    if not case.hosted:
        return "in turn"
    waits = resolved.gradient_clipping or resolved.precision == "fp16"
    in_backward = case.streaming is not None and not waits
    return "eager" if in_backward else "hidden"


def _pass_parts(case: Costing, facts: ArithmeticFacts, rates: Rates) -> Iterator[TimePart]:
    yield from _computed(case, facts.forward, rates, "forward", "the forward pass")
    yield from _computed(case, facts.backward, rates, "backward", "the backward pass")
    if case.workload.gradient_checkpointing and facts.recomputed is not None:
        yield from _computed(case, facts.recomputed, rates, "backward", "recomputed blocks")
    yield from _dequantized(case, rates)
    if facts.backward.operators and case.resolved.uses_deepspeed:
        stage = case.resolved.stage
        yield _looked_after(case, rates, "backward", "gradient bookkeeping", _PER_GRADIENT[stage])
        if case.checks_gradients:
            _, each = _PER_CHECKED[stage == 3, case.element]
            yield _looked_after(case, rates, "backward", "gradient checks", each)
        if stage == 3 and not case.hosted:
            yield _looked_after(case, rates, "forward", "parameter gathering", _PER_GATHERED)


def _dequantized(case: Costing, rates: Rates) -> Iterator[TimePart]:
    """Yield the time in which each pass writes quantized weights in the plan's precision."""
    if not case.model.storages:
        return
    weights = [one for one in case.model.parameters if one.storage is not None]
    nbytes = sum(one.nbytes(case.element) + case.element * one.numel for one in weights)
    passes: Mapping[StepPhase, int] = {
        "forward": 1,
        "backward": 1 + case.workload.gradient_checkpointing,
    }
    for phase, times in passes.items():
        moved = case.resolved.gradient_accumulation_steps * times * nbytes
        yield TimePart(
            phase=phase,
            lane="device",
            what="weights dequantized",
            seconds=moved / rates.device_memory,
            rate="device_memory",
        )


def _looked_after(case: Costing, rates: Rates, phase: StepPhase, what: str, each: int) -> TimePart:
    trained = sum(one.trainable for one in case.model.parameters)
    begun = each * (trained if phase == "backward" else len(case.model.parameters))
    return TimePart(
        phase=phase,
        lane="device" if case.on_cpu else "calls",
        what=what,
        seconds=case.resolved.gradient_accumulation_steps * begun / rates.operators,
        rate="operators",
    )


def _computed(
    case: Costing, work: PassWork, rates: Rates, phase: StepPhase, what: str
) -> Iterator[TimePart]:
    size = {
        "batch": case.workload.batch,
        "pixels": case.positions,
    }
    times = case.resolved.gradient_accumulation_steps
    suffix = "_fp32" if case.element == 4 else ""
    # On the CPU accelerator, ranks share the cores.
    shared = _sharing(case) if case.on_cpu else 1
    relative = _ON_PROCESSOR[case.element] if case.on_cpu else ON_CARD
    for name, speed in relative.items():
        amount = getattr(work, name).of(**size) / speed
        seconds = shared * times * amount / getattr(rates, f"products{suffix}")
        yield TimePart(
            phase=phase,
            lane="device",
            what=f"{name} of {what}",
            seconds=seconds,
            rate=f"products{suffix}",
        )
    yield TimePart(
        phase=phase,
        # A device computes while the host launches the next operators.
        lane="device" if case.on_cpu else "calls",
        what=f"operator launches of {what}",
        seconds=shared * times * work.operators / rates.operators,
        rate="operators",
    )
    calls = work.product_calls + work.attention_calls
    yield TimePart(
        phase=phase,
        lane="device",
        what=f"product and attention calls of {what}",
        seconds=shared
        * times
        * calls
        * (_CALL[case.element] if case.on_cpu else 1)
        / rates.operators,
        rate="operators",
    )
    nbytes = times * work.moved.of(**size) * case.element / 2
    yield TimePart(
        phase=phase,
        lane="device",
        what=f"other operators of {what}",
        seconds=shared * nbytes / getattr(rates, f"device_memory{suffix}"),
        rate=f"device_memory{suffix}",
    )


ON_CARD: Final = {"products": 1.0, "convolutions": 0.75, "attention": 0.75}
"""Rates of convolutions and attention on a card relative to that of matrix products."""
_ON_PROCESSOR: Final[Mapping[int, Mapping[str, float]]] = {
    2: {"products": 1.0, "convolutions": 0.8, "attention": 0.4},
    4: {"products": 1.0, "convolutions": 1.1, "attention": 0.9},
}
"""The same on a processor, by bytes of a weight."""
_CALL: Final[Mapping[int, int]] = {2: 10, 4: 4}
"""Number of launched operators that take as long as one product or attention call on a processor,
besides its arithmetic, by bytes of a weight."""
_NEW_MEMORY: Final = 10
"""Bytes that a copy in host memory reads and writes while one byte of newly allocated memory is
written for the first time."""
_CODED: Final = 75
"""Bytes that an optimizer in host memory reads and writes while one core updates a weight with
8-bit moments, including decoding and encoding."""


def _sharing(case: Costing) -> int:
    return case.workload.ranks_per_machine or case.ranks


_BUS: Final = frozenset({"to_host", "to_device"})
_ANEW: Final = "memory allocated anew"
_Moved = tuple[StepPhase, Lane, str, float, str]
"""Phase, lane, description, amount in units of the rate, and name of the rate."""


def _moved(case: Costing, estimate: Estimate, rates: Rates) -> Iterator[TimePart]:
    ranks = _sharing(case)
    for phase, lane, what, nbytes, rate in _amounts(case, estimate):
        # The ranks of a machine share its memory and its disk.
        shared = ranks if lane in ("host", "cores", "disk") or what == _ANEW else 1
        seconds = shared * nbytes / getattr(rates, rate)
        yield TimePart(phase=phase, lane=lane, what=what, seconds=seconds, rate=rate)
        if rate in _BUS:
            # Host memory is at least as fast as the bus.
            through = ranks * nbytes / max(rates.host_memory, getattr(rates, rate))
            yield TimePart(
                phase=phase,
                lane="host",
                what=f"{what}, through host memory",
                seconds=through,
                rate="host_memory",
            )


def _amounts(case: Costing, estimate: Estimate) -> Iterator[_Moved]:
    traffic, waiting = step_traffic(estimate), _waiting(case)
    half, swap = traffic.parameters / 2, traffic.swap
    memory = "host_memory" if case.on_cpu else "device_memory_fp32"
    # DeepSpeed waits for each fetch; streamed units are prefetched.
    fetches: Lane = "in" if case.hosted else "device"
    yield "forward", fetches, "parameters to the device", half, "to_device"
    yield "forward", "out", "activations to the host", waiting, "to_host"
    yield "backward", fetches, "parameters to the device", half, "to_device"
    yield "backward", "in", "activations to the device", waiting, "to_device"
    yield "backward", "out", "gradients to the host", traffic.gradients, "to_host"
    yield "backward", "in", "gradients back to the device", traffic.returned, "to_device"
    yield "backward", "device", "gradients put into buckets", _gradients_in_memory(case), memory
    yield "backward", "device", "gradient checks", _checked(case), memory
    yield "backward", "host", "gradients copied and added up", traffic.added, "host_memory"
    new = _NEW_MEMORY * traffic.new_in_backward, _NEW_MEMORY * traffic.new_in_step
    yield "backward", "device", _ANEW, new[0], "host_memory"
    yield "optimizer", "host", _ANEW, new[1], "host_memory"
    yield "optimizer", "host", "the optimizer", traffic.optimizer + traffic.chain, "host_step"
    yield "optimizer", "cores", "8-bit moments", _coded(case), "host_step"
    yield "optimizer", "device", "the optimizer", traffic.on_device, "device_memory_fp32"
    yield "optimizer", "disk", "swap files read", swap.read, "disk_read"
    yield "optimizer", "disk", "swap files written", swap.written, "disk_write"
    yield "weights", "in", "weights to the device", traffic.weights, "to_device"
    yield "weights", "out", "updated weights to the host", traffic.updated, "to_host"
    yield "ema", "out", "weights for the EMA", traffic.ema_from_device, "to_host"
    yield "ema", "host", "the EMA", traffic.ema, "host_memory"
    yield "ema", "disk", "the EMA read", traffic.ema_on_disk, "disk_read"
    yield "ema", "disk", "the EMA written", traffic.ema_on_disk, "disk_write"


def _coded(case: Costing) -> float:
    """Return the bytes of an optimizer step that takes as long as updating 8-bit moments."""
    # One core is left for other work.
    cores = max(1, case.resolved.platform.usable_cores - 1)
    stepped = case.streamed.trained_total / case.ranks
    return _CODED * stepped / cores if case.codes_moments else 0.0


def _waiting(case: Costing) -> float:
    """Return the bytes of activations that a step stores in host memory."""
    work, known = case.workload, case.model.activations
    if not offloads_activations(case) or known is None or known.offloaded_host is None:
        return 0.0
    size = {"batch": work.batch, "pixels": case.positions, "element_bytes": case.element}
    each = known.offloaded_host.nbytes(**size)
    return each * case.resolved.gradient_accumulation_steps


def _checked(case: Costing) -> float:
    """Return the bytes that DeepSpeed reads and writes once per step to check gradients."""
    each, _ = _PER_CHECKED[case.resolved.stage == 3, case.element]
    return each * case.trained if case.checks_gradients else 0.0


def _gradients_in_memory(case: Costing) -> float:
    """Return the bytes that copies of gradients into and out of buckets read and write."""
    if not case.resolved.uses_deepspeed or case.hosted:
        return 0.0
    # Copy into a bucket, average, copy out, and norm.
    return 7 * case.element * case.trained * case.resolved.gradient_accumulation_steps
