"""The report on DeepSpeed's ops, taken from the real DeepSpeed in separate processes.

One process runs every scenario, because importing DeepSpeed takes seconds; scenarios that need no
DeepSpeed of their own are forked.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import attrs
import pytest

from tests.support.ranks import run_ranks

pytestmark = [
    pytest.mark.deepspeed,
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"
    ),
]
needs_tools = pytest.mark.skipif(
    shutil.which("c++") is None or shutil.which("ninja") is None,
    reason="needs a C++ compiler and ninja",
)

NAMES = [
    "cpu_adam",
    "cpu_adagrad",
    "cpu_lion",
    "async_io",
    "fused_adam",
    "fused_lion",
    "fused_lamb",
]
# DeepSpeed itself looks for libaio before it reports that async_io can be built.
WITHOUT_LIBAIO = [name for name in NAMES if name != "async_io"]


def python(script, timeout=280, **environment):
    """Run a script without a GPU and without DS_ACCELERATOR."""
    inherited = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**inherited, "CUDA_VISIBLE_DEVICES": "", "MAX_JOBS": "2", **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


SCENARIOS = """
    import json, os, sys, time
    from pathlib import Path

    import attrs

    from zerotune.backend import op_builds
    from zerotune.backend.ops import OP_NAMES, build_op, op_report
    from zerotune.errors import ZeroTuneError
    from zerotune.platform.toolchain import LibAio, Tool, Toolchain

    complete = Toolchain(
        cxx=Tool(path="/usr/bin/c++", version="12.2.0"),
        nvcc=None,
        cuda_home=None,
        ninja=Tool(path="/usr/bin/ninja", version="1.11.1"),
        python_headers=True,
        libaio=LibAio(header=True, library=True),
    )
    cache = Path(os.environ["TORCH_EXTENSIONS_DIR"])
    told = {}

    def report(name, **changes):
        found = op_report(toolchain=attrs.evolve(complete, **changes))
        told[name] = {op.name: {**attrs.asdict(op), "usable": op.usable} for op in found}

    def failure(name, op):
        try:
            build_op(op)
        except ZeroTuneError as error:
            told[name] = [type(error).__name__, str(error)]

    report("complete")
    told["touched"] = os.listdir(cache)
    report("no compiler", cxx=None, libaio=LibAio(header=None, library=None))
    report("broken compiler", cxx=Tool(path="/opt/bad/c++", version=None))
    report("no ninja", ninja=None)
    report("no Python.h", python_headers=False)
    report("no libaio header", libaio=LibAio(header=False, library=False))
    report("no libaio library", libaio=LibAio(header=True, library=False))

    for name, rules in {
        "cpu_adagrad": "build cpu_adagrad.so: phony\\n",
        "cpu_lion": "rule touch\\n  command = touch $out\\nbuild cpu_lion.so: touch x.cpp\\n",
        "fused_adam": None,
    }.items():
        (cache / name).mkdir()
        (cache / name / f"{name}.so").touch()
        if rules is not None:
            (cache / name / "build.ninja").write_text(rules)
    (cache / "cpu_lion" / "x.cpp").touch()
    report("cached")
    report("cached, no compiler", cxx=None)

    (cache / "cpu_adam").mkdir()
    (cache / "pin_memory").mkdir()
    with (cache / "pin_memory" / "lock").open("x"):
        report("held")
        os.utime(cache / "pin_memory" / "lock", (time.time() - 3600,) * 2)
        report("held for long")
    (cache / "cpu_adam" / "lock").touch()
    report("locked")
    os.utime(cache / "cpu_adam" / "lock", (time.time() - 3600,) * 2)
    # Of a local file system it would be taken over, and the op compiled.
    op_builds.filesystem_kind = lambda _folder: "nfs4"
    failure("build abandoned", "cpu_adam")
    failure("build absent", "fused_lamb")

    told["names"] = list(OP_NAMES)
    told["process"] = os.getpid()
    told["environment"] = os.environ.get("DS_ACCELERATOR")
    print("TOLD" + json.dumps(told))
