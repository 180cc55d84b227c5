"""Fast paths are the default on a device only once they are proven there."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import psutil
import pytest
import torch

from tests.support.ranks import run_ranks
from zerotune.backend import proof as proofs
from zerotune.backend.distributed import ProcessGroup
from zerotune.backend.host import obstacles, passes
from zerotune.backend.host.obstacles import why_not_hosted
from zerotune.backend.proof import (
    PATHS,
    VARIABLE,
    Combination,
    Outcome,
    Proof,
    load_proof,
    proof_path,
    proof_setting,
    store_proof,
)
from zerotune.diffusion import activations
from zerotune.diffusion.activations import ActivationOffload, WaitingTransfers, transfers_for
from zerotune.errors import InvalidValueError, PlatformError
from zerotune.optim import OptimizerResolver
from zerotune.plan import DeepSpeedPlan
from zerotune.platform import Platform, detect_platform
from zerotune.training import proving

CARD = Combination(device="Card", driver="1", processor="P", torch="2", deepspeed="0", zerotune="0")
CHECKS = tuple(proving.CHECKS)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a temporary cache, on a machine with a pretended GPU."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(Combination, "here", classmethod(lambda *_: CARD))
    return tmp_path


def passed(failed: str | None = None, detail: str = "") -> Proof:
    """Return a proof in which at most one check failed, with this detail."""
    checks = {name: Outcome(passed=True, seconds=1.0) for name in CHECKS}
    if failed is not None:
        assert failed in checks
        checks[failed] = Outcome(passed=False, detail=detail, evidence="everything")
    return Proof(combination=CARD, checks=checks)


# -- The proof file.


def test_a_proof_is_stored_and_read_back() -> None:
    assert "nothing is proven yet" in str(load_proof(CARD))
    proof = passed()
    assert store_proof(proof) == proof_path(CARD)
    assert load_proof(CARD) == proof
    assert [path.suffix for path in proof_path(CARD).parent.iterdir()] == [".json"]


def test_every_check_belongs_to_a_path_and_every_path_has_checks() -> None:
    assert {name for names in PATHS.values() for name in names} == set(CHECKS)


@pytest.mark.parametrize("field", [each.name for each in attrs.fields(Combination)])
def test_a_proof_for_another_combination_does_not_count(field: str) -> None:
    store_proof(passed())
    other = attrs.evolve(CARD, **{field: "another"})
    assert "nothing is proven yet" in str(load_proof(other))
    proof_path(CARD).rename(proof_path(other))
    assert "is for different hardware or software" in str(load_proof(other))


def _no_answer(values: Any) -> str:
    values["checks"]["training"]["passed"] = "yes"
    return json.dumps(values)


DAMAGES: dict[str, Callable[[Any], str]] = {
    "cut": lambda values: json.dumps(values)[:-20],
    "another format": lambda values: json.dumps(values | {"format": 99}),
    "no answer": _no_answer,
    "too deep": lambda _: "[" * 100_000,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_proof_does_not_count_and_is_reported(damage: Callable[[Any], str]) -> None:
    store_proof(passed())
    path = proof_path(CARD)
    path.write_text(damage(json.loads(path.read_text())))
    assert "is damaged or was written in an unsupported format" in str(load_proof(CARD))
    (decision,) = proofs.proof_decisions("cuda")
    assert "plain paths" in decision.after
    assert str(path) in decision.reason


def test_a_folder_in_place_of_a_proof_file_is_reported_without_a_crash() -> None:
    proof_path(CARD).mkdir(parents=True)
    assert "cannot be read" in str(load_proof(CARD))


def test_a_failed_write_keeps_the_former_proof_file(monkeypatch: pytest.MonkeyPatch) -> None:
    store_proof(passed())

    def fail(path: Path, _content: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(proofs, "write_atomically", fail)
    assert store_proof(passed("training", "a weight differs")) is None
    assert load_proof(CARD) == passed()


# -- Defaults.


def test_activations_are_copied_asynchronously_only_if_proven(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = []
    monkeypatch.setattr(activations, "StreamTransfers", made.append)
    device = torch.device("cuda")
    plain = transfers_for(device)
    assert isinstance(plain, WaitingTransfers)
    assert "nothing is proven yet" in plain.reason
    store_proof(passed("page-locked copies", "copy 3 differs"))
    assert isinstance(transfers_for(device), WaitingTransfers)
    assert made == []
    store_proof(passed("training", "has nothing to do with it"))
    transfers_for(device)
    assert made == [device]


def test_synchronous_activation_copies_give_the_same_gradients_and_a_decision() -> None:
    model = proving._Chain()
    offload = ActivationOffload(smallest=1, transfers=WaitingTransfers(reason="unproven here"))

    def gradients(run: Callable[..., Any]) -> list[Any]:
        x = torch.ones(2, 512, requires_grad=True)
        model.zero_grad()
        for layer in model.layers:
            x = run(layer, x)
        torch.autograd.backward(x.square().mean())
        return [parameter.grad for parameter in model.parameters()]

    wanted = gradients(lambda layer, x: layer(x))
    found = gradients(offload.checkpoint)
    assert all(map(torch.equal, found, wanted))
    assert offload.counts.stored > 3
    (decision,) = offload.decisions
    assert (decision.after, "unproven here" in decision.reason) == (
        "host, with synchronous copies",
        True,
    )


# -- The environment variable and the first start.


def test_the_proof_variable_accepts_only_its_values() -> None:
    found = [proof_setting({VARIABLE: value}) for value in ("", " OFF ", "first")]
    assert found == ["first", "off", "first"]
    with pytest.raises(InvalidValueError, match="ZEROTUNE_PROOF = 'yes'"):
        proof_setting({VARIABLE: "yes"})


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Proof | str | None]]:
    """Return a list to fill with proof processes' results: a proof, an error text, or ``None``."""
    planned: list[Proof | str | None] = []

    def run(_accelerator: str) -> str | None:
        left = planned.pop(0)
        if isinstance(left, Proof):
            store_proof(left)
            return None
        return left

    monkeypatch.setattr(proofs, "_run_command", run)
    proofs._attempted.clear()
    yield planned
    proofs._attempted.clear()


