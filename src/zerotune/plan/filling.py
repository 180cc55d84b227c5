"""Every behaviour key of ``zero_optimization`` and ``aio``, written explicitly.

DeepSpeed's defaults move between releases, so what is left out here would depend on the
version installed. A value the user wrote always stands, unless the platform cannot take it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

import attrs

from zerotune.decisions import Decision, Severity
from zerotune.plan import sizing
from zerotune.plan.facts import ModelFacts
from zerotune.plan.kinds import AUTO
from zerotune.plan.section import Section, evolved, join
from zerotune.plan.sections import AioSection, OffloadSection, ZeroSection
from zerotune.plan.swapping import (
    fill_nvme_optimizer,
    fill_nvme_param,
    swaps_parameters,
    without_lossy_swapping,
    without_prefetch,
)

if TYPE_CHECKING:
    from zerotune.platform import Platform

SectionT = TypeVar("SectionT", bound=Section)

DEEPSPEED_DEFAULT = "the default of DeepSpeed 0.19.8, written because defaults move"

_ALL = (1, 2, 3)
_LOW = (1, 2)
_HIGH = (3,)


@attrs.define(kw_only=True)
class Filler:
    """What filling needs to know, and the decisions it makes."""

    stage: int
    platform: Platform
    model: ModelFacts | None
    world_size: int
    precision: str
    decisions: list[Decision] = attrs.field(factory=list)

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of the model's own precision."""
        return 4 if self.precision == "fp32" else 2

    def fill(
        self,
        section: SectionT,
        path: str,
        name: str,
        chosen: Any,
        reason: str = DEEPSPEED_DEFAULT,
    ) -> SectionT:
        """Set ``name`` unless the user did; record it."""
        written = getattr(section, name)
        if written is not None and written != AUTO:
            return section
        self.note(join(path, name), written, chosen, reason)
        return evolved(section, **{name: chosen})

    def force(
        self,
        section: SectionT,
        path: str,
        name: str,
        value: Any,
        reason: str,
        *,
        severity: Severity = "note",
    ) -> SectionT:
        """Set ``name`` whatever the user wrote, because it cannot run otherwise; record it."""
        written = getattr(section, name)
        if written == value:
            return section
        self.note(join(path, name), written, value, reason, severity=severity)
        return evolved(section, **{name: value})

    def drop(
        self, section: SectionT, path: str, name: str, reason: str, *, severity: Severity = "note"
    ) -> SectionT:
        """Leave out a key that has no effect; record it."""
        written = getattr(section, name)
        if written is None:
            return section
        before = written.to_dict() if isinstance(written, Section) else written
        self.note(join(path, name), before, None, reason, severity=severity)
        return evolved(section, **{name: None})

    def note(
        self, key: str, before: Any, after: Any, reason: str, *, severity: Severity = "note"
    ) -> None:
        """Record one decision."""
        self.decisions.append(
            Decision(key=key, before=before, after=after, reason=reason, severity=severity)
        )


_Choose = Callable[[Filler, ZeroSection], tuple[Any, str]]


def _constant(value: Any) -> _Choose:
    return lambda _filler, _zero: (value, DEEPSPEED_DEFAULT)


def _sized(what: Callable[[ModelFacts | None], int], why: str) -> _Choose:
    def choose(filler: Filler, _zero: ZeroSection) -> tuple[int, str]:
        known = "" if filler.model else "; no model was given, so a general size"
        return what(filler.model), why + known

    return choose


def _overlap(filler: Filler, zero: ZeroSection) -> tuple[bool, str]:
    if filler.platform.accelerator == "cpu":
        return False, "the CPU accelerator has no streams to overlap"
    offloads = zero.offload_optimizer is not None and zero.offload_optimizer.device != "none"
    if filler.stage == 3 or offloads:
        return True, "without it gradients leave the device on the stream that computes"
    return False, "doubles the bucket, and gains only where gradients travel"


def _persistence(filler: Filler, _zero: ZeroSection) -> tuple[int, str]:
    threshold, persistent = sizing.persistence_threshold(filler.model)
    model = filler.model
    if model is None:
        return threshold, "no model was given; leaves biases and norms unpartitioned"
    share = persistent / model.numel if model.numel else 0.0
    return threshold, (
        f"leaves {persistent:,} of {model.numel:,} elements ({share:.2%}) unpartitioned,"
        f" at most {sizing.PERSISTENT_SHARE:.0%}"
    )


def _sub_group(_filler: Filler, zero: ZeroSection) -> tuple[int, str]:
    if zero.offload_optimizer is not None and zero.offload_optimizer.device == "nvme":
        return sizing.SUB_GROUP_NVME, "the swap pool pins several buffers of the largest sub-group"
    return sizing.SUB_GROUP, "bounds the temporaries of the optimizer step"


def _gather(_filler: Filler, _zero: ZeroSection) -> tuple[bool, str]:
    return False, "zerotune exports without gathering; " + DEEPSPEED_DEFAULT


_BUCKET_WHY = "holds the largest tensor, and no more than the trainable model needs"

