"""``python -m zerotune``."""

from __future__ import annotations

import sys

from zerotune.cli import main

if __name__ == "__main__":
    sys.exit(main())
