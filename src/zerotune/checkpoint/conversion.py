"""Convert other formats to checkpoints, and checkpoints to diffusers model folders."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import attrs
import torch

from zerotune._util.files import system_errors
from zerotune.backend.deepspeed.native_checkpoints import NativeCheckpoint
from zerotune.backend.distributed import ProcessGroup
from zerotune.backend.engine import EngineState
from zerotune.backend.single_file import INDEX, SUFFIX
from zerotune.checkpoint.contents import (
    BUFFER,
    Counters,
    Part,
    Piece,
    RankContents,
    now,
    plain_data,
    shadow_key,
    tensor_record,
    versions,
)
from zerotune.checkpoint.export.model import CONFIG, ModelFolderReader, export_checkpoint
from zerotune.checkpoint.export.single_file import export_checkpoint_as_file
from zerotune.checkpoint.folders import checked_path
from zerotune.checkpoint.manifest import MANIFEST, Manifest, PlanRecord, TensorRecord
from zerotune.checkpoint.save import Filing, Writing
from zerotune.checkpoint.tensors import WEIGHTS, Subject
from zerotune.decisions import Decision, announce
from zerotune.errors import CheckpointCorruptError, CheckpointError
from zerotune.optimizers.catalogue import canonical

_ADAM_STATES: Final = ("exp_avg", "exp_avg_sq")
_ACCELERATES_OPTIMIZER: Final = "optimizer.bin"
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
    """Convert a zerotune checkpoint to a model folder, or another format to a checkpoint.

    ================================  ==============================================
    ``source``                        ``target``
    ================================  ==============================================
    a zerotune checkpoint             a diffusers model folder, or one ``.safetensors``;
                                      in ComfyUI's layout if ``base`` is a pipeline
    DeepSpeed's ``save_checkpoint``   a checkpoint, with the optimizer's states
    accelerate's ``save_state``       a checkpoint, with Adam's states
    a diffusers model folder          a checkpoint of the weights alone
    ================================  ==============================================

    An EMA that diffusers' scripts save with the model (``unet_ema``) becomes the shadow ``"ema"``.
    Files that cannot be converted are logged with reasons, and listed in the checkpoint's
    ``extra["left_out"]``.

    Args:
        source: Folder to convert. A folder written by accelerate's ``save_state`` may contain a
            DeepSpeed checkpoint in ``pytorch_model``. If the folder was saved without DeepSpeed,
            the model's class is required to assign Adam's states to parameters.
        target: Path to write; must not exist.
        shadow: For a zerotune checkpoint, name of the EMA shadow to write instead of the trained
            weights.
        dtype: Dtype of the tensors in the model folder: ``"fp32"``, ``"bf16"`` or ``"fp16"``.
        base: For a zerotune checkpoint with frozen parameters, the model folder that training
            started from. For a folder written by accelerate's ``save_state``, ``base`` is a model
            folder whose ``config.json`` names the model's class.

    Returns:
        The absolute path of the result.

    Raises:
        CheckpointError: ``source`` is in none of these formats, or ``target`` exists.
        CheckpointCorruptError: A file is damaged.
        CheckpointMismatchError: ``source`` does not contain the shadow, or ``base`` lacks a frozen
            parameter.
    """
    with system_errors(CheckpointError, target, f"cannot be written from {os.fspath(source)}"):
        folder = Path(source)
        if (folder / MANIFEST).exists():
            if base is not None and _is_whole_state(Path(target), Path(base)):
                return export_checkpoint_as_file(
                    folder, target, base=base, shadow=shadow, dtype=dtype
                )
            return export_checkpoint(folder, target, shadow=shadow, dtype=dtype, base=base)
        final = checked_path(target)
        if final.exists():
            raise CheckpointError(
                "exists and is not overwritten", key=str(final), fix="choose a different name"
            )
        for native in (folder, folder / "pytorch_model"):
            if (native / "latest").is_file() or any(native.glob("*zero_pp_rank_*.pt")):
                return _from_deepspeed(NativeCheckpoint(native), final, StateFolder(folder))
        saved = StateFolder(folder)
        if saved.is_one:
            return _from_accelerate(saved, final, base=None if base is None else Path(base))
        with ModelFolderReader(folder) as reader:
            return _from_model(reader, final)


def _is_whole_state(target: Path, base: Path) -> bool:
    """Return whether ``target`` is to be a single file that contains a whole pipeline."""
    return target.suffix == SUFFIX and (base.is_file() or (base / INDEX).is_file())


def _from_deepspeed(native: NativeCheckpoint, final: Path, saved: StateFolder) -> Path:
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
        saved=saved,
    )


def _from_accelerate(saved: StateFolder, final: Path, *, base: Path | None) -> Path:
    with ModelFolderReader(saved.model) as reader:
        config = reader.config or (None if base is None else ModelFolderReader(base).config)
        shapes = {name: stored.shape for name, stored in reader.tensors.items()}
        adam = saved.adam(config, shapes)
        states = _ADAM_STATES if adam else ()
        # The optimizer's states tell which tensors were trained; the others are buffers.
        buffers = {name: reader.tensor(name) for name in shapes if adam and name not in adam}
        shapes = {name: shape for name, shape in shapes.items() if name not in buffers}

        def pieces() -> Iterator[Piece]:
            for name in shapes:
                tensors = {WEIGHTS: reader.tensor(name)}
                for state in states:
                    tensors[Subject(kind="optimizer", of=state)] = adam[name][state]
                for subject, tensor in tensors.items():
                    part = Part(name=name, start=0, numel=tensor.numel())
                    yield Piece(subject=subject, part=part, tensor=tensor.float().reshape(-1))

        steps = {name: int(each["step"]) for name, each in adam.items()}
        step = max(steps.values(), default=0)
        return _write_checkpoint(
            final,
            origin="accelerate's save_state",
            model=config,
            state=attrs.evolve(_FRESH, global_step=step, micro_step=step),
            plan=saved.plan() if adam else None,
            shapes=shapes,
            states=states,
            buffers=buffers,
            counters={name: Counters(step=count, scalars={}) for name, count in steps.items()},
            pieces=pieces,
            saved=saved,
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
    # If the script made the optimizer, the configuration does not name it; Adam's states
    # identify it.
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
    saved: StateFolder | None = None,
    counters: Mapping[str, Counters] | None = None,
    buffers: Mapping[str, torch.Tensor] | None = None,
    **fields: Any,
) -> Path:
    """Write a checkpoint from tensors that this process reads.

    Args:
        final: Path of the checkpoint.
        shapes: Shapes of the weights.
        pieces: Yields weights and optimizer states.
        states: Names of the optimizer's states.
        saved: The folder that was read, with EMA weights and other files beside the model.
        counters: Counters of the optimizer.
        buffers: Buffers of the model.
        **fields: Further fields of the manifest.
    """
    buffers = buffers or {}
    averages = None if saved is None else saved.averages(shapes)
    whole = {
        name: Part(name=name, start=0, numel=torch.Size(shape).numel())
        for name, shape in shapes.items()
    }
    subjects = [WEIGHTS, *(Subject(kind="optimizer", of=name) for name in states)]
    others = {BUFFER + name: buffer for name, buffer in buffers.items()}
    if averages:
        subjects.append(_AVERAGE)
        others[shadow_key(_AVERAGE.of, "steps")] = torch.tensor(averages.steps)
    contents = RankContents(
        parts=dict.fromkeys(subjects, tuple(whole.values())),
        counters=counters or {},
        shadows={},
        others=others,
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
        shadows=(_AVERAGE.of,) if averages else (),
        rng=False,
        extra={"left_out": dict(saved.left_out)} if saved and saved.left_out else {},
        **fields,
    )

    def everything() -> Iterator[Piece]:
        yield from pieces()
        if averages is None:
            return
        for part in whole.values():
            average = averages.reader.tensor(part.name).float().reshape(-1)
            yield Piece(subject=_AVERAGE, part=part, tensor=average)

    written = Writing(
        group=ProcessGroup.alone(),
        final=final,
        draft=draft,
        filing=filing,
        contents=contents,
        pieces=everything,
        # Convert the source unchanged; the manifest lists tensors that are not finite.
        allow_not_finite=True,
    ).run()
    if saved:
        announce(saved.decisions)
    return written


# -- Folders that accelerate's ``save_state`` and diffusers' scripts write.


_AVERAGE: Final = Subject(kind="shadow", of="ema")
_LEFT_OUT: Final = {
    "random_states_*": "other training loops draw noise differently, so the noise generator is "
    "reseeded from seed and step",
    "scheduler*": "the file contains a step number but no schedule, so the plan's schedule "
    "continues at this step",
    "sampler*": "other training loops order data differently, so training starts at the beginning "
    "of the data",
    "dl_state_dict*": "other training loops order data differently, so training starts at the "
    "beginning of the data",
    "scaler.pt": "the loss scale starts at the plan's value",
    "custom_checkpoint_*": "only the script's own class can load this file",
}
"""Files that are not converted, by accelerate's file names, with reasons."""


