"""The process whose forks are the ranks: it has imported Megatron and has never run a test.

The test process cannot be forked for that. By the time it comes to the trainer it holds some
thirty threads of earlier tests (copiers, servers of fakes, pools of OpenMP and OpenBLAS), and a
fork keeps what they had half done: locks that nobody opens, a heap in the middle of a change.

Started by :mod:`tests.trainer.ranks`, one for a session; serves one request after the other on the
inherited descriptor named on its command line, and ends with that connection.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import functools
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from deadpool_megatron.cluster.process.posix import die_with_parent
from deadpool_megatron.platform import select_platform

# What is shown of each failed rank's output, from its end.
_SHOWN_BYTES = 20_000
# The others get this long to end by themselves after the first failure.
_AFTER_FAILURE_SECONDS = 1.0
# So long a rank that hangs has to write its stacks before it is killed.
_LAST_WORDS_SECONDS = 0.5


@dataclass(frozen=True)
class Request:
    """What to run on the ranks, and for how long at most."""

    world_size: int
    function: Callable[..., Any]
    args: tuple[Any, ...]
    connect: Callable[[Path, int, int], None] | None
    seconds: float


@dataclass(frozen=True)
class Answer:
    """The results by rank, or why there are none."""

    results: list[Any]
    failure: str = ""


@functools.cache
def preload() -> None:
    """Import everything a rank needs, so that forks have it at once."""
    select_platform().install()
    from deadpool_megatron.trainer import checkpoint, plain, training  # noqa: F401

    torch.set_num_threads(1)


def serve(connection: Connection) -> None:
    """Answer requests until the test process closes the connection."""
    preload()
    connection.send("ready")
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        connection.send(answer_to(request))


def answer_to(request: Request) -> Answer:
    """Run the ranks of one request to their end."""
    threads = other_threads()
    if threads:
        return Answer([], f"ranks must be forks of a process with one thread; it has: {threads}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pids = {}
        parent = os.getpid()
        for rank in range(request.world_size):
            pid = os.fork()
            if pid == 0:
                _rank(folder, rank, request, parent)
            pids[pid] = rank
        failure = _wait(pids, folder, time.monotonic() + request.seconds)
        if failure:
            return Answer([], failure)
        results = [folder / f"{rank}.result" for rank in range(request.world_size)]
        return Answer([pickle.loads(path.read_bytes()) for path in results])


def other_threads() -> list[str]:
    """Names of all threads of this process but the calling one, those of C libraries too."""
    own = threading.get_native_id()
    named = {thread.native_id: thread.name for thread in threading.enumerate()}
    found = []
    for task in Path("/proc/self/task").iterdir():
        number = int(task.name)
        if number != own:
            with contextlib.suppress(OSError):  # it has just ended
                comm = (task / "comm").read_text().strip()
                found.append(named.get(number, f"not of Python: {comm}"))
    return sorted(found)


def _rank(folder: Path, rank: int, request: Request, parent: int) -> None:
    """Be a rank; never returns."""
    die_with_parent(parent)
    status = 1
    try:
        output = os.open(_output(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        # For a death by signal, which leaves no exception: the stacks of all threads.
        faulthandler.enable(file=2, all_threads=True)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(request.world_size), LOCAL_RANK=str(rank))
        (request.connect or _connect_gloo)(folder, rank, request.world_size)
        result = request.function(*request.args)
        (folder / f"{rank}.result").write_bytes(pickle.dumps(result))
        # Nobody leaves while another still reads from it.
        dist.barrier()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
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


def _output(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.output"


def _wait(pids: dict[int, int], folder: Path, deadline: float) -> str:
    """Wait for all ranks; kill the others soon after the first failure. Answers what went wrong."""
    failed: dict[int, int] = {}
    while pids and time.monotonic() < deadline:
        for pid, rank in list(pids.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done == 0:
                continue
            del pids[pid]
            if status != 0:
                failed[rank] = os.waitstatus_to_exitcode(status)
                deadline = min(deadline, time.monotonic() + _AFTER_FAILURE_SECONDS)
        time.sleep(0.005)
    late = {} if failed else pids
    for pid in late:
        os.kill(pid, signal.SIGABRT)  # which makes it write where its threads are
    if late:
        time.sleep(_LAST_WORDS_SECONDS)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    accounts = [_account(rank, _end_of(status), folder) for rank, status in failed.items()]
    accounts += [_account(rank, "did not finish in time", folder) for rank in late.values()]
    return "\n".join(accounts)


def _end_of(status: int) -> str:
    return f"died of {signal.Signals(-status).name}" if status < 0 else f"failed, status {status}"


def _account(rank: int, end: str, folder: Path) -> str:
    """How a rank ended and what it had written, its traceback or its stacks included."""
    try:
        written = _output(folder, rank).read_bytes()[-_SHOWN_BYTES:].decode(errors="replace")
    except OSError as error:
        written = f"(it wrote nothing: {error})"
    return f"rank {rank} {end}:\n{written}"


if __name__ == "__main__":
    # Requests and answers name their classes by the module's real name, which is not __main__.
    from tests.trainer import nursery

    nursery.serve(Connection(int(sys.argv[1])))
