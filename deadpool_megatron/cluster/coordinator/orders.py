"""Orders of the coordinator to agents: the actions of the machine, as messages to each agent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from deadpool_megatron import failpoints
from deadpool_megatron.cluster.coordinator.succession import CoordinatorOptions
from deadpool_megatron.cluster.link.message_limits import beat_seconds, repeat_seconds
from deadpool_megatron.cluster.link.peers import AgentPeer, Peers
from deadpool_megatron.cluster.machine import actions
from deadpool_megatron.cluster.machine.state import Phase, State
from deadpool_megatron.layout.history import History
from deadpool_megatron.layout.records import EpochRecord
from deadpool_megatron.wire import framing
from deadpool_megatron.wire.forms import write

_NAMES: Mapping[type[actions.Action], str] = {
    actions.StartMembers: "start",
    actions.KillMember: "kill",
    actions.CloseEpoch: "close",
    actions.Pause: "pause",
    actions.Dump: "dump",
}
# Fields of actions that have another name in a message.
_KEYS = {"local_rank": "slot", "incarnations": "slots"}


class RecordFrames:
    """Frames of a record for agents: a common frame, and for each agent a frame with the sources of
    its own roles. The history of the run is left out; only the journal has it.
    """

    def __init__(self, record: EpochRecord) -> None:
        self.record = record
        common = replace(record, restore=record.restore.of_roles(()), history=History())
        message = {"t": "record", "record": common.to_dict()}
        self._common = framing.frame(framing.dumps_in_parts(message))
        self._roles: dict[int, list[int]] = {}
        for role, seat in record.seats.items():
            self._roles.setdefault(seat.node, []).append(role)

    def to(self, node: int) -> bytes:
        """Return the frames for a node."""
        restore = self.record.restore.of_roles(self._roles.get(node, ()))
        return framing.encode({"t": "restore", "restore": restore.to_dict()}) + self._common


class Orders:
    """Sender of the orders; its only state is the frames of the newest record. For the
    coordinator's loop."""

    def __init__(self, options: CoordinatorOptions, peers: Peers) -> None:
        self._options = options
        self._peers = peers
        self._frames: RecordFrames | None = None

    def give(self, order: actions.Action) -> None:
        """Send an order to its agents. It arrives once, on the present or the next connection. If
        an agent lacks several records, it gets only the newest.
        """
        match order:
            case actions.Announce(record):
                failpoints.hit("coordinator.announce", epoch=record.epoch)
                self._peers.send_in_turns(
                    self._peers.active(), lambda peer: self._send(peer, record)
                )
            case actions.DropNode():
                self._drop(order)
            case actions.StartMembers(node) | actions.KillMember(node):
                self._peers.order(node, _message(order))
            case actions.Dump(nodes):
                for node in nodes:
                    self._peers.order(node, _message(order))
            case actions.CloseEpoch() | actions.Pause():
                if isinstance(order, actions.CloseEpoch):
                    failpoints.hit("coordinator.close", epoch=order.epoch)
                self._peers.send_all(_message(order))

    def welcome(self, node: int, record: EpochRecord | None, state: State) -> None:
        """Send the present state to an agent that has just connected."""
        peer = self._peers.agents.get(node)
        if peer is None:
            return  # the connection has ended since the join
        info, settings = self._options.info, self._options.info.settings
        epoch = 0 if record is None else record.epoch
        # A coordinator that has just taken over lets training continue until all agents are back.
        is_open = state.open_epoch == epoch or state.phase is Phase.BOOTSTRAPPING
        self._peers.welcome(
            peer,
            {
                "t": "welcome",
                "term": self._options.term.number,
                "seen": self._peers.newest_report(peer),
                "closed": epoch if not is_open else epoch - 1,
                "beat_seconds": beat_seconds(info.nodes + info.spares, settings),
                "repeat_seconds": repeat_seconds(len(state.seats)),
                "cause": "" if record is None else record.cause,
            },
            self._frames_for(peer, record) if record is not None and is_open else b"",
        )

    def send_frame(self, node: int, frame: bytes) -> None:
        """Send an agent a frame that it requests again after each welcome."""
        peer = self._peers.agents.get(node)
        if peer is not None and peer.welcomed and not peer.dropped:
            peer.send_frame(frame)

    def prepare(self, record: EpochRecord) -> RecordFrames:
        """Make the frames of a record, once for all agents; in any thread."""
        self._frames = frames = RecordFrames(record)
        return frames

    def _send(self, peer: AgentPeer, record: EpochRecord) -> None:
        if frames := self._frames_for(peer, record):
            peer.send_frame(frames)

    def _frames_for(self, peer: AgentPeer, record: EpochRecord) -> bytes:
        """Return the frames of the record for an agent that lacks it, else no bytes. Afterwards the
        record counts as sent."""
        if peer.sent_epoch >= record.epoch:
            return b""
        peer.sent_epoch = record.epoch
        frames = self._frames
        if frames is None or frames.record is not record:
            frames = self.prepare(record)
        return frames.to(peer.node)

    def _drop(self, order: actions.DropNode) -> None:
        peer = self._peers.agents.get(order.node)
        if peer is None:
            return
        refusal = {"t": "refused", "why": order.cause, "left_out": order.excluded}
        if not peer.welcomed:
            peer.send(refusal)
        elif order.excluded:
            self._peers.order(order.node, refusal)
        else:
            self._peers.order(order.node, {"t": "stop", "reason": order.cause, "dropped": True})
        peer.dropped = True


def _message(order: actions.Action) -> dict[str, Any]:
    values = {_KEYS.get(name, name): value for name, value in write(order).items()}
    return {"t": _NAMES[type(order)], **values}
