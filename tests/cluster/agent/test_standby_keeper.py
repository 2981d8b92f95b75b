"""What an agent tells its standby, and each one that follows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from deadpool_megatron.cluster.agent.standby import StandbyKeeper

# Reports every line of its standard input as a sign of life.
_ECHO = """
import json, os, sys
for line in sys.stdin:
    look = {"term": 1, "beat": line.strip(), "at": 1.0, "address": None}
    os.write(int(sys.argv[2]), (json.dumps(look) + "\\n").encode())
"""


def test_each_standby_is_told_its_place_and_whether_there_is_contact(tmp_path: Path) -> None:
    heard: list[str] = []

    async def until(ready: Callable[[], bool]) -> None:
        async with asyncio.timeout(20.0):
            while not ready():
                await asyncio.sleep(0.01)

    async def run() -> None:
        keeper = StandbyKeeper(
            ("-c", _ECHO),
            str(tmp_path),
            "run",
            tmp_path / "log",
            on_look=lambda term, beat, at: heard.append(beat),
            on_over=lambda kept: None,
        )
        keeper.start()
        for place in (5, 5, 3):
            keeper.place(place)
        keeper.contact(True)
        await until(lambda: heard == ["place 5", "place 3", "found"])
        heard.clear()
        assert keeper._watcher is not None
        keeper._watcher.kill()
        await until(lambda: heard == ["place 3", "found"])
        await keeper.close(0.0)

    asyncio.run(run())
