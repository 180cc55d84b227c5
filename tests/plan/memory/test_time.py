"""The predicted time of a step: sums, overlaps and rates."""

from __future__ import annotations

import math

import attrs
import pytest

from zerotune.errors import InvalidValueError
from zerotune.plan.context import Streaming
from zerotune.plan.families import as_facts, family, family_names
from zerotune.plan.memory.estimate import estimate_resolved
from zerotune.plan.memory.items import Workload
from zerotune.plan.memory.rates import RATE_NAMES, Rates, catalogued_rates, known_rates, store_rates
from zerotune.plan.memory.time import StepTime, TimePart, step_time
from zerotune.plan.memory.traffic import step_traffic
from zerotune.plan.plan import DeepSpeedPlan
from zerotune.platform import Platform

GIB = 2**30
CUDA = Platform.synthetic("cuda", vram=24 * GIB, ram=256 * GIB)
CPU = Platform.synthetic("cpu", ram=256 * GIB)
EVEN = Rates(**dict.fromkeys(RATE_NAMES, 1e12))
N = family("sdxl").numel


def timed(rates=EVEN, *, platform=CUDA, batch=1, world_size=1, ema="none", resolution=1024,
          checkpointing=True, offloading=False, engine=None, **plan):  # fmt: skip
    estimate = DeepSpeedPlan.build(**{"precision": "bf16", **plan}).estimate(
        "sdxl",
        platform=platform,
        batch=batch,
        world_size=world_size,
        ema=ema,
        resolution=resolution,
        gradient_checkpointing=checkpointing,
        activation_offload=offloading,
    )
    if engine is not None:
        hosted = attrs.evolve(estimate.resolved, engine=engine)
        estimate = estimate_resolved(hosted, estimate.workload)
    return estimate, step_time(estimate, rates)


def slow(**rates):
    """Return rates at which only the given resources take time."""
    return Rates(**(dict.fromkeys(RATE_NAMES, 1e30) | rates))


def test_every_family_has_arithmetic():
    for name in family_names():
        facts = family(name)
        forward, backward = facts.arithmetic.forward, facts.arithmetic.backward
        size = {"batch": 1, "pixels": 1024**2}
        products = ("products", "convolutions")
        once = sum(getattr(forward, kind).of(**size) for kind in products)
        again = sum(getattr(backward, kind).of(**size) for kind in products)
        assert 1.9 <= again / once <= 2.1
        assert backward.attention.of(**size) == pytest.approx(2.5 * forward.attention.of(**size))
        recomputed = facts.arithmetic.recomputed
        assert 0.5 * once < sum(getattr(recomputed, kind).of(**size) for kind in products) <= once
        assert forward.products.of(batch=8, pixels=512**2) == pytest.approx(
            8 * forward.products.of(batch=1, pixels=512**2)
        )


def test_the_operations_of_sdxl_equal_the_published_figure():
    # 25.4 TFLOP per sample at 1024 x 1024, with gradient checkpointing.
    facts = family("sdxl").arithmetic
    found = sum(
        getattr(each, kind).of(batch=1, pixels=1024**2)
        for each in (facts.forward, facts.backward, facts.recomputed)
        for kind in ("products", "convolutions", "attention")
    )
    assert found / 1e12 == pytest.approx(25.4, rel=0.03)


def test_convolutions_and_attention_are_slower_than_products_on_a_card():
    facts, size = family("sdxl").arithmetic, {"batch": 1, "pixels": 1024**2}
    _, time = timed(slow(products=1e12), checkpointing=False)
    others = sum(getattr(facts.forward, kind).of(**size) for kind in ("convolutions", "attention"))
    expected = facts.forward.products.of(**size) + others / 0.75
    assert time.phases["forward"] == pytest.approx(expected / 1e12)


@pytest.mark.parametrize(("accumulation", "to_host", "back"), [(1, 2, 0), (3, 6, 4)])
def test_gradients_of_the_host_engine_cross_the_bus_in_the_weights_dtype(
    accumulation, to_host, back
):
    estimate, _ = timed(offload="cpu", engine="host", gradient_accumulation_steps=accumulation)
    traffic = step_traffic(estimate)
    assert (traffic.gradients, traffic.returned) == pytest.approx((to_host * N, back * N), rel=1e-3)


