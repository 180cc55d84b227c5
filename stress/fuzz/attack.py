"""Operations on a case; foreign exceptions, long run times and high memory use are failures."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import json
import os
import random
import re
import shutil
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import attrs

from stress.fuzz.cases import KEYS, VALUES, Case
from zerotune import OptimizerResolver, cli
from zerotune.errors import ZeroTuneError
from zerotune.plan import DeepSpeedPlan, RunFacts, plan_document
from zerotune.plan.plan import raised
from zerotune.plan.read import SHORT_NAMES, load_plan, read_partly
from zerotune.platform import Platform

LONGEST: Final = 2.0
"""Maximum CPU seconds of an operation."""
MOST: Final = 200 * 2**20
"""Maximum memory growth of this process during an operation, in bytes."""
_HOPELESS: Final = 30.0
"""CPU seconds after which an operation is aborted."""
_ANSWERS: Final = frozenset({200, 400, 404, 409, 413, 422})
_MACHINES: Final = {
    "cuda": Platform.synthetic("cuda", device_count=8),
    "cpu": Platform.synthetic("cpu"),
    "mps": Platform.synthetic("mps", deepspeed=False),
}
_COMPLAINT: Final = re.compile(r"^error: \S", re.MULTILINE)
_FORMATS: Final = {"deepspeed": ".json", "accelerate": ".yaml"}


@attrs.frozen(kw_only=True)
class Failure:
    """An operation that broke a limit or raised a foreign exception."""

    operation: str
    what: str
    """The exception, or the limit and the value that exceeded it."""
    place: str = ""
    """Code location of the exception."""

    @property
    def signature(self) -> tuple[str, str, str]:
        """Common part of failures with the same cause."""
        return self.operation.partition(" ")[0], self.what.partition(":")[0], self.place


class TooSlowError(BaseException):
    """An operation was aborted."""


class Attacker:
    """Runs all operations that parse a case, in one process.

    Args:
        folder: Folder for the files of cases and for output.
        client: A client of the builder, or ``None``.
        longest: Maximum CPU seconds of an operation.
    """

    def __init__(self, folder: Path, client: Any = None, *, longest: float = LONGEST) -> None:
        self._folder = folder
        self._client = client
        self._longest = longest
        self._base = 0
        self.operations = 0
        self.slowest = 0.0
        self.largest = 0

    def __call__(self, case: Case, only: str = "") -> list[Failure]:
        """Return all failures of a case; its seed determines the operations.

        Args:
            case: The input to parse.
            only: Operation to run (with those that it needs); all by default.
        """
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        failures: list[Failure] = []
        with _inside(self._folder):
            for name, operation in _operations(case, self._folder, self._client):
                if only and name != only and not name.startswith(("load", "resolve ")):
                    continue
                failure = self._done(name, operation)
                if failure is not None:
                    failures.append(failure)
        return failures

    def _done(self, name: str, operation: Callable[[], object]) -> Failure | None:
        self.operations += 1
        before = self._before()
        started = time.process_time()
        try:
            with _stopped_after(_HOPELESS):
                operation()
        except ZeroTuneError:
            pass
        except TooSlowError:
            return Failure(operation=name, what=f"time: more than {_HOPELESS:.0f} s")
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            what = f"{type(error).__name__}: {str(error)[:300]}"
            return Failure(operation=name, what=what, place=_place_of(error))
        spent, grown = time.process_time() - started, _peak() - before
        self.slowest, self.largest = max(self.slowest, spent), max(self.largest, grown)
        if spent > self._longest:
            return Failure(operation=name, what=f"time: {spent:.2f} s")
        if grown > MOST:
            return Failure(operation=name, what=f"memory: {grown / 2**20:.0f} MiB")
        return None

    def _before(self) -> int:
        """Return memory in use before an operation, after freeing what earlier operations left."""
        resident = _status("VmRSS")
        if resident > self._base + 16 * 2**20:
            gc.collect()
            _trim()
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # Reset the peak.
        resident = _status("VmRSS")
        self._base = min(self._base, resident) if self._base else resident
        return resident


# -- Operations.


def _operations(
    case: Case, folder: Path, client: Any
) -> Iterator[tuple[str, Callable[[], object]]]:
    chance = random.Random(f"operations of {case.seed}")
    file = folder / f"case{case.suffix}"
    file.write_bytes(case.content())
    plans: list[DeepSpeedPlan] = []
    yield "load", lambda: plans.append(DeepSpeedPlan.load(file))
    if not plans:  # The valid part of a faulty file is a plan too.
        yield "load rest", lambda: plans.extend(_rest(file))
    yield "from_json", lambda: DeepSpeedPlan.from_json("{" + case.text)
    yield from _commands(case, file, chance)
    if plans:
        yield from _verbs(plans[0], folder, chance)
    if client is not None:
        yield from _endpoints(case, file, plans, client, chance)


def _verbs(
    plan: DeepSpeedPlan, folder: Path, chance: random.Random
) -> Iterator[tuple[str, Callable[[], object]]]:
    name = chance.choice(list(_MACHINES))
    machine, ranks = _MACHINES[name], chance.choice((1, 1, 2, 3, 8))
    where: dict[str, Any] = {"world_size": ranks, "platform": chance.choice((None, machine))}
    yield "check", lambda: plan.check(**where)
    yield "explain", lambda: plan.explain(**where)
    yield "summary", lambda: json.dumps(plan.summary(**where), allow_nan=False)
    asked = {chance.choice([*KEYS, *SHORT_NAMES]): chance.choice(VALUES) for _ in range(2)}
    yield "overrides", lambda: plan.with_overrides(asked)
    known = [f"launch.{key}" for key in asked]
    yield (
        "also_known",
        lambda: DeepSpeedPlan.from_dict({**plan.to_dict(), **asked}, also_known=[*asked, *known]),
    )
    lossy = [*plan.launch.to_dict()] if plan.launch else []
    saved = folder / f"saved{chance.choice(('.json', '.yaml', '.py', '.hjson'))}"
    yield "save", lambda: plan.save(saved, lossy=lossy)
    for to, suffix in _FORMATS.items():
        yield f"write {to}", lambda to=to, suffix=suffix: _written(plan, to, suffix, folder)
    run = RunFacts(lr=1e-4, total_steps=1000)
    found: list[Any] = []
    yield (
        f"resolve {name}",
        lambda: found.append(plan.resolve(platform=machine, world_size=ranks, run=run)),
    )
    if not found:
        return
    resolved = found[0]
    yield "settle", lambda: found.append(OptimizerResolver().resolve(resolved))
    settled = found[-1]
    yield "resolved.explain", settled.explain
    yield "resolved.summary", lambda: json.dumps(settled.summary(), allow_nan=False)
    yield "to_deepspeed", lambda: json.dumps(settled.to_deepspeed(), allow_nan=False)
    yield "digest", settled.digest
    if chance.random() < 0.2:
        yield (
            "estimate",
            lambda: plan.estimate("sdxl", platform=machine, world_size=ranks).explain(),
        )


def _rest(file: Path) -> list[DeepSpeedPlan]:
    plan, mistakes = read_partly(lambda log: raised(DeepSpeedPlan, load_plan(file, log)))
    if plan is None and not mistakes:
        raise AssertionError("neither a plan nor a mistake")
    return [] if plan is None else [plan]


def _words(chance: random.Random) -> str:
    """Return a value as an environment variable's text."""
    value = chance.choice(VALUES)
    return value if isinstance(value, str) else str(value).lower()


