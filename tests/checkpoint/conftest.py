"""The whole matrix takes a session of its own."""

from __future__ import annotations

import os

collect_ignore = [] if "ZEROTUNE_MATRIX" in os.environ else ["test_matrix.py"]
