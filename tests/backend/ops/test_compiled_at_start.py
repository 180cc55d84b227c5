"""Ops that an engine compiles when it starts, and its error if a build is impossible."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.support.ranks import ranks, run_ranks
from tests.support.runs import build

pytestmark = pytest.mark.deepspeed


def started(engine: str = "deepspeed") -> bool:
    """Start an engine; return whether DeepSpeed loaded its shared-memory communication op."""
    import torch

    from zerotune import DeepSpeedPlan

    plan = DeepSpeedPlan.build(stage=2, offload="cpu", precision="fp32", optimizer="AdamW")
    with build(torch.nn.Linear(8, 8), plan, engine=engine):
        from deepspeed.comm import comm

        return comm.cdb.shm_comm_op is not None


def test_one_process_does_not_load_the_shared_memory_communication_op():
    assert run_ranks(started) == [False]


def test_two_processes_load_the_shared_memory_communication_op():
    assert run_ranks(started, world_size=2) == [True, True]


@ranks(1)
def test_an_engine_compiles_into_the_folder_of_its_environment_and_says_so(tmp_path: Path):
    import torch

    from zerotune import DeepSpeedPlan
    from zerotune.backend.op_builds import FOLDER, _environments_folder, extensions_folder

    compiled = extensions_folder()
    _environments_folder.cache_clear()
    os.environ.pop(FOLDER, None)
    os.environ["XDG_CACHE_HOME"] = str(tmp_path)
    chosen = extensions_folder()
    chosen.parent.mkdir()
    chosen.symlink_to(compiled)
    assert chosen.parent == tmp_path / "torch_extensions"
    plan = DeepSpeedPlan.build(stage=2, offload="cpu", precision="fp32", optimizer="AdamW")
    with build(torch.nn.Linear(8, 8), plan) as engine:
        decided = {decision.key: decision.after for decision in engine.decisions}
    assert decided[FOLDER] == str(chosen)
    assert FOLDER not in os.environ


@pytest.mark.parametrize("engine", ["deepspeed", "host"])
@ranks(1)
def test_a_failed_start_names_a_lock_that_may_belong_to_another_machine(
    tmp_path: Path, engine: str
):
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    os.utime(lock, (0, time.time() - 3600))
    from deepspeed.ops.op_builder.builder import OpBuilder

    from zerotune.backend import op_builds
    from zerotune.errors import PlatformError

    # Imitate a process that has not loaded the op yet.
    OpBuilder._loaded_ops.clear()
    os.environ["TORCH_EXTENSIONS_DIR"] = str(tmp_path)
    op_builds.filesystem_kind = lambda _folder: "nfs4"
    with pytest.raises(PlatformError) as refused:
        started(engine)
    message = str(refused.value)
    assert f"delete {lock}" in message
    assert "doctor" not in message
