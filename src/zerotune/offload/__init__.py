"""Swap folders that one run owns, inside a root that many may share.

Needs neither torch nor DeepSpeed: it hands out paths and holds locks.
"""

from __future__ import annotations

from zerotune.offload.manager import Lease, OffloadManager
from zerotune.offload.record import LeaseRecord
from zerotune.offload.root import SwapRoot
from zerotune.offload.stale import FoundLease, find_leases

__all__ = ["FoundLease", "Lease", "LeaseRecord", "OffloadManager", "SwapRoot", "find_leases"]
