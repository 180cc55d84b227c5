"""Run scripts of diffusers, unchanged and with the changes of ``examples/embedding``."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import torchvision

CHANGES = Path(__file__).parents[2] / "examples" / "embedding"
PLACE = "DIFFUSERS_EXAMPLES"
"""Environment variable: the folder ``examples`` of a checkout of diffusers, release 0.40.0."""
SUMS = {
    "train_dreambooth_lora_flux": "ea51c6843b1e27909a134de1eb59e6bc",
    "train_text_to_image_sdxl": "687972614c5a2bc3a130cad29adbbcfd",
}
"""First half of the SHA-256 of the release's scripts, to which the changes apply."""
_IMPORT = "from zerotune import EmbeddedPlan"
_RUN = 'run = EmbeddedPlan(plan="ds_config.json", run=args)'


def original(name: str, folder: Path) -> Path:
    """Copy the original script from a checkout; diffusers' packages do not contain it."""
    place = os.environ.get(PLACE)
    if not place:
        pytest.skip(f"set {PLACE} to the examples of a checkout of diffusers (nox -s nightly does)")
    (found,) = Path(place).rglob(f"{name}.py")
    script = folder / f"{name}.py"
    script.write_bytes(found.read_bytes())
    digest = hashlib.sha256(script.read_bytes()).hexdigest()
    assert digest[:32] == SUMS.get(name, digest[:32]), "of another release"
    return script


def embedded(name: str, folder: Path) -> Path:
    """Copy a script of any release, and let a plan make its accelerator."""
    script = original(name, folder)
    made = "accelerator = Accelerator("
    text = script.read_text()
    assert text.count(made) == 1
    head, tail = text.replace("import diffusers\n", f"import diffusers\n{_IMPORT}\n", 1).split(made)
    script.write_text(f"{head}{_RUN}\n    accelerator = run.accelerator({tail}")
    return script


def changed(name: str, folder: Path) -> Path:
    """Copy the script and apply the changes of the page."""
    script = original(name, folder)
    difference = str(CHANGES / f"{name}.diff")
    subprocess.run(["git", "apply", "-p1", difference], cwd=folder, check=True)
    return script


def photos(folder: Path, *, captions: bool) -> Path:
    """Write six photos in two sizes, in the layout of ``datasets`` or of DreamBooth's dataset."""
    from PIL import Image
    from skimage import data

    folder.mkdir()
    picture = Image.fromarray(data.astronaut())
    lines = []
    for number in range(6):
        side = 16 + 4 * (number % 2)
        part = picture.crop((60 * number, 40 * number, 60 * number + 200, 40 * number + 200))
        part.resize((side, 20)).save(folder / f"{number}.png")
        lines.append({"file_name": f"{number}.png", "text": "ab"[number % 2] * (number + 1)})
    if captions:
        (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def run_of_diffusers(script: str, *calls: tuple[list[str], dict[str, Any]]) -> list[float]:
    """Run ``main`` of a script for each call's flags and plan; return the logged losses."""
    import accelerate
    import datasets  # noqa: F401 - these look for torchvision
    import diffusers  # noqa: F401
    import peft  # noqa: F401
    import transformers  # noqa: F401

    path, losses = Path(script), []
    os.chdir(path.parent)
    torchvision.stand_in()
    log = accelerate.Accelerator.log

    def look_and_log(self: Any, values: dict[str, Any], *rest: Any, **more: Any) -> None:
        losses.extend(value for name, value in values.items() if name.endswith("loss"))
        log(self, values, *rest, **more)

    accelerate.Accelerator.log = look_and_log
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    # The transforms of datasets are hashed by the module that defines them.
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    for flags, plan in calls:
        if os.environ.get("RANK", "0") == "0":
            Path("ds_config.json").write_text(json.dumps(plan))
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.state.GradientState._reset_state()
        os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
        # Some of the script's functions read ``args`` as a global, as it is when run as a program.
        sys.argv = [script, *flags]
        module.args = module.parse_args()
        module.main(*[module.args][: len(inspect.signature(module.main).parameters)])
    return losses


def weights_of(folder: Path, kind: Any) -> np.ndarray:
    """Return all weights of an exported model in one array."""
    state = kind.from_pretrained(folder).state_dict()
    return np.concatenate([state[name].float().numpy().ravel() for name in sorted(state)])
