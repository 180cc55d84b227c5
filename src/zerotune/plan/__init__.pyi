# All that the package exports: for type checkers, and for ``zerotune._util.lazy`` at run time.

from zerotune.plan.context import DeviceUpdate as DeviceUpdate
from zerotune.plan.context import RunFacts as RunFacts
from zerotune.plan.context import Streaming as Streaming
from zerotune.plan.facts import ModelFacts as ModelFacts
from zerotune.plan.memory.items import Workload as Workload
from zerotune.plan.plan import DeepSpeedPlan as DeepSpeedPlan
from zerotune.plan.write import plan_document as plan_document
