"""RoleReports of a member while it plays a role: beats, phases, events. Nothing after an interrupt.

Beats carry two probes: the time for which the role works for an iteration without waiting for
others, and, once it makes no progress, what its groups wait for.
"""

from __future__ import annotations

import contextlib
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from math import ceil
from typing import Any, NoReturn

from deadpool_megatron.cluster.link.member_link import MemberLink
from deadpool_megatron.comms import Communicators, EpochClosed, StreamWaits
from deadpool_megatron.events import Event, Kind, not_finite
from deadpool_megatron.layout.records import EpochRecord, Generation
from deadpool_megatron.wire.framing import readable

_LOOK_SECONDS = 0.05
# What a mark in a stream costs the host, generously, and the part of training that marks may take.
_MARK_SECONDS = 5e-6
_MOST_SHARE = 1e-3
# So long without progress, and so often from then on: the recorder is not asked while all is well.
_STILL_SECONDS = 1.0


class RoleReports:
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
        # Newest checkpoint that the coordinator has made valid since it was asked.
        self.durable_iteration = 0
        self._section_before = self.section
        self._link = link
        self._settings = link.settings
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

    def emit(self, kind: str, data: Mapping[str, Any]) -> None:
        """Emit what the loop reports. A line for people that was shown before is not shown
        again."""
        record = self.record
        if record is None:
            return
        try:
            self._check(record.epoch)
        except EpochClosed:
            if self.section != "adopt":
                raise
            return  # built without peers, it has nothing to leave, and goes on building
        values = dict(data)
        iteration = values.pop("iteration", None)
        if kind == Kind.LOG:
            if self.iteration <= record.emitted_up_to:
                return
            print(values["text"], flush=True)
            self.send_event(Kind.LOG, iteration, values)
            return
        if kind == Kind.TRAINING:  # said by whoever takes the role, too
            self.send_event(Kind.TRAINING, None, values)
            return
        found = not_finite(values) if kind == Kind.STEP else None
        if found is not None and self._settings.nonfinite != "ignore":
            self.send_event(Kind.STEP, iteration, values)
            self.stand_still(f"the {found[0]} of iteration {iteration} is {found[1]}")
        self.told.append([str(kind), iteration, values])
        self.send_event(Kind(kind), iteration, values)

    def judge(self, number: str, value: float) -> None:
        """Go no further than an iteration of this epoch whose ``number`` is not finite."""
        if math.isfinite(value) or self.record is None or self._settings.nonfinite == "ignore":
            return
        facts = {"iteration": self.iteration, "number": number, "value": str(value)}
        self.say("not-finite", role=self.role, **facts)
        self.stand_still(f"the {number} of iteration {self.iteration} is {value}")

    def stand_still(self, why: str) -> NoReturn:
        """Wait until the coordinator has decided about what was said. Nobody can finish the next
        update without this role, so the state before this one stays in memory.

        Ends by what ``check`` raises. Raises RuntimeError when no decision comes.
        """
        self.section = "stopped"
        seconds = self._settings.operation_timeout_seconds
        self.wait_until(lambda: False, seconds)
        raise RuntimeError(
            f"{why}, and the coordinator did not decide what to do within"
            f" operation_timeout_seconds ({seconds:g} s)"
        )

    def check(self) -> None:
        """Raise what ends the present epoch for this role, if something does."""
        assert self.record is not None
        self._check(self.record.epoch)

    def wait_until(self, done: Callable[[], bool], seconds: float = math.inf) -> bool:
        """Look until it is ``done``; False after so many seconds. Raises what ``check`` raises."""
        limit = time.monotonic() + seconds
        while not done():
            self.check()
            if time.monotonic() >= limit:
                return False
            readable(self._link.interrupt_fd, _LOOK_SECONDS)
        return True

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
        """A wait for the protection of ``generation``: while it lasts, and at its end. Meanwhile
        the role is in a section of its own: what holds it up is not its own fault.
        """
        if not over and self.section != "gate":
            self._section_before = self.section
            self.section = "gate"
        elif over and self.section == "gate":
            self.section = self._section_before
        values = {"seconds": seconds, "over": over, "lineage": generation.lineage}
        self.send_event(Kind.GATE_WAIT, generation.iteration, values)

    def report_rehearsal(self, facts: Mapping[str, Any]) -> None:
        """Report what the rehearsal of an update has shown."""
        self.send_event(Kind.REHEARSED, self.iteration, facts)
        if not facts["matched"]:
            print(
                f"role {self.role}: an update cannot be computed again from its gradients, to the"
                f" byte ({facts['difference']}): whole copies from here on",
                flush=True,
            )


