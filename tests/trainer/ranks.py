"""Runs a function on several ranks: Megatron is imported once, here, and the ranks are forks.

No thread may exist in this process when ranks are forked, so nothing here starts one.
"""

from __future__ import annotations

import datetime
import functools
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from deadpool_megatron.platform import select_platform

RANK_SECONDS = 120.0


@functools.cache
def preload() -> None:
    """Import everything a rank needs, so that forks have it at once."""
    select_platform().install()
    from deadpool_megatron.hooks import hashing  # noqa: F401
    from deadpool_megatron.trainer import checkpoint, loop, plain  # noqa: F401

    torch.set_num_threads(1)


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    seconds: float = RANK_SECONDS,
    connect: Callable[[Path, int, int], None] | None = None,
) -> list[Any]:
    """Call ``function(*args)`` on ``world_size`` forked ranks; answers their results by rank.

    ``connect(folder, rank, world_size)`` makes the process groups; by default stock gloo. Raises
    AssertionError with the traceback of the first rank that failed, or for a rank that hangs.
    """
    preload()
    with tempfile.TemporaryDirectory() as folder:
        pids = {}
        for rank in range(world_size):
            pid = os.fork()
            if pid == 0:
                _rank(Path(folder), rank, world_size, function, args, connect or _connect_gloo)
            pids[pid] = rank
        _wait(pids, Path(folder), time.monotonic() + seconds)
        return [
            pickle.loads((Path(folder) / f"{rank}.result").read_bytes())
            for rank in range(world_size)
        ]


def _connect_gloo(folder: Path, rank: int, world_size: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=60),
    )


def _rank(
    folder: Path,
    rank: int,
    world_size: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    connect: Callable[[Path, int, int], None],
) -> None:
    status = 1
    try:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
        connect(folder, rank, world_size)
        result = function(*args)
        (folder / f"{rank}.result").write_bytes(pickle.dumps(result))
        # Nobody leaves while another still reads from it.
        dist.barrier()
        status = 0
    except BaseException:
        (folder / f"{rank}.error").write_text(traceback.format_exc())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _wait(pids: dict[int, int], folder: Path, deadline: float) -> None:
    """Wait for all ranks; kill the others soon after the first failure."""
    failed: list[int] = []
    while pids and time.monotonic() < deadline:
        for pid, rank in list(pids.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done == 0:
                continue
            del pids[pid]
            if status != 0:
                failed.append(rank)
                deadline = min(deadline, time.monotonic() + 1.0)
        time.sleep(0.005)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert failed or not pids, f"ranks {sorted(pids.values())} did not finish in time"
    if failed:
        error = folder / f"{failed[0]}.error"
        text = error.read_text() if error.exists() else "it left no traceback"
        raise AssertionError(f"rank {failed[0]} failed:\n{text}")
