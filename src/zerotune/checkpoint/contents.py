"""Contents of a checkpoint: each rank's tensors, and the manifest entries for the engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

import attrs
import torch

from zerotune.backend.fragments import StateFormat
from zerotune.checkpoint.generators import GENERATOR_TEXT, capture_generators
from zerotune.checkpoint.manifest import STATE_DTYPES
from zerotune.checkpoint.tensors import WEIGHTS, Subject, TensorFile, TensorSpec
from zerotune.errors import CheckpointError

if TYPE_CHECKING:
    from zerotune.backend.engine import Engine
    from zerotune.backend.fragments import FragmentAddress, OptimizerStates

SHADOW: Final = "shadow/"

BUFFER: Final = "buffer/"

Tensors = Mapping[str, torch.Tensor]

_FP32: Final = StateFormat()


@runtime_checkable
class ShadowLike(Protocol):
    """Protocol for objects that are saved with the weights, such as ``zerotune.ema.EMAShadow``.

    A tensor that belongs to a fragment of the master weights is fp32, and its name is the
    fragment's ``FragmentAddress.key``. All other tensors are equal on every rank.
    """

    def state_dict(self) -> Tensors:
        """Return this rank's tensors by name, as views or read on access."""
        ...

    def load_state_dict(self, state: Tensors) -> None:
        """Load a saved state, one tensor at a time.

        Args:
            state: Tensors by name; each access reads a tensor from disk.
        """
        ...


def shadow_key(shadow: str, key: str) -> str:
    """Return the key under which a rank's file stores a shadow tensor without a fragment."""
    return f"{SHADOW}{shadow}/{key}"


def persistent_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a model's persistent buffers by dotted name; a shared buffer appears only once."""
    buffers: dict[int, tuple[str, torch.Tensor]] = {}
    for prefix, part in module.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set:
                buffers.setdefault(id(buffer), (f"{prefix}.{name}" if prefix else name, buffer))
    return dict(buffers.values())


