"""Reports of a member that holds a role: phases, events, waits. After an interrupt none is sent."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from deadpool_megatron.cluster.link.member_link import MemberLink
from deadpool_megatron.comms import EpochClosed
from deadpool_megatron.events import Event, Kind, not_finite
from deadpool_megatron.layout.records import EpochRecord, Generation
from deadpool_megatron.wire.framing import readable

_POLL_SECONDS = 0.05


class RoleReports:
    """Reports of one member. Main thread; the watcher thread reads ``section`` and ``iteration``.

    ``check(epoch)`` raises when the epoch is closed or the run over (rule 11). Without a ``record``
    the member has no role, and drops what a loop emits while it warms up.
    """

    def __init__(self, link: MemberLink, check: Callable[[int], None]) -> None:
        self.section = "build"
        self.iteration = 0
        self.role = -1
        self.record: EpochRecord | None = None
        # Reports of this iteration so far. They travel with the generation and are sent again after
        # a restore, as a lost node may have lost them although the generation is safe.
        self.reported: list[list[Any]] = []
        # Newest checkpoint that the coordinator has made valid since the last request.
        self.durable_iteration = 0
        self._section_before = self.section
        self._link = link
        self._settings = link.settings
        self._check = check

    def resend(self, reported: list[list[Any]]) -> None:
        """Repeat the reports of a restored generation; the coordinator drops those it knows."""
        self.reported = list(reported)
        for kind, iteration, values in reported:
            self.send_event(Kind(kind), iteration, values)

    def send(self, kind: str, **values: Any) -> None:
        """Send one message about the current epoch."""
        assert self.record is not None
        self._link.send({"t": kind, "epoch": self.record.epoch, **values})

    def emit(self, kind: str, data: Mapping[str, Any]) -> None:
        """Report an event of the loop. Log lines of iterations that were shown before are
        dropped."""
        record = self.record
        if record is None:
            return
        try:
            self._check(record.epoch)
        except EpochClosed:
            if self.section != "adopt":
                raise
            return  # a role that is built without peers has no epoch to leave: continue building
        values = dict(data)
        iteration = values.pop("iteration", None)
        if kind == Kind.LOG:
            if self.iteration <= record.emitted_up_to:
                return
            print(values["text"], flush=True)
            self.send_event(Kind.LOG, iteration, values)
            return
        if kind == Kind.TRAINING:  # each process that takes the role repeats this event
            self.send_event(Kind.TRAINING, None, values)
            return
        found = not_finite(values) if kind == Kind.STEP else None
        if found is not None and self._settings.nonfinite != "ignore":
            self.send_event(Kind.STEP, iteration, values)
            self.block_until_decided(f"the {found[0]} of iteration {iteration} is {found[1]}")
        self.reported.append([str(kind), iteration, values])
        self.send_event(Kind(kind), iteration, values)

    def require_finite(self, number: str, value: float) -> None:
        """Report a ``value`` that is not finite, and block: training must not continue with it.
        ``number`` names the value."""
        if math.isfinite(value) or self.record is None or self._settings.nonfinite == "ignore":
            return
        facts = {"iteration": self.iteration, "number": number, "value": str(value)}
        self.send("not-finite", role=self.role, **facts)
        self.block_until_decided(f"the {number} of iteration {self.iteration} is {value}")

    def block_until_decided(self, reason: str) -> NoReturn:
        """Wait until the coordinator has decided about a report. No peer can finish the next update
        without this role, so the generation before this update stays in memory.

        Raises the exceptions of ``check``, and RuntimeError when no decision comes in time.
        """
        self.section = "stopped"
        seconds = self._settings.operation_timeout_seconds
        self.wait_until(lambda: False, seconds)
        raise RuntimeError(
            f"{reason}, and the coordinator did not decide what to do within"
            f" operation_timeout_seconds ({seconds:g} s)"
        )

    def check(self) -> None:
        """Raise EpochClosed or StopOrder if the current epoch has ended for this role."""
        assert self.record is not None
        self._check(self.record.epoch)

    def wait_until(self, done: Callable[[], bool], seconds: float = math.inf) -> bool:
        """Poll until ``done()``; False after ``seconds``. Raises the exceptions of ``check``."""
        limit = time.monotonic() + seconds
        while not done():
            self.check()
            if time.monotonic() >= limit:
                return False
            readable(self._link.interrupt_fd, _POLL_SECONDS)
        return True

    def send_event(self, kind: Kind, iteration: int | None, data: Mapping[str, Any]) -> None:
        """Send one event of the current epoch and role."""
        assert self.record is not None
        place = self.record.epoch, self._link.seat.node, self.role, iteration
        self._link.send_event(Event(kind, *place, data=data))

    def report_wait(self, generation: Generation, seconds: float, over: bool) -> None:
        """Report a wait for the protection of ``generation``, while the wait lasts and at its end
        (``over``).

        Meanwhile the role is in section "gate", so that the delay is not counted as its own.
        """
        if not over and self.section != "gate":
            self._section_before = self.section
            self.section = "gate"
        elif over and self.section == "gate":
            self.section = self._section_before
        values = {"seconds": seconds, "over": over, "lineage": generation.lineage}
        self.send_event(Kind.GATE_WAIT, generation.iteration, values)
