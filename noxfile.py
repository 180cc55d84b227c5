"""All developer tasks. ``nox -l`` lists them; ``nox -s demo`` is the main one."""

from __future__ import annotations

import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nox

nox.needs_version = ">=2024.10.9"
nox.options.sessions = ["tests"]
nox.options.default_venv_backend = "virtualenv"

ROOT = Path(__file__).parent
CONSTRAINTS = str(ROOT / "constraints.txt")
PYTHON = os.environ.get("ZEROTUNE_PYTHON")
# DeepSpeed compiles its ops against one environment's headers. Sessions that train share one
# environment and one cache, so that each op is compiled once per checkout.
SHARED = ROOT / ".nox" / "zerotune"
EXTENSIONS = str(ROOT / ".nox" / "torch_extensions")
ENGINES = ("deepspeed", "torch")


def versions(written: str) -> dict[str, str]:
    """Return the versions of the packages that engines depend on, from a file of the project."""
    lines = Path(ROOT, written).read_text(encoding="utf-8")
    found = re.findall(rf'^ *"?({"|".join(ENGINES)})[>=]=([\d.]+)', lines, re.MULTILINE)
    return dict(found)


OLDEST, NEWEST = versions("pyproject.toml"), versions("constraints.txt")

STYLE = ("-m", "ruff", "check", ".")
FORMAT = ("-m", "ruff", "format", "--check", ".")
TYPES = ("-m", "mypy")
LAYERS = (
    "-c",
    "from importlinter.cli import lint_imports_command; lint_imports_command()",
    "--no-cache",
)
# Whole files per worker, in the order of tests/conftest.py. Three workers, since tests that wait
# for a process leave a core idle.
THREE_AT_A_TIME = ("-n", "3", "--dist", "loadfile", "--no-loadscope-reorder")


def install(session: nox.Session, *what: str) -> None:
    """Install into the session's own environment, under the constraints."""
    session.install("-c", CONSTRAINTS, *what)


def run(session: nox.Session, *command: str, **options: Any) -> None:
    """Run a module or script with the shared environment's Python."""
    session.run(str(SHARED / "bin" / "python"), *command, external=True, **options)


