"""What carries an epoch, delivered to a vault late, early and twice."""

from __future__ import annotations

import contextlib
import inspect
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from deadpool_megatron.events import Event, Kind
from deadpool_megatron.layout.records import Generation, Restore, Seat, Source
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault import slot_memory
from deadpool_megatron.vault.commit_ledger import CommitLedger
from deadpool_megatron.vault.copies import Target
from deadpool_megatron.vault.epoch_gate import EpochGate
from deadpool_megatron.vault.errors import Refusal, Refused, VaultError
from deadpool_megatron.vault.member_connection import LocalLink, MemberConnection, MemberConnections
from deadpool_megatron.vault.peer_server import Server
from deadpool_megatron.vault.shm.segment import Filled, Segment, SlotState, checksum, own_name
from deadpool_megatron.vault.transport import ask_part
from deadpool_megatron.wire import framing
from deadpool_megatron.wire.framing import ConnectionClosed
from tests.common.wait import MAX_WAIT_SECONDS
from tests.vault.fake_network import FakeNetwork
from tests.vault.harness import make_layout, record_of
from tests.vault.slots import SlotStore, scheme_of

LATE, OPEN, EARLY = 1, 2, 3
OWN, PEER = make_layout(0, nbytes=100), make_layout(7, nbytes=100)
SEATS = {0: Seat(0, 0, 0), 7: Seat(1, 0, 0)}
NAMES = ["shard", "tail", "extras@step"]
RESTORED, NEW, NEXT = Generation(1, 4), Generation(2, 5), Generation(2, 6)
NBYTES = 10


class Node:
    """The vault of node 0 in epoch 2: role 0 is its own, of role 7 it keeps copies, and node 1
    those of role 0."""

    def __init__(self, directory: Path) -> None:
        self.events: list[Event] = []
        self.bad: list[Generation] = []
        self.network = FakeNetwork()
        self.transport = self.network.transport("fake", 0, 5.0)
        settings = Settings(restore_seconds=5.0)
        about = directory, settings, self.events.append, self.transport
        self.state = SlotStore(scheme_of, 0, *about)
        note, self.notes = self.state.nic.note, set[tuple[str, Generation]]()

        def noted(what: Any, role: int, generation: Generation) -> dict[str, float | None]:
            self.notes.add((what.__name__, generation))
            return note(what, role, generation)

        self.state.nic.note = noted  # type: ignore[method-assign]
        self.members = MemberConnections(self.state)
        self.state.on_bad = lambda epoch, role, generation, part: self.bad.append(generation)
        self.state.adopt(self.record(LATE))
        path = directory / own_name(0, SEATS[0])
        self.own = Segment.create(path, OWN, SEATS[0], NAMES)
        self.state.table.segments[path.name] = self.own
        self.fill(0, RESTORED, LATE)
        for name in NAMES:
            digest = checksum(self.own.data(0, name, NBYTES))
            self.own.seal_part(0, name, NBYTES, digest, LATE)
        self.own.set_state(0, SlotState.SEALED)

    def record(self, epoch: int) -> Any:
        restore = Restore("memory", RESTORED) if epoch > LATE else None
        more = {} if restore is None else {"restore": restore}
        return record_of(epoch, seats=SEATS, **more)

    def fill(self, slot: int, generation: Generation, epoch: int) -> None:
        self.own.mark_writing(slot)
        self.own.begin(slot, generation, epoch)
        self.own.fill(slot, dict.fromkeys(NAMES, NBYTES), epoch)

    def open(self) -> Node:
        """The next epoch. The member fills a slot, and a copy is begun."""
        self.events.clear()
        self.notes.clear()
        self.state.close(LATE)
        self.state.adopt(self.record(OPEN))
        self.fill(1, NEW, OPEN)
        self.copy = slot_memory.ensure_copy(self.state, PEER, RESTORED)
        slot = self.state.claim(self.copy, RESTORED, OPEN)
        assert slot is not None
        self.slot = slot
        self.state.seal_copy(self.copy, slot, "tail", NBYTES, 0, OPEN)
        return self

    def seen(self) -> list[object]:
        """All that shows of the vault: what it holds, promises, owes and reports."""
        state = self.state
        slots = [
            (path, slot, segment.state(slot), segment.generation(slot), part, entry)
            for path, segment in sorted(state.table.segments.items())
            for slot in range(segment.slots)
            for part in NAMES
            if (entry := segment.entry(slot, part))
        ]
        epochs = state.gate.open_epoch, state.gate.closed_epoch
        owed = state.ledger.shipment(OWN, Target(1), state.gate.open_epoch)
        ledger = state.ledger
        said = {*ledger.ended}, dict(ledger.committed), set(state.table.writers), [*self.bad]
        commits = [event.data for event in self.events if event.kind is Kind.COMMITTED]
        return [slots, epochs, owed and owed[0], said, commits, {*self.notes}]

    def goes_on(self) -> list[object]:
        """What it does when all copies are there after all."""
        self.state.ledger.acknowledge(OWN, RESTORED, 1, NAMES, self.state.gate.open_epoch)
        return self.seen()


