"""Write a checkpoint that the ranks have agreed on, and read it back before it is published."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs

from zerotune._util.files import write_synced
from zerotune._util.text import listing
from zerotune.backend.distributed import ProcessGroup, together
from zerotune.checkpoint.contents import Portion, RankContents
from zerotune.checkpoint.manifest import MANIFEST, FileRecord, Manifest
from zerotune.checkpoint.staging import Staging, check_space
from zerotune.checkpoint.tensors import TensorFile, TensorWriter, Written
from zerotune.errors import CheckpointError, CheckpointNotFiniteError

if TYPE_CHECKING:
    from zerotune.checkpoint.filing import Filing

_MOST_NAMES: Final = 5


class Writing:
    """The operation of writing a checkpoint, on one rank."""

    def __init__(
        self,
        *,
        group: ProcessGroup,
        final: Path,
        draft: Manifest,
        filing: Filing,
        contents: RankContents,
        portions: Callable[[], Iterator[Portion]],
        allow_not_finite: bool,
    ) -> None:
        self._group, self._final = group, final
        self._draft, self._filing = draft, filing
        self._contents, self._portions = contents, portions
        self._allow_not_finite = allow_not_finite
        self._staging: Staging | None = None
        self._folder = Path()
        self._files: tuple[TensorFile, ...] = ()
        self._writer: TensorWriter | None = None

    def run(self) -> Path:
        """Write, verify and rename the checkpoint. Collective over the group's control channel."""
        group = self._group
        try:
            self._folder = together(group, "create the folder", self._stage)[0]
            written = together(group, "write the weights", self._write)
            self._judge(name for _, not_finite in written for name in not_finite)
            parts = [part for each, _ in written for part in each]
            confirmed = together(group, "verify the written files", lambda: self._confirm(parts))
            files = [file for files in confirmed for file in files]
            together(group, "finish the checkpoint", lambda: self._publish(files))
        except BaseException:
            self._abandon()
            raise
        finally:
            if self._writer is not None:
                self._writer.close()
        return self._final

    def _stage(self) -> Path:
        """Create the temporary folder and its shared files, on rank 0."""
        if not self._group.is_main:
            return Path()
        self._staging = Staging(self._final)
        check_space(self._staging.path, self._filing.nbytes)
        for file in self._filing.files:
            file.create(self._staging.path)
        return self._staging.path

    def _write(self) -> tuple[tuple[Written, ...], tuple[str, ...]]:
        """Write this rank's parts and its file; return the written parts and non-finite names."""
        if not self._folder.is_dir():
            raise CheckpointError(
                "rank 0 created this folder, but this rank does not see it",
                "save to a file system that all machines share",
                str(self._folder),
            )
        alone = self._contents.file()
        alone.create(self._folder)
        shared = self._filing.files
        self._files = (*shared[self._group.rank :: self._group.world_size], alone)
        self._writer = writer = TensorWriter(self._folder, [*shared, alone])
        for portion in self._portions():
            part = portion.part
            writer.write(part.name, portion.tensor, subject=portion.subject, start=part.start)
        for key, tensor in self._contents.others.items():
            writer.write(key, tensor, subject=alone.subject)
        if self._group.world_size > 1:
            # Another machine may see the data only once it is on disk.
            writer.sync()
        return writer.written, writer.not_finite

    def _judge(self, names: Iterable[str]) -> None:
        """Refuse non-finite tensors; all ranks get the same names, so all decide the same."""
        spoiled = tuple(dict.fromkeys(names))
        self._draft = attrs.evolve(self._draft, not_finite=spoiled)
        if spoiled and not self._allow_not_finite:
            raise CheckpointNotFiniteError(
                f"NaN or infinity in {listing(spoiled, most=_MOST_NAMES)}, so the checkpoint "
                "is not saved; earlier checkpoints are kept",
                "resume from an earlier checkpoint with a lower learning rate, or save "
                "anyway with allow_not_finite=True",
                str(self._final),
            )

    def _confirm(self, parts: Iterable[Written]) -> tuple[FileRecord, ...]:
        """Read back this rank's share of the shared files, and its own file."""
        return () if self._writer is None else self._writer.confirm(self._files, parts)

    def _publish(self, records: Iterable[FileRecord]) -> None:
        """Write the manifest and give the folder its name, on rank 0."""
        if self._staging is None:
            return
        files = sorted(records, key=lambda record: record.name)
        manifest = attrs.evolve(self._draft, files=files).to_json()
        write_synced(self._staging.path / MANIFEST, manifest.encode())
        self._staging.publish()

    def _abandon(self) -> None:
        """Remove what was written, on rank 0."""
        if self._staging is not None:
            self._staging.abandon()
