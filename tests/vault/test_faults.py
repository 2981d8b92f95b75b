"""Real kills, stops, damaged bytes, strangers: nothing is lost and nothing wrong is accepted."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import xxhash

from deadpool_megatron.events import Kind
from deadpool_megatron.layout.records import Generation, Inventory, Restore, RoleLayout, Seat
from deadpool_megatron.vault.errors import Frozen, Interrupted, RestoreUnavailable, VaultError
from deadpool_megatron.vault.segment import Segment, copy_name, own_name
from deadpool_megatron.vault.transport import realm_of
from deadpool_megatron.wire import auth, framing
from tests.vault.harness import (
    RUN_ID,
    Cluster,
    Member,
    Node,
    cluster,
    content,
    make_layout,
    sources_from,
    wait_until,
)

BIG = 12 << 20
LAYOUTS = {role: make_layout(role) for role in range(2)}
FIRST = Generation(1, 0)


def begin(running: Cluster, layouts: dict[int, RoleLayout] | None = None) -> list[Member]:
    """Open epoch 1 and commit generation 0 of every role."""
    chosen = layouts or LAYOUTS
    running.open(running.record(1))
    members = [Member(running.nodes[role], chosen[role]) for role in sorted(chosen)]
    for member in members:
        member.client.register(member.layout, 1)
        member.write(FIRST)
    for member in members:
        assert member.wait(FIRST) == "committed"
    return members


def swap(
    running: Cluster, inventories: dict[int, Inventory], kept: Generation, first: int | None = None
) -> Any:
    """The record of epoch 2 in which spare node 2 takes role 1."""
    found = sources_from(inventories, kept, LAYOUTS, first=first)
    restore = Restore("memory", kept, sources=found)
    return running.record(2, restore, {0: Seat(0, 0, 0), 1: Seat(2, 0, 0)}, gone={1})


def flip(node: Node, name: str, generation: Generation, part: str) -> None:
    """Damage one byte of a slot behind everybody's back."""
    segment = Segment.open(node.directory / name)
    for slot in range(segment.layout.slots):
        if segment.generation(slot) == generation:
            segment.data(slot, part)[5] ^= 0x10


# Kills and stops of vaults.


def test_buddy_killed_while_it_receives(tmp_path: Path) -> None:
    """The owner ships again to the restarted buddy; the member only sees a longer wait."""
    layouts = {role: make_layout(role, BIG) for role in range(2)}
    fault = {
        "id": "cut",
        "point": "vault.received",
        "match": {"role": 0, "node": 1},
        "nth": 3,
    }
    with cluster(tmp_path, 2, faults=[fault], chunk_bytes=1 << 20) as running:
        running.open(running.record(1))
        member = Member(running.nodes[0], layouts[0])
        member.client.register(layouts[0], 1)
        member.write(FIRST)
        process = running.nodes[1].process
        assert process is not None
        # Its third part arrives, and it dies before it can acknowledge any.
        assert process.wait(20) == -signal.SIGKILL
        running.nodes[1].start()
        assert running.nodes[1].seen(Kind.VAULT_STARTED)[-1].data["slots_found"] >= 1
        running.nodes[1].adopt(running.record(1))
        assert member.wait(FIRST) == "committed"


def test_buddy_killed_while_it_hands_on(tmp_path: Path) -> None:
    """The one behind it gets its copy from the owner, without waiting for the killed one."""
    layout = make_layout(0, BIG)
    fault = {"id": "cut", "point": "vault.relay", "match": {"role": 0}, "nth": 3}
    with cluster(tmp_path, 3, roles=1, faults=[fault], chunk_bytes=1 << 20) as running:
        record = running.record(1, replicas=2)
        running.open(record)
        member = Member(running.nodes[0], layout)
        member.client.register(layout, 1)
        member.write(FIRST)
        died = wait_until(
            lambda: [n for n in running.nodes[1:] if n.process and n.process.poll() is not None],
            "the head is killed",
        )
        (other,) = {1, 2} - {died[0].number}
        held = {"shard", "tail", "extras@step"}
        wait_until(
            lambda: any(set(h["parts"]) == held for h in running.nodes[other].status()["holdings"]),
            "the other one has its copy",
        )
        died[0].start()
        died[0].adopt(record)
        assert member.wait(FIRST) == "committed"


