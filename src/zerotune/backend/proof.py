"""``Proof``: whether the fast paths leave the same bits as the plain ones on this device.

Most devices that people train on, nobody has tested. So the library tests itself there, once for
each combination of device, driver, torch, DeepSpeed and zerotune: ``zerotune doctor --prove``, or
the first start on it, runs the checks (``zerotune.training.proving``) in a process of their own and
keeps the outcome in the user's cache. A fast path is the default only where its checks have passed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, get_args

import attrs
import torch

from zerotune._util.files import read_record, write_atomically
from zerotune._util.proc import installed_version, installed_versions
from zerotune._util.text import json_of
from zerotune.backend.distributed import ProcessGroup
from zerotune.decisions import Decision
from zerotune.errors import InvalidValueError
from zerotune.plan.model import ResolvedPlan
from zerotune.platform.detect import MachineProbe, first_line
from zerotune.platform.facts import DEEPSPEED_NAMES, Accelerator, user_cache

KEY: Final = "proof"
VARIABLE: Final = "ZEROTUNE_PROOF"
COMMAND: Final = "zerotune doctor --prove"
Setting = Literal["first", "off", "ask", "always"]
FastPath = Literal[
    "one pass", "hidden step", "exchange", "activation offload", "native page-locking", "streaming"
]

_PROOF_FORMAT: Final = 1
_IN_HOST_MEMORY: Final = ("bf16 rounding", "one pass")
_BEHIND_THE_FORWARD: Final = (*_IN_HOST_MEMORY, "page-locked copies", "uploads", "hidden step")
PATHS: Final[Mapping[FastPath, tuple[str, ...]]] = {
    "one pass": _IN_HOST_MEMORY,
    "hidden step": _BEHIND_THE_FORWARD,
    "exchange": (*_BEHIND_THE_FORWARD, "exchange"),
    "activation offload": ("page-locked copies", "activations"),
    "native page-locking": ("native page-locking",),
    "streaming": (*_IN_HOST_MEMORY, "page-locked copies", "streaming"),
}
"""The checks that a fast path stands on."""
_NONE_YET: Final = (
    "nothing is proven yet of this device with this driver, torch, DeepSpeed and zerotune"
)
_PATIENCE_S: Final = 300.0
"""For the process of a proof: imports, ops that are compiled first, 30 s of checks."""
_ALLOWED: Final[Mapping[str, tuple[str, ...]]] = {
    "rocm": ("--allow-rocm",),
    "mps": ("--allow-mps",),
}
"""What a start on such a device has been allowed already."""
_LARGEST_PROOF: Final = 2**20
_SET_BY_LAUNCHERS: Final = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_", "ROLE_",
    "MASTER_", "TORCHELASTIC_", "ACCELERATE_", "OMPI_", "PMI_", "SLURM_",
)  # fmt: skip
_REPORTED: Final = (
    "CUDA_", "CUBLAS_", "DS_", "HIP_", "MAX_JOBS", "NCCL_", "OMP_", "PYTORCH_", "TORCH_",
    "ZEROTUNE_",
)  # fmt: skip
"""Beginnings of the environment variables that a report shows."""
logger = logging.getLogger("zerotune")


# -- What a proof is of.


@attrs.frozen(kw_only=True)
class Combination:
    """What a proof holds for; another one has to be proven anew."""

    device: str
    """Name and capability; the processor where training runs on it."""
    driver: str
    processor: str
    """Compiles and runs the step in host memory."""
    torch: str
    deepspeed: str
    zerotune: str
    """Version, and a digest of the sources that the fast paths are made of."""

    @classmethod
    def here(cls, accelerator: Accelerator) -> Combination:
        """Of the device that this process uses now."""
        kind, processor = DEEPSPEED_NAMES[accelerator], MachineProbe().processor()
        device = processor
        if kind != "cpu":
            module: Any = torch.get_device_module(kind)
            properties: Any = getattr(module, "get_device_properties", None)
            device = kind
            if properties is not None and module.is_available():
                facts = properties(module.current_device())
                numbers = [str(getattr(facts, p)) for p in ("major", "minor") if hasattr(facts, p)]
                device = ", ".join(filter(None, (str(facts.name), ".".join(numbers))))
        return cls(
            device=device,
            driver=_driver(kind),
            processor=processor,
            torch=str(torch.__version__),
            deepspeed=installed_version("deepspeed") or "none",
            zerotune=f"{installed_version('zerotune') or 'source'}+{_sources()}",
        )

    @property
    def key(self) -> str:
        """Names its file."""
        text = json.dumps(attrs.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _driver(kind: str) -> str:
    if kind == "cpu":
        return "none"
    if kind == "xpu" and torch.xpu.is_available():
        return str(torch.xpu.get_device_properties().driver_version)
    if kind == "cuda":
        for path in ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version"):
            if text := (MachineProbe().read_text(path) or "").strip():
                return text.splitlines()[0]
        asked: Any = getattr(torch._C, "_cuda_getDriverVersion", None)
        if asked is not None and torch.cuda.is_available():
            return str(asked())
    return platform.platform()


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
    """What came of one check."""

    passed: bool | None = attrs.field(validator=attrs.validators.in_((True, False, None)))
    """``None``: it was not run."""
    detail: str = ""
    """In a few words, what differs or why it was not run."""
    evidence: str = ""
    """For the report: a traceback, or everything that differs."""
    seconds: float = attrs.field(default=0.0, validator=attrs.validators.instance_of((int, float)))


def _outcomes(values: Mapping[str, Any]) -> dict[str, Outcome]:
    return {
        str(name): each if isinstance(each, Outcome) else Outcome(**each)
        for name, each in values.items()
    }


@attrs.frozen(kw_only=True)
class Proof:
    """What the checks of the fast paths have shown of one combination."""

    combination: Combination
    checks: Mapping[str, Outcome] = attrs.field(factory=dict, converter=_outcomes)
    """By name, in the order in which they ran."""
    error: str | None = None
    """Why they could not be run."""
    finished: str = attrs.field(factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
    """UTC."""

    @property
    def seconds(self) -> float:
        """Of all checks together."""
        return sum(each.seconds for each in self.checks.values())

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the checks that found a difference."""
        return tuple(name for name, each in self.checks.items() if each.passed is False)

    def obstacle(self, path: FastPath) -> str | None:
        """Why a fast path is not proven; ``None`` where it is."""
        if self.error is not None:
            return f"its proof could not be run ({self.error})"
        for name in PATHS[path]:
            outcome = self.checks.get(name, Outcome(passed=None, detail="not among the checks"))
            if not outcome.passed:
                happened = "was not run" if outcome.passed is None else "failed on this device"
                return f"the check of {name} {happened} ({outcome.detail})"
        return None

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready values."""
        return {"format": _PROOF_FORMAT, **attrs.asdict(self)}


def proof_path(combination: Combination) -> Path:
    """Where its proof is kept, in the user's cache."""
    return user_cache() / "proofs" / f"{combination.key}.json"


