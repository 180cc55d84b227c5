"""Detection of every kind of machine, with facts from a fake probe."""

from __future__ import annotations

import logging
import operator
import os
import platform as standard_platform

import attrs
import psutil
import pytest

from zerotune import decisions
from zerotune.errors import InvalidValueError
from zerotune.platform import Platform, detect_platform
from zerotune.platform.detect import Cores, TorchFacts
from zerotune.platform.facts import GIB, DeepSpeedSupport, Device, HostMemory

RTX_4090 = Device(name="NVIDIA GeForce RTX 4090", total_memory=24 * GIB, capability=(8, 9))
T4 = Device(name="Tesla T4", total_memory=15 * GIB, capability=(7, 5))
P100 = Device(name="Tesla P100-PCIE-16GB", total_memory=16 * GIB, capability=(6, 0))
MI300X = Device(name="AMD Instinct MI300X", total_memory=192 * GIB)
ARC = Device(name="Intel(R) Arc(TM) A770 Graphics", total_memory=16 * GIB)
M2 = Device(name="Apple M2 Max", total_memory=48 * GIB)

THIRTY_TWO = Cores(physical=16, logical=32, affinity=32)
PLAIN_TORCH = TorchFacts()

INSTALLED = {
    "torch": "2.9.0",
    "deepspeed": "0.19.8",
    "accelerate": "1.15.0",
    "diffusers": "0.42.1",
}
V2_FILES = {
    "/proc/self/cgroup": "0::/job\n",
    "/proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
}


@attrs.define(kw_only=True)
class FakeProbe:
    """A probe with given facts."""

    system_name: str = "Linux"
    machine_name: str = "x86_64"
    processor_name: str = "AMD EPYC 7763"
    environment: dict[str, str] = attrs.field(factory=dict)
    versions: dict[str, str] = attrs.field(factory=lambda: dict(INSTALLED))
    files: dict[str, str] = attrs.field(factory=dict)
    ram: tuple[int, int] = (128 * GIB, 100 * GIB)
    core_counts: Cores = THIRTY_TWO
    locked_memory: int | None = 8 * 1024**2
    facts: TorchFacts | None = PLAIN_TORCH

    def system(self):
        return self.system_name

    def machine(self):
        return self.machine_name

    def processor(self):
        return self.processor_name

    def environ(self):
        return self.environment

    def python_version(self):
        return "3.12.4"

    def version(self, distribution):
        return self.versions.get(distribution)

    def read_text(self, path):
        return self.files.get(path)

    def memory(self):
        return self.ram

    def cores(self):
        return self.core_counts

    def memlock(self):
        return self.locked_memory

    def torch(self):
        return self.facts


def detect(*, allow_rocm=False, **facts):
    return detect_platform(probe=FakeProbe(**facts), allow_rocm=allow_rocm, log=False)


def cuda(*devices, error=None):
    return TorchFacts(accelerator="cuda", version="12.8", devices=devices, problem=error)


def mac(*, mps=True, **facts):
    torch = TorchFacts(accelerator="mps", devices=(M2,), mps_bf16=True) if mps else PLAIN_TORCH
    return {
        "system_name": "Darwin",
        "machine_name": "arm64" if mps else "x86_64",
        "facts": torch,
        "locked_memory": None,
        **facts,
    }


def without(*names):
    return {name: version for name, version in INSTALLED.items() if name not in names}


ROCM = TorchFacts(accelerator="rocm", version="6.4.1", devices=(MI300X,))
UNHIDDEN = {"facts": cuda(error="No CUDA GPUs are available")}
FLAGS = "flags\t\t: fpu avx2 avx512f"
WITH_ARC = {"facts": TorchFacts(accelerator="xpu", devices=(ARC,))}


FEW = Cores(physical=16, logical=32, affinity=4)


def cgroup(**values):
    files = {
        f"/sys/fs/cgroup/job/{key.replace('_', '.')}": f"{value}\n" for key, value in values.items()
    }
    return {"files": {**V2_FILES, **files}}


def privileges(capabilities, *, uids=f"{0:10} {0:10} 4294967295\n"):
    status = f"Name:\tpython\nCapInh:\t0\nCapEff:\t{capabilities}\n"
    files = {"/proc/self/status": status, "/proc/self/uid_map": uids}
    return {"locked_memory": 65536, "files": files}


