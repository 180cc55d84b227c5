"""Convert a checkpoint of DeepSpeed or accelerate, or a diffusers model, to a zerotune checkpoint.

    python examples/recipes/convert.py deepspeed-checkpoint checkpoint   # with optimizer states
    python examples/recipes/convert.py checkpoint-500 checkpoint         # accelerate's save_state
    python examples/recipes/convert.py unet checkpoint                   # weights alone

A folder written by accelerate's save_state may contain a DeepSpeed checkpoint in pytorch_model. If
the folder was saved without DeepSpeed, --base names a model folder whose config.json has the
model's class, unless the folder contains one. An EMA that diffusers' scripts save with the model
(unet_ema) becomes the shadow "ema". Files that cannot be converted are logged with reasons, and
listed in the checkpoint's extra["left_out"]. DeepSpeed's and accelerate's files are pickles, loaded
with weights_only, which runs no code from them.
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import attrs
import torch

from zerotune._util.files import system_errors
from zerotune.backend.distributed import ProcessGroup
from zerotune.backend.engine import EngineState
from zerotune.backend.upstream import require_deepspeed
from zerotune.checkpoint.contents import (
    BUFFER,
    Counters,
    Part,
    Portion,
    RankContents,
    plain_data,
    shadow_key,
)
from zerotune.checkpoint.drafting import now, tensor_record, versions
from zerotune.checkpoint.export.model import CONFIG, ModelFolderReader
from zerotune.checkpoint.filing import Filing
from zerotune.checkpoint.folders import checked_path
from zerotune.checkpoint.manifest import Manifest, PlanRecord, TensorRecord
from zerotune.checkpoint.tensors import WEIGHTS, Subject
from zerotune.checkpoint.writing import Writing
from zerotune.decisions import Decision, announce
from zerotune.errors import CheckpointCorruptError, CheckpointError
from zerotune.plan.optimizer.names import canonical

_ADAM_STATES: Final = ("exp_avg", "exp_avg_sq")
_ACCELERATES_OPTIMIZER: Final = "optimizer.bin"
_FRESH: Final = EngineState(
    global_step=0, micro_step=0, skipped_steps=0, scheduler={}, loss_scaler={}
)


def main(arguments: Sequence[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="folder to convert")
    parser.add_argument("target", type=Path, help="checkpoint to write; must not exist")
    parser.add_argument("--base", type=Path, help="model folder that names the model's class")
    options = parser.parse_args(arguments)
    written = convert(options.source, options.target, base=options.base)
    print(f"written to {written}")
    return written


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | None = None,
) -> Path:
    """Convert a folder of another format to a checkpoint, and return the checkpoint's path."""
    with system_errors(CheckpointError, target, f"cannot be written from {os.fspath(source)}"):
        folder, final = Path(source), checked_path(target)
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


def _from_deepspeed(native: NativeCheckpoint, final: Path, saved: StateFolder) -> Path:
    counters = Counters(step=native.step, scalars={})

    def portions() -> Iterator[Portion]:
        for each in native.parts():
            part = Part(name=each.name, start=each.start, numel=each.tensor.numel())
            subject = WEIGHTS if each.state is None else Subject(kind="optimizer", of=each.state)
            yield Portion(subject=subject, part=part, tensor=each.tensor.float())

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
        portions=portions,
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

        def portions() -> Iterator[Portion]:
            for name in shapes:
                tensors = {WEIGHTS: reader.tensor(name)}
                for state in states:
                    tensors[Subject(kind="optimizer", of=state)] = adam[name][state]
                for subject, tensor in tensors.items():
                    part = Part(name=name, start=0, numel=tensor.numel())
                    yield Portion(subject=subject, part=part, tensor=tensor.float().reshape(-1))

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
            portions=portions,
            saved=saved,
        )


