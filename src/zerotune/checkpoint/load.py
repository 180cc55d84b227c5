"""Check a checkpoint's files and model, then load its values into an engine's fragments.

The module's sections are, in order: the file reader, the fragment filler, the comparison of
checkpoint and engine, the conversion of counters and generators for a different plan, and
``load_checkpoint``.
"""

from __future__ import annotations

import hashlib
import math
import os
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
import numpy as np
import torch
from typing_extensions import override

from zerotune._util.closing import Closable
from zerotune._util.text import listing
from zerotune.backend.distributed import together
from zerotune.backend.optimizers.classes import BLOCK, CODEBOOKS, codebook, scale_of
from zerotune.checkpoint.contents import (
    BUFFER,
    GENERATOR,
    GENERATOR_TEXT,
    ShadowLike,
    buffer_records,
    check_generators,
    persistent_buffers,
    plan_record,
    restore_generators,
    shadow_key,
)
from zerotune.checkpoint.folders import check_files, check_hashes, find_checkpoint
from zerotune.checkpoint.manifest import Manifest, ParameterRecord, PlanRecord, TensorRecord
from zerotune.checkpoint.tensors import WEIGHTS, Subject, TensorReader
from zerotune.decisions import Decision, Severity, announce
from zerotune.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
)

if TYPE_CHECKING:
    from zerotune.backend.engine import Engine, EngineState
    from zerotune.backend.master_weights import EditableFragment, FragmentAddress


_DECODED_AT_ONCE: Final = 2**20
"""Codes read and decoded at a time, a multiple of ``BLOCK``."""


class CheckpointReader(Closable):
    """Reads exactly the requested bytes from the files of a checkpoint."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder = folder
        self.manifest = manifest
        self._readers: dict[Subject, TensorReader] = {}

    def of(self, subject: Subject) -> TensorReader:
        """Return the reader for tensors of one kind; file headers are read at first use."""
        if subject not in self._readers:
            records = self.manifest.files_of(subject.kind, subject.of)
            files = [self._folder / record.name for record in records]
            self._readers[subject] = TensorReader(files, subject=subject)
        return self._readers[subject]

    def tensor(self, subject: Subject, name: str) -> torch.Tensor:
        """Return a whole tensor on the CPU."""
        return self.of(subject).tensor(name)

    def fill_state(self, into: torch.Tensor, state: str, address: FragmentAddress) -> None:
        """Copy a fragment's part of an optimizer state; codes are decoded unless copied as codes.

        Args:
            into: Tensor to fill, 1-D.
            state: Name of the state.
            address: The fragment. If codes or scales are copied, it begins at a block.
        """
        form, reader = self.manifest.format_of(state), self.of(_state(state))
        if not form.codebook or into.dtype == torch.uint8:
            reader.fill(into, address.name, address.start // form.block)
            return
        book = codebook(signed=CODEBOOKS[form.codebook])
        scaling = self.of(_state(scale_of(state)))
        for start in range(address.start // BLOCK * BLOCK, address.stop, _DECODED_AT_ONCE):
            stop = min(start + _DECODED_AT_ONCE, address.stop)
            codes = torch.empty(stop - start, dtype=torch.uint8)
            scales = torch.empty(-(-codes.numel() // BLOCK))
            reader.fill(codes, address.name, start)
            scaling.fill(scales, address.name, start // BLOCK)
            numbers = book.decode(codes, scales)[max(0, address.start - start) :]
            into[stop - address.start - len(numbers) : stop - address.start].copy_(numbers)

    def buffers(self, rank: int) -> dict[str, torch.Tensor]:
        """Return a rank's buffers by dotted name."""
        reader = self.of(_rank_subject(rank))
        named = [name for name in reader.tensors if name.startswith(BUFFER)]
        return {name.removeprefix(BUFFER): reader.tensor(name) for name in named}

    def generators(self, rank: int) -> tuple[dict[str, torch.Tensor], str]:
        """Return a rank's random generator states: tensors by name, and other states as JSON."""
        reader = self.of(_rank_subject(rank))
        if len(reader.metadata) != 1:
            raise CheckpointCorruptError(
                f"has {len(reader.metadata)} files instead of one",
                "use a different checkpoint",
                _rank_subject(rank).prefix,
            )
        named = [name for name in reader.tensors if name.startswith(GENERATOR)]
        text = reader.metadata[0].get(GENERATOR_TEXT, "")
        return {name: reader.tensor(name) for name in named}, text

    @override
    def close(self) -> None:
        """Close the files."""
        for reader in self._readers.values():
            reader.close()


