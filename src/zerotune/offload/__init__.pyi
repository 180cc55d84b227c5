# All that the package exports: for type checkers, and for ``zerotune._util.lazy`` at run time.

from zerotune.offload.cleaning import CleanupReport as CleanupReport
from zerotune.offload.cleaning import Leftover as Leftover
from zerotune.offload.cleaning import cleanup_stale_swap as cleanup_stale_swap
from zerotune.offload.lease import FoundLease as FoundLease
from zerotune.offload.lease import LeaseRecord as LeaseRecord
from zerotune.offload.lease import find_leases as find_leases
from zerotune.offload.manager import Lease as Lease
from zerotune.offload.manager import OffloadManager as OffloadManager
from zerotune.offload.root import SwapRoot as SwapRoot
from zerotune.offload.space import SwapNeeds as SwapNeeds
from zerotune.offload.space import swap_needs as swap_needs
