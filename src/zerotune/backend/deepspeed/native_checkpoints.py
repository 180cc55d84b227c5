"""Read DeepSpeed's own checkpoint folders, one piece of a weight or state at a time.

The files are pickles, loaded with ``weights_only``, which runs no code from them. Only a few
harmless DeepSpeed classes are allowed.
"""

from __future__ import annotations

import importlib
import math
import pickle
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import attrs
import torch

from zerotune.backend.engine import EngineState
from zerotune.backend.upstream import require_deepspeed
from zerotune.errors import CheckpointCorruptError, CheckpointError

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
