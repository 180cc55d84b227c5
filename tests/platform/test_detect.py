"""Detection of every kind of machine, with facts from a fake probe."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import pickle
import platform as standard_platform
import subprocess
import sys
from pathlib import Path

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


def only_decision(platform):
    (decision,) = platform.decisions
    return decision


class TestCuda:
    def test_two_devices_count_with_the_memory_of_the_smaller(self):
        found = detect(facts=cuda(RTX_4090, T4))

        assert found.accelerator == "cuda"
        assert found.devices == (RTX_4090, T4)
        assert found.vram == 15 * GIB
        assert found.torch_build == "cuda 12.8"
        assert found.deepspeed.available
        assert found.deepspeed.environment == {"DS_ACCELERATOR": "cuda"}
        assert found.decisions == ()
        assert found.versions == {"python": "3.12.4", **INSTALLED}

    @pytest.mark.parametrize(
        ("devices", "bf16", "fp16"),
        [
            ((RTX_4090,), True, True),
            ((T4,), False, True),
            ((P100,), False, False),
            ((RTX_4090, T4), False, True),
        ],
    )
    def test_the_oldest_device_decides_the_precision(self, devices, bf16, fp16):
        found = detect(facts=cuda(*devices))

        assert (found.bf16, found.native_bf16, found.fp16) == (bf16, bf16, fp16)

    def test_without_a_driver_the_cpu_is_used_and_the_reason_recorded(self):
        found = detect(facts=cuda(error="Found no NVIDIA driver on your system."))

        missing, on_cpu = found.decisions
        assert found.accelerator == "cpu"
        assert found.torch_build == "cuda 12.8"
        assert found.deepspeed.accelerator == "cpu"
        assert (missing.key, missing.before, missing.after) == (
            "platform.accelerator",
            "cuda",
            "cpu",
        )
        assert missing.severity == "warning"
        assert "Found no NVIDIA driver" in missing.reason
        assert on_cpu.severity == "note"

    @pytest.mark.parametrize("hidden", ["", "-1"])
    def test_hidden_devices_give_only_a_note(self, hidden):
        found = detect(
            facts=cuda(error="No CUDA GPUs are available"),
            environment={"CUDA_VISIBLE_DEVICES": hidden},
        )

        assert found.accelerator == "cpu"
        assert found.decisions[0].severity == "note"
        assert "CUDA_VISIBLE_DEVICES" in found.decisions[0].reason


class TestRocm:
    facts = TorchFacts(accelerator="rocm", version="6.4.1", devices=(MI300X,))

    def test_deepspeed_is_disabled_on_rocm_by_default(self):
        found = detect(facts=self.facts)

        assert found.accelerator == "rocm"
        assert found.torch_build == "rocm 6.4.1"
        assert (found.bf16, found.fp16) == (True, True)
        assert not found.deepspeed.available
        assert found.deepspeed.accelerator is None
        assert found.deepspeed.environment == {}
        assert "allow_rocm=True" in found.deepspeed.fix
        assert only_decision(found).severity == "warning"
        assert only_decision(found).after == "disabled"

    def test_allow_rocm_enables_deepspeed(self):
        found = detect(facts=self.facts, allow_rocm=True)

        assert found.deepspeed.available
        assert found.deepspeed.accelerator == "cuda"
        assert "allow_rocm=True" in only_decision(found).reason
        assert only_decision(found).after == "cuda"

    def test_a_missing_driver_is_reported_as_rocm(self):
        found = detect(facts=TorchFacts(accelerator="rocm", problem="no HIP device"))

        assert found.accelerator == "cpu"
        assert found.decisions[0].before == "rocm"


class TestMac:
    def test_deepspeed_is_disabled_on_macos(self):
        found = detect(**mac())

        assert found.accelerator == "mps"
        assert found.devices == (M2,)
        assert found.torch_build == "mps"
        assert not found.deepspeed.available
        assert "macOS" in found.deepspeed.reason
        assert only_decision(found).severity == "warning"

    @pytest.mark.parametrize("new_enough", [True, False])
    def test_bf16_depends_on_the_macos_release(self, new_enough):
        facts = TorchFacts(accelerator="mps", devices=(M2,), mps_bf16=new_enough)
        found = detect(**mac(facts=facts))

        assert (found.bf16, found.fp16) == (new_enough, True)


class TestXpu:
    def test_deepspeed_runs_on_xpu(self):
        found = detect(facts=TorchFacts(accelerator="xpu", devices=(ARC,)))

        assert found.accelerator == "xpu"
        assert found.torch_build == "xpu"
        assert found.deepspeed.accelerator == "xpu"
        assert (found.bf16, found.fp16) == (True, True)
        assert found.decisions == ()


class TestCpu:
    def test_without_a_gpu_deepspeed_uses_its_cpu_accelerator_on_linux(self):
        found = detect()

        assert found.accelerator == "cpu"
        assert found.devices == ()
        assert found.vram is None
        assert found.torch_build == "cpu"
        assert found.deepspeed.environment == {"DS_ACCELERATOR": "cpu"}
        assert "DS_ACCELERATOR=cpu" in found.deepspeed.reason
        assert only_decision(found).severity == "note"

    @pytest.mark.parametrize("native", [True, False])
    def test_fp16_on_a_cpu_requires_native_arithmetic(self, native):
        found = detect(facts=TorchFacts(cpu_fp16=native))

        assert (found.bf16, found.fp16) == (True, native)

    @pytest.mark.parametrize(
        ("cpuinfo", "native"),
        [
            ("model name\t: AMD EPYC\nflags\t\t: fpu avx2 avx512f avx512_bf16\n", True),
            ("flags\t\t: fpu avx512f amx_bf16 amx_tile\n", True),
            ("Features\t: fp asimd bf16 i8mm\n", True),
            ("flags\t\t: fpu avx2 avx512f\nbugs\t\t: bf16\n", False),
            ("", False),
        ],
    )
    def test_bf16_always_runs_and_is_native_where_the_kernel_says_so(self, cpuinfo, native):
        found = detect(files={"/proc/cpuinfo": cpuinfo})

        assert (found.bf16, found.native_bf16) == (True, native)


INSTALL, UPGRADE = "pip install 'deepspeed>=0.19.8'", "pip install --upgrade 'deepspeed>=0.19.8'"
LACKED = "unset DS_ACCELERATOR or set it to cpu"
REFUSED = "not an accelerator that DeepSpeed supports"


@pytest.mark.parametrize(
    ("facts", "reason", "fix"),
    [
        (
            {"facts": TestRocm.facts, "allow_rocm": True, "versions": without("deepspeed")},
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


class TestMissingPackages:
    def test_an_unreadable_version_is_not_refused(self):
        found = detect(versions={**INSTALLED, "deepspeed": "my-branch"})

        assert found.deepspeed.available


class TestEnvironment:
    def test_a_matching_variable_changes_nothing(self):
        plain = detect(facts=cuda(RTX_4090))

        assert detect(facts=cuda(RTX_4090), environment={"DS_ACCELERATOR": "cuda"}) == plain

    def test_rocm_uses_the_accelerator_name_cuda(self):
        found = detect(
            facts=TestRocm.facts, allow_rocm=True, environment={"DS_ACCELERATOR": "cuda"}
        )

        assert found.accelerator == "rocm"
        assert found.deepspeed.available

    def test_the_variable_cpu_on_a_gpu_machine_is_respected_with_a_warning(self):
        found = detect(facts=cuda(RTX_4090), environment={"DS_ACCELERATOR": "cpu"})

        overridden = found.decisions[0]
        assert found.accelerator == "cpu"
        assert found.devices == ()
        assert not found.fp16
        assert found.deepspeed.accelerator == "cpu"
        assert (overridden.before, overridden.after) == ("cuda", "cpu")
        assert overridden.severity == "warning"
        assert RTX_4090.name in overridden.reason


class TestMemoryAndCores:
    def test_without_a_container_the_whole_machine_is_usable(self):
        found = detect()

        assert found.host_memory == HostMemory(total=128 * GIB, available=100 * GIB)
        assert found.host_memory.limit == 128 * GIB
        assert found.usable_cores == 32

    def test_an_unlimited_cgroup_v2_gives_no_limit(self):
        found = detect(
            files={
                **V2_FILES,
                "/sys/fs/cgroup/job/memory.max": "max\n",
                "/sys/fs/cgroup/job/cpu.max": "max 100000\n",
            }
        )

        assert found.host_memory.cgroup_limit is None
        assert found.host_memory.available == 100 * GIB
        assert found.usable_cores == 32

    def test_a_limited_cgroup_v2_gives_its_limits(self):
        found = detect(
            files={
                **V2_FILES,
                "/sys/fs/cgroup/job/memory.max": f"{16 * GIB}\n",
                "/sys/fs/cgroup/job/memory.current": f"{6 * GIB}\n",
                "/sys/fs/cgroup/job/memory.stat": f"anon 1\ninactive_file {2 * GIB}\n",
                "/sys/fs/cgroup/job/cpu.max": "250000 100000\n",
            }
        )

        assert found.host_memory.cgroup_limit == 16 * GIB
        assert found.host_memory.limit == 16 * GIB
        assert found.host_memory.available == 12 * GIB
        assert found.usable_cores == 2

    def test_a_cgroup_limit_above_the_ram_has_no_effect(self):
        found = detect(files={**V2_FILES, "/sys/fs/cgroup/job/memory.max": str(900 * GIB)})

        assert found.host_memory.limit == 128 * GIB
        assert found.host_memory.available == 100 * GIB

    def test_affinity_and_quota_leave_at_least_one_usable_core(self):
        few = Cores(physical=16, logical=32, affinity=4)
        quota = {**V2_FILES, "/sys/fs/cgroup/job/cpu.max": "50000 100000\n"}

        assert detect(core_counts=few).usable_cores == 4
        assert detect(core_counts=few, files=quota).usable_cores == 1

    @pytest.mark.parametrize(
        ("capabilities", "limit"),
        [
            ("000001ffffffffff", None),
            ("0000000000004000", None),
            ("0000000000003fff", 65536),
            ("0000000000000000", 65536),
            ("not a number", 65536),
        ],
    )
    def test_memlock_does_not_limit_a_privileged_process(self, capabilities, limit):
        status = f"Name:\tpython\nCapInh:\t0\nCapEff:\t{capabilities}\n"
        files = {"/proc/self/status": status, "/proc/self/uid_map": f"{0:10} {0:10} 4294967295\n"}

        found = detect(locked_memory=65536, files=files)

        assert found.memlock_limit == limit

    def test_memlock_limits_root_of_a_rootless_container(self):
        files = {
            "/proc/self/status": "CapEff:\t000001ffffffffff\n",
            "/proc/self/uid_map": "0 1000 1\n1 100000 65536\n",
        }

        assert detect(locked_memory=65536, files=files).memlock_limit == 65536


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

    def test_detect_can_leave_logging_to_its_caller(self, caplog):
        with caplog.at_level(logging.INFO, logger="zerotune"):
            detect_platform(probe=FakeProbe(**mac()), log=False)

        assert caplog.records == []


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

    def test_a_synthetic_cgroup_limit_bounds_the_memory(self):
        made = Platform.synthetic(ram=64 * GIB, available_ram=40 * GIB, cgroup_limit=32 * GIB)

        assert made.host_memory.limit == 32 * GIB
        assert made.host_memory.available == 32 * GIB

    def test_a_synthetic_platform_can_lack_deepspeed(self):
        made = Platform.synthetic("cuda", deepspeed=False)
        own = DeepSpeedSupport(available=False, reason="told so")

        assert not made.deepspeed.available
        assert Platform.synthetic(deepspeed=own).deepspeed is own

    @pytest.mark.parametrize("accelerator", ["gpu", "CUDA", ""])
    def test_an_unknown_accelerator_is_refused(self, accelerator):
        with pytest.raises(InvalidValueError, match="use one of cuda, rocm, mps, xpu, cpu"):
            Platform.synthetic(accelerator)

    def test_a_platform_is_a_hashable_immutable_value(self):
        made = Platform.synthetic("cuda", versions={"torch": "2.9.0"})

        assert pickle.loads(pickle.dumps(made)) == made
        assert hash(made) == hash(attrs.evolve(made))
        with pytest.raises(attrs.exceptions.FrozenInstanceError):
            made.accelerator = "cpu"


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

    def test_detected_versions_match_the_installed_packages(self, found):
        import torch

        assert found.versions["torch"] == importlib.metadata.version("torch")
        assert found.torch_build is not None
        if torch.cuda.is_available():
            assert found.accelerator in {"cuda", "rocm"}
            assert len(found.devices) == torch.cuda.device_count()
        else:
            assert found.accelerator not in {"cuda", "rocm"}

    @pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
    def test_detected_memory_agrees_with_the_kernel(self, found):
        first = Path("/proc/meminfo").read_text(encoding="ascii").split()[:2]

        assert first[0] == "MemTotal:"
        assert found.host_memory.total == int(first[1]) * 1024

    def test_a_platform_can_be_serialised_to_json(self, found):
        read = json.loads(json.dumps(attrs.asdict(found)))

        assert read["host_memory"]["total"] == found.host_memory.total
        assert read["deepspeed"]["reason"] == found.deepspeed.reason


def test_importing_the_module_loads_no_heavy_package():
    script = (
        "import sys, zerotune.platform as p; p.Platform.synthetic('cuda');"
        "print([m for m in ('torch', 'deepspeed', 'numpy', 'psutil', 'packaging', 'rich') "
        "if m in sys.modules])"
    )

    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )

    assert done.stdout.strip() == "[]"
