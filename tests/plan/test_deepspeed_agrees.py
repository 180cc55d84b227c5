"""The installed DeepSpeed accepts rendered configurations and knows our keys."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from tests.plan.accelerate_runs import ALONE
from tests.support.ranks import free_port, run_ranks
from zerotune.decisions import Rejected
from zerotune.plan import DeepSpeedPlan
from zerotune.plan import keys as known_keys
from zerotune.plan.resolve.sizes import PERSISTENCE_LIMIT, SMALLEST_SWAP_BYTES, sub_groups
from zerotune.plan.section import Nested, modelled
from zerotune.plan.sections import AioSection, Bf16Section, Fp16Section, OffloadSection, ZeroSection

GOLDEN = sorted((Path(__file__).parent / "golden").glob("*.json"))
pytestmark = pytest.mark.deepspeed


class Ranks:
    """A stand-in for ``deepspeed.comm`` with ``size`` ranks."""

    def __init__(self, size):
        self.size = size

    def get_rank(self, *_):
        return 0

    def get_world_size(self, *_):
        return self.size


def accept(rendered):
    """Return what DeepSpeed reads in a rendered configuration."""
    import deepspeed.runtime.config as reading

    size = rendered["train_batch_size"] // (
        rendered["train_micro_batch_size_per_gpu"] * rendered["gradient_accumulation_steps"]
    )
    reading.dist = Ranks(size)
    read = reading.DeepSpeedConfig(rendered)
    zero = read.zero_config
    offload = [zero.offload_optimizer, zero.offload_param]
    return {
        "stage": int(zero.stage),
        "devices": [section.device if section else "none" for section in offload],
        "clipping": read.gradient_clipping,
        "batch": [
            read.train_batch_size,
            read.train_micro_batch_size_per_gpu,
            read.gradient_accumulation_steps,
        ],
        "bf16": read.bfloat16_config.enabled,
        "fp16": read.float16_config.enabled,
    }


def attempt(file):
    try:
        return accept(json.loads(Path(file).read_text()))
    except Exception as error:  # noqa: BLE001 - whatever it raises is a refusal
        return {"error": f"{type(error).__name__}: {error}"}


def keys(model):
    return [field.alias or name for name, field in model.model_fields.items()]


def ask(files):
    """Collect everything that the tests compare with DeepSpeed."""
    import deepspeed
    import deepspeed.runtime.config as reading
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.swap_tensor import utils as swap
    from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    param, optimizer = (
        keys(model)
        for model in (DeepSpeedZeroOffloadParamConfig, DeepSpeedZeroOffloadOptimizerConfig)
    )
    return {
        "accepted": {file: attempt(file) for file in files},
        "zero": keys(DeepSpeedZeroConfig),
        "offload": param + optimizer,
        "offload_param": param,
        "offload_optimizer": optimizer,
        "bf16": keys(DeepSpeedBF16Config),
        "fp16": keys(DeepSpeedFP16Config),
        "aio": list(AIO_DEFAULT_DICT),
        "removed": list(getattr(reading, "_REMOVED_TOP_LEVEL_CONFIG_KEYS", ())),
        "removed_zero": list(getattr(reading, "_REMOVED_ZERO_CONFIG_KEYS", ())),
        "smallest_swap": swap.MIN_AIO_BYTES,
        "persistence": DeepSpeedZeroConfig().param_persistence_threshold,
        "version": deepspeed.__version__,
    }


@pytest.fixture(scope="module")
def deepspeed():
    (found,) = run_ranks(ask, [str(file) for file in GOLDEN])
    return found


def meant(file):
    """Return what DeepSpeed should read in a rendered configuration."""
    rendered = json.loads(file.read_text())
    zero = rendered.get("zero_optimization", {"stage": 0})
    return {
        "stage": zero["stage"],
        "devices": [
            zero.get(name, {}).get("device", "none")
            for name in ("offload_optimizer", "offload_param")
        ],
        "clipping": rendered["gradient_clipping"],
        "batch": [
            rendered["train_batch_size"],
            rendered["train_micro_batch_size_per_gpu"],
            rendered["gradient_accumulation_steps"],
        ],
        "bf16": rendered["bf16"]["enabled"],
        "fp16": rendered["fp16"]["enabled"],
    }


@pytest.mark.parametrize("file", GOLDEN, ids=lambda file: file.stem)
def test_deepspeed_reads_the_rendered_values_as_intended(file, deepspeed):
    assert deepspeed["accepted"][str(file)] == meant(file)


LEGACY = {"cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory"}


def names(cls):
    return {attribute.name for attribute in modelled(cls)}


@pytest.mark.parametrize(
    ("section", "cls"),
    [
        ("zero", ZeroSection),
        ("offload", OffloadSection),
        ("bf16", Bf16Section),
        ("fp16", Fp16Section),
        ("aio", AioSection),
    ],
)
def test_every_key_of_the_installed_deepspeed_is_known(section, cls, deepspeed):
    known = names(cls) | cls.passed_through | cls.aliases.keys() | LEGACY
    assert set(deepspeed[section]) <= known
    removed = known_keys.REMOVED_ZERO.keys()
    assert names(cls) - removed <= set(deepspeed[section])


def test_offload_keys_are_in_the_sections_where_deepspeed_reads_them(deepspeed):
    for place, other in (
        ("offload_param", "offload_optimizer"),
        ("offload_optimizer", "offload_param"),
    ):
        here = set(deepspeed[place]) - set(deepspeed[other])
        for key in here & names(OffloadSection):
            config = {"zero_optimization": {other: {key: "auto" if key != "ratio" else 1.0}}}
            with pytest.raises(ValueError, match=f"move it to {place}"):
                DeepSpeedPlan.from_dict(config)


def test_the_removed_keys_equal_those_that_deepspeed_removed(deepspeed):
    if not deepspeed["removed"]:
        pytest.skip(f"DeepSpeed {deepspeed['version']} still has them")
    assert set(deepspeed["removed"]) == known_keys.REMOVED.keys()
    assert set(deepspeed["removed_zero"]) == known_keys.REMOVED_ZERO.keys()


def test_constants_used_for_sizing_equal_those_of_deepspeed(deepspeed):
    assert deepspeed["smallest_swap"] == SMALLEST_SWAP_BYTES
    assert deepspeed["persistence"] == PERSISTENCE_LIMIT


def losses(config):
    """Return the losses of four steps of DeepSpeed's engine, or the error of its start."""
    import deepspeed
    import torch

    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 1))
    inputs, wanted = torch.randn(4, 8), torch.randn(4, 1)
    try:
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )
    except AssertionError as error:
        return str(error)
    found = []
    for _ in range(4):
        loss = torch.nn.functional.mse_loss(engine(inputs), wanted)
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


