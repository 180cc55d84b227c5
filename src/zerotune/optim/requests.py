"""What is asked for, before anything is settled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs

from zerotune.optim.catalogue import OPTIMIZERS
from zerotune.optim.entries import OptimizerEntry
from zerotune.optim.naming import OptimizerName

SECTION: Final = "optimizer.params"


@attrs.frozen(kw_only=True)
class Request:
    """What is asked for."""

    name: OptimizerName
    params: Mapping[str, Any]
    """Arguments as written; may hold ``"auto"``."""
    configured: bool = True
    """``False`` when nothing is configured and the name is zerotune's default."""

    @property
    def entry(self) -> OptimizerEntry:
        """The catalogue's entry."""
        return OPTIMIZERS[self.name.canonical]
