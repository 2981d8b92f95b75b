"""Slots that are made while a process waits for a role."""

from __future__ import annotations

from pathlib import Path

from deadpool_megatron.layout.records import Generation, Seat
from deadpool_megatron.vault.memory import Budget, allocated_bytes
from deadpool_megatron.vault.shm.own_slots import make_own, park
from deadpool_megatron.vault.shm.segment import Segment, own_name
from tests.vault.harness import Member, cluster, make_layout, train

NBYTES = 3 << 20


def _parked(directory: Path) -> list[Path]:
    return list(directory.glob(".parked-*"))


def test_the_slots_of_a_role_are_those_that_were_made_before_it_was_given(tmp_path: Path) -> None:
    with cluster(tmp_path, 2) as running:
        spare = running.nodes[0]
        member = Member(spare, make_layout(0, nbytes=NBYTES, peers=(0, 1)))
        member.client.park(make_layout(7, nbytes=NBYTES))
        (made,) = _parked(spare.directory)
        taken = allocated_bytes(spare.directory)
        assert taken > 2 * NBYTES, "their memory is there"
        known = made.stat()
        running.open(running.record(1))
        member.client.register(member.layout, 1)
        other = Member(running.nodes[1], make_layout(1, nbytes=NBYTES, peers=(0, 1)), 1)
        assert (spare.directory / own_name(0, member.seat)).stat().st_ino == known.st_ino
        assert _parked(spare.directory) == []
        train([member, other], Generation(1, 0))
        found = Segment.open(spare.directory / own_name(0, member.seat), writable=False)
        assert found.layout == member.layout


def test_a_role_of_another_size_gets_slots_of_its_own(tmp_path: Path) -> None:
    with cluster(tmp_path, 1) as running:
        (node,) = running.nodes
        member = Member(node, make_layout(0, nbytes=64 << 10))
        member.client.park(make_layout(7, nbytes=NBYTES))
        running.open(running.record(1))
        member.client.register(member.layout, 1)
        member.write(Generation(1, 0))
        assert _parked(node.directory) == []
        assert allocated_bytes(node.directory) < NBYTES


def _left_by_the_first(directory: Path) -> None:
    """Slots that the first process on the place has parked, and some that it was killed over."""
    park(directory, make_layout(7, nbytes=NBYTES), Seat(0, 3, 0), Budget(directory))
    (directory / "..parked-0.3.0.seg.7.7").touch()


def test_what_a_process_was_killed_over_goes_with_the_next_on_its_place(tmp_path: Path) -> None:
    _left_by_the_first(tmp_path)
    later = park(tmp_path, make_layout(7, nbytes=NBYTES), Seat(0, 3, 1), Budget(tmp_path))
    assert list(tmp_path.iterdir()) == [later.path]


def test_a_process_that_gets_a_role_before_it_parks_has_no_slots_of_others_beside_it(
    tmp_path: Path,
) -> None:
    _left_by_the_first(tmp_path)
    other = park(tmp_path, make_layout(7, nbytes=NBYTES), Seat(0, 4, 0), Budget(tmp_path))
    own = tmp_path / own_name(7, Seat(0, 3, 1))
    make_own(own, make_layout(7, nbytes=NBYTES), Seat(0, 3, 1), Budget(tmp_path))
    assert sorted(tmp_path.iterdir()) == sorted([other.path, own])