def start(accelerator: Any = "cuda") -> Any:
    (decision,) = proofs.prove_first(accelerator, ProcessGroup.alone())
    return decision


def test_the_first_start_runs_the_proof_and_the_second_reads_it(runs: Any) -> None:
    runs.append(passed())
    assert start().after == ", ".join(PATHS)
    assert start().after == ", ".join(PATHS)
    assert runs == []


def test_a_failed_check_gives_a_warning_that_names_the_report(runs: Any) -> None:
    runs.append(passed("page-locked copies", "copy 3 differs"))
    decision = start()
    assert decision.severity == "warning"
    assert decision.after == "nothing, plain paths"
    assert str(proof_path(CARD)) in decision.reason


@pytest.mark.parametrize("left", [None, "exit code -9: killed"])
def test_a_proof_process_without_a_result_is_not_repeated_at_every_start(
    runs: Any, left: Any
) -> None:
    runs.append(left)
    decision = start()
    assert (decision.after, decision.severity) == ("nothing, plain paths", "warning")
    assert (left or "nothing is proven yet") in decision.reason
    assert "zerotune doctor --prove" in start().reason


def test_off_runs_no_proof_and_takes_plain_paths_all_the_same(
    runs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "off")
    store_proof(passed())
    assert (start().after, runs) == ("nothing, plain paths", [])
    assert "=off" in str(proofs.why_unproven("host engine", accelerator="cuda"))


def test_no_proof_runs_automatically_on_a_cpu(runs: Any) -> None:
    assert proofs.prove_first("cpu", ProcessGroup.alone()) == ()
    assert runs == []
    store_proof(passed())
    assert start("cpu").after == ", ".join(PATHS)


def test_only_the_first_rank_of_a_machine_runs_the_proof(runs: Any) -> None:
    waited = []
    group: Any = SimpleNamespace(local_rank=1, barrier=lambda purpose, **_: waited.append(purpose))
    (decision,) = proofs.prove_first("cuda", group)
    assert len(waited) == 1
    assert "nothing is proven yet" in decision.reason
    assert runs == []


def test_a_proof_process_does_not_inherit_the_launchers_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    found = proofs._environment()
    assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID"} & {*found}
    assert found["CUDA_VISIBLE_DEVICES"] == "3"
    assert found[VARIABLE] == "off", "it starts no proof of its own"


