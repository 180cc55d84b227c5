"""Advice: the fastest plan that fits, or the one with least offload."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerotune.errors import (
    InvalidValueError,
    NothingFitsError,
    OptimizerError,
    PlanConflictError,
)
from zerotune.plan.candidates import LEVELS, STREAMING, machine_needs
from zerotune.plan.context import DeviceUpdate
from zerotune.plan.facts import ModelFacts
from zerotune.plan.families import as_facts
from zerotune.plan.memory.rates import RATE_NAMES, Rates
from zerotune.plan.plan import DeepSpeedPlan
from zerotune.platform import Platform

GIB = 2**30
ON_MACHINE = [one for level in LEVELS for one in level if one.optimizer != "nvme"]
STREAMED, SPLIT, DEVICE, DEVICE_SPLIT = (layout.title for layout in STREAMING)


def advise(vram, ram="128GiB", nvme=0, **options):
    """Return advice among plans that do not stream, whose order the tests of layouts compare."""
    options = {"streamed": False, **options}
    return DeepSpeedPlan.advise("sdxl", vram=vram, ram=ram, nvme=nvme, **options)


@pytest.mark.parametrize(
    ("vram", "ram", "nvme", "title", "checkpointing"),
    [
        ("80GiB", "128GiB", 0, "no partitioning", False),
        ("48GiB", "128GiB", 0, "ZeRO-3", False),
        ("24GiB", "128GiB", 0, "ZeRO-2, optimizer in host memory", False),
        ("12GiB", "128GiB", 0, "ZeRO-2, optimizer in host memory", True),
        ("8GiB", "128GiB", 0, "ZeRO-2, optimizer in host memory", True),
        ("4GiB", "128GiB", 0, "ZeRO-3, optimizer and parameters in host memory", True),
        ("4GiB", "24GiB", "1TB", "ZeRO-3, optimizer on NVMe, parameters in host memory", True),
        ("4GiB", "15GiB", "1TB", "ZeRO-3, optimizer and parameters on NVMe", True),
    ],
)
def test_sdxl_gets_the_expected_layout_on_common_cards(vram, ram, nvme, title, checkpointing):
    advice = advise(vram, ram, nvme)
    assert advice.chosen.title == title
    assert advice.gradient_checkpointing is checkpointing
    assert advice.plan.stage == advice.resolved.stage
    assert all(size >= 0 for size in advice.headroom.values())


def test_more_offload_is_chosen_where_it_is_faster():
    # Recomputing on a slow device costs more than offloading: keep the activations.
    even = dict.fromkeys(RATE_NAMES, 1e15)
    slow_device = Rates(**even | {"products": 1e12})
    options = {"vram": "48GiB", "ram": "512GiB", "batch": 4, "precision": "bf16"}
    fastest = DeepSpeedPlan.advise("sdxl", rates=slow_device, **options)
    least = next(one for one in fastest.candidates if one.fits)
    assert least.gradient_checkpointing
    assert not fastest.gradient_checkpointing
    assert "fastest" in fastest.chosen.reason
    assert fastest.chosen.time.expected <= 1.05 * min(o.time.expected for o in fastest.runners_up)
    assert fastest.chosen.time.seconds < least.time.seconds


def test_every_candidate_before_the_chosen_one_has_a_reason_for_rejection():
    advice = advise("12GiB", "64GiB")
    index = advice.candidates.index(advice.chosen)
    for earlier in advice.candidates[:index]:
        assert not earlier.fits
        assert earlier.shortfalls
        assert "is needed most" in earlier.reason
    assert all(one.fits for one in advice.runners_up)
    listed = [*map(id, advice.rejected), *map(id, advice.runners_up), id(advice.chosen)]
    assert sorted(listed) == sorted(map(id, advice.candidates))
    exact = [one for one in ON_MACHINE if one.masters == "fp32"]
    assert len(advice.candidates) == 3 * len(exact)


def test_a_shortfall_is_the_need_beyond_the_usable_memory():
    advice = advise("12GiB", "64GiB", reserve=0.1)
    for one in advice.rejected:
        needs = machine_needs(one.estimate)
        for place, over in one.shortfalls.items():
            assert over == needs[place] - advice.budget.usable(place)
    assert advice.budget.usable("device") == int(12 * GIB * 0.9)


def test_ranks_share_the_host_memory():
    one = advise("24GiB", "128GiB")
    two = advise("24GiB", "128GiB", world_size=2)
    assert two.resolved.world_size == 2
    assert machine_needs(two.estimate)["host"] == 2 * two.estimate.host
    assert machine_needs(one.estimate)["host"] == one.estimate.host
    # Each rank has half the optimizer, so that 24 GiB cards need no more offload.
    assert two.candidates.index(two.chosen) <= one.candidates.index(one.chosen)


def test_when_nothing_fits_the_error_names_the_nearest_candidate_and_its_shortfall():
    with pytest.raises(NothingFitsError) as caught:
        advise("1GiB", "8GiB")
    error = caught.value
    assert error.nearest.shortfalls
    assert error.nearest.gradient_checkpointing
    assert "provide" in error.fix
    assert error.key == "memory"
    with pytest.raises(NothingFitsError, match="smaller optimizer states fit: optimizer='AdamWB"):
        advise("8GiB", "32GiB")
    with pytest.raises(NothingFitsError) as caught:
        advise("8GiB", "24GiB", optimizer="AdamWBF16States")
    assert "smaller optimizer states" not in caught.value.fix
    with pytest.raises(NothingFitsError, match="smaller batch"):
        advise("4GiB", "128GiB", batch=64)


def test_a_model_without_known_activations_has_one_candidate_per_layout():
    facts = ModelFacts.from_shapes([("weight", (1000, 1000))])
    advice = DeepSpeedPlan.advise(facts, vram="8GiB", ram="16GiB")
    assert len(advice.candidates) == sum(not one.streams for one in ON_MACHINE)
    assert advice.chosen.title == "no partitioning"
    assert advice.estimate.notes


def test_a_cpu_gets_no_candidates_with_offload_to_host_memory():
    facts = ModelFacts.from_shapes([("weight", (1000, 1000))])
    advice = DeepSpeedPlan.advise(facts, platform=Platform.synthetic("cpu", ram=16 * GIB))
    assert all("host memory" not in one.title for one in advice.candidates)
    assert advice.estimate.device == 0


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"vram": "12"}, "vram"),
        ({"reserve": 1.0}, "reserve"),
        ({"batch": 0}, "batch"),
        ({"resolution": 4}, "resolution"),
        ({"frames": 9}, "frames"),
        ({"precision": "int8"}, "precision"),
        ({"frozen_bytes": -1}, "frozen_bytes"),
    ],
)
def test_invalid_requests_are_refused(options, key):
    with pytest.raises(InvalidValueError) as caught:
        advise(**{"vram": "12GiB", **options})
    assert caught.value.key == key


SMALL = ModelFacts.from_shapes([(f"block.{i}.weight", (1024, 1024)) for i in range(40)])


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 24), st.integers(1, 24), st.integers(4, 64))
def test_more_device_memory_never_leads_to_more_offload(first, second, ram):
    def level(vram):
        try:
            advice = DeepSpeedPlan.advise(SMALL, vram=vram * GIB // 8, ram=ram * GIB // 4)
        except NothingFitsError:
            return len(LEVELS) * 10
        return advice.candidates.index(advice.chosen)

    less, more = sorted((first, second))
    assert level(more) <= level(less)


def flux_on(ram, *, update="host", **options):
    options = {"precision": "bf16", "update": update, **options}
    return DeepSpeedPlan.advise("flux", vram="24GiB", ram=ram, **options)


def streamed_of(advice):
    return [one for one in advice.candidates if one.title == STREAMED]


def test_streamed_weights_are_chosen_if_they_are_the_fastest_unless_refused():
    plain, asked = flux_on("288GiB", streamed=False), flux_on("288GiB")
    assert plain.streamed is None
    assert all(one.streamed is not None for one in streamed_of(plain))
    fitting = [one for one in streamed_of(plain) if one.fits]
    offered = min(fitting, key=lambda one: one.time.expected)
    assert "streaming is off" in offered.reason
    assert offered.time.expected < plain.chosen.time.expected
    assert asked.chosen.title == STREAMED
    assert "doctor --prove" in asked.chosen.reason
    assert asked.chosen.time.expected == offered.time.expected
    assert asked.decisions[0].after == asked.streamed
    again = asked.plan.resolve(
        platform=asked.resolved.platform, model=asked.resolved.model, streamed=asked.streamed
    )
    assert again.estimate(asked.estimate.workload).items == asked.estimate.items
    assert "weights streamed" in again.brief()
    kept = asked.plan.resolve(
        platform=asked.resolved.platform, model=asked.resolved.model, streamed=True
    ).with_units_kept(asked.estimate.workload)
    assert kept.streamed == asked.streamed
    decision = kept.decisions[-1]
    assert (decision.key, decision.after) == ("streamed.memory", asked.streamed.memory)
    assert "of the 22.80 GiB of usable device memory" in decision.reason


def test_as_many_units_as_fit_stay_on_the_device():
    for vram in ("12GiB", "24GiB", "80GiB"):
        advice = DeepSpeedPlan.advise("flux", vram=vram, ram="512GiB", streamed=True)
        for one in streamed_of(advice):
            total = 2 * one.estimate.resolved.model.streamed.total
            largest = 2 * max(one.estimate.resolved.model.streamed.units)
            room = advice.budget.usable("device") - one.estimate.device
            assert not one.fits or 0 <= room < largest or one.streamed.memory == total


def test_the_error_says_when_only_streamed_weights_fit():
    with pytest.raises(NothingFitsError, match=r"streamed=True, weights streamed.*, 1\d\.\d\d s"):
        flux_on("192GiB", streamed=False)
    assert flux_on("192GiB").chosen.title == STREAMED
    smaller = "AdamWBF16States"
    with pytest.raises(NothingFitsError, match=f"fit: streamed=True, optimizer='{smaller}'"):
        flux_on("150GiB", streamed=False)
    with pytest.raises(NothingFitsError) as caught:
        flux_on("64GiB")
    assert caught.value.nearest.streamed is not None


@pytest.mark.parametrize(
    ("ram", "optimizer"), [("128GiB", "AdamWBF16States"), ("100GiB", "AdamW8BitStates")]
)
def test_a_leaner_optimizer_is_chosen_and_named_only_where_nothing_else_fits(ram, optimizer):
    assert flux_on("192GiB").chosen.instead_of is None
    advice = flux_on(ram, optimizer={"type": "AdamW", "params": {"lr": 2e-5}})
    assert (advice.chosen.optimizer, advice.chosen.instead_of) == (optimizer, "AdamW")
    assert advice.plan.optimizer.to_dict() == {"type": optimizer, "params": {"lr": 2e-5}}
    assert f"nothing fits with AdamW; {optimizer} is" in advice.chosen.reason
    assert optimizer in advice.chosen.title
    (decision,) = [one for one in advice.decisions if one.key == "optimizer.type"]
    assert (decision.before, decision.after, decision.severity) == ("AdamW", optimizer, "warning")
    asked = flux_on(ram, optimizer=optimizer).chosen
    assert (asked.estimate.items, asked.instead_of) == (advice.estimate.items, None)


def test_each_layout_is_priced_with_the_optimizer_that_runs_in_it():
    asked = {"optimizer": "Adafactor", "update": "host"}
    advice = DeepSpeedPlan.advise("sdxl", vram="24GiB", ram="128GiB", **asked)
    ran = {one.estimate.resolved.stage: one.optimizer for one in advice.candidates}
    assert ran == {0: "Adafactor", 1: "AdamW", 2: "AdamW", 3: "AdamW"}
    assert advice.chosen.instead_of == "Adafactor"
    assert "AdamW runs instead of Adafactor" in advice.chosen.reason
    again = advice.plan.resolve(platform=advice.resolved.platform, model=advice.resolved.model)
    assert again.estimate(advice.estimate.workload).items == advice.estimate.items
    roomy = DeepSpeedPlan.advise("sdxl", vram="80GiB", ram="128GiB", optimizer="Adafactor")
    assert (roomy.chosen.optimizer, roomy.chosen.instead_of) == ("Adafactor", None)
    assert roomy.resolved.stage == 0


def test_layouts_in_which_an_optimizer_of_a_package_cannot_run_are_left_out():
    advice = DeepSpeedPlan.advise("sdxl", vram="80GiB", ram="128GiB", optimizer="Prodigy")
    assert {one.estimate.resolved.stage for one in advice.candidates} == {0, 1, 2}


def test_an_update_on_the_device_is_chosen_where_it_fits_or_is_faster():
    advice = flux_on("96GiB", update=None, optimizer="Adafactor")
    assert (advice.chosen.title, advice.update) == (DEVICE, DeviceUpdate())
    (decision,) = [one for one in advice.decisions if one.key == "update"]
    assert (decision.after, DEVICE in decision.reason) == ("device", True)
    again = advice.plan.resolve(
        platform=advice.resolved.platform, model=advice.resolved.model,
        streamed=advice.streamed, update=advice.update,
    )  # fmt: skip
    assert again.optimizer.name == "Adafactor"
    assert again.estimate(advice.estimate.workload).items == advice.estimate.items
    assert flux_on("72GiB", update=None, optimizer="Adafactor").chosen.title == DEVICE_SPLIT
    host = flux_on("300GiB", update="host")
    assert {DEVICE, DEVICE_SPLIT}.isdisjoint(one.title for one in host.candidates)
    assert flux_on("300GiB", update=None).chosen.time.expected < host.chosen.time.expected


def test_weights_are_rounded_at_random_only_on_request():
    lean = {"optimizer": "Adafactor", "gradient_clipping": 0}
    with pytest.raises(NothingFitsError) as caught:
        flux_on("32GiB", update=None)
    assert "gradient_clipping=0, optimizer='Adafactor', update='device:stochastic'" in str(
        caught.value.fix
    )
    assert "--optimizer Adafactor --update device:stochastic" in str(caught.value.in_shell())
    exact = flux_on("96GiB", update=None, **lean)
    assert not any("random" in one.title for one in exact.candidates)
    advice = flux_on("32GiB", update="device:stochastic", **lean)
    assert "rounded at random" in advice.chosen.title
    assert advice.update.name == advice.to_dict()["update"] == "device:stochastic"


def test_a_requested_update_on_the_device_that_is_impossible_is_refused():
    with pytest.raises(PlanConflictError, match=r"update = 'device'.*trains in fp32"):
        DeepSpeedPlan.advise("sdxl", vram="24GiB", ram="96GiB", update="device", precision="fp32")
    with pytest.raises(OptimizerError, match="passes one weight at a time"):
        flux_on("200GiB", update="device", optimizer="Prodigy")
    with pytest.raises(InvalidValueError, match="device:split"):
        flux_on("200GiB", update="card")


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"optimizer": "LBFGS"}, "recomputes the loss"),
        ({"optimizer": "AdamWBF16States"}, "depends on the order of all weights"),
        ({"precision": "fp32"}, "trains in fp32"),
    ],
)
def test_a_refused_update_on_the_device_says_why(settings, why):
    with pytest.raises(PlanConflictError, match=f"update = 'device'.*{why}"):
        flux_on("200GiB", update="device", **settings)


def test_what_would_help_an_update_on_the_device_is_no_optimizer_that_it_refuses():
    with pytest.raises(NothingFitsError) as caught:
        flux_on("64GiB", update="device")
    assert "AdamWBF16States" not in str(caught.value)


def test_weights_on_the_device_are_updated_there_where_streaming_is_refused():
    advice = DeepSpeedPlan.advise(
        "sdxl", vram="24GiB", ram="64GiB", streamed=False, update="device:split"
    )
    assert (advice.streamed, advice.update.masters) == (None, "split")
    assert advice.chosen.title.startswith("weights on the device, split master weights")
    # Resident weights need too much device memory, but no more host memory.
    streamed = flux_on("128GiB", update="device:split", optimizer="Adafactor")
    assert streamed.chosen.title == DEVICE_SPLIT


def test_master_weights_are_split_only_where_no_exact_layout_fits():
    exact, tight = flux_on("192GiB"), flux_on("170GiB")
    assert SPLIT not in {one.title for one in exact.candidates}
    assert not exact.streamed.split_masters
    assert tight.chosen.title == SPLIT
    assert tight.streamed.split_masters
    saved = exact.estimate.host - tight.estimate.host
    assert saved == pytest.approx(2 * exact.resolved.model.numel, rel=1e-3)


@pytest.mark.parametrize(
    ("model", "optimizer", "ram"),
    [("flux", "AdamWBF16States", "110GiB"), ("qwen-image", "AdamW8BitStates", "128GiB")],
)
def test_without_clipping_gradients_need_almost_no_host_memory(model, optimizer, ram):
    asked = {"vram": "24GiB", "ram": ram, "precision": "bf16", "optimizer": optimizer}
    if model == "qwen-image":
        with pytest.raises(NothingFitsError, match="fit: gradient_clipping=0,"):
            DeepSpeedPlan.advise(model, **asked)
    else:
        assert DeepSpeedPlan.advise(model, **asked).chosen.optimizer == "AdamW8BitStates"
    advice = DeepSpeedPlan.advise(model, streamed=True, gradient_clipping=0, **asked)
    assert advice.chosen.time.schedule == "eager"
    assert advice.streamed.gradient_buffers < len(advice.resolved.model.streamed.units) // 2
    again = advice.plan.resolve(
        platform=advice.resolved.platform, model=advice.resolved.model, streamed=advice.streamed
    )
    assert again.estimate(advice.estimate.workload).items == advice.estimate.items


def test_an_optimizer_that_cannot_stream_gets_no_streamed_candidates():
    assert not streamed_of(flux_on("1000GiB", streamed=True, optimizer="Lion"))


@pytest.mark.parametrize("base_dtype", [None, "nf4", "int8", "fp8"])
def test_a_quantized_base_is_streamed_where_it_does_not_fit(base_dtype):
    fast = Platform.synthetic(
        "cuda", device_name="NVIDIA GeForce RTX 4090", bf16=True, vram=4 * GIB
    )
    advice = DeepSpeedPlan.advise(
        "flux", platform=fast, ram="64GiB", lora=16, base_dtype=base_dtype
    )
    assert advice.streamed is not None
    again = advice.plan.resolve(
        platform=advice.resolved.platform, model=advice.resolved.model, streamed=advice.streamed
    )
    assert again.estimate(advice.estimate.workload).items == advice.estimate.items


def test_a_base_whose_values_cannot_be_copied_unit_by_unit_is_not_streamed():
    flux = as_facts("flux").with_adapters(16)
    frozen = [attrs.evolve(each, storage="gguf-q4_0", trainable=False) for each in flux.parameters]
    model = attrs.evolve(flux, parameters=[*frozen, *flux.trainable])
    advice = DeepSpeedPlan.advise(model, vram="24GiB", ram="64GiB", precision="bf16")
    assert advice.candidates
    assert not streamed_of(advice)


def test_a_remedy_names_the_plan_that_advise_then_chooses():
    machine = {"vram": "24GiB", "ram": "16GiB"}
    with pytest.raises(NothingFitsError) as told:
        DeepSpeedPlan.advise("sdxl", **machine)
    for remedy in told.value.remedies:
        chosen = DeepSpeedPlan.advise("sdxl", **machine, **remedy.settings).chosen
        assert remedy.gain == f"{chosen.title}, {chosen.time.expected:.2f} s per step"


def test_where_nothing_fits_adapters_are_suggested_only_if_they_would():
    with pytest.raises(NothingFitsError, match=r"adapters fit: lora=16,"):
        advise("8GiB", "16GiB")
    with pytest.raises(NothingFitsError) as told:
        advise("1GiB", "2GiB")
    assert "adapters" not in str(told.value)
    with pytest.raises(NothingFitsError) as told:
        advise("1GiB", "2GiB", lora=4)
    assert "adapters" not in str(told.value)
    none = ModelFacts.from_shapes([("layer.weight", (2**16, 2**16))])
    with pytest.raises(NothingFitsError) as told:
        DeepSpeedPlan.advise(none, vram="2GiB", ram="4GiB")
    assert "adapters" not in str(told.value)


@pytest.mark.parametrize("lora", [0, -1, 1.5, "16", True])
def test_an_invalid_adapter_rank_is_refused(lora):
    with pytest.raises(InvalidValueError, match="lora"):
        advise("80GiB", lora=lora)


def test_adapters_on_missing_layers_are_refused():
    facts = ModelFacts.from_shapes([("net.to_q.weight", (8, 4)), ("net.to_q.bias", (8,))])
    adapted = facts.with_adapters(2)
    assert {each.name: each.shape for each in adapted.trainable} == {
        "net.to_q.lora_A.weight": (2, 4),
        "net.to_q.lora_B.weight": (8, 2),
    }
    with pytest.raises(InvalidValueError, match=r"lora_targets = .*ff\.net"):
        facts.with_adapters(2, targets=["ff.net"])


def test_a_quantized_base_is_estimated_with_its_stored_bytes():
    plan = DeepSpeedPlan.build(stage=2, precision="bf16", offload="cpu")
    machine = Platform.synthetic("cuda", vram=24 * GIB, ram=64 * GIB)
    taken = {}
    for base in (None, "nf4", "int8"):
        estimate = plan.estimate("flux", platform=machine, lora=16, base_dtype=base)
        facts = estimate.resolved.model
        assert facts.numel == plan.estimate("flux", platform=machine, lora=16).resolved.model.numel
        assert facts.storages == ((base,) if base else ())
        assert not any(each.trainable and each.storage for each in facts.parameters)
        weights = [item for item in estimate.items if item.component == "weights"]
        taken[base] = sum(item.nbytes for item in weights if item.place == "device")
    assert taken["nf4"] / taken[None] == pytest.approx(0.5625 / 2, rel=0.01)
    assert taken["int8"] / taken[None] == pytest.approx(1 / 2, rel=0.01)
    in_full = [item for item in estimate.items if "quantized weight, dequantized" in item.note]
    assert [item.nbytes for item in in_full] == [2 * facts.largest_quantized]


def test_adapters_on_a_quantized_base_are_suggested_where_only_they_fit():
    with pytest.raises(NothingFitsError, match=r"lora=16, base_dtype='nf4',"):
        DeepSpeedPlan.advise("flux", vram="12GiB", ram="15GiB")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base_dtype": "nf4"}, r"base_dtype = 'nf4': a quantized model cannot be trained"),
        ({"base_dtype": "bf16", "lora": 4}, r"base_dtype = 'bf16'.*one of nf4, fp4, int8, fp8"),
    ],
)
def test_invalid_quantization_options_are_refused(options, message):
    with pytest.raises(InvalidValueError, match=message):
        advise("80GiB", **options)