class ShadowTensors(Mapping[str, torch.Tensor]):
    """Mapping that reads this rank's fragments of an EMA shadow, one tensor at a time."""

    def __init__(
        self,
        reader: CheckpointReader,
        shadow: str,
        addresses: Sequence[FragmentAddress],
        *,
        rank: int,
    ) -> None:
        self._shared = reader.of(Subject(kind="shadow", of=shadow))
        self._alone = reader.of(_rank_subject(rank))
        prefix = shadow_key(shadow, "")
        others = [name for name in self._alone.tensors if name.startswith(prefix)]
        self._others = {name.removeprefix(prefix): name for name in others}
        self._addresses = {a.key: a for a in addresses if a.name in self._shared.tensors}

    def __getitem__(self, key: str) -> torch.Tensor:
        if key in self._others:
            return self._alone.tensor(self._others[key])
        address = self._addresses[key]
        into = torch.empty(address.numel, dtype=self._shared.stored(address.name).dtype)
        self._shared.fill(into, address.name, address.start)
        return into

    def holds(self, key: str, state: Mapping[str, torch.Tensor]) -> bool:
        """Return whether the checkpoint contains a tensor, without reading its elements.

        Args:
            key: Name of the tensor.
            state: The shadow's current state. Fragments, whose keys contain the number of elements,
                are not read, because they may be on disk.
        """
        if key in self._others:
            stored, like = self._alone.stored(self._others[key]), state[key]
            return (stored.dtype, math.prod(stored.shape)) == (like.dtype, like.numel())
        return key in self._addresses

    def __iter__(self) -> Iterator[str]:
        yield from self._addresses
        yield from self._others

    def __len__(self) -> int:
        return len(self._addresses) + len(self._others)


def _state(name: str) -> Subject:
    return Subject(kind="optimizer", of=name)


def _rank_subject(rank: int) -> Subject:
    return Subject(kind="rank", of=str(rank))


# -- Weights and optimizer states from a checkpoint into the fragments of an engine.


class Filler:
    """Loads saved values into an engine's fragments, even if the partitioning has changed.

    Args:
        reader: Reader of the checkpoint.
        records: Records of the checkpoint's parameters.
        states: Whether to load the saved optimizer states; ``False`` resets the optimizer.
    """

    def __init__(
        self, reader: CheckpointReader, records: Iterable[ParameterRecord], *, states: bool
    ) -> None:
        self._reader = reader
        self._records = {record.name: record for record in records}
        self._states = states
        self._steps: dict[int, int] = {}
        self._taken = max([record.step or 0 for record in self._records.values()], default=0)

    def fill(self, fragment: EditableFragment) -> None:
        """Overwrite a fragment's weights and optimizer states with the saved ones."""
        address = fragment.address
        record = self._records[address.name]
        self._reader.of(WEIGHTS).fill(fragment.value, address.name, address.start)
        saved = record.states if self._states else ()
        formats = {name: self._reader.manifest.format_of(name) for name in saved}
        whole = [name for name, form in formats.items() if form.whole]
        fragment.set_whole({name: self._reader.tensor(_state(name), record.name) for name in whole})
        formats = {name: form for name, form in formats.items() if name not in whole}
        if formats:
            fragment.ensure_states(tuple(n for n, form in formats.items() if form.block == 1))
        # Codes are copied between equal optimizers; otherwise they are decoded, and encoded anew.
        states = fragment.stored if fragment.formats == formats else fragment.states
        for name, state in states.items():
            if name in formats:
                self._reader.fill_state(state, name, address)
            else:
                state.zero_()
        if saved and record.scalars:
            fragment.set_scalars(record.scalars)
        elif not saved and not self._steps.get(address.slab):
            # No other parameter has set the slab's shared scalars.
            fragment.begin_scalars_anew()
        if states or whole:
            # From a step counter without states, the optimizer would infer that states exist.
            step = (record.step or 0) if saved else 0
            # A flat tensor with one counter for all has the largest of its parameters' steps; where
            # parameters have their own, it counts the steps that it took part in, even without one.
            self._steps[address.slab] = max(self._steps.get(address.slab, 0), step)
            taken = self._taken if saved and fragment.counts_each else self._steps[address.slab]
            fragment.set_step(step, largest=taken)