def seal_own(node: Node, epoch: int) -> None:
    digests = {name: checksum(node.own.data(1, name, NBYTES)) for name in NAMES}
    node.state.seal_own(node.own, Filled(1, NEW, {}, [], False), digests, epoch)


def copy_part(node: Node, epoch: int) -> None:
    (place,) = node.state.table.find(0, RESTORED, "shard")
    node.state.copy_part(place, node.copy, node.slot, epoch)


# The methods of a vault that are given an epoch, or a record, and may change something.
CHANGES: Mapping[str, Callable[[Node, int], object]] = {
    "acknowledge": lambda n, e: n.state.ledger.acknowledge(OWN, RESTORED, 1, NAMES, e),
    "claim": lambda n, e: n.state.claim(n.copy, NEXT, e),
    "close": lambda n, e: n.state.close(e),
    "copy_part": copy_part,
    "note_elsewhere": lambda n, e: n.state.note_elsewhere(
        n.copy, n.slot, [("shard", NBYTES, 12)], e
    ),
    "open_part": lambda n, e: n.state.open_part(n.copy, n.slot, "tail", e),
    "seal_copy": lambda n, e: n.state.seal_copy(n.copy, n.slot, "shard", NBYTES, 12, e),
    "seal_own": seal_own,
    "count_shipped": lambda n, e: n.state.ledger.count_shipped(0, 1000, e),
}
ASKS = {"judge", "require_scheme", "is_open", "require_open", "pause", "shipment"}
# A record opens its epoch, and what is closed is closed for good, whatever came before.
ADVANCE = {"close", "adopt"}
# Each delivery is of other bytes.
ADDS = {"count_shipped"}


def two(directory: Path) -> tuple[Node, Node]:
    """One that something is delivered to, and one that nothing is."""
    for name in ("one", "other"):
        (directory / name).mkdir()
    return Node(directory / "one"), Node(directory / "other")


def opened(directory: Path) -> tuple[Node, Node]:
    """The same in epoch 2."""
    node, other = two(directory)
    return node.open(), other.open()


def deliver(node: Node, what: str, epoch: int) -> None:
    """It may be refused."""
    try:
        CHANGES[what](node, epoch)
    except VaultError:
        pass


def test_each_method_that_is_given_an_epoch_has_its_row():
    found = {
        name
        for part in (SlotStore, EpochGate, CommitLedger)
        for name, method in inspect.getmembers(part, inspect.isfunction)
        if not name.startswith("_")
        and {"epoch", "record"} & {*inspect.signature(method).parameters}
    }
    assert found == CHANGES.keys() | ASKS | {"adopt", "open"}


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("epoch", [LATE, EARLY])
def test_call_of_another_epoch_changes_no_state(tmp_path, what, epoch):
    node, other = opened(tmp_path)
    deliver(node, what, epoch)
    if epoch == EARLY and what in ADVANCE:
        assert node.state.gate.open_epoch == 0
        return
    assert node.seen() == other.seen()
    assert node.goes_on() == other.goes_on()


@pytest.mark.parametrize("what", CHANGES)
def test_repeated_call_counts_once(tmp_path, what):
    node, other = opened(tmp_path)
    deliver(node, what, OPEN)
    if what in ADDS:
        assert node.goes_on() != other.goes_on()
        return
    once = node.seen()
    assert once != other.seen()
    deliver(node, what, OPEN)
    assert node.seen() == once


def test_record_opens_its_epoch_once_and_no_closed_epoch(tmp_path):
    node = Node(tmp_path).open()
    before = node.seen()
    assert not node.state.adopt(node.record(OPEN))
    with pytest.raises(VaultError, match="epoch 1 is over"):
        node.state.adopt(node.record(LATE))
    assert node.seen() == before
    node.state.close(OPEN)
    with pytest.raises(VaultError, match="epoch 2 is over"):
        node.state.adopt(node.record(OPEN))


