"""What an agent tells its standby, and each one that follows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from deadpool_megatron.cluster.agent.children import standby_keeper
from deadpool_megatron.cluster.agent.children.standby_keeper import StandbyKeeper
from deadpool_megatron.cluster.process.liveness import ChildWatch
from tests.common.waiting import until

# Reports every line of its standard input as a sign of life.
_ECHO = """
import json, os, sys
for line in sys.stdin:
    look = {"term": 1, "beat": line.strip(), "at": 1.0, "node": 9, "address": None}
    os.write(int(sys.argv[2]), (json.dumps(look) + "\\n").encode())
"""


def kept(
    directory: Path, program: str, on_look: Callable[[int, str, float], None]
) -> StandbyKeeper:
    log = directory / "log"
    return StandbyKeeper(
        ("-c", program), str(directory), "run", log, on_look=on_look, on_over=lambda kept: None
    )


@pytest.mark.slow
async def test_each_standby_is_told_its_place_and_whether_there_is_contact(tmp_path: Path) -> None:
    heard: list[str] = []
    keeper = kept(tmp_path, _ECHO, lambda term, beat, at: heard.append(beat))
    keeper.start()
    for place in (5, 5, 3):
        keeper.place(lambda coordinator, place=place: place - (coordinator == 9))
    keeper.contact(True)
    await until(lambda: heard == ["place 5", "place 3", "found", "place 2"])
    heard.clear()
    assert keeper._watcher is not None
    keeper._watcher.kill()
    await until(lambda: heard == ["place 2", "found"])
    await keeper.close(0.0)


_CLAIMS = """
import json, os, sys, time
claim = {"claimed": 2, "at": 5.0, "node": 1, "address": ["10.0.0.7", 4000]}
os.write(int(sys.argv[2]), (json.dumps(claim) + "\\n").encode())
time.sleep(600)
"""


async def test_the_agent_beside_a_new_coordinator_knows_it_at_once(tmp_path: Path) -> None:
    """Not only when another standby has started and looked: the fence would be quicker."""
    looks: list[tuple[int, str, float]] = []
    claimed = asyncio.Event()

    def looked(term: int, beat: str, at: float) -> None:
        looks.append((term, beat, at))
        claimed.set()

    keeper = kept(tmp_path, _CLAIMS, looked)
    keeper.start()
    await asyncio.wait_for(claimed.wait(), 20.0)
    assert keeper.address == ("10.0.0.7", 4000)
    await keeper.close(0.0)
    assert looks[0] == (2, "claimed", 5.0)


async def test_a_standby_that_the_kernel_holds_does_not_hold_its_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a call to a file system that hangs, where SIGKILL waits too."""
    monkeypatch.setattr(standby_keeper, "_END_SECONDS", 0.05)
    claimed = asyncio.Event()
    keeper = kept(tmp_path, _CLAIMS, lambda term, beat, at: claimed.set())
    keeper.start()
    await asyncio.wait_for(claimed.wait(), 20.0)
    await until(lambda: keeper._watcher is not None)
    held = [*keeper._coordinators, keeper._watcher]
    with monkeypatch.context() as patched:
        patched.setattr(ChildWatch, "kill", lambda _self: None)
        await asyncio.wait_for(keeper.close(0.0), 20.0)
    for one in held:
        assert one is not None
        assert await one.end(20.0)
