"""Ranks on the package's communicators, lost and replaced in turns; the controller of rank.py."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

from proof.rank import Fate, Report, Setup, run_rank

_REAP_SECONDS = 10.0
#: of one recovery: a member that cannot continue is replaced, and the replacement may be lost too
_MAX_EPOCHS = 6


class FlockError(Exception):
    """Ranks did not come back; the message names what was waited for."""


class Member:
    """One process: a spare, or the member of a role."""

    def __init__(self, process: SpawnProcess, line: Connection) -> None:
        self.process = process
        self.line = line
        self.rank = -1
        self.warm = False

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, if it still exists."""
        with suppress(ProcessLookupError):
            os.kill(self.process.pid or 0, number)

    def kill(self) -> None:
        """Kill it, as the loss of its node would."""
        self.process.kill()

    def meet(self, fate: Fate) -> None:
        """Order it to fail in this way, and wait for its end."""
        self.send(fate)
        self.process.join()

    def send(self, order: object) -> None:
        """Send an order; do nothing if the process has ended."""
        with suppress(OSError):
            self.line.send(order)

    def end(self) -> None:
        """Kill it and wait for its end."""
        self.process.kill()
        self.process.join(_REAP_SECONDS)
        self.line.close()


@dataclass
class Recovery:
    """The cost of one recovery: reports of survivors that left, and of all ranks ready again."""

    left: list[Report] = field(default_factory=list)
    ready: dict[int, Report] = field(default_factory=dict)
    replaced: dict[int, str] = field(default_factory=dict)
    seconds: float = 0.0
    epochs: int = 0

    def longest(self, name: str) -> float:
        """Return the longest of the seconds that were reported under this name."""
        reports = [*self.left, *self.ready.values()]
        return max((float(r.values[name]) for r in reports if name in r.values), default=0.0)


Lose = Callable[[Member], None]


class Flock:
    """All ranks of an epoch and their spares; ends all processes as its block ends.

    A slow rank may use the whole time of the part, whose log then shows what was waited for.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.epoch = 1
        #: how communicators are made from the next epoch on
        self.way = "one-by-one"
        self._context = mp.get_context("spawn")
        self._all_members: list[Member] = []
        self._spares: list[Member] = []
        self.members: dict[int, Member] = {}

    def __enter__(self) -> Flock:
        for _ in range(self.setup.ranks + self.setup.spares):
            self._start_spare()
        for rank in range(self.setup.ranks):
            self._give(rank, self.epoch, Fate.NONE)
        first = self._await_ready({})
        if first.replaced or len(first.ready) < self.setup.ranks:
            self.__exit__()
            raise FlockError(f"no first communication: {first.replaced or 'not all came'}")
        return self

    def __exit__(self, *_: object) -> None:
        for member in self._all_members:
            member.kill()
        for member in self._all_members:
            member.end()

    def recover(self, victim: int, lose: Lose, fate: Fate) -> Recovery:
        """``lose`` the victim, close the epoch, replace the victim by a process with this fate, and
        wait until every rank communicates again. Raises FlockError if that does not happen."""
        _await_warm(self._spares[0])
        began = time.monotonic()
        member = self.members.pop(victim)
        lose(member)
        found = self._await_ready({victim: fate})
        found.seconds = time.monotonic() - began
        return found

    def _await_ready(self, lost: dict[int, Fate]) -> Recovery:
        found = Recovery()
        while found.epochs < _MAX_EPOCHS:
            if lost:
                found.epochs += 1
                for member in self.members.values():
                    member.send((self.epoch, self.way))
                self.epoch += 1
                for rank, fate in lost.items():
                    self._give(rank, self.epoch, fate)
            lost = self._watch(found)
            if not lost:
                return found
        raise FlockError(f"not all ready after {_MAX_EPOCHS} epochs: {found.replaced}")

    def _watch(self, found: Recovery) -> dict[int, Fate]:
        """Wait until all are ready in this epoch; return the ranks to replace if they cannot be."""
        ready: dict[int, Report] = {}
        while len(ready) < self.setup.ranks:
            lines = {member.line: member for member in self.members.values()}
            for line in wait(list(lines)):
                member = lines[line]  # type: ignore[index]
                report = self._receive(member)
                if report.kind == "ruined":
                    found.replaced[member.rank] = str(report.values["reason"])
                    self.members.pop(member.rank).end()
                    return {member.rank: Fate.NONE}
                if report.kind == "left":
                    found.left.append(report)
                elif report.epoch == self.epoch:
                    ready[member.rank] = report
        found.ready = ready
        return {}

    def _receive(self, member: Member) -> Report:
        try:
            report = member.line.recv()
            assert isinstance(report, Report)
            return report
        except (EOFError, OSError):
            return Report("ruined", self.epoch, {"reason": "its process ended"})

    def _start_spare(self) -> None:
        own_end, far_end = self._context.Pipe()
        number = len(self._all_members)
        process = self._context.Process(
            target=run_rank, args=(self.setup, number, far_end), daemon=True
        )
        process.start()
        far_end.close()
        member = Member(process, own_end)
        self._all_members.append(member)
        self._spares.append(member)

    def _give(self, rank: int, epoch: int, fate: Fate) -> None:
        """Give the role to the oldest spare, and start another spare for it."""
        member = self._spares.pop(0)
        _await_warm(member)
        member.rank = rank
        member.send((rank, epoch, self.way, fate))
        self.members[rank] = member
        if len(self._spares) < self.setup.spares:
            self._start_spare()


def _await_warm(member: Member) -> None:
    if not member.warm:
        member.line.recv()
        member.warm = True
