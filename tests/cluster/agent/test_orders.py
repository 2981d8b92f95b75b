"""Limits of an agent's orders, and the address of the coordinator."""

import asyncio
import os
import time

import pytest

from deadpool_megatron.cluster.agent.coordinator_address import CoordinatorAddress
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, write_json
from deadpool_megatron.settings import Settings
from tests.cluster.agent.world import World
from tests.common.wait import until


@pytest.mark.parametrize("communicator", ["gloo", "nccl"])
def test_agent_reports_inventory_in_time_if_nothing_answers(tmp_path, monkeypatch, communicator):
    """The member does not leave, no vault answers, and each process dies late."""
    settings = Settings(communicator=communicator)
    worst_seconds = settings.close_seconds + 7 * settings.stage_seconds
    assert worst_seconds < settings.gather_seconds
    world = World(
        tmp_path,
        monkeypatch,
        settings={"communicator": communicator},
        next={"close_epoch": ["never"], "inventory": ["never"] * 3},
        dying_seconds=0.99 * settings.stage_seconds,
    )
    lines = world.live(
        [
            'coordinator: {"t": "welcome", "boot": "c1", "term": 1, "seen": 0}',
            'coordinator: {"t": "start", "slots": {"0": 1}, "provisional_roles": {}}',
            'member 0.1: [{"t": "hello"}]',
            'coordinator: {"enter": [1, [[0, 0, 1]], [0, 1]]}',
            'coordinator: {"t": "close", "epoch": 1, "cause": "a failure"}',
            f"wait: {0.9 * worst_seconds}",
            f"wait: {settings.gather_seconds - 0.9 * worst_seconds}",
            'coordinator: {"t": "stop", "reason": "the end"}',
        ]
    )
    (reported,) = [n for n, line in enumerate(lines) if '"t": "inventory"' in line]
    _, end = [n for n, line in enumerate(lines) if line.startswith("wait: ")]
    assert end < reported < lines.index('coordinator: {"t": "stop", "reason": "the end"}')


async def test_address_does_not_wait_for_a_run_directory_that_hangs(tmp_path):
    run = RunDirectory(tmp_path)
    os.mkfifo(run.coordinator)
    address = CoordinatorAddress(run, None, from_standby=lambda: None)
    began = time.monotonic()
    for _ in range(3):
        assert address.newest() is None
        await asyncio.sleep(0.1)
    assert time.monotonic() - began < 2.0
    writer = os.open(run.coordinator, os.O_WRONLY)  # the reader waits in its thread
    write_json(run.coordinator, {"host": "here", "port": 7})
    os.close(writer)
    await until(lambda: address.newest() == ("here", 7))


async def test_address_is_the_newest_known(tmp_path):
    run = RunDirectory(tmp_path)
    seen: list[tuple[str, int]] = []
    fixed = ("fixed", 1)
    address = CoordinatorAddress(run, fixed, from_standby=lambda: seen[-1] if seen else None)
    assert address.newest() == fixed
    write_json(run.coordinator, {"host": "read", "port": 2})
    await until(lambda: address.newest() == ("read", 2))
    run.coordinator.write_text("{")
    await asyncio.sleep(0.05)
    assert address.newest() == ("read", 2)
    seen.append(("seen", 3))
    assert address.newest() == ("seen", 3)