# -- Does a checkpoint belong to this engine? Every difference, before anything is loaded.


_NAMES_LISTED = 10
_OWN_ORIGIN: Final = "save_checkpoint"
"""``Manifest.origin`` of checkpoints that were not converted."""


def check_model(manifest: Manifest, engine: Engine) -> None:
    """Check that the engine's trained parameters and buffers have the saved names and shapes."""
    running = {name: tuple(shape) for name, shape in engine.master_weights.parameters.items()}
    saved, buffers = _shapes(manifest.parameters), _shapes(buffer_records(engine.module))
    saved_buffers = _shapes(manifest.buffers)
    if manifest.plan is None:
        # A model folder does not record which parameters are trained; the engine does.
        saved_buffers = {name: shape for name, shape in saved.items() if name in buffers}
        named = engine.module.named_parameters(remove_duplicate=False)
        untrained = {*(name for name, _ in named), *buffers} - set(running)
        saved = {name: shape for name, shape in saved.items() if name not in untrained}
    differences = [
        *_shape_differences("parameter", saved, running),
        *_shape_differences("buffer", saved_buffers, buffers),
    ]
    if differences:
        raise CheckpointMismatchError(
            f"the checkpoint belongs to a different model: {'; '.join(differences)}",
            "build the model that was saved, with the same trainable parameters",
            "model",
            type(engine.module).__name__,
        )


def check_accumulation(engine: Engine) -> None:
    """Check that the engine is not in the middle of an accumulation window."""
    steps = engine.plan.gradient_accumulation_steps
    if left := engine.state.micro_step % steps:
        raise CheckpointError(
            f"{left} of {steps} micro batches are accumulated, and their gradients would be "
            "applied to the loaded weights",
            "load before training starts, or after engine.step() returns boundary=True",
            "gradient_accumulation_steps",
            steps,
        )


def changes(manifest: Manifest, engine: Engine) -> tuple[Decision, ...]:
    """Return a decision for each setting that differs between the saved and the running plan."""
    saved, running = manifest.plan, plan_record(engine)
    if saved is None:
        return ()
    # Settings that decide which rank stores which part, and in which format.
    sharding = _pairs(
        "",
        {**saved.sharding, "world_size": manifest.world_size},
        {**running.sharding, "world_size": engine.group.world_size},
    )
    sharding = [each for each in sharding if each[0] not in _never_saved(manifest)]
    pairs = _pairs(
        "scheduler.", _scheduler_settings(saved.scheduler), _scheduler_settings(running.scheduler)
    )
    # DeepSpeed's checkpoints lack the arguments of an optimizer that a script made.
    params = saved.optimizer["params"]
    if params and saved.optimizer["name"] == running.optimizer["name"]:
        pairs += _pairs("optimizer.params.", params, running.optimizer["params"])
    batches = (saved.config.get("train_batch_size"), running.config.get("train_batch_size"))
    if batches[0] is not None and batches[0] != batches[1]:
        pairs.append(("train_batch_size", *batches))
    if manifest.origin != _OWN_ORIGIN:
        pairs = [(key, before, after) for key, before, after in pairs if before is not None]
    divided = "the checkpoint was saved with a different plan and is repartitioned"
    changed = "the checkpoint was saved with a different value; the running plan's value is used"
    return (
        *(_load_decision(*each, divided) for each in sharding),
        *(_load_decision(*each, changed, warning=True) for each in pairs),
    )