def test_owner_vault_killed_while_it_ships(tmp_path: Path) -> None:
    """A new vault finds the sealed slot by its header and ships it, without the member."""
    layouts = {role: make_layout(role, BIG) for role in range(2)}
    fault = {"id": "cut", "point": "vault.chunk", "match": {"role": 0}, "nth": 9}
    with cluster(tmp_path, 2, faults=[fault], chunk_bytes=1 << 20) as running:
        record = running.record(1)
        running.open(record)
        member = Member(running.nodes[0], layouts[0])
        member.client.register(layouts[0], 1)
        member.write(FIRST)
        process = running.nodes[0].process
        assert process is not None
        assert process.wait(20) == -signal.SIGKILL
        running.nodes[0].start()
        running.nodes[0].adopt(record)
        assert member.wait(FIRST) == "committed"
        member.write(Generation(1, 1))
        assert member.wait(Generation(1, 1)) == "committed"


def test_owner_vault_killed_before_it_seals(tmp_path: Path) -> None:
    """FILLED by the member, unsealed: the next vault seals it when the epoch is opened again."""
    fault = {"id": "cut", "point": "vault.seal", "match": {"role": 0, "iteration": 1}}
    with cluster(tmp_path, 2, faults=[fault]) as running:
        members = begin(running)
        members[0].write(Generation(1, 1))
        process = running.nodes[0].process
        assert process is not None
        assert process.wait(20) == -signal.SIGKILL
        running.nodes[0].start()
        running.nodes[0].adopt(running.record(1))
        # No member has connected to the new vault yet.
        wait_until(
            lambda: any(
                h["role"] == 0 and h["generation"] == [1, 1]
                for h in running.nodes[0].status()["holdings"]
            ),
            "the slot is sealed",
        )
        assert members[0].wait(Generation(1, 1)) == "committed"


def test_vault_killed_and_restarted_with_the_epoch_closed(tmp_path: Path) -> None:
    with cluster(tmp_path, 2) as running:
        begin(running)
        before = running.close(1)[0]
        running.nodes[0].kill()
        running.nodes[0].start()
        with pytest.raises(VaultError, match="only stable after"):
            running.nodes[0].inventory()
        running.nodes[0].close_epoch(1)
        assert running.nodes[0].inventory() == before


@pytest.mark.parametrize("seconds", [1.0, pytest.param(5.0, marks=pytest.mark.slow)])
def test_stopped_buddy_only_delays(tmp_path: Path, seconds: float) -> None:
    """A buddy's vault stopped in the middle of a put goes on where it was."""
    layouts = {role: make_layout(role, BIG) for role in range(2)}
    with cluster(tmp_path, 2) as running:
        members = begin(running, layouts)
        running.nodes[1].send_signal(signal.SIGSTOP)
        members[0].write(Generation(1, 1))
        assert members[0].wait(Generation(1, 1), seconds=seconds) == "shut"
        running.nodes[1].send_signal(signal.SIGCONT)
        assert members[0].wait(Generation(1, 1)) == "committed"


def test_own_vault_stopped_does_not_stop_the_member(tmp_path: Path) -> None:
    with cluster(tmp_path, 2) as running:
        members = begin(running)
        running.nodes[0].send_signal(signal.SIGSTOP)
        started = time.monotonic()
        members[0].write(Generation(1, 1))
        members[0].append(Generation(1, 1), "evaluation")
        assert time.monotonic() - started < 0.5
        running.nodes[0].send_signal(signal.SIGCONT)
        assert members[0].wait(Generation(1, 1), "evaluation") == "committed"


