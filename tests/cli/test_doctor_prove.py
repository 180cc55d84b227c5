"""``zerotune doctor --prove``, and where its results are used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_ranks
from tests.support.runs import Case, start
from zerotune.backend import proof as proofs
from zerotune.backend.proof import PATHS, Combination, Outcome, Proof, load_proof, store_proof
from zerotune.cli import doctor, main
from zerotune.platform import detect_platform
from zerotune.training import proving


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(proofs.VARIABLE, raising=False)
    return tmp_path


def proof(**failed: str) -> Proof:
    checks = {name: Outcome(passed=True, seconds=1.0) for name in proving.CHECKS}
    checks |= {name: Outcome(passed=False, detail=detail) for name, detail in failed.items()}
    return Proof(combination=Combination.here("cpu"), checks=checks)


def explained() -> str:
    from tests.support.models import tiny_unet

    engine = start(Case(stage=2, offload="cpu", precision="bf16"), tiny_unet())
    text: str = engine.explain()
    engine.close()
    return text


# The suite runs its checks: tests/backend/test_proof.py and tests/device/test_proof.py.
@pytest.mark.nightly
@pytest.mark.deepspeed
def test_a_cpu_proves_its_fast_paths_and_engines_report_it(cache: Path) -> None:
    assert proofs._run_command("cpu") is None
    found = load_proof(Combination.here("cpu"))
    assert isinstance(found, Proof), found
    assert (found.error, found.failed) == (None, ()), found
    assert list(found.checks) == list(proving.CHECKS)
    assert [path.suffix for path in (cache / "zerotune" / "proofs").iterdir()] == [".json"]
    shown = doctor.Checkup.of(detect_platform(log=False)).to_dict()["proof"]
    assert "training uses host memory" in shown["unproven"]["host engine"]
    (text,) = run_ranks(explained, env={"XDG_CACHE_HOME": str(cache)})
    assert "proof: unset -> " in text
    assert f"{len(proving.CHECKS)} checks in" in text


@pytest.mark.parametrize(
    ("failed", "status"), [({}, 0), ({"page-locked copies": "copy 3 differs"}, 1)]
)
def test_the_command_stores_its_proof_and_fails_if_a_check_failed(
    failed: dict[str, str], status: int, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(proving, "prove", lambda **_: proof(**failed))
    assert main(["doctor", "--prove", "--json"]) == status
    printed = capsys.readouterr()
    data = json.loads(printed.out)["proof"]
    assert data["checks"]["page-locked copies"]["passed"] is not bool(failed)
    paths = {"host engine", "activation offload"}
    assert set(data["unproven"]) == (paths if failed else set())
    assert ("report this failure with the file" in printed.err) == bool(failed)
    assert load_proof(Combination.here("cpu")).failed == tuple(failed)  # type: ignore[union-attr]


def test_doctor_shows_proven_paths_and_why_others_are_not(capsys: Any) -> None:
    main(["doctor"])
    assert "nothing is proven yet" in " ".join(capsys.readouterr().out.split())
    store_proof(proof(**{"page-locked copies": "copy 3 differs"}))
    main(["doctor"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "Fast paths" in shown
    assert "the check of page-locked copies failed on this device (copy 3 differs)" in shown
    assert all(path in shown for path in PATHS)
