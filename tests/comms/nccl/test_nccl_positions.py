"""How far devices have come: torch's dump is read, and a role that does not come is seen."""

import json
from types import SimpleNamespace
from typing import Any

from deadpool_megatron.comms.in_flight.device_time import read_positions
from deadpool_megatron.comms.in_flight.epoch import Progress
from deadpool_megatron.comms.inner import Position


def recorded(**status: Any) -> bytes:
    """As torch 2.13 writes it: groups by name, but their numbers by the uids of their objects."""
    config = {
        "0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"},
        "3": {"name": "3", "desc": "TENSOR", "ranks": "[0, 1]"},
        "a3f": {"name": "a3f", "desc": "DATA", "ranks": "[0, 1]"},
    }
    numbers = ("last_enqueued_collective", "last_started_collective", "last_completed_collective")
    values = {
        uid: dict(zip(numbers, map(str, found), strict=True)) for uid, found in status.items()
    }
    return json.dumps({"version": "2.10", "pg_config": config, "pg_status": values}).encode()


def test_numbers_are_those_of_the_object_whatever_its_name():
    dump = recorded(**{"0": (-1, -1, -1), "3": (90, 90, 90), "11": (5, 5, 4)})
    assert read_positions(dump, {0, 11, 12}) == {0: (0, None, 0), 11: (5, 5, 4)}
    assert read_positions(recorded(**{"0": (1, 1, 1)}), {3}) == {}


EPOCH: Any = SimpleNamespace(
    closed=False, waits={}, check=lambda operation: None, progress=Progress()
)


def test_a_collective_after_more_messages_is_pending():
    assert Position(enqueued=1, started=9, completed=9, collective=False).is_pending
    assert not Position(enqueued=9, started=9, completed=9, collective=False).is_pending
