"""What is given to ``OptimizerResolver(overrides=…)``, sorted by where it belongs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from zerotune.errors import UNSET, UnknownKeyError

_OPTIMIZER = "optimizer.params."
_SCHEDULER = "scheduler.params."


@attrs.frozen(kw_only=True)
class Overrides:
    """Values that beat the configuration and the run."""

    optimizer_type: Any = UNSET
    optimizer_params: Mapping[str, Any] = attrs.field(factory=dict)
    scheduler_type: Any = UNSET
    """``None`` asks for no schedule at all."""
    scheduler_params: Mapping[str, Any] = attrs.field(factory=dict)

    @classmethod
    def read(cls, given: Mapping[str, Any] | None) -> Overrides:
        """Sort overrides by their path.

        Args:
            given: Keys are paths as decisions spell them (``"optimizer.type"``,
                ``"scheduler.params.warmup_num_steps"``); a bare key (``"lr"``) is an argument
                of the optimizer.

        Raises:
            UnknownKeyError: A path that leads nowhere.
        """
        types: dict[str, Any] = {}
        optimizer: dict[str, Any] = {}
        scheduler: dict[str, Any] = {}
        for key, value in (given or {}).items():
            if key in {"optimizer.type", "scheduler.type"}:
                types[key] = value
            elif key.startswith(_SCHEDULER):
                scheduler[key.removeprefix(_SCHEDULER)] = value
            elif key.startswith(_OPTIMIZER):
                optimizer[key.removeprefix(_OPTIMIZER)] = value
            elif "." not in key:
                optimizer[key] = value
            else:
                raise UnknownKeyError(
                    "overrides reach the optimizer and the scheduler only",
                    key=key,
                    value=value,
                    fix=f'write "{_OPTIMIZER}lr", "{_SCHEDULER}warmup_num_steps", '
                    '"optimizer.type" or "scheduler.type"',
                )
        return cls(
            optimizer_type=types.get("optimizer.type", UNSET),
            optimizer_params=optimizer,
            scheduler_type=types.get("scheduler.type", UNSET),
            scheduler_params=scheduler,
        )
