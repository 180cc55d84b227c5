"""SIGKILL at every point of a save that replaces a checkpoint: a complete one always remains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.checkpoint.runs import hostile
from tests.support.killing import comes_to_its_end
from tests.support.ranks import ranks
from tests.support.runs import PLAIN


def mark(engine: Any, number: int) -> None:
    """Fill the weights with the number of the save."""
    with engine.master_weights.editing() as fragments:
        for fragment in fragments:
            fragment.value.fill_(number)


def save_and_die(engine: Any, folder: Path, *, number: int, moment: int) -> bool:
    """Save in a child process that is killed on the way; return whether it finished."""
    from zerotune.checkpoint import save_checkpoint

    def save() -> None:
        mark(engine, number)
        save_checkpoint(folder, engine=engine, extra={"number": number})

    return comes_to_its_end(save, moment=moment)


@ranks(1)
def test_a_complete_checkpoint_survives_every_kill(tmp_path):
    from zerotune.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint

    engine = hostile(PLAIN, seed=0)
    folder = tmp_path / "step-00000007"
    mark(engine, 0)
    save_checkpoint(folder, engine=engine, extra={"number": 0})
    seen, stood_in, moment, complete = [], 0, 0, False
    while not complete:
        complete = save_and_die(engine, folder, number=moment + 1, moment=moment)
        stood_in += not folder.exists()
        assert latest_checkpoint(tmp_path) == folder
        number = load_checkpoint(folder, engine=engine).extra["number"]
        values = {float(value) for f in engine.master_weights.read() for value in f.value}
        assert values == {float(number)}, "weights of another save than the manifest's"
        assert number in (moment + 1, *seen[-1:], 0)
        seen.append(number)
        moment += 1
    leftovers = [path.name for path in tmp_path.iterdir()]
    engine.close()
    assert moment > 30, "the kills did not come in the midst of the save"
    assert len(set(seen)) > 1
    assert seen[-1] == moment
    assert stood_in >= 1, "no kill came between the two renames"
    assert leftovers == ["step-00000007"]
