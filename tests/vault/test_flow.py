"""The way of a generation through real vault processes: sealed, shipped, committed, restored."""

import os

import pytest

from deadpool_megatron.events import Kind
from deadpool_megatron.layout.records import Generation, Restore, Seat, Source
from deadpool_megatron.vault.errors import Frozen, RestoreUnavailable, VaultError
from tests.vault import harness
from tests.vault.harness import Member, cluster, content, make_layout, memory, train, wait_until
from tests.vault.protected import begin, swap

SHARD = {"shard", "tail", "extras@step"}


def test_swap_of_a_dead_node_restores_every_byte(tmp_path):
    """Three nodes, node 1 dies, spare node 2 takes role 1: the whole recovery."""
    layouts = {role: make_layout(role) for role in range(2)}
    with cluster(tmp_path, 3, roles=2) as running:
        members = begin(running, layouts, last=3)
        assert members[0].client.newest_committed == (Generation(1, 3), "step")
        fit = running.nodes[0].status()["fit"]["0"]
        assert fit["window_seconds"] > 0
        commits = wait_until(
            lambda: len(told := running.nodes[0].seen(Kind.COMMITTED)) == 4 and told,
            "the agent hears of all commits",
        )
        assert {k: commits[-1].data[k] for k in fit} == fit
        assert all(event.data["ship_seconds"] > 0 for event in commits)
        lower = os.getpriority(os.PRIO_PROCESS, running.nodes[0].status()["pid"])
        assert lower == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 5)
        running.nodes[1].die()
        inventories = running.close(1, gone={1})
        kept = Generation(1, 3)
        held = {(h.role, h.generation): h.parts for h in inventories[0].holdings}
        assert held[0, kept] == SHARD
        assert held[1, kept] == SHARD
        record = swap(running, inventories, kept, layouts)
        running.open(record)
        members[1] = Member(running.nodes[2], layouts[1], 2)
        for member in members:
            member.check(record)
        for member in members:
            assert member.wait(kept) == "committed"
        train(members, *(Generation(2, iteration) for iteration in range(4, 8)))
        # Only the copy of role 0 had died with node 1.
        assert {event.role for event in running.nodes[0].told(Kind.EXPOSED)} == {0}
        assert running.nodes[2].seen(Kind.EXPOSED) == []
        # The generation fetched for role 1 is superseded and its memory given back.
        names = {"own-1-2.0.0.seg", "copy-0.seg"}
        wait_until(lambda: {*running.nodes[2].status()["segments"]} == names, "room")
        inventories = running.close(2, gone={1})
        newest = {(h.role, h.generation) for h in inventories[2].holdings}
        assert (1, Generation(2, 7)) in newest
        assert (0, Generation(2, 7)) in newest
        for node in (running.nodes[0], running.nodes[2]):
            node.shutdown(remove=True)
            assert not node.directory.exists()


def test_nothing_of_a_closed_epoch_is_sealed(tmp_path):
    """Rules 5 and 11: late fills, and a member that lost its seat."""
    layouts = {role: make_layout(role) for role in range(2)}
    with cluster(tmp_path, 2) as running:
        members = begin(running, layouts)
        late = members[0].client.begin(Generation(1, 1), 1)
        leftover = members[1].client.begin(Generation(1, 1), 1)
        inventories = running.close(1)
        assert {h.generation for h in inventories[0].holdings} == {Generation(1, 0)}
        late.fill({"shard": 100, "tail": 100})
        with pytest.raises(Frozen):
            members[0].client.begin(Generation(1, 2), 1)
        assert running.nodes[0].inventory() == inventories[0]
        restore = memory(inventories, Generation(1, 0), layouts)
        # The member of role 0 is replaced on its node: incarnation 1.
        record = running.record(2, restore, {0: Seat(0, 0, 1), 1: Seat(1, 0, 0)})
        running.open(record)
        with pytest.raises(Frozen):
            members[0].client.begin(Generation(2, 1), 2)
        fresh = Member(running.nodes[0], layouts[0], 2, incarnation=1)
        fresh.check(record)
        members[1].check(record)
        # A helper thread of the survivor wakes up late: its slot belongs to somebody else by now.
        writer = members[1].client.begin(Generation(2, 1), 2)
        leftover.abandon()
        leftover.fill({"shard": 100, "tail": 100})
        writer.abandon()
        # The dead incarnation's segment is a source until it is superseded, then it goes.
        assert "own-0-0.0.0.seg" in running.nodes[0].status()["segments"]
        for iteration in (1, 2):
            fresh.step(Generation(2, iteration))
            members[1].step(Generation(2, iteration))
        names = {"own-0-0.0.1.seg", "copy-1.seg"}
        wait_until(lambda: {*running.nodes[0].status()["segments"]} == names, "room")
        with pytest.raises(VaultError, match="epoch 1 is over"):
            running.nodes[0].adopt(running.record(1))


