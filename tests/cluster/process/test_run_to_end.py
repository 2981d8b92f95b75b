"""A coordinator ends, whatever its threads wait for."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

from deadpool_megatron.cluster.process.run_to_end import run_to_end

_HANGS = """
import asyncio, threading
from deadpool_megatron.cluster.process.run_to_end import run_to_end

async def main():
    asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)
    return 75

run_to_end(main(), 0.1)
"""


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
