"""Ranks under the seam, lost and replaced in turns; the conductor of rank.py."""

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

from proof.rank import Fate, Report, Setup, play

_REAP_SECONDS = 10.0
#: a member that cannot go on is replaced, and its replacement may be lost: so often in one recovery
_MAX_EPOCHS = 6


class FlockError(Exception):
    """Ranks did not come back; the message says what was waited for."""


class Member:
    """One process: a spare, or the member of a role."""

    def __init__(self, process: SpawnProcess, line: Connection) -> None:
        self.process = process
        self.line = line
        self.rank = -1
        self.warm = False

    def signal(self, number: signal.Signals) -> None:
        """To the process, if it is still there."""
        with suppress(ProcessLookupError):
            os.kill(self.process.pid or 0, number)

    def kill(self) -> None:
        """As if its node was gone."""
        self.process.kill()

    def meet(self, fate: Fate) -> None:
        """Have it meet its end."""
        self.send(fate)
        self.process.join()

    def send(self, order: object) -> None:
        """Nothing happens where the process has ended."""
        with suppress(OSError):
            self.line.send(order)

    def end(self) -> None:
        """Kill it and wait for its end."""
        self.process.kill()
        self.process.join(_REAP_SECONDS)
        self.line.close()


@dataclass
class Recovery:
    """What one recovery cost: reports of survivors as they left and as all were ready again."""

    left: list[Report] = field(default_factory=list)
    ready: dict[int, Report] = field(default_factory=dict)
    replaced: dict[int, str] = field(default_factory=dict)
    seconds: float = 0.0
    epochs: int = 0

    def longest(self, what: str) -> float:
        """The longest of the seconds that were reported under this name."""
        reports = [*self.left, *self.ready.values()]
        return max((float(r.values[what]) for r in reports if what in r.values), default=0.0)


Lose = Callable[[Member], None]


class Flock:
    """All ranks of an epoch and the spares behind them; ends all processes as its block ends.

    Who is slow has the time of the part, whose log then says what was waited for.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.epoch = 1
        #: how many communicators are made side by side from the next epoch on
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
        """``lose`` the victim, close the epoch, replace it (by one that meets this fate), and go
        on until every rank communicates again. Raises FlockError if that does not come to be."""
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
        """Until all are ready in this epoch; returns who has to be replaced instead."""
        ready: dict[int, Report] = {}
        while len(ready) < self.setup.ranks:
            lines = {member.line: member for member in self.members.values()}
            for line in wait(list(lines)):
                member = lines[line]  # type: ignore[index]
                report = self._receive(member)
                if report.what == "ruined":
                    found.replaced[member.rank] = str(report.values["reason"])
                    self.members.pop(member.rank).end()
                    return {member.rank: Fate.NONE}
                if report.what == "left":
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
            target=play, args=(self.setup, number, far_end), daemon=True
        )
        process.start()
        far_end.close()
        member = Member(process, own_end)
        self._all_members.append(member)
        self._spares.append(member)

    def _give(self, rank: int, epoch: int, fate: Fate) -> None:
        """Let the oldest spare play the role, and start another one in its place."""
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
