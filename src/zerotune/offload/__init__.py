"""Swap folders that one run owns, inside a root that many may share.

Needs neither torch nor DeepSpeed: it hands out paths and holds locks. Only measuring a disk
loads them, for the very op that DeepSpeed swaps with.
"""

from __future__ import annotations

from zerotune.offload.cleaning import CleanupReport, Leftover, cleanup_stale_swap
from zerotune.offload.disk import Benchmark, MeasuredDisk, benchmark
from zerotune.offload.lease import FoundLease, LeaseRecord, find_leases
from zerotune.offload.manager import Lease, OffloadManager
from zerotune.offload.root import SwapRoot
from zerotune.offload.space import SwapNeeds, swap_needs

__all__ = [
    "OffloadManager",
    "Lease",
    "LeaseRecord",
    "SwapRoot",
    "FoundLease",
    "find_leases",
    "cleanup_stale_swap",
    "CleanupReport",
    "Leftover",
    "SwapNeeds",
    "swap_needs",
    "benchmark",
    "Benchmark",
    "MeasuredDisk",
]
