"""U-Nets of full size and random weights: two steps, save, resume and export, without a GPU.

Each phase of a case has its own process, so that its peak of anonymous memory is its own. A case
starts only if memory and disk suffice according to the plan's estimate; without room for a
checkpoint, it neither saves nor resumes. A case that the kernel kills is recorded as killed, and
the next one runs. Progress is written to stderr.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import attrs

from bench.full_size import Needs, Preparation, Run, Training
from bench.runner import Benchmark, Case, Goal, LeftOutError, Measured
from bench.workers import AnonPeak, Worker, WorkerError, anon_bytes

MEASURED, ESTIMATED = "measured", "estimated"
SMALL: Final = 0.1
"""Scale of the quick cases."""
WITHIN: Final = 1.1
_BEAT_S: Final = 15.0
_PATIENCE_S: Final = 7200.0
_TWO: Final = {"stage": 2, "offload": "cpu"}
_SD15, _SDXL = "SD 1.5", "SDXL"
_LEAN: Final = {"model": "sd15", "plan": _TWO, "streamed": True, "optimizer": "AdamW8BitStates"}
TRAININGS: Final[Mapping[str, Mapping[str, Any]]] = {
    f"{_SD15}, ZeRO-2, optimizer in RAM": {"model": "sd15", "plan": _TWO},
    f"{_SD15}, ZeRO-3, optimizer on NVMe": {
        "model": "sd15", "plan": {"stage": 3, "offload": "nvme", "offload_param": "cpu"},
    },
    f"{_SD15}, ZeRO-3, optimizer and parameters on NVMe": {
        "model": "sd15", "plan": {"stage": 3, "offload": "nvme", "offload_param": "nvme"},
    },
    f"{_SD15}, streamed, fp32 moments": {"model": "sd15", "plan": _TWO, "streamed": True},
    f"{_SD15}, streamed, bf16 moments": _LEAN | {"optimizer": "AdamWBF16States"},
    f"{_SD15}, streamed, 8-bit moments, EMA on disk": _LEAN,
    f"{_SD15}, streamed, 8-bit moments, EMA in RAM": _LEAN | {"ema": "host"},
    f"{_SDXL}, LoRA of rank 16, ZeRO-2, optimizer in RAM": {
        "model": "sdxl", "plan": _TWO, "lora": 16, "ema": "host",
    },
    f"{_SDXL}, streamed, 8-bit moments": _LEAN | {"model": "sdxl"},
    f"{_SDXL}, Adafactor by its own code": {
        "model": "sdxl", "plan": _TWO | {"gradient_clipping": 1.0}, "on_device": True,
        "optimizer": "Adafactor", "ema": "none",
    },
    f"{_SDXL}, ZeRO-3, optimizer and parameters on NVMe": {
        "model": "sdxl", "plan": {"stage": 3, "offload": "nvme", "offload_param": "nvme"},
    },
}  # fmt: skip
"""Settings of each case; the EMA is in a file unless the name says otherwise."""


def cases(quick: bool) -> Sequence[Case]:
    scale = SMALL if quick else 1.0
    return tuple(
        Case(name, measure, attrs.asdict(Training(scale=scale, **settings)))
        for name, settings in TRAININGS.items()
    )


def measure(settings: Mapping[str, Any], scratch: Path) -> Measured:
    """Run all phases of a case, as far as it gets.

    Raises:
        LeftOutError: Memory or disk would not suffice.
    """
    training, record = Training(**settings), Record(scratch=scratch)
    try:
        with record.phase("prepare", Preparation, training) as act:
            needs: Needs = act("estimate", "needs")
            saves = _checked(needs, scratch)
            act("write weights", "write")
        _train(record, training, saves=saves)
        if saves:
            _resume(record, training)
    except WorkerError as error:
        record.fail(error)
    return record.measured(needs)


def _checked(needs: Needs, scratch: Path) -> bool:
    """Say what a case needs; return whether it can save.

    Raises:
        LeftOutError: Memory or disk does not suffice.
    """
    free = shutil.disk_usage(scratch).free
    _say(
        f"  needs {_gib(needs.memory)} of memory ({_gib(needs.memory_free)} free) and "
        f"{_gib(needs.disk)} of disk ({_gib(free)} free); saving needs {_gib(needs.checkpoint)} "
        "of disk more"
    )
    if needs.memory > needs.memory_free:
        raise LeftOutError(f"{_gib(needs.memory)} of memory is needed, {_gib(needs.memory_free)} "
                           "is free")  # fmt: skip
    if needs.disk > free:
        raise LeftOutError(f"{_gib(needs.disk)} of disk is needed, {_gib(free)} is free")
    saves = needs.disk + needs.checkpoint <= free
    if not saves:
        _say("  the disk has no room for a checkpoint: runs without saving and resuming")
    return saves


def _train(record: Record, training: Training, *, saves: bool) -> None:
    with record.phase("train", Run, training) as act:
        record.facts |= act("start", "start")
        for number in range(training.steps):
            record.facts["loss"] = act("step", "step", words=f"step {number + 1}")["loss"]
        record.note("disk_bytes", record.swapped)
        if saves:
            record.note("checkpoint_bytes", act("save", "save"))
            record.facts["loss of continuing"] = act("step", "step", words="step after saving")[
                "loss"
            ]
        else:
            record.facts["not saved"] = "the disk had no room for a checkpoint"
            # The engine has read it, and the export needs its room.
            shutil.rmtree(record.scratch / "pipeline")
            _export(record, training, act)
        act("close", "finish")


def _resume(record: Record, training: Training) -> None:
    with record.phase("resume", Run, training) as act:
        act("start", "start")
        act("resume", "resume")
        found = act("step", "step", words="step after resuming")["loss"]
        record.facts["loss after resuming"] = found
        record.facts["resumed exactly"] = found == record.facts["loss of continuing"]
        # A resumed run no longer needs it, and the disk may be small.
        shutil.rmtree(record.scratch / "checkpoint")
        _export(record, training, act)
        act("close", "finish")


def _export(record: Record, training: Training, act: Act) -> None:
    """Export, read every tensor back, and compare names and shapes with the model's."""
    for what in ("trained", *(("ema",) if training.ema != "none" else ())):
        act("export", "export", what, words=f"export of {what} weights")
        found = act("read export", "read_back", what)
        record.facts[f"export of {what} weights"] = found
        shutil.rmtree(record.scratch / f"export-{what}")


