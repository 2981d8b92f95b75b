"""Runs a function on several ranks: forks of a process that has Megatron imported already.

That process is :mod:`tests.trainer.nursery`, started at the first use and ended with the session.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.trainer.nursery import Answer, Request, preload

__all__ = ["preload", "run_ranks", "stop"]

RANK_SECONDS = 120.0
_START_SECONDS = 120.0
# Beyond the time of the ranks: forking, killing, reading.
_ANSWER_SECONDS = 20.0
_END_SECONDS = 10.0


@dataclass
class _Nursery:
    process: subprocess.Popen[bytes]
    connection: Connection


_running: _Nursery | None = None


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    seconds: float = RANK_SECONDS,
    connect: Callable[[Path, int, int], None] | None = None,
) -> list[Any]:
    """Call ``function(*args)`` on ``world_size`` forked ranks; answers their results by rank.

    ``connect(folder, rank, world_size)`` makes the process groups; by default stock gloo. All of
    these travel by pickle: functions of modules, not local ones. Raises AssertionError with the
    end of each rank that failed (a signal by its name) and all it wrote, or for one that hangs.
    """
    request = Request(world_size, function, args, connect, seconds)
    try:
        nursery = _start()
        nursery.connection.send(request)
        answer = _receive(nursery, seconds + _ANSWER_SECONDS, "the ranks to end")
        assert isinstance(answer, Answer)
    except BaseException:
        # Also a time limit of pytest's: an answer that comes late must not meet another request.
        _kill()
        raise
    assert not answer.failure, answer.failure
    return answer.results


def stop() -> None:
    """End the process that forks ranks, if it runs."""
    global _running
    if _running is None:
        return
    nursery, _running = _running, None
    nursery.connection.close()
    try:
        nursery.process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        nursery.process.kill()
        nursery.process.wait()


def _start() -> _Nursery:
    global _running
    if _running is not None:
        return _running
    ours, theirs = Pipe()
    # Libraries that start a thread per core do so when they are loaded.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.trainer.nursery", str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        cwd=Path(__file__).parents[2],
        env=environment,
    )
    theirs.close()
    _running = _Nursery(process, ours)
    assert _receive(_running, _START_SECONDS, "Megatron to be imported") == "ready"
    return _running


def _receive(nursery: _Nursery, seconds: float, what: str) -> Any:
    assert nursery.connection.poll(seconds), f"waited {seconds:g} s for {what}"
    try:
        return nursery.connection.recv()
    except (EOFError, ConnectionError):
        status = nursery.process.wait(_END_SECONDS)
        raise AssertionError(f"the process that forks ranks ended, status {status}") from None


def _kill() -> None:
    """At once; its ranks go with it."""
    if _running is not None:
        _running.process.kill()
    stop()