def test_phases_are_sequential_and_lanes_run_in_parallel():
    rates = slow(products=1e13, to_host=1e10, host_step=1e10, to_device=1e10)
    estimate, time = timed(rates, offload="cpu", engine="host")
    traffic = step_traffic(estimate)
    phases = time.phases
    computed = sum(p.seconds for p in time.parts if (p.phase, p.lane) == ("backward", "device"))
    assert phases["backward"] == pytest.approx(max(computed, traffic.gradients / 1e10))
    assert phases["optimizer"] == pytest.approx(traffic.optimizer / 1e10)
    assert phases["weights"] == pytest.approx(traffic.weights / 1e10)
    assert time.seconds == pytest.approx(sum(phases.values()))
    assert list(phases) == ["forward", "backward", "optimizer", "weights"]
    assert (time.bound.what, time.schedule) == ("the optimizer", "hidden")


def by_hand(*parts, **more):
    """Return the time of a step of the given parts, each ``(phase, lane, seconds)``."""
    made = [
        TimePart(phase=phase, lane=lane, what=f"{phase} {lane}", seconds=seconds, rate="products")
        for phase, lane, seconds in parts
    ]
    return StepTime(parts=tuple(made), rates=EVEN, **more)


COMPUTED = (("forward", "device", 3.0), ("backward", "device", 6.0))


@pytest.mark.parametrize(
    ("parts", "micro_batches", "expected"),
    [
        # Expected seconds: in turn; hidden behind the next forward pass; overlapping both passes.
        ((("optimizer", "host", 4.0),), 1, (13.0, 10.0, 9.0)),
        ((("optimizer", "host", 2.0),), 1, (11.0, 9.0, 9.0)),
        ((("optimizer", "host", 12.0),), 1, (21.0, 18.0, 12.0)),
        # EMAs follow in the same lane; weights return in another.
        ((("optimizer", "host", 4.0), ("ema", "host", 1.0)), 1, (14.0, 11.0, 9.0)),
        ((("optimizer", "host", 4.0), ("weights", "in", 3.5)), 1, (16.5, 10.0, 9.0)),
        # The passes also use the bus, or the host memory that the optimizer uses.
        ((("optimizer", "host", 4.0), ("backward", "out", 7.0)), 1, (14.0, 11.0, 10.0)),
        ((("optimizer", "host", 7.0), ("backward", "host", 4.0)), 1, (16.0, 13.0, 11.0)),
        ((("optimizer", "host", 4.0), ("forward", "host", 2.0)), 1, (13.0, 12.0, 9.0)),
        # Only one of three micro batches hides it: 1 second of the forward, 2 of the backward
        # passes.
        ((("optimizer", "host", 4.0),), 3, (13.0, 12.0, 10.0)),
        ((("optimizer", "host", 2.0),), 3, (11.0, 10.0, 9.0)),
        # On the device nothing overlaps.
        ((("optimizer", "device", 4.0),), 1, (13.0, 13.0, 13.0)),
    ],
)
def test_the_step_time_equals_a_hand_calculation_of_its_lanes(parts, micro_batches, expected):
    time = by_hand(*COMPUTED, *parts, micro_batches=micro_batches)
    found = time.seconds, time.scheduled("hidden"), time.scheduled("eager")
    assert found == pytest.approx(expected)
    for schedule, seconds in zip(("in turn", "hidden", "eager"), expected, strict=True):
        assert attrs.evolve(time, schedule=schedule).expected == pytest.approx(seconds)


def test_moments_with_fewer_bits_are_bound_by_their_bytes():
    facts, seconds = as_facts("flux"), {}
    for optimizer in ("AdamWBF16States", "AdamW8BitStates"):
        plan = DeepSpeedPlan.build(
            stage=2, offload="cpu", precision="bf16", gradient_clipping=0.0,
            optimizer={"type": optimizer, "params": {}},
        )  # fmt: skip
        resolved = plan.resolve(platform=CUDA, model=facts, streamed=True)
        work = Workload(height=1024, width=1024)
        time = resolved.estimate(work).step_time(slow(host_step=1e10))
        seconds[optimizer] = time.phases["optimizer"]
    count = facts.trainable_numel
    assert seconds["AdamW8BitStates"] == pytest.approx(18.06 * count / 1e10, rel=1e-2)
    assert seconds["AdamWBF16States"] == pytest.approx(22 * count / 1e10, rel=1e-3)


