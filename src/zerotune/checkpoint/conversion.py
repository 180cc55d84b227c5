"""Other formats into checkpoints, and checkpoints into diffusers model folders. No engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from zerotune._util.files import system_errors
from zerotune.backend.deepspeed.native_checkpoints import NativeCheckpoint
from zerotune.backend.distributed import ProcessGroup
from zerotune.backend.engine import EngineState
from zerotune.checkpoint.contents import (
    BUFFER,
    Counters,
    Part,
    Piece,
    RankContents,
    now,
    plain_data,
    tensor_record,
    versions,
)
from zerotune.checkpoint.export.model import ModelFolderReader, export_checkpoint
from zerotune.checkpoint.folders import checked_path
from zerotune.checkpoint.manifest import MANIFEST, Manifest, PlanRecord, TensorRecord
from zerotune.checkpoint.save import Filing, Writing
from zerotune.checkpoint.tensors import WEIGHTS, Subject
from zerotune.errors import CheckpointError
from zerotune.optimizers.catalogue import canonical

_ADAM_STATES: Final = ("exp_avg", "exp_avg_sq")
_FRESH: Final = EngineState(
    global_step=0, micro_step=0, skipped_steps=0, scheduler={}, loss_scaler={}
)


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    shadow: str | None = None,
    dtype: str = "fp32",
    base: str | os.PathLike[str] | None = None,
) -> Path:
    """Convert a checkpoint into a model folder, or anything else into a checkpoint.

    ================================  ==============================================
    ``source``                        ``target``
    ================================  ==============================================
    a zerotune checkpoint             a diffusers model folder, or one ``.safetensors``
    DeepSpeed's ``save_checkpoint``   a checkpoint, with the optimizer's states
    a diffusers model folder          a checkpoint of the weights alone
    ================================  ==============================================

    Args:
        source: What to read. accelerate's ``save_state`` under DeepSpeed keeps DeepSpeed's own
            format in a folder called ``pytorch_model``, which is found.
        target: What to write; must not exist.
        shadow: Of a zerotune checkpoint, the EMA shadow to write instead of the trained weights.
        dtype: Of the model folder: ``"fp32"``, ``"bf16"`` or ``"fp16"``.
        base: Of a checkpoint with frozen parameters, the model folder training began from.

    Returns:
        The absolute path of what was written.

    Raises:
        CheckpointError: ``source`` is none of these, or ``target`` is taken.
        CheckpointCorruptError: A file is damaged.
        CheckpointMismatchError: What is asked for is not in it.
    """
    with system_errors(CheckpointError, target, f"cannot be converted to from {os.fspath(source)}"):
        folder = Path(source)
        if (folder / MANIFEST).exists():
            return export_checkpoint(folder, target, shadow=shadow, dtype=dtype, base=base)
        final = checked_path(target)
        if final.exists():
            raise CheckpointError(
                "exists and is not replaced", key=str(final), fix="choose another name"
            )
        for native in (folder, folder / "pytorch_model"):
            if (native / "latest").is_file() or any(native.glob("*zero_pp_rank_*.pt")):
                return _from_deepspeed(NativeCheckpoint(native), final)
        with ModelFolderReader(folder) as reader:
            return _from_model(reader, final)


def _from_deepspeed(native: NativeCheckpoint, final: Path) -> Path:
    counters = Counters(step=native.step, scalars={})

    def pieces() -> Iterator[Piece]:
        for each in native.parts():
            part = Part(name=each.name, start=each.start, numel=each.tensor.numel())
            subject = WEIGHTS if each.state is None else Subject(kind="optimizer", of=each.state)
            yield Piece(subject=subject, part=part, tensor=each.tensor.float())

    return _write_checkpoint(
        final,
        origin=f"DeepSpeed {native.version}",
        state=native.state,
        plan=_plan_of(native),
        aliases=native.aliases,
        frozen=[TensorRecord(name=name, shape=shape) for name, shape in native.frozen.items()],
        shapes=native.parameters,
        states=native.states,
        counters=dict.fromkeys(native.parameters, counters),
        buffers=native.buffers,
        pieces=pieces,
    )


def _from_model(reader: ModelFolderReader, final: Path) -> Path:
    shapes = {name: stored.shape for name, stored in reader.tensors.items()}

    def pieces() -> Iterator[Piece]:
        for name in shapes:
            tensor = reader.tensor(name).float()
            part = Part(name=name, start=0, numel=tensor.numel())
            yield Piece(subject=WEIGHTS, part=part, tensor=tensor)

    return _write_checkpoint(
        final, origin="a model folder", model=reader.config, shapes=shapes, pieces=pieces
    )


def _plan_of(native: NativeCheckpoint) -> PlanRecord:
    config = plain_data(native.config, "ds_config")
    section = config.get("zero_optimization", {})
    optimizer = config.get("optimizer") or {}
    # A script that made its own optimizer has none in the configuration; Adam's states are
    # unmistakable.
    name = optimizer.get("type") or ("AdamW" if native.states == _ADAM_STATES else "unknown")
    params = optimizer.get("params") or {}
    halves = [half for half in ("bf16", "fp16") if (config.get(half) or {}).get("enabled")]
    return PlanRecord(
        engine="deepspeed",
        stage=native.stage,
        precision=(*halves, "fp32")[0],
        offload_optimizer=(section.get("offload_optimizer") or {}).get("device", "none"),
        offload_param=(section.get("offload_param") or {}).get("device", "none"),
        gradient_accumulation_steps=native.accumulation,
        digest="",
        config=config,
        optimizer={"name": canonical(name, params) or name, "params": params},
        scheduler=None,
    )


def _write_checkpoint(
    final: Path,
    *,
    shapes: Mapping[str, tuple[int, ...]],
    pieces: Callable[[], Iterator[Piece]],
    states: tuple[str, ...] = (),
    counters: Mapping[str, Counters] | None = None,
    buffers: Mapping[str, torch.Tensor] | None = None,
    **fields: Any,
) -> Path:
    """Write a checkpoint of what one process reads; ``fields`` are further ones of the manifest."""
    buffers = buffers or {}
    whole = tuple(
        Part(name=name, start=0, numel=torch.Size(shape).numel()) for name, shape in shapes.items()
    )
    subjects = (WEIGHTS, *(Subject(kind="optimizer", of=state_name) for state_name in states))
    contents = RankContents(
        parts=dict.fromkeys(subjects, whole),
        counters=counters or {},
        shadows={},
        others={BUFFER + name: buffer for name, buffer in buffers.items()},
        metadata={"format": "pt", "rank": "0"},
    )
    filing = Filing.of([contents.share()], shapes)
    fields = {"plan": None, "state": _FRESH, **fields}
    draft = Manifest(
        created=now(),
        versions=versions(),
        world_size=1,
        parameters=filing.parameters,
        buffers=[tensor_record(name, buffer) for name, buffer in buffers.items()],
        files=(),
        shadows=(),
        rng=False,
        extra={},
        **fields,
    )
    return Writing(
        group=ProcessGroup.alone(),
        final=final,
        draft=draft,
        filing=filing,
        contents=contents,
        pieces=pieces,
        # It is somebody's, as it is; the manifest says what of it is not finite.
        allow_not_finite=True,
    ).run()
