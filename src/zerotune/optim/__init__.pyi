# All that the package exports: for type checkers, and for ``zerotune._util.lazy`` at run time.

from zerotune.optim.capability import Capability as Capability
from zerotune.optim.capability import CapabilityTable as CapabilityTable
from zerotune.optim.groups import MUON_DEFAULTS as MUON_DEFAULTS
from zerotune.optim.groups import MuonPatterns as MuonPatterns
from zerotune.optim.groups import ParameterGroup as ParameterGroup
from zerotune.optim.groups import ParameterGroups as ParameterGroups
from zerotune.optim.resolver import OptimizerResolution as OptimizerResolution
from zerotune.optim.resolver import OptimizerResolver as OptimizerResolver
from zerotune.optimizers.catalogue import OPTIMIZERS as OPTIMIZERS
from zerotune.optimizers.catalogue import OptimizerEntry as OptimizerEntry
from zerotune.optimizers.catalogue import Parameter as Parameter
from zerotune.optimizers.catalogue import normalise_optimizer_name as normalise_optimizer_name
from zerotune.optimizers.schedules import SCHEDULERS as SCHEDULERS
from zerotune.optimizers.schedules import SchedulerEntry as SchedulerEntry
from zerotune.optimizers.schedules import normalise_scheduler_name as normalise_scheduler_name
