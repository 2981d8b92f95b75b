"""Real kills, stops, damaged bytes, full memory: nothing is lost and nothing wrong is restored."""

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from deadpool_megatron.events import Kind
from deadpool_megatron.layout.records import Generation, Seat
from deadpool_megatron.vault import errors, member_connection
from deadpool_megatron.vault.shm.segment import PartState, Segment, copy_name, own_name
from tests.vault.harness import Member, cluster, content, make_layout, memory, train, wait_until
from tests.vault.protected import FIRST, LAYOUTS, begin, flip, swap

BIG, PIECES = 12 << 20, {"chunk_bytes": 1 << 20}


# Names that somebody else removes.


@pytest.mark.slow
def test_removed_names_of_slots_and_socket_are_restored(tmp_path):
    """As by logind at the end of a login: the folder of a node that goes on with its work."""
    with cluster(tmp_path, 2) as running:
        members = begin(running)
        node, names = running.nodes[0], {path.name for path in running.nodes[0].directory.iterdir()}
        assert {"vault.sock", own_name(0, Seat(0, 0, 0)), copy_name(1)} <= names
        shutil.rmtree(node.directory)
        told = node.told(Kind.LOG, level="warning")
        assert "were removed, by RemoveIPC" in told[0].data["text"]
        assert "created again" in told[0].data["text"]
        newest = Generation(1, 1)
        train(members, newest)
        # One member has lived, another one comes in its place on the node that was cleaned.
        for epoch, seat in ((2, Seat(0, 0, 0)), (3, Seat(0, 0, 1))):
            restore = memory(running.close(epoch - 1), newest, LAYOUTS)
            record = running.record(epoch, restore, {0: seat, 1: Seat(1, 0, 0)})
            running.open(record)
            member = members[0] if epoch == 2 else Member(node, LAYOUTS[0], incarnation=1)
            member.client.register(LAYOUTS[0], epoch)
            member.check(record)
        assert len(node.seen(Kind.LOG, level="warning")) == 1
        node.kill()
        node.unix = member_connection.listening_at(Path(node.socket_path))  # as the agent does
        node.start()
        assert not any(path.is_symlink() for path in node.directory.iterdir())


# Kills and stops of vaults.


def test_buddy_killed_while_it_receives(tmp_path):
    """The owner ships again to the restarted buddy; the member only sees a longer wait."""
    at = {"point": "vault.received", "match": {"role": 0, "node": 1}}
    with cluster(tmp_path, 2, faults=[{"id": "cut", "nth": 3, **at}], **PIECES) as running:
        (member,) = running.join({0: make_layout(0, BIG)})
        member.write(FIRST)
        # Its third part arrives, and it dies before it can acknowledge any.
        running.nodes[1].await_killed()
        running.nodes[1].start()
        wait_until(
            lambda: len(running.nodes[1].seen(Kind.VAULT_STARTED)) == 2, "the second start is told"
        )
        assert running.nodes[1].seen(Kind.VAULT_STARTED)[-1].data["slots_found"] >= 1
        running.nodes[1].adopt(running.record(1))
        assert member.wait(FIRST) == "committed"


def test_owner_vault_killed_before_it_seals(tmp_path):
    """FILLED by the member, unsealed: the next vault seals it when the epoch is opened again."""
    fault = {"id": "cut", "point": "vault.seal", "match": {"role": 0, "iteration": 1}}
    with cluster(tmp_path, 2, faults=[fault]) as running:
        members = begin(running)
        members[0].write(Generation(1, 1))
        running.nodes[0].await_killed()
        running.nodes[0].restart(running.record(1))
        # No member has connected to the new vault yet.
        wait_until(
            lambda: any(
                h["role"] == 0 and h["generation"] == [1, 1]
                for h in running.nodes[0].status()["holdings"]
            ),
            "the slot is sealed",
        )
        assert members[0].wait(Generation(1, 1)) == "committed"


def test_own_vault_stopped_does_not_stop_the_member(tmp_path):
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


