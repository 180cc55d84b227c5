"""Where a shadow lies: host memory, the engine's device, or a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import attrs
import torch
from typing_extensions import override

from zerotune.backend.ema_update import EMAInMemory, EMATensors
from zerotune.errors import InvalidValueError

if TYPE_CHECKING:
    from zerotune.backend.master_weights import MasterWeights

ELEMENT_BYTES = 4


@runtime_checkable
class ShadowStore(Protocol):
    """Protocol for the storage of one rank's shadow fragments."""

    def allocate(self, sizes: Mapping[str, int], *, device: torch.device) -> EMATensors:
        """Return uninitialised fp32 tensors.

        Args:
            sizes: Number of elements of each fragment, by ``FragmentAddress.key``.
            device: Device of the engine.
        """
        ...

    def __str__(self) -> str:
        """Return a description of the location."""
        ...


@attrs.frozen(kw_only=True)
class HostStore:
    """Storage of a shadow in pageable host memory; the default.

    With master weights in host memory, updates transfer nothing between host and device. With
    master weights on the device, every update copies them to the host, and waits for each copy.
    """

    def allocate(
        self,
        sizes: Mapping[str, int],
        *,
        device: torch.device,  # noqa: ARG002
    ) -> EMATensors:
        """Return uninitialised fp32 tensors on the CPU, by the keys of ``sizes``."""
        return _in_memory(sizes, torch.device("cpu"))

    def __str__(self) -> str:
        return "on the CPU"


@attrs.frozen(kw_only=True)
class DeviceStore:
    """Storage of a shadow on a device, for engines with master weights on the device."""

    device: torch.device | None = attrs.field(
        default=None, converter=attrs.converters.optional(torch.device)
    )
    """The device; by default the engine's device."""

    def allocate(self, sizes: Mapping[str, int], *, device: torch.device) -> EMATensors:
        """Return uninitialised fp32 tensors on the device, by the keys of ``sizes``."""
        return _in_memory(sizes, self.device or device)

    def __str__(self) -> str:
        return "on the engine's device" if self.device is None else f"on {self.device}"


def _in_memory(sizes: Mapping[str, int], device: torch.device) -> EMAInMemory:
    # One allocation, not one per fragment: thousands of small blocks would each be rounded up.
    buffer = torch.empty(sum(sizes.values()), dtype=torch.float32, device=device)
    return EMAInMemory(zip(sizes, torch.split(buffer, list(sizes.values())), strict=True))


@attrs.frozen(kw_only=True)
class FileStore:
    """Storage of a shadow in a file, of which at most 64 MiB are in memory.

    While one part of the shadow is updated, a thread writes the previous part and reads the next
    ones, past the kernel's page cache where the file system allows it.

    The file is unlinked as soon as it is created, so a killed run leaves no file behind, and other
    runs cannot open it. The file occupies disk space until the shadow is freed. All ranks may use
    the same folder; with several machines, use a folder on each machine's local disk::

        EMAShadow(store=FileStore(folder=lease.path))
    """

    folder: Path = attrs.field(converter=Path)
    """An existing folder, such as a swap folder (``Lease.path``)."""

    def allocate(
        self,
        sizes: Mapping[str, int],
        *,
        device: torch.device,  # noqa: ARG002
    ) -> EMATensors:
        """Return the tensors of a new file, by the keys of ``sizes``.

        Raises:
            EMAError: The file cannot be created, or the disk is full.
        """
        # The module uses system calls that only Linux has.
        from zerotune.ema.file import FileTensors

        return FileTensors(sizes, folder=self.folder)

    def __str__(self) -> str:
        return f"in a file in {self.folder}"


class StoredState(Mapping[str, torch.Tensor]):
    """State of a shadow whose tensors are read when they are accessed.

    Args:
        settle: Function that waits until no update of the shadow is running.
        tensors: The shadow's tensors.
        others: Other entries.
    """

    def __init__(
        self,
        settle: Callable[[], object],
        tensors: EMATensors,
        others: Mapping[str, torch.Tensor],
    ) -> None:
        self._settle, self._tensors, self._others = settle, tensors, others

    @override
    def __getitem__(self, key: str) -> torch.Tensor:
        if key in self._others:
            return self._others[key]
        self._settle()
        return self._tensors[key]

    @override
    def __iter__(self) -> Iterator[str]:
        yield from self._tensors
        yield from self._others

    @override
    def __len__(self) -> int:
        return len(self._tensors) + len(self._others)


def as_store(store: Any) -> ShadowStore:
    """Return a store unchanged, or a ``HostStore`` for ``None``."""
    if store is None:
        return HostStore()
    if isinstance(store, ShadowStore) and not isinstance(store, type):
        return store
    raise InvalidValueError(
        "is not a valid store for a shadow",
        "write HostStore(), DeviceStore() or FileStore(folder=...)",
        "store",
        store,
    )


def room_for(master: MasterWeights, store: ShadowStore) -> EMATensors:
    """Allocate an uninitialised 1-D fp32 tensor in ``store`` for every fragment of this rank."""
    sizes = {address.key: address.numel for address in master.addresses}
    return store.allocate(sizes, device=master.device)
