"""What the coordinator tells agents: the machine's actions as messages, to each its part."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from deadpool_megatron import failpoints
from deadpool_megatron.cluster.coordinator.options import CoordinatorOptions
from deadpool_megatron.cluster.link.pacing import beat_seconds, repeat_seconds
from deadpool_megatron.cluster.link.peers import AgentPeer, Peers
from deadpool_megatron.cluster.link.record_delta import RecordTeller
from deadpool_megatron.cluster.machine import actions
from deadpool_megatron.cluster.machine.state import Phase, State
from deadpool_megatron.layout.records import EpochRecord
from deadpool_megatron.wire import framing

Order = (
    actions.Announce
    | actions.DropNode
    | actions.StartMembers
    | actions.KillMember
    | actions.CloseEpoch
    | actions.Pause
    | actions.Dump
)


class Orders:
    """Sends; keeps no state but which record each agent has. Used from the coordinator's loop."""

    def __init__(self, options: CoordinatorOptions, peers: Peers) -> None:
        self._options = options
        self._peers = peers
        # By it an agent knows that it is a new coordinator that must hear everything again.
        self._boot = secrets.token_hex(8)
        self._teller: RecordTeller | None = None

    def give(self, order: Order) -> None:
        """Send it to whom it is for; who is not connected hears of it in the next welcome."""
        match order:
            case actions.Announce(record):
                failpoints.hit("coordinator.announce", epoch=record.epoch)
                self._announce(record)
            case actions.DropNode(node, cause):
                self._drop(node, cause)
            case actions.StartMembers(node, slots, provisional):
                message = {"t": "start", "slots": _texts(slots), "provisional": _texts(provisional)}
                self.send(node, message)
            case actions.KillMember(node, slot, incarnation, hung):
                seat = {"slot": slot, "incarnation": incarnation}
                self.send(node, {"t": "kill", **seat, "hung": hung})
            case actions.CloseEpoch(epoch, cause):
                failpoints.hit("coordinator.close", epoch=epoch)
                self._peers.send_all({"t": "close", "epoch": epoch, "cause": cause})
            case actions.Pause(epoch, iteration):
                self._peers.send_all({"t": "pause", "epoch": epoch, "iteration": iteration})
            case actions.Dump(nodes, directory, generation, boundary, held):
                dump: dict[str, Any] = {
                    "t": "dump",
                    "directory": directory,
                    "boundary": boundary,
                    "held": [one.to_list() for one in held],
                }
                for node in nodes:
                    self.send(node, {**dump, "generation": generation.to_list()})

    def welcome(self, node: int, record: EpochRecord | None, state: State) -> None:
        """Tell an agent that has just connected what holds now."""
        peer = self._peers.agents[node]
        info, settings = self._options.info, self._options.info.settings
        epoch = 0 if record is None else record.epoch
        # A coordinator that has just taken over lets training go on until all agents are back.
        is_open = state.open_epoch == epoch or state.phase is Phase.GATHERING
        peer.welcomed = True
        peer.send(
            {
                "t": "welcome",
                "boot": self._boot,
                "term": self._options.term.number,
                "seen": self._peers.taken(peer),
                "record": None if record is None else self._told(peer, record),
                "closed": epoch if not is_open else epoch - 1,
                "beat_seconds": beat_seconds(info.nodes + info.spares, settings),
                "repeat_seconds": repeat_seconds(info.world_size),
                "cause": "" if record is None else record.cause,
            }
        )

    def durable_done(self, iteration: int) -> None:
        """A checkpoint is valid: its writers need wait no longer."""
        self._peers.send_all({"t": "durable-done", "iteration": iteration})

    def stop(self, reason: str, *, remove: bool) -> None:
        """The run is over; ``remove``: the slots, too."""
        self._peers.send_all({"t": "stop", "reason": reason, "remove": remove})

    def send(self, node: int, message: Mapping[str, Any]) -> None:
        """To one agent, if it is connected."""
        self.send_frame(node, framing.encode(message))

    def send_frame(self, node: int, frame: bytes) -> None:
        """The same for a message that was encoded before."""
        peer = self._peers.agents.get(node)
        if peer is not None and not peer.dropped:
            peer.send_frame(frame)

    def _announce(self, record: EpochRecord) -> None:
        before = None if self._teller is None else self._teller.record
        self._teller = RecordTeller(record, before)
        for peer in self._peers.listening():
            told = self._told(peer, record)
            if told is not None:
                peer.send({"t": "record", "record": told})

    def _told(self, peer: AgentPeer, record: EpochRecord) -> dict[str, Any] | None:
        """What the agent lacks of the record; it is counted as told from here on."""
        if self._teller is None or self._teller.record is not record:
            self._teller = RecordTeller(record, None)
        parts = self._teller.parts(peer.node, peer.told)
        peer.told = record.epoch
        return parts

    def _drop(self, node: int, cause: str) -> None:
        peer = self._peers.agents.get(node)
        if peer is None:
            return
        if peer.welcomed:
            peer.send({"t": "stop", "reason": cause, "remove": True})
        else:
            peer.send({"t": "refused", "why": cause})
        peer.dropped = True


def _texts(numbers: Mapping[int, int]) -> dict[str, int]:
    return {str(key): value for key, value in numbers.items()}
