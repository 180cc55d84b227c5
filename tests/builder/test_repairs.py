"""Every finding has a button, which does what the finding's fix says."""

from __future__ import annotations

import copy

import pytest

from tests.builder.states import PLAN, state
from zerotune.builder import repairs as module
from zerotune.builder.forms import FormState
from zerotune.builder.preview import understand
from zerotune.builder.repairs import repairs
from zerotune.builder.setup import Machines
from zerotune.decisions import Decision
from zerotune.errors import ZeroTuneError
from zerotune.plan.rules.table import all_rules
from zerotune.platform import Platform

NVME = {"device": "nvme", "nvme_path": "/s"}
CPU = {"device": "cpu"}
FP16 = {"bf16": {"enabled": False}, "fp16": {"enabled": True}}


def zero(**keys):
    return {"zero_optimization": keys}


def optimizer(name, **params):
    return {"optimizer": {"type": name, **({"params": params} if params else {})}}


def scheduler(name, **params):
    return {"scheduler": {"type": name, "params": params}}


def case(rule, *labels, launch=None, setup=None, platform=None, without=(), **config):
    """Make a form with a finding of this rule, and the labels of its buttons."""
    config = {key: value for key, value in {**PLAN, **config}.items() if key not in without}
    form = {"config": config, "launch": launch, "setup": setup}
    return pytest.param(rule, labels, form, platform, id=f"{rule}-{labels[0] if labels else ''}")


