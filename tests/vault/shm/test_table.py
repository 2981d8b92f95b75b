"""Which slot of a copy may be overwritten, what freezing promises, what adopting drops."""

from pathlib import Path

from hypothesis import given, settings, strategies as st

from deadpool_megatron.layout.records import Generation
from deadpool_megatron.vault.shm import segment as segments
from deadpool_megatron.vault.shm.table import Table
from tests.vault.harness import make_layout

SHARD = ["shard", "tail", "extras@step"]


def table_with_copy(directory: Path, slots: int = 2) -> tuple[Table, segments.Segment]:
    table = Table(directory)
    layout = make_layout(3, nbytes=100, slots=slots)
    segment = segments.Segment.create(directory / segments.copy_name(3), layout, None, SHARD)
    table.segments[segment.path.name] = segment
    return table, segment


def keep(segment: segments.Segment, slot: int, names: list[str], epoch: int) -> None:
    for name in names:
        segment.seal_part(slot, name, 10, segments.checksum(segment.data(slot, name, 10)), epoch)


@settings(max_examples=60)
@given(
    slots=st.integers(2, 4),
    events=st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=14),
)
def test_a_copy_never_loses_its_newest_complete_generation(tmp_path_factory, slots, events):
    """Puts in a Replicator's order, some cut off and repeated, old ones offered again: rule 3."""
    table, segment = table_with_copy(tmp_path_factory.mktemp("copy"), slots)
    number = 0
    complete: set[Generation] = set()
    for whole, back in events:
        # A generation is offered until it is there; after a restart of its owner an older one too.
        repeated = bool(back) and number >= back
        generation = Generation(1, number - back if repeated else number)
        slot = table.claim(segment, generation, 1)
        if slot is None:
            assert repeated
            continue
        assert table.claim(segment, generation, 1) is None  # one writer at a time
        keep(segment, slot, SHARD if whole else SHARD[:1], 1)
        table.release(segment, slot)
        if whole and not repeated:
            complete.add(generation)
            number += 1
        held = {h.generation for h in table.holdings() if h.parts >= set(SHARD)}
        if complete:
            assert max(complete) in held
