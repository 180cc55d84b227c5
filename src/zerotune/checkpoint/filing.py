"""From what every rank has to the files of a checkpoint, the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import attrs
import torch

from zerotune.checkpoint.contents import Counters, Part, RankShare
from zerotune.checkpoint.manifest import ParameterRecord
from zerotune.checkpoint.sharedfile import WEIGHTS, SharedFile, Subject, lay_out
from zerotune.checkpoint.tensorfile import TensorSpec
from zerotune.errors import CheckpointError

SHARD_SIZE: Final = 4 * 2**30
"""Most bytes of a shared file; ranks check different files at the same time."""

Shapes = Mapping[str, tuple[int, ...]]


@attrs.frozen(kw_only=True, eq=False)
class Filing:
    """The shared files of a checkpoint, and what goes into them."""

    files: tuple[SharedFile, ...]
    parameters: tuple[ParameterRecord, ...]
    nbytes: int
    """Of all files of the checkpoint but the manifest."""

    @classmethod
    def of(
        cls, shares: Sequence[RankShare], shapes: Shapes, *, shard_size: int = SHARD_SIZE
    ) -> Filing:
        """Lay out what the ranks have between them.

        Args:
            shares: Of each rank.
            shapes: Full shape of every trained parameter, in the order they are written.
            shard_size: Most bytes of a file.

        Raises:
            CheckpointError: An element is held by no rank, or by two.
        """
        parts = _merged(shares)
        parts.setdefault(WEIGHTS, {})
        files: list[SharedFile] = []
        for subject, named in parts.items():
            wanted = shapes if subject == WEIGHTS else [name for name in shapes if name in named]
            specs = [
                TensorSpec(key=name, dtype=torch.float32, shape=shapes[name]) for name in wanted
            ]
            for spec in specs:
                _check_covered(subject, spec, named.get(spec.key, []))
            files += lay_out(subject, specs, most=shard_size)
        return cls(
            files=tuple(files),
            parameters=_records(shapes, parts, shares),
            nbytes=sum(file.nbytes for file in files) + sum(share.rank_file for share in shares),
        )


def _merged(shares: Iterable[RankShare]) -> dict[Subject, dict[str, list[Part]]]:
    merged: dict[Subject, dict[str, list[Part]]] = {}
    for share in shares:
        for subject, parts in share.parts.items():
            for part in parts:
                merged.setdefault(subject, {}).setdefault(part.name, []).append(part)
    return dict(sorted(merged.items(), key=lambda item: (item[0] != WEIGHTS, item[0].prefix)))


def _check_covered(subject: Subject, spec: TensorSpec, parts: list[Part]) -> None:
    position = 0
    for part in sorted(parts, key=lambda part: (part.start, part.numel)):
        if part.start != position:
            break
        position += part.numel
    if position != math.prod(spec.shape) or sum(part.numel for part in parts) != position:
        raise CheckpointError(
            f"the ranks do not hold each of its {math.prod(spec.shape)} elements once",
            key=f"{subject.prefix}/{spec.key}",
            fix="report this with the model's class and the plan",
        )


def _records(
    shapes: Shapes,
    parts: Mapping[Subject, Mapping[str, list[Part]]],
    shares: Sequence[RankShare],
) -> tuple[ParameterRecord, ...]:
    nothing = Counters(step=None, scalars={})
    counters = {name: count for share in reversed(shares) for name, count in share.counters.items()}
    states = {subject.of: set(named) for subject, named in parts.items() if _is_state(subject)}
    return tuple(
        ParameterRecord(
            name=name,
            shape=shape,
            step=counters.get(name, nothing).step,
            states=[state for state, named in states.items() if name in named],
            scalars=dict(counters.get(name, nothing).scalars),
        )
        for name, shape in shapes.items()
    )


def _is_state(subject: Subject) -> bool:
    return subject.kind == "optimizer"
