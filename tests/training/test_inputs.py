"""Inputs that users try on their second day are accepted, or refused with a fix."""

from __future__ import annotations

import inspect
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from diffusers import DDPMScheduler
from PIL import Image
from torch.utils.data import TensorDataset

import zerotune
from tests.support import pipelines
from tests.support.models import tiny_unet
from tests.support.ranks import ranks
from zerotune import EMAShadow, export_model
from zerotune.diffusion import DataStream
from zerotune.diffusion.known_families import FAMILIES, FAMILY_NAMES, named_family
from zerotune.diffusion.models.stable_diffusion import StableDiffusionXL
from zerotune.errors import (
    DataError,
    InvalidValueError,
    PlanFileError,
    TrainingError,
    ZeroTuneError,
)
from zerotune.plan.families import family_names
from zerotune.plan.plan import DeepSpeedPlan
from zerotune.training import ProgressBar, SaveEvery, SkipNonFinite
from zerotune.training.arguments import as_plan
from zerotune.training.batches import as_stream
from zerotune.training.emas import as_ema
from zerotune.training.events import as_callbacks
from zerotune.training.setup import settled
from zerotune.training.step import TrainStep, check_loss

PLAN = DeepSpeedPlan.build(stage=2, precision="fp32", micro_batch_size=2)
PICTURE = Image.new("RGB", (8, 8))
IMAGES = torch.zeros(4, 3, 8, 8)


class Samples(torch.utils.data.Dataset[Any]):
    """A dataset of one sample, many times."""

    def __init__(self, sample: Any) -> None:
        self.sample = sample

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return self.sample


def engine() -> Any:
    return SimpleNamespace(
        plan=SimpleNamespace(micro_batch_size=2, gradient_accumulation_steps=1),
        group=SimpleNamespace(rank=0, world_size=1),
        device=torch.device("cpu"),
    )


def test_a_plan_may_be_a_dict_or_a_path(tmp_path: Path) -> None:
    config = PLAN.to_deepspeed()
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(config))
    for given in (config, file, str(file)):
        assert as_plan(given).to_deepspeed() == config
    assert as_plan(PLAN) is PLAN
    with pytest.raises(PlanFileError):
        as_plan(tmp_path / "none.json")
    with pytest.raises(InvalidValueError, match="is not a plan"):
        as_plan(3)


class Pipeline:
    """Looks like a diffusers pipeline."""

    components: dict[str, Any] = {}


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("models/sdxl", "load_pretrained"),
        (Path("models/sdxl"), "load_pretrained"),
        (Pipeline(), r"load_pretrained.*pipeline\.unet"),
        (3, "is not a torch"),
        (torch.nn.Sequential(torch.nn.LazyLinear(2)), r"model\.0 = 'LazyLinear'.*no shape"),
        (torch.nn.Sequential(torch.nn.Embedding(2, 2, sparse=True)), r"model\.0\.sparse.*False"),
    ],
)
def test_an_invalid_model_is_refused_with_the_way_to_make_one(model: Any, words: str) -> None:
    with pytest.raises(InvalidValueError, match=words):
        zerotune.prepare(model=model, plan=PLAN)


@pytest.mark.parametrize("part", [False, True])
def test_a_compiled_module_is_refused_because_its_names_reach_the_exports(part: bool) -> None:
    model: Any = torch.compile(torch.nn.Linear(2, 2), backend="eager")
    model = torch.nn.Sequential(model) if part else model
    with pytest.raises(InvalidValueError, match="compile=True"):
        zerotune.prepare(model=model, plan=PLAN)


