"""Starts of members: forks of a process that has imported their modules, or parked processes.

The *fork server* is forked once, before its parent has a second thread or a loop. It imports the
modules of all members and reports whether it may fork: it must have one thread, and must not have
touched the CUDA driver, which no fork survives. Then it forks for the process that holds the other
end of its socket: members, or servers for other nodes of the host. It reaps its children and
reports how they ended. The kernel kills a member when its server dies, and a server ends when its
socket is closed, as at the end of its agent. A *parked* process has imported the same modules,
waits, and becomes the member named in its first message; then the next parked process for that
local rank is started.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from deadpool_megatron.cluster.process import posix
from deadpool_megatron.cluster.process.children import (
    ChildWatch,
    ProcessEnd,
    Watch,
    socket_pair,
    start_child,
)
from deadpool_megatron.cluster.process.member_main import MemberSpec, become_member
from deadpool_megatron.cluster.process.program import LOADED_PROGRAM
from deadpool_megatron.process_names import set_process_name

MODULE = "deadpool_megatron.cluster.process.fork_server"
_MESSAGES = socket.SOCK_SEQPACKET
_MAX_BYTES = 1 << 18
_ANSWER_SECONDS = 5.0
_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED
_KILL_ALL = {"kill": "all"}
Message = Mapping[str, Any]


class StartError(Exception):
    """The failure to start a member; the message is one line."""


class BrokenImport(StartError):
    """The failure to import a module that members need."""


@dataclass(frozen=True)
class ForkServer:
    """The near end of a fork server. ``connection`` is for an agent's :class:`Starter`, or for a
    launcher that requests a server for each agent. ``is_ready``: the server has imported all
    modules, and can fork. ``pid`` is 0 if another server has forked this server.
    """

    pid: int
    connection: socket.socket
    is_ready: bool = False

    @staticmethod
    def begin(modules: Sequence[str]) -> ForkServer:
        """Fork a server from this process. Raises OSError, and StartError where other threads of
        this process make that unsafe."""
        if posix.thread_count() != 1:
            raise StartError(f"{posix.thread_count()} threads are here, which no fork is safe with")
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        with socket_pair(_MESSAGES) as (own_end, child_end):
            if (pid := os.fork()) == 0:
                run_server(child_end, modules, parent)
        return ForkServer(pid, own_end)

    def ready(self) -> ForkServer:
        """Wait until the server has imported all modules. Raises StartError if that fails, or if
        the server may not fork."""
        answer, _ = receive_message(self.connection)
        if not answer:
            answer = {"why": "the process that imports what members need has ended"}
        if answer["why"]:
            self.end()
            raise (BrokenImport if answer.get("broken") else StartError)(answer["why"])
        return replace(self, is_ready=True)

    def serve_node(self) -> ForkServer | None:
        """Return a new server for another node; None if the connection is lost."""
        with socket_pair(_MESSAGES) as (own_end, child_end):
            try:
                send_message(self.connection, {"serve": True}, child_end.fileno())
            except OSError:
                own_end.close()
                return None
        return ForkServer(0, own_end, self.is_ready)

    def end(self) -> None:
        """End the server and the members that it has forked for this process."""
        self.connection.close()
        posix.kill(self.pid)
        os.waitpid(self.pid, 0)


def send_message(connection: socket.socket, message: Message, *handles: int) -> None:
    """Send a message with file descriptors. Raises OSError."""
    socket.send_fds(connection, [json.dumps(message).encode()], handles)


def receive_message(connection: socket.socket) -> tuple[Message, list[int]]:
    """Return the next message with its file descriptors. The message is empty at the end of the
    stream, also if the peer has ended with unread messages. Raises BlockingIOError."""
    try:
        data, handles, _, _ = socket.recv_fds(connection, _MAX_BYTES, 1)
    except BlockingIOError:
        raise
    except OSError:
        return {}, []
    return json.loads(data) if data else {}, handles


# In the server, and in parked processes.


def send_answer(connection: socket.socket, message: Message, *handles: int) -> None:
    """Answer the agent. If it has ended, that is noticed when its next request is read."""
    with contextlib.suppress(OSError):
        send_message(connection, message, *handles)


def run_server(connection: socket.socket, modules: Sequence[str], parent: int) -> None:
    """Serve in the forked child until it ends, in a session of its own without terminal signals."""
    try:
        posix.die_with_parent(parent)
        os.setsid()
        set_process_name("dp-fork-server")
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        posix.close_inherited((connection.fileno(),))
        keep_single_threaded()
        try:
            _import(modules)
        except BrokenImport as error:
            send_answer(connection, {"why": str(error), "broken": True})
            return
        # Members share the pages of these objects as long as no process writes to them, but the
        # garbage collector writes to each object that is not frozen.
        gc.collect()
        gc.freeze()
        refusal = fork_refusal()
        send_answer(connection, {"why": refusal})
        if not refusal:
            _serve(connection)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _import(modules: Sequence[str]) -> None:
    """Import the modules. Raises BrokenImport."""
    LOADED_PROGRAM.watch_imports()
    for name in modules:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                importlib.import_module(name)
        except ImportError as error:
            text = f"Python module {name!r} cannot be imported: {error}"
            raise BrokenImport(text) from error


def keep_single_threaded() -> None:
    """Keep OpenBLAS from starting a thread for each core, which would forbid a fork. It must be
    called before any module imports numpy.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def fork_refusal() -> str:
    """Return why a fork of this process would be unsafe; empty if it would be safe."""
    if posix.thread_count() != 1:
        return "what members import starts threads"
    if "libcuda.so" in Path("/proc/self/maps").read_text():
        count = ctypes.c_int()
        if ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(count)) != _NOT_INITIALIZED:
            return "what members import touches CUDA"
    return ""


