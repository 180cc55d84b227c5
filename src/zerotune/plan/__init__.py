"""Plans: what a DeepSpeed configuration says, what will run, and why.

Values only: nothing here loads torch or deepspeed. Names are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from zerotune.lazy import lazy_attribute

if TYPE_CHECKING:
    from zerotune.plan.advising.values import Advice, Budget, Candidate
    from zerotune.plan.arguments import add_plan_arguments, plan_from_arguments
    from zerotune.plan.choices import OptimizerChoice, SchedulerChoice
    from zerotune.plan.comparing import Change, PlanDifference
    from zerotune.plan.deepspeed_plan import DeepSpeedPlan
    from zerotune.plan.facts import (
        ActivationCost,
        ActivationFacts,
        ModelFacts,
        ParameterFacts,
        RunFacts,
    )
    from zerotune.plan.families import family, family_names
    from zerotune.plan.kinds import AUTO
    from zerotune.plan.memory.values import MemoryEstimate, MemoryItem, MemoryPeak
    from zerotune.plan.memory.workload import Workload
    from zerotune.plan.resolved import ResolvedPlan
    from zerotune.plan.rules import Finding, Rule, RuleContext, all_rules
    from zerotune.plan.sections import (
        AioSection,
        Bf16Section,
        Fp16Section,
        LaunchSection,
        OffloadSection,
        OptimizerSection,
        SchedulerSection,
        ZeroSection,
    )
    from zerotune.plan.writing import PlanDocument, SavedPlan, plan_document

_HOMES: Final = {
    "AUTO": "kinds",
    "DeepSpeedPlan": "deepspeed_plan",
    "ResolvedPlan": "resolved",
    "PlanDifference": "comparing",
    "Change": "comparing",
    "ModelFacts": "facts",
    "ParameterFacts": "facts",
    "RunFacts": "facts",
    "ActivationFacts": "facts",
    "ActivationCost": "facts",
    "family": "families",
    "family_names": "families",
    "MemoryEstimate": "memory.values",
    "MemoryItem": "memory.values",
    "MemoryPeak": "memory.values",
    "Workload": "memory.workload",
    "Advice": "advising.values",
    "Budget": "advising.values",
    "Candidate": "advising.values",
    "OptimizerChoice": "choices",
    "SchedulerChoice": "choices",
    "ZeroSection": "sections",
    "OffloadSection": "sections",
    "Bf16Section": "sections",
    "Fp16Section": "sections",
    "OptimizerSection": "sections",
    "SchedulerSection": "sections",
    "AioSection": "sections",
    "LaunchSection": "sections",
    "Rule": "rules",
    "RuleContext": "rules",
    "Finding": "rules",
    "all_rules": "rules",
    "PlanDocument": "writing",
    "SavedPlan": "writing",
    "plan_document": "writing",
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
