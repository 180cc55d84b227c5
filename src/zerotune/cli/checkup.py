"""What ``zerotune doctor`` finds out, without printing anything."""

from __future__ import annotations

from typing import Any

import attrs

from zerotune.backend.ops.build import OpStatus, op_report
from zerotune.backend.step.kernel import host_step_status
from zerotune.errors import ZeroTuneError
from zerotune.platform import Platform
from zerotune.platform.toolchain import Toolchain, detect_toolchain


@attrs.frozen(kw_only=True)
class Checkup:
    """The state of a machine, as far as training on it goes."""

    platform: Platform
    toolchain: Toolchain
    ops: tuple[OpStatus, ...] = ()
    """Empty when DeepSpeed does not run."""
    own_op: OpStatus | None = None
    """zerotune's one op; ``None`` when DeepSpeed does not run."""
    ops_problem: str | None = None
    """Why DeepSpeed could not be asked for its ops."""

    @classmethod
    def of(cls, platform: Platform) -> Checkup:
        """Examine the machine that ``platform`` describes, which must be this one."""
        toolchain = detect_toolchain()
        if not platform.deepspeed.available:
            return cls(platform=platform, toolchain=toolchain)
        try:
            ops = op_report(toolchain=toolchain)
        except ZeroTuneError as error:
            return cls(platform=platform, toolchain=toolchain, ops_problem=str(error))
        own = host_step_status(toolchain=toolchain)
        return cls(platform=platform, toolchain=toolchain, ops=ops, own_op=own)

    @property
    def healthy(self) -> bool:
        """Whether DeepSpeed runs and can offload the optimizer."""
        return (
            self.platform.deepspeed.available
            and self.ops_problem is None
            and self._cpu_adam is None
        )

    @property
    def verdict(self) -> str:
        """The outcome in one line."""
        support = self.platform.deepspeed
        if not support.available:
            advice = "" if support.fix is None else f" Fix: {support.fix}."
            return f"DeepSpeed does not run here: {support.reason}.{advice}"
        if self.ops_problem is not None:
            return f"DeepSpeed does not run here: {self.ops_problem}"
        if self._cpu_adam is not None:
            return (
                f"{support.reason}, but the optimizer cannot be offloaded: cpu_adam: "
                f"{self._cpu_adam.cause}."
            )
        unusable = [op.name for op in self.ops if not op.usable]
        without = f" (not {', '.join(unusable)})" if unusable else ""
        usable = len(self.ops) - len(unusable)
        return f"{support.reason}; {usable} of {len(self.ops)} ops can be used{without}."

    @property
    def _cpu_adam(self) -> OpStatus | None:
        """The op that offloading stands on, when it is blocked."""
        return next((op for op in self.ops if op.name == "cpu_adam" and not op.usable), None)

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-ready values."""
        found = attrs.asdict(self)
        host = self.platform.host_memory
        found["platform"]["host_memory"]["limit"] = host.limit
        found["platform"]["deepspeed"]["environment"] = self.platform.deepspeed.environment
        found["verdict"] = {"healthy": self.healthy, "text": self.verdict}
        return found
