"""The journal in etcd under what networks and servers do: answers lost, ends, pauses, strangers."""

from __future__ import annotations

import os
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from deadpool_megatron.cluster.journal.etcd import Credentials, EtcdClient, EtcdError, EtcdJournal
from deadpool_megatron.cluster.journal.journal import JournalError, LostRace, open_journal
from deadpool_megatron.settings import Settings
from tests.cluster.journal.etcd_server import EtcdServer, certificates_in
from tests.cluster.running import deadpool
from tests.common.ports import free_port
from tests.common.waiting import wait_for

SECONDS = 10.0


def client(*ports: int, seconds: float = SECONDS) -> EtcdClient:
    return EtcdClient([("127.0.0.1", port) for port in ports], Credentials(), seconds)


def journal(tmp_path: Path, *ports: int, seconds: float = SECONDS) -> EtcdJournal:
    return EtcdJournal(client(*ports, seconds=seconds), f"/tests{tmp_path}")


class LossyProxy:
    """Passes connections on to etcd; the answers of the first ``lost`` requests never arrive."""

    def __init__(self, target: int, lost: int) -> None:
        self._target, self.lost = target, lost
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> LossyProxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(SECONDS)

    def _serve(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            with near, socket.create_connection(("127.0.0.1", self._target)) as far:
                near.settimeout(SECONDS)
                self._pass(near, far)

    def _pass(self, near: socket.socket, far: socket.socket) -> None:
        """One request and its answer."""
        request = b""
        while b"\r\n\r\n" not in request:
            request += near.recv(65536)
        head, _, body = request.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split()[0])
        while len(body) < length:
            body += near.recv(65536)
        far.sendall(head + b"\r\nConnection: close\r\n\r\n" + body)
        answer = b""
        while piece := far.recv(65536):
            answer += piece
        if self.lost:
            self.lost -= 1
            return
        near.sendall(answer)


