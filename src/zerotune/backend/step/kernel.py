"""``HostStepOp``: zerotune's only compiled op, which fuses Adam, the EMAs and the cast.

``torch.compile`` could generate such a kernel, but its kernel was 10 % slower in an experiment, and
every combination of EMAs, dtypes and thread counts would need a separate kernel. The compiler would
also decide which products become FMAs, which changes the last bit. The op is therefore written in
C++ (``host_step.cpp``) and uses neither torch nor Python. The op compiles within seconds, and is
stored in the same folder as DeepSpeed's ops.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
import threading
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import attrs
import torch

from zerotune._util.files import write_atomically
from zerotune.backend.ema_update import EMAUpdate
from zerotune.backend.op_builds import BuildLock, build_folder, building, built_library
from zerotune.backend.op_causes import naming_the_cause
from zerotune.backend.ops import OpState, OpStatus, missing_compiler, missing_ninja
from zerotune.platform.toolchain import Toolchain, detect_compilers

NAME: Final = "host_step"
PURPOSE: Final = "fused Adam and AdamW in host memory: clip, update, EMA and cast in one pass"
_CPP: Final = Path(__file__).with_name("host_step.cpp")
_CXX_FLAGS: Final = (
    "-O3",
    "-fopenmp",
    # Every FMA is explicit; an additional one would round differently from DeepSpeed's Adam.
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
)
_ARCHITECTURE: Final = {
    "x86_64": ("-march=native", "-mprefer-vector-width=512"),
    "AMD64": ("-march=native", "-mprefer-vector-width=512"),
}
_NONE_SPARED_UP_TO: Final = 2
"""Largest number of cores of which none is left free."""
_DTYPE_CODES: Final = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}


@attrs.frozen(kw_only=True)
class AdamNumbers:
    """Coefficients of one Adam step in DeepSpeed's arithmetic; converted to fp32 in C++."""

    factor: float
    """Multiplier for the gradient, which combines clipping and the loss scale."""
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
    """``-lr * weight_decay`` if decoupled, or ``weight_decay`` if L2."""
    decays: int
    """Kind of weight decay: 0 none, 1 decoupled, 2 L2."""


@attrs.frozen(kw_only=True)
class TorchAdamNumbers:
    """Coefficients of one Adam or AdamW step in torch's arithmetic."""

    factor: float
    """Multiplier for the gradient, which combines clipping and the loss scale."""
    decay: float
    """``1 - lr * weight_decay`` if weight decay is decoupled; otherwise 1."""
    l2: float
    """``weight_decay`` if weight decay is L2; otherwise 0."""
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
class EMAPart:
    """Elements of an EMA to update with the weights: ``tensor.lerp_(weights, weight)``."""

    tensor: torch.Tensor
    """The elements, fp32, 1-D, contiguous, on the CPU."""
    weight: float


@attrs.frozen(eq=False)
class Piece:
    """A range of a slab's elements, which a step updates together with other ranges."""

    start: int
    stop: int
    emas: Sequence[EMAPart] = ()
    """EMAs of exactly these elements; all pieces of a call have equally many."""
    position: int = 0
    """Index of the first element in the noise sequence."""
    is_single: bool = False
    """Whether ZeRO-2 updates these elements with scalar code."""


def ema_parts(
    updates: Sequence[EMAUpdate], key: str, start: int, stop: int
) -> Iterator[tuple[int, int, list[EMAPart]]]:
    """Divide elements of a fragment where an EMA in a file must be opened anew.

    Args:
        updates: The updates of these elements.
        key: Key of the fragment.
        start: First element in the fragment.
        stop: Index one past the last element.

    Yields:
        First element, index one past the last element, and the EMAs of these elements, which are
        valid until the next iteration.
    """
    edges = {edge for each in updates for edge in each.tensors.edges(key) if start < edge < stop}
    for first, last in pairwise((start, *sorted(edges), stop)):
        yield (
            first,
            last,
            [
                EMAPart(tensor=update.tensors.open(key, first, last), weight=update.weight)
                for update in updates
            ],
        )


def _structure(numbers: type[attrs.AttrsInstance]) -> type[ctypes.Structure]:
    """The C structure for a class of coefficients: fp32, and int32 for ``int``."""
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
    ]


class _Piece(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("start", "size", "position")]


class _Taken(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_int64), ("source", ctypes.c_void_p), ("target", ctypes.c_void_p),
        ("squares", ctypes.c_double),
    ]  # fmt: skip


class _Coded(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_void_p) for name in ("first", "first_scale", "second", "second_scale")
    ]


