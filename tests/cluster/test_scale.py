"""The real coordinator with simulated agents, as scripts/bench/coordinator.py measures it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from deadpool_megatron.cluster.coordinator.reporting.status import PacedStatus

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
AGENTS = 24


@pytest.mark.full
def test_simulated_agents_live_through_a_loss_and_a_takeover(tmp_path: Path) -> None:
    """The bench ends well only if every agent hears of each decision and is back after a kill."""
    bench = ROOT / "scripts" / "bench" / "coordinator.py"
    found = tmp_path / "found.json"
    done = subprocess.run(
        [sys.executable, bench, "--agents", str(AGENTS), "--seconds", "0.5", "--json", found],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (size,) = json.loads(found.read_text())["sizes"]
    assert size["agents"] == AGENTS
    assert size["roles"] == (AGENTS - 2) * 8
    # A change and the close, not a record of all roles.
    assert size["told_bytes_per_agent"] < 4000
    # As many bytes of events as 512 roles may write, of which every one waits at every gate.
    assert size["event_bytes_per_day"] < 50e6
    assert size["stall_second_connections"] > 0
    assert size["standby_looks_per_second"] > 0
    assert {"start", "loss of a node", "second connections", "takeover"} <= size["blocks"].keys()


def test_a_costly_status_is_not_made_for_every_question() -> None:
    made: list[int] = []
    threads = set[int]()

    def make() -> dict[str, int]:
        threads.add(threading.get_ident())
        made.append(sum(range(300_000)))
        return {"number": len(made)}

    async def ask() -> list[int]:
        status = PacedStatus(make)
        asked = await asyncio.gather(*(status.newest() for _ in range(3)))
        return [one["number"] for one in asked]

    assert asyncio.run(ask()) == [1, 1, 1]
    assert threading.get_ident() not in threads, "the loop goes on meanwhile"
