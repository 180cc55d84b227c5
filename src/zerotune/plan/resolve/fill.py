"""Every behaviour key of ``zero_optimization`` and ``aio``, written explicitly."""

from __future__ import annotations

import sys
from collections.abc import Mapping
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
    AIO_BLOCK,
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

# DeepSpeed's defaults change between releases, so an unset key would depend on the installed
# version. A value in the plan takes precedence, unless the platform does not support it.

_DEEPSPEED_DEFAULT: Final = (
    "the default of DeepSpeed 0.19.8, set explicitly because defaults change"
)

_BF16: Final = {
    "immediate_grad_update": False,
    "bf16_master_weights_and_grads": False,
    "bf16_optimizer_states": False,
    "check_grad_overflow": True,
}

_FP16: Final = {
    "auto_cast": False,
    "loss_scale": 0.0,
    "initial_scale_power": 16,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "consecutive_hysteresis": False,
    "min_loss_scale": 1,
    "fp16_master_weights_and_grads": False,
}

_AIO: Final = {
    "block_size": AIO_BLOCK,
    "queue_depth": 8,
    "intra_op_parallelism": 1,
    "single_submit": False,
    "overlap_events": True,
    "use_gds": False,
}

_ONLY_NVME: Final = (
    "nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "fast_init", "pipeline_read",
    "pipeline_write",
)  # fmt: skip

_ALL, _LOW, _HIGH = (1, 2, 3), (1, 2), (3,)
_CHOSEN: Final = None

_ZERO: Final[Mapping[str, tuple[tuple[int, ...], Any]]] = {
    "overlap_comm": (_ALL, _CHOSEN),
    "contiguous_gradients": (_ALL, True),
    "reduce_scatter": (_ALL, True),
    "reduce_bucket_size": (_ALL, _CHOSEN),
    "allgather_partitions": (_LOW, True),
    "allgather_bucket_size": (_LOW, _CHOSEN),
    "use_multi_rank_bucket_allreduce": (_LOW, True),
    "round_robin_gradients": (_LOW, False),
    "ignore_unused_parameters": (_LOW, True),
    "load_from_fp32_weights": (_ALL, True),
    "elastic_checkpoint": (_ALL, False),
    "sub_group_size": (_HIGH, _CHOSEN),
    "stage3_prefetch_bucket_size": (_HIGH, _CHOSEN),
    "stage3_param_persistence_threshold": (_HIGH, _CHOSEN),
    "stage3_model_persistence_threshold": (_HIGH, sys.maxsize),
    "stage3_max_live_parameters": (_HIGH, _CHOSEN),
    "stage3_max_reuse_distance": (_HIGH, _CHOSEN),
    "stage3_gather_16bit_weights_on_model_save": (_HIGH, _CHOSEN),
    "stage3_module_granularity_threshold": (_HIGH, 0),
    "memory_efficient_linear": (_HIGH, True),
    "zero_hpz_partition_size": (_HIGH, 1),
    "zero_quantized_weights": (_HIGH, False),
    "zero_quantized_nontrainable_weights": (_HIGH, False),
    "zero_quantized_gradients": (_HIGH, False),
}
"""Stages at which each key has an effect, and DeepSpeed's default unless ``_Filler`` chooses."""

_OFFLOAD_STAGES: Final = {"offload_optimizer": _ALL, "offload_param": _HIGH}


def stages_of(name: str) -> tuple[int, ...]:
    """Return the ZeRO stages at which a key has an effect; empty for an unknown key."""
    return _ZERO[name][0] if name in _ZERO else _OFFLOAD_STAGES.get(name, ())


