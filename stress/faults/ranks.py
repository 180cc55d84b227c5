"""One of several ranks is killed, stopped, loops, raises or differs, with and without torchrun.

Ranks are on one machine or on one machine each, with optimizer states in memory or on NVMe. All
survivors must name the culprit within the trainer's timeout plus ten seconds, and no other rank.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import re
import signal
import time
from pathlib import Path
from typing import Any

import attrs
import torch

from stress.faults.campaign import Found, Missed
from stress.faults.killing import libaio
from stress.faults.workers import quiet, rank_variables, wait_for
from tests.support.ranks import _fork_server, compile_io, free_port, on_a_machine
from zerotune import DeepSpeedPlan, ImageTensors, Trainer
from zerotune.checkpoint import latest_checkpoint
from zerotune.checkpoint.folders import verify_checkpoint
from zerotune.offload import OffloadManager, cleanup_stale_swap
from zerotune.training import Callback, SaveEvery, SaveEveryInBackground

TIMEOUT_S = 6.0
ALLOWED_S = TIMEOUT_S + 10
DIFFERING = ("model", "data", "plan")
ENDING = ("kill", "stop", "loop", "exception")
OURS = ("zerotune.", "torch.distributed.elastic.multiprocessing.api.SignalException")
"""Prefixes of errors that a rank may end with; torchrun raises the second on SIGTERM."""
IN_A_STEP = ("data", "forward", "backward", "after the step", "while saving")
MOMENTS = (*IN_A_STEP, "starting", "resuming", "exporting")


@attrs.frozen(kw_only=True)
class Fault:
    """The kind of fault, its rank, and its moment."""

    what: str
    lost: int
    world_size: int
    stage: int | None
    """``None``: the plain engine."""
    moment: str
    step: int
    torchrun: bool
    background: bool
    machines: bool
    """Whether each rank is on its own machine."""
    nvme: bool
    """Whether optimizer states are swapped."""

    @property
    def nodes(self) -> int:
        """Number of machines passed to ``torchrun``."""
        return self.world_size if self.machines else 1

    @classmethod
    def by_chance(cls, chance: random.Random) -> Fault:
        world_size = chance.choice([2, 2, 2, 3])
        fault = cls(
            what=chance.choice([*ENDING, *ENDING, *DIFFERING]),
            lost=chance.randrange(world_size),
            world_size=world_size,
            stage=chance.choice([None, None, 0, 1, 2, 3]),
            moment=chance.choice(MOMENTS),
            step=chance.randrange(3),
            torchrun=chance.randrange(4) == 0,
            background=bool(chance.randrange(2)),
            machines=chance.randrange(4) == 0,
            nvme=chance.randrange(4) == 0,
        )
        nvme = fault.nvme and libaio()
        # Only stage 3 swaps.
        return attrs.evolve(fault, nvme=nvme, stage=3 if nvme else fault.stage)


class Faulty(Callback):
    """Triggers the fault at its moment."""

    def __init__(self, fault: Fault, folder: Path, rank: int) -> None:
        self._fault, self._folder = fault, folder
        self._mine = rank == fault.lost and fault.what in ENDING
        self.step = -1

    def at(self, moment: str) -> None:
        # A background save may happen one step late.
        stepping = moment in IN_A_STEP
        early = stepping and self.step < self._fault.step
        late = stepping and self.step > self._fault.step and moment != "while saving"
        if not self._mine or moment != self._fault.moment or early or late:
            return
        self._mine = False
        (self._folder / "pid").write_text(str(os.getpid()))
        (self._folder / "began").write_text(str(time.time()))
        what = self._fault.what
        if what == "exception":
            raise ValueError("no such thing")
        if what == "loop":
            number = 0
            while True:
                number += 1
        os.kill(os.getpid(), signal.SIGKILL if what == "kill" else signal.SIGSTOP)

    def on_step_end(self, *_: Any) -> None:
        self.at("after the step")


class Images(ImageTensors):
    """Data that report when a sample is read."""

    faulty: Faulty | None = None

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if self.faulty is not None:
            self.faulty.at("data")
        return super().__getitem__(index)


class Hooked(torch.autograd.Function):
    """The identity, which reports when the backward pass reaches it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, faulty: Faulty) -> torch.Tensor:
        ctx.faulty = faulty
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.faulty.at("backward")
        return gradients[0], None


