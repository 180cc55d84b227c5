"""Run everything that needs a GPU: ``python -m bench.gpu --minutes 10 --output DIR``.

GPU time is short and may end at any moment, so the most informative pieces come first. Each piece
runs in its own process with its own time limit, and its result is saved before the next piece
begins. The next call continues where this one stopped. Nothing is downloaded or installed: missing
packages come from a folder of wheels (``tools/carry.py``), which is unpacked. The session itself
needs only the standard library; each piece imports its own dependencies.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple

from tools.carry import WHEELS, paths

GIB: Final = 2**30
ROOT: Final = Path(__file__).resolve().parents[1]
TRIES: Final = 2
"""Attempts for a failing piece, over all calls."""
_BEGAN: Final = time.monotonic()
_SAVING_S: Final = 5.0
"""Seconds reserved at the end of the session for ending a piece and writing the last report."""
_ENDING_S: Final = 20.0
"""Seconds reserved at the end of a piece's limit for an interrupted pytest to print its summary."""
_TAIL: Final = 4000
"""Characters kept from the end of a piece's output."""
_OFFLINE: Final = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
"""Without a network, every hub request is retried for minutes."""
_NEEDED: Final = ("torch", "deepspeed", "accelerate", "diffusers")
_OPS: Final = ("cpu_adam", "host_step")
_CAPS: Final = (8, 4, 6, 12, 24, 16, 10)
_MARKS: Final = re.compile(r"\bmark\.gpu\b")


class Piece(NamedTuple):
    """A measurement or check that runs in its own process."""

    name: str
    made: str
    """``"module:function"``, called with the settings, a folder and ``limit_s``. It returns
    JSON-able data, or yields it as it grows; the last yield is kept if the rest fails."""
    settings: Mapping[str, Any] = {}
    limit_s: float = 120.0
    """Time limit in seconds."""
    least_s: float = 20.0
    """The piece is not started if fewer seconds are left."""
    lost: Callable[[Mapping[str, Any]], bool] | None = None
    """Whether this machine lacks what a stored result says was built; then the piece runs again."""


class Session:
    """Runs pieces until all are done or the time is up; the file is complete after each piece.

    Args:
        path: The machine's JSON file.
        machine: Hardware and versions, from the first piece.
        until: End of the session, by ``time.monotonic``.
        only: Parts of names; only pieces whose name contains one run, even if they are done.
            Empty: all pieces that still need to run.
    """

    def __init__(
        self, path: Path, machine: Mapping[str, Any], *, until: float, only: Sequence[str] = ()
    ) -> None:
        self.path, self.machine, self._until, self._only = path, machine, until, tuple(only)
        stored = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"pieces": {}}
        self.entries: dict[str, dict[str, Any]] = stored["pieces"]
        """Results by piece name."""

    def needs(self, piece: Piece) -> bool:
        """Return whether a piece must run: not done with these settings, and not failed twice.

        A piece that is done runs again if this machine lacks what it built.
        """
        entry = self._same(piece)
        lost = piece.lost is not None and "result" in entry and piece.lost(entry["result"])
        return lost or not self._ended(piece)

    def run(self, pieces: Iterable[Piece], saved: Callable[[], object]) -> bool:
        """Run the remaining pieces that fit into the time; ``saved`` is called after each.

        Returns:
            Whether no piece is left to run.
        """
        whole = True
        for piece in pieces:
            named = any(part in piece.name for part in self._only)
            if not (named if self._only else self.needs(piece)):
                continue
            left = self._until - time.monotonic()
            if left < piece.least_s:
                whole = False
                _say(f"{piece.name}: left for the next call")
                continue
            _say(f"{piece.name} ...")
            found = run_piece(piece, self.path.parent, left=left)
            self.add(piece, **found)
            _say(f"  {found['state']} in {found['seconds']:.0f} s{_in_short(found)}")
            # What it built is there now, although it was missing at the start.
            whole = whole and self._ended(piece)
            saved()
        return whole

    def add(self, piece: Piece, **found: Any) -> None:
        """Store the result of a piece, and write the file."""
        before = self._same(piece)
        tries = before.get("tries", 0) + (0 if found["state"] == "cut short" else 1)
        # A failed retry must not discard an earlier partial result.
        kept = {"result": before["result"]} if "result" in before else {}
        entry = {"settings": _as_json(piece.settings), "tries": tries, **kept, **found}
        self.entries[piece.name] = entry
        data = {"schema": 1, "machine": self.machine, "pieces": self.entries}
        _write(self.path, json.dumps(data, indent=1) + "\n")

    def _ended(self, piece: Piece) -> bool:
        """Return whether a piece is done with these settings, or has failed too often."""
        entry = self._same(piece)
        return bool(entry) and (entry["state"] == "done" or entry["tries"] >= TRIES)

    def _same(self, piece: Piece) -> Mapping[str, Any]:
        """Return the stored entry of a piece with the same settings, or an empty one."""
        entry = self.entries.get(piece.name, {})
        return entry if entry.get("settings") == _as_json(piece.settings) else {}


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _write(path: Path, text: str) -> None:
    draft = path.with_name(f".{os.getpid()}.draft")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def run_piece(piece: Piece, folder: Path, *, left: float) -> dict[str, Any]:
    """Run a piece in its own process; return its state, seconds, end of output, and result."""
    answer, log = (folder / f".{os.getpid()}.{kind}" for kind in ("answer", "log"))
    limit = min(piece.limit_s, max(1.0, left))
    began = time.monotonic()
    try:
        with log.open("wb") as written:
            code = _child(piece, answer, written, limit)
        tail = log.read_text(encoding="utf-8", errors="replace")[-_TAIL:]
        found: dict[str, Any] = {"seconds": round(time.monotonic() - began, 1), "output": tail}
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


