"""Rules on ``zero_optimization``, on the launcher, and on removed and unknown keys."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any, Final

import attrs

from zerotune._util.text import as_number, format_size
from zerotune.errors import (
    REMOVAL,
    writes,
)
from zerotune.plan import keys as known_keys
from zerotune.plan.accelerate import device_list
from zerotune.plan.resolve.case import Case
from zerotune.plan.resolve.sizes import (
    REDUCE_BUCKET,
)
from zerotune.plan.rules.rule import (
    ZERO_PATH,
    Findings,
    Rule,
    active,
    integer,
    offload_section,
    rule,
)
from zerotune.plan.schema import faults, passed_schema
from zerotune.plan.section import (
    Section,
    join,
    misplaced_key,
    modelled,
    unknown_key,
    value_at,
)
from zerotune.plan.settings import Settings
from zerotune.plan.values import AUTO


@rule(
    "launcher-file",
    "warning",
    reason="`accelerate launch` rejects {what}",
    fix="{write}",
    only_deepspeed=False,
    resolved_elsewhere=True,
    refused_elsewhere=True,
    when=attrgetter("plan.launch"),
)
def launcher_file(case: Case, this: Rule) -> Findings:
    """``accelerate launch`` rejects settings that zerotune reads.

    It needs ``distributed_type`` in capitals, ``num_processes``, and ``gpu_ids`` as text.
    """
    launch = case.plan.launch
    kind = launch.distributed_type if launch else None
    if launch is None or kind is None or kind.upper() != "DEEPSPEED":
        return
    ids, ranks = launch.extra.get("gpu_ids"), case.context.world_size
    if kind != "DEEPSPEED":
        key, words = (
            "launch.distributed_type",
            {"what": "this spelling", "write": "write DEEPSPEED"},
        )
        yield this.finding(key, kind, edits=writes("DEEPSPEED"), **words)
    if launch.num_processes in (None, -1):
        words = {
            "what": "a file that does not set the number of processes",
            "write": f"write the number of processes, such as {ranks}, or pass --num_processes",
        }
        key = "launch.num_processes"
        yield this.finding(key, launch.num_processes, edits=writes(ranks), **words)
    if ids is not None and not isinstance(ids, str):
        text = device_list(ids)
        words = {"what": "device numbers that are not text", "write": f'write "{text}"'}
        yield this.finding("launch.gpu_ids", ids, edits=writes(text), **words)


# -- Rules on ``zero_optimization``, on removed and on unknown keys.


@rule(
    "hpz-partition-size",
    "error",
    reason="DeepSpeed rejects partitions of {size} ranks, because {world_size} ranks cannot be "
    "divided into them",
    fix="write {divisor}",
)
def hpz_partition_size(case: Case, this: Rule) -> Findings:
    """At stage 3, ``zero_hpz_partition_size`` must divide the number of ranks."""
    zero, ranks = case.plan.zero_optimization, case.context.world_size
    size = integer(zero.zero_hpz_partition_size) if zero else None
    if case.plan.stage == 3 and size and ranks % min(size, ranks):
        key = f"{ZERO_PATH}.zero_hpz_partition_size"
        divisor = next(each for each in range(size, 0, -1) if ranks % each == 0)
        words = {"size": size, "world_size": ranks, "divisor": divisor}
        yield this.finding(key, size, edits=writes(divisor), **words)


_LARGE_BUCKET: Final = 512 * 1024**2
"""Minimum bytes of reduce buckets for a note; ``"auto"`` uses a tenth."""


_TWO_BUCKETS: Final = {
    True: ", because overlap_comm needs two buckets",
    False: ", because zerotune turns overlap_comm on for offload, which needs two buckets",
}


@rule(
    "stage-auto",
    "warning",
    reason="without zerotune, DeepSpeed silently trains at stage 0; zerotune chooses stage "
    "{chosen}",
    edits=writes(0, 1, 2, 3),
)
def stage_auto(case: Case, this: Rule) -> Findings:
    """DeepSpeed reads a stage of ``"auto"`` as 0.

    Resolution chooses stage 2, or stage 3 if the offload needs it.
    """
    plan = case.plan
    if plan.stage != AUTO:
        return
    away = {plan.offload_param_device, plan.offload_optimizer_device}
    three = "nvme" in away or plan.offload_param_device == "cpu"
    chosen = "3, which the offload needs" if three else "2, which partitions all but weights"
    key = "zero_optimization.stage"
    yield this.finding(key, AUTO, after=3 if three else 2, chosen=chosen)


@rule("removed-section", "error", reason="DeepSpeed 0.19 removed {what}", edits=(REMOVAL,))
def removed_section(case: Case, this: Rule) -> Findings:
    """DeepSpeed 0.19 removed a section."""
    zero = case.plan.zero_optimization
    places = (
        ("", case.plan.extra, known_keys.REMOVED),
        ("zero_optimization.", zero.extra if zero else {}, known_keys.REMOVED_ZERO),
    )
    for prefix, extra, removed in places:
        for key in sorted(extra.keys() & removed.keys()):
            yield this.finding(f"{prefix}{key}", extra[key], what=removed[key])


@rule("unknown-key", "error", only_deepspeed=False)
def unknown_keys(case: Case, this: Rule) -> Findings:
    """DeepSpeed silently ignores unknown top-level keys; zerotune rejects them.

    Correct the spelling. Keys that begin with an underscore are kept as comments.
    """
    plan = case.plan
    known = {attribute.name for attribute in modelled(Settings)} | plan.passed_through
    for key, value in plan.extra.items():
        if key not in plan.passed_through and not key.startswith("_") and plan.source == "code":
            yield this.refused(unknown_key(Settings, key, value, key, known))


_PARALLEL: Final = {
    "sequence_parallel_size": "ranks that share one sequence",
    "tensor_parallel.autotp_size": "ranks that share one matrix",
    "tensor_parallel.tensor_parallel.tp_size": "ranks that share one matrix",
    "tensor_parallel.tp.tp_size": "ranks that share one matrix",
    "pipeline.stages": "stages of a pipeline",
    "expert_parallel.autoep_size": "ranks that share the experts",
    "hybrid_engine.inference_tp_size": "ranks that share one matrix",
}
"""Description of what each key counts, by path; a count above 1 is not data parallelism."""


_PARALLELISM_CONFIG: Final = {
    "tp_size": "ranks that share one matrix",
    "cp_size": "ranks that share one context",
    "sp_size": "ranks that share one sequence",
}
"""Keys of accelerate's ``parallelism_config``; ``accelerate config`` adds a prefix to each."""


