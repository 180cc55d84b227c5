"""``SharedHostEngine``: several ranks on one machine share one copy of the weights.

Each rank streams the weights in host memory to its own device. When the gradients of a unit reach
host memory, each rank sums its share of them and updates the same share of the weights. Every
element is thus summed and updated only once. The ranks wait for each other unit by unit, in the
order of the backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from zerotune._util.proc import ProcessIdentity
from zerotune._util.text import format_size
from zerotune.backend.accelerator import accelerator_of
from zerotune.backend.checks import check_alike
from zerotune.backend.deepspeed.start import join
from zerotune.backend.host.engine import KEY, HostEngine
from zerotune.backend.host.lanes import Copy
from zerotune.backend.host.passes import Passes
from zerotune.backend.host.sharing import (
    DROPPED,
    END,
    STEP,
    Meeting,
    SharedHostMemory,
    WrittenByAll,
)
from zerotune.backend.host.steps import StreamedSteps, Window
from zerotune.backend.host.units import HostMemory, Unit, tensors_of
from zerotune.backend.plain import join_plain
from zerotune.backend.step_state import Stage
from zerotune.decisions import Decision
from zerotune.plan.plan import ResolvedPlan


class SharedPasses(Passes):
    """``Passes`` on several ranks; a failure is reported to all ranks.

    Args:
        meeting: Object that synchronises the ranks.
        passes: See ``Passes``.
    """

    def __init__(self, *, meeting: Meeting, **passes: Any) -> None:
        self._meeting = meeting
        super().__init__(**passes)

    @override
    def fail(self, error: BaseException) -> None:
        self._meeting.fail(error)
        super().fail(error)


class SharedSteps(StreamedSteps):
    """``StreamedSteps`` on several ranks; gradients are summed when they reach host memory.

    Args:
        meeting: Object that synchronises the ranks.
        steps: See ``StreamedSteps``.
    """

    def __init__(self, *, meeting: Meeting, **steps: Any) -> None:
        super().__init__(**steps)
        self._meeting = meeting
        self._indices = {unit: index for index, unit in enumerate(self._units)}
        self._number = 1
        """Number of the current step, including dropped steps."""

    @override
    def break_off(self) -> Stage:
        """Return that the ranks are out of step, so all of them must restart."""
        return Stage.LOST

    @override
    def _land(self, unit: Unit, came: Mapping[int, torch.Tensor], window: Window) -> None:
        stage = self._meeting.stage(unit)
        for index, gradient in came.items():
            target = stage[unit.members[index].span]
            # Divide before the sum, like DeepSpeed.
            mean = gradient.reshape(-1) / self._world_size
            target.copy_(mean, non_blocking=self._meeting.locks)

    @override
    def _take_squares(self, unit: Unit, came: Mapping[int, torch.Tensor], window: Window) -> None:
        with self._meeting.failing():
            self._meeting.agree(self._indices[unit], came)
            mine = self._parts[unit].keys() & came.keys()
            for index in mine:
                self._add_up(unit, index, window)
            own = self._squares(unit, mine, window)
            window.on_host.update(came)
            window.squares.update(self._meeting.add_squares(own, came))

    def _add_up(self, unit: Unit, index: int, window: Window) -> None:
        """Sum this rank's part of a gradient over all ranks and earlier micro batches."""
        _, part = self._parts[unit][index]
        start = part.member.span.start
        place = slice(start + part.span.start, start + part.span.stop)
        first, *others = (stage[place] for stage in self._meeting.stages(unit))
        for other in others:
            first.add_(other)
        gradient = self._gradient(unit, index, window)
        if index in window.on_host:
            gradient.add_(first)
        else:
            gradient.copy_(first)

    def _come_to(self, mark: int) -> Copy:
        """Check, in order with the gradients, that all ranks do the same next."""
        return self._lane.submit(lambda: None, then=partial(self._meeting.agree, mark))

    @override
    def end_backward(self) -> None:
        super().end_backward()
        self._come_to(END)

    @override
    def norm(self) -> float:
        self._come_to(STEP).finish()
        return super().norm()

    @override
    def forget(self) -> None:
        self._come_to(DROPPED).finish()
        super().forget()

    @override
    def forget_all(self) -> None:
        super().forget_all()
        self._number += 1

    @override
    def step(self, norm: float, scale: float = 1.0) -> None:
        if not self.is_eager:
            for unit in self._units:
                if unit.loading is not None:
                    unit.loading.finish()
            # All ranks have finished reading the old weights.
            self._meeting.barrier("begin a step")
        super().step(norm, scale)
        self._number += 1

    @override
    def _to_be_written(self, unit: Unit) -> Future[None]:
        return WrittenByAll(self._meeting, unit=self._indices[unit], step=self._number)

    @override
    def _any_stepped(self) -> bool:
        return self._meeting.any(super()._any_stepped(), "take a step back")

    @override
    def settle(self) -> None:
        super().settle()
        for unit in self._units:
            unit.wait_until_written()

    @override
    def begin_writing(self) -> None:
        super().begin_writing()
        self._meeting.barrier("begin to write weights")

    @override
    def refresh(self) -> None:
        self._meeting.barrier("write weights")
        super().refresh()