def test_modules_to_save_are_refused_because_no_export_contains_them() -> None:
    config = peft.LoraConfig(target_modules=["0"], modules_to_save=["1"])
    model = peft.get_peft_model(
        torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), config
    )
    with pytest.raises(InvalidValueError, match=r"model\.1 \(modules_to_save\)"):
        zerotune.prepare(model=model, plan=PLAN)


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (torch.optim.SGD([torch.zeros(1)], lr=1.0), r"optimizer = 'SGD'.*build\(optimizer=\"SGD\""),
        (torch.optim.AdamW, r"optimizer = 'AdamW'.*is not an OptimizerResolver"),
        ("Lion", "is not an OptimizerResolver"),
        ({"type": "AdamW"}, "is not an OptimizerResolver"),
    ],
)
def test_an_optimizer_argument_is_refused_with_the_place_to_name_one(
    optimizer: Any, words: str
) -> None:
    for call in (zerotune.prepare, zerotune.Trainer):
        with pytest.raises(InvalidValueError, match=words):
            call(model=torch.nn.Linear(2, 2), plan=PLAN, optimizer=optimizer)
    with pytest.raises(TypeError, match=r"prepare\(\) got an unexpected .*'optimiser'"):
        zerotune.prepare(model=torch.nn.Linear(2, 2), plan=PLAN, optimiser=1)


class Following:
    """Like diffusers' ``EMAModel``: a decay, and its own weights."""

    decay = 0.99


class Photos:
    """A source of images that are not cropped to a size."""

    def __len__(self) -> int:
        return 1

    def item(self, index: int) -> Any: ...

    def image(self, index: int) -> Any: ...

    def content(self, index: int) -> Any: ...


def no_batch(model: Any, generator: Any) -> torch.Tensor:
    return torch.zeros(())


@pytest.mark.parametrize(
    ("argument", "given", "words"),
    [
        ("ema", True, r"ema = True: is neither a decay.*ema=0\.9999"),
        ("ema", False, "omit it"),
        ("ema", Following(), r"ema = 'Following'.*other EMA classes"),
        ("ema", EMAShadow, "ema = 'EMAShadow'"),
        ("objective", "flow", r"is not callable.*FlowMatchingObjective\(family="),
        ("objective", zerotune.FlowMatchingObjective, r"is a class.*FlowMatchingObjective\("),
        ("objective", DDPMScheduler(), r"'DDPMScheduler': is not callable.*DenoisingObjective"),
        ("objective", no_batch, r"'no_batch'.*def objective\(model, batch, generator\)"),
        ("callbacks", SaveEvery, r"'SaveEvery': is a class.*SaveEvery\(…\)"),
        ("callbacks", [print], "'print': has no method on_fit_start"),
        ("data", "photos", r"PreparedImages\(ImageFolder\('photos'\)"),
        ("data", Path("photos"), r"PreparedImages\(ImageFolder\('photos'\)"),
        ("data", Photos(), r"images of different sizes.*PreparedImages\(Photos"),
        ("non_finite", "skip", r"is not a valid NonFinitePolicy.*SkipNonFinite\(\)"),
        ("non_finite", SkipNonFinite, "is a class"),
        ("activations", True, r"ActivationOffload\(\)"),
        ("offload", "cpu", r"set what to offload in the plan"),
        ("run", {"steps": 3}, "RunFacts"),
        ("platform", "cuda", r"detect_platform\(\)"),
        ("plan", None, "is not a plan"),
    ],
)
def test_invalid_trainer_arguments_are_refused_before_anything_starts(
    argument: str, given: Any, words: str
) -> None:
    arguments = {"model": torch.nn.Linear(2, 2), "plan": PLAN, "data": [{}], argument: given}
    with pytest.raises(ZeroTuneError, match=words) as caught:
        zerotune.Trainer(**arguments)
    assert not torch.distributed.is_initialized()
    assert caught.value.key == argument


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (
            torch.ones(2, requires_grad=True),
            r"\(2,\)': the loss is more than one number.*mean",
        ),
        (0.5, r"'float': the loss is not a tensor.*not loss\.item\(\)"),
        (None, "'NoneType': the loss is not a tensor"),
        (torch.ones((), dtype=torch.complex64, requires_grad=True), "the loss is complex.*abs"),
        (torch.ones(()), "does not depend on any weight.*without torch.no_grad"),
    ],
)
def test_a_loss_without_a_gradient_is_refused_with_a_reason(loss: Any, words: str) -> None:
    with pytest.raises(TrainingError, match=words):
        check_loss(loss)
    check_loss(torch.ones(1, requires_grad=True))