# Damaged bytes.


def test_damage_on_the_wire_is_sent_again(tmp_path: Path) -> None:
    fault = {
        "id": "flip",
        "point": "vault.chunk",
        "match": {"role": 0, "iteration": 1},
        "action": "mark",
    }
    with cluster(tmp_path, 2, faults=[fault]) as running:
        members = begin(running)
        members[0].write(Generation(1, 1))
        assert members[0].wait(Generation(1, 1)) == "committed"
        events = wait_until(lambda: running.nodes[1].seen(Kind.CORRUPTION), "an event")
        assert [event.data["where"] for event in events] == ["wire"]
        inventory = running.close(1)[1]
        held = {(h.role, h.generation): h.parts for h in inventory.holdings}
        assert held[0, Generation(1, 1)] == {"shard", "tail", "extras@step"}


def test_damage_in_the_own_slot_before_it_is_shipped_is_told(tmp_path: Path) -> None:
    """It can never be committed: the member must hear of it, or the gate stays shut for ever."""
    fault = {
        "id": "flip",
        "point": "vault.seal",
        "match": {"role": 0, "iteration": 1},
        "signal": "STOP",
        "resume_after_seconds": 0.3,
    }
    damage = {
        "id": "damage",
        "point": "vault.sealed",
        "match": {"role": 0, "iteration": 2},
        "action": "mark",
    }
    with cluster(tmp_path, 2, faults=[fault, damage]) as running:
        members = begin(running)
        for member in members:  # a vault stopped and continued in the middle of sealing
            member.write(Generation(1, 1))
        for member in members:
            assert member.wait(Generation(1, 1)) == "committed"
        # Without its buddy the shipper cannot be faster than the damage.
        running.nodes[1].send_signal(signal.SIGSTOP)
        members[0].write(Generation(1, 2))
        wait_until(lambda: (tmp_path / "faults.json.fired" / "damage").exists(), "the damage")
        running.nodes[1].send_signal(signal.SIGCONT)
        with pytest.raises(VaultError, match="damaged"):
            members[0].wait(Generation(1, 2))
        held = {(h.role, h.generation): h.parts for h in running.close(1)[0].holdings}
        assert "shard" not in held[0, Generation(1, 2)]
        assert held[0, Generation(1, 1)] == {"shard", "tail", "extras@step"}


def test_no_damaged_byte_is_restored(tmp_path: Path) -> None:
    """Rule 4: the only source is damaged, the member is told what was tried."""
    with cluster(tmp_path, 3, roles=2) as running:
        begin(running)
        running.nodes[1].die()
        inventories = running.close(1, gone={1})
        flip(running.nodes[0], copy_name(1), FIRST, "tail")
        record = swap(running, inventories, FIRST)
        running.open(record)
        fresh = Member(running.nodes[2], LAYOUTS[1])
        fresh.client.register(LAYOUTS[1], 2)
        with pytest.raises(RestoreUnavailable) as caught:
            fresh.restore(record)
        assert caught.value.part == "tail"
        assert caught.value.tried == ((0, 1, "checksum does not match"),)
        # It was found at home as well, and is not promised again.
        wait_until(lambda: running.nodes[0].seen(Kind.CORRUPTION), "the event of the source")
        inventory = running.close(2, gone={1})[0]
        assert all("tail" not in h.parts for h in inventory.holdings if h.role == 1)


