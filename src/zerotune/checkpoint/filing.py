"""Which file holds which part of which tensor of a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import attrs
import torch

from zerotune.backend.fragments import StateFormat
from zerotune.checkpoint.contents import Counters, Part, RankShare
from zerotune.checkpoint.manifest import ParameterRecord
from zerotune.checkpoint.tensors import WEIGHTS, Subject, TensorFile, TensorSpec, shard_name, split
from zerotune.errors import CheckpointError

SHARD_SIZE: Final = 4 * 2**30
"""Maximum size in bytes of a file that all ranks write together. Larger data is split into several
files, which the ranks verify in parallel."""

Shapes = Mapping[str, tuple[int, ...]]


@attrs.frozen(kw_only=True, eq=False)
class Filing:
    """Layout of the files that all ranks write together, and the records of the parameters."""

    files: tuple[TensorFile, ...]
    parameters: tuple[ParameterRecord, ...]
    formats: Mapping[str, StateFormat]
    """Formats of the optimizer states, as in ``Manifest``."""
    nbytes: int
    """Total size in bytes of all files except the manifest."""

    @classmethod
    def of(
        cls, shares: Sequence[RankShare], shapes: Shapes, *, shard_size: int = SHARD_SIZE
    ) -> Filing:
        """Lay out the data of all ranks in files.

        Args:
            shares: Each rank's description of its data.
            shapes: Full shape of each parameter.
            shard_size: Maximum bytes of a file.
        """
        merged: dict[Subject, dict[str, list[Part]]] = {WEIGHTS: {}}
        for subject, some in (item for share in shares for item in share.parts.items()):
            for part in some:
                merged.setdefault(subject, {}).setdefault(part.name, []).append(part)
        parts = dict(sorted(merged.items(), key=lambda item: (item[0] != WEIGHTS, item[0].prefix)))
        formats: dict[str, StateFormat] = {}
        files: list[TensorFile] = []
        for subject, named in parts.items():
            wanted = shapes if subject == WEIGHTS else [name for name in shapes if name in named]
            forms = {part.form for some in named.values() for part in some}
            # A state that two parameters store in different dtypes is saved in fp32.
            form = forms.pop() if len(forms) == 1 else StateFormat()
            if any(each.whole for each in (form, *forms)):
                form = StateFormat(whole=True)
            if subject.kind == "optimizer":
                formats[subject.of] = form
            specs = [_spec(name, form, shapes[name], named.get(name, ())) for name in wanted]
            for spec in specs:
                _check_covered(subject, spec, named.get(spec.key, []))
            shards = split(specs, shard_size)
            files += [
                TensorFile.of(shard_name(subject.prefix, index, len(shards)), subject, shard)
                for index, shard in enumerate(shards, start=1)
            ]
        return cls(
            files=tuple(files),
            parameters=_records(shapes, parts, shares),
            formats=formats,
            nbytes=sum(file.nbytes for file in files) + sum(share.nbytes for share in shares),
        )


def _spec(
    name: str, form: StateFormat, shape: tuple[int, ...], parts: Sequence[Part]
) -> TensorSpec:
    if not form.whole:
        shape = form.shape_for(shape)
        return TensorSpec(key=name, dtype=getattr(torch, form.dtype), shape=shape)
    own = parts[0]
    return TensorSpec(key=name, dtype=getattr(torch, own.form.dtype), shape=own.shape or shape)


def _check_covered(subject: Subject, spec: TensorSpec, parts: list[Part]) -> None:
    position = 0
    for part in sorted(parts, key=lambda part: (part.start, part.numel)):
        if part.start != position:
            break
        position += part.numel
    if position != math.prod(spec.shape) or sum(part.numel for part in parts) != position:
        raise CheckpointError(
            f"the ranks' fragments do not cover the tensor's {math.prod(spec.shape)} elements "
            "exactly once",
            "report this as a bug, with the model's class and the plan",
            f"{subject.prefix}/{spec.key}",
        )


def _records(
    shapes: Shapes,
    parts: Mapping[Subject, Mapping[str, list[Part]]],
    shares: Sequence[RankShare],
) -> tuple[ParameterRecord, ...]:
    nothing = Counters(step=None, scalars={})
    counters = {name: count for share in reversed(shares) for name, count in share.counters.items()}
    states = {s.of: set(named) for s, named in parts.items() if s.kind == "optimizer"}
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
