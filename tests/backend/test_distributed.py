"""Launch environments, and collectives that name the missing rank."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from tests.support.ranks import RanksFailed, free_port, on_a_machine, ranks, run_ranks
from tests.support.waiting import wait_for
from zerotune.backend import process_groups
from zerotune.backend.distributed import ProcessGroup
from zerotune.backend.launch import Launch
from zerotune.errors import CollectiveError, EngineError, InvalidValueError

TORCHRUN = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def test_plain_python_launches_a_single_process() -> None:
    assert Launch.from_environment({}) == Launch(rank=0, local_rank=0, world_size=1, launched=False)


def test_a_launchers_environment_is_parsed() -> None:
    assert Launch.from_environment(TORCHRUN) == Launch(
        rank=1, local_rank=1, world_size=2, launched=True
    )


def test_an_incomplete_launcher_environment_raises_an_error_naming_the_missing_variables() -> None:
    variables = {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE")}
    with pytest.raises(EngineError, match="LOCAL_RANK, MASTER_ADDR, MASTER_PORT"):
        Launch.from_environment(variables)


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_processes_that_srun_or_mpi_start_without_a_rendezvous_are_refused(name: str) -> None:
    with pytest.raises(EngineError, match=rf"{name} = '2'.*torchrun .*--nproc-per-node=2"):
        Launch.from_environment({name: "2"})
    assert Launch.from_environment({name: "1"}) == Launch()
    assert Launch.from_environment(TORCHRUN | {name: "2"}).world_size == 2


@ranks(1)
def test_processes_of_srun_are_accepted_in_a_group_that_the_script_created() -> None:
    variables = {"SLURM_STEP_NUM_TASKS": "2"}
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    assert Launch.from_environment(variables) == Launch()
    dist.destroy_process_group()
    with pytest.raises(EngineError, match="train alone"):
        Launch.from_environment(variables)


@pytest.mark.parametrize(("name", "value"), [("RANK", "one"), ("RANK", "2"), ("WORLD_SIZE", "")])
def test_an_invalid_launcher_variable_is_named(name: str, value: str) -> None:
    with pytest.raises(InvalidValueError) as caught:
        Launch.from_environment(TORCHRUN | {name: value})
    assert caught.value.key == name


@ranks(2)
def test_a_barrier_names_the_rank_that_never_arrived() -> None:
    group = ProcessGroup(backend="gloo", timeout_s=30)
    if group.rank == 1:
        return
    with pytest.raises(CollectiveError, match=r"(?s)save a checkpoint.*Ranks? 1 is missing.*Fix:"):
        group.barrier("save a checkpoint", timeout_s=2)


def losing_a_machine(folder: str, lost: int) -> None:
    """Lose one of several machines; record the errors of the others."""
    rank, told = int(os.environ["RANK"]), Path(folder)
    on_a_machine(f"machine-{rank}")
    group = ProcessGroup(backend="gloo", timeout_s=60)
    group.barrier("begin")
    if rank == lost:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        group.barrier("go on")
    except CollectiveError as error:
        (told / f"told-{rank}").write_text(str(error))
    # Rank 0 hosts the store.
    others = int(os.environ["WORLD_SIZE"]) - 1
    wait_for(lambda: len([*told.glob("told-*")]) == others)


@pytest.mark.parametrize(("lost", "world_size"), [(0, 2), (1, 3)])
def test_a_rank_lost_with_its_machine_is_named(lost: int, world_size: int, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match=f"rank {lost}: died with exit code -9"):
        run_ranks(losing_a_machine, str(tmp_path), lost, world_size=world_size)
    for rank in {*range(world_size)} - {lost}:
        told = (tmp_path / f"told-{rank}").read_text()
        assert f"(Rank {lost} is missing: rank {lost} " in told
        assert re.search(rf"\(process \d+ on machine-{lost}\)\)", told)


def late(folder: str) -> None:
    """End rank 2's process; rank 1 arrives only after rank 0 has its error."""
    told, group = Path(folder) / "told", ProcessGroup(backend="gloo", timeout_s=60)
    group.barrier("begin")
    if group.rank == 2:
        os._exit(3)
    if group.rank == 1:
        wait_for(told.exists)
        return
    try:
        group.barrier("save a checkpoint")
    except CollectiveError as error:
        told.write_text(str(error))


def test_a_barrier_stops_waiting_once_a_process_has_ended(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match=r"rank 2: died with exit code 3$"):
        run_ranks(late, str(tmp_path), world_size=3)
    said = (tmp_path / "told").read_text()
    assert "'save a checkpoint'; detected after" in said
    assert "(Rank 2 is missing: rank 2 has ended" in said


def stopping_the_store() -> None:
    """Stop the process that hosts the store while the other rank, on another machine, reads it."""
    on_a_machine(f"machine-{os.environ['RANK']}")
    group = ProcessGroup(backend="gloo", timeout_s=60)
    pids = group.gather(os.getpid())
    if group.is_main:
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    with pytest.raises(CollectiveError, match="neither can its store"):
        group.barrier("go on", timeout_s=3)
    group.close()
    os.kill(pids[0], signal.SIGCONT)


def test_a_rank_closes_its_group_while_the_host_of_the_store_is_stopped() -> None:
    run_ranks(stopping_the_store, world_size=2, timeout_s=90)


