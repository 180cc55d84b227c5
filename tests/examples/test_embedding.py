"""zerotune embedded in other trainers: the example scripts run unchanged."""

from __future__ import annotations

import difflib
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.examples import diffusers_script as script
from tests.examples.embedded import (
    ACCUMULATION,
    MICRO,
    SCHEDULE,
    batches,
    ended_as_diffusers_do,
    gone_on_in_a_trainer,
    objective,
    on_an_engine,
    run_script,
    swapped_in_silence,
    uninterrupted,
)
from tests.support.errors import error_of
from tests.support.needs import needs
from tests.support.ranks import free_port, ranks, run_ranks
from tests.support.sampling import nightly
from zerotune import DeepSpeedPlan
from zerotune.checkpoint.folders import verify_checkpoint
from zerotune.training import EmbeddedPlan

SCRIPTS = Path(__file__).parents[2] / "examples" / "embedding"
BEFORE, ALL = 3, 5
"""Optimizer steps before the checkpoint, and of the whole run."""
ALIKE = 5e-5
CPU = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
SHARDED = {"stage": 3, "offload_optimizer": {"device": "none"}}

# The launcher's own DeepSpeed options differ from the plan and must be ignored.
ACCELERATE = ["accelerate.commands.launch", "--use_deepspeed", "--zero_stage", "3"]

engine_runs = pytest.mark.deepspeed
_losses: dict[int, list[float]] = {}


def expected(world_size: int) -> list[float]:
    """Return the plain engine's losses on the whole batch, per optimizer step."""
    if world_size not in _losses:
        (_losses[world_size],) = run_ranks(uninterrupted, MICRO * world_size, ALL)
    return _losses[world_size]


def changed_lines(kind: str) -> int:
    """Count changed, added and removed lines except blank ones; a changed line counts once."""
    texts = ((SCRIPTS / f"{kind}_{name}.py").read_text() for name in ("before", "after"))
    before, after = ([line for line in text.splitlines() if line.strip()] for text in texts)
    operations = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return sum(max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in operations if tag != "equal")


@pytest.mark.parametrize("kind", ["accelerate", "deepspeed", "fabric"])
def test_embedding_a_plan_changes_few_lines(kind):
    assert 5 < changed_lines(kind) < 15


def check(results: list[dict[str, Any]], *, zero: dict[str, Any], steps: int = BEFORE) -> None:
    """Check that losses, EMA, optimizer and learning rate are those of the plan."""
    assert mean_over_ranks(results) == pytest.approx(expected(len(results))[:steps], rel=ALIKE)
    for seen in results:
        assert seen["ema_error"] < 1e-6
        assert seen["ema_steps"] == seen["steps"] == steps
        # A schedule stepped twice, or once per process, would give another rate.
        assert seen["lr"] == pytest.approx(1e-2 * steps / 5)
        assert seen["optimizer"] == ("DeepSpeedCPUAdam" if zero is CPU else "FusedAdam")
        assert seen["partitioned"] == (zero["stage"] == 3)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    """Save a checkpoint of the accelerate script run by ``python``, at stage 2 with CPU offload."""
    path = tmp_path_factory.mktemp("embedding") / "checkpoint"
    results = run_ranks(run_script, "accelerate_after", BEFORE, str(path), CPU)
    check(results, zero=CPU)
    (seen,) = results
    assert "no backward pass has been run since the last step" in seen["second step"]
    assert "1 of 2 micro batches are accumulated" in seen["open window"]
    assert "constant_with_warmup" in "".join(seen["decisions"])
    return str(path)


@engine_runs
def test_the_accelerate_script_with_a_plan_trains_as_before(checkpoint, tmp_path):
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    arguments = ("accelerate_before", BEFORE, str(tmp_path), CPU)
    (before,) = run_ranks(run_script, *arguments, env=env)
    assert before["losses"] == pytest.approx(expected(1)[:BEFORE], rel=ALIKE)


def mean_over_ranks(results: list[dict[str, Any]]) -> list[float]:
    return [sum(each) / len(each) for each in zip(*(r["losses"] for r in results), strict=True)]