def trained(folder: Path, fault: Fault, rank: int) -> None:
    """Train with the fault."""
    odd = rank == fault.lost
    width = 3 + (odd and fault.what == "model")
    count = 24 + 4 * (odd and fault.what == "data")
    lr = 1e-2 * (1 + (odd and fault.what == "plan"))
    torch.manual_seed(0)
    faulty = Faulty(fault, folder, rank)
    images = Images(images=torch.zeros(count, 1, 4, 4))

    def loss(engine: Any, batch: Any, _: Any) -> torch.Tensor:
        faulty.step = engine.state.global_step
        images.faulty = faulty
        faulty.at("forward")
        output: torch.Tensor = (engine(batch["images"]) - 1).pow(2).mean()
        return Hooked.apply(output, faulty)  # type: ignore[no-untyped-call,no-any-return]

    faulty.at("starting")
    saver = SaveEveryInBackground if fault.background else SaveEvery
    with Trainer(
        model=net(width, swaps=fault.nvme),
        plan=DeepSpeedPlan.build(
            stage=fault.stage or 0,
            offload="nvme" if fault.nvme else "none",
            precision="fp32",
            micro_batch_size=4,
            optimizer={"type": "AdamW", "params": {"lr": lr}},
        ),
        offload=OffloadManager(root=folder / "swap"),
        data=images,
        objective=loss,
        callbacks=[saver(steps=1, root=folder / "checkpoints", keep=2), faulty],
        deepspeed=fault.stage is not None,
        timeout_s=TIMEOUT_S,
    ) as trainer:
        if fault.moment == "while saving":
            before_each("write_at", faulty, "while saving")
        trainer.fit(steps=4)
        before_each("read_at", faulty, "resuming")
        trainer.resume(folder / "checkpoints" / "step-00000004")
        faulty.at("exporting")
        trainer.export(folder / "export")


def net(width: int, *, swaps: bool) -> torch.nn.Sequential:
    """Return two layers; ``swaps`` adds layers large enough for DeepSpeed to swap."""
    large = (
        torch.nn.Flatten(),
        torch.nn.Linear(16 * width, 1024),
        torch.nn.Linear(1024, 1024),
        torch.nn.Linear(1024, 16 * width),
        torch.nn.Unflatten(1, (width, 4, 4)),
    )
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, width, 3, padding=1),
        *(large if swaps else ()),
        torch.nn.Conv2d(width, 1, 3, padding=1),
    )


def before_each(name: str, faulty: Faulty, moment: str) -> None:
    """Trigger the fault in calls of a function that reads or writes tensor files."""
    from zerotune.backend import stored
    from zerotune.checkpoint import tensors

    owner = stored if name == "read_at" else tensors
    real = getattr(owner, name)

    def called(*arguments: Any) -> Any:
        faulty.at(moment)
        return real(*arguments)

    setattr(owner, name, called)


def run_rank(folder: Path, fault: Fault, variables: dict[str, str]) -> None:
    """Run one rank, and write its errors and logs to files."""
    os.environ.update(variables)
    quiet()
    rank = int(os.environ["RANK"])
    if fault.machines:
        on_a_machine(f"machine-{rank}")
    logger = logging.getLogger("zerotune")
    logger.addHandler(logging.FileHandler(folder / f"log-{rank}"))
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    if fault.what in DIFFERING and rank == fault.lost:
        (folder / "began").write_text(str(time.time()))
    try:
        trained(folder, fault, rank)
        told = "trained to the end"
    except BaseException as error:
        told = f"{type(error).__module__}.{type(error).__name__}: {error}"
        if fault.torchrun:
            (folder / f"told-{rank}").write_text(told)
            raise
    (folder / f"told-{rank}").write_text(told)
    # ``os._exit`` skips the exit handlers of libraries that expect their own launcher.
    os._exit(0 if told == "trained to the end" else 1)


