"""Processes before the user's command, asked where they stand, and at their end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deadpool_megatron.cluster.process import stacks
from deadpool_megatron.cluster.process.member_main import MemberSpec
from deadpool_megatron.cluster.process.run_to_end import run_to_end
from deadpool_megatron.cluster.process.stacks import Stacks, read_stacks
from deadpool_megatron.wire import framing
from tests.common.waiting import wait_for

_STANDS = """
import threading, time
from deadpool_megatron.cluster.process import stacks
from tests.common.waiting import wait_for

def innermost():
    print("ready", flush=True)
    time.sleep(600)

def outer():
    innermost()

stacks.answer_asks()
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
outer()
"""
_DOES_NOT_LISTEN = "import time; print('ready', flush=True); time.sleep(600)"
_HANGS = """
import asyncio, threading
from deadpool_megatron.cluster.process.run_to_end import run_to_end

async def main():
    asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)
    return 75

run_to_end(main(), 0.1)
"""


@contextmanager
def process(tmp_path: Path, program: str) -> Iterator[tuple[int, Path]]:
    log = tmp_path / "log"
    with open(log, "ab") as output:
        child = subprocess.Popen([sys.executable, "-c", program], stdout=output, stderr=output)
    try:
        wait_for("a line of the child", lambda: b"ready" in log.read_bytes())
        yield child.pid, log
    finally:
        child.kill()
        child.wait()


def ask(pid: int, log: Path) -> Stacks:
    return asyncio.run(stacks.ask(pid, log, 30.0))


def test_main_thread_innermost_frame_first(tmp_path: Path) -> None:
    with process(tmp_path, _STANDS) as (pid, log):
        found = ask(pid, log)
        again = ask(pid, log)
    functions = [frame.split()[0] for frame in found.frames]
    assert functions == ["innermost", "outer", "<module>"]
    assert found.threads == 2
    assert found.missing == ""
    assert again == found, "the earlier answer in the log is not taken for this one"


def test_a_stopped_process_cannot_answer_and_is_not_waited_for(tmp_path: Path) -> None:
    with process(tmp_path, _STANDS) as (pid, log):
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)
        assert "stopped and cannot answer" in ask(pid, log).missing


def test_a_process_without_the_handler_is_not_ended_by_the_question(tmp_path: Path) -> None:
    with process(tmp_path, _DOES_NOT_LISTEN) as (pid, log):
        assert "does not answer" in ask(pid, log).missing
        os.kill(pid, 0)


def test_a_process_whose_name_is_cut_in_a_letter_is_asked(tmp_path: Path) -> None:
    title = "import ctypes; ctypes.CDLL(None).prctl(15, 'rank10 \u8bad\u7ec3\u8fdb'.encode());"
    with process(tmp_path, f"{title} {_DOES_NOT_LISTEN}") as (pid, log):
        assert "does not answer" in ask(pid, log).missing


def test_text_that_is_no_listing() -> None:
    assert read_stacks("whatever\n").missing


def test_a_member_without_a_folder_for_its_log_prints_to_that_of_its_agent(tmp_path: Path) -> None:
    log = tmp_path / "cleaned" / "node0-slot0-1.log"
    environment = {"DEADPOOL_RUN_DIR": str(tmp_path)}
    spec = MemberSpec(0, 0, 1, ("-m", "this"), environment, log, tmp_path)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        framing.send(ours, spec.to_dict())
        module = "deadpool_megatron.cluster.process.member_main"
        ended = subprocess.run(
            [sys.executable, "-m", module, str(theirs.fileno()), ""],
            pass_fds=(theirs.fileno(),),
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert ended.returncode == 0, ended.stderr
    assert "node0-slot0-1.log is here: [Errno 2]" in ended.stderr
    assert "The Zen of Python" in ended.stdout


def test_what_is_under_way_is_waited_for() -> None:
    done = []

    async def main() -> int:
        asyncio.get_running_loop().run_in_executor(None, lambda: done.append(time.sleep(0.05)))
        return 75

    assert run_to_end(main(), 60.0) == 75
    assert len(done) == 1


def test_a_thread_that_a_disk_holds_up_does_not_keep_the_process() -> None:
    command = [sys.executable, "-c", _HANGS]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 75
    assert "waited 0.1 s for files" in ended.stderr
