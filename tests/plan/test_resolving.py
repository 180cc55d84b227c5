from __future__ import annotations

import attrs
import pytest

from zerotune.errors import InvalidValueError, UnresolvedPlanError
from zerotune.plan import DeepSpeedPlan, ModelFacts, RunFacts
from zerotune.plan.context import Streaming
from zerotune.plan.families import model_family
from zerotune.plan.resolve import case as filling
from zerotune.plan.rules.rule import Rule
from zerotune.plan.sections import ZeroSection
from zerotune.plan.values import AUTO
from zerotune.platform import Platform
from zerotune.platform.facts import DeepSpeedSupport

BF16 = {"bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1}


def zero(**keys):
    return {**BF16, "zero_optimization": keys}


def resolve(config, platform, **kwargs):
    return DeepSpeedPlan.from_dict(config).resolve(platform=platform, **kwargs)


def decision(resolved, key):
    (found,) = [each for each in resolved.decisions if each.key == key]
    return found


@pytest.mark.parametrize("solved", ["solve_batch", "decide_precision"])
def test_resolving_determines_batch_and_precision_once(monkeypatch, cuda, solved):
    calls, work = [], getattr(filling, solved)
    monkeypatch.setattr(filling, solved, lambda *a, **k: calls.append(solved) or work(*a, **k))
    resolve(zero(stage=2, offload_optimizer={"device": "cpu"}), cuda)
    assert calls == [solved]


def test_resolving_evaluates_each_rule_once(monkeypatch, cuda):
    asked, find = [], Rule.find
    monkeypatch.setattr(Rule, "find", lambda rule, case: asked.append(rule.id) or find(rule, case))
    resolve(zero(stage="auto", offload_optimizer={"device": None}), cuda)
    assert len(asked) > 20
    assert len(asked) == len(set(asked))


OFFLOADED = {"stage": 2, "offload_optimizer": {"device": "cpu"}}


@pytest.mark.parametrize("engine", ["host", "deepspeed"])
def test_the_requested_engine_is_recorded_and_shown(cuda, engine):
    resolved = resolve(zero(**OFFLOADED), cuda, engine=engine)
    said = decision(resolved, "engine")
    assert (resolved.engine, said.before, said.after, said.severity) == (
        engine, None, engine, "note",
    )  # fmt: skip
    assert {"host": "host engine, 1", "deepspeed": "DeepSpeed, 1"}[engine] in resolved.explain()
    assert said.reason in resolved.explain()


def test_the_host_engine_is_the_default_on_a_cpu():
    platform = Platform.synthetic("cpu", ram=2**36)
    for keys in (OFFLOADED, {**OFFLOADED, "stage": 3, "offload_param": {"device": "cpu"}}):
        resolved = resolve(zero(**keys), platform)
        assert (resolved.is_hosted, resolved.is_resident) == (True, True)
        assert not resolve(zero(**keys), platform, engine="deepspeed").is_hosted
        assert not resolve(zero(stage=2), platform, deepspeed=False).is_hosted


@pytest.mark.parametrize(
    ("keys", "context", "reason"),
    [
        ({"stage": 2}, {}, "not in host memory"),
        ({**OFFLOADED, "stage": 3}, {"world_size": 2, "streamed": False},
         "no rank keeps all weights on its device, and streaming is off"),
        ({**OFFLOADED, "stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}, {},
         "only a part of the optimizer"),
        ({**OFFLOADED, "stage": 3, "offload_param": {"device": "cpu"}}, {"streamed": False},
         "keeps weights in host memory, and streaming is off"),
        ({"stage": 3, "offload_optimizer": {"device": "cpu"},
          "offload_param": {"device": "nvme", "nvme_path": "/x"}}, {}, "NVMe"),
        ({**OFFLOADED, "zenflow": {"topk_ratio": 0.1}}, {}, "obeys zero_optimization.zenflow"),
    ],
    ids=str,
)  # fmt: skip
def test_a_plan_that_the_host_engine_cannot_run_gets_a_warning_with_the_reason(
    cuda, keys, context, reason
):
    resolved = resolve(zero(**keys), cuda, engine="host", **context)
    said = decision(resolved, "engine")
    assert resolved.engine == "deepspeed"
    assert (said.before, said.after, said.severity) == ("host", "deepspeed", "warning")
    assert reason in said.reason


@pytest.mark.parametrize(
    ("keys", "context", "reason"),
    [
        ({"stage": 3}, {"world_size": 2}, "no rank keeps all weights"),
        ({"stage": 3, "offload_param": {"device": "cpu"}}, {}, "keeps weights in host memory"),
        ({}, {"model": model_family("flux2").facts}, "do not fit"),
    ],
    ids=str,
)  # fmt: skip
def test_the_host_engine_streams_weights_that_a_rank_does_not_keep(cuda, keys, context, reason):
    resolved = resolve(zero(**{**OFFLOADED, **keys}), cuda, engine="host", **context)
    assert reason in decision(resolved, "streamed").reason
    assert resolved.streaming == Streaming()
    assert "streamed from host memory, with room for 3 units on the device" in resolved.explain()
    assert resolve(zero(**OFFLOADED), cuda, engine="host").streaming is None


@pytest.mark.parametrize(
    ("config", "engine", "after"),
    [({}, "host", "plain"), (OFFLOADED, "host", "host"), (OFFLOADED, "deepspeed", "host")],
)
def test_without_deepspeed_only_an_optimizer_in_host_memory_runs_on_the_host_engine(
    cuda, config, engine, after
):
    resolved = resolve(zero(**config), cuda, engine=engine, deepspeed=False)
    assert decision(resolved, "engine").after == after
    assert resolved.is_hosted == (after == "host")


def test_weights_are_not_streamed_in_deepspeeds_engine(cuda):
    resolved = resolve(zero(**OFFLOADED), cuda, engine="deepspeed", streamed=True)
    assert resolved.streamed is False
    assert 'engine="deepspeed"' in decision(resolved, "streamed").reason


def test_an_unknown_engine_is_refused(cuda):
    with pytest.raises(InvalidValueError, match='"host" or "deepspeed"'):
        resolve(zero(**OFFLOADED), cuda, engine="plain")


def warnings(resolved):
    return [each.key for each in resolved.decisions if each.severity == "warning"]


def test_reference_a_resolves_with_a_warning_that_offload_param_is_ignored(reference_a, cuda):
    resolved = resolve(reference_a, cuda)
    assert resolved.stage == 2
    assert resolved.offload_optimizer == "cpu"
    assert resolved.offload_param == "none"
    assert (resolved.train_batch_size, resolved.micro_batch_size) == (8, 2)
    assert resolved.gradient_accumulation_steps == 4
    assert resolved.gradient_clipping == 1.0
    assert resolved.precision == "fp32"
    assert warnings(resolved) == ["zero_optimization.offload_param"]
    assert "ignores offload_param at stage 2" in resolved.decisions[0].reason


def test_reference_a_on_the_cpu_accelerator_pins_nothing(reference_a, cpu):
    resolved = resolve(reference_a, cpu)
    assert resolved.plan.zero_optimization.offload_optimizer.pin_memory is False
    found = decision(resolved, "zero_optimization.offload_optimizer.pin_memory")
    assert (found.before, found.after) == (True, False)


def test_reference_b_in_fp32_is_not_swapped_on_the_cpu_accelerator(reference_b, cpu, unet):
    for model in (unet, None):
        resolved = resolve(reference_b, cpu, model=model)
        assert resolved.precision == "fp32"
        assert resolved.offload_param == "cpu"
        assert resolved.nvme_paths == {}
        assert "zero_optimization.offload_param.device" in warnings(resolved)
    reference_b["bf16"] = {"enabled": True}
    assert resolve(reference_b, cpu, model=unet).offload_param == "nvme"


def test_fp32_is_swapped_where_deepspeed_does_not_round_it(reference_b, cuda, cpu):
    small = ModelFacts.from_shapes([("a", (10, 10))])
    assert resolve(reference_b, cpu, model=small).offload_param == "nvme"
    assert resolve(reference_b, cuda, model=small).offload_param == "nvme"


def test_every_key_that_affects_behaviour_is_explicit_at_its_stage(cuda, unet):
    for stage in (1, 2, 3):
        written = resolve(zero(stage=stage), cuda, model=unet).plan.zero_optimization.to_dict()
        names = {attribute.name for attribute in attrs.fields(ZeroSection)}
        high = {name for name in names if name.startswith(("stage3_", "zero_"))}
        high |= {"sub_group_size", "memory_efficient_linear"}
        low = {
            "allgather_partitions",
            "allgather_bucket_size",
            "use_multi_rank_bucket_allreduce",
            "round_robin_gradients",
            "ignore_unused_parameters",
        }
        absent = {"offload_param", "offload_optimizer", "extra", *(low if stage == 3 else high)}
        assert written.keys() == names - absent


def test_stage_0_writes_only_the_stage(cuda):
    resolved = resolve(zero(stage=0, reduce_bucket_size=5), cuda)
    assert resolved.plan.zero_optimization.to_dict() == {"stage": 0}
    assert decision(resolved, "zero_optimization.reduce_bucket_size").before == 5


def test_explicit_numbers_are_kept(cuda, unet):
    written = {
        "stage": 3,
        "overlap_comm": False,
        "reduce_bucket_size": 7,
        "stage3_param_persistence_threshold": 100_000,
        "stage3_max_live_parameters": 3,
        "sub_group_size": 11,
    }
    result = resolve(zero(**written), cuda, model=unet).plan.zero_optimization.to_dict()
    assert written.items() <= result.items()


def test_every_auto_value_is_filled(cuda, unet):
    section = {
        "stage": AUTO,
        "offload_optimizer": {"device": "cpu", "pin_memory": AUTO, "buffer_count": AUTO},
        "overlap_comm": AUTO,
        "reduce_bucket_size": AUTO,
        "stage3_prefetch_bucket_size": AUTO,
        "stage3_param_persistence_threshold": AUTO,
    }
    config = {
        "train_batch_size": AUTO,
        "train_micro_batch_size_per_gpu": AUTO,
        "gradient_accumulation_steps": AUTO,
        "gradient_clipping": AUTO,
        "bf16": {"enabled": AUTO},
        "zero_optimization": section,
        "steps_per_print": AUTO,
        "wall_clock_breakdown": AUTO,
        "zero_allow_untested_optimizer": AUTO,
    }
    resolved = resolve(config, cuda, model=unet)
    assert resolved.stage == 2
    assert "'auto'" not in str(resolved.to_deepspeed())
    assert "zero_optimization.stage" in warnings(resolved)
    assert resolved.plan.zero_optimization.stage3_prefetch_bucket_size is None


@pytest.mark.parametrize(
    "section", [{"offload_param": {"device": "cpu"}}, {"offload_optimizer": {"device": "nvme"}}]
)
def test_an_automatic_stage_follows_from_the_offload(section, cuda):
    assert resolve(zero(stage=AUTO, **section), cuda).stage == 3


def test_an_automatic_offload_device_becomes_none_with_a_decision(cuda):
    resolved = resolve(zero(stage=2, offload_optimizer={"device": AUTO}), cuda)
    assert resolved.offload_optimizer == "none"
    assert warnings(resolved) == ["zero_optimization.offload_optimizer.device"]


def test_nvme_buffer_sizes_follow_from_the_largest_partition(cuda, unet):
    config = zero(stage=3, offload_param={"device": "nvme"}, offload_optimizer={"device": "nvme"})
    for world_size in (1, 2):
        section = resolve(config, cuda, model=unet, world_size=world_size).plan.zero_optimization
        assert section.offload_param.buffer_size == unet.largest // world_size
        assert section.offload_param.max_in_cpu == 0
        assert section.offload_optimizer.buffer_count == 4
        assert section.sub_group_size <= 100_000_000


def prefetch(resolved):
    return resolved.plan.zero_optimization.stage3_prefetch_bucket_size


def test_nothing_is_prefetched_from_nvme(cuda, unet):
    key = "zero_optimization.stage3_prefetch_bucket_size"
    resolved = resolve(zero(stage=3, offload_param={"device": "nvme"}), cuda, model=unet)
    assert prefetch(resolved) == 0
    assert decision(resolved, key).severity == "note"
    written = zero(stage=3, offload_param={"device": "nvme"}, stage3_prefetch_bucket_size=5e7)
    resolved = resolve(written, cuda, model=unet)
    assert prefetch(resolved) == 0
    assert key in warnings(resolved)
    assert prefetch(resolve(zero(stage=3, offload_param={"device": "nvme"}), cuda)) == 0


def test_parameters_in_host_memory_may_be_prefetched(cuda, unet):
    section = {"device": "nvme", "max_in_cpu": 1e9}
    config = zero(stage=3, offload_param=section, stage3_prefetch_bucket_size=5e7)
    assert prefetch(resolve(config, cuda, model=unet)) == 50_000_000
    assert prefetch(resolve(config, cuda)) == 50_000_000


def test_fast_init_sizes_the_parameter_buffers_for_whole_sub_groups(cuda, unet):
    config = zero(
        stage=3,
        sub_group_size=1_000_000,
        offload_param={"device": "nvme"},
        offload_optimizer={"device": "nvme", "fast_init": True},
    )
    section = resolve(config, cuda, model=unet).plan.zero_optimization
    assert section.offload_param.buffer_size == 1_000_000 + unet.largest
    config["zero_optimization"]["offload_param"]["buffer_size"] = unet.largest
    with pytest.raises(InvalidValueError, match="the largest sub-group, because fast_init"):
        resolve(config, cuda, model=unet)


def test_a_buffer_too_small_for_the_model_is_refused_with_the_largest_partition(cuda, unet):
    config = zero(stage=3, offload_param={"device": "nvme", "buffer_size": 1_000_000})
    with pytest.raises(InvalidValueError) as caught:
        resolve(config, cuda, model=unet)
    assert caught.value.key == "zero_optimization.offload_param.buffer_size"
    assert caught.value.value == 1_000_000
    assert "down.2.conv2.weight (512 x 512 x 3 x 3) = 2359296" in caught.value.reason
    assert "2359296" in caught.value.fix


def test_a_small_buffer_is_allowed_if_no_larger_tensor_is_swapped(cuda):
    model = ModelFacts.from_shapes([("a", (1000, 100))])
    config = zero(stage=3, offload_param={"device": "nvme", "buffer_size": 10})
    assert resolve(config, cuda, model=model).offload_param == "nvme"


def test_swap_buffers_suffice_for_each_weight_that_is_gathered_at_once(cuda):
    shapes = [("top", (3_000_000,)), ("other.weight", (3_000_000,)), ("small", (8,))]
    shapes += [(f"blocks.{i}.{layer}.weight", (2_000_000,)) for i in range(2) for layer in "abcdef"]
    shapes += [(f"blocks.{i}.pair.{kind}", (2_000_000,)) for i in range(2) for kind in "xy"]
    model = ModelFacts.from_shapes(shapes)
    key = "zero_optimization.offload_param.buffer_count"

    def count(model, **written):
        section = {"device": "nvme", **written}
        resolved = resolve(zero(stage=3, offload_param=section), cuda, model=model)
        return resolved.plan.zero_optimization.offload_param.buffer_count

    # Without blocks: the two weights of a module, the model's own, and two spare buffers.
    assert count(model) == 5
    assert count(attrs.evolve(model, units=("blocks.0", "blocks.1"))) == 8 + 1 + 2
    with pytest.raises(InvalidValueError) as caught:
        count(model, buffer_count=2)
    assert (caught.value.key, caught.value.value) == (key, 2)
    assert "smaller than 3" in caught.value.reason
    assert "write at least 5" in caught.value.fix
    assert count(model, buffer_count=3) == 3


def test_aio_is_written_only_if_something_swaps(cuda, cpu):
    assert resolve(zero(stage=3), cuda).plan.aio is None
    resolved = resolve(zero(stage=3, offload_optimizer={"device": "nvme"}), cuda)
    assert resolved.plan.aio.to_dict() == {
        "block_size": 1_048_576,
        "queue_depth": 8,
        "intra_op_parallelism": 1,
        "single_submit": False,
        "overlap_events": True,
        "use_gds": False,
    }
    on_cpu = resolve({**zero(stage=3), "aio": {"use_gds": True, "queue_depth": 32}}, cpu)
    assert on_cpu.plan.aio.use_gds is False
    assert on_cpu.plan.aio.queue_depth == 32


def test_settings_of_an_unused_device_are_dropped(cuda):
    config = zero(stage=3, offload_param={"device": "cpu", "nvme_path": "/x", "buffer_size": 5})
    resolved = resolve(config, cuda)
    assert resolved.plan.zero_optimization.offload_param.to_dict() == {
        "device": "cpu",
        "pin_memory": True,
    }
    assert decision(resolved, "zero_optimization.offload_param.nvme_path").before == "/x"


def test_without_deepspeed_zero_is_dropped_with_the_reason_from_the_platform(reference_a):
    platform = Platform.synthetic(
        "mps",
        deepspeed=DeepSpeedSupport(
            available=False,
            accelerator=None,
            reason="DeepSpeed does not run on macOS",
            fix="use Linux",
        ),
    )
    resolved = resolve({**reference_a, "aio": {"queue_depth": 4}}, platform)
    assert not resolved.uses_deepspeed
    assert resolved.stage == 0
    assert resolved.offload_optimizer == resolved.offload_param == "none"
    assert resolved.plan.zero_optimization is None
    assert warnings(resolved) == ["zero_optimization", "aio"]
    for each in resolved.decisions[:2]:
        assert each.reason == "DeepSpeed does not run on macOS; use Linux"
    assert resolved.train_batch_size == 8
    assert resolved.gradient_clipping == 1.0
    assert resolved.plan.optimizer.type == "AdamW"


def test_without_deepspeed_the_zero_rules_do_not_apply(no_deepspeed):
    config = zero(stage=1, offload_optimizer={"device": "nvme"})
    assert not resolve(config, no_deepspeed).uses_deepspeed


def test_a_missing_deepspeed_is_reported_even_when_nothing_is_dropped(no_deepspeed):
    assert warnings(resolve(BF16, no_deepspeed)) == ["engine"]


def test_deepspeed_can_be_switched_off(cuda):
    resolved = resolve(zero(stage=2), cuda, deepspeed=False)
    assert not resolved.uses_deepspeed
    assert decision(resolved, "zero_optimization").reason == "DeepSpeed is disabled"
    assert warnings(resolve(BF16, cuda, deepspeed=False)) == []


def test_a_plan_without_deepspeed_keeps_its_optimizer_in_host_memory(cuda, no_deepspeed):
    config = zero(stage=2, offload_optimizer={"device": "cpu"})
    resolved = resolve(config, cuda, deepspeed=False)
    assert (resolved.stage, resolved.offload_optimizer) == (0, "cpu")
    assert resolved.plan.zero_optimization.offload_optimizer.pin_memory is True
    assert decision(resolved, "zero_optimization").before == {"stage": 2}
    kept = decision(resolved, "zero_optimization.offload_optimizer")
    assert (kept.after, kept.severity) == ("cpu", "note")
    half = {"bf16": {"enabled": False}, "fp16": {"enabled": True}}
    assert resolve({**config, **half}, cuda, deepspeed=False).offload_optimizer == "cpu"
    # macOS has one memory; the host engine's steps are those of Adam; files need ZeRO-3.
    assert resolve(config, no_deepspeed).offload_optimizer == "none"
    lion = resolve({**config, "optimizer": {"type": "Lion"}}, cuda, deepspeed=False)
    assert lion.offload_optimizer == "none"
    assert "states of Lion" in decision(lion, "zero_optimization").reason
    files = zero(stage=3, offload_optimizer={"device": "nvme", "nvme_path": "/swap"})
    assert resolve(files, cuda, deepspeed=False).offload_optimizer == "none"


@pytest.mark.parametrize(
    ("config", "run", "clipping"),
    [
        ({"gradient_clipping": 0.5}, {}, 0.5),
        ({"gradient_clipping": 0}, {}, 0.0),
        ({"gradient_clipping": AUTO}, {"gradient_clipping": 0.3}, 0.3),
        ({}, {"gradient_clipping": 0.0}, 0.0),
        ({}, {}, 1.0),
        ({"deepspeed_config": {}, "max_grad_norm": 0.2}, {}, 0.2),
    ],
)
def test_clipping_comes_from_the_file_the_run_or_the_default(config, run, clipping, cuda):
    assert resolve(config, cuda, run=RunFacts(**run)).gradient_clipping == clipping


def test_a_run_that_requests_other_clipping_gives_a_warning(cuda):
    resolved = resolve({"gradient_clipping": 1.0}, cuda, run=RunFacts(gradient_clipping=0.5))
    assert resolved.gradient_clipping == 1.0
    assert warnings(resolved) == ["gradient_clipping"]


def test_auto_in_a_key_that_zerotune_does_not_fill_is_named(cuda):
    with pytest.raises(UnresolvedPlanError) as caught:
        resolve({**BF16, "communication_data_type": AUTO}, cuda)
    assert caught.value.key == "communication_data_type"


def test_auto_that_deepspeed_understands_passes_through(cuda):
    config = {**BF16, "data_types": {"keep_in_fp32_modules": AUTO}, "_note": AUTO}
    assert resolve(config, cuda).plan.extra["data_types"] == {"keep_in_fp32_modules": AUTO}


@pytest.mark.parametrize("world_size", [0, -1, 1.0, True, "2"])
def test_an_invalid_world_size_is_refused(world_size, cuda):
    with pytest.raises(InvalidValueError) as caught:
        resolve(BF16, cuda, world_size=world_size)
    assert caught.value.key == "world_size"


def test_without_an_argument_the_platform_is_detected(monkeypatch, reference_a, cpu):
    monkeypatch.setattr("zerotune.platform.detect_platform", lambda: cpu)
    assert DeepSpeedPlan.from_dict(reference_a).resolve().platform is cpu
