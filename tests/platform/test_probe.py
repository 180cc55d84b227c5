"""The real probe, with a fake torch for cases that this machine cannot show."""

from __future__ import annotations

import sys
import warnings
from types import SimpleNamespace

import pytest

from zerotune.errors import PlatformError
from zerotune.platform.detect import MachineProbe
from zerotune.platform.facts import Device


def fake_torch(
    *, cuda=None, hip=None, devices=(), problem=None, xpu=(), mps=None, fp16=False, bad_fork=False
):
    def initialize():
        if problem is not None:
            raise RuntimeError(problem)

    def available():
        if problem is not None:
            warnings.warn(f"CUDA initialization: {problem}", stacklevel=2)
        return bool(devices)

    return SimpleNamespace(
        version=SimpleNamespace(cuda=cuda, hip=hip),
        cuda=SimpleNamespace(
            is_available=available,
            device_count=lambda: len(devices),
            get_device_properties=lambda index: devices[index],
            init=initialize,
            _is_in_bad_fork=lambda: bad_fork,
        ),
        xpu=SimpleNamespace(
            is_available=lambda: bool(xpu),
            device_count=lambda: len(xpu),
            get_device_properties=lambda index: xpu[index],
        ),
        mps=SimpleNamespace(recommended_max_memory=lambda: mps),
        backends=SimpleNamespace(
            mps=SimpleNamespace(
                is_available=lambda: mps is not None,
                is_macos_or_newer=lambda major, _minor: major <= 14,
            )
        ),
        ops=SimpleNamespace(mkldnn=SimpleNamespace(_is_mkldnn_fp16_supported=lambda: fp16)),
    )


def facts(monkeypatch, **torch):
    monkeypatch.setitem(sys.modules, "torch", fake_torch(**torch))
    return MachineProbe().torch()


def properties(name, memory, major=8, minor=9):
    return SimpleNamespace(name=name, total_memory=memory, major=major, minor=minor)


def test_cuda_devices_have_name_memory_and_capability(monkeypatch):
    found = facts(
        monkeypatch, cuda="12.8", devices=(properties("A", 10), properties("B", 20, 7, 5))
    )

    assert (found.accelerator, found.version) == ("cuda", "12.8")
    assert found.devices == (
        Device(name="A", total_memory=10, capability=(8, 9)),
        Device(name="B", total_memory=20, capability=(7, 5)),
    )
    assert found.problem is None


def test_rocm_devices_have_no_compute_capability(monkeypatch):
    found = facts(monkeypatch, hip="6.4", devices=(properties("MI300X", 30, 9, 4),))

    assert (found.accelerator, found.version) == ("rocm", "6.4")
    assert found.devices == (Device(name="MI300X", total_memory=30, capability=None),)


def test_the_drivers_error_is_kept_and_its_warning_is_suppressed(monkeypatch):
    found = facts(monkeypatch, cuda="12.8", problem="driver too old (found version 11040).\nMore.")

    assert found.devices == ()
    assert found.problem == "driver too old (found version 11040)."


def test_a_driver_without_devices_gives_an_error_text(monkeypatch):
    assert facts(monkeypatch, cuda="12.8").problem == "the driver reports no device"


def test_a_fork_after_cuda_was_used_raises_instead_of_using_the_cpu(monkeypatch):
    with pytest.raises(PlatformError, match=r"parent process used CUDA.*'spawn'"):
        facts(monkeypatch, cuda="12.8", bad_fork=True, problem="Cannot re-initialize CUDA")


def test_a_cpu_build_has_no_cuda_error(monkeypatch):
    found = facts(monkeypatch, fp16=True)

    assert (found.accelerator, found.problem, found.cpu_fp16) == ("cpu", None, True)


def test_xpu_devices_are_read(monkeypatch):
    found = facts(monkeypatch, xpu=(properties("Arc", 16),))

    assert found.accelerator == "xpu"
    assert found.devices == (Device(name="Arc", total_memory=16),)


def test_an_mps_device_is_read(monkeypatch):
    found = facts(monkeypatch, mps=48)

    (device,) = found.devices
    assert found.accelerator == "mps"
    assert device.total_memory == 48
    assert device.name
    assert found.mps_bf16


def test_an_import_error_of_torch_is_recorded(monkeypatch):
    # None makes the import raise, as a broken shared library would.
    monkeypatch.setitem(sys.modules, "torch", None)

    found = MachineProbe().torch()

    assert "torch" in found.import_error


def test_a_missing_torch_gives_no_facts(monkeypatch):
    monkeypatch.setattr(MachineProbe, "version", lambda _self, _name: None)

    assert MachineProbe().torch() is None


def test_unreadable_files_give_none(tmp_path):
    (tmp_path / "text").write_bytes(b"caf\xc3\xa9 \xff")

    assert MachineProbe().read_text(str(tmp_path / "text")) == "caf\u00e9 \ufffd"
    assert MachineProbe().read_text(str(tmp_path / "absent")) is None
    assert MachineProbe().read_text(str(tmp_path)) is None


def test_the_probe_reads_the_soft_memlock_limit(monkeypatch):
    resource = pytest.importorskip("resource")
    limits = {resource.RLIMIT_MEMLOCK: (4096, 8192)}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)

    assert MachineProbe().memlock() == 4096

    limits[resource.RLIMIT_MEMLOCK] = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    assert MachineProbe().memlock() is None
