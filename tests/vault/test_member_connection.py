"""What a vault keeps for its members."""

import contextlib
import errno
import os
import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from deadpool_megatron.layout.records import Generation, Restore, RoleLayout, Seat
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault import errors, member_connection, vault_client
from deadpool_megatron.vault.member_connection import LocalLink, MemberConnection, MemberConnections
from deadpool_megatron.vault.shm.segment import Segment, checksum, copy_name
from deadpool_megatron.wire import framing
from deadpool_megatron.wire.framing import ConnectionClosed
from tests.vault.harness import commit, enter, make_layout, record_of
from tests.vault.slots import SlotStore, scheme_of

LAYOUT = make_layout(3, nbytes=100)


def greeted(
    state: SlotStore, members: MemberConnections, seat: Seat, *, has_slots: bool = False
) -> tuple[MemberConnection, socket.socket]:
    """A member has said who it is; also its end of the connection."""
    ours, theirs = socket.socketpair()
    told = {"has_slots": has_slots}
    hello = {"layout": LAYOUT.to_dict(), "seat": seat.to_list(), **told}
    return MemberConnection(state, members, LocalLink(ours), hello), theirs


def test_nothing_stays_pinned_for_a_member_that_died_while_its_state_was_fetched(tmp_path):
    """A slot that is pinned for ever is missing when the node is to be the role's buddy."""
    state = SlotStore(scheme_of, 0, tmp_path, Settings(), lambda _: None)
    segment = Segment.create(tmp_path / copy_name(3), LAYOUT, None, ["shard"])
    state.table.segments[segment.path.name] = segment
    slot = state.table.claim(segment, Generation(1, 4), 1)
    segment.seal_part(slot, "shard", 10, checksum(segment.data(slot, "shard", 10)), 1)
    state.table.release(segment, slot)
    places = {"shard": state.table.find(3, Generation(1, 4), "shard")[0]}
    dialogue, theirs = greeted(state, MemberConnections(state), Seat(0, 0, 0), has_slots=True)
    answer = dialogue._answer
    answer(1, places)
    assert state.table.pins[places["shard"].key] == 1, "its member has not released it yet"
    theirs.close()
    with pytest.raises((ConnectionClosed, OSError)):
        dialogue.run(threading.Event())
    assert not any(state.table.pins.values())
    answer(1, places)
    assert not any(state.table.pins.values())
    dialogue.link.close()


def test_nothing_is_restored_for_a_process_that_has_lost_its_seat(tmp_path):
    """It would come into the slots of its successor, which has not asked and may be writing."""
    state = SlotStore(scheme_of, 0, tmp_path, Settings(), lambda _: None)
    restored = Generation(1, 4)
    restore = Restore("memory", restored)
    state.adopt(record_of(2, count=1, seats={3: Seat(0, 0, 1)}, restore=restore))
    members, asked = MemberConnections(state), list[RoleLayout]()
    worker: Any = SimpleNamespace(epoch=2, restore_for=lambda layout, answer: asked.append(layout))
    members.set_workers({3: worker})
    wish = {"t": "restore", "epoch": 2, "generation": restored.to_list(), "boundary": "step"}
    for incarnation in range(2):
        dialogue, theirs = greeted(state, members, Seat(0, 0, incarnation), has_slots=True)
        dialogue._handle(wish)
        if incarnation == 0:
            assert framing.receive(theirs)["t"] == "failed"
            assert not asked
        dialogue.link.close()
        theirs.close()
    assert asked == [LAYOUT]


def leaves_the_gate_at_once(client: vault_client.VaultClient, why: str) -> None:
    interrupted = os.eventfd(0, os.EFD_CLOEXEC)
    with pytest.raises(errors.VaultError, match=why):
        client.wait_committed(
            Generation(1, 4),
            "step",
            interrupted=interrupted,
            on_wait=lambda _: pytest.fail("it waits"),
            report_every_seconds=0.2,
        )
    os.close(interrupted)


def test_member_reads_the_last_messages_of_a_vault_that_has_ended(tmp_path):
    """Damage in the member's own slot is said once; the next vault has nothing to seal there."""
    client = vault_client.VaultClient(
        str(tmp_path / "none"), tmp_path, Seat(0, 0, 0), connect_seconds=1.0
    )
    client._link, vault = socket.socketpair()
    enter(client, 1)
    framing.send(vault, {"t": "bad", "epoch": 1, "generation": [1, 4], "part": "shard"})
    vault.close()
    leaves_the_gate_at_once(client, "part shard")


def test_commit_is_not_taken_back_by_a_restarted_vault(tmp_path):
    """With a lag the gate does not ask again, and the slot to overwrite is chosen by this."""
    client = vault_client.VaultClient("", tmp_path, Seat(0, 0, 0), connect_seconds=1.0)

    def committed(epoch: int, iteration: int) -> Generation:
        generation = Generation(epoch, iteration)
        commit(client, generation)
        assert client.newest_committed is not None
        return client.newest_committed[0]

    assert committed(1, 7) == Generation(1, 7)
    assert committed(1, 6) == Generation(1, 7)
    assert committed(1, 8) == Generation(1, 8)
    assert committed(2, 5) == Generation(2, 5), "of another line"


def test_damage_found_without_its_member_is_sent_when_it_registers(tmp_path):
    """A vault that was restarted finds it before the member connects again. Nothing else would ever
    end its wait for a commit of that part."""
    state = SlotStore(scheme_of, 0, tmp_path, Settings(), lambda _: None)
    members = MemberConnections(state)
    state.on_bad(1, 3, Generation(1, 4), "shard")
    dialogue, theirs = greeted(state, members, Seat(0, 0, 0))
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionClosed):
        dialogue.run(threading.Event())
    dialogue.link.close()
    said = []
    with contextlib.suppress(ConnectionClosed):
        while True:
            said.append(framing.receive(theirs))
    theirs.close()
    bad = {"t": "bad", "epoch": 1, "generation": [1, 4], "part": "shard"}
    assert [one for one in said if one["t"] == "bad"] == [bad]


def test_a_moment_without_descriptors_does_not_end_the_vault(tmp_path, monkeypatch):
    """A connection takes two of them."""
    lacking, served = list[str](), threading.Event()
    dup = socket.socket.dup

    def dup_or_not(connection: socket.socket) -> socket.socket:
        if not lacking:
            lacking.append("descriptors")
            raise OSError(errno.EMFILE, "Too many open files")
        return dup(connection)

    monkeypatch.setattr(socket.socket, "dup", dup_or_not)
    path, listener = tmp_path / "s", member_connection.listening_at(tmp_path / "s")
    server = member_connection.LocalServer(listener, lambda _link, _stopping: served.set())
    server.start()
    with listener, socket.socket(socket.AF_UNIX) as refused, socket.socket(socket.AF_UNIX) as taken:
        refused.settimeout(10.0)
        refused.connect(str(path))
        assert refused.recv(1) == b"", "told at once, to come again"
        assert lacking
        taken.connect(str(path))
        assert served.wait(10.0)
        server.stop()
