"""A closed engine leaves no thread, descriptor, group or replaced function in its process."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from tests.support.ranks import compile_io, ranks, run_ranks
from tests.support.runs import PLAIN, Case, build, start
from tests.support.sampling import nightly
from zerotune.backend.distributed import ProcessGroup
from zerotune.errors import CollectiveError, EngineError
from zerotune.plan.plan import DeepSpeedPlan

pytestmark = pytest.mark.deepspeed

STAGE_2 = Case(stage=2, offload="cpu", engine="deepspeed")
STAGE_3 = Case(stage=3, offload="cpu", precision="bf16", engine="deepspeed")
HOST = Case(stage=2, offload="cpu", engine="host")


def small() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Linear(64, 8))


def hidden(*, timeout_s: float = 600.0) -> Any:
    """Build an engine that steps in a thread: the host engine."""
    plan = DeepSpeedPlan.build(
        stage=2,
        offload="cpu",
        precision="bf16",
        micro_batch_size=2,
        optimizer={"type": "AdamW", "params": {"lr": 1e-3}},
    )
    return build(small(), plan, timeout_s=timeout_s, engine="host")


def train(engine: Any, steps: int = 2) -> None:
    for _ in range(steps):
        loss = engine(torch.ones(2, 8).to(engine.dtype)).float().square().mean()
        engine.backward(loss)
        engine.step()
        # Free its graph before the next forward pass.
        del loss


def held() -> tuple[int, int, int]:
    """Count this process's threads, descriptors and groups."""
    process = psutil.Process()
    groups = dist.distributed_c10d._world.pg_map
    return process.num_threads(), process.num_fds(), len(groups)


def held_at_last(expected: tuple[int, int, int] | None) -> tuple[int, int, int]:
    """Return the counts once they are as expected or have not changed for a second.

    Threads of a closed group end by themselves, and connections once the other rank's have ended.
    """
    if dist.is_initialized():
        dist.barrier()
    reads = [held()]
    while reads[-1] != expected and (
        len(reads) < 100 and (len(reads) < 4 or len(set(reads[-4:])) > 1)
    ):
        time.sleep(0.3)
        reads.append(held())
    return reads[-1]


def counts(case: Case | None) -> list[tuple[int, int, int]]:
    """Return the counts after each of two engines, which stay referenced."""
    found, kept = [], []
    for _ in range(2):
        engine = hidden() if case is None else start(case, small())
        kept.append(engine)
        train(engine)
        # Start a second engine beside the first, so that both share DeepSpeed's process-wide
        # objects.
        with start(PLAIN if case is None else case, small()) as second:
            train(second)
        train(engine)
        engine.close()
        found.append(held_at_last(found[0] if found else None))
    return found


def in_a_group(call: Callable[[], Any]) -> Any:
    """Run ``call`` in an existing process group, as under a launcher."""
    dist.init_process_group("gloo")
    return call()


@pytest.mark.parametrize("case", [STAGE_3, None, *nightly(PLAIN, STAGE_2, HOST)], ids=str)
def test_closed_engines_leave_no_thread_descriptor_or_group_on_two_ranks(case: Case | None) -> None:
    for found in run_ranks(partial(in_a_group, partial(counts, case)), world_size=2):
        assert found[0] == found[1]
        assert found[0][2] == 1


# Without a launcher the last engine closes the process group, too.
@pytest.mark.parametrize("case", [PLAIN, STAGE_3], ids=str)
def test_closed_engines_leave_no_thread_descriptor_or_group(case: Case) -> None:
    (found,) = run_ranks(counts, case)
    assert found[0] == found[1]
    assert found[0][2] == 0


@pytest.mark.nvme
def test_closed_engines_with_nvme_leave_no_thread_or_descriptor(tmp_path: Any) -> None:
    compile_io()
    case = Case(stage=3, offload="nvme", offload_param="nvme", nvme_path=str(tmp_path))
    for found in run_ranks(counts, case, world_size=2):
        assert found[0] == found[1]


def groups_after_a_failed_start() -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zerotune.backend.deepspeed.sharded.ShardedWrapper.improve", _fails)
        with pytest.raises(RuntimeError, match="after DeepSpeed has started"):
            start(STAGE_3, small())
    return held()[2]


def _fails(_engine: Any) -> None:
    raise RuntimeError("after DeepSpeed has started")


def test_a_failed_start_leaves_no_process_group() -> None:
    counted = partial(in_a_group, groups_after_a_failed_start)
    assert run_ranks(counted, world_size=2) == [1, 1]


def timeouts() -> list[timedelta]:
    """Return the timeouts of the groups that a host engine makes, without DeepSpeed's."""
    from deepspeed.utils import groups

    before = set(dist.distributed_c10d._world.pg_map)
    with hidden(timeout_s=77):
        made = set(dist.distributed_c10d._world.pg_map) - before - {groups._WORLD_GROUP}
        backends = [each._get_backend(torch.device("cpu")) for each in made]
        return [each.options._timeout for each in backends]


def test_every_group_has_the_timeout_of_its_engine() -> None:
    found = run_ranks(partial(in_a_group, timeouts), world_size=2)
    # Weights and gradients pass through shared memory.
    assert found == [[timedelta(seconds=77)]] * 2


def wait_for_a_closed_one() -> str:
    group = ProcessGroup(backend="gloo", timeout_s=60)
    group.barrier("begin")
    if group.is_main:
        group.close()
        with pytest.raises(EngineError, match="cannot take part in 'save'"):
            group.barrier("save")
        dist.barrier()
        return ""
    began = time.monotonic()
    with pytest.raises(CollectiveError) as caught:
        group.gather(1, purpose="save")
    assert time.monotonic() - began < 30, "it waited for the timeout"
    dist.barrier()
    return str(caught.value)


def test_a_rank_that_waits_for_a_closed_one_gets_an_error_that_says_so() -> None:
    _, message = run_ranks(partial(in_a_group, wait_for_a_closed_one), world_size=2)
    assert "rank 0 has closed its engine after 0 backward passes" in message


@ranks(1)
def test_closing_the_last_stage_3_engine_restores_torchs_linear() -> None:
    before = functional.linear
    first = start(STAGE_3, small())
    assert functional.linear is not before
    with start(STAGE_3, small()) as second:
        first.close()
        assert functional.linear is not before, "the second still needs it"
        train(second)
    assert functional.linear is before
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zerotune.backend.deepspeed.sharded.ShardedWrapper.improve", _fails)
        with pytest.raises(RuntimeError, match="after DeepSpeed has started"):
            start(STAGE_3, small())
    assert functional.linear is before
    with start(STAGE_3, small()):
        ours = functional.linear = partial(before)
    assert functional.linear is ours, "it was not DeepSpeed's any more"
    functional.linear = before
