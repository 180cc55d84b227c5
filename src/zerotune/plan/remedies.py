"""Settings to change if no plan fits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs

from zerotune._util.text import format_size
from zerotune.errors import InvalidValueError, NothingFitsError
from zerotune.plan.candidates import (
    PLACE_WORDS,
    Candidate,
    Request,
    considered,
    eligible,
    machine_needs,
    search,
)
from zerotune.plan.context import DeviceUpdate
from zerotune.plan.sections import OptimizerSection

_SUGGESTED_BASE: Final = "nf4"


_SUGGESTED_RANK: Final = 16


def nothing_fits(request: Request, candidates: list[Candidate]) -> NothingFitsError:
    """Return the error that names the nearest candidate and what would help."""

    def distance(one: Candidate) -> float:
        return sum(
            over / max(request.budget.usable(place), 2**30)
            for place, over in one.shortfalls.items()
        )

    plain = [one for one in candidates if request.streamed or one.streamed is None]
    nearest = min(plain or candidates, key=distance)
    needs = machine_needs(nearest.estimate)
    missing = " and ".join(
        f"{format_size(over)} of {PLACE_WORDS[place]}" for place, over in nearest.shortfalls.items()
    )
    enough = " and ".join(
        f"{format_size(int(needs[place] / (1 - request.budget.reserve)))} of {PLACE_WORDS[place]}"
        for place in nearest.shortfalls
    )
    smaller = " a smaller batch or resolution," if request.workload.batch > 1 else ""
    return NothingFitsError(
        f"no plan fits; the closest ({nearest.title}) lacks {missing}",
        nearest=nearest,
        remedies=tuple(
            remedy
            for remedy in (
                _streamed_weights(request),
                _smaller_states(request, nearest),
                _adapters(request),
            )
            if remedy is not None
        ),
        key="memory",
        value=f"{format_size(request.budget.device)} device,"
        f" {format_size(request.budget.host)} host, {format_size(request.budget.nvme)} nvme",
        fix=f"provide {enough}, or reduce the need with{smaller} more ranks or NVMe for swap files",
    )


@attrs.frozen(kw_only=True)
class Remedy:
    """Settings to change so that a model fits or comes closer to fitting."""

    what: str
    """Effect of the settings in words (``"adapters fit"``)."""
    settings: Mapping[str, Any]
    """Arguments of ``DeepSpeedPlan.advise`` by name; ``zerotune plan advise`` has options of the
    same names."""
    gain: str = ""
    """Gain in words."""

    def in_python(self) -> str:
        """Return the settings as Python arguments."""
        return self._sentence(", ".join(f"{k}={value!r}" for k, value in self.settings.items()))

    def in_shell(self) -> str:
        """Return the settings as command-line options."""
        options = (
            f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
            for name, value in self.settings.items()
        )
        return self._sentence(" ".join(options))

    def _sentence(self, settings: str) -> str:
        return f"{self.what}: {settings}" + (f", {self.gain}" if self.gain else "")


_UNCLIPPED: Final = {"gradient_clipping": 0}


_FACTORED: Final = {"optimizer": "Adafactor"}


_LEANER: Final[tuple[Mapping[str, Any], ...]] = (
    {}, _UNCLIPPED, _FACTORED, _UNCLIPPED | _FACTORED,
    _UNCLIPPED | _FACTORED | {"update": "device:stochastic"},
)  # fmt: skip
"""Arguments of ``advise`` with which streamed weights need less memory, the exacter first."""


def _streamed_weights(request: Request) -> Remedy | None:
    """Return a remedy with streamed weights, and with what they need beside, if one fits."""
    for leaner in _LEANER:
        if "update" in leaner and request.update is not None:
            continue
        found = _with_settings(attrs.evolve(request, streamed=True), leaner)
        _, fitting = search(found, only_streamed=True)
        if not fitting:
            continue
        own = {"gradient_clipping": request.plan.gradient_clipping, "optimizer": request.asked}
        settings: dict[str, Any] = {} if request.streamed else {"streamed": True}
        settings |= {name: value for name, value in leaner.items() if value != own.get(name)}
        settings |= {} if fitting[0].instead_of is None else {"optimizer": fitting[0].optimizer}
        seconds = min((one.time.expected for one in fitting if one.time), default=None)
        gain = "" if seconds is None else f"{seconds:.2f} s per step"
        return Remedy(what="streamed weights fit", settings=settings, gain=gain)
    return None


def _with_settings(request: Request, settings: Mapping[str, Any]) -> Request:
    plan, name = request.plan, settings.get("optimizer", request.asked)
    if name != request.asked:
        plan = attrs.evolve(plan, optimizer=OptimizerSection(type=name))
    plan = attrs.evolve(
        plan, gradient_clipping=settings.get("gradient_clipping", plan.gradient_clipping)
    )
    update = DeviceUpdate.of(settings["update"]) if "update" in settings else request.update
    return attrs.evolve(request, plan=plan, asked=name, update=update)


def _smaller_states(request: Request, nearest: Candidate) -> Remedy | None:
    resolved = nearest.estimate.resolved
    adamw = resolved.plan.optimizer_name == "AdamW"
    # The update on the device refuses the optimizer that is named below.
    adamw = adamw and not isinstance(request.update, DeviceUpdate)
    if "host" not in nearest.shortfalls or resolved.offload_optimizer != "cpu" or not adamw:
        return None
    saved = format_size(4 * request.model.trainable_numel)
    return Remedy(
        what="smaller optimizer states",
        settings={"optimizer": "AdamWBF16States"},
        gain=f"{saved} less of host memory",
    )


def _adapters(request: Request) -> Remedy | None:
    """Return a remedy that trains adapters instead of the whole model, if one fits."""
    if request.model.trainable_numel < request.model.numel:
        return None
    for base_dtype in (None, _SUGGESTED_BASE):
        try:
            model = request.model.with_adapters(_SUGGESTED_RANK, base_dtype=base_dtype)
        except InvalidValueError:  # No layer has a name that adapters target.
            return None
        adapted = attrs.evolve(request, model=model)
        fitting = next(iter(eligible(adapted, considered(adapted))), None)
        if fitting is not None:
            base = {} if base_dtype is None else {"base_dtype": base_dtype}
            return Remedy(
                what="adapters fit", settings={"lora": _SUGGESTED_RANK, **base}, gain=fitting.title
            )
    return None
