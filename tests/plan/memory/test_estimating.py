"""Memory of plans, compared with figures derived from DeepSpeed's code and measured with it."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerotune.errors import InvalidValueError, UnresolvedPlanError
from zerotune.plan import facts
from zerotune.plan.context import DeviceUpdate, Streaming
from zerotune.plan.facts import ModelFacts
from zerotune.plan.families import family
from zerotune.plan.families.__init__ import as_facts
from zerotune.plan.memory.estimate import estimate_resolved, sides
from zerotune.plan.memory.hosted import with_gradients_kept
from zerotune.plan.memory.items import Workload
from zerotune.plan.memory.traffic import step_traffic
from zerotune.plan.plan import DeepSpeedPlan
from zerotune.plan.work import ActivationCost, ActivationFacts
from zerotune.platform import Platform

GIB = 2**30
CUDA = Platform.synthetic("cuda", vram=24 * GIB, ram=256 * GIB)
CPU = Platform.synthetic("cpu", ram=256 * GIB)
ROUNDING = Platform.synthetic("cuda", vram=24 * GIB, ram=256 * GIB, versions={"torch": "2.9.1"})
N = family("sdxl").numel
P = family("sdxl").largest


def cost(model="sdxl", *, platform=CUDA, world_size=1, batch=None, resolution=None, ema="none",
         checkpointing=True, accumulation=1, engine=None, **plan):  # fmt: skip
    estimate = DeepSpeedPlan.build(
        **{"precision": "bf16", "gradient_accumulation_steps": accumulation, **plan}
    ).estimate(
        model,
        platform=platform,
        world_size=world_size,
        batch=batch,
        resolution=resolution,
        ema=ema,
        gradient_checkpointing=checkpointing,
    )
    if engine is None:
        return estimate
    return estimate_resolved(attrs.evolve(estimate.resolved, engine=engine), estimate.workload)


def held(estimate, component, place="host", phase="optimizer step"):
    return sum(i.nbytes for i in estimate.at(place, phase) if i.component == component)


def test_stage_2_with_offload_needs_18_host_bytes_per_element_plus_pinning():
    unpinned = cost(
        offload="cpu",
        offload_optimizer={"device": "cpu", "pin_memory": False},
        engine="deepspeed",
    )
    engine = unpinned.host - held(unpinned, "runtime") - 4 * P
    # 4 master, 4 gradient, 2 staging, 8 moments; plus the one gradient being copied.
    assert engine == pytest.approx(18 * N, rel=0.01)
    assert cost(offload="cpu", engine="deepspeed").host == unpinned.host
    pinned = cost(offload="cpu", platform=ROUNDING, engine="deepspeed")
    # Where torch rounds up to powers of two, master weights and gradients (9.56 GiB) take 16 GiB
    # each, staging (4.78 GiB) 8.
    assert (pinned.host - unpinned.host) / GIB == pytest.approx(16.1, abs=0.1)
    assert pinned.pinned / GIB == pytest.approx(40.06, abs=0.1)


def on_host(*, deepspeed=True, pin=True):
    """Resolve a plan for SDXL with its optimizer in host memory."""
    section = {"device": "cpu", "pin_memory": pin}
    plan = DeepSpeedPlan.build(stage=2, precision="bf16", offload_optimizer=section)
    return plan.resolve(platform=CUDA, model=as_facts("sdxl"), deepspeed=deepspeed)


def test_without_deepspeed_the_host_engine_keeps_fp32_units():
    away = on_host(deepspeed=False, pin=False)
    found = away.estimate(Workload())
    # The weights are the master weights.
    for component, nbytes in (("weights", 4), ("gradients", 4), ("optimizer states", 8)):
        assert held(found, component, "host") == pytest.approx(nbytes * N, rel=1e-4)
    without = attrs.evolve(away, plan=attrs.evolve(away.plan, zero_optimization=None))
    both = [
        sum(item.nbytes for item in each.at("device", "optimizer step"))
        for each in (without.estimate(Workload()), found)
    ]
    # 4 for gradients, 8 for moments, 4 for torch's update.
    assert both[0] - both[1] == pytest.approx(16 * N, rel=1e-4)
    assert held(found, "gradients", "device", "forward and backward") < 4 * N


def test_stage_2_with_offload_needs_the_weights_buckets_and_temporaries_on_the_device():
    estimate = cost(offload="cpu", resolution=1024, engine="deepspeed")
    backward = sum(item.nbytes for item in estimate.at("device", "forward and backward"))
    activations = held(estimate, "activations", "device", "forward and backward")
    bucket = 30_000_000 * 2 * 2  # overlap_comm doubles it
    assert backward == pytest.approx(2 * N + bucket + 12 * P + activations + GIB / 2, rel=0.01)
    # DeepSpeed flattens the weights on the device, in a copy.
    initialization = sum(item.nbytes for item in estimate.at("device", "initialization"))
    assert initialization == pytest.approx(4 * N + 2 * P + GIB / 2, rel=0.001)


def test_stage_3_moves_the_offloaded_parts_off_the_device():
    places = {}
    for optimizer, parameters in [("none", "none"), ("cpu", "none"), ("cpu", "cpu")]:
        estimate = cost(stage=3, offload=optimizer, offload_param=parameters, engine="deepspeed")
        places[optimizer, parameters] = estimate
    assert held(places["none", "none"], "weights", "device") == 2 * N
    assert held(places["none", "none"], "optimizer states", "device") == 8 * N
    assert held(places["cpu", "none"], "optimizer states") == 8 * N
    assert held(places["cpu", "none"], "weights", "device") == 2 * N
    assert held(places["cpu", "cpu"], "weights", "device") == 0
    assert held(places["cpu", "cpu"], "weights") >= 2 * N
    assert places["cpu", "cpu"].device < 2 * GIB


def test_stage_3_on_nvme_writes_18_bytes_per_element():
    estimate = cost(stage=3, offload="nvme", offload_param="nvme")
    # Small parameters stay in host memory.
    assert estimate.nvme == pytest.approx(18 * N, rel=0.01)
    assert held(estimate, "optimizer states") == 0
    assert estimate.host < 25 * GIB


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_ranks_share_the_optimizer_states(stage):
    one = cost(stage=stage)
    two = cost(stage=stage, world_size=2)
    for component in ("master weights", "optimizer states"):
        assert held(two, component, "device") == pytest.approx(
            held(one, component, "device") / 2, rel=1e-4
        )
    weights = 0.5 if stage == 3 else 1.0
    assert held(two, "weights", "device") == pytest.approx(
        held(one, "weights", "device") * weights, rel=1e-4
    )


def test_gradient_accumulation_needs_a_copy_at_stage_2_only():
    once, twice = (
        cost(offload="cpu", accumulation=a, world_size=2, precision="fp32", engine="deepspeed")
        for a in (1, 2)
    )
    assert twice.host - once.host == 4 * N / 2
    once, twice = (cost(stage=3, offload="cpu", accumulation=a) for a in (1, 2))
    assert once.host == twice.host


def test_an_ema_needs_four_bytes_per_owned_element_in_its_place():
    for place in ("host", "device", "nvme"):
        with_ema = cost(stage=2, offload="cpu", ema=place, world_size=2)
        item = next(i for i in with_ema.items if i.component == "EMA")
        assert item.place == place
        assert item.nbytes == pytest.approx(2 * N, rel=1e-4)


def test_the_cpu_accelerator_keeps_everything_on_the_host():
    estimate = cost(platform=CPU, stage=2, precision="fp32")
    assert estimate.device == 0
    assert held(estimate, "context", "device") == 0
    assert estimate.pinned == 0


def test_each_optimizer_needs_the_bytes_of_its_states():
    states = {}
    for name, params in [("AdamW", {}), ("SGD", {}), ("SGD", {"momentum": 0.9}), ("Lion", {})]:
        estimate = cost(stage=3, optimizer={"type": name, "params": params})
        states[name, bool(params)] = held(estimate, "optimizer states", "device") / N
    assert states == {
        ("AdamW", False): 8,
        ("SGD", False): 0,
        ("SGD", True): 4,
        ("Lion", False): 4,
    }


def test_the_activations_scale_with_batch_and_resolution():
    small = cost(resolution=512, batch=1)
    large = cost(resolution=(1024, 512), batch=4)
    activations = [held(e, "activations", "device", "forward and backward") for e in (small, large)]
    known = family("sdxl").activations.checkpointed
    by_pixels = [
        held - known.base - batch * known.per_sample
        for held, batch in zip(activations, (1, 4), strict=True)
    ]
    assert by_pixels[1] == pytest.approx(8 * by_pixels[0], rel=1e-6)
    assert large.resolved.micro_batch_size == large.workload.batch == 4
    everything = cost(resolution=512, checkpointing=False)
    assert held(everything, "activations", "device", "forward and backward") > 5 * activations[0]


def test_the_requested_batch_overrides_the_plans():
    plan = DeepSpeedPlan.build(precision="bf16", micro_batch_size=2)
    assert plan.estimate("sdxl", platform=CUDA).workload.batch == 2
    assert plan.estimate("sdxl", platform=CUDA, batch=8).workload.batch == 8


def test_notes_name_what_the_estimate_leaves_out():
    shapes = ModelFacts.from_shapes([("weight", (64, 64))])
    (note,) = cost(shapes).notes
    assert "no resolution was given" in note
    (note,) = cost(shapes, resolution=64).notes
    assert "unknown for this model" in note
    plain = ModelFacts(
        parameters=shapes.parameters,
        activations=ActivationFacts(full=ActivationCost(base=0, per_sample=0, per_pixel=10)),
    )
    estimate = cost(plain, resolution=64)
    assert "no gradient checkpointing" in estimate.notes[0]
    assert held(estimate, "activations", "device", "forward and backward") == 10 * 64 * 64


def at_start(model, **options):
    """Return the host bytes per rank while a plan of eight ranks is set up."""
    model_in_memory = options.pop("model_in_memory", False)
    estimate = DeepSpeedPlan.build(precision="bf16", **options).estimate(
        model, platform=CUDA, world_size=8, model_in_memory=model_in_memory
    )
    beside = held(estimate, "runtime", phase="initialization")
    return sum(i.nbytes for i in estimate.at("host", "initialization")) - beside


@pytest.mark.parametrize(
    "written",
    [
        {"stage": 2, "offload": "cpu"}, {"stage": 0},
        {"stage": 3, "offload": "cpu", "offload_param": "cpu"},
        {"stage": 3, "offload": "cpu", "offload_param": "cpu", "streamed": Streaming()},
        {"stage": 2, "deepspeed": False},
    ],
    ids=str,
)  # fmt: skip
def test_every_rank_keeps_all_buffers_on_its_device(written):
    how = {key: written[key] for key in ("streamed", "deepspeed") if key in written}
    plan = DeepSpeedPlan.build(precision="bf16", **{k: written[k] for k in written.keys() - how})

    def on_device(buffers, ranks):
        model = attrs.evolve(family("sdxl"), buffers=buffers)
        resolved = plan.resolve(platform=CUDA, model=model, world_size=ranks, **how)
        return resolved.estimate(Workload()).device

    for ranks in (1, 2):
        assert on_device(GIB, ranks) - on_device(0, ranks) == GIB


def test_lazily_loaded_weights_need_host_memory_only_on_their_way_to_one_buffer():
    elements = family("qwen-image").numel
    assert at_start("qwen-image", stage=3) == pytest.approx(2 * elements / 8, rel=0.01)
    assert at_start("qwen-image", stage=3, model_in_memory=True) == 4 * elements
    # One of eight parts; with the optimizer offloaded also master weights and gradients.
    shared = at_start("qwen-image", stage=3, offload="cpu")
    assert 4 * elements / 8 < shared < 12 * elements / 8
    assert at_start("qwen-image", stage=3, offload="cpu", model_in_memory=True) == 4 * elements


def test_the_host_engine_copies_no_weights_on_the_device():
    plan = DeepSpeedPlan.build(stage=2, offload="cpu", precision="bf16")
    estimates = [
        plan.resolve(platform=CUDA, model=family("sdxl"), engine=engine).estimate(Workload())
        for engine in ("host", "deepspeed")
    ]
    hosted, other = (
        sum(item.nbytes for item in estimate.at("device", "initialization"))
        for estimate in estimates
    )
    elements = family("sdxl").numel
    assert hosted == pytest.approx(2 * elements + GIB / 2, rel=0.01)
    assert other == pytest.approx(4 * elements + GIB / 2, rel=0.01)
    assert not any("doctor --prove" in note for estimate in estimates for note in estimate.notes)
    by_default = plan.resolve(platform=CUDA, model=family("sdxl")).estimate(Workload())
    assert by_default.device == estimates[0].device
    assert any("doctor --prove" in note for note in by_default.notes)
    assert "once zerotune doctor --prove has passed" in by_default.resolved.explain()


def test_every_rank_loads_frozen_parts_whole():
    plan = DeepSpeedPlan.build(stage=3, precision="bf16")
    with_, without = (
        plan.estimate("sdxl", platform=CUDA, world_size=4, frozen_bytes=nbytes)
        for nbytes in (3 * GIB, 0)
    )
    for place, phase, more in (
        ("host", "initialization", 3 * GIB),
        ("host", "optimizer step", 0),
        ("device", "optimizer step", 3 * GIB),
    ):
        one, other = (sum(i.nbytes for i in e.at(place, phase)) for e in (with_, without))
        assert one - other == more, (place, phase)


def test_a_plan_without_a_model_cannot_be_estimated():
    resolved = DeepSpeedPlan.build(precision="bf16").resolve(platform=CUDA)
    with pytest.raises(UnresolvedPlanError, match="needs the shapes"):
        resolved.estimate(Workload())


def test_a_clip_counts_as_one_image_per_latent_frame():
    known = family("wan-1.3b").activations.checkpointed
    for frames, latents in ((1, 1), (4, 1), (5, 2), (81, 21)):
        estimate = DeepSpeedPlan.build(precision="bf16").estimate(
            "wan-1.3b", platform=CUDA, batch=2, resolution=(480, 832), frames=frames
        )
        held_ = held(estimate, "activations", "device", "forward and backward")
        assert held_ == known.nbytes(batch=2, pixels=latents * 480 * 832), frames
        assert not estimate.notes
    assert cost("wan-1.3b").workload.frames == 81, "the family's own"
    assert cost("wan-1.3b").workload.height == 640
    assert "81 frames of 640 x 640 pixels" in cost("wan-1.3b").explain()


def test_a_missing_frame_count_is_noted_and_an_invalid_one_refused():
    (note,) = cost(family("wan-1.3b"), resolution=64).notes
    assert "no frame count was given" in note
    for frames, model in ((9, "sdxl"), (0, "wan-1.3b"), (2.5, "wan-1.3b")):
        with pytest.raises(InvalidValueError) as caught:
            DeepSpeedPlan.build(precision="bf16").estimate(model, platform=CUDA, frames=frames)
        assert caught.value.key == "frames"


@pytest.mark.parametrize("resolution", [0, -1, "1024", (1024,), (1024, 7), 3.5, True])
def test_impossible_sizes_are_refused(resolution):
    with pytest.raises(InvalidValueError, match="resolution"):
        sides(resolution)


@given(
    st.lists(st.integers(1, 5000), min_size=1, max_size=12),
    st.integers(1, 8),
    st.integers(0, 3),
    st.sampled_from(["none", "cpu"]),
    st.sampled_from(["fp32", "bf16", "fp16"]),
)
def test_no_part_is_negative_and_every_place_is_summed(sizes, ranks, stage, offload, precision):
    model = ModelFacts.from_shapes([(f"p{i}", (n, 3)) for i, n in enumerate(sizes)])
    estimate = cost(
        model,
        world_size=ranks,
        stage=stage,
        offload=offload if stage else "none",
        precision=precision,
    )
    assert all(item.nbytes > 0 for item in estimate.items)
    training = held(estimate, "weights", "device") + held(estimate, "gathered weights", "device")
    assert training * 8 * ranks >= model.numel * 2
    assert estimate.device >= GIB // 2


def blocks_of(sizes, rest):
    """Return a model of blocks with one weight each, and one outside."""
    shapes = [(f"blocks.{index}.weight", (size,)) for index, size in enumerate(sizes)]
    facts = ModelFacts.from_shapes([*shapes, ("out.weight", (rest,))])
    return attrs.evolve(facts, units=tuple(f"blocks.{index}" for index in range(len(sizes))))


@pytest.mark.parametrize(
    ("streaming", "capacity"),
    [(Streaming(), 3 * 4096), (Streaming(memory=1), 2 * 4096), (Streaming(memory=9000), 2 * 4096),
     (Streaming(memory="1GiB"), 5 * 4096)],
)  # fmt: skip
def test_streamed_weights_equal_a_hand_calculation(streaming, capacity):
    # 2040 elements are padded to 2048, of 2 bytes each; the 250 outside the blocks to 256.
    plan = DeepSpeedPlan.build(
        stage=2, offload="cpu", precision="bf16", gradient_accumulation_steps=2
    )
    model = blocks_of([2040] * 5, 250)
    resolved = plan.resolve(platform=CUDA, model=model, streamed=streaming)
    items = {
        (item.place, item.component): item.nbytes
        for item in resolved.estimate(Workload(ema="host", exact_pinning=True)).items
    }
    count = 5 * 2048 + 256
    assert items["device", "weights"] == 2 * 256
    assert items["device", "streamed weights"] == capacity
    assert items["device", "gradients"] == 2 * (3 * 2048 + 256)
    assert items["device", "temporaries"] == 2 * 2 * 2040
    assert items["host", "weights"] == items["host", "gradients"] == 2 * count
    assert items["host", "master weights"] == 4 * count
    assert items["host", "optimizer states"] == 8 * count
    assert items["host", "EMA"] == 4 * (5 * 2040 + 250)


def test_weights_on_the_device_in_the_host_engine_equal_a_hand_calculation(monkeypatch):
    monkeypatch.setattr(facts, "SMALLEST_UNIT", 1)
    plan = DeepSpeedPlan.build(stage=2, offload="cpu", precision="bf16")
    resolved = plan.resolve(platform=CUDA, model=blocks_of([2048] * 60, 2048), engine="host")
    items = {
        (item.place, item.component): item.nbytes
        for item in resolved.estimate(Workload(exact_pinning=True)).items
    }
    count = 61 * 2048
    assert items["device", "weights"] == 2 * count
    assert items["device", "gradients"] == pytest.approx(2 * 3 * (count / 32 + 2048), abs=1)
    assert ("device", "buckets") not in items
    assert (
        items["host", "weights"] == items["host", "gradients"] == pytest.approx(2 * count, abs=32)
    )
    assert items["host", "master weights"] == 4 * count
    assert items["host", "optimizer states"] == 8 * count


def test_ranks_of_a_machine_share_streamed_weights_as_calculated_by_hand():
    plan = DeepSpeedPlan.build(stage=2, offload="cpu", precision="bf16")
    model = blocks_of([2048] * 5, 256)
    resolved = plan.resolve(platform=CUDA, model=model, world_size=2, streamed=True)
    estimate = resolved.estimate(Workload())
    items = {(item.place, item.component): item.nbytes for item in estimate.items}
    half = (5 * 2048 + 256) // 2
    assert items["device", "streamed weights"] == 2 * 3 * 2048, "each device has a window"
    assert items["host", "weights"] == items["host", "gradients"] == 2 * half
    assert items["host", "master weights"] == 4 * half
    assert items["host", "optimizer states"] == 8 * half
    assert items["host", "staging"] == 2 * 2048


@pytest.mark.parametrize(
    ("optimizer", "split_masters", "nbytes"),
    [("AdamW", False, 14), ("AdamW", True, 12), ("AdamWBF16States", True, 8),
     ("AdamW8BitStates", True, 6 + 2 * 4 / 256)],
)  # fmt: skip
def test_stepping_during_backward_needs_a_few_gradient_buffers(optimizer, split_masters, nbytes):
    plan = DeepSpeedPlan.build(
        stage=2, offload="cpu", precision="bf16", gradient_clipping=0.0,
        optimizer={"type": optimizer, "params": {}},
    )  # fmt: skip
    model = blocks_of([2048] * 50, 256)

    def held(**changes):
        resolved = attrs.evolve(plan, **changes).resolve(
            platform=CUDA, model=model, streamed=Streaming(split_masters=split_masters)
        )
        items = resolved.estimate(Workload(exact_pinning=True)).items
        names = ("weights", "gradients", "master weights", "optimizer states")
        return sum(i.nbytes for i in items if i.place == "host" and i.component in names)

    count = 50 * 2048 + 256
    buffers = 2 * (6 * 2048 + 256)
    assert held() == pytest.approx(nbytes * count + buffers)
    for changes in ({"gradient_clipping": 1.0}, {"gradient_accumulation_steps": 2}):
        assert held(**changes) == pytest.approx((nbytes + 2) * count)


def test_the_gradient_buffers_hide_the_passes_if_they_fit():
    plan = DeepSpeedPlan.build(stage=2, offload="cpu", precision="bf16", gradient_clipping=0.0)
    resolved = plan.resolve(platform=CUDA, model=blocks_of([2**20] * 40, 256), streamed=True)
    estimate = resolved.estimate(Workload(exact_pinning=True))
    # There are 2 buffers for gradients that arrive and are stepped, and one per four units; each
    # has 2 MiB.
    for room, buffers in ((2**30, 12), (0, 6), (2 * 2**21, 8), (2**21 - 1, 6), (-(2**30), 3)):
        kept = with_gradients_kept(estimate, estimate.host + room)
        assert kept.streamed.gradient_buffers == buffers
        assert kept.decisions[-1].key == "streamed.gradient_buffers"
        if room >= 0:
            assert kept.estimate(Workload(exact_pinning=True)).host <= estimate.host + room
    clipped = plan.build(stage=2, offload="cpu", precision="bf16").resolve(
        platform=CUDA, model=resolved.model, streamed=True
    )
    assert with_gradients_kept(clipped.estimate(Workload()), 2**40) is clipped


def test_with_adapters_the_frozen_base_is_streamed():
    plan = DeepSpeedPlan.build(stage=2, offload="cpu", precision="bf16")
    resolved = plan.resolve(platform=CUDA, model=as_facts("flux", lora=16), streamed=True)
    units = resolved.model.streamed
    assert (len(units.frozen), units.trained) == (57, ())
    assert units.resident_trained == pytest.approx(resolved.model.trainable_numel, rel=1e-3)
    estimate = resolved.estimate(Workload(exact_pinning=True))
    host = sum(item.nbytes for item in estimate.items if item.place == "host" and
               item.component not in ("runtime", "checkpoint"))  # fmt: skip
    assert host == 2 * units.total + 16 * units.resident_trained


def test_only_the_named_units_are_streamed():
    facts = blocks_of([2048] * 4, 0)
    assert facts.streamed.trained == (2048,) * 4
    assert facts.streamed_by(["blocks"]).trained == (4 * 2048,)
    assert facts.streamed_by(["blocks.1", "blocks.3"]).trained == (2048, 2048)
    assert facts.streamed_by(["blocks.1"]).resident_trained == 3 * 2048
    assert facts.streamed_by(["Block"]) == facts.streamed, "a class is known to the model alone"


@pytest.mark.parametrize(
    ("masters", "clipping", "each"),
    # The weight, what is beside it of the master weight, and the gradient if it waits for the norm.
    [("fp32", 1.0, 8), ("split", 1.0, 6), ("split", 0.0, 4), ("stochastic", 0.0, 2)],
)
def test_updates_on_the_device_leave_only_weights_and_states_on_the_host(masters, clipping, each):
    facts = as_facts("flux")
    plan = DeepSpeedPlan.build(
        stage=2, offload="cpu", precision="bf16", optimizer="Adafactor", gradient_clipping=clipping
    ).resolve(
        platform=CUDA, model=facts, streamed=True, update=DeviceUpdate(masters=masters)
    )  # fmt: skip
    estimate = plan.estimate(Workload(exact_pinning=True))
    host = {item.component: item.nbytes for item in estimate.items if item.place == "host"}
    states = host.pop("optimizer states")
    kept = sum(host.get(name, 0) for name in ("weights", "master weights", "gradients"))
    assert kept == pytest.approx(each * facts.numel, rel=0.001)
    # Adafactor keeps sums of rows and columns.
    assert states < 0.05 * facts.numel
    traffic = step_traffic(estimate)
    # Each weight crosses the bus with the rest of its master weight, and its gradient where it was
    # copied to the host.
    read = {"fp32": 6, "split": 4 + 2 * bool(clipping), "stochastic": 2}[masters]
    assert traffic.weights == pytest.approx(read * facts.numel, rel=0.05)
    assert traffic.gradients == pytest.approx(2 * facts.numel if clipping else 0, rel=0.001)
    assert traffic.optimizer == 0
