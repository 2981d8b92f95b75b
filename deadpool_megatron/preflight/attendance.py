"""One node's part in a check: find the conductor or become it, and see the check through.

Node 0 conducts. Without it the lowest node that is there does so when the wait is over; when a
conductor ends in the middle, the lowest of the others begins anew at once.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deadpool_megatron.cluster.run_directory.directory import RunDirectory, write_json
from deadpool_megatron.preflight import stream
from deadpool_megatron.preflight.board import Announcement, Board, State
from deadpool_megatron.preflight.conductor import GRACE_SECONDS, Conductor
from deadpool_megatron.preflight.facts import Wanted
from deadpool_megatron.preflight.follower import (
    CheckError,
    ConductorLost,
    Identity,
    NotConducting,
    follow,
    join,
)
from deadpool_megatron.preflight.machine import Instruments
from deadpool_megatron.preflight.roster import Roster
from deadpool_megatron.preflight.schedule import Pair
from deadpool_megatron.preflight.server import Server, connect
from deadpool_megatron.wire.framing import WireError

_POLL_SECONDS = 0.05
# Longest time between two orders, beside the wait for the nodes.
_PHASE_SECONDS = 120.0


@dataclass(frozen=True)
class Options:
    """``pairs``: links to measure, None for those to the buddies; ``attempt``: see Board."""

    directory: Path
    node: int
    wanted: Wanted
    listener: socket.socket
    domain: str
    secret: bytes
    wait_seconds: float
    attempt: str = ""
    pairs: Sequence[Pair] | None = None


@dataclass(frozen=True)
class Outcome:
    """``content`` of ``check.json`` on the node that conducted, None on the others."""

    ok: bool
    content: dict[str, Any] | None = None


def attend(options: Options, instruments: Instruments) -> Outcome:
    """Take part in the check of all nodes.

    Raises CheckError (wrong arguments, or cut off from most nodes) and OSError (the directory).
    """
    return _Attendance(options, instruments).run()


class _Attendance:
    def __init__(self, options: Options, instruments: Instruments) -> None:
        host, port = options.listener.getsockname()[:2]
        self._options = options
        self._instruments = instruments
        self._board = Board(options.directory / "check", options.attempt)
        self._me = Identity(
            node=options.node,
            instance=secrets.token_hex(8),
            host=host,
            port=port,
            facts=instruments.facts(host, options.domain),
            wanted=options.wanted,
            secret=options.secret,
        )
        self._until = time.monotonic() + options.wait_seconds
        # Instances of conductors that are gone.
        self._lost: set[str] = set()
        self._server = Server(options.listener, options.secret, options.node)

    def run(self) -> Outcome:
        with self._server:
            self._post(State.WAITS)
            try:
                while True:
                    found = self._find_conductor()
                    if found is None:
                        return self._conduct()
                    try:
                        return Outcome(self._follow(found[1]))
                    except ConductorLost:
                        self._lost.add(found[0].instance)
                        self._until = min(self._until, time.monotonic())
            finally:
                with suppress(OSError):
                    self._post(State.OVER)

    def _post(self, state: State) -> None:
        me = self._me
        self._board.post(
            Announcement(
                node=me.node,
                hostname=me.facts.hostname,
                host=me.host,
                port=me.port,
                instance=me.instance,
                attempt=self._options.attempt,
                state=state,
                facts=me.facts.to_dict(),
            )
        )

    def _find_conductor(self) -> tuple[Announcement, socket.socket] | None:
        """The lowest conductor that takes this node in; None when this node is to conduct."""
        patience = self._until + self._options.wait_seconds + GRACE_SECONDS
        while True:
            announcements = [
                announced
                for announced in self._board.read().values()
                if announced.instance not in self._lost and announced.node != self._me.node
            ]
            for announced in announcements:
                if announced.state is State.CONDUCTS:
                    try:
                        return announced, join(announced.address, self._me)
                    except (OSError, WireError, NotConducting):
                        continue  # left over, unreachable, or of another secret: wait for others
            now = time.monotonic()
            if self._me.node == 0 or now >= patience:
                return None
            lower = [a for a in announcements if a.node < self._me.node]
            if now >= self._until and not any(self._is_there(a) for a in lower):
                return None
            time.sleep(_POLL_SECONDS)

    def _is_there(self, announced: Announcement) -> bool:
        try:
            with connect(announced.address, self._options.secret) as connection:
                stream.echo(connection, announced.node)
        except (OSError, WireError):
            return False
        return True

    def _follow(self, connection: socket.socket) -> bool:
        silence = self._options.wait_seconds + _PHASE_SECONDS
        return follow(connection, self._me, self._instruments, silence)

    def _conduct(self) -> Outcome:
        options = self._options
        roster = Roster(options.wanted)
        self._server.on_join = roster.take_in
        own = threading.Thread(target=self._follow_oneself, name="check-own", daemon=True)
        own.start()
        try:
            self._post(State.CONDUCTS)
            conductor = Conductor(
                self._board, roster, options.wanted, options.secret, options.pairs
            )
            conductor.gather(self._until, options.wait_seconds, self._lost)
            self._server.on_join = None
            result = RunDirectory(options.directory).check
            self._give_way(result, len(roster.seats()))
            conductor.measure()
            verdict, content = conductor.judge()
            write_json(result, content)
            conductor.announce(verdict.ok)
            return Outcome(verdict.ok, content)
        finally:
            self._server.on_join = None
            roster.close()
            own.join(GRACE_SECONDS)

    def _give_way(self, result: Path, came: int) -> None:
        """Remove an earlier verdict, unless it may be that of a check that this node has missed."""
        wanted = self._options.wanted
        if result.exists() and (came < wanted.nodes or 2 * came <= wanted.total):
            raise CheckError(
                f"only {came} of {wanted.total} nodes came, and {result} has a verdict: this node"
                " came too late, or remove it to check anew"
            )
        result.unlink(missing_ok=True)

    def _follow_oneself(self) -> None:
        """The conductor is examined the same way as all others, over a connection to itself."""
        with suppress(OSError, WireError, ConductorLost):
            self._follow(join((self._me.host, self._me.port), self._me))