def _never_saved(manifest: Manifest) -> frozenset[str]:
    """Return the settings that the source format of a converted checkpoint does not store."""
    if manifest.origin == _OWN_ORIGIN or manifest.plan is None:
        return frozenset()
    config = manifest.plan.config
    if not config:
        return frozenset({"precision", "gradient_accumulation_steps", "world_size"})
    written = "gradient_accumulation_steps" in config
    return frozenset({"world_size"} | (set() if written else {"gradient_accumulation_steps"}))


def _shapes(records: Iterable[ParameterRecord | TensorRecord]) -> dict[str, tuple[int, ...]]:
    return {record.name: tuple(record.shape) for record in records}


def _shape_differences(
    what: str, saved: Mapping[str, tuple[int, ...]], running: Mapping[str, tuple[int, ...]]
) -> list[str]:
    missing = [name for name in running if name not in saved]
    unexpected = [name for name in saved if name not in running]
    reshaped = [
        f"{name} {saved[name]} instead of {running[name]}"
        for name in saved
        if name in running and saved[name] != running[name]
    ]
    groups = {
        "missing from the checkpoint": missing,
        "only in the checkpoint": unexpected,
        "of a different shape": reshaped,
    }
    return [
        f"{what}s {title}: {listing(names, most=_NAMES_LISTED)}"
        for title, names in groups.items()
        if names
    ]


def _scheduler_settings(scheduler: Mapping[str, Any] | None) -> dict[str, Any]:
    if scheduler is None:
        return {"type": None}
    params = {f"params.{key}": value for key, value in scheduler["params"].items()}
    return {"type": scheduler["name"], **params}


def _pairs(
    prefix: str, saved: Mapping[str, Any], running: Mapping[str, Any]
) -> list[tuple[str, Any, Any]]:
    return [
        (f"{prefix}{key}", saved.get(key), running.get(key))
        for key in {**saved, **running}
        if saved.get(key) != running.get(key)
    ]


# -- Adapting a checkpoint's states, counters and generators to another plan.


_SAME_STATES: Final = (frozenset({"Adam", "AdamW", "AdamWBF16States", "AdamW8BitStates"}),)
"""Sets of optimizers whose states have the same names and meanings."""
_ROUNDED: Final[Mapping[str, str]] = {
    "AdamWBF16States": ", rounded to bf16",
    "AdamW8BitStates": ", rounded to the nearest of 256 codes in blocks of 256 elements",
}
"""Rounding by optimizers that load fp32 states of other optimizers."""
_POSITION: Final = "last_batch_iteration"

Adapted = tuple["EngineState", tuple[Decision, ...]]


def keeps_states(manifest: Manifest, engine: Engine) -> bool:
    """Return whether the current optimizer can use the saved states."""
    saved, running = _optimizer_name(manifest.plan), _optimizer_name(plan_record(engine))
    return saved == running or any({saved, running} <= alike for alike in _SAME_STATES)


