"""``EMAShadows``: several shadows of one engine, updated in one pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from zerotune.backend.attaching import master_weights_of
from zerotune.ema.updating import update_together
from zerotune.errors import InvalidValueError

if TYPE_CHECKING:
    from typing_extensions import Self

    from zerotune.ema.shadow import EMAShadow


class EMAShadows(Mapping[str, "EMAShadow"]):
    """Shadows with different half-lives on the same weights.

    Every fragment is read once for all of them, which matters where it comes from NVMe or a
    GPU. A mapping, so that it can be given as ``shadows=`` wherever checkpoints are written::

        emas = EMAShadows(
            shadows={
                "fast": EMAShadow(decay=HalfLife(steps=500)),
                "slow": EMAShadow(decay=HalfLife(steps=20_000)),
            }
        ).attach(engine)
        emas.step()
        with emas["slow"].swapped_in(): ...

    Args:
        shadows: Shadows that are not attached yet, by name.

    Raises:
        InvalidValueError: There is none, or one stands under two names.
    """

    def __init__(self, *, shadows: Mapping[str, EMAShadow]) -> None:
        self._shadows = dict(shadows)
        if not self._shadows or len({*map(id, self._shadows.values())}) < len(self._shadows):
            raise InvalidValueError(
                "needs one shadow or more, each under one name",
                key="shadows",
                value=list(self._shadows),
                fix='EMAShadows(shadows={"fast": EMAShadow(decay=0.99)})',
            )

    def attach(self, source: Any) -> Self:
        """Start all shadows from the weights of ``source``; see ``EMAShadow.attach``."""
        master = master_weights_of(source)
        for shadow in self._shadows.values():
            shadow.attach(master)
        return self

    def step(self) -> None:
        """Take in the weights after one applied optimizer step; see ``EMAShadow.step``."""
        update_together(*self._shadows.values())

    @property
    def shadows(self) -> tuple[EMAShadow, ...]:
        """All of them, in the order given."""
        return tuple(self._shadows.values())

    @property
    def nbytes(self) -> int:
        """Memory of this rank's shadows."""
        return sum(shadow.nbytes for shadow in self._shadows.values())

    def explain(self) -> str:
        """Every shadow, as text."""
        return "\n".join(f"{name}: {shadow.explain()}" for name, shadow in self._shadows.items())

    @override
    def __getitem__(self, name: str) -> EMAShadow:
        return self._shadows[name]

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._shadows)

    @override
    def __len__(self) -> int:
        return len(self._shadows)