@engine_runs
@ranks(1)
def test_objects_replaced_by_the_plans_accelerator_are_recorded():
    from copy import deepcopy

    from diffusers.training_utils import EMAModel as Foreign

    from zerotune.ema import EMAModel

    args = script.parse_args([])
    model = script.new_model()
    with EmbeddedPlan(plan=script.CONFIG, run=args) as run:
        assert "EmbeddedPlan(plan=..., model=...)" in error_of(lambda: run.config)
        accelerator = run.accelerator(gradient_accumulation_steps=7)
        accelerator.register_save_state_pre_hook(lambda *_: None)
        register = accelerator.register_for_checkpointing
        ema, late = EMAModel(model, decay=0.9), EMAModel(model)
        foreign = Foreign(model.parameters())
        copied = deepcopy(model)
        for parameter in copied.parameters():
            parameter.data.fill_(0.5)
        copy = EMAModel(copied.parameters(), decay=0.9)
        other = EMAModel(torch.nn.Linear(2, 2))
        assert "no engine is attached yet" in error_of(lambda: register(ema))
        two = error_of(lambda: accelerator.prepare(model, torch.nn.Linear(2, 2)))
        assert "['UNet2DModel', 'Linear']" in two
        assert ".to(accelerator.device)" in two
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
        model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
        assert run.plan.optimizer.lr == args.learning_rate, "the flags are read when it prepares"
        assert "'EMAModel'" in error_of(lambda: register(foreign))
        register(copy)
        copy.step(model.parameters())
        assert copy.cur_decay_value == 0, "the first update copies, as in diffusers"
        assert copy.shadow.distance() == 0
        assert "already has an engine" in error_of(lambda: run.attach(model))
        assert "of other shapes" in error_of(lambda: register(other))
        assert accelerator.gradient_accumulation_steps == 2
        explained = run.engine.explain()
        for said in ("SGD(lr=0.5)", "ConstantLR", "pre_hook", "Accelerator.gradient_accumulation"):
            assert said in explained
        register(late)
        assert late.optimization_step == 0


@engine_runs
def test_saving_at_the_end_of_a_script_at_stage_3_writes_no_empty_tensors(tmp_path):
    needs("transformers")
    for seen in run_ranks(ended_as_diffusers_do, str(tmp_path), world_size=2):
        assert seen["hidden"] == (1, 4, 16), "a frozen text encoder runs"
        assert "transformers.from_pretrained: 'partitioned' -> 'whole'" in seen["explained"]
        assert seen["sample_size"] == 8, "the configuration may be read"
        assert "zerotune.export_model(path, engine=engine)" in seen["saved"]
        assert seen["written"] == []
        assert seen["gathered"] == seen["exported"]
        assert seen["whole"] == (seen["is_main"] and "as exported")
        assert (0,) not in seen["exported"]


# The digits fill three and a half batches of 512, so the second window ends before it is full.
AT_THE_END = ("--train_batch_size", "512", "--gradient_accumulation_steps", "3")


@engine_runs
@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        (1, ("--mixed_precision", "bf16", *AT_THE_END)),
        *nightly((2, ("--max_train_steps", str(BEFORE)))),
    ],
)
def test_the_host_engine_changes_no_bit_of_a_script(world_size, flags, tmp_path):
    found = [
        run_ranks(on_an_engine, name, str(tmp_path / name), flags, world_size=world_size)
        for name in ("deepspeed", "host")
    ]
    for theirs, mine in zip(*found, strict=True):
        assert theirs["engine"] == "AttachedEngine"
        assert mine["engine"] == ("HostEngine" if world_size == 1 else "SharedHostEngine")
        assert mine["losses"] == theirs["losses"]
        assert mine["steps"] == theirs["steps"] == (2 if AT_THE_END[0] in flags else BEFORE)
        for name, average in theirs["average"].items():
            assert np.array_equal(mine["average"][name], average), name
        for said in ("LambdaLR", "pre_hook"):
            assert said in mine["explained"]


@engine_runs
@ranks(1)
def test_a_script_on_the_host_engine_sees_norms_rates_and_skipped_steps(tmp_path):
    from torch.utils.data import DataLoader

    args = script.parse_args(["--gradient_accumulation_steps", "1"])
    original = script.new_model()
    with EmbeddedPlan(plan=script.CONFIG, run=args, engine="host") as run:
        accelerator = run.accelerator()
        optimizer = torch.optim.AdamW(original.parameters(), lr=1e-2)
        loader = DataLoader(script.digits(), batch_size=4)
        model, optimizer, loader = accelerator.prepare(original, optimizer, loader)
        assert accelerator.unwrap_model(model) is original is run.engine.module
        norms, skipped, batch = [], [], next(iter(loader))
        for factor in (1.0, float("nan"), 1.0):
            with accelerator.accumulate(model):
                accelerator.backward(factor * script.loss_of(model, batch))
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0))
                optimizer.step()
                optimizer.zero_grad()
            skipped.append(accelerator.optimizer_step_was_skipped)
        assert skipped == [False, True, False]
        assert norms[0] > 0
        assert not math.isfinite(norms[1])
        assert optimizer.param_groups[0]["lr"] == run.engine.lr == pytest.approx(1e-2 * 2 / 5)
        whole = accelerator.get_state_dict(model)
        assert whole.keys() == original.state_dict().keys()
        assert "already has an engine" in error_of(lambda: accelerator.prepare(model))
        accelerator.save_state(str(tmp_path / "saved"))
    assert verify_checkpoint(tmp_path / "saved").state.skipped_steps == 1


