"""Facts about a model that a plan needs, without loading the model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, Final

import attrs

from zerotune._util.text import whole
from zerotune.errors import InvalidValueError
from zerotune.plan.values import as_tuple
from zerotune.plan.work import ActivationFacts, ArithmeticFacts


@attrs.frozen(kw_only=True)
class ParameterFacts:
    """Name, shape and storage of one parameter of a model."""

    name: str
    """Dotted name, as in ``named_parameters()``."""
    shape: tuple[int, ...]
    """Full, unpartitioned shape."""
    trainable: bool = True
    """Whether it requires a gradient."""
    storage: str | None = None
    """Storage dtype of a quantized weight, such as ``"nf4"`` or ``"int8"``; ``None`` for a weight
    in the plan's precision."""
    stored_bytes: int | None = None
    """Bytes of a quantized weight, including its scales."""

    @cached_property
    def numel(self) -> int:
        """Number of elements of the unquantized weight; 1 for a 0-d parameter."""
        return math.prod(self.shape)

    def nbytes(self, element_bytes: int) -> int:
        """Return the size of the parameter in bytes.

        Args:
            element_bytes: Bytes per element of an unquantized parameter.
        """
        return element_bytes * self.numel if self.stored_bytes is None else self.stored_bytes

    def quantized(self, storage: str) -> ParameterFacts:
        """Return the same weight, frozen and quantized to one of ``STORAGES``.

        Args:
            storage: Storage dtype, such as ``"nf4"``.
        """
        per_element, per_row = STORAGES[storage]
        taken = math.ceil(per_element * self.numel + per_row * (self.shape[0] if self.shape else 1))
        return attrs.evolve(self, trainable=False, storage=storage, stored_bytes=taken)

    def adapter(self, *, rank: int, ends: tuple[str, ...]) -> Iterator[ParameterFacts]:
        """Yield this weight's two LoRA matrices, named as in peft; nothing if no suffix matches.

        Args:
            rank: Rank of the adapter.
            ends: Suffixes of the dotted names of layers to adapt.
        """
        layer, _, kind = self.name.rpartition(".")
        named = any(layer == end or layer.endswith(f".{end}") for end in ends)
        if kind != "weight" or not named or len(self.shape) < 2:
            return
        outputs, inputs, *kernel = self.shape
        down, up = (rank, inputs, *kernel), (outputs, rank, *(1 for _ in kernel))
        yield ParameterFacts(name=f"{layer}.lora_A.weight", shape=down)
        yield ParameterFacts(name=f"{layer}.lora_B.weight", shape=up)

    @classmethod
    def of(cls, name: str, parameter: Any) -> ParameterFacts:
        """Read the name, shape and storage of a plain, partitioned or quantized parameter.

        Args:
            name: Dotted name of the parameter.
            parameter: A plain, partitioned or quantized parameter.
        """
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        facts = cls(name=name, shape=shape, trainable=bool(parameter.requires_grad))
        kind = type(parameter)
        if kind.__name__ == "Params4bit" and getattr(parameter, "quant_state", None) is not None:
            state = parameter.quant_state
            return facts._kept(str(state.quant_type), state.shape, inner_tensors(parameter))
        if kind.__name__ == "Int8Params" and str(parameter.dtype) == "torch.int8":
            # The first forward pass moves the scales from the parameter to the layer.
            return facts.quantized("int8")
        if kind.__name__ == "GGUFParameter":
            storage = f"gguf-{parameter.quant_type.name.lower()}"
            return facts._kept(storage, parameter.quant_shape, [("", parameter)])
        inner = tuple(inner_tensors(parameter))
        names = [str(each.dtype).removeprefix("torch.") for _, each in inner]
        codes = next((n for n in names if n == "int8" or n.startswith("float8")), "int4")
        if inner[0][1] is parameter and not codes.startswith("float8"):
            return facts
        return facts._kept("fp8" if codes.startswith("float8") else codes, shape, inner)

    def _kept(
        self, storage: str, shape: Iterable[int], inner: Iterable[tuple[str, Any]]
    ) -> ParameterFacts:
        """Return facts of a quantized weight, with the bytes of its elements and scales."""
        taken = sum(int(getattr(t, "ds_numel", t.numel())) * t.element_size() for _, t in inner)
        return attrs.evolve(self, shape=tuple(shape), storage=storage, stored_bytes=taken)


