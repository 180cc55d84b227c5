"""What one rank puts into its tensor file, and under which names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

import attrs
import torch

from zerotune.checkpoint import randomness
from zerotune.checkpoint.manifest import FragmentRecord
from zerotune.checkpoint.tensorfile import TensorSpec
from zerotune.errors import CheckpointError

if TYPE_CHECKING:
    from zerotune.backend.engine import Engine
    from zerotune.backend.master_weights import Fragment

MASTER: Final = "master/"
OPTIMIZER: Final = "optimizer/"
SHADOW: Final = "shadow/"
BUFFER: Final = "buffer/"

Tensors = Mapping[str, torch.Tensor]


@runtime_checkable
class ShadowLike(Protocol):
    """Anything that keeps tensors beside the weights, such as ``zerotune.ema.EMAShadow``.

    Tensors that belong to a fragment of the master weights are called
    ``FragmentAddress.key``, any others by a name of their own.
    """

    def state_dict(self) -> dict[str, torch.Tensor]:
        """This rank's tensors by name; views, not copies."""
        ...

    def load_state_dict(self, state: Tensors) -> None:
        """Restore them, looking up one tensor at a time."""
        ...


def state_key(state: str, key: str) -> str:
    """Name in the file of an optimizer state of the fragment ``key``."""
    return f"{OPTIMIZER}{state}/{key}"


def shadow_key(shadow: str, key: str) -> str:
    """Name in the file of tensor ``key`` of a shadow."""
    return f"{SHADOW}{shadow}/{key}"


def persistent_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that belong to a model's state, by dotted name; shared ones once."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for prefix, part in module.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            if name in part._non_persistent_buffers_set or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


def owns_fragments(engine: Engine) -> bool:
    """Whether this rank writes fragments: all do under ZeRO, rank 0 does among replicas."""
    return engine.group.is_main or not engine.master_weights.replicated


@attrs.frozen(kw_only=True, eq=False)
class RankContents:
    """Everything one rank writes, known before the first byte is written."""

    fragments: tuple[FragmentRecord, ...]
    others: Mapping[str, torch.Tensor]
    """Buffers, shadows and generators: all that is no fragment of the master weights."""
    metadata: Mapping[str, str]

    @classmethod
    def of(cls, engine: Engine, *, shadows: Mapping[str, ShadowLike], rng: bool) -> RankContents:
        """Look at this rank's share of an engine; reads no weights but brings in NVMe shards.

        Raises:
            CheckpointError: An optimizer state cannot be stored by fragment.
            ZeroTuneError: A shadow cannot be saved now.
        """
        others = {
            BUFFER + name: buffer for name, buffer in persistent_buffers(engine.module).items()
        }
        states = {name: shadow.state_dict() for name, shadow in shadows.items()}
        fragments: tuple[FragmentRecord, ...] = ()
        if owns_fragments(engine):
            fragments = tuple(_record(fragment) for fragment in engine.master_weights.read())
            for name, state in states.items():
                others |= {shadow_key(name, key): tensor for key, tensor in state.items()}
        metadata = {"format": "pt", "rank": str(engine.group.rank)}
        if rng:
            generators, metadata[randomness.TEXT] = randomness.capture()
            others |= generators
        return cls(fragments=fragments, others=others, metadata=metadata)

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """All tensors, in the order of ``tensors``."""
        weights = [
            TensorSpec(key=key, dtype=torch.float32, shape=(record.numel,))
            for record in self.fragments
            for key in _keys(record)
        ]
        return (*weights, *(TensorSpec.of(key, other) for key, other in self.others.items()))

    def tensors(self, engine: Engine) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and tensor, one sub-group of the master weights in memory at a time."""
        if self.fragments:
            for record, fragment in zip(self.fragments, engine.master_weights.read(), strict=True):
                states = fragment.states
                values = (fragment.value, *(states[name] for name in record.states))
                yield from zip(_keys(record), values, strict=True)
        yield from self.others.items()


def _keys(record: FragmentRecord) -> list[str]:
    return [MASTER + record.key, *(state_key(state, record.key) for state in record.states)]


def _record(fragment: Fragment) -> FragmentRecord:
    address, states = fragment.address, fragment.states
    if fragment.other_states:
        raise CheckpointError(
            f"the optimizer keeps {', '.join(fragment.other_states)}, which no checkpoint can "
            "divide like the weights",
            key=address.name,
            fix="train with an optimizer that keeps one number per weight, such as AdamW",
        )
    for name, state in states.items():
        if state.dtype != torch.float32:
            raise CheckpointError(
                f"optimizer state {name!r} is {state.dtype}; only fp32 states are saved",
                key=address.name,
                fix="leave bf16_optimizer_states off",
            )
    return FragmentRecord(
        name=address.name,
        start=address.start,
        numel=address.numel,
        step=fragment.step,
        states=tuple(sorted(states)),
        scalars=plain_data(fragment.scalars, address.name),
    )


def plain_data(value: Any, key: str) -> Any:
    """``value`` as JSON gives it back: dicts with text keys, lists, text, finite numbers.

    Raises:
        CheckpointError: Something in it would not survive; the message names where it is.
    """
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str):
                raise CheckpointError(
                    "JSON has only text keys", key=key, value=name, fix=f"write {str(name)!r}"
                )
        return {name: plain_data(item, f"{key}.{name}") for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_data(item, f"{key}[{index}]") for index, item in enumerate(value)]
    finite = not isinstance(value, float) or value - value == 0
    if (value is None or isinstance(value, (str, bool, int, float))) and finite:
        return value
    raise CheckpointError(
        "JSON cannot hold it",
        key=key,
        value=value,
        fix="keep numbers, text, lists and dicts; tensors belong into a shadow",
    )
