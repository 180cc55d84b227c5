"""What a GPU is lent for, piece by piece: ``python -m benchmarks gpu --minutes 10 --output DIR``.

The time is short and may end at any moment. So pieces come in the order of what they teach, each
is a process of its own with a limit of its own, each result is saved before the next begins, and
the next call goes on where this one stopped. Nothing is fetched and nothing installed: packages
that the machine lacks lie in a folder of wheels (``benchmarks/carry.py``), which is unpacked.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from benchmarks.carry import WHEELS, paths
from benchmarks.framework.results import file_name, machine_name
from zerotune._util.files import write_atomically

SCHEMA: Final = 1
TRIES: Final = 2
"""How often a piece that fails is tried, over all calls."""
_ROOT: Final = Path(__file__).resolve().parents[1]
_SAVING_S: Final = 5.0
"""Of the time there is, kept for ending a piece and for the last report."""
_TAIL: Final = 4000
"""Characters of a piece's output that are kept."""
_LINES: Final = 8
"""Of them, in the report of what failed."""
_OFFLINE: Final = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
"""Without a network each question to a hub is asked again and again, for minutes."""
_NEEDED: Final = ("torch", "deepspeed", "accelerate", "diffusers")


@attrs.frozen(kw_only=True)
class Piece:
    """One thing to be learnt, in a process of its own."""

    name: str
    made: str
    """``"module:function"``: called with the settings, a folder and ``limit_s``, gives JSON-able
    data, or yields it as it grows: what was there is kept when the rest fails."""
    settings: Mapping[str, Any] = attrs.field(factory=dict)
    limit_s: float = 120.0
    """The most it may take."""
    least_s: float = 20.0
    """It is not begun when less is left."""
    lost: Callable[[Mapping[str, Any]], bool] | None = None
    """Whether this machine lacks what a stored result says was made: then it is made again."""


class SessionFile:
    """What one machine has told so far; whole after every piece.

    Args:
        path: The JSON file.
        machine: Hardware and versions, as the first piece found them.
    """

    def __init__(self, path: Path, machine: Mapping[str, Any]) -> None:
        self.path = path
        self._data: dict[str, Any] = {"schema": SCHEMA, "machine": dict(machine), "pieces": {}}
        if path.exists():
            stored = json.loads(path.read_text(encoding="utf-8"))
            self._data["pieces"] = stored["pieces"]

    @property
    def entries(self) -> Mapping[str, Mapping[str, Any]]:
        """By the pieces' names."""
        found: Mapping[str, Mapping[str, Any]] = self._data["pieces"]
        return found

    def needs(self, piece: Piece) -> bool:
        """Whether it is still to be run: not done with these settings, and not failed twice."""
        entry = self._same(piece)
        return not entry or (entry["state"] != "done" and entry["tries"] < TRIES)

    def has_lost(self, piece: Piece) -> bool:
        """Whether it was done, on a machine that had been given back since."""
        made = self._same(piece).get("result")
        return made is not None and piece.lost is not None and piece.lost(made)

    def add(self, piece: Piece, **found: Any) -> None:
        """Store what became of a piece, and write the file."""
        before = self._same(piece)
        tries = before.get("tries", 0) + (0 if found["state"] == "cut short" else 1)
        # What an earlier try came to know is not lost with a later one.
        kept = {"result": before["result"]} if "result" in before else {}
        entry = {"settings": _as_json(piece.settings), "tries": tries, **kept, **found}
        self._data["pieces"][piece.name] = entry
        text = json.dumps(self._data, indent=1)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, (text + "\n").encode())

    def _same(self, piece: Piece) -> Mapping[str, Any]:
        """What is stored of a piece with these settings; empty: nothing."""
        entry = self.entries.get(piece.name, {})
        return entry if entry.get("settings") == _as_json(piece.settings) else {}


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


