"""The campaign counts results, is reproducible, and finds nothing in a short run."""

from __future__ import annotations

from functools import partial

import pytest

from stress.faults.__main__ import CLASSES
from stress.faults.campaign import Found, Missed, NotHere, campaign, table
from stress.faults.ranks import ENDING, Fault, RankFaults


class Faults:
    """A class of faults whose injection is a given function."""

    def __init__(self, inject, drawn=None):
        self._inject, self._drawn, self.closed = inject, drawn if drawn is not None else [], False

    def inject(self, work, chance):
        assert list(work.iterdir()) == []
        self._drawn.append(chance.random())
        return self._inject()

    def close(self):
        self.closed = True


def fails(error):
    raise error


def test_findings_are_counted_by_kind_and_named_so_that_they_can_be_repeated(capsys):
    made = {
        "good": lambda: 3.5,
        "lost": lambda: fails(Found("lost", "a step")),
        "foreign": lambda: fails(ValueError("raw \ud800")),
        "not here": lambda: fails(NotHere("no disk")),
        "missed": lambda: fails(Missed()),
    }
    classes = {name: partial(Faults, inject) for name, inject in made.items()}
    rows = {row.name: row for row in campaign(classes, seed=1, minutes=1, first=7, times=2)}
    assert (rows["good"].injected, rows["good"].bad, rows["good"].worst_s) == (2, 0, 3.5)
    assert (rows["lost"].injected, rows["lost"].counts["lost"]) == (2, 2)
    assert (rows["foreign"].injected, rows["foreign"].counts["foreign"]) == (2, 2)
    assert (rows["not here"].injected, rows["not here"].why_not) == (0, "not here: no disk")
    assert (rows["missed"].tried, rows["missed"].injected, rows["missed"].bad) == (2, 0, 0)
    said = capsys.readouterr().out
    assert "lost #7: lost: a step\n" in said
    assert "lost #8: lost: a step\n" in said
    assert "foreign #7: foreign: ValueError: raw \\ud800\n" in said
    assert "not here: no disk" in table(rows.values())


@pytest.mark.nightly
@pytest.mark.deepspeed
@pytest.mark.parametrize("name", list(CLASSES))
def test_every_class_of_faults_injects_without_findings(name, capsys):
    often = {"damaged checkpoints": 5, "disks": 5, "NaN": 2}
    (row,) = campaign({name: CLASSES[name]}, seed=15, minutes=10, times=often.get(name, 1))
    if row.why_not:
        pytest.skip(row.why_not)
    assert row.injected == often.get(name, 1)
    assert row.bad == 0, capsys.readouterr().out


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("lost", [pytest.param(0, marks=pytest.mark.nightly), 1])
@pytest.mark.parametrize(
    "what", ["kill", *(pytest.param(what, marks=pytest.mark.nightly) for what in ENDING[1:])]
)
def test_a_rank_lost_under_a_separate_launch_agent_is_named(what, lost, world_size, tmp_path):
    fault = Fault(
        what=what,
        lost=lost,
        world_size=world_size,
        stage=None,
        moment="backward",
        step=1,
        torchrun=True,
        background=False,
        machines=True,
        nvme=False,
    )
    faults = RankFaults.__new__(RankFaults)  # Skips __init__, which compiles ops for swapping.
    faults.suffer(tmp_path, fault)
    assert (tmp_path / f"pid-{lost}").exists()
