"""What the simulated device must see, and what it must not accuse."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.device import on_device


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


@on_device()
def test_operators_refuse_to_mix_devices():
    there = torch.ones(3, device="simdev")
    with pytest.raises(RuntimeError, match="same device"):
        there + torch.ones(3)
    with pytest.raises(RuntimeError, match="same device"):
        torch.cat([torch.ones(3), there])
    assert (there + torch.tensor(1.0)).tolist() == [2, 2, 2]
    assert there[torch.tensor([0, 2])].tolist() == [1, 1]


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
