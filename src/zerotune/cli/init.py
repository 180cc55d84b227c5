"""``zerotune init``: the file of a training run, and its plan.

For a model, a GPU and a folder of images.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Final

from zerotune._util.files import drafted, system_errors, write_synced
from zerotune._util.text import counted, format_size
from zerotune.cli import print_text
from zerotune.cli.options import LORA_HELP, add_family, add_machine, machine_of, model_of
from zerotune.cli.plan import add_update, at_least_one
from zerotune.diffusion import data
from zerotune.errors import DataError, InvalidValueError, NothingFitsError, PlanFileError
from zerotune.plan import DeepSpeedPlan
from zerotune.plan.families import ModelFamily
from zerotune.plan.plan import Advice

_PIPELINES: Final = {
    "aura-flow": "fal/AuraFlow-v0.3",
    "chroma": "lodestones/Chroma1-HD",
    "flux": "black-forest-labs/FLUX.1-dev",
    "flux-kontext": "black-forest-labs/FLUX.1-Kontext-dev",
    "flux2": "black-forest-labs/FLUX.2-dev",
    "flux2-klein-4b": "black-forest-labs/FLUX.2-klein-base-4B",
    "flux2-klein-9b": "black-forest-labs/FLUX.2-klein-base-9B",
    "lumina2": "Alpha-VLLM/Lumina-Image-2.0",
    "pixart-alpha": "PixArt-alpha/PixArt-XL-2-1024-MS",
    "pixart-sigma": "PixArt-alpha/PixArt-Sigma-XL-2-1024-MS",
    "qwen-image": "Qwen/Qwen-Image",
    "qwen-image-edit": "Qwen/Qwen-Image-Edit",
    "qwen-image-edit-plus": "Qwen/Qwen-Image-Edit-2509",
    "sana": "Efficient-Large-Model/Sana_1600M_1024px_diffusers",
    "sd15": "stable-diffusion-v1-5/stable-diffusion-v1-5",
    "sd3-medium": "stabilityai/stable-diffusion-3-medium-diffusers",
    "sd35-large": "stabilityai/stable-diffusion-3.5-large",
    "sd35-medium": "stabilityai/stable-diffusion-3.5-medium",
    "sdxl": "stabilityai/stable-diffusion-xl-base-1.0",
}
"""Hub id of each family's pipeline, if ``--model`` is not given."""

_ACCUMULATED: Final = 4
_LEARNING_RATE: Final = {"all": 1e-5, "adapters": 1e-4}
_MOST_PROMPTS: Final = 4


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("folder", metavar="FOLDER", help="folder for the files")
    add_family(parser, what="the model", required=True)
    parser.add_argument(
        "--photos",
        metavar="DIR",
        required=True,
        help="folder of images and their captions (cat.png, cat.txt)",
    )
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="a pipeline's folder or hub id; the default depends on the family",
    )
    add_machine(parser)
    add_update(parser)
    training = parser.add_argument_group("training")
    training.add_argument("--lora", type=at_least_one, metavar="RANK", help=LORA_HELP)
    training.add_argument(
        "--resolution",
        type=at_least_one,
        metavar="N",
        help="image side in pixels; default the model's native size",
    )
    training.add_argument(
        "--steps",
        type=at_least_one,
        metavar="N",
        default=2000,
        help="optimizer steps; default 2000",
    )


def run(arguments: argparse.Namespace) -> int:
    """Write run.yaml and plan.json; if one cannot be written, write none."""
    folder = Path(arguments.folder)
    plan, file = folder / "plan.json", folder / "run.yaml"
    for path in (plan, file):
        if os.path.lexists(path):
            raise InvalidValueError(
                "already exists, and existing files are not overwritten",
                "choose another folder, or move the existing file",
                str(path),
            )
    family = arguments.family
    if family.endswith("-controlnet"):
        raise InvalidValueError(
            "needs conditioning images, which the file of a run does not name",
            "start from the ControlNet recipe (docs/recipes.md)",
            "--family",
            family,
        )
    known = model_of(arguments)
    if known.frames is not None:
        raise InvalidValueError(
            "is trained on clips, but zerotune train reads images",
            "choose an image model, or write your own script (docs/families.md)",
            "--family",
            family,
        )
    model = _model(arguments)
    count, captions = _images(arguments.photos)
    advice = _advice(arguments, known)
    resolution = arguments.resolution or known.resolution
    text = _run_file(arguments, advice, model=model, captions=captions, resolution=resolution)
    _write({plan: advice.plan.to_json().rstrip("\n") + "\n", file: text})
    captioned = "with captions" if captions else "without captions"
    print_text(
        f"{plan}: {advice.chosen.title}\n"
        f"{file}: {counted(arguments.steps, 'step')} of {model} on "
        f"{counted(count, 'image')}, {captioned}\n"
        f"\nTrain with: zerotune train {file}\n"
        "To resume an interrupted run, run the same command again."
    )
    return 0


