"""Whether DeepSpeed can run on a machine, as an ordered list of reasons why not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import attrs

from zerotune.decisions import Decision
from zerotune.platform.facts import DEEPSPEED_NAMES, Accelerator, DeepSpeedSupport
from zerotune.platform.probe import TorchFacts

OLDEST_DEEPSPEED: Final = "0.18.9"
"""Oldest release zerotune is tested with."""
OLDEST_DEEPSPEED_ON_MPS: Final = "0.19.6"
"""First release whose MPS accelerator trains: in 0.19.5 and before it has no communication
backend, no memory statistics and no half precision (DeepSpeed pull requests 8293 and 8300)."""

_DEEPSPEED_ACCELERATORS: Final = (
    "cuda", "cpu", "xpu", "npu", "mps", "hpu", "mlu", "sdaa", "supa", "klxpu",
)  # fmt: skip
_TRAINS_WITHOUT: Final = "zerotune trains with its plain engine instead"


@attrs.frozen(kw_only=True)
class Situation:
    """What the rules look at."""

    system: str
    accelerator: Accelerator
    torch: TorchFacts | None
    deepspeed_version: str | None
    environ: Mapping[str, str]
    allow_rocm: bool = False
    allow_mps: bool = False


_Refusal = tuple[str, "str | None"]
_Rule = Callable[[Situation], "_Refusal | None"]


def deepspeed_support(
    situation: Situation,
) -> tuple[DeepSpeedSupport, tuple[Decision, ...]]:
    """Say whether DeepSpeed can run, with the decisions that follow.

    Args:
        situation: The machine, the installed software and what the user allowed.

    Returns:
        The support, and one decision when DeepSpeed is disabled, allowed by request or put on
        the CPU.
    """
    for rule in _RULES:
        refusal = rule(situation)
        if refusal is not None:
            reason, fix = refusal
            support = DeepSpeedSupport(available=False, reason=reason, fix=fix)
            return support, (_disabled(support),)
    name = DEEPSPEED_NAMES[situation.accelerator]
    support = DeepSpeedSupport(available=True, accelerator=name, reason=_account(situation))
    return support, _allowed(situation, support)


def _foreign_system(situation: Situation) -> _Refusal | None:
    if situation.system in {"Linux", "Darwin"}:
        return None
    fix = "use WSL2, which is Linux" if situation.system == "Windows" else "train on Linux"
    return (
        f"DeepSpeed's offload kernels and asynchronous I/O do not build on {situation.system}",
        fix,
    )


def _no_torch(situation: Situation) -> _Refusal | None:
    if situation.torch is None:
        return "torch is not installed", "pip install torch"
    if situation.torch.import_error is not None:
        return (
            f"torch is installed but cannot be imported: {situation.torch.import_error}",
            "reinstall torch for this machine (pip install --force-reinstall torch)",
        )
    return None


def _macos(situation: Situation) -> _Refusal | None:
    if situation.system != "Darwin":
        return None
    if not situation.allow_mps:
        return (
            f"DeepSpeed is disabled on macOS; {_TRAINS_WITHOUT}",
            f"pass allow_mps=True to try DeepSpeed {OLDEST_DEEPSPEED_ON_MPS} or later on MPS",
        )
    if situation.accelerator != "mps":
        return "allow_mps was given, but training does not run on an Apple GPU here", None
    return None


def _rocm(situation: Situation) -> _Refusal | None:
    if situation.accelerator != "rocm" or situation.allow_rocm:
        return None
    return (
        f"DeepSpeed is disabled on ROCm, where zerotune is not tested; {_TRAINS_WITHOUT}",
        "pass allow_rocm=True to try it",
    )


def _not_installed(situation: Situation) -> _Refusal | None:
    if situation.deepspeed_version is not None:
        return None
    return "deepspeed is not installed", f"pip install 'deepspeed>={_oldest(situation)}'"


def _too_old(situation: Situation) -> _Refusal | None:
    # Parsing versions is only needed here, and importing zerotune stays lighter without it.
    from packaging.version import InvalidVersion, Version

    oldest = _oldest(situation)
    try:
        if Version(situation.deepspeed_version or "") >= Version(oldest):
            return None
    except InvalidVersion:
        return None
    where = " on MPS" if situation.accelerator == "mps" else ""
    return (
        f"deepspeed {situation.deepspeed_version} is too old{where}; {oldest} is the oldest usable",
        f"pip install --upgrade 'deepspeed>={oldest}'",
    )


def _contradicting_environment(situation: Situation) -> _Refusal | None:
    requested = situation.environ.get("DS_ACCELERATOR")
    native = DEEPSPEED_NAMES[situation.accelerator]
    if requested is None or requested == native:
        return None
    fix = f"unset DS_ACCELERATOR or set it to {native}"
    if requested not in _DEEPSPEED_ACCELERATORS:
        return f"DS_ACCELERATOR={requested!r} is not a name DeepSpeed knows", fix
    return (
        f"DS_ACCELERATOR={requested} names an accelerator zerotune finds no device for",
        fix,
    )


_RULES: Final[tuple[_Rule, ...]] = (
    _foreign_system,
    _no_torch,
    _macos,
    _rocm,
    _not_installed,
    _too_old,
    _contradicting_environment,
)


def _oldest(situation: Situation) -> str:
    return OLDEST_DEEPSPEED_ON_MPS if situation.accelerator == "mps" else OLDEST_DEEPSPEED


def _account(situation: Situation) -> str:
    version = situation.deepspeed_version
    if situation.accelerator == "cpu":
        return f"deepspeed {version} runs on its CPU accelerator (DS_ACCELERATOR=cpu)"
    if situation.accelerator == "rocm":
        return f"deepspeed {version} runs on ROCm, as allow_rocm=True allows"
    if situation.accelerator == "mps":
        return f"deepspeed {version} runs on MPS, as allow_mps=True allows"
    return f"deepspeed {version} runs on {situation.accelerator}"


def _disabled(support: DeepSpeedSupport) -> Decision:
    advice = "" if support.fix is None else f"; {support.fix}"
    return Decision(
        key="platform.deepspeed",
        before=None,
        after="disabled",
        reason=support.reason + advice,
        severity="warning",
    )


def _allowed(situation: Situation, support: DeepSpeedSupport) -> tuple[Decision, ...]:
    if situation.accelerator not in {"cpu", "rocm", "mps"}:
        return ()
    return (
        Decision(
            key="platform.deepspeed",
            before=None,
            after=support.accelerator,
            reason=support.reason,
        ),
    )