def test_a_decay_becomes_an_ema_and_one_callback_a_tuple() -> None:
    average, callback = as_ema(0.99), ProgressBar()
    assert isinstance(average, EMAShadow)
    assert "ConstantDecay(decay=0.99)" in repr(average)
    assert as_callbacks(callback) == (callback,)
    assert as_callbacks([callback]) == (callback,)


@ranks(1)
def test_invalid_exports_are_refused_with_a_reason(tmp_path: Path) -> None:
    def refused(call: Any, *words: str) -> None:
        with pytest.raises(ZeroTuneError) as caught:
            call()
        assert [each for each in words if each not in str(caught.value)] == []

    model = tiny_unet()
    held = {"model": model, "plan": PLAN, "deepspeed": False, "ema": 0.9, "callbacks": ()}
    trainer = zerotune.Trainer(objective=lambda *_: torch.zeros(()), data=[{}], **held)
    with trainer:
        for given in ("emma", True, model, Following(), trainer.engine):
            name = given if isinstance(given, str) else type(given).__name__
            words = (f"weights = {name!r}", "one of: trained, ema")
            refused(partial(trainer.export, tmp_path / "out", weights=given), *words)
        for given in (model, trainer):
            words = (
                f"engine = {type(given).__name__!r}: is not an engine",
                "engine=trainer.engine",
            )
            refused(partial(export_model, tmp_path / "out", engine=given), *words)
        refused(trainer.engine.step, "backward")
    folder = tmp_path / "after"
    calls = [partial(trainer.fit, steps=1), partial(trainer.export, folder)]
    for call in (*calls, partial(trainer.save, folder), partial(trainer.resume, folder)):
        refused(call, "the trainer is closed", "create a new Trainer")
    assert list(tmp_path.iterdir()) == []


def test_a_plan_is_built_from_an_optimizer_name_and_a_learning_rate() -> None:
    section = {"type": "Lion", "params": {"lr": 1e-4}}
    for given in ("Lion", {"type": "Lion"}, {"type": "Lion", "params": {}}):
        plan = DeepSpeedPlan.build(optimizer=given, lr=1e-4)
        assert plan.to_deepspeed()["optimizer"] == section
    refused = [
        ({"optimizer": "AdmaW"}, "did you mean AdamW"),
        ({"optimizer": torch.optim.AdamW}, 'write optimizer="AdamW", lr='),
        ({"optimizer": torch.optim.SGD([torch.zeros(1)], lr=1.0)}, 'write optimizer="SGD"'),
        ({"optimizer": section, "lr": 1e-4}, "lr = 0.0001: is also set in the optimizer's params"),
        ({"optimizer": None, "lr": 1e-4}, "no optimizer is set"),
    ]
    for arguments, words in refused:
        with pytest.raises(ZeroTuneError, match=words):
            DeepSpeedPlan.build(**arguments)


