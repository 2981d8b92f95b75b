"""Starts of processes: members forked or parked, a moment's shortage sat out, ends reported."""

import asyncio
import errno
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from deadpool_megatron.cluster.agent.standby_supervisor import StandbySupervisor
from deadpool_megatron.cluster.process import children, fork_server, posix
from deadpool_megatron.cluster.process.children import ChildWatch, ProcessEnd, retry_shortage
from deadpool_megatron.cluster.process.fork_server import ForkServer, Starter, StartError
from deadpool_megatron.cluster.process.member_main import MemberSpec
from deadpool_megatron.cluster.process.member_place import MemberPlace
from deadpool_megatron.file_systems import run_to_end
from deadpool_megatron.wire.framing import encode
from tests.common.wait import until, wait_for

SECONDS = 20.0
_HANGS = """
import asyncio, threading
from deadpool_megatron.file_systems import run_to_end
from deadpool_megatron.wire.framing import encode

async def main():
    asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)
    return 75

run_to_end(main(), 0.1)
"""
# Has a child, says so, and sleeps or ends.
_MEMBER = """
import os, subprocess, sys, time
print(subprocess.Popen(["sleep", "600"]).pid, os.environ["WHO"], flush=True)
time.sleep(600 if sys.argv[1] == "sleeps" else 0)
sys.exit(7)
"""
#: Answers as a driver that was touched, or was not.
_DRIVER = "int cuDeviceGetCount(int *count) {{ return {answer}; }}"


class Short:
    """Fails so often before it works."""

    def __init__(self, times: int, number: int = errno.EAGAIN) -> None:
        self.left = times
        self.number = number
        self.calls = 0

    def __call__(self, *_: object, **__: object) -> None:
        self.calls += 1
        if self.left > 0:
            self.left -= 1
            raise OSError(self.number, os.strerror(self.number))


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_shortage_is_retried(monkeypatch, number):
    monkeypatch.setattr(children, "FIRST_PAUSE_SECONDS", 0.001)
    short = Short(3, number)
    asyncio.run(retry_shortage(asynchronous(short), 60.0))
    assert short.calls == 4


def test_lasting_shortage_and_other_errors_are_raised():
    with pytest.raises(BlockingIOError):
        asyncio.run(retry_shortage(asynchronous(Short(1_000_000)), 0.01))
    refused = Short(1, errno.EACCES)
    with pytest.raises(PermissionError):
        asyncio.run(retry_shortage(asynchronous(refused), 60.0))
    assert refused.calls == 1


def asynchronous(make: Callable[[], None]) -> Callable[[], asyncio.Future[None]]:
    async def call() -> None:
        make()

    return lambda: asyncio.ensure_future(call())


def spec_of(directory: Path, does: str = "sleeps", slot: int = 0) -> MemberSpec:
    (directory / "member.py").write_text(_MEMBER)
    environment = {"DEADPOOL_RUN_DIR": str(directory), "WHO": f"slot{slot}"}
    command = (str(directory / "member.py"), does)
    return MemberSpec(
        MemberPlace(0, slot, 1), command, environment, directory / f"log{slot}", directory
    )


def printed(directory: Path, slot: int = 0) -> list[str]:
    """What the member has printed: the pid of its child, and its variable."""
    wait_for("its line", lambda: "slot" in read(directory, slot))
    return read(directory, slot).split()


def read(directory: Path, slot: int) -> str:
    log = directory / f"log{slot}"
    return log.read_text() if log.exists() else ""