@engine_runs
@ranks(1)
def test_deepspeed_runs_what_the_host_engine_cannot_and_a_decision_says_why():
    config = {**script.CONFIG, "zero_optimization": {"stage": 1}}
    model = script.new_model()
    with EmbeddedPlan(plan=config, run=script.parse_args([]), engine="host") as run:
        accelerator = run.accelerator()
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        assert type(run.engine).__name__ == "AttachedEngine"
        explained = run.engine.explain()
    assert "the optimizer is not in host memory" in explained
    assert explained.count("AdamW(lr=0.001)") == 1, "each decision once"


def test_accelerates_cpu_flag_is_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    refused = error_of(lambda: EmbeddedPlan(plan={"train_batch_size": 1}))
    assert "set DS_ACCELERATOR=cpu and start the script with torchrun" in refused


@engine_runs
@pytest.mark.parametrize(
    ("kind", "difference"),
    [
        (
            "wider",
            "For example, 0.weight is trained, of shape (8, 4) in",
        ),
        ("deeper", "2.weight is missing in the plan and trained, of shape (1, 1) in"),
        ("frozen", "in the plan and frozen, of shape (8, 4) in the trained model"),
    ],
)
@ranks(1)
def test_a_model_other_than_the_plans_is_refused(kind, difference):
    def made(width: int = 8) -> torch.nn.Sequential:
        return torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Linear(width, 1))

    model = made(16 if kind == "wider" else 8)
    if kind == "deeper":
        model.append(torch.nn.Linear(1, 1))
    model[0].requires_grad_(kind != "frozen")
    with EmbeddedPlan(model=made(), plan={"train_batch_size": 1}) as run:
        accelerator = run.accelerator()
        optimizer = torch.optim.AdamW(model.parameters())
        assert difference in error_of(lambda: accelerator.prepare(model, optimizer))


@engine_runs
@ranks(1)
def test_a_script_schedule_that_differs_from_the_plans_is_noticed():
    from diffusers.optimization import get_scheduler

    from zerotune.backend.deepspeed.external import _rescheduled

    model = torch.nn.Linear(2, 2)
    adamw = {"type": "AdamW", "params": {"lr": 1e-2}}
    plan = {"train_batch_size": 1, "optimizer": adamw, "scheduler": SCHEDULE}
    with EmbeddedPlan(model=model, plan=plan) as run:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        def said(steps: int, processes: int) -> str:
            """Compare a script's warm-up of ``steps`` with the plan's of 5."""
            script = get_scheduler("constant_with_warmup", optimizer, num_warmup_steps=steps)
            return str(_rescheduled(run.plan, script, each_step=processes))

        assert "LambdaLR" in said(5, 1)
        assert "differ" not in said(5, 1)
        # Twice the plan's warm-up is wrong if accumulation doubled it, right if two processes step
        # it.
        assert "at optimizer step 5 the script's rate is 0.005 and the plan's 0.01" in said(10, 1)
        assert "differ" not in said(10, 2)


@engine_runs
def test_a_trainer_resumes_an_embedded_checkpoint(checkpoint):
    (seen,) = run_ranks(gone_on_in_a_trainer, checkpoint, ALL, {"stage": 3, "offload": "none"})
    assert seen["losses"] == pytest.approx(expected(1)[BEFORE:], rel=ALIKE)
    assert seen["step"] == BEFORE
    assert seen["ema_steps"] == ALL, "the average goes on"
    assert "the data start at the beginning" in seen["decisions"]["data"]
    assert "shadows.ema" not in seen["decisions"]


@engine_runs
def test_a_raw_loop_resumes_a_checkpoint_of_accelerate(checkpoint, tmp_path):
    arguments = ("deepspeed_after", ALL, str(tmp_path / "end"), SHARDED, checkpoint)
    (seen,) = run_ranks(resumed_script, *arguments)
    assert seen["losses"] == pytest.approx(expected(1)[BEFORE:], rel=ALIKE)
    assert seen["partitioned"]
    assert seen["ema_steps"] == seen["steps"] == ALL


def resumed_script(name: str, steps: int, folder: str, zero: dict[str, Any], resume: str) -> Any:
    return run_script(name, steps, folder, zero, resume=resume)


@engine_runs
@pytest.mark.parametrize("kind", ["deepspeed", *nightly("accelerate")])
def test_the_scripts_train_as_before_at_stage_3_on_two_processes(kind, tmp_path):
    arguments = (f"{kind}_after", BEFORE, str(tmp_path / "end"), SHARDED)
    check(run_ranks(run_script, *arguments, world_size=2), zero=SHARDED)