def _serve(connection: socket.socket) -> None:
    """Fork on request, reap and report, until the connection ends."""
    children: dict[int, tuple[int, bool]] = {}  # descriptor -> pid, and whether it is a member
    poller = select.poll()
    poller.register(connection, select.POLLIN)
    while True:
        for handle, _ in poller.poll():
            if handle in children:
                poller.unregister(handle)
                _reap(connection, handle, *children.pop(handle))
                continue
            request, handles = receive_message(connection)
            if not request or request == _KILL_ALL:
                # A server for another node ends with that node's agent, not with this server.
                for pid in [pid for pid, is_member in children.values() if is_member]:
                    posix.kill_group(pid)
            if not request:
                return
            if handles:
                pid = _fork(connection, request, handles[0])
                os.close(handles[0])
                if pid:
                    child = os.pidfd_open(pid)
                    children[child] = pid, "member" in request
                    poller.register(child, select.POLLIN)
                    if "member" in request:
                        send_answer(connection, {"started": pid}, child)


def _fork(connection: socket.socket, request: Message, handle: int) -> int:
    """Return the pid of the new child; 0 if the fork failed, which is reported for members."""
    parent = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        if "member" in request:
            send_answer(connection, {"errno": error.errno})
        return 0
    if pid == 0:
        if "member" in request:
            posix.die_with_parent(parent)
            become_member(MemberSpec.from_dict(request["member"]), handle)
        _serve_node(handle)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.setpgid(pid, pid)  # parent and child both do this, as either may run first
    return pid


def _serve_node(handle: int) -> NoReturn:
    """Serve another node. This server outlives its parent server, and ends with that node's
    agent."""
    try:
        os.setpgid(0, 0)
        posix.close_inherited((handle,))
        connection = socket.socket(fileno=handle)
        send_answer(connection, {"why": ""})
        _serve(connection)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _reap(connection: socket.socket, handle: int, pid: int, is_member: bool) -> None:
    """Kill the group while the dead leader still holds the group's id, then reap and report the
    leader."""
    posix.kill_group(pid)
    _, status = os.waitpid(pid, 0)
    os.close(handle)
    if is_member:
        send_answer(connection, {"ended": pid, "status": status})


def main() -> NoReturn:
    """Run a parked process: ``fork_server FD MODULES``."""
    set_process_name("dp-parked")
    connection = socket.socket(fileno=int(sys.argv[1]))
    _import([name for name in sys.argv[2].split(",") if name])
    request, handles = receive_message(connection)
    if not request:  # the agent has ended
        os._exit(0)
    become_member(MemberSpec.from_dict(request["member"]), handles[0])


# In the agent.


class _Forked(Watch):
    """A member that the server has forked, watched by the descriptor that came with it."""

    def __init__(self, pid: int, handle: int) -> None:
        super().__init__(pid)
        self._handle = handle

    def kill(self) -> None:
        """Kill the process (see :class:`Watch`); the server kills the rest of the group."""
        if self.ending is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def finish(self, ending: ProcessEnd) -> None:
        os.close(self._handle)
        super().finish(ending)


@dataclass(frozen=True)
class StartedMember:
    """A running member: its pid (also its process group) and the agent's end of its socket."""

    watch: Watch
    connection: socket.socket


