"""Plans: what a DeepSpeed configuration says, what will run, and why.

Values only: nothing here loads torch or deepspeed. Names are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from zerotune._util.lazy import lazy_attribute

if TYPE_CHECKING:
    from zerotune.plan.advise import Budget
    from zerotune.plan.api import Advice, Candidate, DeepSpeedPlan, MemoryEstimate, ResolvedPlan
    from zerotune.plan.arguments import add_plan_arguments, plan_from_arguments
    from zerotune.plan.diff import Change, PlanDifference
    from zerotune.plan.families import family, family_names
    from zerotune.plan.memory.model import MemoryItem, MemoryPeak, Workload
    from zerotune.plan.model import (
        AUTO,
        ActivationCost,
        ActivationFacts,
        AioSection,
        Bf16Section,
        Fp16Section,
        LaunchSection,
        ModelFacts,
        OffloadSection,
        OptimizerChoice,
        OptimizerSection,
        ParameterFacts,
        RunFacts,
        SchedulerChoice,
        SchedulerSection,
        ZeroSection,
    )
    from zerotune.plan.rules import Finding, Rule, RuleContext, all_rules
    from zerotune.plan.write import PlanDocument, SavedPlan, plan_document

_HOMES: Final = {
    "AUTO": "model",
    "DeepSpeedPlan": "api",
    "ResolvedPlan": "api",
    "PlanDifference": "diff",
    "Change": "diff",
    "ModelFacts": "model",
    "ParameterFacts": "model",
    "RunFacts": "model",
    "ActivationFacts": "model",
    "ActivationCost": "model",
    "family": "families",
    "family_names": "families",
    "MemoryEstimate": "api",
    "MemoryItem": "memory.model",
    "MemoryPeak": "memory.model",
    "Workload": "memory.model",
    "Advice": "api",
    "Budget": "advise",
    "Candidate": "api",
    "OptimizerChoice": "model",
    "SchedulerChoice": "model",
    "ZeroSection": "model",
    "OffloadSection": "model",
    "Bf16Section": "model",
    "Fp16Section": "model",
    "OptimizerSection": "model",
    "SchedulerSection": "model",
    "AioSection": "model",
    "LaunchSection": "model",
    "Rule": "rules",
    "RuleContext": "rules",
    "Finding": "rules",
    "all_rules": "rules",
    "PlanDocument": "write",
    "SavedPlan": "write",
    "plan_document": "write",
    "add_plan_arguments": "arguments",
    "plan_from_arguments": "arguments",
}

__all__ = [
    "AUTO",
    "DeepSpeedPlan",
    "ResolvedPlan",
    "PlanDifference",
    "Change",
    "ModelFacts",
    "ParameterFacts",
    "RunFacts",
    "ActivationFacts",
    "ActivationCost",
    "family",
    "family_names",
    "MemoryEstimate",
    "MemoryItem",
    "MemoryPeak",
    "Workload",
    "Advice",
    "Budget",
    "Candidate",
    "OptimizerChoice",
    "SchedulerChoice",
    "ZeroSection",
    "OffloadSection",
    "Bf16Section",
    "Fp16Section",
    "OptimizerSection",
    "SchedulerSection",
    "AioSection",
    "LaunchSection",
    "Rule",
    "RuleContext",
    "Finding",
    "all_rules",
    "PlanDocument",
    "SavedPlan",
    "plan_document",
    "add_plan_arguments",
    "plan_from_arguments",
]

__getattr__ = lazy_attribute(globals(), _HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
