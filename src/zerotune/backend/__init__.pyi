# For callers that must also run without torch: ``zerotune._util.lazy`` loads these names on use.

from zerotune.backend.proof import PATHS as PATHS
from zerotune.backend.proof import Combination as Combination
from zerotune.backend.proof import load_proof as load_proof
from zerotune.backend.proof import store_proof as store_proof
from zerotune.backend.proof import why_unproven as why_unproven
from zerotune.backend.step.kernel import host_step_status as host_step_status
