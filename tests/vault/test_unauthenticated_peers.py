"""Other vaults and strangers: nothing is accepted that is stale, abandoned or malformed."""

import errno
import math
import os
import socket
import time
from dataclasses import replace
from typing import Any

import xxhash

from deadpool_megatron.events import Kind
from deadpool_megatron.layout.records import Generation, RoleLayout
from deadpool_megatron.vault.transport import realm_of
from deadpool_megatron.wire import auth, framing
from tests.vault.harness import RUN_ID, Cluster, cluster, make_layout, wait_until
from tests.vault.protected import FIRST, LAYOUTS, begin


class Peer:
    """A vault of the run, as far as the handshake goes, that says what a test wants."""

    def __init__(self, running: Cluster, node: int) -> None:
        secret = auth.load_secret(running.directory)
        address = ("127.0.0.1", running.nodes[node].port)
        self.socket = auth.connect(address, secret, realm_of(RUN_ID, node), 10.0)

    def put(
        self,
        epoch: int,
        payload: bytes,
        *,
        generation: Generation | None = None,
        layout: RoleLayout | None = None,
        nbytes: int | None = None,
        checksum: int | None = None,
    ) -> dict[str, Any]:
        chosen = layout or LAYOUTS[0]
        framing.send(self.socket, {"t": "offer", "layout": chosen.to_dict()})
        digest = xxhash.xxh3_64_intdigest(payload) if checksum is None else checksum
        size = len(payload) if nbytes is None else nbytes
        framing.send(
            self.socket,
            {
                "t": "put",
                "epoch": epoch,
                "node": 0,
                "role": 0,
                "generation": (generation or Generation(epoch, 7)).to_list(),
                "layout_hash": chosen.layout_hash,
                "parts": [["shard", size, digest]],
            },
        )
        return framing.receive(self.socket)


def test_puts_that_are_not_accepted(tmp_path):
    """Of sizes that no copy has; test_life.py has what else is refused."""
    with cluster(tmp_path, 2) as running:
        begin(running)
        node = running.nodes[1]
        before = node.status()["holdings"]

        def refused(**options: Any) -> str:
            answer = Peer(running, 1).put(1, b"x" * 100, **options)
            assert answer["t"] == "refused"
            return str(answer["why"])

        assert refused(layout=make_layout(0, 999)) == "no copy possible"
        # The hash does not cover the room for extras: the copy has been made with less.
        first, *others = LAYOUTS[0].parts
        roomier = replace(LAYOUTS[0], parts=(replace(first, nbytes=2 * first.nbytes), *others))
        assert refused(layout=roomier, nbytes=2 * first.nbytes) == "no copy possible"
        assert node.status()["holdings"] == before
        assert node.count("refused") == 2
        node.told(Kind.REFUSED)


def test_an_epoch_closed_before_the_last_byte(tmp_path):
    """Judged again after the last byte: what arrives then is not sealed."""
    with cluster(tmp_path, 2) as running:
        begin(running)
        peer = Peer(running, 1)
        payload = os.urandom(50_000)
        assert peer.put(1, payload, generation=Generation(1, 1))["parts"] == ["shard"]
        peer.socket.sendall(payload[:-1])
        time.sleep(0.05)  # lets it receive; the outcome may not depend on it
        inventory = running.close(1)[1]
        try:
            peer.socket.sendall(payload[-1:])
            answer = framing.receive(peer.socket)
        except (OSError, framing.WireError):
            answer = {"t": "cut"}
        assert answer["t"] in ("cut", "refused")
        assert running.nodes[1].inventory() == inventory
        assert all(h.generation == FIRST for h in inventory.holdings)
        assert Peer(running, 1).put(1, payload)["why"] == "stale"


def test_a_put_with_a_wrong_checksum_is_not_kept(tmp_path):
    with cluster(tmp_path, 2) as running:
        begin(running)
        peer = Peer(running, 1)
        assert peer.put(1, b"y" * 1000, generation=Generation(1, 1), checksum=1)["t"] == "need"
        peer.socket.sendall(b"y" * 1000)
        assert framing.receive(peer.socket) == {"t": "sealed", "parts": []}
        assert all(h.generation == FIRST for h in running.close(1)[1].holdings)


def is_cut(connection: socket.socket) -> bool:
    """True when the other side ends the connection instead of answering."""
    connection.settimeout(10)
    try:
        return connection.recv(100) == b""
    except ConnectionResetError:  # it had not read everything
        return True


def test_connections_are_refused_once_the_agent_has_ended_and_no_sooner(tmp_path):
    """Between two vaults the agent holds the socket; after its agent no vault holds it."""
    with cluster(tmp_path, 1) as running:
        (node,) = running.nodes

        def is_refused():
            with socket.socket() as peer:
                return peer.connect_ex(("127.0.0.1", node.port)) == errno.ECONNREFUSED

        node.kill()
        assert not is_refused()
        node.start()
        assert not is_refused()
        node.tcp.close()
        assert not is_refused()
        node.loop(node.control.close())
        wait_until(is_refused, "the vault to close it")


def test_an_infinite_number_ends_no_vault(tmp_path):
    """Of a process on its node, or of its agent."""
    with cluster(tmp_path, 1) as running:
        (node,) = running.nodes
        pid = node.status()["pid"]
        hello = {"t": "member", "layout": LAYOUTS[0].to_dict(), "seat": [0, math.inf, 0]}
        with socket.socket(socket.AF_UNIX) as member:
            member.connect(node.socket_path)
            framing.send(member, {**hello, "has_slots": 0})
            assert is_cut(member)
        with socket.socket(socket.AF_UNIX) as agent:
            agent.connect(node.socket_path)
            for message in ({"t": "agent"}, {"t": "close", "id": 1, "epoch": math.inf}):
                framing.send(agent, message)
            assert framing.receive(agent)["ok"] is False

        assert node.status()["pid"] == pid
