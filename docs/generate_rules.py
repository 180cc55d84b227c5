"""Writes ``rules.md`` from the rules themselves: ``python docs/generate_rules.py``."""

from __future__ import annotations

from pathlib import Path

from zerotune.plan import Rule, all_rules

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


def page() -> str:
    """The page as Markdown."""
    parts = [HEAD]
    for severity, title in MEANING.items():
        rules = [rule for rule in all_rules() if rule.severity == severity]
        parts.append(f"## {title}\n\n| rule | what | why, and what to do |\n|---|---|---|")
        parts.append("\n".join(_row(rule) for rule in rules) + "\n")
    return "\n".join(parts)


def _row(rule: Rule) -> str:
    return f"| `{rule.id}` | {_cell(rule.summary)} | {_cell(rule.advice)} |"


def _cell(text: str) -> str:
    return text.replace("``", "`").replace("|", "\\|")


if __name__ == "__main__":
    TARGET.write_text(page(), encoding="utf-8")