"""


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    cache = tmp_path_factory.mktemp("extensions")
    done = python(SCENARIOS, TORCH_EXTENSIONS_DIR=str(cache))
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def told(process):
    return json.loads(process.stdout.split("TOLD")[1])


@needs_tools
class TestReport:
    def test_the_report_covers_the_ops_zerotune_uses(self, told):
        assert told["names"] == NAMES
        assert list(told["complete"]) == NAMES
        assert all(op["purpose"] for op in told["complete"].values())

    def test_gpu_kernels_are_absent_on_a_cpu(self, told):
        found = told["complete"]

        states = {name: found[name]["state"] for name in WITHOUT_LIBAIO}
        assert states == {
            **dict.fromkeys(WITHOUT_LIBAIO, "buildable"),
            "fused_lion": "absent",
            "fused_lamb": "absent",
        }
        usable = [name for name in WITHOUT_LIBAIO if found[name]["usable"]]
        assert usable == [name for name in NAMES[:5] if name != "async_io"]
        assert "cpu_lion" in found["fused_lion"]["fix"]
        assert "zerotune's Lamb" in found["fused_lamb"]["fix"]

    @pytest.mark.nvme
    def test_async_io_is_buildable_where_libaio_is_installed(self, told):
        assert told["complete"]["async_io"]["state"] == "buildable"
        assert told["complete"]["async_io"]["usable"]

    def test_the_report_builds_nothing_and_leaves_no_folder(self, told):
        assert told["touched"] == []

    def test_the_report_neither_prints_nor_sets_the_environment(self, process, told):
        assert process.stdout.startswith("TOLD")
        assert "accelerator" not in process.stderr
        assert told["environment"] is None

    @pytest.mark.parametrize(
        ("scenario", "op", "cause", "fix"),
        [
            ("no compiler", "cpu_adam", "no C++ compiler", "install g++"),
            ("no compiler", "async_io", "no C++ compiler", "install g++"),
            ("broken compiler", "cpu_adam", "/opt/bad/c++ does not run", "CXX"),
            ("no ninja", "cpu_lion", "ninja is not installed", "pip install ninja"),
            ("no Python.h", "cpu_adagrad", "Python.h", "-dev"),
            ("no libaio header", "async_io", "header libaio.h of libaio", "libaio-dev"),
            ("no libaio library", "async_io", "library of libaio", "libaio-dev"),
        ],
    )
    def test_a_blocked_op_names_its_root_cause(self, told, scenario, op, cause, fix):
        found = told[scenario][op]

        assert found["state"] == "blocked"
        assert not found["usable"]
        assert cause in found["cause"]
        assert fix in found["fix"]

    def test_compiled_ops_are_reported_as_built_or_stale(self, told):
        found = told["cached"]

        assert found["cpu_adagrad"]["state"] == "built"
        assert Path(found["cpu_adagrad"]["path"]).name == "cpu_adagrad.so"
        assert found["cpu_lion"]["state"] == "stale"
        assert found["cpu_lion"]["cause"].startswith("ninja reports: ")
        assert found["fused_adam"]["state"] == "stale"
        assert found["cpu_adam"]["state"] == "buildable"

    def test_a_compiled_op_needs_no_compiler_but_a_stale_one_does(self, told):
        found = told["cached, no compiler"]

        assert found["cpu_adagrad"]["state"] == "built"
        assert found["cpu_lion"]["state"] == "blocked"

    @pytest.mark.nvme
    @pytest.mark.parametrize("scenario", ["held", "held for long"])
    def test_a_build_in_progress_is_reported_with_the_advice_to_wait(self, told, scenario):
        found = told[scenario]["async_io"]

        assert found["state"] == "locked"
        assert f"process {told['process']} has been compiling" in found["cause"]
        assert found["fix"] == "wait until that process has finished"

    def test_a_lock_that_no_process_holds_is_reported_with_its_path(self, told):
        found = told["locked"]["cpu_adam"]

        assert found["state"] == "locked"
        assert "no process on this host holds the lock" in found["cause"]
        assert str(Path("cpu_adam", "lock")) in found["fix"]

    def test_building_does_not_wait_for_an_abandoned_lock(self, told):
        kind, message = told["build abandoned"]

        assert kind == "PlatformError"
        assert message.startswith("op cpu_adam: ")
        assert "delete" in message

    def test_building_an_op_without_implementation_is_refused(self, told):
        kind, message = told["build absent"]

        assert kind == "PlatformError"
        assert "does not implement this op" in message


CUDA = """
    import json
    from unittest import mock

    import torch
    from deepspeed.accelerator import get_accelerator

    from zerotune.backend.ops import op_report
    from zerotune.platform.toolchain import LibAio, Tool, Toolchain

    get_accelerator()
    told = {}
    for name, nvcc in {
        "absent": None,
    }.items():
        toolchain = Toolchain(
            cxx=Tool(path="/usr/bin/c++", version="12.2.0"),
            nvcc=nvcc,
            cuda_home="/usr/local/cuda",
            ninja=Tool(path="/usr/bin/ninja", version="1.11.1"),
            python_headers=True,
            libaio=LibAio(header=True, library=True),
        )
        # The builders are DeepSpeed's for CUDA; only what torch says of the machine is made up.
        with (
            mock.patch.object(torch.version, "cuda", "12.8"),
            mock.patch.object(torch.cuda, "is_available", lambda: True),
        ):
            found = op_report(toolchain=toolchain)
        told[name] = {op.name: [op.state, op.cause, op.fix] for op in found}
    print("TOLD" + json.dumps(told))