_CHOICES: dict[str, tuple[tuple[int, ...], _Choose]] = {
    "overlap_comm": (_ALL, _overlap),
    "contiguous_gradients": (_ALL, _constant(True)),
    "reduce_scatter": (_ALL, _constant(True)),
    "reduce_bucket_size": (_ALL, _sized(sizing.reduce_bucket, _BUCKET_WHY)),
    "allgather_partitions": (_LOW, _constant(True)),
    "allgather_bucket_size": (_LOW, _sized(sizing.allgather_bucket, _BUCKET_WHY)),
    "use_multi_rank_bucket_allreduce": (_LOW, _constant(True)),
    "round_robin_gradients": (_LOW, _constant(False)),
    "ignore_unused_parameters": (_LOW, _constant(True)),
    "load_from_fp32_weights": (_ALL, _constant(True)),
    "elastic_checkpoint": (_ALL, _constant(False)),
    "sub_group_size": (_HIGH, _sub_group),
    "stage3_prefetch_bucket_size": (
        _HIGH,
        _sized(sizing.prefetch_bucket, "a block ahead; at least the largest tensor"),
    ),
    "stage3_param_persistence_threshold": (_HIGH, _persistence),
    "stage3_model_persistence_threshold": (_HIGH, _constant(sys.maxsize)),
    "stage3_max_live_parameters": (
        _HIGH,
        _sized(sizing.max_live, "twice what is fetched ahead; two bytes of device memory each"),
    ),
    "stage3_max_reuse_distance": (
        _HIGH,
        lambda _filler, _zero: (0, "a parameter kept for reuse costs device memory"),
    ),
    "stage3_gather_16bit_weights_on_model_save": (_HIGH, _gather),
    "stage3_module_granularity_threshold": (_HIGH, _constant(0)),
    "memory_efficient_linear": (_HIGH, _constant(True)),
    "zero_hpz_partition_size": (_HIGH, _constant(1)),
    "zero_quantized_weights": (_HIGH, _constant(False)),
    "zero_quantized_nontrainable_weights": (_HIGH, _constant(False)),
    "zero_quantized_gradients": (_HIGH, _constant(False)),
}
"""Key to the stages where it has an effect, and how its value is chosen."""


def stages_of(name: str) -> tuple[int, ...]:
    """ZeRO stages where a key of ``zero_optimization`` has an effect; empty when not known."""
    return _CHOICES[name][0] if name in _CHOICES else _SECTIONS.get(name, ())


_SECTIONS = {"offload_optimizer": _ALL, "offload_param": _HIGH}


def fill_zero(zero: ZeroSection, filler: Filler, aio: AioSection | None) -> ZeroSection:
    """``zero`` with every key that has an effect at this stage written, and no other.

    Offload sections without effect must have been removed before.

    Raises:
        InvalidValueError: A swap buffer the user sized does not hold the largest partition.
    """
    path = "zero_optimization"
    zero = attrs.evolve(zero, stage=filler.stage)
    if filler.stage == 3:
        zero = without_lossy_swapping(zero, filler, aio)
        if swaps_parameters(zero, filler, aio):
            zero = without_prefetch(zero, filler)
    for name, (stages, choose) in _CHOICES.items():
        if filler.stage not in stages:
            zero = filler.drop(zero, path, name, f"has no effect at stage {filler.stage}")
        else:
            zero = filler.fill(zero, path, name, *choose(filler, zero))
    zero = _with_leaf_modules(zero, filler, aio)
    for name in ("offload_optimizer", "offload_param"):
        section: OffloadSection | None = getattr(zero, name)
        if section is not None:
            filled = _fill_offload(section, f"{path}.{name}", filler, zero, aio)
            zero = evolved(zero, **{name: filled})
    return zero


LEAF_MODULE: Final = "leaf_module"
"""Key of ``zero_optimization``: ``{"classes": […]}``; an empty list switches it off."""


def _with_leaf_modules(zero: ZeroSection, filler: Filler, aio: AioSection | None) -> ZeroSection:
    key = f"zero_optimization.{LEAF_MODULE}"
    written = zero.extra.get(LEAF_MODULE)
    model = filler.model
    if written is not None or filler.stage != 3 or model is None:
        return zero
    blocks = sizing.leaf_blocks(model)
    if not blocks or swaps_parameters(zero, filler, aio):
        return zero
    value = {"classes": [block.class_name for block in blocks]}
    count = sum(block.count for block in blocks)
    filler.note(key, None, value, f"{count} blocks are fetched as a whole, and not layer by layer")
    return evolved(zero, extra={**zero.extra, LEAF_MODULE: value})


def _fill_offload(
    section: OffloadSection,
    path: str,
    filler: Filler,
    zero: ZeroSection,
    aio: AioSection | None,
) -> OffloadSection:
    parameters = path.endswith("offload_param")
    if filler.platform.accelerator == "cpu":
        section = filler.force(
            section, path, "pin_memory", False, "the CPU accelerator has nothing to pin memory for"
        )
    else:
        section = filler.fill(section, path, "pin_memory", True)
    if not parameters:
        section = filler.fill(section, path, "ratio", 1.0)
    if section.device == "nvme":
        fill = fill_nvme_param if parameters else fill_nvme_optimizer
        return fill(section, path, filler, zero, aio)
    for name in (
        "nvme_path",
        "buffer_count",
        "buffer_size",
        "max_in_cpu",
        "fast_init",
        "pipeline_read",
        "pipeline_write",
    ):
        section = filler.drop(section, path, name, "has an effect only with device nvme")
    return section


def fill_aio(aio: AioSection | None, filler: Filler) -> AioSection:
    """Every key of ``aio``, explicit."""
    path = "aio"
    aio = aio or AioSection()
    if filler.platform.accelerator != "cuda":
        aio = filler.force(aio, path, "use_gds", False, "GPUDirect storage needs CUDA")
    defaults = {
        "block_size": 1_048_576,
        "queue_depth": 8,
        "intra_op_parallelism": 1,
        "single_submit": False,
        "overlap_events": True,
        "use_gds": False,
    }
    for name, value in defaults.items():
        aio = filler.fill(aio, path, name, value)
    return aio