@engine_runs
@pytest.mark.parametrize(("zero", "world_size"), [(SHARDED, 2), *nightly((CPU, 1))])
def test_the_fabric_script_with_a_plan_trains_as_before(zero, world_size, tmp_path):
    needs("lightning_fabric", may_lack="an example only")
    arguments = ("fabric_after", BEFORE, str(tmp_path / "end"), zero)
    # Without this, Fabric uses every core and slows the other tests.
    env = {"OMP_NUM_THREADS": "1"}
    if world_size > 1:
        env["TORCHELASTIC_RUN_ID"] = "what torchrun sets and Fabric looks for"
    check(run_ranks(run_script, *arguments, world_size=world_size, env=env), zero=zero)


@engine_runs
def test_an_optimizer_silently_replaced_by_accelerate_is_detected_and_named():
    env = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    (said,) = run_ranks(swapped_in_silence, env=env)
    assert "optimizer.type should be 'RMSprop' but is 'DeepSpeedCPUAdam'" in said


@engine_runs
@ranks(1)
def test_accelerate_runs_the_optimizer_of_the_plan():
    from accelerate import Accelerator
    from examples.embedding.accelerate_before import CONFIG, new_model

    asked = {"optimizer": {"type": "RMSprop", "params": {"lr": 1e-3}}, "scheduler": SCHEDULE}
    model = new_model()
    with EmbeddedPlan(model=model, plan=DeepSpeedPlan.from_dict(CONFIG | asked)) as run:
        assert "is not a DeepSpeed engine" in error_of(lambda: run.attach(model))
        assert "no engine is attached yet" in error_of(lambda: run.engine)
        accelerator = Accelerator(**run.accelerator_arguments())
        optimizer, lr_scheduler = run.accelerate_optimizer(model)
        model, optimizer, lr_scheduler = accelerator.prepare(model, optimizer, lr_scheduler)
        engine = run.attach(model)
        lrs = []
        for batch in batches(MICRO)[: 3 * ACCUMULATION]:
            with accelerator.accumulate(model):
                accelerator.backward(objective(model, batch, None))
                optimizer.step()
                lr_scheduler.step()
            lrs.append(lr_scheduler.get_last_lr()[0])
        assert lrs[1::ACCUMULATION] == pytest.approx([1e-3 * step / 5 for step in (1, 2, 3)])
        assert type(model.basic_optimizer).__name__ == "RMSprop"
        assert "scheduler.type = 'CurveScheduler', " in engine.explain()


@engine_runs
@pytest.mark.nvme
@ranks(1)
def test_the_swap_folder_is_removed_when_the_script_ends(tmp_path):
    """The script exits without calling ``close``."""
    import atexit

    from examples.embedding.accelerate_before import CONFIG, new_model

    from zerotune import DeepSpeedPlan, OffloadManager

    zero = {"stage": 3, "offload_optimizer": {"device": "nvme"}}
    config = CONFIG | {"zero_optimization": zero, "optimizer": {"type": "AdamW"}}
    plan, manager = DeepSpeedPlan.from_dict(config), OffloadManager(root=tmp_path)
    run = EmbeddedPlan(model=new_model(), plan=plan, offload=manager)
    assert Path(run.plan.nvme_paths["optimizer"]).parent == tmp_path
    assert sum(path.is_dir() for path in tmp_path.iterdir()) == 1
    atexit._run_exitfuncs()
    assert not any(path.is_dir() for path in tmp_path.iterdir())


def launched(launcher: list[str], script: str, folder: Path) -> None:
    """Run a script under a launcher for two steps."""
    paths = [str(SCRIPTS.parents[1] / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    module, *arguments = launcher
    port = "--main_process_port" if "accelerate" in module else "--master-port"
    result = subprocess.run(
        [
            *(sys.executable, "-m", module, *arguments, port, str(free_port())),
            *(str(SCRIPTS / f"{script}.py"), "2", str(folder)),
        ],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stdout + result.stderr


@engine_runs
@pytest.mark.parametrize(
    ("launcher", "script"),
    [
        ([*ACCELERATE, "--num_processes", "2"], "accelerate_after"),
        (["torch.distributed.run", "--nproc-per-node", "2"], "deepspeed_after"),
    ],
)
# The default suite runs them on two ranks, and another script under the launchers.
@pytest.mark.nightly
def test_each_script_runs_under_its_launcher(launcher, script, tmp_path):
    launched(launcher, script, tmp_path / "end")
    manifest = verify_checkpoint(tmp_path / "end")
    assert (manifest.world_size, manifest.plan.stage) == (2, 2)
    assert manifest.state.global_step == 2
    assert manifest.state.micro_step == 2 * ACCUMULATION