"""


@needs_tools
class TestCuda:
    @pytest.fixture(scope="class")
    @classmethod
    def told(cls, tmp_path_factory):
        cache = tmp_path_factory.mktemp("extensions")
        done = python(CUDA, DS_ACCELERATOR="cuda", TORCH_EXTENSIONS_DIR=str(cache))
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.split("TOLD")[1])

    def test_cpu_ops_need_no_cuda_compiler(self, told):
        states = {name: state for name, (state, _, _) in told["absent"].items()}

        assert states == {
            **dict.fromkeys(NAMES, "blocked"),
            **dict.fromkeys(["cpu_adam", "cpu_adagrad", "cpu_lion"], "buildable"),
        }

    def test_a_missing_nvcc_is_reported_as_the_cause(self, told):
        assert told["absent"]["fused_adam"] == [
            "blocked",
            "CUDA's compiler nvcc is missing in /usr/local/cuda",
            "install the CUDA 12.8 toolkit, and set CUDA_HOME to its folder",
        ]


def build_adam():
    from deepspeed.ops.op_builder.builder import OpBuilder

    from zerotune.backend.ops import build_op
    from zerotune.errors import PlatformError

    # Imitate a process that has not loaded the op yet.
    OpBuilder._loaded_ops.clear()
    try:
        return attrs.asdict(build_op("cpu_adam"))
    except PlatformError as error:
        return [error.key, error.reason, error.fix]


@needs_tools
def test_a_failed_build_names_the_root_cause(tmp_path):
    # A system header that includes a missing file breaks any source file at once.
    headers = tmp_path / "headers"
    headers.mkdir()
    (headers / "stdio.h").write_text("#include <there_is_no_such_header.h>\n")
    environment = {"TORCH_EXTENSIONS_DIR": str(tmp_path / "cache"), "CPATH": str(headers)}

    (found,) = run_ranks(build_adam, env=environment)

    assert found == [
        "op cpu_adam",
        "the header there_is_no_such_header.h is missing",
        "install the package that contains there_is_no_such_header.h",
    ]


REPORT = """
    import sys
    from zerotune.backend.ops import op_report
    from zerotune.errors import ZeroTuneError

    class Absent:
        def find_spec(self, name, *_):
            if name.startswith("deepspeed"):
                raise ModuleNotFoundError("No module named 'deepspeed'", name="deepspeed")

    if "absent" in sys.argv:
        sys.meta_path.insert(0, Absent())
    try:
        op_report()
    except ZeroTuneError as error:
        print(type(error).__name__, error)
"""


def test_a_deepspeed_that_fails_to_import_is_reported_in_one_line():
    done = python("import os\nos.environ['DS_ACCELERATOR'] = 'gpu'\n" + textwrap.dedent(REPORT))

    assert done.stdout.startswith(
        "PlatformError deepspeed cannot be imported: ValueError: DS_ACCELERATOR must be one of"
    )
    assert len(done.stdout.splitlines()) == 1


def test_a_missing_deepspeed_is_reported_in_one_line():
    done = python("import sys\nsys.argv.append('absent')\n" + textwrap.dedent(REPORT))

    assert done.stdout.strip() == (
        "MissingDependencyError deepspeed is not installed. Fix: pip install deepspeed."
    )
