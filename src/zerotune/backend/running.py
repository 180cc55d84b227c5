"""What every engine holds and answers alike, whatever does the work behind it."""

from __future__ import annotations

import functools
import gc
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import ClassVar, Concatenate, Final, ParamSpec, TypeVar

import torch

from zerotune._util.closing import Closing
from zerotune.backend.checks import Checks
from zerotune.backend.distributed import ProcessGroup
from zerotune.backend.master_weights import MasterWeights
from zerotune.decisions import Decision
from zerotune.errors import EngineError
from zerotune.plan.model import ResolvedPlan

GONE: Final = "_zerotune_gone"
"""Attribute of a module whose weights went with its engine: why."""

E = TypeVar("E", bound="RunningEngine")
P = ParamSpec("P")
R = TypeVar("R")


def naming_the_lost(
    method: Callable[Concatenate[E, P], R],
) -> Callable[Concatenate[E, P], R]:
    """A method of an engine in which a lost rank is named, also in a loop of one's own."""

    @functools.wraps(method)
    def named(self: E, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.group.naming("training"):
            return method(self, *args, **kwargs)

    return named


class RunningEngine(Closing):
    """The part of an ``Engine`` that does not depend on who steps.

    Whoever inherits it sets the attributes below while it starts, and verifies what runs.
    """

    _plan: ResolvedPlan
    _module: torch.nn.Module
    _group: ProcessGroup
    _master_weights: MasterWeights
    _decisions: tuple[Decision, ...] = ()
    _trained: frozenset[int] = frozenset()
    """Ids of the parameters that the optimizer steps."""
    _walked: tuple[tuple[str, torch.nn.Parameter], ...] = ()
    """Names and parameters at the latest forward pass: a walk over a U-Net takes 4 ms."""

    @property
    def plan(self) -> ResolvedPlan:
        """The plan this engine was verified against."""
        return self._plan

    @property
    def module(self) -> torch.nn.Module:
        """The user's model; at stage 3 its parameters are partitioned outside a forward."""
        return self._module

    @property
    def group(self) -> ProcessGroup:
        """The processes that train together."""
        return self._group

    @property
    def master_weights(self) -> MasterWeights:
        """The fp32 weights the optimizer updates, and its states."""
        return self._master_weights

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Automatic choices of the plan and of this engine."""
        return (*self._plan.decisions, *self._decisions, *self._later_decisions)

    @property
    def _later_decisions(self) -> tuple[Decision, ...]:
        """Automatic choices made while it trains."""
        return ()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluation mode without gradients; the earlier mode comes back after."""
        training = self._module.training
        self._train(False)
        try:
            with torch.no_grad():
                yield
        finally:
            self._train(training)

    def explain(self) -> str:
        """What runs, verified, with every automatic choice."""
        here = (*self._decisions, *self._later_decisions)
        extra = "\n".join(f"  [{d.severity}] {d}" for d in here)
        return "\n".join(
            part for part in (self._checks().render(), self._plan.explain(), extra) if part
        )

    def _train(self, mode: bool) -> None:
        self._module.train(mode)

    def _check_before_step(self, step: int) -> None:
        """Is the model still what the optimizer steps? A few of its weights are compared.

        Args:
            step: Optimizer steps so far; at each, other weights are compared.
        """
        self._check_trained(self._walked or tuple(self._module.named_parameters()))
        self._walked = ()
        self._master_weights.check_model(step)

    def _check_before_forward(self) -> None:
        self._walked = tuple(self._module.named_parameters())
        self._check_trained(self._walked)

    def _check_trained(self, named: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        """Does the optimizer step every parameter that wants a gradient?"""
        for name, parameter in named:
            if parameter.requires_grad and id(parameter) not in self._trained:
                raise EngineError(
                    "wants a gradient, but was frozen or another one when the engine started, so "
                    "that nothing would train it",
                    key=f"model.{name}",
                    value="requires_grad=True",
                    fix="unfreeze or add it before the engine starts; what was trained from the "
                    "start may be frozen and unfrozen at any time",
                )

    @abstractmethod
    def _checks(self) -> Checks:
        """What runs now, compared with the plan."""


class StartedEngine(RunningEngine):
    """An engine that starts what it runs, and gives all of it back when that fails.

    Args:
        model: The model, in fp32.
        plan: A resolved plan whose optimizer has been chosen.
        timeout_s: Seconds after which a collective gives up.
    """

    _open: ClassVar[weakref.WeakSet[StartedEngine]] = weakref.WeakSet()
    """All that were started, until nobody holds them."""

    def __init__(
        self, *, model: torch.nn.Module, plan: ResolvedPlan, timeout_s: float = 600.0
    ) -> None:
        super().__init__()
        with self._starting():
            self._claim(model)
            self._start(model, plan, timeout_s)

    @abstractmethod
    def _start(self, model: torch.nn.Module, plan: ResolvedPlan, timeout_s: float) -> None:
        """Start it, and verify what runs."""

    def _claim(self, model: torch.nn.Module) -> None:
        """Take a model's parameters for this engine, as long as it is open.

        Raises:
            EngineError: An open engine trains some of them.
        """
        named = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
        if self._others(named):
            gc.collect()  # An engine that was dropped without being closed is none.
        if others := self._others(named):
            raise EngineError(
                "is being trained by an engine that is still open",
                key="model",
                value=f"{type(model).__name__}.{named[next(iter(others))]}",
                fix="close the first trainer or engine (trainer.close(), or a with block), or give "
                "this one a copy of the model made before",
            )
        self._trained = frozenset(named)
        self._open.add(self)

    def _others(self, named: Mapping[int, str]) -> set[int]:
        claims = [each._trained for each in self._open if not each._closed]
        return named.keys() & set().union(*claims)


def gradient_norm(parameters: Iterable[torch.nn.Parameter]) -> float:
    """L2 norm of the gradients of whole parameters; as clipping computes it, which alters them."""
    found = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return float(torch.nn.utils.get_total_norm(found))


def check_not_gone(module: torch.nn.Module) -> None:
    """Whether a module still has its weights.

    Raises:
        EngineError: Its engine was closed and could not give them back.
    """
    for each in module.modules():
        reason = vars(each).get(GONE)
        if reason is not None:
            raise gone(each, reason)


def gone(module: torch.nn.Module, reason: str) -> EngineError:
    """What whoever uses a module without its weights is told."""
    return EngineError(
        f"the engine that trained it at stage 3 is closed, and {reason}",
        key="model",
        value=type(module).__name__,
        fix="save or export before closing (trainer.export(PATH), trainer.save(PATH)), and load "
        "from there",
    )
