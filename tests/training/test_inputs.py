"""What people give on their second day: taken, or answered with what to write."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset

import zerotune
from tests.support import pipelines
from tests.support.models import tiny_unet
from zerotune.diffusion import DataStream
from zerotune.errors import DataError, InvalidValueError, PlanFileError
from zerotune.plan.model import DeepSpeedPlan
from zerotune.training.setup import as_plan, as_stream
from zerotune.training.step import TrainStep

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
    with pytest.raises(InvalidValueError, match="is no plan"):
        as_plan(3)


class Pipeline:
    """Looks like a diffusers pipeline."""

    components: dict[str, Any] = {}


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("models/sdxl", r"load_pretrained\('models/sdxl'\)"),
        (Path("models/sdxl"), "load_pretrained"),
        (Pipeline(), r"whole pipeline.*load_pretrained.*pipeline\.unet"),
        (3, "is no torch"),
    ],
)
def test_what_is_no_model_is_told_how_to_become_one(model: Any, words: str) -> None:
    with pytest.raises(InvalidValueError, match=words):
        zerotune.prepare(model=model, plan=PLAN)


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (torch.optim.SGD([torch.zeros(1)], lr=1.0), r"'SGD'.*OptimizerResolver\(overrides="),
        (torch.optim.AdamW, "AdamW.*OptimizerResolver"),
        ("Lion", r'"type": "Lion".*OptimizerResolver'),
        ({"type": "AdamW"}, "is no OptimizerResolver"),
    ],
)
def test_an_optimizer_is_told_where_it_is_named(optimizer: Any, words: str) -> None:
    with pytest.raises(InvalidValueError, match=words):
        zerotune.prepare(model=torch.nn.Linear(2, 2), plan=PLAN, optimizer=optimizer)


def test_a_model_of_texts_or_labels_is_not_trained_without_an_objective_for_it() -> None:
    def refused(model: torch.nn.Module, words: str, **objective: Any) -> None:
        with pytest.raises(InvalidValueError, match=words):
            zerotune.Trainer(model=model, plan=PLAN, data=[{}], **objective)

    refused(pipelines.unet(cross_attention_dim=8), "UNet2DConditionModel.*encoder_hidden_states")
    refused(pipelines.unet(cross_attention_dim=8), r"objective = None:.*loaded\.objective\(\)")
    without = {"objective": zerotune.FlowMatchingObjective()}
    refused(pipelines.sd3_transformer(), "objective = 'FlowMatching.*the objective's", **without)
    refused(pipelines.flux_transformer(), "the default objective gives it noisy images alone")
    refused(tiny_unet(), r"class_labels.*ClassConditional\(\)")


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        (PICTURE, r"PreparedImages over DatasetImages\(dataset, image=lambda"),
        ((PICTURE, 3), r"tuple of Image, int.*DatasetImages\(dataset, image=0"),
        ((IMAGES[0], 3), r'tuple of Tensor, int.*"images".*ImageTensors'),
        (IMAGES[0], r"ImageTensors\(images="),
        ({"image": PICTURE, "text": "a cat"}, r"'image': 'Image', 'text': 'str'.*DatasetImages"),
    ],
)
def test_samples_that_are_no_dicts_of_tensors(sample: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        as_stream(Samples(sample), engine=engine(), seed=0)


@pytest.mark.parametrize("labels", [(), (torch.arange(4),)])
def test_a_tensor_dataset_of_images_is_taken(labels: tuple[torch.Tensor, ...]) -> None:
    stream = as_stream(TensorDataset(IMAGES, *labels), engine=engine(), seed=0)
    assert isinstance(stream, DataStream)
    batch = next(stream)
    assert batch["images"].shape == (2, 3, 8, 8)
    assert ("labels" in batch) == bool(labels)


def test_a_tensor_dataset_of_something_else_is_answered() -> None:
    with pytest.raises(DataError, match="tuple of Tensor"):
        as_stream(TensorDataset(torch.zeros(4, 7)), engine=engine(), seed=0)


def test_batches_that_are_no_dicts_are_answered() -> None:
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
