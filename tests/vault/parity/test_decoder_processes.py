"""Decoding by real vault processes: sources killed, epochs closed in the middle."""

from __future__ import annotations

import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from deadpool_megatron.cluster.process import posix
from deadpool_megatron.events import Kind
from deadpool_megatron.layout.records import EpochRecord
from deadpool_megatron.layout.schemes import Kind as SchemeKind
from deadpool_megatron.layout.schemes import ProtectionPlan, Scheme
from deadpool_megatron.vault.errors import VaultError
from tests.vault.harness import Cluster, Member, cluster, wait_until
from tests.vault.parity.coded import GENERATION, CodedGroup
from tests.vault.parity.decoding import plan, seats_of


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
        member = Member(running.nodes[4], coded.layouts[0])
        member.client.register(coded.layouts[0], 2)
        member.check(record, GENERATION)
        process = running.nodes[1].process
        assert process is not None
        assert process.wait(10) == -signal.SIGKILL
        (event,) = running.nodes[4].told(Kind.DECODED, part="shard")
        assert sorted(event.data["blocks"]) == ["2", "3"]
    finally:
        running.stop()


@pytest.mark.parametrize("kind", [SchemeKind.PARITY, SchemeKind.BUDDY])
def test_what_decoding_needs_is_loaded_before_anything_is_lost(
    tmp_path: Path, kind: SchemeKind
) -> None:
    """In a spare that holds nothing. Elsewhere it is not at all."""
    plan = ProtectionPlan(Scheme(kind, group=2))
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


def test_an_epoch_closed_while_decoding_seals_nothing(tmp_path: Path) -> None:
    """Rule 5: half of the bytes are in the slot, and count for nothing."""
    coded = CodedGroup(2, 1, nbytes=16 << 20)  # more than the buffers of a connection hold
    match = {"role": 0, "part": "shard"}
    fault = {"id": "stop", "point": "vault.decode", "match": match, "nth": 9, "signal": "STOP"}
    running, record = begin_processes(tmp_path, coded, [fault])
    spare = running.nodes[3]
    try:
        running.open(record)
        member = Member(spare, coded.layouts[0])
        member.client.register(coded.layouts[0], 2)
        assert spare.process is not None
        pid = spare.process.pid
        wait_until(lambda: (posix.state_and_cpu_ticks(pid) or "?")[0] == "T", "STOP")
        for source in running.nodes[1:3]:  # it cannot come to its end before it hears of the close
            source.send_signal(signal.SIGSTOP)
        order = threading.Thread(target=lambda: spare.close_epoch(2))
        order.start()
        spare.send_signal(signal.SIGCONT)
        order.join(20)
        held = spare.inventory().holdings
        assert not [h for h in held if h.role == 0 and "shard" in h.parts]
        with pytest.raises(VaultError):
            member.restore(record)
    finally:
        spare.send_signal(signal.SIGCONT)
        running.stop()
