"""``HostStepOp``: the one op of zerotune's own, Adam, averages and cast in one pass over memory.

``torch.compile`` makes a pass of it too, 10 % slower in the pilot and with a kernel for every
combination of averages, dtypes and thread counts; and which of its products it contracts into an
fma, on which the last bit stands, is the compiler's to say. So it is 200 lines of C++ (beside this
file), which use neither torch nor Python and compile in a second, into the folder where DeepSpeed's
ops are.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
import threading
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import attrs
import torch

from zerotune._util.files import write_atomically
from zerotune.backend.ops import (
    BuildLock,
    OpState,
    OpStatus,
    build_folder,
    building,
    built_library,
    missing_compiler,
    missing_ninja,
    naming_the_cause,
)
from zerotune.backend.optimizers.classes import Codebook
from zerotune.platform.toolchain import Toolchain, detect_compilers

NAME: Final = "host_step"
PURPOSE: Final = "Adam and AdamW in host memory in one pass: clip, update, EMA, cast"
_CPP: Final = Path(__file__).with_name("host_step.cpp")
_CXX_FLAGS: Final = (
    "-O3",
    "-fopenmp",
    # Every fma is written out; another one would round differently from DeepSpeed's Adam.
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
)
_ARCHITECTURE: Final = {
    "x86_64": ("-march=native", "-mprefer-vector-width=512"),
    "AMD64": ("-march=native", "-mprefer-vector-width=512"),
}
_NONE_SPARED_UP_TO: Final = 2
"""Cores of which none is spared."""
_DTYPE_CODES: Final = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}


@attrs.frozen(kw_only=True)
class AdamNumbers:
    """What one step of Adam does to every element; fp32 numbers, whatever Python holds."""

    factor: float
    """Of the gradient: clips it and undoes the loss scale."""
    beta1: float
    beta2: float
    one_minus_beta1: float
    one_minus_beta2: float
    inverse_root: float
    """``1 / sqrt(1 - beta2 ** step)``."""
    eps: float
    step_size: float
    """``-lr / (1 - beta1 ** step)``."""
    decay: float
    """``-lr * weight_decay``, or ``weight_decay`` itself where it is L2."""
    decays: int
    """0: not at all; 1: decoupled; 2: L2."""


@attrs.frozen(kw_only=True)
class TorchAdamNumbers:
    """What one step of AdamW does to every element in torch's arithmetic."""

    factor: float
    """Of the gradient: clips it and undoes the loss scale."""
    decay: float
    """``1 - lr * weight_decay``, where it is decoupled; else 1."""
    l2: float
    """``weight_decay``, where it is L2; else 0."""
    first: float
    """``1 - beta1``."""
    beta2: float
    second: float
    """``1 - beta2``."""
    root: float
    """``sqrt(1 - beta2 ** step)``."""
    eps: float
    step_size: float
    """``-lr / (1 - beta1 ** step)``."""


@attrs.frozen(kw_only=True, eq=False)
class Average:
    """A shadow that follows the weights: ``shadow.lerp_(weights, weight)``."""

    shadow: torch.Tensor
    """fp32, 1-D, contiguous, on the CPU."""
    weight: float


def _structure(numbers: type[attrs.AttrsInstance]) -> type[ctypes.Structure]:
    """What C++ takes for a class of numbers: fp32, but for ``int``."""
    kinds = {"float": ctypes.c_float, "int": ctypes.c_int32}
    fields = [(field.name, kinds[str(field.type)]) for field in attrs.fields(numbers)]
    return type(numbers.__name__, (ctypes.Structure,), {"_fields_": fields})


_ADAM_STRUCTURE: Final = _structure(AdamNumbers)
_TORCH_ADAM_STRUCTURE: Final = _structure(TorchAdamNumbers)


class _Kept(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weight", "high", "low", "exp_avg", "exp_avg_sq")),
        ("moments", ctypes.c_int32),
        ("noise", ctypes.c_uint32),
        ("position", ctypes.c_int64),
    ]


