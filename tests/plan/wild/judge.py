"""Ask DeepSpeed and accelerate about every configuration of ``files.json``.

``python -m tests.plan.wild.judge`` writes their answers to ``verdicts.json``.

``files.json`` holds keys and values of published files, without comments, with paths and names of
people replaced. A file is text only where that matters: a key that is there twice, commas in YAML.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any, Final
from unittest import mock

HERE: Final = Path(__file__).parent
FILES: Final = HERE / "files.json"
VERDICTS: Final = HERE / "verdicts.json"
ACCEPTED: Final = "accepted"
SHORTEST: Final = 160
"""Length after which an error is cut."""


def configurations() -> dict[str, dict[str, Any]]:
    """Return source, content and named files of each configuration, by name."""
    return dict(json.loads(FILES.read_text(encoding="utf-8")))


def placed(name: str, folder: Path) -> Path:
    """Write a configuration and the files that it names; return its path."""
    import yaml

    wild = configurations()[name]
    for path, content in wild.get("beside", {}).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(json.dumps(content))
    text = wild.get("text")
    if text is None:
        write = yaml.safe_dump if name.endswith(".yaml") else json.dumps
        text = write(wild["content"])
    (folder / name).write_text(text)
    return folder / name


def verdict(file: Path) -> dict[str, str]:
    """Return what DeepSpeed and accelerate say of a file.

    Returns:
        ``deepspeed``: what DeepSpeed's class says of JSON; ``schedule``: what its schedules say of
        their arguments; ``starts``: the launcher that accelerate calls for YAML; ``runs``: what a
        script says that accelerate starts with DeepSpeed, where ``"auto"`` is filled.
    """
    if file.suffix != ".yaml":
        config = json.loads(file.read_text())
        says = {"deepspeed": _config_class(config), "schedule": _schedule(config)}
        return {**says, "runs": _runs("--use_deepspeed", "--deepspeed_config_file", str(file))}
    started = _started(file)
    says = {"starts": started}
    if started == "DeepSpeed":
        says["runs"] = _runs("--config_file", str(file))
    return says


def _config_class(config: dict[str, Any]) -> str:
    import deepspeed.runtime.config as reading

    from tests.plan.test_deepspeed_agrees import Ranks

    with mock.patch.object(reading, "dist", Ranks(1)):
        try:
            reading.DeepSpeedConfig(config)
        except Exception as error:  # noqa: BLE001 - whatever it raises is a refusal
            return _said(error)
    return ACCEPTED


def _schedule(config: dict[str, Any]) -> str:
    """Return what DeepSpeed says when it builds the schedule, with 1 for ``"auto"``."""
    import torch
    from deepspeed.runtime import lr_schedules

    section = config.get("scheduler") or {}
    params = {
        key: 1 if value == "auto" else value for key, value in section.get("params", {}).items()
    }
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    try:
        if section:
            getattr(lr_schedules, section["type"])(optimizer, **params)
    except Exception as error:  # noqa: BLE001 - whatever it raises is a refusal
        return _said(error)
    return ACCEPTED


def _started(file: Path) -> str:
    """Return which launcher ``accelerate launch --config_file`` calls, or its error."""
    from accelerate.commands import launch

    called: list[str] = []
    names = {
        "deepspeed_launcher": "DeepSpeed",
        "multi_gpu_launcher": "several processes",
        "simple_launcher": "one process",
        "tpu_launcher": "TPU",
        "sagemaker_launcher": "SageMaker",
    }
    stand_ins = {name: (lambda *_, what=what: called.append(what)) for name, what in names.items()}
    parsed = launch.launch_command_parser().parse_args(["--config_file", str(file), "script.py"])
    try:
        with mock.patch.multiple(launch, **stand_ins):
            launch.launch_command(parsed)
        if called == ["DeepSpeed"]:
            launch.prepare_deepspeed_cmd_env(parsed)
        elif called == ["several processes"]:
            launch.prepare_multi_gpu_env(parsed)
    except BaseException as error:  # noqa: BLE001 - argparse exits, the others raise anything
        return _said(error)
    return called[0]


def _runs(*arguments: str) -> str:
    from tests.plan.accelerate_runs import what_runs

    said = what_runs(*arguments, fitting=True).get("refused", ACCEPTED)
    return " ".join(str(said).split())


def _said(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def main(folder: Path) -> dict[str, dict[str, str]]:
    """Return the verdict on each configuration."""
    from zerotune.backend.upstream import quiet_deepspeed, require_deepspeed

    require_deepspeed(accelerator="cpu")
    quiet_deepspeed()
    logging.disable(logging.CRITICAL)
    verdicts = {}
    for name in configurations():
        within = folder / name.partition(".")[0] / name.partition(".")[2]
        within.mkdir(parents=True, exist_ok=True)
        file = placed(name, within)
        os.chdir(within)  # accelerate looks for named files in the working directory
        verdicts[name] = {
            key: said.replace(f"{within}/", "")[:SHORTEST] for key, said in verdict(file).items()
        }
    return verdicts


def judged(folder: Path) -> dict[str, Any]:
    """Return the verdicts as ``verdicts.json`` holds them, from a process of their own."""
    from importlib.metadata import version

    from tests.plan.accelerate_runs import ALONE
    from tests.support.ranks import free_port, run_ranks

    (verdicts,) = run_ranks(main, folder, env={**ALONE, "MASTER_PORT": str(free_port())})
    return {"accelerate": version("accelerate"), "deepspeed": version("deepspeed"), **verdicts}


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as made:
        VERDICTS.write_text(json.dumps(judged(Path(made)), indent=1) + "\n", encoding="utf-8")
