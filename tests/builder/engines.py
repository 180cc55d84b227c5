"""Ask the installed DeepSpeed, in a process of its own."""

from __future__ import annotations

from typing import Any


def accept(cases: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Pass configurations to the installed DeepSpeed; return its errors."""
    import deepspeed.runtime.config as reading

    class Alone:
        def get_rank(self, *_: Any) -> int:
            return 0

        def get_world_size(self, *_: Any) -> int:
            return 1

    reading.dist = Alone()
    refused = {}
    for name, given in cases.items():
        try:
            stage = int(reading.DeepSpeedConfig(given).zero_config.stage)
        except Exception as error:  # noqa: BLE001 - whatever it raises is a refusal
            refused[name] = f"{type(error).__name__}: {error}"
        else:
            if stage != given["zero_optimization"]["stage"]:
                refused[name] = f"read as stage {stage}"
    return refused
