"""``zerotune`` exports the documented names, and importing it is cheap."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

import zerotune

NAMES = {
    "AspectBuckets",
    "Callback",
    "ClassConditional",
    "DataStream",
    "DeepSpeedPlan",
    "DenoisingObjective",
    "EMAShadow",
    "EmbeddedPlan",
    "FlowMatchingObjective",
    "ImageFolder",
    "ImageTensors",
    "LoRA",
    "MetricsFile",
    "ModelFacts",
    "OffloadManager",
    "OptimizerResolver",
    "Platform",
    "PreparedImages",
    "ProgressBar",
    "RunFacts",
    "SaveEvery",
    "Trackers",
    "Trainer",
    "Unconditional",
    "ValidationImages",
    "ValidationLoss",
    "ZeroTuneError",
    "__version__",
    "add_lora",
    "cleanup_stale_swap",
    "detect_platform",
    "encode_dataset",
    "export_adapters",
    "export_model",
    "export_pipeline",
    "images_to_grid",
    "latest_checkpoint",
    "load_checkpoint",
    "load_pretrained",
    "model_facts",
    "prepare",
    "sample",
    "save_checkpoint",
}
HEAVY = ("torch", "deepspeed", "accelerate", "diffusers", "numpy", "attrs", "attr", "rich", "yaml")


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    ).stdout


def test_the_package_exports_exactly_these_names():
    assert set(zerotune.__all__) == NAMES
    assert dir(zerotune) == sorted(NAMES)


def test_every_exported_name_exists_and_is_documented():
    for name in sorted(NAMES):
        value = getattr(zerotune, name)
        if name != "__version__":
            assert inspect.getdoc(value)
            assert value.__name__ == name


def test_unknown_names_are_refused_as_in_python():
    with pytest.raises(AttributeError, match="has no attribute 'Trainr'"):
        _ = zerotune.Trainr


def test_importing_zerotune_loads_no_heavy_package_and_configures_no_logging():
    code = (
        "import sys, logging, os; before = dict(os.environ); import zerotune, zerotune.errors\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules], "
        "logging.getLogger('zerotune').handlers, before == dict(os.environ))"
    )
    assert run(code).strip() == "[] [] True"


OPTIMIZER = """
from zerotune.optim import OptimizerResolver
from zerotune.plan import DeepSpeedPlan, ModelFacts
from zerotune.plan.optimizer.curves import lr_at
from zerotune.platform import Platform

plan = DeepSpeedPlan.build(stage=2, offload="cpu", optimizer="Adam").resolve(
    platform=Platform.synthetic("cpu"),
    model=ModelFacts.from_shapes([("weight", (4, 4))]),
)
resolution = OptimizerResolver().resolve(plan)
assert resolution.explain()
lr_at(resolution.scheduler, 3, resolution.optimizer.lr)
"""
SERVERS = ("starlette", "uvicorn", "jinja2")
TORCH = ("torch", "deepspeed", "accelerate", "diffusers", "numpy", "safetensors", "matplotlib")
ADVISE = ["plan", "advise", "--family", "sdxl", "--vram", "24GiB", "--ram", "128GiB"]
CLI = "from zerotune.cli import main"
LAZY = (
    ("import zerotune.platform as p; p.Platform.synthetic('cuda')", (*TORCH, "psutil", "rich")),
    ("from zerotune import cli; cli._parser().parse_args(['doctor'])", (*TORCH, "rich")),
    ("import zerotune; zerotune.DeepSpeedPlan, zerotune.OptimizerResolver", (*TORCH, "yaml")),
    ("import zerotune; zerotune.DeepSpeedPlan.load('plan.json').explain()", (*TORCH, "yaml")),
    ("from zerotune.plan.families import family; family('flux')", TORCH),
    ("import zerotune.plan.charts", TORCH),
    (OPTIMIZER, TORCH),
    (f"{CLI}; main(['train', '--schema'])", TORCH),
    (f"{CLI}; main(['builder', '--help'])", (*TORCH, *SERVERS)),
    (f"{CLI}; assert main(['plan', 'explain', 'plan.json', '--json']) == 0", TORCH),
    (f"{CLI}; assert main({ADVISE}) == 0", TORCH),
)
"""Code that runs without these packages, in the order in which it loads more and more."""


def test_heavy_packages_are_imported_only_where_they_are_needed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.json").write_text('{"zero_optimization": {"stage": 2}}')
    code = (
        "import contextlib, io, json, sys\n"
        f"for code, names in {LAZY!r}:\n"
        "    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        "        exec(code, {})\n"
        "    if set(names) & set(sys.modules):\n"
        "        print(code, *set(names) & set(sys.modules))\n"
    )
    assert run(code) == ""


def test_importing_zerotune_takes_less_than_100_ms():
    # CPU time, and the best of five, as other processes may load the machine.
    code = "import time; t = time.process_time(); import zerotune; print(time.process_time() - t)"
    assert min(float(run(code)) for _ in range(5)) < 0.1


def test_the_version_equals_the_build_metadata():
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    (written,) = re.findall(r'^version = "(.+)"$', text, re.MULTILINE)
    assert zerotune.__version__ == written


def folder(package: str) -> Path:
    return Path(zerotune.__path__[0]).joinpath(*package.split(".")[1:])


PACKAGES = sorted(
    ".".join(("zerotune", *file.parent.relative_to(zerotune.__path__[0]).parts))
    for file in Path(zerotune.__path__[0]).rglob("__init__.py")
)


def test_no_exported_name_equals_a_modules():
    """The one loaded last would otherwise hide the other."""
    for package in PACKAGES:
        module = importlib.import_module(package)
        inside = {found.name for found in pkgutil.iter_modules(module.__path__)}
        assert not inside & set(getattr(module, "__all__", ()))


STUBS = [package for package in PACKAGES if (folder(package) / "__init__.pyi").exists()]


@pytest.mark.parametrize("package", STUBS)
def test_every_name_listed_in_a_stub_exists(package):
    module = importlib.import_module(package)
    for name in module.__all__:
        assert getattr(module, name) is not None
    assert dir(module) == sorted(module.__all__)
    assert len(module.__all__) == len(set(module.__all__))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = module.nothing


def test_the_package_is_marked_as_typed():
    assert resources.files("zerotune").joinpath("py.typed").is_file()