def optimizer_decisions(manifest: Manifest, engine: Engine) -> tuple[Decision, ...]:
    """Return decisions about optimizer states that are loaded, converted or reset."""
    saved, running = _optimizer_name(manifest.plan), _optimizer_name(plan_record(engine))
    split = _split_masters(engine)
    if saved == running:
        return (*_uneven_steps(manifest, engine), *split)
    if keeps_states(manifest, engine):
        reason = "both optimizers have the same states, so the saved states are loaded"
        reason += _ROUNDED.get(running or "", "")
        return (_load_decision("optimizer.type", saved, running, reason), *split)
    if saved is None:
        reason = (
            "the checkpoint contains no optimizer states, so the optimizer starts with fresh states"
        )
        return (_load_decision("optimizer.states", None, "anew", reason, warning=True), *split)
    reason = (
        "the states of the two optimizers are incompatible, so weights and shadows are loaded, "
        "but the optimizer starts with fresh states"
    )
    return (_load_decision("optimizer.states", saved, running, reason, warning=True), *split)


def _split_masters(engine: Engine) -> tuple[Decision, ...]:
    """Return a decision about the rounding of masters that are not stored in fp32."""
    masters = engine.plan.masters
    if masters == "fp32":
        return ()
    if masters == "stochastic":
        reason = "master weights are only the bf16 weights, so saved ones are rounded to them; "
        reason += "weights that were saved so keep every bit"
        return (_load_decision("update.masters", "fp32", "bf16", reason),)
    reason = (
        "fp32 master weights exactly halfway between two bf16 numbers (at most one in 131,072) "
        "may become one unit in the last place larger; weights that were saved in split form "
        "keep every bit"
    )
    return (_load_decision("streamed.split_masters", "fp32", "bf16 and the low 16 bits", reason),)


def adapted_state(manifest: Manifest, engine: Engine) -> Adapted:
    """Return the saved counters, schedule and loss scale, adapted to the running engine.

    The number of steps is unchanged. If gradient accumulation differs, the number of micro batches
    is computed from the number of steps.
    """
    state = manifest.state
    accumulation = engine.plan.gradient_accumulation_steps
    same = manifest.plan and manifest.plan.gradient_accumulation_steps == accumulation
    # Saving never happens within an accumulation window, whatever the manifest says.
    if not same or state.micro_step % accumulation:
        state = attrs.evolve(state, micro_step=state.global_step * accumulation)
    schedule: tuple[Decision, ...] = ()
    if engine.plan.scheduler is not None and _POSITION not in state.scheduler:
        position = state.global_step - state.skipped_steps - 1
        state = attrs.evolve(state, scheduler={_POSITION: position})
        reason = (
            "the checkpoint has no schedule, so the plan's schedule continues from the number of "
            "steps taken"
        )
        schedule = (_load_decision("scheduler.position", None, position + 1, reason, warning=True),)
    state, scale = carried_loss_scale(
        state,
        saved=manifest.plan,
        running=plan_record(engine),
        fresh=engine.state.loss_scaler,
    )
    return state, (*schedule, *scale)


def restart_generators(tensors: Mapping[str, torch.Tensor], *, rank: int) -> None:
    """Seed the global random number generators of a rank that did not exist in the saved run.

    Args:
        tensors: Saved generator states of one rank, from which the seed is derived.
        rank: This rank's number; each rank gets its own seed, which is the same each time the
            checkpoint is loaded.
    """
    digest = hashlib.sha256(f"rank {rank}".encode())
    for name in sorted(tensors):
        digest.update(tensors[name].numpy().tobytes())
    seed = int.from_bytes(digest.digest()[:7], "little")
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def world_decisions(manifest: Manifest, engine: Engine, *, rng: bool) -> tuple[Decision, ...]:
    """Return decisions about per-process state if the number of processes differs."""
    saved, running = manifest.world_size, engine.group.world_size
    if saved == running:
        return ()
    decisions = []
    if rng and manifest.rng:
        reason = (
            "ranks that existed in the saved run continue with their random states, and "
            "additional ranks are seeded from rank 0's state, so the run differs from an "
            "uninterrupted run"
        )
        decisions.append(_load_decision("rng", saved, running, reason, warning=True))
    if manifest.buffers:
        reason = "buffers are saved per process, so additional ranks start with rank 0's buffers"
        decisions.append(_load_decision("buffers", saved, running, reason))
    return tuple(decisions)


