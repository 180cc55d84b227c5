"""Iterable sources without random access lose nothing, give equal steps and resume exactly."""

from __future__ import annotations

import gc
import io
import tarfile
from collections import Counter

import pytest
import torch

from zerotune.diffusion.data import AspectBuckets, Augmentation, HuggingFaceImages, StreamedImages
from zerotune.diffusion.data.images import HeaderOnly, RefuseBroken
from zerotune.diffusion.data.streams import BatchStream
from zerotune.errors import DataError

SMALL = AspectBuckets(area=32 * 32, step=8)


@pytest.fixture(scope="module")
def samples(cuttings, encode):
    """Return 43 samples with their numbers as captions; two are broken."""
    found = [(encode(image), str(number)) for number, image in enumerate(cuttings[:43])]
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
def test_no_sample_is_lost_or_duplicated(samples, ranks):
    group = [stream(samples, rank=rank, ranks=ranks) for rank in range(ranks)]
    batches = take(group, 72 // ranks)
    assert batches == take([stream(samples)], 72)
    uses = Counter(caption for batch in batches for caption in batch)
    assert set(uses) == {str(number) for number in range(43)} - {"7", "30"}
    assert set(uses.values()) <= {3, 4}
    assert all(len(batch) == 2 for batch in batches)
    for one in group:
        assert [image.name for image in one.broken] == ["sample 7", "sample 30"]
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


def test_streamed_samples_may_have_several_captions(samples):
    def read(sample):
        return sample[0], [f"{sample[1]} a", f"{sample[1]} b"]

    first = stream(samples, read=read)
    batches = take([first], 80)
    told = [text for batch in batches for text in batch]
    by_sample = {text.split()[0] for text in told}
    for name in by_sample:
        assert {text for text in told if text.split()[0] == name} == {f"{name} a", f"{name} b"}
    before = stream(samples, read=read)
    take([before], 30)
    resumed = stream(samples, read=read)
    resumed.load_state_dict(before.state_dict())
    assert take([resumed], 10) == batches[30:40]


def test_resuming_with_other_samples_is_refused(samples):
    first = stream(samples)
    take([first], 12)
    state = first.state_dict()
    with pytest.raises(DataError, match="different samples"):
        stream(samples[::-1]).load_state_dict(state)
    with pytest.raises(DataError, match="ends before"):
        stream(samples[:5]).load_state_dict(state)


def test_sources_that_cannot_be_streamed_are_refused(samples):
    with pytest.raises(DataError, match="no sample"):
        next(stream([]))
    with pytest.raises(DataError, match="no sample"):
        take([stream(iter(samples))], 60)
    with pytest.raises(DataError, match="sample 7: cannot be read"):
        take([stream(samples, on_broken=RefuseBroken())], 20)
    with pytest.raises(DataError, match=r"no readable image.*read="):
        next(stream([(b"x", ""), (b"y", "")]))
    cut_jpeg = [(samples[0][0], "0"), (jpeg_of(samples)[:-60], "1")]
    with pytest.raises(DataError, match=r'sample 1.*"whole"'):
        take([stream(cut_jpeg, check=HeaderOnly(), micro=1)], 2)


def jpeg_of(samples):
    from PIL import Image

    buffer = io.BytesIO()
    Image.open(io.BytesIO(samples[1][0])).save(buffer, "JPEG")
    return buffer.getvalue()


def test_hugging_face_streams_yield_the_samples_of_their_datasets(samples):
    datasets = pytest.importorskip("datasets")
    rows = {
        "image": [{"bytes": data, "path": None} for data, _ in samples],
        "text": [caption for _, caption in samples],
    }
    features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
    dataset = datasets.Dataset.from_dict(rows, features=features)
    streaming = dataset.to_iterable_dataset(num_shards=4).shuffle(seed=5, buffer_size=8)
    streaming = streaming.cast_column("image", datasets.Image(decode=False))

    def opened():
        return stream(streaming, read=lambda row: (row["image"]["bytes"], row["text"]))

    first = opened()
    before = take([first], 15)
    uses = Counter(caption for batch in before for caption in batch)
    assert max(uses.values()) == 1
    assert [int(caption) for batch in before for caption in batch] != sorted(map(int, uses))
    again = opened()
    again.load_state_dict(first.state_dict())
    assert take([again], 15) == take([first], 15)
    # Generators keep their read-ahead threads until they are collected.
    del first, again
    gc.collect()
    assert len(HuggingFaceImages(dataset)) == 41


# webdataset leaves the shard open, which Python reports as a ResourceWarning.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_webdataset_pipelines_can_be_streamed(samples, tmp_path):
    webdataset = pytest.importorskip("webdataset")
    for shard in range(2):
        with tarfile.open(tmp_path / f"{shard}.tar", "w") as archive:
            for number in range(shard * 20, shard * 20 + 20):
                for ending, content in zip(("png", "txt"), samples[number], strict=True):
                    data = content if isinstance(content, bytes) else content.encode()
                    info = tarfile.TarInfo(f"{number:03}.{ending}")
                    info.size = len(data)
                    archive.addfile(info, io.BytesIO(data))
    urls = [str(tmp_path / f"{shard}.tar") for shard in range(2)]
    pipeline = webdataset.WebDataset(urls, shardshuffle=False, nodesplitter=lambda source: source)
    found = stream(pipeline, read=lambda sample: (sample["png"], sample["txt"].decode()))
    assert take([found], 12) == take([stream(samples[:40])], 12)