def _from_model(reader: ModelFolderReader, final: Path) -> Path:
    shapes = {name: stored.shape for name, stored in reader.tensors.items()}

    def portions() -> Iterator[Portion]:
        for name in shapes:
            tensor = reader.tensor(name).float()
            part = Part(name=name, start=0, numel=tensor.numel())
            yield Portion(subject=WEIGHTS, part=part, tensor=tensor)

    return _write_checkpoint(
        final, origin="a model folder", model=reader.config, shapes=shapes, portions=portions
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
    portions: Callable[[], Iterator[Portion]],
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
        portions: Yields weights and optimizer states.
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

    def everything() -> Iterator[Portion]:
        yield from portions()
        if averages is None:
            return
        for part in whole.values():
            average = averages.reader.tensor(part.name).float().reshape(-1)
            yield Portion(subject=_AVERAGE, part=part, tensor=average)

    written = Writing(
        group=ProcessGroup.alone(),
        final=final,
        draft=draft,
        filing=filing,
        contents=contents,
        portions=everything,
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


# -- DeepSpeed's own checkpoint folders, read one piece of a weight or state at a time.


_OPTIMIZER_FILE: Final = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
# Module and name of each class in a checkpoint, besides tensors and plain containers.
_HARMLESS: Final = (
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"),
    ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
    ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"),
    ("deepspeed.runtime.fp16.loss_scaler", "LossScaleConfig"),
    ("deepspeed.runtime.fp16.loss_scaler", "LossScaleProfile"),
    ("deepspeed.utils.tensor_fragment", "fragment_address"),
    ("deepspeed.utils.tensor_fragment", "tensor_fragment"),
)


@attrs.frozen(kw_only=True, eq=False)
class NativePart:
    """Consecutive elements of a parameter or of one of its optimizer states."""

    state: str | None
    """Name of the state; ``None`` for the fp32 weight."""
    name: str
    start: int
    tensor: torch.Tensor
    """1-D fp32."""


class NativeCheckpoint:
    """A checkpoint that ``deepspeed_engine.save_checkpoint`` wrote at stage 1, 2 or 3.

    Args:
        folder: The folder passed to ``save_checkpoint``, or its subfolder ``global_step…``.
        accelerator: Name of the accelerator to use when importing DeepSpeed, such as ``"cuda"``.
    """

    def __init__(self, folder: Path, *, accelerator: str = "cpu") -> None:
        require_deepspeed(accelerator=accelerator)
        self.folder = folder
        if (folder / "latest").is_file():
            self.folder = folder / (folder / "latest").read_text(encoding="utf-8").strip()
            if not self.folder.is_dir():
                raise CheckpointCorruptError(
                    "the folder named in the file `latest` is missing", key=str(self.folder)
                )
        self._files = self._optimizer_files()
        self._model = self._load(self._model_file())
        first = self._optimizer(0)
        self.stage = int(first["zero_stage"])
        """1, 2 or 3."""
        self.world_size = len(self._files)
        count = first["partition_count"]
        if max(count if isinstance(count, list) else [count]) != self.world_size:
            raise CheckpointCorruptError(
                f"{count} processes saved this checkpoint, but only {self.world_size} of their "
                "files exist",
                key=str(self.folder),
                fix="copy the files of all processes into one folder",
            )
        self._groups = [
            {name: tuple(shape) for name, shape in group.items()}
            for group in self._model["param_shapes"]
        ]
        self.parameters: Mapping[str, tuple[int, ...]] = {
            name: shape for group in self._groups for name, shape in group.items()
        }
        """Full shape of every trained parameter."""
        self.frozen: Mapping[str, tuple[int, ...]] = {
            name: tuple(shape)
            for name, shape in (self._model.get("frozen_param_shapes") or {}).items()
        }
        """Full shape of every frozen parameter."""
        self.aliases: Mapping[str, str] = dict(self._model.get("shared_params") or {})
        """Additional names of tied parameters."""
        self.version = str(self._model.get("ds_version", "unknown"))
        """Version of DeepSpeed that wrote the checkpoint."""
        self._paddings = first.get("param_alignment_paddings")
        self._scaler = first.get("loss_scaler")
        self._base = _base_state(first)
        # Size of each rank's part; only the last rank's part is shorter in its file.
        self._widths = [part.numel() for part in first[self._masters]]

    @property
    def buffers(self) -> Mapping[str, torch.Tensor]:
        """The model's buffers."""
        return {name: self._model["module"][name] for name in self._model["buffer_names"]}

    @property
    def config(self) -> Mapping[str, Any]:
        """The DeepSpeed configuration of the run that saved the checkpoint."""
        config = dict(self._model.get("ds_config") or {})
        if config.get("steps_per_print") == math.inf:
            # accelerate's value for "never", which JSON cannot represent.
            del config["steps_per_print"]
        return config

    @property
    def accumulation(self) -> int:
        """Number of micro batches per optimizer step."""
        steps = self.config.get("gradient_accumulation_steps")
        return steps if isinstance(steps, int) else 1

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the optimizer's states."""
        return tuple(
            sorted(
                name
                for name, value in next(iter(self._base.values()), {}).items()
                if isinstance(value, torch.Tensor) and value.numel() > 1
            )
        )

    @property
    def step(self) -> int | None:
        """The optimizer's step counter; ``None`` if it has none."""
        steps = [int(state["step"]) for state in self._base.values() if "step" in state]
        return max(steps, default=None)

    @property
    def state(self) -> EngineState:
        """Counters, schedule state and loss scale."""
        model = self._model
        scheduler = model.get("lr_scheduler") or {}
        position = scheduler.get("last_batch_iteration", scheduler.get("last_epoch"))
        scale = getattr(self._scaler, "cur_scale", None)
        steps = int(model.get("global_steps") or 0)
        return EngineState(
            global_step=steps,
            micro_step=steps * self.accumulation,
            skipped_steps=int(model.get("skipped_steps") or 0),
            scheduler={} if position is None else {"last_batch_iteration": int(position)},
            loss_scaler={} if scale is None else {"cur_scale": float(scale)},
        )

    def parts(self) -> Iterator[NativePart]:
        """Yield every part of all weights and states once, reading one rank's file at a time."""
        for rank in range(self.world_size):
            saved = self._optimizer(rank)
            base = _base_state(saved)
            cut = self._sharded if self.stage == 3 else self._partitioned
            for index, master in enumerate(saved[self._masters]):
                states = base.get(index, {})
                tensors: list[tuple[str | None, Any]] = [(None, master)]
                tensors += [(name, states.get(name)) for name in self.states]
                for state, flat in tensors:
                    if flat is None or (flat.numel() == 0 and self.stage == 3):
                        raise CheckpointError(
                            "the optimizer states are not in the checkpoint, because they were "
                            "offloaded to NVMe",
                            key=str(self._files[rank]),
                            fix="save the checkpoint without NVMe offload, or with zerotune",
                        )
                    yield from cut(state, index, rank, flat.view(-1))

    def _partitioned(
        self, state: str | None, index: int, rank: int, flat: torch.Tensor
    ) -> Iterator[NativePart]:
        """Parts at stages 1 and 2: the concatenated vectors of all ranks contain the group."""
        begin = rank * self._widths[index]
        offset = 0
        paddings = self._paddings[index] if self._paddings else [0] * len(self._groups[index])
        for (name, shape), padding in zip(self._groups[index].items(), paddings, strict=True):
            first = max(offset, begin)
            last = min(offset + math.prod(shape), begin + flat.numel())
            if first < last:
                tensor = flat[first - begin : last - begin]
                yield NativePart(state=state, name=name, start=first - offset, tensor=tensor)
            offset += math.prod(shape) + int(padding)

    def _sharded(
        self, state: str | None, index: int, rank: int, flat: torch.Tensor
    ) -> Iterator[NativePart]:
        """Parts at stage 3: every rank has an equal part of each parameter."""
        begin = sum(self._widths[:index])
        offset = 0
        for name, shape in self.parameters.items():
            count = -(-math.prod(shape) // self.world_size)
            if begin <= offset < begin + flat.numel():
                start = min(rank * count, math.prod(shape))
                numel = min(count, math.prod(shape) - start)
                tensor = flat[offset - begin : offset - begin + numel]
                if numel:
                    yield NativePart(state=state, name=name, start=start, tensor=tensor)
            offset += count

    @property
    def _masters(self) -> str:
        return "fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"

    def _optimizer_files(self) -> list[Path]:
        files = {}
        for path in self.folder.iterdir():
            if match := _OPTIMIZER_FILE.fullmatch(path.name):
                if int(match[2]):
                    raise CheckpointError(
                        "checkpoints with tensor parallelism are not supported", key=str(path)
                    )
                files[int(match[1])] = path
        if not files:
            raise CheckpointError(
                "the folder contains no ZeRO optimizer states (zero_pp_rank_*_optim_states.pt)",
                key=str(self.folder),
                fix="use a checkpoint of stage 1, 2 or 3 written by save_checkpoint, not by "
                "save_16bit_model",
            )
        return [files[rank] for rank in sorted(files)]

    def _model_file(self) -> Path:
        for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
            if (self.folder / name).is_file():
                return self.folder / name
        raise CheckpointCorruptError(
            "the model state file is missing (mp_rank_00_model_states.pt)",
            key=str(self.folder),
        )

    def _optimizer(self, rank: int) -> Mapping[str, Any]:
        content: Mapping[str, Any] = self._load(self._files[rank])["optimizer_state_dict"]
        return content

    def _load(self, path: Path) -> dict[str, Any]:
        try:
            kinds = [getattr(importlib.import_module(at), name, None) for at, name in _HARMLESS]
            with torch.serialization.safe_globals([kind for kind in kinds if kind is not None]):
                content: dict[str, Any] = torch.load(
                    path, map_location="cpu", mmap=True, weights_only=True
                )
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"the pickle refers to a class that could run code ({str(error).splitlines()[0]})",
                key=str(path),
                fix="save the checkpoint without objects of custom classes in client_state, or "
                "load it into DeepSpeed and save it with zerotune",
            ) from error
        except (OSError, RuntimeError, EOFError) as error:
            raise CheckpointCorruptError(
                f"cannot be read ({error})", key=str(path), fix="use a different checkpoint"
            ) from error
        return content


def _base_state(saved: Mapping[str, Any]) -> Mapping[int, Mapping[str, Any]]:
    base = saved.get("base_optimizer_state", saved.get("optimizer_state_dict")) or {}
    if not isinstance(base, Mapping):
        raise CheckpointError("elastic checkpoints are not supported", key="elastic_checkpoint")
    states: Mapping[int, Mapping[str, Any]] = base.get("state", {})
    return states


if __name__ == "__main__":
    main()
