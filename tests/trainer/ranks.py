"""Runs a function on several ranks: forks of a process that has Megatron imported already.

That process, the fork server of multiprocessing, has never run a test. The test process cannot be
forked: by the time it comes to the trainer it holds some thirty threads of earlier tests (copiers,
servers of fakes, pools of OpenMP), and a fork keeps what they had half done. It is started at the
first use and ended with the session.
"""

import datetime
import faulthandler
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from deadpool_megatron.cluster.process.posix import die_with_parent

RANK_SECONDS = 120.0
# The end of each failed rank's output that is shown.
_SHOWN_BYTES = 20_000
# The others get this long to end by themselves after the first failure.
_AFTER_FAILURE_SECONDS = 1.0
# The time in which a hanging rank writes its stacks before it is killed.
_STACKS_SECONDS = 0.5
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.trainer.loaded"])

Connect = Callable[[Path, int, int], None]


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    seconds: float = RANK_SECONDS,
    connect: Connect | None = None,
) -> list[Any]:
    """Call ``function(*args)`` on ``world_size`` forked ranks; return their results by rank.

    ``connect(folder, rank, world_size)`` makes the process groups; by default stock gloo. All of
    these travel by pickle: functions of modules, not local ones. Raises AssertionError with the
    end of each rank that failed (a signal by its name) and all it wrote, or for one that hangs.
    """
    # Libraries that start a thread per core do so when they are loaded.
    with patch.dict(os.environ, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1"):
        forkserver.ensure_running()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = (world_size, function, args, connect or _connect_gloo)
        ranks = [
            _CONTEXT.Process(target=_play, args=(folder, rank, *job), daemon=True)
            for rank in range(world_size)
        ]
        try:
            for rank in ranks:
                rank.start()
            accounts = _wait(ranks, folder, time.monotonic() + seconds)
        finally:  # also at a time limit of pytest's
            for rank in ranks:
                rank.kill()
                rank.join()
        assert not accounts, "\n".join(accounts)
        return [
            pickle.loads((folder / f"{rank}.result").read_bytes()) for rank in range(world_size)
        ]


def stop() -> None:
    """End the process that forks ranks, if it runs, and the resource tracker of multiprocessing."""
    for server in (vars(forkserver)["_forkserver"], vars(resource_tracker)["_resource_tracker"]):
        server._stop()


def _wait(ranks: Sequence[ForkServerProcess], folder: Path, deadline: float) -> list[str]:
    """Until all have ended, or soon after the first failure; answers what went wrong."""
    while (alive := [rank for rank in ranks if rank.exitcode is None]) and (
        left := deadline - time.monotonic()
    ) > 0:
        connection.wait([rank.sentinel for rank in alive], left)
        if any(rank.exitcode for rank in ranks):
            deadline = min(deadline, time.monotonic() + _AFTER_FAILURE_SECONDS)
    ends = {n: rank.exitcode for n, rank in enumerate(ranks) if rank.exitcode}
    late = {} if ends else {n: rank for n, rank in enumerate(ranks) if rank.exitcode is None}
    for rank in late.values():
        assert rank.pid is not None
        os.kill(rank.pid, signal.SIGABRT)  # which makes it write where its threads are
        rank.join(_STACKS_SECONDS)
    ends_by_rank = dict.fromkeys(late, "did not finish in time")
    for n, code in ends.items():
        ends_by_rank[n] = (
            f"died of {signal.Signals(-code).name}" if code < 0 else f"failed, status {code}"
        )
    return [f"rank {n} {end}:\n{_written(folder, n)}" for n, end in ends_by_rank.items()]


def _written(folder: Path, rank: int) -> str:
    """Its traceback or its stacks included."""
    try:
        content = (folder / f"{rank}.output").read_bytes()
    except OSError as error:
        return f"(it wrote nothing: {error})"
    return content[-_SHOWN_BYTES:].decode(errors="replace")


def _play(
    folder: Path,
    rank: int,
    world_size: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    connect: Connect,
) -> None:
    """Be a rank; never returns."""
    die_with_parent(os.getppid())
    status = 1
    try:
        with open(folder / f"{rank}.output", "wb", buffering=0) as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        # For a death by signal, which leaves no exception: the stacks of all threads.
        faulthandler.enable(file=2, all_threads=True)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
        connect(folder, rank, world_size)
        result = function(*args)
        (folder / f"{rank}.result").write_bytes(pickle.dumps(result))
        # No rank leaves while another still reads from it.
        dist.barrier()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _connect_gloo(folder: Path, rank: int, world_size: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=60),
    )
