"""``Proof``: check that the fast paths give bit-identical results on this device.

zerotune has not been tested on most devices. Therefore zerotune tests itself once, for a few
seconds, on each combination of device, driver, torch, DeepSpeed and zerotune. ``zerotune doctor
--prove``, or the first start on a device, runs the checks (``zerotune.training.proving``) in a
separate process and stores the outcome in the user's cache. A fast path is the default only if its
checks have passed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, get_args

import attrs
import torch

from zerotune._util.files import read_record, write_atomically
from zerotune._util.proc import installed_version
from zerotune._util.text import json_of
from zerotune.backend.accelerator import accelerator_for
from zerotune.backend.distributed import ProcessGroup
from zerotune.decisions import Decision
from zerotune.errors import InvalidValueError
from zerotune.plan.plan import ResolvedPlan
from zerotune.platform.detect import MachineProbe
from zerotune.platform.facts import user_cache

KEY: Final = "proof"
VARIABLE: Final = "ZEROTUNE_PROOF"
COMMAND: Final = "zerotune doctor --prove"
Setting = Literal["first", "off"]
FastPath = Literal["host engine", "activation offload"]

_PROOF_FORMAT: Final = 2
PATHS: Final[Mapping[FastPath, tuple[str, ...]]] = {
    "host engine": ("bf16 rounding", "training", "page-locked copies"),
    "activation offload": ("page-locked copies",),
}
"""Names of the checks that each fast path requires."""
_NONE_YET: Final = (
    "nothing is proven yet for this combination of device, driver, torch, DeepSpeed and zerotune"
)
_PATIENCE_S: Final = 300.0
"""Time limit of a proof's process in seconds: imports, compiling ops, and the checks."""
_LARGEST_PROOF: Final = 2**20
_SET_BY_LAUNCHERS: Final = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_", "ROLE_",
    "MASTER_", "TORCHELASTIC_", "ACCELERATE_", "OMPI_", "PMI_", "SLURM_",
)  # fmt: skip
logger = logging.getLogger("zerotune")


# -- The combination that a proof is valid for.


