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
    machine_needs,
    preferred,
    search,
    with_optimizer,
)
from zerotune.plan.context import DeviceUpdate


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
    remedies = [_first_that_fits(request, *each) for each in _REMEDIES.items()]
    return NothingFitsError(
        f"no plan fits; the closest ({nearest.title}) lacks {missing}",
        nearest=nearest,
        remedies=tuple(each for each in remedies if each is not None),
        key="memory",
        value=f"{format_size(request.budget.device)} device,"
        f" {format_size(request.budget.host)} host, {format_size(request.budget.nvme)} nvme",
        fix=f"provide {enough}, or reduce the need with{smaller} more ranks or NVMe for swap files",
    )


@attrs.frozen(kw_only=True)
class Remedy:
    """Settings to change so that a model fits."""

    what: str
    """Effect of the settings in words (``"adapters fit"``)."""
    settings: Mapping[str, Any]
    """Arguments of ``DeepSpeedPlan.advise`` by name; ``zerotune plan advise`` has options of the
    same names."""
    gain: str
    """The plan that fits, in words."""

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
        return f"{self.what}: {settings}, {self.gain}"


_STREAMED: Final = {"streamed": True}


_UNCLIPPED: Final = _STREAMED | {"gradient_clipping": 0}


_FACTORED: Final = {"optimizer": "Adafactor"}


_ADAPTERS: Final = {"lora": 16}


_REMEDIES: Final[Mapping[str, tuple[Mapping[str, Any], ...]]] = {
    "streamed weights fit": (
        _STREAMED, _UNCLIPPED, _STREAMED | _FACTORED, _UNCLIPPED | _FACTORED,
        _UNCLIPPED | _FACTORED | {"update": "device:stochastic"},
    ),
    "smaller optimizer states fit": ({"optimizer": "AdamWBF16States"},),
    "adapters fit": (_ADAPTERS, _ADAPTERS | {"base_dtype": "nf4"}),
}  # fmt: skip
"""Arguments of ``advise`` with which a plan needs less memory; for each remedy, exacter ones
first."""


def _first_that_fits(
    request: Request, what: str, tried: tuple[Mapping[str, Any], ...]
) -> Remedy | None:
    """Return a remedy with the first settings with which a plan fits; ``None`` if none does."""
    own = {
        "streamed": request.streamed,
        "gradient_clipping": request.plan.gradient_clipping,
        "optimizer": request.asked,
    }
    for settings in tried:
        changed = _with_settings(request, settings)
        if changed is None:
            continue
        _, fitting = search(changed, only_streamed="streamed" in settings)
        if not fitting:
            continue
        best = preferred(fitting)
        replaced = {} if best.instead_of is None else {"optimizer": best.optimizer}
        different = {name: value for name, value in settings.items() if value != own.get(name)}
        seconds = f", {best.time.expected:.2f} s per step" if best.time else ""
        return Remedy(what=what, settings=different | replaced, gain=f"{best.title}{seconds}")
    return None


def _with_settings(request: Request, settings: Mapping[str, Any]) -> Request | None:
    """Return the request with other settings; ``None`` if they do not change it, or cannot."""
    model, update = request.model, request.update
    if "lora" in settings:
        if model.trainable_numel < model.numel:
            return None
        try:
            model = model.with_adapters(settings["lora"], base_dtype=settings.get("base_dtype"))
        except InvalidValueError:  # No layer has a name that adapters target.
            return None
    if "update" in settings:
        if update is not None:
            return None
        update = DeviceUpdate.of(settings["update"])
    clipping = settings.get("gradient_clipping", request.plan.gradient_clipping)
    changed = attrs.evolve(
        request,
        model=model,
        plan=attrs.evolve(request.plan, gradient_clipping=clipping),
        update=update,
        streamed=request.streamed or "streamed" in settings,
        asked=settings.get("optimizer", request.asked),
    )
    return changed if changed.asked == request.asked else with_optimizer(changed, changed.asked)