class OwnTimeMeter(ABC):
    """Main thread; :attr:`sample` may be read by any."""

    def __init__(self) -> None:
        # (measured iterations, seconds of all of them), since the epoch began.
        self.sample = (0, 0.0)

    def reset(self) -> None:
        """A new epoch begins."""
        self.sample = (0, 0.0)

    @abstractmethod
    def begin(self) -> None:
        """An iteration begins."""

    @abstractmethod
    def end(self) -> None:
        """It is finished."""

    def _add(self, seconds: float) -> None:
        iterations, before = self.sample
        self.sample = (iterations + 1, before + max(0.0, seconds))


class HostMeter(OwnTimeMeter):
    """A meter where waits hold the host (gloo). ``waited()`` answers the seconds which the main
    thread has waited so far, in communication or for protection."""

    def __init__(self, waited: Callable[[], float]) -> None:
        super().__init__()
        self._waited = waited
        self._began = 0.0
        self._waited_before = 0.0

    def begin(self) -> None:
        self._waited_before = self._waited()
        self._began = time.monotonic()

    def end(self) -> None:
        waited = self._waited() - self._waited_before
        self._add(time.monotonic() - self._began - waited)


class DeviceMeter(OwnTimeMeter):
    """A meter where waits hold a stream (NCCL): by marks in it, in as many iterations as cost next
    to nothing. ``stalled()`` answers the seconds which the host has waited for protection so
    far."""

    def __init__(self, waits: StreamWaits, stalled: Callable[[], float]) -> None:
        super().__init__()
        self._waits = waits
        self._stalled = stalled
        self._stalled_before = 0.0
        self._stalled_seconds = 0.0
        self._is_measured = False
        self._to_skip = 0

    def reset(self) -> None:
        super().reset()
        self._waits.drop()
        self._is_measured, self._to_skip = False, 0

    def begin(self) -> None:
        found = self._waits.read()
        if found is not None:
            whole, waited = found
            self._add(whole - waited - self._stalled_seconds)
            cost = 2 * self._waits.count * _MARK_SECONDS
            self._to_skip = ceil(cost / (_MOST_SHARE * max(whole, 1e-6))) - 1
        elif self._to_skip > 0:
            self._to_skip -= 1
        if self._to_skip <= 0:
            self._is_measured = self._waits.begin()
            self._stalled_before = self._stalled()

    def end(self) -> None:
        if self._is_measured:
            self._is_measured = False
            self._waits.end()
            self._stalled_seconds = self._stalled() - self._stalled_before


class HangProbe:
    """Says of its groups, in the beats of a member that makes no progress, what helps to find the
    culprit. Used by the watcher thread alone, which makes the beats."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._progress = -1
        self._since = 0.0
        self._told: dict[str, Any] = {}

    def look(self, communicators: Communicators) -> Mapping[str, Any]:
        """Return what a beat says besides, once the process has stood still for a while:
        ``begun``, a group and the numbers of its collectives and messages that the host has begun,
        for each group in which the host itself waits; and ``device``, where operations run on one:
        a group, the numbers of its operations that were enqueued, started and completed, and
        whether they are collectives.
        """
        progress, now = communicators.progress(), self._now()
        if progress != self._progress:
            self._progress, self._since, self._told = progress, now, {}
        elif now - self._since >= _STILL_SECONDS:
            self._since = now
            begun = [
                [group, one.collectives, one.messages]
                for group, one in sorted(communicators.begun().items())
            ]
            self._told = {**self._told, "begun": begun}
            found = None
            # What the recorder of another version says is no evidence; the beat continues.
            with contextlib.suppress(ValueError, AttributeError, RuntimeError):
                communicators.look()
                found = communicators.positions()
            if found is not None:
                self._told["device"] = [
                    [group, one.enqueued, one.started, one.completed, one.collective]
                    for group, one in sorted(found.items())
                ]
        return self._told
