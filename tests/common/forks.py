"""Programs of ours as forks of a process that has imported what they need.

One such process (:mod:`tests.common.fork_server`) for each set of modules, started at the first use
and ended with the session.
"""

from __future__ import annotations

import functools
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any

from tests.common.fork_server import Reap, Start

_ROOT = Path(__file__).parents[2]
_START_SECONDS = 120.0
# Forking and reaping take milliseconds.
_ANSWER_SECONDS = 30.0
_END_SECONDS = 10.0


class Forked:
    """A started program, with the methods of subprocess.Popen that tests use."""

    def __init__(self, server: ForkServer, pid: int, arguments: Sequence[str]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server
        self._arguments = list(arguments)
        # Its number is not used again before it is reaped, which is done from here.
        self._handle = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Return its status; None while it runs."""
        return self._ended_within(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Return its status at its end. Raises subprocess.TimeoutExpired."""
        code = self._ended_within(timeout)
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self._arguments, timeout)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal to it alone; do nothing when it has ended."""
        if self.poll() is None:
            signal.pidfd_send_signal(self._handle, number)

    def kill(self) -> None:
        """Kill it."""
        self.send_signal(signal.SIGKILL)

    def _ended_within(self, seconds: float | None) -> int | None:
        if self.returncode is None:
            poller = select.poll()
            poller.register(self._handle, select.POLLIN)
            if poller.poll(None if seconds is None else seconds * 1000):
                self.returncode = self._server.ask(Reap(self.pid))
                os.close(self._handle)
        return self.returncode


class ForkServer:
    """The process with the imports. Thread-safe."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        self._lock = threading.Lock()
        self._connection, remote = Pipe()
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.common.fork_server"),
                *(str(remote.fileno()), ",".join(modules)),
            ],
            pass_fds=[remote.fileno()],
            cwd=_ROOT,
            # A library that starts a thread per core does so when it is loaded.
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", **environment},
        )
        remote.close()
        assert self._receive(_START_SECONDS, "the imports") == "ready"

    def start(
        self,
        *arguments: str,
        environment: Mapping[str, str],
        handles: Mapping[int, int],
        leads: bool = False,
    ) -> Forked:
        """``python -m ARGUMENTS``; ``handles``: number in the program -> descriptor of ours.

        Those of standard input, output and errors have to be among them. ``leads``: a session.
        """
        start = Start(arguments, dict(environment), str(Path.cwd()), tuple(handles), leads)
        with self._lock:
            self._connection.send(start)
            for handle in handles.values():
                send_handle(self._connection, handle, self._process.pid)
            pid = self._receive(_ANSWER_SECONDS, "a fork")
        return Forked(self, pid, arguments)

    def ask(self, request: Reap) -> Any:
        """Send a request and return the answer."""
        with self._lock:
            self._connection.send(request)
            return self._receive(_ANSWER_SECONDS, "an answer")

    def stop(self) -> None:
        """End it and its forks."""
        self._connection.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _receive(self, seconds: float, awaited: str) -> Any:
        """Return the next answer. After an error the process is killed, so that no later answer is
        mistaken for it."""
        try:
            assert self._connection.poll(seconds), f"waited {seconds:g} s for {awaited}"
            return self._connection.recv()
        except BaseException as error:
            self._process.kill()
            _running.cache_clear()
            if isinstance(error, EOFError | ConnectionError):
                status = self._process.wait(_END_SECONDS)
                raise AssertionError(f"the process that forks ended, status {status}") from None
            raise


_started: list[ForkServer] = []


def server(modules: Sequence[str], environment: Mapping[str, str] | None = None) -> ForkServer:
    """Return the server with these imports, made in this environment and search path."""
    found_in = {"PYTHONPATH": os.environ["PYTHONPATH"], **(environment or {})}
    return _running(tuple(modules), tuple(sorted(found_in.items())))


@functools.cache
def _running(modules: tuple[str, ...], environment: tuple[tuple[str, str], ...]) -> ForkServer:
    _started.append(ForkServer(modules, dict(environment)))
    return _started[-1]


def stop() -> None:
    """End all of them."""
    _running.cache_clear()
    while _started:
        _started.pop().stop()
