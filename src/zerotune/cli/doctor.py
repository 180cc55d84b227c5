"""``zerotune doctor``: describe this machine, and check DeepSpeed and its ops."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import redirect_stdout
from typing import Any, Final

import attrs

from zerotune import backend
from zerotune._util.table import Block, Line, Page, Row, Table
from zerotune._util.text import format_size
from zerotune.backend.op_builds import extensions_folder
from zerotune.backend.ops import OpStatus, build_op, check_op_name, op_report
from zerotune.cli import print_json
from zerotune.errors import PlatformError, ZeroTuneError
from zerotune.plan.memory.rates import RATE_NAMES, known_rates
from zerotune.platform import Platform, detect_platform
from zerotune.platform.toolchain import Toolchain, detect_toolchain

_PACKAGES: Final = ("python", "torch", "deepspeed", "accelerate", "diffusers")
_USABLE, _UNUSABLE = ("built", "installed"), ("blocked", "locked")
_LABEL_CHARACTERS: Final = 15
_FLAGS: Final = {
    "json": "print everything as JSON",
    "prove": "compare the fast paths with DeepSpeed's own step; a device uses them only after that",
    "allow-rocm": "allow DeepSpeed on ROCm (untested)",
}


@attrs.frozen(kw_only=True)
class Checkup:
    """The properties of a machine that matter for training."""

    platform: Platform
    toolchain: Toolchain
    ops: tuple[OpStatus, ...] = ()
    """State of DeepSpeed's ops and of zerotune's; empty if DeepSpeed does not run."""
    ops_folder: str | None = None
    """Folder of all compiled ops; ``None`` if DeepSpeed does not run."""

    @classmethod
    def of(cls, platform: Platform) -> Checkup:
        """Examine this machine; ``platform`` must also describe this machine."""
        toolchain = detect_toolchain()
        found, support = cls(platform=platform, toolchain=toolchain), platform.deepspeed
        if not support.available:
            return found
        try:
            ops = op_report(toolchain=toolchain)
        except ZeroTuneError as error:
            broken = attrs.evolve(support, available=False, reason=error.reason, fix=error.fix)
            return attrs.evolve(found, platform=attrs.evolve(platform, deepspeed=broken))
        ops += (backend.host_step_status(toolchain=toolchain),)
        return attrs.evolve(found, ops=ops, ops_folder=str(extensions_folder()))

    @property
    def healthy(self) -> bool:
        """Whether DeepSpeed runs and can offload the optimizer."""
        return self.platform.deepspeed.available and self._cpu_adam is None

    @property
    def verdict(self) -> str:
        """The result of the checkup in one line."""
        support = self.platform.deepspeed
        if not support.available:
            advice = "" if support.fix is None else f" Fix: {support.fix}."
            return f"DeepSpeed does not run here: {support.reason}.{advice}"
        if self._cpu_adam is not None:
            why = f"cpu_adam: {self._cpu_adam.cause}."
            return f"{support.reason}, but the optimizer cannot be offloaded: {why}"
        unusable = [op.name for op in self.ops if not op.usable]
        without = f" (not {', '.join(unusable)})" if unusable else ""
        usable = len(self.ops) - len(unusable)
        return f"{support.reason}; {usable} of {len(self.ops)} ops can be used{without}."

    @property
    def _cpu_adam(self) -> OpStatus | None:
        """Return the op that offloading requires, if it is unusable."""
        return next((op for op in self.ops if op.name == "cpu_adam" and not op.usable), None)

    def to_dict(self) -> dict[str, Any]:
        """Return all properties as JSON-compatible values."""
        data = attrs.asdict(self)
        host = self.platform.host_memory
        data["platform"]["host_memory"]["limit"] = host.limit
        data["platform"]["deepspeed"]["environment"] = self.platform.deepspeed.environment
        data["verdict"] = {"healthy": self.healthy, "text": self.verdict}
        return data

    def _print(self) -> None:
        platform = self.platform
        sections: dict[str, Table] = {
            "Platform": _table(_platform_rows(platform)),
            "Memory": _table(_memory_rows(platform)),
            "Versions": _table(
                (name, platform.versions.get(name, "not installed")) for name in _PACKAGES
            ),
            "Toolchain": _table(_toolchain_rows(self.toolchain, self.ops_folder)),
            "Ops": _ops_table(self.ops),
            "Fast paths": _table(_proof_rows(platform)),
            "Decisions": _table((one.severity, str(one)) for one in platform.decisions),
        }
        blocks: list[Block] = []
        for title, table in sections.items():
            if table.rows:
                blocks += [Line(title, style="title"), table, Line("")]
        style = "passed" if self.healthy else "failed"
        Page(blocks=(*blocks, Line(f"Verdict: {self.verdict}", style=style))).print()


def _platform_rows(here: Platform) -> Iterator[tuple[str, str]]:
    yield "system", f"{here.system} {here.machine}, {here.processor}".rstrip(", ")
    cores = f"{here.physical_cores} physical, {here.logical_cores} logical"
    yield "cores", f"{cores}, {here.usable_cores} usable"
    yield "accelerator", here.accelerator
    for index, device in enumerate(here.devices):
        version = ".".join(map(str, device.capability or ()))
        capability = f", capability {version}" if version else ""
        yield f"device {index}", f"{device.name}, {format_size(device.total_memory)}{capability}"
    yield "precision", ", ".join(("bf16",) * here.bf16 + ("fp16",) * here.fp16 + ("fp32",))
    yield "torch built for", here.torch_build or "unknown"


def _memory_rows(here: Platform) -> Iterator[tuple[str, str]]:
    memory = here.host_memory
    yield "RAM", f"{format_size(memory.total)}, {format_size(memory.available)} available"
    for name, limit in (("container limit", memory.cgroup_limit), ("lockable", here.memlock_limit)):
        yield name, "no limit" if limit is None else format_size(limit)


def _toolchain_rows(here: Toolchain, ops: str | None) -> Iterator[tuple[str, str]]:
    words = {True: "found", False: "absent", None: "unknown"}
    for name, tool in (("c++", here.cxx), ("ninja", here.ninja), ("nvcc", here.nvcc)):
        yield name, f"{tool.version or 'does not run'} ({tool.path})" if tool else "absent"
    yield "Python.h", words[here.python_headers]
    yield "libaio", f"header {words[here.libaio.header]}, library {words[here.libaio.library]}"
    if ops:
        yield "ops", ops


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    for name, about in _FLAGS.items():
        parser.add_argument(f"--{name}", action="store_true", help=about)
    parser.add_argument(
        "--build",
        nargs="*",
        metavar="OP",
        help="compile the named DeepSpeed ops that can be compiled and are not yet; default: all",
    )


def run(arguments: argparse.Namespace) -> int:
    """Examine the machine and print the result.

    Returns:
        0 if DeepSpeed runs and can offload the optimizer, and if all requested checks pass; else 1.
    """
    # DeepSpeed and its builders print; what we print on stdout may be read by a program.
    with redirect_stdout(sys.stderr):
        platform = detect_platform(allow_rocm=arguments.allow_rocm, log=False)
        for name in arguments.build or ():
            check_op_name(name)
        if arguments.build is not None:
            _build(arguments.build, platform)
        proven = _prove(platform) if arguments.prove else True
        checkup = Checkup.of(platform)
    if arguments.json:
        rates = known_rates(platform)
        told = {name: (getattr(rates, name), rates.source(name)) for name in RATE_NAMES}
        by_name = {name: {"per_second": rate, "source": of} for name, (rate, of) in told.items()}
        more = {"rates": {"origin": rates.origin, **by_name}, "proof": _proof_data(platform)}
        print_json(checkup.to_dict() | more)
    else:
        checkup._print()
    return 0 if checkup.healthy and proven else 1


def _build(wanted: Collection[str], platform: Platform) -> None:
    if not platform.deepspeed.available:
        support = platform.deepspeed
        raise PlatformError(support.reason, support.fix, "--build")
    for op in op_report():
        if op.state in ("buildable", "stale") and op.name in (wanted or [op.name]):
            sys.stderr.write(f"compiling {op.name} ...\n")
            started = time.perf_counter()
            build_op(op.name)
            sys.stderr.write(f"loaded {op.name} in {time.perf_counter() - started:.1f} s\n")


def _prove(platform: Platform) -> bool:
    """Run the checks, save the results, and return whether every fast path passes."""
    from zerotune.training.proving import prove

    sys.stderr.write("proving the fast paths for a few seconds ...\n")
    proof = prove(platform=platform)
    kept = backend.store_proof(proof)
    sys.stderr.write(f"proof saved in {kept}\n" if kept else "the proof could not be saved\n")
    if kept and proof.failed:
        sys.stderr.write(f"report this failure with the file {kept}\n")
    return not proof.failed


def _proof_data(platform: Platform) -> dict[str, Any]:
    if "torch" not in platform.versions:
        return {}
    kind = platform.accelerator
    proof = backend.load_proof(backend.Combination.here(kind))
    unproven = {path: backend.why_unproven(path, accelerator=kind) for path in backend.PATHS}
    data = {"problem": proof} if isinstance(proof, str) else proof.to_dict()
    return {**data, "unproven": {path: why for path, why in unproven.items() if why is not None}}


def _proof_rows(platform: Platform) -> Iterator[tuple[str, str]]:
    data = _proof_data(platform)
    if "problem" in data:
        yield "proof", next(iter(data["unproven"].values()))
    elif data:
        yield from ((path, data["unproven"].get(path, "proven")) for path in backend.PATHS)


def _table(rows: Iterable[tuple[str, str]]) -> Table:
    return Table(rows=tuple(rows), widths=(_LABEL_CHARACTERS,), gap=1)


def _ops_table(ops: Iterable[OpStatus]) -> Table:
    rows: list[tuple[str, str, str]] = []
    for op in ops:
        rows.append((op.name, op.state, op.purpose))
        rows += [("", "", why) for why in (op.cause, op.fix and f"fix: {op.fix}") if why]
    widths = (_LABEL_CHARACTERS, 10)
    return Table(rows=tuple(rows), widths=widths, gap=1, style=_style_of)


def _style_of(row: Row) -> str:
    return "bad" if row[1] in _UNUSABLE else "good" if row[1] in _USABLE else ""
