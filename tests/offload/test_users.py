"""Find the processes that may be using files, according to a made-up /proc."""

from __future__ import annotations

import os

import pytest

from zerotune.offload.cleaning import users_of

BOOTED = 1_000_000
TICKS = os.sysconf("SC_CLK_TCK")


@pytest.fixture
def proc(tmp_path):
    folder = tmp_path / "proc"
    folder.mkdir()
    (folder / "stat").write_text(f"cpu 1 2 3\nbtime {BOOTED}\n")
    return folder


@pytest.fixture
def process(proc):
    def make(pid, *, started=10, opened=(), maps="", state="S", flags=0):
        folder = proc / str(pid)
        (folder / "fd").mkdir(parents=True)
        fields = [state, *["0"] * 5, str(flags), *["0"] * 12, str(started * TICKS), "0"]
        (folder / "stat").write_text(f"{pid} (a) b) {' '.join(fields)}\n")
        (folder / "maps").write_text(maps)
        for number, path in enumerate(opened):
            (folder / "fd" / str(number)).symlink_to(path)
        return folder

    make(1)
    return make


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "0.tensor.swp"
    path.touch()
    return path


def look(proc, file, *, last_written=BOOTED + 100):
    facts = file.stat()
    return users_of([(facts.st_dev, facts.st_ino)], last_written=last_written, proc=proc)


def test_a_folder_without_users_may_be_removed(proc, process, file):
    process(7, opened=["/dev/null"])
    assert look(proc, file).doubt() is None


def test_an_open_file_is_found_under_any_name(proc, process, file, tmp_path):
    os.link(file, tmp_path / "other")
    process(7, opened=[tmp_path / "other"])
    assert look(proc, file).open_in == (7,)


def test_a_deepspeed_process_older_than_the_last_write_may_own_the_folder(proc, process, file):
    process(7, maps="7f00-7f01 r-xp 0 0 0 /cache/async_io/async_io.so\n")
    assert look(proc, file).swapping == (7,)
    assert "may own the folder" in look(proc, file).doubt()


def test_a_deepspeed_process_younger_than_the_last_write_cannot_own_it(proc, process, file):
    process(7, started=200, maps="/cache/async_io/async_io.so\n")
    assert look(proc, file).doubt() is None


def test_a_deepspeed_process_with_a_lease_does_not_own_the_folder(proc, process, file, tmp_path):
    lock = tmp_path / "lease.lock"
    lock.touch()
    process(7, opened=[lock], maps="/cache/async_io/async_io.so\n")
    assert look(proc, file).doubt() is None


@pytest.mark.parametrize("kind", [{"state": "Z"}, {"flags": 0x00200000}])
def test_zombies_and_kernel_threads_have_no_open_files(proc, process, file, kind):
    folder = process(7, **kind)
    (folder / "fd").rmdir()
    assert look(proc, file).doubt() is None


def test_a_process_that_ends_during_the_check_is_ignored(proc, process, file):
    folder = process(7)
    (folder / "stat").unlink()
    assert look(proc, file).doubt() is None


def test_a_process_that_cannot_be_inspected_is_a_doubt(proc, process, file, monkeypatch):
    folder = process(7)
    path = type(folder)
    listed = path.iterdir

    def guarded(self):
        if self == folder / "fd":
            raise PermissionError
        return listed(self)

    monkeypatch.setattr(path, "iterdir", guarded)
    assert look(proc, file).hidden == (7,)
    assert "clean up as root" in look(proc, file).doubt()


def test_a_kernel_that_hides_processes_is_detected(proc, file):
    assert look(proc, file).hidden == (1,)


def test_without_proc_the_users_are_unknown(tmp_path, file):
    with pytest.raises(OSError, match="No such file"):
        look(tmp_path / "missing", file)


def test_many_processes_are_counted_and_a_few_are_listed(proc, process, file):
    for pid in range(2, 12):
        process(pid, opened=[file])
    assert "2, 3, 4, 5, 6 and 5 more" in look(proc, file).doubt()
