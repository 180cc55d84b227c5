"""Which folder parameters and optimizer states are swapped to, and who said so."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import attrs

from zerotune.errors import OffloadError

if TYPE_CHECKING:
    from zerotune.plan.model import ResolvedPlan

Target = Literal["param", "optimizer"]
"""What is swapped: parameters or optimizer states."""

ROOT_VARIABLE: Final = "ZEROTUNE_SWAP_ROOT"
PATH_VARIABLES: Final[Mapping[Target, str]] = {
    "param": "ZEROTUNE_OFFLOAD_PARAM_PATH",
    "optimizer": "ZEROTUNE_OFFLOAD_OPTIMIZER_PATH",
}
FIX: Final = "give a folder on a local disk that this user may write to"


@attrs.frozen(kw_only=True)
class Roots:
    """``OffloadManager``'s own arguments; ``None`` where one was not given."""

    root: str | None = None
    param: str | None = None
    optimizer: str | None = None


@attrs.frozen(kw_only=True)
class RootChoice:
    """A folder to swap to and who asked for it."""

    path: str
    """As given."""
    key: str
    """Setting it came from (``"OffloadManager.root"``)."""
    fallback: bool = False
    """Whether nobody asked for it, so that zerotune took the temporary folder."""
    passed_over: tuple[str, ...] = ()
    """``setting = path`` of what named another folder and had to stand back."""


def choose_root(
    target: Target, *, arguments: Roots, resolved: ResolvedPlan, environ: Mapping[str, str]
) -> RootChoice:
    """Where ``target`` is swapped to: argument, configuration, environment, else temporary.

    Optimizer states go where parameters go unless something names a folder of their own.

    Args:
        target: What is swapped.
        arguments: Those of the ``OffloadManager``.
        resolved: The plan. ``offload_param_path`` of the trainer's file comes before DeepSpeed's
            ``nvme_path``; blank and ``"none"`` (which launchers write for a missing path) count
            as not given.
        environ: Environment variables.
    """
    found = [
        (key, path, own)
        for key, path, own in _candidates(target, arguments, resolved, environ)
        if path is not None and path.strip() and path.strip().lower() != "none"
    ]
    if not found:
        return RootChoice(path=_temporary_root(), key="offload.root", fallback=True)
    key, path, _ = found[0]
    others = (f"{k} = {p}" for k, p, own in found[1:] if own and p != path)
    return RootChoice(path=path, key=key, passed_over=tuple(others))


def _candidates(
    target: Target, arguments: Roots, resolved: ResolvedPlan, environ: Mapping[str, str]
) -> Iterator[tuple[str, str | None, bool]]:
    """Setting, its path, and whether it speaks of ``target`` itself; the first one wins."""
    order: tuple[Target, ...] = (target,) if target == "param" else ("optimizer", "param")
    own, *other = order
    for part in (own, None, *other):
        if part is None:
            yield "OffloadManager.root", arguments.root, True
        else:
            path = getattr(arguments, part)
            yield f"OffloadManager.offload_{part}_path", path, part == target
    launch = resolved.requested.launch
    for part in order:
        path = getattr(launch, f"offload_{part}_path", None)
        yield f"offload_{part}_path", path, part == target
    for part in dict.fromkeys((target, "param", "optimizer")):
        key = f"zero_optimization.offload_{part}.nvme_path"
        yield key, resolved.nvme_paths.get(part), part == target
    for part in (own, None, *other):
        name = ROOT_VARIABLE if part is None else PATH_VARIABLES[part]
        yield name, environ.get(name), part in (None, target)


def _temporary_root() -> str:
    try:
        # The user's id keeps two users of one machine out of each other's folder.
        return str(Path(tempfile.gettempdir()) / f"zerotune-swap-{os.getuid()}")
    except FileNotFoundError as error:
        raise OffloadError(
            "no swap root was given and no temporary folder can be written",
            key="OffloadManager.root",
            fix=FIX,
        ) from error
