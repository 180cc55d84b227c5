"""Every behaviour key of ``zero_optimization`` and ``aio``, written explicitly."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

import attrs

from zerotune.decisions import Log, Severity
from zerotune.errors import (
    InvalidValueError,
    UnresolvedPlanError,
    writes,
)
from zerotune.plan.facts import ModelFacts
from zerotune.plan.render import automatic_paths
from zerotune.plan.resolve.batch import ACCUMULATION, CLIPPING, MICRO, TRAIN, clipping, overruled
from zerotune.plan.resolve.case import Case
from zerotune.plan.resolve.precision import enabled_precisions
from zerotune.plan.resolve.sizes import (
    NO_PREFETCH,
    PARAM_BUFFER,
    PARAM_BUFFERS,
    PERSISTENT_SHARE,
    SUB_GROUP,
    SUB_GROUP_NVME,
    allgather_bucket,
    leaf_blocks,
    max_live,
    optimizer_buffers,
    persistence_threshold,
    prefetch_bucket,
    reduce_bucket,
)
from zerotune.plan.resolved import (
    LEAF_MODULE,
)
from zerotune.plan.section import Section, SectionT, evolved, join
from zerotune.plan.sections import (
    FP16_BESIDE,
    AioSection,
    Bf16Section,
    Fp16Section,
    OffloadSection,
    ZeroSection,
)
from zerotune.plan.settings import Settings
from zerotune.plan.values import AUTO
from zerotune.platform.facts import CUDA

_FP16_DEFAULTS: dict[str, Any] = {
    "auto_cast": False,
    "loss_scale": 0.0,
    "initial_scale_power": 16,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "consecutive_hysteresis": False,
    "min_loss_scale": 1,
    "fp16_master_weights_and_grads": False,
}


# -- Every behaviour key of ``zero_optimization`` and ``aio``, written explicitly.
#
# DeepSpeed's defaults change between releases, so an unset key would depend on the installed
# version. A value in the plan takes precedence, unless the platform does not support it.

_DEEPSPEED_DEFAULT: Final = (
    "the default of DeepSpeed 0.19.8, set explicitly because defaults change"
)


_ALL = (1, 2, 3)


_LOW = (1, 2)


_HIGH = (3,)


@attrs.define(kw_only=True)
class Filler(Log):
    """Fills in the unset keys of a plan, and records a decision for each."""

    case: Case
    """The plan before the rules' corrections; no correction changes batch sizes or precision."""
    stage: int
    aio: AioSection | None = None
    """As it is written."""

    @property
    def model(self) -> ModelFacts | None:
        """The model; ``None`` if unknown."""
        return self.case.context.model

    @property
    def accelerator(self) -> str:
        """The machine's."""
        return self.case.context.machine.accelerator

    def fill(
        self, section: SectionT, path: str, name: str, chosen: Any, reason: str | None = None
    ) -> SectionT:
        """Set a key that is unset or "auto"; without a reason, to DeepSpeed's default."""
        written = getattr(section, name)
        if written is not None and written != AUTO:
            return section
        why = _DEEPSPEED_DEFAULT if reason is None else reason
        self.decide(join(path, name), written, chosen, why, is_default=reason is None)
        return evolved(section, **{name: chosen})

    def force(
        self,
        section: SectionT,
        path: str,
        name: str,
        value: Any,
        reason: str,
        severity: Severity = "note",
    ) -> SectionT:
        """Set the key ``name`` to ``value``, or remove it (``None``), and record a decision."""
        written = getattr(section, name)
        if written == value:
            return section
        before = written.to_dict() if isinstance(written, Section) else written
        self.decide(join(path, name), before, value, reason, severity)
        return evolved(section, **{name: value})

    def _fill_precision(self, plan: Settings) -> tuple[Bf16Section, Fp16Section]:
        """Return the ``bf16`` and ``fp16`` sections with every key set."""
        precision, _ = self.case.precision
        bf16 = attrs.evolve(plan.bf16 or Bf16Section(), enabled=precision == "bf16")
        fp16 = attrs.evolve(plan.fp16 or Fp16Section(), enabled=precision == "fp16")
        launched = plan.launch.mixed_precision if plan.launch else None
        if (
            launched == "fp16"
            and plan.fp16 is None
            and enabled_precisions(plan)["bf16"] is not True
        ):
            fp16 = attrs.evolve(fp16, auto_cast=FP16_BESIDE.auto_cast)
            why = "accelerate casts the inputs if only mixed_precision requests fp16"
            self.decide("fp16.auto_cast", None, FP16_BESIDE.auto_cast, why)
        for name in (
            "immediate_grad_update",
            "bf16_master_weights_and_grads",
            "bf16_optimizer_states",
        ):
            bf16 = self._quiet_fill(bf16, "bf16", name, False)
        bf16 = self._quiet_fill(bf16, "bf16", "check_grad_overflow", True)
        for name, value in _FP16_DEFAULTS.items():
            fp16 = self._quiet_fill(fp16, "fp16", name, value)
        return bf16, fp16

    def _quiet_fill(self, section: Any, path: str, name: str, value: Any) -> Any:
        # The keys of a disabled precision are written too, without decisions.
        if section.enabled:
            return self.fill(section, path, name, value)
        if getattr(section, name) in (None, AUTO):
            return attrs.evolve(section, **{name: value})
        return section

    def _without_lossy_swapping(self, zero: ZeroSection) -> ZeroSection:
        """Move fp32 parameters from NVMe to host memory if DeepSpeed would round them to bf16.

        Found in the code and in runs of DeepSpeed 0.19.8: on an accelerator without fp16,
        ``zero.Init`` swaps through bf16 buffers whatever the model's dtype is (``_set_dtype`` lacks
        parentheses). The forward pass then fails, or, with ``max_in_cpu``, silently uses rounded
        weights.
        """
        section = zero.offload_param
        if section is None or section.device != "nvme":
            return zero
        swapping = self.case.swapping(self.aio)
        if not self.case.rounds_swapped:
            return zero
        if swapping is not None and swapping.largest is None:
            return zero
        kept = self.force(
            section,
            "zero_optimization.offload_param",
            "device",
            "cpu",
            "on an accelerator without fp16, DeepSpeed 0.19.8 rounds fp32 parameters to "
            "bf16 when it swaps them to NVMe; the parameters stay in host memory instead",
            "warning",
        )
        return attrs.evolve(zero, offload_param=kept)

    def _fill_nvme_param(
        self, section: OffloadSection, path: str, zero: ZeroSection
    ) -> OffloadSection:
        """Return ``offload_param`` on NVMe with every key set."""
        swapping = self.case.swapping(self.aio)
        need, what = swapping.buffer_need(zero) if swapping else (0, "")
        written = section.buffer_size
        if isinstance(written, int) and written < need:
            raise InvalidValueError(
                f"is smaller than {what} = {need} elements; buffer_size counts elements, not bytes",
                f'write at least {need}, or "{AUTO}"',
                f"{path}.buffer_size",
                written,
                edits=writes(need, AUTO),
            )
        size, why = need, f"elements of {what}"
        if swapping is None:
            size, why = PARAM_BUFFER, "elements; no model was given, so this is DeepSpeed's default"
        elif not need:
            size = max(1, *swapping.model.parts(swapping.world_size), 1)
            why = "elements; no parameter of this model is large enough to be swapped"
        section = self.fill(section, path, "buffer_size", size, why)
        count = section.buffer_count
        least = swapping.gathered(recomputed=False) if swapping else 0
        if swapping is not None and isinstance(count, int) and count < least:
            raise InvalidValueError(
                f"is smaller than {least}, the number of weights that a single module needs at "
                "once",
                f'write at least {swapping.buffers}, or "{AUTO}"',
                f"{path}.buffer_count",
                count,
                edits=writes(swapping.buffers, AUTO),
            )
        section = self.fill(
            section,
            path,
            "buffer_count",
            swapping.buffers if swapping else PARAM_BUFFERS,
            "one buffer for each weight that is gathered at once, which are all weights of a block "
            "while it is recomputed, and two spare buffers",
        )
        section = self.fill(
            section,
            path,
            "max_in_cpu",
            0,
            "DeepSpeed's default of 1e9 would keep smaller models in host memory instead of "
            "on NVMe",
        )
        return self._without_auto_path(section, path)

    def _fill_nvme_optimizer(self, section: OffloadSection, path: str) -> OffloadSection:
        """Return ``offload_optimizer`` on NVMe with every key set."""
        for name in ("pipeline_read", "pipeline_write", "fast_init"):
            section = self.fill(section, path, name, False)
        why = "one buffer each for weight, gradient and two moments of every resident sub-group"
        section = self.fill(section, path, "buffer_count", optimizer_buffers(section), why)
        return self._without_auto_path(section, path)

    def _without_auto_path(self, section: OffloadSection, path: str) -> OffloadSection:
        if section.nvme_path == AUTO:
            return self.force(
                section, path, "nvme_path", None, "each run creates a temporary folder"
            )
        return section

    def _overlap(self, zero: ZeroSection) -> tuple[bool, str]:
        if self.accelerator == "cpu":
            return False, "the CPU accelerator has no streams for overlap"
        offloads = zero.offload_optimizer is not None and zero.offload_optimizer.device != "none"
        if self.stage == 3 or offloads:
            return (
                True,
                "without overlap, gradients are reduced and copied on the compute stream",
            )
        return False, "overlap doubles the bucket, and helps only if gradients are communicated"

    def _persistence(self, _zero: ZeroSection) -> tuple[int, str]:
        threshold, persistent = persistence_threshold(self.model)
        model = self.model
        if model is None:
            return threshold, "no model was given; biases and norms stay unpartitioned"
        share = persistent / model.numel if model.numel else 0.0
        return threshold, (
            f"leaves {persistent:,} of {model.numel:,} elements unpartitioned ({share:.2%};"
            f" the limit is {PERSISTENT_SHARE:.0%})"
        )

    def _sub_group(self, zero: ZeroSection) -> tuple[int, str]:
        if zero.offload_optimizer is not None and zero.offload_optimizer.device == "nvme":
            return SUB_GROUP_NVME, (
                "the swap pool page-locks several buffers, each as large as the largest sub-group"
            )
        return SUB_GROUP, "limits the temporary memory of the optimizer step"

    def _fill_zero(self, zero: ZeroSection) -> ZeroSection:
        """Return ``zero`` with every key that has an effect at this stage, and no others.

        Offload sections without effect must already have been removed.
        """
        path = "zero_optimization"
        zero = attrs.evolve(zero, stage=self.stage)
        if self.stage == 3:
            zero = self._without_lossy_swapping(zero)
            if self.case.swaps_parameters(zero, self.aio):
                zero = self.fill(zero, path, "stage3_prefetch_bucket_size", 0, NO_PREFETCH)
        for name, (stages, chosen) in _CHOICES.items():
            if self.stage not in stages:
                zero = self.force(
                    zero, path, name, None, f"the key has no effect at stage {self.stage}"
                )
            else:
                zero = self.fill(zero, path, name, *chosen(self, zero))
        zero = self._with_leaf_modules(zero)
        for name in ("offload_optimizer", "offload_param"):
            section: OffloadSection | None = getattr(zero, name)
            if section is not None:
                filled = self._fill_offload(section, f"{path}.{name}", zero)
                zero = evolved(zero, **{name: filled})
        return zero

    def _with_leaf_modules(self, zero: ZeroSection) -> ZeroSection:
        key = f"zero_optimization.{LEAF_MODULE}"
        written = zero.extra.get(LEAF_MODULE)
        model = self.model
        if written is not None or self.stage != 3 or model is None:
            return zero
        blocks = leaf_blocks(model)
        if not blocks or self.case.swaps_parameters(zero, self.aio):
            return zero
        value = {"classes": [block.class_name for block in blocks]}
        count = sum(block.count for block in blocks)
        self.decide(
            key, None, value, f"{count} blocks are fetched as a whole instead of layer by layer"
        )
        return evolved(zero, extra={**zero.extra, LEAF_MODULE: value})

    def _fill_offload(
        self, section: OffloadSection, path: str, zero: ZeroSection
    ) -> OffloadSection:
        parameters = path.endswith("offload_param")
        if self.accelerator == "cpu":
            section = self.force(
                section, path, "pin_memory", False, "the CPU accelerator needs no pinned memory"
            )
        else:
            section = self.fill(section, path, "pin_memory", True)
        if not parameters:
            section = self.fill(section, path, "ratio", 1.0)
        if section.device == "nvme":
            if parameters:
                return self._fill_nvme_param(section, path, zero)
            return self._fill_nvme_optimizer(section, path)
        for name in (
            "nvme_path",
            "buffer_count",
            "buffer_size",
            "max_in_cpu",
            "fast_init",
            "pipeline_read",
            "pipeline_write",
        ):
            section = self.force(
                section, path, name, None, 'the key has an effect only with device "nvme"'
            )
        return section

    def _fill_aio(self) -> AioSection:
        """Return the ``aio`` section with every key set."""
        path = "aio"
        section = self.aio or AioSection()
        if self.accelerator != CUDA:
            section = self.force(section, path, "use_gds", False, "GPUDirect storage requires CUDA")
        defaults = {
            "block_size": 1_048_576,
            "queue_depth": 8,
            "intra_op_parallelism": 1,
            "single_submit": False,
            "overlap_events": True,
            "use_gds": False,
        }
        for name, value in defaults.items():
            section = self.fill(section, path, name, value)
        return section

    def filled_in(self, plan: Settings) -> Settings:
        """Return ``plan`` with every key set."""
        context = self.case.context
        batch, why = self.case.batch
        self.decisions.extend(why)
        norm, reason = clipping(plan, context.run)
        written = plan.gradient_clipping
        if written is None or isinstance(written, str):
            self.decide(CLIPPING, written, norm, reason)
        else:
            stands = "number takes precedence over that of the run"
            overruled(self, CLIPPING, context.run.gradient_clipping, written, stands)
        bf16, fp16 = self._fill_precision(plan)
        zero, aio = None if context.uses_deepspeed else plan.zero_optimization, None
        if context.uses_deepspeed:
            zero = self._fill_zero(plan.zero_optimization or ZeroSection())
            swaps = any(
                section is not None and section.device == "nvme"
                for section in (zero.offload_param, zero.offload_optimizer)
            )
            aio = self._fill_aio() if swaps or plan.aio else None
        plan = evolved(
            plan,
            **{TRAIN: batch.train, MICRO: batch.micro, ACCUMULATION: batch.accumulation},
            gradient_clipping=norm,
            bf16=bf16,
            fp16=fp16,
            zero_optimization=zero,
            aio=aio,
        )
        plan = self.fill(plan, "", "wall_clock_breakdown", False)
        if plan.steps_per_print == AUTO:
            plan = self.force(plan, "", "steps_per_print", None, "zerotune reports progress itself")
        for name in ("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"):
            if getattr(plan, name) == AUTO:
                plan = self.force(plan, "", name, None, "determined by the optimizer")
        for path in automatic_paths(attrs.evolve(plan, optimizer=None, scheduler=None).to_dict()):
            raise UnresolvedPlanError(
                "zerotune has no automatic value for this key", "write a value", path, AUTO
            )
        return plan


