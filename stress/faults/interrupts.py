"""Ctrl-C at any moment of a user's loop, which catches it and goes on, as in a notebook.

After each interrupt, weights, EMA and mode equal those of plain torch, which takes the same steps
as the engine counts; or the engine refuses to go on. Nothing is lost in silence, crashes or hangs.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import random
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch

from stress.faults.campaign import Found
from stress.faults.workers import Team
from tests.backend.acts import Net
from tests.backend.test_step_sequences import KINDS, NEAR, batch, start
from zerotune.ema import EMAShadow
from zerotune.errors import StepOrderError

ENGINES: Final = tuple(KINDS)
_TRACED: Final = ("/zerotune/", "/contextlib.py", __file__)
"""Code that is interrupted; the engines hold interrupts back in the rest."""


class Loop:
    """An engine with an EMA in a loop that is interrupted, and its reference in torch.

    Args:
        name: Name of the kind of engine.
    """

    def __init__(self, name: str) -> None:
        logging.disable(logging.WARNING)
        # A shell without job control ignores SIGINT in background jobs, and so in this process.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._name = name
        self._number = self._moments = self._at = 0
        self._begin()
        self._watched(0)
        self._span = self._moments
        self._follow(taken=0, averaged=0)

    def _begin(self) -> None:
        self._engine = start(KINDS[self._name], 1)
        self._ema = EMAShadow(decay=0.5).attach(self._engine)
        self._model = Net()
        trained = [p for p in self._model.parameters() if p.requires_grad]
        self._adam = torch.optim.AdamW(trained, lr=4e-3, weight_decay=0.01, eps=1e-5)
        named = self._model.named_parameters()
        self._averages = {n: p.detach().clone() for n, p in named if p.requires_grad}

    def interrupt(self, seed: str) -> str:
        """Interrupt the loop once, go on, and return how that went."""
        taken, averaged = self._taken, self._ema.steps
        try:
            self._watched(random.Random(seed).randrange(self._span) + 1)
            how = "not noticed"
        except KeyboardInterrupt:
            how = "interrupted"
        # Ends blocks whose end was interrupted, before Python could begin it.
        gc.collect()
        with contextlib.suppress(StepOrderError):
            self._engine.step()
            how = "goes on with the step"
        self._follow(taken=taken, averaged=averaged)
        taken, averaged = self._taken, self._ema.steps
        try:
            self._cycle()
        except StepOrderError:
            how = "begins anew"
            self._engine.close()
            self._begin()
            taken, averaged = 0, 0
            self._cycle()
        self._follow(taken=taken, averaged=averaged)
        return how

    def _watched(self, at: int) -> None:
        """Run a cycle, and interrupt it at a moment at which Python looks for signals."""
        self._moments, self._at = 0, at
        sys.setprofile(self._watch)
        try:
            self._cycle()
        finally:
            sys.setprofile(None)

    def _watch(self, frame: FrameType, event: str, _: Any) -> None:
        if event in ("call", "c_return") and any(t in frame.f_code.co_filename for t in _TRACED):
            self._moments += 1
            if self._moments == self._at:
                signal.raise_signal(signal.SIGINT)

    def _cycle(self) -> None:
        self._number += 1
        self._engine.backward(self._engine(batch(self._number)).square().mean())
        self._engine.step()
        self._ema.step()
        with self._ema.swapped_in(), self._engine.evaluating():
            self._engine(batch(0))

    @property
    def _taken(self) -> int:
        return int(self._engine.state.global_step - self._engine.state.skipped_steps)

    def _follow(self, *, taken: int, averaged: int) -> None:
        """Take the steps that the engine has taken, and compare."""
        named = {n: p for n, p in self._model.named_parameters() if p.requires_grad}
        if self._taken > taken:
            self._model(batch(self._number)).square().mean().backward()
            if KINDS[self._name].clipping:
                torch.nn.utils.clip_grad_norm_(named.values(), KINDS[self._name].clipping)
            self._adam.step()
            self._adam.zero_grad()
        if self._ema.steps > averaged:
            for name, average in self._averages.items():
                average.lerp_(named[name].detach(), 1 - self._ema.decay)
        assert self._engine.module.training, "left in evaluation mode"
        assert not self._ema.swapped, "left with averaged weights"
        pairs = ((self._engine.master_weights, named), (self._ema, self._averages))
        for source, expected in pairs:
            for name, value in source.gather():
                far = float((value - expected[name]).detach().abs().max())
                assert far < NEAR, f"{name} of {type(source).__name__} is off by {far:.1e}"


class Interrupts:
    """Loops in processes of their own, one for each kind of engine."""

    def __init__(self) -> None:
        self._teams: dict[str, Team] = {}

    def inject(self, _work: Path, chance: random.Random) -> None:
        name = chance.choice(ENGINES)
        if name not in self._teams or not self._teams[name].alive:
            self._teams[name] = Team(Loop, name)
        try:
            self._teams[name].ask("interrupt", str(chance.random()))
        except Found as error:
            self._teams.pop(name).close()
            raise Found(
                "lost" if "is off by" in str(error) else error.kind, f"{name}: {error}"
            ) from error

    def close(self) -> None:
        for team in self._teams.values():
            with contextlib.suppress(Found):
                team.close()