def _uneven_steps(manifest: Manifest, engine: Engine) -> tuple[Decision, ...]:
    steps = {record.step for record in manifest.parameters if record.step is not None}
    slabs = [address.slab for address in engine.master_weights.addresses]
    if len(steps) < 2 or len(set(slabs)) == len(slabs):
        return ()
    if any(states.counts_each for _, states in engine.master_weights.describe()):
        return ()
    reason = (
        "some parameters had no gradient in some steps, so their step counters differ; this "
        "engine has one counter for several parameters and uses the largest"
    )
    return (_load_decision("optimizer.step", sorted(steps), max(steps), reason),)


def carried_loss_scale(
    state: EngineState,
    *,
    saved: PlanRecord | None,
    running: PlanRecord,
    fresh: Mapping[str, Any],
) -> Adapted:
    """Adapt the saved state's loss scale to the running engine; return the state and any decision.

    Args:
        state: The saved state.
        saved: Record of the saved plan; ``None`` if the checkpoint contains only weights.
        running: Record of the running plan.
        fresh: State of the running engine's loss scaler.
    """
    if saved is not None and (saved.precision, saved.engine) == (running.precision, running.engine):
        return state, ()
    before = _scale(state.loss_scaler) if saved and saved.precision == "fp16" else None
    scaler: dict[str, Any] = {}
    after: float | None = None
    if running.precision != "fp16":
        reason = f"{running.precision} needs no loss scale"
    elif before is None:
        after = _scale(fresh)
        reason = "the checkpoint has no loss scale, so the loss scale starts at the plan's value"
    else:
        key = "cur_scale" if "cur_scale" in fresh else "scale"
        after, scaler = before, {**fresh, key: before}
        reason = "the saved loss scale is used; the count of steps since its last change is reset"
    state = attrs.evolve(state, loss_scaler=scaler)
    if before is None and after is None:
        return state, ()
    return state, (_load_decision("fp16.loss_scale", before, after, reason),)


def _scale(scaler: Mapping[str, Any]) -> float | None:
    value = scaler.get("cur_scale", scaler.get("scale"))
    return None if value is None else float(value)


def _optimizer_name(plan: PlanRecord | None) -> str | None:
    return None if plan is None else str(plan.optimizer["name"])


def _load_decision(
    key: str, before: Any, after: Any, reason: str, *, warning: bool = False
) -> Decision:
    severity: Severity = "warning" if warning else "note"
    return Decision(key, before, after, reason, severity)


# -- ``load_checkpoint``: everything is checked before anything is changed.


@attrs.frozen(kw_only=True)
class CheckpointContents:
    """Manifest, caller's data and decisions of a loaded checkpoint."""

    extra: Mapping[str, Any]
    """The ``extra`` data passed to ``save_checkpoint``."""
    manifest: Manifest
    decisions: tuple[Decision, ...]
    """Decisions about saved data that was not loaded and about values that were changed."""