def _model(arguments: argparse.Namespace) -> str:
    """Return the pipeline to load, with an absolute path if it is a folder."""
    given = arguments.model
    if given is None:
        if arguments.family in _PIPELINES:
            return _PIPELINES[arguments.family]
        raise InvalidValueError(
            f"{arguments.family} has no known pipeline on the hub",
            "add --model with the folder or hub id of a pipeline",
            "--model",
        )
    folder = Path(given).expanduser()
    if folder.is_dir():
        if not (folder / "model_index.json").is_file():
            raise InvalidValueError(
                "contains no model_index.json, so it is not a pipeline",
                "pass a folder that a pipeline's save_pretrained wrote",
                "--model",
                given,
            )
        return str(folder.resolve())
    if folder.is_absolute() or given.startswith((".", "~")):
        raise InvalidValueError(
            "is not a folder", "pass a pipeline's folder or hub id", "--model", given
        )
    return str(given)


def _advice(arguments: argparse.Namespace, model: ModelFamily) -> Advice:
    rate = _LEARNING_RATE["adapters" if arguments.lora else "all"]
    try:
        return DeepSpeedPlan.advise(
            model,
            **machine_of(arguments),
            resolution=arguments.resolution,
            gradient_accumulation_steps=_ACCUMULATED,
            optimizer={"type": "AdamW", "params": {"lr": rate, "weight_decay": 0.01}},
            ema="host",
            lora=arguments.lora,
            update=arguments.update,
        )
    except NothingFitsError as error:
        # Other remedies are options of `plan advise` only.
        raise NothingFitsError(
            error.reason,
            nearest=error.nearest,
            remedies=tuple(one for one in error.remedies if {*one.settings} <= {"lora", "update"}),
            key="memory",
            value=error.value,
            fix=error.more,
        ) from None


def _images(folder: str) -> tuple[int, list[str]]:
    """Return the number of images, and their captions without duplicates."""
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise InvalidValueError("is not a folder", "pass a folder of images", "--photos", folder)
    try:
        images = data.ImageFolder(path, check="header")
    except DataError as error:
        raise DataError(error.reason, error.fix, "--photos", folder) from error
    captions = dict.fromkeys(images.item(index).caption.strip() for index in range(len(images)))
    return len(images), [caption for caption in captions if caption]


def _run_file(
    arguments: argparse.Namespace,
    advice: Advice,
    *,
    model: str,
    captions: list[str],
    resolution: int,
) -> str:
    """Return the file of this run for ``zerotune train``."""
    import yaml

    photos = str(Path(arguments.photos).expanduser().resolve())
    run = {
        "model": model,
        "family": arguments.family,
        "data": {"folder": photos, "resolution": resolution},
        "plan": "plan.json",
        **({"adapters": {"rank": arguments.lora}} if arguments.lora else {}),
        "ema": 0.999,
        "steps": arguments.steps,
        "gradient_checkpointing": advice.gradient_checkpointing,
        "activation_offload": advice.activation_offload,
        **({} if advice.streamed is None else {"streamed": advice.streamed.to_dict() or True}),
        **({} if advice.update is None else {"update": advice.update.name}),
        "validation": {"prompts": captions[:_MOST_PROMPTS] or ["a photo"]},
    }
    budget = advice.budget
    sizes = {"device memory": budget.device, "host memory": budget.host, "NVMe": budget.nvme}
    memory = ", ".join(f"{format_size(size)} of {name}" for name, size in sizes.items())
    said = (
        "# Train with: zerotune train run.yaml; zerotune train --schema lists every setting.\n"
        f"# The plan was chosen for {memory}. It requires\n"
        "# the values of gradient_checkpointing, activation_offload, streamed and update below.\n"
    )
    return said + yaml.safe_dump(run, sort_keys=False, allow_unicode=True)


def _write(texts: dict[Path, str]) -> None:
    """Write all of the files or none."""
    from contextlib import ExitStack

    folder = next(iter(texts)).parent
    with system_errors(PlanFileError, folder, "cannot be written to"), ExitStack() as drafts:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            write_synced(drafts.enter_context(drafted(path)), text.encode())
