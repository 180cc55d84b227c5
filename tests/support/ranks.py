"""Runs a function in real processes, the way a launcher would."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import platform
import random
import socket
import sys
import traceback
from collections.abc import Callable
from functools import cache
from typing import Any

from zerotune._util import processes

# Importing torch, deepspeed and diffusers takes seconds; a fork server pays that once. The
# children are forked before any thread or process group exists, so each starts clean.
# Not diffusers: where torch has CUDA, importing it alone keeps forked processes from using that.
_PRELOAD = ["torch", "sklearn.datasets", "tests.support.preload"]
_context: Any = None
_chance = random.SystemRandom()


class RanksFailed(AssertionError):
    """At least one rank raised; holds every rank's traceback."""


def run_ranks(
    function: Callable[..., Any],
    *args: Any,
    world_size: int = 1,
    timeout_s: float = 400.0,
    env: dict[str, str] | None = None,
) -> list[Any]:
    """Call ``function(*args)`` in ``world_size`` processes; results in rank order.

    With one process nothing is set in the environment, as under a bare ``python``; with more,
    what ``torchrun`` sets. ``function`` must be importable (module level), its arguments and
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
    results, failures = [], []
    for rank, (process, receive) in enumerate(workers):
        try:
            if not receive.poll(timeout_s):
                failures.append(f"rank {rank}: no result within {timeout_s:g} s")
                continue
            ok, value = receive.recv()
        except EOFError:
            process.join(5)
            failures.append(f"rank {rank}: died with exit code {process.exitcode}")
            continue
        (results if ok else failures).append(value if ok else f"rank {rank}:\n{value}")
    for process, receive in workers:
        process.join(1 if failures else 20)
        if process.is_alive():
            process.kill()
        receive.close()
    if failures:
        raise RanksFailed("\n".join(failures))
    return results


def _child(function: Any, args: Any, variables: dict[str, str], send: Any) -> None:
    os.environ.update(variables)
    import torch

    torch.set_num_threads(1)
    try:
        send.send((True, function(*args)))
    except BaseException:  # noqa: BLE001 - reported to the parent, whatever it is
        send.send((False, traceback.format_exc()))
    finally:
        send.close()
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
        sys.stdout.flush()
        # Skips atexit handlers of libraries that expect their own launcher.
        os._exit(0)


@cache
def compile_io() -> None:
    """Compile what swapping needs, which takes minutes where much else runs.

    No test's time is for that, and one that kills its processes would have it begin anew.
    """
    run_ranks(_compile_io, timeout_s=1500)


def _compile_io() -> None:
    from zerotune.backend.ops import build_op
    from zerotune.backend.step.kernel import load_host_step

    for name in ("cpu_adam", "async_io"):
        build_op(name)
    load_host_step()


def _fork_server() -> Any:
    global _context  # noqa: PLW0603 - one server per test session
    if _context is None:
        _context = mp.get_context("forkserver")
        _context.set_forkserver_preload(_PRELOAD)
    return _context


def on_a_machine(name: str) -> None:
    """Let this process take itself, and be taken by others, for one of another machine."""
    processes.boot_id = lambda: f"boot of {name}"
    platform.node = lambda: name


def free_port() -> int:
    """A port that nobody listens on; not one of those the system gives to whoever asks for any."""
    while True:
        port = _chance.randrange(15_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
