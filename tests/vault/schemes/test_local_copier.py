"""Each generation twice on its own node: one node alone, whose vault process and slots are hurt."""

from dataclasses import replace

from deadpool_megatron.events import Kind as EventKind
from deadpool_megatron.layout.records import EpochRecord, Generation, Restore, Seat
from deadpool_megatron.layout.schemes import ProtectionPlan, SchemeKind, SchemeNumbers
from deadpool_megatron.vault.shm import segment as slots_file
from tests.vault import harness
from tests.vault.protected import FIRST, flip

LAYOUT = harness.make_layout(0, peers=(0,))
TWICE = ProtectionPlan(SchemeNumbers(SchemeKind.LOCAL_TWICE))


def doubled(
    running: harness.Cluster, epoch: int = 1, restore: Restore | None = None
) -> EpochRecord:
    """The record of an epoch in which the one role, of a new process each time, is kept twice."""
    seats = {0: Seat(0, 0, epoch - 1)}
    return replace(running.record(epoch, restore, seats, replicas=0), protection=TWICE)


def enter(running: harness.Cluster, record: EpochRecord) -> harness.Member:
    running.open(record)
    return harness.Member(running.nodes[0], LAYOUT, record.epoch, incarnation=record.epoch - 1)


def second_copy(running: harness.Cluster, generation: Generation) -> dict[str, bytes]:
    """What is sealed of a generation beside the member's own slots."""
    segment = slots_file.Segment.open(running.nodes[0].directory / slots_file.copy_name(0))
    return {
        part.name: bytes(segment.data(slot, part.name, entry.nbytes))
        for slot in range(segment.slots)
        if segment.generation(slot) == generation
        for part in LAYOUT.parts
        if (entry := segment.entry(slot, part.name)).state is slots_file.PartState.SEALED
    }


def written(generation: Generation) -> dict[str, bytes]:
    """What a member writes of a generation."""
    sizes = {"shard": 64 << 10, "tail": 1000, "extras@step": 777}
    return {name: harness.content(0, generation, name, nbytes) for name, nbytes in sizes.items()}


def test_a_damaged_slot_is_repaired_from_the_second_copy(tmp_path):
    """There is no other node that anything could be fetched from."""
    newest = Generation(1, 2)
    with harness.cluster(tmp_path, 1) as running:
        member = enter(running, doubled(running))
        harness.train([member], *(Generation(1, iteration) for iteration in range(3)))
        assert second_copy(running, newest) == written(newest)
        member.client.close()
        inventories = running.close(1)
        flip(running.nodes[0], slots_file.own_name(0, member.seat), newest, "shard")
        record = doubled(running, 2, harness.memory(inventories, newest, {0: LAYOUT}))
        successor = enter(running, record)
        successor.check(record)
        (found,) = running.nodes[0].told(EventKind.CORRUPTION)
        assert found.data["where"] == f"slot {slots_file.own_name(0, member.seat)}"
        assert successor.wait(newest) == "committed"
        for iteration in range(3, 6):
            successor.step(Generation(2, iteration))
            assert second_copy(running, Generation(2, iteration)) == written(
                Generation(2, iteration)
            )


def test_a_vault_killed_between_two_parts_goes_on(tmp_path):
    fault = {"id": "cut", "point": "vault.doubled", "match": {"role": 0}}
    with harness.cluster(tmp_path, 1, faults=[fault]) as running:
        record = doubled(running)
        member = enter(running, record)
        member.write(FIRST)
        running.nodes[0].await_killed()
        assert set(second_copy(running, FIRST)) == {"shard"}, "killed too early or too late"
        running.nodes[0].restart(record)
        assert member.wait(FIRST) == "committed"
        assert second_copy(running, FIRST) == written(FIRST)
        assert running.nodes[0].count("bytes doubled") == 1777, "what was there was copied again"
