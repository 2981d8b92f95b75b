"""Parity blocks made by real vault processes: whole, in spite of kills, stops and damaged bytes."""

from dataclasses import replace
from typing import Any

import pytest
import zfec

from deadpool_megatron.events import Kind
from deadpool_megatron.layout import records, schemes
from deadpool_megatron.layout.parity_groups import INPUTS, BlockInputs, ParityPlacement
from deadpool_megatron.layout.schemes import ProtectionPlan, SchemeNumbers
from deadpool_megatron.vault.shm.segment import PartState, Segment, checksum, copy_name
from tests.vault import harness

pytestmark = pytest.mark.slow
FIRST = records.Generation(1, 0)
SIZES = {0: 64 << 10, 1: 100_000, 2: 4096}
BIG = 6 << 20


def with_parity(record: records.EpochRecord, group: int = 3) -> records.EpochRecord:
    scheme = SchemeNumbers(schemes.SchemeKind.PARITY, group=group)
    return replace(record, protection=ProtectionPlan(scheme))


def layouts_of(sizes: dict[int, int], slots: int = 2) -> dict[int, records.RoleLayout]:
    return {role: harness.make_layout(role, nbytes, slots) for role, nbytes in sizes.items()}


def block_of(
    running: harness.Cluster, record: records.EpochRecord, number: int
) -> tuple[Any, int, Segment]:
    """Group, number of the block and segment of a parity role at its holder."""
    group, j = ParityPlacement.of_record(record).by_block[number]
    path = running.nodes[group.holders[j]].directory / copy_name(number)
    return group, j, Segment.open(path, writable=False)


def check_blocks(
    running: harness.Cluster,
    record: records.EpochRecord,
    generation: records.Generation,
    layouts: dict[int, records.RoleLayout],
) -> None:
    """Every parity block is there, sealed, and just what zfec (or an XOR) makes of the parts."""
    for group in ParityPlacement.of_record(record).groups:
        for number in group.blocks:
            _, j, segment = block_of(running, record, number)
            (slot,) = (
                s
                for s in range(segment.layout.slots)
                if segment.generation(s) == generation
                and segment.entry(s, INPUTS).state is PartState.SEALED
            )
            entry = segment.entry(slot, INPUTS)
            members = BlockInputs.decode(segment.data(slot, INPUTS, entry.nbytes))
            assert (members.group, members.number) == (group.roles, j)
            for name in ("shard", "tail"):
                blocks = [
                    harness.content(role, generation, name, part.nbytes)
                    for role in group.roles
                    for part in layouts[role].parts
                    if part.name == name
                ]
                for role, block in zip(group.roles, blocks, strict=True):
                    pair = len(block), checksum(memoryview(block))
                    assert members.contributions[role][name] == pair
                longest = max(map(len, blocks))
                blocks = [block.ljust(longest, b"\0") for block in blocks]
                k, m = len(blocks), record.replicas
                if m == 1:
                    total = 0
                    for block in blocks:
                        total ^= int.from_bytes(block, "little")
                    wanted = total.to_bytes(longest, "little")
                else:
                    wanted = zfec.Encoder(k, k + m).encode(blocks, [k + j])[0]
                entry = segment.entry(slot, name)
                assert entry.state is PartState.SEALED
                found = segment.data(slot, name, entry.nbytes)
                assert bytes(found) == wanted
                assert checksum(found) == entry.checksum


@pytest.mark.parametrize("parities", [1, 2])
def test_many_generations_commit_in_few_slots(tmp_path, parities):
    """Three roles of different size; extras travel whole to a buddy, shards as parity only. With
    two blocks three slots."""
    layouts = layouts_of(SIZES, slots=1 + parities)
    with harness.cluster(tmp_path, 3 + parities, roles=3, chunk_bytes=16384) as running:
        record = with_parity(running.record(1, replicas=parities))
        members = running.join(layouts, record)
        harness.train(members, *(records.Generation(1, iteration) for iteration in range(6)))
        newest = records.Generation(1, 5)
        check_blocks(running, record, newest, layouts)
        held = {
            (node.number, holding.role, part)
            for node in running.nodes
            for holding in map(records.Holding.from_dict, node.status()["holdings"])
            if holding.generation == newest
            for part in holding.parts
        }
        assert {role for _, role, part in held if part == INPUTS} == {
            block for group in ParityPlacement.of_record(record).groups for block in group.blocks
        }
        for role in layouts:
            assert {node for node, r, part in held if (r, part) == (role, "shard")} == {role}
            extras = {node for node, r, part in held if (r, part) == (role, "extras@step")}
            assert len(extras) == 1 + parities
        shipped = sum(node.count("bytes shipped") for node in running.nodes)
        each = sum(SIZES.values()) + 3 * 1000 + 3 * 777
        assert shipped == 6 * parities * each
        commits = (
            harness.wait_until(  # a member hears of the commit before the agent hears of the event
                lambda: (
                    len(found := [e for node in running.nodes for e in node.seen(Kind.COMMITTED)])
                    == 18
                    and found
                ),
                "all events have come",
            )
        )
        assert sum(event.data["bytes"] for event in commits) == shipped
        assert all(event.data["ship_seconds"] > 0 for event in commits)
        # The spares hold the blocks, and of each only as much memory as is used.
        spare = running.nodes[3]
        (name,) = (n for n in spare.status()["segments"] if records.is_parity_role(int(n[5:-4])))
        used = (spare.directory / name).stat().st_blocks * 512
        assert used < (1 + parities) * (max(SIZES.values()) + 1000) + (64 << 10)


def in_the_middle(name: str, point: str, iteration: int, role: int, **more: Any) -> dict[str, Any]:
    """A fault in the second piece of a part on its way to the holder."""
    match = {"iteration": iteration, "role": role, "part": "shard"}
    return {"id": name, "point": point, "match": match, "nth": 2, **more}


def test_blocks_are_right_whatever_happens_in_the_middle(tmp_path):
    """Holder killed, owner killed, holder stopped, a piece damaged: one generation each."""
    layouts = layouts_of({0: BIG, 1: BIG - 5000, 2: 3 << 20})
    plan = [
        in_the_middle("holder", "vault.combine", 1, 1),
        in_the_middle("owner", "vault.chunk", 2, 1),
        in_the_middle("stopped", "vault.combine", 3, 0, signal="STOP", resume_after_seconds=0.3),
        in_the_middle("wire", "vault.chunk", 4, 1, action="mark"),
    ]
    victims = {1: 3, 2: 1}
    with harness.cluster(tmp_path, 4, roles=3, faults=plan, chunk_bytes=1 << 20) as running:
        record = with_parity(running.record(1))
        members = running.join(layouts, record)
        harness.train(members, FIRST)
        for iteration, name in enumerate(["holder", "owner", "stopped", "wire"], 1):
            generation = records.Generation(1, iteration)
            for member in members:
                member.write(generation)
            if iteration in victims:
                running.nodes[victims[iteration]].await_killed()
                running.nodes[victims[iteration]].restart(record)
            for member in members:
                assert member.wait(generation) == "committed"
            assert (tmp_path / "faults.json.fired" / name).exists()
            check_blocks(running, record, generation, layouts)
        (event,) = running.nodes[3].told(Kind.CORRUPTION)
        assert (event.data["where"], event.role) == ("from node 1", 1)