@attrs.frozen(kw_only=True)
class Combination:
    """Hardware and versions that a proof is valid for."""

    device: str
    """Name and compute capability of the device; the CPU's name if training runs on the CPU."""
    driver: str
    processor: str
    """Name of the CPU, which runs the optimizer step in host memory."""
    torch: str
    deepspeed: str
    zerotune: str
    """Version of zerotune, and a digest of the source files of the fast paths."""

    @classmethod
    def here(cls, accelerator: str) -> Combination:
        """Return the combination for the device that this process uses.

        Args:
            accelerator: Kind of accelerator that the plan or the platform names.
        """
        running, processor = accelerator_for(accelerator), MachineProbe().processor()
        return cls(
            device=processor if running.is_host else running.name,
            driver=running.driver,
            processor=processor,
            torch=str(torch.__version__),
            deepspeed=installed_version("deepspeed") or "none",
            zerotune=f"{installed_version('zerotune') or 'source'}+{_sources()}",
        )

    @property
    def key(self) -> str:
        """Digest of the combination, which is the proof file's name without its extension."""
        text = json.dumps(attrs.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def _sources() -> str:
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    paths = [*root.glob("backend/**/*.py"), *root.glob("backend/**/*.cpp"), *root.glob("ema/*.py")]
    paths += [root / "diffusion" / "activations.py", root / "training" / "proving.py"]
    for path in sorted(paths):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


# -- The proof itself.


@attrs.frozen(kw_only=True)
class Outcome:
    """Result of one check of a proof."""

    passed: bool | None = attrs.field(validator=attrs.validators.in_((True, False, None)))
    """Whether the check passed; ``None`` if it was not run."""
    detail: str = ""
    """Short reason for a failure, or for not running the check."""
    evidence: str = ""
    """Details for a report: a traceback, or all differences."""
    seconds: float = attrs.field(default=0.0, validator=attrs.validators.instance_of((int, float)))


def _outcomes(values: Mapping[str, Any]) -> dict[str, Outcome]:
    return {
        str(name): each if isinstance(each, Outcome) else Outcome(**each)
        for name, each in values.items()
    }


@attrs.frozen(kw_only=True)
class Proof:
    """Results of checking the fast paths on one combination of hardware and versions."""

    combination: Combination
    checks: Mapping[str, Outcome] = attrs.field(factory=dict, converter=_outcomes)
    """Results by name, in the order in which the checks ran."""
    error: str | None = None
    """Why the checks could not be run; ``None`` if they ran."""
    finished: str = attrs.field(factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
    """UTC date and time at which the checks finished."""

    @property
    def seconds(self) -> float:
        """Total duration of all checks in seconds."""
        return sum(each.seconds for each in self.checks.values())

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the failed checks."""
        return tuple(name for name, each in self.checks.items() if each.passed is False)

    def obstacle(self, path: FastPath) -> str | None:
        """Return why a fast path is not proven; ``None`` if it is.

        Args:
            path: The fast path.
        """
        if self.error is not None:
            return f"the proof of the fast paths could not be run ({self.error})"
        for name in PATHS[path]:
            outcome = self.checks.get(name, Outcome(passed=None, detail="not among the checks"))
            if not outcome.passed:
                happened = "was not run" if outcome.passed is None else "failed on this device"
                return f"the check of {name} {happened} ({outcome.detail})"
        return None

    def to_dict(self) -> dict[str, Any]:
        """Return the proof as a JSON-serialisable dict."""
        return {"format": _PROOF_FORMAT, **attrs.asdict(self)}


def proof_path(combination: Combination) -> Path:
    """Return the path to a combination's proof file in the user's cache."""
    return user_cache() / "proofs" / f"{combination.key}.json"


def load_proof(combination: Combination) -> Proof | str:
    """Load the proof of a combination.

    Args:
        combination: The combination.

    Returns:
        The proof, or the reason why there is no valid one.
    """
    path = proof_path(combination)
    try:
        values = json_of(read_record(path, most=_LARGEST_PROOF))
        if values.pop("format") != _PROOF_FORMAT:
            raise ValueError("another format")
        proof = Proof(combination=Combination(**values.pop("combination")), **values)
    except FileNotFoundError:
        return _NONE_YET
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    except (ValueError, TypeError, KeyError, AttributeError):
        return (
            f"the proof file {path} is damaged or was written in an unsupported format, so it is "
            "ignored"
        )
    if proof.combination != combination:
        return f"the proof file {path} is for different hardware or software, so it is ignored"
    return proof


def store_proof(proof: Proof) -> Path | None:
    """Save a proof for later starts.

    Args:
        proof: The proof.

    Returns:
        Path to the proof file; ``None`` if the file cannot be written.
    """
    path = proof_path(proof.combination)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(proof.to_dict(), indent=1).encode())
    except OSError as error:
        logger.warning("the proof of the fast paths cannot be saved: %s", error)
        return None
    return path


# -- Queries.


def proof_setting(environ: Mapping[str, str] | None = None) -> Setting:
    """Return the value of ``ZEROTUNE_PROOF``; ``"first"`` if it is not set.

    Args:
        environ: Environment variables; default: those of this process.
    """
    written = (os.environ if environ is None else environ).get(VARIABLE, "").strip().lower()
    for setting in get_args(Setting):
        if (written or "first") == setting:
            return setting  # type: ignore[no-any-return]
    raise InvalidValueError(
        "is not a valid value",
        f"use one of {', '.join(get_args(Setting))}, or unset {VARIABLE}",
        VARIABLE,
        written,
    )


def why_unproven(path: FastPath, *, accelerator: str) -> str | None:
    """Return why a fast path is not the default on this device; ``None`` if it is proven.

    Args:
        path: The fast path.
        accelerator: Kind of accelerator that the plan or the platform names.
    """
    if proof_setting() == "off":
        return f"{VARIABLE}=off disables the fast paths"
    combination = Combination.here(accelerator)
    proof = load_proof(combination)
    if isinstance(proof, str):
        return f"{proof}; run `{COMMAND}`, which takes a few seconds"
    obstacle = proof.obstacle(path)
    return None if obstacle is None else "; ".join((obstacle, *_what_to_do(proof)))


def _what_to_do(proof: Proof) -> tuple[str, ...]:
    """Advice after a failure; empty if checks were only skipped."""
    if proof.failed:
        return (f"report it with the file {proof_path(proof.combination)}",)
    return () if proof.error is None else (f"run `{COMMAND}` to repeat the proof",)


def proof_decisions(accelerator: str) -> tuple[Decision, ...]:
    """Return the decision about proven fast paths; on a CPU without a proof, return no decision.

    Args:
        accelerator: Kind of accelerator that the plan or the platform names.
    """
    setting = proof_setting()
    combination = Combination.here(accelerator)
    proof = load_proof(combination)
    on_cpu = accelerator == "cpu"
    if on_cpu and (setting == "off" or proof == _NONE_YET):
        return ()
    if setting == "off" or isinstance(proof, str):
        reason = why_unproven("host engine", accelerator=accelerator) or ""
        return (Decision(KEY, None, "nothing, plain paths", reason),)
    proven = [path for path in PATHS if proof.obstacle(path) is None]
    obstacles = dict.fromkeys(filter(None, (proof.obstacle(path) for path in PATHS)))
    said = [f"{len(proof.checks)} checks in {proof.seconds:.0f} s, {proof.finished}", *obstacles]
    said += _what_to_do(proof)
    return (
        Decision(
            KEY,
            None,
            ", ".join(proven) or "nothing, plain paths",
            "; ".join(said),
            "warning" if _what_to_do(proof) else "note",
        ),
    )


# -- The first start.


def prove_first(accelerator: str, group: ProcessGroup) -> tuple[Decision, ...]:
    """Run the proof's checks if this device has no proof yet. Collective.

    One process per machine runs the proof while all others wait. On a CPU, no proof is run.

    Args:
        accelerator: Kind of accelerator that the plan or the platform names.
        group: Process group of all ranks.

    Returns:
        The decision about proven fast paths.
    """
    if accelerator != "cpu" and proof_setting() == "first":
        if group.local_rank == 0:
            _prove_here(accelerator)
        group.barrier("wait for the proof of the fast paths", timeout_s=2 * _PATIENCE_S)
    return proof_decisions(accelerator)


def prove_offload(plan: ResolvedPlan, group: ProcessGroup) -> tuple[Decision, ...]:
    """Call ``prove_first`` if a plan offloads anything. Collective.

    Args:
        plan: The resolved plan.
        group: Process group of all ranks.
    """
    if plan.offload_optimizer == plan.offload_param == "none":
        return ()
    return prove_first(plan.platform.accelerator, group)


_attempted: Final[set[Combination]] = set()
"""Combinations that this process has tried to prove; once per process is enough."""


def _prove_here(accelerator: str) -> None:
    # Two starts at the same time may both run the proof, which is harmless.
    combination = Combination.here(accelerator)
    if isinstance(load_proof(combination), Proof) or combination in _attempted:
        return
    _attempted.add(combination)
    with contextlib.suppress(OSError):
        proof_path(combination).unlink(missing_ok=True)
    logger.warning(
        "first start on %s: proving the fast paths takes a few seconds, plus imports and "
        "compiling (%s=off skips the proof and the fast paths)", combination.device, VARIABLE,
    )  # fmt: skip
    problem = _run_command(accelerator)
    proof = load_proof(combination)
    if isinstance(proof, str):
        store_proof(Proof(combination=combination, error=problem or proof))


def _run_command(accelerator: str, patience_s: float = _PATIENCE_S) -> str | None:
    """Run the proof in a separate process; return its error, or ``None`` on success."""
    # The user must allow this device, and has allowed it for this start.
    allowed = ["--allow-rocm"] if accelerator == "rocm" else []
    command = [sys.executable, "-m", *COMMAND.split(), *allowed]
    try:
        with subprocess.Popen(
            command,
            cwd=Path(sys.executable).parent,
            env=_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=patience_s)
            except BaseException:
                # The process may be compiling an op.
                os.killpg(process.pid, signal.SIGKILL)
                raise
    except subprocess.TimeoutExpired:
        return f"did not finish within {patience_s:g} s"
    except OSError as error:
        return f"no process could be started: {error}"
    if not process.returncode:
        return None
    last = output.decode(errors="replace").strip().splitlines()[-1:]
    return f"exit code {process.returncode}: {''.join(last)}"[:500]


def _environment() -> dict[str, str]:
    """Environment variables of this process, without those of its launcher."""
    environ = {n: v for n, v in os.environ.items() if not n.startswith(_SET_BY_LAUNCHERS)}
    paths = [str(Path(__file__).parents[2])]
    paths += [str(Path(p).absolute()) for p in environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    return {**environ, "PYTHONPATH": os.pathsep.join(paths), VARIABLE: "off"}
