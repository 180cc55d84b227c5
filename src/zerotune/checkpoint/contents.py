"""Contents of a checkpoint: each rank's tensors, and the manifest entries for the engine."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

import attrs
import numpy as np
import torch

from zerotune._util.proc import installed_version
from zerotune._util.text import json_of
from zerotune.backend.accelerator import current_accelerator
from zerotune.backend.master_weights import StateFormat
from zerotune.checkpoint.manifest import STATE_DTYPES, Manifest, PlanRecord, TensorRecord
from zerotune.checkpoint.tensors import WEIGHTS, Subject, TensorFile, TensorSpec
from zerotune.errors import CheckpointCorruptError, CheckpointError

if TYPE_CHECKING:
    from zerotune.backend.engine import Engine
    from zerotune.backend.master_weights import FragmentAddress, OptimizerStates

SHADOW: Final = "shadow/"
BUFFER: Final = "buffer/"
GENERATOR: Final = "rng/"
"""Name prefix of generator states in a rank's file."""
GENERATOR_TEXT: Final = "rng"
"""Metadata key for generator values that are not tensors."""

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
class Piece:
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
    pieces: tuple[Piece, ...] | None = None
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

    def read(self, engine: Engine) -> Iterator[Piece]:
        """Yield the contents of ``parts``, reading one fragment of master weights at a time."""
        if self.pieces is not None:
            yield from self.pieces
            return
        if WEIGHTS in self.parts:
            for fragment in engine.master_weights.read():
                part = Part.of(fragment.address)
                yield Piece(subject=WEIGHTS, part=part, tensor=fragment.value)
                formats = fragment.formats
                for name, state in fragment.stored.items():
                    subject = Subject(kind="optimizer", of=name)
                    part = Part.of(fragment.address, formats[name])
                    yield Piece(subject=subject, part=part, tensor=state)
                for name, state in fragment.whole.items():
                    subject = Subject(kind="optimizer", of=name)
                    part = Part.whole(fragment.address, state)
                    yield Piece(subject=subject, part=part, tensor=state.view(-1))
        for name, tensors in self.shadows.items():
            subject = Subject(kind="shadow", of=name)
            for part in self.parts.get(subject, ()):
                yield Piece(subject=subject, part=part, tensor=tensors[part.key])

    def copied(self, engine: Engine) -> RankContents:
        """Copy the contents to host memory; training can then continue while they are written."""
        pieces = tuple(
            attrs.evolve(piece, tensor=_copy(piece.tensor)) for piece in self.read(engine)
        )
        others = {key: _copy(tensor) for key, tensor in self.others.items()}
        return attrs.evolve(self, pieces=pieces, others=others, shadows={})


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


# -- The manifest of an engine.


def draft(
    engine: Engine, *, shadows: Mapping[str, Any], rng: bool, extra: Mapping[str, Any]
) -> Manifest:
    """Create a manifest of an engine's current state; parameters and files are added later.

    Args:
        engine: Engine to save.
        shadows: EMA shadows by name.
        rng: Whether the random number generators are saved.
        extra: The caller's data.
    """
    state = attrs.evolve(
        engine.state,
        scheduler=plain_data(engine.state.scheduler, "scheduler"),
        loss_scaler=plain_data(engine.state.loss_scaler, "loss_scaler"),
    )
    return Manifest(
        created=now(),
        versions={**versions(), **engine.plan.platform.versions},
        world_size=engine.group.world_size,
        plan=plan_record(engine),
        state=state,
        model=model_config(engine.module),
        parameters=(),
        frozen=[tensor_record(name, p) for name, p in untrained_parameters(engine).items()],
        aliases=tied_names(engine.module),
        buffers=buffer_records(engine.module),
        files=(),
        shadows=sorted(shadows),
        rng=rng,
        extra=extra,
    )


def plan_record(engine: Engine) -> PlanRecord:
    """Return the manifest's record for an engine's plan."""
    plan = engine.plan
    optimizer: Any = plan.optimizer
    scheduler: Any = plan.scheduler
    return PlanRecord(
        engine="deepspeed" if plan.uses_deepspeed else "plain",
        stage=plan.stage,
        precision=plan.precision,
        offload_optimizer=plan.offload_optimizer,
        offload_param=plan.offload_param,
        gradient_accumulation_steps=plan.gradient_accumulation_steps,
        digest=plan.digest(),
        config=plan.to_deepspeed(),
        optimizer=plain_data(attrs.asdict(optimizer), "optimizer"),
        scheduler=scheduler and plain_data(attrs.asdict(scheduler), "scheduler"),
    )


def buffer_records(module: torch.nn.Module) -> tuple[TensorRecord, ...]:
    """Return the manifest's records for the model's buffers."""
    return tuple(tensor_record(name, b) for name, b in persistent_buffers(module).items())


