"""All rules, in the order they are checked."""

from __future__ import annotations

from typing import Final

import attrs

from zerotune.decisions import Decision, name_of, worst_first
from zerotune.plan.context import Context
from zerotune.plan.resolve.case import Case
from zerotune.plan.rules.choice import (
    muon_convolutions,
    number_as_text,
    optimizer_lr_unset,
    optimizer_spelling,
    scheduler_cycle,
    scheduler_peak_unset,
    scheduler_total,
    scheduler_warmup_number,
    warmup_too_long,
)
from zerotune.plan.rules.offload import (
    nvme_optimizer_buffers,
    nvme_param_buffers,
    nvme_param_prefetch,
    nvme_path_unset,
    nvme_pipeline_buffers,
    nvme_sub_group_size,
    offload_without_device,
    partial_offload_optimizer,
    pinned_memory,
    super_offload,
    super_offload_accelerator,
)
from zerotune.plan.rules.rows import SETTING_RULES
from zerotune.plan.rules.rule import Rule
from zerotune.plan.rules.training import (
    accumulation_twice,
    batch_triple,
    bf16_emulated,
    clipping_in_the_optimizer,
    clipping_twice,
    clipping_unset,
    fp16_on_cpu,
    micro_batch_unset,
    precision_conflict,
    precision_unsupported,
    world_size,
)
from zerotune.plan.rules.zero import (
    gradient_norm,
    gradient_sum,
    hpz_partition_size,
    large_bucket,
    launcher_file,
    parallelism,
    passed_through,
    removed_section,
    stage_auto,
    unknown_keys,
    zenflow,
)
from zerotune.plan.settings import Settings

# Their statements about DeepSpeed come from the code of 0.19.8, or from runs with it.

RULES: Final = (
    batch_triple,
    accumulation_twice,
    world_size,
    micro_batch_unset,
    offload_without_device,
    partial_offload_optimizer,
    super_offload_accelerator,
    super_offload,
    pinned_memory,
    optimizer_spelling,
    optimizer_lr_unset,
    muon_convolutions,
    clipping_twice,
    clipping_in_the_optimizer,
    clipping_unset,
    precision_conflict,
    precision_unsupported,
    fp16_on_cpu,
    bf16_emulated,
    warmup_too_long,
    scheduler_total,
    scheduler_cycle,
    scheduler_peak_unset,
    scheduler_warmup_number,
    nvme_path_unset,
    nvme_optimizer_buffers,
    nvme_pipeline_buffers,
    nvme_sub_group_size,
    nvme_param_buffers,
    nvme_param_prefetch,
    number_as_text,
    launcher_file,
    hpz_partition_size,
    stage_auto,
    removed_section,
    unknown_keys,
    parallelism,
    passed_through,
    gradient_norm,
    gradient_sum,
    zenflow,
    large_bucket,
    *SETTING_RULES,
)
"""Every rule, in the order they are checked."""


FIRST: Final = (stage_auto, offload_without_device)
"""Rules whose corrections other rules depend on, applied first."""


REPAIRS: Final = tuple(
    each
    for each in RULES
    if each.severity != "note" and not each.resolved_elsewhere and each not in FIRST
)
"""Other rules that reject a plan or change it during resolution."""


def all_rules() -> tuple[Rule, ...]:
    """Return all rules in the order of checking."""
    return RULES


def check_plan(plan: Settings, context: Context) -> tuple[Decision, ...]:
    """Return all findings of the rules: errors first, then in the order of the rules."""
    return findings_of(Case(plan=plan, context=context), RULES)


def findings_of(case: Case, rules: tuple[Rule, ...]) -> tuple[Decision, ...]:
    """Return the findings of some rules, errors first."""
    findings = [finding for each in rules for finding in each.find(case)]
    names = case.plan.names
    if names:
        findings = [attrs.evolve(each, written=name_of(each.key, names)) for each in findings]
    return tuple(worst_first(findings))