@pytest.mark.parametrize(
    ("carried", "host", "expected"),
    [
        # Shorter than the backward pass; then longer, partly hidden by the forward pass.
        (0.25, 4.0, 9.0), (0.25, 8.0, 9.0), (0.25, 10.0, 10.5), (0.0, 10.0, 13.0),
        # The forward pass is full; nothing hides more.
        (0.5, 10.0, 10.0), (0.25, 20.0, 20.0), (1.0, 20.0, 20.0),
    ],
)  # fmt: skip
def test_few_gradient_buffers_delay_the_next_forward_as_calculated_by_hand(carried, host, expected):
    time = by_hand(*COMPUTED, ("optimizer", "host", host), carried=carried)
    assert time.scheduled("eager") == pytest.approx(expected)
    assert time.scheduled("hidden") == max(3.0, host) + 6.0


@pytest.mark.parametrize(
    ("name", "lora", "batch", "waits", "streams"),
    # Calculated outside the library, only from arithmetic, weights and rates of a 4090. DeepSpeed's
    # own step of all weights moves 20 bytes of a weight more in host memory, and checks 56.
    [("flux", 16, 1, 4.8, 2.9), ("qwen-image", 16, 1, 6.4, 3.8), ("flux", None, 4, 37.3, 15.5)],
)
def test_streamed_weights_take_the_time_of_their_lanes(name, lora, batch, waits, streams):
    facts, plan = as_facts(name, lora=lora), {"precision": "bf16", "micro_batch_size": batch}
    work = Workload(batch=batch, height=1024, width=1024)

    def resolved(streamed, **more):
        built = DeepSpeedPlan.build(offload="cpu", gradient_clipping=0.0, **plan, **more)
        return built.resolve(platform=CUDA, model=facts, streamed=streamed).estimate(work)

    waiting = resolved(None, stage=3, offload_param="cpu").step_time(catalogued_rates(CUDA))
    roomy = Streaming(gradient_buffers=17)
    streamed = resolved(roomy, stage=2).step_time(catalogued_rates(CUDA))
    assert streamed.schedule == "eager"
    # By hand, a backward pass without frozen weights' gradients counts two thirds of a whole one.
    assert waiting.seconds == pytest.approx(waits, rel=0.1)
    assert streamed.expected == pytest.approx(streams, rel=0.01 if lora is None else 0.15)
    clipped = attrs.evolve(streamed, schedule="hidden")
    assert clipped.expected >= streamed.expected
    few = resolved(True, stage=2).step_time(catalogued_rates(CUDA))
    assert streamed.expected <= few.expected <= clipped.expected


def test_the_fused_host_step_touches_less_memory_than_deepspeeds_chain():
    rates = slow(host_step=1e10)
    plan = DeepSpeedPlan.build(offload="cpu", precision="bf16")
    times = []
    for engine in ("host", "deepspeed"):
        resolved = attrs.evolve(plan.estimate("sdxl", platform=CUDA).resolved, engine=engine)
        estimate = attrs.evolve(plan.estimate("sdxl", platform=CUDA), resolved=resolved)
        times.append(step_time(estimate, rates).seconds)
    assert times[0] == pytest.approx(30 * N / 1e10, rel=1e-3)
    assert times[1] > 1.5 * times[0]


@pytest.mark.parametrize(
    ("options", "rate", "factor"),
    [
        ({"batch": 4}, "products", 4),
        ({"gradient_accumulation_steps": 3}, "products", 3),
        ({"world_size": 4, "stage": 2, "offload": "cpu"}, "products", 1),
    ],
)
def test_step_time_grows_with_the_arithmetic(options, rate, factor):
    rates = slow(**{rate: 1e12})
    assert timed(rates, **options)[1].seconds == pytest.approx(
        factor * timed(rates)[1].seconds, rel=0.01
    )


def test_the_ranks_of_a_machine_share_memory_and_disk_bandwidth():
    rates = slow(host_step=1e10)
    one, four = (timed(rates, offload="cpu", world_size=ranks)[1].seconds for ranks in (1, 4))
    assert four == pytest.approx(one, rel=1e-3)
    assert "ranks" in timed(offload="cpu", world_size=2, engine="deepspeed")[1].notes[0]


def test_recomputation_and_activation_offload_have_their_costs():
    rates = slow(products=1e12, to_host=1e10, to_device=1e10)
    kept, recomputed, away = (
        timed(rates, checkpointing=c, offloading=o)[1].phases
        for c, o in ((False, False), (True, False), (True, True))
    )
    assert kept["forward"] == recomputed["forward"]
    assert recomputed["backward"] > 1.2 * kept["backward"]
    slow_bus = slow(to_host=1e9, to_device=1e9)
    assert timed(slow_bus, offloading=True)[1].seconds == pytest.approx(2 * 510 * 2**20 / 1e9, 0.01)
    assert away["backward"] >= recomputed["backward"]