def report_path(combination: Combination) -> Path:
    """Path of the failure report; the file exists only after a failure."""
    return proof_path(combination).with_suffix(".report.json")


_unsaved: Final[dict[Combination, Proof]] = {}
"""Proofs that could not be written."""


def load_proof(combination: Combination) -> Proof | str:
    """The proof of a combination, or why there is none that counts."""
    path = proof_path(combination)
    try:
        proof = _unsaved.get(combination)
        if proof is None:
            values = json_of(read_record(path, most=_LARGEST_PROOF))
            if values.pop("format") != _PROOF_FORMAT:
                raise ValueError("another format")
            proof = Proof(combination=Combination(**values.pop("combination")), **values)
    except FileNotFoundError:
        return _NONE_YET
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    except (ValueError, TypeError, KeyError, AttributeError):
        return f"{path} is damaged or of another format, so it does not count"
    if proof.combination != combination:
        return f"{path} is of another combination, so it does not count"
    return proof


def store_proof(proof: Proof) -> Path | None:
    """Keep a proof for later starts, and a report beside it where something failed; its file.

    ``None``: it cannot be written, and the proof counts for this process only.
    """
    path, report = proof_path(proof.combination), report_path(proof.combination)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if proof.failed or proof.error is not None:
            packages = ("torch", "deepspeed", "accelerate", "diffusers", "numpy", "triton", "ninja")
            shown = {n: v for n, v in sorted(os.environ.items()) if n.startswith(_REPORTED)}
            text = {
                "proof": proof.to_dict(),
                "packages": installed_versions(packages),
                "python": sys.version,
                "system": platform.platform(),
                "torch": torch.__config__.show(),
                "environment": shown,
            }
            write_atomically(report, json.dumps(text, indent=1).encode())
        else:
            report.unlink(missing_ok=True)
        write_atomically(path, json.dumps(proof.to_dict(), indent=1).encode())
    except OSError as error:
        logger.warning("the proof cannot be kept: %s", error)
        _unsaved[proof.combination] = proof
        return None
    _unsaved.pop(proof.combination, None)
    return path