def test_a_copy_damaged_after_it_was_received(tmp_path: Path) -> None:
    """The buddy's memory goes bad after its acknowledgement; the owner's node is alive as well."""
    fault = {
        "id": "damage",
        "point": "vault.received",
        "match": {"role": 1, "node": 0},
        "action": "mark",
    }
    with cluster(tmp_path, 3, roles=2, faults=[fault]) as running:
        begin(running)
        inventories = running.close(1)
        # Node 1 is drained, not dead: it is the second source for its role.
        found = sources_from(inventories, FIRST, LAYOUTS, first=0)
        seats = {0: Seat(0, 0, 0), 1: Seat(2, 0, 0)}
        record = running.record(2, Restore("memory", FIRST, sources=found), seats)
        running.open(record)
        fresh = Member(running.nodes[2], LAYOUTS[1])
        fresh.client.register(LAYOUTS[1], 2)
        fresh.check(record)
        wait_until(lambda: running.nodes[0].seen(Kind.CORRUPTION), "found at its home")
        assert fresh.wait(FIRST) == "committed"  # the damaged copy has been replaced
        copy = Segment.open(running.nodes[0].directory / copy_name(1))
        entry = copy.entry(0, "shard")
        assert bytes(copy.data(0, "shard", entry.nbytes)) == content(1, FIRST, "shard", 64 << 10)


def test_damaged_source_falls_to_the_next(tmp_path: Path) -> None:
    """Two copies: the first source of the record is damaged, the survivor's own slot too."""
    layouts = {role: make_layout(role) for role in range(3)}
    with cluster(tmp_path, 4, roles=3) as running:
        running.open(running.record(1, replicas=2))
        members = [Member(running.nodes[role], layouts[role]) for role in range(3)]
        for member in members:
            member.client.register(member.layout, 1)
            member.write(FIRST)
        for member in members:
            assert member.wait(FIRST) == "committed"
        running.nodes[1].die()
        inventories = running.close(1, gone={1})
        flip(running.nodes[0], copy_name(1), FIRST, "shard")
        flip(running.nodes[0], own_name(0, Seat(0, 0, 0)), FIRST, "shard")
        found = sources_from(inventories, FIRST, layouts)
        assert [source.node for source in found[1]["shard"]] == [0, 2]
        seats = {0: Seat(0, 0, 0), 1: Seat(3, 0, 0), 2: Seat(2, 0, 0)}
        restore = Restore("memory", FIRST, sources=found)
        record = running.record(2, restore, seats, gone={1}, replicas=2)
        running.open(record)
        members[1] = Member(running.nodes[3], layouts[1])
        members[1].client.register(layouts[1], 2)
        for member in members:
            member.check(record)
        for member in members:
            assert member.wait(FIRST) == "committed"
        for member in members:
            member.write(Generation(2, 1))
        for member in members:
            assert member.wait(Generation(2, 1)) == "committed"


def test_unreachable_source_falls_to_the_next(tmp_path: Path) -> None:
    """The first source's vault has died since it gave its inventory."""
    with cluster(tmp_path, 3, roles=2, restore_seconds=5.0) as running:
        begin(running)
        inventories = running.close(1)
        record = swap(running, inventories, FIRST, first=1)
        running.nodes[1].kill()
        address = record.nodes[0]
        running.nodes[1].tcp.close()
        record.nodes[1] = type(address)("127.0.0.1", running.nodes[1].port, "rack1")
        running.nodes[0].adopt(record)
        running.nodes[2].adopt(record)
        fresh = Member(running.nodes[2], LAYOUTS[1])
        fresh.client.register(LAYOUTS[1], 2)
        fresh.check(record)


# The epoch gate on the network.


class Peer:
    """A vault of the run, as far as the handshake goes, that says what a test wants."""

    def __init__(self, running: Cluster, node: int) -> None:
        secret = auth.load_secret(running.directory)
        address = ("127.0.0.1", running.nodes[node].port)
        self.socket = auth.connect(address, secret, realm_of(RUN_ID), 10.0)

    def put(
        self,
        epoch: int,
        payload: bytes,
        *,
        role: int = 0,
        sender: int = 0,
        generation: Generation | None = None,
        layout: RoleLayout | None = None,
        layout_hash: str | None = None,
        nbytes: int | None = None,
        checksum: int | None = None,
    ) -> dict[str, Any]:
        chosen = layout or LAYOUTS[0]
        framing.send(self.socket, {"t": "offer", "layout": chosen.to_dict()})
        digest = xxhash.xxh3_64_intdigest(payload) if checksum is None else checksum
        size = len(payload) if nbytes is None else nbytes
        framing.send(
            self.socket,
            {
                "t": "put",
                "epoch": epoch,
                "node": sender,
                "role": role,
                "generation": (generation or Generation(epoch, 7)).to_list(),
                "layout_hash": layout_hash or chosen.layout_hash,
                "parts": [["shard", size, digest]],
            },
        )
        return framing.receive(self.socket)