class Session:
    """Runs pieces until all are done or the time is up.

    Args:
        output: Folder of the results.
        minutes: From ``began`` on.
        began: By ``time.monotonic``; now by default.
        say: Where progress goes.
        only: Parts of names; pieces with one of them are run, again if they are done, and no
            others. Empty: whatever is needed.
    """

    def __init__(
        self,
        *,
        output: Path,
        minutes: float,
        began: float | None = None,
        say: Callable[[str], None] | None = None,
        only: Sequence[str] = (),
    ) -> None:
        self.output = output
        self._only = tuple(only)
        self._until = (time.monotonic() if began is None else began) + 60 * minutes - _SAVING_S
        self._say = say or _to_stderr

    @property
    def left_s(self) -> float:
        """Seconds that pieces may still take."""
        return self._until - time.monotonic()

    def look(self, piece: Piece) -> Any:
        """Run a piece that is needed anew each time.

        Raises:
            SystemExit: It failed; its output says why.
        """
        found = self._run(piece)
        if found["state"] != "done":
            raise SystemExit(f"{piece.name}: {found['state']}\n{found.get('output', '')}")
        return found["result"]

    def run(
        self,
        pieces: Iterable[Piece],
        file: SessionFile,
        *,
        saved: Callable[[], object] | None = None,
    ) -> bool:
        """Run what is still needed and fits into the time.

        Args:
            pieces: In this order.
            file: Where results go, each before the next piece begins.
            saved: Called after each.

        Returns:
            Whether nothing is left to be run.
        """
        whole = True
        for piece in pieces:
            if not self._wants(piece, file):
                continue
            if self.left_s < piece.least_s:
                whole = False
                self._say(f"{piece.name}: left for the next call")
                continue
            self._say(f"{piece.name} ...")
            found = self._run(piece)
            file.add(piece, **found)
            self._say(f"  {found['state']} in {found['seconds']:.0f} s{_in_short(found)}")
            whole = whole and not file.needs(piece)
            if saved is not None:
                saved()
        return whole

    def _wants(self, piece: Piece, file: SessionFile) -> bool:
        if self._only:
            return any(part in piece.name for part in self._only)
        return file.needs(piece) or file.has_lost(piece)

    def _run(self, piece: Piece) -> dict[str, Any]:
        self.output.mkdir(parents=True, exist_ok=True)
        answer = self.output / f".{os.getpid()}.answer"
        log = self.output / f".{os.getpid()}.log"
        limit = min(piece.limit_s, max(1.0, self.left_s))
        began = time.monotonic()
        try:
            with log.open("wb") as written:
                code = self._child(piece, answer, written, limit)
            seconds = time.monotonic() - began
            tail = log.read_text(encoding="utf-8", errors="replace")[-_TAIL:]
            found: dict[str, Any] = {"seconds": round(seconds, 1), "output": tail}
            if answer.exists():
                found["result"] = json.loads(answer.read_text(encoding="utf-8"))
            if code is None:
                state = "out of time" if limit >= piece.limit_s else "cut short"
            else:
                done = code == 0 and "result" in found
                state = "done" if done else f"failed with exit code {code}"
            return found | {"state": state}
        finally:
            answer.unlink(missing_ok=True)
            log.unlink(missing_ok=True)

    def _child(self, piece: Piece, answer: Path, log: Any, limit: float) -> int | None:
        """Run the process; ``None``: it was still running at the limit, and was ended."""
        command = [sys.executable, "-m", "benchmarks.piece", piece.made, str(answer)]
        environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, **_OFFLINE}
        first = [str(_ROOT / "src"), str(_ROOT), *paths(), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, first))
        settings = {**piece.settings, "folder": str(self.output.resolve()), "limit_s": limit}
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, env=environment,
            cwd=_ROOT, start_new_session=True,
        )  # fmt: skip
        assert process.stdin is not None
        try:
            # Left open: when this process dies the other sees its end, and dies too.
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(settings).encode() + b"\n")
                process.stdin.flush()
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _in_short(found: Mapping[str, Any]) -> str:
    """What whoever watches should know at once."""
    if found["state"] != "done":
        lines = found.get("output", "").strip().splitlines()
        return f": {lines[-1][:300]}" if lines else ""
    named = zip(_COLUMNS[3:], _measures(found["result"]), strict=True)
    told = ", ".join(f"{name} {cell}" for name, cell in named if cell)
    return f": {told}" if told else ""


# -- The report: each result beside what was expected of it.


_COLUMNS: Final = (
    "piece", "state", "s", "seconds per step", "device, GiB", "expected", "host, GiB", "expected",
)  # fmt: skip


def report(
    machine: Mapping[str, Any],
    entries: Mapping[str, Mapping[str, Any]],
    goals: Sequence[str] = (),
) -> str:
    """What a machine has told, as Markdown."""
    lines = [f"# {_title(machine)}", "", _versions(machine), ""]
    lines += [f"| {' | '.join(_COLUMNS)} |", "|---|---|--:|--:|--:|--:|--:|--:|"]
    lines += [_row(name, entry) for name, entry in entries.items()]
    if goals:
        lines += ["", "## Goals", "", *goals]
    for name, entry in entries.items():
        told = _told(entry.get("result"))
        if told:
            lines += ["", f"## {name}", "", *told]
        if entry["state"] != "done":
            last = entry.get("output", "").strip().splitlines()[-_LINES:]
            lines += ["", f"## {name}: {entry['state']}", "", "```text", *last, "```"]
    return "\n".join(lines) + "\n"


def _title(machine: Mapping[str, Any]) -> str:
    hardware = machine["hardware"]
    devices = ", ".join(f"{one['name']}, {one['gib']} GiB" for one in hardware["devices"])
    cores = f"{hardware['usable_cores']} cores of {hardware['processor']}"
    return f"{devices or 'no GPU'}; {cores}, {hardware['host_gib']} GiB"


