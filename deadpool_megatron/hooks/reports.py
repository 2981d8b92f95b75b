"""What a member says while it plays a role: beats, phases, events. Nothing after an interrupt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from deadpool_megatron.cluster.member_link import MemberLink
from deadpool_megatron.events import Event, Kind
from deadpool_megatron.layout.records import EpochRecord, Generation


class Reports:
    """Used on the main thread; the watcher thread reads ``section`` and ``iteration`` for beats.

    ``check(epoch)`` raises when the epoch is closed or the run over (rule 11). Without a ``record``
    the member plays no role, and what a loop emits while it warms up is dropped.
    """

    def __init__(self, link: MemberLink, check: Callable[[int], None]) -> None:
        self.section = "build"
        self.iteration = 0
        self.role = -1
        self.record: EpochRecord | None = None
        # What this iteration has reported so far. It travels with the generation: its line may be
        # lost with a node although the generation is safe, and is told again after a restore.
        self.told: list[list[Any]] = []
        self._link = link
        self._check = check

    def tell_again(self, told: list[list[Any]]) -> None:
        """Repeat what a restored generation had reported; the coordinator knows most of it."""
        self.told = list(told)
        for kind, iteration, values in told:
            self.send_event(Kind(kind), iteration, values)

    def say(self, kind: str, **values: Any) -> None:
        """One message about the present epoch."""
        assert self.record is not None
        self._link.send({"t": kind, "epoch": self.record.epoch, **values})

    def begin_phase(self, phase: str) -> None:
        """A stage of a recovery begins."""
        self.section = phase

    def end_phase(self, phase: str, seconds: float) -> None:
        """A stage of a recovery has ended."""
        self.say("phase", phase=phase, seconds=seconds)

    def emit(self, kind: str, data: Mapping[str, Any]) -> None:
        """What the loop reports. A line for people that was shown before is not shown again."""
        record = self.record
        if record is None:
            return
        self._check(record.epoch)
        values = dict(data)
        iteration = values.pop("iteration", None)
        if kind == Kind.LOG:
            if self.iteration <= record.emitted_up_to:
                return
            print(values["text"], flush=True)
        else:
            self.told.append([str(kind), iteration, values])
        self.send_event(Kind(kind), iteration, values)

    def send_event(self, kind: Kind, iteration: int | None, data: Mapping[str, Any]) -> None:
        """One event of the present epoch and role."""
        assert self.record is not None
        self._link.send_event(
            Event(
                kind,
                epoch=self.record.epoch,
                node=self._link.seat.node,
                role=self.role,
                iteration=iteration,
                data=data,
            )
        )

    def report_wait(self, generation: Generation, seconds: float, over: bool) -> None:
        """A wait for the protection of ``generation``: while it lasts, and at its end."""
        values = {"seconds": seconds, "over": over, "lineage": generation.lineage}
        self.send_event(Kind.GATE_WAIT, generation.iteration, values)
