# All that the package exports: for type checkers, and for ``zerotune._util.lazy`` at run time.

from zerotune.optim.groups import MuonPatterns as MuonPatterns
from zerotune.optim.groups import ParameterGroup as ParameterGroup
from zerotune.optim.groups import ParameterGroups as ParameterGroups
from zerotune.optim.resolver import OptimizerResolver as OptimizerResolver
