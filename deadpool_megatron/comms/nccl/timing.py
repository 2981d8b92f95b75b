"""The clock of a GPU: events of CUDA, used again and again."""

from __future__ import annotations

import torch

from deadpool_megatron.comms.in_flight.stream_waits import DeviceClock


class CudaClock(DeviceClock[torch.cuda.Event]):
    """Marks are events with a time. Any thread. Has never run on a GPU."""

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