def filled_in(plan: Settings, case: Case, log: Log) -> Settings:
    """Return a plan with every key set, and record the decisions.

    Args:
        plan: The plan after the rules' corrections.
        case: The plan before them; no correction changes batch sizes or precision.
        log: Log of decisions.
    """
    context = case.context
    batch, why = case.batch
    log.decisions.extend(why)
    norm, reason = clipping(plan, context.run)
    written = plan.gradient_clipping
    if written is None or isinstance(written, str):
        log.decide(CLIPPING, written, norm, reason)
    else:
        stands = "number takes precedence over that of the run"
        overruled(log, CLIPPING, context.run.gradient_clipping, written, stands)
    filler = _Filler(case=case, stage=int(plan.stage), decisions=log.decisions)
    bf16, fp16 = filler.precisions(plan)
    zero, aio = None if context.uses_deepspeed else plan.zero_optimization, None
    if context.uses_deepspeed:
        zero = filler.zero(plan.zero_optimization or ZeroSection())
        swaps = any(part and part.device == "nvme" for part in _offload_sections(zero).values())
        aio = filler.aio() if swaps or plan.aio else None
    plan = evolved(
        plan,
        **{TRAIN: batch.train, MICRO: batch.micro, ACCUMULATION: batch.accumulation},
        gradient_clipping=norm,
        bf16=bf16,
        fp16=fp16,
        zero_optimization=zero,
        aio=aio,
    )
    plan = filler.fill(plan, "", "wall_clock_breakdown", False)
    for name, reason in (
        ("steps_per_print", "zerotune reports progress itself"),
        ("zero_allow_untested_optimizer", "determined by the optimizer"),
        ("zero_force_ds_cpu_optimizer", "determined by the optimizer"),
    ):
        if getattr(plan, name) == AUTO:
            plan = filler.force(plan, "", name, None, reason)
    for path in automatic_paths(attrs.evolve(plan, optimizer=None, scheduler=None).to_dict()):
        raise UnresolvedPlanError(
            "zerotune has no automatic value for this key", "write a value", path, AUTO
        )
    return plan


def _offload_sections(zero: ZeroSection) -> dict[str, OffloadSection | None]:
    return {name: getattr(zero, name) for name in _OFFLOAD_STAGES}


