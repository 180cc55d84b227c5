from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from zerotune.plan import ModelFacts, ParameterFacts, sizing

SHAPES = st.lists(st.lists(st.integers(0, 400), max_size=3).map(tuple), min_size=1, max_size=30)


def model(*shapes, frozen=()):
    return ModelFacts(
        parameters=[
            ParameterFacts(name=f"p{index}", shape=tuple(shape), trainable=index not in frozen)
            for index, shape in enumerate(shapes)
        ]
    )


def test_the_bucket_holds_the_largest_tensor_of_a_large_model():
    assert sizing.reduce_bucket(model((40_000_000,), (10,))) == 40_000_000
    assert sizing.reduce_bucket(model((20_000_000,), (20_000_000,))) == 30_000_000


def test_the_bucket_is_no_larger_than_what_is_trained():
    assert sizing.reduce_bucket(model((100, 100), (50, 50))) == 12_500
    assert sizing.reduce_bucket(model((100, 100), (50, 50), frozen={0})) == 10_000
    assert sizing.reduce_bucket(None) == sizing.REDUCE_BUCKET
    assert sizing.reduce_bucket(model()) == sizing.REDUCE_BUCKET


@settings(deadline=None)
@given(SHAPES)
def test_at_most_one_percent_stays_unpartitioned_and_no_larger_threshold_does(shapes):
    facts = model(*shapes)
    threshold, persistent = sizing.persistence_threshold(facts)

    def left(limit):
        return sum(p.numel for p in facts.parameters if p.numel <= limit)

    assert persistent == left(threshold)
    assert persistent <= 0.01 * facts.numel
    larger = [p.numel for p in facts.parameters if threshold < p.numel <= sizing.PERSISTENCE_LIMIT]
    if larger:
        assert left(min(larger)) > 0.01 * facts.numel


def test_a_small_model_is_really_partitioned():
    facts = model((64, 64), (64, 64), (64,))
    assert sizing.persistence_threshold(facts) == (64, 64)
    assert sizing.persistence_threshold(model((8, 8), (8, 8))) == (0, 0)


def test_partitions_are_padded_to_the_world_size():
    (parameter,) = model((5, 3)).parameters
    assert sizing.partition(parameter, 4) == 4
    (scalar,) = model(()).parameters
    assert sizing.partition(scalar, 2) == 1


def test_only_partitions_of_a_mebibyte_leave_host_memory():
    (parameter,) = model((1024, 512)).parameters
    assert sizing.swappable(parameter, 1, element_bytes=2, block_bytes=1)
    assert not sizing.swappable(parameter, 2, element_bytes=2, block_bytes=1)
    assert not sizing.swappable(parameter, 1, element_bytes=2, block_bytes=2**21)


def test_buffers_are_enough_for_what_is_fetched_ahead():
    layers = model(*[(1024, 1024)] * 40)
    count = sizing.param_buffer_count(
        layers, 1, ahead=10 * 1024**2, element_bytes=2, block_bytes=2**20
    )
    # Eleven consecutive layers can be resident or on their way, and four are spare.
    assert count == 11 + 4


def test_buffers_are_never_more_than_can_be_used():
    few = model((1024, 1024), (1024, 1024), (10,))
    count = sizing.param_buffer_count(few, 1, ahead=10**9, element_bytes=2, block_bytes=2**20)
    assert count == sizing.PARAM_BUFFERS
    assert (
        sizing.param_buffer_count(None, 1, ahead=1, element_bytes=2, block_bytes=1)
        == sizing.PARAM_BUFFERS
    )


@settings(deadline=None)
@given(SHAPES, st.integers(1, 8))
def test_sizes_are_always_positive(shapes, world_size):
    facts = model(*shapes)
    assert sizing.reduce_bucket(facts) >= 1
    assert sizing.prefetch_bucket(facts) >= facts.largest
    assert sizing.max_live(facts) >= facts.largest
    assert (
        sizing.param_buffer_count(
            facts, world_size, ahead=10**6, element_bytes=2, block_bytes=2**20
        )
        >= sizing.PARAM_BUFFERS
    )
