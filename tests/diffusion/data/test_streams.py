"""The order of data loses and repeats nothing within an epoch, and resumes exactly."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zerotune.diffusion import ClassConditional, DataStream, ImageTensors, Unconditional
from zerotune.diffusion.data.streams import BatchStream, RepeatedBatches
from zerotune.errors import DataError, InvalidValueError


def numbered(length):
    return [{"images": torch.full((1, 1, 1), float(number))} for number in range(length)]


def streams(length, *, micro, ranks, **options):
    return [
        DataStream(numbered(length), micro_batch_size=micro, rank=rank, world_size=ranks, **options)
        for rank in range(ranks)
    ]


def take(group, steps):
    """Take the sample numbers of all ranks in global order."""
    return [
        int(value)
        for _ in range(steps)
        for stream in group
        for value in next(stream)["images"].flatten()
    ]


@settings(max_examples=40, deadline=None)
@given(
    length=st.integers(1, 40),
    micro=st.integers(1, 5),
    ranks=st.integers(1, 3),
    seed=st.integers(0, 3),
)
def test_every_epoch_yields_each_sample_once_over_all_ranks(length, micro, ranks, seed):
    epochs = 3
    steps = -(-epochs * length // (micro * ranks))
    seen = take(streams(length, micro=micro, ranks=ranks, seed=seed), steps)
    for epoch in range(epochs):
        assert Counter(seen[epoch * length : (epoch + 1) * length]) == Counter(range(length))


@pytest.mark.parametrize(("ranks", "micro"), [(1, 6), (2, 3), (3, 2), (6, 1)])
def test_the_order_does_not_depend_on_ranks_and_micro_batch_size(ranks, micro):
    alone = take(streams(17, micro=6, ranks=1, seed=4), 10)
    assert take(streams(17, micro=micro, ranks=ranks, seed=4), 10) == alone


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stream_without_ranks_yields_the_batches_of_the_launched_process(monkeypatch, rank):
    launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2}
    for name, value in (launched | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}).items():
        monkeypatch.setenv(name, str(value))
    stream = DataStream(numbered(8), micro_batch_size=2)
    assert (stream.rank, stream.world_size) == (rank, 2)
    (written,) = streams(8, micro=2, ranks=2)[rank : rank + 1]
    assert take([stream], 4) == take([written], 4)


def test_the_order_differs_between_seeds_and_epochs():
    seen = take(streams(50, micro=50, ranks=1, seed=0), 2)
    assert seen[:50] != seen[50:]
    assert seen[:50] != take(streams(50, micro=50, ranks=1, seed=1), 1)
    assert seen[:50] != sorted(seen[:50])
    plain = take(streams(5, micro=5, ranks=1, shuffle=False), 2)
    assert plain == [0, 1, 2, 3, 4] * 2


@settings(max_examples=25, deadline=None)
@given(
    before=st.integers(0, 9),
    ranks=st.integers(1, 3),
    later_ranks=st.integers(1, 3),
)
def test_a_resumed_stream_continues_exactly_even_on_other_ranks(before, ranks, later_ranks):
    first = streams(11, micro=6 // ranks, ranks=ranks, seed=2)
    seen = take(first, before)
    state = first[0].state_dict()
    assert all(stream.state_dict() == state for stream in first)
    later = streams(11, micro=6 // later_ranks, ranks=later_ranks, seed=99)
    for stream in later:
        stream.load_state_dict(state)
    seen += take(later, 10)
    assert seen == take(streams(11, micro=6, ranks=1, seed=2), before + 10)


def test_reading_ahead_in_workers_does_not_move_the_position():
    stream = DataStream(numbered(20), micro_batch_size=2, seed=3, num_workers=1)
    seen = take([stream], 3)
    assert stream.position == 6
    assert stream.epoch == pytest.approx(0.3)
    state = stream.state_dict()
    del stream
    again = DataStream(numbered(20), micro_batch_size=2, seed=3)
    again.load_state_dict(state)
    assert seen + take([again], 7) == take(streams(20, micro=2, ranks=1, seed=3), 10)


def test_reading_leaves_the_global_random_state_unchanged():
    state = torch.get_rng_state()
    take(streams(7, micro=2, ranks=1), 5)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_state_from_other_data_is_refused():
    stream = DataStream(numbered(7), micro_batch_size=2)
    with pytest.raises(DataError, match="had 7 samples") as caught:
        DataStream(numbered(8), micro_batch_size=2).load_state_dict(stream.state_dict())
    assert caught.value.value == 8


def test_batches_contain_the_samples_of_the_dataset():
    labelled = ImageTensors(images=torch.zeros(3, 1, 2, 2), labels=torch.arange(3))
    batch = next(DataStream(labelled, micro_batch_size=3, shuffle=False))
    assert batch["images"].shape == (3, 1, 2, 2)
    assert batch["labels"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("images", "fix"),
    [
        (torch.randint(0, 256, (9, 3, 4, 4), dtype=torch.uint8), r"images.float\(\) / 127.5 - 1"),
        (torch.arange(256.0).view(1, 1, 16, 16), r"from 0 to 255. Fix: .*images / 127.5 - 1"),
        (torch.arange(17.0).view(17, 1, 1, 1), r"images / 8 - 1"),
        (torch.arange(-128.0, 128.0).view(1, 1, 16, 16), "images / 128"),
    ],
)
def test_images_with_values_in_another_range_are_refused(images, fix):
    with pytest.raises(DataError, match=fix):
        ImageTensors(images=images)


def test_images_from_0_to_1_give_a_warning(caplog):
    assert ImageTensors(images=torch.rand(9, 3, 4, 4) * 2 - 1).decisions == ()
    assert ImageTensors(images=torch.randn(9, 3, 4, 4) * 3).decisions == (), "standardised"
    (warning,) = ImageTensors(images=torch.rand(9, 3, 4, 4)).decisions
    assert "images * 2 - 1" in warning.reason
    assert "data.images: 'in [-1, 1]'" in caplog.text


@pytest.mark.parametrize("family", [Unconditional(), ClassConditional()])
def test_integer_images_are_refused_by_every_family(family):
    with pytest.raises(DataError, match=r"batch\['images'\] = 'uint8'.*127\.5"):
        family.clean({"images": torch.zeros(2, 3, 4, 4, dtype=torch.uint8)})


def test_a_dataset_smaller_than_one_step_gives_a_warning():
    assert DataStream(numbered(4), micro_batch_size=2, world_size=2).decisions == ()
    (warning,) = DataStream(numbered(3), micro_batch_size=2, world_size=2).decisions
    assert (warning.before, warning.severity) == ("3 samples", "warning")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ImageTensors(images=torch.zeros(3, 1, 2, 2), labels=torch.arange(2)), "labels"),
        (lambda: ImageTensors(images=torch.zeros(0, 1, 2, 2)), "images"),
        (lambda: DataStream([], micro_batch_size=1), "empty"),
        (lambda: DataStream(numbered(3), micro_batch_size=0), "micro_batch_size"),
        (lambda: DataStream(numbered(3), micro_batch_size=1, rank=2, world_size=2), "rank"),
    ],
)
def test_invalid_data_is_refused(call, words):
    with pytest.raises((DataError, InvalidValueError), match=words):
        call()


def test_an_iterable_of_batches_repeats_and_resumes_by_skipping():
    batches = [{"images": torch.full((2, 1, 1, 1), float(index))} for index in range(3)]
    stream = RepeatedBatches(batches)
    seen = [float(next(stream)["images"][0, 0, 0, 0]) for _ in range(7)]
    assert seen == [0, 1, 2, 0, 1, 2, 0]
    again = RepeatedBatches(batches)
    again.load_state_dict(stream.state_dict())
    assert float(next(again)["images"][0, 0, 0, 0]) == 1
    assert isinstance(stream, BatchStream)
    assert isinstance(streams(3, micro=1, ranks=1)[0], BatchStream)


def test_an_exhausted_generator_is_named():
    stream = RepeatedBatches(iter([{"images": torch.zeros(1, 1, 1, 1)}]))
    next(stream)
    with pytest.raises(DataError, match=r"ended after .* and cannot be restarted") as caught:
        next(stream)
    assert "instead of a generator" in caught.value.fix


def test_samples_without_buckets_are_collated_like_those_in_buckets():
    samples = [
        {"prompt_embeds": torch.ones(n, 2), "prompt_embeds_mask": torch.ones(n), "captions": "a"}
        for n in (3, 5)
    ]
    batch = next(DataStream(samples, micro_batch_size=2, shuffle=False))
    assert batch["prompt_embeds"].shape == (2, 5, 2)
    assert batch["prompt_embeds_mask"].sum(1).tolist() == [3, 5]
    assert batch["captions"] == ("a", "a")
    pairs = [(torch.zeros(2), 1), (torch.ones(2), 2)]
    images, labels = next(DataStream(pairs, micro_batch_size=2, shuffle=False))
    assert images.shape == (2, 2)
    assert labels.tolist() == [1, 2]