# -- Who asks.


def proof_setting(environ: Mapping[str, str] | None = None) -> Setting:
    """What ``ZEROTUNE_PROOF`` says; ``"first"`` where it is not set."""
    written = (os.environ if environ is None else environ).get(VARIABLE, "").strip().lower()
    for setting in get_args(Setting):
        if (written or "first") == setting:
            return setting  # type: ignore[no-any-return]
    raise InvalidValueError(
        "no such setting",
        key=VARIABLE,
        value=written,
        fix=f"use one of {', '.join(get_args(Setting))}, or unset it",
    )


def why_unproven(path: FastPath, *, accelerator: Accelerator) -> str | None:
    """Why a fast path is not the default on this device; ``None`` where it is proven."""
    if proof_setting() == "off":
        return f"{VARIABLE}=off takes the plain paths"
    combination = Combination.here(accelerator)
    proof = load_proof(combination)
    if isinstance(proof, str):
        return f"{proof}; `{COMMAND}` proves it within half a minute"
    obstacle = proof.obstacle(path)
    return None if obstacle is None else "; ".join((obstacle, *_what_to_do(proof)))


def why_disproven(path: FastPath, *, accelerator: Accelerator) -> str | None:
    """What a proof has found against a path that is the default without one."""
    if proof_setting() == "off":
        return None
    proof = load_proof(Combination.here(accelerator))
    if isinstance(proof, str) or not set(PATHS[path]) & set(proof.failed):
        return None
    return "; ".join((str(proof.obstacle(path)), *_what_to_do(proof)))


def _what_to_do(proof: Proof) -> tuple[str, ...]:
    """About a failure; nothing where a check has only nothing to check here."""
    if proof.failed:
        return (f"report it with the file {report_path(proof.combination)}",)
    return () if proof.error is None else (f"`{COMMAND}` proves it anew",)


def proof_decisions(accelerator: Accelerator) -> tuple[Decision, ...]:
    """What is proven here; nothing on a CPU where no proof was asked for."""
    setting = proof_setting()
    combination = Combination.here(accelerator)
    proof = load_proof(combination)
    on_cpu = accelerator == "cpu"
    if on_cpu and (setting == "off" or proof == _NONE_YET):
        return ()
    if setting == "off" or isinstance(proof, str):
        reason = why_unproven("hidden step", accelerator=accelerator) or ""
        return (Decision(key=KEY, before=None, after="nothing, plain paths", reason=reason),)
    proven = [path for path in PATHS if proof.obstacle(path) is None]
    obstacles = dict.fromkeys(filter(None, (proof.obstacle(path) for path in PATHS)))
    said = [f"{len(proof.checks)} checks in {proof.seconds:.0f} s, {proof.finished}", *obstacles]
    said += _what_to_do(proof)
    return (
        Decision(
            key=KEY,
            before=None,
            after=", ".join(proven) or "nothing, plain paths",
            reason="; ".join(said),
            severity="warning" if _what_to_do(proof) else "note",
        ),
    )