def _versions(machine: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in machine["versions"].items())


def _row(name: str, entry: Mapping[str, Any]) -> str:
    cells = [name, entry["state"].replace("|", "/"), f"{entry['seconds']:.0f}"]
    return f"| {' | '.join(cells + _measures(entry.get('result') or {}))} |"


def _measures(result: Mapping[str, Any]) -> list[str]:
    """Cells of the columns from the fourth on."""
    cells = [_seconds(result)]
    for place in ("device", "host"):
        measured = result.get(f"{place}_bytes")
        expected = (result.get("estimate") or {}).get(place)
        cells.append("" if measured is None else f"{measured / 2**30:.2f}")
        if measured and expected:
            cells.append(f"{expected / 2**30:.2f} ({expected / measured - 1:+.0%})")
        else:
            cells.append("" if expected is None else f"{expected / 2**30:.2f}")
    return cells


def _seconds(result: Mapping[str, Any]) -> str:
    """The median step, and what was predicted of it."""
    steps, predicted = result.get("seconds"), (result.get("estimate") or {}).get("seconds")
    if not steps:
        return "" if predicted is None else f"predicted {predicted:.3g}"
    median = statistics.median(steps)
    if predicted is None:
        return f"{median:.3g}"
    return f"{median:.3g}, predicted {predicted:.3g} ({predicted / median - 1:+.0%})"


def _told(result: Any) -> Sequence[str]:
    """Plain values of a result that the table has no column for."""
    if not isinstance(result, Mapping):
        return []
    known = ("device_bytes", "host_bytes", "seconds", "estimate", "plan")
    lines = []
    for key, value in result.items():
        if key in known:
            continue
        for name, one in _flat(key, value):
            lines.append(f"- {name}: {one:.6g}" if isinstance(one, float) else f"- {name}: {one}")
    return lines


def _flat(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Plain values, by where they lie; of lists of numbers the median."""
    if isinstance(value, Mapping):
        for name, one in value.items():
            yield from _flat(f"{key}, {name}", one)
    elif isinstance(value, str):
        yield key, " / ".join(value.strip().splitlines()[-3:])
    elif isinstance(value, (int, float)):
        yield key, value
    elif value and all(isinstance(one, (int, float)) for one in value):
        yield key, float(statistics.median(value))


def _tidy(output: Path) -> None:
    """Remove what sessions have left that were killed."""
    for path in (*output.glob(".*.answer"), *output.glob(".*.log")):
        pid = path.name.split(".")[1]
        if pid.isdigit() and not Path("/proc", pid).exists():
            path.unlink(missing_ok=True)


def run_session(
    *,
    output: Path,
    minutes: float,
    quick: bool,
    began: float | None = None,
    only: Sequence[str] = (),
) -> int:
    """The whole of it.

    Args:
        output: Folder of ``MACHINE.json`` and ``MACHINE.md``, and of traces.
        minutes: After which no piece runs any more.
        quick: Tiny sizes, on whatever there is.
        began: Since when the minutes count, by ``time.monotonic``.
        only: Parts of the names of pieces to run, again if need be.

    Returns:
        0, also when some of it is left for the next call.

    Raises:
        SystemExit: There is no GPU, and the sizes are those for one; or a package is missing that
            nearly all pieces need.
    """
    from benchmarks.gpu import LOOK, goals, pieces

    session = Session(output=output, minutes=minutes, began=began, only=only)
    machine = session.look(LOOK)
    if not machine["hardware"]["devices"] and not quick:
        raise SystemExit("this needs a GPU; --quick shows that it works without one")
    lacking = [name for name in _NEEDED if name not in machine["versions"]]
    if lacking:
        raise SystemExit(
            f"{', '.join(lacking)}: neither installed here nor in {WHEELS}; `python -m "
            "benchmarks.carry --have LIST`, where there is a network, puts wheels there, which go "
            "along with the checkout"
        )
    _tidy(output)
    torch = file_name(machine["versions"]["torch"])
    name = f"{machine_name(machine['hardware'])}_torch-{torch}{'-quick' if quick else ''}"
    file = SessionFile(output / f"{name}.json", machine)

    def write_report() -> str:
        text = report(machine, file.entries, () if quick else goals(file.entries))
        write_atomically(output / f"{name}.md", text.encode())
        return text

    whole = session.run(pieces(machine, quick=quick), file, saved=write_report)
    # Last on the screen, for whoever sees no more than that.
    print(write_report(), flush=True)
    failed = [piece for piece, entry in file.entries.items() if entry["state"] != "done"]
    told = "all has been run" if whole else "run it again to go on"
    told += f"; not done: {', '.join(failed)}" if failed else ""
    _to_stderr(f"{file.path}: {told}")
    return 0