def load_checkpoint(
    directory: str | os.PathLike[str],
    *,
    engine: Engine,
    shadows: Mapping[str, ShadowLike] | None = None,
    rng: bool = True,
    timeout_s: float | None = None,
) -> CheckpointContents:
    """Load a checkpoint into an engine, even if its plan differs from the saved run's plan.

    Collective: every rank must call ``load_checkpoint`` with the same arguments. Files and model
    are checked before anything is loaded, so a checkpoint of a different model leaves the engine
    unchanged. Stage, offload, precision, number of processes and the use of DeepSpeed may differ
    from the saved run. Every rank reads only its fragments. Effects of a different plan are
    recorded as decisions.

    Args:
        directory: A folder written by ``save_checkpoint`` or ``convert``.
        engine: An engine of the same model.
        shadows: EMA shadows attached to the engine, by their saved names.
        rng: Also restore the states of the random number generators.
        timeout_s: Seconds to wait for the other ranks; defaults to the group's timeout.

    Returns:
        The caller's ``extra`` data, the manifest and the decisions.

    Raises:
        CheckpointError: ``directory`` is not a checkpoint, or the engine has accumulated micro
            batches.
        CheckpointCorruptError: A file is missing, truncated or altered; the message names the file.
        CheckpointMismatchError: The checkpoint belongs to a different model; the message names
            every tensor that is missing, unexpected or of a different shape.
        CollectiveError: A rank did not call ``load_checkpoint``, or the arguments differ.
    """
    group, shadows = engine.group, dict(shadows or {})
    group.barrier(f"loading checkpoint {os.fspath(directory)}", timeout_s=timeout_s)
    load = _Load(engine=engine, shadows=shadows)
    agreed = together(group, "find the checkpoint", lambda: load.find(directory))
    if any(arguments != agreed[0] for arguments in agreed):
        group.agree(agreed[group.rank], "arguments of load_checkpoint")
    decisions = together(group, "compare the checkpoint", lambda: load.compare(rng=rng))[0]
    together(group, "verify the checkpoint", load.verify)
    together(group, "check the files' headers", lambda: load.judge(rng=rng))
    together(group, "compare the shadows", load.compare_shadows)
    with engine.replacing():
        load.restore()
        together(group, "restore the rest", lambda: load.restore_rest(rng=rng))
    announce(decisions, rank=group.rank)
    manifest = load.manifest
    return CheckpointContents(extra=manifest.extra, manifest=manifest, decisions=decisions)


def restore(
    directory: str | os.PathLike[str],
    *,
    into: Engine,
    shadows: Mapping[str, ShadowLike] | None = None,
) -> CheckpointContents:
    """Alias of ``load_checkpoint`` for custom loops. Collective.

    Args:
        directory: A folder written by ``save_checkpoint`` or ``convert``.
        into: Engine that receives the contents of the checkpoint.
        shadows: EMA shadows to load, by their saved names.
    """
    return load_checkpoint(directory, engine=into, shadows=shadows)


