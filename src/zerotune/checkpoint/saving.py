"""``save_checkpoint``: all ranks together, in bounded memory, whole or not at all."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs

from zerotune.checkpoint.collective import together
from zerotune.checkpoint.contents import RankContents, RankShare, ShadowLike, plain_data
from zerotune.checkpoint.filing import Filing
from zerotune.checkpoint.folders import checked_path
from zerotune.checkpoint.manifest import Manifest
from zerotune.checkpoint.records import draft
from zerotune.checkpoint.tensorfile import file_size
from zerotune.checkpoint.writing import Writing
from zerotune.errors import CheckpointError

if TYPE_CHECKING:
    from zerotune.backend.distributed import ProcessGroup
    from zerotune.backend.engine import Engine

_FILE_NAME: Final = re.compile(r"[\w.-]+", re.ASCII)


def save_checkpoint(
    directory: str | os.PathLike[str],
    *,
    engine: Engine,
    extra: Mapping[str, Any] | None = None,
    shadows: Mapping[str, ShadowLike] | None = None,
    rng: bool = True,
    timeout_s: float | None = None,
) -> Path:
    """Write everything that training needs to go on, under this plan or any other.

    Collective: every rank must call it, with the same arguments. Weights, each optimizer state and
    each shadow become plain safetensors files keyed by parameter name, in full shape; every rank
    writes its parts at their place, so nothing is gathered. The folder appears under its name
    only when everything in it was read back and found as it was meant; a former checkpoint of that
    name stays until then. Beyond the engine's own memory it needs that of one fragment.

    Args:
        directory: The checkpoint's folder, on a file system all ranks share.
        engine: What to save: master weights, optimizer states, counters, buffers. Frozen
            parameters are not saved.
        extra: What the caller wants back on loading, as JSON-able data: the position in the
            data, for example.
        shadows: EMA shadows by name.
        rng: Also save the random number generators of every rank.
        timeout_s: Seconds to wait for all ranks to come; the group's timeout when not given.

    Returns:
        The folder's absolute path.

    Raises:
        CheckpointError: Micro batches are accumulated, ``extra`` is not JSON-able, the disk is
            too small, or the folder exists and is no checkpoint.
        CheckpointCorruptError: The disk does not hold what was written; the message names the file.
        CollectiveError: A rank did not come, or the arguments differ.
    """
    group = engine.group
    group.barrier(f"saving checkpoint {os.fspath(directory)}", timeout_s=timeout_s)
    save = Save(engine=engine, group=group)
    save.prepare(directory, extra=extra, shadows=shadows, rng=rng)
    return save.writing().run()


class Save:
    """One save, as one rank goes through it.

    Args:
        engine: What is saved.
        group: The processes.
    """

    def __init__(self, *, engine: Engine, group: ProcessGroup) -> None:
        self._engine = engine
        self._group = group
        self._final = Path()
        self._contents: RankContents
        self._draft: Manifest
        self._filing: Filing

    def prepare(
        self,
        directory: str | os.PathLike[str],
        *,
        extra: Mapping[str, Any] | None,
        shadows: Mapping[str, ShadowLike] | None,
        rng: bool,
    ) -> None:
        """Agree on what is saved and where. Collective; reads no weights."""
        group, shadows = self._group, dict(shadows or {})

        def check() -> tuple[Any, ...]:
            self._check(directory, shadows)
            plain = plain_data(extra or {}, "extra")
            self._draft = draft(self._engine, shadows=shadows, rng=rng, extra=plain)
            step = self._draft.state.global_step
            return str(self._final), step, sorted(shadows), rng, plain

        agreed = together(group, "check the arguments", check)
        if any(arguments != agreed[0] for arguments in agreed):
            group.agree(agreed[group.rank], "arguments of save_checkpoint")
        self._file(together(group, "look at the weights", lambda: self._inspect(shadows, rng)))

    def copy(self) -> None:
        """Copy everything into host memory, so that training may go on meanwhile."""
        self._contents = self._contents.copied(self._engine)

    def writing(self, *, group: ProcessGroup | None = None) -> Writing:
        """What writes it.

        Args:
            group: Other processes' control channel than that of ``prepare``.
        """
        return Writing(
            group=group or self._group,
            final=self._final,
            draft=self._draft,
            filing=self._filing,
            contents=self._contents,
            pieces=lambda: self._contents.read(self._engine),
        )

    def _check(self, directory: str | os.PathLike[str], shadows: Mapping[str, Any]) -> None:
        steps = self._engine.plan.gradient_accumulation_steps
        if self._engine.state.micro_step % steps:
            raise CheckpointError(
                f"{self._engine.state.micro_step % steps} of {steps} micro batches are "
                "accumulated, and their gradients would be lost",
                key="gradient_accumulation_steps",
                value=steps,
                fix="save when engine.step() returned boundary=True",
            )
        for name in shadows:
            if not _FILE_NAME.fullmatch(name):
                raise CheckpointError(
                    "files are called after it: letters, digits, '.', '-' and '_' only",
                    key="shadows",
                    value=name,
                )
        self._final = checked_path(directory)

    def _inspect(self, shadows: Mapping[str, ShadowLike], rng: bool) -> RankShare:
        self._contents = contents = RankContents.of(self._engine, shadows=shadows, rng=rng)
        return RankShare(
            parts=contents.parts,
            counters=contents.counters,
            rank_file=file_size(contents.specs, contents.metadata),
        )

    def _file(self, shares: Sequence[RankShare]) -> None:
        # Every rank comes to the same layout, or to the same error.
        self._filing = Filing.of(shares, self._engine.master_weights.parameters)
        self._draft = attrs.evolve(self._draft, parameters=self._filing.parameters)
