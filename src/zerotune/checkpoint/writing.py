"""From what the ranks have settled on to a checkpoint on the disk, read back before it counts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs

from zerotune.checkpoint.collective import together
from zerotune.checkpoint.contents import Piece, RankContents
from zerotune.checkpoint.filing import Filing
from zerotune.checkpoint.folders import Staging, check_space
from zerotune.checkpoint.manifest import MANIFEST, FileRecord, Manifest
from zerotune.checkpoint.sharedfile import SharedFileWriter, Written, confirm
from zerotune.checkpoint.tensorfile import TensorFileWriter
from zerotune.errors import CheckpointError

if TYPE_CHECKING:
    from zerotune.backend.distributed import ProcessGroup

_READERS: Final = 2
"""Files that a rank hashes at once: one thread hashes slower than a fast disk writes."""


class Writing:
    """One checkpoint being written, as one rank goes through it.

    Args:
        group: The processes, over whose control channel they keep together.
        final: The checkpoint's folder.
        draft: Its manifest without files.
        filing: Its files, laid out.
        contents: What this rank has for its own file.
        pieces: Gives what this rank has for the shared files.
    """

    def __init__(
        self,
        *,
        group: ProcessGroup,
        final: Path,
        draft: Manifest,
        filing: Filing,
        contents: RankContents,
        pieces: Callable[[], Iterator[Piece]],
    ) -> None:
        self._group, self._final = group, final
        self._draft, self._filing = draft, filing
        self._contents, self._pieces = contents, pieces
        self._staging: Staging | None = None
        self._folder = Path()
        self._writer: SharedFileWriter | None = None

    def run(self) -> Path:
        """Write, read back and publish. Collective over the group's control channel.

        Returns:
            The checkpoint.
        """
        group = self._group
        try:
            self._folder = together(group, "make the folder", self._stage)[0]
            written = together(group, "write the weights", self._write)
            parts = [part for _, each in written for part in each]
            confirmed = together(group, "read back what was written", lambda: self._confirm(parts))
            files = [file for files in confirmed for file in files]
            records = [*files, *(record for record, _ in written)]
            together(group, "finish the checkpoint", lambda: self._publish(records))
        except BaseException:
            self._abandon()
            raise
        finally:
            if self._writer is not None:
                self._writer.close()
        return self._final

    def _stage(self) -> Path:
        """Make the temporary folder and the shared files in it, on rank 0."""
        if not self._group.is_main:
            return Path()
        self._staging = Staging(self._final)
        check_space(self._staging.path, self._filing.nbytes)
        for file in self._filing.files:
            file.create(self._staging.path)
        return self._staging.path

    def _write(self) -> tuple[FileRecord, tuple[Written, ...]]:
        """Write this rank's parts, and its own file."""
        if not self._folder.is_dir():
            raise CheckpointError(
                "rank 0 made this folder and this rank does not see it",
                key=str(self._folder),
                fix="save to a file system that all machines share",
            )
        self._writer = writer = SharedFileWriter(self._folder, self._filing.files)
        for piece in self._pieces():
            writer.write(piece.subject, piece.part.name, piece.part.start, piece.tensor)
        if self._group.world_size > 1:
            # Another machine may see it only once it is on the disk.
            writer.sync()
        return self._write_own(), writer.written

    def _write_own(self) -> FileRecord:
        contents, rank = self._contents, self._group.rank
        name = f"rank-{rank:05d}-of-{self._group.world_size:05d}.safetensors"
        path = self._folder / name
        with TensorFileWriter(path, specs=contents.specs, metadata=contents.metadata) as writer:
            for key, tensor in contents.others.items():
                writer.append(key, tensor)
            nbytes, sha256 = writer.finish()
        return FileRecord(name=name, kind="rank", of=str(rank), nbytes=nbytes, sha256=sha256)

    def _confirm(self, parts: Iterable[Written]) -> list[FileRecord]:
        """Read this rank's share of the shared files back while its own come to the disk."""
        parts = list(parts)
        mine = self._filing.files[self._group.rank :: self._group.world_size]
        with ThreadPoolExecutor(1 + _READERS) as pool:
            syncing = None if self._writer is None else pool.submit(self._writer.sync)
            records = list(pool.map(lambda file: confirm(self._folder, file, parts), mine))
            if syncing is not None:
                syncing.result()
        return records

    def _publish(self, records: Iterable[FileRecord]) -> None:
        """Write the manifest and give the folder its name, on rank 0."""
        if self._staging is None:
            return
        files = sorted(records, key=lambda record: record.name)
        path = self._staging.path / MANIFEST
        with path.open("x", encoding="utf-8") as file:
            file.write(attrs.evolve(self._draft, files=files).to_json())
            file.flush()
            os.fsync(file.fileno())
        self._staging.publish()

    def _abandon(self) -> None:
        """Remove what was written, on rank 0."""
        if self._staging is not None:
            self._staging.abandon()