RULES = [
    case(
        "batch-triple",
        "Set train_batch_size to 2",
        "Set gradient_accumulation_steps to 2",
        "Set train_micro_batch_size_per_gpu to 4",
        "Set train_batch_size to auto",
        train_batch_size=4,
        train_micro_batch_size_per_gpu=2,
    ),
    case(
        "batch-triple",
        "Write 2",
        train_batch_size=3,
        train_micro_batch_size_per_gpu=2,
        without=["gradient_accumulation_steps"],
    ),
    case(
        "accumulation-set-twice",
        "Remove launch.gradient_accumulation_steps",
        launch={"gradient_accumulation_steps": 4},
    ),
    case("world-size", "Set Processes to 4", "Write 1", launch={"num_processes": 4}),
    case("micro-batch-unset", "Write 1", without=["train_micro_batch_size_per_gpu"]),
    case(
        "offload-without-device",
        "Write cpu",
        "Remove offload_optimizer",
        **zero(stage=2, offload_optimizer={}),
    ),
    *(
        case(
            "partial-offload-optimizer",
            "Set offload_optimizer.ratio to 1.0",
            "Set optimizer.type to AdamW, set offload_optimizer.device to cpu",
            **zero(stage=3, offload_optimizer={**device, "ratio": 0.5}),
            **optimizer(name, lr=1e-4),
        )
        for device, name in ((NVME, "AdamW"), (CPU, "Lion"), (NVME, "Lion"))
    ),
    case(
        "super-offload-accelerator",
        "Remove offload_optimizer.super_offload",
        platform=Platform.synthetic("cpu"),
        **zero(stage=3, offload_optimizer={**CPU, "super_offload": True}),
    ),
    case(
        "super-offload",
        "Set stage to 3",
        "Remove offload_optimizer.super_offload",
        **zero(stage=2, offload_optimizer={**CPU, "super_offload": True}),
    ),
    case(
        "super-offload",
        "Remove offload_optimizer.super_offload",
        "Set gradient_clipping to 0",
        **zero(stage=3, offload_optimizer={**CPU, "super_offload": True}),
    ),
    case("muon-convolutions", "Write AdamW", **optimizer("Muon", lr=1e-4)),
    case(
        "clipping-set-twice", "Remove launch.gradient_clipping", launch={"gradient_clipping": 2.0}
    ),
    case(
        "clipping-in-optimizer",
        "Move to gradient_clipping",
        without=["gradient_clipping"],
        **optimizer("AdamW", lr=1e-4, max_grad_norm=1),
    ),
    case(
        "clipping-in-optimizer",
        "Remove params.max_grad_norm",
        **optimizer("AdamW", lr=1e-4, max_grad_norm=1.0),
    ),
    case("clipping-unset", "Write 1.0", "Write 0", without=["gradient_clipping"]),
    case(
        "precision-conflict",
        "Set fp16.enabled to false",
        "Set bf16.enabled to false",
        fp16={"enabled": True},
    ),
    case("precision-conflict", "Remove launch.mixed_precision", launch={"mixed_precision": "fp16"}),
    case("precision-conflict", "Write bf16", launch={"mixed_precision": "fp8"}),
    case(
        "precision-unsupported",
        "Use fp16",
        "Use fp32",
        "Write auto",
        platform=Platform.synthetic("cuda", bf16=False),
    ),
    case(
        "bf16-emulated",
        "Set bf16.enabled to false",
        "Set bf16.enabled to auto",
        platform=Platform.synthetic("cpu"),
    ),
    case(
        "bf16-master-weights",
        "Remove bf16.bf16_master_weights_and_grads",
        bf16={"enabled": True, "bf16_master_weights_and_grads": True},
        **zero(stage=2),
    ),
    case(
        "bf16-master-weights",
        "Remove bf16.bf16_optimizer_states",
        bf16={"enabled": True, "bf16_optimizer_states": True},
    ),
    case(
        "scheduler-warmup-too-long",
        "Write 1000",
        **scheduler("WarmupLR", warmup_max_lr=1e-4, warmup_num_steps=20_000),
    ),
    case(
        "scheduler-total",
        "Write 10000",
        "Write auto",
        **scheduler("WarmupDecayLR", warmup_num_steps=10, total_num_steps=400),
    ),
    case("nvme-path-unset", **zero(stage=3, offload_optimizer={"device": "nvme"})),
    case(
        "nvme-optimizer-buffers",
        "Write 4",
        "Write auto",
        **zero(stage=3, offload_optimizer={**NVME, "buffer_count": 3}),
    ),
    case(
        "nvme-pipeline-buffers",
        "Write 8",
        "Write auto",
        **zero(stage=3, offload_optimizer={**NVME, "buffer_count": 4, "pipeline_read": True}),
    ),
    case(
        "nvme-sub-group-size",
        "Write 50000000",
        "Write auto",
        **zero(stage=3, sub_group_size=10**9, offload_optimizer=NVME),
    ),
    case(
        "nvme-param-buffers",
        "Write 12",
        "Write auto",
        **zero(
            stage=3,
            offload_param={**NVME, "buffer_count": 5},
            offload_optimizer=NVME,
        ),
    ),
    case(
        "nvme-param-prefetch",
        "Write 0",
        "Write auto",
        **zero(
            stage=3,
            stage3_prefetch_bucket_size=1000,
            offload_param=NVME,
            offload_optimizer=NVME,
        ),
    ),
    case("number-as-text", "Write 0.0001", **optimizer("AdamW", lr="1e-4")),
    case("stage-auto", "Write 0", "Write 1", "Write 2", "Write 3", **zero(stage="auto")),
    case("removed-section", "Remove elasticity", elasticity={"enabled": True}),
    case("removed-section", "Remove mics_shard_size", **zero(stage=2, mics_shard_size=4)),
    case(
        "parallelism",
        "Remove tensor_parallel.autotp_size",
        "Write 1",
        tensor_parallel={"autotp_size": 2},
    ),
    case(
        "parallelism",
        "Remove parallelism_config.cp_size",
        "Write 1",
        launch={"parallelism_config": {"cp_size": 2}},
    ),
    case(
        "passed-through",
        "Rename to flops_profiler.enabled",
        "Remove flops_profiler.enable",
        flops_profiler={"enable": True},
    ),
    case("passed-through", "Write true", "Write false", flops_profiler={"enabled": 3}),
    case("passed-through", "Write mean", "Write sum", gradient_allreduce_op=3),
    case("passed-through", "Remove wandb", wandb=3),
    case("passed-through", "Write 1", hybrid_engine={"max_out_tokens": 0}),
    case(
        "passed-through",
        "Move to zero_optimization.offload_optimizer.super_offload",
        **zero(stage=3, offload_optimizer=CPU, offload_param={**CPU, "super_offload": True}),
    ),
    case("gradient-norm", "Remove compute_grad_norm", **zero(stage=2, compute_grad_norm=False)),
    case(
        "gradient-sum",
        "Remove gradient_allreduce_op",
        "Write mean",
        gradient_allreduce_op="sum",
        **zero(stage=3),
    ),
    case("zenflow-convolutions", "Remove zenflow", **zero(stage=2, zenflow={})),
    case(
        "large-reduce-bucket",
        "Write 30000000",
        "Write auto",
        **zero(stage=2, reduce_bucket_size=500_000_000),
    ),
    case("offload-at-stage-0", "Set stage to 2", **zero(stage=0, offload_optimizer=CPU)),
    case("offload-param-below-stage-3", "Set stage to 3", **zero(stage=2, offload_param=CPU)),
    case(
        "param-offload-alone",
        "Set offload_optimizer.device to cpu",
        **zero(stage=3, offload_param=CPU),
    ),
    case(
        "partial-offload-below-stage-3",
        "Set offload_optimizer.ratio to 1.0",
        "Set stage to 3",
        **zero(stage=2, offload_optimizer={**CPU, "ratio": 0.5}),
    ),
    case(
        "partial-offload",
        "Set offload_optimizer.ratio to 1.0",
        **zero(stage=3, offload_optimizer={**CPU, "ratio": 0.5}),
    ),
    case(
        "nvme-optimizer-below-stage-3",
        "Set stage to 3",
        "Set offload_optimizer.device to cpu",
        **zero(stage=2, offload_optimizer=NVME),
    ),
    case(
        "zero-plus-plus-below-stage-3",
        "Set stage to 3",
        "Remove zero_quantized_weights",
        **zero(stage=2, zero_quantized_weights=True),
    ),
    case("legacy-stage-1", "Remove legacy_stage1", **zero(stage=1, legacy_stage1=True)),
    case(
        "round-robin-gradients",
        "Remove round_robin_gradients",
        **zero(stage=2, round_robin_gradients=True),
    ),
    case(
        "gradient-scaling",
        "Remove prescale_gradients",
        "Set reduce_scatter to false",
        prescale_gradients=True,
    ),
    case(
        "muon-reduce-scatter",
        "Set reduce_scatter to false",
        "Set stage to 2",
        **zero(stage=3),
        **optimizer("Muon", lr=1e-4),
    ),
    case("one-bit-optimizer", "Write AdamW", **optimizer("OneBitAdam", lr=1e-4)),
    case(
        "fp16-fixed-loss-scale",
        "Write 0",
        "Use bf16",
        **{**FP16, "fp16": {"enabled": True, "loss_scale": 128}},
    ),
    case(
        "dynamic-loss-scale",
        "Write 1",
        **{**FP16, "fp16": {"enabled": True, "min_loss_scale": 0}},
    ),
    case("optimizer-spelling", "Write AdamW", **optimizer("adamw_torch", lr=1e-4)),
    case("scheduler-warmup-number", "Write 100", **scheduler("WarmupLR", warmup_num_steps=100.0)),
    case(
        "zenflow-without-offload",
        "Set offload_optimizer.device to cpu",
        "Remove zenflow",
        **zero(stage=2, zenflow={"topk_ratio": 0.1}),
    ),
    case(
        "hpz-partition-size",
        "Write 2",
        setup={"world_size": "8"},
        **zero(stage=3, zero_hpz_partition_size=3),
    ),
    case(
        "launcher-file",
        "Write 0",
        launch={"distributed_type": "DEEPSPEED", "num_processes": 1, "gpu_ids": 0},
    ),
    case("scheduler-no-warmup", "Write 1", **scheduler("WarmupLR", warmup_num_steps=0)),
    case(
        "activation-checkpointing",
        "Remove activation_checkpointing",
        activation_checkpointing={"partition_activations": True},
    ),
]
"""For each rule, forms that break it, and the labels of their buttons in order."""