@attrs.frozen(kw_only=True)
class _Averages:
    reader: ModelFolderReader
    steps: int


class StateFolder:
    """A folder written by accelerate's ``save_state`` and diffusers' hooks.

    Attributes:
        left_out: Maps the name of each file that is not converted to the reason.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
        self.left_out = {
            name: reason
            for name in names
            for pattern, reason in _LEFT_OUT.items()
            if fnmatch(name, pattern)
        }

    @property
    def is_one(self) -> bool:
        """Whether accelerate saved the folder without DeepSpeed."""
        return (self.folder / _ACCELERATES_OPTIMIZER).is_file()

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """A decision for each file that is not converted."""
        return tuple(
            Decision(
                key=f"convert.{name}", before="saved", after=None, reason=why, severity="warning"
            )
            for name, why in self.left_out.items()
        )

    @property
    def model(self) -> Path:
        """Folder with the weights: a model folder from a diffusers hook, or accelerate's folder."""
        folders = [
            path.parent
            for path in sorted(self.folder.glob(f"*/{CONFIG}"))
            if not path.parent.name.endswith("_ema")
        ]
        if len(folders) > 1:
            raise CheckpointError(
                f"contains several models ({', '.join(path.name for path in folders)}), "
                "whose optimizer states are in one file",
                key=str(self.folder),
                fix="convert the folder of one of these models; its weights are converted without "
                "optimizer states",
            )
        if not folders and (self.folder / "pytorch_lora_weights.safetensors").is_file():
            raise CheckpointError(
                "contains only adapters",
                key=str(self.folder),
                fix="load the adapters into the model before training, with zerotune's "
                "load_adapters",
            )
        return folders[0] if folders else self.folder

    def averages(self, shapes: Mapping[str, tuple[int, ...]]) -> _Averages | None:
        """Return the EMA that diffusers' ``EMAModel`` saved, or ``None``.

        Args:
            shapes: Shapes of the model's weights, which the EMA must match.
        """
        found = [path.parent for path in sorted(self.folder.glob(f"*_ema/{CONFIG}"))]
        for path in found:
            reader = ModelFolderReader(path)
            there = {name: stored.shape for name, stored in reader.tensors.items()}
            if len(found) == 1 and all(there.get(name) == shape for name, shape in shapes.items()):
                steps = (reader.config or {}).get("optimization_step")
                return _Averages(reader=reader, steps=steps if isinstance(steps, int) else 0)
            self.left_out[path.name] = (
                "the EMA belongs to different weights"
                if len(found) == 1
                else "the folder contains several EMAs"
            )
        return None

    def adam(
        self, config: Mapping[str, Any] | None, shapes: Mapping[str, tuple[int, ...]]
    ) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """Return Adam's states, keyed by parameter name.

        If the states cannot be assigned to parameters, the result is empty and ``left_out``
        contains the reason.

        Args:
            config: The model's configuration.
            shapes: Shape of each tensor of the model.
        """
        states = [each for _, each in sorted(self._optimizer["state"].items())]
        names = _trained_names(config)
        if not states:
            why = "the file contains no states"
        elif not all({"step", *_ADAM_STATES} == each.keys() for each in states):
            why = f"the optimizer's states are {', '.join(map(str, states[0]))}, not Adam's"
        elif names is None:
            why = (
                "the file numbers the states, and no config.json names the model's class (set "
                "base= to a folder that contains this model)"
            )
        elif [shapes.get(name) for name in names] != [tuple(s["exp_avg"].shape) for s in states]:
            why = (
                "only some of the model's parameters were trained, and the file does not name them"
            )
        else:
            return dict(zip(names, states, strict=True))
        self.left_out[_ACCELERATES_OPTIMIZER] = f"{why}: the optimizer starts with fresh states"
        return {}

    def plan(self) -> PlanRecord:
        """Return a plan record with the folder's optimizer settings."""
        group = self._optimizer["param_groups"][0]
        params = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
        decoupled = group.get("decoupled_weight_decay", True)
        return PlanRecord(
            engine="plain",
            stage=0,
            precision="fp32",
            offload_optimizer="none",
            offload_param="none",
            gradient_accumulation_steps=1,
            digest="",
            config={},
            optimizer={
                "name": "AdamW" if decoupled else "Adam",
                "params": plain_data(params, _ACCELERATES_OPTIMIZER),
            },
            scheduler=None,
        )

    @cached_property
    def _optimizer(self) -> Mapping[str, Any]:
        path = self.folder / _ACCELERATES_OPTIMIZER
        try:
            loaded: Mapping[str, Any] = torch.load(
                path, map_location="cpu", weights_only=True, mmap=True
            )
            return {"state": loaded["state"], "param_groups": loaded["param_groups"]}
        except (pickle.UnpicklingError, RuntimeError, KeyError, TypeError) as error:
            raise CheckpointCorruptError(
                f"is not an optimizer file that accelerate saved ({error})", key=str(path)
            ) from error


def _trained_names(config: Mapping[str, Any] | None) -> list[str] | None:
    """Return a diffusers model's parameter names in the order that its optimizer numbers them."""
    import diffusers

    kind = getattr(diffusers, str((config or {}).get("_class_name")), None)
    if kind is None:
        return None
    with torch.device("meta"):
        return [name for name, _ in kind.from_config(dict(config or {})).named_parameters()]