def untrained_parameters(engine: Engine) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that have no master weights because they are frozen or empty."""
    trained = engine.master_weights.parameters
    return {name: p for name, p in engine.module.named_parameters() if name not in trained}


def model_config(module: torch.nn.Module) -> Mapping[str, Any] | None:
    """Return the content of a diffusers model's ``config.json``; ``None`` for other modules."""
    write = getattr(module, "to_json_string", None)
    if write is None:
        return None
    try:
        config: Mapping[str, Any] = plain_data(json.loads(write()), "model.config")
    except (TypeError, ValueError, CheckpointError):
        # A configuration that is not JSON cannot be exported either; the export reports it.
        return None
    return config


def now() -> str:
    """Return the current UTC time in ISO 8601 format."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """Return the versions of zerotune and torch."""
    return {
        "zerotune": installed_version("zerotune") or "unknown",
        "torch": torch.__version__,
    }


def tied_names(module: torch.nn.Module) -> dict[str, str]:
    """Map each additional name of a tied parameter to its first name."""
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    return {name: first[id(p)] for name, p in every if first[id(p)] != name}


def tensor_record(name: str, tensor: torch.Tensor) -> TensorRecord:
    """Return the manifest's record for a tensor."""
    # ZeRO-3 keeps the full shape beside a partitioned parameter.
    shape = tuple(getattr(tensor, "ds_shape", tensor.shape))
    return TensorRecord(name=name, shape=shape, dtype=str(tensor.dtype).removeprefix("torch."))


# -- The state of every random number generator of this process.


def capture_generators() -> tuple[dict[str, torch.Tensor], str]:
    """Capture the state of torch's, numpy's and Python's global generators.

    Returns:
        1-D uint8 tensors by name, and the remaining values as JSON text.
    """
    tensors = {"torch_cpu": torch.get_rng_state()}
    accelerator = current_accelerator()
    if (state := accelerator.random_state()) is not None:
        tensors[f"torch_{accelerator.device.type}"] = state
    # The legacy tuple is what `np.random.seed` and `np.random.rand` use.
    kind, keys, position, has_gauss, cached = np.random.get_state()
    tensors["numpy"] = _generator_bytes(np.asarray(keys, dtype="<u4"))
    version, numbers, gauss_next = random.getstate()
    tensors["python"] = _generator_bytes(np.asarray(numbers, dtype="<u8"))
    text = {
        "numpy": [kind, int(position), int(has_gauss), float(cached)],
        "python": [version, gauss_next],
    }
    return {GENERATOR + name: tensor for name, tensor in tensors.items()}, json.dumps(text)


def restore_generators(tensors: Mapping[str, torch.Tensor], text: str) -> None:
    """Restore a state captured by ``capture_generators``."""
    python, numpy = check_generators(tensors, text)
    torch.set_rng_state(tensors[GENERATOR + "torch_cpu"].contiguous())
    random.setstate(python)
    np.random.set_state(numpy)
    accelerator = current_accelerator()
    state = tensors.get(f"{GENERATOR}torch_{accelerator.device.type}")
    if state is not None and not accelerator.is_host:
        accelerator.restore_random_state(state.contiguous())


def check_generators(tensors: Mapping[str, torch.Tensor], text: str) -> tuple[Any, Any]:
    """Parse the saved states of Python's and numpy's generators, and try them on new generators."""
    try:
        numbers = json_of(text)
        kind, position, has_gauss, cached = numbers["numpy"]
        version, gauss_next = numbers["python"]
        keys = _as_numbers(tensors[GENERATOR + "numpy"], "<u4")
        state = tuple(int(number) for number in _as_numbers(tensors[GENERATOR + "python"], "<u8"))
        python = (version, state, None if gauss_next is None else float(gauss_next))
        numpy = (kind, keys, position, has_gauss, cached)
        if type(position) is not int or not 0 <= position <= len(keys):
            raise ValueError(f"a position of {position!r}")
        torch.Generator().set_state(tensors[GENERATOR + "torch_cpu"].contiguous())
        random.Random().setstate(python)  # noqa: S311 - nothing is drawn from it
        np.random.RandomState().set_state(numpy)
    except (LookupError, TypeError, ValueError, RuntimeError, ArithmeticError) as error:
        raise CheckpointCorruptError(
            f"the state of the random number generators cannot be restored ({error})",
            key=GENERATOR_TEXT,
        ) from error
    return python, numpy


def _generator_bytes(numbers: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(numbers.view(np.uint8).copy())


def _as_numbers(tensor: torch.Tensor, dtype: str) -> np.ndarray[Any, Any]:
    numbers: np.ndarray[Any, Any] = np.frombuffer(tensor.contiguous().numpy().tobytes(), dtype)
    return np.array(numbers)
