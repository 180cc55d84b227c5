"""Forked processes that hold the target of attacks, so that one start serves many injections."""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from collections.abc import Callable
from typing import Any

from stress.faults.campaign import Found
from tests.support.ranks import _fork_server, free_port


class Team:
    """One process per rank, each with its own ``make(*args)``.

    Args:
        make: Importable.
        args: Picklable.
        world_size: Number of processes; a single one runs as under a bare ``python``.
    """

    def __init__(self, make: Callable[..., Any], *args: Any, world_size: int = 1) -> None:
        context, port = _fork_server(), free_port()
        self._members = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            variables = {} if world_size == 1 else rank_variables(rank, world_size, port)
            process = context.Process(
                target=_serve, args=(make, args, variables, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._members.append((process, ours))

    @property
    def alive(self) -> bool:
        """Return whether all processes are alive."""
        return all(process.is_alive() for process, _ in self._members)

    def ask(self, method: str, *args: Any, seconds: float = 60.0) -> list[Any]:
        """Call a method on all ranks and return the results.

        Raises:
            Found: The call raised, ended its process or timed out; then all processes are killed.
        """
        try:
            for _, pipe in self._members:
                pipe.send((method, args))
        except OSError as error:
            self.close()
            raise Found("foreign", str(error)) from error
        answers, found = [], []
        for rank in range(len(self._members)):
            try:
                answers.append(self._answer(rank, seconds))
            except Found as error:
                found.append(error)
        if found:
            self.close()
            raise Found(found[-1].kind, "\n   ".join(map(str, found)))
        return answers

    def _answer(self, rank: int, seconds: float) -> Any:
        process, pipe = self._members[rank]
        if not pipe.poll(seconds):
            raise Found("hung", f"rank {rank} gave no answer within {seconds:g} s")
        try:
            ok, value = pipe.recv()
        except EOFError:
            process.join(5)
            raise Found("foreign", f"rank {rank} ended with code {process.exitcode}") from None
        if ok:
            return value
        kind, what = value
        raise Found(kind, f"rank {rank}: {what}" if len(self._members) > 1 else what)

    def close(self) -> None:
        """Kill all processes."""
        for process, pipe in self._members:
            process.kill()
            process.join(10)
            pipe.close()


def rank_variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return the variables that ``torchrun`` sets."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def quiet() -> None:
    """Discard output and use one thread; the parent prints the results."""
    import torch

    torch.set_num_threads(1)
    nothing = os.open(os.devnull, os.O_WRONLY)
    if not os.environ.get("ZEROTUNE_FAULTS_VERBOSE"):
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)


def _serve(make: Any, args: Any, variables: dict[str, str], pipe: Any) -> None:
    os.environ.update(variables)
    quiet()
    held: Any = None
    with contextlib.suppress(EOFError, OSError):
        while True:
            method, given = pipe.recv()
            try:
                if held is None:
                    held = make(*args)
                pipe.send((True, getattr(held, method)(*given)))
            except Found as found:
                pipe.send((False, (found.kind, str(found))))
            except BaseException:  # noqa: BLE001 - what the campaign looks for
                pipe.send((False, ("foreign", traceback.format_exc()[-1200:])))
    # ``os._exit`` skips the exit handlers of libraries that expect their own launcher.
    os._exit(0)


def wait_for(condition: Callable[[], bool], *, seconds: float, what: str) -> None:
    """Wait until the condition holds.

    Raises:
        Found: The condition did not hold in time.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise Found("hung", f"{what} did not come within {seconds:g} s")
        time.sleep(0.01)