# -- The first start.


def prove_first(accelerator: Accelerator, group: ProcessGroup) -> tuple[Decision, ...]:
    """Have unproven fast paths proven; returns what is proven now. Collective.

    One process of each machine has it done; the others wait. On a CPU nothing is done by itself.
    """
    setting = proof_setting()
    if accelerator != "cpu" and setting in ("first", "always"):
        if group.local_rank == 0:
            _prove_here(accelerator, anew=setting == "always")
        group.barrier("wait for the proof of the fast paths", timeout_s=2 * _PATIENCE_S)
    return proof_decisions(accelerator)


def prove_offload(plan: ResolvedPlan, group: ProcessGroup) -> tuple[Decision, ...]:
    """As ``prove_first``, where a plan keeps anything in host memory. Collective."""
    if plan.offload_optimizer == plan.offload_param == "none":
        return ()
    return prove_first(plan.platform.accelerator, group)


_proven_anew: Final[set[Combination]] = set()
"""What this process has proven anew, which is once enough."""


def _prove_here(accelerator: Accelerator, *, anew: bool) -> None:
    combination = Combination.here(accelerator)
    anew = anew and combination not in _proven_anew
    if not anew and isinstance(load_proof(combination), Proof):
        return
    with _one_at_a_time():
        if not anew and isinstance(load_proof(combination), Proof):
            return
        _proven_anew.add(combination)
        _unsaved.pop(combination, None)
        with contextlib.suppress(OSError):
            proof_path(combination).unlink(missing_ok=True)
        logger.warning(
            "first start on %s: its fast paths are proven, which takes up to half a minute and "
            "what imports and compilers take (%s=off|ask)", combination.device, VARIABLE,
        )  # fmt: skip
        problem = _run_command(accelerator)
        proof = load_proof(combination)
        if isinstance(proof, str):
            store_proof(Proof(combination=combination, error=problem or proof))


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Have other processes of this user wait meanwhile, where their cache is a file system's."""
    with contextlib.ExitStack() as stack:
        # Without a lock two processes do the same work, no more.
        with contextlib.suppress(OSError, ImportError):
            import fcntl

            folder = user_cache() / "proofs"
            folder.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((folder / "lock").open("a"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _run_command(accelerator: Accelerator, patience_s: float = _PATIENCE_S) -> str | None:
    """Prove in a process of its own; what went wrong, if it did not end well."""
    command = [sys.executable, "-m", *COMMAND.split(), *_ALLOWED.get(accelerator, ())]
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
                # It may have ranks of its own.
                os.killpg(process.pid, signal.SIGKILL)
                raise
    except subprocess.TimeoutExpired:
        return f"no end within {patience_s:g} s"
    except OSError as error:
        return f"no process could be started: {error}"
    if not process.returncode:
        return None
    last = output.decode(errors="replace").strip().splitlines()[-1:]
    return f"exit code {process.returncode}: {''.join(last)}"[:500]


def _environment() -> dict[str, str]:
    """This process's, without what its launcher says of ranks."""
    environ = {n: v for n, v in os.environ.items() if not n.startswith(_SET_BY_LAUNCHERS)}
    paths = [str(Path(__file__).parents[2])]
    paths += [str(Path(p).absolute()) for p in environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    return {**environ, "PYTHONPATH": os.pathsep.join(paths), VARIABLE: "off"}


def describe_error(error: BaseException) -> str:
    """An error in a few words."""
    return f"{type(error).__name__}: {first_line(error)}"[:300]
