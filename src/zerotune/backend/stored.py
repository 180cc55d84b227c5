"""Read safetensors files piece by piece, and build models whose weights are read only later.

A model built inside ``without_weights`` has its shapes and buffers, but its parameters use no
memory: they are on the ``meta`` device, and each records its position in a file. The engine reads
the parameters one at a time, directly to their final dtype and device. At stage 3 each rank reads
only its part of each parameter (``backend/deepspeed/sharded.py``).
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import attrs
import torch
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import override

from zerotune._util.closing import Closable
from zerotune._util.files import reading_regular
from zerotune._util.text import json_of
from zerotune.errors import CheckpointCorruptError, EngineError, shorten

# -- Files.


TENSOR_DTYPES: Final[Mapping[str, torch.dtype]] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
"""Dtypes by their names in safetensors headers."""

STEMS: Final = ("diffusion_pytorch_model", "model")
"""Names, without extension, of the weight files that diffusers and transformers write."""

_READ_AT_ONCE: Final = 2**18
"""Number of elements read and cast at a time."""


def read_at(descriptor: int, into: memoryview, offset: int) -> int:
    """Fill a buffer from a file, starting at a byte offset.

    Args:
        descriptor: File descriptor.
        into: The buffer.
        offset: Offset of the first byte in the file.

    Returns:
        Number of bytes read, which is below the buffer's size only at the end of the file.
    """
    done = 0
    while done < len(into):
        count = os.preadv(descriptor, [into[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


class OpensFiles(Closable):
    """Base class that opens each file only once, and keeps it open until ``close``."""

    def __init__(self, mode: int) -> None:
        self._mode = mode
        self._open: dict[Path, int] = {}

    @override
    def close(self) -> None:
        """Close all open files."""
        while self._open:
            os.close(self._open.popitem()[1])

    def _descriptor(self, path: Path) -> int:
        if path not in self._open:
            self._open[path] = os.open(path, self._mode | os.O_CLOEXEC)
        return self._open[path]


@attrs.frozen(kw_only=True)
class StoredTensor:
    """Dtype, shape and position of a tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Offset of the first byte in the file."""

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Read the header of a safetensors file.

    Args:
        path: The file.

    Returns:
        The tensors by name, and the metadata.
    """
    try:
        with reading_regular(path) as file:
            nbytes = os.fstat(file.fileno()).st_size
            size = int.from_bytes(file.read(8), "little")
            if size > nbytes - 8:
                raise ValueError(f"its header claims {size} bytes")
            entries = json_of(file.read(size), object_pairs_hook=_without_doubles)
        if not isinstance(entries, dict):
            raise TypeError("its header is not a JSON object")
        metadata = {str(key): str(text) for key, text in entries.pop("__metadata__", {}).items()}
        tensors = _tensor_entries(entries, begin=8 + size, end=nbytes)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointCorruptError(
            f"the file is not valid safetensors ({error})",
            "use a different checkpoint, or download the file again",
            str(path),
        ) from error
    return tensors, metadata


def _tensor_entries(entries: Mapping[str, Any], *, begin: int, end: int) -> dict[str, StoredTensor]:
    """A header's tensors, checked to fill the rest of the file without gaps."""
    tensors = {}
    for name, entry in entries.items():
        first, last = entry["data_offsets"]
        shape = tuple(entry["shape"])
        if any(type(number) is not int or number < 0 for number in (first, last, *shape)):
            raise ValueError(f"offsets {first!r} to {last!r} and shape {shorten(shape)}")
        dtype = TENSOR_DTYPES[entry["dtype"]]
        tensors[name] = stored = StoredTensor(dtype=dtype, shape=shape, offset=begin + first)
        if last - first != stored.nbytes:
            raise ValueError(f"{shorten(name)} has {last - first} bytes instead of {stored.nbytes}")
    position = begin
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if stored.offset != position:
            raise ValueError(
                f"{shorten(name)} begins at byte {stored.offset} instead of {position}"
            )
        position += stored.nbytes
    if position != end:
        raise ValueError(
            f"its tensors should end at byte {position}, but the file ends at byte {end}"
        )
    return tensors


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError("two tensors share a name")
    return entries