@attrs.define(kw_only=True)
class _Filler(Log):
    """Fills in the unset keys of a plan's sections, and records a decision for each."""

    case: Case
    stage: int

    def fill(
        self,
        section: SectionT,
        path: str,
        name: str,
        chosen: Any,
        reason: str | None = None,
        *,
        quiet: bool = False,
    ) -> SectionT:
        """Set a key that is unset or "auto"; without a reason, to DeepSpeed's default."""
        written = getattr(section, name)
        if written is not None and written != AUTO:
            return section
        if not quiet:
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

    def precisions(self, plan: Settings) -> tuple[Bf16Section, Fp16Section]:
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
            why = "accelerate casts the inputs if only mixed_precision requests fp16"
            fp16 = self.fill(fp16, "fp16", "auto_cast", FP16_BESIDE.auto_cast, why)
        # The keys of a disabled precision are written too, without decisions.
        for name, value in _BF16.items():
            bf16 = self.fill(bf16, "bf16", name, value, quiet=not bf16.enabled)
        for name, default in _FP16.items():
            fp16 = self.fill(fp16, "fp16", name, default, quiet=not fp16.enabled)
        return bf16, fp16

    def aio(self) -> AioSection:
        """Return the ``aio`` section with every key set."""
        section = self.case.plan.aio or AioSection()
        if self.case.context.machine.accelerator != CUDA:
            why = "GPUDirect storage requires CUDA"
            section = self.force(section, "aio", "use_gds", False, why)
        for name, value in _AIO.items():
            section = self.fill(section, "aio", name, value)
        return section

    def zero(self, zero: ZeroSection) -> ZeroSection:
        """Return ``zero`` with every key that has an effect at this stage, and no others.

        Offload sections without effect must already have been removed.
        """
        path = "zero_optimization"
        zero = attrs.evolve(zero, stage=self.stage)
        if self.stage == 3:
            zero = self._without_lossy_swapping(zero)
            if self.case.swaps_parameters(zero):
                zero = self.fill(zero, path, "stage3_prefetch_bucket_size", 0, NO_PREFETCH)
        chosen = self._chosen(zero)
        for name, (stages, default) in _ZERO.items():
            if self.stage not in stages:
                why = f"the key has no effect at stage {self.stage}"
                zero = self.force(zero, path, name, None, why)
            else:
                zero = self.fill(zero, path, name, *chosen.get(name, (default,)))
        zero = self._with_leaf_modules(zero)
        for name, section in _offload_sections(zero).items():
            if section is not None:
                filled = self._offload(section, f"{path}.{name}", zero)
                zero = evolved(zero, **{name: filled})
        return zero

    def _chosen(self, zero: ZeroSection) -> dict[str, tuple[Any, str]]:
        """Return the values that differ from DeepSpeed's defaults, each with its reason."""
        model, offload = self.case.context.model, zero.offload_optimizer
        known = "" if model else "; no model was given, so a general size is used"
        why = "at least the size of the largest tensor, at most the size of all trainable tensors"
        overlap = False, "overlap doubles the bucket, and helps only if gradients are communicated"
        if self.case.context.machine.accelerator == "cpu":
            overlap = False, "the CPU accelerator has no streams for overlap"
        elif self.stage == 3 or (offload is not None and offload.device != "none"):
            overlap = (
                True,
                "without overlap, gradients are reduced and copied on the compute stream",
            )
        chosen: dict[str, tuple[Any, str]] = {
            "overlap_comm": overlap,
            "reduce_bucket_size": (reduce_bucket(model), why + known),
            "allgather_bucket_size": (allgather_bucket(model), why + known),
        }
        if self.stage != 3:
            return chosen
        group = SUB_GROUP, "limits the temporary memory of the optimizer step"
        if offload is not None and offload.device == "nvme":
            why = "the swap pool page-locks several buffers, each as large as the largest sub-group"
            group = SUB_GROUP_NVME, why
        prefetch = "the size of one block, but at least that of the largest tensor"
        live = "twice the prefetch size; each element uses two bytes of device memory"
        gathering = f"zerotune exports without gathering; {_DEEPSPEED_DEFAULT}"
        return chosen | {
            "sub_group_size": group,
            "stage3_prefetch_bucket_size": (prefetch_bucket(model), prefetch + known),
            "stage3_param_persistence_threshold": _persistence(model),
            "stage3_max_live_parameters": (max_live(model), live + known),
            "stage3_max_reuse_distance": (0, "a parameter kept for reuse needs device memory"),
            "stage3_gather_16bit_weights_on_model_save": (False, gathering),
        }

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
        swapping = self.case.swapping
        if not self.case.rounds_swapped or (swapping is not None and swapping.largest is None):
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
        swapping = self.case.swapping
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
        why = "DeepSpeed's default of 1e9 would keep smaller models in host memory instead of "
        return self.fill(section, path, "max_in_cpu", 0, f"{why}on NVMe")

    def _with_leaf_modules(self, zero: ZeroSection) -> ZeroSection:
        key = f"zero_optimization.{LEAF_MODULE}"
        written = zero.extra.get(LEAF_MODULE)
        model = self.case.context.model
        if written is not None or self.stage != 3 or model is None:
            return zero
        blocks = leaf_blocks(model)
        if not blocks or self.case.swaps_parameters(zero):
            return zero
        value = {"classes": [block.class_name for block in blocks]}
        count = sum(block.count for block in blocks)
        self.decide(
            key, None, value, f"{count} blocks are fetched as a whole instead of layer by layer"
        )
        return evolved(zero, extra={**zero.extra, LEAF_MODULE: value})

    def _offload(self, section: OffloadSection, path: str, zero: ZeroSection) -> OffloadSection:
        if self.case.context.machine.accelerator == "cpu":
            why = "the CPU accelerator needs no pinned memory"
            section = self.force(section, path, "pin_memory", False, why)
        else:
            section = self.fill(section, path, "pin_memory", True)
        parameters = path.endswith("offload_param")
        if not parameters:
            section = self.fill(section, path, "ratio", 1.0)
        if section.device != "nvme":
            why = 'the key has an effect only with device "nvme"'
            for name in _ONLY_NVME:
                section = self.force(section, path, name, None, why)
            return section
        if section.nvme_path == AUTO:
            why = "each run creates a temporary folder"
            section = self.force(section, path, "nvme_path", None, why)
        if parameters:
            return self._fill_nvme_param(section, path, zero)
        for name in ("pipeline_read", "pipeline_write", "fast_init"):
            section = self.fill(section, path, name, False)
        why = "one buffer each for weight, gradient and two moments of every resident sub-group"
        return self.fill(section, path, "buffer_count", optimizer_buffers(section), why)


def _persistence(model: ModelFacts | None) -> tuple[int, str]:
    threshold, persistent = persistence_threshold(model)
    if model is None:
        return threshold, "no model was given; biases and norms stay unpartitioned"
    share = persistent / model.numel if model.numel else 0.0
    return threshold, (
        f"leaves {persistent:,} of {model.numel:,} elements unpartitioned ({share:.2%};"
        f" the limit is {PERSISTENT_SHARE:.0%})"
    )
