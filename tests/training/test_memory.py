"""The predicted memory of a run equals the plan's estimate, and memory in use is measured."""

from __future__ import annotations

import mmap

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.models import digits_batch, tiny_unet
from zerotune import ImageTensors
from zerotune.errors import UnresolvedPlanError
from zerotune.plan import DeepSpeedPlan, ModelFacts, RunFacts
from zerotune.platform import Platform
from zerotune.platform.facts import GIB
from zerotune.training import memory
from zerotune.training.activations import known_activations
from zerotune.training.memory import (
    counted_apart,
    device_peak,
    expected_memory,
    host_now,
    host_peak,
)

MODEL = ModelFacts.from_shapes([("a", (2, 5)), ("b", (5,))])


def resolved(**changes):
    plan = DeepSpeedPlan.build(stage=2, offload="cpu", precision="bf16", micro_batch_size=4)
    known = {"platform": Platform.synthetic("cuda"), "model": MODEL, "run": RunFacts()}
    return plan.resolve(**(known | changes))


def test_a_running_plan_needs_the_estimated_memory():
    plan = resolved()
    expected = plan.requested.estimate(MODEL, platform=plan.platform, ema="host")
    found = expected_memory(plan, emas=["host"])
    assert (found.device, found.host, found.nvme) == (expected.device, expected.host, expected.nvme)
    assert {item.component for item in found.items} >= {"gradients", "EMA", "optimizer states"}


def test_each_shadow_is_counted_in_its_place():
    found = expected_memory(resolved(), emas=["host", "host", "device", "nvme"])
    emas = [(item.place, item.nbytes) for item in found.items if item.component == "EMA"]
    # Of a small EMA on disk, everything is in memory too.
    assert emas == [("host", 60), ("host", 60), ("device", 60), ("nvme", 60), ("host", 60)]


def test_activations_are_predicted_for_the_actual_batch():
    images, labels = digits_batch(4)
    data = ImageTensors(images=images, labels=labels)
    known = known_activations(tiny_unet(), data, batch=4)
    assert known.size == (8, 8), "grey images are pixels"
    full, less = known.facts.full.base, known.facts.checkpointed.base
    assert 2 * images.nbytes < less < full
    found = expected_memory(resolved(), activations=known.facts, size=known.size)
    (item,) = [item for item in found.items if item.component == "activations"]
    assert (item.nbytes, item.note) == (full, "all kept")
    twice = known_activations(tiny_unet(), data, batch=8, checkpointed=False)
    assert full < twice.facts.full.base < 2.1 * full


def test_clips_are_counted_with_their_frames():
    with torch.device("meta"):
        model = WanTransformer3DModel(
            num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4,
            text_dim=16, freq_dim=16, ffn_dim=32, num_layers=1, rope_max_seq_len=128,
        )  # fmt: skip
    clip, image, images = (
        known_activations(model, [{"latents": torch.empty(shape)}], batch=2, checkpointed=False)
        for shape in ((4, 5, 16, 16), (4, 16, 16), (2, 4, 16, 16))
    )
    assert (clip.size, clip.frames) == ((128, 128), 17)
    assert (image.frames, images.frames) == (1, 1)
    assert clip.facts.full.base > 2.5 * image.facts.full.base
    assert images.facts == image.facts
    found = expected_memory(resolved(), activations=clip.facts, size=clip.size, frames=clip.frames)
    assert "17 frames of 128 x 128" in found.explain()
    assert known_activations(tiny_unet(), None, batch=2, checkpointed=False).frames is None


class Ran(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, _types, args=(), kwargs=None):
        self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


def test_the_counted_matrix_products_equal_those_that_run():
    model = tiny_unet()
    images, labels = digits_batch(4)
    arithmetic = known_activations(model, [{"latents": images[0]}], batch=4).arithmetic
    with Ran() as forward:
        output = model(images, torch.zeros(4), labels).sample
    with Ran() as backward:
        output.sum().backward()
    for ran, counted in ((forward, arithmetic.forward), (backward, arithmetic.backward)):
        assert counted.product_calls == sum("mm" in name for name in ran.names) > 10
        assert counted.attention_calls == sum("attention" in name for name in ran.names) > 1


def test_a_model_without_a_configuration_gets_no_guessed_figure():
    known = known_activations(torch.nn.Linear(3, 3), [{"images": torch.zeros(2, 1, 8, 8)}], batch=2)
    assert known.facts is None
    assert "from_config" in known.why
    assert known_activations(torch.nn.Linear(3, 3), None, batch=2).size is None


def test_a_plan_without_a_model_has_no_estimate():
    with pytest.raises(UnresolvedPlanError, match="model="):
        expected_memory(resolved(model=None))


def test_measured_memory_follows_allocations():
    before = host_now()
    # mmap gets new pages; a tensor might get a freed block that the process already holds.
    with mmap.mmap(-1, 2**26) as held:
        for page in range(0, len(held), mmap.PAGESIZE):
            held[page] = 1
        assert host_now() > before + 2**25
        assert host_peak() >= before + len(held) // 2
    assert device_peak(torch.device("cpu")) is None


@pytest.mark.parametrize(("visible", "apart"), [(0, True), (1, False)])
def test_page_locked_memory_that_the_system_does_not_count_is_detected(visible, apart):
    held = [100]

    def lock(nbytes):
        held[0] += visible * nbytes

    assert counted_apart(lambda: held[0], lock=lock) is apart


def test_the_host_peak_counts_page_locked_memory_once(monkeypatch):
    alone = host_peak()
    monkeypatch.setattr(memory, "locked_peak", lambda: GIB)
    monkeypatch.setattr(memory, "_counted_apart_here", lambda: True)
    assert host_peak() >= alone + GIB
    monkeypatch.setattr(memory, "_counted_apart_here", lambda: False)
    assert host_peak() < alone + GIB


@pytest.mark.gpu
def test_a_gpus_peak_exceeds_its_tensors():
    device = torch.device("cuda")
    torch.ones(256, 256, device=device).matmul(torch.ones(256, 256, device=device))
    assert device_peak(device) > torch.cuda.max_memory_reserved(device) + 64 * 2**20