def test_puts_that_are_not_accepted(tmp_path: Path) -> None:
    """Rule 5 and 9: each refused with its reason, counted, and nothing of it is kept."""
    with cluster(tmp_path, 2) as running:
        begin(running)
        node = running.nodes[1]
        before = node.status()["holdings"]

        def refused(**options: Any) -> str:
            answer = Peer(running, 1).put(options.pop("epoch", 1), b"x" * 100, **options)
            assert answer["t"] == "refused"
            return str(answer["why"])

        assert refused(epoch=2) == "early"
        assert refused(epoch=0) == "stale"
        assert refused(role=1) == "sender has no such role"
        assert refused(sender=1) == "sender has no such role"
        assert refused(layout_hash="other") == "layout"
        assert refused(nbytes=10**9) == "unknown or oversized part"
        assert refused(nbytes=-1) == "unknown or oversized part"
        assert refused(generation=Generation(0, 9)) == "abandoned lineage"
        other = make_layout(0, 999)
        assert "is not the hash" in refused(layout=other)
        assert node.status()["holdings"] == before
        assert node.count("refused: stale") == 1
        assert node.count("refused: sender") == 2
        assert node.count("refused") == 8  # early is no offence
        assert node.seen(Kind.REFUSED, why="stale")


def test_an_epoch_closed_before_the_last_byte(tmp_path: Path) -> None:
    """Judged again after the last byte: what arrives then is not sealed."""
    with cluster(tmp_path, 2) as running:
        begin(running)
        peer = Peer(running, 1)
        payload = os.urandom(50_000)
        assert peer.put(1, payload, generation=Generation(1, 1))["parts"] == ["shard"]
        peer.socket.sendall(payload[:-1])
        time.sleep(0.05)  # lets it receive; the outcome may not depend on it
        inventory = running.close(1)[1]
        try:
            peer.socket.sendall(payload[-1:])
            answer = framing.receive(peer.socket)
        except (OSError, framing.WireError):
            answer = {"t": "cut"}
        assert answer["t"] in ("cut", "refused")
        assert running.nodes[1].inventory() == inventory
        assert all(h.generation == FIRST for h in inventory.holdings)
        assert Peer(running, 1).put(1, payload)["why"] == "stale"


def test_a_put_with_a_wrong_checksum_is_not_kept(tmp_path: Path) -> None:
    with cluster(tmp_path, 2) as running:
        begin(running)
        peer = Peer(running, 1)
        assert peer.put(1, b"y" * 1000, generation=Generation(1, 1), checksum=1)["t"] == "need"
        peer.socket.sendall(b"y" * 1000)
        assert framing.receive(peer.socket) == {"t": "sealed", "parts": []}
        assert all(h.generation == FIRST for h in running.close(1)[1].holdings)


def is_cut(connection: socket.socket) -> bool:
    """True when the other side ends the connection instead of answering."""
    connection.settimeout(10)
    try:
        return connection.recv(100) == b""
    except ConnectionResetError:  # it had not read everything
        return True