def test_a_proof_process_that_hangs_is_killed_with_its_children(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mark = tmp_path / "child"
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\nsleep 60 & echo $! > {mark}\nwait\n")
    script.chmod(0o755)
    monkeypatch.setattr(proofs.sys, "executable", str(script))
    assert proofs._run_command("cuda", 4.0) == "did not finish within 4 s"
    child = int(mark.read_text())
    deadline = time.monotonic() + 60
    while psutil.pid_exists(child) and psutil.Process(child).status() != "zombie":
        assert time.monotonic() < deadline, "its child was left running"
        time.sleep(0.05)


def test_the_last_output_line_of_a_failed_proof_process_is_recorded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho first\necho no driver here\nexit 3\n")
    script.chmod(0o755)
    monkeypatch.setattr(proofs.sys, "executable", str(script))
    assert proofs._run_command("cuda", 30.0) == "exit code 3: no driver here"


# -- Faults that a proof must find.


def outcome_of(name: str) -> Outcome:
    return proving.run_check(name, detect_platform(log=False))


def test_rounding_that_differs_from_the_compiled_kernels_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert outcome_of("bf16 rounding").passed
    monkeypatch.setattr(proving, "torch_rounds_alike", lambda _op: False)
    assert "torch rounds differently" in outcome_of("bf16 rounding").detail


def test_copies_are_not_checked_where_training_uses_host_memory() -> None:
    outcome = outcome_of("page-locked copies")
    assert (outcome.passed, "host memory" in outcome.detail) == (None, True)


def test_training_is_not_checked_without_deepspeed() -> None:
    outcome = proving.run_check("training", Platform.synthetic(deepspeed=False))
    assert (outcome.passed, "DeepSpeed" in outcome.detail) == (None, True)


def faulty_host_engine() -> list[Outcome]:
    """Return the results of the check with right passes, and with passes that forget EMAs.

    First passes of weights on the device forget EMAs, then those of streamed weights.
    """
    take = passes.UnitPass.take
    outcomes = [outcome_of("training")]
    for resident in (True, False):

        def forgets_emas(self: Any, resident: bool = resident) -> None:
            if self.unit.resident is resident:
                # An EMA that joins after all passes is updated without them, and rightly.
                until = time.monotonic() + 0.1
                while not self._ema_updates and time.monotonic() < until:
                    time.sleep(0.001)
                self._ema_updates = []
            take(self)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(passes.UnitPass, "take", forgets_emas)
            outcomes.append(outcome_of("training"))
    return outcomes


@pytest.mark.deepspeed
def test_planted_faults_of_the_host_engine_are_detected() -> None:
    ((right, resident, streamed),) = run_ranks(faulty_host_engine)
    assert right.passed, right
    assert resident.passed is streamed.passed is False
    assert "host engine: EMA" in resident.detail
    assert "streamed weights: EMA" in streamed.detail


def test_the_host_engine_is_the_default_once_it_is_proven(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    op = SimpleNamespace(knows=lambda _: True)
    monkeypatch.setattr(obstacles, "load_host_step", lambda: op)
    card = Platform.synthetic("cuda", vram=2**34, ram=2**40)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))

    def why_not(engine: Any = None, **build: Any) -> str | None:
        plan = DeepSpeedPlan.build(precision="bf16", offload="cpu", **build)
        settled = OptimizerResolver().resolve(plan.resolve(platform=card, engine=engine))
        return why_not_hosted(settled, model)

    monkeypatch.setattr(obstacles, "find_units", lambda *_: [("0", model[0])])
    in_host_memory = {"stage": 3, "offload_param": "cpu"}
    for plan in ({"stage": 2}, in_host_memory):
        assert "nothing is proven yet" in str(why_not(**plan))
    store_proof(passed("training", "weights differ"))
    for plan in ({"stage": 2}, in_host_memory):
        assert "the check of training failed" in str(why_not(**plan))
        assert why_not(engine="host", **plan) is None
    store_proof(passed())
    for plan in ({"stage": 2}, in_host_memory):
        assert why_not(**plan) is None
        assert 'engine="deepspeed"' in str(why_not(engine="deepspeed", **plan))


def test_a_check_that_raises_counts_as_failed_and_keeps_its_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(proving.CHECKS, "training", lambda *_: 1 // 0)  # type: ignore[arg-type]
    outcome = outcome_of("training")
    assert (outcome.passed, outcome.detail[:17]) == (False, "ZeroDivisionError")
    assert "Traceback" in outcome.evidence


def test_a_failed_compilation_is_no_failed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise PlatformError("no C++ compiler is installed", key="op host_step")

    monkeypatch.setattr(proving, "load_host_step", fail)
    monkeypatch.setitem(proving.CHECKS, "training", lambda *_: None)  # type: ignore[arg-type]
    proof = proving.prove()
    assert proof.failed == ()
    assert "was not run" in str(proof.obstacle("host engine"))
    assert "no C++ compiler is installed" in str(proof.obstacle("host engine"))


def test_engines_of_a_proof_start_no_proof_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def check(*_: Any) -> None:
        seen.append(proof_setting())

    monkeypatch.setitem(proving.CHECKS, "training", check)  # type: ignore[arg-type]
    assert outcome_of("training").passed
    assert (seen, proof_setting()) == (["off"], "first")


@pytest.mark.gpu
@pytest.mark.deepspeed
def test_a_gpu_proves_its_fast_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    (proof,) = run_ranks(proving.prove)
    assert proof.error is None
    assert proof.failed == (), proof
    assert proof.obstacle("host engine") is None
    assert proof.obstacle("activation offload") is None
