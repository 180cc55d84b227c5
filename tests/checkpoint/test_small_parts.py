"""Random generators, buffers and plain data."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zerotune.checkpoint.contents import persistent_buffers, plain_data
from zerotune.checkpoint.generators import capture_generators, restore_generators
from zerotune.errors import CheckpointCorruptError, CheckpointError


@pytest.fixture(autouse=True)
def own_generators():
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    yield
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


def draw():
    return (
        torch.randn(5).tolist(),
        np.random.normal(size=3).tolist(),
        [random.gauss(0, 1), random.random()],
    )


def test_restored_generators_continue_where_they_were():
    torch.manual_seed(1)
    np.random.seed(2)
    random.seed(3)
    draw()  # An odd number of normal variates leaves one cached in numpy and in random.
    tensors, text = capture_generators()
    expected = [draw() for _ in range(3)]
    torch.manual_seed(9)
    np.random.seed(9)
    random.seed(9)
    restore_generators({key: tensor.clone() for key, tensor in tensors.items()}, text)
    assert [draw() for _ in range(3)] == expected


@pytest.mark.parametrize("text", ["", "{}", '{"numpy": [1], "python": [3, null]}'])
def test_invalid_generator_states_are_refused(text):
    tensors, _ = capture_generators()
    with pytest.raises(CheckpointCorruptError, match="random number generators"):
        restore_generators(tensors, text)


def test_only_persistent_buffers_are_saved_and_shared_ones_once():
    class Part(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("kept", torch.ones(2))
            self.register_buffer("scratch", torch.ones(2), persistent=False)
            self.register_buffer("absent", None)

    model = torch.nn.Sequential(Part(), torch.nn.BatchNorm1d(3), Part())
    model[2].kept = model[0].kept
    expected = {name for name in model.state_dict() if name not in dict(model.named_parameters())}
    assert set(persistent_buffers(model)) == expected - {"2.kept"}
    assert "0.kept" in persistent_buffers(model)


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(plain)
def test_plain_data_survives_a_round_trip_through_json(value):
    import json

    assert plain_data(value, "extra") == json.loads(json.dumps(value)) == value


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ({"a": [1, {"b": object()}]}, "extra.a[1].b"),
        ([float("inf")], "extra[0]"),
        ({"a": {(1, 2): 3}}, "extra.a"),
        (np.float64(1.5), None),
        (np.int64(1), "extra"),
        ({1, 2}, "extra"),
        (b"bytes", "extra"),
    ],
)
def test_values_that_json_would_change_are_named(value, key):
    if key is None:
        assert plain_data(value, "extra") == 1.5  # A float64 is a Python float.
        return
    with pytest.raises(CheckpointError) as caught:
        plain_data(value, "extra")
    assert caught.value.key == key
