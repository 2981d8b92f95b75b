"""Dumps that hold parts as chains of gradients, or in files of other roles."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deadpool_megatron.layout import records
from deadpool_megatron.layout.history import NO_LIMIT
from deadpool_megatron.vault.disk.dump import dump_files, generation_name
from deadpool_megatron.vault.disk.sources import newest_whole, slots_of, snapshot_of_dump
from deadpool_megatron.vault.errors import VaultError
from deadpool_megatron.vault.shm.segment import Segment, checksum, dump_name

G = records.Generation
SHARDS = ("first", "second")
STEP = (records.UPDATE_PART, records.SUMS_PART, *map(records.gradients_part, SHARDS))
PARTS = (*SHARDS, *STEP, "extras@step")
SIZE = 64


def layout(role: int = 0, replicas: tuple[int, ...] = (0,)) -> records.RoleLayout:
    parts = tuple(
        records.PartInfo(name, SIZE, replicas if "@" not in name else (role,)) for name in PARTS
    )
    return records.RoleLayout(role, parts, replicas, 2, f"hash-{role}")


def write(
    directory: Path, node: int, slots: dict[int, set[str]], of: records.RoleLayout | None = None
) -> None:
    """A dump file with these parts of these iterations, the newest one in its first slot."""
    of = of or layout()
    directory.mkdir(parents=True, exist_ok=True)
    order = sorted(slots, reverse=True)
    dumped = Segment.create(directory / dump_name(of.role, node), of, None, (), len(order))
    for slot, iteration in enumerate(order):
        dumped.reserve(tuple(slots[iteration]), [slot])
        dumped.open_slot(slot, G(1, iteration), 1)
        for name in slots[iteration]:
            content = f"{of.role}.{node}.{iteration}.{name}".encode().ljust(SIZE)
            dumped.data(slot, name)[:] = content
            dumped.seal_part(slot, name, SIZE, checksum(memoryview(content)), 1)


# Whole copies and steps, most of them with all that belongs to them.
HELD = st.builds(
    lambda kept, lost: set(kept) - lost,
    st.sampled_from([(*SHARDS, "extras@step"), (*STEP, "extras@step"), PARTS]),
    st.sets(st.sampled_from(PARTS), max_size=1),
)
SLOTS = st.dictionaries(st.integers(1, 4), HELD, min_size=1, max_size=4)


@settings(suppress_health_check=list(HealthCheck))
@given(st.lists(SLOTS, min_size=1, max_size=2))
def test_what_can_be_recomputed_counts_as_there(files: list[dict[int, set[str]]]) -> None:
    """The files of two nodes are put together, and all that is recomputed begins at one base."""
    with tempfile.TemporaryDirectory() as name:
        held: dict[int, set[str]] = {}
        for node, slots in enumerate(files):
            write(Path(name) / generation_name(G(1, 4)), node, {4: set(), **slots})
            for iteration, parts in slots.items():
                held.setdefault(iteration, set()).update(parts)

        def base(shard: str) -> int:
            """The iteration to compute from; 0: there is none."""
            step, at = {records.UPDATE_PART, records.SUMS_PART, records.gradients_part(shard)}, 4
            while at and shard not in held.get(at, ()):
                at = at - 1 if step <= held.get(at, set()) else 0
            return at

        bases = {base(shard) for shard in SHARDS}
        whole = "extras@step" in held.get(4, ()) and 0 not in bases and len(bases - {4}) <= 1
        found, why_not = newest_whole(Path(name), 1, {1: NO_LIMIT})
        assert (found is not None) is whole, why_not
        if found is not None:
            assert (found.generation, found.boundary) == (G(1, 4), "step")


def test_where_the_bytes_of_a_role_lie(tmp_path: Path) -> None:
    """One part in the own file, one in that of a role that has the same bytes."""
    write(tmp_path, 5, {4: {"first", "extras@step"}}, layout(0, (0, 1)))
    write(tmp_path, 6, {4: {"second"}}, layout(1, (0, 1)))
    taken = snapshot_of_dump(tmp_path, 0, G(1, 4), "step")
    assert taken.path == str(tmp_path / "dump-0-5.seg")
    assert taken.elsewhere == {"second": str(tmp_path / "dump-1-6.seg")}
    for name, (offset, nbytes, digest) in taken.parts.items():
        content = Path(taken.elsewhere.get(name, taken.path)).read_bytes()[offset : offset + nbytes]
        assert checksum(memoryview(content)) == digest
        assert content.strip().endswith(name.encode())
    assert type(taken).from_dict(taken.to_dict()) == taken


def test_what_is_there_as_gradients_only_has_no_bytes(tmp_path: Path) -> None:
    write(tmp_path, 5, {4: {"first", *STEP, "extras@step"}, 3: {"second"}})
    with pytest.raises(VaultError, match=r"part second of role 0 is not in .* as bytes"):
        snapshot_of_dump(tmp_path, 0, G(1, 4), "step")
    with pytest.raises(VaultError, match="nothing of role 1"):
        snapshot_of_dump(tmp_path, 1, G(1, 4), "step")


def test_slots_of_another_iteration_are_none_of_the_generation(tmp_path: Path) -> None:
    """Those of the iterations before are, in the lineage of the generation."""
    write(tmp_path, 0, {5: set(PARTS), 6: set(PARTS)})
    (dumped,) = dump_files(tmp_path)
    assert list(slots_of(dumped, G(3, 6))) == [(0, G(3, 6)), (1, G(3, 5))]
    assert list(slots_of(dumped, G(3, 5))) == []