def test_swap_files_are_read_and_written_around_the_step():
    rates = slow(disk_read=1e9, disk_write=5e8)
    estimate, time = timed(rates, stage=3, offload="nvme")
    swap = step_traffic(estimate).swap
    assert time.seconds == pytest.approx(swap.read / 1e9 + swap.written / 5e8)
    assert time.bound.rate == "disk_write"


def counted():
    """Return the facts of SDXL, whose operators were counted."""
    facts, plain = family("sdxl"), family("sdxl").arithmetic
    work = {"operators": 1000, "product_calls": 100, "attention_calls": 10}
    passes = {kind: attrs.evolve(getattr(plain, kind), **work) for kind in ("forward", "backward")}
    return attrs.evolve(facts, arithmetic=attrs.evolve(plain, **passes))


@pytest.mark.parametrize(
    ("precision", "suffix", "other"), [("bf16", "", "_fp32"), ("fp32", "_fp32", "")]
)
def test_each_precision_has_its_own_rates(precision, suffix, other):
    plan = DeepSpeedPlan.build(precision=precision, stage=2)
    estimate = plan.estimate(counted(), platform=CPU, batch=1, resolution=512)
    for part, rate in (("device_memory", 1e9), ("products", 1e11)):
        assert estimate.step_time(slow(**{part + suffix: rate})).phases["forward"] > 1
        assert estimate.step_time(slow(**{part + other: rate})).phases["forward"] < 1e-3


@pytest.mark.parametrize(
    ("stage", "forward", "backward"), [(0, 0, 5), (1, 0, 12), (2, 0, 12), (3, 4, 12)]
)
def test_deepspeeds_operators_per_parameter_take_time(stage, forward, backward):
    plan = DeepSpeedPlan.build(precision="fp32", stage=stage)
    estimate = plan.estimate(counted(), platform=CPU, batch=1, resolution=512)
    phases, count = estimate.step_time(slow(operators=1e3)).phases, len(counted().parameters)
    # 110 product and attention calls of a pass take as long as four operators each.
    assert phases["forward"] == pytest.approx(1.44 + forward * count / 1e3)
    assert phases["backward"] == pytest.approx(1.44 + backward * count / 1e3)


@pytest.mark.parametrize(
    ("stage", "precision", "nbytes", "operators"),
    [(2, "bf16", 40, 20), (2, "fp32", 32, 5), (3, "bf16", 56, 9), (3, "fp32", 72, 8)],
)
def test_deepspeeds_chain_reads_each_gradient_again(stage, precision, nbytes, operators):
    plan = DeepSpeedPlan.build(precision=precision, stage=stage, offload="cpu")
    estimate = plan.estimate(counted(), platform=CPU, batch=1, resolution=512)
    chain = attrs.evolve(estimate, resolved=attrs.evolve(estimate.resolved, engine="deepspeed"))
    for rates, more in (
        (slow(operators=1e3), operators * len(counted().parameters) / 1e3),
        (slow(host_memory=1e9), nbytes * N / 1e9),
    ):
        found = [p for p in chain.step_time(rates).parts if p.what == "gradient checks"]
        assert sum(part.seconds for part in found) == pytest.approx(more, rel=1e-6)
        assert not [p for p in estimate.step_time(rates).parts if p.what == "gradient checks"]


@pytest.mark.parametrize(
    ("stage", "offload", "accumulated", "nbytes"),
    [(0, "none", 1, 4), (1, "none", 1, 8), (2, "none", 2, 12), (2, "cpu", 1, 4), (2, "cpu", 3, 12),
     (3, "none", 1, 8)],
)  # fmt: skip
def test_gradients_of_each_pass_are_rewritten_on_a_cpu(stage, offload, accumulated, nbytes):
    plan = DeepSpeedPlan.build(
        precision="fp32", stage=stage, offload=offload, gradient_accumulation_steps=accumulated
    )
    for platform, expected in ((CPU, nbytes), (CUDA, 0)):
        estimate = plan.estimate(counted(), platform=platform, batch=1, resolution=512)
        parts = estimate.step_time(slow(host_memory=10e9)).parts
        found = [p.seconds for p in parts if p.what == "memory allocated anew"]
        assert found[:1] == pytest.approx([expected * N / 1e9] if expected else [])