def weight_files(folder: Path, *, variant: str | None = None) -> list[Path]:
    """Return the safetensors files in a model's folder: one file, all shards, or an empty list.

    Args:
        folder: Folder of a single model, such as ``<pipeline>/transformer``.
        variant: Variant of the files, such as ``"fp16"``.
    """
    mark = "" if variant is None else f".{variant}"
    for stem in STEMS:
        index = folder / f"{stem}.safetensors.index{mark}.json"
        if index.is_file():
            return _index_shards(index)
        if (folder / f"{stem}{mark}.safetensors").is_file():
            return [folder / f"{stem}{mark}.safetensors"]
    return []


def _index_shards(index: Path) -> list[Path]:
    try:
        names = sorted(set(json_of(index.read_text(encoding="utf-8"))["weight_map"].values()))
        inside = all(Path(name).name == name for name in names)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointCorruptError(
            f"the file is not a valid index of shards ({type(error).__name__}: {error})",
            "download the model again",
            str(index),
        ) from error
    missing = [name for name in names if not inside or not (index.parent / name).is_file()]
    if missing or not names:
        raise CheckpointCorruptError(
            "the index names a missing shard" if missing else "the index names no shards",
            "download the model again",
            str(index),
            missing[0] if missing else None,
        )
    return [index.parent / name for name in names]


# -- Weights that are still in files.


_WAITING: Final = "zerotune_stored"


@attrs.frozen(kw_only=True)
class StoredWeight:
    """Position of a parameter's values in a file."""

    file: Path
    tensor: StoredTensor
    stamp: tuple[int, int]
    """File size in bytes and modification time in ns when the header was read."""

    def read_into(self, flat: torch.Tensor, *, start: int = 0) -> None:
        """Fill a 1-D tensor with the parameter's elements, cast to the tensor's dtype.

        Args:
            flat: Tensor to fill.
            start: Index of the first element to read.
        """
        tensor, size = self.tensor, self.tensor.dtype.itemsize
        buffer = torch.empty(min(_READ_AT_ONCE, flat.numel()), dtype=tensor.dtype)
        try:
            with reading_regular(self.file) as file:
                if stamp_of(os.fstat(file.fileno())) != self.stamp:
                    raise OSError("the file has changed since the model was loaded")
                for piece in torch.split(flat, _READ_AT_ONCE):
                    into = buffer[: piece.numel()]
                    view = memoryview(into.view(torch.uint8).numpy().data)
                    if read_at(file.fileno(), view, tensor.offset + start * size) != len(view):
                        raise OSError("the file ends too early")
                    piece.copy_(into)
                    start += piece.numel()
        except OSError as error:
            raise CheckpointCorruptError(
                f"the model's weights cannot be read from this file ({error})",
                "load the pipeline again, and do not change its files before the engine starts",
                str(self.file),
            ) from error


def stamp_of(found: os.stat_result) -> tuple[int, int]:
    """Return a file's size in bytes and modification time in ns, to detect later changes.

    Args:
        found: Result of ``os.stat``.
    """
    return found.st_size, found.st_mtime_ns


@contextmanager
def without_weights() -> Iterator[None]:
    """Inside the block, build models with parameters on ``meta`` and initialised buffers.

    Unlike with ``torch.device("meta")``, buffers that no file contains keep their computed values.
    Unlike with accelerate's ``init_empty_weights``, tied parameters stay tied.
    """
    register = torch.nn.Module.register_parameter
    made: Any = WeakIdKeyDictionary()

    def on_meta(module: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            if param not in made:
                made[param] = torch.nn.Parameter(param.detach().to("meta"), param.requires_grad)
            param = made[param]
        register(module, name, param)

    torch.nn.Module.register_parameter = on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]


def leave_in_file(parameter: torch.nn.Parameter, weight: StoredWeight) -> None:
    """Record where in a file the values of a parameter on the ``meta`` device are stored.

    Args:
        parameter: The parameter.
        weight: Position of the parameter's values in the file.
    """
    setattr(parameter, _WAITING, weight)