@rule(
    "parallelism",
    "error",
    reason="the key requests {value} {counted}, but zerotune supports only data parallelism, "
    "which its batch sizes assume",
    edits=(REMOVAL, *writes(1)),
    only_deepspeed=False,
)
def parallelism(case: Case, this: Rule) -> Findings:
    """Only data parallelism is supported: sequences, matrices and layers are not split.

    With ``sequence_parallel_size: 2`` DeepSpeed counts only half of the ranks for the train batch
    size, but the model itself must split the sequences.
    """
    section = "parallelism_config"
    places = {path: (path, counted) for path, counted in _PARALLEL.items()}
    for name, counted in _PARALLELISM_CONFIG.items():
        for path in (f"{section}.{name}", f"{section}.{section}_{name}"):
            places[path] = f"launch.{path}", counted
    for path, (written, counted) in places.items():
        value = value_at(case.plan, written, None)
        asked = as_number(value)
        if asked is not None and asked > 1:
            yield this.finding(path, value, value=value, counted=counted)


@rule("passed-through", "error")
def passed_through(case: Case, this: Rule) -> Findings:
    """Sections that zerotune passes through must be valid for DeepSpeed.

    Correct the value as the finding says. Names, types and ranges come from the schema passed to
    ``check``, by default the schema of DeepSpeed 0.19.8.
    """
    plan, schema = case.plan, passed_schema()
    if case.context.schema is not None:
        schema = case.context.schema.get("properties", {})
    zero = plan.zero_optimization
    known = schema.get("zero_optimization", {}).get("properties", {})
    places: list[tuple[str, Section | None, Mapping[str, Any]]] = [
        ("", plan, schema),
        ("zero_optimization", zero, known),
    ]
    for part in ("offload_optimizer", "offload_param"):
        inside = known.get(part, {})
        branches = [inside, *inside.get("anyOf", ())]
        keys: Any = next((each["properties"] for each in branches if "properties" in each), {})
        places.append((f"zero_optimization.{part}", getattr(zero, part, None), keys))
    for prefix, section, keys in places:
        extra: Mapping[str, Any] = getattr(section, "extra", {})
        for key, value in extra.items():
            path = join(prefix, key)
            if prefix.endswith("offload_param") and key not in keys:
                yield this.refused(misplaced_key(path, value, "offload_optimizer"))
            elif key in keys:
                for each in faults(value, keys[key], path):
                    yield attrs.evolve(each, rule=this.id)


@rule(
    "large-reduce-bucket",
    "note",
    reason="the bucket uses {cost} of device memory{doubled}",
    edits=writes(REDUCE_BUCKET, AUTO),
)
def large_bucket(case: Case, this: Rule) -> Findings:
    """A reduce bucket uses device memory; below stage 3, ``overlap_comm`` doubles the amount.

    DeepSpeed's default of 5e8 elements uses 0.93 GiB in 16 bits, and 1.86 GiB with ``overlap_comm``
    at stages 1 and 2. With ``"auto"`` the bucket is as large as the largest tensor.
    """
    plan, zero = case.plan, case.plan.zero_optimization
    size = integer(zero.reduce_bucket_size) if zero else None
    if zero is None or size is None or plan.stage not in (1, 2, 3):
        return
    offloads = active(offload_section(plan, "optimizer"))
    if zero.contiguous_gradients is False and not offloads:
        return
    # As resolution chooses if overlap_comm is not set.
    overlaps = zero.overlap_comm is True or (zero.overlap_comm is not False and offloads)
    buckets = 2 if overlaps and plan.stage != 3 else 1
    cost = buckets * size * (4 if plan.precision == "fp32" else 2)
    if cost >= _LARGE_BUCKET:
        yield this.finding(
            "zero_optimization.reduce_bucket_size",
            size,
            cost=format_size(cost),
            doubled=_TWO_BUCKETS[zero.overlap_comm is True] if buckets == 2 else "",
        )
