"""Steps through real vault processes: kept at the buddy, fetched as a chain, sealed when right."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from deadpool_megatron.layout import history, records, schemes
from deadpool_megatron.layout.gradient_chain import key, step_parts, unpack_sums
from deadpool_megatron.layout.planner import RestoreQuery, choose_restore
from deadpool_megatron.vault.errors import VaultError
from deadpool_megatron.vault.shm.segment import PartState, Segment, checksum, own_name
from deadpool_megatron.vault.vault_client import RestoredParts
from tests.vault import harness

EVERY = 4
SHARDS = ("shard", "tail")
STEP = {*map(records.gradients_part, SHARDS), records.UPDATE_PART, records.SUMS_PART}
PLAN = schemes.ProtectionPlan(schemes.SchemeNumbers(schemes.SchemeKind.RECOMPUTE, full_every=EVERY))


def with_steps(role: int) -> records.RoleLayout:
    """The harness's layout with room for steps, gradients a third of their shard part."""
    plain = harness.make_layout(role)
    shards = {p.name: replace(p, nbytes=p.nbytes // 3) for p in plain.parts if "@" not in p.name}
    kept = step_parts(shards, 512, role)
    extras = [part for part in plain.parts if "@" in part.name]
    return replace(plain, parts=(*plain.parts[:2], *kept, *extras), layout_hash="with steps")


LAYOUTS = {role: with_steps(role) for role in range(2)}


class Stepper(harness.Member):
    """A member that keeps the step to each generation, and trusts its replays."""

    def __init__(self, node: harness.Node, epoch: int, role: int) -> None:
        super().__init__(node, LAYOUTS[role], epoch)
        self.client.rehearsed(True)

    def write(self, generation: records.Generation, extras: bool = True) -> None:
        names = [*SHARDS, *map(records.gradients_part, SHARDS), records.UPDATE_PART, "extras@step"]
        self.fill(generation, generation.lineage, names)

    def bytes_of(self, generation: records.Generation, name: str, nbytes: int) -> bytes:
        """What an iteration gives is the same in every lineage."""
        return harness.content(self.role, records.Generation(1, generation.iteration), name, nbytes)


def opened(running: harness.Cluster, **options: object) -> records.EpochRecord:
    record = replace(running.record(1, **options), protection=PLAN)
    running.open(record)
    return record


def go_on(members: list[Stepper], lineage: int, iterations: range) -> None:
    harness.train(members, *(records.Generation(lineage, iteration) for iteration in iterations))


def planned(
    inventories: Mapping[int, records.Inventory], seats: Mapping[int, records.Seat]
) -> records.Restore:
    """What the coordinator would decide for epoch 2."""
    owners = {role: records.Seat(role, 0, 0) for role in range(2)}
    answer = choose_restore(
        RestoreQuery(2, range(2), inventories, seats, owners, {1: history.NO_LIMIT})
    )
    assert isinstance(answer, records.Restore), answer
    return answer


def held(inventory: records.Inventory, role: int) -> dict[int, set[str]]:
    """Iteration -> parts but extras."""
    return {
        h.generation.iteration: {name for name in h.parts if not name.startswith("extras")}
        for h in inventory.holdings
        if h.role == role
    }


def expect_chain(parts: RestoredParts, role: int, base: int, last: int, lineage: int) -> None:
    """Base and steps, byte for byte, and the checksums of what they lead to."""
    names = {"extras@step"} | {key(records.Generation(lineage, base), name) for name in SHARDS}
    for iteration in range(base + 1, last + 1):
        names |= {key(records.Generation(lineage, iteration), name) for name in STEP}
    assert set(parts.names) == names
    for iteration in range(base, last + 1):
        wanted = SHARDS if iteration == base else STEP - {records.SUMS_PART}
        for name in wanted:
            view = parts.part(key(records.Generation(lineage, iteration), name))
            written = records.Generation(1, iteration)
            assert bytes(view) == harness.content(role, written, name, len(view)), (iteration, name)
    sums = unpack_sums(parts.part(key(records.Generation(lineage, last), records.SUMS_PART)))
    for name in SHARDS:
        nbytes = harness.make_layout(role).parts[SHARDS.index(name)].nbytes
        whole = harness.content(role, records.Generation(1, last), name, nbytes)
        assert sums[name] == (nbytes, checksum(memoryview(whole)))


def test_a_lost_role_comes_back_from_a_chain_and_only_right(tmp_path):
    with harness.cluster(tmp_path, 3, roles=2, full_every=EVERY) as running:
        opened(running)
        members = [Stepper(running.nodes[role], 1, role) for role in range(2)]
        go_on(members, 1, range(7))
        shipped = running.nodes[0].status()["counters"]["bytes shipped"]
        whole = sum(part.nbytes for part in LAYOUTS[0].parts if part.name in SHARDS)
        assert shipped < 2 * whole + 5 * (whole // 3 + 2000), "two whole copies, five steps"
        running.nodes[1].die()
        inventories = running.close(1, gone={1})
        kept = records.Generation(1, 6)
        found = held(inventories[0], 1)
        assert found[4] == set(SHARDS)
        assert found[5] == found[6] == STEP
        seats = {0: records.Seat(0, 0, 0), 1: records.Seat(2, 0, 0)}
        restore = planned(inventories, seats)
        assert restore.generation == kept
        assert set(restore.recipes) == {1}
        record = replace(running.record(2, restore, seats, gone={1}), protection=PLAN)
        running.open(record)
        members[0].check(record)
        spare = Stepper(running.nodes[2], 2, 1)
        parts = spare.restore(record)
        expect_chain(parts, 1, 4, 6, lineage=1)
        parts.close()
        spare.fill(kept, 2, SHARDS, wrong="tail")
        with pytest.raises(VaultError, match=r"part tail of generation .* was damaged"):
            spare.wait(kept)
        again = Stepper(running.nodes[2], 2, 1)
        again.restore(record).close()
        again.fill(kept, 2, SHARDS)
        assert again.wait(kept) == members[0].wait(kept) == "committed"
        members[1] = again
        go_on(members, 2, range(7, 9))
        inventories = running.close(2, gone={1})
        found = held(inventories[0], 1)
        assert found[6] >= set(SHARDS), "restored, so a whole copy"
        assert found[7] == found[8] == STEP


def test_recomputed_parts_take_no_slot_of_an_older_generation(tmp_path):
    """The next failure may have to go back to it, until all have committed this one again."""
    with harness.cluster(tmp_path, 2, full_every=EVERY) as running:
        opened(running)
        members = [Stepper(running.nodes[role], 1, role) for role in range(2)]
        go_on(members, 1, range(7))
        seats, kept = (
            {role: records.Seat(role, 0, 0) for role in range(2)},
            records.Generation(1, 6),
        )
        own = Segment.open(running.nodes[1].directory / own_name(1, seats[1]))
        (slot,) = (number for number in range(own.slots) if own.generation(number) == kept)
        own.invalidate_part(slot, "shard", PartState.BAD)  # as its vault does with damaged bytes
        inventories = running.close(1)
        assert held(inventories[1], 1).keys() == {5, 6}
        query = RestoreQuery(2, range(2), inventories, seats, seats, {1: history.NO_LIMIT})
        restore = choose_restore(query)
        assert isinstance(restore, records.Restore)
        assert restore.generation == kept
        assert set(restore.recipes) == {1}
        record = replace(running.record(2, restore, seats), protection=PLAN)
        running.open(record)
        members[0].check(record)
        parts = members[1].restore(record)
        assert "tail" in parts.names, "is not lost"
        parts.close()
        members[1].fill(kept, 2, ["shard"], wrong="shard")
        with pytest.raises(VaultError, match=r"part shard of generation .* was damaged"):
            members[1].wait(kept)
        members[1] = Stepper(running.nodes[1], 2, 1)
        members[1].restore(record).close()
        members[1].fill(kept, 2, ["shard"])
        assert members[1].wait(kept) == members[0].wait(kept) == "committed"
        inventories = running.close(2)
        assert held(inventories[1], 1).keys() == {5, 6}
        assert held(inventories[1], 1)[6] >= set(SHARDS)


def test_chains_are_dumped_and_go_on_in_another_run(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    dump, kept = tmp_path / "dump", records.Generation(1, 2)
    with harness.cluster(first, 2, full_every=EVERY) as running:
        opened(running)
        members = [Stepper(running.nodes[role], 1, role) for role in range(2)]
        go_on(members, 1, range(3))
        running.nodes[1].die()
        running.close(1, gone={1})
        assert len(running.nodes[0].dump(dump, kept, "step")["files"]) == 2
    with harness.cluster(second, 2, full_every=EVERY) as running:
        restore = records.Restore("dump", records.Generation(3, 2), path=str(dump))
        record = replace(running.record(3, restore), protection=PLAN)
        running.open(record)
        members = [Stepper(running.nodes[role], 3, role) for role in range(2)]
        members[0].check(record, written_as=kept)
        parts = members[1].restore(record)
        expect_chain(parts, 1, 0, 2, lineage=3)
        parts.close()
        members[1].fill(restore.generation, 3, SHARDS)
        for member in members:
            assert member.wait(restore.generation) == "committed"
        harness.wait_until(lambda: running.nodes[0].status()["committed"], "a commit")