NOT_ON_THE_PAGE = {
    "unknown-key": "an unknown key is an error of reading",
    "optimizer-lr-unset": "the form is no configuration that trained with DeepSpeed",
    "scheduler-peak-unset": "the form is no configuration that trained with DeepSpeed",
}
WITHOUT_A_BUTTON = {
    "nvme-path-unset": "only the user knows a folder on a fast disk",
    "scheduler.params.cycle_min_lr": "only the user knows a rate that is written nowhere",
    "a.b": "the form addresses a key by its path, which a dot in a name divides",
}
"""Rules and keys whose fix no button can apply."""


def read(*labels, without=(), launch=None, setup=None, key=None, **config):
    """Make a form that cannot be read or run, and the labels of its error's buttons at ``key``."""
    name = key or next(iter({**config, **(launch or {}), **(setup or {})}), "")
    found = case(name, *labels, without=without, launch=launch, setup=setup, **config)
    return pytest.param(key, *found.values[1:], id=f"{name}-{'-'.join(labels[:1])}")


READING = [
    read("Write 0", "Write auto", gradient_clipping=-1),
    read("Write 1", "Write auto", train_micro_batch_size_per_gpu="x"),
    read("Write true", "Write false", "Write auto", **zero(stage=2, overlap_comm=3)),
    read("Write true", "Write false", **zero(stage=2, cpu_offload="perhaps")),
    read("Write 0", "Write 3", "Write auto", **zero(stage=7)),
    read(
        *("Write none", "Write cpu", "Write auto"),
        **zero(stage=2, offload_optimizer={"device": "moon"}),
    ),
    read("Remove bf16", bf16=3),
    read("Remove optimizer", optimizer=1640),
    read('Write {"stage": 2}', zero_optimization=2),
    read("Remove zero_optimization", zero_optimization=48_147_535),
    read(
        "Remove offload_optimizer.nvme_path",
        **zero(stage=3, offload_optimizer={"device": "nvme", "nvme_path": "$SCRATCH/x"}),
    ),
    read("Rename to overlap_comm", "Remove overlap_com", **zero(stage=2, overlap_com=True)),
    read("Remove gradient_cliping", gradient_cliping=0.5),
    read(
        "Rename to zero_optimization",
        "Remove zero_optimisation",
        without=["zero_optimization"],
        zero_optimisation={"stage": 2},
    ),
    read(
        "Move to zero_optimization.stage3_max_live_parameters",
        "Remove stage3_max_live_parameters",
        stage3_max_live_parameters=5,
    ),
    read("Move to zero_optimization.stage", "Remove stage", without=["zero_optimization"], stage=2),
    read(
        *("Move to optimizer.params.lr", "Remove learning_rate"),
        learning_rate=1e-4,
        **optimizer("AdamW"),
    ),
    read(
        *("Rename to gradient_clipping", "Remove max_grad_norm"),
        without=["gradient_clipping"],
        max_grad_norm=1.0,
    ),
    read(
        "Remove mixed_precision, set fp16.enabled to true",
        without=["bf16"],
        mixed_precision="fp16",
    ),
    read("Remove monitor_config", monitor_config={"tensorboard": {"enabled": True}}),
    read("Remove seed", seed=1),
    read(
        "Move to zero_optimization.offload_optimizer.ratio",
        **zero(stage=3, offload_optimizer=CPU, offload_param={**CPU, "ratio": 0.5}),
    ),
    read("Remove bfloat16", bfloat16={"enabled": False}),
    read("Remove aio.thread_count", aio={"thread_count": 1, "intra_op_parallelism": 2}),
    read(
        *("Write true", "Write false", "Write auto"),
        without=["bf16"],
        bfloat16={"enabled": "ja"},
    ),
    read("Write 0", "Write auto", **zero(stage=3, stage3_model_persistence_threshold=False)),
    read("Remove cpu_offload", **zero(stage=3, cpu_offload=True, offload_optimizer=NVME)),
    read(
        "Remove zero3_save_16bit_model",
        zero3_save_16bit_model=True,
        **zero(stage=3, stage3_gather_16bit_weights_on_model_save=False),
    ),
    read("Remove deepspeed_config", deepspeed_config="other.json"),
    read("Write Adam", "Write RAdam", "Write NAdam", **optimizer("Adamm")),
    read("Remove optimizer.type", **optimizer("zzz")),
    read("Remove optimizer.type", optimizer={"type": 3}),
    read("Set stage to 2", **optimizer("Prodigy"), **zero(stage=3)),
    read(
        *("Rename to params.weight_decay", "Remove params.weight_decy"),
        **optimizer("AdamW", lr=1e-4, weight_decy=0.1),
    ),
    read("Remove params.lr", **optimizer("AdamW", lr="x")),
    read("Remove params.betas", **optimizer("AdamW", lr=1e-4, betas=[0.9, "x"])),
    read(
        "Set params.momentum to 0.9, set params.dampening to 0",
        **optimizer("SGD", lr=1e-4, nesterov=True),
    ),
    read("Write [0.5, 1.2]", **optimizer("Rprop", lr=1e-4, etas=[1.5, 1.2])),
    read("Write cosine", "Write WarmupCosineLR", **scheduler("CosineAnnealingLR")),
    read("Remove params.bar", **scheduler("WarmupLR", bar=1)),
    read(
        "Remove params.last_batch_iteration",
        **scheduler("WarmupLR", last_batch_iteration=5),
    ),
    read("Write cosine", "Write WarmupCosineLR", **scheduler("OneCycle")),
    read("Remove communication_data_type", communication_data_type="auto"),
    read(
        *("Write 29491200", "Write auto"),
        **zero(stage=3, offload_optimizer=CPU, offload_param={**NVME, "buffer_size": 1_000_000}),
    ),
    read(key="a.b", **{"a.b": 1}),
    read("Write bf16", "Write auto", launch={"mixed_precision": "fp9"}),
    read("Remove launch.num_processes", launch={"num_processes": "two"}),
    read("Write true", "Write false", launch={"zero3_init_flag": "maybe"}),
    read("Remove launch.nonsense", launch={"nonsense": 1}),
    read("Clear Resolution", setup={"resolution": "large"}),
    read("Clear VRAM per GPU", setup={"vram": "much"}),
    read("Clear LoRA rank", setup={"lora": "x"}),
    read("Clear Processes", setup={"world_size": "0"}),
    read("Set LoRA rank to 16", "Clear Base dtype", setup={"base_dtype": "nf4"}),
]
"""For each error of reading, resolving and settling, a form and the labels of its buttons."""


