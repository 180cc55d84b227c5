from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from zerotune.plan import ModelFacts
from zerotune.plan.facts import ParameterFacts
from zerotune.plan.resolve import sizes as sizing

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


def test_the_bucket_is_no_larger_than_the_trained_weights():
    assert sizing.reduce_bucket(model((100, 100), (50, 50))) == 12_500
    assert sizing.reduce_bucket(model((100, 100), (50, 50), frozen={0})) == 2_500
    assert sizing.reduce_bucket(None) == sizing.REDUCE_BUCKET
    assert sizing.reduce_bucket(model()) == sizing.REDUCE_BUCKET


@settings(deadline=None)
@given(SHAPES)
def test_at_most_one_percent_stays_unpartitioned_and_the_threshold_is_maximal(shapes):
    facts = model(*shapes)
    threshold, persistent = sizing.persistence_threshold(facts)

    def left(limit):
        return sum(p.numel for p in facts.parameters if p.numel <= limit)

    assert persistent == left(threshold)
    assert persistent <= 0.01 * facts.numel
    larger = [p.numel for p in facts.parameters if threshold < p.numel <= sizing.PERSISTENCE_LIMIT]
    if larger:
        assert left(min(larger)) > 0.01 * facts.numel


def swapping(facts, world_size=1, element_bytes=2, block_bytes=1):
    return sizing.Swapping(
        model=facts, world_size=world_size, element_bytes=element_bytes, block_bytes=block_bytes
    )


def test_only_partitions_of_at_least_one_mebibyte_are_swapped():
    facts = model((1024, 512))
    (parameter,) = facts.parameters
    assert swapping(facts).swapped == [parameter]
    assert swapping(facts).largest == parameter
    assert swapping(facts, world_size=2).swapped == []
    assert swapping(facts, world_size=2, element_bytes=4).swapped == [parameter]
    assert swapping(facts, block_bytes=2**21).swapped == []
    assert swapping(facts, block_bytes=2**21).largest is None


def test_parameters_stay_in_host_memory_where_they_may_unless_frozen():
    large = (1024, 1024)
    assert swapping(model(large)).happens(0)
    assert swapping(model(large)).happens(1024**2 - 1)
    assert not swapping(model(large)).happens(1024**2)
    assert swapping(model(large, frozen={0})).happens(1024**2)
    assert not swapping(model((10,))).happens(0)


def test_a_sub_group_closes_once_it_reaches_its_size():
    facts = model((60,), (60,), (60,), (60,), frozen={3})
    assert sizing.largest_sub_group(facts, 1, 100) == 160
    assert sizing.largest_sub_group(facts, 1, 10**9) == 180
    assert sizing.largest_sub_group(facts, 2, 10**9) == 90


@settings(deadline=None)
@given(SHAPES, st.integers(1, 8))
def test_sizes_are_always_positive(shapes, world_size):
    facts = model(*shapes)
    assert sizing.reduce_bucket(facts) >= 1
    assert sizing.prefetch_bucket(facts) >= facts.largest
    assert sizing.max_live(facts) >= facts.largest
    assert swapping(facts, world_size).buffers >= sizing.PARAM_BUFFERS