def precisions(bf16, native, fp16):
    return {"bf16": bf16, "native_bf16": native, "fp16": fp16}


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        # Two devices count with the memory of the smaller.
        (
            {"facts": cuda(RTX_4090, T4)},
            {
                "accelerator": "cuda",
                "devices": (RTX_4090, T4),
                "vram": 15 * GIB,
                "torch_build": "cuda 12.8",
                "deepspeed.available": True,
                "deepspeed.environment": {"DS_ACCELERATOR": "cuda"},
                "decisions": (),
                "versions": {"python": "3.12.4", **INSTALLED},
            },
        ),
        # The oldest device decides the precision.
        ({"facts": cuda(RTX_4090)}, precisions(True, True, True)),
        ({"facts": cuda(T4)}, precisions(False, False, True)),
        ({"facts": cuda(P100)}, precisions(False, False, False)),
        ({"facts": cuda(RTX_4090, T4)}, precisions(False, False, True)),
        (
            {"facts": ROCM},
            {
                "accelerator": "rocm",
                "torch_build": "rocm 6.4.1",
                "bf16": True,
                "fp16": True,
                "deepspeed.available": False,
                "deepspeed.accelerator": None,
                "deepspeed.environment": {},
            },
        ),
        (
            {"facts": ROCM, "allow_rocm": True},
            {"deepspeed.available": True, "deepspeed.accelerator": "cuda"},
        ),
        (
            {"facts": ROCM, "allow_rocm": True, "environment": {"DS_ACCELERATOR": "cuda"}},
            {"accelerator": "rocm", "deepspeed.available": True},
        ),
        (
            mac(),
            {
                "accelerator": "mps",
                "devices": (M2,),
                "torch_build": "mps",
                "deepspeed.available": False,
            },
        ),
        # On a Mac, the release of macOS decides whether bf16 runs.
        *(
            (
                mac(facts=TorchFacts(accelerator="mps", devices=(M2,), mps_bf16=new)),
                {"bf16": new, "fp16": True},
            )
            for new in (True, False)
        ),
        (
            WITH_ARC,
            {
                "accelerator": "xpu",
                "torch_build": "xpu",
                "deepspeed.accelerator": "xpu",
                "bf16": True,
                "fp16": True,
                "decisions": (),
            },
        ),
        (
            {},
            {
                "accelerator": "cpu",
                "devices": (),
                "vram": None,
                "torch_build": "cpu",
                "deepspeed.environment": {"DS_ACCELERATOR": "cpu"},
            },
        ),
        # On a CPU, fp16 requires native arithmetic; bf16 always runs.
        *(
            ({"facts": TorchFacts(cpu_fp16=has)}, {"bf16": True, "fp16": has})
            for has in (True, False)
        ),
        *(
            ({"files": {"/proc/cpuinfo": cpuinfo}}, {"bf16": True, "native_bf16": native})
            for cpuinfo, native in (
                (f"model name\t: AMD EPYC\n{FLAGS} avx512_bf16\n", True),
                ("flags\t\t: fpu avx512f amx_bf16 amx_tile\n", True),
                ("Features\t: fp asimd bf16 i8mm\n", True),
                (f"{FLAGS}\nbugs\t\t: bf16\n", False),
                ("", False),
            )
        ),
        ({"versions": {**INSTALLED, "deepspeed": "my-branch"}}, {"deepspeed.available": True}),
        (
            {"facts": cuda(error="Found no NVIDIA driver on your system.")},
            {"accelerator": "cpu", "torch_build": "cuda 12.8"},
        ),
        (
            {"facts": cuda(RTX_4090), "environment": {"DS_ACCELERATOR": "cpu"}},
            {"accelerator": "cpu", "devices": (), "fp16": False},
        ),
        # Without a container, the whole machine is usable.
        (
            {},
            {
                "host_memory": HostMemory(total=128 * GIB, available=100 * GIB),
                "host_memory.limit": 128 * GIB,
                "usable_cores": 32,
            },
        ),
        (
            cgroup(memory_max="max", cpu_max="max 100000"),
            {
                "host_memory.cgroup_limit": None,
                "host_memory.available": 100 * GIB,
                "usable_cores": 32,
            },
        ),
        (
            cgroup(
                memory_max=16 * GIB,
                memory_current=6 * GIB,
                memory_stat=f"anon 1\ninactive_file {2 * GIB}",
                cpu_max="250000 100000",
            ),
            {
                "host_memory.cgroup_limit": 16 * GIB,
                "host_memory.limit": 16 * GIB,
                "host_memory.available": 12 * GIB,
                "usable_cores": 2,
            },
        ),
        (
            cgroup(memory_max=900 * GIB),
            {"host_memory.limit": 128 * GIB, "host_memory.available": 100 * GIB},
        ),
        # Affinity and quota leave at least one usable core.
        ({"core_counts": FEW}, {"usable_cores": 4}),
        ({"core_counts": FEW, **cgroup(cpu_max="50000 100000")}, {"usable_cores": 1}),
        *(
            (privileges(capabilities), {"memlock_limit": limit})
            for capabilities, limit in (
                ("000001ffffffffff", None),
                ("0000000000004000", None),
                ("0000000000003fff", 65536),
                ("0000000000000000", 65536),
                ("not a number", 65536),
            )
        ),
        # Root of a container without root.
        (
            privileges("000001ffffffffff", uids="0 1000 1\n1 100000 65536\n"),
            {"memlock_limit": 65536},
        ),
    ],
)
def test_a_machine_is_described_by_its_facts(facts, expected):
    found = detect(**facts)

    assert {path: operator.attrgetter(path)(found) for path in expected} == expected


