"""Where a shadow lies: host memory, the engine's device, or a memory-mapped file."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import attrs
import torch

from zerotune._util.text import disk_size
from zerotune.errors import EMAError, InvalidValueError

if TYPE_CHECKING:
    from zerotune.backend.master_weights import MasterWeights

_BYTES = 4


@runtime_checkable
class ShadowStore(Protocol):
    """Makes room for one rank's share of a shadow."""

    def allocate(self, numel: int, *, device: torch.device) -> torch.Tensor:
        """An uninitialized fp32 tensor of shape ``(numel,)``.

        Args:
            numel: Elements this rank owns; may be 0.
            device: Where the engine trains.
        """
        ...

    def __str__(self) -> str:
        """Where that is, for people."""
        ...


@attrs.frozen(kw_only=True)
class HostStore:
    """Host memory: 4 bytes per element, not pinned. The default.

    Where offload keeps the master weights in host memory, nothing crosses the bus.
    """

    def allocate(self, numel: int, *, device: torch.device) -> torch.Tensor:  # noqa: ARG002
        """An uninitialized fp32 tensor of shape ``(numel,)`` on the CPU."""
        return torch.empty(numel, dtype=torch.float32)

    def __str__(self) -> str:
        return "on the CPU"


@attrs.frozen(kw_only=True)
class DeviceStore:
    """Memory of the training device or of another one.

    For engines that keep the master weights on the device.
    """

    device: torch.device | None = attrs.field(
        default=None, converter=attrs.converters.optional(torch.device)
    )
    """The device; the engine's own when not given."""

    def allocate(self, numel: int, *, device: torch.device) -> torch.Tensor:
        """An uninitialized fp32 tensor of shape ``(numel,)`` on the device."""
        return torch.empty(numel, dtype=torch.float32, device=self.device or device)

    def __str__(self) -> str:
        return "on the engine's device" if self.device is None else f"on {self.device}"


@attrs.frozen(kw_only=True)
class FileStore:
    """A memory-mapped file: the kernel keeps what fits in memory and writes the rest to disk.

    The file loses its name as soon as it is mapped. It takes its room on the disk until the
    shadow is gone, but no run can leave it behind, killed or not, and no other run can open it.
    Every rank may name the same folder; on several machines it should be on a local disk::

        EMAShadow(store=FileStore(folder=lease.path))
    """

    folder: Path = attrs.field(converter=Path)
    """An existing folder, such as that of an offload lease."""

    def allocate(self, numel: int, *, device: torch.device) -> torch.Tensor:  # noqa: ARG002
        """A mapped fp32 tensor of shape ``(numel,)``.

        Raises:
            EMAError: The file cannot be made, or the disk has no room for it.
        """
        if numel == 0:
            return torch.empty(0, dtype=torch.float32)
        try:
            descriptor, path = tempfile.mkstemp(prefix="ema-", suffix=".shadow", dir=self.folder)
            try:
                # A sparse file would kill the process with SIGBUS when the disk fills up later.
                os.posix_fallocate(descriptor, 0, numel * _BYTES)
                return torch.from_file(path, shared=True, size=numel, dtype=torch.float32)
            finally:
                os.close(descriptor)
                Path(path).unlink()
        except (OSError, ValueError) as error:
            raise EMAError(
                f"{disk_size(numel * _BYTES)} for the shadow could not be had: "
                f"{getattr(error, 'strerror', None) or error}",
                key="FileStore.folder",
                value=str(self.folder),
                fix="name an existing folder that can be written, on a disk with that much room",
            ) from error

    def __str__(self) -> str:
        return f"in a mapped file in {self.folder}"


def as_store(store: Any) -> ShadowStore:
    """The given store, or the host."""
    if store is None:
        return HostStore()
    if isinstance(store, ShadowStore) and not isinstance(store, type):
        return store
    raise InvalidValueError(
        "is not a valid place for a shadow",
        key="store",
        value=store,
        fix="HostStore(), DeviceStore() or FileStore(folder=...)",
    )


def room_for(master: MasterWeights, store: ShadowStore) -> dict[str, torch.Tensor]:
    """A 1-D fp32 tensor for every fragment of this rank, by its key; uninitialized."""
    # One allocation, not one per fragment: thousands of small blocks would each be rounded up.
    buffer = store.allocate(master.numel, device=master.device)
    parts = torch.split(buffer, [address.numel for address in master.addresses])
    return {a.key: part for a, part in zip(master.addresses, parts, strict=True)}