Act = Callable[..., Any]
"""Runs a method of the process's object: ``act(quantity, method, *arguments, words=…)``."""


@attrs.define(kw_only=True)
class Record:
    """What is measured of a case, phase by phase."""

    scratch: Path
    samples: dict[str, list[float]] = attrs.field(factory=dict)
    facts: dict[str, Any] = attrs.field(factory=dict)
    doing: str = ""
    """Phase and action that run now, or failed."""
    swapped: int = 0
    """Bytes of swap files and of an EMA's file after the latest action."""
    peak: int = 0
    """Largest anonymous memory of a phase that trains."""

    @contextmanager
    def phase(self, name: str, kind: type[Any], training: Training) -> Iterator[Act]:
        """Start a process; yield a function that measures one of its actions."""
        self.doing = f"{name}: imports"
        _say(f"  {self.doing}")
        environment = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        arguments = (training, self.scratch)
        with _beats():
            worker = Worker(kind, *arguments, environment=environment, patience_s=_PATIENCE_S)
        with worker:

            def act(quantity: str, method: str, *arguments: Any, words: str = "") -> Any:
                self.doing = f"{name}: {words or quantity}"
                return self._act(worker, quantity, method, arguments)

            yield act

    def _act(self, worker: Worker, quantity: str, method: str, arguments: Sequence[Any]) -> Any:
        _say(f"  {self.doing}")
        began = time.perf_counter()
        with AnonPeak(worker.pid, interval=0.02) as memory, _beats(worker.pid):
            try:
                answer = worker.call(method, *arguments)
            finally:
                if memory.peak > self.peak and not self.doing.startswith("prepare"):
                    self.peak = memory.peak
                    self.facts["action of the peak"] = self.doing
        seconds = time.perf_counter() - began
        self.note(f"{quantity.replace(' ', '_')}_seconds", seconds)
        for part, found in answer.items() if method == "step" else ():
            if part.endswith("_seconds"):
                self.note(part, found)
        unlinked = unlinked_bytes(worker.pid, self.scratch)
        self.swapped = unlinked + folder_bytes(self.scratch / "swap")
        used = unlinked + folder_bytes(self.scratch)
        self.facts["all_disk_bytes"] = max(used, self.facts.get("all_disk_bytes", 0))
        _say(f"    {seconds:.1f} s, at most {_gib(memory.peak)} of memory, {_gib(used)} of disk")
        return answer

    def note(self, quantity: str, value: float) -> None:
        self.samples.setdefault(quantity, []).append(float(value))

    def fail(self, error: WorkerError) -> None:
        """Record why the case ended early."""
        text = str(error).strip()
        killed = "exit code -9" in text
        last = "killed (exit code -9): memory ran out" if killed else text.splitlines()[-1]
        self.facts |= {"failed": f"{self.doing}: {last}", "traceback": text[-2000:]}
        _say(f"  failed: {self.doing}: {text if not killed else last}")

    def measured(self, needs: Needs) -> Measured:
        """Return all samples beside the plan's estimate."""
        found = {**self.samples, **({"host_bytes": [float(self.peak)]} if self.peak else {})}
        estimated = {"host_bytes": needs.memory, "disk_bytes": needs.swap}
        if "checkpoint_bytes" in found:
            estimated["checkpoint_bytes"] = needs.checkpoint
        return Measured(
            samples={
                MEASURED: found,
                ESTIMATED: {name: [float(nbytes)] for name, nbytes in estimated.items() if nbytes},
            },
            baseline=MEASURED,
            facts=self.facts,
        )


