from __future__ import annotations

from zerotune.optimizers.catalogue import OPTIMIZERS
from zerotune.optimizers.parameters import Parameter

ADAMW = OPTIMIZERS["AdamW"]


def test_a_range_reads_as_words():
    assert ADAMW.parameter("lr").range == "a number > 0"
    assert ADAMW.parameter("betas").range == "2 numbers >= 0 and < 1"
    assert ADAMW.parameter("torch_adam").range == "true or false"
    kind = Parameter(name="warmup_type", type="str", choices=("log", "linear"))
    assert kind.range == "one of 'log', 'linear'"