class SharedHostEngine(HostEngine):
    """A ``HostEngine`` on several ranks of one machine.

    The arguments are those of ``HostEngine``.
    """

    @property
    @override
    def _can_lock(self) -> bool:
        return accelerator_of(self._device).registers_memory

    @property
    @override
    def _computes_on_host(self) -> bool:
        # One rank may write weights, such as those of an EMA, while another still uses them.
        return False

    @override
    def _make_memory(self, *, pin: bool) -> HostMemory:
        memory = SharedHostMemory.of_model(self._module, self._group, pin=pin)
        self.resources.callback(memory.close)
        return memory

    @override
    def _lay_out(self, model: torch.nn.Module) -> Any:
        needs = super()._lay_out(model)
        streamed = {id(member.parameter) for unit in self._units for member in unit.members}
        # DeepSpeed broadcasts all parameters; here, those of units are already shared.
        with self._group.naming("the broadcast of unstreamed weights"):
            for tensor in tensors_of(model):
                if id(tensor) not in streamed and tensor.numel():
                    dist.broadcast(tensor.data.view(-1).view(torch.uint8), 0)
        return needs

    @override
    def _make_steps(self, *, spare: bool, **steps: Any) -> StreamedSteps:
        self._meeting = Meeting(
            self._group,
            units=steps["units"],
            timeout_s=self._timeout_s,
            pin=self._page_locks,
        )
        self.resources.callback(self._meeting.close)
        passes = SharedPasses(meeting=self._meeting, op=steps["op"], spare=spare)
        return SharedSteps(meeting=self._meeting, passes=passes, **steps)

    @override
    def _describe(self) -> tuple[Decision, ...]:
        nbytes = sum(unit.nbytes for unit in self._units)
        locked = ", page-locked" if self._page_locks else ""
        return (
            *super()._describe(),
            Decision(
                f"{'engine' if self._plan.is_resident else KEY}.ranks",
                None,
                f"{self._group.world_size} ranks share one copy of the weights, "
                f"{format_size(nbytes)}{locked}",
                "each rank sums the gradients of its share of every unit, and updates the "
                "weights and EMAs of that share; gradients are summed in rank order, which does "
                "not affect results with two ranks",
            ),
        )

    @override
    def _leave_ranks(self) -> None:
        self._meeting.leave()


def why_not_together(
    plan: ResolvedPlan, model: torch.nn.Module, *, obstacle: str | None, timeout_s: float
) -> str | None:
    """Return why ``SharedHostEngine`` cannot run; all ranks get the same result. Collective.

    Args:
        plan: A resolved plan for several ranks.
        model: The model to train.
        obstacle: Why this rank cannot stream; ``None`` if it can.
        timeout_s: Seconds after which a collective raises an error.

    Returns:
        The reason; ``None`` if the engine can run.
    """
    with ExitStack() as resources:
        if plan.uses_deepspeed:
            _, group = join(plan.platform, resources, timeout_s=timeout_s)
            check_alike(plan, model, group)
        else:
            _, group = join_plain(plan, model, resources, timeout_s=timeout_s)
        found = group.gather((obstacle, ProcessIdentity.current()), purpose="compare the ranks")
        apart = group.any(not all(process.visible() for _, process in found))
    said = next((each for each, _ in found if each is not None), None)
    if said is None and apart:
        return "the ranks are on several machines or in separate containers"
    return said
