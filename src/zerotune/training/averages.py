"""One EMA, several, or one in the background: what a trainer does with any of them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeAlias

from zerotune.ema import BackgroundEMA, EMAShadow, EMAShadows
from zerotune.errors import InvalidValueError

if TYPE_CHECKING:
    from zerotune.backend.engine import Engine

EMA: TypeAlias = "EMAShadow | EMAShadows | BackgroundEMA"
_EMA_NAME = "ema"


def as_ema(ema: Any) -> EMA | None:
    """What follows the weights; a number is the decay of an ``EMAShadow``."""
    if ema is None or isinstance(ema, EMAShadow | EMAShadows | BackgroundEMA):
        return ema
    if isinstance(ema, int | float) and not isinstance(ema, bool):
        return EMAShadow(decay=float(ema))
    decay = getattr(ema, "decay", None)
    decay = decay if isinstance(decay, float) else 0.9999
    if isinstance(ema, bool):
        why = "says no decay"
    else:
        why = "is no EMAShadow, EMAShadows or BackgroundEMA, which alone follow sharded weights"
    raise InvalidValueError(
        why,
        key="ema",
        value=ema if isinstance(ema, bool | str) else getattr(ema, "__name__", type(ema).__name__),
        fix="leave it out"
        if ema is False
        else f"write ema={decay:g}, or ema=EMAShadow(decay={decay:g})",
    )


class Averages:
    """The shadows of a trainer, by name.

    Args:
        ema: A single shadow is called ``"ema"``; ``EMAShadows`` have names of their own.
        engine: Attached to it where that has not been done.
    """

    def __init__(self, ema: EMA | None, *, engine: Engine) -> None:
        self._ema = ema
        subject = ema.subject if isinstance(ema, BackgroundEMA) else ema
        self.shadows: Mapping[str, EMAShadow] = {}
        """The shadows by name."""
        if isinstance(subject, EMAShadow):
            self.shadows = {_EMA_NAME: subject}
        elif isinstance(subject, EMAShadows):
            self.shadows = dict(subject)
        if isinstance(ema, BackgroundEMA):
            if not ema.watching:
                ema.attach(engine)
        elif ema is not None and not all(shadow.attached for shadow in self.shadows.values()):
            ema.attach(engine)

    def step(self) -> None:
        """Take in the weights after an applied optimizer step."""
        if self._ema is not None:
            self._ema.step()

    def expect_step(self) -> None:
        """Announce that ``step`` follows the optimizer's next step, if that is applied."""
        if self._ema is not None:
            self._ema.expect_step()

    def named(self, name: str | bool | EMAShadow) -> EMAShadow | None:
        """The shadow of a name; ``True`` is the first there is, ``False`` none."""
        if name is False:
            return None
        if name is True:
            return next(iter(self.shadows.values()), None)
        if isinstance(name, EMAShadow) and name in self.shadows.values():
            return name
        if not isinstance(name, str) or name not in self.shadows:
            raise InvalidValueError(
                "there are no such weights",
                key="weights",
                value=name if isinstance(name, str) else type(name).__name__,
                fix=f"one of {', '.join(('trained', *self.shadows))}"
                + ("" if self.shadows else ", or Trainer(ema=EMAShadow(...))"),
            )
        return self.shadows[name]

    def chosen(self, weights: Any) -> EMAShadow | None:
        """Whose weights to export: ``"trained"`` is nobody's, ``None`` the first there is."""
        if weights is None or weights == "trained":
            return self.named(weights is None)
        known = isinstance(weights, str | EMAShadow)
        return self.named(weights if known else type(weights).__name__)

    def swapped_in(self, name: str | bool) -> AbstractContextManager[None]:
        """Run the model on averaged weights inside the block. Collective."""
        shadow = self.named(name)
        return nullcontext() if shadow is None else shadow.swapped_in()

    def explain(self) -> str:
        """All of them as text; empty without any."""
        if list(self.shadows) == [_EMA_NAME]:
            return self.shadows[_EMA_NAME].explain()
        return "\n".join(f"{name}: {shadow.explain()}" for name, shadow in self.shadows.items())

    def close(self) -> None:
        """End an update under way. May be repeated."""
        if isinstance(self._ema, BackgroundEMA):
            self._ema.close()