class _On(Machines):
    """The users' machines, with ``platform`` as this machine."""

    def __init__(self, platform):
        super().__init__()
        self._platform = platform

    @property
    def this(self):
        return self._platform


@pytest.fixture(scope="module")
def any_machine():
    return Machines()


def offered(form, platform, any_machine):
    """Return the form, its machines, and each message with its buttons."""
    setup = {**(form["setup"] or {}), **({"this_machine": True} if platform else {})}
    before = FormState.of_request(state(**{**copy.deepcopy(form), "setup": setup}))
    machines = _On(platform) if platform else any_machine
    preview = understand(before, machines)
    found = repairs(preview, before, machines)
    return before, machines, list(zip(preview.messages, found, strict=True))


def applied(before, repair, machines):
    """Return the messages about a form after a button is pressed."""
    after = before
    for edit in repair.edits:
        after = edit.applied(after)
    return understand(after, machines).messages


def test_every_rule_has_a_case_in_this_module():
    assert {one.values[0] for one in RULES} | NOT_ON_THE_PAGE.keys() == {
        rule.id for rule in all_rules()
    }


@pytest.mark.parametrize(("rule", "labels", "form", "platform"), RULES)
def test_a_rules_buttons_do_what_its_fix_says(any_machine, rule, labels, form, platform):
    before, machines, found = offered(form, platform, any_machine)
    (mine,) = ((message, each) for message, each in found if message.rule == rule)
    assert tuple(one.label for one in mine[1]) == labels
    assert labels or rule in WITHOUT_A_BUTTON
    mend_all(before, machines, found)


