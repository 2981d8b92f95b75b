"""The lanes of a vault: one for each address of its node that ``--deadpool-interface`` names.

The n-th lane connects the n-th addresses of two nodes. A connection takes the lane with the fewest
connections. If a lane breaks, the kernel ends its connections (:class:`.transport.Transport`), and
their work is done again over the other lanes, which nothing delays meanwhile. A thread then tries
the broken lane until it answers, and connections move back to it. With one address there is one
lane, and none of this happens.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from deadpool_megatron.layout.records import EpochRecord
from deadpool_megatron.vault.shared_nic import SharedNic
from deadpool_megatron.vault.transport import UNREACHABLE, Channel, Transport, begin_thread

Address = tuple[str, int]
Ends = Mapping["Lane", Address]
_RETRY_SECONDS = 1.0


class Lane:
    """An address of this node, its interface, and the connections from it."""

    def __init__(self, transport: Transport, nic: SharedNic) -> None:
        self.transport, self.nic = transport, nic
        self.uses = weakref.WeakSet[LaneUse]()
        self.broken = set[Address]()  # ends that do not answer


class LaneUse:
    """A place in a lane, while this object exists. ``ends``: the addresses of ``node`` by
    lane."""

    def __init__(self, lane: Lane, node: int, ends: Ends) -> None:
        self.lane, self.node, self.ends = lane, node, ends
        lane.uses.add(self)

    def should_move(self) -> bool:
        """Return whether a new connection to the node would be better than this connection."""
        working = [len(lane.uses) for lane, end in self.ends.items() if end not in lane.broken]
        is_crowded = len(self.lane.uses) > 1 + min(working, default=len(self.lane.uses))
        return is_crowded or (bool(working) and self.ends[self.lane] in self.lane.broken)


class Lanes:
    """All lanes of this node. Thread-safe. ``warn`` prints a text with the run's messages."""

    def __init__(self, lanes: Sequence[Lane], warn: Callable[[str], None]) -> None:
        self.lanes, self._warn = lanes, warn
        self._lock = threading.Lock()
        self._ends: dict[tuple[int, Address], Ends] = {}

    def begin(self, record: EpochRecord) -> None:
        """Forget the nodes that are not in a new record."""
        live = {(node, (known.host, known.vault_port)) for node, known in record.nodes.items()}
        self._ends = {key: ends for key, ends in self._ends.items() if key in live}
        for lane in self.lanes:
            lane.broken &= {ends[lane] for ends in self._ends.values() if lane in ends}

    def dial(self, node: int, address: Address) -> Channel:
        """Connect to the vault of ``node``, whose first address is given, over the best lane that
        works. Raises OSError or WireError."""
        ends = dict(self._known_ends(node, address))
        while True:
            with self._lock:
                best = min(ends, key=lambda lane: (ends[lane] in lane.broken, len(lane.uses)))
                use = LaneUse(best, node, ends)
            try:
                channel = best.transport.connect(node, *ends[best])
                channel.use = use
                return channel
            except UNREACHABLE:
                self.avoid(use)
                if len(ends) == 1:
                    raise
                ends = {lane: end for lane, end in ends.items() if lane is not best}

    def avoid(self, use: LaneUse) -> None:
        """Avoid the lane of a broken connection until its node answers there."""
        lane, end = use.lane, use.ends[use.lane]
        with self._lock:
            if len(self.lanes) == 1 or end in lane.broken:
                return
            lane.broken.add(end)
        begin_thread("retry-lane", partial(self._retry, lane, use.node, use.ends))

    def _retry(self, lane: Lane, node: int, ends: Ends) -> None:
        """Try a lane until it answers. Warn if the node answers on another lane."""
        end, has_warned = ends[lane], False
        path = f"{lane.nic.name} ({lane.transport.address[0]}) to node {node} ({end[0]})"
        while end in lane.broken:
            time.sleep(_RETRY_SECONDS)
            try:
                lane.transport.connect(node, *end).close()
            except UNREACHABLE:
                is_reached = any(end not in other.broken for other, end in ends.items())
                if is_reached and end in lane.broken and not has_warned:
                    self._warn(f"copies from {path} fail, and go over other interfaces meanwhile")
                    has_warned = True
            else:
                lane.broken.discard(end)
                if has_warned:
                    self._warn(f"copies use {path} again")

    def _known_ends(self, node: int, address: Address) -> Ends:
        """Return the address of the node at the end of each lane. Ask the node, if necessary."""
        if len(self.lanes) == 1:
            return {self.lanes[0]: address}
        if (node, address) not in self._ends:
            with contextlib.closing(self.lanes[0].transport.connect(node, *address)) as channel:
                channel.send({"t": "lanes"})
                more = [(str(host), int(port)) for host, port in channel.receive()["lanes"][1:]]
            self._ends[node, address] = dict(zip(self.lanes, [address, *more], strict=False))
        return self._ends[node, address]
