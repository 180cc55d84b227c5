"""Safetensors files read piece by piece, and models whose weights wait in such files.

A model made inside ``without_weights`` has its sizes and its buffers, and takes no memory for its
parameters: they lie on the ``meta`` device, and each knows where its bytes are. The engine that
trains the model brings them, one at a time, in the dtype and to the place where they stay; at stage
3 each rank reads its own part of each (``backend/deepspeed/sharded.py``).
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
"""Dtypes by the names that headers give them."""

STEMS: Final = ("diffusion_pytorch_model", "model")
"""What diffusers and transformers call the files of a model."""

_READ_AT_ONCE: Final = 2**18
"""Elements read and cast at a time."""


def read_at(descriptor: int, into: memoryview, offset: int) -> int:
    """Fill ``into`` from a byte offset on; the bytes read, fewer only at the end of the file."""
    done = 0
    while done < len(into):
        count = os.preadv(descriptor, [into[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


class OpensFiles(Closable):
    """Holds the files it opens (``os.O_RDONLY`` or ``os.O_WRONLY``), each once, until closed."""

    def __init__(self, mode: int) -> None:
        self._mode = mode
        self._open: dict[Path, int] = {}

    @override
    def close(self) -> None:
        """Close the files as they are."""
        while self._open:
            os.close(self._open.popitem()[1])

    def _descriptor(self, path: Path) -> int:
        if path not in self._open:
            self._open[path] = os.open(path, self._mode | os.O_CLOEXEC)
        return self._open[path]


@attrs.frozen(kw_only=True)
class StoredTensor:
    """A tensor in a file, as the header describes it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Where its first byte lies in the file."""

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Tensors by name, and the metadata, of a safetensors file."""
    try:
        with reading_regular(path) as file:
            nbytes = os.fstat(file.fileno()).st_size
            size = int.from_bytes(file.read(8), "little")
            if size > nbytes - 8:
                raise ValueError(f"a header of {size} bytes")
            entries = json_of(file.read(size), object_pairs_hook=_without_doubles)
        if not isinstance(entries, dict):
            raise TypeError("a header that is no object")
        metadata = {str(key): str(text) for key, text in entries.pop("__metadata__", {}).items()}
        tensors = _tensor_entries(entries, begin=8 + size, end=nbytes)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointCorruptError(
            f"cannot be read as safetensors ({error})", key=str(path), fix="use another checkpoint"
        ) from error
    return tensors, metadata


def _tensor_entries(entries: Mapping[str, Any], *, begin: int, end: int) -> dict[str, StoredTensor]:
    """Tensors of a header, one behind the other from where it ends to the end of the file."""
    tensors = {}
    for name, entry in entries.items():
        first, last = entry["data_offsets"]
        shape = tuple(entry["shape"])
        if any(type(number) is not int or number < 0 for number in (first, last, *shape)):
            raise ValueError(f"offsets {first!r} to {last!r} and shape {shorten(shape)}")
        dtype = TENSOR_DTYPES[entry["dtype"]]
        tensors[name] = stored = StoredTensor(dtype=dtype, shape=shape, offset=begin + first)
        if last - first != stored.nbytes:
            raise ValueError(f"{last - first} bytes for {stored.nbytes}")
    position = begin
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if stored.offset != position:
            raise ValueError(f"{shorten(name)} begins at byte {stored.offset}, not {position}")
        position += stored.nbytes
    if position != end:
        raise ValueError(
            f"it does not hold what it names: tensors end at byte {position}, the file at {end}"
        )
    return tensors


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError("two tensors share a name")
    return entries


