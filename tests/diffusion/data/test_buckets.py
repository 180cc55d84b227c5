"""Bucket sizes, and the order of 10,000 images of 40 kinds over ranks and restarts."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zerotune.diffusion.data import AspectBuckets, BucketStream
from zerotune.diffusion.data.batches import Captions, stack_samples
from zerotune.diffusion.data.buckets import Bucket
from zerotune.diffusion.data.order import BucketOrder
from zerotune.errors import DataError, InvalidValueError

sides = st.integers(1, 9000)


class Numbers:
    """A bucketed dataset whose samples are their own indices."""

    def __init__(self, sizes, *, minimum=1, identity="numbers"):
        self.assignment = AspectBuckets().assign(sizes, minimum=minimum)
        self.identity = identity

    def __getitem__(self, draw):
        bucket = self.assignment.placements[draw.index].bucket
        return {
            "use": torch.tensor([draw.epoch, draw.index]),
            "images": torch.empty(bucket.height // 64, bucket.width // 64),
        }


@pytest.fixture(scope="module")
def many_sizes():
    """Return 10,000 sizes of 40 kinds, most of them common, some with a handful of images."""
    draw = random.Random(7)
    kinds = [(draw.randint(400, 5000), draw.randint(400, 5000)) for _ in range(40)]
    sizes = kinds + draw.choices(kinds, weights=[1 / (n + 1) for n in range(40)], k=9960)
    draw.shuffle(sizes)
    assert len(set(sizes)) == 40
    return sizes


def streams(dataset, *, ranks, micro, **options):
    return [
        BucketStream(dataset, micro_batch_size=micro, rank=rank, world_size=ranks, **options)
        for rank in range(ranks)
    ]


def take(group, steps):
    """Take micro batches of all ranks in global order, each a list of (epoch, index)."""
    return [
        [tuple(use) for use in next(stream)["use"].tolist()]
        for _ in range(steps)
        for stream in group
    ]


@pytest.mark.parametrize(
    ("buckets", "square", "step"),
    [
        (AspectBuckets(), 1024, 64),
        (AspectBuckets(area=1024 * 768), 832, 64),
        (AspectBuckets(area=128 * 128, step=8), 128, 8),
    ],
)
def test_buckets_fill_their_area_in_steps_and_include_the_square(buckets, square, step):
    assert Bucket(width=square, height=square) in buckets.sizes
    assert len(buckets.sizes) > 8
    for bucket in buckets.sizes:
        assert bucket.width * bucket.height <= buckets.area
        assert bucket.width % step == bucket.height % step == 0
        assert 0.5 <= bucket.aspect <= 2
        assert Bucket(width=bucket.height, height=bucket.width) in buckets.sizes
        # Neither side can grow by a step: the area is used as far as possible.
        grown = (bucket.width + step) * bucket.height, bucket.width * (bucket.height + step)
        at_limit = max(bucket.aspect, 1 / bucket.aspect) > 1.8
        assert at_limit or bucket.aspect == 1 or min(grown) > buckets.area


def test_the_default_buckets_include_the_training_sizes_of_sdxl():
    # The training sizes in the SDXL paper's appendix, up to 2:1.
    listed = {(704, 1408), (768, 1344), (832, 1216), (896, 1152), (960, 1088), (1024, 1024)}
    ours = {(bucket.width, bucket.height) for bucket in AspectBuckets().sizes}
    assert {(w, h) for w, h in listed if w * h <= 1024 * 1024 and 2 * w >= h} - ours == set()


@settings(max_examples=200, deadline=None)
@given(width=sides, height=sides)
def test_every_image_is_scaled_to_just_cover_the_nearest_bucket(width, height):
    placement = AspectBuckets().place((width, height))
    assert min(placement.excess) == 0
    assert placement.scale == pytest.approx(
        max(placement.bucket.width / width, placement.bucket.height / height)
    )
    for side, original in zip(placement.resized, (width, height), strict=True):
        assert abs(side - original * placement.scale) <= 0.5 + 1e-6 * side
    nearest = min(abs(math.log(b.aspect / (width / height))) for b in AspectBuckets().sizes)
    assert abs(math.log(placement.bucket.aspect / (width / height))) == pytest.approx(nearest)


def test_rare_buckets_join_fuller_ones_and_the_move_is_recorded():
    sizes = [(1024, 1024)] * 8 + [(960, 1088)] * 2 + [(2000, 1000)] * 4
    assignment = AspectBuckets().assign(sizes, minimum=4)
    assert sum(map(len, assignment.members.values())) == 14
    assert assignment.placements[8].bucket == Bucket(width=1024, height=1024)
    assert assignment.placements[8].resized == (1024, 1161)
    (merged, enlarged) = assignment.decisions
    assert (merged.before, merged.after) == (3, 2)
    assert "2 images" in merged.reason
    assert "960x1088" in merged.reason
    assert enlarged.severity == "warning"
    assert "1024x1024  10" in assignment.table()
    lonely = AspectBuckets().assign([(100, 100), (100, 200)], minimum=9)
    assert len(lonely.members) == 1


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_none_of_10000_images_is_lost_or_duplicated(many_sizes, ranks):
    dataset = Numbers(many_sizes)
    group = streams(dataset, ranks=ranks, micro=4, seed=5)
    steps = math.ceil(2 * group[0].steps_per_epoch) + len(dataset.assignment.members)
    batches = take(group, steps)
    assert all(len(batch) == 4 for batch in batches)
    uses = Counter(use for batch in batches for use in batch)
    assert max(uses.values()) == 1
    for epoch in range(2):
        assert {index for seen, index in uses if seen == epoch} == set(range(10_000))
    for batch in batches:
        assert len({dataset.assignment.placements[index].bucket for _, index in batch}) == 1
    # Images come within their epoch, except in micro batches completed across two epochs.
    first = Counter(epoch for batch in batches[: 10_000 // 4] for epoch, _ in batch)
    assert first[0] > 10_000 - 4 * len(dataset.assignment.members)


def test_the_order_does_not_depend_on_the_number_of_ranks(many_sizes):
    dataset = Numbers(many_sizes)
    alone = take(streams(dataset, ranks=1, micro=4, seed=1), 600)
    assert take(streams(dataset, ranks=2, micro=4, seed=1), 300) == alone
    assert take(streams(dataset, ranks=3, micro=4, seed=1), 200) == alone
    assert take(streams(dataset, ranks=1, micro=4, seed=2), 600) != alone
    buckets = [dataset.assignment.placements[batch[0][1]].bucket for batch in alone]
    assert buckets != sorted(buckets)


small = st.lists(st.sampled_from([(1000, 1000), (1000, 2000), (1500, 1000)]), min_size=1)


@settings(max_examples=25, deadline=None)
@given(sizes=small, before=st.integers(0, 30), ranks=st.integers(1, 3), later=st.integers(1, 3))
def test_a_resumed_stream_continues_exactly_on_any_ranks(sizes, before, ranks, later):
    dataset = Numbers(sizes)
    first = streams(dataset, ranks=ranks, micro=3, seed=2)
    seen = take(first, before)
    state = first[0].state_dict()
    assert all(stream.state_dict() == state for stream in first)
    again = streams(dataset, ranks=later, micro=3, seed=77)
    for stream in again:
        stream.load_state_dict(state)
    seen += take(again, 12)
    assert seen == take(streams(dataset, ranks=1, micro=3, seed=2), len(seen))


@settings(max_examples=25, deadline=None)
@given(sizes=small, before=st.integers(0, 30), micro=st.integers(1, 5), epochs=st.integers(1, 2))
def test_another_micro_batch_size_continues_with_the_unused_samples(sizes, before, micro, epochs):
    dataset = Numbers(sizes)
    (stream,) = streams(dataset, ranks=1, micro=3, seed=2)
    uses = Counter(use for batch in take([stream], before) for use in batch)
    for size in (micro, 2):
        (changed,) = streams(dataset, ranks=1, micro=size)
        changed.load_state_dict(stream.state_dict())
        assert changed.epoch == pytest.approx(sum(uses.values()) / len(sizes))
        uses.update(use for batch in take([changed], 7) for use in batch)
        stream = changed
    assert max(uses.values()) == 1
    per_image = {index: sorted(e for e, i in uses if i == index) for _, index in uses}
    assert all(epochs == list(range(len(epochs))) for epochs in per_image.values())


def test_reading_ahead_in_workers_does_not_move_the_position(many_sizes):
    dataset = Numbers(many_sizes[:200])
    (stream,) = streams(dataset, ranks=1, micro=2, num_workers=1)
    seen = take([stream], 3)
    (again,) = streams(dataset, ranks=1, micro=2)
    again.load_state_dict(stream.state_dict())
    del stream
    whole = take(streams(dataset, ranks=1, micro=2), 6)
    assert seen + take([again], 3) == whole


def test_one_epoch_without_shuffling_keeps_the_given_order():
    order = BucketOrder(buckets=((0, 2, 4), (1, 3)), micro_batch_size=1, shuffle=False)
    batches = order.batches(0)
    assert [next(batches)[0].index for _ in range(7)] == [0, 2, 4, 1, 3, 0, 2]


def test_other_data_small_buckets_and_invalid_values_are_refused_by_name():
    sizes = [(1024, 1024)] * 5 + [(1024, 2048)]
    (stream,) = streams(Numbers(sizes), ranks=1, micro=2)
    assert "704x1408 (1)" in stream.decisions[0].reason
    assert streams(Numbers(sizes, minimum=2), ranks=1, micro=2)[0].decisions == ()
    for other in (Numbers(sizes[::-1]), Numbers(sizes, identity="others")):
        with pytest.raises(DataError, match="have changed"):
            streams(other, ranks=1, micro=2)[0].load_state_dict(stream.state_dict())
    for call, words in (
        (lambda: AspectBuckets(max_aspect=0.5), "max_aspect"),
        (lambda: AspectBuckets(area=100), "at least 4096"),
        (lambda: AspectBuckets(step=0), "step = 0"),
        (lambda: AspectBuckets().assign([]), "at least one image"),
        (lambda: AspectBuckets().nearest((0, 5)), "one pixel"),
    ):
        with pytest.raises((DataError, InvalidValueError), match=words):
            call()


def test_captions_are_batched_like_tensors():
    batch = stack_samples([{"x": torch.ones(2), "captions": word} for word in ("a", "b")])
    assert batch["x"].shape == (2, 2)
    assert batch["captions"] == ("a", "b")
    assert isinstance(batch["captions"].to("meta", non_blocking=True), Captions)
