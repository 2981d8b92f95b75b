"""Decoding by real vault processes: sources killed, epochs closed in the middle."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from deadpool_megatron.events import Kind
from deadpool_megatron.layout.records import EpochRecord
from deadpool_megatron.layout.schemes import Kind as SchemeKind
from deadpool_megatron.layout.schemes import ProtectionPlan, SchemeNumbers
from tests.vault.harness import Cluster, Member, cluster, wait_until
from tests.vault.schemes.coded import GENERATION, CodedGroup
from tests.vault.schemes.decoding import plan, seats_of


def begin_processes(
    directory: Path, coded: CodedGroup, faults: list[dict[str, object]]
) -> tuple[Cluster, EpochRecord]:
    """Role 0 and its node are lost, a spare takes over; epoch 2 is not open yet."""
    spare = coded.data + coded.parities
    more = {"connect_seconds": 10.0, "chunk_bytes": 64 << 10}
    running = Cluster(directory, spare + 1, coded.data, faults=faults, **more)
    coded.write({node.number: node.directory for node in running.nodes}, {0})
    live = running.nodes[1:]
    for node in live:
        node.start()
    for node in live:
        node.close_epoch(1)
    inventories = {node.number: node.inventory() for node in live}
    seats = seats_of(coded, {0}, spare)
    restore = plan(inventories, seats, coded.data)
    return running, running.record(2, restore, seats, gone={0})


def test_a_source_killed_while_it_sends_is_replaced(tmp_path: Path) -> None:
    coded = CodedGroup(2, 2, nbytes=2 << 20)
    match = {"role": 1, "node": 1, "part": "shard", "to": None}  # asked for it, not to a buddy
    fault = {"id": "cut", "point": "vault.chunk", "match": match, "nth": 9}
    running, record = begin_processes(tmp_path, coded, [fault])
    try:
        running.open(record)
        Member(running.nodes[4], coded.layouts[0], 2).check(record, GENERATION)
        running.nodes[1].await_killed()
        (event,) = running.nodes[4].told(Kind.DECODED, part="shard")
        assert sorted(event.data["blocks"]) == ["2", "3"]
    finally:
        running.stop()


@pytest.mark.parametrize("kind", [SchemeKind.PARITY, SchemeKind.BUDDY])
def test_what_decoding_needs_is_loaded_before_anything_is_lost(
    tmp_path: Path, kind: SchemeKind
) -> None:
    """In a spare that holds nothing. Elsewhere it is not at all."""
    plan = ProtectionPlan(SchemeNumbers(kind, group=2))
    with cluster(tmp_path, 1) as running:
        running.open(replace(running.record(1), protection=plan))
        process = running.nodes[0].process
        assert process is not None
        maps = Path(f"/proc/{process.pid}/maps")

        def loaded() -> bool:
            return "numpy" in maps.read_text()

        if kind is SchemeKind.PARITY:
            wait_until(loaded, "numpy is loaded")
        else:
            assert not loaded()