def lost_on_the_way(folder: str, place: str, machines: bool, later: bool) -> None:
    """Kill rank 1 after all ranks arrived, before the first group, or a ``later`` one, is made."""
    rank, here = int(os.environ["RANK"]), Path(folder)
    if machines:
        on_a_machine(f"machine-{rank}")
    # Wait for both ranks, so that neither waits for the other's start.
    (here / f"here-{rank}").touch()
    wait_for(lambda: len([*here.glob("here-*")]) == 2)
    make = partial(ProcessGroup, backend="gloo", timeout_s=5)
    if later:
        ProcessGroup(backend="gloo", timeout_s=60)
        make = partial(ProcessGroup, backend="gloo", timeout_s=1)
    if rank == 1:
        setattr(torch.distributed, place, lambda **_: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(CollectiveError) as caught:
        make()
    (here / "told").write_text(str(caught.value))


@pytest.mark.parametrize(
    ("place", "machines", "later"),
    [
        ("init_process_group", True, False),
        ("new_group", False, False),
        ("new_group", True, True),
    ],
)
def test_a_rank_lost_while_the_group_starts_is_named(
    place: str, machines: bool, later: bool, tmp_path: Path
) -> None:
    with pytest.raises(RanksFailed, match=r"^rank 1: died with exit code -9$"):
        run_ranks(lost_on_the_way, str(tmp_path), place, machines, later, world_size=2)
    said = (tmp_path / "told").read_text()
    assert "(Rank 1 is missing: rank 1 " in said
    assert re.search(r"\(process \d+ on machine-1\)" if machines else "has ended", said)


@pytest.mark.parametrize("came", [False, True])
def test_a_rank_lost_with_the_agents_store_during_the_start_is_named(
    came: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    agent = [TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)]
    if came:
        agent[0].set("zerotune/arrived/0/0", json.dumps({}))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    launch = Launch(rank=1, local_rank=0, world_size=3 if came else 2, launched=True)
    arrivals = process_groups.Arrivals(launch, timeout=timedelta(seconds=60))
    look = arrivals._look
    monkeypatch.setattr(arrivals, "_look", lambda: (look(), agent.clear()))
    what = (
        "has exited with its launcher, which hosted the rendezvous store"
        if came
        else "never arrived"
    )
    with pytest.raises(CollectiveError, match=rf"\(Rank 0 is missing: rank 0 {what}\)"):
        arrivals.wait()


@ranks(2)
def test_collectives_exchange_values_and_report_disagreement() -> None:
    import torch

    group = ProcessGroup(backend="gloo", timeout_s=30)
    try:
        group.agree(group.rank, "the plan")
        disagreement = ""
    except CollectiveError as error:
        disagreement = str(error)
    assert group.broadcast({"from": group.rank}, source=1) == {"from": 1}
    assert group.gather(group.rank * 10) == [0, 10]
    assert group.mean(float(group.rank), device=torch.device("cpu")) == 0.5
    assert group.sum_(torch.ones(3)).tolist() == [2.0, 2.0, 2.0]
    assert "the plan" in disagreement
    assert "rank 1: 1" in disagreement


SCRIPT = Path(__file__).parents[1] / "support" / "launched.py"


def clean_environment() -> dict[str, str]:
    hidden = ("RANK", "WORLD", "MASTER", "ACCELERATE", "DS_", "LOCAL")
    return {k: v for k, v in os.environ.items() if not k.startswith(hidden)}


def launch(command: list[str], tmp_path: Path) -> list[dict[str, Any]]:
    """Start the script under a launcher; return what each rank wrote, in rank order."""
    done = subprocess.run(
        [*command, str(SCRIPT), str(tmp_path)],
        env=clean_environment() | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(path.read_text()) for path in sorted(tmp_path.glob("rank*.json"))]


LAUNCHERS = {
    "python": ([sys.executable], "", 1),
    "torchrun": (
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"],
        "--master-port",
        2,
    ),
    "accelerate": (
        # Requests stage 3 through accelerate; the script's own plan says 2 and must win.
        [
            *(sys.executable, "-m", "accelerate.commands.launch", "--use_deepspeed"),
            *("--zero_stage=3", "--num_processes=2"),
        ],
        "--main_process_port",
        2,
    ),
    "accelerate on CPU": (
        [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes=1"],
        "",
        1,
    ),
    "deepspeed": (
        [sys.executable, str(Path(sys.executable).parent / "deepspeed"), "--num_gpus=2"],
        "--master_port",
        2,
    ),
}


# Nightly: each launcher imports torch in two to four processes.
@pytest.mark.nightly
@pytest.mark.deepspeed
@pytest.mark.parametrize("name", LAUNCHERS)
def test_the_same_script_runs_under_every_launcher(name: str, tmp_path: Path) -> None:
    command, port_option, world_size = LAUNCHERS[name]
    if port_option:
        command = [*command, f"{port_option}={free_port()}"]
    ranks = launch(command, tmp_path)
    assert [seen["rank"] for seen in ranks] == list(range(world_size))
    assert {seen["world_size"] for seen in ranks} == {world_size}
    assert {seen["stage"] for seen in ranks} == {2}
    assert all(seen["losses"][-1] < seen["losses"][0] for seen in ranks)
    assert not ranks[0]["changed_environment"]
    for rank in range(world_size) if sys.platform == "linux" else ():
        # A gloo thread at work during interpreter shutdown can abort the process.
        threads = json.loads((tmp_path / f"threads-{rank}.json").read_text())
        assert threads
        assert not [name for name in threads if "gloo" in name]