@pytest.mark.parametrize(
    ("facts", "change", "severity", "words"),
    [
        (
            {"facts": cuda(error="Found no NVIDIA driver on your system.")},
            ("platform.accelerator", "cuda", "cpu"),
            "warning",
            "Found no NVIDIA driver",
        ),
        *(
            (
                {**UNHIDDEN, "environment": {"CUDA_VISIBLE_DEVICES": hidden}},
                ("platform.accelerator", "cuda", "cpu"),
                "note",
                "CUDA_VISIBLE_DEVICES",
            )
            for hidden in ("", "-1")
        ),
        (
            {"facts": TorchFacts(accelerator="rocm", problem="no HIP device")},
            ("platform.accelerator", "rocm", "cpu"),
            "warning",
            "no HIP device",
        ),
        (
            {"facts": cuda(RTX_4090), "environment": {"DS_ACCELERATOR": "cpu"}},
            ("platform.accelerator", "cuda", "cpu"),
            "warning",
            RTX_4090.name,
        ),
        ({"facts": ROCM}, ("platform.deepspeed", None, "disabled"), "warning", "allow_rocm=True"),
        (
            {"facts": ROCM, "allow_rocm": True},
            ("platform.deepspeed", None, "cuda"),
            None,
            "allow_rocm=True",
        ),
        (mac(), ("platform.deepspeed", None, "disabled"), "warning", "macOS"),
        ({}, ("platform.deepspeed", None, "cpu"), "note", "DS_ACCELERATOR=cpu"),
    ],
)
def test_a_fallback_is_recorded_with_its_reason(facts, change, severity, words):
    found = detect(**facts)

    decision = found.decisions[0]
    assert (decision.key, decision.before, decision.after) == change
    assert severity in (None, decision.severity)
    assert words in decision.reason
    # A fallback to the CPU is followed by the note on DeepSpeed's accelerator there.
    on_cpu = [each.severity for each in found.decisions[1:]]
    assert on_cpu == (["note"] if change[0] == "platform.accelerator" else [])
    assert found.deepspeed.accelerator == ("cpu" if on_cpu else found.deepspeed.accelerator)


INSTALL, UPGRADE = "pip install 'deepspeed>=0.19.8'", "pip install --upgrade 'deepspeed>=0.19.8'"
LACKED = "unset DS_ACCELERATOR or set it to cpu"
REFUSED = "not an accelerator that DeepSpeed supports"


