"""Write ``rules.md`` from the rules: ``python docs/generate_rules.py``."""

from __future__ import annotations

import re
from pathlib import Path

from zerotune.plan.rules.rule import Rule
from zerotune.plan.rules.table import all_rules

TARGET = Path(__file__).with_name("rules.md")

HEAD = """\
# Rules

`plan.check()` applies the rules on this page to a plan. `plan.resolve()` applies them before it
fills in any value. A finding is an error, a warning or a note. An *error* stops `resolve()`, a
*warning* becomes a recorded decision, and a *note* is reported only by `check()`. Every finding
names the key, the value, the reason and the fix:

```{doctest}
>>> from zerotune import DeepSpeedPlan
>>> plan = DeepSpeedPlan.build(stage=2, offload="nvme")
>>> for finding in plan.check():
...     print(finding.severity, finding.rule, finding.key)
error nvme-optimizer-below-stage-3 zero_optimization.offload_optimizer.device

```

The statements about DeepSpeed were verified by reading or running DeepSpeed 0.19.8.
`python docs/generate_rules.py` writes this page.
"""

MEANING = {
    "error": "Errors",
    "warning": "Warnings",
    "note": "Notes",
}


STRICTER = {
    r"(aio|optimizer|scheduler|flops_profiler|activation_checkpointing|data_types)"
    r"|data_efficiency(\.data_sampling|\.data_routing)?": "DeepSpeed ignores unknown keys, so a"
    " misspelt setting would have no effect",
    r"(aio|optimizer|scheduler)\..*": "DeepSpeed does not check the value before the engine uses"
    " it",
    r"zero_optimization\..*|fp16\..*": "pydantic accepts `true` as 1, numbers beyond 64 bits, and"
    " negative sizes and counts",
    r"(train_|gradient_|prescale_|steps_per_print|wall_clock|zero_|vocabulary_size).*"
    r"|data_types\..*_dtype": "DeepSpeed checks the value only where it is used, or accepts `true`"
    " as 1",
    r"(sequence|tensor|expert)_parallel.*|pipeline\.stages|hybrid_engine\.inference_tp_size": (
        "zerotune supports data parallelism only"
    ),
    r"expert_parallel|flops_profiler\.enabled|timers|torch_autocast\..*": "DeepSpeed treats values"
    " other than objects, lists and booleans as empty or as true",
}
"""Regular expressions of keys that only zerotune refuses, with the reason."""
LAXER = {
    r"aio\.use_gds": "zerotune also checks files on machines without a CUDA device",
    r"autotuning\..*|data_efficiency\..*": "only `deepspeed --autotuning` and DeepSpeed's own data"
    " loader read these sections, so zerotune checks only their structure",
    r"train_batch_size|train_micro_batch_size_per_gpu|gradient_accumulation_steps"
    r"|wall_clock_breakdown": '`resolve()` fills in `"auto"` and missing values',
    r"(seq_parallel_)?communication_data_type": '`resolve()` refuses `"auto"`',
    r"vocabulary_size|zero_optimization\.zenflow\..*_interval": (
        "zerotune accepts a number written as text"
    ),
    r"zero_optimization\.compute_grad_norm": (
        "zerotune reads 0 as false, which the rule `gradient-norm` then checks"
    ),
    r"zero_optimization\.offload_optimizer\.ratio": "at stage 0 `resolve()` omits the section",
}
"""Regular expressions of keys that only ``DeepSpeedConfig`` refuses, with the reason."""

VALUES = {
    "`asked` processes": "the number of processes that the file requests",
    "write `world_size` for num_processes": "set num_processes to the world size",
    "`tenth`": "a tenth of the total",
    "`world_size`": "the world size",
    "`run_steps`": "the number of optimizer steps in the run",
    "`half_the_run`": "half the number of optimizer steps in the run",
    "at least `need`": "at least the number that the pool needs",
    "`number`": "the number without quotes",
    "`steps`": "the whole number",
    "`divisor`": "a divisor of the number of ranks",
    "Write `lr`, or": "Write the learning rate, or",
    "`write`": "Correct the setting",
    '"`name`"': "the name in DeepSpeed's spelling",
}
"""Placeholders in fixes, and what they stand for."""

AGREEMENT = """\
## Differences from DeepSpeed's own checks

A test passes every key, with values of every type, to zerotune and to DeepSpeed's own
`DeepSpeedConfig`. It also gives both of them combinations of stage, offload, precision and gradient
reduction. The table lists the configurations that only zerotune or only DeepSpeed refuses:

| difference | keys | reason |
|---|---|---|
"""


def page() -> str:
    """Return the page as Markdown."""
    parts = [HEAD]
    for severity, title in MEANING.items():
        rules = [rule for rule in all_rules() if rule.severity == severity]
        parts.append(f"## {title}\n\n| rule | condition | reason and fix |\n|---|---|---|")
        parts.append("\n".join(_row(rule) for rule in rules) + "\n")
    rows = [("refused by zerotune only", STRICTER), ("accepted by zerotune only", LAXER)]
    parts.append(
        AGREEMENT
        + "\n".join(
            f"| {what} | {', '.join(f'`{key}`' for key in _paths(keys))} | {why} |"
            for what, reasons in rows
            for keys, why in reasons.items()
        )
        + "\n"
    )
    return "\n".join(parts)


def _row(rule: Rule) -> str:
    advice = _cell(rule.advice)
    for placeholder, meaning in VALUES.items():
        advice = advice.replace(placeholder, meaning)
    return f"| `{rule.id}` | {_cell(rule.summary)} | {advice} |"


def _paths(keys: str) -> list[str]:
    """Return the paths that the regular expression ``keys`` matches, with ``*`` as a wildcard."""
    group = re.search(r"\(([^()]*)\)(\??)", keys)
    if group is None:
        return [path.replace(".*", "*").replace("\\", "") for path in keys.split("|")]
    # Expand the group only within the top-level alternative that contains it.
    start = keys.rfind("|", 0, group.start()) + 1
    end = keys.find("|", group.end())
    end = len(keys) if end < 0 else end
    choices = [*group[1].split("|")]
    choices = ["", *choices] if group[2] else choices
    expanded = (keys[start : group.start()] + one + keys[group.end() : end] for one in choices)
    return _paths(keys[:start] + "|".join(expanded) + keys[end:])


def _cell(text: str) -> str:
    return text.replace("``", "`").replace("|", "\\|")


if __name__ == "__main__":
    TARGET.write_text(page(), encoding="utf-8")
