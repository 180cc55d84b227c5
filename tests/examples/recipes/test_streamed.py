"""The recipe of streamed images: nothing is lost, equal steps on all ranks, exact resumption."""

from __future__ import annotations

import io
from collections import Counter

import pytest
import torch
from examples.recipes.streamed import StreamedImages

from zerotune.diffusion.data import AspectBuckets, Augmentation
from zerotune.diffusion.data.streams import BatchStream
from zerotune.errors import DataError

# webdataset leaves the shard open, which Python reports as a ResourceWarning.
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

SMALL = AspectBuckets(area=32 * 32, step=8)


@pytest.fixture(scope="module")
def samples():
    """Return 43 samples with their numbers as captions; two are broken."""
    from PIL import Image

    def encoded(number):
        buffer = io.BytesIO()
        size = (24 + 8 * (number % 3), 40 - 8 * (number % 2))
        Image.new("RGB", size, (5 * number, number, 0)).save(buffer, "PNG")
        return buffer.getvalue()

    found = [(encoded(number), str(number)) for number in range(43)]
    found[7] = (b"nothing", "7")
    found[30] = (found[30][0][:-40], "30")
    return found


def stream(samples, *, rank=0, ranks=1, micro=2, **options):
    return StreamedImages(
        samples,
        **{"read": lambda sample: sample} | options,
        buckets=SMALL,
        micro_batch_size=micro,
        rank=rank,
        world_size=ranks,
    )


def take(group, steps):
    return [tuple(next(one)["captions"]) for _ in range(steps) for one in group]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_no_sample_is_lost_or_duplicated(samples, ranks, capsys):
    group = [stream(samples, rank=rank, ranks=ranks) for rank in range(ranks)]
    batches = take(group, 72 // ranks)
    assert "sample 7 is skipped" in capsys.readouterr().out
    assert batches == take([stream(samples)], 72)
    uses = Counter(caption for batch in batches for caption in batch)
    assert set(uses) == {str(number) for number in range(43)} - {"7", "30"}
    assert set(uses.values()) <= {3, 4}
    assert all(len(batch) == 2 for batch in batches)
    assert isinstance(group[0], BatchStream)


@pytest.mark.parametrize("before", [0, 1, 3, 7, 16])
@pytest.mark.parametrize("later", [1, 2])
def test_a_resumed_stream_continues_exactly_on_any_ranks(samples, before, later):
    options = {"augmentation": Augmentation(flip=0.5, seed=3)}
    group = [stream(samples, rank=rank, ranks=3, **options) for rank in range(3)]
    take(group, before)
    state = group[0].state_dict()
    assert all(one.state_dict() == state for one in group)
    again = [stream(samples, rank=rank, ranks=later, **options) for rank in range(later)]
    whole = stream(samples, **options)
    take([whole], 3 * before)
    for one in again:
        one.load_state_dict(state)
    for _ in range(8):
        for one in again:
            batch, wanted = next(one), next(whole)
            assert batch["captions"] == wanted["captions"]
            assert torch.equal(batch["images"], wanted["images"])


def test_other_samples_and_empty_sources_are_refused(samples):
    first = stream(samples)
    take([first], 12)
    state = first.state_dict()
    for others in (samples[::-1], samples[:5]):
        with pytest.raises(DataError, match="other samples"):
            stream(others).load_state_dict(state)
    for source in ([], iter(samples)):
        with pytest.raises(DataError, match="no sample"):
            take([stream(source)], 60)
    with pytest.raises(DataError, match=r"no readable image.*read="):
        next(stream([(b"x", ""), (b"y", "")]))
