"""The standby of an agent: it watches the journal, and takes over when the coordinator has failed.

It is a process of its own, for two reasons. Its reads may hang for as long as a network file system
does, while the agent must not hang. And it has imported all modules, so that a successor starts
within seconds of a coordinator's death. It reports each look at the journal to its agent. Once it
has claimed a term it *is* the coordinator; the agent then starts another standby.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from deadpool_megatron import failpoints
from deadpool_megatron.cluster.coordinator.succession import (
    RecoveredState,
    look_up,
    valid_checkpoints,
)
from deadpool_megatron.cluster.journal import terms
from deadpool_megatron.cluster.journal.journal import Journal, JournalError, LostRace
from deadpool_megatron.cluster.run_directory import directory as run_files
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, RunInfo
from deadpool_megatron.events import DAMAGE
from deadpool_megatron.file_systems import TimedRead
from deadpool_megatron.wire import auth, framing
from deadpool_megatron.wire.framing import FrameBuffer, WireError, readable

# The beats between two looks while the agent is connected to a coordinator: no takeover is near.
_CONNECTED_BEATS = 8
_GLANCE_SECONDS = 0.05
_RECEIVE_BYTES = 1 << 16


@dataclass(frozen=True)
class StandbyOptions:
    """Options: ``listen()`` returns a listening socket at ``host``; ``agent`` is the connection to
    the agent."""

    run: RunDirectory
    info: RunInfo
    secret: bytes
    node: int
    host: str
    listen: Callable[[], socket.socket]
    agent: socket.socket


class Standby:
    """See the module text. The agent sends each change of ``in_touch`` (whether a coordinator
    answers it) and of ``place`` (how many standbys may claim before this standby). The standby ends
    at the end of the stream, as the agent has ended.
    """

    def __init__(self, options: StandbyOptions, journal: Journal) -> None:
        self._options = options
        self._journal = journal
        settings = options.info.settings
        self._rhythm = terms.HeartbeatTiming.of(settings)
        info = options.info
        self._succession = terms.Succession(
            self._rhythm,
            settings.takeover_seconds,
            time.monotonic(),
            ended=info.ended_term,
        )
        self._place = terms.claim_order(None, info.nodes, info.spares, options.node)
        # The run directory may hang, while the journal is somewhere else.
        self._result = TimedRead(partial(_read_result, options.run))
        self._durable = TimedRead(partial(valid_checkpoints, options.run))
        self.recovered = RecoveredState()  # read just before the term was claimed
        self._term: terms.Term | None = None
        self._lost = True  # whether no coordinator answers the agent
        self._trouble = ""
        self._orders, self._unsent = FrameBuffer(), bytearray()
        self.was_in_touch = False  # whether the agent was ever connected to a coordinator

    def watch(self) -> tuple[terms.Term, socket.socket] | None:
        """Watch until this process is the coordinator; return the claimed term and the socket to
        which agents connect. Return None if the run is over or the agent has ended.
        """
        self._options.agent.setblocking(False)
        while True:
            try:
                # A connected agent gets the end of the run from the coordinator.
                if self._lost and (result := self._look_for_result()) is not None:
                    self._report({"over": True, "kept": bool(result.get("slots_kept", False))})
                    return None
                self._look()
                if (claimed := self._consider()) is not None:
                    return claimed
            except (JournalError, OSError) as error:
                self._report_trouble(str(error))
            except DAMAGE as error:
                # The entry may be of another version. The standby must live on, as without standbys
                # no coordinator would follow.
                self._report_trouble(
                    f"an entry of the journal is not understood: {type(error).__name__}: {error}"
                )
            if not self._pause():
                return None

    def _look_for_result(self) -> Mapping[str, Any] | None:
        with contextlib.suppress(TimeoutError):
            return self._result.look(_GLANCE_SECONDS)
        return None

    def _look(self) -> None:
        at = time.monotonic()
        self._term, beat = terms.look(self._journal, self._term)
        number = 0 if self._term is None else self._term.number
        self._succession.look(number, beat, at, time.monotonic())
        self._trouble = ""
        node, address = None, None
        if self._term is not None:
            node, address = self._term.node, list(self._term.address)
        self._report({"term": number, "beat": beat, "at": at, "node": node, "address": address})

    def _consider(self) -> tuple[terms.Term, socket.socket] | None:
        """Claim the next term, if it is time. Return the term and the listening socket, or None."""
        info, is_refused = self._options.info, False
        if self._term is not None and self._term.number > info.ended_term:
            if not self._succession.is_stale(time.monotonic()):
                return None
            is_refused = self._is_refused(self._term.address)
        now = time.monotonic()
        if not self._succession.may_claim(self._place, is_refused, now, in_touch=not self._lost):
            return None
        before, self._term = self._term, terms.newest_term(self._journal, self._term)
        if self._term != before:
            return None  # another standby has claimed a term, and will soon give a sign of life
        # All slow work is done before the claim, as other processes expect a sign of life after it.
        self.recovered = look_up(self._journal, self._durable, self.recovered.record)
        listener = self._options.listen()
        number = 1 if self._term is None else self._term.number + 1
        failpoints.hit("standby.claim", term=number)
        try:
            port = int(listener.getsockname()[1])
            host, node = self._options.host, self._options.node
            term = terms.claim_term(self._journal, number, host, port, node)
        except JournalError as error:
            listener.close()
            if isinstance(error, LostRace):
                return None  # another standby was first, as the next look will show
            raise
        with contextlib.suppress(JournalError):  # the coordinator's own beats follow, with retries
            self._journal.write_heartbeat(terms.sign(number, 0))
        address = list(term.address)
        self._report({"claimed": term.number, "at": now, "node": node, "address": address})
        return term, listener

    def _is_refused(self, address: tuple[str, int]) -> bool:
        """Return whether the host of the coordinator refuses connections to it."""
        info, limit = self._options.info, self._rhythm.beat
        try:
            with auth.connect(address, self._options.secret, info.run_id, limit) as connection:
                framing.send(connection, {"t": "control", "command": "info"})
                framing.receive(connection)
        except ConnectionRefusedError:
            return True
        except (OSError, WireError):
            pass  # without an answer, either side may be cut off
        return False

    def _pause(self) -> bool:
        """Wait until the next look, or until the agent sends a change; return False at EOF."""
        beats = 1 if self._lost else _CONNECTED_BEATS
        if not readable(self._options.agent.fileno(), beats * self._rhythm.beat):
            return True
        data = self._options.agent.recv(_RECEIVE_BYTES)
        for order in self._orders.feed(data):
            self._place = int(order.get("place", self._place))
            self._lost = not order.get("in_touch", not self._lost)
            self.was_in_touch = self.was_in_touch or not self._lost
        return bool(data)

    def _report_trouble(self, text: str) -> None:
        if text != self._trouble:
            self._trouble = text
            self._report({"trouble": text})
            print(f"standby of node {self._options.node}: {text}", file=sys.stderr, flush=True)

    def _report(self, report: Mapping[str, Any]) -> None:
        self._unsent += framing.encode(report)
        framing.send_some(self._options.agent, self._unsent)


def _read_result(run: RunDirectory) -> Mapping[str, Any] | None:
    """Return the result of the run; None while no readable result exists."""
    # The file may be removed with its directory, or half written by a host that failed.
    with contextlib.suppress(OSError, ValueError):
        if run.has_final():
            return run_files.read_json(run.final)
    return None