@pytest.mark.parametrize(("key", "labels", "form", "platform"), READING)
def test_the_buttons_of_an_error_do_what_its_fix_says(any_machine, key, labels, form, platform):
    before, machines, found = offered(form, platform, any_machine)
    message, each = next((message, each) for message, each in found if message.severity == "error")
    assert tuple(one.label for one in each) == labels
    assert labels or key == message.key
    assert labels or key in WITHOUT_A_BUTTON
    mend_all(before, machines, found)


def mend_all(before, machines, found):
    """Check that each button removes its message, and that each fix has one."""
    for message, each in found:
        wanted = message.severity != "note" and message.fix
        assert each or not wanted or message.key in WITHOUT_A_BUTTON, message
        for repair in each:
            left = applied(before, repair, machines)
            assert (message.key, message.rule, message.fix) not in {
                (one.key, one.rule, one.fix) for one in left
            }
            touched = {edit.path for edit in repair.edits}
            assert not touched & {one.key for one in left if one.severity == "error"}


def without_words(monkeypatch):
    """Replace the reason and the fix of every error and decision by "x"."""
    make_error, make_decision = ZeroTuneError.__init__, Decision.__init__

    def error(self, _reason, *values, **parts):
        make_error(self, "x", *values, **parts)
        self.fix = "x" if self.fix else self.fix

    def decision(self, *values, **parts):
        parts |= zip(("key", "before", "after", "reason", "severity"), values, strict=False)
        make_decision(self, **{**parts, "reason": "x", "fix": "x" if parts.get("fix") else ""})

    monkeypatch.setattr(ZeroTuneError, "__init__", error)
    monkeypatch.setattr(Decision, "__init__", decision)