@pytest.mark.slow
@pytest.mark.parametrize("nbytes", [10, 3 << 20])
@pytest.mark.parametrize("lost", [1, 3])
def test_lost_answers_are_found_out(
    etcd: EtcdServer, tmp_path: Path, lost: int, nbytes: int
) -> None:
    """Each write was carried out, and is told so, however many of its answers are lost."""
    entry = {"text": os.urandom(nbytes // 2).hex()}
    with LossyProxy(etcd.port, lost) as proxy:
        journal(tmp_path, proxy.port).write("epoch", 1, entry)
        with pytest.raises(LostRace):
            journal(tmp_path, proxy.port).write("epoch", 1, {"text": "another"})
    assert journal(tmp_path, etcd.port).entries("epoch") == {1: entry}


def test_a_write_that_failed_may_be_tried_again(etcd: EtcdServer, tmp_path: Path) -> None:
    """All its answers were lost and it was given up, though it had been carried out."""
    with LossyProxy(etcd.port, 1000) as proxy:
        hasty, ours = (journal(tmp_path, proxy.port, seconds=s) for s in (0.1, SECONDS))

        def carried_out() -> bool:
            with pytest.raises(JournalError, match="cannot write"):
                hasty.write("epoch", 1, {"by": "first"})
            return journal(tmp_path, etcd.port).newest("epoch") is not None

        wait_for("a try that gets as far as etcd", carried_out)
        proxy.lost = 0
        with pytest.raises(LostRace):
            ours.write("epoch", 1, {"by": "first, with another mind"})
        ours.write("epoch", 1, {"by": "first"})
    assert journal(tmp_path, etcd.port).entries("epoch") == {1: {"by": "first"}}


def test_a_dead_endpoint_is_passed_over(etcd: EtcdServer, tmp_path: Path) -> None:
    both = journal(tmp_path, free_port(), etcd.port)
    both.write("epoch", 1, {"a": 1})
    both.beat("1 1")
    assert both.newest("epoch") == (1, {"a": 1})
    assert both.last_beat() == "1 1"


def test_no_endpoint_at_all_is_named_in_time(tmp_path: Path) -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        lone = journal(tmp_path, port, silent.getsockname()[1], seconds=0.2)
        for call in (
            lambda: lone.write("epoch", 1, {}),
            lambda: lone.entries("epoch"),
            lambda: lone.newest("term"),
        ):
            with pytest.raises(
                JournalError, match=rf"within 0\.2 s \(127\.0\.0\.1:{port}: .*refused"
            ):
                call()


@pytest.mark.slow
def test_a_call_ends_in_time_though_it_begins_a_round_late() -> None:
    """Two servers of three hang, as when they are stopped: the second round would take as long as
    the first one. A sign of life that comes so late is taken for none."""
    limit = 3.0
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        ports = (one.getsockname()[1], other.getsockname()[1], free_port())
        began = time.monotonic()
        with pytest.raises(EtcdError) as raised:
            client(*ports, seconds=limit).get("/tests/key")
    assert time.monotonic() - began < limit + 0.5
    assert all(f":{port}: " in str(raised.value) for port in ports)


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_etcd_goes_away_in_the_middle(tmp_path: Path, how: str) -> None:
    """What was said to be written is there, and nobody loses a race against himself."""
    server = EtcdServer(tmp_path)
    written: list[int] = []
    enough = threading.Event()
    over = threading.Event()

    def write() -> None:
        ours = journal(tmp_path, server.port, seconds=30)
        while not over.is_set():
            ours.write("epoch", len(written) + 1, {"number": len(written) + 1})
            written.append(len(written) + 1)
            enough.set()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(2 if how == "kill" else 1):
            enough.clear()
            assert enough.wait(SECONDS)
            if how == "kill":
                server.kill()
                server.start()
            else:
                server.stop()
                with pytest.raises(JournalError, match="timed out"):
                    journal(tmp_path, server.port, seconds=0.1).newest("epoch")
                server.go_on()
        enough.clear()
        assert enough.wait(SECONDS)
        over.set()
        writer.join(SECONDS)
        entries = journal(tmp_path, server.port).entries("epoch")
        assert list(entries) == written
        assert all(entry == {"number": number} for number, entry in entries.items())
    finally:
        over.set()
        server.kill()
        writer.join(SECONDS)


def test_damage_and_foreign_keys_are_named(etcd: EtcdServer, tmp_path: Path) -> None:
    base = f"/tests{tmp_path}"
    raw = client(etcd.port)
    ours = journal(tmp_path, etcd.port)
    large = {"text": os.urandom(2 << 20).hex()}
    ours.write("epoch", 1, large)
    chunk = raw.keys(f"{base}/chunk/")[1]
    kept = raw.get(chunk)
    assert kept is not None
    damaged = kept[:9] + bytes([kept[9] ^ 1]) + kept[10:]
    for value in (damaged, kept[:-1], b""):
        raw.put(chunk, value)
        with pytest.raises(JournalError, match="epoch/00000001 is damaged"):
            ours.entries("epoch")
    raw.delete(chunk + "/")
    raw.put(chunk, kept)
    assert ours.entries("epoch") == {1: large}
    raw.delete(f"{base}/chunk/")
    with pytest.raises(JournalError, match="is gone from etcd"):
        ours.newest("epoch")
    for head in (b"", b"[]\n", b"{}\n", b'{"writer": "x", "chunks": 0, "bytes": 2}\nxx', b"\xff"):
        raw.put(f"{base}/term/00000007", head)
        with pytest.raises(JournalError, match="term/00000007 is damaged"):
            ours.newest("term")
        with pytest.raises((LostRace, JournalError)):
            ours.write("term", 7, {})
    raw.put(f"{base}/node/x", b"")
    with pytest.raises(JournalError, match="node/x does not belong"):
        ours.entries("node")


def test_etcd_under_tls(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = certificates_in(tmp_path_factory.mktemp("etcd-tls"))
    server = EtcdServer(tmp_path, files)
    place = f"etcds://{server.endpoint}/secure"
    settings = Settings(journal=place, connect_seconds=2 * SECONDS)
    try:
        monkeypatch.setenv("ETCDCTL_CACERT", files["authority"])
        with pytest.raises(JournalError, match="etcd does not answer"):
            open_journal(replace(settings, connect_seconds=0.5), "r", tmp_path).entries("epoch")
        monkeypatch.setenv("ETCDCTL_CERT", files["certificate"])
        monkeypatch.setenv("ETCDCTL_KEY", files["key"])
        open_journal(settings, "r", tmp_path).write("epoch", 1, {"a": 1})
        assert open_journal(settings, "r", tmp_path).entries("epoch") == {1: {"a": 1}}
        monkeypatch.setenv("ETCDCTL_KEY", str(tmp_path / "none"))
        with pytest.raises(JournalError, match=r"certificates cannot be loaded .*none"):
            open_journal(settings, "r", tmp_path)
    finally:
        server.kill()


def test_users_of_etcd(tmp_path: Path) -> None:
    server = EtcdServer(tmp_path)
    try:
        for path, message in (
            ("role/add", {"name": "root"}),
            ("user/add", {"name": "root", "password": "pa:ss"}),
            ("user/grant", {"user": "root", "role": "root"}),
            ("enable", {}),
        ):
            client(server.port)._call("set up", f"/v3/auth/{path}", message)
        endpoint = [("127.0.0.1", server.port)]
        known = EtcdClient(endpoint, Credentials(None, "root", "pa:ss"), SECONDS)
        EtcdJournal(known, "/a").write("epoch", 1, {"a": 1})
        server.kill()  # tokens of etcd's simple kind do not outlive it
        server.start()
        assert EtcdJournal(known, "/a").entries("epoch") == {1: {"a": 1}}
        wrong = EtcdClient(endpoint, Credentials(None, "root", "secret-guess"), SECONDS)
        for stranger in (wrong, client(server.port)):
            with pytest.raises(EtcdError, match="etcd refuses") as caught:
                stranger.get("/a")
            assert "secret-guess" not in str(caught.value)
        assert "pa:ss" not in repr(Credentials(None, "root", "pa:ss"))
    finally:
        server.kill()


def test_an_etcd_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    place = f"etcd://127.0.0.1:{free_port()}/runs"
    size = ("--nodes", "2", "--nproc-per-node", "1", "--deadpool-set", "connect-seconds=0.4")
    member = str(Path(__file__).parents[1] / "counting_member.py")
    done = deadpool(
        *("run", *size, "--run-dir", str(tmp_path / "run"), "--preload", ""),
        *("--deadpool-journal", place, "--", member),
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "cannot read" in done.stderr