def _child(piece: Piece, answer: Path, log: Any, limit: float) -> int | None:
    """Run the process; return its exit code, or ``None`` if it was killed at the limit."""
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, **_OFFLINE}
    first = [str(ROOT / "src"), str(ROOT), *paths(), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, first))
    settings = {**piece.settings, "folder": str(answer.parent.resolve()), "limit_s": limit}
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.gpu", "--child", piece.made, str(answer.resolve())],
        stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=ROOT,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdin is not None
    try:
        # stdin stays open: if this process dies, the child reads end-of-file and exits too.
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


def be_child(made: str, answer: Path) -> None:
    """Run one piece in this process; its settings are a line of JSON on standard input."""
    settings = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_the_session, daemon=True).start()
    module, _, function = made.partition(":")
    code = 1
    try:
        found = getattr(import_module(module), function)(settings)
        for so_far in found if isinstance(found, Iterator) else (found,):
            _write(answer, json.dumps(so_far))
        code = 0
    except BaseException:  # noqa: BLE001 - reported to the session, whatever it is
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # ``os._exit`` skips atexit handlers of libraries that expect their own launcher.
    os._exit(code)


def _end_with_the_session() -> None:
    while os.read(0, 1):
        pass
    # The child leads its own process group, so this also kills everything it started.
    os.killpg(os.getpgid(0), signal.SIGKILL)


# -- The report: each result next to its expected value.

_COLUMNS: Final = (
    "piece", "state", "s", "seconds per step", "device, GiB", "expected", "host, GiB", "expected",
)  # fmt: skip
_SHOWN: Final = ("device_bytes", "host_bytes", "seconds", "estimate", "plan")
"""Keys of a result that have their own columns, or that the report omits."""


