"""``zerotune doctor``: describe this machine, and check DeepSpeed and its ops."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Collection, Mapping
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
from zerotune.plan.section import leaves
from zerotune.platform import Platform, detect_platform
from zerotune.platform.toolchain import Toolchain, detect_toolchain

_BYTES: Final = ("total", "available", "limit", "cgroup_limit", "memlock_limit", "total_memory")
_STYLES: Final = {"built": "good", "installed": "good", "blocked": "bad", "locked": "bad"}
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
            return f"DeepSpeed does not run here: {PlatformError(support.reason, support.fix)}"
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
        data, here, rates = attrs.asdict(self), self.platform, known_rates(self.platform)
        data["platform"]["host_memory"]["limit"] = here.host_memory.limit
        data["platform"]["deepspeed"]["environment"] = here.deepspeed.environment
        for each, decision in zip(data["platform"]["decisions"], here.decisions, strict=True):
            each["text"] = str(decision)
        data["verdict"] = {"healthy": self.healthy, "text": self.verdict}
        speeds = {name: (getattr(rates, name), rates.source(name)) for name in RATE_NAMES}
        by_name = {name: {"per_second": rate, "source": of} for name, (rate, of) in speeds.items()}
        return {**data, "rates": {"origin": rates.origin, **by_name}, "proof": _proof_data(here)}


def _proof_data(platform: Platform) -> dict[str, Any]:
    if "torch" not in platform.versions:
        return {}
    kind = platform.accelerator
    proof = backend.load_proof(backend.Combination.here(kind))
    unproven = {path: backend.why_unproven(path, accelerator=kind) for path in backend.PATHS}
    data = {"problem": proof} if isinstance(proof, str) else proof.to_dict()
    return {**data, "unproven": {path: why for path, why in unproven.items() if why is not None}}


def page(data: Mapping[str, Any]) -> Page:
    """Return a report of ``Checkup.to_dict``."""
    platform = {**data["platform"], "devices": dict(enumerate(data["platform"]["devices"]))}
    decisions, _ = platform.pop("decisions"), platform.pop("deepspeed")
    proof, paths = data["proof"], backend.PATHS if data["proof"] else ()
    tools = {**data["toolchain"], "ops_folder": data["ops_folder"]}
    sections: dict[str, list[Row]] = {
        "Platform": [(path, _words(path, value)) for path, value in leaves(platform)],
        "Toolchain": [(path, _words(path, value)) for path, value in leaves(tools)],
        "Ops": [_op_row(op) for op in data["ops"]],
        "Fast paths": [(path, proof["unproven"].get(path, "proven")) for path in paths],
        "Decisions": [(one["severity"], one["text"]) for one in decisions],
    }
    blocks: list[Block] = []
    for title, rows in sections.items():
        table = Table(
            rows=tuple(rows), widths=(18, 10), gap=1, style=lambda row: _STYLES.get(row[1], "")
        )
        blocks += [Line(title, style="title"), table, Line("")] if rows else []
    verdict = data["verdict"]
    style = "passed" if verdict["healthy"] else "failed"
    return Page(blocks=(*blocks, Line(f"Verdict: {verdict['text']}", style=style)))


def _words(path: str, value: Any) -> str:
    if value in (None, {}):
        return "none"
    return format_size(value) if path.rpartition(".")[2] in _BYTES else str(value)


def _op_row(op: Mapping[str, Any]) -> Row:
    about = [op["purpose"], op["cause"], op["fix"] and f"fix: {op['fix']}"]
    return op["name"], op["state"], "; ".join(filter(None, about))


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
        data = checkup.to_dict()
    if arguments.json:
        print_json(data)
    else:
        page(data).print()
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