class Starter:
    """Starts of the members of a node: forks of the ``server``, or parked processes while there is
    no server that can fork. Parked processes import ``modules`` in the ``environment`` of their
    local rank, because a driver reads some variables only once. For the agent's loop.
    """

    def __init__(
        self,
        server: ForkServer | None,
        modules: Sequence[str],
        environment: Callable[[int], Mapping[str, str]],
    ) -> None:
        self._server = None if server is None else server.connection
        self._modules = ",".join(modules)
        self._environment = environment
        self._can_fork = server is not None and server.is_ready
        self._requests: deque[asyncio.Future[_Forked]] = deque()
        self._forked: dict[int, _Forked] = {}
        self._parked: dict[int, tuple[ChildWatch, socket.socket]] = {}
        if self._server is not None:
            self._server.setblocking(False)
            asyncio.get_running_loop().add_reader(self._server.fileno(), self._readable)

    async def start(self, spec: MemberSpec) -> StartedMember:
        """Start a member. Raises StartError, or OSError after closing everything it opened."""
        # A server has the environment of another process, so the request contains all variables.
        whole = replace(spec, environment={**os.environ, **spec.environment})
        request = {"member": whole.to_dict()}
        with socket_pair(socket.SOCK_STREAM) as (own_end, child_end):
            handle = child_end.fileno()
            if self._can_fork:
                return StartedMember(await self._fork(request, handle), own_end)
            return StartedMember(self._unpark(spec.place.local_rank, request, handle), own_end)

    def prepare(self, local_rank: int) -> None:
        """Prepare a later start with this local rank, if no server can fork. Raises OSError."""
        if not self._can_fork:
            self._park(local_rank)

    def close(self) -> None:
        """End the parked processes, and the members that are still alive."""
        self._drop_parked()
        if self._server is not None:
            asyncio.get_running_loop().remove_reader(self._server.fileno())
            with contextlib.suppress(OSError):
                send_message(self._server, _KILL_ALL)

    def _drop_parked(self) -> None:
        for watch, connection in self._parked.values():
            connection.close()
            watch.kill()
        self._parked.clear()

    async def _fork(self, request: Message, handle: int) -> _Forked:
        assert self._server is not None
        answer = asyncio.get_running_loop().create_future()
        self._requests.append(answer)
        send_message(self._server, request, handle)
        return await asyncio.wait_for(answer, _ANSWER_SECONDS)

    def _readable(self) -> None:
        assert self._server is not None
        try:
            answer, handles = receive_message(self._server)
        except BlockingIOError:
            return
        if not answer or answer.get("why"):
            self._lose_server()
        elif "why" in answer:
            self._can_fork = True
            self._drop_parked()
        elif "ended" in answer:
            ended = self._forked.pop(int(answer["ended"]), None)
            if ended is not None:
                ended.finish(ProcessEnd.from_wait_status(int(answer["status"])))
        elif "started" in answer:
            pid = int(answer["started"])
            watch = self._forked[pid] = _Forked(pid, handles[0])
            request = self._requests.popleft()
            if request.done():
                watch.kill()  # as the start is no longer awaited
            else:
                request.set_result(watch)
        else:
            self._refuse(OSError(int(answer["errno"]), os.strerror(int(answer["errno"]))))

    def _refuse(self, error: OSError) -> None:
        if not (request := self._requests.popleft()).done():
            request.set_exception(error)

    def _lose_server(self) -> None:
        """Give up a server that cannot fork, or that has ended together with its members. From now
        on members start from parked processes."""
        assert self._server is not None
        asyncio.get_running_loop().remove_reader(self._server.fileno())
        self._server.close()
        self._server, self._can_fork = None, False
        while self._requests:
            self._refuse(ConnectionResetError("the fork server has ended"))
        for pid, watch in list(self._forked.items()):
            posix.kill_group(pid)
            watch.finish(ProcessEnd(signal=signal.SIGKILL))
        self._forked.clear()

    def _unpark(self, local_rank: int, request: Message, handle: int) -> ChildWatch:
        self._park(local_rank)
        watch, connection = self._parked.pop(local_rank)
        with connection:
            try:
                send_message(connection, request, handle)
            except OSError as error:
                watch.kill()
                raise StartError(f"parked process {local_rank} failed: {error}") from error
        return watch

    def _park(self, local_rank: int) -> None:
        """Start the parked process of this local rank unless it is alive."""
        if local_rank in self._parked and self._parked[local_rank][0].ending is None:
            return
        if local_rank in self._parked:
            self._parked.pop(local_rank)[1].close()
        with socket_pair(_MESSAGES) as (own_end, child_end):
            watch = start_child(
                ["-W", "ignore", "-m", MODULE, str(child_end.fileno()), self._modules],
                environment=self._environment(local_rank),
                sockets=(child_end.fileno(),),
                dies_with_us=True,
            )
        self._parked[local_rank] = watch, own_end


if __name__ == "__main__":
    main()
