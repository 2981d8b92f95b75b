"""What is reckoned for memory is never less than what the files take."""

import tempfile
from dataclasses import replace
from pathlib import Path

from hypothesis import given, settings, strategies as st

from deadpool_megatron.layout import parity_groups
from deadpool_megatron.layout.memory_needs import block_bytes, copy_bytes, kept_bytes, own_bytes
from deadpool_megatron.layout.records import PartInfo, RoleLayout
from deadpool_megatron.layout.shard_map import Run, ShardMap
from deadpool_megatron.vault.memory import allocated_bytes
from deadpool_megatron.vault.shm.segment import Segment, copy_name
from tests.vault.harness import segment_bytes

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="@"), min_size=1, max_size=8)
NAMES = NAMES.filter(lambda name: name != parity_groups.INPUTS)


@st.composite
def layouts(draw: st.DrawFn) -> RoleLayout:
    names = draw(st.lists(NAMES, min_size=1, max_size=3, unique=True))
    peers = tuple(range(draw(st.integers(1, 600))))
    parts = [PartInfo(name, draw(st.integers(0, 50_000)), peers) for name in names]
    parts.append(PartInfo("extras@step", draw(st.integers(0, 9000)), (0,)))
    run = Run("a.weight|(9, 9)|['0/2']", 0, 81, {":torch.float32": (0, 4, 4)})
    shards = ShardMap.of({parts[0].name: (run,) * draw(st.integers(0, 60))})
    about = draw(st.integers(2, 4)), "h" * 32, "stage 1 2", shards
    return RoleLayout(0, tuple(parts), peers, *about)


@settings(max_examples=15)
@given(layouts())
def test_own_slots_and_copies(layout):
    assert own_bytes(layout) >= segment_bytes(layout)
    assert copy_bytes(layout, ()) == 0
    names = [part.name for part in layout.parts[1:]]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        Segment.create(Path(name) / copy_name(0), layout, None, names)
        sizes = [part.nbytes for part in layout.parts[1:]]
        assert allocated_bytes(Path(name)) <= copy_bytes(layout, sizes)
        assert copy_bytes(layout, sizes) == kept_bytes(layout, names)


@settings(max_examples=15)
@given(layouts(), st.integers(1, 6))
def test_blocks(layout, roles):
    of = {role: replace(layout, role=role) for role in range(roles)}
    group = parity_groups.ParityGroup(tuple(of), (1 << 33,), (9,))
    made = parity_groups.parity_layout(of, group, 0, 1)
    longest = {part.name: part.nbytes for part in made.parts if part.name != parity_groups.INPUTS}
    assert block_bytes(made.slots, roles, longest) >= segment_bytes(made)
