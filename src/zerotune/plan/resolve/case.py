"""A plan with its context, for rules and resolution."""

from __future__ import annotations

import contextlib
from functools import cached_property

import attrs

from zerotune.decisions import Decision
from zerotune.errors import (
    PlanError,
)
from zerotune.plan.context import Context
from zerotune.plan.resolve.batch import Batch, solve_batch
from zerotune.plan.resolve.precision import decide_precision
from zerotune.plan.resolve.sizes import AIO_BLOCK, Swapping, elements
from zerotune.plan.sections import (
    ZeroSection,
)
from zerotune.plan.settings import Settings


@attrs.frozen(kw_only=True)
class Case:
    """A plan and its context, with derived values that are computed once."""

    plan: Settings
    context: Context

    @cached_property
    def batch(self) -> tuple[Batch, list[Decision]]:
        """Result of ``solve_batch``."""
        return solve_batch(self.plan, run=self.context.run, world_size=self.context.world_size)

    @cached_property
    def precision(self) -> tuple[str, list[Decision]]:
        """Result of ``decide_precision``."""
        return decide_precision(self.plan, run=self.context.run, platform=self.context.machine)

    @cached_property
    def trains_in(self) -> str:
        """The training precision, or the requested precision if none can be chosen."""
        if self.context.platform is not None:
            # The rules on precision report contradictory settings.
            with contextlib.suppress(PlanError):
                return self.precision[0]
        return self.plan.precision

    @property
    def element_bytes(self) -> int:
        """Bytes of one element in the training precision."""
        return 4 if self.trains_in == "fp32" else 2

    @property
    def rounds_swapped(self) -> bool:
        """Whether DeepSpeed would round fp32 parameters to bf16 when it swaps them."""
        platform = self.context.platform
        return platform is not None and self.trains_in == "fp32" and not platform.fp16

    def swaps_parameters(self, zero: ZeroSection) -> bool:
        """Whether any parameter is actually swapped from host memory to files."""
        section = zero.offload_param
        if section is None or section.device != "nvme" or self.rounds_swapped:
            return False
        stay = elements(section.max_in_cpu)
        swapping = self.swapping
        return stay == 0 if swapping is None else swapping.happens(stay)

    @cached_property
    def swapping(self) -> Swapping | None:
        """The parameters that are swapped; ``None`` if the model is unknown."""
        if self.context.model is None:
            return None
        written = self.plan.aio.block_size if self.plan.aio else None
        return Swapping(
            model=self.context.model,
            world_size=self.context.world_size,
            element_bytes=self.element_bytes,
            block_bytes=elements(written) or AIO_BLOCK,
        )