def weight_files(folder: Path, *, variant: str | None = None) -> list[Path]:
    """The safetensors files of a model's folder, one or all shards; none where it has none.

    The folder is that of one model, ``<pipeline>/transformer``; a variant such as ``"fp16"``.
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
            f"cannot be read as the index of a model's shards ({type(error).__name__}: {error})",
            key=str(index),
            fix="download the model again",
        ) from error
    missing = [name for name in names if not inside or not (index.parent / name).is_file()]
    if missing or not names:
        raise CheckpointCorruptError(
            "names a shard that is not there" if missing else "names no shards",
            key=str(index),
            value=missing[0] if missing else None,
            fix="download the model again",
        )
    return [index.parent / name for name in names]


# -- Weights that wait.


_WAITING: Final = "zerotune_stored"


@attrs.frozen(kw_only=True)
class StoredWeight:
    """Where a parameter's values are."""

    file: Path
    tensor: StoredTensor
    stamp: tuple[int, int]
    """Bytes and time of change, in ns, of the file when its header was read."""
    pieces: tuple[StoredTensor, ...] = ()
    """Where its elements lie when they are not all one behind another."""

    def read_into(self, flat: torch.Tensor, *, start: int = 0) -> None:
        """Fill a 1-D tensor with the elements from ``start`` on, cast to its dtype."""
        if len(self.pieces) > 1:
            position = 0
            for each in self.pieces:
                first, last = position, position + math.prod(each.shape)
                into = flat[max(0, first - start) : max(0, last - start)]
                if into.numel():
                    part = attrs.evolve(self, tensor=each, pieces=())
                    part.read_into(into, start=max(0, start - first))
                position = last
            return
        tensor, size = self.tensor, self.tensor.dtype.itemsize
        buffer = torch.empty(min(_READ_AT_ONCE, flat.numel()), dtype=tensor.dtype)
        try:
            with reading_regular(self.file) as file:
                if stamp_of(os.fstat(file.fileno())) != self.stamp:
                    raise OSError("it has changed since the model was loaded")
                for piece in torch.split(flat, _READ_AT_ONCE):
                    into = buffer[: piece.numel()]
                    view = memoryview(into.view(torch.uint8).numpy().data)
                    if read_at(file.fileno(), view, tensor.offset + start * size) != len(view):
                        raise OSError("it ends too early")
                    piece.copy_(into)
                    start += piece.numel()
        except OSError as error:
            raise CheckpointCorruptError(
                f"weights that waited in it cannot be read ({error})",
                key=str(self.file),
                fix="load the pipeline again, and leave its files alone until the engine runs",
            ) from error


def stamp_of(found: os.stat_result) -> tuple[int, int]:
    """What changes when somebody writes to a file: its bytes and its time."""
    return found.st_size, found.st_mtime_ns


@contextmanager
def without_weights() -> Iterator[None]:
    """Models made inside have parameters on the ``meta`` device, and buffers with values.

    Buffers that are computed and in no file keep their values, unlike under
    ``torch.device("meta")``; parameters that are one stay one, unlike with accelerate's
    ``init_empty_weights``.
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
    """Have a parameter on the ``meta`` device know where its values are."""
    setattr(parameter, _WAITING, weight)


def stored_weight(parameter: torch.Tensor) -> StoredWeight | None:
    """Where a parameter's values are; ``None`` for one that has them."""
    weight: StoredWeight | None = getattr(parameter, _WAITING, None)
    return weight


def waiting(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The parameters whose values are still in their files."""
    return [each for each in module.parameters() if stored_weight(each) is not None]


def dtype_at_rest(parameter: torch.Tensor) -> torch.dtype:
    """Of the values a parameter has or will get: the file's while they wait in one."""
    weight = stored_weight(parameter)
    return parameter.dtype if weight is None else weight.tensor.dtype


def make_room(
    parameter: torch.nn.Parameter,
    *,
    dtype: torch.dtype,
    device: torch.device,
    passing: bool = False,
) -> StoredWeight:
    """Give a waiting parameter memory that is not filled; the caller reads into it.

    ``passing`` memory is freed soon, so in the host it must not come from a heap, which it would
    leave in pieces. Pages that are not filled are never taken then.
    """
    weight = stored_weight(parameter)
    if weight is None:
        raise ValueError("the parameter has its values")
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
    """Read all waiting weights of a module, one at a time; how many those were.

    Floating-point weights are read in ``dtype``, else each in its own. Host memory holds a piece of
    one at a time beside them.
    """
    parameters = waiting(module)
    for parameter in parameters:
        wanted = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
        weight = make_room(parameter, dtype=wanted, device=torch.device(device))
        weight.read_into(parameter.detach().view(-1))
    return len(parameters)


@contextmanager
def standing_in(module: torch.nn.Module) -> Iterator[None]:
    """Inside the block, weights that wait look like zeros on the CPU, and still take no memory.

    For what puts new layers beside them and asks where they lie and in what dtype they are.
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
    """Whether each parameter has its values, or a file to take them from."""
    for name, parameter in module.named_parameters():
        if parameter.is_meta and stored_weight(parameter) is None:
            raise EngineError(
                "the parameter has no values, nor a file to take them from",
                key=f"model.{name}",
                value="meta",
                fix="train the model that load_pretrained returned, not a copy of it, or build it "
                "outside of torch.device('meta')",
            )


def require_read(module: torch.nn.Module) -> None:
    """Whether weights that waited in files have been read, for a trainer that cannot do so."""
    count = len(waiting(module))
    if count:
        raise EngineError(
            f"{count} of its weights are still in their files",
            key="model",
            value=type(module).__name__,
            fix="call run.shard(model) before the trainer gets it, or load it without plan=",
        )


def _put_in_place(parameter: torch.nn.Parameter, values: torch.Tensor) -> None:
    """Put values in place of a parameter's own, on another device; it stays the same object."""
    other = torch.nn.Parameter(values, requires_grad=parameter.requires_grad)
    other.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, other)  # type: ignore[no-untyped-call]