def report(
    machine: Mapping[str, Any],
    entries: Mapping[str, Mapping[str, Any]],
    goals: Sequence[str] = (),
    left: Sequence[str] = (),
) -> str:
    """Return all results of a machine as Markdown; ``left`` names the pieces that have not run."""
    hardware, versions = machine["hardware"], machine["versions"].items()
    devices = ", ".join(f"{one['name']}, {one['gib']} GiB" for one in hardware["devices"])
    cores = f"{hardware['usable_cores']} cores of {hardware['processor']}"
    lines = [f"# {devices or 'no GPU'}; {cores}, {hardware['host_gib']} GiB", ""]
    lines += [", ".join(f"{name} {version}" for name, version in versions), ""]
    if not devices:
        lines += ["Nothing here has run on a GPU. The sizes are reduced.", ""]
    lines += [f"Not run on this machine yet: {'; '.join(left)}.", ""] if left else []
    lines += [f"| {' | '.join(_COLUMNS)} |", "|---|---|--:|--:|--:|--:|--:|--:|"]
    for name, entry in entries.items():
        cells = [name, entry["state"], f"{entry['seconds']:.0f}"]
        lines.append(f"| {' | '.join(cells + _measures(entry.get('result') or {}))} |")
    if goals:
        lines += ["", "## Goals", "", *goals]
    for name, entry in entries.items():
        others = {k: v for k, v in (entry.get("result") or {}).items() if k not in _SHOWN}
        plain = [f"- {key}: {json.dumps(value)[:2000]}" for key, value in others.items()]
        lines += ["", f"## {name}", "", *plain] if plain else []
        if entry["state"] != "done":
            last = entry.get("output", "").strip().splitlines()[-8:]
            lines += ["", f"## {name}: {entry['state']}", "", "```text", *last, "```"]
    return "\n".join(lines) + "\n"


def _in_short(found: Mapping[str, Any]) -> str:
    """Return a one-line summary of a result for the terminal."""
    if found["state"] != "done":
        lines = found.get("output", "").strip().splitlines()
        return f": {lines[-1][:300]}" if lines else ""
    named = zip(_COLUMNS[3:], _measures(found["result"]), strict=True)
    cells = ", ".join(f"{name} {cell}" for name, cell in named if cell)
    return f": {cells}" if cells else ""


def _measures(result: Mapping[str, Any]) -> list[str]:
    """Return the cells from the fourth column on."""
    estimate, steps = result.get("estimate") or {}, result.get("seconds")
    cells = [f"{statistics.median(steps):.3g}" if steps else ""]
    if predicted := estimate.get("seconds"):
        off = f" ({predicted / statistics.median(steps) - 1:+.0%})" if steps else ""
        cells = [", ".join(filter(None, (cells[0], f"predicted {predicted:.3g}{off}")))]
    for place in ("device", "host"):
        measured, expected = result.get(f"{place}_bytes"), estimate.get(place)
        cells.append("" if measured is None else f"{measured / GIB:.2f}")
        off = f" ({expected / measured - 1:+.0%})" if measured and expected else ""
        cells.append("" if expected is None else f"{expected / GIB:.2f}{off}")
    return cells


_GOALS: Final = (
    ("1024², batch 8 in 8.5 GiB", "sdxl 1024², batch 8: Ours, 1", 8.5),
    ("1024², batch 1 in 6.9 GiB, set-up included", "sdxl 1024², batch 1: stage 2", 6.9),
    ("1024², batch 1 in 4 GiB at stage 3", "sdxl 1024², batch 1: stage 3", 4.0),
    ("128², batch 8 in 3.5 GiB", "sdxl 128², batch 8: stage 3", 3.5),
)
_TIME: Final = 0.7