def stored_weight(parameter: torch.Tensor) -> StoredWeight | None:
    """Return where in a file a parameter's values are stored; ``None`` if they are loaded."""
    weight: StoredWeight | None = getattr(parameter, _WAITING, None)
    return weight


def waiting(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return a module's parameters whose values are still in files."""
    return [each for each in module.parameters() if stored_weight(each) is not None]


def dtype_at_rest(parameter: torch.Tensor) -> torch.dtype:
    """Return a parameter's dtype; if its values are not loaded yet, the dtype in the file."""
    weight = stored_weight(parameter)
    return parameter.dtype if weight is None else weight.tensor.dtype


def make_room(
    parameter: torch.nn.Parameter,
    *,
    dtype: torch.dtype,
    device: torch.device,
    passing: bool = False,
) -> StoredWeight:
    """Allocate uninitialised memory for a parameter whose values are still in a file.

    Args:
        parameter: The parameter.
        dtype: Dtype for the allocated values.
        device: Device on which the memory is allocated.
        passing: Whether the memory will be freed soon. If so, host memory is allocated outside the
            heap (``mmap``), so that the heap is not fragmented.

    Returns:
        Position of the parameter's values in the file. The caller must read the values into the
        parameter.
    """
    weight = stored_weight(parameter)
    if weight is None:
        raise ValueError("the parameter's values are already loaded")
    nbytes = parameter.numel() * dtype.itemsize
    if passing and device.type == "cpu" and nbytes:
        room = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=dtype).view(parameter.shape)
    else:
        room = torch.empty(parameter.shape, dtype=dtype, device=device)
    _put_in_place(parameter, room)
    delattr(parameter, _WAITING)
    return weight


def bring_weights(
    module: torch.nn.Module,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> int:
    """Read all weights of a module that are still in files, one at a time.

    Args:
        module: The module.
        dtype: Dtype for floating-point weights; default: the dtype of each parameter.
        device: Device for the weights.

    Returns:
        Number of weights read.
    """
    parameters = waiting(module)
    for parameter in parameters:
        wanted = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
        weight = make_room(parameter, dtype=wanted, device=torch.device(device))
        weight.read_into(parameter.detach().view(-1))
    return len(parameters)


@contextmanager
def standing_in(module: torch.nn.Module) -> Iterator[None]:
    """Inside the block, weights that are still in files appear as CPU zeros that use no memory.

    Libraries that add layers, such as peft, read the device and dtype of these weights.
    """
    parameters = waiting(module)
    for parameter in parameters:
        _put_in_place(parameter, torch.zeros((), dtype=parameter.dtype).expand(parameter.shape))
    try:
        yield
    finally:
        for parameter in parameters:
            _put_in_place(parameter, torch.empty_like(parameter, device="meta"))


def check_has_weights(module: torch.nn.Module) -> None:
    """Raise an error if a parameter has neither values nor a file to read them from."""
    for name, parameter in module.named_parameters():
        if parameter.is_meta and stored_weight(parameter) is None:
            raise EngineError(
                "the parameter has neither values nor a file to read them from",
                "train the model that load_pretrained returned, not a copy of it, or build the "
                "model outside torch.device('meta')",
                f"model.{name}",
                "meta",
            )


def require_read(module: torch.nn.Module) -> None:
    """Raise an error if weights are still in files, because the trainer cannot read them."""
    count = len(waiting(module))
    if count:
        raise EngineError(
            f"{count} of the model's weights are still in their files",
            "call run.shard(model) before passing the model to the trainer, or load the model "
            "without plan=",
            "model",
            type(module).__name__,
        )


def _put_in_place(parameter: torch.nn.Parameter, values: torch.Tensor) -> None:
    """Replace a parameter's values, possibly on a different device, but keep the object."""
    other = torch.nn.Parameter(values, requires_grad=parameter.requires_grad)
    other.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, other)  # type: ignore[no-untyped-call]