def pair() -> tuple[socket.socket, socket.socket]:
    """The ends of an agent and of its fork server."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def forking(*modules: str) -> ForkServer:
    """One that this process, which has other threads by now, has forked through a fresh one."""
    own_end, child_end = pair()
    with child_end:
        program = (
            "import os, socket; from deadpool_megatron.cluster.process import fork_server as f\n"
            f"f.run_server(socket.socket(fileno={child_end.fileno()}), {modules!r}, os.getppid())"
        )
        command = [sys.executable, "-c", program]
        process = subprocess.Popen(command, pass_fds=(child_end.fileno(),))
        process.returncode = 0
    return ForkServer(process.pid, own_end)


@asynccontextmanager
async def starting(way: str) -> AsyncIterator[Starter]:
    server = forking().ready() if way == "forked" else None
    starter = Starter(server, (), lambda slot: {})
    try:
        yield starter
    finally:
        starter.close()
        if server is not None:
            server.end()


@pytest.mark.parametrize("way", ["forked", "parked"])
async def test_member_end_is_reported_and_its_group_killed(tmp_path, way):
    async with starting(way) as starter:
        for slot, (does, ending) in enumerate(
            [("ends", ProcessEnd(exit_code=7)), ("sleeps", ProcessEnd(signal=signal.SIGKILL))]
        ):
            started = await starter.start(spec_of(tmp_path, does, slot))
            reported: list[ProcessEnd] = []
            started.watch.then(reported.append)
            child, variable = await asyncio.to_thread(printed, tmp_path, slot)
            assert variable == f"slot{slot}"
            if does == "sleeps":
                started.watch.kill()
            await asyncio.wait_for(started.watch.ended.wait(), SECONDS)
            await until(lambda reported=reported: bool(reported))
            assert reported == [ending]
            await until(lambda child=child: not posix.is_alive(int(child)))
            started.watch.kill()  # of one that has ended: nobody
            started.connection.close()


@pytest.mark.parametrize("way", ["forked", "parked"])
async def test_end_before_a_callback_is_reported(tmp_path, way):
    async with starting(way) as starter:
        started = await starter.start(spec_of(tmp_path, "ends"))
        await asyncio.wait_for(started.watch.ended.wait(), SECONDS)
        reported: list[ProcessEnd] = []
        started.watch.then(reported.append)
        await until(lambda: reported == [ProcessEnd(exit_code=7)])
        started.connection.close()


async def member_of(
    server: ForkServer, directory: Path
) -> tuple[fork_server.StartedMember, Starter]:
    starter = Starter(server, (), lambda slot: {})
    started = await starter.start(spec_of(directory))
    await asyncio.to_thread(printed, directory)
    return started, starter


async def test_member_dies_with_its_server_and_the_next_is_parked(tmp_path):
    server = forking().ready()
    started, starter = await member_of(server, tmp_path)
    posix.kill(server.pid)
    os.waitpid(server.pid, 0)
    await asyncio.wait_for(started.watch.ended.wait(), SECONDS)
    assert started.watch.ending == ProcessEnd(signal=signal.SIGKILL)
    await until(lambda: not posix.is_alive(started.watch.pid))
    child = int(read(tmp_path, 0).split()[0])
    await until(lambda: not posix.is_alive(child))
    second = await starter.start(spec_of(tmp_path, slot=1))
    assert isinstance(second.watch, ChildWatch)
    assert await second.watch.end(SECONDS)
    starter.close()
    for member in (started, second):
        member.connection.close()


async def test_node_server_outlives_its_parent_and_ends_with_its_agent(tmp_path):
    server = forking().ready()
    own = server.serve_node()
    assert own is not None
    started, _ = await member_of(own, tmp_path)
    server.connection.close()
    os.waitpid(server.pid, 0)  # it has seen that nobody asks any more, and has ended by itself
    await asyncio.sleep(0.1)
    assert posix.is_alive(started.watch.pid)
    asyncio.get_running_loop().remove_reader(own.connection.fileno())
    own.connection.close()  # as by the kernel, when its agent is killed
    child = int(read(tmp_path, 0).split()[0])
    await until(lambda: not posix.is_alive(started.watch.pid) and not posix.is_alive(child))
    started.connection.close()


def test_failed_import_is_named():
    with pytest.raises(fork_server.BrokenImport, match="'no_such_module_x' cannot be imported"):
        forking("json", "no_such_module_x").ready()


def test_process_with_threads_is_not_forked(tmp_path, monkeypatch):
    source = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()"
    (tmp_path / "threads_x.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    with pytest.raises(StartError, match="starts threads"):
        forking("threads_x").ready()
    other = threading.Thread(target=time.sleep, args=(0.5,))
    other.start()
    with pytest.raises(StartError, match="threads"):
        ForkServer.begin(())
    other.join()


@pytest.mark.parametrize(("answer", "reason"), [(0, "touches CUDA"), (3, "")])
def test_process_that_touched_cuda_is_not_forked(tmp_path, monkeypatch, answer, reason):
    """By the driver's own word: 3 is CUDA_ERROR_NOT_INITIALIZED."""
    source, library = tmp_path / "cuda.c", tmp_path / "libcuda.so.1"
    source.write_text(_DRIVER.format(answer=answer))
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    load = f"import ctypes; ctypes.CDLL({str(library)!r})"
    (tmp_path / "driver_x.py").write_text(load)
    for variable, added in (("PYTHONPATH", tmp_path), ("LD_LIBRARY_PATH", tmp_path)):
        monkeypatch.setenv(variable, f"{added}:{os.environ.get(variable, '')}")
    server = forking("driver_x")
    if reason:
        with pytest.raises(StartError, match=reason):
            server.ready()
    else:
        assert server.ready().is_ready
        server.end()


