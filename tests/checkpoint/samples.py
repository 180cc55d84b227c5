"""Small checkpoints made without an engine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from zerotune.backend.engine import EngineState
from zerotune.checkpoint.manifest import (
    MANIFEST,
    FileRecord,
    Manifest,
    ParameterRecord,
    PlanRecord,
    TensorRecord,
)
from zerotune.checkpoint.staging import Staging
from zerotune.checkpoint.tensors import EXPORT, TensorFile, TensorSpec, TensorWriter


def file_record(*, nbytes: int, sha256: str) -> FileRecord:
    return FileRecord(name="rank-0.safetensors", kind="rank", of="0", nbytes=nbytes, sha256=sha256)


def sample_manifest(
    *, files: tuple[FileRecord, ...] = (), extra: dict[str, Any] | None = None, step: int = 3
) -> Manifest:
    files = files or (file_record(nbytes=12, sha256="ab" * 32),)
    return Manifest(
        created="2026-01-02T03:04:05+00:00",
        versions={"zerotune": "0.1.0"},
        world_size=1,
        plan=PlanRecord(
            engine="deepspeed",
            stage=2,
            precision="bf16",
            offload_optimizer="cpu",
            offload_param="none",
            gradient_accumulation_steps=1,
            digest="cd" * 32,
            config={"train_batch_size": 4, "zero_optimization": {"stage": 2}},
            optimizer={"name": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.999]}},
            scheduler=None,
        ),
        state=EngineState(
            global_step=step,
            micro_step=3,
            skipped_steps=0,
            scheduler={"last_batch_iteration": 2},
            loss_scaler={},
        ),
        model={"_class_name": "Sample", "act": None},
        parameters=[
            ParameterRecord(name="weight", shape=(2, 3), step=3, states=["exp_avg"], scalars={})
        ],
        frozen=[TensorRecord(name="fixed", shape=(4,), dtype="bfloat16")],
        aliases={"tied": "weight"},
        buffers=[],
        files=files,
        shadows=["ema"],
        rng=True,
        extra=extra if extra is not None else {"epoch": 1},
    )


def fill(folder: Path, *, extra: dict[str, Any] | None = None, step: int | None = None) -> None:
    """Write a whole checkpoint of one tensor into an existing folder; its name tells the step."""
    numbered = re.match(r"step-(\d+)", folder.name)
    if step is None:
        step = int(numbered[1]) if numbered else 3
    tensor = torch.arange(6.0)
    file = TensorFile.of("rank-0.safetensors", EXPORT, [TensorSpec.of("t", tensor)], metadata={})
    file.create(folder)
    with TensorWriter(folder, [file]) as writer:
        writer.write("t", tensor)
        (record,) = writer.confirm([file], writer.written)
    record = file_record(nbytes=record.nbytes, sha256=record.sha256)
    manifest = sample_manifest(files=(record,), extra=extra, step=step)
    (folder / MANIFEST).write_text(manifest.to_json())


def publish(final: Path, *, extra: dict[str, Any] | None = None, step: int | None = None) -> Path:
    staging = Staging(final)
    fill(staging.path, extra=extra, step=step)
    staging.publish()
    return final
