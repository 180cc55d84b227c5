# All that the package exports: for type checkers, and for ``zerotune._util.lazy`` at run time.

from zerotune.plan.optimizer.groups import ParameterGroup as ParameterGroup
from zerotune.plan.optimizer.groups import ParameterGroups as ParameterGroups
from zerotune.plan.optimizer.resolver import OptimizerResolver as OptimizerResolver