def is_wrapper(weight: Any) -> bool:
    """Return whether a weight wraps other tensors, so that ``dtype`` is that of decoded values.

    Args:
        weight: The weight, or its class.
    """
    return hasattr(weight, "__tensor_flatten__")


def inner_tensors(tensor: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the tensors that store a weight, each with the end of its name.

    A weight of torchao or optimum-quanto wraps its codes and scales, and bitsandbytes keeps the
    scales of 4-bit codes in an attribute. Any other weight is its only tensor.

    Args:
        tensor: The weight.
        name: Text before the names.
    """
    if is_wrapper(tensor):
        for attribute in tensor.__tensor_flatten__()[0]:
            yield from inner_tensors(getattr(tensor, attribute), f"{name}.{attribute}")
        return
    yield name, tensor
    if (state := getattr(tensor, "quant_state", None)) is not None:
        yield f"{name}.absmax", state.absmax
        if state.nested:
            yield f"{name}.state2.absmax", state.state2.absmax


STORAGES: Final[Mapping[str, tuple[float, float]]] = {
    # Half a byte, and an fp32 scale for every 64 elements.
    "nf4": (0.5 + 4 / 64, 0),
    "fp4": (0.5 + 4 / 64, 0),
    # A byte, and an fp32 scale for every row.
    "int8": (1, 4),
    "fp8": (1, 4),
}
"""Bytes per element and bytes per output row of weights quantized by bitsandbytes or torchao, by
storage dtype."""


@attrs.frozen(kw_only=True)
class BlockFacts:
    """A module class with several instances in a model."""

    class_name: str
    """Class name, such as ``"BasicTransformerBlock"``."""
    count: int
    """Number of modules of this class."""
    numel: int
    """Number of elements in the largest module of this class."""

    @classmethod
    def of(cls, module: Any) -> tuple[BlockFacts, ...]:
        """Find the innermost modules of block classes, and count them by class.

        Block classes are those in ``_repeated_blocks`` or ``_no_split_modules`` of the model, and
        ``ResnetBlock2D``.

        Args:
            module: The model.
        """
        names = {"ResnetBlock2D"}
        for attribute in ("_no_split_modules", "_repeated_blocks"):
            names.update(getattr(module, attribute, None) or ())
        found: dict[str, list[int]] = {}
        for part in module.modules():
            inner = (type(child).__name__ in names for child in part.modules() if child is not part)
            if type(part).__name__ in names and not any(inner):
                sizes = (math.prod(getattr(p, "ds_shape", p.shape)) for p in part.parameters())
                found.setdefault(type(part).__name__, []).append(sum(sizes))
        return tuple(
            cls(class_name=name, count=len(sizes), numel=max(sizes))
            for name, sizes in sorted(found.items())
        )


ATTENTION_PROJECTIONS: Final = (
    "to_q",
    "to_k",
    "to_v",
    "to_out.0",
    "add_q_proj",
    "add_k_proj",
    "add_v_proj",
    "to_add_out",
    "q_proj",
    "k_proj",
    "v_proj",
    "out_proj",
    "SelfAttention.q",
    "SelfAttention.k",
    "SelfAttention.v",
    "SelfAttention.o",
)
"""Names of attention projections in diffusers' models, CLIP and T5."""


def check_storage(storage: str | None) -> None:
    """Raise ``InvalidValueError`` unless ``storage`` is ``None`` or in ``STORAGES``."""
    if storage is None or storage in STORAGES:
        return
    raise InvalidValueError(
        "is not a supported dtype for a quantized base model",
        f"use one of {', '.join(STORAGES)}, or none",
        "base_dtype",
        storage,
    )


def latent_frames(frames: int, *, per_latent: int) -> int:
    """Return the number of latent frames of a clip.

    Args:
        frames: Number of frames in the clip; the first frame has its own latent.
        per_latent: Number of frames in each latent after the first.
    """
    return (frames - 1) // per_latent + 1


@attrs.frozen(kw_only=True)
class ModelFacts:
    """Names and shapes of a model's parameters, from which every buffer size follows."""

    parameters: tuple[ParameterFacts, ...] = attrs.field(converter=as_tuple)
    name: str = "model"
    activations: ActivationFacts | None = None
    """Activation memory of a training step; ``None`` if unknown."""
    arithmetic: ArithmeticFacts | None = None
    """Arithmetic of a training step; ``None`` if unknown."""
    blocks: tuple[BlockFacts, ...] = ()
    """Innermost repeated modules; empty if unknown."""
    units: tuple[str, ...] = ()
    """Dotted names of modules that are each streamed as one unit."""
    frames_per_latent: int | None = None
    """Number of frames in each latent frame after the first; ``None`` for an image model."""
    buffers: int = 0
    """Bytes of buffers, such as tables of positions, which keep their dtype on the device."""

    def positions(self, *, height: int, width: int, frames: int | None = None) -> int:
        """Return the size that activations scale with: image pixels times latent frames.

        Args:
            height: Pixels.
            width: Pixels.
            frames: Number of frames of a clip; by default one.
        """
        return height * width * latent_frames(frames or 1, per_latent=self.frames_per_latent or 1)

    @classmethod
    def from_module(cls, module: Any) -> ModelFacts:
        """Read the facts of a ``torch.nn.Module`` on any device, including ``meta``.

        The facts contain the full shape of parameters that ``deepspeed.zero.Init`` partitions, and
        the original shape of quantized parameters.

        Args:
            module: The module; its weights are not read.
        """
        return cls(
            name=type(module).__name__,
            parameters=[
                ParameterFacts.of(name, parameter) for name, parameter in module.named_parameters()
            ],
            blocks=BlockFacts.of(module),
            units=repeated_modules(module),
            buffers=sum(buffer.nbytes for buffer in module.buffers()),
        )

    @classmethod
    def from_shapes(
        cls, shapes: Iterable[tuple[str, tuple[int, ...]]], *, name: str = "model"
    ) -> ModelFacts:
        """Build the facts of a fully trainable model from ``(name, shape)`` pairs.

        Args:
            shapes: Name and shape of each parameter.
            name: Name of the model, for reports.
        """
        return cls(
            name=name,
            parameters=[ParameterFacts(name=key, shape=tuple(shape)) for key, shape in shapes],
        )

    def with_adapters(
        self, rank: int, *, targets: Iterable[str] | None = None, base_dtype: str | None = None
    ) -> ModelFacts:
        """Return the facts of the frozen model with trainable LoRA adapters.

        Args:
            rank: Rank of the adapters.
            targets: Suffixes of the adapted layers' dotted names, as in ``add_lora``; by default
                the attention projections.
            base_dtype: Storage dtype of the frozen matrices, one of ``STORAGES``; by default the
                plan's precision.

        Raises:
            InvalidValueError: The rank is not a positive integer, no layer matches ``targets``, or
                the dtype is unknown.
        """
        check_storage(base_dtype)
        whole(rank, key="lora", fix="write the rank, such as 16")
        ends = tuple(ATTENTION_PROJECTIONS if targets is None else targets)
        adapters = [
            factor for each in self.parameters for factor in each.adapter(rank=rank, ends=ends)
        ]
        if not adapters:
            raise InvalidValueError(
                f"no layer of {self.name} has a name with one of these endings",
                "write the suffixes of layer names, such as to_q",
                "lora_targets",
                ends,
            )
        frozen = [
            each.quantized(base_dtype)
            # Quantization packages convert only the weights of linear layers.
            if base_dtype is not None and len(each.shape) == 2 and each.name.endswith(".weight")
            else attrs.evolve(each, trainable=False)
            for each in self.parameters
        ]
        name = f"{self.name} with adapters of rank {rank}"
        if base_dtype is not None:
            name += f" on {base_dtype}"
        work = None if self.arithmetic is None else self.arithmetic.of_frozen_weights
        return attrs.evolve(self, parameters=[*frozen, *adapters], name=name, arithmetic=work)

    @cached_property
    def trainable(self) -> tuple[ParameterFacts, ...]:
        """The parameters that the optimizer updates."""
        return tuple(parameter for parameter in self.parameters if parameter.trainable)

    @cached_property
    def numel(self) -> int:
        """Number of elements of all parameters."""
        return sum(parameter.numel for parameter in self.parameters)

    @cached_property
    def trainable_numel(self) -> int:
        """Number of elements of the trainable parameters."""
        return sum(parameter.numel for parameter in self.trainable)

    @cached_property
    def largest(self) -> int:
        """Number of elements of the largest parameter; 0 for a model without parameters."""
        return max((parameter.numel for parameter in self.parameters), default=0)

    @cached_property
    def largest_trainable(self) -> int:
        """Number of elements of the largest trainable parameter; 0 if there is none."""
        return max((parameter.numel for parameter in self.trainable), default=0)

    @cached_property
    def storages(self) -> tuple[str, ...]:
        """Storage dtypes of the quantized weights; empty if no weight is quantized."""
        return tuple(sorted({each.storage for each in self.parameters if each.storage}))

    @cached_property
    def largest_quantized(self) -> int:
        """Number of elements of the largest quantized weight, which is dequantized for use."""
        return max((each.numel for each in self.parameters if each.storage), default=0)

    @cached_property
    def quantized_numel(self) -> int:
        """Number of elements of all quantized weights."""
        return sum(each.numel for each in self.parameters if each.storage)

    def weight_bytes(self, element_bytes: int, *, ranks: int = 1) -> int:
        """Return the bytes of all weights on one rank if each weight is split over ``ranks`` ranks.

        Args:
            element_bytes: Bytes per element of unquantized weights.
            ranks: Number of ranks over which each weight is split.
        """
        if not self.storages:
            return element_bytes * (self.numel if ranks == 1 else sum(self.parts(ranks)))
        return sum([-(-each.nbytes(element_bytes) // ranks) for each in self.parameters])

    def parts(self, ranks: int) -> tuple[int, ...]:
        """Return each parameter's partition size in elements, with padding, for ``ranks`` ranks."""
        # Cached, because every candidate of an advice sums the same thousands of parts.
        if ranks not in self._parts:
            self._parts[ranks] = tuple([-(-each.numel // ranks) for each in self.parameters])
        return self._parts[ranks]

    def trainable_parts(self, ranks: int) -> tuple[int, ...]:
        """Return ``parts`` for the trainable parameters only.

        Args:
            ranks: Number of ranks that share each parameter.
        """
        if self.trainable == self.parameters:
            return self.parts(ranks)
        return tuple([-(-each.numel // ranks) for each in self.trainable])

    @property
    def streamed(self) -> StreamedFacts:
        """``streamed_by`` with the default units, in a precision of 2 bytes per weight."""
        return self.streamed_by()

    @cached_property
    def resident(self) -> StreamedFacts:
        """``streamed`` without units: all weights stay on the device."""
        return attrs.evolve(self, units=()).streamed

    def streamed_by(self, named: Iterable[str] = (), *, element_bytes: int = 2) -> StreamedFacts:
        """Return the size of each streamed unit, and of the weights that stay on the device.

        Args:
            named: Dotted names of modules; if none matches, ``units`` are streamed.
            element_bytes: Bytes per element of unquantized weights.
        """
        names = tuple(parameter.name for parameter in self.parameters) if named else ()
        found = [unit for unit in named if any(name.startswith(f"{unit}.") for name in names)]
        outermost = (
            unit for unit in found if not any(unit.startswith(f"{other}.") for other in found)
        )
        units = tuple(outermost) or self.units
        # Cached, because every candidate of an advice sums the same thousands of parameters.
        if (units, element_bytes) not in self._streamed:
            self._streamed[units, element_bytes] = self._divided(units, element_bytes)
        return self._streamed[units, element_bytes]

    def _divided(self, units: Collection[str], element_bytes: int) -> StreamedFacts:
        elements = {name: [0, 0] for name in units}
        rest = [0, 0]
        for each in self.parameters:
            numel = -(-each.nbytes(element_bytes) // element_bytes)
            aligned = -(-numel // UNIT_ALIGNED) * UNIT_ALIGNED
            name = each.name
            while name and name not in elements:
                name = name.rpartition(".")[0]
            if name:
                elements[name][each.trainable] += aligned
            else:
                rest[each.trainable] += aligned if each.trainable else numel
        # Each unit streams the larger of its two kinds, frozen or trained.
        kinds = [(frozen, trained) for frozen, trained in elements.values() if frozen or trained]
        beside = sum(trained for frozen, trained in kinds if frozen >= trained)
        return StreamedFacts(
            trained=tuple(trained for frozen, trained in kinds if trained > frozen),
            frozen=tuple(frozen for frozen, trained in kinds if frozen >= trained),
            resident_trained=rest[1] + beside,
            resident_frozen=rest[0] + sum(frozen for frozen, trained in kinds if trained > frozen),
        )

    @cached_property
    def _parts(self) -> dict[int, tuple[int, ...]]:
        return {}

    @cached_property
    def _streamed(self) -> dict[tuple[tuple[str, ...], int], StreamedFacts]:
        return {}


RESIDENT_UNITS: Final = 32
"""Largest number of units of weights that stay on the device in the host engine. With more units,
which are each updated and uploaded as a whole, the next forward pass begins earlier."""
SMALLEST_UNIT: Final = 2**20
"""Smallest size of such a unit, in elements. An update of fewer takes less than a
millisecond, about as long as handing it to a thread."""
UNIT_ALIGNED: Final = 256
"""Alignment of each parameter in a streamed unit, in elements: one block of 8-bit moments."""


def resident_units(elements: int) -> int:
    """Return how many units the host engine makes of weights that stay on the device.

    Args:
        elements: Number of trained elements.
    """
    return max(1, min(RESIDENT_UNITS, elements // SMALLEST_UNIT))


@attrs.frozen(kw_only=True)
class StreamedFacts:
    """Numbers of streamed and resident elements, rounded up to multiples of ``UNIT_ALIGNED``.

    A quantized weight counts as the elements of the plan's precision that occupy as many bytes.
    """

    trained: tuple[int, ...]
    """Number of elements of each streamed unit with trained weights."""
    frozen: tuple[int, ...]
    """Number of elements of each streamed unit with frozen weights."""
    resident_trained: int
    """Number of trained elements that stay on the device."""
    resident_frozen: int
    """Number of frozen elements that stay on the device, without padding."""

    @cached_property
    def units(self) -> tuple[int, ...]:
        """Number of elements of each streamed unit."""
        return (*self.trained, *self.frozen)

    @cached_property
    def total(self) -> int:
        """Number of elements of all streamed units."""
        return sum(self.units)

    @property
    def trained_total(self) -> int:
        """Number of all trained elements."""
        return sum(self.trained) + self.resident_trained


UNET_BLOCKS: Final = frozenset({"BasicTransformerBlock", "ResnetBlock2D"})
"""Blocks of diffusers' U-Nets."""


def repeated_modules(module: Any) -> tuple[str, ...]:
    """Return the dotted names of repeated modules, except those inside another repeated module.

    Repeated modules are the blocks that diffusers marks as repeated, and the blocks of U-Nets. In a
    model without such blocks, modules of the same class in one list count as repeated.
    """
    classes = set(UNET_BLOCKS)
    for part in module.modules():
        classes.update(getattr(part, "_repeated_blocks", None) or ())
    return outermost_modules(module, classes) or outermost_modules(module, _in_a_row(module))


def outermost_modules(module: Any, wanted: Collection[str]) -> tuple[str, ...]:
    """Return the dotted names of modules in ``wanted`` that have weights, without nested ones.

    Args:
        module: A ``torch.nn.Module``; only modules inside it are returned.
        wanted: Dotted names of modules, or names of their classes.
    """
    found: list[str] = []
    inside: set[int] = {id(module)}
    for name, part in module.named_modules():
        if id(part) in inside or not (name in wanted or type(part).__name__ in wanted):
            continue
        if any(math.prod(getattr(p, "ds_shape", p.shape)) for p in part.parameters()):
            found.append(name)
            inside.update(id(each) for each in part.modules())
    return tuple(found)


def _in_a_row(module: Any) -> set[str]:
    """Return names of classes outside ``torch.nn`` with several instances in one list."""
    classes: set[str] = set()
    for part in module.modules():
        if type(part).__name__ in ("ModuleList", "Sequential"):
            counts = Counter(type(child) for child in part.children())
            classes.update(
                kind.__name__
                for kind, count in counts.items()
                if count > 1 and not kind.__module__.startswith("torch.nn.")
            )
    return classes