def test_the_gate_needs_the_wanted_copies(tmp_path):
    """Alone, a role waits and reports; a record that releases it opens the gate."""
    layout = make_layout(0)
    with cluster(tmp_path, 1) as running:
        (member,) = running.join({0: layout})
        member.write(Generation(1, 0))
        assert member.wait(Generation(1, 0), seconds=0.5) == "shut"
        assert len(member.waits) >= 2
        inventories = running.close(1)
        restore = memory(inventories, Generation(1, 0), {0: layout})
        record = running.record(2, restore, fewer_copies=frozenset({0}))
        running.open(record)
        member.check(record)
        assert member.wait(Generation(1, 0)) == "committed"
        member.write(Generation(2, 1))
        assert member.wait(Generation(2, 1)) == "committed"
        # Rule 3 in the member: without its gate no slot may be overwritten.
        member.client.begin(Generation(2, 2), 2).fill({"shard": 1, "tail": 1, "extras@step": 1})
        member.wait(Generation(2, 2))
        with pytest.raises(VaultError, match="was not computed in epoch"):
            member.client.begin(Generation(1, 3), 2)


def test_appended_extras_commit_and_restore_by_boundary(tmp_path):
    """Extras of an evaluation; the resume point decides whether they survive."""
    layouts = {role: make_layout(role) for role in range(2)}
    with cluster(tmp_path, 3, roles=2) as running:
        members, kept = running.join(layouts), Generation(1, 0)
        for member in members:
            member.write(kept)
            member.append(kept, "evaluation")
        for member in members:
            assert member.wait(kept, "evaluation") == "committed"
            with pytest.raises(VaultError, match="already"):
                member.append(kept, "evaluation")
        running.nodes[1].die()
        inventories = running.close(1, gone={1})
        record = swap(running, inventories, kept, layouts, boundary="evaluation")
        running.open(record)
        members[1] = Member(running.nodes[2], layouts[1], 2)
        for member in members:
            member.check(record)
            assert member.wait(kept, "evaluation") == "committed"
        # Now captured in epoch 2, by the survivor in its own slot, by the spare in the fetched one.
        for member in members:
            member.append(kept, "save")
        for member in members:
            assert member.wait(kept, "save") == "committed"
        # A record of the open epoch changes nothing, twice is once.
        running.open(record)
        inventories = running.close(2, gone={1})
        for inventory in inventories.values():
            for holding in inventory.holdings:
                assert "extras@save" in holding.parts
        record = swap(running, inventories, kept, layouts, epoch=3, boundary="evaluation")
        running.open(record)
        for member in members:
            member.check(record)
        inventories = running.close(3, gone={1})
        for inventory in inventories.values():
            for holding in inventory.holdings:
                assert "extras@save" not in holding.parts
                assert "extras@evaluation" in holding.parts


@pytest.mark.parametrize("apart", [False, True])
def test_covered_parts_stay_at_home_and_come_from_a_peer(tmp_path, apart):
    """Without a distributed optimizer a data-parallel peer holds the same bytes: nothing shipped,
    and a lost role gets them under the peer's number. Not if the peer has other bytes: what the
    lost role had is known where its extras are (rule 4)."""
    size = 1 << 20
    layouts = {r: make_layout(r, size, replicas=(0, 1)) for r in range(2)}
    with cluster(tmp_path, 3, roles=2) as running:
        members, kept = running.join(layouts), Generation(1, 0)
        for member in members:
            writer = member.client.begin(kept, 1)
            for name, count in (("shard", size), ("tail", 1000)):
                # Identical on both, or nearly.
                writer.part(name)[:] = content(0, kept, name, count)
                if apart and member.role == 1 and name == "tail":
                    writer.part(name)[0] ^= 1
            writer.part("extras@step")[:777] = content(member.role, kept, "extras@step", 777)
            writer.fill({"shard": size, "tail": 1000, "extras@step": 777})
        for member in members:
            assert member.wait(kept) == "committed"
        assert running.nodes[0].count("bytes shipped") == 777
        running.nodes[1].die()
        inventories = running.close(1, gone={1})
        found = harness.sources_from(inventories, kept, {0: layouts[0]})
        found[1] = {
            "shard": (Source(0, 0),),
            "tail": (Source(0, 0),),
            "extras@step": (Source(0, 1),),
        }
        seats = {0: Seat(0, 0, 0), 1: Seat(2, 0, 0)}
        record = running.record(2, Restore("memory", kept, sources=found), seats, gone={1})
        running.open(record)
        fresh = Member(running.nodes[2], layouts[1], 2)
        if apart:
            with pytest.raises(RestoreUnavailable, match=r"tail.*not the bytes that the role had"):
                fresh.restore(record)
            running.nodes[2].told(Kind.CORRUPTION, where="role 0 on node 0")
            return
        parts = fresh.restore(record)
        assert bytes(parts.part("shard")) == content(0, kept, "shard", size)
        assert bytes(parts.part("extras@step")) == content(1, kept, "extras@step", 777)
        parts.close()
        assert fresh.wait(kept) == "committed"