def test_strangers_garbage_and_oversized_frames(tmp_path: Path) -> None:
    with cluster(tmp_path, 2) as running:
        members = begin(running)
        node = running.nodes[1]
        address = ("127.0.0.1", node.port)

        def talk(payload: bytes) -> None:
            with socket.create_connection(address, 5) as connection:
                connection.sendall(payload)
                assert is_cut(connection)

        talk(b"GET / HTTP/1.1\r\n\r\n")
        talk(framing.MAGIC + (100 << 20).to_bytes(4, "big") + b"{}")
        talk(framing.encode({"t": "hello", "run": "another", "nonce": "1"}))
        with pytest.raises(framing.WireError):
            auth.connect(address, b"wrong" * 8, realm_of(RUN_ID), 5)
        with socket.create_connection(address, 5) as liar:
            framing.send(liar, {"t": "hello", "run": realm_of(RUN_ID), "nonce": "0" * 32})
            framing.receive(liar)
            framing.send(liar, {"t": "answer", "proof": "0" * 64})
            assert is_cut(liar)
        wait_until(lambda: node.count("refused: connection") >= 4, "they are counted")
        for message in ({"t": "put"}, {"t": "fetch", "epoch": "x"}, {"t": "mystery"}, {}):
            peer = Peer(running, 1)
            framing.send(peer.socket, message)
            assert is_cut(peer.socket)
        peer = Peer(running, 1)
        peer.socket.sendall(b"junk after the handshake")
        assert is_cut(peer.socket)
        wait_until(lambda: node.count("refused: malformed") == 2, "they are counted")
        # A stranger that says nothing costs a thread for some seconds, nobody else anything.
        silent = [socket.create_connection(address, 5) for _ in range(20)]
        for member in members:
            member.write(Generation(1, 1))
        for member in members:
            assert member.wait(Generation(1, 1)) == "committed"
        for connection in silent:
            connection.close()


def test_fetches_that_are_not_accepted(tmp_path: Path) -> None:
    with cluster(tmp_path, 2) as running:
        begin(running)
        fetch = {"t": "fetch", "node": 0, "role": 0, "part": "shard"}

        def ask(epoch: int, generation: Generation) -> dict[str, Any]:
            peer = Peer(running, 1)
            framing.send(peer.socket, {**fetch, "epoch": epoch, "generation": generation.to_list()})
            return framing.receive(peer.socket)

        assert ask(2, FIRST)["why"] == "early"
        assert ask(1, Generation(1, 9))["why"] == "not held"
        assert ask(1, FIRST)["t"] == "part"
        running.close(1)
        assert ask(1, FIRST)["why"] == "stale"


# Closing while everybody writes.


def train(member: Member, last: Generation, everybody: threading.Barrier) -> None:
    """Iterate until the epoch is closed; the collective that spans all roles is a barrier here."""
    generation = last
    while True:
        generation = Generation(generation.lineage, generation.iteration + 1)
        try:
            member.write(generation)
            if member.wait(generation) == "interrupted":
                everybody.abort()
                return
            everybody.wait(10)
        except (Frozen, threading.BrokenBarrierError):
            everybody.abort()
            return


def newest_common(inventories: dict[int, Inventory], roles: int) -> Generation:
    """The planner's choice, from frozen inventories only."""
    whole = {
        (h.role, h.generation)
        for inventory in inventories.values()
        for h in inventory.holdings
        if h.parts >= {"shard", "tail", "extras@step"}
    }
    return max(g for _, g in whole if all((role, g) in whole for role in range(roles)))


def test_closing_races_with_a_busy_member(tmp_path: Path) -> None:
    """Whatever the members are in the middle of: the inventory is stable, and the newest common
    generation of it restores byte for byte. Ten times, at arbitrary moments."""
    layouts = {role: make_layout(role, 300_000) for role in range(2)}
    with cluster(tmp_path, 2) as running:
        members = begin(running, layouts)
        kept = FIRST
        for epoch in range(1, 11):
            everybody = threading.Barrier(len(members))
            threads = [
                threading.Thread(
                    target=train, args=(member, Generation(epoch, kept.iteration), everybody)
                )
                for member in members
            ]
            for thread in threads:
                thread.start()
            time.sleep(0.02 + 0.007 * epoch)  # an arbitrary moment, not a wait for anything
            inventories = running.close(epoch)
            for member in members:
                os.eventfd_write(member.interrupt, 1)
            for thread in threads:
                thread.join(10)
                assert not thread.is_alive()
            assert inventories == {node.number: node.inventory() for node in running.nodes}
            for member in members:
                os.eventfd_read(member.interrupt)
            kept = newest_common(inventories, len(members))
            found = sources_from(inventories, kept, layouts)
            record = running.record(epoch + 1, Restore("memory", kept, sources=found))
            running.open(record)
            for member in members:
                member.check(record)
            for member in members:
                assert member.wait(kept) == "committed"
        assert kept.iteration > 0