class _Load:
    """The stages of one load on one rank."""

    manifest: Manifest

    def __init__(self, *, engine: Engine, shadows: Mapping[str, ShadowLike]) -> None:
        self._engine = engine
        self._shadows = shadows
        self._folder = Path()

    def find(self, directory: str | os.PathLike[str]) -> tuple[Any, ...]:
        """Read the manifest, and return the values that must be equal on all ranks."""
        self._folder, self.manifest = find_checkpoint(directory)
        return str(self._folder), self.manifest.created, sorted(self._shadows)

    def compare(self, *, rng: bool) -> tuple[Decision, ...]:
        """Check that the checkpoint fits the engine, and return decisions about differences."""
        check_accumulation(self._engine)
        check_model(self.manifest, self._engine)
        absent = [name for name in self._shadows if name not in self.manifest.shadows]
        if absent:
            raise CheckpointMismatchError(
                f"the checkpoint has no such shadow; its shadows are {list(self.manifest.shadows)}",
                "omit the shadow, which then starts from the loaded weights",
                "shadows",
                absent,
            )
        return (
            *changes(self.manifest, self._engine),
            *optimizer_decisions(self.manifest, self._engine),
            *adapted_state(self.manifest, self._engine)[1],
            *world_decisions(self.manifest, self._engine, rng=rng),
            *self._left_out(),
        )

    def verify(self) -> None:
        """Check the sizes of all files, and the hashes of this rank's share of the files."""
        check_files(self._folder, self.manifest)
        group = self._engine.group
        check_hashes(self._folder, self.manifest.files[group.rank :: group.world_size])

    def judge(self, *, rng: bool) -> None:
        """Check the headers of all files before the first weight is changed."""
        with self._reader() as reader:
            for record in self.manifest.parameters:
                reader.of(WEIGHTS).check(record.name, torch.float32, record.shape)
                for state in record.states:
                    form, saved = self.manifest.format_of(state), reader.of(_state(state))
                    if form.whole:
                        saved.stored(record.name)
                        continue
                    dtype, shape = getattr(torch, form.dtype), form.shape_for(record.shape)
                    saved.check(record.name, dtype, shape)
            shapes = {record.name: record.shape for record in self.manifest.parameters}
            for shadow in self.manifest.shadows:
                averaged = reader.of(Subject(kind="shadow", of=shadow))
                for name in averaged.tensors:
                    averaged.check(name, torch.float32, shapes.get(name, ()))
            self._judge_rank(reader, rng=rng)

    def _judge_rank(self, reader: CheckpointReader, *, rng: bool) -> None:
        """Check the state that this rank loads for itself: buffers and generators."""
        alone, weights = reader.of(_rank_subject(self._like)), reader.of(WEIGHTS)
        saved = {record.name: record.dtype for record in self.manifest.buffers}
        for name, buffer in persistent_buffers(self._engine.module).items():
            if BUFFER + name in alone.tensors:
                dtype = getattr(torch, saved.get(name, ""), None)
                alone.check(BUFFER + name, dtype, buffer.shape)
            else:
                weights.check(name, torch.float32, buffer.shape)
        if rng and self.manifest.rng:
            check_generators(*reader.generators(self._like))

    def compare_shadows(self) -> None:
        """Check that the saved shadows belong to the engine's parameters."""
        with self._reader() as reader:
            for name, shadow in self._shadows.items():
                saved = self._shadow(reader, name)
                state = shadow.state_dict()
                missing = [key for key in state if not saved.holds(key, state)]
                if missing:
                    raise CheckpointMismatchError(
                        f"the saved shadow {name!r} is incomplete",
                        "omit the shadow, which then starts from the loaded weights",
                        f"shadows.{name}",
                        missing[:3],
                    )

    def restore(self) -> None:
        """Copy weights and optimizer states into the engine. Collective."""
        with self._reader() as reader, self._engine.master_weights.editing() as fragments:
            filler = Filler(
                reader,
                self.manifest.parameters,
                states=keeps_states(self.manifest, self._engine),
            )
            for fragment in fragments:
                filler.fill(fragment)

    def restore_rest(self, *, rng: bool) -> None:
        """Restore counters, buffers, shadows and random number generators."""
        self._engine.load_state(adapted_state(self.manifest, self._engine)[0])
        rank = self._engine.group.rank
        with self._reader() as reader:
            saved = reader.buffers(self._like)
            with torch.no_grad():
                for name, buffer in persistent_buffers(self._engine.module).items():
                    # A checkpoint converted from a model folder has buffers among its weights.
                    buffer.copy_(saved[name] if name in saved else reader.tensor(WEIGHTS, name))
            for name, shadow in self._shadows.items():
                shadow.load_state_dict(self._shadow(reader, name))
            if rng and self.manifest.rng:
                tensors, text = reader.generators(self._like)
                restore_generators(tensors, text)
                if rank != self._like:
                    restart_generators(tensors, rank=rank)

    @property
    def _like(self) -> int:
        """Rank of the saved run whose state this rank continues."""
        rank = self._engine.group.rank
        return rank if rank < self.manifest.world_size else 0

    def _reader(self) -> CheckpointReader:
        return CheckpointReader(self._folder, self.manifest)

    def _shadow(self, reader: CheckpointReader, name: str) -> ShadowTensors:
        addresses = self._engine.master_weights.addresses
        return ShadowTensors(reader, name, addresses, rank=self._like)

    def _left_out(self) -> tuple[Decision, ...]:
        reason = "this shadow is in the checkpoint, but was not passed to load_checkpoint"
        return tuple(
            _load_decision(f"shadows.{name}", "saved", None, reason, warning=True)
            for name in self.manifest.shadows
            if name not in self._shadows
        )
