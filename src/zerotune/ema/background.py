"""``BackgroundEMA``, which updates an EMA during the next forward and backward pass."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from zerotune._util.closing import Closable
from zerotune.ema.shadow import ShadowUpdate, apply_updates, joined
from zerotune.errors import EMAError

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self

    from zerotune.backend.master_weights import MasterWeights
    from zerotune.ema.shadow import EMAShadow, EMAShadows


class BackgroundEMA(Closable):
    """Updates one or several EMA shadows in a thread; results are the same as without a thread.

    Between two optimizer steps the fp32 master weights do not change, so the thread can read them
    without a copy. The next optimizer step waits for the update; so does all code that reads the
    shadow or changes the weights::

        ema = EMAShadow(decay=0.9999)
        with BackgroundEMA(shadow=ema).attach(engine) as background:
            for batch in data:
                ...
                if engine.step().applied:
                    background.step()
            with ema.swapped_in(): ...

    The thread saves time only if the CPU is otherwise idle, for example while a GPU computes.

    Args:
        shadow: An ``EMAShadow`` or ``EMAShadows``.
        optimizer: The optimizer that updates the weights; required only if the weights belong to a
            module without an engine.
    """

    def __init__(
        self, *, shadow: EMAShadow | EMAShadows, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        self._subject = shadow
        self._optimizer = optimizer
        self._master: MasterWeights | None = None
        self._watching = ExitStack()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._changes = 0

    @property
    def subject(self) -> EMAShadow | EMAShadows:
        """The ``EMAShadow`` or ``EMAShadows`` to update."""
        return self._subject

    @property
    def watching(self) -> bool:
        """Whether the ``BackgroundEMA`` is attached and not closed."""
        return self._master is not None

    def attach(self, source: Any) -> Self:
        """Attach the shadow if it is not attached yet, and observe changes to the weights.

        Args:
            source: Engine, master weights or module; see ``EMAShadow.attach``.

        Raises:
            EMAError: The ``BackgroundEMA`` is already attached.
            UnsupportedEngineError: The weights are on NVMe, so reads would conflict with the
                optimizer's swapping. Also raised if no known optimizer changes the weights.
        """
        if self._master is not None:
            raise EMAError(
                "is already attached",
                key="BackgroundEMA",
                fix="create one BackgroundEMA per shadow",
            )
        shadows = self._subject.shadows
        if not all(shadow.attached for shadow in shadows):
            self._subject.attach(source)
        master = shadows[0].source
        self._watching.callback(
            master.before_change(self._about_to_change, optimizer=self._optimizer)
        )
        for shadow in shadows:
            shadow.settle_with(self.join)
            self._watching.callback(shadow.settle_with, None)
        self._master = master
        return self

    def expect_step(self) -> None:
        """Do nothing, because the thread reads the weights after the optimizer step."""

    def step(self) -> None:
        """Start an update after one applied optimizer step.

        Raises:
            EMAError: The shadow is not attached or is swapped in, or the previous update failed.
                Also raised if no optimizer step was observed, because the weights could then change
                during an update.
        """
        if self._master is None:
            raise EMAError(
                "is not attached to an engine or model",
                key="BackgroundEMA",
                fix="write BackgroundEMA(shadow=ema).attach(engine)",
            )
        self.join()
        if not self._changes:
            raise EMAError(
                "no optimizer step was observed before the first update",
                key="BackgroundEMA.step()",
                fix="call step() after the optimizer's step, and pass "
                "BackgroundEMA(optimizer=...) if there is no engine",
            )
        begun = (shadow.begin_update() for shadow in self._subject.shadows)
        updates = [update for update in begun if update is not None]
        if updates and not joined(self._master, updates):
            self._thread = threading.Thread(
                target=self._run, args=(self._master, updates), name="zerotune-ema"
            )
            self._thread.start()

    def join(self) -> None:
        """Wait for any update in progress.

        Raises:
            EMAError: The update failed, for example because the weights or the shadow are not
                finite.
        """
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    @override
    def close(self) -> None:
        """Wait for any update in progress, and detach; the shadow remains usable."""
        try:
            self.join()
        finally:
            self._watching.close()
            self._master = None

    def _about_to_change(self) -> None:
        self._changes += 1
        self.join()

    def _run(self, master: MasterWeights, updates: Sequence[ShadowUpdate]) -> None:
        try:
            apply_updates(master, updates)
        except BaseException as error:  # noqa: BLE001 - raised again where somebody waits
            self._error = error
