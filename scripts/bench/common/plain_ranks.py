#!/usr/bin/env python
"""Starts the trainer without protection as deadpool starts it with protection: by fork.

    plain_ranks.py WORLD_SIZE ARGUMENTS OF deadpool_megatron.trainer.plain...

torchrun would import torch once per rank; with the same start, memory can be compared too. For
machines without a GPU: the parent loads Megatron, which would initialize a driver before the forks.
"""

from __future__ import annotations

import os
import random
import socket
import sys
import traceback
from collections.abc import Callable

from deadpool_megatron.megatron import stand_ins

stand_ins.install()  # before anything imports Megatron

# ruff: noqa: E402
from deadpool_megatron.trainer import (
    gpt_loop,  # noqa: F401 - loaded before the forks
    plain,
)

# Below the range from which the kernel assigns ports.
_PORTS = range(21000, 31000)


def main(argv: list[str]) -> int:
    """Fork the ranks and wait for them; returns the first exit status that is not 0."""
    world_size, arguments = int(argv[0]), argv[1:]
    from slow_steps import VARIABLE, slow_down  # in the folder of this program

    if VARIABLE in os.environ:
        slow_down()
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), WORLD_SIZE=str(world_size)
    )
    statuses = fork_ranks(world_size, lambda: plain.main(arguments))
    return next((status for status in statuses if status), 0)


def fork_ranks(ranks: int, run: Callable[[], int]) -> list[int]:
    """Run all ranks, each in a fork of this process; returns their exit statuses."""
    children = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            status = 1
            try:
                status = run()
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        children.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]


def free_port() -> int:
    while True:
        port = random.choice(_PORTS)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
