"""What accelerate and DeepSpeed would run for a configuration, according to their own code.

Everything up to the engine is their code: the launcher that reads a file and sets the environment,
the plugin that reads the environment, ``Accelerator.prepare``, which fills ``"auto"`` from a
script's model, optimizer and data, and ``DeepSpeedConfig``. Only ``deepspeed.initialize`` is not
run.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

ALONE = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
}
"""Variables that a launcher sets for a single process."""
MICRO, ACCUMULATION = 3, 4
"""The script's batch size and accumulation steps."""


class _Reached(Exception):
    """The script has reached ``deepspeed.initialize``."""


def what_runs(*arguments: str, fitting: bool = False) -> dict[str, Any]:
    """Return what ``accelerate launch`` with these arguments would run in a script.

    Args:
        *arguments: Arguments of ``accelerate launch``.
        fitting: The script leaves optimizer and schedule to a configuration that has them, and its
            model states a hidden size, from which accelerate computes buckets.

    Returns:
        DeepSpeed's settings by name, and what accelerate itself would do differently; ``"refused"``
        alone where one of them raises.
    """
    try:
        with warnings.catch_warnings(), mock.patch.dict(os.environ, _sent(arguments)):
            warnings.simplefilter("ignore")
            return _run(fitting)
    except Exception as error:  # noqa: BLE001 - whatever they raise is a refusal
        return {"refused": f"{type(error).__name__}: {error}"}


def _sent(arguments: tuple[str, ...]) -> dict[str, str]:
    """Return the variables that accelerate's launcher sets."""
    from accelerate.commands import launch

    sent: dict[str, str] = {}

    def take(prepared: Any) -> None:
        _, environment = launch.prepare_deepspeed_cmd_env(prepared)
        sent.update({key: environment[key] for key in environment if key.startswith("ACCELERATE_")})

    given = ["--num_processes", "1", "--main_process_port", "0", *arguments, "script.py"]
    with (
        mock.patch.object(launch, "deepspeed_launcher", take),
        mock.patch.object(launch, "default_config_file", "none"),
    ):
        launch.launch_command(launch.launch_command_parser().parse_args(given))
    return sent


def _run(fitting: bool) -> dict[str, Any]:
    import deepspeed
    import torch
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import DummyOptim, DummyScheduler
    from deepspeed.runtime.config import DeepSpeedConfig

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATION)
    model = torch.nn.Linear(4, 4)
    optimizer: Any = torch.optim.AdamW(model.parameters())
    data = torch.utils.data.DataLoader(torch.zeros(16, 4), batch_size=MICRO)
    schedules: list[Any] = []
    if fitting:
        model.config = SimpleNamespace(hidden_size=4)
        written = accelerator.state.deepspeed_plugin.deepspeed_config
        if "optimizer" in written:
            optimizer = DummyOptim(
                model.parameters(), lr=1e-4, weight_decay=0.01, betas=(0.9, 0.999), eps=1e-8
            )
        if "scheduler" in written:
            schedules = [DummyScheduler(optimizer, total_num_steps=100, warmup_num_steps=10)]
    with _stop_at_the_engine(deepspeed) as taken, contextlib.suppress(_Reached):
        accelerator.prepare(model, optimizer, data, *schedules)
    config = DeepSpeedConfig(taken["config_params"])
    plugin = accelerator.state.deepspeed_plugin
    return {
        **{name: _plain(value) for name, value in vars(config).items() if name != "_param_dict"},
        "accelerate: steps": accelerator.gradient_accumulation_steps,
        "accelerate: precision": accelerator.mixed_precision,
        "accelerate: zero.Init": plugin.is_zero3_init_enabled(),
        "accelerate: stage": plugin.hf_ds_config._stage,
        "accelerate: offloads": plugin.hf_ds_config.is_offload(),
        "accelerate: optimizer": type(taken.get("optimizer")).__name__,
    }


@contextlib.contextmanager
def _stop_at_the_engine(deepspeed: Any) -> Iterator[dict[str, Any]]:
    taken: dict[str, Any] = {}

    def initialize(**keywords: Any) -> None:
        taken.update(keywords)
        raise _Reached

    with mock.patch.object(deepspeed, "initialize", initialize):
        yield taken


def _plain(value: Any) -> Any:
    """Convert a setting to a comparable value; DeepSpeed's models become dicts."""
    if hasattr(value, "model_dump"):
        members = value.model_dump()
        for part in ("offload_param", "offload_optimizer"):
            # accelerate writes the section even if nothing is offloaded.
            if (members.get(part) or {}).get("device") == "none":
                members[part] = None
        return members
    if type(value).__eq__ is object.__eq__ and hasattr(value, "__dict__"):
        return {name: _plain(each) for name, each in vars(value).items()}
    return value


def launcher_refuses(file: str) -> bool:
    """Return whether ``accelerate launch --config_file FILE`` fails before it starts a process."""
    from accelerate.commands import launch

    arguments = ["--config_file", file, "script.py"]
    try:
        with contextlib.redirect_stderr(None):
            launch._validate_launch_command(launch.launch_command_parser().parse_args(arguments))
    except (ValueError, AttributeError, TypeError):
        return True
    return False
