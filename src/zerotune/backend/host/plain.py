"""``PlainHostEngine``: the host engine for plans without DeepSpeed; fp32 units under autocast.

Only torch is needed: its Adam's arithmetic, its autocast, and the rules of its ``GradScaler``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Final

import attrs
import torch
from typing_extensions import override

from zerotune.backend.checks import Checks
from zerotune.backend.deepspeed.start import check_world
from zerotune.backend.host.engine import HostEngine
from zerotune.backend.host.ranks import SharedHostEngine
from zerotune.backend.host.units import FlatOrder
from zerotune.backend.master_weights import Named, require_trainable
from zerotune.backend.plain import Autocasting, join_plain
from zerotune.backend.step.adams import VECTOR
from zerotune.backend.stored import bring_weights
from zerotune.decisions import Decision
from zerotune.plan.plan import ResolvedPlan

_HALF: Final = (torch.bfloat16, torch.float16)


@attrs.define
class LossScale:
    """Scale of fp16 losses, which changes as in ``torch.amp.GradScaler``."""

    scale: float = 65536.0
    _growth_tracker: int = 0
    """Number of steps without an overflow since the scale changed."""

    _INTERVAL: ClassVar[int] = 2000

    @property
    def loss_scale(self) -> float:
        """The scale of the next loss."""
        return self.scale

    def update_scale(self, overflow: bool) -> None:
        """Halve the scale after an overflow; double it after 2000 steps without one.

        Args:
            overflow: Whether a gradient of this step is not finite.
        """
        self._growth_tracker = 0 if overflow else self._growth_tracker + 1
        if overflow:
            self.scale *= 0.5
        elif self._growth_tracker == self._INTERVAL:
            self.scale, self._growth_tracker = 2.0 * self.scale, 0


class TorchOrder(FlatOrder):
    """A ``FlatOrder`` for torch's fused Adam, which updates each parameter separately.

    The arguments are those of ``FlatOrder``.
    """

    @override
    def singles(self, name: str) -> Iterator[slice]:
        numel = self.numel(name)
        if numel % VECTOR:
            yield slice(numel - numel % VECTOR, numel)


class PlainHostEngine(Autocasting, HostEngine):
    """A ``HostEngine`` without DeepSpeed, whose units are in fp32.

    The arguments are those of ``HostEngine``, with a plan that was resolved without DeepSpeed.
    """

    _orders = TorchOrder
    _scaler_fields = ("scale", "_growth_tracker")
    _unscales_first = True

    @override
    def _join(self, model: torch.nn.Module, plan: ResolvedPlan) -> Named:
        self._device, self._group = join_plain(
            plan, model, self.resources, timeout_s=self._timeout_s
        )
        check_world(plan, self._group)
        return require_trainable(model)

    @override
    def _read(self, model: torch.nn.Module, plan: ResolvedPlan) -> tuple[Decision, ...]:
        bring_weights(model)
        return ()

    @override
    def _cast(self, model: torch.nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.dtype in _HALF:
                parameter.data = parameter.data.float()

    @override
    def _make_scaler(self) -> LossScale | None:
        return LossScale() if self._plan.precision == "fp16" else None

    @staticmethod
    @override
    def _factor(norm: float, scale: float, clipping: float) -> float:
        """Factor that unscales and clips gradients, rounded as in torch's clipping."""
        factor = torch.ones(())
        if clipping:
            factor = torch.clamp(clipping / (torch.tensor(norm) / scale + 1e-6), max=1.0)
        return float(factor / scale)

    @override
    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._under_autocast(self._module, *args, **kwargs)

    @property
    @override
    def _bits(self) -> str:
        return "the arithmetic is that of torch's fused Adam"

    @override
    def _checks(self) -> Checks:
        checks = super()._checks()
        self._check_autocast(checks)
        return checks


class SharedPlainHostEngine(PlainHostEngine, SharedHostEngine):
    """A ``PlainHostEngine`` on several ranks of one machine.

    The arguments are those of ``PlainHostEngine``.
    """