_Choose = Callable[[Filler, ZeroSection], tuple[Any, str | None]]


def _always(value: Any) -> _Choose:
    return lambda _filler, _zero: (value, None)


def _sized(what: Callable[[ModelFacts | None], int], why: str) -> _Choose:
    def choose(filler: Filler, _zero: ZeroSection) -> tuple[int, str]:
        known = "" if filler.model else "; no model was given, so a general size is used"
        return what(filler.model), why + known

    return choose


_BUCKET_WHY = "at least the size of the largest tensor, at most the size of all trainable tensors"


_CHOICES: dict[str, tuple[tuple[int, ...], _Choose]] = {
    "overlap_comm": (_ALL, Filler._overlap),
    "contiguous_gradients": (_ALL, _always(True)),
    "reduce_scatter": (_ALL, _always(True)),
    "reduce_bucket_size": (_ALL, _sized(reduce_bucket, _BUCKET_WHY)),
    "allgather_partitions": (_LOW, _always(True)),
    "allgather_bucket_size": (_LOW, _sized(allgather_bucket, _BUCKET_WHY)),
    "use_multi_rank_bucket_allreduce": (_LOW, _always(True)),
    "round_robin_gradients": (_LOW, _always(False)),
    "ignore_unused_parameters": (_LOW, _always(True)),
    "load_from_fp32_weights": (_ALL, _always(True)),
    "elastic_checkpoint": (_ALL, _always(False)),
    "sub_group_size": (_HIGH, Filler._sub_group),
    "stage3_prefetch_bucket_size": (
        _HIGH,
        _sized(prefetch_bucket, "the size of one block, but at least that of the largest tensor"),
    ),
    "stage3_param_persistence_threshold": (_HIGH, Filler._persistence),
    "stage3_model_persistence_threshold": (_HIGH, _always(sys.maxsize)),
    "stage3_max_live_parameters": (
        _HIGH,
        _sized(max_live, "twice the prefetch size; each element uses two bytes of device memory"),
    ),
    "stage3_max_reuse_distance": (
        _HIGH,
        lambda _filler, _zero: (0, "a parameter kept for reuse needs device memory"),
    ),
    "stage3_gather_16bit_weights_on_model_save": (
        _HIGH,
        lambda _filler, _zero: (False, f"zerotune exports without gathering; {_DEEPSPEED_DEFAULT}"),
    ),
    "stage3_module_granularity_threshold": (_HIGH, _always(0)),
    "memory_efficient_linear": (_HIGH, _always(True)),
    "zero_hpz_partition_size": (_HIGH, _always(1)),
    "zero_quantized_weights": (_HIGH, _always(False)),
    "zero_quantized_nontrainable_weights": (_HIGH, _always(False)),
    "zero_quantized_gradients": (_HIGH, _always(False)),
}
"""Stages where each key has an effect, and how its value is chosen."""


def stages_of(name: str) -> tuple[int, ...]:
    """Return the ZeRO stages at which a key has an effect; empty for an unknown key."""
    return _CHOICES[name][0] if name in _CHOICES else _OFFLOAD_STAGES.get(name, ())


_OFFLOAD_STAGES = {"offload_optimizer": _ALL, "offload_param": _HIGH}