@pytest.mark.parametrize(("engine", "nbytes"), [("deepspeed", 12), ("host", 8)])
def test_an_ema_in_host_memory_reads_the_weights_again_unless_it_is_hidden(engine, nbytes):
    _, time = timed(slow(host_memory=1e10), ema="host", stage=2, offload="cpu", engine=engine)
    assert time.phases["ema"] == pytest.approx(nbytes * N / 1e10, rel=1e-4)


@pytest.mark.parametrize(("offload", "nbytes"), [("none", 4), ("cpu", 0)])
def test_an_ema_in_host_memory_reads_weights_on_the_device_over_the_bus(offload, nbytes):
    _, time = timed(slow(to_host=1e10), ema="host", stage=2, offload=offload)
    assert time.phases["ema"] == pytest.approx(nbytes * N / 1e10)


def test_an_ema_on_disk_is_read_and_written_once_per_step():
    estimate, time = timed(slow(disk_read=2e9, disk_write=1e9), ema="nvme", stage=2, offload="cpu")
    assert time.phases["ema"] == pytest.approx(4 * N / 2e9 + 4 * N / 1e9)
    chunks = [one.nbytes for one in estimate.items if (one.component, one.place) == ("EMA", "host")]
    assert chunks == [64 * 2**20], "four chunks in host memory"


def test_without_size_or_arithmetic_no_time_is_predicted():
    shapes = attrs.evolve(family("sdxl"), arithmetic=None)
    plan = DeepSpeedPlan.build(precision="bf16")
    assert plan.estimate(shapes, platform=CUDA, resolution=512).step_time(EVEN) is None
    assert plan.estimate(family("sdxl"), platform=CUDA).step_time(EVEN) is None


def test_a_cpu_computes_in_host_memory():
    _, time = timed(platform=CPU, precision="fp32", offload="cpu")
    assert {part.lane for part in time.parts} == {"device", "host"}
    assert {part.rate for part in time.parts} >= {"products_fp32", "host_step", "host_memory"}


# -- Rates.


def test_cards_are_found_by_name_and_by_memory():
    def card(name, memory):
        device = attrs.evolve(CUDA.devices[0], name=name, total_memory=memory * GIB)
        return catalogued_rates(attrs.evolve(CUDA, devices=(device,)))

    named = card("NVIDIA A100-SXM4-40GB", 40)
    assert named.origin == "catalogued for A100 (40 GiB)"
    assert named.device_memory < card("NVIDIA A100-SXM4-80GB", 80).device_memory
    assert card("NVIDIA H100 PCIe", 80).products < card("NVIDIA H100 80GB HBM3", 80).products
    unknown = card("Something else", 23)
    assert "24 GiB), the listed card with the closest memory size" in unknown.origin
    assert unknown.source("products") == "catalogued"


def test_measured_rates_are_used_only_on_their_hardware(tmp_path):
    file = tmp_path / "cache" / "rates.json"
    assert known_rates(CUDA, file=file) == catalogued_rates(CUDA)
    store_rates(CPU, {"products_fp32": 5e10, "host_step": 1e10}, file=file)
    store_rates(CUDA, {"products": 7e13}, file=file)
    on_cpu, on_card = known_rates(CPU, file=file), known_rates(CUDA, file=file)
    assert (on_cpu.products_fp32, on_card.products) == (5e10, 7e13)
    assert on_card.source("products") == "measured"
    assert on_card.source("host_step") == "catalogued"
    other = attrs.evolve(CUDA, versions={"torch": "1.0"})
    assert known_rates(other, file=file) == catalogued_rates(other)
    _, time = timed(on_card, offload="cpu")
    assert time.sources["products"] == "measured"
    assert time.origin.startswith("measured on this machine; catalogued: device_memory")


@pytest.mark.parametrize("text", ["", "[]", "{", '{"x": 1}', "\x00"])
def test_a_corrupt_rates_file_is_ignored(tmp_path, text):
    file = tmp_path / "rates.json"
    file.write_text(text)
    assert known_rates(CUDA, file=file) == catalogued_rates(CUDA)


def test_corrupt_rates_are_skipped(tmp_path):
    file = tmp_path / "rates.json"
    store_rates(CUDA, {"products": -1, "to_host": "fast", "host_step": 2e9}, file=file)
    assert known_rates(CUDA, file=file).measured == {"host_step"}


@pytest.mark.parametrize("value", [0, -1, "fast", None, math.nan])
def test_invalid_rates_are_refused(value):
    with pytest.raises(InvalidValueError, match=r"rates\.products"):
        attrs.evolve(EVEN, products=value)
