"""A process that holds a lease: prints its folder, then obeys one command on standard input.

Commands: ``leave`` ends the lease, ``fork`` forks a child that outlives this process and prints
its pid, ``churn N`` takes N further leases one after the other. Usage: ``holder.py ROOT
[RANK WORLD_SIZE RUN_ID]``.
"""

from __future__ import annotations

import os
import sys
import time

from plans import swapping_plan
from zerotune.offload import OffloadManager


def say(text):
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def churn(manager, count):
    plan = swapping_plan()
    for _ in range(count):
        with manager.lease(plan) as lease:
            (lease.path / "param.swp").write_bytes(b"x" * 4096)


def main():
    root, *ranks = sys.argv[1:]
    rank, world_size = (int(ranks[0]), int(ranks[1])) if ranks else (0, 1)

    def share(text):
        if rank == 0:
            say(text)
            return text
        return ranks[2]

    manager = OffloadManager(root=root, share=share)
    with manager.lease(swapping_plan(world_size=world_size), rank=rank) as lease:
        (lease.path / f"rank{rank}.swp").write_bytes(b"x" * 65536)
        say(lease.path)
        for line in sys.stdin:
            command = line.split()
            if command[0] == "leave":
                break
            if command[0] == "churn":
                churn(manager, int(command[1]))
            if command[0] == "fork":
                child = os.fork()
                if child == 0:
                    os.close(0)
                    os.close(1)
                    time.sleep(60)
                    os._exit(0)
                say(child)
    say("left")


if __name__ == "__main__":
    main()
