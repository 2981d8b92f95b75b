"""Who takes part in a check, as its conductor sees it: one connection for each node."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from deadpool_megatron.preflight.facts import Clock, NodeFacts, NodeReport, Rate, Wanted
from deadpool_megatron.preflight.follower import reason_of
from deadpool_megatron.wire import framing
from deadpool_megatron.wire.framing import WireError

# For what is sent: a node that reads nothing for so long is lost.
_SEND_SECONDS = 5.0


@dataclass
class Seat:
    """A node that has joined, and what has been measured about it. ``lost``: why it is gone."""

    node: int
    address: tuple[str, int]
    facts: NodeFacts
    connection: socket.socket
    lost: str = ""
    clock: Clock | None = None
    unreached: dict[int, str] = field(default_factory=dict)
    rates: list[Rate] = field(default_factory=list)

    @property
    def peer(self) -> list[Any]:
        """As orders name it."""
        return [self.node, *self.address]

    def report(self) -> NodeReport:
        """What the judge reads."""
        return NodeReport(self.node, self.facts, self.clock, self.unreached, tuple(self.rates))


class Roster:
    """Taking nodes in is thread-safe; everything else belongs to the conducting thread."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._lock = threading.Lock()
        self._seats: dict[int, Seat] = {}

    def take_in(self, connection: socket.socket, message: Mapping[str, Any]) -> bool:
        """Seat a node that asks to join, or refuse it. Called by the threads of the server."""
        try:
            node = int(message["node"])
            seat = Seat(
                node=node,
                address=(str(message["host"]), int(message["port"])),
                facts=NodeFacts.from_dict(message["facts"]),
                connection=connection,
            )
            wanted = Wanted(**message["wanted"])
        except (KeyError, TypeError, ValueError) as error:
            raise WireError(f"malformed join: {error!r}") from error
        with self._lock:
            why = self._objection(seat, wanted)
            if not why:
                framing.send(connection, {"t": "joined"})
                self._seats[node] = seat
                return True
        framing.send(connection, {"t": "refused", "why": why})
        return False

    def _objection(self, seat: Seat, wanted: Wanted) -> str:
        if wanted != self._wanted:
            return (
                f"node {seat.node} was started for {_shown(wanted)}, the others for"
                f" {_shown(self._wanted)}: give all of them the same arguments"
            )
        taken = self._seats.get(seat.node)
        if taken is not None and not _is_closed(taken.connection):
            return (
                f"node {seat.node} is on host {taken.facts.hostname} already: give each its own"
                " --node-id"
            )
        return ""

    def seats(self) -> dict[int, Seat]:
        """All that ever joined, the lost ones included, by ascending number."""
        with self._lock:
            return dict(sorted(self._seats.items()))

    def present(self) -> list[Seat]:
        """Those that are still there."""
        return [seat for seat in self.seats().values() if not seat.lost]

    def tell(self, seats: Iterable[Seat], message: Mapping[str, Any]) -> None:
        """Send to each; one that does not take it is lost."""
        for seat in seats:
            try:
                seat.connection.settimeout(_SEND_SECONDS)
                framing.send(seat.connection, message)
            except (OSError, WireError) as error:
                self._lose(seat, error)

    def answers(self, seats: Iterable[Seat], what: str, limit_seconds: float) -> dict[int, Any]:
        """One message of each of these seats, all within the limit; who sends none is lost."""
        limit = time.monotonic() + limit_seconds
        found = {}
        for seat in seats:
            if seat.lost:
                continue
            try:
                seat.connection.settimeout(max(0.1, limit - time.monotonic()))
                found[seat.node] = framing.receive(seat.connection)
            except TimeoutError:
                self._lose(seat, f"it did not answer {what!r} within {limit_seconds:g} s")
            except (OSError, WireError) as error:
                self._lose(seat, error)
        return found

    def close(self) -> None:
        """Close all connections."""
        for seat in self.seats().values():
            seat.connection.close()

    @staticmethod
    def _lose(seat: Seat, why: str | BaseException) -> None:
        text = why if isinstance(why, str) else f"it ended in the middle ({reason_of(why)})"
        seat.lost = seat.lost or text
        seat.connection.close()


def _is_closed(connection: socket.socket) -> bool:
    """Whether the process at the other end has ended; it may have been started again."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    # A node that waits for orders sends nothing: what can be read is the end of the connection.
    return bool(poll.poll(0))


def _shown(wanted: Wanted) -> str:
    shown = f"{wanted.nodes} nodes, {wanted.spares} spares, {wanted.nproc_per_node} processes each"
    return f"{shown}, {wanted.shm_bytes} bytes of shared memory" if wanted.shm_bytes else shown
