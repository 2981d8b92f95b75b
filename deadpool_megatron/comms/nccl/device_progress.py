"""The device's progress in each group, as torch's flight recorder has it, and the device's clock.

torch's watchdog looks at the events of all operations ten times a second, whether anybody waits for
them or not, and keeps for each group the numbers of the last one that was enqueued, started, and
completed. Read in FlightRecorderDetail.hpp and ProcessGroupNCCL.hpp of torch 2.13: ``pg_status``
has them by the number that the process has given to the group's object (``uid``), which no two
objects share over all epochs. The names in ``pg_config`` say nothing of it: a name comes again in
each epoch. What was started is known with ``TORCH_NCCL_ENABLE_TIMING`` only, which nobody sets: it
costs events, and torch warns of watchdogs that hang.

After an error or a time-out the watchdog lets go of what is pending and calls all of it completed.
So the numbers of a group whose backend tells of an error say what was enqueued, and no more.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

import torch

from deadpool_megatron.comms.in_flight.stream_waits import DeviceClock

Numbers = tuple[int, int | None, int]

_NUMBERS = ("last_enqueued_collective", "last_started_collective", "last_completed_collective")


def ask_recorder() -> bytes:
    """Return what the recorder knows of groups, without the single operations."""
    from torch._C import _distributed_c10d

    # A torch without NCCL lacks it.
    dump = getattr(_distributed_c10d, "_dump_nccl_trace_json")  # noqa: B009
    return bytes(dump(includeCollectives=False, onlyActive=False))


def read_positions(dump: bytes, uids: Collection[int]) -> dict[int, Numbers]:
    """Return uid -> numbers enqueued, started (None: not known), completed, of those groups that
    have been given an operation. Raises ValueError for another form.
    """
    found: Any = json.loads(dump)
    try:
        status: Mapping[str, Mapping[str, str]] = found["pg_status"]
        return {uid: _numbers(status[str(uid)]) for uid in uids if str(uid) in status}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no dump of the flight recorder: {error!r}") from error


def _numbers(status: Mapping[str, str]) -> Numbers:
    # -1 before the first one.
    enqueued, started, completed = (int(status[name]) for name in _NUMBERS)
    return max(0, enqueued), None if started < 0 else started, max(0, completed)


class CudaClock(DeviceClock[torch.cuda.Event]):
    """The clock of a GPU: marks are events with a time, used again and again. Any thread. Has
    never run on a GPU.
    """

    def __init__(self) -> None:
        self._free: list[torch.cuda.Event] = []

    def mark(self) -> torch.cuda.Event:
        try:
            event = self._free.pop()
        except IndexError:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def is_passed(self, mark: torch.cuda.Event) -> bool:
        return bool(mark.query())  # type: ignore[no-untyped-call]

    def seconds(self, earlier: torch.cuda.Event, later: torch.cuda.Event) -> float:
        return float(earlier.elapsed_time(later)) / 1000

    def forget(self, mark: torch.cuda.Event) -> None:
        self._free.append(mark)
