"""Common interface to a trainer's EMAs: none, one or several."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeAlias

from zerotune.ema import EMAShadow, EMAShadows
from zerotune.errors import InvalidValueError

if TYPE_CHECKING:
    from zerotune.backend.engine import Engine

EMA: TypeAlias = "EMAShadow | EMAShadows"
_EMA_NAME = "ema"


def as_ema(ema: Any) -> EMA | None:
    """Return an EMA object unchanged, or convert a decay to a new ``EMAShadow``."""
    if ema is None or isinstance(ema, EMAShadow | EMAShadows):
        return ema
    if isinstance(ema, int | float) and not isinstance(ema, bool):
        return EMAShadow(decay=float(ema))
    raise InvalidValueError(
        "is neither a decay nor an EMAShadow or EMAShadows; other EMA classes do not support "
        "sharded weights",
        "write ema=0.9999, or omit it",
        "ema",
        ema if isinstance(ema, bool | str) else getattr(ema, "__name__", type(ema).__name__),
    )


class TrainerEMAs:
    """The EMA shadows of a trainer, by name.

    Args:
        ema: The trainer's EMA or EMAs. A single ``EMAShadow`` gets the name ``"ema"``; the shadows
            of ``EMAShadows`` keep their names.
        engine: Engine to attach the EMA to, unless it is already attached.
    """

    def __init__(self, ema: EMA | None, *, engine: Engine) -> None:
        self._ema = ema
        self.shadows: Mapping[str, EMAShadow] = {}
        """The shadows by name."""
        if isinstance(ema, EMAShadow):
            self.shadows = {_EMA_NAME: ema}
        elif isinstance(ema, EMAShadows):
            self.shadows = dict(ema)
        if ema is not None and not all(shadow.attached for shadow in self.shadows.values()):
            ema.attach(engine)

    def step(self) -> None:
        """Update every shadow after an applied optimizer step."""
        if self._ema is not None:
            self._ema.step()

    def named(self, name: Any) -> EMAShadow | None:
        """Return an EMA, or ``None`` for the trained weights.

        Args:
            name: An EMA's name or one of the trainer's EMAs; ``None`` for the first EMA, and
                ``"trained"`` for the trained weights.
        """
        if isinstance(name, str) and name == "trained":
            return None
        if name is None:
            return next(iter(self.shadows.values()), None)
        if isinstance(name, EMAShadow) and name in self.shadows.values():
            return name
        if not isinstance(name, str) or name not in self.shadows:
            raise InvalidValueError(
                "no EMA has this name",
                f"write one of: {', '.join(('trained', *self.shadows))}"
                + ("" if self.shadows else "; or create Trainer(ema=EMAShadow(...))"),
                "weights",
                name if isinstance(name, str) else type(name).__name__,
            )
        return self.shadows[name]

    def swapped_in(self, name: str | bool) -> AbstractContextManager[None]:
        """Inside the block, replace the model's weights with EMA weights. Collective.

        Args:
            name: Name of an EMA, ``True`` for the first EMA, or ``False`` for the trained weights.
        """
        asked = (None if name else "trained") if isinstance(name, bool) else name
        shadow = self.named(asked)
        return nullcontext() if shadow is None else shadow.swapped_in()

    def explain(self) -> str:
        """Return a description of all EMAs; empty if there are none."""
        if list(self.shadows) == [_EMA_NAME]:
            return self.shadows[_EMA_NAME].explain()
        return "\n".join(f"{name}: {shadow.explain()}" for name, shadow in self.shadows.items())
