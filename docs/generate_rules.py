"""Writes ``rules.md`` from the rules themselves: ``python docs/generate_rules.py``."""

from __future__ import annotations

from pathlib import Path

from zerotune.plan.rules import Rule, all_rules

TARGET = Path(__file__).with_name("rules.md")

HEAD = """\
# Rules

What `plan.check()` looks for, and `resolve()` before it fills anything in. An *error* stops
`resolve()`; a *warning* becomes a recorded decision; a *note* is only reported by `check()`. Every
finding names the key, the value, the reason and what to write instead:

```{doctest}
>>> from zerotune import DeepSpeedPlan
>>> plan = DeepSpeedPlan.build(stage=2, offload="nvme")
>>> for finding in plan.check():
...     print(finding.severity, finding.rule, finding.key)
error nvme-optimizer-below-stage-3 zero_optimization.offload_optimizer.device

```

What the rules say of DeepSpeed was read in the code of 0.19.8, or seen when it ran.
`python docs/generate_rules.py` writes this page.
"""

MEANING = {
    "error": "Errors",
    "warning": "Warnings",
    "note": "Notes",
}


STRICTER = {
    r"(aio|optimizer|scheduler|flops_profiler|activation_checkpointing|data_types)"
    r"|data_efficiency(\.data_sampling|\.data_routing)?": "DeepSpeed ignores keys it does not know,"
    " and with them a misspelt setting",
    r"(aio|optimizer|scheduler)\..*": "DeepSpeed does not look at the value before the engine uses"
    " it",
    r"zero_optimization\..*|fp16\..*": "pydantic takes `true` for 1 and numbers beyond 64 bits, and"
    " leaves negative sizes and counts to the engine",
    r"(train_|gradient_|prescale_|steps_per_print|wall_clock|zero_|vocabulary_size).*"
    r"|data_types\..*_dtype": "DeepSpeed looks at the value only where it is used, or takes `true`"
    " for 1",
    r"(sequence|tensor|expert)_parallel.*|pipeline\.stages|hybrid_engine\.inference_tp_size": (
        "other parallelism than over data does not work here yet"
    ),
    r"expert_parallel|flops_profiler\.enabled|timers|torch_autocast\..*": "what DeepSpeed takes for"
    " empty, or for true, is no object, list or truth value",
}
"""Key to why it is refused here although ``DeepSpeedConfig`` takes it."""
LAXER = {
    r"aio\.use_gds": "whether there is a CUDA device is known only where it runs",
    r"autotuning\..*|data_efficiency\..*": "only `deepspeed --autotuning` and DeepSpeed's own data"
    " loader read it, and their sections are judged by shape alone",
    r"train_batch_size|train_micro_batch_size_per_gpu|gradient_accumulation_steps"
    r"|wall_clock_breakdown": '`"auto"` and what is not written are filled in by resolving',
    r"(seq_parallel_)?communication_data_type": '`"auto"` is refused by resolving',
    r"vocabulary_size|zero_optimization\.zenflow\..*_interval": "a number written as text",
    r"zero_optimization\.compute_grad_norm": "0 for false; a rule looks at false",
    r"zero_optimization\.offload_optimizer\.ratio": "at stage 0 resolving leaves the section out",
}
"""Key to why it is taken here although ``DeepSpeedConfig`` refuses it."""

AGREEMENT = """\
## Where DeepSpeed says otherwise

A test asks DeepSpeed's own `DeepSpeedConfig` about every key with values of every kind, and about
combinations of stages, offload, precision and reduction. What is accepted here is accepted there,
and what is refused there is refused here, but for these:

| what is | keys | why |
|---|---|---|
"""


def page() -> str:
    """The page as Markdown."""
    parts = [HEAD]
    for severity, title in MEANING.items():
        rules = [rule for rule in all_rules() if rule.severity == severity]
        parts.append(f"## {title}\n\n| rule | what | why, and what to do |\n|---|---|---|")
        parts.append("\n".join(_row(rule) for rule in rules) + "\n")
    rows = [("refused here alone", STRICTER), ("taken here alone", LAXER)]
    parts.append(
        AGREEMENT
        + "\n".join(
            f"| {what} | `{_cell(keys)}` | {why} |"
            for what, reasons in rows
            for keys, why in reasons.items()
        )
        + "\n"
    )
    return "\n".join(parts)


def _row(rule: Rule) -> str:
    return f"| `{rule.id}` | {_cell(rule.summary)} | {_cell(rule.advice)} |"


def _cell(text: str) -> str:
    return text.replace("``", "`").replace("|", "\\|")


if __name__ == "__main__":
    TARGET.write_text(page(), encoding="utf-8")