@pytest.mark.parametrize(
    ("facts", "reason", "fix"),
    [
        (
            {"facts": ROCM, "allow_rocm": True, "versions": without("deepspeed")},
            "deepspeed is not installed",
            INSTALL,
        ),
        *(
            ({"versions": {**INSTALLED, "deepspeed": version}}, version, UPGRADE)
            for version in ("0.18.9", "0.19.7", "0.19.8rc1")
        ),
        (mac(mps=False), "macOS", ""),
        (
            {"system_name": "Windows", "machine_name": "AMD64", "facts": cuda(RTX_4090)},
            "Windows",
            "WSL2",
        ),
        ({"versions": {**INSTALLED, "deepspeed": "0.16.0"}}, "0.16.0 is older than", "0.19.8"),
        ({"facts": None, "versions": without("torch")}, "torch is not installed", "install torch"),
        ({"facts": TorchFacts(import_error="libcudart.so.12: no")}, "libcudart.so.12", ""),
        *(
            ({"environment": {"DS_ACCELERATOR": name}}, f"DS_ACCELERATOR={name}", LACKED)
            for name in ("cuda", "xpu", "mps", "npu")
        ),
        *(({"environment": {"DS_ACCELERATOR": name}}, REFUSED, "") for name in ("", "CPU", "gpu")),
    ],
)
def test_deepspeed_is_unavailable_with_a_reason_and_a_fix(facts, reason, fix):
    found = detect(**facts)

    assert not found.deepspeed.available
    assert reason in found.deepspeed.reason
    assert fix in (found.deepspeed.fix or "")


class TestLogging:
    @pytest.fixture(autouse=True)
    def _nothing_announced_yet(self, monkeypatch):
        monkeypatch.setattr(decisions, "_announced", set())
        monkeypatch.delenv("RANK", raising=False)

    def test_the_reason_for_disabling_deepspeed_is_logged_once(self, caplog):
        probe = FakeProbe(**mac())
        with caplog.at_level(logging.INFO, logger="zerotune"):
            detect_platform(probe=probe)
            detect_platform(probe=probe)

        (record,) = caplog.records
        assert record.levelname == "WARNING"
        assert "macOS" in record.getMessage()


class TestSynthetic:
    def test_a_synthetic_platform_has_a_cpu_by_default(self):
        made = Platform.synthetic()

        assert (made.accelerator, made.devices, made.vram) == ("cpu", (), None)
        assert made.deepspeed.environment == {"DS_ACCELERATOR": "cpu"}
        assert (made.bf16, made.native_bf16, made.fp16) == (True, False, False)
        assert Platform.synthetic(native_bf16=True).native_bf16
        assert made.host_memory.available == made.host_memory.total == 64 * GIB

    @pytest.mark.parametrize(
        ("accelerator", "system", "name"),
        [
            ("cuda", "Linux", "cuda"),
            ("rocm", "Linux", "cuda"),
            ("xpu", "Linux", "xpu"),
            ("mps", "Darwin", "mps"),
        ],
    )
    def test_a_synthetic_platform_has_the_given_devices(self, accelerator, system, name):
        made = Platform.synthetic(accelerator, device_count=2, vram=8 * GIB)

        assert made.system == system
        assert [device.total_memory for device in made.devices] == [8 * GIB, 8 * GIB]
        assert made.vram == 8 * GIB
        assert made.fp16
        assert made.native_bf16
        assert not Platform.synthetic(accelerator, bf16=False).native_bf16
        assert made.deepspeed.accelerator == name

    def test_a_synthetic_platform_can_lack_deepspeed(self):
        made = Platform.synthetic("cuda", deepspeed=False)
        own = DeepSpeedSupport(available=False, reason="told so")

        assert not made.deepspeed.available
        assert Platform.synthetic(deepspeed=own).deepspeed is own

    @pytest.mark.parametrize("accelerator", ["gpu", "CUDA", ""])
    def test_an_unknown_accelerator_is_refused(self, accelerator):
        with pytest.raises(InvalidValueError, match="use one of cuda, rocm, mps, xpu, cpu"):
            Platform.synthetic(accelerator)


@pytest.fixture(scope="module")
def found():
    return detect_platform(log=False)


class TestThisMachine:
    def test_the_detected_system_matches_the_operating_system(self, found):
        assert found.system == standard_platform.system()
        assert found.versions["python"] == standard_platform.python_version()
        assert found.host_memory.total == psutil.virtual_memory().total
        assert 0 < found.host_memory.available <= found.host_memory.limit
        assert 1 <= found.usable_cores <= found.logical_cores == os.cpu_count()
        assert 1 <= found.physical_cores <= found.logical_cores
