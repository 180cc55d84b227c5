"""What the simulated device must see, and what it must not accuse."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.device import on_device
from tests.support.ranks import RanksFailed, run_ranks


def upload_and_double(host, *, waits):
    """Double page-locked numbers that another stream uploads."""
    simdev = torch.simdev
    side = simdev.Stream()
    with simdev.stream(side):
        there = host.to("simdev", non_blocking=True)
    if waits:
        simdev.current_stream().wait_stream(side)
    doubled = there * 2
    there.record_stream(simdev.current_stream())
    return doubled.cpu()


def add_on_a_side_stream(*, records):
    """Add one to numbers that are freed while another stream still reads them."""
    simdev = torch.simdev
    side = simdev.Stream()
    numbers = torch.full((1000,), 3.0, device="simdev")
    side.wait_stream(simdev.current_stream())
    with simdev.stream(side):
        more = numbers + 1
    if records:
        numbers.record_stream(side)
    del numbers
    torch.full((1000,), 7.0, device="simdev")
    simdev.current_stream().wait_stream(side)
    return more.cpu()


def overwrite_while_it_uploads(host, *, waits):
    """Reuse page-locked memory before or after its copy."""
    expected = host.clone()
    uploaded = torch.simdev.Event()
    there = host.to("simdev", non_blocking=True)
    uploaded.record()
    if waits:
        uploaded.synchronize()
    host.fill_(-1)
    return torch.equal(there.cpu(), expected)


def read_before_the_download(*, waits):
    there = torch.arange(1000.0, device="simdev")
    host = torch.zeros(1000, pin_memory=True)
    host.copy_(there, non_blocking=True)
    if waits:
        torch.simdev.current_stream().synchronize()
    return torch.equal(host, torch.arange(1000.0))


@on_device()
def test_a_missing_wait_is_seen_and_a_right_program_is_not_accused():
    host = torch.randn(300, 300).pin_memory()
    right = [torch.equal(upload_and_double(host, waits=True), host * 2) for _ in range(50)]
    wrong = [torch.equal(upload_and_double(host, waits=False), host * 2) for _ in range(50)]
    assert all(right)
    assert not all(wrong)


@on_device()
def test_a_missing_record_stream_is_seen_and_a_right_program_is_not_accused():
    four = torch.full((1000,), 4.0)
    right = [torch.equal(add_on_a_side_stream(records=True), four) for _ in range(50)]
    wrong = [torch.equal(add_on_a_side_stream(records=False), four) for _ in range(50)]
    assert all(right)
    assert not all(wrong)


@on_device()
def test_memory_that_is_overwritten_during_its_copy_is_seen():
    new = lambda: torch.randn(1000).pin_memory()  # noqa: E731
    assert all(overwrite_while_it_uploads(new(), waits=True) for _ in range(50))
    assert not all(overwrite_while_it_uploads(new(), waits=False) for _ in range(50))


@on_device()
def test_a_host_that_reads_before_the_download_is_seen():
    assert all(read_before_the_download(waits=True) for _ in range(50))
    assert not all(read_before_the_download(waits=False) for _ in range(50))


@pytest.mark.nightly
@on_device()
def test_page_locked_memory_may_be_freed_during_its_copy():
    for _ in range(20):
        there = torch.full((1000,), 5.0).pin_memory().to("simdev", non_blocking=True)
        torch.full((1000,), 6.0).pin_memory()
        assert torch.equal(there.cpu(), torch.full((1000,), 5.0))


@pytest.mark.nightly
@on_device()
def test_pageable_memory_may_change_as_soon_as_its_copy_is_queued():
    host = torch.full((1000,), 5.0)
    there = host.to("simdev", non_blocking=True)
    host.fill_(-1)
    assert torch.equal(there.cpu(), torch.full((1000,), 5.0))
    assert torch.simdev.counts()["uploads_from_pageable"] == 1


@on_device()
def test_operators_refuse_to_mix_devices():
    there = torch.ones(3, device="simdev")
    with pytest.raises(RuntimeError, match="same device"):
        there + torch.ones(3)
    with pytest.raises(RuntimeError, match="same device"):
        torch.cat([torch.ones(3), there])
    assert (there + torch.tensor(1.0)).tolist() == [2, 2, 2]
    assert there[torch.tensor([0, 2])].tolist() == [1, 1]


def _reads_device_memory():
    from tests.device import install

    install()
    import ctypes

    ctypes.string_at(torch.ones(3, device="simdev").data_ptr(), 4)


@pytest.mark.nightly
def test_a_host_that_reads_device_memory_dies():
    from tests.device.build import why_missing

    if why_missing():
        pytest.skip(why_missing())
    with pytest.raises(RanksFailed, match="exit code -11"):
        run_ranks(_reads_device_memory)


@on_device()
def test_freed_memory_is_not_a_number_for_whoever_still_reads_it():
    numbers = torch.ones(1000, device="simdev")
    stale = torch.as_strided(numbers, (1000,), (1,))
    storage = numbers.untyped_storage()
    del numbers
    storage.resize_(0)
    with pytest.raises(RuntimeError, match="storage is empty"):
        stale + 1


@pytest.mark.nightly
@on_device()
def test_a_parameter_moves_between_host_and_device():
    parameter = torch.nn.Parameter(torch.ones(3))
    accumulated = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
    parameter.data = parameter.data.to("simdev")
    assert parameter.device.type == "simdev"
    (parameter * 2).sum().backward()
    assert parameter.grad.tolist() == [2, 2, 2]
    del accumulated
    parameter.grad = None
    parameter.data = parameter.data.cpu()
    assert parameter.tolist() == [1, 1, 1]
    module = torch.nn.Linear(2, 2)
    weight = module.weight
    assert module.to("simdev").weight is weight


def order_of_one_seed(seed):
    torch.simdev.seed_order(seed, 0.3, 3000)
    host = torch.randn(100, 100).pin_memory()
    return [bool(torch.equal(upload_and_double(host, waits=False), host * 2)) for _ in range(60)]


@pytest.mark.nightly
@on_device()
def test_a_seed_repeats_its_order():
    first, again, other = (order_of_one_seed(seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other


@pytest.mark.nightly
@on_device(lateness=1.0)
def test_all_work_runs_at_once_if_nothing_is_late():
    host = torch.randn(100, 100).pin_memory()
    assert all(torch.equal(upload_and_double(host, waits=False), host * 2) for _ in range(50))


@pytest.mark.nightly
@on_device(lateness=0.0)
def test_nothing_runs_before_somebody_waits_if_everything_is_late():
    host = torch.zeros(4, pin_memory=True)
    there = torch.ones(4, device="simdev") + 1
    host.copy_(there, non_blocking=True)
    assert host.tolist() == [0] * 4
    torch.simdev.synchronize()
    assert host.tolist() == [2] * 4


@pytest.mark.nightly
@on_device(lateness=0.0)
def test_only_work_that_is_waited_for_runs():
    side, done = torch.simdev.Stream(), torch.simdev.Event()
    host, other = torch.zeros(4, pin_memory=True), torch.zeros(4, pin_memory=True)
    there = torch.ones(4, device="simdev")
    host.copy_(there, non_blocking=True)
    done.record()
    side.wait_stream(torch.simdev.current_stream())
    with torch.simdev.stream(side):
        other.copy_(there, non_blocking=True)
    done.synchronize()
    assert host.tolist() == [1] * 4
    assert other.tolist() == [0] * 4
    side.synchronize()
    assert other.tolist() == [1] * 4


@pytest.mark.nightly
@on_device()
def test_host_waits_are_counted_by_cause_and_bytes_by_direction():
    simdev = torch.simdev
    simdev.reset_counts()
    there = torch.ones(256).to("simdev")
    there.sum().item()
    there.cpu()
    event = simdev.Event()
    event.record()
    event.synchronize()
    simdev.current_stream().synchronize()
    simdev.synchronize()
    there.nonzero()
    assert simdev.host_waits() == {
        "blocking_upload": 1,
        "blocking_download": 1,
        "item": 1,
        "synchronize_event": 1,
        "synchronize_stream": 1,
        "synchronize_device": 1,
        "shape_depends_on_data": 1,
    }
    counts = simdev.counts()
    assert counts["upload_bytes"] == counts["download_bytes"] == 1024


@pytest.mark.nightly
@on_device()
def test_lines_that_make_the_host_wait_are_named():
    there = torch.ones(3, device="simdev")
    with torch.simdev.places_of_waits("tests") as places:
        for _ in range(2):
            there.sum().item()
        there.cpu()
    (first, twice), (second, once) = places.items()
    assert (first[0], twice, second[0], once) == ("item", 2, "blocking_download", 1)
    assert all("tests.device.test_device:" in place for _, place in places)


@pytest.mark.nightly
@on_device()
def test_memory_figures_follow_tensors_and_the_limit_holds():
    simdev = torch.simdev
    simdev.limit(1 << 20)
    before = simdev.memory_allocated()
    held = torch.empty(1000, device="simdev")
    assert simdev.memory_allocated() - before == 4096
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 20, device="simdev")
    del held
    assert simdev.memory_allocated() == before
    assert simdev.max_memory_allocated() >= before + 4096
    simdev.reset_peak_memory_stats()
    assert simdev.max_memory_allocated() == before
    assert simdev.mem_get_info() == ((1 << 20) - before, 1 << 20)


@pytest.mark.nightly
@on_device(lateness=0.0)
def test_memory_that_a_stream_still_uses_is_waited_for_before_none_is_left():
    simdev = torch.simdev
    simdev.limit(1 << 20)
    side = simdev.Stream()
    for _ in range(10):
        half = torch.ones(1 << 17, device="simdev")
        half.record_stream(side)
        side.wait_stream(simdev.current_stream())
        with simdev.stream(side):
            half.mul_(2)
        del half
    assert simdev.counts()["out_of_memory"] > 0


@pytest.mark.nightly
@on_device()
def test_page_locked_bytes_are_counted_and_memory_can_be_registered():
    simdev = torch.simdev
    before = simdev.host_memory_stats()["allocated_bytes.current"]
    host = torch.empty(1000, pin_memory=True)
    assert simdev.host_memory_stats()["allocated_bytes.current"] - before == 4000
    del host
    assert simdev.host_memory_stats()["allocated_bytes.current"] == before
    other = torch.empty(1000)
    simdev.check_error(simdev.cudart().cudaHostRegister(other.data_ptr(), other.nbytes, 0))
    assert other.is_pinned()
    simdev.seed_order(0, 0.0, 3000)
    there = other.to("simdev", non_blocking=True)
    with pytest.raises(RuntimeError, match="unregistered while copies"):
        simdev.cudart().cudaHostUnregister(other.data_ptr())
    there.cpu()
    simdev.check_error(simdev.cudart().cudaHostUnregister(other.data_ptr()))
    assert not other.is_pinned()


@pytest.mark.nightly
@on_device()
def test_random_numbers_come_in_the_programs_order_from_the_seed():
    torch.manual_seed(1)
    expected = torch.randn(4), torch.rand(4), torch.randperm(9)
    torch.manual_seed(1)
    there = "simdev"
    got = (
        torch.randn(4, device=there), torch.rand(4, device=there), torch.randperm(9, device=there),
    )  # fmt: skip
    assert all(torch.equal(a, b.cpu()) for a, b in zip(expected, got, strict=True))
    state = torch.simdev.get_rng_state()
    again = torch.rand(4, device=there)
    torch.simdev.set_rng_state(state)
    assert torch.equal(again.cpu(), torch.rand(4, device=there).cpu())
    assert not any(name.startswith("drained") for name in torch.simdev.counts())


def train(model, device):
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2, 1, 16, 16, generator=generator).to(device)
    times = torch.tensor([3, 5]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(4):
        loss = (model(images, times).sample - images).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def tiny_unet():
    from diffusers import UNet2DModel

    torch.manual_seed(0)
    return UNet2DModel(
        sample_size=16,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        norm_num_groups=8,
        block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )


@pytest.mark.nightly
@on_device(lateness=0.02)
def test_a_unet_trains_as_on_the_cpu_and_to_the_bit_as_at_another_lateness():
    model = tiny_unet()
    late, prompt = (copy.deepcopy(model).to("simdev") for _ in range(2))
    losses = train(late, "simdev")
    drained = {name for name in torch.simdev.counts() if name.startswith("drained")}
    assert not drained
    torch.simdev.seed_order(0, 1.0, 3000)
    assert train(prompt, "simdev") == losses
    for a, b in zip(late.parameters(), prompt.parameters(), strict=True):
        assert torch.equal(a.cpu(), b.cpu())
    # Some kernels are put together differently, which rounds differently.
    assert train(model, "cpu") == pytest.approx(losses, rel=1e-5)
