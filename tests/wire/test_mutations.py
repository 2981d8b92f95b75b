"""A live coordinator and live vaults under damaged conversations: refused, counted, unmoved."""

import json
import random
from typing import Any

import pytest
import xxhash

from deadpool_megatron.cluster.run_directory.directory import read_json
from deadpool_megatron.events import Kind
from deadpool_megatron.layout.records import Generation
from deadpool_megatron.vault.transport import realm_of
from deadpool_megatron.wire import auth, framing
from tests.cluster.runs import Run, deadpool
from tests.vault.harness import RUN_ID, Node, cluster, train, wait_until
from tests.vault.protected import FIRST, LAYOUTS, begin
from tests.wire import mutations

pytestmark = pytest.mark.slow

STRANGERS = 50  # with the insiders: the first 100 refusals are reported as events
INSIDERS = 80
SEED = 20


def status(run: Run) -> Any:
    return json.loads(deadpool("status", str(run.run.path), "--json").stdout)


def play(address: tuple[str, int], frames: list[bytes], random_: random.Random) -> None:
    """Strangers play a recorded session, as it was and damaged."""
    mutations.tell(address, b"".join(frames))
    for _ in range(STRANGERS - 1):
        mutations.tell(address, mutations.damaged(frames, random_))


def test_a_coordinator_under_damaged_conversations(tmp_path, monkeypatch):
    """Strangers play recorded sessions; then an agent of ours goes mad. The run ends well."""
    # Events quote the mad agent's own facts.
    monkeypatch.setattr("tests.common.finished_run.check_event", lambda values: None)
    with Run(tmp_path / "run", spares=0) as run:
        run.wait_iteration(2)
        place = read_json(run.run.coordinator)
        address, secret = (place["host"], place["port"]), auth.load_secret(run.run.path)
        run_id = run.run.read_run().run_id
        before = status(run)["refusals"]
        frames = [
            *mutations.recorded_handshake(address, secret, run_id),
            framing.encode({"t": "control", "command": "stop", "reason": "a stranger says so"}),
            framing.encode({**_JOIN, "node": 0}),
        ]
        random_ = random.Random(SEED)
        play(address, frames, random_)
        wanted = before + STRANGERS
        run.wait_for("all refusals", lambda: status(run)["refusals"] == wanted)
        _go_mad(address, secret, run_id, random_)
        run.wait_for("the end of the mad node", lambda: len(status(run)["nodes"]) == 2)
        assert read_json(run.run.coordinator)["pid"] == place["pid"]
        final = run.finish()
    assert final["recoveries"] == []
    refused = run.events(Kind.REFUSED)
    assert len([e for e in refused if e.data["who"] == "agent of node 7"]) > INSIDERS / 2
    assert not [e for e in refused if secret.decode() in str(e.data)]


_JOIN: dict[str, Any] = {
    "t": "join",
    "term": 0,
    "greeting": 1,
    "node": 7,
    "boot": "a",
    "host": "127.0.0.1",
    "vault_port": 1,
    "domain": "mad",
    "members": {},
    "incarnations": {},
    "restored": {},
}
_SEAT = {"slot": 0, "incarnation": 0}
_REPORTS: tuple[dict[str, Any], ...] = (
    {"t": "member-lost", **_SEAT, "exit_code": 1, "signal": 9, "last_line": "x"},
    {"t": "member-suspected", **_SEAT, "cause": "x", "silent_seconds": 1.0},
    {"t": "inventory", "inventory": {"node": 0, "epoch": 1, "holdings": [], "layouts": []}},
    {"t": "dumped", "generation": [1, 2], "boundary": "step", "error": ""},
    {"t": "member", **_SEAT, "m": {"t": "hello", "pid": 1}},
    {"t": "member", **_SEAT, "m": {"t": "restored", "epoch": 9, "generation": [1, 2]}},
    {"t": "member", **_SEAT, "m": {"t": "fault", "epoch": 9, "text": "x"}},
    {"t": "event", "event": {"kind": "log", "epoch": 1, "node": 7, "data": {"text": "x"}}},
)


def _go_mad(address: tuple[str, int], secret: bytes, run_id: str, random_: random.Random) -> None:
    """An agent that knows the secret joins as one more spare and talks nonsense."""
    for node in range(8, 11):  # a number that was gone is not taken again
        with auth.connect(address, secret, run_id, 20) as connection:
            framing.send(connection, mutations.strange({**_JOIN, "node": node}, random_))
            mutations.drain(connection)
    with auth.connect(address, secret, run_id, 20) as connection:
        framing.send(connection, _JOIN)
        assert framing.receive(connection)["t"] == "welcome"
        for number in range(1, INSIDERS + 1):
            message = mutations.strange(random_.choice(_REPORTS), random_)
            try:
                framing.send(connection, {"n": number, **message})
            except OSError:
                return  # it has had enough of us
        sent = {"b": float("nan"), "o": 0}
        framing.send(connection, {"t": "beat", "members": [], "vault": {}, **sent})
        mutations.drain(connection)


def test_a_vault_under_damaged_conversations(tmp_path):
    with cluster(tmp_path, 2) as running:
        members = begin(running)
        node = running.nodes[1]
        address, secret = ("127.0.0.1", node.port), auth.load_secret(running.directory)
        before, pid = node.status()["holdings"], node.process.pid
        handshake = mutations.recorded_handshake(address, secret, realm_of(RUN_ID, 1))
        frames = [*handshake, *map(framing.encode, _PUT), b"x" * 100]
        random_ = random.Random(SEED)
        counted = node.count("refused: connection")
        play(address, frames, random_)
        counted += STRANGERS
        wait_until(lambda: node.count("refused: connection") == counted, "they are counted")
        assert node.status()["holdings"] == before
        _insiders(node, secret, random_)
        assert (node.process.poll(), node.process.pid) == (None, pid)
        train(members, Generation(1, 1))


_DIGEST = xxhash.xxh3_64_intdigest(b"x" * 100)
_PARTS = [["shard", 100, _DIGEST], ["tail", 100, _DIGEST]]
_COMMON = {"epoch": 1, "node": 0, "role": 0, "generation": FIRST.to_list()}
_PUT: tuple[dict[str, Any], ...] = (
    {"t": "offer", "layout": LAYOUTS[0].to_dict()},
    {"t": "put", **_COMMON, "layout_hash": LAYOUTS[0].layout_hash, "parts": _PARTS},
    {"t": "fetch", **_COMMON, "part": "shard"},
    {"t": "describe", "role": 0, "generation": FIRST.to_list()},
)


def _insiders(node: Node, secret: bytes, random_: random.Random) -> None:
    """Vaults that know the secret and have lost their mind."""
    for _ in range(INSIDERS):
        address = ("127.0.0.1", node.port)
        with auth.connect(address, secret, realm_of(RUN_ID, 1), 20) as connection:
            offer, *others = _PUT
            if random_.random() < 0.7:
                framing.send(connection, offer)
            try:
                framing.send(connection, mutations.strange(random_.choice(others), random_))
                connection.sendall(random_.randbytes(random_.randrange(300)))
            except OSError:
                continue
            mutations.drain(connection)
