"""Measuring a disk, and what later leases make of it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import platform
import shutil
import subprocess

import attrs
import pytest

from tests.offload.plans import swapping_plan
from tests.support.ranks import run_ranks
from zerotune.backend.ops.aio import AioSample, AioSettings
from zerotune.errors import OffloadError
from zerotune.offload import MeasuredDisk, OffloadManager, benchmark
from zerotune.offload.disk import MEASURED_FILE, QUEUE_DEPTHS, _sample
from zerotune.plan.model import AioSection
from zerotune.platform import Platform

MIB = 1024**2


@pytest.fixture
def disk(tmp_path):
    return MeasuredDisk(
        block_size=262_144,
        queue_depth=64,
        intra_op_parallelism=2,
        read=2e9,
        write=1e9,
        size=256 * MIB,
        host=platform.node(),
        device=tmp_path.stat().st_dev,
        measured="2025-01-01T00:00:00+00:00",
    )


def aio_of(lease):
    return {name: lease.plan.to_deepspeed()["aio"][name] for name in disk_keys}


disk_keys = ("block_size", "queue_depth", "intra_op_parallelism")


def measured_decision(lease):
    (found,) = [one for one in lease.decisions if one.key == "aio"]
    return found


class TestSaved:
    def test_what_is_written_is_read(self, tmp_path, disk):
        assert disk.save(tmp_path) == tmp_path / MEASURED_FILE
        assert MeasuredDisk.load(tmp_path) == disk
        assert [path.name for path in tmp_path.iterdir()] == [MEASURED_FILE]

    def test_nothing_is_nothing(self, tmp_path):
        assert MeasuredDisk.load(tmp_path) is None

    def test_a_later_lease_uses_it(self, tmp_path, disk):
        disk.save(tmp_path)
        with OffloadManager(root=tmp_path).lease(swapping_plan()) as lease:
            assert aio_of(lease) == disk.settings
            assert measured_decision(lease).after == disk.settings
            assert "2.00 GB/s read" in measured_decision(lease).reason

    def test_what_the_user_wrote_stands(self, tmp_path, disk):
        disk.save(tmp_path)
        plan = swapping_plan(aio={"queue_depth": 16, "thread_count": 1})
        with OffloadManager(root=tmp_path).lease(plan) as lease:
            assert aio_of(lease) == {
                "block_size": 262_144,
                "queue_depth": 16,
                "intra_op_parallelism": 1,
            }

    @pytest.mark.parametrize("change", [{"host": "elsewhere"}, {"device": -1}])
    def test_another_machine_or_disk_is_not_believed(self, tmp_path, disk, change):
        attrs.evolve(disk, **change).save(tmp_path)
        with OffloadManager(root=tmp_path).lease(swapping_plan()) as lease:
            assert aio_of(lease)["queue_depth"] == 8
            assert measured_decision(lease).after is None

    @pytest.mark.parametrize(
        "text", ["", "[]", "{}", '{"format": 2}', '{"format": 1, "queue_depth": 4}']
    )
    def test_a_damaged_file_is_a_warning(self, tmp_path, text):
        (tmp_path / MEASURED_FILE).write_text(text)
        with pytest.raises(OffloadError, match="measure again"):
            MeasuredDisk.load(tmp_path)
        with OffloadManager(root=tmp_path).lease(swapping_plan()) as lease:
            assert measured_decision(lease).severity == "warning"

    def test_a_pipe_in_its_place_is_not_waited_for(self, tmp_path):
        os.mkfifo(tmp_path / MEASURED_FILE)
        with OffloadManager(root=tmp_path).lease(swapping_plan()) as lease:
            assert "is no regular file" in measured_decision(lease).reason

    @pytest.mark.parametrize("value", [0, -1, "8", 1.5, True, None])
    def test_settings_that_cannot_be_are_refused(self, tmp_path, disk, value):
        attrs.evolve(disk, queue_depth=value).save(tmp_path)
        with pytest.raises(OffloadError, match="positive whole number"):
            MeasuredDisk.load(tmp_path)

    def test_it_makes_a_section_for_a_plan(self, disk):
        assert disk.to_aio().to_dict() == disk.settings
        written = AioSection(queue_depth=16, single_submit=True)
        assert disk.to_aio(written).to_dict() == {
            **disk.settings,
            "queue_depth": 16,
            "single_submit": True,
        }

    def test_all_ranks_take_rank_0s(self, tmp_path, disk):
        roots = tmp_path / "node0", tmp_path / "node1"
        for root, depth in zip(roots, (64, 16), strict=True):
            root.mkdir()
            attrs.evolve(disk, queue_depth=depth).save(root)
        said = []

        def share(text):
            said.append(text)
            return said[0]

        plan = swapping_plan(world_size=2)
        with (
            OffloadManager(root=roots[0], share=share).lease(plan) as first,
            OffloadManager(root=roots[1], share=share).lease(plan, rank=1) as second,
        ):
            assert aio_of(first) == aio_of(second) == disk.settings
            assert first.plan.digest() == second.plan.digest()


class TestSweep:
    """Which settings are tried, on a disk whose speed is known."""

    def sweep(self, speed, cores=8):
        def measure(settings):
            return AioSample(settings=settings, read=speed(settings), write=speed(settings))

        return _sample(measure, cores, sweep=True)

    def best(self, samples):
        return max(samples, key=lambda one: one.read).settings

    def test_it_climbs_to_the_best(self):
        samples = self.sweep(
            lambda s: s.intra_op_parallelism * s.queue_depth + (s.block_size < MIB)
        )
        assert self.best(samples) == AioSettings(
            block_size=262_144, queue_depth=max(QUEUE_DEPTHS), intra_op_parallelism=8
        )
        assert len(samples) == len({one.settings for one in samples}) <= 8

    def test_more_threads_than_cores_are_not_tried(self):
        samples = self.sweep(lambda _: 1.0, cores=2)
        assert max(one.settings.intra_op_parallelism for one in samples) == 2


class TestRefused:
    def test_too_little(self, tmp_path):
        with pytest.raises(OffloadError, match="too little"):
            benchmark(tmp_path, size=1000, platform=Platform.synthetic("cpu"))

    def test_too_much(self, tmp_path):
        with pytest.raises(OffloadError, match="are to be written"):
            benchmark(tmp_path, size=2**60, platform=Platform.synthetic("cpu"))

    def test_more_than_may_be_locked(self, tmp_path, monkeypatch):
        monkeypatch.setattr("zerotune.offload.disk.lockable_memory", lambda _: MIB)
        with pytest.raises(OffloadError, match=r"may lock 1\.0 MiB"):
            benchmark(tmp_path, size=2 * MIB, platform=Platform.synthetic("cpu"))
        assert list(tmp_path.iterdir()) == []


def measure_for_real(root: str, *arguments: str) -> tuple[int, str]:
    from zerotune.cli import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main(["offload", "bench", root, *arguments])
    return code, out.getvalue()


@pytest.mark.deepspeed
@pytest.mark.nvme
def test_a_real_disk_is_measured_and_remembered(tmp_path):
    ((code, out),) = run_ranks(
        measure_for_real, str(tmp_path), "--size", "4MiB", "--no-sweep", "--save", "--json"
    )
    data = json.loads(out)
    assert code == 0
    assert set(data["aio"]) == set(disk_keys)
    assert data["best"]["read"] > 1e6
    assert data["best"]["write"] > 1e6
    assert data["best"]["size"] == 4 * MIB
    assert MeasuredDisk.load(tmp_path).settings == data["aio"]
    assert [path.name for path in tmp_path.iterdir()] == [MEASURED_FILE]


def fill_while_measuring(root: str) -> str:
    """The space is taken by somebody else after it was checked."""
    from zerotune.offload import disk as benchmarking

    benchmarking._check_room = lambda *_: None
    try:
        benchmark(root, size=64 * MIB, sweep=False)
    except OffloadError as error:
        return str(error)
    return "no error"


@pytest.mark.deepspeed
@pytest.mark.nvme
def test_a_disk_that_is_full_is_noticed(tmp_path, mounted):
    """The op itself calls a write that found no room a success."""
    image = tmp_path / "image"
    with image.open("wb") as file:
        os.truncate(file.fileno(), 24 * MIB)
    if not shutil.which("mkfs.ext4"):
        pytest.skip("no mkfs.ext4 here")
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    root = mounted(tmp_path / "disk", "-o", "loop", str(image))
    (said,) = run_ranks(fill_while_measuring, str(root))
    assert "bytes were written; is the disk full?" in said
    assert [path.name for path in root.iterdir()] == ["lost+found"]
