"""The parts of a check: measuring order, id from a verdict, facts of this machine, bulk bytes."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from deadpool_megatron.preflight.assignment import LeftOut, assignment
from deadpool_megatron.preflight.board import Announcement, Board, State
from deadpool_megatron.preflight.roster import Roster
from deadpool_megatron.preflight.server import Server, connect
from hypothesis import given
from hypothesis import strategies as st

from deadpool_megatron.preflight import machine, stream
from deadpool_megatron.preflight.facts import NodeFacts, Wanted
from deadpool_megatron.preflight.judge import slow_or_unknown
from deadpool_megatron.preflight.schedule import buddy_pairs, rounds, second_look
from deadpool_megatron.wire import framing
from deadpool_megatron.wire.framing import WireError

SECRET = b"secret"


@given(st.integers(1, 40), st.integers(0, 5), st.integers(1, 5))
def test_a_node_is_measured_once_in_a_round(nodes: int, spares: int, racks: int) -> None:
    total = nodes + spares
    domains = {node: f"rack{node % racks}" for node in range(total)}
    pairs = buddy_pairs(nodes, total, domains)
    if total > 1:
        assert {node for pair in pairs for node in pair} >= set(range(nodes))
    assert sorted(pair for turn in rounds(pairs) for pair in turn) == pairs
    for turn in rounds(pairs):
        assert len({node for pair in turn for node in pair}) == 2 * len(turn)
    assert len(rounds(pairs)) <= 2 * nodes


def test_dead_nodes_are_no_buddies() -> None:
    alive = {node: f"node{node}" for node in (0, 1, 3)}
    assert buddy_pairs(4, 4, alive) == [(0, 1), (0, 3), (1, 3)]


def test_doubtful_nodes_get_another_partner() -> None:
    rates = {0: 1e9, 1: 1e9, 2: 1e8, 3: 1e9, 4: None, 5: 1e8}
    doubtful = slow_or_unknown(rates)
    assert doubtful == (2, 4, 5)
    pairs = second_look(doubtful, rates, [(0, 2), (2, 5), (1, 3)])
    assert pairs == [(2, 1), (4, 1), (5, 3)]
    assert second_look([0, 1], [0, 1], [(0, 1)]) == []
    assert second_look([0, 1, 2], [0, 1, 2], [(0, 1)]) == [(0, 2), (1, 2), (2, 0)]


CHECK = {
    "nodes": [
        {"node": 0, "hostname": "a", "id": 1, "reasons": []},
        {"node": 1, "hostname": "b", "id": None, "reasons": ["no shm", "old torch"]},
        {"node": 2, "hostname": "c", "id": 0, "reasons": []},
        {"node": 3, "hostname": "c", "id": 2, "reasons": []},
    ]
}


def test_the_id_that_an_agent_takes() -> None:
    assert assignment(CHECK, "a", 0) == 1
    assert assignment(CHECK, "a", 7) == 1  # another numbering: the host decides
    assert assignment(CHECK, "b", 1) == LeftOut("no shm; old torch")
    assert [assignment(CHECK, "c", node) for node in (2, 3)] == [0, 2]
    for host, node in (("c", 0), ("new", 0)):
        left_out = assignment(CHECK, host, node)
        assert isinstance(left_out, LeftOut)
        assert "took no part in the check" in left_out.reason


def test_facts_survive_json() -> None:
    facts = machine.RealInstruments().facts("127.0.0.1", "rack7")
    assert NodeFacts.from_dict(json.loads(json.dumps(facts.to_dict()))) == facts
    assert facts.interface == "lo"
    assert facts.interface_up
    assert facts.memory_bytes > 0
    assert {"python", "torch", "megatron-core", "deadpool-megatron"} <= facts.versions.keys()


def test_gpus_are_counted_by_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    program.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H100 (UUID: GPU-1)'\necho 'GPU 1: ...'\n")
    program.chmod(0o755)
    assert machine.count_gpus() == 2

    def hangs(*_: object, **options: float) -> None:
        raise subprocess.TimeoutExpired("nvidia-smi", options["timeout"])

    monkeypatch.setattr(subprocess, "run", hangs)
    assert machine.count_gpus() == 0


def test_other_attempts_and_broken_files_are_not_on_the_board(tmp_path: Path) -> None:
    mine = Announcement(3, "host", "127.0.0.1", 5, "x", "job7", State.WAITS, {})
    board = Board(tmp_path, "job7")
    board.post(mine)
    Board(tmp_path, "job6").post(Announcement(1, "h", "127.0.0.1", 5, "y", "job6", State.WAITS, {}))
    for number, text in enumerate(("", "[]", "{}", '{"node": 1}', "\x00")):
        (tmp_path / f"node-10{number}.json").write_text(text)
    assert board.read() == {3: mine}
    board.post(Announcement(3, "host", "127.0.0.1", 5, "x", "job7", State.OVER, {}))
    assert board.read() == {}


def join_message(node: int, wanted: Wanted) -> dict[str, Any]:
    facts = NodeFacts(hostname=f"host{node}").to_dict()
    place = {"host": "127.0.0.1", "port": 1}
    return {"t": "join", "node": node, "facts": facts, "wanted": vars(wanted), **place}


def test_a_number_is_taken_while_its_process_lives() -> None:
    roster = Roster(Wanted(2))
    first, first_peer = socket.socketpair()
    second, second_peer = socket.socketpair()
    with first, first_peer, second, second_peer:
        assert roster.take_in(first, join_message(1, Wanted(2)))
        assert framing.receive(first_peer) == {"t": "joined"}
        assert not roster.take_in(second, join_message(1, Wanted(2)))
        assert framing.receive(second_peer)["why"] == (
            "node 1 is on host host1 already: give each its own --node-id"
        )
        first_peer.close()
        assert roster.take_in(second, join_message(1, Wanted(2)))


def test_nodes_with_other_arguments_are_refused() -> None:
    roster = Roster(Wanted(2))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert not roster.take_in(ours, join_message(1, Wanted(2, spares=1)))
        assert framing.receive(theirs)["why"] == (
            "node 1 was started for 2 nodes, 1 spares, 1 processes each, the others for 2 nodes,"
            " 0 spares, 1 processes each: give all of them the same arguments"
        )
        with pytest.raises(WireError, match="malformed join"):
            roster.take_in(ours, {"t": "join", "node": "x"})
    assert roster.present() == []


def test_who_does_not_answer_is_lost_with_the_reason() -> None:
    roster = Roster(Wanted(3))
    pairs = [socket.socketpair() for _ in range(3)]
    for node, (ours, _) in enumerate(pairs):
        roster.take_in(ours, join_message(node, Wanted(3)))
    for _, theirs in pairs:
        assert framing.receive(theirs) == {"t": "joined"}
    framing.send(pairs[0][1], {"t": "reached"})
    pairs[1][1].close()
    found = roster.answers(roster.present(), "reach", 0.2)  # node 2 is frozen
    assert found == {0: {"t": "reached"}}
    assert [seat.lost for seat in roster.seats().values()] == [
        "",
        "it ended in the middle (connection closed)",
        "it did not answer 'reach' within 0.2 s",
    ]
    roster.close()
    for _, theirs in pairs:
        theirs.close()


def listening() -> tuple[socket.socket, tuple[str, int]]:
    listener = socket.create_server(("127.0.0.1", 0))
    return listener, listener.getsockname()


def test_a_stranger_gets_nothing_and_the_node_serves_on() -> None:
    listener, address = listening()
    with Server(listener, SECRET, node=4):
        with socket.create_connection(address, timeout=10) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            with suppress(ConnectionResetError):
                assert stranger.recv(100) == b""
        with pytest.raises(WireError):
            connect(address, b"another secret")
        with connect(address, SECRET) as connection:
            trip, clock = stream.echo(connection, 4)
            assert clock.error_seconds == trip / 2
            with pytest.raises(stream.WrongNode, match="node 4 answers there"):
                stream.echo(connection, 5)
            out, back = stream.measure(connection)
            assert min(out, back) > 0
        with connect(address, SECRET) as connection:
            framing.send(connection, {"t": "join"})  # it does not conduct
            assert framing.receive(connection) == {"t": "declined"}
            framing.send(connection, {"t": "no such request"})
            with pytest.raises(framing.ConnectionClosed):
                framing.receive(connection)


@pytest.mark.parametrize("nbytes", [0, -1, stream.PIECE_BYTES + 1, 1.5, "9", None])
def test_bulk_bytes_are_bounded(nbytes: object) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(10)
        framing.send(theirs, {"t": "bulk", "nbytes": nbytes})
        with pytest.raises(WireError, match="a piece of"):
            stream.take_bulk(ours)


def test_bulk_bytes_have_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(10)
        theirs.settimeout(10)
        sender = threading.Thread(target=stream.send_bulk, args=(theirs,))
        sender.start()
        assert stream.take_bulk(ours) > 0
        sender.join()
        monkeypatch.setattr(stream, "MOST_BYTES", 0)
        framing.send(theirs, {"t": "bulk", "nbytes": 1})
        with pytest.raises(WireError, match="more bytes"):
            stream.take_bulk(ours)