def test_a_restore_is_interrupted_by_the_next_failure(tmp_path: Path) -> None:
    """The only source does not answer; the member hears the interrupt, the vault moves on."""
    with cluster(tmp_path, 3, roles=2) as running:
        begin(running)
        running.nodes[1].die()
        inventories = running.close(1, gone={1})
        record = swap(running, inventories, FIRST)
        running.nodes[0].send_signal(signal.SIGSTOP)
        running.nodes[2].adopt(record)
        fresh = Member(running.nodes[2], LAYOUTS[1])
        fresh.client.register(LAYOUTS[1], 2)
        timer = threading.Timer(0.3, os.eventfd_write, (fresh.interrupt, 1))
        timer.start()
        with pytest.raises(Interrupted):
            fresh.restore(record)
        os.eventfd_read(fresh.interrupt)
        started = time.monotonic()
        running.nodes[2].close_epoch(2)
        assert time.monotonic() - started < 2
        running.nodes[0].send_signal(signal.SIGCONT)
        running.nodes[0].close_epoch(2)
        inventories = {0: running.nodes[0].inventory(), 2: running.nodes[2].inventory()}
        found = sources_from(inventories, FIRST, LAYOUTS)
        seats = {0: Seat(0, 0, 0), 1: Seat(2, 0, 0)}
        record = running.record(3, Restore("memory", FIRST, sources=found), seats, gone={1})
        running.open(record)
        fresh.check(record)


# Memory.


def test_full_memory_of_a_buddy_holds_the_gate_and_says_why(
    tmp_path: Path, tight_memory: Path
) -> None:
    layouts = {0: make_layout(0, 1 << 20), 1: make_layout(1, 64 << 10)}
    roomy = Path("/dev/shm") / f"deadpool-test-{os.getpid()}-{tmp_path.name}" / "node0"
    with cluster(
        tmp_path, 2, segment_dir=lambda n: tight_memory / "node1" if n == 1 else roomy
    ) as running:
        (tight_memory / "ballast").write_bytes(bytes(2 << 20))
        running.open(running.record(1))
        member = Member(running.nodes[0], layouts[0])
        member.client.register(layouts[0], 1)
        with pytest.raises(VaultError, match="bytes needed"):
            Member(running.nodes[1], layouts[0]).client.register(make_layout(1, 1 << 20), 1)
        member.write(FIRST)
        assert member.wait(FIRST, seconds=0.5) == "shut"
        refusals = wait_until(lambda: running.nodes[0].seen(Kind.REFUSED), "the reason is told")
        assert "bytes needed" in str(refusals[0].data["why"])
        (tight_memory / "ballast").unlink()
        assert member.wait(FIRST) == "committed"
        running.nodes[1].shutdown(remove=True)
        assert list(tight_memory.iterdir()) == []


def test_content_is_what_the_member_wrote(tmp_path: Path) -> None:
    """The buddy's file, read with nothing but the format: no byte is transformed on the way."""
    with cluster(tmp_path, 2) as running:
        begin(running)
        running.close(1)
        copy = Segment.open(running.nodes[1].directory / copy_name(0))
        entry = copy.entry(0, "shard")
        assert bytes(copy.data(0, "shard", entry.nbytes)) == content(0, FIRST, "shard", 64 << 10)