@contextmanager
def _beats(pid: int | None = None) -> Iterator[None]:
    """Write a line every few seconds, so that a long action is not silent."""
    stop, began = threading.Event(), time.perf_counter()

    def beat() -> None:
        while not stop.wait(_BEAT_S):
            memory = ""
            with contextlib.suppress(OSError, ValueError):  # The process is gone.
                memory = "" if pid is None else f", {_gib(anon_bytes(pid))} of memory"
            _say(f"    {time.perf_counter() - began:.0f} s{memory}")

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def folder_bytes(folder: Path) -> int:
    """Return the disk space of all files in a folder."""
    sizes = []
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # Removed since.
            sizes.append(512 * path.lstat().st_blocks)
    return sum(sizes)


def unlinked_bytes(pid: int, folder: Path) -> int:
    """Return the disk space of files in ``folder`` that a process has open but that have no name.

    Such a file is an EMA's.
    """
    found: dict[int, int] = {}
    for descriptor in Path("/proc", str(pid), "fd").glob("*"):
        with contextlib.suppress(OSError):  # Closed since.
            target = str(descriptor.readlink())
            if target.startswith(str(folder.resolve())) and target.endswith(" (deleted)"):
                status = descriptor.stat()
                found[status.st_ino] = 512 * status.st_blocks
    return sum(found.values())


def _gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.1f} GiB"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


BENCHMARK = Benchmark(
    name="large",
    title="training of U-Nets of full size on a machine without a GPU, at 128² with batch 1",
    cases=cases,
    ours=(ESTIMATED,),
    better="the closer the estimate is to the measured memory, the better",
    goals=tuple(
        Goal(f"{name}: {text}", name, one, "host_bytes", WITHIN, other)
        for text, one, other in (
            ("the estimate is at most 10 % above the peak memory", ESTIMATED, MEASURED),
            ("the peak memory is at most 10 % above the estimate", MEASURED, ESTIMATED),
        )
        for name in TRAININGS
    ),
)