def started(configs):
    from zerotune.backend.upstream import quiet_deepspeed, require_deepspeed

    require_deepspeed(accelerator="cpu")
    quiet_deepspeed()
    base = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "torch_adam": True}},
    }
    return [losses({**base, **config}) for config in configs]


@pytest.fixture(scope="module")
def engines():
    configs = [
        {"zero_optimization": {"stage": 3, "sub_group_size": 0}},
        {"zero_optimization": {"stage": 3}},
        {"zero_optimization": {"stage": 2}, "prescale_gradients": True},
        {"zero_optimization": {"stage": 3}, "gradient_predivide_factor": 2.0},
        {"zero_optimization": {"stage": 1}, "prescale_gradients": True},
        {"zero_optimization": {"stage": 2, "reduce_scatter": False}, "prescale_gradients": True},
    ]
    (found,) = run_ranks(started, configs, env={**ALONE, "MASTER_PORT": str(free_port())})
    return configs, found


def test_deepspeed_trains_the_same_with_sub_groups_of_one_parameter(engines, cuda, unet):
    _, (one_each, whole, *_) = engines
    assert one_each == pytest.approx(whole)
    assert one_each[-1] < one_each[0]
    plan = DeepSpeedPlan.build(stage=3, offload="nvme", sub_group_size=0)
    resolved = plan.resolve(platform=cuda, model=unet)
    assert resolved.plan.zero_optimization.sub_group_size == 0
    assert sub_groups(unet, 1, 0) == unet.trainable_parts(1)


def test_scaled_gradients_are_refused_where_deepspeed_refuses_them(engines):
    configs, found = engines
    for config, outcome in zip(configs[2:], found[2:], strict=True):
        refused = [each.rule for each in DeepSpeedPlan.from_dict(config).check()]
        assert ("gradient-scaling" in refused) is isinstance(outcome, str), (config, outcome)


def settings_of(cls, *above):
    """Return the path of every modelled setting, at any depth."""
    for each in modelled(cls):
        yield (*above, each.name)
        if isinstance(each.metadata["kind"], Nested):
            kind = each.metadata["kind"]
            inner = settings_of(kind.cls, *above, each.name)
            yield from (path for path in inner if path[-1] not in kind.without)


def rejects(config):
    """Whether DeepSpeed rejects a configuration."""
    import deepspeed.runtime.config as reading

    try:
        reading.DeepSpeedConfig(copy.deepcopy(config))
    except (ValueError, TypeError, AttributeError):
        return True
    return False


def test_every_null_that_deepspeed_rejects_is_recorded_as_rejected(monkeypatch):
    import deepspeed.runtime.config as reading

    monkeypatch.setattr(reading, "dist", Ranks(1))
    found, wanted = set(), set()
    for path in settings_of(DeepSpeedPlan):
        config = {"train_batch_size": 1, "train_micro_batch_size_per_gpu": 1}
        put = config
        for name in path[:-1]:
            put = put.setdefault(name, {})
        put[path[-1]] = None
        decisions = DeepSpeedPlan.from_dict(config).decisions
        found |= {one.key for one in decisions if isinstance(one.reason, Rejected)}
        wanted |= {".".join(path)} if rejects(config) else set()
    assert found == wanted