class _Codes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("values", "middles", "lowest")]


class _Coded(ctypes.Structure):
    _fields_ = [
        (f"{moment}{part}", kind)
        for moment in ("first", "second")
        for part, kind in (
            ("", ctypes.c_void_p), ("_scale", ctypes.c_void_p), ("_codes", _Codes),
        )
    ]  # fmt: skip


@attrs.frozen(kw_only=True, eq=False)
class CodedMoment:
    """A moment of one byte per weight."""

    codes: torch.Tensor
    """uint8, from the beginning of a block on."""
    scales: torch.Tensor
    """fp32: of its blocks."""
    book: Codebook


class _Average(ctypes.Structure):
    _fields_ = [("shadow", ctypes.c_void_p), ("weight", ctypes.c_float)]


class HostStepOp:
    """The compiled functions, called with tensors.

    Calls let go of the interpreter's lock. Every tensor is 1-D, contiguous and on the CPU.
    """

    def __init__(self, *, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.zerotune_take.restype = ctypes.c_double
        self._spared = threading.local()

    @property
    def threads(self) -> int:
        """Threads that calls from this thread compute on."""
        count = torch.get_num_threads()
        return self.beside(count) if vars(self._spared) else count

    @staticmethod
    def beside(threads: int) -> int:
        """Of so many threads, those that a pass computes on beside something else."""
        return threads - 1 if threads > _NONE_SPARED_UP_TO else threads

    def spare_a_core(self) -> None:
        """Have later calls from this thread leave a core to what runs beside them.

        Of two none is left: a pass on one of them takes longer than sharing both.
        """
        self._spared.core = True

    def knows(self, dtype: torch.dtype) -> bool:
        """Whether gradients and weights may have this dtype."""
        kind = _DTYPE_CODES.get(dtype, 0)
        return bool(kind and self._library.zerotune_knows(ctypes.c_int32(kind)))

    def step(
        self,
        numbers: AdamNumbers | TorchAdamNumbers,
        *,
        weight: torch.Tensor | None = None,
        high: torch.Tensor | None = None,
        low: torch.Tensor | None = None,
        exp_avg: torch.Tensor | CodedMoment,
        exp_avg_sq: torch.Tensor | CodedMoment,
        gradient: torch.Tensor,
        noise: int = 0,
        position: int = 0,
        averages: Sequence[Average] = (),
        out: torch.Tensor | None = None,
    ) -> None:
        """Update fp32 weights and moments, then the averages and the cast of the weights.

        Args:
            numbers: Of this step; rounded as DeepSpeed's Adam does, or as torch's.
            weight: fp32; ``None`` where the weights are split into ``high`` and ``low``.
            high: bf16, the weights rounded to nearest.
            low: int16, their low halves (``SplitMasters``).
            exp_avg: fp32; with ``TorchAdamNumbers`` bf16 too, which is rounded by chance, or coded,
                where ``l2`` must be 0.
            exp_avg_sq: As ``exp_avg``.
            gradient: fp32, bf16 or fp16.
            noise: What the chance is drawn from, a number of 32 bits (``noise_key``).
            position: Of the first element in that noise.
            averages: Shadows, as long as the weights.
            out: Receives the weights in its own dtype.
        """
        if isinstance(numbers, AdamNumbers):
            name, structure = "zerotune_adam", _ADAM_STRUCTURE
        else:
            name, structure = "zerotune_adam_torch", _TORCH_ADAM_STRUCTURE
        coded: tuple[Any, ...] = ()
        moments: list[Any] = [exp_avg, exp_avg_sq]
        if isinstance(exp_avg, CodedMoment):
            name = "zerotune_adam_coded"
            coded = (ctypes.byref(_Coded(*(part for each in moments for part in _parts(each)))),)
        kept = _Kept(
            *(None if t is None else t.data_ptr() for t in (weight, high, low)),
            *(None if coded else t.data_ptr() for t in moments),
            0 if coded else _DTYPE_CODES[moments[0].dtype],
            noise,
            position,
        )
        shadows = (_Average * max(len(averages), 1))(
            *(_Average(average.shadow.data_ptr(), average.weight) for average in averages)
        )
        getattr(self._library, name)(
            ctypes.c_int64(gradient.numel()),
            ctypes.byref(kept),
            _pointer(gradient),
            ctypes.c_int32(_DTYPE_CODES[gradient.dtype]),
            ctypes.byref(structure(*attrs.astuple(numbers))),
            ctypes.c_int32(len(averages)),
            shadows,
            _pointer(out),
            ctypes.c_int32(0 if out is None else _DTYPE_CODES[out.dtype]),
            ctypes.c_int32(self.threads),
            *coded,
        )

    def take(self, source: torch.Tensor, *, into: torch.Tensor | None = None) -> float:
        """Copy a gradient and sum up its squares, exactly (in fp64), in one pass.

        Args:
            source: fp32, bf16 or fp16.
            into: Of the same dtype and length; nothing is copied when not given.

        Returns:
            The sum of squares; not finite if and only if an element is not.
        """
        total: float = self._library.zerotune_take(
            ctypes.c_int64(source.numel()),
            _pointer(source),
            ctypes.c_int32(_DTYPE_CODES[source.dtype]),
            _pointer(into),
            ctypes.c_int32(self.threads),
        )
        return total


def _parts(moment: CodedMoment) -> Iterator[Any]:
    book = moment.book
    yield moment.codes.data_ptr()
    yield moment.scales.data_ptr()
    yield _Codes(*(t.data_ptr() for t in (book.values, book.middles, book.lowest)))


def _pointer(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


@cache
def load_host_step() -> HostStepOp:
    """The op, compiled first if need be."""
    with building():
        status = host_step_status()
        if status.state != "locked":
            status.check_usable()
        with naming_the_cause(NAME):
            return HostStepOp(library=_compiled_library())


def host_step_status(*, toolchain: Toolchain | None = None) -> OpStatus:
    """Whether the op is built, can be, or why not. Nothing is compiled.

    Args:
        toolchain: Compilers and libraries; those of this machine by default.
    """
    folder = build_folder(_build_name())
    library, lock = built_library(folder), BuildLock.on(folder)
    if lock is not None:
        return OpStatus.of(NAME, PURPOSE, "locked", lock.diagnose(), library=library)
    tools = toolchain or detect_compilers()
    # torch asks for ninja even where there is nothing to compile.
    found = missing_ninja(tools) or (missing_compiler(tools) if library is None else None)
    state: OpState = "blocked" if found else "buildable" if library is None else "built"
    return OpStatus.of(NAME, PURPOSE, state, found, library=library)


def _compiled_library() -> Path:
    from torch.utils import cpp_extension

    name, folder = _build_name(), build_folder(_build_name())
    folder.mkdir(parents=True, exist_ok=True)
    cpp_extension.load(
        name=name,
        sources=[str(_source_in(folder))],
        extra_cflags=_flags(),
        extra_ldflags=["-fopenmp"],
        build_directory=str(folder),
        is_python_module=False,
    )
    return folder / f"{name}.so"


def _source_in(folder: Path) -> Path:
    """The source beside what is made of it: ninja builds again whatever comes from elsewhere."""
    path = folder / _CPP.name
    if not path.exists() or path.read_bytes() != _CPP.read_bytes():
        write_atomically(path, _CPP.read_bytes())
    return path


def _flags() -> list[str]:
    return [*_CXX_FLAGS, *_ARCHITECTURE.get(platform.machine(), ("-mcpu=native",))]


@cache
def _build_name() -> str:
    """Named after its source: another version is another library, never a stale one."""
    digest = hashlib.sha256(_CPP.read_bytes() + " ".join(_flags()).encode())
    return f"zerotune_{NAME}_{digest.hexdigest()[:12]}"
