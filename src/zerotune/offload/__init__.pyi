# All that the package exports: for type checkers, and for ``zerotune._util.lazy`` at run time.

from zerotune.offload.cleaning import cleanup_stale_swap as cleanup_stale_swap
from zerotune.offload.manager import OffloadManager as OffloadManager