@attrs.frozen(kw_only=True, eq=False)
class CodedMoment:
    """A moment stored in one byte per weight."""

    codes: torch.Tensor
    """Codes, uint8; the first code is at the start of a block."""
    scales: torch.Tensor
    """Scale of each block, fp32."""
    signed: bool
    """Whether the moment can be negative."""

    @property
    def addresses(self) -> tuple[int, int]:
        """Addresses of the codes and the scales."""
        return self.codes.data_ptr(), self.scales.data_ptr()


class _EMA(ctypes.Structure):
    _fields_ = [("tensor", ctypes.c_void_p), ("weight", ctypes.c_float)]


class HostStepOp:
    """The compiled kernels, called with tensors.

    Calls release the GIL. Every tensor must be 1-D, contiguous and on the CPU.
    """

    def __init__(self, *, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._spared = threading.local()

    @property
    def threads(self) -> int:
        """Number of threads that a call from this thread uses."""
        count = torch.get_num_threads()
        return self.beside(count) if vars(self._spared) else count

    @staticmethod
    def beside(threads: int) -> int:
        """Return how many threads a call uses if one core is left free.

        Args:
            threads: Total number of threads.
        """
        return threads - 1 if threads > _NONE_SPARED_UP_TO else threads

    def spare_a_core(self) -> None:
        """Make later calls from this thread leave one core free for concurrent work.

        On two cores, none is left free, because a call takes longer on one core than on two cores
        that it shares with other work.
        """
        self._spared.core = True

    def knows(self, dtype: torch.dtype) -> bool:
        """Return whether the kernels support ``dtype`` for gradients and weights."""
        kind = _DTYPE_CODES.get(dtype, 0)
        return bool(kind and self._library.zerotune_knows(ctypes.c_int32(kind)))

    def step(
        self,
        numbers: AdamNumbers | TorchAdamNumbers,
        pieces: Sequence[Piece],
        *,
        weight: torch.Tensor | None = None,
        high: torch.Tensor | None = None,
        low: torch.Tensor | None = None,
        exp_avg: torch.Tensor | CodedMoment,
        exp_avg_sq: torch.Tensor | CodedMoment,
        gradient: torch.Tensor,
        noise: int = 0,
        out: torch.Tensor | None = None,
    ) -> None:
        """Update weights, moments and EMAs, and cast the weights.

        Args:
            numbers: Coefficients of the step, in DeepSpeed's or torch's arithmetic.
            pieces: Ranges of elements to update; those of coded moments start at a block.
            weight: Weights, fp32; ``None`` if split into ``high`` and ``low``.
            high: Weights rounded to nearest, bf16.
            low: Low 16 bits of the weights (``SplitMasters``), int16.
            exp_avg: First moment, fp32. With ``TorchAdamNumbers``, ``exp_avg`` may also be bf16
                (rounded stochastically) or coded (only with ``l2`` = 0).
            exp_avg_sq: Second moment, like ``exp_avg``.
            gradient: Gradient, fp32, bf16 or fp16.
            noise: 32-bit seed for stochastic rounding (``noise_key``).
            out: Tensor that receives the weights, cast to the tensor's dtype.
        """
        name, structure = "zerotune_adam_torch", _TORCH_ADAM_STRUCTURE
        if isinstance(numbers, AdamNumbers):
            name, structure = "zerotune_adam", _ADAM_STRUCTURE
        coded: tuple[Any, ...] = ()
        moments: list[Any] = [exp_avg, exp_avg_sq]
        if isinstance(exp_avg, CodedMoment):
            name = "zerotune_adam_coded"
            coded = (ctypes.byref(_Coded(*(at for each in moments for at in each.addresses))),)
            moments = [None, None]
        kept = _Kept(
            *(None if t is None else t.data_ptr() for t in (weight, high, low, *moments)),
            0 if coded else _DTYPE_CODES[moments[0].dtype],
            noise,
        )
        emas = [(ema.tensor.data_ptr(), ema.weight) for piece in pieces for ema in piece.emas]
        getattr(self._library, name)(
            ctypes.c_int64(len(pieces)),
            _array(_Piece, [(p.start, p.stop - p.start, p.position) for p in pieces]),
            ctypes.byref(kept),
            _pointer(gradient),
            ctypes.c_int32(_DTYPE_CODES[gradient.dtype]),
            ctypes.byref(structure(*attrs.astuple(numbers))),
            ctypes.c_int32(len(pieces[0].emas)),
            _array(_EMA, emas),
            _pointer(out),
            ctypes.c_int32(0 if out is None else _DTYPE_CODES[out.dtype]),
            ctypes.c_int32(self.threads),
            *coded,
        )

    def take(
        self, sources: Sequence[torch.Tensor], *, into: Sequence[torch.Tensor | None] = ()
    ) -> list[float]:
        """Copy gradients and sum the squares of each in fp64, in one pass over memory.

        Args:
            sources: Gradients of one dtype, fp32, bf16 or fp16.
            into: Tensors for the copies, of the same dtype and lengths; default: no copies.

        Returns:
            The sums of squares; not finite if and only if an element is not finite.
        """
        targets = into or [None] * len(sources)
        taken = _array(
            _Taken,
            [
                (source.numel(), source.data_ptr(), None if to is None else to.data_ptr())
                for source, to in zip(sources, targets, strict=True)
            ],
        )
        self._library.zerotune_take(
            ctypes.c_int64(len(sources)),
            taken,
            ctypes.c_int32(_DTYPE_CODES[sources[0].dtype]),
            ctypes.c_int32(self.threads),
        )
        return [each.squares for each in taken]

    def decode(self, moment: CodedMoment) -> torch.Tensor:
        """Return the fp32 numbers that codes represent, equal to ``classes.decode``.

        Args:
            moment: Codes and scales.
        """
        numbers = torch.empty(moment.codes.numel())
        self._recode("zerotune_decode", moment, numbers)
        return numbers

    def encode(self, numbers: torch.Tensor, *, into: CodedMoment) -> None:
        """Encode numbers with the nearest codes; numbers returned by ``decode`` stay as they are.

        Args:
            numbers: Numbers to encode, fp32.
            into: Receives the codes and scales.
        """
        self._recode("zerotune_encode", into, numbers)

    def _recode(self, name: str, moment: CodedMoment, numbers: torch.Tensor) -> None:
        getattr(self._library, name)(
            ctypes.c_int64(numbers.numel()),
            *map(ctypes.c_void_p, moment.addresses),
            ctypes.c_int32(moment.signed),
            _pointer(numbers),
            ctypes.c_int32(self.threads),
        )

    def join(self, *, high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
        """Return the fp32 weights that are split into ``high`` and ``low``, as in ``step``.

        Args:
            high: Weights rounded to nearest, bf16.
            low: Low 16 bits of the weights, int16.
        """
        weights = torch.empty(high.numel())
        self._library.zerotune_join(*self._split_weights(weights, high, low))
        return weights

    def split(self, weights: torch.Tensor, *, high: torch.Tensor, low: torch.Tensor) -> None:
        """Split fp32 weights; the opposite of ``join``.

        Args:
            weights: The weights, fp32.
            high: Receives the weights rounded to nearest, bf16.
            low: Receives the low 16 bits of the weights, int16.
        """
        self._library.zerotune_split(*self._split_weights(weights, high, low))

    def _split_weights(
        self, weights: torch.Tensor, high: torch.Tensor, low: torch.Tensor
    ) -> tuple[Any, ...]:
        pointers = (_pointer(tensor) for tensor in (high, low, weights))
        return ctypes.c_int64(weights.numel()), *pointers, ctypes.c_int32(self.threads)


def _array(kind: Any, items: Sequence[tuple[Any, ...]]) -> Any:
    return (kind * len(items))(*items)


def _pointer(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


@cache
def load_host_step() -> HostStepOp:
    """Return the op; compile it first if needed."""
    with building():
        status = host_step_status()
        if status.state != "locked":
            status.check_usable()
        with naming_the_cause(NAME):
            return HostStepOp(library=_compiled_library())


def host_step_status(*, toolchain: Toolchain | None = None) -> OpStatus:
    """Report whether the op is built or can be built; if neither, report why. Nothing is compiled.

    Args:
        toolchain: Compilers and libraries; default: those of this machine.
    """
    folder = build_folder(_build_name())
    library, lock = built_library(folder), BuildLock.on(folder)
    if lock is not None:
        return OpStatus.of(NAME, PURPOSE, "locked", lock.diagnose(), library=library)
    tools = toolchain or detect_compilers()
    # torch requires ninja even if nothing is to be compiled.
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
    """Copy the source to the build folder, since ninja rebuilds if its path changes."""
    path = folder / _CPP.name
    if not path.exists() or path.read_bytes() != _CPP.read_bytes():
        write_atomically(path, _CPP.read_bytes())
    return path


def _flags() -> list[str]:
    return [*_CXX_FLAGS, *_ARCHITECTURE.get(platform.machine(), ("-mcpu=native",))]


@cache
def _build_name() -> str:
    """Name that contains a digest of source and flags, so that the library is never stale."""
    digest = hashlib.sha256(_CPP.read_bytes() + " ".join(_flags()).encode())
    return f"zerotune_{NAME}_{digest.hexdigest()[:12]}"