def run_torchrun(folder: Path, fault: Fault, port: int, node: int) -> None:
    """Run ``torchrun``'s agent, with forked ranks instead of new processes.

    Args:
        folder: Folder for the ranks' errors and logs.
        fault: The fault to trigger.
        port: Port of the rendezvous.
        node: Number of the machine; with several machines, each has one rank.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    quiet()
    config = LaunchConfig(
        min_nodes=fault.nodes,
        max_nodes=fault.nodes,
        nproc_per_node=fault.world_size // fault.nodes,
        rdzv_backend="c10d",
        rdzv_endpoint=f"127.0.0.1:{port}",
        run_id="faults",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="fork",
    )
    try:
        elastic_launch(config, run_rank)(folder, fault, {})
    except ChildFailedError as error:
        (folder / f"torchrun-{node}").write_text(str(error))
    except RendezvousConnectionError:
        # The other machine's agent has exited, and the rendezvous store with it.
        pass
    os._exit(0)


class RankFaults:
    """Runs of several ranks, one of which is at fault.

    Args:
        always: Fixed fields of ``Fault``.
    """

    def __init__(self, **always: Any) -> None:
        self._always = always
        if libaio():
            compile_io()

    def inject(self, work: Path, chance: random.Random) -> float:
        return self.suffer(work, attrs.evolve(Fault.by_chance(chance), **self._always))

    def suffer(self, work: Path, fault: Fault) -> float:
        """Run with the fault; return the seconds until all survivors reported it."""
        context, port = _fork_server(), free_port()
        if fault.torchrun:
            processes = [
                context.Process(target=run_torchrun, args=(work, fault, port, node))
                for node in range(fault.nodes)
            ]
        else:
            processes = [
                context.Process(
                    target=run_rank,
                    args=(work, fault, rank_variables(rank, fault.world_size, port)),
                )
                for rank in range(fault.world_size)
            ]
        for process in processes:
            process.start()
        try:
            seconds = self._watch(work, fault)
        finally:
            put_away(work, fault)
            for process in processes:
                process.join(10)
                process.kill()
                process.join(10)
        check_swap(work, fault)
        return seconds

    def _watch(self, work: Path, fault: Fault) -> float:
        began = work / "began"
        limit = time.monotonic() + 60
        while not began.exists() or not began.read_text():
            if all(ended(work, rank) for rank in range(fault.world_size)):
                if "to the end" in read(work / f"told-{fault.lost}"):
                    raise Missed
                raise Found("foreign", f"{fault}: over before the fault: {told(work)}")
            if time.monotonic() > limit:
                raise Found("hung", f"{fault}: it did not come so far: {told(work)}")
            time.sleep(0.01)
        survivors = [r for r in range(fault.world_size) if r != fault.lost]
        waiting = range(fault.world_size) if fault.what in DIFFERING else survivors
        start = float(began.read_text())
        while not all(ended(work, rank) for rank in waiting):
            if time.time() > start + ALLOWED_S:
                raise Found("hung", f"{fault}: not over after {ALLOWED_S:g} s: {told(work)}")
            time.sleep(0.02)
        seconds = time.time() - start
        judge(work, fault, survivors)
        return seconds

    def close(self) -> None:
        """Do nothing: no process is left."""


def ended(work: Path, rank: int) -> bool:
    """Return whether a rank's process has ended."""
    pid = work / f"pid-{rank}"
    if not pid.exists() or not pid.read_text():
        return False
    try:
        state = Path("/proc", pid.read_text(), "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "ZX"


def put_away(work: Path, fault: Fault) -> None:
    """Kill ranks that loop, are stopped, or hang."""
    for rank in range(fault.world_size):
        path = work / f"pid-{rank}"
        if path.exists() and path.read_text() and not ended(work, rank):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(path.read_text()), signal.SIGKILL)


def told(work: Path) -> str:
    """Return all errors and logs of the ranks."""
    said = []
    for path in sorted([*work.glob("told-*"), *work.glob("log-*")]):
        if text := path.read_text().strip():
            said.append(f"[{path.name}] {text[:1200]}")
    return "\n   ".join(["", *said])


def judge(work: Path, fault: Fault, survivors: list[int]) -> None:
    """Check that messages name the culprit and no other rank, and that no checkpoint is damaged."""
    for rank in range(fault.world_size):
        if rank != fault.lost or fault.what in DIFFERING:
            judge_word(work, fault, rank)
    if fault.what in ENDING:
        check_blame(work, fault, survivors)
    root = work / "checkpoints"
    for path in root.glob("step-????????"):
        verify_checkpoint(path)
    late = fault.step >= 2 and fault.moment != "starting"
    if fault.what in ENDING and late and latest_checkpoint(root) is None:
        raise Found("lost", f"{fault}: no checkpoint: {[p.name for p in root.iterdir()]}")


def check_swap(work: Path, fault: Fault) -> None:
    """Check that the swap disk is empty once all processes have ended."""
    root = work / "swap"
    # Each machine cleans only its own disk.
    if fault.machines or not root.exists():
        return
    every = range(fault.world_size)
    wait_for(lambda: all(ended(work, r) for r in every), seconds=10, what="the end of all ranks")
    cleanup_stale_swap(root)
    if left := [path.name for path in root.iterdir()]:
        raise Found("lost", f"{fault}: {left} stay on the swap disk: {told(work)}")


def judge_word(work: Path, fault: Fault, rank: int) -> None:
    """Check that a rank named the culprit, in a zerotune error."""
    text, log = (read(work / f"{kind}-{rank}") for kind in ("told", "log"))
    if text and not text.startswith(OURS):
        raise Found("foreign", f"{fault}: rank {rank}: {told(work)}")
    by_agent = fault.nodes == 1 or not text or text.startswith(OURS[1])
    if fault.torchrun and fault.what in ("kill", "exception") and by_agent:
        # torchrun itself names the first rank to fail, and ends the others at once.
        return
    if fault.what in DIFFERING:
        named = "disagree" in text + log and f"rank {fault.lost}: " in text + log
    else:
        named = bool(re.search(rf"[Rr]anks? ([\d, and]*)?{fault.lost}\b", text + log))
    if not named:
        raise Found("misnamed", f"{fault}: rank {rank} does not name it: {told(work)}")


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def check_blame(work: Path, fault: Fault, survivors: list[int]) -> None:
    """Check that no message blames a survivor alone."""
    for path in [*work.glob("told-*"), *work.glob("log-*")]:
        for line in path.read_text().splitlines():
            for rank in survivors:
                blamed = re.search(
                    rf"[Rr]ank {rank} (failed|stopped or exited|is stopped)", line
                ) or re.search(rf"^(?!.*\b{fault.lost}\b).*[Rr]ank {rank} has ended", line)
                if blamed:
                    raise Found("misnamed", f"{fault}: rank {rank} is blamed: {told(work)}")