async def test_failed_fork_is_reported_and_closes_everything(tmp_path, monkeypatch):
    """Tried again each second, it would soon take the last descriptor."""
    server, child_end = pair()
    starter = Starter(ForkServer(0, server, True), (), lambda slot: {})
    monkeypatch.setattr(os, "fork", Short(3))
    gc.collect()  # what an earlier test has left may be closed at any moment
    gc.disable()
    try:
        before = set(Path("/proc/self/fd").iterdir())
        for _ in range(3):
            asked = asyncio.create_task(starter.start(spec_of(tmp_path)))
            await asyncio.sleep(0)
            request, handles = fork_server.receive_message(child_end)
            assert fork_server._fork(child_end, request, handles[0]) == 0
            os.close(handles[0])
            with pytest.raises(BlockingIOError):
                await asked
        monkeypatch.setattr(subprocess, "Popen", Short(1))
        starter._can_fork = False
        with pytest.raises(BlockingIOError):
            starter.prepare(0)
        assert set(Path("/proc/self/fd").iterdir()) <= before
    finally:
        gc.enable()
        starter.close()
        server.close()
        child_end.close()


def test_member_without_log_directory_prints_to_its_server(tmp_path):
    own_end, child_end = pair()
    with own_end, child_end:
        environment = {**os.environ, "DEADPOOL_RUN_DIR": str(tmp_path)}
        log = tmp_path / "cleaned" / "node0-rank0-1.log"
        spec = MemberSpec(MemberPlace(0, 0, 1), ("-m", "this"), environment, log, tmp_path)
        fork_server.send_message(own_end, {"member": spec.to_dict()}, child_end.fileno())
        ended = subprocess.run(
            [sys.executable, "-m", fork_server.MODULE, str(child_end.fileno()), ""],
            pass_fds=(child_end.fileno(),),
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert ended.returncode == 0, ended.stderr
    assert "node0-rank0-1.log is here: [Errno 2]" in ended.stderr
    assert "The Zen of Python" in ended.stdout


def test_pending_work_is_waited_for():
    done = []

    async def main() -> int:
        asyncio.get_running_loop().run_in_executor(None, lambda: done.append(time.sleep(0.05)))
        return 75

    assert run_to_end(main(), 60.0) == 75
    assert len(done) == 1


def test_hung_thread_does_not_keep_the_process():
    command = [sys.executable, "-c", _HANGS]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 75
    assert "waited 0.1 s for files" in ended.stderr


async def test_standby_is_started_as_soon_as_possible(tmp_path, monkeypatch):
    monkeypatch.setattr("deadpool_megatron.cluster.agent.standby_supervisor._RESTART_SECONDS", 0.01)
    pair, short = socket.socketpair, Short(0, errno.EMFILE)

    def pairs(*of: int) -> tuple[socket.socket, socket.socket]:
        short()
        return pair(*of)

    looks = asyncio.Event()
    look = encode({"term": 1, "beat": "1 1", "at": 1.0, "node": None, "address": None})
    program = f"import os, time; os.write(0, {look!r}); time.sleep(60)"
    keeper = StandbySupervisor(
        ("-c", program), tmp_path / "log", on_look=lambda *_: looks.set(), on_over=lambda kept: None
    )
    before = set(Path("/proc/self/fd").iterdir())
    short.left = 3
    monkeypatch.setattr(socket, "socketpair", pairs)
    keeper.start()
    # Nothing is left open; what an earlier test has left may be closed at any moment.
    assert set(Path("/proc/self/fd").iterdir()) <= before
    await asyncio.wait_for(looks.wait(), 20.0)
    assert short.left == 0
    await keeper.close(0.0)


def test_fork_server_ends_with_its_agent():
    """It leaves an answer unread, and one comes later: neither is an error to be reported."""
    agent, server = pair()
    fork_server.send_answer(server, {"started": 1})
    agent.close()
    fork_server.send_answer(server, {"ended": 1})
    assert fork_server.receive_message(server) == ({}, [])
    server.close()
