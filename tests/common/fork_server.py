"""The process that has imported what a program of ours needs, and whose forks become the program.

``deadpool run`` spends seconds on importing torch and Megatron before it starts anything; tests
start it more than a hundred times. A fork of this process has them at once, and is otherwise what
``python -m MODULE`` would be: a process of its own, with its own arguments, environment, directory,
descriptors and session, in which the module runs as ``__main__``.

Started by :mod:`tests.common.forks`; serves one request after the other on the inherited connection
whose descriptor is named on its command line, and ends, with its forks, when that is closed.
"""

import fcntl
import gc
import importlib
import os
import random
import runpy
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path

from deadpool_megatron.cluster.process.posix import close_inherited, die_with_parent, thread_count


@dataclass(frozen=True)
class Start:
    """A program to become. ``arguments``: its module's name, then ``sys.argv``.

    ``handles``: the numbers that the sent descriptors get in the program. ``leads``: whether it
    leads a session, or just a process group of its own.
    """

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    directory: str
    handles: tuple[int, ...]
    leads: bool


@dataclass(frozen=True)
class Reap:
    """A fork that has ended; the answer is its status as in subprocess.Popen.returncode."""

    pid: int


def serve(connection: Connection, modules: list[str]) -> None:
    """Answer requests until the test process closes the connection. Returns in no fork; a fork ends
    by SystemExit, as a program does."""
    before = dict(os.environ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in modules:
            importlib.import_module(name)
    # Variables that imports set would be set by the program's own imports, too.
    added = {name: text for name, text in os.environ.items() if before.get(name) != text}
    gc.collect()
    gc.freeze()
    assert thread_count() == 1, "a fork is of a process with one thread"
    connection.send("ready")
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        if isinstance(request, Reap):
            _, status = os.waitpid(request.pid, 0)
            connection.send(os.waitstatus_to_exitcode(status))
            continue
        received = [recv_handle(connection) for _ in request.handles]
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            connection.close()
            _become(request, received, added, parent)
        for handle in received:
            os.close(handle)
        connection.send(pid)


def _become(start: Start, received: list[int], added: Mapping[str, str], parent: int) -> None:
    """Be the program to its end, which is SystemExit or an error of its own."""
    die_with_parent(parent)
    if start.leads:
        os.setsid()
    else:
        os.setpgid(0, 0)
    above = max(start.handles) + 1  # where none that came lies in the way of another one
    high = [fcntl.fcntl(handle, fcntl.F_DUPFD, above) for handle in received]
    close_inherited(high)
    for handle, wanted in zip(high, start.handles, strict=True):
        os.dup2(handle, wanted)
        os.close(handle)
    os.environ.clear()
    os.environ.update({**added, **start.environment})
    os.chdir(start.directory)
    sys.path[0] = start.directory
    random.seed()
    module, *rest = start.arguments
    sys.argv = [module, *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    raise SystemExit(0)


if __name__ == "__main__":
    sys.path[0] = str(Path.cwd())
    # Requests name their classes by the module's real name, which is not __main__.
    from tests.common import fork_server

    fork_server.serve(Connection(int(sys.argv[1])), sys.argv[2].split(","))
