"""Plans: what a DeepSpeed configuration says, what will run, and why.

Values only: nothing here loads torch or deepspeed.
"""

from __future__ import annotations

from zerotune.plan.choices import OptimizerChoice, SchedulerChoice
from zerotune.plan.deepspeed_plan import DeepSpeedPlan
from zerotune.plan.facts import ModelFacts, ParameterFacts, RunFacts
from zerotune.plan.kinds import AUTO
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

__all__ = [
    "AUTO",
    "DeepSpeedPlan",
    "ResolvedPlan",
    "ModelFacts",
    "ParameterFacts",
    "RunFacts",
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
]
