"""How this process was launched: its rank, and the number of processes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

import attrs
import torch.distributed as dist

from zerotune.errors import EngineError, InvalidValueError

_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_TASKS: Final = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
"""Variables in which ``srun`` and MPI's launchers write the number of processes they start."""


@attrs.frozen(kw_only=True)
class Launch:
    """Rank and world size, as set by ``torchrun``, ``accelerate`` or ``deepspeed``."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    launched: bool = False
    """Whether a launcher set the environment; ``False`` under a bare ``python``."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Launch:
        """Read the launcher's variables.

        Args:
            environment: Variables by name; default: ``os.environ``.
        """
        variables = os.environ if environment is None else environment
        given = [name for name in _TORCHRUN if name in variables]
        # `accelerate launch` with one process, and many notebooks, set some of these variables
        # without requesting a process group; only RANK or WORLD_SIZE requests one.
        if "RANK" not in given and "WORLD_SIZE" not in given:
            _check_single(variables)
            return cls()
        missing = [name for name in _TORCHRUN if name not in given]
        if missing:
            raise EngineError(
                f"the launcher set {', '.join(given)} but not {', '.join(missing)}",
                "use a launcher (torchrun, accelerate launch or deepspeed) or set the missing "
                "variables; to run a single process, unset all of these variables",
            )
        numbers = {}
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            try:
                numbers[name.lower()] = int(variables[name])
            except ValueError:
                raise InvalidValueError(
                    "must be a whole number", f"let the launcher set {name}", name, variables[name]
                ) from None
        launch = cls(**numbers, launched=True)
        if not 0 <= launch.rank < launch.world_size:
            raise InvalidValueError(
                f"must be between 0 and WORLD_SIZE - 1 = {launch.world_size - 1}",
                "let the launcher set RANK and WORLD_SIZE",
                "RANK",
                launch.rank,
            )
        return launch


def _check_single(variables: Mapping[str, str]) -> None:
    """Check that srun or MPI started no other process, which would train alone and save as well."""
    if dist.is_available() and dist.is_initialized():
        return
    for name in _TASKS:
        count = variables.get(name, "1")
        if count not in ("0", "1"):
            raise EngineError(
                f"{count} processes were started without RANK and MASTER_ADDR, so each would train "
                "alone and write the same files",
                "start one launcher per machine, which starts the processes (srun "
                f"--ntasks-per-node=1 torchrun --nnodes=1 --nproc-per-node={count} train.py), or "
                f"unset {name} to train in this process alone",
                name,
                count,
            )


def rank_and_world_size() -> tuple[int, int]:
    """Return rank and world size, from the launcher's variables if no process group exists yet."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    launch = Launch.from_environment()
    return launch.rank, launch.world_size