def test_a_text_or_label_model_requires_a_matching_objective() -> None:
    def refused(model: torch.nn.Module, words: str, **objective: Any) -> None:
        with pytest.raises(InvalidValueError, match=words):
            zerotune.Trainer(model=model, plan=PLAN, data=[{}], **objective)

    refused(pipelines.unet(cross_attention_dim=8), "UNet2DConditionModel.*encoder_hidden_states")
    refused(pipelines.unet(cross_attention_dim=8), r"objective = None:.*loaded\.objective\(\)")
    without = {"objective": zerotune.FlowMatchingObjective()}
    refused(pipelines.sd3_transformer(), "objective = 'FlowMatching.*the objective's", **without)
    refused(pipelines.flux_transformer(), "the default objective passes only noisy images")
    refused(tiny_unet(), r"class_labels.*ClassConditional\(\)")


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        (PICTURE, r"PreparedImages\(DatasetImages\(dataset, image="),
        ((PICTURE, 3), r"tuple of Image, int.*DatasetImages\(dataset, image="),
        ((IMAGES[0], 3), r'tuple of Tensor, int.*"images".*ImageTensors'),
        (IMAGES[0], r"ImageTensors\(images="),
        ({"image": PICTURE, "text": "a cat"}, r"'image': 'Image', 'text': 'str'.*DatasetImages"),
    ],
)
def test_samples_that_are_not_dicts_of_tensors_are_refused_with_a_reason(
    sample: Any, words: str
) -> None:
    with pytest.raises(DataError, match=words):
        as_stream(Samples(sample), engine=engine(), seed=0)


@pytest.mark.parametrize("labels", [(), (torch.arange(4),)])
def test_a_tensor_dataset_of_images_is_accepted(labels: tuple[torch.Tensor, ...]) -> None:
    stream = as_stream(TensorDataset(IMAGES, *labels), engine=engine(), seed=0)
    assert isinstance(stream, DataStream)
    batch = next(stream)
    assert batch["images"].shape == (2, 3, 8, 8)
    assert ("labels" in batch) == bool(labels)


def test_workers_are_valid_only_with_a_dataset() -> None:
    ahead = {"num_workers": 1, "pin_memory": False}
    stream = as_stream(TensorDataset(IMAGES), engine=engine(), seed=0, **ahead)
    assert next(stream)["images"].shape == (2, 3, 8, 8)
    for data in ([{"images": IMAGES}], stream, None):
        with pytest.raises(InvalidValueError, match="num_workers and pin_memory to the loader"):
            as_stream(data, engine=engine(), seed=0, **ahead)


def test_a_tensor_dataset_without_images_is_refused_with_a_reason() -> None:
    with pytest.raises(DataError, match="tuple of Tensor"):
        as_stream(TensorDataset(torch.zeros(4, 7)), engine=engine(), seed=0)


def test_batches_that_are_not_dicts_are_refused_with_a_reason() -> None:
    loader = torch.utils.data.DataLoader(TensorDataset(IMAGES, torch.arange(4)), batch_size=2)
    stream = as_stream(loader, engine=engine(), seed=0)
    step = TrainStep(
        engine=engine(),
        objective=lambda *_: torch.zeros(()),
        stream=stream,  # type: ignore[arg-type]
        generator=torch.Generator(),
    )
    with pytest.raises(DataError, match="list of Tensor, Tensor"):
        step._next_batch()


def test_a_family_can_be_given_by_name() -> None:
    # Advice, ``zerotune init`` and the builder must know every family.
    recipes = {name for name in family_names() if name.endswith(("-i2v", "-controlnet"))}
    assert set(FAMILY_NAMES) == set(family_names()) - recipes
    assert set(FAMILY_NAMES.values()) == set(FAMILIES.values())
    assert named_family("StableDiffusionXLPipeline") is named_family("sdxl") is StableDiffusionXL
    with pytest.raises(InvalidValueError, match=r"family = 'sdlx'.*did you mean sdxl"):
        named_family("sdlx")


def test_advice_to_stream_weights_is_followed():
    advice = DeepSpeedPlan.advise("sdxl", vram="6GiB", ram="64GiB", streamed=True)
    assert advice.streamed is not None
    taken = settled(advice, model=None, platform=advice.resolved.platform)
    assert taken.streaming == advice.streamed


def test_type_checkers_refuse_unknown_arguments_of_prepare():
    assert inspect.signature(zerotune.prepare).parameters["unknown"].annotation == "Never"