def converse(node: Node, *messages: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All that the member of role 0 says on one connection; returns what it is answered."""
    ours, theirs = socket.socketpair()
    told = {"has_slots": True}
    hello = {"layout": OWN.to_dict(), "seat": SEATS[0].to_list(), **told}
    dialogue = MemberConnection(node.state, node.members, LocalLink(ours), hello)
    for message in messages:
        framing.send(theirs, message)
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionClosed):
        dialogue.run(threading.Event())
    dialogue.link.close()
    answers = []
    with contextlib.suppress(ConnectionClosed):
        while True:
            answers.append(framing.receive(theirs))
    theirs.close()
    return [one for one in answers if one["t"] != "registered"]


@pytest.mark.parametrize("what", ["acknowledge", "count_shipped", "ended"])
def test_no_message_of_an_epoch_counts_in_the_next(tmp_path, what):
    node, other = two(tmp_path)
    if what == "ended":
        converse(node, {"t": "ended", "epoch": LATE})
        assert node.state.ledger.ended
    else:
        CHANGES[what](node, LATE)
    assert node.open().seen() == other.open().seen()
    assert node.goes_on() == other.goes_on()


def of_member(what: str) -> Callable[[Node, int], list[dict[str, Any]]]:
    about = {"generation": RESTORED.to_list(), "boundary": "step"}
    return lambda node, epoch: converse(node, {"t": what, "epoch": epoch, **about})


def of_peer(
    what: str, generation: Generation = NEXT
) -> Callable[[Node, int], list[dict[str, Any]]]:
    """Node 1 puts a copy of role 7, or fetches a part of role 0."""

    def send(node: Node, epoch: int) -> list[dict[str, Any]]:
        server = Server(node.state, node.transport)
        server.start()
        channel = node.network.transport("fake", 1, 5.0).connect(0, "fake", 0)
        if what == "fetch":
            source = Source(0, 0)
            try:
                return [{"t": "part", "is": ask_part(channel, epoch, source, RESTORED, "shard")}]
            except ConnectionError:
                return [{"t": "refused", "why": Refusal.EARLY}]
            except Refused as refused:
                return [{"t": "refused", "why": refused.reason}]
            finally:
                channel.close()
                server.stop()
        channel.send({"t": "offer", "layout": PEER.to_dict()})
        about = {"node": 1, "role": 7, "layout_hash": PEER.layout_hash}
        parts = [["shard", 0, checksum(memoryview(b""))]]
        offer = {**about, "generation": generation.to_list(), "parts": parts}
        channel.send({"t": "put", "epoch": epoch, **offer})
        answers = [channel.receive()]
        if answers[0]["t"] == "need":
            answers.append(channel.receive())
        channel.close()
        server.stop()
        return answers

    return send


# Every message that a vault is sent with an epoch in it.
MESSAGES: Mapping[str, Callable[[Node, int], list[dict[str, Any]]]] = {
    "ended": of_member("ended"),
    "fetch": of_peer("fetch"),
    "put": of_peer("put"),
    "restore": of_member("restore"),
    "waiting": of_member("waiting"),
}
# What is answered to one that is too early, or too late; None: nothing.
ANSWERS = {"fetch": ("early", "stale"), "put": ("early", "stale"), "restore": (None, "failed")}


@pytest.mark.parametrize("what", MESSAGES)
@pytest.mark.parametrize("epoch", [EARLY, LATE])
def test_a_message_of_another_epoch_changes_nothing(tmp_path, what, epoch):
    node, other = opened(tmp_path)
    answers = MESSAGES[what](node, epoch)
    wanted = ANSWERS.get(what, (None, None))[epoch == LATE]
    assert [one.get("why", one["t"]) for one in answers] == ([wanted] if wanted else [])
    assert node.seen() == other.seen()
    assert node.goes_on() == other.goes_on()


@pytest.mark.parametrize("what", ["ended", "put", "waiting"])
def test_a_message_that_comes_twice_counts_once(tmp_path, what):
    node, other = opened(tmp_path)
    MESSAGES[what](node, OPEN)
    once = node.seen()
    assert once != other.seen()
    MESSAGES[what](node, OPEN)
    assert node.seen() == once


@pytest.mark.parametrize(
    ("offered", "why"), [(RESTORED, "superseded"), (Generation(OPEN, 7), "early")]
)
def test_a_copy_without_a_free_slot_counts_as_taken_only_if_newer_ones_are_there(
    tmp_path, offered, why
):
    node = Node(tmp_path).open()
    node.state.release(node.copy, node.slot)
    for generation in (NEW, NEXT):
        slot = node.state.claim(node.copy, generation, OPEN)
        node.state.seal_copy(node.copy, slot, "shard", 0, 0, OPEN)
        node.state.release(node.copy, slot)
    (place,) = node.state.table.find(7, NEW, "shard")
    node.state.table.pin(place)  # it is being read, so it gives way to none
    (answer,) = of_peer("put", offered)(node, OPEN)
    assert answer["why"] == why


def test_close_ends_all_waits_in_a_vault_at_once(tmp_path):
    """Nothing but the close ends this wait before a minute is over."""
    state, stands = Node(tmp_path).open().state, threading.Event()

    def wait() -> None:
        with state.gate.lock:  # taken again by the wait, which alone lets go of it
            stands.set()
            state.gate.pause(OPEN, MAX_WAIT_SECONDS)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    assert stands.wait(MAX_WAIT_SECONDS)
    state.close(OPEN)
    waiting.join(MAX_WAIT_SECONDS / 6)
    assert not waiting.is_alive()