def _written(plan: DeepSpeedPlan, to: str, suffix: str, folder: Path) -> None:
    lossy = tuple(plan.launch.to_dict()) if plan.launch else ()
    try:
        text = plan_document(plan, to, lossy=lossy).text
    except ZeroTuneError:
        return
    if len(text) > 16 * 2**20:  # Indentation makes it longer than the input.
        return
    file = folder / f"written{suffix}"
    file.write_text(text, encoding="utf-8")
    try:
        DeepSpeedPlan.load(file)
    except ZeroTuneError as error:
        raise AssertionError(f"what was written cannot be read: {error}") from error


def _commands(
    case: Case, file: Path, chance: random.Random
) -> Iterator[tuple[str, Callable[[], object]]]:
    formats = [*_FORMATS]
    size = ["--world-size", chance.choice(("1", "2", "7"))]
    commands = (
        ["check", str(file), *size],
        ["check", str(file), "--json", *size],
        ["convert", str(file), "--to", chance.choice(formats)],
        ["convert", str(file), "--to", chance.choice(formats), "-o", f"out{case.suffix}"],
        ["explain", str(file), *chance.choice((["--json"], [])), *size],
        ["explain", str(file), "--family", "sdxl", "--accelerator", "cuda"],
    )
    for arguments in chance.sample(commands, 2):
        name = " ".join(each for each in arguments if each != str(file))
        yield f"command {name}", lambda arguments=arguments: _command(arguments)


def _command(arguments: list[str]) -> None:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.main(["plan", *arguments])
    if status not in (0, 1, 2):
        raise AssertionError(f"status {status}")
    if "--json" in arguments and arguments[0] == "check":
        json.loads(out.getvalue())
    if status == 2 and "--json" not in arguments and not _COMPLAINT.search(err.getvalue()):
        raise AssertionError("status 2 without a word")


def _endpoints(
    case: Case, file: Path, plans: list[DeepSpeedPlan], client: Any, chance: random.Random
) -> Iterator[tuple[str, Callable[[], object]]]:
    try:
        config = json.loads(case.text)
    except (ValueError, RecursionError):
        config = plans[0].to_dict() if plans else {}
    state = {"config": config, "launch": {}, "setup": {"family": chance.choice(("sdxl", ""))}}
    bodies: dict[str, Any] = {
        "/open": chance.choice(({"path": file.name}, {"text": case.text, "name": file.name})),
        "/preview": {"state": state},
        "/advise": {"state": state},
        "/save": {"state": state, "path": f"saved{case.suffix}"},
        "/apply": {"state": state},
    }
    for path in chance.sample(sorted(bodies), 2):
        yield f"endpoint {path}", lambda path=path: _asked(client, path, json.dumps(bodies[path]))
    yield "endpoint raw", lambda: _asked(client, "/preview", case.text)


def _asked(client: Any, path: str, body: str) -> None:
    sent = body.encode("utf-8", "surrogatepass")
    answer = client.post(f"/api{path}", content=sent, headers={"content-type": "application/json"})
    if answer.status_code not in _ANSWERS:
        raise AssertionError(f"status {answer.status_code}: {answer.text[:200]}")
    answer.json()


# -- Limits.


@contextlib.contextmanager
def _stopped_after(seconds: float) -> Iterator[None]:
    def stop(_signal: int, _frame: object) -> None:
        raise TooSlowError

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _trim() -> None:
    """Return freed memory to the system, if the C library supports it."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _peak() -> int:
    return _status("VmHWM")


def _status(name: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:  # Not Linux: memory is not checked.
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), 0)


def _place_of(error: BaseException) -> str:
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if f"{os.sep}zerotune{os.sep}" in frame.filename
    ]
    if not frames:
        return ""
    return f"{Path(frames[-1].filename).name}:{frames[-1].name}"
