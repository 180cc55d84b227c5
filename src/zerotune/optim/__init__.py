"""Optimizers and schedules: names, facts, and what will really run.

Pure: neither torch nor deepspeed is imported.
"""

from __future__ import annotations

from zerotune.optim.capability import Capability, CapabilityTable
from zerotune.optim.catalogue import OPTIMIZERS
from zerotune.optim.entries import OptimizerEntry
from zerotune.optim.groups import MUON_DEFAULTS, MuonPatterns, ParameterGroup, ParameterGroups
from zerotune.optim.naming import normalise_optimizer_name
from zerotune.optim.parameters import Parameter
from zerotune.optim.resolver import OptimizerResolution, OptimizerResolver
from zerotune.optim.schedule import SCHEDULERS, SchedulerEntry, normalise_scheduler_name

__all__ = [
    "OptimizerResolver",
    "OptimizerResolution",
    "ParameterGroups",
    "ParameterGroup",
    "MuonPatterns",
    "MUON_DEFAULTS",
    "normalise_optimizer_name",
    "normalise_scheduler_name",
    "OPTIMIZERS",
    "SCHEDULERS",
    "OptimizerEntry",
    "SchedulerEntry",
    "Parameter",
    "Capability",
    "CapabilityTable",
]
