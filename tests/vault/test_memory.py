"""The limit of a node's memory: exact between processes, whoever is killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from deadpool_megatron.layout.memory_needs import PAGE_BYTES, Topology, memory_needs, node_needs
from deadpool_megatron.layout.records import Seat
from deadpool_megatron.layout.schemes import ProtectionPlan, SchemeKind, SchemeNumbers
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault import errors, memory
from deadpool_megatron.vault.memory import (
    Budget,
    MemoryLimit,
    allocated_bytes,
    problem,
)
from deadpool_megatron.vault.shm.segment import Segment, copy_name, own_name
from tests.vault.harness import make_layout, segment_bytes

NAMES = ("shard", "tail", "extras@step")
SEAT = Seat(0, 0, 0)


def _take_all(directory: str, first: int, limit: int, results: multiprocessing.Queue[int]) -> None:
    """Make segments until there is no room; answer how many there were."""
    made = []
    for role in range(first, first + 100):
        layout = make_layout(role, nbytes=64 << 10)
        path = Path(directory) / copy_name(role)
        try:
            made.append(
                Segment.create(path, layout, None, NAMES, budget=Budget(Path(directory), limit))
            )
        except errors.OutOfSpace:
            break
    results.put(len(made))


def test_the_limit_holds_between_processes(tmp_path):
    each = allocated_of(tmp_path / "one")
    directory, limit = tmp_path / "node", 7 * each + each // 2
    directory.mkdir()
    context = multiprocessing.get_context("fork")
    results: multiprocessing.Queue[int] = context.Queue()
    takers = [
        context.Process(target=_take_all, args=(str(directory), 100 * n, limit, results))
        for n in range(4)
    ]
    for taker in takers:
        taker.start()
    made = sum(results.get(timeout=30) for _ in takers)
    for taker in takers:
        taker.join(30)
    assert made == 7
    assert 7 * each <= allocated_bytes(directory) <= limit


def allocated_of(directory: Path) -> int:
    """What one segment really occupies."""
    directory.mkdir()
    Segment.create(directory / copy_name(0), make_layout(0, nbytes=64 << 10), None, NAMES)
    return allocated_bytes(directory)


def _be_killed_while_making(directory: str, limit: int) -> None:
    path = Path(directory) / copy_name(5)
    segment = Segment.create(
        path, make_layout(5, nbytes=1 << 20), None, (), budget=Budget(Path(directory), limit)
    )
    # As if the kill had come before the last rename.
    path.rename(path.with_name(f".{path.name}.{os.getpid()}"))
    segment.reserve(["shard"])
    os.kill(os.getpid(), signal.SIGKILL)


def test_unfinished_file_of_a_killed_process_is_removed(tmp_path):
    layout = make_layout(3, nbytes=1 << 20)
    limit = segment_bytes(layout) + (64 << 10)
    maker = multiprocessing.get_context("fork").Process(
        target=_be_killed_while_making, args=(str(tmp_path), limit)
    )
    maker.start()
    maker.join(30)
    assert maker.exitcode == -signal.SIGKILL
    assert allocated_bytes(tmp_path) > 2 << 20
    Segment.create(
        tmp_path / own_name(3, SEAT), layout, SEAT, NAMES, budget=Budget(tmp_path, limit)
    )
    assert allocated_bytes(tmp_path) <= limit


def _be_killed_while_taking(directory: str, limit: int) -> None:
    allocate = os.posix_fallocate

    def allocate_or_die(file: int, start: int, count: int) -> None:
        if count >= 1 << 20:
            os.kill(os.getpid(), signal.SIGKILL)
        allocate(file, start, count)

    os.posix_fallocate = allocate_or_die
    layout, path = make_layout(5, nbytes=1 << 20), Path(directory) / copy_name(5)
    Segment.create(path, layout, None, NAMES, budget=Budget(Path(directory), limit))


def test_reservation_of_a_killed_process_is_freed(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "_LOCK_SECONDS", 5.0)  # for who is still about to take it
    layout = make_layout(3, nbytes=1 << 20)
    limit = segment_bytes(layout) + (64 << 10)
    taker = multiprocessing.get_context("fork").Process(
        target=_be_killed_while_taking, args=(str(tmp_path), limit)
    )
    taker.start()
    taker.join(30)
    assert taker.exitcode == -signal.SIGKILL
    assert [*tmp_path.glob(".booked.*")]
    Segment.create(tmp_path / copy_name(3), layout, None, NAMES, budget=Budget(tmp_path, limit))
    assert not [*tmp_path.glob(".booked.*")]


def test_memory_is_filled_beside_others_and_counts_from_the_beginning(tmp_path, monkeypatch):
    """Filling gigabytes takes seconds: others take theirs meanwhile, within what is left."""
    layouts = [make_layout(role, nbytes=64 << 10) for role in range(3)]
    budget = Budget(tmp_path, 2 * allocated_of(tmp_path.with_name("one")) + 8192)
    filling, go_on = threading.Event(), threading.Event()
    fallocate, main = os.posix_fallocate, threading.main_thread()

    def slow(file: int, start: int, count: int) -> None:
        if threading.current_thread() is not main:
            filling.set()
            assert go_on.wait(30)
        fallocate(file, start, count)

    monkeypatch.setattr(os, "posix_fallocate", slow)

    def create(role: int) -> Segment:
        return Segment.create(tmp_path / copy_name(role), layouts[role], None, NAMES, budget=budget)

    first = threading.Thread(target=create, args=(0,))
    first.start()
    assert filling.wait(30)
    create(1)
    monkeypatch.setattr("deadpool_megatron.vault.memory._LOCK_SECONDS", 0.05)
    with pytest.raises(errors.OutOfSpace):
        create(2)
    go_on.set()
    first.join(30)
    assert {path.name for path in tmp_path.glob("*.seg")} == {copy_name(0), copy_name(1)}
    assert budget.used_bytes() <= budget.limit_bytes
    assert not list(tmp_path.glob(".booked.*"))


@given(
    nbytes=st.integers(1, 1 << 24),
    slots=st.integers(2, 4),
    roles=st.integers(1, 8),
    replicas=st.integers(1, 3),
    scheme=st.sampled_from(["buddy", "parity", "local", "local-twice"]),
    limit=st.integers(0, 1 << 32),
)
def test_needs_and_objection_agree(nbytes, slots, roles, replicas, scheme, limit):
    settings = Settings(protection=scheme, copies=replicas)
    layout = make_layout(0, nbytes=nbytes, slots=slots)
    needs = node_needs(layout, roles, settings)
    assert needs.own >= nbytes * slots * roles
    if scheme == "buddy":
        assert needs.kept >= nbytes * slots * roles * replicas
    assert (needs.kept == 0) == (scheme == "local")
    if scheme == "local-twice":
        assert needs.own - 150_000 * roles <= needs.kept <= needs.own, "whatever the replicas"
    text = problem(
        needs, [MemoryLimit("it", limit, "enlarge it"), MemoryLimit("other", 1 << 60, "no")]
    )
    assert bool(text) == (needs.total > limit)
    if text:
        assert str(needs.total) in text
        assert str(limit) in text
        assert "enlarge it" in text
    found = memory.warnings(needs, [MemoryLimit("it", limit, "enlarge it")], 1, pinned=True)
    assert any("lock" in line for line in found)
    assert any("tight" in line for line in found) == (needs.total <= limit < needs.peak)


@pytest.mark.parametrize(
    ("kind", "group"), [("buddy", 0), ("local", 0), ("local-twice", 0), ("parity", 2)]
)
def test_member_needs_the_memory_that_the_plan_calculates(kind, group):
    """And both for what the files take, but for the bound on the size of their descriptions."""
    roles = range(4)
    layouts = {role: make_layout(role, nbytes=1 << 20, peers=tuple(roles)) for role in roles}
    nodes = {role: role for role in roles}
    scene = Topology(layouts, nodes, {node: f"rack{node}" for node in roles}, (), 1)
    scheme = (
        SchemeNumbers(SchemeKind(kind), group=group) if group else SchemeNumbers(SchemeKind(kind))
    )
    settings = Settings(protection=kind, parity_group=group or 4)
    reckoned = memory_needs(ProtectionPlan(scheme), scene)
    needs = node_needs(layouts[0], 1, settings)
    assert sum(reckoned.values()) == len(roles) * needs.total
    assert 0 <= needs.own - segment_bytes(layouts[0]) <= PAGE_BYTES