def goals(entries: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Compare SDXL's full U-Net with its goals."""

    def of(piece: str, quantity: str) -> Any:
        return (entries.get(piece, {}).get("result") or {}).get(quantity)

    rows: list[tuple[str, float | None, float, str]] = []
    for text, piece, limit in _GOALS:
        nbytes = of(piece, "device_bytes")
        rows.append((text, None if nbytes is None else nbytes / GIB, limit, " GiB"))
    ours, theirs = (
        [
            second
            for turn in (1, 2)
            for second in of(f"sdxl 1024², batch 8: {made}, {turn}", "seconds") or ()
        ]
        for made in ("Ours", "Reference")
    )
    ratio = statistics.median(ours) / statistics.median(theirs) if ours and theirs else None
    rows.append((f"1024², batch 8 in {_TIME} of the reference's time", ratio, _TIME, ""))
    return [
        f"- {text}: not measured" if reached is None
        else f"- {text}: {'met' if reached <= limit else 'missed'}, {reached:.2f}{unit}"
        for text, reached, limit, unit in rows
    ]  # fmt: skip


# -- The pieces.

_TWO: Final = {"stage": 2, "offload": "cpu"}
_THREE: Final = {"stage": 3, "offload": "cpu", "offload_param": "cpu"}
MACHINE: Final = Piece(name="machine", made="bench.gpu:machine")


def pieces(about: Mapping[str, Any], *, quick: bool) -> Iterator[Piece]:
    """Yield all pieces, the most informative first; ``about`` is the result of ``machine``."""
    here = about.get("built", _OPS)
    # Results are copied from machine to machine; compiled ops and proofs are not.
    yield Piece(
        name="ops", made="bench.gpu:build", settings={"ops": _OPS}, limit_s=240.0,
        lost=lambda made: any(op not in here and f"{op}_failed" not in made for op in _OPS),
    )  # fmt: skip
    yield Piece(
        name="proof", made="bench.gpu:prove", limit_s=180.0,
        lost=lambda _made: not about.get("proven", True),
    )  # fmt: skip
    yield Piece(name="rates", made="bench.gpu:rates", settings={"quick": quick}, limit_s=60.0)
    if quick:
        yield from _engines("tiny", 64, 2, steps=2)
    else:
        yield from _engines("sdxl", 1024, 8)
        yield from _reference_settings()
    for stage, plan in ((2, _TWO), (3, _THREE)):
        name = f"tiny training at stage {stage}"
        yield _steps(name, "Ours", plan, 64, 2, model="tiny", steps=2, trace=stage == 2)
    files, least = (["tests/backend/test_cuda.py"], 30.0) if quick else (["tests"], 90.0)
    yield Piece("tests", "bench.gpu:tests", {"files": files}, limit_s=240.0, least_s=least)
    if quick:
        yield _steps("tiny: Reference", "Reference", None, 64, 2, model="tiny", steps=2)
        yield _card(1, side=64, batch=2, model="tiny", steps=1)
    else:
        yield from _sizes(*about["flux_depth"])


def _engines(model: str, side: int, batch: int, **more: Any) -> Iterator[Piece]:
    """Yield zerotune's engines next to DeepSpeed's, with clipping: one per way to move weights.

    An engine with the weights in device memory and the optimizer in host memory belongs here too.
    """
    for what, made, plan in (("Streamed", "Streamed", _TWO), ("ZeRO-3", "Ours", _THREE)):
        name = f"streamed, {model} {side}², batch {batch}: {what}, clipping 1"
        yield _steps(name, made, plan, side, batch, model=model, clipping=1.0, **more)


def _reference_settings() -> Iterator[Piece]:
    """Yield SDXL at the settings of the reference's published figures."""
    yield from _both("sdxl 1024², batch 8: {}, 1", 1024, 8, trace=True)
    for plan in (_TWO, _THREE):
        yield _steps(f"sdxl 1024², batch 1: stage {plan['stage']}", "Ours", plan, 1024, 1)
    yield _steps("sdxl 128², batch 8: stage 3", "Ours", _THREE, 128, 8)
    yield _steps("sdxl 128², batch 8: Reference", "Reference", None, 128, 8)


def _sizes(double: int, single: int) -> Iterator[Piece]:
    """Yield the other sizes. A second turn with the reference shows a machine that slowed down."""
    yield from _both("sdxl 1024², batch 8: {}, 2", 1024, 8)
    yield from map(_card, _CAPS[:4])
    yield _steps("sdxl 128², batch 8: stage 2", "Ours", _TWO, 128, 8)
    flux = {"model": "flux", "more": {"num_layers": double, "num_single_layers": single}}
    yield from _more_streamed("sdxl", 8)
    yield from _engines(side=1024, batch=4, **flux)
    yield from _more_streamed(batch=4, **flux)
    name = f"flux, {double} + {single} blocks, 1024², batch 1: {{}}"
    yield from _both(name, 1024, 1, **flux, steps=3)
    # With everything in device memory, to compare its peak with the estimate.
    for stage in (0, 2, 3):
        name = f"sdxl 1024², batch 1: stage {stage}, no offload"
        yield _steps(name, "Ours", {"stage": stage}, 1024, 1, steps=2)
    yield from map(_card, _CAPS[4:])
    for side, batch in ((1024, 4), (768, 8), (1024, 2)):
        yield from _both(f"sdxl {side}², batch {batch}: {{}}", side, batch)


def _more_streamed(model: str, batch: int, **more: Any) -> Iterator[Piece]:
    """Yield streamed weights without clipping, and TrainStream, if its wheel was carried along."""
    for made, clipping in (("Streamed", 0.0), ("TrainStreamed", 1.0), ("TrainStreamed", 0.0)):
        name = f"streamed, {model} 1024², batch {batch}: {made}, clipping {clipping:g}"
        plan = _TWO if made == "Streamed" else None
        yield _steps(name, made, plan, 1024, batch, model=model, clipping=clipping, **more)


def _both(name: str, side: int, batch: int, **more: Any) -> Iterator[Piece]:
    for made, plan in (("Ours", _TWO), ("Reference", None)):
        yield _steps(name.format(made), made, plan, side, batch, **more)


def _card(gib: int, *, side: int = 1024, batch: int = 1, **more: Any) -> Piece:
    more = {"model": "sdxl", "steps": 2, "cap_gib": gib, **more}
    return _steps(f"{more['model']}, card of {gib} GiB", "Advised", None, side, batch, **more)


def _steps(
    name: str, made: str, plan: Mapping[str, Any] | None, side: int, batch: int, **more: Any
) -> Piece:
    """Return a piece that times steps of a model; ``more`` overrides settings."""
    settings = {"made": made, "model": "sdxl", "more": {}, "side": side, "batch": batch,
                "steps": 4, "trace": False, "plan": plan, **more}  # fmt: skip
    limit, least = (120.0, 20.0) if settings["model"] == "tiny" else (240.0, 75.0)
    return Piece(name, "bench.contestants:contestant", settings, limit, least)


# -- Functions of the pieces, each in its own process; training steps are in bench/contestants.py.


def machine(_settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return hardware and versions, what is compiled and proven, and how many Flux blocks fit."""
    from bench.contestants import flux_depth
    from bench.runner import machine
    from zerotune import detect_platform
    from zerotune.backend.proof import Combination, load_proof

    built = [op for op in _OPS if _is_built(op)]
    platform = detect_platform(log=False)
    proof = load_proof(Combination.here(platform.accelerator))
    return {
        **machine(),
        "flux_depth": flux_depth(platform),
        "built": built,
        "proven": not isinstance(proof, str),
    }


def _is_built(op: str) -> bool:
    from zerotune.backend.op_builds import build_folder, built_library
    from zerotune.backend.step.kernel import host_step_status

    if op == "host_step":
        return host_step_status().state == "built"
    return built_library(build_folder(op)) is not None


def build(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Compile ops as the first engine would; record the error of an op that fails."""
    found: dict[str, Any] = {}
    for op in settings["ops"]:
        began = time.perf_counter()
        try:
            _load(op)
        except Exception as error:  # noqa: BLE001 - what a compiler says is what is to be learnt
            found[f"{op}_failed"] = in_words(error)
        found[f"{op}_seconds"] = time.perf_counter() - began
    return found


def in_words(error: BaseException | None) -> str:
    """Format an error with its causes: compilers put the actual error last."""
    causes = []
    while error is not None:
        causes.append(f"{type(error).__name__}: {error}"[-1500:])
        error = error.__cause__
    return "\nfrom ".join(causes)


def _load(op: str) -> None:
    from zerotune.backend.ops import build_op
    from zerotune.backend.step.kernel import load_host_step

    if op == "host_step":
        load_host_step()
    else:
        build_op(op)


def prove(_settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Check the fast paths, as ``zerotune doctor --prove`` does; later pieces read the proof."""
    from zerotune import detect_platform
    from zerotune.backend.proof import store_proof
    from zerotune.training import proving

    proof = proving.prove(platform=detect_platform(log=False))
    store_proof(proof)
    words = {True: "passed", False: "failed", None: "not run"}
    checks = proof.checks.items()
    yield {name: f"{words[one.passed]}. {one.detail}".strip(". ") for name, one in checks}
    for name in proof.failed:
        print(f"{name}\n{proof.checks[name].evidence}")
    if proof.failed or proof.error is not None:
        raise RuntimeError(proof.error or f"{', '.join(proof.failed)} failed")


def rates(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Measure bytes and operations per second, which bound every step.

    Includes the rates of the recipe ``measure_rates.py``, from which later pieces predict times.
    """
    import torch
    from examples.recipes.measure_rates import measure_rates

    from bench.contestants import RATES
    from zerotune import detect_platform
    from zerotune.plan.memory.rates import store_rates

    nbytes = 2**24 if settings["quick"] else 2**30
    there, here = (torch.ones(nbytes, dtype=torch.uint8) for _ in range(2))
    found = {"host_copy_bytes_per_second": 2 * nbytes / _fastest(lambda: there.copy_(here))}
    if torch.cuda.is_available():
        device, twin = (torch.empty(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2))
        locked = there.pin_memory()
        for name, moved, target, source in (
            ("up_pinned", 1, device, locked), ("down_pinned", 1, locked, device),
            ("up_pageable", 1, device, here), ("down_pageable", 1, here, device),
            ("device_copy", 2, twin, device),
        ):  # fmt: skip
            copy = lambda to=target, of=source: to.copy_(of, non_blocking=True)  # noqa: E731
            found[f"{name}_bytes_per_second"] = moved * nbytes / _fastest(copy)
    of_kinds = measure_rates(scale=1 / 32 if settings["quick"] else 1.0)
    store_rates(detect_platform(log=False), of_kinds, file=Path(settings["folder"]) / RATES)
    return {**found, "sampled_bytes": nbytes, "of this kind of work, per second": of_kinds}


def _fastest(act: Callable[[], object], *, rounds: int = 5) -> float:
    from bench.contestants import seconds_of

    return min([seconds_of(act) for _ in range(rounds + 1)][1:])


_INTERRUPTIBLE: Final = (
    "import signal, sys, pytest; "
    "signal.signal(signal.SIGINT, signal.default_int_handler); sys.exit(pytest.main())"
)
"""Pytest with Ctrl-C enabled: shells start background processes with SIGINT ignored."""


def tests(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Run the tests that need a GPU; count them, and list the failures.

    At the time limit pytest is interrupted, so that it still prints its results so far.
    """
    command = [sys.executable, "-c", _INTERRUPTIBLE, "-v", "-rfEs", "-m", "gpu",
               "-p", "no:cacheprovider", "--continue-on-collection-errors",
               *marked(settings["files"])]  # fmt: skip
    with tempfile.TemporaryFile("w+") as output:
        # Wide enough for a failure's whole line.
        wide = {**os.environ, "COLUMNS": "400"}
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=wide)
        whole = True
        try:
            process.wait(max(1.0, settings["limit_s"] - _ENDING_S))
        except subprocess.TimeoutExpired:
            whole = False
            process.send_signal(signal.SIGINT)
            process.wait()
        output.seek(0)
        text = output.read()
    print(text)
    return {**counted(text), "whole": whole}


def marked(places: Iterable[str]) -> list[str]:
    """Return the files among ``places`` that contain tests for a device.

    pytest alone would spend minutes importing all other files, including files whose dependencies
    this machine lacks.
    """
    files = [
        file
        for place in map(Path, places)
        for file in (sorted(place.rglob("test_*.py")) if place.is_dir() else [place])
    ]
    return [str(file) for file in files if _MARKS.search(file.read_text(encoding="utf-8"))]


def counted(text: str) -> dict[str, Any]:
    """Parse pytest's summary; empty if pytest was ended before any test."""
    found: dict[str, Any] = {"passed": 0, "failed": 0, "skipped": 0}
    (*_, last) = ["", *re.findall(r"^=+ (.* in [\d.]+s.*) =+$", text, re.MULTILINE)]
    found |= {kind: int(number) for number, kind in re.findall(r"(\d+) (passed|failed|skip)", last)}
    found["skipped"] = found.pop("skip", 0)
    found["failures"] = re.findall(r"^(?:FAILED|ERROR) (.*)$", text, re.MULTILINE)
    found["skips"] = re.findall(r"^SKIPPED (.*)$", text, re.MULTILINE)
    return found


# -- The command.


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the session; return 0 even if some pieces remain for the next call.

    Raises:
        SystemExit: There is no GPU and not ``--quick``; or a package is missing that nearly all
            pieces need.
    """
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long it may take")
    parser.add_argument("--output", type=Path, default=Path("outputs", "gpu"), help="folder")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, without a GPU too")
    parser.add_argument(
        "--piece", action="append", default=[], metavar="NAME",
        help="only what has this in its name, again if it is done; may be repeated",
    )  # fmt: skip
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        be_child(options.child[0], Path(options.child[1]))
    # Loading modules counts too: the time on a lent machine runs from its start.
    began = _BEGAN if arguments is None else time.monotonic()
    until = began + 60 * options.minutes - _SAVING_S
    return run_session(options.output, until=until, quick=options.quick, only=options.piece)


def run_session(folder: Path, *, until: float, quick: bool, only: Sequence[str] = ()) -> int:
    """Inspect the machine, run its pieces, and write ``MACHINE.json`` and ``MACHINE.md``."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob(".*"):
        # Leftovers of a killed session.
        pid = path.name.split(".")[1]
        if pid.isdigit() and not Path("/proc", pid).exists():
            path.unlink(missing_ok=True)
    looked = run_piece(MACHINE, folder, left=until - time.monotonic())
    if looked["state"] != "done":
        raise SystemExit(f"machine: {looked['state']}\n{looked['output']}")
    machine = looked["result"]
    if not machine["hardware"]["devices"] and not quick:
        raise SystemExit("this needs a GPU; --quick shows that it works without one")
    lacking = [name for name in _NEEDED if name not in machine["versions"]]
    if lacking:
        raise SystemExit(
            f"{', '.join(lacking)}: neither installed here nor in {WHEELS}; `python -m tools.carry "
            "--have LIST`, where there is a network, puts wheels there, which go along with the "
            "checkout"
        )
    name = file_name(machine) + ("-quick" if quick else "")
    session = Session(folder / f"{name}.json", machine, until=until, only=only)

    whole_session = tuple(pieces(machine, quick=quick))

    def left() -> list[str]:
        return [piece.name for piece in whole_session if piece.name not in session.entries]

    def write_report() -> str:
        reached = () if quick else goals(session.entries)
        text = report(machine, session.entries, reached, left())
        _write(folder / f"{name}.md", text)
        return text

    whole = session.run(whole_session, write_report)
    # Printed last, so that the end of a truncated output still shows the report.
    print(write_report(), flush=True)
    failed = [piece for piece, entry in session.entries.items() if entry["state"] != "done"]
    state = "all has been run" if whole and not left() else "run it again to go on"
    _say(f"{session.path}: {state}" + (f"; not done: {', '.join(failed)}" if failed else ""))
    return 0


def file_name(machine: Mapping[str, Any]) -> str:
    """Return device (or processor) and torch version as a name safe for any file transfer."""
    hardware = machine["hardware"]
    names = [one["name"] for one in hardware["devices"]] or [hardware["processor"]]
    parts = (names[0], f"torch-{machine['versions']['torch']}")
    return "_".join(re.sub(r"[^A-Za-z0-9.]+", "-", part).strip("-") for part in parts)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
