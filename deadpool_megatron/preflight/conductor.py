"""The node that leads a check: waits for the others, has everything measured, and judges."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from deadpool_megatron import failpoints
from deadpool_megatron.preflight import schedule, stream
from deadpool_megatron.preflight.board import Announcement, Board
from deadpool_megatron.preflight.facts import Missing, Rate, Wanted
from deadpool_megatron.preflight.follower import REACH_THREADS, CheckError, reason_of
from deadpool_megatron.preflight.judge import Verdict, judge, slow_or_unknown
from deadpool_megatron.preflight.roster import Roster, Seat
from deadpool_megatron.preflight.schedule import Pair
from deadpool_megatron.preflight.server import PROBE_SECONDS, connect
from deadpool_megatron.wire.auth import AuthenticationError
from deadpool_megatron.wire.framing import WireError

# For nodes that have announced themselves, but have not joined when the wait is over.
GRACE_SECONDS = 15.0
_MEASURE_SECONDS = 30.0
# At nodes that were slow: a link that is busy for a moment must not cost its node the role.
_MORE_LOOKS = 2
_IN_TIME = "it is there, but did not join in time"
_POLL_SECONDS = 0.05


class Conductor:
    """Measures with the nodes that join its roster. For one thread, beside the roster's own."""

    def __init__(
        self,
        board: Board,
        roster: Roster,
        wanted: Wanted,
        secret: bytes,
        pairs: Sequence[Pair] | None,
    ) -> None:
        self._board = board
        self._roster = roster
        self._wanted = wanted
        self._secret = secret
        self._pairs = pairs
        self._missing: dict[int, Missing] = {}

    def gather(self, until: float, wait_seconds: float, lost: Collection[str]) -> None:
        """Wait for all nodes until the monotonic time ``until``, a little longer for those that
        are known to come. ``lost``: instances that need not be waited for.

        Raises CheckError when most nodes that are there cannot be reached: then they have a
        conductor of their own, and a second verdict would contradict its.
        """
        while len(self._roster.seats()) < self._wanted.total:
            now = time.monotonic()
            if now >= until + GRACE_SECONDS:
                break
            if now >= until and not self._more_are_coming(lost):
                break
            time.sleep(_POLL_SECONDS)
        elsewhere = self._look_for_others(wait_seconds)
        joined = self._roster.seats().keys()
        living = len(joined) + len(elsewhere)
        outvoted = 2 * len(joined) < living
        tied = 2 * len(joined) == living and min(elsewhere, default=0) < min(joined, default=0)
        if elsewhere and (outvoted or tied):
            node, why = min(elsewhere.items())
            raise CheckError(
                f"{len(elsewhere)} of {living} nodes cannot be reached from here, one is node"
                f" {node} ({why}): look at the network and firewall, and at the run secret"
            )

    def _more_are_coming(self, lost: Collection[str]) -> bool:
        absent = self._announced_but_absent().values()
        waited_for = [announced for announced in absent if announced.instance not in lost]
        return any(reason == _IN_TIME for reason, _ in self._why_absent(waited_for))

    def _announced_but_absent(self) -> dict[int, Announcement]:
        seats = self._roster.seats()
        return {node: found for node, found in self._board.read().items() if node not in seats}

    def _look_for_others(self, wait_seconds: float) -> dict[int, str]:
        """Why nodes have not joined; answers those whose processes may be alive."""
        absent = self._announced_but_absent()
        elsewhere = {}
        for node in set(range(self._wanted.total)) - self._roster.seats().keys() - absent.keys():
            self._missing[node] = Missing(node, f"it did not come within {wait_seconds:g} s")
        for announced, (reason, living) in zip(
            absent.values(), self._why_absent(list(absent.values())), strict=True
        ):
            self._missing[announced.node] = Missing(announced.node, reason, announced.hostname)
            if living:
                elsewhere[announced.node] = reason
        return elsewhere

    def _why_absent(self, absent: Sequence[Announcement]) -> list[tuple[str, bool]]:
        """For each a few words, and whether its process may be alive."""
        with ThreadPoolExecutor(max_workers=REACH_THREADS) as pool:
            return list(pool.map(self._why_one_is_absent, absent))

    def _why_one_is_absent(self, announced: Announcement) -> tuple[str, bool]:
        try:
            with connect(announced.address, self._secret) as connection:
                stream.echo(connection, announced.node)
        except ConnectionRefusedError:
            return "its process has ended", False
        except AuthenticationError:
            return "it has another run secret: give all nodes the same run directory", True
        except (OSError, WireError) as error:
            where = "{}:{}".format(*announced.address)
            return f"{where} cannot be reached ({reason_of(error)}): look at its network", True
        return _IN_TIME, True

    def measure(self) -> None:
        """Clocks, then all-to-all connections, then links."""
        self._measure_clocks()
        self._measure_reach()
        first = self._pairs
        if first is None:
            domains = {s.node: s.facts.domain or f"node{s.node}" for s in self._roster.present()}
            first = schedule.buddy_pairs(self._wanted.nodes, self._wanted.total, domains)
        measured = list(first)
        self._measure_links(first)
        for _ in range(_MORE_LOOKS):
            rates = {s.node: s.report().rate_bytes_per_second for s in self._roster.present()}
            again = schedule.second_look(slow_or_unknown(rates), rates, measured)
            self._measure_links(again)
            measured += again

    def judge(self) -> tuple[Verdict, dict[str, Any]]:
        """The verdict, and the content of ``check.json``."""
        seats = self._roster.seats()
        for seat in seats.values():
            if seat.lost:
                self._missing[seat.node] = Missing(seat.node, seat.lost, seat.facts.hostname)
        reports = [seat.report() for seat in self._roster.present()]
        # One that joined at the last moment can have been looked for already.
        present = {report.node for report in reports}
        missing = [absent for node, absent in self._missing.items() if node not in present]
        failpoints.hit("check.judge")
        verdict = judge(reports, missing, self._wanted)
        nodes = []
        for entry in verdict.nodes:
            seat_of = seats.get(entry.node)
            nodes.append(
                {
                    "node": entry.node,
                    "hostname": entry.hostname,
                    "standing": entry.standing.value,
                    "id": entry.assigned,
                    "reasons": list(entry.reasons),
                    "facts": seat_of.facts.to_dict() if seat_of else None,
                    "clock": vars(seat_of.clock) if seat_of and seat_of.clock else None,
                    "rates": [vars(rate) for rate in seat_of.rates] if seat_of else [],
                    "unreached": {str(k): v for k, v in seat_of.unreached.items()}
                    if seat_of
                    else {},
                }
            )
        content = {
            "ok": verdict.ok,
            "advice": verdict.advice,
            "wanted": vars(self._wanted),
            "wall_time": time.time(),
            "nodes": nodes,
        }
        return verdict, content

    def announce(self, ok: bool) -> None:
        """Send everybody home."""
        self._roster.tell(self._roster.present(), {"t": "verdict", "ok": ok})

    def _measure_clocks(self) -> None:
        with ThreadPoolExecutor(max_workers=REACH_THREADS) as pool:
            list(pool.map(self._measure_clock, self._roster.present()))

    def _measure_clock(self, seat: Seat) -> None:
        # A node that cannot be reached is found when all connect to all.
        with suppress(OSError, WireError), connect(seat.address, self._secret) as connection:
            _, seat.clock = stream.echo(connection, seat.node)

    def _measure_reach(self) -> None:
        present = self._roster.present()
        self._roster.tell(present, {"t": "reach", "peers": [seat.peer for seat in present]})
        # Each connection has three waits; the last turn of a node's threads counts in full.
        turns = math.ceil(len(present) / REACH_THREADS) + 1
        answers = self._roster.answers(present, "reach", 3 * PROBE_SECONDS * turns)
        for seat in present:
            unreached = answers.get(seat.node, {}).get("unreached", {})
            seat.unreached.update({int(peer): str(why) for peer, why in unreached.items()})

    def _measure_links(self, pairs: Sequence[Pair]) -> None:
        for turn in schedule.rounds(pairs):
            present = {seat.node: seat for seat in self._roster.present()}
            self._roster.tell(present.values(), {"t": "tick"})
            asked = [
                (present[a], present[b])
                for a, b in turn
                if a in present and b in present and b not in present[a].unreached
            ]
            for seat, peer in asked:
                self._roster.tell([seat], {"t": "measure", "peer": peer.peer})
            answers = self._roster.answers([seat for seat, _ in asked], "measure", _MEASURE_SECONDS)
            for seat, peer in asked:
                rate = _rate(peer.node, answers.get(seat.node, {}))
                if rate is not None:
                    seat.rates.append(rate)
                    peer.rates.append(rate.seen_by_peer(seat.node))


def _rate(peer: int, answer: Mapping[str, Any]) -> Rate | None:
    if answer.get("t") != "measured":
        return None
    return Rate(peer, float(answer["out"]), float(answer["in"]), float(answer["round_trip"]))
