"""Several datasets in one run: promised frequencies, and exact resumes."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.support import pipelines
from zerotune.diffusion import encode_dataset, load_pretrained
from zerotune.diffusion.data import (
    AspectBuckets,
    Augmentation,
    BucketStream,
    ImageFolder,
    Mixture,
    PreparedImages,
    TagShuffle,
)
from zerotune.diffusion.data.buckets import Bucket, BucketAssignment, Placement
from zerotune.diffusion.data.clips import ClipBucket
from zerotune.diffusion.data.order import RUN, Draw
from zerotune.diffusion.data.streams import RepeatedBatches
from zerotune.errors import DataError, InvalidValueError


class Numbered:
    """A bucketed dataset whose samples identify themselves; ``sides`` gives each its bucket."""

    def __init__(self, sides, *, name=0):
        self.name = name
        self.assignment = BucketAssignment(
            placements=tuple(
                Placement(
                    bucket=Bucket(width=side, height=side),
                    original=(side, side),
                    resized=(side, side),
                )
                for side in sides
            )
        )
        self.identity = f"{name}/{list(sides)}"

    def __len__(self):
        return len(self.assignment.placements)

    def __getitem__(self, draw):
        side = self.assignment.placements[draw.index].bucket.width
        return {"use": torch.tensor([self.name, draw.index, draw.epoch, side])}


class Clips(Numbered):
    def __init__(self):
        super().__init__([8])
        size = ClipBucket(width=8, height=8, frames=5)
        flat = self.assignment.placements[0]
        self.assignment = BucketAssignment(placements=(attrs.evolve(flat, bucket=size),))


repeats = st.one_of(
    st.integers(1, 4).map(Fraction),
    st.fractions(Fraction(1, 20), 5, max_denominator=20),
)
sets = st.lists(
    st.tuples(st.lists(st.sampled_from((8, 16, 24)), min_size=1, max_size=9), repeats),
    min_size=1,
    max_size=3,
)


def mixture(parts):
    return Mixture(
        {str(name): Numbered(sides, name=name) for name, (sides, _) in enumerate(parts)},
        repeats={str(name): often for name, (_, often) in enumerate(parts)},
    )


def streams(data, *, micro, ranks, state=None, **options):
    group = [
        BucketStream(data, micro_batch_size=micro, rank=rank, world_size=ranks, **options)
        for rank in range(ranks)
    ]
    for stream in group if state else ():
        stream.load_state_dict(state)
    return group


def take(group, steps):
    """Take micro batches of all ranks in global order: set, image, use and side of each sample."""
    return [
        [tuple(row) for row in next(stream)["use"].tolist()]
        for _ in range(steps)
        for stream in group
    ]


@settings(max_examples=60, deadline=None)
@given(parts=sets, epochs=st.integers(1, 4), seed=st.integers(0, 3))
def test_every_image_is_repeated_as_often_as_its_set_demands(parts, epochs, seed):
    data = mixture(parts)
    uses = Counter()
    for name, (sides, often) in enumerate(parts):
        for _, many in Counter(sides).items():
            uses[name] += math.floor(epochs * often * many)
    (stream,) = streams(data, micro=1, ranks=1, seed=seed)
    seen = [use for (use,) in take([stream], sum(uses.values()))]
    assert Counter(name for name, *_ in seen) == uses
    assert stream.used == {str(name): uses[name] for name in range(len(parts))}
    times = Counter((name, image) for name, image, *_ in seen)
    for name, (sides, often) in enumerate(parts):
        for image in range(len(sides)):
            least, most = math.floor(epochs * often), math.ceil(epochs * often)
            assert least <= times[name, image] <= most
    # Each use has its own number, which seeds flips and captions.
    assert len(set(seen)) == len(seen)
    for (name, image), many in times.items():
        assert {use for *at, use, _ in seen if at == [name, image]} == set(range(many))


@settings(max_examples=30, deadline=None)
@given(
    parts=sets,
    micro=st.integers(1, 4),
    ranks=st.integers(1, 3),
    before=st.integers(0, 12),
    later_ranks=st.integers(1, 3),
    seed=st.integers(0, 3),
)
def test_a_resumed_mixture_continues_exactly_on_any_ranks(
    parts, micro, ranks, before, later_ranks, seed
):
    data = mixture(parts)
    group = streams(data, micro=micro, ranks=ranks, seed=seed)
    start = take(group, before)
    states = [stream.state_dict() for stream in group]
    assert all(state == states[0] for state in states)
    # Resume with another seed: the saved one wins.
    later = streams(data, micro=micro, ranks=later_ranks, state=states[0], seed=9)
    whole = take(streams(data, micro=micro, ranks=1, seed=seed), before * ranks + 4 * later_ranks)
    assert start + take(later, 4) == whole
    # Another micro batch size continues with the remaining images of each bucket.
    other = streams(data, micro=micro + 1, ranks=1, state=states[0])
    behind = [use for batch in start + take(other, 6) for use in batch]
    alone = streams(data, micro=1, ranks=1, seed=seed)
    in_order = [use for (use,) in take(alone, 3 * len(behind))]
    for side in {side for sides, _ in parts for side in sides}:
        found = [use for use in behind if use[3] == side]
        expected = [use for use in in_order if use[3] == side]
        assert found[: len(expected)] == expected[: len(found)]


def test_an_exhausted_set_starts_again_in_another_order():
    data = mixture([([8] * 12, Fraction(5, 2)), ([8] * 50, Fraction(1, 2))])
    seen = [use for (use,) in take(streams(data, micro=1, ranks=1), 4 * 55)]
    halves = [{i for name, i, *_ in seen[at : at + 55] if name == 1} for at in (0, 55, 110)]
    assert halves[1] == set(range(50)) - halves[0]
    assert halves[2] not in halves[:2], "the other half of a set does not always come second"
    orders = [[i for name, i, turn, _ in seen if (name, turn) == (0, n)] for n in range(5)]
    assert all(sorted(order) == list(range(12)) for order in orders)
    assert len(set(map(tuple, orders))) == 5


def test_probabilities_are_fractions_of_all_samples():
    sets = {"a": Numbered([8] * 30), "b": Numbered([8, 16] * 5)}
    data = Mixture(sets, probabilities={"a": 0.25, "b": 0.75})
    assert [float(share.repeats) for share in data.shares] == pytest.approx([1 / 3, 3.0])
    stream = BucketStream(data, micro_batch_size=4)
    assert stream.steps_per_epoch == 10
    for _ in range(20):
        next(stream)
    assert stream.epoch == 2.0
    assert sum(stream.used.values()) == 80
    assert stream.used["a"] == pytest.approx(20, abs=2)
    assert "a: 30 images, each 0.333333 times per epoch" in stream.explain()
    assert "a 25.0%" in str(data.decisions[0])
    plain = BucketStream(Numbered([8] * 4), micro_batch_size=4)
    assert plain.explain() == ""
    assert plain.used == {}


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_ranks_of_a_step_get_equally_large_images(ranks):
    data = Mixture({"small": Numbered([512] * 90), "large": Numbered([1024] * 70)})
    batches = take(streams(data, micro=2, ranks=1), 3 * 80 // ranks * ranks)
    areas = [batch[0][3] for batch in batches]
    steps = [areas[at : at + ranks] for at in range(0, len(areas), ranks)]
    uneven = sum(len(set(step)) > 1 for step in steps)
    # Only where an epoch has no full run left, at its start and end.
    assert uneven <= 3 * 2
    assert {areas[at] for at in range(0, 80, RUN)} == {512, 1024}, "shuffled over the epoch"


def test_a_state_with_other_repeats_is_refused():
    parts = [([8] * 6, Fraction(1)), ([8] * 6, Fraction(2))]
    (stream,) = streams(mixture(parts), micro=1, ranks=1)
    state = stream.state_dict()
    with pytest.raises(DataError, match="buckets or repeats"):
        streams(mixture([parts[0], ([8] * 6, Fraction(3))]), micro=1, ranks=1, state=state)


# -- Real images.


@pytest.fixture
def folders(tmp_path, photos):
    """Make two folders; the first has a mask for one of its images."""
    for number, name in enumerate(("zoe", "people")):
        folder = tmp_path / name
        folder.mkdir()
        for index in range(3):
            left = 100 * index
            photos[number].crop((left, 0, left + 64, 64)).save(folder / f"{index}.png")
            (folder / f"{index}.txt").write_text(f"red hat, smile, {name}")
    half = np.zeros((64, 64), np.uint8)
    half[:, :32] = 255
    Image.fromarray(half).save(tmp_path / "zoe" / "1.mask.png")
    (tmp_path / "zoe" / "2.txt").unlink()
    return tmp_path


def prepared(folder, side=16, **augmentation):
    return PreparedImages(
        ImageFolder(folder),
        buckets=AspectBuckets(area=side * side, step=8, max_aspect=1.0),
        augmentation=Augmentation(**augmentation),
    )


def test_each_set_keeps_its_sizes_captions_and_masks(folders):
    zoe = prepared(folders / "zoe", prefix="ohwx, ", tags=TagShuffle(orders=2), flip=0.5)
    people = prepared(folders / "people", side=32, caption_dropout=0.5, suffix=" on film")
    same = prepared(folders / "people", flip=1.0)
    data = Mixture({"zoe": zoe, "people": people, "same": same}, repeats={"zoe": 3})
    assert len(data) == 9
    assert data.companions == {"mask"}
    words = {"zoe": set(), "people": set(), "same": set()}
    for epoch in range(8):
        for share in data.shares:
            for inner, number in enumerate(share.images):
                found = data[Draw(index=number, epoch=epoch)]
                own = data.sets[share.name][Draw(index=inner, epoch=epoch)]
                words[share.name].add(found["captions"])
                mask = own.pop("loss_masks", torch.ones(1, *own["images"].shape[-2:]))
                assert torch.equal(found.pop("loss_masks"), mask)
                for name, value in own.items():
                    same_value = torch.equal if torch.is_tensor(value) else str.__eq__
                    assert same_value(found[name], value)
    assert words["same"] == {"red hat, smile, people"}
    assert words["people"] == {"", "red hat, smile, people on film"}
    assert all(text.startswith("ohwx") for text in words["zoe"])
    assert len(words["zoe"]) > 2
    assert "ohwx" in words["zoe"], "an image without caption has the trigger alone"
    assert words["zoe"] <= set(zoe.texts())
    masks = [data[number]["loss_masks"].mean() for number in range(len(data))]
    assert masks == [1, 0.5, 1, 1, 1, 1, 1, 1, 1]
    stream = BucketStream(data, micro_batch_size=3, num_workers=1)
    sides = {tuple(next(stream)["images"].shape[-2:]) for _ in range(6)}
    assert sides == {(16, 16), (32, 32)}


def test_a_mixture_trains_alike_from_pixels_and_caches(folders, tmp_path):
    loaded = load_pretrained(pipelines.sdxl(tmp_path / "sdxl"), frozen_dtype="fp32")
    pixels = Mixture(
        {
            "zoe": prepared(folders / "zoe", prefix="ohwx, ", flip=0.5),
            "people": prepared(folders / "people", side=32),
        },
        probabilities={"zoe": 0.75, "people": 0.25},
    )
    cached = encode_dataset(pixels, family=loaded.family, folder=tmp_path / "c", progress=False)
    assert cached.shares == pixels.shares
    assert cached.decisions[0] == pixels.decisions[0]
    seen, read = (BucketStream(data, micro_batch_size=2, seed=1) for data in (pixels, cached))
    read.load_state_dict(seen.state_dict())
    for _ in range(4):
        batch, latents = next(seen), next(read)
        assert "images" not in latents
        losses = [
            loaded.objective()(loaded.model, one, torch.Generator().manual_seed(4)).item()
            for one in (batch, latents)
        ]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert seen.used == read.used
    with pytest.raises(DataError, match="different keys"):
        Mixture({"zoe": pixels.sets["zoe"], "people": cached.sets["people"]})


def test_invalid_mixtures_are_refused(folders):
    zoe, people = prepared(folders / "zoe"), prepared(folders / "people")
    streamed = RepeatedBatches([{"images": torch.zeros(1, 3, 8, 8)}])
    for sets, message in (
        ({}, "at least one"),
        ([zoe], "dataset by name"),
        ({"zoe": streamed}, "sequential source"),
        ({"zoe": ImageFolder(folders / "zoe")}, "has no buckets"),
        ({"zoe": folders}, "has no buckets"),
        ({"zoe": Mixture({"zoe": zoe})}, "mixture itself"),
        ({"zoe": zoe, "other": Numbered([8])}, "neither latents nor images"),
        ({"people": people, "other": Numbered([8])}, "sets have different keys"),
        ({"people": people, "clips": Clips()}, "others contain clips"),
    ):
        with pytest.raises(DataError, match=message):
            Mixture(sets)
    for options, message in (
        ({"repeats": {"zoo": 2}}, "did you mean zoe"),
        ({"repeats": {"zoe": 0}}, "must be above 0"),
        ({"repeats": {"zoe": math.inf}}, "must be above 0"),
        ({"repeats": {"zoe": 1e-9}}, "too small"),
        ({"probabilities": {"zoe": 0.5}}, "add up"),
        ({"probabilities": {}}, "lack zoe"),
        ({"probabilities": {"zoe": 1.0}, "repeats": {"zoe": 2}}, "one of them"),
    ):
        with pytest.raises(InvalidValueError, match=message):
            Mixture({"zoe": zoe}, **options)
