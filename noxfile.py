"""Everything a developer runs. ``nox -l`` lists it; ``nox -s demo`` is the main job."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import nox

nox.needs_version = ">=2024.10.9"
nox.options.sessions = ["tests"]
nox.options.default_venv_backend = "virtualenv"

ROOT = Path(__file__).parent
CONSTRAINTS = str(ROOT / "constraints.txt")
PYTHON = os.environ.get("ZEROTUNE_PYTHON")
# DeepSpeed compiles its ops against one environment's headers. Sessions that train share one
# environment and one cache, so that each op is compiled once per checkout.
SHARED = ".nox/zerotune"
EXTENSIONS = str(ROOT / ".nox" / "torch_extensions")
OLDEST_DEEPSPEED = "0.18.9"
NEWEST_DEEPSPEED = "0.19.8"


def install(session: nox.Session, *what: str) -> None:
    """Install under the constraints; a package set already there is not resolved again."""
    stamp = Path(session.virtualenv.location) / ".zerotune-installed"
    wanted = "\n".join(
        [*sorted(what), Path(CONSTRAINTS).read_text(), (ROOT / "pyproject.toml").read_text()]
    )
    if stamp.exists() and stamp.read_text() == wanted:
        return
    session.install("-c", CONSTRAINTS, *what)
    stamp.write_text(wanted)


def training_environment(session: nox.Session, *build: str) -> None:
    """Install zerotune with all that training needs, and compile DeepSpeed's ops once."""
    install(session, "-e", ".[dev]")
    session.env["TORCH_EXTENSIONS_DIR"] = EXTENSIONS
    session.env.setdefault("MAX_JOBS", str(os.cpu_count() or 2))
    # Spinning threads of one process starve the other on machines with few cores.
    session.env.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    session.run("python", "-m", "zerotune", "doctor", *(build or ["--build-missing"]))


@nox.session(python=PYTHON, venv_location=SHARED, reuse_venv=True)
def demo(session: nox.Session) -> None:
    """Train on real digits under ZeRO-2 with CPU offload; write pictures and figures."""
    training_environment(session, "--build", "cpu_adam")
    session.run("python", "examples/digits.py", *session.posargs)


@nox.session(python=PYTHON, venv_location=SHARED, reuse_venv=True)
def tests(session: nox.Session) -> None:
    """Style, types, layers, then the whole suite with the real DeepSpeed engine."""
    training_environment(session)
    if not session.posargs:
        check_style(session)
        check_types(session)
        check_layers(session)
    session.run("python", "-m", "pytest", *session.posargs)


@nox.session(python=PYTHON)
def lint(session: nox.Session) -> None:
    """Ruff: style and format."""
    install(session, "ruff")
    check_style(session)


@nox.session(python=PYTHON, venv_location=SHARED, reuse_venv=True)
def types(session: nox.Session) -> None:
    """Mypy, strict, on the package."""
    install(session, "-e", ".[dev]")
    check_types(session)


@nox.session(python=PYTHON)
def layers(session: nox.Session) -> None:
    """Import-linter: arrows point down only."""
    install(session, "import-linter")
    session.install("--no-deps", "-e", ".")
    check_layers(session)


def check_style(session: nox.Session) -> None:
    """Ruff's linter and formatter."""
    session.run("python", "-m", "ruff", "check", ".")
    session.run("python", "-m", "ruff", "format", "--check", ".")


def check_types(session: nox.Session) -> None:
    """Mypy as configured in pyproject.toml."""
    session.run("python", "-m", "mypy")


def check_layers(session: nox.Session) -> None:
    """The contracts of pyproject.toml."""
    session.run("lint-imports", "--no-cache")


@nox.session(python=["3.10", "3.11", "3.12", "3.13"])
def pure(session: nox.Session) -> None:
    """The configuration layers on every supported Python, with neither torch nor deepspeed."""
    install(
        session, "attrs", "typing-extensions", "packaging", "psutil", "pyyaml", "rich",
        "pytest", "pytest-timeout", "hypothesis",
    )  # fmt: skip
    session.install("--no-deps", "-e", ".")
    session.run(
        "python", "-m", "pytest", "-m", "not deepspeed and not torch",
        "tests/plan", "tests/optim", "tests/test_errors.py", "tests/test_decisions.py",
        *session.posargs,
    )  # fmt: skip


@nox.session(python=PYTHON)
@nox.parametrize("deepspeed", [OLDEST_DEEPSPEED, NEWEST_DEEPSPEED])
def deepspeed_versions(session: nox.Session, deepspeed: str) -> None:
    """The engine tests on the oldest and the newest supported DeepSpeed."""
    constraints = Path(session.create_tmp()) / "constraints.txt"
    lines = Path(CONSTRAINTS).read_text().splitlines()
    kept = [line for line in lines if not line.startswith("deepspeed")]
    constraints.write_text("\n".join([*kept, f"deepspeed=={deepspeed}"]))
    session.install("-c", str(constraints), "-e", ".[test]")
    session.env["TORCH_EXTENSIONS_DIR"] = f"{EXTENSIONS}-{deepspeed}"
    session.env.setdefault("MAX_JOBS", str(os.cpu_count() or 2))
    session.run("python", "-m", "zerotune", "doctor", "--build-missing")
    session.run(
        "python", "-m", "pytest", *(session.posargs or ["tests/backend", "tests/checkpoint"])
    )


@nox.session(python=PYTHON, venv_location=SHARED, reuse_venv=True)
def docs(session: nox.Session) -> None:
    """Build the documentation; warnings and failing examples are errors."""
    install(session, "-e", ".[dev]")
    build = ROOT / "docs" / "_build"
    session.run("sphinx-build", "-W", "--keep-going", "-b", "doctest", "docs", str(build / "test"))
    session.run("sphinx-build", "-W", "--keep-going", "-b", "html", "docs", str(build / "html"))


@nox.session(python=PYTHON)
def wheel(session: nox.Session) -> None:
    """Build sdist and wheel; install the wheel alone and import from it."""
    install(session, "build")
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    session.run("python", "-m", "build", "--outdir", str(dist))
    (built,) = dist.glob("*.whl")
    install(session, "attrs", "typing-extensions", "packaging", "psutil", "pyyaml", "rich")
    session.install("--no-deps", "--force-reinstall", str(built))
    with session.chdir(session.create_tmp()):
        session.run(
            "python", "-c",
            "import importlib.resources as r, zerotune; "
            "assert r.files('zerotune').joinpath('py.typed').is_file(); "
            "print(zerotune.__version__, zerotune.DeepSpeedPlan.build(stage=2).explain())",
        )  # fmt: skip


@nox.session(python=PYTHON, venv_location=SHARED, reuse_venv=True)
def bench(session: nox.Session) -> None:
    """Benchmarks by name: ``nox -s bench -- overhead``."""
    training_environment(session)
    session.run("python", "-m", "benchmarks", *session.posargs)


@nox.session(python=PYTHON, venv_location=SHARED, reuse_venv=True)
def gpu(session: nox.Session) -> None:
    """The tests that need a CUDA device, and the main job on it."""
    training_environment(session)
    session.run("python", "-m", "pytest", "-m", "gpu", *session.posargs)
    session.run("python", "examples/digits.py", "--output", "outputs/digits-gpu")
