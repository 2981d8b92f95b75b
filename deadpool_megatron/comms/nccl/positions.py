"""How far the device has come in each group, as torch's flight recorder has it.

torch's watchdog looks at the events of all operations ten times a second, whether anybody waits for
them or not, and keeps for each group the numbers of the last one that was enqueued, started, and
completed. Read in FlightRecorder.hpp and ProcessGroupNCCL.cpp of torch 2.13 (``pg_config``,
``pg_status``).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

_NUMBERS = ("last_enqueued_collective", "last_started_collective", "last_completed_collective")


def ask_recorder() -> bytes:
    """Return what the recorder knows of groups, without the single operations."""
    from torch._C import _distributed_c10d

    # A torch without NCCL lacks it.
    dump = getattr(_distributed_c10d, "_dump_nccl_trace_json")  # noqa: B009
    return bytes(dump(includeCollectives=False, onlyActive=False))


def read_positions(dump: bytes, names: Collection[str]) -> dict[str, tuple[int, int, int]]:
    """Return group name -> numbers enqueued, started, completed, of the newest group of each name;
    a group that an epoch has left is in the dump as well. Raises ValueError for another form.
    """
    found: Any = json.loads(dump)
    newest: dict[str, int] = {}
    try:
        for number, config in found["pg_config"].items():
            name = str(config["name"])
            if name in names:
                newest[name] = max(newest.get(name, -1), int(number))
        status: Mapping[str, Mapping[str, int]] = found.get("pg_status", {})
        return {
            name: _numbers(status[str(number)])
            for name, number in newest.items()
            if str(number) in status
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no dump of the flight recorder: {error!r}") from error


def _numbers(status: Mapping[str, int]) -> tuple[int, int, int]:
    # -1 before the first one.
    enqueued, started, completed = (max(0, int(status[name])) for name in _NUMBERS)
    return enqueued, started, completed
