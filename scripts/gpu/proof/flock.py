"""Ranks under the seam, lost and replaced in turns; the conductor of rank.py."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import TracebackType

from proof.rank import CLOSE_SECONDS, CONNECT_SECONDS, Fate, Report, Setup, play

START_SECONDS = 120.0
_REAP_SECONDS = 10.0
#: a member that cannot go on is replaced, and its replacement may be lost: so often in one recovery
_MOST_EPOCHS = 6


class FlockError(Exception):
    """Ranks did not come back; the message says what was waited for."""


class Player:
    """One process: a spare, or the player of a role."""

    def __init__(self, process: SpawnProcess, line: Connection) -> None:
        self.process = process
        self.line = line
        self.rank = -1
        self.warm = False

    def signal(self, number: signal.Signals) -> None:
        """To the process, if it is still there."""
        if self.process.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def tell(self, order: object) -> None:
        """Nothing happens where the process has ended."""
        with suppress(OSError):
            self.line.send(order)

    def end(self) -> None:
        """Kill it and wait for its end."""
        self.process.kill()
        self.process.join(_REAP_SECONDS)
        self.line.close()


class Recovery:
    """What one recovery cost: reports of survivors as they left and as all were ready again."""

    def __init__(self) -> None:
        self.left: list[Report] = []
        self.ready: dict[int, Report] = {}
        self.replaced: dict[int, str] = {}
        self.seconds = 0.0
        self.epochs = 0

    def longest(self, what: str) -> float:
        """The longest of the seconds that were reported under this name."""
        reports = [*self.left, *self.ready.values()]
        return max((float(r.values[what]) for r in reports if what in r.values), default=0.0)


class Flock:
    """All ranks of an epoch and the spares behind them; ends all processes as its block ends."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.epoch = 1
        self._context = mp.get_context("spawn")
        self._everybody: list[Player] = []
        self._spares: list[Player] = []
        self.players: dict[int, Player] = {}
        self._started = 0

    def __enter__(self) -> Flock:
        for _ in range(self.setup.ranks + self.setup.spares):
            self._start_spare()
        for rank in range(self.setup.ranks):
            self._give(rank, self.epoch, Fate.NONE)
        first = self._await_ready({})
        if first.replaced or len(first.ready) < self.setup.ranks:
            self.__exit__(None, None, None)
            raise FlockError(f"no first communication: {first.replaced or 'not all came'}")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for player in self._everybody:
            player.signal(signal.SIGKILL)
        for player in self._everybody:
            player.end()

    def recover(self, victim: int, lose: Callable[[Player], None], fate: Fate) -> Recovery:
        """``lose`` the victim, close the epoch, replace it (by one that meets this fate), and go
        on until every rank communicates again. Raises FlockError if that does not come to be."""
        began = time.monotonic()
        player = self.players.pop(victim)
        lose(player)
        found = self._await_ready({victim: fate})
        found.seconds = time.monotonic() - began
        return found

    def _await_ready(self, lost: dict[int, Fate]) -> Recovery:
        found = Recovery()
        while found.epochs < _MOST_EPOCHS:
            if lost:
                found.epochs += 1
                for player in self.players.values():
                    player.tell(self.epoch)
                self.epoch += 1
                for rank, fate in lost.items():
                    self._give(rank, self.epoch, fate)
            lost = self._watch(found)
            if not lost:
                return found
        raise FlockError(f"not all ready after {_MOST_EPOCHS} epochs: {found.replaced}")

    def _watch(self, found: Recovery) -> dict[int, Fate]:
        """Until all are ready in this epoch; returns who has to be replaced instead."""
        until = time.monotonic() + CONNECT_SECONDS + CLOSE_SECONDS + START_SECONDS
        ready: dict[int, Report] = {}
        while len(ready) < self.setup.ranks:
            lines = {player.line: player for player in self.players.values()}
            came = wait(list(lines), max(0.0, until - time.monotonic()))
            if not came:
                missing = sorted(set(range(self.setup.ranks)) - set(ready))
                raise FlockError(f"ranks {missing} did not come into epoch {self.epoch}")
            for line in came:
                player = lines[line]  # type: ignore[index]
                report = self._hear(player)
                if report.what == "ruined":
                    found.replaced[player.rank] = str(report.values["reason"])
                    self.players.pop(player.rank).end()
                    return {player.rank: Fate.NONE}
                if report.what == "left":
                    found.left.append(report)
                elif report.epoch == self.epoch:
                    ready[player.rank] = report
        found.ready = ready
        return {}

    def _hear(self, player: Player) -> Report:
        try:
            report = player.line.recv()
            assert isinstance(report, Report)
            return report
        except (EOFError, OSError):
            return Report("ruined", self.epoch, {"reason": "its process ended"})

    def _start_spare(self) -> None:
        ours, theirs = self._context.Pipe()
        number = self._started
        self._started += 1
        process = self._context.Process(target=play, args=(self.setup, number, theirs), daemon=True)
        process.start()
        theirs.close()
        player = Player(process, ours)
        self._everybody.append(player)
        self._spares.append(player)

    def _give(self, rank: int, epoch: int, fate: Fate) -> None:
        """Let the oldest spare play the role, and start another one in its place."""
        player = self._spares.pop(0)
        if not player.warm:
            if not player.line.poll(START_SECONDS):
                raise FlockError(f"a process was not warm after {START_SECONDS:g} s")
            player.line.recv()
            player.warm = True
        player.rank = rank
        player.tell((rank, epoch, fate))
        self.players[rank] = player
        if len(self._spares) < self.setup.spares:
            self._start_spare()


def clear(folder: Path, kept: Sequence[int]) -> None:
    """Remove the stores of epochs that are over."""
    for path in folder.iterdir():
        if path.name.isdigit() and int(path.name) not in kept:
            path.unlink(missing_ok=True)