@contextmanager
def logged_every(seconds: float, session: nox.Session, what: str) -> Iterator[None]:
    """Log ``what`` with the seconds so far: pip unpacks torch in silence for minutes."""
    begun, over = time.monotonic(), threading.Event()

    def say() -> None:
        while not over.wait(seconds):
            session.log(f"{what} ({time.monotonic() - begun:.0f} s)")

    threading.Thread(target=say, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def shared_environment(session: nox.Session) -> None:
    """Install zerotune with its development extras into ``.nox/zerotune``, unless it is there."""
    if not (SHARED / "bin" / "python").exists():
        session.run(sys.executable, "-m", "venv", str(SHARED), external=True)
    session.env["VIRTUAL_ENV"] = str(SHARED)
    session.env["PATH"] = f"{SHARED / 'bin'}{os.pathsep}{os.environ['PATH']}"
    stamp = SHARED / ".installed"
    wanted = Path(CONSTRAINTS).read_text() + (ROOT / "pyproject.toml").read_text()
    if not stamp.exists() or stamp.read_text() != wanted:
        with logged_every(15, session, "still installing packages"):
            run(session, "-m", "pip", "install", "-c", CONSTRAINTS, "-e", ".[dev]")
        stamp.write_text(wanted)


def training_environment(session: nox.Session, *ops: str) -> None:
    """Prepare the shared environment, and compile DeepSpeed's ops (all, or those named) once."""
    shared_environment(session)
    session.env["TORCH_EXTENSIONS_DIR"] = EXTENSIONS
    session.env.setdefault("MAX_JOBS", str(os.cpu_count() or 2))
    # On machines with few cores, spinning threads of one process starve the others.
    session.env.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Exit code 1: DeepSpeed cannot run here, and the plain engine runs instead.
    run(session, "-m", "zerotune", "doctor", "--build", *ops, success_codes=[0, 1])


@nox.session(python=False)
def demo(session: nox.Session) -> None:
    """Train on real digits under ZeRO-2 with CPU offload; write images and figures."""
    training_environment(session, "cpu_adam")
    run(session, "examples/digits.py", *session.posargs)


@nox.session(python=False)
def tests(session: nox.Session) -> None:
    """Check style, types and layers, then run the whole suite with the real DeepSpeed engine."""
    training_environment(session)
    # Each rank imports its test again: write bytecode even if the environment disables it.
    session.env["PYTHONDONTWRITEBYTECODE"] = ""
    if not session.posargs:
        run(session, *STYLE)
        run(session, *FORMAT)
        run(session, *TYPES)
        run(session, *LAYERS)
    run(session, "-m", "pytest", *(session.posargs or THREE_AT_A_TIME))


@nox.session(python=False)
def durations(session: nox.Session) -> None:
    """Run the suite on an idle machine, and record in tests/durations.json what each file costs."""
    training_environment(session)
    run(session, "-m", "pytest", "-p", "tests.support.recording", *THREE_AT_A_TIME)


@nox.session(python=PYTHON)
def lint(session: nox.Session) -> None:
    """Check style and format with Ruff."""
    install(session, "ruff")
    session.run("python", *STYLE)
    session.run("python", *FORMAT)


@nox.session(python=False)
def types(session: nox.Session) -> None:
    """Check the package with Mypy, strict."""
    shared_environment(session)
    run(session, *TYPES)


@nox.session(python=PYTHON)
def layers(session: nox.Session) -> None:
    """Check with Import-linter that layers import only lower layers."""
    install(session, "import-linter")
    session.install("--no-deps", "-e", ".")
    session.run("python", *LAYERS)


@nox.session(python=["3.10", "3.11", "3.12", "3.13"])
def pure(session: nox.Session) -> None:
    """Test the configuration layers on every supported Python, without torch and deepspeed."""
    install(
        session, "attrs", "typing-extensions", "packaging", "psutil", "pyyaml", "rich",
        "matplotlib", "pytest", "pytest-timeout", "hypothesis",
    )  # fmt: skip
    session.install("--no-deps", "-e", ".")
    report = Path(session.create_tmp()) / "tests.xml"
    session.run(
        "python", "-m", "pytest", "-m", "not deepspeed and not nightly", f"--junitxml={report}",
        # These two compare with torch's own classes.
        "--ignore=tests/plan/optimizer/test_curves.py",
        "--ignore=tests/plan/optimizer/test_catalogue.py",
        "tests/plan",
        "tests/test_errors.py", "tests/test_decisions.py",
        *session.posargs, success_codes=[0] if session.posargs else [0, 1],
    )  # fmt: skip
    record(session, report, f"pure, Python {session.python}")


def record(session: nox.Session, report: Path, *names: str) -> None:
    """Record a complete run in docs/status.md; fail if one of its tests failed."""
    if not session.posargs:
        session.run("python", "docs/generate_status.py", *names, str(report))


def engine_tests_with(session: nox.Session, package: str, version: str) -> None:
    """Run the engine tests with a different version of one package, and record the outcome."""
    constraints = Path(session.create_tmp()) / "constraints.txt"
    lines = Path(CONSTRAINTS).read_text().splitlines()
    kept = [line for line in lines if not line.startswith(f"{package}==")]
    constraints.write_text("\n".join([*kept, f"{package}=={version}"]))
    session.install("-c", str(constraints), "-e", ".[data,lora,test]")
    session.env["TORCH_EXTENSIONS_DIR"] = f"{EXTENSIONS}-{package}-{version}"
    session.env.setdefault("MAX_JOBS", str(os.cpu_count() or 2))
    session.env.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    session.run("python", "-m", "zerotune", "doctor", "--build")
    report = Path(session.create_tmp()) / "tests.xml"
    session.run(
        "python", "-m", "pytest", f"--junitxml={report}",
        *(session.posargs or [*THREE_AT_A_TIME, "tests/backend", "tests/checkpoint"]),
        success_codes=[0] if session.posargs else [0, 1],
    )  # fmt: skip
    # A run with the newest version of one package has the newest version of the other too.
    ran = NEWEST if NEWEST[package] == version else {package: version}
    record(session, report, *(f"engine, {name} {one}" for name, one in ran.items()))


@nox.session(python=PYTHON)
@nox.parametrize("deepspeed", sorted({OLDEST["deepspeed"], NEWEST["deepspeed"]}))
def deepspeed_versions(session: nox.Session, deepspeed: str) -> None:
    """Run the engine tests on the oldest and the newest supported DeepSpeed."""
    engine_tests_with(session, "deepspeed", deepspeed)


@nox.session(python=PYTHON)
@nox.parametrize("torch", [OLDEST["torch"], NEWEST["torch"]])
def torch_versions(session: nox.Session, torch: str) -> None:
    """Run the engine tests on the oldest and the newest tested torch from the package index."""
    engine_tests_with(session, "torch", torch)


@nox.session(python=False)
def docs(session: nox.Session) -> None:
    """Build the documentation; warnings and failing examples are errors."""
    shared_environment(session)
    build = ROOT / "docs" / "_build"
    for builder in ("doctest", "html"):
        strict = ("-m", "sphinx", "-W", "--keep-going", "-b", builder)
        run(session, *strict, "docs", str(build / builder))
    run(session, "docs/generate_api.py", str(build / "html" / "objects.inv"))


def built_wheel(session: nox.Session) -> Path:
    """Build sdist and wheel; return the wheel's path."""
    install(session, "build")
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    session.run("python", "-m", "build", "--outdir", str(dist))
    (built,) = dist.glob("*.whl")
    return built


@nox.session(python=PYTHON)
def wheel(session: nox.Session) -> None:
    """Build sdist and wheel; install only the wheel and import from it."""
    built = built_wheel(session)
    install(session, "attrs", "typing-extensions", "packaging", "psutil", "pyyaml", "rich")
    session.install("--no-deps", "--force-reinstall", str(built))
    with session.chdir(session.create_tmp()):
        session.run(
            "python", "-c",
            "import importlib.resources as r, zerotune; "
            "assert r.files('zerotune').joinpath('py.typed').is_file(); "
            "print(zerotune.__version__, zerotune.DeepSpeedPlan.build(stage=2).explain())",
        )  # fmt: skip


@nox.session(python=PYTHON)
def newcomer(session: nox.Session) -> None:
    """Time a newcomer with the wheel, up to the first caught failure and the first step."""
    built = built_wheel(session)
    install(session, "attrs")
    session.run("python", "-m", "tests.newcomer", str(built), "--constraints", CONSTRAINTS)


def diffusers_examples(session: nox.Session) -> str:
    """Clone the diffusers release whose scripts tests run; if this fails, those tests skip."""
    place = ROOT / ".nox" / "diffusers"
    if not place.exists():
        session.run(
            "git", "clone", "--quiet", "--depth", "1", "--branch", "v0.40.0",
            "https://github.com/huggingface/diffusers", str(place),
            external=True, success_codes=[0, 128],
        )  # fmt: skip
    return str(place / "examples") if place.exists() else ""


@nox.session(python=False)
def nightly(session: nox.Session) -> None:
    """Run the full test matrix: ``nox -s nightly -- tests/checkpoint -k nvme``.

    Every EMA, adapter and family under every plan, every resume between plans, each optimizer in
    each place. The losses of families are recorded in docs/families.md.
    """
    training_environment(session)
    notes = ROOT / ".nox" / "families.jsonl"
    notes.unlink(missing_ok=True)
    session.env["ZEROTUNE_FAMILY_NOTES"] = str(notes)
    if "DIFFUSERS_EXAMPLES" not in os.environ:
        session.env["DIFFUSERS_EXAMPLES"] = diffusers_examples(session)
    run(session, "-m", "pytest", "-m", "nightly", *session.posargs)
    if not session.posargs:
        run(session, "docs/generate_families.py", str(notes))


@nox.session(python=False)
def device(session: nox.Session) -> None:
    """Run every engine in many orders of a simulated device's work: ``-- --case streamed``.

    The results of a complete run are recorded in docs/status.md.
    """
    training_environment(session)
    if not session.posargs:
        run(session, "-m", "pytest", *THREE_AT_A_TIME, "tests/device")
    recorded = ("--output", "docs/results")
    run(session, "-m", "tests.device.matrix", *(session.posargs or recorded))
    if not session.posargs:
        run(session, "docs/generate_status.py")


@nox.session(python=False)
def stress(session: nox.Session) -> None:
    """Inject random faults of every class (two minutes): ``nox -s stress -- --minutes 30``."""
    training_environment(session)
    run(session, "-m", "stress.faults", *(session.posargs or ["--minutes", "2"]))


@nox.session(python=False)
def fuzz(session: nox.Session) -> None:
    """Feed arbitrary input to all parsers: ``nox -s fuzz -- --minutes 30 --seed 1``."""
    shared_environment(session)
    run(session, "-m", "stress.fuzz", *session.posargs)


@nox.session(python=False)
def bench(session: nox.Session) -> None:
    """Run benchmarks by name: ``nox -s bench -- overhead``."""
    training_environment(session)
    run(session, "-m", "bench", *session.posargs)


@nox.session(python=False)
def large(session: nox.Session) -> None:
    """Train U-Nets of full size without a GPU (hours): ``nox -s large -- --case SDXL``."""
    training_environment(session)
    run(session, "-m", "bench", "large", *session.posargs)


@nox.session(python=False)
def gpu(session: nox.Session) -> None:
    """Run everything that needs a GPU: ``nox -s gpu -- --minutes 10 --output DIR``."""
    training_environment(session, "cpu_adam")
    run(session, "-m", "bench.gpu", *(session.posargs or ["--minutes", "60"]))
