"""What healthy nodes write when no generation is whole, and what can be put together from it."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from deadpool_megatron.cluster.agent import process
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, RunInfo
from deadpool_megatron.layout.history import NO_LIMIT
from deadpool_megatron.layout.records import Generation, PartInfo, RoleLayout
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault import errors, slot_store
from deadpool_megatron.vault.disk.dump import dump_held, generation_name
from deadpool_megatron.vault.disk.sources import newest_whole
from deadpool_megatron.vault.schemes.registry import scheme_of
from deadpool_megatron.vault.shm.segment import Segment, checksum, copy_name, dump_name

G = Generation
ROLES = 2
PARTS = ("shard", "shared", "extras@step", "extras@evaluation")


def layout(role: int) -> RoleLayout:
    """``shared`` is the same on both roles."""
    return RoleLayout(
        role,
        tuple(PartInfo(n, 64, (0, 1) if n == "shared" else (role,)) for n in PARTS),
        (0, 1),
        1,
        f"hash-{role}",
    )


def write(directory: Path, role: int, node: int, generation: Generation, parts: set[str]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / dump_name(role, node)
    dumped = Segment.create(path, layout(role), None, tuple(parts))
    dumped.open_slot(0, generation, generation.lineage)
    for name in parts:
        dumped.seal_part(0, name, 8, checksum(dumped.data(0, name, 8)), generation.lineage)


FILES = st.dictionaries(
    st.tuples(st.integers(0, 1), st.integers(0, 1), st.integers(1, 2), st.integers(1, 4)),
    st.sets(st.sampled_from(PARTS), min_size=1),
    max_size=16,
)


@settings(suppress_health_check=list(HealthCheck))
@given(files=FILES, limit=st.integers(0, 4))
def test_the_newest_whole_generation_of_the_kept_line(files, limit):
    kept = {1: limit, 2: NO_LIMIT}
    with tempfile.TemporaryDirectory() as name:
        held: dict[Generation, dict[int, set[str]]] = {}
        for (role, node, lineage, iteration), parts in files.items():
            generation = G(lineage, iteration)
            write(Path(name) / generation_name(generation), role, node, generation, parts)
            held.setdefault(generation, {}).setdefault(role, set()).update(parts)

        def boundary(parts: dict[int, set[str]]) -> str | None:
            if set(parts) != {0, 1} or "shared" not in parts[0] | parts[1]:
                return None
            if not all("shard" in parts[role] for role in range(ROLES)):
                return None
            for name in ("evaluation", "step"):
                if all(f"extras@{name}" in parts[role] for role in range(ROLES)):
                    return name
            return None

        whole = [g for g in held if boundary(held[g]) and g.iteration <= kept[g.lineage]]
        found, why_not = newest_whole(Path(name), range(ROLES), kept)
        if not whole:
            assert found is None
            return
        assert found.generation == max(whole)
        assert found.boundary == boundary(held[max(whole)])
        assert found.path.endswith(generation_name(max(whole)))
        newer = [g for g in held if g > max(whole) and g.iteration <= kept[g.lineage]]
        assert len(why_not) == len(newer)


def vault(directory: Path) -> slot_store.SlotStore:
    """With two generations of role 7 in a copy."""
    directory.mkdir()
    state = slot_store.SlotStore(scheme_of, 5, directory, Settings(), lambda _: None)
    parts = tuple(PartInfo(n, 1 << 18, (7,)) for n in ("shard", "extras@step"))
    segment = Segment.create(
        directory / copy_name(7), RoleLayout(7, parts, (7,), 2, "h"), None, ("shard",)
    )
    for slot, k in enumerate((3, 4)):
        segment.open_slot(slot, G(1, k), 1)
        for name in ("shard", "extras@step"):
            segment.data(slot, name)[:9] = b"content %d" % k
            segment.seal_part(slot, name, 1 << 18, checksum(segment.data(slot, name)), 1)
    state.table.scan()
    return state


def test_all_generations_are_written_each_to_its_place(tmp_path):
    written = dump_held(vault(tmp_path / "node"), tmp_path / "dump", [G(1, 3), G(1, 4)])
    assert written == [str(tmp_path / "dump" / f"1-{k}" / "dump-7-5.seg") for k in (4, 3)]
    for path, k in zip(written, (4, 3), strict=True):
        dumped = Segment.open(Path(path), writable=False)
        assert dumped.generation(0) == G(1, k)
        assert bytes(dumped.data(0, "extras@step", 9)) == b"content %d" % k


def test_a_full_disk_is_one_line_and_loses_nothing(tmp_path, small_disk):
    """The newest generation has room; the older one has not."""
    state = vault(tmp_path / "node")
    with pytest.raises(
        errors.VaultError, match=r"bytes needed, \d+ free; 1 files were written"
    ) as caught:
        dump_held(state, small_disk, [G(1, 3), G(1, 4)])
    assert "\n" not in str(caught.value)
    assert [p.name for p in small_disk.rglob("*.seg*")] == ["dump-7-5.seg"]
    assert Segment.open(small_disk / "1-4" / "dump-7-5.seg", writable=False).generation(0) == G(
        1, 4
    )
    assert {h.generation for h in state.table.holdings()} == {G(1, 3), G(1, 4)}


def test_salvage_keeps_unreadable_slots(tmp_path, monkeypatch):
    """It may be the rest of a whole generation, for the version that wrote it."""
    for node in (5, 6):
        vault(tmp_path / f"node{node}")
        (tmp_path / f"node{node}").chmod(0o700)
    unread = tmp_path / "node5" / copy_name(8)
    unread.write_bytes(b"DMPSEG99" + b"state" * 1000)
    run = RunDirectory(tmp_path / "run")
    run.logs.mkdir(parents=True)
    (tmp_path / "node6" / "logs").mkdir()
    (tmp_path / "node6" / "logs" / "node6-vault.log").write_text("its last words")
    monkeypatch.setattr(
        process, "node_directories", lambda _: [tmp_path / "node5", tmp_path / "node6"]
    )
    info = RunInfo("0123abcd", 2, 2, 0, 1, ("x.py",), Settings())
    with pytest.raises(errors.VaultError, match=r"copy-8\.seg is no segment of this version"):
        process.dump_orphans(run, info, {1: NO_LIMIT})
    for node in (5, 6):
        assert (run.dump / "1-4" / dump_name(7, node)).exists()
    assert unread.read_bytes() == b"DMPSEG99" + b"state" * 1000
    assert not (tmp_path / "node6").exists()
    assert (run.logs / "node6-vault.log").read_text() == "its last words"