def test_no_sentence_decides(monkeypatch, any_machine):
    forms = {(n, one.id): one.values[2:] for n, one in enumerate([*RULES, *READING])}

    def outcomes():
        found = {}
        for name, (form, platform) in forms.items():
            before, machines, offers = offered(form, platform, any_machine)
            buttons = [(one.key, one.rule, one.after, each) for one, each in offers]
            found[name] = buttons, understand(before, machines).running_config
        return found

    expected = outcomes()
    without_words(monkeypatch)
    words = outcomes()
    assert [name for name in forms if words[name] != expected[name]] == []


def test_each_button_costs_one_preview(monkeypatch, any_machine):
    previews = []

    def counting(*arguments):
        previews.append(understand(*arguments))
        return previews[-1]

    monkeypatch.setattr(module, "understand", counting)
    config = {
        **PLAN,
        **zero(stage=1, offload_optimizer=CPU, offload_param=CPU, reduce_bucket_size=500_000_000),
        **optimizer("OneBitAdam", lr="1e-4"),
        **scheduler("WarmupLR", warmup_num_steps=20_000),
    }
    _, _, found = offered({"config": config, "launch": None, "setup": None}, None, any_machine)
    buttons = sum(len(each) for _, each in found)
    assert buttons >= 6
    assert len(previews) == buttons


def test_a_fix_that_would_overwrite_a_value_gets_no_button(any_machine):
    # "did you mean 'gradient_clipping'" would overwrite the value that key already has.
    form = {"config": {**PLAN, "gradient_cliping": 0.5}, "launch": None, "setup": None}
    _, _, found = offered(form, None, any_machine)
    ((_, each),) = ((message, each) for message, each in found if each)
    assert [one.label for one in each] == ["Remove gradient_cliping"]


def test_a_renamed_setting_keeps_its_value(any_machine):
    form = {"config": {**PLAN, **zero(stage=2, overlap_com=True)}, "launch": None, "setup": None}
    before, _, found = offered(form, None, any_machine)
    rename = next(one for _, each in found for one in each if one.label == "Rename to overlap_comm")
    for edit in rename.edits:
        before = edit.applied(before)
    assert before.config["zero_optimization"] == {"stage": 2, "overlap_comm": True}
