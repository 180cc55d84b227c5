"""From what people write to one canonical name, or to an error that suggests one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import attrs

from zerotune._util.text import did_you_mean, squash
from zerotune.errors import InvalidValueError, OptimizerError
from zerotune.optim.catalogue import (
    DEEPSPEED_PREFIXES,
    IMPLEMENTATION_NAMES,
    OPTIMIZERS,
    PACKAGE_PREFIXES,
    SPELLINGS,
    TORCH_NAMES,
    TORCH_PREFIXES,
)

_TYPE_KEY = "optimizer.type"


@attrs.frozen(kw_only=True)
class OptimizerName:
    """A name and how it was written."""

    canonical: str
    """``"AdamW"``."""
    written: str
    """As given."""
    origin: Literal["plain", "torch", "deepspeed", "package"] = "plain"
    """The prefix it carried: none, ``torch.optim.``, ``deepspeed.`` or a package's."""
    implementation: bool = False
    """Whether a class was named (``FusedAdam``) instead of an optimizer."""


def normalise_optimizer_name(name: str) -> str:
    """Canonical name of an optimizer.

    Args:
        name: In any case, with ``-``, ``_`` or spaces, with a ``torch.optim.`` or
            ``deepspeed.ops.`` prefix, or an alias (``"1-bit adam"``, ``"FusedAdam"``).

    Returns:
        A key of ``OPTIMIZERS``.

    Raises:
        OptimizerError: Nobody knows the name; the message suggests the closest.
        InvalidValueError: ``name`` is not text.
    """
    return parse_optimizer_name(name).canonical


def parse_optimizer_name(name: Any, *, key: str = _TYPE_KEY) -> OptimizerName:
    """``normalise_optimizer_name`` that also tells how the name was written.

    Args:
        name: The name as written.
        key: Where it was written, for the message.

    Raises:
        OptimizerError: Nobody knows the name.
        InvalidValueError: ``name`` is not text, or empty.
    """
    if not isinstance(name, str) or not name.strip():
        raise InvalidValueError(
            "an optimizer is named by text", key=key, value=name, fix='write for example "AdamW"'
        )
    prefix, _, last = name.strip().rpartition(".")
    origin = _origin(prefix)
    word = squash(last)
    canonical = _BY_KEY.get(word)
    known = canonical is not None and _belongs(canonical, origin)
    if origin is None or canonical is None or not known:
        raise _unknown(name, last, prefix, key)
    return OptimizerName(
        canonical=canonical,
        written=name,
        origin=origin,
        implementation=word in IMPLEMENTATION_NAMES,
    )


_BY_KEY = {
    **{squash(name): name for name in OPTIMIZERS},
    **SPELLINGS,
    **IMPLEMENTATION_NAMES,
}


def _origin(prefix: str) -> Literal["plain", "torch", "deepspeed", "package"] | None:
    path = prefix.strip().lower()
    if not path:
        return "plain"
    if _starts(path, TORCH_PREFIXES):
        return "torch"
    if _starts(path, PACKAGE_PREFIXES):
        return "package"
    return "deepspeed" if _starts(path, DEEPSPEED_PREFIXES) else None


def _belongs(canonical: str, origin: str | None) -> bool:
    """Whether a prefix may stand before the name: torch.optim has no OneBitAdam."""
    if origin == "torch":
        return canonical in TORCH_NAMES
    family = OPTIMIZERS[canonical].family
    if family == "zerotune":
        return origin == "plain"
    return origin != "package" or family == "package"


def _starts(path: str, prefixes: Iterable[str]) -> bool:
    return any(path == prefix or path.startswith(f"{prefix}.") for prefix in prefixes)


def _unknown(name: str, last: str, prefix: str, key: str) -> OptimizerError:
    close = did_you_mean(last, OPTIMIZERS)
    known = ", ".join(sorted(OPTIMIZERS))
    where = f" in {prefix}" if prefix else ""
    fix = (
        f"did you mean {' or '.join(close)}? Known are {known}" if close else f"use one of {known}"
    )
    return OptimizerError(
        f"zerotune knows no optimizer of this name{where}, and does not guess one",
        key=key,
        value=name,
        fix=fix,
    )
