"""Run a function, or a test's body, in several processes, as a launcher would."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import multiprocessing as mp
import multiprocessing.forkserver
import os
import platform
import random
import socket
import sys
import time
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import wait
from typing import Any

import pytest

from tests.support import recording
from zerotune._util import proc

# Importing torch, deepspeed and diffusers takes seconds; a fork server does it once. Children are
# forked before any thread or process group exists, so each starts clean. diffusers is not listed:
# with a CUDA build of torch, importing it keeps forked processes from using CUDA.
_PRELOAD = ["torch", "sklearn.datasets", "tests.support.preload"]
_context: Any = None
_ADDRESS = "ZEROTUNE_FORK_SERVER"
# Only for this process, not for processes that tests start.
_shared = os.environ.pop(_ADDRESS, None)
_chance = random.SystemRandom()
# Time for the other ranks to notice that one failed; engines notice within seconds.
_GRACE_S = 30.0


class RanksFailed(AssertionError):
    """At least one rank raised; holds every rank's traceback."""


def ranks(
    world_size: int | None = None,
    *,
    env: dict[str, str] | None = None,
    timeout_s: float = 400.0,
) -> pytest.MarkDecorator:
    """Run the body of the decorated test in ``world_size`` processes.

    Parameters and fixtures are created once, in this process, and sent to all ranks. So they must
    be picklable, and ranks share ``tmp_path``; each rank has its own ``monkeypatch``. A failure
    shows the assertion of every rank.

    Args:
        world_size: How many processes; else the value of the test's parameter ``world_size``.
        env: Variables of their environment.
        timeout_s: How long they may take together.
    """
    return pytest.mark.ranks(world_size, env=env, timeout_s=timeout_s)


def call_in_ranks(test: pytest.Function, mark: pytest.Mark) -> None:
    """Run a test with the mark ``ranks`` in its processes."""
    __tracebackhide__ = True
    arguments = {name: test.funcargs[name] for name in test._fixtureinfo.argnames}
    arguments.pop("monkeypatch", None)
    world_size = mark.args[0] or arguments["world_size"]
    named = (test.module.__name__, test.originalname)
    try:
        skipped = run_ranks(call_test, *named, arguments, world_size=world_size, **mark.kwargs)
        failed = ""
    except RanksFailed as error:
        failed = str(error)
    if failed:
        pytest.fail(failed, pytrace=False)
    if any(skipped):
        pytest.skip(next(filter(None, skipped)))


def call_test(module: str, name: str, arguments: dict[str, Any]) -> str | None:
    """Call a test in this process without pytest; return the reason if it was skipped."""
    __tracebackhide__ = True
    test = getattr(importlib.import_module(module), name)
    if "monkeypatch" in inspect.signature(test).parameters:
        arguments["monkeypatch"] = pytest.MonkeyPatch()
    try:
        test(**arguments)
    except pytest.skip.Exception as skipped:
        return str(skipped)
    return None


def run_ranks(
    function: Callable[..., Any],
    *args: Any,
    world_size: int = 1,
    timeout_s: float = 400.0,
    env: dict[str, str] | None = None,
) -> list[Any]:
    """Call ``function(*args)`` in ``world_size`` processes; return the results in rank order.

    Several processes get the environment variables that ``torchrun`` sets; a single one gets none,
    as under a bare ``python``. ``function`` must be importable (module level), its arguments and
    result picklable.
    """
    context = _fork_server()
    port = free_port()
    workers = []
    for rank in range(world_size):
        receive, send = context.Pipe(duplex=False)
        variables = dict(env or {})
        if world_size > 1:
            variables |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
        process = context.Process(
            target=_child, args=(function, args, variables, send), daemon=True
        )
        process.start()
        send.close()
        workers.append((process, receive))
    return _collect(workers, timeout_s)


def _collect(workers: list[Any], timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    waiting = {receive: rank for rank, (_, receive) in enumerate(workers)}
    until = time.monotonic() + timeout_s
    while waiting and (ready := wait(list(waiting), max(0.0, until - time.monotonic()))):
        for receive in ready:
            rank = waiting.pop(receive)
            try:
                ok, value, spent = receive.recv()
                recording.spent.update(spent, ranks=1)
            except EOFError:
                process = workers[rank][0]
                process.join(5)
                ok, value = False, f"died with exit code {process.exitcode}"
            (results if ok else failures)[rank] = value
        if failures:
            until = min(until, time.monotonic() + _GRACE_S)
    failures |= dict.fromkeys(waiting.values(), "no result in time")
    for process, receive in workers:
        process.join(1 if failures else 20)
        if process.is_alive():
            process.kill()
        receive.close()
    if failures:
        raise RanksFailed("\n".join(f"rank {k}: {failures[k]}" for k in sorted(failures)))
    return [results[rank] for rank in range(len(workers))]


def _child(function: Any, args: Any, variables: dict[str, str], send: Any) -> None:
    __tracebackhide__ = True
    os.environ.update(variables)
    import torch

    from zerotune.plan import facts

    if recording.VARIABLE in os.environ:
        recording.count_engines()
    torch.set_num_threads(1)
    # Tiny models have as many units as large ones.
    facts.SMALLEST_UNIT = 1
    try:
        send.send((True, function(*args), _spent()))
    except BaseException as error:  # noqa: BLE001 - reported to the parent, whatever it is
        shown = pytest.ExceptionInfo.from_exception(error).getrepr(style="short", tbfilter=True)
        send.send((False, f"\n{shown}", _spent()))
    finally:
        send.close()
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
        sys.stdout.flush()
        # ``os._exit`` skips atexit handlers of libraries that expect their own launcher.
        os._exit(0)


def _spent() -> dict[str, float]:
    return {**recording.spent, "seconds": recording.used()}


@cache
def compile_io() -> None:
    """Compile the ops that swapping needs, which takes minutes on a busy machine.

    Otherwise it would count against a test's timeout, and tests that kill their processes would
    start it again.
    """
    run_ranks(_compile_io, timeout_s=1500)


def _compile_io() -> None:
    from zerotune.backend.ops import build_op
    from zerotune.backend.step.kernel import load_host_step

    for name in ("cpu_adam", "async_io"):
        build_op(name)
    load_host_step()


@cache
def compile_device() -> None:
    """Compile the simulated device, as ``compile_io`` does its ops."""
    run_ranks(_compile_device, timeout_s=1500)


def _compile_device() -> None:
    from tests.device.build import load_device

    load_device()


def _fork_server() -> Any:
    global _context  # noqa: PLW0603 - one server per test session
    if _context is None:
        _context = mp.get_context("forkserver")
        _context.set_forkserver_preload(_PRELOAD)
        if _shared is not None:
            server: Any = multiprocessing.forkserver._forkserver
            server._forkserver_address = _shared
            # Python gives it to children, which use it only to fork themselves.
            server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)
            server.ensure_running = lambda: None
    return _context


def share_fork_server() -> None:
    """Start a fork server for the test processes that this one starts; each would load its own."""
    _fork_server()
    multiprocessing.forkserver.ensure_running()
    os.environ[_ADDRESS] = multiprocessing.forkserver._forkserver._forkserver_address


def on_a_machine(name: str) -> None:
    """Make this process appear to run on a different machine, to itself and to others."""
    proc.boot_id = lambda: f"boot of {name}"
    platform.node = lambda: name


def free_port() -> int:
    """Return an unused port outside the range that the system assigns by itself."""
    while True:
        port = _chance.randrange(15_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
