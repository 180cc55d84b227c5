"""Ranks on the device, and their collectives."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.device import on_device
from tests.device.cases import CASES, loss_of, run, started

BY_NAME = {case.name: case for case in CASES}


@pytest.mark.deepspeed
@on_device(ranks=2)
def test_gradients_of_no_streaming_rank_make_the_host_wait(tmp_path):
    with torch.simdev.places_of_waits() as places:
        run(BY_NAME["streamed, 2 ranks"], 1, 0.02, tmp_path)
    downloads = {where for cause, where in places if cause == "blocking_download"}
    assert not {where for where in downloads if where.startswith("zerotune.backend.host")}


@pytest.mark.deepspeed
@on_device(ranks=2, lateness=0.0)
def test_an_engine_may_close_while_weights_are_uploaded():
    case = BY_NAME["streamed, 2 ranks"]
    with started(case) as engine:
        for _ in range(2):
            engine.backward(loss_of(case, engine, 1))
            engine.step()


def start():
    dist.init_process_group(dist.get_default_backend_for_device("simdev"))
    return dist.get_rank()


@pytest.mark.nightly
@on_device(ranks=2, lateness=0.02)
def test_collectives_of_device_tensors_compute_what_they_say():
    rank = start()
    there = torch.full((4,), rank + 1.0, device="simdev")
    dist.all_reduce(there)
    assert there.tolist() == [3] * 4
    dist.all_reduce(there, op=dist.ReduceOp.AVG)
    assert there.tolist() == [3] * 4
    own = torch.full((2,), float(rank), device="simdev")
    both = torch.empty(4, device="simdev")
    dist.all_gather_into_tensor(both, own)
    assert both.tolist() == [0, 0, 1, 1]
    part = torch.empty(2, device="simdev")
    dist.reduce_scatter_tensor(part, both)
    assert part.tolist() == [2 * rank] * 2
    dist.broadcast(own, 1)
    assert own.tolist() == [1, 1]
    dist.barrier()


@pytest.mark.nightly
@on_device(ranks=2, lateness=0.0)
def test_a_collective_that_nobody_waits_for_comes_late():
    start()
    there = torch.ones(4, device="simdev")
    host = torch.empty(4, pin_memory=True)
    work = dist.all_reduce(there, async_op=True)
    host.copy_(there, non_blocking=True)
    torch.simdev.current_stream().synchronize()
    assert host.tolist() == [1] * 4
    work.wait()
    assert there.tolist() == [2] * 4
