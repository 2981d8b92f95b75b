"""Stacks of a process that does not move; one that cannot answer is not waited for."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deadpool_megatron.cluster.agent import stacks
from deadpool_megatron.cluster.agent.stacks import Stacks
from tests.common.wait import wait_for

_STANDS = """
import threading, time
from deadpool_megatron.cluster.process import posix
from tests.common.wait import wait_for

def innermost():
    print("ready", flush=True)
    time.sleep(600)

def outer():
    innermost()

posix.enable_stack_dumps()
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
outer()
"""
_DOES_NOT_LISTEN = "import time; print('ready', flush=True); time.sleep(600)"


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
    return asyncio.run(stacks.get_stacks(pid, log, 30.0))


def test_stacks_have_the_main_thread_innermost_frame_first(tmp_path):
    with process(tmp_path, _STANDS) as (pid, log):
        found = ask(pid, log)
        again = ask(pid, log)
    functions = [frame.split()[0] for frame in found.frames]
    assert functions == ["innermost", "outer", "<module>"]
    assert found.threads == 2
    assert found.missing == ""
    assert again == found, "the earlier answer in the log is not taken for this one"


def test_stopped_process_is_not_waited_for(tmp_path):
    with process(tmp_path, _STANDS) as (pid, log):
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)
        assert "stopped and cannot answer" in ask(pid, log).missing


def test_process_without_handler_survives_the_request(tmp_path):
    with process(tmp_path, _DOES_NOT_LISTEN) as (pid, log):
        assert "does not answer" in ask(pid, log).missing
        os.kill(pid, 0)
