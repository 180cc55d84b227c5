"""Several shadows updated in one pass equal separate shadows."""

from __future__ import annotations

import pytest
import torch

from tests.ema.test_shadow import move
from tests.support.models import HostileNet
from zerotune.backend.deepspeed.external import master_weights_of
from zerotune.ema import EMAShadow, EMAShadows, HalfLife, WarmupDecay
from zerotune.errors import InvalidValueError


def shadows() -> dict[str, EMAShadow]:
    return {
        "fast": EMAShadow(decay=HalfLife(steps=3)),
        "slow": EMAShadow(decay=HalfLife(steps=1000), start_after=2),
        "seldom": EMAShadow(decay=WarmupDecay(), update_every=3),
    }


def test_a_group_equals_single_shadows_with_one_read_per_step(monkeypatch):
    model = HostileNet()
    master = master_weights_of(model)
    group, singles = EMAShadows(shadows=shadows()).attach(master), shadows()
    for single in singles.values():
        single.attach(model)
    reads = []
    read = master._read_slabs
    monkeypatch.setattr(master, "_read_slabs", lambda: reads.append(1) or read())
    for step in range(1, 8):
        move(model, seed=step)
        group.step()
        for single in singles.values():
            single.step()
        assert len(reads) == step
    monkeypatch.undo()
    assert list(group) == list(singles)
    for name, single in singles.items():
        assert group[name].steps == 7
        averages = dict(single.gather())
        assert all(torch.equal(full, averages[key]) for key, full in group[name].gather())
    assert group.nbytes == sum(single.nbytes for single in singles.values())
    assert "slow: EMA: HalfLife(" in group.explain()


def test_nothing_is_read_unless_a_shadow_is_due(monkeypatch):
    master = master_weights_of(HostileNet())
    group = EMAShadows(shadows={"one": EMAShadow(decay=0.9, update_every=2)}).attach(master)
    monkeypatch.setattr(master, "_read_slabs", lambda: pytest.fail("nothing to do"))
    group.step()
    assert group["one"].steps == 1


def test_an_empty_group_and_a_shadow_under_two_names_are_refused():
    with pytest.raises(InvalidValueError, match="exactly one name"):
        EMAShadows(shadows={})
    one = EMAShadow(decay=0.9)
    with pytest.raises(InvalidValueError, match="exactly one name"):
        EMAShadows(shadows={"a": one, "b": one})
