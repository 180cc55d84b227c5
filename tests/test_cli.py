from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import attrs
import pytest

from zerotune import cli
from zerotune.backend.ops import OpStatus
from zerotune.cli import doctor
from zerotune.cli.doctor import Checkup
from zerotune.decisions import Decision
from zerotune.errors import InvalidValueError, PlatformError
from zerotune.platform import Platform
from zerotune.platform.facts import GIB, DeepSpeedSupport
from zerotune.platform.toolchain import LibAio, Tool, Toolchain


def run(*arguments, **environment):
    inherited = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    return subprocess.run(
        [sys.executable, "-m", "zerotune", *arguments],
        env={**inherited, "CUDA_VISIBLE_DEVICES": "", **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


class TestMain:
    @pytest.fixture
    def behave(self, monkeypatch):
        """Return a function that installs a command which runs a given function."""

        def install(action):
            command = SimpleNamespace(
                configure=lambda parser: parser.add_argument("--word"),
                run=action,
            )
            monkeypatch.setitem(sys.modules, "zerotune.cli.act", command)
            monkeypatch.setattr(cli, "_COMMANDS", {"act": "Act."})

        return install

    @pytest.mark.parametrize("status", [0, 1])
    def test_the_status_of_the_command_becomes_the_exit_status(self, behave, status):
        behave(lambda _arguments: status)

        assert cli.main(["act"]) == status

    def test_an_error_prints_one_line_to_stderr(self, behave, capsys):
        def fail(_arguments):
            raise InvalidValueError("too\nlong", key="a.b", value=3, fix="write 2")

        behave(fail)

        assert cli.main(["act"]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err == "error: a.b = 3: too long. Fix: write 2.\n"

    def test_a_bug_shows_its_traceback(self, behave):
        def fail(_arguments):
            raise RuntimeError("a bug")

        behave(fail)

        with pytest.raises(RuntimeError, match="a bug"):
            cli.main(["act"])

    def test_an_interrupt_prints_one_line_and_returns_status_130(self, behave, capsys):
        def interrupt(_arguments):
            raise KeyboardInterrupt

        behave(interrupt)

        assert cli.main(["act"]) == 130
        assert capsys.readouterr().err == "zerotune: interrupted\n"

    @pytest.mark.parametrize("arguments", [[], ["no-such-command"], ["doctor", "--nonsense"]])
    def test_wrong_usage_gives_status_2(self, arguments, capsys):
        with pytest.raises(SystemExit) as stopped:
            cli.main(arguments)

        assert stopped.value.code == 2
        assert "usage: zerotune" in capsys.readouterr().err

    def test_help_lists_the_commands(self, capsys):
        with pytest.raises(SystemExit) as stopped:
            cli.main(["--help"])

        assert stopped.value.code == 0
        assert "unavailable." in capsys.readouterr().out

    def test_version_is_printed(self, capsys):
        with pytest.raises(SystemExit) as stopped:
            cli.main(["--version"])

        assert stopped.value.code == 0
        assert capsys.readouterr().out.startswith("zerotune ")

    def test_a_closed_pipe_gives_no_traceback(self):
        script = """
            import sys
            from types import SimpleNamespace
            from zerotune import cli

            def talk(_arguments):
                for _ in range(100_000):
                    sys.stdout.write("a line that fills the pipe\\n")
                return 0

            sys.modules["zerotune.cli.act"] = SimpleNamespace(
                configure=lambda parser: None, run=talk
            )
            cli._COMMANDS = {"act": "Act."}
            sys.exit(cli.main(["act"]))
        """
        talker = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        talker.stdout.readline()
        talker.stdout.close()

        assert talker.stderr.read() == ""
        assert talker.wait(timeout=120) == 1
        talker.stderr.close()


TOOLCHAIN = Toolchain(
    cxx=Tool(path="/usr/bin/c++", version="12.2.0"),
    nvcc=None,
    cuda_home=None,
    ninja=Tool(path="/usr/bin/ninja", version="1.11.1"),
    python_headers=True,
    libaio=LibAio(header=True, library=False),
)
ADAM = OpStatus(name="cpu_adam", purpose="AdamW under offload", state="built", path="/c/adam.so")
LIBAIO = OpStatus(
    name="async_io",
    purpose="offload to NVMe",
    state="blocked",
    cause="the library of libaio is missing",
    fix="install libaio-dev",
)


def checkup(described=None, *, ops=(ADAM, LIBAIO), **changes):
    return Checkup(
        platform=described or Platform.synthetic("cuda", device_count=2),
        toolchain=TOOLCHAIN,
        ops=ops,
        **changes,
    )


class TestVerdict:
    def test_a_missing_optional_op_is_still_healthy(self):
        found = checkup()

        assert found.healthy
        assert found.verdict.endswith("1 of 2 ops can be used (not async_io).")

    def test_a_disabled_deepspeed_is_the_verdict(self):
        support = DeepSpeedSupport(
            available=False, reason="deepspeed is not installed", fix="pip install deepspeed"
        )
        found = checkup(Platform.synthetic(deepspeed=support), ops=())

        assert not found.healthy
        assert found.verdict == (
            "DeepSpeed does not run here: deepspeed is not installed. Fix: pip install deepspeed."
        )

    def test_without_cpu_adam_the_verdict_is_no_offload(self):
        broken = attrs.evolve(ADAM, state="blocked", cause="no C++ compiler is installed")
        found = checkup(ops=(broken, LIBAIO))

        assert not found.healthy
        assert "cannot be offloaded: cpu_adam: no C++ compiler is installed." in found.verdict

    def test_a_deepspeed_that_fails_to_import_is_the_verdict(self, monkeypatch):
        def fail(**_):
            raise PlatformError("deepspeed cannot be imported: OSError: x")

        monkeypatch.setattr(doctor, "op_report", fail)
        found = Checkup.of(Platform.synthetic())

        assert not found.healthy
        assert found.verdict == (
            "DeepSpeed does not run here: deepspeed cannot be imported: OSError: x."
        )


class TestOutput:
    @pytest.fixture
    def printed(self, capsys):
        warning = Decision(
            key="platform.accelerator",
            before="cuda",
            after="cpu",
            reason="a reason that is much longer than a terminal is wide, so that wrapping it "
            "would break the line and nobody could search for it",
            severity="warning",
        )
        described = Platform.synthetic(
            "cuda",
            device_count=2,
            vram=24 * GIB,
            cgroup_limit=32 * GIB,
            memlock_limit=8 * 1024**2,
            versions={"torch": "2.9.0"},
            decisions=(warning,),
        )
        doctor.page(checkup(described).to_dict()).print()
        return capsys.readouterr().out

    def test_output_to_a_file_is_plain(self, printed):
        assert "\x1b" not in printed
        assert printed.isascii()

    def test_long_lines_are_not_cut(self, printed):
        assert "wrapping it would break the line and nobody could search for it" in printed

    def test_every_fact_has_its_line(self, printed):
        for line in [
            "devices.1.name           Synthetic CUDA device",
            "devices.1.total_memory   24.00 GiB",
            "host_memory.available    32.00 GiB",
            "host_memory.cgroup_limit 32.00 GiB",
            "memlock_limit            8.00 MiB",
            "versions.torch           2.9.0",
            "cxx.path           /usr/bin/c++",
            "nvcc               none",
            "libaio.library     False",
            "ops_folder         none",
            "cpu_adam           built      AdamW under offload",
            "async_io           blocked    offload to NVMe; the library of libaio is missing",
            "warning            platform.accelerator: 'cuda' -> 'cpu' (a reason",
        ]:
            assert f"  {line}" in printed

    def test_the_verdict_is_the_last_line(self, printed):
        assert printed.splitlines()[-1] == f"Verdict: {checkup().verdict}"

    def test_json_contains_all_facts(self):
        found = json.loads(json.dumps(checkup().to_dict()))

        assert found["platform"]["host_memory"]["limit"] == 64 * GIB
        assert found["platform"]["deepspeed"]["environment"] == {"DS_ACCELERATOR": "cuda"}
        assert found["toolchain"]["libaio"] == {"header": True, "library": False}
        assert [op["state"] for op in found["ops"]] == ["built", "blocked"]
        assert found["verdict"]["healthy"] is True


class TestBuild:
    def test_building_an_op_is_refused_where_deepspeed_does_not_run(self):
        with pytest.raises(PlatformError, match="--build: the synthetic platform"):
            doctor._build(["cpu_adam"], Platform.synthetic(deepspeed=False))


@pytest.mark.deepspeed
@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"
)
class TestThisMachine:
    def test_only_json_goes_to_stdout(self, tmp_path):
        done = run("doctor", "--json", TORCH_EXTENSIONS_DIR=str(tmp_path))

        found = json.loads(done.stdout)
        assert done.returncode == (0 if found["verdict"]["healthy"] else 1)
        assert found["platform"]["system"] == platform.system()
        assert found["platform"]["versions"]["python"] == sys.version.split()[0]
        assert found["ops_folder"] in (str(tmp_path), None)
        assert list(tmp_path.iterdir()) == []

    def test_an_unknown_op_gives_one_line_and_status_2(self):
        done = run("doctor", "--build", "cpu_adm")

        assert done.returncode == 2
        assert done.stdout == ""
        assert done.stderr.splitlines()[-1] == (
            "error: op = 'cpu_adm': no such op. Fix: did you mean cpu_adam."
        )
        assert "Traceback" not in done.stderr

    def test_a_contradicting_variable_is_the_verdict(self):
        done = run("doctor", DS_ACCELERATOR="xpu")

        assert done.returncode == 1, done.stderr
        assert done.stdout.startswith("Platform\n")
        assert "Setting accelerator" not in done.stdout + done.stderr
        assert re.match("Verdict: .*DS_ACCELERATOR=xpu", done.stdout.splitlines()[-1])


def test_messages_wrap_at_the_width_of_the_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for say, mark in ((cli.tell, "zerotune: "), (cli.complain, "error: ")):
        say("word " * 30)
        lines = capsys.readouterr().err.splitlines()
        assert lines[0].startswith(mark)
        assert all(line.startswith(" " * len(mark)) for line in lines[1:])
        assert 30 < max(map(len, lines)) <= 40
