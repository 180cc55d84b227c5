"""What a GPU is lent for, piece by piece: ``python -m benchmarks gpu --minutes 10 --output DIR``.

The time is short and may end at any moment. So pieces come in the order of what they teach, each
is a process of its own with a limit of its own, each result is saved before the next begins, and
the next call goes on where this one stopped. Nothing is fetched and nothing installed: packages
that the machine lacks lie in a folder of wheels (``benchmarks/carry.py``), which is unpacked.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from benchmarks.carry import carried_paths
from benchmarks.framework.results import machine_name
from zerotune._util.files import write_atomically

SCHEMA: Final = 1
TRIES: Final = 2
"""How often a piece that fails is tried, over all calls."""
_ROOT: Final = Path(__file__).resolve().parents[1]
_SAVING_S: Final = 5.0
"""Of the time there is, kept for ending a piece and for the last report."""
_TAIL: Final = 4000
"""Characters of a piece's output that are kept."""


@attrs.frozen(kw_only=True)
class Piece:
    """One thing to be learnt, in a process of its own."""

    name: str
    made: str
    """``"module:function"``: called with the settings and a folder, gives JSON-able data."""
    settings: Mapping[str, Any] = attrs.field(factory=dict)
    limit_s: float = 120.0
    """The most it may take."""
    least_s: float = 20.0
    """It is not begun when less is left."""


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
        entry = self.entries.get(piece.name)
        if entry is None or entry["settings"] != _as_json(piece.settings):
            return True
        return entry["state"] != "done" and entry["tries"] < TRIES

    def add(self, piece: Piece, **found: Any) -> None:
        """Store what became of a piece, and write the file."""
        before = self.entries.get(piece.name, {})
        same = before.get("settings") == _as_json(piece.settings)
        cut = found["state"] == "cut short"
        tries = (before["tries"] if same else 0) + (0 if cut else 1)
        entry = {"settings": _as_json(piece.settings), "tries": tries, **found}
        self._data["pieces"][piece.name] = entry
        text = json.dumps(self._data, indent=1)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, (text + "\n").encode())


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


class Session:
    """Runs pieces until all are done or the time is up.

    Args:
        output: Folder of the results.
        minutes: From ``began`` on.
        began: By ``time.monotonic``; now by default.
        say: Where progress goes.
    """

    def __init__(
        self,
        *,
        output: Path,
        minutes: float,
        began: float | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.output = output
        self._until = (time.monotonic() if began is None else began) + 60 * minutes - _SAVING_S
        self._say = say or _to_stderr
        self._paths = carried_paths()

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

    def run(self, pieces: Iterable[Piece], file: SessionFile) -> bool:
        """Run what is still needed and fits into the time.

        Returns:
            Whether nothing is left to be run.
        """
        whole = True
        for piece in pieces:
            if not file.needs(piece):
                continue
            if self.left_s < piece.least_s:
                whole = False
                self._say(f"{piece.name}: left for the next call")
                continue
            self._say(f"{piece.name} ...")
            found = self._run(piece)
            file.add(piece, **found)
            self._say(f"  {found['state']} in {found['seconds']:.0f} s")
            whole = whole and not file.needs(piece)
        return whole

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
            found: dict[str, Any] = {"seconds": round(seconds, 1)}
            if code == 0 and answer.exists():
                result = json.loads(answer.read_text(encoding="utf-8"))
                return found | {"state": "done", "result": result}
            if code is None:
                state = "out of time" if limit >= piece.limit_s else "cut short"
            else:
                state = f"failed with exit code {code}"
            return found | {"state": state, "output": tail}
        finally:
            answer.unlink(missing_ok=True)
            log.unlink(missing_ok=True)

    def _child(self, piece: Piece, answer: Path, log: Any, limit: float) -> int | None:
        """Run the process; ``None``: it was still running at the limit, and was ended."""
        command = [sys.executable, "-m", "benchmarks.piece", piece.made, str(answer)]
        environment = dict(os.environ)
        paths = [str(_ROOT / "src"), str(_ROOT), *self._paths, environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        settings = {**piece.settings, "folder": str(self.output.resolve())}
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, env=environment,
            cwd=_ROOT, start_new_session=True,
        )  # fmt: skip
        try:
            assert process.stdin is not None
            # Left open: when this process dies the other sees its end, and dies too.
            process.stdin.write(json.dumps(settings).encode() + b"\n")
            process.stdin.flush()
            return process.wait(limit)
        except BrokenPipeError:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            process.stdin.close()


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


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
    return "\n".join(lines) + "\n"


def _title(machine: Mapping[str, Any]) -> str:
    hardware = machine["hardware"]
    devices = ", ".join(f"{one['name']}, {one['gib']} GiB" for one in hardware["devices"])
    cores = f"{hardware['usable_cores']} cores of {hardware['processor']}"
    return f"{devices or 'no GPU'}; {cores}, {hardware['host_gib']} GiB"


def _versions(machine: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in machine["versions"].items())


def _row(name: str, entry: Mapping[str, Any]) -> str:
    result = entry.get("result") or {}
    steps = result.get("seconds")
    cells = [name, entry["state"].replace("|", "/"), f"{entry['seconds']:.0f}",
             f"{sorted(steps)[len(steps) // 2]:.3g}" if steps else ""]  # fmt: skip
    for place in ("device", "host"):
        measured = result.get(f"{place}_bytes")
        expected = (result.get("estimate") or {}).get(place)
        cells.append("" if measured is None else f"{measured / 2**30:.2f}")
        if measured and expected:
            cells.append(f"{expected / 2**30:.2f} ({expected / measured - 1:+.0%})")
        else:
            cells.append("" if expected is None else f"{expected / 2**30:.2f}")
    return f"| {' | '.join(cells)} |"


def _told(result: Any) -> Sequence[str]:
    """Plain values of a result that the table has no column for."""
    if not isinstance(result, Mapping):
        return []
    shown = {
        key: value
        for key, value in result.items()
        if isinstance(value, (int, float, str)) and key not in ("device_bytes", "host_bytes")
    }
    return [f"- {key}: {value:.6g}" if isinstance(value, float) else f"- {key}: {value}"
            for key, value in shown.items()]  # fmt: skip


def run_session(*, output: Path, minutes: float, quick: bool) -> int:
    """The whole of it.

    Args:
        output: Folder of ``MACHINE.json`` and ``MACHINE.md``, and of a trace.
        minutes: After which no piece runs any more.
        quick: Tiny sizes, on whatever there is.

    Returns:
        0, also when some of it is left for the next call.

    Raises:
        SystemExit: There is no GPU, and the sizes are those for one.
    """
    from benchmarks.gpu import LOOK, goals, pieces

    session = Session(output=output, minutes=minutes)
    machine = session.look(LOOK)
    if not machine["hardware"]["devices"] and not quick:
        raise SystemExit("this needs a GPU; --quick shows that it works without one")
    name = machine_name(machine["hardware"]) + f"_torch-{machine['versions']['torch']}"
    file = SessionFile(output / f"{name}{'-quick' if quick else ''}.json", machine)
    try:
        whole = session.run(pieces(machine, quick=quick), file)
    finally:
        text = report(machine, file.entries, () if quick else goals(file.entries))
        file.path.with_name(f"{file.path.stem}.md").write_text(text, encoding="utf-8")
    _to_stderr(f"{file.path}: " + ("all is there" if whole else "run it again to go on"))
    return 0