@attrs.frozen(kw_only=True)
class Part:
    """A contiguous range of elements that this rank owns, in the file's tensor of a parameter."""

    name: str
    start: int
    numel: int
    form: StateFormat = _FP32
    shape: tuple[int, ...] | None = None
    """Shape of the file's tensor if it does not follow from the parameter's."""

    @classmethod
    def of(cls, address: FragmentAddress, form: StateFormat = _FP32) -> Part:
        """Return the range of elements that a fragment of the master weights covers.

        Args:
            address: The fragment. If it has coded states, it begins at a block.
            form: Format of the weights or of a state.
        """
        return cls(
            name=address.name,
            start=address.start // form.block,
            numel=-(-address.numel // form.block),
            form=form,
        )

    @classmethod
    def whole(cls, address: FragmentAddress, state: torch.Tensor) -> Part:
        """Return a state that belongs to a whole parameter.

        Args:
            address: The parameter.
            state: The state.
        """
        form = StateFormat(dtype=str(state.dtype).removeprefix("torch."), whole=True)
        shape = tuple(state.shape)
        return cls(name=address.name, start=0, numel=state.numel(), form=form, shape=shape)

    @property
    def key(self) -> str:
        """Key of the fragment, as in ``FragmentAddress.key``."""
        return f"{self.name}[{self.start}:{self.start + self.numel}]"


@attrs.frozen(kw_only=True)
class Counters:
    """The optimizer's step counter and scalar state for one parameter."""

    step: int | None
    scalars: Mapping[str, float]


@attrs.frozen(kw_only=True)
class RankShare:
    """Sizes of one rank's data, known to all ranks before writing starts."""

    parts: Mapping[Subject, tuple[Part, ...]]
    counters: Mapping[str, Counters]
    nbytes: int
    """Size in bytes of this rank's own file."""


@attrs.frozen(kw_only=True, eq=False)
class Portion:
    """Elements that one rank writes into a file shared by all ranks."""

    subject: Subject
    part: Part
    tensor: torch.Tensor


@attrs.frozen(kw_only=True, eq=False)
class RankContents:
    """Everything that one rank writes to a checkpoint."""

    parts: Mapping[Subject, tuple[Part, ...]]
    counters: Mapping[str, Counters]
    shadows: Mapping[str, Tensors]
    """Maps each shadow's name to its state; fragments may be read from disk on access."""
    others: Tensors
    """Buffers, generator states and shadow tensors without a fragment, for this rank's file."""
    metadata: Mapping[str, str]
    rank: int = 0
    world_size: int = 1
    portions: tuple[Portion, ...] | None = None
    """Copies of everything in ``parts``; ``None`` if the engine's tensors are written directly."""

    @classmethod
    def of(cls, engine: Engine, *, shadows: Mapping[str, ShadowLike], rng: bool) -> RankContents:
        """Describe what this rank saves from an engine, without reading the weights.

        Args:
            engine: Engine to save.
            shadows: EMA shadows by name.
            rng: Whether to capture the random number generators.
        """
        others = {
            BUFFER + name: buffer for name, buffer in persistent_buffers(engine.module).items()
        }
        # Replicas are identical, so one of them writes for all.
        owner = engine.group.is_main or not engine.master_weights.replicated
        addresses = {address.key: address for address in engine.master_weights.addresses}
        parts: dict[Subject, tuple[Part, ...]] = {}
        counters: dict[str, Counters] = {}
        if owner:
            parts, counters = _optimized(engine)
        emas: dict[str, Tensors] = {}
        for name, shadow in shadows.items():
            state = shadow.state_dict()
            emas[name] = state
            keys = [key for key in state if owner and key in addresses]
            if keys:
                subject = Subject(kind="shadow", of=name)
                parts[subject] = tuple(Part.of(addresses[key]) for key in keys)
            others |= {shadow_key(name, key): state[key] for key in state if key not in addresses}
        group = engine.group
        metadata = {"format": "pt", "rank": str(group.rank)}
        if rng:
            generators, metadata[GENERATOR_TEXT] = capture_generators()
            others |= generators
        return cls(
            parts=parts,
            counters=counters,
            shadows=emas,
            others=others,
            metadata=metadata,
            rank=group.rank,
            world_size=group.world_size,
        )

    def file(self) -> TensorFile:
        """Return the layout of this rank's own file."""
        return TensorFile.of(
            f"rank-{self.rank:05d}-of-{self.world_size:05d}.safetensors",
            Subject(kind="rank", of=str(self.rank)),
            [TensorSpec.of(key, tensor) for key, tensor in self.others.items()],
            metadata=self.metadata,
        )

    def share(self) -> RankShare:
        """Return the sizes from which all ranks compute the layout of the files."""
        return RankShare(parts=self.parts, counters=self.counters, nbytes=self.file().nbytes)

    def read(self, engine: Engine) -> Iterator[Portion]:
        """Yield the contents of ``parts``, reading one fragment of master weights at a time."""
        if self.portions is not None:
            yield from self.portions
            return
        if WEIGHTS in self.parts:
            for fragment in engine.master_weights.read():
                part = Part.of(fragment.address)
                yield Portion(subject=WEIGHTS, part=part, tensor=fragment.value)
                formats = fragment.formats
                for name, state in fragment.stored.items():
                    subject = Subject(kind="optimizer", of=name)
                    part = Part.of(fragment.address, formats[name])
                    yield Portion(subject=subject, part=part, tensor=state)
                for name, state in fragment.whole.items():
                    subject = Subject(kind="optimizer", of=name)
                    part = Part.whole(fragment.address, state)
                    yield Portion(subject=subject, part=part, tensor=state.view(-1))
        for name, tensors in self.shadows.items():
            subject = Subject(kind="shadow", of=name)
            for part in self.parts.get(subject, ()):
                yield Portion(subject=subject, part=part, tensor=tensors[part.key])

    def copied(self, engine: Engine) -> RankContents:
        """Copy the contents to host memory; training can then continue while they are written."""
        portions = tuple(
            attrs.evolve(portion, tensor=_copy(portion.tensor)) for portion in self.read(engine)
        )
        others = {key: _copy(tensor) for key, tensor in self.others.items()}
        return attrs.evolve(self, portions=portions, others=others, shadows={})


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _optimized(engine: Engine) -> tuple[dict[Subject, tuple[Part, ...]], dict[str, Counters]]:
    parts: dict[Subject, list[Part]] = {WEIGHTS: []}
    counters = {}
    for address, states in engine.master_weights.describe():
        parts[WEIGHTS].append(Part.of(address))
        whole = states.whole_of(address)
        own = {name: Part.whole(address, state) for name, state in whole.items()}
        own |= {name: Part.of(address, form) for name, form in states.formats.items()}
        _check_savable(states, own, address.name)
        for name, part in own.items():
            parts.setdefault(Subject(kind="optimizer", of=name), []).append(part)
        counters[address.name] = Counters(
            step=states.step_of(address.key), scalars=plain_data(states.scalars, address.name)
        )
    return {subject: tuple(some) for subject, some in parts.items()}, counters


def _check_savable(states: OptimizerStates, parts: Mapping[str, Part], name: str) -> None:
    if missing := [state for state in states.others if state not in parts]:
        raise CheckpointError(
            f"the optimizer states {', '.join(missing)} cannot be sharded like the weights, "
            "so they cannot be saved",
            "use an optimizer whose states have one element per weight, such as AdamW",
            name,
        )
    for state, part in parts.items():
        if part.form.dtype not in STATE_DTYPES:
            raise CheckpointError(
                f"optimizer state {state!r} is {part.form.dtype}; only fp32 and bf16 states "
                "can be saved",
                "use an optimizer with fp32 or bf16 states, such as AdamW",
                name,
            )


def plain_data(value: Any, key: str) -> Any:
    """Convert a value to JSON data: dicts with string keys, lists, strings and finite numbers.

    Args:
        value: The value.
        key: Name of the value, for error messages.
    """
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str):
                raise CheckpointError(
                    "is not a string, but JSON keys must be strings",
                    f"write {str(name)!r}",
                    key,
                    name,
                )
        return {name: plain_data(item, f"{key}.{name}") for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_data(item, f"{key}[{index}]") for index, item in enumerate(value)]
    finite = not isinstance(value, float) or value - value == 0
    if (value is None or isinstance(value, (str, bool, int, float))) and finite:
        return value
    raise CheckpointError(
        "cannot be saved as JSON",
        "use finite numbers, strings, lists and dicts; save tensors in a shadow",
        key,
        value,
    )