def test_damage_in_the_own_slot_before_shipping_is_reported(tmp_path):
    """It can never be committed: the member must hear of it, or the gate stays shut for ever."""
    fault = {
        "id": "flip",
        "point": "vault.seal",
        "match": {"role": 0, "iteration": 1},
        "signal": "STOP",
        "resume_after_seconds": 0.3,
    }
    at = {"point": "vault.sealed", "match": {"role": 0, "iteration": 2}}
    with cluster(tmp_path, 2, faults=[fault, {"id": "damage", "action": "mark", **at}]) as running:
        members = begin(running)
        train(members, Generation(1, 1))  # a vault stopped and continued in the middle of sealing
        members[0].write(Generation(1, 2))
        with pytest.raises(errors.VaultError, match="damaged"):
            members[0].wait(Generation(1, 2))
        held = {(h.role, h.generation): h.parts for h in running.close(1)[0].holdings}
        assert "shard" not in held[0, Generation(1, 2)]
        assert held[0, Generation(1, 1)] == {"shard", "tail", "extras@step"}


def test_damage_of_an_epoch_that_is_over_condemns_nothing_of_the_next(tmp_path):
    """The member computes, and reads what its vault has told it when it asks for its state."""
    at = {"point": "vault.sealed", "match": {"role": 0, "iteration": 2}}
    with cluster(tmp_path, 2, faults=[{"id": "damage", "action": "mark", **at}]) as running:
        members = begin(running, last=1)
        for member in members:
            member.write(Generation(1, 2))
        running.nodes[0].told(Kind.CORRUPTION)
        kept = Generation(1, 1)
        record = running.record(2, memory(running.close(1), kept, LAYOUTS))
        running.open(record)
        members[0].check(record)
        running.nodes[1].send_signal(signal.SIGSTOP)
        members[0].write(Generation(2, 2))
        assert members[0].wait(Generation(2, 2), seconds=0.3) == "shut"
        running.nodes[1].send_signal(signal.SIGCONT)
        assert members[0].wait(Generation(2, 2)) == "committed"


@pytest.mark.slow
def test_a_restored_part_that_rots_is_fetched_again(tmp_path):
    """After its check, before it is in a second place: the gate waits for it in this epoch."""
    with cluster(tmp_path, 3, roles=2) as running:
        begin(running)
        inventories = running.close(1)
        # Node 1 is drained, not dead. Node 0 lacks a part of its copy.
        copy = Segment.open(running.nodes[0].directory / copy_name(1))
        copy.invalidate_part(0, "shard", PartState.BAD)
        record = swap(running, inventories, FIRST, gone=(), first=1)
        for node in running.nodes[1:]:
            node.adopt(record)
        fresh = Member(running.nodes[2], LAYOUTS[1], 2)
        fresh.check(record)
        flip(running.nodes[2], own_name(1, fresh.seat), FIRST, "shard")
        running.nodes[0].adopt(record)  # nothing is sent there before
        assert fresh.wait(FIRST) == "committed"
        running.nodes[2].told(Kind.CORRUPTION)
        entry = copy.entry(0, "shard")
        assert bytes(copy.data(0, "shard", entry.nbytes)) == content(1, FIRST, "shard", 64 << 10)


# Memory.


def test_full_memory_of_a_buddy_holds_the_gate_with_a_reason(tmp_path, tight_memory):
    layouts = {0: make_layout(0, 1 << 20), 1: make_layout(1, 64 << 10)}
    roomy = Path("/dev/shm") / f"deadpool-test-{os.getpid()}-{tmp_path.name}" / "node0"
    with cluster(
        tmp_path, 2, segment_dir=lambda n: tight_memory / "node1" if n == 1 else roomy
    ) as running:
        (tight_memory / "ballast").write_bytes(bytes(2 << 20))
        (member,) = running.join({0: layouts[0]})
        with pytest.raises(errors.VaultError, match="bytes needed"):
            Member(running.nodes[1], layouts[0]).client.register(make_layout(1, 1 << 20), 1)
        member.write(FIRST)
        assert member.wait(FIRST, seconds=0.5) == "shut"
        refusals = running.nodes[0].told(Kind.REFUSED)
        assert "bytes needed" in str(refusals[0].data["why"])
        (tight_memory / "ballast").unlink()
        assert member.wait(FIRST) == "committed"
        running.nodes[1].shutdown(remove=True)
        assert list(tight_memory.iterdir()) == []
